//! Conformance cases of times: waits, resets and delays are exact on the store's clock.

use std::future::{IntoFuture, poll_fn};
use std::task::Poll;

use crate::{Algorithm, Correction, Costs, Facts, Limit, Quota, Span, Time};

use super::StoredKey;
use super::world::*;

/// A few in a tenth of a second, by user.
fn short(algorithm: Algorithm) -> Limit {
    Limit::new(algorithm.name(), Quota::per(4, millis(120))).by("user").algorithm(algorithm)
}

pub(super) async fn retry(world: World) {
    let staggered = short(Algorithm::FixedWindow).stagger();
    for limit in RATES.map(short).into_iter().chain([staggered]) {
        let what = format!("{limit:?}");
        let limiter = world.limiter([limit]);
        // All of it at once, and one more after all of it.
        for (name, costs) in [("all", [4, 4]), ("one", [4, 1]), ("two", [3, 2])] {
            let facts = user(name);
            loop {
                charge(&limiter, &facts, costs[0]).await;
                let refused = charge(&limiter, &facts, costs[1]).await;
                let Some(retry) = refused.retry_after() else { continue };
                changes_at(&what, refused.time() + retry, async || {
                    let peek = peek(&limiter, &facts, costs[1]).await;
                    (peek.time(), peek.allowed())
                })
                .await;
                assert!(
                    charge(&limiter, &facts, costs[1]).await.allowed(),
                    "{what}: a peek agrees with a check"
                );
                break;
            }
        }
    }
    // Layered: the longest of all waits is enough. Limits on several servers share no clock that could prove it to
    // the microsecond: there the case only asserts that waiting helps.
    let limiter = world.limiter(RATES.map(short));
    let facts = user("layered");
    let (_, at) = exhaust(&limiter, &facts, 2).await;
    if world.rolls_back() {
        wait_until(&limiter, &facts, at).await;
        while !peek(&limiter, &facts, 2).await.allowed() {}
        return;
    }
    changes_at("layered", at, async || {
        let peek = peek(&limiter, &facts, 2).await;
        (peek.time(), peek.allowed())
    })
    .await;
}

pub(super) async fn reset(world: World) {
    for algorithm in RATES {
        let limiter = world.limiter([short(algorithm)]);
        let facts = user("alice");
        let decision = charge(&limiter, &facts, 3).await;
        let reset = decision.binding().expect("a limit").outcome().reset_after.expect("it is known");
        changes_at(algorithm.name(), decision.time() + reset, async || {
            let usage = usage(&limiter, &facts).await;
            let outcome = usage.limit(algorithm.name()).expect("it applies").outcome();
            let new = (outcome.remaining, outcome.reset_after) == (4, Some(Span::ZERO));
            (usage.time(), new)
        })
        .await;
    }
}

pub(super) async fn next(world: World) {
    for algorithm in RATES {
        let limiter = world.limiter([short(algorithm)]);
        let facts = user("alice");
        let fresh = usage(&limiter, &facts).await;
        assert_eq!(
            fresh.limits().next().expect("a limit").outcome().next_after,
            Some(Span::ZERO),
            "{algorithm}"
        );
        let decision = charge(&limiter, &facts, 2).await;
        let outcome = decision.binding().expect("a limit").outcome();
        let at = decision.time() + outcome.next_after.expect("it comes");
        changes_at(algorithm.name(), at, async || {
            let usage = usage(&limiter, &facts).await;
            let now = usage.limit(algorithm.name()).expect("it applies").outcome().remaining;
            (usage.time(), now > outcome.remaining)
        })
        .await;
    }
}

/// Five wait in line, one leaves every 8640 seconds.
fn queue() -> Limit {
    Limit::new("queue", Quota::per_day(10).burst(5)).by("user").algorithm(Algorithm::LeakyBucket)
}

/// When the n-th after `first` leaves: a position in the queue is a tenth of a day, and ticks are milliseconds.
fn leaves(first: Time, place: u64) -> Time {
    Time::from_micros(first.as_micros() / 1_000 * 1_000) + Span::from_secs(8_640 * place)
}

