//! Cost of a check in Redis: microseconds of CPU time and bytes of memory; and checks a second of one process.
//!
//! Every side runs in turns on one server that this program starts, one connection, 64 checks on the way
//! at a time; what counts is the smallest of several rounds, because noise only adds. A batch of
//! ours is encoded beforehand: what it costs the client is only in the checks a second.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Map, json};
use tollkeeper::store::Toll;
use tollkeeper::store::redis::keys::{Format, Names};
use tollkeeper::store::redis::script::Script;
use tollkeeper::store::redis::wire::{Batch, EncodedToll, Nonce, Value};
use tollkeeper::{Algorithm, Limit, Policy, Quota, Verb, facts};
use tollkeeper_bench::report::{self, Want};
use tollkeeper_tests::redis::{self, Client, Server};

/// Checks in a round.
const CHECKS: usize = 19_200;
/// Keys that they are spread over.
const KEYS: usize = 9_600;
const ROUNDS: usize = 12;
/// Checks on their way at once where checks a second are counted, and for how long.
const IN_FLIGHT: usize = 256;
const SECONDS: u64 = 3;

/// What one would write by hand for one limit: GET, SET PX, TIME.
const PLAIN: &str = "\
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local interval, burst, cost = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local tat = tonumber(redis.call('GET', KEYS[1]) or now)
if tat < now then tat = now end
local new = tat + interval * cost
if new - burst > now then return {0, new - burst - now} end
redis.call('SET', KEYS[1], string.format('%.0f', new), 'PX', math.ceil((new - now) / 1000))
return {1, math.floor((burst - (new - now)) / interval)}
";

/// One side: commands, how many checks each is, and how many travel together.
struct Side {
    name: &'static str,
    commands: Vec<Vec<Vec<u8>>>,
    checks: usize,
    together: usize,
    best: f64,
}

fn main() {
    let flexible = std::env::args().nth(1).expect("usage: redis FLEXIBLE_JS (bench/redis installs it)");
    let server = Server::start();
    let mut client = server.connect();
    let mut sides = sides();
    for side in &sides {
        // Every script is known before the first round.
        run(&mut client, side);
    }
    for _ in 0..ROUNDS {
        for side in &mut sides {
            let before = cpu_micros(&mut client);
            run(&mut client, side);
            let used = cpu_micros(&mut client) - before;
            side.best = side.best.min(used / (side.commands.len() * side.checks) as f64);
        }
    }
    let mut measured = Map::new();
    for side in &sides {
        report::figure(&format!("redis-cpu-us-{}", side.name), side.best);
        measured.insert(side.name.to_owned(), json!(side.best));
    }
    let of = |name: &str| sides.iter().find(|side| side.name == name).expect("measured").best;
    let plain = of("plain-gcra");
    report::goal("redis-cpu-batch-16", Want::AtLeast(2.0), plain / of("batch-16"));
    report::goal("redis-cpu-batch-16-hot", Want::AtLeast(3.0), plain / of("batch-16-hot"));
    // One check that shares its call with no other.
    report::goal("redis-cpu-lone", Want::AtLeast(1.1), plain / of("batch-1"));
    report::goal("redis-cpu-lone-layered-3", Want::AtLeast(1.3), 3.0 * plain / of("layered-3"));
    report::ratio("redis-cpu-layered-3/batch-1", 3.0 * of("batch-1") / of("layered-3"));
    let ChecksASecond { one_thread, two_threads, flexible } = a_second(&server, &flexible);
    for (name, checks) in [
        ("tollkeeper", one_thread),
        ("tollkeeper-2-threads", two_threads),
        ("rate-limiter-flexible", flexible),
    ] {
        report::figure(&format!("redis-checks-a-second-{name}"), checks);
        measured.insert(format!("checks-a-second-{name}"), json!(checks));
    }
    report::goal("redis-checks-a-second/rate-limiter-flexible", Want::AtLeast(2.0), one_thread / flexible);
    report::ratio("redis-checks-a-second-2-threads/rate-limiter-flexible", two_threads / flexible);
    drop(server);
    for (name, bytes) in [
        ("token-bucket", memory(Algorithm::TokenBucket, Format::Readable, 1, 100_000)),
        ("token-bucket-compact", memory(Algorithm::TokenBucket, Format::Compact, 1, 100_000)),
        ("leaky-bucket", memory(Algorithm::LeakyBucket, Format::Readable, 1, 100_000)),
        ("fixed-window", memory(Algorithm::FixedWindow, Format::Readable, 1, 100_000)),
        ("sliding-window", memory(Algorithm::SlidingWindow, Format::Readable, 1, 100_000)),
        ("sliding-log-1000", memory(Algorithm::SlidingLog, Format::Readable, 1_000, 2_000)),
        ("concurrency-1", memory(Algorithm::Concurrency, Format::Readable, 1, 100_000)),
        ("concurrency-10", memory(Algorithm::Concurrency, Format::Readable, 10, 10_000)),
    ] {
        report::figure(&format!("redis-bytes-per-key-{name}"), bytes);
        measured.insert(format!("bytes-per-key-{name}"), json!(bytes));
    }
    report::save("redis", measured.into());
}

