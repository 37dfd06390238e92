//! Fault injection: Redis is slow, down, silent, demoted or loses its data, under load from two processes.
//!
//! Each test prints its figures. [`run_fault`] holds the common assertions: every check gets a decision and none
//! hangs, admissions stay within the contracts, nothing is charged or refunded twice, and the store is used again
//! when it is back. `TOLLKEEPER_FAULT_SECONDS` makes each fault last longer (`make soak`).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tollkeeper::config::StoreUrl;
use tollkeeper::store::redis::wire::Value;
use tollkeeper::store::redis::{RedisOptions, RedisStore};
use tollkeeper::store::{
    BreakerSettings, FailureKind, Key, KeyCorrection, Remote, RemoteResult, Reply, Resilient,
    ResilientSettings, StoreFuture, Toll,
};
use tollkeeper::{
    Charge, Correction, Costs, Decision, Limit, Limiter, MemoryStore, Policy, Quota, Slot, Span, facts,
};
use tollkeeper_tests::cluster::Cluster;
use tollkeeper_tests::faulty_proxy::{Fault, Loss, Proxy};
use tollkeeper_tests::load::{self, BACK, COST, Figures, Fleet, History, NODES, ONCE, wait};
use tollkeeper_tests::redis::{Client, PATIENCE, Program, Server};
use tollkeeper_tests::sentinels::Sentinels;

/// What the product promises: a decision within `DEADLINE + MORE`, within `AT_ONCE` when the store is not called,
/// and use of the store within `SOON` after it is back. The tests allow `SLACK` times as long, and most give the
/// store a longer deadline than the default, because a busy test machine is not what they measure.
const DEADLINE: Duration = Duration::from_millis(25);
const MORE: Duration = Duration::from_millis(5);
const AT_ONCE: Duration = Duration::from_millis(1);
const SOON: Duration = Duration::from_secs(2);
const SLACK: u32 = 10;

/// A breaker that never opens, so that every check calls the store.
const NEVER_OPEN: BreakerSettings =
    BreakerSettings { failures: u32::MAX, late_basis_points: 10_000, cooldown: Span::from_secs(1) };

/// Runs one fault at a time: two at once would disturb each other's measurements.
static ALONE: Mutex<()> = Mutex::new(());

/// The store that a fault is injected into, and how much state the fault loses.
struct Scene<'a> {
    name: &'a str,
    url: String,
    deadline: Duration,
    /// How often the state is lost.
    losses: u64,
}

impl<'a> Scene<'a> {
    fn on(name: &'a str, url: String) -> Scene<'a> {
        Scene { name, url, deadline: DEADLINE, losses: 0 }
    }
}

/// Duration of a fault: 1.5 s, or `TOLLKEEPER_FAULT_SECONDS`.
fn lasts() -> Duration {
    let seconds = std::env::var("TOLLKEEPER_FAULT_SECONDS").ok();
    seconds.map_or(Duration::from_millis(1_500), |text| {
        Duration::from_secs(text.parse().expect("TOLLKEEPER_FAULT_SECONDS is a whole number of seconds"))
    })
}

fn by_socket(server: &Server) -> String {
    server.connect();
    format!("redis+unix://{}", server.socket().display())
}

fn through(proxy: &Proxy) -> String {
    format!("redis://{}/0", proxy.address())
}

/// A store made of one or more servers.
trait Servers {
    /// A connection to each current primary.
    fn primaries(&self) -> Vec<Client>;
}

impl Servers for Server {
    fn primaries(&self) -> Vec<Client> {
        vec![self.connect()]
    }
}

impl Servers for Cluster {
    fn primaries(&self) -> Vec<Client> {
        self.servers.iter().filter(|server| server.is_primary()).map(Server::connect).collect()
    }
}

impl Servers for Sentinels {
    fn primaries(&self) -> Vec<Client> {
        [&self.primary, &self.replica]
            .into_iter()
            .filter(|server| server.is_primary())
            .map(Server::connect)
            .collect()
    }
}

/// Runs two load processes while `fault` happens to the servers, and asserts what must hold in every fault.
fn run_fault<S: Servers>(
    scene: &Scene<'_>,
    servers: &mut S,
    fault: impl FnOnce(&mut S),
) -> (History, Figures) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Scene { name, url, deadline, losses } = scene;
    servers.primaries();
    let fleet = Fleet::start(env!("CARGO_BIN_EXE_load-node"), url, *deadline);
    fleet.answered(0, SLACK * SOON).expect("the store answers before the fault");
    wait(Duration::from_millis(500));
    let began = load::now();
    fault(servers);
    let ended = load::now();
    let back = fleet.answered(ended, SLACK * SOON);
    wait(Duration::from_millis(500));
    let history = fleet.finish();
    let figures = history.figures(began..ended);
    println!("{name}:\n{figures}");
    println!("  the store answers again after {back:?}");
    let worst = |who: &str| {
        let of_who = history.contracts(*losses).into_iter().filter(|needed| needed.who == who);
        let parts = of_who.map(|needed| format!("{} {}/{}", needed.route, needed.needs, needed.granted));
        parts.collect::<Vec<_>>().join(", ")
    };
    println!(
        "  needed by the store: {}; locally: {}; together: {}",
        worst("store"),
        worst("local"),
        worst("both")
    );
    let mut lines: HashMap<&str, u32> = HashMap::new();
    history
        .logs
        .iter()
        .for_each(|line| *lines.entry(line.split(" (").next().unwrap_or(line)).or_default() += 1);
    let mut lines: Vec<_> = lines.into_iter().collect();
    lines.sort_by_key(|(line, times)| (std::cmp::Reverse(*times), *line));
    lines.iter().take(8).for_each(|(line, times)| println!("  {times} times: {line}"));

