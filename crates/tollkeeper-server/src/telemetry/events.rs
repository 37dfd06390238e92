//! The event stream of `GET /v1/events`: one server-sent event a second, rendered once for all subscribers.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hyper::body::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{MissedTickBehavior, interval};
use tollkeeper::store::BreakerState;
use tollkeeper_engine::api::call::ShowLimits as _;
use tollkeeper_engine::json::Writer;

use crate::service::Service;
use crate::telemetry::history::Sample;
use crate::transport::connection_budget::Busy;

/// The maximum number of subscribers at a time.
pub const MOST: usize = 64;
const INTERVAL: Duration = Duration::from_secs(1);

/// Sends events to all subscribers.
#[derive(Debug)]
pub struct Events {
    /// `None` once the stream has ended.
    sender: Mutex<Option<watch::Sender<Bytes>>>,
    permits: Arc<Semaphore>,
}

impl Default for Events {
    fn default() -> Events {
        let sender = Mutex::new(Some(watch::Sender::new(Bytes::new())));
        Events { sender, permits: Arc::new(Semaphore::new(MOST)) }
    }
}

impl Events {
    /// Subscribes from now on; `None` if there are [`MOST`] subscribers already, or the stream has ended.
    pub fn listen(&self) -> Option<Listening> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        let receiver = self.sender.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.subscribe();
        Some(Listening { next: Box::pin(next(receiver)), alive: None, _permit: permit })
    }

    /// Ends the stream for all subscribers.
    pub fn end(&self) {
        self.sender.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Sends an event to all subscribers; `false` if the stream has ended.
    fn send(&self, text: impl FnOnce() -> String) -> bool {
        let sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(sender) = &*sender else { return false };
        if sender.receiver_count() > 0 {
            sender.send_replace(format!("data: {}\n\n", text()).into());
        }
        true
    }
}

/// Once a second, records the counts in the history and sends them to all subscribers, until the service drains.
pub async fn send_every_second(service: Arc<Service>) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut store_times = service.metrics.store_times();
    loop {
        ticks.tick().await;
        let before = std::mem::replace(&mut store_times, service.metrics.store_times());
        service.history.record(unix_time(), &sample(&service, store_times.since(&before).quantile(0.99)));
        if !service.events.send(|| event(&service)) {
            return;
        }
    }
}

type Next = Pin<Box<dyn Future<Output = Option<(Bytes, watch::Receiver<Bytes>)>> + Send>>;

/// One subscriber. A slow one skips to the newest event.
pub struct Listening {
    next: Next,
    /// Set for every event that the connection takes: such a connection is not idle.
    alive: Option<(Arc<AtomicBool>, Busy)>,
    _permit: OwnedSemaphorePermit,
}

impl fmt::Debug for Listening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Listening")
    }
}

impl Listening {
    /// Sets `alive` for every event that the connection takes, and keeps it marked as busy.
    pub fn note(&mut self, alive: &Arc<AtomicBool>, busy: Busy) {
        self.alive = Some((Arc::clone(alive), busy));
    }

    /// The next event; `None` at the end of the stream.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let Some((text, receiver)) = ready!(self.next.as_mut().poll(context)) else {
            return Poll::Ready(None);
        };
        if let Some((alive, _)) = &self.alive {
            alive.store(true, Relaxed);
        }
        self.next = Box::pin(next(receiver));
        Poll::Ready(Some(text))
    }
}

async fn next(mut receiver: watch::Receiver<Bytes>) -> Option<(Bytes, watch::Receiver<Bytes>)> {
    receiver.changed().await.ok()?;
    let text = receiver.borrow_and_update().clone();
    Some((text, receiver))
}

fn sample(service: &Service, p99_ms: Option<f64>) -> Sample {
    Sample {
        requests: service.metrics.requests(),
        limits: service.metrics.limits().into_iter().map(|(name, counts)| (name, counts.results)).collect(),
        active: service.limiter.policy().rules().iter().map(|rule| rule.name().into()).collect(),
        p99_ms,
        store: match service.store.breaker() {
            BreakerState::Closed => 0,
            BreakerState::HalfOpen => 1,
            BreakerState::Open => 2,
        },
        keys: service.store.memory().keys() as u64,
    }
}

fn event(service: &Service) -> String {
    let (active, mut out) = (service.active_limits(), Writer::default());
    out.raw("{\"t\":");
    out.number(unix_time());
    out.raw(",\"version\":");
    out.number(active.version);
    out.raw(",\"source\":");
    out.text(active.source.name());
    out.raw(",\"shadowed\":");
    out.bool(active.shadowed);
    out.raw(",\"error\":");
    out.or_null(active.error.as_deref(), Writer::text);
    let [allowed, refused, degraded] = service.metrics.requests();
    for (name, count) in [("requests\":{\"allowed", allowed), ("refused", refused), ("degraded", degraded)] {
        out.raw(",\"");
        out.raw(name);
        out.raw("\":");
        out.number(count);
    }
    out.raw("},\"limits\":{");
    let starved = service.metrics.top_keys.starved();
    for (index, (limit, counts)) in service.metrics.limits().iter().enumerate() {
        out.raw(if index > 0 { "," } else { "" });
        out.text(limit);
        let [allowed, refused, would_refuse] = counts.results;
        for (name, count) in [
            (":{\"allowed\":", allowed),
            (",\"refused\":", refused),
            (",\"would_refuse\":", would_refuse),
            (",\"skipped\":", counts.skipped),
            (",\"fallback\":", counts.fallback),
            (",\"starved\":", starved.get(limit).copied().unwrap_or(0)),
        ] {
            out.raw(name);
            out.number(count);
        }
        out.raw(",\"remaining\":");
        out.list(counts.remaining, Writer::number);
        out.raw("}");
    }
    out.raw("},\"store\":{\"state\":");
    out.text(match service.store.breaker() {
        BreakerState::Closed => "ok",
        BreakerState::Open => "open",
        BreakerState::HalfOpen => "half-open",
    });
    out.raw(",\"p99_ms\":");
    out.or_null(service.metrics.store_p99_ms(), |out, millis| out.raw(&millis.to_string()));
    out.raw("},\"keys\":");
    out.number(service.store.memory().keys() as u64);
    out.raw(",\"max_keys\":");
    out.number(service.store.memory().capacity().max_keys as u64);
    if let Some(proxy) = service.proxy() {
        out.raw(",\"upstream\":");
        proxy.write_view(&mut out);
    }
    out.raw("}");
    out.finish()
}

fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
