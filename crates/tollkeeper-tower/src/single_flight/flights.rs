//! The flights in progress: each has a leader, and followers that wait for the leader's response.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::sharing::CompleteResponse;

/// At most this many flights are in progress at once; further requests make their own calls.
const MAX_FLIGHTS: usize = 10_000;
/// At most this many followers wait for one leader; further requests make their own calls.
const MAX_FOLLOWERS: usize = 1_000;

/// The digest of a flight key.
type FlightDigest = [u8; 32];
/// The response of a leader, once it is complete.
type SharedBody = Option<Arc<CompleteResponse>>;

/// The flights in progress, by key.
#[derive(Debug, Default)]
pub(super) struct Flights {
    by_key: Mutex<HashMap<FlightDigest, Arc<watch::Sender<SharedBody>>>>,
    counters: Arc<Counters>,
}

#[derive(Debug, Default)]
struct Counters {
    led: AtomicU64,
    shared: AtomicU64,
    released: AtomicU64,
    overflowed: AtomicU64,
    waiting: AtomicU64,
}

/// What happened to the requests that a rule applied to, since the layer was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FlightCounts {
    /// Requests that led a flight.
    pub led: u64,
    /// Requests that got the response of their leader.
    pub shared: u64,
    /// Requests that waited for a leader and then made their own call: the leader failed, its client disconnected, or its
    /// response could not be shared.
    pub released: u64,
    /// Requests that made their own call at once: there were too many flights, or too many followers.
    pub overflowed: u64,
    /// Requests that wait for a leader now.
    pub waiting: u64,
}

/// The part of a request in a flight.
pub(super) enum Role {
    Leader(Leader),
    Follower(Follower),
    /// It makes its own call.
    Alone,
}

impl Flights {
    /// No flights, but the counts of earlier ones.
    pub(super) fn continuing(earlier: &Flights) -> Flights {
        Flights { by_key: Mutex::default(), counters: Arc::clone(&earlier.counters) }
    }

    /// Joins the flight with this key, or starts it.
    pub(super) fn join(self: &Arc<Flights>, key: FlightDigest) -> Role {
        let mut by_key = self.lock();
        let is_full = by_key.len() >= MAX_FLIGHTS;
        match by_key.entry(key) {
            Entry::Occupied(flight) if flight.get().receiver_count() < MAX_FOLLOWERS => {
                self.counters.waiting.fetch_add(1, Ordering::Relaxed);
                Role::Follower(Follower { flights: Arc::clone(self), response: flight.get().subscribe() })
            }
            Entry::Vacant(place) if !is_full => {
                let response = Arc::clone(place.insert(Arc::new(watch::Sender::new(None))));
                self.counters.led.fetch_add(1, Ordering::Relaxed);
                Role::Leader(Leader { flights: Arc::clone(self), key, response })
            }
            _ => {
                self.counters.overflowed.fetch_add(1, Ordering::Relaxed);
                Role::Alone
            }
        }
    }

    pub(super) fn counts(&self) -> FlightCounts {
        let Counters { led, shared, released, overflowed, waiting } = &*self.counters;
        let [led, shared, released, overflowed, waiting] =
            [led, shared, released, overflowed, waiting].map(|counter| counter.load(Ordering::Relaxed));
        FlightCounts { led, shared, released, overflowed, waiting }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<FlightDigest, Arc<watch::Sender<SharedBody>>>> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The request whose response the others of its flight wait for. Dropping it ends the flight: followers that have no
/// response then are released.
pub(super) struct Leader {
    flights: Arc<Flights>,
    key: FlightDigest,
    response: Arc<watch::Sender<SharedBody>>,
}

impl Leader {
    /// Gives the followers their response, and ends the flight.
    pub(super) fn land(self, response: CompleteResponse) {
        self.response.send_replace(Some(Arc::new(response)));
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        // Now `self.response` is the last sender, and dropping it wakes the followers.
        self.flights.lock().remove(&self.key);
    }
}

/// A request that waits for the response of its leader.
pub(super) struct Follower {
    flights: Arc<Flights>,
    response: watch::Receiver<SharedBody>,
}

impl Follower {
    /// The response of the leader; `None` if the flight ended without one.
    pub(super) async fn response(mut self) -> SharedBody {
        let landed = self.response.wait_for(Option::is_some).await.ok().and_then(|landed| (*landed).clone());
        let counter =
            if landed.is_some() { &self.flights.counters.shared } else { &self.flights.counters.released };
        counter.fetch_add(1, Ordering::Relaxed);
        landed
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.flights.counters.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: usize) -> FlightDigest {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&number.to_le_bytes());
        key
    }

    #[test]
    fn at_most_10_000_flights_are_in_progress() {
        let flights = Arc::new(Flights::default());
        let mut roles: Vec<Role> = (0..MAX_FLIGHTS).map(|number| flights.join(key(number))).collect();
        assert!(roles.iter().all(|role| matches!(role, Role::Leader(_))));
        assert!(matches!(flights.join(key(MAX_FLIGHTS)), Role::Alone));
        assert!(matches!(flights.join(key(0)), Role::Follower(_)), "a flight that exists can be joined");
        roles.pop();
        assert!(matches!(flights.join(key(MAX_FLIGHTS)), Role::Leader(_)));
        assert_eq!(flights.counts().overflowed, 1);
    }

    #[test]
    fn at_most_1_000_followers_wait_for_a_leader() {
        let flights = Arc::new(Flights::default());
        let leader = flights.join(key(0));
        let mut followers: Vec<Role> = (0..MAX_FOLLOWERS).map(|_| flights.join(key(0))).collect();
        assert!(followers.iter().all(|role| matches!(role, Role::Follower(_))));
        assert!(matches!(flights.join(key(0)), Role::Alone));
        followers.pop();
        assert!(matches!(flights.join(key(0)), Role::Follower(_)), "a follower that leaves frees its place");
        drop((leader, followers));
        let counts = flights.counts();
        assert_eq!((counts.led, counts.overflowed, counts.waiting), (1, 1, 0));
        assert!(flights.lock().is_empty());
    }
}
