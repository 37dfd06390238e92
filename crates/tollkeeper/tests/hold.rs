//! Requests that a leaky bucket delays: each continues at its departure time, in FIFO order.

use std::sync::{Arc, Mutex};

use tokio::task::JoinHandle;
use tollkeeper::{
    Algorithm, Capacity, Clock, Limit, Limiter, ManualClock, MemoryStore, Policy, Quota, Span, StatusSet,
    Time, facts,
};

/// Ten per second by user, with a queue of twenty.
fn limiter() -> (Limiter, ManualClock) {
    let clock = ManualClock::new(Time::from_micros(1_760_000_000_000_000));
    let store = MemoryStore::new(Capacity::default(), Clock::manual(&clock));
    let queue = Limit::new("queue", Quota::per_second(10).burst(20)).by("user");
    let policy = Policy::new(vec![queue.algorithm(Algorithm::LeakyBucket)]).expect("valid");
    (Limiter::embedded(policy, store), clock)
}

/// Admits a request and spawns its delay; its number is added to `continued` when the delay ends.
async fn spawn_delayed(
    limiter: &Limiter,
    user: &'static str,
    number: u32,
    continued: &Arc<Mutex<Vec<u32>>>,
) -> JoinHandle<()> {
    let decision = limiter.check(&facts! { "user" => user }).await.expect("valid");
    assert!(decision.allowed());
    let (limiter, continued) = (limiter.clone(), Arc::clone(continued));
    tokio::spawn(async move {
        limiter.hold(&decision).await;
        continued.lock().expect("not poisoned").push(number);
    })
}

/// Yields until every task has run as far as it can.
async fn run_tasks() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn delayed_requests_continue_on_time_and_in_fifo_order() {
    let (limiter, clock) = limiter();
    let continued = Arc::default();
    for number in 0..20 {
        spawn_delayed(&limiter, "alice", number, &continued).await;
    }
    run_tasks().await;
    assert_eq!(*continued.lock().unwrap(), [0], "the first continues at once");
    clock.advance(Span::from_micros(99_999));
    run_tasks().await;
    assert_eq!(continued.lock().unwrap().len(), 1);
    clock.advance(Span::from_micros(1));
    run_tasks().await;
    assert_eq!(*continued.lock().unwrap(), [0, 1]);
    // All timers fire at once, and the clock wakes the tasks in any order.
    clock.advance(Span::from_secs(2));
    run_tasks().await;
    assert_eq!(*continued.lock().unwrap(), (0..20).collect::<Vec<_>>());
}

/// Requests of other keys do not wait either.
#[tokio::test]
async fn dropped_delay_blocks_no_other_request() {
    let (limiter, clock) = limiter();
    let continued = Arc::default();
    let mut tasks = Vec::new();
    for number in 0..6 {
        tasks.push(spawn_delayed(&limiter, "alice", number, &continued).await);
    }
    spawn_delayed(&limiter, "bob", 100, &continued).await;
    run_tasks().await;
    assert_eq!(*continued.lock().unwrap(), [0, 100]);
    tasks[2].abort();
    tasks[4].abort();
    run_tasks().await;
    clock.advance(Span::from_millis(300));
    run_tasks().await;
    assert_eq!(*continued.lock().unwrap(), [0, 100, 1, 3]);
    clock.advance(Span::from_millis(200));
    run_tasks().await;
    assert_eq!(*continued.lock().unwrap(), [0, 100, 1, 3, 5]);
}

#[tokio::test]
async fn refund_of_chosen_limits_keeps_the_other_charges() {
    let login = Limit::new("login", Quota::per_hour(5)).by("user").deduct_when(StatusSet::of([401]));
    let all = Limit::new("all", Quota::per_hour(100)).by("user");
    let limiter = Limiter::builder().limit(login).limit(all).build().unwrap();
    let facts = facts! { "user" => "alice" };
    let decision = limiter.check(&facts).await.unwrap();
    let charge = decision.charge().unwrap();
    limiter.refund_of(&charge, |name| name == "login").await;
    let usage = limiter.usage(&facts).await.unwrap();
    let remaining: Vec<u64> = usage.limits().map(|limit| limit.outcome().remaining).collect();
    assert_eq!(remaining, [5, 99]);
}

/// A request is decided by the policy for which its facts were read.
#[tokio::test]
async fn request_can_be_decided_by_an_older_policy() {
    let limiter = Limiter::builder().limit(Limit::new("old", Quota::per_hour(1))).build().unwrap();
    let old = limiter.policy();
    limiter.replace(vec![Limit::new("new", Quota::per_hour(1)).by("user")]).unwrap();
    let decision = limiter.acquire(&facts! {}).under(&old).cost(1).await.unwrap().decision;
    assert_eq!(decision.binding().unwrap().name(), "old");
    assert!(limiter.check(&facts! {}).await.unwrap().binding().is_none());
}
