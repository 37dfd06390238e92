//! One limit, prepared for the hottest paths.
//!
//! What a policy finds out anew for every request (which limits apply, by which facts, under which
//! quota) is settled here once; what is left is a fingerprint, a lock and a few additions.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tollkeeper_core::algorithm::Ask;
use tollkeeper_core::facts::{FactProblem, MAX_VALUE};
use tollkeeper_core::fingerprint::{self, Midstate};
use tollkeeper_core::toll::MAX_COST;
use tollkeeper_core::{
    Due, InvalidFact, InvalidRequest, Key, LimitReply, OnStoreFailure, Outcome, Policy, Quota, Rule, Time,
};

use crate::limiter::Limiter;
use crate::store::memory::MemoryStore;

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
    /// What the keys began with when the handle was made, taken in already.
    family: Box<[u8]>,
    midstate: Midstate,
    /// Under which number of the policy the limit was last found, and where: while the number is the
    /// same, so is the place, and keys begin as they did.
    found: AtomicU64,
}

/// Bits of `found` that hold the place.
const PLACE: u32 = 16;

impl Handle {
    pub(crate) fn new(limiter: &Limiter, limit: &str) -> Result<Handle, HandleError> {
        let store = limiter.inner.memory.clone().ok_or(HandleError::Remote)?;
        let policy = limiter.policy();
        let (_, rule) = plain(&policy, limit)?;
        let (_, family) = rule.plain_quota().ok_or_else(|| HandleError::NotPlain(limit.to_owned()))?;
        let midstate = store.prints().family(family);
        let family = family.into();
        let found = AtomicU64::new(0);
        Ok(Handle { limiter: limiter.clone(), store, limit: limit.into(), family, midstate, found })
    }

    /// Decides and charges 1.
    #[inline]
    pub fn check(&self, value: &str) -> Result<Passage, HandleError> {
        self.decide(value, 1, true)
    }

    /// Decides and charges `cost`.
    #[inline]
    pub fn check_cost(&self, value: &str, cost: u64) -> Result<Passage, HandleError> {
        self.decide(value, cost, true)
    }

    /// Says what a check would, and charges nothing.
    #[inline]
    pub fn peek(&self, value: &str) -> Result<Passage, HandleError> {
        self.decide(value, 1, false)
    }

    #[inline]
    fn decide(&self, value: &str, cost: u64, charging: bool) -> Result<Passage, HandleError> {
        if !acceptable(value, cost) {
            return Err(HandleError::Request(wrong(value, cost)));
        }
        self.limiter.inner.policy.read(|policy, epoch| {
            let found = self.found.load(Relaxed);
            let (rule, midstate) = if found >> PLACE == epoch {
                let place = usize::try_from(found & ((1 << PLACE) - 1)).expect("16 bits");
                (&policy.rules()[place], self.midstate)
            } else {
                self.find(policy, epoch)?
            };
            // As `due` and `Passage::of` have it, written out: through them a check takes 10 ns more.
            let (quota, family) = rule.plain_quota().expect("a plain limit has a quota");
            let print = fingerprint::finish(self.store.prints().value(midstate, Some(value.as_bytes())));
            let due = Due::prepared(rule, quota, Key::of_one(family, value), cost);
            let mut passage = Passage {
                allowed: false,
                said: LimitReply::Nothing,
                quota: *quota,
                shift: due.shift,
                cost,
                now: Time::default(),
            };
            passage.now = self.store.decide_one(&due, print, charging, &mut passage.said);
            passage.allowed = passage.said.allowed() || !due.enforced();
            Ok(passage)
        })
    }

    /// The limit, if it was found under this number of the policy before.
    #[inline]
    fn known<'p>(&self, policy: &'p Policy, epoch: u64) -> Option<&'p Rule> {
        let found = self.found.load(Relaxed);
        let place = usize::try_from(found & ((1 << PLACE) - 1)).expect("16 bits");
        (found >> PLACE == epoch).then(|| &policy.rules()[place])
    }

    /// What is due for a value, and the fingerprint of its key.
    #[inline]
    fn due<'d>(&self, rule: &'d Rule, midstate: Midstate, value: &'d str, cost: u64) -> (Due<'d>, u128) {
        let (quota, family) = rule.plain_quota().expect("a plain limit has a quota");
        let print = fingerprint::finish(self.store.prints().value(midstate, Some(value.as_bytes())));
        (Due::prepared(rule, quota, Key::of_one(family, value), cost), print)
    }

    /// Looks the limit up in a policy that is new to this handle.
    #[cold]
    fn find<'p>(&self, policy: &'p Policy, epoch: u64) -> Result<(&'p Rule, Midstate), HandleError> {
        let (place, rule) = plain(policy, &self.limit)?;
        let (_, family) = rule.plain_quota().ok_or_else(|| HandleError::NotPlain(self.limit.to_string()))?;
        if *family != *self.family {
            // Another period or algorithm: other keys, and what was taken in does not fit them.
            return Ok((rule, self.store.prints().family(family)));
        }
        if let Ok(place) = u16::try_from(place) {
            self.found.store(epoch << PLACE | u64::from(place), Relaxed);
        }
        Ok((rule, self.midstate))
    }
}

/// The limit of that name, if nothing but the value of one fact decides there.
fn plain<'p>(policy: &'p Policy, limit: &str) -> Result<(usize, &'p Rule), HandleError> {
    let (place, rule) = policy.find(limit).ok_or_else(|| HandleError::UnknownLimit(limit.to_owned()))?;
    if rule.is_plain() { Ok((place, rule)) } else { Err(HandleError::NotPlain(limit.to_owned())) }
}

