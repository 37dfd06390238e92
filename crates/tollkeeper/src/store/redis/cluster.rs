//! Routes calls to the servers of a Redis cluster, and follows redirects when slots move.
//!
//! This module keeps its own slot table. A server that no longer has a slot answers with a redirect and runs
//! nothing, so the call can safely be sent to the server that it names.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use redis::Value;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tollkeeper_core::Reply;

use super::address::Address;
use super::batcher::{Batcher, Target};
use super::call_error::{CallError, Redirect};
use super::eviction::any_known;
use super::session::Env;
use super::slot::SLOTS;
use super::wire::{self, Call, Malformed};
use crate::store::remote::Server;
use crate::store::url::Host;

/// The most redirects that one call follows.
const MAX_REDIRECTS: usize = 5;
/// The pause before a retry while keys are being migrated (`TRYAGAIN`).
const MIGRATION_PAUSE: Duration = Duration::from_millis(2);
/// How often the slot table is refreshed while all servers can be reached.
const REFRESH: Duration = Duration::from_secs(5);
/// How often it is refreshed while a server cannot be reached, because that server may have been replaced.
const REFRESH_DURING_TROUBLE: Duration = Duration::from_millis(250);
/// The shortest pause between two refreshes, whatever the reason.
const MIN_PAUSE: Duration = Duration::from_millis(50);

/// The servers of a cluster.
#[derive(Debug)]
pub(crate) struct Cluster {
    shared: Arc<Shared>,
    refresher: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    env: Arc<Env>,
    seeds: Vec<Address>,
    connections: usize,
    table: RwLock<SlotTable>,
    /// Notified when a call finds the table out of date.
    stale: Notify,
    /// Notified after every attempt to refresh the table.
    refreshed: Notify,
}

/// Which server has which slot.
#[derive(Debug, Default)]
struct SlotTable {
    servers: HashMap<Host, Arc<Batcher>>,
    slots: Vec<Option<Arc<Batcher>>>,
    /// Why the last refresh failed; `None` if it succeeded.
    trouble: Option<Arc<str>>,
}

impl Cluster {
    pub(crate) fn new(env: &Arc<Env>, seeds: Vec<Address>, connections: usize) -> Cluster {
        let shared = Arc::new(Shared {
            env: Arc::clone(env),
            seeds,
            connections,
            table: RwLock::default(),
            stale: Notify::new(),
            refreshed: Notify::new(),
        });
        let refresher = env.runtime.spawn(refresh(Arc::clone(&shared)));
        Cluster { shared, refresher }
    }

    /// Decides a toll whose keys are all in this slot.
    pub(crate) async fn decide(&self, slot: u16, toll: wire::EncodedToll) -> Result<Reply, CallError> {
        self.with_redirects(slot, |batcher, target| {
            let toll = toll.clone();
            async move {
                match target {
                    Target::Own => batcher.decide(slot, toll).await,
                    Target::Migrating => {
                        let batch = wire::Batch::new(vec![toll], self.shared.env.nonce());
                        let reply =
                            batcher.run(batch.call(), target, |reply| batch.read_reply(reply)).await?;
                        Ok(reply.replies.into_iter().next().expect("one toll, one reply"))
                    }
                }
            }
        })
        .await
    }

    /// Runs a script whose keys are all in this slot, and parses the reply with `read`.
    pub(crate) async fn run<T>(
        &self,
        slot: u16,
        call: &Call,
        read: impl Fn(&wire::Value) -> Result<T, Malformed>,
    ) -> Result<T, CallError> {
        let read = &read;
        self.with_redirects(slot, |batcher, target| async move { batcher.run(call, target, read).await })
            .await
    }

    /// Runs a command on the server that has this slot, and parses the reply with `read`.
    pub(crate) async fn command<T>(
        &self,
        slot: u16,
        command: &redis::Cmd,
        read: impl Fn(Value) -> Result<T, Malformed>,
    ) -> Result<T, CallError> {
        let read = &read;
        self.with_redirects(
            slot,
            |batcher, target| async move { batcher.command(command, target, read).await },
        )
        .await
    }

