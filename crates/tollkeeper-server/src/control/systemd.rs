//! Notifies systemd of readiness and shutdown (`Type=notify`): one datagram to `NOTIFY_SOCKET`.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::{env, io};

/// The state to report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceState {
    /// All listeners accept connections.
    Ready,
    /// The server drains.
    Stopping,
}

/// Reports the state to systemd, if it set `NOTIFY_SOCKET`.
pub fn notify(state: ServiceState) {
    let Some(socket) = env::var_os("NOTIFY_SOCKET") else { return };
    if let Err(error) = send(&socket, state) {
        tracing::warn!("cannot notify systemd at {} (NOTIFY_SOCKET): {error}", socket.display());
    }
}

fn send(socket: &OsStr, state: ServiceState) -> io::Result<()> {
    let text = match state {
        ServiceState::Ready => "READY=1",
        ServiceState::Stopping => "STOPPING=1",
    };
    let address = match socket.as_bytes() {
        // An abstract socket name, which is not a path.
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(text.as_bytes(), &address)?;
    Ok(())
}
