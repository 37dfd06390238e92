//! The toll: what one request must pay.
//!
//! A toll is plain data, built from facts and a policy and sent to the store: each limit that applies, with key
//! and cost, each key once. A limit that does not apply costs one comparison. Limits that were skipped because a
//! fact is absent are marked, so that metrics can count them.

mod due;
mod entries;
mod terms;

use core::net::IpAddr;
use std::sync::Arc;

use crate::facts::{self, Facts, Scratch, Value};
use crate::inline::Inline;
use crate::invalid_request::InvalidRequest;
use crate::key;
use crate::limit::Mode;
use crate::policy::{KeyQuota, Policy, Rule};
use crate::quota::Algorithm;
use crate::time::Span;

pub use due::Due;
pub(crate) use terms::{charged, number};

use entries::{Entries, index_u32};

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
#[derive(Clone, Debug)]
pub struct Toll {
    policy: Arc<Policy>,
    verb: Verb,
    hold: Option<Span>,
    entries: Entries,
    skipped: Marks,
    unknown_tiers: Marks,
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
    ) -> Result<Toll, InvalidRequest> {
        let mut toll = Toll::new(self, verb);
        toll.add(facts, cost)?;
        Ok(toll)
    }
}

impl Toll {
    /// An empty toll.
    pub fn new(policy: &Arc<Policy>, verb: Verb) -> Toll {
        Toll {
            policy: Arc::clone(policy),
            verb,
            hold: None,
            entries: Entries::default(),
            skipped: Marks::default(),
            unknown_tiers: Marks::default(),
        }
    }

    /// Empties it, to be built again. The reference count of a policy that stays the same is not touched.
    #[inline]
    pub(crate) fn reset(&mut self, policy: &Arc<Policy>, verb: Verb) {
        // All fields by name, so that none is forgotten.
        let Toll { policy: last, verb: last_verb, hold, entries, skipped, unknown_tiers } = self;
        if !Arc::ptr_eq(last, policy) {
            *last = Arc::clone(policy);
        }
        (*last_verb, *hold) = (verb, None);
        entries.clear();
        skipped.clear();
        unknown_tiers.clear();
    }

    /// Whether the values of all keys are inside the toll. All else that it may allocate is a few kilobytes.
    #[inline]
    pub(crate) fn is_small(&self) -> bool {
        self.entries.is_small()
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
        let start = self.entries.start();
        key::push_value(Some(value.as_bytes()), |part| self.entries.values_mut().extend_from_slice(part));
        let overridden = self.policy.overridden(limit, self.entries.values_since(start));
        let grant = overridden.unwrap_or(self.policy.rules()[limit].default_grant());
        if self.policy.quota(limit, grant).is_none() {
            assert!(overridden.is_some(), "the caller checked that the limit has a quota");
            self.entries.undo(start);
            return false;
        }
        self.entries.push(&self.policy, limit, grant, cost, start);
        true
    }

    /// Adds one quota of a key, at a cost of 1, regardless of the limit's conditions. The policy must be the one that
    /// made the [`KeyQuota`].
    pub fn add_key(&mut self, key: &KeyQuota) {
        let start = self.entries.start();
        self.entries.values_mut().extend_from_slice(&key.values);
        self.entries.push(&self.policy, key.rule, key.grant, 1, start);
    }

    /// The longest delay for which the caller can hold a queued request; a longer wait is a refusal.
    #[must_use]
    pub fn hold(self, longest: Span) -> Toll {
        Toll { hold: Some(longest), ..self }
    }

    /// Adds what a request must pay.
    // Inlined, like all that is between the caller and the loop over the limits: a request that is passed on in memory is
    // read in larger pieces than it was written, and that stalls the processor.
    #[inline(always)]
    pub fn add_request(&mut self, request: &TollRequest<'_>) -> Result<(), InvalidRequest> {
        self.hold = request.hold;
        self.add(request.facts, request.cost)?;
        if request.also.is_empty() { Ok(()) } else { self.add_all(request.also, request.cost) }
    }

