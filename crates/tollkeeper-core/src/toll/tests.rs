use core::time::Duration;

use super::*;
use crate::algorithm::StoredState;
use crate::decision::Retry;
use crate::facts;
use crate::invalid_request::CostProblem;
use crate::limit::{CostMissing, Limit, Missing};
use crate::quota::{Allowance, Quota};
use crate::time::Time;

const NOW: Time = Time::from_micros(1_760_000_000_000_000);

fn policy(limits: impl Into<Vec<Limit>>) -> Arc<Policy> {
    Arc::new(Policy::new(limits.into()).expect("valid limits"))
}

fn per_user() -> Limit {
    Limit::new("per-user", Quota::per_minute(100)).by("user")
}

/// The dues of a toll as text, such as `per-user(alice) 1 of 100`: a cost of 1, a quota of 100. An absent value is `-`.
fn shown(toll: &Toll) -> Vec<String> {
    toll.dues()
        .map(|due| {
            let values: Vec<&str> = due.key.texts().map(|value| value.unwrap_or("-")).collect();
            format!("{}({}) {} of {}", due.rule.name(), values.join(","), due.cost, due.quota.count())
        })
        .collect()
}

/// Requires that a check of cost 1 has these dues.
fn check(limits: impl Into<Vec<Limit>>, facts: &Facts<'_>, expected: &[&str]) {
    let toll = policy(limits).toll(Verb::Check, facts, 1).expect("a valid request");
    assert_eq!(shown(&toll), expected, "{facts:?}");
    assert_eq!((toll.len(), toll.is_empty()), (expected.len(), expected.is_empty()));
}

fn error(limits: impl Into<Vec<Limit>>, facts: &Facts<'_>) -> InvalidRequest {
    policy(limits).toll(Verb::Check, facts, 1).expect_err("an invalid request")
}

#[test]
fn toll_lists_applying_limits_in_policy_order() {
    let limits = [
        Limit::new("all", Quota::per_second(9)),
        per_user(),
        Limit::new("login", Quota::per_hour(5)).by("user").when("route", "/login"),
        Limit::new("per-ip", Quota::per_minute(1000)).by("ip"),
    ];
    let facts = facts! { "ip" => "192.0.2.7", "user" => "alice" };
    check(
        limits.clone(),
        &facts,
        &["all() 1 of 9", "per-user(alice) 1 of 100", "per-ip(192.0.2.7) 1 of 1000"],
    );
    check(limits.clone(), &facts! {}, &["all() 1 of 9"]);
    check(
        limits,
        &facts! { "user" => "a", "route" => "/login" },
        &["all() 1 of 9", "per-user(a) 1 of 100", "login(a) 1 of 5"],
    );
    check([], &facts! { "user" => "alice" }, &[]);
}

#[test]
fn several_facts_make_one_key() {
    let limit = Limit::new("x", Quota::per_minute(1)).by("user").by("route").by("n");
    let facts = facts! { "n" => 7, "route" => "/a", "user" => "alice" };
    check([limit], &facts, &["x(alice,/a,7) 1 of 1"]);
}

/// The limits that were skipped because a fact is missing, and those whose tier is unknown.
fn marks(limit: Limit, facts: &Facts<'_>) -> (Vec<usize>, Vec<usize>) {
    let toll = policy([limit]).toll(Verb::Check, facts, 1).expect("a valid request");
    (toll.skipped().collect(), toll.unknown_tiers().collect())
}

