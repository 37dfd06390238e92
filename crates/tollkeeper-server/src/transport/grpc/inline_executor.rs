//! The calls of a connection, answered where they came in.
//!
//! As tasks of their own they would wake their connection with every answer, and each answer would be written by
//! itself. Here all that came together are answered before the connection goes on, and their answers leave together:
//! with eight calls on their way, one write instead of eight.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use hyper::rt::Executor;

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Calls that came in and have not begun.
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

/// A connection and its calls.
pub struct Calls<'c, C> {
    /// The connection, which leaves its calls in the inbox.
    pub connection: Pin<&'c mut C>,
    inbox: Inbox,
    /// Begun, and waiting for a store or a message.
    waiting: FuturesUnordered<Call>,
}

impl<'c, C: Future> Calls<'c, C> {
    /// Of this connection.
    pub fn new(connection: Pin<&'c mut C>, inbox: Inbox) -> Calls<'c, C> {
        Calls { connection, inbox, waiting: FuturesUnordered::new() }
    }

    /// Goes on until the connection has ended.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<C::Output> {
        loop {
            while let Poll::Ready(Some(())) = self.waiting.poll_next_unpin(context) {}
            if let Poll::Ready(ended) = self.connection.as_mut().poll(context) {
                return Poll::Ready(ended);
            }
            let came = std::mem::take(&mut *self.inbox.0.lock().unwrap_or_else(PoisonError::into_inner));
            if came.is_empty() {
                return Poll::Pending;
            }
            for mut call in came {
                // Most are answered at once. Nobody has to be woken for the others: they are looked at again above.
                if call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
                    self.waiting.push(call);
                }
            }
        }
    }
}
