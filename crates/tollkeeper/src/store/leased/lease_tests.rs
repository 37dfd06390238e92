//! Rules of permits, on a store whose clock, replies and background tasks are moved by hand.

use std::collections::HashMap;
use std::task::{Context, Poll, Waker};

use tokio::sync::oneshot;
use tollkeeper_core::algorithm::{self, State, StoredState, concurrency, meter};
use tollkeeper_core::{
    Algorithm, Consistency, Decision, Facts, Limit, Mode, OnStoreFailure, Policy, Quota, Span, Verb, facts,
};

use super::*;
use crate::ManualClock;
use crate::sync::{Mutex, lock};

const START: Time = Time::from_micros(1_760_000_000_000_000);

/// A store with leases that keeps its states in a map.
#[derive(Debug)]
struct FakeStore {
    clock: ManualClock,
    states: Mutex<HashMap<Vec<u8>, State>>,
    /// How many tolls it decided, and what each lease asked for.
    tolls: AtomicU64,
    wants: Mutex<Vec<u64>>,
    /// Whether it answers; otherwise the failure policy `allow` decides.
    is_away: Mutex<bool>,
    /// Replies that wait to be delivered, if they are held.
    held: Mutex<Option<Vec<HeldReply>>>,
    /// The ticks from which refunded charges counted.
    refunded: Mutex<Vec<u64>>,
}

/// A reply, and where it goes.
type HeldReply = (oneshot::Sender<Reply>, Reply);

impl Store for FakeStore {
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, Reply> {
        let now = self.clock.now();
        let mut reply = Reply::new(now, self.tolls.fetch_add(1, SeqCst) + 1);
        if *lock(&self.is_away) {
            let outcome = Outcome { allowed: true, ..Outcome::default() };
            let degraded = LimitReply::Degraded { by: OnStoreFailure::Allow, outcome };
            toll.dues().for_each(|_| reply.push(degraded));
            return StoreFuture::Ready(reply);
        }
        let mut states = lock(&self.states);
        let steps: Vec<_> = toll
            .dues()
            .map(|due| {
                let seen = states.get(&due.key.to_bytes()).map_or(StoredState::Nothing, State::stored);
                due.step(seen, now)
            })
            .collect();
        let passes = toll.dues().zip(&steps).all(|(due, step)| step.allowed || !due.enforced());
        for (due, step) in toll.dues().zip(steps) {
            let charged = toll.verb().charges() && passes && step.allowed && due.cost > 0;
            if charged {
                let key = due.key.to_bytes();
                let state = states.remove(&key);
                states.extend(due.apply(state, now, &step, true, reply.id()).map(|state| (key, state)));
            }
            reply.push(LimitReply::Step { step, charged });
        }
        match &mut *lock(&self.held) {
            None => StoreFuture::Ready(reply),
            Some(held) => {
                let (sender, receiver) = oneshot::channel();
                held.push((sender, reply));
                StoreFuture::Later(Box::pin(async { receiver.await.expect("it is delivered") }))
            }
        }
    }

    fn lease(&self, request: &LeaseRequest) -> StoreFuture<'_, Option<LeaseGrant>> {
        lock(&self.wants).push(request.want);
        if *lock(&self.is_away) {
            return StoreFuture::Ready(None);
        }
        let (due, time) = (request.toll.get(0), self.clock.now());
        let mut states = lock(&self.states);
        let state = states.get(&due.key.to_bytes()).cloned();
        let granted =
            algorithm::lease(due.quota, state.clone(), time, due.shift, request.want, request.lease.raise);
        StoreFuture::Ready(Some(match granted {
            None => LeaseGrant { units: 0, state, time },
            Some((units, state)) => {
                states.insert(due.key.to_bytes(), state.clone());
                LeaseGrant { units, state: Some(state), time }
            }
        }))
    }

    fn correct<'a>(&'a self, _: &'a Charge, corrections: &'a [KeyCorrection]) -> StoreFuture<'a, Correction> {
        lock(&self.refunded).extend(corrections.iter().map(|fix| fix.past.tick));
        StoreFuture::Ready(Correction::Done)
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>> {
        let mut states = lock(&self.states);
        let now = self.clock.now().as_micros();
        let released = slot.items().iter().all(|item| match states.get_mut(&item.key().to_bytes()) {
            Some(State::Concurrency(slots)) => concurrency::release(slots, now, slot.id()),
            _ => false,
        });
        StoreFuture::Ready(Ok(released))
    }

    fn renew<'a>(&'a self, _: &'a Slot) -> StoreFuture<'a, Result<bool, Unavailable>> {
        StoreFuture::Ready(Err(Unavailable))
    }

    fn forget<'a>(&'a self, key: Key<'a>) -> StoreFuture<'a, Result<bool, Unavailable>> {
        StoreFuture::Ready(Ok(lock(&self.states).remove(&key.to_bytes()).is_some()))
    }

    fn seal_charge(&self, _: &Charge) -> String {
        String::new()
    }

    fn open_charge<'a>(&'a self, _: &'a str) -> StoreFuture<'a, Result<Option<Charge>, Unavailable>> {
        StoreFuture::Ready(Ok(None))
    }

    fn seal_slot(&self, _: &Slot) -> String {
        String::new()
    }

    fn open_slot<'a>(&'a self, _: &'a str) -> StoreFuture<'a, Result<Option<Slot>, Unavailable>> {
        StoreFuture::Ready(Ok(None))
    }
}

