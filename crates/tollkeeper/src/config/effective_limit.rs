//! A limit as the config file writes it, with every default filled in: the JSON of `GET /v1/limits`.
//!
//! Its JSON is again a valid limit of a config file, with the same meaning.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use tollkeeper_core::{Algorithm, CostMissing, Missing, Mode, OnStoreFailure, Span, StatusSet};

/// A limit as in the config file, with defaults filled in. Rates are as in the file, before `share` is applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EffectiveLimit {
    /// The name.
    pub name: String,
    /// The facts it is keyed by.
    pub by: Vec<String>,
    /// The facts and patterns of `when`.
    #[serde(skip_serializing_if = "Named::is_empty")]
    pub when: Named<Vec<String>>,
    /// The facts and patterns of `unless`.
    #[serde(skip_serializing_if = "Named::is_empty")]
    pub unless: Named<Vec<String>>,
    /// The rate, burst or number of slots for requests without a tier or an override.
    #[serde(flatten)]
    pub grant: EffectiveGrant,
    /// The algorithm, whether the file names it or not.
    #[serde(serialize_with = "algorithm")]
    pub algorithm: Algorithm,
    /// The longest time that a slot is held, for a concurrency limit.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "ttl")]
    pub ttl: Option<Span>,
    /// The fact that picks the tier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier: Option<String>,
    /// The grant of each tier.
    #[serde(skip_serializing_if = "Named::is_empty")]
    pub tiers: Named<EffectiveGrant>,
    /// The tier of requests without a known tier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_tier: Option<String>,
    /// The grants of single values of the fact in `by`.
    #[serde(skip_serializing_if = "Named::is_empty")]
    pub overrides: Named<EffectiveGrant>,
    /// Values of the fact in `by` that the limit never applies to.
    pub allow: Vec<String>,
    /// What happens when a fact it is keyed by is absent.
    #[serde(serialize_with = "missing")]
    pub missing: Missing,
    /// The fact whose number is charged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<String>,
    /// What happens when the fact in `cost` is absent; `None` without `cost`.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "cost_missing")]
    pub cost_missing: Option<CostMissing>,
    /// Whether the limit is enforced, only observed, or off.
    #[serde(serialize_with = "mode")]
    pub mode: Mode,
    /// Whether the windows of different keys begin at different times.
    pub stagger: bool,
    /// The fact whose value decides which node of a cluster keeps the count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partition: Option<String>,
    /// What happens when the store does not answer.
    #[serde(serialize_with = "on_store_failure")]
    pub on_store_failure: OnStoreFailure,
    /// Whether rate-limit headers may show this limit.
    pub headers: bool,
    /// The charge is refunded unless the response matches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deduct_when: Option<ResponseCondition>,
    /// The charge is refunded if the response matches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refund_when: Option<ResponseCondition>,
    /// Whether the store is asked for every request: `exact` or `leased`.
    pub consistency: &'static str,
    /// How many replicas must confirm a charge; always 0 today.
    pub wait_replicas: u32,
}

/// The rate, burst or number of slots of a limit, a tier or an override.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EffectiveGrant {
    /// Count per period, or `unlimited`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<String>,
    /// The burst of a bucket, such as 20.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
    /// The number of slots of a concurrency limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// A map from names to values, in the order of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named<T>(pub Vec<(String, T)>);

impl<T> Named<T> {
    /// Whether the map is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The value of a name.
    pub fn get(&self, name: &str) -> Option<&T> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }
}

impl<T> Default for Named<T> {
    fn default() -> Named<T> {
        Named(Vec::new())
    }
}

impl<T: Serialize> Serialize for Named<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

/// A condition on the response to a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ResponseCondition {
    /// The response matches if its status matches one of these.
    pub status: Vec<StatusPattern>,
}

impl ResponseCondition {
    /// The statuses that match.
    pub fn statuses(&self) -> StatusSet {
        self.status.iter().fold(StatusSet::default(), |set, pattern| match pattern {
            StatusPattern::Code(code) => set.status(*code),
            StatusPattern::Class(class) => set.class(*class),
        })
    }
}

/// An HTTP status, or a class of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusPattern {
    /// One status, such as 401.
    Code(u16),
    /// All statuses that begin with this digit: 5 is `5xx`.
    Class(u8),
}

impl Serialize for StatusPattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            StatusPattern::Code(code) => serializer.serialize_u16(*code),
            StatusPattern::Class(class) => serializer.collect_str(&format_args!("{class}xx")),
        }
    }
}

fn algorithm<S: Serializer>(algorithm: &Algorithm, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(algorithm.name())
}

fn ttl<S: Serializer>(ttl: &Option<Span>, serializer: S) -> Result<S::Ok, S::Error> {
    match ttl {
        Some(ttl) => serializer.collect_str(ttl),
        None => serializer.serialize_none(),
    }
}

fn cost_missing<S: Serializer>(missing: &Option<CostMissing>, serializer: S) -> Result<S::Ok, S::Error> {
    match missing {
        Some(CostMissing::Error) => serializer.serialize_str("error"),
        Some(CostMissing::Skip) => serializer.serialize_str("skip"),
        Some(CostMissing::Charge(cost)) => serializer.serialize_u64(*cost),
        None => serializer.serialize_none(),
    }
}

fn missing<S: Serializer>(missing: &Missing, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(missing.name())
}

fn mode<S: Serializer>(mode: &Mode, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(mode.name())
}

fn on_store_failure<S: Serializer>(policy: &OnStoreFailure, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match policy {
        OnStoreFailure::Allow => "allow",
        OnStoreFailure::Deny => "deny",
        OnStoreFailure::Local => "local",
    })
}
