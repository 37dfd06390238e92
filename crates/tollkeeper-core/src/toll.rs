//! The toll: what one request must pay.
//!
//! A toll is plain data, built from facts and a policy and sent to the store: each limit that applies, with key
//! and cost, each key once. A limit that does not apply costs one comparison. Limits that were skipped because a
//! fact is absent are marked, so that metrics can count them.

use core::fmt;
use core::ops::Deref;
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

/// The most dues in one toll. It bounds the work of one script call, so that one request cannot delay others.
pub const MAX_DUES: usize = 256;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verb {
    /// Decide, and charge if admitted.
    Check,
    /// Decide as a check would, without charging.
    Peek,
    /// The current state of each limit: a peek of cost 1, regardless of `cost:`.
    Usage,
    /// Charge an estimate that will be settled within this time.
    Reserve(Span),
    /// Decide and charge, and take a slot of each concurrency limit.
    Acquire,
}

impl Verb {
    /// Whether an admission is charged.
    pub fn charges(self) -> bool {
        !matches!(self, Verb::Peek | Verb::Usage)
    }

    /// Whether limits of this algorithm take part. Verbs whose caller cannot release a slot take none.
    fn includes(self, algorithm: Algorithm) -> bool {
        algorithm != Algorithm::Concurrency || !matches!(self, Verb::Check | Verb::Reserve(_))
    }
}

/// What one request must pay.
///
/// It borrows the policy, so that a toll that is decided in this process touches no reference count;
/// [`Toll::into_owned`] makes one that outlives the borrow.
#[derive(Clone, Debug)]
pub struct Toll<'p> {
    policy: PolicyRef<'p>,
    verb: Verb,
    hold: Option<Span>,
    entries: Inline<Entry, 4>,
    values: Inline<u8, 96>,
    /// Indices of the entries of all sets of facts but the last, sorted by key. Empty while there is only one set.
    by_key: Vec<u32>,
    skipped: Marks,
    unknown_tiers: Marks,
}

/// The policy of a toll.
#[derive(Clone, Debug)]
enum PolicyRef<'p> {
    Borrowed(&'p Arc<Policy>),
    Owned(Arc<Policy>),
}

impl Deref for PolicyRef<'_> {
    type Target = Arc<Policy>;

    #[inline]
    fn deref(&self) -> &Arc<Policy> {
        match self {
            PolicyRef::Borrowed(policy) => policy,
            PolicyRef::Owned(policy) => policy,
        }
    }
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
    /// Orders entries by key: equal exactly for equal keys.
    fn key_order<'t>(&self, policy: &'t Policy, values: &'t [u8]) -> (u32, &'t [u8], &'t [u8]) {
        let (_, family) =
            policy.rules()[self.rule as usize].quota(self.grant).expect("unlimited grants make no entry");
        (self.rule, family, &values[self.values_start as usize..self.values_end as usize])
    }
}

/// The limits that apply to one of several sets of facts, as indices into the toll.
#[derive(Clone, Debug, Default)]
pub struct MatchedLimits(Inline<u32, 4>);

impl MatchedLimits {
    pub(crate) fn indices(&self) -> impl Iterator<Item = usize> {
        self.0.iter().map(|index| *index as usize)
    }
}

/// One limit of a toll, with its key and cost.
#[derive(Clone, Copy, Debug)]
pub struct Due<'t> {
    /// The limit.
    pub rule: &'t Rule,
    /// The quota of this key: that of its override or tier, or the limit's own.
    pub quota: &'t Quota,
    /// The key.
    pub key: Key<'t>,
    /// The cost. 0 charges nothing, and is refused only by a quota of `0/s`.
    pub cost: u64,
    /// By how many microseconds the windows of this key start earlier than epoch-aligned ones (`stagger`).
    pub shift: u64,
    hold: Option<Span>,
}

/// The input of a toll.
#[derive(Clone, Copy, Debug)]
pub struct TollRequest<'a> {
    /// What is asked for.
    pub verb: Verb,
    /// The facts of the request.
    pub facts: &'a Facts<'a>,
    /// The cost for limits without a `cost:` fact, such as 1.
    pub cost: u64,
    /// The longest delay for which the caller can hold the request; `None` for no bound.
    pub hold: Option<Span>,
    /// Facts of other readings of the same request, if the caller cannot know how the server reads it. The request
    /// pays the limits of every reading, each key once.
    pub also: &'a [Facts<'a>],
}

impl Policy {
    /// What a request with these facts must pay.
    pub fn toll(
        self: &Arc<Policy>,
        verb: Verb,
        facts: &Facts<'_>,
        cost: u64,
    ) -> Result<Toll<'static>, InvalidRequest> {
        let mut toll = Toll::new(self, verb);
        toll.add(facts, cost)?;
        Ok(toll.into_owned())
    }
}

impl<'p> Toll<'p> {
    /// An empty toll.
    #[inline]
    pub fn new(policy: &'p Arc<Policy>, verb: Verb) -> Toll<'p> {
        Toll::empty(PolicyRef::Borrowed(policy), verb)
    }

    /// An empty toll that owns its policy.
    #[inline]
    pub fn owned(policy: Arc<Policy>, verb: Verb) -> Toll<'p> {
        Toll::empty(PolicyRef::Owned(policy), verb)
    }