/// Counts units by what became of them.
#[derive(Debug, Default)]
struct Counts(Mutex<[u64; 3]>);

impl Observer for Counts {
    fn record(&self, _: &tollkeeper_core::DecidedToll) {}

    fn permits(&self, _: &str, state: PermitState, units: u64) {
        lock(&self.0)[state as usize] += units;
    }
}

struct World {
    leased: Leased<FakeStore>,
    clock: ManualClock,
    tasks: Arc<Mutex<Vec<Task>>>,
    policy: Arc<Policy>,
    counts: Arc<Counts>,
}

impl World {
    fn new(limits: Vec<Limit>) -> World {
        let clock = ManualClock::new(START);
        let store = FakeStore {
            clock: clock.clone(),
            states: Mutex::default(),
            tolls: AtomicU64::new(0),
            wants: Mutex::default(),
            is_away: Mutex::new(false),
            held: Mutex::default(),
            refunded: Mutex::default(),
        };
        let tasks = Arc::new(Mutex::new(Vec::new()));
        let queue = Arc::clone(&tasks);
        let spawn = move |task| lock(&queue).push(task);
        let leased = Leased::spawning(store, LeasedSettings::default(), Clock::manual(&clock), spawn);
        let counts = Arc::new(Counts::default());
        assert!(leased.observe(Arc::clone(&counts) as _));
        World { leased, clock, tasks, policy: Arc::new(Policy::new(limits).unwrap()), counts }
    }

    /// A leased bucket of 100,000 a second, whose permits live for 62.5 ms.
    fn bucket() -> World {
        World::new(vec![leased(Quota::per_second(100_000).burst(100_000))])
    }

    fn store(&self) -> &FakeStore {
        self.leased.inner()
    }

    fn advance(&self, micros: u64) {
        self.clock.advance(Span::from_micros(micros));
    }

    /// Runs the background tasks, and returns how many there were.
    fn run_tasks(&self) -> usize {
        let tasks = std::mem::take(&mut *lock(&self.tasks));
        let count = tasks.len();
        for mut task in tasks {
            let mut context = Context::from_waker(Waker::noop());
            assert!(task.as_mut().poll(&mut context).is_ready(), "the store answers at once");
        }
        count
    }

    fn decide(&self, verb: Verb, facts: &Facts<'_>, cost: u64) -> Decision {
        let toll = self.policy.toll(verb, facts, cost).unwrap();
        let StoreFuture::Ready(reply) = self.leased.decide(&toll) else { panic!("the reply is held") };
        Decision::new(toll, reply)
    }

    fn check(&self, cost: u64) -> Decision {
        self.decide(Verb::Check, &facts! {}, cost)
    }

    /// Makes the key hot, and receives permits: four when that is little demand, then what was used. Returns how many
    /// were wanted last.
    fn heat(&self, checks: u64) -> u64 {
        for _ in 1..checks {
            assert!(self.check(1).allowed());
        }
        self.run_tasks();
        assert!(self.check(1).allowed());
        self.run_tasks();
        *lock(&self.store().wants).last().expect("a lease was asked for")
    }

