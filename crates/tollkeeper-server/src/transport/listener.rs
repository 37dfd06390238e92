//! Accepts the connections of a listener, and closes them when their last request is answered.

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

/// Pause after a connection that could not be accepted, so that open connections keep being served.
const PAUSE: Duration = Duration::from_millis(50);

/// What is spoken over a connection.
pub trait Protocol: Clone + Send + Sync + 'static {
    /// Its name in TLS, where its clients insist on one.
    const NAME: Option<&'static [u8]> = None;
    /// Its name in metrics.
    const TRANSPORT: Transport;

    /// Serves one connection until either side ends it, or soon after its seat says so.
    fn serve(self, stream: impl Stream, peer: SocketAddr, seat: Seat) -> impl Future<Output = ()> + Send;
}

/// A connection, through TLS or not.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for S {}

/// All connections of one listener.
#[derive(Debug)]
pub struct Connections {
    /// Says when to stop. The accepting task and every connection hold a receiver.
    stop: watch::Sender<()>,
    accepting: JoinHandle<()>,
}

impl Connections {
    /// Begins to accept as many as have room, with the certificates of this service.
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

    /// Accepts no more, and lets requests in flight finish for so long; says how many could not.
    pub async fn close(self, patience: Duration) -> usize {
        let _ = self.stop.send(());
        let _ = self.accepting.await;
        let _ = tokio::time::timeout(patience, self.stop.closed()).await;
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
        let trouble = match accepted {
            Ok((stream, peer)) => match room.enter(P::TRANSPORT, &stopped).await {
                Ok(Entered { seat, evicted: made_room }) => {
                    if made_room {
                        counts.evicted.fetch_add(1, Relaxed);
                        evicted.write(|before| {
                            tracing::warn!(
                                "all {name} connections that may be open are: idle ones are closed for new ones \
                                 ({before} more since the last such line)"
                            );
                        });
                    }
                    // Answers are small and written at once: waiting to fill a packet would only delay them.
                    let _ = stream.set_nodelay(true);
                    counts.open.fetch_add(1, Relaxed);
                    tokio::spawn(greet(stream, peer, Arc::clone(&service), protocol.clone(), seat));
                    continue;
                }
                Err(_) => "all that may be open are in use (raise `ulimit -n`, or add nodes)".to_owned(),
            },
            Err(error) => error.to_string(),
        };
        counts.refused.fetch_add(1, Relaxed);
        refused.write(|before| {
            tracing::warn!(
                "cannot accept a {name} connection: {trouble} ({before} more since the last such line)"
            );
        });
        sleep(PAUSE).await;
    }
}

/// Agrees on how to speak, then serves.
async fn greet<P: Protocol>(
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
        // A box, so that a connection without TLS takes no room for one with it.
        Some(Ok(tls::Stream::Tls(stream))) => Box::pin(protocol.serve(stream, peer, seat)).await,
        Some(Err(error)) => tracing::debug!("a connection ended before TLS began: {error}"),
        None => tracing::debug!("a connection ended before TLS began: another connection needed its seat"),
    }
    service.metrics.connections(P::TRANSPORT).open.fetch_sub(1, Relaxed);
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::transport::http::connection::Http;
    use crate::transport::http::connection::tests::{ask, ended, service};

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
            ask(stream).await;
        }
        // Both have just been used.
        let outside = ended(TcpStream::connect(address).await.unwrap());
        tokio::time::timeout(Duration::from_secs(30), outside).await.expect("it is closed");
        let counts = service.metrics.connections(Transport::Http);
        assert_eq!((counts.open.load(Relaxed), counts.refused.load(Relaxed)), (2, 1));
        let [one, mut other] = inside;
        ask(&mut other).await;
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
        ask(&mut busy).await;
        ask(&mut idle).await;
        let mut new = loop {
            ask(&mut busy).await;
            let mut new = TcpStream::connect(address).await.unwrap();
            new.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
            if new.read(&mut [0; 1 << 10]).await.is_ok_and(|count| count > 0) {
                break new;
            }
        };
        ended(idle).await;
        ask(&mut busy).await;
        ask(&mut new).await;
        assert_eq!(service.metrics.connections(Transport::Http).evicted.load(Relaxed), 1);
    }

    #[tokio::test]
    async fn closing_waits_for_every_connection() {
        let (connections, address, _) = listen(2).await;
        let mut stream = TcpStream::connect(address).await.unwrap();
        ask(&mut stream).await;
        assert_eq!(connections.close(Duration::from_secs(60)).await, 0);
        ended(stream).await;
    }
}
