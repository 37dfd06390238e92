//! The quotas under which a limit may have counted one key: what an operator sees of a key without knowing the tier
//! that its requests name.

use std::collections::BTreeMap;

use super::Policy;
use crate::facts::Facts;
use crate::invalid_request::InvalidRequest;

/// One of the quotas under which a limit may count a key. [`Toll::add_key`](crate::Toll::add_key) asks for its state.
#[derive(Clone, Debug)]
pub struct KeyQuota {
    /// The tiers that have this quota; empty for a limit without tiers, and for an override.
    pub tiers: Vec<String>,
    pub(crate) rule: usize,
    pub(crate) grant: u32,
    /// The encoded values of the key.
    pub(crate) values: Box<[u8]>,
}

impl Policy {
    /// The quotas under which a limit may count the key of these facts, regardless of its `when` and `mode`: that of
    /// its override, and those of its tiers whose counts the override does not use. As for [`Policy::keys`], all facts
    /// that the limit is keyed by must be present.
    pub fn key_quotas(&self, limit: &str, facts: &Facts<'_>) -> Result<Vec<KeyQuota>, InvalidRequest> {
        let (index, rule, values) = self.key_values(limit, facts)?;
        let overridden = match self.overridden(index, &values) {
            Some(grant) => Some(grant),
            None => rule.overridden(self.identify(facts)?.as_deref().unwrap_or(facts)),
        };
        let mut tiers_of: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        for (tier, grant) in &rule.tiers {
            tiers_of.entry(*grant).or_default().push(tier.to_string());
        }
        if rule.tier.is_none() {
            tiers_of.entry(rule.default).or_default();
        }
        let family = |grant: u32| self.quota(index, grant).map(|(_, family)| family);
        tiers_of.retain(|grant, _| overridden.is_none_or(|other| family(other) != family(*grant)));
        let listed = overridden.map(|grant| (grant, Vec::new())).into_iter().chain(tiers_of);
        let has_state = |grant: u32| self.quota(index, grant).is_some_and(|(quota, _)| quota.count() > 0);
        Ok(listed
            .filter(|(grant, _)| has_state(*grant))
            .map(|(grant, tiers)| KeyQuota { tiers, rule: index, grant, values: values.clone() })
            .collect())
    }
}
