//! Opens a limiter, forks, and uses it in both processes:
//!
//! - `fork-node URL outside|current|multi`: on Redis, outside of a runtime or in one of that kind,
//! - `fork-node FILE snapshot`: on a memory store that is saved to a file,
//! - `fork-node CONFIG engine`: as an engine that follows its config file.
//!
//! There is no safe way to fork in Rust. The test preloads a library that replaces `getppid` with `fork`: it returns the
//! process id of the child in the parent, and 0 in the child.

use std::future::pending;
use std::io::Write as _;
use std::os::unix::process::parent_id;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use tollkeeper::{Capacity, Clock, Facts, Limit, Limiter, MemoryStore, Quota, Snapshots, facts};
use tollkeeper_engine::{ApiCall, ConfigSource, EngineEvent, EventKind, Options, VisitRequest};
use tollkeeper_tests::redis::{PATIENCE, limiter};

fn main() {
    let mut args = std::env::args().skip(1);
    let url = args.next().expect("a URL");
    let opened = args.next().expect("where it is opened");
    if opened == "snapshot" {
        return fork_with_snapshot(&url);
    }
    if opened == "engine" {
        return fork_with_engine(&url);
    }
    let runtime = match &*opened {
        "outside" => None,
        "current" => Some(tokio::runtime::Builder::new_current_thread().enable_all().build()),
        _ => Some(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()),
    };
    let runtime = runtime.map(|runtime| runtime.expect("a runtime"));
    let limits = vec![
        Limit::new("per-user", Quota::per_hour(100).burst(100)).by("user"),
        Limit::new("slots", Quota::slots(2)).by("user"),
    ];
    let alice = facts! { "user" => "alice" };
    let limiter = match &runtime {
        None => limiter(&url, limits),
        Some(runtime) => {
            let limiter = runtime.block_on(async {
                let limiter = limiter(&url, limits);
                assert!(limiter.check(&alice).await.expect("valid facts").allowed());
                limiter
            });
            // Other tasks keep checking during the fork, as in a server.
            runtime.spawn(pending::<()>());
            limiter
        }
    };
    let before = 10 - usize::from(runtime.is_some());
    assert_eq!(admitted(&limiter, &alice, before), before);

    let name = if parent_id() == 0 { "child" } else { "parent" };
    abort_when_stuck();
    let slot = limiter.acquire(&alice).wait().expect("valid facts").slot.expect("one for each").keep();
    // Together more than the limit has left, but one process alone leaves units for the slot of the other.
    let elsewhere = thread::scope(|scope| scope.spawn(|| admitted(&limiter, &alice, 30)).join());
    let count = admitted(&limiter, &alice, 30) + elsewhere.expect("no panic");
    println!("{name} {count} {}", slot.id());
    std::io::stdout().flush().expect("the test reads");
    drop(limiter);
    // The threads of the runtime do not exist in the child, so dropping it would hang.
    std::mem::forget(runtime);
}

/// The child charges more, and closes its copy of the store before the parent does.
fn fork_with_snapshot(file: &str) {
    let snapshots = Snapshots { every: Duration::from_secs(3_600), ..Snapshots::to(file) };
    let (store, _) = MemoryStore::open(Capacity::default(), Clock::system(), snapshots).expect("a free file");
    let limit = Limit::new("per-user", Quota::per_hour(100).burst(100)).by("user");
    let limiter = Limiter::builder().limit(limit).store(store.clone()).build().expect("valid limits");
    let alice = facts! { "user" => "alice" };
    assert_eq!(admitted(&limiter, &alice, 10), 10);
    if parent_id() == 0 {
        assert_eq!(admitted(&limiter, &alice, 50), 50);
        store.close().expect("the child does not save");
        println!("child {}", Path::new(file).exists());
    } else {
        // The test closes stdin after the child has printed its line.
        std::io::stdin().read_line(&mut String::new()).expect("the test writes");
        store.close().expect("the snapshot is saved");
        println!("parent {}", Path::new(file).exists());
    }
}

/// Each process uses the engine and closes it; the slot that was taken before the fork is the parent's.
fn fork_with_engine(config: &str) {
    let (warn, warnings) = mpsc::channel();
    let mut options = Options::new(ConfigSource::File(config.into()));
    options.listener = Some(Arc::new(move |event: &EngineEvent| warn.send(event.kind).unwrap_or_default()));
    let number = tollkeeper_engine::open(options).expect("a valid config");
    let engine = tollkeeper_engine::get(number).expect("open");
    let checks = |count: usize| {
        let body = br#"{"facts":{"user":"alice"}}"#;
        let answers = (0..count).map(|_| engine.ask(ApiCall::Check, body.to_vec(), false).wait());
        answers.filter(|answer| answer.status == 200).count()
    };
    let visit = || engine.visit(VisitRequest::new(b"GET\n/\n192.0.2.7".to_vec())).wait();
    assert_eq!(checks(10), 10);
    let slot = visit();
    let ticket = slot.split('\n').nth(1).and_then(|ticket| ticket.parse().ok()).expect("a ticket");
    assert!(slot.starts_with("pass\n") && visit().starts_with("429\n"), "{slot}");
    let is_child = parent_id() == 0;
    abort_when_stuck();
    if is_child {
        tollkeeper_engine::forked();
        let count = checks(100);
        assert!(!engine.gone(ticket), "a ticket of the parent");
        assert!(visit().starts_with("429\n"), "the slot of the parent is held");
        let warned = warnings.try_iter().filter(|kind| *kind == EventKind::Warning).count();
        assert!(tollkeeper_engine::close(number));
        drop(engine);
        println!("child {count} {warned}");
    } else {
        // The test closes stdin after the child has printed its line and closed its engine.
        std::io::stdin().read_line(&mut String::new()).expect("the test writes");
        assert!(visit().starts_with("429\n"), "the child has not released it");
        assert!(engine.gone(ticket));
        // A remote slot is released in the background.
        let began = Instant::now();
        while !visit().starts_with("pass\n") {
            assert!(began.elapsed() < PATIENCE, "the slot was not released");
        }
        let warned = warnings.try_iter().count();
        println!("parent {} {warned}", checks(100));
    }
}

/// Ends the process if it hangs: the child has none of the parent's threads, and must not wait for one.
fn abort_when_stuck() {
    let (running, ended) = mpsc::channel::<()>();
    thread::spawn(move || {
        if ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            std::process::abort();
        }
    });
    std::mem::forget(running);
}

/// Makes this many checks, and returns how many were admitted. Asserts that the store decided all of them.
fn admitted(limiter: &Limiter, facts: &Facts<'_>, checks: usize) -> usize {
    let decisions = (0..checks).map(|_| limiter.check(facts).wait().expect("valid facts"));
    decisions.inspect(|decision| assert_eq!(decision.degraded(), None)).filter(|one| one.allowed()).count()
}
