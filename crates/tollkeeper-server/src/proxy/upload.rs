//! The body of a request on its way through the limits to the upstream.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tollkeeper_tower::RequestBody;

use super::exchange::{Exchange, UploadFailure};
use super::idle::IdleTimer;

/// An [`Upload`] of which the limits may have read a part.
pub type LimitedUpload = RequestBody<Upload>;

/// The body of a request. It fails if the client sends nothing for too long, and notes how far it has come.
#[derive(Debug)]
pub struct Upload {
    body: Incoming,
    idle: IdleTimer,
    exchange: Arc<Exchange>,
}

/// The body could not be read. The connection to the upstream is closed, so that the upstream does not mistake a part of
/// the body for all of it.
#[derive(Clone, Copy)]
pub struct BrokenUpload;

impl fmt::Display for BrokenUpload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the body of the client could not be read to its end")
    }
}

/// As [`Display`](fmt::Display).
impl fmt::Debug for BrokenUpload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for BrokenUpload {}

impl Upload {
    /// A body that may pause for at most `longest_pause`. How far it has come is noted in the exchange.
    pub fn new(body: Incoming, longest_pause: Duration, exchange: Arc<Exchange>) -> Upload {
        Upload { body, idle: IdleTimer::new(longest_pause), exchange }
    }

    fn failed(&self, why: UploadFailure) -> Poll<Option<Result<Frame<Bytes>, BrokenUpload>>> {
        self.exchange.upload_failed(why);
        Poll::Ready(Some(Err(BrokenUpload)))
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = BrokenUpload;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BrokenUpload>>> {
        let frame = match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => frame,
            Poll::Ready(Some(Err(_))) => return self.failed(UploadFailure::Broken),
            Poll::Ready(None) => {
                self.exchange.upload_ended();
                return Poll::Ready(None);
            }
            Poll::Pending => {
                self.exchange.await_upload();
                return match self.idle.poll_expired(context) {
                    Poll::Ready(()) => self.failed(UploadFailure::Stalled),
                    Poll::Pending => Poll::Pending,
                };
            }
        };
        self.idle.progress();
        self.exchange.uploaded(frame.data_ref().map_or(0, Bytes::len));
        if self.body.is_end_stream() {
            self.exchange.upload_ended();
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
