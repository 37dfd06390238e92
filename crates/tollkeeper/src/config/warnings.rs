//! What is allowed and yet probably not meant.

use tollkeeper_core::pattern::matches;
use tollkeeper_core::{Algorithm, Missing, Mode, Policy};

use super::excerpt::quoted;
use super::fields::Said;
use super::limit::{WrittenGrant, WrittenLimit};
use super::listen::Listener;
use super::meaning::every_grant;
use super::report::Problems;
use super::units::{Rate, Share};
use super::written::File;
use crate::http::Source;

/// The facts that every HTTP request has.
const EVERYWHERE: [&str; 4] = ["ip", "method", "path", "route"];
/// Headers that hold a credential: whoever checks it refuses one that was made up.
const CREDENTIALS: [&str; 2] = ["authorization", "cookie"];

/// Warns of what is in a file without mistakes.
pub(super) fn of(file: &File, policy: &Policy, problems: &mut Problems) {
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
        problems.warning(file.limits_place, message, "add one `by: ip`, without `when` and `unless`");
    }
    header_facts(file, problems);
    let releases =
        file.listen.http != Some(Listener::Off) || matches!(file.listen.proxy, Some(Listener::At(_)));
    for (limit, _) in rules().filter(|(limit, algorithm)| {
        !releases && *algorithm == Algorithm::Concurrency && limit.mode != Mode::Off
    }) {
        let message = format!(
            "{}nothing that listens takes slots: gRPC and RESP skip concurrency limits",
            limit.subject
        );
        problems.warning(limit.place, message, "turn on `listen.http` or `listen.proxy`");
    }
}

/// A share that cannot be had in whole numbers.
fn share(share: Share, limit: &WrittenLimit, grant: &WrittenGrant, what: &str, problems: &mut Problems) {
    let count = grant.rate.as_ref().and_then(|said| match said.value.rate {
        Rate::Every { count, .. } => Some((count, said.place, said.hidden.is_some())),
        Rate::Unlimited => None,
    });
    let number =
        |said: &Option<Said<u64>>| said.as_ref().map(|said| (said.value, said.place, said.hidden.is_some()));
    for (number, place, hidden) in [count, number(&grant.burst), number(&grant.limit)].into_iter().flatten() {
        if share.rounds_badly(number) {
            let (granted, subject) = (share.of(number), &limit.subject);
            let of = if hidden { "this number".to_owned() } else { number.to_string() };
            let message = format!(
                "{subject}{what}a share of {share} of {of} is rounded to {granted}, more than a tenth off"
            );
            problems.warning(place, message, "take a larger count over a longer period");
        }
    }
}

/// Each spaces its own departures; together they space neither.
fn leaky_buckets(limits: &[&WrittenLimit], problems: &mut Problems) {
    // Whoever has hundreds of them is told of the first few.
    const LOOKED_AT: usize = 200;
    let limits: Vec<_> = limits.iter().filter(|limit| limit.mode == Mode::Enforce).take(LOOKED_AT).collect();
    for (index, limit) in limits.iter().enumerate() {
        if let Some(other) = limits[..index].iter().find(|other| can_meet(limit, other)) {
            let (this, other) = (limit.subject.trim_end_matches(": "), other.subject.trim_end_matches(": "));
            let message = format!(
                "{this} and {other} are leaky buckets that can meet on one request: each spaces requests without knowing of the other"
            );
            problems.warning(
                limit.place,
                message,
                "make one of them a token-bucket, or keep them apart with `when`",
            );
        }
    }
}

/// Whether one request can meet both: unless a fact would need two values at once.
fn can_meet(one: &WrittenLimit, other: &WrittenLimit) -> bool {
    one.when.iter().all(|Said { value: (fact, patterns), .. }| {
        let others = other.when.iter().find(|said| said.value.0 == *fact).map(|said| &said.value.1);
        others.is_none_or(|others| patterns.iter().any(|a| others.iter().any(|b| overlap(a, b))))
    })
}

