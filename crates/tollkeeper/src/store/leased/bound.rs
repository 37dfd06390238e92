//! The denial bound of a key: the last state that the store showed, from which a refusal follows without asking it.
//!
//! Other nodes can only have taken more since, so a cost that does not fit into that state at the latest time that the
//! store's clock can show is refused by the store, too. The bound never admits. Refunds on other nodes, resets and
//! raised limits can make it wrong, so a state is used for [`RECHECK`] only. Then the next request goes to the store, and
//! the others are refused for [`GRACE`] longer, until it is answered.

use crate::store::LeaseGrant;
use tollkeeper_core::algorithm::{
    self, Effect, State, Step, StoredState, fixed_window, meter, sliding_window,
};
use tollkeeper_core::{Algorithm, Due, LimitReply, Outcome, Retry, Span, Time};

/// How long a state is used before the next request is sent to the store.
const RECHECK: Span = Span::from_millis(100);
/// How much longer it is used while the store is being asked.
const GRACE: Span = Span::from_millis(50);

/// The current time on this node's clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub(super) now: Time,
    /// States that were seen by tolls sent before this are no longer valid, whatever their key.
    pub(super) valid_from: Time,
    /// What the store's clock shows, as far as this node knows.
    pub(super) store: Time,
}

/// What this node knows about the state of a key.
#[derive(Debug, Default)]
pub(super) struct Bound {
    last: Option<Sighting>,
    /// Units of tolls that were sent after `last` was received and are not answered yet: they count as taken. Whether
    /// `last` includes an earlier toll is not known, so that one does not count.
    in_flight: u64,
    /// How many sightings there were, so that a toll knows whether `in_flight` still includes it.
    sightings: u64,
    /// How many tolls with this key are not answered yet.
    unanswered: u32,
    /// A toll that was sent before this saw a state that is no longer valid.
    valid_from: Time,
}

/// The state of a key, and when it was seen.
#[derive(Clone, Debug)]
pub(super) struct Sighting {
    state: SeenState,
    /// On the store's clock.
    time: Time,
    /// When the toll that saw it was sent: the store read its clock no earlier than this.
    sent: Time,
    /// When its reply arrived: the store read its clock no later than this.
    received: Time,
}

#[derive(Clone, Debug)]
enum SeenState {
    /// The state of a bucket, and the count that it had drained by. The store keeps the state as it was last written, and
    /// a larger count drains that faster, also for the time before.
    Meter(meter::State, u64),
    FixedWindow(fixed_window::State),
    SlidingWindow(sliding_window::State),
    /// Boxed, because it is large and rare.
    Log(Box<SeenLog>),
}

/// What a reply shows of a sliding log, whose timestamps are not sent.
#[derive(Clone, Copy, Debug)]
struct SeenLog {
    /// The count of the quota that the numbers belong to.
    count: u64,
    remaining: u64,
    /// When `remaining` grows by one.
    next: Time,
    /// When the log is empty.
    fresh: Time,
    /// A cost that was refused, and when it would pass.
    refused: Option<(u64, Time)>,
}

/// A toll on its way to the store, as far as one key is concerned.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ticket {
    cost: u64,
    sightings: u64,
}

/// The quota and cost that a state belongs to, without the rest of the due.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AskedDue {
    is_log: bool,
    count: u64,
    cost: u64,
}

impl AskedDue {
    pub(super) fn of(due: &Due<'_>) -> AskedDue {
        let is_log = due.quota.algorithm() == Algorithm::SlidingLog;
        AskedDue { is_log, count: due.quota.count(), cost: due.cost }
    }
}

impl Bound {
    /// Whether the store certainly refuses this due.
    pub(super) fn refuses(&self, due: &Due<'_>, at: Moment) -> bool {
        self.usable(at).is_some_and(|last| last.refuses(due, last.latest(at.now), self.in_flight))
    }

    /// The numbers of this due; `None` if they are not known.
    ///
    /// Those of a refusal are of the earliest time that the store's clock can show, so that a retry is not too short:
    /// what is refused at the latest time is refused at the earliest.
    pub(super) fn outcome(&self, due: &Due<'_>, at: Moment) -> Option<Outcome> {
        let last = self.usable(at)?;
        let latest = last.latest(at.now);
        let refuses = last.refuses(due, latest, self.in_flight);
        last.decide(due, if refuses { last.earliest(at.now) } else { latest }, self.in_flight)
    }