    assert_eq!(history.errors, [""; 0], "{name}: every check gets a decision");
    assert_eq!(history.ended, NODES, "{name}: a load process died");
    assert!(
        figures.per_second >= 1_000,
        "{name}: {} checks a second are too little load",
        figures.per_second
    );
    let stalled = Duration::from_micros(figures.stalled);
    let within = |what: &str, took: u64, claim: Duration| {
        // A check that calls the store wakes up several times, and the machine may stall each time.
        let (took, longest) = (Duration::from_micros(took), claim * SLACK + 3 * stalled);
        assert!(took <= longest, "{name}: {what} took {took:?}, allowed are {longest:?}");
    };
    within("a check that called the store", figures.asked.max, *deadline + MORE);
    within("a check without the store", figures.unasked.max, DEADLINE + MORE);
    within("99 of 100 checks without the store", figures.unasked.p99, AT_ONCE);
    assert!(back.is_some(), "{name}: the store is back but not used");
    for needed in history.contracts(*losses) {
        assert!(needed.needs <= needed.granted.into(), "{name}: {needed:?}");
    }
    let mut primaries = servers.primaries();
    let held = primaries.iter_mut().flat_map(held).collect();
    let wrong = history.wrong_final_counts(&held, *losses > 0);
    assert!(wrong.is_empty(), "{name}: {} keys: {:#?}", wrong.len(), &wrong[..wrong.len().min(10)]);
    let forever: Vec<String> = primaries.iter_mut().flat_map(keys_without_expiry).collect();
    assert_eq!(forever, ["tk:1:secret"], "{name}: keys without expiry");
    assert!(figures.grown < 64 << 10, "{name}: memory grew by {} KiB", figures.grown);
    let seconds = u64::try_from(history.rows.len()).expect("few") / figures.per_second.max(1) + 1;
    // Three kinds of lines a second, and one line a second for each of two connections.
    let lines = u64::from(NODES) * 5 * (seconds + 2);
    assert!((figures.logs as u64) < lines, "{name}: {} lines in {seconds} s", figures.logs);
    (history, figures)
}

/// The counts of the keys of [`ONCE`], by user, decoded from the stored bytes: six of a window, then the count.
fn held(client: &mut Client) -> HashMap<String, u64> {
    let Value::List(names) = client.text("KEYS tk:1:once:*") else { panic!("a list of keys") };
    let names: Vec<Vec<u8>> = names
        .into_iter()
        .map(|name| if let Value::Bytes(name) = name { name } else { panic!("a key") })
        .collect();
    let mut held = HashMap::new();
    for names in names.chunks(500) {
        names.iter().for_each(|name| client.ask(&[b"GET", name]));
        client.send();
        for name in names {
            let Ok(Value::Bytes(state)) = client.answer() else { panic!("a state") };
            let [_, _, _, _, _, _, count @ ..] = &state[..] else { panic!("a window and a count") };
            let count = count.iter().fold(0, |count, byte| count << 8 | u64::from(*byte));
            let name = String::from_utf8(name.clone()).expect("text");
            held.insert(name.rsplit(':').next().expect("a last part").to_owned(), count);
        }
    }
    held
}

/// The names of all keys without an expiry.
fn keys_without_expiry(client: &mut Client) -> Vec<String> {
    let Value::List(names) = client.text("KEYS *") else { panic!("a list of keys") };
    let names: Vec<Vec<u8>> = names
        .into_iter()
        .map(|name| if let Value::Bytes(name) = name { name } else { panic!("a key") })
        .collect();
    let mut forever = Vec::new();
    for names in names.chunks(500) {
        names.iter().for_each(|name| client.ask(&[b"PTTL", name]));
        client.send();
        for name in names {
            if client.answer() == Ok(Value::Number(-1)) {
                forever.push(String::from_utf8(name.clone()).expect("text"));
            }
        }
    }
    forever
}

#[test]
fn baseline_without_a_fault() {
    let mut server = Server::start();
    let scene = Scene::on("no fault", by_socket(&server));
    run_fault(&scene, &mut server, |_| wait(lasts()));
}

#[test]
fn killed_server_without_persistence_costs_one_contract() {
    let mut server = Server::start();
    let scene = Scene { losses: 1, ..Scene::on("SIGKILL, no persistence", by_socket(&server)) };
    run_fault(&scene, &mut server, |server| {
        server.kill();
        wait(lasts());
        server.restart();
        server.connect();
    });
}

