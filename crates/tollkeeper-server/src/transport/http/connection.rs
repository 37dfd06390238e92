//! One connection: its requests answered in order, until either side ends it.
//!
//! As long as only plain checks come ([`http::plain`]), they are answered here, all that have come at once with
//! one write; with the first request of another form the connection is hyper's for the rest of its life.

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
use crate::transport::http::fast_path::{self, Begins};
use crate::transport::http::response_body::Reply;
use crate::transport::http::{self, Asked, Via, request_body};
use crate::transport::listener::{Protocol, Stream};

/// How long a connection may be without a request: idle, or still sending the head of one.
const QUIET: Duration = Duration::from_secs(75);
/// As much of a head as is read before it is complete.
const BUFFER: usize = 16 << 10;
/// How long, and for how many bytes, a client is heard that may still be sending a body that was refused: as many as
/// the largest body may have.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = http::MAX_LIMITS_BODY;
/// What a plain check has room in.
const USUAL_REQUEST: usize = 2 << 10;

/// HTTP over a connection.
#[derive(Clone, Debug)]
pub struct Http {
    service: Arc<Service>,
    /// Whether the listener is bound to a loopback address.
    loopback: bool,
}

impl Http {
    /// What this service answers through a listener.
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

/// Answers the requests of one connection until either side ends it.
async fn serve(mut stream: impl Stream, via: Via, service: Arc<Service>, seat: Seat) {
    let pace = Pace::of(seat.user());
    let mut watch = Watch { fires: pin!(sleep(QUIET)), seat, stopping: false };
    let mut buffer = Vec::new();

    let left = {
        let mut plain = pin!(answer_plain(&mut stream, via, &mut buffer, &service, &pace));
        loop {
            tokio::select! {
                biased;
                left = plain.as_mut() => break left,
                end = watch.end(&pace.asked) => match end {
                    End::Quiet => return,
                    End::MakeRoom if pace.reading.load(Relaxed) => return,
                    // Nothing is lost when a read is given up.
                    End::Stop if pace.reading.load(Relaxed) => break Ok(Left::Request),
                    End::Stop | End::MakeRoom => pace.stop.store(true, Relaxed),
                },
            }
        }
    };
    match left {
        Ok(Left::Request) if watch.stopping && buffer.is_empty() => return,
        Ok(Left::Request) => {}
        Ok(Left::Body) => return linger(&mut stream).await,
        Ok(Left::Nothing) => return,
        Err(error) => return tracing::debug!("a connection ended: {error}"),
    }

    let answer = service_fn(|request: Request<Incoming>| {
        pace.asked.store(true, Relaxed);
        let busy = pace.user.busy();
        let has_body = !request.body().is_end_stream();
        let (service, pace) = (&service, &pace);
        async move {
            let mut response = http::answer(service, via, request).await;
            pace.refused_body.store(has_body && response.status().is_client_error(), Relaxed);
            match response.body_mut() {
                Reply::Events(listening) => listening.note(&pace.asked, busy),
                Reply::Whole(_) => drop(busy),
            }
            Ok::<_, Infallible>(response)
        }
    });
    {
        let mut protocol = http1::Builder::new();
        protocol.max_buf_size(BUFFER);
        let stream = TokioIo::new(Rewound { before: buffer, taken: 0, stream: &mut stream });
        let mut connection = pin!(protocol.serve_connection(stream, answer));
        if watch.stopping {
            // It has to see that a request has begun, or it would take the connection for one that was never used.
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
                    Err(error) => return tracing::debug!("a connection ended: {error}"),
                },
                end = watch.end(&pace.asked) => match end {
                    End::Quiet => return,
                    End::MakeRoom if !pace.user.is_busy() => return,
                    End::Stop | End::MakeRoom => connection.as_mut().graceful_shutdown(),
                },
            }
        }
    }
    if pace.refused_body.load(Relaxed) {
        linger(&mut stream).await;
    }
}

