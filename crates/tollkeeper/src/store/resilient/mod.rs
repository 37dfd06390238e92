//! A store that always answers, around one that may not.
//!
//! Each call has a deadline. A breaker stops asking a store that fails, so that nobody waits for it, and
//! lets one request try again after a pause. What the store does not answer, the failure policy of each
//! limit does: see [`OnStoreFailure`](crate::OnStoreFailure). A decision says which limits were decided so.

mod breaker;
mod cross_slot;
mod fallback;

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tollkeeper_core::{Charge, Fix, Key, Reply, Slot, Time, Toll};

use crate::background;
use crate::clock::Clock;
use crate::limiter::observer::{Observer, Op};
use crate::log_throttle::LogThrottle;
use crate::random;
use crate::store::memory::MemoryStore;
use crate::store::remote::{Failure, FailureKind, Remote, RemoteResult, Server, Split};
use crate::store::{Correction, Store, StoreFuture, Unavailable};
use crate::sync::{Mutex, lock};

pub use breaker::{BreakerSettings, BreakerState};

use breaker::{Breaker, Pass};
use cross_slot::Refused;
use fallback::Fallback;

/// How long to wait for a store, and what to do without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResilientSettings {
    /// How long a call may take.
    pub deadline: Duration,
    /// When to stop asking.
    pub breaker: BreakerSettings,
    /// How many processes share the store: `local` grants each its part.
    pub nodes: u32,
}

impl Default for ResilientSettings {
    fn default() -> ResilientSettings {
        ResilientSettings {
            deadline: Duration::from_millis(10),
            breaker: BreakerSettings::default(),
            nodes: 1,
        }
    }
}

/// A [`Store`] that always answers, around a [`Remote`] that may not.
#[derive(Debug)]
pub struct Resilient<R>(Arc<Inner<R>>);

#[derive(Debug)]
struct Inner<R> {
    remote: R,
    deadline: Duration,
    clock: Clock,
    breaker: BreakerSettings,
    /// One for each server: that one does not answer says nothing of the others.
    breakers: Mutex<HashMap<Server, Breaker>>,
    fallback: Fallback,
    local: MemoryStore,
    refused: Refused,
    failures: Failures,
    observer: OnceLock<Arc<dyn Observer>>,
}

/// Servers come and go. Of more than these, those that answer are forgotten.
const SERVERS: usize = 256;

/// How often the store failed, by kind, and what was said of it.
#[derive(Debug, Default)]
struct Failures {
    counts: [AtomicU64; FailureKind::ALL.len()],
    failed: LogThrottle,
    opened: LogThrottle,
    closed: LogThrottle,
}

impl<R: Remote> Resilient<R> {
    /// Wraps a store; `local` decides in its place, and lives as long as this does.
    pub fn new(remote: R, settings: ResilientSettings, local: MemoryStore) -> Resilient<R> {
        let pause = settings.breaker.cooldown;
        Resilient(Arc::new(Inner {
            remote,
            deadline: settings.deadline,
            clock: local.clock().clone(),
            breaker: settings.breaker,
            breakers: Mutex::default(),
            fallback: Fallback::new(local.clone(), settings.nodes, pause),
            local,
            refused: Refused::default(),
            failures: Failures::default(),
            observer: OnceLock::new(),
        }))
    }

    /// The store inside.
    pub fn remote(&self) -> &R {
        &self.0.remote
    }

    /// The store that decides in its place.
    pub fn local(&self) -> &MemoryStore {
        &self.0.local
    }

    /// Has every call from now on told to `observer`; false if there is one already.
    pub fn observe(&self, observer: Arc<dyn Observer>) -> bool {
        self.0.observer.set(observer).is_ok()
    }

    /// Whether the store is being asked: of several servers, the one that fares worst.
    pub fn breaker(&self) -> BreakerState {
        let breakers = lock(&self.0.breakers);
        let severity = |state: &BreakerState| match state {
            BreakerState::Closed => 0,
            BreakerState::HalfOpen => 1,
            BreakerState::Open => 2,
        };
        breakers.values().map(Breaker::state).max_by_key(severity).unwrap_or(BreakerState::Closed)
    }

    /// How often the store failed like this.
    pub fn failures(&self, kind: FailureKind) -> u64 {
        self.0.failures.counts[kind as usize].load(Relaxed)
    }
}

