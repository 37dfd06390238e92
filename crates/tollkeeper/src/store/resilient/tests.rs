//! Decisions while the remote store fails. The store here is simulated; faults of real servers are tested in
//! `tests/`.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::task::Poll;

use tollkeeper_core::{
    Decision, Facts, Limit, OnStoreFailure, Policy, Quota, Retry, Span, Time, Verb, Verdict, facts,
};

use super::*;
use crate::{Capacity, ManualClock};

/// A simulated remote store that replies from memory, fails or hangs, and counts the calls.
#[derive(Debug)]
struct Moody {
    store: MemoryStore,
    mood: Mutex<Mood>,
    /// How often it was called.
    asked: AtomicUsize,
    /// How often it has connected.
    came: AtomicUsize,
    /// Whether it knows the secret of receipts, so that no call is needed to get it.
    knows_secret: AtomicBool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Mood {
    Well,
    Failing,
    Hanging,
}

impl Moody {
    fn open<'a, T: Send + 'a>(
        &'a self,
        open: impl FnOnce(&'a MemoryStore) -> T,
    ) -> StoreFuture<'a, RemoteResult<T>> {
        if self.knows_secret.load(SeqCst) {
            StoreFuture::Ready(Ok(open(&self.store)))
        } else {
            self.answer(open)
        }
    }

    fn answer<'a, T: Send + 'a>(
        &'a self,
        answer: impl FnOnce(&'a MemoryStore) -> T,
    ) -> StoreFuture<'a, RemoteResult<T>> {
        self.asked.fetch_add(1, SeqCst);
        match *lock(&self.mood) {
            Mood::Well => StoreFuture::Ready(Ok(answer(&self.store))),
            Mood::Failing => {
                StoreFuture::Ready(Err(Failure::new(FailureKind::Connection, "connection refused")))
            }
            Mood::Hanging => StoreFuture::Later(Box::pin(std::future::pending())),
        }
    }
}

impl Remote for Moody {
    fn decide(&self, toll: &Toll) -> StoreFuture<'_, RemoteResult<Reply>> {
        self.answer(|store| store.decide(toll))
    }

    fn correct<'a>(
        &'a self,
        charge: &'a Charge,
        corrections: &'a [KeyCorrection],
    ) -> StoreFuture<'a, RemoteResult<Correction>> {
        self.answer(|store| store.correct(charge, corrections))
    }

    fn release<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>> {
        self.answer(|store| store.release(slot))
    }

    fn renew<'a>(&'a self, slot: &'a Slot) -> StoreFuture<'a, RemoteResult<bool>> {
        self.answer(|store| store.renew(slot))
    }

    fn forget<'a>(&'a self, key: Key<'a>) -> StoreFuture<'a, RemoteResult<bool>> {
        self.answer(move |store| store.forget(key))
    }

    fn arrivals(&self, _server: &Server) -> u64 {
        self.came.load(SeqCst).try_into().unwrap()
    }

    fn seal_charge(&self, charge: &Charge) -> Option<String> {
        self.knows_secret.load(SeqCst).then(|| self.store.seal_charge(charge))
    }

    fn open_charge<'a>(&'a self, text: &'a str) -> StoreFuture<'a, RemoteResult<Option<Charge>>> {
        self.open(move |store| store.open_charge(text))
    }

    fn seal_slot(&self, slot: &Slot) -> Option<String> {
        self.knows_secret.load(SeqCst).then(|| self.store.seal_slot(slot))
    }

    fn open_slot<'a>(&'a self, text: &'a str) -> StoreFuture<'a, RemoteResult<Option<Slot>>> {
        self.open(move |store| store.open_slot(text))
    }
}

/// A resilient store, and the clock of its remote and its local part.
struct Bench {
    store: Resilient<Moody>,
    hand: ManualClock,
    policy: Arc<Policy>,
}

impl Bench {
    fn new(nodes: u32, limits: Vec<Limit>) -> Bench {
        let hand = ManualClock::new(Time::from_micros(1_760_000_000_000_000));
        let memory = || MemoryStore::new(Capacity::default(), Clock::manual(&hand));
        let remote = Moody {
            store: memory(),
            mood: Mutex::new(Mood::Well),
            asked: AtomicUsize::new(0),
            came: AtomicUsize::new(1),
            knows_secret: AtomicBool::new(true),
        };
        let settings = ResilientSettings { nodes, ..ResilientSettings::default() };
        let store = Resilient::new(remote, settings, memory());
        Bench { store, hand, policy: Arc::new(Policy::new(limits).unwrap()) }
    }

