//! What all listeners share: the limiter, what is in force, and what was counted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use tollkeeper::config::{Config, LimitShape};
use tollkeeper::{Decision, Limiter};

use crate::metrics::Metrics;
use crate::store::Store;
use crate::trace::{Parent, Traces};

/// The service, whatever it is asked through.
#[derive(Debug)]
pub struct Service {
    /// Decides.
    pub limiter: Limiter,
    /// Where it keeps state.
    pub store: Store,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Keeps decisions for a collector, if there is one.
    traces: OnceLock<Traces>,
    in_force: RwLock<Arc<InForce>>,
    draining: AtomicBool,
}

/// The limits in force and where they come from: what `GET /v1/limits` says.
#[derive(Clone, Debug, Serialize)]
pub struct InForce {
    /// Counts policies, from 1.
    pub version: u64,
    /// Where they come from.
    pub source: Source,
    /// When they came into force, in seconds since the epoch.
    pub loaded_at: u64,
    /// Why the last attempt to replace them failed.
    pub error: Option<String>,
    /// Whether a file has other limits than these.
    pub shadowed: bool,
    /// The limits, as they are written in a config.
    pub limits: Vec<LimitShape>,
}

/// Where limits come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// A config file.
    File,
    /// The policy of a server that was given none.
    Builtin,
}

impl Service {
    /// A service with the limits of this config on this store.
    pub fn new(config: Config, source: Source, store: Store) -> Service {
        let limiter = store.limiter(config.policy);
        let policy = limiter.policy();
        let metrics = Arc::new(Metrics::new(&policy));
        metrics.know_routes(config.http.routes.iter().map(String::as_str));
        limiter.observe(Arc::clone(&metrics) as _);
        if let Store::Redis(store) = &store {
            store.observe(Arc::clone(&metrics) as _);
        }
        let in_force = InForce {
            version: policy.version(),
            source,
            loaded_at: now(),
            error: None,
            shadowed: false,
            limits: config.limits,
        };
        let in_force = RwLock::new(Arc::new(in_force));
        let (traces, draining) = (OnceLock::new(), AtomicBool::new(false));
        Service { limiter, store, metrics, traces, in_force, draining }
    }

    /// Keeps decisions from now on.
    pub fn trace_to(&self, traces: Traces) {
        // Whoever came first stays.
        let _ = self.traces.set(traces);
    }

    /// Where decisions are kept, if they are.
    #[inline]
    pub fn traces(&self) -> Option<&Traces> {
        self.traces.get()
    }

    /// Keeps a decision, if somebody wants to see it.
    #[inline]
    pub fn trace(&self, parent: Option<Parent>, name: &'static str, began: Instant, decision: &Decision) {
        if let (Some(traces), Some(parent)) = (self.traces(), parent) {
            traces.record(parent, name, began, decision);
        }
    }

    /// What is in force.
    pub fn in_force(&self) -> Arc<InForce> {
        Arc::clone(&self.in_force.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Puts the limits of another config in force: every request that starts later meets them, and all
    /// counters are kept.
    pub fn reload(&self, config: Config) -> u64 {
        let mut in_force = self.in_force.write().unwrap_or_else(PoisonError::into_inner);
        self.metrics.know_routes(config.http.routes.iter().map(String::as_str));
        let version = self.limiter.replace_policy(config.policy).version();
        let (loaded_at, limits) = (now(), config.limits);
        *in_force =
            Arc::new(InForce { version, loaded_at, error: None, limits, ..InForce::clone(&in_force) });
        self.metrics.reloads.done.fetch_add(1, Ordering::Relaxed);
        version
    }

    /// Remembers that a reload failed. What is in force stays so.
    pub fn reload_failed(&self, error: String) {
        let mut in_force = self.in_force.write().unwrap_or_else(PoisonError::into_inner);
        *in_force = Arc::new(InForce { error: Some(error), ..InForce::clone(&in_force) });
        self.metrics.reloads.failed.fetch_add(1, Ordering::Relaxed);
    }

    /// Says goodbye: from now on it is not ready.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Whether it is about to stop.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
