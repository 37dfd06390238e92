//! Decides tolls: all or nothing, in one step under the locks of the shards involved.
//!
//! All limits are evaluated before any state is written. Most tolls consist of known keys whose states are in the
//! table: they take a fast path, on which no entry moves and nothing is allocated. Tests compare it with the general
//! path.

use tollkeeper_core::algorithm::{Effect, Step};
use tollkeeper_core::decision::admitted;
use tollkeeper_core::{Due, LimitReply, Outcome, Reply, Time, Toll};

use super::locked::{Guard, Locked, Shards};
use super::shard::{Lens, Shard, Spot};
use super::table::Lookup;
use super::{Inner, MemoryStore};

impl MemoryStore {
    /// Decides a toll: all or nothing, in one step.
    pub fn decide(&self, toll: &Toll) -> Reply {
        let mut reply = Reply::default();
        self.decide_into(toll, self.inner.clock.now(), &mut reply);
        reply
    }

    /// As [`MemoryStore::decide`], but at a time that the caller has read from this store's clock, and writes the reply
    /// in place.
    #[inline(always)]
    pub(crate) fn decide_into(&self, toll: &Toll, now: Time, reply: &mut Reply) {
        let inner = &*self.inner;
        let call = Call { charging: toll.verb().charges(), now };
        let id = match reply.resize(toll.len()) {
            [] => 0,
            // Few dues, as in most requests, need no heap.
            [one] => inner.decide_few([toll.get(0)], call, [one]),
            [one, two] => inner.decide_few([toll.get(0), toll.get(1)], call, [one, two]),
            [one, two, three] => {
                inner.decide_few([toll.get(0), toll.get(1), toll.get(2)], call, [one, two, three])
            }
            replies => inner.decide_many(&toll.dues().collect::<Vec<_>>(), call, replies),
        };
        reply.set(call.now, id);
    }

    /// As [`MemoryStore::decide_into`], for a few dues without a toll around them.
    #[inline(always)]
    pub(crate) fn decide_few<const N: usize>(
        &self,
        dues: [Due<'_>; N],
        charging: bool,
        now: Time,
        replies: &mut [LimitReply; N],
    ) {
        self.inner.decide_few(dues, Call { charging, now }, replies.each_mut());
    }

    /// Decides dues, all or nothing. Returns the time, the id of the admission, and the reply for each due.
    #[cfg(feature = "redis")]
    pub(crate) fn decide_dues(&self, dues: &[Due<'_>], charging: bool) -> (Time, u64, Vec<LimitReply>) {
        let call = Call { charging, now: self.inner.clock.now() };
        let mut replies = vec![LimitReply::Pending; dues.len()];
        let id = if dues.is_empty() { 0 } else { self.inner.decide_many(dues, call, &mut replies) };
        (call.now, id, replies)
    }
}

/// What all dues of a toll have in common.
#[derive(Clone, Copy)]
struct Call {
    charging: bool,
    now: Time,
}

/// One due on the general path.
struct Part<'t> {
    due: Due<'t>,
    spot: Spot,
    step: Step,
    /// The index of the part that is charged for this one: its own, or an earlier one if both share a cell.
    payer: usize,
}

impl<'t> Part<'t> {
    fn new(due: Due<'t>) -> Part<'t> {
        Part { due, spot: Spot::Nowhere, step: Step::default(), payer: 0 }
    }
}

impl Inner {
    /// Decides a few dues, in buffers on the stack; returns the id of the admission.
    #[inline(always)]
    fn decide_few<const N: usize>(
        &self,
        dues: [Due<'_>; N],
        call: Call,
        mut replies: [&mut LimitReply; N],
    ) -> u64 {
        // A loop, because the closure of `array::from_fn` is not inlined.
        let mut prints = [0; N];
        for (print, due) in prints.iter_mut().zip(&dues) {
            *print = self.prints.key(due.key);
        }
        let mut shards = self.lock(&prints, [const { None }; N], [0; N]);
        let id = self.admission_id(&prints, &mut shards, call);
        if !self.decide_known(&dues, &prints, &mut shards, call, id, &mut [0; N], &mut replies) {
            let decided = self.decide_few_new(dues, prints, shards, call, id);
            replies.into_iter().zip(decided).for_each(|(reply, decided)| *reply = decided);
        }
        id
    }

    /// The general path for a few dues. Everything is passed and returned by value: a reference would force the buffers
    /// of the fast path out of registers.
    #[cold]
    #[inline(never)]
    fn decide_few_new<'s, const N: usize>(
        &self,
        dues: [Due<'_>; N],
        prints: [u128; N],
        mut shards: Locked<'s, [Guard<'s>; N], [usize; N]>,
        call: Call,
        id: u64,
    ) -> [LimitReply; N] {
        let mut replies = [LimitReply::Pending; N];
        self.decide_new(&mut dues.map(Part::new), &prints, &mut shards, call, id, &mut replies);
        replies
    }

