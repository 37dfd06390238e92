//! Counts what happens between the proxy and its upstream, for `/metrics` and the dashboard.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tollkeeper_tower::SingleFlightLayer;

use super::concurrency::Gate;
use super::error::UpstreamError;
use crate::telemetry::line_log::LineLog;
use crate::telemetry::metrics::family::{Family, Labels, Series, counter, gauge, labels};
use crate::telemetry::metrics::{Counts, DurationHistogram};

/// The most addresses that have a series of their own; the others share one.
const MAX_ADDRESSES: usize = 32;

/// The counters of a proxy.
#[derive(Debug, Default)]
pub struct Counters {
    durations: Mutex<BTreeMap<Box<str>, Arc<DurationHistogram>>>,
    errors: [AtomicU64; UpstreamError::ALL.len()],
    /// Requests that were sent a second time.
    pub retries: AtomicU64,
    /// Headers that were dropped because of an underscore in their name.
    pub dropped_headers: AtomicU64,
    /// Parts with counters of their own.
    registered: OnceLock<Registered>,
    /// Open connections to the upstream.
    pub upstream_connections: AtomicU64,
    /// Connections in the pools: those of them that carry no request, and some that are closed already.
    pub upstream_idle: AtomicU64,
    /// Open connections of clients.
    pub client_connections: AtomicU64,
    /// Those of them that carry a request.
    pub client_active: AtomicU64,
    /// Requests that the upstream is working on.
    pub in_flight: AtomicU64,
    /// Ejected addresses.
    pub ejected: AtomicU64,
}

impl Counters {
    /// Adds the counters of these parts to the metrics.
    pub fn register(&self, access_log: Option<Arc<LineLog>>, gate: Gate, flights: SingleFlightLayer) {
        // A proxy has one of each.
        let _ = self.registered.set(Registered { access_log, gate, flights });
    }

    /// Counts a failure of the upstream.
    pub fn failed(&self, error: UpstreamError) {
        self.errors[error as usize].fetch_add(1, Relaxed);
    }

    /// The histogram of the time from sending a request to the head of its response, for one address.
    pub fn durations_of(&self, address: &str) -> Arc<DurationHistogram> {
        let mut all = self.durations.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = all.contains_key(address) || all.len() < MAX_ADDRESSES;
        Arc::clone(all.entry(if is_known { address } else { "other" }.into()).or_default())
    }

    /// The response times of each address.
    pub fn durations(&self) -> Vec<(Box<str>, Counts)> {
        let all = self.durations.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().map(|(address, durations)| (address.clone(), durations.counts())).collect()
    }

    /// All failures of the upstream so far.
    pub fn failures(&self) -> u64 {
        self.errors.iter().map(|count| count.load(Relaxed)).sum()
    }

    /// The metrics of the proxy.
    pub fn families(&self, all: &mut Vec<Family>) {
        let durations = self.durations().into_iter();
        all.push(Family {
            name: "tollkeeper_proxy_upstream_duration_seconds",
            help: "Time from sending a request to the upstream to the head of its response",
            series: Series::Histogram(
                durations.map(|(address, counts)| (labels([("address", &address)]), counts)).collect(),
            ),
        });
        let errors = UpstreamError::ALL
            .map(|kind| (labels([("kind", kind.name())]), self.errors[kind as usize].load(Relaxed)));
        all.push(counter("tollkeeper_proxy_upstream_errors", "Failures of the upstream", errors.into()));
        let one = |count: &AtomicU64| vec![(Labels::new(), count.load(Relaxed))];
        all.push(counter(
            "tollkeeper_proxy_retries",
            "Requests sent to the upstream a second time",
            one(&self.retries),
        ));
        all.push(counter(
            "tollkeeper_proxy_dropped_headers",
            "Request headers dropped because of an underscore in their name",
            one(&self.dropped_headers),
        ));
        if let Some(registered) = self.registered.get() {
            registered.families(all);
        }
        let [clients, active, upstream, idle] =
            [&self.client_connections, &self.client_active, &self.upstream_connections, &self.upstream_idle]
                .map(|count| count.load(Relaxed));
        // The pool may hold connections that the upstream has closed.
        let idle = idle.min(upstream);
        let connections = [
            ("client", "active", active),
            ("client", "idle", clients.saturating_sub(active)),
            ("upstream", "active", upstream - idle),
            ("upstream", "idle", idle),
        ];
        let connections =
            connections.map(|(side, state, count)| (labels([("side", side), ("state", state)]), count));
        all.push(Family {
            name: "tollkeeper_proxy_connections",
            help: "Open connections of the proxy",
            series: Series::Gauge(connections.into()),
        });
        all.push(gauge(
            "tollkeeper_proxy_in_flight",
            "Requests that the upstream is working on",
            self.in_flight.load(Relaxed),
        ));
        all.push(gauge(
            "tollkeeper_proxy_ejected",
            "Addresses of the upstream that are ejected because they failed",
            self.ejected.load(Relaxed),
        ));
    }
}

