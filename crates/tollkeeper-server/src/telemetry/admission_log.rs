//! The admission log: a line for every limit that charged an admitted request, in the format that `verify` reads.
//!
//! Lines that find the queue full are dropped and counted. `verify` can still judge such a log: a dropped line makes a
//! history look smaller, never larger.

use std::path::Path;
use std::sync::Arc;

use tollkeeper::DecidedToll;
use tollkeeper_engine::api::redact::Redactor;

use crate::history;
use crate::telemetry::line_log::LineLog;

/// What the lines are, for messages.
const ADMISSIONS: &str = "admissions";

/// Queues the lines of admissions for the log.
#[derive(Debug)]
pub struct AdmissionLog {
    lines: LineLog,
    redactor: Arc<Redactor>,
}

impl AdmissionLog {
    /// Appends to a file.
    pub fn open(file: &Path, redactor: Arc<Redactor>) -> anyhow::Result<AdmissionLog> {
        Ok(AdmissionLog { lines: LineLog::open(file, ADMISSIONS)?, redactor })
    }

    /// Queues the lines of a decision, or counts them as dropped.
    pub fn add(&self, decided: &DecidedToll) {
        let mut lines = Vec::new();
        history::write(decided, &self.redactor, &mut lines);
        self.lines.add(lines);
    }

    /// The number of lines that were dropped so far.
    pub fn dropped(&self) -> u64 {
        self.lines.dropped()
    }

    /// Writes what is queued, and ends.
    pub fn close(&self) {
        self.lines.close();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{self, Read as _};
    use std::os::fd::OwnedFd;

    use tollkeeper::{Limit, Limiter, Quota, facts};

    use super::*;
    use crate::telemetry::line_log::{QUEUE, count};

    /// The reader of a pipe reads nothing until the queue is full, so the thread that writes is stuck.
    #[test]
    fn lines_beyond_the_queue_are_dropped_and_counted() {
        let (mut reader, writer) = io::pipe().unwrap();
        let lines = LineLog::to(File::from(OwnedFd::from(writer)), ADMISSIONS).unwrap();
        let log = AdmissionLog { lines, redactor: Arc::default() };
        let limiter =
            Limiter::builder().limit(Limit::new("all", Quota::per_second(1_000)).by("user")).build();
        let alice = facts! { "user" => "alice" };
        let decision = limiter.unwrap().check(&alice).wait().unwrap();
        // The pipe and one batch hold a few thousand lines.
        let added = 2 * QUEUE as u64;
        (0..added).for_each(|_| log.add(&decision));
        assert!(log.dropped() > 0);

        let read = std::thread::spawn(move || {
            let mut text = Vec::new();
            reader.read_to_end(&mut text).unwrap();
            count(&text)
        });
        log.close();
        let dropped = log.dropped();
        drop(log);
        assert_eq!(read.join().unwrap() + dropped, added, "every line is written or counted");
    }
}
