//! One limit of a toll, and its algorithm with the key's quota and cost filled in.

use crate::algorithm::{self, KeyRequest, State, Step, StoredState};
use crate::decision::Outcome;
use crate::key::Key;
use crate::limit::Mode;
use crate::policy::Rule;
use crate::quota::{Algorithm, CheckedQuota};
use crate::time::{Span, Time};

/// One limit of a toll, with its key and cost.
#[derive(Clone, Copy, Debug)]
pub struct Due<'t> {
    /// The limit.
    pub rule: &'t Rule,
    /// The quota of this key: that of its override or tier, or the limit's own.
    pub quota: &'t CheckedQuota,
    /// The key.
    pub key: Key<'t>,
    /// The cost. 0 charges nothing, and is refused only by a quota of `0/s`.
    pub cost: u64,
    /// By how many microseconds the windows of this key start earlier than epoch-aligned ones (`stagger`).
    pub shift: u64,
    pub(super) hold: Option<Span>,
}

impl<'t> Due<'t> {
    /// The due that [`Toll::add_value`](super::Toll::add_value) would make, without a toll.
    ///
    /// # Panics
    ///
    /// If the limit is unlimited by default.
    #[inline(always)]
    pub fn of_value(rule: &'t Rule, value: &'t str, cost: u64) -> Due<'t> {
        let (quota, family) = rule.plain_quota().expect("the caller checked that the limit has a quota");
        let key = Key::of_one(family, value);
        Due { rule, quota, key: rule.place(key), cost, shift: rule.shift_of(quota, || key), hold: None }
    }

    /// The same at another cost.
    #[must_use]
    pub fn with_cost(self, cost: u64) -> Due<'t> {
        Due { cost, ..self }
    }

    /// The same under another quota.
    #[must_use]
    pub fn with_quota(self, quota: &'t CheckedQuota) -> Due<'t> {
        Due { quota, ..self }
    }

    /// The mode of the limit.
    #[inline]
    pub fn mode(&self) -> Mode {
        self.rule.mode
    }

    /// Whether the limit's verdict counts.
    #[inline]
    pub fn enforced(&self) -> bool {
        self.mode() == Mode::Enforce
    }

    /// Whether the limit takes a slot instead of charging a cost.
    pub fn is_slot(&self) -> bool {
        self.quota.algorithm() == Algorithm::Concurrency
    }

    /// Decides this limit alone. A cost of 0 always fits, except under a quota of `0/s`.
    #[inline(always)]
    pub fn step(&self, stored: StoredState<'_>, now: Time) -> Step {
        let step = algorithm::step(self.quota, stored, &self.request(now));
        Step { allowed: step.allowed || (self.is_free() && self.quota.count() > 0), ..step }
    }

    /// The numbers of the outcome, once it is known whether the key was charged.
    pub fn outcome(&self, stored: StoredState<'_>, now: Time, step: &Step, charged: bool) -> Outcome {
        let outcome =
            algorithm::outcome(self.quota, stored, &self.request(now), step, charged && !self.is_free());
        // A request that charges nothing does not queue.
        if self.is_free() { Outcome { delay: Span::ZERO, ..outcome } } else { outcome }
    }

    /// [`Outcome::remaining`] alone.
    #[inline]
    pub(crate) fn remaining(&self, now: Time, step: &Step, charged: bool) -> u64 {
        algorithm::remaining(self.quota, &self.request(now), step, charged && !self.is_free())
    }

    /// The state after a step, charged or only re-anchored; `taker` is the id under which a slot is held.
    #[inline]
    pub fn apply(
        &self,
        state: Option<State>,
        now: Time,
        step: &Step,
        charged: bool,
        taker: u64,
    ) -> Option<State> {
        algorithm::apply(self.quota, state, &self.request(now), step, charged && !self.is_free(), taker)
    }

    fn is_free(&self) -> bool {
        self.cost == 0
    }

    /// The input of the algorithm. A cost of 0 is evaluated like 1.
    #[inline(always)]
    pub fn request(&self, now: Time) -> KeyRequest {
        KeyRequest { now, cost: self.cost.max(1), shift: self.shift, hold: self.hold }
    }
}
