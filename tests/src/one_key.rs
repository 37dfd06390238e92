//! One key of one algorithm, kept as a store keeps it, on a clock that the test moves.
//!
//! It decides nothing: it asks the algorithm, writes what that says, and remembers the receipts.

use tollkeeper_core::algorithm::{self, Ask, Past, Seen, State, concurrency};
use tollkeeper_core::{Outcome, Quota, Span, Time};

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
    state: Option<State>,
    /// When the state, as it was last written, is as good as none.
    fresh_at: Time,
    slots_taken: u64,
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
        OneKey { quota, shift: 0, hold: None, now, state: None, fresh_at: Time::default(), slots_taken: 0 }
    }

    /// Lets so many slots be taken now, without asking.
    pub fn occupy(&mut self, slots: u64) {
        let (now, ttl) = (self.now, self.quota.period().as_micros());
        let taken = (1..=slots).map(|id| concurrency::Slot { id, taken: now, expires: now + ttl });
        self.slots_taken = slots;
        self.write(Some(State::Concurrency(taken.collect())));
    }

    /// Decides a request, and writes what follows.
    pub fn check(&mut self, cost: u64) -> Answer {
        let ask = self.ask(self.now, cost);
        let step = algorithm::step(&self.quota, self.seen(), &ask);
        let outcome = algorithm::outcome(&self.quota, self.seen(), &ask, &step, step.allowed);
        let (moved, mark) = (step.effect.moved(), step.effect.mark());
        if step.allowed || moved {
            self.slots_taken += u64::from(step.allowed);
            let state = self.state.take();
            self.write(algorithm::apply(&self.quota, state, &ask, &step, step.allowed, self.slots_taken));
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
        let step = algorithm::step(&self.quota, self.seen(), &ask);
        algorithm::outcome(&self.quota, self.seen(), &ask, &step, false)
    }

    /// Gives back part of what was charged.
    pub fn give_back(&mut self, part: u64, past: &Past) {
        if let Some(state) = self.state.take() {
            let now = Time::from_micros(self.now);
            self.write(Some(algorithm::give_back(&self.quota, state, now, self.shift, part, past)));
        }
    }

    /// Charges more, above the limit if need be.
    pub fn add(&mut self, more: u64) {
        let (state, now) = (self.state.take(), Time::from_micros(self.now));
        self.write(Some(algorithm::add(&self.quota, state, now, self.shift, more)));
    }

    /// Releases the n-th slot that was taken; false if it was not held any more.
    pub fn release(&mut self, nth: u64) -> bool {
        self.with_slots(|slots, now| concurrency::release(slots, now, nth))
    }

    /// Lets the n-th slot that was taken live from now; false if it was not held any more.
    pub fn renew(&mut self, nth: u64) -> bool {
        self.with_slots(|slots, now| concurrency::renew(slots, now, nth))
    }

    /// Drops the state if it is as good as none, as every store may at any time.
    pub fn collect(&mut self) {
        if Time::from_micros(self.now) >= self.fresh_at {
            self.state = None;
        }
    }

    /// What is kept.
    pub fn state(&self) -> Option<&State> {
        self.state.as_ref()
    }

    /// How many slots were ever taken.
    pub fn slots_taken(&self) -> u64 {
        self.slots_taken
    }

    fn with_slots(&mut self, change: impl Fn(&mut Vec<concurrency::Slot>, u64) -> bool) -> bool {
        let Some(State::Concurrency(mut slots)) = self.state.take() else { return false };
        let held = change(&mut slots, self.now);
        self.write(Some(State::Concurrency(slots)));
        held
    }

    fn seen(&self) -> Seen<'_> {
        self.state.as_ref().map_or(Seen::Nothing, State::seen)
    }

    fn ask(&self, now: u64, cost: u64) -> Ask {
        Ask { now: Time::from_micros(now), cost, shift: self.shift, hold: self.hold }
    }

    fn write(&mut self, state: Option<State>) {
        self.fresh_at =
            state.as_ref().map_or(Time::default(), |state| state.fresh_at(&self.quota, self.shift));
        self.state = state;
    }
}
