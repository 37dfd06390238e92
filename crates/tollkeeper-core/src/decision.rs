//! Decisions: what each limit says, and what follows for the request.

use std::sync::Arc;

use crate::algorithm::{self, Ask, Seen, Step};
use crate::charge::{Charge, Item, Slot};
use crate::inline::Inline;
use crate::key::Key;
use crate::limit::OnStoreFailure;
use crate::policy::Policy;
use crate::policy::Rule;
use crate::quota::Quota;
use crate::time::{Span, Time};
use crate::toll::{Due, InvalidRequest, MatchedLimits, Toll, TollRequest, Verb};

/// What one limit says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Whether this limit lets the request pass.
    pub allowed: bool,
    /// What a fresh key can take at once, such as 20.
    pub limit: u64,
    /// What can be taken at once now, such as 19.
    pub remaining: u64,
    /// When to come again; nothing if this limit allows.
    pub retry: Option<Retry>,
    /// Until the key is as good as new if nobody comes; not known for slots.
    pub reset_after: Option<Span>,
    /// Until one more unit is free: zero for a fresh key, nothing if that will never be.
    pub next_after: Option<Span>,
    /// How long the request must be held before it goes on.
    pub delay: Span,
    /// The key shares its state with others, because the store is full.
    pub overflow: bool,
}

/// When a refused request may come again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Retry {
    /// After so long, if nobody else comes.
    After(Span),
    /// Waiting does not help.
    Never,
}

impl Outcome {
    /// What a quota of nothing says.
    pub(crate) fn nothing() -> Outcome {
        Outcome { retry: Some(Retry::Never), reset_after: Some(Span::ZERO), ..Outcome::default() }
    }
}

/// Whether the request passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It passes, after so long.
    Allow {
        /// How long it must be held first: zero unless a leaky bucket queues it.
        delay: Span,
    },
    /// It does not pass.
    Deny {
        /// When it may come again.
        retry: Retry,
    },
}

/// What a store says of a toll.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    said: Inline<LimitReply, 4>,
    now: Time,
    id: u64,
}

/// What a store says of one limit.
#[derive(Clone, Copy, Debug, Default)]
pub enum LimitReply {
    /// Nothing yet.
    #[default]
    Nothing,
    /// The step that was made: the numbers behind it are computed by whoever asks for them.
    Step {
        /// The step.
        step: Step,
        /// Whether the key was charged.
        charged: bool,
    },
    /// The numbers themselves, where they depend on more than the step.
    Outcome {
        /// The numbers.
        outcome: Outcome,
        /// Where the admission was entered: tick, stamp or window.
        mark: u64,
    },
    /// The store did not answer, and this is what its limit's policy says instead.
    Degraded {
        /// The policy that answered.
        by: OnStoreFailure,
        /// The numbers; only those of [`OnStoreFailure::Local`] were counted.
        outcome: Outcome,
    },
}

impl LimitReply {
    /// Whether this limit lets the request pass.
    #[inline]
    pub fn allowed(&self) -> bool {
        match self {
            LimitReply::Nothing => false,
            LimitReply::Step { step, .. } => step.allowed,
            LimitReply::Outcome { outcome, .. } | LimitReply::Degraded { outcome, .. } => outcome.allowed,
        }
    }

    /// The numbers, for what was asked under this quota.
    pub fn outcome(&self, quota: &Quota, ask: &Ask) -> Outcome {
        match self {
            LimitReply::Nothing => Outcome::nothing(),
            LimitReply::Step { step, charged } => {
                algorithm::outcome(quota, Seen::Nothing, ask, step, *charged)
            }
            LimitReply::Outcome { outcome, .. } | LimitReply::Degraded { outcome, .. } => *outcome,
        }
    }

    /// The numbers, for what was due at that time.
    pub fn outcome_at(&self, due: &Due<'_>, now: Time) -> Outcome {
        match self {
            // The due knows what a cost of 0 changes.
            LimitReply::Step { step, charged } => due.outcome(Seen::Nothing, now, step, *charged),
            said => said.outcome(due.quota, &due.ask(now)),
        }
    }

    /// Who answered in place of the store, if it did not.
    pub fn degraded(&self) -> Option<OnStoreFailure> {
        if let LimitReply::Degraded { by, .. } = self { Some(*by) } else { None }
    }

