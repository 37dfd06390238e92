//! Property tests of the algorithms: invariants checked on thousands of random histories of one key.
//!
//! Each test runs [`Case`]s of one algorithm and one [`Kind`]. A failure shows the smallest history that still fails.
//! `TOLLKEEPER_CASES` sets the number of cases. A test also fails if its cases are too easy (too few refusals,
//! boundaries crossed or costs above 1).

use std::panic::{AssertUnwindSafe, catch_unwind};

use tollkeeper_core::algorithm::{Past, State};
use tollkeeper_core::contract::{self, Admission, Rate, Windows};
use tollkeeper_core::{Algorithm, CheckedQuota, Quota, Retry, Span};
use tollkeeper_tests::cases::{Act, Case, Kind, LATEST, smallest};
use tollkeeper_tests::one_key::{Answer, OneKey};
use tollkeeper_tests::oracle::{Oracle, Slots};

macro_rules! properties {
    ($($name:ident: $algorithm:ident $kind:ident;)*) => {
        $(
            #[test]
            fn $name() {
                try_all(stringify!($name), Algorithm::$algorithm, Kind::$kind);
            }
        )*
    };
}

// Every verdict, `remaining` and `reset_after` match the algorithm's definition; waits are exact; refusals and peeks
// write nothing; the contract holds.
properties! {
    token_bucket_matches_its_definition: TokenBucket Plain;
    leaky_bucket_matches_its_definition: LeakyBucket Plain;
    fixed_window_matches_its_definition: FixedWindow Plain;
    sliding_window_matches_its_definition: SlidingWindow Plain;
    sliding_log_matches_its_definition: SlidingLog Plain;
    concurrency_matches_its_definition: Concurrency Plain;
}

// The same with refunds and settlements: the contract holds for admissions minus refunds, and a late refund frees
// nothing newer than its charge.
properties! {
    token_bucket_refunds_free_nothing_newer: TokenBucket Refunds;
    leaky_bucket_refunds_nothing: LeakyBucket Refunds;
    fixed_window_refunds_free_nothing_newer: FixedWindow Refunds;
    sliding_window_refunds_free_nothing_newer: SlidingWindow Refunds;
    sliding_log_refunds_free_nothing_newer: SlidingLog Refunds;
}

// Across changes of the quota the contract holds with the largest quota that was active.
properties! {
    token_bucket_keeps_its_contract_over_changes: TokenBucket Changes;
    leaky_bucket_keeps_its_contract_over_changes: LeakyBucket Changes;
    fixed_window_keeps_its_contract_over_changes: FixedWindow Changes;
    sliding_window_keeps_its_contract_over_changes: SlidingWindow Changes;
    sliding_log_keeps_its_contract_over_changes: SlidingLog Changes;
    concurrency_keeps_its_contract_over_changes: Concurrency Changes;
}

// The same with refunds before and after one change. (Not across several: a bucket knows the rate at the time of the
// charge and the current one, so units that drained at a faster rate in between could be refunded as well.)
properties! {
    token_bucket_refunds_over_a_change: TokenBucket RefundsOverAChange;
    fixed_window_refunds_over_a_change: FixedWindow RefundsOverAChange;
    sliding_window_refunds_over_a_change: SlidingWindow RefundsOverAChange;
    sliding_log_refunds_over_a_change: SlidingLog RefundsOverAChange;
}

// A clock set back admits nothing extra, and a refusal outlasts it by at most two fill times (two periods;
// sliding-window three); a clock set forward admits at most one extra burst.
properties! {
    token_bucket_survives_clock_steps: TokenBucket Steps;
    leaky_bucket_survives_clock_steps: LeakyBucket Steps;
    fixed_window_survives_clock_steps: FixedWindow Steps;
    sliding_window_survives_clock_steps: SlidingWindow Steps;
    sliding_log_survives_clock_steps: SlidingLog Steps;
    concurrency_survives_clock_steps: Concurrency Steps;
}

