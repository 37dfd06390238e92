//! The policy: all limits in force, checked, immutable, with a version.
//!
//! Making one reports every mistake at once. What comes out is the meaning of what was written: quotas
//! that fit, tiers that resolve, addresses that parse. From then on nothing is checked again.

mod explain;

use core::fmt;
use core::net::IpAddr;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::facts::{self, Facts, Scratch, Value};
use crate::key::{self, Key};
use crate::limit::{Base, Limit, Missing, Mode, OnStoreFailure};
use crate::net::{self, InvalidNetwork, Network};
use crate::pattern::Condition;
use crate::quota::{Algorithm, Allowance, InvalidQuota, Quota, Rate};
use crate::status::StatusSet;
use crate::time::Span;
use crate::toll::InvalidRequest;

pub use explain::{Explanation, Standing, Through};

/// The limits in force. Cheap to clone: clones share the limits.
#[derive(Clone, Debug)]
pub struct Policy {
    version: u64,
    ipv6_prefix: u8,
    rules: Arc<[Rule]>,
}

impl Policy {
    /// Checks limits and compiles them; on failure says everything that is wrong with them.
    pub fn new(limits: Vec<Limit>) -> Result<Policy, InvalidPolicy> {
        let mut problems = Vec::new();
        let mut rules: Vec<Rule> = Vec::with_capacity(limits.len());
        let mut names = BTreeSet::new();
        for (index, limit) in limits.into_iter().enumerate() {
            let mut report = |part, problem| {
                problems.push(InvalidLimit { index, name: limit.name.clone(), part, problem });
            };
            if !names.insert(limit.name.clone()) {
                report(Part::Name, Problem::DuplicateName);
            }
            rules.push(Rule::new(&limit, &mut report));
        }
        if problems.is_empty() {
            Ok(Policy { version: 1, ipv6_prefix: 64, rules: rules.into() })
        } else {
            Err(InvalidPolicy(problems))
        }
    }

    /// A policy of one limit that nobody wrote: its quota came along with a request, and one value is its
    /// key. Its name need not be one that can be written.
    pub fn of_one(name: &str, quota: Quota, on_store_failure: OnStoreFailure) -> Policy {
        let family = key::family(name, quota.algorithm(), false, quota.period());
        let rule = Rule {
            name: name.into(),
            by: Box::new(["key".into()]),
            missing: Missing::Skip,
            mode: Mode::Enforce,
            cost: None,
            stagger: false,
            partition: None,
            on_store_failure,
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
            default: 0,
            grants: vec![Grant::Limited { quota, family }],
        };
        Policy { version: 1, ipv6_prefix: 64, rules: Arc::new([rule]) }
    }

    /// The same policy under this version.
    #[must_use]
    pub fn with_version(self, version: u64) -> Policy {
        Policy { version, ..self }
    }

    /// The same policy, keying IPv6 addresses by their first `prefix` bits: 64 unless said otherwise.
    #[must_use]
    pub fn with_ipv6_prefix(self, prefix: u8) -> Policy {
        Policy { ipv6_prefix: prefix.min(128), ..self }
    }

    /// How many bits of an IPv6 address are a key.
    pub fn ipv6_prefix(&self) -> u8 {
        self.ipv6_prefix
    }

    /// The version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The limits, in the order they were written.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// The limit of that name, and its place.
    pub fn find(&self, name: &str) -> Option<(usize, &Rule)> {
        self.rules.iter().enumerate().find(|(_, rule)| *rule.name == *name)
    }

