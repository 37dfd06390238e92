//! Generates load from several processes on one store, and evaluates the recorded decisions.
//!
//! Each node is a process (`bin/load-node.rs`) that makes checks at a steady rate, whatever their results, and writes
//! each decision to its output. The parent collects all outputs. So a test can inject a fault into the store, wait until
//! every node uses the store again, and evaluate the whole history.

use std::collections::HashMap;
use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::ops::Range;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tollkeeper::{Algorithm, Correction, Limit, OnStoreFailure, Policy, Quota};
use tollkeeper_core::contract::{self, Admission, Rate, Windows};

/// Number of load processes.
pub const NODES: u32 = 2;
/// Threads per process.
pub const THREADS: usize = 2;
/// Checks per second of each process.
pub const OFFERED: u32 = 1_000;
/// The cost of each check of [`ONCE`], and the part that its refund takes back.
pub const COST: u64 = 3;
/// As [`COST`].
pub const BACK: u64 = 1;
/// The limit whose keys are charged once each, and refunded twice each, at the same time.
pub const ONCE: &str = "once";
/// More than any key of [`ONCE`] is charged, so that its state shows the total.
pub const PLENTY: u64 = 100;

/// Count and burst of the buckets, per second: far less than the load.
const BUCKET: (u64, u64) = (100, 20);
/// Count of windows and logs, for each second.
const WINDOW: u64 = 60;

const SECOND: u64 = 1_000_000;

/// The limits, one for each route of the same name.
pub fn limits() -> Vec<Limit> {
    use OnStoreFailure::{Allow, Deny, Local};
    let bucket = || Quota::per_second(BUCKET.0).burst(BUCKET.1);
    let window = || Quota::per_second(WINDOW);
    [
        Limit::new("deny-bucket", bucket()).on_store_failure(Deny),
        Limit::new("deny-log", window()).algorithm(Algorithm::SlidingLog).on_store_failure(Deny),
        Limit::new("local-bucket", bucket()).on_store_failure(Local),
        Limit::new("local-window", window()).algorithm(Algorithm::FixedWindow).on_store_failure(Local),
        Limit::new("allow-bucket", bucket()).on_store_failure(Allow),
        Limit::new(ONCE, Quota::per_day(PLENTY)).algorithm(Algorithm::FixedWindow).on_store_failure(Deny),
    ]
    .into_iter()
    .zip(ROUTES)
    .map(|(limit, route)| {
        let limit = limit.when("route", route);
        if route == ONCE { limit.by("user") } else { limit }
    })
    .collect()
}

/// The routes, in the order of their checks.
pub const ROUTES: [&str; 6] =
    ["deny-bucket", "deny-log", "local-bucket", "local-window", "allow-bucket", ONCE];

/// The limits as a policy.
pub fn policy() -> Policy {
    Policy::new(limits()).expect("valid limits")
}

/// One check, as recorded by the node that made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Number of the node.
    pub node: u32,
    /// The number of the route.
    pub route: usize,
    /// Start of the check in Unix microseconds, on the clock that all processes share.
    pub at: u64,
    /// Duration in microseconds.
    pub took: u64,
    /// Whether the store was called at all.
    pub asked: bool,
    /// Whether it was admitted.
    pub allowed: bool,
    /// The failure policy that decided in place of the store.
    pub degraded: Option<OnStoreFailure>,
    /// The time of the decision, on the clock of the store or of the node that decided.
    pub time: u64,
    /// The number of the user on this node.
    pub user: u64,
    /// The results of the two refunds.
    pub refunds: Option<[Correction; 2]>,
}

const DEGRADED: [(Option<OnStoreFailure>, &str); 4] = [
    (None, "-"),
    (Some(OnStoreFailure::Allow), "allow"),
    (Some(OnStoreFailure::Deny), "deny"),
    (Some(OnStoreFailure::Local), "local"),
];
const CORRECTIONS: [(Correction, &str); 5] = [
    (Correction::Done, "done"),
    (Correction::Repeated, "repeated"),
    (Correction::Unknown, "unknown"),
    (Correction::Failed, "failed"),
    (Correction::Full, "full"),
];

