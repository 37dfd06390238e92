//! Answers for a remote store without asking it, where the answer is certain.
//!
//! For each key that is busy on this node it holds two things. The [denial bound](bound) is the last state that the
//! store showed: a request that this state refuses is refused without a round trip. [Permits](permits) are units that
//! the store granted in advance, for limits with `consistency: leased`: a request that they cover is admitted without a
//! round trip. Both are safe by construction: the bound only ever refuses, and permits were charged when they were
//! granted. Forgetting a key costs a round trip or some unspent permits, and nothing else.
//!
//! `docs/adr/0021-leases.md` has the reasons, and what was tried.

mod bound;
mod heat;
mod ids;
mod index;
mod leased_key;
mod permits;
mod request;
mod table;

use std::sync::{Arc, OnceLock};

use tollkeeper_core::charge::ItemKey;
use tollkeeper_core::decision::admitted;
use tollkeeper_core::inline::Inline;
use tollkeeper_core::lease::Lease;
use tollkeeper_core::{
    Approximation, Charge, Due, Key, KeyCorrection, LimitReply, Outcome, Reply, Retry, Slot, Time, Toll,
};

use crate::clock::Clock;
use crate::limiter::observer::{Observer, Permits as PermitState};
use crate::store::{Correction, LeaseGrant, LeaseRequest, Store, StoreFuture, Unavailable};
use crate::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

use bound::{AskedDue, Bound, Moment, Sighting, Ticket};
use ids::Ids;
use leased_key::LeasedKey;
use permits::Taken;
use request::Spawner;
pub use request::Task;
use table::{Locked, Table};

/// What a node may answer without asking the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeasedSettings {
    /// Whether to refuse requests that the last state of a key refuses.
    pub denial_bound: bool,
}

impl Default for LeasedSettings {
    fn default() -> LeasedSettings {
        LeasedSettings { denial_bound: true }
    }
}

/// A [`Store`] in front of another one, which is asked only when needed. Cheap to clone: all clones are one store.
#[derive(Debug)]
pub struct Leased<S>(Arc<Inner<S>>);

#[derive(Debug)]
struct Inner<S> {
    store: S,
    settings: LeasedSettings,
    /// This node's clock. It must not be set while the process runs.
    clock: Clock,
    table: Table<Known>,
    /// States that were seen by tolls sent before this time (µs) are no longer valid, whatever their key.
    valid_from: AtomicU64,
    /// How far the store's clock is ahead of this node's (µs), as the last answer showed it.
    ahead: AtomicI64,
    ids: Ids,
    spawner: Spawner,
    observer: OnceLock<Arc<dyn Observer>>,
}

/// What this node knows of a key.
#[derive(Debug, Default)]
struct Known {
    bound: Bound,
    lease: Option<Box<LeasedKey>>,
}

impl<S> Clone for Leased<S> {
    fn clone(&self) -> Leased<S> {
        Leased(Arc::clone(&self.0))
    }
}

impl<S: Store> Leased<S> {
    /// Answers for this store where possible. `clock` is this node's.
    pub fn new(store: S, settings: LeasedSettings, clock: Clock) -> Leased<S> {
        Leased::with_spawner(store, settings, clock, Spawner::default())
    }

    /// As [`Leased::new`], with a function that runs tasks in the background.
    pub fn spawning(
        store: S,
        settings: LeasedSettings,
        clock: Clock,
        spawn: impl Fn(Task) + Send + Sync + 'static,
    ) -> Leased<S> {
        Leased::with_spawner(store, settings, clock, Spawner::new(spawn))
    }

    fn with_spawner(store: S, settings: LeasedSettings, clock: Clock, spawner: Spawner) -> Leased<S> {
        Leased(Arc::new(Inner {
            store,
            settings,
            clock,
            table: Table::new(),
            valid_from: AtomicU64::new(0),
            ahead: AtomicI64::new(0),
            ids: Ids::new(),
            spawner,
            observer: OnceLock::new(),
        }))
    }

    /// The store behind it.
    pub fn inner(&self) -> &S {
        &self.0.store
    }

    /// Reports permits from now on to `observer`; false if an observer is already set.
    pub fn observe(&self, observer: Arc<dyn Observer>) -> bool {
        self.0.observer.set(observer).is_ok()
    }
}

