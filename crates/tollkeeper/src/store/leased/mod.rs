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
    Approximation, Charge, Due, Key, KeyCorrection, LimitReply, Outcome, Reply, Retry, Secret, Slot, Time,
    Toll, siphash,
};

use crate::clock::Clock;
use crate::limiter::observer::{Observer, Permits as PermitState};
use crate::random;
use crate::store::{Correction, LeaseGrant, LeaseRequest, Store, StoreFuture, Unavailable};
use crate::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

use bound::{AskedDue, Bound, Moment, Sighting, Ticket};
use leased_key::LeasedKey;
use permits::Taken;
use request::Spawner;
pub use request::Task;
use table::{Locked, Prints, Table};

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
    /// The source of the IDs of admissions from permits: a secret, and a counter.
    ids: (Secret, AtomicU64),
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
            ids: (random::secret(), AtomicU64::new(0)),
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

/// The terms of the leases of each due; `None` if it is not leased.
type Leases = Inline<Option<Lease>, 2>;

/// A toll while it is decided, with the shards of its keys locked.
struct Deciding<'a, 't> {
    toll: &'a Toll<'a>,
    prints: Prints,
    leases: Leases,
    /// Whether no due is leased.
    is_exact: bool,
    locked: Locked<'t, Known>,
    at: Moment,
    /// Units that expired or were dropped, by due.
    expired: Vec<(usize, u64)>,
}