fn name<T: PartialEq>(names: &[(T, &'static str)], thing: T) -> &'static str {
    names.iter().find(|(named, _)| *named == thing).expect("all have names").1
}

fn named<T: Copy>(names: &[(T, &str)], name: &str) -> Option<T> {
    names.iter().find(|(_, named)| *named == name).map(|(thing, _)| *thing)
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { node, route, at, took, time, user, .. } = self;
        let (asked, allowed) = (u8::from(self.asked), u8::from(self.allowed));
        let degraded = name(&DEGRADED, self.degraded);
        write!(f, "row {node} {route} {at} {took} {asked} {allowed} {degraded} {time} {user}")?;
        self.refunds.iter().flatten().try_for_each(|done| write!(f, " {}", name(&CORRECTIONS, *done)))
    }
}

impl Row {
    /// Parses a recorded line.
    fn read(line: &str) -> Option<Row> {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |index: usize| words.get(index)?.parse::<u64>().ok();
        let done = |index: usize| named(&CORRECTIONS, words.get(index)?);
        Some(Row {
            node: u32::try_from(number(1)?).ok()?,
            route: usize::try_from(number(2)?).ok()?,
            at: number(3)?,
            took: number(4)?,
            asked: number(5)? == 1,
            allowed: number(6)? == 1,
            degraded: named(&DEGRADED, words.get(7)?)?,
            time: number(8)?,
            user: number(9)?,
            refunds: done(10).zip(done(11)).map(|(one, other)| [one, other]),
        })
    }

    fn admission(&self) -> Admission {
        Admission { at: self.time, cost: 1 }
    }
}

/// The output of all nodes.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Every check.
    pub rows: Vec<Row>,
    /// Every line of their logs.
    pub logs: Vec<String>,
    /// Unexpected errors; a test asserts that there are none.
    pub errors: Vec<String>,
    /// The longest stall of a thread that only reads the clock, in microseconds.
    pub stalled: u64,
    /// Peak memory of a process before and after the load, in KiB.
    pub memory: Vec<(u64, u64)>,
    /// Number of nodes that exited successfully.
    pub ended: u32,
}

/// The running load processes.
#[derive(Debug)]
pub struct Fleet {
    nodes: Vec<Node>,
    history: Arc<Mutex<History>>,
}

#[derive(Debug)]
struct Node {
    process: Child,
    /// The process exits when this is closed.
    stdin: Option<ChildStdin>,
    reader: Option<JoinHandle<()>>,
}

impl Fleet {
    /// Starts the processes with the store at this URL.
    pub fn start(program: &str, url: &str, deadline: Duration) -> Fleet {
        let history = Arc::new(Mutex::new(History::default()));
        let nodes = (0..NODES).map(|number| Node::start(program, number, url, deadline, &history)).collect();
        Fleet { nodes, history }
    }

    /// The time from `since` until every node has got a decision from the store on every route; `None` if it takes
    /// longer than `longest`.
    pub fn answered(&self, since: u64, longest: Duration) -> Option<Duration> {
        let started = Instant::now();
        loop {
            let mut first: HashMap<(u32, usize), u64> = HashMap::new();
            for row in self.look().rows.iter().rev().take_while(|row| row.at + 10 * SECOND > since) {
                if row.at >= since && row.degraded.is_none() {
                    first.insert((row.node, row.route), row.at + row.took);
                }
            }
            if first.len() == ROUTES.len() * self.nodes.len() {
                let last = first.into_values().max().unwrap_or(since);
                return Some(Duration::from_micros(last - since));
            }
            if started.elapsed() > longest {
                return None;
            }
            wait(Duration::from_millis(10));
        }
    }

    /// Stops the processes and collects the rest of their output.
    pub fn finish(mut self) -> History {
        for node in &mut self.nodes {
            drop(node.stdin.take());
        }
        for node in &mut self.nodes {
            if let Some(reader) = node.reader.take() {
                reader.join().expect("no panic in the reader");
            }
            let status = node.process.wait().expect("a child");
            if !status.success() {
                let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
                history.errors.push(format!("a node ended with {status}"));
            }
        }
        std::mem::take(&mut *self.look())
    }

    /// The history so far.
    pub fn look(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            // After a failed test, do not wait for them to finish.
            let _ = node.process.kill();
            let _ = node.process.wait();
        }
    }
}

