//! A process of a fleet: a limiter on a shared Redis, and the load on it.
//!
//! It is configured by a file, as a user's would be, and logs what it admits with the time on the clock of Redis, so
//! that the logs of all nodes together can be judged by the contract checker.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use limitador_redis::AsyncRateLimiter;
use limitador_redis::limit::Namespace;
use limitador_redis::storage::redis::CachedRedisStorageBuilder;
use serde::{Deserialize, Serialize};
use tollkeeper::config::{Config, StoreUrl};
use tollkeeper::store::redis::RedisStore;
use tollkeeper::store::{Leased, Resilient};
use tollkeeper::{DecidedToll, Limiter, Observer, Op, Permits, Span, facts};

use crate::keys;

/// What a node does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Assignment {
    /// Its number, from 0.
    pub node: u64,
    /// What decides.
    pub side: Side,
    /// The store's URL, for Limitador.
    pub url: String,
    /// The config file, for Tollkeeper.
    pub config: PathBuf,
    /// When to begin, in Unix microseconds.
    pub begin: u64,
    /// For how long, in microseconds.
    pub lasts: u64,
    /// The requests.
    pub load: Load,
    /// Their keys.
    pub keys: Keys,
    /// Whether the time of each check is measured.
    pub timed: bool,
    /// The file for admissions.
    pub log: Option<PathBuf>,
    /// Whether each admission is written at once, because this process will be killed.
    pub at_once: bool,
}

/// Limitador's limit.
pub const LIMITADOR_LIMIT: u64 = 10_000;

/// What decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Side {
    /// Tollkeeper, as configured.
    Tollkeeper,
    /// Tollkeeper without the wrapper that answers for Redis.
    WithoutWrapper,
    /// Limitador's cached Redis storage, with its defaults: [`LIMITADOR_LIMIT`] in a fixed window of a second.
    Limitador,
}

/// The requests.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Load {
    /// So many a second, whatever their answers.
    Paced(u64),
    /// So many a second while it is this node's turn: the load moves to the next of `nodes` after `turn` microseconds.
    Moving {
        /// In all.
        per_second: u64,
        /// How many nodes take turns.
        nodes: u64,
        /// Microseconds of a turn.
        turn: u64,
    },
    /// As many as are decided, with so many in flight.
    Closed(u64),
    /// So many checks, with so many in flight.
    Count(u64, u64),
}

/// The keys of the requests.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Keys {
    /// One.
    Hot,
    /// So many, by Zipf's law.
    Zipf(u64),
    /// So many, in turn.
    Each(u64),
}

/// What a node did.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Done {
    /// Checks that were due.
    pub offered: u64,
    /// Checks that were made.
    pub checks: u64,
    /// Those that were admitted.
    pub admitted: u64,
    /// Those that were decided without the store, because it did not answer.
    pub degraded: u64,
    /// Tolls sent to the store, as the library counts.
    pub decide_calls: u64,
    /// Calls that asked for permits, as the library counts.
    pub lease_calls: u64,
    /// Units that were granted in advance.
    pub granted: u64,
    /// Units that expired unused.
    pub expired: u64,
    /// Half of the checks took no longer, in nanoseconds.
    pub median_ns: f64,
    /// Of a hundred checks, 99 took no longer.
    pub p99_ns: f64,
    /// Processor time of this process during the load.
    pub cpu_seconds: f64,
    /// From the begin until the last answer.
    pub seconds: f64,
    /// Resident memory before the load.
    pub memory_before: u64,
    /// Resident memory after the load.
    pub memory_after: u64,
}

/// An admission: when, and the number of its key.
#[derive(Clone, Copy, Debug)]
pub struct Logged {
    /// In microseconds, on the clock of Redis.
    pub at: u64,
    /// The number of the key.
    pub key: u32,
    /// Whether Redis did not answer, so that this node decided by its share.
    pub degraded: bool,
}

impl Logged {
    const BYTES: usize = 13;

    /// All that a file holds. A process that was killed may have left a part of the last.
    pub fn read(file: &Path) -> Vec<Logged> {
        let bytes = fs::read(file).unwrap_or_default();
        let part = |bytes: &[u8]| {
            let (at, rest) = bytes.split_at(8);
            let (key, degraded) = rest.split_at(4);
            Logged {
                at: u64::from_le_bytes(at.try_into().expect("8 bytes")),
                key: u32::from_le_bytes(key.try_into().expect("4 bytes")),
                degraded: degraded[0] == 1,
            }
        };
        bytes.chunks_exact(Logged::BYTES).map(part).collect()
    }

