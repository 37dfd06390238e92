//! A gRPC service with limits by address and by method: here the health service, which has a unary call and a
//! streaming one.
//!
//! `cargo run -p tollkeeper-tower --features tonic --example tonic`. A refused call gets RESOURCE_EXHAUSTED with a
//! `google.rpc.RetryInfo`, which contains the delay before a retry.

use tokio::net::TcpListener;
use tollkeeper::{Limit, Limiter, Quota, StoreChoice};
use tollkeeper_tower::RateLimitLayer;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

type Outcome = Result<(), Box<dyn std::error::Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Outcome {
    serve("memory://", TcpListener::bind("127.0.0.1:50051").await?).await
}

pub(crate) async fn serve(store: impl Into<StoreChoice>, listener: TcpListener) -> Outcome {
    let limiter = Limiter::builder()
        .limit(Limit::new("per-ip", Quota::per_minute(60).burst(10)).by("ip"))
        // The path of a gRPC request is its method, and its metadata are headers.
        .limit(Limit::new("per-key", Quota::per_minute(5)).by("header.x-api-key").when("path", "*/Check"))
        // A stream holds its slot until it ends or the client disconnects.
        .limit(Limit::new("streams", Quota::slots(2)).by("ip").when("path", "*/Watch"))
        .store(store)
        .build()?;
    let (_, health) = tonic_health::server::health_reporter();
    Server::builder()
        .layer(RateLimitLayer::new(limiter))
        .add_service(health)
        .serve_with_incoming(TcpIncoming::from(listener))
        .await?;
    Ok(())
}
