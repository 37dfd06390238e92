//! Replays access logs against a policy, in the time of the log: what would these limits have done to that traffic?
//!
//! A line becomes a request head and goes through the reader of the middleware, so that it has the same facts. Lines
//! are put into the order of their arrival (`order`), and decided in *worlds* (`world`): a policy, a memory store and
//! a clock that is set to each arrival. Everything is bounded, whatever the log is.

pub mod batch;
pub mod delays;
pub mod distinct;
pub mod engine;
pub mod fail_if;
pub mod filter;
pub mod format;
pub mod lines;
pub mod logged;
pub mod order;
pub mod plan;
pub mod progress;
pub mod read;
pub mod report;
pub mod source;
pub mod suggest;
pub mod tally;
pub mod time;
pub mod timeline;
pub mod worker;
pub mod world;
