//! Batches tolls for one Redis server into script calls, in arrival order.
//!
//! A lone toll is sent at once. While calls are in flight, new tolls queue up and share the next call: the
//! busier the store, the more tolls share the cost of a call. The queue is bounded, and a toll whose caller has
//! gone is not sent.
//!
//! One task sends everything, and owns the record of what is in flight: callers reach it through bounded channels.
//! All calls use one connection while that is healthy. The others are spares: one of them takes over once no caller
//! waits for a reply on the first. So each toll is decided on the state that the tolls before it left. Only calls
//! that the server sends back can fall behind: those that were in flight when its scripts were flushed or a slot
//! moved.

use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::{Cmd, Value};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tollkeeper_core::{Reply, Time};

use super::address::Address;
use super::call_error::CallError;
use super::eviction::Eviction;
use super::reconnecting::{RawReply, ReconnectingConnection};
use super::replay::BatchReply;
use super::session::Env;
use super::wire::{self, Batch, Call, Malformed};
use crate::log_throttle::LogThrottle;

/// The most tolls that wait to be sent, and the most other calls.
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
    tolls: mpsc::Sender<QueuedToll>,
    calls: mpsc::Sender<QueuedCall>,
    /// Only the task sends over them. The handle reads their status, and can close them.
    connections: Arc<[ReconnectingConnection]>,
    eviction: Arc<Eviction>,
}

/// A toll that waits to be sent.
#[derive(Debug)]
struct QueuedToll {
    /// Only tolls of one slot can share a call; outside of a cluster the slot is always 0.
    slot: u16,
    toll: wire::EncodedToll,
    caller: oneshot::Sender<Result<Reply, CallError>>,
}

/// A call that decides no tolls. It shares no call with others, and does not wait for those in flight.
#[derive(Debug)]
struct QueuedCall {
    request: Request,
    target: Target,
    /// Gets the reply, and the index of the connection that it came over.
    caller: oneshot::Sender<Result<(usize, RawReply), CallError>>,
}

#[derive(Debug)]
enum Request {
    Script(Call),
    Command(Cmd),
}

/// Which keys of the server a call is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Keys that the server has.
    Own,
    /// Keys that are being migrated to the server (`ASKING`).
    Migrating,
}

impl Batcher {
    /// Starts to connect in the background.
    pub(crate) fn new(env: &Arc<Env>, address: &Address, connections: usize) -> Batcher {
        let eviction = Arc::new(Eviction::default());
        let connect = |_| ReconnectingConnection::to(env, address.clone(), Arc::clone(&eviction));
        let connections: Arc<[ReconnectingConnection]> = (0..connections.max(1)).map(connect).collect();
        let (tolls, queued_tolls) = mpsc::channel(MAX_QUEUED);
        let (calls, queued_calls) = mpsc::channel(MAX_QUEUED);
        let task = send_all(Arc::clone(env), Arc::clone(&connections), queued_tolls, queued_calls);
        // Unconstrained: a call must be handed to its connection when it is first polled, so that later calls cannot
        // overtake it.
        env.runtime.spawn(tokio::task::unconstrained(task));
        Batcher { address: address.to_string().into(), tolls, calls, connections, eviction }
    }

    /// The address of the server.
    pub(crate) fn address(&self) -> &Arc<str> {
        &self.address
    }

    /// Decides a toll, in one call with others that wait to be sent.
    pub(crate) async fn decide(&self, slot: u16, toll: wire::EncodedToll) -> Result<Reply, CallError> {
        let (caller, replied) = oneshot::channel();
        self.tolls.try_send(QueuedToll { slot, toll, caller }).map_err(not_queued)?;
        replied.await.unwrap_or_else(|_| Err(closed()))
    }

    /// Runs a script in a call of its own, and parses the reply with `read`.
    pub(crate) async fn run<T>(
        &self,
        call: &Call,
        target: Target,
        read: impl Fn(&wire::Value) -> Result<T, Malformed>,
    ) -> Result<T, CallError> {
        self.call(Request::Script(call.clone()), target, |reply| read(&value(reply))).await
    }

