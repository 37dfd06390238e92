//! The views for operators: top keys, the event stream, the index page and the API schema.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};

use serde_json::{Value, json};
use support::*;
use tollkeeper_core::digest::{hex, sha256};
use tollkeeper_engine::api::error::Code;
use tollkeeper_server::transport::http::dashboard::FILES;
use tollkeeper_server::transport::http::endpoint::ROUTES;

const LIMITS: &str = "limits:
  - { name: per-user, by: user, rate: 100/day, burst: 3 }
  - { name: per-key, by: [user, api_key], rate: 100/day, burst: 50 }
http: { facts: { api_key: { from: header.authorization, hash: true } } }
";

#[test]
fn top_keys_are_listed_with_secrets_redacted() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, LIMITS);
    for (user, times) in [("alice", 9), ("bob", 5), ("carol", 1)] {
        for _ in 0..times {
            server.check(&format!(r#"{{"user":"{user}","api_key":"very-secret"}}"#));
        }
        server.post("/v1/peek", &format!(r#"{{"facts":{{"user":"{user}"}}}}"#));
    }
    let answer = server.get("/v1/top");
    assert!(!answer.text().contains("very-secret"), "{}", answer.text());
    let top = answer.json();
    let rows = |kind: &str, limit: &str| -> Vec<Value> {
        let rows = top[kind].as_array().unwrap().iter().filter(|row| row["limit"] == limit);
        rows.map(|row| json!([row["key"][0], row["count"], row["error"]])).collect()
    };
    assert_eq!(
        rows("busiest", "per-user"),
        [json!(["alice", 9, 0]), json!(["bob", 5, 0]), json!(["carol", 1, 0])]
    );
    assert_eq!(rows("refused", "per-user"), [json!(["alice", 6, 0]), json!(["bob", 2, 0])]);
    assert_eq!(rows("refused", "per-key"), [] as [Value; 0]);
    let secret = top["busiest"].as_array().unwrap().iter().find(|row| row["limit"] == "per-key").unwrap();
    let shown = secret["key"][1].as_str().unwrap();
    assert!(shown.starts_with("sha256:") && shown.len() == "sha256:".len() + 12, "{shown}");
    assert!(top["since"].as_u64().unwrap() > 1_700_000_000);
    assert_eq!(server.metric("tollkeeper_starved_keys{limit=\"per-user\"}"), 0.0);
}

/// Subscribes to the event stream and returns its lines.
fn listen(server: &Server) -> impl Iterator<Item = String> + use<> {
    let mut client = server.client();
    client.send(b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let head = client.try_head().expect("the server answers");
    assert_eq!((head.status, head.header("content-type")), (200, Some("text/event-stream")));
    assert_eq!(head.header("cache-control"), Some("no-store"));
    BufReader::new(client.stream).lines().map_while(Result::ok)
}

/// Reads the next event.
fn event(lines: &mut impl Iterator<Item = String>) -> Value {
    let line = lines
        .find_map(|line| line.strip_prefix("data: ").map(str::to_owned))
        .expect("the stream has another event");
    serde_json::from_str(&line).unwrap()
}

#[test]
fn all_subscribers_get_one_event_a_second() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, LIMITS);
    for _ in 0..4 {
        server.check(r#"{"user":"alice"}"#);
    }
    let (mut one, mut other) = (listen(&server), listen(&server));
    let (mut first, mut second) = (event(&mut one), event(&mut other));
    // One of them may have come just before a tick and the other after it.
    while first["t"] != second["t"] {
        let earlier = if first["t"].as_u64() < second["t"].as_u64() {
            (&mut first, &mut one)
        } else {
            (&mut second, &mut other)
        };
        *earlier.0 = event(earlier.1);
    }
    assert_eq!(first, second);
    assert_eq!(
        first,
        json!({
            "t": first["t"], "version": 1, "source": "file", "shadowed": false, "error": null,
            "requests": { "allowed": 3, "refused": 1, "degraded": 0 },
            "limits": {
                "per-user": {
                    "allowed": 3, "refused": 1, "would_refuse": 0, "skipped": 0, "fallback": 0, "starved": 0,
                    "remaining": [2, 0, 0, 1, 1, 0, 0],
                },
                "per-key": {
                    "allowed": 0, "refused": 0, "would_refuse": 0, "skipped": 4, "fallback": 0, "starved": 0,
                    "remaining": [0, 0, 0, 0, 0, 0, 0],
                },
            },
            "store": { "state": "ok", "p99_ms": null }, "keys": 1, "max_keys": 1_000_000,
        })
    );
    assert!(event(&mut one)["t"].as_u64() > first["t"].as_u64());
}

#[test]
fn event_stream_has_64_subscribers_at_most() {
    let server = Server::start();
    let mut subscribers: Vec<_> = (0..64).map(|_| listen(&server)).collect();
    assert_eq!(server.get("/v1/events").error(), (400, "too_many".to_owned(), None));
    subscribers.pop();
    eventually("a new subscriber is accepted", || {
        let mut client = server.client();
        client.send(b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n");
        client.try_head().is_some_and(|head| head.status == 200)
    });
    assert!(server.check(r#"{"user":"alice"}"#), "other clients are served");
}

#[test]
fn subscribers_do_not_delay_shutdown() {
    let server = Server::start();
    let mut lines = listen(&server);
    event(&mut lines);
    server.signal("TERM");
    let rest: Vec<String> = lines.collect();
    assert!(rest.ends_with(&["0".to_owned(), String::new()]), "the chunked response is complete: {rest:?}");
    let ended = server.ended();
    assert_eq!(ended.code, Some(0));
    assert!(!ended.log.contains("requests in flight"), "{}", ended.log);
}

#[test]
fn cross_site_page_cannot_read_events() {
    let server = Server::start();
    let foreign = server.client().request_with("GET", "/v1/events", &["origin: http://evil.example"], b"");
    assert_eq!(foreign.error(), (403, "forbidden".to_owned(), None));
}

/// Every file that the page names is there and is used, and all of them together are within the budget.
#[test]
fn dashboard_is_small_and_complete() {
    let server = Server::start();
    let page = server.get("/");
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    let text = page.text();
    for words in
        ["<title>Tollkeeper</title>", env!("CARGO_PKG_VERSION"), "id=\"sign-in\"", "type=\"password\""]
    {
        assert!(text.contains(words), "without JavaScript the page shows {words}");
    }
    let mut named: BTreeSet<String> = FILES.iter().map(|file| format!("dashboard/{}", file.name)).collect();
    named.remove("dashboard/");
    let (mut seen, mut queue) = (BTreeSet::new(), vec![("/".to_owned(), text.to_owned())]);
    while let Some((path, text)) = queue.pop() {
        // What the page loads, and what its modules import.
        let links = ["href=\"", "src=\"", "from \"./"].iter().flat_map(|start| text.split(start).skip(1));
        for link in links.map(|rest| rest.split('"').next().unwrap()) {
            if link.starts_with('#') || ROUTES.iter().any(|route| route.path == format!("/{link}")) {
                continue;
            }
            let name = link.strip_prefix("dashboard/").unwrap_or(link);
            if seen.insert(format!("dashboard/{name}")) {
                let file = server.get(&format!("/dashboard/{name}"));
                assert_eq!(file.status, 200, "{path} names {link}");
                queue.push((name.to_owned(), file.text().to_owned()));
            }
        }
    }
    assert_eq!(seen, named, "every file is used, and every used file is there");
    let folder = Folder::new();
    let (mut raw, mut compressed) = (0, 0);
    for file in FILES.iter() {
        let written = folder.write("file", std::str::from_utf8(&file.content).unwrap());
        let gzip =
            std::process::Command::new("gzip").args(["-9", "-n", "-c"]).arg(&written).output().unwrap();
        raw += file.content.len();
        compressed += gzip.stdout.len();
    }
    println!("{raw} bytes, {compressed} compressed");
    assert!(raw <= 64 << 10, "{raw} bytes");
    assert!(compressed <= 20 << 10, "{compressed} bytes compressed");
}

#[test]
fn dashboard_has_strict_headers_and_an_etag() {
    let server = Server::start();
    for path in ["/", "/dashboard/app.js", "/dashboard/style.css", "/dashboard/icon.svg"] {
        let file = server.get(path);
        let policy = file.header("content-security-policy").unwrap();
        for words in ["default-src 'none'", "script-src 'self'", "connect-src 'self'", "form-action 'none'"] {
            assert!(policy.contains(words), "{path}: {policy}");
        }
        assert!(!policy.contains("unsafe") && !policy.contains('*'), "{policy}");
        for (name, expected) in [
            ("x-content-type-options", "nosniff"),
            ("referrer-policy", "no-referrer"),
            ("cross-origin-opener-policy", "same-origin"),
            ("cache-control", "no-cache"),
        ] {
            assert_eq!(file.header(name), Some(expected), "{path}");
        }
        let etag = file.header("etag").unwrap();
        let again = |tag: &str| {
            let header = format!("if-none-match: {tag}");
            let answer = server.client().request_with("GET", path, &[&header], b"");
            (answer.status, answer.body.len())
        };
        assert_eq!(again(etag), (304, 0), "{path}");
        assert_eq!(again(&format!("\"x\", W/{etag}")), (304, 0), "{path}");
        assert_eq!(again("\"x\"").0, 200, "{path}");
    }
    assert_eq!(server.get("/dashboard/secret.txt").error().1, "not_found");
    assert_eq!(server.get("/dashboard/").status, 404);
    assert_eq!(server.get("/dashboard/a/b").status, 404);
    assert_eq!(server.post("/dashboard/app.js", "").status, 405);
}

#[test]
fn dashboard_without_the_token_is_the_sign_in_page() {
    let folder = Folder::new();
    let digest = hex(&sha256(b"boss"));
    let server = Server::with_config(&folder, &format!("{LIMITS}admin: {{ token_sha256: {digest} }}\n"));
    let page = server.get("/");
    assert_eq!((page.status, page.header("www-authenticate")), (401, Some("Bearer")));
    assert!(page.text().contains("id=\"sign-in\"") && !page.text().contains("per-user"));
    assert!(page.header("content-security-policy").is_some());
    let signed = server.client().request_with("GET", "/", &["authorization: Bearer boss"], b"");
    assert_eq!(signed.status, 200);
    assert_eq!(server.get("/dashboard/app.js").status, 200, "the files hold no data");
    for path in ["/v1/top", "/v1/history", "/v1/events", "/v1/state?limit=per-user&user=a", "/v1/usage"] {
        assert_eq!(server.get(path).error().1, "unauthorized", "{path}");
    }
}

#[test]
fn the_schema_names_every_call_and_no_other() {
    let schema = Server::start().get("/openapi.json").json();
    let served: BTreeSet<String> = ROUTES
        .iter()
        .map(|route| format!("{} {}", route.method.as_str().to_lowercase(), route.path))
        .collect();
    let paths = schema["paths"].as_object().unwrap().iter();
    let named: BTreeSet<String> = paths
        .flat_map(|(path, calls)| {
            calls.as_object().unwrap().keys().map(move |method| format!("{method} {path}"))
        })
        .collect();
    assert_eq!(served, named);
}

#[test]
fn every_object_in_the_schema_is_closed_and_every_code_listed() {
    fn open(schema: &Value, path: &str, found: &mut Vec<String>) {
        match schema {
            Value::Object(fields) => {
                if fields.get("type") == Some(&json!("object"))
                    && !fields.contains_key("additionalProperties")
                {
                    found.push(path.to_owned());
                }
                fields.iter().for_each(|(name, inner)| open(inner, &format!("{path}/{name}"), found));
            }
            Value::Array(list) => list.iter().for_each(|inner| open(inner, path, found)),
            _ => {}
        }
    }
    let schema = Server::start().get("/openapi.json").json();
    let mut found = Vec::new();
    open(&schema["components"]["schemas"], "", &mut found);
    assert_eq!(found, [] as [&str; 0]);
    let codes =
        &schema["components"]["schemas"]["Error"]["properties"]["error"]["properties"]["code"]["enum"];
    assert_eq!(*codes, json!(Code::ALL.map(Code::name)));
    assert!(!schema.to_string().contains("$defs"), "the schema has no references into `$defs`");
}
