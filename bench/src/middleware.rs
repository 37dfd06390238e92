//! A service that responds immediately, behind our layer and behind `tower_governor`.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use axum::body::Body;
use axum::extract::ConnectInfo;
use governor::middleware::{NoOpMiddleware, StateInformationMiddleware};
use http::{Request, Response, StatusCode};
use tollkeeper::Clock;
use tollkeeper::http::HeaderDialect;
use tollkeeper_tower::{RateLimit, RateLimitLayer};
use tower::{Layer, Service};
use tower_governor::GovernorLayer;
use tower_governor::governor::{Governor, GovernorConfigBuilder};
use tower_governor::key_extractor::PeerIpKeyExtractor;

use crate::ours::limiter;
use crate::sides::Bucket;

/// Responds immediately with a status and an empty body.
#[derive(Clone, Debug)]
pub struct FixedStatus(pub StatusCode);

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

/// The service behind our layer, with these headers or its default ones, and one limit by address.
pub fn ours(bucket: Bucket, headers: Option<&[HeaderDialect]>, clock: Clock) -> RateLimit<FixedStatus> {
    let mut layer = RateLimitLayer::new(limiter(bucket, &["ip"], clock));
    if let Some(headers) = headers {
        layer = layer.headers(headers.iter().copied());
    }
    layer.layer(FixedStatus(StatusCode::OK))
}

/// The service behind `tower_governor`.
pub fn theirs(bucket: Bucket) -> Governor<PeerIpKeyExtractor, NoOpMiddleware, FixedStatus, Body> {
    let config = config(bucket).finish().expect("a period and a burst");
    GovernorLayer::new(config).layer(FixedStatus(StatusCode::OK))
}

/// The same with its headers.
pub fn theirs_with_headers(
    bucket: Bucket,
) -> Governor<PeerIpKeyExtractor, StateInformationMiddleware, FixedStatus, Body> {
    let config = config(bucket).use_headers().finish().expect("a period and a burst");
    GovernorLayer::new(config).layer(FixedStatus(StatusCode::OK))
}

fn config(bucket: Bucket) -> GovernorConfigBuilder<PeerIpKeyExtractor, NoOpMiddleware> {
    let mut config = GovernorConfigBuilder::default();
    let nanos = u64::from(bucket.seconds) * 1_000_000_000 / u64::from(bucket.count);
    config.per_nanosecond(nanos).burst_size(bucket.burst);
    config
}

/// The response to a new request from this client.
#[inline]
pub fn answer<S, R>(service: &mut S, client: SocketAddr) -> Response<R>
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
pub fn client(number: u64) -> SocketAddr {
    let number = u32::try_from(number).expect("a small number");
    SocketAddr::new(IpAddr::V4(Ipv4Addr::from_bits(0x0A00_0000 + number)), 40_000)
}
