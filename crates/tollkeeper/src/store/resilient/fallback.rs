//! Decides tolls while the remote store is unavailable, by each limit's `on_store_failure`.
//!
//! One enforced `deny` limit refuses the whole toll. The `local` limits are decided together, all or nothing, in a
//! memory store, on this node's share of each quota. `allow` limits admit. The memory store lives as long as the
//! process, so that a breaker that opens and closes repeatedly does not grant a fresh share each time.

use tollkeeper_core::{CheckedQuota, Due, LimitReply, OnStoreFailure, Outcome, Reply, Retry, Span, Toll};

use crate::store::memory::MemoryStore;

/// Decides in place of a remote store.
#[derive(Debug)]
pub(crate) struct Fallback {
    local: MemoryStore,
    /// The number of nodes that share each quota; see [`CheckedQuota::share`].
    nodes: u32,
    /// When to retry after a refusal that only the remote store can lift.
    pause: Span,
}

impl Fallback {
    pub(crate) fn new(local: MemoryStore, nodes: u32, pause: Span) -> Fallback {
        Fallback { local, nodes, pause }
    }

    /// Decides all dues of a toll.
    pub(crate) fn decide(&self, toll: &Toll) -> Reply {
        let policy = |due: &Due<'_>| due.rule.on_store_failure();
        let refused = toll.dues().any(|due| due.enforced() && policy(&due) == OnStoreFailure::Deny);
        let quotas: Vec<CheckedQuota> = toll.dues().map(|due| due.quota.share(self.nodes)).collect();
        let local: Vec<(usize, Due<'_>)> = toll
            .dues()
            .enumerate()
            .filter(|(_, due)| policy(due) == OnStoreFailure::Local)
            .map(|(index, due)| (index, due.with_quota(&quotas[index])))
            .collect();
        let dues: Vec<Due<'_>> = local.iter().map(|(_, due)| *due).collect();
        let charging = toll.verb().charges() && !refused;
        let mut reply = Reply::default();
        let (now, id, local_replies) = self.local.decide_dues(&dues, charging);
        for (due, limit_reply) in toll.dues().zip(reply.resize(toll.len())) {
            let limit = due.quota.limit();
            let outcome = match policy(&due) {
                OnStoreFailure::Allow => {
                    Outcome { allowed: true, limit, remaining: limit, ..Outcome::default() }
                }
                OnStoreFailure::Deny => {
                    Outcome { limit, retry: Some(Retry::After(self.pause)), ..Outcome::default() }
                }
                OnStoreFailure::Local => continue,
            };
            *limit_reply = LimitReply::Degraded { by: policy(&due), outcome };
        }
        for ((index, share), local_reply) in local.iter().zip(local_replies) {
            let due = toll.get(*index);
            let outcome = local_reply.outcome_at(share, now);
            // A cost above this node's share, but within the full quota, can pass once the remote store is back.
            let beyond_share = outcome.retry == Some(Retry::Never) && due.cost <= due.quota.limit();
            let retry = if beyond_share { Some(Retry::After(self.pause)) } else { outcome.retry };
            reply.resize(toll.len())[*index] =
                LimitReply::Degraded { by: OnStoreFailure::Local, outcome: Outcome { retry, ..outcome } };
        }
        reply.set(now, id);
        reply
    }
}
