//! The reply of a store to a toll: one entry for each limit, and the time on the store's clock.

use super::Outcome;
use crate::algorithm::{self, KeyRequest, Step, StoredState};
use crate::inline::Inline;
use crate::limit::OnStoreFailure;
use crate::quota::CheckedQuota;
use crate::time::Time;
use crate::toll::Due;

/// The reply of a store to a toll.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub(super) limits: Inline<LimitReply, 4>,
    pub(super) now: Time,
    pub(super) id: u64,
}

/// The reply of a store for one limit.
#[derive(Clone, Copy, Debug, Default)]
pub enum LimitReply {
    /// None yet.
    #[default]
    Pending,
    /// The step of the algorithm; its numbers are computed on demand.
    Step {
        /// The step.
        step: Step,
        /// Whether the key was charged.
        charged: bool,
    },
    /// A step at a time of its own, for a toll that several servers decide.
    StepAt {
        /// The step.
        step: Step,
        /// Whether the key was charged.
        charged: bool,
        /// The time on the clock of the server that decided it.
        now: Time,
    },
    /// The numbers themselves, where they depend on more than the step.
    Outcome {
        /// The numbers.
        outcome: Outcome,
        /// Where the admission was entered: tick, stamp or window.
        mark: u64,
    },
    /// The store did not answer, and the limit's failure policy answered instead.
    Degraded {
        /// The failure policy.
        by: OnStoreFailure,
        /// The numbers; only [`OnStoreFailure::Local`] counts.
        outcome: Outcome,
    },
    /// This node answered without asking the store, so the numbers are approximate.
    Approximate {
        /// What it answered from.
        by: Approximation,
        /// The numbers.
        outcome: Outcome,
        /// Where the admission was entered: tick or window.
        mark: u64,
    },
    /// As [`LimitReply::Approximate`], from a state that the store showed; its numbers are computed on demand.
    Seen {
        /// What it answered from.
        by: Approximation,
        /// Whether this limit allows the request.
        allowed: bool,
        /// The state of the key. This request is not charged to it.
        state: StoredState<'static>,
        /// The time on the store's clock.
        now: Time,
        /// Units that this node holds in permits. They count as remaining.
        held: u64,
        /// Where the admission was entered: tick or window.
        mark: u64,
    },
    /// Nothing is known: the store was not asked, because this node refused the request by another limit.
    Unasked,
}

/// What a node answers from without asking the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Approximation {
    /// Permits that the store granted in advance.
    Permits,
    /// The state of the key when the store last answered: it cannot have more room now than that allows.
    DenialBound,
}

impl Approximation {
    /// The numbers of an answer, given those of the last state and the units that this node holds in permits.
    fn outcome(self, seen: Outcome, held: u64) -> Outcome {
        let Outcome { limit, reset_after, next_after, .. } = seen;
        match self {
            Approximation::DenialBound => seen,
            Approximation::Permits => Outcome {
                allowed: true,
                limit,
                remaining: seen.remaining.saturating_add(held).min(limit),
                reset_after,
                next_after,
                ..Outcome::default()
            },
        }
    }
}

impl LimitReply {
    /// Whether this limit allows the request.
    #[inline]
    pub fn allowed(&self) -> bool {
        match self {
            LimitReply::Pending => false,
            LimitReply::Step { step, .. } | LimitReply::StepAt { step, .. } => step.allowed,
            LimitReply::Outcome { outcome, .. }
            | LimitReply::Degraded { outcome, .. }
            | LimitReply::Approximate { outcome, .. } => outcome.allowed,
            LimitReply::Seen { allowed, .. } => *allowed,
            // It did not refuse the request.
            LimitReply::Unasked => true,
        }
    }

