//! The store of counters: in this process, or in Redis and shared by several nodes.

use std::path::Path;
use std::sync::Arc;

use anyhow::bail;
use tollkeeper::config::{Config, MemorySettings, Servers, StoreUrl};
use tollkeeper::store::redis::RedisStore;
use tollkeeper::store::{BreakerState, Leased, Resilient};
use tollkeeper::{Clock, Limiter, MemoryStore, Policy, Restored};

/// An open store.
#[derive(Clone, Debug)]
pub enum Store {
    /// In this process.
    Memory(MemoryStore),
    /// In Redis or Valkey.
    Redis(Arc<Leased<Resilient<RedisStore>>>),
}

impl Store {
    /// Opens the store at `url`, with the settings of the config.
    pub fn open(url: &StoreUrl, config: &Config) -> anyhow::Result<Store> {
        match url {
            StoreUrl::Memory => open_memory(&config.memory).map(Store::Memory),
            StoreUrl::Redis(url) => Ok(Store::Redis(Arc::new(Leased::open(url, &config.redis)?))),
            _ => anyhow::bail!("this server has no store of this kind"),
        }
    }

    /// How many open files the store needs: its connections, twice because they may be replaced while still open.
    pub fn files(url: &StoreUrl, config: &Config) -> u64 {
        let StoreUrl::Redis(url) = url else { return 0 };
        // The size of a cluster is known only after connecting, so assume 32 servers.
        let servers = if let Servers::Cluster { .. } = url.servers { 32 } else { 4 };
        2 * servers * u64::try_from(config.redis.connections).unwrap_or(u64::MAX / 1_024)
    }

    /// A limiter on this store.
    pub fn limiter(&self, policy: Policy) -> Limiter {
        match self {
            Store::Memory(store) => Limiter::embedded(policy, store.clone()),
            Store::Redis(store) => Limiter::with_store(policy, Arc::clone(store) as _),
        }
    }

    /// The state of the breaker; closed for a store in this process.
    pub fn breaker(&self) -> BreakerState {
        match self {
            Store::Memory(_) => BreakerState::Closed,
            Store::Redis(store) => store.inner().breaker(),
        }
    }

    /// The states in this process: all of them, or the local fallback of a remote store.
    pub fn memory(&self) -> &MemoryStore {
        match self {
            Store::Memory(store) => store,
            Store::Redis(store) => store.inner().local(),
        }
    }
}

fn open_memory(settings: &MemorySettings) -> anyhow::Result<MemoryStore> {
    let Some(snapshots) = settings.snapshots() else {
        return Ok(MemoryStore::new(settings.capacity(), Clock::system()));
    };
    let path = snapshots.path.clone();
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !folder.is_dir() {
        bail!("memory.snapshot: folder `{}` does not exist (create it, or choose another)", folder.display());
    }
    let (store, restored) = MemoryStore::open(settings.capacity(), Clock::system(), snapshots)?;
    match restored {
        Restored::Nothing => tracing::info!("no snapshot at {}: starting empty", path.display()),
        Restored::Keys(keys) => tracing::info!("restored {keys} keys from {}", path.display()),
        Restored::Refused(error) => tracing::warn!("starting empty: {error}"),
    }
    Ok(store)
}
