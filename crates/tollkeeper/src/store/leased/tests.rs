//! Rules of the denial bound, on a store whose replies are delayed, lost or degraded by hand.

use std::collections::VecDeque;
use std::sync::atomic::AtomicUsize;
use std::task::{Context, Poll, Waker};

use tokio::sync::oneshot;
use tollkeeper_core::{
    Algorithm, Costs, Decision, Facts, Limit, Mode, OnStoreFailure, Outcome, Policy, Quota, Retry, Span,
    Verb, facts,
};

use super::*;
use crate::sync::{Mutex, lock};
use crate::{Capacity, ManualClock, MemoryStore};

const START: Time = Time::from_micros(1_760_000_000_000_000);

/// A store with a clock of its own that counts its calls.
#[derive(Debug)]
struct FakeStore {
    memory: MemoryStore,
    calls: AtomicUsize,
    mood: Mutex<Mood>,
    /// Replies that wait to be delivered.
    held: Mutex<VecDeque<(oneshot::Sender<Reply>, Reply)>>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mood {
    /// Replies at once.
    Prompt,
    /// Decides at once, and replies when told to.
    Holding,
    /// Does not answer: the failure policy `allow` decides.
    Away,
}

impl Store for FakeStore {
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, Reply> {
        self.calls.fetch_add(1, SeqCst);
        match *lock(&self.mood) {
            Mood::Prompt => StoreFuture::Ready(self.memory.decide(toll)),
            Mood::Holding => {
                let (sender, receiver) = oneshot::channel();
                lock(&self.held).push_back((sender, self.memory.decide(toll)));
                StoreFuture::Later(Box::pin(async { receiver.await.expect("it is delivered") }))
            }
            Mood::Away => {
                let mut reply = Reply::new(self.memory.clock().now(), 0);
                let outcome = Outcome { allowed: true, ..Outcome::default() };
                toll.dues().for_each(|_| {
                    reply.push(LimitReply::Degraded { by: OnStoreFailure::Allow, outcome });
                });
                StoreFuture::Ready(reply)
            }
        }
    }

    fn correct<'a>(
        &'a self,
        charge: &'a Charge,
        corrections: &'a [KeyCorrection],
    ) -> StoreFuture<'a, Correction> {
        StoreFuture::Ready(self.memory.correct(charge, corrections))
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>> {
        StoreFuture::Ready(Ok(self.memory.release(slot)))
    }

    fn renew<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>> {
        StoreFuture::Ready(Ok(self.memory.renew(slot)))
    }

    fn forget<'a>(&'a self, key: Key<'a>) -> StoreFuture<'a, Result<bool, Unavailable>> {
        StoreFuture::Ready(Ok(self.memory.forget(key)))
    }

    fn seal_charge(&self, charge: &Charge) -> String {
        self.memory.seal_charge(charge)
    }

    fn open_charge<'a>(&'a self, text: &'a str) -> StoreFuture<'a, Result<Option<Charge>, Unavailable>> {
        StoreFuture::Ready(Ok(self.memory.open_charge(text)))
    }

    fn seal_slot(&self, slot: &Slot) -> String {
        self.memory.seal_slot(slot)
    }

    fn open_slot<'a>(&'a self, text: &'a str) -> StoreFuture<'a, Result<Option<Slot>, Unavailable>> {
        StoreFuture::Ready(Ok(self.memory.open_slot(text)))
    }
}

/// A node with a store of its own.
struct World {
    leased: Leased<FakeStore>,
    /// The clocks of the node and of the store.
    node: ManualClock,
    store: ManualClock,
    policy: Arc<Policy>,
}

/// A decision that may have to wait for the store.
struct Waiting<'w> {
    toll: Toll,
    future: StoreFuture<'w, Reply>,
}

impl World {
    fn new(limits: Vec<Limit>) -> World {
        let (node, store) = (ManualClock::new(START), ManualClock::new(START));
        let fake = FakeStore {
            memory: MemoryStore::new(Capacity::default(), Clock::manual(&store)),
            calls: AtomicUsize::new(0),
            mood: Mutex::new(Mood::Prompt),
            held: Mutex::default(),
        };
        let leased = Leased::new(fake, LeasedSettings::default(), Clock::manual(&node));
        World { leased, node, store, policy: Arc::new(Policy::new(limits).unwrap()) }
    }

