//! The lazy operation that public methods return: awaited, or run with `wait` without an async runtime.

use std::fmt;
use std::future::{Future, IntoFuture};

use crate::limiter::blocking;

/// A call that is about to be made: `await` it, or [`wait`](Operation::wait) for it.
#[must_use = "nothing is done before it is awaited"]
pub struct Operation<F>(F);

impl<F: Future> Operation<F> {
    pub(crate) fn new(future: F) -> Operation<F> {
        Operation(future)
    }

    /// Runs the operation on this thread and blocks until it is done. It needs no async runtime. It also works inside
    /// of one, but blocks the runtime's thread meanwhile.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollkeeper::{Correction, Limit, Limiter, Quota, facts};
    ///
    /// let limit = Limit::new("per-user", Quota::per_minute(100)).by("user");
    /// let limiter = Limiter::builder().limit(limit).build()?;
    /// let alice = facts! { "user" => "alice" };
    /// let decision = limiter.check(&alice).wait()?;
    /// let charge = decision.charge().expect("it was admitted");
    /// assert_eq!(limiter.refund(&charge).wait(), Correction::Done);
    /// assert!(limiter.forget("per-user", &alice).wait()?);
    /// # Ok(()) }
    /// ```
    pub fn wait(self) -> F::Output {
        blocking::wait(self.0)
    }
}

impl<F: Future> IntoFuture for Operation<F> {
    type Output = F::Output;
    type IntoFuture = F;

    fn into_future(self) -> F {
        self.0
    }
}

impl<F> fmt::Debug for Operation<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Operation(…)")
    }
}