/// A toll while it is decided, with the shards of its keys locked.
struct Deciding<'a, 't> {
    toll: &'a Toll,
    dues: &'t mut DecidingDues<'a>,
    locked: Locked<'t, Known>,
    at: Moment,
    /// Whether no due is leased.
    is_exact: bool,
    /// How many dues permits cover.
    covered: usize,
    /// Units that expired or were dropped, by due.
    expired: Vec<(usize, u64)>,
    /// Units to ask the store for.
    wanted: Vec<Wanted>,
}

/// The dues of a toll while it is decided, in its order. All are `Some`: a list with room inside needs a default.
type DecidingDues<'a> = Inline<Option<DecidingDue<'a>>, 2>;

#[derive(Clone, Copy, Debug)]
struct DecidingDue<'a> {
    due: Due<'a>,
    key: DueKey,
    /// Whether permits cover it.
    is_covered: bool,
    /// Whether the bound refuses it.
    is_bounded: bool,
}

/// The key of a due.
#[derive(Clone, Copy, Debug, Default)]
struct DueKey {
    print: u128,
    /// The terms of its leases; `None` if it is not leased.
    lease: Option<Lease>,
}

/// The keys of the dues of a toll, in its order.
type DueKeys = Inline<DueKey, 2>;

/// Units to ask the store for.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    /// The index of the due.
    index: usize,
    units: u64,
    generation: u64,
}

impl<S: Store + 'static> Inner<S> {
    fn decide(self: &Arc<Self>, toll: &Toll) -> StoreFuture<'_, Reply> {
        let mut dues = DecidingDues::default();
        let mut is_exact = true;
        for due in toll.dues() {
            let key = DueKey { print: self.table.print(due.key), lease: Lease::of_due(&due, toll.policy()) };
            is_exact &= key.lease.is_none();
            dues.push(Some(DecidingDue { due, key, is_covered: false, is_bounded: false }));
        }
        if toll.is_empty() || is_exact && !self.settings.denial_bound {
            return self.store.decide(toll);
        }
        let locked = self.table.lock(dues.iter().flatten().map(|due| due.key.print));
        // The clock is read under the locks: a permit is spent at this time.
        let at = self.moment();
        let mut deciding = Deciding {
            toll,
            dues: &mut dues,
            locked,
            at,
            is_exact,
            covered: 0,
            expired: Vec::new(),
            wanted: Vec::new(),
        };
        if !toll.verb().charges() {
            return self.ask_whole(&mut deciding);
        }
        // 1. A due without permits that certainly is refused.
        if deciding.is_refused(self.settings.denial_bound) {
            let mut reply = Reply::new(at.store, 0);
            deciding.refuse(&mut reply);
            self.finish(&mut deciding);
            return StoreFuture::Ready(reply);
        }
        // 2. Permits for every due.
        if deciding.covered == toll.len() {
            let mut reply = Reply::new(at.store, self.ids.id(deciding.locked.next_number()));
            deciding.admit(&mut reply);
            self.finish(&mut deciding);
            return StoreFuture::Ready(reply);
        }
        // 3. The store decides the rest.
        if deciding.covered > 0 {
            return self.ask_part(&mut deciding);
        }
        self.ask_whole(&mut deciding)
    }

    /// Has the store decide a whole toll.
    fn ask_whole<'s>(self: &'s Arc<Self>, deciding: &mut Deciding<'_, '_>) -> StoreFuture<'s, Reply> {
        let mut flight = Flight::start(self, deciding);
        self.finish(deciding);
        let toll = deciding.toll;
        // Only leases need the toll again, and a copy of it is expensive.
        if deciding.is_exact {
            return self.store.decide_then(toll, move |reply| {
                flight.land(reply);
            });
        }
        let (keys, owned) = (deciding.keys(), Box::new(toll.clone()));
        self.store.decide_then(toll, move |reply| flight.end_whole(&owned, &keys, reply))
    }

    /// Takes the permits of the dues that they cover, and has the store decide the others.
    fn ask_part<'s>(self: &'s Arc<Self>, deciding: &mut Deciding<'_, '_>) -> StoreFuture<'s, Reply> {
        let held = deciding.hold();
        let flight = Flight::start(self, deciding);
        self.finish(deciding);
        let (toll, keys) = (deciding.toll, deciding.keys());
        let uncovered = deciding.dues().enumerate().filter(|(_, due)| !due.is_covered);
        let indexes: Vec<usize> = uncovered.map(|(index, _)| index).collect();
        let rest = toll.part(&indexes);
        let part = Box::new(Part { toll: toll.clone(), indexes, held });
        self.store.decide_then(&rest, move |reply| flight.end_part(&part, &keys, reply))
    }

    /// Unlocks the keys of a toll, and asks for permits where they run low.
    #[inline]
    fn finish(self: &Arc<Self>, deciding: &mut Deciding<'_, '_>) {
        deciding.locked.unlock();
        for (index, units) in &deciding.expired {
            self.count(deciding.toll.get(*index).rule.name(), PermitState::Expired, *units);
        }
        for wanted in &deciding.wanted {
            self.ask_for_permits(deciding.toll, &deciding.keys(), *wanted);
        }
    }

    fn moment(&self) -> Moment {
        let now = self.clock.now();
        let valid_from = Time::from_micros(self.valid_from.load(SeqCst));
        let store = Time::from_micros(now.as_micros().saturating_add_signed(self.ahead.load(Relaxed)));
        Moment { now, valid_from, store }
    }

    /// The store's clock showed `time` when this node's showed `now`, or shortly before.
    fn see_clock(&self, time: Time, now: Time) {
        let ahead = i128::from(time.as_micros()) - i128::from(now.as_micros());
        self.ahead.store(i64::try_from(ahead).unwrap_or(0), Relaxed);
    }

    /// Counts units of a limit.
    fn count(&self, limit: &str, state: PermitState, units: u64) {
        if let Some(observer) = self.observer.get().filter(|_| units > 0) {
            observer.permits(limit, state, units);
        }
    }

    /// Forgets the states of the keys of a charge, because they were changed otherwise than by tolls.
    fn void(&self, charge: &Charge) {
        let now = self.clock.now();
        for item in charge.items() {
            match item.key {
                ItemKey::Whole(_) => {
                    self.table.update(self.table.print(item.key()), |known| known.bound.void(now));
                }
                // The receipt does not hold all of the key, so it may be any.
                ItemKey::Short(..) => {
                    self.valid_from.fetch_max(now.as_micros(), SeqCst);
                }
            }
        }
    }
}

