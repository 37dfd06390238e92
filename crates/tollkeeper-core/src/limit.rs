//! Limits as they are written: a name, what it grants, when it applies, and to whom.
//!
//! Anything can be written here; whether it makes sense is said once, with all mistakes at once, when
//! a [`Policy`](crate::Policy) is made of it.

use core::time::Duration;

use crate::pattern::Condition;
use crate::quota::{Algorithm, Allowance};
use crate::status::StatusSet;
use crate::time::Span;

/// A limit: what config, API and metrics call by its name.
///
/// ```
/// use tollkeeper_core::{Algorithm, Limit, Quota};
///
/// Limit::new("per-user", Quota::per_minute(100).burst(20)).by("user");
/// Limit::new("login", Quota::per_hour(5)).by("email").when("route", "/login").algorithm(Algorithm::SlidingLog);
/// Limit::tiered("plan", "plan")
///     .by("api_key")
///     .tier("free", Quota::per_minute(60))
///     .tier("pro", Quota::per_minute(600))
///     .default_tier("free");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    pub(crate) name: String,
    pub(crate) base: Base,
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) by: Vec<String>,
    pub(crate) when: Vec<Condition>,
    pub(crate) unless: Vec<Condition>,
    pub(crate) allow: Vec<String>,
    pub(crate) missing: Missing,
    pub(crate) tiers: Vec<(String, Allowance)>,
    pub(crate) default_tier: Option<String>,
    pub(crate) overrides: Vec<(String, Allowance)>,
    pub(crate) mode: Mode,
    pub(crate) cost: Option<String>,
    pub(crate) cost_missing: Option<CostMissing>,
    pub(crate) stagger: bool,
    pub(crate) partition: Option<String>,
    pub(crate) ttl: Span,
    pub(crate) on_store_failure: OnStoreFailure,
    pub(crate) hidden: bool,
    pub(crate) deduct_when: Option<StatusSet>,
    pub(crate) refund_when: Option<StatusSet>,
}

/// What the grant of a request without an override depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    /// On nothing: it is the same for all.
    Flat(Allowance),
    /// On the tier that this fact names.
    Tiered(String),
}

/// What a limit does with its verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Refuses what does not fit.
    #[default]
    Enforce,
    /// Counts what it would refuse, and lets it pass.
    Shadow,
    /// Does not apply.
    Off,
}

/// What happens when a fact that a limit is keyed by is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Missing {
    /// The limit does not apply; this is counted.
    #[default]
    Skip,
    /// All such requests share one key: to be absent is a value like any other.
    Share,
    /// The request is refused, and waiting does not help.
    Deny,
}

/// What a limit with [`Limit::cost`] does with a request that lacks the fact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CostMissing {
    /// Rejects the request as invalid.
    #[default]
    Error,
    /// Does not apply; this is counted.
    Skip,
    /// Charges this much: at most [`MAX_COST`](crate::toll::MAX_COST), and 0 charges nothing.
    Charge(u64),
}

/// Who answers when the store does not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnStoreFailure {
    /// The request passes this limit.
    Allow,
    /// The request is refused.
    Deny,
    /// This process decides, on its share of the limit.
    #[default]
    Local,
}

impl OnStoreFailure {
    /// The name in config, API and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            OnStoreFailure::Allow => "allow",
            OnStoreFailure::Deny => "deny",
            OnStoreFailure::Local => "local",
        }
    }
}

impl Mode {
    /// The name in config, API and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Mode::Enforce => "enforce",
            Mode::Shadow => "shadow",
            Mode::Off => "off",
        }
    }
}

impl Limit {
    /// A limit that grants the same to every key; without [`Limit::by`] there is one key for all.
    pub fn new(name: impl Into<String>, allowance: impl Into<Allowance>) -> Limit {
        Limit::plain(name.into(), Base::Flat(allowance.into()))
    }

    /// A limit whose grant depends on the fact `fact`: see [`Limit::tier`].
    pub fn tiered(name: impl Into<String>, fact: impl Into<String>) -> Limit {
        Limit::plain(name.into(), Base::Tiered(fact.into()))
    }

