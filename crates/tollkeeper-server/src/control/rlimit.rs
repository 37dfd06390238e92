//! The limit of open files (`RLIMIT_NOFILE`), and the number of connections that fits in it.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Open files other than the connections of clients and of the store: listeners, the config, certificates, a snapshot,
/// standard streams, what the runtime needs, and a margin.
const OTHER_FILES: u64 = 64;
/// The maximum of connections, however high the file limit is: busy ones take about a gigabyte together.
const MAX_CONNECTIONS: u64 = 65_536;

/// Raises the soft limit to the hard limit: the usual 1,024 are soon used up by connections.
pub fn raise() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) =
        setrlimit(Resource::Nofile, rustix::process::Rlimit { current: limit.maximum, ..limit })
    {
        tracing::debug!("cannot raise the limit of open files above {:?}: {error}", limit.current);
    }
}

/// How many client connections all listeners may have together, so that enough files remain for everything else,
/// including `store` files for the store.
pub fn connections(store: u64) -> usize {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    // At least a quarter of the files, even if the limit is too low for everything else.
    let most = files.saturating_sub(OTHER_FILES.saturating_add(store)).max(files / 4).min(MAX_CONNECTIONS);
    usize::try_from(most).expect("at most 65,536")
}
