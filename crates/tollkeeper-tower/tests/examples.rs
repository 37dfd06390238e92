//! Runs every example over sockets, on a manual clock, and checks its limits.

mod support;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use support::{Reached, Server, TextResponse, WebSocket, until};
use tokio::sync::Semaphore;
use tollkeeper::{Capacity, Clock, ManualClock, MemoryStore, Span, Time};
use tonic::Code;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

#[path = "../examples/axum.rs"]
#[expect(dead_code, reason = "its `main`")]
mod axum_example;
#[path = "../examples/llm.rs"]
#[expect(dead_code, reason = "its `main`")]
mod llm_example;
#[path = "../examples/login.rs"]
#[expect(dead_code, reason = "its `main`")]
mod login_example;
#[path = "../examples/quota.rs"]
#[expect(dead_code, reason = "its `main`")]
mod quota_example;
#[path = "../examples/single_flight.rs"]
#[expect(dead_code, reason = "its `main`")]
mod single_flight_example;
#[path = "../examples/tonic.rs"]
#[expect(dead_code, reason = "its `main`")]
mod tonic_example;
#[path = "../examples/websocket.rs"]
#[expect(dead_code, reason = "its `main`")]
mod websocket_example;

/// A store with a manual clock that starts an hour before midnight UTC.
fn store() -> (MemoryStore, ManualClock) {
    let clock = ManualClock::new(Time::from_micros((20_000 * 24 + 23) * 3_600 * 1_000_000));
    (MemoryStore::new(Capacity::default(), Clock::manual(&clock)), clock)
}

async fn post(server: &Server, path: &str, headers: &[(&str, &str)], body: &str) -> TextResponse {
    let headers = [&[("content-type", "application/json")], headers].concat();
    server.send(&format!("POST {path}"), &headers, body).await
}