#[test]
fn rules_are_evaluated_in_the_documented_order() {
    // Each limit has the rule that decides and all the rules after it, which would decide otherwise.
    let tiers = || {
        Limit::tiered("x", "plan")
            .by("user")
            .tier("free", Quota::per_minute(60))
            .tier("gold", Allowance::Unlimited)
            .default_tier("free")
    };
    let overrides = || tiers().override_for("acme", Quota::per_minute(7));
    let missing = || overrides().missing(Missing::Deny);
    let allow = || missing().allow("root").override_for("root", Allowance::Nothing);
    let unless = || allow().unless("internal", "yes");
    let when = || unless().when("route", "/*");
    let off = || when().mode(Mode::Off);
    let route = || facts! { "route" => "/a" };

    check([off()], &route(), &[]);
    check([when()], &facts! {}, &[]);
    check([when()], &route().with("internal", "yes"), &[]);
    check([when()], &route().with("user", "root"), &[]);
    check([when()], &route(), &["x(-) 1 of 0"]);
    check([when()], &route().with("plan", "gold"), &["x(-) 1 of 0"]);
    check([when()], &route().with("user", "acme").with("plan", "gold"), &["x(acme) 1 of 7"]);
    check([when()], &route().with("user", "alice").with("plan", "gold"), &[]);
    check([when()], &route().with("user", "alice").with("plan", "free"), &["x(alice) 1 of 60"]);
    check([when()], &route().with("user", "alice"), &["x(alice) 1 of 60"]);

    // A missing fact or tier is recorded only if evaluation gets as far as the rule that needs it.
    let skip = || when().missing(Missing::Skip);
    assert_eq!(marks(skip().mode(Mode::Off), &route()), (vec![], vec![]));
    assert_eq!(marks(skip(), &facts! {}), (vec![], vec![]));
    assert_eq!(marks(skip(), &route().with("internal", "yes")), (vec![], vec![]));
    assert_eq!(marks(skip(), &route()), (vec![0], vec![]));
    assert_eq!(marks(skip(), &route().with("user", "acme")), (vec![], vec![]));
    assert_eq!(marks(skip(), &route().with("user", "alice")), (vec![], vec![0]));
    assert_eq!(marks(skip(), &route().with("user", "alice").with("plan", "silver")), (vec![], vec![0]));
    assert_eq!(marks(skip(), &route().with("user", "alice").with("plan", "gold")), (vec![], vec![]));
}

#[test]
fn absent_or_empty_fact_follows_missing() {
    for facts in [facts! { "route" => "/a" }, facts! { "route" => "/a", "user" => "" }] {
        let limit = |missing| per_user().missing(missing);
        check([limit(Missing::Skip)], &facts, &[]);
        check([limit(Missing::Share)], &facts, &["per-user(-) 1 of 100"]);
        check([limit(Missing::Deny)], &facts, &["per-user(-) 1 of 0"]);
        check([limit(Missing::Skip).by("route")], &facts, &[]);
        check([limit(Missing::Share).by("route")], &facts, &["per-user(-,/a) 1 of 100"]);
        check([limit(Missing::Deny).by("route")], &facts, &["per-user(-,/a) 1 of 0"]);
        assert_eq!(marks(limit(Missing::Skip), &facts).0, [0]);
        assert_eq!(marks(limit(Missing::Share), &facts).0, [0; 0]);
        assert_eq!(marks(limit(Missing::Deny), &facts).0, [0; 0]);
    }
}

#[test]
fn missing_deny_refuses_at_any_cost() {
    let policy = policy([per_user().missing(Missing::Deny).cost("tokens")]);
    for tokens in [0, 1, 1000] {
        let toll = policy.toll(Verb::Check, &facts! { "tokens" => tokens }, 1).expect("valid");
        let due = toll.get(0);
        let step = due.step(StoredState::Nothing, NOW);
        let outcome = due.outcome(StoredState::Nothing, NOW, &step, false);
        assert_eq!((step.allowed, outcome.allowed), (false, false), "{tokens} tokens");
        assert_eq!((outcome.retry, outcome.limit), (Some(Retry::Never), 0));
    }
}

#[test]
fn a_cost_is_from_1_to_2_to_the_31() {
    for (cost, expected) in [
        (0, Err("the cost is 0 (at least 1; to look without paying, use peek)")),
        (1, Ok(1)),
        (1 << 31, Ok(1 << 31)),
        ((1 << 31) + 1, Err("the cost 2147483649 is too large (at most 2147483648)")),
        (u64::MAX, Err("the cost 18446744073709551615 is too large (at most 2147483648)")),
    ] {
        for verb in [Verb::Check, Verb::Peek, Verb::Acquire, Verb::Reserve(Span::from_secs(60))] {
            // The request itself is invalid, whether a limit applies or not.
            for facts in [facts! { "user" => "alice" }, facts! {}] {
                let toll = policy([per_user()]).toll(verb, &facts, cost);
                match (toll, expected) {
                    (Ok(toll), Ok(cost)) => assert!(toll.dues().all(|due| due.cost == cost)),
                    (Err(error), Err(message)) => assert_eq!(error.to_string(), message),
                    (toll, expected) => panic!("{cost}: {toll:?} instead of {expected:?}"),
                }
            }
        }
    }
}

