//! The limiter's public API: its decisions, their order, and the input that it rejects.

mod support;

use std::future::{IntoFuture, poll_fn};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use support::*;
use tollkeeper::CostProblem;
use tollkeeper::facts::FactProblem;
use tollkeeper::store::{Key, KeyCorrection, Reply, Store, StoreFuture, Toll};
use tollkeeper::{
    Algorithm, Allowance, BuildError, Charge, Clock, Correction, DecidedToll, Facts, HandleError,
    InvalidFact, InvalidRequest, Limit, Limiter, MemoryStore, Missing, Mode, Policy, Quota, Retry, Slot,
    Span, StoreChoice, Unavailable, Value, Verb, Verdict, facts,
};

/// Retry time and reset time of a limit of ten per minute after ten were charged at the start of a minute.
fn exhausted(algorithm: Algorithm) -> (Span, Span) {
    let (retry, reset) = match algorithm {
        Algorithm::TokenBucket | Algorithm::LeakyBucket => (6, 60),
        Algorithm::FixedWindow | Algorithm::SlidingLog => (60, 60),
        // Ten of the previous minute weigh nine when a tenth of the current one is over.
        Algorithm::SlidingWindow => (66, 120),
        Algorithm::Concurrency => unreachable!("not a rate"),
    };
    (secs(retry), secs(reset))
}

#[test]
fn every_algorithm_admits_its_limit_with_retry_time() {
    for algorithm in RATES {
        let (limiter, clock) = limiter([ten(algorithm)]);
        let alice = user("alice");
        for left in (0..10).rev() {
            let decision = charge(&limiter, &alice, 1);
            assert!(decision.allowed(), "{algorithm}");
            assert_eq!(decision.binding().unwrap().outcome().remaining, left, "{algorithm}");
        }
        let (retry, reset) = exhausted(algorithm);
        let refused = charge(&limiter, &alice, 1);
        let outcome = refused.binding().unwrap().outcome();
        assert_eq!(refused.verdict(), Verdict::Deny { retry: Retry::After(retry) }, "{algorithm}");
        assert_eq!(refused.retry_after(), Some(retry), "{algorithm}");
        assert_eq!((outcome.limit, outcome.remaining), (10, 0), "{algorithm}");
        assert_eq!(outcome.reset_after, Some(reset), "{algorithm}");
        assert!(refused.charge().is_none(), "{algorithm}");
        assert!(charge(&limiter, &user("bob"), 10).allowed(), "{algorithm}: another key");

        clock.set(START + Span::from_micros(retry.as_micros() - 1));
        assert!(!charge(&limiter, &alice, 1).allowed(), "{algorithm}: a microsecond early");
        clock.set(START + retry);
        assert!(charge(&limiter, &alice, 1).allowed(), "{algorithm}");
    }
}

#[test]
fn a_refused_request_charges_nothing() {
    for algorithm in RATES {
        let (limiter, _) = limiter([ten(algorithm)]);
        let alice = user("alice");
        assert!(charge(&limiter, &alice, 7).allowed());
        for _ in 0..5 {
            assert!(!charge(&limiter, &alice, 4).allowed(), "{algorithm}");
        }
        assert!(charge(&limiter, &alice, 3).allowed(), "{algorithm}: three are still left");
    }
}

#[test]
fn peek_equals_a_check_and_charges_nothing() {
    for algorithm in RATES {
        let (limiter, _) = limiter([ten(algorithm)]);
        let alice = user("alice");
        for _ in 0..20 {
            let peek = limiter.peek(&alice).cost(10).wait().unwrap();
            assert!(peek.allowed() && peek.charge().is_none(), "{algorithm}");
            assert_eq!(
                peek.binding().unwrap().outcome().remaining,
                10,
                "{algorithm}: the peek itself is not charged"
            );
        }
        charge(&limiter, &alice, 10);
        let peek = limiter.peek(&alice).wait().unwrap();
        assert_eq!(peek.retry_after(), Some(exhausted(algorithm).0), "{algorithm}");
    }
}

#[test]
fn usage_assumes_cost_1_for_every_limit() {
    let tokens = Limit::new("tokens", Quota::per_minute(100)).by("user").cost("tokens");
    let (limiter, _) = limiter([tokens, ten(Algorithm::FixedWindow)]);
    let facts = facts! { "user" => "alice", "tokens" => 5_000 };
    assert!(!limiter.peek(&facts).wait().unwrap().allowed(), "a cost of 5000 never fits");
    let usage = limiter.usage(&facts).cost(500).wait().unwrap();
    assert!(usage.allowed() && usage.charge().is_none());
    let names: Vec<&str> = usage.limits().map(|limit| limit.name()).collect();
    assert_eq!(names, ["tokens", "fixed-window"]);
    // Usage does not need the cost fact, either.
    assert!(limiter.usage(&user("alice")).wait().unwrap().allowed());
}