impl Known {
    /// The units to ask the store for; `None` if it should not be asked now. `index` is that of the due.
    fn want(&mut self, index: usize, due: &Due<'_>, lease: Option<Lease>, at: Moment) -> Option<Wanted> {
        let key = self.lease.as_mut()?;
        let units = key.want(&lease?, at.now)?;
        if self.bound.refuses(&due.with_cost(1), at) {
            return None;
        }
        key.ask();
        Some(Wanted { index, units, generation: key.generation })
    }

    /// The reply for a due that permits admit, or admitted if `due` was charged.
    #[inline]
    fn permit_reply(&self, due: &Due<'_>, at: Moment, mark: u64) -> LimitReply {
        let held = self.lease.as_ref().map_or(0, |key| key.pool.units());
        let by = Approximation::Permits;
        if let Some((state, now)) = self.bound.last_state(due, at) {
            return LimitReply::Seen { by, allowed: true, state, now, held, mark };
        }
        let limit = due.quota.limit();
        let outcome = Outcome { allowed: true, limit, remaining: held.min(limit), ..Outcome::default() };
        LimitReply::Approximate { by, outcome, mark }
    }
}

impl<'a> Deciding<'a, '_> {
    fn dues(&self) -> impl Iterator<Item = &DecidingDue<'a>> {
        self.dues.iter().flatten()
    }

    fn keys(&self) -> DueKeys {
        let mut keys = DueKeys::default();
        self.dues().for_each(|due| keys.push(due.key));
        keys
    }

    /// Whether an enforced due is certainly refused. Notes which dues the permits cover: those are not.
    fn is_refused(&mut self, denial_bound: bool) -> bool {
        let at = self.at;
        let mut is_refused = false;
        for (index, deciding) in self.dues.iter_mut().flatten().enumerate() {
            let DecidingDue { due, key, is_covered, is_bounded } = deciding;
            let Some(known) = self.locked.get(key.print) else { continue };
            if let (Some(lease), Some(leased)) = (&key.lease, &mut known.lease) {
                let dropped = leased.refresh(due, lease, at.now);
                if dropped > 0 {
                    self.expired.push((index, dropped));
                }
                *is_covered = leased.pool.units() >= due.cost.max(1);
                self.covered += usize::from(*is_covered);
            }
            if !*is_covered && due.enforced() {
                *is_bounded = denial_bound && known.bound.refuses(due, at);
                is_refused |= *is_bounded || is_scarce(known, due, at.now);
            }
        }
        is_refused
    }

    /// Refuses the toll from what this node knows.
    fn refuse(&mut self, reply: &mut Reply) {
        let at = self.at;
        for (index, deciding) in self.dues.iter().flatten().enumerate() {
            let DecidingDue { due, key, .. } = deciding;
            let Some(known) = self.locked.get(key.print) else {
                reply.push(LimitReply::Unasked);
                continue;
            };
            let limit = match deciding.is_covered {
                true => known.permit_reply(due, at, 0),
                false => known.refusal(due, at, deciding.is_bounded),
            };
            if !limit.allowed() {
                known.demand(due, key.lease, at.now);
            }
            reply.push(limit);
            self.wanted.extend(known.want(index, due, key.lease, at));
        }
    }

    /// Admits the toll: permits cover every due, and are spent.
    fn admit(&mut self, reply: &mut Reply) {
        let at = self.at;
        for (index, DecidingDue { due, key, .. }) in self.dues.iter().flatten().enumerate() {
            let known = self.locked.entry(key.print);
            let mark = known.lease.as_mut().map_or(0, |leased| leased.pool.spend(due.cost));
            reply.push(known.permit_reply(due, at, mark));
            known.demand(due, key.lease, at.now);
            self.wanted.extend(known.want(index, due, key.lease, at));
        }
    }

    /// Takes the permits of the dues that they cover. They are put back if the store refuses the rest.
    fn hold(&mut self) -> Vec<Held> {
        let mut held = Vec::new();
        let covered = self.dues.iter().flatten().enumerate().filter(|(_, due)| due.is_covered);
        for (index, DecidingDue { due, key, .. }) in covered {
            let leased = self.locked.get(key.print).and_then(|known| known.lease.as_mut());
            held.extend(leased.map(|leased| {
                let (taken, generation) = (leased.pool.take(due.cost), leased.generation);
                Held { index, taken, generation }
            }));
        }
        held
    }
}

