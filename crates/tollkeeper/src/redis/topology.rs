//! One server or a cluster of them: where a toll is decided.

use std::collections::HashSet;
use std::sync::Arc;

use redis::{Cmd, Value};
use tollkeeper_core::Ruling;

use super::cluster::Cluster;
use super::fate::Fate;
use super::lane::Lane;
use super::slot;
use super::wire::apart::{Part, together};
use super::wire::{self, Asked, Call};
use crate::sync::{Mutex, lock};

/// Where states are.
#[derive(Debug)]
pub(crate) enum Topology {
    /// On one server.
    One(Lane),
    /// On several, by slot.
    Many(Cluster, Refused),
}

/// Keys that were refused lately: who asks for one of them is told so before anything is charged elsewhere.
#[derive(Debug, Default)]
pub(crate) struct Refused(Mutex<HashSet<String>>);

/// The most keys that are remembered.
const REMEMBERED: usize = 10_000;

impl Topology {
    /// Decides a toll. `marker` names what remembers that a state was corrected.
    pub(crate) async fn decide(&self, asked: Asked, marker: impl Fn(&str) -> String) -> Result<Ruling, Fate> {
        match self {
            Topology::One(lane) => lane.decide(0, asked).await,
            Topology::Many(cluster, refused) => {
                let mut parts = asked.apart(slot::of);
                if let [part] = &mut parts[..] {
                    return cluster.decide(part.slot, part.asked.clone()).await;
                }
                decide_apart(cluster, refused, parts, marker).await
            }
        }
    }

    /// Runs scripts, one for each slot of these keys.
    pub(crate) async fn run(&self, call: &Call) -> Result<wire::Value, Fate> {
        match self {
            Topology::One(lane) => lane.run(call).await,
            Topology::Many(cluster, _) => {
                let slot = call.keys.first().map_or(0, |key| slot::of(key));
                cluster.run(slot, call).await
            }
        }
    }

    /// Runs a command on the server that has this key.
    pub(crate) async fn command(&self, key: &str, command: &Cmd) -> Result<Value, Fate> {
        match self {
            Topology::One(lane) => lane.command(command).await,
            Topology::Many(cluster, _) => cluster.command(slot::of(key), command).await,
        }
    }

    /// The slot of a key; a server without slots has one.
    pub(crate) fn slot(&self, key: &str) -> u16 {
        match self {
            Topology::One(_) => 0,
            Topology::Many(..) => slot::of(key),
        }
    }

    /// Why some server cannot be asked, if one cannot.
    pub(crate) fn trouble(&self) -> Option<Arc<str>> {
        match self {
            Topology::One(lane) => lane.trouble(),
            Topology::Many(cluster, _) => cluster.trouble(),
        }
    }

    /// Gives all connections up, so that the next ones ask again where to go.
    pub(crate) fn give_up(&self) {
        if let Topology::One(lane) = self {
            lane.give_up();
        }
    }
}

/// Decides a toll whose keys are apart: all parts at once, and what was admitted in vain is given back. No
/// limit is ever exceeded; what a refused request was charged elsewhere comes back one trip later.
async fn decide_apart(
    cluster: &Cluster,
    refused: &Refused,
    parts: Vec<Part>,
    marker: impl Fn(&str) -> String,
) -> Result<Ruling, Fate> {
    if refused.any(&parts) {
        let peeks = parts.iter().map(Part::peek).collect();
        let peeked = ask_all(cluster, peeks).await;
        let peeked: Vec<(Part, Ruling)> =
            peeked.into_iter().map(|(part, ruling)| Ok((part, ruling?))).collect::<Result<_, Fate>>()?;
        if !peeked.iter().all(|(part, ruling)| part.allows(ruling)) {
            return Ok(together(&peeked, false));
        }
        refused.forget(&parts);
    }
    let answers = ask_all(cluster, parts).await;
    let passes = answers.iter().all(|(part, ruling)| ruling.as_ref().is_ok_and(|ruling| part.allows(ruling)));
    if !passes {
        refused.remember(&answers);
        // Only what certainly was charged: an admission that nobody heard of is never given back.
        let admitted = answers.iter().filter_map(|(part, ruling)| Some((part, ruling.as_ref().ok()?)));
        for (part, ruling) in admitted.filter(|(part, ruling)| part.allows(ruling)) {
            for call in part.undo(ruling, &marker) {
                if let Err(fate) = cluster.run(part.slot, &call).await {
                    tracing::debug!("what was charged in vain stays charged: {fate:?}");
                }
            }
        }
    }
    let answered: Vec<(Part, Ruling)> =
        answers.into_iter().map(|(part, ruling)| Ok((part, ruling?))).collect::<Result<_, Fate>>()?;
    Ok(together(&answered, passes))
}

/// Asks for all parts at the same time.
async fn ask_all(cluster: &Cluster, parts: Vec<Part>) -> Vec<(Part, Result<Ruling, Fate>)> {
    let mut asking: Vec<_> =
        parts.iter().map(|part| Box::pin(cluster.decide(part.slot, part.asked.clone()))).collect();
    let mut answers: Vec<Option<Result<Ruling, Fate>>> = parts.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        let mut pending = false;
        for (asking, answer) in asking.iter_mut().zip(&mut answers) {
            if answer.is_none() {
                match asking.as_mut().poll(context) {
                    std::task::Poll::Ready(ready) => *answer = Some(ready),
                    std::task::Poll::Pending => pending = true,
                }
            }
        }
        if pending { std::task::Poll::Pending } else { std::task::Poll::Ready(()) }
    })
    .await;
    drop(asking);
    parts.into_iter().zip(answers.into_iter().map(|answer| answer.expect("all are there"))).collect()
}

impl Refused {
    fn any(&self, parts: &[Part]) -> bool {
        let refused = lock(&self.0);
        !refused.is_empty()
            && parts.iter().flat_map(|part| part.asked.names()).any(|name| refused.contains(name))
    }

    fn remember(&self, answers: &[(Part, Result<Ruling, Fate>)]) {
        let mut refused = lock(&self.0);
        if refused.len() > REMEMBERED {
            refused.clear();
        }
        for (part, ruling) in answers {
            if ruling.as_ref().is_ok_and(|ruling| !part.allows(ruling)) {
                refused.extend(part.asked.names().map(str::to_owned));
            }
        }
    }

    fn forget(&self, parts: &[Part]) {
        let mut refused = lock(&self.0);
        for name in parts.iter().flat_map(|part| part.asked.names()) {
            refused.remove(name);
        }
    }
}
