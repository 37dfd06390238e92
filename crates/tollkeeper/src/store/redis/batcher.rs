//! A lane: the way of tolls to one server, in the order in which they came.
//!
//! A lone toll is sent at once. While calls are on their way, those that come meanwhile gather and go in the
//! next: the busier the store, the more tolls share the cost of a call. The line of those who gather is
//! bounded, and whoever has left it is not sent.
//!
//! One task takes from the line, and a call is in the hands of its connection before the next is made. All go
//! over one connection while it is well; the others stand by, and one of them takes over when nobody waits any
//! more for what was sent on the first. So each toll is decided on what those before it have left. Only what the
//! server hands back can fall behind: calls that were on their way when its scripts were flushed or a slot moved.

use std::collections::HashSet;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use redis::{Cmd, Value};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc, oneshot};
use tollkeeper_core::{Reply, Time};

use super::address::Address;
use super::call_error::Fate;
use super::eviction::Eviction;
use super::reconnecting::Link;
use super::session::Env;
use super::wire::{self, Batch, Call, Malformed, Rulings};
use crate::log_throttle::LogThrottle;

/// The most tolls that wait to be sent.
const WAITING: usize = 8_192;
/// The most tolls in one call: more would hold up everybody else on the server.
const TOGETHER: usize = 64;
/// Calls on their way at once: one that the server works on, and one that is there when it has done. Of a
/// cluster: those for all slots that are sent together.
const ON_THE_WAY: usize = 2;

/// The way to one server.
#[derive(Debug)]
pub(crate) struct Lane {
    address: Arc<str>,
    line: mpsc::Sender<Job>,
    ways: Arc<Ways>,
    eviction: Arc<Eviction>,
}

/// A toll that wants to be decided.
#[derive(Debug)]
struct Job {
    /// Only what is in one slot can travel together; a server without slots has one.
    slot: u16,
    asked: wire::EncodedToll,
    answer: oneshot::Sender<Result<Reply, Fate>>,
}

impl Lane {
    /// Begins to connect.
    pub(crate) fn new(env: &Arc<Env>, address: &Address, connections: usize) -> Lane {
        let eviction = Arc::new(Eviction::default());
        let way = || Way::new(Link::to(env, address.clone(), Arc::clone(&eviction)));
        let ways = Arc::new(Ways::new((0..connections.max(1)).map(|_| way()).collect()));
        let (line, jobs) = mpsc::channel(WAITING);
        env.runtime.spawn(carry(Arc::clone(env), Arc::clone(&ways), jobs));
        Lane { address: address.to_string().into(), line, ways, eviction }
    }

    /// Where the server is.
    pub(crate) fn address(&self) -> &Arc<str> {
        &self.address
    }

    /// Has a toll decided, together with whatever else is in flight.
    pub(crate) async fn decide(&self, slot: u16, asked: wire::EncodedToll) -> Result<Reply, Fate> {
        let (answer, answered) = oneshot::channel();
        self.line.try_send(Job { slot, asked, answer }).map_err(|error| match error {
            TrySendError::Full(_) => Fate::Full,
            TrySendError::Closed(_) => closed(),
        })?;
        answered.await.unwrap_or_else(|_| Err(closed()))
    }

    /// Runs a script by itself, and reads the reply.
    pub(crate) async fn run<T>(
        &self,
        call: &Call,
        read: impl Fn(&wire::Value) -> Result<T, Malformed>,
    ) -> Result<T, Fate> {
        run(self.ways.link(), call, read).await
    }

    /// Runs a script on keys that are on their way to this server, and reads the reply.
    pub(crate) async fn run_asking<T>(
        &self,
        call: &Call,
        read: impl Fn(&wire::Value) -> Result<T, Malformed>,
    ) -> Result<T, Fate> {
        let command = command("EVAL", call.script.text(), call);
        self.ways.link().call_asking(&command, |answer| read(&value(answer))).await
    }

    /// Runs a plain command, and reads the reply.
    pub(crate) async fn command<T>(
        &self,
        command: &Cmd,
        read: impl FnOnce(Value) -> Result<T, Malformed>,
    ) -> Result<T, Fate> {
        self.ways.link().call(command, read).await
    }

    /// Whether the server may evict keys, if it says so.
    pub(crate) fn may_evict(&self) -> Option<bool> {
        self.eviction.may_evict()
    }

    /// Why the server cannot be asked, if it cannot.
    pub(crate) fn trouble(&self) -> Option<Arc<str>> {
        self.ways.ways.iter().find_map(|way| way.link.trouble())
    }

    /// How many connections there have been.
    pub(crate) fn arrivals(&self) -> u64 {
        self.ways.ways.iter().map(|way| way.link.arrivals()).sum()
    }

    /// Gives all connections up, so that the next ones ask again where to go.
    pub(crate) fn give_up(&self) {
        self.ways.ways.iter().for_each(|way| way.link.give_up());
    }
}

