//! The toll: what one request must pay.
//!
//! Pure data, made of facts and a policy, ready to travel to whoever keeps the state: each limit that
//! applies, with key and cost, each key once. Limits that do not apply cost a comparison and leave no
//! trace; those that were skipped for want of a fact are marked, because somebody wants to count them.

use core::fmt;
use std::sync::Arc;

use crate::algorithm::{self, Ask, Seen, State, Step};
use crate::decision::Outcome;
use crate::facts::{Facts, InvalidFact, Scratch, Value};
use crate::inline::Inline;
use crate::key::{self, Key};
use crate::limit::{CostMissing, Missing, Mode};
use crate::policy::{Policy, REFUSED, Rule};
use crate::quota::{Algorithm, Quota};
use crate::time::{Span, Time};

/// The largest cost.
pub const MAX_COST: u64 = 1 << 31;

/// The most dues of one toll: what one script call can decide without holding up the requests of others.
pub const MAX_DUES: usize = 256;

/// What the request wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// To pass, and to be charged if it may.
    Check,
    /// To know what a check would say.
    Peek,
    /// To know how each limit stands: a peek of cost 1, whatever the limits charge.
    Usage,
    /// To pass on an estimate that will be corrected within this time.
    Reserve(Span),
    /// To pass and to hold a slot of each concurrency limit.
    Acquire,
}

impl Verb {
    /// Whether an admission is charged.
    pub fn charges(self) -> bool {
        !matches!(self, Verb::Peek | Verb::Usage)
    }

    /// Whether concurrency limits take part. A slot that nobody will release is not taken.
    fn meets(self, algorithm: Algorithm) -> bool {
        algorithm != Algorithm::Concurrency || !matches!(self, Verb::Check | Verb::Reserve(_))
    }
}

/// What one request must pay.
#[derive(Clone, Debug)]
pub struct Toll {
    policy: Arc<Policy>,
    verb: Verb,
    hold: Option<Span>,
    entries: Inline<Entry, 4>,
    values: Inline<u8, 96>,
    /// The places of the entries of all sets of facts but the last one, sorted by their keys. Empty while there is
    /// only one set.
    by_key: Vec<u32>,
    skipped: Marks,
    unknown_tiers: Marks,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    rule: u32,
    grant: u32,
    values_start: u32,
    values_end: u32,
    cost: u64,
    shift: u64,
}

impl Entry {
    /// Orders entries by their keys. Entries with equal keys are equal here, and no others.
    fn key_order<'t>(&self, policy: &'t Policy, values: &'t [u8]) -> (u32, &'t [u8], &'t [u8]) {
        let (_, family) =
            policy.rules()[self.rule as usize].quota(self.grant).expect("unlimited grants make no entry");
        (self.rule, family, &values[self.values_start as usize..self.values_end as usize])
    }
}

/// The limits that one of several sets of facts has met, by their places in the toll.
#[derive(Clone, Debug, Default)]
pub struct MatchedLimits(Inline<u32, 4>);

impl MatchedLimits {
    pub(crate) fn places(&self) -> impl Iterator<Item = usize> {
        self.0.iter().map(|place| *place as usize)
    }
}

/// What is due at one limit.
#[derive(Clone, Copy, Debug)]
pub struct Due<'t> {
    /// The limit.
    pub rule: &'t Rule,
    /// What it grants to this key.
    pub quota: &'t Quota,
    /// The key.
    pub key: Key<'t>,
    /// The cost; 0 passes, unless nothing is granted, and charges nothing.
    pub cost: u64,
    /// How much earlier than the epoch's the windows of this key begin, in microseconds.
    pub shift: u64,
    hold: Option<Span>,
}

/// What is asked of a policy.
#[derive(Clone, Copy, Debug)]
pub struct TollRequest<'a> {
    /// What the request wants.
    pub verb: Verb,
    /// What is known of it.
    pub facts: &'a Facts<'a>,
    /// What it costs, where a limit does not charge the number in a fact.
    pub cost: u64,
    /// The longest delay that the caller can hold it.
    pub hold: Option<Span>,
    /// Facts of other readings of the same request, where it is not known how its server reads it. The request
    /// pays the limits of every reading, each key once.
    pub also: &'a [Facts<'a>],
}