#[test]
fn full_bucket_recovers_after_its_burst_is_lowered() {
    for period in PERIODS {
        let quota = |burst| bucket(period, 100, burst);
        let mut key = OneKey::new(quota(50), NOW);
        assert!(key.check(50).outcome.allowed);
        key.quota = quota(3);
        let refused = key.check(1).outcome;
        assert_eq!((refused.allowed, refused.remaining), (false, 0));
        let Some(Retry::After(wait)) = refused.retry else { panic!("never: {refused:?}") };
        // 48 of the 50 must drain, at 100 a period, before one more fits into a burst of three.
        let expected = period.as_micros() * 48 / 100;
        assert!(wait.as_micros().abs_diff(expected) <= quota(3).tick().span().as_micros(), "{wait}");
        key.now += wait.as_micros() - 1;
        assert!(!key.check(1).outcome.allowed);
        key.now += 1;
        assert!(key.check(1).outcome.allowed);
        key.now += quota(3).window().as_micros() + quota(3).tick().span().as_micros();
        assert_eq!(key.peek(1).remaining, 3);
    }
}

/// If the tick depended on count and period together, one more request a day would change the unit of time and so the
/// meaning of every stored state.
#[test]
fn change_from_26062_to_26063_a_day_keeps_the_state() {
    let day = Span::from_secs(86_400);
    let mut key = OneKey::new(bucket(day, 26_062, 26_062), NOW);
    assert!(key.check(26_062).outcome.allowed);
    let state = key.state().cloned();
    key.quota = bucket(day, 26_063, 26_063);
    assert_eq!(key.peek(1).remaining, 1, "exactly one more fits");
    assert!(!key.check(2).outcome.allowed);
    assert_eq!(key.state(), state.as_ref());
    key.now += day.as_micros() / 2;
    assert!((13_032 - 1..=13_032).contains(&key.peek(1).remaining), "half drains in half a day");
}

#[test]
fn idle_key_never_exceeds_its_burst() {
    for algorithm in Algorithm::ALL {
        for period in PERIODS {
            let quota = CheckedQuota::new(algorithm, Quota::every(7, period)).expect("valid");
            for idle in [1, 2, 3, 10, 30] {
                let mut key = OneKey::new(quota, NOW);
                assert!(key.check(1).outcome.allowed);
                key.now += idle * 2 * period.as_micros();
                for left in (0..7).rev() {
                    assert_eq!(key.check(1).outcome.remaining, left, "{algorithm} {period}");
                }
                assert!(!key.check(1).outcome.allowed, "{algorithm} {period}: idle for {idle}");
            }
        }
    }
}

/// One period for each size of tick.
const PERIODS: [Span; 3] = [Span::from_secs(1), Span::from_secs(3_600), Span::from_secs(7 * 86_400)];

/// A time in 2025 that is on no boundary of a tick or window.
const NOW: u64 = 1_763_200_000_123_456;

fn bucket(period: Span, count: u64, burst: u64) -> CheckedQuota {
    let rate = Quota::every(count, period).burst(burst);
    CheckedQuota::new(Algorithm::TokenBucket, rate).expect("valid")
}

/// The largest time that results can have. Only a charge under a quota millions of times larger takes so long.
const END_OF_TIME: u64 = (1 << 53) / 1_000_000 * 1_000_000;

/// How often a test met the situations it needs.
#[derive(Default)]
struct Tally {
    requests: u64,
    refused: u64,
    crossings: u64,
    above_one: u64,
}

fn try_all(name: &str, algorithm: Algorithm, kind: Kind) {
    let cases = std::env::var("TOLLKEEPER_CASES").map_or(3_000, |cases| {
        cases.parse().unwrap_or_else(|_| panic!("TOLLKEEPER_CASES is `{cases}`: it should be a whole number"))
    });
    let mut tally = Tally::default();
    for number in 0..cases {
        let case = Case::new(algorithm, kind, number);
        if let Err(why) = play(&case, kind, &mut tally) {
            let fails = |case: &Case| play(case, kind, &mut Tally::default()).err();
            let (case, why) = smallest(case, why, fails);
            panic!("case {number}: {why}\n{case}");
        }
    }
    let share = |part: u64| part as f64 * 100.0 / tally.requests as f64;
    let shares = [share(tally.refused), share(tally.crossings), share(tally.above_one)];
    println!(
        "{name}: {cases} histories, {} requests: {:.1} % refused, {:.1} % across a boundary, {:.1} % of cost above 1",
        tally.requests, shares[0], shares[1], shares[2]
    );
    assert!(
        shares.iter().all(|share| *share >= 5.0),
        "{name}: the cases are too easy: {shares:?} % of refusals, boundaries and costs above 1, 5 % needed"
    );
}

/// Runs a case; a panic inside the algorithms is a failure like any other.
fn play(case: &Case, kind: Kind, tally: &mut Tally) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(|| Play::new(case, kind).run(case, tally))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("panicked: {}", text.unwrap_or_default()))
    })
}

