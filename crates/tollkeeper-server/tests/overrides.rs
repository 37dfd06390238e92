//! Overrides of single keys at run time, in memory and on Redis.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::poll;
use serde_json::{Value, json};
use support::*;
use tollkeeper::config::{Config, Format};
use tollkeeper::policy::Override;
use tollkeeper::store::redis::{script, wire};
use tollkeeper::{KeyOverride, Quota};
use tollkeeper_core::digest::{hex, sha256};
use tollkeeper_engine::api::active_limits::LimitSource;
use tollkeeper_server::service::Service;
use tollkeeper_server::store::Store;
use tollkeeper_tests::redis::Server as Redis;

fn config(rest: &str) -> String {
    format!(
        "{rest}
http: {{ facts: {{ api_key: {{ from: header.authorization, hash: true }} }} }}
limits:
  - {{ name: per-user, by: user, rate: 100/day, burst: 2, overrides: {{ vip: {{ rate: 100/day, burst: 9 }} }} }}
  - {{ name: per-key, by: api_key, rate: 100/day, algorithm: fixed-window }}
  - {{ name: pair, by: [user, ip], rate: 100/day }}
  - {{ name: exports, by: user, algorithm: concurrency, limit: 5 }}
admin: {{ token_sha256: {} }}
",
        hex(&sha256(b"boss"))
    )
}

fn call(server: &Server, call: &str, body: &Value) -> Answer {
    let (method, path) = call.split_once(' ').unwrap();
    let body = if body.is_null() { String::new() } else { body.to_string() };
    server.client().request_with(method, path, &["authorization: Bearer boss"], body.as_bytes())
}

fn put(server: &Server, key: &str, body: Value) -> Answer {
    call(server, &format!("PUT /v1/overrides/{key}"), &body)
}

fn list(server: &Server) -> Value {
    call(server, "GET /v1/overrides", &Value::Null).json()
}

fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// What `usage` says about one limit.
fn usage(server: &Server, facts: &str, limit: &str) -> Value {
    let usage = call(server, &format!("GET /v1/usage?{facts}"), &Value::Null).json();
    usage["limits"].as_array().unwrap().iter().find(|it| it["name"] == limit).cloned().unwrap_or(Value::Null)
}

