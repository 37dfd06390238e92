//! One message in, one message out.
//!
//! Written here because a call about a rate limit is small and there are many of them: what serves streams of messages
//! keeps larger buffers for each call than all of its message, and boxes what could be a value.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use futures_util::FutureExt as _;
use http_body_util::BodyExt as _;
use hyper::Response;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use prost::Message;
use tokio::time::timeout;
use tonic::Status;

use super::budget::{Budget, CALL, Full, Held, Stage};

/// The largest message that is read. Headers of the request that Envoy asks about are in it, some of them several
/// times; by default it takes up to 60 KiB of them, and what is not read here is let pass there.
pub const MAX_MESSAGE: usize = 4 << 20;
/// How long it may take to send a message.
const PATIENCE: Duration = Duration::from_secs(10);
/// Whether the message is compressed, and its length.
const PREFIX: usize = 5;

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const OK: HeaderValue = HeaderValue::from_static("0");

/// Why a message was not read.
#[derive(Debug)]
pub enum Unread {
    /// There is no room for it.
    Full,
    /// It is not what it should be.
    Wrong(Status),
}

impl From<Full> for Unread {
    fn from(_: Full) -> Unread {
        Unread::Full
    }
}

impl From<Status> for Unread {
    fn from(status: Status) -> Unread {
        Unread::Wrong(status)
    }
}

/// Reads the only message of a call, and holds room for both.
pub async fn read(body: Incoming, budget: &Arc<Budget>) -> Result<(Bytes, Held), Unread> {
    let late = |_| Status::deadline_exceeded(format!("the message was not complete after {PATIENCE:?}"));
    timeout(PATIENCE, read_all(body, budget.call())).await.map_err(late)?
}

async fn read_all(mut body: Incoming, mut held: Held) -> Result<(Bytes, Held), Unread> {
    let mut received = Bytes::new();
    let mut more = BytesMut::new();
    loop {
        let frame = match body.frame().now_or_never() {
            Some(frame) => frame,
            None => {
                // A piece of a message would keep all of the buffer that it was read into.
                more.extend_from_slice(&std::mem::take(&mut received));
                held.set(CALL + more.capacity(), Stage::Arriving)?;
                body.frame().await
            }
        };
        let Some(frame) = frame else { break };
        let frame = frame.map_err(|error| Status::cancelled(format!("the call was given up: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if received.len() + more.len() + data.len() > PREFIX + MAX_MESSAGE {
            let message = format!("a message has at most {MAX_MESSAGE} bytes");
            return Err(Status::resource_exhausted(message).into());
        }
        // Nearly always it comes in one piece, and stays where it is.
        if received.is_empty() && more.is_empty() {
            received = data;
        } else {
            more.extend_from_slice(&std::mem::take(&mut received));
            more.extend_from_slice(&data);
        }
    }
    let mut received = if more.is_empty() { received } else { more.freeze() };
    held.set(CALL + received.len(), Stage::Arrived)?;
    if received.len() < PREFIX {
        return Err(Status::invalid_argument("there is no message").into());
    }
    let compressed = received.get_u8();
    let length = received.get_u32();
    if compressed != 0 {
        let message = "messages are not compressed here (leave out `grpc-encoding`)";
        return Err(Status::unimplemented(message).into());
    }
    if usize::try_from(length) != Ok(received.len()) {
        return Err(Status::invalid_argument("a call has one message, as long as it says").into());
    }
    Ok((received, held))
}

/// An answer that is this message.
pub fn answer(message: &impl Message) -> Response<Answer> {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX + length);
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(length).expect("an answer is small"));
    message.encode(&mut bytes).expect("there is room for it");
    let mut response = Response::new(Answer::Message(bytes.freeze()));
    response.headers_mut().insert(CONTENT_TYPE, GRPC);
    response
}

/// The body of an answer: a message, and behind it that all is well.
#[derive(Debug)]
pub enum Answer {
    /// Both are still to be sent.
    Message(Bytes),
    /// The message was sent.
    Status,
    /// All was sent.
    Nothing,
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let (frame, next) = match std::mem::replace(&mut *self, Answer::Nothing) {
            Answer::Message(bytes) => (Frame::data(bytes), Answer::Status),
            Answer::Status => {
                let mut trailers = HeaderMap::with_capacity(1);
                trailers.insert(GRPC_STATUS, OK);
                (Frame::trailers(trailers), Answer::Nothing)
            }
            Answer::Nothing => return Poll::Ready(None),
        };
        *self = next;
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Answer::Nothing)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
