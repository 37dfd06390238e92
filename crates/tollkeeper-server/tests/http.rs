//! The HTTP API: statuses, headers and bodies of every call.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use serde_json::{Value, json};
use support::*;
use tollkeeper_server::transport::http::endpoint::{Endpoint, ROUTES};

const ALICE: &str = r#"{"facts":{"user":"alice"}}"#;

/// The first limit of a response.
fn first(answer: &Answer) -> Value {
    answer.json()["limits"][0].clone()
}

/// The remaining units of each limit, from a peek.
fn remaining(server: &Server, facts: &str) -> Vec<u64> {
    let peek = server.post("/v1/peek", &format!("{{\"facts\":{facts}}}"));
    assert_eq!(peek.status, 200, "{peek:?}");
    let limits = peek.json()["limits"].clone();
    limits.as_array().unwrap().iter().map(|limit| limit["remaining"].as_u64().unwrap()).collect()
}

/// A number that is more than `from` and at most `to`.
fn between(value: &Value, from: f64, to: f64) -> f64 {
    let number = value.as_f64().unwrap_or_else(|| panic!("{value} is not a number"));
    assert!(number > from && number <= to, "{number} is not in {from}..={to}");
    number
}

const DAY: f64 = 86_400.0;

#[test]
fn sixth_request_is_refused_with_reason_and_retry() {
    let server = Server::start();
    for remaining in (0..5).rev() {
        let answer = server.post("/v1/check", ALICE);
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert_eq!(answer.header("retry-after"), None);
        let answer = answer.json();
        assert_eq!(answer["allowed"], true);
        assert_eq!(answer["binding"], "demo");
        assert_eq!(answer["limits"][0]["remaining"], remaining);
        assert!(answer["charge"].is_string());
        assert!(answer.get("reason").is_none() && answer.get("never").is_none());
    }
    let refused = server.post("/v1/check", ALICE);
    assert_eq!(refused.status, 429);
    let wait: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    // Jittered by up to a tenth, so that not all clients retry at once.
    assert!((1..=3).contains(&wait), "{wait}");
    assert_eq!(refused.header("ratelimit-policy"), Some("\"demo\";q=5;w=10"));
    assert!(refused.header("ratelimit").is_some_and(|state| state.starts_with("\"demo\";r=0;t=")));
    assert_eq!(
        (refused.header("x-ratelimit-limit"), refused.header("x-ratelimit-remaining")),
        (Some("5"), Some("0"))
    );
    let refused = refused.json();
    let retry = between(&refused["retry_after"], 0.0, 2.0);
    let reset = refused["limits"][0]["reset_after"].as_f64().unwrap();
    assert_eq!(
        refused,
        json!({
            "allowed": false, "binding": "demo", "retry_after": retry, "delay": 0, "degraded": null,
            "reason": format!(
                "`demo` allows 5 per 10 seconds with bursts of 5; the next request of cost 1 fits in {retry} s"
            ),
            "charge": null,
            "limits": [{
                "name": "demo", "key": ["alice"], "algorithm": "token-bucket", "mode": "enforce",
                "allowed": false, "cost": 1, "limit": 5, "remaining": 0, "retry_after": retry,
                "reset_after": reset, "degraded": null,
            }],
        })
    );
    assert!(server.check(r#"{"user":"bob"}"#), "other keys are not affected");
}

#[test]
fn every_field_is_present_for_each_algorithm() {
    // The limit's settings, its algorithm, the requests admitted at once, the longest wait for the next one, and the start
    // of the reason.
    for (limit, algorithm, at_once, longest, allows) in [
        ("rate: 24/day\n    burst: 3", "token-bucket", 3_u32, 3_600.0, "24 per day with bursts of 3"),
        (
            "rate: 3/day\n    algorithm: token-bucket",
            "token-bucket",
            3,
            28_800.0,
            "3 per day with bursts of 3",
        ),
        ("rate: 3/day\n    algorithm: fixed-window", "fixed-window", 3, DAY, "3 per day"),
        ("rate: 3/day", "sliding-window", 3, 2.0 * DAY, "3 per day"),
        ("rate: 3/day\n    algorithm: sliding-log", "sliding-log", 3, DAY, "3 per day"),
        (
            "rate: 24/day\n    burst: 2\n    algorithm: leaky-bucket",
            "leaky-bucket",
            2,
            7_200.0,
            "24 per day with a queue of 2",
        ),
    ] {
        let folder = Folder::new();
        let server = Server::with_config(
            &folder,
            &format!("retry_after_jitter: 0%\nlimits:\n  - name: lim-1.x_\n    by: user\n    {limit}\n"),
        );
        let mut admitted = 0;
        let refused = loop {
            let answer = server.post("/v1/check", ALICE);
            if answer.status == 429 {
                break answer;
            }
            admitted += 1;
            assert_eq!((answer.status, answer.header("retry-after")), (200, None));
            let body = answer.json();
            let (charge, reset) =
                (body["charge"].as_str().unwrap(), body["limits"][0]["reset_after"].clone());
            assert!(
                charge.len() <= 250
                    && charge.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.~".contains(&b)),
                "{charge}"
            );
            between(&reset, 0.0, 4.0 * DAY);
            let delay = body["delay"].as_f64().unwrap();
            let remaining = body["limits"][0]["remaining"].as_u64().unwrap();
            if algorithm == "leaky-bucket" {
                // The first request is not delayed, each later one is delayed by an hour more than the one before it.
                let due = 3_600.0 * f64::from(admitted - 1);
                assert!(delay <= due && delay >= due - 60.0, "{delay}");
            } else {
                assert_eq!((delay, remaining), (0.0, u64::from(at_once - admitted)));
            }
            assert_eq!(
                body,
                json!({
                    "allowed": true, "binding": "lim-1.x_", "retry_after": null, "delay": body["delay"], "degraded": null,
                    "charge": charge,
                    "limits": [{
                        "name": "lim-1.x_", "key": ["alice"], "algorithm": algorithm, "mode": "enforce", "allowed": true,
                        "cost": 1, "limit": at_once, "remaining": remaining, "retry_after": null, "reset_after": reset,
                        "degraded": null,
                    }],
                })
            );
        };
        assert!((at_once..=at_once + 1).contains(&admitted), "{algorithm} admitted {admitted}");
        let body = refused.json();
        let retry = between(&body["retry_after"], 0.0, longest);
        assert_eq!(refused.header("retry-after"), Some(&*retry.ceil().to_string()), "{algorithm}");
        let reason = body["reason"].as_str().unwrap();
        let start = format!("`lim-1.x_` allows {allows}; the next request of cost 1 fits in ");
        assert!(reason.starts_with(&start), "{reason}");
        assert_eq!(
            body,
            json!({
                "allowed": false, "binding": "lim-1.x_", "retry_after": retry, "delay": 0, "degraded": null,
                "reason": reason, "charge": null,
                "limits": [{
                    "name": "lim-1.x_", "key": ["alice"], "algorithm": algorithm, "mode": "enforce", "allowed": false,
                    "cost": 1, "limit": at_once, "remaining": 0, "retry_after": retry,
                    "reset_after": body["limits"][0]["reset_after"], "degraded": null,
                }],
            }),
            "{algorithm}"
        );
    }
}

#[test]
fn request_that_never_fits_has_no_retry_after() {
    let folder = Folder::new();
    let server = Server::with_config(
        &folder,
        "limits:
  - { name: small, by: user, rate: 10/day, burst: 3 }
  - { name: nothing, by: closed, rate: 0/s }
  - { name: strict, when: { route: /strict }, by: [user, tenant], rate: 10/day, missing: deny }
",
    );
    for (body, binding, key, reason) in [
        (
            r#"{"facts":{"user":"alice"},"cost":4}"#,
            "small",
            json!(["alice"]),
            "`small` allows 10 per day with bursts of 3; a request of cost 4 never fits (at most 3)",
        ),
        (
            r#"{"facts":{"user":"alice"},"cost":2147483648}"#,
            "small",
            json!(["alice"]),
            "`small` allows 10 per day with bursts of 3; a request of cost 2147483648 never fits (at most 3)",
        ),
        (
            r#"{"facts":{"closed":"today"}}"#,
            "nothing",
            json!(["today"]),
            "`nothing` allows nothing here, and waiting does not help",
        ),
        (
            r#"{"facts":{"route":"/strict","user":"alice"}}"#,
            "strict",
            json!(["alice", null]),
            "`strict` needs the fact `tenant`, which this request does not have",
        ),
        (
            r#"{"facts":{"route":"/strict","tenant":"t","user":""}}"#,
            "strict",
            json!([null, "t"]),
            "`strict` needs the fact `user`, which this request does not have",
        ),
    ] {
        let answer = server.post("/v1/check", body);
        assert_eq!((answer.status, answer.header("retry-after")), (429, None), "{body}");
        let answer_body = answer.json();
        let limit =
            answer_body["limits"].as_array().unwrap().iter().find(|limit| limit["name"] == binding).unwrap();
        assert_eq!(limit["key"], key, "{body}");
        for (never, name) in [(&answer_body, "binding"), (limit, "name")] {
            assert_eq!(
                (&never["allowed"], &never["retry_after"], &never["never"], &never[name]),
                (&json!(false), &Value::Null, &json!(true), &json!(binding)),
                "{body}"
            );
        }
        assert_eq!((&answer_body["reason"], &answer_body["charge"]), (&json!(reason), &Value::Null));
    }
    assert_eq!(remaining(&server, r#"{"user":"alice"}"#), [3], "the request charged nothing");
}

#[test]
fn never_binds_before_waits_then_the_longest_wait() {
    let folder = Folder::new();
    let server = Server::with_config(
        &folder,
        "limits:
  - { name: quick, by: user, rate: 100/day, burst: 1 }
  - { name: slow, by: user, rate: 10/day, burst: 1 }
  - { name: hopeless, when: { route: /x }, by: user, rate: 0/s }
",
    );
    assert!(server.check(r#"{"user":"alice"}"#));
    let waits = server.post("/v1/check", ALICE);
    let body = waits.json();
    assert_eq!((&body["binding"], body.get("never")), (&json!("slow"), None));
    let (quick, slow) = (&body["limits"][0]["retry_after"], &body["limits"][1]["retry_after"]);
    assert!(between(quick, 0.0, 864.0) < between(slow, 864.0, 8_640.0));
    assert_eq!(&body["retry_after"], slow);

    let never = server.post("/v1/check", r#"{"facts":{"user":"alice","route":"/x"}}"#);
    let body = never.json();
    assert_eq!(
        (&body["binding"], &body["never"], &body["retry_after"]),
        (&json!("hopeless"), &json!(true), &Value::Null)
    );
    assert_eq!(never.header("retry-after"), None);
    let never: Vec<_> =
        body["limits"].as_array().unwrap().iter().map(|limit| limit.get("never").is_some()).collect();
    assert_eq!(never, [false, false, true], "`never` is reported for each limit");
    assert!(body["limits"][1]["retry_after"].is_number());
}

#[test]
fn scarcest_limit_binds_and_refusal_charges_nothing() {
    let folder = Folder::new();
    let server = Server::with_config(
        &folder,
        "limits:
  - { name: wide, by: ip, rate: 100/day, burst: 10 }
  - { name: narrow, by: user, rate: 10/day, burst: 2 }
",
    );
    let facts = r#"{"ip":"192.0.2.7","user":"alice"}"#;
    assert_eq!(remaining(&server, facts), [10, 2]);
    let body = format!("{{\"facts\":{facts},\"cost\":2}}");
    let admitted = server.post("/v1/check", &body).json();
    assert_eq!(admitted["binding"], "narrow");
    let names: Vec<_> = admitted["limits"].as_array().unwrap().iter().map(|limit| &limit["name"]).collect();
    assert_eq!(names, ["wide", "narrow"], "limits are listed in config order, whichever binds");
    assert_eq!(remaining(&server, facts), [8, 0]);

    let refused = server.post("/v1/check", &body);
    assert_eq!(refused.status, 429);
    let limits = refused.json()["limits"].clone();
    assert_eq!((&limits[0]["allowed"], &limits[0]["remaining"]), (&json!(true), &json!(8)));
    assert_eq!((&limits[1]["allowed"], &limits[1]["remaining"]), (&json!(false), &json!(0)));
    assert_eq!(limits[0]["retry_after"], Value::Null, "the other limit allows the request");
    assert_eq!(remaining(&server, facts), [8, 0], "a refused request is charged to no limit");
    let other = r#"{"ip":"192.0.2.7","user":"bob"}"#;
    assert_eq!(remaining(&server, other), [8, 2], "the same address, another user");
}

#[test]
fn shadow_limit_counts_but_never_refuses() {
    let folder = Folder::new();
    let server = Server::with_config(
        &folder,
        "limits:
  - { name: trial, by: user, rate: 10/day, burst: 1, mode: shadow }
  - { name: off, by: user, rate: 10/day, burst: 1, mode: 'off' }
  - { name: real, when: { route: /real }, by: user, rate: 10/day, burst: 5 }
  - { name: priced, when: { route: /priced }, rate: 10/day, cost: tokens, mode: shadow }
",
    );
    for (time, allowed) in [(1, true), (2, false), (3, false)] {
        let answer = server.post("/v1/check", ALICE);
        assert_eq!((answer.status, answer.header("retry-after")), (200, None));
        let body = answer.json();
        assert_eq!((&body["allowed"], &body["binding"]), (&json!(true), &Value::Null), "only shadow limits");
        assert_eq!((body.get("reason"), body.get("never"), &body["retry_after"]), (None, None, &Value::Null));
        assert_eq!(body["limits"].as_array().unwrap().len(), 1, "a limit that is off is not listed");
        let limit = &body["limits"][0];
        assert_eq!(
            (&limit["name"], &limit["mode"], &limit["allowed"]),
            (&json!("trial"), &json!("shadow"), &json!(allowed)),
            "time {time}"
        );
        assert_eq!(
            limit["retry_after"].is_number(),
            !allowed,
            "a shadow limit reports the wait it would impose"
        );
    }
    let both = server.post("/v1/check", r#"{"facts":{"user":"alice","route":"/real"}}"#).json();
    assert_eq!(
        (&both["binding"], &both["allowed"]),
        (&json!("real"), &json!(true)),
        "the enforced limit binds"
    );
    assert_eq!(both["limits"].as_array().unwrap().len(), 2);
    let skipped = server.post("/v1/check", r#"{"facts":{"user":"alice","route":"/priced"}}"#);
    assert_eq!(skipped.status, 200, "an invalid cost for a shadow limit does not fail the request");
    assert_eq!(skipped.json()["limits"].as_array().unwrap().len(), 1);
    let series = |result: &str| {
        server.metric(&format!("tollkeeper_checks_total{{limit=\"trial\",result=\"{result}\"}}"))
    };
    assert_eq!((series("allowed"), series("refused"), series("would_refuse")), (1.0, 0.0, 4.0));
}

#[test]
fn request_without_limits_is_allowed() {
    let server = Server::start();
    for facts in ["{}", r#"{"user":""}"#, r#"{"User":"alice"}"#, r#"{"tenant":"acme"}"#] {
        let answer = server.post("/v1/check", &format!("{{\"facts\":{facts},\"cost\":2147483648}}"));
        assert_eq!((answer.status, answer.header("retry-after")), (200, None));
        assert_eq!(
            answer.json(),
            json!({
                "allowed": true, "binding": null, "retry_after": null, "delay": 0, "degraded": null, "charge": null,
                "limits": [],
            }),
            "{facts}"
        );
    }
    assert_eq!(server.metric("tollkeeper_skipped_total{limit=\"demo\"}"), 4.0);
}

#[test]
fn check_skips_concurrency_limits() {
    let folder = Folder::new();
    let server = Server::with_config(
        &folder,
        "limits:
  - { name: exports, by: user, algorithm: concurrency, limit: 2, ttl: 60s }
  - { name: calls, by: user, rate: 10/day, burst: 9 }
",
    );
    for left in [8, 7, 6] {
        let check = server.post("/v1/check", ALICE).json();
        assert_eq!(check["limits"].as_array().unwrap().len(), 1, "{check}");
        assert_eq!(
            (&check["limits"][0]["name"], &check["limits"][0]["remaining"]),
            (&json!("calls"), &json!(left))
        );
    }
    let slots = json!({
        "name": "exports", "key": ["alice"], "algorithm": "concurrency", "mode": "enforce", "allowed": true, "cost": 1,
        "limit": 2, "remaining": 2, "retry_after": null, "reset_after": null, "degraded": null,
    });
    let batch = server.post("/v1/check/batch", &format!("{{\"checks\":[{ALICE}]}}")).json();
    assert_eq!(batch["decisions"][0]["limits"].as_array().unwrap().len(), 1);
    let peek = server.post("/v1/peek", ALICE).json();
    assert_eq!(peek["limits"][0], slots);
    let usage = server.get("/v1/usage?user=alice").json();
    assert_eq!(usage["limits"][0], slots);
    assert_eq!(usage["limits"].as_array().unwrap().len(), 2);
}

#[test]
fn an_absent_fact_is_null_in_the_key_and_values_are_text() {
    let folder = Folder::new();
    let server = Server::with_config(
        &folder,
        "limits:\n  - { name: shared, by: [tenant, user], rate: 10/day, burst: 9, missing: share }\n",
    );
    for (facts, key) in [
        (r#"{"tenant":"acme","user":"alice"}"#, json!(["acme", "alice"])),
        (r#"{"tenant":"acme"}"#, json!(["acme", null])),
        (r#"{"user":"alice","tenant":""}"#, json!([null, "alice"])),
        ("{}", json!([null, null])),
        (r#"{"tenant":1,"user":true}"#, json!(["1", "true"])),
        (r#"{"tenant":"1","user":"true"}"#, json!(["1", "true"])),
        (r#"{"tenant":-9223372036854775809,"user":false}"#, json!(["-9223372036854775809", "false"])),
        (
            r#"{"tenant":"a\"b\\c\n\u0000\u001f\u007f","user":"é😀\u2028"}"#,
            json!(["a\"b\\c\n\0\u{1f}\u{7f}", "é😀\u{2028}"]),
        ),
    ] {
        assert_eq!(
            first(&server.post("/v1/check", &format!("{{\"facts\":{facts}}}")))["key"],
            key,
            "{facts}"
        );
    }
    assert_eq!(remaining(&server, r#"{"tenant":"1","user":true}"#), [7], "`1` and \"1\" are one key");
    assert_eq!(remaining(&server, "{}"), [8], "requests without these facts share one key");
    assert_eq!(
        remaining(&server, r#"{"tenant":"null","user":"null"}"#),
        [9],
        "the text `null` is not a missing fact"
    );
}

#[test]
fn an_address_is_canonical_and_masked_in_the_key() {
    let folder = Folder::new();
    let server = Server::with_config(
        &folder,
        "limits:\n  - { name: per-ip, by: ip, rate: 10/day, burst: 9, allow: [10.0.0.0/8, '2001:db8:1::7'] }\n",
    );
    for (ip, key) in [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("::ffff:c000:207", "192.0.2.7"),
        ("2001:db8::1", "2001:db8::"),
        ("2001:DB8:0:0:ffff:ffff:ffff:ffff", "2001:db8::"),
        ("2001:db8:0:1::1", "2001:db8:0:1::"),
        ("2001:db8:1::8", "2001:db8:1::"),
        ("::1", "::"),
    ] {
        assert_eq!(
            first(&server.post("/v1/check", &format!("{{\"facts\":{{\"ip\":\"{ip}\"}}}}")))["key"],
            json!([key]),
            "{ip}"
        );
    }
    assert_eq!(remaining(&server, r#"{"ip":"192.0.2.7"}"#), [6], "one client in three spellings");
    assert_eq!(remaining(&server, r#"{"ip":"2001:db8::2"}"#), [7], "one key for the /64");
    for allowed in ["10.1.2.3", "::ffff:10.1.2.3", "2001:db8:1::7"] {
        let answer = server.post("/v1/check", &format!("{{\"facts\":{{\"ip\":\"{allowed}\"}}}}"));
        assert_eq!(
            answer.json()["limits"],
            json!([]),
            "{allowed}: the allow list is matched before the address is masked"
        );
    }
    let usage = server.get("/v1/usage?ip=%3A%3Affff%3A192.0.2.7").json();
    assert_eq!(
        (&usage["limits"][0]["key"], &usage["limits"][0]["remaining"]),
        (&json!(["192.0.2.7"]), &json!(6))
    );
}

#[test]
fn cost_is_explicit_or_from_a_fact() {
    let folder = Folder::new();
    let server = Server::with_config(
        &folder,
        "limits:
  - { name: calls, by: key, rate: 100/day, burst: 50 }
  - { name: tokens, by: key, rate: 1000/day, algorithm: sliding-log, cost: tokens }
",
    );
    let check = |facts: &str, cost: &str| {
        server.post("/v1/check", &format!("{{\"facts\":{{\"key\":\"k\"{facts}}}{cost}}}"))
    };
    let answer = check(r#","tokens":250"#, r#","cost":3"#).json();
    let costs: Vec<_> = answer["limits"].as_array().unwrap().iter().map(|limit| &limit["cost"]).collect();
    assert_eq!(costs, [&json!(3), &json!(250)]);
    assert_eq!(remaining(&server, r#"{"key":"k","tokens":"1"}"#), [47, 750]);
    let free = check(r#","tokens":0"#, "").json();
    assert_eq!(
        (&free["allowed"], &free["limits"][1]["cost"], &free["limits"][1]["remaining"]),
        (&json!(true), &json!(0), &json!(750))
    );
    for (facts, problem) in [
        ("", "absent"),
        (r#","tokens":"""#, "empty"),
        (r#","tokens":-1"#, "negative"),
        (r#","tokens":"many""#, "not a number"),
        (r#","tokens":true"#, "not a number"),
        (r#","tokens":2147483649"#, "too large"),
        (r#","tokens":9223372036854775808"#, "too large"),
    ] {
        let answer = check(facts, "");
        assert_eq!(
            answer.error(),
            (400, "invalid_cost".to_owned(), Some("facts.tokens".to_owned())),
            "{problem}"
        );
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("`tokens`"), "{problem}: {message}");
    }
    assert_eq!(
        remaining(&server, r#"{"key":"k","tokens":"1"}"#),
        [46, 750],
        "a bad cost charges no other limit"
    );
    let usage = server.get("/v1/usage?key=k").json();
    assert_eq!(usage["limits"][1]["cost"], 1, "usage peeks with a cost of 1, whatever a check costs");
}

#[test]
fn tier_and_override_select_the_quota() {
    let folder = Folder::new();
    let server = Server::with_config(
        &folder,
        "limits:
  - name: plan
    by: api_key
    tier: plan
    tiers: { free: { rate: 60/day, burst: 2 }, pro: { rate: 600/day, burst: 20 }, enterprise: unlimited }
    default_tier: free
    overrides: { acme: { rate: 6000/day, burst: 200 } }
",
    );
    for (facts, limit) in [
        (r#"{"api_key":"a","plan":"free"}"#, json!(2)),
        (r#"{"api_key":"b","plan":"pro"}"#, json!(20)),
        (r#"{"api_key":"c","plan":"enterprise"}"#, Value::Null),
        (r#"{"api_key":"d","plan":"gold"}"#, json!(2)),
        (r#"{"api_key":"e"}"#, json!(2)),
        (r#"{"api_key":"acme","plan":"free"}"#, json!(200)),
    ] {
        assert_eq!(
            first(&server.post("/v1/check", &format!("{{\"facts\":{facts}}}")))["limit"],
            limit,
            "{facts}"
        );
    }
    assert_eq!(server.metric("tollkeeper_unknown_tier_total{limit=\"plan\"}"), 2.0);
}

#[test]
fn peek_shows_the_decision_with_status_200() {
    let folder = Folder::new();
    let server =
        Server::with_config(&folder, "limits:\n  - { name: few, by: user, rate: 10/day, burst: 2 }\n");
    let free = json!({
        "allowed": true, "binding": "few", "retry_after": null, "delay": 0, "degraded": null, "charge": null,
        "limits": [{
            "name": "few", "key": ["alice"], "algorithm": "token-bucket", "mode": "enforce", "allowed": true, "cost": 1,
            "limit": 2, "remaining": 2, "retry_after": null, "reset_after": 0, "degraded": null,
        }],
    });
    for _ in 0..5 {
        let peek = server.post("/v1/peek", ALICE);
        assert_eq!(
            (peek.status, peek.json()),
            (200, free.clone()),
            "a peek charges nothing, however often it is repeated"
        );
    }
    assert!(server.check(r#"{"user":"alice"}"#) && server.check(r#"{"user":"alice"}"#));
    let peek = server.post("/v1/peek", ALICE);
    assert_eq!((peek.status, peek.header("retry-after")), (200, None), "a peek is always 200");
    let body = peek.json();
    assert_eq!(
        (&body["allowed"], &body["charge"], &body["binding"]),
        (&json!(false), &Value::Null, &json!("few"))
    );
    between(&body["retry_after"], 0.0, 8_640.0);
    assert!(
        body["reason"].as_str().unwrap().starts_with("`few` allows 10 per day with bursts of 2; "),
        "{body}"
    );
    let never = server.post("/v1/peek", r#"{"facts":{"user":"bob"},"cost":3}"#);
    assert_eq!(
        (never.status, &never.json()["never"], &never.json()["allowed"]),
        (200, &json!(true), &json!(false))
    );
    let costly = first(&server.post("/v1/peek", r#"{"facts":{"user":"bob"},"cost":2}"#));
    assert_eq!(
        (&costly["cost"], &costly["allowed"], &costly["remaining"]),
        (&json!(2), &json!(true), &json!(2))
    );
    let checks =
        |result| server.metric(&format!("tollkeeper_checks_total{{limit=\"few\",result=\"{result}\"}}"));
    assert_eq!((checks("allowed"), checks("refused")), (2.0, 0.0), "peeks are not counted");
}

#[test]
fn a_peek_shows_the_delay_that_a_check_would_get() {
    let folder = Folder::new();
    let server = Server::with_config(
        &folder,
        "limits:\n  - { name: queue, by: user, rate: 24/day, burst: 5, algorithm: leaky-bucket }\n",
    );
    let delay = |path: &str| server.post(path, ALICE).json()["delay"].as_f64().unwrap();
    assert_eq!((delay("/v1/peek"), delay("/v1/check")), (0.0, 0.0));
    for due in [3_600.0, 7_200.0] {
        let (peek, check) = (delay("/v1/peek"), delay("/v1/check"));
        assert!(check <= peek && peek <= due && check > due - 60.0, "{peek} {check}");
    }
    let body = server.post("/v1/peek", r#"{"facts":{"user":"alice"},"cost":5}"#).json();
    assert_eq!(
        (&body["allowed"], &body["delay"]),
        (&json!(false), &json!(0)),
        "a refused request is not delayed"
    );
}

#[test]
fn usage_reads_facts_from_the_query() {
    let folder = Folder::new();
    let server = Server::with_config(
        &folder,
        "limits:
  - { name: per-user, by: user, rate: 10/day, burst: 9 }
  - { name: per-pair, by: [user, 'x-y.z:/'], rate: 10/day, burst: 3 }
",
    );
    assert!(server.check(r#"{"user":"a b&c=d+é%","x-y.z:/":"1"}"#));
    for query in [
        "user=a+b%26c%3Dd%2B%c3%a9%25&x-y.z:/=1",
        "user=a%20b%26c=d%2b%C3%A9%25&x-y.z%3a%2F=1",
        "&x-y.z:/=1&&user=a+b%26c=d%2b%C3%A9%25&",
    ] {
        let usage = server.get(&format!("/v1/usage?{query}"));
        assert_eq!((usage.status, usage.header("content-type")), (200, Some("application/json")), "{query}");
        let usage = usage.json();
        let reset = usage["limits"][0]["reset_after"].clone();
        between(&reset, 0.0, 8_640.0);
        assert_eq!(
            usage["limits"][0],
            json!({
                "name": "per-user", "key": ["a b&c=d+é%"], "algorithm": "token-bucket", "mode": "enforce", "allowed": true,
                "cost": 1, "limit": 9, "remaining": 8, "retry_after": null, "reset_after": reset, "degraded": null,
            }),
            "{query}"
        );
        assert_eq!((&usage["limits"][1]["remaining"], usage.as_object().unwrap().len()), (&json!(2), 1));
    }
    for query in ["", "?", "?user", "?user=", "?tenant=acme"] {
        assert_eq!(server.get(&format!("/v1/usage{query}")).json(), json!({ "limits": [] }), "{query}");
    }
    assert_eq!(remaining(&server, r#"{"user":"a b&c=d+é%"}"#), [8], "usage charges nothing");
}

#[test]
fn batch_is_decided_in_order_with_errors_in_place() {
    let folder = Folder::new();
    let server =
        Server::with_config(&folder, "limits:\n  - { name: few, by: user, rate: 10/day, burst: 3 }\n");
    let checks = [
        ALICE,
        r#"{"facts":{"user":"alice"},"cost":0}"#,
        r#"{"facts":{"user":"alice"},"cost":2}"#,
        "7",
        r#"{"facts":{"user":"alice","user":"bob"}}"#,
        ALICE,
        r#"{"facts":{"user":"bob"}}"#,
        r#"{"facts":{"user":"alice"},"cost":4}"#,
        r#"{"facts":{"user":null}}"#,
        r#"{"fact":{"user":"alice"}}"#,
        "{}",
        r#"{"facts":{}}"#,
        "null",
        "[]",
        r#"{"facts":{"ip":"here"}}"#,
    ];
    let answer = server.post("/v1/check/batch", &format!("{{ \"checks\" : [\n{}] }}", checks.join(" ,\t")));
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")));
    assert_eq!(answer.header("retry-after"), None, "some checks are refused, but not the batch");
    let body = answer.json();
    assert_eq!(body.as_object().unwrap().len(), 1);
    let decisions = body["decisions"].as_array().unwrap();
    let results: Vec<String> = decisions
        .iter()
        .map(|decision| match decision.get("error") {
            Some(error) => {
                assert_eq!(
                    (decision.as_object().unwrap().len(), error.as_object().unwrap().len()),
                    (1, 3),
                    "{decision}"
                );
                assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()));
                format!("{} {}", error["code"].as_str().unwrap(), error["where"].as_str().unwrap_or("-"))
            }
            None => format!("{} {}", decision["allowed"], decision["limits"][0]["remaining"]),
        })
        .collect();
    assert_eq!(
        results,
        [
            "true 2",
            "invalid_cost cost",
            "true 0",
            "invalid_json -",
            "duplicate_field facts.user",
            "false 0",
            "true 2",
            "false 0",
            "invalid_fact facts.user",
            "unknown_field fact",
            "missing_field facts",
            "true null",
            "invalid_json -",
            "invalid_json -",
            "invalid_fact facts.ip",
        ]
    );
    assert!(decisions[0]["charge"].is_string() && decisions[5]["charge"].is_null());
    assert!(decisions[5]["retry_after"].is_number() && decisions[5]["reason"].is_string());
    assert_eq!((&decisions[7]["never"], &decisions[7]["retry_after"]), (&json!(true), &Value::Null));
    assert_eq!(remaining(&server, r#"{"user":"alice"}"#), [0]);
    let requests = |result: &str| {
        server.metric(&format!(
            "tollkeeper_requests_total{{transport=\"http\",route=\"\",result=\"{result}\"}}"
        ))
    };
    assert_eq!(
        (requests("allowed"), requests("refused"), requests("error")),
        (4.0, 2.0, 9.0),
        "each counts on its own"
    );
}

#[test]
fn active_limits_are_listed_in_config_form() {
    let server = Server::start();
    let answer = server.get("/v1/limits");
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")));
    assert_eq!(answer.header("etag"), Some("\"1\""));
    let body = answer.json();
    assert!(body["loaded_at"].as_u64().is_some_and(|at| at > 1_700_000_000), "{body}");
    let expected = json!({
        "version": 1, "source": "builtin", "loaded_at": body["loaded_at"], "error": null, "shadowed": false,
        "limits": [{
            "name": "demo", "by": ["user"], "rate": "5/10s", "burst": 5, "algorithm": "token-bucket", "allow": [],
            "missing": "skip", "mode": "enforce", "stagger": false, "on_store_failure": "local", "headers": true,
            "consistency": "exact", "wait_replicas": 0,
        }],
    });
    assert_eq!(body, expected);
}

#[test]
fn listed_limits_are_a_valid_config() {
    let folder = Folder::new();
    let yaml = "limits:
  - { name: per-ip, by: ip, rate: 1000/min, allow: [10.0.0.0/8] }
  - name: login
    when: { route: /login, method: [POST, PUT] }
    unless: { user: 'test-*' }
    by: [email]
    rate: 5/15m
    algorithm: sliding-log
    on_store_failure: deny
    missing: share
    headers: false
  - name: plan
    by: api_key
    tier: plan
    tiers: { free: { rate: 60/min, burst: 10 }, enterprise: unlimited }
    default_tier: free
    overrides: { acme: { rate: 50000/min, burst: 5000 } }
  - { name: tokens, by: api_key, rate: 100000/day, cost: tokens, algorithm: fixed-window, stagger: true, mode: shadow }
  - { name: exports, by: user, algorithm: concurrency, limit: 5 }
";
    let server = Server::with_config(&folder, yaml);
    let body = server.get("/v1/limits").json();
    assert_eq!(body["source"], "file");
    assert_eq!(body["limits"][4]["ttl"], "1m");
    let file = folder.write("again.json", &json!({ "limits": body["limits"] }).to_string());
    let again = Server::with(&["--config", file.to_str().unwrap()]);
    assert_eq!(again.get("/v1/limits").json()["limits"], body["limits"]);
}

#[test]
fn health_and_readiness_are_plain_text() {
    let server = Server::start();
    for (path, body) in [("/healthz", "ok\n"), ("/readyz", "ready\n")] {
        let answer = server.get(path);
        assert_eq!((answer.status, answer.text()), (200, body));
        assert_eq!(answer.header("content-type"), Some("text/plain; charset=utf-8"));
    }
}

#[test]
fn metrics_count_what_was_sent() {
    let folder = Folder::new();
    let server = Server::with_config(
        &folder,
        "limits:
  - { name: a.b-c_d, by: user, rate: 10/day, burst: 3 }
  - { name: shadow, by: user, rate: 10/day, burst: 1, mode: shadow }
  - { name: unused, by: tenant, rate: 10/day, burst: 1 }
",
    );
    let mut client = server.client();
    for _ in 0..5 {
        client.request("POST", "/v1/check", ALICE);
    }
    client.request("POST", "/v1/check", r#"{"facts":{"user":"b\"o\\b\n{}"}}"#);
    client.request("POST", "/v1/check", "nonsense");
    client.request("POST", "/v1/check", r#"{"facts":{"user":"alice"},"cost":0}"#);
    client.request("POST", "/v1/check/batch", &format!("{{\"checks\":[{ALICE},7,{{\"facts\":{{}}}}]}}"));
    // None of these calls makes a decision.
    client.request("POST", "/v1/peek", ALICE);
    client.request("GET", "/v1/usage?user=alice", "");
    client.request("GET", "/v1/limits", "");
    client.request("GET", "/healthz", "");
    client.request("GET", "/nowhere", "");
    client.request("GET", "/v1/check", "");

    let page = client.request("GET", "/metrics", "");
    assert_eq!(page.status, 200);
    assert_eq!(
        page.header("content-type"),
        Some("application/openmetrics-text; version=1.0.0; charset=utf-8")
    );
    let text = page.text();
    let counts: Vec<&str> = text
        .lines()
        .filter(|line| !line.contains("transport=\"grpc\""))
        .filter(|line| {
            ["checks", "skipped", "unknown_tier", "requests", "keys "]
                .iter()
                .any(|name| line.strip_prefix("tollkeeper_").is_some_and(|line| line.starts_with(name)))
        })
        .collect();
    assert_eq!(
        counts,
        [
            "tollkeeper_checks_total{limit=\"a.b-c_d\",result=\"allowed\"} 4",
            "tollkeeper_checks_total{limit=\"a.b-c_d\",result=\"refused\"} 3",
            "tollkeeper_checks_total{limit=\"a.b-c_d\",result=\"would_refuse\"} 0",
            "tollkeeper_checks_total{limit=\"shadow\",result=\"allowed\"} 2",
            "tollkeeper_checks_total{limit=\"shadow\",result=\"refused\"} 0",
            "tollkeeper_checks_total{limit=\"shadow\",result=\"would_refuse\"} 5",
            "tollkeeper_checks_total{limit=\"unused\",result=\"allowed\"} 0",
            "tollkeeper_checks_total{limit=\"unused\",result=\"refused\"} 0",
            "tollkeeper_checks_total{limit=\"unused\",result=\"would_refuse\"} 0",
            "tollkeeper_skipped_total{limit=\"a.b-c_d\"} 1",
            "tollkeeper_skipped_total{limit=\"shadow\"} 1",
            "tollkeeper_skipped_total{limit=\"unused\"} 8",
            "tollkeeper_unknown_tier_total{limit=\"a.b-c_d\"} 0",
            "tollkeeper_unknown_tier_total{limit=\"shadow\"} 0",
            "tollkeeper_unknown_tier_total{limit=\"unused\"} 0",
            "tollkeeper_requests_total{transport=\"http\",route=\"\",result=\"allowed\"} 5",
            "tollkeeper_requests_total{transport=\"http\",route=\"\",result=\"refused\"} 3",
            "tollkeeper_requests_total{transport=\"http\",route=\"\",result=\"degraded\"} 0",
            "tollkeeper_requests_total{transport=\"http\",route=\"\",result=\"error\"} 3",
            "tollkeeper_keys 4",
        ]
    );
    assert!(!text.contains("alice") && !text.contains("b\\\"o"), "keys are never labels");
    assert!(text.ends_with("# EOF\n"), "OpenMetrics requires this last line");
    assert_eq!(server.metric("tollkeeper_config_version"), 1.0);
    assert_eq!(server.metric("tollkeeper_config_reloads_total{result=\"done\"}"), 0.0);

    // Histogram buckets are cumulative, so the last one counts all requests.
    let series = "tollkeeper_request_duration_seconds";
    let buckets: Vec<(f64, u64)> = text
        .lines()
        .filter_map(|line| {
            line.strip_prefix(&format!("{series}_bucket{{le=\""))?.split_once("\",transport=\"http\"} ")
        })
        .map(|(end, count)| (end.parse().unwrap_or(f64::INFINITY), count.parse().unwrap()))
        .collect();
    assert_eq!(buckets.len(), 15, "{text}");
    assert!(buckets.is_sorted(), "{buckets:?}");
    assert_eq!(buckets.last().unwrap(), &(f64::INFINITY, 11));
    assert_eq!(server.metric(&format!("{series}_count{{transport=\"http\"}}")), 11.0);
    assert!(server.metric(&format!("{series}_sum{{transport=\"http\"}}")) > 0.0);
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let family = line.split(['{', ' ']).next().unwrap();
        let family = ["_total", "_bucket", "_count", "_sum"]
            .iter()
            .fold(family, |name, end| name.trim_end_matches(end));
        assert!(
            text.contains(&format!("# TYPE {family} ")) && text.contains(&format!("# HELP {family} ")),
            "{family}"
        );
    }
}

#[test]
fn content_type_is_ignored() {
    let server = Server::start();
    for kind in [
        "",
        "application/json",
        "application/x-www-form-urlencoded",
        "text/plain; charset=utf-16",
        "nonsense",
    ] {
        let header = format!("content-type: {kind}");
        let headers: &[&str] = if kind.is_empty() { &[] } else { &[&header] };
        let answer = server.client().request_with("POST", "/v1/peek", headers, ALICE.as_bytes());
        assert_eq!((answer.status, &answer.json()["binding"]), (200, &json!("demo")), "{kind}");
    }
}

#[test]
fn retry_after_is_in_whole_seconds_rounded_up_and_at_least_one() {
    let folder = Folder::new();
    let server = Server::with_config(
        &folder,
        "retry_after_jitter: 0%
limits:
  - { name: fast, by: fast, rate: 5/s, burst: 1000 }
  - { name: day, by: day, rate: 1/day, burst: 1 }
",
    );
    // A cost of 1000 empties the bucket, which takes 200 s to refill. The cost of the next check determines its wait.
    let check = |fact: &str, cost: u32| {
        server.post("/v1/check", &format!("{{\"facts\":{{\"{fact}\":\"x\"}},\"cost\":{cost}}}"))
    };
    assert_eq!(check("fast", 1_000).status, 200);
    for cost in [500, 300, 200, 999] {
        let refused = check("fast", cost);
        assert_eq!(refused.status, 429);
        let retry = between(&refused.json()["retry_after"], 0.0, f64::from(cost) / 5.0);
        assert_eq!(refused.header("retry-after"), Some(&*retry.ceil().to_string()), "{retry}");
    }
    assert_eq!(check("day", 1).status, 200);
    let refused = check("day", 1);
    let retry = between(&refused.json()["retry_after"], DAY - 60.0, DAY);
    assert_eq!(refused.header("retry-after"), Some(&*retry.ceil().to_string()));
}

#[test]
fn wait_under_a_second_is_reported_as_one() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, "limits:\n  - { name: fast, rate: 1000/s, burst: 1 }\n");
    let mut client = server.client();
    // The bucket refills one token per millisecond, so several quick requests are needed until one is refused.
    let mut refused = None;
    eventually("one request is refused", || {
        let burst =
            [&b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 12\r\n\r\n{\"facts\":{}}"[..];
                8]
                .concat();
        client.send(&burst);
        let answers: Vec<Answer> = (0..8).map(|_| client.answer()).collect();
        refused = answers.into_iter().find(|answer| answer.status == 429);
        refused.is_some()
    });
    let refused = refused.unwrap();
    between(&refused.json()["retry_after"], 0.0, 0.001);
    assert_eq!(refused.header("retry-after"), Some("1"));
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let folder = Folder::new();
    let server =
        Server::with_config(&folder, "limits:\n  - { name: many, by: user, rate: 10/day, burst: 1000 }\n");
    let mut client = server.client();
    let request = |user: usize| {
        let body = format!("{{\"facts\":{{\"user\":\"u{user}\"}}}}");
        format!("POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    };
    for user in 0..100 {
        client.send(request(user).as_bytes());
        assert_eq!(first(&client.answer())["key"], json!([format!("u{user}")]), "sequential requests");
    }
    let all: String = (0..500).map(request).collect();
    client.send(all.as_bytes());
    for user in 0..500 {
        let expected = (json!([format!("u{user}")]), json!(if user < 100 { 998 } else { 999 }));
        let limit = first(&client.answer());
        assert_eq!((&limit["key"], &limit["remaining"]), (&expected.0, &expected.1), "pipelined requests");
    }
    // Errors are answered in order, too, and keep the connection open.
    let bad = "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\n{";
    client.send(
        format!("{bad}{}GET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n{}", request(1), request(2))
            .as_bytes(),
    );
    let statuses: Vec<u16> = (0..4).map(|_| client.answer().status).collect();
    assert_eq!(statuses, [400, 200, 404, 200]);
}

#[test]
fn request_is_answered_whatever_bytes_follow() {
    let server = Server::start();
    let request = format!(
        "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{ALICE}",
        ALICE.len()
    );
    for next in ["", "\r\n", "\r\n\r\n", "P", "POST /v1/che", &request[..request.len() - 1]] {
        let mut client = server.client();
        client.send(format!("{request}{next}").as_bytes());
        let answer = client.answer();
        assert!(matches!(answer.status, 200 | 429), "{next:?}: {answer:?}");
    }
}

#[test]
fn request_before_invalid_bytes_is_answered() {
    let server = Server::start();
    for _ in 0..3 {
        let mut client = server.client();
        let head =
            format!("POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", ALICE.len());
        client.send(format!("{head}{ALICE}\0\0\0\r\n\r\n").as_bytes());
        let answers = client.last_answers();
        let statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
        assert!(statuses == [200] || statuses == [200, 400], "{statuses:?}: the charged request is answered");
    }
}

#[test]
fn wrong_method_is_405_with_allow() {
    let server = Server::start();
    let mut client = server.client();
    for (path, right) in [
        ("/v1/check", "POST"),
        ("/v1/check/batch", "POST"),
        ("/v1/peek", "POST"),
        ("/v1/usage", "GET, HEAD"),
        ("/v1/limits", "GET, HEAD, PUT, DELETE"),
        ("/v1/state", "GET, HEAD, DELETE"),
        ("/v1/overrides/demo/alice", "PUT, DELETE"),
        ("/healthz", "GET, HEAD"),
        ("/readyz", "GET, HEAD"),
        ("/metrics", "GET, HEAD"),
    ] {
        for method in ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"] {
            let answer = client.request(method, path, "");
            if right.split(", ").any(|right| right == method) {
                assert_ne!(answer.status, 405, "{method} {path}");
                continue;
            }
            assert_eq!(answer.error(), (405, "method_not_allowed".to_owned(), None), "{method} {path}");
            assert_eq!(answer.header("allow"), Some(right), "{method} {path}");
            assert!(answer.text().contains(&format!("{path} accepts only {right}")), "{}", answer.text());
        }
        // Every path answers HEAD without parameters, except that of one key.
        let query = if path == "/v1/state" { "?limit=demo&user=alice" } else { "" };
        client.send(format!("HEAD {path}{query} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes());
        let head = client.try_head().unwrap();
        let (status, allow) = if right.contains("HEAD") { (200, None) } else { (405, Some(right)) };
        assert_eq!((head.status, head.header("allow")), (status, allow), "HEAD {path}");
    }
    assert_eq!(
        client.request("GET", "/healthz", "").text(),
        "ok\n",
        "the next request on the connection is read correctly"
    );
}

/// HEAD gets the same status and headers as GET, without a body: the next request on the connection is read correctly.
#[test]
fn head_is_get_without_a_body() {
    let server = Server::start();
    let auth = ["x-forwarded-method: GET", "x-forwarded-uri: /"];
    for route in ROUTES.iter().filter(|route| route.method == "GET" && route.endpoint != Endpoint::Events) {
        let get = server.client().request_with("GET", route.path, &auth, b"");
        let mut client = server.client();
        // A check first: the fast path answers it without hyper, which takes over the connection with the HEAD.
        assert_eq!(client.request("POST", "/v1/check", r#"{"facts":{}}"#).status, 200);
        client.send(
            format!("HEAD {} HTTP/1.1\r\nhost: localhost\r\n{}\r\n\r\n", route.path, auth.join("\r\n"))
                .as_bytes(),
        );
        let head = client.try_head().unwrap();
        assert_eq!(head.status, get.status, "{}", route.path);
        for name in ["content-type", "etag", "allow"] {
            assert_eq!(head.header(name), get.header(name), "{} {name}", route.path);
        }
        // Metrics change with every request; all other pages are the same for both requests.
        if route.endpoint == Endpoint::Metrics {
            assert!(head.header("content-length").is_some());
        } else {
            assert_eq!(head.header("content-length"), get.header("content-length"), "{}", route.path);
        }
        assert_eq!(client.request("GET", "/healthz", "").text(), "ok\n", "after HEAD {}", route.path);
    }
}

#[test]
fn head_of_the_event_stream_does_not_wait_for_events() {
    let server = Server::start();
    let mut client = server.client();
    // More requests than allowed subscribers: a HEAD does not subscribe.
    for _ in 0..100 {
        client.send(b"HEAD /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n");
        let head = client.try_head().unwrap();
        assert_eq!((head.status, head.header("content-type")), (200, Some("text/event-stream")));
    }
    assert_eq!(client.request("GET", "/healthz", "").text(), "ok\n");
    client.send(b"HEAD /v1/events HTTP/1.1\r\nhost: localhost\r\norigin: http://evil.example\r\n\r\n");
    assert_eq!(client.try_head().unwrap().status, 403, "HEAD is refused like GET");
}

#[test]
fn unknown_path_is_404_with_a_hint() {
    let server = Server::start();
    let mut client = server.client();
    for path in [
        "/nothing",
        "/v1",
        "/v1/",
        "/v1/check/",
        "/v1/Check",
        "/v2/check",
        "//v1/check",
        "/v1/%63heck",
        "/healthz/x",
        "/../healthz",
    ] {
        for method in ["GET", "POST"] {
            let answer = client.request(method, path, "");
            assert_eq!(answer.error(), (404, "not_found".to_owned(), None), "{method} {path}");
            assert!(answer.text().contains("POST /v1/check"), "{}", answer.text());
        }
    }
    assert_eq!(client.request("POST", "/v1/peek?pretty", ALICE).status, 200, "a query string is ignored");
}

#[test]
fn cross_site_page_may_read_but_not_call() {
    let server = Server::start();
    let own = format!("origin: http://{}", server.address);
    for (origin, status) in [
        (&*own, 200),
        ("origin: http://evil.example", 403),
        ("origin: null", 403),
        ("origin: http://127.0.0.1", 403),
        ("origin: ", 403),
        ("x-origin: http://evil.example", 200),
    ] {
        for path in ["/v1/check", "/v1/check/batch", "/v1/peek"] {
            let body =
                if path.ends_with("batch") { r#"{"checks":[]}"# } else { r#"{"facts":{"tenant":"acme"}}"# };
            let answer = server.client().request_with("POST", path, &[origin], body.as_bytes());
            assert_eq!(answer.status, status, "{path} {origin}");
            if status == 403 {
                assert_eq!(answer.error(), (403, "forbidden".to_owned(), None));
            }
        }
        assert_eq!(server.client().request_with("GET", "/healthz", &[origin], b"").status, 200, "{origin}");
    }
    let answer =
        server.client().request_with("POST", "/v1/check", &["origin: http://evil.example"], ALICE.as_bytes());
    assert_eq!(answer.status, 403);
    assert_eq!(first(&server.post("/v1/peek", ALICE))["remaining"], 5, "nothing was charged");
    let rebound = ["origin: http://evil.example", "x-forwarded-host: evil.example"];
    assert_eq!(server.client().request_with("POST", "/v1/check", &rebound, ALICE.as_bytes()).status, 403);
}
