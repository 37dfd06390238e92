//! The parts of the command `tollkeeper`: what was typed, the service, and what it speaks.

pub mod args;
pub mod auth;
pub mod busiest;
pub mod command;
pub mod connection;
pub mod connections;
pub mod events;
pub mod files;
pub mod grpc;
pub mod http;
pub mod in_force;
pub mod json;
pub mod logging;
pub mod metrics;
pub mod notify;
pub mod otlp;
pub mod reload;
pub mod resp;
pub mod serve;
pub mod service;
pub mod store;
pub mod store_health;
pub mod tls;
pub mod told;
pub mod trace;
pub mod veil;
