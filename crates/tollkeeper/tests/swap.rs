//! Replacing the policy of a running limiter, and handles, which follow the change.

#![expect(clippy::unwrap_used, reason = "test helpers may panic like tests")]

mod support;

use support::*;
use tollkeeper::facts::FactProblem;
use tollkeeper::{
    Algorithm, Allowance, Facts, HandleError, InvalidFact, InvalidRequest, Limit, Mode, Policy, Quota, Retry,
    Verdict, facts,
};

fn not_plain(name: &str) -> HandleError {
    HandleError::NotPlain(name.to_owned())
}

#[test]
fn counters_stay_when_period_and_algorithm_do() {
    for algorithm in RATES {
        let (limiter, _) = limiter([ten(algorithm)]);
        let alice = user("alice");
        charge(&limiter, &alice, 4);
        let limit =
            |count| Limit::new(algorithm.name(), Quota::per_minute(count)).by("user").algorithm(algorithm);
        for (count, left) in [(100, 96), (6, 2), (3, 0), (10, 6)] {
            limiter.replace(vec![limit(count)]).unwrap();
            assert_eq!(remaining(&limiter, algorithm.name(), &alice), left, "{algorithm} at {count}");
        }
        // Other settings of the limit, and other limits around it, keep the counters, too.
        let same = limit(10).unless("route", "/health").override_for("bob", Quota::per_minute(1));
        limiter.replace(vec![ten_an_hour(), same]).unwrap();
        assert_eq!(remaining(&limiter, algorithm.name(), &alice), 6, "{algorithm}");
    }
}

fn ten_an_hour() -> Limit {
    Limit::new("another", Quota::per_hour(10)).by("user")
}

/// Changing back finds the old state.
#[test]
fn changed_period_or_algorithm_starts_fresh() {
    for algorithm in RATES {
        let (limiter, _) = limiter([ten(algorithm)]);
        let alice = user("alice");
        charge(&limiter, &alice, 4);
        let hourly = Limit::new(algorithm.name(), Quota::per_hour(10)).by("user").algorithm(algorithm);
        let index = RATES.iter().position(|other| *other == algorithm).unwrap();
        let other = RATES[(index + 1) % RATES.len()];
        let other_algorithm = Limit::new(algorithm.name(), Quota::per_minute(10)).by("user").algorithm(other);
        for changed in [hourly, other_algorithm] {
            limiter.replace(vec![changed]).unwrap();
            assert_eq!(remaining(&limiter, algorithm.name(), &alice), 10, "{algorithm}");
        }
        limiter.replace(vec![ten(algorithm)]).unwrap();
        assert_eq!(remaining(&limiter, algorithm.name(), &alice), 6, "{algorithm}");
    }
}

#[test]
fn a_changed_tier_keeps_the_count_when_its_period_is_the_same() {
    let (limiter, _) = limiter([Limit::tiered("plan", "plan")
        .by("user")
        .tier("free", Quota::per_minute(10))
        .tier("pro", Quota::per_minute(100))
        .tier("daily", Quota::per_day(100))
        .default_tier("free")]);
    let of = |plan: &'static str| facts! { "user" => "alice", "plan" => plan };
    charge(&limiter, &of("free"), 4);
    assert_eq!(remaining(&limiter, "plan", &of("pro")), 96);
    charge(&limiter, &of("pro"), 50);
    assert_eq!(remaining(&limiter, "plan", &of("free")), 0);
    assert_eq!(remaining(&limiter, "plan", &of("daily")), 100);
}

#[test]
fn lowering_and_raising_a_burst_keeps_the_count() {
    let bucket = |burst| Limit::new("limit", Quota::per_minute(10).burst(burst)).by("user");
    let (limiter, _) = limiter([bucket(20)]);
    let alice = user("alice");
    charge(&limiter, &alice, 20);
    limiter.replace(vec![bucket(5)]).unwrap();
    let refused = charge(&limiter, &alice, 1);
    assert_eq!(refused.retry_after(), Some(secs(16 * 6)), "the level drains from 20 to 4");
    limiter.replace(vec![bucket(20)]).unwrap();
    assert_eq!(charge(&limiter, &alice, 1).retry_after(), Some(secs(6)));
}