    /// Every key that a request with these facts can have at a limit: one for each period among its
    /// tiers and overrides.
    pub fn keys(&self, limit: &str, facts: &Facts<'_>) -> Result<Vec<Box<[u8]>>, InvalidRequest> {
        facts.check().map_err(InvalidRequest::Fact)?;
        let (_, rule) = self.find(limit).ok_or_else(|| InvalidRequest::UnknownLimit(limit.to_owned()))?;
        let mut values = Vec::new();
        for fact in &rule.by {
            let mut scratch: Scratch = [0; 48];
            let value = facts.get(fact).map(|value| self.keyed(fact, value, &mut scratch));
            key::push_value(value, |part| values.extend_from_slice(part));
        }
        let mut keys: Vec<Box<[u8]>> =
            rule.limited().map(|(_, family)| [family, &values].concat().into_boxed_slice()).collect();
        keys.sort_unstable();
        keys.dedup();
        Ok(keys)
    }

    /// The value of a fact as keys hold it, which is text: an IPv6 address without the bits its owner can choose.
    #[inline]
    pub fn keyed<'s>(&self, name: &str, value: &'s Value<'_>, scratch: &'s mut Scratch) -> &'s [u8] {
        match value {
            Value::Ip(ip @ IpAddr::V6(_)) if name == facts::IP => {
                facts::written(scratch, format_args!("{}", net::mask(*ip, self.ipv6_prefix))).as_bytes()
            }
            Value::Hashed(hashed) => hashed.hash.as_bytes(),
            Value::Ip(IpAddr::V4(ip)) => facts::ipv4(*ip, scratch),
            _ => value.text(scratch).as_bytes(),
        }
    }
}

/// A limit as it is applied.
#[derive(Debug)]
pub struct Rule {
    pub(crate) name: Box<str>,
    pub(crate) by: Box<[Box<str>]>,
    pub(crate) missing: Missing,
    pub(crate) mode: Mode,
    pub(crate) cost: Option<Box<str>>,
    pub(crate) stagger: bool,
    /// Which of `by` decides where counts are kept.
    pub(crate) partition: Option<u8>,
    on_store_failure: OnStoreFailure,
    hidden: bool,
    deduct_when: Option<StatusSet>,
    refund_when: Option<StatusSet>,
    algorithm: Algorithm,
    when: Vec<Condition>,
    unless: Vec<Condition>,
    allow: Allow,
    tier: Option<Box<str>>,
    tiers: BTreeMap<Box<str>, u32>,
    overrides: BTreeMap<Box<str>, u32>,
    /// The grant of the default tier, or of the limit without tiers.
    default: u32,
    grants: Vec<Grant>,
}

/// The grant of a request that lacks a fact it may not lack.
pub(crate) const REFUSED: u32 = 0;

/// What a key is granted.
#[derive(Debug, PartialEq, Eq)]
pub enum Grant {
    /// The limit does not apply.
    Unlimited,
    /// A quota, and what its keys begin with.
    Limited {
        /// The quota.
        quota: Quota,
        /// What keys under this quota's period begin with.
        family: Box<[u8]>,
    },
}

impl Grant {
    /// What tells the grants of one limit apart.
    fn numbers(&self) -> Option<(u64, u64, Span)> {
        match self {
            Grant::Unlimited => None,
            Grant::Limited { quota, .. } => Some((quota.count(), quota.burst(), quota.period())),
        }
    }
}

/// Which grant a request gets, and how it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Granted {
    pub(crate) grant: u32,
    /// The request named a tier that is not listed, or none.
    pub(crate) unknown_tier: bool,
}

#[derive(Debug)]
enum Allow {
    Values(Vec<Box<str>>),
    Networks(Vec<Network>),
}

