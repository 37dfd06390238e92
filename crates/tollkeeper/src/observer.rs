//! Whoever wants to count what was decided: the only place where metrics happen.

use std::fmt;

use tollkeeper_core::Decision;

/// Is told of every decision that [`Limiter::check`](crate::Limiter::check) and its siblings make.
///
/// It runs on the path of the answer: it should count and return. A [`Handle`](crate::Handle) tells
/// nobody; whoever takes one counts for itself.
pub trait Observer: fmt::Debug + Send + Sync {
    /// A request was decided. [`Decision::toll`] says what it wanted and which limits were skipped.
    fn record(&self, decision: &Decision);
}
