//! Speed: nanoseconds per check of Tollkeeper and its peers, in alternating rounds under the same loads.

use serde_json::{Map, Value, json};
use tollkeeper_bench::keys::{self, Request};
use tollkeeper_bench::ours::{ByHandle, ByLayers, ByPolicy, ThreeLimits};
use tollkeeper_bench::peers::{Governor, Limitador, ThreeOf, Throttlecrab};
use tollkeeper_bench::race::{Load, Side, Times, race};
use tollkeeper_bench::report::{self, Want};
use tollkeeper_bench::sides::{Bucket, Keyed, Layered};

const USERS: usize = 1_000_000;
const TENANTS: u64 = 1_000;
const ROUTES: u64 = 50;
/// Requests generated for each scenario with many keys.
const DRAWN: usize = 2_000_000;

fn main() {
    let mut results = Results::default();

    let hot = vec![keys::key("user", 1); 256];
    let sides = keyed_sides(Bucket::UNLIMITED, &[]);
    for threads in [1, 2] {
        let load = Load { requests: &hot, threads, allowed: true };
        results.add(&format!("hot-{threads}t"), race(&load, &sides));
    }
    let load = Load { requests: &hot, threads: 1, allowed: false };
    results.add("refused-hot-1t", race(&load, &keyed_sides(Bucket::SMALL, &hot)));

    let users: Vec<String> = (0..USERS as u64).map(|user| keys::key("user", user)).collect();
    let sides = keyed_sides(Bucket::lasting(USERS), &users);
    let user = |number| keys::key("user", number);
    for (name, requests) in [
        ("uniform", keys::uniform(USERS as u64).take(DRAWN).map(user).collect::<Vec<_>>()),
        ("zipf", keys::zipf(USERS as u64).take(DRAWN).map(user).collect()),
    ] {
        for threads in [1, 2] {
            let load = Load { requests: &requests, threads, allowed: true };
            results.add(&format!("{name}-1M-str-{threads}t"), race(&load, &sides));
        }
    }
    drop(sides);

    let request = |number| Request {
        user: keys::key("user", number),
        tenant: keys::key("tenant", number % TENANTS),
        route: keys::key("route", number % ROUTES),
    };
    let known: Vec<Request> = (0..USERS as u64).map(request).collect();
    let sides = layered_sides(Bucket::lasting(USERS), &known);
    let requests: Vec<Request> = keys::uniform(USERS as u64).take(DRAWN).map(request).collect();
    let load = Load { requests: &requests, threads: 1, allowed: true };
    results.add("layered-3", race(&load, &sides));

    results.goals();
    report::save("scenarios", results.scenarios.into());
}

/// Our limiters and the peers, each after a check of every `known` key.
fn keyed_sides(bucket: Bucket, known: &[String]) -> Vec<Side<String>> {
    fn side<K: Keyed>(bucket: Bucket, known: &[String]) -> Side<String> {
        let limiter = K::new(bucket);
        for key in known {
            limiter.check(key);
        }
        Side::new(K::NAME, move |key| limiter.check(key))
    }
    vec![
        side::<ByHandle>(bucket, known),
        side::<ByPolicy>(bucket, known),
        side::<Governor>(bucket, known),
        side::<Throttlecrab>(bucket, known),
        side::<Limitador>(bucket, known),
    ]
}

/// The same with three limits per request.
fn layered_sides(bucket: Bucket, known: &[Request]) -> Vec<Side<Request>> {
    fn side<L: Layered>(bucket: Bucket, known: &[Request]) -> Side<Request> {
        let limiter = L::new(bucket);
        for request in known {
            limiter.check(request);
        }
        Side::new(L::NAME, move |request| limiter.check(request))
    }
    vec![
        side::<ByLayers>(bucket, known),
        side::<ThreeLimits>(bucket, known),
        side::<ThreeOf<Governor>>(bucket, known),
        side::<ThreeOf<Throttlecrab>>(bucket, known),
        side::<Limitador>(bucket, known),
    ]
}

/// All measurements.
#[derive(Default)]
struct Results {
    scenarios: Map<String, Value>,
    ratios: Vec<Ratio>,
}

struct Ratio {
    /// Starts with `policy-` for `Limiter::check`.
    scenario: String,
    peer: &'static str,
    value: f64,
}

impl Results {
    /// Prints and records one scenario.
    fn add(&mut self, scenario: &str, times: Vec<Times>) {
        let raw = times.iter().map(|times| (times.side.to_owned(), json!(times.nanos)));
        self.scenarios.insert(scenario.to_owned(), Value::Object(raw.collect()));

        let (ours, peers): (Vec<_>, Vec<_>) =
            times.iter().partition(|times| matches!(times.side, "handle" | "policy"));
        for times in &times {
            report::figure(&format!("{scenario}/{}-ns", times.side), times.median());
        }
        for ours in ours {
            let scenario =
                if ours.side == "policy" { format!("policy-{scenario}") } else { scenario.to_owned() };
            for peer in &peers {
                let value = peer.median() / ours.median();
                report::ratio(&format!("{scenario}/{}", peer.side), value);
                self.ratios.push(Ratio { scenario: scenario.clone(), peer: peer.side, value });
            }
        }
    }

    /// Prints which goals are met.
    fn goals(&self) {
        for Ratio { scenario, peer, value } in &self.ratios {
            let million = scenario.contains("-1M-");
            let by_policy = scenario.starts_with("policy-");
            let want = match *peer {
                "governor" if scenario == "layered-3" => 1.5,
                "governor" if by_policy && million => 1.0,
                "governor" if million => 2.0,
                "governor" if scenario.starts_with("hot-") => 1.0,
                "limitador" => 10.0,
                "throttlecrab" if !by_policy => 2.0,
                _ => continue,
            };
            report::goal(&format!("{scenario}/{peer}"), Want::AtLeast(want), *value);
        }
    }
}