impl Allow {
    #[inline]
    fn is_empty(&self) -> bool {
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

    /// Whether its verdict counts.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The algorithm, the same for all tiers.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// The fact whose number is charged instead of the cost of the request.
    pub fn cost_fact(&self) -> Option<&str> {
        self.cost.as_deref()
    }

    /// Who answers when the store does not.
    pub fn on_store_failure(&self) -> OnStoreFailure {
        self.on_store_failure
    }

    /// Whether headers may show it.
    pub fn shown(&self) -> bool {
        !self.hidden
    }

    /// Whether a response decides that its charge is given back.
    pub fn awaits_response(&self) -> bool {
        self.deduct_when.is_some() || self.refund_when.is_some()
    }

    /// Whether its charge is given back after a response of this status.
    pub fn gives_back(&self, status: u16) -> bool {
        self.deduct_when.is_some_and(|kept| !kept.contains(status))
            || self.refund_when.is_some_and(|returned| returned.contains(status))
    }

    /// The facts that it names: what it is keyed by, its conditions, its tier, its cost.
    pub fn facts(&self) -> impl Iterator<Item = &str> {
        let conditions = self.when.iter().chain(&self.unless).map(|condition| condition.fact.as_str());
        let by = self.by.iter().chain(&self.tier).chain(&self.cost).map(|fact| &**fact);
        by.chain(conditions)
    }

    /// Whether it needs a fact that is still `open`, as far as the other facts tell: it names one, and
    /// nothing that is known keeps it from applying.
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

    /// Everything it can grant.
    pub fn grants(&self) -> &[Grant] {
        &self.grants
    }

    /// The grant of that place.
    #[inline]
    pub(crate) fn quota(&self, grant: u32) -> Option<(&Quota, &[u8])> {
        match &self.grants[grant as usize] {
            Grant::Unlimited => None,
            Grant::Limited { quota, family } => Some((quota, family)),
        }
    }

    /// The same key, which knows where its count is kept.
    #[inline]
    pub fn place<'k>(&self, key: Key<'k>) -> Key<'k> {
        key.parted(self.partition)
    }

    /// What a request without a tier and without an override gets, and what its keys begin with; nothing
    /// if that is unlimited.
    #[inline]
    pub fn plain_quota(&self) -> Option<(&Quota, &[u8])> {
        self.quota(self.default)
    }

    /// The quotas whose keys begin like this, so that their states are the same.
    pub(crate) fn quotas_of(&self, family: &[u8]) -> impl Iterator<Item = &Quota> {
        self.limited().filter(move |(_, other)| *other == family).map(|(quota, _)| quota)
    }

    /// The quotas that keep states, with what their keys begin with.
    fn limited(&self) -> impl Iterator<Item = (&Quota, &[u8])> {
        self.grants.iter().filter_map(|grant| match grant {
            Grant::Limited { quota, family } if quota.count() > 0 => Some((quota, &**family)),
            _ => None,
        })
    }

    /// Whether nothing but the text of one fact decides what a request meets here: what a prepared
    /// handle needs. An address is more than its text.
    pub fn is_plain(&self) -> bool {
        self.only_fact().is_some_and(|fact| fact != facts::IP)
    }

    /// The fact whose value alone decides what a request meets here, if it is so.
    pub fn only_fact(&self) -> Option<&str> {
        let [fact] = &*self.by else { return None };
        let unconditional = self.when.is_empty() && self.unless.is_empty() && self.mode != Mode::Off;
        let one_grant = self.tier.is_none() && self.overrides.is_empty() && self.cost.is_none();
        let is_rate = self.algorithm != Algorithm::Concurrency;
        (unconditional && self.allow.is_empty() && one_grant && is_rate).then_some(fact)
    }

    /// Whether the limit has anything to say to a request with these facts.
    #[inline]
    pub(crate) fn applies(&self, facts: &Facts<'_>) -> bool {
        self.mode != Mode::Off
            && self.when.iter().all(|condition| condition.holds(facts))
            && (self.unless.is_empty() || !self.unless.iter().all(|condition| condition.holds(facts)))
            && !self.allows(facts)
    }

    fn allows(&self, facts: &Facts<'_>) -> bool {
        if self.allow.is_empty() {
            return false;
        }
        match (&self.allow, self.by.first().and_then(|fact| facts.get(fact))) {
            (Allow::Values(values), Some(value)) => {
                let mut scratch: Scratch = [0; 48];
                let text = value.text(&mut scratch);
                values.iter().any(|allowed| **allowed == *text)
            }
            (Allow::Networks(networks), Some(Value::Ip(ip))) => {
                networks.iter().any(|network| network.contains(*ip))
            }
            _ => false,
        }
    }

    /// Override before tier before default.
    #[inline]
    pub(crate) fn granted(&self, facts: &Facts<'_>) -> Granted {
        let mut scratch: Scratch = [0; 48];
        if !self.overrides.is_empty()
            && let Some(value) = self.by.first().and_then(|fact| facts.get(fact))
            && let Some(grant) = self.overrides.get(value.text(&mut scratch))
        {
            return Granted { grant: *grant, unknown_tier: false };
        }
        let Some(fact) = &self.tier else {
            return Granted { grant: self.default, unknown_tier: false };
        };
        match facts.get(fact).and_then(|value| self.tiers.get(value.text(&mut scratch))) {
            Some(grant) => Granted { grant: *grant, unknown_tier: false },
            None => Granted { grant: self.default, unknown_tier: true },
        }
    }

    /// Compiles what was written and reports what is wrong with it; what it returns then is never used.
    fn new(limit: &Limit, report: &mut impl FnMut(Part, Problem)) -> Rule {
        if !is_limit_name(&limit.name) {
            report(Part::Name, Problem::Name);
        }
        check_facts(limit, report);
        check_shape(limit, report);
        let algorithm = chosen_algorithm(limit);
        if limit.stagger && algorithm != Algorithm::FixedWindow {
            report(Part::Stagger, Problem::StaggerWithout(algorithm));
        }
        if matches!(algorithm, Algorithm::LeakyBucket | Algorithm::Concurrency) {
            for (part, key, condition) in [
                (Part::DeductWhen, "deduct_when", limit.deduct_when),
                (Part::RefundWhen, "refund_when", limit.refund_when),
            ] {
                if condition.is_some() {
                    report(part, Problem::GivesNothingBack(key, algorithm));
                }
            }
        }
        let mut grants = vec![nothing(limit, algorithm)];
        // Overrides can be many, and mostly have few grants between them.
        let mut places = BTreeMap::from([(grants[0].numbers(), 0)]);
        let mut place = |part: &Part, allowance: Allowance, report: &mut dyn FnMut(Part, Problem)| -> u32 {
            let grant = match compiled(limit, algorithm, allowance) {
                Ok(grant) => grant,
                Err(problem) => {
                    report(part.clone(), problem);
                    return REFUSED;
                }
            };
            let place = *places.entry(grant.numbers()).or_insert_with(|| {
                grants.push(grant);
                grants.len() - 1
            });
            u32::try_from(place).expect("fewer than 2^32 tiers and overrides fit in memory")
        };
        let mut tiers = BTreeMap::new();
        for (name, allowance) in &limit.tiers {
            let part = Part::Tier(name.clone());
            let grant = place(&part, *allowance, report);
            if tiers.insert(name.as_str().into(), grant).is_some() {
                report(part, Problem::Twice(name.clone()));
            }
        }
        let mut overrides = BTreeMap::new();
        for (value, allowance) in &limit.overrides {
            let part = Part::Override(value.clone());
            let grant = place(&part, *allowance, report);
            let Some(value) = compared(limit, value) else {
                report(part, Problem::Address(value.clone()));
                continue;
            };
            if overrides.insert(value.as_str().into(), grant).is_some() {
                report(part, Problem::Twice(value));
            }
        }
        let (tier, default) = match &limit.base {
            Base::Flat(allowance) => (None, place(&Part::Rate, *allowance, report)),
            Base::Tiered(fact) => {
                let default = limit.default_tier.as_deref().and_then(|name| tiers.get(name).copied());
                (Some(fact.as_str().into()), default.unwrap_or(REFUSED))
            }
        };
        let allow = if is_by_ip(limit) {
            let network = |text: &String| {
                text.parse().map_err(|_| report(Part::Allow, Problem::Network(text.clone()))).ok()
            };
            Allow::Networks(limit.allow.iter().filter_map(network).collect())
        } else {
            Allow::Values(limit.allow.iter().map(|value| value.as_str().into()).collect())
        };
        Rule {
            name: limit.name.as_str().into(),
            by: limit.by.iter().map(|fact| fact.as_str().into()).collect(),
            missing: limit.missing,
            mode: limit.mode,
            cost: limit.cost.as_deref().map(Into::into),
            stagger: limit.stagger,
            partition: partition(limit, report),
            on_store_failure: limit.on_store_failure,
            hidden: limit.hidden,
            deduct_when: limit.deduct_when,
            refund_when: limit.refund_when,
            algorithm,
            when: limit.when.clone(),
            unless: limit.unless.clone(),
            allow,
            tier,
            tiers,
            overrides,
            default,
            grants,
        }
    }
}

