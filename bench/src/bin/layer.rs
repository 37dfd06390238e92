//! Measures the time that a layer adds to a request: one service without a layer, behind ours and behind
//! `tower_governor`.
//!
//! There is no socket and no runtime, and the service responds immediately, so that only the layer is measured. Every
//! call builds a request with the address of its peer and clones the service, as axum does; this is part of the time
//! without a layer, too.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use axum::body::Body;
use axum::extract::ConnectInfo;
use http::{Request, Response, StatusCode};
use serde_json::{Map, Value, json};
use tollkeeper::Clock;
use tollkeeper::http::HeaderDialect;
use tollkeeper_bench::keys;
use tollkeeper_bench::ours::limiter;
use tollkeeper_bench::race::{Load, Side, Times, race_finely};
use tollkeeper_bench::report::{self, Want};
use tollkeeper_bench::sides::Bucket;
use tollkeeper_tower::RateLimitLayer;
use tower::{Layer, Service};
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;
use tower_governor::key_extractor::PeerIpKeyExtractor;

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

/// Responds immediately with a status and an empty body.
#[derive(Clone)]
struct FixedStatus(StatusCode);

impl<B> Service<Request<B>> for FixedStatus {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<B>) -> Self::Future {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = self.0;
        ready(Ok(response))
    }
}

/// Our layer, with these headers or its default ones.
fn ours(bucket: Bucket, headers: Option<&[HeaderDialect]>, known: &[SocketAddr]) -> Side<SocketAddr> {
    let mut layer = RateLimitLayer::new(limiter(bucket, &["ip"], Clock::system()));
    if let Some(headers) = headers {
        layer = layer.headers(headers.iter().copied());
    }
    side("tollkeeper", layer.layer(FixedStatus(StatusCode::OK)), known)
}

fn theirs(bucket: Bucket, known: &[SocketAddr]) -> Side<SocketAddr> {
    let config = config(bucket).finish().expect("a period and a burst");
    side("tower_governor", GovernorLayer::new(config).layer(FixedStatus(StatusCode::OK)), known)
}

fn theirs_with_headers(bucket: Bucket, known: &[SocketAddr]) -> Side<SocketAddr> {
    let config = config(bucket).use_headers().finish().expect("a period and a burst");
    side("tower_governor", GovernorLayer::new(config).layer(FixedStatus(StatusCode::OK)), known)
}

fn config(bucket: Bucket) -> GovernorConfigBuilder<PeerIpKeyExtractor, governor::middleware::NoOpMiddleware> {
    let mut config = GovernorConfigBuilder::default();
    let nanos = u64::from(bucket.seconds) * 1_000_000_000 / u64::from(bucket.count);
    config.per_nanosecond(nanos).burst_size(bucket.burst);
    config
}

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

fn answer<S, R>(service: &mut S, client: SocketAddr) -> Response<R>
where
    S: Service<Request<Body>, Response = Response<R>, Error = Infallible>,
{
    let mut request = Request::new(Body::empty());
    request.extensions_mut().insert(ConnectInfo(client));
    let mut context = Context::from_waker(Waker::noop());
    assert!(service.poll_ready(&mut context).is_ready(), "the service is always ready");
    match pin!(service.call(request)).poll(&mut context) {
        Poll::Ready(Ok(response)) => response,
        Poll::Ready(Err(never)) => match never {},
        Poll::Pending => unreachable!("the future completes at the first poll"),
    }
}

/// The client address with this number.
fn client(number: u64) -> SocketAddr {
    let number = u32::try_from(number).expect("below `CLIENTS`");
    SocketAddr::new(IpAddr::V4(Ipv4Addr::from_bits(0x0A00_0000 + number)), 40_000)
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
