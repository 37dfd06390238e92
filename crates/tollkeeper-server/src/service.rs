//! What all listeners share: the limiter, what is in force, and what was counted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use hyper::header::HeaderMap;
use tollkeeper::config::{Config, Report};
use tollkeeper::store::redis::{NotSet, SharedLimits, SharedPolicy};
use tollkeeper::{Decision, Limiter};
use tollkeeper_tower::{InForce as Reading, Settings};

use crate::control::access::{Doors, Tokens};
use crate::control::active_limits::{CannotReplace, InForce, Laws, Loaded, Source};
use crate::control::tls::Acceptor;
use crate::redact::Redactor;
use crate::store::Store;
use crate::telemetry::events::Events;
use crate::telemetry::metrics::{Metrics, RouteLabel};
use crate::telemetry::refusal_log::{Refusal, RefusalLog};
use crate::telemetry::trace::{Parent, Told, Traces};
use crate::transport::response_headers::Headers;

/// How long a server that starts waits for what all nodes share.
const FIRST_LOOK: Duration = Duration::from_secs(1);

/// The service, whatever it is asked through.
#[derive(Debug)]
pub struct Service {
    /// Decides.
    pub limiter: Limiter,
    /// Where it keeps state.
    pub store: Store,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Lets in.
    pub doors: Doors,
    /// Speaks TLS, or not.
    pub acceptor: Acceptor,
    /// Tells.
    pub events: Events,
    /// Tells clients of their limits.
    pub headers: ArcSwap<Headers>,
    /// Redacts hashed facts in answers.
    pub redactor: Redactor,
    /// How requests are read that gateways ask about.
    pub reading: Arc<Reading>,
    /// Logs refusals, if the config says so.
    pub refusals: RefusalLog,
    laws: Laws,
    /// Keeps decisions for a collector, if there is one.
    traces: OnceLock<Traces>,
    draining: AtomicBool,
}