impl Known {
    /// The reply for a due in a toll that this node refuses. `is_bounded` if the bound is known to refuse it.
    fn refusal(&self, due: &Due<'_>, at: Moment, is_bounded: bool) -> LimitReply {
        let by = Approximation::DenialBound;
        if is_bounded && let Some((state, now)) = self.bound.last_state(due, at) {
            return LimitReply::Seen { by, allowed: false, state, now, held: 0, mark: 0 };
        }
        let known = self.bound.outcome(due, at);
        if let Some(outcome) = known.filter(|outcome| !outcome.allowed) {
            return LimitReply::Approximate { by, outcome, mark: 0 };
        }
        let scarce_until = self.lease.as_ref().and_then(|key| key.scarce_until(at.now));
        match (scarce_until, known) {
            (Some(until), known) => {
                let known = known.unwrap_or(Outcome { limit: due.quota.limit(), ..Outcome::default() });
                // Permits are scarce: another request may pass when the store is asked again.
                let retry = Some(Retry::After(until.since(at.now)));
                let outcome = Outcome { allowed: false, remaining: 0, retry, ..known };
                LimitReply::Approximate { by: Approximation::Permits, outcome, mark: 0 }
            }
            (None, Some(outcome)) => LimitReply::Approximate { by, outcome, mark: 0 },
            (None, None) => LimitReply::Unasked,
        }
    }

    /// Counts a request that was admitted, or that this key refused.
    fn demand(&mut self, due: &Due<'_>, lease: Option<Lease>, now: Time) {
        let Some(lease) = lease.filter(|_| due.cost <= due.quota.limit()) else { return };
        let key = self.lease.get_or_insert_with(|| Box::new(LeasedKey::new(due.quota, &lease)));
        key.used(due.cost, &lease, now);
    }
}

/// Whether permits are so scarce that a due without permits is refused.
fn is_scarce(known: &Known, due: &Due<'_>, now: Time) -> bool {
    due.cost > 0 && known.lease.as_ref().is_some_and(|key| key.scarce_until(now).is_some())
}

/// Permits that a toll took while the store decides the rest of it.
#[derive(Debug)]
struct Held {
    /// The index of the due.
    index: usize,
    taken: Taken,
    generation: u64,
}

/// A toll of which permits cover a part, while the store decides the rest of it.
struct Part {
    toll: Toll,
    /// The index of each due of the rest in the toll.
    indexes: Vec<usize>,
    held: Vec<Held>,
}