#[test]
fn a_cost_can_come_from_a_fact() {
    let absent = "limit `llm` charges the number in fact `tokens`, but it is absent (send it, or set the limit's `cost_missing`)";
    let not_a_number = "limit `llm` charges the number in fact `tokens`, but it is not a whole number";
    let too_large = "limit `llm` charges the number in fact `tokens`, but it is larger than 2147483648";
    let limit = Limit::new("llm", Quota::per_minute(100_000)).cost("tokens");
    for (value, expected) in [
        (Value::from(250), Ok(250u64)),
        (Value::from("250"), Ok(250)),
        (Value::from("0000000000000000000000000250"), Ok(250)),
        (Value::from(0), Ok(0)),
        (Value::from("0"), Ok(0)),
        (Value::from(1u64 << 31), Ok(1 << 31)),
        (Value::from("2147483648"), Ok(1 << 31)),
        (Value::from((1u64 << 31) + 1), Err(too_large)),
        (Value::from("2147483649"), Err(too_large)),
        (Value::from(u64::MAX), Err(too_large)),
        (Value::from("99999999999999999999999999"), Err(too_large)),
        (Value::from(""), Err(absent)),
        (Value::from(-1), Err(not_a_number)),
        (Value::from("-1"), Err(not_a_number)),
        (Value::from("+1"), Err(not_a_number)),
        (Value::from(" 1"), Err(not_a_number)),
        (Value::from("1.5"), Err(not_a_number)),
        (Value::from("1e3"), Err(not_a_number)),
        (Value::from("٣"), Err(not_a_number)),
        (Value::from("0x10"), Err(not_a_number)),
        (Value::from(true), Err(not_a_number)),
        (Value::from(core::net::IpAddr::from([0, 0, 0, 1])), Err(not_a_number)),
    ] {
        let facts = facts! { "tokens" => value.clone() };
        match expected {
            Ok(cost) => check([limit.clone()], &facts, &[&format!("llm() {cost} of 100000")]),
            Err(message) => assert_eq!(error([limit.clone()], &facts).to_string(), message, "{value:?}"),
        }
        // A shadow limit never fails a request: what would be an error skips it.
        let shadow = limit.clone().mode(Mode::Shadow);
        match expected {
            Ok(cost) => check([shadow], &facts, &[&format!("llm() {cost} of 100000")]),
            Err(_) => check([shadow], &facts, &[]),
        }
    }
    assert_eq!(error([limit.clone()], &facts! {}).to_string(), absent);
    // The cost of the request applies to limits without a cost fact.
    let toll = policy([limit, per_user()])
        .toll(Verb::Check, &facts! { "tokens" => 250, "user" => "alice" }, 3)
        .expect("valid");
    assert_eq!(shown(&toll), ["llm() 250 of 100000", "per-user(alice) 3 of 100"]);
}

#[test]
fn invalid_cost_fact_matters_only_if_the_limit_applies() {
    let limit = || Limit::new("llm", Quota::per_minute(9)).by("user").cost("tokens");
    let alice = facts! { "user" => "alice" };
    check([limit()], &facts! {}, &[]);
    check([limit().mode(Mode::Off)], &alice, &[]);
    check([limit().when("route", "/llm")], &alice, &[]);
    check([limit().allow("alice")], &alice, &[]);
    check([limit().override_for("alice", Allowance::Unlimited)], &alice, &[]);
}

