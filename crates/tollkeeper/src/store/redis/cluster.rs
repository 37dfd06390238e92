//! A cluster: which server has which slot, and what to do when that changes under way.
//!
//! The table of slots is our own. A server that is asked for what it no longer has says so and runs
//! nothing, so the call goes on to the one it names.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use redis::Value;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tollkeeper_core::Reply;

use super::address::Address;
use super::batcher::Lane;
use super::call_error::{Elsewhere, Fate};
use super::eviction::any_known;
use super::session::Env;
use super::slot::SLOTS;
use super::wire::{self, Call, Malformed};
use crate::store::remote::Server;
use crate::store::url::Host;

/// How often a call is sent on before it is given up.
const REDIRECTS: usize = 5;
/// How long keys that are on their way are waited for.
const ON_THEIR_WAY: Duration = Duration::from_millis(2);
/// How often the table is read anew without any reason, how often while a server cannot be reached, which may have
/// been replaced, and the pause between two readings with a reason.
const READINGS: [Duration; 3] =
    [Duration::from_secs(5), Duration::from_millis(250), Duration::from_millis(50)];

/// The servers of a cluster.
#[derive(Debug)]
pub(crate) struct Cluster {
    shared: Arc<Shared>,
    reader: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    env: Arc<Env>,
    seeds: Vec<Address>,
    connections: usize,
    map: RwLock<Map>,
    stale: Notify,
    /// Told whenever the table was read.
    read: Notify,
}

/// Who has which slot.
#[derive(Debug, Default)]
struct Map {
    servers: HashMap<Host, Arc<Lane>>,
    slots: Vec<Option<Arc<Lane>>>,
    /// Why nobody could be asked for the table, when it was last wanted.
    trouble: Option<Arc<str>>,
}

impl Cluster {
    pub(crate) fn new(env: &Arc<Env>, seeds: Vec<Address>, connections: usize) -> Cluster {
        let shared = Arc::new(Shared {
            env: Arc::clone(env),
            seeds,
            connections,
            map: RwLock::default(),
            stale: Notify::new(),
            read: Notify::new(),
        });
        let reader = env.runtime.spawn(read(Arc::clone(&shared)));
        Cluster { shared, reader }
    }

    /// Has a toll decided whose keys are all in this slot.
    pub(crate) async fn decide(&self, slot: u16, asked: wire::EncodedToll) -> Result<Reply, Fate> {
        let mut lane = self.lane(slot).await?;
        for _ in 0..REDIRECTS {
            match lane.decide(slot, asked.clone()).await {
                Err(Fate::Elsewhere(Elsewhere::Ask(address))) => {
                    let batch = wire::Batch::new(vec![asked], self.shared.env.nonce());
                    let read = |answer: &wire::Value| batch.rulings(answer);
                    let rulings = self.server(&address)?.run_asking(batch.call(), read).await?;
                    return Ok(rulings.rulings.into_iter().next().expect("one toll, one ruling"));
                }
                Err(Fate::Elsewhere(elsewhere)) => lane = self.redirected(slot, elsewhere, &lane).await?,
                answer => return self.seen(answer),
            }
        }
        Err(Fate::Refused(format!("slot {slot} was moved {REDIRECTS} times")))
    }

    /// Runs a script whose keys are all in this slot, and reads the reply.
    pub(crate) async fn run<T>(
        &self,
        slot: u16,
        call: &Call,
        read: impl Fn(&wire::Value) -> Result<T, Malformed>,
    ) -> Result<T, Fate> {
        let mut lane = self.lane(slot).await?;
        for _ in 0..REDIRECTS {
            match lane.run(call, &read).await {
                Err(Fate::Elsewhere(Elsewhere::Ask(address))) => {
                    return self.server(&address)?.run_asking(call, &read).await;
                }
                Err(Fate::Elsewhere(elsewhere)) => lane = self.redirected(slot, elsewhere, &lane).await?,
                answer => return self.seen(answer),
            }
        }
        Err(Fate::Refused(format!("slot {slot} was moved {REDIRECTS} times")))
    }

    /// Runs a command on the server that has this slot, and reads the reply.
    pub(crate) async fn command<T>(
        &self,
        slot: u16,
        command: &redis::Cmd,
        read: impl Fn(Value) -> Result<T, Malformed>,
    ) -> Result<T, Fate> {
        let mut lane = self.lane(slot).await?;
        for _ in 0..REDIRECTS {
            match lane.command(command, &read).await {
                Err(Fate::Elsewhere(elsewhere)) => lane = self.redirected(slot, elsewhere, &lane).await?,
                answer => return self.seen(answer),
            }
        }
        Err(Fate::Refused(format!("slot {slot} was moved {REDIRECTS} times")))
    }

    /// A server that is gone may have been replaced.
    fn seen<T>(&self, answer: Result<T, Fate>) -> Result<T, Fate> {
        if matches!(answer, Err(Fate::NotSent(_) | Fate::Unknown { usable: false, .. } | Fate::Foreign(_))) {
            self.shared.stale.notify_one();
        }
        answer
    }

    /// Who has a slot, as far as is known.
    pub(crate) fn server_of(&self, slot: u16) -> Server {
        let map = self.shared.map();
        let lane = map.slots.get(usize::from(slot)).and_then(Option::as_ref);
        lane.map_or_else(Server::default, |lane| Server::at(Arc::clone(lane.address())))
    }

    /// Why some server cannot be asked, if one cannot.
    pub(crate) fn trouble(&self) -> Option<Arc<str>> {
        let map = self.shared.map();
        map.servers.values().find_map(|lane| lane.trouble()).or_else(|| map.trouble.clone())
    }

