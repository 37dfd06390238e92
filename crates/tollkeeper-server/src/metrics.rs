//! What happened, counted: per limit by an observer of the limiter, per request by each transport.
//!
//! Every thread counts in a stripe of its own, so counting is an addition to a cache line that no other
//! thread writes; the stripes are added up when somebody asks.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use tollkeeper::{BreakerState, Decision, FailureKind, Limiter, Mode, Observer, OnStoreFailure, Policy};

use crate::busiest::Busiest;
use crate::store::Store;

const STRIPES: usize = 8;

/// All that is counted.
#[derive(Debug)]
pub struct Metrics {
    /// The tallies of the policy that was seen last, by the place of the limit in it.
    current: ArcSwap<Seen>,
    /// Those of every limit there has been: a limit that comes back goes on counting.
    limits: Mutex<BTreeMap<Box<str>, Arc<LimitTally>>>,
    /// Requests over HTTP.
    pub http: RequestTally,
    /// Requests over RESP.
    pub resp: RequestTally,
    /// Reloads that took effect, and those that did not.
    pub reloads: Reloads,
    /// Which keys come most.
    pub busiest: Busiest,
}

#[derive(Debug)]
struct Seen {
    version: u64,
    limits: Box<[Arc<LimitTally>]>,
}

/// Attempts to load the config anew.
#[derive(Debug, Default)]
pub struct Reloads {
    /// Took effect.
    pub done: AtomicU64,
    /// Changed nothing: the file is broken.
    pub failed: AtomicU64,
}

#[derive(Debug, Default)]
struct LimitTally([LimitStripe; STRIPES]);

#[derive(Debug, Default)]
#[repr(align(64))]
struct LimitStripe {
    allowed: AtomicU64,
    refused: AtomicU64,
    would_refuse: AtomicU64,
    skipped: AtomicU64,
    unknown_tier: AtomicU64,
    /// By failure policy.
    fallback: [AtomicU64; POLICIES.len()],
}

const POLICIES: [OnStoreFailure; 3] = [OnStoreFailure::Allow, OnStoreFailure::Deny, OnStoreFailure::Local];

/// How requests over one transport ended, and how long they took.
#[derive(Debug, Default)]
pub struct RequestTally([RequestStripe; STRIPES]);

#[derive(Debug, Default)]
#[repr(align(64))]
struct RequestStripe {
    allowed: AtomicU64,
    refused: AtomicU64,
    degraded: AtomicU64,
    error: AtomicU64,
    nanos: AtomicU64,
    buckets: [AtomicU64; BUCKETS.len() + 1],
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It may pass.
    Allowed,
    /// It may not.
    Refused,
    /// It was decided in place of the store.
    Degraded,
    /// It made no sense.
    Error,
}

/// How many requests ended how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts([u64; 4]);

impl Counts {
    /// One more ended so.
    #[inline]
    pub fn add(&mut self, ended: Ended) {
        self.0[ended as usize] += 1;
    }
}

/// Upper ends of the buckets of durations, in microseconds.
const BUCKETS: [u64; 14] =
    [25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000];

/// The stripe of this thread.
fn stripe() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static MINE: Cell<usize> = Cell::new(NEXT.fetch_add(1, Relaxed) % STRIPES));
    MINE.get()
}

impl Metrics {
    /// Nothing counted yet.
    pub fn new(policy: &Policy) -> Metrics {
        let metrics = Metrics {
            current: ArcSwap::from_pointee(Seen { version: 0, limits: Box::default() }),
            limits: Mutex::default(),
            http: RequestTally::default(),
            resp: RequestTally::default(),
            reloads: Reloads::default(),
            busiest: Busiest::default(),
        };
        metrics.current.store(metrics.seen(policy));
        metrics
    }

    fn seen(&self, policy: &Policy) -> Arc<Seen> {
        let mut all = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        let tally = |name: &str| Arc::clone(all.entry(name.into()).or_default());
        let limits = policy.rules().iter().map(|rule| rule.name()).map(tally).collect();
        Arc::new(Seen { version: policy.version(), limits })
    }

    /// Requests that were allowed, refused, and decided in place of the store.
    pub fn requests(&self) -> [u64; 3] {
        let http = &self.http;
        [
            http.sum(|stripe| &stripe.allowed),
            http.sum(|stripe| &stripe.refused),
            http.sum(|stripe| &stripe.degraded),
        ]
    }

