//! Serves one HTTP connection: its requests in order, until either side closes it.
//!
//! As long as a client sends only plain checks ([`fast_path`]), they are served here, and all that arrived together are
//! answered with one write. The first request of another form hands the connection to hyper for the rest of its life.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use hyper::Request;
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::time::{self, Sleep, sleep, timeout, timeout_at};

use crate::service::Service;
use crate::transport::connection_budget::{self, Seat, Transport, User};
use crate::transport::http::fast_path::{self, Parsed};
use crate::transport::http::response_body::Reply;
use crate::transport::http::{self, RequestContext, Via, request_body};
use crate::transport::listener::{Protocol, Stream};

/// How long a connection may be without a complete request head: idle, or still sending one.
const IDLE_TIMEOUT: Duration = Duration::from_secs(75);
/// The largest request head.
const BUFFER: usize = 16 << 10;
/// After a refused body, what the client is still sending is read and discarded for this long, and up to the size of the
/// largest accepted body.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = http::MAX_LIMITS_BODY;
/// Read buffer of the fast path: fits a typical check.
const TYPICAL_REQUEST: usize = 2 << 10;

/// The HTTP protocol of a listener.
#[derive(Clone, Debug)]
pub struct Http {
    service: Arc<Service>,
    /// Whether the listener is bound to a loopback address.
    loopback: bool,
}

impl Http {
    /// Serves the HTTP API of this service.
    pub fn new(service: Arc<Service>, loopback: bool) -> Http {
        Http { service, loopback }
    }
}

impl Protocol for Http {
    const TRANSPORT: Transport = Transport::Http;

    async fn serve(self, stream: impl Stream, peer: SocketAddr, seat: Seat) {
        serve(stream, Via { peer, loopback: self.loopback }, self.service, seat).await;
    }
}

/// Serves one connection until either side closes it.
async fn serve(mut stream: impl Stream, via: Via, service: Arc<Service>, seat: Seat) {
    let activity = Activity::new(seat.user());
    let mut watch = Watch { timer: pin!(sleep(IDLE_TIMEOUT)), seat, stopping: false };
    let mut buffer = Vec::new();

    let handover = {
        let mut checks = pin!(serve_checks(&mut stream, via, &mut buffer, &service, &activity));
        loop {
            tokio::select! {
                biased;
                handover = checks.as_mut() => break handover,
                end = watch.end(&activity.active) => match end {
                    End::Idle => return,
                    End::MakeRoom if activity.reading.load(Relaxed) => return,
                    // `read_buf` is cancel safe: no bytes are lost.
                    End::Stop if activity.reading.load(Relaxed) => break Ok(FastPathEnd::OtherRequest),
                    End::Stop | End::MakeRoom => activity.stop.store(true, Relaxed),
                },
            }
        }
    };
    match handover {
        Ok(FastPathEnd::OtherRequest) if watch.stopping && buffer.is_empty() => return,
        Ok(FastPathEnd::OtherRequest) => {}
        Ok(FastPathEnd::RefusedBody) => return linger(&mut stream).await,
        Ok(FastPathEnd::Closed) => return,
        Err(error) => return tracing::debug!("an HTTP connection failed: {error}"),
    }

    let handler = service_fn(|request: Request<Incoming>| {
        activity.active.store(true, Relaxed);
        let busy = activity.user.busy();
        let has_body = !request.body().is_end_stream();
        let (service, activity) = (&service, &activity);
        async move {
            let mut response = http::handle(service, via, request).await;
            activity.refused_body.store(has_body && response.status().is_client_error(), Relaxed);
            match response.body_mut() {
                Reply::Events(listening) => listening.note(&activity.active, busy),
                Reply::Whole(_) => drop(busy),
            }
            Ok::<_, Infallible>(response)
        }
    });
    {
        let mut protocol = http1::Builder::new();
        protocol.max_buf_size(BUFFER);
        let stream = TokioIo::new(Rewind { prefix: buffer, consumed: 0, stream: &mut stream });
        let mut connection = pin!(protocol.serve_connection(stream, handler));
        if watch.stopping {
            // hyper must have read the beginning of the request first. Otherwise it takes the connection for unused and closes
            // it at once.
            if poll_fn(|context| Poll::Ready(connection.as_mut().poll(context))).await.is_ready() {
                return;
            }
            connection.as_mut().graceful_shutdown();
        }
        loop {
            tokio::select! {
                biased;
                ended = connection.as_mut() => match ended {
                    Ok(()) => break,
                    Err(error) => return tracing::debug!("an HTTP connection failed: {error}"),
                },
                end = watch.end(&activity.active) => match end {
                    End::Idle => return,
                    End::MakeRoom if !activity.user.is_busy() => return,
                    End::Stop | End::MakeRoom => connection.as_mut().graceful_shutdown(),
                },
            }
        }
    }
    if activity.refused_body.load(Relaxed) {
        linger(&mut stream).await;
    }
}

