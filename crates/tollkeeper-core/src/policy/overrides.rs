//! Overrides at run time: the quotas of single keys, on top of the limits of the policy.
//!
//! They are an immutable part of a [`Policy`], so a request is decided by all of an override or by none of it. Finding
//! the override of a key takes one hash of its values, whatever their number, and one comparison if there are none.
//! The map is cut into parts that clones share: changing one override copies one part.

use core::fmt;
use core::hash::{BuildHasherDefault, Hasher};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::Policy;
use super::compile;
use super::problem::LimitProblem;
use super::rule::{Grant, REFUSED, Rule};
use crate::facts::{Facts, InvalidFact, Value};
use crate::invalid_request::InvalidRequest;
use crate::key::{self, Family, Key};
use crate::quota::{Allowance, CheckedQuota};
use crate::siphash::{self, Secret};
use crate::time::Span;

/// The bit of a grant's index that says that it is an override's, not the limit's.
const RUN_TIME: u32 = 1 << 31;
/// Into how many parts the overrides of a limit are cut.
const PARTS: usize = 256;

/// What one key of a limit is granted instead of the limit's quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// The quota: [`Allowance::Nothing`] blocks the key.
    pub allowance: Allowance,
    /// When it ends, in seconds since the epoch; `None` if it does not.
    pub until: Option<u64>,
    /// Why it was set.
    pub note: Option<String>,
}

/// Why an override cannot be applied.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidOverride {
    /// There is no limit of this name.
    UnknownLimit(String),
    /// The limit is keyed by several facts, or by none.
    NotOneFact {
        /// The limit.
        limit: String,
        /// How many facts it is keyed by.
        facts: usize,
    },
    /// The value is not a valid value of the fact, or is empty.
    Value(InvalidFact),
    /// The value is empty.
    EmptyValue(String),
    /// The quota does not fit the algorithm of the limit.
    Quota {
        /// The limit.
        limit: String,
        /// What is wrong with it.
        problem: LimitProblem,
    },
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for InvalidOverride {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for InvalidOverride {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InvalidOverride::UnknownLimit(name) => write!(f, "there is no limit `{}`", name.escape_debug()),
            InvalidOverride::NotOneFact { limit, facts: 0 } => {
                write!(f, "limit `{limit}` has no `by`: it has one key for all requests, so change its rate")
            }
            InvalidOverride::NotOneFact { limit, facts } => {
                write!(f, "limit `{limit}` is keyed by {facts} facts, and an override names one value")
            }
            InvalidOverride::Value(invalid) => write!(f, "{invalid}"),
            InvalidOverride::EmptyValue(limit) => write!(f, "limit `{limit}`: an empty value is no key"),
            InvalidOverride::Quota { limit, problem } => write!(f, "limit `{limit}`: {problem}"),
        }
    }
}

impl core::error::Error for InvalidOverride {}

/// The overrides of a policy; empty ones take no memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Overrides(Option<Arc<Table>>);

#[derive(Clone, Debug)]
struct Table {
    /// Clients choose the values, so hashes are under a secret.
    secret: Secret,
    /// By the index of the limit.
    limits: Vec<Option<Arc<LimitOverrides>>>,
}

#[derive(Clone, Debug)]
struct LimitOverrides {
    parts: Vec<Arc<HashMap<u128, OverrideEntry, BuildHasherDefault<Unhashed>>>>,
    /// Each grant once, with the index of each.
    grants: Arc<Vec<Grant>>,
    indexes: Arc<BTreeMap<Numbers, u32>>,
    /// The largest count with each period that an override has or had.
    largest: Arc<BTreeMap<Span, u64>>,
    len: usize,
}

/// What distinguishes the grants of one limit: count, burst and period; `None` for unlimited.
type Numbers = Option<(u64, u64, Span)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OverrideEntry {
    grant: u32,
    until: Option<u64>,
}

