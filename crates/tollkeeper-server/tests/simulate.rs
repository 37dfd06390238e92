//! `tollkeeper simulate`: its decisions against other programs, its formats, options, reports and exit codes.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

use serde_json::{Value, json};
use support::*;
use tollkeeper::config::{Config, Format as FileFormat};
use tollkeeper_server::simulate::format::{Format, FormatName, Mapping};
use tollkeeper_server::simulate::logged::Context;
use tollkeeper_server::simulate::order::OrderSettings;
use tollkeeper_server::simulate::plan;
use tollkeeper_server::simulate::progress::Progress;
use tollkeeper_server::simulate::read::{self, Head, ReadSettings};
use tollkeeper_server::simulate::source::{Input, Source};
use tollkeeper_server::simulate::tally::Detail;
use tollkeeper_server::simulate::worker::{FactReader, Group, Names, Worker};
use tollkeeper_server::simulate::world::World;

/// 2026-11-16 11:29:05 UTC.
const START: u64 = 1_794_828_545;

/// Numbers that look random and are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }

    /// As `below`, with low numbers more often.
    fn uneven(&mut self, end: u64) -> u64 {
        let end = 1 + self.below(end);
        self.below(end)
    }
}

/// A line in combined format.
fn combined(second: u64, ip: &str, path: &str) -> String {
    let (day, time) = ((second / 86_400) % 28 + 1, second % 86_400);
    let clock = format!("{:02}:{:02}:{:02}", time / 3_600, time / 60 % 60, time % 60);
    format!("{ip} - - [{day:02}/Nov/2025:{clock} +0000] \"GET {path} HTTP/1.1\" 200 12 \"-\" \"-\"\n")
}

/// Random lines over about an hour: a few busy addresses and paths, and seconds of very different sizes.
fn random_log(lines: usize) -> String {
    let mut random = Random(7);
    let mut log = String::new();
    let (mut count, mut second) = (0, 0);
    while count < lines {
        second += 1 + random.below(20) / 18 * random.below(9);
        for _ in 0..random.uneven(40) {
            let (ip, path) = (format!("192.0.2.{}", random.uneven(30)), format!("/{}", random.uneven(8)));
            log += &combined(second, &ip, &path);
            count += 1;
        }
    }
    log
}

struct Simulated {
    code: Option<i32>,
    report: Value,
    stderr: String,
}

/// Runs `simulate --json` on a log and a policy.
fn simulate(folder: &Folder, policy: &str, log: &str, args: &[&str]) -> Simulated {
    let (config, file) = (folder.write("policy.yaml", policy), folder.write("access.log", log));
    simulate_files(&config, &[file], args)
}

fn simulate_files(config: &PathBuf, logs: &[PathBuf], args: &[&str]) -> Simulated {
    let mut command = tollkeeper();
    command.args(["simulate", "--json", "--config"]).arg(config).args(args).args(logs);
    let output = output(&mut command);
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr).to_owned());
    assert!(!stderr.contains("panicked"), "{stderr}");
    let report = if stdout.is_empty() { Value::Null } else { serde_json::from_str(stdout).unwrap() };
    Simulated { code: output.status.code(), report, stderr }
}

/// The verdict of every limit for every line, in the order of arrival: one batch for each line.
fn decisions(
    folder: &Folder,
    policy: &str,
    log: &str,
    name: &FormatName,
    fields: &[(&str, &str)],
) -> Vec<Vec<bool>> {
    let file = folder.write("lines.log", log);
    let (config, _) = Config::parse("policy.yaml", FileFormat::Yaml, policy.as_bytes(), &|_| None).unwrap();
    let mapping = Mapping {
        fields: fields
            .iter()
            .filter(|(name, _)| *name != "time")
            .map(|(a, b)| ((*a).into(), (*b).into()))
            .collect(),
        time: fields.iter().find(|(name, _)| *name == "time").map(|(_, field)| (*field).to_owned()),
        used_facts: plan::used_facts([&config].into_iter()),
        ..Mapping::default()
    };
    let wanted = plan::wanted_headers([&config].into_iter(), &mapping.used_facts);
    let context = Context { wanted, facts: mapping.facts(), latest: u64::MAX, ..Context::default() };
    let format = Format::new(name, &mapping).unwrap();
    let inputs = [Input::File(file)];
    let source = Source::open(&inputs).unwrap();
    let interrupted = AtomicBool::new(false);
    let head = Head::read(&source, &interrupted).unwrap();
    let spread = head.is_whole_seconds(&format, &context);
    let order = OrderSettings { is_end: true, spread, from: 0, until: u64::MAX };
    let names = Names::new(&context, false);
    let settings = ReadSettings { context, order, drop_status: Vec::new(), strict: true, batch: 1 };
    let world = World::new(config.policy.clone(), 1_000_000, Detail::Counts);
    let reader = FactReader::new(&config.http, &config.policy).unwrap();
    let mut worker = Worker::new(names, None, vec![Group::new(reader, vec![(0, world)])]);
    let mut before = vec![0; config.limits.len()];
    let mut verdicts = Vec::new();
    let progress = Progress::new(&source, false);
    let mut send = |batch| {
        worker.decide(&batch);
        let (results, _) = worker.finish(0);
        let refused: Vec<u64> = results[0].1.limits.iter().map(|limit| limit.refused).collect();
        verdicts.push(refused.iter().zip(&before).map(|(now, before)| now == before).collect());
        before = refused;
    };
    read::read((&source, &inputs), head, &format, &settings, &interrupted, &progress, &mut send).unwrap();
    verdicts
}