    /// Whether the key shares its state with others: a step is only kept for one that does not.
    fn overflow(&self) -> bool {
        matches!(self, LimitReply::Outcome { outcome, .. } | LimitReply::Degraded { outcome, .. } if outcome.overflow)
    }

    /// Where the admission was entered: tick, stamp or window.
    pub fn mark(&self) -> u64 {
        match self {
            LimitReply::Nothing | LimitReply::Degraded { .. } => 0,
            LimitReply::Step { step, .. } => step.effect.mark(),
            LimitReply::Outcome { mark, .. } => *mark,
        }
    }
}

impl Reply {
    /// Nothing said yet, at this time of the store; admissions will carry this number.
    #[inline]
    pub fn new(now: Time, id: u64) -> Reply {
        Reply { said: Inline::default(), now, id }
    }

    /// The time of the store, and the number that admissions will carry.
    #[inline]
    pub fn set(&mut self, now: Time, id: u64) {
        (self.now, self.id) = (now, id);
    }

    /// Where to write what each of so many limits says.
    #[inline]
    pub fn say(&mut self, limits: usize) -> &mut [LimitReply] {
        self.said.resize(limits);
        &mut self.said
    }

    /// The time on the store's clock.
    pub fn time(&self) -> Time {
        self.now
    }

    /// The number that an admission carries.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// What each limit says, in the order of the toll.
    pub fn said(&self) -> &[LimitReply] {
        &self.said
    }

    /// What the next limit of the toll says.
    #[inline]
    pub fn push(&mut self, said: LimitReply) {
        self.said.push(said);
    }
}

/// What was decided for a request.
#[derive(Clone, Debug)]
pub struct Decision(Box<Case>);

/// On the heap, because it is large and a decision is handed from hand to hand: moving it twice would
/// cost more than the one allocation.
#[derive(Clone, Debug)]
struct Case {
    toll: Toll,
    ruling: Reply,
    allowed: bool,
}

impl Case {
    #[inline]
    fn conclude(&mut self) {
        assert_eq!(self.toll.len(), self.ruling.said.len(), "a store answers for every limit");
        let mut all = self.toll.enforced().zip(self.ruling.said.iter());
        self.allowed = all.all(|(enforced, said)| said.allowed() || !enforced);
    }
}

impl Decision {
    /// Draws the conclusion from what each limit says: all that are enforced must allow.
    #[inline]
    pub fn new(toll: Toll, ruling: Reply) -> Decision {
        let mut case = Box::new(Case { toll, ruling, allowed: false });
        case.conclude();
        Decision(case)
    }

    /// Makes a toll, has it decided at once, and draws the conclusion, all in one place.
    #[inline]
    pub fn make(
        policy: Arc<Policy>,
        request: &TollRequest<'_>,
        decide: impl FnOnce(&Toll, &mut Reply),
    ) -> Result<Decision, InvalidRequest> {
        // `Box::new` would make it on the stack and copy all of it.
        let mut case = Box::write(
            Box::new_uninit(),
            Case { toll: Toll::new(policy, request.verb), ruling: Reply::default(), allowed: false },
        );
        case.toll.add_request(request)?;
        decide(&case.toll, &mut case.ruling);
        case.conclude();
        Ok(Decision(case))
    }

    /// Whether the request may pass.
    #[inline]
    pub fn allowed(&self) -> bool {
        self.0.allowed
    }

    /// Whether it may pass, with what follows.
    pub fn verdict(&self) -> Verdict {
        self.conclusion().0
    }

    /// How long to wait before coming again: nothing if the request passes or waiting does not help.
    pub fn retry_after(&self) -> Option<Span> {
        match self.verdict() {
            Verdict::Deny { retry: Retry::After(span) } => Some(span),
            _ => None,
        }
    }

    /// How long an admitted request must be held before it goes on.
    pub fn delay(&self) -> Span {
        match self.verdict() {
            Verdict::Allow { delay } => delay,
            Verdict::Deny { .. } => Span::ZERO,
        }
    }

