//! The JSON contract of the HTTP API: what each call reads and answers. The server sends these texts, and bindings of
//! other languages get them in process.

pub mod active_limits;
pub mod call;
pub mod decision_json;
pub mod error;
pub mod operator_facts;
pub mod redact;
pub mod request;