impl<R: Remote> Inner<R> {
    /// Asks, if the breaker of that server lets it, and for no longer than the deadline. Nothing if it must not be
    /// asked. Without a server, there is none to be spared.
    fn ask<'a, T: Unpin + Send + 'a>(
        &'a self,
        what: Op,
        server: Option<Server>,
        call: impl FnOnce(&'a R) -> StoreFuture<'a, RemoteResult<T>>,
    ) -> Option<impl Future<Output = RemoteResult<T>> + Send + 'a> {
        let began = self.clock.now();
        if server.as_ref().is_some_and(|server| !self.may_ask(server, began)) {
            return None;
        }
        let answer = call(&self.remote);
        Some(self.await_answer(what, server, began, answer))
    }

    /// Waits for no longer than the deadline, and notes how the server fares.
    async fn await_answer<T: Unpin>(
        &self,
        what: Op,
        server: Option<Server>,
        began: Time,
        answer: StoreFuture<'_, RemoteResult<T>>,
    ) -> RemoteResult<T> {
        let asked = match answer {
            StoreFuture::Ready(asked) => asked,
            later => within_deadline(self.deadline, later).await,
        };
        if let Some(observer) = self.observer.get() {
            observer.asked(what, self.clock.now().since(began));
        }
        match &asked {
            Ok(_) => self.answered(server.as_ref()),
            Err(failure) => self.failed(server.as_ref(), began, failure),
        }
        asked
    }

    fn may_ask(&self, server: &Server, now: Time) -> bool {
        self.breaker_of(server, |breaker| {
            // One that has come back meanwhile is asked at once.
            breaker.pass(now) != Pass::Stay
                || breaker.has_come(self.remote.arrivals(server), now) && breaker.pass(now) != Pass::Stay
        })
    }

    fn breaker_of<T>(&self, server: &Server, with: impl FnOnce(&mut Breaker) -> T) -> T {
        let mut breakers = lock(&self.breakers);
        if let Some(breaker) = breakers.get_mut(server) {
            return with(breaker);
        }
        if breakers.len() >= SERVERS {
            breakers.retain(|_, breaker| breaker.state() != BreakerState::Closed);
        }
        with(breakers.entry(server.clone()).or_insert_with(|| Breaker::new(self.breaker)))
    }

    fn answered(&self, server: Option<&Server>) {
        let Some(server) = server else { return };
        if self.breaker_of(server, Breaker::answered) {
            self.failures.closed.write(self.clock.now(), |more| {
                tracing::info!("{server} answers again ({more} more since the last such line)");
            });
        }
    }

    fn failed(&self, server: Option<&Server>, began: Time, failure: &Failure) {
        self.failures.counts[failure.kind as usize].fetch_add(1, Relaxed);
        let now = self.clock.now();
        let jitter = random::secret().0[0];
        let opened = server.filter(|server| {
            self.breaker_of(server, |breaker| {
                let opened = breaker.failed(began, now, jitter);
                if opened {
                    breaker.left_at(self.remote.arrivals(server));
                }
                opened
            })
        });
        if let Some(server) = opened {
            self.failures.opened.write(now, |more| {
                tracing::warn!(
                    "{server} is not asked for a while, limits go by their failure policy: {failure} \
                     ({more} more since the last such line)"
                );
            });
        } else {
            let server = server.cloned().unwrap_or_default();
            self.failures.failed.write(now, |more| {
                tracing::warn!("{server} did not answer: {failure} ({more} more since the last such line)");
            });
        }
    }

    /// As [`Inner::ask`], for a call that no failure policy can answer.
    fn ask_or_fail<'a, T: Unpin + Send + 'a>(
        &'a self,
        what: Op,
        server: Option<Server>,
        call: impl FnOnce(&'a R) -> StoreFuture<'a, RemoteResult<T>>,
    ) -> StoreFuture<'a, Result<T, Unavailable>> {
        match self.ask(what, server, call) {
            None => StoreFuture::Ready(Err(Unavailable)),
            Some(asked) => StoreFuture::Later(Box::pin(async move { asked.await.map_err(|_| Unavailable) })),
        }
    }

