//! A store elsewhere: as a [`Store`](crate::Store), but it may not answer.
//!
//! A limiter needs an answer whatever happens, so it cannot be given one of these: only a
//! [`Resilient`](crate::Resilient) around it, which has one.

use std::fmt;

use tollkeeper_core::{Charge, Fix, Key, Ruling, Slot, Toll};

use crate::store::{Answer, Correction};

/// What came of asking a store elsewhere.
pub type Asked<T> = Result<T, Failure>;

/// Decides tolls against shared state, somewhere else.
pub trait Remote: fmt::Debug + Send + Sync {
    /// Decides a toll: all of it or nothing, in one step. Who has to wait for the answer takes what it
    /// needs of the toll along.
    fn decide(&self, toll: &Toll) -> Answer<'_, Asked<Ruling>>;

    /// Gives back or adds to what was charged: once for each charge.
    fn correct<'a>(&'a self, charge: &'a Charge, fixes: &'a [Fix]) -> Answer<'a, Asked<Correction>>;

    /// Gives a slot back; false if it was not held any more.
    fn release<'a>(&'a self, slot: &'a Slot) -> Answer<'a, Asked<bool>>;

    /// Counts the life of a slot from now; false if it was not held any more.
    fn renew<'a>(&'a self, slot: &'a Slot) -> Answer<'a, Asked<bool>>;

    /// Forgets the state of a key; false if there was none.
    fn forget<'a>(&'a self, key: Key<'a>) -> Answer<'a, Asked<bool>>;

    /// A receipt as text that only this store can have written.
    fn seal_charge(&self, charge: &Charge) -> String;

    /// Reads a text that this store wrote; nothing if it did not.
    fn open_charge(&self, text: &str) -> Option<Charge>;

    /// As [`Remote::seal_charge`].
    fn seal_slot(&self, slot: &Slot) -> String;

    /// As [`Remote::open_charge`].
    fn open_slot(&self, text: &str) -> Option<Slot>;
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
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.message)
    }
}

impl std::error::Error for Failure {}
