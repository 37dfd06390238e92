//! How many files this process may have open: every connection is one.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Files that are neither connections of clients nor the store's: listeners, the config, certificates, a snapshot,
/// standard streams, what the runtime needs, and a margin.
const OTHERS: u64 = 64;
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

/// How many connections of clients all listeners may have together: so many that files remain for everything else, of
/// which the store needs this many.
pub fn connections(store: u64) -> usize {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    // With fewer files than that there are connections all the same.
    let room = files.saturating_sub(OTHERS.saturating_add(store)).max(files / 4).min(MOST);
    usize::try_from(room).expect("at most 65,536")
}
