//! Eight processes on one Redis: what leases and the denial bound save, and whether the limits hold.
//!
//! Started without arguments it measures everything; with names of parts (`hot`, `zipf`, `kills`, …) only those. It starts
//! itself as the nodes. Every node logs what it admits with the time on the clock of Redis, and the contract checker
//! judges the logs of all nodes together.

use std::collections::HashMap;
use std::env;

use serde_json::{Map, Value, json};
use tollkeeper_bench::fleet::{self, Plan, Run, needed, sleep_until};
use tollkeeper_bench::node::{self, Keys, Load, Side};
use tollkeeper_bench::report::{self, Want, median};
use tollkeeper_core::contract::{self, Admission};
use tollkeeper_tests::cluster::Cluster;
use tollkeeper_tests::redis::Server;

/// The hot key's limit and burst.
const LIMIT: u64 = 100_000;
const NODES: u64 = 8;
/// Ten times the limit, in all.
const OFFERED: u64 = 10 * LIMIT;
const SECOND: u64 = 1_000_000;

/// A bucket of 100,000/s that is leased. A decision may wait a second for Redis, so that a pause of a busy machine does
/// not cause decisions without Redis.
const HOT: &str = "\
redis: { nodes: 8, deadline: 1s }
limits:
  - { name: per-user, by: user, rate: 100000/s, burst: 100000, consistency: leased }
";

/// More than any load, leased or exact. A million keys keep a busy machine from answering for seconds.
const PLENTY_LEASED: &str = "\
redis: { deadline: 10s }
limits:
  - { name: per-user, by: user, rate: 100000000/s, burst: 100000000, consistency: leased }
";
const PLENTY_EXACT: &str = "\
redis: { deadline: 10s }
limits:
  - { name: per-user, by: user, rate: 100000000/s, burst: 100000000 }
";

/// The name of a part, and the function that runs it.
type Part = (&'static str, fn() -> Value);

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if let [fleet::NODE, assignment] = &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        return node::run(assignment);
    }
    let parts: [Part; 9] = [
        ("hot", hot),
        ("zipf", zipf),
        ("kills", kills),
        ("floods", floods),
        ("moving", moving),
        ("cpu", cpu),
        ("limitador", limitador),
        ("exact", exact),
        ("curve", curve),
    ];
    let mut measured = Map::new();
    for (name, part) in parts {
        if arguments.is_empty() || arguments.iter().any(|argument| argument == name) {
            measured.insert(name.to_owned(), part());
        }
    }
    if arguments.is_empty() {
        report::save("leases", measured.into());
    }
}

/// One hot key at ten times its limit.
fn hot() -> Value {
    let plan = Plan {
        nodes: NODES,
        load: Load::Paced(OFFERED / NODES),
        seconds: 13,
        timed: true,
        logged: true,
        ..Plan::new(HOT)
    };
    let run = plan.run(&Server::start());
    let value = costs("leases-hot", &run);
    let seconds = admitted("leases-hot", &run);
    report::goal("leases-hot-admitted-percent-lowest", Want::AtLeast(97.0), 100.0 * seconds.lowest);
    report::goal("leases-hot-admitted-percent-mean", Want::AtMost(100.0), 100.0 * seconds.mean);
    highest("leases-hot", &seconds, 1, 1);
    let needed = needed(&run.admissions(true), LIMIT, LIMIT, 1, 1);
    report::goal("leases-hot-contract-percent", Want::AtMost(100.0), 100.0 * needed);
    report::goal("leases-hot-script-calls-per-check", Want::AtMost(0.02), run.calls_per_check());
    report::goal("leases-hot-requests-per-check", Want::AtMost(0.02), run.requests_per_check());
    json!({ "costs": value, "admitted": [seconds.lowest, seconds.median, seconds.highest], "contract": needed })
}

