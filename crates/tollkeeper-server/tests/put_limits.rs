//! Replacing limits through the API while the server runs, also when the config file changes.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use serde_json::{Value, json};
use support::*;
use tollkeeper_core::digest::{hex, sha256};

const TOKEN: &str = "authorization: Bearer boss";

/// A config file with one limit of this burst, and `rest` for all other settings.
fn file(burst: u32, rest: &str) -> String {
    let digest = hex(&sha256(b"boss"));
    format!(
        "admin: {{ token_sha256: {digest} }}\n{rest}\nlimits:\n  - {{ name: few, by: user, rate: 1/day, burst: {burst} }}\n"
    )
}

/// The same limit as a body of `PUT /v1/limits`.
fn body(burst: u32) -> String {
    json!({ "limits": [{ "name": "few", "by": "user", "rate": "1/day", "burst": burst }] }).to_string()
}

fn put(server: &Server, headers: &[&str], body: &str) -> Answer {
    server.client().request_with("PUT", "/v1/limits", &[headers, &[TOKEN]].concat(), body.as_bytes())
}

fn delete(server: &Server, headers: &[&str]) -> Answer {
    server.client().request_with("DELETE", "/v1/limits", &[headers, &[TOKEN]].concat(), b"")
}

/// The active limits: version, source, `shadowed`, `persistent`, and the burst.
fn state(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200, "{answer:?}");
    let active = answer.json();
    assert_eq!(answer.header("etag"), Some(&*format!("\"{}\"", active["version"])));
    json!([
        active["version"],
        active["source"],
        active["shadowed"],
        active["persistent"],
        active["limits"][0]["burst"]
    ])
}

fn remaining(server: &Server) -> u64 {
    let peek = server.post("/v1/peek", r#"{"facts":{"user":"alice"}}"#);
    peek.json()["limits"][0]["remaining"].as_u64().unwrap()
}

#[test]
fn put_limits_apply_at_once_and_keep_counts() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &file(5, ""));
    assert!(server.check(r#"{"user":"alice"}"#));
    assert_eq!(state(&server.get("/v1/limits")), json!([1, "file", false, null, 5]));

    assert_eq!(state(&put(&server, &[], &body(7))), json!([2, "api", true, false, 7]));
    assert_eq!(state(&server.get("/v1/limits")), json!([2, "api", true, false, 7]));
    assert_eq!(remaining(&server), 6, "earlier charges still count");
    assert_eq!(
        state(&put(&server, &[], &body(5))),
        json!([3, "api", false, false, 5]),
        "limits that equal those of the file shadow nothing"
    );
    assert_eq!(state(&put(&server, &[], &body(9))), json!([4, "api", true, false, 9]));

    assert_eq!(state(&delete(&server, &[])), json!([5, "file", false, null, 5]));
    assert_eq!(
        state(&delete(&server, &[])),
        json!([5, "file", false, null, 5]),
        "a second DELETE changes nothing"
    );
    assert_eq!(remaining(&server), 4);
}

#[test]
fn response_of_get_can_be_put() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &file(5, ""));
    let limits = server.get("/v1/limits").json()["limits"].clone();
    let answer = put(&server, &[], &json!({ "limits": limits }).to_string());
    assert_eq!(answer.json()["limits"], limits);
    assert_eq!(answer.json()["shadowed"], false);
}

#[test]
fn put_with_a_stale_version_changes_nothing() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &file(5, ""));
    for tag in ["\"2\"", "1", "W/\"1\"", "\"0\", \"2\"", "nonsense", ""] {
        let header = format!("if-match: {tag}");
        for answer in [put(&server, &[&header], &body(7)), delete(&server, &[&header])] {
            let at = Some("If-Match".to_owned());
            assert_eq!(answer.error(), (412, "version_mismatch".to_owned(), at), "{tag}");
            assert!(answer.text().contains("the active limits are version 1"), "{}", answer.text());
        }
    }
    assert_eq!(state(&server.get("/v1/limits")), json!([1, "file", false, null, 5]));
    assert_eq!(state(&put(&server, &["if-match: \"1\""], &body(7)))[0], 2);
    assert_eq!(state(&put(&server, &["if-match: \"0\", \"2\""], &body(8)))[0], 3);
    assert_eq!(state(&put(&server, &["if-match: *"], &body(9)))[0], 4);
    assert_eq!(put(&server, &["if-match: \"3\""], &body(7)).status, 412, "another PUT came first");
    assert_eq!(state(&delete(&server, &["if-match: \"4\""]))[1], "file");
}