    fn write(self, bytes: &mut Vec<u8>) {
        bytes.extend(self.at.to_le_bytes());
        bytes.extend(self.key.to_le_bytes());
        bytes.push(u8::from(self.degraded));
    }
}

/// Microseconds since 1970, on the clock that all processes of this machine share with Redis.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    u64::try_from(since.as_micros()).expect("before the year 500,000")
}

/// Resident memory of this process.
fn memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux tells a process its size");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS is there");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number of kB") * 1_024
}

/// Runs as a node. The assignment is the JSON text of an argument; what was done is printed as JSON.
pub fn run(assignment: &str) {
    let assignment: Assignment = serde_json::from_str(assignment).expect("the fleet wrote it");
    // One thread, so that eight nodes can share two cores.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let done = runtime.block_on(Node::run(assignment));
    println!("{}", serde_json::to_string(&done).expect("numbers"));
}

struct Node {
    assignment: Assignment,
    limiter: Decider,
    names: Vec<String>,
    /// The numbers of the keys of requests, in order.
    draws: Vec<u32>,
    made: AtomicU64,
    degraded: AtomicU64,
    admitted: AtomicU64,
    times: Mutex<Histogram>,
    log: Mutex<(Vec<u8>, Option<File>)>,
}

impl Node {
    async fn run(assignment: Assignment) -> Done {
        let counts = Arc::new(Counts::default());
        let (names, draws) = drawn(&assignment);
        let file =
            assignment.log.as_ref().map(|log| File::create(log).expect("the target folder can be written"));
        let limiter = Decider::open(&assignment, &counts).await;
        let node = Arc::new(Node {
            limiter,
            names,
            draws,
            made: AtomicU64::new(0),
            degraded: AtomicU64::new(0),
            admitted: AtomicU64::new(0),
            times: Mutex::default(),
            log: Mutex::new((Vec::new(), file)),
            assignment,
        });
        // The connection and the scripts are there before the first request.
        node.limiter.warm_up().await;
        let Assignment { begin, lasts, load, .. } = node.assignment;
        tokio::time::sleep(Duration::from_micros(begin.saturating_sub(now()))).await;
        let (cpu_before, memory_before, before) = (cpu_seconds(), memory(), counts.values());
        let tasks = match load {
            Load::Paced(_) | Load::Moving { .. } => PACED_TASKS,
            Load::Closed(in_flight) | Load::Count(_, in_flight) => in_flight,
        };
        let began = Instant::now();
        let tasks: Vec<_> = (0..tasks).map(|_| tokio::spawn(Arc::clone(&node).ask(began))).collect();
        for task in tasks {
            task.await.expect("no check fails");
        }
        let cpu_seconds = cpu_seconds() - cpu_before;
        let [decide_calls, lease_calls, granted, expired] = {
            let after = counts.values();
            [0, 1, 2, 3].map(|index| after[index] - before[index])
        };
        let (bytes, file) = &mut *node.log.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = file {
            file.write_all(bytes).expect("the target folder can be written");
        }
        let times = node.times.lock().unwrap_or_else(PoisonError::into_inner);
        let per_second = match load {
            Load::Paced(per_second) => per_second,
            Load::Moving { per_second, nodes, .. } => per_second / nodes,
            Load::Closed(_) | Load::Count(..) => 0,
        };
        Done {
            offered: per_second * lasts / 1_000_000,
            checks: node.made.load(Relaxed),
            admitted: node.admitted.load(Relaxed),
            degraded: node.degraded.load(Relaxed),
            decide_calls,
            lease_calls,
            granted,
            expired,
            median_ns: times.permille(500),
            p99_ns: times.permille(990),
            cpu_seconds,
            seconds: began.elapsed().as_secs_f64(),
            memory_before,
            memory_after: memory(),
        }
    }

