//! Overrides through the library: every way to decide applies them, they end, and they are cheap.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use tollkeeper::policy::{InvalidOverride, Override};
use tollkeeper::{
    Capacity, Clock, KeyOverride, Limit, Limiter, MAX_OVERRIDES, ManualClock, MemoryStore, OverrideError,
    Policy, Quota, Retry, Span, Time, Verdict, facts,
};

const START: u64 = 1_760_000_000;

fn limiter() -> (Limiter, ManualClock) {
    let clock = ManualClock::new(Time::from_micros(START * 1_000_000));
    let store = MemoryStore::new(Capacity::default(), Clock::manual(&clock));
    let limits = vec![
        Limit::new("per-user", Quota::per_hour(60).burst(2)).by("user"),
        Limit::new("per-tenant", Quota::per_hour(60).burst(9)).by("tenant"),
    ];
    (Limiter::embedded(Policy::new(limits).unwrap(), store), clock)
}

fn remaining(limiter: &Limiter, user: &str) -> u64 {
    let peek = limiter.peek(&facts! { "user" => user }).wait().unwrap();
    peek.limit("per-user").unwrap().outcome().remaining
}

#[test]
fn handles_and_layers_apply_overrides() {
    let (limiter, _) = limiter();
    let (handle, layers) =
        (limiter.handle("per-user").unwrap(), limiter.layers(["per-user", "per-tenant"]).unwrap());
    assert_eq!(handle.check("alice").unwrap().outcome().remaining, 1);
    limiter.override_for("per-user", "alice").quota(Quota::per_hour(60).burst(7)).set().unwrap();
    assert_eq!(handle.check("alice").unwrap().outcome().remaining, 5, "the count is kept");
    assert_eq!(remaining(&limiter, "alice"), 5);
    assert_eq!(handle.check("bob").unwrap().outcome().remaining, 1);
    let decided = layers.check(["alice", "acme"]).unwrap();
    assert_eq!(decided.limits.map(|limit| limit.outcome().remaining), [4, 8]);
    limiter.override_for("per-user", "alice").blocked().set().unwrap();
    assert!(!handle.check("alice").unwrap().allowed && !layers.check(["alice", "acme"]).unwrap().allowed);
    limiter.override_for("per-user", "alice").unlimited().set().unwrap();
    assert!((0..20).all(|_| handle.check("alice").unwrap().allowed));
    assert!(limiter.override_for("per-user", "alice").remove().unwrap());
    assert!(!limiter.override_for("per-user", "alice").remove().unwrap());
    // 1 + 1 + 1 of a burst of 2 were charged before it was blocked.
    assert!(!handle.check("alice").unwrap().allowed);
}

#[test]
fn blocked_key_is_refused_for_ever() {
    let (limiter, _) = limiter();
    limiter.override_for("per-user", "alice").blocked().set().unwrap();
    let decision = limiter.check(&facts! { "user" => "alice" }).wait().unwrap();
    assert_eq!(decision.verdict(), Verdict::Deny { retry: Retry::Never });
    assert_eq!(decision.reason().unwrap().to_string(), "`per-user` blocks this key by an override");
}

#[test]
fn override_ends_on_the_clock_of_the_store() {
    let (limiter, clock) = limiter();
    limiter.override_for("per-user", "alice").blocked().until(START + 60).set().unwrap();
    limiter.override_for("per-user", "bob").blocked().set().unwrap();
    clock.advance(Span::from_micros(59_999_999));
    assert!(!limiter.check(&facts! { "user" => "alice" }).wait().unwrap().allowed());
    clock.advance(Span::from_micros(1));
    let began = Instant::now();
    while limiter.overrides().len() > 1 {
        assert!(began.elapsed() < Duration::from_secs(10), "the override of alice has not ended");
        std::thread::yield_now();
    }
    assert!(limiter.check(&facts! { "user" => "alice" }).wait().unwrap().allowed());
    assert!(!limiter.check(&facts! { "user" => "bob" }).wait().unwrap().allowed(), "this one does not end");
    let past = limiter.override_for("per-user", "alice").blocked().until(START + 60).set();
    assert_eq!(past.unwrap_err(), OverrideError::Ended { until: START + 60 });
}

#[test]
fn invalid_override_changes_nothing() {
    let (limiter, _) = limiter();
    let unknown = limiter.override_for("none", "alice").blocked().set().unwrap_err();
    assert_eq!(unknown, OverrideError::Invalid(InvalidOverride::UnknownLimit("none".to_owned())));
    assert!(limiter.override_for("per-user", "alice").quota(Quota::slots(5)).set().is_err());
    assert!(limiter.override_for("per-user", "").blocked().set().is_err());
    assert_eq!(
        limiter.override_for("per-user", "a").blocked().note("x".repeat(1_025)).set(),
        Err(OverrideError::LongNote)
    );
    assert_eq!((limiter.overrides(), limiter.policy().has_overrides()), (vec![], false));
}

