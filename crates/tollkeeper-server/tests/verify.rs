//! `tollkeeper verify`, and the log of `serve --log-admissions` that it reads.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::fs;
use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};
use support::*;
use tollkeeper_core::digest::{hex, sha256};

const LIMITS: &str = "
store: redis://127.0.0.1:1
redis: { nodes: 4 }
validate: { ignore: [W001] }
http: { facts: { api_key: { from: header.x-api-key, hash: true } } }
limits:
  - { name: per-user, by: user, rate: 10/s, burst: 3 }
  - { name: all, rate: 10/s, algorithm: fixed-window }
  - name: plan
    by: api_key
    tier: plan
    tiers: { free: 5/day, pro: 50/day, enterprise: unlimited }
    default_tier: free
    overrides: { acme: 70/day }
    algorithm: fixed-window
  - { name: daily, by: user, rate: 5/day, algorithm: fixed-window, stagger: true }
  - { name: exports, by: user, algorithm: concurrency, limit: 2 }
";

/// Verifies these files.
fn verify(folder: &Folder, files: &[&str]) -> Output {
    let config = folder.write("limits.yaml", LIMITS);
    let paths: Vec<_> =
        files.iter().enumerate().map(|(n, text)| folder.write(&format!("{n}.jsonl"), text)).collect();
    output(tollkeeper().args(["verify", "--json", "--config"]).arg(config).args(paths))
}

/// What is said of a key: limit, key, needed, of, kept.
type Judged = (String, Value, u64, u64, bool);

/// The exit code, and what is said of each key.
fn judged(files: &[&str]) -> (Option<i32>, Vec<Judged>) {
    let output = verify(&Folder::new(), files);
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let keys = report["keys"].as_array().unwrap().iter().map(|key| {
        let number = |name: &str| key[name].as_u64().unwrap();
        let limit = key["limit"].as_str().unwrap().to_owned();
        (limit, key["key"].clone(), number("needed"), number("of"), key["kept"].as_bool().unwrap())
    });
    (output.status.code(), keys.collect())
}

fn user(t: u64, cost: u64) -> String {
    format!("{}\n", json!({ "t": t, "limit": "per-user", "key": ["alice"], "cost": cost }))
}

#[test]
fn kept_contracts_exit_with_0() {
    let kept = [user(1_000_000, 3), user(1_100_000, 1)].concat();
    let alice = ("per-user".to_owned(), json!(["alice"]), 3, 3, true);
    assert_eq!(judged(&[&kept]), (Some(0), vec![alice]));
    assert_eq!(judged(&["\n"]), (Some(0), vec![]));
}

#[test]
fn files_are_merged_and_need_not_be_sorted() {
    let (late, early) = ([user(1_150_000, 1), user(1_100_000, 1)].concat(), user(1_000_000, 3));
    assert_eq!(judged(&[&late]).0, Some(0));
    assert_eq!(judged(&[&early]).0, Some(0));
    let alice = ("per-user".to_owned(), json!(["alice"]), 4, 3, false);
    assert_eq!(judged(&[&late, &early]), (Some(1), vec![alice]));
}

