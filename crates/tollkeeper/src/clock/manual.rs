//! A clock that only moves when it is set, so that tests do not sleep.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use tollkeeper_core::{Span, Time};

use crate::sync::{Mutex, lock};

/// A clock that only moves when it is set, forward or back. Clones share one time.
///
/// ```
/// use tollkeeper::{Clock, ManualClock, Span, Time};
///
/// let hand = ManualClock::new(Time::from_micros(1_000));
/// let clock = Clock::manual(&hand);
/// hand.advance(Span::from_micros(500));
/// assert_eq!(clock.now(), Time::from_micros(1_500));
/// ```
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<Mutex<Dial>>);

#[derive(Debug)]
struct Dial {
    now: Time,
    sleepers: Vec<(Time, Waker)>,
}

impl ManualClock {
    /// A clock that shows `now`.
    pub fn new(now: Time) -> ManualClock {
        ManualClock(Arc::new(Mutex::new(Dial { now, sleepers: Vec::new() })))
    }

    /// The time it shows.
    pub fn now(&self) -> Time {
        lock(&self.0).now
    }

    /// Moves it forward by `span`.
    pub fn advance(&self, span: Span) {
        let now = self.now();
        self.set(now + span);
    }

    /// Sets it, forward or back, and wakes sleepers whose time has come.
    pub fn set(&self, now: Time) {
        let mut dial = lock(&self.0);
        dial.now = now;
        let (due, waiting) =
            std::mem::take(&mut dial.sleepers).into_iter().partition(|(until, _)| *until <= now);
        dial.sleepers = waiting;
        drop(dial);
        let due: Vec<(Time, Waker)> = due;
        due.into_iter().for_each(|(_, waker)| waker.wake());
    }

    /// When the next sleeper wakes, so that a test can advance the clock to it; `None` if there are no sleepers.
    pub fn next_wake(&self) -> Option<Time> {
        lock(&self.0).sleepers.iter().map(|(until, _)| *until).min()
    }

    pub(super) fn poll_until(&self, until: Time, context: &mut Context<'_>) -> Poll<()> {
        let mut dial = lock(&self.0);
        if dial.now >= until {
            return Poll::Ready(());
        }
        // Replace the waker of an earlier poll. Another sleep of the same task has another end time.
        dial.sleepers.retain(|(other, waker)| *other != until || !waker.will_wake(context.waker()));
        dial.sleepers.push((until, context.waker().clone()));
        Poll::Pending
    }
}
