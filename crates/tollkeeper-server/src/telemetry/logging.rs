//! Logs: to standard error, as lines for people or as objects for programs.

use std::io::{self, IsTerminal};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::Level;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::command::args::Log;

/// Begins to log what `RUST_LOG` asks for, or else what is worth knowing.
pub fn begin(form: Log) {
    let asked = std::env::var("RUST_LOG").ok();
    let targets = asked.as_deref().map(str::parse::<Targets>);
    let filter = match &targets {
        Some(Ok(targets)) => targets.clone(),
        Some(Err(_)) | None => Targets::new().with_default(Level::INFO),
    };
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_target(false);
    match form {
        Log::Text => {
            let lines = lines.with_ansi(io::stderr().is_terminal());
            tracing_subscriber::registry().with(lines.with_filter(filter)).init();
        }
        Log::Json => tracing_subscriber::registry().with(lines.json().with_filter(filter)).init(),
    }
    if let (Some(text), Some(Err(error))) = (asked, targets) {
        tracing::warn!(
            "RUST_LOG is `{text}`, which is not a filter ({error}): try `info` or `tollkeeper=debug`"
        );
    }
}

/// A log line about something that clients can cause as often as they like: it is written once a minute at most.
#[derive(Debug, Default)]
pub struct OnceAMinute(Mutex<Written>);

#[derive(Debug, Default)]
struct Written {
    last: Option<Instant>,
    /// How often it was due since and was not written.
    left_out: u64,
}

impl OnceAMinute {
    /// Writes it, with how often it was left out since the last time; or leaves it out.
    pub fn write(&self, write: impl FnOnce(u64)) {
        let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if written.last.is_some_and(|last| now.duration_since(last) < Duration::from_secs(60)) {
            written.left_out += 1;
            return;
        }
        written.last = Some(now);
        write(std::mem::take(&mut written.left_out));
    }
}
