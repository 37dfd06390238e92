use super::*;
use crate::facts;
use crate::limit::Limit;
use crate::quota::Algorithm;
use crate::quota::Quota;
use crate::toll::Verb;

const SECRET: Secret = Secret([7; 16]);

fn policy() -> Policy {
    Policy::new(vec![
        Limit::new("per-user", Quota::per_minute(100).burst(20)).by("user"),
        Limit::new("pair", Quota::per_minute(5)).by("user").by("ip"),
        Limit::new("exports", Quota::slots(5)).by("user"),
        Limit::new("per-ip", Quota::per_minute(10)).by("ip"),
        Limit::new("all", Quota::per_minute(1000)),
    ])
    .unwrap()
}

fn rate(count: u64, burst: Option<u64>) -> Override {
    let rate = Quota::every(count, Span::from_secs(60)).with_burst(burst);
    Override { allowance: rate.into(), until: None, note: None }
}

fn of(allowance: Allowance) -> Override {
    Override { allowance, until: None, note: None }
}

/// The quota of each limit that applies to a request, by name: `per-user 500 50`.
fn dues(policy: &Policy, facts: &Facts<'_>) -> String {
    let toll = Arc::new(policy.clone()).toll(Verb::Acquire, facts, 1).unwrap();
    let due = |due: crate::toll::Due<'_>| {
        format!("{} {} {}", due.rule.name(), due.quota.count(), due.quota.burst())
    };
    toll.dues().map(due).collect::<Vec<_>>().join(", ")
}

#[test]
fn override_replaces_the_quota_of_its_key_alone() {
    let policy = policy();
    let changed = policy.with_override("per-user", "alice", Some(&rate(500, Some(50))), SECRET).unwrap();
    let (alice, bob) = (facts! { "user" => "alice" }, facts! { "user" => "bob" });
    assert_eq!(dues(&changed, &alice), "per-user 500 50, exports 5 5, all 1000 1000");
    assert_eq!(dues(&changed, &bob), "per-user 100 20, exports 5 5, all 1000 1000");
    assert_eq!(dues(&policy, &alice), dues(&changed, &bob), "the policy it was made from is unchanged");

    let unlimited =
        changed.with_override("per-user", "alice", Some(&of(Allowance::Unlimited)), SECRET).unwrap();
    assert_eq!(dues(&unlimited, &alice), "exports 5 5, all 1000 1000");
    let blocked = changed.with_override("per-user", "alice", Some(&of(Allowance::Nothing)), SECRET).unwrap();
    assert!(dues(&blocked, &alice).starts_with("per-user 0 "), "{}", dues(&blocked, &alice));
    let slots = changed.with_override("exports", "alice", Some(&of(Quota::slots(9).into())), SECRET).unwrap();
    assert!(dues(&slots, &alice).contains("exports 9 9"), "{}", dues(&slots, &alice));

    let removed = slots.with_override("exports", "alice", None, SECRET).unwrap();
    assert!(removed.has_overrides() && dues(&removed, &alice).contains("exports 5 5"));
    let none = removed.with_override("per-user", "alice", None, SECRET).unwrap();
    assert!(!none.has_overrides(), "no override costs nothing");
    assert_eq!(dues(&none, &alice), dues(&policy, &alice));
}

#[test]
fn override_keeps_the_counts_of_its_key() {
    let changed = policy().with_override("per-user", "alice", Some(&rate(500, Some(50))), SECRET).unwrap();
    let alice = facts! { "user" => "alice" };
    let key = |policy: &Policy| policy.keys("per-user", &alice).unwrap();
    assert_eq!(key(&policy()), key(&changed), "the same period and algorithm are the same key");
    let hourly = Override {
        allowance: Quota::every(9, Span::from_secs(3_600)).burst(9).into(),
        until: None,
        note: None,
    };
    let hourly = policy().with_override("per-user", "alice", Some(&hourly), SECRET).unwrap();
    assert_eq!(key(&hourly).len(), 2, "another period is another key, which is forgotten as well");
}

#[test]
fn addresses_are_overridden_by_their_prefix() {
    let policy = policy();
    let key = policy.override_key("per-ip", "2001:db8::7").unwrap();
    assert_eq!(key, "2001:db8::");
    assert_eq!(policy.override_key("per-ip", "::ffff:192.0.2.7").unwrap(), "192.0.2.7");
    let changed = policy.with_override("per-ip", &key, Some(&rate(99, None)), SECRET).unwrap();
    assert!(dues(&changed, &facts! { "ip" => "2001:db8::1:2" }).starts_with("per-ip 99"));
}

