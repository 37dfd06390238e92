//! Requests that are about to be decided: builders that are awaited, or waited for.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tollkeeper_core::toll::TollRequest;
use tollkeeper_core::{DecidedToll, Decision, Facts, InvalidRequest, Policy, Span};

use super::blocking;
use super::slot_guard::{SlotGuard, Taken};
use super::{Limiter, StoreFuture};

/// A request that is about to be decided: `await` it, or [`wait`](Request::wait) for it.
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is decided until it is awaited"]
pub struct Request<'a> {
    limiter: &'a Limiter,
    policy: Option<&'a Arc<Policy>>,
    toll: TollRequest<'a>,
}

impl<'a> Request<'a> {
    #[inline]
    pub(super) fn new(limiter: &'a Limiter, toll: TollRequest<'a>) -> Request<'a> {
        Request { limiter, policy: None, toll }
    }

    /// The cost: from 1 to 2^31, 1 by default.
    pub fn cost(mut self, cost: u64) -> Request<'a> {
        self.toll.cost = cost;
        self
    }

    /// The longest delay for which the caller can hold a request that a leaky bucket queues. A longer wait is a
    /// refusal.
    pub fn hold(mut self, longest: impl Into<Span>) -> Request<'a> {
        self.toll.hold = Some(longest.into());
        self
    }

    /// Adds other readings of the same request, for a caller that cannot know how its server reads it, such as
    /// a path that some servers decode and others do not. The request pays the limits of every reading, all or
    /// nothing; a key that several readings share is charged once.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tollkeeper::{Limit, Limiter, Quota, facts};
    /// # let limiter = Limiter::builder()
    /// #     .limit(Limit::new("login", Quota::per_minute(5)).when("route", "/login"))
    /// #     .limit(Limit::new("projects", Quota::per_minute(100)).when("route", "/projects/{id}"))
    /// #     .build()?;
    /// // `/projects/..%2Flogin`
    /// let (decoded, as_written) = (facts! { "route" => "/login" }, facts! { "route" => "/projects/{id}" });
    /// let decision = limiter.check(&decoded).also(&[as_written]).await?;
    /// assert!(decision.limits().map(|limit| limit.name().to_owned()).eq(["login", "projects"]));
    /// # Ok(()) }
    /// ```
    pub fn also(mut self, readings: &'a [Facts<'a>]) -> Request<'a> {
        self.toll.also = readings;
        self
    }

    /// Decides under this policy instead of the limiter's current one. For callers that read facts for this policy:
    /// limits of a newer one may need facts that were not read.
    pub fn under(mut self, policy: &'a Arc<Policy>) -> Request<'a> {
        self.policy = Some(policy);
        self
    }

    /// Decides, and lends the result to `read`. This is the primitive behind every other way to decide: a caller
    /// that only looks at the result saves the allocation of a [`Decision`].
    ///
    /// With the memory store the result is ready at once, and so is one that this node can give without asking a remote
    /// store. Otherwise the request is sent when the returned future is first polled; it borrows only the limiter, so
    /// many can be in flight.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tollkeeper::{Limit, Limiter, Quota, facts};
    /// # let limit = Limit::new("per-user", Quota::per_minute(100).burst(20)).by("user");
    /// # let limiter = Limiter::builder().limit(limit).build()?;
    /// let facts = facts! { "user" => "alice" };
    /// let remaining = limiter.check(&facts).decide_with(|decided| {
    ///     decided.limits().map(|limit| limit.remaining()).min()
    /// })?;
    /// assert_eq!(remaining.await, Some(19));
    /// # Ok(()) }
    /// ```
    #[inline]
    pub fn decide_with<T, R>(self, read: R) -> Result<StoreFuture<'a, T>, InvalidRequest>
    where
        T: Send + 'a,
        R: FnOnce(&DecidedToll) -> T + Send + 'a,
    {
        self.limiter.decide_with(self.policy, &self.toll, read)
    }

    /// Decides on this thread, without an async runtime.
    #[inline]
    pub fn wait(self) -> Result<Decision, InvalidRequest> {
        if !self.limiter.is_embedded() {
            // A remote store is called on the first poll, within `blocking::wait`, which keeps the call off the runtime
            // of this thread.
            return blocking::wait(self.into_future());
        }
        Ok(self.limiter.decide(self.policy, &self.toll)?.expect_ready())
    }
}

impl<'a> IntoFuture for Request<'a> {
    type Output = Result<Decision, InvalidRequest>;
    type IntoFuture = Deciding<'a>;

