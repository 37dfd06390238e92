//! Decisions: the outcome of each limit, and what follows for the request.

mod pool;
mod reply;

use core::fmt;
use core::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::charge::{Charge, Item, Slot};
use crate::key::Key;
use crate::limit::{Mode, OnStoreFailure};
use crate::policy::{Policy, Rule};
use crate::time::{Span, Time};
use crate::toll::{Due, MatchedLimits, Toll, Verb};

pub use reply::{Approximation, LimitReply, Reply};

/// The outcome of one limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Whether this limit allows the request.
    pub allowed: bool,
    /// What a fresh key can take at once: 20 for a burst of 20.
    pub limit: u64,
    /// Units left after this decision: 18 of a burst of 20 after a cost of 2.
    pub remaining: u64,
    /// When a retry can pass; `None` if allowed.
    pub retry: Option<Retry>,
    /// Time until the key is fresh again if no other request arrives; `None` for concurrency limits.
    pub reset_after: Option<Span>,
    /// Time until one more unit is free: zero for a fresh key, `None` if that never happens.
    pub next_after: Option<Span>,
    /// How long the request must be held before it proceeds.
    pub delay: Span,
    /// Whether the key shares its state with others, because the store is full.
    pub overflow: bool,
}

/// When a refused request can be retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Retry {
    /// After this time, if no other request arrives.
    After(Span),
    /// Waiting does not help.
    Never,
}

impl Outcome {
    /// The outcome of a quota of `0/s`.
    pub(crate) fn nothing() -> Outcome {
        Outcome { retry: Some(Retry::Never), reset_after: Some(Span::ZERO), ..Outcome::default() }
    }
}

/// Whether the request passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It passes.
    Allow {
        /// How long it must be held first: zero unless a leaky bucket queues it.
        delay: Span,
    },
    /// It is refused.
    Deny {
        /// When it can be retried.
        retry: Retry,
    },
}

/// Whether a request passes, given the mode and the verdict of each of its limits: every enforced limit must
/// allow it.
#[inline]
pub fn admitted(limits: impl IntoIterator<Item = (Mode, bool)>) -> bool {
    limits.into_iter().all(|(mode, allowed)| allowed || mode != Mode::Enforce)
}

/// A toll with the reply of the store, and what follows for the request.
///
/// A [`Decision`] owns one; [`DecidedToll::to_decision`] makes one that can be kept.
#[derive(Clone, Debug)]
pub struct DecidedToll {
    toll: Toll,
    reply: Reply,
    allowed: bool,
}

/// The decision for a request. It derefs to [`DecidedToll`], which has its methods.
///
/// It is boxed because it is large and is passed on by value: moving it twice costs more than one allocation. The box
/// is reused by the next decision of the thread that drops it.
#[derive(Clone)]
pub struct Decision(Option<Box<DecidedToll>>);

const TAKEN: &str = "only `drop` takes the box";

impl Deref for Decision {
    type Target = DecidedToll;

    #[inline]
    fn deref(&self) -> &DecidedToll {
        self.0.as_deref().expect(TAKEN)
    }
}

impl DerefMut for Decision {
    #[inline]
    fn deref_mut(&mut self) -> &mut DecidedToll {
        self.0.as_deref_mut().expect(TAKEN)
    }
}

impl Drop for Decision {
    #[inline]
    fn drop(&mut self) {
        if let Some(decided) = self.0.take() {
            pool::keep(decided);
        }
    }
}

impl fmt::Debug for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Decision").field(&**self).finish()
    }
}

impl Decision {
    /// A toll that is yet to be built and decided, in place: a toll and its reply are too large to be moved on the
    /// hot path.
    #[inline(always)]
    pub fn undecided(policy: &Arc<Policy>, verb: Verb) -> Decision {
        let Some(mut decided) = pool::take() else { return Decision::allocated(policy, verb) };
        let DecidedToll { toll, reply, allowed } = &mut *decided;
        toll.reset(policy, verb);
        reply.reset();
        *allowed = false;
        Decision(Some(decided))
    }