macro_rules! ensure {
    ($condition:expr, $($words:tt)+) => {
        if !$condition {
            return Err(format!($($words)+));
        }
    };
}

/// A running case.
struct Play {
    kind: Kind,
    key: OneKey,
    /// One for each interval between two clock steps; the last is the current one.
    oracles: Vec<Oracle>,
    slots: Slots,
    /// Receipts that are neither refunded nor settled, with the index of their entry in the oracle.
    receipts: Vec<(Past, usize)>,
    /// `retry` of the last check.
    last_retry: Option<Retry>,
    /// Monotonic time, unaffected by clock steps, and the admissions on it.
    real: u64,
    admitted: Vec<OnRealTime>,
    steps: u64,
    steps_forward: u64,
}

/// An admission, with how often the clock had been set before it.
#[derive(Clone, Copy)]
struct OnRealTime {
    at: u64,
    cost: u64,
    steps: u64,
    steps_forward: u64,
}

impl Play {
    fn new(case: &Case, kind: Kind) -> Play {
        let mut key = OneKey::new(case.quotas[0], case.start);
        (key.shift, key.hold) = (case.shift, case.hold);
        let mut slots = Slots::default();
        if case.held > 0 {
            key.occupy(case.held);
            (0..case.held).for_each(|_| slots.take(key.now, key.quota.period().as_micros()));
        }
        let oracle = Oracle::new(&key.quota, key.shift, key.hold.map(Span::as_micros));
        Play {
            kind,
            key,
            oracles: vec![oracle],
            slots,
            receipts: Vec::new(),
            last_retry: None,
            real: 0,
            admitted: Vec::new(),
            steps: 0,
            steps_forward: 0,
        }
    }

    fn run(mut self, case: &Case, tally: &mut Tally) -> Result<(), String> {
        let window = |key: &OneKey| (key.now + key.shift) / key.quota.period().as_micros();
        let mut last_window = window(&self.key);
        for (place, one) in case.moves.iter().enumerate() {
            let wait = one.wait.micros(&self.key, self.last_retry);
            self.key.now += wait;
            self.real += wait;
            let result = match one.act {
                Act::Check(cost) => {
                    let cost = cost.number(&self.key);
                    tally.requests += 1;
                    tally.above_one += u64::from(cost > 1);
                    tally.crossings += u64::from(window(&self.key) != last_window);
                    last_window = window(&self.key);
                    let result = self.check(cost);
                    tally.refused += u64::from(self.last_retry.is_some());
                    result
                }
                Act::Collect => {
                    self.key.collect();
                    Ok(())
                }
                Act::Refund(before_last, eighths) => self.refund(before_last, eighths),
                Act::Settle(before_last, cost) => self.settle(before_last, cost.number(&self.key)),
                Act::Release(before_last) => self.release(before_last, false),
                Act::Renew(before_last) => self.release(before_last, true),
                Act::Change(quota) => {
                    self.key.quota = case.quotas[quota];
                    self.oracle().change(&case.quotas[quota]);
                    Ok(())
                }
                Act::Back(step) => {
                    let before = self.key.peek(1).remaining;
                    self.key.now = self.key.now.saturating_sub(step.micros(&self.key));
                    self.stepped(false);
                    self.no_credit(before)
                }
                Act::Forward(step) => {
                    let now = self.key.now;
                    self.key.now = (now + step.micros(&self.key)).min(LATEST.max(now));
                    self.stepped(true);
                    Ok(())
                }
            };
            result.map_err(|why| format!("move {place}, at {}: {why}", self.key.now))?;
        }
        self.judge(case)
    }

    fn check(&mut self, cost: u64) -> Result<(), String> {
        let before = self.key.clone();
        let answer = self.key.check(cost);
        let outcome = answer.outcome;
        ensure!(outcome.limit == self.key.quota.limit(), "limit: {outcome:?}");
        ensure!(outcome.allowed == outcome.retry.is_none(), "a retry if refused, and only then: {outcome:?}");
        ensure!(!answer.moved || self.kind == Kind::Steps, "moved, although the clock was never set back");
        self.a_peek_agreed(&before, cost, &answer)?;
        self.a_refusal_wrote_nothing(&before, &answer)?;
        self.the_wait_is_exact(cost, &answer)?;
        self.next_is_the_retry_of_one_more(&answer)?;
        self.as_defined(cost, &answer)?;
        self.last_retry = outcome.retry;
        if let Some(past) = answer.past {
            let (now, delay) = (self.key.now, outcome.delay.as_micros());
            self.oracle().admit(now, cost, delay);
            if let Some(breach) = self.oracle().breach() {
                return Err(format!("contract: {breach}"));
            }
            let entry = self.oracle().len() - 1;
            self.receipts.push((past, entry));
            let Play { real: at, steps, steps_forward, .. } = *self;
            self.admitted.push(OnRealTime { at, cost, steps, steps_forward });
        }
        Ok(())
    }

