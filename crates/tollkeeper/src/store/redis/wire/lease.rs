//! Encodes requests for units in advance, which share script calls with tolls.
//!
//! ```text
//! lease   key 2, quota 2, shape 1 (64, and 16 if other tolls of the batch use this key too), want 4, shift 7, raise 7
//! ```
//!
//! The script returns the state as it was read, and which leases got nothing: what the others got is computed from the
//! state, as for tolls. Inside the process the answer is a [`Reply`], like that of a toll.

use tollkeeper_core::algorithm::{self, Effect, State, Step, fixed_window, meter, sliding_window};
use tollkeeper_core::{Due, LimitReply, Reply, Time};

use super::{EncodedDue, EncodedToll, push};
use crate::store::{LeaseGrant, LeaseRequest};

/// How many units to grant, on which level.
#[derive(Clone, Copy, Debug)]
pub(in crate::store::redis) struct LeaseTerms {
    want: u64,
    raise: u64,
}

impl EncodedToll {
    /// Copies what the call and its reply need from a request for units in advance. `name` gives key names.
    pub fn lease(request: &LeaseRequest, name: impl Fn(&Due<'_>) -> String) -> EncodedToll {
        let want = request.want.min(u64::from(u32::MAX));
        let terms = LeaseTerms { want, raise: request.lease.raise };
        EncodedToll { lease: Some(terms), charging: true, ..EncodedToll::new(&request.toll, 0, name) }
    }
}

impl LeaseTerms {
    /// Appends a lease. Its key and its quota are numbered from 1.
    pub(super) fn push(&self, body: &mut Vec<u8>, [key, quota]: [usize; 2], shift: u64, shared: bool) {
        push(body, 2, key as u64);
        push(body, 2, quota as u64);
        push(body, 1, 64 + if shared { 16 } else { 0 });
        push(body, 4, self.want);
        push(body, 7, shift);
        push(body, 7, self.raise);
    }

    /// Grants again, on the state as it was read.
    pub(in crate::store::redis) fn replay(
        &self,
        due: &EncodedDue,
        state: Option<State>,
        now: Time,
    ) -> Option<(u64, State)> {
        algorithm::lease(&due.quota, state, now, due.request.shift, self.want, self.raise)
    }
}

/// A grant as a reply: its ID is the number of units, and its only step ends in the state.
pub(in crate::store::redis) fn reply(now: Time, units: u64, state: Option<&State>) -> Reply {
    let (allowed, moved) = (units > 0, false);
    let effect = match state {
        Some(State::Meter(state)) => {
            Effect::Meter(meter::Step { allowed, moved, before: *state, after: *state })
        }
        Some(State::FixedWindow(state)) => {
            Effect::FixedWindow(fixed_window::Step { allowed, moved, before: *state, after: *state })
        }
        Some(State::SlidingWindow(state)) => {
            Effect::SlidingWindow(sliding_window::Step { allowed, moved, before: *state, after: *state })
        }
        _ => Effect::None,
    };
    let mut reply = Reply::new(now, units);
    reply.push(LimitReply::Step { step: Step { allowed, effect }, charged: allowed });
    reply
}

/// The grant in such a reply.
pub fn granted(reply: &Reply) -> LeaseGrant {
    let state = match reply.limits() {
        [LimitReply::Step { step, .. }] => match step.effect {
            Effect::Meter(step) => Some(State::Meter(step.after)),
            Effect::FixedWindow(step) => Some(State::FixedWindow(step.after)),
            Effect::SlidingWindow(step) => Some(State::SlidingWindow(step.after)),
            _ => None,
        },
        _ => None,
    };
    LeaseGrant { units: reply.id(), state, time: reply.time() }
}
