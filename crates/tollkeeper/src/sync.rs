//! Locks and atomics that tests can replace, for the stores, the queues and the limiter.
//!
//! They are those of the standard library or, with `--cfg shuttle`, of the shuttle scheduler, which runs the same
//! program with many interleavings: see `tests/shuttle.rs`.

#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic};
#[cfg(not(shuttle))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

/// Locks a mutex and ignores poisoning: no code under these locks panics between two writes that belong together.
///
/// These locks are held for less time than a thread needs to go to sleep, or a cache line to move to another core
/// and back. So a thread that does not get the lock spins, with growing pauses that leave the cache line to the
/// thread that holds it.
#[inline(always)]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.try_lock() {
        Ok(guard) => guard,
        Err(_) => wait(mutex),
    }
}

/// Spins for about 1,000 iterations, then blocks.
#[cold]
fn wait<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    #[cfg(not(shuttle))]
    for round in 5..10 {
        for _ in 0..1 << round {
            std::hint::spin_loop();
        }
        if let Ok(guard) = mutex.try_lock() {
            return guard;
        }
    }
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