    /// Keys the limit by the value of a fact. Called again, by the values of several facts together.
    #[must_use]
    pub fn by(mut self, fact: impl Into<String>) -> Limit {
        self.by.push(fact.into());
        self
    }

    /// Uses this algorithm. Without it: `token-bucket` if a burst is given, else `sliding-window`.
    #[must_use]
    pub fn algorithm(self, algorithm: Algorithm) -> Limit {
        Limit { algorithm: Some(algorithm), ..self }
    }

    /// Applies only when the fact is there and matches a pattern, in which `*` stands for anything.
    /// For several facts, all must match; for one fact said twice, one of its patterns must.
    #[must_use]
    pub fn when(mut self, fact: impl Into<String>, pattern: impl Into<String>) -> Limit {
        add(&mut self.when, fact.into(), pattern.into());
        self
    }

    /// Does not apply when all facts said so match.
    #[must_use]
    pub fn unless(mut self, fact: impl Into<String>, pattern: impl Into<String>) -> Limit {
        add(&mut self.unless, fact.into(), pattern.into());
        self
    }

    /// Never applies to this value of the fact it is keyed by; for `ip` an address or a network.
    #[must_use]
    pub fn allow(mut self, value: impl Into<String>) -> Limit {
        self.allow.push(value.into());
        self
    }

    /// What happens when a fact it is keyed by is absent.
    #[must_use]
    pub fn missing(self, missing: Missing) -> Limit {
        Limit { missing, ..self }
    }

    /// Grants this to requests whose tier is `name`.
    #[must_use]
    pub fn tier(mut self, name: impl Into<String>, allowance: impl Into<Allowance>) -> Limit {
        self.tiers.push((name.into(), allowance.into()));
        self
    }

    /// The tier of requests that name none, or one that is not listed.
    #[must_use]
    pub fn default_tier(self, name: impl Into<String>) -> Limit {
        Limit { default_tier: Some(name.into()), ..self }
    }

    /// Grants this to one value of the fact it is keyed by, whatever its tier.
    #[must_use]
    pub fn override_for(mut self, value: impl Into<String>, allowance: impl Into<Allowance>) -> Limit {
        self.overrides.push((value.into(), allowance.into()));
        self
    }

    /// Whether the verdict counts.
    #[must_use]
    pub fn mode(self, mode: Mode) -> Limit {
        Limit { mode, ..self }
    }

    /// Charges the number in this fact instead of the cost of the request.
    #[must_use]
    pub fn cost(self, fact: impl Into<String>) -> Limit {
        Limit { cost: Some(fact.into()), ..self }
    }

    /// What happens to a request that lacks the fact of [`Limit::cost`]; without it, [`CostMissing::Error`].
    ///
    /// ```
    /// use tollkeeper_core::{CostMissing, Limit, Quota};
    ///
    /// // A request that does not say how many tokens it needs pays for 500.
    /// Limit::new("tokens", Quota::per_minute(100_000)).cost("tokens").cost_missing(CostMissing::Charge(500));
    /// ```
    #[must_use]
    pub fn cost_missing(self, cost_missing: CostMissing) -> Limit {
        Limit { cost_missing: Some(cost_missing), ..self }
    }

    /// Shifts the windows of each key by a fixed amount, so that not all begin at once.
    #[must_use]
    pub fn stagger(self) -> Limit {
        Limit { stagger: true, ..self }
    }

    /// Keeps the counts of all keys with the same value of this fact, one of those it is keyed by, in one place:
    /// limits with the same partition are decided together, in one step, by a store on many servers.
    #[must_use]
    pub fn partition(self, fact: impl Into<String>) -> Limit {
        Limit { partition: Some(fact.into()), ..self }
    }

