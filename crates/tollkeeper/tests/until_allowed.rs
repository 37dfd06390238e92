//! Waiting with `until_allowed`: waiters are admitted in FIFO order, and are charged only when admitted.
//!
//! These tests do not wait in real time. They poll many futures by hand, each only after it was woken, so a lost
//! wake-up is noticed. The clock is advanced to the time of the next sleeper.

mod support;

use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use support::*;
use tollkeeper::store::{Key, KeyCorrection, Reply, Store, StoreFuture, Toll};
use tollkeeper::{
    Algorithm, Allowance, Charge, Clock, Correction, Facts, InvalidRequest, Limit, Limiter, ManualClock,
    MemoryStore, Policy, Quota, Retry, Slot, Span, StoreChoice, Unavailable, Verdict, Waiting, facts,
};

/// Callers of `until_allowed`, numbered in order of arrival.
#[derive(Default)]
struct Crowd<'a> {
    callers: Vec<Caller<'a>>,
    /// Numbers of the admitted callers, in order of admission.
    admitted: Vec<usize>,
}

struct Caller<'a> {
    future: Option<<Waiting<'a> as IntoFuture>::IntoFuture>,
    woken: Arc<Woken>,
}

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, SeqCst);
    }
}

impl<'a> Crowd<'a> {
    /// Adds a caller and polls it for the first time; returns its number.
    fn arrive(&mut self, request: Waiting<'a>) -> usize {
        let number = self.arrive_unpolled(request);
        self.run();
        number
    }

    /// Adds `count` callers, one after the other.
    fn arrive_all(&mut self, count: usize, request: impl Fn() -> Waiting<'a>) {
        for _ in 0..count {
            self.arrive(request());
        }
    }

    /// Adds a caller without polling it.
    fn arrive_unpolled(&mut self, request: Waiting<'a>) -> usize {
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        self.callers.push(Caller { future: Some(request.into_future()), woken });
        self.callers.len() - 1
    }

    /// Drops the future of a caller.
    fn leave(&mut self, number: usize) {
        assert!(self.callers[number].future.take().is_some(), "caller {number} is not waiting");
    }

    /// Polls woken callers until none is left. The latest arrival is polled first, to show that the queue
    /// keeps the order, not the polling.
    fn run(&mut self) {
        while let Some(number) = self.callers.iter().rposition(Caller::is_awake) {
            let caller = &mut self.callers[number];
            caller.woken.0.store(false, SeqCst);
            let waker = Waker::from(Arc::clone(&caller.woken));
            let future = caller.future.as_mut().expect("the caller waits");
            if let Poll::Ready(result) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                assert!(result.expect("a valid request").allowed());
                caller.future = None;
                self.admitted.push(number);
            }
        }
    }

    /// Advances the clock to the next timer and polls; returns false if no timer is set.
    fn advance_to_next_timer(&mut self, clock: &ManualClock) -> bool {
        let Some(next) = clock.next_wake() else { return false };
        clock.set(next);
        self.run();
        true
    }

    fn waiting(&self) -> usize {
        self.callers.iter().filter(|caller| caller.future.is_some()).count()
    }
}

impl Caller<'_> {
    fn is_awake(&self) -> bool {
        self.future.is_some() && self.woken.0.load(SeqCst)
    }
}

/// One per second by user, with a burst of one.
fn one_a_second() -> Limit {
    Limit::new("second", Quota::per_second(1).burst(1)).by("user")
}

#[test]
fn fifty_waiters_are_admitted_in_fifo_order() {
    for algorithm in RATES {
        let limit = Limit::new("limit", Quota::per_second(1)).by("user").algorithm(algorithm);
        let (limiter, clock) = limiter([limit]);
        let alice = user("alice");
        let mut crowd = Crowd::default();
        for number in 0..50 {
            assert_eq!(crowd.arrive(limiter.until_allowed(&alice)), number);
        }
        assert_eq!(crowd.admitted, [0], "{algorithm}: one fits at once");
        while crowd.advance_to_next_timer(&clock) {}
        assert_eq!(crowd.admitted, (0..50).collect::<Vec<_>>(), "{algorithm}");
        let elapsed = clock.now().since(START);
        // A sliding window of one per second admits one every two seconds.
        let expected = if algorithm == Algorithm::SlidingWindow { 98 } else { 49 };
        assert_eq!(elapsed, secs(expected), "{algorithm}");
    }
}