    #[cold]
    fn allocated(policy: &Arc<Policy>, verb: Verb) -> Decision {
        let toll = Toll::new(policy, verb);
        Decision(Some(Box::new(DecidedToll { toll, reply: Reply::default(), allowed: false })))
    }

    /// The decision that follows from a reply.
    pub fn new(toll: Toll, reply: Reply) -> Decision {
        Decision(Some(Box::new(DecidedToll::new(toll, reply))))
    }
}

impl DecidedToll {
    /// Draws the conclusion from a reply.
    ///
    /// # Panics
    ///
    /// If the reply does not have one entry for each limit of the toll.
    #[inline]
    pub fn new(toll: Toll, reply: Reply) -> DecidedToll {
        let mut decided = DecidedToll { toll, reply, allowed: false };
        decided.conclude();
        decided
    }

    /// The toll, to be built.
    #[inline]
    pub fn toll_mut(&mut self) -> &mut Toll {
        &mut self.toll
    }

    /// Has a store write its reply in place, and draws the conclusion.
    ///
    /// # Panics
    ///
    /// If the reply does not have one entry for each limit of the toll.
    #[inline(always)]
    pub fn decide(&mut self, decide: impl FnOnce(&Toll, &mut Reply)) {
        decide(&self.toll, &mut self.reply);
        self.conclude();
    }

    #[inline(always)]
    fn conclude(&mut self) {
        assert_eq!(self.toll.len(), self.reply.limits.len(), "a store replies for every limit");
        // Modes matter only if a limit refuses the request.
        self.allowed = self.reply.limits.iter().all(LimitReply::allowed) || self.is_admitted();
    }

    fn is_admitted(&self) -> bool {
        admitted(self.toll.modes().zip(self.reply.limits.iter().map(LimitReply::allowed)))
    }

    /// A decision that can be kept.
    #[inline]
    pub fn to_decision(&self) -> Decision {
        Decision(Some(Box::new(self.clone())))
    }

    /// Whether the request may pass.
    #[inline]
    pub fn allowed(&self) -> bool {
        self.allowed
    }

    /// Whether the request may pass, and what follows.
    pub fn verdict(&self) -> Verdict {
        self.conclusion().0
    }

    /// Time until a retry can pass; `None` if allowed, or if waiting does not help.
    pub fn retry_after(&self) -> Option<Span> {
        match self.verdict() {
            Verdict::Deny { retry: Retry::After(span) } => Some(span),
            _ => None,
        }
    }

    /// How long an admitted request must be held before it proceeds.
    pub fn delay(&self) -> Span {
        match self.verdict() {
            Verdict::Allow { delay } => delay,
            Verdict::Deny { .. } => Span::ZERO,
        }
    }

