//! Several nodes on one Redis: limits set on one apply to all, and restarts lose nothing.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::*;
use tollkeeper_core::digest::{hex, sha256};
use tollkeeper_tests::redis;

const TOKEN: &str = "authorization: Bearer boss";

/// Servers on one Redis, each with its own config file.
struct Nodes {
    folder: Folder,
    redis: redis::Server,
}

impl Nodes {
    fn new() -> Nodes {
        Nodes { folder: Folder::new(), redis: redis::Server::start() }
    }

    /// Starts a node whose config file has one limit with this burst.
    fn start(&self, burst: u32) -> Server {
        self.start_at("127.0.0.1:0", burst)
    }

    fn start_at(&self, http: &str, burst: u32) -> Server {
        let digest = hex(&sha256(b"boss"));
        let file = self.folder.write(
            &format!("{burst}.yaml"),
            &format!(
                "admin: {{ token_sha256: {digest} }}\nredis: {{ deadline: 5s }}\n\
                 limits:\n  - {{ name: few, by: user, rate: 1/day, burst: {burst} }}\n"
            ),
        );
        let args = ["--store", &self.redis.url(), "--config", file.to_str().unwrap()];
        Server::launch(tollkeeper().args(["serve", "--http", http]).args(args))
    }
}

fn body(burst: u32) -> String {
    json!({ "limits": [{ "name": "few", "by": "user", "rate": "1/day", "burst": burst }] }).to_string()
}

fn change(server: &Server, method: &str, headers: &[&str], body: &str) -> Answer {
    server.client().request_with(method, "/v1/limits", &[headers, &[TOKEN]].concat(), body.as_bytes())
}

/// The active limits: source, `shadowed`, `persistent`, and the burst.
fn state(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200, "{answer:?}");
    let body = answer.json();
    json!([body["source"], body["shadowed"], body["persistent"], body["limits"][0]["burst"]])
}

fn becomes(server: &Server, expected: &Value) {
    eventually(&format!("{expected} is active"), || state(&server.get("/v1/limits")) == *expected);
}

