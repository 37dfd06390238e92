//! Step two of reading a config: resolves the raw limits into a [`Policy`].
//!
//! [`Policy::new`] validates limits. This module adds only what the core cannot know: which keys of the file
//! exclude each other, and the position of the value that the core rejects.

use std::cell::RefCell;

use tollkeeper_core::policy::{InvalidLimit, LimitProblem, Part};
use tollkeeper_core::{Algorithm, Allowance, InvalidQuota, Limit, OnStoreFailure, Policy, Quota, Span};

use crate::http::HttpFact;

use super::effective_limit::{EffectiveGrant, EffectiveLimit, Named};
use super::excerpt::quoted;
use super::fields::{Located, RawRate};
use super::limit::{Choice, Grants, RawGrant, RawLimit};
use super::raw::RawConfig;
use super::report::{Position, Problems};
use super::suggest::nearest;
use super::units::{self, Share};

/// The limits of a file: as a policy, and as `GET /v1/limits` shows them.
pub(super) struct Resolved {
    pub(super) policy: Policy,
    pub(super) limits: Vec<EffectiveLimit>,
}

/// Builds the policy; `None` if a limit is invalid.
pub(super) fn resolve(file: &RawConfig, problems: &RefCell<Problems>) -> Option<Resolved> {
    let limits: Vec<Limit> = file
        .limits
        .iter()
        .enumerate()
        .map(|(index, raw)| {
            check(raw, &mut problems.borrow_mut());
            limit(raw, index, file.share, file.on_store_failure)
        })
        .collect();
    let declared = file.http.facts.iter().map(HttpFact::declared);
    let policy = match Policy::new(limits).and_then(|policy| policy.declaring(declared)) {
        Ok(policy) => {
            policy.with_ipv6_prefix(file.http.ipv6_prefix).with_share(file.share.part(), file.share.whole())
        }
        Err(invalid) => {
            for problem in invalid.0 {
                let mut problems = problems.borrow_mut();
                match problems.is_full() {
                    // Finding the position of each of thousands of errors would take too long.
                    true => problems.count(),
                    false => report(&file.limits[problem.index], problem, &mut problems),
                }
            }
            return None;
        }
    };
    if !problems.borrow().no_errors() {
        return None;
    }
    let limits = file.limits.iter().zip(policy.rules());
    let limits =
        limits.map(|(raw, rule)| effective_limit(raw, rule.algorithm(), file.on_store_failure)).collect();
    Some(Resolved { policy, limits })
}

