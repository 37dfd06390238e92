//! Accepts the connections of a listener, negotiates TLS, and closes them gracefully when the server stops.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use socket2::{SockFilter, SockRef};
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
/// How long handshakes that have begun may take before a listener closes; shorter than the second after which a client
/// repeats a SYN packet, so that a client waits only once.
const HANDSHAKES: Duration = Duration::from_millis(500);

/// A protocol that a listener serves.
pub trait Protocol: Clone + Send + Sync + 'static {
    /// The ALPN names that it offers, if its clients require one: `h2` for gRPC.
    const ALPN: &'static [&'static [u8]] = &[];
    /// Its name in metrics.
    const TRANSPORT: Transport;

    /// The most connections that it may have. Further ones are closed at once.
    fn most_connections(&self) -> usize {
        usize::MAX
    }

    /// Reads what comes before TLS, and returns the address of the client; `None` closes the connection.
    fn prepare(
        &self,
        stream: TcpStream,
        peer: SocketAddr,
    ) -> impl Future<Output = Option<(TcpStream, SocketAddr)>> + Send {
        std::future::ready(Some((stream, peer)))
    }

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
    // Connections get a receiver that has not seen the stop, even those that are accepted after it.
    let (unstopped, [refused, evicted]) = (stopped.clone(), Default::default());
    let door = Door { room, service, protocol, unstopped, refused, evicted };
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopped.changed() => break,
        };
        let admitted = match accepted {
            Ok((stream, peer)) => door.admit(stream, peer).await,
            Err(error) => Err(error.to_string()),
        };
        if let Err(cause) = admitted {
            door.refuse(&cause);
            sleep(PAUSE).await;
        }
    }
    // With `SO_REUSEPORT` another process may listen on this port: leave new clients to it before closing.
    if SockRef::from(&listener).reuse_port().unwrap_or(false) {
        leave_new_clients(&listener);
        let mut closing = pin!(sleep(HANDSHAKES));
        loop {
            let accepted = tokio::select! {
                () = &mut closing => break,
                accepted = listener.accept() => accepted,
            };
            if let Ok((stream, peer)) = accepted
                && let Err(cause) = door.admit(stream, peer).await
            {
                door.refuse(&cause);
            }
        }
    }
    // Clients in the queue are connected already: closing the listener would reset them.
    let Ok(listener) = listener.into_std() else { return };
    while let Ok((stream, peer)) = listener.accept() {
        let stream = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream));
        if let Ok(stream) = stream
            && let Err(cause) = door.admit(stream, peer).await
        {
            door.refuse(&cause);
        }
    }
}

/// Makes the kernel drop further SYN packets to this listener, and nothing else.
///
/// Closing a listener resets clients in the middle of their handshake, because the kernel has already chosen this socket for
/// them. With this filter no handshake begins, those under way end within [`HANDSHAKES`], and a client whose SYN was dropped
/// sends it again after a second, when only the other process listens.
fn leave_new_clients(listener: &TcpListener) {
    // The bytes that the filter sees begin with the TCP header; byte 13 has the flags.
    const LOAD_BYTE: u16 = 0x30;
    const AND: u16 = 0x54;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    const SYN: u32 = 0x02;
    const ACK: u32 = 0x10;
    let filter = [
        SockFilter::new(LOAD_BYTE, 0, 0, 13),
        SockFilter::new(AND, 0, 0, SYN | ACK),
        SockFilter::new(JUMP_IF_EQUAL, 0, 1, SYN),
        SockFilter::new(RETURN, 0, 0, 0),
        SockFilter::new(RETURN, 0, 0, u32::MAX),
    ];
    if let Err(error) = SockRef::from(listener).attach_filter(&filter) {
        tracing::warn!(
            "clients that connect while this listener closes may be reset: no socket filter ({error})"
        );
    }
}

/// Admits connections within the budget.
struct Door<P> {
    room: Arc<Room>,
    service: Arc<Service>,
    protocol: P,
    unstopped: watch::Receiver<()>,
    refused: OnceAMinute,
    evicted: OnceAMinute,
}