pub(super) async fn leaky_delay(world: World) {
    let limiter = world.limiter([queue()]);
    let alice = user("alice");
    let first = charge(&limiter, &alice, 1).await;
    assert_eq!((first.allowed(), first.delay()), (true, Span::ZERO));
    for place in 1..5 {
        let peek = peek(&limiter, &alice, 1).await;
        assert_eq!(
            peek.time() + peek.delay(),
            leaves(first.time(), place),
            "the delay that a check would get"
        );
        let decision = charge(&limiter, &alice, 1).await;
        assert!(decision.allowed());
        assert_eq!(decision.time() + decision.delay(), leaves(first.time(), place));
    }
    let refused = charge(&limiter, &alice, 1).await;
    assert_eq!((refused.allowed(), refused.delay()), (false, Span::ZERO));
    assert_eq!(
        refused.time() + refused.retry_after().expect("a place will be free"),
        leaves(first.time(), 1)
    );
    // Three at once leave when the first of them may.
    let bob = user("bob");
    let first = charge(&limiter, &bob, 3).await;
    let second = charge(&limiter, &bob, 2).await;
    assert_eq!(first.delay(), Span::ZERO);
    assert_eq!(second.time() + second.delay(), leaves(first.time(), 3));
}

pub(super) async fn hold(world: World) {
    let limiter = world.limiter([queue()]);
    let alice = user("alice");
    let check = async |hold: Span| decided(limiter.check(&alice).hold(hold).await.expect("a valid request"));
    let first = check(Span::ZERO).await;
    assert_eq!((first.allowed(), first.delay()), (true, Span::ZERO));
    for hold in [Span::ZERO, secs(60), secs(8_000)] {
        let refused = check(hold).await;
        assert!(!refused.allowed() && refused.charge().is_none());
        let retry = refused.retry_after().expect("waiting helps");
        assert_eq!(refused.time() + retry + hold, leaves(first.time(), 1), "the rest of the wait");
    }
    world.remains(&limiter, "queue", &alice, 4).await;
    let second = check(secs(8_640)).await;
    assert!(second.allowed());
    assert_eq!(second.time() + second.delay(), leaves(first.time(), 1));
    // A request refused for its delay is charged by no other limit.
    let limiter = world.limiter([queue(), ten(Algorithm::FixedWindow)]);
    for _ in 0..3 {
        let refused = decided(limiter.check(&alice).hold(secs(60)).await.expect("a valid request"));
        assert!(!refused.allowed() && refused.charge().is_none());
    }
    world.remains(&limiter, "fixed-window", &alice, 10).await;
    world.remains(&limiter, "queue", &alice, 3).await;
}

pub(super) async fn staggered(world: World) {
    let limit =
        || Limit::new("limit", Quota::per_day(3)).by("user").algorithm(Algorithm::FixedWindow).stagger();
    let (limiter, other) = (world.limiter([limit()]), world.limiter([limit()]));
    let mut ends = std::collections::BTreeSet::new();
    for number in 0..20 {
        let name = format!("user-{number}");
        let facts = user(&name);
        let decision = charge(&limiter, &facts, 2).await;
        let reset = decision.binding().expect("a limit").outcome().reset_after.expect("it is known");
        assert!(reset <= secs(86_400));
        let end = (decision.time() + reset).as_micros();
        ends.insert(end);
        // Every node shifts a key by the same offset and sees one count.
        let second = charge(&other, &facts, 1).await;
        let reset = second.binding().expect("a limit").outcome().reset_after.expect("it is known");
        assert_eq!((second.allowed(), (second.time() + reset).as_micros()), (true, end), "{name}");
        let refused = charge(&limiter, &facts, 1).await;
        let retry = refused.retry_after().expect("the window ends");
        assert_eq!((refused.time() + retry).as_micros(), end, "{name}");
        // A charge in a staggered window is refunded in that window.
        assert_eq!(other.refund(&decision.charge().expect("admitted")).await, Correction::Done);
        world.remains(&limiter, "limit", &facts, 2).await;
    }
    assert!(ends.len() > 10, "windows end at {} different times", ends.len());
    let plain =
        world.limiter([Limit::new("plain", Quota::per_day(3)).by("user").algorithm(Algorithm::FixedWindow)]);
    let decision = charge(&plain, &user("alice"), 1).await;
    let reset = decision.binding().expect("a limit").outcome().reset_after.expect("it is known");
    assert_eq!((decision.time() + reset).as_micros() % 86_400_000_000, 0, "a day is a UTC day");
}

