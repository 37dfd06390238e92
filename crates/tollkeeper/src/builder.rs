//! Making a limiter.

use std::fmt;
use std::sync::Arc;

use tollkeeper_core::{InvalidPolicy, Limit, Policy};

use crate::clock::Clock;
use crate::limiter::Limiter;
use crate::memory::{Capacity, MemoryStore};
use crate::operation::Operation;
#[cfg(feature = "redis")]
use crate::redis::{RedisOptions, RedisStore};
#[cfg(feature = "redis")]
use crate::resilient::{Resilient, ResilientSettings};
use crate::store::Store;

/// Collects limits and says where their state is kept.
#[derive(Debug, Default)]
pub struct Builder {
    limits: Vec<Limit>,
    store: Option<Backend>,
    ipv6_prefix: Option<u8>,
}

/// Where state is kept: a URL, or a store that exists.
#[derive(Debug)]
pub enum Backend {
    /// To be opened: `memory://`.
    Url(String),
    /// In this process.
    Memory(MemoryStore),
    /// Elsewhere; the clock is for those who wait.
    Other(Arc<dyn Store>, Clock),
}

impl From<&str> for Backend {
    fn from(url: &str) -> Backend {
        Backend::Url(url.to_owned())
    }
}

impl From<String> for Backend {
    fn from(url: String) -> Backend {
        Backend::Url(url)
    }
}

impl From<MemoryStore> for Backend {
    fn from(store: MemoryStore) -> Backend {
        Backend::Memory(store)
    }
}

impl Builder {
    /// Adds a limit.
    #[must_use]
    pub fn limit(mut self, limit: Limit) -> Builder {
        self.limits.push(limit);
        self
    }

    /// Where state is kept: `memory://` unless said otherwise, or a [`MemoryStore`] of your own.
    #[must_use]
    pub fn store(self, store: impl Into<Backend>) -> Builder {
        Builder { store: Some(store.into()), ..self }
    }

    /// Keys IPv6 addresses by their first bits: 64 unless said otherwise.
    #[must_use]
    pub fn ipv6_prefix(self, bits: u8) -> Builder {
        Builder { ipv6_prefix: Some(bits), ..self }
    }

    /// Checks the limits and opens the store. A store elsewhere begins to connect, and is not waited for.
    pub fn build(self) -> Operation<impl Future<Output = Result<Limiter, BuildError>>> {
        Operation::new(async { self.open() })
    }

    fn open(self) -> Result<Limiter, BuildError> {
        let policy = Policy::new(self.limits).map_err(BuildError::Policy)?;
        let policy = self.ipv6_prefix.into_iter().fold(policy, Policy::with_ipv6_prefix);
        match self.store {
            None => Ok(Limiter::embedded(policy, MemoryStore::default())),
            Some(Backend::Url(url)) if url == "memory://" => {
                Ok(Limiter::embedded(policy, MemoryStore::new(Capacity::default(), Clock::system())))
            }
            #[cfg(feature = "redis")]
            Some(Backend::Url(url)) => match url.parse() {
                Ok(crate::store_url::StoreUrl::Redis(redis)) => {
                    let store = RedisStore::open(&redis, RedisOptions::default());
                    let store = Resilient::new(store, ResilientSettings::default(), MemoryStore::default());
                    Ok(Limiter::new(policy, Arc::new(store), None, Clock::system()))
                }
                _ => Err(BuildError::Store(url)),
            },
            #[cfg(not(feature = "redis"))]
            Some(Backend::Url(url)) => Err(BuildError::Store(url)),
            Some(Backend::Memory(store)) => Ok(Limiter::embedded(policy, store)),
            Some(Backend::Other(store, clock)) => Ok(Limiter::new(policy, store, None, clock)),
        }
    }
}

/// Why there is no limiter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BuildError {
    /// The limits do not make sense.
    Policy(InvalidPolicy),
    /// There is no such store.
    Store(String),
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BuildError::Policy(error) => write!(f, "{error}"),
            BuildError::Store(url) => {
                // What comes before the address may hold a password.
                let scheme = url.split_once("://").map_or(url.as_str(), |(scheme, _)| scheme);
                write!(f, "there is no store for `{scheme}://` in this build (try `memory://`)")
            }
        }
    }
}

impl std::error::Error for BuildError {}
