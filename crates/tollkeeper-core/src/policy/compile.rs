//! Compiles the definition of a limit into a [`Rule`] and reports every mistake in it.

use core::net::IpAddr;
use std::collections::BTreeMap;

use super::problem::{LimitProblem, Part};
use super::rule::{Allow, Grant, REFUSED, Rule};
use crate::facts;
use crate::key::Family;
use crate::lease::Lease;
use crate::limit::{Base, Consistency, CostMissing, Limit, Mode};
use crate::quota::{Algorithm, Allowance, CheckedQuota, Quota};
use crate::time::Span;
use crate::toll::MAX_COST;

impl Rule {
    /// Compiles a limit and reports its mistakes. If there are any, the returned rule must not be used.
    pub(super) fn new(limit: &Limit, report: &mut impl FnMut(Part, LimitProblem)) -> Rule {
        if !is_limit_name(&limit.name) {
            report(Part::Name, LimitProblem::Name);
        }
        check_facts(limit, report);
        check_combinations(limit, report);
        let algorithm = chosen_algorithm(limit);
        if limit.stagger && algorithm != Algorithm::FixedWindow {
            report(Part::Stagger, LimitProblem::StaggerWithout(algorithm));
        }
        if matches!(algorithm, Algorithm::LeakyBucket | Algorithm::Concurrency) {
            for (part, key, condition) in [
                (Part::DeductWhen, "deduct_when", limit.deduct_when),
                (Part::RefundWhen, "refund_when", limit.refund_when),
            ] {
                if condition.is_some() {
                    report(part, LimitProblem::GivesNothingBack(key, algorithm));
                }
            }
        }
        if limit.consistency == Consistency::Leased && !Lease::has(algorithm) {
            report(Part::Consistency, LimitProblem::NotLeased(algorithm));
        }
        let mut grants = vec![nothing(limit, algorithm)];
        // There can be many overrides, but they mostly share a few grants: store each grant once.
        let mut indexes = BTreeMap::from([(grants[0].numbers(), 0)]);
        let mut grant_index =
            |part: &Part, allowance: Allowance, report: &mut dyn FnMut(Part, LimitProblem)| -> u32 {
                let grant = match compiled(limit, algorithm, allowance) {
                    Ok(grant) => grant,
                    Err(problem) => {
                        report(part.clone(), problem);
                        return REFUSED;
                    }
                };
                let index = *indexes.entry(grant.numbers()).or_insert_with(|| {
                    grants.push(grant);
                    grants.len() - 1
                });
                u32::try_from(index).expect("memory holds fewer than 2^32 tiers and overrides")
            };
        let mut tiers = BTreeMap::new();
        for (name, allowance) in &limit.tiers {
            let part = Part::Tier(name.clone());
            let grant = grant_index(&part, *allowance, report);
            if tiers.insert(name.as_str().into(), grant).is_some() {
                report(part, LimitProblem::Twice(name.clone()));
            }
        }
        let mut overrides = BTreeMap::new();
        for (value, allowance) in &limit.overrides {
            let part = Part::Override(value.clone());
            let grant = grant_index(&part, *allowance, report);
            let Some(value) = compared(limit, value) else {
                report(part, LimitProblem::Address(value.clone()));
                continue;
            };
            if overrides.insert(value.as_str().into(), grant).is_some() {
                report(part, LimitProblem::Twice(value));
            }
        }
        let (tier, default) = match &limit.base {
            Base::Flat(allowance) => (None, grant_index(&Part::Rate, *allowance, report)),
            Base::Tiered(fact) => {
                let default = limit.default_tier.as_deref().and_then(|name| tiers.get(name).copied());
                (Some(fact.as_str().into()), default.unwrap_or(REFUSED))
            }
        };
        let allow = if is_by_ip(limit) {
            let network = |text: &String| {
                text.parse().map_err(|_| report(Part::Allow, LimitProblem::Network(text.clone()))).ok()
            };
            Allow::Networks(limit.allow.iter().filter_map(network).collect())
        } else {
            Allow::Values(limit.allow.iter().map(|value| value.as_str().into()).collect())
        };
        let has_conditions = !(limit.when.is_empty() && limit.unless.is_empty() && allow.is_empty());
        let is_limited = matches!(grants[default as usize], Grant::Limited { .. });
        let has_one_grant = tier.is_none() && overrides.is_empty() && limit.cost.is_none();
        Rule {
            name: limit.name.as_str().into(),
            by: limit.by.iter().map(|fact| fact.as_str().into()).collect(),
            missing: limit.missing,
            mode: limit.mode,
            cost: limit.cost.as_deref().map(Into::into),
            cost_missing: cost_missing(limit, report),
            stagger: limit.stagger,
            partition: partition(limit, report),
            on_store_failure: limit.on_store_failure,
            consistency: limit.consistency,
            largest: largest(&grants),
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
            always_applies: limit.mode != Mode::Off && !has_conditions,
            common_grant: (has_one_grant && is_limited).then_some(default),
            is_declared: false,
            compares_hashes: false,
            default,
            grants,
        }
    }
}

