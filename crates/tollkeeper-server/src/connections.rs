//! All connections of a listener: accepted, and closed when their last request is answered.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::connection;
use crate::service::Service;

/// A moment for others to close files, when there are too many.
const BREATH: Duration = Duration::from_millis(50);

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
                tokio::spawn(connection::serve(stream, Arc::clone(&service), stopped.clone()));
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

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;

    use super::*;
    use crate::connection::tests::{ask, ended, service};

    #[tokio::test]
    async fn closing_waits_for_every_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Connections::accept(listener, service());
        let mut stream = TcpStream::connect(address).await.unwrap();
        ask(&mut stream).await;
        assert_eq!(connections.close(Duration::from_secs(60)).await, 0);
        ended(stream).await;
    }
}
