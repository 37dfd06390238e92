//! Runs concurrent programs under many interleavings, which Shuttle chooses: at random, and by the PCT
//! strategy, which finds bugs of a given depth with a known probability.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p tollkeeper --features shuttle --release --test shuttle`

#![cfg(shuttle)]
#![expect(clippy::unwrap_used, reason = "test helpers may panic like tests")]

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Waker};

use shuttle::sync::atomic::{AtomicU64, Ordering::SeqCst};
use shuttle::sync::{Arc, Mutex};
use shuttle::{future, thread};

use tollkeeper::{
    Algorithm, Capacity, Clock, Correction, Decision, Facts, Limit, Limiter, ManualClock, MemoryStore,
    Policy, Quota, Span, Time, facts,
};

const START: Time = Time::from_micros(20_370 * 86_400_000_000);

/// Runs a program under this many schedules of each kind.
fn explore(schedules: usize, program: impl Fn() + Clone + Send + Sync + 'static) {
    shuttle::check_random(program.clone(), schedules);
    shuttle::check_pct(program, schedules, 3);
}

fn limiter(max_keys: usize, limits: Vec<Limit>) -> (Limiter, MemoryStore, ManualClock) {
    let clock = ManualClock::new(START);
    let capacity = Capacity { max_keys, ..Capacity::default() };
    let store = MemoryStore::new(capacity, Clock::manual(&clock));
    (Limiter::embedded(Policy::new(limits).unwrap(), store.clone()), store, clock)
}

fn window(name: &str, count: u64) -> Limit {
    Limit::new(name, Quota::per_minute(count)).algorithm(Algorithm::FixedWindow)
}

fn charge(limiter: &Limiter, facts: &Facts<'_>) -> Decision {
    limiter.check(facts).wait().unwrap()
}

fn remaining(limiter: &Limiter, limit: &str, facts: &Facts<'_>) -> u64 {
    limiter.usage(facts).wait().unwrap().limit(limit).unwrap().outcome().remaining
}

/// Blocks on a future that does not wait.
fn now<F: IntoFuture>(future: F) -> F::Output {
    future::block_on(future.into_future())
}

/// The tolls lock several shards.
#[test]
fn layered_tolls_are_exact_and_never_deadlock() {
    explore(4_000, || {
        let limits = vec![
            window("all", 4),
            window("by-user", 3).by("user"),
            Limit::new("by-ip", Quota::per_minute(10)).by("ip").algorithm(Algorithm::SlidingLog),
            Limit::new("by-path", Quota::per_minute(10)).by("path").algorithm(Algorithm::TokenBucket),
        ];
        // Sixteen shards: the four keys of a toll are in any of them, in any order.
        let (limiter, store, _) = limiter(4_096, limits);
        let facts = |number: usize| {
            let users = ["alice", "bob", "alice"];
            let ips = ["10.0.0.1", "10.0.0.2", "10.0.0.2"];
            facts! { "user" => users[number], "ip" => ips[number], "path" => "/" }
        };
        let threads: Vec<_> = (0..3)
            .map(|number| {
                let limiter = limiter.clone();
                thread::spawn(move || {
                    (0..2).filter(|_| charge(&limiter, &facts(number)).allowed()).count() as u64
                })
            })
            .collect();
        let admitted: Vec<u64> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!(admitted.iter().sum::<u64>(), 4, "{admitted:?}");
        let (alice, bob) = (admitted[0] + admitted[2], admitted[1]);
        assert!(alice <= 3);
        assert_eq!(remaining(&limiter, "by-user", &facts(0)), 3 - alice);
        assert_eq!(remaining(&limiter, "by-user", &facts(1)), 3 - bob);
        assert_eq!(remaining(&limiter, "by-ip", &facts(0)), 10 - admitted[0]);
        assert_eq!(remaining(&limiter, "by-ip", &facts(1)), 10 - admitted[1] - admitted[2]);
        assert_eq!(remaining(&limiter, "by-path", &facts(0)), 6);
        let (users, ips) = (
            u64::from(alice > 0) + u64::from(bob > 0),
            u64::from(admitted[0] > 0) + u64::from(admitted[1] + admitted[2] > 0),
        );
        assert_eq!(store.keys() as u64, 2 + users + ips, "refused requests leave no keys behind");
    });
}

