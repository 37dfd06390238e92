//! A config file that is read while it is being written removes no limit and no token.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::fs::File;
use std::io::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use support::*;
use tollkeeper::config::{Config, Format};
use tollkeeper_core::digest::{hex, sha256};
use tollkeeper_server::command::init::TEMPLATES;

/// How long the file must be unchanged before a reload removes limits or tokens.
const SETTLED: Duration = Duration::from_millis(250);

fn access() -> String {
    let digest = |token: &str| hex(&sha256(token.as_bytes()));
    format!(
        "admin: {{ token_sha256: {} }}\nauth: {{ token_sha256: [{}] }}\n",
        digest("boss"),
        digest("clerk")
    )
}

/// Writes each template byte by byte while clients send requests and SIGHUP triggers reloads.
#[test]
fn half_written_file_removes_nothing() {
    for (number, template) in TEMPLATES.iter().enumerate() {
        let text = match number % 2 {
            0 => format!("{}{}", access(), template.text),
            _ => format!("{}{}", template.text, access()),
        };
        let folder = Folder::new();
        let server = Server::with_config(&folder, &text);
        // If the writer pauses for `SETTLED` or longer, the server rightly takes the partial file as complete: try again.
        while written_within(&server, &folder, &text, template.name) >= SETTLED {}
        // A complete new file becomes active.
        let longer = format!("{}{}", template.text.trim_end(), "\n\n  - { name: last, rate: 1000000/s }\n");
        folder.write("tollkeeper.yaml", &format!("{}{longer}", access()));
        eventually("the complete file is active", || {
            names(&server.client()).last().is_some_and(|name| name == "last")
        });
    }
}

/// Writes the same file again, and asserts meanwhile that no limit and no token is missing. Returns the longest time
/// between two writes.
fn written_within(server: &Server, folder: &Folder, text: &str, name: &str) -> Duration {
    let all = limits_of(text);
    let (done, lost) = (AtomicBool::new(false), Mutex::new(None));
    let longest = thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = server.client();
            while !done.load(Relaxed) {
                let open = client.request("POST", "/v1/check", r#"{"facts":{}}"#).status != 401;
                let admin = client.request("DELETE", "/v1/state?limit=x", "").status != 401;
                let limits = names(&client);
                if open || admin || limits != all {
                    *lost.lock().unwrap() = Some(format!("open: {open}, admin: {admin}, limits: {limits:?}"));
                }
            }
        });
        let longest = write_slowly(server, folder, text);
        done.store(true, Relaxed);
        longest
    });
    let lost = lost.into_inner().unwrap();
    assert!(lost.is_none() || longest >= SETTLED, "{name}: {}", lost.unwrap_or_default());
    eventually("the complete file is active", || names(&server.client()) == all);
    longest
}

/// Writes the file byte by byte, with a SIGHUP and a request before every sixteenth byte. Returns the longest time
/// between two writes.
fn write_slowly(server: &Server, folder: &Folder, text: &str) -> Duration {
    let (mut longest, mut last) = (Duration::ZERO, Instant::now());
    let mut file = File::create(folder.path().join("tollkeeper.yaml")).unwrap();
    for (index, byte) in text.bytes().enumerate() {
        if index % 16 == 15 {
            server.signal("HUP");
            names(&server.client());
        }
        let before = Instant::now();
        file.write_all(&[byte]).unwrap();
        longest = longest.max(last.elapsed());
        last = before;
    }
    longest
}

/// The names of the active limits.
fn names(client: &Client) -> Vec<String> {
    let mut client = Client::to(client.stream.peer_addr().unwrap());
    let answer = client.request_with("GET", "/v1/limits", &["authorization: Bearer clerk"], b"");
    let limits = answer.json()["limits"].clone();
    limits.as_array().unwrap().iter().map(|limit| limit["name"].as_str().unwrap().to_owned()).collect()
}

fn limits_of(text: &str) -> Vec<String> {
    let (config, _) = Config::parse("tollkeeper.yaml", Format::Yaml, text.as_bytes(), &|_| None).unwrap();
    config.limits.iter().map(|limit| limit.name.clone()).collect()
}

#[test]
fn removals_apply_once_the_file_has_settled() {
    let folder = Folder::new();
    let limits = "limits:\n  - { name: a, rate: 1000/s }\n";
    let server = Server::with_config(&folder, &format!("{}{limits}  - {{ name: b, rate: 9/s }}\n", access()));
    assert_eq!(server.post("/v1/check", r#"{"facts":{}}"#).status, 401);
    folder.write("tollkeeper.yaml", limits);
    eventually("the data plane is open", || server.post("/v1/check", r#"{"facts":{}}"#).status == 200);
    assert_eq!(names(&server.client()), ["a"]);
    // Many editors replace a file by renaming a new one over it.
    let new = folder.write("new.yaml.tmp", "limits: []\n");
    std::fs::rename(new, folder.path().join("tollkeeper.yaml")).unwrap();
    eventually("the limit is gone", || names(&server.client()).is_empty());
    folder.write("tollkeeper.yaml", "headers: []\n");
    eventually("a file without limits is reported", || {
        let limits = server.get("/v1/limits").json();
        limits["error"].as_str().is_some_and(|error| error.contains("limits: []"))
    });
}