    fn a_peek_agreed(&self, before: &OneKey, cost: u64, answer: &Answer) -> Result<(), String> {
        let (peek, check) = (before.peek(cost), answer.outcome);
        let verdict = (peek.allowed, peek.retry, peek.delay) == (check.allowed, check.retry, check.delay);
        ensure!(verdict && (check.allowed || peek == check), "a peek returned {peek:?}, a check {check:?}");
        Ok(())
    }

    fn a_refusal_wrote_nothing(&self, before: &OneKey, answer: &Answer) -> Result<(), String> {
        let same = before.state() == self.key.state();
        ensure!(answer.outcome.allowed || same || answer.moved, "a refusal has changed the state");
        Ok(())
    }

    /// For all algorithms but concurrency, where the wait is a hint.
    fn the_wait_is_exact(&self, cost: u64, answer: &Answer) -> Result<(), String> {
        let limit = self.key.quota.limit();
        let Some(retry) = answer.outcome.retry.filter(|_| self.algorithm() != Algorithm::Concurrency) else {
            return Ok(());
        };
        let Retry::After(wait) = retry else {
            ensure!(cost > limit, "never, for a cost of {cost} of {limit}");
            return Ok(());
        };
        ensure!(cost <= limit, "{wait} for a cost above the limit");
        ensure!(wait > Span::ZERO, "refused with a retry of zero");
        let then = self.key.now + wait.as_micros();
        if then >= END_OF_TIME {
            return Ok(());
        }
        ensure!(self.key.peek_at(then, cost).allowed, "waiting {wait} is not enough for {cost}");
        ensure!(
            !self.key.peek_at(then - 1, cost).allowed,
            "waiting 1us less than {wait} is enough for {cost}"
        );
        let (most, of) = self.longest_wait();
        ensure!(
            self.kind != Kind::Steps || wait.as_micros() <= most,
            "a refusal outlasts a step of the clock by {wait}, more than {of}"
        );
        Ok(())
    }

