//! One limit, prepared for the hottest paths.
//!
//! What a policy finds out anew for every request (which limits apply, by which facts, under which
//! quota) is settled here once; what is left is a fingerprint, a lock and a few additions.

use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tollkeeper_core::facts::{FactProblem, MAX_VALUE};
use tollkeeper_core::fingerprint::{self, Midstate};
use tollkeeper_core::toll::MAX_COST;
use tollkeeper_core::{Due, InvalidFact, InvalidRequest, Key, Outcome, Policy};

use crate::limiter::Limiter;
use crate::memory::MemoryStore;

/// Decides one limit of a [`Limiter`] by the value of the fact it is keyed by.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use tollkeeper::{Limit, Limiter, Quota};
/// # let limit = Limit::new("per-user", Quota::per_minute(100).burst(2)).by("user");
/// # let limiter = Limiter::builder().limit(limit).build().await?;
/// let per_user = limiter.handle("per-user")?;
/// assert!(per_user.check("alice")?.allowed);
/// assert!(per_user.check("alice")?.allowed);
/// assert!(!per_user.check("alice")?.allowed);
/// assert!(per_user.check("bob")?.allowed);
/// # Ok(()) }
/// ```
///
/// It shares its counters with the limiter and follows it when the policy is replaced.
#[derive(Debug)]
pub struct Handle {
    limiter: Limiter,
    store: MemoryStore,
    limit: Box<str>,
    prepared: ArcSwap<Prepared>,
}

#[derive(Debug)]
struct Prepared {
    policy: Arc<Policy>,
    /// The place of the limit in the policy, and what its keys have in common; or why there is none.
    rule: Result<(usize, Midstate), HandleError>,
}

impl Handle {
    pub(crate) fn new(limiter: &Limiter, limit: &str) -> Result<Handle, HandleError> {
        let store = limiter.inner.memory.clone().ok_or(HandleError::Remote)?;
        let prepared = Prepared::new(limiter.policy(), limit, &store);
        if let Err(error) = &prepared.rule {
            return Err(error.clone());
        }
        let prepared = ArcSwap::from_pointee(prepared);
        Ok(Handle { limiter: limiter.clone(), store, limit: limit.into(), prepared })
    }

    /// Decides and charges 1.
    #[inline]
    pub fn check(&self, value: &str) -> Result<Outcome, HandleError> {
        self.decide(value, 1, true)
    }

    /// Decides and charges `cost`.
    #[inline]
    pub fn check_cost(&self, value: &str, cost: u64) -> Result<Outcome, HandleError> {
        self.decide(value, cost, true)
    }

    /// Says what a check would, and charges nothing.
    #[inline]
    pub fn peek(&self, value: &str) -> Result<Outcome, HandleError> {
        self.decide(value, 1, false)
    }

    #[inline]
    fn decide(&self, value: &str, cost: u64, charging: bool) -> Result<Outcome, HandleError> {
        if value.is_empty() || value.len() > MAX_VALUE || cost == 0 || cost > MAX_COST {
            return Err(HandleError::Request(wrong(value, cost)));
        }
        let prepared = self.prepared.load();
        if !Arc::ptr_eq(&prepared.policy, &self.limiter.inner.policy.load()) {
            self.prepare();
            return self.decide(value, cost, charging);
        }
        let (rule, family) = match &prepared.rule {
            Ok(rule) => *rule,
            Err(error) => return Err(error.clone()),
        };
        let rule = &prepared.policy.rules()[rule];
        let (quota, key_family) = rule.plain_quota().expect("a prepared limit has a quota");
        let print = fingerprint::finish(self.store.prints().value(family, Some(value.as_bytes())));
        let due = Due::prepared(rule, quota, Key::of_one(key_family, value), cost);
        Ok(self.store.decide_one(&due, print, charging))
    }

    #[cold]
    fn prepare(&self) {
        let prepared = Prepared::new(self.limiter.policy(), &self.limit, &self.store);
        self.prepared.store(Arc::new(prepared));
    }
}

impl Prepared {
    fn new(policy: Arc<Policy>, limit: &str, store: &MemoryStore) -> Prepared {
        let rule = match policy.find(limit) {
            None => Err(HandleError::UnknownLimit(limit.to_owned())),
            Some((index, rule)) => match rule.plain_quota() {
                Some((_, family)) if rule.is_plain() => Ok((index, store.prints().family(family))),
                _ => Err(HandleError::NotPlain(limit.to_owned())),
            },
        };
        Prepared { policy, rule }
    }
}

/// What stands between a value and its outcome.
#[cold]
fn wrong(value: &str, cost: u64) -> InvalidRequest {
    let fact = |problem| InvalidRequest::Fact(InvalidFact { name: "value".to_owned(), problem });
    match cost {
        0 => InvalidRequest::ZeroCost,
        _ if cost > MAX_COST => InvalidRequest::Cost(cost),
        _ if value.is_empty() => fact(FactProblem::Empty),
        _ => fact(FactProblem::TooLong(value.len())),
    }
}

/// Why a handle cannot decide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandleError {
    /// The request is bad input.
    Request(InvalidRequest),
    /// There is no limit of this name.
    UnknownLimit(String),
    /// The limit depends on more than the value of one fact.
    NotPlain(String),
    /// The state is not kept in this process.
    Remote,
}

impl fmt::Display for HandleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HandleError::Request(error) => write!(f, "{error}"),
            HandleError::UnknownLimit(name) => write!(f, "there is no limit `{name}`"),
            HandleError::NotPlain(name) => write!(
                f,
                "limit `{name}` depends on more than the value of one fact (a handle is for limits by one fact other \
                 than `ip`, without when, unless, allow, tiers, overrides, slots or a cost fact: use `check`)"
            ),
            HandleError::Remote => f.write_str("a handle decides in this process, and the store is not there (use `check`)"),
        }
    }
}

impl std::error::Error for HandleError {}
