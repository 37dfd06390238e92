//! Decides tolls: all or nothing, in one step under the locks of the shards involved.
//!
//! All limits are evaluated before any state is written. Two common cases have a fast path, because most requests take
//! it: a single token bucket whose key is known, and several limits whose keys are all known. Tests compare the fast
//! paths with the general path.

use tollkeeper_core::algorithm::{Effect, Step, meter};
use tollkeeper_core::decision::admitted;
use tollkeeper_core::inline::Inline;
use tollkeeper_core::{Algorithm, Due, LimitReply, Outcome, Reply, Time, Toll};

use super::locked::Locked;
use super::shard::{Lens, Shard, Spot};
use super::state::Packed;
use super::table::Place;
use super::{Inner, MemoryStore};

impl MemoryStore {
    /// Decides a toll: all or nothing, in one step.
    pub fn decide(&self, toll: &Toll<'_>) -> Reply {
        let mut reply = Reply::default();
        self.decide_into(toll, &mut reply);
        reply
    }

    /// As [`MemoryStore::decide`], but writes the reply in place.
    pub(crate) fn decide_into(&self, toll: &Toll<'_>, reply: &mut Reply) {
        let inner = &*self.inner;
        let now = inner.clock.now();
        let charging = toll.verb().charges();
        let id = match reply.resize(toll.len()) {
            [] => 0,
            [limit] => {
                let due = toll.get(0);
                inner.decide_one(&due, inner.prints.key(due.key), charging, now, limit)
            }
            limits => {
                let dues: Vec<Due<'_>> = toll.dues().collect();
                let mut prints = Inline::<u128, 4>::default();
                dues.iter().for_each(|due| prints.push(inner.prints.key(due.key)));
                inner.decide_many(&dues, &prints, charging, now, limits)
            }
        };
        reply.set(now, id);
    }

    /// Decides dues, all or nothing. Returns the time, the id of the admission, and the reply for each due.
    #[cfg(feature = "redis")]
    pub(crate) fn decide_dues(&self, dues: &[Due<'_>], charging: bool) -> (Time, u64, Vec<LimitReply>) {
        let inner = &*self.inner;
        let now = inner.clock.now();
        let mut replies = vec![LimitReply::Pending; dues.len()];
        let prints: Vec<u128> = dues.iter().map(|due| inner.prints.key(due.key)).collect();
        let id = match dues {
            [] => 0,
            [due] => inner.decide_one(due, prints[0], charging, now, &mut replies[0]),
            _ => inner.decide_many(dues, &prints, charging, now, &mut replies),
        };
        (now, id, replies)
    }

    /// Decides one due; returns the time.
    #[inline]
    pub(crate) fn decide_one(
        &self,
        due: &Due<'_>,
        print: u128,
        charging: bool,
        reply: &mut LimitReply,
    ) -> Time {
        let now = self.inner.clock.now();
        self.inner.decide_one(due, print, charging, now, reply);
        now
    }

    /// Decides several dues, all or nothing; returns the time.
    #[inline]
    pub(crate) fn decide_many(
        &self,
        dues: &[Due<'_>],
        prints: &[u128],
        charging: bool,
        reply: &mut [LimitReply],
    ) -> Time {
        let now = self.inner.clock.now();
        self.inner.decide_many(dues, prints, charging, now, reply);
        now
    }
}

/// The dues of a toll, with their shards locked.
struct Several<'a, 's> {
    dues: &'a [Due<'a>],
    prints: &'a [u128],
    shards: &'a mut Locked<'s>,
    charging: bool,
    now: Time,
    id: u64,
}

/// One of several dues while the toll is being decided.
struct Part<'t> {
    due: Due<'t>,
    spot: Spot,
    step: Step,
    /// The index of the part that is charged for this one: its own, or an earlier one if both share a cell.
    payer: usize,
}

