//! Leases: units that a store grants to a node in advance, and for how long.
//!
//! A lease is an ordinary charge on a raised level (see [`meter::lease`](crate::algorithm::meter::lease)), so exact and
//! leased nodes share a store. A node spends the units without asking the store, and loses what it has not spent when
//! the lease ends.

use core::fmt;

use crate::algorithm::State;
use crate::key::Key;
use crate::limit::Consistency;
use crate::policy::{Policy, Rule};
use crate::quota::{Algorithm, CheckedQuota};
use crate::time::{Span, Tick, Time};
use crate::toll::Due;

/// The terms of the leases of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// How long granted units can be spent: at most a second, and at least 20 ms for a bucket.
    pub life: Span,
    /// What a bucket drains in that time, at the largest rate that its limit has; 0 for a window.
    pub raise: u64,
    /// The largest count of the limit, under which `raise` was computed.
    pub largest: u64,
}

const LONGEST_LIFE: Span = Span::from_secs(1);
const SHORTEST_LIFE: Span = Span::from_millis(20);
/// A lease of a bucket refills at least this many units in its life.
const LEAST_REFILL: u64 = 16;
/// A bucket is raised by at most this part of its capacity.
const RAISED_PART: u64 = 16;
/// The smallest count of a window that is leased.
const LEAST_WINDOW: u64 = 256;

impl Lease {
    /// Whether limits with this algorithm can be leased.
    pub fn has(algorithm: Algorithm) -> bool {
        matches!(algorithm, Algorithm::TokenBucket | Algorithm::FixedWindow | Algorithm::SlidingWindow)
    }

    /// The terms for the key of a due of this policy; `None` if its limit is exact, or too small.
    #[inline]
    pub fn of_due(due: &Due<'_>, policy: &Policy) -> Option<Lease> {
        Lease::of_rule(due.rule, due.quota, policy)
    }

    #[inline]
    fn of_rule(rule: &Rule, quota: &CheckedQuota, policy: &Policy) -> Option<Lease> {
        match rule.consistency() {
            Consistency::Exact => None,
            Consistency::Leased => Lease::of(quota, policy.largest_count(rule, quota.period())).ok(),
        }
    }

    /// The terms for a key with this quota. `largest` is the largest count that any tier or override of its limit has:
    /// the tier of a key can change while a lease lives, and its bucket then drains at that rate.
    pub fn of(quota: &CheckedQuota, largest: u64) -> Result<Lease, NotLeased> {
        let largest = largest.max(quota.count());
        if quota.count() == 0 {
            return Err(NotLeased::Nothing);
        }
        match quota.algorithm() {
            Algorithm::TokenBucket => {
                // In whole ticks, so that what drains in a life is a whole number, too.
                let life = ticks(quota, LONGEST_LIFE).min(quota.capacity() / (RAISED_PART * largest));
                if !is_long_enough(quota, life) {
                    return Err(NotLeased::TooSmall(large_enough(quota, largest)));
                }
                let span = Span::from_micros(life * quota.tick().span().as_micros());
                Ok(Lease { life: span, raise: life * largest, largest }) // at most a sixteenth of the capacity
            }
            Algorithm::FixedWindow | Algorithm::SlidingWindow if quota.count() < LEAST_WINDOW => {
                Err(NotLeased::TooSmall(LargeEnough::Count(LEAST_WINDOW)))
            }
            Algorithm::FixedWindow | Algorithm::SlidingWindow => {
                Ok(Lease { life: quota.period().min(LONGEST_LIFE), raise: 0, largest })
            }
            algorithm => Err(NotLeased::Algorithm(algorithm)),
        }
    }

    /// When the window of a state ends, in which units were granted: they must be spent before. `None` for a bucket.
    pub fn window_end(quota: &CheckedQuota, state: &State, shift: u64) -> Option<Time> {
        let window = match state {
            State::FixedWindow(state) => state.window,
            State::SlidingWindow(state) => state.window,
            _ => return None,
        };
        let end = (window + 1) * quota.period_ticks() * quota.tick().span().as_micros();
        Some(Time::from_micros(end - shift))
    }

    /// How many ticks older than it is a charge to this key counts when it is refunded: as long as the longest lease of
    /// the key lives; 0 for a window, and for a limit that is not leased.
    ///
    /// The raise of a lease absorbs charges: a level of 6 that is raised to 10 is as high as one of 10. Giving back 6 of
    /// it would leave 4 of the raise, and the level would no longer bound what is spent. Only what was charged above the
    /// raise can be given back.
    pub fn refund_age(key: Key<'_>, policy: &Policy) -> u64 {
        let Some((_, rule)) = policy.find(key.limit()) else { return 0 };
        let quotas = rule.quotas_of(key.family()).chain(policy.overrides_of(key));
        let leases = quotas.filter_map(|quota| Lease::of_rule(rule, quota, policy));
        leases.map(|lease| lease.raise / lease.largest).max().unwrap_or(0)
    }

