//! Room: where a state is kept, and what happens when there is no place left.
//!
//! The number of keys has a hard cap. What is as good as fresh makes room; when nothing is, a new key
//! shares a cell with others of its limit. So no state is lost, no limit is exceeded, and whoever floods
//! the store with keys gets in the way of new ones only.

use tollkeeper_core::algorithm::sliding_log;
use tollkeeper_core::{Algorithm, Due, Span, Time, fingerprint};

use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::lock;

use super::Inner;
use super::shard::{Dropped, Lens, Shard, Spot};
use super::table::Place;

/// The most cells that the overflow keys of one limit share.
pub(super) const CELLS: usize = 65_536;
/// The same for states that take much room.
const WIDE_CELLS: usize = 1_024;

/// Who looks for room next, and when.
#[derive(Debug, Default)]
pub(super) struct Reclaim {
    shard: usize,
    not_before: Time,
}

impl Inner {
    /// Finds the state of a due, or a place for it.
    #[inline]
    pub(super) fn look(&self, shard: &mut Shard, due: &Due<'_>, print: u128, charging: bool) -> Spot {
        let logs = due.quota.algorithm() == Algorithm::SlidingLog;
        match shard.table.find(print) {
            _ if due.quota.count() == 0 => Spot::Nowhere,
            Place::Found(place) if logs && charging => self.look_log(shard, due, Spot::Own(print, place)),
            Place::Found(place) => Spot::Own(print, place),
            Place::Vacant(_) => {
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

    /// A log that would have to grow when there is no room for that goes into the shared cell.
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

    /// The fingerprint of the cell that a key shares when there is no room. It ends as the key's own
    /// does, so both are in one shard.
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

    /// Takes room for one more key, if there is any.
    #[inline]
    pub(super) fn reserve(&self) -> bool {
        let more = |keys| (keys < self.capacity.max_keys).then_some(keys + 1);
        self.keys.fetch_update(Relaxed, Relaxed, more).is_ok()
    }

    /// Gives room back that was not used after all.
    #[inline]
    pub(super) fn release(&self, spot: Spot) {
        if let Spot::New(..) = spot {
            self.keys.fetch_sub(1, Relaxed);
        }
    }

    fn has_log_room(&self, bytes: usize) -> bool {
        self.log_bytes.load(Relaxed).saturating_add(bytes) <= self.capacity.max_log_bytes
    }

    /// When the store is full, drops states that are as good as fresh, one shard at a time until one
    /// gave something. A search that finds little is not repeated for a millisecond: meanwhile new
    /// keys share.
    #[inline]
    pub(super) fn make_room(&self, now: Time) {
        if !self.has_room() || !self.has_log_room(0) {
            self.reclaim(now);
        }
    }

    #[cold]
    fn reclaim(&self, now: Time) {
        const PAUSE: u64 = 1_000;
        let Ok(mut reclaim) = self.reclaim.try_lock() else { return };
        let wait = reclaim.not_before.since(now).as_micros();
        if (1..=PAUSE).contains(&wait) {
            return;
        }
        for _ in 0..self.shards.len() {
            reclaim.shard = (reclaim.shard + 1) % self.shards.len();
            let (dropped, kept) = self.sweep(reclaim.shard, now);
            if dropped * 64 > kept {
                return;
            }
        }
        reclaim.not_before = now + Span::from_micros(PAUSE);
    }

    /// Sweeps one shard; returns how many keys went and how many stayed.
    pub(super) fn sweep(&self, index: usize, now: Time) -> (usize, usize) {
        let shard = &mut *lock(&self.shards[index].0);
        let dropped = shard.sweep(now);
        self.account(shard, dropped);
        (dropped.0, shard.table.len())
    }
}

/// What a due would add to a log.
fn log_bytes(due: &Due<'_>) -> usize {
    usize::try_from(due.cost.min(due.quota.count())).unwrap_or(usize::MAX).saturating_mul(sliding_log::STAMP)
}
