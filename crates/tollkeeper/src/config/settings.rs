//! The settings of a config file beside its limits, with every default filled in.

use std::path::PathBuf;
use std::time::Duration;

use tollkeeper_core::Quota;

use crate::http::HeaderDialect;
use crate::percent::Percent;
use crate::store::memory::{Capacity, Snapshots};

/// The embedded store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemorySettings {
    /// The most keys that have a count of their own.
    pub max_keys: usize,
    /// The most bytes in sliding logs.
    pub max_log_bytes: usize,
    /// The file that counts are saved to.
    pub snapshot: Option<PathBuf>,
    /// The time between two snapshots.
    pub snapshot_every: Duration,
}

impl MemorySettings {
    /// What the store may hold.
    pub fn capacity(&self) -> Capacity {
        Capacity { max_keys: self.max_keys, max_log_bytes: self.max_log_bytes }
    }

    /// Where the store is saved, if it is.
    pub fn snapshots(&self) -> Option<Snapshots> {
        let path = self.snapshot.clone()?;
        Some(Snapshots { path, every: self.snapshot_every })
    }
}

/// How a Redis store is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisSettings {
    /// What all keys begin with.
    pub prefix: String,
    /// How long a decision may take.
    pub deadline: Duration,
    /// When the store is left alone for a while.
    pub breaker: BreakerSettings,
    /// Connections to each server.
    pub connections: usize,
    /// How many processes share the store.
    pub nodes: usize,
    /// What keys look like.
    pub key_format: KeyFormat,
    /// The certificates that the server's must descend from.
    pub ca: Option<PathBuf>,
    /// The certificate to present to the server.
    pub cert: Option<PathBuf>,
    /// Its private key.
    pub key: Option<PathBuf>,
}

/// When a store is left alone for a while.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BreakerSettings {
    /// After so many failures in a row.
    pub failures: u32,
    /// When so many of the last 100 answers were late.
    pub late: Percent,
    /// For so long.
    pub cooldown: Duration,
}

/// What the keys of a Redis store look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyFormat {
    /// They hold the values of facts.
    Readable,
    /// They hold a hash of them.
    Compact,
}

/// The SHA-256 of a token: whoever reads the config cannot use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenDigest(pub [u8; 32]);

/// TLS for all listeners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsSettings {
    /// The certificate chain.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The certificates that a client's must descend from.
    pub client_ca: Option<PathBuf>,
}

/// What the service logs beside what goes wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogSettings {
    /// How many refusals are logged at most, as a token bucket; none without it.
    pub refusals: Option<Quota>,
}

/// How the rate limit service for Envoy answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrpcSettings {
    /// The headers that Envoy is told to add.
    pub headers: Vec<HeaderDialect>,
}
