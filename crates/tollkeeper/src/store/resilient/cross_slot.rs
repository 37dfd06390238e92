//! Decides a toll whose limits are in several cluster slots: each server decides its part, all at the same time.
//!
//! No server knows the verdicts of the others, so each charges what it admits. If one refuses, the charges of the
//! others are undone one round trip later, after the caller has its decision. No limit is ever exceeded by this. If a
//! key of the toll was refused the last time, all parts are peeked at first, so that a flood of refused requests does
//! not charge and undo. The limits of a server that does not answer follow their failure policy. They are decided
//! last, when it is known whether all other limits admit the request.

use std::collections::HashSet;
use std::collections::hash_map::RandomState;
use std::future::poll_fn;
use std::hash::BuildHasher as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use tokio::sync::oneshot;
use tollkeeper_core::decision::admitted;
use tollkeeper_core::{Due, LimitReply, Outcome, Reply, Toll};

use super::Inner;
use crate::background;
use crate::limiter::observer::Op;
use crate::store::remote::{Failure, PartialToll, Remote, Server};
use crate::sync::{Mutex, lock};

/// Decides such a toll, in a task of its own: unneeded charges are undone even if the caller drops the future.
pub(super) async fn decide<R: Remote + 'static>(
    store: Arc<Inner<R>>,
    toll: Toll,
    parts: Vec<PartialToll>,
) -> Reply {
    let (answer, answered) = oneshot::channel();
    let spawned = background::spawn({
        let (store, toll) = (Arc::clone(&store), toll.clone());
        async move {
            let decided = decide_parts(&store, &toll, parts).await;
            let _ = answer.send(decided.together(&toll));
            decided.undo(&store).await;
        }
    });
    if let Err(error) = spawned {
        store.failed(None, store.clock.now(), &Failure::no_thread(&error));
    }
    answered.await.unwrap_or_else(|_| store.fallback.decide(&toll))
}

/// The replies to the parts of a toll.
struct PartReplies {
    /// The parts that a server decided.
    parts: Vec<(PartialToll, Reply)>,
    /// The parts without a reply, decided by the fallback as one.
    fallback: Option<(PartialToll, Reply)>,
    /// Whether all of them admit the request.
    passes: bool,
}

async fn decide_parts<R: Remote>(store: &Inner<R>, toll: &Toll, parts: Vec<PartialToll>) -> PartReplies {
    if !toll.verb().charges() {
        return ask(store, toll, parts).await;
    }
    let always_refused = toll.dues().any(|due| due.enforced() && due.quota.count() == 0);
    if always_refused || store.refused.any(toll) {
        let looks =
            parts.iter().map(|part| PartialToll { toll: part.toll.clone().into_peek(), ..part.clone() });
        let looked = ask(store, &toll.clone().into_peek(), looks.collect()).await;
        if always_refused || !looked.passes {
            return looked;
        }
        store.refused.forget(toll);
    }
    let decided = ask(store, toll, parts).await;
    if !decided.passes {
        store.refused.remember(&decided.parts);
    }
    decided
}

/// Sends all parts at once, and decides those without a reply by the fallback.
async fn ask<R: Remote>(store: &Inner<R>, toll: &Toll, parts: Vec<PartialToll>) -> PartReplies {
    let began = store.clock.now();
    // Several parts may belong to one server: its breaker is consulted once for all of them.
    let mut asked: Vec<(&Server, bool)> = Vec::new();
    for part in &parts {
        if asked.iter().all(|(server, _)| *server != &part.server) {
            asked.push((&part.server, store.may_ask(&part.server, began)));
        }
    }
    let asking = parts.iter().map(|part| {
        asked.contains(&(&part.server, true)).then(|| {
            let answer = store.remote.decide_part(part);
            store.await_answer(Op::Decide, Some(part.server.clone()), began, answer.boxed())
        })
    });
    let answers = all(asking.collect()).await;

    let (mut decided, mut missing) = (Vec::new(), Vec::new());
    for (part, answer) in parts.into_iter().zip(answers) {
        match answer {
            Some(Ok(reply)) => decided.push((part, reply)),
            Some(Err(_)) | None => missing.extend(part.places),
        }
    }
    let admitted = decided.iter().all(allows);
    let fallback = (!missing.is_empty()).then(|| {
        missing.sort_unstable();
        let rest = toll.part(&missing);
        let rest = if admitted { rest } else { rest.into_peek() };
        let reply = store.fallback.decide(&rest);
        (PartialToll { server: Server::default(), toll: rest, places: missing, id: reply.id() }, reply)
    });
    let passes = admitted && fallback.as_ref().is_none_or(allows);
    PartReplies { parts: decided, fallback, passes }
}

