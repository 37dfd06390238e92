//! Tollkeeper in front of a handler.

pub mod address;
pub mod path;
pub mod routes;