    fn mood(&self, mood: Mood) {
        *lock(&self.store.remote().mood) = mood;
    }

    fn asked(&self) -> usize {
        self.store.remote().asked.load(SeqCst)
    }

    async fn decide(&self, verb: Verb, facts: &Facts<'_>, cost: u64) -> Decision {
        let toll = self.policy.toll(verb, facts, cost).unwrap();
        let reply = self.store.decide(&toll).await;
        Decision::new(toll, reply)
    }

    async fn check(&self) -> Decision {
        self.decide(Verb::Check, &facts! {}, 1).await
    }

    /// Waits for an answer that must take the deadline of 10 ms on the node's clock, and no less.
    async fn until_the_deadline<T>(&self, answer: impl Future<Output = T>) -> T {
        let mut answer = pin!(answer);
        for wait in [0, 9_999] {
            self.hand.advance(Span::from_micros(wait));
            poll_fn(|context| {
                assert!(answer.as_mut().poll(context).is_pending(), "it waits for the deadline");
                Poll::Ready(())
            })
            .await;
        }
        self.hand.advance(Span::from_micros(1));
        poll_fn(|context| match answer.as_mut().poll(context) {
            Poll::Ready(answer) => Poll::Ready(answer),
            Poll::Pending => panic!("the deadline has passed"),
        })
        .await
    }
}

fn limit(name: &str, count: u64, policy: OnStoreFailure) -> Limit {
    Limit::new(name, Quota::per_hour(count).burst(count)).on_store_failure(policy)
}

#[tokio::test]
async fn no_decision_is_degraded_while_the_store_is_up() {
    let bench = Bench::new(1, vec![limit("all", 3, OnStoreFailure::Deny)]);
    for allowed in [true, true, true, false] {
        let decision = bench.check().await;
        assert_eq!((decision.allowed(), decision.degraded()), (allowed, None));
        assert_eq!(decision.charge().is_some(), allowed);
    }
}

#[tokio::test]
async fn deny_refuses_until_the_next_probe() {
    let bench = Bench::new(1, vec![limit("all", 3, OnStoreFailure::Deny)]);
    bench.mood(Mood::Failing);
    let decision = bench.check().await;
    assert_eq!(decision.degraded(), Some(OnStoreFailure::Deny));
    let retry = Retry::After(Span::from_secs(1));
    assert_eq!(decision.verdict(), Verdict::Deny { retry });
    assert!(decision.charge().is_none());
}

#[tokio::test]
async fn allow_passes_and_has_no_receipt() {
    let bench = Bench::new(1, vec![limit("all", 1, OnStoreFailure::Allow)]);
    bench.mood(Mood::Failing);
    for _ in 0..3 {
        let decision = bench.check().await;
        assert!(decision.allowed() && decision.charge().is_none());
        assert_eq!(decision.degraded(), Some(OnStoreFailure::Allow));
    }
}

/// `local` admits this node's share of the quota.
#[tokio::test]
async fn local_policy_keeps_its_count_while_the_breaker_flaps() {
    let bench = Bench::new(4, vec![limit("all", 20, OnStoreFailure::Local)]);
    let mut admitted = 0;
    for round in 0..10 {
        bench.mood(if round % 2 == 0 { Mood::Failing } else { Mood::Well });
        let decision = bench.check().await;
        if round % 2 == 0 && decision.allowed() {
            admitted += 1;
            assert_eq!(decision.degraded(), Some(OnStoreFailure::Local));
        }
    }
    bench.mood(Mood::Failing);
    for _ in 0..10 {
        admitted += usize::from(bench.check().await.allowed());
    }
    assert_eq!(admitted, 5, "this node's share is a quarter of 20");
    // 20 an hour on four nodes are 5 an hour here: one more after twelve minutes.
    let refused = bench.check().await;
    assert_eq!(refused.retry_after(), Some(Span::from_secs(720)));
    assert_eq!(refused.binding().unwrap().outcome().limit, 5);
}

