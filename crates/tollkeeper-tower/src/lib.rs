//! Tollkeeper in front of a handler: a layer for axum, hyper, tonic and whatever else is a tower service.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use axum::{Router, routing::get};
//! use tollkeeper::{Limit, Limiter, Quota};
//! use tollkeeper_tower::RateLimitLayer;
//!
//! let limiter = Limiter::builder()
//!     .limit(Limit::new("per-ip", Quota::per_minute(1000)).by("ip"))
//!     .limit(Limit::new("search", Quota::per_second(10)).by("ip").when("route", "/search"))
//!     .build()?;
//! let app: Router = Router::new()
//!     .route("/search", get(|| async { "found" }))
//!     .layer(RateLimitLayer::new(limiter));
//! // Serve it with `app.into_make_service_with_connect_info::<SocketAddr>()`: limits by address need one.
//! # drop(app);
//! # Ok(()) }
//! ```
//!
//! Of each request the facts are read that the limits in force name: `ip`, `method`, `host`, `path`, `route`,
//! `header.NAME`, `cookie.NAME`, `query.NAME`, `body.NAME`, those of
//! [`HttpSettings::facts`](tollkeeper::http::HttpSettings), and those that [`RateLimitLayer::fact`] adds. What
//! passes goes on with its body as it came, what does not is answered with 429 and a problem of RFC 9457, a call
//! by gRPC with RESOURCE_EXHAUSTED. Every answer has rate-limit headers.
//!
//! A limit with `deduct_when` or `refund_when` is charged before the request goes on, and given back when the
//! status of the answer says so: off the path of the answer, if the store is elsewhere. If no answer comes,
//! because the client leaves or the handler fails, the charge stays. Calls by gRPC are answered with HTTP's
//! status 200 whatever their own.
//!
//! A slot of a concurrency limit is held until the response has been streamed, its client has left, or the
//! handler has failed; for a WebSocket or another tunnel, until the handler drops its [`HeldSlot`]. What a leaky bucket delays is held, in order, for [`RateLimitLayer::longest_delay`] at
//! most.
//!
//! The parts are useful without the layer, too: [`address`] (whose request it is), [`path`], [`routes`],
//! [`facts`], [`headers`], [`problem`], [`grpc`].

pub mod address;
pub mod body;
pub mod body_fields;
pub mod cookie;
pub mod facts;
#[cfg(feature = "config")]
mod from_config;
pub mod grpc;
pub mod headers;
mod layer;
pub mod path;
mod peer;
pub mod problem;
pub mod random;
mod response;
pub mod routes;
mod service;
mod settings;
mod slot;

pub use body::RequestBody;
pub use layer::RateLimitLayer;
pub use peer::PeerAddress;
pub use response::ResponseBody;
pub use service::{RateLimit, ResponseFuture};
pub use settings::{InForce, Prepared, Settings};
pub use slot::HeldSlot;

/// Runs the example of the README as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
