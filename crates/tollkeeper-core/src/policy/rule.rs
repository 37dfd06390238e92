//! A compiled limit: decides whether it applies to a request, and what it grants.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::problem::{LimitProblem, Part};
use crate::facts::{self, DeclaredFact, DeclaredFacts, Facts, Scratch, Value};
use crate::key::{self, Family, Key};
use crate::limit::{Consistency, CostMissing, Missing, Mode, OnStoreFailure};
use crate::net::Network;
use crate::pattern::Condition;
use crate::quota::{Algorithm, CheckedQuota};
use crate::status::StatusSet;
use crate::time::Span;

/// A compiled limit.
#[derive(Clone, Debug)]
pub struct Rule {
    pub(crate) name: Box<str>,
    pub(crate) by: Box<[Box<str>]>,
    pub(crate) missing: Missing,
    pub(crate) mode: Mode,
    pub(crate) cost: Option<Box<str>>,
    pub(crate) cost_missing: CostMissing,
    pub(crate) stagger: bool,
    /// The index in `by` of the fact that decides on which server the state is stored.
    pub(crate) partition: Option<u8>,
    pub(super) on_store_failure: OnStoreFailure,
    pub(super) consistency: Consistency,
    /// The largest count of the quotas with each period.
    pub(super) largest: Box<[(Span, u64)]>,
    pub(super) hidden: bool,
    pub(super) deduct_when: Option<StatusSet>,
    pub(super) refund_when: Option<StatusSet>,
    pub(super) algorithm: Algorithm,
    pub(super) when: Vec<Condition>,
    pub(super) unless: Vec<Condition>,
    pub(super) allow: Allow,
    pub(super) tier: Option<Box<str>>,
    /// The index of each tier's grant.
    pub(super) tiers: BTreeMap<Box<str>, u32>,
    /// The index of each override's grant.
    pub(super) overrides: BTreeMap<Box<str>, u32>,
    /// Whether it applies to every request: it has no conditions, and is not off.
    pub(super) always_applies: bool,
    /// The index of the grant of every request that has its facts, which is not unlimited; `None` if that depends on
    /// the request, or if a fact is its cost.
    pub(super) common_grant: Option<u32>,
    /// Whether a fact that it is keyed by is declared.
    pub(super) is_declared: bool,
    /// Whether `overrides` and `allow` hold hashes, because the only fact that it is keyed by is hashed.
    pub(super) compares_hashes: bool,
    /// The index of the grant of the default tier, or of a limit without tiers.
    pub(super) default: u32,
    /// Every grant once; the first one of a configured limit refuses everything (`REFUSED`).
    pub(super) grants: Vec<Grant>,
}

/// The index of the grant that refuses everything, for requests without a fact under `missing: deny`.
pub(crate) const REFUSED: u32 = 0;

/// What a limit grants to a key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Grant {
    /// The limit does not apply.
    Unlimited,
    /// A quota, and the prefix of its keys.
    Limited {
        /// The quota.
        quota: CheckedQuota,
        /// The prefix of all keys with this quota's period.
        family: Family,
    },
}

impl Grant {
    /// The numbers that distinguish the grants of one limit.
    pub(super) fn numbers(&self) -> Option<(u64, u64, Span)> {
        match self {
            Grant::Unlimited => None,
            Grant::Limited { quota, .. } => Some((quota.count(), quota.burst(), quota.period())),
        }
    }
}

/// The grant of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Granted {
    /// The index of the grant.
    pub(crate) grant: u32,
    /// Whether the request named no tier, or one that is not listed.
    pub(crate) unknown_tier: bool,
}

/// The values that a limit never applies to.
#[derive(Clone, Debug)]
pub(super) enum Allow {
    Values(Vec<Box<str>>),
    Networks(Vec<Network>),
}

impl Allow {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Allow::Values(values) => values.is_empty(),
            Allow::Networks(networks) => networks.is_empty(),
        }
    }
}