/// The other limits charge the cost of the request.
#[test]
fn cost_fact_applies_only_to_its_limit() {
    let tokens = Limit::new("tokens", Quota::per_minute(100)).by("user").cost("tokens");
    let (limiter, _) = limiter([tokens, ten(Algorithm::FixedWindow)]);
    let facts = facts! { "user" => "alice", "tokens" => 60 };
    assert!(charge(&limiter, &facts, 2).allowed());
    let refused = charge(&limiter, &facts, 2);
    assert_eq!(refused.binding().unwrap().name(), "tokens");
    assert_eq!(remaining(&limiter, "tokens", &facts), 40);
    assert_eq!(remaining(&limiter, "fixed-window", &facts), 8);
    // A cost of 0 passes and charges nothing, even at an exhausted limit.
    let free = facts! { "user" => "alice", "tokens" => 0 };
    assert!(charge(&limiter, &free, 1).allowed());
    assert_eq!(remaining(&limiter, "tokens", &facts), 40);
}

#[test]
fn request_without_applicable_limits_is_allowed() {
    let (limiter, _) = limiter([
        ten(Algorithm::FixedWindow).when("route", "/login"),
        Limit::new("off", Quota::per_minute(1)).mode(Mode::Off),
        Limit::new("free", Allowance::Unlimited),
    ]);
    for _ in 0..20 {
        let decision = charge(&limiter, &user("alice"), 1);
        assert!(decision.allowed() && decision.binding().is_none() && decision.charge().is_none());
        assert_eq!(decision.limits().len(), 0);
    }
}

#[test]
fn missing_fact_skips_shares_a_key_or_refuses() {
    let by = |missing| Limit::new("limit", Quota::per_minute(2)).by("user").missing(missing);
    let check = |missing, expected: [bool; 3]| {
        let (limiter, _) = limiter([by(missing)]);
        let verdicts = [(); 3].map(|()| charge(&limiter, &Facts::new(), 1).allowed());
        assert_eq!(verdicts, expected, "{missing:?}");
        assert!(
            charge(&limiter, &user("alice"), 2).allowed(),
            "{missing:?}: a request with the fact has its own key"
        );
    };
    check(Missing::Skip, [true, true, true]);
    check(Missing::Share, [true, true, false]);
    check(Missing::Deny, [false, false, false]);
}

#[test]
fn refusal_by_one_limit_charges_no_other() {
    for refusing in RATES {
        let others = RATES.into_iter().filter(|algorithm| *algorithm != refusing);
        // The limit that refuses is first, in the middle, and last.
        for index in [0, 2, 4] {
            let mut limits: Vec<Limit> = others.clone().map(ten).collect();
            let strict = Limit::new("strict", Quota::per_hour(3)).by("user").algorithm(refusing);
            limits.insert(index, strict);
            let (limiter, _) = limiter(limits);
            let alice = user("alice");
            assert!(charge(&limiter, &alice, 3).allowed());
            for _ in 0..20 {
                let refused = charge(&limiter, &alice, 1);
                assert_eq!(refused.binding().unwrap().name(), "strict");
                assert!(refused.charge().is_none());
            }
            for other in others.clone() {
                assert_eq!(remaining(&limiter, other.name(), &alice), 7, "{other} beside {refusing}");
            }
        }
    }
}

#[test]
fn refusal_creates_no_state_for_new_keys() {
    let clock = clock();
    let store = store(1_000, &clock);
    let limiter = on(
        &store,
        [
            ten(Algorithm::FixedWindow),
            Limit::new("all", Quota::per_minute(1)).algorithm(Algorithm::SlidingLog),
        ],
    );
    assert!(charge(&limiter, &user("first"), 1).allowed());
    assert_eq!(store.keys(), 2);
    for name in ["a", "b", "c", "d"] {
        assert!(!charge(&limiter, &user(name), 1).allowed());
        assert_eq!(remaining(&limiter, "fixed-window", &user(name)), 10);
    }
    assert_eq!(store.keys(), 2, "refused requests leave no keys behind");
}

