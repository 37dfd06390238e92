//! Slots of concurrency limits: held, released, renewed, and expired.

mod support;

use std::time::Duration;

use support::*;
use tollkeeper::{Acquired, Algorithm, Facts, Limit, Limiter, Quota, Retry, Slot, SlotGuard, Span, Verdict};

/// A limit of `count` slots by user, each with a TTL of five seconds.
fn slots(count: u64) -> Limit {
    Limit::new("slots", Quota::slots(count)).by("user").ttl(Duration::from_secs(5))
}

fn acquire(limiter: &Limiter, facts: &Facts<'_>) -> Acquired {
    now(limiter.acquire(facts)).expect("a valid request")
}

fn held(limiter: &Limiter, facts: &Facts<'_>) -> SlotGuard {
    acquire(limiter, facts).slot.expect("a slot is free")
}

fn free(limiter: &Limiter) -> u64 {
    remaining(limiter, "slots", &user("alice"))
}

fn release(limiter: &Limiter, slot: &Slot) -> bool {
    now(limiter.release(slot)).expect("a store in this process answers")
}

#[test]
fn held_slots_never_exceed_the_limit() {
    let (limiter, _) = limiter([slots(3)]);
    let alice = user("alice");
    let guards: Vec<SlotGuard> = (0..3).map(|_| held(&limiter, &alice)).collect();
    let refused = acquire(&limiter, &alice);
    assert!(!refused.decision.allowed() && refused.slot.is_none());
    assert!(acquire(&limiter, &user("bob")).decision.allowed(), "another key");
    assert_eq!(free(&limiter), 0);
    drop(guards);
    assert_eq!(free(&limiter), 3);
}

/// The other limits are charged the cost.
#[test]
fn request_of_any_cost_takes_one_slot() {
    let rate = Limit::new("rate", Quota::per_minute(10).burst(10)).by("user");
    let (limiter, _) = limiter([slots(3), rate]);
    let alice = user("alice");
    let acquired = now(limiter.acquire(&alice).cost(4)).expect("a valid request");
    assert_eq!((free(&limiter), remaining(&limiter, "rate", &alice)), (2, 6));
    assert!(!now(limiter.acquire(&alice).cost(7)).expect("a valid request").decision.allowed());
    assert_eq!((free(&limiter), remaining(&limiter, "rate", &alice)), (2, 6), "all or nothing");
    drop(acquired);
    assert_eq!(
        (free(&limiter), remaining(&limiter, "rate", &alice)),
        (3, 6),
        "the charge at the rate limit stays"
    );
}

#[test]
fn dropped_guard_releases_its_slot() {
    let (limiter, _) = limiter([slots(1)]);
    for _ in 0..10 {
        let guard = held(&limiter, &user("alice"));
        assert_eq!(free(&limiter), 0);
        drop(guard);
        assert_eq!(free(&limiter), 1);
    }
}

#[test]
fn guard_releases_its_slot_on_panic() {
    let (limiter, _) = limiter([slots(1)]);
    let clone = limiter.clone();
    let worker = std::thread::spawn(move || {
        let _guard = held(&clone, &user("alice"));
        std::panic::resume_unwind(Box::new("the work failed"));
    });
    worker.join().expect_err("the thread panicked");
    assert_eq!(free(&limiter), 1);
}

#[test]
fn a_kept_slot_outlives_its_guard_until_it_is_released() {
    let (limiter, _) = limiter([slots(1)]);
    let slot = held(&limiter, &user("alice")).keep();
    assert_eq!(free(&limiter), 0);
    let text = limiter.seal_slot(&slot);
    let opened = limiter.open_slot(&text).wait().unwrap().expect("this store wrote it");
    assert!(release(&limiter, &opened), "the opened text names the slot");
    assert_eq!(free(&limiter), 1);
    assert!(!release(&limiter, &slot), "a slot is released once");
}

#[test]
fn slot_released_twice_frees_no_other_slot() {
    let (limiter, _) = limiter([slots(2)]);
    let first = held(&limiter, &user("alice")).keep();
    let _second = held(&limiter, &user("alice"));
    assert!(release(&limiter, &first));
    for _ in 0..3 {
        assert!(!release(&limiter, &first));
        assert_eq!(free(&limiter), 1);
    }
}

#[test]
fn slot_expires_at_its_ttl() {
    let (limiter, clock) = limiter([slots(1)]);
    let slot = held(&limiter, &user("alice")).keep();
    assert_eq!(slot.ttl(), secs(5));
    clock.set(START + Span::from_micros(4_999_999));
    assert_eq!(free(&limiter), 0);
    clock.set(START + secs(5));
    assert_eq!(free(&limiter), 1);
    let _next = held(&limiter, &user("alice"));
    assert!(!release(&limiter, &slot), "the slot has expired");
    assert_eq!(free(&limiter), 0, "the slot of the next holder is not released");
}

#[test]
fn renewal_restarts_the_ttl_and_fails_after_it() {
    let (limiter, clock) = limiter([slots(1)]);
    let guard = held(&limiter, &user("alice"));
    assert_eq!(guard.ttl(), secs(5));
    for _ in 0..5 {
        clock.advance(secs(4));
        assert!(now(guard.renew()).unwrap());
        assert_eq!(free(&limiter), 0);
    }
    clock.advance(secs(5));
    assert!(!now(guard.renew()).unwrap(), "the slot has expired");
    assert!(!now(limiter.renew(guard.slot())).unwrap());
    assert_eq!(free(&limiter), 1);
    let next = held(&limiter, &user("alice"));
    drop(guard);
    assert_eq!(free(&limiter), 0, "dropping a guard of an expired slot releases nothing");
    drop(next);
}