impl Rule {
    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The facts it is keyed by.
    pub fn by(&self) -> &[Box<str>] {
        &self.by
    }

    /// Whether it is enforced.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The algorithm, the same for all tiers.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// The fact whose number is charged instead of the cost of the request, if there is one.
    pub fn cost_fact(&self) -> Option<&str> {
        self.cost.as_deref()
    }

    /// What happens to a request that lacks [`Rule::cost_fact`].
    pub fn cost_missing(&self) -> CostMissing {
        self.cost_missing
    }

    /// What it decides while the store does not answer.
    pub fn on_store_failure(&self) -> OnStoreFailure {
        self.on_store_failure
    }

    /// Whether a remote store is asked for every request.
    pub fn consistency(&self) -> Consistency {
        self.consistency
    }

    /// The largest count of the quotas with this period, so of those that share states.
    pub fn largest_count(&self, period: Span) -> u64 {
        self.largest.iter().find(|(of, _)| *of == period).map_or(0, |(_, count)| *count)
    }

    /// Whether headers may show it.
    pub fn shown(&self) -> bool {
        !self.hidden
    }

    /// Whether the status of the response decides about a refund.
    pub fn awaits_response(&self) -> bool {
        self.deduct_when.is_some() || self.refund_when.is_some()
    }

    /// Whether its charge is refunded after a response with this status.
    pub fn gives_back(&self, status: u16) -> bool {
        self.deduct_when.is_some_and(|kept| !kept.contains(status))
            || self.refund_when.is_some_and(|returned| returned.contains(status))
    }

    /// The facts that it uses: those it is keyed by, and those of its conditions, tier and cost.
    pub fn facts(&self) -> impl Iterator<Item = &str> {
        let conditions = self.when.iter().chain(&self.unless).map(|condition| condition.fact.as_str());
        let by = self.by.iter().chain(&self.tier).chain(&self.cost).map(|fact| &**fact);
        by.chain(conditions)
    }

    /// Whether it may need a fact that is still `open` (not known yet): it uses one, and the known facts do
    /// not rule out that it applies.
    pub fn needs(&self, facts: &Facts<'_>, open: impl Fn(&str) -> bool) -> bool {
        let excluded = |condition: &Condition| !open(&condition.fact) && condition.holds(facts);
        self.mode != Mode::Off
            && self.facts().any(&open)
            && self.when.iter().all(|condition| open(&condition.fact) || condition.holds(facts))
            && (self.unless.is_empty() || !self.unless.iter().all(excluded))
            && !self.allows(facts)
    }

