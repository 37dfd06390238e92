//! Limits that travel with the request: whoever asks says what is granted, and no policy knows of it.
//!
//! Everything is a token bucket, keyed by name space, period and one value. In this process a check needs
//! neither a policy nor an allocation; a store elsewhere takes a toll, and the policies that those are made
//! of are kept for a while.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use tollkeeper_core::facts::MAX_VALUE;
use tollkeeper_core::inline::Inline;
use tollkeeper_core::key::{self, LONGEST_FAMILY};
use tollkeeper_core::toll::MAX_COST;
use tollkeeper_core::{
    Algorithm, Due, InvalidRequest, Key, OnStoreFailure, Policy, Quota, Reply, Span, Toll, Verb,
};

use crate::limiter::Limiter;
use crate::limiter::handle::{Passage, wrong};
use crate::store::{StoreFuture, Unavailable};
use crate::sync::{Mutex, lock};

/// Decides by quotas that come with the requests. Has a name space of its own in the store of its
/// [`Limiter`], whose observer is not told.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tollkeeper::{Algorithm, Limiter, OnStoreFailure, Quota};
///
/// let limiter = Limiter::builder().build().await?;
/// let meter = limiter.ad_hoc("THROTTLE", OnStoreFailure::Local);
/// let quota = Quota::new(Algorithm::TokenBucket, Quota::per_minute(30).burst(2))?;
/// assert!(meter.check("alice", &quota, 2)?.await.allowed);
/// assert!(!meter.check("alice", &quota, 1)?.await.allowed);
/// assert!(meter.forget("alice").await?);
/// assert!(meter.check("alice", &quota, 1)?.await.allowed);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct AdHocLimits {
    limiter: Limiter,
    name: Box<str>,
    on_store_failure: OnStoreFailure,
    /// A policy whose one limit stands for every limit of this process's store: only its quota is not used.
    any: Policy,
    /// What tolls for a store elsewhere are made of, by what tells their quotas apart.
    policies: Mutex<HashMap<(u64, u64, Span), Arc<Policy>>>,
    periods: Periods,
}

/// More shapes of limits than anybody writes by hand. Who makes up more makes their policies anew.
const MAX_POLICIES: usize = 1_024;

impl AdHocLimits {
    pub(crate) fn new(limiter: &Limiter, name: &str, on_store_failure: OnStoreFailure) -> AdHocLimits {
        let of_name = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || b"._-".contains(&byte);
        assert!(
            (1..=64).contains(&name.len()) && name.bytes().all(of_name),
            "a name space has 1 to 64 of `A-Z 0-9 . _ -`, so that no limit of a policy shares it: {name}"
        );
        let quota = Quota::new(Algorithm::TokenBucket, Quota::per_second(1)).expect("a quota");
        AdHocLimits {
            limiter: limiter.clone(),
            name: name.into(),
            on_store_failure,
            any: Policy::of_one(name, quota, on_store_failure),
            policies: Mutex::default(),
            periods: Periods::default(),
        }
    }

