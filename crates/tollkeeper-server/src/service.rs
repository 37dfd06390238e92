//! The state that all listeners share: limiter, store, active limits, access tokens, metrics and logs.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use hyper::header::HeaderMap;
use tokio::sync::Mutex;
use tollkeeper::config::{Config, Report};
use tollkeeper::store::Failure;
use tollkeeper::store::redis::{
    NotSet, NotShared, OverrideWatch, PolicyWatch, SharedLimits, SharedOverrides, SharedPolicy,
};
use tollkeeper::{Decision, KeyOverride, Limiter, OverrideError};
use tollkeeper_engine::api::active_limits::{ActiveLimits, LimitSource};
use tollkeeper_engine::api::call::{Api, ShowLimits};
use tollkeeper_engine::api::redact::Redactor;
use tollkeeper_tower::{ActiveSettings, Settings};

use crate::control::access::{Access, Tokens};
use crate::control::active_limits::{CannotReplace, DryRun, LimitManager, Loaded};
use crate::control::tls::Acceptor;
use crate::key_ref::KeyRefs;
use crate::proxy::Proxy;
use crate::store::Store;
use crate::telemetry::admission_log::AdmissionLog;
use crate::telemetry::events::Events;
use crate::telemetry::history::History;
use crate::telemetry::metrics::{Metrics, RouteLabel};
use crate::telemetry::refusal_log::{Refusal, RefusalLog};
use crate::telemetry::trace::{Parent, SpanOutcome, Traces};
use crate::transport::response_headers::Headers;

/// How long a starting server waits for the limits that all nodes share.
const FIRST_SYNC: Duration = Duration::from_secs(1);

/// The rate-limiting service, independent of the transport.
#[derive(Debug)]
pub struct Service {
    /// Decides requests.
    pub limiter: Limiter,
    /// Where the limiter keeps its state.
    pub store: Store,
    /// Counts decisions and requests.
    pub metrics: Arc<Metrics>,
    /// Checks tokens.
    pub access: Access,
    /// Accepts connections, with TLS if configured.
    pub acceptor: Acceptor,
    /// The event stream of `GET /v1/events`.
    pub events: Events,
    /// Counts per step, for `GET /v1/history`.
    pub history: History,
    /// References to keys, for `GET /v1/top` and `/v1/state`.
    pub key_refs: KeyRefs,
    /// Which rate-limit headers responses carry.
    pub headers: ArcSwap<Headers>,
    /// Redacts hashed facts in responses.
    pub redactor: Arc<Redactor>,
    /// How facts are read from requests that gateways ask about.
    pub reading: Arc<ActiveSettings>,
    /// Logs refusals if the config enables it.
    pub refusals: RefusalLog,
    limit_manager: LimitManager,
    /// The overrides that all nodes share, as far as this node has seen them; `None` without a remote store. Changes are
    /// read and applied under the lock, so that none is applied after a later one.
    overrides: Option<Mutex<OverrideWatch>>,
    /// Collects spans for the OTLP exporter, if there is one.
    traces: OnceLock<Traces>,
    /// The proxy, if this server is one.
    proxy: OnceLock<Arc<Proxy>>,
    draining: AtomicBool,
}

impl ShowLimits for Service {
    fn active_limits(&self) -> Arc<ActiveLimits> {
        self.limit_manager.active()
    }
}

impl Service {
    /// A service with the limits of this config on this store.
    pub fn new(config: Config, source: LimitSource, store: Store) -> anyhow::Result<Service> {
        let acceptor = Acceptor::open(config.tls.as_ref())?;
        let access = Access::new(tokens(&config));
        let headers = ArcSwap::from_pointee(Headers::of(&config));
        let limiter = store.limiter(config.policy.clone());
        let policy = limiter.policy();
        let metrics = Arc::new(Metrics::new(&policy));
        metrics.know_routes(config.http.routes.iter().map(String::as_str));
        limiter.observe(Arc::clone(&metrics) as _);
        if let Store::Redis(store) = &store {
            store.observe(Arc::clone(&metrics) as _);
            store.inner().observe(Arc::clone(&metrics) as _);
        }
        let reading = Arc::new(ActiveSettings::new(Settings::of(&config), &limiter));
        let refusals = RefusalLog::new(config.log.refusals);
        let limit_manager = LimitManager::new(config, source, policy.version(), Arc::clone(&reading));
        let overrides = match &store {
            Store::Redis(store) => Some(Mutex::new(SharedOverrides::of(store.inner().remote()).watch())),
            Store::Memory(_) => None,
        };
        Ok(Service {
            limiter,
            store,
            metrics,
            access,
            acceptor,
            events: Events::default(),
            history: History::default(),
            key_refs: KeyRefs::default(),
            headers,
            redactor: Arc::default(),
            reading,
            refusals,
            limit_manager,
            overrides,
            traces: OnceLock::new(),
            proxy: OnceLock::new(),
            draining: AtomicBool::new(false),
        })
    }