    /// A limit without a key.
    fn of(algorithm: Algorithm, count: u64, burst: Option<u64>) -> World {
        World::new(vec![limit(algorithm, count, burst)])
    }

    fn advance(&self, micros: u64) {
        self.node.advance(Span::from_micros(micros));
        self.store.advance(Span::from_micros(micros));
    }

    fn mood(&self, mood: Mood) {
        *lock(&self.leased.inner().mood) = mood;
    }

    fn calls(&self) -> usize {
        self.leased.inner().calls.load(SeqCst)
    }

    fn start(&self, verb: Verb, facts: &Facts<'_>, cost: u64) -> Waiting<'_> {
        let toll = self.policy.toll(verb, facts, cost).unwrap();
        let mut future = self.leased.decide(&toll);
        // The first poll of a future that is not ready sends nothing: it was sent above.
        if let StoreFuture::Later(later) = &mut future {
            assert!(later.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        Waiting { toll, future }
    }

    /// Delivers the oldest reply that is held.
    fn deliver(&self) {
        let (sender, reply) = lock(&self.leased.inner().held).pop_front().expect("a reply is held");
        sender.send(reply).expect("its caller waits");
    }

    fn decide(&self, verb: Verb, facts: &Facts<'_>, cost: u64) -> Decision {
        self.start(verb, facts, cost).end()
    }

    fn check(&self, cost: u64) -> Decision {
        self.decide(Verb::Check, &facts! {}, cost)
    }

    /// Whether a check passes, and how many calls to the store it makes.
    fn try_check(&self, cost: u64) -> (bool, usize) {
        let before = self.calls();
        let allowed = self.check(cost).allowed();
        (allowed, self.calls() - before)
    }
}

impl Waiting<'_> {
    fn end(mut self) -> Decision {
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(reply) = std::pin::Pin::new(&mut self.future).poll(&mut context) else {
            panic!("the store has not replied");
        };
        Decision::new(self.toll, reply)
    }
}

fn limit(algorithm: Algorithm, count: u64, burst: Option<u64>) -> Limit {
    let rate = Quota::per_second(count);
    let rate = burst.into_iter().fold(rate, Quota::burst);
    Limit::new("limit", rate).algorithm(algorithm)
}

fn bucket(burst: u64) -> World {
    World::new(vec![Limit::new("limit", Quota::per_hour(1).burst(burst))])
}

#[test]
fn flood_on_an_exhausted_key_asks_ten_times_a_second() {
    let world = bucket(1);
    assert_eq!((world.try_check(1), world.try_check(1)), ((true, 1), (false, 0)));
    for _ in 0..10_000 {
        world.advance(100);
        assert!(!world.check(1).allowed());
    }
    assert_eq!(world.calls(), 11);
}

#[test]
fn every_algorithm_but_concurrency_is_bounded() {
    for algorithm in Algorithm::ALL {
        let world = match algorithm {
            Algorithm::Concurrency => World::new(vec![Limit::new("limit", Quota::slots(1))]),
            _ => World::of(algorithm, 1, None),
        };
        assert!(world.decide(Verb::Acquire, &facts! {}, 1).allowed(), "{algorithm}");
        let before = world.calls();
        assert!(!world.decide(Verb::Acquire, &facts! {}, 1).allowed(), "{algorithm}");
        let asked = usize::from(algorithm == Algorithm::Concurrency);
        assert_eq!(world.calls() - before, asked, "{algorithm}");
    }
}

/// What is known is a state, not that some cost was refused.
#[test]
fn bound_is_exact_for_every_cost() {
    for algorithm in [Algorithm::TokenBucket, Algorithm::FixedWindow, Algorithm::SlidingWindow] {
        let world = World::of(algorithm, 10, None);
        assert_eq!(world.try_check(8), (true, 1), "{algorithm}");
        assert_eq!(world.try_check(10), (false, 0), "{algorithm}");
        assert_eq!(world.try_check(3), (false, 0), "{algorithm}");
        assert_eq!(world.try_check(2), (true, 1), "{algorithm}");
    }
}

#[test]
fn log_is_bounded_by_what_its_reply_shows() {
    let world = World::of(Algorithm::SlidingLog, 10, None);
    assert_eq!(world.try_check(8), (true, 1));
    assert_eq!((world.try_check(3), world.try_check(2)), ((false, 0), (true, 1)));
    // The two newest leave the log after the eight.
    assert_eq!((world.try_check(1), world.try_check(9)), ((false, 0), (false, 0)));
    world.advance(99_000);
    assert_eq!(world.check(1).retry_after(), Some(Span::from_millis(901)));
}

/// The store reads its clock after the toll was sent, and the reply takes 30 ms. The bound allows for all of that time,
/// and for a clock that runs a thousandth faster.
#[test]
fn bound_lifts_at_the_latest_time_of_the_store() {
    let world = World::of(Algorithm::TokenBucket, 20, Some(1));
    world.mood(Mood::Holding);
    let first = world.start(Verb::Check, &facts! {}, 1);
    world.advance(30_000);
    world.deliver();
    assert!(first.end().allowed());
    // The next unit is free 50 ms after the charge.
    world.advance(19_900);
    assert_eq!(world.try_check(1), (false, 0));
    world.advance(51);
    assert!(lock(&world.leased.inner().held).is_empty());
    let second = world.start(Verb::Check, &facts! {}, 1);
    world.deliver();
    assert!(!second.end().allowed(), "the store is asked, and its clock shows 49,951 µs");
}

/// A retry counts from the earliest time of the store's clock, so it is not too short.
#[test]
fn retry_of_a_bound_is_enough() {
    let world = World::of(Algorithm::TokenBucket, 20, Some(1));
    world.mood(Mood::Holding);
    let first = world.start(Verb::Check, &facts! {}, 1);
    world.node.advance(Span::from_millis(3));
    world.store.advance(Span::from_millis(1));
    world.deliver();
    assert!(first.end().allowed());
    world.advance(10_000);
    let refused = world.check(1);
    let limit = refused.limit("limit").unwrap();
    assert_eq!(limit.approximation(), Some(Approximation::DenialBound));
    assert_eq!(refused.retry_after(), Some(Span::from_millis(40)));
    let outcome = limit.outcome();
    assert_eq!((outcome.limit, outcome.remaining, outcome.allowed), (1, 0, false));
    assert_eq!(outcome.reset_after, Some(Span::from_millis(40)));
    assert!(refused.charge().is_none());
    world.mood(Mood::Prompt);
    world.advance(40_000);
    assert_eq!(world.try_check(1), (true, 1));
}

#[test]
fn tolls_in_flight_count_as_taken() {
    let world = bucket(2);
    assert!(world.check(1).allowed());
    world.mood(Mood::Holding);
    let last = world.start(Verb::Check, &facts! {}, 1);
    assert_eq!(world.try_check(1), (false, 0));
    world.deliver();
    assert!(last.end().allowed());
    assert_eq!(world.try_check(1), (false, 0));
}

/// The state that the second reply shows includes the first toll, whose reply is still on its way.
#[test]
fn toll_in_flight_is_not_counted_twice() {
    let world = bucket(3);
    world.mood(Mood::Holding);
    let first = world.start(Verb::Check, &facts! {}, 1);
    let second = world.start(Verb::Check, &facts! {}, 1);
    lock(&world.leased.inner().held).rotate_left(1);
    world.deliver();
    assert!(second.end().allowed());
    let third = world.start(Verb::Check, &facts! {}, 1);
    assert_eq!(world.calls(), 3);
    world.deliver();
    world.deliver();
    assert!(first.end().allowed() && third.end().allowed());
}

#[test]
fn toll_whose_caller_is_gone_no_longer_counts() {
    let world = bucket(2);
    assert!(world.check(1).allowed());
    world.mood(Mood::Holding);
    drop(world.start(Verb::Check, &facts! {}, 1));
    world.mood(Mood::Prompt);
    assert_eq!(world.try_check(1), (false, 1), "the store counted it");
}

#[test]
fn refund_settle_and_forget_drop_the_bound() {
    let world = bucket(1);
    let policy = &world.policy;
    let refund = |charge: &Charge| {
        let corrections = charge.corrections(policy, &charge.refund(Costs::All).unwrap());
        assert!(matches!(world.leased.correct(charge, &corrections), StoreFuture::Ready(Correction::Done)));
    };
    let charge = world.check(1).charge().unwrap();
    assert_eq!(world.try_check(1), (false, 0));
    refund(&charge);
    let again = world.check(1);
    assert!(again.allowed());
    assert_eq!(world.try_check(1), (false, 0));
    // A receipt that left the process and came back.
    let text = world.leased.seal_charge(&again.charge().unwrap());
    let StoreFuture::Ready(Ok(Some(charge))) = world.leased.open_charge(&text) else { panic!("sealed here") };
    refund(&charge);
    assert_eq!((world.try_check(1), world.try_check(1)), ((true, 1), (false, 0)));
    let toll = policy.toll(Verb::Check, &facts! {}, 1).unwrap();
    assert!(matches!(world.leased.forget(toll.get(0).key), StoreFuture::Ready(Ok(true))));
    assert_eq!(world.try_check(1), (true, 1));
}

/// A receipt does not hold all of a long key.
#[test]
fn refund_under_a_long_key_drops_every_bound() {
    let world = World::new(vec![Limit::new("limit", Quota::per_hour(1).burst(1)).by("user")]);
    let (long, short) = ("x".repeat(200), "bob");
    let charge = world.decide(Verb::Check, &facts! { "user" => &long }, 1).charge().unwrap();
    let text = world.leased.seal_charge(&charge);
    let StoreFuture::Ready(Ok(Some(charge))) = world.leased.open_charge(&text) else { panic!("sealed here") };
    assert!(world.decide(Verb::Check, &facts! { "user" => short }, 1).allowed());
    assert!(!world.decide(Verb::Check, &facts! { "user" => short }, 1).allowed());
    assert_eq!(world.calls(), 2);
    world.advance(1);
    let corrections = charge.corrections(&world.policy, &charge.refund(Costs::All).unwrap());
    drop(world.leased.correct(&charge, &corrections));
    assert!(world.decide(Verb::Check, &facts! { "user" => &long }, 1).allowed());
    assert!(!world.decide(Verb::Check, &facts! { "user" => short }, 1).allowed());
    assert_eq!(world.calls(), 4);
}

/// The toll saw the state before the refund.
#[test]
fn reply_from_before_a_refund_sets_no_bound() {
    let world = bucket(2);
    let charge = world.check(1).charge().unwrap();
    world.mood(Mood::Holding);
    let other = world.start(Verb::Check, &facts! {}, 1);
    world.advance(1_000);
    let corrections = charge.corrections(&world.policy, &charge.refund(Costs::All).unwrap());
    drop(world.leased.correct(&charge, &corrections));
    world.deliver();
    assert!(other.end().allowed());
    world.mood(Mood::Prompt);
    assert_eq!(world.try_check(1), (true, 1));
}

#[test]
fn degraded_answer_drops_the_bound() {
    let world = bucket(1);
    assert!(world.check(1).allowed());
    assert_eq!(world.try_check(1), (false, 0));
    world.mood(Mood::Away);
    world.advance(100_000);
    for _ in 0..3 {
        assert_eq!(world.try_check(1), (true, 1), "the failure policy decides");
    }
    world.mood(Mood::Prompt);
    assert_eq!((world.try_check(1), world.try_check(1)), ((false, 1), (false, 0)));
}

#[test]
fn peeks_ask_the_store_and_charge_nothing() {
    let world = bucket(1);
    assert!(world.check(1).allowed());
    for verb in [Verb::Peek, Verb::Usage] {
        let before = world.calls();
        let decision = world.decide(verb, &facts! {}, 1);
        assert_eq!((decision.allowed(), world.calls() - before), (false, 1));
        assert_eq!(decision.limit("limit").unwrap().approximation(), None);
    }
    // What a peek shows is known, too.
    world.advance(50_000);
    assert_eq!(world.try_check(1), (false, 0));
}

#[test]
fn raised_limit_is_used_at_once() {
    let mut world = bucket(1);
    assert!(world.check(1).allowed());
    assert_eq!(world.try_check(1), (false, 0));
    world.policy = Arc::new(Policy::new(vec![Limit::new("limit", Quota::per_hour(1).burst(2))]).unwrap());
    assert_eq!((world.try_check(1), world.try_check(1)), ((true, 1), (false, 0)));
}

/// A leaky bucket that can hold a request for 10 ms only.
#[test]
fn bound_knows_how_long_a_request_can_be_held() {
    let world = World::of(Algorithm::LeakyBucket, 20, Some(10));
    assert!(world.check(1).allowed());
    let toll = || world.policy.toll(Verb::Check, &facts! {}, 1).unwrap().hold(Span::from_millis(10));
    let StoreFuture::Ready(reply) = world.leased.decide(&toll()) else { panic!("refused here") };
    assert_eq!((Decision::new(toll(), reply).allowed(), world.calls()), (false, 1));
    world.advance(40_000);
    let StoreFuture::Ready(reply) = world.leased.decide(&toll()) else { panic!("a prompt store") };
    assert_eq!((Decision::new(toll(), reply).allowed(), world.calls()), (true, 2));
}

fn by_user_and_ip() -> World {
    World::new(vec![
        Limit::new("user", Quota::per_hour(1).burst(1)).by("user"),
        Limit::new("other", Quota::per_hour(1).burst(5)).by("other"),
        Limit::new("shadow", Quota::per_hour(1).burst(1)).mode(Mode::Shadow),
    ])
}

/// Rotating the other keys of a toll does not defeat the bound.
#[test]
fn limit_that_is_not_known_here_is_not_asked() {
    let world = by_user_and_ip();
    assert!(world.decide(Verb::Check, &facts! { "user" => "a", "other" => "1" }, 1).allowed());
    for other in 0..100 {
        let other = other.to_string();
        let decision = world.decide(Verb::Check, &facts! { "user" => "a", "other" => &other }, 1);
        assert!(!decision.allowed());
        assert_eq!(decision.binding().unwrap().name(), "user");
        let limit = decision.limit("other").unwrap();
        assert_eq!((limit.asked(), limit.counted()), (other == "1", other == "1"));
        assert!(limit.allowed() && limit.outcome().retry.is_none());
    }
    assert_eq!(world.calls(), 1);
}

#[test]
fn shadow_limit_never_refuses_by_its_bound() {
    let world = by_user_and_ip();
    for user in ["a", "b", "c"] {
        let decision = world.decide(Verb::Check, &facts! { "user" => user, "other" => "1" }, 1);
        assert!(decision.allowed());
        assert_eq!(decision.limit("shadow").unwrap().allowed(), user == "a");
    }
    assert_eq!(world.calls(), 3);
}

#[test]
fn bound_can_be_switched_off() {
    let world = bucket(1);
    let node = Clock::manual(&world.node);
    let store = FakeStore {
        memory: MemoryStore::new(Capacity::default(), node.clone()),
        calls: AtomicUsize::new(0),
        mood: Mutex::new(Mood::Prompt),
        held: Mutex::default(),
    };
    let leased = Leased::new(store, LeasedSettings { denial_bound: false }, node);
    let toll = world.policy.toll(Verb::Check, &facts! {}, 1).unwrap();
    for _ in 0..5 {
        assert!(matches!(leased.decide(&toll), StoreFuture::Ready(_)));
    }
    assert_eq!(leased.inner().calls.load(SeqCst), 5);
}

#[test]
fn cost_beyond_the_limit_is_refused_for_ever() {
    let world = bucket(3);
    assert!(world.check(1).allowed());
    let decision = world.check(4);
    assert_eq!(decision.limit("limit").unwrap().outcome().retry, Some(Retry::Never));
    assert_eq!(world.calls(), 1);
}

/// The table is bounded; the figure is printed for the documentation.
#[test]
fn entry_has_the_documented_size() {
    println!("{} bytes for each of {} keys", size_of::<Known>() + 16, table::MAX_KEYS);
    assert!(size_of::<Known>() <= 160, "{}", size_of::<Known>());
}
