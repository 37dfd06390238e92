//! Conformance cases of decisions: what is admitted, what is refused, and that a refusal changes nothing.

use crate::{Algorithm, Allowance, Facts, InvalidRequest, Limit, Mode, Quota, Retry, Verdict, facts};

use super::StoredKey;
use super::world::*;

const NEVER: Verdict = Verdict::Deny { retry: Retry::Never };

pub(super) async fn exactly_the_limit(world: World) {
    for algorithm in RATES {
        let limiter = world.limiter([ten(algorithm)]);
        let alice = user("alice");
        for left in (0..10).rev() {
            let decision = charge(&limiter, &alice, 1).await;
            let outcome = decision.binding().expect("a limit").outcome();
            assert_eq!((decision.allowed(), outcome.remaining), (true, left), "{algorithm}");
            assert_eq!(outcome.limit, 10, "{algorithm}");
            assert_eq!(decision.charge().map(|charge| charge.items().len()), Some(1), "{algorithm}");
        }
        for _ in 0..5 {
            let refused = charge(&limiter, &alice, 1).await;
            let outcome = refused.binding().expect("a limit").outcome();
            assert_eq!((refused.allowed(), outcome.remaining), (false, 0), "{algorithm}");
            assert!(refused.charge().is_none(), "{algorithm}");
            let longest = if algorithm == Algorithm::SlidingWindow { 2 * 86_400 } else { 86_400 };
            let retry = refused.retry_after().expect("waiting helps");
            assert!(retry > secs(0) && retry <= secs(longest), "{algorithm}: {retry}");
            let reset = outcome.reset_after.expect("it is known");
            assert!(reset >= retry && reset <= secs(longest), "{algorithm}: {reset}");
        }
        assert!(charge(&limiter, &user("bob"), 10).await.allowed(), "{algorithm}: another key");
    }
}

pub(super) async fn a_refusal_charges_nothing(world: World) {
    for algorithm in RATES {
        let limiter = world.limiter([ten(algorithm)]);
        let alice = user("alice");
        assert!(charge(&limiter, &alice, 7).await.allowed());
        for _ in 0..5 {
            assert!(!charge(&limiter, &alice, 4).await.allowed(), "{algorithm}");
        }
        assert!(charge(&limiter, &alice, 3).await.allowed(), "{algorithm}: three are left, as before");
        assert!(!charge(&limiter, &alice, 1).await.allowed(), "{algorithm}");
    }
}

pub(super) async fn all_or_nothing(world: World) {
    for refusing in RATES {
        let others = RATES.into_iter().filter(|algorithm| *algorithm != refusing);
        // The refusing limit is first, in the middle, and last.
        for place in [0, 2, 4] {
            let name = format!("{refusing}-{place}");
            let alice = user(&name);
            let mut limits: Vec<Limit> = others.clone().map(ten).collect();
            limits.insert(place, Limit::new("strict", Quota::per_hour(3)).by("user").algorithm(refusing));
            let limiter = world.limiter(limits);
            let admitted = charge(&limiter, &alice, 3).await;
            assert_eq!(admitted.charge().expect("admitted").items().len(), 5);
            for _ in 0..5 {
                let refused = charge(&limiter, &alice, 3).await;
                assert_eq!(refused.binding().expect("it refuses").name(), "strict");
                assert!(refused.charge().is_none());
            }
            for other in others.clone() {
                world.remains(&limiter, other.name(), &alice, 7).await;
            }
        }
    }
}

pub(super) async fn no_key_of_a_refusal(world: World) {
    let all = Limit::new("all", Quota::per_day(1)).algorithm(Algorithm::SlidingLog);
    let limits = RATES.map(ten).into_iter().chain([all]);
    let limiter = world.limiter(limits);
    assert!(charge(&limiter, &user("first"), 1).await.allowed());
    let before = world.keys();
    for name in ["a", "b", "c"] {
        assert!(!charge(&limiter, &user(name), 1).await.allowed());
        for algorithm in RATES {
            world.remains(&limiter, algorithm.name(), &user(name), 10).await;
        }
        peek(&limiter, &user(name), 1).await;
    }
    let after = world.keys();
    let names = |keys: &[StoredKey]| -> std::collections::BTreeSet<String> {
        keys.iter().map(|key| key.name.clone()).collect()
    };
    assert_eq!(names(&before).len(), if world.lists_keys() { 6 } else { 0 });
    if !world.rolls_back() {
        assert_eq!(names(&before), names(&after), "a refused request left a key");
    }
}

