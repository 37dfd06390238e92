//! Encodes states as the bytes that Redis stores: the twin of `state.lua`.
//!
//! A state is packed into 12 bytes if it fits, because that is the longest value that Redis holds in its smallest
//! allocation (32 bytes with the object around it). Otherwise it takes a few bytes more:
//!
//! | | short | long |
//! |---|---|---|
//! | buckets | at 7, level 5 | at 7, level 7 |
//! | fixed-window | window 6, count 6 | window 6, count 7 |
//! | sliding-window | window 6, cur 3, prev 3 | window 6, cur 6, prev 6 |
//! | sliding-log | a stamp 7, for each unit | |
//! | concurrency | holder 8, taken 7, expires 7, for each slot | |
//!
//! All are big-endian unsigned integers, with their width in bytes. The version of this format is part of a key's
//! name. A value that cannot be a state, by its length or by numbers that no step produces, is treated as missing.

use tollkeeper_core::algorithm::{State, concurrency, fixed_window, meter, sliding_log, sliding_window};
use tollkeeper_core::{Algorithm, CheckedQuota};

/// Lua numbers represent integers below this exactly.
const EXACT: u64 = 1 << 53;

/// Encodes a state.
pub fn encode(state: &State) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(12);
    match state {
        State::Meter(meter::State { level, at }) => {
            push(&mut bytes, 7, *at);
            push(&mut bytes, if *level < 1 << 40 { 5 } else { 7 }, *level);
        }
        State::FixedWindow(fixed_window::State { window, count }) => {
            push(&mut bytes, 6, *window);
            push(&mut bytes, if *count < 1 << 48 { 6 } else { 7 }, *count);
        }
        State::SlidingWindow(sliding_window::State { window, prev, cur }) => {
            let width = if *prev < 1 << 24 && *cur < 1 << 24 { 3 } else { 6 };
            push(&mut bytes, 6, *window);
            push(&mut bytes, width, *cur);
            push(&mut bytes, width, *prev);
        }
        State::SlidingLog(log) => bytes.extend_from_slice(log),
        State::Concurrency(slots) => {
            for slot in slots {
                push(&mut bytes, 8, slot.id);
                push(&mut bytes, 7, slot.taken);
                push(&mut bytes, 7, slot.expires);
            }
        }
    }
    bytes
}

/// Decodes the state of a key with this quota; `None` if the bytes cannot be such a state.
pub fn decode(quota: &CheckedQuota, bytes: &[u8]) -> Option<State> {
    let mut rest = bytes;
    match (quota.algorithm(), bytes.len()) {
        (Algorithm::TokenBucket | Algorithm::LeakyBucket, 12 | 14) => {
            let (at, level) = (take(&mut rest, 7), take(&mut rest, bytes.len() - 7));
            (level < EXACT).then_some(State::Meter(meter::State { level, at }))
        }
        (Algorithm::FixedWindow, 12 | 13) => {
            let (window, count) = (take(&mut rest, 6), take(&mut rest, bytes.len() - 6));
            (count < EXACT).then_some(State::FixedWindow(fixed_window::State { window, count }))
        }
        (Algorithm::SlidingWindow, 12 | 18) => {
            let width = (bytes.len() - 6) / 2;
            let (window, cur, prev) = (take(&mut rest, 6), take(&mut rest, width), take(&mut rest, width));
            let weight = u128::from(prev + cur) * u128::from(quota.period_ticks());
            (weight < u128::from(EXACT)).then_some(State::SlidingWindow(sliding_window::State {
                window,
                prev,
                cur,
            }))
        }
        (Algorithm::SlidingLog, len) if len % sliding_log::STAMP == 0 => {
            Some(State::SlidingLog(bytes.to_vec()))
        }
        (Algorithm::Concurrency, len) if len % SLOT == 0 => {
            let slot = |mut bytes: &[u8]| concurrency::Slot {
                id: take(&mut bytes, 8),
                taken: take(&mut bytes, 7),
                expires: take(&mut bytes, 7),
            };
            Some(State::Concurrency(bytes.chunks_exact(SLOT).map(slot).collect()))
        }
        _ => None,
    }
}

/// The length of an encoded slot in bytes.
const SLOT: usize = 22;

/// Appends the lowest `width` bytes of a number, big-endian.
pub(super) fn push(bytes: &mut Vec<u8>, width: usize, number: u64) {
    debug_assert!(width == 8 || number >> (8 * width) == 0, "{number} does not fit into {width} bytes");
    bytes.extend_from_slice(&number.to_be_bytes()[8 - width..]);
}

/// Takes a big-endian number of `width` bytes off the front. Panics if there are fewer bytes.
pub(super) fn take(bytes: &mut &[u8], width: usize) -> u64 {
    let (number, rest) = bytes.split_at(width);
    *bytes = rest;
    number.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollkeeper_core::{Quota, Span};

    fn quota(algorithm: Algorithm) -> CheckedQuota {
        let rate = Quota::every(100, Span::from_secs(60));
        CheckedQuota::new(algorithm, rate).expect("valid")
    }

    /// The most common states take 12 bytes.
    #[test]
    fn states_survive_encoding_and_have_the_expected_size() {
        let slot =
            |id| concurrency::Slot { id, taken: 1_800_000_000_000_000, expires: 1_800_000_060_000_000 };
        for (algorithm, state, len) in [
            (
                Algorithm::TokenBucket,
                State::Meter(meter::State { level: (1 << 40) - 1, at: 1_800_000_000_000_000 }),
                12,
            ),
            (Algorithm::LeakyBucket, State::Meter(meter::State { level: 1 << 40, at: (1 << 53) - 1 }), 14),
            (
                Algorithm::FixedWindow,
                State::FixedWindow(fixed_window::State { window: 1 << 43, count: (1 << 48) - 1 }),
                12,
            ),
            (
                Algorithm::FixedWindow,
                State::FixedWindow(fixed_window::State { window: 1 << 43, count: 1 << 48 }),
                13,
            ),
            (
                Algorithm::SlidingWindow,
                State::SlidingWindow(sliding_window::State { window: 1 << 43, prev: 7, cur: (1 << 24) - 1 }),
                12,
            ),
            (
                Algorithm::SlidingWindow,
                State::SlidingWindow(sliding_window::State { window: 1 << 43, prev: 1 << 24, cur: 7 }),
                18,
            ),
            (Algorithm::SlidingLog, State::SlidingLog(vec![1, 2, 3, 4, 5, 6, 7]), 7),
            (Algorithm::Concurrency, State::Concurrency(vec![slot(7), slot(u64::MAX)]), 44),
        ] {
            let bytes = encode(&state);
            assert_eq!(bytes.len(), len, "{state:?}");
            assert_eq!(decode(&quota(algorithm), &bytes), Some(state));
        }
    }

    #[test]
    fn invalid_state_is_not_decoded() {
        for algorithm in Algorithm::ALL {
            let quota = quota(algorithm);
            for len in [1, 11, 15, 17, 19, 20] {
                assert_eq!(decode(&quota, &vec![1; len]), None, "{algorithm}: {len} bytes");
            }
        }
        for (algorithm, len) in
            [(Algorithm::TokenBucket, 14), (Algorithm::FixedWindow, 13), (Algorithm::SlidingWindow, 18)]
        {
            assert_eq!(decode(&quota(algorithm), &vec![0xff; len]), None, "{algorithm}: too large");
        }
    }
}
