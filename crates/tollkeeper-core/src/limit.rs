//! Limits as they are written: a name, what it grants, when it applies, and to whom.
//!
//! Anything can be written here; whether it makes sense is said once, with all mistakes at once, when
//! a [`Policy`](crate::Policy) is made of it.

use core::time::Duration;

use crate::pattern::Condition;
use crate::quota::{Algorithm, Allowance};
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
    pub(crate) allowance: Option<Allowance>,
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) by: Vec<String>,
    pub(crate) when: Vec<Condition>,
    pub(crate) unless: Vec<Condition>,
    pub(crate) allow: Vec<String>,
    pub(crate) missing: Missing,
    pub(crate) tier: Option<String>,
    pub(crate) tiers: Vec<(String, Allowance)>,
    pub(crate) default_tier: Option<String>,
    pub(crate) overrides: Vec<(String, Allowance)>,
    pub(crate) mode: Mode,
    pub(crate) cost: Option<String>,
    pub(crate) stagger: bool,
    pub(crate) ttl: Span,
    pub(crate) on_store_failure: OnStoreFailure,
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
    /// All such requests share one key.
    Share,
    /// The request is refused, and waiting does not help.
    Deny,
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

impl Limit {
    /// A limit that grants the same to every key; without [`Limit::by`] there is one key for all.
    pub fn new(name: impl Into<String>, allowance: impl Into<Allowance>) -> Limit {
        Limit { allowance: Some(allowance.into()), ..Limit::unnamed(name.into()) }
    }

    /// A limit whose grant depends on the fact `fact`: see [`Limit::tier`].
    pub fn tiered(name: impl Into<String>, fact: impl Into<String>) -> Limit {
        Limit { tier: Some(fact.into()), ..Limit::unnamed(name.into()) }
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

    /// Shifts the windows of each key by a fixed amount, so that not all begin at once.
    #[must_use]
    pub fn stagger(self) -> Limit {
        Limit { stagger: true, ..self }
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

    fn unnamed(name: String) -> Limit {
        Limit {
            name,
            allowance: None,
            algorithm: None,
            by: Vec::new(),
            when: Vec::new(),
            unless: Vec::new(),
            allow: Vec::new(),
            missing: Missing::default(),
            tier: None,
            tiers: Vec::new(),
            default_tier: None,
            overrides: Vec::new(),
            mode: Mode::default(),
            cost: None,
            stagger: false,
            ttl: Span::from_secs(60),
            on_store_failure: OnStoreFailure::default(),
        }
    }
}

fn add(conditions: &mut Vec<Condition>, fact: String, pattern: String) {
    match conditions.iter_mut().find(|condition| condition.fact == fact) {
        Some(condition) => condition.patterns.push(pattern),
        None => conditions.push(Condition { fact, patterns: vec![pattern] }),
    }
}
