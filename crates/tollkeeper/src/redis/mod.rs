//! States that live in Redis: their names, their bytes, and the scripts that decide on them.
//!
//! One call of a script decides many tolls, each on what the ones before it left, by the time of the
//! server. The scripts are the Lua twins of the algorithms and a driver; what people are told is not
//! computed there. The script answers with the states as it read them and with its verdicts, and the
//! same steps are made here again, in Rust, for the numbers. So a script stays short, and every batch
//! checks that both languages agree.

mod address;
mod cluster;
#[cfg(feature = "config")]
mod configured;
mod eviction;
mod fate;
#[cfg(feature = "config")]
mod follow;
pub mod keys;
mod lane;
mod link;
#[cfg(feature = "config")]
mod policy;
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
pub use configured::UnreadableFile;
#[cfg(feature = "config")]
pub use follow::{Followed, Following};
#[cfg(feature = "config")]
pub use policy::{NotSet, PolicyWatch, SharedLimits, SharedPolicy};
pub use store::{RedisOptions, RedisStore};
