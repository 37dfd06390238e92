//! A running server answers the files of `clients/conformance` like the engine in process.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use serde_json::{Value, json};
use support::*;
use tollkeeper_tests::conformance::{ConformanceCall, ConformanceStep, Receipts, files};

/// The SHA-256 of `secret`.
const SECRET: &str = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";
/// What differs between two runs: times, and where limits come from.
const VARYING: [&str; 6] = ["retry_after", "reset_after", "delay", "reason", "loaded_at", "source"];

#[test]
fn server_answers_like_the_engine() {
    for mut file in files().into_iter().filter(|file| file.name != "errors-in-process") {
        file.config["admin"] = json!({ "token_sha256": SECRET });
        let folder = Folder::new();
        let path = folder.write("tollkeeper.json", &file.config.to_string());
        let server = Server::with(&["--config", path.to_str().unwrap()]);
        let mut receipts = Receipts::default();
        // A server has no manual clock.
        for step in file.steps {
            let ConformanceStep::Call(call) = step else { break };
            let answer = asked(&server, &call, &receipts.fill(&call.body));
            let text = receipts.take(&call, answer.text());
            let at = format!("{}: {} {}", file.name, call.call, call.body);
            assert_eq!(answer.status, call.status, "{at}: {text}");
            assert_eq!(constant(&text), constant(&call.out), "{at}");
        }
    }
}

/// Makes a call as the HTTP API has it: `usage` and `forget` name their facts in a query.
fn asked(server: &Server, call: &ConformanceCall, body: &str) -> Answer {
    let mut client = server.client();
    let token = ["Authorization: Bearer secret"];
    let query = |body: &str| {
        let body: Value = serde_json::from_str(body).unwrap();
        let facts = body["facts"].as_object().unwrap().iter();
        let pairs = facts.map(|(name, value)| match value.as_str() {
            Some(text) => format!("{name}={}", text.replace('@', "%40")),
            None => format!("{name}={value}"),
        });
        pairs
            .chain(body["limit"].as_str().map(|limit| format!("limit={limit}")))
            .collect::<Vec<_>>()
            .join("&")
    };
    match &*call.call {
        "usage" => client.request_with("GET", &format!("/v1/usage?{}", query(body)), &token, b""),
        "forget" => client.request_with("DELETE", &format!("/v1/state?{}", query(body)), &token, b""),
        "limits" => client.request_with("GET", "/v1/limits", &token, b""),
        name => client.request_with("POST", &format!("/v1/{name}"), &token, body.as_bytes()),
    }
}

/// An answer without what varies.
fn constant(text: &str) -> Value {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    if VARYING.contains(&name.as_str()) {
                        // Whether there is a time does not vary.
                        *value = json!(value.is_null());
                    }
                    strip(value);
                }
            }
            Value::Array(list) => list.iter_mut().for_each(strip),
            _ => {}
        }
    }
    let mut value = serde_json::from_str(text).unwrap();
    strip(&mut value);
    value
}