#[test]
fn override_applies_at_once_and_keeps_counts() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config(""));
    assert!(server.check(r#"{"user":"alice"}"#));
    let until = unix() + 3_600;
    let set = put(
        &server,
        "per-user/alice",
        json!({ "rate": "500/day", "burst": 7, "until": until, "note": "ticket" }),
    );
    let expected = json!({
        "limit": "per-user", "key": "alice", "rate": "500/day", "burst": 7, "blocked": false, "unlimited": false,
        "until": until, "note": "ticket",
    });
    assert_eq!((set.status, set.json()), (200, expected.clone()));
    assert_eq!(list(&server), json!({ "overrides": [expected], "persistent": false }));
    let alice = usage(&server, "user=alice", "per-user");
    assert_eq!((&alice["limit"], &alice["remaining"]), (&json!(7), &json!(6)), "the count is kept");
    assert_eq!(alice["override"], json!({ "until": until }));
    assert_eq!(usage(&server, "user=bob", "per-user")["override"], Value::Null);
    let decision = server.post("/v1/check", r#"{"facts":{"user":"alice"},"cost":7}"#).json();
    assert_eq!(decision["limits"][0]["override"], json!({ "until": until }));
    assert!(decision["reason"].as_str().unwrap().contains("(by an override until 20"), "{decision}");
    let explained = call(&server, "POST /v1/explain", &json!({ "facts": { "user": "alice" } })).json();
    assert!(explained["limits"][0]["why"].as_str().unwrap().contains("the override for `alice` until 20"));

    // It takes precedence over the file's.
    assert_eq!(usage(&server, "user=vip", "per-user")["limit"], 9);
    put(&server, "per-user/vip", json!({ "rate": "1/day", "burst": 1 }));
    assert_eq!(usage(&server, "user=vip", "per-user")["limit"], 1);
    let delete = |key: &str| call(&server, &format!("DELETE /v1/overrides/{key}"), &Value::Null).json();
    assert_eq!(delete("per-user/vip"), json!({ "done": true }));
    assert_eq!(delete("per-user/vip"), json!({ "done": false }));
    assert_eq!(usage(&server, "user=vip", "per-user")["limit"], 9);
}

#[test]
fn key_is_blocked_or_unlimited() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config(""));
    put(&server, "per-user/mallory", json!({ "blocked": true }));
    let refused = server.post("/v1/check", r#"{"facts":{"user":"mallory"}}"#);
    assert_eq!((refused.status, &refused.json()["never"]), (429, &json!(true)));
    assert_eq!(refused.json()["reason"], "`per-user` blocks this key by an override");
    assert_eq!(refused.header("retry-after"), None);
    put(&server, "per-user/mallory", json!({ "unlimited": true }));
    for _ in 0..20 {
        assert!(server.check(r#"{"user":"mallory"}"#));
    }
    put(&server, "exports/mallory", json!({ "limit": 1 }));
    assert_eq!(usage(&server, "user=mallory", "exports")["limit"], 1);
    assert_eq!(list(&server)["overrides"][0]["slots"], 1);
    assert_eq!(server.metric("tollkeeper_overrides"), 2.0);
}

#[test]
fn hashed_and_escaped_values_are_one_key() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config(""));
    let secret = "very/secret key";
    let shown = format!("sha256:{}", &hex(&sha256(secret.as_bytes()))[..12]);
    let set = put(&server, "per-key/very%2Fsecret%20key", json!({ "rate": "7/day" }));
    assert_eq!((set.status, &set.json()["key"]), (200, &json!(shown)));
    assert!(!set.text().contains("secret") && !list(&server).to_string().contains("secret"));
    let check = server.post("/v1/check", &json!({ "facts": { "api_key": secret } }).to_string()).json();
    assert_eq!(check["limits"][0]["limit"], 7, "{check}");
    let all = format!("sha256:{}", &hex(&sha256(secret.as_bytes()))[..32]);
    for name in [&shown, &all] {
        let set = put(&server, &format!("per-key/{name}"), json!({ "rate": "8/day" }));
        assert_eq!(set.status, 200, "{name}: {set:?}");
    }
    assert_eq!(list(&server)["overrides"].as_array().unwrap().len(), 1);
    let delete = call(&server, &format!("DELETE /v1/overrides/per-key/{shown}"), &Value::Null);
    assert_eq!(delete.json()["done"], true);
    put(&server, "per-user/a+b%25", json!({ "blocked": true }));
    assert_eq!(list(&server)["overrides"][0]["key"], "a+b%", "decoded once, and `+` is no space");
}

#[test]
fn bad_overrides_change_nothing() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config(""));
    put(&server, "per-user/alice", json!({ "rate": "500/day" }));
    let before = list(&server);
    let long = format!("per-user/{}", "x".repeat(1_025));
    let rate = || json!({ "rate": "5/day" });
    for (key, body, status, code, at) in [
        ("none/alice", rate(), 404, "unknown_limit", Some("limit")),
        ("pair/alice", rate(), 400, "invalid_limits", Some("limit")),
        ("per-user/alice", json!({ "rate": "many" }), 400, "invalid_limits", Some("rate")),
        ("per-user/alice", json!({ "rate": "999999999999999999/ms" }), 400, "invalid_limits", Some("rate")),
        ("per-user/alice", json!({ "limit": 5 }), 400, "invalid_limits", Some("rate")),
        ("exports/alice", rate(), 400, "invalid_limits", Some("rate")),
        ("per-key/alice", json!({ "rate": "5/day", "burst": 9 }), 400, "invalid_limits", Some("rate")),
        (
            "per-user/alice",
            json!({ "rate": "5/day", "until": unix() - 1 }),
            400,
            "invalid_ttl",
            Some("until"),
        ),
        (
            "per-user/alice",
            json!({ "rate": "5/day", "until": "tomorrow" }),
            400,
            "invalid_ttl",
            Some("until"),
        ),
        (&long, rate(), 400, "invalid_fact", Some("value")),
        ("per-user/%zz", rate(), 400, "invalid_fact", Some("value")),
        ("per-user/%ff", rate(), 400, "invalid_fact", Some("value")),
        ("per-user/%", rate(), 400, "invalid_fact", Some("value")),
        ("per-user/alice", json!({ "burst": 5 }), 400, "missing_field", Some("rate")),
        ("per-user/alice", json!({}), 400, "missing_field", Some("rate")),
        ("per-user/alice", json!({ "blocked": true, "rate": "5/day" }), 400, "invalid_limits", None),
        ("per-user/alice", json!({ "blocked": true, "unlimited": true }), 400, "invalid_limits", None),
        ("per-user/alice", json!({ "rate": "5/day", "x": 1 }), 400, "unknown_field", Some("x")),
        (
            "per-user/alice",
            json!({ "rate": "5/day", "note": "x".repeat(1_025) }),
            413,
            "too_large",
            Some("note"),
        ),
        ("per-user/alice", json!([]), 400, "invalid_json", None),
    ] {
        let error = put(&server, key, body.clone()).error();
        assert_eq!(error, (status, code.to_owned(), at.map(str::to_owned)), "{key} {body}");
    }
    assert_eq!(put(&server, "per-user/a/b", rate()).status, 404, "a slash in a value is %2F");
    assert_eq!(put(&server, "per-user/", rate()).status, 404);
    assert_eq!(list(&server), before, "nothing changed");
    let other = server.client().request_with("PUT", "/v1/overrides/per-user/bob", &[], b"{\"blocked\":true}");
    assert_eq!(other.error().1, "unauthorized");
    assert_eq!(server.get("/v1/overrides").error().1, "unauthorized");
}