impl Policy {
    /// What a request with these facts must pay.
    #[inline]
    pub fn toll(
        self: &Arc<Policy>,
        verb: Verb,
        facts: &Facts<'_>,
        cost: u64,
    ) -> Result<Toll, InvalidRequest> {
        let mut toll = Toll::new(Arc::clone(self), verb);
        toll.add(facts, cost)?;
        Ok(toll)
    }
}

impl Toll {
    /// Nothing to pay yet.
    #[inline]
    pub fn new(policy: Arc<Policy>, verb: Verb) -> Toll {
        Toll {
            policy,
            verb,
            hold: None,
            entries: Inline::default(),
            values: Inline::default(),
            by_key: Vec::new(),
            skipped: Marks::default(),
            unknown_tiers: Marks::default(),
        }
    }

    /// What a request keyed by `value` must pay under a policy made by [`Policy::of_one`]. A cost of 0 passes
    /// and charges nothing.
    pub fn of_one(policy: Arc<Policy>, verb: Verb, value: &str, cost: u64) -> Toll {
        let mut toll = Toll::new(policy, verb);
        key::push_value(Some(value.as_bytes()), |part| toll.values.extend_from_slice(part));
        let values_end = place(toll.values.len());
        toll.entries.push(Entry { values_end, cost, ..Entry::default() });
        toll
    }

    /// The longest delay that the caller can hold a queued request; a longer one refuses it.
    #[must_use]
    pub fn hold(self, longest: Span) -> Toll {
        Toll { hold: Some(longest), ..self }
    }

    /// Adds what a request must pay.
    #[inline]
    pub fn add_request(&mut self, request: &TollRequest<'_>) -> Result<(), InvalidRequest> {
        self.hold = request.hold;
        self.add(request.facts, request.cost)?;
        request.also.iter().try_for_each(|facts| self.add(facts, request.cost))
    }

    /// Adds what a request with these facts must pay. Called again, the same key is paid for once, at
    /// the largest cost and under the smallest quota.
    #[inline]
    pub fn add(&mut self, facts: &Facts<'_>, cost: u64) -> Result<(), InvalidRequest> {
        self.enter(facts, cost, |_| {})
    }

    /// As [`Toll::add`], saying which limits these facts meet.
    pub fn meet(&mut self, facts: &Facts<'_>, cost: u64) -> Result<MatchedLimits, InvalidRequest> {
        let mut met = MatchedLimits::default();
        self.enter(facts, cost, |index| met.0.push(place(index)))?;
        Ok(met)
    }

