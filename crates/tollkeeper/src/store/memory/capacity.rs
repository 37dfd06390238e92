//! Enforces the capacity of the store: finds space for states, and shares cells when it is full.
//!
//! The number of keys has a hard cap. At the cap, only states that equal a fresh one are dropped; if all are in use, a
//! new key shares a cell with other keys of its limit. So no state is lost, no limit is exceeded, and a client that
//! floods the store with keys affects only new keys.

use tollkeeper_core::algorithm::sliding_log;
use tollkeeper_core::{Algorithm, Due, Time, fingerprint};

use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::lock;

use super::Inner;
use super::shard::{Dropped, Lens, Shard, Spot};
use super::table::Lookup;

/// The most cells that the overflow keys of one limit share.
pub(super) const CELLS: usize = 65_536;
/// The same for logs and slots, whose states are larger.
const WIDE_CELLS: usize = 1_024;

impl Inner {
    /// Finds the state of a due, or space for a new one.
    #[inline]
    pub(super) fn look(&self, shard: &mut Shard, due: &Due<'_>, print: u128, charging: bool) -> Spot {
        let logs = is_log(due);
        match shard.table.find(print) {
            _ if due.quota.count() == 0 => Spot::Nowhere,
            Lookup::Found(place) if logs && charging => self.look_log(shard, due, Spot::Own(print, place)),
            Lookup::Found(place) => Spot::Own(print, place),
            Lookup::Vacant(_) => {
                let cell = || self.cell(due.key.family(), due.quota.algorithm(), print);
                let shared = if shard.cells.len() == 0 { None } else { shard.cells.get(cell()) };
                let room = !logs || self.has_log_room(log_bytes(due));
                let room = room && if charging { self.reserve() } else { self.has_room() };
                if room {
                    return Spot::New(print, shared);
                }
                if charging {
                    self.overflows.fetch_add(1, Relaxed);
                }
                Spot::Shared(cell(), shared)
            }
        }
    }

    /// Moves a log into the shared cell if it would have to grow and there is no space for that.
    #[cold]
    fn look_log(&self, shard: &mut Shard, due: &Due<'_>, spot: Spot) -> Spot {
        let Spot::Own(print, _) = spot else { return spot };
        if shard.log_fits(spot, log_bytes(due)) || self.has_log_room(log_bytes(due)) {
            return spot;
        }
        let cell = self.cell(due.key.family(), due.quota.algorithm(), print);
        shard.share_log(print, cell, Lens::of(due), self.clock.now());
        self.account(shard, Dropped(1));
        self.overflows.fetch_add(1, Relaxed);
        Spot::Shared(cell, shard.cells.get(cell))
    }

    /// The fingerprint of the cell that a key shares when the store is full. Its lowest bits are those of the key's own
    /// fingerprint, so both are in one shard.
    pub(super) fn cell(&self, family: &[u8], algorithm: Algorithm, print: u128) -> u128 {
        let most = match algorithm {
            Algorithm::SlidingLog | Algorithm::Concurrency => WIDE_CELLS,
            _ => CELLS,
        };
        let cells = 1 << most.min(self.capacity.max_keys).ilog2();
        let number: u128 = print & (cells - 1);
        let name = self.prints.value(self.prints.family(family), Some(&number.to_le_bytes()));
        (fingerprint::finish(name) & !(CELLS as u128 - 1) | number).max(1)
    }

    #[inline]
    pub(super) fn has_room(&self) -> bool {
        self.keys.load(Relaxed) < self.capacity.max_keys
    }

    /// Reserves space for one more key; false if the store is full.
    #[inline]
    pub(super) fn reserve(&self) -> bool {
        let more = |keys| (keys < self.capacity.max_keys).then_some(keys + 1);
        self.keys.fetch_update(Relaxed, Relaxed, more).is_ok()
    }

    /// Gives back space that was reserved but not used.
    #[inline]
    pub(super) fn release(&self, spot: Spot) {
        if let Spot::New(..) = spot {
            self.keys.fetch_sub(1, Relaxed);
        }
    }

    fn has_log_room(&self, bytes: usize) -> bool {
        self.log_bytes.load(Relaxed).saturating_add(bytes) <= self.capacity.max_log_bytes
    }

    /// Frees space for a due that needs some in a full store, by searching the next few entries of its shard. The
    /// shard is already locked, and keys are spread evenly, so another shard would have no more. A call does a bounded
    /// amount of work, and a call for a known key does none, unless its log has to grow. Only a state that equals a
    /// fresh one is dropped.
    ///
    /// Must be called before [`Inner::look`] for any due of the toll, because it may drop a state that was found.
    #[inline]
    pub(super) fn make_room(&self, shard: &mut Shard, due: &Due<'_>, print: u128, now: Time) {
        if self.lacks_room(due) && self.needs_room(shard, due, print) {
            self.reclaim(shard, due, now);
        }
    }

    /// Whether a new key of this due would find no space.
    #[inline]
    fn lacks_room(&self, due: &Due<'_>) -> bool {
        !self.has_room() || is_log(due) && !self.has_log_room(log_bytes(due))
    }

    /// Whether a due has no state yet, or a log that is about to grow beyond its allocation.
    fn needs_room(&self, shard: &mut Shard, due: &Due<'_>, print: u128) -> bool {
        match shard.table.find(print) {
            _ if due.quota.count() == 0 => false,
            Lookup::Vacant(_) => true,
            Lookup::Found(place) => {
                let bytes = log_bytes(due);
                is_log(due) && !self.has_log_room(bytes) && !shard.log_fits(Spot::Own(print, place), bytes)
            }
        }
    }

    #[cold]
    fn reclaim(&self, shard: &mut Shard, due: &Due<'_>, now: Time) {
        let dropped = shard.reclaim(now);
        self.account(shard, dropped);
        if !is_log(due) || self.has_log_room(log_bytes(due)) {
            return;
        }
        // A single log in another shard may take up all the space for logs. A shard that is locked is skipped: waiting
        // for it while holding this one could deadlock.
        let next = self.next_reclaim.fetch_add(1, Relaxed) & (self.shards.len() - 1);
        if let Ok(mut other) = self.shards[next].0.try_lock() {
            let dropped = other.reclaim(now);
            self.account(&mut other, dropped);
        }
    }

    /// Sweeps one shard.
    pub(super) fn sweep(&self, index: usize, now: Time) {
        let shard = &mut *lock(&self.shards[index].0);
        let dropped = shard.sweep(now);
        self.account(shard, dropped);
    }
}

#[inline]
fn is_log(due: &Due<'_>) -> bool {
    due.quota.algorithm() == Algorithm::SlidingLog
}

/// The bytes that a due would add to a log.
fn log_bytes(due: &Due<'_>) -> usize {
    usize::try_from(due.cost.min(due.quota.count())).unwrap_or(usize::MAX).saturating_mul(sliding_log::STAMP)
}

#[cfg(test)]
mod tests;
