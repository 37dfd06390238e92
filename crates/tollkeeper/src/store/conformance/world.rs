//! The empty store of one case, and helpers to use it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::policy::Grant;
use crate::store::Store;
use crate::{Algorithm, Decision, Facts, Limit, Limiter, Policy, Quota, Span, Time};

use super::{StoredKey, TestedStore, Trouble};

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

/// The store of one case.
#[derive(Clone)]
pub(super) struct World {
    store: Arc<dyn TestedStore>,
    namespace: String,
    /// The longest that a state of this case can be needed, in microseconds.
    needed: Arc<AtomicU64>,
}

impl World {
    pub(super) fn new(store: &Arc<dyn TestedStore>) -> World {
        static WORLDS: AtomicU64 = AtomicU64::new(0);
        let namespace = format!("world-{}", WORLDS.fetch_add(1, Relaxed));
        let world = World { store: Arc::clone(store), namespace, needed: Arc::default() };
        if world.rolls_back() {
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
        self.store.limiter(&self.namespace, self.policy(limits))
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
        self.store.open(&self.namespace)
    }

    /// How often the store failed, and why.
    pub(super) fn trouble(&self) -> Option<Trouble> {
        self.store.trouble(&self.namespace)
    }

    /// Another store of the same kind that shares nothing with this one.
    pub(super) fn unrelated(&self) -> World {
        World::new(&self.store)
    }

    /// Asserts that `expected` units remain: at once, or soon where a refusal must be rolled back.
    pub(super) async fn remains(&self, limiter: &Limiter, limit: &str, facts: &Facts<'_>, expected: u64) {
        let started = Instant::now();
        loop {
            let found = remaining(limiter, limit, facts).await;
            if found == expected || !self.rolls_back() || started.elapsed() > PATIENT {
                assert_eq!(found, expected, "what remains at {limit}");
                return;
            }
            tokio::task::yield_now().await;
        }
    }

    /// Whether a refusal may keep its charges for another round trip, until they are rolled back.
    pub(super) fn rolls_back(&self) -> bool {
        self.store.rolls_back()
    }

    /// Whether this store keeps keys that can be listed.
    pub(super) fn lists_keys(&self) -> bool {
        self.store.keys(&self.namespace).is_some()
    }

    /// The states and markers of this case; none if the store cannot list them.
    pub(super) fn keys(&self) -> Vec<StoredKey> {
        self.store.keys(&self.namespace).unwrap_or_default()
    }

    /// Checks that every key expires, and none much later than needed.
    pub(super) fn check_keys(&self) -> Result<(), String> {
        let now = std::time::UNIX_EPOCH.elapsed().expect("after 1970").as_micros();
        let needed = u128::from(self.needed.load(Relaxed));
        let latest = now + needed + needed.min(60_000_000) + 1_002_000;
        for StoredKey { name, expires } in self.keys() {
            let Some(expires) = expires else { return Err(format!("`{name}` never expires")) };
            let expires = u128::from(expires.as_micros());
            if expires > latest {
                return Err(format!("`{name}` expires {} µs late", expires - latest));
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
