//! Opens the memory store and the Redis store for the conformance suite.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tollkeeper::config::{RedisUrl, Servers, StoreUrl};
use tollkeeper::store::redis::keys::Format;
use tollkeeper::store::redis::{RedisOptions, RedisStore};
use tollkeeper::store::{FailureKind, Resilient, ResilientSettings, Store};
use tollkeeper::{Limiter, MemoryStore, Policy, Time};

use crate::redis::Client;
use tollkeeper::store::conformance::{StoredKey, TestedStore, Trouble};

/// The memory store.
#[derive(Debug, Default)]
pub struct Memory(Mutex<HashMap<String, MemoryStore>>);

impl Memory {
    fn store(&self, namespace: &str) -> MemoryStore {
        self.0.lock().expect("not poisoned").entry(namespace.to_owned()).or_default().clone()
    }
}

impl TestedStore for Memory {
    fn name(&self) -> &str {
        "memory"
    }

    fn open(&self, namespace: &str) -> Arc<dyn Store> {
        Arc::new(self.store(namespace))
    }

    fn limiter(&self, namespace: &str, policy: Policy) -> Limiter {
        Limiter::embedded(policy, self.store(namespace))
    }
}

/// The Redis store.
pub struct Redis {
    name: &'static str,
    url: RedisUrl,
    format: Format,
    /// Connects to every server that holds keys.
    servers: Box<dyn Fn() -> Vec<Client> + Send + Sync>,
    opened: Mutex<HashMap<String, Vec<Arc<Resilient<RedisStore>>>>>,
}

/// Long enough for a busy machine.
const PATIENT: Duration = Duration::from_secs(20);

impl Redis {
    /// The store at this URL; `servers` connects to every server that holds keys.
    pub fn new(
        name: &'static str,
        url: &str,
        servers: impl Fn() -> Vec<Client> + Send + Sync + 'static,
    ) -> Redis {
        let Ok(StoreUrl::Redis(url)) = url.parse() else { panic!("{url} is not a Redis URL") };
        Redis { name, url, format: Format::Readable, servers: Box::new(servers), opened: Mutex::default() }
    }

    /// The same with compact keys.
    #[must_use]
    pub fn compact(self) -> Redis {
        Redis { format: Format::Compact, ..self }
    }
}

impl TestedStore for Redis {
    fn name(&self) -> &str {
        self.name
    }

    fn open(&self, namespace: &str) -> Arc<dyn Store> {
        let options =
            RedisOptions { prefix: namespace.to_owned(), format: self.format, ..RedisOptions::default() };
        let settings = ResilientSettings { deadline: PATIENT, ..ResilientSettings::default() };
        let store = RedisStore::open(&self.url, options);
        let store = Arc::new(Resilient::new(store, settings, MemoryStore::default()));
        let mut opened = self.opened.lock().expect("not poisoned");
        opened.entry(namespace.to_owned()).or_default().push(Arc::clone(&store));
        store
    }

    fn keys(&self, namespace: &str) -> Option<Vec<StoredKey>> {
        let own = format!("{namespace}:1:");
        // These two do not expire while the store is used.
        let shared = ["secret", "policy"].map(|what| format!("{own}{what}"));
        let keys = (self.servers)().into_iter().flat_map(|mut server| server.keys());
        let keys = keys.map(|(name, expires)| StoredKey {
            name: String::from_utf8(name).expect("a readable name"),
            expires: u64::try_from(expires).ok().map(|millis| Time::from_micros(millis * 1_000)),
        });
        // A key without a namespace belongs to every namespace.
        let is_own = |name: &str| name.starts_with(&own) || !name.starts_with("world-");
        Some(keys.filter(|key| is_own(&key.name) && !shared.contains(&key.name)).collect())
    }

    fn rolls_back(&self) -> bool {
        matches!(self.url.servers, Servers::Cluster { .. })
    }

    fn trouble(&self, namespace: &str) -> Option<Trouble> {
        let opened = self.opened.lock().expect("not poisoned");
        let stores = || opened.get(namespace).into_iter().flatten();
        let of = |kind| (kind, stores().map(|store| store.failures(kind)).sum::<u64>());
        let failures: Vec<_> = FailureKind::ALL.into_iter().map(of).filter(|(_, count)| *count > 0).collect();
        let slow = |kind| matches!(kind, FailureKind::Timeout | FailureKind::Connection);
        let is_transient = failures.iter().all(|(kind, _)| slow(*kind));
        (!failures.is_empty()).then(|| Trouble { what: format!("{failures:?}"), is_transient })
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