#[tokio::test]
async fn cost_above_the_local_share_passes_when_the_store_is_back() {
    let bench = Bench::new(4, vec![limit("all", 20, OnStoreFailure::Local)]);
    bench.mood(Mood::Failing);
    let decision = bench.decide(Verb::Check, &facts! {}, 6).await;
    assert_eq!(decision.retry_after(), Some(Span::from_secs(1)));
    let never = bench.decide(Verb::Check, &facts! {}, 21).await;
    assert_eq!(never.verdict(), Verdict::Deny { retry: Retry::Never });
}

#[tokio::test]
async fn one_deny_refuses_all_and_charges_no_share() {
    let limits = vec![limit("local", 2, OnStoreFailure::Local), {
        limit("deny", 2, OnStoreFailure::Deny).when("route", "/pay")
    }];
    let bench = Bench::new(1, limits);
    bench.mood(Mood::Failing);
    for _ in 0..5 {
        let decision = bench.decide(Verb::Check, &facts! { "route" => "/pay" }, 1).await;
        assert!(!decision.allowed());
        assert_eq!(decision.degraded(), Some(OnStoreFailure::Deny));
    }
    for allowed in [true, true, false] {
        assert_eq!(bench.check().await.allowed(), allowed, "the refused requests charged nothing");
    }
}

#[tokio::test]
async fn shadow_limit_with_policy_deny_refuses_nothing() {
    let shadow = limit("shadow", 2, OnStoreFailure::Deny).mode(tollkeeper_core::Mode::Shadow);
    let bench = Bench::new(1, vec![shadow, limit("all", 2, OnStoreFailure::Allow)]);
    bench.mood(Mood::Failing);
    assert!(bench.check().await.allowed());
}

#[tokio::test]
async fn five_failures_open_the_breaker_and_one_probe_closes_it() {
    let bench = Bench::new(1, vec![limit("all", 100, OnStoreFailure::Local)]);
    bench.mood(Mood::Failing);
    for _ in 0..50 {
        bench.check().await;
    }
    assert_eq!((bench.asked(), bench.store.breaker()), (5, BreakerState::Open));
    assert_eq!(bench.store.failures(FailureKind::Connection), 5);

    // Longer than any jitter. The probe fails, and the store is not called again.
    bench.hand.advance(Span::from_millis(1_250));
    for _ in 0..50 {
        bench.check().await;
    }
    assert_eq!((bench.asked(), bench.store.breaker()), (6, BreakerState::Open));

    bench.mood(Mood::Well);
    bench.hand.advance(Span::from_millis(1_250));
    for _ in 0..50 {
        assert_eq!(bench.check().await.degraded(), None);
    }
    assert_eq!((bench.asked(), bench.store.breaker()), (56, BreakerState::Closed));
}

/// Only one request probes it.
#[tokio::test]
async fn reconnected_store_is_probed_at_once() {
    let bench = Bench::new(1, vec![limit("all", 100, OnStoreFailure::Local)]);
    bench.mood(Mood::Failing);
    for _ in 0..50 {
        bench.check().await;
    }
    assert_eq!((bench.asked(), bench.store.breaker()), (5, BreakerState::Open));
    // It has reconnected but still fails: one probe, and the cooldown starts again.
    bench.store.remote().came.fetch_add(1, SeqCst);
    for _ in 0..50 {
        bench.check().await;
    }
    assert_eq!((bench.asked(), bench.store.breaker()), (6, BreakerState::Open));
    bench.store.remote().came.fetch_add(1, SeqCst);
    bench.mood(Mood::Well);
    for _ in 0..50 {
        assert_eq!(bench.check().await.degraded(), None, "no time has passed");
    }
    assert_eq!((bench.asked(), bench.store.breaker()), (56, BreakerState::Closed));
}

#[tokio::test]
async fn hanging_store_is_awaited_until_the_deadline() {
    let bench = Bench::new(1, vec![limit("all", 1, OnStoreFailure::Deny)]);
    bench.mood(Mood::Hanging);
    let decision = bench.until_the_deadline(bench.check()).await;
    assert_eq!(decision.degraded(), Some(OnStoreFailure::Deny));
    assert_eq!(bench.store.failures(FailureKind::Timeout), 1);
}

