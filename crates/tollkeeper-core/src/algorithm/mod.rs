//! The rate limiting algorithms: pure functions from a quota, a state, a time and a cost to a verdict.
//!
//! Each file is one algorithm and knows only its own state. A *step* decides one request and returns the
//! state it would write; a *report* computes the numbers that clients see. They are separate functions
//! because several limits are decided together: the remaining units are known only after every limit has
//! been checked, and a caller that needs only the verdict should not pay for divisions.
//!
//! Only this module knows all the algorithms: it dispatches on [`CheckedQuota::algorithm`].
//!
//! Redis runs the same functions in Lua, which are next to each algorithm, line for line: see [`twins`].

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
use crate::quota::{Algorithm, CheckedQuota};
use crate::time::{Span, Time};

pub use state::{State, add, apply, give_back, lease};

use concurrency::Slot;

/// A request to be decided against one key.
#[derive(Clone, Copy, Debug)]
pub struct KeyRequest {
    /// The current time on the store's clock.
    pub now: Time,
    /// The units to charge, at least 1. A concurrency limit takes one slot, whatever the cost.
    pub cost: u64,
    /// How many microseconds earlier than epoch-aligned windows this key's windows begin: 0 unless staggered.
    pub shift: u64,
    /// The longest delay for which the caller can hold a queued request; `None` for no bound.
    pub hold: Option<Span>,
}

/// The stored state of a key, borrowed from the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredState<'a> {
    /// The store has no state for the key.
    Nothing,
    /// The state of a token bucket or a leaky bucket.
    Meter(meter::State),
    /// The state of a fixed window.
    FixedWindow(fixed_window::State),
    /// The state of a sliding window.
    SlidingWindow(sliding_window::State),
    /// The timestamps of a sliding log.
    SlidingLog(&'a [u8]),
    /// The slots of a concurrency limit.
    Concurrency(&'a [Slot]),
}

/// The verdict of one algorithm on one request, and the state to write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Whether this limit admits the request.
    pub allowed: bool,
    /// The change to the stored state.
    pub effect: Effect,
}

/// The change that a step would make to the stored state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Effect {
    /// No change: a quota of count 0 keeps no state.
    #[default]
    None,
    /// The change to a token bucket or a leaky bucket.
    Meter(meter::Step),
    /// The change to a fixed window.
    FixedWindow(fixed_window::Step),
    /// The change to a sliding window.
    SlidingWindow(sliding_window::Step),
    /// The change to a sliding log.
    SlidingLog(sliding_log::Step),
    /// The change to the slots of a concurrency limit.
    Concurrency(concurrency::Step),
}

impl Effect {
    /// Whether the stored state was further ahead of the clock than any admission can put it. Then the clock
    /// has stepped back, and the state must be written even if the request is refused.
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

    /// Where the charge is recorded: the tick of a bucket, the timestamp of a log, the number of a window.
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

/// The numbers behind a step. Times are tick numbers of the quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Units that could be taken at once now.
    pub remaining: u64,
    /// When a request of the same cost can pass; `None` if it is larger than the limit.
    pub passes: Option<u64>,
    /// When `remaining` grows by one.
    pub next: u64,
    /// When the key has its whole quota again, if no request is admitted until then; `None` for slots.
    pub fresh: Option<u64>,
    /// When a queued request may leave the queue of a leaky bucket; the current tick for other algorithms.
    pub departs: u64,
}

/// An earlier charge, with the values that a refund needs.
#[derive(Clone, Copy, Debug)]
pub struct Past {
    /// The units it charged.
    pub cost: u64,
    /// The count of the quota it was charged under.
    pub count: u64,
    /// The tick or timestamp it was recorded at, for buckets and logs.
    pub tick: u64,
    /// The window it was recorded in, for windows.
    pub window: u64,
}

/// Decides one request against one key. Writes nothing: [`Step::effect`] is what the store has to write.
#[inline(always)]
pub fn step(quota: &CheckedQuota, stored: StoredState<'_>, request: &KeyRequest) -> Step {
    if quota.count() == 0 {
        return Step { allowed: false, effect: Effect::None };
    }
    let now = quota.tick().number(request.now);
    match quota.algorithm() {
        Algorithm::TokenBucket => {
            let step = meter::step(quota, stored.meter(), now, request.cost);
            Step { allowed: step.allowed, effect: Effect::Meter(step) }
        }
        Algorithm::LeakyBucket => {
            let step = meter::step(quota, stored.meter(), now, request.cost);
            let leaves_in_time = request.hold.is_none_or(|hold| {
                let departs = meter::departs(quota, &step, now);
                quota.tick().until(departs, request.now) <= hold
            });
            Step { allowed: step.allowed && leaves_in_time, effect: Effect::Meter(step) }
        }
        Algorithm::FixedWindow => {
            let step = fixed_window::step(quota, stored.fixed_window(), now, request.shift, request.cost);
            Step { allowed: step.allowed, effect: Effect::FixedWindow(step) }
        }
        Algorithm::SlidingWindow => {
            let step = sliding_window::step(quota, stored.sliding_window(), now, request.cost);
            Step { allowed: step.allowed, effect: Effect::SlidingWindow(step) }
        }
        Algorithm::SlidingLog => {
            let step = sliding_log::step(quota, stored.log(), now, request.cost);
            Step { allowed: step.allowed, effect: Effect::SlidingLog(step) }
        }
        Algorithm::Concurrency => {
            let step = concurrency::step(quota, stored.slots(), now);
            Step { allowed: step.allowed, effect: Effect::Concurrency(step) }
        }
    }
}

