//! The body of a response on its way to the client.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::concurrency::GatePermit;
use super::error::UpstreamError;
use super::exchange::Exchange;
use super::idle::IdleTimer;
use super::upstream::UpstreamCall;

/// The body of a response: streamed from the upstream, or one of the proxy itself.
#[derive(Debug)]
pub enum Download {
    /// From the upstream.
    Streamed(Box<Streamed>),
    /// From the proxy.
    Own(Full<Bytes>),
}

/// A body that the upstream is sending. Its end returns the connection to the pool; if it is dropped before, or makes no
/// progress for too long, the connection is closed.
#[derive(Debug)]
pub struct Streamed {
    body: Incoming,
    idle: IdleTimer,
    /// `None` once the response has ended.
    completion: Option<Completion>,
}

/// What the end of a response releases.
#[derive(Debug)]
pub struct Completion {
    /// The connection to the upstream.
    pub call: UpstreamCall,
    /// The request: a connection whose upload has not ended cannot be used again.
    pub exchange: Arc<Exchange>,
    /// How long the connection may be idle.
    pub keep: Duration,
    /// The slot of the concurrency gate.
    pub permit: GatePermit,
}

impl Completion {
    fn complete(self) {
        if self.exchange.has_upload_ended() {
            self.call.keep_for(self.keep);
        }
    }
}

impl Download {
    /// A body of the upstream that may pause for at most `longest_pause`.
    pub fn streamed(body: Incoming, longest_pause: Duration, completion: Completion) -> Download {
        let mut streamed =
            Streamed { body, idle: IdleTimer::new(longest_pause), completion: Some(completion) };
        streamed.end_if_complete();
        Download::Streamed(Box::new(streamed))
    }

    /// A body of the proxy.
    pub fn own(body: Bytes) -> Download {
        Download::Own(Full::new(body))
    }
}

impl Streamed {
    fn end_if_complete(&mut self) {
        if self.body.is_end_stream() {
            self.end();
        }
    }

    fn end(&mut self) {
        if let Some(completion) = self.completion.take() {
            completion.complete();
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, UpstreamError>>> {
        match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                self.idle.progress();
                // hyper does not ask for the end of a body whose length it knows.
                self.end_if_complete();
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => {
                tracing::debug!("the response of the upstream ended early: {error}");
                self.failed()
            }
            Poll::Ready(None) => {
                self.end();
                Poll::Ready(None)
            }
            Poll::Pending => {
                std::task::ready!(self.idle.poll_expired(context));
                tracing::debug!("the response of the upstream made no progress for too long");
                self.failed()
            }
        }
    }

    /// Cuts the response: the head has been sent, so an error cannot be reported in another way.
    fn failed(&mut self) -> Poll<Option<Result<Frame<Bytes>, UpstreamError>>> {
        if let Some(completion) = self.completion.take() {
            completion.call.address().counters().failed(UpstreamError::Body);
            completion.exchange.failed(UpstreamError::Body);
        }
        Poll::Ready(Some(Err(UpstreamError::Body)))
    }
}

impl Body for Download {
    type Data = Bytes;
    type Error = UpstreamError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UpstreamError>>> {
        match &mut *self {
            Download::Streamed(streamed) => streamed.poll(context),
            Download::Own(body) => Pin::new(body).poll_frame(context).map_err(|never| match never {}),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Download::Streamed(streamed) => streamed.body.is_end_stream(),
            Download::Own(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Download::Streamed(streamed) => streamed.body.size_hint(),
            Download::Own(body) => body.size_hint(),
        }
    }
}
