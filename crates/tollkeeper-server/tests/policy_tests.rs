//! `tollkeeper test`: every key of a row, right and wrong; the output and the exit codes; the tests of the ready-made
//! policies, and what they notice.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::path::Path;

use serde_json::{Value, json};
use support::*;
use tollkeeper::config::{Config, Format, TestFile};
use tollkeeper::{Algorithm, Mode};
use tollkeeper_server::command::init::{TEMPLATES, Template};
use tollkeeper_server::policy_test::coverage::Coverage;
use tollkeeper_server::policy_test::{run_tests, start};

fn parse(template: &Template) -> (Config, TestFile) {
    let none = |_: &str| None;
    let (config, _) = Config::parse(template.name, Format::Yaml, template.text.as_bytes(), &none).unwrap();
    let tests = TestFile::parse(template.name, Format::Yaml, template.tests.as_bytes(), &none);
    (config, tests.unwrap_or_else(|report| panic!("{report}")))
}

/// The failed expectations of a policy's tests.
fn failures(config: &Config, file: &TestFile) -> (Vec<String>, Coverage) {
    let mut coverage = Coverage::new(config);
    let start = start(file, Path::new("tests")).unwrap();
    let results = run_tests(&file.tests, config, start, &mut coverage).unwrap();
    let failures = results.into_iter().flat_map(|test| test.failures);
    (failures.map(|failure| format!("{}: {}", failure.line, failure.message)).collect(), coverage)
}

/// As a user runs them: `init NAME > NAME.yaml`, `init NAME --tests > NAME.tests.yaml`, `test NAME.tests.yaml`.
#[test]
fn ready_policies_pass_their_tests() {
    let folder = Folder::new();
    let mut files = Vec::new();
    for template in &TEMPLATES {
        for (args, name) in [
            (vec!["init", template.name], format!("{}.yaml", template.name)),
            (vec!["init", template.name, "--tests"], format!("{}.tests.yaml", template.name)),
        ] {
            let printed = run(&args);
            assert!(printed.status.success());
            files.push(folder.write(&name, text(&printed.stdout)));
        }
    }
    let tests = files.iter().filter(|file| file.to_str().unwrap().ends_with(".tests.yaml"));
    let output = output(tollkeeper().args(["test", "--json", "--coverage"]).args(tests));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &report["failed"]), (Some(0), &json!(0)), "{}", text(&output.stdout));
    assert!(report["passed"].as_u64().unwrap() > 25);
    for file in report["files"].as_array().unwrap() {
        assert_eq!(file["unmatched"], json!([]), "{}", file["file"]);
    }
    // `validate` knows about them.
    let validated = output_of_validate(&files[0]);
    assert!(validated.contains("note: run its tests with `tollkeeper test "), "{validated}");
}

fn output_of_validate(file: &Path) -> String {
    text(&output(tollkeeper().arg("validate").arg(file)).stdout).to_owned()
}