pub(super) async fn binding(world: World) {
    let window = |name, rate| Limit::new(name, rate).by("user").algorithm(Algorithm::SlidingLog);
    let limiter = world.limiter([
        window("hour", Quota::per_hour(5)),
        window("day", Quota::per_day(6)),
        // A tie with `day`. Not on a cluster, whose servers charge at different times.
        window("same", Quota::per_day(if world.rolls_back() { 7 } else { 6 })),
        Limit::new("wide", Quota::per_hour(1_000)).by("user"),
    ]);
    let alice = user("alice");
    let bound =
        async |cost| charge(&limiter, &alice, cost).await.binding().expect("a limit").name().to_owned();
    assert_eq!(bound(1).await, "hour", "it has the smallest share left");
    assert_eq!(bound(4).await, "hour");
    assert_eq!(bound(1).await, "hour", "only it refuses");
    assert_eq!(bound(2).await, "day", "two refuse, and this for longer");
    assert_eq!(bound(6).await, "hour", "`Never` is longer than any wait");
    let decision = charge(&limiter, &alice, 1).await;
    let named: Vec<&str> = decision.limits().map(|answer| answer.name()).collect();
    assert_eq!(named, ["hour", "day", "same", "wide"], "in the order of the policy");
}

pub(super) async fn peek_and_usage(world: World) {
    let limits = || RATES.map(ten).into_iter().chain([Limit::new("slots", Quota::slots(2)).by("user")]);
    let limiter = world.limiter(limits());
    let alice = user("alice");
    for _ in 0..20 {
        let peek = peek(&limiter, &alice, 10).await;
        assert!(peek.allowed() && peek.charge().is_none() && peek.slot().is_none());
        let usage = usage(&limiter, &alice).await;
        assert!(usage.allowed() && usage.charge().is_none());
        assert_eq!(usage.limits().len(), 6);
        for algorithm in RATES {
            let answer = peek.limit(algorithm.name()).expect("it applies");
            assert_eq!(answer.outcome().remaining, 10, "{algorithm}: as it stands");
        }
    }
    assert_eq!(world.keys(), [], "nothing was written");
    assert!(charge(&limiter, &alice, 10).await.allowed());
    assert!(!peek(&limiter, &alice, 1).await.allowed() && !usage(&limiter, &alice).await.allowed());
    assert_eq!(peek(&limiter, &alice, 11).await.verdict(), NEVER);
}

pub(super) async fn shadow(world: World) {
    let shadow = Limit::new("shadow", Quota::per_day(3)).by("user").mode(Mode::Shadow);
    let limiter = world.limiter([shadow, ten(Algorithm::FixedWindow)]);
    let alice = user("alice");
    assert!(!charge(&limiter, &alice, 11).await.allowed());
    world.remains(&limiter, "shadow", &alice, 3).await;
    for number in 1..=10 {
        let decision = charge(&limiter, &alice, 1).await;
        assert!(decision.allowed());
        assert_eq!(decision.binding().expect("a limit").name(), "fixed-window");
        assert_eq!(decision.limit("shadow").expect("it applies").outcome().allowed, number <= 3);
        let items = decision.charge().expect("admitted").items().len();
        assert_eq!(
            items,
            if number <= 3 { 2 } else { 1 },
            "a shadow limit does not charge what it would refuse"
        );
    }
    let refused = charge(&limiter, &alice, 1).await;
    assert_eq!(refused.binding().expect("it refuses").name(), "fixed-window");
    let limiter = world.limiter([Limit::new("alone", Quota::per_day(1)).mode(Mode::Shadow)]);
    for _ in 0..3 {
        let decision = charge(&limiter, &Facts::new(), 1).await;
        assert!(decision.allowed() && decision.binding().is_none());
    }
}

pub(super) async fn costs(world: World) {
    for algorithm in RATES {
        let limiter = world.limiter([ten(algorithm)]);
        let alice = user("alice");
        for (cost, left) in [(3, 7), (3, 4), (4, 0)] {
            let decision = charge(&limiter, &alice, cost).await;
            assert_eq!(decision.binding().expect("a limit").outcome().remaining, left, "{algorithm}");
        }
        assert!(!charge(&limiter, &alice, 1).await.allowed(), "{algorithm}");
        for cost in [11, 1 << 31] {
            let refused = charge(&limiter, &user("bob"), cost).await;
            assert_eq!(refused.verdict(), NEVER, "{algorithm}");
            assert_eq!(refused.retry_after(), None, "{algorithm}");
        }
        assert!(charge(&limiter, &user("bob"), 10).await.allowed(), "{algorithm}");
        let bad = limiter.check(&alice).cost(0).await.expect_err("a cost of 0 is invalid");
        assert_eq!(bad, InvalidRequest::ZeroCost);
        let bad = limiter.check(&alice).cost((1 << 31) + 1).await.expect_err("too much");
        assert_eq!(bad, InvalidRequest::Cost((1 << 31) + 1));
    }
    let large = Limit::new("large", Quota::per_day(1 << 40)).by("user").algorithm(Algorithm::FixedWindow);
    let limiter = world.limiter([large]);
    let decision = charge(&limiter, &user("alice"), 1 << 31).await;
    assert_eq!(decision.binding().expect("a limit").outcome().remaining, (1 << 40) - (1 << 31));
}

