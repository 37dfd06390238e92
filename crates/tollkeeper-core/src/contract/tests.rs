use super::*;
use crate::quota::Quota;

type Checker = fn(&[Admission]) -> u128;

/// Ten per 1,000 µs: each 100 µs make one free.
const RATE: Rate = Rate { count: 10, period: 1_000, tick: 1 };
const COARSE: Rate = Rate { tick: 10, ..RATE };
const WINDOWS: Windows = Windows { period: 1_000, offset: 0 };
const STAGGERED: Windows = Windows { offset: 300, ..WINDOWS };

const BUCKET: Checker = |history| bucket(history, RATE);
const COARSE_BUCKET: Checker = |history| bucket(history, COARSE);
const DEPARTURES: Checker = |history| departures(history, RATE);
const COARSE_DEPARTURES: Checker = |history| departures(history, COARSE);
const FIXED: Checker = |history| fixed_window(history, WINDOWS);
const STAGGERED_FIXED: Checker = |history| fixed_window(history, STAGGERED);
const SLIDING: Checker = |history| sliding_window(history, WINDOWS, 1);
const COARSE_SLIDING: Checker = |history| sliding_window(history, WINDOWS, 100);
const ANY: Checker = |history| any_period(history, 1_000);

/// Every case is a case of unsorted input, too.
fn check(contract: Checker, parts: &[Vec<Admission>], needed: u128) {
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
fn bucket_needs_nothing_when_one_tick_pays() {
    let fast: Checker = |history| bucket(history, Rate { period: 1, ..RATE });
    check(fast, &[at(7, 10), at(8, 10)], 0);
    check(fast, &[at(7, 10), at(8, 11)], 1);
}

#[test]
fn two_contracts_are_twice_the_rate_and_twice_the_burst() {
    let twice: Checker = |history| bucket(history, Rate { count: 20, ..RATE });
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
    // Until 1,300 it is 1,200, and 20 weigh 16.
    check(COARSE_SLIDING, &[at(0, 20), at(1_299, 4)], 20);
    check(COARSE_SLIDING, &[at(0, 20), at(1_299, 5)], 21);
    check(COARSE_SLIDING, &[at(0, 20), at(1_300, 6)], 20);
}

#[test]
fn sliding_window_detects_a_violation_in_the_middle() {
    // At the start of a window the ten of the one before weigh in full.
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

    // One unit becomes free each microsecond, and the tick is worth one.
    let contract: Checker = |history| bucket(history, HUGE_RATE);
    check(contract, &[at(0, HUGE), at(HUGE, HUGE)], huge - 1);
    check(contract, &[at(0, HUGE), at(HUGE - 1, HUGE)], huge);

    let contract: Checker = |history| departures(history, HUGE_RATE);
    check(contract, &[at(0, HUGE), at(HUGE - 1, HUGE)], 0);
    check(contract, &[at(0, HUGE), at(HUGE - 2, HUGE)], 1);

    let contract: Checker = |history| fixed_window(history, HUGE_WINDOWS);
    check(contract, &[at(HUGE - 1, HUGE), at(HUGE, HUGE)], huge);
    check(contract, &[at(HUGE - 2, HUGE), at(HUGE - 1, 1)], huge + 1);

    let contract: Checker = |history| sliding_window(history, HUGE_WINDOWS, 1);
    check(contract, &[at(HUGE - 1, HUGE), at(HUGE + 9, 9)], huge);
    check(contract, &[at(HUGE - 1, HUGE), at(HUGE + 8, 9)], huge + 1);

    let contract: Checker = |history| any_period(history, HUGE);
    check(contract, &[at(1, HUGE), at(HUGE + 1, HUGE)], huge);
    check(contract, &[at(1, HUGE), at(HUGE, 1)], huge + 1);
}

#[test]
fn the_largest_numbers_fit() {
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

/// A history of costs and times, judged by a quota of 10 per second and, for a bucket, a burst of 3.
fn judged(algorithm: Algorithm, history: &[(u64, u64)]) -> (u128, Option<(u64, u64, u128, u128)>) {
    let quota = Quota::per_second(10).with_burst(algorithm.has_burst().then_some(3));
    let quota = CheckedQuota::new(algorithm, quota).unwrap();
    let history: Vec<Admission> =
        history.iter().map(|(at, cost)| Admission { at: *at, cost: *cost }).collect();
    let judgement = Contract::of(&quota, 0).unwrap().judge(&history);
    let breach = judgement.first.map(|first| (first.from, first.until, first.admitted, first.allowed));
    assert_eq!(judgement.kept(), judgement.needed <= judgement.limit);
    (judgement.needed, breach)
}

#[test]
fn first_breach_of_a_bucket_has_its_interval() {
    let kept = [(50_000, 1), (1_000_000, 3), (1_100_000, 1)];
    assert_eq!(judged(Algorithm::TokenBucket, &kept), (3, None));
    // Two later ones are worse, and one of them comes first in the file.
    let broken = [(3_000_000, 9), (1_100_000, 1), (1_000_000, 3), (1_150_000, 1), (50_000, 1)];
    let first = (1_000_000, 1_150_000, 5, 4);
    assert_eq!(judged(Algorithm::LeakyBucket, &broken), (9, Some(first)));
}

#[test]
fn first_breach_of_a_window_has_its_interval() {
    let history = [(999_999, 10), (1_000_000, 10), (1_700_000, 2), (5_000_000, 20)];
    assert_eq!(judged(Algorithm::FixedWindow, &history), (20, Some((1_000_000, 1_700_000, 12, 10))));
    // Half a second into the second window the 10 of the first weigh 5.
    let history = [(100_000, 10), (1_500_000, 5), (1_500_001, 1)];
    assert_eq!(judged(Algorithm::SlidingWindow, &history[..2]), (10, None));
    assert_eq!(judged(Algorithm::SlidingWindow, &history), (11, Some((0, 1_500_001, 16, 10))));
}

#[test]
fn first_breach_of_a_log_has_its_interval() {
    let history = [(0, 5), (400_000, 5), (1_000_000, 5), (1_399_999, 1), (1_400_000, 1)];
    assert_eq!(judged(Algorithm::SlidingLog, &history), (11, Some((400_000, 1_399_999, 11, 10))));
}

#[test]
fn a_limit_of_nothing_allows_nothing() {
    let nothing = CheckedQuota::nothing(Algorithm::FixedWindow, crate::Span::from_secs(60));
    let contract = Contract::of(&nothing, 0).unwrap();
    assert!(contract.judge(&[]).kept());
    let first = contract.judge(&at(7, 2)).first.unwrap();
    assert_eq!(first, Breach { from: 7, until: 7, admitted: 2, allowed: 0 });
}

#[test]
fn a_changed_quota_allows_the_larger_of_both() {
    let quota = |count, burst| {
        CheckedQuota::new(Algorithm::TokenBucket, Quota::per_second(count).burst(burst)).unwrap()
    };
    let contract = Contract::of(&quota(10, 3), 0).unwrap().or(&quota(5, 8));
    let history = [at(0, 8), at(800_000, 8)].concat();
    assert_eq!(contract.judge(&history).needed, 8);
    assert!(contract.judge(&history).kept());
    assert!(!contract.judge(&[at(0, 9)].concat()).kept());
    assert!(contract.at_least(9).judge(&[at(0, 9)].concat()).kept());
}

// From here on each checker is compared with the words of its contract read literally, over
// every interval and every instant of many small histories.

const HISTORIES: u64 = 5_000;

/// All histories end before it.
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

/// xorshift64: the same histories everywhere, and no dependency.
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
