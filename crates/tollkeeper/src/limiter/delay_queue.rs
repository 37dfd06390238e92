//! Requests that a leaky bucket has admitted for later.
//!
//! Each has a time of departure, in the order of coming. Timers are no finer than a millisecond and wake
//! in any order, so whoever wakes looks whether somebody with an earlier departure from the same bucket
//! is still there, and lets him go first.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::task::{Poll, Waker};

use tollkeeper_core::{Decision, Span, Time};

use crate::clock::Clock;
use crate::sync::{Mutex, lock};

/// Who is held, by bucket and in the order of departure.
#[derive(Debug, Default)]
pub(crate) struct Holds(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    places: BTreeMap<Place, Option<Waker>>,
    /// Counts those who came, so that no two have the same place.
    came: u64,
}

/// The key of a bucket, when to leave it, and a number for those who leave together.
type Place = (Box<[u8]>, Time, u64);

impl Holds {
    /// Waits for the departure of an admitted request.
    pub(crate) async fn wait(&self, clock: &Clock, decision: &Decision, delay: Span) {
        // Of several buckets the one that holds longest: the others have let it go by then.
        let bucket = decision.limits().max_by_key(|answer| answer.outcome().delay);
        let key = bucket.expect("some bucket delays it").key().to_bytes();
        let seat = self.join(key.into(), decision.time() + delay);
        clock.sleep(delay).await;
        poll_fn(|context| seat.poll(context.waker())).await;
    }

    fn join(&self, key: Box<[u8]>, departure: Time) -> Seat<'_> {
        let mut waiting = lock(&self.0);
        waiting.came += 1;
        let place = (key, departure, waiting.came);
        waiting.places.insert(place.clone(), None);
        Seat { holds: self, place }
    }
}

/// A place among those who are held; dropping it leaves.
struct Seat<'h> {
    holds: &'h Holds,
    place: Place,
}

impl Seat<'_> {
    /// Ready when nobody is left who departs earlier from the same bucket.
    fn poll(&self, waker: &Waker) -> Poll<()> {
        let mut waiting = lock(&self.holds.0);
        let earliest = (self.place.0.clone(), Time::default(), 0);
        if waiting.places.range(earliest..self.place.clone()).next().is_none() {
            return Poll::Ready(());
        }
        waiting.places.insert(self.place.clone(), Some(waker.clone()));
        Poll::Pending
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let mut waiting = lock(&self.holds.0);
        waiting.places.remove(&self.place);
        let next = waiting.places.range_mut(self.place.clone()..).next();
        let waker = next.filter(|(place, _)| place.0 == self.place.0).and_then(|(_, waker)| waker.take());
        drop(waiting);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Timers may wake in any order: who is woken first is not for that the first to go.
    #[test]
    fn nobody_overtakes_who_departs_earlier_from_the_same_bucket() {
        let holds = Holds::default();
        let join = |key: &[u8], at| holds.join(key.into(), Time::from_micros(at));
        let ready = |seat: &Seat<'_>| seat.poll(Waker::noop()).is_ready();
        let (third, first, second) = (join(b"a", 30), join(b"a", 10), join(b"a", 20));
        let (beside, other) = (join(b"a", 20), join(b"b", 40));
        assert!(ready(&first) && ready(&other));
        assert!(!ready(&second) && !ready(&beside) && !ready(&third));
        drop(first);
        assert!(
            ready(&second) && !ready(&beside) && !ready(&third),
            "those who leave together keep their order"
        );
        // Who goes away holds nobody up.
        drop(beside);
        assert!(!ready(&third));
        drop(second);
        assert!(ready(&third));
        drop((third, other));
        assert!(lock(&holds.0).places.is_empty());
    }
}