/// The place in `by` of the fact that decides where counts are kept.
fn partition(limit: &Limit, report: &mut impl FnMut(Part, Problem)) -> Option<u8> {
    let fact = limit.partition.as_ref()?;
    let place = limit
        .by
        .iter()
        .position(|by| by == fact)
        .and_then(|place| u8::try_from(place).ok())
        .filter(|place| *place < 126);
    if place.is_none() {
        report(Part::Partition, Problem::PartitionNotInBy(fact.clone()));
    }
    place
}

/// The algorithm belongs to the limit, never to a tier: as written, else by what is granted.
fn chosen_algorithm(limit: &Limit) -> Algorithm {
    let any = |test: fn(&Allowance) -> bool| {
        let flat = if let Base::Flat(allowance) = &limit.base { Some(allowance) } else { None };
        let listed = limit.tiers.iter().chain(&limit.overrides).map(|(_, allowance)| allowance);
        flat.into_iter().chain(listed).any(test)
    };
    match limit.algorithm {
        Some(algorithm) => algorithm,
        None if any(|allowance| matches!(allowance, Allowance::Slots(_))) => Algorithm::Concurrency,
        None if any(|allowance| matches!(allowance, Allowance::Rate(Rate { burst: Some(_), .. }))) => {
            Algorithm::TokenBucket
        }
        None => Algorithm::SlidingWindow,
    }
}