#[test]
fn override_ends_at_its_time() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config(""));
    let until = unix() + 2;
    put(&server, "per-user/alice", json!({ "blocked": true, "until": until }));
    assert!(!server.check(r#"{"user":"alice"}"#));
    eventually("the override has ended", || server.check(r#"{"user":"alice"}"#));
    assert!(unix() >= until, "not before its time");
    assert_eq!(list(&server)["overrides"], json!([]));
}

#[test]
fn overrides_survive_reloads_and_put_limits() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config(""));
    put(&server, "per-user/alice", json!({ "rate": "500/day", "burst": 7 }));
    let limits = json!({ "limits": [{ "name": "per-user", "by": "user", "rate": "1/day", "burst": 1 }] });
    assert_eq!(call(&server, "PUT /v1/limits", &limits).status, 200);
    assert_eq!(usage(&server, "user=alice", "per-user")["limit"], 7);
    // A limit of another algorithm, which the override does not fit; then the first one again.
    let other = json!({ "limits": [{ "name": "per-user", "by": "user", "rate": "1/day", "algorithm": "fixed-window" }] });
    assert_eq!(call(&server, "PUT /v1/limits", &other).status, 200);
    assert_eq!(usage(&server, "user=alice", "per-user")["limit"], 1);
    assert_eq!(call(&server, "DELETE /v1/limits", &Value::Null).status, 200);
    assert_eq!(usage(&server, "user=alice", "per-user")["limit"], 7);
}

/// It counts toward the maximum, so the list must name it in a way that DELETE accepts.
#[test]
fn override_of_an_inactive_limit_can_be_deleted() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config(""));
    let secret = hex(&sha256(b"very secret"));
    put(&server, "per-user/al%2Fice", json!({ "blocked": true }));
    put(&server, "per-key/very%20secret", json!({ "blocked": true }));
    put(&server, "exports/bob", json!({ "limit": 1 }));
    // One limit is gone, and one is keyed by two facts now.
    let limits = json!({ "limits": [{ "name": "exports", "by": ["user", "ip"], "algorithm": "concurrency", "limit": 5 }] });
    assert_eq!(call(&server, "PUT /v1/limits", &limits).status, 200);
    let listed = list(&server)["overrides"].clone();
    let keys: Vec<&str> = listed.as_array().unwrap().iter().map(|it| it["key"].as_str().unwrap()).collect();
    let shown = format!("sha256:{}", &secret[..12]);
    assert_eq!(keys, ["bob", &shown, "al/ice"], "{listed}");
    assert!(!listed.to_string().contains(&secret[..13]), "{listed}");

    let delete = |key: &str| call(&server, &format!("DELETE /v1/overrides/{key}"), &Value::Null);
    assert_eq!(delete("per-user/bob").error(), (404, "unknown_limit".to_owned(), Some("limit".to_owned())));
    assert_eq!(put(&server, "per-user/al%2Fice", json!({ "unlimited": true })).error().1, "unknown_limit");
    for key in ["per-user/al%2Fice", &format!("per-key/{shown}"), "exports/bob"] {
        assert_eq!(delete(key).json(), json!({ "done": true }), "{key}");
    }
    assert_eq!(list(&server)["overrides"], json!([]));
}

