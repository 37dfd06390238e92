//! temp
#![allow(dead_code)]
mod address;
mod fate;
mod link;
pub use address::RedisTls;
