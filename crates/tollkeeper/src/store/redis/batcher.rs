//! Batches tolls for one Redis server into script calls, in arrival order.
//!
//! A lone toll is sent at once. While calls are in flight, new tolls queue up and share the next call: the
//! busier the store, the more tolls share the cost of a call. The queue is bounded, and a toll whose caller has
//! gone is not sent.
//!
//! One task drains the queue, and hands a call to its connection before it builds the next. All calls use one
//! connection while that is healthy. The others are spares: one of them takes over once no caller waits for a
//! reply on the first. So each toll is decided on the state that the tolls before it left. Only calls that the
//! server sends back can fall behind: those that were in flight when its scripts were flushed or a slot moved.

use std::collections::HashSet;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use redis::{Cmd, Value};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc, oneshot};
use tollkeeper_core::{Reply, Time};

use super::address::Address;
use super::call_error::CallError;
use super::eviction::Eviction;
use super::reconnecting::ReconnectingConnection;
use super::session::Env;
use super::wire::{self, Batch, BatchReply, Call, Malformed};
use crate::log_throttle::LogThrottle;

/// The most tolls that wait to be sent.
const MAX_QUEUED: usize = 8_192;
/// The most tolls in one call: a longer script would block the server's other clients.
const MAX_BATCH: usize = 64;
/// The most calls in flight on a connection: one that the server works on, and one that is ready when it is done.
/// In a cluster, the calls for all slots that are sent together count as one.
const MAX_IN_FLIGHT: usize = 2;

/// Sends tolls and other calls to one server.
#[derive(Debug)]
pub(crate) struct Batcher {
    address: Arc<str>,
    queue: mpsc::Sender<QueuedToll>,
    connections: Arc<Connections>,
    eviction: Arc<Eviction>,
}

/// A toll that waits to be sent.
#[derive(Debug)]
struct QueuedToll {
    /// Only tolls of one slot can share a call; outside of a cluster the slot is always 0.
    slot: u16,
    toll: wire::EncodedToll,
    reply: oneshot::Sender<Result<Reply, CallError>>,
}

impl Batcher {
    /// Starts to connect in the background.
    pub(crate) fn new(env: &Arc<Env>, address: &Address, connections: usize) -> Batcher {
        let eviction = Arc::new(Eviction::default());
        let connect = || {
            TrackedConnection::new(ReconnectingConnection::to(env, address.clone(), Arc::clone(&eviction)))
        };
        let connections = Arc::new(Connections::new((0..connections.max(1)).map(|_| connect()).collect()));
        let (queue, queued) = mpsc::channel(MAX_QUEUED);
        env.runtime.spawn(send_batches(Arc::clone(env), Arc::clone(&connections), queued));
        Batcher { address: address.to_string().into(), queue, connections, eviction }
    }

    /// The address of the server.
    pub(crate) fn address(&self) -> &Arc<str> {
        &self.address
    }

    /// Decides a toll, in one call with others that wait to be sent.
    pub(crate) async fn decide(&self, slot: u16, toll: wire::EncodedToll) -> Result<Reply, CallError> {
        let (reply, replied) = oneshot::channel();
        self.queue.try_send(QueuedToll { slot, toll, reply }).map_err(|error| match error {
            TrySendError::Full(_) => CallError::Full,
            TrySendError::Closed(_) => closed(),
        })?;
        replied.await.unwrap_or_else(|_| Err(closed()))
    }

    /// Runs a script in a call of its own, and parses the reply with `read`.
    pub(crate) async fn run<T>(
        &self,
        call: &Call,
        read: impl Fn(&wire::Value) -> Result<T, Malformed>,
    ) -> Result<T, CallError> {
        run(self.connections.any(), call, read).await
    }

    /// Runs a script on keys that are being migrated to this server (`ASKING`), and parses the reply with `read`.
    pub(crate) async fn run_asking<T>(
        &self,
        call: &Call,
        read: impl Fn(&wire::Value) -> Result<T, Malformed>,
    ) -> Result<T, CallError> {
        let command = command("EVAL", call.script.text(), call);
        self.connections.any().call_asking(&command, |reply| read(&value(reply))).await
    }

    /// Runs a plain command, and parses the reply with `read`.
    pub(crate) async fn command<T>(
        &self,
        command: &Cmd,
        read: impl FnOnce(Value) -> Result<T, Malformed>,
    ) -> Result<T, CallError> {
        self.connections.any().call(command, read).await
    }