#[test]
fn longest_wait_or_smallest_share_binds() {
    let (limiter, clock) = limiter([
        Limit::new("minute", Quota::per_minute(4)).algorithm(Algorithm::FixedWindow),
        Limit::new("hour", Quota::per_hour(10)).algorithm(Algorithm::FixedWindow),
        Limit::new("day", Quota::per_day(12)).algorithm(Algorithm::FixedWindow),
    ]);
    let no_facts = Facts::new();
    let check = |cost, binding: &str, retry: Option<Retry>| {
        let decision = charge(&limiter, &no_facts, cost);
        assert_eq!(decision.binding().unwrap().name(), binding);
        match (decision.verdict(), retry) {
            (Verdict::Allow { .. }, None) => {}
            (Verdict::Deny { retry }, Some(expected)) => assert_eq!(retry, expected),
            (verdict, expected) => panic!("{verdict:?}, not {expected:?}"),
        }
    };
    check(4, "minute", None); // 0 of 4 left, against 6 of 10 at `hour`
    check(1, "minute", Some(Retry::After(secs(60))));
    clock.advance(secs(60));
    check(4, "minute", None);
    clock.advance(secs(60));
    check(2, "hour", None);
    check(1, "hour", Some(Retry::After(secs(3_600 - 120))));
    check(5, "minute", Some(Retry::Never)); // `Never` takes precedence over any wait
    clock.advance(secs(3_600 - 120));
    check(2, "day", None);
    check(1, "day", Some(Retry::After(secs(86_400 - 3_600))));
}

#[test]
fn first_defined_limit_binds_on_a_tie() {
    let limit = |name| Limit::new(name, Quota::per_minute(4)).algorithm(Algorithm::FixedWindow);
    let (limiter, _) = limiter([limit("one"), limit("two"), limit("three")]);
    for _ in 0..6 {
        assert_eq!(charge(&limiter, &Facts::new(), 1).binding().unwrap().name(), "one");
    }
}

#[test]
fn shadow_limit_counts_but_never_decides() {
    let shadow = Limit::new("shadow", Quota::per_minute(3)).by("user").mode(Mode::Shadow);
    let (limiter, _) = limiter([shadow, ten(Algorithm::FixedWindow)]);
    let alice = user("alice");
    for number in 1..=10 {
        let decision = charge(&limiter, &alice, 1);
        assert!(decision.allowed());
        assert_eq!(decision.binding().unwrap().name(), "fixed-window");
        assert_eq!(decision.limit("shadow").unwrap().outcome().allowed, number <= 3);
        // It does not charge what it would have refused, and only what it charged can be refunded.
        assert_eq!(decision.charge().unwrap().items().len(), if number <= 3 { 2 } else { 1 });
    }
    let refused = charge(&limiter, &alice, 1);
    assert_eq!(refused.retry_after(), Some(secs(60)), "the retry time of the shadow limit does not count");
}

#[test]
fn shadow_limit_is_not_charged_for_a_refused_request() {
    let shadow = Limit::new("shadow", Quota::per_minute(100)).by("user").mode(Mode::Shadow);
    let (limiter, _) = limiter([shadow, ten(Algorithm::FixedWindow)]);
    let alice = user("alice");
    assert!(!charge(&limiter, &alice, 11).allowed());
    assert_eq!(remaining(&limiter, "shadow", &alice), 100);
}

#[test]
fn a_shadow_limit_never_fails_a_request() {
    let shadow = Limit::new("shadow", Quota::per_minute(3)).cost("tokens").mode(Mode::Shadow);
    let (limiter, _) = limiter([shadow]);
    for tokens in ["", "many", "-1", "99999999999999999999"] {
        let decision = charge(&limiter, &facts! { "tokens" => tokens }, 1);
        assert!(decision.allowed() && decision.binding().is_none(), "{tokens}");
    }
}

