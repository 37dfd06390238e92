//! Sliding log: the time of every admission that still counts.
//!
//! The only window that is exact over any interval, at the price of seven bytes for each unit of
//! cost: ascending big-endian microsecond stamps, no header, found by binary search. The bytes are the
//! state, here and on Redis, where they are read with GETRANGE and grow by APPEND.

use crate::quota::Quota;

use super::{Past, Report};

/// Bytes in a stamp: enough for 2^56 µs, the year 4253.
pub const STAMP: usize = 7;

/// What the log says of one request. The log itself is too long to copy: this says what to do to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Whether the request fits.
    pub allowed: bool,
    /// The log proved that the clock has stepped back: no stamp counts as later than now.
    pub moved: bool,
    /// The index of the first stamp that still counts.
    pub first: usize,
    /// How many still count.
    pub used: u64,
    /// The stamp that the request gets: never before the newest.
    pub stamp: u64,
}

/// Decides one request of `cost` at microsecond `now`.
pub fn step(quota: &Quota, log: &[u8], now: u64, cost: u64) -> Step {
    let newest = len(log).checked_sub(1).map_or(0, |last| stamp(log, last));
    let moved = newest > now + quota.period_ticks();
    let first = first_live(log, quota.period_ticks(), now);
    let used = (len(log) - first) as u64;
    let allowed = cost <= quota.count() && used + cost <= quota.count();
    Step { allowed, moved, first, used, stamp: if moved { now } else { newest.max(now) } }
}

/// The numbers behind a step, in microseconds, for a key that was charged or was not.
pub fn report(quota: &Quota, log: &[u8], step: &Step, charged: bool, now: u64, cost: u64) -> Report {
    let (count, period) = (quota.count(), quota.period_ticks());
    let used = used(step, charged, cost);
    // Counted from the first live stamp; behind the old ones come those of this request.
    let leaves = |index: u64| {
        let stamp =
            if index < step.used { seen(log, step, now, step.first + index_of(index)) } else { step.stamp };
        stamp + period
    };
    let remaining = remaining(quota, step, charged, cost);
    Report {
        remaining,
        passes: (cost <= count)
            .then(|| if step.allowed { now } else { leaves(step.used + cost - count - 1) }),
        next: if used == 0 { now } else { leaves(used + remaining + 1 - count - 1) },
        fresh: Some(if used == 0 { now } else { leaves(used - 1) }),
        departs: now,
    }
}

/// What could still be taken at once.
#[inline]
pub fn remaining(quota: &Quota, step: &Step, charged: bool, cost: u64) -> u64 {
    quota.count().saturating_sub(used(step, charged, cost))
}

fn used(step: &Step, charged: bool, cost: u64) -> u64 {
    step.used + if charged { cost } else { 0 }
}

/// Writes an admission of `cost` into the log, or after a step of the clock (cost 0) only that.
///
/// Dead stamps go when they are half of the log, so an admission is amortised constant work.
pub fn write(log: &mut Vec<u8>, step: &Step, now: u64, cost: u64) {
    if step.moved || (step.first > 0 && 2 * step.first >= len(log)) {
        log.drain(..step.first * STAMP);
    }
    if step.moved {
        for index in 0..len(log) {
            let capped = stamp(log, index).min(now);
            log[index * STAMP..][..STAMP].copy_from_slice(&encode(capped));
        }
    }
    // By a quarter and not by doubling: a store that counts bytes should not hold twice what is used.
    let more = index_of(cost).saturating_mul(STAMP);
    if log.capacity() - log.len() < more {
        log.reserve_exact(more.max(log.len() / 4));
    }
    for _ in 0..cost {
        log.extend_from_slice(&encode(step.stamp));
    }
}

/// Gives back `part` of an earlier charge, if that is still inside the period: the oldest live units
/// go, which frees the least.
pub fn give_back(quota: &Quota, log: &mut Vec<u8>, now: u64, part: u64, past: &Past) {
    let state = step(quota, log, now, 0);
    write(log, &state, now, 0);
    // Further ahead than a period: the clock has stepped back since, and the stamp has moved.
    let inside = past.tick + quota.period_ticks() > now && past.tick <= now + quota.period_ticks();
    if inside {
        let first = first_live(log, quota.period_ticks(), now);
        let gone = usize::try_from(part.min((len(log) - first) as u64)).expect("at most the log's length");
        log.drain(first * STAMP..(first + gone) * STAMP);
    }
}

/// Charges `more` after the fact, above the limit if need be, but never beyond twice the quota.
pub fn add(quota: &Quota, log: &mut Vec<u8>, now: u64, more: u64) {
    let state = step(quota, log, now, 0);
    let room = (2 * quota.count()).saturating_sub(state.used);
    write(log, &state, now, more.min(room));
}

/// Two logs that from now on are one: the newest `most` stamps of both.
///
/// Older ones cannot change a verdict of a quota of up to `most`.
pub fn merge(one: &[u8], other: &[u8], most: u64) -> Vec<u8> {
    let mut stamps: Vec<u64> = (0..len(one)).map(|index| stamp(one, index)).collect();
    stamps.extend((0..len(other)).map(|index| stamp(other, index)));
    stamps.sort_unstable();
    let spare = (stamps.len() as u64).saturating_sub(most);
    stamps.iter().skip(index_of(spare)).flat_map(|stamp| encode(*stamp)).collect()
}

/// The microsecond in which the newest stamp leaves; 0 for an empty log.
pub fn fresh_at(quota: &Quota, log: &[u8]) -> u64 {
    len(log).checked_sub(1).map_or(0, |last| stamp(log, last) + quota.period_ticks())
}

/// The number of stamps.
pub fn len(log: &[u8]) -> usize {
    log.len() / STAMP
}

/// The stamp at `index`.
pub fn stamp(log: &[u8], index: usize) -> u64 {
    let mut word = [0; 8];
    word[1..].copy_from_slice(&log[index * STAMP..][..STAMP]);
    u64::from_be_bytes(word)
}

fn encode(stamp: u64) -> [u8; STAMP] {
    let [_, bytes @ ..] = stamp.to_be_bytes();
    bytes
}

/// A stamp as this step sees it.
fn seen(log: &[u8], step: &Step, now: u64, index: usize) -> u64 {
    let stamp = stamp(log, index);
    if step.moved { stamp.min(now) } else { stamp }
}

/// The first stamp less than a period old. A log moved by a step of the clock finds the same: moved
/// stamps become `now`, and live they were already.
fn first_live(log: &[u8], period: u64, now: u64) -> usize {
    let (mut dead, mut live) = (0, len(log));
    while dead < live {
        let middle = dead + (live - dead) / 2;
        if stamp(log, middle) + period > now {
            live = middle;
        } else {
            dead = middle + 1;
        }
    }
    live
}

fn index_of(count: u64) -> usize {
    usize::try_from(count).expect("a log fits in memory")
}
