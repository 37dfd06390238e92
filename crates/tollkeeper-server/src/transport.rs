//! Protocols: each reads requests off its wire, has them decided, and writes the answers.

pub mod connection_budget;
pub mod grpc;
pub mod http;
pub mod listener;
pub mod resp;
pub mod response_headers;
