//! Counts decisions by limit, as the observer of the limiter, and requests by transport. Passes admissions on to their log.
//!
//! Every thread counts in a stripe of its own, so counting is an addition to a cache line that no other thread writes.
//! The stripes are summed when the metrics are read, as [`text`] or for [OTLP](crate::telemetry::otlp).

pub mod family;
mod histogram;
mod requests;
mod stripe;
pub mod text;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::LocalKey;

use tollkeeper::thread_cached::{Shareable, Shares, ThreadCached};
use tollkeeper::{
    Approximation, DecidedToll, Facts, Mode, Observer, OnStoreFailure, Op, Permits, Policy, Span,
};
use tollkeeper_core::fingerprint::Midstate;

use crate::proxy::counters::Counters;
use crate::telemetry::admission_log::AdmissionLog;
use crate::telemetry::top_keys::TopKeys;
use crate::transport::connection_budget::Transport;
pub use requests::{Ended, Endings, RequestTally, RouteLabel};

use histogram::Histogram;
pub use histogram::{Counts, DurationHistogram};
use requests::Routes;
use stripe::{STRIPES, Stripe};

/// All metrics of the server.
#[derive(Debug)]
pub struct Metrics {
    /// The tallies of the newest policy, by the index of the limit in it.
    current: ThreadCached<CountedLimits>,
    /// The tallies of ad-hoc limits, by namespace.
    ad_hoc: ThreadCached<CountedLimits>,
    /// The tallies of every limit since the start: a limit that is removed and added again keeps its counts.
    limits: Mutex<BTreeMap<Box<str>, Arc<LimitTally>>>,
    /// Requests over HTTP.
    pub http: RequestTally,
    /// Requests over RESP.
    pub resp: RequestTally,
    /// Requests over gRPC.
    pub grpc: RequestTally,
    /// Requests of gateways that use forward auth.
    pub auth: RequestTally,
    /// Requests through the proxy.
    pub proxy: RequestTally,
    routes: Routes,
    /// How long calls to a remote store took, by operation.
    store: [Histogram<{ DURATIONS.len() }>; Op::ALL.len()],
    /// Connections of each listener.
    connections: [ConnectionTally; Transport::ALL.len()],
    /// gRPC calls that were refused because calls in flight used up their memory budget.
    pub grpc_exhausted: AtomicU64,
    /// Config reloads, successful and failed.
    pub reloads: Reloads,
    /// The busiest, the most refused and the starved keys.
    pub top_keys: TopKeys,
    /// The counters of the proxy, if it runs.
    pub upstream: OnceLock<Arc<Counters>>,
    /// The log of admissions, if `--log-admissions` names a file.
    pub admissions: OnceLock<AdmissionLog>,
}

#[derive(Clone, Debug, Default)]
struct CountedLimits {
    version: u64,
    limits: Box<[SeenLimit]>,
}

#[derive(Clone, Debug)]
struct SeenLimit {
    name: Box<str>,
    tally: Arc<LimitTally>,
    /// The hash state that the hashes of its keys start from.
    family: Midstate,
}

impl Shareable for CountedLimits {
    fn share(&self) -> CountedLimits {
        self.clone()
    }

    #[inline]
    fn shares() -> &'static LocalKey<Shares<CountedLimits>> {
        thread_local! { static COUNTED: Shares<CountedLimits> = const { Shares::new() } }
        &COUNTED
    }
}

/// Connections of one listener.
#[derive(Debug, Default)]
pub struct ConnectionTally {
    /// Currently open.
    pub open: AtomicU64,
    /// Connections that could not be accepted.
    pub refused: AtomicU64,
    /// Idle connections that were closed to make room for new ones.
    pub evicted: AtomicU64,
}

/// Attempts to reload the config.
#[derive(Debug, Default)]
pub struct Reloads {
    /// Reloads that were applied.
    pub done: AtomicU64,
    /// Reloads that changed nothing, because the file is invalid.
    pub failed: AtomicU64,
}

/// The counts of one limit since the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitCounts {
    /// Allowed, refused, would refuse.
    pub results: [u64; 3],
    /// Requests that it did not apply to because a fact is absent.
    pub skipped: u64,
    /// Decisions made without the store.
    pub fallback: u64,
    /// Decisions by the share of the limit that was left, in the buckets of `tollkeeper_remaining_ratio`; not
    /// cumulative.
    pub remaining: [u64; SHARES.len()],
}