impl Node {
    fn start(
        program: &str,
        number: u32,
        url: &str,
        deadline: Duration,
        history: &Arc<Mutex<History>>,
    ) -> Node {
        let mut process = Command::new(Path::new(program))
            .args([url, &number.to_string(), &deadline.as_millis().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("cargo builds the node for this test");
        let stdin = process.stdin.take();
        let stdout = BufReader::new(process.stdout.take().expect("piped"));
        let history = Arc::clone(history);
        let reader = std::thread::spawn(move || {
            for line in stdout.lines() {
                let line = line.expect("text");
                history.lock().unwrap_or_else(PoisonError::into_inner).enter(number, &line);
            }
        });
        Node { process, stdin, reader: Some(reader) }
    }
}

impl History {
    fn enter(&mut self, node: u32, line: &str) {
        let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
        let number = |word: Option<&str>| word.and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
        match kind {
            "row" => match Row::read(line) {
                Some(row) => self.rows.push(row),
                None => self.errors.push(format!("node {node} wrote `{line}`")),
            },
            "log" => self.logs.push(format!("node {node}: {rest}")),
            "stalled" => self.stalled = self.stalled.max(number(Some(rest))),
            "memory" => {
                let mut words = rest.split(' ');
                self.memory.push((number(words.next()), number(words.next())));
            }
            "end" => self.ended += 1,
            _ => self.errors.push(format!("node {node}: {line}")),
        }
    }

    /// The figures of a history with a fault at this time.
    pub fn figures(&self, fault: Range<u64>) -> Figures {
        let mut figures = Figures::default();
        let (mut asked, mut unasked) = (Vec::new(), Vec::new());
        for row in &self.rows {
            figures.checks += 1;
            figures.admitted += u64::from(row.allowed);
            figures.degraded += u64::from(row.degraded.is_some());
            if fault.contains(&row.at) {
                figures.in_fault += 1;
                figures.degraded_in_fault += u64::from(row.degraded.is_some());
            }
            if row.asked {
                asked.push(row.took)
            } else {
                unasked.push(row.took)
            }
            for done in row.refunds.iter().flatten() {
                figures.refunds[CORRECTIONS.iter().position(|(kind, _)| kind == done).expect("named")] += 1;
            }
        }
        let (first, last) = (self.rows.iter().map(|row| row.at), self.rows.iter().map(|row| row.at));
        let lasted = last.max().unwrap_or(0) - first.min().unwrap_or(0);
        figures.per_second = figures.checks * SECOND / lasted.max(1);
        (figures.asked, figures.unasked) = (Latencies::of(asked), Latencies::of(unasked));
        figures.stalled = self.stalled;
        figures.logs = self.logs.len();
        figures.memory = self.memory.iter().map(|(_, after)| *after).max().unwrap_or(0);
        figures.grown =
            self.memory.iter().map(|(before, after)| after.saturating_sub(*before)).max().unwrap_or(0);
        figures
    }

    /// The admissions of a route: by the store, and by its fallback.
    pub fn admitted(&self, route: &str) -> (Vec<Admission>, Vec<Admission>) {
        let rows = self.rows.iter().filter(|row| ROUTES[row.route] == route && row.allowed);
        let (store, other): (Vec<&Row>, Vec<&Row>) = rows.partition(|row| row.degraded.is_none());
        let admissions = |rows: Vec<&Row>| rows.into_iter().map(Row::admission).collect();
        (admissions(store), admissions(other))
    }

    /// The keys of [`ONCE`] with a wrong final count: each must be charged once, and a refund sent twice must apply once.
    /// `held` has the counts by user; `lost` says whether the store's state was lost.
    pub fn wrong_final_counts(&self, held: &HashMap<String, u64>, lost: bool) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut rows = HashMap::new();
        for row in self.rows.iter().filter(|row| ROUTES[row.route] == ONCE) {
            let user = format!("{}-{}", row.node, row.user);
            let holds = held.get(&user).copied();
            let lawful: &[Option<u64>] = match (row.degraded, row.refunds) {
                // The script may have run or not, and without a receipt there was no refund.
                (Some(_), _) => &[None, Some(COST)],
                (None, None) => &[Some(COST)],
                (None, Some([Correction::Failed, Correction::Failed])) => &[Some(COST), Some(COST - BACK)],
                (None, Some(_)) => &[Some(COST - BACK)],
            };
            // A loss between the two refunds removes the first one's marker as well: nothing is left to refund.
            let gone = lost && holds.is_none();
            let twice = row.refunds == Some([Correction::Done, Correction::Done]) && !gone;
            let refused = row.degraded.is_none() && !row.allowed;
            // The loss may have removed the charge or its refund.
            let lost = lost && holds.is_none_or(|held| held == COST);
            if !(lawful.contains(&holds) || lost) || twice || refused {
                wrong.push(format!("holds {holds:?}: {row}"));
            }
            rows.insert(user, ());
        }
        wrong.extend(
            held.keys().filter(|user| !rows.contains_key(*user)).map(|user| format!("{user}: unknown user")),
        );
        wrong
    }

    /// The limit that each contract needed for this history, and the limit that is granted after this number of state
    /// losses.
    pub fn contracts(&self, losses: u64) -> Vec<Needed> {
        let mut needed = Vec::new();
        let mut demand = |route: &'static str, who: &'static str, needs: u128, granted: u64| {
            needed.push(Needed { route, who, needs, granted });
        };
        let (count, burst) = BUCKET;
        // Each loss also starts a new tick.
        let rate = |times: u64| Rate { count: times * count, period: SECOND, tick: 2 * (1 + losses) };
        let windows = Windows { period: SECOND, offset: 0 };
        let times = 1 + losses;
        // A node reads the clock before it updates the count. A thread that stalls in between (say, across the end of
        // a window) is counted later than the recorded time.
        let threads = u64::from(NODES) * (THREADS as u64 - 1);

        for route in ["deny-bucket", "local-bucket", "allow-bucket"] {
            let (store, other) = self.admitted(route);
            demand(route, "store", contract::bucket(&store, rate(1)), times * burst);
            match route {
                "deny-bucket" => demand(route, "nobody", other.len() as u128, 0),
                "local-bucket" => {
                    demand(route, "local", contract::bucket(&other, rate(1)), burst + threads);
                    let both = [store, other].concat();
                    demand(route, "both", contract::bucket(&both, rate(2)), (times + 1) * burst + threads);
                }
                _ => {}
            }
        }
        let (store, other) = self.admitted("deny-log");
        demand("deny-log", "store", contract::any_period(&store, SECOND), times * WINDOW);
        demand("deny-log", "nobody", other.len() as u128, 0);
        let (store, other) = self.admitted("local-window");
        demand("local-window", "store", contract::fixed_window(&store, windows), times * WINDOW);
        demand("local-window", "local", contract::fixed_window(&other, windows), WINDOW + threads);
        let both = [store, other].concat();
        let granted = (times + 1) * WINDOW + threads;
        demand("local-window", "both", contract::fixed_window(&both, windows), granted);
        needed
    }
}

/// The limit that a history needed, and the limit that is granted.
#[derive(Clone, Copy, Debug)]
pub struct Needed {
    /// Name of the limit.
    pub route: &'static str,
    /// Which side admitted: `store`, `local` or `both`.
    pub who: &'static str,
    /// The smallest burst or quota that allows the history.
    pub needs: u128,
    /// The burst or quota that is granted.
    pub granted: u64,
}

/// Summary of a history.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Number of checks, and checks per second.
    pub checks: u64,
    /// See `checks`.
    pub per_second: u64,
    /// Admitted checks.
    pub admitted: u64,
    /// Checks that the store did not decide.
    pub degraded: u64,
    /// Checks during the fault, and those of them that the store did not decide.
    pub in_fault: u64,
    /// See `in_fault`.
    pub degraded_in_fault: u64,
    /// Latencies of checks that called the store.
    pub asked: Latencies,
    /// Latencies of checks that did not.
    pub unasked: Latencies,
    /// The longest stall of a thread, in microseconds.
    pub stalled: u64,
    /// Refunds by result: done, repeated, unknown, failed.
    pub refunds: [u64; 4],
    /// Log lines.
    pub logs: usize,
    /// Peak memory of a process, and its growth during the load, in KiB.
    pub memory: u64,
    /// See `memory`.
    pub grown: u64,
}

