//! Finds parts of a valid config file that are probably mistakes.

use tollkeeper_core::lease::{Lease, NotLeased};
use tollkeeper_core::pattern::matches;
use tollkeeper_core::policy::Grant;
use tollkeeper_core::{Algorithm, Missing, Mode, Policy, Rule, Span};

use super::excerpt::quoted;
use super::fields::Located;
use super::limit::{RawGrant, RawLimit};
use super::listen::Listener;
use super::raw::RawConfig;
use super::report::Problems;
use super::resolve::every_grant;
use super::units::{Rate, Share};
use super::warning::Warning;
use crate::http::Source;
use crate::store::url::StoreUrl;

/// The prefixes of facts that are read from a request without being declared.
const PARTS: [&str; 4] = ["header.", "cookie.", "query.", "body."];
/// The facts that every HTTP request has.
const EVERYWHERE: [&str; 4] = ["ip", "method", "path", "route"];
/// Headers with a credential. They are not reported, because the application rejects an invented credential.
const CREDENTIALS: [&str; 2] = ["authorization", "cookie"];

/// Adds the warnings about a file without errors.
pub(super) fn check(file: &RawConfig, policy: &Policy, problems: &mut Problems) {
    problems.silence(&file.ignored);
    for limit in &file.limits {
        for (grant, what) in every_grant(limit) {
            share(file.share, limit, grant, &what, problems);
        }
    }
    let rules = || file.limits.iter().zip(policy.rules().iter().map(|rule| rule.algorithm()));
    leaky_buckets(
        &rules()
            .filter(|(_, algorithm)| *algorithm == Algorithm::LeakyBucket)
            .map(|(limit, _)| limit)
            .collect::<Vec<_>>(),
        problems,
    );
    let covered =
        rules().any(|(limit, algorithm)| algorithm != Algorithm::Concurrency && covers_everything(limit));
    if !covered {
        let message = "no enforced limit applies to every HTTP request on every route";
        problems.warning(
            Warning::NotCovered,
            file.limits_position,
            message,
            "add one `by: ip`, without `when` and `unless`",
        );
    }
    header_facts(file, problems);
    for (limit, rule) in file.limits.iter().zip(policy.rules()) {
        leased(file, limit, rule, problems);
    }
    for limit in file.limits.iter().filter(|limit| limit.mode != Mode::Off) {
        cost(file, limit, problems);
        conditions(file, limit, problems);
        tier_periods(limit, problems);
    }
    let releases =
        file.listen.http != Some(Listener::Off) || matches!(file.listen.proxy, Some(Listener::At(_)));
    for (limit, _) in rules().filter(|(limit, algorithm)| {
        !releases && *algorithm == Algorithm::Concurrency && limit.mode != Mode::Off
    }) {
        let message =
            format!("{}no listener takes slots: gRPC and RESP skip concurrency limits", limit.subject);
        problems.warning(
            Warning::NoSlots,
            limit.position,
            message,
            "turn on `listen.http` or `listen.proxy`",
        );
    }
}

/// Warns of a leased limit that is decided exactly all the same.
fn leased(file: &RawConfig, limit: &RawLimit, rule: &Rule, problems: &mut Problems) {
    let Some(leased) = limit.leased.as_ref().filter(|_| limit.mode != Mode::Off) else { return };
    if file.store.value == StoreUrl::Memory {
        let message = format!("{}it is `leased`, but the store is in memory: it is exact", limit.subject);
        let help = "leave it out, or use a store on Redis";
        problems.warning(Warning::LeasedInMemory, leased.position, message, help);
        return;
    }
    for grant in rule.grants() {
        let Grant::Limited { quota, .. } = grant else { continue };
        let largest = rule.largest_count(quota.period());
        let Err(NotLeased::TooSmall(large_enough)) = Lease::of(quota, largest) else { continue };
        let (count, period) = (quota.count(), quota.period());
        let burst = match quota.algorithm().has_burst() {
            true => format!(" with a burst of {}", quota.burst()),
            false => String::new(),
        };
        let message =
            format!("{}{count}/{period}{burst} is too small to be leased: it is exact", limit.subject);
        let help = format!("{large_enough} would be large enough");
        problems.warning(Warning::TooSmallToLease, leased.position, message, help);
        return;
    }
}

/// Warns of a limit that charges a fact which no setting supplies: it rejects every HTTP request.
fn cost(file: &RawConfig, limit: &RawLimit, problems: &mut Problems) {
    let (Some(fact), None) = (&limit.cost, &limit.cost_missing) else { return };
    let declared = file.http.facts.iter().any(|declared| declared.name == fact.value);
    // With a condition on the fact, the limit does not apply to requests without it.
    let required = limit.when.iter().any(|located| located.value.0 == fact.value);
    if declared || required || PARTS.iter().any(|part| fact.value.starts_with(part)) {
        return;
    }
    // A shadow limit never fails a request.
    let happens = if limit.mode == Mode::Shadow { "does not count" } else { "rejects" };
    let message = format!(
        "{}it charges the fact {}, which no entry of `http.facts` supplies: it {happens} HTTP requests without it",
        limit.subject,
        quoted(&fact.value)
    );
    let help = "add the fact, or say what happens without it: `cost_missing: error`, `skip` or a number";
    problems.warning(Warning::CostNotSupplied, fact.position, message, help);
}