    /// The binding limit: of a refusal the one with the longest retry, of an admission the one with the smallest
    /// remaining share.
    pub fn binding(&self) -> Option<LimitDecision<'_>> {
        self.conclusion().1
    }

    /// The decision of each limit that applied, in the order of the policy.
    #[inline]
    pub fn limits(&self) -> impl ExactSizeIterator<Item = LimitDecision<'_>> + Clone {
        (0..self.toll.len()).map(|index| self.limit_at(index))
    }

    /// The decision of the limit of that name, if it applied.
    pub fn limit(&self, name: &str) -> Option<LimitDecision<'_>> {
        self.limits().find(|limit| limit.name() == name)
    }

    /// The time on the store's clock.
    pub fn time(&self) -> Time {
        self.reply.now
    }

    /// The toll.
    pub fn toll(&self) -> &Toll {
        &self.toll
    }

    /// The failure policy that answered instead of the store, if one did: of several the strictest.
    pub fn degraded(&self) -> Option<OnStoreFailure> {
        self.reply.limits.iter().filter_map(LimitReply::degraded).max_by_key(|by| match by {
            OnStoreFailure::Allow => 0,
            OnStoreFailure::Local => 1,
            OnStoreFailure::Deny => 2,
        })
    }

    /// The verdict for one of several sets of facts if it were alone, and its binding limit with the numbers to
    /// report.
    pub fn of(&self, matched: &MatchedLimits) -> (Verdict, Option<(LimitDecision<'_>, Outcome)>) {
        conclude(matched.indices().map(|index| self.limit_at(index)))
    }

    /// A charge as if the toll had been charged now, with an id from the caller. Refunding it returns earlier usage that
    /// has no charge, as far as the states still hold it. It is void after a second.
    pub fn as_if_paid(&self, id: u64) -> Option<Charge> {
        let paid = |limit: &LimitDecision<'_>| {
            limit.due.cost > 0 && limit.due.quota.count() > 0 && !limit.due.is_slot()
        };
        let items: Vec<Item> = self.limits().filter(paid).map(|limit| limit.item()).collect();
        // It never leaves the process, so it cannot be used twice and needs no long-lived marker.
        (!items.is_empty()).then(|| Charge::new(id, self.reply.now, Some(Span::from_secs(1)), items))
    }

    /// The receipt; `None` unless the request was admitted and something was charged in the store.
    pub fn charge(&self) -> Option<Charge> {
        let items: Vec<Item> = self.charged_items(false).collect();
        let ttl = if let Verb::Reserve(ttl) = self.toll.verb() { Some(ttl) } else { None };
        (!items.is_empty()).then(|| Charge::new(self.reply.id, self.reply.now, ttl, items))
    }

    /// The slot; `None` unless the request acquired one.
    pub fn slot(&self) -> Option<Slot> {
        let items: Vec<Item> = self.charged_items(true).collect();
        (!items.is_empty()).then(|| Slot::new(self.reply.id, self.reply.now, items))
    }

    /// What was written for this request: its slots, or everything else. A degraded decision writes nothing that can
    /// be corrected, except slots of [`OnStoreFailure::Local`], which are released like others.
    fn charged_items(&self, slots: bool) -> impl Iterator<Item = Item> {
        let by = self.degraded();
        let is_held = move |reply: &LimitReply| {
            by.is_none() || slots && reply.degraded() == Some(OnStoreFailure::Local)
        };
        let charged = self.allowed && self.toll.verb().charges();
        let is_charged = move |LimitDecision { due, reply, .. }: &LimitDecision<'_>| {
            charged && is_held(reply) && reply.allowed() && due.cost > 0 && due.is_slot() == slots
        };
        self.limits().filter(is_charged).map(|limit| limit.item())
    }

    /// [`DecidedToll::verdict`] and [`DecidedToll::binding`], computed together.
    pub fn conclusion(&self) -> (Verdict, Option<LimitDecision<'_>>) {
        let (verdict, binding) = conclude(self.limits());
        debug_assert_eq!(
            self.allowed,
            matches!(verdict, Verdict::Allow { .. }),
            "a refusing limit has a retry, an allowing one has none"
        );
        (verdict, binding.map(|(limit, _)| limit))
    }

    /// The limit that headers describe, with its numbers: the binding limit, or if that one may not be shown or
    /// was not counted, the one that would bind without it.
    pub fn shown(&self) -> Option<(LimitDecision<'_>, Outcome)> {
        conclude(self.limits().filter(|limit| limit.due.rule.shown() && limit.counted())).1
    }

    /// The decision of the limit with this index, in the order of [`DecidedToll::limits`].
    #[inline]
    pub fn limit_at(&self, index: usize) -> LimitDecision<'_> {
        LimitDecision { due: self.toll.get(index), reply: &self.reply.limits[index], now: self.reply.now }
    }
}