#[test]
fn one_of_many_conditional_puts_wins() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &file(5, ""));
    let won = std::thread::scope(|scope| {
        let server = &server;
        let racers: Vec<_> = (0..16)
            .map(|number| scope.spawn(move || put(server, &["if-match: \"1\""], &body(10 + number)).status))
            .collect();
        racers.into_iter().map(|racer| racer.join().unwrap()).filter(|status| *status == 200).count()
    });
    assert_eq!(won, 1);
    assert_eq!(server.get("/v1/limits").json()["version"], 2);
}

#[test]
fn invalid_limits_change_nothing_and_list_every_error() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &file(5, ""));
    let wrong = r#"{"limits":[{"name":"A B","rate":"5/1 mn"},{"name":"two","by":"user"}]}"#;
    let answer = put(&server, &[], wrong);
    assert_eq!(answer.error(), (400, "invalid_limits".to_owned(), Some("limits".to_owned())));
    let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
    for part in
        ["limits:1:", "is not a duration (try `1m`)", "limit `two`: neither `rate` nor `limit` is set"]
    {
        assert!(message.contains(part), "{part}: {message}");
    }
    for body in [
        "",
        "{}",
        "[]",
        "null",
        "{",
        "limits: []",
        r#"{"limits":{}}"#,
        r#"{"limits":[],"limits":[]}"#,
        r#"{"limits":[],"admin":{"token_sha256":"x"}}"#,
        r#"{"limits":[{"name":"a","rate":"5/s","burst":"${HOME}"}]}"#,
    ] {
        assert_eq!(put(&server, &[], body).error().1, "invalid_limits", "{body}");
    }
    assert_eq!(state(&server.get("/v1/limits")), json!([1, "file", false, null, 5]));
}

#[test]
fn put_limits_do_not_expand_variables() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &file(5, ""));
    let limits = r#"{"limits":[{"name":"a","by":"user","rate":"5/s","allow":["${PATH}"]}]}"#;
    let answer = put(&server, &[], limits);
    assert_eq!(
        answer.json()["limits"][0]["allow"],
        json!(["${PATH}"]),
        "variables are not expanded in a PUT"
    );
}

#[test]
fn put_body_limit_is_4_mib() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &file(5, ""));
    let padded = |size: usize| format!("{}{}", " ".repeat(size - body(7).len()), body(7));
    assert_eq!(put(&server, &[], &padded((4 << 20) + 1)).error().1, "too_large");
    assert_eq!(put(&server, &[], &padded(4 << 20)).status, 200);
}

#[test]
fn file_change_under_put_limits_applies_only_the_rest() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &file(5, ""));
    assert_eq!(state(&put(&server, &[], &body(8))), json!([2, "api", true, false, 8]));

    folder.write("tollkeeper.yaml", &file(3, "share: 1/2"));
    server.logs("are not applied, because limits set through the API are active");
    assert_eq!(state(&server.get("/v1/limits")), json!([3, "api", true, false, 8]));
    assert_eq!(remaining(&server), 4, "half of 8: the share is taken from the file");
    assert_eq!(
        state(&delete(&server, &[])),
        json!([4, "file", false, null, 3]),
        "the current file is active"
    );
    assert_eq!(remaining(&server), 1);

    put(&server, &[], &body(8));
    folder.write("tollkeeper.yaml", "limits: [");
    eventually("the error in the file is reported", || {
        server.get("/v1/limits").json()["error"]
            .as_str()
            .is_some_and(|error| error.contains("tollkeeper.yaml:1"))
    });
    assert_eq!(state(&server.get("/v1/limits")), json!([5, "api", true, false, 8]));
}

#[test]
fn built_in_limits_can_be_replaced_and_restored() {
    let server = Server::start();
    server.logs("/v1/state");
    let log = server.log();
    let token = log.split("Bearer ").nth(1).and_then(|rest| rest.split('\'').next()).unwrap();
    let bearer = format!("authorization: Bearer {token}");
    let answer = server.client().request_with("PUT", "/v1/limits", &[&bearer], body(7).as_bytes());
    assert_eq!(state(&answer), json!([2, "api", true, false, 7]));
    let answer = server.client().request_with("DELETE", "/v1/limits", &[&bearer], b"");
    assert_eq!(state(&answer), json!([3, "builtin", false, null, 5]));
}