/// Reads on after the last answer, for a client that sends all of its body before it reads. If the connection were
/// closed while bytes of it are unread, it would be reset, and the client could not read the answer.
async fn linger(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    let drained = async {
        let _ = stream.shutdown().await;
        let (mut scrap, mut left) = (vec![0; BUFFER], LINGER_BYTES);
        while left > 0 {
            match stream.read(&mut scrap).await {
                Ok(count @ 1..) => left = left.saturating_sub(count),
                Ok(0) | Err(_) => return,
            }
        }
    };
    let _ = timeout(LINGER, drained).await;
}

/// What is left when no more plain checks can be answered.
enum Left {
    /// A request in the buffer that is not plain, or the beginning of one.
    Request,
    /// The rest of a body that was refused.
    Body,
    /// Nothing: the connection is over.
    Nothing,
}

/// Answers plain checks for as long as nothing else comes.
async fn answer_plain(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    via: Via,
    buffer: &mut Vec<u8>,
    service: &Service,
    pace: &Pace,
) -> io::Result<Left> {
    let mut answers = Vec::new();
    let mut body_late = None;
    let host_is_known = |host: &[u8]| !via.loopback || service.access.knows_host(host);
    loop {
        // Who has to show a token is asked for it elsewhere.
        if service.access.data_is_closed() {
            return Ok(Left::Request);
        }
        let mut taken = 0;
        let next = loop {
            match fast_path::begins(&buffer[taken..], service.traces().is_some(), host_is_known) {
                Begins::Plain { head, body, parent } if buffer.len() - taken >= head + body => {
                    pace.asked.store(true, Relaxed);
                    let began = Instant::now();
                    pace.user.used(began);
                    let asked = Asked { peer: via.peer.ip(), began, parent };
                    let body_here = &mut buffer[taken + head..][..body];
                    let answer = http::answer_check(service, asked, body_here).await;
                    fast_path::write(&mut answers, &answer, began);
                    taken += head + body;
                    body_late = None;
                }
                next => break next,
            }
        };
        if taken > 0 {
            buffer.drain(..taken);
            send(stream, &answers).await?;
            answers.clear();
        }
        match next {
            Begins::Other => return Ok(Left::Request),
            Begins::Unfinished if buffer.len() > BUFFER => return Ok(Left::Request),
            Begins::Plain { .. } | Begins::Unfinished if pace.stop.load(Relaxed) => return Ok(Left::Request),
            Begins::Unfinished => {
                buffer.reserve(USUAL_REQUEST);
                if pace.reading(stream.read_buf(buffer)).await? == 0 {
                    return Ok(Left::Nothing);
                }
            }
            Begins::Plain { head, body, .. } => {
                buffer.reserve(head + body - buffer.len());
                let late = *body_late.get_or_insert_with(|| time::Instant::now() + request_body::PATIENCE);
                let wrong = match timeout_at(late, pace.reading(stream.read_buf(buffer))).await {
                    Ok(Ok(1..)) => continue,
                    Ok(Ok(0)) => request_body::cut_off("the connection was closed"),
                    Ok(Err(error)) => request_body::cut_off(error),
                    Err(_) => request_body::late(),
                };
                let now = Instant::now();
                fast_path::write(&mut answers, &http::answer_wrong(service, now, wrong), now);
                send(stream, &answers).await?;
                return Ok(Left::Body);
            }
        }
    }
}

/// Writes all of it, and leaves nothing behind in TLS.
async fn send(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    stream.write_all(bytes).await?;
    stream.flush().await
}

/// What a connection and whoever watches over it tell each other.
struct Pace {
    user: User,
    /// A request began since this was last looked at.
    asked: Arc<AtomicBool>,
    /// It waits for more to read, and for nothing else.
    reading: AtomicBool,
    /// It should not read any more.
    stop: AtomicBool,
    /// The last request had a body and was refused: the client may still be sending it.
    refused_body: AtomicBool,
}

