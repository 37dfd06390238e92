//! Counts the requests in flight to an upstream against the limit in force and the share of each priority.

use tollkeeper::{Percent, Span, Time};

use super::step::{self, AdaptiveLimit, Bounds, Ending, Sample};

/// The slots of one upstream.
#[derive(Clone, Debug)]
pub struct Slots {
    limit: ConcurrencyLimit,
    /// The share of the limit that each priority may fill.
    shares: Vec<Percent>,
    in_flight: u32,
}

/// How many requests may be in flight.
#[derive(Clone, Debug)]
pub enum ConcurrencyLimit {
    /// Always this many.
    Fixed(u32),
    /// As many as the latency of the upstream allows.
    Adaptive(AdaptiveLimit),
}

/// A slot that a request has taken, for the report when the request ends.
#[derive(Clone, Copy, Debug)]
pub struct TakenSlot {
    began: Time,
    used: u32,
}

impl ConcurrencyLimit {
    /// An adaptive limit that starts now.
    pub fn adaptive(bounds: Bounds, now: Time, seed: u64) -> ConcurrencyLimit {
        ConcurrencyLimit::Adaptive(AdaptiveLimit::new(bounds, now, seed))
    }

    /// The limit, without the effect of a probe.
    pub fn limit(&self) -> u32 {
        match self {
            ConcurrencyLimit::Fixed(limit) => *limit,
            ConcurrencyLimit::Adaptive(limit) => limit.limit(),
        }
    }

    /// The limit in force: during a probe, less than [`ConcurrencyLimit::limit`].
    pub fn in_force(&self) -> u32 {
        match self {
            ConcurrencyLimit::Fixed(limit) => *limit,
            ConcurrencyLimit::Adaptive(limit) => limit.in_force(),
        }
    }

    /// The latency of the upstream without a queue, if the limit is adaptive and has measured it.
    pub fn floor(&self) -> Option<Span> {
        match self {
            ConcurrencyLimit::Fixed(_) => None,
            ConcurrencyLimit::Adaptive(limit) => limit.floor(),
        }
    }
}

impl Slots {
    /// Free slots under this limit, for priorities with these shares of it.
    pub fn new(limit: ConcurrencyLimit, shares: Vec<Percent>) -> Slots {
        Slots { limit, shares, in_flight: 0 }
    }

    /// Takes a slot for a request of the priority with this index, unless its share is in use.
    pub fn enter(&mut self, priority: usize, now: Time) -> Option<TakenSlot> {
        self.change(|state| step::advance(state, now));
        if self.in_flight >= self.share(priority, self.limit.in_force()) {
            return None;
        }
        self.in_flight += 1;
        // Of the limit without a probe: a probe that is filled does not show that the limit is.
        let limit = self.share(priority, self.limit.limit());
        let used = u64::from(self.in_flight) * 1_000 / u64::from(limit);
        Some(TakenSlot { began: now, used: u32::try_from(used).unwrap_or(u32::MAX) })
    }

    /// Reports how a request ended, which may move the limit. It keeps its slot until [`Slots::leave`].
    pub fn report(&mut self, slot: TakenSlot, latency: Span, ending: Ending, now: Time) {
        let sample = Sample { began: slot.began, latency, used: slot.used, ending };
        self.change(|state| step::step(state, &sample, now));
    }

    /// Frees a slot.
    pub fn leave(&mut self) {
        self.in_flight -= 1;
    }

    /// Replaces limit and shares; requests in flight keep their slots.
    pub fn replace(&mut self, limit: ConcurrencyLimit, shares: Vec<Percent>) {
        (self.limit, self.shares) = (limit, shares);
    }

    /// The limit.
    pub fn limit(&self) -> &ConcurrencyLimit {
        &self.limit
    }

    /// How many requests are in flight.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// The share of a limit that this priority may fill: rounded down, but one request at least.
    fn share(&self, priority: usize, limit: u32) -> u32 {
        let share = self.shares.get(priority).map_or(10_000, |share| share.basis_points());
        let share = u64::from(limit) * u64::from(share) / 10_000;
        u32::try_from(share).expect("at most the limit").max(1)
    }

    fn change(&mut self, change: impl FnOnce(AdaptiveLimit) -> AdaptiveLimit) {
        // An adaptive limit is moved out and back in, so that the step stays a function from values to values.
        self.limit = match std::mem::replace(&mut self.limit, ConcurrencyLimit::Fixed(0)) {
            ConcurrencyLimit::Adaptive(state) => ConcurrencyLimit::Adaptive(change(state)),
            fixed => fixed,
        };
    }
}
