//! Clocks: the one that runs, and the one that tests turn by hand.
//!
//! Whoever keeps the state decides by its own clock, so the memory store holds one.

mod boot;
mod manual;

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{SystemTime, UNIX_EPOCH};

use tollkeeper_core::{Span, Time};

pub use manual::ManualClock;

/// Tells the time, and waits for it to pass.
#[derive(Clone, Debug)]
pub struct Clock(Kind);

#[derive(Clone, Debug)]
enum Kind {
    /// The boot clock, and what it must be set forward by to be the wall clock.
    System(u64),
    Manual(ManualClock),
}

impl Clock {
    /// Wall time at the start, and what has passed since on a clock that nobody sets and that goes on
    /// while the machine is suspended: so windows are aligned to UTC, and no correction of the wall
    /// clock moves them.
    pub fn system() -> Clock {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Clock(Kind::System(Span::from(wall).as_micros().saturating_sub(boot::micros())))
    }

    /// A clock that stands until it is turned.
    pub fn manual(clock: &ManualClock) -> Clock {
        Clock(Kind::Manual(clock.clone()))
    }

    /// The time.
    #[inline]
    pub fn now(&self) -> Time {
        match &self.0 {
            Kind::System(offset) => Time::from_micros(boot::micros() + offset),
            Kind::Manual(clock) => clock.now(),
        }
    }

    /// Waits until so much time has passed. On the system clock this needs a tokio runtime.
    pub fn sleep(&self, span: Span) -> Sleep {
        match &self.0 {
            Kind::System(_) => Sleep(Wait::System(Box::pin(tokio::time::sleep(span.into())))),
            Kind::Manual(clock) => Sleep(Wait::Manual(clock.clone(), clock.now() + span)),
        }
    }
}

/// A wait on a [`Clock`].
#[derive(Debug)]
pub struct Sleep(Wait);

#[derive(Debug)]
enum Wait {
    System(Pin<Box<tokio::time::Sleep>>),
    Manual(ManualClock, Time),
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        match &mut self.0 {
            Wait::System(sleep) => sleep.as_mut().poll(context),
            Wait::Manual(clock, until) => clock.poll_until(*until, context),
        }
    }
}