/// The oracle is a short program in Python that shares no code with this project: it reads the same file, spreads
/// seconds, and counts in its own way.
#[test]
fn decisions_agree_with_an_independent_program() {
    let folder = Folder::new();
    let log = random_log(10_000);
    let policy = "limits:
  - { name: fixed, by: ip, rate: 5/10s, algorithm: fixed-window }
  - { name: log, by: path, rate: 20/7s, algorithm: sliding-log }
";
    let ours = decisions(&folder, policy, &log, &FormatName::Combined, &[]);
    let file = folder.write("oracle.log", &log);
    let oracle = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/simulate/oracle.py");
    let theirs = output(Command::new("python3").arg(oracle).arg(&file));
    assert!(theirs.status.success(), "{}", text(&theirs.stderr));
    let theirs: Vec<Vec<bool>> =
        text(&theirs.stdout).lines().map(|line| line.split(' ').map(|word| word == "1").collect()).collect();
    assert!(ours.len() >= 10_000 && ours.len() == theirs.len());
    for (number, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        assert_eq!(ours, theirs, "line {number} in the order of arrival");
    }
    let refused = |limit: usize| ours.iter().filter(|verdicts| !verdicts[limit]).count();
    assert!(refused(0) > 500 && refused(1) > 500, "{} {}", refused(0), refused(1));
    // The command sums up the same decisions.
    let report = simulate_files(&folder.write("policy.yaml", policy), &[file], &[]).report;
    assert_eq!([&report["limits"][0]["refused"], &report["limits"][1]["refused"]], [refused(0), refused(1)]);
    let passed = ours.iter().filter(|verdicts| verdicts.iter().all(|allowed| *allowed)).count();
    assert_eq!(report["requests"]["allowed"], passed);
}

/// Every table of the algorithms as a log: its times, costs and verdicts. Rows that no log can have (refunds, a clock
/// that steps back, changes of the limit) end a table.
#[test]
fn decisions_agree_with_the_tables_of_the_algorithms() {
    let folder = Folder::new();
    let tables = tables();
    let (mut checked, mut names) = (0, std::collections::BTreeSet::new());
    for table in &tables {
        let mut log = String::new();
        for (micros, cost, _) in &table.rows {
            let (second, fraction) = (micros / 1_000_000, micros % 1_000_000);
            writeln!(log, "{{\"time\":{second}.{fraction:06},\"cost\":{cost}}}").unwrap();
        }
        let Table { algorithm, rate, burst, .. } = table;
        let burst = burst.map_or_else(String::new, |burst| format!(", burst: {burst}"));
        let policy =
            format!("limits: [{{ name: a, rate: {rate}{burst}, algorithm: {algorithm}, cost: cost }}]\n");
        let fields = [("time", "time"), ("cost", "cost")];
        let found: Vec<bool> = decisions(&folder, &policy, &log, &FormatName::Json, &fields)
            .into_iter()
            .map(|row| row[0])
            .collect();
        let expected: Vec<bool> = table.rows.iter().map(|(.., allowed)| *allowed).collect();
        assert_eq!(found, expected, "{policy}{log}");
        checked += expected.len();
        names.insert(algorithm.clone());
    }
    let all = ["fixed-window", "leaky-bucket", "sliding-log", "sliding-window", "token-bucket"];
    assert!(names.iter().eq(all), "{names:?}");
    assert!(checked > 500, "{checked} rows");
}

/// A table of an algorithm: its quota, and each check with its time, cost and verdict.
#[derive(Default)]
struct Table {
    algorithm: String,
    rate: String,
    burst: Option<u64>,
    rows: Vec<(u64, u64, bool)>,
}

fn tables() -> Vec<Table> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tollkeeper-core/src/algorithm");
    let mut tables = Vec::new();
    for entry in fs::read_dir(folder).unwrap().chain(fs::read_dir(format!("{folder}/vectors")).unwrap()) {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("trace") => trace(&fs::read_to_string(&path).unwrap(), &mut tables),
            Some("tsv") if name.contains("-per-") && !name.starts_with("meter") => {
                tables.push(vector(&name, &fs::read_to_string(&path).unwrap()));
            }
            _ => {}
        }
    }
    tables.retain(|table: &Table| !table.rows.is_empty());
    tables
}

/// The start of the tables: a Thursday, on which windows of every length begin.
const BASE: u64 = 2_915 * 7 * 86_400_000_000;

fn micros(text: &str) -> u64 {
    let unit = |text: &str| -> i64 {
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let unit: i64 = match &text[digits..] {
            "" | "us" => 1,
            "ms" => 1_000,
            "s" => 1_000_000,
            "m" => 60_000_000,
            "h" => 3_600_000_000,
            "d" => 86_400_000_000,
            "w" => 604_800_000_000,
            other => panic!("unit {other} in {text}"),
        };
        #[expect(clippy::cast_possible_truncation, reason = "the tables have small numbers")]
        let micros = (text[..digits].parse::<f64>().unwrap() * unit as f64).round() as i64;
        micros
    };
    let mut total = 0;
    let mut sign = 1;
    for (index, part) in text.split_inclusive(['+', '-']).enumerate() {
        let (number, next) = match part.strip_suffix(['+', '-']) {
            Some(number) => (number, if part.ends_with('-') { -1 } else { 1 }),
            None => (part, 1),
        };
        assert!(index == 0 || !number.is_empty());
        total += sign * if number.is_empty() { 0 } else { unit(number) };
        sign = next;
    }
    u64::try_from(total).unwrap()
}

