//! Builds a limiter from limits, declared facts and a store.

use std::fmt;
use std::sync::Arc;

use tollkeeper_core::{DeclaredFact, InvalidPolicy, Limit, Policy};

use crate::clock::Clock;
use crate::limiter::{Backend, Limiter};
use crate::store::Store;
#[cfg(feature = "redis")]
use crate::store::leased::{Leased, LeasedSettings};
use crate::store::memory::{Capacity, MemoryStore};
#[cfg(feature = "redis")]
use crate::store::redis::{RedisOptions, RedisStore};
#[cfg(feature = "redis")]
use crate::store::resilient::{Resilient, ResilientSettings};
use crate::store::url::{InvalidStoreUrl, StoreUrl};

/// Builds a [`Limiter`].
#[derive(Debug, Default)]
pub struct Builder {
    limits: Vec<Limit>,
    facts: Vec<DeclaredFact>,
    store: Option<StoreChoice>,
    ipv6_prefix: Option<u8>,
}

/// The store of a limiter: a URL, or a store that is already open.
#[derive(Debug)]
#[non_exhaustive]
pub enum StoreChoice {
    /// To be opened: `memory://`, `redis://…`. The text is not kept, because it may contain a password.
    Url(Result<StoreUrl, InvalidStoreUrl>),
    /// The memory store.
    Memory(MemoryStore),
    /// Another store, and the clock for callers that wait.
    Other(Arc<dyn Store>, Clock),
}

impl From<&str> for StoreChoice {
    fn from(url: &str) -> StoreChoice {
        StoreChoice::Url(url.parse())
    }
}

impl From<String> for StoreChoice {
    fn from(url: String) -> StoreChoice {
        url.as_str().into()
    }
}

impl From<MemoryStore> for StoreChoice {
    fn from(store: MemoryStore) -> StoreChoice {
        StoreChoice::Memory(store)
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
    ///     .build()?;
    /// assert!(limiter.check(&facts! { "email" => "Alice@example.com" }).await?.allowed());
    /// assert!(!limiter.check(&facts! { "email" => " alice@EXAMPLE.com" }).await?.allowed());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn fact(mut self, fact: DeclaredFact) -> Builder {
        self.facts.push(fact);
        self
    }

    /// The store: `memory://` by default.
    #[must_use]
    pub fn store(self, store: impl Into<StoreChoice>) -> Builder {
        Builder { store: Some(store.into()), ..self }
    }

    /// Keys IPv6 addresses by this many leading bits, 64 by default.
    #[must_use]
    pub fn ipv6_prefix(self, bits: u8) -> Builder {
        Builder { ipv6_prefix: Some(bits), ..self }
    }

    /// Validates the limits and opens the store. A remote store connects in the background.
    pub fn build(self) -> Result<Limiter, BuildError> {
        let policy = Policy::new(self.limits).and_then(|policy| policy.declaring(self.facts));
        let policy = policy.map_err(BuildError::Policy)?;
        let policy = self.ipv6_prefix.into_iter().fold(policy, Policy::with_ipv6_prefix);
        match self.store {
            None => Ok(Limiter::embedded(policy, MemoryStore::default())),
            Some(StoreChoice::Url(Err(error))) => Err(BuildError::Store(error)),
            Some(StoreChoice::Url(Ok(url))) => match url {
                StoreUrl::Memory => {
                    Ok(Limiter::embedded(policy, MemoryStore::new(Capacity::default(), Clock::system())))
                }
                #[cfg(feature = "redis")]
                StoreUrl::Redis(redis) => {
                    let store = RedisStore::open(&redis, RedisOptions::default());
                    let store = Resilient::new(store, ResilientSettings::default(), MemoryStore::default());
                    let store = Leased::new(store, LeasedSettings::default(), Clock::system());
                    Ok(Limiter::with_store(policy, Arc::new(store)))
                }
                #[cfg(not(feature = "redis"))]
                StoreUrl::Redis(_) => Err(BuildError::Store(InvalidStoreUrl::NO_REDIS)),
            },
            Some(StoreChoice::Memory(store)) => Ok(Limiter::embedded(policy, store)),
            Some(StoreChoice::Other(store, clock)) => Ok(Limiter::new(policy, Backend::Remote(store), clock)),
        }
    }
}

/// Why a limiter cannot be built.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum BuildError {
    /// The limits are invalid.
    Policy(InvalidPolicy),
    /// The store URL is invalid, or needs a feature that is not enabled.
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

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for BuildError {}
