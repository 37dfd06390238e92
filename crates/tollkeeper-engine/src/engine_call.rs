//! The result of a call: ready at once from a memory store, or pending on a remote one.

use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use crate::process;

/// The result of a call: ready, or pending.
#[derive(Debug)]
pub enum EngineCall<T> {
    /// The store is in this process.
    Ready(T),
    /// The store is remote.
    Pending(Pending<T>),
}

/// A call to a remote store: a future of its answer. Any executor can poll it, [`Pending::spawn`] runs it on the engine's
/// runtime. Dropping it cancels the call.
#[must_use = "nothing is asked before it is polled"]
pub struct Pending<T> {
    answer: Pin<Box<dyn Future<Output = T> + Send>>,
    panicked: fn() -> T,
}

impl<T: Send + 'static> EngineCall<T> {
    /// Blocks this thread until the call has ended, and returns the answer.
    pub fn wait(self) -> T {
        match self {
            EngineCall::Ready(answer) => answer,
            EngineCall::Pending(pending) => pending.wait(),
        }
    }
}

impl<T: Send + 'static> Pending<T> {
    /// A call whose answer is that of the future, or `panicked()` if the future panics: every call has an answer.
    pub(crate) fn new(answer: impl Future<Output = T> + Send + 'static, panicked: fn() -> T) -> Pending<T> {
        Pending { answer: Box::pin(answer), panicked }
    }

    /// Blocks this thread until the call has ended, and returns the answer.
    pub fn wait(self) -> T {
        // Within the engine's runtime, so that the call uses the connections that are open there.
        let _entered = process::runtime().map(|runtime| runtime.enter());
        let mut call = pin!(self);
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut context = Context::from_waker(&waker);
        loop {
            match call.as_mut().poll(&mut context) {
                Poll::Ready(answer) => return answer,
                Poll::Pending => thread::park(),
            }
        }
    }

    /// Runs the call on the engine's runtime, and calls `done` there with the answer.
    pub fn spawn(self, done: impl FnOnce(T) + Send + 'static) {
        match process::runtime() {
            Ok(runtime) => drop(runtime.spawn(async move { done(self.await) })),
            // No thread can be started: the store fails the same way, and the answer says so.
            Err(_) => done(self.wait()),
        }
    }
}

impl<T> Future for Pending<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let Pending { answer, panicked } = &mut *self;
        let polled = catch_unwind(AssertUnwindSafe(|| answer.as_mut().poll(context)));
        polled.unwrap_or_else(|_| Poll::Ready(panicked()))
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pending(…)")
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// The result of a future on a store in this process, which is ready when it is first polled.
pub(crate) fn at_once<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => unreachable!("the memory store answers at once"),
    }
}
