//! A store that always answers, around one that may not.
//!
//! Each call has a deadline. A breaker stops asking a store that fails, so that nobody waits for it, and
//! lets one request try again after a pause. What the store does not answer, the failure policy of each
//! limit does: see [`OnStoreFailure`](crate::OnStoreFailure). A decision says which limits were decided so.

mod breaker;
mod fallback;

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tollkeeper_core::{Charge, Fix, Key, Ruling, Slot, Time, Toll};

use crate::clock::Clock;
use crate::memory::MemoryStore;
use crate::observer::{Observer, Op};
use crate::random;
use crate::remote::{Asked, Failure, FailureKind, Remote};
use crate::store::{Answer, Correction, Store};
use crate::sync::{Mutex, lock};

pub use breaker::{BreakerSettings, BreakerState};

use breaker::{Breaker, Pass};
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
pub struct Resilient<R> {
    remote: R,
    deadline: Duration,
    clock: Clock,
    breaker: Mutex<Breaker>,
    fallback: Fallback,
    local: MemoryStore,
    failures: Failures,
    observer: OnceLock<Arc<dyn Observer>>,
}

/// How often the store failed, by kind, and what was said of it.
#[derive(Debug, Default)]
struct Failures {
    counts: [AtomicU64; FailureKind::ALL.len()],
    failed: Line,
    opened: Line,
    closed: Line,
}

/// A line of the log: one a second says as much as a thousand.
#[derive(Debug, Default)]
struct Line {
    /// When it was last written, in seconds, and how often it was not since.
    written: AtomicU64,
    silent: AtomicU64,
}

impl Line {
    /// Writes it, with how often it was not written since, unless it was in this second.
    fn write(&self, now: Time, write: impl FnOnce(u64)) {
        let second = now.as_micros() / 1_000_000;
        if self.written.swap(second, Relaxed) == second {
            self.silent.fetch_add(1, Relaxed);
        } else {
            write(self.silent.swap(0, Relaxed));
        }
    }
}

impl<R: Remote> Resilient<R> {
    /// Wraps a store; `local` decides in its place, and lives as long as this does.
    pub fn new(remote: R, settings: ResilientSettings, local: MemoryStore) -> Resilient<R> {
        let pause = settings.breaker.cooldown;
        Resilient {
            remote,
            deadline: settings.deadline,
            clock: local.clock().clone(),
            breaker: Mutex::new(Breaker::new(settings.breaker)),
            fallback: Fallback::new(local.clone(), settings.nodes, pause),
            local,
            failures: Failures::default(),
            observer: OnceLock::new(),
        }
    }

    /// The store inside.
    pub fn remote(&self) -> &R {
        &self.remote
    }

    /// The store that decides in its place.
    pub fn local(&self) -> &MemoryStore {
        &self.local
    }

    /// Has every call from now on told to `observer`; false if there is one already.
    pub fn observe(&self, observer: Arc<dyn Observer>) -> bool {
        self.observer.set(observer).is_ok()
    }

    /// Whether the store is being asked.
    pub fn breaker(&self) -> BreakerState {
        lock(&self.breaker).state()
    }

    /// How often the store failed like this.
    pub fn failures(&self, kind: FailureKind) -> u64 {
        self.failures.counts[kind as usize].load(Relaxed)
    }

    /// Asks, if the breaker lets it, and for no longer than the deadline. Nothing if it must not be asked.
    fn ask<'a, T: Unpin + Send + 'a>(
        &'a self,
        what: Op,
        call: impl FnOnce(&'a R) -> Answer<'a, Asked<T>>,
    ) -> Option<impl Future<Output = Asked<T>> + Send + 'a> {
        let began = self.clock.now();
        if lock(&self.breaker).pass(began) == Pass::Stay {
            return None;
        }
        let answer = call(&self.remote);
        Some(async move {
            let late = |_| {
                let message = format!("no answer within {:?}", self.deadline);
                Err(Failure::new(FailureKind::Timeout, message))
            };
            let asked = tokio::time::timeout(self.deadline, answer).await.unwrap_or_else(late);
            if let Some(observer) = self.observer.get() {
                observer.asked(what, self.clock.now().since(began));
            }
            match &asked {
                Ok(_) => self.answered(),
                Err(failure) => self.failed(began, failure),
            }
            asked
        })
    }