#[test]
fn put_limits_apply_to_all_nodes_and_survive_restarts() {
    let nodes = Nodes::new();
    let (one, other) = (nodes.start(5), nodes.start(6));
    assert!(one.check(r#"{"user":"alice"}"#));
    assert_eq!(state(&one.get("/v1/limits")), json!(["file", false, null, 5]));

    let answer = change(&one, "PUT", &[], &body(9));
    assert_eq!(state(&answer), json!(["api", true, true, 9]));
    becomes(&other, &json!(["api", true, true, 9]));
    assert_eq!(
        other.get("/v1/limits").json()["version"],
        answer.json()["version"],
        "all nodes report the same version"
    );
    let peek = other.post("/v1/peek", r#"{"facts":{"user":"alice"}}"#).json();
    assert_eq!(peek["limits"][0]["remaining"], 8, "earlier charges still count");

    // A starting node applies the limits set over the API before its first response.
    drop(one);
    let one = nodes.start(5);
    assert_eq!(state(&one.get("/v1/limits")), json!(["api", true, true, 9]));

    let answer = change(&other, "DELETE", &[], "");
    assert_eq!(state(&answer), json!(["file", false, null, 6]));
    becomes(&one, &json!(["file", false, null, 5]));
}

#[test]
fn one_of_two_conditional_puts_on_two_nodes_wins() {
    let nodes = Nodes::new();
    let servers = [nodes.start(5), nodes.start(6)];
    for round in 10..15 {
        let version = change(&servers[0], "PUT", &[], &body(round)).json()["version"].clone();
        for server in &servers {
            eventually("both nodes have this version", || {
                server.get("/v1/limits").json()["version"] == version
            });
        }
        let seen = format!("if-match: \"{version}\"");
        let statuses: Vec<u16> = std::thread::scope(|scope| {
            let tries = servers.each_ref().map(|server| {
                let seen = &seen;
                scope.spawn(move || change(server, "PUT", &[seen], &body(round * 10)).status)
            });
            tries.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert!(statuses.contains(&200) && statuses.contains(&412), "{statuses:?}");
    }
    let (status, code, _) = change(&servers[0], "PUT", &["if-match: \"1\""], &body(1)).error();
    assert_eq!((status, &*code), (412, "version_mismatch"));
}

#[test]
fn put_without_the_store_is_503() {
    let mut nodes = Nodes::new();
    let server = nodes.start(5);
    nodes.redis.kill();
    for (method, body) in [("PUT", body(9)), ("DELETE", String::new())] {
        let (status, code, _) = change(&server, method, &[], &body).error();
        assert_eq!((status, &*code), (503, "store_unavailable"), "{method}");
    }
    assert_eq!(state(&server.get("/v1/limits")), json!(["file", false, null, 5]));
    assert!(server.check(r#"{"user":"alice"}"#), "the node still decides");
}

/// The warning is logged once, although each connection checks the eviction policy.
#[test]
fn store_that_may_evict_keys_is_logged() {
    let redis = redis::Server::with(redis::Program::Redis, &["maxmemory-policy allkeys-lru"]);
    let server = Server::with(&["--store", &redis.url()]);
    server.logs("may evict keys (maxmemory-policy allkeys-lru)");
    assert_eq!(server.metric("tollkeeper_store_may_evict"), 1.0);
    assert_eq!(server.log().matches("may evict keys").count(), 1, "{}", server.log());
}

/// One check over a new connection. Returns the status, or `None` without a response.
fn ask(address: SocketAddr) -> Option<String> {
    let body = r#"{"facts":{"user":"alice"}}"#;
    let mut stream = TcpStream::connect(address).ok()?;
    let request =
        format!("POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(request.as_bytes()).ok()?;
    let mut line = [0; 12];
    stream.read_exact(&mut line).ok()?;
    Some(text(&line[9..]).to_owned())
}

/// Requests a second of all clients together.
const RATE: u32 = 2_000;
const CLIENTS: u32 = 8;

/// Counts of all clients so far.
#[derive(Default)]
struct Seen {
    begun: AtomicU32,
    answered: AtomicU32,
    admitted: AtomicU32,
    retried: AtomicU32,
}

/// Sends requests on a fixed schedule, however long earlier ones took, until `enough`. A request without a response is
/// retried on the other node until it is answered.
fn keep_asking(
    client: u32,
    began: Instant,
    seen: &Seen,
    node: impl Fn(u32) -> SocketAddr,
    enough: impl Fn() -> bool,
) {
    for round in 0.. {
        wait_until(began + (round * CLIENTS + client) * Duration::from_secs(1) / RATE);
        if enough() {
            return;
        }
        seen.begun.fetch_add(1, SeqCst);
        let (mut target, sent) = (client + round, Instant::now());
        let status = loop {
            if let Some(status) = ask(node(target)) {
                break status;
            }
            assert!(sent.elapsed() < PATIENCE, "no node answers");
            seen.retried.fetch_add(1, SeqCst);
            target += 1;
        };
        match status.as_str() {
            "200" => _ = seen.admitted.fetch_add(1, SeqCst),
            "429" => {}
            other => panic!("{other}"),
        }
        seen.answered.fetch_add(1, SeqCst);
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "a client with a fixed schedule waits until its next request is due"
)]
fn wait_until(due: Instant) {
    std::thread::sleep(due.saturating_duration_since(Instant::now()));
}

/// Two nodes under 2,000 requests a second, from clients that retry when a node is gone; each node is restarted five
/// times.
#[test]
fn rolling_restart_loses_no_request_and_no_count() {
    const BURST: u32 = 4 * RATE;
    const RESTARTS: usize = 5;
    let nodes = Nodes::new();
    // Dedicated addresses: no other process takes the port during a restart, and no TCP self-connect can happen.
    let mut servers = ["127.0.0.2:0", "127.0.0.3:0"].map(|http| nodes.start_at(http, BURST));
    let addresses = servers.each_ref().map(|server| server.address);
    let (seen, done, began) = (Seen::default(), AtomicBool::new(false), Instant::now());
    let answered = || seen.answered.load(SeqCst);
    let node = |target: u32| addresses[target as usize % 2];
    let enough = || done.load(SeqCst) && answered() >= BURST + RATE;
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (seen, node, enough) = (&seen, &node, &enough);
            scope.spawn(move || keep_asking(client, began, seen, node, enough));
        }
        for restart in 0..2 * RESTARTS {
            // Half a second of requests, so that some restarts happen before the limit is reached and some after.
            let before = answered();
            eventually("requests are answered", || answered() > before + RATE / 2);
            let server = &mut servers[restart % 2];
            server.signal("TERM");
            eventually("the node has stopped", || server.has_ended());
            let new = nodes.start_at(&server.address.to_string(), BURST);
            assert_eq!(std::mem::replace(server, new).ended().code, Some(0));
        }
        done.store(true, SeqCst);
    });
    let [begun, answered, admitted, retried] =
        [&seen.begun, &seen.answered, &seen.admitted, &seen.retried].map(|count| count.load(SeqCst));
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "{answered} requests answered in {seconds:.1} s ({:.0}/s, target {RATE}/s) over {} restarts, {retried} retried, \
         {admitted} of {BURST} admitted",
        f64::from(answered) / seconds,
        2 * RESTARTS,
    );
    assert!(retried > 0, "restarts must interrupt some requests, otherwise this test proves nothing");
    assert_eq!(answered, begun, "every request was answered");
    assert_eq!(admitted, BURST, "exactly the limit was admitted, and nothing else was charged");
}

/// A node that refuses by its denial bound, or admits from permits, says so in JSON and RESP.
#[test]
fn answers_without_the_store_are_marked_approximate() {
    let nodes = Nodes::new();
    let file = nodes.folder.write(
        "approximate.yaml",
        "redis: { deadline: 5s }\nlimits:\n\
         \x20 - { name: few, by: user, rate: 1/day, burst: 1 }\n\
         \x20 - { name: hot, by: tenant, rate: 1000/s, burst: 100000, consistency: leased }\n",
    );
    let args = ["--store", &nodes.redis.url(), "--config", file.to_str().unwrap()];
    let listeners = ["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0"];
    let server = Server::launch(tollkeeper().args(listeners).args(args));
    let over_json = |body: &str| server.post("/v1/check", body).json();
    let over_resp = |facts: &str| {
        let mut stream = TcpStream::connect(server.resp()).unwrap();
        write!(stream, "TK.CHECK {facts}\r\nQUIT\r\n").unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    };
    let (alice, acme) = (r#"{"facts":{"user":"alice"}}"#, r#"{"facts":{"tenant":"acme"},"cost":100}"#);
    let asked = over_json(alice);
    assert_eq!((&asked["allowed"], &asked["limits"][0]["approximate"]), (&json!(true), &Value::Null));
    for (body, command, allowed) in [(alice, "user alice", false), (acme, "tenant acme", true)] {
        eventually(&format!("an approximate answer in JSON to {body}"), || {
            let answer = over_json(body);
            answer["allowed"] == allowed && answer["limits"][0]["approximate"] == true
        });
        eventually(&format!("an approximate answer over RESP to {command}"), || {
            // Keeps the state of the bound young, and the node's demand for permits high.
            over_json(body);
            let reply = over_resp(command);
            reply.contains(&format!("allowed\r\n:{}", u8::from(allowed)))
                && reply.contains("approximate\r\n:1")
        });
    }
}

/// A server whose limits are an exact one, another one that is asked for seldom, and a leased one.
fn approximate(nodes: &Nodes) -> Server {
    let file = nodes.folder.write(
        "approximate.yaml",
        "redis: { deadline: 5s }\nlimits:\n\
         \x20 - { name: few, by: user, rate: 1/day, burst: 1 }\n\
         \x20 - { name: wide, by: ip, rate: 1000/day, burst: 1000 }\n\
         \x20 - { name: hot, by: tenant, rate: 1000/s, burst: 100000, consistency: leased }\n",
    );
    let args = ["--store", &nodes.redis.url(), "--config", file.to_str().unwrap()];
    let listeners = ["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0"];
    Server::launch(tollkeeper().args(listeners).args(args))
}

/// The reply to one RESP command.
fn over_resp(server: &Server, command: &str) -> String {
    let mut stream = TcpStream::connect(server.resp()).unwrap();
    write!(stream, "{command}\r\nQUIT\r\n").unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    reply
}

#[test]
fn answers_without_the_store_have_headers() {
    let nodes = Nodes::new();
    let server = approximate(&nodes);
    let is_approximate = |answer: &Answer| answer.json()["limits"][0]["approximate"] == true;
    let alice = || server.post("/v1/check", r#"{"facts":{"user":"alice"}}"#);
    assert_eq!(alice().status, 200);
    let mut refused = alice();
    eventually("a bounded refusal", || {
        refused = alice();
        is_approximate(&refused)
    });
    let wait: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    // A day, jittered by up to a tenth.
    assert!((86_000..=95_040).contains(&wait) && refused.status == 429, "{refused:?}");
    let shown = ["x-ratelimit-limit", "x-ratelimit-remaining", "ratelimit-policy"];
    assert_eq!(shown.map(|name| refused.header(name).unwrap()), ["1", "0", "\"few\";q=1;w=86400"]);
    assert!(refused.header("ratelimit").unwrap().starts_with("\"few\";r=0;t="), "{refused:?}");

    let acme = || server.post("/v1/check", r#"{"facts":{"tenant":"acme"},"cost":100}"#);
    let mut admitted = acme();
    eventually("an admission from permits", || {
        admitted = acme();
        is_approximate(&admitted)
    });
    let remaining = admitted.json()["limits"][0]["remaining"].to_string();
    assert_eq!((admitted.status, admitted.header("retry-after")), (200, None));
    let shown = ["x-ratelimit-limit", "x-ratelimit-remaining", "ratelimit-policy"];
    let expected = ["100000", &remaining, "\"hot\";q=100000;w=100"];
    assert_eq!(shown.map(|name| admitted.header(name).unwrap()), expected);
    let state = admitted.header("ratelimit").unwrap();
    assert!(state.starts_with(&format!("\"hot\";r={remaining}")), "{state}");
}

/// One limit refuses by its bound; the node knows nothing of the key of the other.
#[test]
fn limits_that_were_not_asked_have_no_numbers() {
    let nodes = Nodes::new();
    let server = approximate(&nodes);
    let mut address = 0;
    let mut both = || {
        address += 1;
        // The state of the bound is young.
        server.check(r#"{"user":"alice"}"#);
        format!("192.0.2.{address}")
    };
    eventually("a bounded refusal in JSON", || {
        let ip = both();
        let answer =
            server.post("/v1/check", &format!(r#"{{"facts":{{"user":"alice","ip":"{ip}"}}}}"#)).json();
        let [few, wide] = [&answer["limits"][0], &answer["limits"][1]];
        let numbers = ["remaining", "retry_after", "reset_after"].map(|name| wide[name].clone());
        let is_unasked = few["approximate"] == true && numbers == [Value::Null, Value::Null, Value::Null];
        is_unasked && wide["name"] == "wide" && wide["limit"] == 1_000
    });
    eventually("a bounded refusal over RESP", || {
        let ip = both();
        let reply = over_resp(&server, &format!("TK.CHECK user alice ip {ip}"));
        let wide = reply.split("wide\r\n").nth(1).unwrap();
        reply.contains("approximate\r\n:1")
            && wide.contains("remaining\r\n$-1\r\n")
            && wide.contains("reset_after\r\n$-1\r\n")
    });
}

#[test]
fn decisions_without_the_store_are_counted() {
    let nodes = Nodes::new();
    let server = approximate(&nodes);
    let (mut bounded, mut refused) = (0, 0);
    assert!(server.check(r#"{"user":"alice"}"#));
    for _ in 0..50 {
        let answer = server.post("/v1/check", r#"{"facts":{"user":"alice"}}"#).json();
        assert_eq!(answer["allowed"], false);
        refused += 1;
        bounded += u32::from(answer["limits"][0]["approximate"] == true);
    }
    let (mut asked, mut spent) = (0, 0);
    eventually("permits are spent", || {
        let answer = server.post("/v1/check", r#"{"facts":{"tenant":"acme"},"cost":100}"#).json();
        asked += 1;
        spent += 100 * u32::from(answer["limits"][0]["approximate"] == true);
        spent >= 500
    });
    assert!(bounded > 0, "no refusal was bounded");
    let metric = |series: &str| server.metric(series);
    let permits =
        |state: &str| metric(&format!("tollkeeper_lease_permits_total{{limit=\"hot\",state=\"{state}\"}}"));
    assert_eq!(metric("tollkeeper_denial_bound_hits_total{limit=\"few\"}"), f64::from(bounded));
    assert_eq!(permits("spent"), f64::from(spent));
    assert!(permits("granted") >= permits("spent") + permits("expired"), "{}", permits("granted"));
    let top = server.get("/v1/top").json();
    let count = |kind: &str, limit: &str| {
        let rows = top[kind].as_array().unwrap();
        rows.iter().find(|row| row["limit"] == limit).map_or(Value::Null, |row| row["count"].clone())
    };
    assert_eq!((count("busiest", "few"), count("refused", "few")), (json!(refused + 1), json!(refused)));
    assert_eq!(count("busiest", "hot"), json!(asked), "{top}");
    let mut client = server.client();
    client.send(b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let lines = BufReader::new(client.stream).lines().map_while(Result::ok);
    let mut events = lines.filter_map(|line| Some(line.strip_prefix("data: ")?.to_owned()));
    let event: Value = serde_json::from_str(&events.next().unwrap()).unwrap();
    let few = &event["limits"]["few"];
    assert_eq!((&few["allowed"], &few["refused"]), (&json!(1), &json!(refused)), "{event}");
    // What is not spent expires, and is counted when the key is used again.
    eventually("permits expire", || {
        server.post("/v1/check", r#"{"facts":{"tenant":"acme"}}"#);
        permits("expired") > 0.0
    });
}

/// The limit comes with the command, and is bounded like any other.
#[test]
fn second_refusal_of_throttle_makes_no_call() {
    let nodes = Nodes::new();
    let server = approximate(&nodes);
    let throttle = || over_resp(&server, "CL.THROTTLE bob 0 1 86400");
    assert!(throttle().starts_with("*5\r\n:0\r\n"));
    eventually("a refusal without a script call", || {
        assert!(throttle().starts_with("*5\r\n:1\r\n"));
        let before = nodes.redis.script_calls();
        assert!(throttle().starts_with("*5\r\n:1\r\n"));
        nodes.redis.script_calls() == before
    });
}
