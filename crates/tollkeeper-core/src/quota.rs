//! Quotas: how many units a limit grants, and the checked form that algorithms compute with.
//!
//! A [`Quota`] is what the user wrote: `Quota::per_minute(100).burst(20)`. It is checked once, when the policy is
//! built, so that an error carries the name of the limit. A [`CheckedQuota`] is what an algorithm uses and is always
//! valid. All bounds that the arithmetic relies on are enforced in [`CheckedQuota::new`] and nowhere else: every
//! product stays below 2^53, so the Lua twins, whose numbers are doubles, are exact.

use core::fmt;
use core::time::Duration;

use crate::time::{Span, Tick};

/// How a quota is spent and refilled. `docs/algorithms.md` describes what each algorithm guarantees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    /// A bucket of `burst` tokens that refills at the rate (also called GCRA).
    TokenBucket,
    /// A queue of `burst` requests that drains at the rate: an admitted request gets a delay.
    LeakyBucket,
    /// `count` in each window; windows are aligned to the epoch.
    FixedWindow,
    /// `count` in a sliding window, estimated from the current count and the weighted previous one.
    SlidingWindow,
    /// Exactly `count` in any interval of one period; stores a timestamp for every admitted unit.
    SlidingLog,
    /// `count` at the same time.
    Concurrency,
}

impl Algorithm {
    /// Every algorithm, in the order of the documentation.
    pub const ALL: [Algorithm; 6] = [
        Algorithm::TokenBucket,
        Algorithm::LeakyBucket,
        Algorithm::FixedWindow,
        Algorithm::SlidingWindow,
        Algorithm::SlidingLog,
        Algorithm::Concurrency,
    ];

    /// The name used in config, API and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::TokenBucket => "token-bucket",
            Algorithm::LeakyBucket => "leaky-bucket",
            Algorithm::FixedWindow => "fixed-window",
            Algorithm::SlidingWindow => "sliding-window",
            Algorithm::SlidingLog => "sliding-log",
            Algorithm::Concurrency => "concurrency",
        }
    }

    /// The algorithm with this name; `gcra` is the token bucket.
    pub fn from_name(name: &str) -> Option<Algorithm> {
        match name {
            "gcra" => Some(Algorithm::TokenBucket),
            _ => Self::ALL.into_iter().find(|algorithm| algorithm.name() == name),
        }
    }

    /// Whether the algorithm takes a burst.
    pub const fn has_burst(self) -> bool {
        matches!(self, Algorithm::TokenBucket | Algorithm::LeakyBucket)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How many units a limit grants: a count per period, with an optional burst, or a number of slots.
///
/// Building the policy checks the numbers, and an error names the limit:
///
/// ```
/// use tollkeeper_core::{Limit, Policy, Quota};
///
/// let per_user = Limit::new("per-user", Quota::per_minute(100).burst(20)).by("user");
/// assert!(Policy::new(vec![per_user]).is_ok());
///
/// let error = Policy::new(vec![Limit::new("per-user", Quota::per_minute(0))]).unwrap_err();
/// assert!(error.to_string().contains("limit `per-user`: count is 0"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    count: u64,
    /// `None` for slots, which are held and not spent.
    period: Option<Span>,
    burst: Option<u64>,
}

impl Quota {
    /// `count` per second.
    pub const fn per_second(count: u64) -> Quota {
        Quota::every(count, Span::from_secs(1))
    }

    /// `count` per minute.
    pub const fn per_minute(count: u64) -> Quota {
        Quota::every(count, Span::from_secs(60))
    }

    /// `count` per hour.
    pub const fn per_hour(count: u64) -> Quota {
        Quota::every(count, Span::from_secs(3_600))
    }

    /// `count` per day of 24 hours.
    pub const fn per_day(count: u64) -> Quota {
        Quota::every(count, Span::from_secs(86_400))
    }

    /// `count` per `period`: `Quota::per(5, Duration::from_secs(900))` is five per 15 minutes.
    pub fn per(count: u64, period: Duration) -> Quota {
        Quota::every(count, Span::from(period))
    }

    /// As [`Quota::per`], with a [`Span`].
    pub const fn every(count: u64, period: Span) -> Quota {
        Quota { count, period: Some(period), burst: None }
    }

    /// `count` at the same time: a concurrency limit.
    pub const fn slots(count: u64) -> Quota {
        Quota { count, period: None, burst: None }
    }

    /// Sets how many units can be taken at once, such as 20; without it, the count.
    #[must_use]
    pub const fn burst(self, burst: u64) -> Quota {
        Quota { burst: Some(burst), ..self }
    }

