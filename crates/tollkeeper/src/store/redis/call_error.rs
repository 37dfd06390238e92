//! Classifies failed Redis calls: those that certainly did not run, and those that may have run.
//!
//! Only a call that certainly did not run may be retried. After a timeout or a broken connection the outcome is
//! unknown: the charge counts as made, and is neither retried nor refunded.

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::store::remote::{Failure, FailureKind};

/// Why a call to a Redis server failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CallError {
    /// It did not run: the server does not know the script.
    NoScript,
    /// It did not run: this server does not serve the key, or no longer does.
    Redirected(Redirect),
    /// It did not run: the server refused it, and would refuse a retry for now.
    Refused(String),
    /// It did not run: there is no connection.
    NotSent(String),
    /// It did not run: the send queue is full.
    Full,
    /// It may have run: the reply belongs to another call. The connection is out of step and was closed.
    WrongReply(String),
    /// It may have run.
    Unknown {
        /// What happened.
        message: String,
        /// Whether the connection can still be used.
        usable: bool,
    },
}

/// Where to send a call that a server redirected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Redirect {
    /// `MOVED`: to this address, from now on.
    Moved(String),
    /// `ASK`: to this address, for this call only.
    Ask(String),
    /// `TRYAGAIN`: to the same server, a little later. Its keys are being migrated.
    TryAgain,
    /// `READONLY`: to the current primary.
    NotPrimary,
}

impl CallError {
    /// The server sent a reply that cannot be understood. The connection is still in step.
    pub(crate) fn invalid_reply(message: String) -> CallError {
        CallError::Unknown { message, usable: true }
    }

    pub(crate) fn of(error: &RedisError) -> CallError {
        // On one line: the parser's messages span several.
        let message = || error.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        let redirected = || error.redirect_node().map(|(address, _)| address.to_owned());
        match error.kind() {
            ErrorKind::Server(ServerErrorKind::NoScript) => CallError::NoScript,
            ErrorKind::Server(ServerErrorKind::Moved) => match redirected() {
                Some(address) => CallError::Redirected(Redirect::Moved(address)),
                None => CallError::Refused(message()),
            },
            ErrorKind::Server(ServerErrorKind::Ask) => match redirected() {
                Some(address) => CallError::Redirected(Redirect::Ask(address)),
                None => CallError::Refused(message()),
            },
            ErrorKind::Server(ServerErrorKind::TryAgain) => CallError::Redirected(Redirect::TryAgain),
            ErrorKind::Server(ServerErrorKind::ReadOnly) => CallError::Redirected(Redirect::NotPrimary),
            ErrorKind::Server(
                ServerErrorKind::BusyLoading
                | ServerErrorKind::ClusterDown
                | ServerErrorKind::MasterDown
                | ServerErrorKind::CrossSlot
                | ServerErrorKind::NoPerm,
            ) => CallError::Refused(message()),
            ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig | ErrorKind::Client => {
                CallError::Refused(message())
            }
            ErrorKind::Io if error.is_connection_refusal() => CallError::NotSent(message()),
            // After a reply that it cannot parse, the client reads nothing more from the connection.
            ErrorKind::Io | ErrorKind::Parse => CallError::Unknown { message: message(), usable: false },
            _ => CallError::of_text(
                error.code().unwrap_or_default(),
                error.detail().unwrap_or_default(),
                message(),
            ),
        }
    }

    /// Errors that only their text identifies. Redis before 7 wraps the error of a command inside a script
    /// in an error of its own. Our scripts write last, so the first refused write is the only one: nothing ran.
    fn of_text(code: &str, detail: &str, message: String) -> CallError {
        const NOT_RUN: [&str; 7] = ["BUSY", "NOREPLICAS", "MISCONF", "OOM", "NOAUTH", "WRONGPASS", "NOPROTO"];
        let mentions = |word: &str| {
            code == word || detail.contains(&format!("-{word} ")) || detail.contains(&format!("{word} "))
        };
        if mentions("READONLY") {
            return CallError::Redirected(Redirect::NotPrimary);
        }
        if NOT_RUN.iter().any(|word| mentions(word)) || code == "MASTERDOWN" || code == "UNKILLABLE" {
            return CallError::Refused(message);
        }
        CallError::Unknown { message, usable: true }
    }
}

impl From<CallError> for Failure {
    fn from(error: CallError) -> Failure {
        match error {
            CallError::NoScript => {
                Failure::new(FailureKind::Refused, "the server does not know the script it was just sent")
            }
            CallError::Redirected(redirect) => {
                Failure::new(FailureKind::Refused, format!("the server redirected the call: {redirect:?}"))
            }
            CallError::Refused(message) => Failure::new(FailureKind::Refused, message),
            CallError::NotSent(message) => Failure::new(FailureKind::Connection, message),
            CallError::Full => {
                Failure::new(FailureKind::Full, "too many requests are already waiting for the store")
            }
            CallError::WrongReply(message) | CallError::Unknown { message, usable: true } => {
                Failure::new(FailureKind::Protocol, message)
            }
            CallError::Unknown { message, usable: false } => Failure::new(FailureKind::Connection, message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redis::make_extension_error;

    #[test]
    fn wrapped_script_error_is_classified_by_its_text() {
        let wrapped = "Error running script (call to f_1): @user_script:9: @user_script: 9: \
                       -READONLY You can't write against a read only replica.";
        for (code, detail, expected) in [
            ("READONLY", "You can't write against a read only replica.", "NotPrimary"),
            ("ERR", wrapped, "NotPrimary"),
            ("OOM", "command not allowed when used memory > 'maxmemory'.", "Refused"),
            ("MISCONF", "Redis is configured to save RDB snapshots", "Refused"),
            ("BUSY", "Redis is busy running a script.", "Refused"),
            ("NOREPLICAS", "Not enough good replicas to write.", "Refused"),
            ("ERR", "Error running script: user_script:1: attempt to index a nil value", "Unknown"),
        ] {
            let error = CallError::of(&make_extension_error(code.to_owned(), Some(detail.to_owned())));
            assert!(format!("{error:?}").contains(expected), "{code} {detail}: {error:?}");
        }
    }

    /// A connection that breaks leaves the outcome unknown; after a refused one the call certainly did not run.
    #[test]
    fn only_a_refused_connection_proves_that_nothing_ran() {
        let error = |kind: std::io::ErrorKind| RedisError::from(std::io::Error::from(kind));
        for kind in [
            std::io::ErrorKind::BrokenPipe,
            std::io::ErrorKind::ConnectionReset,
            std::io::ErrorKind::UnexpectedEof,
            std::io::ErrorKind::TimedOut,
        ] {
            assert!(
                matches!(CallError::of(&error(kind)), CallError::Unknown { usable: false, .. }),
                "{kind}"
            );
        }
        assert!(matches!(
            CallError::of(&error(std::io::ErrorKind::ConnectionRefused)),
            CallError::NotSent(_)
        ));
    }

    #[test]
    fn truncated_reply_gives_up_the_connection_in_one_line() {
        let half =
            RedisError::from((ErrorKind::Parse, "parse error", "Unexpected end of input\n".to_owned()));
        let CallError::Unknown { message, usable: false } = CallError::of(&half) else {
            panic!("it may have run")
        };
        assert!(!message.contains('\n') && message.contains("end of input"), "{message}");
    }
}
