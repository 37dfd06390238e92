//! Random test cases: a quota, sometimes near its bounds, and a history that provokes edge cases.
//!
//! Moves are relative to the results of the key ("wait exactly `retry_after` minus a microsecond", "a cost of one more
//! than remains"), so a history stays meaningful when moves are removed. That is how [`smallest`] shrinks a failing
//! case. Everything is derived from a number; the same number gives the same case everywhere.

use std::fmt;

use tollkeeper_core::{Algorithm, CheckedQuota, Quota, Retry, Span};

use crate::one_key::OneKey;

/// A history of one key.
#[derive(Clone, Debug)]
pub struct Case {
    /// The quotas, all of one algorithm and period. The first is active until a move chooses another.
    pub quotas: Vec<CheckedQuota>,
    /// How much earlier the windows begin than those aligned to the epoch, in microseconds.
    pub shift: u64,
    /// The longest delay that the caller accepts for a queued request.
    pub hold: Option<Span>,
    /// Start of the history, in microseconds.
    pub start: u64,
    /// Slots held at the start: a history is too short to take thousands.
    pub held: u64,
    /// The moves, in order.
    pub moves: Vec<Move>,
}

/// An action after a wait.
#[derive(Clone, Copy, Debug)]
pub struct Move {
    /// The wait before the action.
    pub wait: Wait,
    /// The action.
    pub act: Act,
}

/// A wait.
#[derive(Clone, Copy, Debug)]
pub enum Wait {
    /// No wait: the same microsecond.
    Not,
    /// Microseconds.
    Micros(u64),
    /// `retry_after` of the last refusal.
    Retry,
    /// `retry_after` of the last refusal, minus one microsecond.
    JustBeforeRetry,
    /// Until the key is fresh.
    Reset,
    /// Until one more unit is free.
    Next,
    /// Until the window ends: one microsecond less, exactly, or one more.
    Edge(Off),
    /// A number of 64ths of the period, or of the fill time of a bucket.
    Part(u64),
    /// A multiple of the period or the fill time.
    Idle(u64),
}

/// An offset from a point in time.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "by one microsecond")]
pub enum Off {
    Before,
    Exactly,
    After,
}

/// An action.
#[derive(Clone, Copy, Debug)]
pub enum Act {
    /// Checks.
    Check(Cost),
    /// Lets the store drop the state if it equals a fresh one.
    Collect,
    /// Refunds a number of 8ths of an earlier charge, counted back from the last.
    Refund(usize, u64),
    /// Settles an earlier charge with a higher cost.
    Settle(usize, Cost),
    /// Releases a slot, counted back from the last one taken.
    Release(u64),
    /// Renews a slot, counted back from the last one taken.
    Renew(u64),
    /// Activates another quota.
    Change(usize),
    /// Sets the clock back.
    Back(Step),
    /// Sets the clock forward.
    Forward(Step),
}

/// The cost of a request.
#[derive(Clone, Copy, Debug)]
pub enum Cost {
    /// 1.
    One,
    /// This cost, but at most the limit.
    Few(u64),
    /// A number of 64ths of the limit.
    Part(u64),
    /// All that remains.
    Rest,
    /// One more than remains, if that is within the limit.
    OneMore,
    /// The limit.
    All,
    /// More than the limit.
    TooMuch,
}

/// The size of a clock step.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// Microseconds.
    Micros(u64),
    /// A number of 64ths of the period, or of the fill time of a bucket.
    Part(u64),
    /// A multiple of the period or the fill time, or close to one.
    Times(u64, Off),
}

/// The operations of a history besides requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// None.
    Plain,
    /// Refunds and settlements.
    Refunds,
    /// Changes of the quota.
    Changes,
    /// One change of the quota, with refunds and settlements before and after it.
    RefundsOverAChange,
    /// Clock steps.
    Steps,
}

/// The latest time of a history: three fill times after it are still below 2^53 µs.
pub const LATEST: u64 = 100 * 366 * 86_400_000_000;

