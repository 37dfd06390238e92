//! The toll: what one request must pay.
//!
//! A toll is plain data, built from facts and a policy and sent to the store: each limit that applies, with key
//! and cost, each key once. A limit that does not apply costs one comparison. Limits that were skipped because a
//! fact is absent are marked, so that metrics can count them.

mod due;

use core::ops::Deref;
use std::sync::Arc;

use crate::facts::{Facts, Scratch, Value};
use crate::inline::Inline;
use crate::invalid_request::{CostProblem, InvalidRequest};
use crate::key::{self, Key};
use crate::limit::{CostMissing, Missing, Mode};
use crate::policy::{KeyQuota, Policy, REFUSED, Rule};
use crate::quota::Algorithm;
use crate::time::Span;

pub use due::Due;

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
    entries: Inline<TollEntry, 4>,
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
struct TollEntry {
    rule: u32,
    grant: u32,
    values_start: u32,
    values_end: u32,
    cost: u64,
    shift: u64,
}

impl TollEntry {
    /// Orders entries by key: equal exactly for equal keys.
    fn key_order<'t>(&self, policy: &'t Policy, values: &'t [u8]) -> (u32, &'t [u8], &'t [u8]) {
        let (_, family) =
            policy.quota(self.rule as usize, self.grant).expect("unlimited grants make no entry");
        (self.rule, &**family, &values[self.values_start as usize..self.values_end as usize])
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

/// The input of a toll.
#[derive(Clone, Copy, Debug)]
pub struct TollRequest<'a> {
    /// The operation: a check, a peek, a reservation, …
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
    pub fn new(policy: &'p Arc<Policy>, verb: Verb) -> Toll<'p> {
        Toll {
            policy: PolicyRef::Borrowed(policy),
            verb,
            hold: None,
            entries: Inline::default(),
            values: Inline::default(),
            by_key: Vec::new(),
            skipped: Marks::default(),
            unknown_tiers: Marks::default(),
        }
    }

    /// Empties it, to be built again. The reference count of a policy that stays the same is not touched.
    #[inline]
    pub(crate) fn reset(&mut self, policy: &Arc<Policy>, verb: Verb) {
        // All fields by name, so that none is forgotten.
        let Toll { policy: last, verb: last_verb, hold, entries, values, by_key, skipped, unknown_tiers } =
            self;
        if !Arc::ptr_eq(last, policy) {
            *last = PolicyRef::Owned(Arc::clone(policy));
        }
        (*last_verb, *hold) = (verb, None);
        entries.truncate(0);
        values.truncate(0);
        by_key.clear();
        skipped.clear();
        unknown_tiers.clear();
    }

    /// Whether the values of all keys are inside the toll. All else that it may allocate is a few kilobytes.
    #[inline]
    pub(crate) fn is_small(&self) -> bool {
        self.values.is_inline()
    }

    /// The same toll, without the borrow.
    #[must_use]
    pub fn into_owned(self) -> Toll<'static> {
        Toll { policy: PolicyRef::Owned(Arc::clone(&self.policy)), ..self }
    }

    /// Adds one limit, keyed by `value` alone, under the default quota or that of an override at run time; false if
    /// the override is unlimited, and then nothing is added. For callers that know that nothing else decides
    /// ([`Rule::is_plain`](crate::policy::Rule::is_plain)), and for policies made by [`Policy::of_one`]. A cost of 0
    /// passes and charges nothing.
    ///
    /// # Panics
    ///
    /// If the limit is unlimited by default.
    #[inline(always)]
    pub fn add_value(&mut self, limit: usize, value: &str, cost: u64) -> bool {
        let values_start = self.values.len();
        key::push_value(Some(value.as_bytes()), |part| self.values.extend_from_slice(part));
        let rule = &self.policy.rules()[limit];
        let overridden = self.policy.overridden(limit, &self.values[values_start..]);
        let grant = overridden.unwrap_or(rule.default_grant());
        let Some((quota, family)) = self.policy.quota(limit, grant) else {
            assert!(overridden.is_some(), "the caller checked that the limit has a quota");
            self.values.truncate(values_start);
            return false;
        };
        self.entries.push(TollEntry {
            rule: index_u32(limit),
            grant,
            values_start: index_u32(values_start),
            values_end: index_u32(self.values.len()),
            cost,
            shift: rule.shift_of(quota, || Key::new(family, &self.values[values_start..])),
        });
        true
    }