    /// Whether the server may evict keys; `None` if unknown.
    pub(crate) fn may_evict(&self) -> Option<bool> {
        self.eviction.may_evict()
    }

    /// Why the server cannot be used; `None` if it can.
    pub(crate) fn trouble(&self) -> Option<Arc<str>> {
        self.connections.all.iter().find_map(|tracked| tracked.connection.trouble())
    }

    /// The number of connections made so far.
    pub(crate) fn arrivals(&self) -> u64 {
        self.connections.all.iter().map(|tracked| tracked.connection.arrivals()).sum()
    }

    /// Closes all connections, so that the next ones look up the primary again.
    pub(crate) fn reconnect(&self) {
        self.connections.all.iter().for_each(|tracked| tracked.connection.reconnect());
    }
}

/// The connections of a batcher: one in use, the others as spares.
#[derive(Debug)]
struct Connections {
    all: Vec<TrackedConnection>,
    /// The index of the one in use.
    current: AtomicUsize,
    /// Notified whenever a call ends or is abandoned, so that another connection may have become free.
    changed: Notify,
    /// Limits the log lines about scripts that decide otherwise than this process would.
    disagreements: LogThrottle,
}

/// One connection, and the number of its calls in each state.
#[derive(Debug)]
struct TrackedConnection {
    connection: ReconnectingConnection,
    /// Calls in flight, at most [`MAX_IN_FLIGHT`].
    in_flight: AtomicUsize,
    /// Calls with a caller that still waits for the reply.
    awaited: AtomicUsize,
    /// Calls in flight that all their callers gave up: the connection does not respond.
    abandoned: AtomicUsize,
}

impl TrackedConnection {
    fn new(connection: ReconnectingConnection) -> TrackedConnection {
        let [in_flight, awaited, abandoned] = [const { AtomicUsize::new(0) }; 3];
        TrackedConnection { connection, in_flight, awaited, abandoned }
    }

    fn is_healthy(&self) -> bool {
        !self.connection.is_down() && self.abandoned.load(SeqCst) == 0
    }
}

impl Connections {
    fn new(all: Vec<TrackedConnection>) -> Connections {
        Connections {
            all,
            current: AtomicUsize::new(0),
            changed: Notify::new(),
            disagreements: LogThrottle::default(),
        }
    }

    /// Logs that a script decided otherwise than this process. If it does so once, it may do so with every call.
    fn log_disagreement(&self, requests: usize, now: Time) {
        self.disagreements.write(now, |more| {
            tracing::error!(
                "the script and this process disagree on {requests} requests: the script's verdict counts; please report \
                 this ({more} more since the last such line)"
            );
        });
    }

    /// The connection for a call that does not go through the queue.
    fn any(&self) -> &ReconnectingConnection {
        &self.all[self.best()].connection
    }

    /// The current connection if it is healthy, else another healthy one, else the least busy one.
    fn best(&self) -> usize {
        let (current, count) = (self.current.load(SeqCst), self.all.len());
        let mut from_current = (0..count).map(|step| (current + step) % count);
        from_current.clone().find(|index| self.all[*index].is_healthy()).unwrap_or_else(|| {
            let burden = |index: &usize| {
                let tracked = &self.all[*index];
                (tracked.connection.is_down(), tracked.in_flight.load(SeqCst))
            };
            from_current.by_ref().min_by_key(burden).expect("there is at least one")
        })
    }

    /// Waits until the next call may be sent, and returns the index of its connection: that has a free slot, and no
    /// caller waits for a reply on another connection.
    async fn next(&self) -> usize {
        self.until(|connections| {
            let best = connections.best();
            let others = connections.all.iter().enumerate().filter(|(index, _)| *index != best);
            let free = connections.all[best].in_flight.load(SeqCst) < MAX_IN_FLIGHT;
            let none_awaited = || others.map(|(_, other)| other).all(|other| other.awaited.load(SeqCst) == 0);
            (free && none_awaited()).then_some(best)
        })
        .await
    }

    /// Waits until no caller waits for a reply.
    async fn quiet(&self) {
        self.until(|connections| {
            connections.all.iter().all(|tracked| tracked.awaited.load(SeqCst) == 0).then_some(())
        })
        .await
    }

