//! Makes checks at a steady rate, whatever their results, and prints each decision: a child process of `load.rs`. Exits
//! when its standard input is closed.

use std::cell::Cell;
use std::error::Error;
use std::fmt::{self, Write as _};
use std::io::{BufWriter, Read as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use tokio::task_local;
use tollkeeper::config::StoreUrl;
use tollkeeper::store::charge::Item;
use tollkeeper::store::redis::{RedisOptions, RedisStore};
use tollkeeper::store::{
    Key, KeyCorrection, PartialToll, Remote, RemoteResult, Reply, Resilient, ResilientSettings, Server,
    Split, StoreFuture, Toll,
};
use tollkeeper::{Charge, Correction, Costs, Limiter, MemoryStore, Slot, facts};
use tollkeeper_tests::load::{self, BACK, COST, NODES, OFFERED, ONCE, ROUTES, Row, THREADS};
use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, span};

/// Maximum of checks in flight.
const TASKS: u32 = 16;

task_local! {
    /// Whether this check called the store.
    static ASKED: Cell<bool>;
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(THREADS).enable_all().build()?.block_on(run())
}

async fn run() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().collect();
    let [_, url, node, deadline] = &words[..] else {
        return Err("usage: load-node URL NODE DEADLINE".into());
    };
    let node: u32 = node.parse()?;
    let StoreUrl::Redis(url) = url.parse()? else { return Err("not a Redis URL".into()) };

    let (say, said) = channel::<String>();
    let writer = std::thread::spawn(move || write(&said));
    tracing::subscriber::set_global_default(Log(say.clone()))?;
    let (stop_watching, stopped) = channel::<()>();
    let watcher = std::thread::spawn({
        let say = say.clone();
        move || watch(&say, &stopped)
    });

    let settings = ResilientSettings {
        deadline: Duration::from_millis(deadline.parse()?),
        nodes: NODES,
        ..ResilientSettings::default()
    };
    let store = Marked(RedisStore::open(&url, RedisOptions::default()));
    let store = Arc::new(Resilient::new(store, settings, MemoryStore::default()));
    let limiter = Limiter::with_store(load::policy(), store);
    let before = memory();

    let stop = Arc::new(AtomicBool::new(false));
    let users = Arc::new(AtomicU64::new(0));
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let (limiter, say) = (limiter.clone(), say.clone());
            let (stop, users) = (Arc::clone(&stop), Arc::clone(&users));
            tokio::spawn(async move {
                let mut ticks = tokio::time::interval(Duration::from_secs(1) * TASKS / OFFERED);
                let mut route = task as usize;
                while !stop.load(Relaxed) {
                    ticks.tick().await;
                    route = (route + 1) % ROUTES.len();
                    let row = check(&limiter, node, route, users.fetch_add(1, Relaxed)).await;
                    let _ = say.send(row);
                }
            })
        })
        .collect();

    let (ends, ended) = tokio::sync::oneshot::channel::<()>();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = ends.send(());
    });
    let _ = ended.await;
    stop.store(true, Relaxed);
    for task in tasks {
        match tokio::time::timeout(Duration::from_secs(10), task).await {
            Ok(Ok(())) => {}
            Ok(Err(panic)) => say.send(format!("a task panicked: {panic}"))?,
            Err(_) => say.send("a check hung for ten seconds".to_owned())?,
        }
    }
    drop(stop_watching);
    watcher.join().expect("no panic in the watcher");
    say.send(format!("memory {before} {}", memory()))?;
    say.send("end".to_owned())?;
    // The log keeps a sender until the process exits, so the writer needs an explicit end.
    say.send(String::new())?;
    writer.join().expect("no panic in the writer");
    Ok(())
}