    /// The patterns of `when` for a fact.
    pub fn patterns<'r>(&'r self, fact: &str) -> impl Iterator<Item = &'r str> {
        let of_fact = self.when.iter().filter(move |condition| condition.fact == fact);
        of_fact.flat_map(|condition| &condition.patterns).map(String::as_str)
    }

    /// All its grants, each once.
    pub fn grants(&self) -> &[Grant] {
        &self.grants
    }

    /// What each tier grants, by its name.
    pub fn tiers(&self) -> impl Iterator<Item = (&str, &Grant)> {
        self.tiers.iter().map(|(name, grant)| (&**name, &self.grants[*grant as usize]))
    }

    /// What each override grants, by the value of its key: the hash if the fact is hashed.
    pub fn overrides(&self) -> impl Iterator<Item = (&str, &Grant)> {
        self.overrides.iter().map(|(value, grant)| (&**value, &self.grants[*grant as usize]))
    }

    /// What the default tier grants, or a limit without tiers.
    pub fn default_tier(&self) -> &Grant {
        &self.grants[self.default as usize]
    }

    /// By how many microseconds the windows of the key with these values start earlier than epoch-aligned ones.
    pub fn shift<'v>(&self, grant: &Grant, values: impl IntoIterator<Item = Option<&'v str>>) -> u64 {
        let Grant::Limited { quota, family } = grant else { return 0 };
        let mut encoded = Vec::new();
        for value in values {
            key::push_value(value.map(str::as_bytes), |part| encoded.extend_from_slice(part));
        }
        self.shift_of(quota, || Key::new(family, &encoded))
    }

    /// By how much the windows of a key start earlier than epoch-aligned ones. A quota of `0/s` has no windows.
    #[inline]
    pub(crate) fn shift_of<'k>(&self, quota: &CheckedQuota, key: impl FnOnce() -> Key<'k>) -> u64 {
        if self.stagger && quota.count() > 0 { key().stagger() } else { 0 }
    }

    /// The quota and the key prefix of a grant, by its index; `None` if it is unlimited.
    #[inline(always)]
    pub(crate) fn quota(&self, grant: u32) -> Option<(&CheckedQuota, &Family)> {
        match &self.grants[grant as usize] {
            Grant::Unlimited => None,
            Grant::Limited { quota, family } => Some((quota, family)),
        }
    }

    /// The same key with the partition of this limit, which decides on which server its state is stored.
    #[inline(always)]
    pub fn place<'k>(&self, key: Key<'k>) -> Key<'k> {
        key.parted(self.partition)
    }

    /// The quota of a request without a tier and without an override, and the prefix of its keys; `None` if
    /// it is unlimited.
    #[inline]
    pub fn plain_quota(&self) -> Option<(&CheckedQuota, &Family)> {
        self.quota(self.default)
    }

    /// The grant behind [`Rule::plain_quota`].
    #[inline]
    pub(crate) fn default_grant(&self) -> u32 {
        self.default
    }

    /// The quotas whose keys have this prefix, so that they share states.
    pub(crate) fn quotas_of(&self, family: &[u8]) -> impl Iterator<Item = &CheckedQuota> {
        self.limited().filter(move |(_, other)| *other == family).map(|(quota, _)| quota)
    }

    /// The quotas that keep states, with the prefixes of their keys.
    pub(super) fn limited(&self) -> impl Iterator<Item = (&CheckedQuota, &[u8])> {
        self.grants.iter().filter_map(|grant| match grant {
            Grant::Limited { quota, family } if quota.count() > 0 => Some((quota, &**family)),
            _ => None,
        })
    }

    /// Whether every key that an earlier version of this limit has counted goes on with its count: it is keyed by the
    /// same facts, and every period and the algorithm are still used.
    pub fn keeps_counts_of(&self, earlier: &Rule) -> bool {
        let used = |family: &[u8]| self.limited().any(|(_, other)| other == family);
        self.by == earlier.by && earlier.limited().all(|(_, family)| used(family))
    }

    /// Whether the text of one fact alone decides the key and the quota of a request, as a prepared handle
    /// requires. An IP address is keyed by its prefix, and a declared fact by its normalised value or hash,
    /// so their text alone is not enough.
    pub fn is_plain(&self) -> bool {
        self.only_fact().is_some_and(|fact| fact != facts::IP) && !self.is_declared
    }

    /// The fact whose value alone decides the key and the quota of a request, if there is one.
    pub fn only_fact(&self) -> Option<&str> {
        let [fact] = &*self.by else { return None };
        let has_one_grant = self.tier.is_none() && self.overrides.is_empty() && self.cost.is_none();
        let has_rate = self.algorithm != Algorithm::Concurrency;
        (self.always_applies && has_one_grant && has_rate).then_some(fact)
    }

    /// Whether it applies to every request that has its facts, except for the values in `allow`.
    pub(super) fn is_unconditional(&self) -> bool {
        self.mode != Mode::Off && self.when.is_empty() && self.unless.is_empty()
    }

    /// The index of the grant of every request that has its facts, which is charged the cost of the request; `None` if
    /// that depends on the request. Overrides at run time are not considered.
    #[inline]
    pub(crate) fn common_grant(&self) -> Option<u32> {
        self.common_grant
    }

    /// Whether the limit applies to a request with these facts.
    #[inline]
    pub(crate) fn applies(&self, facts: &Facts<'_>) -> bool {
        self.always_applies || self.matches(facts)
    }

    fn matches(&self, facts: &Facts<'_>) -> bool {
        self.mode != Mode::Off
            && self.when.iter().all(|condition| condition.holds(facts))
            && (self.unless.is_empty() || !self.unless.iter().all(|condition| condition.holds(facts)))
            && !self.allows(facts)
    }

    /// Whether a request with these facts is exempt from the limit by `allow`.
    pub(super) fn allows(&self, facts: &Facts<'_>) -> bool {
        match (&self.allow, self.by.first().and_then(|fact| facts.get(fact))) {
            (Allow::Values(values), Some(value)) => {
                let mut scratch: Scratch = [0; 48];
                let text = self.compared(value, &mut scratch);
                values.iter().any(|allowed| **allowed == *text)
            }
            (Allow::Networks(networks), Some(Value::Ip(ip))) => {
                networks.iter().any(|network| network.contains(*ip))
            }
            _ => false,
        }
    }

    /// The index of the grant of the override for these facts, if there is one.
    pub(super) fn overridden(&self, facts: &Facts<'_>) -> Option<u32> {
        if self.overrides.is_empty() {
            return None;
        }
        let value = self.by.first().and_then(|fact| facts.get(fact))?;
        self.overrides.get(self.compared(value, &mut [0; 48])).copied()
    }

    /// The text of a value that is compared with `overrides` and `allow`.
    fn compared<'s>(&self, value: &'s Value<'_>, scratch: &'s mut Scratch) -> &'s str {
        match value {
            Value::Hashed(hashed) if self.compares_hashes => &hashed.hash,
            value => value.text(scratch),
        }
    }

    /// The same rule with these declared facts: raw values in the config become the values that limits see.
    pub(super) fn declaring(
        &self,
        facts: &DeclaredFacts,
        report: &mut dyn FnMut(Part, LimitProblem),
    ) -> Rule {
        let mut rule = self.clone();
        rule.is_declared = rule.by.iter().any(|fact| facts.get(fact).is_some());
        let [Some(fact)] = &*rule.by.iter().map(|fact| facts.get(fact)).collect::<Vec<_>>() else {
            return rule;
        };
        rule.compares_hashes = fact.is_hashed();
        let mut overrides = BTreeMap::new();
        for (raw, grant) in rule.overrides {
            if overrides.insert(identified(fact, &raw), grant).is_some() {
                report(Part::Override(raw.to_string()), LimitProblem::Twice(raw.to_string()));
            }
        }
        rule.overrides = overrides;
        if let Allow::Values(values) = &mut rule.allow {
            values.iter_mut().for_each(|value| *value = identified(fact, value));
        }
        rule
    }

    /// The grant for these facts: that of an override, else of the tier, else the default.
    pub(crate) fn granted(&self, facts: &Facts<'_>) -> Granted {
        if let Some(grant) = self.overridden(facts) {
            return Granted { grant, unknown_tier: false };
        }
        let Some(fact) = &self.tier else {
            return Granted { grant: self.default, unknown_tier: false };
        };
        let mut scratch: Scratch = [0; 48];
        match facts.get(fact).and_then(|value| self.tiers.get(value.text(&mut scratch))) {
            Some(grant) => Granted { grant: *grant, unknown_tier: false },
            None => Granted { grant: self.default, unknown_tier: true },
        }
    }
}

/// The value that limits see for a raw value of the config: the hash if the fact is hashed.
fn identified(fact: &DeclaredFact, raw: &str) -> Box<str> {
    match fact.read(Cow::Borrowed(raw.as_bytes())) {
        Value::Hashed(hashed) => hashed.hash,
        value => value.to_string().into(),
    }
}
