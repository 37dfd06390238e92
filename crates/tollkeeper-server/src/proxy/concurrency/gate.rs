//! The gate in front of an upstream: a request enters when it gets a slot, waits for one in a bounded queue, or is shed.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::StatusCode;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};
use tollkeeper::config::CountedUntil;
use tollkeeper::{Span, Time};

use super::priorities::Priorities;
use super::slots::{ConcurrencyLimit, Slots, TakenSlot};
use super::step::{Bounds, Ending};

/// Limits the requests in flight to one upstream. All clones share its slots.
#[derive(Clone, Debug)]
pub struct Gate(Arc<Shared>);

/// How many requests a gate lets in, and which.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateSettings {
    /// How many requests may be in flight.
    pub limit: LimitSettings,
    /// Which requests are shed first.
    pub priorities: Priorities,
    /// How many requests may wait for a slot, such as 0.
    pub queue: usize,
    /// How long each may wait.
    pub queue_wait: Duration,
    /// Until when a request is in flight.
    pub count: CountedUntil,
}

/// How many requests may be in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitSettings {
    /// Always this many.
    Fixed(u32),
    /// As many as the latency of the upstream allows.
    Adaptive(Bounds),
}

/// The state of a gate, for metrics and the dashboard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateView {
    /// The limit, such as 46.
    pub limit: u32,
    /// The limit in force: during a probe of an adaptive limit, about a third of `limit`.
    pub in_force: u32,
    /// The latency of the upstream without a queue, as an adaptive limit has measured it.
    pub floor: Option<Span>,
    /// How many requests are in flight.
    pub in_flight: u32,
    /// How many requests wait for a slot.
    pub waiting: usize,
    /// How many requests of each priority have been shed.
    pub shed: BTreeMap<Box<str>, u64>,
}

/// The upstream is at its limit: the request got no slot.
#[derive(Clone, PartialEq, Eq)]
pub struct Shed {
    /// The priority of the request.
    pub priority: Box<str>,
}

impl Default for GateSettings {
    /// 512 requests of equal priority, and no queue.
    fn default() -> GateSettings {
        GateSettings {
            limit: LimitSettings::Fixed(512),
            priorities: Priorities::none(),
            queue: 0,
            queue_wait: Duration::from_millis(100),
            count: CountedUntil::Response,
        }
    }
}

impl Gate {
    /// An open gate. Needs a tokio runtime for its clock.
    pub fn new(settings: GateSettings) -> Gate {
        let limit = match settings.limit {
            LimitSettings::Fixed(limit) => ConcurrencyLimit::Fixed(limit),
            LimitSettings::Adaptive(bounds) => adaptive(bounds, START),
        };
        let state = GateState {
            slots: Slots::new(limit, settings.priorities.shares()),
            queue: VecDeque::new(),
            shed: settings.priorities.names().map(|name| (name.into(), 0)).collect(),
            settings,
        };
        Gate(Arc::new(Shared { state: Mutex::new(state), started: Instant::now() }))
    }

    /// Takes a slot for a request of this priority. If no slot is free, the request waits in the queue. It is shed if the
    /// queue is full, or after `queue_wait`.
    pub async fn enter(&self, priority: Option<&str>) -> Result<GatePermit, Shed> {
        let (waiting, queue_wait) = match self.0.enter_or_wait(priority)? {
            EnterOrWait::Entered(permit) => return Ok(permit),
            EnterOrWait::Waits(waiting, queue_wait) => (waiting, queue_wait),
        };
        match timeout(queue_wait, waiting).await {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(self.0.lock().shed(priority)),
        }
    }

    /// Applies other settings. Requests in flight keep their slots, and an adaptive limit keeps what it has measured.
    pub fn replace(&self, settings: GateSettings) {
        let granted = {
            let now = self.0.now();
            let mut state = self.0.lock();
            let limit = match (settings.limit, state.slots.limit()) {
                (LimitSettings::Fixed(limit), _) => ConcurrencyLimit::Fixed(limit),
                (LimitSettings::Adaptive(bounds), ConcurrencyLimit::Adaptive(limit)) => {
                    ConcurrencyLimit::Adaptive(limit.clone().with_bounds(bounds))
                }
                (LimitSettings::Adaptive(bounds), ConcurrencyLimit::Fixed(_)) => adaptive(bounds, now),
            };
            state.slots.replace(limit, settings.priorities.shares());
            for name in settings.priorities.names() {
                state.shed.entry(name.into()).or_default();
            }
            state.settings = settings;
            state.serve(&self.0, now)
        };
        deliver(granted);
    }

    /// The state of the gate.
    pub fn view(&self) -> GateView {
        let state = self.0.lock();
        let limit = state.slots.limit();
        GateView {
            limit: limit.limit(),
            in_force: limit.in_force(),
            floor: limit.floor(),
            in_flight: state.slots.in_flight(),
            waiting: state.queue.iter().filter(|waiter| !waiter.entry.is_closed()).count(),
            shed: state.shed.clone(),
        }
    }
}

/// The time at which every gate starts.
const START: Time = Time::from_micros(0);

fn adaptive(bounds: Bounds, now: Time) -> ConcurrencyLimit {
    ConcurrencyLimit::adaptive(bounds, now, tollkeeper_tower::random::draw())
}