    /// Makes a call to the server that has this slot, and follows redirects: a redirected call did not run.
    async fn with_redirects<T, F: Future<Output = Result<T, CallError>>>(
        &self,
        slot: u16,
        call: impl Fn(Arc<Batcher>, Target) -> F,
    ) -> Result<T, CallError> {
        let mut batcher = self.batcher(slot).await?;
        for _ in 0..MAX_REDIRECTS {
            match call(Arc::clone(&batcher), Target::Own).await {
                Err(CallError::Redirected(Redirect::Ask(address))) => {
                    return call(self.server(&address)?, Target::Migrating).await;
                }
                Err(CallError::Redirected(Redirect::Moved(address))) => {
                    batcher = self.moved(slot, &address)?;
                }
                Err(CallError::Redirected(Redirect::TryAgain)) => tokio::time::sleep(MIGRATION_PAUSE).await,
                Err(CallError::Redirected(Redirect::NotPrimary)) => {
                    self.shared.stale.notify_one();
                    let message = format!("the server of slot {slot} is no longer a primary");
                    return Err(CallError::Refused(message));
                }
                result => return self.note_lost_server(result),
            }
        }
        Err(CallError::Refused(format!("slot {slot} was moved {MAX_REDIRECTS} times")))
    }

    /// Refreshes the table after a connection failure: the server may have been replaced.
    fn note_lost_server<T>(&self, result: Result<T, CallError>) -> Result<T, CallError> {
        if matches!(
            result,
            Err(CallError::NotSent(_) | CallError::Unknown { usable: false, .. } | CallError::WrongReply(_))
        ) {
            self.shared.stale.notify_one();
        }
        result
    }

    /// The server of a slot, according to the last known table.
    pub(crate) fn server_of(&self, slot: u16) -> Server {
        let table = self.shared.table();
        let batcher = table.slots.get(usize::from(slot)).and_then(Option::as_ref);
        batcher.map_or_else(Server::default, |batcher| Server::at(Arc::clone(batcher.address())))
    }

    /// Why a server cannot be used, or why the slot table could not be read; `None` if all is well.
    pub(crate) fn trouble(&self) -> Option<Arc<str>> {
        let table = self.shared.table();
        table.servers.values().find_map(|batcher| batcher.trouble()).or_else(|| table.trouble.clone())
    }

    /// Whether any server may evict keys; `None` if unknown.
    pub(crate) fn may_evict(&self) -> Option<bool> {
        any_known(self.shared.table().servers.values().map(|batcher| batcher.may_evict()))
    }

    /// The number of connections made so far.
    pub(crate) fn arrivals(&self) -> u64 {
        self.shared.table().servers.values().map(|batcher| batcher.arrivals()).sum()
    }

    /// The number of connections made to this server so far.
    pub(crate) fn arrivals_of(&self, server: &Server) -> u64 {
        let table = self.shared.table();
        let batcher = table.servers.values().find(|batcher| server.is_at(batcher.address()));
        batcher.map_or(0, |batcher| batcher.arrivals())
    }

    /// The batcher of the server that has a slot. Waits until the table was read once, unless that failed.
    async fn batcher(&self, slot: u16) -> Result<Arc<Batcher>, CallError> {
        loop {
            let refreshed = self.shared.refreshed.notified();
            {
                let table = self.shared.table();
                if let Some(Some(batcher)) = table.slots.get(usize::from(slot)) {
                    return Ok(Arc::clone(batcher));
                }
                if let Some(why) = table.trouble.as_ref().filter(|_| table.slots.is_empty()) {
                    return Err(CallError::NotSent(why.to_string()));
                }
                if !table.slots.is_empty() {
                    self.shared.stale.notify_one();
                    return Err(CallError::Refused(format!("no server of the cluster has slot {slot}")));
                }
            }
            refreshed.await;
        }
    }

    /// Notes that a slot has moved to this address, and returns the batcher of its server.
    fn moved(&self, slot: u16, address: &str) -> Result<Arc<Batcher>, CallError> {
        self.shared.stale.notify_one();
        let batcher = self.server(address)?;
        let mut table = self.shared.table.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = table.slots.get_mut(usize::from(slot)) {
            *entry = Some(Arc::clone(&batcher));
        }
        Ok(batcher)
    }

