//! Writes `docs/benchmarks.md` from `results.json`: the tables are what was measured, and nothing else.

use std::fmt::Write;
use std::fs;

use serde_json::{Map, Value};
use tollkeeper_bench::report;

const RESULTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/results.json");
const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/benchmarks.md");
const SIDES: [&str; 5] = ["handle", "policy", "governor", "throttlecrab", "limitador"];

fn main() {
    let text = fs::read_to_string(RESULTS).expect("bench/results.json: run `make bench` first");
    let results: Value = serde_json::from_str(&text).expect("what compare and memory wrote");
    fs::write(PAGE, page(&results)).expect("docs can be written");
}

fn page(results: &Value) -> String {
    let (machine, versions) = (&results["machine"], &results["versions"]);
    let mut page = format!(
        "# Benchmarks\n\n\
         Made by `make bench` from `bench/results.json`, which holds every single time; `bench/README.md` says what each\n\
         scenario is. All sides of a row ran interleaved. The machine is shared: compare within a row, not between pages.\n\n\
         {}, {} cores, Linux {}; {}; governor {}, throttlecrab {}, limitador {}.\n\n\
         ## Nanoseconds for each check\n\n\
         Median of five. `handle` and `policy` are ours; above 1, ours is faster.\n\n\
         | Scenario | handle | policy | governor | throttlecrab | limitador | governor / handle | governor / policy |\n\
         |---|---|---|---|---|---|---|---|\n",
        plain(&machine["cpu"]),
        plain(&machine["cores"]),
        plain(&machine["kernel"]),
        plain(&versions["rustc"]),
        plain(&versions["governor"]),
        plain(&versions["throttlecrab"]),
        plain(&versions["limitador"]),
    );
    for (scenario, times) in results["scenarios"].as_object().expect("scenarios") {
        let median = SIDES.map(|side| median(&times[side]));
        let cells = median.map(|nanos| format!("{nanos:.0}")).join(" | ");
        let (handle, policy, governor) = (median[0], median[1], median[2]);
        writeln!(page, "| `{scenario}` | {cells} | {:.2} | {:.2} |", governor / handle, governor / policy)
            .expect("text");
    }
    page.push_str(
        "\n## Resident bytes for each key\n\nDistinct strings of 24 bytes, in a fresh process.\n\n",
    );
    page.push_str("| Limiter and keys | Bytes |\n|---|---|\n");
    for (name, bytes) in results["memory"].as_object().expect("memory") {
        let name = name.replace("memory-bytes-per-key-", " at ").replace("- at", " at");
        let name = if name.starts_with(' ') { format!("tollkeeper{name}") } else { name };
        writeln!(page, "| {name} | {:.1} |", bytes.as_f64().expect("a number")).expect("text");
    }
    let mut add = |part: &str, section: fn(&Map<String, Value>) -> String| {
        page.push_str(&results[part].as_object().map(section).unwrap_or_default());
    };
    add("full", full);
    add("layer", layer);
    add("recording", recording);
    add("http", http);
    add("resp", resp);
    add("grpc", grpc);
    add("redis", redis);
    page
}

fn full(stages: &Map<String, Value>) -> String {
    let mut section = "\n## A full store\n\n\
         Nanoseconds of processor time for each check by facts, in a store that may hold a million keys; medians of five.\n\n\
         | Keys | One place left | None left | After ten million keys |\n\
         |---|---|---|---|\n"
        .to_owned();
    for (name, times) in [("known", &stages["known-ns"]), ("new", &stages["new-ns"])] {
        let medians: Vec<String> =
            times.as_array().into_iter().flatten().map(|times| format!("{:.0}", median(times))).collect();
        writeln!(section, "| {name} | {} |", medians.join(" | ")).expect("text");
    }
    section
}

fn layer(scenarios: &Map<String, Value>) -> String {
    let mut section = "\n## What a layer adds\n\n\
         Nanoseconds for each request, over the same service without it; medians of 25.\n\n\
         | Scenario | tollkeeper-tower | tower_governor | theirs / ours |\n\
         |---|---|---|---|\n"
        .to_owned();
    for (scenario, times) in scenarios {
        let [ours, theirs] =
            ["tollkeeper", "tower_governor"].map(|side| median(&times[side]) - median(&times["bare"]));
        writeln!(section, "| `{scenario}` | {ours:.0} | {theirs:.0} | {:.2} |", theirs / ours).expect("text");
    }
    section
}

fn recording(scenarios: &Map<String, Value>) -> String {
    let mut section = "\n## What recording adds\n\n\
         Nanoseconds for each check by facts, without an observer and with the metrics of the server; medians of 25.\n\n\
         | Scenario | Unobserved | Recording adds |\n\
         |---|---|---|\n"
        .to_owned();
    for (scenario, times) in scenarios {
        let [without, with] = ["unobserved", "observed"].map(|side| median(&times[side]));
        writeln!(section, "| `{scenario}` | {without:.0} | {:.0} |", with - without).expect("text");
    }
    section
}