/// The connections of a lane.
#[derive(Debug)]
struct Ways {
    ways: Vec<Way>,
    /// The number of the one in use.
    current: AtomicUsize,
    /// Told whenever one of them may be used that might not before.
    changed: Notify,
    /// What is said when a script decides otherwise than this process would.
    disagreed: LogThrottle,
}

/// One connection, and what is on its way there.
#[derive(Debug)]
struct Way {
    link: Link,
    /// Of [`ON_THE_WAY`].
    taken: AtomicUsize,
    /// Calls that somebody waits for.
    awaited: AtomicUsize,
    /// Calls that everybody gave up who waited for them: the connection is silent.
    left: AtomicUsize,
}

impl Way {
    fn new(link: Link) -> Way {
        let [taken, awaited, left] = [const { AtomicUsize::new(0) }; 3];
        Way { link, taken, awaited, left }
    }

    fn is_well(&self) -> bool {
        !self.link.is_down() && self.left.load(SeqCst) == 0
    }
}

impl Ways {
    fn new(ways: Vec<Way>) -> Ways {
        Ways { ways, current: AtomicUsize::new(0), changed: Notify::new(), disagreed: LogThrottle::default() }
    }

    /// Says that a script decided otherwise. If it does so once, it may with every call.
    fn disagree(&self, requests: usize, now: Time) {
        self.disagreed.write(now, |more| {
            tracing::error!(
                "the script and this process disagree on {requests} requests: the script's verdict counts; please report \
                 this ({more} more since the last such line)"
            );
        });
    }

    /// The connection for what needs no place in the line.
    fn link(&self) -> &Link {
        &self.ways[self.best()].link
    }

    /// The one in use if it is well, else another that is, else the one with the least to do.
    fn best(&self) -> usize {
        let (current, count) = (self.current.load(SeqCst), self.ways.len());
        let mut from_current = (0..count).map(|step| (current + step) % count);
        from_current.clone().find(|number| self.ways[*number].is_well()).unwrap_or_else(|| {
            let burden = |number: &usize| {
                let way = &self.ways[*number];
                (way.link.is_down(), way.taken.load(SeqCst))
            };
            from_current.by_ref().min_by_key(burden).expect("there is at least one")
        })
    }

    /// Waits until the next call may go, and says which way: there is room, and nobody waits for an answer that
    /// comes another way.
    async fn next(&self) -> usize {
        self.until(|ways| {
            let best = ways.best();
            let others = ways.ways.iter().enumerate().filter(|(number, _)| *number != best);
            let free = ways.ways[best].taken.load(SeqCst) < ON_THE_WAY;
            (free && others.map(|(_, way)| way).all(|way| way.awaited.load(SeqCst) == 0)).then_some(best)
        })
        .await
    }

    /// Waits until nobody waits for an answer.
    async fn quiet(&self) {
        self.until(|ways| ways.ways.iter().all(|way| way.awaited.load(SeqCst) == 0).then_some(())).await
    }

    async fn until<T>(&self, look: impl Fn(&Ways) -> Option<T>) -> T {
        loop {
            if let Some(seen) = look(self) {
                return seen;
            }
            self.changed.notified().await;
        }
    }
}

/// One of the places of [`ON_THE_WAY`], until all that went together is answered.
struct Place {
    ways: Arc<Ways>,
    number: usize,
}

impl Place {
    fn take(ways: &Arc<Ways>, number: usize) -> Place {
        ways.ways[number].taken.fetch_add(1, SeqCst);
        Place { ways: Arc::clone(ways), number }
    }

    fn way(&self) -> &Way {
        &self.ways.ways[self.number]
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.way().taken.fetch_sub(1, SeqCst);
        self.ways.changed.notify_one();
    }
}

/// A call that somebody waits for, or everybody has left.
struct Sent {
    place: Arc<Place>,
    left: bool,
}

impl Sent {
    fn new(place: &Arc<Place>) -> Sent {
        place.way().awaited.fetch_add(1, SeqCst);
        Sent { place: Arc::clone(place), left: false }
    }

    fn leave(&mut self) {
        self.left = true;
        self.place.way().left.fetch_add(1, SeqCst);
        self.place.way().awaited.fetch_sub(1, SeqCst);
        self.place.ways.changed.notify_one();
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        let way = self.place.way();
        let counted = if self.left { &way.left } else { &way.awaited };
        counted.fetch_sub(1, SeqCst);
        self.place.ways.changed.notify_one();
    }
}

