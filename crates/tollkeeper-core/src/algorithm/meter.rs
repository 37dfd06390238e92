//! The meter: token bucket, GCRA and leaky bucket as one function.
//!
//! A level rises by `period` for each unit of cost and drains by `count` with each tick, so a verdict
//! needs no division and loses no fraction. A request is admitted while the level stays within the
//! capacity. A level above the capacity is legal (after a lowered burst or a settled shortfall) and is
//! not cut when read: cutting would forget usage when the burst is lowered and raised again.

use crate::quota::{Algorithm, CheckedQuota};
use crate::time::Tick;

use super::{Past, Report};

/// The stored state of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// The level when last written: below 2^52, twice the largest capacity.
    pub level: u64,
    /// The tick at which it was written.
    pub at: u64,
}

/// The verdict of the meter on one request.
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
    let (before, moved) =
        state.map_or((State { level: 0, at: now }, false), |state| drained(quota, state, now));
    // cost <= burst comes first: it keeps the product below the capacity, and the sum below 2^53.
    let allowed = cost <= quota.burst() && before.level + cost * quota.period_ticks() <= quota.capacity();
    let after =
        if allowed { State { level: before.level + cost * quota.period_ticks(), ..before } } else { before };
    Step { allowed, before, after, moved }
}

/// The numbers behind a step, in ticks, given whether the key was charged.
pub fn report(quota: &CheckedQuota, step: &Step, charged: bool, now: u64, cost: u64) -> Report {
    let (capacity, period) = (quota.capacity(), quota.period_ticks());
    let State { level, at } = if charged { step.after } else { step.before };
    let passes =
        |from: u64, cost: u64| drained_at(quota, at, (from + cost * period).saturating_sub(capacity));
    let remaining = remaining(quota, step, charged);
    Report {
        remaining,
        // An allowed request passes now: this saves the division.
        passes: (cost <= quota.burst())
            .then(|| if step.allowed { at } else { passes(step.before.level, cost) }),
        next: if remaining == quota.burst() { now } else { passes(level, remaining + 1) },
        fresh: Some(if level == 0 { now } else { drained_at(quota, at, level) }),
        departs: match quota.algorithm() {
            Algorithm::LeakyBucket => departs(quota, step, now),
            _ => now,
        },
    }
}

/// Units that could be taken at once now.
#[inline]
pub fn remaining(quota: &CheckedQuota, step: &Step, charged: bool) -> u64 {
    let State { level, .. } = if charged { step.after } else { step.before };
    quota.capacity().saturating_sub(level) / quota.period_ticks()
}

/// Gives back `part` of an earlier charge, but only units that cannot have drained since.
///
/// Giving back more would let a caller spend the same refill twice.
pub fn give_back(quota: &CheckedQuota, state: State, now: u64, part: u64, past: &Past) -> State {
    let (before, _) = drained(quota, state, now);
    let lost = match state.at.max(now).checked_sub(past.tick) {
        Some(age) => age.saturating_mul(quota.count().max(past.count)),
        None => u64::MAX, // the clock has stepped back since: how much has drained is unknown
    };
    let undrained = past.cost.saturating_mul(quota.period_ticks()).saturating_sub(lost);
    let part = part.saturating_mul(quota.period_ticks());
    State { level: before.level.saturating_sub(undrained.min(part)), ..before }
}

/// Charges `more` units after admission, above the limit if necessary, but never beyond twice the capacity.
pub fn add(quota: &CheckedQuota, state: Option<State>, now: u64, more: u64) -> State {
    let (before, _) = state.map_or((State { level: 0, at: now }, false), |state| drained(quota, state, now));
    let most = (2 * quota.capacity()).max(before.level);
    State {
        level: more.saturating_mul(quota.period_ticks()).saturating_add(before.level).min(most),
        ..before
    }
}

/// Grants up to `want` units in advance, at most an eighth of what fits. Returns them, and the state with them
/// charged; 0 changes nothing.
///
/// Units that are granted now are spent later, when the level has drained. So the level is first raised to what
/// drains while they can be spent: then it bounds what is spent, whatever the pattern of spending.
pub fn lease(quota: &CheckedQuota, state: Option<State>, now: u64, want: u64, raise: u64) -> (u64, State) {
    let (before, _) = state.map_or((State { level: 0, at: now }, false), |state| drained(quota, state, now));
    let base = before.level.max(raise);
    let fits = quota.capacity().saturating_sub(base) / quota.period_ticks();
    let grant = if fits == 0 { 0 } else { want.min((fits / 8).max(1)) };
    let after = State { level: base + grant * quota.period_ticks(), ..before };
    (grant, if grant > 0 { after } else { before })
}

/// The tick at which the state no longer affects a decision.
pub fn fresh_at(quota: &CheckedQuota, state: State) -> u64 {
    drained_at(quota, state.at, state.level)
}

/// The tick at which a request that is queued now leaves the queue: when all before it have left.
#[inline]
pub(super) fn departs(quota: &CheckedQuota, step: &Step, now: u64) -> u64 {
    drained_at(quota, now, step.before.level)
}

/// The tick at which `level` has drained, starting at `at`; at most the last tick before 2^53 µs, in the
/// year 2255: a level charged under a count millions of times larger would drain beyond that.
#[inline]
fn drained_at(quota: &CheckedQuota, at: u64, level: u64) -> u64 {
    let last = match quota.tick() {
        Tick::Micro => 1 << 53,
        Tick::Milli => (1 << 53) / 1_000,
        Tick::Second => (1 << 53) / 1_000_000,
    };
    (at + level.div_ceil(quota.count())).min(last)
}

/// The state at tick `now`, and whether it was moved because the clock has stepped back.
///
/// A state ahead of the clock by up to one fill time is used unchanged and starts to drain at `at`;
/// further ahead proves that the clock has stepped back.
#[inline]
fn drained(quota: &CheckedQuota, state: State, now: u64) -> (State, bool) {
    let moved = state.at > now && state.at - now > quota.fill_ticks();
    let at = if moved { now } else { state.at };
    let then = at.max(now);
    let level = state.level.saturating_sub((then - at).saturating_mul(quota.count()));
    (State { level, at: then }, moved)
}
