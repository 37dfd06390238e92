//! The Redis store on a real server: exact, atomic, one script call for a request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tollkeeper::config::StoreUrl;
use tollkeeper::store::redis::wire::Value;
use tollkeeper::store::redis::{RedisOptions, RedisStore};
use tollkeeper::store::{BreakerSettings, BreakerState, Resilient, ResilientSettings};
use tollkeeper::{
    Algorithm, Correction, Costs, InvalidRequest, Limit, Limiter, MemoryStore, Policy, Quota, Span, facts,
};
use tollkeeper_tests::redis::{PATIENCE, Server, limiter, limiter_and_store};

#[tokio::test]
async fn five_pass_and_the_sixth_gets_a_retry_time() {
    let server = Server::start();
    let limiter =
        limiter(&server.url(), vec![Limit::new("per-user", Quota::per_hour(5).burst(5)).by("user")]);
    let alice = facts! { "user" => "alice" };
    for remaining in (0..5).rev() {
        let decision = limiter.check(&alice).await.unwrap();
        assert_eq!((decision.allowed(), decision.degraded()), (true, None));
        assert_eq!(decision.limit("per-user").unwrap().outcome().remaining, remaining);
    }
    let refused = limiter.check(&alice).await.unwrap();
    assert!(!refused.allowed());
    assert!(refused.retry_after().unwrap().as_micros() <= 720_000_000);
    let charge = limiter.check(&facts! { "user" => "bob" }).await.unwrap().charge().unwrap();
    let text = limiter.seal_charge(&charge);
    let charge = limiter.open_charge(&text).await.unwrap().expect("a valid receipt");
    assert_eq!(limiter.refund(&charge).await, Correction::Done);
    assert_eq!(limiter.refund(&charge).await, Correction::Repeated);
}

#[tokio::test]
async fn every_algorithm_decides_refunds_and_forgets() {
    let server = Server::start();
    for algorithm in Algorithm::ALL {
        let name = algorithm.name();
        let limit = match algorithm {
            Algorithm::Concurrency => Limit::new(name, Quota::slots(3)),
            _ => Limit::new(name, Quota::per_hour(3)).algorithm(algorithm),
        };
        let limiter = limiter(&server.url(), vec![limit.by("user")]);
        let alice = facts! { "user" => "alice" };
        if algorithm == Algorithm::Concurrency {
            let held = [limiter.acquire(&alice).await.unwrap(), limiter.acquire(&alice).await.unwrap()];
            let third = limiter.acquire(&alice).await.unwrap();
            assert!(third.decision.allowed() && !limiter.acquire(&alice).await.unwrap().decision.allowed());
            let slot = third.slot.unwrap().keep();
            assert!(limiter.renew(&slot).await.unwrap() && limiter.release(&slot).await.unwrap());
            assert!(!limiter.release(&slot).await.unwrap(), "once");
            assert!(limiter.acquire(&alice).await.unwrap().decision.allowed());
            drop(held);
        } else {
            let first = limiter.check(&alice).await.unwrap();
            assert!(limiter.check(&alice).cost(2).await.unwrap().allowed(), "{name}");
            assert!(!limiter.check(&alice).await.unwrap().allowed(), "{name}");
            let correction = limiter.settle(&first.charge().unwrap(), Costs::Request(2)).await.unwrap();
            assert_eq!(correction, Correction::Done, "{name}");
        }
        assert!(limiter.forget(name, &alice).await.unwrap(), "{name}");
        assert!(!limiter.forget(name, &alice).await.unwrap(), "{name}: already forgotten");
    }
    let forever: Vec<_> = server.connect().keys().into_iter().filter(|(_, expires)| *expires < 0).collect();
    assert_eq!(forever.len(), 1, "only the secret stays: {forever:?}");
}

/// The widest possible toll (256 dues) is decided by one script call, also in a batch. A wider one is rejected
/// before it is sent.
#[tokio::test]
async fn widest_tolls_are_decided_and_wider_ones_rejected() {
    let server = Server::start();
    let limits = (0..128).map(|n| Limit::new(format!("limit-{n}"), Quota::per_hour(5).burst(5)).by("user"));
    let (limiter, store) = limiter_and_store(&server.url(), limits.collect());
    let mut decisions = JoinSet::new();
    for round in 0..48 {
        let limiter = limiter.clone();
        decisions.spawn(async move {
            let mut joint = limiter.multi_request();
            for user in ["alice", "bob"] {
                joint.add(&facts! { "user" => format!("{user}-{}", round % 8) }, 1).expect("256 dues");
            }
            joint.check().await
        });
    }
    let decisions = decisions.join_all().await;
    assert!(decisions.iter().all(|decision| decision.degraded().is_none()));
    assert_eq!(decisions.iter().filter(|decision| decision.allowed()).count(), 5 * 8);

    let mut wider = limiter.multi_request();
    let added = ["alice", "bob", "carol"].map(|user| wider.add(&facts! { "user" => user }, 1).map(drop));
    assert_eq!(added, [Ok(()), Ok(()), Err(InvalidRequest::TooManyDues)]);
    assert_eq!(store.breaker(), BreakerState::Closed);
}

