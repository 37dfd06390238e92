//! Metrics, traces, logs, top keys and the event stream.

pub mod admission_log;
pub mod events;
pub mod history;
pub mod line_log;
pub mod logging;
pub mod metrics;
pub mod otlp;
pub mod refusal_log;
pub mod store_health;
pub mod top_keys;
pub mod trace;
