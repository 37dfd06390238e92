//! The owned state of any algorithm, for stores that keep states of all algorithms in one map.

use crate::quota::{Algorithm, CheckedQuota};
use crate::time::{Span, Time};

use super::concurrency::{self, Slot};
use super::{Effect, KeyRequest, Past, Step, StoredState, fixed_window, meter, sliding_log, sliding_window};

/// The state that a store keeps for a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The state of a token bucket or a leaky bucket.
    Meter(meter::State),
    /// The state of a fixed window.
    FixedWindow(fixed_window::State),
    /// The state of a sliding window.
    SlidingWindow(sliding_window::State),
    /// The timestamps of a sliding log.
    SlidingLog(Vec<u8>),
    /// The slots of a concurrency limit.
    Concurrency(Vec<Slot>),
}

impl State {
    /// The borrowed state, as [`step`](super::step) takes it.
    #[inline]
    pub fn stored(&self) -> StoredState<'_> {
        match self {
            State::Meter(state) => StoredState::Meter(*state),
            State::FixedWindow(state) => StoredState::FixedWindow(*state),
            State::SlidingWindow(state) => StoredState::SlidingWindow(*state),
            State::SlidingLog(log) => StoredState::SlidingLog(log),
            State::Concurrency(slots) => StoredState::Concurrency(slots),
        }
    }

    /// When the state no longer affects a decision, so that it can be dropped.
    #[inline]
    pub fn fresh_at(&self, quota: &CheckedQuota, shift: u64) -> Time {
        let tick = match self {
            State::Meter(state) => meter::fresh_at(quota, *state),
            State::FixedWindow(state) => fixed_window::fresh_at(quota, *state, shift),
            State::SlidingWindow(state) => sliding_window::fresh_at(quota, *state),
            State::SlidingLog(log) => sliding_log::fresh_at(quota, log),
            State::Concurrency(slots) => concurrency::fresh_at(slots),
        };
        Time::from_micros(0) + Span::from_micros(tick * quota.tick().span().as_micros())
    }
}

/// The state after a step: with the request charged, or only moved to now because the clock has stepped
/// back. `taker` is the id under which a slot is held. `None` for a quota of count 0, which keeps no state.
#[inline]
pub fn apply(
    quota: &CheckedQuota,
    state: Option<State>,
    request: &KeyRequest,
    step: &Step,
    charged: bool,
    taker: u64,
) -> Option<State> {
    let now = request.now.as_micros();
    Some(match (&step.effect, state) {
        (Effect::None, _) => return None,
        (Effect::Meter(step), _) => State::Meter(if charged { step.after } else { step.before }),
        (Effect::FixedWindow(step), _) => State::FixedWindow(if charged { step.after } else { step.before }),
        (Effect::SlidingWindow(step), _) => {
            State::SlidingWindow(if charged { step.after } else { step.before })
        }
        (Effect::SlidingLog(step), state) => {
            let mut log = if let Some(State::SlidingLog(log)) = state { log } else { Vec::new() };
            sliding_log::write(&mut log, step, now, if charged { request.cost } else { 0 });
            State::SlidingLog(log)
        }
        (Effect::Concurrency(_), state) => {
            let mut slots = if let Some(State::Concurrency(slots)) = state { slots } else { Vec::new() };
            concurrency::write(quota, &mut slots, now, charged.then_some(taker));
            State::Concurrency(slots)
        }
    })
}

/// The state after a refund of `part` of an earlier charge, as far as the algorithm supports it.
pub fn give_back(quota: &CheckedQuota, state: State, now: Time, shift: u64, part: u64, past: &Past) -> State {
    let tick = quota.tick().number(now);
    match state {
        // A queued request has already delayed those behind it, so a leaky bucket refunds nothing.
        State::Meter(state) if quota.algorithm() == Algorithm::LeakyBucket => State::Meter(state),
        State::Meter(state) => State::Meter(meter::give_back(quota, state, tick, part, past)),
        State::FixedWindow(state) => {
            State::FixedWindow(fixed_window::give_back(quota, state, tick, shift, part, past))
        }
        State::SlidingWindow(state) => {
            State::SlidingWindow(sliding_window::give_back(quota, state, tick, part, past))
        }
        State::SlidingLog(mut log) => {
            sliding_log::give_back(quota, &mut log, tick, part, past);
            State::SlidingLog(log)
        }
        slots @ State::Concurrency(_) => slots,
    }
}

/// Grants up to `want` units of a key in advance. Returns them, and the state with them charged; `None` if there are
/// none, and then nothing is to be written. `raise` is [`Lease::raise`](crate::lease::Lease::raise).
///
/// # Panics
///
/// If the algorithm has no leases: see [`Lease::of`](crate::lease::Lease::of).
pub fn lease(
    quota: &CheckedQuota,
    state: Option<State>,
    now: Time,
    shift: u64,
    want: u64,
    raise: u64,
) -> Option<(u64, State)> {
    let tick = quota.tick().number(now);
    let seen = state.as_ref().map_or(StoredState::Nothing, State::stored);
    let (grant, state) = match quota.algorithm() {
        Algorithm::TokenBucket => {
            let (grant, state) = meter::lease(quota, seen.meter(), tick, want, raise);
            (grant, State::Meter(state))
        }
        Algorithm::FixedWindow => {
            let (grant, state) = fixed_window::lease(quota, seen.fixed_window(), tick, shift, want);
            (grant, State::FixedWindow(state))
        }
        Algorithm::SlidingWindow => {
            let (grant, state) = sliding_window::lease(quota, seen.sliding_window(), tick, want);
            (grant, State::SlidingWindow(state))
        }
        algorithm => panic!("{algorithm} has no leases"),
    };
    (grant > 0).then_some((grant, state))
}

/// The state with `more` units charged after the request was admitted, even above the limit.
pub fn add(quota: &CheckedQuota, state: Option<State>, now: Time, shift: u64, more: u64) -> State {
    let tick = quota.tick().number(now);
    let stored = state.as_ref().map_or(StoredState::Nothing, State::stored);
    match quota.algorithm() {
        Algorithm::TokenBucket | Algorithm::LeakyBucket => {
            State::Meter(meter::add(quota, stored.meter(), tick, more))
        }
        Algorithm::FixedWindow => {
            State::FixedWindow(fixed_window::add(quota, stored.fixed_window(), tick, shift, more))
        }
        Algorithm::SlidingWindow => {
            State::SlidingWindow(sliding_window::add(quota, stored.sliding_window(), tick, more))
        }
        Algorithm::SlidingLog => {
            let mut log = if let Some(State::SlidingLog(log)) = state { log } else { Vec::new() };
            sliding_log::add(quota, &mut log, tick, more);
            State::SlidingLog(log)
        }
        Algorithm::Concurrency => {
            State::Concurrency(if let Some(State::Concurrency(slots)) = state { slots } else { Vec::new() })
        }
    }
}
