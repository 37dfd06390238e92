//! Deciding: all of a toll or nothing, in one step.
//!
//! Everything is evaluated before anything is written. What each limit says is kept as the step it
//! made; the numbers that people see are computed by whoever asks for them.

use tollkeeper_core::algorithm::{Effect, Step, meter};
use tollkeeper_core::inline::Inline;
use tollkeeper_core::{Algorithm, Due, LimitReply, Outcome, Reply, Time, Toll};

use super::locked::Locked;
use super::shard::{Lens, Shard, Spot};
use super::state::Packed;
use super::table::Place;
use super::{Inner, MemoryStore};

impl MemoryStore {
    /// Decides a toll: all of it or nothing, in one step.
    pub fn decide(&self, toll: &Toll) -> Reply {
        let mut ruling = Reply::default();
        self.decide_into(toll, &mut ruling);
        ruling
    }

    /// As [`MemoryStore::decide`], in place.
    pub(crate) fn decide_into(&self, toll: &Toll, ruling: &mut Reply) {
        let inner = &*self.inner;
        let now = inner.clock.now();
        let charging = toll.verb().charges();
        let said = ruling.say(toll.len());
        let id = match said {
            [] => 0,
            [said] => {
                let due = toll.get(0);
                inner.decide_one(&due, inner.prints.key(due.key), charging, now, said)
            }
            _ => {
                let dues: Vec<Due<'_>> = toll.dues().collect();
                let mut prints = Inline::<u128, 4>::default();
                dues.iter().for_each(|due| prints.push(inner.prints.key(due.key)));
                inner.decide_many(&dues, &prints, charging, now, said)
            }
        };
        ruling.set(now, id);
    }

    /// Decides what is due, all or nothing: when, the number of the admission, and what each limit says.
    #[cfg(feature = "redis")]
    pub(crate) fn decide_dues(&self, dues: &[Due<'_>], charging: bool) -> (Time, u64, Vec<LimitReply>) {
        let inner = &*self.inner;
        let now = inner.clock.now();
        let mut said = vec![LimitReply::Nothing; dues.len()];
        let prints: Vec<u128> = dues.iter().map(|due| inner.prints.key(due.key)).collect();
        let id = match dues {
            [] => 0,
            [due] => inner.decide_one(due, prints[0], charging, now, &mut said[0]),
            _ => inner.decide_many(dues, &prints, charging, now, &mut said),
        };
        (now, id, said)
    }

    /// Decides one limit for one key, and says when.
    #[inline]
    pub(crate) fn decide_one(
        &self,
        due: &Due<'_>,
        print: u128,
        charging: bool,
        said: &mut LimitReply,
    ) -> Time {
        let now = self.inner.clock.now();
        self.inner.decide_one(due, print, charging, now, said);
        now
    }

    /// Decides several limits, all or nothing, and says when.
    #[inline]
    pub(crate) fn decide_many(
        &self,
        dues: &[Due<'_>],
        prints: &[u128],
        charging: bool,
        said: &mut [LimitReply],
    ) -> Time {
        let now = self.inner.clock.now();
        self.inner.decide_many(dues, prints, charging, now, said);
        now
    }
}

/// A toll over several limits, with its shards locked.
struct Several<'a, 's> {
    dues: &'a [Due<'a>],
    prints: &'a [u128],
    shards: &'a mut Locked<'s>,
    charging: bool,
    now: Time,
    id: u64,
}

/// One limit of a toll over several, on its way to a verdict.
struct Part<'t> {
    due: Due<'t>,
    spot: Spot,
    step: Step,
    /// The part that pays for it: another one, if both share a cell.
    payer: usize,
}

impl Inner {
    /// Decides a toll over one limit; returns the number of the admission. What is said is written where
    /// it will stay: to copy what has only just been written makes the processor wait.
    #[inline]
    fn decide_one(
        &self,
        due: &Due<'_>,
        print: u128,
        charging: bool,
        now: Time,
        said: &mut LimitReply,
    ) -> u64 {
        // A token bucket that is known is the commonest case, and has a way of its own to the same end.
        // Not if nothing is granted any more: then there is no arithmetic to do.
        if due.quota.algorithm() == Algorithm::TokenBucket && due.quota.count() > 0 && due.cost > 0 {
            let shard = &mut *self.shard(print);
            if let Some(packed) = shard.table.get_mut(print) {
                let tick = due.quota.tick().number(now);
                let step = meter::step(due.quota, Some(packed.as_meter(due.quota)), tick, due.cost);
                let charged = charging && step.allowed;
                if charged || charging && step.moved {
                    *packed = Packed::meter(due.quota, step.after);
                }
                *said = LimitReply::Step {
                    step: Step { allowed: step.allowed, effect: Effect::Meter(step) },
                    charged,
                };
                return if charging { self.number(print, shard) } else { 0 };
            }
        }
        self.decide_any(due, print, charging, now, said)
    }

