//! Stores: what keeps the states and decides tolls on them, by its own clock.
//!
//! Applications name a store by its URL, or use the [memory store](crate::MemoryStore). This module has the rest, for
//! those who build a [Redis store](redis) by hand or implement a store: the trait [`Store`], the types that it takes and
//! returns, and, with the feature `test-kit`, the tests that every store must pass (`conformance`).
//!
//! A store takes a toll, which is plain data and can be sent to another process, and returns a decision. The
//! alternatives are worse: compare-and-swap needs a round trip for every attempt and cannot decide several limits
//! atomically, and a closure cannot leave the process. A store that adds behaviour wraps another store.

#[cfg(feature = "test-kit")]
pub mod conformance;
#[cfg(feature = "redis")]
pub(crate) mod leased;
pub(crate) mod memory;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "redis")]
pub(crate) mod remote;
#[cfg(feature = "redis")]
pub(crate) mod resilient;
pub mod url;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

#[cfg(feature = "redis")]
pub use leased::{Leased, LeasedSettings, Task};
#[cfg(feature = "redis")]
pub use remote::{Failure, FailureKind, PartialToll, Remote, RemoteResult, Server, Split};
#[cfg(feature = "redis")]
pub use resilient::{BreakerSettings, BreakerState, Resilient, ResilientSettings};
use tollkeeper_core::algorithm::State;
pub use tollkeeper_core::decision::admitted;
use tollkeeper_core::lease::Lease;
pub use tollkeeper_core::toll::TollRequest;
pub use tollkeeper_core::{
    Change, Due, Key, KeyCorrection, LimitReply, Reply, Secret, Toll, algorithm, charge, fingerprint,
};
use tollkeeper_core::{Charge, Slot, Time};

/// Decides tolls against shared state.
pub trait Store: fmt::Debug + Send + Sync {
    /// Decides a toll atomically: all its limits are charged, or none. The returned future must not borrow `toll`.
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, Reply>;

    /// As [`Store::decide`], for a store that wraps this one: `end` sees the reply first, and may change it. If the caller
    /// stops waiting, `end` is dropped. A store that calls `end` in its own future saves the wrapper a future around it.
    #[cfg(feature = "redis")]
    fn decide_then<'a>(
        &'a self,
        toll: &Toll,
        end: impl FnOnce(&mut Reply) + Send + 'a,
    ) -> StoreFuture<'a, Reply>
    where
        Self: Sized,
    {
        self.decide(toll).then(end)
    }

    /// Grants units of a key to this node in advance; `None` if the store did not answer, or has no leases. It is never
    /// retried. The returned future must not borrow `request`.
    fn lease(&self, _request: &LeaseRequest) -> StoreFuture<'_, Option<LeaseGrant>> {
        StoreFuture::Ready(None)
    }

    /// Refunds a charge or adds to it, at most once for each charge.
    fn correct<'a>(
        &'a self,
        charge: &'a Charge,
        corrections: &'a [KeyCorrection],
    ) -> StoreFuture<'a, Correction>;

    /// Releases a slot; false if it was no longer held.
    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>>;

    /// Restarts the time to live of a slot; false if it was no longer held.
    fn renew<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>>;

    /// Deletes the state of a key; false if there was none.
    fn forget<'a>(&'a self, key: Key<'a>) -> StoreFuture<'a, Result<bool, Unavailable>>;

    /// A receipt as text that only this store can have written.
    fn seal_charge(&self, charge: &Charge) -> String;

    /// Opens a receipt; `None` if this store did not write the text. This may need a call to a remote store.
    fn open_charge<'a>(&'a self, text: &'a str) -> StoreFuture<'a, Result<Option<Charge>, Unavailable>>;

    /// As [`Store::seal_charge`].
    fn seal_slot(&self, slot: &Slot) -> String;

    /// As [`Store::open_charge`].
    fn open_slot<'a>(&'a self, text: &'a str) -> StoreFuture<'a, Result<Option<Slot>, Unavailable>>;
}

