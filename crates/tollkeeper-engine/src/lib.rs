//! The limiter for bindings of other languages: the JSON of the HTTP API and the steps of a middleware, in process.
//!
//! A binding opens an engine and gets its number. [`Engine::ask`] takes and returns the texts of the HTTP API, errors
//! included, so a client of the server and a user of the engine see the same. [`Engine::visit`] takes the head of a
//! request, as bytes, and returns one text that is cheap to split.
//!
//! ```
//! use tollkeeper_engine::{ApiCall, Format, Options, ConfigSource};
//!
//! let text = r#"{"limits":[{"name":"per-user","by":"user","rate":"1/min","burst":1}]}"#.to_owned();
//! let number = tollkeeper_engine::open(Options::new(ConfigSource::Text { format: Format::Json, text }))?;
//! let engine = tollkeeper_engine::get(number).expect("it is open");
//!
//! let body = r#"{"facts":{"user":"alice"}}"#;
//! assert_eq!(engine.ask(ApiCall::Check, body.into(), false).wait().status, 200);
//! assert_eq!(engine.ask(ApiCall::Check, body.into(), false).wait().status, 429);
//! assert!(tollkeeper_engine::close(number));
//! # Ok::<(), String>(())
//! ```
//!
//! The crate knows no language: no napi, no pyo3, and no macros of theirs. [`api`] and [`json`] are also the server's.

pub mod api;
mod calls;
mod engine;
mod engine_call;
mod event;
pub mod json;
mod options;
mod process;
mod registry;
mod request_head;
mod ticket;
mod visit;

pub use api::call::ApiCall;
pub use api::error::ApiError;
pub use calls::Calls;
pub use engine::{Engine, EngineAnswer};
pub use engine_call::{EngineCall, Pending};
pub use event::{EngineEvent, EventKind, Listener};
pub use options::{ConfigSource, Options};
pub use process::forked;
pub use registry::{CLOSED, close, get, open};
pub use tollkeeper::config::Format;
pub use tollkeeper_tower::body::MOST as MAX_BODY;
pub use visit::{VisitBody, VisitRequest};
