//! Logs of failures and refusals: they name the cause, at a bounded rate, and show no secrets.

mod support;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Instant;

use serde_json::{Value, json};
use support::{Folder, Server, eventually};
use tollkeeper_core::digest::{hex, sha256};

#[test]
fn store_failure_is_logged_with_its_cause() {
    let folder = Folder::new();
    let file = folder.write(
        "tollkeeper.yaml",
        "limits:\n  - { name: each, by: user, rate: 5/day }\n  - { name: all, rate: 5/day, on_store_failure: deny }\n",
    );
    let began = Instant::now();
    // Nothing listens on port 1.
    let config = file.to_str().expect("UTF-8");
    let server = Server::with(&["--config", config, "--store", "redis://127.0.0.1:1", "--log", "json"]);
    server.logs("cannot use 127.0.0.1:1");
    for number in 0..500 {
        let user = format!("s3cret-{number}");
        assert!(!server.check(&format!(r#"{{"user":"{user}"}}"#)), "`deny` refuses");
        server.post("/v1/check", &format!(r#"{{"facts":{{"ip":"{user}"}}}}"#));
    }
    server.logs("limits follow their failure policy");
    server.signal("TERM");
    let ended = server.ended();
    assert!(!ended.log.contains("s3cret"), "{}", ended.log);
    let messages: Vec<String> = ended
        .log
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .map(|object| object["fields"]["message"].to_string())
        .collect();
    // Three kinds of lines, each at most once a second, and a few lines that are logged once.
    let most = 3 * (began.elapsed().as_secs() + 2) + 10;
    assert!((messages.len() as u64) < most, "{} lines, not {most}: {messages:#?}", messages.len());
    let opened = messages
        .iter()
        .find(|line| line.contains("failure policy"))
        .expect("the test has waited for this line");
    assert!(opened.contains("connection: "), "the line names the cause: {opened}");
}

/// A limit that never refills while a test runs, one by a hashed fact, and one that refuses every request on a route.
const LIMITS: &str = "http:
  facts: { api_key: { from: header.x-api-key, hash: true } }
  routes: [/login]
  trusted_proxies: [127.0.0.0/8]
limits:
  - { name: per-user, by: user, rate: 1/day, burst: 1 }
  - { name: per-key, when: { api_key: '*' }, by: [api_key, plan], rate: 1/day, burst: 1, missing: share }
  - { name: closed, when: { route: /login }, rate: 0/s }
";

/// The refusals in a log of JSON, by their fields.
fn refusals(log: &str) -> Vec<Value> {
    let fields = |line: &str| serde_json::from_str::<Value>(line).ok().map(|line| line["fields"].clone());
    let is_refusal =
        |fields: &Value| fields["message"].as_str().is_some_and(|text| text.starts_with("refused"));
    log.lines().filter_map(fields).filter(is_refusal).collect()
}

#[test]
fn refusals_are_logged_with_their_fields() {
    let folder = Folder::new();
    let file = folder.write("tollkeeper.yaml", &format!("log: {{ refusals: 1000/s }}\n{LIMITS}"));
    let args = ["--config", file.to_str().expect("UTF-8"), "--resp", "127.0.0.1:0", "--log", "json"];
    let server = Server::with(&args);
    for user in ["alice", "bob\\n\\u001b[31m"] {
        assert!(server.check(&format!(r#"{{"user":"{user}"}}"#)));
        assert!(!server.check(&format!(r#"{{"user":"{user}"}}"#)));
    }
    server.post("/v1/peek", r#"{"facts":{"user":"alice"}}"#);
    let batch = server.post("/v1/check/batch", r#"{"checks":[{"facts":{"user":"alice"},"cost":2}]}"#);
    assert_eq!(batch.json()["decisions"][0]["allowed"], false);
    server.check(r#"{"api_key":"s3cret"}"#);
    assert!(!server.check(r#"{"api_key":"s3cret","route":"/other"}"#));
    let gateway = ["x-forwarded-method: GET", "x-forwarded-uri: /login"];
    assert_eq!(server.client().request_with("GET", "/v1/auth", &gateway, b"").status, 429);
    let mut resp = TcpStream::connect(server.resp()).expect("the server listens");
    resp.write_all(
        b"TK.CHECK user alice\r\nCL.THROTTLE key 0 1 86400\r\nCL.THROTTLE key 0 1 86400\r\nQUIT\r\n",
    )
    .expect("the commands are sent");
    let mut replies = String::new();
    resp.read_to_string(&mut replies).expect("the server replies");

    eventually("all refusals are logged", || refusals(&server.log()).len() >= 7);
    server.signal("TERM");
    let log = server.ended().log;
    assert!(!log.contains("s3cret") && !log.contains('\u{1b}'), "{log}");
    let shown: Vec<Value> = refusals(&log)
        .into_iter()
        .map(|fields| {
            json!([
                fields["limit"],
                fields["key"],
                fields["cost"],
                fields["transport"],
                fields["route"],
                fields["never"]
            ])
        })
        .collect();
    let hidden = format!("sha256:{}", &hex(&sha256(b"s3cret"))[..12]);
    assert_eq!(
        shown,
        [
            json!(["per-user", r#"["alice"]"#, 1, "http", null, null]),
            json!(["per-user", r#"["bob\n\u{1b}[31m"]"#, 1, "http", null, null]),
            json!(["per-user", r#"["alice"]"#, 2, "http", null, true]),
            json!(["per-key", format!(r#"["{hidden}", null]"#), 1, "http", null, null]),
            json!(["closed", "[]", 1, "auth", "/login", true]),
            json!(["per-user", r#"["alice"]"#, 1, "resp", null, null]),
            json!(["CL.THROTTLE", r#"["key"]"#, 1, "resp", null, null]),
        ]
    );
    let first = &refusals(&log)[0];
    assert!(
        first["retry_after"].as_f64().is_some_and(|wait| (86_000.0..=86_400.0).contains(&wait)),
        "{first}"
    );
    assert_eq!(first["message"], "refused, retry in 1 d");
}

/// Refusals that are not logged are counted, and the count is logged.
#[test]
fn refusals_beyond_the_rate_are_counted() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &format!("log: {{ refusals: 5/day }}\n{LIMITS}"));
    for _ in 0..21 {
        server.check(r#"{"user":"alice"}"#);
    }
    let sum = |log: &str| -> u64 {
        let counts = log
            .lines()
            .filter_map(|line| line.split_once(" more refusals were not logged")?.0.rsplit_once(' '));
        counts.map(|(_, count)| count.parse::<u64>().expect("a number")).sum()
    };
    eventually("the count of unlogged refusals is logged", || sum(&server.log()) == 15);
    let log = server.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("refused, retry in 1 d")).collect();
    assert_eq!(lines.len(), 5, "{log}");
    for field in [r#"limit="per-user""#, r#"key=["alice"]"#, "cost=1", r#"transport="http""#] {
        assert!(lines[0].contains(field), "{field}: {}", lines[0]);
    }
}

#[test]
fn refusal_log_is_off_by_default() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, LIMITS);
    let refuse = || server.check(r#"{"route":"/login"}"#);
    assert!(!refuse());
    folder.write("tollkeeper.yaml", &format!("log: {{ refusals: 1000/s }}\n{LIMITS}"));
    eventually("a reload enables logging of refusals", || !refuse() && server.log().contains("refused"));
    assert!(server.log().contains(r#"route="/login""#), "{}", server.log());
    folder.write("tollkeeper.yaml", LIMITS);
    // One line for each reload, and refusals only between the two.
    eventually("the second reload is logged", || server.log().matches("limits version ").count() == 2);
    let refused = |log: &str| log.matches("refused").count();
    let before = refused(&server.log());
    for _ in 0..10 {
        refuse();
    }
    server.signal("TERM");
    assert_eq!(refused(&server.ended().log), before);
}