    /// What each limit that was ever in force said: allowed, refused, would refuse.
    pub fn limits(&self) -> Vec<(Box<str>, [u64; 3])> {
        let limits = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = |tally: &LimitTally| {
            [
                tally.sum(|stripe| &stripe.allowed),
                tally.sum(|stripe| &stripe.refused),
                tally.sum(|stripe| &stripe.would_refuse),
            ]
        };
        limits.iter().map(|(name, tally)| (name.clone(), counts(tally))).collect()
    }

    /// Everything, as Prometheus reads it.
    pub fn text(self: &Arc<Self>, limiter: &Limiter, store: &Store) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Page {
            metrics: Arc::clone(self),
            version: limiter.policy().version(),
            store: store.clone(),
        }));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("a string takes everything");
        text
    }
}

impl Observer for Metrics {
    fn record(&self, decision: &Decision) {
        let toll = decision.toll();
        if !toll.verb().charges() {
            return;
        }
        let latest = self.current.load();
        let own;
        let seen = if latest.version == toll.policy().version() {
            &**latest
        } else {
            // The first request after a reload; or one that began before it, and counts under its own policy.
            own = self.seen(toll.policy());
            self.current.store(Arc::clone(&own));
            &*own
        };
        let stripe = stripe();
        self.busiest.record(decision, stripe);
        for (answer, place) in decision.limits().zip(toll.places()) {
            let tally = &seen.limits[place].0[stripe];
            let counter = match (answer.allowed(), answer.rule().mode()) {
                (true, _) => &tally.allowed,
                (false, Mode::Shadow) => &tally.would_refuse,
                (false, _) => &tally.refused,
            };
            counter.fetch_add(1, Relaxed);
            if let Some(by) = answer.degraded() {
                tally.fallback[by as usize].fetch_add(1, Relaxed);
            }
        }
        for place in toll.skipped() {
            seen.limits[place].0[stripe].skipped.fetch_add(1, Relaxed);
        }
        for place in toll.unknown_tiers() {
            seen.limits[place].0[stripe].unknown_tier.fetch_add(1, Relaxed);
        }
    }
}

impl RequestTally {
    /// One request ended so, after so long.
    pub fn record(&self, ended: Ended, took: Duration) {
        let mut counts = Counts::default();
        counts.add(ended);
        self.record_all(&counts, took);
    }

    /// Requests that came together ended so, after so long.
    pub fn record_all(&self, counts: &Counts, took: Duration) {
        let stripe = &self.0[stripe()];
        let counters = [&stripe.allowed, &stripe.refused, &stripe.degraded, &stripe.error];
        for (counter, count) in counters.into_iter().zip(counts.0).filter(|(_, count)| *count > 0) {
            counter.fetch_add(count, Relaxed);
        }
        let all: u64 = counts.0.iter().sum();
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = BUCKETS.iter().position(|end| micros <= *end).unwrap_or(BUCKETS.len());
        stripe.buckets[bucket].fetch_add(all, Relaxed);
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        stripe.nanos.fetch_add(nanos.saturating_mul(all), Relaxed);
    }

    fn sum(&self, field: impl Fn(&RequestStripe) -> &AtomicU64) -> u64 {
        self.0.iter().map(|stripe| field(stripe).load(Relaxed)).sum()
    }
}

impl LimitTally {
    fn sum(&self, field: impl Fn(&LimitStripe) -> &AtomicU64) -> u64 {
        self.0.iter().map(|stripe| field(stripe).load(Relaxed)).sum()
    }
}

