//! Runs several nodes as child processes on one Redis, and judges their admissions together.

use std::env;
use std::fs;
use std::io::Read as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tollkeeper::store::redis::wire::Value;
use tollkeeper_core::contract::{self, Admission, Rate};
use tollkeeper_tests::redis::{Client, Server};

use crate::node::{self, Assignment, Done, Keys, Load, Logged, Side};
use crate::served::{file, folder};

/// The argument that makes this program a node.
pub const NODE: &str = "node";

const SECOND: u64 = 1_000_000;
/// A busy machine needs this long to use up a burst.
const BURST_SECONDS: usize = 3;
/// Time for all nodes to start and connect.
const START: u64 = 2_500_000;

/// What a fleet does.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The number of nodes.
    pub nodes: u64,
    /// What decides.
    pub side: Side,
    /// The config of every node; the store is added.
    pub config: String,
    /// The requests of each node.
    pub load: Load,
    /// Their keys.
    pub keys: Keys,
    /// For how many seconds.
    pub seconds: u64,
    /// Whether the time of each check is measured.
    pub timed: bool,
    /// Whether admissions are logged.
    pub logged: bool,
    /// The node that will be killed.
    pub victim: Option<usize>,
}

impl Plan {
    /// One node with this config that makes checks of one key, as fast as they are decided.
    pub fn new(config: impl Into<String>) -> Plan {
        Plan {
            nodes: 1,
            side: Side::Tollkeeper,
            config: config.into(),
            load: Load::Closed(64),
            keys: Keys::Hot,
            seconds: 3,
            timed: false,
            logged: false,
            victim: None,
        }
    }

    /// Runs the fleet on this server, and measures what that costs the server.
    pub fn run(&self, server: &Server) -> Run {
        let mut client = server.connect();
        client.text("FLUSHALL");
        let mut cpu = 0.0;
        let mut run = self.run_during(&server.url(), |_| {
            client.text("CONFIG RESETSTAT");
            cpu = node::cpu_seconds_of(server.process());
        });
        run.redis_cpu_seconds = node::cpu_seconds_of(server.process()) - cpu;
        run.script_calls = script_calls(&mut client);
        run
    }

    /// Runs the fleet on the store at this URL. `during` is called when the load begins.
    pub fn run_during(&self, url: &str, during: impl FnOnce(&mut Fleet)) -> Run {
        let begin = node::now() + START;
        let store = format!("store: {url}\n{}", self.config);
        let config = file("node.yaml", store.as_bytes());
        let log = |node: u64| folder().join(format!("node-{node}.log"));
        let nodes = (0..self.nodes).map(|node| {
            let assignment = Assignment {
                node,
                side: self.side,
                url: url.replace("redis+unix:", "unix:"),
                config: config.clone(),
                begin,
                lasts: self.seconds * SECOND,
                load: self.load,
                keys: self.keys,
                timed: self.timed,
                log: self.logged.then(|| log(node)),
                at_once: self.victim.is_some_and(|victim| victim as u64 == node),
            };
            start(&assignment)
        });
        let mut fleet = Fleet { nodes: nodes.collect() };
        sleep_until(begin - 50_000);
        during(&mut fleet);
        let mut run = Run { begin, seconds: self.seconds, ..Run::default() };
        for (index, node) in fleet.nodes.iter_mut().enumerate() {
            let mut text = String::new();
            node.stdout.take().expect("piped").read_to_string(&mut text).expect("text");
            let status = node.wait().expect("a child");
            let is_victim = self.victim == Some(index);
            assert!(status.success() || is_victim, "a node ended with {status}");
            run.done.extend(serde_json::from_str::<Done>(&text).ok());
        }
        for node in 0..self.nodes {
            let log: PathBuf = log(node);
            run.log.extend(Logged::read(&log));
            let _ = fs::remove_file(log);
        }
        run
    }
}

/// The running nodes.
#[derive(Debug)]
pub struct Fleet {
    nodes: Vec<Child>,
}

impl Fleet {
    /// Ends a node with SIGKILL.
    pub fn kill(&mut self, node: usize) {
        self.nodes[node].kill().expect("it runs");
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            let _ = node.kill();
            let _ = node.wait();
        }
    }
}

fn start(assignment: &Assignment) -> Child {
    let assignment = serde_json::to_string(assignment).expect("plain values");
    let this = env::current_exe().expect("this program has a path");
    let mut command = Command::new("setpriv");
    // It ends when we do, whatever ends us.
    command.args(["--pdeathsig", "KILL"]).arg(this).args([NODE, &assignment]);
    command.stdout(Stdio::piped()).spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// Waits until this time, in Unix microseconds.
#[expect(clippy::disallowed_methods, reason = "real processes use real time")]
pub fn sleep_until(time: u64) {
    std::thread::sleep(Duration::from_micros(time.saturating_sub(node::now())));
}

/// How many scripts the server has run since its counters were reset.
fn script_calls(client: &mut Client) -> u64 {
    let Value::Bytes(text) = client.text("INFO commandstats") else { panic!("INFO is text") };
    let text = String::from_utf8_lossy(&text).into_owned();
    let calls = |command: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
        line.and_then(|line| line.split(',').next()?.parse::<u64>().ok()).unwrap_or(0)
    };
    calls("eval") + calls("evalsha")
}

