//! Shared helpers of the library tests: a manual clock, and limiters and stores that use it.

#![allow(dead_code, reason = "no test file uses every helper")]

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use tollkeeper::{
    Algorithm, Capacity, Clock, Decision, Facts, Limit, Limiter, ManualClock, MemoryStore, Policy, Quota,
    Span, Time,
};

/// Midnight, UTC: windows of a minute, an hour and a day begin here.
pub(crate) const START: Time = Time::from_micros(20_370 * 86_400_000_000);

/// Every algorithm that limits a rate.
pub(crate) const RATES: [Algorithm; 5] = [
    Algorithm::TokenBucket,
    Algorithm::LeakyBucket,
    Algorithm::FixedWindow,
    Algorithm::SlidingWindow,
    Algorithm::SlidingLog,
];

/// A manual clock, set to [`START`].
pub(crate) fn clock() -> ManualClock {
    ManualClock::new(START)
}

pub(crate) fn secs(secs: u64) -> Span {
    Span::from_secs(secs)
}

pub(crate) fn millis(millis: u64) -> Span {
    Span::from_millis(millis)
}

/// An empty store for at most `max_keys` keys.
pub(crate) fn store(max_keys: usize, clock: &ManualClock) -> MemoryStore {
    MemoryStore::new(Capacity { max_keys, ..Capacity::default() }, Clock::manual(clock))
}

/// A limiter on a store of its own, and its clock.
pub(crate) fn limiter(limits: impl IntoIterator<Item = Limit>) -> (Limiter, ManualClock) {
    let clock = clock();
    (on(&store(100_000, &clock), limits), clock)
}

/// A limiter with these limits on an existing store.
pub(crate) fn on(store: &MemoryStore, limits: impl IntoIterator<Item = Limit>) -> Limiter {
    let policy = Policy::new(limits.into_iter().collect()).expect("valid limits");
    Limiter::embedded(policy, store.clone())
}

/// Ten per minute by user; the limit is named after its algorithm.
pub(crate) fn ten(algorithm: Algorithm) -> Limit {
    Limit::new(algorithm.name(), Quota::per_minute(10)).by("user").algorithm(algorithm)
}

/// The facts of a request by this user.
pub(crate) fn user(name: &str) -> Facts<'_> {
    Facts::new().with("user", name)
}

/// Checks a request of this cost.
pub(crate) fn charge(limiter: &Limiter, facts: &Facts<'_>, cost: u64) -> Decision {
    limiter.check(facts).cost(cost).wait().expect("a valid request")
}

/// Units that remain at a limit.
pub(crate) fn remaining(limiter: &Limiter, limit: &str, facts: &Facts<'_>) -> u64 {
    let usage = limiter.usage(facts).wait().expect("a valid request");
    usage.limit(limit).expect("the limit applies").outcome().remaining
}

/// The output of a future that is ready at the first poll, because the store is in this process.
pub(crate) fn now<F: IntoFuture>(future: F) -> F::Output {
    match pin!(future.into_future()).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("a store in this process answers at once"),
    }
}
