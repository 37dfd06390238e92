use core::time::Duration;

use super::*;
use crate::facts;
use crate::quota::Quota;
use crate::quota::{Algorithm, Allowance};
use crate::status::StatusSet;
use crate::time::Span;

fn policy(limit: Limit) -> Policy {
    Policy::new(vec![limit]).expect("a valid limit")
}

fn messages(limits: Vec<Limit>) -> Vec<String> {
    match Policy::new(limits) {
        Ok(_) => Vec::new(),
        Err(InvalidPolicy(problems)) => problems.iter().map(ToString::to_string).collect(),
    }
}

fn plain(name: &str) -> Limit {
    Limit::new(name, Quota::per_minute(100))
}

fn tiered() -> Limit {
    Limit::tiered("plan", "plan").by("user").tier("free", Quota::per_minute(60)).default_tier("free")
}

/// The quota of a request, such as `60/1m`, or `unlimited`.
fn granted(policy: &Policy, facts: &Facts<'_>) -> String {
    let rule = &policy.rules()[0];
    let granted = rule.granted(facts);
    let quota = match rule.quota(granted.grant) {
        None => "unlimited".to_owned(),
        Some((quota, _)) => format!("{}/{}", quota.count(), quota.period()),
    };
    quota + if granted.unknown_tier { ", tier unknown" } else { "" }
}

#[test]
fn every_error_says_what_would_be_valid() {
    let per_minute = Quota::per_minute(60);
    for (limit, message) in [
        (plain("Per User"), "limit `Per User`: a name is 1 to 64 of `a-z 0-9 . _ -`"),
        (
            plain("x").by("user id"),
            "limit `x`: `user id` is not the name of a fact (1 to 64 of `A-Z a-z 0-9 . _ : / -`)",
        ),
        (
            plain("x").when("", "*"),
            "limit `x`: `` is not the name of a fact (1 to 64 of `A-Z a-z 0-9 . _ : / -`)",
        ),
        (
            plain("x").unless("a\nb", "*"),
            r"limit `x`: `a\nb` is not the name of a fact (1 to 64 of `A-Z a-z 0-9 . _ : / -`)",
        ),
        (
            plain("x").cost("größe"),
            "limit `x`: `größe` is not the name of a fact (1 to 64 of `A-Z a-z 0-9 . _ : / -`)",
        ),
        (
            Limit::tiered("x", "?").tier("free", per_minute).default_tier("free"),
            "limit `x`: `?` is not the name of a fact (1 to 64 of `A-Z a-z 0-9 . _ : / -`)",
        ),
        (plain("x").by("user").by("user"), "limit `x`: `user` is listed twice in `by` (keep one)"),
        (
            plain("x").tier("free", per_minute),
            "limit `x`: it has tiers but no fact that picks one (name it with `tier`)",
        ),
        (
            plain("x").default_tier("free"),
            "limit `x`: it has tiers but no fact that picks one (name it with `tier`)",
        ),
        (Limit::tiered("x", "plan"), "limit `x`: a fact picks the tier but there are no tiers (list them)"),
        (
            Limit::tiered("x", "plan").default_tier("free"),
            "limit `x`: a fact picks the tier but there are no tiers (list them)",
        ),
        (
            Limit::tiered("x", "plan").tier("free", per_minute),
            "limit `x`: requests without a known tier get nothing (name one of the tiers in `default_tier`)",
        ),
        (
            Limit::tiered("x", "plan").tier("free", per_minute).default_tier("fre"),
            "limit `x`: the default tier `fre` is not one of the tiers",
        ),
        (tiered().tier("free", per_minute), "limit `plan`: tier `free`: `free` is listed twice (keep one)"),
        (
            plain("x").by("user").override_for("a\n", per_minute).override_for("a\n", per_minute),
            r"limit `x`: override `a\n`: `a\n` is listed twice (keep one)",
        ),
        (
            plain("x").allow("alice"),
            "limit `x`: `allow` and overrides compare one value: key the limit by exactly one fact",
        ),
        (
            plain("x").by("user").by("ip").override_for("alice", per_minute),
            "limit `x`: override `alice`: `allow` and overrides compare one value: key the limit by exactly one fact",
        ),
        (
            plain("x").by("ip").allow("localhost"),
            "limit `x`: `localhost` is neither an address nor a network (such as `10.0.0.0/8`)",
        ),
        (
            plain("x").by("ip").override_for("10.0.0.0/8", per_minute),
            "limit `x`: override `10.0.0.0/8`: `10.0.0.0/8` is not an IP address (such as `192.0.2.7`; an override is for one address)",
        ),
        (plain("x").stagger(), "limit `x`: sliding-window cannot be staggered (only fixed-window can)"),
        (
            plain("x").by("user").partition("tenant"),
            "limit `x`: `partition` is `tenant`, which is not one of the facts in `by` (use one of them)",
        ),
        (
            plain("x").algorithm(Algorithm::Concurrency),
            "limit `x`: a concurrency limit has slots, not a rate (`limit: 5`)",
        ),
        (
            Limit::new("x", Quota::slots(5)).algorithm(Algorithm::TokenBucket),
            "limit `x`: token-bucket has a rate, not slots (`rate: 5/s`)",
        ),
        (
            Limit::new("x", Quota::per_minute(0)),
            "limit `x`: count is 0 (at least 1; to refuse everything, grant nothing: `0/s`)",
        ),
        (
            tiered().tier("pro", Quota::per_minute(1).burst(0)),
            "limit `plan`: tier `pro`: burst is 0 (at least 1, or leave it out)",
        ),
        (
            plain("x").by("user").algorithm(Algorithm::SlidingLog).override_for("alice", per_minute.burst(1)),
            "limit `x`: override `alice`: sliding-log has no burst (leave it out, or use token-bucket or leaky-bucket)",
        ),
        (
            Limit::new("x", Quota::slots(5)).ttl(Duration::ZERO),
            "limit `x`: period 0us is not between 1ms and 366d",
        ),
    ] {
        assert_eq!(messages(vec![limit]), [message]);
    }
}

