//! The connection of a client, with its timeouts: one for idle connections, one for slow heads, one for clients that do
//! not read.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::JoinHandle;
use tollkeeper::config::ProxySettings;

use super::counters::Counters;
use super::idle::IdleTimer;
use crate::transport::connection_budget::{Busy, User};
use crate::transport::listener::Stream;

/// After the last response, what the client is still sending is read and discarded for this long, and up to this size.
/// Closing a socket with unread input resets the connection, and the client could not read the response.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 4 << 20;
/// The first bytes of every HTTP/2 connection.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// What all requests of a connection share.
#[derive(Debug)]
pub struct ClientConnection {
    /// The client's address: from the PROXY protocol if that is used, otherwise of the socket.
    pub peer: SocketAddr,
    /// Whether it uses TLS.
    pub tls: bool,
    user: User,
    counters: Arc<Counters>,
    /// Requests in flight, tunnels included.
    in_flight: AtomicU64,
    /// How many requests have begun.
    pub requests: AtomicU64,
    /// Whether the last response was sent before the request had arrived completely.
    pub lingers: AtomicBool,
    tunnel: Mutex<Option<JoinHandle<()>>>,
}

impl ClientConnection {
    /// A connection without a request.
    pub fn new(peer: SocketAddr, tls: bool, user: User, counters: Arc<Counters>) -> ClientConnection {
        ClientConnection {
            peer,
            tls,
            user,
            counters,
            in_flight: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            lingers: AtomicBool::new(false),
            tunnel: Mutex::default(),
        }
    }

    /// Notes that a request, or a tunnel, is in flight until the guard is dropped.
    pub fn begin(self: &Arc<ClientConnection>) -> RequestInFlight {
        if self.in_flight.fetch_add(1, Relaxed) == 0 {
            self.counters.client_active.fetch_add(1, Relaxed);
        }
        RequestInFlight { client: Arc::clone(self), _busy: self.user.busy() }
    }

    /// Whether a request is in flight.
    pub fn is_busy(&self) -> bool {
        self.user.is_busy()
    }

    /// Hands the connection over to a tunnel.
    pub fn set_tunnel(&self, tunnel: JoinHandle<()>) {
        *self.tunnel.lock().unwrap_or_else(PoisonError::into_inner) = Some(tunnel);
    }

    /// Keeps something until the tunnel has ended, if the connection was handed over to one.
    pub fn keep_for_tunnel(&self, kept: impl Send + 'static) {
        if let Some(tunnel) = self.take_tunnel() {
            self.set_tunnel(tokio::spawn(async move {
                let _ = tunnel.await;
                drop(kept);
            }));
        }
    }

    /// The tunnel that the connection was handed over to.
    pub fn take_tunnel(&self) -> Option<JoinHandle<()>> {
        self.tunnel.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A request that is in flight. A connection with one is active, and is not closed to make room for another.
#[derive(Debug)]
pub struct RequestInFlight {
    client: Arc<ClientConnection>,
    _busy: Busy,
}

impl Drop for RequestInFlight {
    fn drop(&mut self) {
        if self.client.in_flight.fetch_sub(1, Relaxed) == 1 {
            self.client.counters.client_active.fetch_sub(1, Relaxed);
        }
    }
}

/// The stream of a client's connection. Reading fails when the client is too slow, and so does writing.
#[derive(Debug)]
pub struct ClientStream<S> {
    stream: S,
    connection: Arc<ClientConnection>,
    reading: IdleTimer,
    writing: IdleTimer,
    timeouts: Timeouts,
    waits_for: Waits,
    /// How many bytes of the HTTP/2 preface the connection has begun with; `None` once it has begun with something else.
    preface: Option<usize>,
    /// How many requests had begun when `waits_for` was set.
    requests: u64,
    /// What is still discarded before the connection is closed.
    linger: Option<(IdleTimer, usize)>,
}

#[derive(Clone, Copy, Debug)]
struct Timeouts {
    idle: Duration,
    head: Duration,
    body: Duration,
}

/// What the client has to send next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waits {
    /// The first byte of a request.
    Request,
    /// The rest of a head.
    RestOfHead,
    /// Any frame of an HTTP/2 connection.
    Frame,
}

impl<S: Stream> ClientStream<S> {
    /// A stream with the timeouts of these settings.
    pub fn new(stream: S, connection: Arc<ClientConnection>, settings: &ProxySettings) -> ClientStream<S> {
        let timeouts = Timeouts {
            idle: settings.idle_timeout,
            head: settings.header_timeout,
            body: settings.body_idle_timeout,
        };
        ClientStream {
            stream,
            connection,
            reading: IdleTimer::new(timeouts.idle),
            writing: IdleTimer::new(timeouts.body),
            timeouts,
            waits_for: Waits::Request,
            preface: Some(0),
            requests: 0,
            linger: None,
        }
    }

