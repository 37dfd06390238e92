//! Access control over HTTP: tokens, origins, `Host`, and redaction of secrets.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::io::Read as _;

use serde_json::json;
use support::*;
use tollkeeper_core::digest::{hex, sha256};

const LIMITS: &str = "limits:
  - { name: per-user, by: user, rate: 100/day, burst: 5 }
  - { name: per-key, by: api_key, rate: 100/day, burst: 5 }
http: { facts: { api_key: { from: header.authorization, hash: true } } }
";

fn digest(token: &str) -> String {
    hex(&sha256(token.as_bytes()))
}

fn ask(server: &Server, call: &str, token: Option<&str>) -> Answer {
    let (method, path) = call.split_once(' ').unwrap();
    let body = if method == "POST" { r#"{"facts":{"user":"alice"}}"# } else { "" };
    let bearer = token.map(|token| format!("authorization: Bearer {token}"));
    server.client().request_with(method, path, bearer.as_deref().as_slice(), body.as_bytes())
}

/// The status of a call with each of these tokens.
fn statuses(server: &Server, call: &str, tokens: &[Option<&str>]) -> Vec<u16> {
    tokens.iter().map(|token| ask(server, call, *token).status).collect()
}

const OPEN: [&str; 2] = ["GET /healthz", "GET /readyz"];
const DATA: [&str; 4] = ["POST /v1/check", "POST /v1/peek", "GET /v1/limits", "GET /metrics"];
const USAGE: &str = "GET /v1/usage?user=alice";
const EYES: [&str; 1] = ["GET /v1/top"];
const ADMIN: [&str; 1] = ["DELETE /v1/state?limit=per-user&user=alice"];

#[test]
fn admin_calls_are_off_without_an_admin_token() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, LIMITS);
    for call in OPEN.into_iter().chain(DATA).chain([USAGE]).chain(EYES) {
        assert_eq!(statuses(&server, call, &[None, Some("any")]), [200, 200], "{call}");
    }
    for call in ADMIN {
        let answer = ask(&server, call, Some("any"));
        assert_eq!(answer.error(), (403, "forbidden".to_owned(), None), "{call}");
        assert!(answer.text().contains("admin.token_sha256"), "{}", answer.text());
    }
}

#[test]
fn admin_token_guards_admin_calls_and_key_views() {
    let folder = Folder::new();
    let yaml = format!("{LIMITS}admin: {{ token_sha256: {} }}\n", digest("boss"));
    let server = Server::with_config(&folder, &yaml);
    let tokens = [None, Some("clerk"), Some("boss")];
    for call in OPEN.into_iter().chain(DATA) {
        assert_eq!(statuses(&server, call, &tokens), [200, 200, 200], "{call}");
    }
    for call in EYES.into_iter().chain([USAGE]).chain(ADMIN) {
        assert_eq!(statuses(&server, call, &tokens), [401, 401, 200], "{call}");
    }
    let refused = ask(&server, EYES[0], None);
    assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
    assert_eq!(refused.error(), (401, "unauthorized".to_owned(), None));
    // The digest is in a config file that others may read: it must not work as a token.
    assert_eq!(ask(&server, ADMIN[0], Some(&digest("boss"))).status, 401);
}

#[test]
fn data_plane_accepts_data_and_admin_tokens() {
    let folder = Folder::new();
    let yaml = format!(
        "{LIMITS}admin: {{ token_sha256: {} }}\nauth: {{ token_sha256: [{}, {}] }}\n",
        digest("boss"),
        digest("clerk"),
        digest("other").to_uppercase()
    );
    let server = Server::with_config(&folder, &yaml);
    let tokens = [None, Some("nobody"), Some("clerk"), Some("other"), Some("boss")];
    for call in OPEN {
        assert_eq!(statuses(&server, call, &tokens), [200; 5], "{call}");
    }
    // Usage accepts the data-plane token, so that a service can show usage to its customers.
    for call in DATA.into_iter().chain([USAGE]) {
        assert_eq!(statuses(&server, call, &tokens), [401, 401, 200, 200, 200], "{call}");
    }
    for call in EYES.into_iter().chain(ADMIN) {
        assert_eq!(statuses(&server, call, &tokens), [401, 401, 401, 401, 200], "{call}");
    }
    let charged = r#"tollkeeper_checks_total{limit="per-user",result="allowed"} 3"#;
    let metrics = ask(&server, "GET /metrics", Some("clerk"));
    assert!(metrics.text().lines().any(|line| line == charged), "calls without a valid token charge nothing");
}

