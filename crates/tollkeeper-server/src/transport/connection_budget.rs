//! Limits the open connections of all listeners together, because each is an open file of this process.
//!
//! Each listener has a guaranteed share, so that connections of one protocol cannot shut out the others. A listener at
//! its limit closes the connection that has been idle for the longest time, as clients with connection pools expect. If
//! none is idle, it closes the new connection.

use std::collections::HashMap;
use std::future::pending;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use tokio::time::timeout;

/// A connection without a request for this long may be closed to make room for another.
const IDLE: Duration = Duration::from_secs(1);
/// How long a new connection waits for the one that is closed for it.
const CLOSING: Duration = Duration::from_millis(100);

/// The protocol of a listener, as metrics name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// The HTTP API.
    Http,
    /// Envoy's rate limit service.
    Grpc,
    /// RESP, the protocol of Redis.
    Resp,
    /// The reverse proxy.
    Proxy,
}

impl Transport {
    /// All transports.
    pub const ALL: [Transport; 4] = [Transport::Http, Transport::Grpc, Transport::Resp, Transport::Proxy];

    /// Its name in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Http => "http",
            Transport::Grpc => "grpc",
            Transport::Resp => "resp",
            Transport::Proxy => "proxy",
        }
    }
}

/// The budget: the open connections of all listeners.
#[derive(Debug)]
pub struct Room {
    most: usize,
    /// Connections guaranteed to each listener. The guarantees add up to half of `most`.
    guaranteed: usize,
    began: Instant,
    open: Mutex<Listeners>,
    /// Notified whenever a connection has ended.
    freed: Notify,
}

/// The open connections of each listener.
type Listeners = Vec<(Transport, HashMap<u64, Arc<Usage>>)>;

/// The budget is used up, and no idle connection could be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom;

/// A connection that was admitted.
#[derive(Debug)]
pub struct Entered {
    /// Its seat.
    pub seat: Seat,
    /// Whether an idle connection was closed for it.
    pub evicted: bool,
}

impl Room {
    /// A budget of `most` connections for these listeners.
    pub fn new(most: usize, listeners: &[Transport]) -> Arc<Room> {
        let open = listeners.iter().map(|transport| (*transport, HashMap::new())).collect();
        Arc::new(Room {
            most,
            guaranteed: most / (2 * listeners.len().max(1)),
            began: Instant::now(),
            open: Mutex::new(open),
            freed: Notify::new(),
        })
    }

    /// The number of open connections of a listener.
    pub fn open(&self, transport: Transport) -> usize {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.iter().filter(|(of, _)| *of == transport).map(|(_, connections)| connections.len()).sum()
    }

    /// Takes a seat, if necessary by closing an idle connection.
    pub async fn enter(
        self: &Arc<Room>,
        transport: Transport,
        stopped: &watch::Receiver<()>,
    ) -> Result<Entered, NoRoom> {
        if let Some(seat) = self.take(transport, stopped) {
            return Ok(Entered { seat, evicted: false });
        }
        let longest_idle = self.longest_idle(transport).ok_or(NoRoom)?;
        let freed_seat = async {
            loop {
                let freed = self.freed.notified();
                if let Some(seat) = self.take(transport, stopped) {
                    return seat;
                }
                longest_idle.leave();
                freed.await;
            }
        };
        let seat = timeout(CLOSING, freed_seat).await.map_err(|_| NoRoom)?;
        Ok(Entered { seat, evicted: true })
    }

    /// Takes a free seat: one that is guaranteed to this listener, or one that is guaranteed to no listener.
    fn take(self: &Arc<Room>, transport: Transport, stopped: &watch::Receiver<()>) -> Option<Seat> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let claimed: usize = open.iter().map(|(_, connections)| connections.len().max(self.guaranteed)).sum();
        let (_, connections) = open.iter_mut().find(|(of, _)| *of == transport)?;
        if connections.len() >= self.guaranteed && claimed >= self.most {
            return None;
        }
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (id, usage) = (NEXT.fetch_add(1, Relaxed), Arc::new(Usage::default()));
        usage.used.store(self.millis(Instant::now()), Relaxed);
        connections.insert(id, Arc::clone(&usage));
        let user = User { usage, room: Arc::clone(self) };
        Some(Seat { user, transport, id, stopped: stopped.clone(), ended: false })
    }

    /// The connection of this listener that has been idle for the longest time, if that is at least [`IDLE`].
    fn longest_idle(&self, transport: Transport) -> Option<Arc<Usage>> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, connections) = open.iter().find(|(of, _)| *of == transport)?;
        let latest = self.millis(Instant::now()).checked_sub(IDLE.as_millis().try_into().ok()?)?;
        let idle = |usage: &&Arc<Usage>| {
            usage.calls.load(Relaxed) == 0
                && !usage.leaving.load(Relaxed)
                && usage.used.load(Relaxed) <= latest
        };
        connections.values().filter(idle).min_by_key(|usage| usage.used.load(Relaxed)).cloned()
    }

    fn millis(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.began).as_millis()).unwrap_or(u64::MAX)
    }

    fn leave(&self, transport: Transport, id: u64) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, connections)) = open.iter_mut().find(|(of, _)| *of == transport) {
            connections.remove(&id);
        }
        drop(open);
        self.freed.notify_waiters();
    }
}

