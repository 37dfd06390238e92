//! Answers for a remote store without asking it, where the answer is certain.
//!
//! For each key that is busy on this node it keeps the last state that the store showed, the [denial bound](bound): a
//! request that this state refuses is refused without a round trip. The bound only ever refuses, so no limit is
//! exceeded.

mod bound;
mod table;

use std::sync::Arc;

use tollkeeper_core::charge::ItemKey;
use tollkeeper_core::{Approximation, Charge, Due, Fix, Key, LimitReply, Reply, Slot, Time, Toll};

use crate::clock::Clock;
use crate::store::{Correction, Store, StoreFuture, Unavailable};
use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};

use bound::{Bound, Moment, Sighting, Ticket};
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
    table: Table<Bound>,
    /// States that were seen by tolls sent before this time (µs) are no longer valid, whatever their key.
    valid_from: AtomicU64,
}

impl<S> Clone for Leased<S> {
    fn clone(&self) -> Leased<S> {
        Leased(Arc::clone(&self.0))
    }
}

impl<S: Store> Leased<S> {
    /// Answers for this store where possible. `clock` is this node's.
    pub fn new(store: S, settings: LeasedSettings, clock: Clock) -> Leased<S> {
        let inner = Inner { store, settings, clock, table: Table::new(), valid_from: AtomicU64::new(0) };
        Leased(Arc::new(inner))
    }

    /// The store behind it.
    pub fn inner(&self) -> &S {
        &self.0.store
    }
}

impl<S: Store> Inner<S> {
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, Reply> {
        if toll.is_empty() || !self.settings.denial_bound {
            return self.store.decide(toll);
        }
        let mut prints = Prints::default();
        toll.dues().for_each(|due| prints.push(self.table.print(due.key)));
        let mut locked = self.table.lock(&prints);
        let at = self.moment();
        if toll.verb().charges() && is_refused(toll, &prints, &mut locked, at) {
            return StoreFuture::Ready(refuse(toll, &prints, &mut locked, at));
        }
        let flight = Flight::start(self, toll, prints, &mut locked, at.now);
        drop(locked);
        match self.store.decide(toll) {
            StoreFuture::Ready(reply) => {
                flight.end(toll, &reply);
                StoreFuture::Ready(reply)
            }
            later => {
                let toll = toll.clone().into_owned();
                StoreFuture::Later(Box::pin(async move {
                    let reply = later.await;
                    flight.end(&toll, &reply);
                    reply
                }))
            }
        }
    }

    fn moment(&self) -> Moment {
        let valid_from = Time::from_micros(self.valid_from.load(SeqCst));
        Moment { now: self.clock.now(), valid_from }
    }

    /// Forgets what is known of the keys of these items.
    fn void(&self, charge: &Charge) {
        let now = self.clock.now();
        for item in charge.items() {
            match item.key {
                ItemKey::Whole(_) => {
                    self.table.update(self.table.print(item.key()), |bound| bound.void(now));
                }
                // The receipt does not hold all of the key, so it may be any.
                ItemKey::Short(..) => {
                    self.valid_from.fetch_max(now.as_micros(), SeqCst);
                }
            }
        }
    }
}

/// Whether the bound of an enforced limit refuses the toll.
fn is_refused(toll: &Toll, prints: &[u128], locked: &mut Locked<'_, Bound>, at: Moment) -> bool {
    toll.dues()
        .zip(prints)
        .any(|(due, print)| due.enforced() && locked.get(*print).is_some_and(|bound| bound.refuses(&due, at)))
}

/// Refuses a toll from what this node knows.
fn refuse(toll: &Toll, prints: &[u128], locked: &mut Locked<'_, Bound>, at: Moment) -> Reply {
    let mut reply = Reply::default();
    let mut latest = Time::default();
    for (due, print) in toll.dues().zip(prints) {
        reply.push(match locked.get(*print).and_then(|bound| bound.outcome(&due, at)) {
            Some((time, outcome)) => {
                latest = latest.max(time);
                LimitReply::Approximate { by: Approximation::DenialBound, outcome, mark: 0 }
            }
            None => LimitReply::Unasked,
        });
    }
    reply.set(latest, 0);
    reply
}

/// A toll on its way to the store. If it is dropped, its caller is gone, and whether it was charged is not known.
struct Flight<'s, S: Store> {
    store: &'s Inner<S>,
    prints: Prints,
    tickets: Vec<Ticket>,
    sent: Time,
}

impl<'s, S: Store> Flight<'s, S> {
    fn start(
        store: &'s Inner<S>,
        toll: &Toll,
        prints: Prints,
        locked: &mut Locked<'_, Bound>,
        now: Time,
    ) -> Flight<'s, S> {
        let charges = toll.verb().charges();
        let mut send = |(due, print): (Due<'_>, &u128)| match due.is_slot() || due.quota.count() == 0 {
            // The store shows no state for these.
            true => Ticket::default(),
            false => locked.entry(*print).send(if charges { due.cost } else { 0 }, now),
        };
        let tickets = toll.dues().zip(&*prints).map(&mut send).collect();
        Flight { store, prints, tickets, sent: now }
    }

    /// Remembers the states that the reply shows.
    fn end(mut self, toll: &Toll, reply: &Reply) {
        let received = self.store.clock.now();
        let tickets = std::mem::take(&mut self.tickets);
        for (((due, limit), print), ticket) in toll.dues().zip(reply.limits()).zip(&*self.prints).zip(tickets)
        {
            self.store.table.update(*print, |bound| {
                bound.land(ticket);
                if limit.degraded().is_some() {
                    bound.void(received);
                } else if let Some(seen) = Sighting::of(&due, limit, reply.time(), self.sent, received) {
                    bound.see(seen);
                }
            });
        }
    }
}

impl<S: Store> Drop for Flight<'_, S> {
    fn drop(&mut self) {
        for (print, ticket) in self.prints.iter().zip(&self.tickets) {
            self.store.table.update(*print, |bound| bound.land(*ticket));
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

    fn correct<'a>(&'a self, charge: &'a Charge, fixes: &'a [Fix]) -> StoreFuture<'a, Correction> {
        let void = VoidOnDrop(move || self.0.void(charge));
        after(self.0.store.correct(charge, fixes), void)
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
            inner.table.update(inner.table.print(key), |bound| bound.void(inner.clock.now()));
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
mod tests;
