//! The parts of the command `tollkeeper`: what was typed, the service, and what it speaks.

pub mod args;
pub mod command;
pub mod connection;
pub mod connections;
pub mod http;
pub mod json;
pub mod logging;
pub mod metrics;
pub mod notify;
pub mod otlp;
pub mod reload;
pub mod serve;
pub mod service;
pub mod store;
pub mod trace;