    /// Runs a plain command, and parses the reply with `read`.
    pub(crate) async fn command<T>(
        &self,
        command: &Cmd,
        target: Target,
        read: impl FnOnce(Value) -> Result<T, Malformed>,
    ) -> Result<T, CallError> {
        self.call(Request::Command(command.clone()), target, read).await
    }

    async fn call<T>(
        &self,
        request: Request,
        target: Target,
        read: impl FnOnce(Value) -> Result<T, Malformed>,
    ) -> Result<T, CallError> {
        let (caller, replied) = oneshot::channel();
        self.calls.try_send(QueuedCall { request, target, caller }).map_err(not_queued)?;
        let (index, reply) = replied.await.unwrap_or_else(|_| Err(closed()))?;
        read(reply.value).map_err(|malformed| self.connections[index].malformed(reply.connection, malformed))
    }

    /// Whether the server may evict keys; `None` if unknown.
    pub(crate) fn may_evict(&self) -> Option<bool> {
        self.eviction.may_evict()
    }

    /// Why the server cannot be used; `None` if it can.
    pub(crate) fn trouble(&self) -> Option<Arc<str>> {
        self.connections.iter().find_map(ReconnectingConnection::trouble)
    }

    /// The number of connections made so far.
    pub(crate) fn arrivals(&self) -> u64 {
        self.connections.iter().map(ReconnectingConnection::arrivals).sum()
    }

    /// Closes all connections, so that the next ones look up the primary again.
    pub(crate) fn reconnect(&self) {
        self.connections.iter().for_each(ReconnectingConnection::reconnect);
    }
}

fn not_queued<T>(error: TrySendError<T>) -> CallError {
    match error {
        TrySendError::Full(_) => CallError::Full,
        TrySendError::Closed(_) => closed(),
    }
}

fn closed() -> CallError {
    CallError::NotSent("the store was closed".to_owned())
}

/// Sends tolls and other calls, and passes the replies on, until the batcher is dropped and nothing is in flight.
async fn send_all(
    env: Arc<Env>,
    connections: Arc<[ReconnectingConnection]>,
    mut tolls: mpsc::Receiver<QueuedToll>,
    mut calls: mpsc::Receiver<QueuedCall>,
) {
    let mut in_flight: FuturesUnordered<Pin<Box<dyn Future<Output = Event> + Send>>> =
        FuturesUnordered::new();
    let mut loads = Loads::new(connections.len());
    let mut known_scripts = KnownScripts::default();
    let disagreements = Arc::new(LogThrottle::default());
    // The first toll of the next batch.
    let mut first = None;
    loop {
        let is_down = |index: usize| connections[index].is_down();
        if first.is_some()
            && let Some(index) = loads.next(is_down)
        {
            let number = connections[index].ready().await;
            let batches = encode(gather(&mut first, &mut tolls), &env);
            let group = loads.open_group(index, batches.len());
            for (batch, callers) in batches {
                // The server may not know the script and need its text: nothing else is sent before that is settled.
                loads.settling |= known_scripts.learn(index, number, batch.call().script.sha());
                let sent = SentBatch::new(&connections, index, group, batch, callers);
                in_flight.push(Box::pin(sent.receive_or_abandon()));
            }
        }
        tokio::select! {
            biased;
            Some(event) = in_flight.next() => match event {
                Event::Abandoned(batch) => {
                    loads.abandoned(batch.connection);
                    in_flight.push(Box::pin(batch.receive()));
                }
                Event::Replied(batch, reply) => {
                    loads.ended(batch.connection, batch.group, batch.is_abandoned);
                    // Not in this task, so that the next batch is sent before this reply is decoded.
                    env.runtime.spawn(batch.deliver(reply, Arc::clone(&disagreements)));
                }
                Event::OtherCall => {}
            },
            Some(call) = calls.recv() => {
                let index = loads.best(is_down);
                in_flight.push(Box::pin(call.send(Arc::clone(&connections), index)));
            }
            Some(toll) = tolls.recv(), if first.is_none() => first = Some(toll),
            else => return,
        }
    }
}