/// The `cost_missing` of a limit, which is valid only together with `cost`.
fn cost_missing(limit: &Limit, report: &mut impl FnMut(Part, LimitProblem)) -> CostMissing {
    match limit.cost_missing {
        Some(_) if limit.cost.is_none() => report(Part::CostMissing, LimitProblem::CostMissingWithoutCost),
        Some(CostMissing::Charge(cost)) if cost > MAX_COST => {
            report(Part::CostMissing, LimitProblem::CostMissingTooLarge(cost));
        }
        _ => {}
    }
    limit.cost_missing.unwrap_or_default()
}

/// The index in `by` of the fact that decides on which server the state is stored. It is below 126, so that
/// a receipt can store it, plus one, in seven bits.
fn partition(limit: &Limit, report: &mut impl FnMut(Part, LimitProblem)) -> Option<u8> {
    let fact = limit.partition.as_ref()?;
    let index = limit
        .by
        .iter()
        .position(|by| by == fact)
        .and_then(|index| u8::try_from(index).ok())
        .filter(|index| *index < 126);
    if index.is_none() {
        report(Part::Partition, LimitProblem::PartitionNotInBy(fact.clone()));
    }
    index
}

/// The algorithm of the limit, the same for all tiers: the configured one, or one that fits what is granted.
fn chosen_algorithm(limit: &Limit) -> Algorithm {
    let any = |test: fn(&Quota) -> bool| {
        let flat = if let Base::Flat(allowance) = &limit.base { Some(allowance) } else { None };
        let listed = limit.tiers.iter().chain(&limit.overrides).map(|(_, allowance)| allowance);
        flat.into_iter()
            .chain(listed)
            .any(|allowance| matches!(allowance, Allowance::Quota(quota) if test(quota)))
    };
    match limit.algorithm {
        Some(algorithm) => algorithm,
        None if any(|quota| quota.period().is_none()) => Algorithm::Concurrency,
        None if any(Quota::has_burst) => Algorithm::TokenBucket,
        None => Algorithm::SlidingWindow,
    }
}

fn compiled(limit: &Limit, algorithm: Algorithm, allowance: Allowance) -> Result<Grant, LimitProblem> {
    grant(&limit.name, limit.stagger, limit.ttl, algorithm, allowance)
}

/// What a limit with this name, stagger, ttl and algorithm grants.
pub(super) fn grant(
    name: &str,
    stagger: bool,
    ttl: Span,
    algorithm: Algorithm,
    allowance: Allowance,
) -> Result<Grant, LimitProblem> {
    let quota = match allowance {
        Allowance::Unlimited => return Ok(Grant::Unlimited),
        Allowance::Nothing => return Ok(refusal(name, stagger, ttl, algorithm)),
        Allowance::Quota(quota) => quota,
    };
    let quota = match (quota.period(), algorithm) {
        (None, Algorithm::Concurrency) => quota.with_period(ttl),
        (Some(_), Algorithm::Concurrency) => return Err(LimitProblem::RateOfSlots),
        (None, algorithm) => return Err(LimitProblem::SlotsOf(algorithm)),
        (Some(_), _) => quota,
    };
    let quota = CheckedQuota::new(algorithm, quota).map_err(LimitProblem::Quota)?;
    let family = Family::new(name, algorithm, stagger, quota.period());
    Ok(Grant::Limited { quota, family })
}

