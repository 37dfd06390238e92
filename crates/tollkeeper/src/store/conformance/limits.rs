//! Conformance cases of limits: which apply, what they grant, and that counts survive changes of both.

use crate::{Algorithm, Allowance, Facts, InvalidRequest, Limit, Missing, Mode, Quota, facts};

use super::world::*;

pub(super) async fn missing(world: World) {
    for (missing, expected) in [
        (Missing::Skip, [true, true, true]),
        (Missing::Share, [true, true, false]),
        (Missing::Deny, [false, false, false]),
    ] {
        let name = format!("{missing:?}").to_lowercase();
        let limiter = world.limiter([Limit::new(name, Quota::per_day(2)).by("user").missing(missing)]);
        for expected in expected {
            assert_eq!(charge(&limiter, &Facts::new(), 1).await.allowed(), expected, "{missing:?}");
        }
        assert!(charge(&limiter, &user("alice"), 2).await.allowed(), "{missing:?}: alice has her own key");
        assert!(!charge(&limiter, &user("alice"), 1).await.allowed(), "{missing:?}");
    }
    // One of two facts is present: requests without the other share a key.
    let limit = Limit::new("two", Quota::per_day(2)).by("user").by("route").missing(Missing::Share);
    let limiter = world.limiter([limit]);
    assert!(charge(&limiter, &user("alice"), 2).await.allowed());
    assert!(!charge(&limiter, &user("alice"), 1).await.allowed());
    assert!(charge(&limiter, &user("bob"), 2).await.allowed());
    assert!(charge(&limiter, &facts! { "user" => "alice", "route" => "-" }, 2).await.allowed());
    assert!(charge(&limiter, &facts! { "user" => "alice", "route" => "%-" }, 2).await.allowed());
}

pub(super) async fn tiers(world: World) {
    for algorithm in RATES {
        let limit = Limit::tiered(algorithm.name(), "plan")
            .by("user")
            .algorithm(algorithm)
            .tier("free", Quota::per_day(5))
            .tier("pro", Quota::per_day(20))
            .tier("hourly", Quota::per_hour(5))
            .tier("all", Allowance::Unlimited)
            .tier("none", Allowance::Nothing)
            .default_tier("free");
        let limiter = world.limiter([limit]);
        let of = |plan| facts! { "user" => "alice", "plan" => plan };
        assert!(charge(&limiter, &of("free"), 5).await.allowed(), "{algorithm}");
        assert!(!charge(&limiter, &of("free"), 1).await.allowed(), "{algorithm}");
        // Another tier of the same period continues the count, and so does the first tier afterwards.
        assert!(charge(&limiter, &of("pro"), 10).await.allowed(), "{algorithm}");
        world.remains(&limiter, algorithm.name(), &of("pro"), 5).await;
        assert!(!charge(&limiter, &of("pro"), 6).await.allowed(), "{algorithm}");
        assert!(!charge(&limiter, &of("free"), 1).await.allowed(), "{algorithm}: five were too many already");
        assert!(!charge(&limiter, &user("alice"), 1).await.allowed(), "{algorithm}: the default is free");
        assert!(
            !charge(&limiter, &of("unheard of"), 1).await.allowed(),
            "{algorithm}: and so is the unknown"
        );
        assert!(charge(&limiter, &of("hourly"), 5).await.allowed(), "{algorithm}: another period");
        assert!(charge(&limiter, &of("all"), 100).await.allowed(), "{algorithm}");
        assert!(!charge(&limiter, &of("none"), 1).await.allowed(), "{algorithm}");
        world.remains(&limiter, algorithm.name(), &of("pro"), 5).await;
    }
}

pub(super) async fn overrides(world: World) {
    for algorithm in RATES {
        let limiter = world.limiter([ten(algorithm)]);
        assert!(charge(&limiter, &user("acme"), 8).await.allowed(), "{algorithm}");
        world.replace(&limiter, [ten(algorithm).override_for("acme", Quota::per_day(30)).allow("health")]);
        assert!(charge(&limiter, &user("acme"), 20).await.allowed(), "{algorithm}: 28 of 30");
        assert!(!charge(&limiter, &user("acme"), 3).await.allowed(), "{algorithm}");
        assert!(!charge(&limiter, &user("other"), 11).await.allowed(), "{algorithm}: ten for all others");
        assert!(charge(&limiter, &user("health"), 1_000).await.allowed(), "{algorithm}: it is not counted");
        world.replace(&limiter, [ten(algorithm)]);
        assert!(!charge(&limiter, &user("acme"), 1).await.allowed(), "{algorithm}: 28 of 10");
    }
}