    /// The last state, however old it is, and the earliest time that the store's clock can show: the numbers of this due
    /// can be computed from both. `None` if no state was seen, or if the numbers cannot be computed from it.
    #[inline]
    pub(super) fn last_state(&self, due: &Due<'_>, at: Moment) -> Option<(StoredState<'static>, Time)> {
        let last = self.last.as_ref()?;
        let time = last.earliest(at.now);
        Some((last.stored(due, time, self.in_flight)?, time))
    }

    /// The last sighting, unless it is time to ask the store again.
    fn usable(&self, at: Moment) -> Option<&Sighting> {
        self.last.as_ref().filter(|last| {
            let age = at.now.since(last.sent);
            let is_asked = self.unanswered > 0 && age.as_micros() < RECHECK.as_micros() + GRACE.as_micros();
            last.sent >= at.valid_from && (age < RECHECK || is_asked)
        })
    }

    /// A toll that charges this cost is sent.
    pub(super) fn send(&mut self, cost: u64) -> Ticket {
        self.unanswered += 1;
        self.in_flight = self.in_flight.saturating_add(cost);
        Ticket { cost, sightings: self.sightings }
    }

    /// A toll was answered, or its caller is gone: it is no longer in flight.
    pub(super) fn land(&mut self, ticket: Ticket) {
        // A key that was forgotten meanwhile starts from zero.
        self.unanswered = self.unanswered.saturating_sub(1);
        if ticket.sightings == self.sightings {
            self.in_flight = self.in_flight.saturating_sub(ticket.cost);
        }
    }

    /// Replaces the last sighting, unless this one is older.
    pub(super) fn see(&mut self, seen: Sighting) {
        let is_newer = |last: &Sighting| seen.time >= last.time || seen.sent >= last.received;
        if seen.sent >= self.valid_from && self.last.as_ref().is_none_or(is_newer) {
            self.last = Some(seen);
            self.in_flight = 0;
            self.sightings += 1;
        }
    }

    /// Forgets the state, also the states that tolls in flight will have seen: it was changed otherwise than by tolls.
    pub(super) fn void(&mut self, now: Time) {
        self.last = None;
        self.valid_from = now;
    }
}

impl Sighting {
    /// The state after a decision; `None` if the reply does not show it.
    pub(super) fn of(
        asked: AskedDue,
        reply: &LimitReply,
        time: Time,
        sent: Time,
        received: Time,
    ) -> Option<Sighting> {
        let (step, charged, time) = match reply {
            LimitReply::Step { step, charged } => (step, *charged, time),
            LimitReply::StepAt { step, charged, now } => (step, *charged, *now),
            LimitReply::Outcome { outcome, .. } if asked.is_log => {
                let state = SeenState::Log(Box::new(SeenLog::of(asked, outcome, time)?));
                return Some(Sighting { state, time, sent, received });
            }
            _ => return None,
        };
        let state = match step.effect {
            Effect::Meter(step) => {
                SeenState::Meter(if charged { step.after } else { step.before }, asked.count)
            }
            Effect::FixedWindow(step) => {
                SeenState::FixedWindow(if charged { step.after } else { step.before })
            }
            Effect::SlidingWindow(step) => {
                SeenState::SlidingWindow(if charged { step.after } else { step.before })
            }
            _ => return None,
        };
        Some(Sighting { state, time, sent, received })
    }

    /// The state after a lease.
    pub(super) fn of_lease(
        due: &Due<'_>,
        grant: &LeaseGrant,
        sent: Time,
        received: Time,
    ) -> Option<Sighting> {
        let state = grant.state.as_ref()?;
        // Ahead of the clock, which was set back: a lease that grants nothing leaves it there, and the next toll moves it.
        if due.step(state.stored(), grant.time).effect.moved() {
            return None;
        }
        let state = match state {
            State::Meter(state) => SeenState::Meter(*state, due.quota.count()),
            State::FixedWindow(state) => SeenState::FixedWindow(*state),
            State::SlidingWindow(state) => SeenState::SlidingWindow(*state),
            State::SlidingLog(_) | State::Concurrency(_) => return None,
        };
        Some(Sighting { state, time: grant.time, sent, received })
    }

