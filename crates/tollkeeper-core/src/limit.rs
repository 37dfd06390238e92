//! Limits as users define them: a name, the quota, when the limit applies, and what it is keyed by.
//!
//! Nothing is checked here. Building a [`Policy`](crate::Policy) from limits checks them and reports all
//! mistakes at once.

use core::time::Duration;

use crate::pattern::Condition;
use crate::quota::{Algorithm, Allowance};
use crate::status::StatusSet;
use crate::time::Span;

/// The definition of a limit. Config, API and metrics refer to it by its name.
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
    pub(crate) consistency: Consistency,
    pub(crate) hidden: bool,
    pub(crate) deduct_when: Option<StatusSet>,
    pub(crate) refund_when: Option<StatusSet>,
}

/// What a request without an override is granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    /// The same for all requests.
    Flat(Allowance),
    /// The allowance of the tier that this fact names.
    Tiered(String),
}

/// Whether a limit is enforced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// Requests that do not fit are refused.
    #[default]
    Enforce,
    /// Requests that do not fit are counted, but not refused.
    Shadow,
    /// The limit does not apply.
    Off,
}

/// What a limit does with a request that lacks a fact the limit is keyed by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Missing {
    /// The limit does not apply; the request is counted as skipped.
    #[default]
    Skip,
    /// All such requests share one key: absence counts as a value.
    Share,
    /// The request is refused, and waiting does not help.
    Deny,
}

/// What a limit with [`Limit::cost`] does with a request that lacks the fact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CostMissing {
    /// The request is invalid.
    #[default]
    Error,
    /// The limit does not apply; the request is counted as skipped.
    Skip,
    /// The limit charges this cost: at most [`MAX_COST`](crate::toll::MAX_COST); 0 charges nothing.
    Charge(u64),
}

/// Whether a remote store is asked for every request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Consistency {
    /// The store decides every request that it might admit.
    #[default]
    Exact,
    /// The store grants units to busy nodes in advance. The limit holds as under `Exact`; the numbers in answers are
    /// approximate. See [`Lease`](crate::lease::Lease) for what can be leased.
    Leased,
}

impl Consistency {
    /// The name used in the config.
    pub const fn name(self) -> &'static str {
        match self {
            Consistency::Exact => "exact",
            Consistency::Leased => "leased",
        }
    }
}

/// What a limit decides while the store does not answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnStoreFailure {
    /// The limit admits the request.
    Allow,
    /// The limit refuses the request.
    Deny,
    /// This process decides with its own counts, on its share of the limit.
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

impl Missing {
    /// The name in config and API.
    pub const fn name(self) -> &'static str {
        match self {
            Missing::Skip => "skip",
            Missing::Share => "share",
            Missing::Deny => "deny",
        }
    }
}

impl Limit {
    /// A limit that grants the same to every key; without [`Limit::by`] all requests share one key.
    pub fn new(name: impl Into<String>, allowance: impl Into<Allowance>) -> Limit {
        Limit::plain(name.into(), Base::Flat(allowance.into()))
    }

    /// A limit whose grant depends on the tier that `fact` names: see [`Limit::tier`].
    pub fn tiered(name: impl Into<String>, fact: impl Into<String>) -> Limit {
        Limit::plain(name.into(), Base::Tiered(fact.into()))
    }

    /// Keys the limit by the value of a fact. Further calls key it by the values of several facts together.
    #[must_use]
    pub fn by(mut self, fact: impl Into<String>) -> Limit {
        self.by.push(fact.into());
        self
    }

    /// Sets the algorithm. The default is `concurrency` for slots, `token-bucket` if a burst is given, and
    /// `sliding-window` otherwise.
    #[must_use]
    pub fn algorithm(self, algorithm: Algorithm) -> Limit {
        Limit { algorithm: Some(algorithm), ..self }
    }

    /// Applies the limit only if the fact is present and matches the pattern, in which `*` matches any run of
    /// characters. Several facts must all match; of several patterns for one fact, one must match.
    #[must_use]
    pub fn when(mut self, fact: impl Into<String>, pattern: impl Into<String>) -> Limit {
        add(&mut self.when, fact.into(), pattern.into());
        self
    }

    /// Does not apply the limit if all facts given here match their patterns.
    #[must_use]
    pub fn unless(mut self, fact: impl Into<String>, pattern: impl Into<String>) -> Limit {
        add(&mut self.unless, fact.into(), pattern.into());
        self
    }

    /// Exempts one value of the fact the limit is keyed by; for `ip`, an address or a network.
    #[must_use]
    pub fn allow(mut self, value: impl Into<String>) -> Limit {
        self.allow.push(value.into());
        self
    }

