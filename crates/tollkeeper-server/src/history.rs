//! Histories of admissions: the lines that `serve --log-admissions` writes and `verify` reads.
//!
//! ```text
//! {"t":1794829062000000,"limit":"per-user","key":["alice"],"cost":1,"tier":"free"}
//! {"t":1794829062000000,"limit":"per-user","key":["bob"],"cost":1,"override":{"rate":"500/min","burst":50}}
//! ```

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use tollkeeper::policy::Grant;
use tollkeeper::{
    Algorithm, Allowance, CheckedQuota, DecidedToll, LimitDecision, Policy, Quota, Span, config,
};
use tollkeeper_engine::api::redact::Redactor;

/// One admission by one limit: a line of a history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line<'a> {
    /// The time on the store's clock, in Unix microseconds.
    pub t: u64,
    /// The name of the limit.
    #[serde(borrow)]
    pub limit: Cow<'a, str>,
    /// The values of the facts that the limit is keyed by: `["alice"]`, or `[]` for a limit without `by`.
    pub key: Vec<Option<Cow<'a, str>>>,
    /// The cost.
    pub cost: u64,
    /// The tier, if the limit has tiers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier: Option<Cow<'a, str>>,
    /// By how many microseconds the windows of this key begin early, if the limit is staggered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shift: Option<u64>,
    /// The failure policy that admitted the request instead of the store: `local` or `allow`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub degraded: Option<Cow<'a, str>>,
    /// The quota of the key, if an override at run time applied.
    #[serde(rename = "override", default, skip_serializing_if = "Option::is_none")]
    pub overridden: Option<Overridden<'a>>,
}

/// The quota of an override: `{"rate":"500/min","burst":50}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overridden<'a> {
    /// As in the config: `500/min`.
    #[serde(borrow)]
    pub rate: Cow<'a, str>,
    /// The burst of a bucket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
}

impl Overridden<'_> {
    fn of(limit: &LimitDecision<'_>, policy: &Policy) -> Option<Overridden<'static>> {
        let quota = limit.due().quota;
        policy.override_until(limit.key())?;
        let burst = quota.algorithm().has_burst().then(|| quota.burst());
        Some(Overridden { rate: rate(quota.count(), quota.period()).into(), burst })
    }

    /// The quota, under a limit with this algorithm.
    pub fn quota(&self, algorithm: Algorithm) -> Result<CheckedQuota, String> {
        let Allowance::Quota(quota) = config::rate(&self.rate)? else {
            return Err(format!("rate `{}` admits nothing or everything", self.rate));
        };
        let quota = self.burst.into_iter().fold(quota, Quota::burst);
        CheckedQuota::new(algorithm, quota).map_err(|invalid| invalid.to_string())
    }
}

/// A rate as in the config: `500/min`.
pub fn rate(count: u64, period: Span) -> String {
    let period = period.to_string();
    let unit = match period.as_str() {
        "1s" => "s",
        "1m" => "min",
        "1h" => "hour",
        "1d" => "day",
        "7d" => "week",
        other => other,
    };
    format!("{count}/{unit}")
}

/// Appends a line for every limit that charged an admitted request. Slots are not admissions in an interval, and are
/// left out.
pub fn write(decided: &DecidedToll, redactor: &Redactor, lines: &mut Vec<u8>) {
    if !decided.allowed() {
        return;
    }
    let policy = decided.toll().policy();
    let declared = policy.declared();
    for limit in decided.limits() {
        let due = limit.due();
        if !limit.allowed() || due.cost == 0 || due.is_slot() {
            continue;
        }
        let values = limit.key().texts().zip(limit.rule().by());
        let shown = values.map(|(value, fact)| value.map(|value| redactor.redact(declared, fact, value)));
        let line = Line {
            t: decided.time().as_micros(),
            limit: limit.name().into(),
            key: shown.collect(),
            cost: due.cost,
            tier: tier(&limit).map(Into::into),
            shift: Some(due.shift).filter(|shift| *shift > 0),
            degraded: limit.degraded().map(|by| by.name().into()),
            overridden: Overridden::of(&limit, policy),
        };
        serde_json::to_writer(&mut *lines, &line).expect("strings and numbers can be written to memory");
        lines.push(b'\n');
    }
}

/// The tier that granted the quota: of several with the same numbers the first. None of an override.
fn tier<'d>(limit: &LimitDecision<'d>) -> Option<&'d str> {
    let quota = limit.due().quota;
    let grants = |grant: &Grant| matches!(grant, Grant::Limited { quota: other, .. } if other == quota);
    limit.rule().tiers().find(|(_, grant)| grants(grant)).map(|(name, _)| name)
}
