//! The algorithms: pure functions from a quota, a state, a time and a cost to a verdict.
//!
//! Each file is one algorithm and knows only its own state. A *step* decides and says what the state
//! would become; a *report* computes the numbers that people see. They are apart because several
//! limits are decided together: what remains is known only when it is known whether all allow, and a
//! caller that wants only the verdict should not pay for divisions.
//!
//! This module is the one place that knows all of them.
//!
//! Each has a twin in Lua beside it, the same functions line for line, which Redis runs: see [`twins`].

pub mod concurrency;
pub mod fixed_window;
pub mod meter;
pub mod sliding_log;
pub mod sliding_window;
mod state;
pub mod twins;

#[cfg(test)]
mod trace;

use crate::decision::{Outcome, Retry};
use crate::quota::{Algorithm, Quota};
use crate::time::{Span, Time};

pub use state::{State, add, apply, give_back};

use concurrency::Slot;

/// What is asked of one key.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// The time on the clock of whoever keeps the state.
    pub now: Time,
    /// At least 1. A concurrency limit takes one slot, whatever the cost.
    pub cost: u64,
    /// How much earlier than the epoch's the windows of this key begin, in microseconds.
    pub shift: u64,
    /// The longest delay that the caller can hold a queued request.
    pub hold: Option<Span>,
}

/// The state of a key, as it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen<'a> {
    /// There is none.
    Nothing,
    /// Of a token bucket or a leaky bucket.
    Meter(meter::State),
    /// Of a fixed window.
    FixedWindow(fixed_window::State),
    /// Of a sliding window.
    SlidingWindow(sliding_window::State),
    /// The stamps of a sliding log.
    SlidingLog(&'a [u8]),
    /// The slots of a concurrency limit.
    Concurrency(&'a [Slot]),
}

/// What an algorithm says of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Whether this limit lets the request pass.
    pub allowed: bool,
    /// What would be written.
    pub effect: Effect,
}

/// What a step would do to the state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Effect {
    /// Nothing: the quota is nothing.
    #[default]
    None,
    /// To a token bucket or a leaky bucket.
    Meter(meter::Step),
    /// To a fixed window.
    FixedWindow(fixed_window::Step),
    /// To a sliding window.
    SlidingWindow(sliding_window::Step),
    /// To a sliding log.
    SlidingLog(sliding_log::Step),
    /// To the slots of a concurrency limit.
    Concurrency(concurrency::Step),
}

impl Effect {
    /// The stored state lay further ahead than any admission puts it: the clock has stepped back, and
    /// the state has to be written even if the request is refused.
    pub fn moved(&self) -> bool {
        match self {
            Effect::None => false,
            Effect::Meter(step) => step.moved,
            Effect::FixedWindow(step) => step.moved,
            Effect::SlidingWindow(step) => step.moved,
            Effect::SlidingLog(step) => step.moved,
            Effect::Concurrency(step) => step.moved,
        }
    }

    /// Where an admission is entered: the tick of a bucket, the stamp of a log, the window's number.
    pub fn mark(&self) -> u64 {
        match self {
            Effect::None | Effect::Concurrency(_) => 0,
            Effect::Meter(step) => step.after.at,
            Effect::FixedWindow(step) => step.after.window,
            Effect::SlidingWindow(step) => step.after.window,
            Effect::SlidingLog(step) => step.stamp,
        }
    }
}

/// When things will be so, in ticks of the quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// What could still be taken at once.
    pub remaining: u64,
    /// When the request passes; never, if it is larger than the limit.
    pub passes: Option<u64>,
    /// When one more unit is free than remains now.
    pub next: u64,
    /// When the key is as good as new; not known for slots.
    pub fresh: Option<u64>,
    /// When a queued request leaves.
    pub departs: u64,
}

/// What must be known of an earlier charge to give some of it back.
#[derive(Clone, Copy, Debug)]
pub struct Past {
    /// What it cost.
    pub cost: u64,
    /// The count of the quota it was charged under.
    pub count: u64,
    /// Where it was entered, for buckets and logs.
    pub tick: u64,
    /// Where it was entered, for windows.
    pub window: u64,
}

/// Decides one request against one key. Writes nothing: the answer says what to write.
#[inline]
pub fn step(quota: &Quota, seen: Seen<'_>, ask: &Ask) -> Step {
    if quota.count() == 0 {
        return Step { allowed: false, effect: Effect::None };
    }
    let now = quota.tick().number(ask.now);
    match quota.algorithm() {
        Algorithm::TokenBucket => {
            let step = meter::step(quota, seen.meter(), now, ask.cost);
            Step { allowed: step.allowed, effect: Effect::Meter(step) }
        }
        Algorithm::LeakyBucket => {
            let step = meter::step(quota, seen.meter(), now, ask.cost);
            let leaves_in_time = ask.hold.is_none_or(|hold| {
                let departs = meter::departs(quota, &step, now);
                quota.tick().until(departs, ask.now) <= hold
            });
            Step { allowed: step.allowed && leaves_in_time, effect: Effect::Meter(step) }
        }
        Algorithm::FixedWindow => {
            let step = fixed_window::step(quota, seen.fixed_window(), now, ask.shift, ask.cost);
            Step { allowed: step.allowed, effect: Effect::FixedWindow(step) }
        }
        Algorithm::SlidingWindow => {
            let step = sliding_window::step(quota, seen.sliding_window(), now, ask.cost);
            Step { allowed: step.allowed, effect: Effect::SlidingWindow(step) }
        }
        Algorithm::SlidingLog => {
            let step = sliding_log::step(quota, seen.log(), now, ask.cost);
            Step { allowed: step.allowed, effect: Effect::SlidingLog(step) }
        }
        Algorithm::Concurrency => {
            let step = concurrency::step(quota, seen.slots(), now);
            Step { allowed: step.allowed, effect: Effect::Concurrency(step) }
        }
    }
}

