//! Decisions: what each limit says, and what follows for the request.

use crate::charge::{Charge, Item, Slot};
use crate::inline::Inline;
use crate::key::Key;
use crate::policy::Rule;
use crate::time::{Span, Time};
use crate::toll::{Due, Toll, Verb};

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
#[derive(Clone, Debug)]
pub struct Ruling {
    outcomes: Inline<Outcome, 4>,
    /// Where each admission was entered.
    marks: Inline<u64, 4>,
    now: Time,
    id: u64,
}

impl Ruling {
    /// Nothing said yet, at this time of the store; admissions will carry this number.
    #[inline]
    pub fn new(now: Time, id: u64) -> Ruling {
        Ruling { outcomes: Inline::default(), marks: Inline::default(), now, id }
    }

    /// What the next limit of the toll says, and where it entered the admission.
    #[inline]
    pub fn push(&mut self, outcome: Outcome, mark: u64) {
        debug_assert_eq!(outcome.allowed, outcome.retry.is_none(), "who refuses says when to come again");
        self.outcomes.push(outcome);
        self.marks.push(mark);
    }
}

/// What was decided for a request.
#[derive(Clone, Debug)]
pub struct Decision {
    toll: Toll,
    ruling: Ruling,
    verdict: Verdict,
    binding: Option<usize>,
}

impl Decision {
    /// Draws the conclusion from what each limit says.
    #[inline]
    pub fn new(toll: Toll, ruling: Ruling) -> Decision {
        // A limit without an answer would count as one that allows.
        assert_eq!(toll.len(), ruling.outcomes.len(), "a store answers for every limit");
        let mut verdict = Verdict::Allow { delay: Span::ZERO };
        let mut binding: Option<usize> = None;
        for (index, (due, outcome)) in toll.dues().zip(ruling.outcomes.iter()).enumerate() {
            if !due.enforced() {
                continue;
            }
            verdict = match (verdict, outcome.retry) {
                (Verdict::Allow { delay }, None) => {
                    if binding.is_none_or(|binding| scarcer(outcome, &ruling.outcomes[binding])) {
                        binding = Some(index);
                    }
                    Verdict::Allow { delay: delay.max(outcome.delay) }
                }
                (Verdict::Allow { .. }, Some(retry)) => {
                    binding = Some(index);
                    Verdict::Deny { retry }
                }
                (Verdict::Deny { retry: longest }, Some(retry)) if retry > longest => {
                    binding = Some(index);
                    Verdict::Deny { retry }
                }
                (denied, _) => denied,
            };
        }
        Decision { toll, ruling, verdict, binding }
    }

    /// Whether the request may pass.
    pub fn allowed(&self) -> bool {
        matches!(self.verdict, Verdict::Allow { .. })
    }

    /// Whether it may pass, with what follows.
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// How long to wait before coming again: nothing if the request passes or waiting does not help.
    pub fn retry_after(&self) -> Option<Span> {
        match self.verdict {
            Verdict::Deny { retry: Retry::After(span) } => Some(span),
            _ => None,
        }
    }

    /// How long an admitted request must be held before it goes on.
    pub fn delay(&self) -> Span {
        match self.verdict {
            Verdict::Allow { delay } => delay,
            Verdict::Deny { .. } => Span::ZERO,
        }
    }

    /// The limit that decides: of a refusal the one to wait longest for, of an admission the scarcest.
    pub fn binding(&self) -> Option<Answer<'_>> {
        self.binding.map(|index| self.answer(index))
    }

    /// What each limit that applied says, in the order of the policy.
    pub fn limits(&self) -> impl ExactSizeIterator<Item = Answer<'_>> {
        (0..self.toll.len()).map(|index| self.answer(index))
    }

    /// What the limit of that name says, if it applied.
    pub fn limit(&self, name: &str) -> Option<Answer<'_>> {
        self.limits().find(|answer| answer.rule.name() == name)
    }

    /// The time on the store's clock.
    pub fn time(&self) -> Time {
        self.ruling.now
    }

    /// What was to be paid.
    pub fn toll(&self) -> &Toll {
        &self.toll
    }

    /// The receipt: there if the request passed and something was charged.
    pub fn charge(&self) -> Option<Charge> {
        let items: Vec<Item> = self.entered(false).collect();
        let ttl = if let Verb::Reserve(ttl) = self.toll.verb() { Some(ttl) } else { None };
        (!items.is_empty()).then(|| Charge::new(self.ruling.id, self.ruling.now, ttl, items))
    }

    /// The slot: there if the request acquired one.
    pub fn slot(&self) -> Option<Slot> {
        let items: Vec<Item> = self.entered(true).collect();
        (!items.is_empty()).then(|| Slot::new(self.ruling.id, self.ruling.now, items))
    }

    /// What was written for this request, of slots or of everything else.
    fn entered(&self, slots: bool) -> impl Iterator<Item = Item> {
        let charged = self.allowed() && self.toll.verb().charges();
        let all = self.toll.dues().zip(self.ruling.outcomes.iter()).zip(self.ruling.marks.iter());
        all.filter(move |((due, outcome), _)| {
            charged && outcome.allowed && due.cost > 0 && due.is_slot() == slots
        })
        .map(|((due, outcome), mark)| Item::new(&due, *mark, outcome.overflow))
    }

    fn answer(&self, index: usize) -> Answer<'_> {
        let due = self.toll.get(index);
        Answer { rule: due.rule, due, outcome: self.ruling.outcomes[index] }
    }
}

/// What one limit says in a decision.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'d> {
    rule: &'d Rule,
    due: Due<'d>,
    outcome: Outcome,
}

impl<'d> Answer<'d> {
    /// The name of the limit.
    pub fn name(&self) -> &'d str {
        self.rule.name()
    }

    /// The limit.
    pub fn rule(&self) -> &'d Rule {
        self.rule
    }

    /// What was due.
    pub fn due(&self) -> Due<'d> {
        self.due
    }

    /// The key.
    pub fn key(&self) -> Key<'d> {
        self.due.key
    }

    /// What it says.
    pub fn outcome(&self) -> Outcome {
        self.outcome
    }
}

/// Whether less is left of one than of the other, as a share of what each grants.
fn scarcer(one: &Outcome, other: &Outcome) -> bool {
    u128::from(one.remaining) * u128::from(other.limit) < u128::from(other.remaining) * u128::from(one.limit)
}

#[cfg(test)]
pub(crate) mod tests;