/// Several limits of a [`Limiter`], prepared together: all or nothing, in one step.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use tollkeeper::{Limit, Limiter, Quota};
/// # let limiter = Limiter::builder()
/// #     .limit(Limit::new("per-user", Quota::per_minute(100).burst(2)).by("user"))
/// #     .limit(Limit::new("per-tenant", Quota::per_minute(1000).burst(200)).by("tenant"))
/// #     .build().await?;
/// let layers = limiter.layers(["per-user", "per-tenant"])?;
/// assert!(layers.check(["alice", "acme"])?.allowed);
/// assert!(layers.check(["alice", "acme"])?.allowed);
/// let refused = layers.check(["alice", "acme"])?;
/// assert!(!refused.allowed);
/// assert_eq!(refused.limits.map(|limit| limit.outcome().remaining), [0, 198]);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Layers<const N: usize>([Handle; N]);

impl<const N: usize> Layers<N> {
    pub(crate) fn new(limiter: &Limiter, limits: [&str; N]) -> Result<Layers<N>, HandleError> {
        if let Some(twice) = limits.iter().enumerate().find(|(index, name)| limits[..*index].contains(name)) {
            return Err(HandleError::Twice((*twice.1).to_owned()));
        }
        let handles: Vec<Handle> =
            limits.into_iter().map(|limit| Handle::new(limiter, limit)).collect::<Result<_, _>>()?;
        Ok(Layers(handles.try_into().expect("as many handles as names")))
    }

    /// Decides and charges 1 to each limit, or nothing to any; the values go with the limits in order.
    #[inline]
    pub fn check(&self, values: [&str; N]) -> Result<Passages<N>, HandleError> {
        self.decide(values, 1, true)
    }

    /// Decides and charges `cost` to each limit, or nothing to any.
    #[inline]
    pub fn check_cost(&self, values: [&str; N], cost: u64) -> Result<Passages<N>, HandleError> {
        self.decide(values, cost, true)
    }

    /// Says what a check would, and charges nothing.
    #[inline]
    pub fn peek(&self, values: [&str; N]) -> Result<Passages<N>, HandleError> {
        self.decide(values, 1, false)
    }

    #[inline]
    fn decide(&self, values: [&str; N], cost: u64, charging: bool) -> Result<Passages<N>, HandleError> {
        const { assert!(N > 0, "layers are of at least one limit") };
        let first = &self.0[0];
        if let Some(value) = values.iter().find(|value| !acceptable(value, cost)) {
            return Err(HandleError::Request(wrong(value, cost)));
        }
        first.limiter.inner.policy.read(|policy, epoch| {
            let mut rules = [None; N];
            for (handle, rule) in self.0.iter().zip(&mut rules) {
                *rule = match handle.known(policy, epoch) {
                    Some(rule) => Some((rule, handle.midstate)),
                    None => Some(handle.find(policy, epoch)?),
                };
            }
            let found: [(Due<'_>, u128); N] = std::array::from_fn(|index| {
                let (rule, midstate) = rules[index].expect("found above");
                self.0[index].due(rule, midstate, values[index], cost)
            });
            let mut said = [LimitReply::Nothing; N];
            let (dues, prints) = (found.map(|(due, _)| due), found.map(|(_, print)| print));
            let now = first.store.decide_many(&dues, &prints, charging, &mut said);
            let allowed = |index: usize| said[index].allowed() || !dues[index].enforced();
            Ok(Passages {
                allowed: (0..N).all(allowed),
                limits: std::array::from_fn(|index| Passage {
                    allowed: allowed(index),
                    said: said[index],
                    now,
                    ..Passage::of(&dues[index])
                }),
            })
        })
    }
}

/// What [`Layers`] say of one set of values.
#[derive(Clone, Copy, Debug)]
pub struct Passages<const N: usize> {
    /// Whether the request may pass: whether every limit allows.
    pub allowed: bool,
    /// What each limit says, in the order they were named.
    pub limits: [Passage; N],
}

/// What a [`Handle`] or a [`AdHocLimits`](crate::AdHocLimits) says of one value.
#[derive(Clone, Copy, Debug)]
pub struct Passage {
    /// Whether the request may pass. A limit in shadow mode lets everything pass.
    pub allowed: bool,
    pub(crate) said: LimitReply,
    quota: Quota,
    shift: u64,
    cost: u64,
    pub(crate) now: Time,
}

impl Passage {
    #[inline]
    pub(crate) fn of(due: &Due<'_>) -> Passage {
        let (quota, shift, cost) = (*due.quota, due.shift, due.cost);
        Passage { allowed: false, said: LimitReply::Nothing, quota, shift, cost, now: Time::default() }
    }

    /// The numbers behind it: what remains, and how long to wait.
    pub fn outcome(&self) -> Outcome {
        // A cost of 0 looks as 1 does.
        let ask = Ask { now: self.now, cost: self.cost.max(1), shift: self.shift, hold: None };
        self.said.outcome(&self.quota, &ask)
    }

    /// Who answered in place of the store, if it did not.
    pub fn degraded(&self) -> Option<OnStoreFailure> {
        self.said.degraded()
    }
}

#[inline]
fn acceptable(value: &str, cost: u64) -> bool {
    (1..=MAX_VALUE).contains(&value.len()) && (1..=MAX_COST).contains(&cost)
}

/// What stands between a value and its outcome.
#[cold]
pub(crate) fn wrong(value: &str, cost: u64) -> InvalidRequest {
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
    /// The limit is named twice.
    Twice(String),
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
            HandleError::Twice(name) => write!(f, "limit `{name}` is named twice (once is enough)"),
            HandleError::Remote => {
                f.write_str("a handle decides in this process, and the store is not there (use `check`)")
            }
        }
    }
}

impl std::error::Error for HandleError {}
