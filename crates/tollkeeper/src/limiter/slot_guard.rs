//! A slot that is given back when it goes out of scope.

use tollkeeper_core::{Slot, Span};

use crate::limiter::Limiter;
use crate::limiter::operation::Operation;
use crate::store::{StoreFuture, Unavailable};

/// Holds a slot of each concurrency limit that applied; dropping it gives them back.
#[derive(Debug)]
pub struct SlotGuard {
    limiter: Limiter,
    slot: Option<Slot>,
    #[cfg_attr(
        not(feature = "redis"),
        expect(dead_code, reason = "only a remote store is told in the background")
    )]
    taken: Taken,
}

/// How a slot was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// By a task of an async runtime, which has time for other tasks when the guard is dropped.
    Async,
    /// By a thread that blocks. If it belongs to a runtime, that may have no other.
    Blocking,
}

impl SlotGuard {
    pub(crate) fn new(limiter: Limiter, slot: Slot, taken: Taken) -> SlotGuard {
        SlotGuard { limiter, slot: Some(slot), taken }
    }

    /// The slot, which names it to [`Limiter::release`] and [`Limiter::renew`].
    pub fn slot(&self) -> &Slot {
        self.slot.as_ref().expect("held until it is dropped or kept")
    }

    /// How long it is held at most: whoever needs it longer renews it, at half that time.
    pub fn ttl(&self) -> Span {
        self.slot().ttl()
    }

    /// Counts its life from now; false if it was lost meanwhile.
    pub fn renew(&self) -> Operation<impl Future<Output = Result<bool, Unavailable>>> {
        self.limiter.renew(self.slot())
    }

    /// Keeps the slot beyond this guard: it comes back when released by name, or at its ttl.
    pub fn keep(mut self) -> Slot {
        self.slot.take().expect("held until it is dropped or kept")
    }
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        let Some(slot) = self.slot.take() else { return };
        // A remote store is told in the background. If that is not possible, the slot comes back at its ttl.
        #[cfg(feature = "redis")]
        if self.limiter.inner.memory.is_none() {
            let limiter = self.limiter.clone();
            let _blocked = (self.taken == Taken::Blocking).then(crate::background::block);
            let _ = crate::background::spawn(async move {
                let _ = limiter.release(&slot).await;
            });
            return;
        }
        if let StoreFuture::Later(_) = self.limiter.inner.store.release(&slot) {}
    }
}