    /// How many tolls the store decided.
    fn tolls(&self) -> u64 {
        self.store().tolls.load(SeqCst)
    }

    /// Units that this node holds.
    fn held(&self) -> u64 {
        let toll = self.policy.toll(Verb::Check, &facts! {}, 1).unwrap();
        let inner = &self.leased.0;
        let units = |known: &mut Known| known.lease.as_ref().map_or(0, |key| key.pool.units());
        inner.table.update(inner.table.print(toll.get(0).key), units).unwrap_or(0)
    }
}

fn leased(rate: tollkeeper_core::Quota) -> Limit {
    Limit::new("leased", rate).consistency(Consistency::Leased)
}

#[test]
fn hot_key_is_admitted_from_permits() {
    let world = World::bucket();
    assert!(world.check(1).allowed() && world.check(1).allowed() && world.check(1).allowed());
    assert_eq!(lock(&world.tasks).len(), 0, "three units are not worth a call");
    assert!(world.check(1).allowed());
    assert_eq!((world.tolls(), world.run_tasks()), (4, 1));
    assert_eq!((world.held(), &**lock(&world.store().wants)), (4, &[4][..]));
    let decision = world.check(1);
    let limit = decision.limit("leased").unwrap();
    assert_eq!((decision.allowed(), limit.approximation()), (true, Some(Approximation::Permits)));
    assert_eq!((world.tolls(), world.held()), (4, 3));
    assert_eq!(limit.outcome().limit, 100_000);
    // Four were charged, four are leased on a raised level, and three of these are still here.
    assert_eq!(limit.outcome().remaining, 100_000 - 6_250 - 4 + 3);
    assert_eq!(*lock(&world.counts.0), [4, 0, 0]);
}

#[test]
fn node_asks_for_what_it_used_recently() {
    let world = World::bucket();
    // All of it, while that is little.
    assert_eq!(world.heat(100), 100);
    // 12.5 of the last 31.25 ms, once that is more than 128.
    for _ in 0..1_000 {
        assert!(world.check(1).allowed());
        world.run_tasks();
    }
    let wants = lock(&world.store().wants).clone();
    assert!(wants.iter().all(|want| *want <= 440), "{wants:?}");
    assert!(wants.last().is_some_and(|want| *want > 350), "{wants:?}");
    // Demand is forgotten.
    world.advance(200_000);
    assert!(world.check(1).allowed());
    assert_eq!(world.run_tasks(), 0);
}

#[test]
fn one_lease_is_in_flight_at_a_time() {
    let world = World::bucket();
    for _ in 0..200 {
        assert!(world.check(1).allowed());
    }
    assert_eq!(lock(&world.tasks).len(), 1);
    assert_eq!(world.run_tasks(), 1);
}

/// The store did not answer: it is asked again after 10 ms, by another call for other units.
#[test]
fn failed_lease_pauses() {
    let world = World::bucket();
    for _ in 0..10 {
        world.check(1);
    }
    *lock(&world.store().is_away) = true;
    assert_eq!(world.run_tasks(), 1);
    *lock(&world.store().is_away) = false;
    world.check(1);
    assert_eq!(lock(&world.tasks).len(), 0);
    world.advance(10_000);
    world.check(1);
    assert_eq!(lock(&world.tasks).len(), 1);
    // So it is if the task is dropped with its runtime.
    lock(&world.tasks).clear();
    world.advance(10_000);
    world.check(1);
    assert_eq!(lock(&world.tasks).len(), 1);
}

/// 62.5 ms after the call was sent, less a thousandth and 2 ms.
#[test]
fn permits_expire_with_their_life() {
    let world = World::bucket();
    world.heat(100);
    world.advance(62_500 - 63 - 2_000 - 1);
    let tolls = world.tolls();
    assert!(world.check(1).allowed());
    assert_eq!(world.tolls(), tolls);
    world.advance(1);
    assert!(world.check(1).allowed());
    assert_eq!((world.tolls(), world.held()), (tolls + 1, 0));
    assert_eq!(*lock(&world.counts.0), [104, 0, 102]);
}

