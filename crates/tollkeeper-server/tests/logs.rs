//! What a person reads while something fails: the cause, a few times, and nobody's key.

mod support;

use std::time::Instant;

use serde_json::Value;
use support::{Folder, Server};

#[test]
fn a_store_that_fails_is_named_with_its_cause_at_a_bounded_rate_and_no_key_is() {
    let folder = Folder::new();
    let file = folder.write(
        "tollkeeper.yaml",
        "limits:\n  - { name: each, by: user, rate: 5/day }\n  - { name: all, rate: 5/day, on_store_failure: deny }\n",
    );
    let began = Instant::now();
    // Nobody listens on port 1.
    let config = file.to_str().expect("UTF-8");
    let server = Server::with(&["--config", config, "--store", "redis://127.0.0.1:1", "--log", "json"]);
    server.logs("cannot use 127.0.0.1:1");
    for number in 0..500 {
        let user = format!("s3cret-{number}");
        assert!(!server.check(&format!(r#"{{"user":"{user}"}}"#)), "`deny` refuses");
        server.post("/v1/check", &format!(r#"{{"facts":{{"ip":"{user}"}}}}"#));
    }
    server.logs("limits go by their failure policy");
    server.signal("TERM");
    let ended = server.ended();
    assert!(!ended.log.contains("s3cret"), "{}", ended.log);
    let messages: Vec<String> = ended
        .log
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .map(|object| object["fields"]["message"].to_string())
        .collect();
    // Of three lines at most one a second each, and a few that are said once.
    let most = 3 * (began.elapsed().as_secs() + 2) + 10;
    assert!((messages.len() as u64) < most, "{} lines, not {most}: {messages:#?}", messages.len());
    let opened = messages.iter().find(|line| line.contains("failure policy")).expect("it was waited for");
    assert!(opened.contains("connection: "), "it names the cause: {opened}");
}
