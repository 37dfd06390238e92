//! One budget of memory for the calls of all gRPC connections.
//!
//! HTTP/2 bounds what one connection has in flight; this bounds all of them together. A call that finds no room is
//! refused with RESOURCE_EXHAUSTED instead of waiting, because calls that wait for each other would hold what they
//! have until their deadline.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// What all calls may hold together.
const ALL: usize = 64 << 20;
/// What calls may hold whose message has not arrived in full. The rest is kept for calls that can be answered at once.
const ARRIVING: usize = 48 << 20;
/// What calls may hold together with such a message above [`SMALL`].
const ARRIVING_LARGE: usize = 32 << 20;
/// What nearly every call of Envoy is below.
const SMALL: usize = 32 << 10;

/// What a call takes besides its message: its stream, its task and its answer.
pub const CALL: usize = 8 << 10;

/// What the calls of all connections hold.
#[derive(Debug, Default)]
pub struct Budget {
    used: AtomicUsize,
}

/// How far a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The client has to send more.
    Arriving,
    /// Its message is here, and the answer depends on this server only.
    Arrived,
}

/// The budget has no room for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

impl Budget {
    /// Nothing, yet, for a call that begins.
    pub fn call(self: &Arc<Budget>) -> Held {
        Held { budget: Arc::clone(self), bytes: 0 }
    }
}

/// What a call holds, until it is dropped.
#[derive(Debug)]
pub struct Held {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Held {
    /// Holds so many bytes from now on, or as many as before if there is no room for more.
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

    /// Calls of this size until there is no room.
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
    fn large_messages_leave_room_for_small_and_whole_ones() {
        let budget = Arc::new(Budget::default());
        let large = fill(&budget, 4 << 20, Stage::Arriving);
        assert_eq!(large.len(), 8);
        let small = fill(&budget, CALL, Stage::Arriving);
        assert_eq!(small.len() * CALL, 16 << 20);
        let whole = fill(&budget, CALL, Stage::Arrived);
        assert_eq!(whole.len() * CALL, 16 << 20);
        drop(small);
        assert_eq!(fill(&budget, CALL, Stage::Arriving).len() * CALL, 0, "the rest is not for them");
        drop((large, whole));
        assert_eq!(budget.used.load(Relaxed), 0);
    }

    #[test]
    fn call_that_does_not_fit_keeps_what_it_has() {
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