/// Reads and discards input after the last response, for clients that send their whole body before they read. Closing a
/// socket with unread input resets the connection, and the client could not read the response.
async fn linger(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    let drained = async {
        let _ = stream.shutdown().await;
        let (mut discarded, mut remaining) = (vec![0; BUFFER], LINGER_BYTES);
        while remaining > 0 {
            match stream.read(&mut discarded).await {
                Ok(count @ 1..) => remaining = remaining.saturating_sub(count),
                Ok(0) | Err(_) => return,
            }
        }
    };
    let _ = timeout(LINGER, drained).await;
}

/// Why the fast path ended.
enum FastPathEnd {
    /// The buffer holds a request of another form, or the beginning of one, for hyper.
    OtherRequest,
    /// A body was refused, and the client may still be sending it.
    RefusedBody,
    /// The client closed the connection.
    Closed,
}

/// Serves plain checks until a request of another form arrives.
async fn serve_checks(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    via: Via,
    buffer: &mut Vec<u8>,
    service: &Service,
    activity: &Activity,
) -> io::Result<FastPathEnd> {
    let mut responses = Vec::new();
    let mut body_deadline = None;
    let host_is_known = |host: &[u8]| !via.loopback || service.access.knows_host(host);
    loop {
        // The fast path reads no tokens.
        if service.access.data_is_closed() {
            return Ok(FastPathEnd::OtherRequest);
        }
        let mut consumed = 0;
        let next = loop {
            match fast_path::parse(&buffer[consumed..], service.traces().is_some(), host_is_known) {
                Parsed::Check { head, body, parent } if buffer.len() - consumed >= head + body => {
                    activity.active.store(true, Relaxed);
                    let began = Instant::now();
                    activity.user.used(began);
                    let context = RequestContext { peer: via.peer.ip(), began, parent };
                    let body_bytes = &mut buffer[consumed + head..][..body];
                    let response = http::handle_check(service, context, body_bytes).await;
                    fast_path::write(&mut responses, &response, began);
                    consumed += head + body;
                    body_deadline = None;
                }
                next => break next,
            }
        };
        if consumed > 0 {
            buffer.drain(..consumed);
            send(stream, &responses).await?;
            responses.clear();
        }
        match next {
            Parsed::Other => return Ok(FastPathEnd::OtherRequest),
            Parsed::Partial if buffer.len() > BUFFER => return Ok(FastPathEnd::OtherRequest),
            Parsed::Check { .. } | Parsed::Partial if activity.stop.load(Relaxed) => {
                return Ok(FastPathEnd::OtherRequest);
            }
            Parsed::Partial => {
                buffer.reserve(TYPICAL_REQUEST);
                if activity.reading(stream.read_buf(buffer)).await? == 0 {
                    return Ok(FastPathEnd::Closed);
                }
            }
            Parsed::Check { head, body, .. } => {
                buffer.reserve(head + body - buffer.len());
                let deadline =
                    *body_deadline.get_or_insert_with(|| time::Instant::now() + request_body::TIMEOUT);
                let error = match timeout_at(deadline, activity.reading(stream.read_buf(buffer))).await {
                    Ok(Ok(1..)) => continue,
                    Ok(Ok(0)) => request_body::incomplete("the connection was closed"),
                    Ok(Err(error)) => request_body::incomplete(error),
                    Err(_) => request_body::timed_out(),
                };
                let now = Instant::now();
                fast_path::write(&mut responses, &http::handle_incomplete_check(service, now, error), now);
                send(stream, &responses).await?;
                return Ok(FastPathEnd::RefusedBody);
            }
        }
    }
}

