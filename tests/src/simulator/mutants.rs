//! Typical mistakes, made on purpose around the shipped types: the simulator must notice each of them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tollkeeper::store::{
    Key, KeyCorrection, LeaseGrant, LeaseRequest, LimitReply, Remote, RemoteResult, Reply, Resilient,
    ResilientSettings, Store, StoreFuture, Toll,
};
use tollkeeper::{Charge, Correction, Outcome, Slot, Time, Unavailable};
use tollkeeper_core::algorithm::State;

use super::client::Client;
use super::executor::lock;
use super::node::{Environment, exact, local};
use super::server::{Server, Simulated};

/// A store that makes one mistake.
#[derive(Debug)]
pub struct Mistaken {
    store: Simulated,
    mistake: Mistake,
}

/// A mistake of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// A refused request is charged by the limits that would have allowed it.
    RefusalCharges,
    /// A charge can be refunded again.
    RefundTwice,
    /// A state is dropped a millisecond before it equals a fresh one.
    EarlyExpiry,
    /// A level above the capacity, as after a lowered burst, is read as a full bucket.
    ClampedLevel,
    /// Limits are charged one by one, until one refuses.
    PartialCharge,
}

impl Mistaken {
    /// A store that makes this mistake.
    pub fn new(mistake: Mistake) -> Mistaken {
        Mistaken { store: Simulated::new(0), mistake }
    }
}

impl Server for Mistaken {
    fn decide(&mut self, toll: &Toll, now: Time, id: u64) -> Reply {
        if self.mistake == Mistake::ClampedLevel {
            for due in toll.dues() {
                self.store.live.change(&due.key.to_bytes(), |state| {
                    if let State::Meter(meter) = state {
                        meter.level = meter.level.min(due.quota.capacity());
                    }
                });
            }
        }
        let reply = self.store.decide(toll, now, id);
        let refused =
            toll.dues().zip(reply.limits()).position(|(due, reply)| due.enforced() && !reply.allowed());
        let Some(refused) = refused else { return reply };
        for index in 0..toll.len() {
            let charged = match self.mistake {
                Mistake::RefusalCharges => reply.limits()[index].allowed(),
                Mistake::PartialCharge => index < refused,
                _ => false,
            };
            if charged {
                self.store.decide(&toll.part(&[index]), now, id);
            }
        }
        reply
    }

    fn lease(&mut self, request: &LeaseRequest, now: Time) -> LeaseGrant {
        self.store.lease(request, now)
    }

    fn correct(&mut self, charge: &Charge, corrections: &[KeyCorrection], now: Time) -> Correction {
        if self.mistake == Mistake::RefundTwice {
            self.store.live.forget_corrections();
        }
        self.store.correct(charge, corrections, now)
    }

    fn handle(&mut self, slot: &Slot, renew: bool, now: Time) -> bool {
        self.store.handle(slot, renew, now)
    }

    fn forget(&mut self, key: &[u8]) -> bool {
        self.store.forget(key)
    }

    fn expire(&mut self, now: Time) -> u64 {
        let early = if self.mistake == Mistake::EarlyExpiry { 1_000 } else { 0 };
        self.store.expire(Time::from_micros(now.as_micros() + early))
    }

    fn flush(&mut self) {
        self.store.flush();
    }

    fn copy(&mut self) {
        self.store.copy();
    }

    fn failover(&mut self) {
        self.store.failover();
    }
}

/// Every node takes the whole quota as its share.
pub fn undivided_share(environment: Environment) -> Arc<dyn Store> {
    let settings = ResilientSettings { nodes: 1, ..environment.settings };
    exact(Environment { settings, ..environment })
}

/// A node waits for twice the deadline.
pub fn late_answers(environment: Environment) -> Arc<dyn Store> {
    let deadline =
        Duration::from_micros(2 * u64::try_from(environment.settings.deadline.as_micros()).expect("small"));
    let settings = ResilientSettings { deadline, ..environment.settings };
    exact(Environment { settings, ..environment })
}

/// A toll without an answer is sent again.
pub fn resent_toll(environment: Environment) -> Arc<dyn Store> {
    let Environment { client, clock, settings, .. } = environment;
    Arc::new(Resilient::new(Wrapped(client, Wrong::Resends), settings, local(clock)))
}

/// A toll that failed counts as admitted by the store.
pub fn failure_admits(environment: Environment) -> Arc<dyn Store> {
    let Environment { client, clock, settings, .. } = environment;
    Arc::new(Resilient::new(Wrapped(client, Wrong::Admits), settings, local(clock)))
}