    #[inline]
    fn empty(policy: PolicyRef<'p>, verb: Verb) -> Toll<'p> {
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

    /// The same toll, without the borrow.
    #[must_use]
    pub fn into_owned(self) -> Toll<'static> {
        Toll { policy: PolicyRef::Owned(Arc::clone(&self.policy)), ..self }
    }

    /// Adds the default quota of one limit, keyed by `value` alone. For callers that know that nothing else decides
    /// ([`Rule::is_plain`](crate::policy::Rule::is_plain)), and for policies made by [`Policy::of_one`]. A cost of 0
    /// passes and charges nothing.
    ///
    /// # Panics
    ///
    /// If the limit is unlimited by default.
    #[inline]
    pub fn add_value(&mut self, limit: usize, value: &str, cost: u64) {
        let values_start = self.values.len();
        key::push_value(Some(value.as_bytes()), |part| self.values.extend_from_slice(part));
        let rule = &self.policy.rules()[limit];
        let (quota, family) = rule.plain_quota().expect("the caller checked that the limit has a quota");
        self.entries.push(Entry {
            rule: index_u32(limit),
            grant: rule.default_grant(),
            values_start: index_u32(values_start),
            values_end: index_u32(self.values.len()),
            cost,
            shift: rule.shift_of(quota, Key::new(family, &self.values[values_start..])),
        });
    }

    /// The longest delay for which the caller can hold a queued request; a longer wait is a refusal.
    #[must_use]
    pub fn hold(self, longest: Span) -> Toll<'p> {
        Toll { hold: Some(longest), ..self }
    }

    /// Adds what a request must pay.
    #[inline]
    pub fn add_request(&mut self, request: &TollRequest<'_>) -> Result<(), InvalidRequest> {
        self.hold = request.hold;
        self.add(request.facts, request.cost)?;
        request.also.iter().try_for_each(|facts| self.add(facts, request.cost))
    }

    /// Adds what a request with these facts must pay. A key that several calls add is paid once, at the largest cost
    /// and under the smallest quota.
    #[inline]
    pub fn add(&mut self, facts: &Facts<'_>, cost: u64) -> Result<(), InvalidRequest> {
        self.enter(facts, cost, |_| {})
    }

    /// As [`Toll::add`], returning which limits apply to these facts.
    pub fn add_matched(&mut self, facts: &Facts<'_>, cost: u64) -> Result<MatchedLimits, InvalidRequest> {
        let mut matched = MatchedLimits::default();
        self.enter(facts, cost, |index| matched.0.push(index_u32(index)))?;
        Ok(matched)
    }

    #[inline]
    fn enter(
        &mut self,
        facts: &Facts<'_>,
        cost: u64,
        mut on_entry: impl FnMut(usize),
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
            if !self.verb.includes(rule.algorithm()) || !rule.applies(facts) {
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
                    // A request that an absent key fact refuses stays refused if the cost fact is absent too.
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
                rule: index_u32(index),
                grant,
                values_start: index_u32(values_start),
                values_end: index_u32(self.values.len()),
                cost,
                shift: rule.shift_of(quota, key),
            };
            // Each limit makes one key per set of facts, so only earlier sets can have the same key.
            let wanted = (entry.rule, family, &self.values[values_start..]);
            let same = self.by_key.binary_search_by(|index| {
                self.entries[*index as usize].key_order(policy, &self.values).cmp(&wanted)
            });
            match same {
                Err(_) => {
                    if self.entries.len() == MAX_DUES {
                        return Err(InvalidRequest::TooManyDues);
                    }
                    on_entry(self.entries.len());
                    self.entries.push(entry);
                }
                Ok(found) => {
                    self.values.truncate(values_start);
                    let same = self.by_key[found] as usize;
                    on_entry(same);
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

    /// Sorts the entries of earlier sets of facts, so that equal keys are found by binary search.
    fn sort_earlier_sets(&mut self) {
        for index in self.by_key.len()..self.entries.len() {
            let wanted = self.entries[index].key_order(&self.policy, &self.values);
            let before =
                |other: &u32| self.entries[*other as usize].key_order(&self.policy, &self.values) < wanted;
            let at = self.by_key.partition_point(before);
            self.by_key.insert(at, index_u32(index));
        }
    }

    /// The dues with these indices, as a toll of their own.
    #[must_use]
    pub fn part(&self, indices: &[usize]) -> Toll<'static> {
        let mut part = Toll { hold: self.hold, ..Toll::new(&self.policy, self.verb) }.into_owned();
        part.values = self.values.clone();
        indices.iter().for_each(|index| part.entries.push(self.entries[*index]));
        part
    }

    /// The same dues as a peek.
    #[must_use]
    pub fn into_peek(self) -> Toll<'p> {
        Toll { verb: Verb::Peek, ..self }
    }

    /// What is asked for.
    pub fn verb(&self) -> Verb {
        self.verb
    }

    /// The policy of the toll.
    pub fn policy(&self) -> &Arc<Policy> {
        &self.policy
    }

    /// The number of limits that apply.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether no limit applies.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The due with this index.
    #[inline]
    pub fn get(&self, index: usize) -> Due<'_> {
        due(&self.policy, &self.values, self.hold, &self.entries[index])
    }

