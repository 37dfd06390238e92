//! The Redis connections of one process on one runtime, with the tasks and counters that belong to them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tollkeeper_core::{Secret, Toll, siphash};

use super::address::Address;
use super::batcher::Batcher;
use super::cluster::Cluster;
use super::keys::Names;
use super::sentinel::PrimaryChanges;
use super::topology::Topology;
use super::wire::{self, Call, Malformed, Nonce};
use crate::random;
use crate::store::remote::{Failure, FailureKind, RemoteResult};

/// How often a node checks that its secret is still stored, and asks the sentinels for the primary.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// How soon after a reconnect it checks the secret, because the server may have lost its data.
const RECONNECT_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// What all sessions of a store share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) names: Names,
    /// The addresses in the URL: one, or several servers of a cluster.
    pub(crate) addresses: Vec<Address>,
    pub(crate) connections: usize,
    pub(crate) is_cluster: bool,
    /// The secret that seals this store's receipts: the same on all nodes, drawn by the first one.
    pub(crate) secret: RwLock<Option<Secret>>,
}

/// What all connections of a session share.
#[derive(Debug)]
pub(crate) struct Env {
    /// The runtime of their tasks.
    pub(crate) runtime: Handle,
    nonces: AtomicU64,
}

impl Env {
    /// A nonce that no other call of this session has, and most likely none of another session.
    pub(crate) fn nonce(&self) -> Nonce {
        Nonce::new(self.nonces.fetch_add(1, Relaxed))
    }
}

/// Connections that were made by one process and are driven by one runtime.
#[derive(Debug)]
pub(crate) struct Session {
    process: u32,
    env: Arc<Env>,
    shared: Arc<Shared>,
    topology: Arc<Topology>,
    /// The source of admission IDs: a secret of this session, and a counter.
    ids: (Secret, AtomicU64),
    tasks: [JoinHandle<()>; 2],
}

impl Session {
    /// Starts to connect, with tasks on this runtime.
    pub(crate) fn open(shared: &Arc<Shared>, runtime: &Handle) -> Session {
        let env = Arc::new(Env { runtime: runtime.clone(), nonces: AtomicU64::new(random::number()) });
        let first = shared.addresses.first().expect("a URL has at least one address");
        let topology = Arc::new(if shared.is_cluster {
            Topology::Many(Cluster::new(&env, shared.addresses.clone(), shared.connections))
        } else {
            Topology::One(Batcher::new(&env, first, shared.connections))
        });
        let (weak, to_follow) = (Arc::downgrade(&topology), Arc::downgrade(&topology));
        let tasks = [
            runtime.spawn(keep_secret(Arc::clone(shared), weak)),
            runtime.spawn(follow_primary(to_follow, first.clone())),
        ];
        let ids = (random::secret(), AtomicU64::new(0));
        Session { process: std::process::id(), env, shared: Arc::clone(shared), topology, ids, tasks }
    }

    /// The ID of the process that made the connections. A forked child must not use them.
    pub(crate) fn process(&self) -> u32 {
        self.process
    }

    /// The runtime that drives the connections.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.env.runtime
    }

    pub(crate) fn topology(&self) -> &Topology {
        &self.topology
    }

    pub(crate) fn nonce(&self) -> Nonce {
        self.env.nonce()
    }

    /// An ID that no other admission has, on any node.
    fn next_id(&self) -> u64 {
        let (secret, counter) = &self.ids;
        let hash = siphash::hash(secret, &counter.fetch_add(1, Relaxed).to_le_bytes());
        u64::try_from(hash & u128::from(u64::MAX)).expect("64 bits")
    }

    /// The ID that an admission of this toll will carry; 0 for a toll that does not charge.
    pub(crate) fn id_for(&self, toll: &Toll) -> u64 {
        if toll.verb().charges() { self.next_id() } else { 0 }
    }

    /// Runs a script whose keys share a slot, and parses the reply with `read`.
    pub(crate) async fn run<T>(
        &self,
        call: &Call,
        read: fn(&Call, &wire::Value) -> Result<T, Malformed>,
    ) -> RemoteResult<T> {
        Ok(self.topology.run(call, |reply| read(call, reply)).await?)
    }

    /// Runs a plain command on one key, and parses the reply with `read`.
    pub(crate) async fn command<T>(
        &self,
        key: &str,
        command: &Cmd,
        read: fn(Value) -> Result<T, Malformed>,
    ) -> RemoteResult<T> {
        Ok(self.topology.command(key, command, read).await?)
    }

    /// The secret that seals receipts, loaded from the store if it is not known yet.
    pub(crate) async fn secret(&self) -> RemoteResult<Secret> {
        if let Some(secret) = self.shared.secret() {
            return Ok(secret);
        }
        load_secret(&self.shared, &self.topology).await
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.tasks.iter().for_each(JoinHandle::abort);
        } else {
            // In a forked process these belong to threads that do not exist: dropping them could hang.
            std::mem::forget(Arc::clone(&self.topology));
            std::mem::forget(Arc::clone(&self.env));
        }
    }
}

