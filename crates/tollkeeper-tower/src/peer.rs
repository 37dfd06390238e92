//! Who is at the other end of the connection. Servers leave it in the extensions of a request.

use std::net::{IpAddr, SocketAddr};

use http::Extensions;

/// The address of the peer, for servers that are not axum's or tonic's: put it into the extensions of every
/// request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddress(pub SocketAddr);

/// The address that a server has left.
#[inline]
pub(crate) fn of(extensions: &Extensions) -> Option<IpAddr> {
    let peer = extensions.get::<PeerAddress>().map(|PeerAddress(peer)| peer.ip());
    #[cfg(feature = "axum")]
    let peer = peer.or_else(|| {
        use axum::extract::ConnectInfo;
        use axum::extract::connect_info::MockConnectInfo;
        let real = extensions.get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(peer)| peer.ip());
        // For tests without a server, as axum's own extractor does it.
        let mock = || extensions.get::<MockConnectInfo<SocketAddr>>().map(|MockConnectInfo(peer)| peer.ip());
        real.or_else(mock)
    });
    #[cfg(feature = "tonic")]
    let peer = peer.or_else(|| {
        use tonic::transport::server::TcpConnectInfo;
        extensions.get::<TcpConnectInfo>()?.remote_addr().map(|peer| peer.ip())
    });
    peer
}

/// The route that a router has matched.
pub(crate) fn matched(extensions: &Extensions) -> Option<&str> {
    #[cfg(feature = "axum")]
    return extensions.get::<axum::extract::MatchedPath>().map(|path| path.as_str());
    #[cfg(not(feature = "axum"))]
    {
        let _ = extensions;
        None
    }
}