#[test]
fn an_absent_cost_is_an_error_skips_or_charges() {
    let limit = || Limit::new("llm", Quota::per_minute(9)).cost("tokens");
    let toll = |limit: Limit, facts: &Facts<'_>| policy([limit]).toll(Verb::Check, facts, 3).expect("valid");
    assert!(matches!(
        error([limit().cost_missing(CostMissing::Error)], &facts! {}),
        InvalidRequest::CostFact { problem: CostProblem::Absent, .. }
    ));
    for absent in [facts! {}, facts! { "tokens" => "" }] {
        let skipped = toll(limit().cost_missing(CostMissing::Skip), &absent);
        assert_eq!((shown(&skipped), skipped.skipped().collect::<Vec<_>>()), (vec![], vec![0]));
        let charged = toll(limit().cost_missing(CostMissing::Charge(5)), &absent);
        assert_eq!((shown(&charged), charged.skipped().count()), (vec!["llm() 5 of 9".to_owned()], 0));
        assert_eq!(shown(&toll(limit().cost_missing(CostMissing::Charge(0)), &absent)), ["llm() 0 of 9"]);
    }
    for cost_missing in [CostMissing::Error, CostMissing::Skip, CostMissing::Charge(5)] {
        // A fact that is present is charged, or rejected if it is not a number.
        let limit = || limit().cost_missing(cost_missing);
        assert_eq!(shown(&toll(limit(), &facts! { "tokens" => 7 })), ["llm() 7 of 9"]);
        assert!(matches!(
            error([limit()], &facts! { "tokens" => "many" }),
            InvalidRequest::CostFact { problem: CostProblem::NotANumber, .. }
        ));
    }
    // A request without the fact that the limit is keyed by is refused, with a cost fact or without.
    let refused = toll(limit().by("user").missing(Missing::Deny).cost_missing(CostMissing::Skip), &facts! {});
    assert_eq!((shown(&refused), refused.skipped().count()), (vec!["llm(-) 3 of 0".to_owned()], 0));
}

#[test]
fn cost_of_zero_passes_without_charge_or_delay() {
    use crate::algorithm::meter;
    let limit = Limit::new("x", Quota::per_second(1).burst(3)).algorithm(Algorithm::LeakyBucket).cost("n");
    let toll = policy([limit]).toll(Verb::Check, &facts! { "n" => 0 }, 1).expect("valid").hold(Span::ZERO);
    let due = toll.get(0);
    // Three requests are waiting, and the queue is full.
    let full =
        StoredState::Meter(meter::State { level: due.quota.capacity(), at: due.quota.tick().number(NOW) });
    let step = due.step(full, NOW);
    let outcome = due.outcome(full, NOW, &step, true);
    assert_eq!((step.allowed, outcome.allowed, outcome.retry), (true, true, None));
    assert_eq!((outcome.remaining, outcome.delay), (0, Span::ZERO));

    let fresh = due.outcome(StoredState::Nothing, NOW, &due.step(StoredState::Nothing, NOW), true);
    assert_eq!((fresh.remaining, fresh.reset_after), (3, Some(Span::ZERO)));
}

#[test]
fn request_that_cannot_be_held_is_refused() {
    use crate::algorithm::meter;
    let limit = Limit::new("x", Quota::per_second(1).burst(3)).algorithm(Algorithm::LeakyBucket);
    let toll = policy([limit]).toll(Verb::Check, &facts! {}, 1).expect("valid");
    let waiting = |toll: &Toll| {
        let due = toll.get(0);
        // Another request is held for half a second more.
        let stored = StoredState::Meter(meter::State { level: 500_000, at: due.quota.tick().number(NOW) });
        let step = due.step(stored, NOW);
        due.outcome(stored, NOW, &step, step.allowed)
    };
    let half = Span::from_millis(500);
    assert_eq!((waiting(&toll).retry, waiting(&toll).delay), (None, half));
    assert_eq!(waiting(&toll.clone().hold(half)).retry, None);
    let short = waiting(&toll.clone().hold(Span::from_millis(499)));
    assert_eq!((short.retry, short.delay), (Some(Retry::After(Span::from_millis(1))), Span::ZERO));
    assert_eq!(waiting(&toll.hold(Span::ZERO)).retry, Some(Retry::After(half)));
}

#[test]
fn a_reservation_lasts_from_a_second_to_an_hour() {
    for (ttl, expected) in [
        (Span::ZERO, Some("a reservation cannot last 0 s (from 1s to 1h)")),
        (Span::from_micros(999_999), Some("a reservation cannot last 0.999999 s (from 1s to 1h)")),
        (Span::from_secs(1), None),
        (Span::from_secs(3_600), None),
        (Span::from_micros(3_600_000_001), Some("a reservation cannot last 1 h 1 min (from 1s to 1h)")),
        (Span::from_secs(u64::MAX), Some("a reservation cannot last 213503982 d 9 h (from 1s to 1h)")),
    ] {
        let toll = policy([per_user()]).toll(Verb::Reserve(ttl), &facts! { "user" => "alice" }, 1);
        assert_eq!(toll.err().map(|error| error.to_string()).as_deref(), expected, "{ttl}");
    }
}