/// Dues on their way to the store. If this is dropped, the caller is gone, and whether they were charged is not known.
struct Flight<'s, S: Store + 'static> {
    store: &'s Arc<Inner<S>>,
    sent_dues: Inline<SentDue, 2>,
    sent: Time,
}

/// What is needed of a due when the store has answered.
#[derive(Clone, Copy, Debug, Default)]
struct SentDue {
    print: u128,
    ticket: Ticket,
    asked: AskedDue,
}

impl<'s, S: Store + 'static> Flight<'s, S> {
    /// Sends the dues that permits do not cover, and notes where permits run low.
    fn start(store: &'s Arc<Inner<S>>, deciding: &mut Deciding<'_, '_>) -> Flight<'s, S> {
        let Deciding { toll, dues, locked, at, is_exact, wanted, .. } = deciding;
        let charges = toll.verb().charges();
        let mut sent_dues = Inline::<SentDue, 2>::default();
        for DecidingDue { due, key, .. } in dues.iter().flatten().filter(|due| !due.is_covered) {
            let ticket = match due.is_slot() || due.quota.count() == 0 {
                // The store shows no state for these.
                true => Ticket::default(),
                false => locked.entry(key.print).bound.send(if charges { due.cost } else { 0 }),
            };
            sent_dues.push(SentDue { print: key.print, ticket, asked: AskedDue::of(due) });
        }
        if !*is_exact {
            let leased = dues.iter().flatten().enumerate().filter(|(_, due)| due.key.lease.is_some());
            for (index, DecidingDue { due, key, .. }) in leased {
                let known = locked.get(key.print);
                wanted.extend(known.and_then(|known| known.want(index, due, key.lease, *at)));
            }
        }
        Flight { store, sent_dues, sent: at.now }
    }

    /// Ends the flight of a whole toll.
    fn end_whole(mut self, toll: &Toll, keys: &DueKeys, reply: &mut Reply) {
        self.land(reply);
        if toll.verb().charges() {
            self.store.count_demand(toll, keys, reply);
        } else {
            self.store.add_permits(toll, keys, reply);
        }
    }

    /// Ends the flight of a part: makes its reply one for the whole toll. The other dues were covered by permits, which
    /// are put back if the part is refused.
    fn end_part(mut self, part: &Part, keys: &DueKeys, reply: &mut Reply) {
        let received = self.land(reply);
        let Part { toll, indexes, held } = part;
        let modes = indexes.iter().map(|index| toll.get(*index).mode());
        let passes = admitted(modes.zip(reply.limits().iter().map(LimitReply::allowed)));
        let at = self.store.moment();
        let whole = Reply::new(reply.time(), reply.id());
        let part_reply = std::mem::replace(reply, whole);
        let limits = reply.resize(toll.len());
        for (index, limit) in indexes.iter().zip(part_reply.limits()) {
            limits[*index] = *limit;
        }
        for Held { index, taken, generation } in held {
            let (due, mark) = (toll.get(*index), permits::mark(taken));
            let update = |known: &mut Known| {
                let mut expired = 0;
                if let Some(key) = known.lease.as_mut().filter(|_| !passes) {
                    expired = match key.generation == *generation {
                        true => key.pool.put_back(taken, received),
                        false => taken.iter().map(|permits| permits.units).sum(),
                    };
                }
                (known.permit_reply(&due, at, mark), expired)
            };
            let (limit, expired) = self.store.table.update(keys[*index].print, update).unwrap_or_else(|| {
                (Known::default().permit_reply(&due, at, mark), if passes { 0 } else { due.cost })
            });
            self.store.count(due.rule.name(), PermitState::Expired, expired);
            limits[*index] = limit;
        }
        self.store.count_demand(toll, keys, reply);
    }

    /// Remembers the states that the reply shows, and returns when it was received.
    fn land(&mut self, reply: &Reply) -> Time {
        let Flight { store, sent_dues, sent } = self;
        let received = store.clock.now();
        if reply.limits().iter().all(|limit| limit.degraded().is_none()) {
            store.see_clock(reply.time(), received);
        }
        for (SentDue { print, ticket, asked }, limit) in sent_dues.iter().zip(reply.limits()) {
            store.table.update(*print, |known| {
                known.bound.land(*ticket);
                if limit.degraded().is_some() {
                    known.bound.void(received);
                } else if let Some(seen) = Sighting::of(*asked, limit, reply.time(), *sent, received) {
                    known.bound.see(seen);
                }
            });
        }
        sent_dues.truncate(0);
        received
    }
}

