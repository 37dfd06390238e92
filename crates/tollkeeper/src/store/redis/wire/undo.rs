//! How a toll is undone that was admitted in vain: another part of it was refused, in another slot of the cluster.

use tollkeeper_core::{Algorithm, Change, Quota, Rate, Reply, Span};

use super::{Call, Correcting, EncodedToll, Handling, Nonce, push_correction};
use crate::store::redis::script;

/// How long it may take until it is undone; what comes later is void, and its marker is needed no longer. A call
/// is on its way for a second at most, and is sent on a few times.
const UNDONE: Span = Span::from_secs(5);

impl EncodedToll {
    /// The calls that give back what this toll was charged.
    pub(crate) fn undo(
        &self,
        ruling: &Reply,
        marker: impl Fn(&str) -> String,
        nonce: impl Fn() -> Nonce,
    ) -> Vec<Call> {
        let (mut corrected, mut released) = (Vec::new(), Vec::new());
        let mut argument = super::correction_until(ruling.time() + UNDONE);
        for (due, said) in self.dues.iter().zip(ruling.limits()) {
            let Some(name) = due.name.as_ref().filter(|_| said.allowed() && due.cost > 0) else { continue };
            if due.quota.algorithm() == Algorithm::Concurrency {
                released.push(name.clone());
                continue;
            }
            corrected.extend([name.clone(), marker(name)]);
            let (cost, count, tick) = (due.cost, due.quota.count(), said.mark());
            let quota = as_bucket(&due.quota);
            let correcting = Correcting { shift: due.ask.shift, cost, count, tick };
            push_correction(&mut argument, &quota, &correcting, Change::GiveBack(cost));
        }
        let correct = Call::new(script::correct(), nonce(), corrected, &argument);
        let release = super::handling(nonce(), self.id, Handling::Release, released);
        [correct, release].into_iter().filter(|call| !call.keys.is_empty()).collect()
    }
}

/// A queue that is left before anybody saw it gives back as a bucket does.
fn as_bucket(quota: &Quota) -> Quota {
    if quota.algorithm() != Algorithm::LeakyBucket {
        return *quota;
    }
    let rate = Rate { count: quota.count(), period: quota.period(), burst: Some(quota.burst()) };
    Quota::new(Algorithm::TokenBucket, rate).expect("the bounds of both are the same")
}
