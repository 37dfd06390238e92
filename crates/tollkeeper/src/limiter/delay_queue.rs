//! Delays requests that a leaky bucket has admitted for later, and lets them go in order.
//!
//! Each request has a departure time, in arrival order. Timers are no finer than a millisecond and fire in any
//! order. So a request whose timer has fired waits for all requests with an earlier departure from the same bucket.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::task::{Poll, Waker};

use tollkeeper_core::{Decision, Span, Time};

use crate::clock::Clock;
use crate::sync::{Mutex, lock};

/// The delayed requests, by bucket and in departure order.
#[derive(Debug, Default)]
pub(crate) struct Holds(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    positions: BTreeMap<Position, Option<Waker>>,
    /// Counts arrivals, so that no two requests have the same position.
    arrivals: u64,
}

/// The key of a bucket, the departure time, and a number that orders requests with the same departure time.
type Position = (Box<[u8]>, Time, u64);

impl Holds {
    /// Waits for the departure of an admitted request.
    pub(crate) async fn wait(&self, clock: &Clock, decision: &Decision, delay: Span) {
        // Wait in the queue of the bucket with the longest delay: by then the others have let the request go.
        let bucket = decision.limits().max_by_key(|answer| answer.outcome().delay);
        let key = bucket.expect("some bucket delays it").key().to_bytes();
        let seat = self.join(key.into(), decision.time() + delay);
        clock.sleep(delay).await;
        poll_fn(|context| seat.poll(context.waker())).await;
    }

    fn join(&self, key: Box<[u8]>, departure: Time) -> Seat<'_> {
        let mut waiting = lock(&self.0);
        waiting.arrivals += 1;
        let position = (key, departure, waiting.arrivals);
        waiting.positions.insert(position.clone(), None);
        Seat { holds: self, position }
    }
}

/// A position in the delay queue. Dropping it leaves the queue.
struct Seat<'h> {
    holds: &'h Holds,
    position: Position,
}

impl Seat<'_> {
    /// Ready when no request with an earlier departure from the same bucket is left.
    fn poll(&self, waker: &Waker) -> Poll<()> {
        let mut waiting = lock(&self.holds.0);
        let earliest = (self.position.0.clone(), Time::default(), 0);
        if waiting.positions.range(earliest..self.position.clone()).next().is_none() {
            return Poll::Ready(());
        }
        waiting.positions.insert(self.position.clone(), Some(waker.clone()));
        Poll::Pending
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let mut waiting = lock(&self.holds.0);
        waiting.positions.remove(&self.position);
        let next = waiting.positions.range_mut(self.position.clone()..).next();
        let waker =
            next.filter(|(position, _)| position.0 == self.position.0).and_then(|(_, waker)| waker.take());
        drop(waiting);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Timers may fire in any order, which must not change the order of departure.
    #[test]
    fn requests_leave_a_bucket_in_departure_order() {
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
            "requests with the same departure time keep their arrival order"
        );
        // A request that is dropped does not block the others.
        drop(beside);
        assert!(!ready(&third));
        drop(second);
        assert!(ready(&third));
        drop((third, other));
        assert!(lock(&holds.0).positions.is_empty());
    }
}
