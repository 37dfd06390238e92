//! The [`Remote`] store on Redis or Valkey, which lets many nodes share one count.

use std::sync::{Arc, RwLock};

use redis::Value;
use tollkeeper_core::charge::Item;
use tollkeeper_core::{Charge, Due, Key, KeyCorrection, Reply, Secret, Slot, Toll};

use super::address::{Address, RedisTls};
use super::eviction::any_known;
use super::keys::{self, Format, Names};
use super::session::{Session, Shared};
use super::slot;
use super::wire::{self, Batch, Handling, Malformed, Nonce};
use crate::background;
use crate::clock::Clock;
use crate::process::PerProcess;
use crate::store::remote::{Failure, PartialToll, Remote, RemoteResult, Server, Split};
use crate::store::url::{RedisUrl, Servers};
use crate::store::{Correction, LeaseGrant, LeaseRequest, StoreFuture};

/// Options of a store on Redis.
#[derive(Clone, Debug)]
pub struct RedisOptions {
    /// The prefix of all keys, such as `tk`.
    pub prefix: String,
    /// How key names are written.
    pub format: Format,
    /// Connections to each server: one in use, the others as spares.
    pub connections: usize,
    /// Certificates for `rediss://` URLs.
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

/// A store on a single server, on the primary that sentinels name, or on a cluster. Cheap to clone.
#[derive(Clone, Debug)]
pub struct RedisStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    /// The session on the runtime that the store was opened in, for calls from that runtime.
    home: Option<Session>,
    /// The session on the background runtime, for all other calls: from a thread without a runtime, from another
    /// runtime, and from a forked process.
    background: PerProcess<Session>,
    clock: Clock,
}

impl RedisStore {
    /// Starts to connect in the background. While the server cannot be reached, connecting is retried and calls fail.
    ///
    /// A store that is opened in a tokio runtime uses it for calls that are awaited there. All other calls
    /// ([`wait`](crate::Request::wait), another executor, a forked process) run on a background thread of the store,
    /// over separate connections.
    pub fn open(url: &RedisUrl, options: RedisOptions) -> RedisStore {
        let shared = Arc::new(Shared {
            names: Names::new(&options.prefix, options.format),
            addresses: Address::of(url, options.tls),
            connections: options.connections,
            is_cluster: matches!(url.servers, Servers::Cluster { .. }),
            secret: RwLock::new(None),
        });
        let home = background::ambient().map(|runtime| Session::open(&shared, &runtime));
        let inner = Inner { shared, home, background: PerProcess::new(), clock: Clock::system() };
        if inner.home.is_none() {
            // If this fails, the first call tries again and reports why.
            let _ = inner.session();
        }
        RedisStore { inner: Arc::new(inner) }
    }

    /// The key names of this store, for keys other than states.
    pub(super) fn names(&self) -> &Names {
        &self.inner.shared.names
    }

    /// The clock of this process, which measures deadlines.
    pub(super) fn clock(&self) -> &Clock {
        &self.inner.clock
    }

    /// The session for a call from the current thread, runtime and process.
    pub(super) fn session(&self) -> RemoteResult<&Session> {
        self.inner.session()
    }

    /// Why the server cannot be used; `None` if it can.
    pub fn trouble(&self) -> Option<Arc<str>> {
        self.inner.sessions().find_map(|session| session.topology().trouble())
    }

    /// Whether any server may evict keys, and with them their counts; `None` if unknown.
    pub fn may_evict(&self) -> Option<bool> {
        any_known(self.inner.sessions().map(|session| session.topology().may_evict()))
    }
}

impl Inner {
    /// The session for a call from the current thread, runtime and process.
    fn session(&self) -> RemoteResult<&Session> {
        if let (Some(home), Some(runtime)) = (&self.home, background::ambient())
            && home.runtime().id() == runtime.id()
            && home.process() == std::process::id()
        {
            return Ok(home);
        }
        let open = || Ok(Session::open(&self.shared, background::runtime()?));
        self.background.get_or_try_init(open).map_err(|error| Failure::no_thread(&error))
    }

    /// The sessions of this process.
    fn sessions(&self) -> impl Iterator<Item = &Session> {
        let process = std::process::id();
        let home = self.home.as_ref().filter(|home| home.process() == process);
        home.into_iter().chain(self.background.get())
    }