/// Whether a value can match both patterns. Two with stars are taken to.
fn overlap(a: &str, b: &str) -> bool {
    match (a.contains('*'), b.contains('*')) {
        (true, true) => true,
        (true, false) => matches(a, b),
        (false, _) => matches(b, a),
    }
}

/// Whether no HTTP request can come past a limit.
fn covers_everything(limit: &WrittenLimit) -> bool {
    let always = |fact: &str| EVERYWHERE.contains(&fact);
    let keyed = limit.missing != Missing::Skip || limit.by.iter().all(|fact| always(&fact.value));
    let whenever = limit.when.iter().all(|Said { value: (fact, patterns), .. }| {
        always(fact)
            && patterns.iter().any(|pattern| !pattern.is_empty() && pattern.bytes().all(|byte| byte == b'*'))
    });
    let plain = match &limit.tiers {
        None => Some(&limit.grant),
        Some(tiers) => tiers
            .list
            .iter()
            .find(|(name, _)| limit.default_tier.as_ref().is_some_and(|said| said.value == name.value))
            .map(|(_, grant)| grant),
    };
    let limited =
        plain.is_some_and(|grant| !matches!(&grant.rate, Some(said) if said.value.rate == Rate::Unlimited));
    limit.mode == Mode::Enforce && keyed && whenever && limit.unless.is_empty() && limited
}

/// Facts that decide what a request is granted, and that its sender can choose.
fn header_facts(file: &File, problems: &mut Problems) {
    for limit in file.limits.iter().filter(|limit| limit.mode != Mode::Off) {
        let named = limit
            .by
            .iter()
            .chain(&limit.tier)
            .chain(&limit.cost)
            .map(|said| (said.value.as_str(), said.place));
        let conditions =
            limit.when.iter().chain(&limit.unless).map(|said| (said.value.0.as_str(), said.place));
        for (fact, place) in named.chain(conditions) {
            let Some(header) = fact.strip_prefix("header.") else { continue };
            let lower = header.to_ascii_lowercase();
            if lower != header {
                let message = format!(
                    "{}headers have names in lower case: the fact {} is never there",
                    limit.subject,
                    quoted(fact)
                );
                problems.warning(place, message, format!("write `header.{}`", lower.escape_debug()));
            } else if !CREDENTIALS.contains(&header) {
                let message = format!(
                    "{}any client can send the header {} with any value",
                    limit.subject,
                    quoted(header)
                );
                problems.warning(place, message, "read it under `http.facts` with `trusted: true`, so that only `trusted_proxies` can set it");
            }
        }
    }
    for (fact, place) in file.http.facts.iter().zip(&file.fact_places) {
        if fact.trusted && file.http.trusted_proxies.is_empty() {
            let message = format!(
                "fact {} is taken from `trusted_proxies` only, and there are none: it is never there",
                quoted(&fact.name)
            );
            problems.warning(*place, message, "list your proxies under `http.trusted_proxies`");
        }
        let Source::Header(header) = &fact.from else { continue };
        // What is hashed is a secret, which whoever checks it refuses when it was made up.
        if fact.trusted || fact.hash || CREDENTIALS.contains(&header.as_str()) || !is_used(file, &fact.name) {
            continue;
        }
        let message = format!(
            "fact {}: any client can send the header {} with any value",
            quoted(&fact.name),
            quoted(header)
        );
        problems.warning(*place, message, "add `trusted: true`, so that only `trusted_proxies` can set it; or `hash: true`, if it is a secret that is checked elsewhere");
    }
}

fn is_used(file: &File, fact: &str) -> bool {
    file.limits.iter().filter(|limit| limit.mode != Mode::Off).any(|limit| {
        let mut named = limit.by.iter().chain(&limit.tier).chain(&limit.cost).map(|said| said.value.as_str());
        let mut conditions = limit.when.iter().chain(&limit.unless).map(|said| said.value.0.as_str());
        named.any(|name| name == fact) || conditions.any(|name| name == fact)
    })
}
