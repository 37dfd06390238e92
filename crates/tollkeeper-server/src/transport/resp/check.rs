//! `TK.CHECK` and `TK.PEEK`: read facts, and write decisions with the fields of the JSON API.

use tollkeeper::LimitDecision;
use tollkeeper::{Decision, Facts, InvalidRequest, Limiter, Policy, Retry, Span, Verdict};
use tollkeeper_engine::api::error::{ApiError, Code};
use tollkeeper_engine::api::redact::Redactor;

use super::parse::Arguments;
use super::reply::Replies;

/// Reads `[COST n] fact value …`.
pub fn read(arguments: Arguments<'_>) -> Result<(Facts<'_>, u64), ApiError> {
    let mut words = arguments.from(1).peekable();
    let mut cost = 1;
    if words.next_if(|word| word.eq_ignore_ascii_case(b"COST")).is_some() {
        let word = words.next().unwrap_or_default();
        let number = std::str::from_utf8(word).ok().and_then(|text| text.parse().ok());
        cost = number.ok_or_else(|| {
            let word = word.escape_ascii();
            ApiError::new(
                Code::InvalidCost,
                format!("the cost `{word:.64}` is not a whole number from 1 to 2147483648"),
            )
        })?;
    }
    let mut facts = Facts::new();
    while let Some(word) = words.next() {
        let invalid = |what: &str| {
            let message = format!("fact `{:.64}`: {what}", word.escape_ascii());
            ApiError::new(Code::InvalidFact, message)
        };
        let name = std::str::from_utf8(word).map_err(|_| invalid("a name must be UTF-8"))?;
        let value = words.next().ok_or_else(|| invalid("it has no value (facts are pairs: user alice)"))?;
        if facts.iter().any(|(other, _)| other == name) {
            let message = format!("fact `{:.64}` is given twice", word.escape_ascii());
            return Err(ApiError::new(Code::DuplicateField, message));
        }
        facts.insert_bytes(name, value).map_err(InvalidRequest::Fact)?;
    }
    Ok((facts, cost))
}

/// Writes a decision. `limiter` must be the one that made it, because it seals the charge.
pub fn write(out: &mut Replies, limiter: &Limiter, redactor: &Redactor, decision: &Decision) {
    let (verdict, binding) = decision.conclusion();
    let (retry, delay) = match verdict {
        Verdict::Allow { delay } => (None, delay),
        Verdict::Deny { retry } => (Some(retry), Span::ZERO),
    };
    let (never, reason) = (retry == Some(Retry::Never), decision.reason());
    out.map(7 + usize::from(never) + usize::from(reason.is_some()));
    out.bulk(b"allowed");
    out.boolean(retry.is_none());
    out.bulk(b"binding");
    out.or_null(binding, |out, answer| out.bulk(answer.name().as_bytes()));
    out.bulk(b"retry_after");
    out.or_null(wait(retry), Replies::seconds);
    out.bulk(b"delay");
    out.seconds(delay);
    out.bulk(b"degraded");
    out.or_null(decision.degraded(), |out, by| out.bulk(by.name().as_bytes()));
    if never {
        out.bulk(b"never");
        out.boolean(true);
    }
    if let Some(reason) = reason {
        out.bulk(b"reason");
        out.bulk(reason.to_string().as_bytes());
    }
    out.bulk(b"charge");
    out.or_null(decision.charge(), |out, charge| out.bulk(limiter.seal_charge(&charge).as_bytes()));
    out.bulk(b"limits");
    let limits = decision.limits();
    out.array(limits.len());
    let policy = decision.toll().policy();
    limits.for_each(|answer| write_limit(out, redactor, policy, &answer));
}

fn write_limit(out: &mut Replies, redactor: &Redactor, policy: &Policy, answer: &LimitDecision<'_>) {
    let outcome = answer.outcome();
    let never = outcome.retry == Some(Retry::Never);
    let approximate = answer.approximation().is_some();
    let override_until = if policy.has_overrides() { policy.override_until(answer.key()) } else { None };
    let optional = [never, approximate, outcome.overflow, override_until.is_some()];
    out.map(11 + optional.into_iter().filter(|present| *present).count());
    out.bulk(b"name");
    out.bulk(answer.name().as_bytes());
    out.bulk(b"key");
    out.array(answer.key().texts().count());
    for (fact, value) in answer.rule().by().iter().zip(answer.key().texts()) {
        out.or_null(value, |out, value| out.bulk(redactor.redact(policy.declared(), fact, value).as_bytes()));
    }
    out.bulk(b"algorithm");
    out.bulk(answer.rule().algorithm().name().as_bytes());
    out.bulk(b"mode");
    out.bulk(answer.rule().mode().name().as_bytes());
    out.bulk(b"allowed");
    out.boolean(outcome.allowed);
    out.bulk(b"cost");
    out.number(answer.due().cost);
    out.bulk(b"limit");
    out.number(outcome.limit);
    // `remaining` and `reset_after` are unknown if a failure policy decided without counting, or the store was not asked.
    let counted = answer.counted();
    out.bulk(b"remaining");
    out.or_null(counted.then_some(outcome.remaining), Replies::number);
    out.bulk(b"retry_after");
    out.or_null(wait(outcome.retry), Replies::seconds);
    out.bulk(b"reset_after");
    out.or_null(outcome.reset_after.filter(|_| counted), Replies::seconds);
    out.bulk(b"degraded");
    out.or_null(answer.degraded(), |out, by| out.bulk(by.name().as_bytes()));
    if never {
        out.bulk(b"never");
        out.boolean(true);
    }
    if approximate {
        out.bulk(b"approximate");
        out.boolean(true);
    }
    if outcome.overflow {
        out.bulk(b"overflow");
        out.boolean(true);
    }
    if let Some(until) = override_until {
        out.bulk(b"override");
        out.map(1);
        out.bulk(b"until");
        out.or_null(until, Replies::number);
    }
}

/// Time until a retry can pass; `None` if allowed, or if no retry can ever pass.
fn wait(retry: Option<Retry>) -> Option<Span> {
    match retry {
        Some(Retry::After(span)) => Some(span),
        Some(Retry::Never) | None => None,
    }
}
