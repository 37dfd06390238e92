//! The memory store at its capacity: the cap on keys holds, and no limit is exceeded because of it.

mod support;

use std::sync::Arc;
use std::time::Duration;

use support::*;
use tollkeeper::store::Toll;
use tollkeeper::{
    Algorithm, Capacity, Clock, Correction, Decision, Facts, Limit, Limiter, ManualClock, MemoryStore,
    Policy, Quota, Span, Time, Verb, facts,
};

/// Algorithms that count units for each key.
const COUNTED: [Algorithm; 4] =
    [Algorithm::TokenBucket, Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog];

/// Ten per hour by user.
fn hourly(algorithm: Algorithm) -> Limit {
    Limit::new("limit", Quota::per_hour(10)).by("user").algorithm(algorithm)
}

/// One per second by the fact `brief`: its key occupies an entry of the store for a second.
fn brief() -> Limit {
    Limit::new("brief", Quota::per_second(1)).by("brief").algorithm(Algorithm::FixedWindow)
}

fn occupy(limiter: &Limiter, name: &str) -> Decision {
    charge(limiter, &facts! { "brief" => name }, 1)
}

fn overflowed(decision: &Decision) -> bool {
    decision.limits().any(|limit| limit.outcome().overflow)
}

fn names(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{prefix}{number}")).collect()
}

/// Ten times as many new keys as the cap.
#[test]
fn flood_of_new_keys_evicts_no_known_key() {
    const MAX_KEYS: usize = 20_000;
    for algorithm in COUNTED {
        let clock = clock();
        let store = store(MAX_KEYS, &clock);
        let limiter = on(&store, [hourly(algorithm)]);
        let (exhausted, half) = (names("exhausted", 1_000), names("half", 1_000));
        exhausted.iter().for_each(|name| assert!(charge(&limiter, &user(name), 10).allowed()));
        half.iter().for_each(|name| assert!(charge(&limiter, &user(name), 5).allowed()));
        let assert_known_keys = |when: &str| {
            for name in &exhausted {
                let refused = charge(&limiter, &user(name), 1);
                assert!(!refused.allowed() && !overflowed(&refused), "{algorithm} {when}: {name}");
            }
            for name in &half {
                let usage = limiter.usage(&user(name)).wait().unwrap();
                let outcome = usage.limit("limit").unwrap().outcome();
                assert_eq!((outcome.remaining, outcome.overflow), (5, false), "{algorithm} {when}: {name}");
            }
        };
        assert_known_keys("before");
        let mut shared = 0;
        for number in 0..10 * MAX_KEYS {
            let decision = charge(&limiter, &user(&format!("flood{number}")), 1);
            let overflow = overflowed(&decision);
            shared += u64::from(overflow);
            assert_eq!(overflow, number >= MAX_KEYS - 2_000, "{algorithm}: {number}");
            assert!(store.keys() <= MAX_KEYS, "{algorithm}: {} keys", store.keys());
            if number % (4 * MAX_KEYS) == MAX_KEYS {
                assert_known_keys("during");
            }
        }
        assert_known_keys("after");
        assert_eq!(store.keys(), MAX_KEYS, "{algorithm}");
        assert_eq!(store.overflows(), shared, "{algorithm}");
        half.iter().for_each(|name| assert!(charge(&limiter, &user(name), 5).allowed()));
        half.iter().for_each(|name| assert!(!charge(&limiter, &user(name), 1).allowed()));
    }
}

#[test]
fn live_keys_up_to_the_cap_are_not_shared() {
    for max_keys in [1, 2, 100, 5_000] {
        for algorithm in RATES {
            let store = store(max_keys, &clock());
            let limiter = on(&store, [hourly(algorithm)]);
            for name in names("user", max_keys) {
                assert!(!overflowed(&charge(&limiter, &user(&name), 1)), "{algorithm} of {max_keys}");
            }
            assert_eq!((store.keys(), store.overflows()), (max_keys, 0), "{algorithm}");
            let one_more = charge(&limiter, &user("one more"), 1);
            assert!(overflowed(&one_more), "{algorithm} of {max_keys}");
            assert_eq!((store.keys(), store.overflows()), (max_keys, 1), "{algorithm}");
        }
    }
}

