//! Several sets of facts decided as one request.

use std::convert::Infallible;
use std::sync::Arc;

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
/// # let limiter = Limiter::builder().limit(per_user).limit(per_path).build()?;
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
#[must_use = "nothing is decided until `check` or `peek` is awaited"]
pub struct MultiRequest<'a> {
    limiter: &'a Limiter,
    toll: Toll,
}

impl<'a> MultiRequest<'a> {
    pub(crate) fn new(limiter: &'a Limiter) -> MultiRequest<'a> {
        let toll = limiter.inner.policy.read(|policy, _| Toll::new(policy, Verb::Check));
        MultiRequest { limiter, toll }
    }

    /// The longest delay for which the caller can hold a request that a leaky bucket queues. A longer wait is a
    /// refusal.
    pub fn hold(mut self, longest: impl Into<Span>) -> MultiRequest<'a> {
        self.toll = self.toll.hold(longest.into());
        self
    }

    /// Adds a set of facts. The returned value finds its limits in the decision ([`DecidedToll::of`](crate::DecidedToll::of)).
    pub fn add(&mut self, facts: &Facts<'_>, cost: u64) -> Result<MatchedLimits, InvalidRequest> {
        self.toll.add_matched(facts, cost)
    }

    /// Decides, and charges everything or nothing.
    pub async fn check(self) -> Decision {
        self.decide().await
    }

    /// Decides as a check would, without charging.
    pub async fn peek(self) -> Decision {
        MultiRequest { toll: self.toll.into_peek(), ..self }.decide().await
    }

    async fn decide(self) -> Decision {
        let MultiRequest { limiter, toll } = self;
        let policy = Arc::clone(toll.policy());
        let build = |built: &mut Toll| {
            *built = toll;
            Ok::<(), Infallible>(())
        };
        let Ok(decision) = limiter.decide_toll(&policy, Verb::Check, build, |decision| decision);
        decision.await
    }

    /// Refunds what these facts would cost, without a charge: for each key at most what its bucket or current
    /// window holds. A caller that has the charge should [`Limiter::refund`] it instead: that refunds exactly what
    /// was charged, once.
    pub async fn give_back(self) -> Correction {
        let limiter = self.limiter;
        let decision = self.peek().await;
        if decision.degraded().is_some() {
            return Correction::Failed;
        }
        let Some(charge) = decision.as_if_paid(random::number()) else { return Correction::Unknown };
        limiter.refund(&charge).await
    }
}