    #[inline]
    fn enter(
        &mut self,
        facts: &Facts<'_>,
        cost: u64,
        mut entered: impl FnMut(usize),
    ) -> Result<(), InvalidRequest> {
        self.sort_earlier_sets();
        let policy = &*self.policy;
        let facts = &*policy.identify(facts)?;
        if cost == 0 {
            return Err(InvalidRequest::ZeroCost);
        }
        if cost > MAX_COST {
            return Err(InvalidRequest::Cost(cost));
        }
        if let Verb::Reserve(ttl) = self.verb
            && !(Span::from_secs(1)..=Span::from_secs(3_600)).contains(&ttl)
        {
            return Err(InvalidRequest::Ttl(ttl));
        }
        for (index, rule) in policy.rules().iter().enumerate() {
            if !self.verb.meets(rule.algorithm()) || !rule.applies(facts) {
                continue;
            }
            let values_start = self.values.len();
            let complete = push_values(&mut self.values, policy, rule, facts);
            let granted = match rule.missing {
                Missing::Skip if !complete => {
                    self.skipped.set(index);
                    None
                }
                Missing::Deny if !complete => Some(REFUSED),
                _ => {
                    let granted = rule.granted(facts);
                    if granted.unknown_tier {
                        self.unknown_tiers.set(index);
                    }
                    Some(granted.grant)
                }
            };
            let quota = granted.and_then(|grant| Some((grant, rule.quota(grant)?)));
            let cost = match &rule.cost {
                _ if quota.is_none() => None,
                _ if self.verb == Verb::Usage => Some(1),
                None => Some(cost),
                Some(fact) => match charged(rule, fact, facts) {
                    Ok(Some(cost)) => Some(cost),
                    // What is refused for want of another fact is not let pass for want of this one.
                    Ok(None) if rule.missing == Missing::Deny && !complete => Some(cost),
                    Ok(None) => {
                        self.skipped.set(index);
                        None
                    }
                    Err(_) if rule.mode == Mode::Shadow => None,
                    Err(problem) => {
                        let (limit, fact) = (rule.name.to_string(), fact.to_string());
                        return Err(InvalidRequest::CostFact { limit, fact, problem });
                    }
                },
            };
            let (Some((grant, (quota, family))), Some(cost)) = (quota, cost) else {
                self.values.truncate(values_start);
                continue;
            };
            let key = Key::new(family, &self.values[values_start..]);
            let entry = Entry {
                rule: place(index),
                grant,
                values_start: place(values_start),
                values_end: place(self.values.len()),
                cost,
                shift: shift(rule, quota, key),
            };
            // Within one set of facts each limit makes one key: only earlier sets can have the same key.
            let wanted = (entry.rule, family, &self.values[values_start..]);
            let same = self.by_key.binary_search_by(|place| {
                self.entries[*place as usize].key_order(policy, &self.values).cmp(&wanted)
            });
            match same {
                Err(_) => {
                    if self.entries.len() == MAX_DUES {
                        return Err(InvalidRequest::TooManyDues);
                    }
                    entered(self.entries.len());
                    self.entries.push(entry);
                }
                Ok(found) => {
                    self.values.truncate(values_start);
                    let same = self.by_key[found] as usize;
                    entered(same);
                    let merged = &mut self.entries[same];
                    let other = due(policy, &self.values, None, merged).quota;
                    merged.cost = merged.cost.max(cost);
                    if (quota.limit(), quota.count()) < (other.limit(), other.count()) {
                        merged.grant = grant;
                    }
                }
            }
        }
        Ok(())
    }

    /// Prepares the search for equal keys: sorts the entries of the sets of facts that are here already.
    fn sort_earlier_sets(&mut self) {
        for index in self.by_key.len()..self.entries.len() {
            let wanted = self.entries[index].key_order(&self.policy, &self.values);
            let before =
                |other: &u32| self.entries[*other as usize].key_order(&self.policy, &self.values) < wanted;
            let at = self.by_key.partition_point(before);
            self.by_key.insert(at, place(index));
        }
    }

    /// What of it is due at the limits of these places.
    #[must_use]
    pub fn part(&self, places: &[usize]) -> Toll {
        let mut part = Toll { hold: self.hold, ..Toll::new(Arc::clone(&self.policy), self.verb) };
        part.values = self.values.clone();
        places.iter().for_each(|place| part.entries.push(self.entries[*place]));
        part
    }

    /// The same, to be looked at only: of one that was to check, without the limits that a check does not meet.
    #[must_use]
    pub fn looking(self) -> Toll {
        Toll { verb: Verb::Peek, ..self }
    }

    /// What the request wants.
    pub fn verb(&self) -> Verb {
        self.verb
    }

    /// The policy it was made under.
    pub fn policy(&self) -> &Arc<Policy> {
        &self.policy
    }