fn trace(text: &str, tables: &mut Vec<Table>) {
    let mut ended = false;
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match &words[..] {
            ["quota:", algorithm, rate, rest @ ..] => {
                let burst =
                    rest.iter().position(|word| *word == "burst").map(|at| rest[at + 1].parse().unwrap());
                ended = rest.contains(&"shift") || rest.contains(&"hold") || *algorithm == "concurrency";
                tables.push(Table {
                    algorithm: (*algorithm).into(),
                    rate: (*rate).into(),
                    burst,
                    rows: Vec::new(),
                });
            }
            [_, "peek", ..] | [] => {}
            [time, "check", cost, verdict, ..] if !ended => {
                let rows = &mut tables.last_mut().unwrap().rows;
                let time = BASE + micros(time);
                ended = verdict.contains('/') || rows.last().is_some_and(|(last, ..)| *last > time);
                if !ended {
                    rows.push((time, cost.parse().unwrap(), *verdict == "allow"));
                }
            }
            _ => ended = true,
        }
    }
}

/// `token-bucket-7-per-60000000us-burst-20`.
fn vector(name: &str, text: &str) -> Table {
    let (head, rest) = name.split_once("-per-").unwrap();
    let (algorithm, count) = head.rsplit_once('-').unwrap();
    let (period, burst) =
        rest.split_once("-burst-").map_or((rest, None), |(period, burst)| (period, Some(burst)));
    let millis = period.trim_end_matches("us").parse::<u64>().unwrap() / 1_000;
    let mut table = Table {
        algorithm: algorithm.into(),
        rate: format!("{count}/{millis}ms"),
        burst: burst.map(|burst| burst.parse().unwrap()),
        rows: Vec::new(),
    };
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [time, cost, verdict @ ("allow" | "deny"), ..] = words[..] else { continue };
        table.rows.push((time.parse().unwrap(), cost.parse().unwrap(), verdict == "allow"));
    }
    table
}

/// Three limits of different algorithms, a tier, a shadow limit and a concurrency limit.
const POLICY: &str = "http: { routes: [/0, '/{any}'] }
limits:
  - { name: everyone, rate: 20/s, burst: 30 }
  - { name: per-ip, by: ip, rate: 10/10s }
  - { name: route, by: [ip, route], rate: 3/5s, algorithm: sliding-log, mode: shadow }
  - { name: queue, by: path, rate: 5/s, burst: 5, algorithm: leaky-bucket }
";

#[test]
fn report_does_not_depend_on_threads_batches_or_files() {
    let folder = Folder::new();
    let log = random_log(3_000);
    let args = ["--algorithms", "--suggest", "1%"];
    let expected = simulate(&folder, POLICY, &log, &args);
    assert_eq!(expected.code, Some(0), "{}", expected.stderr);
    assert!(expected.report["requests"]["refused"].as_u64().unwrap() > 100, "{}", expected.report);
    for (threads, batch) in [("1", "1"), ("2", "7"), ("3", "4096"), ("8", "100"), ("100", "100000")] {
        let args = ["--algorithms", "--suggest", "1%", "--threads", threads, "--batch", batch];
        assert_eq!(simulate(&folder, POLICY, &log, &args).report, expected.report, "{threads} {batch}");
    }
    let config = folder.path().join("policy.yaml");
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let half = log[..log.len() / 2].rfind('\n').unwrap() + 1;
    let (first, second) = log.split_at(half);
    let (gzip, zstd) = (gzip(first.as_bytes()), zstd::encode_all(second.as_bytes(), 3).unwrap());
    let members = [gzip.clone(), self::gzip(second.as_bytes())].concat();
    let cut = first.trim_end_matches('\n').as_bytes();
    for files in [
        // The names say nothing: the first bytes do.
        vec![write("all.gz", &members)],
        vec![write("all.txt", &zstd::encode_all(log.as_bytes(), 3).unwrap())],
        vec![write("1.log", &gzip), write("2.log", &zstd)],
        vec![write("1", first.as_bytes()), write("2", second.as_bytes())],
        // The last line of a file may lack its newline.
        vec![write("1", cut), write("2", second.as_bytes())],
    ] {
        assert_eq!(simulate_files(&config, &files, &args).report, expected.report, "{files:?}");
    }
    let piped = piped(&config, &["--algorithms"], log.as_bytes());
    let without = simulate(&folder, POLICY, &log, &["--algorithms"]);
    assert_eq!(piped.report, without.report);
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Runs `simulate --json` on standard input.
fn piped(config: &PathBuf, args: &[&str], bytes: &[u8]) -> Simulated {
    let mut command = tollkeeper();
    command.args(["simulate", "--json", "--config"]).arg(config).args(args);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || stdin.write_all(bytes));
        let output = child.wait_with_output().unwrap();
        let report = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        Simulated { code: output.status.code(), report, stderr: text(&output.stderr).to_owned() }
    })
}

