//! Measures `tollkeeper simulate` on a log that comes through a pipe and is never on disk: speed with three limits, and
//! memory with ten million keys.
//!
//!     simulate TOLLKEEPER [GIGABYTES]

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use serde_json::{Value, json};
use tollkeeper_bench::report::{self, Want};

/// Requests in a second of the log.
const A_SECOND: u64 = 2_000;
/// The addresses of the speed run.
const ADDRESSES: u64 = 100_000;
/// The keys of the memory run.
const KEYS: u64 = 10_000_000;

/// Three limits: everybody, an address, an address on a route.
const THREE_LIMITS: &str = "http: { routes: [/login, '/api/*'] }
limits:
  - { name: everyone, rate: 1900/s, burst: 4000 }
  - { name: per-ip, by: ip, rate: 60/min }
  - { name: login, by: [ip, route], when: { method: GET }, rate: 30/min, burst: 10 }
";
const ONE_LIMIT: &str = "limits: [{ name: per-ip, by: ip, rate: 10/day, algorithm: fixed-window }]\n";

fn main() {
    let mut args = std::env::args().skip(1);
    let tollkeeper = PathBuf::from(args.next().expect("usage: simulate TOLLKEEPER [GIGABYTES]"));
    let gigabytes: f64 = args.next().map_or(5.0, |number| number.parse().expect("a number"));

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a few gigabytes")]
    let bytes = (gigabytes * 1e9) as u64;
    let three = Run::start(&tollkeeper, THREE_LIMITS, |out| {
        let mut random = Random(1);
        // Half of the requests come from a few addresses, as in most logs.
        let address = move |_: u64| {
            let span = ADDRESSES >> random.below(17);
            random.below(span.max(1))
        };
        write_lines(out, u64::MAX, bytes, address)
    });
    let per_minute = three.lines as f64 / three.seconds * 60.0;
    report::figure("simulate-3-limits-lines-per-minute", per_minute);
    report::goal("simulate-3-limits-lines-per-minute", Want::AtLeast(20e6), per_minute);
    report::figure("simulate-3-limits-gigabytes", three.bytes as f64 / 1e9);
    report::figure("simulate-3-limits-resident-mb", three.resident as f64 / 1e6);

    let keys = Run::start(&tollkeeper, ONE_LIMIT, |out| write_lines(out, KEYS, u64::MAX, |line| line));
    let bytes_per_key = (keys.resident as f64 - 64e6) / KEYS as f64;
    report::figure("simulate-10M-keys-resident-mb", keys.resident as f64 / 1e6);
    report::figure("simulate-10M-keys-bytes-per-key-above-64-mb", bytes_per_key);
    report::goal("simulate-10M-keys-bytes-per-key-above-64-mb", Want::AtMost(50.0), bytes_per_key);
    report::save("simulate", json!({ "three-limits": three.json(), "ten-million-keys": keys.json() }));
}

/// A run that has ended.
struct Run {
    lines: u64,
    bytes: u64,
    seconds: f64,
    /// The most memory that the process had, in bytes.
    resident: u64,
}

impl Run {
    /// Runs a simulation of the log that `write` writes; the number of its lines and bytes.
    fn start(
        tollkeeper: &Path,
        policy: &str,
        write: impl FnOnce(&mut dyn Write) -> io::Result<(u64, u64)>,
    ) -> Run {
        let config = std::env::temp_dir().join(format!("tollkeeper-bench-{}.yaml", std::process::id()));
        fs::write(&config, policy).expect("the folder of temporary files can be written");
        let began = Instant::now();
        let mut command = Command::new(tollkeeper);
        command.args(["simulate", "--json", "--quiet", "--format", "combined", "--config"]).arg(&config);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("tollkeeper starts");
        let mut stdin = child.stdin.take().expect("it is piped");
        let (lines, bytes) = write(&mut stdin).expect("tollkeeper reads its input to the end");
        let resident = resident(&child);
        drop(stdin);
        let output = child.wait_with_output().expect("tollkeeper ends");
        let seconds = began.elapsed().as_secs_f64();
        fs::remove_file(&config).expect("it was written");
        assert!(output.status.success());
        let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
        assert_eq!(report["lines"]["used"], lines, "every line is used");
        Run { lines, bytes, seconds, resident }
    }

    fn json(&self) -> Value {
        json!({ "lines": self.lines, "bytes": self.bytes, "seconds": self.seconds, "resident": self.resident })
    }
}

/// The most memory that a running process had so far.
fn resident(child: &Child) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).expect("it is running");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("Linux writes this");
    let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kilobytes * 1_024
}

/// Writes lines in combined format until there are so many lines or bytes; how many of each.
fn write_lines(
    out: &mut dyn Write,
    most_lines: u64,
    most_bytes: u64,
    mut address: impl FnMut(u64) -> u64,
) -> io::Result<(u64, u64)> {
    let paths = ["/", "/login", "/api/items/7", "/api/search?q=rate+limits", "/static/app.js"];
    let (mut lines, mut bytes, mut block) = (0, 0, Vec::with_capacity(1 << 20));
    while lines < most_lines && bytes < most_bytes {
        let second = lines / A_SECOND;
        let (day, hour) = (1 + second / 86_400, second / 3_600 % 24);
        let time = format!("{day:02}/Jan/2026:{hour:02}:{:02}:{:02} +0000", second / 60 % 60, second % 60);
        block.clear();
        for _ in 0..A_SECOND.min(most_lines - lines) {
            let [_, b, c, d] = u32::try_from(address(lines)).expect("an IPv4 address").to_be_bytes();
            let path = paths[usize::try_from(lines % 5).expect("small")];
            writeln!(
                block,
                "10.{b}.{c}.{d} - - [{time}] \"GET {path} HTTP/1.1\" 200 5120 \"https://example.test/page\" \
                 \"Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0\""
            )?;
            lines += 1;
        }
        out.write_all(&block)?;
        bytes += block.len() as u64;
    }
    Ok((lines, bytes))
}

/// Numbers that look random and are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}
