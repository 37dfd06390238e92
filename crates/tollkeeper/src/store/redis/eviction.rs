//! Finds out whether a server may evict keys. An evicted key loses its count, so its limit can be exceeded.

use redis::aio::MultiplexedConnection;

use crate::sync::{Mutex, lock};

/// Whether one server may evict keys; `None` before it has answered, or if it does not say.
#[derive(Debug, Default)]
pub(crate) struct Eviction(Mutex<Option<bool>>);

impl Eviction {
    /// Asks the server, and logs a warning if it may evict and could not before. `INFO` needs fewer permissions
    /// than `CONFIG GET`, and managed services allow it.
    pub(crate) async fn check(&self, server: &str, mut connection: MultiplexedConnection) {
        let info = redis::cmd("INFO").arg("memory").query_async::<String>(&mut connection).await;
        let policy = info.as_deref().ok().and_then(policy);
        let evicts = policy.filter(|policy| *policy != NO_EVICTION);
        let before = std::mem::replace(&mut *lock(&self.0), policy.map(|_| evicts.is_some()));
        if before != Some(true)
            && let Some(policy) = evicts
        {
            tracing::warn!(
                "{server} may evict keys (maxmemory-policy {policy}): a limit whose key is evicted starts over and \
                 can be exceeded (set maxmemory-policy to {NO_EVICTION})"
            );
        }
    }

    pub(crate) fn may_evict(&self) -> Option<bool> {
        *lock(&self.0)
    }
}

/// Whether any of several servers may evict; `None` if none is known to, but not all are known.
pub(crate) fn any_known(all: impl Iterator<Item = Option<bool>>) -> Option<bool> {
    let either = |one, other| match (one, other) {
        (Some(true), _) | (_, Some(true)) => Some(true),
        (Some(false), Some(false)) => Some(false),
        _ => None,
    };
    all.reduce(either).flatten()
}

/// The policy of a server that refuses writes when its memory is full.
const NO_EVICTION: &str = "noeviction";

/// The eviction policy in `INFO memory`. Whether `maxmemory` is set does not matter: it can be set while the
/// server runs, and clients would not notice.
fn policy(info: &str) -> Option<&str> {
    info.lines().find_map(|line| line.strip_prefix("maxmemory_policy:"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_is_read_from_info() {
        for (info, expected) in [
            ("# Memory\r\nmaxmemory:0\r\nmaxmemory_policy:allkeys-lru\r\n", Some("allkeys-lru")),
            ("maxmemory:1048576\r\nmaxmemory_policy:noeviction\r\n", Some(NO_EVICTION)),
            ("maxmemory:1048576\r\nmaxmemory_human:1M\r\n", None),
            ("", None),
        ] {
            assert_eq!(policy(info), expected, "{info:?}");
        }
    }

    #[test]
    fn one_server_that_may_evict_is_enough() {
        for (all, expected) in [
            (vec![], None),
            (vec![Some(false), Some(false)], Some(false)),
            (vec![Some(false), None], None),
            (vec![None, Some(true), Some(false)], Some(true)),
        ] {
            assert_eq!(any_known(all.clone().into_iter()), expected, "{all:?}");
        }
    }
}