#[derive(Debug)]
struct LimitTally {
    stripes: [LimitStripe; STRIPES],
    remaining: Histogram<{ SHARES.len() }>,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct LimitStripe {
    allowed: AtomicU64,
    refused: AtomicU64,
    would_refuse: AtomicU64,
    skipped: AtomicU64,
    unknown_tier: AtomicU64,
    /// Decisions made without the store, by failure policy.
    fallback: [AtomicU64; POLICIES.len()],
    /// Refusals by a denial bound, without asking the store.
    denial_bound: AtomicU64,
    /// Units of leases, by what became of them.
    permits: [AtomicU64; Permits::ALL.len()],
}

const POLICIES: [OnStoreFailure; 3] = [OnStoreFailure::Allow, OnStoreFailure::Deny, OnStoreFailure::Local];

/// Upper bounds of the duration buckets, in nanoseconds: from 25 microseconds to a second.
const DURATIONS: [u64; 14] = [
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    1_000_000_000,
];

/// Upper bounds of the buckets of remaining units, in ten-thousandths of the limit. The first bucket counts exhausted
/// keys.
const SHARES: [u64; 7] = [0, 1_000, 2_500, 5_000, 7_500, 9_000, 10_000];

impl Metrics {
    /// Metrics at zero, with the limits of this policy.
    pub fn new(policy: &Policy) -> Metrics {
        let metrics = Metrics {
            current: ThreadCached::new(CountedLimits::default()),
            ad_hoc: ThreadCached::new(CountedLimits::default()),
            limits: Mutex::default(),
            http: RequestTally::default(),
            resp: RequestTally::default(),
            grpc: RequestTally::default(),
            auth: RequestTally::default(),
            proxy: RequestTally::default(),
            routes: Routes::default(),
            store: std::array::from_fn(|_| Histogram::new(&DURATIONS)),
            connections: Default::default(),
            grpc_exhausted: AtomicU64::new(0),
            reloads: Reloads::default(),
            top_keys: TopKeys::default(),
            upstream: OnceLock::new(),
            admissions: OnceLock::new(),
        };
        metrics.http.begin();
        metrics.current.replace(|_| metrics.counted(policy));
        metrics
    }

    /// The connection counters of a listener.
    pub fn connections(&self, transport: Transport) -> &ConnectionTally {
        &self.connections[transport as usize]
    }

    /// Counts requests by these routes from now on.
    pub fn know_routes<'a>(&self, routes: impl IntoIterator<Item = &'a str>) {
        self.routes.know(routes);
    }

    /// The route of a request, if the config names it. Other values of the fact `route` come from clients and must not
    /// become labels, because their number is unbounded.
    #[inline]
    pub fn route(&self, facts: &Facts<'_>) -> RouteLabel {
        self.routes.of(facts)
    }

    /// The label of a route of the config; of none for another name.
    pub fn route_label(&self, route: Option<&str>) -> RouteLabel {
        route.map_or(RouteLabel::NONE, |route| self.routes.named(route))
    }

    /// The name of a route; `None` if none is known.
    pub fn route_name(&self, route: RouteLabel) -> Option<Box<str>> {
        Some(self.routes.names().swap_remove(route.0)).filter(|name| !name.is_empty())
    }

    fn counted(&self, policy: &Policy) -> CountedLimits {
        self.know_routes(policy.rules().iter().flat_map(|rule| rule.patterns("route")));
        let limits = policy.rules().iter().map(|rule| self.seen_limit(rule.name())).collect();
        CountedLimits { version: policy.version(), limits }
    }

    fn seen_limit(&self, name: &str) -> SeenLimit {
        let mut all = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        SeenLimit {
            name: name.into(),
            tally: Arc::clone(all.entry(name.into()).or_default()),
            family: self.top_keys.family(name),
        }
    }

    /// Requests that were allowed, refused, and decided without the store.
    pub fn requests(&self) -> [u64; 3] {
        let mut counts = [0; 3];
        for (_, ended, count) in self.transports().into_iter().flat_map(|(_, tally)| tally.ends()) {
            match ended {
                Ended::Allowed => counts[0] += count,
                Ended::Refused => counts[1] += count,
                Ended::Degraded => counts[2] += count,
                Ended::Error => {}
            }
        }
        counts
    }

    /// The counts of every limit that was ever active.
    pub fn limits(&self) -> Vec<(Box<str>, LimitCounts)> {
        let limits = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        limits.iter().map(|(name, tally)| (name.clone(), tally.counts())).collect()
    }

