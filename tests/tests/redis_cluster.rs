//! A real cluster of three primaries: keys of one request in different slots, all or nothing.

use std::time::{Duration, Instant};

use tollkeeper::store::redis::script;
use tollkeeper::store::redis::wire::Value;
use tollkeeper::{Algorithm, BreakerState, Correction, Limit, Missing, OnStoreFailure, Quota, facts};
use tollkeeper_tests::cluster::Cluster;
use tollkeeper_tests::redis::{PATIENCE, Server, limiter, limiter_and_store};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_across_slots_are_exact_and_all_or_nothing() {
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
    // What was charged in vain is back one trip after the answer.
    let started = Instant::now();
    let usage = loop {
        let usage = limiter.usage(&facts("/b")).await.unwrap();
        if usage.limit("log").unwrap().outcome().remaining == 20 || started.elapsed() > PATIENCE {
            break usage;
        }
    };
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

/// The markers on a server, with when they go.
fn markers(server: &Server) -> Vec<(String, i64)> {
    let keys = server.connect().keys().into_iter();
    let named = keys.map(|(name, goes)| (String::from_utf8(name).expect("text"), goes));
    named.filter(|(name, _)| name.contains("%m")).collect()
}

/// What this server was asked to correct last, as it came: keys and arguments of the script.
fn corrected(server: &Server) -> Option<Vec<Vec<u8>>> {
    let Value::List(entries) = server.connect().text("SLOWLOG GET 1000") else { panic!("a list") };
    entries.into_iter().find_map(|entry| {
        let Value::List(entry) = entry else { panic!("an entry") };
        let Value::List(words) = &entry[3] else { panic!("words") };
        let bytes =
            |word: &Value| if let Value::Bytes(word) = word { word.clone() } else { panic!("a word") };
        let words: Vec<Vec<u8>> = words.iter().map(bytes).collect();
        let by_name = words[0] == b"EVALSHA" && words[1] == script::correct().sha().as_bytes();
        by_name.then(|| words[2..].to_vec())
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollback_applies_once_and_its_marker_expires() {
    let cluster = Cluster::start();
    let primaries = &cluster.servers[..3];
    let limits = [("wide", 100), ("narrow", 1)];
    let limit = |(name, count)| Limit::new(name, Quota::per_day(count)).algorithm(Algorithm::FixedWindow);
    let limiter = limiter(&cluster.url(), limits.map(limit).into());
    for server in primaries {
        server.connect().text("CONFIG SET slowlog-log-slower-than 0");
    }
    assert!(limiter.check(&facts! {}).await.unwrap().allowed());
    assert!(!limiter.check(&facts! {}).await.unwrap().allowed(), "the narrow one refuses");
    let left = async || limiter.usage(&facts! {}).await.unwrap().limit("wide").unwrap().outcome().remaining;
    let began = Instant::now();
    let (server, marker, goes) = loop {
        let marked = |server| markers(server).pop().map(|(marker, goes)| (server, marker, goes));
        if let Some(found) = primaries.iter().find_map(marked) {
            break found;
        }
        assert!(began.elapsed() < PATIENCE, "what was charged in vain is not undone");
    };
    assert_eq!(left().await, 99, "what was charged in vain is back");
    let Value::List(time) = server.connect().text("TIME") else { panic!("a time") };
    let Value::Bytes(seconds) = &time[0] else { panic!("text") };
    let seconds: i64 = String::from_utf8_lossy(seconds).parse().expect("a number");
    // It is void after five seconds, and a clock may be set back by as much.
    let longest = (seconds + 1 + 5 + 5 + 1) * 1_000;
    assert!(0 < goes && goes <= longest, "{marker} goes at {goes}, and should by {longest}");

    // The same call again, as a server gets it that is asked twice.
    let words = corrected(server).expect("it was undone by a script");
    assert_eq!(words[2], marker.as_bytes());
    let again = || {
        let mut call = vec![&b"EVALSHA"[..], script::correct().sha().as_bytes()];
        call.extend(words.iter().map(Vec::as_slice));
        match server.connect().call(&call) {
            Err(error) if error.starts_with("NOSCRIPT") => {
                (call[0], call[1]) = (b"EVAL", script::correct().text().as_bytes());
                server.connect().call(&call)
            }
            answer => answer,
        }
    };
    // 1: it was done before; 0: it is too late for that. Before that stands the nonce.
    assert!(matches!(again(), Ok(Value::Number(said)) if said % 4 < 2), "it is done once");
    assert_eq!(left().await, 99, "nothing more is back");
    while !markers(server).is_empty() {
        assert!(began.elapsed() < PATIENCE, "it stays: {:?}", markers(server));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(matches!(again(), Ok(Value::Number(replied)) if replied % 4 == 0), "it is too late");
    assert_eq!(left().await, 99, "nothing more is back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn migrating_slot_is_followed() {
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

/// How often scripts were run, by all servers together.
fn scripts(cluster: &Cluster) -> u64 {
    let of = |server: &Server| {
        let Value::Bytes(stats) = server.connect().text("INFO commandstats") else { panic!("text") };
        let stats = String::from_utf8(stats).expect("text");
        let calls = |line: &str| -> u64 {
            let mut numbers = line.split([':', ',']).filter_map(|part| part.split_once('='));
            let mut number =
                |name| numbers.find(|(named, _)| *named == name).and_then(|(_, number)| number.parse().ok());
            let calls: u64 = number("calls").expect("calls=");
            calls - number("failed_calls").unwrap_or(0)
        };
        // Each connection runs one by its text, to see whether it may.
        stats.lines().filter(|line| line.starts_with("cmdstat_evalsha:")).map(calls).sum::<u64>()
    };
    cluster.servers.iter().map(of).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_of_one_partition_share_one_script_call() {
    let cluster = Cluster::start();
    let of_tenant = |name: &str, count: u64| {
        let limit = Limit::new(name, Quota::per_day(count)).by("tenant").partition("tenant");
        limit.missing(Missing::Share)
    };
    let limits = |partition: bool| {
        let limits = [
            of_tenant("all", 20).algorithm(Algorithm::FixedWindow),
            of_tenant("per-user", 1_000).by("user"),
            of_tenant("log", 1_000).by("user").algorithm(Algorithm::SlidingLog),
        ];
        let slots = Limit::new("slots", Quota::slots(5)).by("tenant").by("user");
        let slots = if partition { slots.partition("tenant") } else { slots };
        limits.into_iter().chain([slots]).collect::<Vec<_>>()
    };
    let limiter = limiter(&cluster.url(), limits(true));
    let long = "x".repeat(1_000);
    let (mut checks, mut ran) = (0, 0);
    for tenant in ["acme", "absent", "{", "}", "{}", "{a}b", "a\0b", "a\nb", "%_", "%-", &long] {
        // A value that is too long to be written out goes by its digest, in names and in receipts.
        for user in ["alice", &long] {
            let mut facts = facts! { "user" => user };
            if tenant != "absent" {
                facts = facts.with("tenant", tenant);
            }
            // Before it is counted, whoever has this slot learns the scripts.
            let charge = limiter.check(&facts).await.unwrap().charge().expect("it passes");
            assert_eq!(limiter.refund(&charge).await, Correction::Done, "{tenant:?}");
            let before = scripts(&cluster);
            for number in 0..21 {
                let decision = limiter.check(&facts).await.unwrap();
                assert_eq!((decision.allowed(), decision.degraded()), (number < 20, None), "{tenant:?}");
                if number == 0 {
                    let sealed = limiter.seal_charge(&decision.charge().expect("it passed"));
                    let charge = limiter.open_charge(&sealed).await.unwrap().expect("our own text");
                    assert_eq!(limiter.refund(&charge).await, Correction::Done, "{tenant:?}");
                    assert_eq!(limiter.refund(&charge).await, Correction::Repeated, "{tenant:?}");
                    assert!(limiter.check(&facts).await.unwrap().allowed(), "it was given back");
                }
            }
            checks += 24;
            ran += scripts(&cluster) - before;
            let usage = limiter.usage(&facts).await.unwrap();
            let left = |name: &str| usage.limit(name).unwrap().outcome().remaining;
            assert_eq!([left("all"), left("per-user"), left("log")], [0, 980, 980], "{tenant:?}");

            let slot = limiter.acquire(&facts! { "tenant" => "other", "user" => user }).await.unwrap().slot;
            let slot = slot.expect("there are five").keep();
            let slot = limiter.open_slot(&limiter.seal_slot(&slot)).await.unwrap().expect("our own text");
            assert!(
                limiter.renew(&slot).await.unwrap() && limiter.release(&slot).await.unwrap(),
                "{tenant:?}"
            );
            for limit in ["all", "per-user", "log"] {
                assert!(limiter.forget(limit, &facts).await.unwrap(), "{tenant:?}: {limit}");
            }
            assert!(limiter.forget("all", &facts! { "tenant" => "other" }).await.unwrap());
        }
    }
    println!("{checks} checks and refunds of three limits of one partition: {ran} scripts");
    assert_eq!(ran, checks);
    // Without the same partition, one limit more is one script more.
    let apart = self::limiter(&cluster.url(), limits(false));
    let facts = facts! { "tenant" => "acme", "user" => "alice" };
    apart.peek(&facts).await.unwrap();
    let before = scripts(&cluster);
    apart.peek(&facts).await.unwrap();
    assert_eq!(scripts(&cluster) - before, 2, "what is apart is asked apart");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_server_affects_only_its_own_limits() {
    let mut cluster = Cluster::start();
    for server in &cluster.servers {
        server.connect().text("CONFIG SET cluster-require-full-coverage no");
    }
    let limit = |name: &str, policy| {
        let limit = Limit::new(name, Quota::per_day(100)).by("user").on_store_failure(policy);
        limit.algorithm(Algorithm::FixedWindow)
    };
    let limits = |policy| vec![limit("here", OnStoreFailure::Deny), limit("there", policy)];
    let slot = |name: &str, user: usize| {
        let key = format!("CLUSTER KEYSLOT tk:1:{name}:f1d:{user}");
        let Value::Number(slot) = cluster.servers[0].connect().text(&key) else { panic!("a slot") };
        slot
    };
    // Slots are dealt out in order: the first third to the first, the last third to the third.
    let users: Vec<String> = (0..)
        .filter(|user| slot("here", *user) < 5_000 && slot("there", *user) > 12_000)
        .take(3)
        .map(|user| user.to_string())
        .collect();
    let policies = [OnStoreFailure::Allow, OnStoreFailure::Local, OnStoreFailure::Deny];
    let limiters = policies.map(|policy| limiter_and_store(&cluster.url(), limits(policy)));
    for ((limiter, _), user) in limiters.iter().zip(&users) {
        assert_eq!(limiter.check(&facts! { "user" => user }).await.unwrap().degraded(), None);
    }
    cluster.servers[3..].iter_mut().for_each(Server::kill);
    cluster.servers[2].kill();
    for ((policy, (limiter, store)), user) in policies.into_iter().zip(limiters).zip(&users) {
        let facts = facts! { "user" => user };
        for number in 0..20 {
            let decision = limiter.check(&facts).await.unwrap();
            assert_eq!(decision.allowed(), policy != OnStoreFailure::Deny, "{policy:?}: check {number}");
            let by = |name| decision.limit(name).unwrap().degraded();
            assert_eq!((by("here"), by("there")), (None, Some(policy)), "check {number}");
        }
        assert_ne!(store.breaker(), BreakerState::Closed, "the dead server is not asked any more");
        let started = Instant::now();
        let charged = if policy == OnStoreFailure::Deny { 1 } else { 21 };
        loop {
            let usage = limiter.usage(&facts).await.unwrap();
            let here = usage.limit("here").unwrap();
            let left = here.outcome().remaining;
            if left == 100 - charged {
                break;
            }
            assert!(started.elapsed() < PATIENCE, "{policy:?}: {left} are left, and {charged} were admitted");
        }
    }
}
