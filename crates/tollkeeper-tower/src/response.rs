//! The body of an answer: the handler's, or one of our own.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::slot::HeldSlot;

pin_project! {
    /// The body of an answer.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        body: Whose<B>,
        // Given back when the last of the body is read, or when it is dropped.
        held: Option<HeldSlot>,
    }
}

pin_project! {
    #[project = WhoseProjected]
    #[derive(Debug)]
    enum Whose<B> {
        Theirs { #[pin] body: B },
        Ours { body: Option<Bytes> },
    }
}

impl<B> ResponseBody<B> {
    pub(crate) fn theirs(body: B, held: Option<HeldSlot>) -> ResponseBody<B> {
        ResponseBody { body: Whose::Theirs { body }, held }
    }

    pub(crate) fn ours(body: Bytes) -> ResponseBody<B> {
        let body = Some(body).filter(|body| !body.is_empty());
        ResponseBody { body: Whose::Ours { body }, held: None }
    }
}

impl<B: Body<Data = Bytes>> Body for ResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.project();
        let frame = match this.body.project() {
            WhoseProjected::Theirs { body } => body.poll_frame(context),
            WhoseProjected::Ours { body } => Poll::Ready(body.take().map(|body| Ok(Frame::data(body)))),
        };
        if let Poll::Ready(None | Some(Err(_))) = frame {
            this.held.take();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        match &self.body {
            Whose::Theirs { body } => body.is_end_stream(),
            Whose::Ours { body } => body.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.body {
            Whose::Theirs { body } => body.size_hint(),
            Whose::Ours { body } => {
                let len = body.as_ref().map_or(0, Bytes::len);
                SizeHint::with_exact(u64::try_from(len).expect("fits"))
            }
        }
    }
}