    /// Counts a decision under the policy that made it.
    #[inline]
    fn count(&self, limits: &[SeenLimit], decision: &DecidedToll) {
        let (toll, stripe) = (decision.toll(), Stripe::mine());
        let mut note = self.top_keys.note(decision.time(), stripe.index());
        for (answer, place) in decision.limits().zip(toll.rule_indices()) {
            if !answer.asked() {
                continue;
            }
            let SeenLimit { tally, family, .. } = &limits[place];
            note.add(*family, &answer);
            let counts = &tally.stripes[stripe.index()];
            let counter = match (answer.allowed(), answer.rule().mode()) {
                (true, _) => &counts.allowed,
                (false, Mode::Shadow) => &counts.would_refuse,
                (false, _) => &counts.refused,
            };
            stripe.add(counter, 1);
            if let Some(by) = answer.degraded() {
                stripe.add(&counts.fallback[by as usize], 1);
            }
            match answer.approximation() {
                Some(Approximation::DenialBound) if !answer.allowed() => stripe.add(&counts.denial_bound, 1),
                Some(Approximation::Permits) if decision.allowed() => {
                    stripe.add(&counts.permits[Permits::Spent as usize], answer.due().cost);
                }
                _ => {}
            }
            if answer.counted() {
                // < 2^64: no limit is above 2^50.
                let share = (answer.remaining() * 10_000).checked_div(answer.granted()).unwrap_or(0);
                tally.remaining.record(stripe, share);
            }
        }
        drop(note);
        let mine = |place: usize| &limits[place].tally.stripes[stripe.index()];
        toll.skipped().for_each(|place| stripe.add(&mine(place).skipped, 1));
        toll.unknown_tiers().for_each(|place| stripe.add(&mine(place).unknown_tier, 1));
    }

    /// Counts the decision of an ad-hoc limit under its namespace.
    #[inline]
    fn count_ad_hoc(&self, decision: &DecidedToll) {
        let name = decision.toll().get(0).rule.name();
        let count = |counted: &CountedLimits| {
            let limit = counted.limits.iter().find(|limit| *limit.name == *name);
            limit.map(|limit| self.count(std::slice::from_ref(limit), decision)).is_some()
        };
        if !self.ad_hoc.read(|counted, _| count(counted)) {
            let add = |last: &CountedLimits| match last.limits.iter().any(|limit| *limit.name == *name) {
                true => last.clone(),
                false => {
                    let limits = last.limits.iter().cloned().chain([self.seen_limit(name)]).collect();
                    CountedLimits { version: Policy::AD_HOC, limits }
                }
            };
            count(&self.ad_hoc.replace(add));
        }
    }

    /// How long decisions in a remote store took, in milliseconds.
    pub fn store_times(&self) -> Counts {
        self.store[Op::Decide as usize].counts(1e6)
    }

    /// The 99th percentile of the duration of decisions in a remote store, in milliseconds: the upper bound of its
    /// bucket. `None` without such decisions.
    pub fn store_p99_ms(&self) -> Option<f64> {
        self.store_times().quantile(0.99)
    }
}

impl Observer for Metrics {
    fn record(&self, decision: &DecidedToll) {
        let toll = decision.toll();
        if !toll.verb().charges() {
            return;
        }
        let version = toll.policy().version();
        if version == Policy::AD_HOC {
            return self.count_ad_hoc(decision);
        }
        if let Some(log) = self.admissions.get() {
            log.add(decision);
        }
        let is_counted = self.current.read(|counted, _| {
            let same = counted.version == version;
            if same {
                self.count(&counted.limits, decision);
            }
            same
        });
        if !is_counted {
            // The first request after a reload; or one that began before it, and counts under its own policy.
            self.count(&self.current.replace(|_| self.counted(toll.policy())).limits, decision);
        }
    }

    fn asked(&self, what: Op, took: Span) {
        self.store[what as usize].record(Stripe::mine(), took.as_micros().saturating_mul(1_000));
    }

    fn permits(&self, limit: &str, state: Permits, units: u64) {
        let stripe = Stripe::mine();
        let limits = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tally) = limits.get(limit) {
            stripe.add(&tally.stripes[stripe.index()].permits[state as usize], units);
        }
    }
}

impl Default for LimitTally {
    fn default() -> LimitTally {
        LimitTally { stripes: Default::default(), remaining: Histogram::new(&SHARES) }
    }
}

impl LimitTally {
    fn counts(&self) -> LimitCounts {
        let buckets = self.remaining.counts(1.0).buckets;
        LimitCounts {
            results: [
                self.sum(|stripe| &stripe.allowed),
                self.sum(|stripe| &stripe.refused),
                self.sum(|stripe| &stripe.would_refuse),
            ],
            skipped: self.sum(|stripe| &stripe.skipped),
            fallback: (0..POLICIES.len()).map(|by| self.sum(|stripe| &stripe.fallback[by])).sum(),
            remaining: std::array::from_fn(|index| buckets[index].1),
        }
    }

    fn sum(&self, field: impl Fn(&LimitStripe) -> &AtomicU64) -> u64 {
        self.stripes.iter().map(|stripe| field(stripe).load(Relaxed)).sum()
    }
}
