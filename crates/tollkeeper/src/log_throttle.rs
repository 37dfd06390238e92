//! Limits a log line that could be written for every request to once a second.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tollkeeper_core::Time;

/// The throttle of one log line.
#[derive(Debug, Default)]
pub(crate) struct LogThrottle {
    /// When the line was last written, in seconds, and how often it was skipped since.
    written: AtomicU64,
    silent: AtomicU64,
}

impl LogThrottle {
    /// Calls `write` with the number of skipped lines, unless the line was already written in this second.
    pub(crate) fn write(&self, now: Time, write: impl FnOnce(u64)) {
        let second = now.as_micros() / 1_000_000;
        if self.written.swap(second, Relaxed) == second {
            self.silent.fetch_add(1, Relaxed);
        } else {
            write(self.silent.swap(0, Relaxed));
        }
    }
}
