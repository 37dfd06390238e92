//! What became of a call that failed: whether it certainly did not run, or may have.
//!
//! Only what certainly did not run may be sent again. After a timeout or a broken connection nobody knows:
//! the charge counts as made, is never repeated and never given back.

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::store::remote::{Failure, FailureKind};

/// What became of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It did not run: the server does not know the script.
    NoScript,
    /// It did not run: this server is not, or no longer, the one to ask.
    Elsewhere(Elsewhere),
    /// It did not run, and will not for now.
    Refused(String),
    /// It did not run: there is no connection.
    NotSent(String),
    /// It did not run: too many are waiting to be sent.
    Full,
    /// It may have run: the reply is that of another call. The connection is out of step and was closed.
    Foreign(String),
    /// It may have run.
    Unknown {
        /// What happened.
        message: String,
        /// Whether the connection may be used on.
        usable: bool,
    },
}

/// Who is to be asked instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Elsewhere {
    /// This server, from now on.
    Moved(String),
    /// This server, this once.
    Ask(String),
    /// The same again, a little later: keys are on their way.
    TryAgain,
    /// Whoever is primary now.
    NotPrimary,
}

impl Fate {
    /// An answer that is none.
    pub(crate) fn nonsense(message: String) -> Fate {
        Fate::Unknown { message, usable: true }
    }

    pub(crate) fn of(error: &RedisError) -> Fate {
        // On one line: those of the parser have several.
        let message = || error.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        let redirected = || error.redirect_node().map(|(address, _)| address.to_owned());
        match error.kind() {
            ErrorKind::Server(ServerErrorKind::NoScript) => Fate::NoScript,
            ErrorKind::Server(ServerErrorKind::Moved) => match redirected() {
                Some(address) => Fate::Elsewhere(Elsewhere::Moved(address)),
                None => Fate::Refused(message()),
            },
            ErrorKind::Server(ServerErrorKind::Ask) => match redirected() {
                Some(address) => Fate::Elsewhere(Elsewhere::Ask(address)),
                None => Fate::Refused(message()),
            },
            ErrorKind::Server(ServerErrorKind::TryAgain) => Fate::Elsewhere(Elsewhere::TryAgain),
            ErrorKind::Server(ServerErrorKind::ReadOnly) => Fate::Elsewhere(Elsewhere::NotPrimary),
            ErrorKind::Server(
                ServerErrorKind::BusyLoading
                | ServerErrorKind::ClusterDown
                | ServerErrorKind::MasterDown
                | ServerErrorKind::CrossSlot
                | ServerErrorKind::NoPerm,
            ) => Fate::Refused(message()),
            ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig | ErrorKind::Client => {
                Fate::Refused(message())
            }
            ErrorKind::Io if error.is_connection_refusal() => Fate::NotSent(message()),
            // What cannot be read is the end of what can be: the client goes no further.
            ErrorKind::Io | ErrorKind::Parse => Fate::Unknown { message: message(), usable: false },
            _ => {
                Fate::of_text(error.code().unwrap_or_default(), error.detail().unwrap_or_default(), message())
            }
        }
    }

    /// Errors that only their words tell. Redis before 7 wraps what a command inside a script answered
    /// into an error of its own; ours writes last, so the first write that is refused is the only one.
    fn of_text(code: &str, detail: &str, message: String) -> Fate {
        const NOT_RUN: [&str; 7] = ["BUSY", "NOREPLICAS", "MISCONF", "OOM", "NOAUTH", "WRONGPASS", "NOPROTO"];
        let says = |word: &str| {
            code == word || detail.contains(&format!("-{word} ")) || detail.contains(&format!("{word} "))
        };
        if says("READONLY") {
            return Fate::Elsewhere(Elsewhere::NotPrimary);
        }
        if NOT_RUN.iter().any(|word| says(word)) || code == "MASTERDOWN" || code == "UNKILLABLE" {
            return Fate::Refused(message);
        }
        Fate::Unknown { message, usable: true }
    }
}

impl From<Fate> for Failure {
    fn from(fate: Fate) -> Failure {
        match fate {
            Fate::NoScript => Failure::new(FailureKind::Refused, "the server forgot the script twice"),
            Fate::Elsewhere(elsewhere) => {
                Failure::new(FailureKind::Refused, format!("another server is to be asked: {elsewhere:?}"))
            }
            Fate::Refused(message) => Failure::new(FailureKind::Refused, message),
            Fate::NotSent(message) => Failure::new(FailureKind::Connection, message),
            Fate::Full => {
                Failure::new(FailureKind::Full, "too many requests are waiting for the store already")
            }
            Fate::Foreign(message) | Fate::Unknown { message, usable: true } => {
                Failure::new(FailureKind::Nonsense, message)
            }
            Fate::Unknown { message, usable: false } => Failure::new(FailureKind::Connection, message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redis::make_extension_error;

    #[test]
    fn a_script_error_that_wraps_another_is_told_by_its_words() {
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
            let fate = Fate::of(&make_extension_error(code.to_owned(), Some(detail.to_owned())));
            assert!(format!("{fate:?}").contains(expected), "{code} {detail}: {fate:?}");
        }
    }

    #[test]
    fn after_a_broken_connection_nobody_knows_and_after_a_refused_one_everybody_does() {
        let error = |kind: std::io::ErrorKind| RedisError::from(std::io::Error::from(kind));
        for kind in [
            std::io::ErrorKind::BrokenPipe,
            std::io::ErrorKind::ConnectionReset,
            std::io::ErrorKind::UnexpectedEof,
            std::io::ErrorKind::TimedOut,
        ] {
            assert!(matches!(Fate::of(&error(kind)), Fate::Unknown { usable: false, .. }), "{kind}");
        }
        assert!(matches!(Fate::of(&error(std::io::ErrorKind::ConnectionRefused)), Fate::NotSent(_)));
    }

    #[test]
    fn after_half_a_reply_the_connection_is_of_no_use_and_the_message_is_one_line() {
        let half =
            RedisError::from((ErrorKind::Parse, "parse error", "Unexpected end of input\n".to_owned()));
        let Fate::Unknown { message, usable: false } = Fate::of(&half) else { panic!("it may have run") };
        assert!(!message.contains('\n') && message.contains("end of input"), "{message}");
    }
}
