//! The connections to one address of the upstream that the next request can use.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

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
    Http2(SharedConnection),
}

/// An HTTP/2 connection, which all requests share.
#[derive(Clone, Debug)]
pub struct SharedConnection {
    /// Sends requests.
    pub sender: http2::SendRequest<LimitedUpload>,
    /// The number of the connection in its pool.
    number: u64,
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
    /// The HTTP/2 connection, and until when it is kept if no request uses it.
    http2: Option<(SharedConnection, Instant)>,
    /// How many HTTP/2 connections there have been.
    shared: u64,
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

    /// A connection that is open, as far as this side knows. One of HTTP/2 may be idle for so long after this request.
    pub fn take(&self, only_http1: bool, idle: Duration) -> Option<Sender> {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.http2.take_if(|(shared, _)| shared.sender.is_closed());
        if let Some((shared, until)) = connections.http2.as_mut().filter(|_| !only_http1) {
            *until = Instant::now() + idle;
            return Some(Sender::Http2(shared.clone()));
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
    pub fn share(&self, sender: http2::SendRequest<LimitedUpload>, idle: Duration) -> SharedConnection {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.shared += 1;
        let shared = SharedConnection { sender, number: connections.shared };
        connections.http2 = Some((shared.clone(), Instant::now() + idle));
        shared
    }

    /// Shares an HTTP/2 connection no longer. It is closed when the requests on it have ended.
    pub fn forget(&self, connection: &SharedConnection) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.http2.take_if(|(shared, _)| shared.number == connection.number);
    }

    /// Closes the connections that have been idle for too long.
    pub fn close_expired(&self) {
        let now = Instant::now();
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.idle.retain(|idle| idle.until > now && !idle.sender.is_closed());
        connections.http2.take_if(|(_, until)| *until <= now);
    }
}
