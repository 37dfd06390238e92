//! The store behind the network: it runs each call when it arrives, on its own clock.

use tollkeeper::Correction;
use tollkeeper::store::{LeaseGrant, LeaseRequest};
use tollkeeper_core::{Charge, KeyCorrection, Reply, Slot, Time, Toll};

use crate::reference::Reference;

/// Where the states of the simulated store are.
pub trait Server {
    /// Decides a toll.
    fn decide(&mut self, toll: &Toll, now: Time, id: u64) -> Reply;
    /// Grants units in advance.
    fn lease(&mut self, request: &LeaseRequest, now: Time) -> LeaseGrant;
    /// Refunds or settles a charge.
    fn correct(&mut self, charge: &Charge, corrections: &[KeyCorrection], now: Time) -> Correction;
    /// Releases a slot, or renews it.
    fn handle(&mut self, slot: &Slot, renew: bool, now: Time) -> bool;
    /// Deletes the state of a key.
    fn forget(&mut self, key: &[u8]) -> bool;
    /// Deletes the states that have expired, and returns how many those were.
    fn expire(&mut self, now: Time) -> u64;
    /// Loses everything.
    fn flush(&mut self);
    /// A replica catches up.
    fn copy(&mut self);
    /// The replica takes over. If it has never caught up, it is empty.
    fn failover(&mut self);
}

/// The reference store, and its replica.
#[derive(Clone, Debug, Default)]
pub struct Simulated {
    /// The states.
    pub live: Reference,
    copy: Reference,
    /// How many microseconds a state stays after it equals a fresh one.
    stays: u64,
}

impl Simulated {
    /// An empty store whose states stay this much longer than they are needed.
    pub fn new(stays: u64) -> Simulated {
        Simulated { stays, ..Simulated::default() }
    }
}

impl Server for Simulated {
    fn decide(&mut self, toll: &Toll, now: Time, id: u64) -> Reply {
        self.live.decide(toll, now, id)
    }

    fn lease(&mut self, request: &LeaseRequest, now: Time) -> LeaseGrant {
        self.live.lease(request, now)
    }

    fn correct(&mut self, charge: &Charge, corrections: &[KeyCorrection], now: Time) -> Correction {
        self.live.correct(charge, corrections, now)
    }

    fn handle(&mut self, slot: &Slot, renew: bool, now: Time) -> bool {
        self.live.handle(slot, renew, now)
    }

    fn forget(&mut self, key: &[u8]) -> bool {
        self.live.forget(key)
    }

    fn expire(&mut self, now: Time) -> u64 {
        self.live.expire(Time::from_micros(now.as_micros() - self.stays))
    }

    fn flush(&mut self) {
        self.live = Reference::default();
    }

    fn copy(&mut self) {
        self.copy = self.live.clone();
    }

    fn failover(&mut self) {
        self.live = self.copy.clone();
    }
}
