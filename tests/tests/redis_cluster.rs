//! A real cluster of three primaries: keys of one request in different slots, all or nothing.

use tollkeeper::redis::wire::Value;
use tollkeeper::{Algorithm, Correction, Limit, Quota, facts};
use tollkeeper_tests::cluster::Cluster;
use tollkeeper_tests::redis::{Server, limiter};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_in_different_slots_are_exact_and_a_refusal_leaves_nothing_charged() {
    let cluster = Cluster::start();
    let limiter = limiter(
        &cluster.url(),
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
        limiter(&cluster.url(), vec![Limit::new("per-user", Quota::per_hour(1_000).burst(1_000)).by("user")]);
    let alice = facts! { "user" => "alice" };
    assert!(limiter.check(&alice).await.unwrap().allowed());
    // Where alice is, and where she is not.
    let say = |server: &Server, words: &str| server.connect().text(words);
    let primaries = &cluster.servers[..3];
    let Value::Number(slot) = say(&primaries[0], "CLUSTER KEYSLOT tk:1:per-user:b1h:alice") else {
        panic!("a slot")
    };
    let holds =
        |server: &&Server| say(server, &format!("CLUSTER COUNTKEYSINSLOT {slot}")) != Value::Number(0);
    let from = primaries.iter().find(holds).expect("somebody has her");
    let to = primaries.iter().find(|server| !holds(server)).expect("somebody has not");
    let id = |server: &Server| {
        let Value::Bytes(id) = say(server, "CLUSTER MYID") else { panic!("text") };
        String::from_utf8(id).expect("text")
    };
    say(to, &format!("CLUSTER SETSLOT {slot} IMPORTING {}", id(from)));
    say(from, &format!("CLUSTER SETSLOT {slot} MIGRATING {}", id(to)));
    // While it migrates: the key is still there, and then on the other side, which must be asked.
    assert_eq!(limiter.check(&alice).await.unwrap().degraded(), None);
    say(from, &format!("MIGRATE 127.0.0.1 {} tk:1:per-user:b1h:alice 0 5000", to.port()));
    assert_eq!(limiter.check(&alice).await.unwrap().degraded(), None);
    for server in [to, from] {
        say(server, &format!("CLUSTER SETSLOT {slot} NODE {}", id(to)));
    }
    for _ in 0..10 {
        assert_eq!(limiter.check(&alice).await.unwrap().degraded(), None);
    }
    let left = limiter.usage(&alice).await.unwrap().limit("per-user").unwrap().outcome().remaining;
    assert_eq!(left, 1_000 - 13, "each check was charged once");
}