/// The markers of corrected charges on a server: name, and expiry in Unix milliseconds.
fn markers(server: &Server) -> Vec<(String, i64)> {
    let keys = server.connect().keys().into_iter();
    let named = keys.map(|(name, expires)| (String::from_utf8(name).expect("text"), expires));
    named.filter(|(name, _)| name.contains("%m")).collect()
}

#[tokio::test]
async fn repeated_refund_applies_once_and_its_marker_expires() {
    let algorithms =
        [Algorithm::TokenBucket, Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog];
    for algorithm in algorithms {
        let name = algorithm.name();
        // A period of a day, so that the bucket drains next to nothing before the refund.
        let server = Server::start();
        let limiter = limiter(&server.url(), vec![Limit::new(name, Quota::per_day(10)).algorithm(algorithm)]);
        let left = async || limiter.usage(&facts! {}).await.unwrap().limit(name).unwrap().outcome().remaining;
        let charge = limiter.check(&facts! {}).cost(3).await.unwrap().charge().expect("allowed");
        assert!(limiter.check(&facts! {}).cost(5).await.unwrap().allowed(), "{name}");
        assert_eq!((left().await, markers(&server)), (2, vec![]), "{name}");
        assert_eq!(limiter.refund(&charge).await, Correction::Done, "{name}");
        // A bucket has drained a little of the charge, and rounds `remaining` down.
        let after = left().await;
        assert!((4..=5).contains(&after), "{name}: {after}");
        let [(marker, expires)] = &markers(&server)[..] else { panic!("{name}: one marker for one key") };
        // The marker lives as long as the charge can be refunded and up to a minute more, in whole seconds.
        let void = i64::try_from(charge.void_at().as_micros() / 1_000).expect("fits an i64");
        assert!(
            (void..=void + 61_000).contains(expires),
            "{name}: {marker} expires at {expires}, void at {void}"
        );
        for _ in 0..3 {
            assert_eq!(limiter.refund(&charge).await, Correction::Repeated, "{name}");
        }
        assert_eq!((left().await, markers(&server).len()), (after, 1), "{name}: refunded once");
    }
    // With a period of a second: the marker expires, and by then the charge is void.
    let server = Server::start();
    let limit = Limit::new("short", Quota::per_second(10)).algorithm(Algorithm::FixedWindow);
    let limiter = limiter(&server.url(), vec![limit]);
    // The window may end before the refund: then there is nothing to refund, and no marker.
    let charge = loop {
        let charge = limiter.check(&facts! {}).await.unwrap().charge().expect("allowed");
        match limiter.refund(&charge).await {
            Correction::Done => break charge,
            correction => assert_eq!(correction, Correction::Unknown),
        }
    };
    let began = Instant::now();
    while !markers(&server).is_empty() {
        assert!(began.elapsed() < PATIENCE, "the marker does not expire: {:?}", markers(&server));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(limiter.refund(&charge).await, Correction::Unknown, "the charge is void");
}

/// Most states take 12 bytes. Those of large counts take a few more, and then the script returns all states with
/// their lengths.
#[tokio::test]
async fn long_and_short_states_mix_in_one_request() {
    let server = Server::start();
    let limits = vec![
        Limit::new("short", Quota::per_day(10).burst(10)).by("user"),
        Limit::new("bucket", Quota::per_minute(30_000_000).burst(30_000_000)).by("user").cost("bytes"),
        Limit::new("window", Quota::per_day(20_000_000)).by("user").cost("bytes"),
        Limit::new("new", Quota::per_day(10).burst(10)).by("request"),
    ];
    let limiter = limiter(&server.url(), limits);
    for round in 1..=3 {
        let request = round.to_string();
        let facts = facts! { "user" => "alice", "request" => &request, "bytes" => 6_000_000 };
        let decision = limiter.check(&facts).await.unwrap();
        assert_eq!((decision.allowed(), decision.degraded()), (true, None));
        let left = |name: &str| decision.limit(name).unwrap().outcome().remaining;
        assert_eq!((left("short"), left("new")), (10 - round, 9), "round {round}");
        assert_eq!(left("window"), 20_000_000 - 6_000_000 * round, "round {round}");
        // It refills half a million a second.
        assert!(left("bucket") >= 30_000_000 - 6_000_000 * round, "round {round}: {}", left("bucket"));
        assert!(left("bucket") < 30_000_000, "round {round}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_tasks_are_admitted_exactly_and_batched() {
    let server = Server::start();
    let limits = vec![
        Limit::new("per-user", Quota::per_hour(500).burst(500)).by("user"),
        Limit::new("all", Quota::per_hour(2_000)).algorithm(Algorithm::FixedWindow),
        Limit::new("per-route", Quota::per_hour(700)).by("route"),
    ];
    let limiter = limiter(&server.url(), limits);
    limiter.peek(&facts! {}).await.unwrap();
    let calls = |server: &Server| {
        let Value::Bytes(stats) = server.connect().text("INFO commandstats") else { panic!("text") };
        let stats = String::from_utf8(stats).unwrap();
        let of = |name: &str| -> u64 {
            let line = stats.lines().find(|line| line.starts_with(&format!("cmdstat_{name}:")));
            line.map_or(0, |line| line.split(['=', ',']).nth(1).unwrap().parse().unwrap())
        };
        of("evalsha") + of("eval")
    };
    let before = calls(&server);
    let tasks: Vec<_> = (0..64)
        .map(|task| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                let mut admitted = 0;
                for round in 0..30 {
                    let user = format!("user-{}", (task + round) % 2);
                    let facts = facts! { "user" => &user, "route" => "/a" };
                    let decision = limiter.check(&facts).await.unwrap();
                    assert_eq!(decision.degraded(), None);
                    admitted += u32::from(decision.allowed());
                }
                admitted
            })
        })
        .collect();
    let mut admitted = 0;
    for task in tasks {
        admitted += task.await.unwrap();
    }
    assert_eq!(admitted, 700, "the smallest limit that all tasks share");
    let (asked, calls) = (64 * 30, calls(&server) - before);
    println!("{asked} checks of three limits in {calls} calls");
    assert!(calls < asked, "checks in flight share calls, and three limits take one call");
}

