//! A toll whose limits are kept apart: each server is asked for its part, all at the same time.
//!
//! No server knows what the others say, so each charges what it admits; if one of them refuses, what the others
//! charged is given back, one trip later and off the way of the answer. No limit is ever exceeded by this. A
//! limit that refused its key the last time is looked at first, so that a flood of refusals charges nothing in
//! vain. Where a server does not answer, its limits go by their failure policy, as they do when a whole store does
//! not: last, when it is known whether all others let the request pass.

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

/// Decides such a toll. Whoever asks may leave: what was charged in vain is given back all the same.
pub(super) async fn decide<R: Remote + 'static>(
    store: Arc<Inner<R>>,
    toll: Toll<'static>,
    parts: Vec<PartialToll>,
) -> Reply {
    let (answer, answered) = oneshot::channel();
    let spawned = background::spawn({
        let (store, toll) = (Arc::clone(&store), toll.clone());
        async move {
            let heard = hear(&store, &toll, parts).await;
            let _ = answer.send(heard.together(&toll));
            heard.undo(&store).await;
        }
    });
    if let Err(error) = spawned {
        store.failed(None, store.clock.now(), &Failure::no_thread(&error));
    }
    answered.await.unwrap_or_else(|_| store.fallback.decide(&toll))
}

/// What was said of a toll.
struct Heard {
    /// By the servers that answered.
    parts: Vec<(PartialToll, Reply)>,
    /// In place of those that did not.
    instead: Option<(PartialToll, Reply)>,
    /// Whether all of them let the request pass.
    passes: bool,
}

async fn hear<R: Remote>(store: &Inner<R>, toll: &Toll<'_>, parts: Vec<PartialToll>) -> Heard {
    if !toll.verb().charges() {
        return ask(store, toll, parts).await;
    }
    let hopeless = toll.dues().any(|due| due.enforced() && due.quota.count() == 0);
    if hopeless || store.refused.any(toll) {
        let looks =
            parts.iter().map(|part| PartialToll { toll: part.toll.clone().into_peek(), ..part.clone() });
        let looked = ask(store, &toll.clone().into_peek(), looks.collect()).await;
        if hopeless || !looked.passes {
            return looked;
        }
        store.refused.forget(toll);
    }
    let heard = ask(store, toll, parts).await;
    if !heard.passes {
        store.refused.remember(&heard.parts);
    }
    heard
}

/// Asks for all parts at once, and answers for those who do not.
async fn ask<R: Remote>(store: &Inner<R>, toll: &Toll<'_>, parts: Vec<PartialToll>) -> Heard {
    let began = store.clock.now();
    // Several parts may be of one server, which is tried by all of them or by none.
    let mut asked: Vec<(&Server, bool)> = Vec::new();
    for part in &parts {
        if asked.iter().all(|(server, _)| *server != &part.server) {
            asked.push((&part.server, store.may_ask(&part.server, began)));
        }
    }
    let asking = parts.iter().map(|part| {
        asked.contains(&(&part.server, true)).then(|| {
            let answer = store.remote.decide_part(part);
            store.await_answer(Op::Decide, Some(part.server.clone()), began, answer)
        })
    });
    let answers = all(asking.collect()).await;

    let (mut heard, mut missing) = (Vec::new(), Vec::new());
    for (part, answer) in parts.into_iter().zip(answers) {
        match answer {
            Some(Ok(ruling)) => heard.push((part, ruling)),
            Some(Err(_)) | None => missing.extend(part.places),
        }
    }
    let admitted = heard.iter().all(allows);
    let instead = (!missing.is_empty()).then(|| {
        missing.sort_unstable();
        let rest = toll.part(&missing);
        let rest = if admitted { rest } else { rest.into_peek() };
        let ruling = store.fallback.decide(&rest);
        (PartialToll { server: Server::default(), toll: rest, places: missing, id: ruling.id() }, ruling)
    });
    let passes = admitted && instead.as_ref().is_none_or(allows);
    Heard { parts: heard, instead, passes }
}

/// Whether a part lets the request pass.
fn allows((part, ruling): &(PartialToll, Reply)) -> bool {
    admitted(part.toll.dues().zip(ruling.limits()).map(|(due, reply)| (due.mode(), reply.allowed())))
}

impl Heard {
    /// What the parts say together. Each has a time of its own, so their numbers are computed now; what a part
    /// was charged in vain is told as it stands without.
    fn together(&self, toll: &Toll) -> Reply {
        let both = || self.instead.iter().chain(&self.parts);
        let now = both().map(|(_, ruling)| ruling.time()).max().unwrap_or_default();
        let mut together = Reply::new(now, both().next().map_or(0, |(part, _)| part.id));
        let all = together.resize(toll.len());
        for said in both() {
            let (part, ruling) = said;
            let in_vain = !self.passes && part.toll.verb().charges() && allows(said);
            for ((due, said), place) in part.toll.dues().zip(ruling.limits()).zip(&part.places) {
                all[*place] = match *said {
                    LimitReply::Degraded { .. } => *said,
                    LimitReply::Step { step, charged } => {
                        let said = LimitReply::Step { step, charged: charged && !in_vain };
                        LimitReply::Outcome {
                            outcome: said.outcome_at(&due, ruling.time()),
                            mark: said.mark(),
                        }
                    }
                    _ => {
                        let outcome = said.outcome_at(&due, ruling.time());
                        let taken = if in_vain && said.allowed() { due.cost } else { 0 };
                        let remaining = (outcome.remaining + taken).min(outcome.limit);
                        LimitReply::Outcome { outcome: Outcome { remaining, ..outcome }, mark: said.mark() }
                    }
                };
            }
        }
        together
    }

    /// Gives back what was charged in vain: only what certainly was. An admission that nobody heard of is kept.
    async fn undo<R: Remote>(&self, store: &Inner<R>) {
        if self.passes {
            return;
        }
        let charged = self.parts.iter().filter(|said| said.0.toll.verb().charges() && allows(said));
        let undone = all(charged.map(|(part, ruling)| Some(store.remote.undo(part, ruling))).collect()).await;
        for failure in undone.into_iter().flatten().filter_map(Result::err) {
            tracing::debug!("what was charged in vain stays charged: {failure}");
        }
    }
}

/// Waits for all of these.
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

/// Keys that were refused the last time, as hashes: to mistake one for another costs a look. The young and the
/// old: when the young are many, the old are forgotten.
#[derive(Debug, Default)]
pub(super) struct Refused {
    keys: Mutex<[HashSet<u64>; 2]>,
    hashes: RandomState,
}

/// The most keys of each age.
const REMEMBERED: usize = 10_000;

impl Refused {
    fn any(&self, toll: &Toll) -> bool {
        let [young, old] = &*lock(&self.keys);
        let known = |hash: u64| young.contains(&hash) || old.contains(&hash);
        !(young.is_empty() && old.is_empty()) && toll.dues().any(|due| known(self.hash(&due)))
    }

    fn remember(&self, parts: &[(PartialToll, Reply)]) {
        let mut keys = lock(&self.keys);
        for (part, ruling) in parts {
            let refused = part.toll.dues().zip(ruling.limits());
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
