//! Runs pending calls on the thread of an event loop, which is woken once for all replies that arrive before it runs.
//!
//! The connections to the store stay on the engine's runtime. The rest of a call, such as reading its text and writing
//! the answer, is done by the thread that made it: a call needs no task, and its answer is not passed between threads.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::AcqRel};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;

use crate::engine_call::Pending;
use crate::process;

/// The pending calls of one thread. Each ends with a value of type `T`.
pub struct Calls<T: Send + 'static> {
    pending: FuturesUnordered<Pin<Box<dyn Future<Output = T> + Send>>>,
    sleeper: Arc<Sleeper>,
    waker: Waker,
}

/// Wakes the thread of the event loop, unless it is awake.
struct Sleeper {
    sleeps: AtomicBool,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl<T: Send + 'static> Calls<T> {
    /// No calls yet. `wake` is called from any thread, and must cause a [`Calls::run`] on this one.
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> Calls<T> {
        let sleeper = Arc::new(Sleeper { sleeps: AtomicBool::new(false), wake: Box::new(wake) });
        Calls { pending: FuturesUnordered::new(), waker: Waker::from(Arc::clone(&sleeper)), sleeper }
    }

    /// Adds a call, which the next [`Calls::run`] starts. It ends with what `done` makes of the answer.
    pub fn add<A: Send + 'static>(&mut self, call: Pending<A>, done: impl FnOnce(A) -> T + Send + 'static) {
        self.pending.push(Box::pin(async move { done(call.await) }));
    }

    /// Starts the calls that were added, in their order, continues those whose reply has arrived, and returns the values
    /// of those that have ended. Never waits.
    pub fn run(&mut self) -> Vec<T> {
        // Within the engine's runtime, so that the calls use the connections that are open there.
        let _entered = process::runtime().map(|runtime| runtime.enter());
        let mut ended = Vec::new();
        self.sleeper.sleeps.swap(false, AcqRel);
        self.poll(&mut ended);
        self.sleeper.sleeps.swap(true, AcqRel);
        // A reply that arrived during the first pass did not wake this thread: take it now.
        self.poll(&mut ended);
        ended
    }

    fn poll(&mut self, ended: &mut Vec<T>) {
        let mut context = Context::from_waker(&self.waker);
        loop {
            match self.pending.poll_next_unpin(&mut context) {
                Poll::Ready(Some(value)) => ended.push(value),
                Poll::Ready(None) | Poll::Pending => return,
            }
        }
    }
}

/// When the thread ends, the engine's runtime completes its calls, because some may have been sent already.
impl<T: Send + 'static> Drop for Calls<T> {
    fn drop(&mut self) {
        if let Ok(runtime) = process::runtime() {
            for call in std::mem::take(&mut self.pending) {
                drop(runtime.spawn(call));
            }
        }
    }
}

impl<T: Send + 'static> fmt::Debug for Calls<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calls").field("pending", &self.pending.len()).finish_non_exhaustive()
    }
}

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.sleeps.swap(false, AcqRel) {
            (self.wake)();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panicked_call_ends_and_the_others_continue() {
        let mut calls = Calls::new(|| {});
        calls.add(Pending::new(async { panic!("a bug in a store") }, || "failed"), |answer| answer);
        calls.add(Pending::new(async { "decided" }, || "failed"), |answer| answer);
        let mut ended = calls.run();
        ended.sort_unstable();
        assert_eq!(ended, ["decided", "failed"]);
    }
}