#[test]
fn killed_server_with_append_only_file_costs_nothing() {
    // Redis writes each command to the file before it replies, so the data survives the process, if not the machine.
    let mut server = Server::with(Program::Redis, &["appendonly yes", "appendfsync no"]);
    let scene = Scene::on("SIGKILL, append-only file", by_socket(&server));
    run_fault(&scene, &mut server, |server| {
        server.kill();
        wait(lasts());
        server.restart();
        // Redis replies with errors until it has loaded the file.
        let mut client = server.connect();
        while client.call(&[b"PING"]).is_err() {}
    });
}

#[test]
fn stopped_server_is_not_waited_for() {
    let mut server = Server::start();
    let scene = Scene::on("SIGSTOP for 5 s", by_socket(&server));
    let (_, figures) = run_fault(&scene, &mut server, |server| {
        server.signal("STOP");
        wait(lasts().max(Duration::from_secs(5)));
        server.signal("CONT");
    });
    assert!(figures.degraded_in_fault * 10 > figures.in_fault * 9, "the stopped server answered");
}

#[test]
fn late_replies_are_not_waited_for() {
    network("replies 50 ms late", |proxy| {
        proxy.fault(Fault::Delay(Duration::from_millis(50)));
        wait(lasts());
        proxy.fault(Fault::None);
    });
}

#[test]
fn network_drops_everything() {
    network("everything dropped", |proxy| {
        proxy.fault(Fault::Drop);
        wait(lasts());
        proxy.fault(Fault::None);
    });
}

#[test]
fn network_resets_connections() {
    network("connections reset", |proxy| {
        proxy.fault(Fault::Reset);
        wait(lasts());
        proxy.fault(Fault::None);
    });
}

#[test]
fn network_truncates_replies() {
    network("replies cut in half", |proxy| {
        proxy.fault(Fault::Cut);
        wait(lasts());
        proxy.fault(Fault::None);
    });
}

#[test]
fn network_stops_reading() {
    network("nothing read", |proxy| {
        proxy.fault(Fault::Stall);
        wait(lasts());
        proxy.fault(Fault::None);
    });
}

#[test]
fn network_loses_one_percent_of_replies_and_resets() {
    network("1 % of replies lost, connection reset", |proxy| {
        proxy.fault(Fault::Lose(100, Loss::Reset));
        wait(lasts());
        proxy.fault(Fault::None);
    });
}

#[test]
fn network_loses_one_percent_of_replies_and_goes_silent() {
    network("1 % of replies lost, connection silent", |proxy| {
        proxy.fault(Fault::Lose(100, Loss::Silence));
        wait(lasts());
        proxy.fault(Fault::None);
    });
}

/// Runs a network fault in front of a healthy server.
fn network(name: &str, fault: impl FnOnce(&Proxy)) {
    let mut server = Server::start();
    let proxy = Proxy::before(server.socket());
    run_fault(&Scene::on(name, through(&proxy)), &mut server, |_| fault(&proxy));
    println!("  {:?}", proxy.traffic());
}

#[test]
fn flushed_scripts_cause_no_failures() {
    let mut server = Server::start();
    // No check may fail here, so the deadline is generous: a slow machine must not cause a timeout.
    let patient = Duration::from_secs(5);
    let scene = Scene { deadline: patient, ..Scene::on("SCRIPT FLUSH", by_socket(&server)) };
    let (_, figures) = run_fault(&scene, &mut server, |server| {
        let mut client = server.connect();
        for _ in 0..10 {
            client.text("SCRIPT FLUSH");
            wait(lasts() / 10);
        }
    });
    assert_eq!(figures.degraded, 0);
}

#[test]
fn flushed_server_costs_one_contract() {
    let mut server = Server::start();
    let scene = Scene { losses: 1, ..Scene::on("FLUSHALL", by_socket(&server)) };
    run_fault(&scene, &mut server, |server| {
        server.connect().text("FLUSHALL");
    });
}

#[test]
fn sleeping_server_is_not_waited_for() {
    let mut server = Server::with(Program::Redis, &["enable-debug-command yes"]);
    let scene = Scene::on("DEBUG SLEEP 2", by_socket(&server));
    run_fault(&scene, &mut server, |server| {
        server.connect().text("DEBUG SLEEP 2");
    });
}

#[test]
fn server_out_of_memory_is_bypassed() {
    let mut server = Server::start();
    let scene = Scene::on("maxmemory reached", by_socket(&server));
    let (_, figures) = run_fault(&scene, &mut server, |server| {
        let mut client = server.connect();
        client.text("CONFIG SET maxmemory 1mb");
        wait(lasts());
        client.text("CONFIG SET maxmemory 0");
    });
    assert!(figures.degraded_in_fault > 0, "no check noticed the fault");
}

#[test]
fn demoted_primary_is_reported_and_used_after_promotion() {
    let mut server = Server::start();
    let scene = Scene::on("read-only replica", by_socket(&server));
    let (history, _) = run_fault(&scene, &mut server, |server| {
        let mut client = server.connect();
        // Nothing listens on port 1, so it never syncs and keeps its data.
        client.text("REPLICAOF 127.0.0.1 1");
        wait(lasts());
        client.text("REPLICAOF NO ONE");
    });
    assert!(history.logs.iter().any(|line| line.contains("the server is a replica")), "{:?}", history.logs);
}