#[test]
fn first_violation_has_its_interval() {
    let lines = [user(9_000_000, 9), user(1_150_000, 1), user(1_100_000, 1), user(1_000_000, 3)].concat();
    let folder = Folder::new();
    let output = verify(&folder, &[&lines]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let expected = json!({ "from": 1_000_000, "until": 1_150_000, "admitted": 5, "allowed": 4 });
    assert_eq!(report["keys"][0]["first_violation"], expected);
    assert_eq!(report["kept"], false);

    let (config, history) = (folder.path().join("limits.yaml"), folder.path().join("0.jsonl"));
    let printed = output_of(&config, &history);
    let expected = "per-user alice: 5 admitted in 0.15 s up to 1150000 (Thu, 01 Jan 1970 00:00:01 GMT), \
                    where 4 are allowed; the interval begins at 1000000\n\
                    broken: 1 of 1 keys, 4 admissions\n";
    assert!(printed.ends_with(expected), "{printed}");
    assert!(printed.contains("burst 9"), "{printed}");
}

fn output_of(config: &Path, history: &Path) -> String {
    let output = output(tollkeeper().args(["verify", "--config"]).arg(config).arg(history));
    assert_eq!(output.status.code(), Some(1));
    text(&output.stdout).to_owned()
}

#[test]
fn malformed_lines_are_named() {
    let good = user(1, 1);
    for (line, words) in [
        ("{", "1.jsonl:2: column 1: EOF while parsing an object"),
        ("[]", "1.jsonl:2: column 2:"),
        (r#"{"t":1,"limit":"per-user","key":["a"]}"#, "missing field `cost`"),
        (r#"{"t":1,"limit":"per-usr","key":["a"],"cost":1}"#, "the config has no limit `per-usr`"),
        (
            r#"{"t":1,"limit":"per-user","key":[],"cost":1}"#,
            "`key` has 0 values, but limit `per-user` is keyed by 1",
        ),
        (r#"{"t":1,"limit":"per-user","key":["a"],"cost":-1}"#, "invalid value: integer `-1`"),
        (r#"{"t":1,"limit":"per-user","key":["a"],"cost":2147483649}"#, "`cost` at most 2^31"),
        (r#"{"t":3000000000000000000,"limit":"per-user","key":["a"],"cost":1}"#, "below 2^61"),
        (r#"{"t":1,"limit":"plan","key":["a"],"cost":1,"tier":"gold"}"#, "limit `plan` has no tier `gold`"),
        (r#"{"t":1,"limit":"plan","key":["a"],"cost":1,"tier":"enterprise"}"#, "grants this key everything"),
        (r#"{"t":1,"limit":"all","key":[],"cost":1,"shift":1000000}"#, "less than the period of limit `all`"),
        (r#"{"t":1,"limit":"all","key":[],"cost":1,"degraded":"deny"}"#, "`degraded` is `deny`"),
        (
            r#"{"t":1,"limit":"per-user","key":["a"],"cost":1,"override":{"rate":"0/s"}}"#,
            "`override`: rate `0/s`",
        ),
    ] {
        let output = verify(&Folder::new(), &[&good, &format!("{good}{line}\n{good}")]);
        let stderr = text(&output.stderr);
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(2), ""), "{line}: {stderr}");
        assert!(stderr.contains(words) && stderr.contains("1.jsonl:2: "), "{line}: {stderr}");
    }
    let missing = output(tollkeeper().args(["verify", "--config", "no-such.yaml"]));
    assert_eq!(missing.status.code(), Some(2));
}

#[test]
fn tier_and_override_choose_the_quota() {
    let line = |key: &str, tier: &str| {
        let tier = if tier.is_empty() { String::new() } else { format!(r#","tier":"{tier}""#) };
        format!("{{\"t\":1,\"limit\":\"plan\",\"key\":[\"{key}\"],\"cost\":6{tier}}}\n")
    };
    let of = |text: &str| {
        let (code, keys) = judged(&[text]);
        (code, keys[0].2, keys[0].3)
    };
    assert_eq!(of(&line("sha256:111111111111", "free")), (Some(1), 6, 5));
    assert_eq!(of(&line("sha256:111111111111", "pro")), (Some(0), 6, 50));
    assert_eq!(of(&line("sha256:111111111111", "")), (Some(0), 6, 50), "without a tier, the largest one");
    // A key that changed its tier keeps its count.
    assert_eq!(
        of(&[line("sha256:111111111111", "free"), line("sha256:111111111111", "pro")].concat()),
        (Some(0), 12, 50)
    );
    // The first digits of the hash of `acme`.
    let acme = &tollkeeper_core::digest::hex(&tollkeeper_core::digest::sha256(b"acme"))[..12];
    assert_eq!(of(&line(&format!("sha256:{acme}"), "free")), (Some(0), 6, 70));
}

#[test]
fn staggered_windows_begin_at_their_shift() {
    const DAY: u64 = 86_400_000_000;
    let line = |t: u64, shift: &str| {
        format!("{{\"t\":{t},\"limit\":\"daily\",\"key\":[\"alice\"],\"cost\":5{shift}}}\n")
    };
    // With a shift of an hour, the day ends an hour before midnight.
    let across =
        |shift: &str| judged(&[&line(DAY - 3_600_000_001, shift), &line(DAY - 3_600_000_000, shift)]).0;
    assert_eq!(across(r#","shift":3600000000"#), Some(0));
    assert_eq!(across(r#","shift":3599999999"#), Some(1));
    // Without the field it follows from the key.
    let policy = tollkeeper::Policy::new(vec![
        tollkeeper::Limit::new("daily", tollkeeper::Quota::per_day(5))
            .by("user")
            .algorithm(tollkeeper::Algorithm::FixedWindow)
            .stagger(),
    ]);
    let alice = tollkeeper::facts! { "user" => "alice" };
    let toll = std::sync::Arc::new(policy.unwrap()).toll(tollkeeper::Verb::Check, &alice, 1).unwrap();
    let shift = toll.get(0).shift;
    let at = |off: u64| judged(&[&line(2 * DAY - shift - off, ""), &line(2 * DAY - shift, "")]).0;
    assert_eq!(at(1), Some(0));
    assert_eq!(judged(&[&line(2 * DAY - shift, ""), &line(2 * DAY - shift + 1, "")]).0, Some(1));
}

/// While nodes decide without the store, they admit one contract of their own, of at least one unit for each node.
#[test]
fn local_admissions_are_judged_apart() {
    let line = |cost: u64, degraded: &str| {
        format!("{{\"t\":1,\"limit\":\"per-user\",\"key\":[\"alice\"],\"cost\":{cost}{degraded}}}\n")
    };
    let local = r#","degraded":"local""#;
    let both = [line(2, ""), line(4, local), line(1, "")].concat();
    let (code, keys) = judged(&[&both]);
    assert_eq!(code, Some(0));
    let numbers: Vec<_> = keys.iter().map(|(_, _, needed, of, _)| (*needed, *of)).collect();
    assert_eq!(numbers, [(3, 3), (4, 4)]);
    assert_eq!(judged(&[&line(5, local)]).0, Some(1));
    let output = verify(&Folder::new(), &[&line(99, r#","degraded":"allow""#)]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report, json!({ "kept": true, "keys": [], "unjudged": 1 }));
}

#[test]
fn standard_input_is_a_history() {
    use std::io::Write as _;
    let folder = Folder::new();
    let config = folder.write("limits.yaml", LIMITS);
    let mut command = tollkeeper();
    command.args(["verify", "--config"]).arg(config);
    command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(user(1, 4).as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
}

const SERVED: &str = "
validate: { ignore: [W001] }
http: { facts: { api_key: { from: header.x-api-key, hash: true } } }
limits:
  - { name: per-user, by: user, rate: 1/day, burst: 5 }
  - { name: keys, by: api_key, rate: 100/day, missing: share, mode: shadow }
  - { name: plan, by: user, tier: plan, tiers: { free: 3/day, pro: 9/day }, default_tier: free, algorithm: sliding-log }
  - { name: exports, by: user, algorithm: concurrency, limit: 9 }
";

#[test]
fn logged_admissions_are_judged_kept() {
    let folder = Folder::new();
    let (config, log) = (folder.write("served.yaml", SERVED), folder.path().join("admissions.jsonl"));
    let mut command = tollkeeper();
    command.args(["serve", "--http", "127.0.0.1:0", "--config"]).arg(&config);
    command.arg("--log-admissions").arg(&log);
    let server = Server::launch(&mut command);
    let mut admitted = 0;
    for _ in 0..10 {
        admitted += u64::from(server.check(r#"{"user":"alice","api_key":"secret","plan":"pro"}"#));
    }
    assert_eq!(admitted, 5);
    server.post("/v1/peek", r#"{"facts":{"user":"carol"}}"#);
    assert!(server.post("/v1/acquire", r#"{"facts":{"user":"bob"}}"#).json()["allowed"].as_bool().unwrap());
    assert_eq!(server.metric("tollkeeper_admission_log_dropped_total"), 0.0);
    server.signal("TERM");
    server.ended();

    let written = fs::read_to_string(&log).unwrap();
    let lines: Vec<Value> = written.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(!written.contains("secret"), "{written}");
    // Three limits for each request of alice; bob's has no slot in it.
    assert_eq!(lines.len(), 3 * 5 + 3, "{written}");
    assert_eq!(lines[2]["tier"], "pro");
    assert_eq!(lines[0]["tier"], Value::Null);
    assert!(lines[1]["key"][0].as_str().unwrap().starts_with("sha256:"));
    let permissions = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&log).unwrap().permissions());
    assert_eq!(permissions & 0o777, 0o600);

    let output = output(tollkeeper().args(["verify", "--json", "--config"]).arg(&config).arg(&log));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &report["kept"]), (Some(0), &json!(true)), "{report}");
    assert_eq!((&report["keys"][0]["needed"], &report["keys"][0]["of"]), (&json!(5), &json!(5)));
}

/// The config file does not have the quota of an override at run time, so the log does.
#[test]
fn admissions_under_an_override_are_judged_by_it() {
    let folder = Folder::new();
    let served = format!("admin: {{ token_sha256: {} }}\n{SERVED}", hex(&sha256(b"boss")));
    let (config, log) = (folder.write("served.yaml", &served), folder.path().join("admissions.jsonl"));
    let mut command = tollkeeper();
    command.args(["serve", "--http", "127.0.0.1:0", "--config"]).arg(&config);
    let server = Server::launch(command.arg("--log-admissions").arg(&log));
    for (key, body) in [
        ("per-user/alice", r#"{"rate":"1/day","burst":8}"#),
        ("plan/alice", r#"{"rate":"70/week"}"#),
        ("keys/secret", r#"{"unlimited":true}"#),
    ] {
        let (path, token) = (format!("/v1/overrides/{key}"), ["authorization: Bearer boss"]);
        let set = server.client().request_with("PUT", &path, &token, body.as_bytes());
        assert_eq!(set.status, 200, "{set:?}");
    }
    let alice = r#"{"user":"alice","api_key":"secret","plan":"free"}"#;
    assert_eq!((0..10).filter(|_| server.check(alice)).count(), 8);
    assert!(server.check(r#"{"user":"bob","plan":"free"}"#));
    server.signal("TERM");
    server.ended();

    let written = fs::read_to_string(&log).unwrap();
    let lines: Vec<Value> = written.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |limit: &str| lines.iter().find(|line| line["limit"] == limit).unwrap()["override"].clone();
    assert_eq!(of("per-user"), json!({ "rate": "1/day", "burst": 8 }));
    assert_eq!(of("plan"), json!({ "rate": "70/week" }));
    assert_eq!(lines.last().unwrap()["override"], Value::Null, "bob has none: {written}");
    let output = output(tollkeeper().args(["verify", "--json", "--config"]).arg(&config).arg(&log));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &report["kept"]), (Some(0), &json!(true)), "{report}");
    assert_eq!((&report["keys"][0]["needed"], &report["keys"][0]["of"]), (&json!(8), &json!(8)));
}

/// Decisions go on, and what is missing in the log is counted.
#[test]
fn lines_that_cannot_be_written_are_counted() {
    let folder = Folder::new();
    let config = folder.write("served.yaml", SERVED);
    let mut command = tollkeeper();
    command.args(["serve", "--http", "127.0.0.1:0", "--config"]);
    let server = Server::launch(command.arg(&config).args(["--log-admissions", "/dev/full"]));
    assert!(server.check(r#"{"user":"alice"}"#));
    eventually("the lines are counted", || server.metric("tollkeeper_admission_log_dropped_total") == 3.0);
    server.logs("3 admissions were not written to the log: No space left on device");

    let mut command = tollkeeper();
    let output =
        output(command.args(["serve", "--http", "127.0.0.1:0", "--log-admissions", "/no/such/file"]));
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("cannot open /no/such/file for a log of admissions"));
}

/// The reader of a pipe reads nothing until the server drains, so most lines are still queued then.
#[test]
fn queued_lines_are_written_before_the_end() {
    let folder = Folder::new();
    let config = folder.write("served.yaml", "limits: [{ name: all, by: user, rate: 1000/day }]");
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let opened = pipe.clone();
    let reader = std::thread::spawn(move || fs::File::open(opened).unwrap());
    let mut command = tollkeeper();
    command.args(["serve", "--http", "127.0.0.1:0", "--config"]).arg(&config);
    let server = Server::launch(command.arg("--log-admissions").arg(&pipe));
    let long = "x".repeat(1_000);
    let facts = format!("{{\"facts\":{{\"user\":\"{long}\"}}}}");
    let mut client = server.client();
    for _ in 0..1_000 {
        assert_eq!(client.request("POST", "/v1/check", &facts).status, 200);
    }
    server.signal("TERM");
    eventually("the server drains", || server.is_closed());
    let mut written = String::new();
    std::io::Read::read_to_string(&mut reader.join().unwrap(), &mut written).unwrap();
    assert_eq!(written.lines().count(), 1_000);
    server.ended();
}