#[test]
fn bad_input_is_a_typed_error_and_charges_nothing() {
    let long = "x".repeat(1025);
    let name = "n".repeat(65);
    let mut many = Facts::new();
    let names: Vec<String> = (0..65).map(|number| format!("fact{number}")).collect();
    names.iter().for_each(|name| many.put(name, "value"));
    let mut bytes = Facts::new();
    let not_utf8 = bytes.insert_bytes("user", b"caf\xe9").expect_err("not UTF-8");
    assert_eq!(not_utf8, InvalidFact { name: "user".to_owned(), problem: FactProblem::NotUtf8 });

    let fact = |name: &str, problem| InvalidRequest::Fact(InvalidFact { name: name.to_owned(), problem });
    let tokens =
        |problem| InvalidRequest::CostFact { limit: "tokens".to_owned(), fact: "tokens".to_owned(), problem };
    let valid = || facts! { "user" => "alice", "tokens" => 1 };
    let cases = [
        (valid(), 0, InvalidRequest::ZeroCost),
        (valid(), (1 << 31) + 1, InvalidRequest::Cost((1 << 31) + 1)),
        (valid(), 1 << 63, InvalidRequest::Cost(1 << 63)),
        (valid(), u64::MAX, InvalidRequest::Cost(u64::MAX)),
        (valid().with("", "x"), 1, fact("", FactProblem::Name)),
        (valid().with("a\0b", "x"), 1, fact("a\0b", FactProblem::Name)),
        (valid().with("a b", "x"), 1, fact("a b", FactProblem::Name)),
        (valid().with("naïve", "x"), 1, fact("naïve", FactProblem::Name)),
        (valid().with(&name, "x"), 1, fact(&name[..64], FactProblem::Name)),
        (valid().with("user", &long), 1, fact("user", FactProblem::TooLong(1025))),
        (valid().with("other", &long), 1, fact("other", FactProblem::TooLong(1025))),
        (valid().with("ip", "not an address"), 1, fact("ip", FactProblem::NotAnAddress)),
        (valid().with("ip", 7), 1, fact("ip", FactProblem::NotAnAddress)),
        (many, 1, fact("fact64", FactProblem::TooMany)),
        (user("alice"), 1, tokens(CostProblem::Absent)),
        (valid().with("tokens", "1.5"), 1, tokens(CostProblem::NotANumber)),
        (valid().with("tokens", -1), 1, tokens(CostProblem::NotANumber)),
        (valid().with("tokens", "+1"), 1, tokens(CostProblem::NotANumber)),
        (valid().with("tokens", (1u64 << 31) + 1), 1, tokens(CostProblem::TooLarge)),
        (valid().with("tokens", u64::MAX), 1, tokens(CostProblem::TooLarge)),
    ];

    let clock = clock();
    let store = store(1_000, &clock);
    let limits = RATES.map(ten).into_iter();
    let limiter = on(
        &store,
        limits.chain([
            Limit::new("tokens", Quota::per_minute(10)).cost("tokens"),
            Limit::new("slots", Quota::slots(3)).by("user"),
        ]),
    );
    for (facts, cost, expected) in &cases {
        let results = [
            limiter.check(facts).cost(*cost).wait(),
            now(limiter.check(facts).cost(*cost).into_future()),
            limiter.peek(facts).cost(*cost).wait(),
            limiter.reserve(facts, secs(60)).cost(*cost).wait(),
        ];
        for result in results {
            assert_eq!(result.expect_err("bad input"), *expected);
        }
        if *cost == 1 {
            assert_eq!(now(limiter.acquire(facts)).expect_err("bad input"), *expected);
            assert_eq!(now(limiter.until_allowed(facts).into_future()).expect_err("bad input"), *expected);
        } else {
            let waiting = limiter.until_allowed(facts).cost(*cost).into_future();
            assert_eq!(now(waiting).expect_err("bad input"), *expected);
        }
        assert_eq!(store.keys(), 0, "{expected}");
    }
    for ttl in [Span::ZERO, millis(999), Span::from_micros(3_600_000_001)] {
        let facts = valid();
        let error = limiter.reserve(&facts, ttl).wait().expect_err("a reservation lasts a second to an hour");
        assert_eq!(error, InvalidRequest::Ttl(ttl));
        assert_eq!(store.keys(), 0);
    }
    assert!(charge(&limiter, &valid(), 10).allowed(), "nothing was charged");
}

#[test]
fn largest_cost_is_decided_normally() {
    for algorithm in RATES {
        let (limiter, _) = limiter([ten(algorithm)]);
        let decision = charge(&limiter, &user("alice"), 1 << 31);
        assert_eq!(decision.verdict(), Verdict::Deny { retry: Retry::Never }, "{algorithm}");
    }
    let (limiter, _) =
        limiter([ten(Algorithm::FixedWindow).override_for("alice", Quota::per_minute(1 << 40))]);
    assert!(charge(&limiter, &user("alice"), 1 << 31).allowed());
}

#[test]
fn cost_above_the_limit_is_refused_for_ever() {
    for algorithm in RATES {
        let (limiter, _) = limiter([ten(algorithm)]);
        let alice = user("alice");
        let refused = charge(&limiter, &alice, 11);
        assert_eq!(refused.verdict(), Verdict::Deny { retry: Retry::Never }, "{algorithm}");
        assert_eq!(refused.retry_after(), None, "{algorithm}");
        assert!(charge(&limiter, &alice, 10).allowed(), "{algorithm}");
    }
    let (limiter, _) = limiter([Limit::new("closed", Allowance::Nothing).by("user")]);
    assert_eq!(charge(&limiter, &user("alice"), 1).verdict(), Verdict::Deny { retry: Retry::Never });
}

