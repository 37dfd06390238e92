//! The limiter: a policy and a store.
//!
//! The order of things is here and only here: facts become a toll, the store decides the toll, the
//! decision goes to the caller.

pub(crate) mod ad_hoc;
pub(crate) mod blocking;
pub(crate) mod builder;
mod delay_queue;
pub(crate) mod handle;
pub(crate) mod multi_request;
pub(crate) mod observer;
pub(crate) mod operation;
pub mod single_limit;
pub(crate) mod slot_guard;
mod wait_queue;

use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use tollkeeper_core::toll;
use tollkeeper_core::{
    Change, Charge, Costs, Decision, Facts, InvalidPolicy, InvalidRequest, Key, Limit, OnStoreFailure,
    Policy, Reply, Retry, Slot, Span, Toll, Verb, Verdict,
};

use crate::clock::Clock;
use crate::limiter::ad_hoc::AdHocLimits;
use crate::limiter::builder::Builder;
use crate::limiter::delay_queue::Holds;
use crate::limiter::handle::{Handle, HandleError, Layers};
use crate::limiter::multi_request::MultiRequest;
use crate::limiter::observer::Observer;
use crate::limiter::operation::Operation;
use crate::limiter::slot_guard::{SlotGuard, Taken};
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
///     .build()
///     .await?;
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
    pub(crate) store: Arc<dyn Store>,
    /// The store again, if it is in this process: handles decide there without asking.
    pub(crate) memory: Option<MemoryStore>,
    clock: Clock,
    queues: Queues,
    holds: Holds,
    observer: OnceLock<Arc<dyn Observer>>,
}

impl Limiter {
    /// Begins a limiter.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// A limiter on the embedded store, for code that cannot wait.
    pub fn embedded(policy: Policy, store: MemoryStore) -> Limiter {
        let clock = store.clock().clone();
        Limiter::new(policy, Arc::new(store.clone()), Some(store), clock)
    }

    /// A limiter on a store elsewhere.
    pub fn with_store(policy: Policy, store: Arc<dyn Store>) -> Limiter {
        Limiter::new(policy, store, None, Clock::system())
    }

    pub(crate) fn new(
        policy: Policy,
        store: Arc<dyn Store>,
        memory: Option<MemoryStore>,
        clock: Clock,
    ) -> Limiter {
        let policy = ThreadCached::new(policy);
        let (queues, holds, observer) = (Queues::default(), Holds::default(), OnceLock::new());
        Limiter { inner: Arc::new(Inner { policy, store, memory, clock, queues, holds, observer }) }
    }