#[test]
fn versions_count_up_and_a_broken_policy_changes_nothing() {
    let (limiter, _) = limiter([ten(Algorithm::FixedWindow)]);
    assert_eq!(limiter.policy().version(), 1);
    assert_eq!(limiter.replace(vec![ten(Algorithm::SlidingLog)]).unwrap().version(), 2);
    let duplicate = limiter.replace(vec![ten(Algorithm::FixedWindow), ten(Algorithm::FixedWindow)]);
    let message = duplicate.expect_err("two limits of one name").to_string();
    assert_eq!(message, "limit `fixed-window`: another limit has this name (names are unique)");
    assert_eq!(limiter.policy().version(), 2);
    assert!(limiter.policy().find("sliding-log").is_some());
    // The limiter assigns the next version, whatever version the policy had.
    let policy = Policy::new(Vec::new()).unwrap().with_version(77);
    assert_eq!(limiter.replace_policy(policy).version(), 3);
    assert_eq!(limiter.clone().policy().version(), 3, "clones share the policy");
}

#[test]
fn a_swap_is_seen_by_every_thread_and_every_clone() {
    let (limiter, _) = limiter([ten(Algorithm::FixedWindow)]);
    let alice = user("alice");
    let (requests, received) = std::sync::mpsc::channel::<()>();
    let (sender, names) = std::sync::mpsc::channel();
    let clone = limiter.clone();
    let thread = std::thread::spawn(move || {
        for () in received {
            let names: Vec<String> =
                charge(&clone, &user("alice"), 1).limits().map(|limit| limit.name().to_owned()).collect();
            sender.send(names).unwrap();
        }
    });
    for algorithm in RATES {
        limiter.replace(vec![ten(algorithm)]).unwrap();
        requests.send(()).unwrap();
        assert_eq!(names.recv().unwrap(), [algorithm.name()]);
        assert_eq!(charge(&limiter, &alice, 1).limits().next().unwrap().name(), algorithm.name());
    }
    drop(requests);
    thread.join().unwrap();
}

#[test]
fn limiters_of_one_thread_keep_separate_policies() {
    let limiters: Vec<_> = (1..=20)
        .map(|count| {
            limiter([Limit::new("limit", Quota::per_minute(count)).algorithm(Algorithm::FixedWindow)]).0
        })
        .collect();
    for _ in 0..3 {
        for (limiter, count) in limiters.iter().zip(1..) {
            assert_eq!(limiter.peek(&Facts::new()).wait().unwrap().binding().unwrap().outcome().limit, count);
        }
    }
}

#[test]
fn handle_and_check_share_counters_and_agree() {
    for algorithm in RATES {
        let (limiter, clock) = limiter([ten(algorithm)]);
        let (twin, twin_clock) = support::limiter([ten(algorithm)]);
        let handle = limiter.handle(algorithm.name()).unwrap();
        for (cost, pause) in [(1, 0), (4, 3), (5, 0), (1, 0), (3, 10), (11, 0), (2, 40), (10, 61), (1, 200)] {
            let passage = handle.check_cost("alice", cost).unwrap();
            let decision = charge(&twin, &user("alice"), cost);
            let expected = decision.limits().next().unwrap().outcome();
            assert_eq!(passage.allowed, decision.allowed(), "{algorithm} {cost}");
            assert_eq!(passage.outcome(), expected, "{algorithm} {cost}");
            let left = expected.remaining;
            assert_eq!(
                handle.peek("alice").unwrap().outcome().remaining,
                left,
                "{algorithm}: a peek charges nothing"
            );
            assert_eq!(
                remaining(&limiter, algorithm.name(), &user("alice")),
                left,
                "{algorithm}: one counter"
            );
            clock.advance(secs(pause));
            twin_clock.advance(secs(pause));
        }
        // Handle and limiter use the same key.
        charge(&limiter, &user("bob"), 9);
        assert!(handle.check("bob").unwrap().allowed);
        assert!(!handle.check("bob").unwrap().allowed);
        assert!(!charge(&limiter, &user("bob"), 1).allowed(), "{algorithm}");
    }
}

#[test]
fn handle_of_a_staggered_window_shares_counters() {
    let staggered =
        || Limit::new("limit", Quota::per_minute(10)).by("user").algorithm(Algorithm::FixedWindow).stagger();
    let (limiter, _) = limiter([staggered()]);
    let handle = limiter.handle("limit").unwrap();
    for number in 0..50 {
        let name = format!("user{number}");
        charge(&limiter, &user(&name), 4);
        let outcome = handle.check(&name).unwrap().outcome();
        assert_eq!(outcome.remaining, 5);
        assert_eq!(outcome, usage_of(&limiter, &name), "{name}");
    }
}

