//! Assigns every thread a stripe of the counters to write to.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The number of stripes of every counter.
pub(super) const STRIPES: usize = 16;
/// This many stripes are owned by one thread each while it lives; all other threads share the rest.
const OWN: usize = 8;

/// The stripe of a thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stripe(usize);

/// Tracks which stripes are owned.
struct Owners {
    /// One bit for each of the first [`OWN`] stripes: set while a thread owns it.
    taken: AtomicU64,
    /// Counts the threads that share, to distribute them.
    sharing: AtomicUsize,
}

static OWNERS: Owners = Owners::new();

impl Owners {
    const fn new() -> Owners {
        Owners { taken: AtomicU64::new(0), sharing: AtomicUsize::new(0) }
    }

    fn take(&self) -> Stripe {
        let free = |taken: u64| Some(taken | (taken + 1)).filter(|taken| *taken < 1 << OWN);
        // Acquire: the counts of the previous owner must be visible.
        Stripe(match self.taken.fetch_update(Ordering::Acquire, Ordering::Relaxed, free) {
            Ok(taken) => taken.trailing_ones() as usize,
            Err(_) => OWN + self.sharing.fetch_add(1, Ordering::Relaxed) % (STRIPES - OWN),
        })
    }

    fn release(&self, stripe: Stripe) {
        if stripe.0 < OWN {
            self.taken.fetch_and(!(1 << stripe.0), Ordering::Release);
        }
    }
}

/// A thread's stripe, released when the thread ends.
struct OwnedStripe(Stripe);

impl Drop for OwnedStripe {
    fn drop(&mut self) {
        OWNERS.release(self.0);
    }
}

impl Stripe {
    /// The stripe of this thread.
    #[inline]
    pub(super) fn mine() -> Stripe {
        thread_local!(static MINE: OwnedStripe = OwnedStripe(OWNERS.take()));
        // A thread that is ending has released its stripe: it shares one.
        MINE.try_with(|owned| owned.0).unwrap_or(Stripe(OWN))
    }

    /// Its index among all stripes.
    #[inline]
    pub(super) fn index(self) -> usize {
        self.0
    }

    /// Adds to a counter of this stripe. An owned stripe has no other writer, so it needs no atomic read-modify-write,
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
    fn first_threads_own_a_stripe_until_they_end() {
        let owners = Owners::new();
        let all: Vec<Stripe> = (0..STRIPES + 1).map(|_| owners.take()).collect();
        let places: Vec<usize> = all.iter().map(|stripe| stripe.0).collect();
        assert_eq!(places, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 8]);
        owners.release(all[STRIPES]);
        owners.release(all[5]);
        owners.release(all[2]);
        assert_eq!([(); 3].map(|()| owners.take().0), [2, 5, 9]);
    }

    #[test]
    fn no_count_is_lost_with_many_threads() {
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
