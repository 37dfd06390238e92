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

/// An admitted request or, among departures, one that left the queue.
// The order of the fields is the order of a history: at one instant the costliest comes last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Admission {
    /// Time in microseconds.
    pub at: u64,
    /// Cost of the request.
    pub cost: u64,
}

/// `count` per `period`, on a clock that the algorithm reads in whole ticks.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// Units refilled per period.
    pub count: u64,
    /// In microseconds.
    pub period: u64,
    /// Resolution in microseconds: to the algorithm an interval may look longer by up to one tick.
    pub tick: u64,
}

/// Windows `[offset + k*period, offset + (k + 1)*period)` for every integer k, negative ones included.
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
    beyond(history, rate, |_| 0)
}

/// The most that an interval d had beyond `cost_of_last + count*(d + tick)/period`, rounded up.
///
/// Of departures at one instant the costliest counts as the last, because the history does not record their order.
pub fn departures(history: &[Admission], rate: Rate) -> u128 {
    beyond(history, rate, |last| last.cost)
}

/// The largest total of one window.
pub fn fixed_window(history: &[Admission], windows: Windows) -> u128 {
    let number = |admission: &Admission| windows.locate(admission.at).0;
    let ordered = in_order(history);
    let totals = ordered.chunk_by(|a, b| number(a) == number(b)).map(total);
    totals.max().unwrap_or(0)
}

/// The smallest quota with which `prev*(1 - f) + cur <= quota` at every instant.
///
/// `prev` is the total of the window before, `cur` that of this one so far, and `f` the part of this
/// one that has passed, in whole ticks.
pub fn sliding_window(history: &[Admission], windows: Windows, tick: u64) -> u128 {
    let period = u128::from(windows.period);
    let (mut window, mut prev, mut cur) = (0, 0, 0);
    let mut most = 0;
    // Between admissions the weighted total only decreases, so the maximum is right after one.
    for admission in in_order(history) {
        let (number, elapsed) = windows.locate(admission.at);
        if number != window {
            prev = if number == window + 1 { cur } else { 0 };
            cur = 0;
            window = number;
        }
        cur += u128::from(admission.cost);
        let left = period - (elapsed - elapsed % u128::from(tick));
        most = most.max(prev * left + cur * period); // < 2^126: prev + cur < 2^62 by in_order
    }
    most.div_ceil(period)
}

/// The largest total of any half-open interval of one period, wherever it begins.
pub fn any_period(history: &[Admission], period: u64) -> u128 {
    let ordered = in_order(history);
    let mut inside = ordered.iter().peekable();
    let (mut sum, mut most) = (0, 0);
    for last in &ordered {
        sum += u128::from(last.cost);
        while let Some(gone) = inside.next_if(|first| last.at - first.at >= period) {
            sum -= u128::from(gone.cost);
        }
        most = most.max(sum);
    }
    most
}

/// The maximum of simultaneous holds.
pub fn concurrency(holds: &[Hold]) -> u128 {
    // At one instant releases come before new holds, because a hold ends just before `until`.
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
        // The first window is the one that contains time 0.
        let since_first = u128::from(at) + (period - u128::from(self.offset) % period) % period;
        (since_first / period, since_first % period)
    }
}

/// Products of two numbers below this bound are below 2^124, so sums of a few of them fit an i128.
const BOUND: u64 = 1 << 62;