impl Inner {
    /// Decides one due; returns the id of the admission. The reply is written in place, because copying a reply that
    /// was just written stalls the processor.
    #[inline]
    fn decide_one(
        &self,
        due: &Due<'_>,
        print: u128,
        charging: bool,
        now: Time,
        reply: &mut LimitReply,
    ) -> u64 {
        // Fast path for the most common case, a known token bucket. A quota of `0/s` has no arithmetic to
        // do, and a cost of 0 charges nothing: both take the general path.
        if due.quota.algorithm() == Algorithm::TokenBucket && due.quota.count() > 0 && due.cost > 0 {
            let shard = &mut *self.shard(print);
            if let Some(packed) = shard.table.get_mut(print) {
                let tick = due.quota.tick().number(now);
                let step = meter::step(due.quota, Some(packed.as_meter(due.quota)), tick, due.cost);
                let charged = charging && step.allowed;
                if charged || charging && step.moved {
                    *packed = Packed::meter(due.quota, step.after);
                }
                *reply = LimitReply::Step {
                    step: Step { allowed: step.allowed, effect: Effect::Meter(step) },
                    charged,
                };
                return if charging { self.number(print, shard) } else { 0 };
            }
        }
        self.decide_any(due, print, charging, now, reply)
    }

    /// The general path for one due.
    fn decide_any(
        &self,
        due: &Due<'_>,
        print: u128,
        charging: bool,
        now: Time,
        reply: &mut LimitReply,
    ) -> u64 {
        let shard = &mut *self.shard(print);
        if charging {
            self.make_room(shard, due, print, now);
        }
        let spot = self.look(shard, due, print, charging);
        let step = due.step(shard.stored(spot, Lens::of(due)), now);
        let charged = charging && step.allowed && due.cost > 0;
        *reply = limit_reply(shard, spot, due, now, step, charged);
        if !charging {
            return 0;
        }
        let id = self.number(print, shard);
        if charged || step.effect.moved() {
            let dropped = shard.enter(spot, due, &step, charged, now, id);
            self.account(shard, dropped);
        } else {
            self.release(spot);
        }
        id
    }

