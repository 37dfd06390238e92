//! Sliding log: one timestamp for each admitted unit of cost that still counts.
//!
//! The only window that is exact over any interval, at the price of seven bytes for each unit: ascending
//! big-endian microsecond timestamps (*stamps*) without a header, searched by bisection. The bytes are the
//! state, here and in Redis, where they are read with GETRANGE and extended with APPEND.

use crate::quota::CheckedQuota;

use super::{Past, Report};

/// Bytes of a stamp: enough for 2^56 µs, the year 4253.
pub const STAMP: usize = 7;

/// The verdict of the log on one request. The log is too long to copy: this describes how to change it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Whether the request fits.
    pub allowed: bool,
    /// Whether the log proved that the clock has stepped back: then stamps after `now` count as `now`.
    pub moved: bool,
    /// The index of the first stamp that still counts.
    pub first: usize,
    /// How many stamps still count.
    pub used: u64,
    /// The stamp that the request gets: never before the newest one.
    pub stamp: u64,
}

/// Decides one request of `cost` at microsecond `now`.
pub fn step(quota: &CheckedQuota, log: &[u8], now: u64, cost: u64) -> Step {
    let newest = len(log).checked_sub(1).map_or(0, |last| stamp(log, last));
    let moved = newest > now + quota.period_ticks();
    let first = first_live(log, quota.period_ticks(), now);
    let used = (len(log) - first) as u64;
    let allowed = cost <= quota.count() && used + cost <= quota.count();
    Step { allowed, moved, first, used, stamp: if moved { now } else { newest.max(now) } }
}

/// The numbers behind a step, in microseconds, given whether the key was charged.
pub fn report(quota: &CheckedQuota, log: &[u8], step: &Step, charged: bool, now: u64, cost: u64) -> Report {
    let (count, period) = (quota.count(), quota.period_ticks());
    let used = used(step, charged, cost);
    // `index` counts from the first live stamp; the stamps of this request follow those in the log.
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

/// Units that could be taken at once now.
#[inline]
pub fn remaining(quota: &CheckedQuota, step: &Step, charged: bool, cost: u64) -> u64 {
    quota.count().saturating_sub(used(step, charged, cost))
}

fn used(step: &Step, charged: bool, cost: u64) -> u64 {
    step.used + if charged { cost } else { 0 }
}

/// Appends an admission of `cost` to the log; cost 0 only rewrites it, after the clock has stepped back.
///
/// Expired stamps are removed when they are half of the log, so an admission is amortised constant work.
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
    // Grow by a quarter instead of doubling: a store with a memory bound should not hold twice what it uses.
    let more = index_of(cost).saturating_mul(STAMP);
    if log.capacity() - log.len() < more {
        log.reserve_exact(more.max(log.len() / 4));
    }
    for _ in 0..cost {
        log.extend_from_slice(&encode(step.stamp));
    }
}

/// Gives back `part` of an earlier charge, if that is less than a period old. Removes the oldest live
/// stamps, which frees the least.
pub fn give_back(quota: &CheckedQuota, log: &mut Vec<u8>, now: u64, part: u64, past: &Past) {
    let state = step(quota, log, now, 0);
    write(log, &state, now, 0);
    // A log without a stamp as new as that of the charge was moved when the clock stepped back: the stamp may have expired.
    let newest = len(log).checked_sub(1).map_or(0, |last| stamp(log, last));
    if past.tick + quota.period_ticks() > now && past.tick <= newest {
        let first = first_live(log, quota.period_ticks(), now);
        let gone = usize::try_from(part.min((len(log) - first) as u64)).expect("at most the log's length");
        log.drain(first * STAMP..(first + gone) * STAMP);
    }
}

/// Charges `more` units after admission, above the limit if necessary, but never beyond twice the quota.
pub fn add(quota: &CheckedQuota, log: &mut Vec<u8>, now: u64, more: u64) {
    let state = step(quota, log, now, 0);
    let room = (2 * quota.count()).saturating_sub(state.used);
    write(log, &state, now, more.min(room));
}

/// Merges two logs into one: the newest `most` stamps of both.
///
/// Older stamps cannot change a verdict under a quota of up to `most`.
pub fn merge(one: &[u8], other: &[u8], most: u64) -> Vec<u8> {
    let mut stamps: Vec<u64> = (0..len(one)).map(|index| stamp(one, index)).collect();
    stamps.extend((0..len(other)).map(|index| stamp(other, index)));
    stamps.sort_unstable();
    let spare = (stamps.len() as u64).saturating_sub(most);
    stamps.iter().skip(index_of(spare)).flat_map(|stamp| encode(*stamp)).collect()
}

/// The microsecond at which the newest stamp expires; 0 for an empty log.
pub fn fresh_at(quota: &CheckedQuota, log: &[u8]) -> u64 {
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

/// The stamp at `index`, moved to `now` if the clock has stepped back.
fn seen(log: &[u8], step: &Step, now: u64, index: usize) -> u64 {
    let stamp = stamp(log, index);
    if step.moved { stamp.min(now) } else { stamp }
}

/// The index of the first stamp less than a period old. It is the same for a log whose stamps have to be
/// moved because the clock has stepped back: those become `now`, and were live before.
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