    fn answered(&self) {
        if lock(&self.breaker).answered() {
            self.failures.closed.write(self.clock.now(), |more| {
                tracing::info!("the store answers again ({more} more since the last such line)");
            });
        }
    }

    fn failed(&self, began: Time, failure: &Failure) {
        self.failures.counts[failure.kind as usize].fetch_add(1, Relaxed);
        let now = self.clock.now();
        let jitter = random::secret().0[0];
        if lock(&self.breaker).failed(began, now, jitter) {
            self.failures.opened.write(now, |more| {
                tracing::warn!(
                    "the store is not asked for a while, limits go by their failure policy: {failure} \
                     ({more} more since the last such line)"
                );
            });
        } else {
            self.failures.failed.write(now, |more| {
                tracing::warn!("the store did not answer: {failure} ({more} more since the last such line)");
            });
        }
    }

    /// As [`Resilient::ask`], with what to say if there is no answer.
    fn ask_or<'a, T: Copy + Unpin + Send + 'a>(
        &'a self,
        what: Op,
        otherwise: T,
        call: impl FnOnce(&'a R) -> Answer<'a, Asked<T>>,
    ) -> Answer<'a, T> {
        match self.ask(what, call) {
            None => Answer::Ready(otherwise),
            Some(asked) => Answer::Later(Box::pin(async move { asked.await.unwrap_or(otherwise) })),
        }
    }
}

impl<R: Remote> Store for Resilient<R> {
    fn decide(&self, toll: &Toll) -> Answer<'_, Ruling> {
        if toll.is_empty() {
            return Answer::Ready(Ruling::new(self.clock.now(), 0));
        }
        match self.ask(Op::Decide, |remote| remote.decide(toll)) {
            None => Answer::Ready(self.fallback.decide(toll)),
            Some(asked) => {
                let toll = toll.clone();
                Answer::Later(Box::pin(
                    async move { asked.await.unwrap_or_else(|_| self.fallback.decide(&toll)) },
                ))
            }
        }
    }

    fn correct<'a>(&'a self, charge: &'a Charge, fixes: &'a [Fix]) -> Answer<'a, Correction> {
        self.ask_or(Op::Correct, Correction::Failed, |remote| remote.correct(charge, fixes))
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> Answer<'a, bool> {
        // A slot may have been taken here, while the store was away.
        if self.local.release(slot) {
            return Answer::Ready(true);
        }
        self.ask_or(Op::Release, false, |remote| remote.release(slot))
    }

    fn renew<'a>(&'a self, slot: &'a Slot) -> Answer<'a, bool> {
        if self.local.renew(slot) {
            return Answer::Ready(true);
        }
        self.ask_or(Op::Renew, false, |remote| remote.renew(slot))
    }

    fn forget<'a>(&'a self, key: Key<'a>) -> Answer<'a, bool> {
        self.local.forget(key);
        self.ask_or(Op::Forget, false, |remote| remote.forget(key))
    }

    fn seal_charge(&self, charge: &Charge) -> String {
        self.remote.seal_charge(charge)
    }

    fn open_charge(&self, text: &str) -> Option<Charge> {
        self.remote.open_charge(text)
    }

    fn seal_slot(&self, slot: &Slot) -> String {
        self.remote.seal_slot(slot)
    }

    fn open_slot(&self, text: &str) -> Option<Slot> {
        self.remote.open_slot(text)
    }
}

#[cfg(test)]
mod tests;
