//! Handles: one limit or several, looked up once and keyed by the values of their facts.
//!
//! A handle skips what a policy does for every request (which limits apply, by which facts, under which quota), asks
//! the memory store directly, and returns a small value instead of a [`Decision`](crate::Decision). Through a toll a
//! check takes three times as many instructions (1,267 instead of 442), so this path stays; the tests of
//! `store/memory/decide.rs` require that it decides like the general one.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tollkeeper_core::algorithm::Ask;
use tollkeeper_core::decision::admitted;
use tollkeeper_core::facts::{FactProblem, MAX_VALUE};
use tollkeeper_core::fingerprint::{self, Midstate};
use tollkeeper_core::toll::MAX_COST;
use tollkeeper_core::{
    DecidedToll, Due, InvalidFact, InvalidRequest, Key, LimitReply, OnStoreFailure, Outcome, Policy, Quota,
    Rule, Span, Time,
};

use crate::limiter::{Backend, Limiter};
use crate::store::memory::MemoryStore;

/// Decides one limit of a [`Limiter`] by the value of the fact that keys it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use tollkeeper::{Limit, Limiter, Quota};
/// # let limit = Limit::new("per-user", Quota::per_minute(100).burst(2)).by("user");
/// # let limiter = Limiter::builder().limit(limit).build()?;
/// let per_user = limiter.handle("per-user")?;
/// assert!(per_user.check("alice")?.allowed);
/// assert!(per_user.check("alice")?.allowed);
/// assert!(!per_user.check("alice")?.allowed);
/// assert!(per_user.check("bob")?.allowed);
/// # Ok(()) }
/// ```
///
/// It shares its counts with the limiter, and follows it when the policy is replaced.
#[derive(Debug)]
pub struct Handle {
    limiter: Limiter,
    limit: PreparedLimit,
}

impl Handle {
    pub(crate) fn new(limiter: &Limiter, limit: &str) -> Result<Handle, HandleError> {
        Ok(Handle { limiter: limiter.clone(), limit: PreparedLimit::new(limiter, limit)? })
    }

    /// Decides, and charges 1 if admitted.
    #[inline]
    pub fn check(&self, value: &str) -> Result<KeyDecision, HandleError> {
        self.decide(value, 1, true)
    }

    /// Decides, and charges `cost` if admitted.
    #[inline]
    pub fn check_cost(&self, value: &str, cost: u64) -> Result<KeyDecision, HandleError> {
        self.decide(value, cost, true)
    }

    /// Decides as a check would, without charging.
    #[inline]
    pub fn peek(&self, value: &str) -> Result<KeyDecision, HandleError> {
        self.decide(value, 1, false)
    }

    #[inline]
    fn decide(&self, value: &str, cost: u64, charging: bool) -> Result<KeyDecision, HandleError> {
        check_input(value, cost)?;
        self.limiter.inner.policy.read(|policy, epoch| {
            let (rule, midstate) = self.limit.find(policy, epoch)?;
            let (quota, family) = rule.plain_quota().expect("a plain limit has a quota");
            if policy.has_overrides()
                && let Some(decision) = self.limit.decide_overridden(policy, value, cost, charging)
            {
                return Ok(decision);
            }
            let store = &self.limit.store;
            let print = fingerprint::finish(store.prints().value(midstate, Some(value.as_bytes())));
            let due = Due::prepared(rule, quota, Key::of_one(family, value), cost);
            // Written in place: a helper that returns the decision costs 10 ns more.
            let mut decision = KeyDecision::undecided(&due);
            decision.ask.now = store.decide_one(&due, print, charging, &mut decision.reply);
            decision.allowed = admitted([(due.mode(), decision.reply.allowed())]);
            Ok(decision)
        })
    }
}