#[test]
fn duplicate_limit_names_are_rejected() {
    assert_eq!(
        messages(vec![plain("a"), plain("b"), plain("a"), plain("a")]),
        [
            "limit `a`: another limit has this name (names are unique)",
            "limit `a`: another limit has this name (names are unique)",
        ]
    );
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let error = Policy::new(vec![
        plain("good").by("user"),
        Limit::new("bad", Quota::per_minute(0)).by("a b").by("c d").allow("x").stagger(),
        plain("good"),
        tiered().tier("pro", Quota::slots(1)).tier("team", Quota::per_second(u64::MAX)),
    ])
    .expect_err("most limits are invalid");
    let found: Vec<(usize, &str, &Part)> =
        error.0.iter().map(|problem| (problem.index, problem.name.as_str(), &problem.part)).collect();
    assert_eq!(
        found,
        [
            (1, "bad", &Part::By),
            (1, "bad", &Part::By),
            (1, "bad", &Part::Allow),
            (1, "bad", &Part::Stagger),
            (1, "bad", &Part::Rate),
            (2, "good", &Part::Name),
            // Slots in one tier make it a concurrency limit, so that rates in other tiers are mistakes.
            (3, "plan", &Part::Tier("free".to_owned())),
            (3, "plan", &Part::Tier("team".to_owned())),
        ]
    );
    assert_eq!(
        error.to_string(),
        "limit `bad`: `a b` is not the name of a fact (1 to 64 of `A-Z a-z 0-9 . _ : / -`); \
         limit `bad`: `c d` is not the name of a fact (1 to 64 of `A-Z a-z 0-9 . _ : / -`); \
         limit `bad`: `allow` and overrides compare one value: key the limit by exactly one fact; \
         limit `bad`: sliding-window cannot be staggered (only fixed-window can); \
         limit `bad`: count is 0 (at least 1; to refuse everything, grant nothing: `0/s`); \
         limit `good`: another limit has this name (names are unique); \
         limit `plan`: tier `free`: a concurrency limit has slots, not a rate (`limit: 5`); \
         limit `plan`: tier `team`: a concurrency limit has slots, not a rate (`limit: 5`)"
    );
}

