//! Opening, naming, reloading and closing engines, and calls on Redis.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::fs;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Instant;

use tollkeeper_engine::{
    ApiCall, CLOSED, Calls, ConfigSource, Engine, EngineCall, EngineEvent, EventKind, Format, Listener,
    Options, close, get, open,
};
use tollkeeper_tests::folder::Folder;
use tollkeeper_tests::redis::{PATIENCE, Server};

const ALICE: &str = r#"{"facts":{"user":"alice"}}"#;

fn limits(burst: u32) -> String {
    // A busy machine must not make Redis late.
    format!(
        r#"{{"redis":{{"deadline":"1m"}},"limits":[{{"name":"per-user","by":"user","rate":"60/hour","burst":{burst}}}]}}"#
    )
}

fn options(text: String) -> Options {
    Options::new(ConfigSource::Text { format: Format::Json, text })
}

/// How many of these checks are admitted.
fn admitted(engine: &Arc<Engine>, checks: usize) -> usize {
    let answers = (0..checks).map(|_| engine.ask(ApiCall::Check, ALICE.into(), false).wait());
    answers.filter(|answer| answer.status == 200).count()
}

fn listener() -> (Listener, mpsc::Receiver<EngineEvent>) {
    let (send, events) = mpsc::channel();
    (Arc::new(move |event: &EngineEvent| send.send(event.clone()).unwrap_or_default()), events)
}

#[test]
fn engines_with_one_name_are_one_engine() {
    let named = |burst, name: &str| Options { name: Some(name.to_owned()), ..options(limits(burst)) };
    let (one, two) = (open(named(5, "shared")).unwrap(), open(named(5, "shared")).unwrap());
    assert_ne!(one, two);
    assert_eq!(admitted(&get(one).unwrap(), 3), 3);
    assert_eq!(admitted(&get(two).unwrap(), 3), 2);
    let other = open(named(6, "shared")).unwrap_err();
    assert!(
        other.contains("`shared` is already open with other limits, another store or another clock"),
        "{other}"
    );
    let unrelated = open(named(5, "other")).unwrap();
    assert_eq!(admitted(&get(unrelated).unwrap(), 9), 5);

    assert!(close(one) && !close(one) && get(one).is_none());
    assert_eq!(admitted(&get(two).unwrap(), 1), 0, "open under its other number");
    assert!(close(two));
    let fresh = open(named(6, "shared")).unwrap();
    assert_eq!(admitted(&get(fresh).unwrap(), 9), 6, "the name is free again");
    assert!(close(fresh) && close(unrelated));
}

#[test]
fn answer_of_a_closed_engine_is_an_error_of_the_api() {
    let error: serde_json::Value = serde_json::from_str(CLOSED).unwrap();
    assert_eq!(error["error"]["code"], "closed");
    assert!(get(0).is_none() && !close(0));
}

