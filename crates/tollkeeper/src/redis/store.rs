//! The store on Redis or Valkey: many nodes, one count.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::Duration;

use redis::{FromRedisValue as _, Value};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tollkeeper_core::charge::Item;
use tollkeeper_core::{Charge, Due, Fix, Key, Ruling, Secret, Slot, Toll, siphash};

use super::address::{Address, RedisTls};
use super::cluster::Cluster;
use super::keys::{self, Format, Names};
use super::lane::Lane;
use super::sentinel::Switches;
use super::topology::Topology;
use super::wire::{self, Batch, Call, Handling};
use crate::clock::Clock;
use crate::random;
use crate::remote::{Asked, Failure, FailureKind, Part, Remote, Server, Split};
use crate::store::{Answer, Correction};
use crate::store_url::{RedisUrl, Servers};

/// How a store on Redis is used.
#[derive(Clone, Debug)]
pub struct RedisOptions {
    /// What all keys begin with.
    pub prefix: String,
    /// How keys are written.
    pub format: Format,
    /// Connections to each server: one is in use, the others stand by.
    pub connections: usize,
    /// Certificates, for `rediss://`.
    pub tls: RedisTls,
}

impl Default for RedisOptions {
    fn default() -> RedisOptions {
        RedisOptions {
            prefix: "tk".to_owned(),
            format: Format::Readable,
            connections: 2,
            tls: RedisTls::default(),
        }
    }
}

/// A store on one server, or on whoever the sentinels call primary. Cheap to clone.
#[derive(Clone, Debug)]
pub struct RedisStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    names: Names,
    topology: Topology,
    /// What numbers of admissions are made of: a secret of this process, and a counter.
    numbers: (Secret, AtomicU64),
    secret: RwLock<Option<Secret>>,
    clock: Clock,
    keepers: Vec<JoinHandle<()>>,
}

/// How often a node looks whether its secret is still there, and asks sentinels who is primary.
const LOOKS: Duration = Duration::from_millis(500);
/// The longest that it takes to look after a new connection: whoever is behind it may have lost everything.
const GLANCES: Duration = Duration::from_millis(100);

impl RedisStore {
    /// Begins to connect: a server that is not there yet is waited for, and missed by whoever asks meanwhile.
    /// Needs a tokio runtime.
    pub fn open(url: &RedisUrl, options: RedisOptions) -> RedisStore {
        let addresses = Address::of(url, options.tls);
        let address = addresses.first().expect("a URL leads somewhere").clone();
        let topology = match url.servers {
            Servers::Cluster { .. } => Topology::Many(Cluster::new(addresses, options.connections)),
            _ => Topology::One(Lane::new(&address, options.connections)),
        };
        let inner = Arc::new_cyclic(|weak: &Weak<Inner>| {
            let keepers =
                vec![tokio::spawn(keep_secret(weak.clone())), tokio::spawn(follow(weak.clone(), address))];
            Inner {
                names: Names::new(&options.prefix, options.format),
                topology,
                numbers: (random::secret(), AtomicU64::new(0)),
                secret: RwLock::new(None),
                clock: Clock::system(),
                keepers,
            }
        });
        RedisStore { inner }
    }

    /// For what is kept beside states.
    #[cfg(feature = "config")]
    pub(super) fn parts(&self) -> (&Names, &Topology) {
        (&self.inner.names, &self.inner.topology)
    }

    /// Why the server cannot be asked, if it cannot.
    pub fn trouble(&self) -> Option<Arc<str>> {
        self.inner.topology.trouble()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.keepers.iter().for_each(JoinHandle::abort);
    }
}

impl Inner {
    /// A number that no other admission has, on any node.
    fn number(&self) -> u64 {
        let (secret, counter) = &self.numbers;
        let hash = siphash::hash(secret, &counter.fetch_add(1, Relaxed).to_le_bytes());
        u64::try_from(hash & u128::from(u64::MAX)).expect("64 bits")
    }

    /// What travels of a toll, whose admission will carry this number.
    fn asked(&self, toll: &Toll, id: u64) -> wire::Asked {
        wire::Asked::new(toll, id, |due| self.names.state(due.key))
    }

