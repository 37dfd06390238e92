//! Which limits, tiers, overrides and `allow` entries the rows of tests matched.

use std::collections::BTreeSet;

use tollkeeper::config::{Config, EffectiveLimit};
use tollkeeper::policy::{Applicability, QuotaSource};
use tollkeeper::{Facts, Mode, Policy, Value};
use tollkeeper_core::net::Network;

/// What rows can match, and what they matched.
#[derive(Clone, Debug)]
pub struct Coverage {
    limits: Vec<EffectiveLimit>,
    matched: BTreeSet<Item>,
}

/// A part of a policy that a row can match.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Item {
    Limit(String),
    Tier(String, String),
    Override(String, String),
    Allow(String, String),
}

impl Coverage {
    /// Nothing is matched yet.
    pub fn new(config: &Config) -> Coverage {
        let limits = config.limits.iter().filter(|limit| limit.mode != Mode::Off).cloned().collect();
        Coverage { limits, matched: BTreeSet::new() }
    }

    /// Notes what a request with these facts matches.
    pub fn note(&mut self, policy: &Policy, facts: &Facts<'_>) {
        let Ok(explained) = policy.explain(facts) else { return };
        for explanation in &explained {
            let Some(limit) = self.limits.iter().find(|limit| limit.name == explanation.rule.name()) else {
                continue;
            };
            match &explanation.applicability {
                Applicability::Applies { source, .. } => {
                    self.matched.insert(Item::Limit(limit.name.clone()));
                    self.matched.extend(source_item(limit, source, policy, facts));
                }
                Applicability::Unlimited(source) => {
                    self.matched.extend(source_item(limit, source, policy, facts));
                }
                Applicability::Denied(_) => {
                    self.matched.insert(Item::Limit(limit.name.clone()));
                }
                Applicability::Allowed(fact) => {
                    let value = facts.get(fact);
                    let matches =
                        |entry: &&String| value.is_some_and(|value| is_entry(policy, fact, entry, value));
                    let entries = limit.allow.iter().filter(matches);
                    let items = entries.map(|entry| Item::Allow(limit.name.clone(), entry.clone()));
                    self.matched.extend(items);
                }
                _ => {}
            }
        }
    }

    /// What no row matched, one line for each part.
    pub fn unmatched(&self) -> Vec<String> {
        let items = self.limits.iter().flat_map(items);
        let unmatched = items.filter(|item| !self.matched.contains(item));
        unmatched
            .map(|item| match item {
                Item::Limit(limit) => format!("limit {limit}"),
                Item::Tier(limit, tier) => format!("limit {limit}, tier {}", tier.escape_debug()),
                Item::Override(limit, value) => format!("limit {limit}, override {}", value.escape_debug()),
                Item::Allow(limit, entry) => format!("limit {limit}, allow {}", entry.escape_debug()),
            })
            .collect()
    }
}

/// Everything of a limit that a row can match.
fn items(limit: &EffectiveLimit) -> Vec<Item> {
    let name = || limit.name.clone();
    let tiers = limit.tiers.0.iter().map(|(tier, _)| Item::Tier(name(), tier.clone()));
    let overrides = limit.overrides.0.iter().map(|(value, _)| Item::Override(name(), value.clone()));
    let allow = limit.allow.iter().map(|entry| Item::Allow(name(), entry.clone()));
    std::iter::once(Item::Limit(name())).chain(tiers).chain(overrides).chain(allow).collect()
}

fn source_item(
    limit: &EffectiveLimit,
    source: &QuotaSource<'_>,
    policy: &Policy,
    facts: &Facts<'_>,
) -> Option<Item> {
    let name = limit.name.clone();
    match source {
        QuotaSource::Tier(tier) => Some(Item::Tier(name, tier.clone())),
        QuotaSource::DefaultTier { .. } => limit.default_tier.clone().map(|tier| Item::Tier(name, tier)),
        QuotaSource::Override(_) => {
            let fact = limit.by.first()?;
            let value = facts.get(fact)?;
            let mut entries = limit.overrides.0.iter().map(|(entry, _)| entry);
            entries
                .find(|entry| is_entry(policy, fact, entry, value))
                .map(|entry| Item::Override(name, entry.clone()))
        }
        _ => None,
    }
}

/// Whether a value of a fact is the one that an entry of the config names, or in its network.
fn is_entry(policy: &Policy, fact: &str, entry: &str, value: &Value<'_>) -> bool {
    if let Value::Ip(ip) = value {
        return entry.parse::<Network>().is_ok_and(|network| network.contains(*ip));
    }
    let value = policy.declared().value(fact, value.clone());
    let entry = policy.declared().value(fact, entry.into());
    match (&value, &entry) {
        (Value::Hashed(one), Value::Hashed(other)) => one.hash == other.hash,
        _ => value == entry,
    }
}
