//! Where a thread counts.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// How many there are of everything that is counted.
pub(super) const STRIPES: usize = 16;
/// So many belong to one thread each; all other threads share the rest.
const OWN: usize = 8;

/// The stripe of a thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stripe(usize);

impl Stripe {
    /// That of this thread.
    #[inline]
    pub(super) fn mine() -> Stripe {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local!(static MINE: Cell<Stripe> = Cell::new(Stripe::of(NEXT.fetch_add(1, Relaxed))));
        MINE.get()
    }

    fn of(thread: usize) -> Stripe {
        Stripe(if thread < OWN { thread } else { OWN + thread % (STRIPES - OWN) })
    }

    /// Its place among all.
    #[inline]
    pub(super) fn index(self) -> usize {
        self.0
    }

    /// Adds to a counter of this stripe. Where nobody else writes there is no need for an addition in one step,
    /// which takes five times as long.
    #[inline]
    pub(super) fn add(self, counter: &AtomicU64, more: u64) {
        if self.0 < OWN {
            counter.store(counter.load(Relaxed).wrapping_add(more), Relaxed);
        } else {
            counter.fetch_add(more, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn however_many_threads_count_nothing_is_lost() {
        let counters: [AtomicU64; STRIPES] = Default::default();
        std::thread::scope(|scope| {
            for _ in 0..64 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        let stripe = Stripe::mine();
                        stripe.add(&counters[stripe.index()], 1);
                    }
                });
            }
        });
        assert_eq!(counters.iter().map(|counter| counter.load(Relaxed)).sum::<u64>(), 640_000);
    }
}