/// The current outcome of a key, as the limiter reports it.
fn usage_of(limiter: &tollkeeper::Limiter, name: &str) -> tollkeeper::Outcome {
    let facts = user(name);
    let usage = limiter.usage(&facts).wait().unwrap();
    usage.limit("limit").unwrap().outcome()
}

#[test]
fn a_handle_follows_a_swap() {
    let bucket = |count, burst| Limit::new("limit", Quota::per_minute(count).burst(burst)).by("user");
    let (limiter, _) = limiter([bucket(10, 10)]);
    let handle = limiter.handle("limit").unwrap();
    let left = || handle.peek("alice").map(|passage| passage.outcome().remaining);
    assert!(handle.check_cost("alice", 4).unwrap().allowed);
    assert_eq!(left(), Ok(6));
    // Another burst: the counters stay.
    limiter.replace(vec![bucket(10, 20)]).unwrap();
    assert_eq!(left(), Ok(16));
    // Another index in the policy.
    limiter.replace(vec![ten(Algorithm::FixedWindow), bucket(10, 20)]).unwrap();
    assert_eq!(left(), Ok(16));
    assert!(handle.check("alice").unwrap().allowed);
    assert_eq!(remaining(&limiter, "limit", &user("alice")), 15);
    // Another period: other keys, so other counters.
    let hourly = Limit::new("limit", Quota::per_hour(10).burst(20)).by("user");
    limiter.replace(vec![hourly]).unwrap();
    assert_eq!(left(), Ok(20));
    assert!(handle.check_cost("alice", 3).unwrap().allowed);
    assert_eq!(left(), Ok(17));
    assert_eq!(remaining(&limiter, "limit", &user("alice")), 17, "one counter");
    // The old period again: its counter is still there.
    limiter.replace(vec![bucket(10, 20)]).unwrap();
    assert_eq!(left(), Ok(15));
    // Another algorithm.
    limiter.replace(vec![Limit::new("limit", Quota::per_minute(10)).by("user")]).unwrap();
    assert_eq!(left(), Ok(10));
    // The limit is removed.
    limiter.replace(vec![ten(Algorithm::FixedWindow)]).unwrap();
    assert_eq!(left(), Err(HandleError::UnknownLimit("limit".to_owned())));
    assert_eq!(left(), Err(HandleError::UnknownLimit("limit".to_owned())), "the error is repeated");
    // The limit is back, but has a condition, so it has no handle.
    limiter.replace(vec![bucket(10, 20).when("route", "/")]).unwrap();
    assert_eq!(left(), Err(not_plain("limit")));
    assert_eq!(handle.check("alice").map(|passage| passage.allowed), Err(not_plain("limit")));
    limiter.replace(vec![bucket(10, 20)]).unwrap();
    assert_eq!(left(), Ok(15));
}

#[test]
fn limiter_can_be_used_while_its_policy_is_read() {
    let (limiter, _) = limiter([ten_an_hour()]);
    let (alice, handle) = (user("alice"), limiter.handle("another").unwrap());
    limiter.with_policy(|policy| {
        assert!(limiter.check(&alice).wait().unwrap().allowed());
        assert!(handle.check("alice").unwrap().allowed);
        limiter.replace(vec![]).unwrap();
        assert_eq!(handle.check("alice").err(), Some(HandleError::UnknownLimit("another".to_owned())));
        assert_eq!(policy.rules().len(), 1, "the policy being read does not change");
    });
    assert_eq!(limiter.with_policy(|policy| policy.rules().len()), 0);
}

#[test]
fn handle_needs_a_limit_by_one_fact() {
    let plain = || Limit::new("limit", Quota::per_minute(10)).by("user");
    let check = |limit: Limit, expected: Option<HandleError>| {
        let (limiter, _) = limiter([limit]);
        assert_eq!(limiter.handle("limit").err(), expected);
    };
    check(plain(), None);
    check(plain().mode(Mode::Shadow), None);
    check(plain().missing(tollkeeper::Missing::Deny), None);
    check(Limit::new("limit", Allowance::Nothing).by("user"), None);
    for limit in [
        Limit::new("limit", Quota::per_minute(10)),
        plain().by("route"),
        plain().when("route", "/"),
        plain().unless("route", "/"),
        plain().allow("alice"),
        plain().override_for("alice", Quota::per_minute(20)),
        plain().cost("tokens"),
        plain().mode(Mode::Off),
        Limit::new("limit", Quota::per_minute(10)).by("ip"),
        Limit::new("limit", Quota::slots(3)).by("user"),
        Limit::new("limit", Allowance::Unlimited).by("user"),
        Limit::tiered("limit", "plan").by("user").tier("free", Quota::per_minute(1)).default_tier("free"),
    ] {
        check(limit, Some(not_plain("limit")));
    }
    check(ten(Algorithm::FixedWindow), Some(HandleError::UnknownLimit("limit".to_owned())));
    assert_eq!(not_plain("limit").to_string(), NOT_PLAIN);
}

