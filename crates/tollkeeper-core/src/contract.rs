//! Contract checkers: compute from the history of one key how much of a contract it needed.
//!
//! Each function returns the smallest limit under which the history is allowed, so a test asserts `needed <= limit` and a
//! report can print both. The checkers know only histories and the formulas of the contracts, and share no code with the
//! algorithms: a mistake would have to be made twice.
//!
//! | Algorithm | What must hold |
//! |---|---|
//! | token-bucket | `bucket(admissions, rate) <= burst` |
//! | leaky-bucket | the same, and of its departures `departures(history, rate) == 0` |
//! | fixed-window | `fixed_window(admissions, windows) <= quota` |
//! | sliding-window | `sliding_window(admissions, windows, tick) <= quota` and `any_period(admissions, period) <= 2*quota - 1` |
//! | sliding-log | `any_period(admissions, period) <= quota` |
//! | concurrency | `concurrency(holds) <= quota` |
//!
//! Where faults allow the sum of k equal contracts, compare with k times the limit; for `bucket` multiply the count of
//! the rate by k as well.
//!
//! Histories may be in any order, since several processes record them. Times are microseconds of
//! the store's clock; periods and ticks are at least 1. All arithmetic is exact: times, rates and the
//! total cost of a history must be below 2^62, and are asserted to be.
//!
//! ```
//! use tollkeeper_core::contract::{Admission, Rate, bucket};
//!
//! // Ten per second: three at once, and one more when a tenth of a second has passed.
//! let rate = Rate { count: 10, period: 1_000_000, tick: 1 };
//! let history = [Admission { at: 100_000, cost: 1 }, Admission { at: 0, cost: 3 }];
//! assert_eq!(bucket(&history, rate), 3);
//! ```

use crate::quota::{Algorithm, CheckedQuota};

/// An admitted request or, among departures, one that left the queue.
// The order of the fields is the order of a history: at one instant the costliest comes last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Admission {
    /// When, in microseconds.
    pub at: u64,
    /// How much it cost.
    pub cost: u64,
}

/// `count` per `period`, on a clock that the algorithm reads in whole ticks.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// The cost that one period makes free.
    pub count: u64,
    /// In microseconds.
    pub period: u64,
    /// In microseconds: by so much an interval may look longer to the algorithm than it was.
    pub tick: u64,
}

/// Time cut into `[offset + k*period, offset + (k + 1)*period)` for every whole k, below zero too.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// In microseconds.
    pub period: u64,
    /// In microseconds; 0 aligns the windows to the epoch.
    pub offset: u64,
}

/// A slot held from `from` until just before `until`: its release or its ttl, whichever came first.
#[derive(Clone, Copy, Debug)]
pub struct Hold {
    /// In microseconds.
    pub from: u64,
    /// In microseconds.
    pub until: u64,
}

/// The smallest burst with which every interval d has at most `burst + count*(d + tick)/period`.
pub fn bucket(history: &[Admission], rate: Rate) -> u128 {
    most(beyond(&in_order(history), rate, |_| 0))
}

/// The most that an interval d had beyond `cost_of_last + count*(d + tick)/period`, rounded up.
///
/// Of departures at one instant the costliest counts as the last, because the history does not record their order.
pub fn departures(history: &[Admission], rate: Rate) -> u128 {
    most(beyond(&in_order(history), rate, |last| last.cost))
}

/// The largest total of one window.
pub fn fixed_window(history: &[Admission], windows: Windows) -> u128 {
    most(totals_of_windows(&in_order(history), windows))
}

/// The smallest quota with which `prev*(1 - f) + cur <= quota` at every instant.
///
/// `prev` is the total of the window before, `cur` that of this one so far, and `f` the part of this
/// one that has passed, in whole ticks.
pub fn sliding_window(history: &[Admission], windows: Windows, tick: u64) -> u128 {
    most(weighted_totals(&in_order(history), windows, tick))
}

/// The largest total of any half-open interval of one period, wherever it begins.
pub fn any_period(history: &[Admission], period: u64) -> u128 {
    most(totals_of_periods(&in_order(history), period))
}

/// The contract of a quota, as far as admissions can show whether it is kept. Departures of a leaky bucket and holders
/// of slots are not admissions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contract {
    algorithm: Algorithm,
    count: u64,
    /// The burst of a bucket, otherwise the count.
    limit: u64,
    period: u64,
    tick: u64,
    shift: u64,
}

/// What a history needed of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// The smallest burst of a bucket, or the smallest count of another limit, under which the history is allowed.
    pub needed: u128,
    /// The burst or count of the limit: 20 for a burst of 20.
    pub limit: u128,
    /// The first admission that the contract does not allow.
    pub first: Option<Breach>,
}

