//! A lane: tolls that are in flight at the same time travel together.
//!
//! A lone toll is sent at once. While calls are on their way, those that come meanwhile gather and go in the
//! next: the busier the store, the more tolls share the cost of a call. The line of those who gather is
//! bounded, and whoever has left it is not sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use redis::{Cmd, Value};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tollkeeper_core::Ruling;

use super::address::Address;
use super::fate::Fate;
use super::link::Link;
use super::wire::{self, Batch, Call};

/// The most tolls that wait to be sent.
const WAITING: usize = 8_192;
/// The most tolls in one call: more would hold up everybody else on the server.
const TOGETHER: usize = 64;
/// Calls on their way at once: one that the server works on, and one that is there when it has done.
const ON_THE_WAY: usize = 2;

/// All connections to one server.
#[derive(Debug)]
pub(crate) struct Lanes {
    lanes: Vec<Lane>,
    next: AtomicUsize,
}

impl Lanes {
    /// Begins to connect.
    pub(crate) fn new(address: &Address, connections: usize) -> Lanes {
        let lanes = (0..connections.max(1)).map(|_| Lane::new(Link::to(address.clone()))).collect();
        Lanes { lanes, next: AtomicUsize::new(0) }
    }

    /// The one with the least to do, and of equals each in its turn. So a connection that has gone silent is
    /// given no more than it has, and one that is broken nothing while another is not.
    pub(crate) fn pick(&self) -> &Lane {
        let turn = self.next.fetch_add(1, Relaxed) % self.lanes.len();
        let (before, after) = self.lanes.split_at(turn);
        after.iter().chain(before).min_by_key(|lane| lane.burden()).expect("there is at least one")
    }

    /// Why the server cannot be asked, if it cannot.
    pub(crate) fn trouble(&self) -> Option<Arc<str>> {
        self.lanes.iter().find_map(|lane| lane.link.trouble())
    }

    /// Gives all connections up, so that the next ones ask again where to go.
    pub(crate) fn give_up(&self) {
        self.lanes.iter().for_each(|lane| lane.link.give_up());
    }
}

/// One connection, and the tolls that travel on it.
#[derive(Debug)]
pub(crate) struct Lane {
    link: Arc<Link>,
    waiting: mpsc::Sender<Job>,
    ways: Arc<Semaphore>,
}

/// A toll that wants to be decided.
#[derive(Debug)]
struct Job {
    /// Only what is in one slot can travel together; a server without slots has one.
    slot: u16,
    asked: wire::Asked,
    answer: oneshot::Sender<Result<Ruling, Fate>>,
}

impl Lane {
    pub(crate) fn new(link: Link) -> Lane {
        let link = Arc::new(link);
        let (waiting, jobs) = mpsc::channel(WAITING);
        let ways = Arc::new(Semaphore::new(ON_THE_WAY));
        tokio::spawn(carry(Arc::clone(&link), jobs, Arc::clone(&ways)));
        Lane { link, waiting, ways }
    }

    /// How many tolls wait, and how many calls are on their way; most if there is no connection.
    fn burden(&self) -> usize {
        let on_the_way = ON_THE_WAY - self.ways.available_permits();
        if self.link.is_down() { usize::MAX } else { WAITING - self.waiting.capacity() + on_the_way }
    }

    /// Has a toll decided, together with whatever else is in flight.
    pub(crate) async fn decide(&self, slot: u16, asked: wire::Asked) -> Result<Ruling, Fate> {
        let (answer, answered) = oneshot::channel();
        self.waiting.try_send(Job { slot, asked, answer }).map_err(|_| Fate::Full)?;
        answered.await.unwrap_or_else(|_| Err(Fate::NotSent("the store was closed".to_owned())))
    }

    /// Runs a script by itself.
    pub(crate) async fn run(&self, call: &Call) -> Result<wire::Value, Fate> {
        run(&self.link, call).await
    }

    /// Runs a script on keys that are on their way to this server.
    pub(crate) async fn run_asking(&self, call: &Call) -> Result<wire::Value, Fate> {
        let answer = self.link.call_asking(&command("EVAL", call.script.text(), call)).await;
        answer.map(value)
    }

    /// Runs a plain command.
    pub(crate) async fn command(&self, command: &Cmd) -> Result<Value, Fate> {
        self.link.call(command).await
    }
}

/// Gathers and sends for as long as there is a lane.
async fn carry(link: Arc<Link>, mut jobs: mpsc::Receiver<Job>, ways: Arc<Semaphore>) {
    while let Some(first) = jobs.recv().await {
        let way = Arc::clone(&ways).acquire_owned().await.expect("nobody closes it");
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
        let way = Arc::new(way);
        while let Some(slot) = together.first().map(|job| job.slot) {
            let (batch, others) = together.into_iter().partition(|job| job.slot == slot);
            together = others;
            let (link, way) = (Arc::clone(&link), Arc::clone(&way));
            tokio::spawn(async move {
                send(&link, batch).await;
                drop(way);
            });
        }
    }
}

async fn send(link: &Link, jobs: Vec<Job>) {
    let (asked, answers): (Vec<wire::Asked>, Vec<_>) =
        jobs.into_iter().map(|job| (job.asked, job.answer)).unzip();
    let batch = Batch::new(asked);
    let rulings = run(link, batch.call())
        .await
        .and_then(|value| batch.rulings(&value).map_err(|error| Fate::nonsense(error.to_string())));
    match rulings {
        Ok(rulings) => {
            if rulings.disagreements > 0 {
                tracing::error!(
                    "the script and this process disagree on {} requests: the script's verdict counts; please report this",
                    rulings.disagreements
                );
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

/// Runs a script by its name; by its text, if the server does not know it. It certainly did not run then.
async fn run(link: &Link, call: &Call) -> Result<wire::Value, Fate> {
    let answer = match link.call(&command("EVALSHA", call.script.sha(), call)).await {
        Err(Fate::NoScript) => link.call(&command("EVAL", call.script.text(), call)).await,
        answer => answer,
    };
    answer.map(value)
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
