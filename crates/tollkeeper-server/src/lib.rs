//! The parts of the command `tollkeeper`: what was typed, the service, and what it speaks.

pub mod command;
pub mod control;
pub mod json;
pub mod redact;
pub mod service;
pub mod store;
pub mod telemetry;
pub mod transport;
