//! Measures the time that a layer adds to a request: one service without a layer, behind ours and behind
//! `tower_governor`.
//!
//! There is no socket and no runtime, and the service responds immediately, so that only the layer is measured. Every
//! call builds a request with the address of its peer and clones the service, as axum does; this is part of the time
//! without a layer, too.

use std::convert::Infallible;
use std::net::SocketAddr;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use serde_json::{Map, Value, json};
use tollkeeper::Clock;
use tollkeeper::http::HeaderDialect;
use tollkeeper_bench::keys;
use tollkeeper_bench::middleware::{self, FixedStatus, answer, client};
use tollkeeper_bench::race::{Load, Side, Times, race_finely};
use tollkeeper_bench::report::{self, Want};
use tollkeeper_bench::sides::Bucket;
use tower::Service;

/// Number of client addresses.
const CLIENTS: usize = 10_000;
/// Goal: our layer with its default headers adds at most this many nanoseconds.
const MOST_ADDED: f64 = 1_000.0;

fn main() {
    let clients: Vec<SocketAddr> = keys::uniform(CLIENTS as u64).take(100_000).map(client).collect();
    let allowed = Load { requests: &clients, threads: 1, allowed: true };
    let mut results = Map::new();

    let bare = side("bare", FixedStatus(StatusCode::OK), &[]);
    let silent = [bare, ours(LASTING, Some(&[]), &[]), theirs(LASTING, &[])];
    add(&mut results, "layer-silent", race_finely(&allowed, &silent));
    let [bare, _, _] = silent;
    let headers =
        [bare, ours(LASTING, Some(&[HeaderDialect::XRateLimit]), &[]), theirs_with_headers(LASTING, &[])];
    add(&mut results, "layer-headers", race_finely(&allowed, &headers));
    let [bare, _, theirs] = headers;
    add(&mut results, "layer-default", race_finely(&allowed, &[bare, ours(LASTING, None, &[]), theirs]));

    let refused = Load { allowed: false, ..allowed };
    let bare = side("bare", FixedStatus(StatusCode::TOO_MANY_REQUESTS), &[]);
    let sides = [bare, ours(STRICT, None, &clients), theirs_with_headers(STRICT, &clients)];
    add(&mut results, "layer-refused", race_finely(&refused, &sides));
    report::save("layer", results.into());
}

/// Allows every request, and keeps the state of every client, as in production.
const LASTING: Bucket = Bucket::lasting(2 * CLIENTS);
/// Refuses everything after the first two requests of a client, for an hour.
const STRICT: Bucket = Bucket { count: 1, seconds: 3_600, burst: 2, keys: 2 * CLIENTS };

/// A service after enough requests of all `known` clients to exhaust a small limit.
fn side<S, R>(name: &'static str, service: S, known: &[SocketAddr]) -> Side<SocketAddr>
where
    S: Service<Request<Body>, Response = Response<R>, Error = Infallible> + Clone + Sync + 'static,
{
    let passes = move |client: &SocketAddr| answer(&mut service.clone(), *client).status() == StatusCode::OK;
    for client in known.iter().chain(known) {
        passes(client);
    }
    Side::new(name, passes)
}

/// Our layer, with these headers or its default ones.
fn ours(bucket: Bucket, headers: Option<&[HeaderDialect]>, known: &[SocketAddr]) -> Side<SocketAddr> {
    side("tollkeeper", middleware::ours(bucket, headers, Clock::system()), known)
}

fn theirs(bucket: Bucket, known: &[SocketAddr]) -> Side<SocketAddr> {
    side("tower_governor", middleware::theirs(bucket), known)
}

fn theirs_with_headers(bucket: Bucket, known: &[SocketAddr]) -> Side<SocketAddr> {
    side("tower_governor", middleware::theirs_with_headers(bucket), known)
}

/// Prints one scenario with its goals, and records it.
fn add(results: &mut Map<String, Value>, scenario: &str, times: Vec<Times>) {
    let raw = times.iter().map(|times| (times.side.to_owned(), json!(times.nanos)));
    results.insert(scenario.to_owned(), Value::Object(raw.collect()));
    let [bare, ours, theirs] = &times[..] else { unreachable!("three sides") };
    let added = |side: &Times| side.median() - bare.median();
    report::figure(&format!("{scenario}/bare-ns"), bare.median());
    for side in [ours, theirs] {
        report::figure(&format!("{scenario}/{}-adds-ns", side.side), added(side));
    }
    let ratio = added(theirs) / added(ours);
    report::ratio(&format!("{scenario}/tower_governor"), ratio);
    match scenario {
        // Ours writes five headers here, theirs two.
        "layer-default" => {
            report::goal(&format!("{scenario}-adds-ns"), Want::AtMost(MOST_ADDED), added(ours))
        }
        _ => report::goal(&format!("{scenario}/tower_governor"), Want::AtLeast(1.0), ratio),
    }
}
