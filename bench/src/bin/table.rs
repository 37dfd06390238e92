//! Writes `docs/benchmarks.md` from `results.json`: the tables are what was measured, and nothing else.

use std::fmt::Write;
use std::fs;

use serde_json::{Map, Value};

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
    if let Some(scenarios) = results["layer"].as_object() {
        page.push_str(&layer(scenarios));
    }
    if let Some(sides) = results["http"].as_object() {
        page.push_str(&http(sides));
    }
    page
}

fn layer(scenarios: &Map<String, Value>) -> String {
    let mut section = "\n## What a layer adds\n\n\
         Nanoseconds for each request, over the same service without it; medians of five.\n\n\
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

fn http(sides: &Map<String, Value>) -> String {
    let mut section = "\n## HTTP\n\n\
         Server and load on a core each, connections kept alive; medians of five. Processor time is that of the server,\n\
         kernel included. nginx answers from memory after `limit_req`, and decides nothing else.\n\n\
         | Server | CPU seconds per million | its CPU seconds / ours | Requests per second | Admitted |\n\
         |---|---|---|---|---|\n"
        .to_owned();
    let cpu = |side: &Value| median(&side["cpu_seconds_per_million"]);
    let ours = cpu(&sides["tollkeeper"]);
    for (name, side) in sides {
        writeln!(
            section,
            "| {name} {} | {:.1} | {:.2} | {:.0} | {:.0} % |",
            plain(&side["version"]),
            cpu(side),
            cpu(side) / ours,
            median(&side["requests_per_second"]),
            side["admitted_percent"].as_f64().expect("a number"),
        )
        .expect("text");
    }
    section
}

fn median(times: &Value) -> f64 {
    let mut times: Vec<f64> =
        times.as_array().map_or_else(Vec::new, |times| times.iter().filter_map(Value::as_f64).collect());
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
