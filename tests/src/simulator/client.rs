//! The client of the simulated store: a [`Remote`] whose calls wait in an outbox until the network takes them.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use tollkeeper::store::{
    Failure, FailureKind, Key, KeyCorrection, LeaseGrant, LeaseRequest, Remote, RemoteResult, Reply, Secret,
    StoreFuture, Toll,
};
use tollkeeper::{Charge, Correction, Slot};

use super::executor::lock;

/// The client of one node.
#[derive(Clone, Debug)]
pub struct Client {
    node: usize,
    wire: Arc<Wire>,
    /// The ID of the last admission; the IDs of all clients differ.
    ids: Arc<AtomicU64>,
}

/// What all nodes share with the network.
#[derive(Debug, Default)]
pub struct Wire {
    outbox: Mutex<Vec<Call>>,
    /// The task that is being polled.
    task: AtomicU64,
}

/// A call on its way to the store.
#[derive(Clone, Debug)]
pub struct Call {
    /// The node that made it.
    pub node: usize,
    /// The task that made it.
    pub task: u64,
    /// What the store is asked to do.
    pub op: Op,
    /// Where the answer goes.
    pub pending: Arc<Pending>,
}

/// What the store is asked to do.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the calls of a `Remote`")]
pub enum Op {
    Decide(Box<Toll>, u64),
    Lease(Box<LeaseRequest>),
    Correct(Charge, Vec<KeyCorrection>),
    Release(Slot),
    Renew(Slot),
    Forget(Vec<u8>),
}

/// The answer of the store.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "one for each kind of call")]
pub enum Answer {
    Decided(Box<Reply>),
    Granted(LeaseGrant),
    Corrected(Correction),
    Held(bool),
}

/// A call that waits for its answer.
#[derive(Debug, Default)]
pub struct Pending {
    is_answered: AtomicBool,
    /// The answer until the caller reads it, and the caller's waker until then.
    waiting: Mutex<(Option<RemoteResult<Answer>>, Option<Waker>)>,
}

impl Pending {
    /// Whether its answer was delivered.
    pub fn is_answered(&self) -> bool {
        self.is_answered.load(Relaxed)
    }

    /// Delivers the answer. A second one is ignored, as a connection ignores what belongs to no call.
    pub fn answer(&self, answer: RemoteResult<Answer>) {
        if !self.is_answered.swap(true, Relaxed) {
            let mut waiting = lock(&self.waiting);
            waiting.0 = Some(answer);
            if let Some(waker) = waiting.1.take() {
                waker.wake();
            }
        }
    }
}

impl Wire {
    /// Names the task that is polled next.
    pub fn enter(&self, task: u64) {
        self.task.store(task, Relaxed);
    }

    /// Takes the calls that were made.
    pub fn take(&self) -> Vec<Call> {
        std::mem::take(&mut lock(&self.outbox))
    }
}

impl Client {
    /// The client of a node.
    pub fn new(node: usize, incarnation: u64, wire: Arc<Wire>) -> Client {
        let first = (node as u64 + 1) << 48 | incarnation << 32;
        Client { node, wire, ids: Arc::new(AtomicU64::new(first)) }
    }

    fn call<'a, T: Send + 'a>(
        &self,
        op: Op,
        read: impl Fn(Answer) -> Option<T> + Send + 'a,
    ) -> StoreFuture<'a, RemoteResult<T>> {
        let pending = Arc::new(Pending::default());
        let task = self.wire.task.load(Relaxed);
        lock(&self.wire.outbox).push(Call { node: self.node, task, op, pending: Arc::clone(&pending) });
        StoreFuture::Later(Box::pin(poll_fn(move |context| {
            let mut waiting = lock(&pending.waiting);
            let Some(answer) = waiting.0.take() else {
                waiting.1 = Some(context.waker().clone());
                return Poll::Pending;
            };
            Poll::Ready(answer.and_then(|answer| {
                read(answer).ok_or_else(|| Failure::new(FailureKind::Protocol, "an answer to another call"))
            }))
        })))
    }
}

fn held(answer: Answer) -> Option<bool> {
    if let Answer::Held(held) = answer { Some(held) } else { None }
}

/// The secret that all nodes know.
const SECRET: Secret = Secret([7; 16]);

impl Remote for Client {
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, RemoteResult<Reply>> {
        let id = if toll.verb().charges() { self.ids.fetch_add(1, Relaxed) + 1 } else { 0 };
        self.call(Op::Decide(Box::new(toll.clone()), id), |answer| {
            if let Answer::Decided(reply) = answer { Some(*reply) } else { None }
        })
    }

    fn lease(&self, request: &LeaseRequest) -> StoreFuture<'_, RemoteResult<Option<LeaseGrant>>> {
        self.call(Op::Lease(Box::new(request.clone())), |answer| {
            if let Answer::Granted(grant) = answer { Some(Some(grant)) } else { None }
        })
    }

    fn correct<'a>(
        &'a self,
        charge: &'a Charge,
        corrections: &'a [KeyCorrection],
    ) -> StoreFuture<'a, RemoteResult<Correction>> {
        self.call(Op::Correct(charge.clone(), corrections.to_vec()), |answer| {
            if let Answer::Corrected(correction) = answer { Some(correction) } else { None }
        })
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>> {
        self.call(Op::Release(slot.clone()), held)
    }

    fn renew<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>> {
        self.call(Op::Renew(slot.clone()), held)
    }

    fn forget<'a>(&'a self, key: Key<'a>) -> StoreFuture<'a, RemoteResult<bool>> {
        self.call(Op::Forget(key.to_bytes()), held)
    }

    fn seal_charge(&self, charge: &Charge) -> Option<String> {
        Some(charge.seal(&SECRET, |_| 0))
    }

    fn open_charge<'a>(&'a self, text: &'a str) -> StoreFuture<'a, RemoteResult<Option<Charge>>> {
        StoreFuture::Ready(Ok(Charge::open(text, &SECRET)))
    }

    fn seal_slot(&self, slot: &Slot) -> Option<String> {
        Some(slot.seal(&SECRET, |_| 0))
    }

    fn open_slot<'a>(&'a self, text: &'a str) -> StoreFuture<'a, RemoteResult<Option<Slot>>> {
        StoreFuture::Ready(Ok(Slot::open(text, &SECRET)))
    }
}
