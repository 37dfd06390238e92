//! Connections: accepted, served, and closed when their last request is answered.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::http;
use crate::http::reply::Reply;
use crate::service::Service;
use crate::tls::Stream;

/// How long a connection may be without a request: idle, or still sending the head of one.
const QUIET: Duration = Duration::from_secs(75);
/// As much of a head as is read before it is complete.
const BUFFER: usize = 16 << 10;
/// A moment for others to close files, when there are too many.
const BREATH: Duration = Duration::from_millis(50);

/// All connections of one listener.
#[derive(Debug)]
pub struct Connections {
    /// Says when to stop. Whoever accepts or serves holds a receiver.
    stop: watch::Sender<()>,
    accepting: JoinHandle<()>,
}

impl Connections {
    /// Begins to accept.
    pub fn accept(listener: TcpListener, service: Arc<Service>) -> Connections {
        let (stop, stopped) = watch::channel(());
        Connections { stop, accepting: tokio::spawn(accept(listener, service, stopped)) }
    }

    /// Accepts no more, and lets requests in flight finish for so long; says how many could not.
    pub async fn close(self, patience: Duration) -> usize {
        let _ = self.stop.send(());
        let _ = self.accepting.await;
        let _ = tokio::time::timeout(patience, self.stop.closed()).await;
        self.stop.receiver_count()
    }
}

async fn accept(listener: TcpListener, service: Arc<Service>, mut stopped: watch::Receiver<()>) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopped.changed() => return,
        };
        match accepted {
            Ok((stream, _)) => {
                // Answers are small and written at once: waiting to fill a packet would only delay them.
                let _ = stream.set_nodelay(true);
                tokio::spawn(greet(stream, Arc::clone(&service), stopped.clone()));
            }
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                sleep(BREATH).await;
            }
        }
    }
}

/// Agrees on how to speak, then serves.
async fn greet(stream: TcpStream, service: Arc<Service>, stopped: watch::Receiver<()>) {
    match service.acceptor.accept(stream).await {
        Ok(Stream::Plain(stream)) => serve(stream, service, stopped).await,
        // A box, so that a connection without TLS takes no room for one with it.
        Ok(Stream::Tls(stream)) => Box::pin(serve(stream, service, stopped)).await,
        Err(error) => tracing::debug!("a connection ended before TLS began: {error}"),
    }
}

/// Answers the requests of one connection until either side ends it.
///
/// hyper would watch over heads by a timer for each of them, which cost 4 % of all processor time. One
/// for the connection, looked at when it fires, closes the same connections a little later: after one to
/// two times [`QUIET`].
async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    service: Arc<Service>,
    mut stopped: watch::Receiver<()>,
) {
    let asked = Arc::new(AtomicBool::new(false));
    let answer = service_fn(|request| {
        asked.store(true, Relaxed);
        async {
            let mut response = http::answer(&service, request).await;
            if let Reply::Events(listening) = response.body_mut() {
                listening.note(&asked);
            }
            Ok::<_, Infallible>(response)
        }
    });
    let mut protocol = http1::Builder::new();
    protocol.max_buf_size(BUFFER);
    let mut connection = pin!(protocol.serve_connection(TokioIo::new(stream), answer));
    let mut fires = pin!(sleep(QUIET));
    let mut stopping = false;
    loop {
        tokio::select! {
            biased;
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!("a connection ended: {error}");
                }
                return;
            }
            () = fires.as_mut() => {
                if !asked.swap(false, Relaxed) {
                    tracing::debug!("a connection was quiet for {QUIET:?} and is closed");
                    return;
                }
                fires.as_mut().reset(Instant::now() + QUIET);
            }
            _ = stopped.changed(), if !stopping => {
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
    use tollkeeper::MemoryStore;

    use super::*;
    use crate::events;
    use crate::in_force::Source;
    use crate::serve::builtin;
    use crate::store::Store;

    fn service() -> Arc<Service> {
        let store = Store::Memory(MemoryStore::default());
        Arc::new(Service::new(builtin(), Source::Builtin, store).expect("nothing to be read"))
    }

    /// A connection in memory: it is served in the time of the test, which stands still while anybody is busy.
    fn connect() -> (watch::Sender<()>, DuplexStream) {
        let (stop, stopped) = watch::channel(());
        let (ours, theirs) = tokio::io::duplex(1 << 10);
        tokio::spawn(serve(theirs, service(), stopped));
        (stop, ours)
    }

    async fn ask(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
        stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: test\r\n\r\n").await.unwrap();
        let mut answer = [0; 1 << 10];
        let len = stream.read(&mut answer).await.unwrap();
        assert!(answer[..len].starts_with(b"HTTP/1.1 200 OK"), "{}", String::from_utf8_lossy(&answer));
    }

    /// Waits until the server ends it; it must not send anything more.
    async fn ended(mut stream: impl AsyncRead + Unpin) {
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
        tokio::spawn(events::tell(Arc::clone(&service)));
        let (mut ours, theirs) = tokio::io::duplex(1 << 10);
        tokio::spawn(serve(theirs, service, stopped));
        ours.write_all(b"GET /v1/events HTTP/1.1\r\nhost: test\r\n\r\n").await.unwrap();
        let began = Instant::now();
        let mut heard = 0;
        while began.elapsed() < QUIET * 10 {
            heard += ours.read(&mut [0; 1 << 10]).await.unwrap();
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
        busy.write_all(b"POST /v1/peek HTTP/1.1\r\nhost: test\r\ncontent-length: 12\r\n\r\n{").await.unwrap();
        sleep(Duration::from_secs(1)).await;
        stop.send(()).unwrap();
        sleep(Duration::from_secs(1)).await;
        busy.write_all(b"\"facts\":{}}").await.unwrap();
        let mut answer = String::new();
        busy.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    }

    #[tokio::test]
    async fn closing_waits_for_every_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Connections::accept(listener, service());
        let mut stream = TcpStream::connect(address).await.unwrap();
        ask(&mut stream).await;
        assert_eq!(connections.close(QUIET).await, 0);
        ended(stream).await;
    }
}