/// Writes and flushes all bytes: TLS buffers what is not flushed.
async fn send(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    stream.write_all(bytes).await?;
    stream.flush().await
}

/// State that a connection shares with its [`Watch`].
struct Activity {
    user: User,
    /// Whether a request began since the last tick of the idle timer.
    active: Arc<AtomicBool>,
    /// Whether the connection is waiting for input, and for nothing else.
    reading: AtomicBool,
    /// Whether the connection must stop reading.
    stop: AtomicBool,
    /// Whether the last request had a body and was refused: the client may still be sending it.
    refused_body: AtomicBool,
}

impl Activity {
    fn new(user: User) -> Activity {
        let [reading, stop, refused_body] = [const { AtomicBool::new(false) }; 3];
        Activity { user, active: Arc::default(), reading, stop, refused_body }
    }

    async fn reading<T>(&self, read: impl Future<Output = T>) -> T {
        self.reading.store(true, Relaxed);
        let read = read.await;
        self.reading.store(false, Relaxed);
        read
    }
}

/// Tells a connection when it has to end.
///
/// hyper's own timeout starts a timer for every request head, which cost 4 % of all CPU time. One timer for the whole
/// connection closes the same connections a little later: after one to two times [`IDLE_TIMEOUT`].
struct Watch<'a> {
    timer: Pin<&'a mut Sleep>,
    seat: Seat,
    stopping: bool,
}

/// Why a connection has to end.
enum End {
    /// It is idle: close it now.
    Idle,
    /// The server stops: close it after the last response.
    Stop,
    /// A new connection needs its seat: close it now, or after the request that is being served.
    MakeRoom,
}

impl Watch<'_> {
    async fn end(&mut self, active: &AtomicBool) -> End {
        loop {
            tokio::select! {
                () = self.timer.as_mut() => {
                    if !active.swap(false, Relaxed) {
                        tracing::debug!("closing an HTTP connection: idle for {IDLE_TIMEOUT:?}");
                        return End::Idle;
                    }
                    self.timer.as_mut().reset(time::Instant::now() + IDLE_TIMEOUT);
                }
                end = self.seat.end() => {
                    self.stopping = true;
                    return match end {
                        connection_budget::End::Stop => End::Stop,
                        connection_budget::End::MakeRoom => End::MakeRoom,
                    };
                }
            }
        }
    }
}

/// A stream whose first bytes were already read: reads them again, then the rest.
struct Rewind<S> {
    prefix: Vec<u8>,
    consumed: usize,
    stream: S,
}

