//! The store on Redis or Valkey: key names, state encoding, the scripts that decide, and the connections.
//!
//! One script call decides many tolls in order, each on the state that the tolls before it left, by the server's
//! clock. A script consists of the Lua twins of the algorithms and a driver. It does not compute the numbers that
//! callers see, such as the remaining units: it returns the states as it read them and its verdicts, and Rust
//! repeats the same steps to compute the numbers. So scripts stay short, and every batch checks that both
//! languages agree.

mod address;
mod batcher;
mod call_error;
mod cluster;
mod eviction;
#[cfg(feature = "config")]
mod from_config;
pub mod keys;
mod overrides;
#[cfg(feature = "config")]
mod policy;
#[cfg(feature = "config")]
mod policy_sync;
mod reconnecting;
mod replay;
pub mod script;
mod sentinel;
mod session;
mod slot;
pub mod state;
mod store;
mod topology;
pub mod wire;

pub use address::RedisTls;
#[cfg(feature = "config")]
pub use from_config::UnreadableFile;
pub use overrides::{Changed, NotShared, OverrideWatch, SharedOverrides};
#[cfg(feature = "config")]
pub use policy::{NotSet, PolicyWatch, SharedLimits, SharedPolicy};
#[cfg(feature = "config")]
pub use policy_sync::{Followed, Following};
pub use replay::BatchReply;
pub use store::{RedisOptions, RedisStore};
pub use tollkeeper_core::digest;