    /// As [`Inner::decide_few`], for any number of dues.
    #[inline(never)]
    fn decide_many(&self, dues: &[Due<'_>], call: Call, replies: &mut [LimitReply]) -> u64 {
        let prints: Vec<u128> = dues.iter().map(|due| self.prints.key(due.key)).collect();
        let guards: Vec<Guard<'_>> = dues.iter().map(|_| None).collect();
        let (places, mut found) = (vec![0; dues.len()], vec![0; dues.len()]);
        let shards = &mut self.lock(&prints, guards, places);
        let id = self.admission_id(&prints, shards, call);
        let mut in_place: Vec<&mut LimitReply> = replies.iter_mut().collect();
        if !self.decide_known(dues, &prints, shards, call, id, &mut found, &mut in_place) {
            let parts = &mut dues.iter().copied().map(Part::new).collect::<Vec<_>>();
            self.decide_new(parts, &prints, shards, call, id, replies);
        }
        id
    }

    #[inline(always)]
    fn admission_id(&self, prints: &[u128], shards: &mut impl Shards, call: Call) -> u64 {
        if call.charging { self.number(prints[0], shards.of(0)) } else { 0 }
    }

    /// The fast path, for known keys whose states are in the table. Returns false, without a decision, in any other
    /// case. Replies are written in place, because copying a reply that was just written stalls the processor.
    #[inline(always)]
    #[expect(clippy::too_many_arguments, reason = "a struct of them would be built for every check")]
    fn decide_known(
        &self,
        dues: &[Due<'_>],
        prints: &[u128],
        shards: &mut impl Shards,
        call: Call,
        id: u64,
        found: &mut [usize],
        replies: &mut [&mut LimitReply],
    ) -> bool {
        for (index, due) in dues.iter().enumerate() {
            // A quota of `0/s` keeps no state.
            if due.quota.count() == 0 {
                return false;
            }
            let table = &shards.of(index).table;
            let Lookup::Found(place) = table.find(prints[index]) else { return false };
            let Some(stored) = table.state(place).stored(due.quota, due.shift) else { return false };
            *replies[index] = LimitReply::Step { step: due.step(stored, call.now), charged: false };
            found[index] = place;
        }
        if !call.charging {
            return true;
        }
        let pass = admitted(dues.iter().zip(&*replies).map(|(due, reply)| (due.mode(), reply.allowed())));
        for (index, (due, reply)) in dues.iter().zip(replies).enumerate() {
            let LimitReply::Step { step, charged } = reply else { unreachable!("written above") };
            *charged = pass && step.allowed && due.cost > 0;
            if *charged || step.effect.moved() {
                let shard = shards.of(index);
                let spot = Spot::Own(prints[index], found[index]);
                let dropped = shard.enter(spot, due, step, *charged, call.now, id);
                self.account(shard, dropped);
            }
        }
        true
    }

    /// The general path.
    fn decide_new(
        &self,
        parts: &mut [Part<'_>],
        prints: &[u128],
        shards: &mut dyn Shards,
        Call { charging, now }: Call,
        id: u64,
        replies: &mut [LimitReply],
    ) {
        if charging {
            for (index, part) in parts.iter().enumerate() {
                self.make_room(shards.of(index), &part.due, prints[index], now);
            }
        }
        for (index, part) in parts.iter_mut().enumerate() {
            part.spot = self.look(shards.of(index), &part.due, prints[index], charging);
            part.payer = index;
        }
        if parts.iter().any(|part| matches!(part.spot, Spot::Shared(..))) {
            join_shared(parts, shards);
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
        for (index, (part, reply)) in parts.iter().zip(replies).enumerate() {
            let due = &parts[part.payer].due;
            *reply = limit_reply(shards.of(index), part.spot, due, now, part.step, charged(part));
        }
        if !charging {
            return;
        }
        // Write known keys first: once charged they are not fresh, so reclaiming space for a new key cannot drop them.
        for new in [false, true] {
            let of_this_pass = |(_, part): &(usize, &Part<'_>)| matches!(part.spot, Spot::New(..)) == new;
            for (index, part) in parts.iter().enumerate().filter(of_this_pass) {
                if part.payer == index && (charged(part) || part.step.effect.moved()) {
                    let shard = shards.of(index);
                    let dropped = shard.enter(part.spot, &part.due, &part.step, charged(part), now, id);
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
fn join_shared(parts: &mut [Part<'_>], shards: &mut dyn Shards) {
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
