//! What happened, counted: per limit by an observer of the limiter, per request by each transport.
//!
//! Every thread counts in a stripe of its own, so counting is an addition to a cache line that no other
//! thread writes; the stripes are added up when somebody asks, for [`text`] or for
//! [OTLP](crate::telemetry::otlp).

pub mod family;
mod histogram;
mod requests;
mod stripe;
pub mod text;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::LocalKey;

use tollkeeper::fingerprint::Midstate;
use tollkeeper::thread_cached::{Shareable, Shares, ThreadCached};
use tollkeeper::{Decision, Facts, Mode, Observer, OnStoreFailure, Op, Policy, Span};

use crate::telemetry::top_keys::TopKeys;
use crate::transport::connection_budget::Transport;
pub use requests::{Ended, Endings, RequestTally, RouteLabel};

use histogram::Histogram;
use requests::Routes;
use stripe::{STRIPES, Stripe};

/// All that is counted.
#[derive(Debug)]
pub struct Metrics {
    /// The tallies of the policy that was seen last, by the place of the limit in it.
    current: ThreadCached<Seen>,
    /// Those of every limit there has been: a limit that comes back goes on counting.
    limits: Mutex<BTreeMap<Box<str>, Arc<LimitTally>>>,
    /// Requests over HTTP.
    pub http: RequestTally,
    /// Requests over RESP.
    pub resp: RequestTally,
    /// Requests over gRPC.
    pub grpc: RequestTally,
    /// Requests of gateways that ask before they forward.
    pub auth: RequestTally,
    /// Requests through the proxy.
    pub proxy: RequestTally,
    routes: Routes,
    /// How long a store elsewhere took, by what it was asked.
    store: [Histogram<{ DURATIONS.len() }>; Op::ALL.len()],
    /// Connections of each listener.
    connections: [ConnectionTally; Transport::ALL.len()],
    /// Calls over gRPC that were refused because calls in flight held all memory that they may.
    pub grpc_exhausted: AtomicU64,
    /// Reloads that took effect, and those that did not.
    pub reloads: Reloads,
    /// Which keys come most.
    pub top_keys: TopKeys,
}

#[derive(Clone, Debug, Default)]
struct Seen {
    version: u64,
    limits: Box<[SeenLimit]>,
}

#[derive(Clone, Debug)]
struct SeenLimit {
    tally: Arc<LimitTally>,
    /// What the hashes of its keys begin with.
    family: Midstate,
}

impl Shareable for Seen {
    fn share(&self) -> Seen {
        self.clone()
    }

    #[inline]
    fn shares() -> &'static LocalKey<Shares<Seen>> {
        thread_local! { static SEEN: Shares<Seen> = const { Shares::new() } }
        &SEEN
    }
}

/// Connections of one listener.
#[derive(Debug, Default)]
pub struct ConnectionTally {
    /// Open now.
    pub open: AtomicU64,
    /// Could not be accepted.
    pub refused: AtomicU64,
    /// Were idle, and closed to make room for others.
    pub evicted: AtomicU64,
}

/// Attempts to load the config anew.
#[derive(Debug, Default)]
pub struct Reloads {
    /// Took effect.
    pub done: AtomicU64,
    /// Changed nothing: the file is broken.
    pub failed: AtomicU64,
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
    /// By failure policy.
    fallback: [AtomicU64; POLICIES.len()],
}

const POLICIES: [OnStoreFailure; 3] = [OnStoreFailure::Allow, OnStoreFailure::Deny, OnStoreFailure::Local];

/// Upper ends of the buckets of durations, in nanoseconds: from 25 microseconds to a second.
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

/// Upper ends of the buckets of what remains, in ten-thousandths of the limit. The first holds keys that are
/// used up.
const SHARES: [u64; 7] = [0, 1_000, 2_500, 5_000, 7_500, 9_000, 10_000];