fn sides() -> Vec<Side> {
    let plain = Script::of(PLAIN.to_owned());
    let one = Script::of("return 1".to_owned());
    let plain = (0..CHECKS).map(|check| {
        let key = format!("user-{:019}", check % KEYS).into_bytes();
        let args = [b"600000".to_vec(), b"60000000000".to_vec(), b"1".to_vec()];
        command(&plain, &[key], &args)
    });
    let one = (0..CHECKS).map(|_| command(&one, &[], &[]));
    let mut sides = vec![side("plain-gcra", plain.collect(), 1), side("return-1", one.collect(), 1)];
    for (name, size) in [("batch-1", 1), ("batch-4", 4), ("batch-16", 16), ("batch-64", 64)] {
        sides.push(side(name, batches(1, size, KEYS), size));
    }
    for (name, size) in [("batch-4-hot", 4), ("batch-16-hot", 16), ("batch-64-hot", 64)] {
        sides.push(side(name, batches(1, size, 1), size));
    }
    sides.push(side("layered-3", batches(3, 1, KEYS), 1));
    sides.push(side("layered-3-batch-16", batches(3, 16, KEYS), 16));
    sides
}

fn side(name: &'static str, commands: Vec<Vec<Vec<u8>>>, checks: usize) -> Side {
    Side { name, commands, checks, together: (64 / checks).max(1), best: f64::MAX }
}

/// All checks, in batches of this size, over so many keys, each of so many limits.
fn batches(limits: usize, size: usize, keys: usize) -> Vec<Vec<Vec<u8>>> {
    let names = Names::new("tk", Format::Readable);
    let limit = |name: &str| Limit::new(name, Quota::per_minute(100).burst(100_000)).by("user");
    let limits = ["per-user", "per-org", "per-ip"][..limits].iter().map(|name| limit(name)).collect();
    let policy = Arc::new(Policy::new(limits).expect("valid"));
    let toll = |check: usize| -> Toll {
        let user = format!("{:024}", check % keys);
        policy.toll(Verb::Check, &facts! { "user" => &*user }, 1).expect("valid")
    };
    let batch = |first: usize| {
        let asked = |check| EncodedToll::new(&toll(check), 1, |due| names.state(due.key));
        let batch = Batch::new((first..first + size).map(asked).collect(), Nonce::new(first as u64));
        let keys: Vec<Vec<u8>> = batch.call().keys.iter().map(|key| key.clone().into_bytes()).collect();
        command(batch.call().script, &keys, &batch.call().args)
    };
    (0..CHECKS).step_by(size).map(batch).collect()
}

fn command(script: &Script, keys: &[Vec<u8>], args: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut words = vec![b"EVAL".to_vec(), script.text().into(), keys.len().to_string().into_bytes()];
    words.extend_from_slice(keys);
    words.extend_from_slice(args);
    words
}

/// Sends everything, 64 checks at a time. The first command travels with its script, the others by name.
fn run(client: &mut Client, side: &Side) {
    let sha = Script::of(String::from_utf8(side.commands[0][1].clone()).expect("a script is text"));
    for (index, chunk) in side.commands.chunks(side.together).enumerate() {
        for (place, words) in chunk.iter().enumerate() {
            let mut words: Vec<&[u8]> = words.iter().map(|word| &word[..]).collect();
            if index + place > 0 {
                (words[0], words[1]) = (b"EVALSHA", sha.sha().as_bytes());
            }
            client.ask(&words);
        }
        client.send();
        for _ in chunk {
            client.answer().expect("every check is answered");
        }
    }
}

/// Microseconds of processor time that the server has used.
fn cpu_micros(client: &mut Client) -> f64 {
    let part = |name: &str, text: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|value| value.trim().parse().ok()).expect("INFO says it")
    };
    let text = info(client, "cpu");
    (part("used_cpu_user", &text) + part("used_cpu_sys", &text)) * 1e6
}

