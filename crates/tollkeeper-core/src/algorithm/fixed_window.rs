//! Fixed window: a count that starts anew with each window.
//!
//! Windows are aligned to the epoch, so a day is a UTC day. Across a boundary up to twice the quota
//! can pass; who minds takes another algorithm. A `shift` moves the windows of a key, so that not all
//! keys start anew in the same instant.

use crate::quota::Quota;

use super::{Past, Report};

/// What a fixed window remembers of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// The number of the window.
    pub window: u64,
    /// What was charged in it: at most twice the quota, below 2^51.
    pub count: u64,
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

/// Decides one request of `cost` at microsecond `now`; the windows begin `shift` early.
#[inline]
pub fn step(quota: &Quota, state: Option<State>, now: u64, shift: u64, cost: u64) -> Step {
    let (before, moved) = current(quota, state, now, shift);
    let allowed = cost <= quota.count() && before.count + cost <= quota.count();
    let after = if allowed { State { count: before.count + cost, ..before } } else { before };
    Step { allowed, before, after, moved }
}

/// The numbers behind a step, in microseconds, for a key that was charged or was not.
pub fn report(quota: &Quota, step: &Step, charged: bool, now: u64, shift: u64, cost: u64) -> Report {
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

/// What could still be taken at once.
#[inline]
pub fn remaining(quota: &Quota, step: &Step, charged: bool) -> u64 {
    let State { count, .. } = if charged { step.after } else { step.before };
    quota.count().saturating_sub(count)
}

/// Gives back `part` of an earlier charge, if its window still runs.
pub fn give_back(quota: &Quota, state: State, now: u64, shift: u64, part: u64, past: &Past) -> State {
    let (before, _) = current(quota, Some(state), now, shift);
    let part = if past.window == before.window { part } else { 0 };
    State { count: before.count.saturating_sub(part), ..before }
}

/// Charges `more` after the fact, above the limit if need be, but never beyond twice the quota.
pub fn add(quota: &Quota, state: Option<State>, now: u64, shift: u64, more: u64) -> State {
    let (before, _) = current(quota, state, now, shift);
    let most = (2 * quota.count()).max(before.count);
    State { count: before.count.saturating_add(more).min(most), ..before }
}

/// The microsecond in which the state is as good as a fresh one.
pub fn fresh_at(quota: &Quota, state: State, shift: u64) -> u64 {
    end(quota, state.window, shift)
}

fn end(quota: &Quota, window: u64, shift: u64) -> u64 {
    (window + 1) * quota.period_ticks() - shift
}

/// The state as it stands, and whether it had to be moved.
///
/// A window that begins next is used as it stands; one further ahead proves a step of the clock, and
/// its count is taken into the current window.
#[inline]
fn current(quota: &Quota, state: Option<State>, now: u64, shift: u64) -> (State, bool) {
    let window = (now + shift) / quota.period_ticks();
    match state {
        Some(state) if state.window > window + 1 => (State { window, ..state }, true),
        Some(state) if state.window >= window => (state, false),
        _ => (State { window, count: 0 }, false),
    }
}
