//! Making a limiter.

use std::fmt;
use std::sync::Arc;

use tollkeeper_core::{DeclaredFact, InvalidPolicy, Limit, Policy};

use crate::clock::Clock;
use crate::limiter::Limiter;
use crate::limiter::operation::Operation;
use crate::store::Store;
use crate::store::memory::{Capacity, MemoryStore};
#[cfg(feature = "redis")]
use crate::store::redis::{RedisOptions, RedisStore};
#[cfg(feature = "redis")]
use crate::store::resilient::{Resilient, ResilientSettings};
use crate::store::url::{InvalidStoreUrl, StoreUrl};

/// Collects limits and says where their state is kept.
#[derive(Debug, Default)]
pub struct Builder {
    limits: Vec<Limit>,
    facts: Vec<DeclaredFact>,
    store: Option<Backend>,
    ipv6_prefix: Option<u8>,
}

/// Where state is kept: a URL, or a store that exists.
#[derive(Debug)]
pub enum Backend {
    /// To be opened: `memory://`, `redis://…`. The text is not kept, because it may hold a password.
    Url(Result<StoreUrl, InvalidStoreUrl>),
    /// In this process.
    Memory(MemoryStore),
    /// Elsewhere; the clock is for those who wait.
    Other(Arc<dyn Store>, Clock),
}

impl From<&str> for Backend {
    fn from(url: &str) -> Backend {
        Backend::Url(url.parse())
    }
}

impl From<String> for Backend {
    fn from(url: String) -> Backend {
        url.as_str().into()
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

    /// Declares a fact whose raw values are normalised or hashed wherever they enter: in every call of the limiter,
    /// and in the values of `allow` and overrides.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollkeeper::{DeclaredFact, Limit, Limiter, Quota, facts};
    ///
    /// let limiter = Limiter::builder()
    ///     .fact(DeclaredFact::new("email").trim().lowercase())
    ///     .limit(Limit::new("login", Quota::per_minute(1)).by("email"))
    ///     .build()
    ///     .await?;
    /// assert!(limiter.check(&facts! { "email" => "Alice@example.com" }).await?.allowed());
    /// assert!(!limiter.check(&facts! { "email" => " alice@EXAMPLE.com" }).await?.allowed());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn fact(mut self, fact: DeclaredFact) -> Builder {
        self.facts.push(fact);
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
        let policy = Policy::new(self.limits).and_then(|policy| policy.declaring(self.facts));
        let policy = policy.map_err(BuildError::Policy)?;
        let policy = self.ipv6_prefix.into_iter().fold(policy, Policy::with_ipv6_prefix);
        match self.store {
            None => Ok(Limiter::embedded(policy, MemoryStore::default())),
            Some(Backend::Url(Err(error))) => Err(BuildError::Store(error)),
            Some(Backend::Url(Ok(url))) => match url {
                StoreUrl::Memory => {
                    Ok(Limiter::embedded(policy, MemoryStore::new(Capacity::default(), Clock::system())))
                }
                #[cfg(feature = "redis")]
                StoreUrl::Redis(redis) => {
                    let store = RedisStore::open(&redis, RedisOptions::default());
                    let store = Resilient::new(store, ResilientSettings::default(), MemoryStore::default());
                    Ok(Limiter::new(policy, Arc::new(store), None, Clock::system()))
                }
                #[cfg(not(feature = "redis"))]
                StoreUrl::Redis(_) => Err(BuildError::Store(InvalidStoreUrl::NO_REDIS)),
            },
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
    /// The URL is not that of a store, or of one that this build does not have.
    Store(InvalidStoreUrl),
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BuildError::Policy(error) => write!(f, "{error}"),
            BuildError::Store(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for BuildError {}