#[test]
fn permits_of_a_window_end_with_it() {
    for algorithm in [Algorithm::FixedWindow, Algorithm::SlidingWindow] {
        let world = World::new(vec![leased(Quota::per_minute(10_000)).algorithm(algorithm)]);
        // 100 ms before the minute ends.
        let minute = 60_000_000 - START.as_micros() % 60_000_000;
        world.advance(minute - 100_000);
        world.heat(100);
        let tolls = world.tolls();
        world.advance(97_899);
        assert!(world.check(1).allowed());
        assert_eq!(world.tolls(), tolls, "{algorithm}");
        world.advance(1);
        assert!(world.check(1).allowed());
        assert_eq!(world.tolls(), tolls + 1, "{algorithm}");
    }
}

#[test]
fn scarce_permits_are_waited_for() {
    let world = World::bucket();
    world.check(1);
    // Another node has used nearly everything.
    let toll = world.policy.toll(Verb::Check, &facts! {}, 99_900).unwrap();
    world.store().decide(&toll);
    assert_eq!(world.heat(50), 51);
    assert_eq!(world.held(), 3 + 5, "an eighth of 46");
    for _ in 0..8 {
        assert!(world.check(1).allowed());
    }
    let tolls = world.tolls();
    let refused = world.check(1);
    assert_eq!((refused.allowed(), world.tolls(), world.run_tasks()), (false, tolls, 0));
    assert_eq!(refused.retry_after(), Some(Span::from_millis(30)), "the pause, and 20 ms");
    assert!(refused.limit("leased").unwrap().approximation().is_some());
    world.advance(9_999);
    assert!(!world.check(1).allowed());
    assert_eq!(world.run_tasks(), 0);
    // The pause is over: the store is asked for permits, and this request still has none.
    world.advance(1);
    assert!(!world.check(1).allowed());
    assert_eq!((world.tolls(), world.run_tasks()), (tolls, 1));
    assert!(world.check(1).allowed());
    assert_eq!(world.tolls(), tolls);
}

#[test]
fn exhausted_key_is_not_leased() {
    let world = World::bucket();
    assert!(world.check(100_000).allowed());
    assert!(!world.check(1).allowed());
    assert_eq!(world.run_tasks(), 0);
}

fn mixed() -> World {
    World::new(vec![
        leased(Quota::per_second(100_000).burst(100_000)),
        Limit::new("exact", Quota::per_hour(1).burst(300)),
        Limit::new("shadow", Quota::per_hour(1).burst(1)).mode(Mode::Shadow),
    ])
}

/// The leased limit is covered by permits, the store refuses by the exact one.
#[test]
fn permits_go_back_if_the_store_refuses_the_rest() {
    let world = mixed();
    world.heat(250);
    let held = world.held();
    // More than the bound knows: another node used the rest.
    let toll = world.policy.toll(Verb::Check, &facts! {}, 50).unwrap();
    world.store().decide(&toll.part(&[1]));
    let refused = world.check(1);
    assert_eq!(refused.limits().map(|limit| limit.allowed()).collect::<Vec<_>>(), [true, false, false]);
    assert!(refused.charge().is_none());
    assert_eq!(world.held(), held);
    assert_eq!(refused.limit("leased").unwrap().approximation(), Some(Approximation::Permits));
}

#[test]
fn mixed_toll_charges_every_limit() {
    let world = mixed();
    world.heat(250);
    let (held, tolls) = (world.held(), world.tolls());
    let admitted = world.check(2);
    assert!(admitted.allowed());
    assert_eq!((world.held(), world.tolls()), (held - 2, tolls + 1));
    let charge = admitted.charge().unwrap();
    assert_eq!((charge.items().len(), charge.id()), (2, tolls + 1), "the shadow limit refused it");
    assert_eq!(admitted.limit("exact").unwrap().outcome().remaining, 48);
}

#[test]
fn leased_limit_and_slots_are_all_or_nothing() {
    let world = World::new(vec![
        leased(Quota::per_second(100_000).burst(100_000)),
        Limit::new("slots", Quota::slots(2)),
    ]);
    world.heat(250);
    let (acquire, held) = (|cost| world.decide(Verb::Acquire, &facts! {}, cost), world.held());
    // The leased limit refuses: no slot is taken.
    assert!(!acquire(100_001).allowed());
    let (first, second) = (acquire(3), acquire(3));
    assert!(first.allowed() && second.allowed());
    assert_eq!(first.limit("leased").unwrap().approximation(), Some(Approximation::Permits));
    assert_eq!(world.held(), held - 6);
    // No slot is free: the permits go back.
    let refused = acquire(3);
    assert_eq!(refused.limits().map(|limit| limit.allowed()).collect::<Vec<_>>(), [true, false]);
    assert!(refused.slot().is_none() && refused.charge().is_none());
    assert_eq!(world.held(), held - 6);
    let slot = first.slot().unwrap();
    assert!(matches!(world.leased.release(&slot), StoreFuture::Ready(Ok(true))));
    assert!(matches!(world.leased.release(&slot), StoreFuture::Ready(Ok(false))), "once");
    assert!(acquire(3).allowed() && !acquire(3).allowed());
    assert_eq!(world.held(), held - 9);
}