#[test]
fn even_stream_of_whole_seconds_is_not_refused() {
    let folder = Folder::new();
    let policy = "limits: [{ name: steady, rate: 10/s, burst: 5 }]\n";
    let log: String = (0..600).map(|index| combined(index / 10, "192.0.2.1", "/")).collect();
    let spread = simulate(&folder, policy, &log, &[]).report;
    assert_eq!((&spread["spread"], &spread["requests"]["refused"]), (&json!(true), &json!(0)));
    let as_they_are = simulate(&folder, policy, &log, &["--no-spread"]).report;
    let expected = (json!(false), json!(300));
    assert_eq!((as_they_are["spread"].clone(), as_they_are["requests"]["refused"].clone()), expected);
    // Milliseconds are never spread.
    let log: String = (0..600).map(|index| format!("{}.001 192.0.2.1\n", START + index / 10)).collect();
    let format = ["--format", "$msec $remote_addr"];
    let exact = simulate(&folder, policy, &log, &format).report;
    assert_eq!((&exact["spread"], &exact["requests"]["refused"]), (&json!(false), &json!(300)));
}

/// Arrival is the logged end minus the duration, so a slow request arrived before a fast one that is logged earlier.
#[test]
fn arrival_is_the_end_minus_the_duration() {
    let folder = Folder::new();
    let policy = "limits: [{ name: one, rate: 1/100s, algorithm: fixed-window, by: ip }]\n";
    let line = |end: u64, duration: &str, ip: &str| format!("{}.000 {duration} {ip}\n", 1_794_828_500 + end);
    let log = [line(99, "0.5", "192.0.2.1"), line(101, "2.0", "192.0.2.1")].concat();
    let format = ["--format", "$msec $request_time $remote_addr"];
    let report = simulate(&folder, policy, &log, &format).report;
    assert_eq!(
        report["requests"],
        json!({ "allowed": 1, "refused": 1, "invalid": 0 }),
        "both before second 100"
    );
    assert_eq!(report["limits"][0]["top"][0]["first"], 1_794_828_599);
    let start = simulate(&folder, policy, &log, &[&format[..], &["--time-is", "start"]].concat()).report;
    assert_eq!(start["requests"], json!({ "allowed": 2, "refused": 0, "invalid": 0 }), "in two windows");
}

#[test]
fn late_lines_are_counted_at_the_current_time() {
    let folder = Folder::new();
    let log: String = [0, 30, 50, 20, 51].iter().map(|second| combined(*second, "192.0.2.1", "/")).collect();
    let policy = "limits: [{ name: a, rate: 100/s }]\n";
    let late = simulate(&folder, policy, &log, &["--fail-if", "late>0", "--fail-if", "late>20%"]);
    assert_eq!(late.code, Some(1), "{}", late.stderr);
    assert_eq!(late.report["lines"], json!({ "read": 5, "used": 5, "unreadable": 0, "late": 1 }));
    let fail_if = json!([
        { "expr": "late>0", "value": 1.0, "held": true }, { "expr": "late>20%", "value": 20.0, "held": false },
    ]);
    assert_eq!(late.report["fail_if"], fail_if);
    assert!(late.stderr.contains("late: name the oldest file first"), "{}", late.stderr);
}

#[test]
fn slots_are_held_for_the_duration() {
    let folder = Folder::new();
    let policy = "limits: [{ name: slots, by: ip, algorithm: concurrency, limit: 2 }]\n";
    let line = |end: &str, duration: &str| format!("{end} {duration} 192.0.2.1\n");
    // Arrivals at 0, 1, 2 and 11 s; the first two end at 10 and 11 s.
    let log = [
        line("1794828502", "0"),
        line("1794828510", "10"),
        line("1794828511", "10"),
        line("1794828520", "9"),
    ];
    let format = ["--format", "$msec $request_time $remote_addr", "--no-spread"];
    let report = simulate(&folder, policy, &log.concat(), &format).report;
    assert_eq!(report["limits"][0]["refused"], 1, "{report}");
    assert_eq!(report["limits"][0]["top"][0]["first"], 1_794_828_502);
    let without = simulate(&folder, policy, &combined(1, "192.0.2.1", "/"), &[]);
    assert_eq!(without.code, Some(2));
    assert!(without.stderr.contains("needs durations, which this log does not say"), "{}", without.stderr);
}

#[test]
fn charges_are_given_back_by_status() {
    let folder = Folder::new();
    let policy = "limits:
  - { name: failures, by: ip, rate: 2/hour, algorithm: sliding-log, deduct_when: { status: [401] } }
";
    let line = |second: u64, status: u16, duration: f64| {
        format!(
            "{} {status} {duration} 192.0.2.1 GET /\n",
            f64::from(u32::try_from(START + second).unwrap()) + 0.5
        )
    };
    let format = ["--format", "$msec $status $request_time $remote_addr $request", "--time-is", "start"];
    let at = |statuses: &[u16], duration: f64| {
        let lines = (0..).zip(statuses).map(|(second, status)| line(second, *status, duration));
        let log: String = lines.collect();
        simulate(&folder, policy, &log, &format).report["limits"][0]["refused"].clone()
    };
    assert_eq!(at(&[200; 10], 0.0), 0, "each is given back at once");
    assert_eq!(at(&[200, 401, 200, 401, 200], 0.0), 1, "two failures stay");
    // Given back after 1.5 s, so every third request finds both in use: 0, 1, (2), 3, 4, (5), …
    assert_eq!(at(&[200; 9], 1.5), 0);
    assert_eq!(at(&[200; 9], 2.5), 3);
}

