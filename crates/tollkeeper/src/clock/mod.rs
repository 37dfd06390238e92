//! The system clock, and a manual clock for tests.
//!
//! A store decides by its own clock: the memory store has one of these, a Redis store uses the server's.

mod boot;
mod manual;

use std::future::Future;
#[cfg(feature = "redis")]
use std::future::poll_fn;
use std::pin::Pin;
#[cfg(feature = "redis")]
use std::pin::pin;
use std::task::{Context, Poll};
use std::time::{SystemTime, UNIX_EPOCH};

use tollkeeper_core::{Span, Time};

pub use manual::ManualClock;

/// Tells the time, and waits for it to pass.
#[derive(Clone, Debug)]
pub struct Clock(TimeSource);

#[derive(Clone, Debug)]
enum TimeSource {
    /// The boot clock, and the microseconds from its zero to the Unix epoch's.
    System(u64),
    Manual(ManualClock),
}

impl Clock {
    /// The wall clock at the start, plus the time since then on the boot clock, which cannot be set and goes on while
    /// the machine is suspended. So windows are aligned to UTC, and corrections of the wall clock do not move them.
    pub fn system() -> Clock {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Clock(TimeSource::System(Span::from(wall).as_micros().saturating_sub(boot::micros())))
    }

    /// A clock that shows the time of a [`ManualClock`].
    pub fn manual(clock: &ManualClock) -> Clock {
        Clock(TimeSource::Manual(clock.clone()))
    }

    /// The current time.
    #[inline]
    pub fn now(&self) -> Time {
        match &self.0 {
            TimeSource::System(offset) => Time::from_micros(boot::micros() + offset),
            TimeSource::Manual(clock) => clock.now(),
        }
    }

    /// Waits for `span`. On the system clock this needs a tokio runtime.
    pub fn sleep(&self, span: Span) -> Sleep {
        match &self.0 {
            TimeSource::System(_) => Sleep(Wait::System(Box::pin(tokio::time::sleep(span.into())))),
            TimeSource::Manual(clock) => Sleep(Wait::Manual(clock.clone(), clock.now() + span)),
        }
    }

    /// Runs `future` for at most `span`; `None` if it takes longer. On the system clock this needs a tokio runtime.
    #[cfg(feature = "redis")]
    pub(crate) async fn timeout<F: Future>(&self, span: Span, future: F) -> Option<F::Output> {
        let TimeSource::Manual(_) = self.0 else {
            return tokio::time::timeout(span.into(), future).await.ok();
        };
        let (mut future, mut sleep) = (pin!(future), self.sleep(span));
        poll_fn(|context| match future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending => Pin::new(&mut sleep).poll(context).map(|()| None),
        })
        .await
    }

    /// Whether it shows the time of a [`ManualClock`], so that waiting on it needs no runtime.
    #[cfg(feature = "redis")]
    pub(crate) fn is_manual(&self) -> bool {
        matches!(self.0, TimeSource::Manual(_))
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