    async fn until<T>(&self, look: impl Fn(&Connections) -> Option<T>) -> T {
        loop {
            if let Some(found) = look(self) {
                return found;
            }
            self.changed.notified().await;
        }
    }
}

/// One of the [`MAX_IN_FLIGHT`] permits of a connection, held until all calls that were sent together are answered.
struct InFlightPermit {
    connections: Arc<Connections>,
    index: usize,
}

impl InFlightPermit {
    fn take(connections: &Arc<Connections>, index: usize) -> InFlightPermit {
        connections.all[index].in_flight.fetch_add(1, SeqCst);
        InFlightPermit { connections: Arc::clone(connections), index }
    }

    fn tracked(&self) -> &TrackedConnection {
        &self.connections.all[self.index]
    }
}

impl Drop for InFlightPermit {
    fn drop(&mut self) {
        self.tracked().in_flight.fetch_sub(1, SeqCst);
        self.connections.changed.notify_one();
    }
}

/// A call in flight, counted as awaited or, once all its callers are gone, as abandoned.
struct InFlightCall {
    permit: Arc<InFlightPermit>,
    abandoned: bool,
}

impl InFlightCall {
    fn new(permit: &Arc<InFlightPermit>) -> InFlightCall {
        permit.tracked().awaited.fetch_add(1, SeqCst);
        InFlightCall { permit: Arc::clone(permit), abandoned: false }
    }

    fn abandon(&mut self) {
        self.abandoned = true;
        self.permit.tracked().abandoned.fetch_add(1, SeqCst);
        self.permit.tracked().awaited.fetch_sub(1, SeqCst);
        self.permit.connections.changed.notify_one();
    }
}

impl Drop for InFlightCall {
    fn drop(&mut self) {
        let tracked = self.permit.tracked();
        let counter = if self.abandoned { &tracked.abandoned } else { &tracked.awaited };
        counter.fetch_sub(1, SeqCst);
        self.permit.connections.changed.notify_one();
    }
}

