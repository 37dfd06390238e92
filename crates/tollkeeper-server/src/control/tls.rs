//! Plain and TLS connections behind one type: all listeners accept through it, and certificates can be reloaded.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::{Context as _, bail};
use arc_swap::ArcSwap;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoClientAuth, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tollkeeper::config::TlsSettings;

/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Turns TCP connections into streams. Whether they use TLS is fixed at the start; certificates can change.
#[derive(Debug)]
pub struct Acceptor(Option<ArcSwap<ServerConfig>>);

/// An accepted connection. Hot paths match on it once, so that plain connections pay nothing for TLS; other code
/// reads and writes it directly.
#[derive(Debug)]
pub enum Stream {
    /// Without TLS.
    Plain(TcpStream),
    /// With TLS.
    Tls(Box<TlsStream<TcpStream>>),
}

impl Acceptor {
    /// Reads the certificates if TLS is configured.
    pub fn open(settings: Option<&TlsSettings>) -> anyhow::Result<Acceptor> {
        Ok(Acceptor(settings.map(read).transpose()?.map(ArcSwap::new)))
    }

    /// Reads the certificates again; they are used only after [`Renewed::install`].
    pub fn renew(&self, settings: Option<&TlsSettings>) -> anyhow::Result<Renewed<'_>> {
        Ok(match (&self.0, settings) {
            (Some(current), Some(settings)) => Renewed(Some((current, read(settings)?))),
            (None, None) => Renewed(None),
            (Some(_), None) | (None, Some(_)) => {
                tracing::warn!("`tls` was added or removed: restart to apply");
                Renewed(None)
            }
        })
    }

    /// Whether connections use TLS.
    pub fn is_tls(&self) -> bool {
        self.0.is_some()
    }

    /// Performs the TLS handshake, with these ALPN protocols if there are any. It may take up to [`HANDSHAKE`], so call it
    /// outside the accept loop.
    pub async fn accept(&self, stream: TcpStream, protocols: &[&[u8]]) -> io::Result<Stream> {
        let Some(current) = &self.0 else { return Ok(Stream::Plain(stream)) };
        let mut config = current.load_full();
        if !protocols.is_empty() {
            // The clone copies a few pointers, which is negligible compared with a handshake.
            Arc::make_mut(&mut config).alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        }
        let handshake = TlsAcceptor::from(config).accept(stream);
        let stream = tokio::time::timeout(HANDSHAKE, handshake).await??;
        Ok(Stream::Tls(Box::new(stream)))
    }
}

/// Certificates that were read and are not used yet.
#[derive(Debug)]
#[must_use = "the certificates are not used before `install`"]
pub struct Renewed<'a>(Option<(&'a ArcSwap<ServerConfig>, Arc<ServerConfig>)>);

impl Renewed<'_> {
    /// Uses them for every connection accepted from now on.
    pub fn install(self) {
        if let Some((current, new)) = self.0 {
            current.store(new);
        }
    }
}

fn read(settings: &TlsSettings) -> anyhow::Result<Arc<ServerConfig>> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let clients = match &settings.client_ca {
        None => Arc::new(NoClientAuth),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates("tls.client_ca", path)? {
                roots.add(certificate).with_context(|| format!("tls.client_ca: {}", path.display()))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), Arc::clone(&provider));
            verifier.build().with_context(|| format!("tls.client_ca: {}", path.display()))?
        }
    };
    let chain = certificates("tls.cert", &settings.cert)?;
    let key = PrivateKeyDer::from_pem_file(&settings.key)
        .with_context(|| format!("tls.key: no private key can be read from {}", settings.key.display()))?;
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider knows TLS 1.2 and 1.3")
        .with_client_cert_verifier(clients)
        .with_single_cert(chain, key)
        .with_context(|| {
            format!(
                "tls.key: {} does not match the certificate in {}",
                settings.key.display(),
                settings.cert.display()
            )
        })?;
    Ok(Arc::new(config))
}

/// The TLS config of a client that trusts these CA certificates, or those of the system, and presents a certificate if
/// it has one with its key. `names` are those of the three settings in errors.
pub(crate) fn client_config(
    ca: Option<&Path>,
    identity: Option<(&Path, &Path)>,
    names: [&str; 3],
) -> anyhow::Result<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    match ca {
        Some(path) => {
            for certificate in certificates(names[0], path)? {
                roots.add(certificate).with_context(|| format!("{}: {}", names[0], path.display()))?;
            }
        }
        // Unreadable certificates are skipped. If none is left, no server is trusted, and that error gives advice.
        None => drop(roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs)),
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider knows TLS 1.2 and 1.3")
        .with_root_certificates(roots);
    let Some((cert, key)) = identity else { return Ok(Arc::new(config.with_no_client_auth())) };
    let chain = certificates(names[1], cert)?;
    let private = PrivateKeyDer::from_pem_file(key)
        .with_context(|| format!("{}: no private key can be read from {}", names[2], key.display()))?;
    let config = config.with_client_auth_cert(chain, private).with_context(|| {
        format!("{}: {} does not match the certificate in {}", names[2], key.display(), cert.display())
    })?;
    Ok(Arc::new(config))
}

/// The certificates in a PEM file; `key` names the setting in errors.
pub(crate) fn certificates(key: &str, path: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let unreadable = || format!("{key}: no certificate can be read from {}", path.display());
    let read = CertificateDer::pem_file_iter(path).with_context(unreadable)?;
    let list: Vec<_> = read.collect::<Result<_, _>>().with_context(unreadable)?;
    if list.is_empty() {
        bail!("{}: it has no PEM block `-----BEGIN CERTIFICATE-----`", unreadable());
    }
    Ok(list)
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Stream::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Stream::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_flush(context),
            Stream::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Stream::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Stream::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
