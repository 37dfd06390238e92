//! Lines of callers that wait for a key: first come, first served.
//!
//! Nothing runs in the background. Whoever is first in a line asks the store, and when it leaves the
//! line, admitted or dropped, it wakes the next. A line lives as long as somebody stands in it.

use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::task::{Context, Poll, Waker};

use tollkeeper_core::Toll;

use crate::sync::{Mutex, lock};

/// All lines, by key.
#[derive(Debug, Default)]
pub(crate) struct Queues(Mutex<Lines>);

#[derive(Debug, Default)]
struct Lines {
    lines: HashMap<Box<[u8]>, VecDeque<Waiter>>,
    joined: u64,
}

#[derive(Debug)]
struct Waiter {
    number: u64,
    waker: Option<Waker>,
}

/// A place in a line, left when dropped.
#[derive(Debug)]
pub(crate) struct Seat<'q> {
    queues: &'q Queues,
    key: Box<[u8]>,
    number: u64,
}

impl Queues {
    /// The first key of a toll that somebody waits for.
    pub(crate) fn waited_for(&self, toll: &Toll) -> Option<Box<[u8]>> {
        let lines = lock(&self.0);
        if lines.lines.is_empty() {
            return None;
        }
        toll.dues().map(|due| due.key.to_bytes().into_boxed_slice()).find(|key| lines.lines.contains_key(key))
    }

    /// Joins the line of a key, behind everybody who is there.
    pub(crate) fn join(&self, key: Box<[u8]>) -> Seat<'_> {
        let mut lines = lock(&self.0);
        lines.joined += 1;
        let number = lines.joined;
        lines.lines.entry(key.clone()).or_default().push_back(Waiter { number, waker: None });
        Seat { queues: self, key, number }
    }

    /// How many lines there are.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        lock(&self.0).lines.len()
    }
}

impl Seat<'_> {
    pub(crate) fn key(&self) -> &[u8] {
        &self.key
    }

    /// Whether nobody stands before this one.
    pub(crate) fn is_first(&self) -> bool {
        lock(&self.queues.0).lines[&self.key].front().is_some_and(|first| first.number == self.number)
    }

    /// Waits until nobody stands before this one.
    pub(crate) async fn first(&self) {
        poll_fn(|context| self.poll_first(context)).await;
    }

    fn poll_first(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut lines = lock(&self.queues.0);
        let line = lines.lines.get_mut(&self.key).expect("a line lives while somebody stands in it");
        if line.front().is_some_and(|first| first.number == self.number) {
            return Poll::Ready(());
        }
        let waiter = line.iter_mut().find(|waiter| waiter.number == self.number);
        waiter.expect("a seat is in its line").waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let mut lines = lock(&self.queues.0);
        let line = lines.lines.get_mut(&self.key).expect("a line lives while somebody stands in it");
        line.retain(|waiter| waiter.number != self.number);
        let next = line.front_mut().and_then(|first| first.waker.take());
        if line.is_empty() {
            lines.lines.remove(&self.key);
        }
        drop(lines);
        if let Some(waker) = next {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_lives_as_long_as_somebody_stands_in_it() {
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