/// An interval in which more was admitted than the contract allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Breach {
    /// When the interval begins, in microseconds.
    pub from: u64,
    /// The admission that exceeded it, in microseconds.
    pub until: u64,
    /// The total of the interval. For a sliding window, that of the previous window counts in part.
    pub admitted: u128,
    /// The largest total that is allowed.
    pub allowed: u128,
}

impl Contract {
    /// The contract of a key whose windows begin `shift` microseconds early; `None` for a concurrency limit.
    pub fn of(quota: &CheckedQuota, shift: u64) -> Option<Contract> {
        (quota.algorithm() != Algorithm::Concurrency).then(|| Contract {
            algorithm: quota.algorithm(),
            count: quota.count(),
            limit: quota.limit(),
            period: quota.period().as_micros(),
            tick: quota.tick().span().as_micros(),
            shift,
        })
    }

    /// The contract across a change to another quota of the same algorithm and period.
    #[must_use]
    pub fn or(self, quota: &CheckedQuota) -> Contract {
        Contract { count: self.count.max(quota.count()), ..self.at_least(quota.limit()) }
    }

    /// The same with a burst or count of at least `limit`.
    #[must_use]
    pub fn at_least(self, limit: u64) -> Contract {
        let limit = self.limit.max(limit);
        Contract { limit, count: if self.algorithm.has_burst() { self.count } else { limit }, ..self }
    }

    /// Judges a history, in any order.
    pub fn judge(&self, history: &[Admission]) -> Judgement {
        let ordered = in_order(history);
        let limit = u128::from(self.limit);
        let mut judgement = Judgement { needed: 0, limit, first: None };
        if self.count == 0 {
            // Nothing is allowed, whatever the algorithm.
            judgement.note(totals_of_periods(&ordered, u64::MAX), |_| 0);
            return judgement;
        }
        // Windows begin early by the shift, which equals beginning late by the rest of the period.
        let windows = Windows { period: self.period, offset: self.period - self.shift };
        match self.algorithm {
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                let rate = Rate { count: self.count, period: self.period, tick: self.tick };
                judgement.note(beyond(&ordered, rate, |_| 0), |need| {
                    let length = u128::from(need.until - need.from) + u128::from(self.tick);
                    limit + u128::from(self.count) * length / u128::from(self.period)
                });
            }
            Algorithm::FixedWindow => judgement.note(totals_of_windows(&ordered, windows), |_| limit),
            Algorithm::SlidingWindow => {
                let twice = 2 * limit - 1;
                let periods = totals_of_periods(&ordered, self.period);
                // A total of n needs a count of at least (n + 1)/2.
                judgement.note(periods.map(|n| Need { needed: (n.needed + 1).div_ceil(2), ..n }), |_| twice);
                judgement.note(weighted_totals(&ordered, windows, self.tick), |_| limit);
            }
            Algorithm::SlidingLog => judgement.note(totals_of_periods(&ordered, self.period), |_| limit),
            Algorithm::Concurrency => unreachable!("see `Contract::of`"),
        }
        judgement
    }
}

impl Judgement {
    /// Whether the contract was kept.
    pub fn kept(&self) -> bool {
        self.first.is_none()
    }

    fn note(&mut self, needs: impl Iterator<Item = Need>, allowed: impl Fn(Need) -> u128) {
        for need in needs {
            self.needed = self.needed.max(need.needed);
            if need.needed > self.limit && self.first.is_none_or(|first| need.until < first.until) {
                let Need { from, until, admitted, .. } = need;
                self.first = Some(Breach { from, until, admitted, allowed: allowed(need) });
            }
        }
    }
}

/// The most holders at one moment.
pub fn concurrency(holds: &[Hold]) -> u128 {
    // At one moment those who leave go first, because a hold ends just before `until`.
    #[derive(PartialEq, Eq, PartialOrd, Ord)]
    enum Change {
        Leaves,
        Comes,
    }
    let mut changes = Vec::new();
    for hold in holds.iter().filter(|hold| hold.from < hold.until) {
        changes.push((hold.from, Change::Comes));
        changes.push((hold.until, Change::Leaves));
    }
    changes.sort_unstable();

    let (mut holders, mut most) = (0, 0);
    for (_, change) in changes {
        match change {
            Change::Leaves => holders -= 1,
            Change::Comes => holders += 1,
        }
        most = most.max(holders);
    }
    most
}

impl Windows {
    /// The number of the window around `at`, counted from some first one, and the time since it began.
    fn locate(self, at: u64) -> (u128, u128) {
        let period = u128::from(self.period);
        // The first window is the one that is under way, or begins, at 0.
        let since_first = u128::from(at) + (period - u128::from(self.offset) % period) % period;
        (since_first / period, since_first % period)
    }
}

