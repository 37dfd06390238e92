//! A real cluster of three primaries: keys of one request in different slots, all or nothing.

use std::sync::Arc;
use std::time::Duration;

use tollkeeper::redis::wire::Value;
use tollkeeper::redis::{RedisOptions, RedisStore};
use tollkeeper::{
    Algorithm, Correction, Limit, Limiter, MemoryStore, Policy, Quota, Resilient, ResilientSettings, facts,
};
use tollkeeper_tests::cluster::Cluster;
use tollkeeper_tests::redis::Client;

fn limiter(cluster: &Cluster, limits: Vec<Limit>) -> Limiter {
    let Ok(tollkeeper::config::StoreUrl::Redis(url)) = cluster.url().parse() else { panic!("a Redis URL") };
    let store = RedisStore::open(&url, RedisOptions::default());
    let settings = ResilientSettings { deadline: Duration::from_secs(20), ..ResilientSettings::default() };
    let store = Resilient::new(store, settings, MemoryStore::default());
    Limiter::with_store(Policy::new(limits).expect("valid"), Arc::new(store))
}

/// What a server of the cluster answers, as text.
fn said(port: u16, command: &str) -> String {
    match Client::to(port).expect("it listens").text(command) {
        Value::Bytes(text) => String::from_utf8(text).expect("UTF-8"),
        Value::Number(number) => number.to_string(),
        other => format!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_in_different_slots_are_exact_and_a_refusal_leaves_nothing_charged() {
    let cluster = Cluster::start();
    let limiter = limiter(
        &cluster,
        vec![
            Limit::new("per-user", Quota::per_hour(100).burst(100)).by("user"),
            Limit::new("per-route", Quota::per_hour(30)).by("route").algorithm(Algorithm::FixedWindow),
            Limit::new("log", Quota::per_hour(50)).by("ip").algorithm(Algorithm::SlidingLog),
        ],
    );
    let facts = |route: &'static str| facts! { "user" => "alice", "route" => route, "ip" => "192.0.2.7" };
    let tasks: Vec<_> = (0..16)
        .map(|_| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                let mut admitted = 0;
                for _ in 0..5 {
                    let decision = limiter.check(&facts("/a")).await.unwrap();
                    assert_eq!(decision.degraded(), None);
                    admitted += u64::from(decision.allowed());
                }
                admitted
            })
        })
        .collect();
    let mut admitted = 0;
    for task in tasks {
        admitted += task.await.unwrap();
    }
    // Others may be refused wrongly while a charge made in vain is on its way back, but never too many pass.
    assert!((20..=30).contains(&admitted), "{admitted}");
    while limiter.check(&facts("/a")).await.unwrap().allowed() {
        admitted += 1;
    }
    assert_eq!(admitted, 30, "the smallest limit");
    let usage = limiter.usage(&facts("/b")).await.unwrap();
    let left = |name: &str| usage.limit(name).unwrap().outcome().remaining;
    // A bucket gives back what has not drained since: all but the milliseconds in between.
    let bucket = left("per-user");
    assert!((69..=70).contains(&bucket), "{bucket}");
    assert_eq!((left("per-route"), left("log")), (30, 20), "only what passed was charged");

    let charge = limiter.check(&facts("/b")).await.unwrap().charge().unwrap();
    assert_eq!(limiter.refund(&charge).await, Correction::Done);
    assert_eq!(limiter.refund(&charge).await, Correction::Repeated);
    let usage = limiter.usage(&facts("/b")).await.unwrap();
    let left = |name: &str| usage.limit(name).unwrap().outcome().remaining;
    assert!(left("per-user") >= bucket - 1);
    assert_eq!((left("per-route"), left("log")), (30, 20), "all of it came back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_moves_is_followed() {
    let cluster = Cluster::start();
    let limiter =
        limiter(&cluster, vec![Limit::new("per-user", Quota::per_hour(1_000).burst(1_000)).by("user")]);
    let alice = facts! { "user" => "alice" };
    assert!(limiter.check(&alice).await.unwrap().allowed());
    // Where alice is, and where she is not.
    let ports: Vec<u16> = cluster.servers[..3].iter().map(|server| server.port()).collect();
    let slot = said(ports[0], "CLUSTER KEYSLOT tk:1:per-user:b1h:alice");
    let owner = |port: u16| said(port, &format!("CLUSTER COUNTKEYSINSLOT {slot}")) != "0";
    let from = ports.iter().copied().find(|port| owner(*port)).expect("somebody has her");
    let to = ports.iter().copied().find(|port| *port != from).expect("there are three");
    let id = |port: u16| said(port, "CLUSTER MYID");

    said(to, &format!("CLUSTER SETSLOT {slot} IMPORTING {}", id(from)));
    said(from, &format!("CLUSTER SETSLOT {slot} MIGRATING {}", id(to)));
    // While it migrates: the key is still there, and then on the other side, which must be asked.
    assert_eq!(limiter.check(&alice).await.unwrap().degraded(), None);
    said(from, &format!("MIGRATE 127.0.0.1 {to} tk:1:per-user:b1h:alice 0 5000"));
    assert_eq!(limiter.check(&alice).await.unwrap().degraded(), None);
    for port in [to, from] {
        said(port, &format!("CLUSTER SETSLOT {slot} NODE {}", id(to)));
    }
    for _ in 0..10 {
        assert_eq!(limiter.check(&alice).await.unwrap().degraded(), None);
    }
    let left = limiter.usage(&alice).await.unwrap().limit("per-user").unwrap().outcome().remaining;
    assert_eq!(left, 1_000 - 13, "each check was charged once");
}