impl Case {
    /// The case with this number.
    pub fn new(algorithm: Algorithm, kind: Kind, number: u64) -> Case {
        let mut random = Random::new(number ^ (algorithm as u64) << 48 ^ (kind as u64) << 56);
        let near_bound = number.is_multiple_of(3);
        let quotas = random.quotas(algorithm, kind, near_bound);
        let period = quotas[0].period().as_micros();
        let staggers = algorithm == Algorithm::FixedWindow && random.one_in(2);
        let holds = algorithm == Algorithm::LeakyBucket && random.one_in(3);
        let crowded = algorithm == Algorithm::Concurrency && number.is_multiple_of(30);
        // Logs of 100,000 units and thousands of slots are slow, so those cases have only a few moves.
        let slow = crowded || algorithm == Algorithm::SlidingLog && near_bound;
        let most_moves = if slow { 6 } else { 40 };
        let moves = random.within(1, most_moves);
        let mut moves: Vec<Move> = (0..moves).map(|_| random.step(kind, algorithm, quotas.len())).collect();
        if kind == Kind::RefundsOverAChange {
            let middle = moves.len() / 2;
            moves[middle].act = Act::Change(1);
        }
        Case {
            shift: if staggers { random.within(0, period - 1) } else { 0 },
            hold: holds.then(|| {
                let window = quotas[0].window().as_micros();
                Span::from_micros(window / 16 * random.within(0, 16))
            }),
            // Rarely at time 0; otherwise between 2001 and 2033.
            start: if random.one_in(20) {
                random.within(0, period)
            } else {
                random.within(1 << 50, 2_000_000_000_000_000)
            },
            held: if crowded { quotas[0].count() - random.within(0, 3) } else { 0 },
            moves,
            quotas,
        }
    }
}

/// One line for each quota and each move.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for quota in &self.quotas {
            writeln!(f, "{quota:?}")?;
        }
        writeln!(f, "start {} shift {} hold {:?} held {}", self.start, self.shift, self.hold, self.held)?;
        self.moves.iter().try_for_each(|one| writeln!(f, "{:?}, then {:?}", one.wait, one.act))
    }
}

/// Shrinks a failing case: removes moves, many at once and then one by one, and simplifies the rest, while the case
/// still fails. Returns the smallest case and its failure.
pub fn smallest(case: Case, why: String, fails: impl Fn(&Case) -> Option<String>) -> (Case, String) {
    let (mut case, mut why) = (case, why);
    let mut better = |case: &mut Case, other: Case| match fails(&other) {
        Some(reason) => {
            (*case, why) = (other, reason);
            true
        }
        None => false,
    };
    loop {
        let mut helped = false;
        let mut size = case.moves.len();
        while size > 0 {
            let mut at = 0;
            while at < case.moves.len() {
                let mut fewer = case.clone();
                fewer.moves.drain(at..case.moves.len().min(at + size));
                if better(&mut case, fewer) { helped = true } else { at += size }
            }
            size /= 2;
        }
        for index in 0..case.moves.len() {
            if !matches!(case.moves[index].wait, Wait::Not) {
                let mut sooner = case.clone();
                sooner.moves[index].wait = Wait::Not;
                helped |= better(&mut case, sooner);
            }
            if !matches!(case.moves[index].act, Act::Check(Cost::One)) {
                let mut simpler = case.clone();
                simpler.moves[index].act = Act::Check(Cost::One);
                helped |= better(&mut case, simpler);
            }
        }
        if !helped {
            return (case, why);
        }
    }
}

impl Wait {
    /// The wait in microseconds, for a key whose last refusal had this retry.
    pub fn micros(self, key: &OneKey, retry: Option<Retry>) -> u64 {
        let retry = if let Some(Retry::After(span)) = retry { span.as_micros() } else { 0 };
        let span = |span: Option<Span>| span.map_or(0, Span::as_micros);
        let (window, period) = (key.quota.window().as_micros(), key.quota.period().as_micros());
        let wait = match self {
            Wait::Not => 0,
            Wait::Micros(micros) => micros,
            Wait::Retry => retry,
            Wait::JustBeforeRetry => retry.saturating_sub(1),
            Wait::Reset => span(key.peek(1).reset_after),
            Wait::Next => span(key.peek(1).next_after),
            Wait::Edge(off) => off.from(period - (key.now + key.shift) % period),
            Wait::Part(part) => window / 64 * part,
            Wait::Idle(times) => window * times,
        };
        wait.min(LATEST.saturating_sub(key.now))
    }
}

