//! Collects all metrics as families of labelled series, for the text and OTLP exporters.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tollkeeper::store::{BreakerState, FailureKind};
use tollkeeper::{Limiter, Op, Permits};

pub use super::histogram::Counts;
use super::requests::RequestTally;
use super::{ConnectionTally, LimitTally, Metrics, POLICIES};
use crate::store::Store;
use crate::transport::connection_budget::Transport;

/// A metric: one series for each set of labels.
#[derive(Clone, Debug)]
pub struct Family {
    /// The name, such as `tollkeeper_checks`; exporters append `_total` to that of a counter.
    pub name: &'static str,
    /// A short description, without a full stop.
    pub help: &'static str,
    /// Its series.
    pub series: Series,
}

/// Series of one kind.
#[derive(Clone, Debug)]
pub enum Series {
    /// Values that only grow.
    Counter(Vec<(Labels, u64)>),
    /// Current values.
    Gauge(Vec<(Labels, u64)>),
    /// Current times, in seconds.
    Seconds(Vec<(Labels, f64)>),
    /// Distributions of values.
    Histogram(Vec<(Labels, Counts)>),
}

/// Label names and values; never the value of a key.
pub type Labels = Vec<(&'static str, String)>;

impl Metrics {
    /// All families with their current values.
    pub fn families(&self, limiter: &Limiter, store: &Store) -> Vec<Family> {
        let mut all = Vec::new();
        self.add_limits(&mut all);
        self.add_requests(&mut all);
        self.add_transports(&mut all);
        let reloads = [("done", &self.reloads.done), ("failed", &self.reloads.failed)];
        let reloads = reloads.map(|(result, count)| (labels([("result", result)]), count.load(Relaxed)));
        all.push(counter("tollkeeper_config_reloads", "Attempts to reload the config", reloads.into()));
        all.push(gauge(
            "tollkeeper_config_version",
            "Version of the active policy",
            limiter.policy().version(),
        ));
        if let Some(log) = self.admissions.get() {
            all.push(counter(
                "tollkeeper_admission_log_dropped",
                "Admissions that were not written to the log of --log-admissions",
                vec![(Labels::new(), log.dropped())],
            ));
        }
        all.push(gauge(
            "tollkeeper_overrides",
            "Keys that have a quota of their own, set at run time",
            limiter.override_count() as u64,
        ));
        self.add_store(&mut all, store);
        if let Some(upstream) = self.upstream.get() {
            upstream.families(&mut all);
        }
        all
    }

    fn add_limits(&self, all: &mut Vec<Family>) {
        let limits = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        let each = |value: &dyn Fn(&LimitTally) -> u64| -> Vec<(Labels, u64)> {
            limits.iter().map(|(name, tally)| (labels([("limit", name)]), value(tally))).collect()
        };
        let (mut checks, mut fallback, mut permits) = (Vec::new(), Vec::new(), Vec::new());
        for (name, tally) in limits.iter() {
            for (result, count) in [
                ("allowed", tally.sum(|stripe| &stripe.allowed)),
                ("refused", tally.sum(|stripe| &stripe.refused)),
                ("would_refuse", tally.sum(|stripe| &stripe.would_refuse)),
            ] {
                checks.push((labels([("limit", name), ("result", result)]), count));
            }
            for by in POLICIES {
                let count = tally.sum(|stripe| &stripe.fallback[by as usize]);
                fallback.push((labels([("limit", name), ("policy", by.name())]), count));
            }
            for state in Permits::ALL {
                let count = tally.sum(|stripe| &stripe.permits[state as usize]);
                permits.push((labels([("limit", name), ("state", state.name())]), count));
            }
        }
        let skipped = each(&|tally| tally.sum(|stripe| &stripe.skipped));
        let unknown = each(&|tally| tally.sum(|stripe| &stripe.unknown_tier));
        all.push(counter(
            "tollkeeper_checks",
            "Outcomes of each limit for the requests it applied to",
            checks,
        ));
        all.push(counter("tollkeeper_skipped", "Requests that lack a fact of the limit's key", skipped));
        all.push(counter("tollkeeper_unknown_tier", "Requests whose tier is not configured", unknown));
        all.push(counter(
            "tollkeeper_fallback",
            "Decisions made without the store, by failure policy",
            fallback,
        ));
        let bounded = each(&|tally| tally.sum(|stripe| &stripe.denial_bound));
        all.push(counter(
            "tollkeeper_denial_bound_hits",
            "Refusals that followed from the last state of a key, without asking the store",
            bounded,
        ));
        all.push(counter(
            "tollkeeper_lease_permits",
            "Units that the store granted to this node in advance, by what became of them",
            permits,
        ));
        let starved = self.top_keys.starved();
        let starved =
            limits.keys().map(|name| (labels([("limit", name)]), starved.get(name).copied().unwrap_or(0)));
        all.push(Family {
            name: "tollkeeper_starved_keys",
            help: "Keys refused at least once in each of the last five minutes",
            series: Series::Gauge(starved.collect()),
        });
        let remaining =
            limits.iter().map(|(name, tally)| (labels([("limit", name)]), tally.remaining.counts(1e4)));
        all.push(Family {
            name: "tollkeeper_remaining_ratio",
            help: "Units left to a key after a decision, as a fraction of its limit",
            series: Series::Histogram(remaining.collect()),
        });
    }

    fn add_requests(&self, all: &mut Vec<Family>) {
        let transports = self.transports();
        let names = self.routes.names();
        let mut requests = Vec::new();
        let mut durations = Vec::new();
        for (transport, tally) in transports {
            requests.extend(tally.ends().map(|(route, ended, count)| {
                let route = &names[route.0];
                (labels([("transport", transport), ("route", route), ("result", ended.name())]), count)
            }));
            durations.extend(tally.durations().map(|counts| (labels([("transport", transport)]), counts)));
        }
        all.push(counter("tollkeeper_requests", "Decision requests", requests));
        all.push(Family {
            name: "tollkeeper_request_duration_seconds",
            help: "Time from the last byte of a request to its response",
            series: Series::Histogram(durations),
        });
    }

    fn add_transports(&self, all: &mut Vec<Family>) {
        let each = |count: &dyn Fn(&ConnectionTally) -> &AtomicU64| -> Vec<(Labels, u64)> {
            let one = |transport: Transport| {
                let count = count(self.connections(transport)).load(Relaxed);
                (labels([("transport", transport.name())]), count)
            };
            Transport::ALL.into_iter().map(one).collect()
        };
        all.push(Family {
            name: "tollkeeper_connections",
            help: "Open connections of clients",
            series: Series::Gauge(each(&|tally| &tally.open)),
        });
        all.push(counter(
            "tollkeeper_connections_evicted",
            "Idle connections closed to make room for new ones",
            each(&|tally| &tally.evicted),
        ));
        all.push(counter(
            "tollkeeper_connections_refused",
            "Connections that could not be accepted",
            each(&|tally| &tally.refused),
        ));
        all.push(counter(
            "tollkeeper_grpc_exhausted",
            "gRPC calls refused because calls in flight used up their memory budget",
            vec![(Labels::new(), self.grpc_exhausted.load(Relaxed))],
        ));
    }

    pub(super) fn transports(&self) -> [(&'static str, &RequestTally); 5] {
        [
            ("http", &self.http),
            ("resp", &self.resp),
            ("grpc", &self.grpc),
            ("auth", &self.auth),
            ("proxy", &self.proxy),
        ]
    }

    fn add_store(&self, all: &mut Vec<Family>, store: &Store) {
        let memory = store.memory();
        all.push(gauge("tollkeeper_keys", "Keys in the memory of this process", memory.keys() as u64));
        all.push(counter(
            "tollkeeper_keys_overflow",
            "Times a new key had to share a counter because the store was full",
            vec![(Labels::new(), memory.overflows())],
        ));
        all.push(gauge(
            "tollkeeper_store_memory_bytes",
            "Memory used by keys in this process",
            memory.bytes() as u64,
        ));
        all.push(counter(
            "tollkeeper_refunds_refused",
            "Refunds and settlements refused because the store had no room for their records",
            vec![(Labels::new(), memory.corrections_refused())],
        ));
        if let Some(status) = memory.snapshots() {
            all.push(gauge(
                "tollkeeper_snapshot_age_seconds",
                "Time since the last successful snapshot, or since the start",
                status.age.as_secs(),
            ));
            all.push(counter(
                "tollkeeper_snapshot_failures",
                "Snapshots that could not be written",
                vec![(Labels::new(), status.failures)],
            ));
        }
        let Store::Redis(redis) = store else { return };
        let redis = redis.inner();
        let state = match redis.breaker() {
            BreakerState::Closed => 0,
            BreakerState::HalfOpen => 1,
            BreakerState::Open => 2,
        };
        all.push(gauge(
            "tollkeeper_breaker_state",
            "State of the circuit breaker of the store: 0 closed, 1 half-open, 2 open",
            state,
        ));
        if let Some(may_evict) = redis.remote().may_evict() {
            all.push(gauge(
                "tollkeeper_store_may_evict",
                "1 if the store may evict keys, so that limits can be exceeded",
                u64::from(may_evict),
            ));
        }
        let errors = FailureKind::ALL.map(|kind| (labels([("kind", kind.name())]), redis.failures(kind)));
        all.push(counter("tollkeeper_store_errors", "Failed calls to the store", errors.into()));
        let durations = Op::ALL.map(|op| (labels([("op", op.name())]), self.store[op as usize].counts(1e9)));
        all.push(Family {
            name: "tollkeeper_store_duration_seconds",
            help: "Time from a call to the store to its reply or timeout",
            series: Series::Histogram(durations.into()),
        });
    }
}

pub(crate) fn counter(name: &'static str, help: &'static str, series: Vec<(Labels, u64)>) -> Family {
    Family { name, help, series: Series::Counter(series) }
}

pub(crate) fn gauge(name: &'static str, help: &'static str, value: u64) -> Family {
    Family { name, help, series: Series::Gauge(vec![(Labels::new(), value)]) }
}

pub(crate) fn labels<const N: usize>(pairs: [(&'static str, &str); N]) -> Labels {
    pairs.map(|(name, value)| (name, value.to_owned())).into()
}