/// Several limits of a [`Limiter`], decided together: all or nothing, in one step.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use tollkeeper::{Limit, Limiter, Quota};
/// # let limiter = Limiter::builder()
/// #     .limit(Limit::new("per-user", Quota::per_minute(100).burst(2)).by("user"))
/// #     .limit(Limit::new("per-tenant", Quota::per_minute(1000).burst(200)).by("tenant"))
/// #     .build()?;
/// let layers = limiter.layers(["per-user", "per-tenant"])?;
/// assert!(layers.check(["alice", "acme"])?.allowed);
/// assert!(layers.check(["alice", "acme"])?.allowed);
/// let refused = layers.check(["alice", "acme"])?;
/// assert!(!refused.allowed);
/// assert_eq!(refused.limits.map(|limit| limit.outcome().remaining), [0, 198]);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Layers<const N: usize> {
    limiter: Limiter,
    limits: [PreparedLimit; N],
}

impl<const N: usize> Layers<N> {
    pub(crate) fn new(limiter: &Limiter, limits: [&str; N]) -> Result<Layers<N>, HandleError> {
        const { assert!(N > 0, "layers have at least one limit") };
        if let Some(duplicate) =
            limits.iter().enumerate().find(|(index, name)| limits[..*index].contains(name))
        {
            return Err(HandleError::Duplicate((*duplicate.1).to_owned()));
        }
        let limits: Vec<PreparedLimit> =
            limits.into_iter().map(|limit| PreparedLimit::new(limiter, limit)).collect::<Result<_, _>>()?;
        Ok(Layers { limiter: limiter.clone(), limits: limits.try_into().expect("one for each name") })
    }

    /// Decides, and charges 1 to each limit or nothing to any. The values are in the order of the limits.
    #[inline]
    pub fn check(&self, values: [&str; N]) -> Result<KeyDecisions<N>, HandleError> {
        self.decide(values, 1, true)
    }

    /// Decides, and charges `cost` to each limit or nothing to any.
    #[inline]
    pub fn check_cost(&self, values: [&str; N], cost: u64) -> Result<KeyDecisions<N>, HandleError> {
        self.decide(values, cost, true)
    }

    /// Decides as a check would, without charging.
    #[inline]
    pub fn peek(&self, values: [&str; N]) -> Result<KeyDecisions<N>, HandleError> {
        self.decide(values, 1, false)
    }

    #[inline]
    fn decide(&self, values: [&str; N], cost: u64, charging: bool) -> Result<KeyDecisions<N>, HandleError> {
        for value in values {
            check_input(value, cost)?;
        }
        self.limiter.inner.policy.read(|policy, epoch| {
            let mut found = [None; N];
            for (limit, found) in self.limits.iter().zip(&mut found) {
                *found = Some(limit.find(policy, epoch)?);
            }
            let store = &self.limits[0].store;
            let keyed: [(Due<'_>, u128); N] = std::array::from_fn(|index| {
                let (rule, midstate) = found[index].expect("found above");
                let value = values[index];
                let (quota, family, midstate) = match self.limits[index].overridden(policy, value) {
                    Some((quota, family)) => (quota, family, store.prints().family(family)),
                    None => {
                        let (quota, family) = rule.plain_quota().expect("a plain limit has a quota");
                        (quota, family, midstate)
                    }
                };
                let print = fingerprint::finish(store.prints().value(midstate, Some(value.as_bytes())));
                (Due::prepared(rule, quota, Key::of_one(family, value), cost), print)
            });
            let (dues, prints) = (keyed.map(|(due, _)| due), keyed.map(|(_, print)| print));
            let mut replies = [LimitReply::Pending; N];
            let now = store.decide_many(&dues, &prints, charging, &mut replies);
            let limits: [KeyDecision; N] = std::array::from_fn(|index| {
                let (due, reply) = (&dues[index], replies[index]);
                let allowed = admitted([(due.mode(), reply.allowed())]);
                KeyDecision { allowed, reply, quota: *due.quota, ask: due.ask(now) }
            });
            Ok(KeyDecisions { allowed: limits.iter().all(|limit| limit.allowed), limits })
        })
    }
}