impl Default for LimitOverrides {
    fn default() -> LimitOverrides {
        let (grants, indexes, largest) = (Arc::default(), Arc::default(), Arc::default());
        LimitOverrides { parts: vec![Arc::default(); PARTS], grants, indexes, largest, len: 0 }
    }
}

impl LimitOverrides {
    fn get(&self, hash: u128) -> Option<OverrideEntry> {
        self.parts[part(hash)].get(&hash).copied()
    }

    fn set(&mut self, hash: u128, grant: Grant, until: Option<u64>) {
        let index = match self.indexes.get(&grant.numbers()) {
            Some(index) => *index,
            None => {
                let index = u32::try_from(self.grants.len()).expect("far fewer than 2^31 overrides");
                Arc::make_mut(&mut self.indexes).insert(grant.numbers(), index);
                if let Some((count, _, period)) = grant.numbers() {
                    let largest = Arc::make_mut(&mut self.largest).entry(period).or_default();
                    *largest = count.max(*largest);
                }
                Arc::make_mut(&mut self.grants).push(grant);
                index
            }
        };
        let entry = OverrideEntry { grant: index | RUN_TIME, until };
        if Arc::make_mut(&mut self.parts[part(hash)]).insert(hash, entry).is_none() {
            self.len += 1;
        }
    }

    fn remove(&mut self, hash: u128) {
        if Arc::make_mut(&mut self.parts[part(hash)]).remove(&hash).is_some() {
            self.len -= 1;
        }
    }
}

/// The part that holds this hash.
#[inline]
fn part(hash: u128) -> usize {
    usize::try_from(hash >> 64 & (PARTS as u128 - 1)).expect("eight bits")
}

/// The keys are hashes already.
#[derive(Clone, Copy, Debug, Default)]
struct Unhashed(u64);

impl Hasher for Unhashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.first_chunk().map_or(0, |low| u64::from_le_bytes(*low));
    }

    #[expect(clippy::cast_possible_truncation, reason = "any 64 bits of the hash will do")]
    fn write_u128(&mut self, hash: u128) {
        self.0 = hash as u64;
    }
}

