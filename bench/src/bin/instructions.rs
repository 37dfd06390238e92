//! The loop that `bench/instructions` runs under callgrind.
//!
//! `instructions PATH CHECKS` prepares a limiter and makes that many checks. The count of a run with many checks minus
//! the count of a run with none is the cost of the checks. Time is a manual clock that never advances, because valgrind
//! changes the cost of reading the system clock.

use std::env;
use std::hint::black_box;
use std::sync::Arc;

use tollkeeper::{Clock, Limiter, ManualClock, Time, facts};
use tollkeeper_bench::keys::{self, Request};
use tollkeeper_bench::ours;
use tollkeeper_bench::sides::Bucket;
use tollkeeper_server::telemetry::metrics::Metrics;

const KEYS: u64 = 65_536;

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [path, checks] = &arguments[..] else { panic!("usage: instructions PATH CHECKS") };
    let checks: usize = checks.parse().expect("a number of checks");
    let user = |number| keys::key("user", number);
    match path.as_str() {
        "handle-hot" => by_handle(&[user(1)], checks),
        "handle-uniform-64k" => by_handle(&(0..KEYS).map(user).collect::<Vec<_>>(), checks),
        "policy-hot" => by_policy(&limiter(&["user"]), &user(1), checks),
        "policy-hot-observed" => by_policy(&observed(limiter(&["user"])), &user(1), checks),
        "handle-layered-3" => by_layers(checks),
        "policy-layered-3" => by_three_limits(checks),
        _ => panic!("unknown path `{path}` (try `handle-hot`)"),
    }
}

/// A limiter with a manual clock at a fixed time in 2025.
fn limiter(facts: &[&str]) -> Limiter {
    let clock = ManualClock::new(Time::from_micros(1_760_000_000_000_000));
    ours::limiter(Bucket::lasting(1_000_000), facts, Clock::manual(&clock))
}

fn by_handle(users: &[String], checks: usize) {
    let handle = ours::handle(&limiter(&["user"]));
    let check = |user: &String| assert!(handle.check(black_box(user)).expect("valid").allowed);
    users.iter().for_each(check);
    users.iter().cycle().take(checks).for_each(check);
}

/// The same limiter with the server's metrics as its observer.
fn observed(limiter: Limiter) -> Limiter {
    assert!(limiter.observe(Arc::new(Metrics::new(&limiter.policy()))), "the limiter has no observer yet");
    limiter
}

fn by_policy(limiter: &Limiter, user: &str, checks: usize) {
    let check = || {
        let facts = facts! { "user" => black_box(user) };
        assert!(limiter.check(&facts).wait().expect("valid").allowed());
    };
    check();
    (0..checks).for_each(|_| check());
}

fn by_layers(checks: usize) {
    let layers = ours::layers(&limiter(&["user", "tenant", "route"]));
    let check = |request: &Request| {
        let Request { user, tenant, route } = black_box(request);
        assert!(layers.check([user, tenant, route]).expect("valid").allowed);
    };
    let requests = requests();
    requests.iter().for_each(check);
    requests.iter().cycle().take(checks).for_each(check);
}

fn by_three_limits(checks: usize) {
    let limiter = limiter(&["user", "tenant", "route"]);
    let check = |request: &Request| {
        let Request { user, tenant, route } = black_box(request);
        let facts =
            facts! { "user" => user.as_str(), "tenant" => tenant.as_str(), "route" => route.as_str() };
        assert!(limiter.check(&facts).wait().expect("valid").allowed());
    };
    let requests = requests();
    requests.iter().for_each(check);
    requests.iter().cycle().take(checks).for_each(check);
}

fn requests() -> Vec<Request> {
    let request = |number| Request {
        user: keys::key("user", number),
        tenant: keys::key("tenant", number % 100),
        route: keys::key("route", number % 50),
    };
    (0..1_000).map(request).collect()
}
