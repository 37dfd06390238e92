//! Concurrency limit: slots that are held until they are released or expire.
//!
//! A slot has a time to live, so that a holder that crashed does not keep it forever. It cannot be known
//! when a holder will release its slot, so the retry time of a refusal is only a hint.

use crate::quota::CheckedQuota;

use super::Report;

/// The longest hint: a refused caller tries again after a second.
const HINT: u64 = 1_000_000;

/// One held slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The id of its holder.
    pub id: u64,
    /// The microsecond at which it was taken or last renewed.
    pub taken: u64,
    /// The microsecond at which it expires.
    pub expires: u64,
}

impl Slot {
    /// The slot at `now`; `None` if it has expired. A slot taken further ahead of the clock than its time
    /// to live proves that the clock has stepped back, and counts as taken now.
    fn seen(self, now: u64) -> Option<Slot> {
        let life = self.expires - self.taken;
        let moved = self.taken > now + life;
        let slot = if moved { Slot { taken: now, expires: now + life, ..self } } else { self };
        (slot.expires > now).then_some(slot)
    }
}

/// The verdict of the slots on one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Whether there is a free slot.
    pub allowed: bool,
    /// Whether some slot proved that the clock has stepped back.
    pub moved: bool,
    /// How many slots are held.
    pub held: u64,
    /// When the first of them expires; `u64::MAX` if none is held.
    pub first: u64,
}

/// Decides whether one more slot can be taken at microsecond `now`.
pub fn step(quota: &CheckedQuota, slots: &[Slot], now: u64) -> Step {
    let mut step = Step { allowed: false, moved: false, held: 0, first: u64::MAX };
    for slot in slots {
        if let Some(seen) = slot.seen(now) {
            step.held += 1;
            step.first = step.first.min(seen.expires);
            step.moved |= seen != *slot;
        }
    }
    step.allowed = step.held < quota.count();
    step
}

/// The numbers behind a step, in microseconds, given whether a slot was taken.
pub fn report(quota: &CheckedQuota, step: &Step, charged: bool, now: u64) -> Report {
    let held = held(step, charged);
    let hint = step.first.min(now + HINT);
    Report {
        remaining: remaining(quota, step, charged),
        passes: (quota.count() > 0).then_some(if step.allowed { now } else { hint }),
        next: if held == 0 { now } else { hint },
        fresh: None,
        departs: now,
    }
}

/// How many slots are free.
#[inline]
pub fn remaining(quota: &CheckedQuota, step: &Step, charged: bool) -> u64 {
    quota.count().saturating_sub(held(step, charged))
}

fn held(step: &Step, charged: bool) -> u64 {
    step.held + u64::from(charged)
}

/// Adds the slot of `taker`; `None` only rewrites the slots, after the clock has stepped back.
pub fn write(quota: &CheckedQuota, slots: &mut Vec<Slot>, now: u64, taker: Option<u64>) {
    *slots = slots.iter().filter_map(|slot| slot.seen(now)).collect();
    slots.extend(taker.map(|id| Slot { id, taken: now, expires: now + quota.period_ticks() }));
}

/// Releases a slot; false if it was no longer held.
pub fn release(slots: &mut Vec<Slot>, now: u64, id: u64) -> bool {
    let held = slots.iter().any(|slot| slot.id == id && slot.seen(now).is_some());
    slots.retain(|slot| slot.id != id);
    held
}

/// Restarts the time to live of a slot from now; false if it was no longer held.
pub fn renew(slots: &mut [Slot], now: u64, id: u64) -> bool {
    match slots.iter_mut().find(|slot| slot.id == id && slot.seen(now).is_some()) {
        Some(slot) => {
            *slot = Slot { taken: now, expires: now + (slot.expires - slot.taken), ..*slot };
            true
        }
        None => false,
    }
}

/// The microsecond at which the last slot expires; 0 if none is held.
pub fn fresh_at(slots: &[Slot]) -> u64 {
    slots.iter().map(|slot| slot.expires).max().unwrap_or(0)
}