    fn into_future(self) -> Deciding<'a> {
        Deciding(Stage::Requested(self))
    }
}

/// The future of a [`Request`].
#[derive(Debug)]
pub struct Deciding<'a>(Stage<'a>);

#[derive(Debug)]
enum Stage<'a> {
    /// Not polled yet.
    Requested(Request<'a>),
    /// Sent to the store.
    Sent(StoreFuture<'a, Decision>),
}

impl Future for Deciding<'_> {
    type Output = Result<Decision, InvalidRequest>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            match &mut self.0 {
                Stage::Requested(request) => {
                    let sent = request.limiter.decide(request.policy, &request.toll)?;
                    self.0 = Stage::Sent(sent);
                }
                Stage::Sent(future) => return Pin::new(future).poll(context).map(Ok),
            }
        }
    }
}

/// A request for slots that is about to be decided: `await` it, or [`wait`](Acquire::wait) for it.
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is decided until it is awaited"]
pub struct Acquire<'a>(pub(super) Request<'a>);

impl<'a> Acquire<'a> {
    /// As [`Request::cost`]. A request takes one slot regardless of its cost.
    pub fn cost(self, cost: u64) -> Acquire<'a> {
        Acquire(self.0.cost(cost))
    }

    /// As [`Request::hold`].
    pub fn hold(self, longest: impl Into<Span>) -> Acquire<'a> {
        Acquire(self.0.hold(longest))
    }

    /// As [`Request::also`].
    pub fn also(self, readings: &'a [Facts<'a>]) -> Acquire<'a> {
        Acquire(self.0.also(readings))
    }

    /// As [`Request::under`].
    pub fn under(self, policy: &'a Arc<Policy>) -> Acquire<'a> {
        Acquire(self.0.under(policy))
    }

    /// As [`Request::decide_with`]. The slot of an admitted request ([`DecidedToll::slot`]) is the caller's to
    /// release; [`SlotGuard::of`] does so when it is dropped.
    #[inline]
    pub fn decide_with<T, R>(self, read: R) -> Result<StoreFuture<'a, T>, InvalidRequest>
    where
        T: Send + 'a,
        R: FnOnce(&DecidedToll) -> T + Send + 'a,
    {
        self.0.decide_with(read)
    }

    /// As [`Request::wait`].
    #[inline]
    pub fn wait(self) -> Result<Acquired, InvalidRequest> {
        Ok(Acquired::new(self.0.limiter, self.0.wait()?, Taken::Blocking))
    }
}

impl<'a> IntoFuture for Acquire<'a> {
    type Output = Result<Acquired, InvalidRequest>;
    type IntoFuture = Acquiring<'a>;

    fn into_future(self) -> Acquiring<'a> {
        Acquiring(self.0.limiter, self.0.into_future())
    }
}

/// The future of an [`Acquire`].
#[derive(Debug)]
pub struct Acquiring<'a>(&'a Limiter, Deciding<'a>);

impl Future for Acquiring<'_> {
    type Output = Result<Acquired, InvalidRequest>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let limiter = self.0;
        Pin::new(&mut self.1).poll(context).map_ok(|decision| Acquired::new(limiter, decision, Taken::Async))
    }
}

/// The result of an [`acquire`](Limiter::acquire).
#[derive(Debug)]
#[must_use = "dropping it releases the slot"]
pub struct Acquired {
    /// Whether the request may pass.
    pub decision: Decision,
    /// The slot, released when this is dropped; `None` if the request was refused or no concurrency limit applied.
    pub slot: Option<SlotGuard>,
}

impl Acquired {
    #[inline]
    fn new(limiter: &Limiter, decision: Decision, taken: Taken) -> Acquired {
        Acquired { slot: SlotGuard::taken(limiter, &decision, taken), decision }
    }
}

/// A request that waits until it is admitted.
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is decided until it is awaited"]
pub struct Waiting<'a> {
    pub(super) limiter: &'a Limiter,
    pub(super) facts: &'a Facts<'a>,
    pub(super) cost: u64,
}

impl<'a> Waiting<'a> {
    /// The cost: from 1 to 2^31, 1 by default.
    pub fn cost(self, cost: u64) -> Waiting<'a> {
        Waiting { cost, ..self }
    }
}

impl<'a> IntoFuture for Waiting<'a> {
    type Output = Result<Decision, InvalidRequest>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.limiter.wait_for(self.facts, self.cost))
    }
}