/// Warns of conditions that no request can match.
fn conditions(file: &RawConfig, limit: &RawLimit, problems: &mut Problems) {
    for Located { value: (fact, patterns), position, .. } in limit.when.iter().chain(&limit.unless) {
        for pattern in patterns {
            let folded = match fact.as_str() {
                "method" => pattern.to_ascii_uppercase(),
                "host" => pattern.to_ascii_lowercase(),
                _ => pattern.clone(),
            };
            if folded != *pattern {
                let case = if fact == "method" { "upper" } else { "lower" };
                let message = format!(
                    "{}{} never matches: the fact `{fact}` is in {case} case",
                    limit.subject,
                    quoted(pattern)
                );
                let help = format!("write {}", quoted(&folded));
                problems.warning(Warning::NeverMatches, *position, message, help);
            }
            let mut routes = file.http.routes.iter().map(String::as_str).chain(["unmatched"]);
            if fact == "route" && !file.http.routes.is_empty() && !routes.any(|route| matches(pattern, route))
            {
                let message =
                    format!("{}the route {} matches none of `http.routes`", limit.subject, quoted(pattern));
                let help = "add it there, or use a pattern that is listed there";
                problems.warning(Warning::UnknownRoute, *position, message, help);
            }
        }
    }
}

/// Warns of tiers with different periods: a client that changes its tier loses its count.
fn tier_periods(limit: &RawLimit, problems: &mut Problems) {
    let Some(tiers) = &limit.tiers else { return };
    let mut periods: Vec<Span> = Vec::new();
    for (_, grant) in &tiers.list {
        match grant.rate.as_ref().map(|located| located.value.rate) {
            Some(Rate::Every { count: 1.., period }) if !periods.contains(&period) => periods.push(period),
            _ => {}
        }
    }
    if let [first, .., last] = &periods[..] {
        let message = format!(
            "{}its tiers have different periods ({first}, {last}): a client that changes its tier starts with a fresh count",
            limit.subject
        );
        problems.warning(Warning::TierPeriods, tiers.position, message, "give all tiers the same period");
    }
}

/// Warns of numbers that `share` changes by more than 10 % because of rounding.
fn share(share: Share, limit: &RawLimit, grant: &RawGrant, what: &str, problems: &mut Problems) {
    let count = grant.rate.as_ref().and_then(|located| match located.value.rate {
        Rate::Every { count, .. } => Some((count, located.position, located.unexpanded.is_some())),
        Rate::Unlimited => None,
    });
    let number = |located: &Option<Located<u64>>| {
        located.as_ref().map(|located| (located.value, located.position, located.unexpanded.is_some()))
    };
    for (number, position, hidden) in
        [count, number(&grant.burst), number(&grant.limit)].into_iter().flatten()
    {
        if share.rounds_badly(number) {
            let (granted, subject) = (share.of(number), &limit.subject);
            let of = if hidden { "this number".to_owned() } else { number.to_string() };
            let message = format!(
                "{subject}{what}a share of {share} of {of} is rounded to {granted}, an error of more than 10%"
            );
            problems.warning(Warning::Rounded, position, message, "use a larger count over a longer period");
        }
    }
}

/// Warns of two leaky buckets on one request: each spaces only its own departures, so neither spacing holds.
fn leaky_buckets(limits: &[&RawLimit], problems: &mut Problems) {
    // Comparing all pairs takes quadratic time, so only the first ones are compared.
    const COMPARED: usize = 200;
    let limits: Vec<_> = limits.iter().filter(|limit| limit.mode == Mode::Enforce).take(COMPARED).collect();
    for (index, limit) in limits.iter().enumerate() {
        if let Some(other) = limits[..index].iter().find(|other| can_apply_together(limit, other)) {
            let (this, other) = (limit.subject.trim_end_matches(": "), other.subject.trim_end_matches(": "));
            let message = format!(
                "{this} and {other} are leaky buckets that can apply to one request: each delays requests independently of the other"
            );
            problems.warning(
                Warning::LeakyBuckets,
                limit.position,
                message,
                "make one of them a token-bucket, or separate them with `when`",
            );
        }
    }
}

/// Whether both limits can apply to one request: not if a fact would need two values at once.
fn can_apply_together(one: &RawLimit, other: &RawLimit) -> bool {
    one.when.iter().all(|Located { value: (fact, patterns), .. }| {
        let others =
            other.when.iter().find(|located| located.value.0 == *fact).map(|located| &located.value.1);
        others.is_none_or(|others| patterns.iter().any(|a| others.iter().any(|b| overlap(a, b))))
    })
}

