//! Opens the Redis store with the settings of a config file.

use std::fmt;
use std::path::{Path, PathBuf};

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tollkeeper_core::Span;

use super::address::RedisTls;
use super::keys::Format;
use super::store::{RedisOptions, RedisStore};
use crate::clock::Clock;
use crate::config::{KeyFormat, RedisSettings};
use crate::store::leased::{Leased, LeasedSettings};
use crate::store::memory::MemoryStore;
use crate::store::resilient::{BreakerSettings, Resilient, ResilientSettings};
use crate::store::url::RedisUrl;

impl Leased<Resilient<RedisStore>> {
    /// Starts to connect in the background, with these settings.
    pub fn open(
        url: &RedisUrl,
        settings: &RedisSettings,
    ) -> Result<Leased<Resilient<RedisStore>>, UnreadableFile> {
        let store = Resilient::open(url, settings)?;
        let leased = LeasedSettings { denial_bound: settings.denial_bound };
        Ok(Leased::new(store, leased, Clock::system()))
    }
}

impl Resilient<RedisStore> {
    /// Starts to connect in the background, with these settings.
    pub fn open(url: &RedisUrl, settings: &RedisSettings) -> Result<Resilient<RedisStore>, UnreadableFile> {
        let identity = match (&settings.cert, &settings.key) {
            (Some(cert), Some(key)) => Some((read(cert, &Holds::Certificate)?, read(key, &Holds::Key)?)),
            _ => None,
        };
        let ca = settings.ca.as_deref().map(|ca| read(ca, &Holds::Certificate)).transpose()?;
        let options = RedisOptions {
            prefix: settings.prefix.clone(),
            format: match settings.key_format {
                KeyFormat::Readable => Format::Readable,
                KeyFormat::Compact => Format::Compact,
            },
            connections: settings.connections,
            tls: RedisTls { ca, identity },
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

/// A certificate or key file that cannot be used.
pub struct UnreadableFile {
    path: PathBuf,
    why: String,
}

impl UnreadableFile {
    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is wrong with it, and what would be right.
    pub fn why(&self) -> &str {
        &self.why
    }
}

impl fmt::Display for UnreadableFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cannot be used: {}", self.path.display(), self.why)
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for UnreadableFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for UnreadableFile {}

/// What a file must contain.
enum Holds {
    Certificate,
    Key,
}

/// Reads a file, and checks that it contains what it should. A CA file without a certificate would make every
/// connection fail, with no hint at the reason.
fn read(path: &Path, holds: &Holds) -> Result<Vec<u8>, UnreadableFile> {
    let wrong = |why: String| UnreadableFile { path: path.to_owned(), why };
    let pem = std::fs::read(path).map_err(|error| wrong(error.to_string()))?;
    let first = match holds {
        Holds::Certificate => CertificateDer::from_pem_slice(&pem).map(drop),
        Holds::Key => PrivateKeyDer::from_pem_slice(&pem).map(drop),
    };
    first.map(|()| pem).map_err(|_| {
        wrong(match holds {
            Holds::Certificate => {
                "it contains no certificate (PEM with `-----BEGIN CERTIFICATE-----` is expected)".to_owned()
            }
            Holds::Key => {
                "it contains no private key (PEM with `-----BEGIN PRIVATE KEY-----` is expected)".to_owned()
            }
        })
    })
}