#[test]
fn invalid_limit_names_are_rejected_without_panic() {
    for name in ["a", "0", "a.b_c-9", &"x".repeat(64)] {
        assert_eq!(messages(vec![plain(name)]), [""; 0], "{name}");
    }
    for name in ["", "A", "a b", "a:b", "a\0", "ü", &"x".repeat(65), &"x".repeat(300), &"ü".repeat(70_000)]
    {
        let expected = format!("limit `{}`: a name is 1 to 64 of `a-z 0-9 . _ -`", name.escape_debug());
        assert_eq!(messages(vec![plain(name)]), [expected]);
    }
    assert_eq!(
        messages(vec![plain(""), plain("")]),
        [
            "limit ``: a name is 1 to 64 of `a-z 0-9 . _ -`",
            "limit ``: another limit has this name (names are unique)",
            "limit ``: a name is 1 to 64 of `a-z 0-9 . _ -`",
        ]
    );
}

#[test]
fn the_default_algorithm_follows_from_the_grants() {
    let (rate, burst) = (Quota::per_minute(60), Quota::per_minute(60).burst(10));
    for (limit, expected) in [
        (plain("x"), Algorithm::SlidingWindow),
        (Limit::new("x", burst), Algorithm::TokenBucket),
        (Limit::new("x", Quota::slots(5)), Algorithm::Concurrency),
        (Limit::new("x", Allowance::Unlimited), Algorithm::SlidingWindow),
        (Limit::new("x", Allowance::Nothing), Algorithm::SlidingWindow),
        (Limit::new("x", burst).algorithm(Algorithm::LeakyBucket), Algorithm::LeakyBucket),
        (Limit::new("x", rate).algorithm(Algorithm::TokenBucket), Algorithm::TokenBucket),
        (Limit::new("x", rate).algorithm(Algorithm::SlidingLog), Algorithm::SlidingLog),
        (tiered(), Algorithm::SlidingWindow),
        (tiered().tier("pro", burst), Algorithm::TokenBucket),
        (tiered().override_for("acme", burst), Algorithm::TokenBucket),
        (tiered().algorithm(Algorithm::FixedWindow).stagger(), Algorithm::FixedWindow),
        (Limit::tiered("x", "plan").tier("a", Quota::slots(1)).default_tier("a"), Algorithm::Concurrency),
        (
            Limit::new("x", Allowance::Nothing).by("user").override_for("acme", Quota::slots(1)),
            Algorithm::Concurrency,
        ),
    ] {
        let policy = policy(limit);
        let rule = &policy.rules()[0];
        assert_eq!(rule.algorithm(), expected);
        for grant in rule.grants() {
            if let Grant::Limited { quota, .. } = grant {
                assert_eq!(quota.algorithm(), expected, "the same for every tier");
            }
        }
    }
}

#[test]
fn the_default_burst_is_the_count() {
    let policy = policy(tiered().tier("pro", Quota::per_minute(600).burst(100)));
    let bursts: Vec<u64> = policy.rules()[0]
        .grants()
        .iter()
        .filter_map(|grant| if let Grant::Limited { quota, .. } = grant { Some(quota.burst()) } else { None })
        .collect();
    assert_eq!(bursts, [0, 60, 100]);
}