    /// Sets what happens if a fact the limit is keyed by is absent.
    #[must_use]
    pub fn missing(self, missing: Missing) -> Limit {
        Limit { missing, ..self }
    }

    /// Sets what requests of the tier `name` are granted.
    #[must_use]
    pub fn tier(mut self, name: impl Into<String>, allowance: impl Into<Allowance>) -> Limit {
        self.tiers.push((name.into(), allowance.into()));
        self
    }

    /// Sets the tier of requests that name no tier, or one that is not listed.
    #[must_use]
    pub fn default_tier(self, name: impl Into<String>) -> Limit {
        Limit { default_tier: Some(name.into()), ..self }
    }

    /// Sets what one value of the fact the limit is keyed by is granted, whatever its tier.
    #[must_use]
    pub fn override_for(mut self, value: impl Into<String>, allowance: impl Into<Allowance>) -> Limit {
        self.overrides.push((value.into(), allowance.into()));
        self
    }

    /// Sets whether the limit is enforced.
    #[must_use]
    pub fn mode(self, mode: Mode) -> Limit {
        Limit { mode, ..self }
    }

    /// Charges the number in this fact instead of the cost of the request.
    #[must_use]
    pub fn cost(self, fact: impl Into<String>) -> Limit {
        Limit { cost: Some(fact.into()), ..self }
    }

    /// Sets what happens to a request that lacks the fact of [`Limit::cost`]: [`CostMissing::Error`] by default.
    ///
    /// ```
    /// use tollkeeper_core::{CostMissing, Limit, Quota};
    ///
    /// // A request without the fact `tokens` is charged 500.
    /// Limit::new("tokens", Quota::per_minute(100_000)).cost("tokens").cost_missing(CostMissing::Charge(500));
    /// ```
    #[must_use]
    pub fn cost_missing(self, cost_missing: CostMissing) -> Limit {
        Limit { cost_missing: Some(cost_missing), ..self }
    }

    /// Shifts the windows of each key by a fixed amount, so that not all begin at the same time.
    #[must_use]
    pub fn stagger(self) -> Limit {
        Limit { stagger: true, ..self }
    }

    /// Stores all keys with the same value of this fact on the same server; the limit must be keyed by it. A
    /// sharded store decides limits with the same partition in one atomic step.
    #[must_use]
    pub fn partition(self, fact: impl Into<String>) -> Limit {
        Limit { partition: Some(fact.into()), ..self }
    }

    /// Sets the time to live of a slot of a concurrency limit: 60 s by default.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Limit {
        Limit { ttl: Span::from(ttl), ..self }
    }

    /// Sets what the limit decides while the store does not answer.
    #[must_use]
    pub fn on_store_failure(self, on_store_failure: OnStoreFailure) -> Limit {
        Limit { on_store_failure, ..self }
    }

    /// Sets whether a remote store is asked for every request. It has no effect on the memory store.
    #[must_use]
    pub fn consistency(self, consistency: Consistency) -> Limit {
        Limit { consistency, ..self }
    }

    /// Never shows the limit in headers, so that an attacker cannot learn how much a victim has left.
    #[must_use]
    pub fn hidden(self) -> Limit {
        Limit { hidden: true, ..self }
    }

    /// Keeps the charge only if the response has one of these statuses: the request is charged before the
    /// handler runs, and refunded otherwise.
    #[must_use]
    pub fn deduct_when(self, statuses: StatusSet) -> Limit {
        Limit { deduct_when: Some(statuses), ..self }
    }

    /// Refunds the charge if the response has one of these statuses.
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
            consistency: Consistency::default(),
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
    fn a_repeated_fact_collects_its_patterns() {
        let expected: &[(&str, &[&str])] = &[("route", &["/a", "/b"]), ("method", &["POST"])];
        check(&limit().when("route", "/a").when("method", "POST").when("route", "/b").when, expected);
        check(&limit().unless("route", "/a").unless("method", "POST").unless("route", "/b").unless, expected);
    }

    #[test]
    fn when_and_unless_are_independent() {
        let limit = limit().when("route", "/a").unless("route", "/b");
        check(&limit.when, &[("route", &["/a"])]);
        check(&limit.unless, &[("route", &["/b"])]);
    }

    #[test]
    fn list_setters_append_and_other_setters_replace() {
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
    fn defaults_are_as_documented() {
        let limit = limit();
        assert_eq!((limit.mode, limit.missing), (Mode::Enforce, Missing::Skip));
        assert_eq!(limit.on_store_failure, OnStoreFailure::Local);
        assert_eq!(limit.ttl, Span::from_secs(60));
        assert_eq!((limit.algorithm, limit.stagger, limit.cost), (None, false, None));
    }
}