/// Percentiles in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Latencies {
    /// 50th percentile.
    pub median: u64,
    /// 99th percentile.
    pub p99: u64,
    /// Maximum.
    pub max: u64,
}

impl Latencies {
    fn of(mut all: Vec<u64>) -> Latencies {
        all.sort_unstable();
        let at = |part: usize| all.get(all.len() * part / 100).or(all.last()).copied().unwrap_or(0);
        Latencies { median: at(50), p99: at(99), max: at(100) }
    }
}

impl fmt::Display for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |micros: u64| micros as f64 / 1_000.0;
        write!(f, "{:.2} / {:.2} / {:.2} ms", ms(self.median), ms(self.p99), ms(self.max))
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [done, repeated, unknown, failed] = self.refunds;
        writeln!(
            f,
            "  {} checks ({} per second), {} admitted, {} degraded; during the fault {} checks, {} degraded",
            self.checks, self.per_second, self.admitted, self.degraded, self.in_fault, self.degraded_in_fault
        )?;
        writeln!(f, "  median / p99 / max: store called {}, not called {}", self.asked, self.unasked)?;
        write!(
            f,
            "  refunds: {done} done, {repeated} repeated, {unknown} unknown, {failed} failed; \
             {} lines logged; memory {} KiB (+{}); the machine stalled for up to {} ms",
            self.logs,
            self.memory,
            self.grown,
            self.stalled / 1_000
        )
    }
}

/// Now, in microseconds, on the clock that all processes of a machine share.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    u64::try_from(since.as_micros()).expect("before the year 500,000")
}

/// Sleeps.
#[expect(clippy::disallowed_methods, reason = "real servers and processes use real time")]
pub fn wait(time: Duration) {
    std::thread::sleep(time);
}