    /// Decides several dues, all or nothing; returns the id of the admission.
    #[inline]
    fn decide_many(
        &self,
        dues: &[Due<'_>],
        prints: &[u128],
        charging: bool,
        now: Time,
        reply: &mut [LimitReply],
    ) -> u64 {
        let mut shards = self.lock(prints);
        let id = if charging { self.number(prints[0], shards.of(0)) } else { 0 };
        let mut toll = Several { dues, prints, shards: &mut shards, charging, now, id };
        if !self.decide_known(&mut toll, reply) {
            self.decide_new(&mut toll, reply);
        }
        id
    }

    /// Fast path: all keys are known and their states are in the table, so no entry moves and no memory is allocated.
    /// Returns false, without a decision, in any other case.
    #[inline]
    fn decide_known(&self, toll: &mut Several<'_, '_>, reply: &mut [LimitReply]) -> bool {
        let mut found = Inline::<usize, 4>::default();
        for (index, due) in toll.dues.iter().enumerate() {
            if due.quota.count() == 0 {
                return false;
            }
            let shard = toll.shards.of(index);
            let Place::Found(place) = shard.table.find(toll.prints[index]) else { return false };
            let Some(stored) = shard.table.state(place).stored(due.quota, due.shift) else { return false };
            reply[index] = LimitReply::Step { step: due.step(stored, toll.now), charged: false };
            found.push(place);
        }
        if !toll.charging {
            return true;
        }
        let pass = admitted(toll.dues.iter().zip(&*reply).map(|(due, reply)| (due.mode(), reply.allowed())));
        for (index, (due, reply)) in toll.dues.iter().zip(reply).enumerate() {
            let LimitReply::Step { step, charged } = reply else { unreachable!("written above") };
            *charged = pass && step.allowed && due.cost > 0;
            if *charged || step.effect.moved() {
                let shard = toll.shards.of(index);
                let spot = Spot::Own(toll.prints[index], found[index]);
                let dropped = shard.enter(spot, due, step, *charged, toll.now, toll.id);
                self.account(shard, dropped);
            }
        }
        true
    }

    /// The general path for several dues.
    fn decide_new(&self, toll: &mut Several<'_, '_>, reply: &mut [LimitReply]) {
        let (now, charging) = (toll.now, toll.charging);
        if charging {
            for (index, due) in toll.dues.iter().enumerate() {
                self.make_room(toll.shards.of(index), due, toll.prints[index], now);
            }
        }
        let mut parts = Vec::with_capacity(toll.dues.len());
        for (payer, due) in toll.dues.iter().enumerate() {
            let spot = self.look(toll.shards.of(payer), due, toll.prints[payer], charging);
            parts.push(Part { due: *due, spot, step: Step::default(), payer });
        }
        let shards = &mut *toll.shards;
        if parts.iter().any(|part| matches!(part.spot, Spot::Shared(..))) {
            join_shared(&mut parts, shards);
        }
        for index in 0..parts.len() {
            let part = &parts[index];
            parts[index].step = match part.payer {
                payer if payer < index => parts[payer].step,
                _ => part.due.step(shards.of(index).stored(part.spot, Lens::of(&part.due)), now),
            };
        }
        let pass = admitted(parts.iter().map(|part| (part.due.mode(), part.step.allowed)));
        let charged = |part: &Part<'_>| charging && pass && part.step.allowed && part.due.cost > 0;
        for (index, (part, reply)) in parts.iter().zip(reply).enumerate() {
            let due = &parts[part.payer].due;
            *reply = limit_reply(shards.of(index), part.spot, due, now, part.step, charged(part));
        }
        if !charging {
            return;
        }
        // Write known keys first: once charged they are not fresh, so making room for a new key cannot drop them.
        for new in [false, true] {
            let of_this_pass = |(_, part): &(usize, &Part<'_>)| matches!(part.spot, Spot::New(..)) == new;
            for (index, part) in parts.iter().enumerate().filter(of_this_pass) {
                if part.payer == index && (charged(part) || part.step.effect.moved()) {
                    let shard = shards.of(index);
                    let dropped = shard.enter(part.spot, &part.due, &part.step, charged(part), now, toll.id);
                    self.account(shard, dropped);
                } else {
                    self.release(part.spot);
                }
            }
        }
    }
}

/// Merges dues whose keys share a cell: the first of them is charged the sum of their costs.
#[cold]
fn join_shared(parts: &mut [Part<'_>], shards: &mut Locked<'_>) {
    for index in 0..parts.len() {
        let Spot::Shared(cell, _) = parts[index].spot else { continue };
        // Read the cell again: a log may have been moved into it since it was looked up.
        let state = shards.of(index).cells.get(cell);
        parts[index].spot = Spot::Shared(cell, state);
        let same = |part: &Part<'_>| matches!(part.spot, Spot::Shared(other, _) if other == cell);
        let payer = parts[..index].iter().position(same).unwrap_or(index);
        if payer < index {
            let cost = parts[payer].due.cost + parts[index].due.cost;
            parts[payer].due = parts[payer].due.with_cost(cost);
            parts[index].payer = payer;
        }
    }
}

/// The reply for one limit, before anything is written. The numbers of logs, slots and shared cells need the state,
/// so they are computed here; those of other states are computed from the step on demand.
#[inline]
fn limit_reply(
    shard: &mut Shard,
    spot: Spot,
    due: &Due<'_>,
    now: Time,
    step: Step,
    charged: bool,
) -> LimitReply {
    let overflow = matches!(spot, Spot::Shared(..));
    if !overflow && !matches!(step.effect, Effect::SlidingLog(_) | Effect::Concurrency(_)) {
        return LimitReply::Step { step, charged };
    }
    let outcome = due.outcome(shard.stored(spot, Lens::of(due)), now, &step, charged);
    LimitReply::Outcome { outcome: Outcome { overflow, ..outcome }, mark: step.effect.mark() }
}

#[cfg(test)]
mod tests;
