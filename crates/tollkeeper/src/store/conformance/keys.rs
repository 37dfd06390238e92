//! Conformance cases of keys: different facts never share a key; equal ones always do.

use std::sync::Arc;

use crate::store::Toll;
use crate::{Algorithm, Decision, Facts, Limit, Quota, Value, Verb, facts};

use super::StoredKey;
use super::world::*;

pub(super) async fn values(world: World) {
    let limiter = world.limiter([Limit::new("limit", Quota::per_day(1)).by("user").by("path")]);
    let long = "x".repeat(1024);
    let almost = format!("{}y", "x".repeat(1023));
    let wide = "ü".repeat(512);
    let values = [
        "a", "b", "{", "}", "{a}", "}{", "a\n", "\n", "\0", "a\0", "\0a", ":", "a:b", "a:", ":a", "%", "%3a",
        "%-", "%=", "-", " ", "*", "?", "[a]", "\\", "\r\n", "\u{7f}", "é", "e\u{301}", "日本", "🦀", &long,
        &almost, &wide,
    ];
    // Every pair has its own key, however its parts could be joined.
    for (index, one) in values.iter().enumerate() {
        // Each with itself, with its neighbours, and some with all.
        let others = values.iter().enumerate().filter(|(other, _)| index < 8 || other.abs_diff(index) < 3);
        for (_, other) in others {
            let facts = facts! { "user" => *one, "path" => *other };
            assert!(charge(&limiter, &facts, 1).await.allowed(), "{one:?} {other:?}");
            assert!(!charge(&limiter, &facts, 1).await.allowed(), "{one:?} {other:?}");
        }
    }
    let shares = Limit::new("shares", Quota::per_day(1)).by("user").missing(crate::Missing::Share);
    let limiter = world.limiter([shares]);
    assert!(charge(&limiter, &Facts::new(), 1).await.allowed());
    for value in ["-", "%-", "none", "null", "\0"] {
        assert!(charge(&limiter, &user(value), 1).await.allowed(), "{value:?} is not a missing fact");
    }
}

pub(super) async fn long(world: World) {
    let name = "l".repeat(64);
    for algorithm in RATES {
        let limit = ["a", "b", "c", "d"]
            .into_iter()
            .fold(Limit::new(&*name, Quota::per_day(5)).algorithm(algorithm), |limit, fact| limit.by(fact));
        let limiter = world.limiter([limit]);
        let node = world.limiter([ten(algorithm)]);
        let filling = "z".repeat(1_023);
        let values: Vec<String> = (0..3).map(|number| format!("{filling}{number}")).collect();
        let of = |last: usize| {
            facts! { "a" => &*values[0], "b" => &*values[1], "c" => &*values[2], "d" => &*values[last] }
        };
        for last in 0..3 {
            let first = charge(&limiter, &of(last), 3).await;
            assert!(first.allowed(), "{algorithm}");
            assert!(charge(&limiter, &of(last), 2).await.allowed(), "{algorithm}");
            assert!(!charge(&limiter, &of(last), 1).await.allowed(), "{algorithm}");
            // A receipt holds such a key as a digest, and another node finds it nevertheless.
            let text = limiter.seal_charge(&first.charge().expect("admitted"));
            assert!(text.len() < 300, "{algorithm}: {} characters", text.len());
            usage(&node, &user("somebody")).await;
            let opened =
                node.open_charge(&text).await.expect("it answers").expect("a node of the same store");
            assert_eq!(limiter.refund(&opened).await, crate::Correction::Done, "{algorithm}");
            let left = if algorithm == Algorithm::LeakyBucket { 0 } else { 3 };
            world.remains(&limiter, &name, &of(last), left).await;
            assert_eq!(limiter.forget(&name, &of(last)).await, Ok(true), "{algorithm}");
            world.remains(&limiter, &name, &of(last), 5).await;
        }
    }
    for StoredKey { name, .. } in world.keys() {
        assert!(name.len() < 350, "{name}");
    }
}

pub(super) async fn equal(world: World) {
    let limit = || Limit::new("limit", Quota::per_day(6)).by("user").by("route");
    let limiter = world.limiter([limit()]);
    // The order of facts, facts that no limit uses, and the notation of a number make no difference.
    for facts in [
        facts! { "user" => 7, "route" => "/" },
        facts! { "route" => "/", "user" => "7" },
        facts! { "user" => Value::Number(7), "plan" => "free", "route" => "/" },
        facts! { "user" => "other", "route" => "/" }.with("user", 7_u64),
    ] {
        assert!(charge(&limiter, &facts, 1).await.allowed());
    }
    let facts = facts! { "user" => "7", "route" => "/" };
    world.remains(&limiter, "limit", &facts, 2).await;
    let written_otherwise = Limit::new("limit", Quota::per_day(6)).by("route").by("user");
    let other = world.limiter([written_otherwise]);
    let swapped = facts! { "user" => "/", "route" => "7" };
    assert!(charge(&other, &swapped, 1).await.allowed(), "the limit says which value comes first");
    let by_ip = world.limiter([Limit::new("ip", Quota::per_day(3)).by("ip")]);
    for address in ["192.0.2.7", "::ffff:192.0.2.7", "::ffff:c000:207"] {
        assert!(charge(&by_ip, &facts! { "ip" => address }, 1).await.allowed(), "{address}");
    }
    assert!(!charge(&by_ip, &facts! { "ip" => "192.0.2.7" }, 1).await.allowed());
}

pub(super) async fn merged(world: World) {
    let limits = || {
        let route = Limit::new("route", Quota::per_day(10)).by("route").algorithm(Algorithm::SlidingLog);
        [ten(Algorithm::FixedWindow), ten(Algorithm::TokenBucket), route]
    };
    let limiter = world.limiter(limits());
    let (policy, store) = (Arc::new(world.policy(limits())), world.store());
    let (one, other) =
        (facts! { "user" => "alice", "route" => "/a" }, facts! { "user" => "alice", "route" => "/b" });
    let together = async |costs: [u64; 2]| {
        let mut toll = Toll::new(&policy, Verb::Check);
        toll.add(&one, costs[0]).expect("valid");
        toll.add(&other, costs[1]).expect("valid");
        assert_eq!(toll.len(), 4, "each key once");
        let ruling = store.decide(&toll).await;
        decided(Decision::new(toll, ruling))
    };
    assert!(together([2, 3]).await.allowed());
    for name in ["fixed-window", "token-bucket"] {
        world.remains(&limiter, name, &one, 7).await;
    }
    world.remains(&limiter, "route", &one, 8).await;
    world.remains(&limiter, "route", &other, 7).await;
    assert!(together([7, 1]).await.allowed(), "the larger of both, not their sum");
    let refused = together([1, 1]).await;
    assert!(!refused.allowed() && refused.charge().is_none());
    world.remains(&limiter, "route", &one, 1).await;
    world.remains(&limiter, "route", &other, 6).await;
}