fn compiled(limit: &Limit, algorithm: Algorithm, allowance: Allowance) -> Result<Grant, Problem> {
    let rate = match (allowance, algorithm) {
        (Allowance::Unlimited, _) => return Ok(Grant::Unlimited),
        (Allowance::Nothing, _) => return Ok(nothing(limit, algorithm)),
        (Allowance::Slots(count), Algorithm::Concurrency) => Rate { count, period: limit.ttl, burst: None },
        (Allowance::Rate(_), Algorithm::Concurrency) => return Err(Problem::RateOfSlots),
        (Allowance::Slots(_), algorithm) => return Err(Problem::SlotsOf(algorithm)),
        (Allowance::Rate(rate), _) => rate,
    };
    let quota = Quota::new(algorithm, rate).map_err(Problem::Quota)?;
    let family = key::family(&limit.name, algorithm, limit.stagger, quota.period());
    Ok(Grant::Limited { quota, family })
}

/// The grant that refuses all. It keeps no state, so that its keys name some period is of no matter.
fn nothing(limit: &Limit, algorithm: Algorithm) -> Grant {
    let family = key::family(&limit.name, algorithm, limit.stagger, limit.ttl);
    Grant::Limited { quota: Quota::nothing(algorithm, limit.ttl), family }
}

fn is_by_ip(limit: &Limit) -> bool {
    limit.by == [facts::IP]
}

