//! The Redis store on a real cluster of three primaries: requests whose keys are in different slots stay all or
//! nothing.

use std::time::{Duration, Instant};

use tollkeeper::store::BreakerState;
use tollkeeper::store::redis::script;
use tollkeeper::store::redis::wire::Value;
use tollkeeper::{
    Algorithm, Approximation, Consistency, Correction, Limit, Missing, OnStoreFailure, Quota, facts,
};
use tollkeeper_tests::cluster::Cluster;
use tollkeeper_tests::redis::{PATIENCE, Server, leased_limiter, limiter, limiter_and_store};

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
    // A refused request charges some slots and rolls back; meanwhile others may be refused, but never too many pass.
    assert!((20..=30).contains(&admitted), "{admitted}");
    while limiter.check(&facts("/a")).await.unwrap().allowed() {
        admitted += 1;
    }
    assert_eq!(admitted, 30, "the smallest limit");
    // The rollback arrives one round trip after the decision.
    let started = Instant::now();
    let usage = loop {
        let usage = limiter.usage(&facts("/b")).await.unwrap();
        if usage.limit("log").unwrap().outcome().remaining == 20 || started.elapsed() > PATIENCE {
            break usage;
        }
    };
    let left = |name: &str| usage.limit(name).unwrap().outcome().remaining;
    // A bucket refunds what has not drained yet: all but the milliseconds in between.
    let bucket = left("per-user");
    assert!((69..=70).contains(&bucket), "{bucket}");
    assert_eq!((left("per-route"), left("log")), (30, 20), "only admitted requests were charged");

    let charge = limiter.check(&facts("/b")).await.unwrap().charge().unwrap();
    assert_eq!(limiter.refund(&charge).await, Correction::Done);
    assert_eq!(limiter.refund(&charge).await, Correction::Repeated);
    let usage = limiter.usage(&facts("/b")).await.unwrap();
    let left = |name: &str| usage.limit(name).unwrap().outcome().remaining;
    assert!(left("per-user") >= bucket - 1);
    assert_eq!((left("per-route"), left("log")), (30, 20), "all of it was refunded");
}

/// The markers of corrected charges on a server: name, and expiry in Unix milliseconds.
fn markers(server: &Server) -> Vec<(String, i64)> {
    let keys = server.connect().keys().into_iter();
    let named = keys.map(|(name, expires)| (String::from_utf8(name).expect("text"), expires));
    named.filter(|(name, _)| name.contains("%m")).collect()
}