/// One scrape.
#[derive(Debug)]
struct Page {
    metrics: Arc<Metrics>,
    version: u64,
    store: Store,
}

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        let limits = self.metrics.limits.lock().unwrap_or_else(PoisonError::into_inner);
        let mut counter = |name: &str, help: &str, rows: &[(&[(&str, &str)], u64)]| {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (labels, value) in rows {
                family.encode_family(labels)?.encode_counter::<NoLabelSet, u64, u64>(value, None)?;
            }
            Ok::<(), std::fmt::Error>(())
        };

        let mut checks = Vec::new();
        let mut skipped = Vec::new();
        let mut unknown = Vec::new();
        let mut fallback = Vec::new();
        for (name, tally) in limits.iter() {
            let with = |result| [("limit", &**name), ("result", result)];
            checks.push((with("allowed"), tally.sum(|stripe| &stripe.allowed)));
            checks.push((with("refused"), tally.sum(|stripe| &stripe.refused)));
            checks.push((with("would_refuse"), tally.sum(|stripe| &stripe.would_refuse)));
            skipped.push(([("limit", &**name)], tally.sum(|stripe| &stripe.skipped)));
            unknown.push(([("limit", &**name)], tally.sum(|stripe| &stripe.unknown_tier)));
            for by in POLICIES {
                let labels = [("limit", &**name), ("policy", by.name())];
                fallback.push((labels, tally.sum(|stripe| &stripe.fallback[by as usize])));
            }
        }
        counter("tollkeeper_checks", "What each limit said of the requests it applied to", &rows(&checks))?;
        counter("tollkeeper_skipped", "Requests without a fact that the limit counts by", &rows(&skipped))?;
        counter("tollkeeper_unknown_tier", "Requests in a tier that is not listed", &rows(&unknown))?;

        counter("tollkeeper_fallback", "Decisions made in place of the store", &rows(&fallback))?;

        let transports = [("http", &self.metrics.http), ("resp", &self.metrics.resp)];
        let mut requests = Vec::new();
        for (transport, tally) in transports {
            let with = |result| [("transport", transport), ("route", ""), ("result", result)];
            requests.push((with("allowed"), tally.sum(|stripe| &stripe.allowed)));
            requests.push((with("refused"), tally.sum(|stripe| &stripe.refused)));
            requests.push((with("degraded"), tally.sum(|stripe| &stripe.degraded)));
            requests.push((with("error"), tally.sum(|stripe| &stripe.error)));
        }
        counter("tollkeeper_requests", "Requests that asked for a decision", &rows(&requests))?;

        let reloads = &self.metrics.reloads;
        let reloads = [
            ([("result", "done")], reloads.done.load(Relaxed)),
            ([("result", "failed")], reloads.failed.load(Relaxed)),
        ];
        counter("tollkeeper_config_reloads", "Attempts to load the config anew", &rows(&reloads))?;

        if let Store::Redis(store) = &self.store {
            let errors: Vec<_> = FailureKind::ALL
                .iter()
                .map(|kind| ([("kind", kind.name())], store.failures(*kind)))
                .collect();
            counter("tollkeeper_store_errors", "Calls that the store did not answer", &rows(&errors))?;
        }

        let mut gauge = |name: &str, help: &str, value: u64| {
            let mut gauge = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            gauge.encode_gauge(&value)
        };
        gauge("tollkeeper_config_version", "Version of the policy in force", self.version)?;
        if let Some(keys) = self.store.keys() {
            gauge("tollkeeper_keys", "Keys in the memory store", keys as u64)?;
        }
        if let Store::Redis(store) = &self.store {
            let state = match store.breaker() {
                BreakerState::Closed => 0,
                BreakerState::HalfOpen => 1,
                BreakerState::Open => 2,
            };
            gauge(
                "tollkeeper_breaker_state",
                "0 the store is asked, 1 it is tried, 2 it is left alone",
                state,
            )?;
        }

        let starved = self.metrics.busiest.starved();
        let mut family = encoder.encode_descriptor(
            "tollkeeper_starved_keys",
            "Keys refused at least once in each of the last five minutes",
            None,
            MetricType::Gauge,
        )?;
        for name in limits.keys() {
            let labels = [("limit", &**name)];
            family.encode_family(&labels)?.encode_gauge(&starved.get(name).copied().unwrap_or(0))?;
        }

        let name = "tollkeeper_request_duration_seconds";
        let mut durations = encoder.encode_descriptor(
            name,
            "From the last byte of a request to its answer",
            None,
            MetricType::Histogram,
        )?;
        for (transport, tally) in transports {
            Durations(tally).encode(durations.encode_family(&[("transport", transport)])?)?;
        }
        Ok(())
    }
}

/// Rows with labels of any number.
fn rows<'a, const N: usize>(
    rows: &'a [([(&'a str, &'a str); N], u64)],
) -> Vec<(&'a [(&'a str, &'a str)], u64)> {
    rows.iter().map(|(labels, value)| (&labels[..], *value)).collect()
}

struct Durations<'a>(&'a RequestTally);

impl EncodeMetric for Durations<'_> {
    #[expect(clippy::cast_precision_loss, reason = "a sum of seconds needs no more than 52 bits")]
    fn encode(&self, mut encoder: prometheus_client::encoding::MetricEncoder<'_>) -> std::fmt::Result {
        let ends = BUCKETS.iter().map(|micros| *micros as f64 / 1e6).chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> =
            ends.enumerate().map(|(index, end)| (end, self.0.sum(|stripe| &stripe.buckets[index]))).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        let seconds = self.0.sum(|stripe| &stripe.nanos) as f64 / 1e9;
        encoder.encode_histogram::<NoLabelSet>(seconds, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}