/// Checks a second of one process with many in flight.
#[derive(Default)]
struct ChecksASecond {
    /// Ours, with one worker thread: as many as a node process has.
    one_thread: f64,
    /// Ours, with two, which share the cores with Redis.
    two_threads: f64,
    /// Those of rate-limiter-flexible, with the better of two settings.
    flexible: f64,
}

/// In turns, and the best of three: noise only takes away.
fn a_second(server: &Server, flexible: &str) -> ChecksASecond {
    let limit = Limit::new("per-user", Quota::per_minute(1_000_000).burst(1_000_000)).by("user");
    let ours = |threads: usize| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(threads).enable_all().build().expect("threads can be started");
        runtime.block_on(async { tokio::spawn(checks_a_second(server.url(), limit.clone())).await })
    };
    let mut best = ChecksASecond::default();
    for _ in 0..3 {
        best.one_thread = best.one_thread.max(ours(1).expect("no check fails"));
        best.two_threads = best.two_threads.max(ours(2).expect("no check fails"));
        for pipeline in ["true", "false"] {
            let (seconds, in_flight, keys) = (SECONDS.to_string(), IN_FLIGHT.to_string(), KEYS.to_string());
            let output = Command::new("node")
                .args([
                    flexible,
                    &server.socket().display().to_string(),
                    &seconds,
                    &in_flight,
                    &keys,
                    pipeline,
                ])
                .output()
                .expect("node is installed");
            let text = String::from_utf8_lossy(&output.stdout);
            best.flexible = best.flexible.max(text.trim().parse().unwrap_or_else(|_| panic!("{output:?}")));
        }
    }
    best
}

async fn checks_a_second(url: String, limit: Limit) -> f64 {
    let limiter = redis::limiter(&url, vec![limit]);
    limiter.peek(&facts! { "user" => "nobody" }).await.expect("valid");
    let began = Instant::now();
    let tasks: Vec<_> = (0..IN_FLIGHT)
        .map(|task| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                let mut checks = 0u32;
                while began.elapsed() < Duration::from_secs(SECONDS) {
                    let user = format!("{:024}", (task + checks as usize * IN_FLIGHT) % KEYS);
                    let decision = limiter.check(&facts! { "user" => &*user }).await.expect("valid");
                    assert_eq!(decision.degraded(), None, "the store decides");
                    checks += 1;
                }
                checks
            })
        })
        .collect();
    let mut checks = 0;
    for task in tasks {
        checks += task.await.expect("no check fails");
    }
    f64::from(checks) / began.elapsed().as_secs_f64()
}

/// Bytes per key, with 24-byte values, each of so many units.
fn memory(algorithm: Algorithm, format: Format, units: u64, keys: usize) -> f64 {
    let server = Server::start();
    let mut client = server.connect();
    let names = Names::new("tk", format);
    let slots = algorithm == Algorithm::Concurrency;
    let rate = Quota::per(1_000, Duration::from_secs(86_400));
    let limit = match slots {
        true => Limit::new("per-user", Quota::slots(1_000)),
        false => Limit::new("per-user", rate).algorithm(algorithm),
    };
    // A slot is held by one, so that many are taken one after the other.
    let (verb, times, units) = if slots { (Verb::Acquire, units, 1) } else { (Verb::Check, 1, units) };
    let limit = limit.by("user").ttl(Duration::from_secs(3_600));
    let policy = Arc::new(Policy::new(vec![limit]).expect("valid"));
    let before = used(&mut client);
    for key in 0..keys {
        let user = format!("{key:024}");
        let toll = policy.toll(verb, &facts! { "user" => &*user }, units).expect("valid");
        for id in 1..=times {
            let batch =
                Batch::new(vec![EncodedToll::new(&toll, id, |due| names.state(due.key))], Nonce::new(id));
            let call = batch.call();
            client.run(call.script, &[call.keys[0].as_bytes()], &[&call.args[0]]).expect("decided");
        }
    }
    assert_eq!(client.text("DBSIZE"), Value::Number(i64::try_from(keys).expect("few")), "all are there");
    (used(&mut client) - before) / keys as f64
}

fn used(client: &mut Client) -> f64 {
    let text = info(client, "memory");
    let line = text.lines().find_map(|line| line.strip_prefix("used_memory:"));
    line.and_then(|value| value.trim().parse().ok()).expect("INFO says it")
}

fn info(client: &mut Client, section: &str) -> String {
    let Value::Bytes(text) = client.text(&format!("INFO {section}")) else { panic!("INFO is text") };
    String::from_utf8_lossy(&text).into_owned()
}
