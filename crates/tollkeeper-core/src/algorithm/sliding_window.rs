//! Sliding window counter: two counts stand for a window that moves.
//!
//! What was charged in the window before counts with the part of it that is still in sight. The test
//! is in whole numbers: room first, so that no difference is negative, then the weight of the past
//! against it. Counts are never cut when read: after a lowered quota they still stand for real use.

use crate::quota::Quota;

use super::{Past, Report};

/// What a sliding window remembers of a key.
///
/// `4 * quota * period < 2^53` by `Quota::new`, and neither count is above twice a quota: so
/// `(prev + cur) * period` is below 2^53, whatever the quota was when they were written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// The number of the window that `cur` counts.
    pub window: u64,
    /// What was charged in the window before.
    pub prev: u64,
    /// What was charged in this window.
    pub cur: u64,
}

/// What the window says of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Whether the request fits.
    pub allowed: bool,
    /// The state as it stands now.
    pub before: State,
    /// The state with the request charged, if it fits.
    pub after: State,
    /// The stored state proved that the clock has stepped back, and was moved to now.
    pub moved: bool,
}

/// Decides one request of `cost` in tick `now`.
#[inline]
pub fn step(quota: &Quota, state: Option<State>, now: u64, cost: u64) -> Step {
    let (before, moved) = current(quota, state, now);
    let allowed = cost <= quota.count() && fits(quota, before, elapsed(quota, before, now), cost);
    let after = if allowed { State { cur: before.cur + cost, ..before } } else { before };
    Step { allowed, before, after, moved }
}

/// The numbers behind a step, in ticks, for a key that was charged or was not.
pub fn report(quota: &Quota, step: &Step, charged: bool, now: u64, cost: u64) -> Report {
    let (count, period) = (quota.count(), quota.period_ticks());
    let state = if charged { step.after } else { step.before };
    let begin = state.window * period;
    let remaining = remaining(quota, step, charged, now);
    Report {
        remaining,
        passes: (cost <= count).then(|| if step.allowed { now } else { passes(quota, step.before, cost) }),
        next: if remaining == count { now } else { passes(quota, state, remaining + 1) },
        fresh: Some(match state {
            State { cur: 1.., .. } => begin + 2 * period,
            State { prev: 1.., .. } => begin + period,
            _ => now,
        }),
        departs: now,
    }
}

/// What could still be taken at once.
#[inline]
pub fn remaining(quota: &Quota, step: &Step, charged: bool, now: u64) -> u64 {
    let (count, period) = (quota.count(), quota.period_ticks());
    let state = if charged { step.after } else { step.before };
    let used = state.cur * period + state.prev * (period - elapsed(quota, state, now));
    (count * period).saturating_sub(used) / period
}

/// Gives back `part` of an earlier charge: from the window it was made in, while that still counts.
pub fn give_back(quota: &Quota, state: State, now: u64, part: u64, past: &Past) -> State {
    let (before, _) = current(quota, Some(state), now);
    if past.window == before.window {
        State { cur: before.cur.saturating_sub(part), ..before }
    } else if past.window + 1 == before.window {
        State { prev: before.prev.saturating_sub(part), ..before }
    } else {
        before
    }
}

/// Charges `more` after the fact, above the limit if need be, but never beyond twice the quota.
pub fn add(quota: &Quota, state: Option<State>, now: u64, more: u64) -> State {
    let (before, _) = current(quota, state, now);
    let most = (2 * quota.count()).max(before.cur);
    State { cur: before.cur.saturating_add(more).min(most), ..before }
}

/// The tick in which the state is as good as a fresh one.
pub fn fresh_at(quota: &Quota, state: State) -> u64 {
    (state.window + if state.cur > 0 { 2 } else { 1 }) * quota.period_ticks()
}

/// `prev * (1 - f) + cur + cost <= quota`, in whole numbers.
#[inline]
fn fits(quota: &Quota, state: State, elapsed: u64, cost: u64) -> bool {
    let period = quota.period_ticks();
    (state.cur + cost <= quota.count())
        && state.prev * (period - elapsed) <= (quota.count() - state.cur - cost) * period
}

/// The first tick in which `cost`, which does not fit now, does: later in this window, when enough
/// of the past has left it, or in the next, when what is counted now has become the past.
fn passes(quota: &Quota, state: State, cost: u64) -> u64 {
    let period = quota.period_ticks();
    let begin = state.window * period;
    // Elapsed at which `past * (period - elapsed) <= room * period` for the first time.
    let leaves = |past: u64, room: u64| period - (room * period / past).min(period);
    match quota.count().checked_sub(state.cur + cost) {
        Some(room) if state.prev > 0 => begin + leaves(state.prev, room),
        Some(_) => begin,
        None => begin + period + leaves(state.cur, quota.count() - cost),
    }
}

/// Ticks since the state's window began: zero when it begins only next.
#[inline]
fn elapsed(quota: &Quota, state: State, now: u64) -> u64 {
    now.saturating_sub(state.window * quota.period_ticks())
}

/// The state as it stands, and whether it had to be moved.
#[inline]
fn current(quota: &Quota, state: Option<State>, now: u64) -> (State, bool) {
    let window = now / quota.period_ticks();
    match state {
        Some(state) if state.window > window + 1 => (State { window, ..state }, true),
        Some(state) if state.window >= window => (state, false),
        Some(state) if state.window + 1 == window => (State { window, prev: state.cur, cur: 0 }, false),
        _ => (State { window, prev: 0, cur: 0 }, false),
    }
}