/// How one connection is used.
#[derive(Debug, Default)]
struct Usage {
    /// When a request last began or ended, in milliseconds since `Room::began`.
    used: AtomicU64,
    /// Requests in flight.
    calls: AtomicU32,
    /// Whether it was asked to close, to make room for another.
    leaving: AtomicBool,
    leave: Notify,
}

impl Usage {
    fn leave(&self) {
        if !self.leaving.swap(true, Relaxed) {
            self.leave.notify_one();
        }
    }
}

/// A connection's share of the budget, returned on drop.
#[derive(Debug)]
pub struct Seat {
    user: User,
    transport: Transport,
    id: u64,
    stopped: watch::Receiver<()>,
    ended: bool,
}

/// Why a connection has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The server stops: close after the last response.
    Stop,
    /// A new connection needs the seat: close now, or after the response to a request that has just arrived.
    MakeRoom,
}

impl Seat {
    /// The only seat of a budget of one connection.
    #[cfg(test)]
    pub(crate) fn alone(stopped: watch::Receiver<()>) -> Seat {
        Room::new(1, &[Transport::Http]).take(Transport::Http, &stopped).expect("the budget is unused")
    }

    /// A handle that records how the connection is used.
    pub fn user(&self) -> User {
        self.user.clone()
    }

    /// Waits until a new connection needs the seat.
    pub async fn needed(&self) {
        self.user.usage.leave.notified().await;
    }

    /// Waits until the connection has to end. Returns once; later calls never complete.
    pub async fn end(&mut self) -> End {
        if self.ended {
            pending::<()>().await;
        }
        let end = tokio::select! {
            _ = self.stopped.changed() => End::Stop,
            () = self.user.usage.leave.notified() => End::MakeRoom,
        };
        self.ended = true;
        end
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.user.room.leave(self.transport, self.id);
    }
}

/// Records when a connection is used.
#[derive(Clone, Debug)]
pub struct User {
    usage: Arc<Usage>,
    room: Arc<Room>,
}

impl User {
    /// Records a request.
    pub fn used(&self, at: Instant) {
        self.usage.used.store(self.room.millis(at), Relaxed);
    }

    /// Records a request that is in flight until the guard is dropped.
    pub fn busy(&self) -> Busy {
        self.usage.calls.fetch_add(1, Relaxed);
        Busy(self.clone())
    }

    /// Whether a request is in flight.
    pub fn is_busy(&self) -> bool {
        self.usage.calls.load(Relaxed) > 0
    }
}

/// A request in flight: its connection is not idle.
#[derive(Debug)]
pub struct Busy(User);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.used(Instant::now());
        self.0.usage.calls.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(room: &Arc<Room>, transport: Transport, stopped: &watch::Receiver<()>) -> Vec<Seat> {
        std::iter::from_fn(|| room.take(transport, stopped)).collect()
    }

    #[test]
    fn full_listener_leaves_the_share_of_the_others() {
        let (_stop, stopped) = watch::channel(());
        let room = Room::new(60, &[Transport::Http, Transport::Grpc, Transport::Resp]);
        let resp = fill(&room, Transport::Resp, &stopped);
        assert_eq!(resp.len(), 40, "10 are guaranteed to each of the others");
        let http = fill(&room, Transport::Http, &stopped);
        let grpc = fill(&room, Transport::Grpc, &stopped);
        assert_eq!((http.len(), grpc.len()), (10, 10));
        drop(resp);
        assert_eq!(fill(&room, Transport::Http, &stopped).len(), 30);
        assert_eq!(room.open(Transport::Resp), 0);
    }

    #[test]
    fn only_listener_can_use_the_whole_budget() {
        let (_stop, stopped) = watch::channel(());
        let room = Room::new(7, &[Transport::Http]);
        assert_eq!(fill(&room, Transport::Http, &stopped).len(), 7);
    }

    #[test]
    fn connection_idle_for_longest_is_closed_first() {
        let (_stop, stopped) = watch::channel(());
        let mut room = Room::new(3, &[Transport::Http]);
        Arc::get_mut(&mut room).expect("not shared yet").began -= Duration::from_secs(10);
        let seats = fill(&room, Transport::Http, &stopped);
        assert!(room.longest_idle(Transport::Http).is_none(), "all were just opened");
        for (seat, used) in seats.iter().zip([5_000, 3_000, 4_000]) {
            seat.user.usage.used.store(used, Relaxed);
        }
        let next = || {
            let usage = room.longest_idle(Transport::Http)?;
            seats.iter().position(|seat| Arc::ptr_eq(&seat.user.usage, &usage))
        };
        let busy = seats[1].user.busy();
        seats[1].user.usage.used.store(3_000, Relaxed);
        assert_eq!(next(), Some(2), "a connection with a request is not idle");
        drop(busy);
        assert_eq!(next(), Some(2), "its request has just ended");
        seats[2].user.usage.leave();
        assert_eq!(next(), Some(0), "a connection that is already closing is skipped");
    }
}
