//! Responses of operations that need the store and have no failure policy, while the store is down.

use std::process::Command;

use tollkeeper::{Correction, Limit, Quota, facts};
use tollkeeper_tests::redis::{Client, Server, folder, limiter};
use tollkeeper_tests::served::Served;

/// The first call of a new node opens a receipt that another node sealed.
#[tokio::test]
async fn fresh_node_opens_receipts_of_other_nodes() {
    let server = Server::start();
    let limits = || {
        vec![
            Limit::new("per-user", Quota::per_hour(10)).by("user"),
            Limit::new("slots", Quota::slots(1)).by("user"),
        ]
    };
    let node = limiter(&server.url(), limits());
    let alice = facts! { "user" => "alice" };
    for _ in 0..10 {
        let held = node.acquire(&alice).await.expect("valid facts");
        let charge = node.seal_charge(&held.decision.charge().expect("it was admitted"));
        let slot = node.seal_slot(&held.slot.expect("one is free").keep());
        let fresh = limiter(&server.url(), limits());
        let charge = fresh.open_charge(&charge).await.expect("the store answers").expect("a valid receipt");
        assert_eq!(fresh.refund(&charge).await, Correction::Done);
        let fresh = limiter(&server.url(), limits());
        let slot = fresh.open_slot(&slot).await.expect("the store answers").expect("a valid slot");
        assert_eq!(fresh.release(&slot).await, Ok(true));
        assert_eq!(fresh.open_charge("nonsense").await, Ok(None));
    }
}

/// A server, called with `curl`.
struct Curl<'a>(&'a Served);

impl Curl<'_> {
    /// The status and the body.
    fn call(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let url = format!("http://{}{path}", self.0.http);
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--noproxy", "*", "-X", method, "-d", body, &url]);
        curl.args(["-H", "authorization: Bearer boss", "-w", "\n%{http_code}"]);
        let output = String::from_utf8(curl.output().expect("curl starts").stdout).expect("text");
        let (body, status) = output.rsplit_once('\n').expect("a status");
        (status.parse().expect("a status"), body.to_owned())
    }

    fn field(&self, path: &str, name: &str) -> String {
        let (status, body) = self.call("POST", path, r#"{"facts":{"user":"alice"}}"#);
        assert_eq!(status, 200, "{body}");
        let json: serde_json::Value = serde_json::from_str(&body).expect("JSON");
        json[name].as_str().unwrap_or_else(|| panic!("no {name}: {body}")).to_owned()
    }
}

/// Both for a node that has served requests before and for one that was just started.
#[test]
fn unavailable_store_is_a_503_where_no_policy_answers() {
    let server = Server::start();
    let folder = folder();
    let file = folder.join("tollkeeper.yaml");
    let digest = tollkeeper_core::digest::hex(&tollkeeper_core::digest::sha256(b"boss"));
    let config = format!(
        "admin: {{ token_sha256: {digest} }}\nstore: {}\nredis: {{ deadline: 1s }}\nlimits:\n  - {{ name: per-user, by: user, rate: 9/hour }}\n  \
         - {{ name: slots, by: user, algorithm: concurrency, limit: 3 }}\n",
        server.url()
    );
    std::fs::write(&file, config).expect("the temporary folder is writable");
    let args = ["--config", file.to_str().expect("text")];
    let known = Served::with(&args);
    let (charge, other) =
        (Curl(&known).field("/v1/check", "charge"), Curl(&known).field("/v1/check", "charge"));
    let slot = Curl(&known).field("/v1/acquire", "slot");
    let mut resp = Client::to(known.resp.port()).expect("it listens");
    resp.text("CL.THROTTLE alice 5 10 60");

    server.signal("STOP");
    let fresh = Served::with(&args);
    for node in [&known, &fresh] {
        let limits = r#"{"limits":[]}"#;
        for (method, path, body) in [
            ("POST", "/v1/refund", format!(r#"{{"charge":"{charge}"}}"#)),
            ("POST", "/v1/settle", format!(r#"{{"charge":"{other}","cost":2}}"#)),
            ("POST", "/v1/renew", format!(r#"{{"slot":"{slot}"}}"#)),
            ("POST", "/v1/release", format!(r#"{{"slot":"{slot}"}}"#)),
            ("DELETE", "/v1/state?limit=per-user&user=alice", String::new()),
            ("PUT", "/v1/limits", limits.to_owned()),
            ("DELETE", "/v1/limits", String::new()),
        ] {
            let (status, response) = Curl(node).call(method, path, &body);
            assert_eq!(status, 503, "{method} {path}: {response}");
            assert!(response.contains(r#""code":"store_unavailable""#), "{method} {path}: {response}");
        }
        for path in ["/v1/check", "/v1/peek", "/v1/reserve", "/v1/acquire"] {
            let (status, response) = Curl(node).call("POST", path, r#"{"facts":{"user":"alice"}}"#);
            assert_eq!(status, 200, "{path}: {response}");
        }
    }
    let error = resp.call(&[b"DEL", b"alice"]).expect_err("the store does not answer");
    assert!(error.starts_with("ERR store_unavailable "), "{error}");
    server.signal("CONT");
    let _ = std::fs::remove_dir_all(folder);
}
