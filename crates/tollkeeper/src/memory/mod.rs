//! The memory store: every state in this process, with nothing to install.
//!
//! States live in shards, each under one short lock; a toll that touches several locks them in order,
//! so all of it is decided in one step. A key is held as a fingerprint. The number of keys has a hard
//! cap, and still no state is ever lost: only what is as good as fresh is dropped, and when nothing is,
//! new keys share cells. No thread of its own is needed for anything but snapshots.

mod keeper;
mod shard;
mod snapshot;
mod state;
mod table;

use std::sync::{Arc, OnceLock};

use tollkeeper_core::algorithm::{self, Effect, State, Step, meter};
use tollkeeper_core::charge::{Item, ItemKey};
use tollkeeper_core::fingerprint::{self, Fingerprinter, Midstate};
use tollkeeper_core::inline::Inline;
use tollkeeper_core::{
    Algorithm, Change, Charge, Due, Fix, Key, Outcome, Ruling, Said, Secret, Slot, Time, Toll,
};

use crate::clock::Clock;
use crate::random;
use crate::store::{Answer, Correction, Store};
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use crate::sync::{Mutex, MutexGuard, lock};

pub use keeper::{Restored, Snapshots};
pub use snapshot::SnapshotError;

use keeper::Keeper;
use shard::{Dropped, Lens, Shard, Spot};
use state::Packed;
use table::Place;

/// How much the store may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// The most keys that have a state of their own.
    pub max_keys: usize,
    /// The most bytes in sliding logs.
    pub max_log_bytes: usize,
}

impl Default for Capacity {
    fn default() -> Capacity {
        Capacity { max_keys: 1_000_000, max_log_bytes: 256 << 20 }
    }
}