#[test]
fn values_may_contain_nul_and_newlines() {
    let (limiter, _) = limiter([Limit::new("limit", Quota::per_minute(1)).by("user").by("path")]);
    let values = ["a", "a\0", "\0a", "a\n", "\n", "\0", "\0\0", "a\0b", "a b", "aé"];
    let longest = "x".repeat(1024);
    let values: Vec<&str> = values.into_iter().chain([longest.as_str()]).collect();
    // Every pair is a key of its own, even if joining the values gives the same text.
    for one in &values {
        for other in &values {
            let facts = facts! { "user" => *one, "path" => *other };
            assert!(charge(&limiter, &facts, 1).allowed(), "{one:?} {other:?}");
            assert!(!charge(&limiter, &facts, 1).allowed(), "{one:?} {other:?}");
        }
    }
}

#[test]
fn number_and_its_text_share_a_key() {
    let (limiter, _) = limiter([Limit::new("limit", Quota::per_minute(3)).by("user")]);
    assert!(charge(&limiter, &Facts::new().with("user", 1), 1).allowed());
    assert!(charge(&limiter, &Facts::new().with("user", "1"), 1).allowed());
    assert!(charge(&limiter, &Facts::new().with("user", Value::Number(1)), 1).allowed());
    assert!(!charge(&limiter, &Facts::new().with("user", 1u64), 1).allowed());
}

#[test]
fn leaky_bucket_returns_the_delay_of_each_request() {
    let queue = Limit::new("queue", Quota::per_second(10).burst(5)).algorithm(Algorithm::LeakyBucket);
    let (limiter, clock) = limiter([queue]);
    let no_facts = Facts::new();
    for position in 0..5 {
        assert_eq!(charge(&limiter, &no_facts, 1).delay(), millis(100 * position));
    }
    let refused = charge(&limiter, &no_facts, 1);
    assert_eq!((refused.delay(), refused.retry_after()), (Span::ZERO, Some(millis(100))));
    clock.advance(millis(250));
    let peek = limiter.peek(&no_facts).wait().unwrap();
    assert_eq!(peek.delay(), millis(250), "the delay that a check would get");
    assert_eq!(charge(&limiter, &no_facts, 1).delay(), millis(250));
}

/// Such a request is charged nothing.
#[test]
fn delay_beyond_the_callers_maximum_is_refused() {
    let queue = Limit::new("queue", Quota::per_second(10).burst(5)).algorithm(Algorithm::LeakyBucket);
    let (limiter, clock) = limiter([queue, ten(Algorithm::FixedWindow)]);
    let alice = user("alice");
    let check = |hold, expected| {
        let decision = limiter.check(&alice).hold(hold).wait().unwrap();
        assert_eq!(decision.verdict(), expected);
    };
    check(Span::ZERO, Verdict::Allow { delay: Span::ZERO });
    check(Span::ZERO, Verdict::Deny { retry: Retry::After(millis(100)) });
    check(millis(99), Verdict::Deny { retry: Retry::After(millis(1)) });
    check(millis(100), Verdict::Allow { delay: millis(100) });
    assert_eq!(remaining(&limiter, "queue", &alice), 3);
    assert_eq!(remaining(&limiter, "fixed-window", &alice), 8);
    clock.advance(millis(200));
    check(Span::ZERO, Verdict::Allow { delay: Span::ZERO });
}

#[test]
fn ipv6_addresses_of_one_network_share_a_key() {
    let by_ip = || Limit::new("per-ip", Quota::per_minute(1)).by("ip").allow("2001:db8:0:9::7");
    let check = |prefix: Option<u8>, one: &str, other: &str, same: bool| {
        let builder = Limiter::builder().limit(by_ip()).store(store(1_000, &clock()));
        let builder = prefix.into_iter().fold(builder, |builder, bits| builder.ipv6_prefix(bits));
        let limiter = builder.build().unwrap();
        assert!(charge(&limiter, &facts! { "ip" => one }, 1).allowed());
        assert!(!charge(&limiter, &facts! { "ip" => one }, 1).allowed());
        assert_eq!(
            charge(&limiter, &facts! { "ip" => other }, 1).allowed(),
            !same,
            "{one} {other} {prefix:?}"
        );
    };
    check(None, "2001:db8::1", "2001:db8::2", true);
    check(None, "2001:db8::1", "2001:DB8:0:0:ffff::1", true);
    check(None, "2001:db8::1", "2001:db8:0:1::1", false);
    check(Some(48), "2001:db8::1", "2001:db8:0:1::1", true);
    check(Some(48), "2001:db8::1", "2001:db8:1::1", false);
    check(Some(128), "2001:db8::1", "2001:db8::2", false);
    check(None, "192.0.2.7", "::ffff:192.0.2.7", true);
    check(None, "192.0.2.7", "192.0.2.8", false);
    // `allow` compares before masking: the neighbours of an allowed address are limited.
    check(None, "2001:db8:0:9::1", "2001:db8:0:9::7", false);
    check(None, "2001:db8:0:9::1", "2001:db8:0:9::8", true);
}

