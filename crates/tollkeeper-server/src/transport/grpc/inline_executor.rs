//! Runs the calls of a connection inside the connection's own task.
//!
//! As separate tasks they would wake the connection with every response, and each response would be a write of its own.
//! Here all calls that arrived together run before the connection is polled again, and their responses share a write:
//! with eight calls in flight, one write instead of eight.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use hyper::rt::Executor;

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Calls that hyper has received and that have not started.
#[derive(Clone, Default)]
pub struct Inbox(Arc<Mutex<Vec<Call>>>);

impl<F> Executor<F> for Inbox
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, call: F) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Box::pin(call));
    }
}

/// A connection and its calls in flight.
pub struct Calls<'c, C> {
    /// The connection, which puts new calls into the inbox.
    pub connection: Pin<&'c mut C>,
    inbox: Inbox,
    /// Calls that wait for the store or for the rest of their message.
    waiting: FuturesUnordered<Call>,
}

impl<'c, C: Future> Calls<'c, C> {
    /// The calls of this connection.
    pub fn new(connection: Pin<&'c mut C>, inbox: Inbox) -> Calls<'c, C> {
        Calls { connection, inbox, waiting: FuturesUnordered::new() }
    }

    /// Runs the connection and its calls, until the connection has ended.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<C::Output> {
        loop {
            while let Poll::Ready(Some(())) = self.waiting.poll_next_unpin(context) {}
            if let Poll::Ready(ended) = self.connection.as_mut().poll(context) {
                return Poll::Ready(ended);
            }
            let arrived = std::mem::take(&mut *self.inbox.0.lock().unwrap_or_else(PoisonError::into_inner));
            if arrived.is_empty() {
                return Poll::Pending;
            }
            for mut call in arrived {
                // Most complete at once. The others need no waker here: `waiting` polls them above, with a real one.
                if call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
                    self.waiting.push(call);
                }
            }
        }
    }
}
