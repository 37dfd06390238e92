//! Packs a state into sixteen bytes.
//!
//! Every state contains its expiry, the time from which it equals a fresh state. The store drops it then and not
//! before, without reading the policy, which may have changed. The expiry is stored as a start in microseconds and a
//! length that is rounded up by at most a thousandth. States that do not fit (logs, slots, counts in the hundreds of
//! millions) are outside of the table, and the entry contains their index.
//!
//! ```text
//!  bits   3      17        53         55
//!        kind   length   start      level | count | prev and cur | index outside of the table
//! ```

use tollkeeper_core::algorithm::{State, StoredState, fixed_window, meter, sliding_window};
use tollkeeper_core::{CheckedQuota, Time};

/// A state in sixteen bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packed(u128);

/// What a packed state contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StateKind {
    Meter,
    FixedWindow,
    SlidingWindow,
    /// The index of a state outside of the table.
    Wide(u32),
    /// Not a state: the marker of a corrected charge.
    Marker,
}

const METER: u128 = 1;
const FIXED_WINDOW: u128 = 2;
const SLIDING_WINDOW: u128 = 3;
const WIDE: u128 = 4;
const MARKER: u128 = 5;

const START_BITS: u32 = 53;
const PAYLOAD_BITS: u32 = 55;
const COUNT_BITS: u32 = 27;

impl Packed {
    pub(super) const NONE: Packed = Packed(0);

    /// The state of a bucket.
    #[inline]
    pub(super) fn meter(quota: &CheckedQuota, state: meter::State) -> Packed {
        let tick = quota.tick().span().as_micros();
        let life = quota.drain_ticks(state.level).saturating_mul(tick);
        Packed::new(METER, state.at * tick, life, state.level)
    }

    /// The state of a fixed window.
    #[inline]
    pub(super) fn fixed_window(quota: &CheckedQuota, shift: u64, state: fixed_window::State) -> Packed {
        // Only the very first window of a shifted key would start before the epoch, and it ended long ago.
        let start = (state.window * quota.period_ticks()).saturating_sub(shift);
        Packed::new(FIXED_WINDOW, start, fixed_window::fresh_at(quota, state, shift) - start, state.count)
    }

    /// The state of a sliding window; `None` if its counts do not fit.
    #[inline]
    pub(super) fn sliding_window(quota: &CheckedQuota, state: sliding_window::State) -> Option<Packed> {
        if state.prev >= 1 << COUNT_BITS || state.cur >= 1 << COUNT_BITS {
            return None;
        }
        let tick = quota.tick().span().as_micros();
        let start = state.window * quota.period_ticks();
        let life = (sliding_window::fresh_at(quota, state) - start) * tick;
        Some(Packed::new(SLIDING_WINDOW, start * tick, life, state.prev << COUNT_BITS | state.cur))
    }

    /// Packs any state; `None` if it does not fit.
    pub(super) fn pack(quota: &CheckedQuota, shift: u64, state: &State) -> Option<Packed> {
        match state {
            State::Meter(state) => Some(Packed::meter(quota, *state)),
            State::FixedWindow(state) => Some(Packed::fixed_window(quota, shift, *state)),
            State::SlidingWindow(state) => Packed::sliding_window(quota, *state),
            State::SlidingLog(_) | State::Concurrency(_) => None,
        }
    }

    /// A state outside of the table that equals a fresh one at `expires`.
    pub(super) fn wide(expires: Time, index: u32) -> Packed {
        Packed::new(WIDE, expires.as_micros(), 0, u64::from(index))
    }

    /// The marker of a corrected charge, which is void at `expires`.
    pub(super) fn marker(expires: Time) -> Packed {
        Packed::new(MARKER, expires.as_micros(), 0, 0)
    }

    #[inline]
    fn new(kind: u128, start: u64, life: u64, payload: u64) -> Packed {
        debug_assert!(start < 1 << START_BITS && payload < 1 << PAYLOAD_BITS);
        let length = u128::from(round_up(life));
        Packed(kind << 125 | length << 108 | u128::from(start) << PAYLOAD_BITS | u128::from(payload))
    }

    /// The bits that a snapshot stores.
    pub(super) fn to_bits(self) -> u128 {
        self.0
    }

    /// Decodes the bits from a snapshot; `None` if they are invalid.
    pub(super) fn from_bits(bits: u128) -> Option<Packed> {
        let packed = Packed(bits);
        let known = match bits >> 125 {
            WIDE => u32::try_from(packed.payload()).is_ok(),
            kind => (METER..=MARKER).contains(&kind),
        };
        known.then_some(packed)
    }

    #[inline]
    pub(super) fn kind(self) -> StateKind {
        match self.0 >> 125 {
            METER => StateKind::Meter,
            FIXED_WINDOW => StateKind::FixedWindow,
            SLIDING_WINDOW => StateKind::SlidingWindow,
            WIDE => StateKind::Wide(u32::try_from(self.payload()).expect("32 bits were packed")),
            _ => StateKind::Marker,
        }
    }

    /// The time at which the state equals a fresh one, or a little later because of the rounding.
    #[inline]
    pub(super) fn expires(self) -> Time {
        let length = u64::try_from(self.0 >> 108 & 0x1_ffff).expect("17 bits");
        Time::from_micros(self.start().saturating_add(length_of(length)))
    }

