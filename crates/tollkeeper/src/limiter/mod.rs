//! The limiter: a policy, a store and an observer.
//!
//! [`Limiter::decide_with`] is the one way to decide: facts become a toll, the store decides the toll, the observer
//! records the result, the caller reads it. Checks, handles, ad-hoc limits, requests with several sets of facts and
//! the tower layer are thin users of it.

pub(crate) mod ad_hoc;
pub(crate) mod blocking;
pub(crate) mod builder;
mod delay_queue;
pub(crate) mod handle;
pub(crate) mod multi_request;
pub(crate) mod observer;
pub(crate) mod operation;
pub(crate) mod overrides;
pub(crate) mod request;
pub(crate) mod slot_guard;
mod wait_queue;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use tollkeeper_core::toll::TollRequest;
use tollkeeper_core::{
    Change, Charge, Costs, DecidedToll, Decision, Facts, InvalidPolicy, InvalidRequest, Key, Limit,
    OnStoreFailure, Policy, Reply, Retry, Slot, Span, Time, Toll, Verb, Verdict,
};

use crate::clock::Clock;
use crate::limiter::ad_hoc::AdHocLimits;
use crate::limiter::builder::Builder;
use crate::limiter::delay_queue::Holds;
use crate::limiter::handle::{Handle, HandleError, Layers};
use crate::limiter::multi_request::MultiRequest;
use crate::limiter::observer::Observer;
use crate::limiter::operation::Operation;
use crate::limiter::overrides::OverrideBook;
use crate::limiter::request::{Acquire, Request, Waiting};
use crate::limiter::wait_queue::{Queues, Seat};
use crate::store::memory::MemoryStore;
use crate::store::{Correction, Store, StoreFuture, Unavailable};
use crate::thread_cached::ThreadCached;

/// Decides whether requests may pass. Cheap to clone, and used from any number of threads: all clones
/// are one limiter.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tollkeeper::{Limit, Limiter, Quota, facts};
///
/// let limiter = Limiter::builder()
///     .limit(Limit::new("per-user", Quota::per_minute(100).burst(20)).by("user"))
///     .limit(Limit::new("per-ip", Quota::per_minute(1000)).by("ip"))
///     .build()?;
///
/// let facts = facts! { "user" => "alice", "ip" => "192.0.2.7" };
/// let decision = limiter.check(&facts).cost(2).await?;
/// assert!(decision.allowed());
/// assert_eq!(decision.limit("per-user").unwrap().outcome().remaining, 18);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Limiter {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) policy: ThreadCached<Policy>,
    pub(crate) backend: Backend,
    clock: Clock,
    queues: Queues,
    holds: Holds,
    observer: OnceLock<Arc<dyn Observer>>,
    pub(crate) overrides: Arc<OverrideBook>,
}

/// A reply that a remote store has yet to give.
type PendingReply<'a> = Pin<Box<dyn Future<Output = Reply> + Send + 'a>>;

/// Where decisions are made.
#[derive(Debug)]
pub(crate) enum Backend {
    /// In this process: every call returns at once.
    Memory(MemoryStore),
    /// By a store that may have to be waited for.
    Remote(Arc<dyn Store>),
}

impl Backend {
    /// The store, for the calls that do not decide.
    pub(crate) fn store(&self) -> &dyn Store {
        match self {
            Backend::Memory(store) => store,
            Backend::Remote(store) => &**store,
        }
    }
}

impl Limiter {
    /// Starts building a limiter.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// A limiter on the memory store.
    pub fn embedded(policy: Policy, store: MemoryStore) -> Limiter {
        let clock = store.clock().clone();
        Limiter::new(policy, Backend::Memory(store), clock)
    }

    /// A limiter on another store.
    pub fn with_store(policy: Policy, store: Arc<dyn Store>) -> Limiter {
        Limiter::new(policy, Backend::Remote(store), Clock::system())
    }

    pub(crate) fn new(policy: Policy, backend: Backend, clock: Clock) -> Limiter {
        let policy = ThreadCached::new(policy);
        let (queues, holds, observer) = (Queues::default(), Holds::default(), OnceLock::new());
        let overrides = Arc::new(OverrideBook::default());
        let limiter =
            Limiter { inner: Arc::new(Inner { policy, backend, clock, queues, holds, observer, overrides }) };
        limiter.restore_overrides();
        limiter
    }

