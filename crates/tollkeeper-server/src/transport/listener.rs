//! Accepts the connections of a listener, negotiates TLS, and closes them gracefully when the server stops.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::control::tls;
use crate::service::Service;
use crate::telemetry::logging::OnceAMinute;
use crate::transport::connection_budget::{Entered, Room, Seat, Transport};

/// Pause after a failed accept, so that open connections keep being served.
const PAUSE: Duration = Duration::from_millis(50);

/// A protocol that a listener serves.
pub trait Protocol: Clone + Send + Sync + 'static {
    /// Its ALPN name, if its clients require one: `h2` for gRPC.
    const NAME: Option<&'static [u8]> = None;
    /// Its name in metrics.
    const TRANSPORT: Transport;

    /// Serves one connection until either side closes it, or [`Seat::end`] asks to close it.
    fn serve(self, stream: impl Stream, peer: SocketAddr, seat: Seat) -> impl Future<Output = ()> + Send;
}

/// A connection with or without TLS.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for S {}

/// All connections of one listener.
#[derive(Debug)]
pub struct Connections {
    /// Signals the stop. The accepting task and every connection hold a receiver, so their number can be awaited.
    stop: watch::Sender<()>,
    accepting: JoinHandle<()>,
}

impl Connections {
    /// Starts to accept connections within the budget, with the TLS certificates of the service.
    pub fn accept(
        listener: TcpListener,
        room: Arc<Room>,
        service: Arc<Service>,
        protocol: impl Protocol,
    ) -> Connections {
        let (stop, stopped) = watch::channel(());
        let accepting = tokio::spawn(accept(listener, room, service, protocol, stopped));
        Connections { stop, accepting }
    }

    /// Stops accepting, and waits up to `grace` for requests in flight. Returns how many connections are still open.
    pub async fn close(self, grace: Duration) -> usize {
        let _ = self.stop.send(());
        let _ = self.accepting.await;
        let _ = tokio::time::timeout(grace, self.stop.closed()).await;
        self.stop.receiver_count()
    }
}

async fn accept<P: Protocol>(
    listener: TcpListener,
    room: Arc<Room>,
    service: Arc<Service>,
    protocol: P,
    mut stopped: watch::Receiver<()>,
) {
    let counts = service.metrics.connections(P::TRANSPORT);
    let (refused, evicted) = (OnceAMinute::default(), OnceAMinute::default());
    let name = P::TRANSPORT.name();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopped.changed() => return,
        };
        let cause = match accepted {
            Ok((stream, peer)) => match room.enter(P::TRANSPORT, &stopped).await {
                Ok(Entered { seat, evicted: made_room }) => {
                    if made_room {
                        counts.evicted.fetch_add(1, Relaxed);
                        evicted.write(|before| {
                            tracing::warn!(
                                "the limit of open {name} connections is reached: closing idle ones for new ones \
                                 ({before} more since the last such line)"
                            );
                        });
                    }
                    // Responses are small and written at once: Nagle's algorithm would only delay them.
                    let _ = stream.set_nodelay(true);
                    counts.open.fetch_add(1, Relaxed);
                    tokio::spawn(handshake(stream, peer, Arc::clone(&service), protocol.clone(), seat));
                    continue;
                }
                Err(_) => "all allowed connections are in use (raise `ulimit -n`, or add nodes)".to_owned(),
            },
            Err(error) => error.to_string(),
        };
        counts.refused.fetch_add(1, Relaxed);
        refused.write(|before| {
            tracing::warn!(
                "cannot accept a {name} connection: {cause} ({before} more since the last such line)"
            );
        });
        sleep(PAUSE).await;
    }
}

/// Negotiates TLS, if it is configured, then serves the connection.
async fn handshake<P: Protocol>(
    stream: TcpStream,
    peer: SocketAddr,
    service: Arc<Service>,
    protocol: P,
    seat: Seat,
) {
    let accepted = tokio::select! {
        biased;
        accepted = service.acceptor.accept(stream, P::NAME) => Some(accepted),
        () = seat.needed() => None,
    };
    match accepted {
        Some(Ok(tls::Stream::Plain(stream))) => protocol.serve(stream, peer, seat).await,
        // Boxed, so that the task of a connection without TLS does not reserve memory for it.
        Some(Ok(tls::Stream::Tls(stream))) => Box::pin(protocol.serve(stream, peer, seat)).await,
        Some(Err(error)) => tracing::debug!("a TLS handshake failed: {error}"),
        None => tracing::debug!("a TLS handshake was aborted: a new connection needed its seat"),
    }
    service.metrics.connections(P::TRANSPORT).open.fetch_sub(1, Relaxed);
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::transport::http::connection::Http;
    use crate::transport::http::connection::tests::{closed, get_healthz, service};

    async fn listen(most: usize) -> (Connections, SocketAddr, Arc<Service>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = service();
        let room = Room::new(most, &[Transport::Http]);
        let protocol = Http::new(Arc::clone(&service), true);
        (Connections::accept(listener, room, Arc::clone(&service), protocol), address, service)
    }

    #[tokio::test]
    async fn new_connection_without_room_is_closed() {
        let (_connections, address, service) = listen(2).await;
        let mut inside =
            [TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap()];
        for stream in &mut inside {
            get_healthz(stream).await;
        }
        // Neither of them is idle.
        let outside = closed(TcpStream::connect(address).await.unwrap());
        tokio::time::timeout(Duration::from_secs(30), outside).await.expect("the third connection is closed");
        let counts = service.metrics.connections(Transport::Http);
        assert_eq!((counts.open.load(Relaxed), counts.refused.load(Relaxed)), (2, 1));
        let [one, mut other] = inside;
        get_healthz(&mut other).await;
        drop(one);
        loop {
            let mut next = TcpStream::connect(address).await.unwrap();
            next.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
            if next.read(&mut [0]).await.is_ok_and(|count| count > 0) {
                break;
            }
        }
    }

    #[tokio::test]
    async fn idle_connection_makes_room_for_a_new_one() {
        let (_connections, address, service) = listen(2).await;
        let mut busy = TcpStream::connect(address).await.unwrap();
        let mut idle = TcpStream::connect(address).await.unwrap();
        get_healthz(&mut busy).await;
        get_healthz(&mut idle).await;
        let mut new = loop {
            get_healthz(&mut busy).await;
            let mut new = TcpStream::connect(address).await.unwrap();
            new.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
            if new.read(&mut [0; 1 << 10]).await.is_ok_and(|count| count > 0) {
                break new;
            }
        };
        closed(idle).await;
        get_healthz(&mut busy).await;
        get_healthz(&mut new).await;
        assert_eq!(service.metrics.connections(Transport::Http).evicted.load(Relaxed), 1);
    }

    #[tokio::test]
    async fn closing_waits_for_every_connection() {
        let (connections, address, _) = listen(2).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        get_healthz(&mut stream).await;
        assert_eq!(connections.close(Duration::from_secs(60)).await, 0);
        closed(stream).await;
    }
}