    /// Appends every admission to a file from now on.
    pub fn log_admissions(&self, file: &Path) -> anyhow::Result<()> {
        let log = AdmissionLog::open(file, Arc::clone(&self.redactor))?;
        // There is one file; a second call changes nothing.
        let _ = self.metrics.admissions.set(log);
        Ok(())
    }

    /// Passes later configs on to this proxy, and its counters on to the metrics.
    pub fn set_proxy(&self, proxy: Arc<Proxy>) {
        // There is one proxy; a second call changes nothing.
        let _ = self.metrics.upstream.set(Arc::clone(&proxy.counters));
        let _ = self.proxy.set(proxy);
    }

    /// The proxy, if this server is one.
    pub fn proxy(&self) -> Option<&Arc<Proxy>> {
        self.proxy.get()
    }

    /// Records decisions as spans from now on.
    pub fn trace_to(&self, traces: Traces) {
        // There is one exporter; a second call changes nothing.
        let _ = self.traces.set(traces);
    }

    /// The span collector, if traces are exported.
    #[inline]
    pub fn traces(&self) -> Option<&Traces> {
        self.traces.get()
    }

    /// Records a decision as a span if traces are exported and the request is sampled.
    #[inline]
    pub fn trace(&self, parent: Option<Parent>, name: &'static str, began: Instant, decision: &Decision) {
        if let (Some(traces), Some(parent)) = (self.traces(), parent) {
            traces.record(parent, name, began, || SpanOutcome::of(decision));
        }
    }

    /// Logs a refused decision if the config enables it.
    #[inline]
    pub fn log_refusal(&self, transport: &'static str, route: RouteLabel, decision: &Decision) {
        if !decision.allowed() && self.refusals.is_on() {
            self.refusals
                .add(|| Refusal::of(decision, &self.redactor, transport, self.metrics.route_name(route)));
        }
    }

    /// The caller's span in the `traceparent` header, if traces are exported and it is sampled.
    pub fn parent(&self, headers: &HeaderMap) -> Option<Parent> {
        let traceparent = self.traces().and_then(|_| headers.get("traceparent"))?;
        Parent::read(traceparent.as_bytes())
    }

