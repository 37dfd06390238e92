//! The policy: all active limits, validated, immutable and versioned.
//!
//! Building a policy reports every mistake at once. A policy holds validated quotas, resolved tiers and
//! parsed addresses, so nothing is checked again when a request is decided.

mod compile;
mod explain;
mod key_quotas;
mod overrides;
mod problem;
mod rule;

use core::net::IpAddr;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::facts::{self, DeclaredFact, DeclaredFacts, Facts, Scratch, Value};
use crate::invalid_request::InvalidRequest;
use crate::key::{self, Family, Key};
use crate::limit::{Consistency, CostMissing, Limit, Missing, Mode, OnStoreFailure};
use crate::net;
use crate::quota::CheckedQuota;
use crate::toll::MAX_DUES;

pub use explain::{Applicability, CostSource, Explanation, QuotaSource};
pub use key_quotas::KeyQuota;
use overrides::Overrides;
pub use overrides::{InvalidOverride, Override, UtcTime};
pub use problem::{InvalidLimit, InvalidPolicy, LimitProblem, Part};
use rule::Allow;
pub(crate) use rule::REFUSED;
pub use rule::{Grant, Rule};

/// The active limits. Cheap to clone: clones share the limits.
#[derive(Clone, Debug)]
pub struct Policy {
    version: u64,
    ipv6_prefix: u8,
    declared: DeclaredFacts,
    rules: Arc<[Rule]>,
    /// Numerator and denominator of the part of every quota that applies here.
    share: (u64, u64),
    overrides: Overrides,
}

impl Policy {
    /// The version of every policy made by [`Policy::of_one`]. Other policies count from 1.
    pub const AD_HOC: u64 = 0;

    /// Validates and compiles limits; the error lists every mistake.
    pub fn new(limits: Vec<Limit>) -> Result<Policy, InvalidPolicy> {
        let mut problems = Vec::new();
        let mut rules: Vec<Rule> = Vec::with_capacity(limits.len());
        let mut names = BTreeSet::new();
        for (index, limit) in limits.into_iter().enumerate() {
            let mut report = |part, problem| {
                problems.push(InvalidLimit { index, name: limit.name.clone(), part, problem });
            };
            if !names.insert(limit.name.clone()) {
                report(Part::Name, LimitProblem::DuplicateName);
            }
            rules.push(Rule::new(&limit, &mut report));
        }
        if problems.is_empty()
            && let Some((index, rule)) = first_beyond_max_dues(&rules)
        {
            let (name, part, problem) = (rule.name.to_string(), Part::Name, LimitProblem::TooManyApply);
            problems.push(InvalidLimit { index, name, part, problem });
        }
        if problems.is_empty() {
            Ok(Policy {
                version: 1,
                ipv6_prefix: 64,
                declared: DeclaredFacts::default(),
                rules: rules.into(),
                share: (1, 1),
                overrides: Overrides::default(),
            })
        } else {
            Err(InvalidPolicy(problems))
        }
    }

    /// A policy of one ad-hoc limit, whose quota came with a request instead of the config. It is keyed by
    /// one value. Its name need not be valid in a config.
    pub fn of_one(name: &str, quota: CheckedQuota, on_store_failure: OnStoreFailure) -> Policy {
        let family = Family::new(name, quota.algorithm(), false, quota.period());
        let rule = Rule {
            name: name.into(),
            by: Box::new(["key".into()]),
            missing: Missing::Skip,
            mode: Mode::Enforce,
            cost: None,
            cost_missing: CostMissing::Error,
            stagger: false,
            partition: None,
            on_store_failure,
            consistency: Consistency::Exact,
            largest: Box::new([(quota.period(), quota.count())]),
            hidden: false,
            deduct_when: None,
            refund_when: None,
            algorithm: quota.algorithm(),
            when: Vec::new(),
            unless: Vec::new(),
            allow: Allow::Values(Vec::new()),
            tier: None,
            tiers: BTreeMap::new(),
            overrides: BTreeMap::new(),
            always_applies: true,
            common_grant: Some(0),
            is_declared: false,
            compares_hashes: false,
            default: 0,
            grants: vec![Grant::Limited { quota, family }],
        };
        Policy {
            version: Policy::AD_HOC,
            ipv6_prefix: 64,
            declared: DeclaredFacts::default(),
            rules: Arc::new([rule]),
            share: (1, 1),
            overrides: Overrides::default(),
        }
    }

