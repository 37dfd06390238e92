//! Schemathesis tests the server against its OpenAPI schema: for generated requests, the server responds as the schema
//! says, accepts what the schema accepts and refuses what it refuses.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::path::Path;
use std::process::{Command, Stdio};

use support::*;
use tollkeeper::store::redis::digest::{hex, sha256};

const LIMITS: &str = "limits:
  - { name: per-user, by: user, rate: 100/day, burst: 5 }
  - { name: per-ip, by: ip, rate: 1000/min }
  - { name: trial, rate: 3/s, mode: shadow }
  - { name: exports, by: user, algorithm: concurrency, limit: 2 }
";

/// Generates requests to the calls that these options select, and returns their number.
fn judge(options: &[&str]) -> u64 {
    let folder = Folder::new();
    let admin = format!("{LIMITS}admin: {{ token_sha256: {} }}\n", hex(&sha256(b"boss")));
    let server = Server::with_config(&folder, &admin);
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/schemathesis");
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/python/bin/schemathesis");
    assert!(tool.exists(), "schemathesis is missing: `make test` installs it into target/python");
    // `make soak` raises the number of examples.
    let examples = std::env::var("EXAMPLES").unwrap_or_else(|_| "60".to_owned());
    let report_dir = folder.path().join("report");
    let output = Command::new(tool)
        .args(["--config-file", tests.join("schemathesis.toml").to_str().unwrap(), "run"])
        .arg(format!("http://{}/openapi.json", server.address))
        .args(["--checks", "all", "--phases", "examples,coverage,fuzzing", "--max-examples", &examples])
        .args(["--header", "Authorization: Bearer boss", "--request-timeout", "30", "--no-color"])
        .args([
            "--generation-database",
            "none",
            "--continue-on-failure",
            "--report-dir",
            report_dir.to_str().unwrap(),
        ])
        .args(options)
        .current_dir(folder.path())
        .env("PYTHONPATH", &tests)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stderr(Stdio::inherit())
        .output()
        .expect("schemathesis runs");
    let report: String = text(&output.stdout)
        .lines()
        .map(|line| line.chars().take(400).chain(['\n']).collect::<String>())
        .collect();
    assert!(output.status.success(), "{report}");
    assert!(server.get("/healthz").status == 200 && !server.log().contains("panicked"), "{}", server.log());
    let count = report
        .lines()
        .find_map(|line| line.trim().split_once(" generated")?.0.replace(',', "").parse().ok())
        .unwrap_or_else(|| panic!("the report does not count the generated requests: {report}"));
    println!("{count} generated requests");
    count
}

#[test]
fn every_call_conforms_to_the_schema() {
    // PUT changes the responses of other calls, and the event stream has no end: both have tests of their own.
    let count =
        judge(&["--exclude-path", "/v1/events", "--exclude-operation-id-regex", "putLimits|deleteLimits"]);
    assert!(count > 500, "{count}");
}

#[test]
fn put_and_delete_limits_conform_to_the_schema() {
    let count = judge(&["--include-operation-id-regex", "putLimits|deleteLimits"]);
    assert!(count > 50, "{count}");
}
