//! A chat over WebSockets: each address may have two open at a time.
//!
//! `cargo run -p tollkeeper-tower --features axum --example websocket`, then open `ws://localhost:3000/chat` with
//! any WebSocket client: the third one at the same time is answered with 429.

use std::net::SocketAddr;

use axum::extract::WebSocketUpgrade;
use axum::response::Response;
use axum::routing::any;
use axum::{Extension, Router};
use tokio::net::TcpListener;
use tollkeeper::{BuildError, Limit, Limiter, Quota, StoreChoice};
use tollkeeper_tower::{HeldSlot, RateLimitLayer};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let service = app("memory://").await?.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(TcpListener::bind("127.0.0.1:3000").await?, service).await?;
    Ok(())
}

pub(crate) async fn app(store: impl Into<StoreChoice>) -> Result<Router, BuildError> {
    let chats = Limit::new("chats", Quota::slots(2)).by("ip");
    let limiter = Limiter::builder().limit(chats).store(store).build()?;
    Ok(Router::new().route("/chat", any(chat)).layer(RateLimitLayer::new(limiter)))
}

async fn chat(upgrade: WebSocketUpgrade, slot: Option<Extension<HeldSlot>>) -> Response {
    upgrade.on_upgrade(async |mut socket| {
        while let Some(Ok(message)) = socket.recv().await {
            if socket.send(message).await.is_err() {
                break;
            }
        }
        // The tunnel has ended: release its slot.
        drop(slot);
    })
}
