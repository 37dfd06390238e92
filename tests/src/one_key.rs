//! One key of one algorithm, kept as a store keeps it, on a clock that the test moves.
//!
//! It decides nothing: it asks the algorithm, writes what that says, and remembers the receipts.

use tollkeeper_core::algorithm::{
    self, Ask, Effect, Past, Seen, concurrency, fixed_window, meter, sliding_log, sliding_window,
};
use tollkeeper_core::{Algorithm, Outcome, Quota, Span, Time};

/// A key, its quota and its clock.
#[derive(Clone, Debug)]
pub struct OneKey {
    /// The quota in force: it may be changed for another of the same algorithm and period.
    pub quota: Quota,
    /// How much earlier than the epoch's the windows begin, in microseconds.
    pub shift: u64,
    /// The longest delay that callers can hold a queued request.
    pub hold: Option<Span>,
    /// The clock, in microseconds.
    pub now: u64,
    state: State,
    /// When the state, as it was last written, is as good as none.
    fresh_at: u64,
    slots_taken: u64,
}

/// What is kept of the key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is named after its algorithm")]
pub enum State {
    Nothing,
    Meter(meter::State),
    FixedWindow(fixed_window::State),
    SlidingWindow(sliding_window::State),
    SlidingLog(Vec<u8>),
    Concurrency(Vec<concurrency::Slot>),
}

/// What a check was told, and what it did.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// What the limit says.
    pub outcome: Outcome,
    /// The state was found to be ahead of the clock, moved to now and written.
    pub moved: bool,
    /// The receipt, if the request was admitted.
    pub past: Option<Past>,
}

impl OneKey {
    /// A fresh key.
    pub fn new(quota: Quota, now: u64) -> OneKey {
        OneKey { quota, shift: 0, hold: None, now, state: State::Nothing, fresh_at: 0, slots_taken: 0 }
    }

    /// Decides a request, and writes what follows.
    pub fn check(&mut self, cost: u64) -> Answer {
        let ask = self.ask(self.now, cost);
        let step = algorithm::step(&self.quota, self.state.seen(), &ask);
        let outcome = algorithm::outcome(&self.quota, self.state.seen(), &ask, &step, step.allowed);
        let (moved, mark) = (step.effect.moved(), step.effect.mark());
        if step.allowed || moved {
            self.write(&step.effect, if step.allowed { cost } else { 0 });
        }
        let past = Past { cost, count: self.quota.count(), tick: mark, window: mark };
        Answer { outcome, moved, past: step.allowed.then_some(past) }
    }

    /// What a check would be told.
    pub fn peek(&self, cost: u64) -> Outcome {
        self.peek_at(self.now, cost)
    }

    /// What a check would be told at another time, if nothing happens until then.
    pub fn peek_at(&self, now: u64, cost: u64) -> Outcome {
        let ask = self.ask(now, cost);
        let step = algorithm::step(&self.quota, self.state.seen(), &ask);
        algorithm::outcome(&self.quota, self.state.seen(), &ask, &step, false)
    }

    /// Gives back part of what was charged.
    pub fn give_back(&mut self, part: u64, past: &Past) {
        let (quota, shift, now) = (&self.quota, self.shift, self.tick());
        match &mut self.state {
            State::Nothing | State::Concurrency(_) => return,
            State::Meter(state) => *state = meter::give_back(quota, *state, now, part, past),
            State::FixedWindow(state) => {
                *state = fixed_window::give_back(quota, *state, now, shift, part, past);
            }
            State::SlidingWindow(state) => *state = sliding_window::give_back(quota, *state, now, part, past),
            State::SlidingLog(log) => sliding_log::give_back(quota, log, now, part, past),
        }
        self.written();
    }