fn http(sides: &Map<String, Value>) -> String {
    let mut section = "\n## HTTP\n\n\
         Server and load on a core each, connections kept alive; medians of five. Processor time is that of the server,\n\
         kernel included. nginx answers from memory after `limit_req`, and decides nothing else. The last column but one\n\
         is the time that 99 % of the answers took at most when half as many requests came, on a fixed schedule.\n\n\
         | Server | Asked | CPU seconds per million | its CPU seconds / ours with one limit | Requests per second | p99 at half of that, µs | Admitted |\n\
         |---|---|---|---|---|---|---|\n"
        .to_owned();
    let ours = cpu(&sides["tollkeeper"]);
    for (name, side) in sides {
        writeln!(
            section,
            "| {name} {} | {} | {} | {} | {} | {} | {} % |",
            plain(&side["version"]),
            side["what"].as_str().unwrap_or("–"),
            rounded(cpu(side), 1),
            rounded(cpu(side) / ours, 2),
            rounded(median(&side["requests_per_second"]), 0),
            rounded(median(&side["p99_us_at_half_load"]), 0),
            rounded(side["admitted_percent"].as_f64().expect("a number"), 0),
        )
        .expect("text");
    }
    if let Some(stored) = sides.get("tollkeeper-redis") {
        let theirs = rounded(median(&stored["store_cpu_seconds_per_million"]), 1);
        writeln!(
            section,
            "\nRedis shares the core of `tollkeeper-redis`, and needs {theirs} CPU seconds of its own."
        )
        .expect("text");
    }
    section
}

fn resp(sides: &Map<String, Value>) -> String {
    const PIPELINES: [&str; 3] = ["1", "16", "64"];
    let mut section = "\n## RESP\n\n\
         As over HTTP, with so many commands in a pipeline. `PING` of Redis is the least that an answer can cost.\n\n\
         | Server and command | CPU seconds per million at 1 | at 16 | at 64 | Commands per second at 1 | at 16 | at 64 |\n\
         |---|---|---|---|---|---|---|\n"
        .to_owned();
    for (name, side) in sides {
        let seconds = PIPELINES.map(|pipeline| rounded(cpu(&side[pipeline]), 2));
        let speed = PIPELINES.map(|pipeline| rounded(median(&side[pipeline]["requests_per_second"]), 0));
        let version = plain(&side["16"]["version"]);
        writeln!(section, "| {name} {version} | {} | {} |", seconds.join(" | "), speed.join(" | "))
            .expect("text");
    }
    section
}

fn grpc(sides: &Map<String, Value>) -> String {
    let mut section = "\n## gRPC\n\n\
         As over HTTP. Ours is asked what Envoy asks.\n\n\
         | Server | CPU seconds per million | its CPU seconds / ours | Calls per second |\n\
         |---|---|---|---|\n"
        .to_owned();
    let ours = cpu(&sides["tollkeeper"]);
    for (name, side) in sides {
        let (version, speed) = (plain(&side["version"]), rounded(median(&side["requests_per_second"]), 0));
        let (seconds, ratio) = (rounded(cpu(side), 1), rounded(cpu(side) / ours, 2));
        writeln!(section, "| {name} {version} | {seconds} | {ratio} | {speed} |").expect("text");
    }
    section
}

fn redis(figures: &Map<String, Value>) -> String {
    let mut section = "\n## Redis\n\n\
         What a check costs Redis, the least of twelve rounds: `plain-gcra` is a script written by hand for one limit,\n\
         `return-1` a script that does nothing, the others are ours.\n\n\
         | Calls | Microseconds of its processor per check | `plain-gcra` / this |\n\
         |---|---|---|\n"
        .to_owned();
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let part = |prefix: &'static str| {
        figures.iter().filter_map(move |(name, value)| Some((name.strip_prefix(prefix)?, number(value))))
    };
    let plain = number(&figures["plain-gcra"]);
    let calls =
        figures.iter().filter(|(name, _)| !name.contains("-per-key-") && !name.contains("-a-second-"));
    for (name, value) in calls {
        let (micros, ratio) = (rounded(number(value), 2), rounded(plain / number(value), 2));
        writeln!(section, "| `{name}` | {micros} | {ratio} |").expect("text");
    }
    section.push_str("\n| One process, 256 in flight | Checks a second |\n|---|---|\n");
    for (name, value) in part("checks-a-second-") {
        writeln!(section, "| {name} | {} |", rounded(value, 0)).expect("text");
    }
    section.push_str("\n| Limit, values of 24 bytes | Bytes per key |\n|---|---|\n");
    for (name, value) in part("bytes-per-key-") {
        writeln!(section, "| `{name}` | {} |", rounded(value, 0)).expect("text");
    }
    section
}

/// Processor seconds of a server for a million requests.
fn cpu(side: &Value) -> f64 {
    median(&side["cpu_seconds_per_million"])
}

fn median(times: &Value) -> f64 {
    let times =
        times.as_array().map_or_else(Vec::new, |times| times.iter().filter_map(Value::as_f64).collect());
    report::median(&times)
}

/// With so many digits behind the point; a dash for what was not measured.
fn rounded(value: f64, digits: usize) -> String {
    if value.is_nan() { "–".to_owned() } else { format!("{value:.digits$}") }
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
