//! A real cluster of three primaries: keys of one request in different slots, all or nothing.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tollkeeper::redis::{RedisOptions, RedisStore};
use tollkeeper::{
    Algorithm, Correction, Limit, Limiter, MemoryStore, Policy, Quota, Resilient, ResilientSettings, facts,
};

struct Cluster {
    servers: Vec<Child>,
    ports: Vec<u16>,
    folder: PathBuf,
}

impl Cluster {
    fn start() -> Cluster {
        // One after the other, so that no port is found free twice.
        static STARTING: Mutex<u32> = Mutex::new(0);
        let mut number = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        *number += 1;
        let folder = std::env::temp_dir().join(format!("tollkeeper-cluster-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        // A server of a cluster listens a second time, 10,000 higher.
        let free = || loop {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            if port < 55_000 && TcpListener::bind(("127.0.0.1", port + 10_000)).is_ok() {
                return port;
            }
        };
        let ports: Vec<u16> = (0..3).map(|_| free()).collect();
        let servers = ports
            .iter()
            .map(|port| {
                Command::new("redis-server")
                    .args(["--port", &port.to_string(), "--cluster-enabled", "yes", "--save", "", "--dir"])
                    .arg(&folder)
                    .args(["--cluster-config-file", &format!("nodes-{port}.conf")])
                    .stdout(Stdio::null())
                    .spawn()
                    .unwrap()
            })
            .collect();
        let cluster = Cluster { servers, ports, folder };
        for port in &cluster.ports {
            cluster.until(*port, &["ping"], "PONG");
        }
        let mut create = Command::new("redis-cli");
        create.args(["--cluster", "create"]);
        create.args(cluster.ports.iter().map(|port| format!("127.0.0.1:{port}")));
        assert!(create.arg("--cluster-yes").stdout(Stdio::null()).status().unwrap().success());
        for port in &cluster.ports {
            cluster.until(*port, &["cluster", "info"], "cluster_state:ok");
        }
        cluster
    }

    fn cli(&self, port: u16, words: &[&str]) -> String {
        let run = Command::new("redis-cli").args(["-p", &port.to_string()]).args(words).output().unwrap();
        String::from_utf8(run.stdout).unwrap()
    }

    fn until(&self, port: u16, words: &[&str], expected: &str) {
        let began = Instant::now();
        while !self.cli(port, words).contains(expected) {
            assert!(began.elapsed() < Duration::from_secs(30), "{port}: {words:?} never says {expected}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn limiter(&self, limits: Vec<Limit>) -> Limiter {
        let hosts: Vec<String> = self.ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        let url = format!("redis+cluster://{}", hosts.join(","));
        let tollkeeper::config::StoreUrl::Redis(url) = url.parse().unwrap() else { panic!("a Redis URL") };
        let store = RedisStore::open(&url, RedisOptions::default());
        let settings =
            ResilientSettings { deadline: Duration::from_secs(20), ..ResilientSettings::default() };
        let store = Resilient::new(store, settings, MemoryStore::default());
        Limiter::with_store(Policy::new(limits).unwrap(), Arc::new(store))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for server in &mut self.servers {
            let _ = server.kill();
            let _ = server.wait();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_in_different_slots_are_exact_and_a_refusal_leaves_nothing_charged() {
    let cluster = Cluster::start();
    let limiter = cluster.limiter(vec![
        Limit::new("per-user", Quota::per_hour(100).burst(100)).by("user"),
        Limit::new("per-route", Quota::per_hour(30)).by("route").algorithm(Algorithm::FixedWindow),
        Limit::new("log", Quota::per_hour(50)).by("ip").algorithm(Algorithm::SlidingLog),
    ]);
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
        cluster.limiter(vec![Limit::new("per-user", Quota::per_hour(1_000).burst(1_000)).by("user")]);
    let alice = facts! { "user" => "alice" };
    assert!(limiter.check(&alice).await.unwrap().allowed());
    // Where alice is, and where she is not.
    let slot = cluster.cli(cluster.ports[0], &["cluster", "keyslot", "tk:1:per-user:b1h:alice"]);
    let slot = slot.trim();
    let owner = |port: u16| cluster.cli(port, &["cluster", "countkeysinslot", slot]).trim() != "0";
    let from = cluster.ports.iter().copied().find(|port| owner(*port)).expect("somebody has her");
    let to = cluster.ports.iter().copied().find(|port| *port != from).unwrap();
    let id = |port: u16| cluster.cli(port, &["cluster", "myid"]).trim().to_owned();

    cluster.cli(to, &["cluster", "setslot", slot, "importing", &id(from)]);
    cluster.cli(from, &["cluster", "setslot", slot, "migrating", &id(to)]);
    // While it migrates: the key is still there, and then on the other side, which must be asked.
    assert_eq!(limiter.check(&alice).await.unwrap().degraded(), None);
    cluster.cli(from, &["migrate", "127.0.0.1", &to.to_string(), "tk:1:per-user:b1h:alice", "0", "5000"]);
    assert_eq!(limiter.check(&alice).await.unwrap().degraded(), None);
    for port in [to, from] {
        cluster.cli(port, &["cluster", "setslot", slot, "node", &id(to)]);
    }
    for _ in 0..10 {
        assert_eq!(limiter.check(&alice).await.unwrap().degraded(), None);
    }
    let left = limiter.usage(&alice).await.unwrap().limit("per-user").unwrap().outcome().remaining;
    assert_eq!(left, 1_000 - 13, "each check was charged once");
}
