//! Undoes one part of a toll after another part was refused in another slot of the cluster.

use tollkeeper_core::{Algorithm, Change, CheckedQuota, Quota, Reply, Span};

use super::{Call, Correcting, EncodedToll, Handling, Nonce, push_correction};
use crate::store::redis::script;

/// How long an undo stays valid. A later one changes nothing, and its marker has expired. A call is in flight for at
/// most a second, and is redirected a few times at most.
const UNDO_VALIDITY: Span = Span::from_secs(5);

impl EncodedToll {
    /// The calls that refund what this toll was charged.
    pub(crate) fn undo(
        &self,
        reply: &Reply,
        marker: impl Fn(&str) -> String,
        nonce: impl Fn() -> Nonce,
    ) -> Vec<Call> {
        let (mut corrected, mut released) = (Vec::new(), Vec::new());
        let mut argument = super::correction_until(reply.time() + UNDO_VALIDITY);
        for (due, limit_reply) in self.dues.iter().zip(reply.limits()) {
            let Some(name) = due.name().filter(|_| limit_reply.allowed() && due.cost > 0) else { continue };
            if due.quota.algorithm() == Algorithm::Concurrency {
                released.push(name.to_owned());
                continue;
            }
            corrected.extend([name.to_owned(), marker(name)]);
            let (cost, count, tick) = (due.cost, due.quota.count(), limit_reply.mark());
            let quota = as_bucket(&due.quota);
            let correcting = Correcting { shift: due.request.shift, cost, count, tick };
            push_correction(&mut argument, &quota, &correcting, Change::GiveBack(cost));
        }
        let correct = Call::new(script::correct(), nonce(), corrected, &argument);
        let release = super::handling(nonce(), self.id, Handling::Release, released);
        [correct, release].into_iter().filter(|call| !call.keys.is_empty()).collect()
    }
}

/// The quota for the refund. Leaky buckets normally refund nothing, because a queued request has delayed those
/// behind it. Here no caller has seen the queued request yet, so it is refunded like a token bucket's.
fn as_bucket(quota: &CheckedQuota) -> CheckedQuota {
    if quota.algorithm() != Algorithm::LeakyBucket {
        return *quota;
    }
    let rate = Quota::every(quota.count(), quota.period()).burst(quota.burst());
    CheckedQuota::new(Algorithm::TokenBucket, rate).expect("the bounds of both are the same")
}