#[test]
fn admissible_request_does_not_wait() {
    let (limiter, clock) = limiter([ten(Algorithm::FixedWindow)]);
    let alice = user("alice");
    let mut crowd = Crowd::default();
    crowd.arrive_all(10, || limiter.until_allowed(&alice));
    assert_eq!(crowd.admitted.len(), 10);
    assert_eq!(clock.next_wake(), None);
    assert_eq!(remaining(&limiter, "fixed-window", &alice), 0);
}

#[test]
fn waiter_is_charged_only_when_admitted() {
    let day = Limit::new("day", Quota::per_day(1_000)).algorithm(Algorithm::FixedWindow);
    let (limiter, clock) = limiter([day, one_a_second()]);
    let alice = user("alice");
    let mut crowd = Crowd::default();
    crowd.arrive_all(20, || limiter.until_allowed(&alice));
    loop {
        assert_eq!(remaining(&limiter, "day", &alice), 1_000 - crowd.admitted.len() as u64);
        if !crowd.advance_to_next_timer(&clock) {
            break;
        }
    }
    assert_eq!(crowd.admitted.len(), 20);
}

#[test]
fn dropped_waiter_blocks_no_other() {
    // The head of the queue, one in the middle, the last, and several of them.
    for leaving in [&[1][..], &[4], &[7], &[1, 2, 3], &[1, 4, 7], &[6, 7], &[2, 1]] {
        let (limiter, clock) = limiter([one_a_second()]);
        let alice = user("alice");
        let mut crowd = Crowd::default();
        crowd.arrive_all(8, || limiter.until_allowed(&alice));
        for number in leaving {
            crowd.leave(*number);
            crowd.run();
        }
        while crowd.advance_to_next_timer(&clock) {}
        let expected: Vec<usize> = (0..8).filter(|number| !leaving.contains(number)).collect();
        assert_eq!(crowd.admitted, expected, "without {leaving:?}");
        assert_eq!(
            clock.now(),
            START + secs(expected.len() as u64 - 1),
            "no unit is wasted without {leaving:?}"
        );
        assert_eq!(remaining(&limiter, "second", &alice), 0);
    }
}

#[test]
fn waiter_dropped_after_its_wakeup_wakes_the_next() {
    let (limiter, clock) = limiter([one_a_second()]);
    let alice = user("alice");
    let mut crowd = Crowd::default();
    crowd.arrive_all(5, || limiter.until_allowed(&alice));
    // The clock wakes the head, which is dropped before it is polled.
    clock.advance(secs(1));
    assert!(crowd.callers[1].is_awake());
    crowd.leave(1);
    assert!(crowd.callers[2].is_awake(), "the next caller is woken");
    // The next one, woken by that drop, is dropped before it is polled, too.
    crowd.leave(2);
    assert!(crowd.callers[3].is_awake());
    crowd.run();
    assert_eq!(crowd.admitted, [0, 3]);
    while crowd.advance_to_next_timer(&clock) {}
    assert_eq!(crowd.admitted, [0, 3, 4]);
}

#[test]
fn queue_is_removed_when_all_waiters_are_dropped() {
    let (limiter, clock) = limiter([one_a_second()]);
    let alice = user("alice");
    let mut crowd = Crowd::default();
    crowd.arrive_all(5, || limiter.until_allowed(&alice));
    (1..5).for_each(|number| crowd.leave(number));
    clock.advance(secs(1));
    let next = crowd.arrive(limiter.until_allowed(&alice));
    assert_eq!(crowd.admitted, [0, next], "it passes at once, because the queue is empty");
    assert_eq!(crowd.waiting(), 0);
}

#[test]
fn queue_is_removed_when_all_waiters_are_admitted() {
    let (limiter, clock) = limiter([one_a_second()]);
    let alice = user("alice");
    let mut crowd = Crowd::default();
    crowd.arrive_all(5, || limiter.until_allowed(&alice));
    while crowd.advance_to_next_timer(&clock) {}
    clock.advance(secs(1));
    let next = crowd.arrive(limiter.until_allowed(&alice));
    assert_eq!(crowd.admitted.last(), Some(&next));
}