    fn decide(&self, asked: wire::Asked) -> Answer<'_, Asked<Ruling>> {
        if asked.names().next().is_none() {
            // Limits that grant nothing have no state: what they say is known.
            let mut rulings = Batch::new(vec![asked]).rulings_without_store(self.clock.now());
            return Answer::Ready(Ok(rulings.pop().expect("one toll, one ruling")));
        }
        Answer::Later(Box::pin(async move {
            self.secret_of_all().await?;
            Ok(self.topology.decide(asked).await?)
        }))
    }

    /// The number of a toll that wants to be admitted.
    fn number_of(&self, toll: &Toll) -> u64 {
        if toll.verb().charges() { self.number() } else { 0 }
    }

    async fn run<T>(&self, call: Call, read: fn(&wire::Value) -> Result<T, wire::Malformed>) -> Asked<T> {
        let value = self.topology.run(&call).await?;
        read(&value).map_err(|error| Failure::new(FailureKind::Nonsense, error.to_string()))
    }

    /// Releases or renews what is held, slot by slot of the cluster.
    async fn handle(&self, slot: &Slot, handling: Handling) -> Asked<bool> {
        let named: Vec<(u16, String)> = slot
            .items()
            .iter()
            .map(|item| self.names.item(item))
            .map(|name| (self.topology.slot(&name), name))
            .collect();
        let (mut held, mut failed) = (true, None);
        for place in slots(&named) {
            let keys =
                named.iter().filter(|(other, _)| *other == place).map(|(_, name)| name.clone()).collect();
            match self.run(wire::handling(slot, handling, keys), wire::handled).await {
                Ok(was_held) => held &= was_held,
                Err(failure) => failed = Some(failure),
            }
        }
        failed.map_or(Ok(held), Err)
    }

    /// The secret that receipts of this store are sealed with: the same for all nodes, drawn by the first.
    async fn secret_of_all(&self) -> Asked<Secret> {
        if let Some(secret) = self.secret() {
            return Ok(secret);
        }
        self.renew_secret().await
    }

    fn secret(&self) -> Option<Secret> {
        *self.secret.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks what the secret is; if there is none, puts ours back, or a new one.
    async fn renew_secret(&self) -> Asked<Secret> {
        let name = self.names.shared("secret");
        let topology = &self.topology;
        let found = topology.command(&name, redis::cmd("GET").arg(&name)).await?;
        let bytes = match found {
            Value::BulkString(bytes) => bytes,
            _ => {
                let [one, other] = [self.secret().unwrap_or_else(random::secret), random::secret()];
                let drawn = [one.0, other.0].concat();
                topology.command(&name, redis::cmd("SET").arg(&name).arg(&drawn[..]).arg("NX")).await?;
                // Another node may have been first.
                let found = topology.command(&name, redis::cmd("GET").arg(&name)).await?;
                Vec::<u8>::from_redis_value(found)
                    .map_err(|error| Failure::new(FailureKind::Nonsense, error.to_string()))?
            }
        };
        let secret = bytes.first_chunk().copied().map(Secret).ok_or_else(|| {
            Failure::new(FailureKind::Nonsense, format!("`{name}` is too short to be a secret: delete it"))
        })?;
        *self.secret.write().unwrap_or_else(PoisonError::into_inner) = Some(secret);
        Ok(secret)
    }
}

/// Looks now and then whether the secret is still there. Whatever goes wrong is said by those who ask for decisions.
async fn keep_secret(store: Weak<Inner>) {
    let (mut arrivals, mut looked) = (0, Instant::now());
    loop {
        tokio::time::sleep(GLANCES).await;
        let Some(store) = store.upgrade() else { return };
        let before = std::mem::replace(&mut arrivals, store.topology.arrivals());
        if before == arrivals && looked.elapsed() < LOOKS {
            continue;
        }
        looked = Instant::now();
        let _ = store.renew_secret().await;
    }
}

/// Goes where the sentinels say: they tell of a change, and are asked now and then whether they did not.
async fn follow(store: Weak<Inner>, address: Address) {
    let Some(mut switches) = Switches::of(&address) else { return };
    let mut primary = address.primary().await;
    loop {
        let now = tokio::select! {
            told = switches.next() => told,
            () = tokio::time::sleep(LOOKS) => address.primary().await,
        };
        let Some(store) = store.upgrade() else { return };
        // Each sentinel tells; the first that does is heeded.
        if now.is_some() && now != primary {
            primary = now;
            tracing::info!("{address} has moved");
            store.topology.give_up();
        }
    }
}

/// The slots of these, each once.
fn slots<T>(all: &[(u16, T)]) -> Vec<u16> {
    let mut slots: Vec<u16> = all.iter().map(|(slot, _)| *slot).collect();
    slots.sort_unstable();
    slots.dedup();
    slots
}