#[test]
fn inserts_during_reclaim_never_exceed_the_cap() {
    explore(4_000, || {
        let (limiter, store, clock) = limiter(2, vec![window("limit", 5).by("user")]);
        charge(&limiter, &facts! { "user" => "old" });
        charge(&limiter, &facts! { "user" => "older" });
        // Both states equal a fresh one now, so there is capacity for two of the six new keys.
        clock.advance(Span::from_secs(61));
        let threads: Vec<_> = (0..3)
            .map(|number| {
                let (limiter, store) = (limiter.clone(), store.clone());
                thread::spawn(move || {
                    for attempt in 0..2 {
                        let name = format!("user{number}-{attempt}");
                        charge(&limiter, &facts! { "user" => &name });
                        assert!(store.keys() <= 2, "{} keys", store.keys());
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(store.keys(), 2);
        store.sweep();
        assert_eq!(store.keys(), 2, "a sweep removes no live key");
        clock.advance(Span::from_secs(61));
        store.sweep();
        assert_eq!(store.keys(), 0);
    });
}

#[test]
fn inserts_into_two_shards_at_once_keep_the_cap() {
    explore(300, || {
        // The smallest store with more than one lock, two keys short of its cap.
        let (limiter, store, _) = limiter(512, vec![window("limit", 5).by("user")]);
        for number in 0..510 {
            charge(&limiter, &facts! { "user" => number });
        }
        assert_eq!(store.keys(), 510);
        let threads: Vec<_> = (0..3)
            .map(|number| {
                let (limiter, store) = (limiter.clone(), store.clone());
                thread::spawn(move || {
                    for attempt in 0..2 {
                        let name = format!("user{number}-{attempt}");
                        charge(&limiter, &facts! { "user" => &name });
                        assert!(store.keys() <= 512, "{} keys", store.keys());
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!((store.keys(), store.overflows()), (512, 4));
    });
}

#[test]
fn concurrent_inserts_of_a_key_create_one_entry() {
    explore(4_000, || {
        let (limiter, store, _) = limiter(512, vec![window("limit", 3).by("user")]);
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let limiter = limiter.clone();
                thread::spawn(move || {
                    (0..2).filter(|_| charge(&limiter, &facts! { "user" => "alice" }).allowed()).count()
                })
            })
            .collect();
        let admitted: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!((admitted, store.keys()), (3, 1));
    });
}

#[test]
fn concurrent_refunds_apply_once() {
    explore(4_000, || {
        let limits = vec![window("by-user", 5).by("user"), window("all", 5)];
        let (limiter, _, _) = limiter(4_096, limits);
        let alice = facts! { "user" => "alice" };
        let paid = limiter.check(&alice).cost(2).wait().unwrap().charge().unwrap();
        let done = Arc::new(AtomicU64::new(0));
        let mut threads: Vec<_> = (0..2)
            .map(|_| {
                let (limiter, paid, done) = (limiter.clone(), paid.clone(), Arc::clone(&done));
                thread::spawn(move || match now(limiter.refund(&paid)) {
                    Correction::Done => drop(done.fetch_add(1, SeqCst)),
                    other => assert_eq!(other, Correction::Repeated),
                })
            })
            .collect();
        let charging = limiter.clone();
        threads
            .push(thread::spawn(move || assert!(charge(&charging, &facts! { "user" => "alice" }).allowed())));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(done.load(SeqCst), 1);
        assert_eq!(remaining(&limiter, "by-user", &alice), 4);
        assert_eq!(remaining(&limiter, "all", &alice), 4);
    });
}

#[test]
fn last_slot_goes_to_one_thread_and_is_returned() {
    explore(4_000, || {
        let (limiter, _, _) = limiter(512, vec![Limit::new("slots", Quota::slots(1)).by("user")]);
        let holders = Arc::new(AtomicU64::new(0));
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (limiter, holders) = (limiter.clone(), Arc::clone(&holders));
                thread::spawn(move || {
                    let alice = facts! { "user" => "alice" };
                    let Some(guard) = limiter.acquire(&alice).wait().unwrap().slot else { return };
                    assert_eq!(holders.fetch_add(1, SeqCst), 0, "no other task holds it");
                    thread::yield_now();
                    holders.fetch_sub(1, SeqCst);
                    drop(guard);
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(remaining(&limiter, "slots", &facts! { "user" => "alice" }), 1);
    });
}

type Wait = Pin<Box<dyn Future<Output = Decision> + Send>>;

/// A waiter that was polled once, so that it is in the queue.
fn waiter(limiter: &Limiter) -> Wait {
    let limiter = limiter.clone();
    let mut wait: Wait = Box::pin(async move { limiter.until_allowed(&Facts::new()).await.unwrap() });
    assert!(wait.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    wait
}

/// Runs each waiter on its own task and advances the clock for them; returns the numbers of the waiters
/// in the order in which the store admitted them.
fn admission_order(waits: Vec<Wait>, clock: &ManualClock) -> Vec<usize> {
    let all = waits.len() as u64;
    let passed = Arc::new(Mutex::new(Vec::new()));
    let count = Arc::new(AtomicU64::new(0));
    let tasks: Vec<_> = waits
        .into_iter()
        .enumerate()
        .map(|(number, wait)| {
            let (passed, count) = (Arc::clone(&passed), Arc::clone(&count));
            future::spawn(async move {
                let decision = wait.await;
                assert!(decision.allowed());
                // All share one key, so the ids of their charges are in order of admission.
                let id = decision.charge().unwrap().id();
                passed.lock().unwrap().push((id, number));
                count.fetch_add(1, SeqCst);
            })
        })
        .collect();
    while count.load(SeqCst) < all {
        if let Some(next) = clock.next_wake() {
            clock.set(next);
        }
        thread::yield_now();
    }
    tasks.into_iter().for_each(|task| future::block_on(task).unwrap());
    let mut passed = passed.lock().unwrap().clone();
    passed.sort_unstable();
    passed.into_iter().map(|(_, number)| number).collect()
}

fn one_a_second() -> Vec<Limit> {
    vec![Limit::new("limit", Quota::per_second(1).burst(1))]
}

#[test]
fn waiters_are_admitted_in_order_and_none_is_lost() {
    explore(3_000, || {
        let (limiter, _, clock) = limiter(512, one_a_second());
        charge(&limiter, &Facts::new());
        let waits: Vec<Wait> = (0..3).map(|_| waiter(&limiter)).collect();
        assert_eq!(admission_order(waits, &clock), [0, 1, 2]);
        assert_eq!(clock.now(), START + Span::from_secs(3));
    });
}

#[test]
fn head_that_is_dropped_at_any_point_wakes_the_next() {
    explore(3_000, || {
        let (limiter, _, clock) = limiter(512, one_a_second());
        charge(&limiter, &Facts::new());
        let head = waiter(&limiter);
        let middle = waiter(&limiter);
        let waits: Vec<Wait> = (0..2).map(|_| waiter(&limiter)).collect();
        let dropping = [head, middle].map(|wait| thread::spawn(move || drop(wait)));
        assert_eq!(admission_order(waits, &clock), [0, 1]);
        dropping.into_iter().for_each(|thread| thread.join().unwrap());
        // The queue is gone: the next caller is decided at once.
        clock.advance(Span::from_secs(1));
        assert!(future::block_on(async { limiter.until_allowed(&Facts::new()).await }).unwrap().allowed());
    });
}

#[test]
fn simultaneous_waiters_are_all_admitted() {
    explore(3_000, || {
        let (limiter, _, clock) = limiter(512, one_a_second());
        let count = Arc::new(AtomicU64::new(0));
        let tasks: Vec<_> = (0..3)
            .map(|_| {
                let (limiter, count) = (limiter.clone(), Arc::clone(&count));
                future::spawn(async move {
                    assert!(limiter.until_allowed(&Facts::new()).await.unwrap().allowed());
                    count.fetch_add(1, SeqCst);
                })
            })
            .collect();
        while count.load(SeqCst) < 3 {
            if let Some(next) = clock.next_wake() {
                clock.set(next);
            }
            thread::yield_now();
        }
        tasks.into_iter().for_each(|task| future::block_on(task).unwrap());
        // A caller that is refused before the clock advances and sleeps after it may sleep one step too long.
        assert!(clock.now() >= START + Span::from_secs(2), "no unit is granted twice");
    });
}