#[test]
fn other_limits_keep_the_ipv6_prefix() {
    let limits = || vec![Limit::new("per-ip", Quota::per_minute(1)).by("ip")];
    let builder = Limiter::builder().limit(limits().remove(0)).store(store(1_000, &clock()));
    let limiter = builder.ipv6_prefix(48).build().unwrap();
    assert!(charge(&limiter, &facts! { "ip" => "2001:db8::1" }, 1).allowed());
    limiter.replace(limits()).unwrap();
    assert!(
        !charge(&limiter, &facts! { "ip" => "2001:db8:0:1::1" }, 1).allowed(),
        "both are still in one network of 48 bits"
    );
}

#[test]
fn forget_resets_the_key_under_every_tier_period() {
    let plan = Limit::tiered("plan", "plan")
        .by("user")
        .tier("free", Quota::per_minute(5))
        .tier("pro", Quota::per_hour(5))
        .tier("none", Allowance::Nothing)
        .tier("all", Allowance::Unlimited)
        .override_for("carol", Quota::per_day(5))
        .default_tier("free");
    let (limiter, _) = limiter([plan, ten(Algorithm::SlidingLog)]);
    let of = |user: &'static str, plan: &'static str| facts! { "user" => user, "plan" => plan };
    for facts in [of("alice", "free"), of("alice", "pro"), of("bob", "pro"), of("carol", "pro")] {
        assert!(charge(&limiter, &facts, 5).allowed());
        assert!(!charge(&limiter, &facts, 1).allowed());
    }
    assert_eq!(now(limiter.forget("plan", &user("alice"))), Ok(true));
    assert_eq!(remaining(&limiter, "plan", &of("alice", "free")), 5);
    assert_eq!(remaining(&limiter, "plan", &of("alice", "pro")), 5);
    assert_eq!(remaining(&limiter, "plan", &of("bob", "pro")), 0, "other keys are kept");
    assert_eq!(remaining(&limiter, "sliding-log", &of("alice", "pro")), 0, "other limits are kept");
    assert_eq!(now(limiter.forget("plan", &user("alice"))), Ok(false));
    assert_eq!(now(limiter.forget("plan", &user("carol"))), Ok(true));
    assert_eq!(remaining(&limiter, "plan", &of("carol", "pro")), 5);
    assert_eq!(now(limiter.forget("plan", &user("dave"))), Ok(false));
    let unknown = InvalidRequest::UnknownLimit("plans".to_owned());
    assert_eq!(now(limiter.forget("plans", &user("alice"))), Err(unknown.into()));
    assert!(now(limiter.forget("plan", &facts! { "a b" => "c" })).is_err());
}

/// With some of them missing, `forget` would remove the wrong key.
#[test]
fn forgetting_needs_the_facts_of_the_key() {
    let pair = Limit::new("pair", Quota::per_minute(1)).by("user").by("ip");
    let shared = Limit::new("shared", Quota::per_minute(1)).by("user").missing(Missing::Share);
    let (limiter, _) = limiter([pair, shared]);
    for (facts, absent) in [
        (facts! {}, vec!["user", "ip"]),
        (facts! { "user" => "alice" }, vec!["ip"]),
        (facts! { "user" => "", "ip" => "192.0.2.7" }, vec!["user"]),
    ] {
        let absent = absent.into_iter().map(str::to_owned).collect();
        let expected = InvalidRequest::KeyFacts { limit: "pair".to_owned(), absent };
        assert_eq!(now(limiter.forget("pair", &facts)), Err(expected.into()));
    }
    charge(&limiter, &facts! {}, 1);
    assert_eq!(now(limiter.forget("shared", &facts! {})), Ok(true), "requests without the fact share a key");
}

#[test]
fn forget_frees_the_entry_for_every_algorithm() {
    for algorithm in RATES {
        let clock = clock();
        let store = store(1_000, &clock);
        let limiter = on(&store, [ten(algorithm)]);
        charge(&limiter, &user("alice"), 10);
        assert_eq!(store.keys(), 1);
        assert_eq!(now(limiter.forget(algorithm.name(), &user("alice"))), Ok(true), "{algorithm}");
        assert_eq!((store.keys(), store.log_bytes()), (0, 0), "{algorithm}");
        assert!(charge(&limiter, &user("alice"), 10).allowed(), "{algorithm}");
    }
}

