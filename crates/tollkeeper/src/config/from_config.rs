//! Builds a limiter from a config file.

use std::path::Path;
#[cfg(feature = "redis")]
use std::sync::Arc;

use crate::clock::Clock;
use crate::limiter::Limiter;
#[cfg(feature = "redis")]
use crate::store::leased::Leased;
use crate::store::memory::{MemoryStore, Restored, SnapshotError};

#[cfg(feature = "redis")]
use super::StoreUrl;
use super::settings::MemorySettings;
use super::{Config, ReadError};

impl Limiter {
    /// Reads a config file and opens its store. Counts that were saved there are restored.
    ///
    /// Warnings about the file and the result of restoring a snapshot are dropped. To see them, call
    /// [`Config::read`] and [`MemorySettings::open`] instead.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollkeeper::{Limiter, facts};
    ///
    /// # let folder = std::env::temp_dir().join(format!("tollkeeper-from-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder)?;
    /// # let path = folder.join("tollkeeper.yaml");
    /// std::fs::write(&path, "
    /// limits:
    ///   - { name: per-user, by: user, rate: 100/min, burst: 2 }
    ///   - { name: per-ip, by: ip, rate: 1000/min }
    /// ")?;
    /// let limiter = Limiter::from_config(&path)?;
    /// let alice = facts! { "user" => "alice", "ip" => "192.0.2.7" };
    /// assert!(limiter.check(&alice).cost(2).await?.allowed());
    /// assert!(!limiter.check(&alice).await?.allowed());
    /// # std::fs::remove_dir_all(&folder)?;
    /// # Ok(()) }
    /// ```
    pub fn from_config(path: impl AsRef<Path>) -> Result<Limiter, ReadError> {
        let (config, _) = Config::read(path.as_ref())?;
        config.limiter()
    }
}

impl Config {
    /// A limiter with the limits and the store of this config. Counts that were saved there are restored. Fails if
    /// a file that the config names, such as a certificate, cannot be read, or if another process saves to the same
    /// snapshot.
    pub fn limiter(&self) -> Result<Limiter, ReadError> {
        let policy = self.policy.clone();
        #[cfg(feature = "redis")]
        if let StoreUrl::Redis(url) = &self.store {
            let store = Leased::open(url, &self.redis).map_err(|error| ReadError::Unreadable {
                path: error.path().to_owned(),
                reason: error.why().to_owned(),
            })?;
            return Ok(Limiter::with_store(policy, Arc::new(store)));
        }
        let (store, _) = self.memory.open(Clock::system()).map_err(|error| ReadError::Unreadable {
            path: error.path().to_owned(),
            reason: error.cause(),
        })?;
        Ok(Limiter::embedded(policy, store))
    }
}

impl MemorySettings {
    /// Opens the embedded store and restores its snapshot. Fails if another process saves to the same snapshot.
    pub fn open(&self, clock: Clock) -> Result<(MemoryStore, Restored), SnapshotError> {
        match self.snapshots() {
            Some(snapshots) => MemoryStore::open(self.capacity(), clock, snapshots),
            None => Ok((MemoryStore::new(self.capacity(), clock), Restored::Nothing)),
        }
    }
}
