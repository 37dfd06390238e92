//! A tower layer that rate-limits HTTP and gRPC services: axum, hyper, tonic and every other tower service.
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
//! // Serve it with `app.into_make_service_with_connect_info::<SocketAddr>()`: limits by `ip` need the peer address.
//! # drop(app);
//! # Ok(()) }
//! ```
//!
//! The layer reads only the facts that the active limits name: `ip`, `method`, `host`, `path`, `route`,
//! `header.NAME`, `cookie.NAME`, `query.NAME`, `body.NAME`, those of
//! [`HttpSettings::facts`](tollkeeper::http::HttpSettings), and those that [`RateLimitLayer::fact`] adds. An
//! admitted request reaches the handler with its body unchanged. A refused request gets a 429 with an RFC 9457
//! problem body, a refused gRPC call gets RESOURCE_EXHAUSTED. Every response carries rate-limit headers.
//!
//! A limit with `deduct_when` or `refund_when` is charged before the handler runs and refunded if the response
//! status asks for it; with a remote store the refund runs in the background and does not delay the response.
//! If there is no response, because the client disconnects or the handler fails, the charge stays. gRPC calls
//! always have the HTTP status 200, whatever their gRPC status.
//!
//! A slot of a concurrency limit is held until the response has been streamed, the client has disconnected, or
//! the handler has failed; for a WebSocket or another tunnel, until the handler drops its [`HeldSlot`]. Requests
//! that a leaky bucket delays wait in FIFO order, for at most [`RateLimitLayer::longest_delay`].
//!
//! [`SingleFlightLayer`] is a second layer: of identical requests in flight, one reaches the handler, and the others get
//! its response.
//!
//! The parts can be used without the layer, too: [`address`] (the client's address), [`path`], [`routes`],
//! [`facts`], [`headers`], [`problem`], [`grpc`], and their order, [`visit`].

pub mod address;
pub mod body;
pub mod body_fields;
pub mod cookie;
pub mod facts;
#[cfg(feature = "config")]
mod from_config;
pub mod grpc;
pub mod header_values;
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
pub mod single_flight;
mod slot;
pub mod visit;

pub use body::RequestBody;
pub use layer::RateLimitLayer;
pub use peer::PeerAddress;
pub use response::ResponseBody;
pub use service::{RateLimit, ResponseFuture};
pub use settings::{ActiveSettings, Prepared, Settings};
pub use single_flight::{SingleFlightLayer, SingleFlightRule};
pub use slot::HeldSlot;

/// Runs the example of the README as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