#[test]
fn data_tokens_guard_key_views() {
    let folder = Folder::new();
    let yaml = format!("{LIMITS}auth: {{ token_sha256: [{}] }}\n", digest("clerk"));
    let server = Server::with_config(&folder, &yaml);
    assert_eq!(statuses(&server, EYES[0], &[None, Some("clerk")]), [401, 200]);
    assert_eq!(statuses(&server, USAGE, &[None, Some("clerk")]), [401, 200]);
    assert_eq!(statuses(&server, ADMIN[0], &[None, Some("clerk")]), [403, 403]);
}

#[test]
fn tokens_change_with_the_file() {
    let folder = Folder::new();
    let with = |token: &str| format!("{LIMITS}auth: {{ token_sha256: [{}] }}\n", digest(token));
    let server = Server::with_config(&folder, &with("old"));
    assert_eq!(statuses(&server, DATA[0], &[Some("old"), Some("new")]), [200, 401]);
    folder.write("tollkeeper.yaml", &with("new"));
    eventually("the new token is accepted", || ask(&server, DATA[0], Some("new")).status == 200);
    assert_eq!(ask(&server, DATA[0], Some("old")).status, 401);
    folder.write("tollkeeper.yaml", LIMITS);
    eventually("no token is needed", || ask(&server, DATA[0], None).status == 200);
}

#[test]
fn server_without_config_generates_an_admin_token() {
    let server = Server::start();
    server.logs("/v1/state");
    let log = server.log();
    let token =
        log.split("Bearer ").nth(1).and_then(|rest| rest.split('\'').next()).expect("a token").to_owned();
    assert_eq!(token.len(), 64, "{log}");
    let forget = "DELETE /v1/state?limit=demo&user=alice";
    assert_eq!(statuses(&server, forget, &[None, Some("guess"), Some(&token)]), [401, 401, 200]);
    assert_eq!(
        ask(&server, EYES[0], None).status,
        200,
        "without a config, operator views need no token on loopback"
    );
    assert_eq!(log.matches(&token).count(), 1, "the token is logged once");

    let public = Server::launch(tollkeeper().args(["serve", "--http", "0.0.0.0:0"]));
    assert_eq!(ask(&public, EYES[0], None).status, 401, "operator views need a token beyond loopback");
    assert_eq!(ask(&public, EYES[0], Some(&token)).status, 401, "each server generates its own");
    assert_eq!(ask(&public, DATA[0], None).status, 200);
}

