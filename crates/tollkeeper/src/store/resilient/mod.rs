//! Wraps a remote store with a deadline, a breaker and a fallback, so that every toll is decided.
//!
//! Each call has a deadline. A breaker stops calling a store that fails, so that requests do not wait for it, and
//! lets one request probe it after a pause. Without a reply, each limit is decided by its failure policy: see
//! [`OnStoreFailure`](crate::OnStoreFailure). A decision says which limits were decided that way.

mod breaker;
mod cross_slot;
mod fallback;

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tollkeeper_core::{Charge, Key, KeyCorrection, Reply, Slot, Time, Toll};

use crate::background;
use crate::clock::Clock;
use crate::limiter::observer::{Observer, Op};
use crate::log_throttle::LogThrottle;
use crate::store::memory::MemoryStore;
use crate::store::remote::{Failure, FailureKind, Remote, RemoteResult, Server, Split};
use crate::store::{Correction, LeaseGrant, LeaseRequest, Store, StoreFuture, Unavailable};
use crate::sync::{Mutex, lock};

pub use breaker::{BreakerSettings, BreakerState};

use breaker::{Breaker, Pass};
use cross_slot::Refused;
use fallback::Fallback;

/// How long to wait for a remote store, and what to do without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResilientSettings {
    /// The longest that a call may take, such as 10 ms.
    pub deadline: Duration,
    /// When to stop calling the store, and for how long.
    pub breaker: BreakerSettings,
    /// The number of processes that share the store: the failure policy `local` grants each an equal share of a quota.
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

/// A [`Store`] around a [`Remote`] that decides every toll, even while the remote store is down.
#[derive(Debug)]
pub struct Resilient<R>(Arc<Inner<R>>);

#[derive(Debug)]
struct Inner<R> {
    remote: R,
    deadline: Duration,
    clock: Clock,
    breaker: BreakerSettings,
    /// One for each server: a failure of one says nothing about the others.
    breakers: Mutex<HashMap<Server, Breaker>>,
    fallback: Fallback,
    local: MemoryStore,
    refused: Refused,
    failures: Failures,
    observer: OnceLock<Arc<dyn Observer>>,
}

/// The most breakers that are kept. Servers come and go: beyond this number, closed breakers are dropped.
const SERVERS: usize = 256;

/// Counts failures by kind, and limits the log lines about them.
#[derive(Debug, Default)]
struct Failures {
    counts: [AtomicU64; FailureKind::ALL.len()],
    failed: LogThrottle,
    opened: LogThrottle,
    closed: LogThrottle,
}

impl<R: Remote> Resilient<R> {
    /// Wraps a remote store; `local` decides in its place while it does not answer.
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

    /// The remote store.
    pub fn remote(&self) -> &R {
        &self.0.remote
    }

    /// The local store, which decides while the remote store does not answer.
    pub fn local(&self) -> &MemoryStore {
        &self.0.local
    }

    /// Reports every call from now on to `observer`; false if an observer is already set.
    pub fn observe(&self, observer: Arc<dyn Observer>) -> bool {
        self.0.observer.set(observer).is_ok()
    }

    /// The state of the breaker; with several servers, the worst one.
    pub fn breaker(&self) -> BreakerState {
        let breakers = lock(&self.0.breakers);
        let severity = |state: &BreakerState| match state {
            BreakerState::Closed => 0,
            BreakerState::HalfOpen => 1,
            BreakerState::Open => 2,
        };
        breakers.values().map(Breaker::state).max_by_key(severity).unwrap_or(BreakerState::Closed)
    }

    /// The number of failures of this kind so far.
    pub fn failures(&self, kind: FailureKind) -> u64 {
        self.0.failures.counts[kind as usize].load(Relaxed)
    }
}

impl<R: Remote> Inner<R> {
    /// Calls the remote store with the deadline; `None` if the breaker of that server is open. Without a server, no
    /// breaker is consulted.
    fn ask<'a, T: Unpin + Send + 'a>(
        &'a self,
        what: Op,
        server: Option<Server>,
        call: impl FnOnce(&'a R) -> StoreFuture<'a, RemoteResult<T>>,
    ) -> Option<impl Future<Output = RemoteResult<T>> + Send + 'a> {
        let began = self.begin(server.as_ref())?;
        Some(self.await_answer(what, server, began, call(&self.remote).boxed()))
    }

    /// When a call that starts now began; `None` if the breaker of that server is open.
    fn begin(&self, server: Option<&Server>) -> Option<Time> {
        let now = self.clock.now();
        server.is_none_or(|server| self.may_ask(server, now)).then_some(now)
    }