#[test]
fn replaced_policy_keeps_overrides() {
    let (limiter, _) = limiter();
    limiter.override_for("per-user", "alice").quota(Quota::per_hour(60).burst(7)).set().unwrap();
    limiter.replace(vec![Limit::new("per-user", Quota::per_hour(60).burst(3)).by("user")]).unwrap();
    assert_eq!((remaining(&limiter, "alice"), remaining(&limiter, "bob")), (7, 3));
    limiter.replace(vec![Limit::new("other", Quota::per_hour(60).burst(3)).by("user")]).unwrap();
    assert_eq!(limiter.overrides().len(), 1, "it is kept while its limit is not active");
    limiter.replace(vec![Limit::new("per-user", Quota::per_hour(60).burst(3)).by("user")]).unwrap();
    assert_eq!(remaining(&limiter, "alice"), 7);
}

/// Another node may have other limits while they change, so an override need not fit those of this node.
#[test]
fn override_that_does_not_fit_replaces_the_last_one() {
    let (limiter, _) = limiter();
    limiter.override_for("per-user", "alice").blocked().set().unwrap();
    let slots = Override { allowance: Quota::slots(5).into(), until: None, note: None };
    limiter.apply_overrides(vec![("per-user".to_owned(), "alice".to_owned(), Some(slots.clone()))]);
    assert_eq!(limiter.overrides()[0].granted, slots);
    assert_eq!(remaining(&limiter, "alice"), 2, "the quota of the limit");
}

#[test]
fn snapshot_holds_the_overrides() {
    let folder = std::env::temp_dir().join(format!("tollkeeper-overrides-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("state");
    let clock = ManualClock::new(Time::from_micros(START * 1_000_000));
    let policy =
        || Policy::new(vec![Limit::new("per-user", Quota::per_hour(60).burst(2)).by("user")]).unwrap();
    let store = MemoryStore::new(Capacity::default(), Clock::manual(&clock));
    let limiter = Limiter::embedded(policy(), store.clone());
    limiter.override_for("per-user", "alice").blocked().note("why").set().unwrap();
    limiter.override_for("per-user", "bob").blocked().until(START + 5).set().unwrap();
    store.save(&path).unwrap();
    clock.advance(Span::from_secs(6));
    let loaded = MemoryStore::load(Capacity::default(), Clock::manual(&clock), &path).unwrap();
    let restored = Limiter::embedded(policy(), loaded);
    let all = restored.overrides();
    assert_eq!(all.len(), 1, "that of bob has ended: {all:?}");
    assert_eq!((all[0].key.as_str(), all[0].granted.note.as_deref()), ("alice", Some("why")));
    assert!(!restored.check(&facts! { "user" => "alice" }).wait().unwrap().allowed());
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Run with `--nocapture` to see memory and time. The bounds are far from what is usual.
#[test]
fn a_hundred_thousand_overrides_are_cheap() {
    let (limiter, _) = limiter();
    let all: Vec<KeyOverride> = (0..MAX_OVERRIDES)
        .map(|number| KeyOverride {
            limit: "per-user".to_owned(),
            key: format!("user-{number}"),
            granted: Override {
                allowance: Quota::per_hour(60).burst(3 + number as u64 % 5).into(),
                until: None,
                note: None,
            },
        })
        .collect();
    let memory = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let line =
            status.lines().find(|line| line.starts_with("VmRSS:")).map(str::to_owned).unwrap_or_default();
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0)
    };
    let (before, began) = (memory(), Instant::now());
    limiter.replace_overrides(all);
    println!(
        "{MAX_OVERRIDES} overrides: set in {:?}, {} KiB",
        began.elapsed(),
        memory().saturating_sub(before)
    );
    let time = |user: &dyn Fn(usize) -> String| {
        let users: Vec<String> = (0..20_000).map(user).collect();
        let began = Instant::now();
        for user in &users {
            black_box(limiter.peek(&facts! { "user" => user }).wait().unwrap().allowed());
        }
        began.elapsed() / 20_000
    };
    let overridden = time(&|number| format!("user-{}", number * 5));
    let plain = time(&|number| format!("other-{number}"));
    println!("a peek takes {overridden:?} with an override, {plain:?} without");
    let began = Instant::now();
    limiter.override_for("per-user", "user-7").remove().unwrap();
    limiter.override_for("per-user", "user-7").blocked().set().unwrap();
    println!("one change takes {:?}", began.elapsed() / 2);
    assert_eq!(limiter.override_for("per-user", "one-more").blocked().set(), Err(OverrideError::Full));
    assert_eq!((remaining(&limiter, "user-99999"), remaining(&limiter, "other")), (3 + 99_999 % 5, 2));
}