/// `main` shows errors with `{:?}`.
#[test]
fn builder_output_never_shows_a_password() {
    for url in [
        "postgres://user:hunter2@host/",
        "hunter2",
        "redis://app:hunter2",
        "redis://hunter2@127.0.0.1",
        "redis://app:hunter2@127.0.0.1:x",
        "redis://app:p@hunter2/x@127.0.0.1",
        "redis://app:%68unter2%@127.0.0.1",
        "redis+unix:///run/redis.sock?password=hunter2",
    ] {
        let builder = || Limiter::builder().store(url);
        let mut output = format!("{:?}", builder());
        if let Err(error) = builder().build() {
            output += &format!("{error} {error:?}");
        }
        assert!(!output.contains("hunter2"), "{url}: {output}");
    }
}

#[test]
fn build_errors_name_the_fix() {
    let check = |builder: tollkeeper::Builder, expected: &str| {
        assert_eq!(builder.build().expect_err("cannot be built").to_string(), expected);
    };
    let limit = |name: &str| Limiter::builder().limit(Limit::new(name, Quota::per_second(1)));
    check(limit("Per User"), "limit `Per User`: a name is 1 to 64 of `a-z 0-9 . _ -`");
    check(limit(""), "limit ``: a name is 1 to 64 of `a-z 0-9 . _ -`");
    check(
        limit("twice").limit(Limit::new("twice", Quota::per_second(1))),
        "limit `twice`: another limit has this name (names are unique)",
    );
    check(
        Limiter::builder().limit(Limit::tiered("plan", "plan").tier("free", Quota::per_second(1))),
        "limit `plan`: requests without a known tier get nothing (name one of the tiers in `default_tier`)",
    );
    check(
        Limiter::builder().limit(Limit::new("slots", Quota::slots(5)).algorithm(Algorithm::FixedWindow)),
        "limit `slots`: fixed-window has a rate, not slots (`rate: 5/s`)",
    );
    // The numbers of a quota are checked here, where the name of the limit is known.
    check(
        Limiter::builder().limit(Limit::new("login", Quota::per_minute(0))),
        "limit `login`: count is 0 (at least 1; to refuse everything, grant nothing: `0/s`)",
    );
    check(
        Limiter::builder().limit(Limit::new("login", Quota::per_minute(5).burst(0))),
        "limit `login`: burst is 0 (at least 1, or leave it out)",
    );
    check(
        Limiter::builder().limit(Limit::new("slots", Quota::slots(0))),
        "limit `slots`: count is 0 (at least 1; to refuse everything, grant nothing: `0/s`)",
    );
    // All problems are reported at once.
    let errors = limit("A").limit(Limit::new("B", Quota::per_second(1)).by("a b")).build();
    let Err(BuildError::Policy(problems)) = &errors else { panic!("{errors:?}") };
    assert_eq!(problems.0.len(), 3);
    // The URL of a store may contain a password, so the error does not show it.
    check(
        limit("limit").store("postgres://user:secret@host/"),
        "there is no such store (`memory://`, `redis://`, `rediss://`, `redis+unix://`, `redis+cluster://`, \
         `redis+sentinel://`)",
    );
    check(
        limit("limit").store("nonsense"),
        "the store is not a URL (such as `memory://` or `redis://127.0.0.1:6379`)",
    );
    assert!(limit("limit").store("memory://").build().is_ok());
    assert!(limit("limit").store("memory://".to_owned()).build().is_ok());
    assert!(limit("limit").build().is_ok());
    assert!(Limiter::builder().build().is_ok(), "a limiter without limits is valid");
}

/// A store whose futures are pending once before they are ready, like those of a remote store.
#[derive(Debug)]
struct PendingOnce(tollkeeper::MemoryStore);

impl PendingOnce {
    fn pending_once<'a, T: Send + Unpin + 'a>(&self, value: T) -> StoreFuture<'a, T> {
        let mut value = Some(value);
        let mut polled = false;
        StoreFuture::Later(Box::pin(poll_fn(move |context| {
            if polled {
                return Poll::Ready(value.take().expect("not polled after it was ready"));
            }
            polled = true;
            context.waker().wake_by_ref();
            Poll::Pending
        })))
    }
}

impl Store for PendingOnce {
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, Reply> {
        self.pending_once(self.0.decide(toll))
    }

