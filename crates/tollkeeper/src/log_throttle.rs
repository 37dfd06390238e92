//! A line of the log that could repeat itself with every request: one a second says as much as a thousand.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tollkeeper_core::Time;

/// A line, and when it was written.
#[derive(Debug, Default)]
pub(crate) struct LogThrottle {
    /// When it was last written, in seconds, and how often it was not since.
    written: AtomicU64,
    silent: AtomicU64,
}

impl LogThrottle {
    /// Writes it, with how often it was not written since, unless it was in this second.
    pub(crate) fn write(&self, now: Time, write: impl FnOnce(u64)) {
        let second = now.as_micros() / 1_000_000;
        if self.written.swap(second, Relaxed) == second {
            self.silent.fetch_add(1, Relaxed);
        } else {
            write(self.silent.swap(0, Relaxed));
        }
    }
}