#[test]
fn changed_password_is_reported_until_restored() {
    let mut server = Server::start();
    server.connect().text("ACL SETUSER node on >right ~* &* +@all");
    let proxy = Proxy::before(server.socket());
    let url = format!("redis://node:right@{}/0", proxy.address());
    let (history, _) = run_fault(&Scene::on("password changed", url), &mut server, |server| {
        let mut client = server.connect();
        client.text("ACL SETUSER node resetpass >wrong");
        client.text("CLIENT KILL USER node");
        wait(lasts());
        client.text("ACL SETUSER node >right");
    });
    let explains = |line: &String| line.contains("check user and password");
    assert!(history.logs.iter().any(explains), "{:?}", history.logs);
}

/// The cluster key of the first route's count.
const IN_USE: &str = "tk:1:deny-bucket:b1s";

/// The index of the server that holds [`IN_USE`].
fn in_use(cluster: &Cluster) -> usize {
    let has = |server: &Server| {
        server.is_primary() && server.connect().call(&[b"EXISTS", IN_USE.as_bytes()]) == Ok(Value::Number(1))
    };
    cluster.servers.iter().position(has).expect("one primary holds the key")
}

/// Waits until `done`, with a timeout.
fn until(what: &str, done: impl Fn() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < PATIENCE, "{what}");
        wait(Duration::from_millis(20));
    }
}

#[test]
fn cluster_replica_replaces_a_dead_primary() {
    let mut cluster = Cluster::start();
    let scene = Scene { losses: 1, ..Scene::on("failover of a cluster's primary", cluster.url()) };
    let (_, figures) = run_fault(&scene, &mut cluster, |cluster| {
        let dies = in_use(cluster);
        cluster.servers[dies].kill();
        until("no replica takes over", || cluster.primaries().len() == 3);
        until("the cluster has not recovered", || {
            cluster.primaries().into_iter().all(|mut primary| {
                let Value::Bytes(info) = primary.text("CLUSTER INFO") else { panic!("text") };
                String::from_utf8_lossy(&info).contains("cluster_state:ok")
            })
        });
    });
    assert!(figures.degraded_in_fault > 0, "no check noticed the fault");
    assert!(figures.degraded_in_fault < figures.in_fault, "the other servers are still used");
}

#[test]
fn resharding_a_busy_slot_causes_no_failures() {
    let mut cluster = Cluster::start();
    // No check may fail here, so the deadline is generous: a slow machine must not cause a timeout.
    let patient = Duration::from_secs(5);
    let scene = Scene { deadline: patient, ..Scene::on("resharding of the slot in use", cluster.url()) };
    let mut moves = 0;
    let (_, figures) = run_fault(&scene, &mut cluster, |cluster| {
        let say = |server: &Server, words: &str| server.connect().text(words);
        let id = |server: &Server| {
            let Value::Bytes(id) = say(server, "CLUSTER MYID") else { panic!("text") };
            String::from_utf8(id).expect("text")
        };
        let Value::Number(slot) = say(&cluster.servers[0], &format!("CLUSTER KEYSLOT {IN_USE}")) else {
            panic!("a slot")
        };
        let mut from = in_use(cluster);
        let began = Instant::now();
        while began.elapsed() < lasts() {
            let to = (from + 1) % 3;
            let [source, target] = [from, to].map(|place| &cluster.servers[place]);
            say(target, &format!("CLUSTER SETSLOT {slot} IMPORTING {}", id(source)));
            say(source, &format!("CLUSTER SETSLOT {slot} MIGRATING {}", id(target)));
            wait(Duration::from_millis(20));
            loop {
                let Value::List(keys) = say(source, &format!("CLUSTER GETKEYSINSLOT {slot} 100")) else {
                    panic!("a list of keys")
                };
                let keys: Vec<&[u8]> = keys
                    .iter()
                    .map(|key| if let Value::Bytes(key) = key { &key[..] } else { panic!("a key") })
                    .collect();
                if keys.is_empty() {
                    break;
                }
                let port = target.port().to_string();
                let words = [&b"MIGRATE"[..], b"127.0.0.1", port.as_bytes(), b"", b"0", b"5000", b"KEYS"];
                source.connect().call(&[&words[..], &keys].concat()).expect("it moves");
            }
            wait(Duration::from_millis(20));
            for server in [target, source] {
                say(server, &format!("CLUSTER SETSLOT {slot} NODE {}", id(target)));
            }
            wait(Duration::from_millis(20));
            from = to;
            moves += 1;
        }
    });
    println!("  the slot was moved {moves} times");
    assert!(moves > 3, "{moves}");
    assert_eq!(figures.degraded, 0);
}

#[test]
fn sentinel_replica_replaces_a_dead_primary() {
    let mut sentinels = Sentinels::start();
    let scene = Scene { losses: 1, ..Scene::on("failover through Sentinel", sentinels.url()) };
    let (history, figures) = run_fault(&scene, &mut sentinels, |sentinels| {
        until("not every node has subscribed to the sentinels", || {
            let Value::Bytes(clients) = sentinels.sentinel().text("CLIENT LIST") else { panic!("text") };
            let listens = |line: &&str| line.contains(" sub=1 ");
            String::from_utf8_lossy(&clients).lines().filter(listens).count() == NODES as usize
        });
        sentinels.primary.kill();
        until("no replica takes over", || sentinels.replica.is_primary());
    });
    assert!(figures.degraded_in_fault > 0, "no check noticed the fault");
    assert!(history.logs.iter().any(|line| line.contains("has moved")), "{:?}", history.logs);
}