    /// The longest possible wait, whatever the clock steps were.
    fn longest_wait(&self) -> (u64, &'static str) {
        let (quota, period) = (&self.key.quota, self.key.quota.period().as_micros());
        match self.algorithm() {
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                (2 * quota.fill_ticks() * quota.tick().span().as_micros(), "two fill times")
            }
            Algorithm::SlidingWindow => (3 * period, "three periods"),
            _ => (2 * period, "two periods"),
        }
    }

    fn next_is_the_retry_of_one_more(&self, answer: &Answer) -> Result<(), String> {
        let outcome = answer.outcome;
        // Slots have only hints, and with a maximum delay the wait is for the queue as well.
        if self.algorithm() == Algorithm::Concurrency || self.key.hold.is_some() {
            return Ok(());
        }
        let expected = match outcome.remaining {
            all if all == outcome.limit => Span::ZERO,
            some => match self.key.peek(some + 1).retry {
                Some(Retry::After(wait)) => wait,
                other => return Err(format!("{some} remain, but the retry for {} is {other:?}", some + 1)),
            },
        };
        ensure!(outcome.next_after == Some(expected), "next is {:?}, not {expected}", outcome.next_after);
        let rest = outcome.remaining;
        ensure!(rest == 0 || self.key.peek(rest).allowed, "{rest} remain, but are refused");
        Ok(())
    }

    /// Compares the verdict and the numbers with the definition of the algorithm. Not after a change of a bucket's rate:
    /// whether the time before the change drains at the old rate or the new one is unspecified.
    fn as_defined(&mut self, cost: u64, answer: &Answer) -> Result<(), String> {
        let outcome = answer.outcome;
        let bucket = self.key.quota.algorithm().has_burst();
        let predictable = match self.kind {
            Kind::Plain | Kind::Refunds => true,
            Kind::Changes | Kind::RefundsOverAChange => !bucket,
            Kind::Steps => false,
        };
        if !predictable {
            return Ok(());
        }
        let now = self.key.now;
        if self.algorithm() == Algorithm::Concurrency {
            let held = self.slots.held(now) as u64;
            let count = self.key.quota.count();
            ensure!(outcome.allowed == (held < count), "{held} of {count} are held: {outcome:?}");
            if outcome.allowed {
                self.slots.take(now, self.key.quota.period().as_micros());
            }
            let left = count.saturating_sub(self.slots.held(now) as u64);
            ensure!(outcome.remaining == left, "{left} are free: {outcome:?}");
            return Ok(());
        }
        let before = self.oracle().says(now, cost);
        ensure!(outcome.allowed == before.allowed, "by definition {before:?}: {outcome:?}");
        if let Some(Retry::After(wait)) = outcome.retry {
            let then = now + wait.as_micros();
            ensure!(self.oracle().says(then, cost).allowed, "by definition {wait} is not enough for {cost}");
            ensure!(!self.oracle().says(then - 1, cost).allowed, "by definition less is enough for {cost}");
        }
        let delay = if before.allowed { before.delay } else { 0 };
        let mut after = self.oracle().clone();
        if before.allowed {
            after.admit(now, cost, 0);
        }
        let after = after.says(now, 1);
        let actual = (outcome.remaining.into(), outcome.reset_after.map(|span| span.as_micros().into()));
        ensure!(actual == (after.remaining, Some(after.reset)), "by definition {after:?}: {outcome:?}");
        ensure!(i128::from(outcome.delay.as_micros()) == delay, "by definition {before:?}: {outcome:?}");
        Ok(())
    }

    fn refund(&mut self, before_last: usize, eighths: u64) -> Result<(), String> {
        let Some((past, entry)) = self.take_receipt(before_last) else { return Ok(()) };
        let part = (past.cost / 8 * eighths + past.cost % 8 * eighths / 8).max(1);
        let before = self.key.peek(1).remaining;
        self.key.give_back(part, &past);
        let now = self.key.now;
        self.oracle().refund(now, entry, part);
        let after = self.key.peek(1).remaining;
        // One more than the part, because a refund can complete a unit that had partly refilled.
        ensure!((before..=before + part + 1).contains(&after), "{part} refunded: {before} became {after}");
        Ok(())
    }

    fn settle(&mut self, before_last: usize, more: u64) -> Result<(), String> {
        let Some((_, _)) = self.take_receipt(before_last) else { return Ok(()) };
        let before = self.key.peek(1).remaining;
        self.key.add(more);
        let now = self.key.now;
        self.oracle().settle(now, more);
        let after = self.key.peek(1).remaining;
        ensure!(after == before.saturating_sub(more), "{more} settled: {before} became {after}");
        Ok(())
    }

    /// A charge is refunded or settled once.
    fn take_receipt(&mut self, before_last: usize) -> Option<(Past, usize)> {
        let place = self.receipts.len().checked_sub(before_last + 1)?;
        Some(self.receipts.remove(place))
    }

    fn release(&mut self, before_last: u64, renew: bool) -> Result<(), String> {
        let taken = self.key.slots_taken();
        if before_last >= taken {
            return Ok(());
        }
        let (nth, now) = (taken - before_last, self.key.now);
        let ttl = self.key.quota.period().as_micros();
        let held = if renew { self.key.renew(nth) } else { self.key.release(nth) };
        if self.kind != Kind::Steps {
            let place = usize::try_from(nth).expect("a place in a list");
            let expected = self.slots.until(place, now, if renew { now + ttl } else { now });
            ensure!(held == expected, "slot {nth}: held is {held}");
        }
        Ok(())
    }

    fn stepped(&mut self, forward: bool) {
        self.steps += 1;
        self.steps_forward += u64::from(forward);
        let oracle = Oracle::new(&self.key.quota, self.key.shift, None);
        self.oracles.push(oracle);
    }

    /// Setting the clock back frees nothing. Exception: a sliding window that is moved keeps its counts, but the current
    /// window may have progressed further.
    fn no_credit(&self, before: u64) -> Result<(), String> {
        let after = self.key.peek(1).remaining;
        let excepted = self.algorithm() == Algorithm::SlidingWindow && self.key.clone().check(1).moved;
        ensure!(excepted || after <= before, "a clock set back raised {before} to {after}");
        Ok(())
    }

    /// Checks the contract over the whole history; the oracle checks it at every admission.
    fn judge(&self, case: &Case) -> Result<(), String> {
        if self.algorithm() == Algorithm::Concurrency {
            return self.judge_slots(case);
        }
        for oracle in &self.oracles {
            self.judge_by_contract(case, oracle)?;
        }
        if self.kind == Kind::Steps { self.judge_on_real_time() } else { Ok(()) }
    }

    fn judge_by_contract(&self, case: &Case, oracle: &Oracle) -> Result<(), String> {
        let quota = &self.key.quota;
        let (period, tick) = (quota.period().as_micros(), quota.tick().span().as_micros());
        let most = |of: fn(&CheckedQuota) -> u64| case.quotas.iter().map(of).max().expect("at least one");
        let (count, burst) = (most(CheckedQuota::count), most(CheckedQuota::burst));
        let unit = small(oracle.unit());
        let entry = |(at, weight)| Admission { at: small(at), cost: small(weight) };
        let history: Vec<_> = oracle.admitted().map(|one| entry((one.at, one.weight))).collect();
        // Windows begin early by the shift, which equals beginning late by the rest of the period.
        let windows = Windows { period, offset: period - self.key.shift };
        let (needed, limit) = match self.algorithm() {
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                (contract::bucket(&history, Rate { count: count * unit, period, tick }), burst * unit)
            }
            Algorithm::FixedWindow => (contract::fixed_window(&history, windows), count),
            Algorithm::SlidingWindow => {
                let needed = contract::any_period(&history, period);
                ensure!(needed <= u128::from(2 * count - 1), "contract: {needed} in one period");
                (contract::sliding_window(&history, windows, tick), count)
            }
            Algorithm::SlidingLog => (contract::any_period(&history, period), count),
            Algorithm::Concurrency => unreachable!("see `judge_slots`"),
        };
        ensure!(needed <= u128::from(limit), "contract: the history needs {needed} of {limit}");
        if self.algorithm() == Algorithm::LeakyBucket && self.kind == Kind::Plain {
            let departures: Vec<_> = oracle.departures().map(entry).collect();
            let beyond = contract::departures(&departures, Rate { count, period, tick });
            ensure!(beyond == 0, "contract: {beyond} too many departures");
        }
        Ok(())
    }

    /// Checks buckets and logs on monotonic time: a clock set back admits nothing extra, one set forward at most one
    /// burst. Each step may split a tick in two, which allows one more tick.
    fn judge_on_real_time(&self) -> Result<(), String> {
        let quota = &self.key.quota;
        let [count, burst, period, tick] =
            [quota.count(), quota.burst(), quota.period().as_micros(), quota.tick().span().as_micros()]
                .map(i128::from);
        for (place, last) in self.admitted.iter().enumerate() {
            let mut sum = 0;
            for first in self.admitted[..=place].iter().rev() {
                let length = i128::from(last.at - first.at);
                let steps = i128::from(last.steps - first.steps);
                let bursts = 1 + i128::from(last.steps_forward - first.steps_forward);
                sum += i128::from(first.cost);
                let lawful = match self.algorithm() {
                    Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                        sum * period <= bursts * burst * period + count * (length + tick * (1 + steps))
                    }
                    Algorithm::SlidingLog => length >= period || sum <= bursts * count,
                    // Windows follow the adjusted clock: each interval was checked by itself.
                    _ => true,
                };
                ensure!(lawful, "contract: {sum} in {length}us of real time, {bursts} bursts");
            }
        }
        Ok(())
    }

    fn judge_slots(&self, case: &Case) -> Result<(), String> {
        let Some(State::Concurrency(slots)) = self.key.state() else { return Ok(()) };
        let most = case.quotas.iter().map(CheckedQuota::count).max().expect("at least one");
        if self.kind != Kind::Steps {
            let needed = contract::concurrency(&self.slots.holds);
            ensure!(needed <= u128::from(most), "contract: {needed} holders of {most}");
        }
        let held = slots.iter().filter(|slot| slot.expires > self.key.now).count() as u64;
        ensure!(held <= most, "{held} of {most} are held");
        // Even a slot that is ahead of the clock expires after two TTLs, if a check has seen it since.
        let mut later = self.key.clone();
        later.check(1);
        later.now += 2 * later.quota.period().as_micros();
        let free = later.peek(1).remaining;
        ensure!(free == later.quota.count(), "after two TTLs {free} are free");
        Ok(())
    }

    fn oracle(&mut self) -> &mut Oracle {
        self.oracles.last_mut().expect("there is always one")
    }

    fn algorithm(&self) -> Algorithm {
        self.key.quota.algorithm()
    }
}

fn small(number: i128) -> u64 {
    u64::try_from(number).expect("times and costs are below 2^62")
}
