//! The library behind the `tollkeeper` binary: its subcommands, the service and the transports.

pub mod command;
pub mod control;
pub mod digest;
pub mod drawing;
pub mod history;
pub mod key_ref;
pub mod policy_test;
pub mod proxy;
pub mod server;
pub mod service;
pub mod simulate;
pub mod store;
pub mod telemetry;
pub mod transport;
