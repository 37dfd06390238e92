//! One budget of connections for all listeners, because every connection is an open file of this process.
//!
//! Each listener is guaranteed a share, so that connections of one protocol cannot shut out the others. A listener
//! without room closes the connection that has been idle for the longest time, as clients with pools expect; if none
//! is idle, the new connection is closed.

use std::collections::HashMap;
use std::future::pending;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use tokio::time::timeout;

/// A connection without a request for so long may be closed to make room for another.
const IDLE: Duration = Duration::from_secs(1);
/// How long a new connection waits for the one that is closed for it.
const CLOSING: Duration = Duration::from_millis(100);

/// What speaks through a listener, as metrics name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// The HTTP API.
    Http,
    /// Envoy's rate limit service.
    Grpc,
    /// The protocol of Redis.
    Resp,
}

impl Transport {
    /// All of them.
    pub const ALL: [Transport; 3] = [Transport::Http, Transport::Grpc, Transport::Resp];

    /// Its name in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Http => "http",
            Transport::Grpc => "grpc",
            Transport::Resp => "resp",
        }
    }
}

/// The connections of all listeners.
#[derive(Debug)]
pub struct Room {
    most: usize,
    /// What each listener can always have: together half of all.
    guaranteed: usize,
    began: Instant,
    open: Mutex<Listeners>,
    /// Told whenever a connection has ended.
    freed: Notify,
}

/// The open connections of each listener.
type Listeners = Vec<(Transport, HashMap<u64, Arc<Usage>>)>;

/// A connection has no room, and none could be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom;

/// What became of a connection that came.
#[derive(Debug)]
pub struct Entered {
    /// Its seat.
    pub seat: Seat,
    /// Whether an idle connection was closed for it.
    pub evicted: bool,
}

impl Room {
    /// Room for so many connections of these listeners.
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

    /// How many connections a listener has.
    pub fn open(&self, transport: Transport) -> usize {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.iter().filter(|(of, _)| *of == transport).map(|(_, connections)| connections.len()).sum()
    }

    /// Takes a seat, if need be that of a connection that is idle.
    pub async fn enter(
        self: &Arc<Room>,
        transport: Transport,
        stopped: &watch::Receiver<()>,
    ) -> Result<Entered, NoRoom> {
        if let Some(seat) = self.take(transport, stopped) {
            return Ok(Entered { seat, evicted: false });
        }
        let longest_idle = self.longest_idle(transport).ok_or(NoRoom)?;
        let made = async {
            loop {
                let freed = self.freed.notified();
                if let Some(seat) = self.take(transport, stopped) {
                    return seat;
                }
                longest_idle.leave();
                freed.await;
            }
        };
        let seat = timeout(CLOSING, made).await.map_err(|_| NoRoom)?;
        Ok(Entered { seat, evicted: true })
    }

    /// Takes a seat that is free: one that is guaranteed to this listener, or one that is guaranteed to none.
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

    /// The connection of this listener without a request for the longest time, if that is long enough.
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

/// What the room knows of one connection.
#[derive(Debug, Default)]
struct Usage {
    /// When a request last began or ended, in milliseconds since the room began.
    used: AtomicU64,
    /// Requests that are being answered.
    calls: AtomicU32,
    /// Whether it was told to make room.
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

/// The seat of one connection. Dropping it makes room.
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
    /// The server stops: after the last answer.
    Stop,
    /// Another connection needs the seat: at once, or after the answer to a request that has just arrived.
    MakeRoom,
}

impl Seat {
    /// A seat in a room of its own.
    #[cfg(test)]
    pub(crate) fn alone(stopped: watch::Receiver<()>) -> Seat {
        Room::new(1, &[Transport::Http]).take(Transport::Http, &stopped).expect("it is empty")
    }

    /// Notes what the connection is used for.
    pub fn user(&self) -> User {
        self.user.clone()
    }

    /// Waits until another connection needs the seat.
    pub async fn needed(&self) {
        self.user.usage.leave.notified().await;
    }

    /// Waits until the connection has to end, which it is told once.
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

/// Notes when a connection is used.
#[derive(Clone, Debug)]
pub struct User {
    usage: Arc<Usage>,
    room: Arc<Room>,
}

impl User {
    /// Notes a request.
    pub fn used(&self, at: Instant) {
        self.usage.used.store(self.room.millis(at), Relaxed);
    }

    /// Notes a request that is being answered until this is dropped.
    pub fn busy(&self) -> Busy {
        self.usage.calls.fetch_add(1, Relaxed);
        Busy(self.clone())
    }

    /// Whether a request is being answered.
    pub fn is_busy(&self) -> bool {
        self.usage.calls.load(Relaxed) > 0
    }
}

/// A request that is being answered: its connection is not idle.
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
    fn every_listener_keeps_its_share_when_another_is_full() {
        let (_stop, stopped) = watch::channel(());
        let room = Room::new(60, &Transport::ALL);
        let resp = fill(&room, Transport::Resp, &stopped);
        assert_eq!(resp.len(), 40, "10 are kept for each of the others");
        let http = fill(&room, Transport::Http, &stopped);
        let grpc = fill(&room, Transport::Grpc, &stopped);
        assert_eq!((http.len(), grpc.len()), (10, 10));
        drop(resp);
        assert_eq!(fill(&room, Transport::Http, &stopped).len(), 30);
        assert_eq!(room.open(Transport::Resp), 0);
    }

    #[test]
    fn one_listener_alone_has_all_of_the_room() {
        let (_stop, stopped) = watch::channel(());
        let room = Room::new(7, &[Transport::Http]);
        assert_eq!(fill(&room, Transport::Http, &stopped).len(), 7);
    }

    #[test]
    fn connection_idle_for_longest_is_closed_first() {
        let (_stop, stopped) = watch::channel(());
        let mut room = Room::new(3, &[Transport::Http]);
        Arc::get_mut(&mut room).expect("no one else has it").began -= Duration::from_secs(10);
        let seats = fill(&room, Transport::Http, &stopped);
        assert!(room.longest_idle(Transport::Http).is_none(), "they have just come");
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
        assert_eq!(next(), Some(2), "a request has just ended there");
        seats[2].user.usage.leave();
        assert_eq!(next(), Some(0), "one is told once");
    }
}