/// Many keys, of which the frequent ones are above their limits. No short lease can help a key that is seldom used.
fn zipf() -> Value {
    const KEYS: u64 = 100_000;
    let config = "\
redis: { nodes: 8, deadline: 1s }
limits:
  - { name: per-user, by: user, rate: 1000/s, burst: 1000, consistency: leased }
";
    let plan = Plan {
        nodes: NODES,
        load: Load::Paced(40_000 / NODES),
        keys: Keys::Zipf(KEYS),
        seconds: 13,
        timed: true,
        logged: true,
        ..Plan::new(config)
    };
    let run = plan.run(&Server::start());
    let value = costs("leases-zipf", &run);
    let mut keys: HashMap<u32, Vec<Admission>> = HashMap::new();
    for logged in &run.log {
        keys.entry(logged.key).or_default().push(Admission { at: logged.at, cost: 1 });
    }
    let needed = keys.values().map(|history| needed(history, 1_000, 1_000, 1, 1)).fold(0.0, f64::max);
    report::goal("leases-zipf-contract-percent", Want::AtMost(100.0), 100.0 * needed);
    // The most frequent key is asked for more often than its limit allows.
    let busiest = keys.into_values().max_by_key(Vec::len).expect("admissions");
    let busiest = run.clone().with(&busiest).seconds_of(1_000);
    report::figure("leases-zipf-busiest-key-admitted-percent-lowest", 100.0 * busiest.lowest);
    report::figure("leases-zipf-busiest-key-admitted-percent-median", 100.0 * busiest.median);
    json!({ "costs": value, "contract": needed, "busiest": [busiest.lowest, busiest.median, busiest.highest] })
}

/// Processes that end in the middle of a run, at the load of [`hot`].
fn kills() -> Value {
    let plan = |config: &str, seconds| Plan {
        nodes: NODES,
        load: Load::Paced(OFFERED / NODES),
        seconds,
        logged: true,
        ..Plan::new(config)
    };
    let mut measured = Map::new();

    // What the node held in permits is lost, and nothing else.
    let server = Server::start();
    let run = Plan { victim: Some(3), ..plan(HOT, 12) }.run_during(&server.url(), |fleet| {
        sleep_until(node::now() + 5 * SECOND);
        fleet.kill(3);
    });
    drop(server);
    let seconds = admitted("leases-kill-node", &run);
    highest("leases-kill-node", &seconds, 1, 1);
    let one = needed(&run.admissions(true), LIMIT, LIMIT, 1, 1);
    report::goal("leases-kill-node-contract-percent", Want::AtMost(100.0), 100.0 * one);
    measured.insert("node".to_owned(), json!({ "contract": one, "lowest": seconds.lowest }));

    // Redis loses its state once, and nodes decide by their shares meanwhile.
    let faulty = HOT.replace("deadline: 1s", "deadline: 100ms");
    let mut server = Server::start();
    let run = plan(&faulty, 14).run_during(&server.url(), |_| {
        sleep_until(node::now() + 5 * SECOND);
        server.kill();
        sleep_until(node::now() + SECOND);
        server.restart();
    });
    drop(server);
    measured.insert("redis".to_owned(), after_loss("leases-kill-redis", &run));

    // A replica takes over, with a state that may be older.
    let mut cluster = Cluster::start();
    let run = plan(&faulty, 18).run_during(&cluster.url(), |_| {
        sleep_until(node::now() + 5 * SECOND);
        let hot = cluster.servers[..3].iter().position(|server| {
            server.connect().keys().iter().any(|(name, _)| String::from_utf8_lossy(name).contains("per-user"))
        });
        let hot = hot.expect("a primary has the key");
        cluster.servers[hot].kill();
    });
    drop(cluster);
    measured.insert("cluster-primary".to_owned(), after_loss("leases-kill-cluster-primary", &run));
    measured.into()
}

/// The state was lost once, so the store grants one more contract; the shares of the nodes together are another one.
fn after_loss(name: &str, run: &Run) -> Value {
    let seconds = admitted(name, run);
    let store = needed(&run.admissions(false), LIMIT, LIMIT, 1, 2);
    let both = needed(&run.admissions(true), LIMIT, LIMIT, 2, 3);
    highest(name, &seconds, 2, 3);
    report::figure(
        &format!("{name}-degraded-percent"),
        100.0 * run.sum(|done| done.degraded) / run.sum(|done| done.checks),
    );
    report::goal(&format!("{name}-contract-percent-of-two"), Want::AtMost(100.0), 100.0 * store);
    report::goal(&format!("{name}-with-local-contract-percent-of-three"), Want::AtMost(100.0), 100.0 * both);
    json!({ "store-of-two": store, "both-of-three": both, "lowest": seconds.lowest, "highest": seconds.highest })
}

