//! Handles: one limit or several, looked up once and keyed by the values of their facts.
//!
//! A handle skips what a policy does for every request: which limits apply, by which facts, under which quota. It
//! returns a small value instead of a [`Decision`](crate::Decision).
//!
//! With an observer or with overrides at run time, its toll is decided and recorded like any other. Without them, its
//! dues go to the memory store without a toll around them: 26 instead of 52 ns for one limit. The tests of
//! `store/memory/decide.rs` require that both decide alike.

use std::array;
use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tollkeeper_core::algorithm::KeyRequest;
use tollkeeper_core::decision::admitted;
use tollkeeper_core::facts::{FactProblem, MAX_VALUE};
use tollkeeper_core::toll::MAX_COST;
use tollkeeper_core::{
    CheckedQuota, Due, InvalidFact, InvalidRequest, LimitDecision, LimitReply, OnStoreFailure, Outcome,
    Policy, Rule, Span, Time, Toll, Verb,
};

use crate::limiter::{Backend, Limiter};

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
        self.decide(Verb::Check, value, 1)
    }

    /// Decides, and charges `cost` if admitted.
    #[inline]
    pub fn check_cost(&self, value: &str, cost: u64) -> Result<KeyDecision, HandleError> {
        self.decide(Verb::Check, value, cost)
    }

    /// Decides as a check would, without charging.
    #[inline]
    pub fn peek(&self, value: &str) -> Result<KeyDecision, HandleError> {
        self.decide(Verb::Peek, value, 1)
    }

    #[inline]
    fn decide(&self, verb: Verb, value: &str, cost: u64) -> Result<KeyDecision, HandleError> {
        // First, as in `Limiter::decide_toll`.
        let now = self.limiter.inner.clock.now();
        check_input(value, cost)?;
        self.limiter.inner.policy.read(|policy, epoch| {
            let limit = self.limit.find(policy, epoch)?;
            let [decision] = decide(&self.limiter, policy, verb, cost, now, [(limit, value)]);
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
        self.decide(Verb::Check, values, 1)
    }

    /// Decides, and charges `cost` to each limit or nothing to any.
    #[inline]
    pub fn check_cost(&self, values: [&str; N], cost: u64) -> Result<KeyDecisions<N>, HandleError> {
        self.decide(Verb::Check, values, cost)
    }

    /// Decides as a check would, without charging.
    #[inline]
    pub fn peek(&self, values: [&str; N]) -> Result<KeyDecisions<N>, HandleError> {
        self.decide(Verb::Peek, values, 1)
    }

    #[inline]
    fn decide(&self, verb: Verb, values: [&str; N], cost: u64) -> Result<KeyDecisions<N>, HandleError> {
        // First, as in `Limiter::decide_toll`.
        let now = self.limiter.inner.clock.now();
        for value in values {
            check_input(value, cost)?;
        }
        self.limiter.inner.policy.read(|policy, epoch| {
            let mut asked = values.map(|value| (0, value));
            for ((index, _), limit) in asked.iter_mut().zip(&self.limits) {
                *index = limit.find(policy, epoch)?;
            }
            let limits = decide(&self.limiter, policy, verb, cost, now, asked);
            Ok(KeyDecisions { allowed: limits.iter().all(|limit| limit.allowed), limits })
        })
    }
}

/// Decides some limits, each by its index in the policy and the value that keys it.
#[inline]
fn decide<const N: usize>(
    limiter: &Limiter,
    policy: &Arc<Policy>,
    verb: Verb,
    cost: u64,
    now: Time,
    asked: [(usize, &str); N],
) -> [KeyDecision; N] {
    match &limiter.inner.backend {
        Backend::Memory(store) if !limiter.is_observed() && !policy.has_overrides() => {
            let dues: [Due<'_>; N] = array::from_fn(|index| {
                let (limit, value) = asked[index];
                Due::of_value(&policy.rules()[limit], value, cost)
            });
            let mut replies = [LimitReply::Pending; N];
            store.decide_few(dues, verb.charges(), now, &mut replies);
            array::from_fn(|index| KeyDecision::of(&dues[index], &replies[index], now))
        }
        _ => {
            let mut limited = [false; N];
            let build = |toll: &mut Toll| {
                for ((limit, value), limited) in asked.iter().zip(&mut limited) {
                    *limited = toll.add_value(*limit, value, cost);
                }
                Ok::<(), Infallible>(())
            };
            let Ok(decided) = limiter.decide_toll(policy, verb, build, |decision| decision);
            let decided = decided.expect_ready();
            let mut limits = decided.limits();
            array::from_fn(|index| match limited[index].then(|| limits.next()).flatten() {
                Some(limit) => KeyDecision::new(&limit),
                None => {
                    let (limit, value) = asked[index];
                    KeyDecision::unlimited(
                        &Due::of_value(&policy.rules()[limit], value, cost),
                        decided.time(),
                    )
                }
            })
        }
    }
}

/// A limit whose index in the policy is remembered.
#[derive(Debug)]
struct PreparedLimit {
    name: Box<str>,
    /// The epoch of the policy in which the limit was last found, and its index there.
    found: AtomicU64,
}

/// Bits of `found` that hold the index.
const INDEX_BITS: u32 = 16;

impl PreparedLimit {
    fn new(limiter: &Limiter, name: &str) -> Result<PreparedLimit, HandleError> {
        if !limiter.is_embedded() {
            return Err(HandleError::Remote);
        }
        plain_limit(&limiter.policy(), name)?;
        Ok(PreparedLimit { name: name.into(), found: AtomicU64::new(0) })
    }

