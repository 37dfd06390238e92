//! An empty store for one conformance case, and helpers to use it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tollkeeper::config::{RedisUrl, StoreUrl};
use tollkeeper::policy::Grant;
use tollkeeper::store::redis::keys::Format;
use tollkeeper::store::redis::{RedisOptions, RedisStore};
use tollkeeper::{
    Algorithm, Decision, Facts, FailureKind, Limit, Limiter, MemoryStore, Policy, Quota, Resilient,
    ResilientSettings, Span, Store, Time,
};

use crate::redis::Client;

/// The rate algorithms: all but concurrency.
pub(super) const RATES: [Algorithm; 5] = [
    Algorithm::TokenBucket,
    Algorithm::LeakyBucket,
    Algorithm::FixedWindow,
    Algorithm::SlidingWindow,
    Algorithm::SlidingLog,
];

/// Long enough for a busy machine.
const PATIENT: Duration = Duration::from_secs(20);

/// A kind of store.
#[derive(Clone)]
pub struct Place {
    name: &'static str,
    remote: Option<Remote>,
}

#[derive(Clone)]
struct Remote {
    url: RedisUrl,
    format: Format,
    /// Whether a refusal may keep its charges for another round trip, until they are rolled back.
    undoes: bool,
    /// Connections to every server that holds keys.
    servers: Arc<dyn Fn() -> Vec<Client> + Send + Sync>,
}

impl Place {
    /// The memory store.
    pub fn memory() -> Place {
        Place { name: "memory", remote: None }
    }

    /// The Redis store at this URL; `servers` connects to every server that holds keys.
    pub fn redis(
        name: &'static str,
        url: &str,
        servers: impl Fn() -> Vec<Client> + Send + Sync + 'static,
    ) -> Place {
        let Ok(StoreUrl::Redis(url)) = url.parse() else { panic!("{url} is not a Redis URL") };
        let undoes = matches!(url.servers, tollkeeper::config::Servers::Cluster { .. });
        let remote = Remote { url, format: Format::Readable, undoes, servers: Arc::new(servers) };
        Place { name, remote: Some(remote) }
    }

    /// The same with compact keys.
    #[must_use]
    pub fn compact(mut self) -> Place {
        self.remote.as_mut().expect("the memory store has no key names").format = Format::Compact;
        self
    }