#[test]
fn leaky_bucket_reports_its_delays() {
    let folder = Folder::new();
    let policy = "limits: [{ name: queue, rate: 1/s, burst: 3, algorithm: leaky-bucket }]\n";
    let log = combined(1, "192.0.2.1", "/").repeat(4);
    let report = simulate(&folder, policy, &log, &["--no-spread"]).report;
    let limit = &report["limits"][0];
    assert_eq!(limit["refused"], 1, "{report}");
    assert_eq!(limit["delay"]["longest"], 2.0);
    assert!((0.9..1.1).contains(&limit["delay"]["p50"].as_f64().unwrap()), "{limit}");
    assert_eq!(limit["longest_wait"], 1.0);
}

#[test]
fn shadow_limits_would_refuse() {
    let folder = Folder::new();
    let policy = "limits: [{ name: shadow, by: ip, rate: 1/min, mode: shadow }, { name: off, rate: 1/day, mode: off }]\n";
    let log = combined(1, "192.0.2.1", "/").repeat(5);
    let run = simulate(&folder, policy, &log, &["--fail-if", "refused(shadow)>3", "--fail-if", "refused>0"]);
    assert_eq!(run.report["requests"], json!({ "allowed": 5, "refused": 0, "invalid": 0 }));
    let limits = run.report["limits"].as_array().unwrap();
    assert_eq!((limits.len(), &limits[0]["refused"], &limits[0]["would_refuse"]), (1, &json!(0), &json!(4)));
    assert_eq!(run.report["fail_if"][0]["held"], true);
    assert_eq!((run.report["fail_if"][1]["held"].clone(), run.code), (json!(false), Some(1)));
}

#[test]
fn limit_is_suggested_as_brute_force_finds_it() {
    let folder = Folder::new();
    let log = random_log(1_200);
    for (limit, written, target) in [
        ("by: ip, rate: {count}/10s", 6, "5%"),
        ("by: ip, rate: {count}/10s, algorithm: sliding-log", 20, "2%"),
        ("rate: {count}/s, burst: {burst}", 8, "10%"),
        ("by: path, rate: {count}/10s, algorithm: fixed-window", 12, "0%"),
        ("by: path, rate: {count}/min, algorithm: fixed-window", 100, "1%"),
    ] {
        // The burst keeps its ratio of 2.
        let policy = |count: u64| {
            let limit =
                limit.replace("{count}", &count.to_string()).replace("{burst}", &(2 * count).to_string());
            format!("limits: [{{ name: a, {limit} }}, {{ name: other, rate: 1/day }}]\n")
        };
        let found =
            simulate(&folder, &policy(written), &log, &["--suggest", target]).report["suggest"][0].clone();
        let share: f64 = target.trim_end_matches('%').parse::<f64>().unwrap() / 100.0;
        let refused = |count: u64| {
            let alone = policy(count).replace(", { name: other, rate: 1/day }", "");
            let limit = simulate(&folder, &alone, &log, &[]).report["limits"][0].clone();
            limit["refused"].as_f64().unwrap() / limit["asked"].as_f64().unwrap()
        };
        let smallest = (1..=16 * written).find(|count| refused(*count) <= share).unwrap();
        assert_eq!(found["count"], smallest, "{limit} {target}: {found}");
        let same = |share: &Value, count: u64| (share.as_f64().unwrap() - refused(count)).abs() < 1e-12;
        assert!(same(&found["share"], smallest), "{found}");
        if smallest > 1 {
            assert_eq!(found["below"]["count"], smallest - 1, "{limit} {target}");
            assert!(same(&found["below"]["share"], smallest - 1), "{found}");
        }
        let burst =
            if limit.contains("burst") { format!(", burst: {}", 2 * smallest) } else { String::new() };
        let period = limit.split('/').nth(1).unwrap().split(',').next().unwrap();
        assert_eq!(found["line"], format!("rate: {smallest}/{period}{burst}"));
    }
    // Sixteen times the written count is not enough for anything.
    let policy = "limits: [{ name: a, rate: 1/day }]\n";
    let found = simulate(&folder, policy, &log, &["--suggest", "0%"]).report["suggest"][0].clone();
    assert_eq!((&found["count"], &found["line"]), (&Value::Null, &Value::Null));
}

#[test]
fn algorithms_and_policies_are_compared() {
    let folder = Folder::new();
    let log = random_log(2_000);
    let limit = |algorithm: &str, burst: &str| {
        format!("limits: [{{ name: a, by: ip, rate: 5/10s{burst}, algorithm: {algorithm} }}]\n")
    };
    let other = folder.write("other.yaml", &limit("fixed-window", ""));
    let policy = limit("token-bucket", ", burst: 3");
    let args = ["--algorithms", "--against", other.to_str().unwrap()];
    let report = simulate(&folder, &policy, &log, &args).report;
    let rows = report["algorithms"].as_array().unwrap();
    assert_eq!(rows.len(), 5);
    for row in rows {
        let algorithm = row["algorithm"].as_str().unwrap();
        let burst = if algorithm.ends_with("bucket") { ", burst: 3" } else { "" };
        let alone = simulate(&folder, &limit(algorithm, burst), &log, &[]).report["limits"][0].clone();
        assert_eq!((&row["asked"], &row["refused"]), (&alone["asked"], &alone["refused"]), "{algorithm}");
        if algorithm == "fixed-window" {
            assert_eq!(report["against"][0]["limits"][0], alone);
            assert_eq!(report["against"][0]["policy"], other.to_str().unwrap());
        }
    }
    let refused: std::collections::BTreeSet<u64> =
        rows.iter().map(|row| row["refused"].as_u64().unwrap()).collect();
    assert!(refused.len() >= 4, "the algorithms differ: {refused:?}");
}

