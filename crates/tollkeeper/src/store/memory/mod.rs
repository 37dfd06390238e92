//! The memory store: keeps all states in this process.
//!
//! States are in shards, each behind one lock that is held briefly. A toll that touches several shards locks them in
//! order, so it is decided atomically. Keys are stored as fingerprints. The number of keys has a hard cap, but no state
//! is lost: only states that equal a fresh one are dropped, and if all are in use, new keys share cells. Only snapshots
//! need a background thread.

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
use tollkeeper_core::{Charge, Key, KeyCorrection, Reply, Secret, Slot, Toll};

use crate::clock::Clock;
use crate::random;
use crate::store::{Correction, Store, StoreFuture, Unavailable};
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use crate::sync::{Mutex, MutexGuard, lock};

pub use autosave::{Restored, SnapshotStatus, Snapshots};
pub use snapshot::SnapshotError;

use autosave::Autosave;
use shard::{Dropped, Shard};

/// Overrides that are saved with the counts.
pub(crate) trait SavedOverrides: std::fmt::Debug + Send + Sync {
    /// All of them.
    fn to_bytes(&self) -> Vec<u8>;
}

/// Overrides that were read from a snapshot, until a limiter takes them.
impl SavedOverrides for Vec<u8> {
    fn to_bytes(&self) -> Vec<u8> {
        self.clone()
    }
}

/// How much the store may contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// The most keys that have a state of their own, and the most corrections of charges that are remembered.
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
    /// The shard that is searched next when the key's own has no free space for logs or markers.
    next_reclaim: AtomicUsize,
    saving: Mutex<()>,
    /// The overrides of the limiter, which are saved with the counts.
    overrides: Mutex<Option<Arc<dyn SavedOverrides>>>,
    autosave: OnceLock<Autosave>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(autosave) = self.autosave.get() {
            // In a destructor there is no caller to return an error to; the status counts it.
            let _ = autosave.stop(self);
        }
    }
}

/// A shard on cache lines of its own, to avoid false sharing between locks.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Padded(Mutex<Shard>);

/// The keys of this store's fingerprints and receipts, which no other store has.
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

    /// Saves what `overrides` returns with every snapshot: the overrides of a limiter.
    pub(crate) fn save_overrides(&self, overrides: Arc<dyn SavedOverrides>) {
        *lock(&self.inner.overrides) = Some(overrides);
    }

    /// The overrides that were saved, if there are any.
    pub(crate) fn overrides(&self) -> Option<Vec<u8>> {
        lock(&self.inner.overrides).as_ref().map(|saved| saved.to_bytes()).filter(|bytes| !bytes.is_empty())
    }

    /// The bounds of this store.
    pub fn capacity(&self) -> Capacity {
        self.inner.capacity
    }

    fn with_secrets(capacity: Capacity, clock: Clock, secrets: Secrets) -> MemoryStore {
        let shards = shards_for(capacity.max_keys);
        // Admission IDs start at the current time, so that none is reused after a restart.
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
                overrides: Mutex::new(None),
                autosave: OnceLock::new(),
            }),
        }
    }

    /// The clock that decisions use.
    pub fn clock(&self) -> &Clock {
        &self.inner.clock
    }

    /// How many keys have a state of their own.
    pub fn keys(&self) -> usize {
        self.inner.keys.load(Relaxed)
    }

    /// How often a key had to share a cell, because the store was full.
    pub fn overflows(&self) -> u64 {
        self.inner.overflows.load(Relaxed)
    }

    /// How often a correction was refused ([`Correction::Full`]), because there was no space for its marker.
    pub fn corrections_refused(&self) -> u64 {
        self.inner.corrections_refused.load(Relaxed)
    }

    /// Bytes that sliding logs take.
    pub fn log_bytes(&self) -> usize {
        self.inner.log_bytes.load(Relaxed)
    }

    /// Bytes allocated for all keys, used or not. Locks every shard in turn.
    pub fn bytes(&self) -> usize {
        let shards: usize = self.inner.shards.iter().map(|shard| lock(&shard.0).bytes()).sum();
        shards + self.log_bytes()
    }

    /// Drops every state that equals a fresh one, and frees its memory. Decisions never need this: it is for a process
    /// that was busy once and should become small again.
    pub fn sweep(&self) {
        let now = self.inner.clock.now();
        for index in 0..self.inner.shards.len() {
            self.inner.sweep(index, now);
        }
    }

    /// Opens a receipt; `None` if this store did not write it.
    pub fn open_charge(&self, text: &str) -> Option<Charge> {
        Charge::open(text, &self.inner.secrets.receipts)
    }

    /// Like [`MemoryStore::open_charge`], for a slot.
    pub fn open_slot(&self, text: &str) -> Option<Slot> {
        Slot::open(text, &self.inner.secrets.receipts)
    }

    /// Deletes the state of a key; false if there was none.
    pub fn forget(&self, key: Key<'_>) -> bool {
        let print = self.inner.prints.key(key);
        let shard = &mut *self.inner.shard(print);
        let forgotten = shard.forget(print);
        self.inner.account(shard, Dropped(usize::from(forgotten)));
        forgotten
    }
}

impl Inner {
    /// The shard of a fingerprint: its lowest bits, because the highest give the position in the shard's table.
    #[inline]
    fn shard_index(&self, print: u128) -> usize {
        let ending = usize::try_from(print & u128::from(u16::MAX)).expect("16 bits");
        ending & (self.shards.len() - 1)
    }

    #[inline]
    fn shard(&self, print: u128) -> MutexGuard<'_, Shard> {
        lock(&self.shards[self.shard_index(print)].0)
    }

    /// Adds the changes in a shard to the totals of the store.
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

    /// The ID of the next admission: unique in this store, even after a restart.
    fn number(&self, print: u128, shard: &mut Shard) -> u64 {
        shard.admissions += 1;
        shard.admissions << 10 | self.shard_index(print) as u64
    }
}

impl Store for MemoryStore {
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, Reply> {
        StoreFuture::Ready(MemoryStore::decide(self, toll))
    }

    fn correct<'a>(
        &'a self,
        charge: &'a Charge,
        corrections: &'a [KeyCorrection],
    ) -> StoreFuture<'a, Correction> {
        StoreFuture::Ready(MemoryStore::correct(self, charge, corrections))
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

/// The number of shards: enough that threads rarely contend and that growing one shard does not hold its lock for
/// long, but few for a small store, where uneven shards would make some keys overflow before others.
fn shards_for(max_keys: usize) -> usize {
    let most = max_keys / 256;
    if most <= 1 {
        return 1;
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let wanted = (16 * threads).max(max_keys / 8_192).min(1_024);
    wanted.min(most).next_power_of_two()
}
