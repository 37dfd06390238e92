//! Where a thread counts.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// How many there are of everything that is counted.
pub(super) const STRIPES: usize = 16;
/// So many belong to one thread each while it lives; all other threads share the rest.
const OWN: usize = 8;

/// The stripe of a thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stripe(usize);

/// Who sits where.
struct Seats {
    /// A bit for each of the first stripes that belongs to a thread.
    taken: AtomicU64,
    /// Counts the threads that share.
    sharing: AtomicUsize,
}

static SEATS: Seats = Seats::new();

impl Seats {
    const fn new() -> Seats {
        Seats { taken: AtomicU64::new(0), sharing: AtomicUsize::new(0) }
    }

    fn take(&self) -> Stripe {
        let free = |taken: u64| Some(taken | (taken + 1)).filter(|taken| *taken < 1 << OWN);
        // What was counted by whoever had it before must be seen.
        Stripe(match self.taken.fetch_update(Ordering::Acquire, Ordering::Relaxed, free) {
            Ok(taken) => taken.trailing_ones() as usize,
            Err(_) => OWN + self.sharing.fetch_add(1, Ordering::Relaxed) % (STRIPES - OWN),
        })
    }

    fn leave(&self, stripe: Stripe) {
        if stripe.0 < OWN {
            self.taken.fetch_and(!(1 << stripe.0), Ordering::Release);
        }
    }
}

/// The seat of a thread: free for another when it ends.
struct Seat(Stripe);

impl Drop for Seat {
    fn drop(&mut self) {
        SEATS.leave(self.0);
    }
}

impl Stripe {
    /// That of this thread.
    #[inline]
    pub(super) fn mine() -> Stripe {
        thread_local!(static MINE: Seat = Seat(SEATS.take()));
        // A thread that is ending has none: it shares.
        MINE.try_with(|seat| seat.0).unwrap_or(Stripe(OWN))
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
            counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
        } else {
            counter.fetch_add(more, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_have_a_stripe_of_their_own_and_leave_it_to_others() {
        let seats = Seats::new();
        let all: Vec<Stripe> = (0..STRIPES + 1).map(|_| seats.take()).collect();
        let places: Vec<usize> = all.iter().map(|stripe| stripe.0).collect();
        assert_eq!(places, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 8]);
        seats.leave(all[STRIPES]);
        seats.leave(all[5]);
        seats.leave(all[2]);
        assert_eq!([(); 3].map(|()| seats.take().0), [2, 5, 9]);
    }

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
        assert_eq!(counters.iter().map(|counter| counter.load(Ordering::Relaxed)).sum::<u64>(), 640_000);
    }
}