#[test]
fn impossible_cost_returns_at_once_despite_waiters() {
    let closed = Limit::new("closed", Allowance::Nothing).when("route", "/closed");
    let (limiter, clock) = limiter([ten(Algorithm::TokenBucket), closed]);
    let never = |facts: &Facts<'_>, cost| {
        let decision = now(limiter.until_allowed(facts).cost(cost).into_future()).unwrap();
        assert_eq!(decision.verdict(), Verdict::Deny { retry: Retry::Never });
        assert!(decision.charge().is_none());
    };
    let alice = user("alice");
    let closed_route = facts! { "user" => "alice", "route" => "/closed" };
    never(&alice, 11);
    never(&closed_route, 1);
    let mut crowd = Crowd::default();
    crowd.arrive(limiter.until_allowed(&alice).cost(10));
    crowd.arrive(limiter.until_allowed(&alice).cost(10));
    assert_eq!(crowd.waiting(), 1);
    never(&alice, 11);
    never(&closed_route, 1);
    while crowd.advance_to_next_timer(&clock) {}
    assert_eq!(crowd.admitted, [0, 1]);
}

#[test]
fn invalid_input_returns_at_once_despite_waiters() {
    let (limiter, _) = limiter([one_a_second()]);
    let alice = user("alice");
    let mut crowd = Crowd::default();
    crowd.arrive_all(2, || limiter.until_allowed(&alice));
    let error = now(limiter.until_allowed(&alice).cost(0).into_future()).expect_err("bad input");
    assert_eq!(error, InvalidRequest::ZeroCost);
    assert_eq!(crowd.waiting(), 1);
}

#[test]
fn small_request_does_not_overtake_a_large_one() {
    let (limiter, clock) = limiter([ten(Algorithm::TokenBucket)]);
    let alice = user("alice");
    charge(&limiter, &alice, 5);
    let mut crowd = Crowd::default();
    let large = crowd.arrive(limiter.until_allowed(&alice).cost(10));
    // It would fit, but another caller is already waiting for its key.
    let small = crowd.arrive(limiter.until_allowed(&alice));
    assert_eq!(crowd.waiting(), 2);
    crowd.advance_to_next_timer(&clock);
    assert_eq!((crowd.admitted.clone(), clock.now()), (vec![large], START + secs(30)));
    crowd.advance_to_next_timer(&clock);
    assert_eq!((crowd.admitted, clock.now()), (vec![large, small], START + secs(36)));
}

#[test]
fn costs_above_one_wait_for_all_their_units() {
    let (limiter, clock) = limiter([ten(Algorithm::TokenBucket)]);
    let alice = user("alice");
    charge(&limiter, &alice, 10);
    let mut crowd = Crowd::default();
    let costs = [3, 1, 10, 2];
    for cost in costs {
        crowd.arrive(limiter.until_allowed(&alice).cost(cost));
    }
    let mut passed = Vec::new();
    while crowd.advance_to_next_timer(&clock) {
        passed.push(clock.now().since(START));
    }
    assert_eq!(crowd.admitted, [0, 1, 2, 3]);
    assert_eq!(passed, [18, 24, 84, 96].map(secs));
}

#[test]
fn a_check_does_not_queue() {
    let (limiter, clock) = limiter([ten(Algorithm::TokenBucket)]);
    let alice = user("alice");
    charge(&limiter, &alice, 5);
    let mut crowd = Crowd::default();
    crowd.arrive(limiter.until_allowed(&alice).cost(10));
    assert!(charge(&limiter, &alice, 5).allowed(), "a check takes what is left");
    // So the head is refused again when it retries, and waits for the rest.
    crowd.advance_to_next_timer(&clock);
    assert_eq!(crowd.waiting(), 1);
    crowd.advance_to_next_timer(&clock);
    assert_eq!((crowd.admitted, clock.now()), (vec![0], START + secs(60)));
}

#[test]
fn queues_of_different_keys_are_independent() {
    let (limiter, clock) = limiter([one_a_second()]);
    let (alice, bob) = (user("alice"), user("bob"));
    let mut crowd = Crowd::default();
    for _ in 0..3 {
        crowd.arrive(limiter.until_allowed(&alice));
        crowd.arrive(limiter.until_allowed(&bob));
    }
    assert_eq!(crowd.admitted, [0, 1]);
    while crowd.advance_to_next_timer(&clock) {}
    assert_eq!(clock.now(), START + secs(2));
    let of =
        |parity| crowd.admitted.iter().filter(|number| *number % 2 == parity).copied().collect::<Vec<_>>();
    assert_eq!((of(0), of(1)), (vec![0, 2, 4], vec![1, 3, 5]));
}

