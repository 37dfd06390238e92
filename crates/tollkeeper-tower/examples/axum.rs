//! An API with limits by address, by user and plan, and by route.
//!
//! `cargo run -p tollkeeper-tower --features axum --example axum`, then
//! `curl -i -H 'authorization: Bearer key-of-ann' localhost:3000/search/rust`

use std::net::SocketAddr;

use axum::Router;
use axum::extract::{Path, Request};
use axum::http::header::AUTHORIZATION;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::get;
use tokio::net::TcpListener;
use tollkeeper::http::{ClientAddress, HttpSettings};
use tollkeeper::{BuildError, Limit, Limiter, Quota, StoreChoice};
use tollkeeper_tower::RateLimitLayer;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let app = app("memory://").await?;
    // Provides the peer address. Without it, every request to which a limit by `ip` applies is answered with 500.
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(TcpListener::bind("127.0.0.1:3000").await?, service).await?;
    Ok(())
}

pub(crate) async fn app(store: impl Into<StoreChoice>) -> Result<Router, BuildError> {
    // A request is admitted if all limits that apply allow it, and a refused request charges none of them.
    let limiter = Limiter::builder()
        // Generous, since a whole office may share an address.
        .limit(Limit::new("per-ip", Quota::per_minute(600).burst(50)).by("ip"))
        // Does not apply to anonymous requests, which have no `user`.
        .limit(
            Limit::tiered("per-user", "plan")
                .by("user")
                .tier("free", Quota::per_minute(20))
                .tier("pro", Quota::per_minute(30))
                .default_tier("free"),
        )
        // Costs more than the rest, so it has a limit of its own: by the route, whatever the topic.
        .limit(Limit::new("search", Quota::per_minute(10)).by("ip").when("route", "/search/{topic}"))
        .store(store)
        .build()?;

    // Only a proxy on this machine is trusted to forward client addresses.
    let proxies = HttpSettings {
        trusted_proxies: vec!["127.0.0.0/8".parse().expect("a network")],
        client_address: ClientAddress::XForwardedFor,
        ..HttpSettings::default()
    };
    let limits = RateLimitLayer::new(limiter)
        .http(proxies)
        .fact("user", |request| Some(request.extensions.get::<Account>()?.user.to_owned()))
        .fact("plan", |request| Some(request.extensions.get::<Account>()?.plan.to_owned()));

    // The layer that is added last runs first: the user must be known before the request is counted.
    Ok(Router::new()
        .route("/", get(|| async { "hello" }))
        .route(
            "/search/{topic}",
            get(|Path(topic): Path<String>| async move { format!("all about {topic}") }),
        )
        .layer(limits)
        .layer(middleware::from_fn(authenticate)))
}

#[derive(Clone, Copy)]
struct Account {
    user: &'static str,
    plan: &'static str,
}

/// Inserts the account of a valid key into the extensions of the request. Key limits by a verified identity, never by
/// one that the client claims: otherwise a client could claim a new identity with every request.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let key = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let account = match key.and_then(|value| value.strip_prefix("Bearer ")) {
        Some("key-of-ann") => Some(Account { user: "ann", plan: "pro" }),
        Some("key-of-bob") => Some(Account { user: "bob", plan: "free" }),
        _ => None,
    };
    if let Some(account) = account {
        request.extensions_mut().insert(account);
    }
    next.run(request).await
}
