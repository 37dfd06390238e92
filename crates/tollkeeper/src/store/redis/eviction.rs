//! Whether a server may evict keys: with a key goes its count, so a limit can be exceeded.

use redis::aio::MultiplexedConnection;

use crate::sync::{Mutex, lock};

/// What is known of one server; `None` before it has answered, or if it does not say.
#[derive(Debug, Default)]
pub(crate) struct Eviction(Mutex<Option<bool>>);

impl Eviction {
    /// Asks the server, and warns if it may evict and did not say so before. `INFO` needs fewer rights than
    /// `CONFIG GET`, and managed services have it.
    pub(crate) async fn look(&self, server: &str, mut connection: MultiplexedConnection) {
        let info = redis::cmd("INFO").arg("memory").query_async::<String>(&mut connection).await;
        let policy = info.as_deref().ok().and_then(Policy::of);
        let may_evict = policy.as_ref().map(Policy::may_evict);
        let before = std::mem::replace(&mut *lock(&self.0), may_evict);
        if may_evict == Some(true)
            && before != Some(true)
            && let Some(Policy { name, max_memory }) = policy
        {
            tracing::warn!(
                "{server} may evict keys (maxmemory {max_memory}, maxmemory-policy {name}): a limit whose key is \
                 evicted starts anew and can be exceeded (set maxmemory-policy to noeviction)"
            );
        }
    }

    pub(crate) fn may_evict(&self) -> Option<bool> {
        *lock(&self.0)
    }
}

/// Of several servers: whether one may evict; `None` if none may as far as is known, but not all say so.
pub(crate) fn any_known(all: impl Iterator<Item = Option<bool>>) -> Option<bool> {
    let both = |one, other| match (one, other) {
        (Some(true), _) | (_, Some(true)) => Some(true),
        (Some(false), Some(false)) => Some(false),
        _ => None,
    };
    all.reduce(both).flatten()
}

/// What a server does when its memory is full.
struct Policy<'a> {
    name: &'a str,
    max_memory: u64,
}

impl Policy<'_> {
    /// Reads `INFO memory`.
    fn of(info: &str) -> Option<Policy<'_>> {
        let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        Some(Policy { name: field("maxmemory_policy")?, max_memory: field("maxmemory")?.parse().ok()? })
    }

    fn may_evict(&self) -> bool {
        self.max_memory > 0 && self.name != "noeviction"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_is_read_from_info() {
        for (info, expected) in [
            ("# Memory\r\nmaxmemory:0\r\nmaxmemory_policy:allkeys-lru\r\n", Some(false)),
            ("# Memory\r\nmaxmemory:1048576\r\nmaxmemory_policy:allkeys-lru\r\n", Some(true)),
            ("maxmemory:1048576\r\nmaxmemory_human:1M\r\nmaxmemory_policy:volatile-ttl\r\n", Some(true)),
            ("maxmemory:1048576\r\nmaxmemory_policy:noeviction\r\n", Some(false)),
            ("maxmemory:1048576\r\n", None),
            ("", None),
        ] {
            assert_eq!(Policy::of(info).as_ref().map(Policy::may_evict), expected, "{info:?}");
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