#[derive(Debug)]
struct Shared {
    state: Mutex<GateState>,
    started: Instant,
}

#[derive(Debug)]
struct GateState {
    settings: GateSettings,
    slots: Slots,
    /// In arrival order. Those whose request was dropped are closed.
    queue: VecDeque<Waiter>,
    shed: BTreeMap<Box<str>, u64>,
}

#[derive(Debug)]
struct Waiter {
    priority: Option<Box<str>>,
    entry: oneshot::Sender<GatePermit>,
}

enum EnterOrWait {
    Entered(GatePermit),
    Waits(oneshot::Receiver<GatePermit>, Duration),
}

impl Shared {
    fn enter_or_wait(self: &Arc<Shared>, priority: Option<&str>) -> Result<EnterOrWait, Shed> {
        let now = self.now();
        let mut state = self.lock();
        // The limit may have grown since the last response: waiting requests are first.
        let granted = state.serve(self, now);
        let entry = match state.take(self, priority, now) {
            Some(permit) => Ok(EnterOrWait::Entered(permit)),
            None if state.queue.len() < state.settings.queue => {
                let (entry, waiting) = oneshot::channel();
                state.queue.push_back(Waiter { priority: priority.map(Box::from), entry });
                Ok(EnterOrWait::Waits(waiting, state.settings.queue_wait))
            }
            None => Err(state.shed(priority)),
        };
        drop(state);
        deliver(granted);
        entry
    }

    fn now(&self) -> Time {
        START + Span::from(self.started.elapsed())
    }

    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GateState {
    fn take(&mut self, shared: &Arc<Shared>, priority: Option<&str>, now: Time) -> Option<GatePermit> {
        let (index, _) = self.settings.priorities.find(priority);
        let slot = self.slots.enter(index, now)?;
        Some(GatePermit { shared: Arc::clone(shared), slot, sent: Some(Instant::now()), holds_slot: true })
    }

    /// Gives slots to waiting requests, in FIFO order among those whose share has room. The caller must deliver them
    /// without the lock: an entry whose request was dropped frees its slot again.
    fn serve(&mut self, shared: &Arc<Shared>, now: Time) -> Vec<(oneshot::Sender<GatePermit>, GatePermit)> {
        let mut granted = Vec::new();
        for _ in 0..self.queue.len() {
            let waiter = self.queue.pop_front().expect("the loop runs once for each");
            if waiter.entry.is_closed() {
                continue;
            }
            match self.take(shared, waiter.priority.as_deref(), now) {
                Some(permit) => granted.push((waiter.entry, permit)),
                None => self.queue.push_back(waiter),
            }
        }
        granted
    }

    fn shed(&mut self, priority: Option<&str>) -> Shed {
        let (_, name) = self.settings.priorities.find(priority);
        if let Some(shed) = self.shed.get_mut(name) {
            *shed += 1;
        }
        Shed { priority: name.into() }
    }
}

fn deliver(granted: Vec<(oneshot::Sender<GatePermit>, GatePermit)>) {
    for (entry, permit) in granted {
        drop(entry.send(permit));
    }
}

/// A request that holds a slot, which is freed when this is dropped.
#[derive(Debug)]
pub struct GatePermit {
    shared: Arc<Shared>,
    slot: TakenSlot,
    /// When it was sent, from the end of its upload until its ending is reported.
    sent: Option<Instant>,
    holds_slot: bool,
}

impl GatePermit {
    /// Measures the latency from `at` on: opening a connection, a first attempt that is retried, and a slow upload are not
    /// work of the upstream.
    pub fn sent(&mut self, at: Instant) {
        self.sent = Some(at);
    }

    /// Measures nothing until [`GatePermit::sent`]: a client that leaves during its upload says nothing about the upstream.
    pub fn uploading(&mut self) {
        self.sent = None;
    }

    /// Reports that the head of the response has arrived, or that there will be none. With [`CountedUntil::Head`] this frees
    /// the slot.
    pub fn head(&mut self, ending: Ending) {
        self.end(ending, false);
    }

    fn end(&mut self, ending: Ending, is_dropped: bool) {
        let shared = Arc::clone(&self.shared);
        let now = shared.now();
        let mut state = shared.lock();
        if let Some(sent) = self.sent.take() {
            state.slots.report(self.slot, Span::from(sent.elapsed()), ending, now);
        }
        if self.holds_slot && (is_dropped || state.settings.count == CountedUntil::Head) {
            self.holds_slot = false;
            state.slots.leave();
        }
        let granted = state.serve(&shared, now);
        drop(state);
        deliver(granted);
    }
}

impl Drop for GatePermit {
    fn drop(&mut self) {
        self.end(Ending::Left, true);
    }
}

impl Ending {
    /// The ending of a request that was answered with this status.
    pub fn of(status: StatusCode) -> Ending {
        match status {
            StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => {
                Ending::Failed
            }
            _ => Ending::Answered,
        }
    }
}

impl fmt::Display for Shed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the upstream is at its limit of concurrent requests (priority `{}`)", self.priority)
    }
}

impl fmt::Debug for Shed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Shed {}

#[cfg(test)]
#[path = "gate_tests.rs"]
mod tests;