    #[cold]
    fn add_all(&mut self, sets: &[Facts<'_>], cost: u64) -> Result<(), InvalidRequest> {
        sets.iter().try_for_each(|facts| self.add(facts, cost))
    }

    /// Adds what a request with these facts must pay. A key that several calls add is paid once, at the largest cost
    /// and under the smallest quota.
    #[inline(always)]
    pub fn add(&mut self, facts: &Facts<'_>, cost: u64) -> Result<(), InvalidRequest> {
        self.enter(facts, cost, |_| {})
    }

    /// As [`Toll::add`], returning which limits apply to these facts.
    pub fn add_matched(&mut self, facts: &Facts<'_>, cost: u64) -> Result<MatchedLimits, InvalidRequest> {
        let mut matched = MatchedLimits::default();
        self.enter(facts, cost, |index| matched.0.push(index_u32(index)))?;
        Ok(matched)
    }

    #[inline(always)]
    fn enter(
        &mut self,
        facts: &Facts<'_>,
        cost: u64,
        on_entry: impl FnMut(usize),
    ) -> Result<(), InvalidRequest> {
        match self.policy.identify(facts)? {
            None => self.enter_identified(facts, cost, on_entry),
            Some(identified) => self.enter_identified(&identified, cost, on_entry),
        }
    }

    #[inline]
    fn enter_identified(
        &mut self,
        facts: &Facts<'_>,
        cost: u64,
        mut on_entry: impl FnMut(usize),
    ) -> Result<(), InvalidRequest> {
        let Toll { policy, verb, entries, .. } = self;
        if entries.len() > 0 {
            entries.start_set(policy);
        }
        if cost == 0 {
            return Err(InvalidRequest::ZeroCost);
        }
        if cost > MAX_COST {
            return Err(InvalidRequest::Cost(cost));
        }
        if let Verb::Reserve(ttl) = verb
            && !(Span::from_secs(1)..=Span::from_secs(3_600)).contains(ttl)
        {
            return Err(InvalidRequest::Ttl(*ttl));
        }
        let cost = if *verb == Verb::Usage { 1 } else { cost };
        for (index, rule) in policy.rules().iter().enumerate() {
            if !verb.includes(rule.algorithm()) || !rule.applies(facts) {
                continue;
            }
            let start = entries.start();
            let is_complete = push_values(entries.values_mut(), policy, rule, facts);
            let (grant, cost) = match rule.common_grant() {
                Some(grant) if is_complete && !policy.has_overrides() => (grant, cost),
                _ => {
                    let values = entries.values_since(start);
                    let terms = policy.terms(*verb, index, facts, values, is_complete, cost)?;
                    if terms.skipped {
                        self.skipped.set(index);
                    }
                    if terms.unknown_tier {
                        self.unknown_tiers.set(index);
                    }
                    let Some(charge) = terms.charge else {
                        entries.undo(start);
                        continue;
                    };
                    charge
                }
            };
            on_entry(entries.merge(policy, index, grant, cost, start)?);
        }
        Ok(())
    }

    /// The dues with these indices, as a toll of their own.
    #[must_use]
    pub fn part(&self, indices: &[usize]) -> Toll {
        let entries = self.entries.part(indices);
        Toll { hold: self.hold, entries, ..Toll::new(&self.policy, self.verb) }
    }

    /// The same dues as a peek.
    #[must_use]
    pub fn into_peek(self) -> Toll {
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
        self.entries.len() == 0
    }

    /// The due with this index.
    #[inline(always)]
    pub fn get(&self, index: usize) -> Due<'_> {
        self.entries.due(&self.policy, self.hold, index)
    }

    /// Each due, in the order of the policy, one set of facts after the other.
    #[inline]
    pub fn dues(&self) -> impl ExactSizeIterator<Item = Due<'_>> {
        (0..self.len()).map(|index| self.get(index))
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

#[expect(clippy::cast_possible_truncation, reason = "the lowest eight bytes are wanted")]
fn low_bytes(text: u128) -> [u8; 8] {
    (text as u64).to_le_bytes()
}

// Not inlined: the buffer would be on the stack of every request.
#[inline(never)]
fn push_keyed(values: &mut Inline<u8, 96>, policy: &Policy, fact: &str, value: &Value<'_>) {
    if let Value::Ip(IpAddr::V4(ip)) = value {
        let (text, len) = facts::ipv4(*ip);
        key::push_len(len, |part| values.extend_from_slice(part));
        values.extend_from_array(&low_bytes(text), len.min(8));
        return values.extend_from_array(&low_bytes(text >> 64), len.saturating_sub(8));
    }
    let mut scratch: Scratch = [0; 48];
    let keyed = policy.keyed(fact, value, &mut scratch);
    key::push_value(Some(keyed), |part| values.extend_from_slice(part));
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
            Some(value) => push_keyed(values, policy, fact, value),
            None => {
                complete = false;
                key::push_value(None, |part| values.extend_from_slice(part));
            }
        }
    }
    complete
}

#[cfg(test)]
mod tests;