/// The most cells that the overflow keys of one limit share.
const CELLS: usize = 65_536;
/// The same for states that take much room.
const WIDE_CELLS: usize = 1_024;

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
    reclaim: Mutex<Reclaim>,
    saving: Mutex<()>,
    keeper: OnceLock<Keeper>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper.get() {
            keeper.stop(self);
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

/// Who looks for room next, and when.
#[derive(Debug, Default)]
struct Reclaim {
    shard: usize,
    not_before: Time,
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
                reclaim: Mutex::new(Reclaim::default()),
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

    /// Bytes held by sliding logs.
    pub fn log_bytes(&self) -> usize {
        self.inner.log_bytes.load(Relaxed)
    }

    /// Drops every state that is as good as fresh, and gives memory back. Never needed for a right
    /// answer: for a process that was busy once and wants to be small again.
    pub fn sweep(&self) {
        let now = self.inner.clock.now();
        for index in 0..self.inner.shards.len() {
            self.inner.sweep(index, now);
        }
    }

    /// Decides a toll: all of it or nothing, in one step.
    pub fn decide(&self, toll: &Toll) -> Ruling {
        let mut ruling = Ruling::default();
        self.decide_into(toll, &mut ruling);
        ruling
    }

    /// As [`MemoryStore::decide`], in place.
    pub(crate) fn decide_into(&self, toll: &Toll, ruling: &mut Ruling) {
        let inner = &*self.inner;
        let now = inner.clock.now();
        let charging = toll.verb().charges();
        if toll.is_empty() {
            return ruling.set(now, 0);
        }
        if toll.len() == 1 {
            let due = toll.get(0);
            let id = inner.decide_one(&due, inner.prints.key(due.key), charging, now, ruling.say());
            return ruling.set(now, id);
        }
        if charging {
            inner.make_room(now);
        }
        let mut prints = Inline::<u128, 4>::default();
        toll.dues().for_each(|due| prints.push(inner.prints.key(due.key)));
        let mut locked = inner.lock(&prints);

        let mut spots = Inline::<Spot, 4>::default();
        for (due, print) in toll.dues().zip(prints.iter()) {
            spots.push(inner.look(locked.get(*print), &due, *print, charging));
        }
        // A log may have been moved into a cell that was looked at before.
        for (spot, print) in spots.iter_mut().zip(prints.iter()) {
            if let Spot::Shared(cell, state) = spot {
                *state = locked.get(*print).cells.get(*cell);
            }
        }
        // Keys that share one cell are one entry there: the first of them pays for all.
        let payer = |index: usize| match spots[index] {
            Spot::Shared(cell, _) => {
                let same = |spot: &Spot| matches!(spot, Spot::Shared(other, _) if *other == cell);
                spots[..index].iter().position(same).unwrap_or(index)
            }
            _ => index,
        };
        let due = |index: usize| {
            let others = (index + 1..spots.len()).filter(|other| payer(*other) == index);
            let cost = others.map(|other| toll.get(other).cost).sum::<u64>();
            let due = toll.get(index);
            due.with_cost(due.cost + cost)
        };

        let mut steps = Inline::<Step, 4>::default();
        for (index, spot) in spots.iter().enumerate() {
            steps.push(match payer(index) {
                payer if payer != index => steps[payer],
                _ => {
                    let due = due(index);
                    due.step(locked.get(prints[index]).seen(*spot, Lens::of(&due)), now)
                }
            });
        }
        let admitted = toll.dues().zip(steps.iter()).all(|(due, step)| step.allowed || !due.enforced());
        let charged = |index: usize| charging && admitted && steps[index].allowed && toll.get(index).cost > 0;

        let id = if charging { inner.number(prints[0], locked.get(prints[0])) } else { 0 };
        ruling.set(now, id);
        for (index, spot) in spots.iter().enumerate() {
            let (step, charged) = (steps[index], charged(index));
            ruling.push(says(locked.get(prints[index]), *spot, &due(payer(index)), now, step, charged));
        }
        // Known keys first: once they are written they are not as good as fresh any more, and making a
        // place for a new one does not drop them.
        for new in [false, true] {
            let is_new = |spot: &Spot| matches!(spot, Spot::New(..));
            for (index, spot) in spots.iter().enumerate().filter(|(_, spot)| is_new(spot) == new) {
                let (step, charged) = (&steps[index], charged(index));
                let written = charging && payer(index) == index && (charged || step.effect.moved());
                if written {
                    let shard = locked.get(prints[index]);
                    let dropped = shard.enter(*spot, &due(index), step, charged, now, id);
                    inner.account(shard, dropped);
                } else if charging {
                    inner.release(*spot);
                }
            }
        }
    }

    /// Decides one limit for one key, and says when.
    #[inline]
    pub(crate) fn decide_one(&self, due: &Due<'_>, print: u128, charging: bool, said: &mut Said) -> Time {
        let now = self.inner.clock.now();
        self.inner.decide_one(due, print, charging, now, said);
        now
    }

    /// Makes fingerprints of this store's keys.
    pub(crate) fn prints(&self) -> &Fingerprinter {
        &self.inner.prints
    }

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
        if !inner.reserve_markers(items.len(), now) {
            return Correction::Repeated;
        }
        let mut locked = inner.lock(&prints);
        let marker = |index: usize| inner.marker(prints[index], charge.id());
        let done = (0..items.len()).any(|index| {
            let marked = locked.get(prints[index]).markers.get(marker(index));
            marked.is_some_and(|marker| marker.expires() > now)
        });
        if done {
            inner.markers.fetch_sub(items.len(), Relaxed);
            return Correction::Repeated;
        }
        for (index, (item, fix)) in items.iter().enumerate() {
            let print = prints[index];
            let shard = locked.get(print);
            shard.mark(marker(index), charge.void_at());
            let spot = match shard.table.find(print) {
                Place::Found(place) => Spot::Own(print, place),
                Place::Vacant(_) => {
                    let cell = inner.cell(key_family(item), item.quota.algorithm(), print);
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
        self.slots(slot, |slots, now| algorithm::concurrency::release(slots, now.as_micros(), slot.id()))
    }

    /// Counts the life of a slot from now; false if it was not held any more.
    pub fn renew(&self, slot: &Slot) -> bool {
        self.slots(slot, |slots, now| algorithm::concurrency::renew(slots, now.as_micros(), slot.id()))
    }

    /// Forgets the state of a key; false if there was none.
    pub fn forget(&self, key: Key<'_>) -> bool {
        let print = self.inner.prints.key(key);
        let shard = &mut *self.inner.shard(print);
        let forgotten = shard.forget(print);
        self.inner.account(shard, Dropped(usize::from(forgotten)));
        forgotten
    }

    /// Does something to the slots of every limit that a slot is held in: in the key's own state, and
    /// in the cell it may have been taken in before the key had one.
    fn slots(
        &self,
        slot: &Slot,
        change: impl Fn(&mut Vec<algorithm::concurrency::Slot>, Time) -> bool,
    ) -> bool {
        let inner = &*self.inner;
        let now = inner.clock.now();
        let mut held = false;
        for item in slot.items() {
            let print = inner.print(item);
            let shard = &mut *inner.shard(print);
            let lens = Lens { quota: &item.quota, shift: item.shift };
            let cell = inner.cell(key_family(item), item.quota.algorithm(), print);
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
    /// Decides a toll over one limit; returns the number of the admission. What is said is written where
    /// it will stay: to copy what has only just been written makes the processor wait.
    #[inline]
    fn decide_one(&self, due: &Due<'_>, print: u128, charging: bool, now: Time, said: &mut Said) -> u64 {
        // A token bucket that is known is the commonest case, and has a way of its own to the same end.
        if due.quota.algorithm() == Algorithm::TokenBucket && due.cost > 0 {
            let shard = &mut *self.shard(print);
            if let Some(packed) = shard.table.get_mut(print) {
                let tick = due.quota.tick().number(now);
                let step = meter::step(due.quota, Some(packed.as_meter(due.quota)), tick, due.cost);
                let charged = charging && step.allowed;
                if charged || charging && step.moved {
                    *packed = Packed::meter(due.quota, step.after);
                }
                *said =
                    Said::Step { step: Step { allowed: step.allowed, effect: Effect::Meter(step) }, charged };
                return if charging { self.number(print, shard) } else { 0 };
            }
        }
        self.decide_any(due, print, charging, now, said)
    }

    fn decide_any(&self, due: &Due<'_>, print: u128, charging: bool, now: Time, said: &mut Said) -> u64 {
        if charging {
            self.make_room(now);
        }
        let shard = &mut *self.shard(print);
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

    /// The shard that a fingerprint belongs to: by its last bits, because the first say where in it.
    #[expect(clippy::cast_possible_truncation, reason = "only the last bits count")]
    fn shard_index(&self, print: u128) -> usize {
        print as usize & (self.shards.len() - 1)
    }

    #[inline]
    fn shard(&self, print: u128) -> MutexGuard<'_, Shard> {
        lock(&self.shards[self.shard_index(print)].0)
    }

    /// Locks every shard that these fingerprints belong to, in order, each once.
    #[inline]
    fn lock(&self, prints: &[u128]) -> Locked<'_> {
        let mut wanted = Inline::<usize, 8>::default();
        prints.iter().for_each(|print| wanted.push(self.shard_index(*print)));
        wanted.sort_unstable();
        let mut locked = Locked { few: [const { None }; 8], many: Vec::new(), mask: self.shards.len() - 1 };
        let mut last = None;
        let mut used = 0;
        for index in wanted.iter().copied() {
            if last.replace(index) == Some(index) {
                continue;
            }
            let guard = (index, lock(&self.shards[index].0));
            match locked.few.get_mut(used) {
                Some(place) => *place = Some(guard),
                None => locked.many.push(guard),
            }
            used += 1;
        }
        locked
    }

    /// Finds the state of a due, or a place for it.
    #[inline]
    fn look(&self, shard: &mut Shard, due: &Due<'_>, print: u128, charging: bool) -> Spot {
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

    /// The fingerprint of the cell that a key shares when there is no room. It ends as the key's own
    /// does, so both are in one shard.
    fn cell(&self, family: &[u8], algorithm: Algorithm, print: u128) -> u128 {
        let most = match algorithm {
            Algorithm::SlidingLog | Algorithm::Concurrency => WIDE_CELLS,
            _ => CELLS,
        };
        let cells = 1 << most.min(self.capacity.max_keys).ilog2();
        let number: u128 = print & (cells - 1);
        let name = self.prints.value(self.prints.family(family), Some(&number.to_le_bytes()));
        (fingerprint::finish(name) & !(CELLS as u128 - 1) | number).max(1)
    }

    /// The fingerprint of a marker. It ends as the key's own does, so both are in one shard, and a
    /// snapshot finds it there again.
    fn marker(&self, print: u128, id: u64) -> u128 {
        let start: Midstate = self.prints.family(b"corrected");
        let name = self.prints.value(start, Some(&print.to_le_bytes()));
        let name = self.prints.value(name, Some(&id.to_le_bytes()));
        let ending = CELLS as u128 - 1;
        (fingerprint::finish(name) & !ending | print & ending).max(1)
    }

    fn print(&self, item: &Item) -> u128 {
        match &item.key {
            ItemKey::Whole(key) => self.prints.key(Key::from_bytes(key).expect("an item holds a key")),
            ItemKey::Short(_, print) => *print,
        }
    }

    #[inline]
    fn has_room(&self) -> bool {
        self.keys.load(Relaxed) < self.capacity.max_keys
    }

    /// Takes room for one more key, if there is any.
    #[inline]
    fn reserve(&self) -> bool {
        let more = |keys| (keys < self.capacity.max_keys).then_some(keys + 1);
        self.keys.fetch_update(Relaxed, Relaxed, more).is_ok()
    }

    /// Gives room back that was not used after all.
    #[inline]
    fn release(&self, spot: Spot) {
        if let Spot::New(..) = spot {
            self.keys.fetch_sub(1, Relaxed);
        }
    }

    fn has_log_room(&self, bytes: usize) -> bool {
        self.log_bytes.load(Relaxed).saturating_add(bytes) <= self.capacity.max_log_bytes
    }

    /// Takes room for markers, if there is any.
    fn reserve_markers(&self, count: usize, now: Time) -> bool {
        let most = (self.capacity.max_keys / 16).max(1);
        let more = |markers| (markers + count <= most).then_some(markers + count);
        if self.markers.fetch_update(Relaxed, Relaxed, more).is_ok() {
            return true;
        }
        for shard in &self.shards {
            let gone = lock(&shard.0).sweep_markers(now);
            self.markers.fetch_sub(gone, Relaxed);
        }
        self.markers.fetch_update(Relaxed, Relaxed, more).is_ok()
    }

    /// When the store is full, drops states that are as good as fresh, one shard at a time until one
    /// gave something. A search that finds little is not repeated for a millisecond: meanwhile new
    /// keys share.
    #[inline]
    fn make_room(&self, now: Time) {
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
        reclaim.not_before = now + tollkeeper_core::Span::from_micros(PAUSE);
    }

    /// Sweeps one shard; returns how many keys went and how many stayed.
    fn sweep(&self, index: usize, now: Time) -> (usize, usize) {
        let shard = &mut *lock(&self.shards[index].0);
        let dropped = shard.sweep(now);
        self.account(shard, dropped);
        (dropped.0, shard.table.len())
    }
}

/// The shards of one toll, locked.
struct Locked<'s> {
    few: [Option<(usize, MutexGuard<'s, Shard>)>; 8],
    many: Vec<(usize, MutexGuard<'s, Shard>)>,
    mask: usize,
}

impl Locked<'_> {
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "only the last bits count")]
    fn get(&mut self, print: u128) -> &mut Shard {
        let index = print as usize & self.mask;
        let few = self.few.iter_mut().map_while(Option::as_mut);
        let shard = few.chain(&mut self.many).find(|(locked, _)| *locked == index);
        &mut shard.expect("the shards of all fingerprints were locked").1
    }
}

impl Store for MemoryStore {
    fn decide(&self, toll: &Toll) -> Answer<'_, Ruling> {
        Answer::Ready(MemoryStore::decide(self, toll))
    }

    fn correct<'a>(&'a self, charge: &'a Charge, fixes: &'a [Fix]) -> Answer<'a, Correction> {
        Answer::Ready(MemoryStore::correct(self, charge, fixes))
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> Answer<'a, bool> {
        Answer::Ready(MemoryStore::release(self, slot))
    }

    fn renew<'a>(&'a self, slot: &'a Slot) -> Answer<'a, bool> {
        Answer::Ready(MemoryStore::renew(self, slot))
    }

    fn forget<'a>(&'a self, key: Key<'a>) -> Answer<'a, bool> {
        Answer::Ready(MemoryStore::forget(self, key))
    }

    fn seal_charge(&self, charge: &Charge) -> String {
        charge.seal(&self.inner.secrets.receipts, |key| self.inner.prints.key(key))
    }

    fn open_charge(&self, text: &str) -> Option<Charge> {
        Charge::open(text, &self.inner.secrets.receipts)
    }

    fn seal_slot(&self, slot: &Slot) -> String {
        slot.seal(&self.inner.secrets.receipts, |key| self.inner.prints.key(key))
    }

    fn open_slot(&self, text: &str) -> Option<Slot> {
        Slot::open(text, &self.inner.secrets.receipts)
    }
}

/// What a limit says, before anything is written. Logs, slots and shared cells hold more than the step
/// tells: their numbers are computed while they can be seen.
#[inline]
fn says(shard: &mut Shard, spot: Spot, due: &Due<'_>, now: Time, step: Step, charged: bool) -> Said {
    let overflow = matches!(spot, Spot::Shared(..));
    if !overflow && !matches!(step.effect, Effect::SlidingLog(_) | Effect::Concurrency(_)) {
        return Said::Step { step, charged };
    }
    let outcome = due.outcome(shard.seen(spot, Lens::of(due)), now, &step, charged);
    Said::Outcome { outcome: Outcome { overflow, ..outcome }, mark: step.effect.mark() }
}

fn key_family(item: &Item) -> &[u8] {
    match &item.key {
        ItemKey::Whole(key) => Key::from_bytes(key).expect("an item holds a key").family(),
        ItemKey::Short(family, _) => family,
    }
}

/// What a due would add to a log.
fn log_bytes(due: &Due<'_>) -> usize {
    usize::try_from(due.cost.min(due.quota.count()))
        .unwrap_or(usize::MAX)
        .saturating_mul(algorithm::sliding_log::STAMP)
}

/// Enough shards that threads seldom meet and that no shard is long under its lock when it grows; few
/// for a small store, whose cap should mean the same for every key.
fn shards_for(max_keys: usize) -> usize {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let wanted = (16 * threads).max(max_keys / 65_536).min(1_024);
    wanted.min(max_keys / 256).max(1).next_power_of_two()
}
