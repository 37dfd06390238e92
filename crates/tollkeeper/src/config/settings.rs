//! The settings of a config file other than its limits, with every default filled in.

use std::path::PathBuf;
use std::time::Duration;

use tollkeeper_core::CheckedQuota;

use crate::http::HeaderDialect;
use crate::percent::Percent;
use crate::store::memory::{Capacity, Snapshots};

/// Settings of the embedded store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemorySettings {
    /// The most keys that are counted separately.
    pub max_keys: usize,
    /// The most bytes in the logs of `sliding-log` limits.
    pub max_log_bytes: usize,
    /// The snapshot file that counts are saved to; `None` to save nothing.
    pub snapshot: Option<PathBuf>,
    /// The time between two snapshots.
    pub snapshot_every: Duration,
}

impl MemorySettings {
    /// The capacity of the store.
    pub fn capacity(&self) -> Capacity {
        Capacity { max_keys: self.max_keys, max_log_bytes: self.max_log_bytes }
    }

    /// Where and how often the store is saved; `None` if it is not.
    pub fn snapshots(&self) -> Option<Snapshots> {
        let path = self.snapshot.clone()?;
        Some(Snapshots { path, every: self.snapshot_every })
    }
}

/// Settings of a Redis store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisSettings {
    /// The prefix of all keys, such as `tk`.
    pub prefix: String,
    /// How long a decision may take before `on_store_failure` applies.
    pub deadline: Duration,
    /// When calls to the store are suspended.
    pub breaker: BreakerSettings,
    /// Connections to each server.
    pub connections: usize,
    /// How many processes share the store: each grants 1/`nodes` of a limit while the store does not answer.
    pub nodes: usize,
    /// Whether a request that the last state of a key certainly refuses is refused without asking the store.
    pub denial_bound: bool,
    /// Whether keys show the values of facts.
    pub key_format: KeyFormat,
    /// The CA certificates that the server's certificate is verified against.
    pub ca: Option<PathBuf>,
    /// The client certificate to present to the server.
    pub cert: Option<PathBuf>,
    /// The private key of `cert`.
    pub key: Option<PathBuf>,
}

/// When the breaker opens, which suspends calls to the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BreakerSettings {
    /// The number of consecutive failures that opens the breaker.
    pub failures: u32,
    /// The percentage of late replies among the last 100 that opens the breaker.
    pub late: Percent,
    /// How long the breaker stays open before the store is tried again.
    pub cooldown: Duration,
}

/// The format of the keys in a Redis store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyFormat {
    /// Keys contain the values of facts.
    Readable,
    /// Keys contain a hash of the values.
    Compact,
}

/// The SHA-256 of a token, so that reading the config does not reveal the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenDigest(pub [u8; 32]);

/// TLS for all listeners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsSettings {
    /// The certificate chain.
    pub cert: PathBuf,
    /// The private key of `cert`.
    pub key: PathBuf,
    /// The CA certificates that client certificates are verified against; without it, clients need none.
    pub client_ca: Option<PathBuf>,
}

/// What the server logs besides warnings and errors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogSettings {
    /// The most refusals that are logged, as a token bucket; `None` logs none.
    pub refusals: Option<CheckedQuota>,
}

/// Settings of the rate limit service for Envoy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrpcSettings {
    /// The rate-limit headers that responses ask Envoy to add.
    pub headers: Vec<HeaderDialect>,
}
