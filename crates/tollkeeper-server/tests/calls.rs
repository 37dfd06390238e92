//! Every call beyond check and peek, with the same results on the memory store and on Redis.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use serde_json::{Value, json};
use support::*;
use tollkeeper_tests::redis;

/// Runs a test against a server on each store.
fn on_each_store(yaml: &str, test: impl Fn(&Server)) {
    let folder = Folder::new();
    test(&Server::with_config(&folder, yaml));
    let redis = redis::Server::start();
    let file = folder.write("redis.yaml", &format!("redis: {{ deadline: 5s }}\n{yaml}"));
    test(&Server::with(&["--store", &redis.url(), "--config", file.to_str().unwrap()]));
}

fn remaining(server: &Server, facts: &str) -> Vec<u64> {
    let peek = server.post("/v1/peek", &format!("{{\"facts\":{facts}}}")).json();
    peek["limits"].as_array().unwrap().iter().map(|limit| limit["remaining"].as_u64().unwrap()).collect()
}

/// The receipt in an allowed response.
fn receipt(server: &Server, path: &str, body: &str, field: &str) -> String {
    let answer = server.post(path, body);
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()[field].as_str().unwrap_or_else(|| panic!("no {field} in {}", answer.text())).to_owned()
}

fn done(answer: &Answer) -> bool {
    assert_eq!(answer.status, 200, "{answer:?}");
    let done = answer.json()["done"].as_bool().unwrap();
    assert_eq!(answer.json(), json!({ "done": done }));
    done
}

fn error(status: u16, code: &str, at: &str) -> (u16, String, Option<String>) {
    (status, code.to_owned(), Some(at.to_owned()))
}

const BUDGET: &str = "limits:
  - { name: requests, by: user, rate: 10/day, algorithm: fixed-window }
  - { name: tokens, by: user, rate: 1000/day, algorithm: fixed-window, cost: tokens }
";
const ESTIMATE: &str = r#"{"facts":{"user":"alice","tokens":400},"cost":3}"#;
const ALICE: &str = r#"{"user":"alice","tokens":0}"#;

#[test]
fn refund_returns_a_charge_once() {
    on_each_store(BUDGET, |server| {
        let charge = receipt(server, "/v1/check", ESTIMATE, "charge");
        assert_eq!(remaining(server, ALICE), [7, 600]);
        let refund = format!("{{\"charge\":\"{charge}\"}}");
        assert!(done(&server.post("/v1/refund", &refund)));
        assert_eq!(remaining(server, ALICE), [10, 1000]);
        receipt(server, "/v1/check", ESTIMATE, "charge");
        assert!(!done(&server.post("/v1/refund", &refund)), "the second refund of a receipt does nothing");
        let settle = format!("{{\"charge\":\"{charge}\",\"cost\":0}}");
        assert!(!done(&server.post("/v1/settle", &settle)), "a charge is refunded or settled once");
        assert_eq!(remaining(server, ALICE), [7, 600], "nothing is refunded twice");
    });
}

#[test]
fn partial_refund_never_exceeds_the_charge() {
    on_each_store(BUDGET, |server| {
        let charge = receipt(server, "/v1/check", ESTIMATE, "charge");
        for (part, at) in [("\"cost\":4", "cost"), ("\"facts\":{\"tokens\":401}", "cost")] {
            let answer = server.post("/v1/refund", &format!("{{\"charge\":\"{charge}\",{part}}}"));
            assert_eq!(answer.error(), error(400, "invalid_cost", at), "{part}");
        }
        assert_eq!(remaining(server, ALICE), [7, 600]);
        assert!(done(&server.post("/v1/refund", &format!("{{\"charge\":\"{charge}\",\"cost\":2}}"))));
        assert_eq!(remaining(server, ALICE), [9, 600], "`cost` is for limits that charge the request's cost");

        let charge = receipt(server, "/v1/check", ESTIMATE, "charge");
        assert_eq!(remaining(server, ALICE), [6, 200]);
        let part = format!("{{\"charge\":\"{charge}\",\"facts\":{{\"tokens\":150,\"other\":9}}}}");
        assert!(done(&server.post("/v1/refund", &part)));
        assert_eq!(remaining(server, ALICE), [6, 350], "`facts` is for limits that charge that fact");
    });
}

