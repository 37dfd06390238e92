//! Corrects charges (refunds and settlements), and releases and renews slots.
//!
//! A charge is corrected at most once. A marker for each of its keys, in the key's shard, records this until the
//! charge is void. Charging twice is safe, refunding twice is not: without space for a marker nothing is refunded,
//! and the caller has to retry later ([`Correction::Full`]).

use tollkeeper_core::algorithm::{self, State, concurrency};
use tollkeeper_core::charge::{Item, ItemKey};
use tollkeeper_core::{Change, Charge, KeyCorrection, Slot, Time, fingerprint};

use crate::store::Correction;
use crate::sync::atomic::Ordering::Relaxed;

use super::capacity::CELLS;
use super::locked::{Guard, Shards};
use super::shard::{Lens, Shard, Spot};
use super::table::Lookup;
use super::{Inner, MemoryStore};

/// How many other shards a correction searches when there is no space for its markers.
const OTHERS: usize = 8;

impl MemoryStore {
    /// Refunds a charge or adds to it, at most once.
    pub fn correct(&self, charge: &Charge, corrections: &[KeyCorrection]) -> Correction {
        let inner = &*self.inner;
        let now = inner.clock.now();
        if charge.void_at() <= now {
            return Correction::Unknown;
        }
        let items: Vec<(&Item, &KeyCorrection)> = charge.items().iter().zip(corrections).collect();
        let prints: Vec<u128> = items.iter().map(|(item, _)| inner.print(item)).collect();
        let guards: Vec<Guard<'_>> = items.iter().map(|_| None).collect();
        let mut shards = inner.lock(&prints, guards, vec![0; items.len()]);
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
                Lookup::Found(place) => Spot::Own(print, place),
                Lookup::Vacant(_) => {
                    let cell = inner.cell(item.key().family(), item.quota.algorithm(), print);
                    match (shard.cells.get(cell), fix.change) {
                        (Some(shared), _) if item.shared => Spot::Shared(cell, Some(shared)),
                        (shared, Change::Add(_)) if inner.reserve() => Spot::New(print, shared),
                        (shared, Change::Add(_)) => Spot::Shared(cell, shared),
                        // The state equals a fresh one: there is nothing left to refund.
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

    /// Releases a slot; false if it was no longer held.
    pub fn release(&self, slot: &Slot) -> bool {
        self.slots(slot, |slots, now| concurrency::release(slots, now.as_micros(), slot.id()))
    }

    /// Restarts the time to live of a slot; false if it was no longer held.
    pub fn renew(&self, slot: &Slot) -> bool {
        self.slots(slot, |slots, now| concurrency::renew(slots, now.as_micros(), slot.id()))
    }

    /// Applies `change` in every limit that holds the slot: in the key's own state, and in the shared cell where the
    /// slot may have been taken before the key had a state.
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
                Lookup::Found(place) => Some(Spot::Own(print, place)),
                Lookup::Vacant(_) => None,
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
    /// Reserves space for markers, if need be by dropping expired ones in a few other shards.
    fn reserve_markers(&self, count: usize, now: Time) -> bool {
        let most = self.capacity.max_keys;
        let more = |markers| (markers + count <= most).then_some(markers + count);
        let reserve = || self.markers.fetch_update(Relaxed, Relaxed, more).is_ok();
        reserve()
            || (0..OTHERS).any(|_| {
                let next = self.next_reclaim.fetch_add(1, Relaxed) & (self.shards.len() - 1);
                // A shard that is locked is skipped: waiting for it could deadlock.
                if let Ok(mut shard) = self.shards[next].0.try_lock() {
                    self.expire_markers(&mut shard, now);
                }
                reserve()
            })
    }

    /// Drops a shard's markers of charges that are void.
    fn expire_markers(&self, shard: &mut Shard, now: Time) {
        let gone = shard.markers.expire(now);
        if gone > 0 {
            self.markers.fetch_sub(gone, Relaxed);
        }
    }

    /// The fingerprint of a marker. Its lowest bits are those of the key's own, so both are in one shard, also after a
    /// snapshot was restored.
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