/// A limit whose index in the policy is remembered.
#[derive(Debug)]
struct PreparedLimit {
    store: MemoryStore,
    name: Box<str>,
    /// The prefix of its keys when the handle was made, already hashed into `midstate`.
    family: Box<[u8]>,
    midstate: Midstate,
    /// The epoch of the policy in which the limit was last found, and its index there: while the epoch is the same,
    /// so are the index and the prefix of its keys.
    found: AtomicU64,
}

/// Bits of `found` that hold the index.
const INDEX_BITS: u32 = 16;

impl PreparedLimit {
    fn new(limiter: &Limiter, name: &str) -> Result<PreparedLimit, HandleError> {
        let Backend::Memory(store) = &limiter.inner.backend else { return Err(HandleError::Remote) };
        let policy = limiter.policy();
        let (_, _, family) = plain_limit(&policy, name)?;
        let midstate = store.prints().family(family);
        let (store, family) = (store.clone(), family.into());
        Ok(PreparedLimit { store, name: name.into(), family, midstate, found: AtomicU64::new(0) })
    }

    /// The quota of the override of this value, for several limits that are decided together. One that is unlimited
    /// keeps the limit's own quota here, because each of them has to have one.
    #[inline]
    fn overridden<'p>(&self, policy: &'p Policy, value: &str) -> Option<(&'p Quota, &'p [u8])> {
        if !policy.has_overrides() {
            return None;
        }
        let (index, _) = policy.find(&self.name)?;
        policy.override_quota(index, value)?
    }

    /// Decides by the override of this value; `None` if it has none.
    #[cold]
    fn decide_overridden(
        &self,
        policy: &Policy,
        value: &str,
        cost: u64,
        charging: bool,
    ) -> Option<KeyDecision> {
        let (index, rule) = policy.find(&self.name)?;
        let Some((quota, family)) = policy.override_quota(index, value)? else {
            // Unlimited: nothing is counted, and all of the limit is left.
            let (quota, family) = rule.plain_quota().expect("a plain limit has a quota");
            let due = Due::prepared(rule, quota, Key::of_one(family, value), cost);
            let outcome = Outcome {
                allowed: true,
                limit: quota.limit(),
                remaining: quota.limit(),
                reset_after: Some(Span::ZERO),
                next_after: Some(Span::ZERO),
                ..Outcome::default()
            };
            let reply = LimitReply::Outcome { outcome, mark: 0 };
            return Some(KeyDecision { allowed: true, reply, ..KeyDecision::undecided(&due) });
        };
        let store = &self.store;
        let midstate = store.prints().family(family);
        let print = fingerprint::finish(store.prints().value(midstate, Some(value.as_bytes())));
        let due = Due::prepared(rule, quota, Key::of_one(family, value), cost);
        let mut decision = KeyDecision::undecided(&due);
        decision.ask.now = store.decide_one(&due, print, charging, &mut decision.reply);
        decision.allowed = admitted([(due.mode(), decision.reply.allowed())]);
        Some(decision)
    }

    /// The limit in the policy of this epoch, and the hash that its keys start from.
    #[inline]
    fn find<'p>(&self, policy: &'p Policy, epoch: u64) -> Result<(&'p Rule, Midstate), HandleError> {
        let found = self.found.load(Relaxed);
        if found >> INDEX_BITS == epoch {
            let index = usize::try_from(found & ((1 << INDEX_BITS) - 1)).expect("16 bits");
            return Ok((&policy.rules()[index], self.midstate));
        }
        self.look_up(policy, epoch)
    }

    #[cold]
    fn look_up<'p>(&self, policy: &'p Policy, epoch: u64) -> Result<(&'p Rule, Midstate), HandleError> {
        let (index, rule, family) = plain_limit(policy, &self.name)?;
        if *family != *self.family {
            // Another period or algorithm makes other keys.
            return Ok((rule, self.store.prints().family(family)));
        }
        if let Ok(short) = u16::try_from(index) {
            self.found.store(epoch << INDEX_BITS | u64::from(short), Relaxed);
        }
        Ok((rule, self.midstate))
    }
}

