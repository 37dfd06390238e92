//! The memory store: every state in this process, with nothing to install.
//!
//! States live in shards, each under one short lock; a toll that touches several locks them in order,
//! so all of it is decided in one step. A key is held as a fingerprint. The number of keys has a hard
//! cap, and still no state is ever lost: only what is as good as fresh is dropped, and when nothing is,
//! new keys share cells. No thread of its own is needed for anything but snapshots.

mod autosave;
mod capacity;
mod correct;
mod decide;
mod locked;
mod markers;
mod shard;
mod snapshot;
mod state;
mod table;

use std::sync::{Arc, OnceLock};

use tollkeeper_core::fingerprint::Fingerprinter;
use tollkeeper_core::{Charge, Fix, Key, Reply, Secret, Slot, Toll};

use crate::clock::Clock;
use crate::random;
use crate::store::{Correction, Store, StoreFuture, Unavailable};
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use crate::sync::{Mutex, MutexGuard, lock};

pub use autosave::{Restored, SnapshotStatus, Snapshots};
pub use snapshot::SnapshotError;

use autosave::Keeper;
use shard::{Dropped, Shard};

/// How much the store may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// The most keys that have a state of their own; and the most corrections of charges that are remembered.
    pub max_keys: usize,
    /// The most bytes in sliding logs.
    pub max_log_bytes: usize,
}

impl Default for Capacity {
    fn default() -> Capacity {
        Capacity { max_keys: 1_000_000, max_log_bytes: 256 << 20 }
    }
}

/// The embedded store. Cheap to clone: all clones are one store.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shards: Box<[Padded]>,
    prints: Fingerprinter,
    secrets: Secrets,
    clock: Clock,
    capacity: Capacity,
    keys: AtomicUsize,
    markers: AtomicUsize,
    log_bytes: AtomicUsize,
    overflows: AtomicU64,
    corrections_refused: AtomicU64,
    /// Which shard is asked next for room that the key's own does not have: for logs, or for markers.
    next_reclaim: AtomicUsize,
    saving: Mutex<()>,
    keeper: OnceLock<Keeper>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper.get() {
            // There is nobody left to tell.
            let _ = keeper.stop(self);
        }
    }
}

/// On cache lines of its own, so that two locks do not disturb each other.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Padded(Mutex<Shard>);

/// What makes fingerprints and receipts of this store unlike those of any other.
#[derive(Clone, Copy, Debug)]
struct Secrets {
    prints: Secret,
    receipts: Secret,
}

impl Default for MemoryStore {
    fn default() -> MemoryStore {
        MemoryStore::new(Capacity::default(), Clock::system())
    }
}

impl MemoryStore {
    /// An empty store.
    pub fn new(capacity: Capacity, clock: Clock) -> MemoryStore {
        MemoryStore::with_secrets(
            capacity,
            clock,
            Secrets { prints: random::secret(), receipts: random::secret() },
        )
    }

    fn with_secrets(capacity: Capacity, clock: Clock, secrets: Secrets) -> MemoryStore {
        let shards = shards_for(capacity.max_keys);
        // Admissions are numbered from the time of the start on: after a restart no number comes again.
        let first = clock.now().as_micros();
        let shard = || Padded(Mutex::new(Shard::new(first)));
        MemoryStore {
            inner: Arc::new(Inner {
                shards: (0..shards).map(|_| shard()).collect(),
                prints: Fingerprinter::new(&secrets.prints),
                secrets,
                clock,
                capacity: Capacity { max_keys: capacity.max_keys.max(1), ..capacity },
                keys: AtomicUsize::new(0),
                markers: AtomicUsize::new(0),
                log_bytes: AtomicUsize::new(0),
                overflows: AtomicU64::new(0),
                corrections_refused: AtomicU64::new(0),
                next_reclaim: AtomicUsize::new(0),
                saving: Mutex::new(()),
                keeper: OnceLock::new(),
            }),
        }
    }

    /// The clock that decides.
    pub fn clock(&self) -> &Clock {
        &self.inner.clock
    }

    /// How many keys have a state of their own.
    pub fn keys(&self) -> usize {
        self.inner.keys.load(Relaxed)
    }

    /// How often a key had to share a state, because the store was full.
    pub fn overflows(&self) -> u64 {
        self.inner.overflows.load(Relaxed)
    }

    /// How often a correction was refused ([`Correction::Full`]), because there was no room for its marker.
    pub fn corrections_refused(&self) -> u64 {
        self.inner.corrections_refused.load(Relaxed)
    }

    /// Bytes held by sliding logs.
    pub fn log_bytes(&self) -> usize {
        self.inner.log_bytes.load(Relaxed)
    }

