//! The trait for remote stores: like [`Store`](crate::store::Store), but every call can fail.
//!
//! A limiter needs a decision whatever happens, so it does not accept a remote store directly. Wrap it in
//! [`Resilient`](crate::store::Resilient), which falls back to memory.

use std::fmt;
use std::sync::Arc;

use tollkeeper_core::charge::Item;
use tollkeeper_core::{Charge, Key, KeyCorrection, Reply, Slot, Toll};

use crate::store::{Correction, LeaseGrant, LeaseRequest, StoreFuture};

/// The result of a call to a remote store.
pub type RemoteResult<T> = Result<T, Failure>;

/// Decides tolls against shared state in another process. The methods about parts and servers have defaults, which suit
/// a store on one server.
pub trait Remote: fmt::Debug + Send + Sync {
    /// Decides a toll that is not [split](Remote::split), atomically: all its limits are charged, or none. The
    /// returned future must not borrow `toll`.
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, RemoteResult<Reply>>;

    /// Which servers decide a toll.
    fn split(&self, _toll: &Toll) -> Split {
        Split::Whole(Server::default())
    }

    /// Grants units of a key in advance; `None` if this store has no leases. It is never retried. The returned future
    /// must not borrow `request`.
    fn lease(&self, _request: &LeaseRequest) -> StoreFuture<'_, RemoteResult<Option<LeaseGrant>>> {
        StoreFuture::Ready(Ok(None))
    }

    /// Decides a part of a toll, atomically: all its limits are charged, or none.
    fn decide_part(&self, part: &PartialToll) -> StoreFuture<'_, RemoteResult<Reply>> {
        self.decide(&part.toll)
    }

    /// Refunds what a part was charged, because another part was refused. It is not retried.
    fn undo<'a>(&'a self, _part: &'a PartialToll, _reply: &'a Reply) -> StoreFuture<'a, RemoteResult<()>> {
        StoreFuture::Ready(Ok(()))
    }

    /// The server that has the states of all these items; `None` if they are on several.
    fn server_of(&self, _items: &[Item]) -> Option<Server> {
        Some(Server::default())
    }

    /// Refunds a charge or adds to it, at most once for each charge.
    fn correct<'a>(
        &'a self,
        charge: &'a Charge,
        corrections: &'a [KeyCorrection],
    ) -> StoreFuture<'a, RemoteResult<Correction>>;

    /// Releases a slot; false if it was no longer held.
    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>>;

    /// Restarts the time to live of a slot; false if it was no longer held.
    fn renew<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>>;

    /// Deletes the state of a key; false if there was none.
    fn forget<'a>(&'a self, key: Key<'a>) -> StoreFuture<'a, RemoteResult<bool>>;

    /// The number of connections made to a server so far. When it changes, the server is back, and an open breaker
    /// can try it at once. Constant for a store that does not know.
    fn arrivals(&self, _server: &Server) -> u64 {
        0
    }

    /// A receipt as text that only this store can have written; `None` if the secret that seals it is not known yet:
    /// then this store cannot have admitted the request.
    fn seal_charge(&self, charge: &Charge) -> Option<String>;

    /// Opens a receipt; `None` if this store did not write the text.
    fn open_charge<'a>(&'a self, text: &'a str) -> StoreFuture<'a, RemoteResult<Option<Charge>>>;

    /// As [`Remote::seal_charge`].
    fn seal_slot(&self, slot: &Slot) -> Option<String>;

    /// As [`Remote::open_charge`].
    fn open_slot<'a>(&'a self, text: &'a str) -> StoreFuture<'a, RemoteResult<Option<Slot>>>;
}

/// Which servers decide a toll.
#[derive(Clone, Debug)]
pub enum Split {
    /// One server decides it atomically.
    Whole(Server),
    /// Several servers decide parts of it, or one server in several steps. No part knows the verdicts of the others.
    Apart(Vec<PartialToll>),
}

/// The part of a toll that one server decides atomically.
#[derive(Clone, Debug)]
pub struct PartialToll {
    /// The server that decides it.
    pub server: Server,
    /// The limits of this part, and what they are charged.
    pub toll: Toll,
    /// The indexes of its limits in the whole toll: 0 and 2 for the first and the third.
    pub places: Vec<usize>,
    /// The ID that an admission carries, the same in all parts.
    pub id: u64,
}

/// A server of a store, identified by its address. The default is the only server of a store that has just one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Server(Option<Arc<str>>);

impl Server {
    /// The server at this address.
    pub fn at(address: Arc<str>) -> Server {
        Server(Some(address))
    }

    /// Whether it has this address.
    pub fn is_at(&self, address: &str) -> bool {
        self.0.as_deref() == Some(address)
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            None => f.write_str("the store"),
            Some(address) => write!(f, "the store's server {address}"),
        }
    }
}

/// Why a remote store made no decision.
#[derive(Clone, PartialEq, Eq)]
pub struct Failure {
    /// The kind, for metrics.
    pub kind: FailureKind,
    /// What happened, for the log.
    pub message: String,
}

/// Kinds of failures: the label `kind` of `tollkeeper_store_errors_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// No reply within the deadline.
    Timeout,
    /// There is no connection.
    Connection,
    /// The send queue is full.
    Full,
    /// The server replied with an error.
    Refused,
    /// The server sent a reply that cannot be understood, or that belongs to another call.
    Protocol,
}

impl FailureKind {
    /// Every kind.
    pub const ALL: [FailureKind; 5] = [
        FailureKind::Timeout,
        FailureKind::Connection,
        FailureKind::Full,
        FailureKind::Refused,
        FailureKind::Protocol,
    ];

    /// The name in metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            FailureKind::Timeout => "timeout",
            FailureKind::Connection => "connection",
            FailureKind::Full => "full",
            FailureKind::Refused => "refused",
            FailureKind::Protocol => "protocol",
        }
    }
}

impl Failure {
    /// A failure of this kind, with a message for the log.
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into() }
    }

    /// The thread that connects to the store could not be started.
    pub(crate) fn no_thread(error: &std::io::Error) -> Failure {
        Failure::new(FailureKind::Connection, format!("cannot start a thread for the store: {error}"))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.message)
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Failure {}
