//! The meter: token bucket, GCRA and leaky bucket are one function.
//!
//! A level rises by `period` for each unit of cost and drains by `count` with each tick, so nothing
//! is ever divided on the way to a verdict and no fraction is ever lost. A request passes while the
//! level stays within the capacity. A level above the capacity is legal (a lowered burst, a settled
//! shortfall) and is never cut when read: cutting would forget use when the burst goes down and up.

use crate::quota::{Algorithm, Quota};
use crate::time::Tick;

use super::{Past, Report};

/// What the meter remembers of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// The level when last written: below 2^52, twice the largest capacity.
    pub level: u64,
    /// The tick it was written in.
    pub at: u64,
}

/// What the meter says of one request.
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
    let (before, moved) =
        state.map_or((State { level: 0, at: now }, false), |state| drained(quota, state, now));
    // cost <= burst comes first: it keeps the product below the capacity, and the sum below 2^53.
    let allowed = cost <= quota.burst() && before.level + cost * quota.period_ticks() <= quota.capacity();
    let after =
        if allowed { State { level: before.level + cost * quota.period_ticks(), ..before } } else { before };
    Step { allowed, before, after, moved }
}

/// The numbers behind a step, in ticks, for a key that was charged or was not.
pub fn report(quota: &Quota, step: &Step, charged: bool, now: u64, cost: u64) -> Report {
    let (capacity, period) = (quota.capacity(), quota.period_ticks());
    let State { level, at } = if charged { step.after } else { step.before };
    let passes =
        |from: u64, cost: u64| drained_at(quota, at, (from + cost * period).saturating_sub(capacity));
    let remaining = remaining(quota, step, charged);
    Report {
        remaining,
        // A step that is allowed need not be divided to know that.
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

/// What could still be taken at once.
#[inline]
pub fn remaining(quota: &Quota, step: &Step, charged: bool) -> u64 {
    let State { level, .. } = if charged { step.after } else { step.before };
    quota.capacity().saturating_sub(level) / quota.period_ticks()
}

/// Gives back `part` of an earlier charge: only what cannot have drained since.
///
/// Keeping more would let a caller spend the same refill twice.
pub fn give_back(quota: &Quota, state: State, now: u64, part: u64, past: &Past) -> State {
    let (before, _) = drained(quota, state, now);
    let lost = match state.at.max(now).checked_sub(past.tick) {
        Some(age) => age.saturating_mul(quota.count().max(past.count)),
        None => u64::MAX, // the clock has stepped back since: what drained meanwhile is not known
    };
    let undrained = past.cost.saturating_mul(quota.period_ticks()).saturating_sub(lost);
    let part = part.saturating_mul(quota.period_ticks());
    State { level: before.level.saturating_sub(undrained.min(part)), ..before }
}

/// Charges `more` after the fact, above the limit if need be, but never beyond twice the capacity.
pub fn add(quota: &Quota, state: Option<State>, now: u64, more: u64) -> State {
    let (before, _) = state.map_or((State { level: 0, at: now }, false), |state| drained(quota, state, now));
    let most = (2 * quota.capacity()).max(before.level);
    State {
        level: more.saturating_mul(quota.period_ticks()).saturating_add(before.level).min(most),
        ..before
    }
}

/// The tick in which the state is as good as a fresh one.
pub fn fresh_at(quota: &Quota, state: State) -> u64 {
    drained_at(quota, state.at, state.level)
}

/// The tick in which a request that queues now leaves: when all before it have.
#[inline]
pub(super) fn departs(quota: &Quota, step: &Step, now: u64) -> u64 {
    drained_at(quota, now, step.before.level)
}

/// The tick in which `level` has drained from `at` on, or the last before 2^53 µs, in the year 2255: a
/// level charged under a count millions of times larger can take longer than numbers reach.
#[inline]
fn drained_at(quota: &Quota, at: u64, level: u64) -> u64 {
    let last = match quota.tick() {
        Tick::Micro => 1 << 53,
        Tick::Milli => (1 << 53) / 1_000,
        Tick::Second => (1 << 53) / 1_000_000,
    };
    (at + level.div_ceil(quota.count())).min(last)
}

/// The state as it stands in tick `now`, and whether it had to be moved there.
///
/// State ahead of the clock by up to one fill time is used as it stands and drains from `at` on;
/// further ahead proves a step of the clock.
#[inline]
fn drained(quota: &Quota, state: State, now: u64) -> (State, bool) {
    let moved = state.at > now && state.at - now > quota.fill_ticks();
    let at = if moved { now } else { state.at };
    let then = at.max(now);
    let level = state.level.saturating_sub((then - at).saturating_mul(quota.count()));
    (State { level, at: then }, moved)
}