/// What people are told of a step, once it is known whether the key was charged.
///
/// `seen` is the state the step was made from, before anything was written.
pub fn outcome(quota: &Quota, seen: Seen<'_>, ask: &Ask, step: &Step, charged: bool) -> Outcome {
    let now = quota.tick().number(ask.now);
    let report = match &step.effect {
        Effect::None => return Outcome::nothing(),
        Effect::Meter(step) => meter::report(quota, step, charged, now, ask.cost),
        Effect::FixedWindow(step) => fixed_window::report(quota, step, charged, now, ask.shift, ask.cost),
        Effect::SlidingWindow(step) => sliding_window::report(quota, step, charged, now, ask.cost),
        Effect::SlidingLog(step) => sliding_log::report(quota, seen.log(), step, charged, now, ask.cost),
        Effect::Concurrency(step) => concurrency::report(quota, step, charged, now),
    };
    tell(quota, ask, step.allowed, &report)
}

/// [`Outcome::remaining`] and nothing else: the rest of an outcome is mostly divisions.
#[inline]
pub fn remaining(quota: &Quota, ask: &Ask, step: &Step, charged: bool) -> u64 {
    match &step.effect {
        Effect::None => 0,
        Effect::Meter(step) => meter::remaining(quota, step, charged),
        Effect::FixedWindow(step) => fixed_window::remaining(quota, step, charged),
        Effect::SlidingWindow(step) => {
            sliding_window::remaining(quota, step, charged, quota.tick().number(ask.now))
        }
        Effect::SlidingLog(step) => sliding_log::remaining(quota, step, charged, ask.cost),
        Effect::Concurrency(step) => concurrency::remaining(quota, step, charged),
    }
}

/// What people are told of a report, by a quota of more than nothing.
pub fn tell(quota: &Quota, ask: &Ask, allowed: bool, report: &Report) -> Outcome {
    let until = |tick| quota.tick().until(tick, ask.now);
    let delay = until(report.departs);
    let retry = match report.passes {
        _ if allowed => None,
        None => Some(Retry::Never),
        Some(passes) => {
            // What cannot be held so long may come when the queue will be empty within `hold`. That is not
            // `delay - hold` from now: a queue ahead of the clock stands still for a while.
            let empty = until(report.fresh.unwrap_or(passes)).as_micros();
            let short = match ask.hold {
                Some(hold) if delay > hold => Span::from_micros(empty.saturating_sub(hold.as_micros())),
                _ => Span::ZERO,
            };
            Some(Retry::After(until(passes).max(short)))
        }
    };
    Outcome {
        allowed,
        limit: quota.limit(),
        remaining: report.remaining,
        retry,
        reset_after: report.fresh.map(until),
        next_after: Some(until(report.next)),
        delay: if allowed { delay } else { Span::ZERO },
        overflow: false,
    }
}

impl<'a> Seen<'a> {
    /// The state as one's own; nothing if there is none.
    pub fn to_state(self) -> Option<State> {
        Some(match self {
            Seen::Nothing => return None,
            Seen::Meter(state) => State::Meter(state),
            Seen::FixedWindow(state) => State::FixedWindow(state),
            Seen::SlidingWindow(state) => State::SlidingWindow(state),
            Seen::SlidingLog(log) => State::SlidingLog(log.to_vec()),
            Seen::Concurrency(slots) => State::Concurrency(slots.to_vec()),
        })
    }

    /// A state of another algorithm cannot be found under this key: the algorithm is part of it.
    #[inline]
    fn meter(self) -> Option<meter::State> {
        if let Seen::Meter(state) = self { Some(state) } else { None }
    }

    #[inline]
    fn fixed_window(self) -> Option<fixed_window::State> {
        if let Seen::FixedWindow(state) = self { Some(state) } else { None }
    }

    #[inline]
    fn sliding_window(self) -> Option<sliding_window::State> {
        if let Seen::SlidingWindow(state) = self { Some(state) } else { None }
    }

    fn log(self) -> &'a [u8] {
        if let Seen::SlidingLog(log) = self { log } else { &[] }
    }

    fn slots(self) -> &'a [Slot] {
        if let Seen::Concurrency(slots) = self { slots } else { &[] }
    }
}