/// Every other algorithm for a limit, and every other number, is noticed by the tests of its policy.
#[test]
fn tests_of_ready_policies_notice_changes() {
    let mut survivors = Vec::new();
    let (mut count, mut algorithms) = (0, std::collections::BTreeSet::new());
    for template in &TEMPLATES {
        let (config, tests) = parse(template);
        assert_eq!(failures(&config, &tests).0, [""; 0], "{}", template.name);
        for (index, limit) in config.limits.iter().enumerate() {
            let original = serde_json::to_value(limit).unwrap();
            let mut mutants: Vec<(String, Value)> = Vec::new();
            // The buckets differ only in their delays, and a shadow limit delays nothing.
            let is_alike = |other: Algorithm| {
                other == limit.algorithm || (limit.mode == Mode::Shadow && other == Algorithm::LeakyBucket)
            };
            for algorithm in Algorithm::ALL.into_iter().filter(|other| !is_alike(*other)) {
                let mut mutant = original.clone();
                mutant["algorithm"] = json!(algorithm.name());
                if !algorithm.has_burst() {
                    without_burst(&mut mutant);
                }
                mutants.push((format!("algorithm {algorithm}"), mutant));
            }
            for (pointer, number) in numbers(&original, String::new()) {
                for changed in [number + 1, number - 1] {
                    let mut mutant = original.clone();
                    set(&mut mutant, &pointer, changed);
                    mutants.push((format!("{pointer} {changed}"), mutant));
                }
            }
            for (what, mutant) in mutants {
                let mut limits: Vec<Value> =
                    config.limits.iter().map(|limit| serde_json::to_value(limit).unwrap()).collect();
                limits[index] = mutant;
                let text = json!({ "limits": limits }).to_string();
                let Ok((mutant, _)) = config.with_limits("mutant", text.as_bytes()) else { continue };
                count += 1;
                algorithms.insert(limit.algorithm.name());
                if failures(&mutant, &tests).0.is_empty() {
                    survivors.push(format!("{}: {}: {what}", template.name, limit.name));
                }
            }
        }
    }
    assert_eq!(algorithms.len(), Algorithm::ALL.len(), "{algorithms:?}");
    assert!(count > 150, "{count} mutants");
    assert_eq!(survivors, [""; 0], "of {count} mutants");
}

fn without_burst(value: &mut Value) {
    if let Value::Object(fields) = value {
        fields.remove("burst");
        fields.values_mut().for_each(without_burst);
    }
}

/// The pointers to the counts of rates, bursts and slots.
fn numbers(value: &Value, pointer: String) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    for (name, inner) in value.as_object().into_iter().flatten() {
        let pointer = format!("{pointer}/{name}");
        match (name.as_str(), inner) {
            ("rate", Value::String(rate)) => {
                found.push((pointer, rate.split('/').next().unwrap().parse().unwrap()));
            }
            ("burst" | "limit", Value::Number(number)) => found.push((pointer, number.as_u64().unwrap())),
            (_, Value::Object(_)) => found.extend(numbers(inner, pointer)),
            _ => {}
        }
    }
    found
}

fn set(value: &mut Value, pointer: &str, number: u64) {
    let found = value.pointer_mut(pointer).unwrap();
    *found = match found.as_str() {
        Some(rate) => json!(format!("{number}/{}", rate.split_once('/').unwrap().1)),
        None => json!(number),
    };
}

const LIMITS: &str = "limits:
  - { name: per-user, by: user, rate: 10/s, burst: 2 }
  - { name: queue, by: queue, rate: 1/s, burst: 2, algorithm: leaky-bucket }
  - { name: slots, by: slot, algorithm: concurrency, limit: 1 }
  - { name: tokens, by: key, rate: 100/min, cost: tokens, algorithm: fixed-window }
  - { name: failures, by: failing, rate: 1/hour, algorithm: sliding-log, deduct_when: { status: [401] } }
  - { name: trial, by: user, rate: 1/day, mode: shadow }
";

/// Runs rows on [`LIMITS`]: the exit code, and the failures as `line:column message`.
fn rows(folder: &Folder, rows: &[&str]) -> (Option<i32>, Vec<String>, String) {
    let rows: String = rows.iter().map(|row| format!("      - {row}\n")).collect();
    let file = folder.write("a.tests.yaml", &format!("{LIMITS}tests:\n  - name: rows\n    rows:\n{rows}"));
    let output = output(tollkeeper().args(["test", "--json"]).arg(&file));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let failures = report.pointer("/files/0/tests/0/failures").and_then(Value::as_array).cloned();
    let failures = failures.unwrap_or_default().into_iter().map(|failure| {
        format!("{}:{} {}", failure["line"], failure["column"], failure["message"].as_str().unwrap())
    });
    (output.status.code(), failures.collect(), text(&output.stderr).to_owned())
}