/// Whether a value can match both patterns. Two patterns with `*` are assumed to overlap.
fn overlap(a: &str, b: &str) -> bool {
    match (a.contains('*'), b.contains('*')) {
        (true, true) => true,
        (true, false) => matches(a, b),
        (false, _) => matches(b, a),
    }
}

/// Whether a limit applies to every HTTP request.
fn covers_everything(limit: &RawLimit) -> bool {
    let always = |fact: &str| EVERYWHERE.contains(&fact);
    let keyed = limit.missing != Missing::Skip || limit.by.iter().all(|fact| always(&fact.value));
    let whenever = limit.when.iter().all(|Located { value: (fact, patterns), .. }| {
        always(fact)
            && patterns.iter().any(|pattern| !pattern.is_empty() && pattern.bytes().all(|byte| byte == b'*'))
    });
    let plain = match &limit.tiers {
        None => Some(&limit.grant),
        Some(tiers) => tiers
            .list
            .iter()
            .find(|(name, _)| limit.default_tier.as_ref().is_some_and(|located| located.value == name.value))
            .map(|(_, grant)| grant),
    };
    let limited = plain
        .is_some_and(|grant| !matches!(&grant.rate, Some(located) if located.value.rate == Rate::Unlimited));
    limit.mode == Mode::Enforce && keyed && whenever && limit.unless.is_empty() && limited
}

/// Warns of facts that decide which grant a request gets, but that the client can choose.
fn header_facts(file: &RawConfig, problems: &mut Problems) {
    for limit in file.limits.iter().filter(|limit| limit.mode != Mode::Off) {
        let named = limit
            .by
            .iter()
            .chain(&limit.tier)
            .chain(&limit.cost)
            .map(|located| (located.value.as_str(), located.position));
        let conditions = limit
            .when
            .iter()
            .chain(&limit.unless)
            .map(|located| (located.value.0.as_str(), located.position));
        for (fact, position) in named.chain(conditions) {
            let Some(header) = fact.strip_prefix("header.") else { continue };
            let lower = header.to_ascii_lowercase();
            if lower != header {
                let message = format!(
                    "{}header names are in lower case: the fact {} is always absent",
                    limit.subject,
                    quoted(fact)
                );
                problems.warning(
                    Warning::HeaderCase,
                    position,
                    message,
                    format!("write `header.{}`", lower.escape_debug()),
                );
            } else if !CREDENTIALS.contains(&header) {
                let message = format!(
                    "{}any client can send the header {} with any value",
                    limit.subject,
                    quoted(header)
                );
                problems.warning(Warning::ClientHeader, position, message, "read it under `http.facts` with `trusted: true`, so that only `trusted_proxies` can set it");
            }
        }
    }
    for (fact, position) in file.http.facts.iter().zip(&file.fact_positions) {
        if fact.trusted && file.http.trusted_proxies.is_empty() {
            let message = format!(
                "fact {} is `trusted`, but `http.trusted_proxies` is empty: the fact is always absent",
                quoted(&fact.name)
            );
            problems.warning(
                Warning::NoProxies,
                *position,
                message,
                "list your proxies under `http.trusted_proxies`",
            );
        }
        if fact.trusted && matches!(fact.from, Source::Cookie(_) | Source::Query(_) | Source::Body(_)) {
            let message = format!(
                "fact {} is `trusted`, but is read from a part of the request that gateways forward as the client sent it",
                quoted(&fact.name)
            );
            let help = "let the gateway set a header, and read it with `from: header.NAME`";
            problems.warning(Warning::TrustedNotHeader, *position, message, help);
        }
        let Source::Header(header) = &fact.from else { continue };
        // A hashed fact is a secret, and the application that verifies it rejects an invented one.
        if fact.trusted || fact.hash || CREDENTIALS.contains(&header.as_str()) || !is_used(file, &fact.name) {
            continue;
        }
        let message = format!(
            "fact {}: any client can send the header {} with any value",
            quoted(&fact.name),
            quoted(header)
        );
        problems.warning(Warning::ClientHeader, *position, message, "add `trusted: true`, so that only `trusted_proxies` can set it; or `hash: true`, if it is a secret that your application verifies");
    }
}

fn is_used(file: &RawConfig, fact: &str) -> bool {
    file.limits.iter().filter(|limit| limit.mode != Mode::Off).any(|limit| {
        let mut named =
            limit.by.iter().chain(&limit.tier).chain(&limit.cost).map(|located| located.value.as_str());
        let mut conditions = limit.when.iter().chain(&limit.unless).map(|located| located.value.0.as_str());
        named.any(|name| name == fact) || conditions.any(|name| name == fact)
    })
}