impl Shared {
    /// The secret, if it was loaded.
    pub(crate) fn secret(&self) -> Option<Secret> {
        *self.secret.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Loads the secret. If the store has none, stores the one we know, or else a new one.
async fn load_secret(shared: &Shared, topology: &Topology) -> RemoteResult<Secret> {
    let name = shared.names.shared("secret");
    // `MGET` replies with a list of one string, which no script of ours does: the reply of another call cannot be
    // mistaken for a secret. A wrong secret would void receipts.
    let get = redis::cmd("MGET").arg(&name).to_owned();
    let mut found = topology.command(&name, &get, only).await?;
    if found == Value::Nil {
        let [one, other] = [shared.secret().unwrap_or_else(random::secret), random::secret()];
        let drawn = [one.0, other.0].concat();
        topology.command(&name, redis::cmd("SET").arg(&name).arg(&drawn[..]).arg("NX"), Ok).await?;
        // Another node may have stored its own first.
        found = topology.command(&name, &get, only).await?;
    }
    let wrong = || {
        Failure::new(FailureKind::Protocol, format!("the key `{name}` does not contain a secret (delete it)"))
    };
    let Value::BulkString(bytes) = found else { return Err(wrong()) };
    let secret = bytes.first_chunk().copied().map(Secret).ok_or_else(wrong)?;
    if shared.secret() != Some(secret) {
        *shared.secret.write().unwrap_or_else(PoisonError::into_inner) = Some(secret);
    }
    Ok(secret)
}

/// The only element of a list.
fn only(reply: Value) -> Result<Value, Malformed> {
    match reply {
        Value::Array(mut values) if values.len() == 1 => Ok(values.remove(0)),
        _ => Err(Malformed),
    }
}

/// Checks regularly that the secret is still stored. Failures are not reported here: decisions report them.
async fn keep_secret(shared: Arc<Shared>, topology: Weak<Topology>) {
    let (mut arrivals, mut checked) = (0, Instant::now());
    loop {
        tokio::time::sleep(RECONNECT_CHECK_INTERVAL).await;
        let Some(topology) = topology.upgrade() else { return };
        let before = std::mem::replace(&mut arrivals, topology.arrivals());
        if before == arrivals && checked.elapsed() < CHECK_INTERVAL {
            continue;
        }
        checked = Instant::now();
        let _ = load_secret(&shared, &topology).await;
    }
}

/// Reconnects when the sentinels name another primary. They announce changes, and are also asked regularly.
async fn follow_primary(topology: Weak<Topology>, address: Address) {
    let Some(mut changes) = PrimaryChanges::of(&address) else { return };
    let mut primary = address.primary().await;
    loop {
        let now = tokio::select! {
            announced = changes.next() => announced,
            () = tokio::time::sleep(CHECK_INTERVAL) => address.primary().await,
        };
        let Some(topology) = topology.upgrade() else { return };
        // Each sentinel announces the change: react to the first announcement only.
        if now.is_some() && now != primary {
            primary = now;
            tracing::info!("{address} has moved to another server: reconnecting");
            topology.reconnect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonces_of_a_session_differ() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let env = Env { runtime: runtime.handle().clone(), nonces: AtomicU64::new(u64::MAX) };
        let nonces: std::collections::HashSet<Nonce> = (0..1_000).map(|_| env.nonce()).collect();
        assert_eq!(nonces.len(), 1_000);
    }
}
