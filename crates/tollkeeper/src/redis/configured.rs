//! A store as a config file describes it.

use std::fmt;
use std::path::{Path, PathBuf};

use tollkeeper_core::Span;

use super::address::RedisTls;
use super::keys::Format;
use super::store::{RedisOptions, RedisStore};
use crate::config::{KeyFormat, RedisSettings};
use crate::memory::MemoryStore;
use crate::resilient::{BreakerSettings, Resilient, ResilientSettings};
use crate::store_url::RedisUrl;

impl Resilient<RedisStore> {
    /// Begins to connect, with these settings. Needs a tokio runtime.
    pub fn open(url: &RedisUrl, settings: &RedisSettings) -> Result<Resilient<RedisStore>, UnreadableFile> {
        let identity = match (&settings.cert, &settings.key) {
            (Some(cert), Some(key)) => Some((read(cert)?, read(key)?)),
            _ => None,
        };
        let options = RedisOptions {
            prefix: settings.prefix.clone(),
            format: match settings.key_format {
                KeyFormat::Readable => Format::Readable,
                KeyFormat::Compact => Format::Compact,
            },
            connections: settings.connections,
            tls: RedisTls { ca: settings.ca.as_deref().map(read).transpose()?, identity },
        };
        let breaker = BreakerSettings {
            failures: settings.breaker.failures,
            late_basis_points: settings.breaker.late.basis_points(),
            cooldown: Span::from(settings.breaker.cooldown),
        };
        let nodes = u32::try_from(settings.nodes).unwrap_or(u32::MAX);
        let resilience = ResilientSettings { deadline: settings.deadline, breaker, nodes };
        Ok(Resilient::new(RedisStore::open(url, options), resilience, MemoryStore::default()))
    }
}

/// A file with a certificate or a key that cannot be read.
#[derive(Debug)]
pub struct UnreadableFile {
    path: PathBuf,
    error: std::io::Error,
}

impl UnreadableFile {
    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl fmt::Display for UnreadableFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cannot be read: {}", self.path.display(), self.error)
    }
}

impl std::error::Error for UnreadableFile {}

fn read(path: &Path) -> Result<Vec<u8>, UnreadableFile> {
    std::fs::read(path).map_err(|error| UnreadableFile { path: path.to_owned(), error })
}