impl Policy {
    /// The key that a value of a limit's fact makes, as [`Policy::with_override`] takes it: normalised, hashed, and an
    /// IPv6 address reduced to its prefix.
    pub fn override_key<'v>(
        &'v self,
        limit: &str,
        value: impl Into<Value<'v>>,
    ) -> Result<String, InvalidOverride> {
        let rule = self.one_fact(limit)?.1;
        let mut facts = Facts::new();
        facts.insert(&*rule.by[0], value).map_err(InvalidOverride::Value)?;
        match self.key_texts(limit, &facts) {
            Ok(mut texts) => texts
                .pop()
                .flatten()
                .filter(|text| !text.is_empty())
                .ok_or_else(|| InvalidOverride::EmptyValue(limit.to_owned())),
            Err(InvalidRequest::Fact(invalid)) => Err(InvalidOverride::Value(invalid)),
            Err(_) => Err(InvalidOverride::EmptyValue(limit.to_owned())),
        }
    }

    /// The same policy with an override for a key, or without the one it had.
    pub fn with_override(
        &self,
        limit: &str,
        key: &str,
        granted: Option<&Override>,
        secret: Secret,
    ) -> Result<Policy, InvalidOverride> {
        let mut policy = self.clone();
        policy.set_override(limit, key, granted, secret)?;
        Ok(policy)
    }

    /// As [`Policy::with_override`], in place. The secret is used if it is the first override.
    pub fn set_override(
        &mut self,
        limit: &str,
        key: &str,
        granted: Option<&Override>,
        secret: Secret,
    ) -> Result<(), InvalidOverride> {
        let (index, rule) = self.one_fact(limit)?;
        let grant = granted.map(|it| self.override_grant(rule, it.allowance)).transpose();
        let grant = grant.map_err(|problem| InvalidOverride::Quota { limit: limit.to_owned(), problem })?;
        let rules = self.rules.len();
        let table = self.overrides.0.get_or_insert_with(|| Arc::new(Table { secret, limits: Vec::new() }));
        let table = Arc::make_mut(table);
        table.limits.resize(rules, None);
        let hash = table.hash(key);
        let limit = Arc::make_mut(table.limits[index].get_or_insert_default());
        match grant {
            Some(grant) => limit.set(hash, grant, granted.and_then(|it| it.until)),
            None => limit.remove(hash),
        }
        if limit.len == 0 {
            table.limits[index] = None;
        }
        if table.limits.iter().all(Option::is_none) {
            self.overrides = Overrides::default();
        }
        Ok(())
    }

    /// The same policy without overrides.
    #[must_use]
    pub fn without_overrides(&self) -> Policy {
        Policy { overrides: Overrides::default(), ..self.clone() }
    }

    /// Whether a key has an override, and when that ends: `Some(None)` if it does not end.
    pub fn override_until(&self, key: Key<'_>) -> Option<Option<u64>> {
        let table = self.overrides.0.as_deref()?;
        let (index, _) = self.find(key.limit())?;
        table.find(index, &encoded(key)).map(|entry| entry.until)
    }

    /// The override of a value of a limit that is keyed by one fact, as a handle needs it: the inner `None` is
    /// unlimited.
    pub fn override_quota(&self, limit: usize, value: &str) -> Option<Option<(&CheckedQuota, &Family)>> {
        let table = self.overrides.0.as_deref()?;
        let entry = table.limits.get(limit)?.as_ref()?.get(table.hash(value))?;
        Some(self.quota(limit, entry.grant))
    }

    /// The largest count that a quota of this limit with this period has: its own, a tier's, or an override's. While
    /// the limit has overrides, those that were removed count, too: a larger count is always safe. Without the last one
    /// the limit has its long leases back. A node that has not seen the removal yet is like one that has not seen any
    /// other change of the limit (`docs/adr/0021-leases.md`).
    pub(crate) fn largest_count(&self, rule: &Rule, period: Span) -> u64 {
        let table = self.overrides.0.as_deref();
        let limit = table.and_then(|table| table.limits.get(self.find(&rule.name)?.0)?.as_deref());
        let overridden = limit.and_then(|limit| limit.largest.get(&period)).copied();
        rule.largest_count(period).max(overridden.unwrap_or(0))
    }

    /// Whether there are overrides at all.
    #[inline]
    pub fn has_overrides(&self) -> bool {
        self.overrides.0.is_some()
    }

    /// The index of the grant of the override for these encoded values, if there is one.
    #[inline]
    pub(crate) fn overridden(&self, rule: usize, values: &[u8]) -> Option<u32> {
        let table = self.overrides.0.as_deref()?;
        table.find(rule, values).map(|entry| entry.grant)
    }

    /// The end of the override for these encoded values.
    pub(super) fn until_of(&self, rule: usize, values: &[u8]) -> Option<u64> {
        self.overrides.0.as_deref()?.find(rule, values)?.until
    }

    /// The quota and the key prefix of a grant of a limit or of an override; `None` if it is unlimited.
    #[inline]
    pub(crate) fn quota(&self, rule: usize, grant: u32) -> Option<(&CheckedQuota, &Family)> {
        self.quota_of(rule, &self.rules[rule], grant)
    }

    /// As [`Policy::quota`], for a caller that has looked up the limit.
    #[inline(always)]
    pub(crate) fn quota_of<'p>(
        &'p self,
        index: usize,
        rule: &'p Rule,
        grant: u32,
    ) -> Option<(&'p CheckedQuota, &'p Family)> {
        if grant & RUN_TIME == 0 { rule.quota(grant) } else { self.run_time_quota(index, grant) }
    }

    #[cold]
    fn run_time_quota(&self, rule: usize, grant: u32) -> Option<(&CheckedQuota, &Family)> {
        let table = self.overrides.0.as_deref().expect("the grant is an override's");
        let limit = table.limits[rule].as_deref().expect("the grant is an override's");
        match &limit.grants[(grant & !RUN_TIME) as usize] {
            Grant::Unlimited => None,
            Grant::Limited { quota, family } => Some((quota, family)),
        }
    }

    /// The quota of the override of a key, if its states have the prefix of this key.
    pub(crate) fn override_of(&self, key: Key<'_>) -> Option<&CheckedQuota> {
        let table = self.overrides.0.as_deref()?;
        let (index, _) = self.find(key.limit())?;
        let entry = table.find(index, &encoded(key))?;
        self.quota(index, entry.grant)
            .filter(|(_, family)| ***family == *key.family())
            .map(|(quota, _)| quota)
    }

    /// The quotas of all overrides that a key may have, if its states have the prefix of this key: of a key without
    /// values, which a receipt may hold, every one that its limit has or had.
    pub(crate) fn overrides_of(&self, key: Key<'_>) -> impl Iterator<Item = &CheckedQuota> {
        let has_values = key.values().next().is_some();
        let table = self.overrides.0.as_deref().filter(|_| !has_values);
        let limit = table.and_then(|table| table.limits.get(self.find(key.limit())?.0)?.as_deref());
        let all = limit.into_iter().flat_map(|limit| limit.grants.iter());
        let possible = all.filter_map(move |grant| match grant {
            Grant::Limited { quota, family } if **family == *key.family() => Some(quota),
            _ => None,
        });
        possible.chain(self.override_of(key))
    }

    fn one_fact(&self, limit: &str) -> Result<(usize, &Rule), InvalidOverride> {
        let found = self.find(limit).ok_or_else(|| InvalidOverride::UnknownLimit(limit.to_owned()))?;
        match found.1.by.len() {
            1 => Ok(found),
            facts => Err(InvalidOverride::NotOneFact { limit: limit.to_owned(), facts }),
        }
    }

    /// What an override grants under this limit: with the algorithm of the limit, and times the policy's share.
    fn override_grant(&self, rule: &Rule, allowance: Allowance) -> Result<Grant, LimitProblem> {
        let (times, of) = self.share;
        let share = |count: u64| {
            let part = u128::from(count) * u128::from(times) / u128::from(of);
            if count == 0 { 0 } else { u64::try_from(part).unwrap_or(u64::MAX).max(1) }
        };
        let allowance = match allowance {
            Allowance::Quota(quota) => Allowance::Quota(quota.map_counts(share)),
            other => other,
        };
        let ttl = rule.quota(REFUSED).expect("it refuses everything").0.period();
        compile::grant(&rule.name, rule.stagger, ttl, rule.algorithm, allowance)
    }
}