/// Reports keys that exclude or require each other, which the core cannot see.
fn check(raw: &RawLimit, problems: &mut Problems) {
    let subject = &raw.subject;
    let mut error = |position: Position, message: &str, help: &str| {
        problems.error(position, format!("{subject}{message}"), help);
    };
    let RawLimit { grant, tiers, tier, default_tier, algorithm, .. } = raw;
    let granted = grant.rate.is_some() || grant.limit.is_some() || grant.broken;
    match tiers {
        None if tier.is_none() && !granted && grant.burst.is_none() => {
            error(raw.position, "neither `rate` nor `limit` is set", "such as `rate: 100/min`");
        }
        None => {
            if let Some(default) = default_tier.as_ref().filter(|_| tier.is_none()) {
                error(
                    default.position,
                    "there is a `default_tier` but there are no `tiers`",
                    "list them, or leave it out",
                );
            }
        }
        Some(_) => {
            let extra = [
                (grant.rate.as_ref().map(|located| located.position), "rate"),
                (grant.burst.as_ref().map(|located| located.position), "burst"),
                (grant.limit.as_ref().map(|located| located.position), "limit"),
            ];
            for (position, key) in extra.into_iter().filter_map(|(position, key)| Some((position?, key))) {
                error(
                    position,
                    &format!("a limit with `tiers` has no `{key}` of its own"),
                    "move it into the tiers",
                );
            }
        }
    }
    let concurrency = match algorithm {
        Choice::Made(algorithm) => *algorithm == Algorithm::Concurrency,
        // With an invalid algorithm, it is unknown which keys are allowed.
        Choice::Invalid => return,
        Choice::Absent => false,
    };
    if *algorithm == Choice::Absent
        && let Some(limit) = every_grant(raw).find_map(|(grant, _)| grant.limit.as_ref())
    {
        error(
            limit.position,
            "`limit` is a number of slots, which only concurrency limits have",
            "add `algorithm: concurrency`, or write a `rate`",
        );
    }
    if let Some(ttl) = raw.ttl.as_ref().filter(|_| !concurrency) {
        error(
            ttl.position,
            "`ttl` is how long a slot is held, which only concurrency limits have",
            "leave it out",
        );
    }
    for (grant, what) in every_grant(raw) {
        let mut error = |position: Position, message: &str, help: &str| {
            problems.error(position, format!("{subject}{what}{message}"), help);
        };
        match (&grant.rate, &grant.limit, &grant.burst) {
            (Some(_), Some(limit), _) => error(
                limit.position,
                "there is a `rate` and a `limit`",
                "concurrency limits have a `limit`, all others a `rate`",
            ),
            (Some(rate), None, Some(burst)) if rate.value.rate == units::Rate::Unlimited => {
                error(burst.position, "`unlimited` has no burst", "leave it out");
            }
            (None, Some(_), Some(burst)) => error(burst.position, "slots have no burst", "leave it out"),
            (None, None, Some(burst)) if !grant.broken && tiers.is_none() => {
                error(burst.position, "there is a `burst` but no `rate`", "such as `rate: 100/min`");
            }
            (None, None, _) if !grant.broken && !what.is_empty() => {
                error(
                    grant.position,
                    "neither `rate` nor `limit` is set",
                    "such as `{ rate: 600/min, burst: 100 }`, or `unlimited`",
                );
            }
            _ => {}
        }
    }
}

/// Every grant of a limit, with its prefix for messages, such as ``tier `free`: ``.
pub(super) fn every_grant(raw: &RawLimit) -> impl Iterator<Item = (&RawGrant, String)> {
    fn all<'g>(grants: Option<&'g Grants>, what: &'g str) -> impl Iterator<Item = (&'g RawGrant, String)> {
        let list = grants.into_iter().flat_map(|grants| &grants.list);
        list.map(move |(name, grant)| (grant, format!("{what} {}: ", quoted(&name.value))))
    }
    let tiers = all(raw.tiers.as_ref(), "tier");
    [(&raw.grant, String::new())].into_iter().chain(tiers).chain(all(raw.overrides.as_ref(), "override"))
}

