//! Conformance cases of corrections: what refund, reserve and settle change, and that each applies once.

use crate::{
    Algorithm, Charge, Correction, Costs, Facts, InvalidRequest, Limit, Limiter, Mode, Quota, facts,
};

use super::world::*;

async fn paid(limiter: &Limiter, facts: &Facts<'_>, cost: u64) -> Charge {
    charge(limiter, facts, cost).await.charge().expect("admitted and charged")
}

async fn reserved(limiter: &Limiter, facts: &Facts<'_>, cost: u64) -> Charge {
    let decision = limiter.reserve(facts, secs(60)).cost(cost).await.expect("a valid request");
    decided(decision).charge().expect("it is admitted")
}

async fn settle(limiter: &Limiter, charge: &Charge, actual: u64) -> Correction {
    limiter.settle(charge, Costs::Request(actual)).await.expect("a valid cost")
}

/// What remains of ten after a charge of six and a refund: a leaky bucket refunds nothing.
fn left(algorithm: Algorithm, given_back: u64) -> u64 {
    if algorithm == Algorithm::LeakyBucket { 4 } else { 4 + given_back }
}

pub(super) async fn refund(world: World) {
    for algorithm in RATES {
        let limiter = world.limiter([ten(algorithm)]);
        let (whole, part) = (user("whole"), user("part"));
        let charge = paid(&limiter, &whole, 6).await;
        assert_eq!(limiter.refund(&charge).await, Correction::Done, "{algorithm}");
        world.remains(&limiter, algorithm.name(), &whole, left(algorithm, 6)).await;
        let charge = paid(&limiter, &part, 6).await;
        let more = InvalidRequest::MoreThanCharged { asked: 7, charged: 6 };
        assert_eq!(limiter.refund_part(&charge, Costs::Request(7)).await, Err(more), "{algorithm}");
        world.remains(&limiter, algorithm.name(), &part, 4).await;
        assert_eq!(
            limiter.refund_part(&charge, Costs::Request(2)).await,
            Ok(Correction::Done),
            "{algorithm}"
        );
        world.remains(&limiter, algorithm.name(), &part, left(algorithm, 2)).await;
        // A key that is fresh again has nothing left to refund.
        let forgotten = user("forgotten");
        let charge = paid(&limiter, &forgotten, 6).await;
        assert_eq!(limiter.forget(algorithm.name(), &forgotten).await, Ok(true));
        assert_eq!(limiter.refund(&charge).await, Correction::Done, "{algorithm}");
        world.remains(&limiter, algorithm.name(), &forgotten, 10).await;
    }
}

pub(super) async fn once(world: World) {
    for algorithm in RATES {
        let limiter = world.limiter([ten(algorithm)]);
        let alice = user("alice");
        let charge = paid(&limiter, &alice, 3).await;
        paid(&limiter, &alice, 3).await;
        assert_eq!(limiter.refund(&charge).await, Correction::Done, "{algorithm}");
        for _ in 0..3 {
            assert_eq!(limiter.refund(&charge).await, Correction::Repeated, "{algorithm}");
            assert_eq!(limiter.refund_part(&charge, Costs::Request(1)).await, Ok(Correction::Repeated));
            assert_eq!(settle(&limiter, &charge, 0).await, Correction::Repeated, "{algorithm}");
            assert_eq!(settle(&limiter, &charge, 9).await, Correction::Repeated, "{algorithm}");
        }
        world.remains(&limiter, algorithm.name(), &alice, left(algorithm, 3)).await;
        // Of many concurrent refunds from two nodes, exactly one applies.
        let (other, charge) = (world.limiter([ten(algorithm)]), paid(&limiter, &user("bob"), 3).await);
        let mut done = 0;
        let tasks: Vec<_> = (0..16)
            .map(|task| {
                let (limiter, charge) =
                    (if task % 2 == 0 { limiter.clone() } else { other.clone() }, charge.clone());
                tokio::spawn(async move { limiter.refund(&charge).await })
            })
            .collect();
        for task in tasks {
            match task.await.expect("it ends") {
                Correction::Done => done += 1,
                correction => assert_eq!(correction, Correction::Repeated, "{algorithm}"),
            }
        }
        assert_eq!(done, 1, "{algorithm}");
    }
}

