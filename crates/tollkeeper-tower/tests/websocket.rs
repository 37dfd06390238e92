//! WebSockets and other tunnels hold their slot until the tunnel ends.

mod support;

use std::convert::Infallible;
use std::time::Duration;

use axum::extract::WebSocketUpgrade;
use axum::response::Response;
use axum::routing::any;
use axum::{Extension, Router};
use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::{Empty, Full};
use support::{Server, WebSocket, limiter, until};
use tollkeeper::{Limit, Limiter, Quota, Span, facts};
use tollkeeper_tower::{HeldSlot, RateLimitLayer};
use tower::{ServiceBuilder, ServiceExt, service_fn};

/// The number of free slots.
fn free(limiter: &Limiter) -> u64 {
    let usage = limiter.usage(&facts! {}).wait().expect("valid facts");
    usage.limit("tunnels").expect("it applies").outcome().remaining
}

async fn keeps_slot(upgrade: WebSocketUpgrade, slot: Option<Extension<HeldSlot>>) -> Response {
    assert!(slot.is_some(), "a request that asks for an upgrade carries its slot");
    upgrade.on_upgrade(async |mut socket| {
        while let Some(Ok(message)) = socket.recv().await {
            let _ = socket.send(message).await;
        }
        drop(slot);
    })
}

async fn drops_slot(upgrade: WebSocketUpgrade) -> Response {
    upgrade.on_upgrade(async |mut socket| while let Some(Ok(_)) = socket.recv().await {})
}

async fn server(limiter: &Limiter) -> Server {
    let app = Router::new().route("/", any(keeps_slot)).route("/forgets", any(drops_slot));
    Server::axum(app.layer(RateLimitLayer::new(limiter.clone()))).await
}

#[tokio::test]
async fn slot_is_held_until_the_websocket_closes() {
    let (limiter, _) = limiter(vec![Limit::new("tunnels", Quota::slots(1))]);
    let server = server(&limiter).await;
    let mut socket = WebSocket::open(&server, "/").await;
    for text in ["one", "two"] {
        socket.echo(text).await;
        assert_eq!(free(&limiter), 0);
        assert_eq!(WebSocket::try_open(&server, "/").await.err(), Some(429));
    }
    socket.close().await;
    until(async || free(&limiter) == 1).await;
    WebSocket::open(&server, "/").await.echo("next").await;
}

#[tokio::test]
async fn slot_is_freed_when_the_client_disappears() {
    let (limiter, _) = limiter(vec![Limit::new("tunnels", Quota::slots(1))]);
    let server = server(&limiter).await;
    for _ in 0..3 {
        let mut socket = WebSocket::open(&server, "/").await;
        socket.echo("hello").await;
        assert_eq!(free(&limiter), 0);
        drop(socket);
        until(async || free(&limiter) == 1).await;
    }
}

#[tokio::test]
async fn slot_of_an_open_tunnel_is_renewed() {
    let (limiter, clock) = limiter(vec![Limit::new("tunnels", Quota::slots(1)).ttl(Duration::from_secs(60))]);
    let server = server(&limiter).await;
    let mut socket = WebSocket::open(&server, "/").await;
    socket.echo("hello").await;
    // Five times its time to live, in steps of half of it, each of which renews the slot.
    for _ in 0..10 {
        let half = clock.now() + Span::from_secs(30);
        until(async || clock.next_wake() == Some(half)).await;
        clock.set(half);
        assert_eq!(free(&limiter), 0);
    }
    socket.echo("still here").await;
    drop(socket);
    until(async || free(&limiter) == 1).await;
}

/// The layer alone cannot hold the slot: it sees only the head of the response, not the tunnel.
#[tokio::test]
async fn unclaimed_slot_is_released_after_the_response_head() {
    let (limiter, _) = limiter(vec![Limit::new("tunnels", Quota::slots(1))]);
    let server = server(&limiter).await;
    let _socket = WebSocket::open(&server, "/forgets").await;
    until(async || free(&limiter) == 1).await;
}

/// An outer layer or proxy that forwards the tunnel takes the slot from the response.
#[tokio::test]
async fn response_that_opens_a_tunnel_carries_its_slot() {
    let (limiter, _) = limiter(vec![Limit::new("tunnels", Quota::slots(1))]);
    for (method, upgrade, status, opens) in [
        (Method::GET, true, StatusCode::SWITCHING_PROTOCOLS, true),
        (Method::GET, true, StatusCode::OK, false),
        (Method::GET, false, StatusCode::OK, false),
        (Method::CONNECT, false, StatusCode::OK, true),
        (Method::CONNECT, false, StatusCode::BAD_GATEWAY, false),
    ] {
        let handler = service_fn(move |request: Request<_>| async move {
            let carries = request.extensions().get::<HeldSlot>().is_some();
            assert_eq!(carries, upgrade || request.method() == Method::CONNECT);
            let mut response = http::Response::new(Full::new(Bytes::from_static(b"body")));
            *response.status_mut() = status;
            Ok::<_, Infallible>(response)
        });
        let service = ServiceBuilder::new().layer(RateLimitLayer::new(limiter.clone())).service(handler);
        let mut request = Request::new(Empty::<Bytes>::new());
        *request.method_mut() = method.clone();
        if upgrade {
            request.headers_mut().insert(header::UPGRADE, header::HeaderValue::from_static("websocket"));
        }
        let mut response = service.oneshot(request).await.expect("the server responds");
        let slot = response.extensions_mut().remove::<HeldSlot>();
        assert_eq!(slot.is_some(), opens, "{method} {status}");
        assert_eq!(free(&limiter), 0, "{method} {status}");
        drop(response);
        let copy = slot.clone();
        drop(slot);
        assert_eq!(free(&limiter), u64::from(!opens), "{method} {status}: the last clone holds it");
        drop(copy);
        assert_eq!(free(&limiter), 1, "{method} {status}");
    }
}
