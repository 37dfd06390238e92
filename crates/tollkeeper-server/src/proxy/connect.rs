//! Opens connections to an address of the upstream: TCP or a Unix socket, TLS, HTTP/1.1 or HTTP/2.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use anyhow::Context as _;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tollkeeper::Span;
use tollkeeper::config::{ProxySettings, UpstreamProtocol};

use super::counters::{Counted, Counters};
use super::error::UpstreamError;
use super::target::{Location, UpstreamUrl};
use super::upload::LimitedUpload;
use crate::control::tls;

/// The files of `--upstream-ca`, `--upstream-cert` and `--upstream-key`.
#[derive(Clone, Debug, Default)]
pub struct TlsFiles {
    /// CA certificates to trust instead of those of the system.
    pub ca: Option<PathBuf>,
    /// The client certificate and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// How often an HTTP/2 connection is checked by a ping.
const PING_INTERVAL: Duration = Duration::from_secs(10);

/// One address of the upstream.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Endpoint {
    /// An IP address and a port.
    Tcp(std::net::SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Tcp(address) => write!(f, "{address}"),
            Endpoint::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A new connection.
#[derive(Debug)]
pub enum Opened {
    /// Over HTTP/1.1.
    Http1(http1::SendRequest<LimitedUpload>),
    /// Over HTTP/2.
    Http2(http2::SendRequest<LimitedUpload>),
}

/// Opens connections to one upstream.
#[derive(Debug)]
pub struct Connector {
    tls: Option<(ServerName<'static>, Arc<ClientConfig>)>,
    counters: Arc<Counters>,
}

impl Connector {
    /// Reads the certificates, if the upstream uses TLS.
    pub fn new(target: &UpstreamUrl, files: &TlsFiles, counters: Arc<Counters>) -> anyhow::Result<Connector> {
        let tls = match &target.location {
            Location::Host(host, _) if target.tls => {
                let name = ServerName::try_from(host.clone()).with_context(|| {
                    format!("invalid TLS server name `{host}`: use a DNS name or an IP address")
                })?;
                let identity = files.identity.as_ref().map(|(cert, key)| (cert.as_path(), key.as_path()));
                let names = ["--upstream-ca", "--upstream-cert", "--upstream-key"];
                Some((name, tls::client_config(files.ca.as_deref(), identity, names)?))
            }
            _ => None,
        };
        Ok(Connector { tls, counters })
    }

    /// Opens a connection within the connect timeout; with `only_http1`, HTTP/2 is not negotiated.
    pub async fn open(
        &self,
        endpoint: &Endpoint,
        settings: &ProxySettings,
        only_http1: bool,
    ) -> Result<Opened, UpstreamError> {
        let protocol = if only_http1 { UpstreamProtocol::Http1 } else { settings.upstream_protocol };
        let connecting = self.connect(endpoint, settings, protocol);
        match tokio::time::timeout(settings.connect_timeout, connecting).await {
            Ok(Ok(opened)) => Ok(opened),
            Ok(Err(error)) => {
                tracing::debug!("cannot connect to the upstream at {endpoint}: {error}");
                Err(UpstreamError::Connect)
            }
            Err(_) => {
                let timeout = Span::from(settings.connect_timeout);
                tracing::debug!("cannot connect to the upstream at {endpoint} within {timeout}");
                Err(UpstreamError::ConnectTimeout)
            }
        }
    }

    async fn connect(
        &self,
        endpoint: &Endpoint,
        settings: &ProxySettings,
        protocol: UpstreamProtocol,
    ) -> io::Result<Opened> {
        let is_http2 = protocol == UpstreamProtocol::Http2;
        let stream = match endpoint {
            Endpoint::Unix(path) => {
                return self.handshake(UnixStream::connect(path).await?, settings, is_http2).await;
            }
            Endpoint::Tcp(address) => TcpStream::connect(address).await?,
        };
        // hyper writes a head and a small body at once: Nagle's algorithm would only delay the rest.
        stream.set_nodelay(true)?;
        let Some((name, config)) = &self.tls else {
            return self.handshake(stream, settings, is_http2).await;
        };
        let mut config = Arc::clone(config);
        Arc::make_mut(&mut config).alpn_protocols = match protocol {
            UpstreamProtocol::Auto => vec![b"h2".to_vec(), b"http/1.1".to_vec()],
            UpstreamProtocol::Http1 => vec![b"http/1.1".to_vec()],
            UpstreamProtocol::Http2 => vec![b"h2".to_vec()],
        };
        let stream = TlsConnector::from(config).connect(name.clone(), stream).await?;
        let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        self.handshake(stream, settings, is_http2).await
    }

    /// Starts HTTP on a stream. A task drives the connection until it is closed.
    async fn handshake(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        settings: &ProxySettings,
        is_http2: bool,
    ) -> io::Result<Opened> {
        let stream = TokioIo::new(stream);
        let counted = Counted::new(&self.counters, |counters| &counters.upstream_connections);
        if is_http2 {
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder.timer(TokioTimer::new());
            // A connection to a host that has vanished would stay open: all requests share it, so none would be answered.
            builder.keep_alive_interval(PING_INTERVAL).keep_alive_while_idle(true);
            builder.keep_alive_timeout(settings.connect_timeout);
            builder.max_header_list_size(u32::try_from(settings.max_headers).unwrap_or(u32::MAX));
            let (sender, connection) = builder.handshake(stream).await.map_err(io::Error::other)?;
            tokio::spawn(async move {
                let _counted = counted;
                if let Err(error) = connection.await {
                    tracing::debug!("an HTTP/2 connection to the upstream failed: {error}");
                }
            });
            return Ok(Opened::Http2(sender));
        }
        let mut builder = http1::Builder::new();
        builder.max_buf_size(settings.max_headers);
        let (sender, connection) = builder.handshake(stream).await.map_err(io::Error::other)?;
        tokio::spawn(async move {
            let _counted = counted;
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!("a connection to the upstream failed: {error}");
            }
        });
        Ok(Opened::Http1(sender))
    }
}

#[cfg(test)]
mod tests {
    use tollkeeper::config::{Config, Format};

    use super::*;

    /// A host that has vanished answers no ping.
    #[tokio::test(start_paused = true)]
    async fn http2_connection_without_pongs_is_closed() {
        let parsed = Config::parse("tollkeeper.yaml", Format::Yaml, b"limits: []\n", &|_| None);
        let settings = parsed.expect("a valid config").0.proxy;
        let connector = Connector { tls: None, counters: Arc::default() };
        let (here, there) = tokio::io::duplex(64 << 10);
        let (opened, _silent) =
            tokio::join!(connector.handshake(here, &settings, true), h2::server::handshake(there));
        let Opened::Http2(sender) = opened.expect("HTTP/2") else { panic!("HTTP/2 was asked for") };
        // Time passes only while all tasks wait.
        tokio::time::timeout(Duration::from_secs(60), async {
            while !sender.is_closed() {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        })
        .await
        .expect("the connection is closed");
    }
}
