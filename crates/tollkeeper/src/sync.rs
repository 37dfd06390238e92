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
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