/// It is not counted as an overflow.
#[test]
fn peek_at_a_full_store_shows_the_shared_cell() {
    let store = store(1, &clock());
    let limiter = on(&store, [hourly(Algorithm::FixedWindow), brief()]);
    occupy(&limiter, "a");
    assert!(charge(&limiter, &user("bob"), 4).allowed());
    assert_eq!(store.overflows(), 1);
    let peek = limiter.peek(&user("carol")).wait().unwrap();
    let outcome = peek.limit("limit").unwrap().outcome();
    assert_eq!((outcome.remaining, outcome.overflow), (6, true));
    assert_eq!((store.overflows(), store.keys()), (1, 1));
}

/// Together they are admitted no more than one key would be.
#[test]
fn overflowing_keys_share_one_quota() {
    for algorithm in COUNTED {
        let clock = clock();
        let store = store(1, &clock);
        let limiter = on(&store, [hourly(algorithm), brief()]);
        occupy(&limiter, "a");
        let admitted: usize = names("user", 50)
            .iter()
            .map(|name| charge(&limiter, &user(name), 1))
            .inspect(|decision| assert!(overflowed(decision)))
            .filter(|decision| decision.allowed())
            .count();
        assert_eq!(admitted, 10, "{algorithm}");
        assert_eq!((store.keys(), store.overflows()), (1, 50), "{algorithm}");
        assert!(!occupy(&limiter, "a").allowed(), "{algorithm}: known keys are not affected");
    }
}

#[test]
fn overflow_cells_are_separate_for_each_limit() {
    let store = store(1, &clock());
    let other = Limit::new("other", Quota::per_hour(10)).by("other").algorithm(Algorithm::FixedWindow);
    let limiter = on(&store, [hourly(Algorithm::FixedWindow), other, brief()]);
    occupy(&limiter, "a");
    assert!(charge(&limiter, &user("alice"), 10).allowed());
    assert!(!charge(&limiter, &user("bob"), 1).allowed());
    assert!(charge(&limiter, &facts! { "other" => "bob" }, 10).allowed());
}

#[test]
fn key_leaving_overflow_starts_from_the_shared_state() {
    for algorithm in COUNTED {
        let clock = clock();
        let store = store(1, &clock);
        let limiter = on(&store, [hourly(algorithm), brief()]);
        occupy(&limiter, "a");
        assert!(overflowed(&charge(&limiter, &user("alice"), 8)), "{algorithm}");
        clock.advance(secs(2)); // the entry of the other key is free now
        let own = charge(&limiter, &user("alice"), 1);
        assert!(own.allowed() && !overflowed(&own), "{algorithm}: it has an entry of its own");
        assert_eq!(
            own.limit("limit").unwrap().outcome().remaining,
            1,
            "{algorithm}: it is not a fresh state"
        );
        assert_eq!(store.keys(), 1);
        // The shared state is unchanged: keys that still share it see eight used, not nine.
        assert_eq!(remaining(&limiter, "limit", &user("bob")), 2, "{algorithm}");
        assert!(!charge(&limiter, &user("alice"), 2).allowed(), "{algorithm}");
        assert!(charge(&limiter, &user("alice"), 1).allowed(), "{algorithm}");
    }
}

#[test]
fn refused_key_leaving_overflow_stays_refused() {
    for algorithm in COUNTED {
        let clock = clock();
        let store = store(1, &clock);
        let limiter = on(&store, [hourly(algorithm), brief()]);
        occupy(&limiter, "a");
        assert!(charge(&limiter, &user("alice"), 10).allowed(), "{algorithm}");
        clock.advance(secs(2));
        for _ in 0..3 {
            assert!(!charge(&limiter, &user("alice"), 1).allowed(), "{algorithm}");
        }
        assert_eq!(store.keys(), 0, "{algorithm}: a refusal takes no entry");
    }
}

#[test]
fn only_states_equal_to_fresh_ones_are_dropped() {
    let clock = clock();
    let store = store(100, &clock);
    // A bucket refills one unit every six seconds.
    let limiter = on(&store, [ten(Algorithm::TokenBucket)]);
    let (light, heavy) = (names("light", 50), names("heavy", 50));
    light.iter().for_each(|name| drop(charge(&limiter, &user(name), 1)));
    heavy.iter().for_each(|name| drop(charge(&limiter, &user(name), 10)));
    clock.advance(Span::from_micros(5_999_999));
    assert!(overflowed(&charge(&limiter, &user("early"), 1)), "no state has expired yet");
    assert_eq!(store.keys(), 100);
    clock.advance(millis(7)); // lifetimes are rounded up by a thousandth
    for name in names("new", 50) {
        // Nine, because it may start from the shared state, which holds the unit charged to `early`.
        let decision = charge(&limiter, &user(&name), 9);
        assert!(decision.allowed() && !overflowed(&decision), "{name} takes the entry of an expired key");
        assert!(store.keys() <= 100);
    }
    assert!(overflowed(&charge(&limiter, &user("late"), 1)));
    for name in heavy.iter().chain(&names("new", 50)) {
        assert!(!charge(&limiter, &user(name), 2).allowed(), "{name} lost its state");
    }
}