/// The value of an override as the facts of a request will have it. The fact `ip` is canonical by then,
/// so an address in another spelling would never be met, nor would anything that is not an address.
fn compared(limit: &Limit, value: &str) -> Option<String> {
    if !is_by_ip(limit) {
        return Some(value.to_owned());
    }
    value.parse::<IpAddr>().ok().map(|ip| ip.to_canonical().to_string())
}

/// Facts that are named must have names that facts can have.
fn check_facts(limit: &Limit, report: &mut impl FnMut(Part, Problem)) {
    let named = limit.by.iter().map(|fact| (Part::By, fact));
    let named = named.chain(limit.when.iter().map(|condition| (Part::When, &condition.fact)));
    let named = named.chain(limit.unless.iter().map(|condition| (Part::Unless, &condition.fact)));
    let tier = if let Base::Tiered(fact) = &limit.base { Some(fact) } else { None };
    let named = named.chain(tier.map(|fact| (Part::TierFact, fact)));
    let named = named.chain(limit.cost.iter().map(|fact| (Part::Cost, fact)));
    for (part, fact) in named {
        if !facts::is_name(fact) {
            report(part, Problem::FactName(fact.clone()));
        }
    }
    for (index, fact) in limit.by.iter().enumerate() {
        if limit.by[..index].contains(fact) {
            report(Part::By, Problem::DuplicateFact(fact.clone()));
        }
    }
}

/// Parts that only make sense together.
fn check_shape(limit: &Limit, report: &mut impl FnMut(Part, Problem)) {
    match (&limit.base, &limit.default_tier) {
        (Base::Flat(_), None) if limit.tiers.is_empty() => {}
        (Base::Flat(_), _) => report(Part::TierFact, Problem::TiersWithoutFact),
        (Base::Tiered(_), _) if limit.tiers.is_empty() => report(Part::TierFact, Problem::NoTiers),
        (Base::Tiered(_), None) => report(Part::DefaultTier, Problem::NoDefaultTier),
        (Base::Tiered(_), Some(name)) => {
            if !limit.tiers.iter().any(|(tier, _)| tier == name) {
                report(Part::DefaultTier, Problem::UnknownTier(name.clone()));
            }
        }
    }
    if limit.by.len() != 1 {
        if !limit.allow.is_empty() {
            report(Part::Allow, Problem::NeedsOneFact);
        }
        if let Some((value, _)) = limit.overrides.first() {
            report(Part::Override(value.clone()), Problem::NeedsOneFact);
        }
    }
}

fn is_limit_name(name: &str) -> bool {
    let allowed =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'.' | b'_' | b'-');
    (1..=facts::MAX_NAME).contains(&name.len()) && name.bytes().all(allowed)
}

/// Everything that is wrong with a list of limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidPolicy(pub Vec<InvalidLimit>);

/// One thing that is wrong with a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidLimit {
    /// The place of the limit in the list, from 0.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// The part that is wrong.
    pub part: Part,
    /// What is wrong with it.
    pub problem: Problem,
}

/// A part of a limit, so that a config reader can point at it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named after the keys of the config file")]
pub enum Part {
    Name,
    Rate,
    By,
    When,
    Unless,
    Allow,
    TierFact,
    Tier(String),
    DefaultTier,
    Override(String),
    Cost,
    Stagger,
    Partition,
    DeductWhen,
    RefundWhen,
}