/// The maximum over all intervals d of their total, minus `spared` of the last admission, minus
/// `count*(d + tick)/period`; rounded up.
fn beyond(history: &[Admission], rate: Rate, spared: fn(Admission) -> u64) -> u128 {
    let [count, period, tick] = [rate.count, rate.period, rate.tick].map(|number| {
        assert!(number < BOUND, "{rate:?}: must be below 2^62");
        i128::from(number)
    });
    // Times the period, the interval from admission i to admission j had
    //     (sum to j - spared of j - sum before i)*period - count*(at of j - at of i + tick)
    // beyond it: a term of j only, minus a term of i only, minus count*tick.
    // So it is enough to keep the smallest term of all i up to j.
    let (mut sum, mut smallest, mut most) = (0, i128::MAX, 0);
    for admission in in_order(history) {
        let freed = count * i128::from(admission.at);
        smallest = smallest.min(sum * period - freed);
        sum += i128::from(admission.cost);
        let counted = sum - i128::from(spared(admission));
        most = most.max(counted * period - freed - smallest);
    }
    let needed = (most - count * tick).max(0).unsigned_abs();
    needed.div_ceil(u128::from(rate.period))
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
mod tests {
    use super::*;

    type Contract = fn(&[Admission]) -> u128;

    /// Ten per 1,000 µs: one unit is refilled every 100 µs.
    const RATE: Rate = Rate { count: 10, period: 1_000, tick: 1 };
    const COARSE: Rate = Rate { tick: 10, ..RATE };
    const WINDOWS: Windows = Windows { period: 1_000, offset: 0 };
    const STAGGERED: Windows = Windows { offset: 300, ..WINDOWS };

    const BUCKET: Contract = |history| bucket(history, RATE);
    const COARSE_BUCKET: Contract = |history| bucket(history, COARSE);
    const DEPARTURES: Contract = |history| departures(history, RATE);
    const COARSE_DEPARTURES: Contract = |history| departures(history, COARSE);
    const FIXED: Contract = |history| fixed_window(history, WINDOWS);
    const STAGGERED_FIXED: Contract = |history| fixed_window(history, STAGGERED);
    const SLIDING: Contract = |history| sliding_window(history, WINDOWS, 1);
    const COARSE_SLIDING: Contract = |history| sliding_window(history, WINDOWS, 100);
    const ANY: Contract = |history| any_period(history, 1_000);

    /// Every case is also checked with unsorted input.
    fn check(contract: Contract, parts: &[Vec<Admission>], needed: u128) {
        let mut history = parts.concat();
        assert_eq!(contract(&history), needed, "in the order given");
        history.reverse();
        assert_eq!(contract(&history), needed, "backwards");
        let mut random = Random::new();
        history.sort_by_cached_key(|_| random.next());
        assert_eq!(contract(&history), needed, "shuffled");
    }

    fn at(at: u64, cost: u64) -> Vec<Admission> {
        vec![Admission { at, cost }]
    }

    /// One every 100 µs.
    fn steady(from: u64, times: u64) -> Vec<Admission> {
        (0..times).flat_map(|i| at(from + i * 100, 1)).collect()
    }

    #[test]
    fn empty_history_needs_nothing() {
        for contract in [BUCKET, DEPARTURES, FIXED, SLIDING, ANY] {
            check(contract, &[], 0);
        }
        assert_eq!(concurrency(&[]), 0);
    }

    #[test]
    fn bucket_counts_only_what_exceeds_the_rate() {
        check(BUCKET, &[at(5, 20)], 20);
        check(BUCKET, &[at(5, 19), at(5, 1)], 20);
        check(BUCKET, &[at(0, 20), steady(100, 999)], 20);
        check(BUCKET, &[at(0, 20), steady(100, 999), at(99_900, 1)], 21);
    }

    #[test]
    fn bucket_tolerates_exactly_one_tick() {
        check(BUCKET, &[at(0, 20), at(99, 1)], 20);
        check(BUCKET, &[at(0, 20), at(98, 1)], 21);
        check(COARSE_BUCKET, &[at(0, 20), at(90, 1)], 20);
        check(COARSE_BUCKET, &[at(0, 20), at(89, 1)], 21);
    }

    #[test]
    fn bucket_refills_while_idle() {
        check(BUCKET, &[at(0, 20), at(2_000, 20)], 20);
        check(BUCKET, &[at(0, 20), at(2_000, 21)], 21);
        check(BUCKET, &[at(0, 20), at(1_000, 10)], 20);
        check(BUCKET, &[at(0, 20), at(1_000, 11)], 21);
    }

    #[test]
    fn bucket_detects_a_violation_in_the_middle() {
        let busy = [at(0, 3), steady(0, 10_000)].concat();
        check(BUCKET, std::slice::from_ref(&busy), 4);
        check(BUCKET, &[busy, at(500_050, 1)], 5);

        let calm = [steady(0, 100), at(20_000, 4), steady(30_000, 100)].concat();
        check(BUCKET, std::slice::from_ref(&calm), 4);
        check(BUCKET, &[calm, at(20_050, 1)], 5);
    }

    #[test]
    fn bucket_needs_nothing_if_one_tick_covers_the_cost() {
        let fast: Contract = |history| bucket(history, Rate { period: 1, ..RATE });
        check(fast, &[at(7, 10), at(8, 10)], 0);
        check(fast, &[at(7, 10), at(8, 11)], 1);
    }

    #[test]
    fn two_contracts_double_rate_and_burst() {
        let twice: Contract = |history| bucket(history, Rate { count: 20, ..RATE });
        let both = [at(0, 20), steady(100, 99), at(0, 20), steady(100, 99)].concat();
        check(twice, std::slice::from_ref(&both), 40);
        check(twice, &[both, at(9_900, 1)], 41);
    }

    #[test]
    fn departures_are_spaced_one_by_one() {
        check(DEPARTURES, &[at(0, 20)], 0);
        check(DEPARTURES, &[at(0, 1), at(99, 1)], 0);
        check(DEPARTURES, &[at(0, 1), at(98, 1)], 1);
        check(COARSE_DEPARTURES, &[at(0, 1), at(90, 1)], 0);
        check(COARSE_DEPARTURES, &[at(0, 1), at(89, 1)], 1);
        check(DEPARTURES, &[steady(0, 1_000)], 0);
        check(DEPARTURES, &[steady(0, 1_000), at(50_050, 1)], 1);
    }

    #[test]
    fn departures_wait_for_the_preceding_cost() {
        check(DEPARTURES, &[at(0, 5), at(500, 7), at(1_200, 1)], 0);
        check(DEPARTURES, &[at(0, 5), at(400, 7), at(1_200, 1)], 1);
        check(DEPARTURES, &[at(0, 5), at(500, 7), at(1_100, 1)], 1);
        check(DEPARTURES, &[at(0, 5), at(500, 7), at(1_000, 1)], 2);
    }

    #[test]
    fn departures_at_one_instant_end_with_the_costliest() {
        check(DEPARTURES, &[at(0, 9), at(0, 1)], 1);
        check(DEPARTURES, &[at(0, 9), at(0, 1), at(0, 2)], 3);
        check(DEPARTURES, &[at(0, 1), at(100, 9), at(100, 1)], 1);
    }

    #[test]
    fn fixed_window_ends_just_before_the_next() {
        check(FIXED, &[at(0, 4), at(999, 6), at(1_000, 10)], 10);
        check(FIXED, &[at(0, 4), at(999, 7), at(1_000, 10)], 11);
        check(FIXED, &[at(0, 4), at(999, 6), at(1_000, 11)], 11);
    }

    #[test]
    fn fixed_window_begins_at_its_offset() {
        check(STAGGERED_FIXED, &[at(299, 10), at(300, 10)], 10);
        check(STAGGERED_FIXED, &[at(300, 10), at(1_300, 10)], 10);
        check(STAGGERED_FIXED, &[at(300, 10), at(1_299, 1)], 11);
    }

    #[test]
    fn fixed_window_detects_a_violation_in_the_middle() {
        check(FIXED, &[steady(0, 10_000)], 10);
        check(FIXED, &[steady(0, 10_000), at(500_050, 1)], 11);
    }

    #[test]
    fn sliding_window_weighs_the_previous_window() {
        // A quarter into the next window 10 weigh 7.5, so that 2 fit.
        check(SLIDING, &[at(999, 10), at(1_250, 2)], 10);
        check(SLIDING, &[at(999, 10), at(1_250, 3)], 11);
        check(SLIDING, &[at(999, 10), at(1_300, 3)], 10);
        check(SLIDING, &[at(999, 10), at(1_299, 3)], 11);
    }

    #[test]
    fn sliding_window_remembers_one_window() {
        check(SLIDING, &[at(0, 10), at(1_900, 9), at(2_000, 1)], 10);
        check(SLIDING, &[at(0, 10), at(1_900, 9), at(2_000, 2)], 11);
        check(SLIDING, &[at(0, 10), at(2_000, 10)], 10);
        check(SLIDING, &[at(0, 10), at(1_999, 10)], 11);
    }

    #[test]
    fn sliding_window_sees_time_in_ticks() {
        // Until 1,300 the tick is 1,200, where 20 weigh 16.
        check(COARSE_SLIDING, &[at(0, 20), at(1_299, 4)], 20);
        check(COARSE_SLIDING, &[at(0, 20), at(1_299, 5)], 21);
        check(COARSE_SLIDING, &[at(0, 20), at(1_300, 6)], 20);
    }

    #[test]
    fn sliding_window_detects_a_violation_in_the_middle() {
        // At the start of a window the ten of the previous window have full weight.
        check(SLIDING, &[steady(0, 10_000)], 11);
        check(SLIDING, &[steady(0, 10_000), at(500_050, 1)], 12);
    }

    #[test]
    fn sliding_window_admits_twice_its_quota_less_one() {
        check(SLIDING, &[at(999, 10), at(1_998, 9)], 10);
        check(ANY, &[at(999, 10), at(1_998, 9)], 19);
        check(SLIDING, &[at(999, 10), at(1_998, 10)], 11);
        check(ANY, &[at(999, 10), at(1_998, 10)], 20);
    }

    #[test]
    fn any_period_ends_just_before_one_period_later() {
        check(ANY, &[at(7, 6), at(1_006, 4), at(1_007, 6)], 10);
        check(ANY, &[at(7, 6), at(1_006, 5), at(1_007, 5)], 11);
        check(ANY, &[at(0, 10), steady(1_000, 100)], 10);
        check(ANY, &[at(0, 10), steady(999, 100)], 11);
    }

    #[test]
    fn any_period_detects_a_violation_in_the_middle() {
        check(ANY, &[steady(0, 10_000)], 10);
        check(ANY, &[steady(0, 10_000), at(500_050, 1)], 11);
    }

    #[test]
    fn concurrency_counts_simultaneous_holders() {
        fn check(holds: &[(u64, u64)], needed: u128) {
            let hold = |&(from, until): &(u64, u64)| Hold { from, until };
            let forwards: Vec<_> = holds.iter().map(hold).collect();
            let backwards: Vec<_> = holds.iter().rev().map(hold).collect();
            assert_eq!(concurrency(&forwards), needed);
            assert_eq!(concurrency(&backwards), needed, "backwards");
        }
        check(&[(0, 10), (10, 20), (20, u64::MAX)], 1);
        check(&[(0, 11), (10, 20), (20, u64::MAX)], 2);
        check(&[(0, 10), (0, 10), (10, 20), (10, 20)], 2);
        check(&[(0, 10), (0, 11), (10, 20), (10, 20)], 3);
        check(&[(0, 99), (5, 6), (6, 7), (50, 51), (98, 100)], 2);
        check(&[(0, 99), (5, 6), (6, 7), (50, 51), (50, 51), (98, 100)], 3);
        check(&[(0, 10), (5, 5), (7, 3)], 1);
    }

    #[test]
    fn huge_numbers_are_exact() {
        const HUGE: u64 = 1 << 53;
        const HUGE_RATE: Rate = Rate { count: HUGE, period: HUGE, tick: 1 };
        const HUGE_WINDOWS: Windows = Windows { period: HUGE, offset: 0 };
        let huge = u128::from(HUGE);

        // One unit is refilled per microsecond, and the tick is worth one unit.
        let contract: Contract = |history| bucket(history, HUGE_RATE);
        check(contract, &[at(0, HUGE), at(HUGE, HUGE)], huge - 1);
        check(contract, &[at(0, HUGE), at(HUGE - 1, HUGE)], huge);

        let contract: Contract = |history| departures(history, HUGE_RATE);
        check(contract, &[at(0, HUGE), at(HUGE - 1, HUGE)], 0);
        check(contract, &[at(0, HUGE), at(HUGE - 2, HUGE)], 1);

        let contract: Contract = |history| fixed_window(history, HUGE_WINDOWS);
        check(contract, &[at(HUGE - 1, HUGE), at(HUGE, HUGE)], huge);
        check(contract, &[at(HUGE - 2, HUGE), at(HUGE - 1, 1)], huge + 1);

        let contract: Contract = |history| sliding_window(history, HUGE_WINDOWS, 1);
        check(contract, &[at(HUGE - 1, HUGE), at(HUGE + 9, 9)], huge);
        check(contract, &[at(HUGE - 1, HUGE), at(HUGE + 8, 9)], huge + 1);

        let contract: Contract = |history| any_period(history, HUGE);
        check(contract, &[at(1, HUGE), at(HUGE + 1, HUGE)], huge);
        check(contract, &[at(1, HUGE), at(HUGE, 1)], huge + 1);
    }

    #[test]
    fn largest_numbers_do_not_overflow() {
        const MOST: u64 = BOUND - 1;
        const RATE: Rate = Rate { count: MOST, period: MOST, tick: MOST };
        const WINDOWS: Windows = Windows { period: u64::MAX, offset: u64::MAX - 1 };
        let (history, most) = ([at(0, MOST - 2), at(MOST, 2)], u128::from(MOST));
        check(|all| bucket(all, RATE), &history, 0);
        check(|all| bucket(all, Rate { count: 0, ..RATE }), &history, most);
        check(|all| bucket(all, Rate { period: 1, ..RATE }), &history, 0);
        check(|all| departures(all, RATE), &history, 0);
        check(|all| fixed_window(all, WINDOWS), &history, most);
        check(|all| sliding_window(all, WINDOWS, 1), &history, most);
        check(|all| any_period(all, u64::MAX), &history, most);
    }

    #[test]
    #[should_panic(expected = "must be below 2^62")]
    fn too_large_total_is_rejected() {
        check(ANY, &[at(0, BOUND - 1), at(9_999, 1)], 0);
    }

    // The tests below compare each checker with a literal evaluation of its contract over every interval and every
    // instant of many small histories.

    const HISTORIES: u64 = 5_000;

    /// All histories end before this time.
    const END: u64 = 60;

    #[test]
    fn bucket_agrees_with_every_interval() {
        let mut random = Random::new();
        for _ in 0..HISTORIES {
            let (history, rate) = (random.history(), random.rate());
            let needed = beyond_in_every_interval(&history, rate, |_| 0);
            assert_eq!(bucket(&history, rate), needed.into(), "{rate:?} {history:?}");
        }
    }

    #[test]
    fn departures_agree_with_every_interval() {
        let mut random = Random::new();
        for _ in 0..HISTORIES {
            let (history, rate) = (random.history(), random.rate());
            let needed = beyond_in_every_interval(&history, rate, |cost_of_last| cost_of_last);
            assert_eq!(departures(&history, rate), needed.into(), "{rate:?} {history:?}");
        }
    }

    fn beyond_in_every_interval(history: &[Admission], rate: Rate, spared: fn(u64) -> u64) -> u64 {
        let mut needed = 0;
        for b in 0..END {
            let at_b = history.iter().filter(|admission| admission.at == b);
            let Some(cost_of_last) = at_b.map(|admission| admission.cost).max() else {
                continue;
            };
            for a in 0..=b {
                let total = total_if(history, |at| a <= at && at <= b);
                let allowed = spared(cost_of_last) * rate.period + rate.count * (b - a + rate.tick);
                while total * rate.period > needed * rate.period + allowed {
                    needed += 1;
                }
            }
        }
        needed
    }

    #[test]
    fn fixed_window_agrees_with_every_window() {
        let mut random = Random::new();
        for _ in 0..HISTORIES {
            let (history, windows) = (random.history(), random.windows(1));
            let mut needed = 0;
            for now in 0..END {
                let this = number(windows, now);
                needed = needed.max(total_if(&history, |at| number(windows, at) == this));
            }
            assert_eq!(fixed_window(&history, windows), needed.into(), "{windows:?} {history:?}");
        }
    }

    #[test]
    fn sliding_window_agrees_with_every_instant() {
        let mut random = Random::new();
        for _ in 0..HISTORIES {
            let tick = random.within(1, 3);
            let (history, windows) = (random.history(), random.windows(tick));
            let period = windows.period;
            let mut needed = 0;
            for now in 0..END + 2 * period {
                let this = number(windows, now);
                let prev = total_if(&history, |at| number(windows, at) == this - 1);
                let cur = total_if(&history, |at| number(windows, at) == this && at <= now);
                let next_edge = (now + 1..).find(|&later| number(windows, later) != this);
                let left = next_edge.expect("windows end") - now / tick * tick;
                while prev * left + cur * period > needed * period {
                    needed += 1;
                }
            }
            let answer = sliding_window(&history, windows, tick);
            assert_eq!(answer, needed.into(), "{windows:?} {tick} {history:?}");
        }
    }

    #[test]
    fn any_period_agrees_with_every_interval() {
        let mut random = Random::new();
        for _ in 0..HISTORIES {
            let (history, period) = (random.history(), random.within(1, END));
            let mut needed = 0;
            for begin in 0..END {
                needed = needed.max(total_if(&history, |at| begin <= at && at < begin + period));
            }
            assert_eq!(any_period(&history, period), needed.into(), "{period} {history:?}");
        }
    }

    #[test]
    fn concurrency_agrees_with_every_moment() {
        let mut random = Random::new();
        for _ in 0..HISTORIES {
            let holds = random.holds();
            let mut needed = 0;
            for now in 0..END {
                let there = |hold: &&Hold| hold.from <= now && now < hold.until;
                needed = needed.max(holds.iter().filter(there).count());
            }
            assert_eq!(concurrency(&holds), needed as u128, "{holds:?}");
        }
    }

    fn total_if(history: &[Admission], inside: impl Fn(u64) -> bool) -> u64 {
        let counted = history.iter().filter(|admission| inside(admission.at));
        counted.map(|admission| admission.cost).sum()
    }

    /// The k of `[offset + k*period, offset + (k + 1)*period)`.
    fn number(windows: Windows, at: u64) -> i128 {
        (i128::from(at) - i128::from(windows.offset)).div_euclid(windows.period.into())
    }

    /// xorshift64: reproducible histories without a dependency.
    struct Random(u64);

    impl Random {
        fn new() -> Random {
            Random(0x9E37_79B9_7F4A_7C15)
        }

        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }

        fn within(&mut self, least: u64, most: u64) -> u64 {
            least + self.next() % (most - least + 1)
        }

        fn history(&mut self) -> Vec<Admission> {
            // Some are crowded into a few instants, some are spread out.
            let latest = self.within(0, END - 1);
            let length = self.within(0, 12);
            let mut admission = || Admission { at: self.within(0, latest), cost: self.within(1, 9) };
            (0..length).map(|_| admission()).collect()
        }

        fn holds(&mut self) -> Vec<Hold> {
            let length = self.within(0, 12);
            let mut hold = || Hold { from: self.within(0, END - 1), until: self.within(0, END - 1) };
            (0..length).map(|_| hold()).collect()
        }

        fn rate(&mut self) -> Rate {
            Rate { count: self.within(0, 9), period: self.within(1, 20), tick: self.within(1, 3) }
        }

        fn windows(&mut self, tick: u64) -> Windows {
            Windows { period: self.within(1, 20) * tick, offset: self.within(0, 40) * tick }
        }
    }
}