/// Gathers and sends for as long as there is a lane.
async fn carry(env: Arc<Env>, ways: Arc<Ways>, mut jobs: mpsc::Receiver<Job>) {
    // The scripts that a connection was sent, by its number and its own.
    let mut known: ((usize, u64), HashSet<&'static str>) = Default::default();
    while let Some(first) = jobs.recv().await {
        let number = ways.next().await;
        ways.current.store(number, SeqCst);
        let mut together = gather(first, &mut jobs);
        let connection = (number, ways.ways[number].link.ready().await);
        if known.0 != connection {
            known = (connection, HashSet::new());
        }
        let mut news = false;
        let place = Arc::new(Place::take(&ways, number));
        while let Some(slot) = together.first().map(|job| job.slot) {
            let (jobs, others): (Vec<Job>, Vec<Job>) = together.into_iter().partition(|job| job.slot == slot);
            together = others;
            let (asked, answers) = jobs.into_iter().map(|job| (job.asked, job.answer)).unzip();
            let batch = Batch::new(asked, env.nonce());
            news |= known.1.insert(batch.call().script.sha());
            let mut call = Box::pin(tokio::task::unconstrained(send(Sent::new(&place), batch, answers)));
            // Looked after once, it is in the hands of the connection: what follows it cannot overtake it.
            let begun = std::future::poll_fn(|context| std::task::Poll::Ready(call.as_mut().poll(context)));
            if begun.await.is_pending() {
                tokio::spawn(call);
            }
        }
        drop(place);
        if news {
            // The server may want the text of a script that it sees for the first time: nothing goes before that.
            ways.quiet().await;
        }
    }
}

/// Those who wait, as many as may go together.
fn gather(first: Job, jobs: &mut mpsc::Receiver<Job>) -> Vec<Job> {
    let mut keys = first.asked.names().count();
    let mut together = vec![first];
    while together.len() < TOGETHER
        && keys < wire::MOST_KEYS
        && let Ok(next) = jobs.try_recv()
    {
        keys += next.asked.names().count();
        together.push(next);
    }
    // Who has left was not sent, so it was not charged.
    together.retain(|job| !job.answer.is_closed());
    together
}

async fn send(sent: Sent, batch: Batch, mut answers: Vec<oneshot::Sender<Result<Reply, Fate>>>) {
    let ways = Arc::clone(&sent.place.ways);
    match answer(sent, &batch, &mut answers).await {
        Ok(rulings) => {
            if let (1.., Some(first)) = (rulings.disagreements, rulings.rulings.first()) {
                ways.disagree(rulings.disagreements, first.time());
            }
            for (answer, ruling) in answers.into_iter().zip(rulings.rulings) {
                let _ = answer.send(Ok(ruling));
            }
        }
        Err(fate) => {
            for answer in answers {
                let _ = answer.send(Err(fate.clone()));
            }
        }
    }
}

/// What the server answers. Whoever waited for it may leave meanwhile; it is listened to all the same.
async fn answer<T>(
    mut sent: Sent,
    batch: &Batch,
    answers: &mut [oneshot::Sender<T>],
) -> Result<Rulings, Fate> {
    let place = Arc::clone(&sent.place);
    let mut reply = pin!(run(&place.way().link, batch.call(), |answer| batch.rulings(answer)));
    let all_left = async {
        for answer in answers {
            answer.closed().await;
        }
    };
    tokio::select! {
        biased;
        rulings = &mut reply => return rulings,
        () = all_left => sent.leave(),
    }
    reply.await
}

/// Runs a script by its name; by its text, if the server does not know it. It certainly did not run then.
async fn run<T>(
    link: &Link,
    call: &Call,
    read: impl Fn(&wire::Value) -> Result<T, Malformed>,
) -> Result<T, Fate> {
    let read = |answer| read(&value(answer));
    match link.call(&command("EVALSHA", call.script.sha(), call), read).await {
        Err(Fate::NoScript) => link.call(&command("EVAL", call.script.text(), call), read).await,
        answer => answer,
    }
}

fn closed() -> Fate {
    Fate::NotSent("the store was closed".to_owned())
}

fn command(name: &str, script: &str, call: &Call) -> Cmd {
    let mut command = redis::cmd(name);
    command.arg(script).arg(call.keys.len()).arg(&call.keys[..]);
    for argument in &call.args {
        command.arg(&argument[..]);
    }
    command
}

/// An answer in our own words.
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

    /// The messages that are logged.
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
    fn a_script_that_decides_otherwise_every_time_is_reported_once_a_second() {
        let (ways, log) = (Ways::new(Vec::new()), Log::default());
        let now = Time::from_micros(1_760_000_000_000_000);
        tracing::subscriber::with_default(log.clone(), || {
            (0..1_000).for_each(|_| ways.disagree(7, now));
            ways.disagree(3, now + Span::from_secs(1));
        });
        let said = log.0.lock().unwrap();
        let [first, second] = &said[..] else { panic!("{said:?}") };
        assert!(first.contains("disagree on 7 requests") && first.contains("(0 more"), "{first}");
        assert!(second.contains("disagree on 3 requests") && second.contains("(999 more"), "{second}");
    }
}