#[test]
fn requests_are_selected_by_time_fact_status_and_key() {
    let folder = Folder::new();
    let policy = "http: { routes: ['/api/*'] }\nlimits: [{ name: a, by: ip, rate: 1000/s }]\n";
    let mut log = String::new();
    for second in 0..100 {
        let path = if second % 4 == 0 { "/api/x" } else { "/other" };
        let line = combined(second, &format!("192.0.2.{}", second % 50), path);
        log += &line.replace(" 200 ", if second % 10 == 0 { " 429 " } else { " 200 " });
    }
    let used = |args: &[&str]| {
        let report = simulate(&folder, policy, &log, args).report;
        assert_eq!(report["lines"]["read"], 100, "{report}");
        (report["lines"]["used"].as_u64().unwrap(), report["span"].clone())
    };
    let first = 1_761_955_200;
    assert_eq!(used(&[]), (100, json!([first, first + 99])));
    let range = ["--from", "2025-11-01T00:00:10Z", "--until", "2025-11-01T01:01:00+01:00"];
    assert_eq!(used(&range), (50, json!([first + 10, first + 59])));
    assert_eq!(used(&["--only", "route=/api/*"]).0, 25);
    assert_eq!(used(&["--only", "route=/api/*", "--only", "ip=192.0.2.8"]).0, 1);
    assert_eq!(used(&["--drop-status", "429,503"]).0, 90);
    let (sampled, _) = used(&["--sample", "1/5"]);
    assert!((4..40).contains(&sampled) && sampled % 2 == 0, "both requests of a key, or none: {sampled}");
    let whole = used(&["--sample", "1/1"]).0;
    assert_eq!(whole, 100);
    let unknown = simulate(&folder, policy, &log, &["--only", "user=alice"]);
    assert_eq!(unknown.code, Some(2));
    assert!(unknown.stderr.contains("this log does not say `user`"), "{}", unknown.stderr);
}

#[test]
fn limits_without_their_facts_are_not_simulated() {
    let folder = Folder::new();
    let policy = "http: { facts: { api_key: { from: header.authorization, hash: true } } }
limits:
  - { name: per-ip, by: ip, rate: 1/min }
  - { name: plan, by: api_key, rate: 10/min }
  - { name: tiers, by: ip, tier: plan, tiers: { free: 1/min }, default_tier: free }
  - { name: tokens, by: ip, rate: 100/min, cost: tokens }
  - { name: login, by: ip, rate: 5/min, when: { route: /login } }
";
    let log = combined(1, "192.0.2.1", "/").repeat(2);
    let run = simulate(&folder, policy, &log, &[]);
    let why = |name: &str| {
        let limits = run.report["not_simulated"].as_array().unwrap();
        limits
            .iter()
            .find(|limit| limit["name"] == name)
            .map(|limit| limit["why"].as_str().unwrap().to_owned())
    };
    let expected = "it counts by `api_key`, which this log does not say: --fact api_key=FIELD";
    assert_eq!(why("plan").as_deref(), Some(expected));
    assert!(why("tiers").unwrap().contains("picks its tier by `plan`"));
    assert!(why("tokens").unwrap().contains("charges `tokens`"));
    assert!(why("login").unwrap().contains("or list `http.routes`"));
    assert_eq!((why("per-ip"), run.code), (None, Some(0)));
    assert!(run.stderr.contains("warning: limit `plan` is not simulated"), "{}", run.stderr);
    assert_eq!(simulate(&folder, policy, &log, &["--quiet"]).stderr, "");
    for args in [["--fail-if", "refused(plan)>1"], ["--fail-if", "refused(typo)>1"]] {
        let run = simulate(&folder, policy, &log, &args);
        assert_eq!((run.code, run.report), (Some(2), Value::Null), "{}", run.stderr);
    }
    let none = simulate(&folder, "limits: [{ name: plan, by: user, rate: 1/min }]\n", &log, &[]);
    assert_eq!(none.code, Some(2));
    assert!(
        none.stderr.contains("no limit can be simulated with this log\n  plan: it counts by `user`"),
        "{}",
        none.stderr
    );
    // Mapped, a fact of the application is hashed like one of a request, and shown as 12 digits.
    let mapped = simulate(&folder, policy, &log, &["--fact", "api_key=$remote_user"]);
    assert!(mapped.report["not_simulated"].as_array().unwrap().iter().all(|limit| limit["name"] != "plan"));
    let log = log.replace(" - - ", " - alice ");
    let mapped = simulate(&folder, policy, &log, &["--fact", "api_key=$remote_user"]).report;
    let plan = &mapped["limits"].as_array().unwrap()[1];
    let shown = plan["top"][0]["key"][0].as_str().unwrap();
    assert_eq!(
        shown,
        format!("sha256:{}", &tollkeeper_core::digest::hex(&tollkeeper_core::digest::sha256(b"alice"))[..12])
    );
}

