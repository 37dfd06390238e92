//! A timer that fires when a stream has made no progress for a given time.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// Fires when a stream has made no progress for a given time. Progress only moves the deadline. The underlying timer is
/// set once and moved when it fires early, because moving a timer costs more than reading the clock.
#[derive(Debug)]
pub struct IdleTimer {
    limit: Duration,
    deadline: Option<Instant>,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl IdleTimer {
    /// A timer that starts when it is first polled.
    pub fn new(limit: Duration) -> IdleTimer {
        IdleTimer { limit, deadline: None, sleep: None }
    }

    /// Starts the time again at the next poll.
    pub fn progress(&mut self) {
        self.deadline = None;
    }

    /// Starts the time again at the next poll, with another limit.
    pub fn restart(&mut self, limit: Duration) {
        self.limit = limit;
        self.deadline = None;
    }

    /// Ready when there was no progress for the time limit. Poll it whenever the stream is pending.
    pub fn poll_expired(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let limit = self.limit;
        let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + limit);
        let sleep = self.sleep.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        // A limit that became shorter must not wait for the old deadline.
        if sleep.deadline() > deadline {
            sleep.as_mut().reset(deadline);
        }
        loop {
            std::task::ready!(sleep.as_mut().poll(context));
            if sleep.deadline() >= deadline {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(deadline);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn timer_fires_only_without_progress() {
        let mut timer = IdleTimer::new(LIMIT);
        let began = Instant::now();
        for _ in 0..5 {
            let expired = tokio::time::timeout(LIMIT / 2, poll_fn(|context| timer.poll_expired(context)));
            assert!(expired.await.is_err(), "half of the time has passed");
            timer.progress();
        }
        poll_fn(|context| timer.poll_expired(context)).await;
        assert_eq!(began.elapsed().as_secs(), 35);
        timer.restart(LIMIT / 10);
        poll_fn(|context| timer.poll_expired(context)).await;
        assert_eq!(began.elapsed().as_secs(), 36);
    }
}