/// What happened to a call in flight.
enum Event {
    /// All callers of a batch have gone, but the reply is still to come.
    Abandoned(SentBatch),
    /// A batch was replied to, or failed.
    Replied(SentBatch, Result<RawReply, CallError>),
    /// A call that decides no tolls has ended.
    OtherCall,
}

/// What is in flight on each connection, and which one to use next.
#[derive(Debug)]
struct Loads {
    of: Vec<Load>,
    /// The index of the connection in use.
    current: usize,
    /// Whether no batch may be sent before all those with a waiting caller are replied to.
    settling: bool,
    /// The number of calls of each group that were not replied to yet.
    groups: HashMap<u64, usize>,
    last_group: u64,
}

/// What is in flight on one connection.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    /// Groups of calls that were sent together, at most [`MAX_IN_FLIGHT`].
    groups: usize,
    /// Calls with a caller that still waits for the reply.
    awaited: usize,
    /// Calls that all their callers gave up: the connection does not respond.
    abandoned: usize,
}

impl Loads {
    fn new(connections: usize) -> Loads {
        let of = vec![Load::default(); connections];
        Loads { of, current: 0, settling: false, groups: HashMap::new(), last_group: 0 }
    }

    /// The current connection if it is healthy, else another healthy one, else the least busy one.
    fn best(&self, is_down: impl Fn(usize) -> bool) -> usize {
        let count = self.of.len();
        let mut from_current = (0..count).map(|step| (self.current + step) % count);
        let is_healthy = |index: &usize| !is_down(*index) && self.of[*index].abandoned == 0;
        from_current.clone().find(is_healthy).unwrap_or_else(|| {
            let burden = |index: &usize| (is_down(*index), self.of[*index].groups);
            from_current.by_ref().min_by_key(burden).expect("there is at least one")
        })
    }

    /// The connection for the next batch. `None` if it has to wait: until there is room on that connection, and until
    /// no caller waits for a reply on another one.
    fn next(&mut self, is_down: impl Fn(usize) -> bool) -> Option<usize> {
        self.settling &= self.of.iter().any(|load| load.awaited > 0);
        if self.settling {
            return None;
        }
        let best = self.best(is_down);
        let others = self.of.iter().enumerate().filter(|(index, _)| *index != best);
        let none_awaited = others.map(|(_, other)| other).all(|other| other.awaited == 0);
        (none_awaited && self.of[best].groups < MAX_IN_FLIGHT).then_some(best)
    }

    /// Counts calls that are sent together.
    fn open_group(&mut self, connection: usize, calls: usize) -> u64 {
        self.current = connection;
        self.last_group += 1;
        if calls > 0 {
            self.groups.insert(self.last_group, calls);
            self.of[connection].groups += 1;
            self.of[connection].awaited += calls;
        }
        self.last_group
    }

    fn abandoned(&mut self, connection: usize) {
        self.of[connection].awaited -= 1;
        self.of[connection].abandoned += 1;
    }

    fn ended(&mut self, connection: usize, group: u64, is_abandoned: bool) {
        let load = &mut self.of[connection];
        *(if is_abandoned { &mut load.abandoned } else { &mut load.awaited }) -= 1;
        let left = self.groups.get_mut(&group).expect("a group lasts as long as its calls");
        *left -= 1;
        if *left == 0 {
            self.groups.remove(&group);
            load.groups -= 1;
        }
    }
}

/// The scripts that were sent over one connection, which is identified by its index and its number.
#[derive(Debug, Default)]
struct KnownScripts {
    connection: (usize, u64),
    scripts: HashSet<&'static str>,
}

impl KnownScripts {
    /// Notes that a script is sent; true if it is the first time over this connection.
    fn learn(&mut self, index: usize, number: u64, script: &'static str) -> bool {
        if self.connection != (index, number) {
            *self = KnownScripts { connection: (index, number), scripts: HashSet::new() };
        }
        self.scripts.insert(script)
    }
}