    /// Decides and charges. Costs 1 unless said otherwise.
    pub fn check<'a>(&'a self, facts: &'a Facts<'a>) -> Request<'a> {
        self.request(Verb::Check, facts)
    }

    /// Says what a check would, and charges nothing.
    pub fn peek<'a>(&'a self, facts: &'a Facts<'a>) -> Request<'a> {
        self.request(Verb::Peek, facts)
    }

    /// Says how each limit stands: a peek of cost 1, whatever the limits charge.
    pub fn usage<'a>(&'a self, facts: &'a Facts<'a>) -> Request<'a> {
        self.request(Verb::Usage, facts)
    }

    /// Charges an estimate, to be corrected with [`Limiter::settle`] within `ttl` (a second to an
    /// hour); not settled in time, it stays charged.
    pub fn reserve<'a>(&'a self, facts: &'a Facts<'a>, ttl: impl Into<Span>) -> Request<'a> {
        self.request(Verb::Reserve(ttl.into()), facts)
    }

    /// Takes a slot of each concurrency limit that applies, and charges the other limits.
    pub fn acquire<'a>(&'a self, facts: &'a Facts<'a>) -> Acquire<'a> {
        Acquire(self.request(Verb::Acquire, facts))
    }

    /// Holds an admitted request as long as its leaky buckets delay it. Who waits for the same bucket goes
    /// on in the order of coming, and who goes away holds nobody up. Needs a tokio runtime with time
    /// enabled.
    pub async fn hold(&self, decision: &Decision) {
        let delay = decision.delay();
        if delay > Span::ZERO {
            self.inner.holds.wait(&self.inner.clock, decision, delay).await;
        }
    }

    /// Begins one request of several sets of facts: see [`MultiRequest`].
    pub fn multi_request(&self) -> MultiRequest<'_> {
        MultiRequest::new(self)
    }

    /// Waits until the request may pass, behind everybody who already waits for one of its keys.
    ///
    /// Nothing is charged before the request is admitted, and a caller that goes away leaves the line.
    /// A refusal that waiting does not cure is returned at once. The delay of a leaky bucket is left to
    /// the caller. Needs a tokio runtime with time enabled.
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

    /// Gives back what the limits that are `chosen` by name took, and keeps the rest.
    pub fn refund_of(
        &self,
        charge: &Charge,
        chosen: impl Fn(&str) -> bool,
    ) -> Operation<impl Future<Output = Correction>> {
        Operation::new(async move { self.correct(charge, &charge.refund_of(chosen)).await })
    }

    /// Corrects a charge to what the request did cost. A surplus is given back as far as the algorithm
    /// can, a shortfall is charged even above the limit.
    pub fn settle(
        &self,
        charge: &Charge,
        actual: Costs<'_>,
    ) -> Operation<impl Future<Output = Result<Correction, InvalidRequest>>> {
        Operation::new(async move { Ok(self.correct(charge, &charge.settle(actual)?).await) })
    }

    async fn correct(&self, charge: &Charge, changes: &[Change]) -> Correction {
        self.inner.store.correct(charge, &charge.fixes(&self.policy(), changes)).await
    }

    /// A receipt as text, to be handed out and back: only this store can have written it.
    pub fn seal_charge(&self, charge: &Charge) -> String {
        self.inner.store.seal_charge(charge)
    }

    /// Reads a text of [`Limiter::seal_charge`]; `None` if this store did not write it. A node that has not yet
    /// asked its remote store for the secret of receipts does so first.
    pub fn open_charge(
        &self,
        text: &str,
    ) -> Operation<impl Future<Output = Result<Option<Charge>, Unavailable>>> {
        Operation::new(async move { self.inner.store.open_charge(text).await })
    }

    /// As [`Limiter::seal_charge`], for a slot.
    pub fn seal_slot(&self, slot: &Slot) -> String {
        self.inner.store.seal_slot(slot)
    }

    /// As [`Limiter::open_charge`], for a slot.
    pub fn open_slot(
        &self,
        text: &str,
    ) -> Operation<impl Future<Output = Result<Option<Slot>, Unavailable>>> {
        Operation::new(async move { self.inner.store.open_slot(text).await })
    }

    /// Forgets what a limit knows of the key that these facts make, under every period of its tiers;
    /// false if there was nothing to forget.
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
                match self.inner.store.forget(key).await {
                    Ok(was_known) => forgotten |= was_known,
                    Err(unavailable) => answered = Err(unavailable),
                }
            }
            answered?;
            Ok(forgotten)
        })
    }

    /// Gives a slot back; false if it was not held any more.
    pub fn release(&self, slot: &Slot) -> Operation<impl Future<Output = Result<bool, Unavailable>>> {
        Operation::new(async move { self.inner.store.release(slot).await })
    }

    /// Counts the life of a slot from now; false if it was not held any more.
    pub fn renew(&self, slot: &Slot) -> Operation<impl Future<Output = Result<bool, Unavailable>>> {
        Operation::new(async move { self.inner.store.renew(slot).await })
    }

    /// Begins to decide a request. What comes back borrows nothing of it, so that many can be on their way
    /// at once: poll each of them once, then wait for one after the other.
    pub fn begin(
        &self,
        request: &toll::TollRequest<'_>,
    ) -> Result<StoreFuture<'_, Decision>, InvalidRequest> {
        Ok(match self.decide(None, request)? {
            Decided::Now(decision) => StoreFuture::Ready(self.decided(decision)),
            Decided::Later(pending) => {
                let Pending { toll, answer } = *pending;
                StoreFuture::Later(Box::pin(async move { self.decided(Decision::new(toll, answer.await)) }))
            }
        })
    }

    /// Prepares limits that travel with requests: see [`AdHocLimits`].
    pub fn ad_hoc(&self, name: &str, on_store_failure: OnStoreFailure) -> AdHocLimits {
        AdHocLimits::new(self, name, on_store_failure)
    }

    /// Has every decision from now on told to `observer`; false if there is one already.
    pub fn observe(&self, observer: Arc<dyn Observer>) -> bool {
        self.inner.observer.set(observer).is_ok()
    }

    /// Whether somebody is told of every decision.
    #[inline]
    pub fn is_observed(&self) -> bool {
        self.inner.observer.get().is_some()
    }

    /// Prepares one limit for the hottest paths: see [`Handle`].
    pub fn handle(&self, limit: &str) -> Result<Handle, HandleError> {
        Handle::new(self, limit)
    }

    /// Prepares several limits that are decided together: see [`Layers`].
    pub fn layers<const N: usize>(&self, limits: [&str; N]) -> Result<Layers<N>, HandleError> {
        Layers::new(self, limits)
    }

    /// The policy in force.
    pub fn policy(&self) -> Arc<Policy> {
        self.inner.policy.get()
    }

    /// Reads the policy in force as this thread has it: cheaper than [`Limiter::policy`], for who reads it
    /// with every request.
    #[inline]
    pub fn with_policy<T>(&self, read: impl FnOnce(&Arc<Policy>) -> T) -> T {
        self.inner.policy.read(|policy, _| read(policy))
    }

    /// The clock by which waits are measured: that of the store, if it is in this process.
    pub fn clock(&self) -> &Clock {
        &self.inner.clock
    }

    /// Whether decisions are made in this process, so that nobody has to wait for them.
    pub fn is_embedded(&self) -> bool {
        self.inner.memory.is_some()
    }

    /// Puts other limits in force, for every request that starts later. Counters are kept wherever
    /// name, period and algorithm of a limit are the same.
    pub fn replace(&self, limits: Vec<Limit>) -> Result<Arc<Policy>, InvalidPolicy> {
        let last = self.policy();
        let policy = Policy::new(limits)?.declaring(last.declared().iter().cloned())?;
        Ok(self.replace_policy(policy.with_ipv6_prefix(last.ipv6_prefix())))
    }

    /// As [`Limiter::replace`], for a policy that is already made. Its version becomes the next one.
    pub fn replace_policy(&self, policy: Policy) -> Arc<Policy> {
        self.inner.policy.replace(|last| policy.with_version(last.version() + 1))
    }

    /// As [`Limiter::replace_policy`], under a version that was given elsewhere, such as by all nodes of a
    /// store.
    pub fn replace_policy_as(&self, policy: Policy, version: u64) -> Arc<Policy> {
        self.inner.policy.replace(|_| policy.with_version(version))
    }

    fn request<'a>(&'a self, verb: Verb, facts: &'a Facts<'a>) -> Request<'a> {
        let asked = toll::TollRequest { verb, facts, cost: 1, hold: None, also: &[] };
        Request { limiter: self, policy: None, asked }
    }

    /// Decides a request now, or says whom to wait for.
    #[inline]
    fn decide<'a>(
        &'a self,
        policy: Option<&Arc<Policy>>,
        asked: &toll::TollRequest<'_>,
    ) -> Result<Decided<'a>, InvalidRequest> {
        let policy = policy.map_or_else(|| self.inner.policy.share(), Arc::clone);
        if let Some(memory) = &self.inner.memory {
            return Decision::make(policy, asked, |toll, ruling| memory.decide_into(toll, ruling))
                .map(Decided::Now);
        }
        let mut toll = Toll::new(policy, asked.verb);
        toll.add_request(asked)?;
        let answer = self.inner.store.decide(&toll);
        Ok(Decided::Later(Box::new(Pending { toll, answer })))
    }

    /// Tells whoever wants to know.
    #[inline]
    pub(crate) fn decided(&self, decision: Decision) -> Decision {
        if let Some(observer) = self.inner.observer.get() {
            observer.record(&decision);
        }
        decision
    }

    async fn wait_for(&self, facts: &Facts<'_>, cost: u64) -> Result<Decision, InvalidRequest> {
        let toll = || self.inner.policy.share().toll(Verb::Check, facts, cost);
        let mut seat: Option<Seat<'_>> = {
            let toll = toll()?;
            // What can never pass has nobody to wait for.
            let never = toll.dues().any(|due| due.enforced() && due.cost.max(1) > due.quota.limit());
            let line = if never { None } else { self.inner.queues.waited_for(&toll) };
            line.map(|key| self.inner.queues.join(key))
        };
        loop {
            if let Some(seat) = &seat {
                seat.first().await;
            }
            // Made anew each time: the policy may have been replaced meanwhile.
            let toll = toll()?;
            let ruling = self.inner.store.decide(&toll).await;
            let decision = Decision::new(toll, ruling);
            let Verdict::Deny { retry: Retry::After(retry) } = decision.verdict() else {
                return Ok(self.decided(decision));
            };
            let key = decision.binding().expect("a refusal has a limit that refuses").key().to_bytes();
            if seat.as_ref().is_none_or(|seat| *seat.key() != *key) {
                drop(seat.take());
                seat = Some(self.inner.queues.join(key.into()));
            }
            if seat.as_ref().is_some_and(Seat::is_first) {
                self.inner.clock.sleep(retry).await;
            }
        }
    }
}

