//! A slot that is held for as long as a response streams.

use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tollkeeper::{Limiter, SlotGuard, Span};

/// Holds a slot, and renews it at half its time to live: by a task of its own, because nobody may be
/// reading the response for that long. Dropping it gives the slot back.
#[derive(Debug)]
pub(crate) struct Held {
    _guard: SlotGuard,
    renewal: Option<AbortHandle>,
}

impl Held {
    /// Without a tokio runtime nothing is renewed, and the slot is lost at its time to live.
    pub(crate) fn new(limiter: &Limiter, guard: SlotGuard) -> Held {
        let (limiter, slot) = (limiter.clone(), guard.slot().clone());
        let half = Span::from_micros(guard.ttl().as_micros() / 2);
        let renew = async move {
            loop {
                limiter.clock().sleep(half).await;
                if limiter.renew(&slot).await == Ok(false) {
                    return; // lost: another request may hold it by now
                }
            }
        };
        let renewal = Handle::try_current().ok().map(|runtime| runtime.spawn(renew).abort_handle());
        Held { _guard: guard, renewal }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(renewal) = &self.renewal {
            renewal.abort();
        }
    }
}