    /// Where a charge that was made by spending granted units is recorded. `state` is the one after the grant.
    pub fn mark(state: &State) -> u64 {
        match state {
            State::Meter(state) => state.at,
            State::FixedWindow(state) => state.window,
            State::SlidingWindow(state) => state.window,
            State::SlidingLog(_) | State::Concurrency(_) => 0, // never leased
        }
    }
}

/// This span in ticks, rounded up. The divisors are constants: every check of a leased limit comes here.
fn ticks(quota: &CheckedQuota, span: Span) -> u64 {
    match quota.tick() {
        Tick::Micro => span.as_micros(),
        Tick::Milli => span.as_micros().div_ceil(1_000),
        Tick::Second => span.as_micros().div_ceil(1_000_000),
    }
}

/// Whether a bucket's lease of this many ticks lives long enough and refills enough.
fn is_long_enough(quota: &CheckedQuota, life: u64) -> bool {
    let refill = life * quota.count(); // at most a sixteenth of the capacity
    life >= ticks(quota, SHORTEST_LIFE) && refill >= LEAST_REFILL * quota.period_ticks()
}

/// What a bucket would need to be leased.
fn large_enough(quota: &CheckedQuota, largest: u64) -> LargeEnough {
    let count = (LEAST_REFILL * quota.period_ticks()).div_ceil(ticks(quota, LONGEST_LIFE));
    if quota.count() < count {
        return LargeEnough::Rate(count);
    }
    // The smallest burst whose lease lives long enough.
    let refill = (LEAST_REFILL * quota.period_ticks()).div_ceil(quota.count());
    let life = ticks(quota, SHORTEST_LIFE).max(refill);
    LargeEnough::Burst((life * RAISED_PART * largest).div_ceil(quota.period_ticks()))
}

/// Why a key has no leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotLeased {
    /// The algorithm has no leases.
    Algorithm(Algorithm),
    /// The quota grants nothing.
    Nothing,
    /// The quota is too small: leases would be too short, or too few units.
    TooSmall(LargeEnough),
}

/// What would be large enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LargeEnough {
    /// This count in the same period.
    Count(u64),
    /// This count in the same period, and then perhaps a larger burst.
    Rate(u64),
    /// This burst.
    Burst(u64),
}

impl fmt::Display for LargeEnough {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LargeEnough::Count(count) | LargeEnough::Rate(count) => write!(f, "a count of at least {count}"),
            LargeEnough::Burst(burst) => write!(f, "a burst of at least {burst}"),
        }
    }
}

