//! What the tests of the library share: a clock that stands, and a limiter on it.

#![allow(dead_code, reason = "every test file uses some of it")]

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use tollkeeper::{
    Algorithm, Capacity, Clock, Decision, Facts, Limit, Limiter, ManualClock, MemoryStore, Policy, Quota,
    Span, Time,
};

/// Midnight, UTC: windows of a minute, an hour and a day begin here.
pub(crate) const START: Time = Time::from_micros(20_370 * 86_400_000_000);

/// The algorithms of a rate.
pub(crate) const RATES: [Algorithm; 5] = [
    Algorithm::TokenBucket,
    Algorithm::LeakyBucket,
    Algorithm::FixedWindow,
    Algorithm::SlidingWindow,
    Algorithm::SlidingLog,
];

/// A clock that stands at [`START`].
pub(crate) fn clock() -> ManualClock {
    ManualClock::new(START)
}

pub(crate) fn secs(secs: u64) -> Span {
    Span::from_secs(secs)
}

pub(crate) fn millis(millis: u64) -> Span {
    Span::from_millis(millis)
}

/// An empty store for so many keys.
pub(crate) fn store(max_keys: usize, clock: &ManualClock) -> MemoryStore {
    MemoryStore::new(Capacity { max_keys, ..Capacity::default() }, Clock::manual(clock))
}

/// A limiter on a store of its own, and its clock.
pub(crate) fn limiter(limits: impl IntoIterator<Item = Limit>) -> (Limiter, ManualClock) {
    let clock = clock();
    (on(&store(100_000, &clock), limits), clock)
}

/// A limiter on this store.
pub(crate) fn on(store: &MemoryStore, limits: impl IntoIterator<Item = Limit>) -> Limiter {
    let policy = Policy::new(limits.into_iter().collect()).expect("valid limits");
    Limiter::embedded(policy, store.clone())
}

/// Ten a minute by user, under the name of its algorithm.
pub(crate) fn ten(algorithm: Algorithm) -> Limit {
    Limit::new(algorithm.name(), Quota::per_minute(10)).by("user").algorithm(algorithm)
}

/// A request of this user.
pub(crate) fn user(name: &str) -> Facts<'_> {
    Facts::new().with("user", name)
}

/// Charges a request.
pub(crate) fn charge(limiter: &Limiter, facts: &Facts<'_>, cost: u64) -> Decision {
    limiter.check(facts).cost(cost).wait().expect("a valid request")
}

/// What remains at a limit.
pub(crate) fn remaining(limiter: &Limiter, limit: &str, facts: &Facts<'_>) -> u64 {
    let usage = limiter.usage(facts).wait().expect("a valid request");
    usage.limit(limit).expect("the limit applies").outcome().remaining
}

/// The output of a future that has no reason to wait: the store is in this process.
pub(crate) fn now<F: IntoFuture>(future: F) -> F::Output {
    match pin!(future.into_future()).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("a store in this process answers at once"),
    }
}
