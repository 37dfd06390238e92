//! Tollkeeper in front of a handler.

pub mod address;
pub mod body;
#[cfg(feature = "config")]
mod configured;
pub mod facts;
pub mod field;
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
pub use settings::Settings;