#[test]
fn overrides_precede_tiers_and_tiers_the_default() {
    let policy = policy(
        tiered()
            .tier("pro", Quota::per_minute(600))
            .tier("daily", Quota::per_day(1000))
            .tier("enterprise", Allowance::Unlimited)
            .tier("banned", Allowance::Nothing)
            .override_for("acme", Quota::per_minute(50_000))
            .override_for("root", Allowance::Unlimited)
            .override_for("spam", Allowance::Nothing)
            .override_for("17", Quota::per_minute(17)),
    );
    let nothing = "0/1m";
    for (facts, expected) in [
        (facts! { "user" => "alice", "plan" => "free" }, "60/1m"),
        (facts! { "user" => "alice", "plan" => "pro" }, "600/1m"),
        (facts! { "user" => "alice", "plan" => "daily" }, "1000/1d"),
        (facts! { "user" => "alice", "plan" => "enterprise" }, "unlimited"),
        (facts! { "user" => "alice", "plan" => "banned" }, nothing),
        (facts! { "user" => "alice", "plan" => "Pro" }, "60/1m, tier unknown"),
        (facts! { "user" => "alice", "plan" => "" }, "60/1m, tier unknown"),
        (facts! { "user" => "alice" }, "60/1m, tier unknown"),
        (facts! { "plan" => "pro" }, "600/1m"),
        (facts! { "user" => "acme", "plan" => "enterprise" }, "50000/1m"),
        (facts! { "user" => "acme", "plan" => "gold" }, "50000/1m"),
        (facts! { "user" => "root", "plan" => "banned" }, "unlimited"),
        (facts! { "user" => "spam", "plan" => "enterprise" }, nothing),
        (facts! { "user" => 17, "plan" => "pro" }, "17/1m"),
        (facts! { "user" => "Acme", "plan" => "pro" }, "600/1m"),
    ] {
        assert_eq!(granted(&policy, &facts), expected, "{facts:?}");
    }
    assert_eq!(policy.rules()[0].plain_quota().map(|(quota, _)| quota.count()), Some(60));
}

#[test]
fn an_address_override_matches_every_spelling() {
    let limit = plain("x")
        .by("ip")
        .override_for("2001:DB8:0:0::1", Quota::per_minute(1))
        .override_for("::ffff:192.0.2.7", Quota::per_minute(2));
    let policy = policy(limit.clone());
    for (ip, expected) in [
        ("2001:db8::1", "1/1m"),
        ("2001:db8::2", "100/1m"),
        ("192.0.2.7", "2/1m"),
        ("::ffff:192.0.2.7", "2/1m"),
    ] {
        assert_eq!(granted(&policy, &facts! { "ip" => ip }), expected, "{ip}");
    }
    assert_eq!(
        messages(vec![limit.override_for("192.0.2.7", Quota::per_minute(3))]),
        ["limit `x`: override `192.0.2.7`: `192.0.2.7` is listed twice (keep one)"]
    );
}

#[test]
fn equal_grants_are_stored_once() {
    let limit = (0..1000).fold(plain("x").by("user"), |limit, user| {
        limit.override_for(user.to_string(), Quota::per_minute(1 + user % 3))
    });
    // The grant that refuses everything, the rate of the limit, and three rates of overrides.
    assert_eq!(policy(limit).rules()[0].grants().len(), 5);
}

#[test]
fn only_a_different_period_changes_the_keys_of_a_tier() {
    let policy = policy(tiered().tier("pro", Quota::per_minute(600)).tier("daily", Quota::per_day(1)));
    let families: Vec<&[u8]> = policy.rules()[0]
        .grants()
        .iter()
        .filter_map(|grant| if let Grant::Limited { family, .. } = grant { Some(&family[..]) } else { None })
        .collect();
    let [_, free, pro, daily] = families[..] else { panic!("{families:?}") };
    assert_eq!(free, pro, "a client that changes plans keeps its count");
    assert_ne!(free, daily);
}

