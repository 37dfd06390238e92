//! The store on Redis or Valkey: many nodes, one count.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use redis::{FromRedisValue as _, Value};
use tokio::task::JoinHandle;
use tollkeeper_core::charge::Item;
use tollkeeper_core::{Charge, Fix, Key, Ruling, Secret, Slot, Toll, siphash};

use super::address::{Address, RedisTls};
use super::cluster::Cluster;
use super::keys::{self, Format, Names};
use super::lane::Lane;
use super::topology::{Refused, Topology};
use super::wire::{self, Batch, Call, Handling};
use crate::clock::Clock;
use crate::random;
use crate::remote::{Asked, Failure, FailureKind, Remote};
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

/// How often a node looks whether its secret is still there, and who is primary.
const LOOKS: Duration = Duration::from_secs(1);

impl RedisStore {
    /// Begins to connect: a server that is not there yet is waited for, and missed by whoever asks meanwhile.
    /// Needs a tokio runtime.
    pub fn open(url: &RedisUrl, options: RedisOptions) -> RedisStore {
        let addresses = Address::of(url, options.tls);
        let address = addresses.first().expect("a URL leads somewhere").clone();
        let topology = match url.servers {
            Servers::Cluster { .. } => {
                Topology::Many(Cluster::new(addresses, options.connections), Refused::default())
            }
            _ => Topology::One(Lane::new(&address, options.connections)),
        };
        let inner = Arc::new_cyclic(|weak: &std::sync::Weak<Inner>| {
            let keeper = tokio::spawn(keep(weak.clone(), address));
            Inner {
                names: Names::new(&options.prefix, options.format),
                topology,
                numbers: (random::secret(), AtomicU64::new(0)),
                secret: RwLock::new(None),
                clock: Clock::system(),
                keepers: vec![keeper],
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

    async fn decide(&self, asked: wire::Asked) -> Asked<Ruling> {
        self.secret_of_all().await?;
        let id = asked.id();
        Ok(self.topology.decide(asked, |state| self.names.marker(state, id)).await?)
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
        let mut held = true;
        for place in slots(&named) {
            let keys =
                named.iter().filter(|(other, _)| *other == place).map(|(_, name)| name.clone()).collect();
            held &= self.run(wire::handling(slot, handling, keys), wire::handled).await?;
        }
        Ok(held)
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

/// Looks now and then whether the secret is still there, and whether the sentinels changed their mind.
async fn keep(store: std::sync::Weak<Inner>, address: Address) {
    let mut primary = None;
    loop {
        tokio::time::sleep(LOOKS).await;
        let Some(store) = store.upgrade() else { return };
        if address.is_sentinel()
            && let Some(now) = address.primary().await
            && primary.replace(now.clone()).is_some_and(|before| before != now)
        {
            tracing::info!("{address} is {now} now");
            store.topology.give_up();
        }
        // Whatever goes wrong is said by those who ask for decisions.
        let _ = store.renew_secret().await;
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
        let id = if toll.verb().charges() { inner.number() } else { 0 };
        let asked = wire::Asked::new(toll, id, |due| inner.names.state(due.key));
        if asked.names().next().is_none() {
            // Limits that grant nothing have no state: what they say is known.
            let mut rulings = Batch::new(vec![asked]).rulings_without_store(inner.clock.now());
            return Answer::Ready(Ok(rulings.pop().expect("one toll, one ruling")));
        }
        Answer::Later(Box::pin(inner.decide(asked)))
    }

    fn correct<'a>(&'a self, charge: &'a Charge, fixes: &'a [Fix]) -> Answer<'a, Asked<Correction>> {
        let inner = &*self.inner;
        Answer::Later(Box::pin(async move {
            let mut corrected: Option<Correction> = None;
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
                let done = inner.run(call, wire::corrected).await?;
                // What was done in one slot was done, whatever another says.
                corrected = Some(if corrected == Some(Correction::Done) { Correction::Done } else { done });
            }
            Ok(corrected.unwrap_or(Correction::Unknown))
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

    fn seal_slot(&self, slot: &Slot) -> String {
        self.inner.secret().map_or_else(String::new, |secret| slot.seal(&secret, keys::short))
    }

    fn open_slot(&self, text: &str) -> Option<Slot> {
        Slot::open(text, &self.inner.secret()?)
    }
}