impl<S: Store + 'static> Inner<S> {
    /// Counts an admitted toll as demand for all its keys, a refused one for the keys that refused it. Then asks for
    /// permits where they run low.
    fn count_demand(self: &Arc<Self>, toll: &Toll, keys: &DueKeys, reply: &Reply) {
        if keys.iter().all(|key| key.lease.is_none()) {
            return;
        }
        let modes = toll.dues().map(|due| due.mode());
        let passes = admitted(modes.zip(reply.limits().iter().map(LimitReply::allowed)));
        let at = self.moment();
        for (index, (due, limit)) in toll.dues().zip(reply.limits()).enumerate() {
            let Some(lease) = keys[index].lease.filter(|_| passes || !limit.allowed()) else { continue };
            let wanted = self.table.update(keys[index].print, |known| {
                known.demand(&due, Some(lease), at.now);
                known.want(index, &due, Some(lease), at)
            });
            if let Some(wanted) = wanted.flatten() {
                self.ask_for_permits(toll, keys, wanted);
            }
        }
    }

    /// Adds this node's permits to what a peek shows.
    fn add_permits(&self, toll: &Toll, keys: &DueKeys, reply: &mut Reply) {
        let (now, time) = (self.clock.now(), reply.time());
        for (index, due) in toll.dues().enumerate() {
            let Some(lease) = keys[index].lease else { continue };
            let held = self.table.update(keys[index].print, |known| {
                let Known { lease: Some(key), .. } = known else { return 0 };
                key.refresh(&due, &lease, now);
                key.pool.units()
            });
            let limit = &mut reply.resize(toll.len())[index];
            if let Some(held) = held.filter(|held| *held > 0 && limit.degraded().is_none()) {
                let outcome = limit.outcome_at(&due, time);
                let allowed = outcome.allowed || held >= due.cost;
                let outcome = Outcome {
                    allowed,
                    remaining: outcome.remaining.saturating_add(held).min(outcome.limit),
                    retry: outcome.retry.filter(|_| !allowed),
                    ..outcome
                };
                *limit = LimitReply::Approximate { by: Approximation::Permits, outcome, mark: 0 };
            }
        }
    }
}

impl<S: Store + 'static> Drop for Flight<'_, S> {
    fn drop(&mut self) {
        for SentDue { print, ticket, .. } in &*self.sent_dues {
            self.store.table.update(*print, |known| known.bound.land(*ticket));
        }
    }
}

/// Forgets what is known of a key when it is dropped, so also if the caller does not wait for the store.
struct VoidOnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for VoidOnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

impl<S: Store + 'static> Store for Leased<S> {
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, Reply> {
        self.0.decide(toll)
    }

    fn lease(&self, request: &LeaseRequest) -> StoreFuture<'_, Option<LeaseGrant>> {
        self.0.store.lease(request)
    }

    fn correct<'a>(
        &'a self,
        charge: &'a Charge,
        corrections: &'a [KeyCorrection],
    ) -> StoreFuture<'a, Correction> {
        let void = VoidOnDrop(move || self.0.void(charge));
        self.0.store.correct(charge, corrections).then(move |_| drop(void))
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>> {
        self.0.store.release(slot)
    }

    fn renew<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>> {
        self.0.store.renew(slot)
    }

    fn forget<'a>(&'a self, key: Key<'a>) -> StoreFuture<'a, Result<bool, Unavailable>> {
        let inner = &*self.0;
        let void = VoidOnDrop(move || {
            let now = inner.clock.now();
            let dropped = inner.table.update(inner.table.print(key), |known| {
                known.bound.void(now);
                known.lease.as_mut().map_or(0, |key| key.drop_permits())
            });
            inner.count(key.limit(), PermitState::Expired, dropped.unwrap_or(0));
        });
        inner.store.forget(key).then(move |_| drop(void))
    }

    fn seal_charge(&self, charge: &Charge) -> String {
        self.0.store.seal_charge(charge)
    }

    fn open_charge<'a>(&'a self, text: &'a str) -> StoreFuture<'a, Result<Option<Charge>, Unavailable>> {
        self.0.store.open_charge(text)
    }

    fn seal_slot(&self, slot: &Slot) -> String {
        self.0.store.seal_slot(slot)
    }

    fn open_slot<'a>(&'a self, text: &'a str) -> StoreFuture<'a, Result<Option<Slot>, Unavailable>> {
        self.0.store.open_slot(text)
    }
}

#[cfg(test)]
mod lease_tests;
#[cfg(test)]
mod tests;
