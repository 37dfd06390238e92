//! `/metrics` after known requests.

mod support;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use support::{Folder, Server};
use tollkeeper_core::digest::{hex, sha256};

/// The lines of the page with this prefix and a value other than zero.
fn lines(server: &Server, start: &str) -> Vec<String> {
    let page = server.get("/metrics");
    let lines = page.text().lines().filter(|line| line.starts_with(start) && !line.ends_with(" 0"));
    lines.map(str::to_owned).collect()
}

#[test]
fn request_metrics_are_labelled_with_configured_routes() {
    let folder = Folder::new();
    let config = r#"
http: { routes: ["/users/{id}"] }
limits:
  - { name: login, when: { route: [/login, '/say "hi"\now'] }, by: user, rate: 1/day, burst: 1 }
"#;
    let server = Server::with_config(&folder, config);
    let requests = "tollkeeper_requests_total";
    assert_eq!(server.metric(&format!("{requests}{{transport=\"http\",route=\"\",result=\"error\"}}")), 0.0);
    for route in ["/users/{id}", "/users/{id}", "/users/alice", "unmatched", r#"/say \"hi\"\\now"#] {
        assert!(server.check(&format!(r#"{{"route":"{route}"}}"#)));
    }
    assert!(server.check(r#"{"route":"/login","user":"alice"}"#));
    assert!(!server.check(r#"{"route":"/login","user":"alice"}"#));
    let check = r#"{"facts":{"route":"/login","user":"bob"}}"#;
    server.post("/v1/check/batch", &format!("{{\"checks\":[{check},7]}}"));
    server.post("/v1/check", r#"{"facts":{"route":"/login"},"cost":0}"#);
    let mut counted = lines(&server, requests);
    counted.sort();
    assert_eq!(
        counted,
        [
            r#"tollkeeper_requests_total{transport="http",route="",result="allowed"} 1"#,
            r#"tollkeeper_requests_total{transport="http",route="",result="error"} 2"#,
            r#"tollkeeper_requests_total{transport="http",route="/login",result="allowed"} 2"#,
            r#"tollkeeper_requests_total{transport="http",route="/login",result="refused"} 1"#,
            r#"tollkeeper_requests_total{transport="http",route="/say \"hi\"\\now",result="allowed"} 1"#,
            r#"tollkeeper_requests_total{transport="http",route="/users/{id}",result="allowed"} 2"#,
            r#"tollkeeper_requests_total{transport="http",route="unmatched",result="allowed"} 1"#,
        ]
    );
}

#[test]
fn routes_of_a_reload_are_known() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, "limits: [{ name: all, rate: 100/day }]");
    folder.write(
        "tollkeeper.yaml",
        "http: { routes: [/new] }\nlimits: [{ name: all, rate: 100/day, when: { route: /newer } }]",
    );
    server.logs("limits version 2 is active");
    for route in ["/new", "/newer"] {
        server.check(&format!(r#"{{"route":"{route}"}}"#));
        let series =
            format!("tollkeeper_requests_total{{transport=\"http\",route=\"{route}\",result=\"allowed\"}}");
        assert_eq!(server.metric(&series), 1.0);
    }
}

#[test]
fn remaining_is_counted_as_a_ratio() {
    let folder = Folder::new();
    let server = Server::with_config(
        &folder,
        "limits:
  - { name: four, by: user, rate: 4/day, algorithm: fixed-window }
  - { name: none, by: nobody, rate: 0/s }
",
    );
    // The remaining share is 3/4, 2/4, 1/4, 0, and 0 again.
    for _ in 0..5 {
        server.check(r#"{"user":"alice"}"#);
    }
    server.post("/v1/peek", r#"{"facts":{"user":"alice"}}"#);
    server.check(r#"{"nobody":"bob"}"#);
    let series = "tollkeeper_remaining_ratio";
    let up_to = |end: &str| server.metric(&format!("{series}_bucket{{le=\"{end}\",limit=\"four\"}}"));
    let counts = ["0.0", "0.1", "0.25", "0.5", "0.75", "0.9", "1.0", "+Inf"].map(up_to);
    assert_eq!(counts, [2.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, 5.0]);
    assert_eq!(server.metric(&format!("{series}_sum{{limit=\"four\"}}")), 1.5);
    assert_eq!(server.metric(&format!("{series}_bucket{{le=\"0.0\",limit=\"none\"}}")), 1.0);
}

#[test]
fn full_store_reports_overflows_and_memory() {
    let folder = Folder::new();
    let server = Server::with_config(
        &folder,
        "memory: { max_keys: 10 }\nlimits: [{ name: each, by: user, rate: 5/day }]",
    );
    let empty = server.metric("tollkeeper_store_memory_bytes");
    for user in 0..15 {
        server.check(&format!(r#"{{"user":"{user}"}}"#));
    }
    assert_eq!(server.metric("tollkeeper_keys"), 10.0);
    assert_eq!(server.metric("tollkeeper_keys_overflow_total"), 5.0);
    let full = server.metric("tollkeeper_store_memory_bytes");
    assert!(full >= empty + 10.0 * 32.0, "{empty} to {full}");
    assert!(lines(&server, "tollkeeper_breaker_state").is_empty(), "absent without Redis");
}

#[test]
fn overflow_key_is_reported_in_the_response() {
    let folder = Folder::new();
    let file = folder.write(
        "tollkeeper.yaml",
        &format!(
            "admin: {{ token_sha256: {} }}\nmemory: {{ max_keys: 1 }}\nlimits: [{{ name: each, by: user, rate: 2/day }}]",
            hex(&sha256(b"boss"))
        ),
    );
    let server = Server::with(&["--resp", "127.0.0.1:0", "--config", file.to_str().expect("UTF-8")]);
    let check = |user: &str| server.post("/v1/check", &format!(r#"{{"facts":{{"user":"{user}"}}}}"#)).json();
    assert!(check("known")["limits"][0].get("overflow").is_none());
    for _ in 0..2 {
        let shared = check("new");
        assert_eq!(
            (&shared["allowed"], &shared["limits"][0]["overflow"]),
            (&true.into(), &true.into()),
            "{shared}"
        );
    }
    let refused = check("another");
    assert_eq!(refused["limits"][0]["overflow"], true, "{refused}");
    let reason = refused["reason"].as_str().expect("a refusal has a reason");
    let expected = "the store is full, so this key shares its count with others; raise memory.max_keys";
    assert!(reason.contains(expected), "{reason}");
    let usage =
        server.client().request_with("GET", "/v1/usage?user=another", &["authorization: Bearer boss"], b"");
    assert_eq!(usage.json()["limits"][0]["overflow"], true, "{}", usage.text());
    assert!(check("known")["limits"][0].get("overflow").is_none(), "a known key has its own state");

    let mut resp = std::net::TcpStream::connect(server.resp()).expect("the server listens");
    let mut reply = vec![0; 4_096];
    let mut ask = |user: &str| {
        std::io::Write::write_all(&mut resp, format!("TK.PEEK user {user}\r\n").as_bytes())
            .expect("the command is sent");
        let length = std::io::Read::read(&mut resp, &mut reply).expect("the server replies");
        String::from_utf8_lossy(&reply[..length]).into_owned()
    };
    assert!(ask("another").contains("$8\r\noverflow\r\n:1\r\n"), "{}", ask("another"));
    assert!(!ask("known").contains("overflow"), "{}", ask("known"));
    server.logs("the store is full: ");
    assert_eq!(server.log().matches("the store is full: ").count(), 1, "one line a minute");
}

#[test]
fn refunds_refused_for_space_are_counted_and_logged() {
    let folder = Folder::new();
    let server = Server::with_config(
        &folder,
        "memory: { max_keys: 1 }\nlimits: [{ name: each, by: user, rate: 9/day }]",
    );
    let charge = || server.post("/v1/check", r#"{"facts":{"user":"alice"}}"#).json()["charge"].to_string();
    let correct =
        |path: &str, charge: &str, cost: &str| server.post(path, &format!(r#"{{"charge":{charge}{cost}}}"#));
    assert_eq!(correct("/v1/refund", &charge(), "").text(), r#"{"done":true}"#);
    assert_eq!(server.metric("tollkeeper_refunds_refused_total"), 0.0);
    let charge = charge();
    // The response is the same each time: a used receipt would be `{"done":false}`.
    for (path, cost) in [("/v1/refund", ""), ("/v1/refund", ""), ("/v1/settle", r#","cost":2"#)] {
        let refused = correct(path, &charge, cost);
        assert_eq!(refused.status, 503, "{path}: {}", refused.text());
        assert_eq!(refused.json()["error"]["code"], "store_unavailable", "{path}");
    }
    assert_eq!(server.metric("tollkeeper_refunds_refused_total"), 3.0);
    server.logs("the store has no room for more refund records: ");
    assert!(lines(&server, "tollkeeper_snapshot").is_empty(), "absent without a snapshot");
}

/// `CL.THROTTLE` passes its limit with the call: it is counted, and listed in `/v1/top`, under the name of the command.
#[test]
fn ad_hoc_limits_are_counted_like_limits_of_the_policy() {
    let folder = Folder::new();
    let config = folder.write("tollkeeper.yaml", "limits: [{ name: per-user, by: user, rate: 5/day }]\n");
    let server = Server::with(&["--resp", "127.0.0.1:0", "--config", config.to_str().unwrap()]);
    let mut client = TcpStream::connect(server.resp()).expect("the server listens");
    for _ in 0..3 {
        client.write_all(b"CL.THROTTLE alice 1 2 3600\r\n").expect("the command is sent");
        let mut reply = [0; 4];
        client.read_exact(&mut reply).expect("the server replies");
        assert_eq!(&reply, b"*5\r\n");
        let mut numbers = [0; 256];
        assert!(client.read(&mut numbers).expect("the server replies") > 0);
    }
    assert!(server.check(r#"{"user":"alice"}"#));
    let mut counted = lines(&server, "tollkeeper_checks_total");
    counted.sort();
    assert_eq!(
        counted,
        [
            r#"tollkeeper_checks_total{limit="CL.THROTTLE",result="allowed"} 2"#,
            r#"tollkeeper_checks_total{limit="CL.THROTTLE",result="refused"} 1"#,
            r#"tollkeeper_checks_total{limit="per-user",result="allowed"} 1"#,
        ]
    );
    let top = server.get("/v1/top").json();
    let row = top["refused"].as_array().unwrap().first().expect("one refused key");
    assert_eq!((row["limit"].as_str(), row["key"][0].as_str()), (Some("CL.THROTTLE"), Some("alice")));
}