    /// The same with this burst, or with none.
    #[must_use]
    pub const fn with_burst(self, burst: Option<u64>) -> Quota {
        Quota { burst, ..self }
    }

    /// Units per period, or slots: 100 for `100/min`.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// The burst, if one was set.
    pub const fn explicit_burst(&self) -> Option<u64> {
        self.burst
    }

    /// The period; `None` for slots.
    pub const fn period(&self) -> Option<Span> {
        self.period
    }

    /// Whether a burst was set.
    pub(crate) const fn has_burst(&self) -> bool {
        self.burst.is_some()
    }

    /// The same with every number of units changed, such as by a share.
    pub(crate) fn map_counts(self, change: impl Fn(u64) -> u64) -> Quota {
        Quota { count: change(self.count), burst: self.burst.map(change), ..self }
    }

    /// The same count with this period.
    pub(crate) const fn with_period(self, period: Span) -> Quota {
        Quota { period: Some(period), ..self }
    }
}

/// Shown as in the config, with the burst in words: `100/1m with bursts of 20`.
impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.period {
            Some(period) => write!(f, "{}/{period}", self.count)?,
            None => write!(f, "{} slots", self.count)?,
        }
        self.burst.map_or(Ok(()), |burst| write!(f, " with bursts of {burst}"))
    }
}

/// What a limit, a tier or an override grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Allowance {
    /// The limit does not apply.
    Unlimited,
    /// Every request is refused, and waiting does not help (`0/s` in the config).
    Nothing,
    /// A quota.
    Quota(Quota),
}

impl From<Quota> for Allowance {
    fn from(quota: Quota) -> Allowance {
        Allowance::Quota(quota)
    }
}

/// A quota that was checked against the bounds of its algorithm: what algorithms and stores compute with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckedQuota {
    algorithm: Algorithm,
    count: u64,
    burst: u64,
    period: Span,
    tick: Tick,
    period_ticks: u64,
    /// 2^64 divided by the count, rounded up: multiplying with it replaces a division by the count.
    inverse: u64,
}

/// The bound of every product: doubles represent whole numbers exactly up to here.
const EXACT: u128 = 1 << 53;
const SHORTEST: Span = Span::from_millis(1);
const LONGEST: Span = Span::from_secs(366 * 86_400);
const LONGEST_FILL: Span = Span::from_secs(50 * 366 * 86_400);
const MAX_WINDOW: u64 = 1 << 50;
const MAX_LOG: u64 = 100_000;
const MAX_SLOTS: u64 = 10_000;

impl CheckedQuota {
    /// Checks a quota against the bounds of an algorithm.
    ///
    /// For [`Algorithm::Concurrency`] the period is the time to live of a slot.
    pub fn new(algorithm: Algorithm, quota: Quota) -> Result<CheckedQuota, InvalidQuota> {
        let Quota { count, period, burst } = quota;
        let Some(period) = period else { return Err(InvalidQuota::NoPeriod) };
        if count == 0 {
            return Err(InvalidQuota::ZeroCount);
        }
        if burst == Some(0) {
            return Err(InvalidQuota::ZeroBurst);
        }
        if burst.is_some() && !algorithm.has_burst() {
            return Err(InvalidQuota::BurstWithout(algorithm));
        }
        if period < SHORTEST || period > LONGEST {
            return Err(InvalidQuota::Period(period));
        }
        let (tick, most) = match algorithm {
            Algorithm::FixedWindow => (Tick::Micro, Some(MAX_WINDOW)),
            Algorithm::SlidingLog => (Tick::Micro, Some(MAX_LOG)),
            Algorithm::Concurrency => (Tick::Micro, Some(MAX_SLOTS)),
            _ => (Tick::of(period), None),
        };
        if !period.as_micros().is_multiple_of(tick.span().as_micros()) {
            return Err(InvalidQuota::Ticks { period, tick: tick.span() });
        }
        let period_ticks = period.as_micros() / tick.span().as_micros();
        let burst = burst.unwrap_or(count);
        // A product of two bounded counts and a period: u128 cannot overflow here.
        let product = 4 * u128::from(burst.max(count)) * u128::from(period_ticks);
        let most = most.unwrap_or_else(|| {
            u64::try_from((EXACT - 1) / (4 * u128::from(period_ticks))).expect("below 2^53")
        });
        let fits = if matches!(
            algorithm,
            Algorithm::TokenBucket | Algorithm::LeakyBucket | Algorithm::SlidingWindow
        ) {
            product < EXACT
        } else {
            count <= most
        };
        if !fits {
            return Err(InvalidQuota::TooMany { algorithm, count: burst.max(count), period, most });
        }
        let fill = u128::from(burst) * u128::from(period.as_micros()) / u128::from(count);
        if algorithm.has_burst() && fill > u128::from(LONGEST_FILL.as_micros()) {
            // The burst that takes 50 years to refill; at least 1, because a period is at most a year.
            let most =
                u128::from(LONGEST_FILL.as_micros()) * u128::from(count) / u128::from(period.as_micros());
            return Err(InvalidQuota::Fill { burst, most: u64::try_from(most).unwrap_or(u64::MAX) });
        }
        Ok(CheckedQuota { algorithm, count, burst, period, tick, period_ticks, inverse: inverse(count) })
    }

