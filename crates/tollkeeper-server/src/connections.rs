//! Connections: accepted, served, and closed when their last request is answered.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::http;
use crate::service::Service;

/// How long a connection may take to say what it wants, idle time included.
const HEADERS: Duration = Duration::from_secs(75);
/// As much of a head as is read before it is complete.
const BUFFER: usize = 16 << 10;
/// A moment for others to close files, when there are too many.
const BREATH: Duration = Duration::from_millis(50);

/// All connections of one listener.
#[derive(Debug)]
pub struct Connections {
    stop: oneshot::Sender<()>,
    accepting: JoinHandle<GracefulShutdown>,
}

impl Connections {
    /// Begins to accept.
    pub fn accept(listener: TcpListener, service: Arc<Service>) -> Connections {
        let (stop, stopped) = oneshot::channel();
        Connections { stop, accepting: tokio::spawn(accept(listener, service, stopped)) }
    }

    /// Accepts no more, and lets requests in flight finish for so long; says how many could not.
    pub async fn close(self, patience: Duration) -> usize {
        let _ = self.stop.send(());
        let Ok(connections) = self.accepting.await else { return 0 };
        let left = connections.count();
        match tokio::time::timeout(patience, connections.shutdown()).await {
            Ok(()) => 0,
            Err(_) => left,
        }
    }
}

async fn accept(
    listener: TcpListener,
    service: Arc<Service>,
    mut stopped: oneshot::Receiver<()>,
) -> GracefulShutdown {
    let connections = GracefulShutdown::new();
    let mut protocol = http1::Builder::new();
    protocol.timer(TokioTimer::new()).header_read_timeout(HEADERS).max_buf_size(BUFFER);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = &mut stopped => return connections,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(BREATH).await;
                continue;
            }
        };
        // Answers are small and written at once: waiting to fill a packet would only delay them.
        let _ = stream.set_nodelay(true);
        let service = Arc::clone(&service);
        let answer = service_fn(move |request| {
            let service = Arc::clone(&service);
            async move { Ok::<_, Infallible>(http::answer(service, request).await) }
        });
        let connection = connections.watch(protocol.serve_connection(TokioIo::new(stream), answer));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!("a connection ended: {error}");
            }
        });
    }
}
