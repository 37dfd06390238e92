//! One key of one algorithm, handled as a store does, on a clock that the test sets.
//!
//! It has no logic of its own: it calls the algorithm, stores the resulting state and keeps the receipts.

use tollkeeper_core::algorithm::{self, KeyRequest, Past, State, StoredState, concurrency};
use tollkeeper_core::{CheckedQuota, Outcome, Span, Time};

/// A key, its quota and its clock.
#[derive(Clone, Debug)]
pub struct OneKey {
    /// The active quota. It may be replaced by another of the same algorithm and period.
    pub quota: CheckedQuota,
    /// How much earlier the windows begin than those aligned to the epoch, in microseconds.
    pub shift: u64,
    /// The longest delay that the caller accepts for a queued request.
    pub hold: Option<Span>,
    /// The clock, in microseconds.
    pub now: u64,
    state: Option<State>,
    /// The time from which the last written state equals a fresh one.
    fresh_at: Time,
    slots_taken: u64,
}

/// The result of a check.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// The outcome of the limit.
    pub outcome: Outcome,
    /// The state was ahead of the clock, so it was moved to now and written.
    pub moved: bool,
    /// The receipt, if the request was admitted.
    pub past: Option<Past>,
}

impl OneKey {
    /// A fresh key.
    pub fn new(quota: CheckedQuota, now: u64) -> OneKey {
        OneKey { quota, shift: 0, hold: None, now, state: None, fresh_at: Time::default(), slots_taken: 0 }
    }

    /// Takes `slots` slots now, without a check.
    pub fn occupy(&mut self, slots: u64) {
        let (now, ttl) = (self.now, self.quota.period().as_micros());
        let taken = (1..=slots).map(|id| concurrency::Slot { id, taken: now, expires: now + ttl });
        self.slots_taken = slots;
        self.write(Some(State::Concurrency(taken.collect())));
    }

    /// Decides a request and writes the new state.
    pub fn check(&mut self, cost: u64) -> Answer {
        let request = self.request(self.now, cost);
        let step = algorithm::step(&self.quota, self.stored(), &request);
        let outcome = algorithm::outcome(&self.quota, self.stored(), &request, &step, step.allowed);
        let (moved, mark) = (step.effect.moved(), step.effect.mark());
        if step.allowed || moved {
            self.slots_taken += u64::from(step.allowed);
            let state = self.state.take();
            self.write(algorithm::apply(&self.quota, state, &request, &step, step.allowed, self.slots_taken));
        }
        let past = Past { cost, count: self.quota.count(), tick: mark, window: mark };
        Answer { outcome, moved, past: step.allowed.then_some(past) }
    }

    /// The outcome that a check would have.
    pub fn peek(&self, cost: u64) -> Outcome {
        self.peek_at(self.now, cost)
    }

    /// The outcome that a check would have at another time, if nothing happens until then.
    pub fn peek_at(&self, now: u64, cost: u64) -> Outcome {
        let request = self.request(now, cost);
        let step = algorithm::step(&self.quota, self.stored(), &request);
        algorithm::outcome(&self.quota, self.stored(), &request, &step, false)
    }

    /// Refunds part of a charge.
    pub fn give_back(&mut self, part: u64, past: &Past) {
        if let Some(state) = self.state.take() {
            let now = Time::from_micros(self.now);
            self.write(Some(algorithm::give_back(&self.quota, state, now, self.shift, part, past)));
        }
    }

    /// Charges more, even above the limit.
    pub fn add(&mut self, more: u64) {
        let (state, now) = (self.state.take(), Time::from_micros(self.now));
        self.write(Some(algorithm::add(&self.quota, state, now, self.shift, more)));
    }

    /// Grants units in advance.
    pub fn lease(&mut self, want: u64, raise: u64) -> u64 {
        let (state, now) = (self.state.clone(), Time::from_micros(self.now));
        let Some((units, state)) = algorithm::lease(&self.quota, state, now, self.shift, want, raise) else {
            return 0;
        };
        self.write(Some(state));
        units
    }

    /// Releases the n-th slot that was taken; false if it was no longer held.
    pub fn release(&mut self, nth: u64) -> bool {
        self.with_slots(|slots, now| concurrency::release(slots, now, nth))
    }

    /// Renews the n-th slot that was taken; false if it was no longer held.
    pub fn renew(&mut self, nth: u64) -> bool {
        self.with_slots(|slots, now| concurrency::renew(slots, now, nth))
    }

    /// Drops the state if it equals a fresh one, as every store may do at any time.
    pub fn collect(&mut self) {
        if Time::from_micros(self.now) >= self.fresh_at {
            self.state = None;
        }
    }

    /// The stored state.
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

    fn stored(&self) -> StoredState<'_> {
        self.state.as_ref().map_or(StoredState::Nothing, State::stored)
    }

    fn request(&self, now: u64, cost: u64) -> KeyRequest {
        KeyRequest { now: Time::from_micros(now), cost, shift: self.shift, hold: self.hold }
    }

    fn write(&mut self, state: Option<State>) {
        self.fresh_at =
            state.as_ref().map_or(Time::default(), |state| state.fresh_at(&self.quota, self.shift));
        self.state = state;
    }
}