#[test]
fn every_expectation_holds_or_fails_with_its_place() {
    let folder = Folder::new();
    let alice = "facts: { user: alice }";
    let right: Vec<String> = vec![
        format!("{{ {alice}, times: 2, expect: allowed, by: per-user, remaining: {{ per-user: 0 }}, limits: [trial, per-user], would_refuse: [trial] }}"),
        format!("{{ {alice}, expect: refused, by: per-user, retry_after: 100ms, headers: {{ retry-after: '1' }} }}"),
        format!("{{ {alice}, cost: 3, expect: never }}"),
        format!("{{ at: 99999us, {alice}, expect: refused, retry_after: 1us }}"),
        format!("{{ at: 100ms, {alice}, verb: peek, times: 5, expect: allowed }}"),
        format!("{{ at: 100ms, {alice}, times: 3, every: 100ms, expect: allowed }}"),
        "{ at: 1s, facts: { queue: q }, expect: allowed, delay: 0s }".to_owned(),
        "{ at: 1s, facts: { queue: q }, expect: allowed, delay: 1s }".to_owned(),
        "{ at: 1s, facts: { slot: s }, verb: acquire, as: one, expect: allowed }".to_owned(),
        "{ at: 1s, facts: { slot: s }, verb: acquire, expect: refused, by: slots }".to_owned(),
        "{ at: 1s, verb: release, of: one, expect: allowed }".to_owned(),
        "{ at: 1s, verb: release, of: one, expect: refused }".to_owned(),
        "{ at: 1s, facts: { key: k, tokens: 80 }, verb: reserve, as: r, expect: allowed, remaining: { tokens: 20 } }".to_owned(),
        "{ at: 1s, facts: { tokens: 30 }, verb: settle, of: r, expect: allowed }".to_owned(),
        "{ at: 1s, facts: { key: k, tokens: 70 }, as: c, expect: allowed, remaining: { tokens: 0 } }".to_owned(),
        "{ at: 1s, verb: refund, of: c, expect: allowed }".to_owned(),
        "{ at: 1s, verb: refund, of: c, expect: refused }".to_owned(),
        "{ at: 1s, facts: { key: k, tokens: x }, expect: invalid_cost }".to_owned(),
        "{ at: 1s, facts: { ip: nowhere }, expect: invalid_fact }".to_owned(),
        "{ at: 1s, facts: { failing: f }, status: 200, times: 3, expect: allowed }".to_owned(),
        "{ at: 1s, facts: { failing: f }, status: 401, expect: allowed }".to_owned(),
        "{ at: 1s, facts: { failing: f }, status: 401, expect: refused, by: failures }".to_owned(),
        "{ at: 1s, request: GET /, expect: allowed, limits: [] }".to_owned(),
        "{ at: 1s, request: 'GET no path', expect: 400 }".to_owned(),
    ];
    let right: Vec<&str> = right.iter().map(String::as_str).collect();
    let (code, failed, stderr) = rows(&folder, &right);
    assert_eq!((code, &failed[..], stderr.as_str()), (Some(0), &[][..], ""));
    // The row is on line 11 and begins in column 9; `^` marks what does not hold.
    for (row, expected) in [
        ("{ facts: { user: a }, expect: ^refused }", "expected refused, was allowed"),
        (
            "{ facts: { user: a }, times: 3, expect: ^allowed }",
            "expected allowed, was refused by per-user, retry_after 100ms (number 3 of 3)",
        ),
        ("{ facts: { user: a }, cost: 3, expect: ^refused }", "expected refused, was never by per-user"),
        ("{ facts: { user: a }, expect: ^never }", "expected never, was allowed"),
        ("{ facts: { user: a }, expect: ^400 }", "expected 400, was allowed"),
        (
            "{ facts: { key: k, tokens: x }, expect: ^413 }",
            "expected 413, was 400 invalid_cost: limit `tokens` charges the number in fact `tokens`, but it is not a whole number",
        ),
        ("{ facts: { user: a }, expect: allowed, by: ^queue }", "expected by queue, was per-user"),
        ("{ facts: { user: a }, expect: allowed, retry_after: ^1s }", "expected retry_after 1s, was none"),
        (
            "{ facts: { queue: a }, times: 2, expect: allowed, delay: ^2s }",
            "expected delay 2s, was 1s (number 2 of 2)",
        ),
        (
            "{ facts: { user: a }, expect: allowed, remaining: { per-user: ^2 } }",
            "expected 2 remaining of per-user, was 1",
        ),
        (
            "{ facts: { user: a }, expect: allowed, remaining: { queue: ^2 } }",
            "expected 2 remaining of queue, was not applied",
        ),
        (
            "{ facts: { user: a }, expect: allowed, ^limits: [per-user] }",
            "expected limits [per-user], was [per-user, trial]",
        ),
        (
            "{ facts: { user: a }, expect: allowed, ^would_refuse: [trial] }",
            "expected would_refuse [trial], was []",
        ),
        (
            "{ facts: { user: a }, expect: allowed, headers: { x-ratelimit-limit: ^'7' } }",
            "expected header x-ratelimit-limit `7`, was `2`",
        ),
        (
            "{ facts: { user: a }, expect: allowed, headers: { retry-after: ^'7' } }",
            "expected header retry-after `7`, was absent",
        ),
        ("{ facts: { slot: s }, verb: acquire, as: x, expect: ^refused }", "expected refused, was allowed"),
    ] {
        let expected = format!("11:{} {expected}", 9 + row.find('^').unwrap());
        let (code, failures, stderr) = rows(&folder, &[&row.replace('^', "")]);
        assert_eq!((code, failures.first()), (Some(1), Some(&expected)), "{row} {stderr}");
    }
}