/// The verdict that follows from the decisions of all limits, and the limit that binds: every enforced limit must
/// allow the request.
fn conclude<'d>(
    limits: impl Iterator<Item = LimitDecision<'d>>,
) -> (Verdict, Option<(LimitDecision<'d>, Outcome)>) {
    let mut verdict = Verdict::Allow { delay: Span::ZERO };
    let mut binding: Option<(LimitDecision<'_>, Outcome)> = None;
    for limit in limits.filter(|limit| limit.due.enforced()) {
        let outcome = limit.outcome();
        verdict = match (verdict, outcome.retry) {
            (Verdict::Allow { delay }, None) => {
                if binding.is_none_or(|(_, least)| is_scarcer(&outcome, &least)) {
                    binding = Some((limit, outcome));
                }
                Verdict::Allow { delay: delay.max(outcome.delay) }
            }
            (Verdict::Allow { .. }, Some(retry)) => {
                binding = Some((limit, outcome));
                Verdict::Deny { retry }
            }
            (Verdict::Deny { retry: longest }, Some(retry)) if retry > longest => {
                binding = Some((limit, outcome));
                Verdict::Deny { retry }
            }
            (refused, _) => refused,
        };
    }
    (verdict, binding)
}

/// The decision of one limit.
#[derive(Clone, Copy, Debug)]
pub struct LimitDecision<'d> {
    due: Due<'d>,
    reply: &'d LimitReply,
    now: Time,
}

impl<'d> LimitDecision<'d> {
    /// The time on the store's clock.
    pub fn time(&self) -> Time {
        self.now
    }

    /// The name of the limit.
    pub fn name(&self) -> &'d str {
        self.due.rule.name()
    }

    /// The limit.
    pub fn rule(&self) -> &'d Rule {
        self.due.rule
    }

    /// The due.
    pub fn due(&self) -> Due<'d> {
        self.due
    }

    /// The key.
    pub fn key(&self) -> Key<'d> {
        self.due.key
    }

    /// Whether this limit allows the request.
    pub fn allowed(&self) -> bool {
        self.reply.allowed()
    }

    /// Whether the request passes this limit: allowed, or not enforced.
    pub fn passes(&self) -> bool {
        admitted([(self.due.mode(), self.allowed())])
    }

    /// The store's reply.
    pub fn reply(&self) -> &'d LimitReply {
        self.reply
    }

    /// The numbers; computed each time.
    pub fn outcome(&self) -> Outcome {
        self.reply.outcome_at(&self.due, self.now)
    }

    /// [`Outcome::remaining`] alone, which is cheaper.
    pub fn remaining(&self) -> u64 {
        match self.reply {
            LimitReply::Pending | LimitReply::Unasked => 0,
            LimitReply::Step { step, charged } => self.due.remaining(self.now, step, *charged),
            LimitReply::StepAt { step, charged, now } => self.due.remaining(*now, step, *charged),
            LimitReply::Outcome { outcome, .. }
            | LimitReply::Degraded { outcome, .. }
            | LimitReply::Approximate { outcome, .. } => outcome.remaining,
            LimitReply::Seen { .. } => self.outcome().remaining,
        }
    }

    /// [`Outcome::limit`] alone.
    pub fn granted(&self) -> u64 {
        match self.reply {
            LimitReply::Pending => 0,
            LimitReply::Step { .. }
            | LimitReply::StepAt { .. }
            | LimitReply::Seen { .. }
            | LimitReply::Unasked => self.due.quota.limit(),
            LimitReply::Outcome { outcome, .. }
            | LimitReply::Degraded { outcome, .. }
            | LimitReply::Approximate { outcome, .. } => outcome.limit,
        }
    }

    /// The failure policy that answered instead of the store, if one did.
    pub fn degraded(&self) -> Option<OnStoreFailure> {
        self.reply.degraded()
    }

    /// What this node answered from instead of asking the store, if it did: then the numbers are approximate.
    pub fn approximation(&self) -> Option<Approximation> {
        self.reply.approximation()
    }

    /// Whether the limit was decided. It was not if this node refused the request by another limit without asking
    /// the store.
    pub fn asked(&self) -> bool {
        !matches!(self.reply, LimitReply::Unasked)
    }

    /// Whether `remaining` and `reset_after` are known: a failure policy of `allow` or `deny` does not count, and
    /// neither does a limit that was not asked.
    pub fn counted(&self) -> bool {
        self.asked() && !matches!(self.degraded(), Some(OnStoreFailure::Allow | OnStoreFailure::Deny))
    }

    fn item(&self) -> Item {
        Item::new(&self.due, self.reply.mark(), self.reply.overflow())
    }
}

/// Whether `one` has a smaller remaining share of its limit than `other`.
fn is_scarcer(one: &Outcome, other: &Outcome) -> bool {
    u128::from(one.remaining) * u128::from(other.limit) < u128::from(other.remaining) * u128::from(one.limit)
}

#[cfg(test)]
pub(crate) mod tests;