    /// The same policy with this version.
    #[must_use]
    pub fn with_version(self, version: u64) -> Policy {
        Policy { version, ..self }
    }

    /// The same policy, keying IPv6 addresses by their first `prefix` bits: 64 by default.
    #[must_use]
    pub fn with_ipv6_prefix(self, prefix: u8) -> Policy {
        Policy { ipv6_prefix: prefix.min(128), ..self }
    }

    /// The same policy, whose limits have this part of their quotas; overrides get the same part of theirs.
    #[must_use]
    pub fn with_share(self, times: u64, of: u64) -> Policy {
        Policy { share: (times, of.max(1)), ..self }
    }

    /// How many bits of an IPv6 address are part of the key.
    pub fn ipv6_prefix(&self) -> u8 {
        self.ipv6_prefix
    }

    /// The same policy, which normalises or hashes the raw values of these facts. The values in `overrides` and
    /// `allow` are raw values, too. A policy that already declares facts is returned unchanged.
    pub fn declaring(self, facts: impl IntoIterator<Item = DeclaredFact>) -> Result<Policy, InvalidPolicy> {
        let declared = DeclaredFacts::new(facts);
        if declared.is_empty() || !self.declared.is_empty() {
            return Ok(self);
        }
        let mut problems = Vec::new();
        let rules = self.rules.iter().enumerate().map(|(index, rule)| {
            rule.declaring(&declared, &mut |part, problem| {
                problems.push(InvalidLimit { index, name: rule.name.to_string(), part, problem });
            })
        });
        let rules = rules.collect();
        if problems.is_empty() {
            Ok(Policy { declared, rules, ..self })
        } else {
            Err(InvalidPolicy(problems))
        }
    }

    /// The facts whose raw values are normalised or hashed.
    pub fn declared(&self) -> &DeclaredFacts {
        &self.declared
    }

    /// The version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The limits, in the order of their definition.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// The limit with this name, and its index.
    pub fn find(&self, name: &str) -> Option<(usize, &Rule)> {
        self.rules.iter().enumerate().find(|(_, rule)| *rule.name == *name)
    }

    /// Every key that a request with these facts can have at a limit: one for each period among its tiers
    /// and overrides. All facts that the limit is keyed by must be present, unless requests without them
    /// share a key (`missing: share`).
    pub fn keys(&self, limit: &str, facts: &Facts<'_>) -> Result<Vec<Box<[u8]>>, InvalidRequest> {
        let (index, rule, values) = self.key_values(limit, facts)?;
        let overridden = self.overridden(index, &values).and_then(|grant| self.quota(index, grant));
        let limited = rule.limited().chain(
            overridden.filter(|(quota, _)| quota.count() > 0).map(|(quota, family)| (quota, &**family)),
        );
        let mut keys: Vec<Box<[u8]>> =
            limited.map(|(_, family)| [family, &values].concat().into_boxed_slice()).collect();
        keys.sort_unstable();
        keys.dedup();
        Ok(keys)
    }

    /// The values of the key that these facts make at a limit, one for each fact in its `by`. As for [`Policy::keys`],
    /// they must be present.
    pub fn key_texts(&self, limit: &str, facts: &Facts<'_>) -> Result<Vec<Option<String>>, InvalidRequest> {
        let (_, rule, values) = self.key_values(limit, facts)?;
        let (_, family) = rule.quota(REFUSED).expect("it refuses everything, so it is limited");
        Ok(Key::new(family, &values).texts().map(|text| text.map(str::to_owned)).collect())
    }

