//! Connections: accepted, served, and closed when their last request is answered.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::http;
use crate::service::Service;

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
        Connections::accept_quiet_for(QUIET, listener, service)
    }

    fn accept_quiet_for(quiet: Duration, listener: TcpListener, service: Arc<Service>) -> Connections {
        let (stop, stopped) = watch::channel(());
        Connections { stop, accepting: tokio::spawn(accept(listener, service, stopped, quiet)) }
    }

    /// Accepts no more, and lets requests in flight finish for so long; says how many could not.
    pub async fn close(self, patience: Duration) -> usize {
        let _ = self.stop.send(());
        let _ = self.accepting.await;
        let _ = tokio::time::timeout(patience, self.stop.closed()).await;
        self.stop.receiver_count()
    }
}

async fn accept(
    listener: TcpListener,
    service: Arc<Service>,
    mut stopped: watch::Receiver<()>,
    quiet: Duration,
) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopped.changed() => return,
        };
        match accepted {
            Ok((stream, _)) => {
                tokio::spawn(serve(stream, Arc::clone(&service), stopped.clone(), quiet));
            }
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                sleep(BREATH).await;
            }
        }
    }
}

/// Answers the requests of one connection until either side ends it.
///
/// hyper would watch over heads by a timer for each of them, which cost 4 % of all processor time. One
/// for the connection, looked at when it fires, closes the same connections a little later: after one to
/// two times `quiet`.
async fn serve(stream: TcpStream, service: Arc<Service>, mut stopped: watch::Receiver<()>, quiet: Duration) {
    // Answers are small and written at once: waiting to fill a packet would only delay them.
    let _ = stream.set_nodelay(true);
    let asked = AtomicBool::new(false);
    let answer = service_fn(|request| {
        asked.store(true, Relaxed);
        async { Ok::<_, Infallible>(http::answer(&service, request).await) }
    });
    let mut protocol = http1::Builder::new();
    protocol.max_buf_size(BUFFER);
    let mut connection = pin!(protocol.serve_connection(TokioIo::new(stream), answer));
    let mut fires = pin!(sleep(quiet));
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
                    tracing::debug!("a connection was quiet for {quiet:?} and is closed");
                    return;
                }
                fires.as_mut().reset(Instant::now() + quiet);
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
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tollkeeper::MemoryStore;

    use super::*;
    use crate::serve::builtin;
    use crate::service::Source;
    use crate::store::Store;

    const REQUEST: &[u8] = b"GET /healthz HTTP/1.1\r\nhost: test\r\n\r\n";

    /// A server that closes what is quiet for so long, and a connection to it.
    async fn connect(quiet: Duration) -> (Connections, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = Service::new(builtin(), Source::Builtin, Store::Memory(MemoryStore::default()));
        let connections = Connections::accept_quiet_for(quiet, listener, Arc::new(service));
        (connections, TcpStream::connect(address).await.unwrap())
    }

    async fn ask(stream: &mut TcpStream) -> String {
        stream.write_all(REQUEST).await.unwrap();
        let mut answer = [0; 1 << 10];
        let len = stream.read(&mut answer).await.unwrap();
        String::from_utf8_lossy(&answer[..len]).into_owned()
    }

    /// Whether the server ends it, and sends nothing more.
    async fn ends(mut stream: TcpStream) -> bool {
        stream.read(&mut [0]).await.is_ok_and(|len| len == 0)
    }

    #[tokio::test]
    async fn a_connection_without_a_request_is_closed() {
        let (_connections, stream) = connect(Duration::from_millis(1)).await;
        assert!(ends(stream).await);
    }

    #[tokio::test]
    async fn a_head_that_does_not_end_is_cut_off_however_it_trickles() {
        let (_connections, mut stream) = connect(Duration::from_millis(20)).await;
        stream.write_all(b"GET /healthz HTTP/1.1\r\nx-slow: ").await.unwrap();
        // Until the server has closed it and the kernel says so.
        while stream.write_all(b"x").await.is_ok() {
            sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn a_connection_that_falls_quiet_is_closed_and_one_that_asks_is_not() {
        let quiet = Duration::from_millis(200);
        let (_connections, mut busy) = connect(quiet).await;
        let mut idle = TcpStream::connect(busy.peer_addr().unwrap()).await.unwrap();
        assert!(ask(&mut idle).await.contains(" 200 OK"));
        let mut idle = tokio::spawn(ends(idle));
        // Both are looked at equally often: when the idle one is closed, the other was spared.
        let ended = loop {
            assert!(ask(&mut busy).await.contains(" 200 OK"), "a connection in use stays open");
            tokio::select! {
                ended = &mut idle => break ended.unwrap(),
                () = sleep(quiet / 20) => {}
            }
        };
        assert!(ended);
        assert!(ask(&mut busy).await.contains(" 200 OK"));
    }

    #[tokio::test]
    async fn closing_ends_what_is_idle_and_counts_what_is_not() {
        let (connections, mut stream) = connect(QUIET).await;
        assert!(ask(&mut stream).await.contains(" 200 OK"));
        assert_eq!(connections.close(QUIET).await, 0);
        assert!(ends(stream).await);

        let (connections, mut stream) = connect(QUIET).await;
        assert!(ask(&mut stream).await.contains(" 200 OK"));
        stream
            .write_all(b"POST /v1/check HTTP/1.1\r\nhost: test\r\ncontent-length: 9\r\n\r\n{")
            .await
            .unwrap();
        // A second answer on another connection says that the server has read this far.
        assert!(
            ask(&mut TcpStream::connect(stream.peer_addr().unwrap()).await.unwrap()).await.contains("200")
        );
        assert_eq!(connections.close(Duration::ZERO).await, 1);
    }
}
