//! A guard that releases a slot when it is dropped.

use tollkeeper_core::{DecidedToll, Slot, Span};

use crate::limiter::Limiter;
use crate::limiter::operation::Operation;
use crate::store::{StoreFuture, Unavailable};

/// Holds a slot of each concurrency limit that applied; dropping it releases them.
#[derive(Debug)]
pub struct SlotGuard {
    limiter: Limiter,
    slot: Option<Slot>,
    #[cfg_attr(
        not(feature = "redis"),
        expect(dead_code, reason = "only a remote store is called in the background")
    )]
    taken: Taken,
}

/// How a slot was taken: decides where a remote store is called when the guard is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// By a task of an async runtime, which can run other tasks while the guard is dropped.
    Async,
    /// By a thread that blocks. It may be the only thread of its runtime.
    Blocking,
}

impl SlotGuard {
    /// The guard of a request that [`Limiter::acquire`] admitted; `None` if it took no slot.
    #[inline]
    pub fn of(limiter: &Limiter, decided: &DecidedToll) -> Option<SlotGuard> {
        SlotGuard::taken(limiter, decided, Taken::Async)
    }

    #[inline]
    pub(crate) fn taken(limiter: &Limiter, decided: &DecidedToll, taken: Taken) -> Option<SlotGuard> {
        // Most policies have no concurrency limits.
        let slot = if decided.toll().dues().any(|due| due.is_slot()) { decided.slot() } else { None };
        slot.map(|slot| SlotGuard { limiter: limiter.clone(), slot: Some(slot), taken })
    }

    /// The slot, for [`Limiter::release`] and [`Limiter::renew`].
    pub fn slot(&self) -> &Slot {
        self.slot.as_ref().expect("held until it is dropped or kept")
    }

    /// How long it is held without a renewal. Renew at half that time to keep it longer.
    pub fn ttl(&self) -> Span {
        self.slot().ttl()
    }

    /// Restarts its ttl; false if it was no longer held.
    pub fn renew(&self) -> Operation<impl Future<Output = Result<bool, Unavailable>>> {
        self.limiter.renew(self.slot())
    }

    /// Keeps the slot beyond this guard, until [`Limiter::release`] or its ttl.
    pub fn keep(mut self) -> Slot {
        self.slot.take().expect("held until it is dropped or kept")
    }
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        let Some(slot) = self.slot.take() else { return };
        // A remote store is called in the background. If that is not possible, the slot is freed at its ttl.
        #[cfg(feature = "redis")]
        if !self.limiter.is_embedded() {
            let limiter = self.limiter.clone();
            let _blocked = (self.taken == Taken::Blocking).then(crate::background::block);
            let _ = crate::background::spawn(async move {
                let _ = limiter.release(&slot).await;
            });
            return;
        }
        if let StoreFuture::Later(_) = self.limiter.inner.backend.store().release(&slot) {}
    }
}