#[test]
fn invalid_options_are_refused_with_a_reason() {
    let error = |options: Options| open(options).unwrap_err();
    let report = error(options(r#"{"limits":[{"name":"a","rate":"5/1 mn"}]}"#.to_owned()));
    assert!(report.starts_with("config:1:"), "{report}");
    assert!(error(Options::new(ConfigSource::File("missing.yaml".into()))).contains("missing.yaml"));
    let store = |url: &str| Options { store: Some(url.to_owned()), ..options(limits(1)) };
    assert!(error(store("ftp://host")).starts_with("`store`: "));
    let manual = Options { at: Some(0.0), ..store("redis://127.0.0.1:1") };
    assert!(error(manual).contains("memory://"));
    assert!(error(Options { at: Some(f64::NAN), ..options(limits(1)) }).contains("NaN"));
    let number = open(options(limits(1))).unwrap();
    let engine = get(number).unwrap();
    assert!(engine.advance(1.0).unwrap_err().contains("no manual clock"));
    assert!(close(number));
}

/// A changed file is active within a second and keeps the counts; an invalid one changes nothing.
#[test]
fn file_is_followed_and_its_errors_are_events() {
    let folder = Folder::new();
    let path = folder.write("tollkeeper.json", &limits(3));
    let (listener, events) = listener();
    let number =
        open(Options { listener: Some(listener), ..Options::new(ConfigSource::File(path.clone())) }).unwrap();
    let engine = get(number).unwrap();
    assert_eq!(admitted(&engine, 5), 3);

    fs::write(&path, limits(5)).unwrap();
    let event = events.recv_timeout(PATIENCE).unwrap();
    assert_eq!((event.kind, &*event.message), (EventKind::Reload, "2"));
    assert_eq!(admitted(&engine, 5), 2, "three of five were admitted before");

    fs::write(&path, "{\"limits\":[{\"name\":7}]}").unwrap();
    let event = events.recv_timeout(PATIENCE).unwrap();
    assert_eq!(event.kind, EventKind::Error);
    assert!(event.message.contains("the previous one stays active"), "{}", event.message);
    let limits = engine.ask(ApiCall::Limits, Vec::new(), false).wait().text;
    let limits: serde_json::Value = serde_json::from_str(&limits).unwrap();
    assert_eq!((&limits["version"], &limits["source"]), (&2.into(), &"file".into()));
    assert!(limits["error"].as_str().unwrap().contains("tollkeeper.json"), "{limits}");
    drop(engine);
    assert!(close(number));
    // The engine has ended, and with it the listener.
    assert!(events.recv_timeout(PATIENCE).is_err());
}

/// Other threads and other engines on the same Redis share the counts, and no call blocks its caller.
#[test]
fn counts_on_redis_are_shared_and_pending() {
    let server = Server::start();
    server.connect();
    let on_redis = || open(Options { store: Some(server.url()), ..options(limits(20)) }).unwrap();
    let (one, two) = (on_redis(), on_redis());
    let engine = get(one).unwrap();
    assert!(engine.is_remote());
    assert_eq!(admitted(&engine, 5), 5);
    let (send, answers) = mpsc::channel();
    for _ in 0..20 {
        match get(two).unwrap().ask(ApiCall::Check, ALICE.into(), false) {
            EngineCall::Ready(answer) => panic!("a remote store was not waited for: {answer:?}"),
            EngineCall::Pending(pending) => {
                let send = send.clone();
                pending.spawn(move |answer| send.send(answer).unwrap());
            }
        }
    }
    let answers = (0..20).map(|_| answers.recv_timeout(PATIENCE).unwrap());
    assert_eq!(answers.filter(|answer| answer.status == 200).count(), 15);
    assert!(close(one) && close(two));
}

/// Adds checks of one user, which end with the number of units that they left.
fn add_checks(calls: &mut Calls<u64>, engine: &Arc<Engine>, checks: usize) {
    for _ in 0..checks {
        let EngineCall::Pending(pending) = engine.ask(ApiCall::Check, ALICE.into(), false) else {
            panic!("a remote store was not waited for");
        };
        calls.add(pending, |answer| {
            let decision: serde_json::Value = serde_json::from_str(&answer.text).unwrap();
            decision["limits"][0]["remaining"].as_u64().unwrap()
        });
    }
}

/// The thread that made the calls is woken for their replies, at most once before it runs them.
#[test]
fn calls_of_a_thread_are_decided_in_order() {
    let server = Server::start();
    server.connect();
    let number = open(Options { store: Some(server.url()), ..options(limits(20)) }).unwrap();
    let engine = get(number).unwrap();
    // The first call also loads the secret of the store.
    assert_eq!(admitted(&engine, 1), 1);
    let (send, wakes) = mpsc::channel();
    let mut calls = Calls::new(move || send.send(()).unwrap());
    add_checks(&mut calls, &engine, 19);
    let mut left = calls.run();
    while left.len() < 19 {
        wakes.recv_timeout(PATIENCE).expect("a reply wakes the thread");
        assert!(wakes.try_recv().is_err(), "one wake is enough");
        left.append(&mut calls.run());
    }
    assert_eq!(left, (0..19).rev().collect::<Vec<u64>>());
    assert!(close(number));
}

/// A thread that ends must not undo what it asked for.
#[test]
fn calls_of_an_ended_thread_are_completed() {
    let server = Server::start();
    server.connect();
    let number = open(Options { store: Some(server.url()), ..options(limits(20)) }).unwrap();
    let engine = get(number).unwrap();
    assert_eq!(admitted(&engine, 1), 1);
    let mut calls = Calls::new(|| {});
    add_checks(&mut calls, &engine, 5);
    calls.run();
    add_checks(&mut calls, &engine, 5);
    drop(calls);
    let deadline = Instant::now() + PATIENCE;
    let left = || {
        let usage = engine.ask(ApiCall::Usage, ALICE.into(), false).wait().text;
        let usage: serde_json::Value = serde_json::from_str(&usage).unwrap();
        usage["limits"][0]["remaining"].as_u64().unwrap()
    };
    while left() > 9 {
        assert!(Instant::now() < deadline, "{} units are left", left());
        thread::yield_now();
    }
    assert!(close(number));
}

#[test]
fn headers_are_returned_on_request() {
    let number = open(Options { at: Some(0.0), ..options(limits(1)) }).unwrap();
    let engine = get(number).unwrap();
    assert_eq!(
        engine.ask(ApiCall::Check, ALICE.into(), true).wait().headers.lines().nth(1),
        Some("\"per-user\";q=1;w=60")
    );
    let refused = engine.ask(ApiCall::Check, ALICE.into(), true).wait();
    assert_eq!(refused.headers.lines().take(2).collect::<Vec<_>>(), ["retry-after", "60"]);
    assert_eq!(engine.ask(ApiCall::Check, ALICE.into(), false).wait().headers, "");
    assert!(close(number));
}

#[test]
fn opening_and_closing_leaves_nothing() {
    let threads = || fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
    // Other tests of this process may start or end threads, but not a thousand.
    let before = threads();
    let folder = Folder::new();
    let path = folder.write("tollkeeper.json", &limits(3));
    for round in 0..1_000 {
        let source = if round % 10 == 0 {
            ConfigSource::File(path.clone())
        } else {
            ConfigSource::Text { format: Format::Json, text: limits(1) }
        };
        let number = open(Options::new(source)).unwrap();
        assert_eq!(admitted(&get(number).unwrap(), 1), 1);
        assert!(close(number));
    }
    assert!(threads() < before + 50, "{before} threads before, {} after", threads());
}
