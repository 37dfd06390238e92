//! Every example does what it says, over sockets and on a clock that the test turns.

mod support;

use std::collections::BTreeSet;
use std::time::Duration;

use support::{Server, TextResponse, WebSocket, until};
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
#[path = "../examples/tonic.rs"]
#[expect(dead_code, reason = "its `main`")]
mod tonic_example;
#[path = "../examples/websocket.rs"]
#[expect(dead_code, reason = "its `main`")]
mod websocket_example;

/// A store whose clock stands, an hour before midnight UTC, until it is turned.
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
    // By the route: whoever asks, about whatever.
    assert_eq!(server.admitted(6, "/search/rust", &[ann]).await, 6);
    assert_eq!(server.admitted(6, "/search/lua", &[bob]).await, 4);
    // By the user, at the rate of the plan. What `search` refused was charged to nobody.
    assert_eq!(server.admitted(40, "/", &[ann]).await, 30 - 6);
    assert_eq!(server.admitted(10, "/", &[bob]).await, 10);
    // By the address: 44 of 50 have passed; strangers have no other limit.
    assert_eq!(server.admitted(10, "/", &[]).await, 6);
    let refused = server.get("/", &[("authorization", "Bearer key-of-nobody")]).await;
    assert_eq!(refused.status, 429);
    assert!(refused.body.contains(r#""violated-policies":["per-ip"]"#), "{}", refused.body);
    let elsewhere = ("x-forwarded-for", "198.51.100.7, 192.0.2.9");
    assert_eq!(server.admitted(51, "/", &[elsewhere]).await, 50, "another address behind the same proxy");
    // The bucket of the address gets ten a second.
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
    let question = |key: &str| {
        let mut request = tonic::Request::new(HealthCheckRequest { service: String::new() });
        request.metadata_mut().insert("x-api-key", key.parse().unwrap());
        request
    };
    for _ in 0..5 {
        client.check(question("k1")).await.expect("five a minute for each key");
    }
    let status = client.check(question("k1")).await.expect_err("a sixth");
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().starts_with("`per-key` allows 5 per minute"), "{status:?}");
    client.check(question("k2")).await.expect("another key");

    let (first, _second) = (client.watch(question("k1")).await, client.watch(question("k1")).await);
    let status = client.watch(question("k1")).await.expect_err("a third stream");
    assert!(status.message().starts_with("`streams` "), "{status:?}");
    // Its client leaves, and the server notices.
    drop(first.expect("two streams at once"));
    let mut third = client.watch(question("k1")).await;
    for _ in 0..2_000 {
        if third.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        // The bucket of the address is filled again, so that only the slot can be missing.
        clock.advance(Span::from_secs(1));
        third = client.watch(question("k1")).await;
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
        assert_eq!(login("ann@example.com", right).await.status, 204, "who knows it is not counted");
    }
    for email in
        ["ann@example.com", "Ann@Example.com", " ann@example.com", "ANN@EXAMPLE.COM ", "ann@example.com"]
    {
        assert_eq!(login(email, "guess").await.status, 401);
    }
    let refused = login("ann@example.com", right).await;
    assert_eq!((refused.status, refused.header("ratelimit")), (429, None), "the sixth is not even tried");
    let wait: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((900..=930).contains(&wait), "{wait}");
    // From one address, over many mailboxes: 95 more in an hour.
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
    let complete = async |key: &str, prompt: &str, most: u64| {
        let body = serde_json::json!({ "prompt": prompt, "max_tokens": most }).to_string();
        post(&server, "/complete", &[("x-api-key", key)], &body).await
    };
    // Each may use up to 9,000 of 10,000 and uses three, so they all fit, until 1,000 tokens are used.
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
    assert_eq!(complete("k2", &long, 10_000).await.status, 200, "another key has a budget of its own");
    // Who does not say how many is asked to.
    let unsaid = post(&server, "/complete", &[("x-api-key", "k1")], r#"{"prompt":"hello"}"#).await;
    assert_eq!(unsaid.status, 400, "{}", unsaid.body);
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
    assert_eq!(names.len(), 6, "{names:?}");
}
