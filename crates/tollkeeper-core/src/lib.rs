//! The core of Tollkeeper: limits, algorithms and decisions as pure functions on integers.
//!
//! Nothing here reads a clock, uses the network or draws a random number; there are no dependencies. A
//! [`Policy`] turns the [`Facts`] of a request into a [`Toll`]: every limit that applies, with its key and
//! cost. A store runs the [`algorithm`] of each limit of the toll against its state, and its reply becomes a
//! [`Decision`].
//!
//! Applications use the crate `tollkeeper`, which adds stores, clocks and the limiter.

#![forbid(unsafe_code)]

pub mod algorithm;
pub mod charge;
pub mod contract;
pub mod decimal;
pub mod decision;
pub mod digest;
pub mod facts;
pub mod fingerprint;
pub mod inline;
pub mod invalid_request;
pub mod key;
pub mod lease;
pub mod limit;
pub mod net;
pub mod pattern;
pub mod policy;
pub mod quota;
pub mod reason;
pub mod siphash;
pub mod status;
pub mod time;
pub mod toll;

pub use charge::{Change, Charge, Costs, KeyCorrection, Slot};
pub use decision::{
    Approximation, DecidedToll, Decision, LimitDecision, LimitReply, Outcome, Reply, Retry, Verdict,
};
pub use facts::{DeclaredFact, Facts, InvalidFact, Value};
pub use invalid_request::{CostProblem, InvalidRequest};
pub use key::Key;
pub use limit::{Consistency, CostMissing, Limit, Missing, Mode, OnStoreFailure};
pub use policy::{InvalidPolicy, Policy, Rule};
pub use quota::{Algorithm, Allowance, CheckedQuota, InvalidQuota, Quota};
pub use reason::Reason;
pub use siphash::Secret;
pub use status::StatusSet;
pub use time::{Span, Time};
pub use toll::{Due, MatchedLimits, Toll, Verb};

/// Runs the example of the README as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
