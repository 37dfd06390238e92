//! A Redis server that may evict keys may lose counts: the node detects and reports it.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tollkeeper::store::Resilient;
use tollkeeper::store::redis::RedisStore;
use tollkeeper::{Limit, Quota, facts};
use tollkeeper_tests::redis::{PATIENCE, Program, Server, limiter_and_store};
use tollkeeper_tests::served::Served;

const EVICTS: [&str; 2] = ["maxmemory 64mb", "maxmemory-policy allkeys-lru"];

async fn until_may_evict(store: &Resilient<RedisStore>, expected: Option<bool>) {
    let begun = Instant::now();
    while store.remote().may_evict() != expected {
        assert!(begun.elapsed() < PATIENCE, "{:?}", store.remote().may_evict());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn limits() -> Vec<Limit> {
    vec![Limit::new("per-user", Quota::per_minute(100)).by("user")]
}

#[tokio::test]
async fn eviction_policy_is_detected() {
    for (settings, expected) in [
        (&EVICTS[..], true),
        (&["maxmemory 64mb", "maxmemory-policy volatile-ttl"], true),
        (&["maxmemory 64mb", "maxmemory-policy noeviction"], false),
        // A later `CONFIG SET maxmemory` would start evictions without any reconnect.
        (&["maxmemory 0", "maxmemory-policy allkeys-lru"], true),
        (&["maxmemory 0", "maxmemory-policy noeviction"], false),
    ] {
        let server = Server::with(Program::Redis, settings);
        let (_limiter, store) = limiter_and_store(&server.url(), limits());
        until_may_evict(&store, Some(expected)).await;
    }
}

/// The server may have been restarted with other settings.
#[tokio::test]
async fn eviction_is_rechecked_after_every_reconnect() {
    let mut server = Server::start();
    let (_limiter, store) = limiter_and_store(&server.url(), limits());
    until_may_evict(&store, Some(false)).await;
    server.kill();
    server.restart_with(&EVICTS);
    server.connect();
    until_may_evict(&store, Some(true)).await;
}

#[tokio::test]
async fn server_that_hides_its_memory_policy_is_still_used() {
    let rights = "+eval +evalsha +time +get +set +mget +strlen +getrange +append +pexpireat +del +unlink +exists \
                  +select +role";
    let user = format!("user default on nopass ~tk:* -@all {rights}");
    let server = Server::with(Program::Redis, &[&user, EVICTS[0], EVICTS[1]]);
    let (limiter, store) = limiter_and_store(&server.url(), limits());
    let decision = limiter.check(&facts! { "user" => "alice" }).await.expect("valid facts");
    assert_eq!((decision.allowed(), decision.degraded()), (true, None));
    assert_eq!(store.remote().may_evict(), None);
}

#[test]
fn eviction_is_exported_as_a_gauge() {
    let server = Server::with(Program::Redis, &EVICTS);
    let node = Served::with(&["--store", &server.url()]);
    let shows = |metrics: &str| metrics.lines().any(|line| line == "tollkeeper_store_may_evict 1");
    let begun = Instant::now();
    while !shows(&metrics(&node)) {
        assert!(begun.elapsed() < PATIENCE, "{}", metrics(&node));
        std::thread::park_timeout(Duration::from_millis(5));
    }
    let embedded = Served::with(&[]);
    assert!(!metrics(&embedded).contains("may_evict"), "the memory store has no such metric");
}

fn metrics(node: &Served) -> String {
    let url = format!("http://{}/metrics", node.http);
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--noproxy", "*", &url]).stderr(Stdio::inherit());
    String::from_utf8(curl.output().expect("curl starts").stdout).expect("text")
}