impl Pace {
    fn of(user: User) -> Pace {
        let [reading, stop, refused_body] = [const { AtomicBool::new(false) }; 3];
        Pace { user, asked: Arc::default(), reading, stop, refused_body }
    }

    async fn reading<T>(&self, read: impl Future<Output = T>) -> T {
        self.reading.store(true, Relaxed);
        let read = read.await;
        self.reading.store(false, Relaxed);
        read
    }
}

/// Watches over a connection.
///
/// hyper would watch over heads by a timer for each of them, which cost 4 % of all processor time. One
/// for the connection, looked at when it fires, closes the same connections a little later: after one to
/// two times [`QUIET`].
struct Watch<'a> {
    fires: Pin<&'a mut Sleep>,
    seat: Seat,
    stopping: bool,
}

/// Why a connection has to end.
enum End {
    /// Nobody asked anything for a while: now.
    Quiet,
    /// The server stops: after its last answer.
    Stop,
    /// Another connection needs the seat: now, unless a request is being answered.
    MakeRoom,
}

impl Watch<'_> {
    async fn end(&mut self, asked: &AtomicBool) -> End {
        loop {
            tokio::select! {
                () = self.fires.as_mut() => {
                    if !asked.swap(false, Relaxed) {
                        tracing::debug!("a connection was quiet for {QUIET:?} and is closed");
                        return End::Quiet;
                    }
                    self.fires.as_mut().reset(time::Instant::now() + QUIET);
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

/// A stream of which some was read already.
struct Rewound<S> {
    before: Vec<u8>,
    taken: usize,
    stream: S,
}

impl<S: AsyncRead + Unpin> AsyncRead for Rewound<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.before.is_empty() {
            return Pin::new(&mut this.stream).poll_read(context, into);
        }
        let some = (this.before.len() - this.taken).min(into.remaining());
        into.put_slice(&this.before[this.taken..][..some]);
        this.taken += some;
        if this.taken == this.before.len() {
            this.before = Vec::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Rewound<S> {
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
    use crate::command::serve::builtin;
    use crate::control::active_limits::Source;
    use crate::store::Store;
    use crate::telemetry::events;

    pub(crate) const PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 4711);

    /// Over a loopback listener.
    const VIA: Via = Via { peer: PEER, loopback: true };

    pub(crate) fn service() -> Arc<Service> {
        let store = Store::Memory(MemoryStore::default());
        Arc::new(Service::new(builtin(), Source::Builtin, store).expect("nothing to be read"))
    }

    /// A connection in memory: it is served in the time of the test, which stands still while anybody is busy.
    fn connect() -> (watch::Sender<()>, DuplexStream) {
        let (stop, stopped) = watch::channel(());
        let (ours, theirs) = tokio::io::duplex(1 << 10);
        tokio::spawn(serve(theirs, VIA, service(), Seat::alone(stopped)));
        (stop, ours)
    }

    pub(crate) async fn ask(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
        stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
        let mut answer = [0; 1 << 10];
        let len = stream.read(&mut answer).await.unwrap();
        assert!(answer[..len].starts_with(b"HTTP/1.1 200 OK"), "{}", String::from_utf8_lossy(&answer));
    }

    /// Waits until the server ends it; it must not send anything more.
    pub(crate) async fn ended(mut stream: impl AsyncRead + Unpin) {
        assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_without_a_request_is_closed() {
        let (began, (_stop, stream)) = (Instant::now(), connect());
        ended(stream).await;
        assert!((QUIET..QUIET * 2).contains(&began.elapsed()), "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_that_trickles_is_cut_off() {
        let (began, (_stop, mut stream)) = (Instant::now(), connect());
        stream.write_all(b"GET /healthz HTTP/1.1\r\nx-slow: ").await.unwrap();
        while stream.write_all(b"x").await.is_ok() {
            sleep(Duration::from_secs(1)).await;
        }
        assert!((QUIET..QUIET * 2).contains(&began.elapsed()), "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_in_use_stays_open_until_it_falls_quiet() {
        let (_stop, mut stream) = connect();
        for _ in 0..10 {
            sleep(QUIET - Duration::from_secs(1)).await;
            ask(&mut stream).await;
        }
        let last = Instant::now();
        ended(stream).await;
        assert!((QUIET..QUIET * 2).contains(&last.elapsed()), "{:?}", last.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_listener_stays_for_as_long_as_it_listens_and_not_much_longer() {
        let (service, (_stop, stopped)) = (service(), watch::channel(()));
        tokio::spawn(events::send_every_second(Arc::clone(&service)));
        let (mut ours, theirs) = tokio::io::duplex(1 << 10);
        tokio::spawn(serve(theirs, VIA, service, Seat::alone(stopped)));
        ours.write_all(b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
        let began = Instant::now();
        let mut heard = 0;
        while began.elapsed() < QUIET * 10 {
            let count = ours.read(&mut [0; 1 << 10]).await.unwrap();
            assert!(count > 0, "it was closed after {:?}", began.elapsed());
            heard += count;
        }
        assert!(heard > 50_000, "{heard}");
        // Now nobody reads: the server notices once its buffer is full, and lets go of it.
        sleep(QUIET * 10).await;
        let mut rest = Vec::new();
        ours.read_to_end(&mut rest).await.unwrap();
        assert!(rest.len() < 2 * BUFFER, "{}", rest.len());
    }

    #[tokio::test(start_paused = true)]
    async fn told_to_stop_an_idle_connection_ends_and_a_request_is_answered_first() {
        let (stop, mut idle) = connect();
        ask(&mut idle).await;
        stop.send(()).unwrap();
        let began = Instant::now();
        ended(idle).await;
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

    /// Sends a few pieces, one after the other, and reads to the end.
    async fn answers(pieces: &[&[u8]]) -> String {
        let (_stop, mut stream) = connect();
        for piece in pieces {
            stream.write_all(piece).await.unwrap();
            sleep(Duration::from_millis(1)).await;
        }
        stream
            .write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut answers = String::new();
        stream.read_to_string(&mut answers).await.unwrap();
        let lines = answers.split("\r\n").filter(|line| !line.starts_with("date: "));
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
    async fn a_plain_check_is_answered_as_hyper_answers_it() {
        let (plain, other) = (requests(""), requests("te: trailers\r\n"));
        let answered = answers(&[plain.as_bytes()]).await;
        assert_eq!(answered.matches("HTTP/1.1 200 OK").count(), 3, "{answered}");
        assert_eq!(answered.matches("HTTP/1.1 400 Bad Request").count(), 4, "{answered}");
        assert_eq!(answered, answers(&[other.as_bytes()]).await);
        // One after the other, on one connection.
        let (checks, _) = answered.rsplit_once("HTTP/1.1").unwrap();
        assert_eq!(answers(&[plain.as_bytes(), other.as_bytes()]).await, format!("{checks}{answered}"));
    }

    #[tokio::test(start_paused = true)]
    async fn wherever_a_stream_is_cut_the_answers_are_the_same() {
        let requests = requests("");
        let whole = answers(&[requests.as_bytes()]).await;
        for at in 1..requests.len() {
            let (first, second) = requests.as_bytes().split_at(at);
            assert_eq!(answers(&[first, second]).await, whole, "cut at {at}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn told_to_stop_a_plain_check_that_has_begun_is_answered_and_the_last() {
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

    #[tokio::test(start_paused = true)]
    async fn an_answer_does_not_wait_in_a_stream_that_keeps_what_is_written() {
        let (_stop, stopped) = watch::channel(());
        let (mut ours, theirs) = tokio::io::duplex(1 << 10);
        tokio::spawn(serve(tokio::io::BufStream::new(theirs), VIA, service(), Seat::alone(stopped)));
        ours.write_all(requests("").as_bytes()).await.unwrap();
        let began = Instant::now();
        assert!(ours.read(&mut [0; 1 << 10]).await.unwrap() > 0);
        assert_eq!(began.elapsed(), Duration::ZERO);
    }
}