/// Batches and sends queued tolls until the batcher is dropped.
async fn send_batches(env: Arc<Env>, connections: Arc<Connections>, mut queued: mpsc::Receiver<QueuedToll>) {
    // The scripts that were sent over the current connection, which is identified by its index and its number.
    let mut known: ((usize, u64), HashSet<&'static str>) = Default::default();
    while let Some(first) = queued.recv().await {
        let index = connections.next().await;
        connections.current.store(index, SeqCst);
        let mut together = gather(first, &mut queued);
        let connection = (index, connections.all[index].connection.ready().await);
        if known.0 != connection {
            known = (connection, HashSet::new());
        }
        let mut is_new = false;
        let permit = Arc::new(InFlightPermit::take(&connections, index));
        while let Some(slot) = together.first().map(|queued| queued.slot) {
            let (same_slot, others): (Vec<QueuedToll>, Vec<QueuedToll>) =
                together.into_iter().partition(|queued| queued.slot == slot);
            together = others;
            let (tolls, callers) = same_slot.into_iter().map(|queued| (queued.toll, queued.reply)).unzip();
            let batch = Batch::new(tolls, env.nonce());
            is_new |= known.1.insert(batch.call().script.sha());
            let call = send(InFlightCall::new(&permit), batch, callers);
            let mut call = Box::pin(tokio::task::unconstrained(call));
            // The first poll hands the call to the connection, so that later calls cannot overtake it.
            let first_poll =
                std::future::poll_fn(|context| std::task::Poll::Ready(call.as_mut().poll(context)));
            if first_poll.await.is_pending() {
                tokio::spawn(call);
            }
        }
        drop(permit);
        if is_new {
            // The server may not know the script and need its text: send nothing else before that is settled.
            connections.quiet().await;
        }
    }
}

/// Takes queued tolls for the next call, up to the bounds of tolls and keys.
fn gather(first: QueuedToll, queued: &mut mpsc::Receiver<QueuedToll>) -> Vec<QueuedToll> {
    let mut keys = first.toll.names().count();
    let mut together = vec![first];
    while together.len() < MAX_BATCH
        && keys < wire::MOST_KEYS
        && let Ok(next) = queued.try_recv()
    {
        keys += next.toll.names().count();
        together.push(next);
    }
    // A toll whose caller has gone is not sent, so it is not charged.
    together.retain(|queued| !queued.reply.is_closed());
    together
}

async fn send(call: InFlightCall, batch: Batch, mut callers: Vec<oneshot::Sender<Result<Reply, CallError>>>) {
    let connections = Arc::clone(&call.permit.connections);
    match receive(call, &batch, &mut callers).await {
        Ok(reply) => {
            if let (1.., Some(first)) = (reply.disagreements, reply.replies.first()) {
                connections.log_disagreement(reply.disagreements, first.time());
            }
            for (caller, reply) in callers.into_iter().zip(reply.replies) {
                let _ = caller.send(Ok(reply));
            }
        }
        Err(error) => {
            for caller in callers {
                let _ = caller.send(Err(error.clone()));
            }
        }
    }
}

/// Sends the batch and waits for the reply, even if all callers leave meanwhile.
async fn receive<T>(
    mut call: InFlightCall,
    batch: &Batch,
    callers: &mut [oneshot::Sender<T>],
) -> Result<BatchReply, CallError> {
    let permit = Arc::clone(&call.permit);
    let mut reply = pin!(run(&permit.tracked().connection, batch.call(), |reply| batch.read_reply(reply)));
    let all_left = async {
        for caller in callers {
            caller.closed().await;
        }
    };
    tokio::select! {
        biased;
        reply = &mut reply => return reply,
        () = all_left => call.abandon(),
    }
    reply.await
}

/// Runs a script by its digest, and by its text if the server does not know it: then it certainly did not run.
async fn run<T>(
    connection: &ReconnectingConnection,
    call: &Call,
    read: impl Fn(&wire::Value) -> Result<T, Malformed>,
) -> Result<T, CallError> {
    let read = |reply| read(&value(reply));
    match connection.call(&command("EVALSHA", call.script.sha(), call), read).await {
        Err(CallError::NoScript) => connection.call(&command("EVAL", call.script.text(), call), read).await,
        result => result,
    }
}

fn closed() -> CallError {
    CallError::NotSent("the store was closed".to_owned())
}

fn command(name: &str, script: &str, call: &Call) -> Cmd {
    let mut command = redis::cmd(name);
    command.arg(script).arg(call.keys.len()).arg(&call.keys[..]);
    for argument in &call.args {
        command.arg(&argument[..]);
    }
    command
}

/// Converts a reply of the client library into the type that [`wire`] reads.
fn value(value: Value) -> wire::Value {
    match value {
        Value::Int(number) => wire::Value::Number(number),
        Value::BulkString(bytes) => wire::Value::Bytes(bytes),
        Value::SimpleString(text) => wire::Value::Bytes(text.into_bytes()),
        Value::Array(values) => wire::Value::List(values.into_iter().map(self::value).collect()),
        _ => wire::Value::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use std::fmt;
    use std::sync::Mutex;

    use tollkeeper_core::Span;
    use tracing::field::{Field, Visit};
    use tracing::{Event, Metadata, span};

    use super::*;

    /// Collects the logged messages.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<String>>>);

    impl tracing::Subscriber for Log {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn event(&self, event: &Event<'_>) {
            event.record(&mut Message(self));
        }

        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }

        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
        fn enter(&self, _: &span::Id) {}
        fn exit(&self, _: &span::Id) {}
    }

    struct Message<'a>(&'a Log);

    impl Visit for Message<'_> {
        fn record_debug(&mut self, _: &Field, value: &dyn fmt::Debug) {
            self.0.0.lock().unwrap().push(format!("{value:?}"));
        }
    }

    #[test]
    fn script_disagreement_is_logged_once_a_second() {
        let (connections, log) = (Connections::new(Vec::new()), Log::default());
        let now = Time::from_micros(1_760_000_000_000_000);
        tracing::subscriber::with_default(log.clone(), || {
            (0..1_000).for_each(|_| connections.log_disagreement(7, now));
            connections.log_disagreement(3, now + Span::from_secs(1));
        });
        let lines = log.0.lock().unwrap();
        let [first, second] = &lines[..] else { panic!("{lines:?}") };
        assert!(first.contains("disagree on 7 requests") && first.contains("(0 more"), "{first}");
        assert!(second.contains("disagree on 3 requests") && second.contains("(999 more"), "{second}");
    }
}