#[test]
fn capacity_is_reclaimed_from_fresh_states() {
    for algorithm in RATES {
        let clock = clock();
        let store = store(500, &clock);
        let limiter = on(&store, [ten(algorithm)]);
        for round in 0..4 {
            for number in 0..500 {
                let decision = charge(&limiter, &user(&format!("user{round}-{number}")), 10);
                assert!(decision.allowed() && !overflowed(&decision), "{algorithm} {round} {number}");
                assert!(store.keys() <= 500);
            }
            assert!(overflowed(&charge(&limiter, &user("more"), 1)), "{algorithm} {round}");
            clock.advance(secs(121));
        }
        assert_eq!(store.overflows(), 4, "{algorithm}");
    }
}

#[test]
fn key_swept_during_a_toll_starts_fresh() {
    for algorithm in RATES {
        let clock = clock();
        let store = store(400, &clock);
        let by_request = Limit::new("by-request", Quota::per_minute(10)).by("request").algorithm(algorithm);
        let limiter = on(&store, [by_request, ten(algorithm)]);
        let users = names("user", 180);
        users.iter().for_each(|name| drop(charge(&limiter, &user(name), 10)));
        clock.advance(secs(121));
        // Their states equal a fresh one, so a table that must grow for a new key drops them, even the
        // state that the current toll has already found.
        for name in &users {
            let decision = charge(&limiter, &facts! { "request" => name, "user" => name }, 4);
            assert!(decision.allowed() && !overflowed(&decision), "{algorithm} {name}");
            assert_eq!(remaining(&limiter, algorithm.name(), &user(name)), 6, "{algorithm} {name}");
            assert!(store.keys() <= 400);
        }
        assert_eq!(store.keys(), 360, "{algorithm}: every key is counted once");
    }
}

