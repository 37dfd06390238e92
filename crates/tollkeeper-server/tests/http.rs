//! The service over HTTP: what is answered, to the letter.

mod support;

use serde_json::json;
use support::*;

#[test]
fn the_first_five_pass_and_the_sixth_is_told_why_and_when() {
    let server = Server::start();
    let alice = r#"{"facts":{"user":"alice"}}"#;
    for remaining in (0..5).rev() {
        let answer = server.post("/v1/check", alice);
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
    let refused = server.post("/v1/check", alice);
    assert_eq!(refused.status, 429);
    let wait: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=2).contains(&wait), "{wait}");
    let refused = refused.json();
    let retry = refused["retry_after"].as_f64().unwrap();
    assert!(retry > 0.0 && retry <= 2.0, "{retry}");
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
    assert!(server.check(r#"{"user":"bob"}"#), "others are not affected");
}