    /// Answers the calls of the API.
    pub fn api(&self) -> Api<'_> {
        Api { limiter: &self.limiter, redactor: &self.redactor, limits: self }
    }

    /// Applies a config that was read again.
    pub fn reload(&self, config: Config) -> anyhow::Result<Loaded> {
        let (tokens, headers, refusals) = (tokens(&config), Headers::of(&config), config.log.refusals);
        let certificates = self.acceptor.renew(config.tls.as_ref())?;
        self.metrics.know_routes(config.http.routes.iter().map(String::as_str));
        let proxy =
            self.proxy().map(|proxy| Ok::<_, anyhow::Error>((proxy, proxy.prepare(&config)?))).transpose()?;
        // Fails if limits set through the API do not fit the rest of the new file.
        let loaded = self.limit_manager.reload(config, &self.limiter).map_err(anyhow::Error::msg)?;
        if let Some((proxy, active)) = proxy {
            proxy.install(active);
        }
        self.access.change(tokens);
        self.headers.store(headers.into());
        self.refusals.change(refusals);
        certificates.install();
        self.metrics.reloads.done.fetch_add(1, Ordering::Relaxed);
        Ok(loaded)
    }

    /// Records that a reload failed. The previous config stays active.
    pub fn reload_failed(&self, error: String) {
        self.limit_manager.reload_failed(error);
        self.metrics.reloads.failed.fetch_add(1, Ordering::Relaxed);
    }

    /// Replaces the file's limits with these (`{"limits":[…]}`), or with `None` returns to those of the file, on
    /// condition that `seen` includes the active version. On a remote store this applies to all nodes and survives
    /// restarts; in memory it lasts until this process ends.
    pub async fn replace_limits(
        &self,
        limits: Option<Vec<u8>>,
        seen: &Versions,
    ) -> Result<Arc<ActiveLimits>, CannotReplace> {
        let Store::Redis(store) = &self.store else {
            let active = self.limit_manager.replace(
                limits.map(Into::into),
                |version| seen.has(version),
                &self.limiter,
            )?;
            tracing::info!("limits version {} is active, set through the API", active.version);
            return Ok(active);
        };
        let accepted = self.limit_manager.accept(limits.as_deref(), |version| seen.has(version))?;
        let shared = SharedPolicy::of(store.inner().remote());
        let expected = (*seen != Versions::Any).then_some(accepted.replaces);
        let set = match &accepted.limits {
            Some(limits) => shared.set(limits, expected).await,
            None => shared.clear(expected).await,
        };
        match set {
            // Read the limits back, as every other node does.
            Ok(_) => self
                .follow(shared.get().await.map_err(CannotReplace::Failed)?)
                .map_err(CannotReplace::Invalid),
            Err(NotSet::Conflict { version }) => Err(CannotReplace::Version(version)),
            Err(NotSet::Failed(failure)) => Err(CannotReplace::Failed(failure)),
        }
    }

    /// What [`Service::replace_limits`] would change, without changing anything.
    pub fn dry_run(&self, limits: &[u8], seen: &Versions) -> Result<DryRun, CannotReplace> {
        self.limit_manager.dry_run(limits, |version| seen.has(version), &self.limiter.policy())
    }

    /// Whether overrides survive a restart of this process.
    pub fn keeps_overrides(&self) -> bool {
        matches!(self.store, Store::Redis(_)) || self.store.memory().snapshots().is_some()
    }

    /// Sets the override of a key, on a remote store for all nodes.
    pub async fn set_override(&self, wanted: KeyOverride) -> Result<KeyOverride, CannotOverride> {
        let Store::Redis(store) = &self.store else { return Ok(self.limiter.set_override(wanted)?) };
        self.limiter.check_override(&wanted)?;
        SharedOverrides::of(store.inner().remote()).set(&wanted).await?;
        self.follow_overrides().await;
        Ok(wanted)
    }

    /// Removes the override of a key, on a remote store for all nodes; false if it had none.
    pub async fn remove_override(&self, limit: &str, key: &str) -> Result<bool, CannotOverride> {
        let Store::Redis(store) = &self.store else { return Ok(self.limiter.remove_override(limit, key)) };
        let done = SharedOverrides::of(store.inner().remote()).remove(limit, key).await;
        let done = done.map_err(CannotOverride::Failed)?;
        self.follow_overrides().await;
        Ok(done)
    }

    /// Reads what has changed in the overrides that all nodes share, and applies it: after a change through this node, so
    /// that it is in force here at once, and twice a second. If the store does not answer, the next call catches up.
    async fn follow_overrides(&self) {
        let Some(watch) = &self.overrides else { return };
        let mut watch = watch.lock().await;
        if let Some(changed) = watch.poll().await {
            changed.apply(&self.limiter);
        }
    }

    /// Applies the limits that all nodes share.
    fn follow(&self, shared: SharedLimits) -> Result<Arc<ActiveLimits>, Report> {
        let before = self.active_limits().version;
        let active = self.limit_manager.follow(shared, &self.limiter).inspect_err(|report| {
            tracing::error!("the limits shared by all nodes are not active on this node: {report}");
        })?;
        if active.version != before {
            tracing::info!("limits version {} is active, shared by all nodes", active.version);
        }
        Ok(active)
    }

    /// Starts to follow the limits that all nodes share: applies the current ones, waiting for the store up to
    /// [`FIRST_SYNC`], and returns a future that applies every later change while it is polled. `None` without a remote
    /// store.
    pub async fn begin_to_follow(self: Arc<Service>) -> Option<impl Future<Output = ()> + Send + 'static> {
        let Store::Redis(store) = &self.store else { return None };
        let mut limits = SharedPolicy::of(store.inner().remote()).watch();
        let first = async {
            let _ = self.follow(limits.next().await);
            if let Some(watch) = &self.overrides {
                watch.lock().await.next().await.apply(&self.limiter);
            }
        };
        if tokio::time::timeout(FIRST_SYNC, first).await.is_err() {
            tracing::warn!(
                "the store did not answer: starting with the limits of the file and without overrides, until it does"
            );
        }
        Some(
            async move { tokio::join!(self.keep_following_limits(limits), self.keep_following_overrides()).0 },
        )
    }

    async fn keep_following_limits(&self, mut limits: PolicyWatch) {
        loop {
            let _ = self.follow(limits.next().await);
        }
    }

    async fn keep_following_overrides(&self) {
        loop {
            self.follow_overrides().await;
            tokio::time::sleep(OverrideWatch::INTERVAL).await;
        }
    }

    /// Starts draining: the server reports that it is not ready, and event streams end.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.events.end();
    }

    /// Whether the server is draining.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
}

/// Why an override was not changed.
#[derive(Clone, Debug)]
pub enum CannotOverride {
    /// It is invalid, or there are too many.
    Invalid(OverrideError),
    /// The remote store, which keeps overrides for all nodes, did not answer.
    Failed(Failure),
}

impl From<OverrideError> for CannotOverride {
    fn from(error: OverrideError) -> CannotOverride {
        CannotOverride::Invalid(error)
    }
}

impl From<NotShared> for CannotOverride {
    fn from(error: NotShared) -> CannotOverride {
        match error {
            NotShared::Full => CannotOverride::Invalid(OverrideError::Full),
            NotShared::Failed(failure) => CannotOverride::Failed(failure),
        }
    }
}

/// The versions of the limits that a caller has seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Versions {
    /// The caller does not care (`If-Match: *`).
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
