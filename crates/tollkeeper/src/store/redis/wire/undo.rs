//! Undoes one part of a toll after another part was refused in another slot of the cluster.

use tollkeeper_core::lease::Lease;
use tollkeeper_core::{Algorithm, Change, CheckedQuota, Quota, Reply, Span, Toll};

use super::{Call, Correcting, EncodedToll, Handling, Nonce, push_correction};
use crate::store::redis::script;

/// How long an undo stays valid. A later one changes nothing, and its marker has expired. A call is in flight for at
/// most a second, and is redirected a few times at most.
const UNDO_VALIDITY: Span = Span::from_secs(5);

impl EncodedToll {
    /// The calls that refund what `toll`, of which this is the encoding, was charged.
    pub(crate) fn undo(
        &self,
        toll: &Toll,
        reply: &Reply,
        marker: impl Fn(&str) -> String,
        nonce: impl Fn() -> Nonce,
    ) -> Vec<Call> {
        let (mut corrected, mut released) = (Vec::new(), Vec::new());
        let mut argument = super::correction_until(reply.time() + UNDO_VALIDITY);
        for (index, (due, limit_reply)) in self.dues.iter().zip(reply.limits()).enumerate() {
            let Some(name) = due.name().filter(|_| limit_reply.allowed() && due.cost > 0) else { continue };
            if due.quota.algorithm() == Algorithm::Concurrency {
                released.push(name.to_owned());
                continue;
            }
            corrected.extend([name.to_owned(), marker(name)]);
            let age = Lease::refund_age(toll.get(index).key, toll.policy());
            let (cost, count, tick) = (due.cost, due.quota.count(), limit_reply.mark().saturating_sub(age));
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

#[cfg(test)]
mod tests {
    use tollkeeper_core::{Consistency, Limit, LimitReply, Outcome, Policy, Time, Verb, facts};

    use super::*;
    use std::sync::Arc;

    /// The calls that undo the charge of one bucket, made at this tick.
    fn undo(consistency: Consistency, tick: u64) -> Vec<Call> {
        let quota = Quota::every(100_000, Span::from_secs(1)).burst(100_000);
        let limit = Limit::new("per-user", quota).by("user").consistency(consistency);
        let policy = Arc::new(Policy::new(vec![limit]).expect("a valid limit"));
        let toll = policy.toll(Verb::Check, &facts! { "user" => "alice" }, 1).expect("valid facts");
        let mut reply = Reply::new(Time::from_micros(1_760_000_000_000_000), 7);
        let outcome = Outcome { allowed: true, ..Outcome::default() };
        reply.push(LimitReply::Outcome { outcome, mark: tick });
        let encoded = EncodedToll::new(&toll, 7, |_| "key".to_owned());
        encoded.undo(&toll, &reply, |key| format!("marker of {key}"), || Nonce::new(1))
    }

    #[test]
    fn charge_of_a_leased_bucket_is_undone_as_older() {
        let tick = 1_760_000_000_000_000;
        // The life of a lease of this bucket is a sixteenth of its fill time of a second.
        assert_eq!(undo(Consistency::Leased, tick), undo(Consistency::Exact, tick - 62_500));
        assert_ne!(undo(Consistency::Exact, tick), undo(Consistency::Exact, tick - 62_500));
    }
}