/// Lua's `unpack` returns some thousand values at most, so a batch must not have more keys than that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_stay_below_the_lua_value_limit() {
    let server = Server::start();
    let limit = |number| Limit::new(format!("limit-{number}"), Quota::per_day(3).burst(3)).by("user");
    let limiter = limiter(&server.url(), (0..200).map(limit).collect());
    let tasks: Vec<_> = (0..128)
        .map(|task| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                let user = format!("user-{task}");
                let facts = facts! { "user" => &user };
                for round in 0..4 {
                    let decision = limiter.check(&facts).await.unwrap();
                    assert_eq!((decision.allowed(), decision.degraded()), (round < 3, None));
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let Value::Bytes(errors) = server.connect().text("INFO errorstats") else { panic!("text") };
    let errors = String::from_utf8(errors).unwrap();
    assert!(!errors.contains("errorstat_ERR"), "{errors}");
}

/// A limiter whose breaker stays open for an hour, and its store.
fn with_long_cooldown(url: &str) -> (Limiter, Arc<Resilient<RedisStore>>) {
    let Ok(StoreUrl::Redis(url)) = url.parse() else { panic!("{url} is not a Redis URL") };
    let breaker = BreakerSettings { cooldown: Span::from_secs(3_600), ..BreakerSettings::default() };
    let settings = ResilientSettings { deadline: Duration::from_secs(20), breaker, nodes: 1 };
    let store = RedisStore::open(&url, RedisOptions::default());
    let store = Arc::new(Resilient::new(store, settings, MemoryStore::default()));
    let limit = Limit::new("per-user", Quota::per_hour(1_000_000)).by("user");
    (Limiter::with_store(Policy::new(vec![limit]).expect("valid"), Arc::clone(&store) as _), store)
}

#[tokio::test]
async fn restarted_server_is_used_before_the_cooldown_ends() {
    let mut server = Server::start();
    let (limiter, store) = with_long_cooldown(&server.url());
    let alice = facts! { "user" => "alice" };
    assert_eq!(limiter.check(&alice).await.unwrap().degraded(), None);
    server.kill();
    while store.breaker() != BreakerState::Open {
        limiter.check(&alice).await.unwrap();
    }
    server.restart();
    let back = Instant::now();
    while limiter.check(&alice).await.unwrap().degraded().is_some() {
        assert!(back.elapsed() < PATIENCE, "the store is used only after the breaker's cooldown of an hour");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    println!("used again after {:?}", back.elapsed());
}

#[tokio::test]
async fn revoked_permission_is_reported_until_restored() {
    let server = Server::start();
    let (limiter, store) = with_long_cooldown(&server.url());
    let alice = facts! { "user" => "alice" };
    assert_eq!(limiter.check(&alice).await.unwrap().degraded(), None);
    assert_eq!(store.remote().trouble(), None);
    server.connect().text("ACL SETUSER default -evalsha");
    for _ in 0..2 {
        // Once on each of the two connections.
        assert!(limiter.check(&alice).await.unwrap().degraded().is_some());
    }
    let why = store.remote().trouble().expect("a reported trouble");
    assert!(
        why.contains("no permissions") && why.contains("'evalsha'") && why.contains("docs/redis.md"),
        "{why}"
    );
    server.connect().text("ACL SETUSER default +evalsha");
    for _ in 0..2 {
        assert_eq!(limiter.check(&alice).await.unwrap().degraded(), None);
    }
    assert_eq!(store.remote().trouble(), None);
}