    fn decide_any(
        &self,
        due: &Due<'_>,
        print: u128,
        charging: bool,
        now: Time,
        said: &mut LimitReply,
    ) -> u64 {
        let shard = &mut *self.shard(print);
        if charging {
            self.make_room(shard, due, print, now);
        }
        let spot = self.look(shard, due, print, charging);
        let step = due.step(shard.seen(spot, Lens::of(due)), now);
        let charged = charging && step.allowed && due.cost > 0;
        *said = says(shard, spot, due, now, step, charged);
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

    /// Decides several limits, all or nothing; returns the number of the admission.
    #[inline]
    fn decide_many(
        &self,
        dues: &[Due<'_>],
        prints: &[u128],
        charging: bool,
        now: Time,
        said: &mut [LimitReply],
    ) -> u64 {
        let mut shards = self.lock(prints);
        let id = if charging { self.number(prints[0], shards.of(0)) } else { 0 };
        let mut toll = Several { dues, prints, shards: &mut shards, charging, now, id };
        if !self.decide_known(&mut toll, said) {
            self.decide_new(&mut toll, said);
        }
        id
    }

    /// Decides when all keys are known and their states fit into their entries: the commonest case, in
    /// which nothing moves and nothing has to be allocated. False if it is not that case.
    #[inline]
    fn decide_known(&self, toll: &mut Several<'_, '_>, said: &mut [LimitReply]) -> bool {
        let mut found = Inline::<usize, 4>::default();
        for (index, due) in toll.dues.iter().enumerate() {
            if due.quota.count() == 0 {
                return false;
            }
            let shard = toll.shards.of(index);
            let Place::Found(place) = shard.table.find(toll.prints[index]) else { return false };
            let Some(seen) = shard.table.state(place).seen(due.quota, due.shift) else { return false };
            said[index] = LimitReply::Step { step: due.step(seen, toll.now), charged: false };
            found.push(place);
        }
        let admitted = toll.dues.iter().zip(&*said).all(|(due, said)| said.allowed() || !due.enforced());
        if !toll.charging {
            return true;
        }
        for (index, (due, said)) in toll.dues.iter().zip(said).enumerate() {
            let LimitReply::Step { step, charged } = said else { unreachable!("said above") };
            *charged = admitted && step.allowed && due.cost > 0;
            if *charged || step.effect.moved() {
                let shard = toll.shards.of(index);
                let spot = Spot::Own(toll.prints[index], found[index]);
                let dropped = shard.enter(spot, due, step, *charged, toll.now, toll.id);
                self.account(shard, dropped);
            }
        }
        true
    }

    /// Decides whatever the case is.
    fn decide_new(&self, toll: &mut Several<'_, '_>, said: &mut [LimitReply]) {
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
                _ => part.due.step(shards.of(index).seen(part.spot, Lens::of(&part.due)), now),
            };
        }
        let admitted = parts.iter().all(|part| part.step.allowed || !part.due.enforced());
        let charged = |part: &Part<'_>| charging && admitted && part.step.allowed && part.due.cost > 0;
        for (index, (part, said)) in parts.iter().zip(said).enumerate() {
            let due = &parts[part.payer].due;
            *said = says(shards.of(index), part.spot, due, now, part.step, charged(part));
        }
        if !charging {
            return;
        }
        // Known keys first: once they are written they are not as good as fresh any more, and making a
        // place for a new one does not drop them.
        for new in [false, true] {
            let of_this_turn = |(_, part): &(usize, &Part<'_>)| matches!(part.spot, Spot::New(..)) == new;
            for (index, part) in parts.iter().enumerate().filter(of_this_turn) {
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

/// Keys that share one cell are one entry there: the first of them pays for all.
#[cold]
fn join_shared(parts: &mut [Part<'_>], shards: &mut Locked<'_>) {
    for index in 0..parts.len() {
        let Spot::Shared(cell, _) = parts[index].spot else { continue };
        // A log may have been moved into a cell that was looked at before.
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

/// What a limit says, before anything is written. Logs, slots and shared cells hold more than the step
/// tells: their numbers are computed while they can be seen.
#[inline]
fn says(shard: &mut Shard, spot: Spot, due: &Due<'_>, now: Time, step: Step, charged: bool) -> LimitReply {
    let overflow = matches!(spot, Spot::Shared(..));
    if !overflow && !matches!(step.effect, Effect::SlidingLog(_) | Effect::Concurrency(_)) {
        return LimitReply::Step { step, charged };
    }
    let outcome = due.outcome(shard.seen(spot, Lens::of(due)), now, &step, charged);
    LimitReply::Outcome { outcome: Outcome { overflow, ..outcome }, mark: step.effect.mark() }
}

#[cfg(test)]
mod tests;