    /// Makes checks until the end, one after the other.
    async fn ask(self: Arc<Self>, began: Instant) {
        let Assignment { lasts, load, node, .. } = self.assignment;
        let micros = || u64::try_from(began.elapsed().as_micros()).expect("seconds");
        match load {
            Load::Closed(_) => {
                while micros() < lasts {
                    for _ in 0..CHECKS_BEFORE_YIELD {
                        self.check().await;
                    }
                    tokio::task::yield_now().await;
                }
            }
            Load::Count(count, _) => {
                while self.made.load(Relaxed) < count {
                    self.check().await;
                    if self.made.load(Relaxed).is_multiple_of(CHECKS_BEFORE_YIELD) {
                        tokio::task::yield_now().await;
                    }
                }
            }
            Load::Paced(_) | Load::Moving { .. } => {
                let (mut due, mut last) = (0.0, 0);
                loop {
                    let time = micros();
                    if time >= lasts {
                        return;
                    }
                    let per_second = match load {
                        Load::Paced(per_second) => per_second,
                        Load::Moving { per_second, nodes, turn } => {
                            if time / turn % nodes == node {
                                per_second
                            } else {
                                0
                            }
                        }
                        _ => unreachable!("matched above"),
                    };
                    #[expect(clippy::cast_precision_loss, reason = "a few million")]
                    let new = (time - last) as f64 * per_second as f64 / 1e6 / PACED_TASKS as f64;
                    // What could not be sent within 20 ms is not sent at all.
                    #[expect(clippy::cast_precision_loss, reason = "a few million")]
                    let most = per_second as f64 / 50.0 / PACED_TASKS as f64;
                    due = (due + new).min(most.max(1.0));
                    last = time;
                    while due >= 1.0 {
                        self.check().await;
                        due -= 1.0;
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
        }
    }

    async fn check(&self) {
        let number = self.made.fetch_add(1, Relaxed);
        let length = u64::try_from(self.draws.len()).expect("a few million");
        let key = self.draws[usize::try_from(number % length).expect("an index")];
        let name = &self.names[key as usize];
        let began = self.assignment.timed.then(Instant::now);
        let answer = self.limiter.check(name).await;
        if let Some(began) = began {
            self.times.lock().unwrap_or_else(PoisonError::into_inner).add(began.elapsed());
        }
        if answer.degraded {
            self.degraded.fetch_add(1, Relaxed);
        }
        if answer.admitted {
            self.admitted.fetch_add(1, Relaxed);
            if self.assignment.log.is_some() {
                self.write(Logged { at: answer.at, key, degraded: answer.degraded });
            }
        }
    }

    fn write(&self, logged: Logged) {
        let (bytes, file) = &mut *self.log.lock().unwrap_or_else(PoisonError::into_inner);
        logged.write(bytes);
        if let Some(file) = file.as_mut().filter(|_| self.assignment.at_once) {
            file.write_all(bytes).expect("the target folder can be written");
            bytes.clear();
        }
    }
}

/// Tasks that make paced checks: so many can be in flight.
const PACED_TASKS: u64 = 16;
/// A task lets others run after so many checks: one that is decided in this process does not wait for anything.
const CHECKS_BEFORE_YIELD: u64 = 32;

/// The names of the keys, and the numbers of the keys in the order of the requests.
fn drawn(assignment: &Assignment) -> (Vec<String>, Vec<u32>) {
    const DRAWS: usize = 1 << 18;
    let number = |key: u64| u32::try_from(key).expect("a few million keys");
    let (count, draws) = match assignment.keys {
        Keys::Hot => (1, vec![0]),
        Keys::Zipf(count) => {
            let earlier = usize::try_from(assignment.node).expect("few nodes") * DRAWS;
            (count, keys::zipf(count).skip(earlier).take(DRAWS).map(number).collect())
        }
        Keys::Each(count) => (count, (0..count).map(number).collect()),
    };
    ((0..count).map(|key| keys::key("user", key)).collect(), draws)
}

enum Decider {
    Tollkeeper(Limiter),
    Limitador(AsyncRateLimiter, Namespace),
}

struct Answer {
    admitted: bool,
    degraded: bool,
    at: u64,
}

impl Decider {
    async fn open(assignment: &Assignment, counts: &Arc<Counts>) -> Decider {
        let counts = || Arc::clone(counts) as Arc<dyn Observer>;
        match assignment.side {
            Side::Limitador => {
                let storage = CachedRedisStorageBuilder::new(&assignment.url).build().await;
                let limiter = AsyncRateLimiter::new_with_storage(Box::new(storage.expect("Redis runs")));
                let conditions: [&str; 0] = [];
                limiter.add_limit(limitador_redis::limit::Limit::new(
                    "bench",
                    100_000,
                    1,
                    conditions,
                    ["user"],
                ));
                Decider::Limitador(limiter, "bench".into())
            }
            side => {
                let (config, _) = Config::read(&assignment.config).expect("a valid config");
                let StoreUrl::Redis(url) = &config.store else { panic!("the store is Redis") };
                let policy = config.policy.clone();
                Decider::Tollkeeper(if side == Side::WithoutWrapper {
                    let store = Resilient::<RedisStore>::open(url, &config.redis).expect("no files");
                    store.observe(counts());
                    Limiter::with_store(policy, Arc::new(store))
                } else {
                    let store = Leased::open(url, &config.redis).expect("no files");
                    store.observe(counts());
                    store.inner().observe(counts());
                    Limiter::with_store(policy, Arc::new(store))
                })
            }
        }
    }

    async fn warm_up(&self) {
        if let Decider::Tollkeeper(limiter) = self {
            for _ in 0..100 {
                let decision = limiter.check(&facts! { "user" => "warm-up" }).await.expect("valid facts");
                if decision.degraded().is_none() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    #[inline]
    async fn check(&self, key: &str) -> Answer {
        match self {
            Decider::Tollkeeper(limiter) => {
                let decision = limiter.check(&facts! { "user" => key }).await.expect("valid facts");
                Answer {
                    admitted: decision.allowed(),
                    degraded: decision.degraded().is_some(),
                    at: decision.time().as_micros(),
                }
            }
            Decider::Limitador(limiter, namespace) => {
                let values = HashMap::from([("user".to_owned(), key.to_owned())]);
                let answer = limiter.check_rate_limited_and_update(namespace, &values, 1, false).await;
                Answer { admitted: !answer.expect("valid").limited, degraded: false, at: now() }
            }
        }
    }
}

/// What the library reports.
#[derive(Debug, Default)]
struct Counts {
    decide: AtomicU64,
    lease: AtomicU64,
    granted: AtomicU64,
    expired: AtomicU64,
}

impl Counts {
    fn values(&self) -> [u64; 4] {
        [&self.decide, &self.lease, &self.granted, &self.expired].map(|count| count.load(Relaxed))
    }
}

impl Observer for Counts {
    fn record(&self, _: &DecidedToll) {}

    fn asked(&self, what: Op, _: Span) {
        match what {
            Op::Decide => self.decide.fetch_add(1, Relaxed),
            Op::Lease => self.lease.fetch_add(1, Relaxed),
            _ => 0,
        };
    }

    fn permits(&self, _: &str, state: Permits, units: u64) {
        match state {
            Permits::Granted => self.granted.fetch_add(units, Relaxed),
            Permits::Expired => self.expired.fetch_add(units, Relaxed),
            Permits::Spent => 0,
        };
    }
}

/// Counts times in buckets that are a sixteenth wide.
struct Histogram(Vec<u64>);

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram(vec![0; 64 * 16])
    }
}

impl Histogram {
    fn add(&mut self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(16);
        let power = nanos.ilog2();
        let bucket = u64::from(power) * 16 + (nanos >> (power - 4) & 15);
        self.0[usize::try_from(bucket).expect("below 1,024")] += 1;
    }

    /// The upper end of the bucket that this many of a thousand did not exceed.
    fn permille(&self, permille: u64) -> f64 {
        let total: u64 = self.0.iter().sum();
        let mut seen = 0;
        for (bucket, count) in (0u32..).zip(&self.0) {
            seen += count;
            if seen * 1_000 >= total * permille && total > 0 {
                return f64::from(2u32).powi((bucket / 16) as i32) * f64::from(17 + bucket % 16) / 16.0;
            }
        }
        0.0
    }
}

/// Processor time of this process so far.
fn cpu_seconds() -> f64 {
    cpu_seconds_of(std::process::id())
}

/// Processor time of a process so far.
pub fn cpu_seconds_of(process: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The program name is in parentheses and may contain anything.
    let fields: Vec<&str> =
        stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect()).unwrap_or_default();
    let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<u32>().ok()).unwrap_or(0);
    // Ticks are hundredths of a second for every program on Linux, whatever the kernel counts in.
    f64::from(ticks(11) + ticks(12)) / 100.0
}
