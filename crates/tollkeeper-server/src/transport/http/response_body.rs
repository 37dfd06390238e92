//! The body of a response: complete, or a stream of events.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::body::{Body, Bytes, Frame, SizeHint};

use crate::telemetry::events::Listening;

/// A response body.
#[derive(Debug)]
pub enum Reply {
    /// A complete body.
    Whole(Bytes),
    /// Server-sent events, one a second.
    Events(Listening),
}

impl Reply {
    /// The bytes of a complete body; empty for events.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Reply::Whole(body) => body,
            Reply::Events(_) => &[],
        }
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Reply::Whole(body) if body.is_empty() => Poll::Ready(None),
            Reply::Whole(body) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(body))))),
            Reply::Events(listening) => {
                listening.poll_next(context).map(|next| next.map(|text| Ok(Frame::data(text))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Reply::Whole(body) => body.is_empty(),
            Reply::Events(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Reply::Whole(body) => SizeHint::with_exact(body.len() as u64),
            Reply::Events(_) => SizeHint::default(),
        }
    }
}