    /// A quota of count 0, which refuses every request and keeps no state.
    pub(crate) fn nothing(algorithm: Algorithm, period: Span) -> CheckedQuota {
        CheckedQuota {
            algorithm,
            count: 0,
            burst: 0,
            period,
            tick: Tick::of(period),
            period_ticks: 0,
            inverse: 0,
        }
    }

    /// The share of one of `nodes` nodes while they cannot reach the common store. All shares together are
    /// no more than the quota, except that every node keeps at least 1. A bucket drains `nodes` times slower;
    /// other algorithms get a smaller count.
    #[must_use]
    pub fn share(&self, nodes: u32) -> CheckedQuota {
        let nodes = u64::from(nodes.max(1));
        let part = |total: u64| if total == 0 { 0 } else { (total / nodes).max(1) };
        if self.algorithm.has_burst() {
            // At most 86,400,000 ticks times 2^32: a level stays below 2^63.
            let period = Span::from_micros(self.period.as_micros().saturating_mul(nodes));
            return CheckedQuota {
                burst: part(self.burst),
                period,
                period_ticks: self.period_ticks.saturating_mul(nodes),
                ..*self
            };
        }
        let count = part(self.count);
        CheckedQuota { count, burst: count, inverse: inverse(count), ..*self }
    }

    /// The algorithm.
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Units per period; for a concurrency limit, the number of slots.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// The period; for a concurrency limit, the time to live of a slot.
    pub const fn period(&self) -> Span {
        self.period
    }

    /// The size of a bucket; for other algorithms, the count.
    pub const fn burst(&self) -> u64 {
        self.burst
    }

    /// Units that an unused key can take at once.
    #[inline]
    pub const fn limit(&self) -> u64 {
        self.burst
    }

    /// The unit in which the algorithm counts time.
    #[inline]
    pub const fn tick(&self) -> Tick {
        self.tick
    }

    /// The period in ticks, which is also how much one unit of cost raises the level of a meter.
    #[inline]
    pub const fn period_ticks(&self) -> u64 {
        self.period_ticks
    }

    /// The level of a full meter.
    #[inline]
    pub const fn capacity(&self) -> u64 {
        self.burst * self.period_ticks // < 2^51 by CheckedQuota::new
    }

    /// Ticks until a full meter is empty.
    #[inline]
    pub const fn fill_ticks(&self) -> u64 {
        self.capacity().div_ceil(self.count)
    }

    /// An upper bound of the ticks in which `level` drains, at most two ticks too high. It avoids a division,
    /// for callers that may keep a state slightly too long.
    #[inline]
    pub fn drain_ticks(&self, level: u64) -> u64 {
        u64::try_from((u128::from(level) * u128::from(self.inverse)) >> 64).expect("64 bits remain") + 1
    }

    /// The window that headers show: the period of a window or a log, the fill time of a bucket.
    pub fn window(&self) -> Span {
        match self.algorithm {
            Algorithm::TokenBucket | Algorithm::LeakyBucket if self.count > 0 => {
                // In microseconds: at most 50 years by CheckedQuota::new.
                let fill = u128::from(self.burst) * u128::from(self.period.as_micros());
                let fill = fill.div_ceil(u128::from(self.count));
                Span::from_micros(u64::try_from(fill).expect("at most 50 years"))
            }
            _ => self.period,
        }
    }
}

/// 2^64 divided by the count, rounded up; 0 for a count of 0.
fn inverse(count: u64) -> u64 {
    if count == 0 {
        return 0;
    }
    u64::try_from((1u128 << 64).div_ceil(u128::from(count))).unwrap_or(u64::MAX)
}