impl<P: Protocol> Door<P> {
    /// Starts to serve a connection; the error says why there is no room for it.
    async fn admit(&self, stream: TcpStream, peer: SocketAddr) -> Result<(), String> {
        let counts = self.service.metrics.connections(P::TRANSPORT);
        let name = P::TRANSPORT.name();
        let most = self.protocol.most_connections();
        if self.room.open(P::TRANSPORT) >= most {
            // Counted before the client sees the end of its connection.
            self.refuse(&format!("all {most} are in use (raise `{name}.max_connections`)"));
            drop(stream);
            return Ok(());
        }
        let Ok(Entered { seat, evicted }) = self.room.enter(P::TRANSPORT, &self.unstopped).await else {
            return Err("all allowed connections are in use (raise `ulimit -n`, or add nodes)".to_owned());
        };
        if evicted {
            counts.evicted.fetch_add(1, Relaxed);
            self.evicted.write(|before| {
                tracing::warn!(
                    "the limit of open {name} connections is reached: closing idle ones for new ones ({before} more \
                     since the last such line)"
                );
            });
        }
        // Responses are small and written at once: Nagle's algorithm would only delay them.
        let _ = stream.set_nodelay(true);
        let open = OpenConnection::new(&self.service, P::TRANSPORT);
        tokio::spawn(handshake(stream, peer, open, self.protocol.clone(), seat));
        Ok(())
    }

    fn refuse(&self, cause: &str) {
        self.service.metrics.connections(P::TRANSPORT).refused.fetch_add(1, Relaxed);
        self.refused.write(|before| {
            tracing::warn!(
                "cannot accept a {} connection: {cause} ({before} more since the last such line)",
                P::TRANSPORT.name()
            );
        });
    }
}

/// Counts a connection as open until this is dropped, even if serving it panics.
struct OpenConnection {
    service: Arc<Service>,
    transport: Transport,
}

impl OpenConnection {
    fn new(service: &Arc<Service>, transport: Transport) -> OpenConnection {
        service.metrics.connections(transport).open.fetch_add(1, Relaxed);
        OpenConnection { service: Arc::clone(service), transport }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.service.metrics.connections(self.transport).open.fetch_sub(1, Relaxed);
    }
}

/// Negotiates TLS, if it is configured, then serves the connection.
async fn handshake<P: Protocol>(
    stream: TcpStream,
    peer: SocketAddr,
    open: OpenConnection,
    protocol: P,
    seat: Seat,
) {
    let accepted = async {
        let (stream, peer) = protocol.prepare(stream, peer).await?;
        Some((open.service.acceptor.accept(stream, P::ALPN).await, peer))
    };
    let accepted = tokio::select! {
        biased;
        accepted = accepted => accepted,
        () = seat.needed() => None,
    };
    let Some((accepted, peer)) = accepted else {
        return tracing::debug!("a connection ended before its first request");
    };
    match accepted {
        Ok(tls::Stream::Plain(stream)) => protocol.serve(stream, peer, seat).await,
        // Boxed, so that the task of a connection without TLS does not reserve memory for it.
        Ok(tls::Stream::Tls(stream)) => Box::pin(protocol.serve(stream, peer, seat)).await,
        Err(error) => tracing::debug!("a TLS handshake failed: {error}"),
    }
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

    /// A protocol that fails on every connection.
    #[derive(Clone)]
    struct Panics;

    impl Protocol for Panics {
        const TRANSPORT: Transport = Transport::Http;

        async fn serve(self, _: impl Stream, _: SocketAddr, _: Seat) {
            panic!("expected by the test");
        }
    }

    #[tokio::test]
    async fn connection_that_panics_is_not_counted_as_open() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = service();
        let room = Room::new(2, &[Transport::Http]);
        let connections = Connections::accept(listener, room, Arc::clone(&service), Panics);
        closed(TcpStream::connect(address).await.unwrap()).await;
        assert_eq!(connections.close(Duration::from_secs(60)).await, 0);
        assert_eq!(service.metrics.connections(Transport::Http).open.load(Relaxed), 0);
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