#[test]
fn head_refused_by_another_key_joins_that_queue_last() {
    let by_ip = Limit::new("ip", Quota::per(1, Duration::from_secs(10)).burst(1)).by("ip");
    let (limiter, clock) = limiter([one_a_second(), by_ip]);
    let of = |user: &'static str, ip: &'static str| facts! { "user" => user, "ip" => ip };
    let facts = [of("alice", "10.0.0.1"), of("carol", "10.0.0.1"), of("alice", "10.0.0.3")];
    charge(&limiter, &of("alice", "10.0.0.2"), 1);
    let mut crowd = Crowd::default();
    let moves = crowd.arrive(limiter.until_allowed(&facts[0])); // waits for the key of alice
    charge(&limiter, &of("bob", "10.0.0.1"), 1);
    let first = crowd.arrive(limiter.until_allowed(&facts[1])); // waits for the key of the address
    crowd.advance_to_next_timer(&clock);
    assert_eq!(
        (clock.now(), crowd.waiting()),
        (START + secs(1), 2),
        "the limit of alice allows, that of her address does not"
    );
    // The queue of her key is free again: a caller is in one queue at a time.
    let other = crowd.arrive(limiter.until_allowed(&facts[2]));
    assert_eq!(crowd.admitted, [other]);
    while crowd.advance_to_next_timer(&clock) {}
    assert_eq!(crowd.admitted, [other, first, moves]);
    assert_eq!(clock.now(), START + secs(20));
}

#[test]
fn caller_joins_the_queue_of_any_of_its_keys() {
    let by_ip = Limit::new("ip", Quota::per_second(100).burst(100)).by("ip");
    let (limiter, clock) = limiter([by_ip, one_a_second()]);
    let first = facts! { "user" => "alice", "ip" => "10.0.0.1" };
    let second = facts! { "user" => "alice", "ip" => "10.0.0.2" };
    let mut crowd = Crowd::default();
    charge(&limiter, &first, 1);
    crowd.arrive(limiter.until_allowed(&first));
    // It would be admitted now, but another caller is before it in the queue of its second key.
    clock.set(START + secs(1));
    let late = crowd.arrive_unpolled(limiter.until_allowed(&second));
    crowd.run();
    assert_eq!(crowd.admitted, [0]);
    while crowd.advance_to_next_timer(&clock) {}
    assert_eq!(crowd.admitted, [0, late]);
}

/// A memory store that counts its decisions.
#[derive(Debug)]
struct Counting(MemoryStore, AtomicUsize);

impl Store for Counting {
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, Reply> {
        self.1.fetch_add(1, SeqCst);
        StoreFuture::Ready(self.0.decide(toll))
    }

    fn correct<'a>(
        &'a self,
        charge: &'a Charge,
        corrections: &'a [KeyCorrection],
    ) -> StoreFuture<'a, Correction> {
        Store::correct(&self.0, charge, corrections)
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>> {
        Store::release(&self.0, slot)
    }

    fn renew<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>> {
        Store::renew(&self.0, slot)
    }

    fn forget<'a>(&'a self, key: Key<'a>) -> StoreFuture<'a, Result<bool, Unavailable>> {
        Store::forget(&self.0, key)
    }

    fn seal_charge(&self, charge: &Charge) -> String {
        self.0.seal_charge(charge)
    }

    fn open_charge<'a>(&'a self, text: &'a str) -> StoreFuture<'a, Result<Option<Charge>, Unavailable>> {
        Store::open_charge(&self.0, text)
    }

    fn seal_slot(&self, slot: &Slot) -> String {
        self.0.seal_slot(slot)
    }

    fn open_slot<'a>(&'a self, text: &'a str) -> StoreFuture<'a, Result<Option<Slot>, Unavailable>> {
        Store::open_slot(&self.0, text)
    }
}

#[test]
fn only_the_head_of_a_queue_calls_the_store() {
    let clock = clock();
    let counting = Arc::new(Counting(store(100, &clock), AtomicUsize::new(0)));
    let backend = StoreChoice::Other(counting.clone(), Clock::manual(&clock));
    let limiter = Limiter::builder().limit(one_a_second()).store(backend).build().unwrap();
    let alice = user("alice");
    let mut crowd = Crowd::default();
    crowd.arrive_all(50, || limiter.until_allowed(&alice));
    assert_eq!(counting.1.load(SeqCst), 2, "the admitted caller, and the head");
    crowd.advance_to_next_timer(&clock);
    assert_eq!(counting.1.load(SeqCst), 4, "the head again, and the next head");
    while crowd.advance_to_next_timer(&clock) {}
    assert_eq!((crowd.admitted.len(), counting.1.load(SeqCst)), (50, 99));
}