    /// The column title.
    pub fn name(&self) -> &str {
        self.name
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// The store of one case.
#[derive(Clone, Debug)]
pub struct World {
    place: Place,
    prefix: String,
    memory: MemoryStore,
    /// The longest that a state of this case can be needed, in microseconds.
    needed: Arc<AtomicU64>,
    opened: Arc<Mutex<Vec<Arc<Resilient<RedisStore>>>>>,
}

impl World {
    pub(super) fn new(place: &Place) -> World {
        static WORLDS: AtomicU64 = AtomicU64::new(0);
        let world = World {
            place: place.clone(),
            prefix: format!("world-{}", WORLDS.fetch_add(1, Relaxed)),
            memory: MemoryStore::default(),
            needed: Arc::default(),
            opened: Arc::default(),
        };
        if world.undoes() {
            // The markers of rollbacks live this long.
            world.needs(secs(60));
        }
        world
    }

    /// Notes that a state may be needed for `span`.
    pub(super) fn needs(&self, span: Span) {
        self.needed.fetch_max(span.as_micros(), Relaxed);
    }

    /// A limiter with its own connections.
    pub(super) fn limiter(&self, limits: impl IntoIterator<Item = Limit>) -> Limiter {
        let policy = self.policy(limits);
        match &self.place.remote {
            None => Limiter::embedded(policy, self.memory.clone()),
            Some(_) => Limiter::with_store(policy, self.store()),
        }
    }

    /// Replaces the limits.
    pub(super) fn replace(&self, limiter: &Limiter, limits: impl IntoIterator<Item = Limit>) {
        limiter.replace_policy(self.policy(limits));
    }

    /// A policy of these limits.
    pub(super) fn policy(&self, limits: impl IntoIterator<Item = Limit>) -> Policy {
        let policy = Policy::new(limits.into_iter().collect()).expect("valid limits");
        for grant in policy.rules().iter().flat_map(|rule| rule.grants()) {
            // A quota of zero keeps no state.
            if let Grant::Limited { quota, .. } = grant
                && quota.count() > 0
            {
                // A level may be twice the capacity, and a sliding window looks at two periods.
                let longest = quota.window().max(quota.period()).as_micros();
                self.needs(Span::from_micros(2 * longest));
            }
        }
        policy
    }

    /// The store alone, with its own connections.
    pub(super) fn store(&self) -> Arc<dyn Store> {
        let Some(remote) = &self.place.remote else { return Arc::new(self.memory.clone()) };
        let options =
            RedisOptions { prefix: self.prefix.clone(), format: remote.format, ..RedisOptions::default() };
        let settings = ResilientSettings { deadline: PATIENT, ..ResilientSettings::default() };
        let store = RedisStore::open(&remote.url, options);
        let store = Arc::new(Resilient::new(store, settings, MemoryStore::default()));
        self.opened.lock().expect("not poisoned").push(Arc::clone(&store));
        store
    }

    /// How often the store failed, by kind; empty if it did not.
    pub(super) fn failures(&self) -> Vec<(FailureKind, u64)> {
        let opened = self.opened.lock().expect("not poisoned");
        let of = |kind| (kind, opened.iter().map(|store| store.failures(kind)).sum());
        FailureKind::ALL.into_iter().map(of).filter(|(_, count)| *count > 0).collect()
    }

    /// Another store of the same kind that shares nothing with this one.
    pub(super) fn unrelated(&self) -> World {
        World::new(&self.place)
    }

    /// Asserts that `expected` units remain: at once, or soon where a refusal must be rolled back.
    pub(super) async fn remains(&self, limiter: &Limiter, limit: &str, facts: &Facts<'_>, expected: u64) {
        let started = Instant::now();
        loop {
            let found = remaining(limiter, limit, facts).await;
            if found == expected || !self.undoes() || started.elapsed() > PATIENT {
                assert_eq!(found, expected, "what remains at {limit}");
                return;
            }
            tokio::task::yield_now().await;
        }
    }

    /// Whether a refusal may keep its charges for another round trip, until they are rolled back.
    pub(super) fn undoes(&self) -> bool {
        self.place.remote.as_ref().is_some_and(|remote| remote.undoes)
    }

    /// Whether this store keeps keys that can be listed.
    pub(super) fn lists_keys(&self) -> bool {
        self.place.remote.is_some()
    }

    /// The states and markers of this case, with their expiry in Unix milliseconds.
    pub(super) fn keys(&self) -> Vec<(String, i64)> {
        let own = format!("{}:1:", self.prefix);
        let shared = ["secret", "policy"].map(|what| format!("{own}{what}"));
        let mut keys = self.all_keys();
        keys.retain(|(name, _)| name.starts_with(&own) && !shared.contains(name));
        keys
    }

    fn all_keys(&self) -> Vec<(String, i64)> {
        let Some(remote) = &self.place.remote else { return Vec::new() };
        let keys = (remote.servers)().into_iter().flat_map(|mut server| server.keys());
        keys.map(|(name, expires)| (String::from_utf8(name).expect("a readable name"), expires)).collect()
    }

    /// Checks that every key expires, except the secret and the policy, and none much later than needed.
    pub(super) fn check_keys(&self) -> Result<(), String> {
        let now = std::time::UNIX_EPOCH.elapsed().expect("after 1970").as_micros();
        let needed = u128::from(self.needed.load(Relaxed));
        let latest = (now + needed + needed.min(60_000_000) + 1_000_000) / 1_000 + 1;
        let own = format!("{}:", self.prefix);
        for (name, expires) in self.all_keys() {
            if name.ends_with(":1:secret") || name.ends_with(":1:policy") {
                continue;
            }
            if expires < 0 {
                return Err(format!("`{name}` never expires"));
            }
            if name.starts_with(&own) && u128::try_from(expires).is_ok_and(|expires| expires > latest) {
                return Err(format!(
                    "`{name}` expires {} ms late",
                    u128::try_from(expires).unwrap_or(0) - latest
                ));
            }
        }
        Ok(())
    }
}

/// Ten a day by user, under the name of its algorithm.
pub(super) fn ten(algorithm: Algorithm) -> Limit {
    Limit::new(algorithm.name(), Quota::per_day(10)).by("user").algorithm(algorithm)
}

/// A request of this user.
pub(super) fn user(name: &str) -> Facts<'_> {
    Facts::new().with("user", name)
}

/// Charges a request.
pub(super) async fn charge(limiter: &Limiter, facts: &Facts<'_>, cost: u64) -> Decision {
    decided(limiter.check(facts).cost(cost).await.expect("a valid request"))
}

/// Peeks: the decision that a check would get.
pub(super) async fn peek(limiter: &Limiter, facts: &Facts<'_>, cost: u64) -> Decision {
    decided(limiter.peek(facts).cost(cost).await.expect("a valid request"))
}

/// The usage of each limit.
pub(super) async fn usage(limiter: &Limiter, facts: &Facts<'_>) -> Decision {
    decided(limiter.usage(facts).await.expect("a valid request"))
}

/// The remaining units of a limit.
pub(super) async fn remaining(limiter: &Limiter, limit: &str, facts: &Facts<'_>) -> u64 {
    usage(limiter, facts).await.limit(limit).expect("the limit applies").outcome().remaining
}

/// Asserts that the store made the decision, not a fallback.
pub(super) fn decided(decision: Decision) -> Decision {
    assert_eq!(decision.degraded(), None, "the store did not answer");
    decision
}

/// Waits until the store's clock reaches `time`.
pub(super) async fn wait_until(limiter: &Limiter, facts: &Facts<'_>, time: Time) {
    loop {
        let now = usage(limiter, facts).await.time();
        if now >= time {
            return;
        }
        come_near(now, time).await;
    }
}

/// Polls until the store's clock has passed `time`, and asserts that the result changes exactly then.
pub(super) async fn changes_at<F>(what: &str, time: Time, mut look: F)
where
    F: AsyncFnMut() -> (Time, bool),
{
    loop {
        let (now, changed) = look().await;
        let off = i128::from(now.as_micros()) - i128::from(time.as_micros());
        assert_eq!(changed, now >= time, "{what}: {off} µs after it should change");
        if changed {
            return;
        }
        come_near(now, time).await;
    }
}

/// Sleeps for part of the time left, so that polling becomes dense only shortly before `time`.
async fn come_near(now: Time, time: Time) {
    let left = time.since(now).as_micros();
    tokio::time::sleep(Duration::from_micros(left.saturating_sub(5_000) / 2)).await;
}

/// Charges until a request is refused, and returns the refusal and when a retry can pass.
pub(super) async fn exhaust(limiter: &Limiter, facts: &Facts<'_>, cost: u64) -> (Decision, Time) {
    loop {
        let decision = charge(limiter, facts, cost).await;
        if !decision.allowed() {
            let at = decision.time() + decision.retry_after().expect("waiting helps");
            return (decision, at);
        }
    }
}

/// A duration of `millis` milliseconds.
pub(super) fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A span of `secs` seconds.
pub(super) fn secs(secs: u64) -> Span {
    Span::from_secs(secs)
}
