//! A limiter on Redis works with and without a tokio runtime, wherever it was opened.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tollkeeper::config::StoreUrl;
use tollkeeper::store::redis::{RedisOptions, RedisStore};
use tollkeeper::store::{Resilient, ResilientSettings};
use tollkeeper::{Correction, Costs, Limit, Limiter, MemoryStore, OnStoreFailure, Policy, Quota, facts};
use tollkeeper_tests::redis::{Server, limiter};

#[derive(Clone, Copy, Debug)]
enum Flavor {
    CurrentThread,
    MultiThread,
}

impl Flavor {
    fn build(self) -> Runtime {
        let mut builder = match self {
            Flavor::CurrentThread => Builder::new_current_thread(),
            Flavor::MultiThread => Builder::new_multi_thread(),
        };
        builder.worker_threads(1).enable_all().build().expect("a runtime")
    }
}

/// Where a limiter is opened.
#[derive(Clone, Copy, Debug)]
enum Opened {
    Outside,
    /// The runtime still exists, but nothing drives it.
    Inside(Flavor),
    /// The runtime has ended before the limiter is used.
    InsideEnded(Flavor),
}

const OPENED: [Opened; 5] = [
    Opened::Outside,
    Opened::Inside(Flavor::CurrentThread),
    Opened::Inside(Flavor::MultiThread),
    Opened::InsideEnded(Flavor::CurrentThread),
    Opened::InsideEnded(Flavor::MultiThread),
];

impl Opened {
    fn open(self, make: impl FnOnce() -> Limiter) -> (Limiter, Option<Runtime>) {
        match self {
            Opened::Outside => (make(), None),
            Opened::Inside(flavor) => {
                let runtime = flavor.build();
                (runtime.block_on(async { make() }), Some(runtime))
            }
            Opened::InsideEnded(flavor) => (flavor.build().block_on(async { make() }), None),
        }
    }
}

fn limits() -> Vec<Limit> {
    vec![
        Limit::new("per-user", Quota::per_hour(2).burst(2)).by("user"),
        Limit::new("slots", Quota::slots(1)).by("user"),
    ]
}

/// Makes every kind of call, blocking.
fn use_blocking(limiter: &Limiter, user: &str) {
    let facts = facts! { "user" => user };
    let first = limiter.check(&facts).wait().expect("valid facts");
    assert_eq!((first.allowed(), first.degraded()), (true, None), "{user}");
    let text = limiter.seal_charge(&first.charge().expect("it was admitted"));
    let charge = limiter.open_charge(&text).wait().expect("the store answers").expect("a valid receipt");
    assert_eq!(limiter.refund(&charge).wait(), Correction::Done);
    for call in [limiter.peek(&facts), limiter.usage(&facts)] {
        let decision = call.wait().expect("valid facts");
        assert_eq!((decision.allowed(), decision.degraded()), (true, None), "{user}");
    }
    let reserved = limiter.reserve(&facts, Duration::from_secs(60)).cost(2).wait().expect("valid facts");
    let charge = reserved.charge().expect("it was admitted");
    assert_eq!(limiter.settle(&charge, Costs::Request(1)).wait(), Ok(Correction::Done));
    let second = limiter.check(&facts).wait().expect("valid facts").charge().expect("it was admitted");
    assert_eq!(limiter.refund_part(&second, Costs::Request(1)).wait(), Ok(Correction::Done));
    assert_eq!(limiter.refund_of(&second, |name| name == "per-user").wait(), Correction::Repeated);
    let slot = limiter.acquire(&facts).wait().expect("valid facts").slot.expect("one is free").keep();
    let text = limiter.seal_slot(&slot);
    let slot = limiter.open_slot(&text).wait().expect("the store answers").expect("a valid receipt");
    assert_eq!((limiter.renew(&slot).wait(), limiter.release(&slot).wait()), (Ok(true), Ok(true)));
    assert_eq!(limiter.forget("per-user", &facts).wait(), Ok(true));
    let held = limiter.acquire(&facts).wait().expect("valid facts").slot.expect("one is free");
    assert_eq!(held.renew().wait(), Ok(true));
    drop(held);
    // The slot is released in the background.
    while limiter.acquire(&facts).cost(1).wait().expect("valid facts").slot.is_none() {
        limiter.forget("per-user", &facts).wait().expect("the store answers");
        thread::park_timeout(Duration::from_millis(1));
    }
    assert_eq!(limiter.forget("per-user", &facts).wait(), Ok(true));
    assert!(limiter.check(&facts).cost(2).wait().expect("valid facts").allowed());
    assert!(!limiter.check(&facts).wait().expect("valid facts").allowed());
}

