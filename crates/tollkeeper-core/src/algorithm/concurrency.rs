//! Concurrency: slots that are held, and come back when released or when their time is up.
//!
//! A slot has a time to live, so that a holder that crashed does not hold it for ever. When a slot
//! will be released nobody knows: the waiting time of a refusal is a hint.

use crate::quota::Quota;

use super::Report;

/// The longest hint: a refused caller looks again after a second.
const HINT: u64 = 1_000_000;

/// One holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Who holds it.
    pub id: u64,
    /// The microsecond it was taken or last renewed in.
    pub taken: u64,
    /// The microsecond it comes back in by itself.
    pub expires: u64,
}

impl Slot {
    /// The slot as it stands now, if it is still held. One taken further ahead of the clock than it
    /// lives proves that the clock has stepped back, and counts as taken now.
    fn seen(self, now: u64) -> Option<Slot> {
        let life = self.expires - self.taken;
        let moved = self.taken > now + life;
        let slot = if moved { Slot { taken: now, expires: now + life, ..self } } else { self };
        (slot.expires > now).then_some(slot)
    }
}

/// What the slots say of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Whether there is a free slot.
    pub allowed: bool,
    /// Some slot proved that the clock has stepped back.
    pub moved: bool,
    /// How many are held.
    pub held: u64,
    /// When the first of them comes back by itself; `u64::MAX` if none is held.
    pub first: u64,
}

/// Decides whether one more may hold a slot at microsecond `now`.
pub fn step(quota: &Quota, slots: &[Slot], now: u64) -> Step {
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

/// The numbers behind a step, in microseconds, for a key of which a slot was taken or was not.
pub fn report(quota: &Quota, step: &Step, charged: bool, now: u64) -> Report {
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

/// How many slots could still be taken.
#[inline]
pub fn remaining(quota: &Quota, step: &Step, charged: bool) -> u64 {
    quota.count().saturating_sub(held(step, charged))
}

fn held(step: &Step, charged: bool) -> u64 {
    step.held + u64::from(charged)
}

/// Writes down who took a slot, or after a step of the clock (nobody) only that.
pub fn write(quota: &Quota, slots: &mut Vec<Slot>, now: u64, taker: Option<u64>) {
    *slots = slots.iter().filter_map(|slot| slot.seen(now)).collect();
    slots.extend(taker.map(|id| Slot { id, taken: now, expires: now + quota.period_ticks() }));
}

/// Releases a slot; false if it was not held any more.
pub fn release(slots: &mut Vec<Slot>, now: u64, id: u64) -> bool {
    let held = slots.iter().any(|slot| slot.id == id && slot.seen(now).is_some());
    slots.retain(|slot| slot.id != id);
    held
}

/// Counts the life of a slot from now; false if it was not held any more.
pub fn renew(slots: &mut [Slot], now: u64, id: u64) -> bool {
    match slots.iter_mut().find(|slot| slot.id == id && slot.seen(now).is_some()) {
        Some(slot) => {
            *slot = Slot { taken: now, expires: now + (slot.expires - slot.taken), ..*slot };
            true
        }
        None => false,
    }
}

/// The microsecond in which the last slot comes back by itself; 0 if none is held.
pub fn fresh_at(slots: &[Slot]) -> u64 {
    slots.iter().map(|slot| slot.expires).max().unwrap_or(0)
}
