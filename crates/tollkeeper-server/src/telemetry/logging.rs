//! Sets up logging to standard error, as text or JSON lines, and limits the rate of repeated lines.

use std::io::{self, IsTerminal};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::Level;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::command::args::Log;

/// Starts logging with the filter in `RUST_LOG`, or at level `info` without it.
pub fn begin(form: Log) {
    let variable = std::env::var("RUST_LOG").ok();
    let targets = variable.as_deref().map(str::parse::<Targets>);
    let filter = match &targets {
        Some(Ok(targets)) => targets.clone(),
        // h2 warns about every connection that floods it: clients could fill the log.
        Some(Err(_)) | None => Targets::new().with_default(Level::INFO).with_target("h2", Level::ERROR),
    };
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_target(false);
    match form {
        Log::Text => {
            let lines = lines.with_ansi(io::stderr().is_terminal());
            tracing_subscriber::registry().with(lines.with_filter(filter)).init();
        }
        Log::Json => tracing_subscriber::registry().with(lines.json().with_filter(filter)).init(),
    }
    if let (Some(text), Some(Err(error))) = (variable, targets) {
        tracing::warn!(
            "RUST_LOG: `{text}` is not a filter, logging at level info: {error} (try `info` or `tollkeeper=debug`)"
        );
    }
}

/// Writes a log line at most once a minute, for events that clients can cause at any rate.
#[derive(Debug, Default)]
pub struct OnceAMinute(Mutex<Written>);

#[derive(Debug, Default)]
struct Written {
    last: Option<Instant>,
    /// How many lines were suppressed since `last`.
    suppressed: u64,
}

impl OnceAMinute {
    /// Calls `write` with the number of lines suppressed since the last one, or suppresses this one.
    pub fn write(&self, write: impl FnOnce(u64)) {
        let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if written.last.is_some_and(|last| now.duration_since(last) < Duration::from_secs(60)) {
            written.suppressed += 1;
            return;
        }
        written.last = Some(now);
        write(std::mem::take(&mut written.suppressed));
    }
}
