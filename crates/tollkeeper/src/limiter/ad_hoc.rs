//! Ad-hoc limits: each request brings its own quota, which no policy knows.
//!
//! Every ad-hoc limit is a token bucket, keyed by namespace, period and one value. Each quota becomes a policy of one
//! limit; these policies are cached.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use tollkeeper_core::facts::MAX_VALUE;
use tollkeeper_core::key::Family;
use tollkeeper_core::toll::MAX_COST;
use tollkeeper_core::{
    Algorithm, CheckedQuota, InvalidRequest, Key, OnStoreFailure, Policy, Span, Toll, Verb,
};

use crate::limiter::Limiter;
use crate::limiter::handle::{KeyDecision, invalid_input};
use crate::store::{StoreFuture, Unavailable};
use crate::sync::{Mutex, lock};

/// Decides by quotas that come with the requests, in a namespace of its own in the store of its [`Limiter`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tollkeeper::{Algorithm, CheckedQuota, Limiter, OnStoreFailure, Quota};
///
/// let limiter = Limiter::builder().build()?;
/// let limits = limiter.ad_hoc("THROTTLE", OnStoreFailure::Local);
/// let quota = CheckedQuota::new(Algorithm::TokenBucket, Quota::per_minute(30).burst(2))?;
/// assert!(limits.check("alice", &quota, 2)?.await.allowed);
/// assert!(!limits.check("alice", &quota, 1)?.await.allowed);
/// assert!(limits.forget("alice").await?);
/// assert!(limits.check("alice", &quota, 1)?.await.allowed);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct AdHocLimits {
    limiter: Limiter,
    namespace: Box<str>,
    on_store_failure: OnStoreFailure,
    /// The policy of each quota that was used lately.
    policies: Mutex<HashMap<QuotaNumbers, Arc<Policy>>>,
    periods: Periods,
}

/// Count, burst and period, which identify a quota.
type QuotaNumbers = (u64, u64, Span);

/// How many policies are cached: more quotas than an application writes by hand.
const MAX_POLICIES: usize = 1_024;

impl AdHocLimits {
    pub(crate) fn new(limiter: &Limiter, namespace: &str, on_store_failure: OnStoreFailure) -> AdHocLimits {
        let allowed = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || b"._-".contains(&byte);
        assert!(
            (1..=64).contains(&namespace.len()) && namespace.bytes().all(allowed),
            "a namespace has 1 to 64 of `A-Z 0-9 . _ -`, so that no limit of a policy shares it: {namespace}"
        );
        AdHocLimits {
            limiter: limiter.clone(),
            namespace: namespace.into(),
            on_store_failure,
            policies: Mutex::default(),
            periods: Periods::default(),
        }
    }

    /// Decides by this quota, and charges `cost` if admitted. A cost of 0 reports the state of the key and passes. A
    /// key keeps its count while the period is the same. A remote store is called when the result is first polled.
    #[inline]
    pub fn check(
        &self,
        key: &str,
        quota: &CheckedQuota,
        cost: u64,
    ) -> Result<StoreFuture<'_, KeyDecision>, InvalidRequest> {
        debug_assert_eq!(quota.algorithm(), Algorithm::TokenBucket);
        if key.len() > MAX_VALUE || cost > MAX_COST {
            return Err(invalid_input(key, cost.max(1)));
        }
        self.periods.remember(quota.period());
        let policy = self.policy(quota);
        let verb = if cost > 0 { Verb::Check } else { Verb::Peek };
        let build = |toll: &mut Toll| {
            toll.add_value(0, key, cost);
            Ok(())
        };
        self.limiter.decide_toll(&policy, verb, build, |decision| KeyDecision::new(&decision.limit_at(0)))
    }

    /// Forgets a key under every period that was used lately; false if it had no state.
    pub async fn forget(&self, key: &str) -> Result<bool, Unavailable> {
        let (mut forgotten, mut answered) = (false, Ok(()));
        if key.len() <= MAX_VALUE {
            for period in self.periods.all() {
                let family = Family::new(&self.namespace, Algorithm::TokenBucket, false, period);
                match self.limiter.inner.backend.store().forget(Key::of_one(&family, key)).await {
                    Ok(was_known) => forgotten |= was_known,
                    Err(unavailable) => answered = Err(unavailable),
                }
            }
        }
        answered.map(|()| forgotten)
    }

    fn policy(&self, quota: &CheckedQuota) -> Arc<Policy> {
        let mut policies = lock(&self.policies);
        let numbers = (quota.count(), quota.burst(), quota.period());
        if let Some(policy) = policies.get(&numbers) {
            return Arc::clone(policy);
        }
        if policies.len() == MAX_POLICIES {
            policies.clear();
        }
        let policy = Arc::new(Policy::of_one(&self.namespace, *quota, self.on_store_failure));
        policies.insert(numbers, Arc::clone(&policy));
        policy
    }
}