/// What became of a request.
enum Decided<'a> {
    /// It is decided.
    Now(Decision),
    /// The store was asked.
    Later(Box<Pending<'a>>),
}

/// A toll that a store has been asked about.
#[derive(Debug)]
struct Pending<'a> {
    toll: Toll,
    answer: StoreFuture<'a, Reply>,
}

/// A request that is about to be decided: `await` it, or [`wait`](Request::wait) for it.
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is decided before it is awaited"]
pub struct Request<'a> {
    limiter: &'a Limiter,
    policy: Option<&'a Arc<Policy>>,
    asked: toll::TollRequest<'a>,
}

impl<'a> Request<'a> {
    /// What it costs: from 1 to 2^31.
    pub fn cost(mut self, cost: u64) -> Request<'a> {
        self.asked.cost = cost;
        self
    }

    /// The longest delay that the caller can hold a request queued by a leaky bucket; what would have
    /// to wait longer is refused.
    pub fn hold(mut self, longest: impl Into<Span>) -> Request<'a> {
        self.asked.hold = Some(longest.into());
        self
    }

    /// Adds other readings of the same request, for a caller that cannot know how its server reads it, such as
    /// a path that some servers decode and others do not. The request pays the limits of every reading, all or
    /// nothing; a key that several readings share is charged once.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use tollkeeper::{Limit, Limiter, Quota, facts};
    /// # let limiter = Limiter::builder()
    /// #     .limit(Limit::new("login", Quota::per_minute(5)).when("route", "/login"))
    /// #     .limit(Limit::new("projects", Quota::per_minute(100)).when("route", "/projects/{id}"))
    /// #     .build().await?;
    /// // `/projects/..%2Flogin`
    /// let (decoded, as_written) = (facts! { "route" => "/login" }, facts! { "route" => "/projects/{id}" });
    /// let decision = limiter.check(&decoded).also(&[as_written]).await?;
    /// assert!(decision.limits().map(|limit| limit.name().to_owned()).eq(["login", "projects"]));
    /// # Ok(()) }
    /// ```
    pub fn also(mut self, readings: &'a [Facts<'a>]) -> Request<'a> {
        self.asked.also = readings;
        self
    }

    /// Decides by this policy instead of the one in force: for who has read facts for this one, and must
    /// not meet limits that need others.
    pub fn under(mut self, policy: &'a Arc<Policy>) -> Request<'a> {
        self.policy = Some(policy);
        self
    }

    /// Decides on this thread, without an async runtime.
    #[inline]
    pub fn wait(self) -> Result<Decision, InvalidRequest> {
        if self.limiter.is_embedded() {
            // Without a waker, which costs an allocation.
            let Decided::Now(decision) = self.limiter.decide(self.policy, &self.asked)? else {
                unreachable!("a store in this process answers at once")
            };
            return Ok(self.limiter.decided(decision));
        }
        blocking::wait(self.into_future())
    }
}