#[test]
fn formats_are_recognised_or_named() {
    let folder = Folder::new();
    let policy = "limits: [{ name: a, by: ip, rate: 1/s }]\n";
    let caddy = format!(
        "{{\"ts\":{START}.5,\"request\":{{\"remote_ip\":\"192.0.2.1\",\"method\":\"GET\",\"uri\":\"/\"}},\"status\":200,\"duration\":0.1}}\n"
    );
    let traefik = "{\"StartUTC\":\"2025-11-16T11:29:05.25Z\",\"ClientHost\":\"192.0.2.1\",\"RequestMethod\":\"GET\",\
                   \"RequestPath\":\"/\",\"DownstreamStatus\":200,\"Duration\":1500}\n";
    let envoy = "[2025-11-16T11:29:05.250Z] \"GET / HTTP/1.1\" 200 - 0 5 1 1 \"192.0.2.1\" \"curl\" \"id\" \"host\" \"up\"\n";
    let own = format!(
        "{{\"t\":{START}000000,\"duration\":0.5,\"ip\":\"192.0.2.1\",\"method\":\"GET\",\"host\":\"h\",\"path\":\"/\",\"status\":200,\"facts\":{{\"ip\":\"192.0.2.1\"}}}}\n"
    );
    let common = combined(1, "192.0.2.1", "/").replace(" \"-\" \"-\"", "");
    let combined = combined(1, "192.0.2.1", "/");
    // The time of this test is in the past of the machine that runs it, or the lines would be unreadable.
    let past = |log: &str| log.replace(&START.to_string(), "1700000000");
    for (name, log) in [("caddy", &caddy), ("tollkeeper", &own), ("combined", &combined), ("common", &common)]
    {
        let run = simulate(&folder, policy, &past(log).repeat(3), &[]);
        assert_eq!((run.code, &run.report["lines"]["used"]), (Some(0), &json!(3)), "{name}: {}", run.stderr);
        assert_eq!(run.report["limits"][0]["top"][0]["key"], json!(["192.0.2.1"]), "{name}");
    }
    for (name, log) in [("traefik", traefik), ("envoy", envoy)] {
        let run = simulate(&folder, policy, &log.repeat(3), &[]);
        assert_eq!((run.code, &run.report["lines"]["used"]), (Some(0), &json!(3)), "{name}: {}", run.stderr);
    }
    let unknown = simulate(&folder, policy, "192.0.2.1 /a?token=secret\n", &[]);
    assert_eq!(unknown.code, Some(2));
    assert!(
        unknown.stderr.contains("192.0.2.1 /a?…\n") && unknown.stderr.contains("pass --format"),
        "{}",
        unknown.stderr
    );
    assert!(!unknown.stderr.contains("secret"));
    let csv = "when,from,status\n2025-11-16T11:29:05Z,192.0.2.1,200\n\n2025-11-16T11:29:06Z,192.0.2.1,200\n";
    let args = ["--format", "csv", "--time", "when", "--fact", "ip=from"];
    let run = simulate(&folder, policy, csv, &args);
    assert_eq!(
        run.report["lines"],
        json!({ "read": 2, "used": 2, "unreadable": 0, "late": 0 }),
        "{}",
        run.stderr
    );
    let wrong = simulate(&folder, policy, csv, &["--format", "csv", "--time", "at"]);
    assert!(wrong.stderr.contains("the header has no column `at`"), "{}", wrong.stderr);
    let json = "{\"at\":\"2025-11-16 13:29:05\",\"client\":{\"ip\":\"192.0.2.1\"}}\n";
    let args = ["--format", "json", "--time", "at", "--tz", "+02:00", "--fact", "ip=client.ip"];
    let run = simulate(&folder, policy, json, &args);
    assert_eq!(run.report["span"], json!([1_763_292_545, 1_763_292_545]), "{}", run.stderr);
    assert_eq!(simulate(&folder, policy, json, &["--format", "json"]).code, Some(2));
}

#[test]
fn unreadable_lines_are_counted_by_reason() {
    let folder = Folder::new();
    let policy = "limits: [{ name: a, by: ip, rate: 1000/s }]\n";
    let good = combined(1, "192.0.2.1", "/");
    let deep = "[".repeat(60_000);
    let bad: Vec<(Vec<u8>, &str)> = vec![
        (b"\0\0\0\0".to_vec(), "does not have the shape"),
        (vec![b'x'; 10_000_000], "longer than 64 KiB"),
        (b"\xff\xfe\x80 - - [".to_vec(), "does not have the shape"),
        (good.replace("192.0.2.1", "unix:").into(), "not an IP address"),
        (good.replace("GET /", "\\x16\\x03").into(), "not an HTTP request"),
        (good.replace("/Nov/2025", "/Nov/0000").into(), "invalid time"),
        (good.replace("/Nov/2025", "/Nov/9999").into(), "time in the future"),
        (good.replace("01/Nov", "31/Feb").into(), "invalid time"),
        (good.replace(" 200 ", " 2000 ").into(), "invalid status"),
        (good.replace("\"-\"\n", "\"-\" \"-\"\n").into(), "does not have the shape"),
        (deep.into_bytes(), "does not have the shape"),
    ];
    let mut log = good.repeat(200).into_bytes();
    for (line, _) in &bad {
        log.extend_from_slice(line.strip_suffix(b"\n").unwrap_or(line));
        log.push(b'\n');
    }
    // Readable, whatever they look like: escapes, a leap second, offsets of summer and winter.
    let odd = [
        good.replace("GET / ", "GET /\\x22\\x5C "),
        good.replace("00:00:01", "23:59:60"),
        good.replace("+0000", "+0200"),
        good.replace("+0000", "-0930"),
    ];
    log.extend(odd.concat().bytes());
    fs::write(folder.path().join("access.log"), &log).unwrap();
    let config = folder.write("policy.yaml", policy);
    let file = folder.path().join("access.log");
    let run = simulate_files(&config, std::slice::from_ref(&file), &["--format", "combined"]);
    let lines = &run.report["lines"];
    assert_eq!(
        (run.code, &lines["unreadable"], &lines["used"]),
        (Some(0), &json!(11), &json!(204)),
        "{}",
        run.stderr
    );
    assert!(run.stderr.contains("warning: 5.12 % of the lines are unreadable"), "{}", run.stderr);
    let shown =
        output(tollkeeper().args(["simulate", "--format", "combined", "--config"]).arg(&config).arg(&file));
    let shown = text(&shown.stdout);
    assert!(
        shown.starts_with("warning: 5.12 % of the lines are unreadable: is --format right?\n"),
        "{shown}"
    );
    for (_, reason) in &bad {
        assert!(shown.contains(reason), "{reason}: {shown}");
    }
    assert!(
        shown.contains("access.log:201: ") && shown.lines().all(|line| line.chars().count() < 400),
        "{shown}"
    );
    let strict = simulate_files(&config, &[file], &["--format", "combined", "--strict"]);
    assert_eq!((strict.code, strict.report), (Some(2), Value::Null));
    assert!(
        strict.stderr.contains("access.log:201: does not have the shape of the format"),
        "{}",
        strict.stderr
    );
    let none = simulate(&folder, policy, "x\ny\n", &["--format", "combined"]);
    assert_eq!(none.code, Some(2));
    assert!(none.stderr.contains("no readable line"), "{}", none.stderr);
}

