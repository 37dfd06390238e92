//! The event heap: what happens next, in microseconds of virtual time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Events by time. Events of one microsecond happen in the order in which they were added.
#[derive(Debug)]
pub struct Heap<E> {
    /// The time of each event, its number, and its index in `events`.
    order: BinaryHeap<Reverse<(u64, u64, usize)>>,
    events: Vec<Option<E>>,
    /// The indexes that are free.
    free: Vec<usize>,
    added: u64,
}

impl<E> Default for Heap<E> {
    fn default() -> Heap<E> {
        Heap { order: BinaryHeap::new(), events: Vec::new(), free: Vec::new(), added: 0 }
    }
}

impl<E> Heap<E> {
    /// Adds an event that happens at this time.
    pub fn add(&mut self, at: u64, event: E) {
        self.added += 1;
        let index = self.free.pop().unwrap_or_else(|| {
            self.events.push(None);
            self.events.len() - 1
        });
        self.events[index] = Some(event);
        self.order.push(Reverse((at, self.added, index)));
    }

    /// The time of the next event.
    pub fn next_time(&self) -> Option<u64> {
        self.order.peek().map(|Reverse((at, ..))| *at)
    }

    /// Removes the next event.
    pub fn pop(&mut self) -> Option<(u64, E)> {
        let Reverse((at, _, index)) = self.order.pop()?;
        self.free.push(index);
        Some((at, self.events[index].take().expect("every entry has its event")))
    }
}
