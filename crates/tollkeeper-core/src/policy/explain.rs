//! Explains why a limit applies to a request or does not.
//!
//! Checks the same conditions as [`Toll::add`](crate::Toll::add), in the same order, and returns the one that
//! decided. A test compares the two for random policies.

use core::fmt;

use super::{Policy, Rule, UtcTime};
use crate::facts::Facts;
use crate::inline::Inline;
use crate::invalid_request::{CostProblem, InvalidRequest};
use crate::key::Key;
use crate::limit::{Missing, Mode};
use crate::quota::CheckedQuota;
use crate::reason::Allowed;
use crate::toll::{charged, push_values};

/// Whether and why one limit applies to a request.
#[derive(Clone, Debug)]
pub struct Explanation<'p> {
    /// The limit.
    pub rule: &'p Rule,
    /// Whether it applies, and why.
    pub applicability: Applicability<'p>,
}

/// Whether a limit applies, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Applicability<'p> {
    /// Its mode is `off`.
    Off,
    /// A fact of its `when` is absent, or matches none of the patterns.
    When {
        /// The fact.
        fact: &'p str,
        /// Its value; `None` if it is absent.
        value: Option<String>,
    },
    /// All facts of its `unless` match.
    Unless,
    /// The value of this fact is in its `allow` list.
    Allowed(&'p str),
    /// It is keyed by this fact, which is absent: the limit is skipped.
    Skipped(&'p str),
    /// The request is granted an unlimited quota.
    Unlimited(QuotaSource<'p>),
    /// It is keyed by this fact, which is absent: the request is refused.
    Denied(&'p str),
    /// The fact that holds the cost is absent or not a valid cost: the limit is skipped, by its `cost_missing` or
    /// because its mode is `shadow`.
    NoCost {
        /// The fact.
        fact: &'p str,
        /// Why it is not a cost.
        problem: CostProblem,
    },
    /// It applies.
    Applies {
        /// The key in its readable form, such as `per-user:token-bucket:1m:alice`.
        key: String,
        /// The quota of this key.
        quota: &'p CheckedQuota,
        /// Where the quota comes from.
        source: QuotaSource<'p>,
        /// Where the cost comes from.
        cost: CostSource<'p>,
    },
}

/// Where the cost that a limit charges comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CostSource<'p> {
    /// The cost of the request.
    Request,
    /// The number in this fact.
    Fact(&'p str),
    /// Its `cost_missing`, because the fact is absent.
    Missing {
        /// The fact.
        fact: &'p str,
        /// The cost that is charged instead.
        cost: u64,
    },
    /// Nowhere: this fact does not hold a valid cost, and the request is invalid.
    Rejected {
        /// The fact.
        fact: &'p str,
        /// Why it is not a cost.
        problem: CostProblem,
    },
}

/// Where the quota that a limit grants to a request comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuotaSource<'p> {
    /// The limit itself, which grants the same to all.
    Itself,
    /// The override for this value of the fact it is keyed by.
    Override(String),
    /// The override that was set at run time for this value of the fact it is keyed by.
    RunTime {
        /// The value.
        value: String,
        /// When it ends, in seconds since the epoch.
        until: Option<u64>,
    },
    /// The tier that the request names.
    Tier(String),
    /// The default tier, because the request names no tier or one that is not listed.
    DefaultTier {
        /// The fact that picks the tier.
        fact: &'p str,
        /// Its value; `None` if it is absent.
        value: Option<String>,
    },
}

impl Policy {
    /// Which limits apply to a request with these facts, and why. Nothing is decided or charged.
    pub fn explain(&self, facts: &Facts<'_>) -> Result<Vec<Explanation<'_>>, InvalidRequest> {
        let identified = self.identify(facts)?;
        let facts = identified.as_deref().unwrap_or(facts);
        let explain =
            |(index, rule)| Explanation { rule, applicability: self.applicability(index, rule, facts) };
        Ok(self.rules().iter().enumerate().map(explain).collect())
    }

    fn applicability<'p>(&'p self, index: usize, rule: &'p Rule, facts: &Facts<'_>) -> Applicability<'p> {
        if rule.mode == Mode::Off {
            return Applicability::Off;
        }
        if let Some(condition) = rule.when.iter().find(|condition| !condition.holds(facts)) {
            let value = facts.get(&condition.fact).map(ToString::to_string);
            return Applicability::When { fact: &condition.fact, value };
        }
        if !rule.unless.is_empty() && rule.unless.iter().all(|condition| condition.holds(facts)) {
            return Applicability::Unless;
        }
        if rule.allows(facts) {
            return Applicability::Allowed(&rule.by[0]);
        }
        let absent = rule.by.iter().find(|fact| facts.get(fact).is_none());
        match (absent, rule.missing) {
            (Some(fact), Missing::Skip) => return Applicability::Skipped(fact),
            (Some(fact), Missing::Deny) => return Applicability::Denied(fact),
            _ => {}
        }
        let mut values = Inline::default();
        push_values(&mut values, self, rule, facts);
        let (grant, source) = match self.overridden(index, &values) {
            None => (rule.granted(facts).grant, rule.source(facts)),
            Some(grant) => {
                let value = rule.by.first().and_then(|fact| facts.get(fact)).map(ToString::to_string);
                let until = self.until_of(index, &values);
                (grant, QuotaSource::RunTime { value: value.unwrap_or_default(), until })
            }
        };
        match self.quota(index, grant) {
            None => Applicability::Unlimited(source),
            Some((quota, family)) => {
                let key = Key::new(family, &values).to_string();
                match rule.cost_source(facts) {
                    Ok(cost) => Applicability::Applies { key, quota, source, cost },
                    Err(applicability) => applicability,
                }
            }
        }
    }
}

impl Rule {
    /// Where the cost comes from; the error is why the limit does not apply.
    fn cost_source(&self, facts: &Facts<'_>) -> Result<CostSource<'_>, Applicability<'_>> {
        let Some(fact) = self.cost.as_deref() else { return Ok(CostSource::Request) };
        match charged(self, fact, facts) {
            Ok(Some(cost)) if facts.get(fact).is_none() => Ok(CostSource::Missing { fact, cost }),
            Ok(Some(_)) => Ok(CostSource::Fact(fact)),
            Ok(None) => Err(Applicability::NoCost { fact, problem: CostProblem::Absent }),
            Err(problem) if self.mode == Mode::Shadow => Err(Applicability::NoCost { fact, problem }),
            Err(problem) => Ok(CostSource::Rejected { fact, problem }),
        }
    }

    fn source(&self, facts: &Facts<'_>) -> QuotaSource<'_> {
        if self.overridden(facts).is_some()
            && let Some(value) = self.by.first().and_then(|fact| facts.get(fact))
        {
            return QuotaSource::Override(value.to_string());
        }
        let Some(fact) = &self.tier else {
            return QuotaSource::Itself;
        };
        match facts.get(fact).map(ToString::to_string) {
            Some(tier) if self.tiers.contains_key(&*tier) => QuotaSource::Tier(tier),
            value => QuotaSource::DefaultTier { fact, value },
        }
    }
}

impl Applicability<'_> {
    /// Whether the limit takes part in the decision.
    pub fn applies(&self) -> bool {
        matches!(self, Applicability::Applies { .. } | Applicability::Denied(_))
    }

    /// The key in its readable form, if the limit applies and has one.
    pub fn key(&self) -> Option<&str> {
        if let Applicability::Applies { key, .. } = self { Some(key) } else { None }
    }
}

/// One clause that follows the name of the limit: ``does not apply: its mode is `off` ``.
impl fmt::Display for Applicability<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Applicability::Off => f.write_str("does not apply: its mode is `off`"),
            Applicability::When { fact, value: None } => {
                write!(f, "does not apply: its `when` needs `{fact}`, which is absent")
            }
            Applicability::When { fact, value: Some(value) } => {
                write!(
                    f,
                    "does not apply: `{fact}` is `{}`, which its `when` does not match",
                    value.escape_debug()
                )
            }
            Applicability::Unless => f.write_str("does not apply: all conditions of its `unless` match"),
            Applicability::Allowed(fact) => write!(f, "does not apply: this `{fact}` is on its `allow` list"),
            Applicability::Skipped(fact) => {
                write!(f, "does not apply: it counts by `{fact}`, which is absent (missing: skip)")
            }
            Applicability::Unlimited(source) => write!(f, "does not apply: {source} is unlimited"),
            Applicability::Denied(fact) => {
                write!(f, "refuses: it counts by `{fact}`, which is absent (missing: deny)")
            }
            Applicability::NoCost { fact, problem: CostProblem::Absent } => {
                write!(f, "does not apply: it charges the number in `{fact}`, which is absent (cost_missing)")
            }
            Applicability::NoCost { fact, problem } => {
                write!(f, "does not apply: it charges the number in `{fact}`, but {problem} (mode: shadow)")
            }
            Applicability::Applies { quota, source: QuotaSource::Itself, cost, .. } => {
                write!(f, "applies: {}{cost}", Allowed(quota))
            }
            Applicability::Applies { quota, source, cost, .. } => {
                write!(f, "applies: {source} has {}{cost}", Allowed(quota))
            }
        }
    }
}