#[test]
fn errors_of_test_files_exit_with_2() {
    let folder = Folder::new();
    for (row, words) in [
        ("{ expect: allowed, wat: 1 }", "unknown key `wat`"),
        ("{ facts: { user: a } }", "`expect` is missing"),
        ("{ expect: alowed }", "did you mean `allowed`?"),
        ("{ expect: 200 }", "`expect` cannot be `200`"),
        ("{ at: soon, expect: allowed }", "is not a duration"),
        ("{ expect: allowed, by: typo }", "11:32: unknown limit `typo` (there are per-user, queue"),
        ("{ expect: allowed, limits: [typo] }", "unknown limit `typo`"),
        ("{ expect: allowed, remaining: { typo: 1 } }", "unknown limit `typo`"),
        ("{ expect: allowed, request: GET /, facts: { user: a } }", "`facts` or a `request`, not both"),
        ("{ expect: allowed, body: x }", "are parts of a `request`"),
        ("{ expect: allowed, verb: release }", "`of` is missing"),
        ("{ expect: allowed, of: x }", "`of` is only for"),
        ("{ expect: allowed, verb: release, of: x }", "no row above has `as: x`"),
        ("{ expect: allowed, times: 0 }", "must be from 1"),
        ("{ expect: allowed, request: GET /, peer: here }", "is not an IP address"),
    ] {
        let (code, _, stderr) = rows(&folder, &[row]);
        assert_eq!(code, Some(2), "{row}: {stderr}");
        assert!(stderr.contains(words) && stderr.contains("a.tests.yaml:"), "{row}: {stderr}");
    }
    let (code, _, stderr) = rows(&folder, &["{ at: 2s, expect: allowed }", "{ at: 1s, expect: allowed }"]);
    assert_eq!(code, Some(2));
    assert!(
        stderr.contains("a.tests.yaml:12:15: error: this is before the row above, which ends at 2s"),
        "{stderr}"
    );
    for (text, words) in [
        ("tests: []\n", "the file has no `policy`"),
        ("policy: missing.yaml\ntests: []\n", "missing.yaml"),
        ("limits: []\nstart: now\ntests: []\n", "2:8: `start` must be a time of RFC 3339"),
        ("limits: [{ name: a, rate: 5/1 mn }]\ntests: []\n", "period `1 mn` is not a duration"),
        ("limits: []\n", "`tests` is missing"),
    ] {
        let file = folder.write("b.tests.yaml", text);
        let output = output(tollkeeper().arg("test").arg(&file));
        let stderr = support::text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}: {stderr}");
        assert!(stderr.contains(words), "{text}: {stderr}");
    }
    // Exit 2 wins over 1, and the other files run all the same.
    let bad = folder.write("bad.tests.yaml", "tests: 1\n");
    let failing = "limits: []\ntests: [{ name: 'fails # always', rows: [{ expect: refused }] }, { name: passes, rows: [] }]\n";
    let failing = folder.write("failing.tests.yaml", failing);
    let both = output(tollkeeper().arg("test").args([&bad, &failing]));
    assert_eq!(both.status.code(), Some(2));
    let printed = text(&both.stdout);
    assert!(printed.starts_with("TAP version 14\n1..2\nnot ok 1 - fails \\# always\n  ---\n"), "{printed}");
    assert!(printed.contains("failing.tests.yaml:2:52\": \"expected refused, was allowed\""), "{printed}");
    assert!(printed.ends_with("\n  limits:\n  ...\nok 2 - passes\n"), "{printed}");
    assert_eq!(output(tollkeeper().arg("test").arg(&failing)).status.code(), Some(1));
}

