//! The calls that operators use to find out why a customer is refused: state, explain, history, dry run.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use serde_json::{Value, json};
use support::*;
use tollkeeper_core::digest::{hex, sha256};

fn config() -> String {
    format!(
        "http: {{ facts: {{ api_key: {{ from: header.authorization, hash: true }} }} }}
limits:
  - {{ name: login, by: email, when: {{ route: /login }}, rate: 2/hour, algorithm: sliding-log }}
  - name: plan
    by: api_key
    tier: plan
    tiers: {{ free: {{ rate: 3/day, burst: 3 }}, pro: {{ rate: 9/day, burst: 9 }}, hourly: {{ rate: 5/hour, burst: 5 }} }}
    default_tier: free
    overrides: {{ \"big-corp\": {{ rate: 20/day, burst: 20 }} }}
  - {{ name: trial, rate: 1/day, mode: shadow }}
admin: {{ token_sha256: {} }}
",
        hex(&sha256(b"boss"))
    )
}

fn call(server: &Server, call: &str, body: &str) -> Answer {
    let (method, path) = call.split_once(' ').unwrap();
    server.client().request_with(method, path, &["authorization: Bearer boss"], body.as_bytes())
}

fn hash(text: &str) -> String {
    hex(&sha256(text.as_bytes())[..16])
}

/// Name, tier, remaining and limit of each state.
fn states(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200, "{answer:?}");
    let limits = answer.json()["limits"].as_array().unwrap().clone();
    limits.iter().map(|it| json!([it["name"], it["tier"], it["remaining"], it["limit"]])).collect()
}

#[test]
fn state_is_shown_regardless_of_when() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config());
    let state = || call(&server, "GET /v1/state?limit=login&email=a@example.test", "");
    assert_eq!(states(&state()), json!([]), "nothing is stored");
    assert!(server.check(r#"{"email":"a@example.test","route":"/login"}"#));
    assert_eq!(states(&state()), json!([["login", null, 1, 2]]));
    assert_eq!(state().json()["limits"][0]["cost"], 1);
    assert_eq!(states(&state()), json!([["login", null, 1, 2]]), "it charges nothing");
    let usage = call(&server, "GET /v1/usage?email=a@example.test", "").json();
    assert_eq!(usage["limits"][0]["name"], "trial", "usage needs the route to list `login`");
    assert_eq!(call(&server, "DELETE /v1/state?limit=login&email=a@example.test", "").json()["done"], true);
    assert_eq!(states(&state()), json!([]));
}

#[test]
fn state_lists_each_tier_that_counts_the_key() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config());
    let state = |key: &str| states(&call(&server, &format!("GET /v1/state?limit=plan&api_key={key}"), ""));
    assert!(server.check(r#"{"api_key":"k1","plan":"free"}"#));
    assert_eq!(state("k1"), json!([["plan", "free", 2, 3], ["plan", "pro", 8, 9]]), "the same count");
    assert!(server.check(r#"{"api_key":"k1","plan":"hourly"}"#));
    let all = json!([["plan", "free", 2, 3], ["plan", "pro", 8, 9], ["plan", "hourly", 4, 5]]);
    assert_eq!(state("k1"), all, "another period has a count of its own");
    assert_eq!(state(&format!("sha256:{}", hash("k1"))), all, "a hashed fact may be sent as its hash");
    assert!(server.check(r#"{"api_key":"big-corp","plan":"free"}"#));
    assert_eq!(state("big-corp"), json!([["plan", null, 19, 20]]), "the override's quota");
}

#[test]
fn ref_of_a_top_key_finds_and_forgets_it() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config());
    let long = "x".repeat(400);
    for _ in 0..4 {
        server.check(r#"{"api_key":"very-secret","plan":"free"}"#);
        server.check(&format!(r#"{{"email":"{long}","route":"/login"}}"#));
    }
    let top = call(&server, "GET /v1/top", "").json();
    let row = |limit: &str| {
        let rows = top["refused"].as_array().unwrap();
        rows.iter().find(|row| row["limit"] == limit).unwrap().clone()
    };
    assert_eq!(row("login")["ref"], Value::Null, "the value is too long to be kept whole");
    let sealed = row("plan")["ref"].as_str().unwrap().to_owned();
    let found = call(&server, &format!("GET /v1/state?ref={sealed}"), "");
    assert_eq!(states(&found), json!([["plan", "free", 0, 3], ["plan", "pro", 6, 9]]));
    assert_eq!(found.json()["limits"][0]["key"], json!([format!("sha256:{}", &hash("very-secret")[..12])]));
    let again = found.json()["ref"].as_str().unwrap().to_owned();
    assert!(!found.text().contains("very-secret") && !found.text().contains(&hash("very-secret")));
    let delete = call(&server, &format!("DELETE /v1/state?ref={again}"), "");
    assert_eq!(delete.json(), json!({ "done": true }), "the answer has a ref, too");
    assert!(server.check(r#"{"api_key":"very-secret","plan":"free"}"#), "the next request passes");

    let invalid = (400, "invalid_fact".to_owned(), Some("ref".to_owned()));
    assert_eq!(call(&server, "GET /v1/state?ref=00ff", "").error(), invalid);
    let both = call(&server, &format!("GET /v1/state?ref={sealed}&limit=plan"), "").error();
    assert_eq!(both, (400, "unknown_field".to_owned(), Some("limit".to_owned())));
    let other = Server::with_config(&folder, &config());
    assert_eq!(call(&other, &format!("GET /v1/state?ref={sealed}"), "").error(), invalid, "of another node");
}

#[test]
fn state_needs_limit_and_every_fact() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config());
    for (path, status, code, at) in [
        ("/v1/state", 400, "missing_field", "limit"),
        ("/v1/state?limit=none&email=a", 404, "unknown_limit", "limit"),
        ("/v1/state?limit=login", 400, "missing_field", "facts.email"),
        ("/v1/state?limit=plan&api_key=sha256:12", 400, "invalid_fact", "facts.api_key"),
    ] {
        let error = call(&server, &format!("GET {path}"), "").error();
        assert_eq!(error, (status, code.to_owned(), Some(at.to_owned())), "{path}");
    }
    for path in ["/v1/state?limit=trial", "/v1/history", "/v1/top"] {
        assert_eq!(server.get(path).error().1, "unauthorized", "{path}");
    }
    assert_eq!(server.post("/v1/explain", r#"{"facts":{}}"#).error().1, "unauthorized");
}

#[test]
fn explain_shows_each_limit_and_no_secret() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config());
    let explain = |facts: &str| call(&server, "POST /v1/explain", &format!(r#"{{"facts":{facts}}}"#));
    let answer = explain(r#"{"api_key":"very-secret","plan":"pro","route":"/search"}"#);
    assert!(!answer.text().contains("very-secret") && !answer.text().contains(&hash("very-secret")));
    assert_eq!(
        answer.json(),
        json!({ "limits": [
            { "name": "login", "mode": "enforce", "applies": false, "key": null, "cost": null,
              "why": "does not apply: `route` is `/search`, which its `when` does not match" },
            { "name": "plan", "mode": "enforce", "applies": true, "cost": null,
              "key": format!("plan:token-bucket:1d:sha256:{}", &hash("very-secret")[..12]),
              "why": "applies: tier `pro` has 9 per day with bursts of 9" },
            { "name": "trial", "mode": "shadow", "applies": true, "key": "trial:sliding-window:1d", "cost": null,
              "why": "applies: 1 per day" },
        ] })
    );
    let by_hash = explain(&format!(r#"{{"api_key":"sha256:{}"}}"#, hash("big-corp")));
    assert!(by_hash.text().contains("the override for"), "{}", by_hash.text());
    assert!(server.check(r#"{"api_key":"very-secret"}"#), "nothing was charged");
    assert_eq!(states(&call(&server, "GET /v1/state?limit=plan&api_key=very-secret", ""))[0][2], 2);
    for (body, code, at) in [
        ("{}", "missing_field", Some("facts")),
        (r#"{"facts":{},"cost":1}"#, "unknown_field", Some("cost")),
        (r#"{"facts":{"ip":"nowhere"}}"#, "invalid_fact", Some("facts.ip")),
        ("[]", "invalid_json", None),
    ] {
        let error = call(&server, "POST /v1/explain", body).error();
        assert_eq!(error, (400, code.to_owned(), at.map(str::to_owned)), "{body}");
    }
}

#[test]
fn dry_run_changes_nothing_and_says_what_would_change() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config());
    let put = |query: &str, body: &str| call(&server, &format!("PUT /v1/limits{query}"), body);
    let body = json!({ "limits": [
        { "name": "login", "by": "email", "when": { "route": "/login" }, "rate": "5/hour", "algorithm": "sliding-log" },
        { "name": "trial", "rate": "1/hour" },
        { "name": "per-ip", "by": "ip", "rate": "10/s" },
    ] })
    .to_string();
    let tried = put("?dry_run=true", &body);
    assert_eq!(tried.status, 200, "{tried:?}");
    assert_eq!(
        tried.json()["changes"],
        json!([
            { "name": "login", "kind": "changed", "keeps_counts": true },
            { "name": "trial", "kind": "changed", "keeps_counts": false },
            { "name": "per-ip", "kind": "added", "keeps_counts": false },
            { "name": "plan", "kind": "removed", "keeps_counts": false },
        ])
    );
    assert_eq!(tried.json()["valid"], true);
    let unknown_fact = r#"{"limits":[{"name":"w","by":"header.x-user","rate":"1/s"}]}"#;
    let warned = put("?dry_run=true", unknown_fact).json()["warnings"].clone();
    assert!(warned[0]["code"].as_str().unwrap().starts_with('W') && warned[0]["line"] == 1, "{warned}");
    assert_eq!(server.get("/v1/limits").json()["version"], 1, "nothing changed");

    let invalid = put("?dry_run=true", "{\"limits\":[\n  {\"name\":\"a\",\"rate\":\"5/1 mn\"}]}");
    assert_eq!(invalid.error(), (400, "invalid_limits".to_owned(), Some("limits".to_owned())));
    assert!(invalid.text().contains("limits:2:"), "it names line and column: {}", invalid.text());
    let stale = server.client().request_with(
        "PUT",
        "/v1/limits?dry_run=true",
        &["authorization: Bearer boss", "if-match: \"7\""],
        body.as_bytes(),
    );
    assert_eq!(stale.error().1, "version_mismatch");
    for query in ["?dry_run=yes", "?dry_run", "?dryrun=true", "?dry_run=true&x=1"] {
        assert_eq!(put(query, &body).error().1, "unknown_field", "{query}");
    }
    assert_eq!(server.get("/v1/limits").json()["version"], 1);
    assert_eq!(put("?dry_run=false", &body).json()["version"], 2, "this one is real");
}

#[test]
fn history_counts_what_the_metrics_count() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &config());
    for _ in 0..5 {
        server.check(r#"{"api_key":"k1"}"#);
    }
    let sum = |counts: &Value| -> u64 { counts.as_array().unwrap().iter().filter_map(Value::as_u64).sum() };
    for (span, step, len) in [("5m", 1, 300), ("1h", 10, 360), ("24h", 300, 288)] {
        let mut history = Value::Null;
        eventually("the counts are recorded", || {
            history = call(&server, &format!("GET /v1/history?span={span}"), "").json();
            sum(&history["requests"]["refused"]) == 2
        });
        assert_eq!((&history["step"], sum(&history["requests"]["allowed"])), (&json!(step), 3), "{span}");
        assert_eq!(sum(&history["limits"]["plan"]["refused"]), 2);
        assert_eq!(sum(&history["limits"]["trial"]["would_refuse"]), 4);
        for list in [&history["requests"]["degraded"], &history["keys"], &history["store"]["state"]] {
            assert_eq!(list.as_array().unwrap().len(), len);
            assert_eq!(list[0], Value::Null, "the server has just started");
            assert!(list[len - 1].is_u64());
        }
        assert!(history["until"].as_u64().unwrap().is_multiple_of(step));
    }
    assert_eq!(call(&server, "GET /v1/history", "").json()["step"], 1);
    for query in ["?span=7m", "?span", "?x=1", "?span=5m&x=1"] {
        assert_eq!(
            call(&server, &format!("GET /v1/history{query}"), "").error().1,
            "unknown_field",
            "{query}"
        );
    }
}