    fn decide<'a>(
        &'a self,
        session: &'a Session,
        toll: &Toll,
        id: u64,
    ) -> StoreFuture<'a, RemoteResult<Reply>> {
        let encoded = self.encode(toll, id);
        if encoded.names().next().is_none() {
            // Limits that grant nothing have no state: they are decided without the store.
            let mut replies =
                Batch::new(vec![encoded], Nonce::default()).replies_without_store(self.clock.now());
            return StoreFuture::Ready(Ok(replies.pop().expect("one toll, one reply")));
        }
        StoreFuture::Later(Box::pin(async move {
            if self.shared.secret().is_none() {
                // On the heap: it is needed once, and the future of every decision stays small.
                Box::pin(session.secret()).await?;
            }
            Ok(session.topology().decide(encoded).await?)
        }))
    }

    /// Encodes a toll whose admission will carry this ID.
    fn encode(&self, toll: &Toll, id: u64) -> wire::EncodedToll {
        wire::EncodedToll::new(toll, id, |due| self.shared.names.state(due.key))
    }

    /// The cluster slot of a key; 0 outside of a cluster.
    fn slot(&self, key: &str) -> u16 {
        if self.shared.is_cluster { slot::of(key) } else { 0 }
    }

    /// Releases or renews a held slot, with one call for each cluster slot of its keys.
    async fn handle(&self, session: &Session, slot: &Slot, handling: Handling) -> RemoteResult<bool> {
        let named: Vec<(u16, String)> = slot
            .items()
            .iter()
            .map(|item| self.shared.names.item(item))
            .map(|name| (self.slot(&name), name))
            .collect();
        let (mut held, mut failed) = (true, None);
        for cluster_slot in slots(&named) {
            let keys = named
                .iter()
                .filter(|(other, _)| *other == cluster_slot)
                .map(|(_, name)| name.clone())
                .collect();
            let call = wire::handling(session.nonce(), slot.id(), handling, keys);
            match session.run(&call, wire::handled).await {
                Ok(was_held) => held &= was_held,
                Err(failure) => failed = Some(failure),
            }
        }
        failed.map_or(Ok(held), Err)
    }

    /// Opens a receipt: at once if the secret is known, which it is after the first decision of this node.
    fn open<'a, T: Send + 'a>(
        &'a self,
        open: impl FnOnce(&Secret) -> Option<T> + Send + 'a,
    ) -> StoreFuture<'a, RemoteResult<Option<T>>> {
        match self.shared.secret() {
            Some(secret) => StoreFuture::Ready(Ok(open(&secret))),
            None => self.with_session(move |session| async move { Ok(open(&session.secret().await?)) }),
        }
    }

    /// Makes a call in the session of the current thread, runtime and process.
    fn with_session<'a, T: Send, F: Future<Output = RemoteResult<T>> + Send + 'a>(
        &'a self,
        call: impl FnOnce(&'a Session) -> F,
    ) -> StoreFuture<'a, RemoteResult<T>> {
        match self.session() {
            Ok(session) => StoreFuture::Later(Box::pin(call(session))),
            Err(failure) => StoreFuture::Ready(Err(failure)),
        }
    }
}

/// Whether `UNLINK` found the key.
fn unlinked(reply: Value) -> Result<bool, Malformed> {
    match reply {
        Value::Int(count @ (0 | 1)) => Ok(count == 1),
        _ => Err(Malformed),
    }
}

/// The distinct cluster slots of these pairs.
fn slots<T>(all: &[(u16, T)]) -> Vec<u16> {
    let mut slots: Vec<u16> = all.iter().map(|(slot, _)| *slot).collect();
    slots.sort_unstable();
    slots.dedup();
    slots
}

impl Remote for RedisStore {
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, RemoteResult<Reply>> {
        match self.session() {
            Ok(session) => self.inner.decide(session, toll, session.id_for(toll)),
            Err(failure) => StoreFuture::Ready(Err(failure)),
        }
    }