    /// Charges more, above the limit if need be.
    pub fn add(&mut self, more: u64) {
        let (quota, shift, now, seen) = (&self.quota, self.shift, self.tick(), &mut self.state);
        match quota.algorithm() {
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                let state = if let State::Meter(state) = seen { Some(*state) } else { None };
                *seen = State::Meter(meter::add(quota, state, now, more));
            }
            Algorithm::FixedWindow => {
                let state = if let State::FixedWindow(state) = seen { Some(*state) } else { None };
                *seen = State::FixedWindow(fixed_window::add(quota, state, now, shift, more));
            }
            Algorithm::SlidingWindow => {
                let state = if let State::SlidingWindow(state) = seen { Some(*state) } else { None };
                *seen = State::SlidingWindow(sliding_window::add(quota, state, now, more));
            }
            Algorithm::SlidingLog => sliding_log::add(quota, seen.log(), now, more),
            Algorithm::Concurrency => return,
        }
        self.written();
    }

    /// Releases the n-th slot that was taken; false if it was not held any more.
    pub fn release(&mut self, nth: u64) -> bool {
        let held = concurrency::release(self.state.slots(), self.now, nth);
        self.written();
        held
    }

    /// Lets the n-th slot that was taken live from now; false if it was not held any more.
    pub fn renew(&mut self, nth: u64) -> bool {
        let held = concurrency::renew(self.state.slots(), self.now, nth);
        self.written();
        held
    }

    /// Drops the state if it is as good as none, as every store may at any time.
    pub fn collect(&mut self) {
        if self.now >= self.fresh_at {
            self.state = State::Nothing;
        }
    }

    /// What is kept.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// How many slots were ever taken.
    pub fn slots_taken(&self) -> u64 {
        self.slots_taken
    }

    fn ask(&self, now: u64, cost: u64) -> Ask {
        Ask { now: Time::from_micros(now), cost, shift: self.shift, hold: self.hold }
    }

    fn tick(&self) -> u64 {
        self.quota.tick().number(Time::from_micros(self.now))
    }

    fn write(&mut self, effect: &Effect, cost: u64) {
        match effect {
            Effect::None => {}
            Effect::Meter(step) => self.state = State::Meter(step.after),
            Effect::FixedWindow(step) => self.state = State::FixedWindow(step.after),
            Effect::SlidingWindow(step) => self.state = State::SlidingWindow(step.after),
            Effect::SlidingLog(step) => sliding_log::write(self.state.log(), step, self.now, cost),
            Effect::Concurrency(_) => {
                self.slots_taken += u64::from(cost > 0);
                let taker = (cost > 0).then_some(self.slots_taken);
                concurrency::write(&self.quota, self.state.slots(), self.now, taker);
            }
        }
        self.written();
    }

    fn written(&mut self) {
        let quota = &self.quota;
        let tick = match &self.state {
            State::Nothing => 0,
            State::Meter(state) => meter::fresh_at(quota, *state),
            State::FixedWindow(state) => fixed_window::fresh_at(quota, *state, self.shift),
            State::SlidingWindow(state) => sliding_window::fresh_at(quota, *state),
            State::SlidingLog(log) => sliding_log::fresh_at(quota, log),
            State::Concurrency(slots) => concurrency::fresh_at(slots),
        };
        self.fresh_at = tick * quota.tick().span().as_micros();
    }
}

impl State {
    fn seen(&self) -> Seen<'_> {
        match self {
            State::Nothing => Seen::Nothing,
            State::Meter(state) => Seen::Meter(*state),
            State::FixedWindow(state) => Seen::FixedWindow(*state),
            State::SlidingWindow(state) => Seen::SlidingWindow(*state),
            State::SlidingLog(log) => Seen::SlidingLog(log),
            State::Concurrency(slots) => Seen::Concurrency(slots),
        }
    }

    fn log(&mut self) -> &mut Vec<u8> {
        if !matches!(self, State::SlidingLog(_)) {
            *self = State::SlidingLog(Vec::new());
        }
        let State::SlidingLog(log) = self else { unreachable!("just made") };
        log
    }

    fn slots(&mut self) -> &mut Vec<concurrency::Slot> {
        if !matches!(self, State::Concurrency(_)) {
            *self = State::Concurrency(Vec::new());
        }
        let State::Concurrency(slots) = self else { unreachable!("just made") };
        slots
    }
}