/// A limiter in this process with the store at this URL.
fn limiter<R: Remote + 'static>(
    url: &str,
    connections: usize,
    settings: ResilientSettings,
    wrap: impl FnOnce(RedisStore) -> R,
) -> (Limiter, RedisStore) {
    let StoreUrl::Redis(url) = url.parse().expect("a URL") else { panic!("a Redis URL") };
    let options = RedisOptions { connections, ..RedisOptions::default() };
    let store = RedisStore::open(&url, options);
    let resilient = Resilient::new(wrap(store.clone()), settings, MemoryStore::default());
    (Limiter::with_store(load::policy(), Arc::new(resilient)), store)
}

async fn check(limiter: &Limiter, user: &str) -> Decision {
    let facts = facts! { "route" => ONCE, "user" => user };
    limiter.check(&facts).cost(COST).await.expect("every check gets a decision")
}

/// Starts a node whose store is unusable: it decides anyway, reports the reason (which contains each of `reasons`),
/// and uses the store once `repair` has run.
async fn starts_in_trouble(name: &str, url: &str, reasons: &[&str], repair: impl FnOnce()) {
    let (limiter, store) = limiter(url, 2, ResilientSettings::default(), |store| store);
    let mut longest = Duration::ZERO;
    let mut trouble = None;
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(500) || trouble.is_none() && begun.elapsed() < SLACK * SOON
    {
        let asked = Instant::now();
        assert!(
            check(&limiter, "early").await.degraded().is_some(),
            "{name}: the store cannot have answered"
        );
        longest = longest.max(asked.elapsed());
        trouble = trouble.or(store.trouble());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let trouble = trouble.unwrap_or_else(|| panic!("{name}: no trouble is reported"));
    println!("{name}: `{trouble}`; the longest check took {longest:?}");
    for reason in reasons {
        assert!(trouble.contains(reason), "{name}: `{trouble}` does not contain `{reason}`");
    }
    repair();
    let repaired = Instant::now();
    while check(&limiter, &format!("{:?}", repaired.elapsed())).await.degraded().is_some() {
        assert!(repaired.elapsed() < SLACK * SOON, "{name}: the store is not used: {:?}", store.trouble());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    println!("  the store is used {:?} after the repair", repaired.elapsed());
    assert!(longest < SLACK * 10 * (DEADLINE + MORE), "{name}: a check took {longest:?}");
}

#[tokio::test]
async fn node_starts_before_its_server() {
    let mut server = Server::start();
    let url = by_socket(&server);
    server.kill();
    starts_in_trouble("server down", &url, &["is it running"], || server.restart()).await;
}

#[tokio::test]
async fn node_starts_on_a_replica() {
    let server = Server::start();
    let url = by_socket(&server);
    server.connect().text("REPLICAOF 127.0.0.1 1");
    starts_in_trouble("replica", &url, &["the server is a replica"], || {
        server.connect().text("REPLICAOF NO ONE");
    })
    .await;
}

#[tokio::test]
async fn node_starts_with_the_wrong_password() {
    let server = Server::start();
    server.connect().text("ACL SETUSER node on >right ~* &* +@all");
    let proxy = Proxy::before(server.socket());
    let url = format!("redis://node:wrong@{}/0", proxy.address());
    starts_in_trouble("wrong password", &url, &["authentication failed", "check user and password"], || {
        server.connect().text("ACL SETUSER node >wrong");
    })
    .await;
}

#[tokio::test]
async fn node_starts_with_a_missing_database() {
    let mut server = Server::start();
    let proxy = Proxy::before({
        server.connect();
        server.socket()
    });
    let url = format!("redis://{}/99", proxy.address());
    starts_in_trouble("wrong database", &url, &["out of range", "database number"], || {
        server.kill();
        server.restart_with(&["databases 100"]);
    })
    .await;
}

#[tokio::test]
async fn node_starts_without_permission_to_run_scripts() {
    let server = Server::start();
    server.connect().text("ACL SETUSER node on >right ~* &* +@all -@scripting");
    let proxy = Proxy::before(server.socket());
    let url = format!("redis://node:right@{}/0", proxy.address());
    starts_in_trouble("no right to run scripts", &url, &["no permissions", "scripts", "grant"], || {
        server.connect().text("ACL SETUSER node +@scripting");
    })
    .await;
}

/// How often the server was sent `EVALSHA` and `EVAL`.
fn scripts(server: &Server) -> (u64, u64) {
    let Value::Bytes(stats) = server.connect().text("INFO commandstats") else { panic!("text") };
    let stats = String::from_utf8(stats).expect("text");
    let calls = |name: &str| -> u64 {
        let line = stats.lines().find(|line| line.starts_with(&format!("cmdstat_{name}:")));
        line.map_or(0, |line| {
            line.split(['=', ',']).nth(1).and_then(|calls| calls.parse().ok()).expect("calls=")
        })
    };
    (calls("evalsha"), calls("eval"))
}

#[tokio::test]
async fn flushed_script_costs_one_extra_round_trip() {
    let server = Server::start();
    let settings = ResilientSettings { deadline: SLACK * SOON, ..ResilientSettings::default() };
    let (limiter, _) = limiter(&by_socket(&server), 1, settings, |store| store);
    check(&limiter, "first").await;
    for round in 0..3 {
        server.connect().text("SCRIPT FLUSH");
        let before = scripts(&server);
        for (user, expected) in [("one", (1, 1)), ("two", (2, 1)), ("three", (3, 1))] {
            let decision = check(&limiter, &format!("{user}-{round}")).await;
            assert_eq!((decision.allowed(), decision.degraded()), (true, None));
            let now = scripts(&server);
            assert_eq!((now.0 - before.0, now.1 - before.1), expected, "{user}");
        }
    }
    assert!(held(&mut server.connect()).into_values().all(|held| held == COST), "each key was charged once");
}

/// What the server did for checks whose replies were lost.
struct Charged {
    /// Number of scripts that the server ran.
    ran: u64,
    /// The count of each key.
    held: HashMap<String, u64>,
}

impl Charged {
    /// Keys that were charged more than once.
    fn twice(&self) -> Vec<(&String, &u64)> {
        self.held.iter().filter(|(_, held)| **held != COST).collect()
    }
}

/// Makes checks one after the other, each with its own user, through a network that delivers every command and loses
/// every reply, until `checks` of them have reached the server.
async fn lose_every_reply<R: Remote + 'static>(
    loss: Loss,
    checks: u64,
    wrap: impl FnOnce(RedisStore) -> R,
) -> Charged {
    let server = Server::start();
    server.connect();
    let proxy = Proxy::before(server.socket());
    let settings = ResilientSettings { deadline: SLACK * SOON, breaker: NEVER_OPEN, nodes: NODES };
    let (limiter, _) = limiter(&through(&proxy), 2, settings, wrap);
    assert_eq!(check(&limiter, "first").await.degraded(), None);
    let before = scripts(&server);
    proxy.fault(Fault::Lose(1, loss));
    let carried = proxy.traffic().scripts;
    let mut user = 0;
    // Checks that find no connection are not sent at all.
    while proxy.traffic().scripts - carried < checks {
        assert!(check(&limiter, &format!("{user}")).await.degraded().is_some(), "no reply can have come");
        user += 1;
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    proxy.fault(Fault::None);
    // By the time the store is used again, commands still in flight have arrived.
    let begun = Instant::now();
    while check(&limiter, "first").await.degraded().is_some() {
        assert!(begun.elapsed() < SLACK * SOON, "the store is not used again");
    }
    let after = scripts(&server);
    let mut held = held(&mut server.connect());
    let first = held.remove("first").expect("the first user was charged");
    // Each connection tests its permission with one `EVAL`; checks use `EVALSHA`, because the server knows the script.
    let ran = after.0 - before.0 - (first / COST - 1);
    Charged { ran, held }
}

#[tokio::test]
async fn check_with_lost_reply_is_charged_once_and_not_resent() {
    for (loss, checks) in [(Loss::Reset, 50), (Loss::Silence, 3)] {
        let charged = lose_every_reply(loss, checks, |store| store).await;
        let (ran, keys) = (charged.ran, charged.held.len() as u64);
        println!("{loss:?}: {checks} checks sent, {ran} scripts ran, {keys} keys charged");
        assert_eq!(charged.twice(), [], "{loss:?}");
        assert_eq!((ran, keys), (checks, checks), "{loss:?}");
    }
}

#[tokio::test]
async fn mutant_that_resends_after_a_timeout_is_caught() {
    for (loss, checks) in [(Loss::Reset, 20), (Loss::Silence, 1)] {
        let charged = lose_every_reply(loss, checks, SendsAgain).await;
        println!("{loss:?}: {} scripts ran for {} keys", charged.ran, charged.held.len());
        assert_ne!(charged.twice(), [], "{loss:?}: the double charge was not detected");
    }
}

/// A deliberately wrong store: it resends a check whose reply did not arrive.
#[derive(Debug)]
struct SendsAgain(RedisStore);

impl Remote for SendsAgain {
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, RemoteResult<Reply>> {
        let (toll, first) = (toll.clone(), self.0.decide(toll));
        StoreFuture::Later(Box::pin(async move {
            match tokio::time::timeout(Duration::from_millis(200), first).await {
                Ok(Ok(ruling)) => Ok(ruling),
                _ => self.0.decide(&toll).await,
            }
        }))
    }

    fn correct<'a>(
        &'a self,
        charge: &'a Charge,
        corrections: &'a [KeyCorrection],
    ) -> StoreFuture<'a, RemoteResult<Correction>> {
        self.0.correct(charge, corrections)
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>> {
        self.0.release(slot)
    }

    fn renew<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>> {
        self.0.renew(slot)
    }

    fn forget<'a>(&'a self, key: Key<'a>) -> StoreFuture<'a, RemoteResult<bool>> {
        self.0.forget(key)
    }

    fn seal_charge(&self, charge: &Charge) -> Option<String> {
        self.0.seal_charge(charge)
    }

    fn open_charge<'a>(&'a self, text: &'a str) -> StoreFuture<'a, RemoteResult<Option<Charge>>> {
        self.0.open_charge(text)
    }

    fn seal_slot(&self, slot: &Slot) -> Option<String> {
        self.0.seal_slot(slot)
    }

    fn open_slot<'a>(&'a self, text: &'a str) -> StoreFuture<'a, RemoteResult<Option<Slot>>> {
        self.0.open_slot(text)
    }
}

#[tokio::test]
async fn refund_with_lost_reply_is_applied_once() {
    for loss in [Loss::Reset, Loss::Silence] {
        let server = Server::start();
        server.connect();
        let proxy = Proxy::before(server.socket());
        let settings = ResilientSettings { deadline: SLACK * SOON, ..ResilientSettings::default() };
        let (limiter, _) = limiter(&through(&proxy), 1, settings, |store| store);
        let charge = check(&limiter, "user").await.charge().expect("the check passed");
        // One refund first, so that the server knows the script and the next call runs it.
        let other = check(&limiter, "other").await.charge().expect("the check passed");
        assert_eq!(limiter.refund(&other).await, Correction::Done);

        proxy.fault(Fault::Lose(1, loss));
        let part = || limiter.refund_part(&charge, Costs::Request(BACK));
        assert_eq!(part().await, Ok(Correction::Failed), "{loss:?}: no reply can have come");
        let given_back = HashMap::from([("user".to_owned(), COST - BACK), ("other".to_owned(), 0)]);
        assert_eq!(held(&mut server.connect()), given_back, "{loss:?}: the refund was applied");
        proxy.fault(Fault::None);
        let begun = Instant::now();
        // A caller that repeats the refund anyway learns that it was applied before.
        while part().await != Ok(Correction::Repeated) {
            assert!(begun.elapsed() < SLACK * SOON, "the store is not used again");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(held(&mut server.connect()), given_back, "{loss:?}: the refund was applied once");
    }
}

#[tokio::test]
async fn full_queue_fails_checks_at_once() {
    const CHECKS: u64 = 20_000;
    let server = Server::start();
    server.connect();
    let proxy = Proxy::before(server.socket());
    let StoreUrl::Redis(url) = through(&proxy).parse().expect("a URL") else { panic!("a Redis URL") };
    let store = RedisStore::open(&url, RedisOptions { connections: 1, ..RedisOptions::default() });
    let settings = ResilientSettings { deadline: Duration::from_secs(2), breaker: NEVER_OPEN, nodes: NODES };
    let store = Arc::new(Resilient::new(store, settings, MemoryStore::default()));
    let limiter = Limiter::with_store(load::policy(), Arc::clone(&store) as _);
    assert_eq!(check(&limiter, "first").await.degraded(), None);

    proxy.fault(Fault::Stall);
    let begun = Instant::now();
    let checks: Vec<_> = (0..CHECKS)
        .map(|user| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                let decision = check(&limiter, &format!("{user}")).await;
                assert!(decision.degraded().is_some(), "the store cannot have answered");
            })
        })
        .collect();
    for check in checks {
        check.await.expect("every check gets a decision");
    }
    let (full, late) = (store.failures(FailureKind::Full), store.failures(FailureKind::Timeout));
    let lost = store.failures(FailureKind::Connection);
    println!("{CHECKS} at once: {full} found the queue full, {late} were late, {lost} lost their connection");
    assert_eq!(full + late + lost, CHECKS);
    assert!(full > CHECKS / 3, "the queue is not bounded: {full} checks found it full");
    assert!(begun.elapsed() < SLACK * SOON, "{:?}", begun.elapsed());

    proxy.fault(Fault::None);
    while check(&limiter, "last").await.degraded().is_some() {
        assert!(begun.elapsed() < 2 * SLACK * SOON, "the store is not used again");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Checks that timed out in the queue were never sent.
    let charged = held(&mut server.connect());
    println!("  {} keys were charged nevertheless", charged.len());
    assert!(charged.len() < 200 && charged.into_values().all(|held| held == COST));
}

