//! States that live in Redis: their names, their bytes, and the scripts that decide on them.
//!
//! One call of a script decides many tolls, each on what the ones before it left, by the time of the
//! server. The scripts are the Lua twins of the algorithms and a driver; what people are told is not
//! computed there. The script answers with the states as it read them and with its verdicts, and the
//! same steps are made here again, in Rust, for the numbers. So a script stays short, and every batch
//! checks that both languages agree.

mod address;
mod batcher;
mod call_error;
mod cluster;
mod eviction;
#[cfg(feature = "config")]
mod from_config;
pub mod keys;
#[cfg(feature = "config")]
mod policy;
#[cfg(feature = "config")]
mod policy_sync;
mod reconnecting;
pub mod script;
mod sentinel;
mod session;
mod slot;
pub mod state;
mod store;
mod topology;
pub mod wire;

pub use crate::digest;
pub use address::RedisTls;
#[cfg(feature = "config")]
pub use from_config::UnreadableFile;
#[cfg(feature = "config")]
pub use policy::{NotSet, PolicyWatch, SharedLimits, SharedPolicy};
#[cfg(feature = "config")]
pub use policy_sync::{Followed, Following};
pub use store::{RedisOptions, RedisStore};
