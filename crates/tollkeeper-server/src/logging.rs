//! Logs: to standard error, as lines for people or as objects for programs.

use std::io::{self, IsTerminal};

use tracing::Level;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::args::Log;

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