#[test]
fn allowed_values_are_not_limited() {
    let by_ip = policy(plain("x").by("ip").allow("10.0.0.0/8").allow("192.0.2.7").allow("2001:db8::/32"));
    let by_user = policy(plain("x").by("user").allow("alice").allow("10.0.0.0/8").allow("17"));
    let by_peer = policy(plain("x").by("peer").allow("192.0.2.7"));
    let peer: IpAddr = "192.0.2.7".parse().expect("an address");
    for (policy, facts, allowed) in [
        (&by_ip, facts! { "ip" => "10.1.2.3" }, true),
        (&by_ip, facts! { "ip" => "::ffff:10.1.2.3" }, true),
        (&by_ip, facts! { "ip" => "11.1.2.3" }, false),
        (&by_ip, facts! { "ip" => "192.0.2.7" }, true),
        (&by_ip, facts! { "ip" => "192.0.2.8" }, false),
        (&by_ip, facts! { "ip" => "2001:db8:1::1" }, true),
        (&by_ip, facts! { "ip" => "" }, false),
        (&by_ip, facts! {}, false),
        (&by_user, facts! { "user" => "alice" }, true),
        (&by_user, facts! { "user" => "Alice" }, false),
        (&by_user, facts! { "user" => "10.1.2.3" }, false),
        (&by_user, facts! { "user" => "10.0.0.0/8" }, true),
        (&by_user, facts! { "user" => 17 }, true),
        (&by_user, facts! { "ip" => "10.1.2.3" }, false),
        (&by_peer, facts! { "peer" => peer }, true),
        (&by_peer, facts! { "peer" => "192.0.2.7" }, true),
    ] {
        assert_eq!(policy.rules()[0].applies(&facts), !allowed, "{facts:?}");
    }
}

#[test]
fn all_of_when_and_not_all_of_unless_must_match() {
    let when = || plain("x").when("route", "/login").when("route", "/api/*").when("method", "POST");
    let unless = || plain("x").unless("route", "/health").unless("method", "GET").unless("method", "HEAD");
    for (limit, facts, expected) in [
        (when(), facts! { "route" => "/login", "method" => "POST" }, true),
        (when(), facts! { "route" => "/api/x", "method" => "POST" }, true),
        (when(), facts! { "route" => "/login", "method" => "GET" }, false),
        (when(), facts! { "route" => "/other", "method" => "POST" }, false),
        (when(), facts! { "route" => "/login" }, false),
        (when(), facts! { "route" => "/login", "method" => "" }, false),
        (when(), facts! {}, false),
        (unless(), facts! { "route" => "/health", "method" => "GET" }, false),
        (unless(), facts! { "route" => "/health", "method" => "HEAD" }, false),
        (unless(), facts! { "route" => "/health", "method" => "POST" }, true),
        (unless(), facts! { "route" => "/health" }, true),
        (unless(), facts! {}, true),
        (plain("x"), facts! {}, true),
        (plain("x").mode(Mode::Shadow), facts! {}, true),
        (plain("x").mode(Mode::Off), facts! {}, false),
    ] {
        assert_eq!(policy(limit).rules()[0].applies(&facts), expected, "{facts:?}");
    }
}

#[test]
fn only_the_fact_ip_is_keyed_by_ipv6_prefix() {
    let ip: IpAddr = "2001:db8:1:2:3:4:5:6".parse().expect("an address");
    let keyed = |policy: Policy, fact: &str, value: Value<'_>| {
        String::from_utf8(policy.keyed(fact, &value, &mut [0; 48]).to_owned()).expect("text")
    };
    assert_eq!(keyed(policy(plain("x")), "ip", Value::from(ip)), "2001:db8:1:2::");
    for (prefix, fact, value, expected) in [
        (64, "ip", Value::from(ip), "2001:db8:1:2::"),
        (56, "ip", Value::from(ip), "2001:db8:1::"),
        (128, "ip", Value::from(ip), "2001:db8:1:2:3:4:5:6"),
        (255, "ip", Value::from(ip), "2001:db8:1:2:3:4:5:6"),
        (0, "ip", Value::from(ip), "::"),
        (64, "peer", Value::from(ip), "2001:db8:1:2:3:4:5:6"),
        (0, "ip", Value::from(IpAddr::from([192, 0, 2, 7])), "192.0.2.7"),
    ] {
        let policy = policy(plain("x")).with_ipv6_prefix(prefix);
        assert_eq!(keyed(policy, fact, value), expected, "{fact} by /{prefix}");
    }
}