/// Takes the first toll and the queued ones after it for the next call, up to the bounds of tolls and keys.
fn gather(first: &mut Option<QueuedToll>, queued: &mut mpsc::Receiver<QueuedToll>) -> Vec<QueuedToll> {
    let mut together = Vec::with_capacity(MAX_BATCH.min(1 + queued.len()));
    let mut keys = 0;
    while together.len() < MAX_BATCH
        && keys < wire::MOST_KEYS
        && let Some(next) = first.take().or_else(|| queued.try_recv().ok())
    {
        keys += next.toll.names().count();
        together.push(next);
    }
    together
}

type Caller = oneshot::Sender<Result<Reply, CallError>>;

/// Encodes tolls as one batch for each slot. A toll whose caller has gone is left out, so it is not charged.
fn encode(mut together: Vec<QueuedToll>, env: &Env) -> Vec<(Batch, Vec<Caller>)> {
    together.retain(|queued| !queued.caller.is_closed());
    let mut batches = Vec::new();
    while let Some(slot) = together.first().map(|queued| queued.slot) {
        let (same_slot, others): (Vec<QueuedToll>, Vec<QueuedToll>) =
            together.into_iter().partition(|queued| queued.slot == slot);
        together = others;
        let (tolls, callers) = same_slot.into_iter().map(|queued| (queued.toll, queued.caller)).unzip();
        batches.push((Batch::new(tolls, env.nonce()), callers));
    }
    batches
}

/// A batch in flight.
struct SentBatch {
    connections: Arc<[ReconnectingConnection]>,
    /// The index of its connection.
    connection: usize,
    group: u64,
    is_abandoned: bool,
    batch: Arc<Batch>,
    callers: Vec<Caller>,
    reply: Pin<Box<dyn Future<Output = Result<RawReply, CallError>> + Send>>,
}

impl SentBatch {
    fn new(
        connections: &Arc<[ReconnectingConnection]>,
        connection: usize,
        group: u64,
        batch: Batch,
        callers: Vec<Caller>,
    ) -> SentBatch {
        let (connections, batch) = (Arc::clone(connections), Arc::new(batch));
        let (over, sent) = (Arc::clone(&connections), Arc::clone(&batch));
        let reply = Box::pin(async move { run(&over[connection], sent.call()).await });
        SentBatch { connections, connection, group, is_abandoned: false, batch, callers, reply }
    }

    /// Waits for the reply, or until all callers have gone.
    async fn receive_or_abandon(mut self) -> Event {
        let all_left = async {
            for caller in &mut self.callers {
                caller.closed().await;
            }
        };
        tokio::select! {
            biased;
            result = &mut self.reply => return Event::Replied(self, result),
            () = all_left => {}
        }
        self.is_abandoned = true;
        Event::Abandoned(self)
    }

    /// Waits for the reply.
    async fn receive(mut self) -> Event {
        let result = (&mut self.reply).await;
        Event::Replied(self, result)
    }

    /// Decodes the reply, and passes each caller its own.
    async fn deliver(self, reply: Result<RawReply, CallError>, disagreements: Arc<LogThrottle>) {
        let decoded = reply.and_then(|reply| {
            let decoded = self.batch.read_reply(&value(reply.value));
            decoded
                .map_err(|malformed| self.connections[self.connection].malformed(reply.connection, malformed))
        });
        match decoded {
            Ok(BatchReply { replies, disagreements: requests }) => {
                if let (1.., Some(first)) = (requests, replies.first()) {
                    log_disagreement(&disagreements, requests, first.time());
                }
                for (caller, reply) in self.callers.into_iter().zip(replies) {
                    let _ = caller.send(Ok(reply));
                }
            }
            Err(error) => {
                for caller in self.callers {
                    let _ = caller.send(Err(error.clone()));
                }
            }
        }
    }
}

/// Logs that a script decided otherwise than this process. If it does so once, it may do so with every call.
fn log_disagreement(throttle: &LogThrottle, requests: usize, now: Time) {
    throttle.write(now, |more| {
        tracing::error!(
            "the script and this process disagree on {requests} requests: the script's verdict counts; please report \
             this ({more} more since the last such line)"
        );
    });
}