#[test]
fn invalid_overrides_are_rejected() {
    let policy = policy();
    for (limit, value, expected) in [
        ("none", "a", "there is no limit `none`"),
        ("pair", "a", "limit `pair` is keyed by 2 facts, and an override names one value"),
        ("all", "a", "limit `all` has no `by`: it has one key for all requests, so change its rate"),
        ("per-user", "", "limit `per-user`: an empty value is no key"),
        ("per-ip", "nowhere", "fact `ip`"),
        ("per-user", &"x".repeat(1_025), "fact `user`"),
    ] {
        let error = policy.override_key(limit, value).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    for (limit, granted) in [
        ("per-user", of(Quota::slots(5).into())),
        ("exports", rate(5, None)),
        ("per-ip", rate(5, Some(9))),
        ("per-user", rate(u64::MAX, None)),
        ("per-user", rate(5, Some(0))),
    ] {
        let error = policy.with_override(limit, "192.0.2.7", Some(&granted), SECRET).unwrap_err();
        assert!(matches!(&error, InvalidOverride::Quota { .. }), "{error:?}");
        assert!(error.to_string().starts_with(&format!("limit `{limit}`: ")), "{error}");
    }
}

#[test]
fn share_applies_to_overrides_too() {
    let policy = policy().with_share(1, 4);
    let changed = policy.with_override("per-user", "alice", Some(&rate(500, Some(50))), SECRET).unwrap();
    assert!(dues(&changed, &facts! { "user" => "alice" }).starts_with("per-user 125 12"));
    let little = policy.with_override("per-user", "alice", Some(&rate(1, Some(1))), SECRET).unwrap();
    assert!(dues(&little, &facts! { "user" => "alice" }).starts_with("per-user 1 1"));
}

#[test]
fn explanation_names_the_override_and_its_end() {
    let granted = Override { until: Some(1_795_564_800), ..rate(500, Some(50)) };
    let changed = policy().with_override("per-user", "alice", Some(&granted), SECRET).unwrap();
    let explained = changed.explain(&facts! { "user" => "alice" }).unwrap();
    assert_eq!(
        explained[0].applicability.to_string(),
        "applies: the override for `alice` until 2026-11-25T00:00:00Z has 500 per minute with bursts of 50"
    );
    let blocked = changed.with_override("per-user", "alice", Some(&of(Allowance::Nothing)), SECRET).unwrap();
    let explained = blocked.explain(&facts! { "user" => "alice" }).unwrap();
    assert_eq!(explained[0].applicability.to_string(), "applies: the override for `alice` has nothing");
}

#[test]
fn many_overrides_are_found_and_removed() {
    let mut policy = policy();
    for number in 0..3_000u64 {
        let granted = rate(1 + number % 7, Some(1 + number % 7));
        policy = policy.with_override("per-user", &format!("user-{number}"), Some(&granted), SECRET).unwrap();
    }
    let grants = policy.overrides.0.as_ref().unwrap().limits[0].as_ref().unwrap().grants.len();
    assert_eq!(grants, 7, "equal quotas are stored once");
    for number in (0..3_000u64).step_by(41) {
        let user = format!("user-{number}");
        let shown = dues(&policy, &facts! { "user" => &user });
        assert!(shown.starts_with(&format!("per-user {}", 1 + number % 7)), "{user}: {shown}");
    }
    for number in 0..3_000u64 {
        policy = policy.with_override("per-user", &format!("user-{number}"), None, SECRET).unwrap();
    }
    assert!(!policy.has_overrides());
}

#[test]
fn times_are_shown_as_in_rfc_3339() {
    for (unix, expected) in [
        (0, "1970-01-01T00:00:00Z"),
        (951_782_399, "2000-02-28T23:59:59Z"),
        (951_782_400, "2000-02-29T00:00:00Z"),
        (4_102_444_800, "2100-01-01T00:00:00Z"),
        (4_107_542_400, "2100-03-01T00:00:00Z"),
        (1_795_564_805, "2026-11-25T00:00:05Z"),
    ] {
        assert_eq!(UtcTime(unix).to_string(), expected);
    }
}

#[test]
fn algorithm_of_the_limit_stays() {
    let log = Limit::new("log", Quota::per_minute(5)).algorithm(Algorithm::SlidingLog).by("user");
    let policy = Policy::new(vec![log]).unwrap();
    let changed = policy.with_override("log", "alice", Some(&rate(50, None)), SECRET).unwrap();
    let toll = Arc::new(changed).toll(Verb::Check, &facts! { "user" => "alice" }, 1).unwrap();
    assert_eq!(toll.get(0).quota.algorithm(), Algorithm::SlidingLog);
}

/// A lease is sized for the fastest drain that its bucket can have while it lives.
#[test]
fn largest_count_of_leases_includes_overrides() {
    let policy = policy();
    let largest = |policy: &Policy| policy.largest_count(&policy.rules()[0], Span::from_secs(60));
    assert_eq!(largest(&policy), 100);
    let lowered = policy.with_override("per-user", "bob", Some(&rate(5, None)), SECRET).unwrap();
    assert_eq!(largest(&lowered), 100);
    let raised = lowered.with_override("per-user", "alice", Some(&rate(500, None)), SECRET).unwrap();
    assert_eq!(largest(&raised), 500);
    let removed = raised.with_override("per-user", "alice", None, SECRET).unwrap();
    assert_eq!(largest(&removed), 500);
    let none_left = removed.with_override("per-user", "bob", None, SECRET).unwrap();
    assert_eq!(largest(&none_left), 100);
    assert_eq!(raised.largest_count(&raised.rules()[0], Span::from_secs(1)), 0);
}