    /// The latest time that the store's clock can show: it runs at most a thousandth faster than this node's.
    fn latest(&self, now: Time) -> Time {
        let elapsed = now.since(self.sent).as_micros();
        self.time + Span::from_micros(elapsed + elapsed.div_ceil(1_000))
    }

    /// The earliest time that the store's clock can show, if it runs as fast as this node's.
    fn earliest(&self, now: Time) -> Time {
        self.time + now.since(self.received)
    }

    /// Whether a due is refused at this time on the store's clock, with `taken` more units charged; `false` if the state
    /// does not tell.
    fn refuses(&self, due: &Due<'_>, time: Time, taken: u64) -> bool {
        match &self.state {
            SeenState::Log(log) => log.decide(due, time, taken).is_some_and(|outcome| !outcome.allowed),
            _ => self.step(due, time, taken).is_some_and(|step| !step.allowed),
        }
    }

    /// The numbers of a due at this time on the store's clock, with `taken` more units charged. `None` if the state does
    /// not tell.
    fn decide(&self, due: &Due<'_>, time: Time, taken: u64) -> Option<Outcome> {
        match &self.state {
            SeenState::Log(log) => log.decide(due, time, taken),
            _ => Some(due.outcome(StoredState::Nothing, time, &self.step(due, time, taken)?, false)),
        }
    }

    fn step(&self, due: &Due<'_>, time: Time, taken: u64) -> Option<Step> {
        let seen = self.stored(due, time, taken)?;
        Some(due.step(seen, time))
    }

    /// The state, with `taken` more units charged at this time; `None` if the due cannot be decided from it: that of a
    /// log, or of a bucket whose count was raised.
    #[inline]
    fn stored(&self, due: &Due<'_>, time: Time, taken: u64) -> Option<StoredState<'static>> {
        let seen = match &self.state {
            _ if due.quota.count() == 0 => return None,
            SeenState::Meter(_, count) if due.quota.count() > *count => return None,
            SeenState::Meter(state, _) => StoredState::Meter(*state),
            SeenState::FixedWindow(state) => StoredState::FixedWindow(*state),
            SeenState::SlidingWindow(state) => StoredState::SlidingWindow(*state),
            SeenState::Log(_) => return None,
        };
        if taken == 0 {
            return Some(seen);
        }
        match algorithm::add(due.quota, seen.to_state(), time, due.shift, taken) {
            State::Meter(state) => Some(StoredState::Meter(state)),
            State::FixedWindow(state) => Some(StoredState::FixedWindow(state)),
            State::SlidingWindow(state) => Some(StoredState::SlidingWindow(state)),
            State::SlidingLog(_) | State::Concurrency(_) => None,
        }
    }
}

impl SeenLog {
    fn of(asked: AskedDue, outcome: &Outcome, time: Time) -> Option<SeenLog> {
        let refused = match outcome.retry {
            Some(Retry::After(span)) => Some((asked.cost, time + span)),
            Some(Retry::Never) | None => None,
        };
        Some(SeenLog {
            count: asked.count,
            remaining: outcome.remaining,
            next: time + outcome.next_after?,
            fresh: time + outcome.reset_after?,
            refused,
        })
    }

    fn decide(&self, due: &Due<'_>, time: Time, taken: u64) -> Option<Outcome> {
        if due.quota.count() != self.count || self.count == 0 {
            return None;
        }
        let cost = due.cost;
        let remaining = self.remaining.saturating_sub(taken);
        // A larger cost passes no earlier than the one that was refused.
        let refused = self.refused.filter(|(refused, passes)| cost >= *refused && time < *passes);
        let retry = match refused {
            _ if cost > due.quota.limit() => Some(Retry::Never),
            Some((_, passes)) => Some(Retry::After(passes.since(time))),
            None if cost > remaining && time < self.next => Some(Retry::After(self.next.since(time))),
            // After `next` it is not known how many units are free.
            None if time >= self.next => return None,
            None => None,
        };
        Some(Outcome {
            allowed: retry.is_none(),
            limit: due.quota.limit(),
            remaining,
            retry,
            reset_after: Some(self.fresh.since(time)),
            next_after: Some(self.next.since(time)),
            ..Outcome::default()
        })
    }
}
