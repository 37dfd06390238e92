//! The report as JSON.

use serde_json::{Value, json};
use tollkeeper::Mode;

use super::{Against, Report};
use crate::simulate::plan::NotSimulated;
use crate::simulate::suggest::Suggestion;
use crate::simulate::tally::LimitResult;
use crate::simulate::world::RequestCounts;

/// The report as JSON. Times are seconds since 1970.
pub fn json(report: &Report) -> Value {
    let lines = &report.lines;
    json!({
        "version": 1,
        "lines": {
            "read": lines.read, "used": lines.used, "unreadable": lines.unreadable, "late": lines.late,
        },
        "span": report.result.span.map(|(from, until)| [from, until]),
        "spread": report.spread,
        "requests": requests(&report.result.requests),
        "limits": report.result.limits.iter().map(limit).collect::<Vec<_>>(),
        "against": report.against.iter().map(against).collect::<Vec<_>>(),
        "algorithms": report.algorithms.iter().map(|row| json!({
            "name": row.name, "algorithm": row.algorithm.name(), "asked": row.asked, "refused": row.refused,
        })).collect::<Vec<_>>(),
        "suggest": report.suggest.iter().map(suggestion).collect::<Vec<_>>(),
        "not_simulated": not_simulated(&report.not_simulated),
        "fail_if": report.fail_if.iter().map(|checked| json!({
            "expr": checked.expr, "value": checked.value, "held": checked.held,
        })).collect::<Vec<_>>(),
        "notes": report.notes,
    })
}

fn requests(counts: &RequestCounts) -> Value {
    json!({ "allowed": counts.allowed, "refused": counts.refused, "invalid": counts.invalid })
}

fn limit(limit: &LimitResult) -> Value {
    let is_shadow = limit.mode == Mode::Shadow;
    let top = limit.top.iter().map(|key| {
        json!({
            "key": key.key, "asked": key.asked, "refused": key.refused,
            "first": key.refusals.map(|(first, _)| first), "last": key.refusals.map(|(_, last)| last),
            "error": key.error,
        })
    });
    let seconds = |micros: u64| micros as f64 / 1e6;
    json!({
        "name": limit.name,
        "mode": limit.mode.name(),
        "algorithm": limit.algorithm.name(),
        "asked": limit.asked,
        "refused": if is_shadow { 0 } else { limit.refused },
        "would_refuse": if is_shadow { limit.refused } else { 0 },
        "keys": limit.keys.count,
        "keys_refused": limit.refused_keys.count,
        "keys_exact": limit.keys.is_exact && limit.refused_keys.is_exact,
        "longest_wait": seconds(limit.longest_wait.as_micros()),
        "top": top.collect::<Vec<_>>(),
        "timeline": limit.timeline.intervals().map(|(time, asked, refused)| json!([time, asked, refused]))
            .collect::<Vec<_>>(),
        "delay": limit.delay.map(|delay| json!({
            "p50": seconds(delay.p50), "p99": seconds(delay.p99), "longest": seconds(delay.longest),
        })),
    })
}

fn against(against: &Against) -> Value {
    json!({
        "policy": against.policy,
        "requests": requests(&against.result.requests),
        "limits": against.result.limits.iter().map(limit).collect::<Vec<_>>(),
        "not_simulated": not_simulated(&against.not_simulated),
    })
}

fn not_simulated(limits: &[NotSimulated]) -> Vec<Value> {
    limits.iter().map(|limit| json!({ "name": limit.name, "why": limit.why })).collect()
}

fn suggestion(suggestion: &Suggestion) -> Value {
    let answer = suggestion.answer.as_ref();
    let below = answer.and_then(|answer| answer.below);
    json!({
        "name": suggestion.name,
        "count": answer.map(|answer| answer.at.count),
        "rate": answer.map(|answer| &answer.rate),
        "burst": answer.and_then(|answer| answer.burst),
        "share": answer.map(|answer| answer.at.share),
        "below": below.map(|below| json!({ "count": below.count, "share": below.share })),
        "keys": answer.map(|answer| answer.at.keys),
        "line": answer.map(super::super::suggest::SuggestedRate::line),
        "tried": suggestion.tried.iter().map(|tried| json!([tried.count, tried.share])).collect::<Vec<_>>(),
    })
}
