//! `tollkeeper proxy URL`: a reverse proxy with the limits of the config in front of one upstream.
//!
//! A request passes, in this order: [`client`] (the connection and its timeouts), [`hygiene`] (one unambiguous form), the
//! rate limit and single flight layers of `tollkeeper-tower`, the gate of [`concurrency`], and [`forward`], which sends it
//! to one of the addresses of the [`upstream`].

pub mod access_log;
pub mod active_config;
pub mod client;
pub mod concurrency;
pub mod connect;
pub mod counters;
pub mod download;
pub mod error;
pub mod exchange;
pub mod forward;
pub mod forwarded;
pub mod handler;
pub mod hygiene;
pub mod idle;
pub mod listener;
pub mod pool;
pub mod priority;
pub mod proxy_protocol;
pub mod stream_watch;
pub mod target;
pub mod tunnel;
pub mod upload;
pub mod upstream;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use arc_swap::ArcSwap;
use hyper::header::HeaderValue;
use tollkeeper::config::{Config, HostHeader};
use tollkeeper_engine::json::Writer;

use self::active_config::ActiveConfig;
use self::concurrency::Gate;
use self::connect::{Connector, TlsFiles};
use self::counters::Counters;
use self::target::UpstreamUrl;
use self::upstream::{Resolver, Upstream};
use crate::service::Service;
use crate::telemetry::line_log::LineLog;
use crate::telemetry::logging::OnceAMinute;

/// The options of a proxy that are not in the config file.
#[derive(Clone, Debug)]
pub struct Options {
    /// The URL of the upstream.
    pub target: UpstreamUrl,
    /// Certificates for an upstream with TLS.
    pub tls: TlsFiles,
    /// Names of protocols that connections may be upgraded to: `websocket`.
    pub upgrades: Vec<String>,
    /// Takes precedence over the config file.
    pub host_header: Option<HostHeader>,
    /// Whether responses carry headers that explain them.
    pub debug_headers: bool,
}

/// A running proxy.
#[derive(Debug)]
pub struct Proxy {
    service: Arc<Service>,
    options: Options,
    /// The `Host` of the upstream.
    host: HeaderValue,
    active: ArcSwap<ActiveConfig>,
    /// The addresses of the upstream.
    pub upstream: Arc<Upstream>,
    /// How many requests the upstream may have at the same time.
    pub gate: Gate,
    /// Counters for `/metrics` and the dashboard.
    pub counters: Arc<Counters>,
    access_log: Option<Arc<LineLog>>,
    /// Logs connections that were closed because of the PROXY protocol.
    closed: OnceAMinute,
    /// Whether every decision is needed after the response: for the access log, for traces, or to count degraded ones.
    keeps_decisions: bool,
}

impl Proxy {
    /// A proxy with the limits of this service.
    pub async fn new(
        options: Options,
        config: &Config,
        service: Arc<Service>,
        access_log: Option<Arc<LineLog>>,
        is_traced: bool,
    ) -> anyhow::Result<Arc<Proxy>> {
        let counters = Arc::new(Counters::default());
        let connector = Connector::new(&options.target, &options.tls, Arc::clone(&counters))?;
        let upstream = Upstream::new(Resolver::of(&options.target), connector, Arc::clone(&counters));
        let upstream = Arc::new(upstream);
        upstream.resolve().await;
        tokio::spawn({
            let upstream = Arc::clone(&upstream);
            async move { upstream.keep_up_to_date().await }
        });
        let gate = Gate::new(active_config::gate_settings(&config.proxy.concurrency));
        let keeps_decisions = access_log.is_some() || is_traced || !service.limiter.is_embedded();
        let active = ActiveConfig::new(config, &options, &service, &upstream, &gate, keeps_decisions)?;
        counters.register(access_log.clone(), gate.clone(), active.flights.clone());
        let host = options.target.host();
        let active = ArcSwap::from_pointee(active);
        let closed = OnceAMinute::default();
        Ok(Arc::new(Proxy {
            service,
            options,
            host,
            active,
            upstream,
            gate,
            counters,
            access_log,
            closed,
            keeps_decisions,
        }))
    }

    /// Prepares a config that was read again. It is used only after [`Proxy::install`].
    pub fn prepare(&self, config: &Config) -> anyhow::Result<ActiveConfig> {
        let Proxy { options, service, upstream, gate, keeps_decisions, .. } = self;
        let next = ActiveConfig::new(config, options, service, upstream, gate, *keeps_decisions)?;
        Ok(next.continuing(&self.active.load()))
    }

    /// Uses a config for all later requests.
    pub fn install(&self, active: ActiveConfig) {
        self.gate.replace(active_config::gate_settings(&active.settings.concurrency));
        self.active.store(Arc::new(active));
    }

    /// Writes the state of the upstream as JSON, for `/v1/events` and the dashboard.
    pub fn write_view(&self, out: &mut Writer) {
        let view = self.gate.view();
        out.raw("{\"url\":");
        out.text(&self.options.target.to_string());
        for (name, number) in [
            (",\"in_flight\":", self.counters.in_flight.load(Relaxed)),
            (",\"limit\":", view.limit.into()),
            (",\"waiting\":", u64::try_from(view.waiting).unwrap_or(u64::MAX)),
            (",\"shed\":", view.shed.values().sum()),
            (",\"errors\":", self.counters.failures()),
        ] {
            out.raw(name);
            out.number(number);
        }
        out.raw(",\"floor_ms\":");
        out.or_null(view.floor, |out, floor| {
            let millis = std::time::Duration::from(floor).as_secs_f64() * 1e3;
            out.raw(&format!("{millis:.1}"));
        });
        out.raw(",\"addresses\":");
        out.list(self.upstream.addresses().iter(), |out, address| {
            out.raw("{\"address\":");
            out.text(&address.label);
            out.raw(",\"in_flight\":");
            out.number(u64::try_from(address.in_flight()).unwrap_or(u64::MAX));
            out.raw(",\"errors\":");
            out.number(address.errors());
            out.raw(",\"ejected\":");
            out.bool(self.upstream.is_ejected(address));
            out.raw("}");
        });
        out.raw("}");
    }
}