/// Whether all enforced limits of a part admit the request.
fn allows((part, reply): &(PartialToll, Reply)) -> bool {
    admitted(part.toll.dues().zip(reply.limits()).map(|(due, reply)| (due.mode(), reply.allowed())))
}

impl PartReplies {
    /// Combines the replies. Each part has its own server time. A charge that will be undone is shown as if it had
    /// never been made.
    fn together(&self, toll: &Toll) -> Reply {
        let both = || self.fallback.iter().chain(&self.parts);
        let now = both().map(|(_, reply)| reply.time()).max().unwrap_or_default();
        let mut together = Reply::new(now, both().next().map_or(0, |(part, _)| part.id));
        let all = together.resize(toll.len());
        for said in both() {
            let (part, reply) = said;
            let undone = !self.passes && part.toll.verb().charges() && allows(said);
            for ((due, said), place) in part.toll.dues().zip(reply.limits()).zip(&part.places) {
                all[*place] = match *said {
                    LimitReply::Degraded { .. } => *said,
                    LimitReply::Step { step, charged } => {
                        LimitReply::StepAt { step, charged: charged && !undone, now: reply.time() }
                    }
                    _ => {
                        let outcome = said.outcome_at(&due, reply.time());
                        let taken = if undone && said.allowed() { due.cost } else { 0 };
                        let remaining = (outcome.remaining + taken).min(outcome.limit);
                        LimitReply::Outcome { outcome: Outcome { remaining, ..outcome }, mark: said.mark() }
                    }
                };
            }
        }
        together
    }

    /// Undoes the charges of a refused toll, but only those that certainly were made. If a reply was lost, its charge
    /// may have been made, and is kept.
    async fn undo<R: Remote>(&self, store: &Inner<R>) {
        if self.passes {
            return;
        }
        let charged = self.parts.iter().filter(|said| said.0.toll.verb().charges() && allows(said));
        let undone = all(charged.map(|(part, reply)| Some(store.remote.undo(part, reply))).collect()).await;
        for failure in undone.into_iter().flatten().filter_map(Result::err) {
            tracing::debug!("cannot undo the charge of a refused request: {failure}");
        }
    }
}

/// Polls all futures concurrently, and returns their outputs in order.
async fn all<F: Future>(futures: Vec<Option<F>>) -> Vec<Option<F::Output>> {
    let mut futures: Vec<Option<Pin<Box<F>>>> =
        futures.into_iter().map(|future| future.map(Box::pin)).collect();
    let mut outputs: Vec<Option<F::Output>> = futures.iter().map(|_| None).collect();
    poll_fn(|context| {
        for (future, output) in futures.iter_mut().zip(&mut outputs) {
            if let Some(Poll::Ready(ready)) = future.as_mut().map(|future| future.as_mut().poll(context)) {
                (*future, *output) = (None, Some(ready));
            }
        }
        if futures.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    outputs
}

/// Hashes of the keys that were refused the last time. A collision costs one unneeded peek. There are two generations:
/// when the young one is full, it replaces the old one.
#[derive(Debug, Default)]
pub(super) struct Refused {
    keys: Mutex<[HashSet<u64>; 2]>,
    hashes: RandomState,
}

/// The most keys in each generation.
const REMEMBERED: usize = 10_000;

impl Refused {
    fn any(&self, toll: &Toll) -> bool {
        let [young, old] = &*lock(&self.keys);
        let known = |hash: u64| young.contains(&hash) || old.contains(&hash);
        !(young.is_empty() && old.is_empty()) && toll.dues().any(|due| known(self.hash(&due)))
    }

    fn remember(&self, parts: &[(PartialToll, Reply)]) {
        let mut keys = lock(&self.keys);
        for (part, reply) in parts {
            let refused = part.toll.dues().zip(reply.limits());
            for (due, _) in refused.filter(|(due, said)| due.enforced() && !said.allowed()) {
                let [young, old] = &mut *keys;
                if young.len() >= REMEMBERED {
                    *old = std::mem::take(young);
                }
                young.insert(self.hash(&due));
            }
        }
    }

    fn forget(&self, toll: &Toll) {
        let mut keys = lock(&self.keys);
        for hash in toll.dues().map(|due| self.hash(&due)) {
            keys.iter_mut().for_each(|keys| {
                keys.remove(&hash);
            });
        }
    }

    fn hash(&self, due: &Due<'_>) -> u64 {
        self.hashes.hash_one(due.key.to_bytes())
    }
}

#[cfg(test)]
mod tests;
