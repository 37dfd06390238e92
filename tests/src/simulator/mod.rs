//! A deterministic simulator: nodes, clients, a network and a store in one thread, on one virtual clock.
//!
//! A [`Scenario`] is plain data that follows from a seed: limits, nodes, requests and faults. A [`World`] plays it: one
//! event heap in microseconds, one manual clock for each node, a network that delays, loses, duplicates and reorders.
//! The nodes run the shipped types ([`Limiter`](tollkeeper::Limiter), [`Resilient`](tollkeeper::store::Resilient), the
//! algorithms); only the wire and the server behind it are simulated. The server keeps its state in the reference store
//! or, through the product's scripts, in a real Redis. A [`Checker`] judges every admission by the contract of its
//! algorithm. The simulator decides nothing itself.
//!
//! Nothing reads real time or draws a random number that the seed does not determine, so a failing seed fails again. A
//! failure is shrunk: [`smallest`] drops requests and faults while the scenario still fails, and prints the command that
//! replays the rest.

pub mod checker;
pub mod client;
pub mod executor;
pub mod heap;
pub mod history;
pub mod mutants;
pub mod network;
pub mod node;
pub mod scenario;
pub mod scripted;
pub mod server;
pub mod shrink;
pub mod tally;
pub mod world;

pub use checker::Checker;
pub use node::{Environment, Stack, exact, leased};
pub use scenario::{Profile, Scenario};
pub use shrink::{Kept, replay_command, smallest};
pub use tally::Tally;
pub use world::{Violation, World};