/// TOML and JSON files, a policy next to the file, variables, and a start.
#[test]
fn files_of_every_format_are_run() {
    let folder = Folder::new();
    folder.write(
        "policy.yaml",
        "limits: [{ name: day, by: user, rate: '${RATE}/day', algorithm: fixed-window }]\n",
    );
    let toml = "policy = \"policy.yaml\"\nstart = \"2026-03-01T23:59:59Z\"\n[[tests]]\nname = \"a\"\n\
                rows = [ { facts = { user = \"a\" }, times = 2, expect = \"allowed\" }, \
                { facts = { user = \"a\" }, expect = \"refused\", retry_after = \"1s\" } ]\n";
    let json = json!({ "policy": "policy.yaml", "tests": [{ "name": "b", "facts": { "user": 7 }, "rows": [
        { "times": 2, "expect": "allowed" }, { "expect": "refused", "retry_after": "24h" } ] }] });
    let files = [folder.write("a.tests.toml", toml), folder.write("b.tests.json", &json.to_string())];
    let output = output(tollkeeper().arg("test").args(&files).env("RATE", "2"));
    let expected = "TAP version 14\n1..2\nok 1 - a\nok 2 - b\n";
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), expected), "{}", text(&output.stderr));
}

#[test]
fn coverage_lists_what_no_row_matches() {
    let folder = Folder::new();
    let file = folder.write(
        "a.tests.yaml",
        "limits:
  - { name: a, by: ip, rate: 1/s, allow: [10.0.0.0/8, 192.0.2.1] }
  - { name: b, by: user, tier: plan, tiers: { free: 1/s, pro: 2/s }, default_tier: free, overrides: { x: 5/s, y: 6/s } }
  - { name: c, when: { route: /never }, rate: 1/s }
  - { name: off, rate: 1/s, mode: off }
tests:
  - name: some
    rows:
      - { facts: { ip: 10.1.2.3, user: x }, expect: allowed }
      - { facts: { user: z }, expect: allowed }
",
    );
    let output = output(tollkeeper().args(["test", "--coverage"]).arg(&file));
    let printed = text(&output.stdout);
    let unmatched: Vec<&str> =
        printed.lines().filter_map(|line| line.strip_prefix("# no row matches: ")).collect();
    let expected =
        ["limit a", "limit a, allow 192.0.2.1", "limit b, tier pro", "limit b, override y", "limit c"];
    let unmatched: Vec<&str> = unmatched.iter().map(|line| line.split(" (").next().unwrap()).collect();
    assert_eq!((output.status.code(), &unmatched[..]), (Some(0), &expected[..]), "{printed}");
}