pub(super) async fn replaced(world: World) {
    for algorithm in RATES {
        let of = |rate| Limit::new(algorithm.name(), rate).by("user").algorithm(algorithm);
        let limiter = world.limiter([of(Quota::per_day(10))]);
        let alice = user("alice");
        assert!(charge(&limiter, &alice, 6).await.allowed());
        world.replace(&limiter, [of(Quota::per_day(8)), Limit::new("new", Quota::per_day(100))]);
        world.remains(&limiter, algorithm.name(), &alice, 2).await;
        world.replace(&limiter, [of(Quota::per_day(4))]);
        world.remains(&limiter, algorithm.name(), &alice, 0).await;
        assert!(!charge(&limiter, &alice, 1).await.allowed(), "{algorithm}: six of four");
        world.replace(&limiter, [of(Quota::per_day(20))]);
        world.remains(&limiter, algorithm.name(), &alice, 14).await;
        world.replace(&limiter, [of(Quota::per_hour(5))]);
        assert!(charge(&limiter, &alice, 5).await.allowed(), "{algorithm}: another period begins afresh");
        world.replace(&limiter, [of(Quota::per_day(20))]);
        world.remains(&limiter, algorithm.name(), &alice, 14).await;
    }
    let other = |algorithm| Limit::new("limit", Quota::per_day(5)).by("user").algorithm(algorithm);
    for algorithm in RATES {
        let limiter = world.limiter([other(algorithm)]);
        assert!(charge(&limiter, &user("bob"), 5).await.allowed(), "{algorithm} begins afresh");
        assert!(!charge(&limiter, &user("bob"), 1).await.allowed());
    }
}

pub(super) async fn unlimited(world: World) {
    let limiter = world.limiter([
        ten(Algorithm::FixedWindow).when("route", "/login"),
        ten(Algorithm::SlidingLog).unless("route", "/*"),
        Limit::new("off", Quota::per_day(1)).mode(Mode::Off),
        Limit::new("free", Allowance::Unlimited),
    ]);
    let asked = facts! { "user" => "alice", "route" => "/" };
    for _ in 0..20 {
        let decision = charge(&limiter, &asked, 1).await;
        assert!(decision.allowed() && decision.binding().is_none() && decision.charge().is_none());
        assert_eq!(decision.limits().len(), 0);
    }
    let login = facts! { "user" => "alice", "route" => "/login" };
    assert!(charge(&limiter, &login, 10).await.allowed() && !charge(&limiter, &login, 1).await.allowed());
    let keys = world.keys();
    assert_eq!(keys.len(), usize::from(world.lists_keys()), "{keys:?}");
}

pub(super) async fn two_limiters(world: World) {
    for algorithm in RATES {
        let limiters = [world.limiter([ten(algorithm)]), world.limiter([ten(algorithm)])];
        let alice = user("alice");
        for number in 0..10 {
            let limiter = &limiters[number % 2];
            let decision = charge(limiter, &alice, 1).await;
            let remaining = decision.binding().expect("a limit").outcome().remaining;
            assert_eq!((decision.allowed(), remaining), (true, 9 - number as u64), "{algorithm}");
        }
        for limiter in &limiters {
            assert!(!charge(limiter, &alice, 1).await.allowed(), "{algorithm}");
        }
        assert!(limiters[0].forget(algorithm.name(), &alice).await.expect("a limit"));
        world.remains(&limiters[1], algorithm.name(), &alice, 10).await;
    }
}

pub(super) async fn forget(world: World) {
    let plan = Limit::tiered("plan", "plan")
        .by("user")
        .tier("free", Quota::per_hour(5))
        .tier("pro", Quota::per_day(5))
        .tier("none", Allowance::Nothing)
        .tier("all", Allowance::Unlimited)
        .override_for("carol", Quota::per(5, std::time::Duration::from_secs(7 * 86_400)))
        .default_tier("free");
    let limiter = world.limiter([plan].into_iter().chain(RATES.map(ten)));
    let of = |user, plan| facts! { "user" => user, "plan" => plan };
    for facts in [of("alice", "free"), of("alice", "pro"), of("bob", "pro"), of("carol", "pro")] {
        assert!(charge(&limiter, &facts, 5).await.allowed());
    }
    assert_eq!(limiter.forget("plan", &user("alice")).await, Ok(true));
    world.remains(&limiter, "plan", &of("alice", "free"), 5).await;
    world.remains(&limiter, "plan", &of("alice", "pro"), 5).await;
    world.remains(&limiter, "plan", &of("bob", "pro"), 0).await;
    assert_eq!(limiter.forget("plan", &user("alice")).await, Ok(false), "nothing is left to forget");
    assert_eq!(limiter.forget("plan", &user("carol")).await, Ok(true));
    world.remains(&limiter, "plan", &of("carol", "pro"), 5).await;
    for algorithm in RATES {
        world.remains(&limiter, algorithm.name(), &user("alice"), 0).await;
        assert_eq!(limiter.forget(algorithm.name(), &user("alice")).await, Ok(true), "{algorithm}");
        world.remains(&limiter, algorithm.name(), &user("alice"), 10).await;
        assert_eq!(limiter.forget(algorithm.name(), &user("nobody")).await, Ok(false), "{algorithm}");
    }
    let unknown = InvalidRequest::UnknownLimit("plans".to_owned());
    assert_eq!(limiter.forget("plans", &user("alice")).await, Err(unknown.into()));
}
