//! FIFO queues of callers that wait until a key admits them.
//!
//! There is no background task. The first waiter of a queue calls the store. When it leaves the queue, admitted or
//! dropped, it wakes the next one. A queue is removed when its last waiter leaves.

use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::task::{Context, Poll, Waker};

use tollkeeper_core::Toll;

use crate::sync::{Mutex, lock};

/// All queues, by key.
#[derive(Debug, Default)]
pub(crate) struct Queues(Mutex<QueueTable>);

#[derive(Debug, Default)]
struct QueueTable {
    queues: HashMap<Box<[u8]>, VecDeque<Waiter>>,
    joined: u64,
}

#[derive(Debug)]
struct Waiter {
    number: u64,
    waker: Option<Waker>,
}

/// A position in a queue. Dropping it leaves the queue.
#[derive(Debug)]
pub(crate) struct Seat<'q> {
    queues: &'q Queues,
    key: Box<[u8]>,
    number: u64,
}

impl Queues {
    /// The first key of a toll that has a queue.
    pub(crate) fn waited_for(&self, toll: &Toll) -> Option<Box<[u8]>> {
        let table = lock(&self.0);
        if table.queues.is_empty() {
            return None;
        }
        toll.dues()
            .map(|due| due.key.to_bytes().into_boxed_slice())
            .find(|key| table.queues.contains_key(key))
    }

    /// Joins the queue of a key at its end.
    pub(crate) fn join(&self, key: Box<[u8]>) -> Seat<'_> {
        let mut table = lock(&self.0);
        table.joined += 1;
        let number = table.joined;
        table.queues.entry(key.clone()).or_default().push_back(Waiter { number, waker: None });
        Seat { queues: self, key, number }
    }

    /// The number of queues.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        lock(&self.0).queues.len()
    }
}

impl Seat<'_> {
    pub(crate) fn key(&self) -> &[u8] {
        &self.key
    }

    /// Whether this is the first waiter of its queue.
    pub(crate) fn is_first(&self) -> bool {
        lock(&self.queues.0).queues[&self.key].front().is_some_and(|first| first.number == self.number)
    }

    /// Waits until this is the first waiter of its queue.
    pub(crate) async fn first(&self) {
        poll_fn(|context| self.poll_first(context)).await;
    }

    fn poll_first(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut table = lock(&self.queues.0);
        let queue = table.queues.get_mut(&self.key).expect("a queue exists while it has waiters");
        if queue.front().is_some_and(|first| first.number == self.number) {
            return Poll::Ready(());
        }
        let waiter = queue.iter_mut().find(|waiter| waiter.number == self.number);
        waiter.expect("a seat is in its queue").waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let mut table = lock(&self.queues.0);
        let queue = table.queues.get_mut(&self.key).expect("a queue exists while it has waiters");
        queue.retain(|waiter| waiter.number != self.number);
        let next = queue.front_mut().and_then(|first| first.waker.take());
        if queue.is_empty() {
            table.queues.remove(&self.key);
        }
        drop(table);
        if let Some(waker) = next {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_is_removed_with_its_last_waiter() {
        let queues = Queues::default();
        let join = |key: &[u8]| queues.join(key.into());
        let (first, second, other) = (join(b"key"), join(b"key"), join(b"other"));
        assert!(first.is_first() && !second.is_first() && other.is_first());
        drop(other);
        assert_eq!(queues.len(), 1);
        drop(first);
        assert!(second.is_first());
        drop(second);
        assert_eq!(queues.len(), 0);
    }
}