/// The clause that follows the quota: empty for the cost of the request.
impl fmt::Display for CostSource<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CostSource::Request => Ok(()),
            CostSource::Fact(fact) => write!(f, "; charges the number in `{fact}`"),
            CostSource::Missing { fact, cost } => {
                write!(f, "; charges {cost}, because `{fact}` is absent (cost_missing)")
            }
            CostSource::Rejected { fact, problem } => {
                write!(f, "; charges the number in `{fact}`, but {problem}: the request is rejected")
            }
        }
    }
}

impl fmt::Display for QuotaSource<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            QuotaSource::Itself => f.write_str("it"),
            QuotaSource::Override(value) | QuotaSource::RunTime { value, until: None } => {
                write!(f, "the override for `{}`", value.escape_debug())
            }
            QuotaSource::RunTime { value, until: Some(until) } => {
                write!(f, "the override for `{}` until {}", value.escape_debug(), UtcTime(*until))
            }
            QuotaSource::Tier(tier) => write!(f, "tier `{}`", tier.escape_debug()),
            QuotaSource::DefaultTier { fact, value: None } => {
                write!(f, "the default tier, because `{fact}` is absent,")
            }
            QuotaSource::DefaultTier { fact, value: Some(value) } => {
                let value = value.escape_debug();
                write!(f, "the default tier, because `{fact}` is `{value}`, which is not listed,")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::facts;
    use crate::key::tests::Random;
    use crate::limit::{CostMissing, Limit};
    use crate::quota::{Allowance, Quota};
    use crate::toll::Verb;

    fn check(limit: Limit, facts: &Facts<'_>, expected: &str) {
        let policy = Policy::new(vec![limit]).unwrap();
        assert_eq!(policy.explain(facts).unwrap()[0].applicability.to_string(), expected);
    }

    fn limit() -> Limit {
        Limit::new("limit", Quota::per_minute(10)).by("user")
    }

    #[test]
    fn every_standing_has_a_message() {
        let alice = facts! { "user" => "alice", "plan" => "gold" };
        check(limit(), &alice, "applies: 10 per minute");
        check(limit().mode(Mode::Off), &alice, "does not apply: its mode is `off`");
        check(
            limit().when("user", "al*").when("route", "/a"),
            &alice,
            "does not apply: its `when` needs `route`, which is absent",
        );
        check(
            limit().when("user", "b*"),
            &alice,
            "does not apply: `user` is `alice`, which its `when` does not match",
        );
        check(limit().unless("user", "al*"), &alice, "does not apply: all conditions of its `unless` match");
        check(limit().allow("alice"), &alice, "does not apply: this `user` is on its `allow` list");
        check(limit(), &facts! {}, "does not apply: it counts by `user`, which is absent (missing: skip)");
        check(
            limit().missing(Missing::Deny),
            &facts! {},
            "refuses: it counts by `user`, which is absent (missing: deny)",
        );
        check(limit().missing(Missing::Share), &facts! {}, "applies: 10 per minute");
        check(
            limit().override_for("alice", Allowance::Unlimited),
            &alice,
            "does not apply: the override for `alice` is unlimited",
        );
        let tokens = || Limit::new("llm", Quota::per_minute(10)).cost("tokens");
        for (cost_missing, absent) in [
            (
                CostMissing::Error,
                "applies: 10 per minute; charges the number in `tokens`, but it is absent: the request is rejected",
            ),
            (
                CostMissing::Skip,
                "does not apply: it charges the number in `tokens`, which is absent (cost_missing)",
            ),
            (
                CostMissing::Charge(5),
                "applies: 10 per minute; charges 5, because `tokens` is absent (cost_missing)",
            ),
        ] {
            check(tokens().cost_missing(cost_missing), &alice, absent);
            check(
                tokens().cost_missing(cost_missing),
                &facts! { "tokens" => 7 },
                "applies: 10 per minute; charges the number in `tokens`",
            );
        }
        check(
            tokens().mode(Mode::Shadow),
            &facts! { "tokens" => "many" },
            "does not apply: it charges the number in `tokens`, but it is not a whole number (mode: shadow)",
        );
        let plan = Limit::tiered("plan", "plan")
            .by("user")
            .tier("free", Quota::per_minute(1))
            .tier("pro", Quota::per_minute(2))
            .default_tier("free");
        check(
            plan.clone(),
            &facts! { "user" => "a", "plan" => "pro" },
            "applies: tier `pro` has 2 per minute",
        );
        check(
            plan.clone(),
            &facts! { "user" => "a" },
            "applies: the default tier, because `plan` is absent, has 1 per minute",
        );
        check(
            plan,
            &alice,
            "applies: the default tier, because `plan` is `gold`, which is not listed, has 1 per minute",
        );
    }

    #[test]
    fn the_explanation_and_the_toll_agree() {
        let mut random = Random(0x7011);
        let (mut applied, mut not_applied) = (0, 0);
        for _ in 0..5_000 {
            let mut limit = match random.below(3) {
                0 => Limit::tiered("limit", "plan")
                    .tier("free", Quota::per_minute(3))
                    .tier("pro", Quota::per_hour(5))
                    .tier("vip", Allowance::Unlimited)
                    .default_tier("free"),
                1 => Limit::new("limit", Allowance::Unlimited),
                _ => Limit::new("limit", Quota::per_minute(3)),
            };
            limit = limit.by("user");
            let mut one_in = |odds: usize| random.below(odds) == 0;
            if one_in(6) {
                limit = limit.mode(Mode::Off);
            }
            if one_in(4) {
                limit = limit.when("route", "/a*");
            }
            if one_in(4) {
                limit = limit.unless("route", "*b").unless("plan", "pro");
            }
            if one_in(4) {
                limit = limit.allow("alice");
            }
            if one_in(4) {
                limit = limit.override_for("bob", Quota::per_day(9));
            }
            if one_in(2) {
                limit = limit.missing(if one_in(2) { Missing::Deny } else { Missing::Share });
            }
            if one_in(3) {
                let charged = if one_in(2) { CostMissing::Skip } else { CostMissing::Charge(2) };
                limit = limit.cost("tokens").cost_missing(charged);
            }
            let policy = Arc::new(Policy::new(vec![limit]).unwrap());
            let mut facts = Facts::new();
            for (name, values) in [
                ("user", &["alice", "bob", "carol", ""][..]),
                ("route", &["/a", "/ab", "/c", ""]),
                ("plan", &["free", "pro", "vip", "?"]),
                ("tokens", &["7", ""]),
            ] {
                facts.put(name, random.pick(values));
            }
            let toll = policy.toll(Verb::Check, &facts, 1).unwrap();
            let explained = policy.explain(&facts).unwrap();
            let applicability = &explained[0].applicability;
            assert_eq!(applicability.applies(), !toll.is_empty(), "{applicability} {facts:?}");
            if let Applicability::Applies { key, quota, .. } = applicability {
                assert_eq!((key.as_str(), *quota), (&*toll.get(0).key.to_string(), toll.get(0).quota));
            }
            let skipped = matches!(applicability, Applicability::Skipped(_) | Applicability::NoCost { .. });
            assert_eq!(skipped, toll.skipped().next().is_some(), "{applicability} {facts:?}");
            *(if applicability.applies() { &mut applied } else { &mut not_applied }) += 1;
        }
        assert!(applied > 500 && not_applied > 500, "{applied} applied, {not_applied} did not");
    }
}