    /// The state of a bucket. The key must be that of a bucket limit: such a key has no other kind of state.
    #[inline]
    pub(super) fn as_meter(self, quota: &CheckedQuota) -> meter::State {
        meter::State { level: self.payload(), at: quota.tick().number(Time::from_micros(self.start())) }
    }

    /// The state; `None` if it is outside of the table.
    #[inline]
    pub(super) fn stored(self, quota: &CheckedQuota, shift: u64) -> Option<StoredState<'static>> {
        let start = Time::from_micros(self.start());
        match self.kind() {
            StateKind::Meter => Some(StoredState::Meter(self.as_meter(quota))),
            StateKind::FixedWindow => Some(StoredState::FixedWindow(fixed_window::State {
                window: (start.as_micros() + shift) / quota.period_ticks(),
                count: self.payload(),
            })),
            StateKind::SlidingWindow => Some(StoredState::SlidingWindow(sliding_window::State {
                window: start.as_micros() / quota.period().as_micros(),
                prev: self.payload() >> COUNT_BITS,
                cur: self.payload() & ((1 << COUNT_BITS) - 1),
            })),
            StateKind::Wide(_) | StateKind::Marker => None,
        }
    }

    #[inline]
    fn start(self) -> u64 {
        u64::try_from(self.0 >> PAYLOAD_BITS & ((1 << START_BITS) - 1)).expect("53 bits")
    }

    #[inline]
    fn payload(self) -> u64 {
        u64::try_from(self.0 & ((1 << PAYLOAD_BITS) - 1)).expect("55 bits")
    }
}

const MANTISSA_BITS: u32 = 11;

/// Encodes a length, rounded up, as a floating-point number: six bits of exponent, eleven of mantissa.
#[inline]
fn round_up(life: u64) -> u64 {
    let exponent = (64 - life.leading_zeros()).saturating_sub(MANTISSA_BITS);
    let mantissa = life.saturating_add((1 << exponent) - 1) >> exponent;
    // Rounding up may give a mantissa of 2^11, which does not fit: halve it and increment the exponent.
    let carry = mantissa >> MANTISSA_BITS;
    (u64::from(exponent) + carry) << MANTISSA_BITS | (mantissa >> carry)
}

/// Decodes a length that [`round_up`] has encoded.
#[inline]
fn length_of(code: u64) -> u64 {
    (code & ((1 << MANTISSA_BITS) - 1)) << (code >> MANTISSA_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollkeeper_core::{Algorithm, Quota, Span};

    #[test]
    fn a_length_is_rounded_up_by_at_most_a_thousandth() {
        let mut life = 1u64;
        while life < 1 << 53 {
            for near in [life - 1, life, life + 1, life + life / 3] {
                let rounded = length_of(round_up(near));
                assert!(rounded >= near && rounded - near <= near / 1000, "{near} became {rounded}");
            }
            life *= 2;
        }
    }

    fn quota(algorithm: Algorithm, count: u64, period: Span) -> CheckedQuota {
        CheckedQuota::new(algorithm, Quota::every(count, period)).expect("valid")
    }

    #[test]
    fn packed_state_unpacks_to_itself() {
        let now = 1_760_000_000_000_000;
        let check = |state: State, quota: &CheckedQuota, shift| {
            let packed = Packed::pack(quota, shift, &state).expect("fits");
            assert_eq!(packed.stored(quota, shift), Some(state.stored()));
        };
        for (count, period) in [(5, 1), (37_529_996, 60), (625_499_948, 3_600), (868_749_928, 30 * 86_400)] {
            let quota_of = |algorithm| quota(algorithm, count, Span::from_secs(period));
            let bucket = quota_of(Algorithm::TokenBucket);
            let at = bucket.tick().number(Time::from_micros(now));
            for level in [0, 1, bucket.capacity(), 2 * bucket.capacity()] {
                check(State::Meter(meter::State { level, at }), &bucket, 0);
            }
            let fixed = quota_of(Algorithm::FixedWindow);
            for shift in [0, 1, 999_999] {
                let window = (now + shift) / fixed.period_ticks();
                check(State::FixedWindow(fixed_window::State { window, count: 2 * count }), &fixed, shift);
            }
            let sliding = quota_of(Algorithm::SlidingWindow);
            let window = sliding.tick().number(Time::from_micros(now)) / sliding.period_ticks();
            for (prev, cur) in [(0, 1), (5, 0), ((1 << 27) - 1, (1 << 27) - 1)] {
                check(State::SlidingWindow(sliding_window::State { window, prev, cur }), &sliding, 0);
            }
            let large = State::SlidingWindow(sliding_window::State { window, prev: 1 << 27, cur: 0 });
            assert_eq!(Packed::pack(&sliding, 0, &large), None);
        }
    }

    #[test]
    fn a_state_expires_when_it_is_fresh_and_never_before() {
        let bucket = quota(Algorithm::TokenBucket, 7, Span::from_secs(60));
        let at = 1_760_000_000_000_000;
        let state = State::Meter(meter::State { level: 3 * 60_000_000, at });
        let fresh = state.fresh_at(&bucket, 0).as_micros();
        let expires = Packed::pack(&bucket, 0, &state).expect("fits").expires().as_micros();
        assert!(
            expires >= fresh && expires <= fresh + 2 + (fresh - at) / 1000,
            "expires at {expires}, fresh at {fresh}"
        );
    }
}