pub(super) async fn late(world: World) {
    for algorithm in RATES {
        let short = Limit::new(algorithm.name(), Quota::per(10, millis(100))).by("user").algorithm(algorithm);
        let limiter = world.limiter([short]);
        let alice = user("alice");
        let old = paid(&limiter, &alice, 10).await;
        wait_until(&limiter, &alice, old.void_at()).await;
        let (_, at) = exhaust(&limiter, &alice, 5).await;
        assert_eq!(limiter.refund(&old).await, Correction::Unknown, "{algorithm}");
        assert_eq!(settle(&limiter, &old, 0).await, Correction::Unknown, "{algorithm}");
        assert_eq!(settle(&limiter, &old, 20).await, Correction::Unknown, "{algorithm}");
        // If the refund had freed anything, they would pass earlier; if it had charged anything, later.
        changes_at(algorithm.name(), at, async || {
            let peek = peek(&limiter, &alice, 5).await;
            (peek.time(), peek.allowed())
        })
        .await;
    }
}

pub(super) async fn every_limit(world: World) {
    let shadow = Limit::new("shadow", Quota::per_day(4)).by("user").mode(Mode::Shadow);
    let untouched = Limit::new("untouched", Quota::per_day(4)).by("user").when("route", "/other");
    let limiter = world.limiter(RATES.map(ten).into_iter().chain([shadow, untouched]));
    let alice = user("alice");
    let first = paid(&limiter, &alice, 3).await;
    let second = paid(&limiter, &alice, 3).await; // the shadow did not charge this one
    world.remains(&limiter, "shadow", &alice, 1).await;
    assert_eq!(limiter.refund(&second).await, Correction::Done);
    for algorithm in RATES {
        world.remains(&limiter, algorithm.name(), &alice, left(algorithm, 3)).await;
    }
    world.remains(&limiter, "shadow", &alice, 1).await;
    assert_eq!(limiter.refund(&first).await, Correction::Done);
    world.remains(&limiter, "shadow", &alice, 4).await;
    // The cost of a fact and the cost of the request are corrected separately.
    let tokens = Limit::new("tokens", Quota::per_day(1_000)).by("user").cost("tokens");
    let limiter = world.limiter([tokens, Limit::new("calls", Quota::per_day(10)).by("user")]);
    let asked = facts! { "user" => "alice", "tokens" => 600 };
    let first = paid(&limiter, &asked, 2).await;
    let actual = facts! { "tokens" => 100 };
    assert_eq!(limiter.settle(&first, Costs::Facts(&actual)).await, Ok(Correction::Done));
    world.remains(&limiter, "tokens", &asked, 900).await;
    world.remains(&limiter, "calls", &asked, 8).await;
    let second = paid(&limiter, &asked, 2).await;
    assert_eq!(limiter.refund_part(&second, Costs::Request(1)).await, Ok(Correction::Done));
    world.remains(&limiter, "tokens", &asked, 300).await;
    world.remains(&limiter, "calls", &asked, 7).await;
}

