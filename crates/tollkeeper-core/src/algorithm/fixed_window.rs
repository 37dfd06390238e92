//! Fixed window: a count that restarts at 0 with each window.
//!
//! Windows are aligned to the epoch, so a day is a UTC day. Up to twice the quota can pass across a
//! window boundary; the other algorithms avoid that. A `shift` moves the windows of a key, so that not
//! all keys start a window at the same instant.

use crate::quota::CheckedQuota;

use super::{Past, Report};

/// The stored state of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// The number of the window, counted from the epoch.
    pub window: u64,
    /// The units charged in it: at most twice the quota, below 2^51.
    pub count: u64,
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

/// Decides one request of `cost` at microsecond `now`; the windows begin `shift` microseconds early.
#[inline]
pub fn step(quota: &CheckedQuota, state: Option<State>, now: u64, shift: u64, cost: u64) -> Step {
    let (before, moved) = current(quota, state, now, shift);
    let allowed = cost <= quota.count() && before.count + cost <= quota.count();
    let after = if allowed { State { count: before.count + cost, ..before } } else { before };
    Step { allowed, before, after, moved }
}

/// The numbers behind a step, in microseconds, given whether the key was charged.
pub fn report(quota: &CheckedQuota, step: &Step, charged: bool, now: u64, shift: u64, cost: u64) -> Report {
    let State { window, count } = if charged { step.after } else { step.before };
    let end = end(quota, window, shift);
    Report {
        remaining: remaining(quota, step, charged),
        passes: (cost <= quota.count()).then_some(if step.allowed { now } else { end }),
        next: if count == 0 { now } else { end },
        fresh: Some(if count == 0 { now } else { end }),
        departs: now,
    }
}

/// Units that could be taken at once now.
#[inline]
pub fn remaining(quota: &CheckedQuota, step: &Step, charged: bool) -> u64 {
    let State { count, .. } = if charged { step.after } else { step.before };
    quota.count().saturating_sub(count)
}

/// Gives back `part` of an earlier charge, if its window has not ended.
pub fn give_back(quota: &CheckedQuota, state: State, now: u64, shift: u64, part: u64, past: &Past) -> State {
    let (before, _) = current(quota, Some(state), now, shift);
    let part = if past.window == before.window { part } else { 0 };
    State { count: before.count.saturating_sub(part), ..before }
}

/// Charges `more` units after admission, above the limit if necessary, but never beyond twice the quota.
pub fn add(quota: &CheckedQuota, state: Option<State>, now: u64, shift: u64, more: u64) -> State {
    let (before, _) = current(quota, state, now, shift);
    let most = (2 * quota.count()).max(before.count);
    State { count: before.count.saturating_add(more).min(most), ..before }
}

/// Grants up to `want` units in advance, at most half of what is left in this window. Returns them, and the state with
/// them charged; 0 changes nothing. They must be spent before the window ends.
pub fn lease(quota: &CheckedQuota, state: Option<State>, now: u64, shift: u64, want: u64) -> (u64, State) {
    let (before, _) = current(quota, state, now, shift);
    let fits = quota.count().saturating_sub(before.count);
    let grant = if fits == 0 { 0 } else { want.min((fits / 2).max(1)) };
    (grant, State { count: before.count + grant, ..before })
}

/// The microsecond at which the state no longer affects a decision.
pub fn fresh_at(quota: &CheckedQuota, state: State, shift: u64) -> u64 {
    end(quota, state.window, shift)
}

fn end(quota: &CheckedQuota, window: u64, shift: u64) -> u64 {
    (window + 1) * quota.period_ticks() - shift
}

/// The state at `now`, and whether it was moved because the clock has stepped back.
///
/// A stored window that is the next one is used unchanged; one further ahead proves that the clock has
/// stepped back, and its count is moved to the current window.
#[inline]
fn current(quota: &CheckedQuota, state: Option<State>, now: u64, shift: u64) -> (State, bool) {
    let window = (now + shift) / quota.period_ticks();
    match state {
        Some(state) if state.window > window + 1 => (State { window, ..state }, true),
        Some(state) if state.window >= window => (state, false),
        _ => (State { window, count: 0 }, false),
    }
}
