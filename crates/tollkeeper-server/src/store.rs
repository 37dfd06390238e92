//! Where counts are kept: in this process, or in Redis for many of them.

use std::path::Path;
use std::sync::Arc;

use anyhow::bail;
use tollkeeper::config::{Config, MemorySettings, Servers, StoreUrl};
use tollkeeper::store::redis::RedisStore;
use tollkeeper::{Clock, Limiter, MemoryStore, Policy, Resilient, Restored};

/// A store that was opened.
#[derive(Clone, Debug)]
pub enum Store {
    /// In this process.
    Memory(MemoryStore),
    /// In Redis or Valkey.
    Redis(Arc<Resilient<RedisStore>>),
}

impl Store {
    /// Opens the store at `url`, with the settings of the config.
    pub fn open(url: &StoreUrl, config: &Config) -> anyhow::Result<Store> {
        match url {
            StoreUrl::Memory => open_memory(&config.memory).map(Store::Memory),
            StoreUrl::Redis(url) => Ok(Store::Redis(Arc::new(Resilient::open(url, &config.redis)?))),
        }
    }

    /// How many open files it needs: its connections, and as many while they are replaced.
    pub fn files(url: &StoreUrl, config: &Config) -> u64 {
        let StoreUrl::Redis(url) = url else { return 0 };
        // How many servers a cluster has is only known once it was asked.
        let servers = if let Servers::Cluster { .. } = url.servers { 32 } else { 4 };
        2 * servers * u64::try_from(config.redis.connections).unwrap_or(u64::MAX / 1_024)
    }

    /// A limiter on it.
    pub fn limiter(&self, policy: Policy) -> Limiter {
        match self {
            Store::Memory(store) => Limiter::embedded(policy, store.clone()),
            Store::Redis(store) => Limiter::with_store(policy, Arc::clone(store) as _),
        }
    }

    /// The states in this process: all of them, or those that stand in for a store that does not answer.
    pub fn memory(&self) -> &MemoryStore {
        match self {
            Store::Memory(store) => store,
            Store::Redis(store) => store.local(),
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
        bail!("memory.snapshot: there is no folder `{}` (make it, or name another)", folder.display());
    }
    let (store, restored) = MemoryStore::open(settings.capacity(), Clock::system(), snapshots)?;
    match restored {
        Restored::Nothing => tracing::info!("no snapshot at {}: starting empty", path.display()),
        Restored::Keys(keys) => tracing::info!("{keys} keys go on from {}", path.display()),
        Restored::Refused(error) => tracing::warn!("starting empty: {error}"),
    }
    Ok(store)
}