#[test]
fn rules_keep_their_order_and_are_found_by_name() {
    let policy = Policy::new(vec![plain("b"), plain("a").ttl(Duration::from_secs(1))]).expect("valid");
    assert_eq!(policy.rules().iter().map(Rule::name).collect::<Vec<_>>(), ["b", "a"]);
    assert_eq!(policy.find("a").map(|(index, rule)| (index, rule.name())), Some((1, "a")));
    assert!(policy.find("c").is_none());
    assert_eq!((policy.version(), policy.with_version(7).version()), (1, 7));
}

#[test]
fn the_period_of_a_concurrency_limit_is_its_ttl() {
    let policy = policy(Limit::new("x", Quota::slots(5)).ttl(Duration::from_secs(30)));
    let (quota, _) = policy.rules()[0].plain_quota().expect("limited");
    assert_eq!((quota.count(), quota.period()), (5, Span::from_secs(30)));
}

#[test]
fn a_policy_may_have_no_limits() {
    assert_eq!(Policy::new(Vec::new()).expect("valid").rules().len(), 0);
}

#[test]
fn a_limit_is_plain_if_one_fact_decides_everything() {
    let plain = || plain("x").by("user");
    for (limit, expected) in [
        (plain(), true),
        (plain().mode(Mode::Shadow), true),
        (plain().missing(Missing::Deny), true),
        (Limit::new("x", Quota::per_minute(9).burst(3)).by("user"), true),
        (plain().mode(Mode::Off), false),
        (plain().when("route", "/*"), false),
        (plain().unless("route", "/*"), false),
        (plain().allow("alice"), false),
        (plain().override_for("alice", Allowance::Unlimited), false),
        (plain().cost("tokens"), false),
        (plain().by("route"), false),
        (self::plain("x"), false),
        (self::plain("x").by("ip"), false),
        (tiered(), false),
        (Limit::new("x", Quota::slots(5)).by("user"), false),
    ] {
        assert_eq!(policy(limit.clone()).rules()[0].is_plain(), expected, "{limit:?}");
    }
}

#[test]
fn response_status_decides_the_refund() {
    let failures = StatusSet::of([401, 403]);
    for (limit, kept, given_back) in [
        (plain("a"), &[200, 401, 500][..], &[][..]),
        (plain("a").deduct_when(failures), &[401, 403], &[200, 304, 400, 500]),
        (plain("a").refund_when(StatusSet::of([304]).class(5)), &[200, 401], &[304, 500, 599]),
        (
            plain("a").deduct_when(StatusSet::default().class(4)).refund_when(failures),
            &[400, 429],
            &[200, 401],
        ),
    ] {
        let policy = policy(limit);
        let rule = &policy.rules()[0];
        assert_eq!(rule.awaits_response(), !given_back.is_empty());
        assert!(kept.iter().all(|status| !rule.gives_back(*status)), "{rule:?}");
        assert!(given_back.iter().all(|status| rule.gives_back(*status)), "{rule:?}");
    }
}

#[test]
fn refund_conditions_need_a_refundable_algorithm() {
    let leaky = plain("a").algorithm(Algorithm::LeakyBucket).deduct_when(StatusSet::of([401]));
    let slots = Limit::new("b", Quota::slots(5)).refund_when(StatusSet::of([401]));
    assert_eq!(
        messages(vec![leaky, slots]),
        [
            "limit `a`: `deduct_when` gives charges back, which leaky-bucket cannot (leave it out)",
            "limit `b`: `refund_when` gives charges back, which concurrency cannot (leave it out)",
        ]
    );
}

