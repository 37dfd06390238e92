//! Which peer address counts when a test calls the application without a server.

mod support;

use std::net::SocketAddr;

use axum::Router;
use axum::extract::connect_info::MockConnectInfo;
use axum::routing::get;
use http::Request;
use support::{Server, limiter};
use tollkeeper::{Limit, Quota};
use tollkeeper_tower::RateLimitLayer;
use tower::ServiceExt;

/// In axum, the layer that is added last is the outermost, so `MockConnectInfo` is added after the rate limit layer.
#[tokio::test]
async fn mock_connect_info_is_the_peer() {
    let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
    let app = || {
        let (limiter, _) = limiter(vec![Limit::new("per-ip", Quota::per_hour(1)).by("ip")]);
        Router::new().route("/", get(|| async { "hello" })).layer(RateLimitLayer::new(limiter))
    };
    let status = async |app: Router| {
        let request = Request::new(axum::body::Body::empty());
        app.oneshot(request).await.expect("the server responds").status().as_u16()
    };
    let mocked = app();
    let from = |text: &str| mocked.clone().layer(MockConnectInfo(address(text)));
    assert_eq!(status(from("192.0.2.1:1")).await, 200);
    assert_eq!(status(from("192.0.2.1:2")).await, 429, "the same client");
    assert_eq!(status(from("192.0.2.2:1")).await, 200, "another one");
    assert_eq!(status(app()).await, 500, "without it, the peer is unknown");

    // A real peer address takes precedence.
    let server = Server::axum(app().layer(MockConnectInfo(address("192.0.2.9:1")))).await;
    assert_eq!(server.admitted(2, "/", &[]).await, 1);
}
