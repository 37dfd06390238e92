//! What is answered: a decision as JSON. Fields are only ever added.

use std::fmt::{self, Display, Write as _};

use tollkeeper::decision::Answer;
use tollkeeper::reason::Seconds;
use tollkeeper::{Decision, Limiter, OnStoreFailure, Retry, Span, Verdict};

use crate::json::Quoted;

/// Writes a decision; the limiter is the one that made it, and seals its receipt.
pub fn write_decision(out: &mut String, limiter: &Limiter, decision: &Decision) {
    decision_to(out, limiter, decision).expect("a string takes everything");
}

fn decision_to(out: &mut String, limiter: &Limiter, decision: &Decision) -> fmt::Result {
    let verdict = decision.verdict();
    let (retry, delay) = match verdict {
        Verdict::Allow { delay } => (None, delay),
        Verdict::Deny { retry } => (Some(retry), Span::ZERO),
    };
    let binding = decision.binding();
    write!(out, "{{\"allowed\":{},\"binding\":", retry.is_none())?;
    or_null(out, binding.map(|answer| Quoted(answer.name())))?;
    write!(out, ",\"retry_after\":{},\"delay\":{},\"degraded\":", Wait(retry), Number(delay))?;
    or_null(out, decision.degraded().map(|by| Quoted(by.name())))?;
    if retry == Some(Retry::Never) {
        out.push_str(",\"never\":true");
    }
    if let Some(reason) = decision.reason() {
        write!(out, ",\"reason\":{}", Quoted(&reason.to_string()))?;
    }
    out.push_str(",\"charge\":");
    or_null(out, decision.charge().map(|charge| format!("\"{}\"", limiter.seal_charge(&charge))))?;
    out.push_str(",\"limits\":");
    write_limits(out, decision)?;
    out.push('}');
    Ok(())
}

/// Writes what each limit that applied says, as a list.
pub fn write_limits(out: &mut String, decision: &Decision) -> fmt::Result {
    out.push('[');
    for (index, answer) in decision.limits().enumerate() {
        if index > 0 {
            out.push(',');
        }
        write_limit(out, &answer)?;
    }
    out.push(']');
    Ok(())
}

fn write_limit(out: &mut String, answer: &Answer<'_>) -> fmt::Result {
    let (due, outcome) = (answer.due(), answer.outcome());
    write!(out, "{{\"name\":{},\"key\":[", Quoted(answer.name()))?;
    for (index, value) in answer.key().texts().enumerate() {
        if index > 0 {
            out.push(',');
        }
        or_null(out, value.map(Quoted))?;
    }
    write!(
        out,
        "],\"algorithm\":\"{}\",\"mode\":\"{}\",\"allowed\":{},\"cost\":{},\"limit\":{},\"remaining\":",
        answer.rule().algorithm(),
        answer.rule().mode().name(),
        outcome.allowed,
        due.cost,
        outcome.limit,
    )?;
    // Who decides without counting knows neither.
    let counted = !matches!(answer.degraded(), Some(OnStoreFailure::Allow | OnStoreFailure::Deny));
    or_null(out, counted.then_some(outcome.remaining))?;
    write!(out, ",\"retry_after\":{},\"reset_after\":", Wait(outcome.retry))?;
    or_null(out, outcome.reset_after.filter(|_| counted).map(Number))?;
    out.push_str(",\"degraded\":");
    or_null(out, answer.degraded().map(|by| Quoted(by.name())))?;
    if outcome.retry == Some(Retry::Never) {
        out.push_str(",\"never\":true");
    }
    out.push('}');
    Ok(())
}

fn or_null(out: &mut String, value: Option<impl Display>) -> fmt::Result {
    match value {
        Some(value) => write!(out, "{value}"),
        None => out.write_str("null"),
    }
}

/// When to come again, where waiting cures.
struct Wait(Option<Retry>);

impl Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(Retry::After(span)) => Number(span).fmt(f),
            Some(Retry::Never) | None => f.write_str("null"),
        }
    }
}

/// Decimal seconds: `0`, `0.6`, `12.0`.
struct Number(Span);

impl Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let point = self.0 > Span::ZERO && self.0.as_micros().is_multiple_of(1_000_000);
        write!(f, "{}{}", Seconds(self.0), if point { ".0" } else { "" })
    }
}
