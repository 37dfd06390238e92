//! The parts of a proxy that depend on the config. They are built at the start and on every reload.

use std::sync::Arc;

use anyhow::Context as _;
use hyper::Uri;
use hyper::header::HeaderName;
use tollkeeper::config::{ConcurrencySettings, Config, ProxySettings, SingleFlightSettings};
use tollkeeper::http::{ClientAddress, HttpSettings, Source};
use tollkeeper::{Limiter, Span};
use tollkeeper_tower::routes::Routes;
use tollkeeper_tower::single_flight::{SingleFlight, SingleFlightLayer, SingleFlightRule};
use tollkeeper_tower::{RateLimit, RateLimitLayer, path};
use tower_layer::Layer as _;

use super::Options;
use super::concurrency::{Bounds, Gate, GateSettings, LimitSettings, Priorities};
use super::forward::{Forward, Forwarding};
use super::handler::Decided;
use super::priority::PriorityReader;
use super::upstream::Upstream;
use crate::service::Service;

/// The settings of a proxy, and the services that were built from them.
#[derive(Debug)]
pub struct ActiveConfig {
    /// The section `proxy`, with the flags of the command line.
    pub settings: ProxySettings,
    /// How facts are read.
    pub http: HttpSettings,
    /// The service: the limits, single flight, and the upstream behind them.
    pub limited: RateLimit<SingleFlight<Forward>>,
    /// The single flight layer of the service.
    pub flights: SingleFlightLayer,
    /// The headers that facts are read from, besides those of limits.
    read_headers: Vec<HeaderName>,
    forward: Forward,
    layer: RateLimitLayer,
    routes: Routes,
}

impl ActiveConfig {
    /// Builds the services for a config.
    pub fn new(
        config: &Config,
        options: &Options,
        service: &Arc<Service>,
        upstream: &Arc<Upstream>,
        gate: &Gate,
        keeps_decisions: bool,
    ) -> anyhow::Result<ActiveConfig> {
        warn_of_underscores(config);
        let http = config.http.clone();
        let mut settings = config.proxy.clone();
        settings.host_header = options.host_header.unwrap_or(settings.host_header);
        let priority = settings.concurrency.priority.as_deref().map(|fact| {
            let priorities = gate_settings(&settings.concurrency).priorities;
            PriorityReader::new(fact, &http, priorities.smallest())
        });
        let forward = Forward::new(Forwarding {
            target: options.target.clone(),
            upstream: Arc::clone(upstream),
            gate: gate.clone(),
            priority,
            limiter: service.limiter.clone(),
            settings: settings.clone(),
            http: http.clone(),
        });
        let rules = settings.single_flight.iter().map(rule);
        let flights = SingleFlightLayer::with_http(rules, http.clone()).context("proxy.single_flight")?;
        let flights = flights.with_limiter(service.limiter.clone());
        let layer = RateLimitLayer::following(service.limiter.clone(), Arc::clone(&service.reading))
            .longest_delay(Span::from(settings.timeout))
            // Requests that the concurrency gate sheds are refunded.
            .hand_over_charge();
        // `on_response` copies the decision of every admitted request, so it is used only if something reads them.
        let layer = match keeps_decisions {
            true => layer.on_response(|decision, parts| {
                parts.extensions.insert(Decided(decision.clone()));
            }),
            false => layer.on_refusal(|decision, mut response| {
                response.extensions_mut().insert(Decided(decision.clone()));
                response
            }),
        };
        let routes = Routes::new(&http.routes).expect("the config was checked");
        let limited = layer.layer(flights.layer(forward.clone()));
        let read_headers = read_headers(config);
        Ok(ActiveConfig { settings, http, limited, flights, read_headers, forward, layer, routes })
    }

    /// The same, with the flights of an earlier config.
    #[must_use]
    pub fn continuing(self, earlier: &ActiveConfig) -> ActiveConfig {
        let flights = self.flights.continuing(&earlier.flights);
        let limited = self.layer.layer(flights.layer(self.forward.clone()));
        ActiveConfig { flights, limited, ..self }
    }

    /// Whether a fact is read from this header. Limits are the active ones of the limiter: they can be replaced through the
    /// API.
    pub fn is_read(&self, name: &HeaderName, limiter: &Limiter) -> bool {
        let is_of = |fact: &str| fact.strip_prefix("header.").is_some_and(|header| name == header);
        self.read_headers.contains(name)
            || limiter.with_policy(|policy| policy.rules().iter().any(|rule| rule.facts().any(is_of)))
    }

    /// The route of a request, if the config lists routes.
    pub fn route(&self, uri: &Uri) -> Option<&str> {
        if self.routes.is_empty() {
            return None;
        }
        let path = path::spellings(uri.path(), self.http.encoded_slashes).shown;
        Some(self.routes.find(&path).unwrap_or("unmatched"))
    }
}

/// Warns of limits that read a header which hygiene removes.
fn warn_of_underscores(config: &Config) {
    for rule in config.policy.rules() {
        for fact in rule.facts() {
            let declared = config.http.facts.iter().find(|declared| declared.name == fact);
            let source = declared.map(|declared| declared.from.clone()).or_else(|| Source::of(fact));
            if let Some(Source::Header(header)) = source
                && header.contains('_')
            {
                tracing::warn!(
                    "limit `{}`: the fact `{fact}` is always absent, because the proxy removes headers with an underscore \
                     in their name, such as `{header}`",
                    rule.name()
                );
            }
        }
    }
}

/// The headers that the client address, the declared facts and the priority are read from.
fn read_headers(config: &Config) -> Vec<HeaderName> {
    let address = match &config.http.client_address {
        ClientAddress::Header(name) => Some(name.clone()),
        ClientAddress::XForwardedFor | ClientAddress::Forwarded => None,
    };
    let declared = config.http.facts.iter().map(|fact| fact.from.clone());
    let priority = config.proxy.concurrency.priority.as_deref().and_then(Source::of);
    let headers = declared.chain(priority).filter_map(|source| match source {
        Source::Header(name) => Some(name),
        _ => None,
    });
    headers.chain(address).filter_map(|name| name.parse().ok()).collect()
}

/// The settings of the gate in front of the upstream.
pub fn gate_settings(settings: &ConcurrencySettings) -> GateSettings {
    GateSettings {
        limit: match settings.adaptive_min {
            Some(min) => LimitSettings::Adaptive(Bounds { min, max: settings.max }),
            None => LimitSettings::Fixed(settings.max),
        },
        priorities: match settings.priority {
            Some(_) => Priorities::with(settings.priorities.iter().cloned()),
            None => Priorities::none(),
        },
        queue: settings.queue,
        queue_wait: settings.queue_wait,
        count: settings.count,
    }
}

fn rule(settings: &SingleFlightSettings) -> SingleFlightRule {
    let rule = SingleFlightRule::keyed_only_by(settings.by.iter().cloned());
    let conditions =
        settings.when.iter().flat_map(|(fact, patterns)| patterns.iter().map(move |one| (fact, one)));
    conditions.fold(rule, |rule, (fact, pattern)| rule.when(fact, pattern))
}
