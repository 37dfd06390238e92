//! Corrections: refunds, settlements, and slots that come back.
//!
//! A charge is corrected once. That it was is remembered by a marker for each of its keys, in the shard
//! of the key, until nothing could be given back any more. Charging twice is safe, refunding twice is
//! not: when there is no room for a marker, nothing is given back, and the caller is told to try later.

use tollkeeper_core::algorithm::{self, State, concurrency};
use tollkeeper_core::charge::{Item, ItemKey};
use tollkeeper_core::inline::Inline;
use tollkeeper_core::{Change, Charge, Fix, Slot, Time, fingerprint};

use crate::store::Correction;
use crate::sync::atomic::Ordering::Relaxed;

use super::capacity::CELLS;
use super::shard::{Lens, Shard, Spot};
use super::table::Place;
use super::{Inner, MemoryStore};

/// How many shards besides its own a correction that finds no room for its markers looks at.
const OTHERS: usize = 8;

impl MemoryStore {
    /// Gives back or adds to what was charged, once.
    pub fn correct(&self, charge: &Charge, fixes: &[Fix]) -> Correction {
        let inner = &*self.inner;
        let now = inner.clock.now();
        if charge.void_at() <= now {
            return Correction::Unknown;
        }
        let items: Vec<(&Item, &Fix)> = charge.items().iter().zip(fixes).collect();
        let mut prints = Inline::<u128, 4>::default();
        items.iter().for_each(|(item, _)| prints.push(inner.print(item)));
        let mut shards = inner.lock(&prints);
        let marker = |index: usize| inner.marker(prints[index], charge.id());
        if (0..items.len()).any(|index| shards.of(index).markers.has(marker(index), charge.void_at())) {
            return Correction::Repeated;
        }
        for index in 0..items.len() {
            inner.expire_markers(shards.of(index), now);
        }
        if !inner.reserve_markers(items.len(), now) {
            inner.corrections_refused.fetch_add(1, Relaxed);
            return Correction::Full;
        }
        for (index, (item, fix)) in items.iter().enumerate() {
            let print = prints[index];
            let shard = shards.of(index);
            shard.markers.set(marker(index), now, charge.void_at());
            let spot = match shard.table.find(print) {
                Place::Found(place) => Spot::Own(print, place),
                Place::Vacant(_) => {
                    let cell = inner.cell(item.key().family(), item.quota.algorithm(), print);
                    match (shard.cells.get(cell), fix.change) {
                        (Some(shared), _) if item.shared => Spot::Shared(cell, Some(shared)),
                        (shared, Change::Add(_)) if inner.reserve() => Spot::New(print, shared),
                        (shared, Change::Add(_)) => Spot::Shared(cell, shared),
                        // The state is as good as fresh: there is nothing left to give back.
                        _ => Spot::Nowhere,
                    }
                }
            };
            let lens = Lens { quota: &fix.quota, shift: item.shift };
            let dropped = shard.write(spot, lens, now, |state| match fix.change {
                Change::Keep => state,
                Change::GiveBack(part) => {
                    Some(algorithm::give_back(lens.quota, state?, now, lens.shift, part, &fix.past))
                }
                Change::Add(more) => Some(algorithm::add(lens.quota, state, now, lens.shift, more)),
            });
            inner.account(shard, dropped);
        }
        Correction::Done
    }

    /// Gives a slot back; false if it was not held any more.
    pub fn release(&self, slot: &Slot) -> bool {
        self.slots(slot, |slots, now| concurrency::release(slots, now.as_micros(), slot.id()))
    }

    /// Counts the life of a slot from now; false if it was not held any more.
    pub fn renew(&self, slot: &Slot) -> bool {
        self.slots(slot, |slots, now| concurrency::renew(slots, now.as_micros(), slot.id()))
    }

    /// Does something to the slots of every limit that a slot is held in: in the key's own state, and
    /// in the cell it may have been taken in before the key had one.
    fn slots(&self, slot: &Slot, change: impl Fn(&mut Vec<concurrency::Slot>, Time) -> bool) -> bool {
        let inner = &*self.inner;
        let now = inner.clock.now();
        let mut held = false;
        for item in slot.items() {
            let print = inner.print(item);
            let shard = &mut *inner.shard(print);
            let lens = Lens { quota: &item.quota, shift: item.shift };
            let cell = inner.cell(item.key().family(), item.quota.algorithm(), print);
            let own = match shard.table.find(print) {
                Place::Found(place) => Some(Spot::Own(print, place)),
                Place::Vacant(_) => None,
            };
            let shared =
                shard.cells.get(cell).filter(|_| item.shared).map(|state| Spot::Shared(cell, Some(state)));
            for spot in own.into_iter().chain(shared) {
                let dropped = shard.write(spot, lens, now, |state| match state {
                    Some(State::Concurrency(mut slots)) => {
                        held |= change(&mut slots, now);
                        Some(State::Concurrency(slots))
                    }
                    other => other,
                });
                inner.account(shard, dropped);
            }
        }
        held
    }
}

impl Inner {
    /// Takes room for markers, if there is any or a few other shards give some up.
    fn reserve_markers(&self, count: usize, now: Time) -> bool {
        let most = self.capacity.max_keys;
        let more = |markers| (markers + count <= most).then_some(markers + count);
        let reserve = || self.markers.fetch_update(Relaxed, Relaxed, more).is_ok();
        reserve()
            || (0..OTHERS).any(|_| {
                let next = self.next_reclaim.fetch_add(1, Relaxed) & (self.shards.len() - 1);
                // One that is in use is left out: to wait for it could wait in a circle.
                if let Ok(mut shard) = self.shards[next].0.try_lock() {
                    self.expire_markers(&mut shard, now);
                }
                reserve()
            })
    }

    /// Drops the markers of a shard whose charges are void by now.
    fn expire_markers(&self, shard: &mut Shard, now: Time) {
        let gone = shard.markers.expire(now);
        if gone > 0 {
            self.markers.fetch_sub(gone, Relaxed);
        }
    }

    /// The fingerprint of a marker. It ends as the key's own does, so both are in one shard, and a
    /// snapshot finds it there again.
    fn marker(&self, print: u128, id: u64) -> u128 {
        let start = self.prints.family(b"corrected");
        let name = self.prints.value(start, Some(&print.to_le_bytes()));
        let name = self.prints.value(name, Some(&id.to_le_bytes()));
        let ending = CELLS as u128 - 1;
        (fingerprint::finish(name) & !ending | print & ending).max(1)
    }

    fn print(&self, item: &Item) -> u128 {
        match &item.key {
            ItemKey::Whole(_) => self.prints.key(item.key()),
            ItemKey::Short(_, short) => short.name,
        }
    }
}