impl<S: Store + 'static> Inner<S> {
    fn decide(self: &Arc<Self>, toll: &Toll) -> StoreFuture<'_, Reply> {
        let (mut leases, mut prints) = (Leases::default(), Prints::default());
        for due in toll.dues() {
            leases.push(Lease::of_due(&due, toll.policy()));
            prints.push(self.table.print(due.key));
        }
        let is_exact = leases.iter().all(Option::is_none);
        if toll.is_empty() || is_exact && !self.settings.denial_bound {
            return self.store.decide(toll);
        }
        let locked = self.table.lock(&prints);
        // The clock is read under the locks: a permit is spent at this time.
        let at = self.moment();
        let mut deciding = Deciding { toll, prints, leases, is_exact, locked, at, expired: Vec::new() };
        if !toll.verb().charges() {
            let flight = Flight::start(self, &mut deciding, &[]);
            return self.ask_whole(deciding, flight);
        }
        let covered = deciding.covered();
        // 1. A due without permits that certainly is refused.
        if deciding.is_refused(&covered, self.settings.denial_bound) {
            let reply = deciding.refuse(&covered);
            self.finish(deciding);
            return StoreFuture::Ready(reply);
        }
        // 2. Permits for every due.
        if covered.iter().all(|covered| *covered) {
            let reply = deciding.admit(self.next_id());
            self.finish(deciding);
            return StoreFuture::Ready(reply);
        }
        // 3. The store decides the rest.
        let held = deciding.hold(&covered);
        let flight = Flight::start(self, &mut deciding, &covered);
        if held.is_empty() {
            return self.ask_whole(deciding, flight);
        }
        let rest: Vec<usize> = (0..toll.len()).filter(|index| !covered[*index]).collect();
        let part = Part { toll: toll.clone().into_owned(), rest: toll.part(&rest), indexes: rest, held };
        let leases = self.finish(deciding);
        match self.store.decide(&part.rest) {
            StoreFuture::Ready(reply) => StoreFuture::Ready(flight.end_part(&part, &leases, &reply)),
            later => {
                let later = later.boxed();
                StoreFuture::Later(Box::pin(async move {
                    let reply = later.await;
                    flight.end_part(&part, &leases, &reply)
                }))
            }
        }
    }

    /// Has the store decide a whole toll.
    fn ask_whole<'s>(
        self: &'s Arc<Self>,
        deciding: Deciding<'_, '_>,
        mut flight: Flight<'s, S>,
    ) -> StoreFuture<'s, Reply> {
        let (toll, is_exact) = (deciding.toll, deciding.is_exact);
        let leases = self.finish(deciding);
        let later = match self.store.decide(toll) {
            StoreFuture::Ready(reply) => return StoreFuture::Ready(flight.end_whole(toll, &leases, reply)),
            later => later.boxed(),
        };
        // Only leases need the toll again, and a copy of it is expensive.
        if is_exact {
            return StoreFuture::Later(Box::pin(async move {
                let reply = later.await;
                flight.land(&reply);
                reply
            }));
        }
        let toll = toll.clone().into_owned();
        StoreFuture::Later(Box::pin(async move {
            let reply = later.await;
            flight.end_whole(&toll, &leases, reply)
        }))
    }

    /// Unlocks the keys of a toll, and asks for permits where they run low. Returns the terms of its leases.
    fn finish(self: &Arc<Self>, mut deciding: Deciding<'_, '_>) -> Leases {
        if deciding.is_exact {
            return deciding.leases;
        }
        let mut wanted = Vec::new();
        for (index, due) in deciding.toll.dues().enumerate() {
            let Some(lease) = deciding.leases[index] else { continue };
            let (print, at) = (deciding.prints[index], deciding.at);
            wanted.extend(
                deciding
                    .locked
                    .get(print)
                    .and_then(|known| known.want(&due, &lease, at))
                    .map(|(want, generation)| (index, want, lease, generation)),
            );
        }
        let Deciding { toll, prints, leases, locked, expired, .. } = deciding;
        drop(locked);
        for (index, units) in expired {
            self.count(toll.get(index).rule.name(), PermitState::Expired, units);
        }
        for (index, want, lease, generation) in wanted {
            self.ask_for_permits(prints[index], toll.part(&[index]), want, lease, generation);
        }
        leases
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

    /// An ID that no other admission has, on any node.
    fn next_id(&self) -> u64 {
        let (secret, counter) = &self.ids;
        let hash = siphash::hash(secret, &counter.fetch_add(1, SeqCst).to_le_bytes());
        u64::try_from(hash & u128::from(u64::MAX)).expect("64 bits")
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
    /// How many units to ask the store for, and the generation of the permits; `None` if it should not be asked now.
    fn want(&mut self, due: &Due<'_>, lease: &Lease, at: Moment) -> Option<(u64, u64)> {
        let key = self.lease.as_mut()?;
        let want = key.want(lease, at.now)?;
        if self.bound.refuses(&due.with_cost(1), at) {
            return None;
        }
        key.ask();
        Some((want, key.generation))
    }

    /// The numbers of a due that permits admit, or admitted if `due` was charged.
    fn permit_outcome(&self, due: &Due<'_>, at: Moment) -> Outcome {
        let limit = due.quota.limit();
        let known = self.bound.last_outcome(due, at);
        let held = self.lease.as_ref().map_or(0, |key| key.pool.units());
        Outcome {
            allowed: true,
            limit,
            remaining: known.map_or(0, |outcome| outcome.remaining).saturating_add(held).min(limit),
            reset_after: known.and_then(|outcome| outcome.reset_after),
            next_after: known.and_then(|outcome| outcome.next_after),
            ..Outcome::default()
        }
    }
}

impl Deciding<'_, '_> {
    /// Whether the permits of each due cover it.
    fn covered(&mut self) -> Inline<bool, 4> {
        let mut covered = Inline::default();
        if self.is_exact {
            covered.resize(self.prints.len());
            return covered;
        }
        for (index, due) in self.toll.dues().enumerate() {
            covered.push(match (self.leases[index], self.locked.get(self.prints[index])) {
                (Some(lease), Some(Known { lease: Some(key), .. })) => {
                    let dropped = key.refresh(&due, &lease, self.at.now);
                    if dropped > 0 {
                        self.expired.push((index, dropped));
                    }
                    key.pool.units() >= due.cost.max(1)
                }
                _ => false,
            });
        }
        covered
    }

    /// Whether an enforced due that permits do not cover is certainly refused.
    fn is_refused(&mut self, covered: &[bool], denial_bound: bool) -> bool {
        let Deciding { toll, prints, locked, at, .. } = self;
        toll.dues().enumerate().any(|(index, due)| {
            !covered[index]
                && due.enforced()
                && locked.get(prints[index]).is_some_and(|known| {
                    denial_bound && known.bound.refuses(&due, *at) || is_scarce(known, &due, at.now)
                })
        })
    }

    /// Refuses the toll from what this node knows.
    fn refuse(&mut self, covered: &[bool]) -> Reply {
        let mut reply = Reply::new(self.at.store, 0);
        for (index, due) in self.toll.dues().enumerate() {
            let lease = self.leases[index];
            reply.push(match self.locked.get(self.prints[index]) {
                Some(known) if covered[index] => {
                    let outcome = known.permit_outcome(&due, self.at);
                    LimitReply::Approximate { by: Approximation::Permits, outcome, mark: 0 }
                }
                Some(known) => {
                    let limit = known.refusal(&due, self.at);
                    if !limit.allowed() {
                        known.demand(&due, lease, self.at.now);
                    }
                    limit
                }
                None => LimitReply::Unasked,
            });
        }
        reply
    }

    /// Admits the toll: permits cover every due, and are taken.
    fn admit(&mut self, id: u64) -> Reply {
        let mut reply = Reply::new(self.at.store, id);
        for (index, due) in self.toll.dues().enumerate() {
            let known = self.locked.entry(self.prints[index]);
            let taken = known.lease.as_mut().map(|key| key.pool.take(due.cost));
            let mark = taken.map_or(0, |taken| permits::mark(&taken));
            let outcome = known.permit_outcome(&due, self.at);
            known.demand(&due, self.leases[index], self.at.now);
            reply.push(LimitReply::Approximate { by: Approximation::Permits, outcome, mark });
        }
        reply
    }

    /// Takes the permits of the dues that they cover. They are put back if the store refuses the rest.
    fn hold(&mut self, covered: &[bool]) -> Vec<Held> {
        let mut held = Vec::new();
        for (index, due) in self.toll.dues().enumerate().filter(|(index, _)| covered[*index]) {
            let key = self.locked.get(self.prints[index]).and_then(|known| known.lease.as_mut());
            held.extend(key.map(|key| {
                let (taken, generation) = (key.pool.take(due.cost), key.generation);
                Held { index, print: self.prints[index], taken, generation }
            }));
        }
        held
    }
}

impl Known {
    /// The numbers of a due in a toll that this node refuses.
    fn refusal(&self, due: &Due<'_>, at: Moment) -> LimitReply {
        let known = self.bound.outcome(due, at);
        if let Some(outcome) = known.filter(|outcome| !outcome.allowed) {
            return LimitReply::Approximate { by: Approximation::DenialBound, outcome, mark: 0 };
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
            (None, Some(outcome)) => {
                LimitReply::Approximate { by: Approximation::DenialBound, outcome, mark: 0 }
            }
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
    print: u128,
    taken: Taken,
    generation: u64,
}

/// A toll of which permits cover a part, and the rest that is sent to the store.
struct Part {
    toll: Toll<'static>,
    rest: Toll<'static>,
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
    /// Sends the dues that permits do not cover.
    fn start(store: &'s Arc<Inner<S>>, deciding: &mut Deciding<'_, '_>, covered: &[bool]) -> Flight<'s, S> {
        let Deciding { toll, prints, locked, at, .. } = deciding;
        let charges = toll.verb().charges();
        let mut sent_dues = Inline::<SentDue, 2>::default();
        let is_covered = |index: usize| covered.get(index).copied().unwrap_or(false);
        for (index, due) in toll.dues().enumerate().filter(|(index, _)| !is_covered(*index)) {
            let print = prints[index];
            let ticket = match due.is_slot() || due.quota.count() == 0 {
                // The store shows no state for these.
                true => Ticket::default(),
                false => locked.entry(print).bound.send(if charges { due.cost } else { 0 }),
            };
            sent_dues.push(SentDue { print, ticket, asked: AskedDue::of(&due) });
        }
        Flight { store, sent_dues, sent: at.now }
    }

    /// Ends the flight of a whole toll.
    fn end_whole(&mut self, toll: &Toll, leases: &Leases, mut reply: Reply) -> Reply {
        self.land(&reply);
        if toll.verb().charges() {
            self.store.count_demand(toll, leases, &reply);
        } else {
            self.store.add_permits(toll, leases, &mut reply);
        }
        reply
    }

    /// Ends the flight of a part. The rest of the toll was covered by permits, which are put back if the part is
    /// refused.
    fn end_part(mut self, part: &Part, leases: &Leases, part_reply: &Reply) -> Reply {
        let received = self.land(part_reply);
        let Part { toll, rest, indexes, held } = part;
        let modes = rest.dues().map(|due| due.mode());
        let passes = admitted(modes.zip(part_reply.limits().iter().map(LimitReply::allowed)));
        let at = self.store.moment();
        let mut reply = Reply::new(part_reply.time(), part_reply.id());
        let limits = reply.resize(toll.len());
        for (index, limit) in indexes.iter().zip(part_reply.limits()) {
            limits[*index] = *limit;
        }
        for Held { index, print, taken, generation } in held {
            let due = toll.get(*index);
            let update = |known: &mut Known| {
                let mut expired = 0;
                if let Some(key) = known.lease.as_mut().filter(|_| !passes) {
                    expired = match key.generation == *generation {
                        true => key.pool.put_back(taken, received),
                        false => taken.iter().map(|permits| permits.units).sum(),
                    };
                }
                (known.permit_outcome(&due, at), expired)
            };
            let (outcome, expired) = self.store.table.update(*print, update).unwrap_or_else(|| {
                let outcome = Outcome { allowed: true, limit: due.quota.limit(), ..Outcome::default() };
                (outcome, if passes { 0 } else { due.cost })
            });
            self.store.count(due.rule.name(), PermitState::Expired, expired);
            let mark = permits::mark(taken);
            limits[*index] = LimitReply::Approximate { by: Approximation::Permits, outcome, mark };
        }
        self.store.count_demand(toll, leases, &reply);
        reply
    }

    /// Remembers the states that the reply shows, and returns when it was received.
    fn land(&mut self, reply: &Reply) -> Time {
        let received = self.store.clock.now();
        if reply.limits().iter().all(|limit| limit.degraded().is_none()) {
            self.store.see_clock(reply.time(), received);
        }
        let sent_dues = std::mem::take(&mut self.sent_dues);
        for (SentDue { print, ticket, asked }, limit) in sent_dues.iter().zip(reply.limits()) {
            self.store.table.update(*print, |known| {
                known.bound.land(*ticket);
                if limit.degraded().is_some() {
                    known.bound.void(received);
                } else if let Some(seen) = Sighting::of(*asked, limit, reply.time(), self.sent, received) {
                    known.bound.see(seen);
                }
            });
        }
        received
    }
}

impl<S: Store + 'static> Inner<S> {
    /// Counts an admitted toll as demand for all its keys, a refused one for the keys that refused it. Then asks for
    /// permits where they run low.
    fn count_demand(self: &Arc<Self>, toll: &Toll, leases: &Leases, reply: &Reply) {
        if leases.iter().all(Option::is_none) {
            return;
        }
        let modes = toll.dues().map(|due| due.mode());
        let passes = admitted(modes.zip(reply.limits().iter().map(LimitReply::allowed)));
        let at = self.moment();
        for (index, (due, limit)) in toll.dues().zip(reply.limits()).enumerate() {
            let Some(lease) = leases[index].filter(|_| passes || !limit.allowed()) else { continue };
            let print = self.table.print(due.key);
            let wanted = self.table.update(print, |known| {
                known.demand(&due, Some(lease), at.now);
                known.want(&due, &lease, at)
            });
            if let Some((want, generation)) = wanted.flatten() {
                self.ask_for_permits(print, toll.part(&[index]), want, lease, generation);
            }
        }
    }

    /// Adds this node's permits to what a peek shows.
    fn add_permits(&self, toll: &Toll, leases: &Leases, reply: &mut Reply) {
        let (now, time) = (self.clock.now(), reply.time());
        for (index, due) in toll.dues().enumerate() {
            let Some(lease) = leases[index] else { continue };
            let held = self.table.update(self.table.print(due.key), |known| {
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
        after(self.0.store.correct(charge, corrections), void)
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
        after(inner.store.forget(key), void)
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

/// Drops `void` when the answer is there, or when the caller stops waiting for it.
fn after<'a, T: Unpin + Send + 'a>(answer: StoreFuture<'a, T>, void: impl Send + 'a) -> StoreFuture<'a, T> {
    match answer {
        StoreFuture::Later(later) => StoreFuture::Later(Box::pin(async move {
            let _void = void;
            later.await
        })),
        ready => ready,
    }
}

#[cfg(test)]
mod lease_tests;
#[cfg(test)]
mod tests;
