//! Single flight: of identical requests in flight, one reaches the wrapped service, and the others get its response.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use axum::{Router, routing::get};
//! use tollkeeper_tower::{SingleFlightLayer, SingleFlightRule};
//!
//! let single_flight = SingleFlightLayer::new([SingleFlightRule::new().when("path", "/report*")])?;
//! let app: Router = Router::new()
//!     .route("/report", get(|| async { "expensive" }))
//!     .layer(single_flight); // a rate limit is added after it, so that it runs first
//! # drop(app);
//! # Ok(()) }
//! ```
//!
//! The first request is the *leader* of a flight; identical requests that arrive before its response is complete are its
//! *followers*. Single flight is not a cache: the response is kept until the followers have it, and a request that
//! arrives later starts a flight of its own. A follower can get a response whose computation began before the follower
//! arrived, so do not share routes whose clients must read their own writes.
//!
//! Only GET and HEAD requests are shared, never those with a body, `Range`, `If-…`, `Upgrade`, `Cache-Control: no-cache`
//! or `no-store`. A request that identifies its caller, by `Authorization`, `Cookie`, a header that a fact of
//! [`HttpSettings`](tollkeeper::http::HttpSettings) is read from, or one that a limit reads
//! ([`SingleFlightLayer::with_limiter`]), is shared only if the rule is keyed by it, and then the key contains the whole
//! header.
//!
//! A response is shared only if its status is 200, 203, 204, 301, 404 or 410, its body has at most 1 MiB and no trailers,
//! it is no event stream, and has no `Set-Cookie`, no `Cache-Control: private` or `no-store`, and no `Vary` besides
//! headers in the key. If the leader fails, if its client disconnects, or if its response is not shared, each follower
//! makes its own call; none of them becomes a leader first, so they do not wait for one another.

mod flights;
mod future;
mod key;
mod layer;
mod rule;
mod service;
mod sharing;

pub use flights::FlightCounts;
pub use future::{FlightBody, SingleFlightFuture};
pub use key::InvalidRules;
pub use layer::SingleFlightLayer;
pub use rule::SingleFlightRule;
pub use service::SingleFlight;
pub use sharing::SharedResponse;