#[tokio::test]
async fn slot_taken_locally_is_released_locally() {
    let exports = Limit::new("exports", Quota::slots(1)).on_store_failure(OnStoreFailure::Local);
    let bench = Bench::new(1, vec![exports]);
    bench.mood(Mood::Failing);
    let held = bench.decide(Verb::Acquire, &facts! {}, 1).await;
    let slot = held.slot().expect("this node's share is one slot");
    assert!(!bench.decide(Verb::Acquire, &facts! {}, 1).await.allowed());
    assert_eq!(bench.store.renew(&slot).await, Ok(true));
    assert_eq!(bench.store.release(&slot).await, Ok(true));
    assert!(bench.decide(Verb::Acquire, &facts! {}, 1).await.allowed());
}

#[tokio::test]
async fn refund_without_a_reply_fails() {
    let bench = Bench::new(1, vec![limit("all", 5, OnStoreFailure::Local)]);
    let charge = bench.check().await.charge().unwrap();
    bench.mood(Mood::Failing);
    let changes = charge.refund(tollkeeper_core::Costs::All).unwrap();
    let corrections = charge.corrections(&bench.policy, &changes);
    assert_eq!(bench.store.correct(&charge, &corrections).await, Correction::Failed);
    bench.mood(Mood::Well);
    assert_eq!(bench.store.correct(&charge, &corrections).await, Correction::Done);
}

/// The remote store has never replied to this node, so only the node itself can have admitted the request.
#[tokio::test]
async fn slot_taken_without_the_secret_is_released_by_its_text() {
    let exports = Limit::new("exports", Quota::slots(1)).on_store_failure(OnStoreFailure::Local);
    let bench = Bench::new(1, vec![exports]);
    bench.mood(Mood::Failing);
    bench.store.remote().knows_secret.store(false, SeqCst);
    let held = bench.decide(Verb::Acquire, &facts! {}, 1).await;
    let text = bench.store.seal_slot(&held.slot().expect("this node's share is one slot"));
    let slot =
        bench.store.open_slot(&text).await.expect("no remote store is needed").expect("sealed by this node");
    assert_eq!(bench.store.release(&slot).await, Ok(true));
}

/// Opening a receipt fetches the secret, subject to the deadline and the breaker. Once the secret is known, no call is
/// made.
#[tokio::test]
async fn receipt_is_unavailable_while_the_secret_is() {
    let bench = Bench::new(1, vec![limit("all", 5, OnStoreFailure::Local)]);
    let text = bench.store.seal_charge(&bench.check().await.charge().unwrap());
    bench.store.remote().knows_secret.store(false, SeqCst);
    bench.mood(Mood::Hanging);
    assert_eq!(bench.until_the_deadline(bench.store.open_charge(&text)).await, Err(Unavailable));
    assert_eq!(bench.store.failures(FailureKind::Timeout), 1);

    bench.mood(Mood::Failing);
    for _ in 0..10 {
        assert_eq!(bench.store.open_charge(&text).await, Err(Unavailable));
    }
    assert_eq!(bench.store.breaker(), BreakerState::Open);
    bench.store.remote().knows_secret.store(true, SeqCst);
    let asked = bench.asked();
    assert!(bench.store.open_charge(&text).await.expect("the secret is known").is_some());
    assert_eq!(bench.store.open_charge("nonsense").await, Ok(None));
    assert_eq!(bench.asked(), asked);
}

#[tokio::test]
async fn calls_without_fallback_report_unavailable() {
    let bench = Bench::new(1, vec![Limit::new("exports", Quota::slots(1))]);
    let slot = bench.decide(Verb::Acquire, &facts! {}, 1).await.slot().expect("one is free");
    bench.mood(Mood::Failing);
    assert_eq!(bench.store.renew(&slot).await, Err(Unavailable));
    assert_eq!(bench.store.release(&slot).await, Err(Unavailable));
    let key = bench.policy.keys("exports", &facts! {}).unwrap().remove(0);
    assert_eq!(bench.store.forget(Key::from_bytes(&key).unwrap()).await, Err(Unavailable));
    bench.mood(Mood::Well);
    assert_eq!(bench.store.release(&slot).await, Ok(true));
}
