//! Limits the memory of the calls in flight on all gRPC connections.
//!
//! HTTP/2 limits what one connection has in flight, this budget limits all connections together. A call that does not fit
//! is refused with RESOURCE_EXHAUSTED instead of waiting, because calls that wait for each other would keep their memory
//! until their deadline.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The most bytes of all calls together.
const ALL: usize = 64 << 20;
/// A call whose message is still arriving is refused above this total. The rest is for calls that can be answered now.
const ARRIVING: usize = 48 << 20;
/// The same for a call of more than [`SMALL`] bytes.
const ARRIVING_LARGE: usize = 32 << 20;
/// Nearly all calls of Envoy are smaller.
const SMALL: usize = 32 << 10;

/// Memory of a call besides its message: its stream, its future and its response.
pub const CALL: usize = 8 << 10;

/// The memory in use by the calls of all connections.
#[derive(Debug, Default)]
pub struct Budget {
    used: AtomicUsize,
}

/// The progress of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The client has to send more of its message.
    Arriving,
    /// Its message has arrived: the response depends on this server only.
    Arrived,
}

/// The budget has no room for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

impl Budget {
    /// A reservation of zero bytes, for a call that begins.
    pub fn call(self: &Arc<Budget>) -> Held {
        Held { budget: Arc::clone(self), bytes: 0 }
    }
}

/// The memory reserved for a call, returned on drop.
#[derive(Debug)]
pub struct Held {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Held {
    /// Changes the reservation to `bytes`. It stays unchanged if they do not fit.
    pub fn set(&mut self, bytes: usize, stage: Stage) -> Result<(), Full> {
        let most = match stage {
            Stage::Arrived => ALL,
            Stage::Arriving if bytes <= SMALL => ARRIVING,
            Stage::Arriving => ARRIVING_LARGE,
        };
        let more = bytes.saturating_sub(self.bytes);
        let fits = |used: usize| used.checked_add(more).filter(|used| *used <= most);
        if more > 0 {
            self.budget.used.fetch_update(Relaxed, Relaxed, fits).map_err(|_| Full)?;
        } else {
            self.budget.used.fetch_sub(self.bytes - bytes, Relaxed);
        }
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reserves calls of this size until the budget is full.
    fn fill(budget: &Arc<Budget>, bytes: usize, stage: Stage) -> Vec<Held> {
        let mut calls = Vec::new();
        loop {
            let mut call = budget.call();
            if call.set(bytes, stage).is_err() {
                return calls;
            }
            calls.push(call);
        }
    }

    #[test]
    fn large_calls_leave_memory_for_small_and_arrived_ones() {
        let budget = Arc::new(Budget::default());
        let large = fill(&budget, 4 << 20, Stage::Arriving);
        assert_eq!(large.len(), 8);
        let small = fill(&budget, CALL, Stage::Arriving);
        assert_eq!(small.len() * CALL, 16 << 20);
        let arrived = fill(&budget, CALL, Stage::Arrived);
        assert_eq!(arrived.len() * CALL, 16 << 20);
        drop(small);
        assert_eq!(
            fill(&budget, CALL, Stage::Arriving).len() * CALL,
            0,
            "the rest is for calls that have arrived"
        );
        drop((large, arrived));
        assert_eq!(budget.used.load(Relaxed), 0);
    }

    #[test]
    fn call_that_does_not_fit_keeps_its_reservation() {
        let budget = Arc::new(Budget::default());
        let mut call = budget.call();
        assert_eq!(call.set(CALL, Stage::Arriving), Ok(()));
        assert_eq!(call.set(ALL + 1, Stage::Arrived), Err(Full));
        assert_eq!(budget.used.load(Relaxed), CALL);
        assert_eq!(call.set(2 * CALL, Stage::Arrived), Ok(()));
        assert_eq!(call.set(CALL, Stage::Arrived), Ok(()));
        assert_eq!(budget.used.load(Relaxed), CALL);
    }
}