impl fmt::Display for NotLeased {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotLeased::Algorithm(Algorithm::LeakyBucket) => f.write_str(
                "a leaky-bucket cannot be leased: a node cannot know when a request leaves the common queue",
            ),
            NotLeased::Algorithm(Algorithm::SlidingLog) => {
                f.write_str("a sliding-log cannot be leased: it records the time of each request")
            }
            NotLeased::Algorithm(Algorithm::Concurrency) => {
                f.write_str("a concurrency limit cannot be leased: slots are held and released one by one")
            }
            NotLeased::Algorithm(algorithm) => write!(f, "{algorithm} has no leases"),
            NotLeased::Nothing => f.write_str("nothing is granted"),
            NotLeased::TooSmall(large_enough) => {
                write!(f, "too small to be leased ({large_enough} is needed)")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{fixed_window, meter};
    use crate::facts;
    use crate::limit::Limit;
    use crate::policy::Override;
    use crate::quota::Quota;
    use crate::siphash::Secret;

    fn quota(algorithm: Algorithm, count: u64, period: Span, burst: Option<u64>) -> CheckedQuota {
        let quota = Quota::every(count, period);
        CheckedQuota::new(algorithm, burst.into_iter().fold(quota, Quota::burst)).unwrap()
    }

    fn bucket(count: u64, secs: u64, burst: u64) -> CheckedQuota {
        quota(Algorithm::TokenBucket, count, Span::from_secs(secs), Some(burst))
    }

    #[test]
    fn life_of_a_bucket_drains_at_most_a_sixteenth_of_it() {
        let quota = bucket(100_000, 1, 100_000);
        let lease = Lease::of(&quota, 100_000).unwrap();
        assert_eq!(lease.life, Span::from_micros(62_500));
        assert_eq!(lease.raise, quota.capacity() / 16);
        // At most a second.
        let lease = Lease::of(&bucket(1_000, 1, 100_000), 1_000).unwrap();
        assert_eq!((lease.life, lease.raise), (Span::from_secs(1), 1_000_000_000));
        // A larger tier drains faster, so leases are shorter.
        let lease = Lease::of(&quota, 200_000).unwrap();
        assert_eq!((lease.life, lease.largest), (Span::from_micros(31_250), 200_000));
    }

    #[test]
    fn small_bucket_says_what_would_be_large_enough() {
        let check = |quota: CheckedQuota, largest: u64, expected: Result<(), LargeEnough>| {
            let actual = Lease::of(&quota, largest).map(drop);
            assert_eq!(actual, expected.map_err(NotLeased::TooSmall), "{quota:?}");
        };
        check(bucket(1_000, 60, 1_000), 1_000, Ok(()));
        check(bucket(959, 60, 10_000), 959, Err(LargeEnough::Rate(960)));
        check(bucket(960, 60, 255), 960, Err(LargeEnough::Burst(256)));
        check(bucket(960, 60, 256), 960, Ok(()));
        check(bucket(960, 60, 256), 1_920, Err(LargeEnough::Burst(512)));
        check(bucket(100_000, 1, 31_999), 100_000, Err(LargeEnough::Burst(32_000)));
        check(bucket(100_000, 1, 32_000), 100_000, Ok(()));
        // A period of a week is counted in seconds.
        check(bucket(10_000_000, 604_800, 255), 10_000_000, Err(LargeEnough::Burst(265)));
        check(bucket(10_000_000, 604_800, 265), 10_000_000, Ok(()));
    }

    #[test]
    fn window_needs_a_count_of_256() {
        for algorithm in [Algorithm::FixedWindow, Algorithm::SlidingWindow] {
            let window = |count, millis| quota(algorithm, count, Span::from_millis(millis), None);
            assert_eq!(Lease::of(&window(256, 200), 256).unwrap().life, Span::from_millis(200));
            assert_eq!(Lease::of(&window(256, 60_000), 256).unwrap().life, Span::from_secs(1));
            assert_eq!(Lease::of(&window(255, 200), 255), Err(NotLeased::TooSmall(LargeEnough::Count(256))));
        }
    }

    #[test]
    fn other_algorithms_have_no_leases() {
        for algorithm in [Algorithm::LeakyBucket, Algorithm::SlidingLog, Algorithm::Concurrency] {
            let quota = quota(algorithm, 10_000, Span::from_secs(1), None);
            assert_eq!(Lease::of(&quota, 10_000), Err(NotLeased::Algorithm(algorithm)));
        }
    }

    #[test]
    fn quota_that_grants_nothing_has_no_leases() {
        let nothing = CheckedQuota::nothing(Algorithm::TokenBucket, Span::from_secs(1));
        assert_eq!(Lease::of(&nothing, 100_000), Err(NotLeased::Nothing));
    }

    #[test]
    fn charge_from_permits_is_recorded_at_their_grant() {
        let state = State::Meter(meter::State { level: 7, at: 1_000_000 });
        assert_eq!(Lease::mark(&state), 1_000_000);
        let window = quota(Algorithm::FixedWindow, 1_000, Span::from_secs(60), None);
        let state = State::FixedWindow(fixed_window::State { window: 7, count: 3 });
        assert_eq!(Lease::mark(&state), 7);
        assert_eq!(Lease::window_end(&window, &state, 1_000), Some(Time::from_micros(480_000_000 - 1_000)));
    }

    /// The key may be in either tier while a lease of the other one lives.
    #[test]
    fn refund_counts_a_charge_as_older_by_the_longest_life() {
        let rate = |count, burst| Quota::per_second(count).burst(burst);
        let tiers =
            Limit::tiered("a", "plan").tier("free", rate(1_000, 4_000)).tier("pro", rate(2_000, 16_000));
        let age = |consistency| {
            let limit = tiers.clone().default_tier("free").by("user").consistency(consistency);
            let policy = Policy::new(vec![limit]).unwrap();
            let keys = policy.keys("a", &facts! { "user" => "u", "plan" => "free" }).unwrap();
            Lease::refund_age(Key::from_bytes(&keys[0]).unwrap(), &policy)
        };
        assert_eq!(age(Consistency::Exact), 0);
        assert_eq!(age(Consistency::Leased), 500_000); // the life of `pro`: 16,000/(16*2,000) s
    }

    /// A receipt does not hold the values of a long key, so its override may be any of the limit's.
    #[test]
    fn refund_of_a_shortened_key_knows_all_overrides() {
        let limit = Limit::new("a", Quota::per_second(1_000).burst(4_000)).by("user");
        let policy = Policy::new(vec![limit.consistency(Consistency::Leased)]).unwrap();
        let allowance = Quota::per_second(1_000).burst(8_000).into();
        let granted = Override { allowance, until: None, note: None };
        let long = "u".repeat(200);
        let overridden = policy.with_override("a", &long, Some(&granted), Secret([7; 16])).unwrap();
        let age = |policy: &Policy, user: &str, is_short: bool| {
            let key = policy.keys("a", &facts! { "user" => user }).unwrap().remove(0);
            let key = Key::from_bytes(&key).unwrap();
            let key = if is_short { Key::from_bytes(key.family()).unwrap() } else { key };
            Lease::refund_age(key, policy)
        };
        assert_eq!((age(&policy, &long, false), age(&policy, &long, true)), (250_000, 250_000));
        assert_eq!((age(&overridden, &long, false), age(&overridden, "other", false)), (500_000, 250_000));
        assert_eq!(age(&overridden, &long, true), 500_000);
    }
}