/// Decides several sets of facts as one toll.
fn decide_together(
    store: &MemoryStore,
    policy: &Arc<Policy>,
    verb: Verb,
    sets: &[Facts<'_>],
    cost: u64,
) -> Decision {
    let mut toll = Toll::new(policy, verb);
    sets.iter().for_each(|facts| toll.add(facts, cost).expect("valid facts"));
    let reply = store.decide(&toll);
    Decision::new(toll, reply)
}

#[test]
fn two_keys_of_a_toll_in_one_cell_are_charged_together() {
    for algorithm in COUNTED {
        let store = store(1, &clock());
        let policy = Arc::new(Policy::new(vec![hourly(algorithm), brief()]).unwrap());
        let limiter = on(&store, [hourly(algorithm), brief()]);
        occupy(&limiter, "a");
        let both = [user("alice"), user("bob")];
        let check = |cost, allowed, left| {
            let decision = decide_together(&store, &policy, Verb::Check, &both, cost);
            assert_eq!(decision.allowed(), allowed, "{algorithm} {cost}");
            for limit in decision.limits() {
                assert!(limit.outcome().overflow, "{algorithm}");
                assert_eq!(limit.outcome().remaining, left, "{algorithm} {cost}");
            }
            decision
        };
        let paid = check(3, true, 4);
        check(3, false, 4); // six more do not fit, and nothing is charged
        check(2, true, 0);
        check(1, false, 0);
        // Each key is an item of the charge.
        let charge = paid.charge().expect("admitted");
        assert_eq!(charge.items().len(), 2, "{algorithm}");
        assert_eq!(remaining(&limiter, "limit", &user("carol")), 0, "{algorithm}");
    }
}

/// Another key of the same toll uses that cell.
#[test]
fn log_moved_into_a_cell_keeps_its_stamps() {
    // Capacity for one key and one log of 64 bytes: nine timestamps of seven bytes.
    let clock = clock();
    let store = MemoryStore::new(Capacity { max_keys: 1, max_log_bytes: 64 }, Clock::manual(&clock));
    let limit = || Limit::new("limit", Quota::per_hour(20)).by("user").algorithm(Algorithm::SlidingLog);
    let policy = Arc::new(Policy::new(vec![limit()]).unwrap());
    let limiter = on(&store, [limit()]);
    assert!(charge(&limiter, &user("bob"), 9).allowed());
    // Alice gets no entry, and bob's log cannot grow: both end in one shared state.
    let both = [user("alice"), user("bob")];
    assert!(decide_together(&store, &policy, Verb::Check, &both, 1).allowed());
    assert_eq!(remaining(&limiter, "limit", &user("bob")), 9, "eleven of twenty are used");
    assert!(!charge(&limiter, &user("bob"), 10).allowed());
}

#[test]
fn charge_to_a_shared_state_is_refunded_there() {
    for algorithm in COUNTED {
        let clock = clock();
        let store = store(64, &clock);
        let limiter = on(&store, [hourly(algorithm), brief()]);
        names("a", 64).iter().for_each(|name| drop(occupy(&limiter, name)));
        let first = charge(&limiter, &user("alice"), 6);
        assert!(overflowed(&first), "{algorithm}");
        let paid = first.charge().unwrap();
        let opened =
            limiter.open_charge(&limiter.seal_charge(&paid)).wait().unwrap().expect("this store wrote it");
        assert_eq!(now(limiter.refund(&opened)), Correction::Done, "{algorithm}");
        assert_eq!(remaining(&limiter, "limit", &user("alice")), 10, "{algorithm}");
        assert_eq!(now(limiter.refund(&paid)), Correction::Repeated, "{algorithm}");
    }
}

#[test]
fn slots_in_a_shared_state_are_released_and_renewed_there() {
    let clock = clock();
    let store = store(1, &clock);
    let slots = Limit::new("slots", Quota::slots(2)).by("user").ttl(Duration::from_secs(60));
    let limiter = on(&store, [slots, brief()]);
    occupy(&limiter, "a");
    let acquire = |name: &str| now(limiter.acquire(&user(name))).unwrap();
    let alice = acquire("alice").slot.expect("a slot is free");
    let _bob = acquire("bob").slot.expect("another is free");
    assert!(!acquire("carol").decision.allowed(), "all three share two slots");
    assert!(now(alice.renew()).unwrap());
    // Alice's key gets an entry of its own with a copy of the held slots: her slot is in both states.
    clock.advance(secs(2));
    assert!(!acquire("alice").decision.allowed());
    drop(alice);
    assert!(acquire("carol").decision.allowed());
}

#[test]
fn logs_are_bounded_in_bytes_and_stay_exact() {
    const QUOTA: u64 = 40;
    const MAX_LOG_BYTES: usize = 50_000;
    let clock = clock();
    let capacity = Capacity { max_keys: 64, max_log_bytes: MAX_LOG_BYTES };
    let store = MemoryStore::new(capacity, Clock::manual(&clock));
    let limit = || Limit::new("limit", Quota::per_hour(QUOTA)).by("user").algorithm(Algorithm::SlidingLog);
    let wide = Limit::new("wide", Quota::per_hour(100_000)).by("wide").algorithm(Algorithm::SlidingLog);
    let limiter = on(&store, [limit(), wide]);
    let known = names("known", 20);
    known[..10].iter().for_each(|name| assert!(charge(&limiter, &user(name), QUOTA).allowed()));
    known[10..].iter().for_each(|name| assert!(charge(&limiter, &user(name), QUOTA / 2).allowed()));
    // One key uses up all log bytes.
    let overflows = |_| overflowed(&charge(&limiter, &facts! { "wide" => "w" }, 100));
    assert!((0..2 * MAX_LOG_BYTES / 700).any(overflows), "the log bytes run out");
    // A log may double once more when it grows; shared states hold as much as their keys may use.
    let shared = 64 * 2 * usize::try_from(2 * QUOTA).unwrap() * 7;
    assert!(store.log_bytes() > MAX_LOG_BYTES / 2);
    let mut admitted = vec![0; known.len()];
    for _ in 0..QUOTA {
        for (name, admitted) in known.iter().zip(&mut admitted) {
            *admitted += u64::from(charge(&limiter, &user(name), 1).allowed());
            assert!(store.log_bytes() <= 2 * MAX_LOG_BYTES + shared, "{} bytes", store.log_bytes());
        }
    }
    println!("{} bytes", store.log_bytes());
    assert_eq!(admitted[..10], [0; 10], "exhausted keys stay exhausted");
    assert!(admitted[10..].iter().all(|admitted| *admitted <= QUOTA / 2), "{admitted:?}");
    // When the logs have expired, their capacity is free again.
    clock.advance(secs(3_601));
    store.sweep();
    assert_eq!((store.keys(), store.log_bytes()), (0, 0));
    assert!(!overflowed(&charge(&limiter, &user("known0"), QUOTA)));
}

#[test]
fn cap_of_zero_is_treated_as_one() {
    let store = store(0, &clock());
    let limiter = on(&store, [hourly(Algorithm::FixedWindow)]);
    assert!(!overflowed(&charge(&limiter, &user("alice"), 10)));
    assert!(overflowed(&charge(&limiter, &user("bob"), 1)));
    assert!(!charge(&limiter, &user("alice"), 1).allowed());
}

/// Steps the clock by an hour, back or forward.
fn step(clock: &ManualClock, back: bool) {
    let micros = clock.now().as_micros();
    clock.set(Time::from_micros(if back { micros - 3_600_000_000 } else { micros + 3_600_000_000 }));
}

/// The limit refuses no longer than its retry time.
#[test]
fn clock_stepping_back_an_hour_gives_no_credit() {
    for algorithm in RATES {
        let (limiter, clock) = limiter([ten(algorithm)]);
        let alice = user("alice");
        charge(&limiter, &alice, 10);
        step(&clock, true);
        let peek = limiter.peek(&alice).wait().unwrap();
        assert!(!peek.allowed(), "{algorithm}: no credit");
        let refused = charge(&limiter, &alice, 1);
        assert!(!refused.allowed(), "{algorithm}: no credit");
        // The refusal has moved the state to the new time, so its retry time is right.
        let wait = refused.retry_after().unwrap();
        assert!(
            wait <= secs(if algorithm == Algorithm::SlidingWindow { 120 } else { 60 }),
            "{algorithm}: {wait}"
        );
        clock.advance(wait);
        assert!(charge(&limiter, &alice, 1).allowed(), "{algorithm}");
        // Two periods after the step the full quota is available; a sliding window takes three.
        clock.advance(secs(if algorithm == Algorithm::SlidingWindow { 180 } else { 120 }));
        assert!(charge(&limiter, &alice, 10).allowed(), "{algorithm}");
    }
}

#[test]
fn clock_stepping_back_a_little_keeps_the_state() {
    for (algorithm, retry) in [
        (Algorithm::TokenBucket, 16),
        (Algorithm::LeakyBucket, 16),
        (Algorithm::FixedWindow, 70),
        (Algorithm::SlidingWindow, 76),
        (Algorithm::SlidingLog, 70),
    ] {
        let (limiter, clock) = limiter([ten(algorithm)]);
        let alice = user("alice");
        charge(&limiter, &alice, 10);
        clock.set(Time::from_micros(START.as_micros() - 10_000_000));
        for _ in 0..3 {
            assert_eq!(charge(&limiter, &alice, 1).retry_after(), Some(secs(retry)), "{algorithm}");
        }
        clock.advance(Span::from_micros(secs(retry).as_micros() - 1));
        assert!(!charge(&limiter, &alice, 1).allowed(), "{algorithm}");
        clock.advance(Span::from_micros(1));
        assert!(charge(&limiter, &alice, 1).allowed(), "{algorithm}");
    }
}

/// Stepping back afterwards gives no second one.
#[test]
fn clock_stepping_forward_an_hour_gives_one_burst() {
    for algorithm in RATES {
        let (limiter, clock) = limiter([ten(algorithm)]);
        let alice = user("alice");
        charge(&limiter, &alice, 10);
        step(&clock, false);
        assert!(charge(&limiter, &alice, 10).allowed(), "{algorithm}: a step looks like elapsed time");
        assert!(!charge(&limiter, &alice, 1).allowed(), "{algorithm}: one burst");
        for _ in 0..5 {
            step(&clock, true);
            assert!(
                !charge(&limiter, &alice, 1).allowed(),
                "{algorithm}: usage recorded an hour ahead counts now"
            );
        }
    }
}

#[test]
fn jumping_clock_admits_one_burst_per_forward_step() {
    for algorithm in RATES {
        let (limiter, clock) = limiter([ten(algorithm)]);
        let alice = user("alice");
        let mut admitted = 0;
        for _ in 0..10 {
            for back in [false, true] {
                step(&clock, back);
                for _ in 0..30 {
                    admitted += u64::from(charge(&limiter, &alice, 1).allowed());
                }
            }
        }
        assert!(admitted <= 10 + 10 * 10, "{algorithm}: {admitted}");
    }
}
