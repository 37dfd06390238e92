//! A language model with a token budget: the maximum that a request asks for is charged before the model runs, and
//! unused tokens are refunded.
//!
//! `cargo run -p tollkeeper-tower --features axum --example llm`, then
//! `curl -i localhost:3000/complete -H 'x-api-key: k1' --json '{"prompt":"hello","max_tokens":2000}'`

use std::net::SocketAddr;

use axum::extract::State;
use axum::routing::post;
use axum::{Extension, Json, Router};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tollkeeper::http::{HttpFact, HttpSettings, Source};
use tollkeeper::{BuildError, Charge, Costs, Limit, Limiter, Quota, StatusSet, StoreChoice, facts};
use tollkeeper_tower::RateLimitLayer;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let service = app("memory://").await?.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(TcpListener::bind("127.0.0.1:3000").await?, service).await?;
    Ok(())
}

pub(crate) async fn app(store: impl Into<StoreChoice>) -> Result<Router, BuildError> {
    let limiter = Limiter::builder()
        .limit(Limit::new("requests", Quota::per_minute(60)).by("header.x-api-key"))
        // Without a burst this is a sliding window, which refunds unused tokens in full.
        .limit(
            Limit::new("tokens", Quota::per_minute(10_000))
                .by("header.x-api-key")
                .cost("tokens")
                .refund_when(StatusSet::default().class(5)),
        )
        .store(store)
        .build()?;

    // The estimate is the maximum that the request allows, and the model stops there.
    let tokens = HttpFact::new("tokens", Source::Body("max_tokens".to_owned()));
    let limits = RateLimitLayer::new(limiter.clone())
        .http(HttpSettings { facts: vec![tokens], ..HttpSettings::default() })
        .hand_over_charge();

    Ok(Router::new().route("/complete", post(complete)).layer(limits).with_state(limiter))
}

#[derive(Deserialize)]
struct Question {
    prompt: String,
    max_tokens: usize,
}

#[derive(Serialize)]
struct Completion {
    text: String,
    tokens: usize,
}

async fn complete(
    State(limiter): State<Limiter>,
    charge: Option<Extension<Charge>>,
    Json(question): Json<Question>,
) -> Json<Completion> {
    let completion = generate(&question);
    // There is no charge if the store did not answer and the limits' failure policy admitted the request.
    if let Some(Extension(charge)) = charge {
        let counted = facts! { "tokens" => completion.tokens.max(1) };
        if let Err(error) = limiter.settle(&charge, Costs::Facts(&counted)).await {
            eprintln!("the estimate stays charged: {error}");
        }
    }
    Json(completion)
}

/// A fake model that repeats its prompt; each word is a token.
fn generate(question: &Question) -> Completion {
    let words: Vec<&str> = question.prompt.split_whitespace().take(question.max_tokens).collect();
    Completion { text: words.join(" "), tokens: words.len() }
}