/// Parts of the proxy with counters of their own.
#[derive(Debug)]
struct Registered {
    access_log: Option<Arc<LineLog>>,
    gate: Gate,
    flights: SingleFlightLayer,
}

impl Registered {
    fn families(&self, all: &mut Vec<Family>) {
        if let Some(log) = &self.access_log {
            all.push(counter(
                "tollkeeper_proxy_access_log_dropped",
                "Lines that were not written to the access log",
                vec![(Labels::new(), log.dropped())],
            ));
        }
        let view = self.gate.view();
        all.push(gauge(
            "tollkeeper_proxy_concurrency_limit",
            "Requests that the upstream may have at the same time",
            view.limit.into(),
        ));
        if let Some(floor) = view.floor {
            let seconds = std::time::Duration::from(floor).as_secs_f64();
            all.push(Family {
                name: "tollkeeper_proxy_concurrency_floor_seconds",
                help: "Response time of the upstream without a queue, as the adaptive limit has measured it",
                series: Series::Seconds(vec![(Labels::new(), seconds)]),
            });
        }
        let shed = view.shed.iter().map(|(priority, count)| (labels([("priority", priority)]), *count));
        all.push(counter(
            "tollkeeper_proxy_shed",
            "Requests refused because the upstream had too many",
            shed.collect(),
        ));
        let counts = self.flights.counts();
        let results = [
            ("led", counts.led),
            ("shared", counts.shared),
            ("released", counts.released),
            ("overflowed", counts.overflowed),
        ];
        let results = results.map(|(result, count)| (labels([("result", result)]), count));
        all.push(counter("tollkeeper_proxy_shared", "Requests under single flight", results.into()));
    }
}

/// Counts something for as long as it lives.
#[derive(Debug)]
pub struct Counted {
    counters: Arc<Counters>,
    which: fn(&Counters) -> &AtomicU64,
}

impl Counted {
    /// Adds one to a counter until this is dropped.
    pub fn new(counters: &Arc<Counters>, which: fn(&Counters) -> &AtomicU64) -> Counted {
        which(counters).fetch_add(1, Relaxed);
        Counted { counters: Arc::clone(counters), which }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        (self.which)(&self.counters).fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn further_addresses_share_one_label() {
        let counters = Counters::default();
        for number in 0..MAX_ADDRESSES + 3 {
            counters.durations_of(&format!("10.0.0.{number}:80")).record(Duration::from_millis(1));
        }
        counters.durations_of("10.0.0.0:80").record(Duration::from_millis(1));
        let durations = counters.durations();
        assert_eq!(durations.len(), MAX_ADDRESSES + 1);
        let count = |label: &str| {
            let of = durations.iter().find(|(address, _)| **address == *label);
            of.map(|(_, counts)| counts.count())
        };
        assert_eq!((count("10.0.0.0:80"), count("other")), (Some(2), Some(3)));
    }
}