#[test]
fn permits_stay_spent_if_the_caller_is_gone() {
    let world = mixed();
    world.heat(250);
    let held = world.held();
    *lock(&world.store().held) = Some(Vec::new());
    let toll = world.policy.toll(Verb::Check, &facts! {}, 3).unwrap();
    let mut future = world.leased.decide(&toll);
    let poll = std::pin::Pin::new(&mut future).poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(poll, Poll::Pending));
    drop(future);
    assert_eq!(world.held(), held - 3);
}

/// While the reply is on its way, some of the permits expire.
#[test]
fn only_live_permits_go_back() {
    let world = mixed();
    world.heat(100);
    let other = world.policy.toll(Verb::Check, &facts! {}, 195).unwrap();
    world.store().decide(&other.part(&[1]));
    *lock(&world.store().held) = Some(Vec::new());
    let toll = world.policy.toll(Verb::Check, &facts! {}, 60).unwrap();
    let mut future = world.leased.decide(&toll);
    let mut context = Context::from_waker(Waker::noop());
    assert!(std::pin::Pin::new(&mut future).poll(&mut context).is_pending());
    world.advance(61_000);
    let (sender, reply) = lock(&world.store().held).take().expect("held").pop().expect("one");
    sender.send(reply).expect("its caller waits");
    let Poll::Ready(reply) = std::pin::Pin::new(&mut future).poll(&mut context) else { panic!("delivered") };
    assert!(!Decision::new(toll, reply).allowed());
    drop(future);
    let toll = world.policy.toll(Verb::Check, &facts! {}, 1).unwrap();
    let inner = &world.leased.0;
    inner.table.update(inner.table.print(toll.get(0).key), |known| {
        known.lease.as_mut().map(|key| key.pool.expire(world.clock.now()))
    });
    assert_eq!(world.held(), 0);
}

#[test]
fn toll_refused_by_another_limit_adds_no_demand() {
    let world = World::new(vec![
        leased(Quota::per_second(100_000).burst(100_000)),
        Limit::new("exact", Quota::per_hour(1).burst(1)).by("user"),
    ]);
    for user in 0..3 {
        let user = user.to_string();
        for _ in 0..50 {
            world.decide(Verb::Check, &facts! { "user" => &user }, 1);
            // The bound of `exact` is not used: the store refuses each.
            world.advance(151_000);
        }
    }
    assert_eq!(lock(&world.tasks).len(), 0);
}

#[test]
fn other_quota_drops_the_permits() {
    let mut world = World::bucket();
    world.heat(100);
    let rate = Quota::per_second(100_000).burst(99_999);
    world.policy = Arc::new(Policy::new(vec![leased(rate)]).unwrap());
    let tolls = world.tolls();
    assert!(world.check(1).allowed());
    assert_eq!((world.tolls(), world.held()), (tolls + 1, 0));
}

/// The key keeps its quota, but another tier of its limit drains faster now.
#[test]
fn larger_tier_drops_the_permits() {
    let tiered = |pro: u64| {
        let free = Quota::per_second(100_000).burst(100_000);
        Limit::tiered("leased", "plan")
            .tier("free", free)
            .tier("pro", Quota::per_second(pro).burst(pro))
            .default_tier("free")
            .consistency(Consistency::Leased)
    };
    let mut world = World::new(vec![tiered(200_000)]);
    world.heat(100);
    let held = world.held();
    assert!(held > 0);
    world.policy = Arc::new(Policy::new(vec![tiered(150_000)]).unwrap());
    assert!(world.check(1).allowed());
    assert_eq!(world.held(), held - 1, "a smaller tier changes nothing");
    world.policy = Arc::new(Policy::new(vec![tiered(200_001)]).unwrap());
    assert!(world.check(1).allowed());
    assert_eq!(world.held(), 0);
}

