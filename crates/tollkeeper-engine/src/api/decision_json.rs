//! Writes decisions as JSON. The format is API: fields are only ever added.

use tollkeeper::facts::DeclaredFacts;
use tollkeeper::{
    Decision, Facts, InvalidRequest, KeyState, LimitDecision, Limiter, Policy, Retry, Span, Verdict,
};

use crate::api::redact::Redactor;
use crate::json::Writer;

/// Writes a decision. `limiter` must be the one that made it, because it seals the charge.
pub fn write_decision(out: &mut Writer, limiter: &Limiter, redactor: &Redactor, decision: &Decision) {
    write_fields(out, limiter, redactor, decision);
    out.raw("}");
}

/// Writes a decision with the sealed slot that was acquired, if any.
pub fn write_acquired(
    out: &mut Writer,
    limiter: &Limiter,
    redactor: &Redactor,
    decision: &Decision,
    slot: Option<&str>,
) {
    write_fields(out, limiter, redactor, decision);
    out.raw(",\"slot\":");
    out.or_null(slot, Writer::text);
    out.raw("}");
}

fn write_fields(out: &mut Writer, limiter: &Limiter, redactor: &Redactor, decision: &Decision) {
    let (verdict, binding) = decision.conclusion();
    let (retry, delay) = match verdict {
        Verdict::Allow { delay } => (None, delay),
        Verdict::Deny { retry } => (Some(retry), Span::ZERO),
    };
    out.raw("{\"allowed\":");
    out.bool(retry.is_none());
    out.raw(",\"binding\":");
    out.or_null(binding, |out, answer| out.text(answer.name()));
    out.raw(",\"retry_after\":");
    out.or_null(wait(retry), Writer::seconds);
    out.raw(",\"delay\":");
    out.seconds(delay);
    out.raw(",\"degraded\":");
    out.or_null(decision.degraded(), |out, by| out.text(by.name()));
    if retry == Some(Retry::Never) {
        out.raw(",\"never\":true");
    }
    if let Some(reason) = decision.reason() {
        out.raw(",\"reason\":");
        out.text(&reason.to_string());
    }
    out.raw(",\"charge\":");
    out.or_null(decision.charge(), |out, charge| {
        // Letters and digits only, so no escaping.
        out.raw("\"");
        out.raw(&limiter.seal_charge(&charge));
        out.raw("\"");
    });
    out.raw(",\"limits\":");
    write_limits(out, redactor, decision);
}

/// Writes the list of the limits that applied, each with its outcome.
pub fn write_limits(out: &mut Writer, redactor: &Redactor, decision: &Decision) {
    let declared = decision.toll().policy().declared();
    out.list(decision.limits(), |out, answer| {
        let more = |out: &mut Writer| write_override(out, decision.toll().policy(), &answer);
        write_limit(out, &answer, |out| write_key(out, redactor, declared, &answer), more);
    });
}

/// Writes what is stored for a key, and its reference: `{"limits":[…],"ref":"…"}`.
pub fn write_key_states<E>(
    out: &mut Writer,
    redactor: &Redactor,
    states: &[KeyState],
    write_ref: impl FnOnce(&mut Writer) -> Result<(), E>,
) -> Result<(), E> {
    out.raw("{\"limits\":");
    let limits = states.iter().flat_map(|state| state.decision.limits().map(move |limit| (state, limit)));
    out.list(limits, |out, (state, answer)| {
        let declared = state.decision.toll().policy().declared();
        write_limit(
            out,
            &answer,
            |out| write_key(out, redactor, declared, &answer),
            |out| {
                write_override(out, state.decision.toll().policy(), &answer);
                if !state.tiers.is_empty() {
                    out.raw(",\"tier\":");
                    out.text(&state.tiers.join(", "));
                }
            },
        );
    });
    out.raw(",\"ref\":");
    write_ref(out)?;
    out.raw("}");
    Ok(())
}

/// Writes `,"override":{"until":…}` if an override at run time applies.
fn write_override(out: &mut Writer, policy: &Policy, answer: &LimitDecision<'_>) {
    if !policy.has_overrides() {
        return;
    }
    if let Some(until) = policy.override_until(answer.key()) {
        out.raw(",\"override\":{\"until\":");
        out.or_null(until, Writer::number);
        out.raw("}");
    }
}