/// The numbers that clients see of a step, given whether the key was charged.
///
/// `seen` is the state that the step was computed from, as it was before any write.
pub fn outcome(
    quota: &CheckedQuota,
    stored: StoredState<'_>,
    request: &KeyRequest,
    step: &Step,
    charged: bool,
) -> Outcome {
    let now = quota.tick().number(request.now);
    let report = match &step.effect {
        Effect::None => return Outcome::nothing(),
        Effect::Meter(step) => meter::report(quota, step, charged, now, request.cost),
        Effect::FixedWindow(step) => {
            fixed_window::report(quota, step, charged, now, request.shift, request.cost)
        }
        Effect::SlidingWindow(step) => sliding_window::report(quota, step, charged, now, request.cost),
        Effect::SlidingLog(step) => {
            sliding_log::report(quota, stored.log(), step, charged, now, request.cost)
        }
        Effect::Concurrency(step) => concurrency::report(quota, step, charged, now),
    };
    tell(quota, request, step.allowed, &report)
}

/// Only [`Outcome::remaining`]: most of the other fields of an outcome need divisions.
#[inline]
pub fn remaining(quota: &CheckedQuota, request: &KeyRequest, step: &Step, charged: bool) -> u64 {
    match &step.effect {
        Effect::None => 0,
        Effect::Meter(step) => meter::remaining(quota, step, charged),
        Effect::FixedWindow(step) => fixed_window::remaining(quota, step, charged),
        Effect::SlidingWindow(step) => {
            sliding_window::remaining(quota, step, charged, quota.tick().number(request.now))
        }
        Effect::SlidingLog(step) => sliding_log::remaining(quota, step, charged, request.cost),
        Effect::Concurrency(step) => concurrency::remaining(quota, step, charged),
    }
}

/// Converts a report, in ticks, into an outcome, in time from now. The quota's count must be above 0.
pub fn tell(quota: &CheckedQuota, request: &KeyRequest, allowed: bool, report: &Report) -> Outcome {
    let until = |tick| quota.tick().until(tick, request.now);
    let delay = until(report.departs);
    let retry = match report.passes {
        _ if allowed => None,
        None => Some(Retry::Never),
        Some(passes) => {
            // A request whose delay is longer than `hold` can retry once the queue will be empty within `hold`.
            // That is not `delay - hold` from now: a queue ahead of the clock does not drain until the clock
            // has caught up.
            let empty = until(report.fresh.unwrap_or(passes)).as_micros();
            let until_short = match request.hold {
                Some(hold) if delay > hold => Span::from_micros(empty.saturating_sub(hold.as_micros())),
                _ => Span::ZERO,
            };
            Some(Retry::After(until(passes).max(until_short)))
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

impl<'a> StoredState<'a> {
    /// An owned copy of the state; `None` if the store has none.
    pub fn to_state(self) -> Option<State> {
        Some(match self {
            StoredState::Nothing => return None,
            StoredState::Meter(state) => State::Meter(state),
            StoredState::FixedWindow(state) => State::FixedWindow(state),
            StoredState::SlidingWindow(state) => State::SlidingWindow(state),
            StoredState::SlidingLog(log) => State::SlidingLog(log.to_vec()),
            StoredState::Concurrency(slots) => State::Concurrency(slots.to_vec()),
        })
    }

    // The algorithm is part of the key, so a state of another algorithm is never found under it.

    #[inline]
    fn meter(self) -> Option<meter::State> {
        if let StoredState::Meter(state) = self { Some(state) } else { None }
    }

    #[inline]
    fn fixed_window(self) -> Option<fixed_window::State> {
        if let StoredState::FixedWindow(state) = self { Some(state) } else { None }
    }

    #[inline]
    fn sliding_window(self) -> Option<sliding_window::State> {
        if let StoredState::SlidingWindow(state) = self { Some(state) } else { None }
    }

    fn log(self) -> &'a [u8] {
        if let StoredState::SlidingLog(log) = self { log } else { &[] }
    }

    fn slots(self) -> &'a [Slot] {
        if let StoredState::Concurrency(slots) = self { slots } else { &[] }
    }
}