impl Step {
    /// In microseconds, for this key.
    pub fn micros(self, key: &OneKey) -> u64 {
        let quota = &key.quota;
        let window = if quota.algorithm().has_burst() {
            quota.fill_ticks() * quota.tick().span().as_micros()
        } else {
            quota.period().as_micros()
        };
        match self {
            Step::Micros(micros) => micros,
            Step::Part(part) => window / 64 * part,
            Step::Times(times, off) => off.from(window * times),
        }
    }
}

impl Off {
    fn from(self, point: u64) -> u64 {
        match self {
            Off::Before => point - 1,
            Off::Exactly => point,
            Off::After => point + 1,
        }
    }
}

impl Cost {
    /// The cost for this key in its current state.
    pub fn number(self, key: &OneKey) -> u64 {
        let limit = key.quota.limit();
        match self {
            Cost::One => 1,
            Cost::Few(cost) => cost.min(limit),
            Cost::Part(part) => {
                (u128::from(limit) * u128::from(part) / 64).try_into().unwrap_or(limit).max(1)
            }
            Cost::Rest => key.peek(1).remaining.max(1),
            Cost::OneMore => (key.peek(1).remaining + 1).min(limit),
            Cost::All => limit,
            Cost::TooMuch => limit + 1,
        }
    }
}

/// SplitMix64: good enough for tests, and the same everywhere.
pub struct Random(u64);

impl Random {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    /// Any number from `least` to `most`.
    pub fn within(&mut self, least: u64, most: u64) -> u64 {
        least + self.next() % (most - least + 1)
    }