    /// Each due, in the order of the policy, one set of facts after the other.
    #[inline]
    pub fn dues(&self) -> impl ExactSizeIterator<Item = Due<'_>> {
        self.entries.iter().map(|entry| due(&self.policy, &self.values, self.hold, entry))
    }

    /// The index in the policy of each due's limit, in the same order.
    pub fn rule_indices(&self) -> impl ExactSizeIterator<Item = usize> {
        self.entries.iter().map(|entry| entry.rule as usize)
    }

    /// The mode of each due's limit.
    #[inline]
    pub(crate) fn modes(&self) -> impl Iterator<Item = Mode> {
        let rules = self.policy.rules();
        self.entries.iter().map(|entry| rules[entry.rule as usize].mode)
    }

    /// Limits that did not apply because a fact is absent, as indices into the policy.
    pub fn skipped(&self) -> impl Iterator<Item = usize> {
        self.skipped.iter()
    }

    /// Limits that found no tier for the request, as indices into the policy.
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

impl<'t> Due<'t> {
    /// The due that [`Toll::add_value`] would make, without a toll.
    #[inline]
    pub fn prepared(rule: &'t Rule, quota: &'t Quota, key: Key<'t>, cost: u64) -> Due<'t> {
        Due { rule, quota, key: rule.place(key), cost, shift: rule.shift_of(quota, key), hold: None }
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
    pub fn step(&self, seen: Seen<'_>, now: Time) -> Step {
        let step = algorithm::step(self.quota, seen, &self.ask(now));
        Step { allowed: step.allowed || (self.is_free() && self.quota.count() > 0), ..step }
    }

    /// The numbers of the outcome, once it is known whether the key was charged.
    pub fn outcome(&self, seen: Seen<'_>, now: Time, step: &Step, charged: bool) -> Outcome {
        let outcome = algorithm::outcome(self.quota, seen, &self.ask(now), step, charged && !self.is_free());
        // A request that charges nothing does not queue.
        if self.is_free() { Outcome { delay: Span::ZERO, ..outcome } } else { outcome }
    }

    /// [`Outcome::remaining`] alone.
    #[inline]
    pub(crate) fn remaining(&self, now: Time, step: &Step, charged: bool) -> u64 {
        algorithm::remaining(self.quota, &self.ask(now), step, charged && !self.is_free())
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
        algorithm::apply(self.quota, state, &self.ask(now), step, charged && !self.is_free(), taker)
    }

    fn is_free(&self) -> bool {
        self.cost == 0
    }

    /// The input of the algorithm. A cost of 0 is evaluated like 1.
    #[inline]
    pub fn ask(&self, now: Time) -> Ask {
        Ask { now, cost: self.cost.max(1), shift: self.shift, hold: self.hold }
    }
}

/// A set of limits, as indices into the policy; the first 64 need no heap.
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
            // Clears one bit at a time: the set is nearly always empty.
            let without_lowest = |word: &u64| Some(word & (word - 1)).filter(|rest| *rest != 0);
            let rests = std::iter::successors(Some(*word).filter(|word| *word != 0), without_lowest);
            rests.map(move |rest| place * 64 + rest.trailing_zeros() as usize)
        })
    }
}

/// Appends the values of the facts that a limit is keyed by; false if one of them is absent.
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

/// The cost for a limit that charges the number in `fact`; `None` if the limit does not apply without it.
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

fn index_u32(index: usize) -> u32 {
    u32::try_from(index).expect("a policy has fewer than 2^32 limits, a toll fewer than 2^32 bytes of values")
}

/// Why a request cannot be decided: invalid input of the caller. Nothing is charged.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidRequest {
    /// A fact is invalid.
    Fact(InvalidFact),
    /// The cost is zero.
    ZeroCost,
    /// The cost is above [`MAX_COST`].
    Cost(u64),
    /// The cost fact of a limit is not a number.
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
    /// The ttl of a reservation is below a second or above an hour.
    Ttl(Span),
    /// The refund is larger than the charge.
    MoreThanCharged {
        /// The requested refund.
        asked: u64,
        /// The charge.
        charged: u64,
    },
    /// The refund is zero.
    ZeroRefund,
    /// A refund or settlement names a cost or facts that no limit of the charge charged.
    NothingToCorrect {
        /// Whether it names the request's cost, rather than facts.
        by_cost: bool,
        /// The facts that limits of this charge did charge.
        facts: Vec<String>,
    },
    /// The facts do not make a key of the limit: others are missing.
    KeyFacts {
        /// The limit.
        limit: String,
        /// The facts that are absent.
        absent: Vec<String>,
    },
    /// More than [`MAX_DUES`] limits and keys apply to one request.
    TooManyDues,
}

/// What is wrong with a cost fact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CostProblem {
    /// It is absent.
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

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for InvalidRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
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
