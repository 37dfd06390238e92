//! An upgraded connection, such as a WebSocket: bytes are copied both ways until both sides have closed, or neither
//! has sent anything for too long.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, copy_bidirectional};
use tokio::time::{Instant, sleep_until};
use tollkeeper::Span;

use super::exchange::Exchange;

/// Both ends of a tunnel, before the 101 has been sent.
#[derive(Debug)]
pub struct Tunnel {
    /// The connection of the client.
    pub client: OnUpgrade,
    /// The connection to the upstream.
    pub upstream: OnUpgrade,
    /// How long no byte may pass in either direction.
    pub longest_pause: Duration,
    /// Counts the bytes.
    pub exchange: Arc<Exchange>,
}

impl Tunnel {
    /// Copies bytes until the tunnel ends; `held` is dropped then.
    pub async fn run<T>(self, held: T) {
        let (client, upstream) = match tokio::try_join!(self.client, self.upstream) {
            Ok(ends) => ends,
            Err(error) => return tracing::debug!("an upgrade failed: {error}"),
        };
        let began = Instant::now();
        let last = Arc::new(AtomicU64::new(0));
        let stream = TokioIo::new(client);
        let mut client = Watched { stream, began, last: Arc::clone(&last), exchange: self.exchange };
        let mut upstream = TokioIo::new(upstream);
        let silence = async {
            loop {
                let quiet_until = began + Duration::from_millis(last.load(Relaxed)) + self.longest_pause;
                if quiet_until <= Instant::now() {
                    return;
                }
                sleep_until(quiet_until).await;
            }
        };
        tokio::select! {
            copied = copy_bidirectional(&mut client, &mut upstream) => match copied {
                Ok((sent, received)) => tracing::debug!("a tunnel ended: {sent} bytes sent, {received} bytes received"),
                Err(error) => tracing::debug!("a tunnel failed: {error}"),
            },
            () = silence => {
                tracing::debug!("closed an idle tunnel: no byte for {}", Span::from(self.longest_pause));
            }
        }
        drop(held);
    }
}

/// The stream of the client. It counts the bytes of both directions, and notes when they pass.
struct Watched<S> {
    stream: S,
    began: Instant,
    /// In milliseconds since `began`.
    last: Arc<AtomicU64>,
    exchange: Arc<Exchange>,
}

impl<S> Watched<S> {
    fn note(&self) {
        let millis = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(millis, Relaxed);
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if read.is_ready() {
            self.note();
            self.exchange.uploaded(buffer.filled().len() - before);
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        if let Poll::Ready(written) = &written {
            self.note();
            self.exchange.downloaded(*written.as_ref().unwrap_or(&0));
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