    /// Any number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.within(0, end as u64 - 1)).expect("below a size")
    }

    /// A number from `least` to `most` whose magnitude is uniform: small numbers are as frequent as large ones.
    fn of_any_size(&mut self, least: u64, most: u64) -> u64 {
        let bits = self.within(0, u64::from((most - least + 1).ilog2()));
        least + self.within(0, ((1 << bits) - 1).min(most - least))
    }

    /// True once in so many times, on average.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.next().is_multiple_of(times)
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    fn period(&mut self) -> Span {
        let (tick, periods, longest) = match self.within(0, 2) {
            0 => (1, [1_000, 7_000, 1_000_000, 60_000_000], 60_000_000),
            1 => (1_000, [61_000, 900_000, 3_600_000, 86_400_000], 86_400_000),
            _ => (1_000_000, [86_401, 604_800, 2_592_000, 31_622_400], 31_622_400),
        };
        let ticks = if self.one_in(2) { self.pick(&periods) } else { self.within(periods[0], longest) };
        Span::from_micros(ticks * tick)
    }

    /// One quota, or several between which a history changes.
    fn quotas(&mut self, algorithm: Algorithm, kind: Kind, near_bound: bool) -> Vec<CheckedQuota> {
        let period = self.period();
        let wanted = match kind {
            Kind::Changes => 4,
            Kind::RefundsOverAChange => 2,
            _ => 1,
        };
        let mut quotas: Vec<CheckedQuota> = Vec::new();
        while quotas.len() < wanted {
            let rate = match quotas.first() {
                Some(first) if self.one_in(2) => self.another_rate(first),
                _ => self.rate(algorithm, period, near_bound),
            };
            // A burst that takes longer than 50 years to fill is invalid: draw again.
            quotas.extend(CheckedQuota::new(algorithm, rate));
        }
        quotas
    }

    fn rate(&mut self, algorithm: Algorithm, period: Span, near_bound: bool) -> Quota {
        let most = bound(algorithm, period);
        let near = |random: &mut Random| random.within(most - most / 100, most);
        let any = |random: &mut Random| {
            if random.one_in(2) { random.within(1, 10.min(most)) } else { random.of_any_size(1, most) }
        };
        let (count, burst) = match (near_bound, self.within(0, 2)) {
            (false, _) => (any(self), any(self)),
            (true, 0) => (near(self), near(self)),
            (true, 1) => (near(self), any(self)),
            (true, _) => (any(self), near(self)),
        };
        match algorithm {
            _ if algorithm.has_burst() => Quota::every(count, period).burst(burst),
            _ => Quota::every(if near_bound { near(self) } else { count }, period),
        }
    }

    /// A rate close to the first: one more, one less, half or twice of it.
    fn another_rate(&mut self, first: &CheckedQuota) -> Quota {
        let change = |random: &mut Random, number: u64| match random.within(0, 4) {
            0 => number + 1,
            1 => number - 1,
            2 => number / 2,
            3 => number * 2,
            _ => number,
        };
        let count = change(self, first.count());
        let burst = first.algorithm().has_burst().then(|| change(self, first.burst()));
        Quota::every(count, first.period()).with_burst(burst)
    }

    fn step(&mut self, kind: Kind, algorithm: Algorithm, quotas: usize) -> Move {
        let wait = match self.within(0, 99) {
            0..=34 => Wait::Not,
            35..=40 => Wait::Micros(self.within(1, 3)),
            41..=54 => Wait::Retry,
            55..=63 => Wait::JustBeforeRetry,
            64..=67 => Wait::Reset,
            68..=73 => Wait::Next,
            74..=85 => Wait::Edge(self.pick(&[Off::Before, Off::Exactly, Off::Exactly, Off::After])),
            86..=95 => Wait::Part(self.within(1, 80)),
            _ => Wait::Idle(self.within(1, 5)),
        };
        let cost = match self.within(0, 99) {
            0..=29 => Cost::One,
            30..=44 => Cost::Few(self.within(2, 5)),
            45..=59 => Cost::Part(self.within(1, 63)),
            60..=74 => Cost::Rest,
            75..=86 => Cost::OneMore,
            87..=96 => Cost::All,
            _ => Cost::TooMuch,
        };
        let before_last = self.within(0, 5);
        let act = match (self.within(0, 99), kind, algorithm) {
            (0..=9, ..) => Act::Collect,
            (10..=24, Kind::Refunds | Kind::RefundsOverAChange, _) => {
                Act::Refund(self.pick(&[0, 0, 1, 2, 5]), self.within(1, 8))
            }
            (25..=30, Kind::Refunds | Kind::RefundsOverAChange, _) => {
                Act::Settle(self.pick(&[0, 0, 1, 2, 5]), cost)
            }
            (10..=24, Kind::Changes, _) => Act::Change(self.pick(&[0, 1, 2, 3]) % quotas),
            (10..=19, Kind::Steps, _) => Act::Back(self.clock_step()),
            (20..=24, Kind::Steps, _) => Act::Forward(self.clock_step()),
            (25..=39, _, Algorithm::Concurrency) => Act::Release(before_last),
            (40..=49, _, Algorithm::Concurrency) => Act::Renew(before_last),
            _ => Act::Check(cost),
        };
        Move { wait, act }
    }

    fn clock_step(&mut self) -> Step {
        match self.within(0, 3) {
            0 => Step::Micros(self.of_any_size(1, 10_000_000)),
            1 => Step::Part(self.within(1, 100)),
            _ => Step::Times(self.of_any_size(1, 20), self.pick(&[Off::Before, Off::Exactly, Off::After])),
        }
    }
}

/// The largest count, as the documentation states it.
fn bound(algorithm: Algorithm, period: Span) -> u64 {
    let ticks = match period.as_micros() {
        micros @ 0..=60_000_000 => micros,
        micros @ 60_000_001..=86_400_000_000 => micros / 1_000,
        micros => micros / 1_000_000,
    };
    match algorithm {
        Algorithm::FixedWindow => 1 << 50,
        Algorithm::SlidingLog => 100_000,
        Algorithm::Concurrency => 10_000,
        _ => ((1 << 53) - 1) / (4 * ticks),
    }
}
