//! The connections of one process to the store, on one runtime, and what belongs to them alone.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tollkeeper_core::{Secret, Toll, siphash};

use super::address::Address;
use super::batcher::Lane;
use super::cluster::Cluster;
use super::keys::Names;
use super::sentinel::Switches;
use super::topology::Topology;
use super::wire::{self, Call, Malformed, Nonce};
use crate::random;
use crate::store::remote::{Failure, FailureKind, RemoteResult};

/// How often a node looks whether its secret is still there, and asks sentinels for the primary.
const LOOKS: Duration = Duration::from_millis(500);
/// The longest that it takes to look after a new connection: the server behind it may have lost everything.
const GLANCES: Duration = Duration::from_millis(100);

/// What all sessions of a store have in common.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) names: Names,
    /// Where to connect: one address, or some servers of a cluster.
    pub(crate) addresses: Vec<Address>,
    pub(crate) connections: usize,
    pub(crate) is_cluster: bool,
    /// The secret that receipts of this store are sealed with: the same for all nodes, drawn by the first.
    pub(crate) secret: RwLock<Option<Secret>>,
}

/// What all connections of a session have in common.
#[derive(Debug)]
pub(crate) struct Env {
    /// Where their tasks run.
    pub(crate) runtime: Handle,
    nonces: AtomicU64,
}

impl Env {
    /// A nonce that no other call has: of this session certainly, of others most likely.
    pub(crate) fn nonce(&self) -> Nonce {
        Nonce::new(self.nonces.fetch_add(1, Relaxed))
    }
}

/// Connections, made by one process and driven by one runtime.
#[derive(Debug)]
pub(crate) struct Session {
    process: u32,
    env: Arc<Env>,
    shared: Arc<Shared>,
    topology: Arc<Topology>,
    /// What numbers of admissions are made of: a secret of this session, and a counter.
    numbers: (Secret, AtomicU64),
    keepers: [JoinHandle<()>; 2],
}

impl Session {
    /// Begins to connect, with tasks on this runtime.
    pub(crate) fn open(shared: &Arc<Shared>, runtime: &Handle) -> Session {
        let env = Arc::new(Env { runtime: runtime.clone(), nonces: AtomicU64::new(random::number()) });
        let first = shared.addresses.first().expect("a URL leads somewhere");
        let topology = Arc::new(if shared.is_cluster {
            Topology::Many(Cluster::new(&env, shared.addresses.clone(), shared.connections))
        } else {
            Topology::One(Lane::new(&env, first, shared.connections))
        });
        let (weak, to_follow) = (Arc::downgrade(&topology), Arc::downgrade(&topology));
        let keepers = [
            runtime.spawn(keep_secret(Arc::clone(shared), weak)),
            runtime.spawn(follow(to_follow, first.clone())),
        ];
        let numbers = (random::secret(), AtomicU64::new(0));
        Session { process: std::process::id(), env, shared: Arc::clone(shared), topology, numbers, keepers }
    }

    /// The process that made the connections. Another must not use them.
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

    /// A number that no other admission has, on any node.
    fn number(&self) -> u64 {
        let (secret, counter) = &self.numbers;
        let hash = siphash::hash(secret, &counter.fetch_add(1, Relaxed).to_le_bytes());
        u64::try_from(hash & u128::from(u64::MAX)).expect("64 bits")
    }

    /// The number of a toll that wants to be admitted.
    pub(crate) fn number_of(&self, toll: &Toll) -> u64 {
        if toll.verb().charges() { self.number() } else { 0 }
    }

    /// Runs a script whose keys share a slot.
    pub(crate) async fn run<T>(
        &self,
        call: &Call,
        read: fn(&Call, &wire::Value) -> Result<T, Malformed>,
    ) -> RemoteResult<T> {
        Ok(self.topology.run(call, |answer| read(call, answer)).await?)
    }

    /// Runs a plain command on one key.
    pub(crate) async fn command<T>(
        &self,
        key: &str,
        command: &Cmd,
        read: fn(Value) -> Result<T, Malformed>,
    ) -> RemoteResult<T> {
        Ok(self.topology.command(key, command, read).await?)
    }

    /// The secret of receipts, asked for if it is not known.
    pub(crate) async fn secret(&self) -> RemoteResult<Secret> {
        if let Some(secret) = self.shared.secret() {
            return Ok(secret);
        }
        look_for_secret(&self.shared, &self.topology).await
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.keepers.iter().for_each(JoinHandle::abort);
        } else {
            // In a forked process: these belong to threads that do not exist here.
            std::mem::forget(Arc::clone(&self.topology));
            std::mem::forget(Arc::clone(&self.env));
        }
    }
}

impl Shared {
    /// The secret, if it is known.
    pub(crate) fn secret(&self) -> Option<Secret> {
        *self.secret.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks for the secret; if there is none, puts ours back, or a new one.
async fn look_for_secret(shared: &Shared, topology: &Topology) -> RemoteResult<Secret> {
    let name = shared.names.shared("secret");
    // A list, which no reply of a script is that could come in its place: a wrong secret would void receipts.
    let get = redis::cmd("MGET").arg(&name).to_owned();
    let mut found = topology.command(&name, &get, only).await?;
    if found == Value::Nil {
        let [one, other] = [shared.secret().unwrap_or_else(random::secret), random::secret()];
        let drawn = [one.0, other.0].concat();
        topology.command(&name, redis::cmd("SET").arg(&name).arg(&drawn[..]).arg("NX"), Ok).await?;
        // Another node may have been first.
        found = topology.command(&name, &get, only).await?;
    }
    let wrong = || Failure::new(FailureKind::Nonsense, format!("`{name}` does not hold a secret: delete it"));
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

/// Looks now and then whether the secret is still there. Failures are reported by those who ask for decisions.
async fn keep_secret(shared: Arc<Shared>, topology: Weak<Topology>) {
    let (mut arrivals, mut looked) = (0, Instant::now());
    loop {
        tokio::time::sleep(GLANCES).await;
        let Some(topology) = topology.upgrade() else { return };
        let before = std::mem::replace(&mut arrivals, topology.arrivals());
        if before == arrivals && looked.elapsed() < LOOKS {
            continue;
        }
        looked = Instant::now();
        let _ = look_for_secret(&shared, &topology).await;
    }
}

/// Reconnects when the sentinels name another primary. They announce a change, and are asked regularly too.
async fn follow(topology: Weak<Topology>, address: Address) {
    let Some(mut switches) = Switches::of(&address) else { return };
    let mut primary = address.primary().await;
    loop {
        let now = tokio::select! {
            told = switches.next() => told,
            () = tokio::time::sleep(LOOKS) => address.primary().await,
        };
        let Some(topology) = topology.upgrade() else { return };
        // Each sentinel announces the change; the first one counts.
        if now.is_some() && now != primary {
            primary = now;
            tracing::info!("{address} has moved");
            topology.give_up();
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