#[test]
fn forgetting_a_key_affects_only_that_key() {
    let folder = Folder::new();
    let yaml = format!("{LIMITS}admin: {{ token_sha256: {} }}\n", digest("boss"));
    let server = Server::with_config(&folder, &yaml);
    for user in ["alice", "bob"] {
        for _ in 0..5 {
            assert!(server.check(&format!(r#"{{"user":"{user}"}}"#)));
        }
    }
    let forget = |query: &str| ask(&server, &format!("DELETE /v1/state?{query}"), Some("boss"));
    assert_eq!(forget("limit=per-user&user=alice").json(), json!({ "done": true }));
    assert_eq!(
        forget("limit=per-user&user=alice").json(),
        json!({ "done": false }),
        "the state was already deleted"
    );
    assert!(server.check(r#"{"user":"alice"}"#));
    assert!(!server.check(r#"{"user":"bob"}"#));
    let at = |at: &str| Some(at.to_owned());
    assert_eq!(forget("user=bob").error(), (400, "missing_field".to_owned(), at("limit")));
    assert_eq!(forget("limit=nothing&user=bob").error(), (404, "unknown_limit".to_owned(), at("limit")));
    assert_eq!(forget("limit=per-user").error(), (400, "missing_field".to_owned(), at("facts.user")));
    assert_eq!(forget("limit=per-user&user=").error(), (400, "missing_field".to_owned(), at("facts.user")));
    assert_eq!(
        forget("limit=per-user&api_key=x").error(),
        (400, "missing_field".to_owned(), at("facts.user"))
    );
    assert_eq!(forget("limit=per-user&user=%ff").error(), (400, "invalid_fact".to_owned(), at("facts.user")));
    assert_eq!(
        forget("limit=per-user&limit=per-user").error(),
        (400, "duplicate_field".to_owned(), at("facts.limit"))
    );
}

#[test]
fn hashed_fact_is_shown_as_12_digits() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, LIMITS);
    let usage = server.get("/v1/usage?user=alice&api_key=very-secret").json();
    assert_eq!(usage["limits"][0]["key"], json!(["alice"]));
    assert_eq!(usage["limits"][1]["key"], json!([format!("sha256:{}", &digest("very-secret")[..12])]));
}

#[test]
fn cross_site_page_cannot_change_anything() {
    let server = Server::start();
    let mut client = server.client();
    let own = format!("origin: http://{}", server.address);
    let body = br#"{"facts":{"user":"alice"}}"#;
    for (method, path) in [
        ("POST", "/v1/check"),
        ("POST", "/v1/refund"),
        ("POST", "/v1/acquire"),
        ("DELETE", "/v1/state?limit=demo&user=alice"),
    ] {
        let foreign = client.request_with(method, path, &["origin: http://evil.example"], body);
        assert_eq!(foreign.error(), (403, "forbidden".to_owned(), None), "{method} {path}");
        assert_ne!(client.request_with(method, path, &[&own], body).status, 403, "{method} {path}");
    }
    assert_eq!(client.request_with("GET", "/v1/limits", &["origin: http://evil.example"], b"").status, 200);
}

const CHECK_ALICE: &str = r#"{"facts":{"user":"alice"}}"#;

/// Sends a request with exactly these lines over a new connection.
fn send(server: &Server, line: &str, headers: &[&str], body: &str) -> Answer {
    let mut request = format!("{line}\r\n");
    headers.iter().for_each(|header| request.push_str(&format!("{header}\r\n")));
    request.push_str(&format!("content-length: {}\r\n\r\n{body}", body.len()));
    let mut client = server.client();
    client.send(request.as_bytes());
    client.answer()
}

/// DNS rebinding: `evil.example` resolves to 127.0.0.1, so the Host and the Origin of its pages agree.
#[test]
fn dns_rebinding_page_is_refused_on_loopback() {
    let folder = Folder::new();
    let server =
        Server::with_config(&folder, &LIMITS.replace("http: {", "http: { hosts: [api.example.test],"));
    let check = "POST /v1/check HTTP/1.1";
    // The fast path and the general path; a `te` header forces the general one.
    for more in ["accept: */*", "te: trailers"] {
        for host in ["evil.example", "evil.example:8080", "localhost.evil.example", ""] {
            let answer = send(&server, check, &[&format!("host: {host}"), more], CHECK_ALICE);
            assert_eq!(answer.error(), (403, "forbidden".to_owned(), None), "{host}, {more}");
            assert!(answer.text().contains("`http.hosts`"), "{}", answer.text());
        }
        let twice = send(&server, check, &["host: localhost", "host: evil.example", more], CHECK_ALICE);
        assert_eq!(twice.status, 403, "{more}");
        let peek = r#"{"facts":{}}"#;
        for host in ["localhost", "127.0.0.1:1", "[::1]", "x.localhost", "api.example.test:80"] {
            let answer = send(&server, check, &[&format!("host: {host}"), more], peek);
            assert_eq!(answer.status, 200, "{host}, {more}");
        }
        assert_eq!(send(&server, check, &[more], peek).status, 200, "a browser always sends a Host");
    }
    let own = ["host: evil.example", "origin: http://evil.example"];
    assert_eq!(send(&server, check, &own, CHECK_ALICE).status, 403);
    for call in DATA.into_iter().chain(EYES).chain(["GET /", "GET /v1/top", "GET /v1/events"]) {
        let (method, path) = call.split_once(' ').unwrap();
        let line = format!("{method} {path} HTTP/1.1");
        assert_eq!(send(&server, &line, &["host: evil.example"], CHECK_ALICE).status, 403, "{call}");
    }
    assert_eq!(server.metric("tollkeeper_keys"), 0.0, "nothing was charged");

    // A host in the request target takes precedence.
    let absolute = |target: &str, host: &str| {
        let line = format!("POST http://{target}/v1/check HTTP/1.1");
        send(&server, &line, &[&format!("host: {host}")], r#"{"facts":{}}"#).status
    };
    assert_eq!((absolute("evil.example", "localhost"), absolute("localhost", "evil.example")), (403, 200));

    // Calls that reveal nothing are open, and gateways pass the Host of their clients.
    for path in ["/healthz", "/readyz", "/openapi.json", "/v1/auth"] {
        let headers =
            ["host: evil.example", "x-forwarded-method: GET", "x-forwarded-uri: /", "x-forwarded-host: a"];
        assert_eq!(send(&server, &format!("GET {path} HTTP/1.1"), &headers, "").status, 200, "{path}");
    }
}

#[test]
fn mapped_loopback_address_is_a_loopback_listener() {
    let folder = Folder::new();
    let file = folder.write("tollkeeper.yaml", LIMITS);
    let mut command = tollkeeper();
    command.args(["serve", "--http", "[::ffff:127.0.0.1]:0", "--config"]).arg(file);
    let server = Server::launch(&mut command);
    let status = |host: &str| send(&server, "POST /v1/check HTTP/1.1", &[host], CHECK_ALICE).status;
    assert_eq!((status("host: evil.example"), status("host: localhost")), (403, 200));
}

#[test]
fn any_host_is_answered_with_a_token_or_beyond_loopback() {
    let folder = Folder::new();
    let host = "host: ratelimit.example";
    let auth = format!("{LIMITS}auth: {{ token_sha256: [{}] }}\n", digest("clerk"));
    let server = Server::with_config(&folder, &auth);
    let (check, bearer) = ("POST /v1/check HTTP/1.1", "authorization: Bearer clerk");
    assert_eq!(send(&server, check, &[host, bearer], CHECK_ALICE).status, 200);
    assert_eq!(send(&server, check, &[host], CHECK_ALICE).status, 401);

    let file = folder.write("open.yaml", LIMITS);
    let mut command = tollkeeper();
    command.args(["serve", "--http", "0.0.0.0:0", "--config"]).arg(file);
    let server = Server::launch(&mut command);
    assert_eq!(send(&server, check, &[host], CHECK_ALICE).status, 200);
}

#[test]
fn web_page_cannot_send_commands_to_resp() {
    let folder = Folder::new();
    let file = folder.write("tollkeeper.yaml", LIMITS);
    let mut command = tollkeeper();
    command.args(["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--config"]).arg(file);
    let server = Server::launch(&mut command);
    let send_resp = |text: &str| {
        let mut client = Client::to(server.resp());
        client.send(text.as_bytes());
        let mut replies = String::new();
        client.stream.read_to_string(&mut replies).unwrap();
        replies
    };
    let command = "CL.THROTTLE victim 4 1 86400";
    let array = "*5\r\n$11\r\nCL.THROTTLE\r\n$6\r\nvictim\r\n$1\r\n4\r\n$1\r\n1\r\n$5\r\n86400\r\n";
    let post =
        format!("POST / HTTP/1.1\r\nHost: 127.0.0.1:6380\r\ncontent-length: 9\r\n\r\n{command}\r\n{array}");
    for request in [
        post.clone(),
        post.replace("POST", "PUT"),
        format!("GET /?{command} HTTP/1.1\r\n{command}\r\n"),
        format!("OPTIONS / HTTP/1.1\r\n{command}\r\n"),
        format!("Host: x\r\n{command}\r\n"),
        // A page that has rebound its name to this address chooses the HTTP method: `DEL` would delete the key `/a`.
        format!("DEL /a HTTP/1.1\r\n{command}\r\n"),
        format!("TK.CHECK /a HTTP/1.1\r\nhost: x\r\n{command}\r\n"),
        format!("\r\nPOST /\r\n{command}\r\n"),
    ] {
        let replies = send_resp(&request);
        assert_eq!(
            replies, "-ERR Protocol error: this port speaks RESP, the protocol of Redis, not HTTP\r\n",
            "{request}"
        );
    }
    // 4 of 5 remain, so this is the first command that was charged.
    assert_eq!(
        send_resp(&format!("{command}\r\nQUIT\r\n")),
        "*5\r\n:0\r\n:5\r\n:4\r\n:-1\r\n:86400\r\n+OK\r\n"
    );
    let unknown = send_resp("*2\r\n$3\r\nGET\r\n$1\r\na\r\nQUIT\r\n");
    assert_eq!(
        unknown, "-ERR unknown command 'GET'\r\n+OK\r\n",
        "a Redis client keeps its connection after an unknown command"
    );
    server.logs("because it sent HTTP");
    assert_eq!(server.log().matches("because it sent HTTP").count(), 1, "logged once a minute");
}