/// The local share is new whenever the store fails.
pub fn forgotten_share(environment: Environment) -> Arc<dyn Store> {
    let Environment { client, clock, settings, .. } = environment;
    let fresh = move || Resilient::new(client.clone(), settings, local(clock.clone()));
    Arc::new(Renewed { current: Mutex::new(Arc::new(fresh())), fresh: Box::new(fresh) })
}

/// A client with a mistake.
#[derive(Debug)]
struct Wrapped(Client, Wrong);

#[derive(Clone, Copy, Debug)]
enum Wrong {
    Resends,
    Admits,
}

impl Remote for Wrapped {
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, RemoteResult<Reply>> {
        let (first, toll) = (self.0.decide(toll), toll.clone());
        StoreFuture::Later(Box::pin(async move {
            match (first.await, self.1) {
                (Err(_), Wrong::Resends) => self.0.decide(&toll).await,
                (Err(_), Wrong::Admits) => {
                    let mut reply = Reply::new(Time::default(), 1);
                    for due in toll.dues() {
                        let limit = due.quota.limit();
                        let outcome =
                            Outcome { allowed: true, limit, remaining: limit, ..Outcome::default() };
                        reply.push(LimitReply::Outcome { outcome, mark: 0 });
                    }
                    Ok(reply)
                }
                (answer, _) => answer,
            }
        }))
    }

    fn correct<'a>(
        &'a self,
        charge: &'a Charge,
        corrections: &'a [KeyCorrection],
    ) -> StoreFuture<'a, RemoteResult<Correction>> {
        self.0.correct(charge, corrections)
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>> {
        self.0.release(slot)
    }

    fn renew<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>> {
        self.0.renew(slot)
    }

    fn forget<'a>(&'a self, key: Key<'a>) -> StoreFuture<'a, RemoteResult<bool>> {
        self.0.forget(key)
    }

    fn seal_charge(&self, charge: &Charge) -> Option<String> {
        self.0.seal_charge(charge)
    }

    fn open_charge<'a>(&'a self, text: &'a str) -> StoreFuture<'a, RemoteResult<Option<Charge>>> {
        self.0.open_charge(text)
    }

    fn seal_slot(&self, slot: &Slot) -> Option<String> {
        self.0.seal_slot(slot)
    }

    fn open_slot<'a>(&'a self, text: &'a str) -> StoreFuture<'a, RemoteResult<Option<Slot>>> {
        self.0.open_slot(text)
    }
}

/// A resilient store that is replaced by a new one after every degraded decision.
struct Renewed {
    current: Mutex<Arc<Resilient<Client>>>,
    fresh: Box<dyn Fn() -> Resilient<Client> + Send + Sync>,
}

impl std::fmt::Debug for Renewed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Renewed")
    }
}

impl Renewed {
    fn current(&self) -> Arc<Resilient<Client>> {
        Arc::clone(&lock(&self.current))
    }
}

impl Store for Renewed {
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, Reply> {
        let (current, toll) = (self.current(), toll.clone());
        StoreFuture::Later(Box::pin(async move {
            let reply = current.decide(&toll).await;
            if reply.limits().iter().any(|limit| limit.degraded().is_some()) {
                *lock(&self.current) = Arc::new((self.fresh)());
            }
            reply
        }))
    }

    fn correct<'a>(
        &'a self,
        charge: &'a Charge,
        corrections: &'a [KeyCorrection],
    ) -> StoreFuture<'a, Correction> {
        let current = self.current();
        StoreFuture::Later(Box::pin(async move { current.correct(charge, corrections).await }))
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>> {
        let current = self.current();
        StoreFuture::Later(Box::pin(async move { current.release(slot).await }))
    }

    fn renew<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>> {
        let current = self.current();
        StoreFuture::Later(Box::pin(async move { current.renew(slot).await }))
    }

    fn forget<'a>(&'a self, key: Key<'a>) -> StoreFuture<'a, Result<bool, Unavailable>> {
        let current = self.current();
        StoreFuture::Later(Box::pin(async move { current.forget(key).await }))
    }

    fn seal_charge(&self, charge: &Charge) -> String {
        self.current().seal_charge(charge)
    }

    fn open_charge<'a>(&'a self, text: &'a str) -> StoreFuture<'a, Result<Option<Charge>, Unavailable>> {
        let current = self.current();
        StoreFuture::Later(Box::pin(async move { current.open_charge(text).await }))
    }

    fn seal_slot(&self, slot: &Slot) -> String {
        self.current().seal_slot(slot)
    }

    fn open_slot<'a>(&'a self, text: &'a str) -> StoreFuture<'a, Result<Option<Slot>, Unavailable>> {
        let current = self.current();
        StoreFuture::Later(Box::pin(async move { current.open_slot(text).await }))
    }
}