    /// The batcher of the server at this address, created if the server is new.
    fn server(&self, address: &str) -> Result<Arc<Batcher>, CallError> {
        let host = host(address)
            .ok_or_else(|| CallError::invalid_reply(format!("`{address}` is not an address")))?;
        let mut table = self.shared.table.write().unwrap_or_else(PoisonError::into_inner);
        Ok(table.server(&self.shared, host))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.refresher.abort();
    }
}

impl Shared {
    fn table(&self) -> std::sync::RwLockReadGuard<'_, SlotTable> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the table with the slot ranges that a server reported, and drops servers without slots.
    fn install(&self, ranges: &[(u16, u16, Host)]) {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let mut slots = vec![None; usize::from(SLOTS)];
        for (first, last, host) in ranges {
            let batcher = table.server(self, host.clone());
            for slot in *first..=(*last).min(SLOTS - 1) {
                slots[usize::from(slot)] = Some(Arc::clone(&batcher));
            }
        }
        (table.slots, table.trouble) = (slots, None);
        table.servers.retain(|host, _| ranges.iter().any(|(_, _, named)| named == host));
        drop(table);
        self.refreshed.notify_waiters();
    }
}

impl SlotTable {
    fn server(&mut self, shared: &Shared, host: Host) -> Arc<Batcher> {
        let batcher = self.servers.entry(host.clone()).or_insert_with(|| {
            Arc::new(Batcher::new(&shared.env, &shared.seeds[0].neighbour(host), shared.connections))
        });
        Arc::clone(batcher)
    }
}

/// Refreshes the table regularly, and whenever a call finds it out of date.
async fn refresh(shared: Arc<Shared>) {
    let mut seeds: Option<Vec<Batcher>> = None;
    loop {
        let known: Vec<Arc<Batcher>> = shared.table().servers.values().cloned().collect();
        let mut ranges = None;
        for batcher in &known {
            ranges = slot_ranges(batcher).await;
            if ranges.is_some() {
                break;
            }
        }
        if ranges.is_none() {
            // No known server answers: fall back to the addresses in the URL.
            let seeds = seeds.get_or_insert_with(|| {
                shared.seeds.iter().map(|seed| Batcher::new(&shared.env, seed, 1)).collect()
            });
            for batcher in seeds.iter() {
                ranges = slot_ranges(batcher).await;
                if ranges.is_some() {
                    break;
                }
            }
            if ranges.is_none() {
                let trouble = seeds.iter().find_map(Batcher::trouble);
                shared.table.write().unwrap_or_else(PoisonError::into_inner).trouble = trouble;
                shared.refreshed.notify_waiters();
            }
        }
        if let Some(ranges) = ranges {
            seeds = None;
            shared.install(&ranges);
            let troubled = shared.table().servers.values().any(|batcher| batcher.trouble().is_some());
            let interval = if troubled { REFRESH_DURING_TROUBLE } else { REFRESH };
            let _ = tokio::time::timeout(interval, shared.stale.notified()).await;
        }
        tokio::time::sleep(MIN_PAUSE).await;
    }
}

/// The slot ranges that a server reports (`CLUSTER SLOTS`): first slot, last slot, primary.
async fn slot_ranges(batcher: &Batcher) -> Option<Vec<(u16, u16, Host)>> {
    let command = redis::cmd("CLUSTER").arg("SLOTS").to_owned();
    let read = |value| if let Value::Array(rows) = value { Ok(rows) } else { Err(Malformed) };
    let rows = tokio::time::timeout(Duration::from_secs(1), batcher.command(&command, Target::Own, read))
        .await
        .ok()?
        .ok()?;
    let ranges: Vec<(u16, u16, Host)> = rows.iter().filter_map(range).collect();
    (!ranges.is_empty()).then_some(ranges)
}

fn range(row: &Value) -> Option<(u16, u16, Host)> {
    let Value::Array(row) = row else { return None };
    let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = &row[..] else { return None };
    let [Value::BulkString(name), Value::Int(port), ..] = &primary[..] else { return None };
    let host = Host { name: String::from_utf8(name.clone()).ok()?, port: u16::try_from(*port).ok()? };
    Some((u16::try_from(*first).ok()?, u16::try_from(*last).ok()?, host))
}

fn host(address: &str) -> Option<Host> {
    let (name, port) = address.rsplit_once(':')?;
    Some(Host { name: name.trim_matches(['[', ']']).to_owned(), port: port.parse().ok()? })
}
