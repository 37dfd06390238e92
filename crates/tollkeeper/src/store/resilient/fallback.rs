//! What is answered in place of a store that does not: by each limit's own policy.
//!
//! Any enforced `deny` refuses. The `local` limits are decided together, all or nothing, in a store in this
//! process, on this node's share of each; `allow` passes. The store lives as long as the process, so that
//! a breaker that opens and closes does not hand out a fresh share each time.

use tollkeeper_core::{Due, LimitReply, OnStoreFailure, Outcome, Quota, Reply, Retry, Span, Toll};

use crate::store::memory::MemoryStore;

/// Decides in place of a store.
#[derive(Debug)]
pub(crate) struct Fallback {
    local: MemoryStore,
    nodes: u32,
    /// The retry of a refusal that only the store can lift.
    pause: Span,
}

impl Fallback {
    pub(crate) fn new(local: MemoryStore, nodes: u32, pause: Span) -> Fallback {
        Fallback { local, nodes, pause }
    }

    /// Decides a whole toll.
    pub(crate) fn decide(&self, toll: &Toll) -> Reply {
        let policy = |due: &Due<'_>| due.rule.on_store_failure();
        let denied = toll.dues().any(|due| due.enforced() && policy(&due) == OnStoreFailure::Deny);
        let quotas: Vec<Quota> = toll.dues().map(|due| due.quota.share(self.nodes)).collect();
        let local: Vec<(usize, Due<'_>)> = toll
            .dues()
            .enumerate()
            .filter(|(_, due)| policy(due) == OnStoreFailure::Local)
            .map(|(index, due)| (index, due.with_quota(&quotas[index])))
            .collect();
        let dues: Vec<Due<'_>> = local.iter().map(|(_, due)| *due).collect();
        let charging = toll.verb().charges() && !denied;
        let mut reply = Reply::default();
        let (now, id, local_replies) = self.local.decide_dues(&dues, charging);
        for (due, limit_reply) in toll.dues().zip(reply.resize(toll.len())) {
            let whole = due.quota.limit();
            let outcome = match policy(&due) {
                OnStoreFailure::Allow => {
                    Outcome { allowed: true, limit: whole, remaining: whole, ..Outcome::default() }
                }
                OnStoreFailure::Deny => {
                    Outcome { limit: whole, retry: Some(Retry::After(self.pause)), ..Outcome::default() }
                }
                OnStoreFailure::Local => continue,
            };
            *limit_reply = LimitReply::Degraded { by: policy(&due), outcome };
        }
        for ((index, share), local_reply) in local.iter().zip(local_replies) {
            let due = toll.get(*index);
            let outcome = local_reply.outcome_at(share, now);
            // What is more than the share but not more than the whole passes when the store is back.
            let beyond_share = outcome.retry == Some(Retry::Never) && due.cost <= due.quota.limit();
            let retry = if beyond_share { Some(Retry::After(self.pause)) } else { outcome.retry };
            reply.resize(toll.len())[*index] =
                LimitReply::Degraded { by: OnStoreFailure::Local, outcome: Outcome { retry, ..outcome } };
        }
        reply.set(now, id);
        reply
    }
}