/// The grant that refuses every request. It keeps no state, so the period in its keys does not matter.
fn nothing(limit: &Limit, algorithm: Algorithm) -> Grant {
    refusal(&limit.name, limit.stagger, limit.ttl, algorithm)
}

fn refusal(name: &str, stagger: bool, ttl: Span, algorithm: Algorithm) -> Grant {
    let family = Family::new(name, algorithm, stagger, ttl);
    Grant::Limited { quota: CheckedQuota::nothing(algorithm, ttl), family }
}

/// The largest count of the grants with each period.
fn largest(grants: &[Grant]) -> Box<[(Span, u64)]> {
    let mut largest = BTreeMap::new();
    for (count, _, period) in grants.iter().filter_map(Grant::numbers) {
        let most = largest.entry(period).or_insert(count);
        *most = count.max(*most);
    }
    largest.into_iter().collect()
}

fn is_by_ip(limit: &Limit) -> bool {
    limit.by == [facts::IP]
}

/// The value of an override in the form that facts have. The fact `ip` is always canonical, so an address
/// in another spelling would never match, nor would a value that is not an address (`None`).
fn compared(limit: &Limit, value: &str) -> Option<String> {
    if !is_by_ip(limit) {
        return Some(value.to_owned());
    }
    value.parse::<IpAddr>().ok().map(|ip| ip.to_canonical().to_string())
}

/// Checks the names of all facts that the limit refers to.
fn check_facts(limit: &Limit, report: &mut impl FnMut(Part, LimitProblem)) {
    let named = limit.by.iter().map(|fact| (Part::By, fact));
    let named = named.chain(limit.when.iter().map(|condition| (Part::When, &condition.fact)));
    let named = named.chain(limit.unless.iter().map(|condition| (Part::Unless, &condition.fact)));
    let tier = if let Base::Tiered(fact) = &limit.base { Some(fact) } else { None };
    let named = named.chain(tier.map(|fact| (Part::TierFact, fact)));
    let named = named.chain(limit.cost.iter().map(|fact| (Part::Cost, fact)));
    for (part, fact) in named {
        if !facts::is_name(fact) {
            report(part, LimitProblem::FactName(fact.clone()));
        }
    }
    for (index, fact) in limit.by.iter().enumerate() {
        if limit.by[..index].contains(fact) {
            report(Part::By, LimitProblem::DuplicateFact(fact.clone()));
        }
    }
}

/// Checks the parts of the limit that depend on each other.
fn check_combinations(limit: &Limit, report: &mut impl FnMut(Part, LimitProblem)) {
    match (&limit.base, &limit.default_tier) {
        (Base::Flat(_), None) if limit.tiers.is_empty() => {}
        (Base::Flat(_), _) => report(Part::TierFact, LimitProblem::TiersWithoutFact),
        (Base::Tiered(_), _) if limit.tiers.is_empty() => report(Part::TierFact, LimitProblem::NoTiers),
        (Base::Tiered(_), None) => report(Part::DefaultTier, LimitProblem::NoDefaultTier),
        (Base::Tiered(_), Some(name)) => {
            if !limit.tiers.iter().any(|(tier, _)| tier == name) {
                report(Part::DefaultTier, LimitProblem::UnknownTier(name.clone()));
            }
        }
    }
    if limit.by.len() != 1 {
        if !limit.allow.is_empty() {
            report(Part::Allow, LimitProblem::NeedsOneFact);
        }
        if let Some((value, _)) = limit.overrides.first() {
            report(Part::Override(value.clone()), LimitProblem::NeedsOneFact);
        }
    }
}

fn is_limit_name(name: &str) -> bool {
    let allowed =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'.' | b'_' | b'-');
    (1..=facts::MAX_NAME).contains(&name.len()) && name.bytes().all(allowed)
}