/// The limit for the core. A missing or invalid value, which has been reported, gets a replacement that the core
/// accepts, so that it is not reported twice.
fn limit(raw: &RawLimit, index: usize, share: Share, on_store_failure: OnStoreFailure) -> Limit {
    let name =
        raw.name.as_ref().map_or_else(|| format!("limit-without-a-name-{index}"), |name| name.value.clone());
    let tiers = raw.tiers.as_ref();
    let mut limit = match &raw.tier {
        Some(fact) if !tiers.is_some_and(|tiers| tiers.broken) => Limit::tiered(name, &fact.value),
        _ => Limit::new(name, allowance(&raw.grant, share)),
    };
    for by in &raw.by {
        limit = limit.by(&by.value);
    }
    for Located { value: (fact, patterns), .. } in &raw.when {
        limit = patterns.iter().fold(limit, |limit, pattern| limit.when(fact, pattern));
    }
    for Located { value: (fact, patterns), .. } in &raw.unless {
        limit = patterns.iter().fold(limit, |limit, pattern| limit.unless(fact, pattern));
    }
    for value in &raw.allow {
        limit = limit.allow(&value.value);
    }
    if let Some(tiers) = tiers.filter(|tiers| !tiers.broken) {
        limit = tiers
            .list
            .iter()
            .fold(limit, |limit, (name, grant)| limit.tier(&name.value, allowance(grant, share)));
        if let Some(default) = &raw.default_tier {
            limit = limit.default_tier(&default.value);
        }
    }
    if let Some(overrides) = &raw.overrides {
        limit = overrides
            .list
            .iter()
            .fold(limit, |limit, (value, grant)| limit.override_for(&value.value, allowance(grant, share)));
    }
    if let Some(cost) = &raw.cost {
        limit = limit.cost(&cost.value);
    }
    if let Some(cost_missing) = &raw.cost_missing {
        limit = limit.cost_missing(cost_missing.value);
    }
    if let Some(ttl) = &raw.ttl {
        limit = limit.ttl(ttl.value);
    }
    if raw.stagger.is_some() {
        limit = limit.stagger();
    }
    if let Some(partition) = &raw.partition {
        limit = limit.partition(&partition.value);
    }
    if let Some(algorithm) = algorithm(raw) {
        limit = limit.algorithm(algorithm);
    }
    if !raw.headers {
        limit = limit.hidden();
    }
    if let Some(condition) = &raw.deduct_when {
        limit = limit.deduct_when(condition.value.statuses());
    }
    if let Some(condition) = &raw.refund_when {
        limit = limit.refund_when(condition.value.statuses());
    }
    limit
        .missing(raw.missing)
        .mode(raw.mode)
        .on_store_failure(raw.on_store_failure.unwrap_or(on_store_failure))
        .consistency(raw.consistency())
}

/// The algorithm that the file names or implies; `None` leaves the choice to the core.
fn algorithm(raw: &RawLimit) -> Option<Algorithm> {
    let has_burst = || every_grant(raw).any(|(grant, _)| grant.burst.is_some());
    match raw.algorithm {
        Choice::Made(algorithm) => Some(algorithm),
        // A burst next to `0/s` counts as well, and the core does not see it.
        Choice::Absent => has_burst().then_some(Algorithm::TokenBucket),
        // The invalid algorithm has been reported: use the one that most likely fits the other keys.
        Choice::Invalid if every_grant(raw).any(|(grant, _)| grant.limit.is_some()) => {
            Some(Algorithm::Concurrency)
        }
        Choice::Invalid if raw.stagger.is_some() => Some(Algorithm::FixedWindow),
        Choice::Invalid => has_burst().then_some(Algorithm::TokenBucket),
    }
}

fn allowance(grant: &RawGrant, share: Share) -> Allowance {
    if let Some(slots) = &grant.limit {
        return Quota::slots(share.of(slots.value)).into();
    }
    match grant.rate.as_ref().map(|located| located.value.rate) {
        None | Some(units::Rate::Unlimited) => Allowance::Unlimited,
        Some(units::Rate::Every { count: 0, .. }) => Allowance::Nothing,
        Some(units::Rate::Every { count, period }) => {
            let burst = grant.burst.as_ref().map(|burst| share.of(burst.value));
            Quota::every(share.of(count), period).with_burst(burst).into()
        }
    }
}

/// Reports an error of the core at the position of the value that it is about.
fn report(raw: &RawLimit, invalid: InvalidLimit, problems: &mut Problems) {
    let InvalidLimit { part, problem, .. } = invalid;
    let about = match &part {
        _ if matches!(problem, LimitProblem::NeedsOneFact | LimitProblem::Address(_)) => String::new(),
        Part::Tier(name) => format!("tier {}: ", quoted(name)),
        Part::Override(value) => format!("override {}: ", quoted(value)),
        _ => String::new(),
    };
    let (position, unexpanded) = locate(raw, &part, &problem);
    let subject = &raw.subject;
    match unexpanded {
        Some(unexpanded) => {
            let message = format!("{subject}{about}the value of {} is not valid here", quoted(&unexpanded));
            problems.error(position, message, "it is not shown, because it comes from the environment");
        }
        None => problems.error(position, format!("{subject}{about}{problem}"), help(raw, &problem)),
    }
}