impl Metrics {
    /// Nothing counted yet.
    pub fn new(policy: &Policy) -> Metrics {
        let metrics = Metrics {
            current: ThreadCached::new(Seen::default()),
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
        };
        metrics.http.begin();
        metrics.current.replace(|_| metrics.seen(policy));
        metrics
    }

    /// The connections of a listener.
    pub fn connections(&self, transport: Transport) -> &ConnectionTally {
        &self.connections[transport as usize]
    }

    /// Counts requests by these routes from now on.
    pub fn know_routes<'a>(&self, routes: impl IntoIterator<Item = &'a str>) {
        self.routes.know(routes);
    }

    /// The route of a request, if it has one that the config names. What else a client calls a route is
    /// not for a label: it may be anything.
    #[inline]
    pub fn route(&self, facts: &Facts<'_>) -> RouteLabel {
        self.routes.of(facts)
    }

    /// The name of a route; `None` if none is known.
    pub fn route_name(&self, route: RouteLabel) -> Option<Box<str>> {
        Some(self.routes.names().swap_remove(route.0)).filter(|name| !name.is_empty())
    }

    fn seen(&self, policy: &Policy) -> Seen {
        self.know_routes(policy.rules().iter().flat_map(|rule| rule.patterns("route")));
        let mut all = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = |name: &str| SeenLimit {
            tally: Arc::clone(all.entry(name.into()).or_default()),
            family: self.top_keys.family(name),
        };
        let limits = policy.rules().iter().map(|rule| rule.name()).map(limit).collect();
        Seen { version: policy.version(), limits }
    }

    /// Requests that were allowed, refused, and decided in place of the store.
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

    /// Counts a decision under the policy it was made by.
    #[inline]
    fn count(&self, seen: &Seen, decision: &Decision) {
        let (toll, stripe) = (decision.toll(), Stripe::mine());
        let mut note = self.top_keys.note(decision.time(), stripe.index());
        for (answer, place) in decision.limits().zip(toll.places()) {
            let SeenLimit { tally, family } = &seen.limits[place];
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
            if answer.counted() {
                // < 2^64: no limit is above 2^50.
                let share = (answer.remaining() * 10_000).checked_div(answer.granted()).unwrap_or(0);
                tally.remaining.record(stripe, share);
            }
        }
        drop(note);
        let mine = |place: usize| &seen.limits[place].tally.stripes[stripe.index()];
        toll.skipped().for_each(|place| stripe.add(&mine(place).skipped, 1));
        toll.unknown_tiers().for_each(|place| stripe.add(&mine(place).unknown_tier, 1));
    }

    /// How long 99 of 100 decisions of a store elsewhere take at most, in milliseconds: the end of the bucket that
    /// the 99th is in. Nothing if none was asked for.
    pub fn store_p99_ms(&self) -> Option<f64> {
        self.store[Op::Decide as usize].counts(1e6).quantile(0.99)
    }
}

impl Observer for Metrics {
    fn record(&self, decision: &Decision) {
        let toll = decision.toll();
        if !toll.verb().charges() {
            return;
        }
        let version = toll.policy().version();
        let is_counted = self.current.read(|seen, _| {
            let same = seen.version == version;
            if same {
                self.count(seen, decision);
            }
            same
        });
        if !is_counted {
            // The first request after a reload; or one that began before it, and counts under its own policy.
            self.count(&self.current.replace(|_| self.seen(toll.policy())), decision);
        }
    }

    fn asked(&self, what: Op, took: Span) {
        self.store[what as usize].record(Stripe::mine(), took.as_micros().saturating_mul(1_000));
    }
}

impl Default for LimitTally {
    fn default() -> LimitTally {
        LimitTally { stripes: Default::default(), remaining: Histogram::new(&SHARES) }
    }
}

impl LimitTally {
    fn sum(&self, field: impl Fn(&LimitStripe) -> &AtomicU64) -> u64 {
        self.stripes.iter().map(|stripe| field(stripe).load(Relaxed)).sum()
    }
}