const NOT_PLAIN: &str = "limit `limit` depends on more than the value of one fact (a handle is for limits by one \
     fact other than `ip`, without when, unless, allow, tiers, overrides, slots or a cost fact: use `check`)";

#[test]
fn handle_rejects_the_same_input_as_check() {
    let clock = clock();
    let store = store(1_000, &clock);
    let limiter = on(&store, [ten(Algorithm::FixedWindow)]);
    let handle = limiter.handle("fixed-window").unwrap();
    let fact = |problem| InvalidRequest::Fact(InvalidFact { name: "value".to_owned(), problem });
    let long = "x".repeat(1025);
    for (value, cost, expected) in [
        ("alice", 0, InvalidRequest::ZeroCost),
        ("alice", (1 << 31) + 1, InvalidRequest::Cost((1 << 31) + 1)),
        ("alice", 1 << 63, InvalidRequest::Cost(1 << 63)),
        ("", 1, fact(FactProblem::Empty)),
        (&long, 1, fact(FactProblem::TooLong(1025))),
    ] {
        let error = handle.check_cost(value, cost).expect_err("bad input");
        assert_eq!(error.to_string(), expected.to_string());
        assert_eq!(error, HandleError::Request(expected));
    }
    assert_eq!(store.keys(), 0);
    for value in ["a\0", "\n", &long[..1024]] {
        assert!(handle.check_cost(value, 10).unwrap().allowed);
        assert!(!handle.check(value).unwrap().allowed);
        assert!(!charge(&limiter, &user(value), 1).allowed(), "handle and limiter use the same key");
    }
}

#[test]
fn handle_of_a_closed_limit_refuses_unless_shadow() {
    let (limiter, _) = limiter([
        Limit::new("closed", Allowance::Nothing).by("user"),
        ten(Algorithm::SlidingLog).mode(Mode::Shadow),
    ]);
    let closed = limiter.handle("closed").unwrap().check("alice").unwrap();
    assert!(!closed.allowed);
    assert_eq!(closed.outcome().retry, Some(Retry::Never));
    let shadow = limiter.handle("sliding-log").unwrap();
    for number in 1..=12 {
        let passage = shadow.check("alice").unwrap();
        assert!(passage.allowed);
        assert_eq!(passage.outcome().allowed, number <= 10);
    }
    assert_eq!(shadow.check_cost("alice", 11).unwrap().outcome().retry, Some(Retry::Never));
}

/// An operator blocks an abusive client at runtime, when its key already has state.
#[test]
fn known_key_with_a_quota_of_zero_is_refused_for_ever() {
    for algorithm in RATES {
        let by_user = |name: &str| Limit::new(name, Quota::per_minute(10)).by("user").algorithm(algorithm);
        let (limiter, clock) = limiter([by_user("one"), by_user("two")]);
        let handle = limiter.handle("one").expect("a plain limit");
        let alice = facts! { "user" => "alice" };
        assert!(limiter.check(&alice).wait().expect("valid").allowed());
        for limits in [
            vec![nothing("one", algorithm)],
            vec![nothing("one", algorithm), by_user("two")],
            vec![by_user("two").override_for("alice", Allowance::Nothing)],
        ] {
            limiter.replace(limits).expect("valid limits");
            for step in [0, 10] {
                clock.set(START + secs(step));
                let decision = limiter.check(&alice).wait().expect("valid");
                assert_eq!(decision.verdict(), Verdict::Deny { retry: Retry::Never }, "{algorithm}");
                let peeked = limiter.peek(&alice).wait().expect("valid");
                assert_eq!(peeked.binding().expect("refuses").outcome().remaining, 0, "{algorithm}");
            }
        }
        limiter.replace(vec![nothing("one", algorithm)]).expect("valid limits");
        let passage = handle.check("alice").expect("still plain");
        assert_eq!((passage.allowed, passage.outcome().retry), (false, Some(Retry::Never)), "{algorithm}");
    }
}

fn nothing(name: &str, algorithm: Algorithm) -> Limit {
    Limit::new(name, Allowance::Nothing).by("user").algorithm(algorithm)
}
