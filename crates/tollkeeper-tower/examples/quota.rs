//! A daily quota by plan, from midnight to midnight UTC, and a page that shows the remaining quota.
//!
//! `cargo run -p tollkeeper-tower --features axum --example quota`, then
//! `curl -i -H 'x-account: acme' localhost:3000/reports` and `curl -H 'x-account: acme' localhost:3000/usage`

use std::net::SocketAddr;

use axum::extract::State;
use axum::http::header::LINK;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tollkeeper::{Algorithm, Allowance, BuildError, Limit, Limiter, Quota, StoreChoice, facts};
use tollkeeper_tower::RateLimitLayer;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let service = app("memory://").await?.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(TcpListener::bind("127.0.0.1:3000").await?, service).await?;
    Ok(())
}

pub(crate) async fn app(store: impl Into<StoreChoice>) -> Result<Router, BuildError> {
    let daily = Limit::tiered("daily", "plan")
        .by("account")
        .algorithm(Algorithm::FixedWindow)
        .tier("free", Quota::per_day(10))
        .tier("pro", Quota::per_day(1_000))
        .tier("enterprise", Allowance::Unlimited)
        .default_tier("free")
        // One customer has its own quota, whatever its plan.
        .override_for("acme", Quota::per_day(25));
    let limiter = Limiter::builder().limit(daily).store(store).build()?;

    let limits = RateLimitLayer::new(limiter.clone())
        .fact("account", |request| account(&request.headers))
        .fact("plan", |request| Some(plan_of(&account(&request.headers)?).to_owned()))
        .on_response(|decision, response| {
            if !decision.allowed() {
                response.headers.insert(LINK, HeaderValue::from_static("</plans>; rel=\"payment\""));
            }
        });

    // Reading the usage is not limited: this route is added after the layer.
    let reports = Router::new().route("/reports", get(|| async { "a report" })).layer(limits);
    Ok(reports.route("/usage", get(usage)).with_state(limiter))
}

async fn usage(State(limiter): State<Limiter>, headers: HeaderMap) -> Result<Json<Value>, StatusCode> {
    let account = account(&headers).ok_or(StatusCode::UNAUTHORIZED)?;
    let plan = plan_of(&account);
    let facts = facts! { "account" => account.as_str(), "plan" => plan };
    let usage = limiter.usage(&facts).await.map_err(|_| StatusCode::BAD_REQUEST)?;
    // An unlimited tier does not apply as a limit, so its usage is `None`.
    Ok(Json(match usage.limit("daily").map(|limit| limit.outcome()) {
        Some(daily) => json!({ "plan": plan, "limit": daily.limit, "remaining": daily.remaining }),
        None => json!({ "plan": plan, "limit": null }),
    }))
}

/// In a real application: the account of the session.
fn account(headers: &HeaderMap) -> Option<String> {
    Some(headers.get("x-account")?.to_str().ok()?.to_owned())
}

/// In a real application: the plan in the billing database.
fn plan_of(account: &str) -> &'static str {
    match account {
        "initech" => "enterprise",
        "globex" => "pro",
        _ => "free",
    }
}
