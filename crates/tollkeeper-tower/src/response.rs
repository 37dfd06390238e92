//! The body of a response: the handler's, or bytes in memory, as of a refusal. Releases the request's slots at its end.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::slot::HeldSlot;

pin_project! {
    /// The body of a response: the handler's, or bytes in memory: of a refusal, or of a response that requests share.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        body: Inner<B>,
        // Released when the end of the body has been read, or when the body is dropped.
        held: Option<HeldSlot>,
    }
}

pin_project! {
    #[project = InnerProjected]
    #[derive(Debug)]
    enum Inner<B> {
        Handler { #[pin] body: B },
        InMemory { body: Option<Bytes> },
    }
}

impl<B> ResponseBody<B> {
    /// The body of a handler's response, and the slots that its request holds.
    pub(crate) fn theirs(body: B, held: Option<HeldSlot>) -> ResponseBody<B> {
        ResponseBody { body: Inner::Handler { body }, held }
    }

    /// A body in memory.
    pub(crate) fn ours(body: Bytes) -> ResponseBody<B> {
        let body = Some(body).filter(|body| !body.is_empty());
        ResponseBody { body: Inner::InMemory { body }, held: None }
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
            InnerProjected::Handler { body } => body.poll_frame(context),
            InnerProjected::InMemory { body } => Poll::Ready(body.take().map(|body| Ok(Frame::data(body)))),
        };
        if let Poll::Ready(None | Some(Err(_))) = frame {
            this.held.take();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        match &self.body {
            Inner::Handler { body } => body.is_end_stream(),
            Inner::InMemory { body } => body.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.body {
            Inner::Handler { body } => body.size_hint(),
            Inner::InMemory { body } => {
                let len = body.as_ref().map_or(0, Bytes::len);
                SizeHint::with_exact(u64::try_from(len).expect("usize fits into u64"))
            }
        }
    }
}