    /// Whether a server may evict keys, if they say so.
    pub(crate) fn may_evict(&self) -> Option<bool> {
        any_known(self.shared.map().servers.values().map(|lane| lane.may_evict()))
    }

    /// How many connections there have been.
    pub(crate) fn arrivals(&self) -> u64 {
        self.shared.map().servers.values().map(|lane| lane.arrivals()).sum()
    }

    /// How many connections to this server there have been.
    pub(crate) fn arrivals_of(&self, server: &Server) -> u64 {
        let map = self.shared.map();
        let lane = map.servers.values().find(|lane| server.is_at(lane.address()));
        lane.map_or(0, |lane| lane.arrivals())
    }

    /// Who has a slot. Before the first reading of the table it is waited for, unless that has failed.
    async fn lane(&self, slot: u16) -> Result<Arc<Lane>, Fate> {
        loop {
            let read = self.shared.read.notified();
            {
                let map = self.shared.map();
                if let Some(Some(lane)) = map.slots.get(usize::from(slot)) {
                    return Ok(Arc::clone(lane));
                }
                if let Some(why) = map.trouble.as_ref().filter(|_| map.slots.is_empty()) {
                    return Err(Fate::NotSent(why.to_string()));
                }
                if !map.slots.is_empty() {
                    self.shared.stale.notify_one();
                    return Err(Fate::Refused(format!("no server of the cluster has slot {slot}")));
                }
            }
            read.await;
        }
    }

    async fn redirected(&self, slot: u16, to: Elsewhere, from: &Arc<Lane>) -> Result<Arc<Lane>, Fate> {
        match to {
            Elsewhere::Moved(address) => {
                self.shared.stale.notify_one();
                let lane = self.server(&address)?;
                let mut map = self.shared.map.write().unwrap_or_else(PoisonError::into_inner);
                if let Some(entry) = map.slots.get_mut(usize::from(slot)) {
                    *entry = Some(Arc::clone(&lane));
                }
                Ok(lane)
            }
            Elsewhere::TryAgain => {
                tokio::time::sleep(ON_THEIR_WAY).await;
                Ok(Arc::clone(from))
            }
            Elsewhere::Ask(_) | Elsewhere::NotPrimary => {
                self.shared.stale.notify_one();
                Err(Fate::Refused(format!("the server of slot {slot} is no primary any more")))
            }
        }
    }

    /// The server at this address, known or not.
    fn server(&self, address: &str) -> Result<Arc<Lane>, Fate> {
        let host = host(address).ok_or_else(|| Fate::nonsense(format!("`{address}` is not an address")))?;
        let mut map = self.shared.map.write().unwrap_or_else(PoisonError::into_inner);
        Ok(map.server(&self.shared, host))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Shared {
    fn map(&self) -> std::sync::RwLockReadGuard<'_, Map> {
        self.map.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over what a server says about all slots.
    fn install(&self, ranges: &[(u16, u16, Host)]) {
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        let mut slots = vec![None; usize::from(SLOTS)];
        for (first, last, host) in ranges {
            let lane = map.server(self, host.clone());
            for slot in *first..=(*last).min(SLOTS - 1) {
                slots[usize::from(slot)] = Some(Arc::clone(&lane));
            }
        }
        (map.slots, map.trouble) = (slots, None);
        map.servers.retain(|host, _| ranges.iter().any(|(_, _, named)| named == host));
        drop(map);
        self.read.notify_waiters();
    }
}

impl Map {
    fn server(&mut self, shared: &Shared, host: Host) -> Arc<Lane> {
        let lane = self.servers.entry(host.clone()).or_insert_with(|| {
            Arc::new(Lane::new(&shared.env, &shared.seeds[0].neighbour(host), shared.connections))
        });
        Arc::clone(lane)
    }
}

/// Reads the table now and then, and whenever somebody found it wrong.
async fn read(shared: Arc<Shared>) {
    let mut seeds: Option<Vec<Lane>> = None;
    loop {
        let known: Vec<Arc<Lane>> = shared.map().servers.values().cloned().collect();
        let mut ranges = None;
        for lane in &known {
            ranges = ranges_of(lane).await;
            if ranges.is_some() {
                break;
            }
        }
        if ranges.is_none() {
            // Nobody that is known answers: back to where it began.
            let seeds = seeds.get_or_insert_with(|| {
                shared.seeds.iter().map(|seed| Lane::new(&shared.env, seed, 1)).collect()
            });
            for lane in seeds.iter() {
                ranges = ranges_of(lane).await;
                if ranges.is_some() {
                    break;
                }
            }
            if ranges.is_none() {
                let trouble = seeds.iter().find_map(Lane::trouble);
                shared.map.write().unwrap_or_else(PoisonError::into_inner).trouble = trouble;
                shared.read.notify_waiters();
            }
        }
        if let Some(ranges) = ranges {
            seeds = None;
            shared.install(&ranges);
            let troubled = shared.map().servers.values().any(|lane| lane.trouble().is_some());
            let _ = tokio::time::timeout(READINGS[usize::from(troubled)], shared.stale.notified()).await;
        }
        tokio::time::sleep(READINGS[2]).await;
    }
}

/// What a server says about all slots.
async fn ranges_of(lane: &Lane) -> Option<Vec<(u16, u16, Host)>> {
    let command = redis::cmd("CLUSTER").arg("SLOTS").to_owned();
    let read = |value| if let Value::Array(rows) = value { Ok(rows) } else { Err(Malformed) };
    let rows = tokio::time::timeout(Duration::from_secs(1), lane.command(&command, read)).await.ok()?.ok()?;
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