/// What can be wrong with a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// The name has other characters than it may have, or too many.
    Name,
    /// An earlier limit has the same name.
    DuplicateName,
    /// A fact has a name that facts cannot have.
    FactName(String),
    /// A fact stands twice in `by`.
    DuplicateFact(String),
    /// Tiers, but no fact that picks one.
    TiersWithoutFact,
    /// A fact that picks a tier, but no tiers.
    NoTiers,
    /// Tiers, but none for requests that name no tier or one that is not listed.
    NoDefaultTier,
    /// The default tier is not listed.
    UnknownTier(String),
    /// A tier or an override is listed twice.
    Twice(String),
    /// `allow` and overrides compare one value, and the limit is keyed by several facts or none.
    NeedsOneFact,
    /// An entry of `allow` for `ip` is neither an address nor a network.
    Network(String),
    /// An override for `ip` is not an address.
    Address(String),
    /// Windows of this algorithm cannot be staggered.
    StaggerWithout(Algorithm),
    /// The fact that decides where counts are kept is not one that the limit is keyed by.
    PartitionNotInBy(String),
    /// What this key of the config promises, this algorithm cannot do.
    GivesNothingBack(&'static str, Algorithm),
    /// A concurrency limit with a rate.
    RateOfSlots,
    /// Slots for an algorithm that has none.
    SlotsOf(Algorithm),
    /// The numbers do not fit.
    Quota(InvalidQuota),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::Name => write!(f, "a name is 1 to {} of `a-z 0-9 . _ -`", facts::MAX_NAME),
            Problem::DuplicateName => f.write_str("another limit has this name (names are unique)"),
            Problem::FactName(fact) => {
                write!(
                    f,
                    "`{}` is not the name of a fact (1 to {} of `A-Z a-z 0-9 . _ : / -`)",
                    fact.escape_debug(),
                    facts::MAX_NAME
                )
            }
            Problem::DuplicateFact(fact) => {
                write!(f, "`{}` stands twice in `by` (once is enough)", fact.escape_debug())
            }
            Problem::TiersWithoutFact => {
                f.write_str("it has tiers but no fact that picks one (name it with `tier`)")
            }
            Problem::NoTiers => f.write_str("a fact picks the tier but there are no tiers (list them)"),
            Problem::NoDefaultTier => f.write_str(
                "requests without a known tier get nothing (name one of the tiers in `default_tier`)",
            ),
            Problem::UnknownTier(tier) => {
                write!(f, "the default tier `{}` is not one of the tiers", tier.escape_debug())
            }
            Problem::Twice(name) => write!(f, "`{}` is listed twice (keep one)", name.escape_debug()),
            Problem::NeedsOneFact => {
                f.write_str("`allow` and overrides compare one value: key the limit by exactly one fact")
            }
            Problem::Network(text) => {
                write!(f, "`{}` is {InvalidNetwork}", text.escape_debug())
            }
            Problem::Address(text) => {
                write!(
                    f,
                    "`{}` is not an IP address (such as `192.0.2.7`: an override is for one)",
                    text.escape_debug()
                )
            }
            Problem::StaggerWithout(algorithm) => {
                write!(f, "{algorithm} has nothing to stagger (only fixed-window has)")
            }
            Problem::PartitionNotInBy(fact) => {
                write!(
                    f,
                    "`partition` names `{}`, which is none of the facts in `by` (name one of them)",
                    fact.escape_debug()
                )
            }
            Problem::GivesNothingBack(key, algorithm) => {
                write!(f, "`{key}` gives charges back, which {algorithm} cannot (leave it out)")
            }
            Problem::RateOfSlots => f.write_str("a concurrency limit has slots, not a rate (`limit: 5`)"),
            Problem::SlotsOf(algorithm) => write!(f, "{algorithm} has a rate, not slots (`rate: 5/s`)"),
            Problem::Quota(error) => write!(f, "{error}"),
        }
    }
}

impl fmt::Display for InvalidLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "limit `{}`: ", self.name.escape_debug())?;
        match &self.part {
            Part::Tier(name) => write!(f, "tier `{}`: ", name.escape_debug())?,
            Part::Override(value) => write!(f, "override `{}`: ", value.escape_debug())?,
            _ => {}
        }
        write!(f, "{}", self.problem)
    }
}

impl fmt::Display for InvalidPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            let separator = if index > 0 { "; " } else { "" };
            write!(f, "{separator}{problem}")?;
        }
        Ok(())
    }
}

impl core::error::Error for InvalidPolicy {}

#[cfg(test)]
mod tests;