fn write_key(out: &mut Writer, redactor: &Redactor, declared: &DeclaredFacts, answer: &LimitDecision<'_>) {
    out.list(answer.rule().by().iter().zip(answer.key().texts()), |out, (fact, value)| {
        out.or_null(value, |out, value| out.text(&redactor.redact(declared, fact, value)));
    });
}

/// Writes for each limit whether it applies to these facts and why: `{"limits":[…]}`.
pub fn write_explained(
    out: &mut Writer,
    policy: &Policy,
    facts: &Facts<'_>,
    redactor: &Redactor,
) -> Result<(), InvalidRequest> {
    let explained = policy.explain(facts)?;
    out.raw("{\"limits\":");
    out.list(&explained, |out, limit| {
        out.raw("{\"name\":");
        out.text(limit.rule.name());
        out.raw(",\"mode\":");
        out.text(limit.rule.mode().name());
        out.raw(",\"applies\":");
        out.bool(limit.applicability.applies());
        out.raw(",\"why\":");
        out.text(&limit.applicability.to_string());
        out.raw(",\"key\":");
        out.or_null(limit.applicability.key(), |out, key| {
            out.text(&redactor.redact_key(policy.declared(), limit.rule.by(), key));
        });
        out.raw(",\"cost\":");
        out.or_null(limit.rule.cost_fact(), Writer::text);
        out.raw("}");
    });
    out.raw("}");
    Ok(())
}

fn write_limit(
    out: &mut Writer,
    answer: &LimitDecision<'_>,
    key: impl FnOnce(&mut Writer),
    more: impl FnOnce(&mut Writer),
) {
    let outcome = answer.outcome();
    out.raw("{\"name\":");
    out.text(answer.name());
    out.raw(",\"key\":");
    key(out);
    out.raw(",\"algorithm\":");
    out.text(answer.rule().algorithm().name());
    out.raw(",\"mode\":");
    out.text(answer.rule().mode().name());
    out.raw(",\"allowed\":");
    out.bool(outcome.allowed);
    out.raw(",\"cost\":");
    out.number(answer.due().cost);
    out.raw(",\"limit\":");
    out.number(outcome.limit);
    // `remaining` and `reset_after` are unknown if a failure policy decided without counting, or the store was not asked.
    let counted = answer.counted();
    out.raw(",\"remaining\":");
    out.or_null(counted.then_some(outcome.remaining), Writer::number);
    out.raw(",\"retry_after\":");
    out.or_null(wait(outcome.retry), Writer::seconds);
    out.raw(",\"reset_after\":");
    out.or_null(outcome.reset_after.filter(|_| counted), Writer::seconds);
    out.raw(",\"degraded\":");
    out.or_null(answer.degraded(), |out, by| out.text(by.name()));
    if outcome.retry == Some(Retry::Never) {
        out.raw(",\"never\":true");
    }
    if answer.approximation().is_some() {
        out.raw(",\"approximate\":true");
    }
    if outcome.overflow {
        out.raw(",\"overflow\":true");
    }
    more(out);
    out.raw("}");
}