async fn check(limiter: &Limiter, node: u32, route: usize, user: u64) -> String {
    let name = format!("{node}-{user}");
    let facts = facts! { "route" => ROUTES[route], "user" => &name };
    let cost = if ROUTES[route] == ONCE { COST } else { 1 };
    let (at, began) = (load::now(), Instant::now());
    let asking = async {
        let decision = limiter.check(&facts).cost(cost).await;
        (decision, ASKED.with(Cell::get))
    };
    let (decision, asked) = ASKED.scope(Cell::new(false), asking).await;
    let took = micros(began.elapsed());
    let decision = match decision {
        Ok(decision) => decision,
        Err(error) => return format!("error {error}"),
    };
    // Every other charge is refunded in part, twice, at the same time.
    let charge = decision.charge().filter(|_| ROUTES[route] == ONCE && user.is_multiple_of(2));
    let refunds = match charge {
        None => None,
        Some(charge) => {
            let refund = async || {
                let part = limiter.refund_part(&charge, Costs::Request(BACK)).await;
                part.expect("a part of the charge")
            };
            Some(<[Correction; 2]>::from(tokio::join!(refund(), refund())))
        }
    };
    let row = Row {
        node,
        route,
        at,
        took,
        asked,
        allowed: decision.allowed(),
        degraded: decision.degraded(),
        time: decision.time().as_micros(),
        user,
        refunds,
    };
    row.to_string()
}

/// Writes lines, and flushes whenever none is pending.
fn write(said: &Receiver<String>) {
    let mut out = BufWriter::new(std::io::stdout());
    while let Ok(mut line) = said.recv() {
        loop {
            if line.is_empty() || writeln!(out, "{line}").is_err() {
                let _ = out.flush();
                return;
            }
            match said.try_recv() {
                Ok(next) => line = next,
                Err(_) => break,
            }
        }
        let _ = out.flush();
    }
}

/// Measures the longest stall of a thread that only wakes up and reads the clock.
fn watch(say: &Sender<String>, stopped: &Receiver<()>) {
    const NAP: Duration = Duration::from_millis(2);
    let mut longest = Duration::ZERO;
    loop {
        let slept = Instant::now();
        if stopped.recv_timeout(NAP) != Err(RecvTimeoutError::Timeout) {
            break;
        }
        longest = longest.max(slept.elapsed().saturating_sub(NAP));
    }
    let _ = say.send(format!("stalled {}", micros(longest)));
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).expect("below 500,000 years")
}

/// Peak memory of this process, in kibibytes.
fn memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// A store that marks the checks that call it.
#[derive(Debug)]
struct Marked(RedisStore);

impl Remote for Marked {
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, RemoteResult<Reply>> {
        ASKED.with(|asked| asked.set(true));
        self.0.decide(toll)
    }

    fn split(&self, toll: &Toll) -> Split {
        self.0.split(toll)
    }

    fn decide_part(&self, part: &PartialToll) -> StoreFuture<'_, RemoteResult<Reply>> {
        self.0.decide_part(part)
    }

    fn undo<'a>(&'a self, part: &'a PartialToll, ruling: &'a Reply) -> StoreFuture<'a, RemoteResult<()>> {
        self.0.undo(part, ruling)
    }

    fn server_of(&self, items: &[Item]) -> Option<Server> {
        self.0.server_of(items)
    }

    fn correct<'a>(
        &'a self,
        charge: &'a Charge,
        corrections: &'a [KeyCorrection],
    ) -> StoreFuture<'a, RemoteResult<Correction>> {
        self.0.correct(charge, corrections)
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>> {
        self.0.release(slot)
    }

    fn renew<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>> {
        self.0.renew(slot)
    }

    fn forget<'a>(&'a self, key: Key<'a>) -> StoreFuture<'a, RemoteResult<bool>> {
        self.0.forget(key)
    }

    fn arrivals(&self, server: &Server) -> u64 {
        self.0.arrivals(server)
    }

    fn seal_charge(&self, charge: &Charge) -> Option<String> {
        self.0.seal_charge(charge)
    }

    fn open_charge<'a>(&'a self, text: &'a str) -> StoreFuture<'a, RemoteResult<Option<Charge>>> {
        self.0.open_charge(text)
    }

    fn seal_slot(&self, slot: &Slot) -> Option<String> {
        self.0.seal_slot(slot)
    }

    fn open_slot<'a>(&'a self, text: &'a str) -> StoreFuture<'a, RemoteResult<Option<Slot>>> {
        self.0.open_slot(text)
    }
}

/// Prints what the library logs.
struct Log(Sender<String>);

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("tollkeeper")
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(format!("log {}: ", event.metadata().level()));
        event.record(&mut line);
        let _ = self.0.send(line.0.replace('\n', "\\n"));
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            write!(self.0, "{value:?}").expect("memory");
        }
    }
}