/// A suggestion, where the file has more information than the core.
fn help(raw: &RawLimit, problem: &LimitProblem) -> String {
    let names = || raw.tiers.iter().flat_map(|tiers| &tiers.list).map(|(name, _)| name.value.as_str());
    match problem {
        LimitProblem::UnknownTier(name) => match nearest(name, names()) {
            Some(near) => format!("did you mean {}?", quoted(near)),
            None => format!("there are {}", names().take(10).map(quoted).collect::<Vec<_>>().join(", ")),
        },
        LimitProblem::Name => {
            let name = raw.name.as_ref().map_or("", |name| &name.value).to_lowercase();
            let words =
                name.split(|char: char| !(char.is_ascii_alphanumeric() || matches!(char, '.' | '_' | '-')));
            let suggestion = words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-");
            let fits = (1..=64).contains(&suggestion.len());
            if fits { format!("try `{suggestion}`") } else { String::new() }
        }
        _ => String::new(),
    }
}

/// The position of the value that the core rejects, and its unexpanded text if the value must not be shown.
fn locate(raw: &RawLimit, part: &Part, problem: &LimitProblem) -> (Position, Option<String>) {
    fn at<T>(located: &Located<T>) -> (Position, Option<String>) {
        (located.position, located.unexpanded.clone())
    }
    let whole_limit = (raw.position, None);
    let named = |list: &[Located<String>], name: &str| {
        list.iter().rev().find(|located| located.value == name).map(at)
    };
    let fact = |conditions: &[Located<(String, Vec<String>)>]| match problem {
        LimitProblem::FactName(name) => conditions.iter().find(|located| located.value.0 == *name).map(at),
        _ => None,
    };
    let inside = |grants: &Option<Grants>, name: &str| {
        let grants = grants.as_ref()?;
        let (known, grant) = grants.list.iter().find(|(known, _)| known.value == name)?;
        match problem {
            LimitProblem::Address(_) | LimitProblem::Twice(_) => Some(at(known)),
            _ => Some(of_grant(grant, problem).unwrap_or((grant.position, None))),
        }
    };
    let key = |grants: &Option<Grants>| grants.as_ref().map(|grants| (grants.position, None));
    let found = match (part, problem) {
        (Part::Name, _) => raw.name.as_ref().map(at),
        (Part::Rate, _) => of_grant(&raw.grant, problem),
        (Part::By, LimitProblem::FactName(name) | LimitProblem::DuplicateFact(name)) => named(&raw.by, name),
        (Part::Allow, LimitProblem::Network(text)) => named(&raw.allow, text),
        (Part::By, _) => raw.by.first().map(at),
        (Part::Allow, _) => raw.allow.first().map(|located| (located.position, None)),
        (Part::When, _) => fact(&raw.when),
        (Part::Unless, _) => fact(&raw.unless),
        (Part::TierFact, _) => raw.tier.as_ref().map(at).or_else(|| key(&raw.tiers)),
        (Part::Tier(name), _) => inside(&raw.tiers, name),
        (Part::DefaultTier, _) => raw.default_tier.as_ref().map(at).or_else(|| key(&raw.tiers)),
        (Part::Override(_), LimitProblem::NeedsOneFact) => key(&raw.overrides),
        (Part::Override(value), _) => inside(&raw.overrides, value),
        (Part::Cost, _) => raw.cost.as_ref().map(at),
        (Part::CostMissing, _) => raw.cost_missing.as_ref().map(at),
        (Part::Stagger, _) => raw.stagger.as_ref().map(at),
        (Part::Partition, _) => raw.partition.as_ref().map(at),
        (Part::Consistency, _) => raw.leased.as_ref().map(at),
        (Part::DeductWhen, _) => raw.deduct_when.as_ref().map(at),
        (Part::RefundWhen, _) => raw.refund_when.as_ref().map(at),
        // A part that this reader does not know yet: report the position of the whole limit.
        _ => None,
    };
    found.unwrap_or(whole_limit)
}