    /// The index of the limit in the policy of this epoch.
    #[inline]
    fn find(&self, policy: &Policy, epoch: u64) -> Result<usize, HandleError> {
        let found = self.found.load(Relaxed);
        if found >> INDEX_BITS == epoch {
            return Ok(usize::try_from(found & ((1 << INDEX_BITS) - 1)).expect("16 bits"));
        }
        self.look_up(policy, epoch)
    }

    #[cold]
    fn look_up(&self, policy: &Policy, epoch: u64) -> Result<usize, HandleError> {
        let index = plain_limit(policy, &self.name)?;
        if let Ok(short) = u16::try_from(index) {
            self.found.store(epoch << INDEX_BITS | u64::from(short), Relaxed);
        }
        Ok(index)
    }
}

/// The index of the limit of that name, if the value of one fact alone decides there.
fn plain_limit(policy: &Policy, name: &str) -> Result<usize, HandleError> {
    let (index, rule) = policy.find(name).ok_or_else(|| HandleError::UnknownLimit(name.to_owned()))?;
    let is_plain = |rule: &Rule| rule.is_plain() && rule.plain_quota().is_some();
    if is_plain(rule) { Ok(index) } else { Err(HandleError::NotPlain(name.to_owned())) }
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
    quota: CheckedQuota,
    request: KeyRequest,
}

impl KeyDecision {
    // By reference: reading `allowed` from a copy of a reply that was just written stalls the processor.
    #[inline]
    fn of(due: &Due<'_>, reply: &LimitReply, now: Time) -> KeyDecision {
        let allowed = admitted([(due.mode(), reply.allowed())]);
        KeyDecision { allowed, reply: *reply, quota: *due.quota, request: due.request(now) }
    }

    /// The decision of an unlimited key: nothing is counted, and all of the limit is left.
    fn unlimited(due: &Due<'_>, now: Time) -> KeyDecision {
        let (limit, unused) = (due.quota.limit(), Some(Span::ZERO));
        let outcome = Outcome {
            allowed: true,
            limit,
            remaining: limit,
            reset_after: unused,
            next_after: unused,
            ..Outcome::default()
        };
        KeyDecision::of(due, &LimitReply::Outcome { outcome, mark: 0 }, now)
    }

    #[inline]
    pub(crate) fn new(limit: &LimitDecision<'_>) -> KeyDecision {
        KeyDecision::of(&limit.due(), limit.reply(), limit.time())
    }

    /// The numbers: what remains, and when a retry can pass.
    pub fn outcome(&self) -> Outcome {
        self.reply.outcome(&self.quota, &self.request)
    }

    /// The time on the store's clock.
    pub fn time(&self) -> Time {
        self.request.now
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::{Mutex, lock};
    use tollkeeper_core::{DecidedToll, Limit, Quota};

    /// Counts the decisions of each limit.
    #[derive(Debug, Default)]
    struct Recorder(Mutex<Vec<(String, bool)>>);

    impl crate::Observer for Recorder {
        fn record(&self, decided: &DecidedToll) {
            let limits = decided.limits().map(|limit| (limit.name().to_owned(), limit.allowed()));
            lock(&self.0).extend(limits);
        }
    }

    fn limiter() -> Limiter {
        let per_user = Limit::new("per-user", Quota::per_minute(100).burst(2)).by("user");
        let per_tenant = Limit::new("per-tenant", Quota::per_minute(100).burst(3)).by("tenant");
        Limiter::builder().limit(per_user).limit(per_tenant).build().expect("valid limits")
    }

    #[test]
    fn observed_handles_decide_alike_and_are_recorded() {
        let (plain, observed) = (limiter(), limiter());
        let recorder = Arc::new(Recorder::default());
        assert!(observed.observe(Arc::clone(&recorder) as _));
        let numbers = |decision: &KeyDecision| {
            let outcome = decision.outcome();
            let next = outcome.next_after.map(Span::as_secs_ceil);
            (decision.allowed, outcome.limit, outcome.remaining, next, decision.degraded())
        };
        let [one, other] = [&plain, &observed].map(|limiter| limiter.handle("per-user").expect("plain"));
        let [layers, recorded] =
            [&plain, &observed].map(|limiter| limiter.layers(["per-user", "per-tenant"]).expect("plain"));
        for user in ["alice", "alice", "alice", "bob"] {
            let decisions =
                [one.peek(user), one.check(user)].map(|decision| numbers(&decision.expect("valid")));
            let same =
                [other.peek(user), other.check(user)].map(|decision| numbers(&decision.expect("valid")));
            assert_eq!(decisions, same);
            let (layers, recorded) = (layers.check([user, "acme"]), recorded.check([user, "acme"]));
            let (layers, recorded) = (layers.expect("valid"), recorded.expect("valid"));
            assert_eq!(layers.allowed, recorded.allowed);
            assert_eq!(layers.limits.each_ref().map(numbers), recorded.limits.each_ref().map(numbers));
        }
        let recorded = lock(&recorder.0);
        assert_eq!(
            recorded.len(),
            4 * (2 + 2),
            "each peek and check of a handle, and both limits of the layers"
        );
        assert!(recorded.contains(&("per-tenant".to_owned(), true)));
        assert!(recorded.contains(&("per-user".to_owned(), false)));
    }
}