    /// How many limits apply.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether no limit applies.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// What is due at the limit of that place.
    #[inline]
    pub fn get(&self, index: usize) -> Due<'_> {
        due(&self.policy, &self.values, self.hold, &self.entries[index])
    }

    /// What is due at each limit, in the order of the policy, for one set of facts after the other.
    #[inline]
    pub fn dues(&self) -> impl ExactSizeIterator<Item = Due<'_>> {
        self.entries.iter().map(|entry| due(&self.policy, &self.values, self.hold, entry))
    }

    /// The place of each of these limits in the policy, in the same order.
    pub fn places(&self) -> impl ExactSizeIterator<Item = usize> {
        self.entries.iter().map(|entry| entry.rule as usize)
    }

    /// Whether the verdict of each limit counts.
    #[inline]
    pub(crate) fn enforced(&self) -> impl Iterator<Item = bool> {
        let rules = self.policy.rules();
        self.entries.iter().map(|entry| rules[entry.rule as usize].mode == Mode::Enforce)
    }

    /// Limits that did not apply because a fact is absent, by their place in the policy.
    pub fn skipped(&self) -> impl Iterator<Item = usize> {
        self.skipped.iter()
    }

    /// Limits that found no tier for the request, by their place in the policy.
    pub fn unknown_tiers(&self) -> impl Iterator<Item = usize> {
        self.unknown_tiers.iter()
    }
}

#[inline]
fn due<'t>(policy: &'t Policy, values: &'t [u8], hold: Option<Span>, entry: &Entry) -> Due<'t> {
    let rule = &policy.rules()[entry.rule as usize];
    let (quota, family) = rule.quota(entry.grant).expect("unlimited grants make no entry");
    let values = &values[entry.values_start as usize..entry.values_end as usize];
    let key = rule.place(Key::new(family, values));
    Due { rule, quota, key, cost: entry.cost, shift: entry.shift, hold }
}

/// How much earlier than the epoch's the windows of a key begin. A quota of nothing has no windows.
#[inline]
fn shift(rule: &Rule, quota: &Quota, key: Key<'_>) -> u64 {
    if rule.stagger && quota.count() > 0 { key.stagger() } else { 0 }
}

impl<'t> Due<'t> {
    /// What is due outside of a policy, at a limit prepared for one key.
    #[inline]
    pub fn prepared(rule: &'t Rule, quota: &'t Quota, key: Key<'t>, cost: u64) -> Due<'t> {
        Due { rule, quota, key: rule.place(key), cost, shift: shift(rule, quota, key), hold: None }
    }

    /// The same at another cost.
    #[must_use]
    pub fn with_cost(self, cost: u64) -> Due<'t> {
        Due { cost, ..self }
    }

    /// The same under another quota.
    #[must_use]
    pub fn with_quota(self, quota: &'t Quota) -> Due<'t> {
        Due { quota, ..self }
    }

    /// Whether the verdict of this limit counts.
    #[inline]
    pub fn enforced(&self) -> bool {
        self.rule.mode == Mode::Enforce
    }

    /// Whether a slot is taken, rather than a cost charged.
    pub fn is_slot(&self) -> bool {
        self.quota.algorithm() == Algorithm::Concurrency
    }

    /// Decides this limit alone. A cost of 0 always fits, but where nothing is granted nothing passes.
    #[inline(always)]
    pub fn step(&self, seen: Seen<'_>, now: Time) -> Step {
        let step = algorithm::step(self.quota, seen, &self.ask(now));
        Step { allowed: step.allowed || (self.is_free() && self.quota.count() > 0), ..step }
    }

    /// What people are told, once it is known whether the key was charged.
    pub fn outcome(&self, seen: Seen<'_>, now: Time, step: &Step, charged: bool) -> Outcome {
        let outcome = algorithm::outcome(self.quota, seen, &self.ask(now), step, charged && !self.is_free());
        // What charges nothing stands in no queue.
        if self.is_free() { Outcome { delay: Span::ZERO, ..outcome } } else { outcome }
    }

    /// [`Outcome::remaining`] and nothing else.
    #[inline]
    pub(crate) fn remaining(&self, now: Time, step: &Step, charged: bool) -> u64 {
        algorithm::remaining(self.quota, &self.ask(now), step, charged && !self.is_free())
    }

    /// The state after a step, charged or only moved; `taker` is who takes a slot.
    #[inline]
    pub fn apply(
        &self,
        state: Option<State>,
        now: Time,
        step: &Step,
        charged: bool,
        taker: u64,
    ) -> Option<State> {
        algorithm::apply(self.quota, state, &self.ask(now), step, charged && !self.is_free(), taker)
    }

    fn is_free(&self) -> bool {
        self.cost == 0
    }

    /// What is asked of the algorithm. A cost of 0 looks as 1 does.
    #[inline]
    pub fn ask(&self, now: Time) -> Ask {
        Ask { now, cost: self.cost.max(1), shift: self.shift, hold: self.hold }
    }
}

/// A set of places in the policy: no heap for the first 64.
#[derive(Clone, Debug, Default)]
struct Marks {
    first: u64,
    more: Vec<u64>,
}

impl Marks {
    fn set(&mut self, index: usize) {
        let word = match index / 64 {
            0 => &mut self.first,
            word => {
                if self.more.len() < word {
                    self.more.resize(word, 0);
                }
                &mut self.more[word - 1]
            }
        };
        *word |= 1 << (index % 64);
    }