/// One exhausted key that is asked for again and again.
fn floods() -> Value {
    let config = "\
redis: { nodes: 8, deadline: 1s }
limits:
  - { name: per-user, by: user, rate: 10/hour, burst: 10 }
";
    let mut measured = Map::new();
    for (nodes, most) in [(1, 11.0), (NODES, 90.0)] {
        let plan = Plan { nodes, load: Load::Paced(200_000 / nodes), seconds: 5, ..Plan::new(config) };
        let run = plan.run(&Server::start());
        report::figure(&format!("bound-flood-{nodes}-checks-per-second"), run.sum(|done| done.checks) / 5.0);
        report::goal(
            &format!("bound-flood-{nodes}-store-calls-per-second"),
            Want::AtMost(most),
            run.calls_per_second(),
        );
        measured.insert(nodes.to_string(), json!(run.calls_per_second()));
    }
    measured.into()
}

/// A load that moves to the next node every 100 ms.
fn moving() -> Value {
    let load = Load::Moving { per_second: 2 * LIMIT, nodes: NODES, turn: SECOND / 10 };
    let plan = Plan { nodes: NODES, load, seconds: 13, logged: true, ..Plan::new(HOT) };
    let run = plan.run(&Server::start());
    let seconds = admitted("leases-moving", &run);
    report::figure(
        "leases-moving-offered-percent",
        100.0 * run.sum(|done| done.checks) / (13 * LIMIT) as f64,
    );
    report::figure("leases-moving-script-calls-per-check", run.calls_per_check());
    report::goal("leases-moving-admitted-percent-mean", Want::AtLeast(95.0), 100.0 * seconds.mean);
    let needed = needed(&run.admissions(true), LIMIT, LIMIT, 1, 1);
    report::goal("leases-moving-contract-percent", Want::AtMost(100.0), 100.0 * needed);
    json!({ "admitted": [seconds.lowest, seconds.median, seconds.highest], "contract": needed })
}

/// Checks per second of processor time: leased against exact, refused with the bound against without. Exact checks that
/// are in flight together share a call of Redis, so they are measured alone and in company.
fn cpu() -> Value {
    const COMPANY: [(&str, u64); 2] = [("alone", 1), ("64-in-flight", 64)];
    let refused = |bound: bool| {
        format!(
            "redis: {{ deadline: 1s, denial_bound: {bound} }}\n\
             limits:\n  - {{ name: per-user, by: user, rate: 10/hour, burst: 10 }}\n"
        )
    };
    let server = Server::start();
    let mut rounds: HashMap<String, Vec<f64>> = HashMap::new();
    for _ in 0..3 {
        for (company, in_flight) in COMPANY {
            for (name, config) in [
                ("leased", PLENTY_LEASED.to_owned()),
                ("exact", PLENTY_EXACT.to_owned()),
                ("refused-bound", refused(true)),
                ("refused-exact", refused(false)),
            ] {
                let run = Plan { load: Load::Closed(in_flight), ..Plan::new(config) }.run(&server);
                assert!(run.sum(|done| done.degraded) < 1.0, "the store decides");
                let name = format!("{name}-{company}");
                rounds.entry(name).or_default().push(run.checks_per_cpu_second());
            }
        }
    }
    for (company, _) in COMPANY {
        for (fast, slow) in [("leased", "exact"), ("refused-bound", "refused-exact")] {
            let [fast_median, slow_median] =
                [fast, slow].map(|name| median(&rounds[&format!("{name}-{company}")]));
            report::figure(&format!("leases-checks-per-cpu-second-{fast}-{company}"), fast_median);
            report::figure(&format!("leases-checks-per-cpu-second-{slow}-{company}"), slow_median);
            let name = format!("leases-checks-per-cpu-second-{company}-{fast}/{slow}");
            report::goal(&name, Want::AtLeast(20.0), fast_median / slow_median);
        }
    }
    json!(rounds)
}

