//! The synchronisation that the store and the queues use.
//!
//! From the standard library, or, under `--cfg shuttle`, from a scheduler that tries many
//! interleavings of the same program: see `tests/shuttle.rs`.

#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic};
#[cfg(not(shuttle))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

/// Locks, whatever happened to the last holder: nothing that is held under these locks panics between
/// two writes that belong together.
///
/// The locks here are held for less time than it takes to go to sleep, or to carry a cache line to
/// another core and back: who does not get one looks again after a while, and a longer while each time,
/// so that those who wait leave the line to the one who holds it.
#[inline]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.try_lock() {
        Ok(guard) => guard,
        Err(_) => wait(mutex),
    }
}

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
