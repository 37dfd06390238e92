//! Reads what servers and routers leave in the extensions of a request: the peer's address and the matched route.

use std::net::SocketAddr;

use http::Extensions;
use tollkeeper_core::net::CanonicalIp;

/// The peer's address: the other end of the TCP connection. A server other than axum's or tonic's must insert it into
/// the extensions of every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddress(pub SocketAddr);

/// The peer's address, if the server has inserted it.
#[inline]
pub(crate) fn of(extensions: &Extensions) -> Option<CanonicalIp> {
    let peer = extensions.get::<PeerAddress>().map(|PeerAddress(peer)| peer.ip().into());
    #[cfg(feature = "axum")]
    let peer = peer.or_else(|| {
        use axum::extract::ConnectInfo;
        use axum::extract::connect_info::MockConnectInfo;
        let real = extensions.get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(peer)| peer.ip().into());
        // For tests without a server; axum's own extractor also prefers the real address.
        let mock =
            || extensions.get::<MockConnectInfo<SocketAddr>>().map(|MockConnectInfo(peer)| peer.ip().into());
        real.or_else(mock)
    });
    #[cfg(feature = "tonic")]
    let peer = peer.or_else(|| {
        use tonic::transport::server::TcpConnectInfo;
        extensions.get::<TcpConnectInfo>()?.remote_addr().map(|peer| peer.ip().into())
    });
    peer
}

/// The route pattern that axum's router has matched, such as `/users/{id}`.
pub(crate) fn matched(extensions: &Extensions) -> Option<&str> {
    #[cfg(feature = "axum")]
    return extensions.get::<axum::extract::MatchedPath>().map(|path| path.as_str());
    #[cfg(not(feature = "axum"))]
    {
        let _ = extensions;
        None
    }
}
