//! Resets the HTTP/2 streams of clients that do not take their response.
//!
//! hyper asks for a part of a body only when the client's flow-control window has room for it. A client that never opens
//! the window blocks no write, so neither the body nor the connection notices, and the request would keep its slots for
//! as long as the client likes.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::rt::Executor;

use super::idle::IdleTimer;

tokio::task_local! {
    static RESPONSE: Arc<ResponseProgress>;
}

/// How far the client of an HTTP/2 stream has taken its response.
#[derive(Debug, Default)]
pub struct ResponseProgress {
    /// How often a part of the body was asked for.
    parts: AtomicU64,
    /// Whether the client has to make room for the next part.
    awaits_client: AtomicBool,
}

impl ResponseProgress {
    /// The progress of the stream whose request is being handled; `None` over HTTP/1, where a blocked write shows a slow
    /// client.
    pub fn current() -> Option<Arc<ResponseProgress>> {
        RESPONSE.try_with(Arc::clone).ok()
    }

    /// Notes that the client has to make room for the next part of the body.
    pub fn await_client(&self) {
        self.parts.fetch_add(1, Relaxed);
        self.awaits_client.store(true, Relaxed);
    }

    /// Notes that the client has made room: the next part has not arrived from the upstream yet, or the body has ended.
    pub fn await_body(&self) {
        self.awaits_client.store(false, Relaxed);
    }
}

/// Runs the streams of HTTP/2 connections. A stream ends early, which resets it, if its client takes nothing of the
/// response for too long.
#[derive(Clone, Copy, Debug)]
pub struct StreamExecutor {
    /// How long a client may take nothing.
    pub longest_pause: Duration,
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for StreamExecutor {
    fn execute(&self, stream: F) {
        tokio::spawn(WatchedStream {
            stream: Box::pin(stream),
            progress: Arc::default(),
            parts: 0,
            idle: IdleTimer::new(self.longest_pause),
        });
    }
}

struct WatchedStream<F> {
    stream: Pin<Box<F>>,
    progress: Arc<ResponseProgress>,
    /// How many parts had been asked for when this was last polled.
    parts: u64,
    idle: IdleTimer,
}

impl<F: Future<Output = ()>> Future for WatchedStream<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let ended = RESPONSE.sync_scope(Arc::clone(&this.progress), || this.stream.as_mut().poll(context));
        if ended.is_ready() {
            return Poll::Ready(());
        }
        let parts = this.progress.parts.load(Relaxed);
        let awaits_client = this.progress.awaits_client.load(Relaxed);
        if parts != this.parts || !awaits_client {
            this.parts = parts;
            this.idle.progress();
        }
        if !awaits_client {
            return Poll::Pending;
        }
        ready!(this.idle.poll_expired(context));
        tracing::debug!("reset a stream: the client does not take its response");
        Poll::Ready(())
    }
}