    fn iter(&self) -> impl Iterator<Item = usize> {
        let words = std::iter::once(&self.first).chain(&self.more);
        words.enumerate().flat_map(|(place, word)| {
            // From mark to mark, because hardly ever is there one.
            let without_lowest = |word: &u64| Some(word & (word - 1)).filter(|rest| *rest != 0);
            let rests = std::iter::successors(Some(*word).filter(|word| *word != 0), without_lowest);
            rests.map(move |rest| place * 64 + rest.trailing_zeros() as usize)
        })
    }
}

/// Writes the values of the facts that a limit is keyed by; false if one of them is absent.
#[inline]
pub(crate) fn push_values(
    values: &mut Inline<u8, 96>,
    policy: &Policy,
    rule: &Rule,
    facts: &Facts<'_>,
) -> bool {
    let mut complete = true;
    for fact in &rule.by {
        match facts.get(fact) {
            Some(Value::Text(text)) => {
                key::push_value(Some(text.as_bytes()), |part| values.extend_from_slice(part));
            }
            Some(value) => {
                let mut scratch: Scratch = [0; 48];
                let keyed = policy.keyed(fact, value, &mut scratch);
                key::push_value(Some(keyed), |part| values.extend_from_slice(part));
            }
            None => {
                complete = false;
                key::push_value(None, |part| values.extend_from_slice(part));
            }
        }
    }
    complete
}

/// What a limit charges that charges the number in `fact`; `None` if it does not apply without one.
pub(crate) fn charged(rule: &Rule, fact: &str, facts: &Facts<'_>) -> Result<Option<u64>, CostProblem> {
    match (facts.get(fact), rule.cost_missing) {
        (None, CostMissing::Skip) => Ok(None),
        (None, CostMissing::Charge(cost)) => Ok(Some(cost)),
        (value, _) => number(value).map(Some),
    }
}

/// The number that a `cost:` fact holds.
pub(crate) fn number(value: Option<&Value<'_>>) -> Result<u64, CostProblem> {
    let number = match value {
        None => return Err(CostProblem::Absent),
        Some(Value::Number(number)) => u64::try_from(*number).map_err(|_| CostProblem::NotANumber)?,
        // Digits alone: `parse` would take a sign, and can then fail only for being too large.
        Some(Value::Text(text)) if text.bytes().all(|byte| byte.is_ascii_digit()) => {
            text.parse().map_err(|_| CostProblem::TooLarge)?
        }
        Some(_) => return Err(CostProblem::NotANumber),
    };
    if number > MAX_COST { Err(CostProblem::TooLarge) } else { Ok(number) }
}

fn place(index: usize) -> u32 {
    u32::try_from(index).expect("a policy has fewer than 2^32 limits, a toll fewer bytes of values")
}

/// Why a request cannot be decided: its own fault, and nothing is charged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InvalidRequest {
    /// A fact may not be.
    Fact(InvalidFact),
    /// The cost is zero.
    ZeroCost,
    /// The cost is larger than any limit could take.
    Cost(u64),
    /// A limit charges the number in a fact, and that is none.
    CostFact {
        /// The limit.
        limit: String,
        /// The fact.
        fact: String,
        /// What is wrong with it.
        problem: CostProblem,
    },
    /// There is no limit of this name.
    UnknownLimit(String),
    /// A reservation lives from a second to an hour.
    Ttl(Span),
    /// More was to be given back than had been charged.
    MoreThanCharged {
        /// What was to be given back.
        asked: u64,
        /// What had been charged.
        charged: u64,
    },
    /// A refund gives back at least 1.
    ZeroRefund,
    /// A refund or settlement names a cost or facts that no limit of the charge charged.
    NothingToCorrect {
        /// It names the cost of the request, not facts.
        by_cost: bool,
        /// The facts that limits of this charge do charge.
        facts: Vec<String>,
    },
    /// A key cannot be told from these facts: the limit is keyed by others, too.
    KeyFacts {
        /// The limit.
        limit: String,
        /// The facts that are absent.
        absent: Vec<String>,
    },
    /// More than [`MAX_DUES`] limits and keys apply to one request.
    TooManyDues,
}