#[test]
fn only_acquire_and_peeks_include_concurrency_limits() {
    let policy = policy([
        Limit::new("exports", Quota::slots(5)).by("user").ttl(Duration::from_secs(30)),
        per_user(),
        Limit::new("llm", Quota::per_minute(9)).cost("tokens"),
    ]);
    let facts = facts! { "user" => "alice", "tokens" => 4 };
    let both = ["exports(alice) 3 of 5", "per-user(alice) 3 of 100", "llm() 4 of 9"];
    let usage = ["exports(alice) 1 of 5", "per-user(alice) 1 of 100", "llm() 1 of 9"];
    for (verb, charges, expected) in [
        (Verb::Check, true, &both[1..]),
        (Verb::Reserve(Span::from_secs(60)), true, &both[1..]),
        (Verb::Peek, false, &both),
        (Verb::Acquire, true, &both),
        (Verb::Usage, false, &usage),
    ] {
        let toll = policy.toll(verb, &facts, 3).expect("valid");
        assert_eq!(shown(&toll), expected, "{verb:?}");
        assert_eq!((toll.verb(), verb.charges()), (verb, charges));
        assert!(toll.dues().all(|due| due.is_slot() == (due.rule.name() == "exports")));
    }
    // A check leaves the concurrency limit out, so the missing `user` does not mark that limit as skipped.
    let check = policy.toll(Verb::Check, &facts! { "tokens" => 4 }, 1).expect("valid");
    assert_eq!(check.skipped().collect::<Vec<_>>(), [1]);
}

#[test]
fn usage_costs_1_whatever_the_cost_fact_says() {
    let policy = policy([Limit::new("llm", Quota::per_minute(9)).cost("tokens")]);
    for facts in [facts! {}, facts! { "tokens" => "many" }, facts! { "tokens" => 0 }] {
        assert_eq!(shown(&policy.toll(Verb::Usage, &facts, 1).expect("valid")), ["llm() 1 of 9"]);
    }
}

#[test]
fn invalid_facts_are_reported_without_any_limit() {
    let facts = facts! { "a b" => "x" };
    let expected = "fact `a b`: a name is 1 to 64 of `A-Z a-z 0-9 . _ : / -`";
    assert_eq!(error([], &facts).to_string(), expected);
    assert_eq!(error([per_user()], &facts).to_string(), expected);
}

#[test]
fn refund_above_the_charge_reports_both_numbers() {
    assert_eq!(
        InvalidRequest::MoreThanCharged { asked: 3, charged: 2 }.to_string(),
        "3 cannot be given back: 2 had been charged"
    );
}

