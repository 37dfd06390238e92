//! Prints figures, checks them against goals, and saves everything to `results.json`.

use std::fs;
use std::process::Command;
use std::thread;

use serde_json::{Map, Value, json};

/// File with the results of all benchmarks.
const RESULTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/results.json");

/// Prints one measured number.
pub fn figure(name: &str, value: f64) {
    println!("figure {name} {}", rounded(value));
}

/// Prints the peer's value divided by ours: above 1, ours is faster or smaller.
pub fn ratio(name: &str, value: f64) {
    println!("ratio {name} {value:.2}");
}

/// At least three significant digits.
fn rounded(value: f64) -> String {
    let decimals = match value.abs() {
        0.0..0.1 => 4,
        0.1..10.0 => 2,
        _ => 1,
    };
    format!("{value:.decimals$}")
}

/// The median; NaN without values.
pub fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The goal for a number.
#[derive(Clone, Copy, Debug)]
pub enum Want {
    /// At least this.
    AtLeast(f64),
    /// At most this.
    AtMost(f64),
}

/// Prints whether a number meets its goal.
pub fn goal(name: &str, want: Want, got: f64) {
    let (want, met) = match want {
        Want::AtLeast(least) => (format!(">={least:?}"), got >= least),
        Want::AtMost(most) => (format!("<={most:?}"), got <= most),
    };
    println!("goal {name} want{want} got {} {}", rounded(got), if met { "ok" } else { "MISSED" });
}

/// Saves one part of the results, with the machine and the versions that it was measured with.
pub fn save(part: &str, measured: Value) {
    let known = fs::read_to_string(RESULTS).unwrap_or_default();
    let mut results: Map<String, Value> = serde_json::from_str(&known).unwrap_or_default();
    // A part that is measured again later keeps its own machine: the others were not measured there.
    let here = machine();
    let first = results.entry("machine").or_insert_with(|| here.clone()).clone();
    let others = results.entry("other_machines").or_insert_with(|| json!({}));
    let others = others.as_object_mut().expect("results.json has an object there");
    others.remove(part);
    if first != here {
        others.insert(part.to_owned(), here);
    }
    results.insert("versions".to_owned(), versions());
    results.insert(part.to_owned(), measured);
    let text = serde_json::to_string_pretty(&results).expect("results are JSON");
    fs::write(RESULTS, text + "\n").expect("the bench folder is writable");
}

fn machine() -> Value {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    json!({
        "cpu": model.map_or("unknown", |(_, model)| model),
        "cores": thread::available_parallelism().map_or(0, usize::from),
        "kernel": kernel.trim(),
    })
}

fn versions() -> Value {
    let rustc =
        Command::new("rustc").arg("--version").output().map(|output| output.stdout).unwrap_or_default();
    let mut versions = Map::new();
    versions.insert("rustc".to_owned(), String::from_utf8_lossy(&rustc).trim().into());
    let mut locked = include_str!("../Cargo.lock").lines();
    while let Some(line) = locked.next() {
        let name = line.strip_prefix("name = ").map(|name| name.trim_matches('"'));
        if let Some(name @ ("tollkeeper" | "governor" | "limitador" | "throttlecrab" | "tower_governor")) =
            name
        {
            let version = locked.next().and_then(|line| line.strip_prefix("version = ")).unwrap_or_default();
            versions.insert(name.to_owned(), version.trim_matches('"').into());
        }
    }
    versions.into()
}