/// Limitador's cached Redis storage, with its defaults, at ten times the limit. The limit is smaller, because Limitador
/// cannot keep up with the load of `hot` on two cores.
fn limitador() -> Value {
    const LIMIT: u64 = node::LIMITADOR_LIMIT;
    let config = HOT.replace("100000", &LIMIT.to_string());
    let plan = |side| Plan {
        nodes: NODES,
        side,
        load: Load::Paced(10 * LIMIT / NODES),
        seconds: 11,
        timed: true,
        logged: true,
        ..Plan::new(config.as_str())
    };
    let server = Server::start();
    let mut measured = Map::new();
    for (name, side) in [("tollkeeper", Side::Tollkeeper), ("limitador", Side::Limitador)] {
        let run = plan(side).run(&server);
        let seconds = run.seconds_of(LIMIT);
        // Limitador has fixed windows that begin with the first request: any second has at most two of them.
        let any_second = contract::any_period(&run.admissions(true), SECOND) as f64 / (2 * LIMIT) as f64;
        let part = |name: &str| format!("leases-peer-{name}");
        report::figure(&part(&format!("admitted-percent-{name}")), 100.0 * seconds.mean);
        report::figure(&part(&format!("admitted-percent-highest-{name}")), 100.0 * seconds.highest);
        report::figure(&part(&format!("any-second-percent-of-two-limits-{name}")), 100.0 * any_second);
        report::figure(&part(&format!("p99-us-{name}")), run.p99_micros());
        report::figure(&part(&format!("checks-{name}")), run.sum(|done| done.checks));
        measured.insert(
            name.to_owned(),
            json!({ "mean": seconds.mean, "highest": seconds.highest, "any-second-of-two": any_second }),
        );
    }
    // As fast as possible, on one core.
    let mut speeds: HashMap<&str, Vec<f64>> = HashMap::new();
    for _ in 0..3 {
        for (name, side) in [("tollkeeper", Side::Tollkeeper), ("limitador", Side::Limitador)] {
            let plan = Plan { side, load: Load::Closed(64), ..Plan::new(config.as_str()) };
            speeds.entry(name).or_default().push(plan.run(&server).checks_per_cpu_second());
        }
    }
    let [ours, theirs] = ["tollkeeper", "limitador"].map(|name| median(&speeds[name]));
    report::figure("leases-peer-checks-per-cpu-second-tollkeeper", ours);
    report::figure("leases-peer-checks-per-cpu-second-limitador", theirs);
    report::goal("leases-peer-checks-per-cpu-second/limitador", Want::AtLeast(1.0), ours / theirs);
    measured.insert("speeds".to_owned(), json!(speeds));
    measured.into()
}

/// What the wrapper adds to checks that the store decides anyway, and how much it remembers.
fn exact() -> Value {
    const CHECKS: u64 = 200_000;
    const FLOOD: u64 = 1_000_000;
    let server = Server::start();
    let mut rounds: HashMap<String, Vec<f64>> = HashMap::new();
    let sides = [("wrapped", Side::Tollkeeper), ("unwrapped", Side::WithoutWrapper)];
    let cost = |side, checks: u64, keys| {
        let plan =
            Plan { side, load: Load::Count(checks, 64), keys: Keys::Each(keys), ..Plan::new(PLENTY_EXACT) };
        let run = plan.run(&server);
        let done = run.done[0].clone();
        assert_eq!((done.degraded, done.admitted), (0, done.checks), "the store decides and admits");
        (run.cpu_seconds() / run.sum(|done| done.checks) * 1e6, done)
    };
    for _ in 0..5 {
        for (name, side) in sides {
            rounds.entry(format!("known-{name}")).or_default().push(cost(side, CHECKS, 10_000).0);
        }
    }
    let mut memory = HashMap::new();
    for (name, side) in sides {
        // Twice the table's keys, so that both generations are full.
        let grown = |checks| {
            let (micros, done) = cost(side, checks, checks);
            (micros, done.memory_after.saturating_sub(done.memory_before) as f64 / 1e6)
        };
        let (_, full) = grown(2 * 65_536);
        let (micros, flooded) = grown(FLOOD);
        rounds.entry(format!("flood-{name}")).or_default().push(micros);
        memory.insert(name, [full, flooded]);
    }
    for (name, side) in sides {
        rounds.entry(format!("flood-{name}")).or_default().push(cost(side, FLOOD, FLOOD).0);
    }
    // Noise only adds.
    let best = |name: &str| rounds[name].iter().copied().fold(f64::MAX, f64::min);
    for name in ["known-wrapped", "known-unwrapped", "flood-wrapped", "flood-unwrapped"] {
        report::figure(&format!("leases-exact-cpu-us-per-check-{name}"), best(name));
    }
    let more =
        |name: &str| 100.0 * (best(&format!("{name}-wrapped")) / best(&format!("{name}-unwrapped")) - 1.0);
    report::goal("leases-exact-slower-percent", Want::AtMost(3.0), more("known"));
    report::goal("leases-flood-slower-percent", Want::AtMost(5.0), more("flood"));
    let [full, flooded] = [0, 1].map(|at| memory["wrapped"][at] - memory["unwrapped"][at]);
    report::figure("leases-table-megabytes-65536-keys", full);
    report::figure("leases-table-megabytes-after-1M-keys", flooded);
    json!({ "rounds": rounds, "megabytes": memory })
}

