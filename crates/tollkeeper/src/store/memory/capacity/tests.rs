//! Bounds the work of inserting a new key into a full store, counted in entries that a call examines, not in time.

use tollkeeper_core::{Facts, Limit, Policy, Quota, Span, Toll, Verb};

use super::super::shard::SLICE;
use super::super::{Capacity, MemoryStore};
use super::*;
use crate::clock::{Clock, ManualClock};
use crate::limiter::Limiter;

const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::TokenBucket,
    Algorithm::LeakyBucket,
    Algorithm::FixedWindow,
    Algorithm::SlidingWindow,
    Algorithm::SlidingLog,
];

/// The most entries that are examined for one new key: one slice in its own shard and, for a log, one in another.
const MOST: usize = 2 * SLICE;

fn store(capacity: Capacity) -> (MemoryStore, ManualClock) {
    let clock = ManualClock::new(Time::from_micros(1_760_000_000_000_000));
    (MemoryStore::new(capacity, Clock::manual(&clock)), clock)
}

/// One limit of 1,000 an hour by `user` for each of these algorithms.
fn limiter(store: &MemoryStore, algorithms: &[Algorithm]) -> Limiter {
    let limit = |algorithm: &Algorithm| {
        Limit::new(algorithm.name(), Quota::per_hour(1_000)).by("user").algorithm(*algorithm)
    };
    let policy = Policy::new(algorithms.iter().map(limit).collect()).expect("valid limits");
    Limiter::embedded(policy, store.clone())
}

/// Charges 1 to a user. Returns whether any of the user's keys had to share a state.
fn charge(limiter: &Limiter, user: &str) -> bool {
    let decision = limiter.check(&Facts::new().with("user", user)).wait().expect("valid facts");
    decision.limits().any(|limit| limit.outcome().overflow)
}

/// Entries examined so far, in all shards.
fn examined(store: &MemoryStore) -> usize {
    store.inner.shards.iter().map(|shard| lock(&shard.0).examined).sum()
}

/// Entries examined while `act` runs.
fn cost_of(store: &MemoryStore, act: impl FnOnce()) -> usize {
    let before = examined(store);
    act();
    examined(store) - before
}

#[test]
fn known_keys_examine_no_other_entries() {
    const KEYS: usize = 1_024;
    for algorithm in ALGORITHMS {
        let (store, _) = store(Capacity { max_keys: KEYS, ..Capacity::default() });
        let limiter = limiter(&store, &[algorithm]);
        for number in 0..2 * KEYS {
            assert_eq!(charge(&limiter, &format!("user{number}")), number >= KEYS, "{algorithm} {number}");
        }
        let entries = cost_of(&store, || {
            for number in 0..KEYS {
                assert!(!charge(&limiter, &format!("user{number}")), "{algorithm} {number}");
            }
        });
        assert_eq!(entries, 0, "{algorithm}");
        let handle = limiter.handle(algorithm.name()).expect("a plain limit");
        let layers = limiter.layers([algorithm.name()]).expect("a plain limit");
        let entries = cost_of(&store, || {
            for number in 0..KEYS {
                let user = format!("user{number}");
                assert!(handle.check(&user).expect("valid").allowed, "{algorithm} {number}");
                assert!(layers.check([&user]).expect("valid").allowed, "{algorithm} {number}");
            }
        });
        assert_eq!(entries, 0, "{algorithm}: a handle and layers");
    }
}

#[test]
fn known_key_beside_a_new_key_reclaims_only_for_the_new_one() {
    let (store, _) = store(Capacity { max_keys: 2_048, ..Capacity::default() });
    let limiter = limiter(&store, &ALGORITHMS[..2]);
    for number in 0..1_024 {
        assert!(!charge(&limiter, &format!("user{number}")));
    }
    assert!(charge(&limiter, "new"), "the store is full");
    let mut toll = Toll::new(&limiter.policy(), Verb::Check);
    for user in ["user0", "another", "user1", "user2"] {
        toll.add(&Facts::new().with("user", user), 1).expect("valid facts");
    }
    let entries = cost_of(&store, || drop(store.decide(&toll)));
    assert!((1..=2 * MOST).contains(&entries), "{entries} entries examined for two new keys of eight");
}

#[test]
fn new_key_in_a_full_store_does_bounded_work() {
    const KEYS: usize = 5_000;
    for algorithm in ALGORITHMS {
        let (store, clock) = store(Capacity { max_keys: KEYS, ..Capacity::default() });
        let limiter = limiter(&store, &[algorithm]);
        for number in 0..KEYS {
            charge(&limiter, &format!("user{number}"));
        }
        assert_eq!(examined(&store), 0, "{algorithm}: every key has room");
        // First while no key has expired, then after all have.
        for round in ["early", "late"] {
            let mut shared = 0;
            for number in 0..KEYS {
                let entries =
                    cost_of(&store, || shared += usize::from(charge(&limiter, &format!("{round}{number}"))));
                assert!(entries <= MOST, "{algorithm} {round} {number}: {entries}");
            }
            match round {
                "early" => assert_eq!(shared, KEYS, "{algorithm}"),
                _ => assert!(shared < KEYS / 100, "{algorithm}: {shared} of {KEYS} keys share a state"),
            }
            clock.advance(Span::from_secs(2 * 3_600 + 10));
        }
    }
}

#[test]
fn log_bytes_are_reclaimed_from_any_shard() {
    let (store, clock) = store(Capacity { max_keys: 8_192, max_log_bytes: 64 << 10 });
    assert!(store.inner.shards.len() > 1);
    let limit = Limit::new("log", Quota::per_hour(8_000)).by("user").algorithm(Algorithm::SlidingLog);
    let limiter = Limiter::embedded(Policy::new(vec![limit]).expect("valid"), store.clone());
    let check = |user: &str, cost| {
        limiter.check(&Facts::new().with("user", user)).cost(cost).wait().expect("valid facts")
    };
    assert!(check("large", 8_000).allowed());
    assert!(check("small", 1).allowed());
    // A log with spare capacity examines no entries. One that has to grow when the space is used up examines few.
    while store.log_bytes() <= 64 << 10 {
        check("filler", 100);
    }
    let grown = cost_of(&store, || drop(check("small", 1)));
    assert!(grown <= MOST, "{grown}");
    // Once the large log has expired it is dropped, whichever shard it is in.
    clock.advance(Span::from_secs(3_601));
    let user = "the only active user";
    let calls = (1..1_000).find(|_| !charge(&limiter, user)).expect("space for logs is freed");
    assert!(calls <= 3 * store.inner.shards.len(), "{calls} calls");
}