/// A request for units of one key in advance.
#[derive(Clone, Debug)]
pub struct LeaseRequest {
    /// A toll with this key alone.
    pub toll: Toll,
    /// The most units to grant.
    pub want: u64,
    /// The terms.
    pub lease: Lease,
}

/// Units of a key that a store granted in advance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseGrant {
    /// How many; 0 if none fit.
    pub units: u64,
    /// The state of the key after the grant; `None` if it has none.
    pub state: Option<State>,
    /// The time on the store's clock.
    pub time: Time,
}

/// The store did not answer in time, or its breaker is open because it has failed too often.
///
/// The call may have taken effect or not. It is safe to retry: a charge is corrected at most once, and releasing,
/// renewing or forgetting twice has the same effect as once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Unavailable;

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the store did not answer: the call may have taken effect or not, and is safe to repeat")
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Unavailable {}

/// The result of a refund or a settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Correction {
    /// It was done.
    Done,
    /// Nothing was done: the charge had been corrected before.
    Repeated,
    /// Nothing was done: the charge is void, because it has drained or expired.
    Unknown,
    /// The store did not answer: it may have been done or not. It is safe to retry, because a charge is corrected at
    /// most once.
    Failed,
    /// Nothing was done: the store has no space to remember this correction. The charge stays valid: retry when other
    /// charges have become void.
    Full,
}

/// An answer that is there, or will be: a store in this process should cost no allocation.
pub enum StoreFuture<'a, T> {
    /// It is there.
    Ready(T),
    /// It will be.
    Later(Pin<Box<dyn Future<Output = T> + Send + 'a>>),
    /// It was there, and has been taken.
    Taken,
}

impl<T> StoreFuture<'_, T> {
    /// The answer of a store that never has to be waited for.
    ///
    /// # Panics
    ///
    /// If the answer is not there yet.
    #[inline]
    pub(crate) fn expect_ready(self) -> T {
        match self {
            StoreFuture::Ready(answer) => answer,
            _ => panic!("the memory store answers at once"),
        }
    }
}

#[cfg(feature = "redis")]
impl<'a, T: Unpin + Send + 'a> StoreFuture<'a, T> {
    /// The future on the heap, without room for an answer that is there. A future that waits for it stays below a
    /// kilobyte, above which allocators are much slower.
    pub(crate) fn boxed(self) -> Pin<Box<dyn Future<Output = T> + Send + 'a>> {
        match self {
            StoreFuture::Later(future) => future,
            ready => Box::pin(ready),
        }
    }

    /// Passes the answer to `end`, which may change it, when it is there.
    pub(crate) fn then(self, end: impl FnOnce(&mut T) + Send + 'a) -> StoreFuture<'a, T> {
        match self {
            StoreFuture::Ready(mut answer) => {
                end(&mut answer);
                StoreFuture::Ready(answer)
            }
            later => {
                let later = later.boxed();
                StoreFuture::Later(Box::pin(async move {
                    let mut answer = later.await;
                    end(&mut answer);
                    answer
                }))
            }
        }
    }
}

impl<T> fmt::Debug for StoreFuture<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StoreFuture::Ready(_) => "Ready(…)",
            StoreFuture::Later(_) => "Later(…)",
            StoreFuture::Taken => "Taken",
        })
    }
}

impl<T: Unpin> Future for StoreFuture<'_, T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        // In place, because an answer may be large.
        if let StoreFuture::Later(future) = &mut *self {
            let poll = future.as_mut().poll(context);
            if poll.is_ready() {
                *self = StoreFuture::Taken;
            }
            return poll;
        }
        match std::mem::replace(&mut *self, StoreFuture::Taken) {
            StoreFuture::Ready(answer) => Poll::Ready(answer),
            _ => panic!("an answer is given once: it was polled after it was ready"),
        }
    }
}