#[test]
fn forgotten_key_loses_its_permits() {
    let world = World::bucket();
    world.heat(100);
    let toll = world.policy.toll(Verb::Check, &facts! {}, 1).unwrap();
    assert!(matches!(world.leased.forget(toll.get(0).key), StoreFuture::Ready(Ok(true))));
    assert_eq!(world.held(), 0);
}

/// A lease that was asked for before the key was forgotten.
#[test]
fn units_of_a_forgotten_key_are_not_used() {
    let world = World::bucket();
    for _ in 0..100 {
        world.check(1);
    }
    let toll = world.policy.toll(Verb::Check, &facts! {}, 1).unwrap();
    drop(world.leased.forget(toll.get(0).key));
    assert_eq!((world.run_tasks(), world.held()), (1, 0));
    assert_eq!(*lock(&world.counts.0), [4, 0, 4]);
}

#[test]
fn peek_adds_the_permits_of_this_node() {
    let world = World::bucket();
    world.heat(100);
    let held = world.held();
    let tolls = world.tolls();
    for verb in [Verb::Peek, Verb::Usage] {
        let decision = world.decide(verb, &facts! {}, 1);
        let limit = decision.limit("leased").unwrap();
        // Four were charged before the lease; the raise and the leased units are charged, too.
        let charged = 6_250 + 4 + u64::from(held == 0);
        assert!(limit.outcome().remaining >= 100_000 - charged - 100, "{:?}", limit.outcome());
        assert_eq!(limit.approximation(), Some(Approximation::Permits));
    }
    assert_eq!((world.tolls(), world.held()), (tolls + 2, held));
}

#[test]
fn permits_are_used_while_the_store_is_away() {
    let world = World::bucket();
    world.heat(100);
    *lock(&world.store().is_away) = true;
    let held = world.held();
    for _ in 0..held {
        let decision = world.check(1);
        assert!(decision.allowed() && decision.degraded().is_none() && decision.charge().is_some());
    }
    assert_eq!(world.check(1).degraded(), Some(OnStoreFailure::Allow));
}

/// The raise of a lease absorbs what was charged before, so a refund must not take the raise along. The charge counts as
/// older by the life of the lease, whether the store or permits admitted it.
#[test]
fn charges_of_a_leased_bucket_are_refunded_as_older() {
    let world = World::bucket();
    let asked = world.check(1).charge().unwrap();
    world.heat(100);
    let spent = world.check(1).charge().unwrap();
    assert_ne!(asked.id(), spent.id());
    assert_eq!(spent.time(), START);
    for charge in [asked, spent] {
        let changes = charge.refund(tollkeeper_core::Costs::All).unwrap();
        let corrections = charge.corrections(&world.policy, &changes);
        assert!(matches!(world.leased.correct(&charge, &corrections), StoreFuture::Ready(Correction::Done)));
    }
    assert_eq!(*lock(&world.store().refunded), [START.as_micros() - 62_500; 2]);
}

#[test]
fn exact_and_small_limits_are_never_leased() {
    for limit in [
        Limit::new("exact", Quota::per_second(100_000).burst(100_000)),
        leased(Quota::per_second(100).burst(200)),
    ] {
        let world = World::new(vec![limit]);
        for _ in 0..200 {
            assert!(world.check(1).allowed());
        }
        assert_eq!((world.tolls(), world.run_tasks()), (200, 0));
    }
}

#[test]
fn limit_that_grants_nothing_refuses() {
    let nothing = Limit::new("nothing", tollkeeper_core::Allowance::Nothing)
        .algorithm(Algorithm::TokenBucket)
        .consistency(Consistency::Leased);
    assert!(!World::new(vec![nothing]).check(1).allowed());
}

/// The level in the store bounds what can be spent: it was raised by what drains in the life of the permits.
#[test]
fn leased_level_is_raised() {
    let world = World::bucket();
    world.heat(4);
    let states = lock(&world.store().states);
    let Some(State::Meter(meter::State { level, .. })) = states.values().next() else { panic!("a bucket") };
    assert_eq!(*level, (6_250 + 4) * 1_000_000);
}