#[test]
fn wrong_use_exits_with_2() {
    let folder = Folder::new();
    let policy = "limits: [{ name: a, by: ip, rate: 1/s }]\n";
    let log = combined(1, "192.0.2.1", "/");
    let folder_name = folder.path().to_str().unwrap().to_owned();
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (vec!["--fail-if", "refused<1"], "expected `>` or `>=`\n  refused<1\n         ^"),
        (vec!["--suggest", "1"], "a percentage below 100"),
        (vec!["--sample", "2/1"], "a part of all keys"),
        (vec!["--only", "route"], "a fact and a pattern"),
        (vec!["--from", "yesterday"], "RFC 3339"),
        (vec!["--format", "wat"], "log_format of nginx"),
        (vec!["--fact", "user=$http_x_user"], "the format has no `$http_x_user`"),
        (vec!["--against", "missing.yaml"], "missing.yaml"),
        (vec!["missing.log"], "missing.log"),
        (vec![&folder_name], "is a directory"),
    ];
    for (args, words) in cases {
        let run = simulate(&folder, policy, &log, &args);
        assert_eq!((run.code, &run.report), (Some(2), &Value::Null), "{args:?}: {}", run.stderr);
        assert!(run.stderr.contains(words), "{args:?}: {}", run.stderr);
    }
    let broken = folder.write("cut.gz", "");
    let bytes = gzip(log.repeat(1_000).as_bytes());
    fs::write(&broken, &bytes[..bytes.len() / 2]).unwrap();
    let config = folder.write("policy.yaml", policy);
    let run = simulate_files(&config, &[broken], &[]);
    assert_eq!(run.code, Some(2));
    assert!(run.stderr.contains("cut.gz"), "{}", run.stderr);
}

#[test]
fn full_world_says_at_most() {
    let folder = Folder::new();
    let policy = "limits: [{ name: a, by: ip, rate: 1/day, algorithm: fixed-window }]\n";
    let log: String = (0..2_000)
        .map(|index| combined(index, &format!("10.0.{}.{}", index / 250, index % 250), "/"))
        .collect();
    let report = simulate(&folder, policy, &log, &["--max-keys", "100"]).report;
    let notes = report["notes"].to_string();
    assert!(notes.contains("more than 100 keys") && notes.contains("at most these numbers"), "{notes}");
    assert_eq!(report["limits"][0]["keys"], 2_000);
}

#[test]
fn closed_pipe_ends_quietly() {
    let folder = Folder::new();
    let (config, log) = (folder.write("policy.yaml", POLICY), folder.write("access.log", &random_log(2_000)));
    let mut command = Command::new("sh");
    let program = env!("CARGO_BIN_EXE_tollkeeper");
    let script = format!(
        "{program} simulate --json --config {} {} 2>{err}; echo $? >{code}",
        config.display(),
        log.display(),
        err = folder.path().join("err").display(),
        code = folder.path().join("code").display(),
    );
    let pipeline = format!("({script}) | true");
    assert!(output(command.args(["-c", &pipeline])).status.success());
    assert_eq!(fs::read_to_string(folder.path().join("code")).unwrap().trim(), "0");
    let stderr = fs::read_to_string(folder.path().join("err")).unwrap();
    assert!(!stderr.contains("panicked") && !stderr.contains("pipe"), "{stderr}");
}

#[test]
fn interrupt_prints_what_is_there() {
    let folder = Folder::new();
    let config = folder.write("policy.yaml", "limits: [{ name: a, by: ip, rate: 1/min }]\n");
    let mut child = tollkeeper()
        .args(["simulate", "--json", "--config"])
        .arg(&config)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // More than the pipe and the blocks that wait to be split can hold, so lines were read when this has been written.
    // The pipe stays open.
    stdin.write_all(combined(1, "192.0.2.1", "/").repeat(20_000).as_bytes()).unwrap();
    let process = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(process, rustix::process::Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    drop(stdin);
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let read = report["lines"]["read"].as_u64().unwrap();
    assert!((1..=20_000).contains(&read), "{report}");
    assert!(report["notes"].to_string().contains("Interrupted"), "{report}");
}
