//! A report that many clients ask for at the same time is computed once for all of them.
//!
//! `cargo run -p tollkeeper-tower --features axum --example single_flight`, then
//! `for i in $(seq 10); do curl -s localhost:3000/reports/today & done; wait`

use std::future::Future;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::Path;
use axum::routing::get;
use tokio::net::TcpListener;
use tollkeeper::{Limit, Limiter, Quota, StoreChoice};
use tollkeeper_tower::{RateLimitLayer, SingleFlightLayer, SingleFlightRule};

static COMPUTED: AtomicU64 = AtomicU64::new(0);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (app, _) = app("memory://", |day| async move {
        let number = COMPUTED.fetch_add(1, Ordering::Relaxed) + 1;
        tokio::time::sleep(Duration::from_secs(2)).await;
        format!("report of {day}, computation {number}\n")
    })?;
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(TcpListener::bind("127.0.0.1:3000").await?, service).await?;
    Ok(())
}

pub(crate) fn app<F>(
    store: impl Into<StoreChoice>,
    compute: impl Fn(String) -> F + Clone + Send + Sync + 'static,
) -> Result<(Router, SingleFlightLayer), Box<dyn std::error::Error>>
where
    F: Future<Output = String> + Send + 'static,
{
    let per_ip = Limit::new("per-ip", Quota::per_minute(60)).by("ip");
    let limiter = Limiter::builder().limit(per_ip).store(store).build()?;
    let reports = SingleFlightRule::new().when("route", "/reports/{day}");
    let single_flight = SingleFlightLayer::new([reports])?;
    // Limits run first: a request that waits for the response of another one is charged like any other.
    let app = Router::new()
        .route("/reports/{day}", get(async move |Path(day): Path<String>| compute(day).await))
        .layer(single_flight.clone())
        .layer(RateLimitLayer::new(limiter));
    Ok((app, single_flight))
}
