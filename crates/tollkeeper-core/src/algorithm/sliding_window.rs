//! Sliding window counter: approximates a sliding window by the counts of two fixed windows.
//!
//! The count of the previous window is weighted by the fraction of it that the sliding window still
//! covers. The check uses whole numbers: first whether this window has room, so that no difference is
//! negative, then whether the weighted previous count fits into that room. Counts are not cut when read:
//! after a lowered quota they still are real usage.

use crate::quota::CheckedQuota;

use super::{Past, Report};

/// The stored state of a key.
///
/// `4 * quota * period < 2^53` by `CheckedQuota::new`, and neither count is above twice a quota: so
/// `(prev + cur) * period` is below 2^53, whatever the quota was when they were written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// The number of the window that `cur` counts.
    pub window: u64,
    /// The units charged in the previous window.
    pub prev: u64,
    /// The units charged in this window.
    pub cur: u64,
}

/// The verdict of the window on one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Whether the request fits.
    pub allowed: bool,
    /// The state at `now`, before the request.
    pub before: State,
    /// The state with the request charged; the same as `before` if it does not fit.
    pub after: State,
    /// Whether the stored state proved that the clock has stepped back, and was moved to now.
    pub moved: bool,
}

/// Decides one request of `cost` at tick `now`.
#[inline]
pub fn step(quota: &CheckedQuota, state: Option<State>, now: u64, cost: u64) -> Step {
    let (before, moved) = current(quota, state, now);
    let allowed = cost <= quota.count() && fits(quota, before, elapsed(quota, before, now), cost);
    let after = if allowed { State { cur: before.cur + cost, ..before } } else { before };
    Step { allowed, before, after, moved }
}

/// The numbers behind a step, in ticks, given whether the key was charged.
pub fn report(quota: &CheckedQuota, step: &Step, charged: bool, now: u64, cost: u64) -> Report {
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

/// Units that could be taken at once now.
#[inline]
pub fn remaining(quota: &CheckedQuota, step: &Step, charged: bool, now: u64) -> u64 {
    let (count, period) = (quota.count(), quota.period_ticks());
    let state = if charged { step.after } else { step.before };
    let used = state.cur * period + state.prev * (period - elapsed(quota, state, now));
    (count * period).saturating_sub(used) / period
}

/// Gives back `part` of an earlier charge: to the window it was made in, while that window still counts.
pub fn give_back(quota: &CheckedQuota, state: State, now: u64, part: u64, past: &Past) -> State {
    let (before, _) = current(quota, Some(state), now);
    if past.window == before.window {
        State { cur: before.cur.saturating_sub(part), ..before }
    } else if past.window + 1 == before.window {
        State { prev: before.prev.saturating_sub(part), ..before }
    } else {
        before
    }
}

/// Charges `more` units after admission, above the limit if necessary, but never beyond twice the quota.
pub fn add(quota: &CheckedQuota, state: Option<State>, now: u64, more: u64) -> State {
    let (before, _) = current(quota, state, now);
    let most = (2 * quota.count()).max(before.cur);
    State { cur: before.cur.saturating_add(more).min(most), ..before }
}

/// Grants up to `want` units in advance, at most half of what is left now. Returns them, and the state with them
/// charged; 0 changes nothing. They must be spent before the window ends: then they would weigh less than they cost.
pub fn lease(quota: &CheckedQuota, state: Option<State>, now: u64, want: u64) -> (u64, State) {
    let (before, moved) = current(quota, state, now);
    let fits = remaining(quota, &Step { allowed: false, before, after: before, moved }, false, now);
    let grant = if fits == 0 { 0 } else { want.min((fits / 2).max(1)) };
    (grant, State { cur: before.cur + grant, ..before })
}

/// The tick at which the state no longer affects a decision.
pub fn fresh_at(quota: &CheckedQuota, state: State) -> u64 {
    (state.window + if state.cur > 0 { 2 } else { 1 }) * quota.period_ticks()
}

/// `prev * (1 - f) + cur + cost <= quota` in whole numbers, where `f` is the elapsed fraction of the window.
#[inline]
fn fits(quota: &CheckedQuota, state: State, elapsed: u64, cost: u64) -> bool {
    let period = quota.period_ticks();
    (state.cur + cost <= quota.count())
        && state.prev * (period - elapsed) <= (quota.count() - state.cur - cost) * period
}

/// The first tick at which `cost`, which does not fit now, will fit: later in this window, when the weight
/// of the previous count has fallen enough, or in the next, when the current count has become the previous.
fn passes(quota: &CheckedQuota, state: State, cost: u64) -> u64 {
    let period = quota.period_ticks();
    let begin = state.window * period;
    // The smallest `elapsed` for which `count * (period - elapsed) <= room * period`.
    let leaves = |count: u64, room: u64| period - (room * period / count).min(period);
    match quota.count().checked_sub(state.cur + cost) {
        Some(room) if state.prev > 0 => begin + leaves(state.prev, room),
        Some(_) => begin,
        None => begin + period + leaves(state.cur, quota.count() - cost),
    }
}

/// Ticks since the state's window began; zero if it has not begun yet.
#[inline]
fn elapsed(quota: &CheckedQuota, state: State, now: u64) -> u64 {
    now.saturating_sub(state.window * quota.period_ticks())
}

/// The state at `now`, and whether it was moved because the clock has stepped back.
#[inline]
fn current(quota: &CheckedQuota, state: Option<State>, now: u64) -> (State, bool) {
    let window = now / quota.period_ticks();
    match state {
        Some(state) if state.window > window + 1 => (State { window, ..state }, true),
        Some(state) if state.window >= window => (state, false),
        Some(state) if state.window + 1 == window => (State { window, prev: state.cur, cur: 0 }, false),
        _ => (State { window, prev: 0, cur: 0 }, false),
    }
}
