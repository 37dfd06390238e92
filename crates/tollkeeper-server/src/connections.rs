//! All connections of a listener: accepted, and closed when their last request is answered.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::service::Service;
use crate::tls;

/// A moment for others to close files, when there are too many.
const BREATH: Duration = Duration::from_millis(50);

/// What is spoken over a connection.
pub trait Protocol: Clone + Send + Sync + 'static {
    /// Serves one connection until either side ends it, or soon after it is told to stop.
    fn serve(self, stream: impl Stream, stopped: watch::Receiver<()>) -> impl Future<Output = ()> + Send;
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
        let (stop, stopped) = watch::channel(());
        Connections { stop, accepting: tokio::spawn(accept(listener, service, protocol, stopped)) }
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
    protocol: impl Protocol,
    mut stopped: watch::Receiver<()>,
) {
    let mut said: Option<Instant> = None;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopped.changed() => return,
        };
        match accepted {
            Ok((stream, _)) => {
                // Answers are small and written at once: waiting to fill a packet would only delay them.
                let _ = stream.set_nodelay(true);
                tokio::spawn(greet(stream, Arc::clone(&service), protocol.clone(), stopped.clone()));
            }
            Err(error) => {
                // Of twenty attempts a second one says enough.
                if said.is_none_or(|said| said.elapsed() >= SAYS_EVERY) {
                    tracing::warn!("cannot accept a connection: {error}");
                    said = Some(Instant::now());
                }
                sleep(BREATH).await;
            }
        }
    }
}

/// Agrees on how to speak, then serves.
async fn greet(
    stream: TcpStream,
    service: Arc<Service>,
    protocol: impl Protocol,
    stopped: watch::Receiver<()>,
) {
    match service.acceptor.accept(stream).await {
        Ok(tls::Stream::Plain(stream)) => protocol.serve(stream, stopped).await,
        // A box, so that a connection without TLS takes no room for one with it.
        Ok(tls::Stream::Tls(stream)) => Box::pin(protocol.serve(stream, stopped)).await,
        Err(error) => tracing::debug!("a connection ended before TLS began: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::Http;
    use crate::connection::tests::{ask, ended, service};

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
