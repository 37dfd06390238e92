//! Cost of recording: the same limiter without an observer, and with the server's metrics.

use std::sync::Arc;

use serde_json::{Map, Value, json};
use tollkeeper::{Clock, Limiter, facts};
use tollkeeper_bench::keys::{self, Request};
use tollkeeper_bench::ours::limiter;
use tollkeeper_bench::race::{Load, Side, race_finely};
use tollkeeper_bench::report::{self, Want};
use tollkeeper_bench::sides::Bucket;
use tollkeeper_server::telemetry::metrics::Metrics;

/// Number of different requests, repeated in a loop.
const REQUESTS: usize = 100_000;
/// Goal: recording adds at most this many nanoseconds to a check of one limit.
const MOST_ADDED: f64 = 100.0;

fn main() {
    let mut results = Map::new();
    for users in [1, 100, 10_000] {
        let requests: Vec<Request> = keys::uniform(users).take(REQUESTS).map(request).collect();
        add(&mut results, &format!("recording-{users}-keys"), &requests, &["user"]);
    }
    let requests: Vec<Request> = keys::zipf(100_000).take(REQUESTS).map(request).collect();
    add(&mut results, "recording-zipf-100k", &requests, &["user"]);
    add(&mut results, "recording-layered-3", &requests, &["user", "tenant", "route"]);
    report::save("recording", results.into());
}

fn request(number: u64) -> Request {
    Request {
        user: keys::key("user", number),
        tenant: keys::key("tenant", number % 1_000),
        route: keys::key("route", number % 50),
    }
}

/// Measures, prints and records one scenario with limits by these facts.
fn add(results: &mut Map<String, Value>, scenario: &str, requests: &[Request], by: &[&str]) {
    let load = Load { requests, threads: 1, allowed: true };
    let times = race_finely(&load, &[side("unobserved", by, false), side("observed", by, true)]);
    let raw = times.iter().map(|times| (times.side.to_owned(), json!(times.nanos)));
    results.insert(scenario.to_owned(), Value::Object(raw.collect()));
    let [unobserved, observed] = &times[..] else { unreachable!("two sides") };
    let added = observed.median() - unobserved.median();
    report::figure(&format!("{scenario}/unobserved-ns"), unobserved.median());
    report::figure(&format!("{scenario}/adds-ns"), added);
    if by.len() == 1 {
        report::goal(&format!("{scenario}/adds-ns"), Want::AtMost(MOST_ADDED), added);
    }
}

fn side(name: &'static str, by: &[&str], observed: bool) -> Side<Request> {
    let limiter = limiter(Bucket::lasting(2 * REQUESTS), by, Clock::system());
    if observed {
        assert!(
            limiter.observe(Arc::new(Metrics::new(&limiter.policy()))),
            "the limiter has no observer yet"
        );
    }
    match by {
        [_] => Side::new(name, move |request: &Request| check_by_user(&limiter, request)),
        _ => Side::new(name, move |request: &Request| check_by_all(&limiter, request)),
    }
}

fn check_by_user(limiter: &Limiter, Request { user, .. }: &Request) -> bool {
    limiter.check(&facts! { "user" => user.as_str() }).wait().expect("valid facts").allowed()
}

fn check_by_all(limiter: &Limiter, Request { user, tenant, route }: &Request) -> bool {
    let facts = facts! { "user" => user.as_str(), "tenant" => tenant.as_str(), "route" => route.as_str() };
    limiter.check(&facts).wait().expect("valid facts").allowed()
}