#[test]
fn waiter_passes_when_its_limit_is_removed() {
    let (limiter, clock) = limiter([one_a_second()]);
    let alice = user("alice");
    let mut crowd = Crowd::default();
    crowd.arrive_all(5, || limiter.until_allowed(&alice));
    limiter.replace(Vec::new()).unwrap();
    crowd.advance_to_next_timer(&clock);
    assert_eq!(crowd.admitted, [0, 1, 2, 3, 4]);
    assert_eq!(clock.now(), START + secs(1));
}

#[test]
fn waiter_follows_a_changed_period() {
    let (limiter, clock) = limiter([one_a_second()]);
    let alice = user("alice");
    let mut crowd = Crowd::default();
    crowd.arrive_all(5, || limiter.until_allowed(&alice));
    limiter.replace(vec![Limit::new("second", Quota::per_hour(1).burst(1)).by("user")]).unwrap();
    for admitted in 2..=5 {
        crowd.advance_to_next_timer(&clock);
        assert_eq!(crowd.admitted.len(), admitted);
        let since = clock.now().since(START);
        assert_eq!(since.as_micros(), 1_000_000 + (admitted as u64 - 2) * 3_600_000_000, "one an hour");
    }
    assert_eq!(crowd.admitted, [0, 1, 2, 3, 4]);
}

#[test]
fn raised_rate_shortens_the_wait() {
    let (limiter, clock) = limiter([one_a_second()]);
    let alice = user("alice");
    let mut crowd = Crowd::default();
    crowd.arrive_all(5, || limiter.until_allowed(&alice));
    limiter.replace(vec![Limit::new("second", Quota::per_second(100).burst(100)).by("user")]).unwrap();
    crowd.advance_to_next_timer(&clock);
    assert_eq!(crowd.admitted, [0, 1, 2, 3, 4], "the head wakes at its old retry time, and all pass");
    assert_eq!(clock.now(), START + secs(1));
}

#[test]
fn two_waits_of_one_task_are_both_woken() {
    let clock = clock();
    let limits =
        [one_a_second(), Limit::new("ten", Quota::per(1, Duration::from_secs(10)).burst(1)).by("ten")];
    let limiter = on(&store(100, &clock), limits);
    let (short, long) = (user("alice"), facts! { "ten" => "x" });
    charge(&limiter, &short, 1);
    charge(&limiter, &long, 1);
    let woken = Arc::new(Woken(AtomicBool::new(false)));
    let waker = Waker::from(Arc::clone(&woken));
    let mut context = Context::from_waker(&waker);
    let mut short = limiter.until_allowed(&short).into_future();
    let mut long = limiter.until_allowed(&long).into_future();
    assert!(short.as_mut().poll(&mut context).is_pending());
    assert!(long.as_mut().poll(&mut context).is_pending());
    clock.advance(secs(1));
    assert!(woken.0.load(SeqCst), "the shorter wait is over");
    assert!(short.as_mut().poll(&mut context).is_ready());
}

#[test]
fn leaky_bucket_delay_is_left_to_the_caller() {
    let queue = Limit::new("queue", Quota::per_second(1).burst(2)).algorithm(Algorithm::LeakyBucket);
    let (limiter, clock) = limiter([queue]);
    let no_facts = Facts::new();
    let delay = || now(limiter.until_allowed(&no_facts).into_future()).unwrap().delay();
    assert_eq!((delay(), delay()), (Span::ZERO, secs(1)));
    let mut crowd = Crowd::default();
    crowd.arrive(limiter.until_allowed(&no_facts));
    crowd.advance_to_next_timer(&clock);
    assert_eq!((crowd.admitted.len(), clock.now()), (1, START + secs(1)));
}

#[tokio::test]
async fn twenty_tasks_on_the_system_clock_pass_in_fifo_order() {
    let limit = Limit::new("limit", Quota::per(1, Duration::from_millis(2)).burst(1));
    let policy = Policy::new(vec![limit]).unwrap();
    let limiter = Limiter::embedded(policy, MemoryStore::default());
    let passed = Arc::new(std::sync::Mutex::new(Vec::new()));
    let tasks: Vec<_> = (0..20)
        .map(|number| {
            let (limiter, passed) = (limiter.clone(), Arc::clone(&passed));
            tokio::spawn(async move {
                assert!(limiter.until_allowed(&Facts::new()).await.unwrap().allowed());
                passed.lock().unwrap().push(number);
            })
        })
        .collect();
    for task in tasks {
        // Guards against a hang after a lost wake-up; how long it takes is not asserted.
        tokio::time::timeout(Duration::from_secs(60), task).await.expect("every task is admitted").unwrap();
    }
    assert_eq!(*passed.lock().unwrap(), (0..20).collect::<Vec<_>>());
}