#[test]
fn overrides_are_kept_in_the_snapshot() {
    let folder = Folder::new();
    let path = folder.path().join("state");
    let rest = format!("memory: {{ snapshot: {}, snapshot_every: 1h }}", path.display());
    let server = Server::with_config(&folder, &config(&rest));
    put(&server, "per-user/alice", json!({ "rate": "500/day", "burst": 7, "note": "kept" }));
    put(&server, "per-user/bob", json!({ "blocked": true, "until": unix() + 1 }));
    assert!(server.check(r#"{"user":"alice"}"#));
    assert_eq!(list(&server)["persistent"], true);
    server.signal("TERM");
    assert_eq!(server.ended().code, Some(0));
    let server = Server::with_config(&folder, &config(&rest));
    eventually("the override of bob has ended", || list(&server)["overrides"].as_array().unwrap().len() == 1);
    let all = list(&server);
    assert_eq!(all["overrides"][0]["note"], "kept", "{all}");
    let alice = usage(&server, "user=alice", "per-user");
    assert_eq!((&alice["limit"], &alice["remaining"]), (&json!(7), &json!(6)));
}

/// A server on this Redis.
fn node(folder: &Folder, redis: &Redis) -> Server {
    let store = format!("store: {}\nredis: {{ deadline: 500ms }}\n", redis.url());
    Server::with_config(folder, &config(&store))
}

/// How many overrides are set, changed and deleted.
const CHANGES: usize = 1_000;
/// How many of them are changed before both nodes are asked for them.
const BATCH: usize = 100;

/// What a node says about these users, in one call: the limit, and whether an override applies.
fn limits_of(node: &Server, users: &[usize]) -> Vec<(u64, bool)> {
    let checks: Vec<Value> =
        users.iter().map(|user| json!({ "facts": { "user": format!("user-{user}") } })).collect();
    let answer = node.post("/v1/check/batch", &json!({ "checks": checks }).to_string()).json();
    let limit = |it: &Value| {
        let limit = &it["limits"][0];
        (limit["limit"].as_u64().unwrap(), !limit["override"].is_null())
    };
    answer["decisions"].as_array().unwrap().iter().map(limit).collect()
}

/// Ends the threads of a scope also if an assertion fails, instead of waiting for them forever.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn changed_overrides_reach_all_nodes_whole() {
    let (redis, folders) = (Redis::start(), [Folder::new(), Folder::new()]);
    let nodes = folders.each_ref().map(|folder| node(folder, &redis));
    // Both keep deciding. A request must see the limit's own quota or the whole override: 7 of 7, 9 of 9.
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stopped = StopOnDrop(&stop);
        let watched: Vec<_> = nodes
            .iter()
            .map(|node| {
                scope.spawn(|| {
                    let mut seen = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let users: Vec<usize> = (0..10).map(|n| (seen + n * 97) % CHANGES).collect();
                        for limit in limits_of(node, &users) {
                            assert!([(2, false), (7, true), (9, true)].contains(&limit), "{limit:?}");
                        }
                        seen += 1;
                    }
                    seen
                })
            })
            .collect();
        let mut slowest = Duration::ZERO;
        let mut change_all = |expected: (u64, bool), change: &dyn Fn(&Server, &str) -> Answer| {
            let users: Vec<usize> = (0..CHANGES).collect();
            for batch in users.chunks(BATCH) {
                for user in batch {
                    let answer = change(&nodes[user % 2], &format!("per-user/user-{user}"));
                    assert_eq!(answer.status, 200, "{answer:?}");
                }
                let began = Instant::now();
                for node in &nodes {
                    while limits_of(node, batch).iter().any(|limit| *limit != expected) {
                        assert!(began.elapsed() < PATIENCE, "{expected:?} is never seen");
                    }
                }
                slowest = slowest.max(began.elapsed());
            }
        };
        change_all((7, true), &|node, key| put(node, key, json!({ "rate": "9/day", "burst": 7 })));
        change_all((9, true), &|node, key| put(node, key, json!({ "rate": "11/day", "burst": 9 })));
        change_all((2, false), &|node, key| {
            let deleted = call(node, &format!("DELETE /v1/overrides/{key}"), &Value::Null);
            assert_eq!(deleted.json(), json!({ "done": true }));
            deleted
        });
        println!("seen by both nodes after at most {slowest:?}");
        stop.store(true, Ordering::Relaxed);
        let seen: usize = watched.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert!(seen > 10, "{seen} batches were decided meanwhile");
    });
    for node in &nodes {
        eventually("no override is left", || list(node)["overrides"] == json!([]));
    }
    // They survive a restart.
    put(&nodes[0], "per-user/kept", json!({ "blocked": true }));
    let third = Folder::new();
    let restarted = node(&third, &redis);
    assert!(!restarted.check(r#"{"user":"kept"}"#));
    assert_eq!(list(&restarted)["persistent"], true);
}

#[test]
fn overrides_stay_in_force_while_redis_is_unavailable() {
    let (mut redis, folder) = (Redis::start(), Folder::new());
    let server = node(&folder, &redis);
    put(&server, "per-user/mallory", json!({ "blocked": true }));
    redis.kill();
    eventually("the store is unavailable", || {
        put(&server, "per-user/alice", json!({ "blocked": true })).error().1 == "store_unavailable"
    });
    let delete = call(&server, "DELETE /v1/overrides/per-user/mallory", &Value::Null);
    assert_eq!(delete.error(), (503, "store_unavailable".to_owned(), None));
    let refused = server.post("/v1/check", r#"{"facts":{"user":"mallory"}}"#);
    assert_eq!(refused.status, 429, "the last known override decides: {}", refused.text());
    assert!(server.check(r#"{"user":"alice"}"#), "nothing was set");
    // A node that starts now has none, and says so.
    let other = Folder::new();
    let started = node(&other, &redis);
    assert!(started.check(r#"{"user":"mallory"}"#));
    started.logs("without overrides, until it does");
}

/// Sets an override with the product's script, as if only three could be set: 1 if it is set, 2 if there is no room.
fn set_one_of_three(redis: &Redis, id: &str, line: &str) -> i64 {
    let args: [&[u8]; 3] = [b"\0\0\0\0\0\x073", id.as_bytes(), line.as_bytes()];
    let reply = redis.connect().run(script::overrides(), &[b"overrides"], &args).unwrap();
    let wire::Value::List(parts) = reply else { panic!("{reply:?}") };
    let [_, wire::Value::Number(done), _] = parts[..] else { panic!("{parts:?}") };
    done
}

#[test]
fn ended_overrides_make_room_for_new_ones() {
    let redis = Redis::start();
    let (past, future) = (unix() - 1, unix() + 3_600);
    assert_eq!(set_one_of_three(&redis, "per-user:a", &format!("blocked - - - {past} a note of 5 words")), 1);
    assert_eq!(set_one_of_three(&redis, "per-user:b", "blocked - - - - 7 words that are not an end"), 1);
    assert_eq!(set_one_of_three(&redis, "per-user:c", &format!("rate 5 60000000 9 {future} ")), 1);
    // The first one has ended.
    assert_eq!(set_one_of_three(&redis, "per-user:d", "unlimited - - - - "), 1);
    assert_eq!(set_one_of_three(&redis, "per-user:e", "unlimited - - - - "), 2, "none of these has ended");
    assert_eq!(set_one_of_three(&redis, "per-user:d", "blocked - - - - "), 1, "this one is known");
    let fields = redis.connect().text("HKEYS overrides");
    let left =
        |id: &str| format!("{fields:?}").contains(&format!("{:?}", format!("o:per-user:{id}").as_bytes()));
    assert_eq!(["a", "b", "c", "d", "e"].map(left), [false, true, true, true, false], "{fields:?}");
}

/// Waits until this is so, while the tasks of the runtime go on.
async fn awaited(is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Another node changes an override after this node has, and before this node has seen the reply to its own change.
#[tokio::test]
async fn late_reply_does_not_undo_a_later_change() {
    let redis = Redis::start();
    let file = format!("store: {}\n{}", redis.url(), config("redis: { deadline: 20s }"));
    let (config, _) = Config::parse("node.yaml", Format::Yaml, file.as_bytes(), &|_| None).unwrap();
    let node = || {
        let store = Store::open(&config.store, &config).unwrap();
        Arc::new(Service::new(config.clone(), LimitSource::File, store).unwrap())
    };
    let (one, other) = (node(), node());
    let following = Arc::clone(&one).begin_to_follow().await.unwrap();
    let override_of = |burst: u64| KeyOverride {
        limit: "per-user".to_owned(),
        key: "alice".to_owned(),
        granted: Override { allowance: Quota::per_hour(9).burst(burst).into(), until: None, note: None },
    };
    let has = |node: &Service, burst: u64| node.limiter.overrides() == [override_of(burst)];
    // Connects, and has the script loaded.
    one.set_override(override_of(3)).await.unwrap();
    assert!(has(&one, 3));
    let mut late = pin!(one.set_override(override_of(4)));
    assert!(poll!(late.as_mut()).is_pending());
    let late_line = wire::Value::Bytes(b"rate 9 3600000000 4 - ".to_vec());
    let stored = || redis.connect().text("HGET tk:1:overrides o:per-user:alice");
    awaited(|| stored() == late_line).await;
    other.set_override(override_of(5)).await.unwrap();
    tokio::select! {
        () = following => unreachable!("it follows for ever"),
        () = awaited(|| has(&one, 5)) => {}
    }
    late.await.unwrap();
    assert!(has(&one, 5), "{:?}", one.limiter.overrides());
}