/// The position of the number in a grant that a problem is about, and its unexpanded text.
fn of_grant(grant: &RawGrant, problem: &LimitProblem) -> Option<(Position, Option<String>)> {
    let unexpanded = |rate: &Option<Located<RawRate>>, burst: &Option<Located<u64>>| {
        rate.as_ref()
            .and_then(|located| located.unexpanded.clone())
            .or_else(|| burst.as_ref().and_then(|located| located.unexpanded.clone()))
    };
    let about_burst = matches!(
        problem,
        LimitProblem::Quota(
            InvalidQuota::ZeroBurst | InvalidQuota::BurstWithout(_) | InvalidQuota::Fill { .. }
        )
    );
    let burst = grant.burst.as_ref().filter(|_| about_burst).map(|located| located.position);
    let position = burst
        .or(grant.limit.as_ref().map(|located| located.position))
        .or(grant.rate.as_ref().map(|located| located.position))?;
    Some((position, unexpanded(&grant.rate, &grant.burst)))
}

/// The limit with every default filled in.
fn effective_limit(raw: &RawLimit, algorithm: Algorithm, on_store_failure: OnStoreFailure) -> EffectiveLimit {
    let grant = |grant: &RawGrant| {
        let count = match grant.rate.as_ref().map(|located| located.value.rate) {
            Some(units::Rate::Every { count, .. }) if algorithm.has_burst() && count > 0 => Some(count),
            _ => None,
        };
        EffectiveGrant {
            rate: grant.rate.as_ref().map(|located| located.value.text.clone()),
            burst: grant.burst.as_ref().map(|located| located.value).or(count),
            limit: grant.limit.as_ref().map(|located| located.value),
        }
    };
    let grants = |grants: &Option<Grants>| {
        let list = grants.iter().flat_map(|grants| &grants.list);
        Named(list.map(|(name, raw)| (name.value.clone(), grant(raw))).collect())
    };
    let conditions = |list: &[Located<(String, Vec<String>)>]| {
        Named(list.iter().map(|located| located.value.clone()).collect())
    };
    let text = |located: &Option<Located<String>>| located.as_ref().map(|located| located.value.clone());
    let texts = |list: &[Located<String>]| list.iter().map(|located| located.value.clone()).collect();
    let ttl = raw.ttl.as_ref().map_or(Span::from_secs(60), |located| Span::from(located.value));
    EffectiveLimit {
        name: text(&raw.name).expect("a limit without a name was reported"),
        by: texts(&raw.by),
        when: conditions(&raw.when),
        unless: conditions(&raw.unless),
        grant: grant(&raw.grant),
        algorithm,
        ttl: (algorithm == Algorithm::Concurrency).then_some(ttl),
        tier: text(&raw.tier),
        tiers: grants(&raw.tiers),
        default_tier: text(&raw.default_tier),
        overrides: grants(&raw.overrides),
        allow: texts(&raw.allow),
        missing: raw.missing,
        cost: text(&raw.cost),
        cost_missing: raw
            .cost
            .as_ref()
            .map(|_| raw.cost_missing.as_ref().map(|located| located.value).unwrap_or_default()),
        mode: raw.mode,
        stagger: raw.stagger.is_some(),
        partition: text(&raw.partition),
        on_store_failure: raw.on_store_failure.unwrap_or(on_store_failure),
        headers: raw.headers,
        deduct_when: raw.deduct_when.as_ref().map(|located| located.value.clone()),
        refund_when: raw.refund_when.as_ref().map(|located| located.value.clone()),
        consistency: raw.consistency().name(),
        wait_replicas: 0,
    }
}
