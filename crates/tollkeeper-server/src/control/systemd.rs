//! Tells systemd how it goes: one datagram to the socket that it names, for units of `Type=notify`.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::{env, io};

/// What there is to tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Every listener listens.
    Ready,
    /// It drains.
    Stopping,
}

/// Tells, if somebody wants to know.
pub fn tell(state: State) {
    let Some(socket) = env::var_os("NOTIFY_SOCKET") else { return };
    if let Err(error) = send(&socket, state) {
        tracing::warn!("NOTIFY_SOCKET is {}, which cannot be told anything: {error}", socket.display());
    }
}

fn send(socket: &OsStr, state: State) -> io::Result<()> {
    let text = match state {
        State::Ready => "READY=1",
        State::Stopping => "STOPPING=1",
    };
    let address = match socket.as_bytes() {
        // A name that is in no folder.
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(text.as_bytes(), &address)?;
    Ok(())
}