/// The limit of that name, if the value of one fact alone decides there: its index, and the prefix of its keys.
fn plain_limit<'p>(policy: &'p Policy, name: &str) -> Result<(usize, &'p Rule, &'p [u8]), HandleError> {
    let (index, rule) = policy.find(name).ok_or_else(|| HandleError::UnknownLimit(name.to_owned()))?;
    match rule.plain_quota() {
        Some((_, family)) if rule.is_plain() => Ok((index, rule, family)),
        _ => Err(HandleError::NotPlain(name.to_owned())),
    }
}

/// The decision of [`Layers`].
#[derive(Clone, Copy, Debug)]
pub struct KeyDecisions<const N: usize> {
    /// Whether the request may pass: whether every limit allows it.
    pub allowed: bool,
    /// The decision of each limit, in the order they were named.
    pub limits: [KeyDecision; N],
}

/// The decision of a [`Handle`] or of [`AdHocLimits`](crate::AdHocLimits) for one key.
#[derive(Clone, Copy, Debug)]
pub struct KeyDecision {
    /// Whether the request may pass. A limit in shadow mode lets every request pass.
    pub allowed: bool,
    reply: LimitReply,
    quota: Quota,
    ask: Ask,
}

impl KeyDecision {
    #[inline]
    fn undecided(due: &Due<'_>) -> KeyDecision {
        let ask = due.ask(Time::default());
        KeyDecision { allowed: false, reply: LimitReply::Pending, quota: *due.quota, ask }
    }

    /// The decision of the first limit of a toll.
    #[inline]
    pub(crate) fn first_of(decided: &DecidedToll<'_>) -> KeyDecision {
        let limit = decided.limits().next().expect("a toll with one due");
        let (due, reply) = (limit.due(), *limit.reply());
        KeyDecision { allowed: limit.passes(), reply, quota: *due.quota, ask: due.ask(limit.time()) }
    }

    /// The numbers: what remains, and when a retry can pass.
    pub fn outcome(&self) -> Outcome {
        self.reply.outcome(&self.quota, &self.ask)
    }

    /// The time on the store's clock.
    pub fn time(&self) -> Time {
        self.ask.now
    }

    /// The failure policy that answered instead of the store, if one did.
    pub fn degraded(&self) -> Option<OnStoreFailure> {
        self.reply.degraded()
    }
}

#[inline]
fn check_input(value: &str, cost: u64) -> Result<(), HandleError> {
    match (1..=MAX_VALUE).contains(&value.len()) && (1..=MAX_COST).contains(&cost) {
        true => Ok(()),
        false => Err(HandleError::Request(invalid_input(value, cost))),
    }
}

/// What is wrong with a value or a cost.
#[cold]
pub(crate) fn invalid_input(value: &str, cost: u64) -> InvalidRequest {
    let fact = |problem| InvalidRequest::Fact(InvalidFact { name: "value".to_owned(), problem });
    match cost {
        0 => InvalidRequest::ZeroCost,
        _ if cost > MAX_COST => InvalidRequest::Cost(cost),
        _ if value.is_empty() => fact(FactProblem::Empty),
        _ => fact(FactProblem::TooLong(value.len())),
    }
}

/// Why a handle cannot decide.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HandleError {
    /// The input is invalid.
    Request(InvalidRequest),
    /// There is no limit of this name.
    UnknownLimit(String),
    /// The limit depends on more than the value of one fact.
    NotPlain(String),
    /// The limit is named more than once.
    Duplicate(String),
    /// The store is not in this process.
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
            HandleError::Duplicate(name) => write!(f, "duplicate limit `{name}` (name each limit once)"),
            HandleError::Remote => {
                f.write_str("a handle needs the memory store (use `check` with a remote store)")
            }
        }
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for HandleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for HandleError {}