    /// Decides by this quota, and charges `cost`; 0 says how the key stands, and passes. A key keeps its
    /// count while the period is the same. Poll what comes back once, and it is on its way.
    #[inline]
    pub fn check(
        &self,
        key: &str,
        quota: &Quota,
        cost: u64,
    ) -> Result<StoreFuture<'_, Passage>, InvalidRequest> {
        debug_assert_eq!(quota.algorithm(), Algorithm::TokenBucket);
        if key.len() > MAX_VALUE || cost > MAX_COST {
            return Err(wrong(key, cost.max(1)));
        }
        self.periods.remember(quota.period());
        let Some(memory) = &self.limiter.inner.memory else { return Ok(self.ask(key, quota, cost)) };
        let family = self.family(quota.period());
        let due = Due::prepared(&self.any.rules()[0], quota, Key::of_one(&family, key), cost);
        let mut passage = Passage::of(&due);
        passage.now = memory.decide_one(&due, memory.prints().key(due.key), cost > 0, &mut passage.said);
        passage.allowed = passage.said.allowed();
        Ok(StoreFuture::Ready(passage))
    }

    /// Forgets a key, under every period that was asked for lately; false if there was nothing to forget.
    pub async fn forget(&self, key: &str) -> Result<bool, Unavailable> {
        let (mut forgotten, mut answered) = (false, Ok(()));
        if key.len() <= MAX_VALUE {
            for period in self.periods.all() {
                let family = self.family(period);
                match self.limiter.inner.store.forget(Key::of_one(&family, key)).await {
                    Ok(was_known) => forgotten |= was_known,
                    Err(unavailable) => answered = Err(unavailable),
                }
            }
        }
        answered.map(|()| forgotten)
    }

    /// Asks a store elsewhere.
    fn ask(&self, key: &str, quota: &Quota, cost: u64) -> StoreFuture<'_, Passage> {
        let verb = if cost > 0 { Verb::Check } else { Verb::Peek };
        let toll = Toll::of_one(self.policy(quota), verb, key, cost);
        let mut passage = Passage::of(&toll.get(0));
        let mut concluded = move |ruling: Reply| {
            (passage.said, passage.now) = (ruling.said()[0], ruling.time());
            passage.allowed = passage.said.allowed();
            passage
        };
        match self.limiter.inner.store.decide(&toll) {
            StoreFuture::Ready(ruling) => StoreFuture::Ready(concluded(ruling)),
            answer => StoreFuture::Later(Box::pin(async move { concluded(answer.await) })),
        }
    }

    fn policy(&self, quota: &Quota) -> Arc<Policy> {
        let mut policies = lock(&self.policies);
        let shape = (quota.count(), quota.burst(), quota.period());
        if let Some(policy) = policies.get(&shape) {
            return Arc::clone(policy);
        }
        if policies.len() == MAX_POLICIES {
            policies.clear();
        }
        let policy = Arc::new(Policy::of_one(&self.name, *quota, self.on_store_failure));
        policies.insert(shape, Arc::clone(&policy));
        policy
    }

    #[inline]
    fn family(&self, period: Span) -> Inline<u8, LONGEST_FAMILY> {
        let mut family = Inline::default();
        key::push_family(&self.name, Algorithm::TokenBucket, false, period, |part| {
            family.extend_from_slice(part);
        });
        family
    }
}

/// The periods that keys may have, which only the keys themselves know: the commonest, and those that were
/// asked for last.
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
            // Two threads may remember it twice, which costs a place.
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
    use crate::store::memory::{Capacity, MemoryStore};
    use tollkeeper_core::{Limit, Outcome, Retry, Time};

    fn world() -> (ManualClock, Limiter) {
        let hand = ManualClock::new(Time::from_micros(1_760_000_000_000_000));
        let store = MemoryStore::new(Capacity::default(), Clock::manual(&hand));
        (hand, Limiter::embedded(Policy::new(vec![]).expect("no limits"), store))
    }

    fn quota(count: u64, secs: u64, burst: u64) -> Quota {
        let rate = Quota::per(count, std::time::Duration::from_secs(secs)).burst(burst);
        Quota::new(Algorithm::TokenBucket, rate).expect("a quota")
    }

    fn now(meter: &AdHocLimits, key: &str, quota: &Quota, cost: u64) -> Outcome {
        let Ok(StoreFuture::Ready(passage)) = meter.check(key, quota, cost) else { panic!("memory answers") };
        assert_eq!(passage.allowed, passage.outcome().allowed);
        passage.outcome()
    }

    #[test]
    fn a_changed_count_keeps_the_state_and_a_changed_period_starts_afresh() {
        let (_hand, limiter) = world();
        let meter = limiter.ad_hoc("THROTTLE", OnStoreFailure::Local);
        assert_eq!(now(&meter, "alice", &quota(1, 60, 5), 4).remaining, 1);
        assert_eq!(now(&meter, "alice", &quota(2, 60, 10), 1).remaining, 5);
        assert_eq!(now(&meter, "alice", &quota(1, 61, 5), 1).remaining, 4);
    }

    #[test]
    fn name_spaces_share_nothing_with_each_other_nor_with_limits() {
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
    fn a_cost_of_nothing_looks_and_passes_even_when_nothing_is_left() {
        let (hand, limiter) = world();
        let (meter, quota) = (limiter.ad_hoc("THROTTLE", OnStoreFailure::Local), quota(1, 10, 2));
        assert_eq!(
            (now(&meter, "alice", &quota, 0).remaining, limiter.inner.memory.as_ref().map(MemoryStore::keys)),
            (2, Some(0))
        );
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
    async fn a_key_is_forgotten_under_the_periods_that_were_asked_for_last() {
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
        // Whoever makes periods up takes no more room for it.
        for secs in 1..10_000 {
            now(&meter, "bob", &quota(1, secs, 1), 1);
        }
        assert_eq!(meter.periods.all().count(), 64);
        now(&meter, "alice", &quota(1, 8, 1), 1);
        assert_eq!(meter.forget("alice").await, Ok(true));
    }
}