    /// The limit that decides: of a refusal the one to wait longest for, of an admission the scarcest.
    pub fn binding(&self) -> Option<LimitDecision<'_>> {
        self.conclusion().1
    }

    /// What each limit that applied says, in the order of the policy.
    #[inline]
    pub fn limits(&self) -> impl ExactSizeIterator<Item = LimitDecision<'_>> + Clone {
        (0..self.0.toll.len()).map(|place| self.answer(place))
    }

    /// What the limit of that name says, if it applied.
    pub fn limit(&self, name: &str) -> Option<LimitDecision<'_>> {
        self.limits().find(|answer| answer.name() == name)
    }

    /// The time on the store's clock.
    pub fn time(&self) -> Time {
        self.0.ruling.now
    }

    /// What was to be paid.
    pub fn toll(&self) -> &Toll {
        &self.0.toll
    }

    /// Who answered in place of the store, if it did not: of several the strictest.
    pub fn degraded(&self) -> Option<OnStoreFailure> {
        self.0.ruling.said.iter().filter_map(LimitReply::degraded).max_by_key(|by| match by {
            OnStoreFailure::Allow => 0,
            OnStoreFailure::Local => 1,
            OnStoreFailure::Deny => 2,
        })
    }

    /// What follows for one of several sets of facts, if it were alone: its verdict, and the limit that decides it,
    /// with what people are told of it.
    pub fn of(&self, met: &MatchedLimits) -> (Verdict, Option<(LimitDecision<'_>, Outcome)>) {
        conclude(met.places().map(|place| self.answer(place)))
    }

    /// A receipt as if all of this had been paid now, under a number of the caller's: it gives back what was paid
    /// earlier without one, as far as the states still hold it. It is void in a moment.
    pub fn as_if_paid(&self, id: u64) -> Option<Charge> {
        let paid = |LimitDecision { due, .. }: &LimitDecision<'_>| {
            due.cost > 0 && due.quota.count() > 0 && !due.is_slot()
        };
        let item = |LimitDecision { due, said, .. }: LimitDecision<'_>| {
            Item::new(&due, said.mark(), said.overflow())
        };
        let items: Vec<Item> = self.limits().filter(paid).map(item).collect();
        // Nobody sees it who could use it twice: that it was used need not be remembered for longer.
        (!items.is_empty()).then(|| Charge::new(id, self.0.ruling.now, Some(Span::from_secs(1)), items))
    }

    /// The receipt: there if the request passed and something was charged in the store.
    pub fn charge(&self) -> Option<Charge> {
        let items: Vec<Item> = self.entered(false).collect();
        let ttl = if let Verb::Reserve(ttl) = self.0.toll.verb() { Some(ttl) } else { None };
        (!items.is_empty()).then(|| Charge::new(self.0.ruling.id, self.0.ruling.now, ttl, items))
    }

    /// The slot: there if the request acquired one.
    pub fn slot(&self) -> Option<Slot> {
        let items: Vec<Item> = self.entered(true).collect();
        (!items.is_empty()).then(|| Slot::new(self.0.ruling.id, self.0.ruling.now, items))
    }

    /// What was written for this request, of slots or of everything else. Of what was decided here in
    /// place of the store only slots are held: they are given back like others.
    fn entered(&self, slots: bool) -> impl Iterator<Item = Item> {
        let by = self.degraded();
        let here =
            move |said: &LimitReply| by.is_none() || slots && said.degraded() == Some(OnStoreFailure::Local);
        let charged = self.0.allowed && self.0.toll.verb().charges();
        let entered = move |LimitDecision { due, said, .. }: &LimitDecision<'_>| {
            charged && here(said) && said.allowed() && due.cost > 0 && due.is_slot() == slots
        };
        let item = |LimitDecision { due, said, .. }: LimitDecision<'_>| {
            Item::new(&due, said.mark(), said.overflow())
        };
        self.limits().filter(entered).map(item)
    }

    /// [`Decision::verdict`] and [`Decision::binding`], for who wants both: they are computed together.
    pub fn conclusion(&self) -> (Verdict, Option<LimitDecision<'_>>) {
        let (verdict, binding) = conclude(self.limits());
        debug_assert_eq!(
            self.0.allowed,
            matches!(verdict, Verdict::Allow { .. }),
            "who refuses says for how long"
        );
        (verdict, binding.map(|(answer, _)| answer))
    }

    /// The limit that headers tell of: the one that decides, or where that one may not be shown or has not
    /// counted, the one that would decide without it; and what people are told of it.
    pub fn shown(&self) -> Option<(LimitDecision<'_>, Outcome)> {
        shown(self.limits())
    }

    #[inline]
    fn answer(&self, place: usize) -> LimitDecision<'_> {
        LimitDecision {
            due: self.0.toll.get(place),
            said: &self.0.ruling.said[place],
            now: self.0.ruling.now,
        }
    }
}

