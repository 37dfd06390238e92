//! All connections of a listener: accepted, and closed when their last request is answered.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::files;
use crate::service::Service;
use crate::tls;

/// A moment for others to close files, when there are too many.
const BREATH: Duration = Duration::from_millis(50);

/// What is spoken over a connection.
pub trait Protocol: Clone + Send + Sync + 'static {
    /// Its name in TLS, where its clients insist on one.
    const NAME: Option<&'static [u8]> = None;

    /// Serves one connection until either side ends it, or soon after it is told to stop.
    fn serve(
        self,
        stream: impl Stream,
        peer: SocketAddr,
        stopped: watch::Receiver<()>,
    ) -> impl Future<Output = ()> + Send;
}

/// A connection, through TLS or not.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for S {}
/// How often it is said that there are too many.
const SAYS_EVERY: Duration = Duration::from_secs(10);

/// All connections of one listener.
#[derive(Debug)]
pub struct Connections {
    /// Says when to stop. Whoever accepts or serves holds a receiver.
    stop: watch::Sender<()>,
    accepting: JoinHandle<()>,
}

impl Connections {
    /// Begins to accept, with the certificates of this service.
    pub fn accept(listener: TcpListener, service: Arc<Service>, protocol: impl Protocol) -> Connections {
        Connections::at_most(files::connections(), listener, service, protocol)
    }

    fn at_most(
        most: usize,
        listener: TcpListener,
        service: Arc<Service>,
        protocol: impl Protocol,
    ) -> Connections {
        let (stop, stopped) = watch::channel(());
        let room = Room { most, taken: stop.clone() };
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

/// How many connections there may be.
struct Room {
    most: usize,
    /// Each of them holds a receiver, and so does whoever accepts.
    taken: watch::Sender<()>,
}

async fn accept(
    listener: TcpListener,
    room: Room,
    service: Arc<Service>,
    protocol: impl Protocol,
    mut stopped: watch::Receiver<()>,
) {
    let mut said: Option<Instant> = None;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopped.changed() => return,
        };
        let trouble = match accepted {
            Ok(_) if room.taken.receiver_count() > room.most => {
                format!("{} are open, and no more are taken", room.most)
            }
            Ok((stream, peer)) => {
                // Answers are small and written at once: waiting to fill a packet would only delay them.
                let _ = stream.set_nodelay(true);
                let (service, protocol) = (Arc::clone(&service), protocol.clone());
                tokio::spawn(greet(stream, peer, service, protocol, stopped.clone()));
                continue;
            }
            Err(error) => error.to_string(),
        };
        // Of twenty a second one says enough.
        if said.is_none_or(|said| said.elapsed() >= SAYS_EVERY) {
            tracing::warn!("cannot accept a connection: {trouble}");
            said = Some(Instant::now());
        }
        // Whoever knocks in vain is not to keep us from those who are inside.
        sleep(BREATH).await;
    }
}

/// Agrees on how to speak, then serves.
async fn greet<P: Protocol>(
    stream: TcpStream,
    peer: SocketAddr,
    service: Arc<Service>,
    protocol: P,
    stopped: watch::Receiver<()>,
) {
    match service.acceptor.accept(stream, P::NAME).await {
        Ok(tls::Stream::Plain(stream)) => protocol.serve(stream, peer, stopped).await,
        // A box, so that a connection without TLS takes no room for one with it.
        Ok(tls::Stream::Tls(stream)) => Box::pin(protocol.serve(stream, peer, stopped)).await,
        Err(error) => tracing::debug!("a connection ended before TLS began: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::connection::Http;
    use crate::connection::tests::{ask, ended, service};

    #[tokio::test]
    async fn no_more_connections_are_taken_than_there_is_room_for() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = service();
        let _connections = Connections::at_most(2, listener, Arc::clone(&service), Http(service));
        let mut inside =
            [TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap()];
        for stream in &mut inside {
            ask(stream).await;
        }
        let outside = ended(TcpStream::connect(address).await.unwrap());
        tokio::time::timeout(Duration::from_secs(30), outside).await.expect("it is turned away");
        let [one, mut other] = inside;
        ask(&mut other).await;
        drop(one);
        loop {
            let mut next = TcpStream::connect(address).await.unwrap();
            next.write_all(b"GET /healthz HTTP/1.1\r\nhost: test\r\n\r\n").await.unwrap();
            if next.read(&mut [0]).await.is_ok_and(|count| count > 0) {
                break;
            }
        }
    }

    #[tokio::test]
    async fn closing_waits_for_every_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = service();
        let connections = Connections::accept(listener, Arc::clone(&service), Http(service));
        let mut stream = TcpStream::connect(address).await.unwrap();
        ask(&mut stream).await;
        assert_eq!(connections.close(Duration::from_secs(60)).await, 0);
        ended(stream).await;
    }
}