pub(super) async fn cost_facts(world: World) {
    for algorithm in RATES {
        let tokens = Limit::new("tokens", Quota::per_day(100)).by("user").cost("tokens").algorithm(algorithm);
        let calls = Limit::new("calls", Quota::per_day(10)).by("user").algorithm(Algorithm::FixedWindow);
        let limiter = world.limiter([tokens, calls]);
        let name = algorithm.name();
        let asked = |tokens: u64| facts! { "user" => name, "tokens" => tokens };
        assert!(charge(&limiter, &asked(60), 2).await.allowed(), "{algorithm}");
        let refused = charge(&limiter, &asked(60), 2).await;
        assert_eq!(refused.binding().expect("it refuses").name(), "tokens", "{algorithm}");
        world.remains(&limiter, "tokens", &asked(1), 40).await;
        world.remains(&limiter, "calls", &asked(1), 8).await;
        // A cost of 0 passes, charges nothing and is listed, even where nothing is left.
        let free = charge(&limiter, &asked(0), 1).await;
        assert!(free.allowed(), "{algorithm}");
        assert_eq!(free.limits().len(), 2, "{algorithm}");
        assert_eq!(free.charge().expect("the call is charged").items().len(), 1, "{algorithm}");
        world.remains(&limiter, "tokens", &asked(1), 40).await;
        assert!(charge(&limiter, &asked(40), 1).await.allowed(), "{algorithm}");
        assert!(
            charge(&limiter, &asked(0), 1).await.allowed(),
            "{algorithm}: nothing is left, nothing asked"
        );
        world.remains(&limiter, "calls", &asked(1), 5).await;
        assert!(limiter.check(&user(name)).await.is_err(), "{algorithm}: the fact is absent");
    }
}

pub(super) async fn nothing_granted(world: World) {
    let closed = || Limit::new("closed", Allowance::Nothing).by("user");
    let limiter = world.limiter([closed()]);
    assert_eq!(charge(&limiter, &user("alice"), 1).await.verdict(), NEVER);
    let beside = closed().when("route", "/closed");
    let limiter = world.limiter(RATES.map(ten).into_iter().chain([beside]));
    let asked = facts! { "user" => "alice", "route" => "/closed" };
    for _ in 0..3 {
        let refused = charge(&limiter, &asked, 1).await;
        assert_eq!((refused.verdict(), refused.binding().map(|limit| limit.name())), (NEVER, Some("closed")));
    }
    for algorithm in RATES {
        world.remains(&limiter, algorithm.name(), &asked, 10).await;
    }
    assert!(charge(&limiter, &user("alice"), 10).await.allowed(), "the other limits allow it");
    let limiter = world.limiter([closed().mode(Mode::Shadow), ten(Algorithm::FixedWindow)]);
    assert!(charge(&limiter, &user("carol"), 1).await.allowed(), "a shadow limit refuses nothing");
    world.remains(&limiter, "fixed-window", &user("carol"), 9).await;
}

pub(super) async fn many_at_once(world: World) {
    for algorithm in RATES {
        let day = |name, count| Limit::new(name, Quota::per_day(count)).algorithm(algorithm);
        let limits = || [day("all", 50), day("per-user", 30).by("user"), day("per-task", 4).by("task")];
        let limiters = [world.limiter(limits()), world.limiter(limits())];
        let tasks: Vec<_> = (0..16)
            .map(|task| {
                let limiter = limiters[task % 2].clone();
                tokio::spawn(async move {
                    let (user, task) = (format!("{algorithm}-{}", task % 2), format!("{algorithm}-{task}"));
                    let facts = facts! { "user" => &user, "task" => &task };
                    let mut admitted = 0;
                    for _ in 0..8 {
                        admitted += u64::from(charge(&limiter, &facts, 1).await.allowed());
                    }
                    admitted
                })
            })
            .collect();
        let mut admitted = Vec::new();
        for task in tasks {
            admitted.push(task.await.expect("it ends"));
        }
        assert!(admitted.iter().all(|one| *one <= 4), "{algorithm}: {admitted:?}");
        // Until a refused request's charges are rolled back, others may be refused because of them: retry once.
        for again in 0.. {
            let total: u64 = admitted.iter().sum();
            assert!(total <= 50 && (total == 50 || world.rolls_back()), "{algorithm}: {admitted:?}");
            assert!(again < 10_000, "{algorithm}: {admitted:?}");
            if total == 50 {
                break;
            }
            let task = again % 16;
            let (user, name) = (format!("{algorithm}-{}", task % 2), format!("{algorithm}-{task}"));
            let facts = facts! { "user" => &user, "task" => &name };
            admitted[task] += u64::from(charge(&limiters[0], &facts, 1).await.allowed());
        }
        world.remains(&limiters[0], "all", &Facts::new(), 0).await;
        for user in 0..2 {
            let own: u64 = admitted.iter().skip(user).step_by(2).sum();
            let name = format!("{algorithm}-{user}");
            world.remains(&limiters[1], "per-user", &facts! { "user" => &name }, 30 - own).await;
        }
    }
}
