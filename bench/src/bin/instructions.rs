//! The loop that `bench/instructions` runs under callgrind.
//!
//! `instructions PATH CHECKS` prepares a limiter and makes that many checks. The count of a run with many checks minus
//! the count of a run with none is the cost of the checks. Time is a manual clock that never advances, because valgrind
//! changes the cost of reading the system clock.

use std::convert::Infallible;
use std::env;
use std::hint::black_box;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use http::StatusCode;
use tollkeeper::http::HeaderDialect;
use tollkeeper::{Clock, Limiter, ManualClock, Time, facts};
use tollkeeper_bench::keys::{self, Request};
use tollkeeper_bench::middleware::{self, FixedStatus, answer, client};
use tollkeeper_bench::ours;
use tollkeeper_bench::sides::Bucket;
use tollkeeper_server::telemetry::metrics::Metrics;
use tower::Service;

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
        "layer-bare" => by_layer(FixedStatus(StatusCode::OK), checks),
        "layer-silent" => by_layer(middleware::ours(BUCKET, Some(&[]), clock()), checks),
        "layer-silent-tower_governor" => by_layer(middleware::theirs(BUCKET), checks),
        "layer-headers" => {
            by_layer(middleware::ours(BUCKET, Some(&[HeaderDialect::XRateLimit]), clock()), checks)
        }
        "layer-headers-tower_governor" => by_layer(middleware::theirs_with_headers(BUCKET), checks),
        "layer-default" => by_layer(middleware::ours(BUCKET, None, clock()), checks),
        _ => panic!("unknown path `{path}` (try `handle-hot`)"),
    }
}

const BUCKET: Bucket = Bucket::lasting(1_000_000);

/// A manual clock at a fixed time in 2025.
fn clock() -> Clock {
    Clock::manual(&ManualClock::new(Time::from_micros(1_760_000_000_000_000)))
}

fn limiter(facts: &[&str]) -> Limiter {
    ours::limiter(BUCKET, facts, clock())
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

/// Requests of 1,000 clients to a service, which is cloned for each of them, as axum does.
fn by_layer<S, R>(service: S, checks: usize)
where
    S: Service<http::Request<Body>, Response = http::Response<R>, Error = Infallible> + Clone,
{
    let clients: Vec<SocketAddr> = (0..1_000).map(client).collect();
    let check = |client: &SocketAddr| {
        let response = answer(&mut service.clone(), *black_box(client));
        assert_eq!(response.status(), StatusCode::OK);
    };
    clients.iter().for_each(check);
    clients.iter().cycle().take(checks).for_each(check);
}

fn requests() -> Vec<Request> {
    let request = |number| Request {
        user: keys::key("user", number),
        tenant: keys::key("tenant", number % 100),
        route: keys::key("route", number % 50),
    };
    (0..1_000).map(request).collect()
}