impl<'a> IntoFuture for Request<'a> {
    type Output = Result<Decision, InvalidRequest>;
    type IntoFuture = Deciding<'a>;

    fn into_future(self) -> Deciding<'a> {
        Deciding(Stage::Asked(self))
    }
}

/// The future of a [`Request`].
#[derive(Debug)]
pub struct Deciding<'a>(Stage<'a>);

#[derive(Debug)]
enum Stage<'a> {
    /// Nothing has happened yet.
    Asked(Request<'a>),
    /// The store was asked.
    Waiting(&'a Limiter, Box<Pending<'a>>),
    /// It was decided.
    Done,
}

impl Future for Deciding<'_> {
    type Output = Result<Decision, InvalidRequest>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let (limiter, mut pending) = match std::mem::replace(&mut self.0, Stage::Done) {
            Stage::Asked(request) => match request.limiter.decide(request.policy, &request.asked)? {
                Decided::Now(decision) => return Poll::Ready(Ok(request.limiter.decided(decision))),
                Decided::Later(pending) => (request.limiter, pending),
            },
            Stage::Waiting(limiter, pending) => (limiter, pending),
            Stage::Done => panic!("a decision is made once: the future was polled after it was ready"),
        };
        match Pin::new(&mut pending.answer).poll(context) {
            Poll::Ready(ruling) => Poll::Ready(Ok(limiter.decided(Decision::new(pending.toll, ruling)))),
            Poll::Pending => {
                self.0 = Stage::Waiting(limiter, pending);
                Poll::Pending
            }
        }
    }
}