impl Service {
    /// A service with the limits of this config on this store.
    pub fn new(config: Config, source: Source, store: Store) -> anyhow::Result<Service> {
        let acceptor = Acceptor::open(config.tls.as_ref())?;
        let doors = Doors::new(tokens(&config));
        let headers = ArcSwap::from_pointee(Headers::of(&config));
        let limiter = store.limiter(config.policy.clone());
        let policy = limiter.policy();
        let metrics = Arc::new(Metrics::new(&policy));
        metrics.know_routes(config.http.routes.iter().map(String::as_str));
        limiter.observe(Arc::clone(&metrics) as _);
        if let Store::Redis(store) = &store {
            store.observe(Arc::clone(&metrics) as _);
        }
        let reading = Arc::new(Reading::new(Settings::of(&config), &limiter));
        let refusals = RefusalLog::new(config.log.refusals);
        let laws = Laws::new(config, source, policy.version(), Arc::clone(&reading));
        Ok(Service {
            limiter,
            store,
            metrics,
            doors,
            acceptor,
            events: Events::default(),
            headers,
            redactor: Redactor::default(),
            reading,
            refusals,
            laws,
            traces: OnceLock::new(),
            draining: AtomicBool::new(false),
        })
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
            traces.record(parent, name, began, || Told::of(decision));
        }
    }

    /// Logs a decision that refuses, if the config says so.
    #[inline]
    pub fn log_refusal(&self, transport: &'static str, route: RouteLabel, decision: &Decision) {
        if !decision.allowed() && self.refusals.is_on() {
            self.refusals
                .add(|| Refusal::of(decision, &self.redactor, transport, self.metrics.route_name(route)));
        }
    }

    /// Whose span a request with these headers is a part of, if somebody wants to see it.
    pub fn parent(&self, headers: &HeaderMap) -> Option<Parent> {
        let traceparent = self.traces().and_then(|_| headers.get("traceparent"))?;
        Parent::read(traceparent.as_bytes())
    }

    /// What is in force.
    pub fn in_force(&self) -> Arc<InForce> {
        self.laws.shown()
    }

    /// Takes a config that was read anew.
    pub fn reload(&self, config: Config) -> anyhow::Result<Loaded> {
        let (tokens, headers, refusals) = (tokens(&config), Headers::of(&config), config.log.refusals);
        let certificates = self.acceptor.renew(config.tls.as_ref())?;
        self.metrics.know_routes(config.http.routes.iter().map(String::as_str));
        // Limits that were PUT may not fit the rest of the new file.
        let loaded = self.laws.reload(config, &self.limiter).map_err(anyhow::Error::msg)?;
        self.doors.change(tokens);
        self.headers.store(headers.into());
        self.refusals.change(refusals);
        certificates.put_in_force();
        self.metrics.reloads.done.fetch_add(1, Ordering::Relaxed);
        Ok(loaded)
    }

    /// Remembers that a reload failed. What is in force stays so.
    pub fn reload_failed(&self, error: String) {
        self.laws.reload_failed(error);
        self.metrics.reloads.failed.fetch_add(1, Ordering::Relaxed);
    }

    /// Puts limits in the place of the file's (`{"limits":[…]}`), or with none goes back to those, if
    /// `seen` knows the version in force: for every node of a store elsewhere, else for as long as this process lives.
    pub async fn replace_limits(
        &self,
        limits: Option<Vec<u8>>,
        seen: &Versions,
    ) -> Result<Arc<InForce>, CannotReplace> {
        let Store::Redis(store) = &self.store else {
            let in_force =
                self.laws.replace(limits.map(Into::into), |version| seen.has(version), &self.limiter)?;
            tracing::info!("version {} of the limits is in force, through the API", in_force.version);
            return Ok(in_force);
        };
        let accepted = self.laws.accept(limits.as_deref(), |version| seen.has(version))?;
        let shared = SharedPolicy::of(store.remote());
        let expected = (*seen != Versions::Any).then_some(accepted.replaces);
        let set = match &accepted.limits {
            Some(limits) => shared.set(limits, expected).await,
            None => shared.clear(expected).await,
        };
        match set {
            // What was set is read as every other node reads it.
            Ok(_) => self
                .follow(shared.get().await.map_err(CannotReplace::Failed)?)
                .map_err(CannotReplace::Invalid),
            Err(NotSet::Conflict { version }) => Err(CannotReplace::Version(version)),
            Err(NotSet::Failed(failure)) => Err(CannotReplace::Failed(failure)),
        }
    }

    /// Goes by what all nodes share.
    fn follow(&self, shared: SharedLimits) -> Result<Arc<InForce>, Report> {
        let before = self.in_force().version;
        let in_force = self.laws.follow(shared, &self.limiter).inspect_err(|report| {
            tracing::error!("the limits that all nodes share are not in force here: {report}");
        })?;
        if in_force.version != before {
            tracing::info!("version {} of the limits is in force, as for all nodes", in_force.version);
        }
        Ok(in_force)
    }

    /// Follows what all nodes share, for as long as this is awaited. Ready when what was there at first is in force, or
    /// the store has kept us waiting: what runs then is the future that comes back.
    pub async fn begin_to_follow(self: Arc<Service>) -> Option<impl Future<Output = ()> + Send + 'static> {
        let Store::Redis(store) = &self.store else { return None };
        let mut changes = SharedPolicy::of(store.remote()).watch();
        if let Ok(first) = tokio::time::timeout(FIRST_LOOK, changes.next()).await {
            let _ = self.follow(first);
        }
        Some(async move {
            loop {
                let _ = self.follow(changes.next().await);
            }
        })
    }

    /// Says goodbye: from now on it is not ready.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.events.end();
    }

    /// Whether it is about to stop.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
}

/// The versions of the limits that a caller has seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Versions {
    /// It does not care.
    Any,
    /// One of these.
    OneOf(Vec<u64>),
}

impl Versions {
    fn has(&self, version: u64) -> bool {
        match self {
            Versions::Any => true,
            Versions::OneOf(versions) => versions.contains(&version),
        }
    }
}

fn tokens(config: &Config) -> Tokens {
    Tokens { admin: config.admin, data: config.auth.clone(), demo: false, hosts: config.http.hosts.clone() }
}
