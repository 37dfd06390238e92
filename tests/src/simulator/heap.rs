//! The event heap: what happens next, in microseconds of virtual time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// Events by time. Events of one microsecond happen in the order in which they were added.
#[derive(Debug)]
pub struct Heap<E> {
    order: BinaryHeap<Reverse<(u64, u64)>>,
    events: BTreeMap<u64, E>,
    added: u64,
}

impl<E> Default for Heap<E> {
    fn default() -> Heap<E> {
        Heap { order: BinaryHeap::new(), events: BTreeMap::new(), added: 0 }
    }
}

impl<E> Heap<E> {
    /// Adds an event that happens at this time.
    pub fn add(&mut self, at: u64, event: E) {
        self.added += 1;
        self.order.push(Reverse((at, self.added)));
        self.events.insert(self.added, event);
    }

    /// The time of the next event.
    pub fn next_time(&self) -> Option<u64> {
        self.order.peek().map(|Reverse((at, _))| *at)
    }

    /// Removes the next event.
    pub fn pop(&mut self) -> Option<(u64, E)> {
        let Reverse((at, number)) = self.order.pop()?;
        Some((at, self.events.remove(&number).expect("every entry has its event")))
    }
}
