//! How many files this process may have open: every connection is one.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Files that are not connections of clients: the store's, the config, a snapshot, listeners.
const OTHERS: u64 = 256;
/// The most connections, however many files there may be: about a gigabyte, if all are busy.
const MOST: u64 = 65_536;

/// Asks for as many as the system grants: the usual 1,024 are soon used up by connections.
pub fn raise() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) =
        setrlimit(Resource::Nofile, rustix::process::Rlimit { current: limit.maximum, ..limit })
    {
        tracing::debug!("the limit of open files stays at {:?}: {error}", limit.current);
    }
}

/// How many connections a listener takes: so many that files remain for everything else.
pub fn connections() -> usize {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let room = files.saturating_sub(OTHERS).clamp(files.min(64) / 2, MOST);
    usize::try_from(room).expect("at most 65,536")
}
