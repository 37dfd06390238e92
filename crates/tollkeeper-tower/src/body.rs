//! Buffers the start of a body and replays it unchanged: of a request, so that facts can be read from it, or of a response
//! that several requests share.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::time::timeout;

/// The largest body, in bytes, that facts are read from.
pub const MOST: usize = 64 << 10;
/// How many bytes of a too large body [`RequestBody::drain`] discards at most, and for how long.
const DRAIN_BYTES: usize = 4 << 20;
const DRAIN_TIME: Duration = Duration::from_secs(2);

pin_project! {
    /// A body: the frames that have been buffered, then the rest of the stream.
    #[derive(Debug)]
    pub struct RequestBody<B: Body> {
        buffered: VecDeque<Result<Frame<B::Data>, B::Error>>,
        #[pin]
        rest: B,
    }
}

/// The result of buffering a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BufferedBody {
    /// The complete body.
    All(Vec<u8>),
    /// The body is too large: for facts, more than [`MOST`] bytes.
    TooLarge,
    /// The body stream failed before its end.
    Broken,
    /// The body was not sent to this process: a gateway that asks for a decision forwards only the head.
    NotForwarded,
}

impl<B: Body<Data = Bytes> + Unpin> RequestBody<B> {
    /// Reads the complete body, unless it is too large, and buffers it for the next reader.
    pub async fn buffer(&mut self) -> BufferedBody {
        self.buffer_up_to(MOST).await
    }

    /// Like [`RequestBody::buffer`], for a body of at most this many bytes. Dropping the future loses no frame.
    pub(crate) async fn buffer_up_to(&mut self, most: usize) -> BufferedBody {
        if self.rest.size_hint().lower() > u64::try_from(most).unwrap_or(u64::MAX) {
            return BufferedBody::TooLarge;
        }
        let mut all = Vec::new();
        loop {
            match poll_fn(|context| Pin::new(&mut self.rest).poll_frame(context)).await {
                None => return BufferedBody::All(all),
                Some(Ok(frame)) => {
                    let data = frame.data_ref().map_or(&[][..], |data| data);
                    let fits = all.len() + data.len() <= most;
                    all.extend_from_slice(if fits { data } else { &[] });
                    self.buffered.push_back(Ok(frame));
                    if !fits {
                        return BufferedBody::TooLarge;
                    }
                }
                Some(Err(error)) => {
                    self.buffered.push_back(Err(error));
                    return BufferedBody::Broken;
                }
            }
        }
    }

    /// Reads and discards the rest of the body, at most 4 MiB and for at most 2 s. Otherwise the server would close the
    /// connection with unread data, which resets it, and a client that is still sending could not read the response.
    pub async fn drain(&mut self) {
        self.buffered.clear();
        let drained = async {
            let mut left = DRAIN_BYTES;
            while left > 0 {
                match poll_fn(|context| Pin::new(&mut self.rest).poll_frame(context)).await {
                    Some(Ok(frame)) => left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len)),
                    None | Some(Err(_)) => return,
                }
            }
        };
        let _ = timeout(DRAIN_TIME, drained).await;
    }

    /// Whether trailers have been buffered.
    pub(crate) fn has_trailers(&self) -> bool {
        self.buffered.iter().any(|frame| frame.as_ref().is_ok_and(Frame::is_trailers))
    }

    /// Whether no frame has been read yet.
    pub fn is_untouched(&self) -> bool {
        self.buffered.is_empty()
    }
}

impl<B: Body> From<B> for RequestBody<B> {
    /// Wraps a body without reading from it.
    fn from(body: B) -> RequestBody<B> {
        RequestBody { buffered: VecDeque::new(), rest: body }
    }
}

impl<B: Body<Data = Bytes>> Body for RequestBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let body = self.project();
        match body.buffered.pop_front() {
            Some(frame) => Poll::Ready(Some(frame)),
            None => body.rest.poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.buffered.is_empty() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let buffered = self.buffered.iter().filter_map(|frame| frame.as_ref().ok()?.data_ref());
        let buffered: u64 = buffered.map(|data| u64::try_from(data.len()).unwrap_or(u64::MAX)).sum();
        let rest = self.rest.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower().saturating_add(buffered));
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper.saturating_add(buffered));
        }
        hint
    }
}
