//! Protects a login from password guessing: 5 failures per 15 minutes and email, 100 per hour and address. Successful
//! logins are not counted.
//!
//! `cargo run -p tollkeeper-tower --features axum --example login`, then
//! `curl -i localhost:3000/login --json '{"email":"ann@example.com","password":"guess"}'`

use std::net::SocketAddr;
use std::time::Duration;

use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use serde::Deserialize;
use tokio::net::TcpListener;
use tollkeeper::http::{HttpFact, HttpSettings, Normalization, Source};
use tollkeeper::{Algorithm, BuildError, Limit, Limiter, Quota, StatusSet, StoreChoice};
use tollkeeper_tower::RateLimitLayer;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let service = app("memory://").await?.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(TcpListener::bind("127.0.0.1:3000").await?, service).await?;
    Ok(())
}

pub(crate) async fn app(store: impl Into<StoreChoice>) -> Result<Router, BuildError> {
    // Every attempt is charged before the password is checked, so that parallel attempts cannot exceed the limit; a
    // success is refunded. A sliding log admits exactly 5 in any 15 minutes, where a sliding window approximates.
    let failures = |name, quota| {
        Limit::new(name, quota).algorithm(Algorithm::SlidingLog).deduct_when(StatusSet::of([401]))
    };
    let limiter = Limiter::builder()
        .limit(failures("per-email", Quota::per(5, Duration::from_secs(15 * 60))).by("email"))
        .limit(failures("per-ip", Quota::per_hour(100)).by("ip"))
        .store(store)
        .build()?;

    // ` Ann@example.com` and `ann@example.com` are the same mailbox. The store keeps only a hash of it.
    let email = HttpFact {
        normalize: vec![Normalization::Trim, Normalization::Lowercase],
        hash: true,
        ..HttpFact::new("email", Source::Body("email".to_owned()))
    };
    let limits = RateLimitLayer::new(limiter)
        .http(HttpSettings { facts: vec![email], ..HttpSettings::default() })
        // No headers but `Retry-After`: an attacker must not learn how many attempts are left.
        .headers([]);

    Ok(Router::new().route("/login", post(login)).layer(limits))
}

#[derive(Deserialize)]
struct Credentials {
    email: String,
    password: String,
}

async fn login(Json(credentials): Json<Credentials>) -> StatusCode {
    let email = credentials.email.trim().to_lowercase();
    match (email.as_str(), credentials.password.as_str()) {
        ("ann@example.com", "correct horse battery staple") => StatusCode::NO_CONTENT,
        _ => StatusCode::UNAUTHORIZED,
    }
}