    /// Opens a receipt: one that was sealed here, one whose secret is known, or after asking for the secret.
    fn open<'a, T: Unpin + Send + 'a>(
        &'a self,
        sealed_here: Option<T>,
        opened: impl FnOnce(&'a R) -> StoreFuture<'a, RemoteResult<Option<T>>>,
    ) -> StoreFuture<'a, Result<Option<T>, Unavailable>> {
        if sealed_here.is_some() {
            return StoreFuture::Ready(Ok(sealed_here));
        }
        match opened(&self.remote) {
            StoreFuture::Ready(Ok(opened)) => StoreFuture::Ready(Ok(opened)),
            later => self.ask_or_fail(Op::Open, self.remote.server_of(&[]), |_| later),
        }
    }
}

/// Waits for a remote store, in or outside of a tokio runtime.
pub(crate) async fn within_deadline<T>(
    deadline: Duration,
    answer: impl Future<Output = RemoteResult<T>>,
) -> RemoteResult<T> {
    let late = |_| Err(Failure::new(FailureKind::Timeout, format!("no answer within {deadline:?}")));
    let timed = async { tokio::time::timeout(deadline, answer).await.unwrap_or_else(late) };
    background::within(timed).await.unwrap_or_else(|error| Err(Failure::no_thread(&error)))
}

impl<R: Remote + 'static> Store for Resilient<R> {
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, Reply> {
        let inner = &*self.0;
        if toll.is_empty() {
            return StoreFuture::Ready(Reply::new(inner.clock.now(), 0));
        }
        match inner.remote.split(toll) {
            Split::Apart(parts) => StoreFuture::Later(Box::pin(cross_slot::decide(
                Arc::clone(&self.0),
                toll.clone().into_owned(),
                parts,
            ))),
            Split::Whole(server) => match inner.ask(Op::Decide, Some(server), |remote| remote.decide(toll)) {
                None => StoreFuture::Ready(inner.fallback.decide(toll)),
                Some(asked) => {
                    let toll = toll.clone().into_owned();
                    StoreFuture::Later(Box::pin(async move {
                        asked.await.unwrap_or_else(|_| inner.fallback.decide(&toll))
                    }))
                }
            },
        }
    }

    fn correct<'a>(&'a self, charge: &'a Charge, fixes: &'a [Fix]) -> StoreFuture<'a, Correction> {
        let server = self.0.remote.server_of(charge.items());
        match self.0.ask(Op::Correct, server, |remote| remote.correct(charge, fixes)) {
            None => StoreFuture::Ready(Correction::Failed),
            Some(asked) => {
                StoreFuture::Later(Box::pin(async move { asked.await.unwrap_or(Correction::Failed) }))
            }
        }
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>> {
        // A slot may have been taken here, while the store was away.
        if self.0.local.release(slot) {
            return StoreFuture::Ready(Ok(true));
        }
        self.0.ask_or_fail(Op::Release, self.0.remote.server_of(slot.items()), |remote| remote.release(slot))
    }

    fn renew<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>> {
        if self.0.local.renew(slot) {
            return StoreFuture::Ready(Ok(true));
        }
        self.0.ask_or_fail(Op::Renew, self.0.remote.server_of(slot.items()), |remote| remote.renew(slot))
    }

    fn forget<'a>(&'a self, key: Key<'a>) -> StoreFuture<'a, Result<bool, Unavailable>> {
        self.0.local.forget(key);
        self.0.ask_or_fail(Op::Forget, self.0.remote.server_of(&[]), |remote| remote.forget(key))
    }

    // Without the secret of the remote store only the local store can have admitted, and it seals its own receipts.
    fn seal_charge(&self, charge: &Charge) -> String {
        self.0.remote.seal_charge(charge).unwrap_or_else(|| self.0.local.seal_charge(charge))
    }

    fn open_charge<'a>(&'a self, text: &'a str) -> StoreFuture<'a, Result<Option<Charge>, Unavailable>> {
        self.0.open(self.0.local.open_charge(text), |remote| remote.open_charge(text))
    }

    fn seal_slot(&self, slot: &Slot) -> String {
        self.0.remote.seal_slot(slot).unwrap_or_else(|| self.0.local.seal_slot(slot))
    }

    fn open_slot<'a>(&'a self, text: &'a str) -> StoreFuture<'a, Result<Option<Slot>, Unavailable>> {
        self.0.open(self.0.local.open_slot(text), |remote| remote.open_slot(text))
    }
}

#[cfg(test)]
mod tests;