impl Remote for RedisStore {
    fn decide(&self, toll: &Toll) -> Answer<'_, Asked<Ruling>> {
        let inner = &*self.inner;
        inner.decide(inner.asked(toll, inner.number_of(toll)))
    }

    fn split(&self, toll: &Toll) -> Split {
        let inner = &*self.inner;
        let Topology::Many(_) = inner.topology else { return Split::Whole(Server::default()) };
        let slot =
            |due: Due<'_>| (due.quota.count() > 0).then(|| inner.topology.slot(&inner.names.state(due.key)));
        let slots: Vec<Option<u16>> = toll.dues().map(slot).collect();
        // What has no key goes with the first that has one.
        let home = slots.iter().find_map(|slot| *slot).unwrap_or(0);
        let mut parts: Vec<(u16, Vec<usize>)> = Vec::new();
        for (place, slot) in slots.into_iter().map(|slot| slot.unwrap_or(home)).enumerate() {
            match parts.iter_mut().find(|(other, _)| *other == slot) {
                Some((_, places)) => places.push(place),
                None => parts.push((slot, vec![place])),
            }
        }
        if parts.len() <= 1 {
            return Split::Whole(inner.topology.server(home));
        }
        let id = inner.number_of(toll);
        let part = |(slot, places): (u16, Vec<usize>)| Part {
            server: inner.topology.server(slot),
            toll: toll.part(&places),
            places,
            id,
        };
        Split::Apart(parts.into_iter().map(part).collect())
    }

    fn decide_part(&self, part: &Part) -> Answer<'_, Asked<Ruling>> {
        self.inner.decide(self.inner.asked(&part.toll, part.id))
    }

    fn undo<'a>(&'a self, part: &'a Part, ruling: &'a Ruling) -> Answer<'a, Asked<()>> {
        let inner = &*self.inner;
        Answer::Later(Box::pin(async move {
            let asked = inner.asked(&part.toll, part.id);
            for call in asked.undo(ruling, |state| inner.names.marker(state, part.id)) {
                inner.topology.run(&call).await?;
            }
            Ok(())
        }))
    }

    fn server_of(&self, items: &[Item]) -> Option<Server> {
        let inner = &*self.inner;
        let Topology::Many(_) = inner.topology else { return Some(Server::default()) };
        let mut servers =
            items.iter().map(|item| inner.topology.server(inner.topology.slot(&inner.names.item(item))));
        let first = servers.next()?;
        servers.all(|server| server == first).then_some(first)
    }

    fn correct<'a>(&'a self, charge: &'a Charge, fixes: &'a [Fix]) -> Answer<'a, Asked<Correction>> {
        let inner = &*self.inner;
        Answer::Later(Box::pin(async move {
            let (mut corrected, mut failed) = (None, None);
            let all: Vec<(u16, (&Item, &Fix))> = charge
                .items()
                .iter()
                .zip(fixes)
                .map(|(item, fix)| (inner.topology.slot(&inner.names.item(item)), (item, fix)))
                .collect();
            for slot in slots(&all) {
                let items = all.iter().filter(|(other, _)| *other == slot).map(|(_, both)| *both);
                let call = wire::correction(charge.void_at(), items, |item| {
                    let state = inner.names.item(item);
                    let marker = inner.names.marker(&state, charge.id());
                    [state, marker]
                });
                match inner.run(call, wire::corrected).await {
                    // What was done in one slot was done, whatever another says.
                    Ok(done) if corrected != Some(Correction::Done) => corrected = Some(done),
                    Ok(_) => {}
                    Err(failure) => failed = Some(failure),
                }
            }
            failed.map_or(Ok(corrected.unwrap_or(Correction::Unknown)), Err)
        }))
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> Answer<'a, Asked<bool>> {
        Answer::Later(Box::pin(self.inner.handle(slot, Handling::Release)))
    }

    fn renew<'a>(&'a self, slot: &'a Slot) -> Answer<'a, Asked<bool>> {
        Answer::Later(Box::pin(self.inner.handle(slot, Handling::Renew)))
    }

    fn forget<'a>(&'a self, key: Key<'a>) -> Answer<'a, Asked<bool>> {
        let name = self.inner.names.state(key);
        Answer::Later(Box::pin(async move {
            let gone = self.inner.topology.command(&name, redis::cmd("UNLINK").arg(&name)).await?;
            Ok(matches!(gone, Value::Int(count) if count > 0))
        }))
    }

    fn seal_charge(&self, charge: &Charge) -> String {
        self.inner.secret().map_or_else(String::new, |secret| charge.seal(&secret, keys::short))
    }

    fn open_charge(&self, text: &str) -> Option<Charge> {
        Charge::open(text, &self.inner.secret()?)
    }

    fn arrivals(&self, server: &Server) -> u64 {
        self.inner.topology.arrivals_of(server)
    }

    fn seal_slot(&self, slot: &Slot) -> String {
        self.inner.secret().map_or_else(String::new, |secret| slot.seal(&secret, keys::short))
    }

    fn open_slot(&self, text: &str) -> Option<Slot> {
        Slot::open(text, &self.inner.secret()?)
    }
}