/// As [`Decision::shown`], of limits that were decided without one.
#[inline]
pub fn shown<'d>(answers: impl Iterator<Item = LimitDecision<'d>>) -> Option<(LimitDecision<'d>, Outcome)> {
    conclude(answers.filter(|answer| answer.due.rule.shown() && answer.counted())).1
}

/// What follows from what each limit says, and which one decides it: those that are enforced must all allow.
pub fn conclude<'d>(
    answers: impl Iterator<Item = LimitDecision<'d>>,
) -> (Verdict, Option<(LimitDecision<'d>, Outcome)>) {
    let mut verdict = Verdict::Allow { delay: Span::ZERO };
    let mut binding: Option<(LimitDecision<'_>, Outcome)> = None;
    for answer in answers.filter(|answer| answer.due.enforced()) {
        let outcome = answer.outcome();
        verdict = match (verdict, outcome.retry) {
            (Verdict::Allow { delay }, None) => {
                if binding.is_none_or(|(_, least)| scarcer(&outcome, &least)) {
                    binding = Some((answer, outcome));
                }
                Verdict::Allow { delay: delay.max(outcome.delay) }
            }
            (Verdict::Allow { .. }, Some(retry)) => {
                binding = Some((answer, outcome));
                Verdict::Deny { retry }
            }
            (Verdict::Deny { retry: longest }, Some(retry)) if retry > longest => {
                binding = Some((answer, outcome));
                Verdict::Deny { retry }
            }
            (denied, _) => denied,
        };
    }
    (verdict, binding)
}

/// What one limit says in a decision.
#[derive(Clone, Copy, Debug)]
pub struct LimitDecision<'d> {
    due: Due<'d>,
    said: &'d LimitReply,
    now: Time,
}

impl<'d> LimitDecision<'d> {
    /// What was said of a due at that time.
    #[inline]
    pub fn new(due: Due<'d>, said: &'d LimitReply, now: Time) -> LimitDecision<'d> {
        LimitDecision { due, said, now }
    }

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

    /// What was due.
    pub fn due(&self) -> Due<'d> {
        self.due
    }

    /// The key.
    pub fn key(&self) -> Key<'d> {
        self.due.key
    }

    /// Whether this limit lets the request pass.
    pub fn allowed(&self) -> bool {
        self.said.allowed()
    }

    /// What it says: computed each time.
    pub fn outcome(&self) -> Outcome {
        self.said.outcome_at(&self.due, self.now)
    }

    /// [`Outcome::remaining`] and nothing else, which is cheaper.
    pub fn remaining(&self) -> u64 {
        match self.said {
            LimitReply::Nothing => 0,
            LimitReply::Step { step, charged } => self.due.remaining(self.now, step, *charged),
            LimitReply::Outcome { outcome, .. } | LimitReply::Degraded { outcome, .. } => outcome.remaining,
        }
    }

    /// [`Outcome::limit`] and nothing else.
    pub fn granted(&self) -> u64 {
        match self.said {
            LimitReply::Nothing => 0,
            LimitReply::Step { .. } => self.due.quota.limit(),
            LimitReply::Outcome { outcome, .. } | LimitReply::Degraded { outcome, .. } => outcome.limit,
        }
    }

    /// Who answered in place of the store, if it did not.
    pub fn degraded(&self) -> Option<OnStoreFailure> {
        self.said.degraded()
    }

    /// Whether what remains is known: who decides without counting knows neither that nor when all is
    /// there again.
    pub fn counted(&self) -> bool {
        !matches!(self.degraded(), Some(OnStoreFailure::Allow | OnStoreFailure::Deny))
    }
}

/// Whether less is left of one than of the other, as a share of what each grants.
fn scarcer(one: &Outcome, other: &Outcome) -> bool {
    u128::from(one.remaining) * u128::from(other.limit) < u128::from(other.remaining) * u128::from(one.limit)
}

#[cfg(test)]
pub(crate) mod tests;