pub(super) async fn surplus(world: World) {
    for algorithm in RATES {
        let limiter = world.limiter([ten(algorithm)]);
        let alice = user("alice");
        let charge = reserved(&limiter, &alice, 6).await;
        assert_eq!(settle(&limiter, &charge, 1).await, Correction::Done, "{algorithm}");
        world.remains(&limiter, algorithm.name(), &alice, left(algorithm, 5)).await;
        assert_eq!(settle(&limiter, &charge, 0).await, Correction::Repeated, "{algorithm}");
        assert_eq!(limiter.refund(&charge).await, Correction::Repeated, "{algorithm}");
        // The actual cost equals the estimate: `Done`, and nothing changes.
        let exact = reserved(&limiter, &user("bob"), 6).await;
        assert_eq!(settle(&limiter, &exact, 6).await, Correction::Done, "{algorithm}");
        assert_eq!(limiter.refund(&exact).await, Correction::Repeated, "{algorithm}");
        world.remains(&limiter, algorithm.name(), &user("bob"), 4).await;
        // A plain charge can be settled too.
        let plain = paid(&limiter, &user("carol"), 6).await;
        assert_eq!(settle(&limiter, &plain, 4).await, Correction::Done, "{algorithm}");
        world.remains(&limiter, algorithm.name(), &user("carol"), left(algorithm, 2)).await;
    }
}

pub(super) async fn shortfall(world: World) {
    for algorithm in RATES {
        let wide = || Limit::new(algorithm.name(), Quota::per_day(1_000)).by("user").algorithm(algorithm);
        let (limiter, wide) = (world.limiter([ten(algorithm)]), world.limiter([wide()]));
        for (actual, used) in [(6, 6), (9, 9), (10, 10), (13, 13), (20, 20), (21, 20), (1 << 31, 20)] {
            let name = format!("{actual}");
            let facts = user(&name);
            let charge = reserved(&limiter, &facts, 6).await;
            assert_eq!(settle(&limiter, &charge, actual).await, Correction::Done, "{algorithm}");
            // The total charge, read through a limit that is a hundred times as large.
            world.remains(&wide, algorithm.name(), &facts, 1_000 - used).await;
            let next = super::world::charge(&limiter, &facts, 1).await;
            assert_eq!(next.allowed(), used < 10, "{algorithm}: {actual}");
        }
        // It adds to what others have used meanwhile, also on a key that is fresh again.
        let (busy, fresh) = (user("busy"), user("fresh"));
        let charge = reserved(&limiter, &busy, 5).await;
        paid(&limiter, &busy, 5).await;
        assert_eq!(settle(&limiter, &charge, 8).await, Correction::Done, "{algorithm}");
        world.remains(&wide, algorithm.name(), &busy, 1_000 - 13).await;
        let charge = reserved(&limiter, &fresh, 5).await;
        assert_eq!(limiter.forget(algorithm.name(), &fresh).await, Ok(true));
        assert_eq!(settle(&limiter, &charge, 8).await, Correction::Done, "{algorithm}");
        world.remains(&wide, algorithm.name(), &fresh, 1_000 - 3).await;
    }
}

pub(super) async fn not_settled(world: World) {
    let limiter = world.limiter(RATES.map(ten));
    let alice = user("alice");
    let ttl = secs(1);
    let decision = decided(limiter.reserve(&alice, ttl).cost(6).await.expect("a valid request"));
    let charge = decision.charge().expect("admitted");
    assert_eq!(charge.void_at(), decision.time() + ttl);
    wait_until(&limiter, &alice, charge.void_at()).await;
    assert_eq!(settle(&limiter, &charge, 0).await, Correction::Unknown);
    assert_eq!(settle(&limiter, &charge, 100).await, Correction::Unknown);
    assert_eq!(limiter.refund(&charge).await, Correction::Unknown);
    for algorithm in RATES {
        world.remains(&limiter, algorithm.name(), &alice, 4).await;
    }
    for ttl in [millis(999), millis(3_600_001)] {
        assert!(limiter.reserve(&alice, ttl).await.is_err(), "a second to an hour");
    }
}

