//! Asks the store for permits, in the background: one call at a time for each key, and never again for the same units.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use tollkeeper_core::{Time, Toll};

use super::bound::Sighting;
use super::leased_key::{Asked, Granted};
use super::{DueKey, DueKeys, Inner, Known, Wanted};
use crate::background;
use crate::limiter::observer::Permits as State;
use crate::store::{LeaseGrant, LeaseRequest, Store};

/// A task without a result.
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Runs tasks in the background.
#[derive(Clone)]
pub(super) struct Spawner(Arc<dyn Fn(Task) + Send + Sync>);

impl Spawner {
    pub(super) fn new(spawn: impl Fn(Task) + Send + Sync + 'static) -> Spawner {
        Spawner(Arc::new(spawn))
    }

    fn spawn(&self, task: Task) {
        (self.0)(task);
    }
}

impl Default for Spawner {
    /// On the current runtime, or on the library's own. A task that cannot be started is dropped.
    fn default() -> Spawner {
        Spawner::new(|task| {
            let _ = background::spawn(task);
        })
    }
}

impl fmt::Debug for Spawner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Spawner(…)")
    }
}

/// A call that asks for permits. If it is dropped before it has ended, the key can be asked for again.
struct LeaseCall<S: Store + 'static> {
    store: Arc<Inner<S>>,
    print: u128,
    request: LeaseRequest,
    generation: u64,
    has_ended: bool,
}

impl<S: Store + 'static> Inner<S> {
    /// Asks for units of a leased due of this toll.
    #[cold]
    pub(super) fn ask_for_permits(self: &Arc<Self>, toll: &Toll, keys: &DueKeys, wanted: Wanted) {
        let Wanted { index, units, generation } = wanted;
        let DueKey { print, lease: Some(lease), .. } = keys[index] else { return };
        let request = LeaseRequest { toll: toll.part(&[index]), want: units, lease };
        let call = LeaseCall { store: Arc::clone(self), print, request, generation, has_ended: false };
        self.spawner.spawn(Box::pin(async move {
            let sent = call.store.clock.now();
            let answer = call.store.store.lease(&call.request).await;
            call.end(sent, answer.as_ref());
        }));
    }
}

impl<S: Store + 'static> LeaseCall<S> {
    /// The store has answered; `None` if it did not. It read its clock after `sent`.
    fn end(mut self, sent: Time, answer: Option<&LeaseGrant>) {
        self.has_ended = true;
        let received = self.store.clock.now();
        if let Some(grant) = answer {
            self.store.see_clock(grant.time, received);
        }
        let due = self.request.toll.get(0);
        let LeaseRequest { want, lease, .. } = &self.request;
        let asked = Asked { due, lease, want: *want, generation: self.generation, sent };
        let granted = self.store.table.update(self.print, |known: &mut Known| {
            let seen = answer.and_then(|grant| Sighting::of_lease(&due, grant, sent, received));
            if let Some(seen) = seen {
                known.bound.see(seen);
            }
            let key = known.lease.as_mut()?;
            let Some(grant) = answer else {
                key.unanswered(received);
                return None;
            };
            Some(key.granted(&asked, grant, received))
        });
        // A key that was forgotten meanwhile loses what it was granted.
        let units = answer.map_or(0, |grant| grant.units);
        let Granted { units, lost } = granted.flatten().unwrap_or(Granted { units, lost: units });
        self.store.count(due.rule.name(), State::Granted, units);
        self.store.count(due.rule.name(), State::Expired, lost);
    }
}

impl<S: Store + 'static> Drop for LeaseCall<S> {
    fn drop(&mut self) {
        if !self.has_ended {
            let now = self.store.clock.now();
            self.store.table.update(self.print, |known| {
                if let Some(key) = known.lease.as_mut() {
                    key.unanswered(now);
                }
            });
        }
    }
}