    fn lease(&self, request: &LeaseRequest) -> StoreFuture<'_, RemoteResult<Option<LeaseGrant>>> {
        let session = match self.session() {
            Ok(session) => session,
            Err(failure) => return StoreFuture::Ready(Err(failure)),
        };
        let encoded = wire::EncodedToll::lease(request, |due| self.inner.shared.names.state(due.key));
        StoreFuture::Later(Box::pin(async move {
            // Admissions from permits have charges, which the secret seals.
            session.secret().await?;
            Ok(Some(wire::granted(&session.topology().decide(encoded).await?)))
        }))
    }

    fn split(&self, toll: &Toll) -> Split {
        let inner = &*self.inner;
        if !inner.shared.is_cluster {
            return Split::Whole(Server::default());
        }
        let Ok(session) = self.session() else { return Split::Whole(Server::default()) };
        let slot =
            |due: Due<'_>| (due.quota.count() > 0).then(|| inner.slot(&inner.shared.names.state(due.key)));
        let slots: Vec<Option<u16>> = toll.dues().map(slot).collect();
        // Limits without a key are decided together with the first limit that has one.
        let home = slots.iter().find_map(|slot| *slot).unwrap_or(0);
        let mut parts: Vec<(u16, Vec<usize>)> = Vec::new();
        for (limit, slot) in slots.into_iter().map(|slot| slot.unwrap_or(home)).enumerate() {
            match parts.iter_mut().find(|(other, _)| *other == slot) {
                Some((_, limits)) => limits.push(limit),
                None => parts.push((slot, vec![limit])),
            }
        }
        if parts.len() <= 1 {
            return Split::Whole(session.topology().server(home));
        }
        let id = session.id_for(toll);
        let part = |(slot, places): (u16, Vec<usize>)| PartialToll {
            server: session.topology().server(slot),
            toll: toll.part(&places),
            places,
            id,
        };
        Split::Apart(parts.into_iter().map(part).collect())
    }

    fn decide_part(&self, part: &PartialToll) -> StoreFuture<'_, RemoteResult<Reply>> {
        match self.session() {
            Ok(session) => self.inner.decide(session, &part.toll, part.id),
            Err(failure) => StoreFuture::Ready(Err(failure)),
        }
    }

    fn undo<'a>(&'a self, part: &'a PartialToll, reply: &'a Reply) -> StoreFuture<'a, RemoteResult<()>> {
        let inner = &*self.inner;
        inner.with_session(move |session| async move {
            let encoded = inner.encode(&part.toll, part.id);
            let marker = |state: &str| inner.shared.names.marker(state, part.id);
            for call in encoded.undo(&part.toll, reply, marker, || session.nonce()) {
                session.run(&call, wire::undone).await?;
            }
            Ok(())
        })
    }

    fn server_of(&self, items: &[Item]) -> Option<Server> {
        let inner = &*self.inner;
        if !inner.shared.is_cluster {
            return Some(Server::default());
        }
        let session = self.session().ok()?;
        let slot = |item: &Item| inner.slot(&inner.shared.names.item(item));
        let mut servers = items.iter().map(|item| session.topology().server(slot(item)));
        let first = servers.next()?;
        servers.all(|server| server == first).then_some(first)
    }

    fn correct<'a>(
        &'a self,
        charge: &'a Charge,
        corrections: &'a [KeyCorrection],
    ) -> StoreFuture<'a, RemoteResult<Correction>> {
        let (inner, names) = (&*self.inner, &self.inner.shared.names);
        inner.with_session(move |session| async move {
            let (mut corrected, mut failed) = (None, None);
            let all: Vec<(u16, (&Item, &KeyCorrection))> = charge
                .items()
                .iter()
                .zip(corrections)
                .map(|(item, fix)| (inner.slot(&names.item(item)), (item, fix)))
                .collect();
            for slot in slots(&all) {
                let items = all.iter().filter(|(other, _)| *other == slot).map(|(_, pair)| *pair);
                let call = wire::correction(session.nonce(), charge.void_at(), items, |item| {
                    let state = names.item(item);
                    let marker = names.marker(&state, charge.id());
                    [state, marker]
                });
                match session.run(&call, wire::corrected).await {
                    // A correction that was made in one slot counts as made, whatever the other slots reply.
                    Ok(done) if corrected != Some(Correction::Done) => corrected = Some(done),
                    Ok(_) => {}
                    Err(failure) => failed = Some(failure),
                }
            }
            failed.map_or(Ok(corrected.unwrap_or(Correction::Unknown)), Err)
        })
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>> {
        self.inner.with_session(|session| self.inner.handle(session, slot, Handling::Release))
    }

    fn renew<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>> {
        self.inner.with_session(|session| self.inner.handle(session, slot, Handling::Renew))
    }

    fn forget<'a>(&'a self, key: Key<'a>) -> StoreFuture<'a, RemoteResult<bool>> {
        let name = self.inner.shared.names.state(key);
        self.inner.with_session(move |session| async move {
            session.command(&name, redis::cmd("UNLINK").arg(&name), unlinked).await
        })
    }

    fn arrivals(&self, server: &Server) -> u64 {
        self.inner.sessions().map(|session| session.topology().arrivals_of(server)).sum()
    }

    fn seal_charge(&self, charge: &Charge) -> Option<String> {
        Some(charge.seal(&self.inner.shared.secret()?, keys::short))
    }

    fn open_charge<'a>(&'a self, text: &'a str) -> StoreFuture<'a, RemoteResult<Option<Charge>>> {
        self.inner.open(move |secret| Charge::open(text, secret))
    }

    fn seal_slot(&self, slot: &Slot) -> Option<String> {
        Some(slot.seal(&self.inner.shared.secret()?, keys::short))
    }

    fn open_slot<'a>(&'a self, text: &'a str) -> StoreFuture<'a, RemoteResult<Option<Slot>>> {
        self.inner.open(move |secret| Slot::open(text, secret))
    }
}