#[test]
fn refusal_suggests_one_second_or_the_first_expiry() {
    let (limiter, clock) = limiter([slots(2)]);
    let alice = user("alice");
    let _guards = (held(&limiter, &alice), held(&limiter, &alice));
    let check = |retry: Span| {
        let verdict = acquire(&limiter, &alice).decision.verdict();
        assert_eq!(verdict, Verdict::Deny { retry: Retry::After(retry) });
    };
    check(secs(1));
    clock.advance(millis(4_400));
    check(millis(600));
}

#[test]
fn rate_limit_cost_does_not_change_the_slot_count() {
    let tokens = Limit::new("tokens", Quota::per_minute(100)).by("user").cost("tokens");
    let (limiter, _) = limiter([slots(2), tokens]);
    let facts = Facts::new().with("user", "alice").with("tokens", 60);
    let first = acquire(&limiter, &facts);
    assert!(first.decision.allowed());
    assert_eq!(remaining(&limiter, "slots", &facts), 1);
    assert_eq!(remaining(&limiter, "tokens", &facts), 40);
    // The rate refuses: no slot is taken.
    assert!(!acquire(&limiter, &facts).decision.allowed());
    assert_eq!(remaining(&limiter, "slots", &facts), 1);
    // The charge at the rate limit can be refunded; the slot stays held until it is released.
    let charge = first.decision.charge().expect("the rate limit was charged");
    assert_eq!(charge.items().len(), 1);
    assert_eq!(now(limiter.refund(&charge)), tollkeeper::Correction::Done);
    assert_eq!((remaining(&limiter, "slots", &facts), remaining(&limiter, "tokens", &facts)), (1, 100));
}

#[test]
fn no_rate_is_charged_without_a_free_slot() {
    let (limiter, _) = limiter([ten(Algorithm::FixedWindow), slots(1)]);
    let alice = user("alice");
    let _guard = held(&limiter, &alice);
    for _ in 0..5 {
        assert!(!acquire(&limiter, &alice).decision.allowed());
    }
    assert_eq!(remaining(&limiter, "fixed-window", &alice), 9);
}

#[test]
fn request_holds_one_slot_of_each_concurrency_limit() {
    let all = Limit::new("all", Quota::slots(2)).ttl(Duration::from_secs(2));
    let (limiter, _) = limiter([slots(5), all]);
    let (alice, bob) = (user("alice"), user("bob"));
    let first = held(&limiter, &alice);
    assert_eq!(first.slot().items().len(), 2);
    assert_eq!(first.ttl(), secs(2), "the shorter of the two");
    let _second = held(&limiter, &bob);
    let refused = acquire(&limiter, &alice).decision;
    assert_eq!(refused.binding().unwrap().name(), "all");
    assert_eq!(free(&limiter), 4);
    assert!(now(first.renew()).unwrap());
    drop(first);
    assert_eq!(free(&limiter), 5);
    assert_eq!(remaining(&limiter, "all", &alice), 1);
}

#[test]
fn checks_take_no_slots_and_peeks_show_them() {
    let (limiter, _) = limiter([slots(1)]);
    let alice = user("alice");
    for _ in 0..5 {
        let decision = charge(&limiter, &alice, 1);
        assert!(decision.allowed() && decision.slot().is_none() && decision.binding().is_none());
        assert!(limiter.reserve(&alice, secs(60)).wait().unwrap().binding().is_none());
        assert!(limiter.peek(&alice).wait().unwrap().allowed());
    }
    let _guard = held(&limiter, &alice);
    assert!(!limiter.peek(&alice).wait().unwrap().allowed());
    assert!(charge(&limiter, &alice, 1).allowed());
}

#[test]
fn acquire_without_a_concurrency_limit_is_a_check() {
    let (limiter, _) = limiter([ten(Algorithm::FixedWindow)]);
    let acquired = acquire(&limiter, &user("alice"));
    assert!(acquired.decision.allowed() && acquired.slot.is_none());
    assert!(acquired.decision.charge().is_some());
}

/// No new slot is granted until enough are released.
#[test]
fn lowering_the_slot_limit_keeps_held_slots() {
    let (limiter, _) = limiter([slots(3)]);
    let alice = user("alice");
    let mut guards: Vec<SlotGuard> = (0..3).map(|_| held(&limiter, &alice)).collect();
    limiter.replace(vec![slots(2)]).unwrap();
    assert!(!acquire(&limiter, &alice).decision.allowed());
    assert!(now(guards[0].renew()).unwrap(), "the slot is still held");
    guards.pop();
    assert!(!acquire(&limiter, &alice).decision.allowed(), "two of two are held");
    guards.pop();
    assert!(acquire(&limiter, &alice).decision.allowed());
}

#[test]
fn forgetting_a_key_releases_its_slots() {
    let (limiter, _) = limiter([slots(1)]);
    let guard = held(&limiter, &user("alice"));
    assert_eq!(now(limiter.forget("slots", &user("alice"))), Ok(true));
    assert!(!now(guard.renew()).unwrap());
    let next = held(&limiter, &user("alice"));
    drop(guard);
    assert_eq!(free(&limiter), 0);
    drop(next);
}

#[test]
fn clock_stepping_back_holds_slots_for_two_ttls_at_most() {
    let (limiter, clock) = limiter([slots(1)]);
    let slot = held(&limiter, &user("alice")).keep();
    clock.set(tollkeeper::Time::from_micros(START.as_micros() - 3_600_000_000));
    let alice = user("alice");
    assert!(!acquire(&limiter, &alice).decision.allowed(), "the slot is still held");
    clock.advance(secs(5));
    assert!(acquire(&limiter, &alice).decision.allowed(), "its TTL was counted again from the step on");
    assert!(!release(&limiter, &slot));
}
