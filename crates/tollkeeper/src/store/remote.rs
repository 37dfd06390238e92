//! A store elsewhere: as a [`Store`](crate::Store), but it may not answer.
//!
//! A limiter needs an answer whatever happens, so it cannot be given one of these: only a
//! [`Resilient`](crate::Resilient) around it, which has one.

use std::fmt;
use std::sync::Arc;

use tollkeeper_core::charge::Item;
use tollkeeper_core::{Charge, Fix, Key, Reply, Slot, Toll};

use crate::store::{Correction, StoreFuture};

/// What came of asking a store elsewhere.
pub type RemoteResult<T> = Result<T, Failure>;

/// Decides tolls against shared state, somewhere else. What concerns parts and servers is for a store of several.
pub trait Remote: fmt::Debug + Send + Sync {
    /// Decides a toll that is not [split](Remote::split): all of it or nothing, in one step. Who has to wait for
    /// the answer takes what it needs of the toll along.
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, RemoteResult<Reply>>;

    /// Who decides a toll.
    fn split(&self, _toll: &Toll) -> Split {
        Split::Whole(Server::default())
    }

    /// Decides a part of a toll: all of it or nothing, in one step.
    fn decide_part(&self, part: &PartialToll) -> StoreFuture<'_, RemoteResult<Reply>> {
        self.decide(&part.toll)
    }

    /// Gives back what a part was charged, because another part was refused. It is tried once.
    fn undo<'a>(&'a self, _part: &'a PartialToll, _ruling: &'a Reply) -> StoreFuture<'a, RemoteResult<()>> {
        StoreFuture::Ready(Ok(()))
    }

    /// The one server that has all of these, if there is one.
    fn server_of(&self, _items: &[Item]) -> Option<Server> {
        Some(Server::default())
    }

    /// Gives back or adds to what was charged: once for each charge.
    fn correct<'a>(
        &'a self,
        charge: &'a Charge,
        fixes: &'a [Fix],
    ) -> StoreFuture<'a, RemoteResult<Correction>>;

    /// Gives a slot back; false if it was not held any more.
    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>>;

    /// Counts the life of a slot from now; false if it was not held any more.
    fn renew<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>>;

    /// Forgets the state of a key; false if there was none.
    fn forget<'a>(&'a self, key: Key<'a>) -> StoreFuture<'a, RemoteResult<bool>>;

    /// How often a server has come (back): whoever left it alone need not do so any longer once this is another
    /// number. Always the same for a store that does not know.
    fn arrivals(&self, _server: &Server) -> u64 {
        0
    }

    /// A receipt as text that only this store can have written; `None` if the secret that seals it is not known yet,
    /// so that this store cannot have admitted it.
    fn seal_charge(&self, charge: &Charge) -> Option<String>;

    /// Reads a text that this store wrote; `None` if it did not.
    fn open_charge<'a>(&'a self, text: &'a str) -> StoreFuture<'a, RemoteResult<Option<Charge>>>;

    /// As [`Remote::seal_charge`].
    fn seal_slot(&self, slot: &Slot) -> Option<String>;

    /// As [`Remote::open_charge`].
    fn open_slot<'a>(&'a self, text: &'a str) -> StoreFuture<'a, RemoteResult<Option<Slot>>>;
}

/// Who decides a toll.
#[derive(Clone, Debug)]
pub enum Split {
    /// One server, in one step.
    Whole(Server),
    /// Several, or one in several steps: none of them knows what the others say.
    Apart(Vec<PartialToll>),
}

/// What one server decides of a toll in one step.
#[derive(Clone, Debug)]
pub struct PartialToll {
    /// Who decides it.
    pub server: Server,
    /// What is due.
    pub toll: Toll<'static>,
    /// The places of its limits in the whole toll.
    pub places: Vec<usize>,
    /// The number that an admission of all parts carries.
    pub id: u64,
}

/// A server of a store, by its address; of a store of one the only one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Server(Option<Arc<str>>);

impl Server {
    /// The server at this address.
    pub fn at(address: Arc<str>) -> Server {
        Server(Some(address))
    }

    /// Whether it is the one at this address.
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

/// Why there was no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What kind of failure.
    pub kind: FailureKind,
    /// What happened, for the log.
    pub message: String,
}

/// Kinds of failures, as metrics name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// No answer within the deadline.
    Timeout,
    /// There is no connection.
    Connection,
    /// More are waiting than may.
    Full,
    /// It answered with an error.
    Refused,
    /// It answered with something that is no answer.
    Nonsense,
}

impl FailureKind {
    /// Every kind.
    pub const ALL: [FailureKind; 5] = [
        FailureKind::Timeout,
        FailureKind::Connection,
        FailureKind::Full,
        FailureKind::Refused,
        FailureKind::Nonsense,
    ];

    /// The name in metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            FailureKind::Timeout => "timeout",
            FailureKind::Connection => "connection",
            FailureKind::Full => "full",
            FailureKind::Refused => "refused",
            FailureKind::Nonsense => "nonsense",
        }
    }
}

impl Failure {
    /// A failure of this kind.
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

impl std::error::Error for Failure {}