/// A request for slots, about to be decided: `await` it, or [`wait`](Acquire::wait) for it.
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is decided before it is awaited"]
pub struct Acquire<'a>(Request<'a>);

impl<'a> Acquire<'a> {
    /// As [`Request::cost`]: a slot is one slot whatever the cost.
    pub fn cost(self, cost: u64) -> Acquire<'a> {
        Acquire(self.0.cost(cost))
    }

    /// As [`Request::hold`].
    pub fn hold(self, longest: impl Into<Span>) -> Acquire<'a> {
        Acquire(self.0.hold(longest))
    }

    /// As [`Request::also`].
    pub fn also(self, readings: &'a [Facts<'a>]) -> Acquire<'a> {
        Acquire(self.0.also(readings))
    }

    /// As [`Request::under`].
    pub fn under(self, policy: &'a Arc<Policy>) -> Acquire<'a> {
        Acquire(self.0.under(policy))
    }

    /// As [`Request::wait`].
    #[inline]
    pub fn wait(self) -> Result<Acquired, InvalidRequest> {
        Ok(Acquired::new(self.0.limiter, self.0.wait()?, Taken::Blocking))
    }
}

impl<'a> IntoFuture for Acquire<'a> {
    type Output = Result<Acquired, InvalidRequest>;
    type IntoFuture = Acquiring<'a>;

    fn into_future(self) -> Acquiring<'a> {
        Acquiring(self.0.limiter, self.0.into_future())
    }
}

/// The future of an [`Acquire`].
#[derive(Debug)]
pub struct Acquiring<'a>(&'a Limiter, Deciding<'a>);

impl Future for Acquiring<'_> {
    type Output = Result<Acquired, InvalidRequest>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let limiter = self.0;
        Pin::new(&mut self.1).poll(context).map_ok(|decision| Acquired::new(limiter, decision, Taken::Async))
    }
}

/// A request that waits until it may pass.
#[derive(Clone, Copy, Debug)]
#[must_use = "nothing is decided before it is awaited"]
pub struct Waiting<'a> {
    limiter: &'a Limiter,
    facts: &'a Facts<'a>,
    cost: u64,
}

impl<'a> Waiting<'a> {
    /// What it costs: from 1 to 2^31.
    pub fn cost(self, cost: u64) -> Waiting<'a> {
        Waiting { cost, ..self }
    }
}

impl<'a> IntoFuture for Waiting<'a> {
    type Output = Result<Decision, InvalidRequest>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.limiter.wait_for(self.facts, self.cost))
    }
}

/// Why a key was not forgotten.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForgetError {
    /// There is no such limit, or the facts are invalid.
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

impl std::error::Error for ForgetError {}

/// What came of an [`acquire`](Limiter::acquire).
#[derive(Debug)]
#[must_use = "dropping it gives the slot back"]
pub struct Acquired {
    /// Whether the request may pass.
    pub decision: Decision,
    /// The slot, given back when this is dropped; nothing if the request was refused or no
    /// concurrency limit applied.
    pub slot: Option<SlotGuard>,
}

impl Acquired {
    #[inline]
    fn new(limiter: &Limiter, decision: Decision, taken: Taken) -> Acquired {
        // Most policies have no slots, and need not be asked twice.
        let any = decision.toll().dues().any(|due| due.is_slot());
        let slot = any.then(|| decision.slot()).flatten();
        Acquired { slot: slot.map(|slot| SlotGuard::new(limiter.clone(), slot, taken)), decision }
    }
}
