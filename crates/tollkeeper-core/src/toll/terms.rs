//! What a request pays a limit that applies to it, where that depends on the request.

use crate::facts::{Facts, Value};
use crate::invalid_request::{CostProblem, InvalidRequest};
use crate::limit::{CostMissing, Missing, Mode};
use crate::policy::{Policy, REFUSED, Rule};
use crate::toll::{MAX_COST, Verb};

/// What a request pays a limit.
pub(super) struct Terms {
    /// The index of the grant, which is not unlimited, and the cost; `None` if it pays nothing.
    pub(super) charge: Option<(u32, u64)>,
    /// Whether it pays nothing because a fact is absent.
    pub(super) skipped: bool,
    /// Whether it named no tier, or one that is not listed.
    pub(super) unknown_tier: bool,
}

impl Policy {
    /// The terms of a limit that applies. `values` are those of its key; some are absent unless it `is_complete`.
    // Not inlined: most limits have one grant, and their tolls are built without this.
    #[inline(never)]
    pub(super) fn terms(
        &self,
        verb: Verb,
        index: usize,
        facts: &Facts<'_>,
        values: &[u8],
        is_complete: bool,
        cost: u64,
    ) -> Result<Terms, InvalidRequest> {
        let rule = &self.rules()[index];
        let skipped = Terms { charge: None, skipped: true, unknown_tier: false };
        let (grant, unknown_tier) = match rule.missing {
            Missing::Skip if !is_complete => return Ok(skipped),
            Missing::Deny if !is_complete => (REFUSED, false),
            _ => match self.overridden(index, values) {
                Some(grant) => (grant, false),
                None => {
                    let granted = rule.granted(facts);
                    (granted.grant, granted.unknown_tier)
                }
            },
        };
        let terms = Terms { charge: Some((grant, cost)), skipped: false, unknown_tier };
        if self.quota(index, grant).is_none() {
            return Ok(Terms { charge: None, ..terms });
        }
        let Some(fact) = rule.cost.as_ref().filter(|_| verb != Verb::Usage) else { return Ok(terms) };
        match charged(rule, fact, facts) {
            Ok(Some(cost)) => Ok(Terms { charge: Some((grant, cost)), ..terms }),
            // A request that an absent key fact refuses stays refused if the cost fact is absent too.
            Ok(None) if rule.missing == Missing::Deny && !is_complete => Ok(terms),
            Ok(None) => Ok(Terms { unknown_tier, ..skipped }),
            Err(_) if rule.mode == Mode::Shadow => Ok(Terms { charge: None, ..terms }),
            Err(problem) => {
                let (limit, fact) = (rule.name.to_string(), fact.to_string());
                Err(InvalidRequest::CostFact { limit, fact, problem })
            }
        }
    }
}

/// The cost for a limit that charges the number in `fact`; `None` if the limit does not apply without it.
pub(crate) fn charged(rule: &Rule, fact: &str, facts: &Facts<'_>) -> Result<Option<u64>, CostProblem> {
    match (facts.get(fact), rule.cost_missing) {
        (None, CostMissing::Skip) => Ok(None),
        (None, CostMissing::Charge(cost)) => Ok(Some(cost)),
        (value, _) => number(value).map(Some),
    }
}

/// The number that a `cost:` fact holds.
pub(crate) fn number(value: Option<&Value<'_>>) -> Result<u64, CostProblem> {
    let number = match value {
        None => return Err(CostProblem::Absent),
        Some(Value::Number(number)) => u64::try_from(*number).map_err(|_| CostProblem::NotANumber)?,
        // Digits alone: `parse` would take a sign, and can then fail only for being too large.
        Some(Value::Text(text)) if text.bytes().all(|byte| byte.is_ascii_digit()) => {
            text.parse().map_err(|_| CostProblem::TooLarge)?
        }
        Some(_) => return Err(CostProblem::NotANumber),
    };
    if number > MAX_COST { Err(CostProblem::TooLarge) } else { Ok(number) }
}