    /// Decides, and charges if admitted. The cost is 1 unless set.
    #[inline]
    pub fn check<'a>(&'a self, facts: &'a Facts<'a>) -> Request<'a> {
        self.request(Verb::Check, facts)
    }

    /// Decides as a check would, without charging.
    pub fn peek<'a>(&'a self, facts: &'a Facts<'a>) -> Request<'a> {
        self.request(Verb::Peek, facts)
    }

    /// The current state of each limit that applies: a peek of cost 1, regardless of `cost:`.
    pub fn usage<'a>(&'a self, facts: &'a Facts<'a>) -> Request<'a> {
        self.request(Verb::Usage, facts)
    }

    /// Charges an estimate that [`Limiter::settle`] corrects within `ttl` (a second to an hour). An estimate that
    /// is not settled in time stays charged.
    pub fn reserve<'a>(&'a self, facts: &'a Facts<'a>, ttl: impl Into<Span>) -> Request<'a> {
        self.request(Verb::Reserve(ttl.into()), facts)
    }

    /// Takes a slot of each concurrency limit that applies, and charges the other limits.
    #[inline]
    pub fn acquire<'a>(&'a self, facts: &'a Facts<'a>) -> Acquire<'a> {
        Acquire(self.request(Verb::Acquire, facts))
    }

    /// Holds an admitted request for the delay of its leaky buckets. Requests held by the same bucket proceed in FIFO
    /// order; dropping the future leaves the queue. Needs a tokio runtime with time enabled.
    pub async fn hold(&self, decision: &Decision) {
        let delay = decision.delay();
        if delay > Span::ZERO {
            self.inner.holds.wait(&self.inner.clock, decision, delay).await;
        }
    }

    /// Starts one request of several sets of facts: see [`MultiRequest`].
    pub fn multi_request(&self) -> MultiRequest<'_> {
        MultiRequest::new(self)
    }

    /// Waits until the request is admitted, behind all callers that already wait for one of its keys.
    ///
    /// Nothing is charged before admission, and dropping the future leaves the queue. A refusal that waiting cannot
    /// resolve is returned at once. The delay of a leaky bucket is left to the caller. Needs a tokio runtime with
    /// time enabled.
    pub fn until_allowed<'a>(&'a self, facts: &'a Facts<'a>) -> Waiting<'a> {
        Waiting { limiter: self, facts, cost: 1 }
    }

    /// Gives back all of a charge: the request did not happen.
    pub fn refund(&self, charge: &Charge) -> Operation<impl Future<Output = Correction>> {
        Operation::new(async move {
            let changes = charge.refund(Costs::All).expect("all of a charge is no more than was charged");
            self.correct(charge, &changes).await
        })
    }

    /// Gives back a part of a charge.
    pub fn refund_part(
        &self,
        charge: &Charge,
        part: Costs<'_>,
    ) -> Operation<impl Future<Output = Result<Correction, InvalidRequest>>> {
        Operation::new(async move { Ok(self.correct(charge, &charge.refund(part)?).await) })
    }

    /// Gives back the charges of the limits whose names are `chosen`, and keeps the others.
    pub fn refund_of(
        &self,
        charge: &Charge,
        chosen: impl Fn(&str) -> bool,
    ) -> Operation<impl Future<Output = Correction>> {
        Operation::new(async move { self.correct(charge, &charge.refund_of(chosen)).await })
    }

    /// Corrects a charge to the actual cost. A surplus is refunded as far as the algorithm can; a shortfall is
    /// charged even above the limit.
    pub fn settle(
        &self,
        charge: &Charge,
        actual: Costs<'_>,
    ) -> Operation<impl Future<Output = Result<Correction, InvalidRequest>>> {
        Operation::new(async move { Ok(self.correct(charge, &charge.settle(actual)?).await) })
    }

    async fn correct(&self, charge: &Charge, changes: &[Change]) -> Correction {
        self.inner.backend.store().correct(charge, &charge.corrections(&self.policy(), changes)).await
    }

    /// A charge as text, to be handed to a client. It is authenticated by the secret of the store.
    pub fn seal_charge(&self, charge: &Charge) -> String {
        self.inner.backend.store().seal_charge(charge)
    }

    /// Reads the text of [`Limiter::seal_charge`]; `None` if this store did not write it. A node that does not have
    /// the secret of its remote store yet asks for it first.
    pub fn open_charge(
        &self,
        text: &str,
    ) -> Operation<impl Future<Output = Result<Option<Charge>, Unavailable>>> {
        Operation::new(async move { self.inner.backend.store().open_charge(text).await })
    }

    /// As [`Limiter::seal_charge`], for a slot.
    pub fn seal_slot(&self, slot: &Slot) -> String {
        self.inner.backend.store().seal_slot(slot)
    }

    /// As [`Limiter::open_charge`], for a slot.
    pub fn open_slot(
        &self,
        text: &str,
    ) -> Operation<impl Future<Output = Result<Option<Slot>, Unavailable>>> {
        Operation::new(async move { self.inner.backend.store().open_slot(text).await })
    }

    /// Forgets the key that these facts make under a limit, for every period of its tiers; false if it had no state.
    pub fn forget(
        &self,
        limit: &str,
        facts: &Facts<'_>,
    ) -> Operation<impl Future<Output = Result<bool, ForgetError>>> {
        Operation::new(async move {
            let policy = self.policy();
            let (mut forgotten, mut answered) = (false, Ok(()));
            for key in policy.keys(limit, facts)? {
                let (_, rule) = policy.find(limit).expect("it has keys");
                let key = rule.place(Key::from_bytes(&key).expect("a policy makes keys"));
                match self.inner.backend.store().forget(key).await {
                    Ok(was_known) => forgotten |= was_known,
                    Err(unavailable) => answered = Err(unavailable),
                }
            }
            answered?;
            Ok(forgotten)
        })
    }

    /// What is stored for the key that these facts make under a limit, regardless of its `when`: the state under each
    /// quota that the limit may count it by, as for a request of cost 1. Quotas under which nothing is stored are left
    /// out.
    pub fn key_states(
        &self,
        limit: &str,
        facts: &Facts<'_>,
    ) -> Operation<impl Future<Output = Result<Vec<KeyState>, InvalidRequest>>> {
        Operation::new(async move {
            let policy = self.policy();
            let mut states = Vec::new();
            for quota in policy.key_quotas(limit, facts)? {
                let build = |toll: &mut Toll| {
                    toll.add_key(&quota);
                    Ok::<(), InvalidRequest>(())
                };
                let decision = self.decide_toll(&policy, Verb::Usage, build, |decision| decision)?.await;
                let is_stored = decision.limits().any(|limit| {
                    let outcome = limit.outcome();
                    limit.degraded().is_some()
                        || outcome.remaining < outcome.limit
                        || outcome.reset_after.is_some_and(|after| after > Span::ZERO)
                });
                if is_stored {
                    states.push(KeyState { tiers: quota.tiers, decision });
                }
            }
            Ok(states)
        })
    }

    /// Releases a slot; false if it was no longer held.
    pub fn release(&self, slot: &Slot) -> Operation<impl Future<Output = Result<bool, Unavailable>>> {
        Operation::new(async move { self.inner.backend.store().release(slot).await })
    }

    /// Restarts the ttl of a slot; false if it was no longer held.
    pub fn renew(&self, slot: &Slot) -> Operation<impl Future<Output = Result<bool, Unavailable>>> {
        Operation::new(async move { self.inner.backend.store().renew(slot).await })
    }

    /// Decides, and lends the result to `read`: see [`Request::decide_with`]. Without a `policy`, the current one
    /// applies.
    #[inline]
    pub fn decide_with<'a, T, R>(
        &'a self,
        policy: Option<&Arc<Policy>>,
        request: &TollRequest<'_>,
        read: R,
    ) -> Result<StoreFuture<'a, T>, InvalidRequest>
    where
        T: Send + 'a,
        R: FnOnce(&DecidedToll) -> T + Send + 'a,
    {
        self.decide_request(policy, request, |decision| read(&decision))
    }

    /// As [`Limiter::decide_with`], for a result that is kept.
    #[inline]
    pub fn decide<'a>(
        &'a self,
        policy: Option<&Arc<Policy>>,
        request: &TollRequest<'_>,
    ) -> Result<StoreFuture<'a, Decision>, InvalidRequest> {
        self.decide_request(policy, request, |decision| decision)
    }

    #[inline(always)]
    fn decide_request<'a, T, R>(
        &'a self,
        policy: Option<&Arc<Policy>>,
        request: &TollRequest<'_>,
        read: R,
    ) -> Result<StoreFuture<'a, T>, InvalidRequest>
    where
        T: Send + 'a,
        R: FnOnce(Decision) -> T + Send + 'a,
    {
        // The error is large, and would be copied with every result, which stalls the processor.
        let build = |toll: &mut Toll| toll.add_request(request).map_err(Box::new);
        // Two calls, so that each is inlined.
        let decided = match policy {
            Some(policy) => self.decide_toll(policy, request.verb, build, read),
            None => self.inner.policy.read(|policy, _| self.decide_toll(policy, request.verb, build, read)),
        };
        decided.map_err(|error| *error)
    }

    /// Builds a toll, decides it, and passes the decision to `read`.
    #[inline(always)]
    pub(crate) fn decide_toll<'a, T, E, R>(
        &'a self,
        policy: &Arc<Policy>,
        verb: Verb,
        build: impl FnOnce(&mut Toll) -> Result<(), E>,
        read: R,
    ) -> Result<StoreFuture<'a, T>, E>
    where
        T: Send + 'a,
        R: FnOnce(Decision) -> T + Send + 'a,
    {
        // First, because reading the clock takes long and what follows does not depend on it (ADR 1).
        let now = self.is_embedded().then(|| self.inner.clock.now());
        let mut decision = Decision::undecided(policy, verb);
        build(decision.toll_mut())?;
        Ok(match self.ask_store(&mut decision, now) {
            None => StoreFuture::Ready(read(self.recorded(decision))),
            Some(reply) => StoreFuture::Later(Box::pin(async move {
                let reply = reply.await;
                decision.decide(|_, empty| *empty = reply);
                read(self.recorded(decision))
            })),
        })
    }

    /// Has the store decide a toll, in place; the reply to wait for if it is not there yet. The memory store decides at
    /// the time `now`, if the clock has been read already. Nothing else in the library asks a store to decide.
    #[inline(always)]
    fn ask_store<'a>(&'a self, decided: &mut DecidedToll, now: Option<Time>) -> Option<PendingReply<'a>> {
        match &self.inner.backend {
            Backend::Memory(store) => {
                let now = now.unwrap_or_else(|| self.inner.clock.now());
                decided.decide(|toll, reply| store.decide_into(toll, now, reply));
            }
            Backend::Remote(store) => match store.decide(decided.toll()) {
                StoreFuture::Ready(reply) => decided.decide(|_, empty| *empty = reply),
                StoreFuture::Later(reply) => return Some(reply),
                StoreFuture::Taken => unreachable!("a store returns a reply that was not taken"),
            },
        }
        None
    }

    /// Records a decision with the observer. Nothing else in the library calls it.
    #[inline]
    fn recorded(&self, decision: Decision) -> Decision {
        if let Some(observer) = self.inner.observer.get() {
            observer.record(&decision);
        }
        decision
    }

    /// Limits whose quotas come with the requests: see [`AdHocLimits`].
    pub fn ad_hoc(&self, name: &str, on_store_failure: OnStoreFailure) -> AdHocLimits {
        AdHocLimits::new(self, name, on_store_failure)
    }

    /// Records every decision from now on with `observer`; false if the limiter already has one.
    pub fn observe(&self, observer: Arc<dyn Observer>) -> bool {
        self.inner.observer.set(observer).is_ok()
    }

    /// Whether decisions are recorded.
    pub(crate) fn is_observed(&self) -> bool {
        self.inner.observer.get().is_some()
    }

    /// Prepares one limit for the hot path: see [`Handle`].
    pub fn handle(&self, limit: &str) -> Result<Handle, HandleError> {
        Handle::new(self, limit)
    }

    /// Prepares several limits that are decided together: see [`Layers`].
    pub fn layers<const N: usize>(&self, limits: [&str; N]) -> Result<Layers<N>, HandleError> {
        Layers::new(self, limits)
    }

    /// The active policy.
    pub fn policy(&self) -> Arc<Policy> {
        self.inner.policy.get()
    }

    /// Reads this thread's copy of the active policy: cheaper than [`Limiter::policy`], for callers that read it
    /// with every request.
    #[inline]
    pub fn with_policy<T>(&self, read: impl FnOnce(&Arc<Policy>) -> T) -> T {
        self.inner.policy.read(|policy, _| read(policy))
    }

    /// The clock that measures waits: the store's, if the store is in this process.
    pub fn clock(&self) -> &Clock {
        &self.inner.clock
    }

    /// Whether decisions are made in this process and never have to be waited for.
    pub fn is_embedded(&self) -> bool {
        matches!(self.inner.backend, Backend::Memory(_))
    }

    /// Replaces the limits for every request that starts later. Counts are kept where name, period and
    /// algorithm of a limit are the same.
    pub fn replace(&self, limits: Vec<Limit>) -> Result<Arc<Policy>, InvalidPolicy> {
        let last = self.policy();
        let policy = Policy::new(limits)?.declaring(last.declared().iter().cloned())?;
        Ok(self.replace_policy(policy.with_ipv6_prefix(last.ipv6_prefix())))
    }

    /// As [`Limiter::replace`], for a policy that is already built. It gets the next version.
    pub fn replace_policy(&self, policy: Policy) -> Arc<Policy> {
        self.install(|last| policy.with_version(last.version() + 1))
    }

    /// As [`Limiter::replace_policy`], under a given version, such as one that all nodes of a store share.
    pub fn replace_policy_as(&self, policy: Policy, version: u64) -> Arc<Policy> {
        self.install(|_| policy.with_version(version))
    }

    #[inline]
    fn request<'a>(&'a self, verb: Verb, facts: &'a Facts<'a>) -> Request<'a> {
        Request::new(self, TollRequest { verb, facts, cost: 1, hold: None, also: &[] })
    }

    async fn wait_for(&self, facts: &Facts<'_>, cost: u64) -> Result<Decision, InvalidRequest> {
        let mut seat = self.inner.policy.read(|policy, _| {
            let toll = policy.toll(Verb::Check, facts, cost)?;
            // A request that can never pass does not wait.
            let never = toll.dues().any(|due| due.enforced() && due.cost.max(1) > due.quota.limit());
            let key = if never { None } else { self.inner.queues.waited_for(&toll) };
            Ok(key.map(|key| self.inner.queues.join(key)))
        })?;
        loop {
            if let Some(seat) = &seat {
                seat.first().await;
            }
            // Under the policy of the moment: it may have been replaced while this request waited.
            let mut decision = self.inner.policy.read(|policy, _| {
                let mut decision = Decision::undecided(policy, Verb::Check);
                decision.toll_mut().add(facts, cost).map(|()| decision)
            })?;
            if let Some(reply) = self.ask_store(&mut decision, None) {
                let reply = reply.await;
                decision.decide(|_, empty| *empty = reply);
            }
            // Only the decision that the caller gets is recorded.
            let (Verdict::Deny { retry: Retry::After(retry) }, Some(binding)) = decision.conclusion() else {
                return Ok(self.recorded(decision));
            };
            let key = binding.key().to_bytes();
            if seat.as_ref().is_none_or(|seat: &Seat<'_>| *seat.key() != *key) {
                drop(seat.take());
                seat = Some(self.inner.queues.join(key.into()));
            }
            if seat.as_ref().is_some_and(Seat::is_first) {
                self.inner.clock.sleep(retry).await;
            }
        }
    }
}

/// What is stored for one key under one quota: see [`Limiter::key_states`].
#[derive(Clone, Debug)]
pub struct KeyState {
    /// The tiers that have this quota; empty for a limit without tiers, and for an override.
    pub tiers: Vec<String>,
    /// The state as the decision of one limit about a request of cost 1, which charged nothing.
    pub decision: Decision,
}

/// Why a key was not forgotten.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForgetError {
    /// There is no limit of that name, or the facts are invalid.
    Invalid(InvalidRequest),
    /// The store did not answer.
    Unavailable(Unavailable),
}

impl From<InvalidRequest> for ForgetError {
    fn from(invalid: InvalidRequest) -> ForgetError {
        ForgetError::Invalid(invalid)
    }
}

impl From<Unavailable> for ForgetError {
    fn from(unavailable: Unavailable) -> ForgetError {
        ForgetError::Unavailable(unavailable)
    }
}

impl fmt::Display for ForgetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ForgetError::Invalid(invalid) => invalid.fmt(f),
            ForgetError::Unavailable(unavailable) => unavailable.fmt(f),
        }
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for ForgetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for ForgetError {}