    /// Bytes held for all keys, used or set aside: looks at every shard.
    pub fn bytes(&self) -> usize {
        let shards: usize = self.inner.shards.iter().map(|shard| lock(&shard.0).bytes()).sum();
        shards + self.log_bytes()
    }

    /// Drops every state that is as good as fresh, and gives memory back. Never needed for a right
    /// answer: for a process that was busy once and wants to be small again.
    pub fn sweep(&self) {
        let now = self.inner.clock.now();
        for index in 0..self.inner.shards.len() {
            self.inner.sweep(index, now);
        }
    }

    /// Makes fingerprints of this store's keys.
    pub(crate) fn prints(&self) -> &Fingerprinter {
        &self.inner.prints
    }

    /// Reads a receipt that this store wrote; `None` if it did not.
    pub fn open_charge(&self, text: &str) -> Option<Charge> {
        Charge::open(text, &self.inner.secrets.receipts)
    }

    /// As [`MemoryStore::open_charge`], for a slot.
    pub fn open_slot(&self, text: &str) -> Option<Slot> {
        Slot::open(text, &self.inner.secrets.receipts)
    }

    /// Forgets the state of a key; false if there was none.
    pub fn forget(&self, key: Key<'_>) -> bool {
        let print = self.inner.prints.key(key);
        let shard = &mut *self.inner.shard(print);
        let forgotten = shard.forget(print);
        self.inner.account(shard, Dropped(usize::from(forgotten)));
        forgotten
    }
}

impl Inner {
    /// The shard that a fingerprint belongs to: by its last bits, because the first say where in it.
    #[inline]
    fn shard_index(&self, print: u128) -> usize {
        let ending = usize::try_from(print & u128::from(u16::MAX)).expect("16 bits");
        ending & (self.shards.len() - 1)
    }

    #[inline]
    fn shard(&self, print: u128) -> MutexGuard<'_, Shard> {
        lock(&self.shards[self.shard_index(print)].0)
    }

    /// Carries what changed in a shard into the totals.
    #[inline]
    fn account(&self, shard: &mut Shard, dropped: Dropped) {
        if dropped.0 > 0 {
            self.keys.fetch_sub(dropped.0, Relaxed);
        }
        let bytes = std::mem::take(&mut shard.log_bytes);
        if bytes != 0 {
            self.log_bytes.fetch_add(bytes.cast_unsigned(), Relaxed);
        }
    }

    /// A number for the next admission: unique in this store, and after a restart.
    fn number(&self, print: u128, shard: &mut Shard) -> u64 {
        shard.admissions += 1;
        shard.admissions << 10 | self.shard_index(print) as u64
    }
}

impl Store for MemoryStore {
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, Reply> {
        StoreFuture::Ready(MemoryStore::decide(self, toll))
    }

    fn correct<'a>(&'a self, charge: &'a Charge, fixes: &'a [Fix]) -> StoreFuture<'a, Correction> {
        StoreFuture::Ready(MemoryStore::correct(self, charge, fixes))
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>> {
        StoreFuture::Ready(Ok(MemoryStore::release(self, slot)))
    }

    fn renew<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>> {
        StoreFuture::Ready(Ok(MemoryStore::renew(self, slot)))
    }

    fn forget<'a>(&'a self, key: Key<'a>) -> StoreFuture<'a, Result<bool, Unavailable>> {
        StoreFuture::Ready(Ok(MemoryStore::forget(self, key)))
    }

    fn seal_charge(&self, charge: &Charge) -> String {
        charge.seal(&self.inner.secrets.receipts, |key| self.inner.prints.key(key))
    }

    fn open_charge<'a>(&'a self, text: &'a str) -> StoreFuture<'a, Result<Option<Charge>, Unavailable>> {
        StoreFuture::Ready(Ok(MemoryStore::open_charge(self, text)))
    }

    fn seal_slot(&self, slot: &Slot) -> String {
        slot.seal(&self.inner.secrets.receipts, |key| self.inner.prints.key(key))
    }

    fn open_slot<'a>(&'a self, text: &'a str) -> StoreFuture<'a, Result<Option<Slot>, Unavailable>> {
        StoreFuture::Ready(Ok(MemoryStore::open_slot(self, text)))
    }
}

/// Enough shards that threads seldom meet and that no shard is long under its lock when it grows; few
/// for a small store, whose cap should mean the same for every key.
fn shards_for(max_keys: usize) -> usize {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let wanted = (16 * threads).max(max_keys / 8_192).min(1_024);
    wanted.min(max_keys / 256).max(1).next_power_of_two()
}