impl QueuedCall {
    /// Sends the call, unless its caller has gone.
    async fn send(self, connections: Arc<[ReconnectingConnection]>, index: usize) -> Event {
        if self.caller.is_closed() {
            return Event::OtherCall;
        }
        let connection = &connections[index];
        let reply = match (&self.request, self.target) {
            (Request::Script(call), Target::Own) => run(connection, call).await,
            (Request::Script(call), Target::Migrating) => {
                connection.call_asking(&command("EVAL", call.script.text(), call)).await
            }
            (Request::Command(command), Target::Own) => connection.call(command).await,
            (Request::Command(command), Target::Migrating) => connection.call_asking(command).await,
        };
        let _ = self.caller.send(reply.map(|reply| (index, reply)));
        Event::OtherCall
    }
}

/// Runs a script by its digest, and by its text if the server does not know it: then it certainly did not run.
async fn run(connection: &ReconnectingConnection, call: &Call) -> Result<RawReply, CallError> {
    match connection.call(&command("EVALSHA", call.script.sha(), call)).await {
        Err(CallError::NoScript) => connection.call(&command("EVAL", call.script.text(), call)).await,
        result => result,
    }
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

    fn all_up(_: usize) -> bool {
        false
    }

    /// In a cluster, a group consists of one call for each slot, and ends with the last of them.
    #[test]
    fn two_groups_are_in_flight_at_most() {
        let mut loads = Loads::new(2);
        assert_eq!(loads.next(all_up), Some(0));
        let [first, second] = [loads.open_group(0, 2), loads.open_group(0, 1)];
        assert_eq!(loads.next(all_up), None);
        loads.ended(0, first, false);
        assert_eq!(loads.next(all_up), None, "one call of the first group is left");
        loads.ended(0, first, false);
        assert_eq!(loads.next(all_up), Some(0));
        loads.ended(0, second, false);
        loads.open_group(0, 0);
        assert_eq!(loads.next(all_up), Some(0), "a group without calls is not in flight");
    }

    /// Two connections in use would decide tolls out of order.
    #[test]
    fn spare_is_used_once_no_caller_waits_on_the_first() {
        let mut loads = Loads::new(2);
        let [first, second] = [loads.open_group(0, 1), loads.open_group(0, 1)];
        loads.abandoned(0);
        assert_eq!(loads.next(all_up), None, "one caller still waits on the silent connection");
        loads.ended(0, second, false);
        assert_eq!(loads.next(all_up), Some(1));
        loads.ended(0, first, true);
        assert_eq!(loads.next(all_up), Some(0));
        assert_eq!(loads.next(|index| index == 0), Some(1), "the first is down");
        assert_eq!(loads.next(|_| true), Some(0), "both are down: a call fails at once");
    }

    #[test]
    fn new_script_is_settled_before_the_next_batch() {
        let (mut loads, mut known) = (Loads::new(1), KnownScripts::default());
        let group = loads.open_group(0, 1);
        assert!(known.learn(0, 1, "a") && !known.learn(0, 1, "a") && known.learn(0, 1, "b"));
        assert!(known.learn(0, 2, "a"), "the next connection may be to a server that was restarted");
        loads.settling = true;
        assert_eq!(loads.next(all_up), None);
        loads.ended(0, group, false);
        assert_eq!((loads.next(all_up), loads.settling), (Some(0), false));
    }

    #[test]
    fn script_disagreement_is_logged_once_a_second() {
        let (throttle, log) = (LogThrottle::default(), Log::default());
        let now = Time::from_micros(1_760_000_000_000_000);
        tracing::subscriber::with_default(log.clone(), || {
            (0..1_000).for_each(|_| log_disagreement(&throttle, 7, now));
            log_disagreement(&throttle, 3, now + Span::from_secs(1));
        });
        let lines = log.0.lock().unwrap();
        let [first, second] = &lines[..] else { panic!("{lines:?}") };
        assert!(first.contains("disagree on 7 requests") && first.contains("(0 more"), "{first}");
        assert!(second.contains("disagree on 3 requests") && second.contains("(999 more"), "{second}");
    }
}
