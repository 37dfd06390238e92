//! A slot that is given back when it goes out of scope.

use tollkeeper_core::{Slot, Span};

use crate::limiter::Limiter;
use crate::store::Answer;

/// Holds a slot of each concurrency limit that applied; dropping it gives them back.
#[derive(Debug)]
pub struct SlotGuard {
    limiter: Limiter,
    slot: Option<Slot>,
}

impl SlotGuard {
    pub(crate) fn new(limiter: Limiter, slot: Slot) -> SlotGuard {
        SlotGuard { limiter, slot: Some(slot) }
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
    pub async fn renew(&self) -> bool {
        self.limiter.renew(self.slot()).await
    }

    /// Keeps the slot beyond this guard: it comes back when released by name, or at its ttl.
    pub fn keep(mut self) -> Slot {
        self.slot.take().expect("held until it is dropped or kept")
    }
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        let Some(slot) = self.slot.take() else { return };
        // A store elsewhere is told of it in the background; without a runtime, the slot comes back at its ttl.
        #[cfg(feature = "redis")]
        if self.limiter.inner.memory.is_none()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let limiter = self.limiter.clone();
            runtime.spawn(async move { limiter.release(&slot).await });
            return;
        }
        if let Answer::Later(_) = self.limiter.inner.store.release(&slot) {}
    }
}
