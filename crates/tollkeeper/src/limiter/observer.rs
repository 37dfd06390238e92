//! Whoever wants to count what was decided: the only place where metrics happen.

use std::fmt;

use tollkeeper_core::{Decision, Span};

/// Is told of every decision that [`Limiter::check`](crate::Limiter::check) and its siblings make, and of
/// every call to a store elsewhere.
///
/// It runs on the path of the answer: it should count and return. A [`Handle`](crate::Handle) tells
/// nobody; whoever takes one counts for itself.
pub trait Observer: fmt::Debug + Send + Sync {
    /// A request was decided. [`Decision::toll`] says what it wanted and which limits were skipped.
    fn record(&self, decision: &Decision);

    /// A store elsewhere was asked, and answered or failed to after so long.
    fn asked(&self, _what: Op, _took: Span) {}
}

/// What a store elsewhere can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// To decide.
    Decide,
    /// To refund or settle.
    Correct,
    /// To take a slot back.
    Release,
    /// To let a slot live on.
    Renew,
    /// To forget a key.
    Forget,
    /// For the secret that opens receipts.
    Open,
}

impl Op {
    /// All of them.
    pub const ALL: [Op; 6] = [Op::Decide, Op::Correct, Op::Release, Op::Renew, Op::Forget, Op::Open];

    /// The name in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Decide => "decide",
            Op::Correct => "correct",
            Op::Release => "release",
            Op::Renew => "renew",
            Op::Forget => "forget",
            Op::Open => "open",
        }
    }
}
