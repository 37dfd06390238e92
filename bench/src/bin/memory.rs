//! Measures resident memory per key, each number in a fresh process.
//!
//! Without arguments it runs itself once for each point and reports; with a side and a number of keys it measures one
//! point. The benchmark builds each key when it is used and does not keep it.

use std::env;
use std::fs;
use std::process::Command;

use serde_json::{Map, Value, json};
use tollkeeper_bench::keys;
use tollkeeper_bench::ours::ByHandle;
use tollkeeper_bench::peers::{Governor, Limitador, Throttlecrab};
use tollkeeper_bench::report::{self, Want};
use tollkeeper_bench::sides::{Bucket, Keyed};

/// Millions of keys, between the powers of two at which tables grow.
const POINTS: [usize; 5] = [6, 8, 10, 12, 15];
/// Expected number of keys; `ours::limiter` doubles it for the capacity.
const EXPECTED: usize = 10_000_000;

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match &arguments[..] {
        [] => report_all(),
        [side, millions] => {
            let keys = millions.parse::<usize>().expect("a number of millions") * 1_000_000;
            let bytes = match side.as_str() {
                "tollkeeper" => bytes_per_key::<ByHandle>(keys, EXPECTED),
                "governor" => bytes_per_key::<Governor>(keys, keys),
                "throttlecrab" => bytes_per_key::<Throttlecrab>(keys, keys),
                "limitador" => bytes_per_key::<Limitador>(keys, keys),
                _ => panic!("unknown side `{side}` (try `governor`)"),
            };
            println!("{bytes}");
        }
        _ => panic!("usage: memory [SIDE MILLIONS]"),
    }
}

fn report_all() {
    let mut measured = Map::new();
    let [ours, governors] = [("tollkeeper", ""), ("governor", "governor-")].map(|(side, prefix)| {
        let points = POINTS.map(|millions| point(side, prefix, millions, &mut measured));
        let mean = points.iter().sum::<f64>() / 5.0;
        report::figure(&format!("{prefix}memory-bytes-per-key-mean"), mean);
        mean
    });
    point("throttlecrab", "throttlecrab-", 6, &mut measured);
    point("limitador", "limitador-", 1, &mut measured);
    report::ratio("memory-bytes-per-key-mean/governor", governors / ours);
    report::goal("memory-bytes-per-key-mean", Want::AtMost(64.0), ours);
    report::goal("memory-bytes-per-key-mean-stretch", Want::AtMost(45.0), ours);
    report::save("memory", measured.into());
}

/// Measures one point in a fresh process.
fn point(side: &str, prefix: &str, millions: usize, measured: &mut Map<String, Value>) -> f64 {
    let this = env::current_exe().expect("this program has a path");
    let output =
        Command::new(this).args([side, &millions.to_string()]).output().expect("this program starts");
    assert!(output.status.success(), "{side} at {millions}M: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let bytes: f64 = text.trim().parse().expect("one number");
    let name = format!("{prefix}memory-bytes-per-key-{millions}M");
    report::figure(&name, bytes);
    measured.insert(name, json!(bytes));
    bytes
}

#[expect(clippy::cast_precision_loss, reason = "fewer than 2^53 bytes")]
fn bytes_per_key<K: Keyed>(keys: usize, expected: usize) -> f64 {
    let before = resident_bytes();
    let limiter = K::new(Bucket::lasting(expected));
    let mut key = String::with_capacity(24);
    for number in 0..keys as u64 {
        keys::write_key(&mut key, "user", number);
        assert!(limiter.check(&key), "a new key is refused");
    }
    let after = resident_bytes();
    drop(limiter);
    (after - before) as f64 / keys as f64
}

fn resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("this is Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS is listed");
    let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number of kB");
    kilobytes * 1024
}