    /// Whether the client has to send something. A body has a timeout of its own, and while a response is awaited or
    /// sent, the client may be silent.
    fn is_awaited(&mut self) -> bool {
        let requests = self.connection.requests.load(Relaxed);
        if requests != self.requests {
            self.requests = requests;
            if self.waits_for == Waits::RestOfHead {
                self.waits_for = Waits::Request;
            }
            self.reading.restart(self.timeouts.idle);
        }
        let is_busy = self.connection.is_busy();
        if is_busy {
            self.reading.progress();
        }
        !is_busy
    }

    /// Whether the HTTP/2 preface is complete with these bytes. It may arrive in pieces.
    fn ends_preface(&mut self, bytes: &[u8]) -> bool {
        let Some(known) = self.preface else { return false };
        let rest = &HTTP2_PREFACE[known..];
        let common = rest.len().min(bytes.len());
        let matches = rest[..common] == bytes[..common];
        self.preface = Some(known + common).filter(|known| matches && *known < HTTP2_PREFACE.len());
        matches && common == rest.len()
    }

    /// Notes that bytes have arrived.
    fn received(&mut self, bytes: &[u8]) {
        let is_preface = self.ends_preface(bytes);
        if !self.is_awaited() {
            return;
        }
        match self.waits_for {
            _ if is_preface => {
                self.waits_for = Waits::Frame;
                self.reading.restart(self.timeouts.idle);
            }
            Waits::Frame => self.reading.progress(),
            Waits::RestOfHead => {}
            Waits::Request => {
                self.waits_for = Waits::RestOfHead;
                self.reading.restart(self.timeouts.head);
            }
        }
    }

    /// Fails when a client that has to send something has not done so in time.
    fn poll_too_slow(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.is_awaited() {
            return Poll::Pending;
        }
        ready!(self.reading.poll_expired(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client sent no request in time")))
    }

    fn poll_written<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.writing.progress();
            return written;
        }
        ready!(self.writing.poll_expired(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read its response")))
    }

    /// Reads and discards input until the client closes its side, within bounds.
    fn poll_linger(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let (timer, left) = self.linger.get_or_insert_with(|| (IdleTimer::new(LINGER), LINGER_BYTES));
        loop {
            let mut discarded = [0; 4 << 10];
            let mut buffer = ReadBuf::new(&mut discarded);
            match Pin::new(&mut self.stream).poll_read(context, &mut buffer) {
                Poll::Pending => return timer.poll_expired(context),
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() && *left > buffer.filled().len() => {
                    *left -= buffer.filled().len();
                }
                Poll::Ready(_) => return Poll::Ready(()),
            }
        }
    }
}

impl<S: Stream> AsyncRead for ClientStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        match Pin::new(&mut self.stream).poll_read(context, buffer) {
            Poll::Ready(Ok(())) => {
                self.received(&buffer.filled()[before..]);
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => self.poll_too_slow(context),
        }
    }
}

impl<S: Stream> AsyncWrite for ClientStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.poll_written(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.poll_written(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.poll_written(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_shutdown(context))?;
        if self.connection.lingers.load(Relaxed) {
            ready!(self.poll_linger(context));
        }
        Poll::Ready(Ok(()))
    }
}
