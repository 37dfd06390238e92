//! The addresses that the server listens on, and how the config file writes them.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use super::excerpt::quoted;

/// The listener of each transport; `None` where the file has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listen {
    /// The HTTP API.
    pub http: Option<Listener>,
    /// The rate limit service for Envoy.
    pub grpc: Option<Listener>,
    /// The Redis protocol.
    pub resp: Option<Listener>,
    /// The reverse proxy.
    pub proxy: Option<Listener>,
}

/// The listener of one transport.
///
/// ```
/// use tollkeeper::config::Listener;
///
/// assert_eq!("off".parse(), Ok(Listener::Off));
/// assert_eq!("127.0.0.1:8080".parse(), Ok(Listener::At(([127, 0, 0, 1], 8080).into())));
/// let error = "localhost:8080".parse::<Listener>().unwrap_err();
/// assert_eq!(error.to_string(), "`localhost:8080` is not an address with a port (try `127.0.0.1:8080`)");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listener {
    /// The transport is turned off.
    Off,
    /// An address to listen on; port 0 picks a free port.
    At(SocketAddr),
}

impl FromStr for Listener {
    type Err = InvalidListener;

    fn from_str(text: &str) -> Result<Listener, InvalidListener> {
        if text == "off" {
            return Ok(Listener::Off);
        }
        text.parse().map(Listener::At).map_err(|_| InvalidListener(text.to_owned()))
    }
}

impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listener::Off => f.write_str("off"),
            Listener::At(address) => write!(f, "{address}"),
        }
    }
}

/// A text that is neither an address with a port nor `off`.
#[derive(Clone, PartialEq, Eq)]
pub struct InvalidListener(String);

impl fmt::Display for InvalidListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.as_str();
        let (host, port) = text.rsplit_once(':').unwrap_or(("", text));
        let port = port.parse::<u16>().ok();
        write!(f, "{} is not an address with a port (", quoted(text))?;
        match (host, port) {
            ("" | "localhost", Some(port)) => write!(f, "try `127.0.0.1:{port}`)"),
            ("*", Some(port)) => write!(f, "for all addresses of the machine, `0.0.0.0:{port}`)"),
            _ => f.write_str("such as `127.0.0.1:8080` or `[::1]:8080`, or `off`)"),
        }
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for InvalidListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for InvalidListener {}
