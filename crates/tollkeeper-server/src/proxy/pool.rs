//! Idle connections to one address of the upstream.

use std::sync::{Arc, Mutex, PoisonError};

use hyper::client::conn::{http1, http2};
use tokio::time::Instant;

use super::counters::{Counted, Counters};
use super::upload::LimitedUpload;

/// A connection to the upstream that a request can be sent on.
#[derive(Debug)]
pub enum Sender {
    /// One request at a time.
    Http1(http1::SendRequest<LimitedUpload>),
    /// Many requests at a time.
    Http2(http2::SendRequest<LimitedUpload>),
}

/// The idle connections to one address.
#[derive(Debug)]
pub struct Pool {
    connections: Mutex<Connections>,
    counters: Arc<Counters>,
}

#[derive(Debug, Default)]
struct Connections {
    /// The one used last is used next, so that the others can expire.
    idle: Vec<Idle>,
    /// All requests share one HTTP/2 connection.
    http2: Option<http2::SendRequest<LimitedUpload>>,
}

#[derive(Debug)]
struct Idle {
    sender: http1::SendRequest<LimitedUpload>,
    until: Instant,
    _counted: Counted,
}

impl Pool {
    /// An empty pool.
    pub fn new(counters: Arc<Counters>) -> Pool {
        Pool { connections: Mutex::default(), counters }
    }

    /// A connection that is open, as far as this side knows.
    pub fn take(&self) -> Option<Sender> {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = &connections.http2 {
            if !sender.is_closed() {
                return Some(Sender::Http2(sender.clone()));
            }
            connections.http2 = None;
        }
        while let Some(Idle { sender, until, .. }) = connections.idle.pop() {
            if !sender.is_closed() && until > Instant::now() {
                return Some(Sender::Http1(sender));
            }
        }
        None
    }

    /// Keeps a connection for the next request, until a given time.
    pub fn put(&self, sender: http1::SendRequest<LimitedUpload>, until: Instant) {
        if sender.is_closed() {
            return;
        }
        let counted = Counted::new(&self.counters, |counters| &counters.upstream_idle);
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.idle.push(Idle { sender, until, _counted: counted });
    }

    /// Shares an HTTP/2 connection with all later requests.
    pub fn share(&self, sender: http2::SendRequest<LimitedUpload>) {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner).http2 = Some(sender);
    }

    /// Closes the connections that have been idle for too long.
    pub fn close_expired(&self) {
        let now = Instant::now();
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.idle.retain(|idle| idle.until > now && !idle.sender.is_closed());
    }
}
