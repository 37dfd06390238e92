//! The store on Redis or Valkey: many nodes, one count.

use std::sync::{Arc, RwLock};

use redis::Value;
use tollkeeper_core::charge::Item;
use tollkeeper_core::{Charge, Due, Fix, Key, Reply, Secret, Slot, Toll};

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
use crate::store::{Correction, StoreFuture};

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

/// A store on one server, on the primary that the sentinels name, or on a cluster. Cheap to clone.
#[derive(Clone, Debug)]
pub struct RedisStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    /// On the runtime that the store was opened in: for calls from there.
    home: Option<Session>,
    /// On the background runtime: for all other calls, such as those of a thread without a runtime, of a runtime that
    /// outlived the one above, and of a process that was forked.
    background: PerProcess<Session>,
    clock: Clock,
}

impl RedisStore {
    /// Begins to connect. A server that is not there yet is waited for; calls fail meanwhile.
    ///
    /// Opened in a tokio runtime, the store uses it for calls that are awaited there. Calls from elsewhere
    /// ([`wait`](crate::Request::wait), another executor, a forked process) are made by a thread of its own, over
    /// connections of its own.
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
            // If it cannot be opened now, the first call tries again and says why.
            let _ = inner.session();
        }
        RedisStore { inner: Arc::new(inner) }
    }

    /// For what is kept beside states.
    #[cfg(feature = "config")]
    pub(super) fn names(&self) -> &Names {
        &self.inner.shared.names
    }

    /// The connections for a call that is made here and now.
    pub(super) fn session(&self) -> RemoteResult<&Session> {
        self.inner.session()
    }

    /// Why the server cannot be asked, if it cannot.
    pub fn trouble(&self) -> Option<Arc<str>> {
        self.inner.sessions().find_map(|session| session.topology().trouble())
    }

    /// Whether the store may evict keys, and with them counts; `None` if it does not say. Of several servers, whether
    /// one of them may.
    pub fn may_evict(&self) -> Option<bool> {
        any_known(self.inner.sessions().map(|session| session.topology().may_evict()))
    }
}

impl Inner {
    /// The connections for a call that is made here and now.
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

    /// All connections of this process.
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
        let asked = self.asked(toll, id);
        if asked.names().next().is_none() {
            // Limits that grant nothing have no state: what they say is known.
            let mut rulings =
                Batch::new(vec![asked], Nonce::default()).rulings_without_store(self.clock.now());
            return StoreFuture::Ready(Ok(rulings.pop().expect("one toll, one ruling")));
        }
        StoreFuture::Later(Box::pin(async move {
            session.secret().await?;
            Ok(session.topology().decide(asked).await?)
        }))
    }

    /// What travels of a toll, whose admission will carry this number.
    fn asked(&self, toll: &Toll, id: u64) -> wire::EncodedToll {
        wire::EncodedToll::new(toll, id, |due| self.shared.names.state(due.key))
    }

    /// The slot of a key; a server without slots has one.
    fn slot(&self, key: &str) -> u16 {
        if self.shared.is_cluster { slot::of(key) } else { 0 }
    }

    /// Releases or renews what is held, slot by slot of the cluster.
    async fn handle(&self, session: &Session, slot: &Slot, handling: Handling) -> RemoteResult<bool> {
        let named: Vec<(u16, String)> = slot
            .items()
            .iter()
            .map(|item| self.shared.names.item(item))
            .map(|name| (self.slot(&name), name))
            .collect();
        let (mut held, mut failed) = (true, None);
        for place in slots(&named) {
            let keys =
                named.iter().filter(|(other, _)| *other == place).map(|(_, name)| name.clone()).collect();
            let call = wire::handling(session.nonce(), slot.id(), handling, keys);
            match session.run(&call, wire::handled).await {
                Ok(was_held) => held &= was_held,
                Err(failure) => failed = Some(failure),
            }
        }
        failed.map_or(Ok(held), Err)
    }

    /// Opens a receipt: at once if the secret is known, as it is after the first decision of this node.
    fn open<'a, T: Send + 'a>(
        &'a self,
        open: impl FnOnce(&Secret) -> Option<T> + Send + 'a,
    ) -> StoreFuture<'a, RemoteResult<Option<T>>> {
        match self.shared.secret() {
            Some(secret) => StoreFuture::Ready(Ok(open(&secret))),
            None => self.with_session(move |session| async move { Ok(open(&session.secret().await?)) }),
        }
    }

    /// Makes a call over the connections that are for it.
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

/// Whether a key was there.
fn unlinked(reply: Value) -> Result<bool, Malformed> {
    match reply {
        Value::Int(count @ (0 | 1)) => Ok(count == 1),
        _ => Err(Malformed),
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
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, RemoteResult<Reply>> {
        match self.session() {
            Ok(session) => self.inner.decide(session, toll, session.number_of(toll)),
            Err(failure) => StoreFuture::Ready(Err(failure)),
        }
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
            return Split::Whole(session.topology().server(home));
        }
        let id = session.number_of(toll);
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

    fn undo<'a>(&'a self, part: &'a PartialToll, ruling: &'a Reply) -> StoreFuture<'a, RemoteResult<()>> {
        let inner = &*self.inner;
        inner.with_session(move |session| async move {
            let asked = inner.asked(&part.toll, part.id);
            let marker = |state: &str| inner.shared.names.marker(state, part.id);
            for call in asked.undo(ruling, marker, || session.nonce()) {
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
        fixes: &'a [Fix],
    ) -> StoreFuture<'a, RemoteResult<Correction>> {
        let (inner, names) = (&*self.inner, &self.inner.shared.names);
        inner.with_session(move |session| async move {
            let (mut corrected, mut failed) = (None, None);
            let all: Vec<(u16, (&Item, &Fix))> = charge
                .items()
                .iter()
                .zip(fixes)
                .map(|(item, fix)| (inner.slot(&names.item(item)), (item, fix)))
                .collect();
            for slot in slots(&all) {
                let items = all.iter().filter(|(other, _)| *other == slot).map(|(_, both)| *both);
                let call = wire::correction(session.nonce(), charge.void_at(), items, |item| {
                    let state = names.item(item);
                    let marker = names.marker(&state, charge.id());
                    [state, marker]
                });
                match session.run(&call, wire::corrected).await {
                    // What was done in one slot was done, whatever another says.
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