pub(super) async fn as_text(world: World) {
    for algorithm in RATES {
        let limits = || {
            let tokens = Limit::new("tokens", Quota::per_day(1_000)).by("user").cost("tokens");
            let own = Limit::new("own", Quota::per_day(50)).by("user").algorithm(Algorithm::FixedWindow);
            [tokens, ten(algorithm), own.stagger()]
        };
        let (here, there) = (world.limiter(limits()), world.limiter(limits()));
        usage(&there, &user("anybody")).await; // a node fetches the secret with its first call
        let long = format!("{algorithm} ").repeat(60);
        for name in [algorithm.name(), &format!("{algorithm}\0\n{{:%}}"), &long] {
            let asked = facts! { "user" => name, "tokens" => 100 };
            let charge = paid(&here, &asked, 6).await;
            let text = here.seal_charge(&charge);
            assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte)), "{text}");
            let opened =
                there.open_charge(&text).await.expect("it answers").expect("a node of the same store");
            assert_eq!((opened.id(), opened.void_at()), (charge.id(), charge.void_at()));
            assert_eq!(there.seal_charge(&opened), text, "a charge has one text");
            assert_eq!(there.refund(&opened).await, Correction::Done, "{algorithm}");
            assert_eq!(here.refund(&charge).await, Correction::Repeated, "{algorithm}: they are one charge");
            world.remains(&here, "tokens", &asked, 1_000).await;
            world.remains(&there, "own", &asked, 50).await;
            world.remains(&there, algorithm.name(), &asked, left(algorithm, 6)).await;
        }
        // A reservation keeps its time and the fact of its cost.
        let name = format!("{algorithm} reserved");
        let asked = facts! { "user" => &name, "tokens" => 100 };
        let text = here.seal_charge(&reserved(&here, &asked, 2).await);
        let opened = there.open_charge(&text).await.expect("it answers").expect("a node of the same store");
        let actual = facts! { "tokens" => 30 };
        assert_eq!(there.settle(&opened, Costs::Facts(&actual)).await, Ok(Correction::Done));
        world.remains(&here, "tokens", &asked, 970).await;
        world.remains(&here, "own", &asked, 48).await;
    }
}

pub(super) async fn forged(world: World) {
    let limits = || [ten(Algorithm::FixedWindow), Limit::new("slots", Quota::slots(3)).by("user")];
    let (limiter, stranger) = (world.limiter(limits()), world.unrelated().limiter(limits()));
    let alice = user("alice");
    usage(&stranger, &alice).await;
    let text = limiter.seal_charge(&paid(&limiter, &alice, 6).await);
    assert!(limiter.open_charge(&text).await.expect("it answers").is_some());
    assert!(
        stranger.open_charge(&text).await.expect("it answers").is_none(),
        "each store has its own secret"
    );
    for place in 0..text.len() {
        let other = if &text[place..=place] == "A" { "B" } else { "A" };
        let forged = [&text[..place], other, &text[place + 1..]].concat();
        assert!(limiter.open_charge(&forged).await.expect("it answers").is_none(), "{forged}");
        assert!(
            limiter.open_charge(&text[..place]).await.expect("it answers").is_none(),
            "cut off at {place}"
        );
    }
    for nonsense in [&*format!("{text}A"), "", "x", "\0", "a b", "äöü", &"A".repeat(10_000)] {
        assert!(
            limiter.open_charge(nonsense).await.expect("it answers").is_none()
                && limiter.open_slot(nonsense).await.expect("it answers").is_none()
        );
    }
    let held = limiter.acquire(&alice).await.expect("a valid request").slot.expect("one is free");
    let slot = limiter.seal_slot(held.slot());
    assert!(
        limiter.open_slot(&slot).await.expect("it answers").is_some()
            && stranger.open_slot(&slot).await.expect("it answers").is_none()
    );
    assert!(limiter.open_charge(&slot).await.expect("it answers").is_none(), "a slot is not a charge");
    assert!(limiter.open_slot(&text).await.expect("it answers").is_none(), "a charge is not a slot");
    assert!(limiter.release(&held.keep()).await.expect("it answers"));
    // A receipt of another store, passed as a value, names keys that are not charged here.
    let foreign = paid(&stranger, &alice, 4).await;
    limiter.refund(&foreign).await;
    world.remains(&stranger, "fixed-window", &alice, 6).await;
}
