//! Serves the connections of clients: HTTP/1.1 and HTTP/2, after the PROXY protocol and TLS where they are configured.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::TcpStream;
use tollkeeper::config::ProxySettings;
use tollkeeper_tower::address;

use super::Proxy;
use super::client::{ClientConnection, ClientStream};
use super::counters::Counted;
use super::handler::handle;
use super::proxy_protocol;
use super::stream_watch::StreamExecutor;
use crate::transport::connection_budget::{End, Seat, Transport};
use crate::transport::listener::{Protocol, Stream};

/// How long a connection that has not sent a request yet may still do so when the proxy stops.
const FIRST_REQUEST: Duration = Duration::from_secs(1);
/// The most requests that one HTTP/2 connection may have at the same time.
const MAX_STREAMS: u32 = 256;

/// The protocol of the proxy's listener.
#[derive(Clone, Debug)]
pub struct ProxyListener(pub Arc<Proxy>);

impl Protocol for ProxyListener {
    const ALPN: &'static [&'static [u8]] = &[b"h2", b"http/1.1"];
    const TRANSPORT: Transport = Transport::Proxy;

    fn most_connections(&self) -> usize {
        self.0.active.load().settings.max_connections
    }

    async fn prepare(&self, mut stream: TcpStream, peer: SocketAddr) -> Option<(TcpStream, SocketAddr)> {
        let active = self.0.active.load_full();
        if !active.settings.accept_proxy_protocol {
            return Some((stream, peer));
        }
        let client = if address::is_trusted(peer.ip().to_canonical(), &active.http.trusted_proxies) {
            proxy_protocol::read(&mut stream).await.map_err(|error| error.to_string())
        } else {
            Err("a client must be in `http.trusted_proxies`".to_owned())
        };
        match client {
            Ok(client) => Some((stream, client.unwrap_or(peer))),
            Err(error) => {
                self.0.closed.write(|before| {
                    tracing::warn!(
                        "closed a connection from {peer}: with `proxy.accept_proxy_protocol`, {error} ({before} more since \
                         the last such line)"
                    );
                });
                None
            }
        }
    }

    async fn serve(self, stream: impl Stream, peer: SocketAddr, seat: Seat) {
        self.0.serve(stream, peer, seat).await;
    }
}

impl Proxy {
    async fn serve(self: Arc<Proxy>, stream: impl Stream, peer: SocketAddr, mut seat: Seat) {
        let _counted = Counted::new(&self.counters, |counters| &counters.client_connections);
        let active = self.active.load_full();
        let (tls, counters) = (self.service.acceptor.is_tls(), Arc::clone(&self.counters));
        let client = Arc::new(ClientConnection::new(peer, tls, seat.user(), counters));
        let stream = TokioIo::new(ClientStream::new(stream, Arc::clone(&client), &active.settings));
        let service = service_fn(|request| handle(Arc::clone(&self), Arc::clone(&client), request));
        let builder = builder(&active.settings);
        let mut connection = pin!(builder.serve_connection_with_upgrades(stream, service));
        // The first request may be on its way: a connection without one stays open for `FIRST_REQUEST`.
        let mut last_chance = None;
        loop {
            let no_request = async {
                match last_chance {
                    Some(until) => tokio::time::sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                ended = connection.as_mut() => {
                    if let Err(error) = ended {
                        tracing::debug!("a connection of a client failed: {error}");
                    }
                    break;
                }
                end = seat.end() => match end {
                    End::MakeRoom if !client.is_busy() => return,
                    End::Stop if client.requests.load(Relaxed) == 0 => {
                        last_chance = Some(tokio::time::Instant::now() + FIRST_REQUEST);
                    }
                    End::Stop | End::MakeRoom => connection.as_mut().graceful_shutdown(),
                },
                () = no_request => {
                    last_chance = None;
                    connection.as_mut().graceful_shutdown();
                }
            }
        }
        // The seat is taken until the tunnel has ended, so that stopping waits for it.
        if let Some(tunnel) = client.take_tunnel() {
            let _ = tunnel.await;
        }
    }
}

fn builder(settings: &ProxySettings) -> auto::Builder<StreamExecutor> {
    let max_headers = settings.max_headers;
    let mut builder = auto::Builder::new(StreamExecutor { longest_pause: settings.body_idle_timeout });
    // `ClientStream` has the timeouts. hyper's timeout for heads would also close idle connections.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(None).max_buf_size(max_headers);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(u32::try_from(max_headers).unwrap_or(u32::MAX));
    builder
}
