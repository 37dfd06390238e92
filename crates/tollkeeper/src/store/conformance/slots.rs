//! Conformance cases of slots: held, released, renewed and expired.

use std::time::{Duration, Instant};

use crate::{Algorithm, Correction, Facts, Limit, Limiter, Quota, Slot, Time, facts};

use super::world::*;

/// A limit of `count` slots by user, with a TTL of a minute.
fn slots(count: u64) -> Limit {
    Limit::new("slots", Quota::slots(count)).by("user")
}

/// Acquires a slot, if one is free, with the time of the decision.
async fn acquire(limiter: &Limiter, facts: &Facts<'_>) -> (Option<Slot>, Time) {
    let acquired = limiter.acquire(facts).await.expect("a valid request");
    let decision = decided(acquired.decision);
    assert_eq!(decision.allowed(), acquired.slot.is_some());
    (acquired.slot.map(|guard| guard.keep()), decision.time())
}

async fn held(limiter: &Limiter, facts: &Facts<'_>) -> Slot {
    acquire(limiter, facts).await.0.expect("a slot is free")
}

pub(super) async fn as_many(world: World) {
    let (limiter, other) = (world.limiter([slots(3)]), world.limiter([slots(3)]));
    let alice = user("alice");
    let mut taken = Vec::new();
    for number in 0..3 {
        let limiter = if number % 2 == 0 { &limiter } else { &other };
        taken.push(held(limiter, &alice).await);
        world.remains(limiter, "slots", &alice, 2 - number).await;
    }
    for limiter in [&limiter, &other] {
        assert!(acquire(limiter, &alice).await.0.is_none());
        assert!(!peek(limiter, &alice, 1).await.allowed(), "a peek shows it");
        let check = charge(limiter, &alice, 1).await;
        assert!(check.allowed() && check.slot().is_none(), "a check takes none");
    }
    assert!(acquire(&limiter, &user("bob")).await.0.is_some(), "another key");
    for slot in &taken {
        assert!(other.release(slot).await.expect("it answers"), "any limiter can release a slot");
    }
    world.remains(&limiter, "slots", &alice, 3).await;
    // A lower limit takes no slot away and admits no new holder.
    for _ in 0..3 {
        held(&limiter, &alice).await;
    }
    world.replace(&limiter, [slots(2)]);
    assert!(acquire(&limiter, &alice).await.0.is_none());
    world.remains(&limiter, "slots", &alice, 0).await;
    assert_eq!(limiter.forget("slots", &alice).await, Ok(true));
    world.remains(&limiter, "slots", &alice, 2).await;
}

pub(super) async fn released_once(world: World) {
    let limiter = world.limiter([slots(2)]);
    let alice = user("alice");
    let first = held(&limiter, &alice).await;
    let second = held(&limiter, &alice).await;
    assert!(limiter.release(&first).await.expect("it answers"));
    for _ in 0..3 {
        assert!(
            !limiter.release(&first).await.expect("it answers")
                && !limiter.renew(&first).await.expect("it answers")
        );
        world.remains(&limiter, "slots", &alice, 1).await;
    }
    assert!(limiter.renew(&second).await.expect("it answers"), "it is still held");
    assert_eq!(limiter.forget("slots", &alice).await, Ok(true));
    assert!(!limiter.renew(&second).await.expect("it answers"), "forgetting a key drops its slots");
    let next = held(&limiter, &alice).await;
    assert!(!limiter.release(&second).await.expect("it answers"));
    world.remains(&limiter, "slots", &alice, 1).await;
    assert!(limiter.release(&next).await.expect("it answers"));
}

pub(super) async fn ttl(world: World) {
    let limiter = world.limiter([slots(1).ttl(millis(400))]);
    let alice = user("alice");
    let (slot, taken) = acquire(&limiter, &alice).await;
    let slot = slot.expect("a slot is free");
    assert_eq!(slot.ttl(), millis(400).into());
    changes_at("a slot", taken + slot.ttl(), async || {
        let usage = usage(&limiter, &alice).await;
        (usage.time(), usage.allowed())
    })
    .await;
    let next = held(&limiter, &alice).await;
    assert!(
        !limiter.release(&slot).await.expect("it answers")
            && !limiter.renew(&slot).await.expect("it answers"),
        "the slot has expired"
    );
    // The next holder's slot was not touched, unless it has expired, too.
    let released = limiter.release(&next).await.expect("it answers");
    let late = usage(&limiter, &alice).await.time() >= taken + slot.ttl() + slot.ttl();
    assert!(released || late);
}