/// Makes calls with `await`.
async fn use_async(limiter: &Limiter, user: &str) {
    let facts = facts! { "user" => user };
    let first = limiter.check(&facts).cost(2).await.expect("valid facts");
    assert_eq!((first.allowed(), first.degraded()), (true, None));
    assert!(!limiter.check(&facts).await.expect("valid facts").allowed());
    assert_eq!(limiter.refund(&first.charge().expect("it was admitted")).await, Correction::Done);
    drop(limiter.acquire(&facts).await.expect("valid facts").slot.expect("one is free"));
    assert_eq!(limiter.forget("per-user", &facts).await, Ok(true));
}

/// Uses a limiter in every way, one after the other.
fn use_everywhere(limiter: &Limiter, runtime: Option<&Runtime>) {
    use_blocking(limiter, "a thread");
    block_on(use_async(limiter, "an executor that is not tokio's"));
    for flavor in [Flavor::CurrentThread, Flavor::MultiThread] {
        let other = flavor.build();
        other.block_on(use_async(limiter, &format!("{flavor:?}")));
        other.block_on(async { use_blocking(limiter, &format!("blocked {flavor:?}")) });
        let inside = limiter.clone();
        let task = other.spawn(async move { use_blocking(&inside, &format!("blocked task of {flavor:?}")) });
        other.block_on(task).expect("it does not panic");
    }
    if let Some(runtime) = runtime {
        runtime.block_on(use_async(limiter, "its own runtime"));
        runtime.block_on(async { use_blocking(limiter, "its own runtime, blocked") });
    }
}

#[test]
fn limiter_works_wherever_it_is_opened_and_used() {
    let server = Server::start();
    for opened in OPENED {
        server.connect().text("FLUSHALL");
        let (limiter, runtime) = opened.open(|| limiter(&server.url(), limits()));
        use_everywhere(&limiter, runtime.as_ref());
        drop(limiter);
        println!("opened {opened:?}");
    }
}

#[test]
fn builder_opens_redis_without_a_runtime() {
    let server = Server::start();
    let limit = Limit::new("per-user", Quota::per_minute(2)).by("user");
    let limiter = Limiter::builder().limit(limit).store(server.url()).build().expect("valid limits");
    let decision = limiter.check(&facts! { "user" => "alice" }).wait().expect("valid facts");
    assert!(decision.allowed());
}

/// The server hangs: the failure policy decides checks, and operations without a policy return an error.
#[test]
fn failure_policy_answers_for_a_stopped_redis_everywhere() {
    let server = Server::start();
    for opened in OPENED {
        let Ok(StoreUrl::Redis(url)) = server.url().parse() else { panic!("a URL") };
        let make = || {
            let store = RedisStore::open(&url, RedisOptions::default());
            let store = Resilient::new(store, ResilientSettings::default(), MemoryStore::default());
            let limit = Limit::new("per-user", Quota::per_hour(9)).by("user");
            let limits = vec![limit.on_store_failure(OnStoreFailure::Deny)];
            Limiter::with_store(Policy::new(limits).expect("valid limits"), Arc::new(store))
        };
        server.connect();
        server.signal("STOP");
        let (limiter, runtime) = opened.open(make);
        let facts = facts! { "user" => "alice" };
        let refused = |limiter: &Limiter| {
            let decision = limiter.check(&facts).wait().expect("valid facts");
            assert_eq!(decision.degraded(), Some(OnStoreFailure::Deny), "{opened:?}");
            assert!(limiter.forget("per-user", &facts).wait().is_err(), "{opened:?}");
        };
        refused(&limiter);
        block_on(async {
            let decision = limiter.check(&facts).await.expect("valid facts");
            assert_eq!(decision.degraded(), Some(OnStoreFailure::Deny), "{opened:?}");
        });
        if let Some(runtime) = &runtime {
            runtime.block_on(async { refused(&limiter) });
        }
        drop((limiter, runtime));
        server.signal("CONT");
    }
}

/// Polls a future on this thread, as an executor other than tokio does.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}