/// Products of two numbers below it are below 2^124: the few that are summed fit an i128.
const BOUND: u64 = 1 << 62;

/// What one admission needed of the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Need {
    /// The smallest limit under which it is allowed.
    needed: u128,
    /// The interval that needs it: from here to the admission.
    from: u64,
    until: u64,
    /// The total of the interval.
    admitted: u128,
}

fn most(needs: impl Iterator<Item = Need>) -> u128 {
    needs.map(|need| need.needed).max().unwrap_or(0)
}

/// For each admission, the most that an interval d that ends with it had, without what is spared of its cost, beyond
/// `count*(d + tick)/period`; rounded up.
fn beyond(ordered: &[Admission], rate: Rate, spared: fn(Admission) -> u64) -> impl Iterator<Item = Need> {
    let [count, period, tick] = [rate.count, rate.period, rate.tick].map(|number| {
        assert!(number < BOUND, "{rate:?}: must be below 2^62");
        i128::from(number)
    });
    // Times the period, the interval from admission i to admission j had
    //     (sum to j - spared of j - sum before i)*period - count*(at of j - at of i + tick)
    // beyond it: a part that knows only j, less a part that knows only i, less count*tick.
    // So of all i up to j the smallest part is enough to know.
    let (mut sum, mut smallest) = (0, (i128::MAX, 0, 0));
    ordered.iter().map(move |admission| {
        let freed = count * i128::from(admission.at);
        let part = sum * period - freed;
        if part < smallest.0 {
            smallest = (part, admission.at, sum);
        }
        sum += i128::from(admission.cost);
        let counted = sum - i128::from(spared(*admission));
        let needed = (counted * period - freed - smallest.0 - count * tick).max(0).unsigned_abs();
        Need {
            needed: needed.div_ceil(u128::from(rate.period)),
            from: smallest.1,
            until: admission.at,
            admitted: (sum - smallest.2).unsigned_abs(),
        }
    })
}

/// For each admission, the total of its window so far.
fn totals_of_windows(ordered: &[Admission], windows: Windows) -> impl Iterator<Item = Need> {
    let (mut window, mut total) = (0, 0);
    ordered.iter().map(move |admission| {
        let (number, elapsed) = windows.locate(admission.at);
        if number != window {
            (window, total) = (number, 0);
        }
        total += u128::from(admission.cost);
        Need { needed: total, from: before(admission.at, elapsed), until: admission.at, admitted: total }
    })
}

/// For each admission, the weighted total right after it. Between admissions it only falls.
fn weighted_totals(ordered: &[Admission], windows: Windows, tick: u64) -> impl Iterator<Item = Need> {
    let period = u128::from(windows.period);
    let (mut window, mut prev, mut cur) = (0, 0, 0);
    ordered.iter().map(move |admission| {
        let (number, elapsed) = windows.locate(admission.at);
        if number != window {
            prev = if number == window + 1 { cur } else { 0 };
            cur = 0;
            window = number;
        }
        cur += u128::from(admission.cost);
        let left = period - (elapsed - elapsed % u128::from(tick));
        let weighted = prev * left + cur * period; // < 2^126: prev + cur < 2^62 by in_order
        Need {
            needed: weighted.div_ceil(period),
            from: before(admission.at, elapsed + if prev > 0 { period } else { 0 }),
            until: admission.at,
            admitted: prev + cur,
        }
    })
}

/// For each admission, the total of the half-open interval of one period that ends with it.
fn totals_of_periods(ordered: &[Admission], period: u64) -> impl Iterator<Item = Need> {
    let (mut first, mut sum) = (0, 0);
    ordered.iter().map(move |last| {
        sum += u128::from(last.cost);
        while last.at - ordered[first].at >= period {
            sum -= u128::from(ordered[first].cost);
            first += 1;
        }
        Need { needed: sum, from: ordered[first].at, until: last.at, admitted: sum }
    })
}

/// `elapsed` before `at`, or 0.
fn before(at: u64, elapsed: u128) -> u64 {
    at.saturating_sub(u64::try_from(elapsed).unwrap_or(u64::MAX))
}

fn in_order(history: &[Admission]) -> Vec<Admission> {
    let mut ordered = history.to_vec();
    ordered.sort_unstable();
    let (latest, total) = (ordered.last().map_or(0, |last| last.at), total(&ordered));
    assert!(latest < BOUND, "time {latest}: must be below 2^62");
    assert!(total < BOUND.into(), "total {total}: must be below 2^62");
    ordered
}

fn total(history: &[Admission]) -> u128 {
    let costs = history.iter().map(|admission| u128::from(admission.cost));
    costs.sum()
}

#[cfg(test)]
mod tests;