    /// The limit of this name, its index, and the encoded values of its key for these facts.
    fn key_values(
        &self,
        limit: &str,
        facts: &Facts<'_>,
    ) -> Result<(usize, &Rule, Box<[u8]>), InvalidRequest> {
        let identified = self.identify(facts)?;
        let facts = identified.as_deref().unwrap_or(facts);
        let (index, rule) = self.find(limit).ok_or_else(|| InvalidRequest::UnknownLimit(limit.to_owned()))?;
        let absent = rule.by.iter().filter(|fact| facts.get(fact).is_none());
        let absent: Vec<String> = absent.map(ToString::to_string).collect();
        if !absent.is_empty() && rule.missing != Missing::Share {
            return Err(InvalidRequest::KeyFacts { limit: limit.to_owned(), absent });
        }
        let mut values = Vec::new();
        for fact in &rule.by {
            let mut scratch: Scratch = [0; 48];
            let value = facts.get(fact).map(|value| self.keyed(fact, value, &mut scratch));
            key::push_value(value, |part| values.extend_from_slice(part));
        }
        Ok((index, rule, values.into()))
    }

    /// Validates facts, and normalises and hashes the declared ones: the facts that limits see, or `None` if those are
    /// `facts`.
    #[inline]
    pub(crate) fn identify<'a>(&self, facts: &Facts<'a>) -> Result<Option<Box<Facts<'a>>>, InvalidRequest> {
        if facts.are_ordinary() && self.declared.is_empty() { Ok(None) } else { self.identify_all(facts) }
    }

    #[inline(never)]
    fn identify_all<'a>(&self, facts: &Facts<'a>) -> Result<Option<Box<Facts<'a>>>, InvalidRequest> {
        facts.check().and_then(|()| self.declared.identify(facts)).map_err(InvalidRequest::Fact)
    }

    /// The text of a fact's value in a key. An IPv6 address is reduced to its prefix, because a client can choose
    /// the other bits freely.
    #[inline]
    pub fn keyed<'s>(&self, name: &str, value: &'s Value<'_>, scratch: &'s mut Scratch) -> &'s [u8] {
        match value {
            Value::Ip(ip @ IpAddr::V6(_)) if name == facts::IP => self.ipv6_network(*ip, scratch),
            Value::Hashed(hashed) => hashed.hash.as_bytes(),
            Value::Ip(IpAddr::V4(ip)) => facts::ipv4_into(*ip, scratch),
            _ => value.text(scratch).as_bytes(),
        }
    }

    // Not inlined: the mask would be computed for every fact, before its type is known.
    #[inline(never)]
    fn ipv6_network<'s>(&self, ip: IpAddr, scratch: &'s mut Scratch) -> &'s [u8] {
        facts::format_into(scratch, format_args!("{}", net::mask(ip, self.ipv6_prefix))).as_bytes()
    }
}

/// The first limit with which some request would match more than [`MAX_DUES`] limits. Only counts unconditional
/// limits, those keyed by no fact and those keyed by the same facts: whether a limit with `when` or `unless` applies
/// depends on the request.
fn first_beyond_max_dues(rules: &[Rule]) -> Option<(usize, &Rule)> {
    let (mut for_all, mut by_facts) = (0, BTreeMap::<&[Box<str>], usize>::new());
    let mut most_by_facts = 0;
    rules.iter().enumerate().find(|(_, rule)| {
        if !rule.is_unconditional() {
            return false;
        }
        if rule.by.is_empty() {
            for_all += 1;
        } else {
            let count = by_facts.entry(&rule.by).or_default();
            *count += 1;
            most_by_facts = most_by_facts.max(*count);
        }
        for_all + most_by_facts > MAX_DUES
    })
}

#[cfg(test)]
mod tests;