/// What is wrong with a fact that holds a cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CostProblem {
    /// It is not there.
    Absent,
    /// It is not a whole number.
    NotANumber,
    /// It is larger than 2^31.
    TooLarge,
}

impl fmt::Display for InvalidRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InvalidRequest::Fact(error) => write!(f, "{error}"),
            InvalidRequest::ZeroCost => {
                f.write_str("the cost is 0 (at least 1; to look without paying, use peek)")
            }
            InvalidRequest::Cost(cost) => write!(f, "the cost {cost} is too large (at most {MAX_COST})"),
            InvalidRequest::CostFact { limit, fact, problem } => {
                write!(f, "limit `{limit}` charges the number in fact `{fact}`, but {problem}")?;
                match problem {
                    CostProblem::Absent => f.write_str(" (send it, or set the limit's `cost_missing`)"),
                    CostProblem::NotANumber | CostProblem::TooLarge => Ok(()),
                }
            }
            InvalidRequest::UnknownLimit(name) => write!(f, "there is no limit `{}`", name.escape_debug()),
            InvalidRequest::Ttl(ttl) => {
                write!(f, "a reservation cannot last {} (from 1s to 1h)", ttl.readable())
            }
            InvalidRequest::MoreThanCharged { asked, charged } => {
                write!(f, "{asked} cannot be given back: {charged} had been charged")
            }
            InvalidRequest::ZeroRefund => f.write_str(
                "a refund of 0 gives nothing back (at least 1; without a cost, all is given back)",
            ),
            InvalidRequest::NothingToCorrect { by_cost: true, facts } => write!(
                f,
                "no limit of this charge charges the request's cost (it can be corrected by {})",
                Names(facts)
            ),
            InvalidRequest::NothingToCorrect { by_cost: false, facts } if facts.is_empty() => {
                f.write_str("no limit of this charge charges a fact (it can be corrected by `cost`)")
            }
            InvalidRequest::NothingToCorrect { by_cost: false, facts } => {
                write!(f, "no limit of this charge charges one of these facts (it charges {})", Names(facts))
            }
            InvalidRequest::KeyFacts { limit, absent } => {
                let are = if absent.len() == 1 { "is" } else { "are" };
                write!(f, "limit `{limit}` is keyed by {}, which {are} missing", Names(absent))
            }
            InvalidRequest::TooManyDues => write!(
                f,
                "more than {MAX_DUES} limits and keys apply to this request (send fewer descriptors, or narrow the \
                 limits with `when`)"
            ),
        }
    }
}

impl core::error::Error for InvalidRequest {}

/// Names of facts in a sentence: `` `tokens`, `images` ``.
struct Names<'n>(&'n [String]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, name) in self.0.iter().enumerate() {
            write!(f, "{}`{name}`", if index > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

/// A clause about the fact: "it is absent".
impl fmt::Display for CostProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CostProblem::Absent => "it is absent",
            CostProblem::NotANumber => "it is not a whole number",
            CostProblem::TooLarge => "it is larger than 2147483648",
        })
    }
}

#[cfg(test)]
mod tests;