impl<S: AsyncRead + Unpin> AsyncRead for Rewind<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.prefix.is_empty() {
            return Pin::new(&mut this.stream).poll_read(context, into);
        }
        let count = (this.prefix.len() - this.consumed).min(into.remaining());
        into.put_slice(&this.prefix[this.consumed..][..count]);
        this.consumed += count;
        if this.consumed == this.prefix.len() {
            this.prefix = Vec::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Rewind<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, from)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, from)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
    use tollkeeper::MemoryStore;

    use std::net::{IpAddr, Ipv4Addr};

    use tokio::sync::watch;
    use tokio::time::Instant;

    use super::*;
    use crate::command::serve::BUILTIN;
    use crate::server::builtin;
    use crate::store::Store;
    use crate::telemetry::events;
    use tollkeeper_engine::api::active_limits::LimitSource;

    pub(crate) const PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 4711);

    /// A loopback listener.
    const VIA: Via = Via { peer: PEER, loopback: true };

    pub(crate) fn service() -> Arc<Service> {
        let store = Store::Memory(MemoryStore::default());
        Arc::new(
            Service::new(builtin(BUILTIN), LimitSource::Builtin, store)
                .expect("the built-in config reads no files"),
        )
    }

    /// An in-memory connection. The clock is paused: it advances only while all tasks are idle.
    fn connect() -> (watch::Sender<()>, DuplexStream) {
        let (stop, stopped) = watch::channel(());
        let (ours, theirs) = tokio::io::duplex(1 << 10);
        tokio::spawn(serve(theirs, VIA, service(), Seat::alone(stopped)));
        (stop, ours)
    }

    /// Sends `GET /healthz` and expects a 200.
    pub(crate) async fn get_healthz(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
        stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
        let mut answer = [0; 1 << 10];
        let len = stream.read(&mut answer).await.unwrap();
        assert!(answer[..len].starts_with(b"HTTP/1.1 200 OK"), "{}", String::from_utf8_lossy(&answer));
    }

    /// Waits until the server closes the connection, without sending anything more.
    pub(crate) async fn closed(mut stream: impl AsyncRead + Unpin) {
        assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn connection_without_a_request_is_closed() {
        let (began, (_stop, stream)) = (Instant::now(), connect());
        closed(stream).await;
        assert!((IDLE_TIMEOUT..IDLE_TIMEOUT * 2).contains(&began.elapsed()), "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn connection_with_a_trickling_head_is_closed() {
        let (began, (_stop, mut stream)) = (Instant::now(), connect());
        stream.write_all(b"GET /healthz HTTP/1.1\r\nx-slow: ").await.unwrap();
        while stream.write_all(b"x").await.is_ok() {
            sleep(Duration::from_secs(1)).await;
        }
        assert!((IDLE_TIMEOUT..IDLE_TIMEOUT * 2).contains(&began.elapsed()), "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn connection_in_use_stays_open_until_idle() {
        let (_stop, mut stream) = connect();
        for _ in 0..10 {
            sleep(IDLE_TIMEOUT - Duration::from_secs(1)).await;
            get_healthz(&mut stream).await;
        }
        let last = Instant::now();
        closed(stream).await;
        assert!((IDLE_TIMEOUT..IDLE_TIMEOUT * 2).contains(&last.elapsed()), "{:?}", last.elapsed());
    }

    /// An event stream has no requests, but it is not idle while its client reads.
    #[tokio::test(start_paused = true)]
    async fn event_stream_stays_open_while_the_client_reads() {
        let (service, (_stop, stopped)) = (service(), watch::channel(()));
        tokio::spawn(events::send_every_second(Arc::clone(&service)));
        let (mut ours, theirs) = tokio::io::duplex(1 << 10);
        tokio::spawn(serve(theirs, VIA, service, Seat::alone(stopped)));
        ours.write_all(b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
        let began = Instant::now();
        let mut received = 0;
        while began.elapsed() < IDLE_TIMEOUT * 10 {
            let count = ours.read(&mut [0; 1 << 10]).await.unwrap();
            assert!(count > 0, "closed after {:?}", began.elapsed());
            received += count;
        }
        assert!(received > 50_000, "{received}");
        // The client stops reading. The server notices once its buffer is full, and closes the connection.
        sleep(IDLE_TIMEOUT * 10).await;
        let mut buffered = Vec::new();
        ours.read_to_end(&mut buffered).await.unwrap();
        assert!(buffered.len() < 2 * BUFFER, "{}", buffered.len());
    }

    #[tokio::test(start_paused = true)]
    async fn stop_closes_idle_connections_and_finishes_requests() {
        let (stop, mut idle) = connect();
        get_healthz(&mut idle).await;
        stop.send(()).unwrap();
        let began = Instant::now();
        closed(idle).await;
        assert_eq!(began.elapsed(), Duration::ZERO);

        let (stop, mut busy) = connect();
        busy.write_all(b"POST /v1/peek HTTP/1.1\r\nhost: localhost\r\ncontent-length: 12\r\n\r\n{")
            .await
            .unwrap();
        sleep(Duration::from_secs(1)).await;
        stop.send(()).unwrap();
        sleep(Duration::from_secs(1)).await;
        busy.write_all(b"\"facts\":{}}").await.unwrap();
        let mut answer = String::new();
        busy.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    }

    const BODIES: [&str; 6] = [
        r#"{"facts":{}}"#,
        r#"{"facts":{"user":""},"cost":2}"#,
        r#"{"facts":{},"cost":0}"#,
        r#"{"facts":{"a":[]}}"#,
        "{",
        "",
    ];

    /// Sends the pieces one after the other, and returns all responses without their dates.
    async fn responses(pieces: &[&[u8]]) -> String {
        let (_stop, mut stream) = connect();
        for piece in pieces {
            stream.write_all(piece).await.unwrap();
            sleep(Duration::from_millis(1)).await;
        }
        stream
            .write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut responses = String::new();
        stream.read_to_string(&mut responses).await.unwrap();
        let lines = responses.split("\r\n").filter(|line| !line.starts_with("date: "));
        lines.collect::<Vec<_>>().join("\n")
    }

    fn requests(header: &str) -> String {
        let request = |body: &&str| {
            let len = body.len();
            format!(
                "POST /v1/check HTTP/1.1\r\nhost: localhost\r\n{header}content-length: {len}\r\n\r\n{body}"
            )
        };
        BODIES.iter().map(request).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn fast_path_answers_as_hyper_does() {
        // `te` is a header that the fast path leaves to hyper.
        let (plain, other) = (requests(""), requests("te: trailers\r\n"));
        let answered = responses(&[plain.as_bytes()]).await;
        assert_eq!(answered.matches("HTTP/1.1 200 OK").count(), 3, "{answered}");
        assert_eq!(answered.matches("HTTP/1.1 400 Bad Request").count(), 4, "{answered}");
        assert_eq!(answered, responses(&[other.as_bytes()]).await);
        // Both forms on one connection.
        let (checks, _) = answered.rsplit_once("HTTP/1.1").unwrap();
        assert_eq!(responses(&[plain.as_bytes(), other.as_bytes()]).await, format!("{checks}{answered}"));
    }

    #[tokio::test(start_paused = true)]
    async fn responses_do_not_depend_on_segmentation() {
        let requests = requests("");
        let expected = responses(&[requests.as_bytes()]).await;
        for at in 1..requests.len() {
            let (first, second) = requests.as_bytes().split_at(at);
            assert_eq!(responses(&[first, second]).await, expected, "cut at {at}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn stop_finishes_a_check_that_has_begun() {
        let request =
            "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 12\r\n\r\n{\"facts\":{}}";
        for at in 1..request.len() {
            let (stop, mut stream) = connect();
            stream.write_all(&request.as_bytes()[..at]).await.unwrap();
            sleep(Duration::from_secs(1)).await;
            stop.send(()).unwrap();
            sleep(Duration::from_secs(1)).await;
            stream
                .write_all(&request.as_bytes()[at..])
                .await
                .unwrap_or_else(|error| panic!("cut at {at}: {error}"));
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 200 OK"), "cut at {at}: {answer}");
            assert!(answer.contains("connection: close"), "cut at {at}: {answer}");
        }
    }

    /// A stream may buffer writes, as TLS does.
    #[tokio::test(start_paused = true)]
    async fn responses_are_flushed() {
        let (_stop, stopped) = watch::channel(());
        let (mut ours, theirs) = tokio::io::duplex(1 << 10);
        tokio::spawn(serve(tokio::io::BufStream::new(theirs), VIA, service(), Seat::alone(stopped)));
        ours.write_all(requests("").as_bytes()).await.unwrap();
        let began = Instant::now();
        assert!(ours.read(&mut [0; 1 << 10]).await.unwrap() > 0);
        assert_eq!(began.elapsed(), Duration::ZERO);
    }
}
