//! Looking into the body of a request before it goes on, and passing it on as it came.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::time::timeout;

/// The most bytes of a body that are looked at.
pub const MOST: usize = 64 << 10;
/// How many bytes of a body that is too large are discarded, and for how long.
const DRAIN_BYTES: usize = 4 << 20;
const DRAIN_TIME: Duration = Duration::from_secs(2);

pin_project! {
    /// The body of a request: what was read of it to find facts, and the rest.
    #[derive(Debug)]
    pub struct RequestBody<B: Body> {
        read: VecDeque<Result<Frame<B::Data>, B::Error>>,
        #[pin]
        rest: B,
    }
}

/// What a look into a body has shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Look {
    /// All of it.
    All(Vec<u8>),
    /// That it has more than [`MOST`] bytes.
    TooLarge,
    /// That it cannot be read to its end.
    Broken,
    /// That it went elsewhere: who is asked about a request need not see its body.
    Elsewhere,
}

impl<B: Body<Data = Bytes> + Unpin> RequestBody<B> {
    /// Reads all of the body, unless it is too large; what was read is passed on by whoever reads it next.
    pub async fn look(&mut self) -> Look {
        let most = u64::try_from(MOST).expect("64 KiB");
        if self.rest.size_hint().lower() > most {
            return Look::TooLarge;
        }
        let mut all = Vec::new();
        loop {
            match poll_fn(|context| Pin::new(&mut self.rest).poll_frame(context)).await {
                None => return Look::All(all),
                Some(Ok(frame)) => {
                    let data = frame.data_ref().map_or(&[][..], |data| data);
                    let fits = all.len() + data.len() <= MOST;
                    all.extend_from_slice(if fits { data } else { &[] });
                    self.read.push_back(Ok(frame));
                    if !fits {
                        return Look::TooLarge;
                    }
                }
                Some(Err(error)) => {
                    self.read.push_back(Err(error));
                    return Look::Broken;
                }
            }
        }
    }

    /// Reads and discards the rest of the body. A server closes a connection with an unread body, which resets it, and
    /// a client that is still sending could not read the answer.
    pub async fn drain(&mut self) {
        self.read.clear();
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

    /// Whether nothing was read yet.
    pub fn is_untouched(&self) -> bool {
        self.read.is_empty()
    }
}

impl<B: Body> From<B> for RequestBody<B> {
    /// A body that nobody has looked at.
    fn from(body: B) -> RequestBody<B> {
        RequestBody { read: VecDeque::new(), rest: body }
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
        match body.read.pop_front() {
            Some(frame) => Poll::Ready(Some(frame)),
            None => body.rest.poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_empty() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let read = self.read.iter().filter_map(|frame| frame.as_ref().ok()?.data_ref());
        let read: u64 = read.map(|data| u64::try_from(data.len()).unwrap_or(u64::MAX)).sum();
        let rest = self.rest.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower().saturating_add(read));
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper.saturating_add(read));
        }
        hint
    }
}
