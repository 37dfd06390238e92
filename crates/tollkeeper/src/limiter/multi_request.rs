//! Several sets of facts decided as one request.

use tollkeeper_core::{Decision, Facts, InvalidRequest, MatchedLimits, Span, Toll, Verb};

use crate::limiter::Limiter;
use crate::random;
use crate::store::Correction;

/// One request of several sets of facts: all or nothing, each key once, at the largest cost.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use tollkeeper::{Limit, Limiter, Quota, facts};
/// # let per_user = Limit::new("per-user", Quota::per_minute(100).burst(2)).by("user");
/// # let per_path = Limit::new("per-path", Quota::per_minute(100).burst(1)).by("path");
/// # let limiter = Limiter::builder().limit(per_user).limit(per_path).build().await?;
/// let mut request = limiter.multi_request();
/// let user = request.add(&facts! { "user" => "alice" }, 1)?;
/// let path = request.add(&facts! { "path" => "/" }, 1)?;
/// let decision = request.check().await;
/// assert!(decision.allowed());
/// assert_eq!(decision.of(&user).1.unwrap().0.name(), "per-user");
/// assert_eq!(decision.of(&path).1.unwrap().0.name(), "per-path");
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "nothing is decided before it is decided"]
pub struct MultiRequest<'a> {
    limiter: &'a Limiter,
    toll: Toll,
}

impl<'a> MultiRequest<'a> {
    pub(crate) fn new(limiter: &'a Limiter) -> MultiRequest<'a> {
        MultiRequest { limiter, toll: Toll::new(limiter.inner.policy.share(), Verb::Check) }
    }

    /// The longest delay that the caller can hold a request queued by a leaky bucket; what would have to wait
    /// longer is refused.
    pub fn hold(mut self, longest: impl Into<Span>) -> MultiRequest<'a> {
        self.toll = self.toll.hold(longest.into());
        self
    }

    /// Adds a set of facts. What is returned finds its limits again in the decision.
    pub fn add(&mut self, facts: &Facts<'_>, cost: u64) -> Result<MatchedLimits, InvalidRequest> {
        self.toll.meet(facts, cost)
    }

    /// Decides and charges, all of it or nothing.
    pub async fn check(self) -> Decision {
        let ruling = self.limiter.inner.store.decide(&self.toll).await;
        self.limiter.decided(Decision::new(self.toll, ruling))
    }

    /// Says what a check would, and charges nothing.
    pub async fn look(self) -> Decision {
        MultiRequest { toll: self.toll.looking(), ..self }.check().await
    }

    /// Gives back what these facts would cost, without a receipt: of each key at most what its bucket or its current
    /// window holds. Whoever has a receipt should [`Limiter::refund`] it: that gives back once, and only what it
    /// was for.
    pub async fn give_back(self) -> Correction {
        let limiter = self.limiter;
        let decision = self.look().await;
        if decision.degraded().is_some() {
            return Correction::Failed;
        }
        let Some(charge) = decision.as_if_paid(random::number()) else { return Correction::Unknown };
        limiter.refund(&charge).await
    }
}