/// A model, not a measurement: what nodes admit that count on their own and exchange their counts every so often, as
/// other limiters do. Next to it is what was published about them.
fn curve() -> Value {
    let mut measured = Map::new();
    for (times, offered) in [("2x", 2 * LIMIT), ("10x", OFFERED)] {
        for millis in [10, 50, 100] {
            let over = 100.0 * (synchronised(offered, millis * 1_000) - 1.0);
            report::figure(&format!("model-over-percent-sync-{millis}ms-load-{times}"), over);
            measured.insert(format!("{millis}ms-{times}"), json!(over));
        }
    }
    println!("published over-percent-sync-50ms-wso2 13.0");
    println!("published over-percent-sync-10ms-wso2 3.7");
    println!("published over-percent-databricks 5.0");
    println!("published admitted-percent-apisix 87.6");
    measured.into()
}

/// Admissions per window as a part of the limit: each node counts its own requests in a window of a second, and learns
/// the counts of the others every `interval` microseconds, at a time of its own.
fn synchronised(offered: u64, interval: u64) -> f64 {
    const WINDOWS: u64 = 5;
    let nodes = usize::try_from(NODES).expect("few");
    let between = SECOND * NODES / offered; // microseconds between two requests of a node
    let (mut shared, mut seen, mut own) = (0u64, vec![0; nodes], vec![0; nodes]);
    let mut admitted = 0u64;
    for time in 0..WINDOWS * SECOND {
        if time % SECOND == 0 {
            (shared, seen, own) = (0, vec![0; nodes], vec![0; nodes]);
        }
        for node in 0..nodes {
            let place = node as u64;
            // Nodes do not synchronise at the same time; a prime, so that windows differ.
            if (time + place * interval / NODES + time / SECOND * 7_919).is_multiple_of(interval) {
                shared += own[node];
                own[node] = 0;
                seen[node] = shared;
            }
            if (time + place * between / NODES).is_multiple_of(between) && seen[node] + own[node] < LIMIT {
                own[node] += 1;
                admitted += 1;
            }
        }
    }
    admitted as f64 / (WINDOWS * LIMIT) as f64
}

/// Prints what a run cost.
fn costs(name: &str, run: &Run) -> Value {
    let seconds = run.seconds as f64;
    let lost = run.sum(|done| done.expired) / run.sum(|done| done.granted).max(1.0);
    let figures = [
        ("offered-per-second", run.sum(|done| done.offered) / seconds),
        ("checks-per-second", run.sum(|done| done.checks) / seconds),
        ("admitted-per-second", run.sum(|done| done.admitted) / seconds),
        ("degraded", run.sum(|done| done.degraded)),
        ("permits-expired-percent", 100.0 * lost),
        ("script-calls-per-check", run.calls_per_check()),
        ("requests-per-check", run.requests_per_check()),
        ("p99-us", run.p99_micros()),
        ("median-us", run.done.iter().map(|done| done.median_ns).fold(0.0, f64::max) / 1e3),
        ("redis-cpu-seconds", run.redis_cpu_seconds),
        ("redis-cpu-us-per-check", run.redis_cpu_seconds * 1e6 / run.sum(|done| done.checks)),
        ("cpu-seconds", run.cpu_seconds()),
    ];
    for (figure, value) in figures {
        report::figure(&format!("{name}-{figure}"), value);
    }
    figures.iter().map(|(figure, value)| ((*figure).to_owned(), json!(value))).collect::<Map<_, _>>().into()
}

/// Prints how much of the limit was admitted in each second.
fn admitted(name: &str, run: &Run) -> fleet::Seconds {
    let seconds = run.seconds_of(LIMIT);
    for (which, part) in
        [("lowest", seconds.lowest), ("median", seconds.median), ("highest", seconds.highest)]
    {
        report::figure(&format!("{name}-admitted-percent-{which}"), 100.0 * part);
    }
    seconds
}

/// The most that a second may admit is what refills in it and the burst, both of which are the limit here, times these
/// numbers.
fn highest(name: &str, seconds: &fleet::Seconds, rates: u32, bursts: u32) {
    let part = seconds.highest / f64::from(rates + bursts);
    report::goal(&format!("{name}-highest-second-percent-of-contract"), Want::AtMost(100.0), 100.0 * part);
}