    /// How long a slot of a concurrency limit is held at most: 60 s unless said otherwise.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Limit {
        Limit { ttl: Span::from(ttl), ..self }
    }

    /// Who answers when the store does not.
    #[must_use]
    pub fn on_store_failure(self, on_store_failure: OnStoreFailure) -> Limit {
        Limit { on_store_failure, ..self }
    }

    /// Never shown in headers: what a victim has left is nothing that an attacker should learn.
    #[must_use]
    pub fn hidden(self) -> Limit {
        Limit { hidden: true, ..self }
    }

    /// Keeps the charge only if the response has one of these statuses; until then it is charged.
    #[must_use]
    pub fn deduct_when(self, statuses: StatusSet) -> Limit {
        Limit { deduct_when: Some(statuses), ..self }
    }

    /// Gives the charge back if the response has one of these statuses.
    #[must_use]
    pub fn refund_when(self, statuses: StatusSet) -> Limit {
        Limit { refund_when: Some(statuses), ..self }
    }

    fn plain(name: String, base: Base) -> Limit {
        Limit {
            name,
            base,
            algorithm: None,
            by: Vec::new(),
            when: Vec::new(),
            unless: Vec::new(),
            allow: Vec::new(),
            missing: Missing::default(),
            tiers: Vec::new(),
            default_tier: None,
            overrides: Vec::new(),
            mode: Mode::default(),
            cost: None,
            cost_missing: None,
            stagger: false,
            partition: None,
            ttl: Span::from_secs(60),
            on_store_failure: OnStoreFailure::default(),
            hidden: false,
            deduct_when: None,
            refund_when: None,
        }
    }
}

fn add(conditions: &mut Vec<Condition>, fact: String, pattern: String) {
    match conditions.iter_mut().find(|condition| condition.fact == fact) {
        Some(condition) => condition.patterns.push(pattern),
        None => conditions.push(Condition { fact, patterns: vec![pattern] }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::Quota;

    fn limit() -> Limit {
        Limit::new("limit", Quota::per_second(1))
    }

    fn check(conditions: &[Condition], expected: &[(&str, &[&str])]) {
        let found: Vec<(&str, Vec<&str>)> = conditions
            .iter()
            .map(|condition| {
                let patterns = condition.patterns.iter().map(String::as_str).collect();
                (condition.fact.as_str(), patterns)
            })
            .collect();
        let expected: Vec<(&str, Vec<&str>)> =
            expected.iter().map(|(fact, patterns)| (*fact, patterns.to_vec())).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_fact_said_twice_has_both_patterns_and_keeps_its_place() {
        let expected: &[(&str, &[&str])] = &[("route", &["/a", "/b"]), ("method", &["POST"])];
        check(&limit().when("route", "/a").when("method", "POST").when("route", "/b").when, expected);
        check(&limit().unless("route", "/a").unless("method", "POST").unless("route", "/b").unless, expected);
    }

    #[test]
    fn when_and_unless_are_kept_apart() {
        let limit = limit().when("route", "/a").unless("route", "/b");
        check(&limit.when, &[("route", &["/a"])]);
        check(&limit.unless, &[("route", &["/b"])]);
    }

    #[test]
    fn what_can_be_listed_adds_up_and_the_rest_replaces() {
        let limit = limit()
            .by("user")
            .by("route")
            .allow("alice")
            .allow("bob")
            .override_for("carol", Allowance::Unlimited)
            .override_for("dave", Allowance::Nothing)
            .mode(Mode::Off)
            .mode(Mode::Shadow)
            .cost("bytes")
            .cost("tokens");
        assert_eq!(limit.by, ["user", "route"]);
        assert_eq!(limit.allow, ["alice", "bob"]);
        assert_eq!(limit.overrides.len(), 2);
        assert_eq!(limit.mode, Mode::Shadow);
        assert_eq!(limit.cost.as_deref(), Some("tokens"));
    }

    #[test]
    fn what_is_not_said_is_as_the_documentation_says() {
        let limit = limit();
        assert_eq!((limit.mode, limit.missing), (Mode::Enforce, Missing::Skip));
        assert_eq!(limit.on_store_failure, OnStoreFailure::Local);
        assert_eq!(limit.ttl, Span::from_secs(60));
        assert_eq!((limit.algorithm, limit.stagger, limit.cost), (None, false, None));
    }
}