    fn correct<'a>(
        &'a self,
        charge: &'a Charge,
        corrections: &'a [KeyCorrection],
    ) -> StoreFuture<'a, Correction> {
        self.pending_once(self.0.correct(charge, corrections))
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>> {
        self.pending_once(Ok(self.0.release(slot)))
    }

    fn renew<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>> {
        self.pending_once(Ok(self.0.renew(slot)))
    }

    fn forget<'a>(&'a self, key: Key<'a>) -> StoreFuture<'a, Result<bool, Unavailable>> {
        self.pending_once(Ok(self.0.forget(key)))
    }

    fn seal_charge(&self, charge: &Charge) -> String {
        self.0.seal_charge(charge)
    }

    fn open_charge<'a>(&'a self, text: &'a str) -> StoreFuture<'a, Result<Option<Charge>, Unavailable>> {
        Store::open_charge(&self.0, text)
    }

    fn seal_slot(&self, slot: &Slot) -> String {
        self.0.seal_slot(slot)
    }

    fn open_slot<'a>(&'a self, text: &'a str) -> StoreFuture<'a, Result<Option<Slot>, Unavailable>> {
        Store::open_slot(&self.0, text)
    }
}

#[tokio::test]
async fn asynchronous_store_decides_alike() {
    let clock = clock();
    let backend = StoreChoice::Other(Arc::new(PendingOnce(store(1_000, &clock))), Clock::manual(&clock));
    let limiter = Limiter::builder()
        .limit(ten(Algorithm::FixedWindow))
        .limit(Limit::new("slots", Quota::slots(1)).by("user").ttl(Duration::from_secs(5)))
        .store(backend)
        .build()
        .unwrap();
    let alice = user("alice");
    let paid = limiter.check(&alice).cost(6).await.unwrap();
    assert!(paid.allowed());
    assert!(!limiter.check(&alice).cost(5).wait().unwrap().allowed());
    assert_eq!(limiter.refund(&paid.charge().unwrap()).await, Correction::Done);
    assert_eq!(limiter.refund(&paid.charge().unwrap()).await, Correction::Repeated);
    assert!(limiter.check(&alice).cost(5).wait().unwrap().allowed());
    let held = limiter.acquire(&alice).await.unwrap();
    let slot = held.slot.expect("one is free").keep();
    assert!(!limiter.acquire(&alice).await.unwrap().decision.allowed());
    assert!(
        limiter.renew(&slot).await.unwrap()
            && limiter.release(&slot).await.unwrap()
            && !limiter.release(&slot).await.unwrap()
    );
    assert!(limiter.until_allowed(&alice).await.unwrap().allowed());
    assert_eq!(limiter.forget("fixed-window", &alice).await, Ok(true));
    assert_eq!(limiter.handle("fixed-window").expect_err("handles need a memory store"), HandleError::Remote);
    assert!(limiter.check(&Facts::new().with("a b", "c")).await.is_err());
}

#[test]
fn check_future_does_nothing_until_polled() {
    let (limiter, _) = limiter([ten(Algorithm::FixedWindow)]);
    let alice = user("alice");
    let request = limiter.check(&alice).cost(10);
    drop(request.into_future());
    drop(limiter.until_allowed(&alice).into_future());
    assert_eq!(remaining(&limiter, "fixed-window", &alice), 10);
    assert!(request.wait().unwrap().allowed());
}

#[test]
fn observer_sees_every_decision() {
    #[derive(Debug, Default)]
    struct Recorder(std::sync::Mutex<Vec<(bool, Verb)>>);
    impl tollkeeper::Observer for Recorder {
        fn record(&self, decision: &DecidedToll) {
            self.0.lock().unwrap().push((decision.allowed(), decision.toll().verb()));
        }
    }
    let policy = Policy::new(vec![Limit::new("all", Quota::per_hour(1))]).unwrap();
    let limiter = Limiter::embedded(policy, MemoryStore::default());
    let recorder = std::sync::Arc::new(Recorder::default());
    assert!(limiter.observe(recorder.clone()));
    assert!(!limiter.observe(recorder.clone()), "an observer is already set");
    let no_facts = facts! {};
    limiter.check(&no_facts).wait().unwrap();
    limiter.clone().check(&no_facts).wait().unwrap();
    limiter.peek(&no_facts).wait().unwrap();
    limiter.check(&no_facts).cost(0).wait().unwrap_err();
    let recorded = std::mem::take(&mut *recorder.0.lock().unwrap());
    assert_eq!(recorded, [(true, Verb::Check), (false, Verb::Check), (false, Verb::Peek)]);
}