/// Time until a retry can pass; `None` if allowed, or if no retry can ever pass.
fn wait(retry: Option<Retry>) -> Option<Span> {
    match retry {
        Some(Retry::After(span)) => Some(span),
        Some(Retry::Never) | None => None,
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Display;
    use std::time::Duration;

    use tollkeeper::{Algorithm, Capacity, Clock, Limit, ManualClock, MemoryStore, Mode, Quota};
    use tollkeeper::{Time, facts};
    use tollkeeper_core::time::Seconds;

    use super::*;

    /// The expected JSON of a decision: an independent, straightforward implementation with `format!`.
    fn expected(decision: &Decision, charge: Option<&str>) -> String {
        let (verdict, never) = match decision.verdict() {
            Verdict::Allow { delay } => (format!("null,\"delay\":{}", seconds(delay)), ""),
            Verdict::Deny { retry: Retry::After(span) } => (format!("{},\"delay\":0", seconds(span)), ""),
            Verdict::Deny { retry: Retry::Never } => ("null,\"delay\":0".to_owned(), ",\"never\":true"),
        };
        let limits: Vec<String> = decision.limits().map(|answer| expected_limit(&answer)).collect();
        let reason = decision.reason().map(|reason| format!(",\"reason\":{:?}", reason.to_string()));
        format!(
            "{{\"allowed\":{},\"binding\":{},\"retry_after\":{verdict},\"degraded\":null{never}{},\
             \"charge\":{},\"limits\":[{}]}}",
            decision.allowed(),
            or_null(decision.binding().map(|answer| format!("{:?}", answer.name()))),
            reason.unwrap_or_default(),
            or_null(charge.map(|charge| format!("{charge:?}"))),
            limits.join(","),
        )
    }

    fn expected_limit(answer: &LimitDecision<'_>) -> String {
        let outcome = answer.outcome();
        let key: Vec<String> =
            answer.key().texts().map(|text| or_null(text.map(|text| format!("{text:?}")))).collect();
        format!(
            "{{\"name\":{:?},\"key\":[{}],\"algorithm\":\"{}\",\"mode\":\"{}\",\"allowed\":{},\"cost\":{},\
             \"limit\":{},\"remaining\":{},\"retry_after\":{},\"reset_after\":{},\"degraded\":null{}}}",
            answer.name(),
            key.join(","),
            answer.rule().algorithm(),
            answer.rule().mode().name(),
            outcome.allowed,
            answer.due().cost,
            outcome.limit,
            outcome.remaining,
            or_null(wait(outcome.retry).map(seconds)),
            or_null(outcome.reset_after.map(seconds)),
            if outcome.retry == Some(Retry::Never) { ",\"never\":true" } else { "" },
        )
    }

    fn or_null(value: Option<impl Display>) -> String {
        value.map_or_else(|| "null".to_owned(), |value| value.to_string())
    }

    fn seconds(span: Span) -> String {
        let point = span > Span::ZERO && span.as_micros().is_multiple_of(1_000_000);
        format!("{}{}", Seconds(span), if point { ".0" } else { "" })
    }

    #[test]
    fn every_kind_of_decision_is_written_as_expected() {
        let clock = ManualClock::new(Time::from_micros(1_760_000_000_000_000));
        let store = MemoryStore::new(Capacity::default(), Clock::manual(&clock));
        let policy = Policy::new(vec![
            Limit::new("bucket", Quota::per_minute(100).burst(20)).by("user"),
            Limit::new("queue", Quota::per_second(7))
                .algorithm(Algorithm::LeakyBucket)
                .by("user")
                .by("route"),
            Limit::new("window", Quota::per_hour(50)).algorithm(Algorithm::FixedWindow).mode(Mode::Shadow),
            Limit::new("log", Quota::per(9, Duration::from_millis(1_500))).algorithm(Algorithm::SlidingLog),
        ]);
        let limiter = Limiter::embedded(policy.unwrap(), store);
        let (mut allowed, mut refused, mut never) = (0, 0, 0);
        for round in 0..2_000u64 {
            // Steps of every length, a tenth of a second on average.
            clock.advance(Span::from_micros(round * 7_919 % 200_003));
            let user = format!("user \"{}\"", round % 3);
            let facts: Facts<'_> = facts! { "user" => &user, "route" => "/a" };
            let cost = if round % 50 == 0 { 1_000 } else { 1 + round % 4 };
            let decision = limiter.check(&facts).cost(cost).wait().unwrap();
            match decision.verdict() {
                Verdict::Allow { .. } => allowed += 1,
                Verdict::Deny { retry: Retry::After(_) } => refused += 1,
                Verdict::Deny { retry: Retry::Never } => never += 1,
            }
            let charge = decision.charge().map(|charge| limiter.seal_charge(&charge));
            let mut out = Writer::default();
            write_decision(&mut out, &limiter, &Redactor::default(), &decision);
            assert_eq!(out.finish(), expected(&decision, charge.as_deref()), "round {round}");
        }
        assert!(allowed > 100 && refused > 100 && never > 10, "{allowed} {refused} {never}");
    }
}