#[tokio::test]
async fn axum_example_limits_by_user_address_and_route() {
    let (store, clock) = store();
    let server = Server::axum(axum_example::app(store).await.unwrap()).await;
    let (ann, bob) = (("authorization", "Bearer key-of-ann"), ("authorization", "Bearer key-of-bob"));
    // By route: all users and topics share the limit.
    assert_eq!(server.admitted(6, "/search/rust", &[ann]).await, 6);
    assert_eq!(server.admitted(6, "/search/lua", &[bob]).await, 4);
    // By user, at the rate of the plan. Requests that `search` refused were not charged.
    assert_eq!(server.admitted(40, "/", &[ann]).await, 30 - 6);
    assert_eq!(server.admitted(10, "/", &[bob]).await, 10);
    // By address: 44 of 50 have been admitted. Requests without a user have no other limit.
    assert_eq!(server.admitted(10, "/", &[]).await, 6);
    let refused = server.get("/", &[("authorization", "Bearer unknown-key")]).await;
    assert_eq!(refused.status, 429);
    assert!(refused.body.contains(r#""violated-policies":["per-ip"]"#), "{}", refused.body);
    let other_client = ("x-forwarded-for", "198.51.100.7, 192.0.2.9");
    assert_eq!(server.admitted(51, "/", &[other_client]).await, 50, "another address behind the same proxy");
    // The bucket of the address refills by ten a second.
    clock.advance(Span::from_secs(1));
    assert_eq!(server.admitted(15, "/", &[]).await, 10);
}

#[tokio::test]
async fn tonic_example_limits_methods_and_streams() {
    let (store, clock) = store();
    let serving =
        |listener| async move { tonic_example::serve(store, listener).await.expect("the server runs") };
    let server = Server::of(serving).await;
    let address = format!("http://{}", server.address);
    let channel = Channel::from_shared(address).unwrap().connect().await.unwrap();
    let mut client = HealthClient::new(channel);
    let request = |key: &str| {
        let mut request = tonic::Request::new(HealthCheckRequest { service: String::new() });
        request.metadata_mut().insert("x-api-key", key.parse().unwrap());
        request
    };
    for _ in 0..5 {
        client.check(request("k1")).await.expect("five a minute for each key");
    }
    let status = client.check(request("k1")).await.expect_err("a sixth");
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().starts_with("`per-key` allows 5 per minute"), "{status:?}");
    client.check(request("k2")).await.expect("another key");

    let (first, _second) = (client.watch(request("k1")).await, client.watch(request("k1")).await);
    let status = client.watch(request("k1")).await.expect_err("a third stream");
    assert!(status.message().starts_with("`streams` "), "{status:?}");
    // The client disconnects, and the server notices.
    drop(first.expect("two streams at once"));
    let mut third = client.watch(request("k1")).await;
    for _ in 0..2_000 {
        if third.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        // The bucket of the address refills, so that only the slot limit can refuse.
        clock.advance(Span::from_secs(1));
        third = client.watch(request("k1")).await;
    }
    third.expect("the slot is free again");
}

#[tokio::test]
async fn login_example_counts_only_failures() {
    let (store, clock) = store();
    let server = Server::axum(login_example::app(store).await.unwrap()).await;
    let login = async |email: &str, password: &str| {
        let body = serde_json::json!({ "email": email, "password": password }).to_string();
        post(&server, "/login", &[], &body).await
    };
    let right = "correct horse battery staple";
    for _ in 0..10 {
        assert_eq!(login("ann@example.com", right).await.status, 204, "a success is not counted");
    }
    for email in
        ["ann@example.com", "Ann@Example.com", " ann@example.com", "ANN@EXAMPLE.COM ", "ann@example.com"]
    {
        assert_eq!(login(email, "guess").await.status, 401);
    }
    let refused = login("ann@example.com", right).await;
    assert_eq!(
        (refused.status, refused.header("ratelimit")),
        (429, None),
        "the password is not even checked"
    );
    let wait: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((900..=930).contains(&wait), "{wait}");
    // From one address, for many emails: 95 more in an hour.
    let mut failed = 0;
    for guess in 0..120 {
        failed += usize::from(login(&format!("user{guess}@example.com"), "guess").await.status == 401);
    }
    assert_eq!(failed, 95);
    clock.advance(Span::from_secs(3_600));
    assert_eq!(login("ann@example.com", right).await.status, 204);
}

#[tokio::test]
async fn llm_example_charges_the_tokens_used() {
    let (store, _) = store();
    let server = Server::axum(llm_example::app(store).await.unwrap()).await;
    let complete = async |key: &str, prompt: &str, max_tokens: u64| {
        let body = serde_json::json!({ "prompt": prompt, "max_tokens": max_tokens }).to_string();
        post(&server, "/complete", &[("x-api-key", key)], &body).await
    };
    // Each reserves 9,000 of 10,000 tokens and uses three, so all are admitted until 1,000 tokens are used.
    for _ in 0..50 {
        let response = complete("k1", "three short words", 9_000).await;
        assert_eq!(
            (response.status, response.body.as_str()),
            (200, r#"{"text":"three short words","tokens":3}"#)
        );
    }
    let long = "word ".repeat(900);
    assert_eq!(complete("k1", &long, 9_000).await.status, 200);
    let refused = complete("k1", "three short words", 9_000).await;
    assert_eq!(refused.status, 429, "1,050 are used: 8,950 are left");
    assert!(refused.body.contains(r#""violated-policies":["tokens"]"#), "{}", refused.body);
    assert_eq!(complete("k1", "three short words", 8_950).await.status, 200);
    assert_eq!(complete("k2", &long, 10_000).await.status, 200, "another key has its own budget");
    // `max_tokens` is required.
    let without_max = post(&server, "/complete", &[("x-api-key", "k1")], r#"{"prompt":"hello"}"#).await;
    assert_eq!(without_max.status, 400, "{}", without_max.body);
}

#[tokio::test]
async fn quota_example_resets_each_plan_at_midnight() {
    let (store, clock) = store();
    let server = Server::axum(quota_example::app(store).await.unwrap()).await;
    for (account, reports) in [("hooli", 10), ("acme", 25), ("globex", 40), ("initech", 40)] {
        assert_eq!(server.admitted(40, "/reports", &[("x-account", account)]).await, reports, "{account}");
    }
    let usage = async |account: &str| server.get("/usage", &[("x-account", account)]).await.body;
    assert_eq!(usage("globex").await, r#"{"limit":1000,"plan":"pro","remaining":960}"#);
    assert_eq!(usage("initech").await, r#"{"limit":null,"plan":"enterprise"}"#);
    assert_eq!(usage("hooli").await, r#"{"limit":10,"plan":"free","remaining":0}"#);
    clock.advance(Span::from_micros(3_600 * 1_000_000 - 1));
    let refused = server.get("/reports", &[("x-account", "hooli")]).await;
    assert_eq!((refused.status, refused.header("link")), (429, Some(r#"</plans>; rel="payment""#)));
    clock.advance(Span::from_micros(1));
    assert_eq!(server.get("/reports", &[("x-account", "hooli")]).await.status, 200, "at midnight");
    assert_eq!(usage("hooli").await, r#"{"limit":10,"plan":"free","remaining":9}"#);
}

#[tokio::test]
async fn single_flight_example_computes_a_report_once() {
    let (store, _) = store();
    let (computed, done) = (Reached::default(), Arc::new(Semaphore::new(0)));
    let compute = {
        let (computed, done) = (computed.clone(), Arc::clone(&done));
        move |day| {
            let (number, done) = (computed.increment(), Arc::clone(&done));
            async move {
                let _ = done.acquire().await;
                format!("{day} {number}")
            }
        }
    };
    let (router, single_flight) = single_flight_example::app(store, compute).unwrap();
    let server = Arc::new(Server::axum(router).await);
    let get = |path: &'static str| {
        let server = Arc::clone(&server);
        tokio::spawn(async move { server.get(path, &[]).await })
    };
    let today: Vec<_> = (0..50).map(|_| get("/reports/today")).collect();
    until(async || single_flight.counts().waiting == 49).await;
    let other = get("/reports/yesterday");
    until(async || computed.count() == 2).await;
    done.close();
    for response in today {
        assert_eq!(response.await.unwrap().body, "today 1");
    }
    let other = other.await.unwrap();
    assert_eq!((other.body.as_str(), other.header("x-ratelimit-remaining")), ("yesterday 2", Some("9")));
}

#[tokio::test]
async fn websocket_example_bounds_open_tunnels() {
    let (store, _) = store();
    let server = Server::axum(websocket_example::app(store).await.unwrap()).await;
    let (mut first, _second) =
        (WebSocket::open(&server, "/chat").await, WebSocket::open(&server, "/chat").await);
    assert_eq!(WebSocket::try_open(&server, "/chat").await.err(), Some(429));
    first.echo("still here").await;
    drop(first);
    until(async || WebSocket::try_open(&server, "/chat").await.is_ok()).await;
}

#[test]
fn every_example_is_tested() {
    let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/examples")).unwrap();
    let names: BTreeSet<String> =
        folder.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    let tests = include_str!("examples.rs");
    for name in &names {
        assert!(tests.contains(&format!("#[path = \"../examples/{name}\"]")), "{name}");
    }
    assert_eq!(names.len(), 7, "{names:?}");
}
