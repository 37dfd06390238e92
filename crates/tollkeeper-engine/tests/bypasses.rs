//! Known bypasses of rate limiters, as requests and the statuses that every interface must answer: no spelling of an
//! identity has a count of its own. Node sends the same file to Express, Python to an ASGI application.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use serde_json::Value;
use tollkeeper_engine::{ConfigSource, Format, Options, VisitBody, VisitRequest, close, get, open};

#[test]
fn no_spelling_has_a_count_of_its_own() {
    let rows: Vec<Value> =
        serde_json::from_str(include_str!("../../../clients/conformance/bypasses.json")).unwrap();
    assert!(!rows.is_empty());
    for row in rows {
        let text = row["policy"].to_string();
        let number = open(Options::new(ConfigSource::Text { format: Format::Json, text })).unwrap();
        let engine = get(number).unwrap();
        for expected in row["requests"].as_array().unwrap() {
            let request = expected["request"].as_str().unwrap();
            let answer = engine.visit(visit(request)).wait();
            let outcome = answer.split('\n').next().unwrap();
            let status = if outcome == "pass" { 200 } else { outcome.parse().unwrap() };
            assert_eq!(expected["status"], status, "{}: {request:?}: {answer}", row["name"]);
        }
        assert!(close(number));
    }
}

/// A request as it is sent, in characters of one byte, from a client on this machine.
fn visit(request: &str) -> VisitRequest {
    let (head, body) = request.split_once("\r\n\r\n").unwrap();
    let mut lines = head.split("\r\n");
    let mut words = lines.next().unwrap().split(' ');
    let mut text = format!("{}\n{}\n127.0.0.1", words.next().unwrap(), words.next().unwrap());
    for line in lines {
        let (name, value) = line.split_once(": ").unwrap();
        text.push_str(&format!("\n{name}\n{value}"));
    }
    let bytes = |text: &str| text.chars().map(|byte| u8::try_from(byte).unwrap()).collect::<Vec<u8>>();
    VisitRequest { body: VisitBody::Raw(bytes(body)), ..VisitRequest::new(bytes(&text)) }
}
