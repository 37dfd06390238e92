//! Appends lines to a file from a thread of its own, so that the log never delays a request.
//!
//! Lines go through a bounded queue. Those that find it full, or that cannot be written, are dropped and counted.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;

/// The capacity of the queue, in messages and in bytes.
pub(super) const QUEUE: usize = 16_384;
const QUEUE_BYTES: usize = 16 << 20;
/// How much is written with one call.
const BATCH_BYTES: usize = 64 << 10;
/// How often dropped lines are logged.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Queues lines for a file.
#[derive(Debug)]
pub struct LineLog {
    queue: SyncSender<LogMessage>,
    shared: Arc<Shared>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

/// What the writing thread and the callers share.
#[derive(Debug, Default)]
struct Shared {
    queued_bytes: AtomicUsize,
    dropped: AtomicU64,
}

enum LogMessage {
    Lines(Vec<u8>),
    /// The log is closed.
    End,
}

impl LineLog {
    /// Appends to a file, which only this user can read: lines may hold names or addresses of people. `what`
    /// names the lines in messages: `admissions`.
    pub fn open(file: &Path, what: &'static str) -> anyhow::Result<LineLog> {
        let opened = OpenOptions::new().append(true).create(true).mode(0o600).open(file);
        LineLog::to(
            opened.with_context(|| format!("cannot open {} for a log of {what}", file.display()))?,
            what,
        )
    }

    /// Writes to standard error.
    pub fn standard_error(what: &'static str) -> anyhow::Result<LineLog> {
        let stderr = io::stderr().as_fd().try_clone_to_owned().context("cannot write to standard error")?;
        LineLog::to(File::from(stderr), what)
    }

    /// Writes to an open file.
    pub(super) fn to(mut file: File, what: &'static str) -> anyhow::Result<LineLog> {
        let (queue, messages) = sync_channel(QUEUE);
        let shared = Arc::<Shared>::default();
        let writer = std::thread::Builder::new().name("line-log".to_owned()).spawn({
            let shared = Arc::clone(&shared);
            move || write_all(&messages, &mut file, &shared, what)
        });
        let writer =
            Mutex::new(Some(writer.with_context(|| format!("cannot start a thread for a log of {what}"))?));
        Ok(LineLog { queue, shared, writer })
    }

    /// Queues complete lines, or counts them as dropped.
    pub fn add(&self, lines: Vec<u8>) {
        if lines.is_empty() {
            return;
        }
        let (bytes, count) = (lines.len(), count(&lines));
        let queued = self.shared.queued_bytes.fetch_add(bytes, Relaxed);
        if queued + bytes > QUEUE_BYTES || self.queue.try_send(LogMessage::Lines(lines)).is_err() {
            self.shared.queued_bytes.fetch_sub(bytes, Relaxed);
            self.shared.dropped.fetch_add(count, Relaxed);
        }
    }

    /// The number of lines that were dropped so far.
    pub fn dropped(&self) -> u64 {
        self.shared.dropped.load(Relaxed)
    }

    /// Writes what is queued, and ends.
    pub fn close(&self) {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(writer) = writer
            && self.queue.send(LogMessage::End).is_ok()
        {
            // The thread only ends by returning: a panic has been reported.
            let _ = writer.join();
        }
    }
}

/// Writes messages until the log is closed.
fn write_all(messages: &Receiver<LogMessage>, file: &mut File, shared: &Shared, what: &'static str) {
    let mut report = DropReport { what, last: Instant::now(), known: 0, error: None };
    let (mut batch, mut is_open) = (Vec::with_capacity(BATCH_BYTES), true);
    while is_open {
        let mut next = match messages.recv_timeout(REPORT_INTERVAL) {
            Ok(message) => Some(message),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(LogMessage::End),
        };
        batch.clear();
        // Whatever else is queued is written with the same call.
        while let Some(message) = next {
            match message {
                LogMessage::Lines(lines) => batch.extend_from_slice(&lines),
                LogMessage::End => is_open = false,
            }
            next = if is_open && batch.len() < BATCH_BYTES { messages.try_recv().ok() } else { None };
        }
        shared.queued_bytes.fetch_sub(batch.len(), Relaxed);
        if let Err(error) = append(file, &batch) {
            shared.dropped.fetch_add(count(&batch), Relaxed);
            report.error = Some(error);
        }
        report.write(shared, !is_open);
    }
}

/// Appends whole lines, or nothing: a full disk must not leave half a line behind.
fn append(file: &mut File, lines: &[u8]) -> io::Result<()> {
    let before = file.metadata().map(|metadata| metadata.len());
    file.write_all(lines).inspect_err(|_| {
        if let Ok(before) = before {
            // If this fails too, readers of the log report the line that is cut off.
            let _ = file.set_len(before);
        }
    })
}

/// Logs once in a while how many lines were dropped.
struct DropReport {
    what: &'static str,
    last: Instant,
    known: u64,
    error: Option<io::Error>,
}

impl DropReport {
    fn write(&mut self, shared: &Shared, is_last: bool) {
        let what = self.what;
        if !is_last && self.last.elapsed() < REPORT_INTERVAL {
            return;
        }
        self.last = Instant::now();
        let dropped = shared.dropped.load(Relaxed);
        let count = dropped - std::mem::replace(&mut self.known, dropped);
        match self.error.take() {
            _ if count == 0 => {}
            Some(error) => tracing::warn!(count, "{count} {what} were not written to the log: {error}"),
            None => tracing::warn!(count, "{count} {what} were not written to the log: its queue was full"),
        }
    }
}

/// The number of lines.
pub(super) fn count(lines: &[u8]) -> u64 {
    lines.iter().filter(|byte| **byte == b'\n').count() as u64
}
