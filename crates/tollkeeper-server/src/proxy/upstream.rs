//! Resolves the addresses of the upstream, ejects those that fail, and picks one for each request.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::ArcSwap;
use hyper::client::conn::TrySendError;
use hyper::{Request, Response, body::Incoming};
use tokio::sync::Notify;
use tokio::time::Instant;
use tollkeeper::Span;
use tollkeeper::config::{HealthSettings, ProxySettings};
use tollkeeper_tower::random;

use super::connect::{Connector, Endpoint, Opened};
use super::counters::{Counted, Counters};
use super::error::UpstreamError;
use super::pool::{Pool, Sender};
use super::target::{Location, UpstreamUrl};
use super::upload::LimitedUpload;
use crate::telemetry::metrics::DurationHistogram;

/// How often the name of the upstream is resolved, and expired idle connections are closed.
const RESOLVE_EVERY: Duration = Duration::from_secs(30);
/// How long resolving may take.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);
/// The shortest time between two attempts to resolve, when connections fail.
const RESOLVE_PAUSE: Duration = Duration::from_secs(1);

/// The upstream of a proxy.
#[derive(Debug)]
pub struct Upstream {
    resolver: Resolver,
    addresses: ArcSwap<Vec<Arc<UpstreamAddress>>>,
    connector: Connector,
    counters: Arc<Counters>,
    /// Notified when a connection failed: the name may have other addresses by now.
    stale: Notify,
    began: Instant,
}

/// How the addresses of an upstream are found.
#[derive(Debug)]
pub enum Resolver {
    /// By the system, for a host and a port.
    Dns(String, u16),
    /// A single address that never changes.
    Fixed(Endpoint),
    /// By a list that a test can change.
    #[cfg(test)]
    List(std::sync::Mutex<Vec<Endpoint>>),
}

impl Resolver {
    /// The resolver for an upstream.
    pub fn of(target: &UpstreamUrl) -> Resolver {
        match &target.location {
            Location::Host(host, port) => Resolver::Dns(host.clone(), *port),
            Location::Unix(path) => Resolver::Fixed(Endpoint::Unix(path.clone())),
        }
    }

    /// The name that is resolved, for messages.
    fn host(&self) -> String {
        match self {
            Resolver::Dns(host, _) => host.clone(),
            Resolver::Fixed(endpoint) => endpoint.to_string(),
            #[cfg(test)]
            Resolver::List(_) => "list".to_owned(),
        }
    }

    async fn resolve(&self) -> io::Result<Vec<Endpoint>> {
        match self {
            Resolver::Dns(host, port) => {
                let found = tokio::net::lookup_host((host.as_str(), *port)).await?;
                Ok(found.map(Endpoint::Tcp).collect())
            }
            Resolver::Fixed(endpoint) => Ok(vec![endpoint.clone()]),
            #[cfg(test)]
            Resolver::List(list) => Ok(list.lock().expect("not poisoned").clone()),
        }
    }
}

/// An address of the upstream, with its own pool and health.
#[derive(Debug)]
pub struct UpstreamAddress {
    endpoint: Endpoint,
    /// As it is shown in metrics and logs.
    pub label: Arc<str>,
    pool: Pool,
    in_flight: AtomicUsize,
    /// Consecutive failures.
    failures: AtomicU32,
    /// All failures.
    errors: AtomicU64,
    /// When its ejection ends, in milliseconds since `Upstream::began`.
    ejected_until: AtomicU64,
    durations: Arc<DurationHistogram>,
    counters: Arc<Counters>,
}

impl UpstreamAddress {
    fn new(endpoint: Endpoint, counters: &Arc<Counters>) -> UpstreamAddress {
        let label: Arc<str> = endpoint.to_string().into();
        UpstreamAddress {
            endpoint,
            durations: counters.durations_of(&label),
            label,
            pool: Pool::new(Arc::clone(counters)),
            in_flight: AtomicUsize::new(0),
            failures: AtomicU32::new(0),
            errors: AtomicU64::new(0),
            ejected_until: AtomicU64::new(0),
            counters: Arc::clone(counters),
        }
    }

    /// The counters of the proxy.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Requests in flight, for the dashboard.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Relaxed)
    }

    /// Failures before the head of a response, for the dashboard.
    pub fn errors(&self) -> u64 {
        self.errors.load(Relaxed)
    }
}

impl Upstream {
    /// An upstream whose addresses are not known yet.
    pub fn new(resolver: Resolver, connector: Connector, counters: Arc<Counters>) -> Upstream {
        let addresses = ArcSwap::default();
        Upstream { resolver, addresses, connector, counters, stale: Notify::new(), began: Instant::now() }
    }