/// Requires that one toll for several sets of facts, each with its cost, has these dues.
fn merged(limits: impl Into<Vec<Limit>>, sets: &[(Facts<'_>, u64)], expected: &[&str]) {
    let policy = policy(limits);
    let mut toll = Toll::new(&policy, Verb::Check);
    for (facts, cost) in sets {
        toll.add(facts, *cost).expect("valid");
    }
    assert_eq!(shown(&toll), expected);
}

#[test]
fn equal_keys_are_charged_once_at_the_largest_cost() {
    let all = || Limit::new("all", Quota::per_second(9));
    let (alice, bob) = (facts! { "user" => "alice" }, facts! { "user" => "bob" });
    merged(
        [per_user()],
        &[(alice.clone(), 2), (alice.clone(), 5), (alice.clone(), 3)],
        &["per-user(alice) 5 of 100"],
    );
    merged(
        [all(), per_user()],
        &[(alice.clone(), 2), (bob.clone(), 7), (alice.clone(), 4)],
        &["all() 7 of 9", "per-user(alice) 4 of 100", "per-user(bob) 7 of 100"],
    );
    // Two limits by the same fact have different keys.
    let other = Limit::new("other", Quota::per_minute(100)).by("user");
    merged(
        [per_user(), other],
        &[(alice.clone(), 1), (alice, 1)],
        &["per-user(alice) 1 of 100", "other(alice) 1 of 100"],
    );
    // An absent value and the value `-` are different keys.
    merged(
        [per_user().missing(Missing::Share)],
        &[(facts! {}, 1), (facts! { "user" => "-" }, 2)],
        &["per-user(-) 1 of 100", "per-user(-) 2 of 100"],
    );
}

#[test]
fn equal_keys_use_the_smallest_quota() {
    let plan = || {
        Limit::tiered("plan", "plan")
            .by("user")
            .tier("free", Quota::per_minute(60).burst(10))
            .tier("pro", Quota::per_minute(600).burst(100))
            .tier("slow", Quota::per_minute(6).burst(100))
            .tier("none", Allowance::Nothing)
            .tier("daily", Quota::per_day(60).burst(10))
            .tier("gold", Allowance::Unlimited)
            .default_tier("free")
    };
    let alice = |plan: &'static str| facts! { "user" => "alice", "plan" => plan };
    for (one, other, expected) in [
        ("free", "pro", "plan(alice) 2 of 60"),
        ("pro", "slow", "plan(alice) 2 of 6"),
        ("pro", "none", "plan(alice) 2 of 0"),
        ("pro", "gold", "plan(alice) 1 of 600"),
    ] {
        merged([plan()], &[(alice(one), 1), (alice(other), 2)], &[expected]);
        merged([plan()], &[(alice(other), 2), (alice(one), 1)], &[expected]);
    }
    // The period is part of the key.
    merged(
        [plan()],
        &[(alice("free"), 1), (alice("daily"), 2)],
        &["plan(alice) 1 of 60", "plan(alice) 2 of 60"],
    );
}

#[test]
fn marks_support_more_than_64_limits() {
    let limits: Vec<Limit> = (0..200)
        .map(|number| Limit::new(format!("limit-{number}"), Quota::per_second(1)))
        .enumerate()
        .map(|(index, limit)| if index % 3 == 0 { limit.by("user") } else { limit })
        .collect();
    let policy = policy(limits);
    let mut toll = Toll::new(&policy, Verb::Check);
    toll.add(&facts! {}, 1).expect("valid");
    toll.add(&facts! {}, 1).expect("valid");
    assert_eq!(toll.skipped().collect::<Vec<_>>(), (0..200).step_by(3).collect::<Vec<_>>());
    assert_eq!(toll.unknown_tiers().count(), 0);
    assert_eq!(toll.len(), 133);
}

#[test]
fn marks_iterate_over_the_set_indices() {
    let mut marks = Marks::default();
    assert_eq!(marks.iter().count(), 0);
    let indexes = [0, 1, 63, 64, 65, 127, 128, 1000];
    for index in indexes.iter().rev().chain(&indexes) {
        marks.set(*index);
    }
    assert_eq!(marks.iter().collect::<Vec<_>>(), indexes);
}

/// The key of an address under a limit by `ip`.
fn keyed(prefix: u8, ip: &str) -> String {
    let policy = Policy::new(vec![Limit::new("x", Quota::per_minute(1)).by("ip")]).expect("valid");
    let toll = Arc::new(policy.with_ipv6_prefix(prefix)).toll(Verb::Check, &facts! { "ip" => ip }, 1);
    toll.expect("valid").get(0).key.texts().next().flatten().expect("one value").to_owned()
}

#[test]
fn addresses_are_masked_and_canonicalised_in_keys() {
    for (prefix, ip, expected) in [
        (64, "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        (64, "2001:db8:1:2:ffff::", "2001:db8:1:2::"),
        (64, "2001:db8:1:3::", "2001:db8:1:3::"),
        (56, "2001:db8:1:2ff::1", "2001:db8:1:200::"),
        (128, "2001:db8:1:2:3:4:5:6", "2001:db8:1:2:3:4:5:6"),
        (0, "2001:db8::1", "::"),
        (64, "192.0.2.7", "192.0.2.7"),
        (0, "192.0.2.7", "192.0.2.7"),
        (64, "::ffff:192.0.2.7", "192.0.2.7"),
        (64, "::ffff:192.0.2.8", "192.0.2.8"),
    ] {
        assert_eq!(keyed(prefix, ip), expected, "{ip}/{prefix}");
    }
}

#[test]
fn allow_and_overrides_compare_an_address_before_it_is_masked() {
    let limit = || {
        Limit::new("x", Quota::per_minute(9))
            .by("ip")
            .allow("2001:db8::7")
            .override_for("2001:db8::8", Quota::per_minute(8))
            .override_for("2001:db8::", Quota::per_minute(1))
    };
    check([limit()], &facts! { "ip" => "2001:db8::7" }, &[]);
    check([limit()], &facts! { "ip" => "2001:db8::8" }, &["x(2001:db8::) 1 of 8"]);
    check([limit()], &facts! { "ip" => "2001:db8::9" }, &["x(2001:db8::) 1 of 9"]);
    check([limit()], &facts! { "ip" => "2001:db8::" }, &["x(2001:db8::) 1 of 1"]);
}

#[test]
fn stagger_shifts_each_key_by_its_own_amount() {
    let shift = |limit: Limit, user: &str| {
        policy([limit]).toll(Verb::Check, &facts! { "user" => user }, 1).expect("valid").get(0).shift
    };
    let fixed = || per_user().algorithm(Algorithm::FixedWindow);
    assert_eq!(shift(fixed(), "alice"), 0);
    assert_ne!(shift(fixed().stagger(), "alice"), 0);
    assert_eq!(shift(fixed().stagger(), "alice"), shift(fixed().stagger(), "alice"));
    assert_ne!(shift(fixed().stagger(), "alice"), shift(fixed().stagger(), "bob"));
    // `Allowance::Nothing` has no windows to shift, whatever its period.
    let nothing = Limit::new("x", Allowance::Nothing)
        .by("user")
        .algorithm(Algorithm::FixedWindow)
        .ttl(Duration::ZERO)
        .stagger();
    assert_eq!(shift(nothing, "alice"), 0);
}

#[test]
fn value_and_facts_give_the_same_due() {
    for limit in [per_user(), per_user().algorithm(Algorithm::FixedWindow).stagger()] {
        let policy = policy([Limit::new("first", Quota::per_second(1)), limit]);
        let by_facts = policy.toll(Verb::Check, &facts! { "user" => "alice" }, 3).expect("valid");
        let mut by_value = Toll::new(&policy, Verb::Check);
        by_value.add_value(1, "alice", 3);
        let (expected, due) = (by_facts.get(1), by_value.get(0));
        assert_eq!(
            (due.rule.name(), due.key, due.cost, due.shift),
            ("per-user", expected.key, 3, expected.shift)
        );
        assert_eq!(due.quota, expected.quota);
    }
}

#[test]
fn long_values_and_many_limits_are_kept_whole() {
    let limits: Vec<Limit> = (0..20)
        .map(|number| Limit::new(format!("limit-{number}"), Quota::per_second(1)).by("user"))
        .collect();
    let long = "x".repeat(1024);
    let toll = policy(limits).toll(Verb::Check, &facts! { "user" => &long }, 1).expect("valid");
    assert_eq!(toll.len(), 20);
    for (number, due) in toll.dues().enumerate() {
        assert_eq!(due.rule.name(), format!("limit-{number}"));
        assert_eq!(due.key.texts().collect::<Vec<_>>(), [Some(long.as_str())]);
    }
}

fn limits_by_user(count: usize) -> Vec<Limit> {
    let limit = |number| Limit::new(format!("limit-{number}"), Quota::per_minute(100)).by("user");
    (0..count).map(limit).collect()
}

#[test]
fn toll_has_at_most_256_dues() {
    let alice = facts! { "user" => "alice" };
    assert_eq!(policy(limits_by_user(256)).toll(Verb::Check, &alice, 1).expect("fits").len(), 256);

    // 64 sets of facts times 125 limits, which is what one call from Envoy can request.
    let wide = policy(limits_by_user(125));
    let mut toll = Toll::new(&wide, Verb::Check);
    let results: Vec<_> = (0..64).map(|user| toll.add(&facts! { "user" => user }, 1)).collect();
    assert_eq!(results[..2], [Ok(()), Ok(())]);
    assert_eq!(results[2], Err(InvalidRequest::TooManyDues));
}

/// Equal keys count once, however many sets of facts they come from.
#[test]
fn equal_keys_do_not_count_towards_the_256_dues() {
    let wide = policy(limits_by_user(128));
    let mut toll = Toll::new(&wide, Verb::Check);
    for round in 0..64 {
        for user in ["alice", "bob"] {
            let matched =
                toll.add_matched(&facts! { "user" => user }, round + 1).expect("no more keys than before");
            let first = if user == "alice" { 0 } else { 128 };
            assert_eq!(matched.indices().collect::<Vec<_>>(), (first..first + 128).collect::<Vec<_>>());
        }
    }
    assert_eq!(toll.len(), 256);
    assert!(toll.dues().all(|due| due.cost == 64));
    // 128 keys of `alice` and 128 of `bob`, each with a length of two bytes before it. No key is stored twice.
    assert_eq!(toll.entries.start().0, 128 * (7 + 5));
}