/// Two calls are in flight, and a third check waits behind them until its caller gives up.
#[tokio::test]
async fn check_that_times_out_in_the_queue_is_not_sent() {
    let server = Server::start();
    server.connect();
    let proxy = Proxy::before(server.socket());
    let settings =
        ResilientSettings { deadline: Duration::from_millis(200), breaker: NEVER_OPEN, nodes: NODES };
    let (limiter, _) = limiter(&through(&proxy), 1, settings, |store| store);
    let begun = Instant::now();
    while check(&limiter, "first").await.degraded().is_some() {
        assert!(begun.elapsed() < SLACK * SOON, "the store is not used");
    }
    proxy.fault(Fault::Stall);
    let mut checks = Vec::new();
    for user in ["in flight", "in flight, too", "queued"] {
        let limiter = limiter.clone();
        checks.push(tokio::spawn(async move { check(&limiter, user).await.degraded() }));
        // This thread runs all tasks: by now the check was sent, or waits.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }
    for check in checks {
        assert!(check.await.expect("every check gets a decision").is_some(), "no reply can have come");
    }
    proxy.fault(Fault::None);
    let begun = Instant::now();
    while check(&limiter, "last").await.degraded().is_some() {
        assert!(begun.elapsed() < SLACK * SOON, "the store is not used again");
    }
    let charged = held(&mut server.connect());
    assert!(!charged.contains_key("queued"), "{charged:?}");
}

#[tokio::test]
async fn silent_connection_is_avoided_while_another_answers() {
    const CHECKS: u64 = 200;
    let server = Server::start();
    server.connect();
    let proxy = Proxy::before(server.socket());
    let settings = ResilientSettings { deadline: 4 * DEADLINE, ..ResilientSettings::default() };
    let (limiter, _) = limiter(&through(&proxy), 2, settings, |store| store);
    for user in ["first", "second"] {
        assert_eq!(check(&limiter, user).await.degraded(), None);
    }
    proxy.fault(Fault::Lose(1, Loss::Silence));
    assert!(check(&limiter, "lost").await.degraded().is_some(), "no reply can have come");
    proxy.fault(Fault::None);
    let begun = Instant::now();
    let mut degraded = 0;
    for user in 0..CHECKS {
        degraded += u64::from(check(&limiter, &format!("{user}")).await.degraded().is_some());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    println!("{degraded} of {CHECKS} checks in {:?} were decided without the store", begun.elapsed());
    assert!(degraded < 5, "{degraded} of {CHECKS} checks waited for the silent connection");
}

#[tokio::test]
async fn broken_connection_is_replaced_once() {
    let server = Server::start();
    server.connect();
    let proxy = Proxy::before(server.socket());
    let settings = ResilientSettings { deadline: SLACK * SOON, ..ResilientSettings::default() };
    let (limiter, _) = limiter(&through(&proxy), 1, settings, |store| store);
    check(&limiter, "first").await;
    let before = proxy.traffic().connections;
    // Several calls are in flight, and all of them notice that the connection broke.
    proxy.fault(Fault::Stall);
    let mut calls = Vec::new();
    for user in 0..8 {
        let limiter = limiter.clone();
        calls.push(tokio::spawn(async move { check(&limiter, &format!("{user}")).await.degraded() }));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    proxy.fault(Fault::Lose(1, Loss::Reset));
    for call in calls {
        call.await.unwrap();
    }
    proxy.fault(Fault::None);
    tokio::time::sleep(Duration::from_millis(300)).await;
    let made = proxy.traffic().connections - before;
    assert_eq!(made, 1, "connections made to replace the broken one");
}

/// The reply stream is out of sync: a reply is lost and the next ones take its place, or a reply arrives twice. An
/// exhausted user and new users make checks at the same time, and their replies look alike.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_check_gets_the_decision_of_another() {
    for fault in [Fault::Lose(5, Loss::Slip), Fault::Repeat(5)] {
        let server = Server::start();
        server.connect();
        let proxy = Proxy::before(server.socket());
        let settings = ResilientSettings {
            deadline: SLACK * DEADLINE,
            breaker: NEVER_OPEN,
            ..ResilientSettings::default()
        };
        let Ok(StoreUrl::Redis(url)) = through(&proxy).parse() else { panic!("a URL") };
        let store =
            Resilient::new(RedisStore::open(&url, RedisOptions::default()), settings, MemoryStore::default());
        let store = Arc::new(store);
        let once = Limit::new("once", Quota::per_hour(1).burst(1)).by("user");
        let limits = Policy::new(vec![once]).expect("valid limits");
        let limiter = Limiter::with_store(limits, Arc::clone(&store) as _);
        let ask = async |user: &str| {
            let decision = limiter.check(&facts! { "user" => user }).await.expect("valid facts");
            let decided = decision.degraded().is_none().then(|| decision.allowed());
            if decided.is_none() {
                // The connection is being replaced: leave some checks for the next one.
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            decided
        };
        assert_eq!(ask("exhausted").await, Some(true));
        // The store opens two connections, and the second may open late.
        let before = 2;

        proxy.fault(fault);
        let begun = Instant::now();
        let (mut refused, mut admitted, mut foreign) = (0, 0, 0);
        // Chance decides which replies are lost or arrive twice, and whether a check waits for another one then.
        for round in 0.. {
            tokio::join!(
                async {
                    for _ in 0..200 {
                        let allowed = ask("exhausted").await;
                        assert_ne!(allowed, Some(true), "{fault:?}: got the admission of another user");
                        refused += u32::from(allowed == Some(false));
                    }
                },
                async {
                    for number in 0..200 {
                        let allowed = ask(&format!("new-{round}-{number}")).await;
                        assert_ne!(allowed, Some(false), "{fault:?}: got the refusal of another user");
                        admitted += u32::from(allowed == Some(true));
                    }
                }
            );
            foreign = store.failures(FailureKind::Protocol);
            if foreign > 0 {
                break;
            }
            assert!(begun.elapsed() < PATIENCE, "{fault:?}: no reply stream was out of sync");
        }
        proxy.fault(Fault::None);
        println!("{fault:?}: {refused} refused, {admitted} admitted, {foreign} foreign replies");
        // A connection that is out of sync is replaced, and the store decides again.
        let begun = Instant::now();
        while ask("exhausted").await != Some(false) || proxy.traffic().connections <= before {
            assert!(begun.elapsed() < PATIENCE, "{fault:?}: {:?}", proxy.traffic());
        }
    }
}
