//! Step two: what was written becomes limits that can be applied.
//!
//! What a limit may be is the core's to say, in [`Policy::new`]. Here is only what the file knows and the
//! core does not: which keys exclude each other, and where the part stands that the core complains about.

use std::cell::RefCell;

use tollkeeper_core::policy::{InvalidLimit, Part, Problem};
use tollkeeper_core::{Algorithm, Allowance, InvalidQuota, Limit, OnStoreFailure, Policy, Rate, Span};

use crate::http::HttpFact;

use super::effective_limit::{GrantShape, LimitShape, Named};
use super::excerpt::quoted;
use super::fields::{RateSaid, Said};
use super::limit::{Choice, Grants, WrittenGrant, WrittenLimit};
use super::raw::File;
use super::report::{Place, Problems};
use super::suggest::nearest;
use super::units::{self, Share};

/// The limits of a file: as they are applied, and as they are shown.
pub(super) struct Meaning {
    pub(super) policy: Policy,
    pub(super) limits: Vec<LimitShape>,
}

/// Makes a policy of the limits; nothing if one of them has a mistake.
pub(super) fn of(file: &File, problems: &RefCell<Problems>) -> Option<Meaning> {
    let limits: Vec<Limit> = file
        .limits
        .iter()
        .enumerate()
        .map(|(index, written)| {
            check(written, &mut problems.borrow_mut());
            limit(written, index, file.share, file.on_store_failure)
        })
        .collect();
    let declared = file.http.facts.iter().map(HttpFact::declared);
    let policy = match Policy::new(limits).and_then(|policy| policy.declaring(declared)) {
        Ok(policy) => policy.with_ipv6_prefix(file.http.ipv6_prefix),
        Err(invalid) => {
            for problem in invalid.0 {
                let mut problems = problems.borrow_mut();
                match problems.is_full() {
                    // To look for its place would take as long as the file is wrong.
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
        limits.map(|(written, rule)| shape(written, rule.algorithm(), file.on_store_failure)).collect();
    Some(Meaning { policy, limits })
}

/// Mistakes that only the file can make: keys that exclude or need each other.
fn check(written: &WrittenLimit, problems: &mut Problems) {
    let subject = &written.subject;
    let mut error =
        |place: Place, message: &str, help: &str| problems.error(place, format!("{subject}{message}"), help);
    let WrittenLimit { grant, tiers, tier, default_tier, algorithm, .. } = written;
    let granted = grant.rate.is_some() || grant.limit.is_some() || grant.broken;
    match tiers {
        None if tier.is_none() && !granted && grant.burst.is_none() => {
            error(written.place, "it does not say how much", "such as `rate: 100/min`");
        }
        None => {
            if let Some(default) = default_tier.as_ref().filter(|_| tier.is_none()) {
                error(
                    default.place,
                    "there is a `default_tier` but there are no `tiers`",
                    "list them, or leave it out",
                );
            }
        }
        Some(_) => {
            let extra = [
                (grant.rate.as_ref().map(|said| said.place), "rate"),
                (grant.burst.as_ref().map(|said| said.place), "burst"),
                (grant.limit.as_ref().map(|said| said.place), "limit"),
            ];
            for (place, key) in extra.into_iter().filter_map(|(place, key)| Some((place?, key))) {
                error(
                    place,
                    &format!("a limit with `tiers` has no `{key}` of its own"),
                    "move it into the tiers",
                );
            }
        }
    }
    let concurrency = match algorithm {
        Choice::Made(algorithm) => *algorithm == Algorithm::Concurrency,
        // Nothing is said against what cannot be known.
        Choice::Wrong => return,
        Choice::Absent => false,
    };
    if *algorithm == Choice::Absent
        && let Some(limit) = every_grant(written).find_map(|(grant, _)| grant.limit.as_ref())
    {
        error(
            limit.place,
            "`limit` is a number of slots, which only concurrency limits have",
            "add `algorithm: concurrency`, or write a `rate`",
        );
    }
    if let Some(ttl) = written.ttl.as_ref().filter(|_| !concurrency) {
        error(
            ttl.place,
            "`ttl` is how long a slot is held, which only concurrency limits have",
            "leave it out",
        );
    }
    for (grant, what) in every_grant(written) {
        let mut error = |place: Place, message: &str, help: &str| {
            problems.error(place, format!("{subject}{what}{message}"), help);
        };
        match (&grant.rate, &grant.limit, &grant.burst) {
            (Some(_), Some(limit), _) => error(
                limit.place,
                "there is a `rate` and a `limit`",
                "concurrency limits have a `limit`, all others a `rate`",
            ),
            (Some(rate), None, Some(burst)) if rate.value.rate == units::Rate::Unlimited => {
                error(burst.place, "`unlimited` has no burst", "leave it out");
            }
            (None, Some(_), Some(burst)) => error(burst.place, "slots have no burst", "leave it out"),
            (None, None, Some(burst)) if !grant.broken && tiers.is_none() => {
                error(burst.place, "there is a `burst` but no `rate`", "such as `rate: 100/min`");
            }
            (None, None, _) if !grant.broken && !what.is_empty() => {
                error(
                    grant.place,
                    "it does not say how much",
                    "such as `{ rate: 600/min, burst: 100 }`, or `unlimited`",
                );
            }
            _ => {}
        }
    }
}

/// Every grant of a limit, with what messages call it.
pub(super) fn every_grant(written: &WrittenLimit) -> impl Iterator<Item = (&WrittenGrant, String)> {
    fn all<'g>(
        grants: Option<&'g Grants>,
        what: &'g str,
    ) -> impl Iterator<Item = (&'g WrittenGrant, String)> {
        let list = grants.into_iter().flat_map(|grants| &grants.list);
        list.map(move |(name, grant)| (grant, format!("{what} {}: ", quoted(&name.value))))
    }
    let tiers = all(written.tiers.as_ref(), "tier");
    [(&written.grant, String::new())]
        .into_iter()
        .chain(tiers)
        .chain(all(written.overrides.as_ref(), "override"))
}

/// The limit as the core takes it. Where something is missing, which has been reported, it gets what makes
/// the core say nothing more about it.
fn limit(written: &WrittenLimit, index: usize, share: Share, on_store_failure: OnStoreFailure) -> Limit {
    let name = written
        .name
        .as_ref()
        .map_or_else(|| format!("limit-without-a-name-{index}"), |name| name.value.clone());
    let tiers = written.tiers.as_ref();
    let mut limit = match &written.tier {
        Some(fact) if !tiers.is_some_and(|tiers| tiers.broken) => Limit::tiered(name, &fact.value),
        _ => Limit::new(name, allowance(&written.grant, share)),
    };
    for by in &written.by {
        limit = limit.by(&by.value);
    }
    for Said { value: (fact, patterns), .. } in &written.when {
        limit = patterns.iter().fold(limit, |limit, pattern| limit.when(fact, pattern));
    }
    for Said { value: (fact, patterns), .. } in &written.unless {
        limit = patterns.iter().fold(limit, |limit, pattern| limit.unless(fact, pattern));
    }
    for value in &written.allow {
        limit = limit.allow(&value.value);
    }
    if let Some(tiers) = tiers.filter(|tiers| !tiers.broken) {
        limit = tiers
            .list
            .iter()
            .fold(limit, |limit, (name, grant)| limit.tier(&name.value, allowance(grant, share)));
        if let Some(default) = &written.default_tier {
            limit = limit.default_tier(&default.value);
        }
    }
    if let Some(overrides) = &written.overrides {
        limit = overrides
            .list
            .iter()
            .fold(limit, |limit, (value, grant)| limit.override_for(&value.value, allowance(grant, share)));
    }
    if let Some(cost) = &written.cost {
        limit = limit.cost(&cost.value);
    }
    if let Some(cost_missing) = &written.cost_missing {
        limit = limit.cost_missing(cost_missing.value);
    }
    if let Some(ttl) = &written.ttl {
        limit = limit.ttl(ttl.value);
    }
    if written.stagger.is_some() {
        limit = limit.stagger();
    }
    if let Some(partition) = &written.partition {
        limit = limit.partition(&partition.value);
    }
    if let Some(algorithm) = algorithm(written) {
        limit = limit.algorithm(algorithm);
    }
    if !written.headers {
        limit = limit.hidden();
    }
    if let Some(condition) = &written.deduct_when {
        limit = limit.deduct_when(condition.value.statuses());
    }
    if let Some(condition) = &written.refund_when {
        limit = limit.refund_when(condition.value.statuses());
    }
    limit
        .missing(written.missing)
        .mode(written.mode)
        .on_store_failure(written.on_store_failure.unwrap_or(on_store_failure))
}

/// The algorithm as it is said, or as the file says it beyond what the core can see.
fn algorithm(written: &WrittenLimit) -> Option<Algorithm> {
    let has_burst = || every_grant(written).any(|(grant, _)| grant.burst.is_some());
    match written.algorithm {
        Choice::Made(algorithm) => Some(algorithm),
        // A burst beside `0/s` counts, too, and the core does not get to see it.
        Choice::Absent => has_burst().then_some(Algorithm::TokenBucket),
        // It has been reported: the one that is most likely to fit the rest.
        Choice::Wrong if every_grant(written).any(|(grant, _)| grant.limit.is_some()) => {
            Some(Algorithm::Concurrency)
        }
        Choice::Wrong if written.stagger.is_some() => Some(Algorithm::FixedWindow),
        Choice::Wrong => has_burst().then_some(Algorithm::TokenBucket),
    }
}

fn allowance(grant: &WrittenGrant, share: Share) -> Allowance {
    if let Some(slots) = &grant.limit {
        return Allowance::Slots(share.of(slots.value));
    }
    match grant.rate.as_ref().map(|said| said.value.rate) {
        None | Some(units::Rate::Unlimited) => Allowance::Unlimited,
        Some(units::Rate::Every { count: 0, .. }) => Allowance::Nothing,
        Some(units::Rate::Every { count, period }) => {
            let burst = grant.burst.as_ref().map(|burst| share.of(burst.value));
            Allowance::Rate(Rate { count: share.of(count), period, burst })
        }
    }
}

/// Reports what the core says about a limit at the place of the part it is about.
fn report(written: &WrittenLimit, invalid: InvalidLimit, problems: &mut Problems) {
    let InvalidLimit { part, problem, .. } = invalid;
    let about = match &part {
        _ if matches!(problem, Problem::NeedsOneFact | Problem::Address(_)) => String::new(),
        Part::Tier(name) => format!("tier {}: ", quoted(name)),
        Part::Override(value) => format!("override {}: ", quoted(value)),
        _ => String::new(),
    };
    let (place, hidden) = culprit(written, &part, &problem);
    let subject = &written.subject;
    match hidden {
        Some(before) => {
            let message = format!("{subject}{about}the value of {} cannot stand here", quoted(&before));
            problems.error(place, message, "it is not shown, because it comes from the environment");
        }
        None => problems.error(place, format!("{subject}{about}{problem}"), help(written, &problem)),
    }
}

/// What would be right, where the file knows more than the core.
fn help(written: &WrittenLimit, problem: &Problem) -> String {
    let names = || written.tiers.iter().flat_map(|tiers| &tiers.list).map(|(name, _)| name.value.as_str());
    match problem {
        Problem::UnknownTier(name) => match nearest(name, names()) {
            Some(near) => format!("did you mean {}?", quoted(near)),
            None => format!("there are {}", names().take(10).map(quoted).collect::<Vec<_>>().join(", ")),
        },
        Problem::Name => {
            let name = written.name.as_ref().map_or("", |name| &name.value).to_lowercase();
            let words =
                name.split(|char: char| !(char.is_ascii_alphanumeric() || matches!(char, '.' | '_' | '-')));
            let meant = words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-");
            let fits = (1..=64).contains(&meant.len());
            if fits { format!("try `{meant}`") } else { String::new() }
        }
        _ => String::new(),
    }
}

/// Where the value stands that the core complains about, and how it is written if it must not be shown.
fn culprit(written: &WrittenLimit, part: &Part, problem: &Problem) -> (Place, Option<String>) {
    fn at<T>(said: &Said<T>) -> (Place, Option<String>) {
        (said.place, said.hidden.clone())
    }
    let whole = (written.place, None);
    let named = |list: &[Said<String>], name: &str| list.iter().rev().find(|said| said.value == name).map(at);
    let fact = |conditions: &[Said<(String, Vec<String>)>]| match problem {
        Problem::FactName(name) => conditions.iter().find(|said| said.value.0 == *name).map(at),
        _ => None,
    };
    let inside = |grants: &Option<Grants>, name: &str| {
        let grants = grants.as_ref()?;
        let (known, grant) = grants.list.iter().find(|(known, _)| known.value == name)?;
        match problem {
            Problem::Address(_) | Problem::Twice(_) => Some(at(known)),
            _ => Some(of_grant(grant, problem).unwrap_or((grant.place, None))),
        }
    };
    let key = |grants: &Option<Grants>| grants.as_ref().map(|grants| (grants.place, None));
    let found = match (part, problem) {
        (Part::Name, _) => written.name.as_ref().map(at),
        (Part::Rate, _) => of_grant(&written.grant, problem),
        (Part::By, Problem::FactName(name) | Problem::DuplicateFact(name)) => named(&written.by, name),
        (Part::Allow, Problem::Network(text)) => named(&written.allow, text),
        (Part::By, _) => written.by.first().map(at),
        (Part::Allow, _) => written.allow.first().map(|said| (said.place, None)),
        (Part::When, _) => fact(&written.when),
        (Part::Unless, _) => fact(&written.unless),
        (Part::TierFact, _) => written.tier.as_ref().map(at).or_else(|| key(&written.tiers)),
        (Part::Tier(name), _) => inside(&written.tiers, name),
        (Part::DefaultTier, _) => written.default_tier.as_ref().map(at).or_else(|| key(&written.tiers)),
        (Part::Override(_), Problem::NeedsOneFact) => key(&written.overrides),
        (Part::Override(value), _) => inside(&written.overrides, value),
        (Part::Cost, _) => written.cost.as_ref().map(at),
        (Part::CostMissing, _) => written.cost_missing.as_ref().map(at),
        (Part::Stagger, _) => written.stagger.as_ref().map(at),
        (Part::Partition, _) => written.partition.as_ref().map(at),
        (Part::DeductWhen, _) => written.deduct_when.as_ref().map(at),
        (Part::RefundWhen, _) => written.refund_when.as_ref().map(at),
        // A part that this reader does not know yet: report the position of the whole limit.
        _ => None,
    };
    found.unwrap_or(whole)
}

/// The number of a grant that a problem is about.
fn of_grant(grant: &WrittenGrant, problem: &Problem) -> Option<(Place, Option<String>)> {
    let hidden = |rate: &Option<Said<RateSaid>>, burst: &Option<Said<u64>>| {
        rate.as_ref()
            .and_then(|said| said.hidden.clone())
            .or_else(|| burst.as_ref().and_then(|said| said.hidden.clone()))
    };
    let about_burst = matches!(
        problem,
        Problem::Quota(InvalidQuota::ZeroBurst | InvalidQuota::BurstWithout(_) | InvalidQuota::Fill { .. })
    );
    let burst = grant.burst.as_ref().filter(|_| about_burst).map(|said| said.place);
    let place = burst
        .or(grant.limit.as_ref().map(|said| said.place))
        .or(grant.rate.as_ref().map(|said| said.place))?;
    Some((place, hidden(&grant.rate, &grant.burst)))
}

/// The limit with every default filled in.
fn shape(written: &WrittenLimit, algorithm: Algorithm, on_store_failure: OnStoreFailure) -> LimitShape {
    let grant = |grant: &WrittenGrant| {
        let count = match grant.rate.as_ref().map(|said| said.value.rate) {
            Some(units::Rate::Every { count, .. }) if algorithm.has_burst() && count > 0 => Some(count),
            _ => None,
        };
        GrantShape {
            rate: grant.rate.as_ref().map(|said| said.value.text.clone()),
            burst: grant.burst.as_ref().map(|said| said.value).or(count),
            limit: grant.limit.as_ref().map(|said| said.value),
        }
    };
    let grants = |grants: &Option<Grants>| {
        let list = grants.iter().flat_map(|grants| &grants.list);
        Named(list.map(|(name, written)| (name.value.clone(), grant(written))).collect())
    };
    let conditions =
        |list: &[Said<(String, Vec<String>)>]| Named(list.iter().map(|said| said.value.clone()).collect());
    let text = |said: &Option<Said<String>>| said.as_ref().map(|said| said.value.clone());
    let texts = |list: &[Said<String>]| list.iter().map(|said| said.value.clone()).collect();
    let ttl = written.ttl.as_ref().map_or(Span::from_secs(60), |said| Span::from(said.value));
    LimitShape {
        name: text(&written.name).expect("a limit without a name was reported"),
        by: texts(&written.by),
        when: conditions(&written.when),
        unless: conditions(&written.unless),
        grant: grant(&written.grant),
        algorithm,
        ttl: (algorithm == Algorithm::Concurrency).then_some(ttl),
        tier: text(&written.tier),
        tiers: grants(&written.tiers),
        default_tier: text(&written.default_tier),
        overrides: grants(&written.overrides),
        allow: texts(&written.allow),
        missing: written.missing,
        cost: text(&written.cost),
        cost_missing: written
            .cost
            .as_ref()
            .map(|_| written.cost_missing.as_ref().map(|said| said.value).unwrap_or_default()),
        mode: written.mode,
        stagger: written.stagger.is_some(),
        partition: text(&written.partition),
        on_store_failure: written.on_store_failure.unwrap_or(on_store_failure),
        headers: written.headers,
        deduct_when: written.deduct_when.as_ref().map(|said| said.value.clone()),
        refund_when: written.refund_when.as_ref().map(|said| said.value.clone()),
        consistency: "exact",
        wait_replicas: 0,
    }
}
