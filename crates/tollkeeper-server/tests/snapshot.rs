//! Snapshots: counters that survive a restart of the process.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use support::*;

/// Two limits that do not refill while a test runs, with a snapshot file in the folder.
fn policy(folder: &Folder, every: &str) -> String {
    format!(
        "memory: {{ snapshot: '{}', snapshot_every: {every} }}
limits:
  - {{ name: bucket, by: user, rate: 1/day, burst: 5 }}
  - {{ name: log, by: user, rate: 10/day, algorithm: sliding-log }}
",
        folder.path().join("state").display()
    )
}

fn remaining(server: &Server, user: &str) -> Vec<u64> {
    let peek = server.post("/v1/peek", &format!("{{\"facts\":{{\"user\":\"{user}\"}}}}")).json();
    peek["limits"].as_array().unwrap().iter().map(|limit| limit["remaining"].as_u64().unwrap()).collect()
}

#[test]
fn restart_after_sigterm_keeps_counts() {
    let folder = Folder::new();
    for (signal, left) in [("TERM", [3, 8]), ("INT", [1, 6])] {
        let server = Server::with_config(&folder, &policy(&folder, "1h"));
        assert!(server.check(r#"{"user":"alice"}"#) && server.check(r#"{"user":"alice"}"#));
        assert_eq!(remaining(&server, "alice"), left);
        server.signal(signal);
        assert_eq!(server.ended().code, Some(0));
    }
    let server = Server::with_config(&folder, &policy(&folder, "1h"));
    server.logs("restored 2 keys from");
    assert_eq!(remaining(&server, "alice"), [1, 6]);
    assert_eq!(remaining(&server, "bob"), [5, 10]);
    assert!(server.check(r#"{"user":"alice"}"#));
    assert!(!server.check(r#"{"user":"alice"}"#), "the burst of five was used over three runs of the server");
}

#[test]
fn second_signal_keeps_counts() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &policy(&folder, "1h"));
    assert!(server.check(r#"{"user":"alice"}"#));
    let mut half = server.client();
    half.send(
        b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n",
    );
    assert_eq!(half.answer().status, 100);
    server.signal("TERM");
    eventually("the listener is closed", || server.is_closed());
    server.signal("TERM");
    assert_eq!(server.ended().code, Some(0));
    let server = Server::with_config(&folder, &policy(&folder, "1h"));
    assert_eq!(remaining(&server, "alice"), [4, 9]);
}

#[test]
fn killed_server_restores_the_last_snapshot() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &policy(&folder, "1s"));
    assert!(server.check(r#"{"user":"alice"}"#));
    snapshot_is_saved(&folder.path().join("state"));
    server.signal("KILL");
    assert_eq!(server.ended().code, None);
    let server = Server::with_config(&folder, &policy(&folder, "1s"));
    assert_eq!(remaining(&server, "alice"), [4, 9]);
}

#[test]
fn damaged_snapshot_is_reported_and_ignored() {
    let folder = Folder::new();
    for damage in ["", "junk", "\0\0\0\0\0\0\0\0"] {
        folder.write("state", damage);
        let server = Server::with_config(&folder, &policy(&folder, "1h"));
        server.logs("starting empty: ");
        assert_eq!(remaining(&server, "alice"), [5, 10], "{damage:?}");
    }
}

#[test]
fn server_does_not_start_without_the_snapshot_folder() {
    let folder = Folder::new();
    let file = folder.write(
        "tollkeeper.yaml",
        "memory: { snapshot: /nowhere/at/all/state }\nlimits:\n  - { name: a, rate: 1/day }\n",
    );
    let output = run(&["serve", "--http", "127.0.0.1:0", "--config", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("memory.snapshot") && stderr.contains("/nowhere/at/all"), "{stderr}");
}
