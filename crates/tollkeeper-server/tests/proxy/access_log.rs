//! The access log, and its reader.

use std::fs;

use serde_json::Value;

use crate::Proxy;
use crate::support::{eventually, run, text};
use crate::upstream::Upstream;

const CONFIG: &str = "http:\n  routes: [/login, '/users/{id}']\n  facts:\n    key: { from: header.x-key, hash: true }\n    \
                      email: { from: body.email }\nlimits:\n  - { name: per-key, by: key, rate: 3/day }\n  \
                      - { name: login, when: { route: /login }, by: email, rate: 2/day }\n";

#[test]
fn requests_are_logged_and_simulate_reads_them() {
    let upstream = Upstream::ok();
    let folder = crate::support::Folder::new();
    let log = folder.path().join("access.log");
    let proxy = Proxy::start(&upstream.url(), CONFIG, &["--access-log", log.to_str().unwrap()]);
    let mut client = proxy.client();
    let key = "x-key: secret";
    for _ in 0..4 {
        client.request_with("GET", "/users/7?token=hidden", &[key], b"");
    }
    let json = "content-type: application/json";
    assert_eq!(client.request_with("POST", "/login", &[json], br#"{"email":"a@b.test"}"#).status, 200);
    assert_eq!(client.request_with("TRACE", "/users/7", &[], b"").status, 405);
    eventually("all lines are written", || fs::read_to_string(&log).unwrap_or_default().lines().count() == 6);
    let logged = fs::read_to_string(&log).unwrap();
    assert!(!logged.contains("secret") && !logged.contains("hidden"), "{logged}");
    let lines: Vec<Value> = logged.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let field = |name: &str| -> Vec<String> { lines.iter().map(|line| line[name].to_string()).collect() };
    assert_eq!(field("status"), ["200", "200", "200", "429", "200", "405"]);
    let passed = "\"passed\"";
    assert_eq!(field("verdict"), [passed, passed, passed, "\"refused\"", passed, "\"error\""]);
    assert_eq!(field("by")[3], "\"per-key\"");
    assert_eq!(lines[0]["path"], "/users/7");
    assert_eq!(lines[0]["route"], "/users/{id}");
    assert_eq!(lines[4]["facts"]["email"], "a@b.test", "facts of the body are logged, too");
    assert_eq!((&lines[4]["bytes_in"], &lines[4]["bytes_out"]), (&20.into(), &2.into()));
    assert_eq!(lines[0]["upstream"], upstream.address.to_string());
    assert!(lines[0]["facts"]["key"].as_str().unwrap().starts_with("sha256:"), "{logged}");
    assert!(lines[0]["duration"].as_u64() >= lines[0]["upstream_duration"].as_u64(), "{logged}");
    assert_eq!(lines[3]["upstream"], Value::Null);

    // The same policy decides the log as it decided the requests.
    let config = folder.write("tollkeeper.yaml", CONFIG);
    let report = run(&[
        "simulate",
        "--config",
        config.to_str().unwrap(),
        "--format",
        "tollkeeper",
        "--json",
        "--no-progress",
        log.to_str().unwrap(),
    ]);
    let report: Value =
        serde_json::from_slice(&report.stdout).unwrap_or_else(|_| panic!("{}", text(&report.stderr)));
    let text = report.to_string();
    println!("{text}");
    assert_eq!(report["refused"].as_u64().or(report["requests"]["refused"].as_u64()), Some(1), "{text}");
}