/// What a fleet did.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// When the load began, in Unix microseconds.
    pub begin: u64,
    /// How long it lasted.
    pub seconds: u64,
    /// What the nodes did, but for those that were killed.
    pub done: Vec<Done>,
    /// The admissions of all nodes.
    pub log: Vec<Logged>,
    /// Processor time of Redis.
    pub redis_cpu_seconds: f64,
    /// Scripts that Redis ran.
    pub script_calls: u64,
}

#[expect(clippy::cast_precision_loss, reason = "a few million")]
impl Run {
    /// The sum of a count over all nodes.
    pub fn sum(&self, count: impl Fn(&Done) -> u64) -> f64 {
        self.done.iter().map(count).sum::<u64>() as f64
    }

    /// Scripts that Redis ran per check.
    pub fn calls_per_check(&self) -> f64 {
        self.script_calls as f64 / self.sum(|done| done.checks)
    }

    /// Tolls and requests for permits per check, as the library counts them. Redis runs several as one script.
    pub fn requests_per_check(&self) -> f64 {
        self.sum(|done| done.decide_calls + done.lease_calls) / self.sum(|done| done.checks)
    }

    /// Scripts that Redis ran in a second.
    pub fn calls_per_second(&self) -> f64 {
        self.script_calls as f64 / self.seconds as f64
    }

    /// Processor time of all nodes and Redis.
    pub fn cpu_seconds(&self) -> f64 {
        self.redis_cpu_seconds + self.done.iter().map(|done| done.cpu_seconds).sum::<f64>()
    }

    /// Checks in a second of processor time, of all nodes and Redis together.
    pub fn checks_per_cpu_second(&self) -> f64 {
        self.sum(|done| done.checks) / self.cpu_seconds()
    }

    /// The longest of the nodes' 99th percentiles, in microseconds.
    pub fn p99_micros(&self) -> f64 {
        self.done.iter().map(|done| done.p99_ns).fold(0.0, f64::max) / 1_000.0
    }

    /// The admissions of a key, all or only those that the store or permits admitted.
    pub fn admissions(&self, with_degraded: bool) -> Vec<Admission> {
        let counted = self.log.iter().filter(|logged| with_degraded || !logged.degraded);
        counted.map(|logged| Admission { at: logged.at, cost: 1 }).collect()
    }

    /// This run, with only these admissions.
    #[must_use]
    pub fn with(self, history: &[Admission]) -> Run {
        let logged = |admission: &Admission| Logged { at: admission.at, key: 0, degraded: false };
        Run { log: history.iter().map(logged).collect(), ..self }
    }

    /// Admissions in each second of the load as a part of the limit, without the first ones, in which the burst is used up.
    pub fn seconds_of(&self, limit: u64) -> Seconds {
        let mut counts = vec![0u32; usize::try_from(self.seconds).expect("few")];
        for logged in &self.log {
            let second = logged.at.checked_sub(self.begin).map(|since| since / SECOND);
            let count = second.and_then(|second| counts.get_mut(usize::try_from(second).ok()?));
            count.map(|count| *count += 1).unwrap_or_default();
        }
        let mut parts: Vec<f64> =
            counts[BURST_SECONDS..].iter().map(|count| f64::from(*count) / limit as f64).collect();
        parts.sort_by(f64::total_cmp);
        Seconds {
            lowest: parts[0],
            median: parts[parts.len() / 2],
            highest: parts[parts.len() - 1],
            mean: parts.iter().sum::<f64>() / parts.len() as f64,
        }
    }
}

/// Admissions per second as parts of the limit.
#[derive(Clone, Copy, Debug)]
pub struct Seconds {
    /// In the second with the fewest.
    pub lowest: f64,
    /// In the middle one.
    pub median: f64,
    /// In the second with the most.
    pub highest: f64,
    /// Over all of them.
    pub mean: f64,
}

/// The burst that a history needs, as a part of the burst that it has: above 1, the contract is broken. `contracts` are
/// the rates and bursts that are granted: 1 and 1, more after faults. A lost state also starts a new tick.
#[expect(clippy::cast_precision_loss, reason = "a few million")]
pub fn needed(history: &[Admission], per_second: u64, burst: u64, rates: u64, bursts: u64) -> f64 {
    let rate = Rate { count: rates * per_second, period: SECOND, tick: 2 * bursts };
    contract::bucket(history, rate) as f64 / (bursts * burst) as f64
}
