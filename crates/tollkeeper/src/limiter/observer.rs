//! The hook that records metrics, top keys and logs: it is called once for every decision.

use std::fmt;

use tollkeeper_core::{DecidedToll, Span};

/// Records every decision of a [`Limiter`](crate::Limiter), from every entry point, and every call to a
/// remote store.
///
/// It runs on the critical path of the response, so it should count and return. It must not decide with the same limiter.
pub trait Observer: fmt::Debug + Send + Sync {
    /// A request was decided. [`DecidedToll::toll`] has the verb, and the limits that were skipped.
    fn record(&self, decided: &DecidedToll);

    /// A remote store was called, and answered or failed after this time.
    fn asked(&self, _what: Op, _took: Span) {}

    /// A store granted units of a limit to this node in advance, or they expired before they were used. Units that
    /// were spent are recorded with the decision that spent them.
    fn permits(&self, _limit: &str, _state: Permits, _units: u64) {}
}

/// What became of units that a store granted in advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permits {
    /// They were granted.
    Granted,
    /// They were spent by admitted requests.
    Spent,
    /// They expired unused.
    Expired,
}

impl Permits {
    /// All of them.
    pub const ALL: [Permits; 3] = [Permits::Granted, Permits::Spent, Permits::Expired];

    /// The name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Permits::Granted => "granted",
            Permits::Spent => "spent",
            Permits::Expired => "expired",
        }
    }
}

/// The calls of a remote store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Op {
    /// Decide a toll.
    Decide,
    /// Refund or settle a charge.
    Correct,
    /// Release a slot.
    Release,
    /// Renew a slot.
    Renew,
    /// Forget a key.
    Forget,
    /// Read the secret that authenticates charges.
    Open,
    /// Grant units in advance.
    Lease,
}

impl Op {
    /// All of them.
    pub const ALL: [Op; 7] =
        [Op::Decide, Op::Correct, Op::Release, Op::Renew, Op::Forget, Op::Open, Op::Lease];

    /// The name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Decide => "decide",
            Op::Correct => "correct",
            Op::Release => "release",
            Op::Renew => "renew",
            Op::Forget => "forget",
            Op::Open => "open",
            Op::Lease => "lease",
        }
    }
}