pub(super) async fn renewed(world: World) {
    let limiter = world.limiter([slots(1).ttl(millis(1_000))]);
    let alice = user("alice");
    let now = async || usage(&limiter, &alice).await.time();
    let (slot, taken) = acquire(&limiter, &alice).await;
    let slot = slot.expect("a slot is free");
    wait_until(&limiter, &alice, taken + millis(100).into()).await;
    let before = now().await;
    let renewed = limiter.renew(&slot).await.expect("it answers");
    let after = now().await;
    assert!(renewed || after >= taken + slot.ttl(), "it was held");
    if !renewed {
        return;
    }
    loop {
        let usage = usage(&limiter, &alice).await;
        if usage.time() < before + slot.ttl() {
            assert!(!usage.allowed(), "the TTL counts from the renewal");
        } else if usage.time() >= after + slot.ttl() {
            assert!(usage.allowed(), "the slot expires after the TTL");
            break;
        }
        tokio::task::yield_now().await;
    }
    assert!(!limiter.renew(&slot).await.expect("it answers"), "it was lost");
}

pub(super) async fn beside_rates(world: World) {
    let tokens = Limit::new("tokens", Quota::per_day(100)).by("user").cost("tokens");
    let all = Limit::new("all", Quota::slots(2)).ttl(Duration::from_secs(30));
    let limiter = world.limiter([slots(5), tokens, all]);
    let asked = |user, tokens: u64| facts! { "user" => user, "tokens" => tokens };
    let first = limiter.acquire(&asked("alice", 60)).await.expect("a valid request");
    let (decision, slot) = (decided(first.decision), first.slot.expect("a slot is free").keep());
    assert_eq!(slot.items().len(), 2, "one of each limit");
    assert_eq!(slot.ttl(), secs(30), "the shorter of both");
    // The rate refuses: no slot is taken.
    assert!(acquire(&limiter, &asked("alice", 60)).await.0.is_none());
    world.remains(&limiter, "slots", &asked("alice", 1), 4).await;
    world.remains(&limiter, "all", &asked("alice", 1), 1).await;
    // No slot is free: no rate is charged.
    let second = held(&limiter, &asked("bob", 1)).await;
    assert!(acquire(&limiter, &asked("carol", 1)).await.0.is_none());
    world.remains(&limiter, "tokens", &asked("carol", 1), 100).await;
    world.remains(&limiter, "slots", &asked("carol", 1), 5).await;
    // The charge refunds the rate, the release frees the slot.
    let charge = decision.charge().expect("the rate was charged");
    assert_eq!(charge.items().len(), 1);
    assert_eq!(limiter.refund(&charge).await, Correction::Done);
    world.remains(&limiter, "tokens", &asked("alice", 1), 100).await;
    world.remains(&limiter, "all", &asked("alice", 1), 0).await;
    assert!(
        limiter.renew(&slot).await.expect("it answers")
            && limiter.release(&slot).await.expect("it answers")
            && limiter.release(&second).await.expect("it answers")
    );
    world.remains(&limiter, "all", &asked("alice", 1), 2).await;
    world.remains(&limiter, "slots", &asked("alice", 1), 5).await;
    // Without a concurrency limit, `acquire` is a check.
    let limiter = world.limiter([ten(Algorithm::FixedWindow)]);
    let acquired = limiter.acquire(&user("alice")).await.expect("a valid request");
    assert!(acquired.decision.allowed() && acquired.slot.is_none() && acquired.decision.charge().is_some());
}

pub(super) async fn as_text(world: World) {
    let (here, there) = (world.limiter([slots(1)]), world.limiter([slots(1)]));
    let long = "long ".repeat(200);
    for name in ["alice", "{\0\n:%}", &long] {
        let facts = user(name);
        let slot = held(&here, &facts).await;
        let text = here.seal_slot(&slot);
        assert!(acquire(&there, &facts).await.0.is_none(), "one count");
        let opened = there.open_slot(&text).await.expect("it answers").expect("a node of the same store");
        assert_eq!((opened.id(), opened.ttl()), (slot.id(), slot.ttl()));
        assert!(
            there.renew(&opened).await.expect("it answers")
                && there.release(&opened).await.expect("it answers"),
            "{name:?}"
        );
        assert!(!here.release(&slot).await.expect("it answers"), "once");
        assert!(acquire(&here, &facts).await.0.is_some());
    }
}

pub(super) async fn guard(world: World) {
    let limiter = world.limiter([slots(1)]);
    let alice = user("alice");
    for round in 0..3 {
        let acquired = limiter.acquire(&alice).await.expect("a valid request");
        let guard = acquired.slot.expect("a slot is free");
        assert!(guard.renew().await.expect("it answers"));
        world.remains(&limiter, "slots", &alice, 0).await;
        drop(guard);
        // A remote store gets the release in the background, well before the TTL of a minute.
        let started = Instant::now();
        while remaining(&limiter, "slots", &alice).await == 0 {
            assert!(started.elapsed() < Duration::from_secs(20), "round {round}: the slot was not released");
            tokio::task::yield_now().await;
        }
    }
}