    /// The numbers, under this quota and for this input.
    pub fn outcome(&self, quota: &CheckedQuota, request: &KeyRequest) -> Outcome {
        match self {
            LimitReply::Pending => Outcome::nothing(),
            LimitReply::Step { step, charged } => {
                algorithm::outcome(quota, StoredState::Nothing, request, step, *charged)
            }
            LimitReply::StepAt { step, charged, now } => algorithm::outcome(
                quota,
                StoredState::Nothing,
                &KeyRequest { now: *now, ..*request },
                step,
                *charged,
            ),
            LimitReply::Outcome { outcome, .. }
            | LimitReply::Degraded { outcome, .. }
            | LimitReply::Approximate { outcome, .. } => *outcome,
            LimitReply::Seen { by, state, now, held, .. } => {
                let request = KeyRequest { now: *now, ..*request };
                let step = algorithm::step(quota, *state, &request);
                by.outcome(algorithm::outcome(quota, *state, &request, &step, false), *held)
            }
            LimitReply::Unasked => Outcome { allowed: true, limit: quota.limit(), ..Outcome::default() },
        }
    }

    /// The numbers for this due at this time.
    pub fn outcome_at(&self, due: &Due<'_>, now: Time) -> Outcome {
        match self {
            // The due knows what a cost of 0 changes.
            LimitReply::Step { step, charged } => due.outcome(StoredState::Nothing, now, step, *charged),
            LimitReply::StepAt { step, charged, now } => {
                due.outcome(StoredState::Nothing, *now, step, *charged)
            }
            LimitReply::Seen { by, state, now, held, .. } => {
                by.outcome(due.outcome(*state, *now, &due.step(*state, *now), false), *held)
            }
            reply => reply.outcome(due.quota, &due.request(now)),
        }
    }

    /// The failure policy that answered instead of the store, if one did.
    pub fn degraded(&self) -> Option<OnStoreFailure> {
        if let LimitReply::Degraded { by, .. } = self { Some(*by) } else { None }
    }

    /// What this node answered from instead of asking the store, if it did.
    pub fn approximation(&self) -> Option<Approximation> {
        match self {
            LimitReply::Approximate { by, .. } | LimitReply::Seen { by, .. } => Some(*by),
            _ => None,
        }
    }

    /// Whether the key shares its state with others. A `Step` is never of a shared state.
    pub(super) fn overflow(&self) -> bool {
        matches!(self, LimitReply::Outcome { outcome, .. } | LimitReply::Degraded { outcome, .. } if outcome.overflow)
    }

    /// Where the admission was entered: tick, stamp or window.
    pub fn mark(&self) -> u64 {
        match self {
            LimitReply::Pending | LimitReply::Degraded { .. } | LimitReply::Unasked => 0,
            LimitReply::Step { step, .. } | LimitReply::StepAt { step, .. } => step.effect.mark(),
            LimitReply::Outcome { mark, .. }
            | LimitReply::Approximate { mark, .. }
            | LimitReply::Seen { mark, .. } => *mark,
        }
    }
}

impl Reply {
    /// An empty reply at this time of the store. `id` identifies the admission in its charge.
    #[inline]
    pub fn new(now: Time, id: u64) -> Reply {
        Reply { limits: Inline::default(), now, id }
    }

    /// Empties it, to be written again.
    #[inline]
    pub(super) fn reset(&mut self) {
        self.limits.truncate(0);
        self.set(Time::default(), 0);
    }

    /// Sets the time of the store and the id of the admission.
    #[inline]
    pub fn set(&mut self, now: Time, id: u64) {
        (self.now, self.id) = (now, id);
    }

    /// Resizes to this many replies, and returns them for writing.
    #[inline]
    pub fn resize(&mut self, limits: usize) -> &mut [LimitReply] {
        self.limits.resize(limits);
        &mut self.limits
    }

    /// The time on the store's clock.
    pub fn time(&self) -> Time {
        self.now
    }

    /// The id of the admission.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The reply for each limit, in the order of the toll.
    pub fn limits(&self) -> &[LimitReply] {
        &self.limits
    }

    /// Appends the reply for the next limit of the toll.
    #[inline]
    pub fn push(&mut self, limit: LimitReply) {
        self.limits.push(limit);
    }
}