/// Why a quota is invalid.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidQuota {
    /// The count is zero.
    ZeroCount,
    /// The burst is zero.
    ZeroBurst,
    /// A burst was given for an algorithm that does not take one.
    BurstWithout(Algorithm),
    /// The quota is a number of slots: only a limit has the time to live that they need.
    NoPeriod,
    /// The period is shorter than a millisecond or longer than 366 days.
    Period(Span),
    /// The period is not a whole number of ticks.
    Ticks {
        /// The period.
        period: Span,
        /// The tick, of which it must be a multiple.
        tick: Span,
    },
    /// The count or the burst is too large for exact arithmetic.
    TooMany {
        /// The algorithm.
        algorithm: Algorithm,
        /// The larger of count and burst.
        count: u64,
        /// The period.
        period: Span,
        /// The largest valid number.
        most: u64,
    },
    /// The burst would take longer than 50 years to refill.
    Fill {
        /// The burst.
        burst: u64,
        /// The largest valid burst.
        most: u64,
    },
}

impl fmt::Display for InvalidQuota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InvalidQuota::ZeroCount => {
                f.write_str("count is 0 (at least 1; to refuse everything, grant nothing: `0/s`)")
            }
            InvalidQuota::ZeroBurst => f.write_str("burst is 0 (at least 1, or leave it out)"),
            InvalidQuota::BurstWithout(algorithm) => {
                write!(f, "{algorithm} has no burst (leave it out, or use token-bucket or leaky-bucket)")
            }
            InvalidQuota::NoPeriod => {
                f.write_str("slots have no period (make them a limit, which has a `ttl`)")
            }
            InvalidQuota::Period(period) => write!(f, "period {period} is not between 1ms and 366d"),
            InvalidQuota::Ticks { period, tick } => {
                write!(
                    f,
                    "period {period} is not a whole number of {tick}: such a long period is counted in steps of {tick}"
                )
            }
            InvalidQuota::TooMany { algorithm: Algorithm::Concurrency, count, most, .. } => {
                write!(f, "{count} slots are too many (at most {most})")
            }
            InvalidQuota::TooMany { algorithm, count, period, most } => {
                write!(f, "{count} per {period} is too large for {algorithm} (at most {most})")
            }
            InvalidQuota::Fill { burst, most } => {
                write!(f, "burst {burst} would take more than 50 years to refill (at most {most})")
            }
        }
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for InvalidQuota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl core::error::Error for InvalidQuota {}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest valid count, found by bisection.
    fn largest(algorithm: Algorithm, period: Span) -> u64 {
        let (mut fits, mut not) = (1, u64::MAX);
        while not - fits > 1 {
            let count = fits + (not - fits) / 2;
            match CheckedQuota::new(algorithm, Quota::every(count, period)) {
                Ok(_) => fits = count,
                Err(_) => not = count,
            }
        }
        fits
    }

    #[test]
    fn largest_counts_are_as_documented() {
        for (period, most) in [
            (Span::from_secs(60), 37_529_996),
            (Span::from_secs(3_600), 625_499_948),
            (Span::from_secs(86_400), 26_062_497),
            (Span::from_secs(30 * 86_400), 868_749_928),
        ] {
            for algorithm in [Algorithm::TokenBucket, Algorithm::LeakyBucket, Algorithm::SlidingWindow] {
                assert_eq!(largest(algorithm, period), most, "{algorithm} {period}");
            }
        }
        assert_eq!(largest(Algorithm::FixedWindow, Span::from_secs(1)), 1 << 50);
        assert_eq!(largest(Algorithm::SlidingLog, Span::from_secs(1)), 100_000);
        assert_eq!(largest(Algorithm::Concurrency, Span::from_secs(1)), 10_000);
    }

    #[test]
    fn an_error_names_the_largest_valid_count() {
        let rate = Quota::per_minute(40_000_000);
        let error = CheckedQuota::new(Algorithm::TokenBucket, rate).expect_err("too many");
        assert_eq!(error.to_string(), "40000000 per 1m is too large for token-bucket (at most 37529996)");
        assert!(CheckedQuota::new(Algorithm::TokenBucket, Quota::per_minute(37_529_996)).is_ok());
    }

    #[test]
    fn invalid_rates_are_rejected_with_a_fix() {
        let year = Duration::from_secs(366 * 86_400);
        for (algorithm, rate, message) in [
            (
                Algorithm::TokenBucket,
                Quota::per_second(0),
                "count is 0 (at least 1; to refuse everything, grant nothing: `0/s`)",
            ),
            (
                Algorithm::TokenBucket,
                Quota::per_second(1).burst(0),
                "burst is 0 (at least 1, or leave it out)",
            ),
            (
                Algorithm::SlidingLog,
                Quota::per_second(1).burst(2),
                "sliding-log has no burst (leave it out, or use token-bucket or leaky-bucket)",
            ),
            (
                Algorithm::TokenBucket,
                Quota::slots(5),
                "slots have no period (make them a limit, which has a `ttl`)",
            ),
            (Algorithm::FixedWindow, Quota::per(1, Duration::ZERO), "period 0us is not between 1ms and 366d"),
            (Algorithm::FixedWindow, Quota::per(1, year * 2), "period 732d is not between 1ms and 366d"),
            (
                Algorithm::TokenBucket,
                Quota::per(1, Duration::from_micros(60_000_001)),
                "period 60000001us is not a whole number of 1ms: such a long period is counted in steps of 1ms",
            ),
            (
                Algorithm::TokenBucket,
                Quota::per(1, year).burst(60),
                "burst 60 would take more than 50 years to refill (at most 50)",
            ),
            (
                Algorithm::TokenBucket,
                Quota::per_second(u64::MAX),
                "18446744073709551615 per 1s is too large for token-bucket (at most 2251799813)",
            ),
        ] {
            let error = CheckedQuota::new(algorithm, rate).expect_err(message);
            assert_eq!(error.to_string(), message);
        }
    }

    #[test]
    fn a_quota_is_shown_as_in_the_config() {
        for (quota, expected) in [
            (Quota::per_minute(100), "100/1m"),
            (Quota::per_minute(100).burst(20), "100/1m with bursts of 20"),
            (Quota::per_minute(100).burst(20).with_burst(None), "100/1m"),
            (Quota::per(5, Duration::from_secs(900)), "5/15m"),
            (Quota::slots(5), "5 slots"),
        ] {
            assert_eq!(quota.to_string(), expected);
        }
    }

    #[test]
    fn drain_ticks_is_a_tight_upper_bound() {
        for count in [1, 2, 3, 7, 60, 1000, 37_529_996, 1 << 40] {
            let rate = Quota::every(count, Span::from_millis(1));
            let quota = CheckedQuota::new(Algorithm::TokenBucket, rate).expect("valid");
            for level in [0, 1, count - 1, count, count + 1, 12_345 * count, 12_345 * count + 1, 1 << 52] {
                let (bound, exact) = (quota.drain_ticks(level), level.div_ceil(count));
                assert!(bound >= exact && bound <= exact + 2, "{level} at {count}: {bound}, not {exact}");
            }
        }
    }

    #[test]
    fn the_window_of_a_bucket_is_its_fill_time() {
        let bucket =
            CheckedQuota::new(Algorithm::TokenBucket, Quota::per_minute(100).burst(20)).expect("valid");
        assert_eq!(bucket.window(), Span::from_secs(12));
        let window = CheckedQuota::new(Algorithm::FixedWindow, Quota::per_day(1000)).expect("valid");
        assert_eq!(window.window(), Span::from_secs(86_400));
    }

    #[test]
    fn shares_of_all_nodes_do_not_exceed_the_quota() {
        let share = |algorithm, rate, nodes| CheckedQuota::new(algorithm, rate).unwrap().share(nodes);
        let bucket = share(Algorithm::TokenBucket, Quota::per_minute(100).burst(20), 4);
        assert_eq!((bucket.count(), bucket.period(), bucket.burst()), (100, Span::from_secs(240), 5));
        assert_eq!(bucket.tick(), Tick::Micro, "a level keeps its unit");
        let window = share(Algorithm::SlidingWindow, Quota::per_minute(10), 4);
        assert_eq!((window.count(), window.period(), window.limit()), (2, Span::from_secs(60), 2));
        assert_eq!(window.drain_ticks(7), 4, "7 divided by 2, rounded up");
        let small = share(Algorithm::TokenBucket, Quota::per_minute(1).burst(1), 10);
        assert_eq!(
            (small.count(), small.burst()),
            (1, 1),
            "every node can admit one unit, ten times as slowly"
        );
        let quota = CheckedQuota::new(Algorithm::SlidingLog, Quota::per_minute(7)).unwrap();
        assert_eq!(quota.share(1), quota);
        assert_eq!(CheckedQuota::nothing(Algorithm::FixedWindow, Span::from_secs(60)).share(3).count(), 0);
    }
}