#[test]
fn a_limit_needs_an_open_fact_unless_it_cannot_apply() {
    let login = plain("a").by("email").when("route", "/login").unless("method", "GET").allow("root");
    for (limit, facts, expected) in [
        (login.clone(), facts! { "route" => "/login", "method" => "POST" }, true),
        (login.clone(), facts! { "route" => "/login" }, true),
        (login.clone(), facts! { "route" => "/login", "method" => "GET" }, false),
        (login.clone(), facts! { "route" => "/", "method" => "POST" }, false),
        (login.mode(Mode::Off), facts! { "route" => "/login" }, false),
        (plain("a").by("ip"), facts! { "ip" => "192.0.2.7" }, false),
        (plain("a").when("email", "*@example.com"), facts! {}, true),
        (plain("a").unless("email", "*@example.com"), facts! {}, true),
        (plain("a").cost("email"), facts! {}, true),
        (tiered().by("email"), facts! {}, true),
    ] {
        let policy = policy(limit);
        let needs = policy.rules()[0].needs(&facts, |fact| fact == "email");
        assert_eq!(needs, expected, "{:?} {facts:?}", policy.rules()[0]);
    }
    let tier = policy(Limit::tiered("a", "plan").tier("b", Quota::per_minute(1)).default_tier("b"));
    assert!(tier.rules()[0].needs(&facts! {}, |fact| fact == "plan"));
    let by = policy(plain("a").by("user").allow("root"));
    assert!(!by.rules()[0].needs(&facts! { "user" => "root" }, |fact| fact == "user"));
}

#[test]
fn a_hashed_value_is_compared_raw_and_keyed_by_hash() {
    let secret = |plain: &'static str| {
        Value::Hashed(Box::new(facts::Hashed {
            plain: Some(plain.into()),
            hash: format!("hash of {plain}").into(),
        }))
    };
    let policy =
        Arc::new(policy(plain("a").by("key").allow("root").override_for("acme", Quota::per_hour(7))));
    let toll = |plain| policy.toll(crate::Verb::Check, &facts! { "key" => secret(plain) }, 1).expect("valid");
    assert!(toll("root").is_empty());
    assert_eq!(toll("acme").get(0).quota.count(), 7);
    let toll = toll("other");
    assert_eq!(toll.get(0).key.texts().collect::<Vec<_>>(), [Some("hash of other")]);
    let hashed = facts::Hashed { plain: Some("the secret".into()), hash: "0123".into() };
    assert_eq!(format!("{:?}", Value::Hashed(Box::new(hashed))), "Hashed(0123)");
    assert!(facts! { "key" => secret("") }.get("key").is_none(), "empty is absent");
    assert!(Facts::new().insert("ip", secret("192.0.2.7")).is_err());
}

#[test]
fn more_than_256_limits_on_one_request_are_rejected() {
    let limit = |number| Limit::new(format!("limit-{number}"), Quota::per_minute(1));
    let by = |fact: &str| -> Vec<Limit> { (0..256).map(|number| limit(number).by(fact)).collect() };
    let with = |mut limits: Vec<Limit>, last: Limit| {
        limits.push(last);
        Policy::new(limits).map(|policy| policy.rules().len()).map_err(|error| error.0)
    };
    assert_eq!(with(by("user"), limit(256).by("ip")), Ok(257));
    assert_eq!(with(by("user"), limit(256).by("user").when("route", "/a")), Ok(257));
    assert_eq!(with(by("user"), limit(256).by("user").mode(Mode::Off)), Ok(257));
    for last in [limit(256).by("user"), limit(256)] {
        let [problem] = &with(by("user"), last).expect_err("they apply together")[..] else { panic!() };
        assert_eq!((problem.index, &problem.problem), (256, &LimitProblem::TooManyApply));
        assert!(problem.to_string().starts_with("limit `limit-256`: more than 256 limits"), "{problem}");
    }
}
