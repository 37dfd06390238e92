//! The layer with its counts in a real Redis.

mod support;

use axum::Router;
use axum::routing::any;
use http::StatusCode;
use support::{Server, TextResponse, everything, until};
use tollkeeper::{Limit, Limiter, OnStoreFailure, Quota, StatusSet, facts};
use tollkeeper_tests::redis;
use tollkeeper_tower::RateLimitLayer;

async fn used(limiter: &Limiter, limit: &str) -> u64 {
    let facts = facts! { "ip" => "127.0.0.1" };
    let usage = limiter.usage(&facts).await.expect("valid");
    let outcome = usage.limit(limit).expect("it applies").outcome();
    outcome.limit - outcome.remaining
}

/// Waits for a refund or a release, which runs in the background.
async fn until_used(limiter: &Limiter, limit: &str, expected: u64) {
    until(async || used(limiter, limit).await == expected).await;
}

/// A limit with `deduct_when` is refunded if the status does not match; other limits keep their charge.
#[tokio::test]
async fn response_status_decides_refunds_in_redis() {
    let store = redis::Server::start();
    let limits = vec![
        Limit::new("login", Quota::per_hour(3)).by("ip").deduct_when(StatusSet::of([401])),
        Limit::new("all", Quota::per_hour(100)).by("ip"),
    ];
    let limiter = redis::limiter(&store.url(), limits);
    let router = Router::new()
        .route("/wrong", any(|| async { StatusCode::UNAUTHORIZED }))
        .route("/right", any(|| async { "ok" }))
        .layer(RateLimitLayer::new(limiter.clone()));
    let server = Server::axum(router).await;
    for _ in 0..5 {
        assert_eq!(server.get("/right", &[]).await.status, 200);
        until_used(&limiter, "login", 0).await;
    }
    assert_eq!(used(&limiter, "all").await, 5);
    let mut statuses = Vec::new();
    for _ in 0..5 {
        statuses.push(server.get("/wrong", &[]).await.status);
    }
    assert_eq!(statuses, [401, 401, 401, 429, 429]);
    assert_eq!((used(&limiter, "login").await, used(&limiter, "all").await), (3, 8));
}

#[tokio::test]
async fn slots_in_redis_are_released_after_the_response() {
    let store = redis::Server::start();
    let limiter = redis::limiter(&store.url(), vec![Limit::new("exports", Quota::slots(1)).by("ip")]);
    let (router, reached) = everything(RateLimitLayer::new(limiter.clone()));
    let server = Server::axum(router).await;
    for requests in 1..=5 {
        assert_eq!(server.get("/", &[]).await.status, 200);
        assert_eq!(reached.count(), requests);
        until_used(&limiter, "exports", 0).await;
    }
}

/// Each limit follows its own `on_store_failure`, and rate-limit headers describe only limits that were counted.
#[tokio::test]
async fn failure_policy_decides_while_the_store_is_down() {
    let mut store = redis::Server::start();
    let limits = vec![
        Limit::new("open", Quota::per_hour(1))
            .by("ip")
            .on_store_failure(OnStoreFailure::Allow)
            .when("path", "/open"),
        Limit::new("closed", Quota::per_hour(9))
            .by("ip")
            .on_store_failure(OnStoreFailure::Deny)
            .when("path", "/closed"),
        Limit::new("local", Quota::per_hour(4))
            .by("ip")
            .on_store_failure(OnStoreFailure::Local)
            .when("path", "/local"),
    ];
    let limiter = redis::limiter(&store.url(), limits);
    let (router, _) = everything(RateLimitLayer::new(limiter));
    let server = Server::axum(router).await;
    assert_eq!(server.get("/closed", &[]).await.status, 200);
    store.kill();
    let summary = |response: &TextResponse| {
        let has_headers = response.header("ratelimit").is_some();
        (response.status, response.header("retry-after").is_some(), has_headers)
    };
    for _ in 0..8 {
        assert_eq!(summary(&server.get("/open", &[]).await), (200, false, false));
        let closed = server.get("/closed", &[]).await;
        assert_eq!(summary(&closed), (429, true, false));
        assert!(closed.body.contains("`closed` refuses while the store does not answer"), "{closed:?}");
    }
    let mut local = Vec::new();
    for _ in 0..6 {
        local.push(summary(&server.get("/local", &[]).await));
    }
    assert_eq!(local, [[(200, false, true); 4].to_vec(), [(429, true, true); 2].to_vec()].concat());
}

/// A refusal that follows from the last state of the key makes no call to Redis, and looks like any other.
#[tokio::test]
async fn bounded_refusal_is_an_ordinary_429() {
    let store = redis::Server::start();
    let limiter = redis::leased_limiter(&store.url(), vec![Limit::new("few", Quota::per_day(1)).by("ip")]);
    let (router, reached) = everything(RateLimitLayer::new(limiter));
    let server = Server::axum(router).await;
    assert_eq!(server.get("/", &[]).await.status, 200);
    until(async || {
        let before = store.script_calls();
        let refused = server.get("/", &[]).await;
        let wait: u64 = refused.header("retry-after").expect("a refusal").parse().expect("seconds");
        assert_eq!((refused.status, wait > 3_600), (429, true), "{refused:?}");
        assert_eq!(refused.header("x-ratelimit-remaining"), Some("0"));
        assert!(refused.header("ratelimit").is_some_and(|state| state.starts_with("\"few\";r=0")));
        store.script_calls() == before
    })
    .await;
    assert_eq!(reached.count(), 1);
}