    /// Adds one quota of a key, at a cost of 1, regardless of the limit's conditions. The policy must be the one that
    /// made the [`KeyQuota`].
    pub fn add_key(&mut self, key: &KeyQuota) {
        let values_start = self.values.len();
        self.values.extend_from_slice(&key.values);
        let rule = &self.policy.rules()[key.rule];
        let (quota, family) = self.policy.quota(key.rule, key.grant).expect("unlimited grants have no state");
        self.entries.push(TollEntry {
            rule: index_u32(key.rule),
            grant: key.grant,
            values_start: index_u32(values_start),
            values_end: index_u32(self.values.len()),
            cost: 1,
            shift: rule.shift_of(quota, || Key::new(family, &self.values[values_start..])),
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
        if !self.entries.is_empty() {
            self.sort_earlier_sets();
        }
        let policy = &*self.policy;
        let identified = policy.identify(facts)?;
        let facts = identified.as_deref().unwrap_or(facts);
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
            let grant = match rule.missing {
                Missing::Skip if !complete => {
                    self.skipped.set(index);
                    self.values.truncate(values_start);
                    continue;
                }
                Missing::Deny if !complete => REFUSED,
                _ => match self.overridden(index, values_start) {
                    Some(grant) => grant,
                    None => {
                        let granted = rule.granted(facts);
                        if granted.unknown_tier {
                            self.unknown_tiers.set(index);
                        }
                        granted.grant
                    }
                },
            };
            let Some((quota, family)) = policy.quota(index, grant) else {
                self.values.truncate(values_start);
                continue;
            };
            let cost = match &rule.cost {
                _ if self.verb == Verb::Usage => 1,
                None => cost,
                Some(fact) => match charged(rule, fact, facts) {
                    Ok(Some(cost)) => cost,
                    // A request that an absent key fact refuses stays refused if the cost fact is absent too.
                    Ok(None) if rule.missing == Missing::Deny && !complete => cost,
                    Ok(None) => {
                        self.skipped.set(index);
                        self.values.truncate(values_start);
                        continue;
                    }
                    Err(_) if rule.mode == Mode::Shadow => {
                        self.values.truncate(values_start);
                        continue;
                    }
                    Err(problem) => {
                        let (limit, fact) = (rule.name.to_string(), fact.to_string());
                        return Err(InvalidRequest::CostFact { limit, fact, problem });
                    }
                },
            };
            let entry = TollEntry {
                rule: index_u32(index),
                grant,
                values_start: index_u32(values_start),
                values_end: index_u32(self.values.len()),
                cost,
                shift: rule.shift_of(quota, || Key::new(family, &self.values[values_start..])),
            };
            match self.earlier_entry(entry) {
                None => {
                    if self.entries.len() == MAX_DUES {
                        return Err(InvalidRequest::TooManyDues);
                    }
                    on_entry(self.entries.len());
                    self.entries.push(entry);
                }
                Some(same) => {
                    self.values.truncate(values_start);
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

    /// The grant of the override at run time for the values from `values_start` on, if there is one.
    #[inline]
    fn overridden(&self, rule: usize, values_start: usize) -> Option<u32> {
        if self.policy.has_overrides() {
            self.policy.overridden(rule, &self.values[values_start..])
        } else {
            None
        }
    }

    /// The index of the entry with the same key. Each limit makes one key per set of facts, so only entries of earlier
    /// sets are compared.
    // The entry is passed by value, so that it stays in registers until it is pushed.
    #[inline]
    fn earlier_entry(&self, entry: TollEntry) -> Option<usize> {
        if self.by_key.is_empty() { None } else { self.find_entry(entry) }
    }

    fn find_entry(&self, entry: TollEntry) -> Option<usize> {
        let key_order = |entry: &TollEntry| entry.key_order(&self.policy, &self.values);
        let wanted = key_order(&entry);
        let compare = |index: &u32| key_order(&self.entries[*index as usize]).cmp(&wanted);
        let found = self.by_key.binary_search_by(compare).ok()?;
        Some(self.by_key[found] as usize)
    }

    /// Sorts the entries of earlier sets of facts, so that equal keys are found by binary search.
    #[cold]
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

    /// The operation: a check, a peek, a reservation, …
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
    #[inline(always)]
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

#[inline(always)]
fn due<'t>(policy: &'t Policy, values: &'t [u8], hold: Option<Span>, entry: &TollEntry) -> Due<'t> {
    let rule = &policy.rules()[entry.rule as usize];
    let (quota, family) =
        policy.quota(entry.rule as usize, entry.grant).expect("unlimited grants make no entry");
    let values = &values[entry.values_start as usize..entry.values_end as usize];
    let key = rule.place(Key::new(family, values));
    Due { rule, quota, key, cost: entry.cost, shift: entry.shift, hold }
}

/// A set of limits, as indices into the policy; the first 64 need no heap.
#[derive(Clone, Debug, Default)]
struct Marks {
    first: u64,
    more: Vec<u64>,
}

impl Marks {
    #[inline]
    fn clear(&mut self) {
        self.first = 0;
        self.more.clear();
    }

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

#[cfg(test)]
mod tests;