/// Keys and arguments of the last correction that this server ran, from its slow log.
fn last_correction(server: &Server) -> Option<Vec<Vec<u8>>> {
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
    assert!(!limiter.check(&facts! {}).await.unwrap().allowed(), "the narrow limit refuses");
    let left = async || limiter.usage(&facts! {}).await.unwrap().limit("wide").unwrap().outcome().remaining;
    let began = Instant::now();
    let (server, marker, expires) = loop {
        let marked = |server| markers(server).pop().map(|(marker, expires)| (server, marker, expires));
        if let Some(found) = primaries.iter().find_map(marked) {
            break found;
        }
        assert!(began.elapsed() < PATIENCE, "the charge is not rolled back");
    };
    assert_eq!(left().await, 99, "the charge was rolled back");
    let Value::List(time) = server.connect().text("TIME") else { panic!("a time") };
    let Value::Bytes(seconds) = &time[0] else { panic!("text") };
    let seconds: i64 = String::from_utf8_lossy(seconds).parse().expect("a number");
    // The charge is void after five seconds, and the clock may be set back by as much.
    let longest = (seconds + 1 + 5 + 5 + 1) * 1_000;
    assert!(0 < expires && expires <= longest, "{marker} expires at {expires}, expected by {longest}");

    // Repeat the same call, as a resent command would.
    let words = last_correction(server).expect("a correction in the slow log");
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
    // The low two bits are the result (1: repeated, 0: too late), the rest is the nonce.
    assert!(matches!(again(), Ok(Value::Number(replied)) if replied % 4 < 2), "applied once");
    assert_eq!(left().await, 99, "nothing more was refunded");
    while !markers(server).is_empty() {
        assert!(began.elapsed() < PATIENCE, "the marker does not expire: {:?}", markers(server));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(matches!(again(), Ok(Value::Number(replied)) if replied % 4 == 0), "too late");
    assert_eq!(left().await, 99, "nothing more was refunded");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn migrating_slot_is_followed() {
    let cluster = Cluster::start();
    let limiter =
        limiter(&cluster.url(), vec![Limit::new("per-user", Quota::per_hour(1_000).burst(1_000)).by("user")]);
    let alice = facts! { "user" => "alice" };
    assert!(limiter.check(&alice).await.unwrap().allowed());
    // The primary that holds alice's key, and one that does not.
    let say = |server: &Server, words: &str| server.connect().text(words);
    let primaries = &cluster.servers[..3];
    let Value::Number(slot) = say(&primaries[0], "CLUSTER KEYSLOT tk:1:per-user:b1h:alice") else {
        panic!("a slot")
    };
    let holds =
        |server: &&Server| say(server, &format!("CLUSTER COUNTKEYSINSLOT {slot}")) != Value::Number(0);
    let from = primaries.iter().find(holds).expect("one primary holds the key");
    let to = primaries.iter().find(|server| !holds(server)).expect("another primary");
    let id = |server: &Server| {
        let Value::Bytes(id) = say(server, "CLUSTER MYID") else { panic!("text") };
        String::from_utf8(id).expect("text")
    };
    say(to, &format!("CLUSTER SETSLOT {slot} IMPORTING {}", id(from)));
    say(from, &format!("CLUSTER SETSLOT {slot} MIGRATING {}", id(to)));
    // While the slot migrates, the key is first still on the source, then on the target (ASK redirect).
    assert_eq!(limiter.check(&alice).await.unwrap().degraded(), None);
    say(from, &format!("MIGRATE 127.0.0.1 {} tk:1:per-user:b1h:alice 0 5000", to.port()));
    assert_eq!(limiter.check(&alice).await.unwrap().degraded(), None);
    let left = async || limiter.usage(&alice).await.unwrap().limit("per-user").unwrap().outcome().remaining;
    assert_eq!(left().await, 1_000 - 3, "each check was charged once");
    assert_eq!(limiter.forget("per-user", &alice).await, Ok(true), "plain commands are redirected, too");
    for server in [to, from] {
        say(server, &format!("CLUSTER SETSLOT {slot} NODE {}", id(to)));
    }
    for _ in 0..10 {
        assert_eq!(limiter.check(&alice).await.unwrap().degraded(), None);
    }
    assert_eq!(left().await, 1_000 - 10, "each check was charged once");
}

/// How many scripts all servers together ran.
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
        // `EVAL` is not counted: each connection runs one to test its permission.
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
        // A value too long for a key name is replaced by its digest, in names and in receipts.
        for user in ["alice", &long] {
            let mut facts = facts! { "user" => user };
            if tenant != "absent" {
                facts = facts.with("tenant", tenant);
            }
            // Not counted: it loads the scripts on the server that owns this slot.
            let charge = limiter.check(&facts).await.unwrap().charge().expect("allowed");
            assert_eq!(limiter.refund(&charge).await, Correction::Done, "{tenant:?}");
            let before = scripts(&cluster);
            for number in 0..21 {
                let decision = limiter.check(&facts).await.unwrap();
                assert_eq!((decision.allowed(), decision.degraded()), (number < 20, None), "{tenant:?}");
                if number == 0 {
                    let sealed = limiter.seal_charge(&decision.charge().expect("allowed"));
                    let charge = limiter.open_charge(&sealed).await.unwrap().expect("a valid receipt");
                    assert_eq!(limiter.refund(&charge).await, Correction::Done, "{tenant:?}");
                    assert_eq!(limiter.refund(&charge).await, Correction::Repeated, "{tenant:?}");
                    assert!(limiter.check(&facts).await.unwrap().allowed(), "the refund freed one unit");
                }
            }
            checks += 24;
            ran += scripts(&cluster) - before;
            let usage = limiter.usage(&facts).await.unwrap();
            let left = |name: &str| usage.limit(name).unwrap().outcome().remaining;
            assert_eq!([left("all"), left("per-user"), left("log")], [0, 980, 980], "{tenant:?}");

            let slot = limiter.acquire(&facts! { "tenant" => "other", "user" => user }).await.unwrap().slot;
            let slot = slot.expect("one of five slots").keep();
            let slot = limiter.open_slot(&limiter.seal_slot(&slot)).await.unwrap().expect("a valid receipt");
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
    // A limit outside the partition takes one more script.
    let unpartitioned = self::limiter(&cluster.url(), limits(false));
    let facts = facts! { "tenant" => "acme", "user" => "alice" };
    unpartitioned.peek(&facts).await.unwrap();
    let before = scripts(&cluster);
    unpartitioned.peek(&facts).await.unwrap();
    assert_eq!(scripts(&cluster) - before, 2, "one script for each slot");
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
    // Slots are assigned in order: the first third to the first primary, the last third to the third.
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
        assert_ne!(store.breaker(), BreakerState::Closed, "the breaker of the dead server is open");
        let started = Instant::now();
        let charged = if policy == OnStoreFailure::Deny { 1 } else { 21 };
        loop {
            let usage = limiter.usage(&facts).await.unwrap();
            let here = usage.limit("here").unwrap();
            let left = here.outcome().remaining;
            if left == 100 - charged {
                break;
            }
            assert!(
                started.elapsed() < PATIENCE,
                "{policy:?}: {left} remain, although {charged} were admitted"
            );
        }
    }
}

/// Two nodes lease keys in different slots, and another limit in another slot refuses some of the requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_across_slots_keep_their_contract() {
    const USERS: [&str; 3] = ["alice", "bob", "carol"];
    const HOT: u64 = 600;
    const ORDERS: u64 = 100;
    let cluster = Cluster::start();
    let window = |name, count| Limit::new(name, Quota::per_day(count)).algorithm(Algorithm::FixedWindow);
    let limits = || {
        vec![
            window("hot", HOT).by("user").consistency(Consistency::Leased),
            window("orders", ORDERS).by("tenant"),
        ]
    };
    let nodes = [leased_limiter(&cluster.url(), limits()), leased_limiter(&cluster.url(), limits())];
    let tasks: Vec<_> = nodes
        .iter()
        .flat_map(|node| USERS.map(|user| (node.clone(), user)))
        .map(|(node, user)| {
            tokio::spawn(async move {
                let (mut plain, mut orders, mut from_permits) = (0, 0, 0);
                for number in 0.. {
                    let is_order = number % 3 == 0;
                    let mut facts = facts! { "user" => user };
                    if is_order {
                        facts.insert("tenant", "acme").expect("valid");
                    }
                    let decision = node.check(&facts).await.unwrap();
                    assert_eq!(decision.degraded(), None);
                    let admitted = u64::from(decision.allowed());
                    *(if is_order { &mut orders } else { &mut plain }) += admitted;
                    let hot = decision.limit("hot").unwrap();
                    let permits = hot.approximation() == Some(Approximation::Permits);
                    from_permits += admitted * u64::from(permits);
                    // Without permits that are on their way, so the window is full.
                    if !hot.allowed() && !permits {
                        break;
                    }
                    tokio::task::yield_now().await;
                }
                (user, plain, orders, from_permits)
            })
        })
        .collect();
    let (mut orders, mut from_permits, mut admitted) = (0, 0, [0; USERS.len()]);
    for task in tasks {
        let (user, plain, ordered, permits) = task.await.unwrap();
        admitted[USERS.iter().position(|other| *other == user).unwrap()] += plain + ordered;
        (orders, from_permits) = (orders + ordered, from_permits + permits);
    }
    println!("{admitted:?} of {HOT} each, {orders} orders, {from_permits} from permits");
    assert!(admitted.iter().all(|admitted| *admitted <= HOT), "{admitted:?}");
    assert!(from_permits > 0, "no permits were used");
    assert!(orders <= ORDERS, "{orders}");
    // All or nothing: an order that is refused for its tenant takes no unit of its user, so few are missing: permits that
    // expired.
    assert!(admitted.iter().all(|admitted| *admitted >= HOT * 3 / 4), "{admitted:?}");
}