/// A correction with a wrong field must not consume the receipt.
#[test]
fn correction_that_matches_no_limit_leaves_the_charge() {
    let tokens_only = "limits:
  - { name: tokens, by: user, rate: 1000/day, algorithm: fixed-window, cost: tokens }
";
    on_each_store(tokens_only, |server| {
        for path in ["/v1/refund", "/v1/settle"] {
            let charge = receipt(server, "/v1/reserve", ESTIMATE, "charge");
            let correct = |part: &str| server.post(path, &format!("{{\"charge\":\"{charge}\",{part}}}"));
            for (part, at) in [
                (r#""cost":3"#, "cost"),
                (r#""facts":{"token":100}"#, "facts"),
                (r#""facts":{"user":"alice"}"#, "facts"),
                (r#""facts":{}"#, "facts"),
            ] {
                assert_eq!(correct(part).error(), error(400, "invalid_cost", at), "{path} {part}");
            }
            assert_eq!(remaining(server, ALICE), [600], "{path}: nothing was touched");
            // The rest of the correction: refund 400, or settle at 0.
            let rest = if path == "/v1/refund" { 400 } else { 0 };
            assert!(done(&correct(&format!(r#""facts":{{"tokens":{rest}}}"#))), "{path}");
            assert_eq!(remaining(server, ALICE), [1000], "{path}");
        }
        let charge = receipt(server, "/v1/reserve", ESTIMATE, "charge");
        for part in [r#""cost":0"#, r#""facts":{"tokens":0}"#] {
            let answer = server.post("/v1/refund", &format!("{{\"charge\":\"{charge}\",{part}}}"));
            assert_eq!(answer.error(), error(400, "invalid_cost", "cost"), "{part}");
        }
        assert!(done(&server.post("/v1/refund", &format!("{{\"charge\":\"{charge}\"}}"))));
    });
}

#[test]
fn settle_charges_the_actual_cost() {
    on_each_store(BUDGET, |server| {
        let reserve = r#"{"facts":{"user":"alice","tokens":400},"cost":1,"ttl":"60s"}"#;
        let charge = receipt(server, "/v1/reserve", reserve, "charge");
        assert_eq!(remaining(server, ALICE), [9, 600]);
        let settle = format!("{{\"charge\":\"{charge}\",\"facts\":{{\"tokens\":123}}}}");
        assert!(done(&server.post("/v1/settle", &settle)));
        assert_eq!(remaining(server, ALICE), [9, 877]);
        assert!(!done(&server.post("/v1/settle", &settle)));
        assert_eq!(remaining(server, ALICE), [9, 877]);

        let charge = receipt(server, "/v1/reserve", reserve, "charge");
        let settle = format!("{{\"charge\":\"{charge}\",\"facts\":{{\"tokens\":500}}}}");
        assert!(done(&server.post("/v1/settle", &settle)));
        assert_eq!(remaining(server, ALICE), [8, 377], "a shortfall of 100");

        let charge = receipt(server, "/v1/reserve", r#"{"facts":{"user":"alice","tokens":7}}"#, "charge");
        assert!(done(&server.post("/v1/settle", &format!("{{\"charge\":\"{charge}\",\"cost\":0}}"))));
        assert_eq!(remaining(server, ALICE), [8, 370], "the request cost nothing, the tokens stay");

        let refused = server.post("/v1/reserve", r#"{"facts":{"user":"alice","tokens":900}}"#);
        assert_eq!((refused.status, refused.json()["charge"].clone()), (429, Value::Null));
        assert!(refused.header("retry-after").is_some());
    });
}

#[test]
fn unsettled_reservation_stays_charged() {
    on_each_store(BUDGET, |server| {
        let reserve = r#"{"facts":{"user":"alice","tokens":400},"ttl":"1s"}"#;
        let charge = receipt(server, "/v1/reserve", reserve, "charge");
        let late = format!("{{\"charge\":\"{charge}\",\"facts\":{{\"tokens\":1}}}}");
        // Before the reservation expires, repeating this settlement is harmless, so repeat it until then.
        let probe =
            receipt(server, "/v1/reserve", r#"{"facts":{"user":"bob","tokens":0},"ttl":"1s"}"#, "charge");
        let probe = format!("{{\"charge\":\"{probe}\",\"cost\":1}}");
        eventually("the reservation has expired", || server.post("/v1/settle", &probe).status == 404);
        assert_eq!(server.post("/v1/settle", &late).error(), error(404, "unknown_charge", "charge"));
        assert_eq!(remaining(server, ALICE), [9, 600]);
    });
}

#[test]
fn foreign_charge_is_unknown() {
    on_each_store(BUDGET, |server| {
        let charge = receipt(server, "/v1/check", ESTIMATE, "charge");
        let other = Server::start();
        let foreign = receipt(&other, "/v1/check", r#"{"facts":{"user":"alice"}}"#, "charge");
        let changed =
            format!("{}{}", &charge[..charge.len() - 1], if charge.ends_with('A') { "B" } else { "A" });
        for text in ["", "nonsense", &foreign, &changed] {
            for path in ["/v1/refund", "/v1/settle"] {
                let answer = server.post(path, &format!("{{\"charge\":\"{text}\",\"cost\":1}}"));
                assert_eq!(answer.error(), error(404, "unknown_charge", "charge"), "{path} {text}");
            }
        }
        assert_eq!(remaining(server, ALICE), [7, 600]);
    });
}

const EXPORTS: &str = "limits:
  - { name: exports, by: user, algorithm: concurrency, limit: 2, ttl: 60s }
  - { name: brief, by: job, algorithm: concurrency, limit: 1, ttl: 1s }
  - { name: per-user, by: user, rate: 100/day, algorithm: fixed-window }
";

#[test]
fn slots_are_acquired_renewed_and_released_once() {
    on_each_store(EXPORTS, |server| {
        let body = r#"{"facts":{"user":"alice"},"cost":5}"#;
        let first = receipt(server, "/v1/acquire", body, "slot");
        let second = receipt(server, "/v1/acquire", body, "slot");
        assert_eq!(remaining(server, r#"{"user":"alice"}"#), [0, 90], "one slot each whatever the cost");
        let refused = server.post("/v1/acquire", body);
        assert_eq!(refused.status, 429);
        let refusal = refused.json();
        assert_eq!(
            (&refusal["binding"], &refusal["slot"], &refusal["charge"]),
            (&json!("exports"), &Value::Null, &Value::Null)
        );
        assert_eq!(refusal["retry_after"], json!(1.0), "a hint: the release of a slot cannot be predicted");
        assert!(server.check(r#"{"user":"alice"}"#), "a check takes no slot");

        let slot = |text: &str| format!("{{\"slot\":\"{text}\"}}");
        assert!(done(&server.post("/v1/renew", &slot(&first))));
        assert!(done(&server.post("/v1/release", &slot(&first))));
        assert_eq!(remaining(server, r#"{"user":"alice"}"#)[0], 1);
        for path in ["/v1/release", "/v1/renew"] {
            for text in [&*first, "", "nonsense", &second[1..]] {
                let answer = server.post(path, &slot(text));
                assert_eq!(answer.error(), error(404, "unknown_slot", "slot"), "{path} {text}");
            }
        }
        assert_eq!(remaining(server, r#"{"user":"alice"}"#)[0], 1, "no other slot is freed");
        let none = server.post("/v1/acquire", r#"{"facts":{"ip":"192.0.2.7"}}"#);
        assert_eq!((none.status, none.json()["slot"].clone()), (200, Value::Null), "no such limit applies");
    });
}

#[test]
fn slot_expires_at_its_ttl() {
    on_each_store(EXPORTS, |server| {
        let body = r#"{"facts":{"job":"nightly"}}"#;
        let slot = receipt(server, "/v1/acquire", body, "slot");
        eventually("the slot is free again", || server.post("/v1/acquire", body).status == 200);
        let lost = server.post("/v1/renew", &format!("{{\"slot\":\"{slot}\"}}"));
        assert_eq!(lost.error(), error(404, "unknown_slot", "slot"));
    });
}

#[test]
fn invalid_call_names_code_and_field_and_charges_nothing() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, BUDGET);
    let charge = receipt(&server, "/v1/check", ESTIMATE, "charge");
    let at = |code: &str, at: &str| (400, code.to_owned(), Some(at.to_owned()).filter(|at| !at.is_empty()));
    for (path, body, expected) in [
        ("/v1/refund", "{}".to_owned(), at("missing_field", "charge")),
        ("/v1/refund", "[]".to_owned(), at("invalid_json", "")),
        ("/v1/refund", r#"{"charge":7}"#.to_owned(), at("invalid_json", "charge")),
        ("/v1/refund", r#"{"charge":{}}"#.to_owned(), at("invalid_json", "charge")),
        ("/v1/refund", r#"{"charge":"a","charge":"b"}"#.to_owned(), at("duplicate_field", "charge")),
        ("/v1/refund", r#"{"charge":"a","slot":"b"}"#.to_owned(), at("unknown_field", "slot")),
        (
            "/v1/refund",
            format!(r#"{{"charge":"{charge}","cost":1,"facts":{{}}}}"#),
            at("invalid_cost", "cost"),
        ),
        ("/v1/refund", format!(r#"{{"charge":"{charge}","cost":-1}}"#), at("invalid_cost", "cost")),
        (
            "/v1/refund",
            format!(r#"{{"charge":"{charge}","facts":{{"tokens":"x"}}}}"#),
            at("invalid_cost", "facts.tokens"),
        ),
        ("/v1/settle", format!(r#"{{"charge":"{charge}"}}"#), at("missing_field", "facts")),
        ("/v1/settle", format!(r#"{{"charge":"{charge}","cost":2147483649}}"#), at("invalid_cost", "cost")),
        ("/v1/reserve", r#"{"facts":{"tokens":1},"ttl":"0s"}"#.to_owned(), at("invalid_ttl", "ttl")),
        ("/v1/reserve", r#"{"facts":{"tokens":1},"ttl":"999ms"}"#.to_owned(), at("invalid_ttl", "ttl")),
        ("/v1/reserve", r#"{"facts":{"tokens":1},"ttl":"61m"}"#.to_owned(), at("invalid_ttl", "ttl")),
        ("/v1/reserve", r#"{"facts":{"tokens":1},"ttl":60}"#.to_owned(), at("invalid_ttl", "ttl")),
        ("/v1/reserve", r#"{"facts":{"user":"alice"}}"#.to_owned(), at("invalid_cost", "facts.tokens")),
        ("/v1/reserve", r#"{"ttl":"60s"}"#.to_owned(), at("missing_field", "facts")),
        ("/v1/reserve", r#"{"facts":{},"ttl":"60s","ttl":"60s"}"#.to_owned(), at("duplicate_field", "ttl")),
        ("/v1/check", r#"{"facts":{},"ttl":"60s"}"#.to_owned(), at("unknown_field", "ttl")),
        ("/v1/acquire", r#"{"facts":{},"cost":0}"#.to_owned(), at("invalid_cost", "cost")),
        ("/v1/release", "{}".to_owned(), at("missing_field", "slot")),
        ("/v1/renew", r#"{"slot":null}"#.to_owned(), at("invalid_json", "slot")),
        ("/v1/renew", r#"{"slot":"a"} x"#.to_owned(), at("invalid_json", "")),
    ] {
        assert_eq!(server.post(path, &body).error(), expected, "{path} {body}");
    }
    assert_eq!(remaining(&server, ALICE), [7, 600]);
}
