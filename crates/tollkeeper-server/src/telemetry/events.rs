//! What happens, once a second, for everybody who listens: written once, however many they are.

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
use tollkeeper::BreakerState;

use crate::json::Writer;
use crate::service::Service;
use crate::store::Store;
use crate::transport::connection_budget::Busy;

/// How many may listen at a time.
pub const MOST: usize = 64;
const EVERY: Duration = Duration::from_secs(1);

/// Whoever tells, and those who listen.
#[derive(Debug)]
pub struct Events {
    /// Gone when nothing more will be told.
    told: Mutex<Option<watch::Sender<Bytes>>>,
    seats: Arc<Semaphore>,
}

impl Default for Events {
    fn default() -> Events {
        let told = Mutex::new(Some(watch::Sender::new(Bytes::new())));
        Events { told, seats: Arc::new(Semaphore::new(MOST)) }
    }
}

impl Events {
    /// Listens from now on; nothing if there are too many already, or nothing more is told.
    pub fn listen(&self) -> Option<Listening> {
        let seat = Arc::clone(&self.seats).try_acquire_owned().ok()?;
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.subscribe();
        Some(Listening { next: Box::pin(next(told)), alive: None, _seat: seat })
    }

    /// Ends for all who listen.
    pub fn end(&self) {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Tells everybody; false if nothing more will be told.
    fn tell(&self, text: impl FnOnce() -> String) -> bool {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(told) = &*told else { return false };
        if told.receiver_count() > 0 {
            told.send_replace(format!("data: {}\n\n", text()).into());
        }
        true
    }
}

/// Tells once a second what has happened since the start, until the service stops.
pub async fn tell(service: Arc<Service>) {
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if !service.events.tell(|| event(&service)) {
            return;
        }
    }
}

type Next = Pin<Box<dyn Future<Output = Option<(Bytes, watch::Receiver<Bytes>)>> + Send>>;

/// Somebody who listens. Who is too slow misses what came between.
pub struct Listening {
    next: Next,
    /// Told of every piece that is taken: the connection is not idle.
    alive: Option<(Arc<AtomicBool>, Busy)>,
    _seat: OwnedSemaphorePermit,
}

impl fmt::Debug for Listening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Listening")
    }
}

impl Listening {
    /// Says of every piece that the connection takes.
    pub fn note(&mut self, alive: &Arc<AtomicBool>, busy: Busy) {
        self.alive = Some((Arc::clone(alive), busy));
    }

    /// The next piece; nothing at the end.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let Some((text, told)) = ready!(self.next.as_mut().poll(context)) else { return Poll::Ready(None) };
        if let Some((alive, _)) = &self.alive {
            alive.store(true, Relaxed);
        }
        self.next = Box::pin(next(told));
        Poll::Ready(Some(text))
    }
}

async fn next(mut told: watch::Receiver<Bytes>) -> Option<(Bytes, watch::Receiver<Bytes>)> {
    told.changed().await.ok()?;
    let text = told.borrow_and_update().clone();
    Some((text, told))
}

fn event(service: &Service) -> String {
    let mut out = Writer::default();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    out.raw("{\"t\":");
    out.number(now);
    out.raw(",\"version\":");
    out.number(service.in_force().version);
    let [allowed, refused, degraded] = service.metrics.requests();
    for (name, count) in [("requests\":{\"allowed", allowed), ("refused", refused), ("degraded", degraded)] {
        out.raw(",\"");
        out.raw(name);
        out.raw("\":");
        out.number(count);
    }
    out.raw("},\"limits\":{");
    for (index, (limit, [allowed, refused, would_refuse])) in service.metrics.limits().iter().enumerate() {
        out.raw(if index > 0 { "," } else { "" });
        out.text(limit);
        out.raw(":{\"allowed\":");
        out.number(*allowed);
        out.raw(",\"refused\":");
        out.number(*refused);
        out.raw(",\"would_refuse\":");
        out.number(*would_refuse);
        out.raw("}");
    }
    out.raw("},\"store\":{\"state\":");
    out.text(match &service.store {
        Store::Memory(_) => "ok",
        Store::Redis(store) => match store.breaker() {
            BreakerState::Closed => "ok",
            BreakerState::Open => "open",
            BreakerState::HalfOpen => "half-open",
        },
    });
    out.raw(",\"p99_ms\":");
    out.or_null(service.metrics.store_p99_ms(), |out, millis| out.raw(&millis.to_string()));
    out.raw("},\"keys\":");
    out.number(service.store.memory().keys() as u64);
    out.raw("}");
    out.finish()
}