/// The periods that keys may have: a few common ones, and those that were used last. A period is part of the key, so
/// forgetting a key needs it.
#[derive(Debug)]
struct Periods {
    micros: [AtomicU64; 64],
    next: AtomicUsize,
}

impl Default for Periods {
    fn default() -> Periods {
        let periods = Periods { micros: [const { AtomicU64::new(0) }; 64], next: AtomicUsize::new(0) };
        [60, 1, 3_600, 86_400].map(Span::from_secs).into_iter().for_each(|period| periods.remember(period));
        periods
    }
}

impl Periods {
    #[inline]
    fn remember(&self, period: Span) {
        let micros = period.as_micros();
        let places = self.micros.iter().map(|place| place.load(Relaxed));
        if !places.take_while(|known| *known != 0).any(|known| known == micros) {
            // Two threads may remember a period twice, which wastes one entry.
            let next = self.next.fetch_add(1, Relaxed) % self.micros.len();
            self.micros[next].store(micros, Relaxed);
        }
    }

    fn all(&self) -> impl Iterator<Item = Span> {
        let micros = self.micros.iter().map(|place| place.load(Relaxed));
        micros.take_while(|micros| *micros != 0).map(Span::from_micros)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{Clock, ManualClock};
    use crate::limiter::Backend;
    use crate::store::memory::{Capacity, MemoryStore};
    use tollkeeper_core::{Limit, Outcome, Quota, Retry, Time};

    fn stored_keys(limiter: &Limiter) -> Option<usize> {
        match &limiter.inner.backend {
            Backend::Memory(store) => Some(store.keys()),
            Backend::Remote(_) => None,
        }
    }

    fn world() -> (ManualClock, Limiter) {
        let hand = ManualClock::new(Time::from_micros(1_760_000_000_000_000));
        let store = MemoryStore::new(Capacity::default(), Clock::manual(&hand));
        (hand, Limiter::embedded(Policy::new(vec![]).expect("no limits"), store))
    }

    fn quota(count: u64, secs: u64, burst: u64) -> CheckedQuota {
        let rate = Quota::per(count, std::time::Duration::from_secs(secs)).burst(burst);
        CheckedQuota::new(Algorithm::TokenBucket, rate).expect("a quota")
    }

    fn now(meter: &AdHocLimits, key: &str, quota: &CheckedQuota, cost: u64) -> Outcome {
        let Ok(StoreFuture::Ready(passage)) = meter.check(key, quota, cost) else { panic!("memory answers") };
        assert_eq!(passage.allowed, passage.outcome().allowed);
        passage.outcome()
    }

    #[test]
    fn changed_count_keeps_the_state_of_a_key() {
        let (_hand, limiter) = world();
        let meter = limiter.ad_hoc("THROTTLE", OnStoreFailure::Local);
        assert_eq!(now(&meter, "alice", &quota(1, 60, 5), 4).remaining, 1);
        assert_eq!(now(&meter, "alice", &quota(2, 60, 10), 1).remaining, 5);
        assert_eq!(now(&meter, "alice", &quota(1, 61, 5), 1).remaining, 4);
    }

    #[test]
    fn namespaces_share_no_keys_with_limits() {
        let (_hand, limiter) = world();
        limiter
            .replace(vec![Limit::new("throttle", Quota::per_minute(1).burst(5)).by("key")])
            .expect("valid");
        let (one, two) = (
            limiter.ad_hoc("THROTTLE", OnStoreFailure::Local),
            limiter.ad_hoc("OTHER", OnStoreFailure::Local),
        );
        assert_eq!(now(&one, "alice", &quota(1, 60, 5), 5).remaining, 0);
        assert_eq!(now(&two, "alice", &quota(1, 60, 5), 1).remaining, 4);
        let decision = limiter.check(&tollkeeper_core::facts! { "key" => "alice" }).wait().expect("valid");
        assert_eq!(decision.limit("throttle").expect("it applies").outcome().remaining, 4);
    }

    #[test]
    fn cost_of_zero_reports_an_exhausted_key() {
        let (hand, limiter) = world();
        let (meter, quota) = (limiter.ad_hoc("THROTTLE", OnStoreFailure::Local), quota(1, 10, 2));
        assert_eq!((now(&meter, "alice", &quota, 0).remaining, stored_keys(&limiter)), (2, Some(0)));
        now(&meter, "alice", &quota, 2);
        let looked = now(&meter, "alice", &quota, 0);
        assert_eq!((looked.allowed, looked.remaining, looked.retry), (true, 0, None));
        assert_eq!(looked.reset_after, Some(Span::from_secs(20)));
        assert_eq!(now(&meter, "alice", &quota, 1).retry, Some(Retry::After(Span::from_secs(10))));
        hand.advance(Span::from_secs(10));
        assert!(now(&meter, "alice", &quota, 1).allowed);
    }

    #[test]
    fn keys_and_costs_are_bounded() {
        let (_hand, limiter) = world();
        let (meter, quota) = (limiter.ad_hoc("THROTTLE", OnStoreFailure::Local), quota(1, 10, 2));
        assert!(meter.check(&"x".repeat(MAX_VALUE), &quota, MAX_COST).is_ok());
        assert!(meter.check(&"x".repeat(MAX_VALUE + 1), &quota, 1).is_err());
        assert!(meter.check("x", &quota, MAX_COST + 1).is_err());
        assert!(meter.check("", &quota, 0).is_ok());
    }

    #[tokio::test]
    async fn key_is_forgotten_under_the_periods_used_last() {
        let (_hand, limiter) = world();
        let meter = limiter.ad_hoc("THROTTLE", OnStoreFailure::Local);
        assert_eq!(meter.forget("alice").await, Ok(false));
        now(&meter, "alice", &quota(1, 60, 1), 1);
        now(&meter, "alice", &quota(1, 7, 1), 1);
        assert_eq!(meter.forget("alice").await, Ok(true));
        assert_eq!(meter.forget("alice").await, Ok(false));
        for secs in [60, 7] {
            assert!(now(&meter, "alice", &quota(1, secs, 1), 1).allowed);
        }
        // The number of remembered periods is bounded.
        for secs in 1..10_000 {
            now(&meter, "bob", &quota(1, secs, 1), 1);
        }
        assert_eq!(meter.periods.all().count(), 64);
        now(&meter, "alice", &quota(1, 8, 1), 1);
        assert_eq!(meter.forget("alice").await, Ok(true));
    }

    /// Counts the decisions of each limit.
    #[derive(Debug, Default)]
    struct Recorder(Mutex<Vec<(String, bool)>>);

    impl crate::Observer for Recorder {
        fn record(&self, decided: &tollkeeper_core::DecidedToll) {
            let limits = decided.limits().map(|limit| (limit.name().to_owned(), limit.allowed()));
            lock(&self.0).extend(limits);
        }
    }

    #[test]
    fn observer_records_ad_hoc_decisions() {
        let (_hand, limiter) = world();
        let recorder = Arc::new(Recorder::default());
        assert!(limiter.observe(Arc::clone(&recorder) as _));
        let (limits, quota) = (limiter.ad_hoc("THROTTLE", OnStoreFailure::Local), quota(1, 60, 1));
        now(&limits, "alice", &quota, 1);
        now(&limits, "alice", &quota, 1);
        assert_eq!(*lock(&recorder.0), [("THROTTLE".to_owned(), true), ("THROTTLE".to_owned(), false)]);
    }
}
