//! States that live in Redis: their names, their bytes, and the scripts that decide on them.
//!
//! One call of a script decides many tolls, each on what the ones before it left, by the time of the
//! server. The scripts are the Lua twins of the algorithms and a driver; what people are told is not
//! computed there. The script answers with the states as it read them and with its verdicts, and the
//! same steps are made here again, in Rust, for the numbers. So a script stays short, and every batch
//! checks that both languages agree.

mod address;
mod cluster;
mod configured;
pub mod digest;
mod fate;
mod follow;
pub mod keys;
mod lane;
mod link;
mod policy;
pub mod script;
mod slot;
pub mod state;
mod store;
mod topology;
pub mod wire;

pub use address::RedisTls;
pub use configured::UnreadableFile;
pub use follow::{Followed, Following};
pub use policy::{NotSet, PolicyWatch, SharedLimits, SharedPolicy};
pub use store::{RedisOptions, RedisStore};