    /// Waits for a reply until the deadline, and records the result.
    async fn await_answer<T: Unpin>(
        &self,
        what: Op,
        server: Option<Server>,
        began: Time,
        reply: Pin<Box<dyn Future<Output = RemoteResult<T>> + Send + '_>>,
    ) -> RemoteResult<T> {
        let result = within_deadline(&self.clock, self.deadline, reply).await;
        self.record(what, server.as_ref(), began, &result);
        result
    }

    /// Reports the result of a call to the observer, and to the server's breaker.
    fn record<T>(&self, what: Op, server: Option<&Server>, began: Time, result: &RemoteResult<T>) {
        if let Some(observer) = self.observer.get() {
            observer.asked(what, self.clock.now().since(began));
        }
        match result {
            Ok(_) => self.answered(server),
            Err(failure) => self.failed(server, began, failure),
        }
    }

    fn may_ask(&self, server: &Server, now: Time) -> bool {
        self.breaker_of(server, |breaker| {
            // A server that has come back meanwhile is called at once.
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
        // Nodes notice a failure at different microseconds, so the last byte of the time differs between them.
        let [jitter, ..] = now.as_micros().to_le_bytes();
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
                    "{server} fails: the breaker is open, limits follow their failure policy: {failure} \
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

    /// Like [`Inner::ask`], for a call that has no fallback.
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

    /// Opens a receipt: one that the local store sealed, one whose secret is known, or else after loading the secret.
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

/// Waits for a remote store until the deadline, inside or outside of a tokio runtime.
pub(crate) async fn within_deadline<T>(
    clock: &Clock,
    deadline: Duration,
    answer: impl Future<Output = RemoteResult<T>>,
) -> RemoteResult<T> {
    let late = || Err(Failure::new(FailureKind::Timeout, format!("no answer within {deadline:?}")));
    if clock.is_manual() {
        return clock.timeout(deadline.into(), answer).await.unwrap_or_else(late);
    }
    let timed = clock.timeout(deadline.into(), answer);
    match background::within(timed).await {
        Ok(answer) => answer.unwrap_or_else(late),
        Err(error) => Err(Failure::no_thread(&error)),
    }
}

impl<R: Remote + 'static> Store for Resilient<R> {
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, Reply> {
        self.decide_then(toll, |_| ())
    }

    fn decide_then<'a>(
        &'a self,
        toll: &Toll,
        end: impl FnOnce(&mut Reply) + Send + 'a,
    ) -> StoreFuture<'a, Reply> {
        let inner = &*self.0;
        if toll.is_empty() {
            return StoreFuture::Ready(Reply::new(inner.clock.now(), 0)).then(end);
        }
        match inner.remote.split(toll) {
            Split::Apart(parts) => {
                let decided = cross_slot::decide(Arc::clone(&self.0), toll.clone(), parts);
                StoreFuture::Later(Box::pin(decided)).then(end)
            }
            Split::Whole(server) => match inner.begin(Some(&server)) {
                None => StoreFuture::Ready(inner.fallback.decide(toll)).then(end),
                Some(began) => {
                    let (reply, toll) = (inner.remote.decide(toll).boxed(), Box::new(toll.clone()));
                    StoreFuture::Later(Box::pin(async move {
                        // The reply is large: every layer around this would copy it.
                        let answer = within_deadline(&inner.clock, inner.deadline, reply).await;
                        inner.record(Op::Decide, Some(&server), began, &answer);
                        let mut reply = answer.unwrap_or_else(|_| inner.fallback.decide(&toll));
                        end(&mut reply);
                        reply
                    }))
                }
            },
        }
    }

    fn lease(&self, request: &LeaseRequest) -> StoreFuture<'_, Option<LeaseGrant>> {
        // A toll with one key is never split.
        let Split::Whole(server) = self.0.remote.split(&request.toll) else {
            return StoreFuture::Ready(None);
        };
        match self.0.ask(Op::Lease, Some(server), |remote| remote.lease(request)) {
            None => StoreFuture::Ready(None),
            Some(asked) => StoreFuture::Later(Box::pin(async move { asked.await.unwrap_or(None) })),
        }
    }

    fn correct<'a>(
        &'a self,
        charge: &'a Charge,
        corrections: &'a [KeyCorrection],
    ) -> StoreFuture<'a, Correction> {
        let server = self.0.remote.server_of(charge.items());
        match self.0.ask(Op::Correct, server, |remote| remote.correct(charge, corrections)) {
            None => StoreFuture::Ready(Correction::Failed),
            Some(asked) => {
                StoreFuture::Later(Box::pin(async move { asked.await.unwrap_or(Correction::Failed) }))
            }
        }
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>> {
        // The local store may have granted the slot while the remote store was down.
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

    // Without the remote store's secret only the local store can have admitted the request, so that one seals it.
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