impl Table {
    #[inline]
    fn find(&self, rule: usize, values: &[u8]) -> Option<OverrideEntry> {
        self.limits.get(rule)?.as_ref()?.get(siphash::hash(&self.secret, values))
    }

    fn hash(&self, key: &str) -> u128 {
        let mut values = Vec::with_capacity(2 + key.len());
        key::push_value(Some(key.as_bytes()), |part| values.extend_from_slice(part));
        siphash::hash(&self.secret, &values)
    }
}

/// The values of a key as a toll encodes them.
fn encoded(key: Key<'_>) -> Vec<u8> {
    let mut values = Vec::new();
    key.values().for_each(|value| key::push_value(value, |part| values.extend_from_slice(part)));
    values
}

/// A time in seconds since the epoch as in RFC 3339: `2026-11-25T00:00:00Z`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UtcTime(pub u64);

impl fmt::Display for UtcTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (days, seconds) = (self.0 / 86_400, self.0 % 86_400);
        // The year begins in March, so that the leap day is its last. An era has 400 years.
        let shifted = days + 719_468;
        let (era, day) = (shifted / 146_097, shifted % 146_097);
        let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        let month = (5 * day + 2) / 153;
        let day = day - (153 * month + 2) / 5 + 1;
        let month = if month < 10 { month + 3 } else { month - 9 };
        let year = era * 400 + year + u64::from(month <= 2);
        let (hour, minute, second) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
        write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
    }
}

#[cfg(test)]
mod tests;
