//! Unary gRPC calls: reads one message and writes one message.
//!
//! Hand-written, because calls about rate limits are small and frequent. tonic's streaming codec allocates buffers for
//! each call that are larger than its whole message, and boxes the body.

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

/// The largest message. It contains headers of the request that Envoy asks about, some of them several times. Envoy
/// accepts up to 60 KiB of headers by default, and admits a request if the call about it fails.
pub const MAX_MESSAGE: usize = 4 << 20;
/// How long a message may take to arrive.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes before a message: one flag for compression, four for its length.
const PREFIX: usize = 5;

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const OK: HeaderValue = HeaderValue::from_static("0");

/// Why a message was not read.
#[derive(Debug)]
pub enum ReadError {
    /// The memory budget is used up.
    Full,
    /// The call fails with this status.
    Invalid(Status),
}

impl From<Full> for ReadError {
    fn from(_: Full) -> ReadError {
        ReadError::Full
    }
}

impl From<Status> for ReadError {
    fn from(status: Status) -> ReadError {
        ReadError::Invalid(status)
    }
}

/// Reads the only message of a call. `Held` reserves memory for the call and its message.
pub async fn read(body: Incoming, budget: &Arc<Budget>) -> Result<(Bytes, Held), ReadError> {
    let timed_out = |_| Status::deadline_exceeded(format!("the message was not complete after {TIMEOUT:?}"));
    timeout(TIMEOUT, read_all(body, budget.call())).await.map_err(timed_out)?
}

async fn read_all(mut body: Incoming, mut held: Held) -> Result<(Bytes, Held), ReadError> {
    let mut received = Bytes::new();
    let mut more = BytesMut::new();
    loop {
        let frame = match body.frame().now_or_never() {
            Some(frame) => frame,
            None => {
                // Copy the first part: it would keep the whole buffer alive that it was read into.
                more.extend_from_slice(&std::mem::take(&mut received));
                held.set(CALL + more.capacity(), Stage::Arriving)?;
                body.frame().await
            }
        };
        let Some(frame) = frame else { break };
        let frame = frame.map_err(|error| Status::cancelled(format!("the call was cancelled: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if received.len() + more.len() + data.len() > PREFIX + MAX_MESSAGE {
            let message = format!("the message has more than {MAX_MESSAGE} bytes");
            return Err(Status::resource_exhausted(message).into());
        }
        // Nearly always a message arrives in one frame, and is not copied.
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
        return Err(Status::invalid_argument("the message is missing").into());
    }
    let compressed = received.get_u8();
    let length = received.get_u32();
    if compressed != 0 {
        let message = "compressed messages are not supported (leave out `grpc-encoding`)";
        return Err(Status::unimplemented(message).into());
    }
    if usize::try_from(length) != Ok(received.len()) {
        return Err(Status::invalid_argument("a call must have one message of the announced length").into());
    }
    Ok((received, held))
}

/// A successful response with this message.
pub fn respond(message: &impl Message) -> Response<MessageBody> {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX + length);
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(length).expect("a response is below 4 GiB"));
    message.encode(&mut bytes).expect("the buffer has the encoded length");
    let mut response = Response::new(MessageBody::Message(bytes.freeze()));
    response.headers_mut().insert(CONTENT_TYPE, GRPC);
    response
}

/// The body of a response: a message, then the trailer `grpc-status: 0`.
#[derive(Debug)]
pub enum MessageBody {
    /// Next comes the message.
    Message(Bytes),
    /// Next comes the trailer.
    Trailer,
    /// Everything was sent.
    End,
}

impl Body for MessageBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let (frame, next) = match std::mem::replace(&mut *self, MessageBody::End) {
            MessageBody::Message(bytes) => (Frame::data(bytes), MessageBody::Trailer),
            MessageBody::Trailer => {
                let mut trailers = HeaderMap::with_capacity(1);
                trailers.insert(GRPC_STATUS, OK);
                (Frame::trailers(trailers), MessageBody::End)
            }
            MessageBody::End => return Poll::Ready(None),
        };
        *self = next;
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, MessageBody::End)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