pub(super) async fn until_allowed(world: World) {
    // One unit each 20 ms; but a settled shortfall uses up the first two seconds, so that all requests that arrive
    // meanwhile have to wait.
    let limit = Limit::new("limit", Quota::per(1, millis(20)).burst(100));
    let limiter = world.limiter([limit]);
    let nobody = Facts::new();
    world.needs(secs(60));
    let reserved = decided(limiter.reserve(&nobody, secs(60)).cost(100).await.expect("a valid request"));
    let charge = reserved.charge().expect("admitted");
    assert_eq!(limiter.settle(&charge, Costs::Request(200)).await, Ok(Correction::Done));
    let mut waiting: Vec<_> = (0..8).map(|_| Some(limiter.until_allowed(&nobody).into_future())).collect();
    let mut passed = Vec::new();
    // The first is refused and queues; all later ones queue behind it.
    let first = waiting[0].as_mut().expect("it waits");
    tokio::select! {
        _ = first => panic!("nothing is free"),
        () = wait_until(&limiter, &nobody, reserved.time() + secs(1)) => {}
    }
    poll_fn(|context| {
        for (number, place) in waiting.iter_mut().enumerate() {
            let Some(future) = place else { continue };
            if let Poll::Ready(decision) = future.as_mut().poll(context) {
                let decision = decided(decision.expect("a valid request"));
                assert!(decision.allowed());
                passed.push((number, decision.time()));
                *place = None;
            }
        }
        if waiting.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    let numbers: Vec<usize> = passed.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, (0..8).collect::<Vec<_>>());
    assert!(passed.is_sorted_by_key(|(_, time)| *time), "{passed:?}");
    assert!(passed[0].1 >= reserved.time() + secs(2), "a request passed too early");
    let never = decided(limiter.until_allowed(&nobody).cost(101).await.expect("a valid request"));
    assert!(!never.allowed(), "a cost that never fits is refused at once");
}

pub(super) async fn expiry(world: World) {
    let quotas = [Quota::per_day(10), Quota::per_minute(10), Quota::per_second(10)];
    for (algorithm, quota) in RATES.into_iter().flat_map(|algorithm| quotas.map(|quota| (algorithm, quota))) {
        let limit = Limit::new(algorithm.name(), quota).by("user").algorithm(algorithm);
        let limiter = world.limiter([limit]);
        let name = format!("user-{}", quota.period().expect("a rate").as_micros());
        let facts = user(&name);
        let before = world.keys();
        let decision = charge(&limiter, &facts, 4).await;
        let charge = decision.charge().expect("admitted");
        let fresh = decision.binding().expect("a limit").outcome().reset_after.expect("it is known");
        if !world.lists_keys() {
            continue;
        }
        let news = |before: &[StoredKey]| {
            let mut keys = world.keys();
            keys.retain(|key| before.iter().all(|other| other.name != key.name));
            keys
        };
        // A period of one second may be over before its key is read.
        let found = news(&before);
        if let [key] = &found[..] {
            within(key, decision.time(), decision.time() + fresh);
        } else {
            assert!(found.is_empty() && quota.period() <= Some(secs(1)), "{algorithm}: {found:?}");
        }
        let before = world.keys();
        if limiter.refund(&charge).await == Correction::Done {
            for key in news(&before) {
                within(&key, decision.time(), charge.void_at());
            }
        }
    }
    let slots = Limit::new("slots", Quota::slots(3)).by("user").ttl(millis(30_000));
    let limiter = world.limiter([slots]);
    let before = world.keys();
    let held = limiter.acquire(&user("slots")).await.expect("a valid request");
    for key in world.keys() {
        if before.iter().all(|other| other.name != key.name) {
            within(&key, held.decision.time(), held.decision.time() + secs(30));
        }
    }
    drop(held.slot.expect("one is free").keep());
}

/// Asserts that a key written at `written` and needed until `until` expires neither earlier nor much later.
fn within(key: &StoredKey, written: Time, until: Time) {
    let StoredKey { name: key, expires } = key;
    let expires = expires.expect("it expires").as_micros();
    let needed = until.since(written).as_micros();
    let latest = until.as_micros() + needed.min(60_000_000) + 1_000_000;
    assert!(expires >= until.as_micros(), "`{key}` expires {} µs early", until.as_micros() - expires);
    assert!(expires <= latest, "`{key}` expires {} µs late", expires - latest);
}
