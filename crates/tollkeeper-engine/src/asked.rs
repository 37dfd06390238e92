//! The answer of an engine: ready at once, or pending on a remote store.

use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use crate::process;

/// The answer to a call: ready, or pending.
#[derive(Debug)]
pub enum Asked<T> {
    /// The store is in this process.
    Ready(T),
    /// The store is remote.
    Pending(Pending<T>),
}

/// The answer of a remote store. Any executor can poll it, or the engine runs it. Dropping it cancels the call.
#[must_use = "nothing is asked before it is polled"]
pub struct Pending<T>(Pin<Box<dyn Future<Output = T> + Send>>);

impl<T: Send + 'static> Asked<T> {
    /// The answer. Blocks this thread until it is there.
    pub fn wait(self) -> T {
        match self {
            Asked::Ready(answer) => answer,
            Asked::Pending(pending) => pending.wait(),
        }
    }
}

impl<T: Send + 'static> Pending<T> {
    pub(crate) fn new(future: impl Future<Output = T> + Send + 'static) -> Pending<T> {
        Pending(Box::pin(future))
    }

    /// Blocks this thread until the answer is there.
    pub fn wait(self) -> T {
        // Within the engine's runtime, so that the call uses the connections that are open there.
        let _entered = process::runtime().map(|runtime| runtime.enter());
        let mut future = pin!(self.0);
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut context = Context::from_waker(&waker);
        loop {
            match future.as_mut().poll(&mut context) {
                Poll::Ready(answer) => return answer,
                Poll::Pending => thread::park(),
            }
        }
    }

    /// Runs the call on the engine's runtime, and calls `done` there with the answer.
    pub fn spawn(self, done: impl FnOnce(T) + Send + 'static) {
        match process::runtime() {
            Ok(runtime) => drop(runtime.spawn(async move { done(self.0.await) })),
            // No thread can be started: the store fails the same way, and the answer says so.
            Err(_) => done(self.wait()),
        }
    }
}

impl<T> Future for Pending<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        self.0.as_mut().poll(context)
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