    /// Resolves the name now. Addresses that stay keep their connections and their health.
    pub async fn resolve(&self) {
        let resolved = tokio::time::timeout(RESOLVE_TIMEOUT, self.resolver.resolve()).await;
        let host = self.resolver.host();
        let mut found = match resolved.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(found) if !found.is_empty() => found,
            Ok(_) => return tracing::warn!("`{host}` has no address: known addresses stay in use"),
            Err(error) => {
                return tracing::warn!("cannot resolve `{host}`: {error} (known addresses stay in use)");
            }
        };
        // DNS servers rotate their answers.
        found.sort();
        found.dedup();
        let known = self.addresses.load_full();
        if known.iter().map(|address| &address.endpoint).eq(&found) {
            return;
        }
        let addresses: Vec<Arc<UpstreamAddress>> = found
            .into_iter()
            .map(|endpoint| match known.iter().find(|address| address.endpoint == endpoint) {
                Some(address) => Arc::clone(address),
                None => Arc::new(UpstreamAddress::new(endpoint, &self.counters)),
            })
            .collect();
        let shown: Vec<&str> = addresses.iter().map(|address| &*address.label).collect();
        tracing::info!("addresses of the upstream: {}", shown.join(", "));
        self.addresses.store(Arc::new(addresses));
    }

    /// Resolves the name periodically and after failed connections, and closes expired idle connections. Never returns.
    pub async fn keep_up_to_date(&self) {
        loop {
            let _ = tokio::time::timeout(RESOLVE_EVERY, self.stale.notified()).await;
            self.resolve().await;
            for address in self.addresses.load().iter() {
                address.pool.close_expired();
            }
            self.counters.ejected.store(u64::try_from(self.ejected().count()).unwrap_or(0), Relaxed);
            tokio::time::sleep(RESOLVE_PAUSE).await;
        }
    }

    /// The counters of the proxy.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The addresses that are in use.
    pub fn addresses(&self) -> Arc<Vec<Arc<UpstreamAddress>>> {
        self.addresses.load_full()
    }

    /// The less busy of two random addresses that are not ejected, and if possible not the one that has just failed.
    pub fn pick(&self, failed: Option<&Arc<UpstreamAddress>>) -> Option<Arc<UpstreamAddress>> {
        let addresses = self.addresses.load();
        if let [only] = addresses.as_slice() {
            return Some(Arc::clone(only));
        }
        let now = self.now();
        let has_failed =
            |address: &Arc<UpstreamAddress>| failed.is_some_and(|failed| Arc::ptr_eq(failed, address));
        let is_usable = |address: &&Arc<UpstreamAddress>| !is_ejected(address, now) && !has_failed(address);
        let usable: Vec<&Arc<UpstreamAddress>> = addresses.iter().filter(is_usable).collect();
        let candidates = if usable.is_empty() { addresses.iter().collect() } else { usable };
        // `None` if there is nothing to draw from.
        let draw = |count: usize| {
            let drawn = random::draw().checked_rem(u64::try_from(count).ok()?)?;
            usize::try_from(drawn).ok()
        };
        let one = draw(candidates.len())?;
        let Some(other) = draw(candidates.len() - 1) else { return Some(Arc::clone(candidates[one])) };
        // Skips the first, so that the two differ.
        let other = if other >= one { other + 1 } else { other };
        let less_busy = if candidates[other].in_flight() < candidates[one].in_flight() { other } else { one };
        Some(Arc::clone(candidates[less_busy]))
    }

    /// A connection to an address: an idle one, if there is one that will do.
    pub async fn connect(
        &self,
        address: &Arc<UpstreamAddress>,
        wanted: WantedConnection,
        settings: &ProxySettings,
    ) -> Result<UpstreamCall, UpstreamError> {
        let counted = Counted::new(&self.counters, |counters| &counters.in_flight);
        address.in_flight.fetch_add(1, Relaxed);
        let mut call =
            UpstreamCall { sender: None, reused: true, address: Arc::clone(address), _counted: counted };
        while !wanted.only_new
            && let Some(mut sender) = address.pool.take(wanted.only_http1, settings.idle_timeout)
        {
            // The connection becomes ready when the end of the last response has been processed. One whose upstream has
            // responded without reading the whole request never does.
            let ready = async {
                match &mut sender {
                    Sender::Http1(sender) => sender.ready().await,
                    Sender::Http2(shared) => shared.sender.ready().await,
                }
            };
            if let Ok(Ok(())) = tokio::time::timeout(settings.connect_timeout, ready).await {
                call.sender = Some(sender);
                return Ok(call);
            }
        }
        call.reused = false;
        let opened = self.connector.open(&address.endpoint, settings, wanted.only_http1).await;
        call.sender = Some(match opened.inspect_err(|_| self.stale.notify_one())? {
            Opened::Http1(sender) => Sender::Http1(sender),
            Opened::Http2(sender) => Sender::Http2(address.pool.share(sender, settings.idle_timeout)),
        });
        Ok(call)
    }

    /// Notes that an address has answered.
    pub fn succeeded(&self, address: &UpstreamAddress, took: Duration) {
        address.durations.record(took);
        if address.failures.load(Relaxed) != 0 {
            address.failures.store(0, Relaxed);
        }
    }

    /// Notes that an address has failed, and ejects it after too many failures, unless half of them are ejected already.
    pub fn failed(&self, address: &UpstreamAddress, error: UpstreamError, health: &HealthSettings) {
        self.counters.failed(error);
        address.errors.fetch_add(1, Relaxed);
        let failures = address.failures.fetch_add(1, Relaxed).saturating_add(1);
        let (now, count) = (self.now(), self.addresses.load().len());
        if failures < health.failures || is_ejected(address, now) || (self.ejected().count() + 1) * 2 > count
        {
            return;
        }
        // Between 85 % and 115 %, so that several proxies do not return to it at once.
        let millis = u64::try_from(health.eject.as_millis()).unwrap_or(u64::MAX / 200);
        let jittered = millis.saturating_mul(85 + random::draw() % 31) / 100;
        address.ejected_until.store(now.saturating_add(jittered.max(1)), Relaxed);
        address.failures.store(0, Relaxed);
        self.counters.ejected.store(u64::try_from(self.ejected().count()).unwrap_or(0), Relaxed);
        tracing::warn!(
            "ejected the upstream address {} for {} after {failures} failures in a row",
            address.label,
            Span::from(Duration::from_millis(jittered))
        );
    }

    /// Whether an address is ejected.
    pub fn is_ejected(&self, address: &UpstreamAddress) -> bool {
        is_ejected(address, self.now())
    }

    fn ejected(&self) -> impl Iterator<Item = Arc<UpstreamAddress>> {
        let now = self.now();
        let addresses = self.addresses.load_full();
        let ejected: Vec<_> = addresses.iter().filter(|address| is_ejected(address, now)).cloned().collect();
        ejected.into_iter()
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

fn is_ejected(address: &UpstreamAddress, now: u64) -> bool {
    address.ejected_until.load(Relaxed) > now
}

/// Which connections a request can use.
#[derive(Clone, Copy, Debug, Default)]
pub struct WantedConnection {
    /// Not one that has carried a request.
    pub only_new: bool,
    /// Not HTTP/2, over which no connection can be upgraded.
    pub only_http1: bool,
}

/// A connection that carries one request. If this is dropped before the response has ended, the connection is closed.
#[derive(Debug)]
pub struct UpstreamCall {
    sender: Option<Sender>,
    /// Whether the connection had carried a request before.
    pub reused: bool,
    address: Arc<UpstreamAddress>,
    _counted: Counted,
}

impl UpstreamCall {
    /// The address that the connection leads to.
    pub fn address(&self) -> &Arc<UpstreamAddress> {
        &self.address
    }

    /// Whether requests are sent over HTTP/2.
    pub fn is_http2(&self) -> bool {
        matches!(self.sender, Some(Sender::Http2(_)))
    }

    /// Sends a request. The error returns the request if certainly none of it was sent.
    pub async fn send(
        &mut self,
        request: Request<LimitedUpload>,
    ) -> Result<Response<Incoming>, TrySendError<Request<LimitedUpload>>> {
        match self.sender.as_mut().expect("a call has a connection until it ends") {
            Sender::Http1(sender) => sender.try_send_request(request).await,
            Sender::Http2(shared) => shared.sender.try_send_request(request).await,
        }
    }

    /// Uses no longer an HTTP/2 connection on which a request has failed: it may be dead. Requests that share it go on.
    pub fn forget_connection(&self) {
        if let Some(Sender::Http2(shared)) = &self.sender {
            self.address.pool.forget(shared);
        }
    }

    /// Returns the connection to the pool, for at most this long.
    pub fn keep_for(mut self, idle: Duration) {
        if let Some(Sender::Http1(sender)) = self.sender.take() {
            self.address.pool.put(sender, Instant::now() + idle);
        }
    }
}

impl Drop for UpstreamCall {
    fn drop(&mut self) {
        self.address.in_flight.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests;
