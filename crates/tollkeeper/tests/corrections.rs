//! Refund, reserve and settle: what can be refunded, what cannot, and that a charge is corrected at most once.

#![expect(clippy::unwrap_used, reason = "test helpers may panic like tests")]

mod support;

use support::*;
use tollkeeper::{
    Algorithm, Charge, Correction, Costs, Decision, Facts, InvalidRequest, Limit, Limiter, ManualClock, Mode,
    Quota, Retry, Span, Verdict, facts,
};

/// Checks a request, which must be admitted, and returns its charge.
fn paid(limiter: &Limiter, facts: &Facts<'_>, cost: u64) -> Charge {
    charge(limiter, facts, cost).charge().expect("the request is admitted and charged")
}

fn refund(limiter: &Limiter, charge: &Charge) -> Correction {
    now(limiter.refund(charge))
}

fn settle(limiter: &Limiter, charge: &Charge, actual: u64) -> Correction {
    now(limiter.settle(charge, Costs::Request(actual))).expect("a valid cost")
}

fn reserved(limiter: &Limiter, facts: &Facts<'_>, cost: u64) -> Charge {
    let decision: Decision = limiter.reserve(facts, secs(60)).cost(cost).wait().expect("valid");
    decision.charge().expect("the reservation is admitted")
}

/// Ten units per minute: charges `first`, advances the clock by `after`, refunds, and compares what remains.
fn check(algorithm: Algorithm, first: u64, after: Span, expected: Correction, remain: u64) {
    let (limiter, clock) = limiter([ten(algorithm)]);
    let alice = user("alice");
    let charge = paid(&limiter, &alice, first);
    clock.advance(after);
    assert_eq!(refund(&limiter, &charge), expected, "{algorithm} after {after}");
    assert_eq!(remaining(&limiter, algorithm.name(), &alice), remain, "{algorithm} after {after}");
}

#[test]
fn fixed_window_refunds_within_the_window() {
    check(Algorithm::FixedWindow, 4, Span::ZERO, Correction::Done, 10);
    check(Algorithm::FixedWindow, 4, Span::from_micros(59_999_999), Correction::Done, 10);
    check(Algorithm::FixedWindow, 4, secs(60), Correction::Unknown, 10);
}

/// The rest comes from the previous window.
#[test]
fn sliding_window_refunds_the_current_window_first() {
    check(Algorithm::SlidingWindow, 10, Span::ZERO, Correction::Done, 10);
    check(Algorithm::SlidingWindow, 10, secs(59), Correction::Done, 10);
    check(Algorithm::SlidingWindow, 10, secs(60), Correction::Done, 10);
    check(Algorithm::SlidingWindow, 10, Span::from_micros(119_999_999), Correction::Done, 10);
    check(Algorithm::SlidingWindow, 10, secs(120), Correction::Unknown, 10);
}

#[test]
fn sliding_log_refunds_a_charge_within_the_period() {
    check(Algorithm::SlidingLog, 4, Span::ZERO, Correction::Done, 10);
    check(Algorithm::SlidingLog, 4, Span::from_micros(59_999_999), Correction::Done, 10);
    check(Algorithm::SlidingLog, 4, secs(60), Correction::Unknown, 10);
}

#[test]
fn leaky_bucket_refunds_nothing() {
    check(Algorithm::LeakyBucket, 4, Span::ZERO, Correction::Done, 6);
    check(Algorithm::LeakyBucket, 4, secs(6), Correction::Done, 7);
}

#[test]
fn token_bucket_refund_decreases_with_time() {
    let check = |after: Span, expected: Correction, remain: u64| {
        let (limiter, clock) = limiter([ten(Algorithm::TokenBucket)]);
        let alice = user("alice");
        let first = paid(&limiter, &alice, 5);
        paid(&limiter, &alice, 5);
        clock.advance(after);
        assert_eq!(refund(&limiter, &first), expected, "after {after}");
        assert_eq!(remaining(&limiter, "token-bucket", &alice), remain, "after {after}");
    };
    check(Span::ZERO, Correction::Done, 5);
    // Two of ten have drained. Both may be of the first five, so three are refunded.
    check(secs(12), Correction::Done, 5);
    check(Span::from_micros(29_999_999), Correction::Done, 5);
    // All of the first charge may have drained, so nothing is refunded; five have drained anyway.
    check(secs(30), Correction::Unknown, 5);
}

#[test]
fn token_bucket_refunds_what_has_not_drained() {
    let (limiter, clock) = limiter([ten(Algorithm::TokenBucket)]);
    let alice = user("alice");
    let first = paid(&limiter, &alice, 5);
    paid(&limiter, &alice, 5);
    clock.advance(secs(24));
    // Four have drained, so at least one of the five has not: of a partial refund of three, one is refunded.
    assert_eq!(now(limiter.refund_part(&first, Costs::Request(3))), Ok(Correction::Done));
    assert_eq!(remaining(&limiter, "token-bucket", &alice), 5);
}

#[test]
fn a_charge_is_refunded_or_settled_once() {
    for algorithm in RATES {
        let (limiter, _) = limiter([ten(algorithm)]);
        let alice = user("alice");
        let charge = paid(&limiter, &alice, 4);
        paid(&limiter, &alice, 4);
        assert_eq!(refund(&limiter, &charge), Correction::Done, "{algorithm}");
        let left = remaining(&limiter, algorithm.name(), &alice);
        assert_eq!(left, if algorithm == Algorithm::LeakyBucket { 2 } else { 6 }, "{algorithm}");
        assert_eq!(refund(&limiter, &charge), Correction::Repeated, "{algorithm}");
        assert_eq!(now(limiter.refund_part(&charge, Costs::Request(1))), Ok(Correction::Repeated));
        assert_eq!(settle(&limiter, &charge, 0), Correction::Repeated, "{algorithm}");
        assert_eq!(settle(&limiter, &charge, 9), Correction::Repeated, "{algorithm}");
        assert_eq!(remaining(&limiter, algorithm.name(), &alice), left, "{algorithm}");
    }
}

#[test]
fn late_refund_frees_no_newer_use() {
    for algorithm in RATES {
        let (limiter, clock) = limiter([ten(algorithm)]);
        let alice = user("alice");
        let old = paid(&limiter, &alice, 10);
        clock.advance(secs(120));
        paid(&limiter, &alice, 10);
        assert_eq!(refund(&limiter, &old), Correction::Unknown, "{algorithm}");
        assert!(!charge(&limiter, &alice, 1).allowed(), "{algorithm}");
    }
}

/// A second, longer limit keeps the charge valid.
#[test]
fn late_refund_frees_nothing_newer_at_a_shorter_limit() {
    for algorithm in RATES {
        let day = Limit::new("day", Quota::per_day(100)).algorithm(Algorithm::FixedWindow);
        let (limiter, clock) = limiter([day, ten(algorithm)]);
        let alice = user("alice");
        let old = paid(&limiter, &alice, 10);
        clock.advance(secs(120));
        paid(&limiter, &alice, 10);
        // The charge still counts at `day`, and is void at the limit of a minute.
        assert_eq!(refund(&limiter, &old), Correction::Done, "{algorithm}");
        assert_eq!(remaining(&limiter, "day", &alice), 90, "{algorithm}");
        assert_eq!(remaining(&limiter, algorithm.name(), &alice), 0, "{algorithm}");
    }
}

#[test]
fn partial_refund_is_capped_at_the_charge() {
    for algorithm in RATES {
        let (limiter, _) = limiter([ten(algorithm)]);
        let alice = user("alice");
        let charge = paid(&limiter, &alice, 6);
        let more = InvalidRequest::MoreThanCharged { asked: 7, charged: 6 };
        assert_eq!(now(limiter.refund_part(&charge, Costs::Request(7))), Err(more), "{algorithm}");
        assert_eq!(remaining(&limiter, algorithm.name(), &alice), 4, "{algorithm}");
        assert_eq!(now(limiter.refund_part(&charge, Costs::Request(2))), Ok(Correction::Done), "{algorithm}");
        let expected = if algorithm == Algorithm::LeakyBucket { 4 } else { 6 };
        assert_eq!(remaining(&limiter, algorithm.name(), &alice), expected, "{algorithm}");
    }
}

#[test]
fn refund_reaches_every_limit_of_the_toll_and_no_other() {
    let shadow = Limit::new("shadow", Quota::per_minute(4)).by("user").mode(Mode::Shadow);
    let limits = [Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog].map(ten);
    let (limiter, _) = limiter(limits.into_iter().chain([shadow]));
    let alice = user("alice");
    let first = paid(&limiter, &alice, 3);
    let second = paid(&limiter, &alice, 3); // the shadow limit does not charge this one
    assert_eq!(remaining(&limiter, "shadow", &alice), 1);
    assert_eq!(refund(&limiter, &second), Correction::Done);
    for name in ["fixed-window", "sliding-window", "sliding-log"] {
        assert_eq!(remaining(&limiter, name, &alice), 7);
    }
    assert_eq!(remaining(&limiter, "shadow", &alice), 1);
    assert_eq!(refund(&limiter, &first), Correction::Done);
    assert_eq!(remaining(&limiter, "shadow", &alice), 4);
}

#[test]
fn cost_facts_are_corrected_separately() {
    let tokens = Limit::new("tokens", Quota::per_minute(1_000)).by("user").cost("tokens");
    let (limiter, _) = limiter([tokens, ten(Algorithm::FixedWindow)]);
    let facts = facts! { "user" => "alice", "tokens" => 600 };
    let left = || (remaining(&limiter, "tokens", &facts), remaining(&limiter, "fixed-window", &facts));
    let first = paid(&limiter, &facts, 2);
    assert_eq!(left(), (400, 8));
    let actual = facts! { "tokens" => 100 };
    assert_eq!(now(limiter.settle(&first, Costs::Facts(&actual))), Ok(Correction::Done));
    assert_eq!(left(), (900, 8));
    let second = paid(&limiter, &facts, 2);
    assert_eq!(now(limiter.refund_part(&second, Costs::Request(1))), Ok(Correction::Done));
    assert_eq!(left(), (300, 7));
    let bad = facts! { "tokens" => "many" };
    assert!(now(limiter.settle(&second, Costs::Facts(&bad))).is_err());
    let large = now(limiter.settle(&second, Costs::Request(u64::MAX)));
    assert_eq!(large, Err(InvalidRequest::Cost(u64::MAX)));
}

#[test]
fn refund_under_a_raised_rate_counts_what_has_drained() {
    let (limiter, clock) = limiter([ten(Algorithm::TokenBucket)]);
    let alice = user("alice");
    let charge = paid(&limiter, &alice, 5);
    let faster = Limit::new("token-bucket", Quota::per_minute(60).burst(10)).by("user");
    limiter.replace(vec![faster]).unwrap();
    clock.advance(secs(1));
    // At 60 per minute one of the five may have drained: four are refunded, and the rest of the level
    // drains at the slower of the two rates.
    assert_eq!(refund(&limiter, &charge), Correction::Done);
    assert_eq!(remaining(&limiter, "token-bucket", &alice), 9);
}

#[test]
fn refund_under_a_lowered_rate_uses_the_rate_of_the_charge() {
    let fast = Limit::new("token-bucket", Quota::per_minute(60).burst(10)).by("user");
    let (limiter, clock) = limiter([fast]);
    let alice = user("alice");
    let charge = paid(&limiter, &alice, 5);
    limiter.replace(vec![ten(Algorithm::TokenBucket)]).unwrap();
    clock.advance(secs(3));
    // Half a unit has drained at the current rate, but at the old rate three of five may have: two are refunded.
    assert_eq!(refund(&limiter, &charge), Correction::Done);
    assert_eq!(remaining(&limiter, "token-bucket", &alice), 7);
}

/// The quota has the same period.
#[test]
fn refund_under_another_quota_returns_the_cost() {
    for algorithm in [Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog] {
        for count in [5, 100] {
            let (limiter, _) = limiter([ten(algorithm)]);
            let alice = user("alice");
            let charge = paid(&limiter, &alice, 4);
            paid(&limiter, &alice, 4);
            let other =
                Limit::new(algorithm.name(), Quota::per_minute(count)).by("user").algorithm(algorithm);
            limiter.replace(vec![other]).unwrap();
            assert_eq!(refund(&limiter, &charge), Correction::Done, "{algorithm} {count}");
            assert_eq!(remaining(&limiter, algorithm.name(), &alice), count - 4, "{algorithm} {count}");
        }
    }
}

#[test]
fn refund_of_a_removed_limit_changes_nothing() {
    for algorithm in RATES {
        let (limiter, _) = limiter([ten(algorithm)]);
        let charge = paid(&limiter, &user("alice"), 4);
        limiter.replace(Vec::new()).unwrap();
        assert_eq!(refund(&limiter, &charge), Correction::Done, "{algorithm}");
        limiter.replace(vec![ten(algorithm)]).unwrap();
        let expected = if algorithm == Algorithm::LeakyBucket { 6 } else { 10 };
        assert_eq!(remaining(&limiter, algorithm.name(), &user("alice")), expected, "{algorithm}");
    }
}

#[test]
fn a_refund_of_a_forgotten_key_leaves_it_fresh() {
    for algorithm in RATES {
        let (limiter, _) = limiter([ten(algorithm)]);
        let alice = user("alice");
        let charge = paid(&limiter, &alice, 4);
        assert_eq!(now(limiter.forget(algorithm.name(), &alice)), Ok(true));
        assert_eq!(refund(&limiter, &charge), Correction::Done, "{algorithm}");
        assert_eq!(remaining(&limiter, algorithm.name(), &alice), 10, "{algorithm}");
    }
}

#[test]
fn windows_and_logs_return_the_full_surplus() {
    for algorithm in [Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog] {
        let (limiter, clock) = limiter([ten(algorithm)]);
        let alice = user("alice");
        let charge = reserved(&limiter, &alice, 10);
        clock.advance(secs(30));
        assert_eq!(settle(&limiter, &charge, 3), Correction::Done, "{algorithm}");
        assert_eq!(remaining(&limiter, algorithm.name(), &alice), 7, "{algorithm}");
    }
}

#[test]
fn token_bucket_returns_the_surplus_not_yet_refilled() {
    let (limiter, clock) = limiter([ten(Algorithm::TokenBucket)]);
    let alice = user("alice");
    let charge = reserved(&limiter, &alice, 10);
    clock.advance(secs(30));
    // Five have drained. Of the surplus of seven, five can be refunded, and then the bucket is full.
    assert_eq!(settle(&limiter, &charge, 3), Correction::Done);
    assert_eq!(remaining(&limiter, "token-bucket", &alice), 10);
    // A refund never raises it above its burst.
    assert!(!admits(&limiter, &alice, 11));
}

/// Whether a request of this cost is admitted, which charges it.
fn admits(limiter: &Limiter, facts: &Facts<'_>, cost: u64) -> bool {
    charge(limiter, facts, cost).allowed()
}

#[test]
fn a_reservation_that_is_not_settled_in_time_stays_charged() {
    for algorithm in RATES {
        let (limiter, clock) = limiter([ten_an_hour(algorithm)]);
        let alice = user("alice");
        let in_time = limiter.reserve(&alice, secs(5)).cost(4).wait().unwrap().charge().unwrap();
        let late = limiter.reserve(&alice, secs(5)).cost(4).wait().unwrap().charge().unwrap();
        assert_eq!(late.void_at(), START + secs(5));
        clock.set(START + Span::from_micros(4_999_999));
        assert_eq!(settle(&limiter, &in_time, 4), Correction::Done, "{algorithm}");
        clock.set(START + secs(5));
        assert_eq!(settle(&limiter, &late, 0), Correction::Unknown, "{algorithm}");
        assert_eq!(settle(&limiter, &late, 100), Correction::Unknown, "{algorithm}");
        assert_eq!(refund(&limiter, &late), Correction::Unknown, "{algorithm}");
        assert_eq!(remaining(&limiter, algorithm.name(), &alice), 2, "{algorithm}");
    }
}

fn ten_an_hour(algorithm: Algorithm) -> Limit {
    Limit::new(algorithm.name(), Quota::per_hour(10)).by("user").algorithm(algorithm)
}

#[test]
fn a_reservation_lasts_from_a_second_to_an_hour() {
    let (limiter, _) = limiter([ten(Algorithm::FixedWindow)]);
    let alice = user("alice");
    for ttl in [secs(1), secs(60), secs(3_600)] {
        let charge = limiter.reserve(&alice, ttl).wait().unwrap().charge().unwrap();
        assert_eq!(charge.void_at(), START + ttl);
    }
    assert!(limiter.reserve(&alice, std::time::Duration::from_secs(2)).wait().is_ok());
}

/// Units charged to a key, even above its limit: read through a limit a hundred times as large.
fn used(limiter: &Limiter, algorithm: Algorithm, facts: &Facts<'_>) -> u64 {
    let wide = Limit::new(algorithm.name(), Quota::per_hour(1_000)).by("user").algorithm(algorithm);
    limiter.replace(vec![wide]).unwrap();
    let used = 1_000 - remaining(limiter, algorithm.name(), facts);
    limiter.replace(vec![ten_an_hour(algorithm)]).unwrap();
    used
}

#[test]
fn shortfall_is_charged_up_to_twice_the_limit() {
    for algorithm in RATES {
        let check = |actual: u64, expected: u64| {
            let (limiter, _) = limiter([ten_an_hour(algorithm)]);
            let alice = user("alice");
            let charge = reserved(&limiter, &alice, 5);
            assert_eq!(settle(&limiter, &charge, actual), Correction::Done, "{algorithm}");
            assert_eq!(used(&limiter, algorithm, &alice), expected, "{algorithm} settled at {actual}");
            assert_eq!(admits(&limiter, &alice, 1), expected < 10, "{algorithm} settled at {actual}");
        };
        check(5, 5);
        check(9, 9);
        check(10, 10);
        check(13, 13);
        check(20, 20);
        check(21, 20);
        check(1 << 31, 20);
    }
}

#[test]
fn shortfall_is_added_to_concurrent_use() {
    for algorithm in RATES {
        let (limiter, _) = limiter([ten_an_hour(algorithm)]);
        let alice = user("alice");
        let charge = reserved(&limiter, &alice, 5);
        paid(&limiter, &alice, 5);
        assert_eq!(settle(&limiter, &charge, 8), Correction::Done);
        assert_eq!(used(&limiter, algorithm, &alice), 13, "{algorithm}");
    }
}

#[test]
fn shortfall_is_charged_to_a_fresh_key() {
    for algorithm in RATES {
        let (limiter, _) = limiter([ten_an_hour(algorithm)]);
        let alice = user("alice");
        let charge = reserved(&limiter, &alice, 5);
        assert_eq!(now(limiter.forget(algorithm.name(), &alice)), Ok(true));
        assert_eq!(settle(&limiter, &charge, 8), Correction::Done);
        assert_eq!(used(&limiter, algorithm, &alice), 3, "{algorithm}");
    }
}

#[test]
fn wait_after_a_shortfall_covers_the_total_charge() {
    let check = |algorithm, retry: u64| {
        let (limiter, _) = limiter([ten(algorithm)]);
        let alice = user("alice");
        let charge = reserved(&limiter, &alice, 5);
        settle(&limiter, &charge, 100);
        let refused = limiter.check(&alice).wait().unwrap();
        assert_eq!(refused.verdict(), Verdict::Deny { retry: Retry::After(secs(retry)) }, "{algorithm}");
    };
    check(Algorithm::TokenBucket, 66); // the level drains from 20 to 9, six seconds for each unit
    check(Algorithm::LeakyBucket, 66);
    check(Algorithm::FixedWindow, 60);
    check(Algorithm::SlidingWindow, 93); // 20 of the previous minute weigh 9 when 33 s of the current one are over
    check(Algorithm::SlidingLog, 60);
}

/// Charges alice one unit and refunds it, `count` times; returns the result of each refund.
fn refunds(limiter: &Limiter, count: usize) -> Vec<Correction> {
    (0..count).map(|_| refund(limiter, &paid(limiter, &user("alice"), 1))).collect()
}

#[test]
fn correction_markers_are_capped_at_max_keys() {
    let clock: ManualClock = clock();
    let store = store(160, &clock);
    let limiter = on(&store, [ten(Algorithm::FixedWindow)]);
    assert_eq!(refunds(&limiter, 160), [Correction::Done; 160]);
    assert_eq!(refunds(&limiter, 2), [Correction::Full; 2]);
    assert_eq!(store.corrections_refused(), 2);
    assert_eq!(remaining(&limiter, "fixed-window", &user("alice")), 8, "a rejected refund changes nothing");
    // The charges are void now. Their markers expire at most an eighth of their lifetime later.
    clock.advance(secs(60 + 8));
    assert_eq!(refunds(&limiter, 160), [Correction::Done; 160]);
    assert_eq!(refunds(&limiter, 1), [Correction::Full]);
    assert_eq!(store.corrections_refused(), 3);
}

#[test]
fn charge_stays_refundable_if_no_marker_fits() {
    let clock = clock();
    let store = store(10, &clock);
    let limiter = on(&store, [ten(Algorithm::SlidingLog)]);
    let first = paid(&limiter, &user("alice"), 1);
    assert_eq!(refund(&limiter, &first), Correction::Done);
    assert_eq!(refunds(&limiter, 9), [Correction::Done; 9]);
    clock.advance(secs(30));
    let charge = paid(&limiter, &user("alice"), 4);
    assert_eq!(refund(&limiter, &charge), Correction::Full);
    assert_eq!(refund(&limiter, &first), Correction::Repeated, "a full store still knows its markers");
    assert_eq!(settle(&limiter, &charge, 2), Correction::Full);
    assert_eq!(remaining(&limiter, "sliding-log", &user("alice")), 6);
    clock.advance(secs(38));
    assert_eq!(refund(&limiter, &charge), Correction::Done);
    assert_eq!(refund(&limiter, &charge), Correction::Repeated);
    assert_eq!(remaining(&limiter, "sliding-log", &user("alice")), 10);
}

#[test]
fn void_markers_are_reclaimed_from_any_shard() {
    let clock = clock();
    let store = store(16_384, &clock);
    let limiter = on(&store, [ten(Algorithm::FixedWindow)]);
    for number in 0..16_384 {
        let name = format!("user{number}");
        assert_eq!(refund(&limiter, &paid(&limiter, &user(&name), 1)), Correction::Done, "{number}");
    }
    assert_eq!(refunds(&limiter, 1), [Correction::Full]);
    clock.advance(secs(60 + 8));
    // One key alone uses the capacity that the markers of all shards have freed.
    let refused = refunds(&limiter, 16_384).into_iter().filter(|done| *done != Correction::Done).count();
    assert_eq!(refused, 0);
}

#[test]
fn a_charge_over_several_limits_needs_a_marker_for_each() {
    let clock = clock();
    let store = store(10, &clock);
    let limiter =
        on(&store, [ten(Algorithm::FixedWindow), ten(Algorithm::SlidingLog), ten(Algorithm::SlidingWindow)]);
    assert_eq!(refunds(&limiter, 3), [Correction::Done; 3]);
    let charge = paid(&limiter, &user("alice"), 1);
    assert_eq!(refund(&limiter, &charge), Correction::Full, "nine of ten markers are used, three are needed");
    for algorithm in [Algorithm::FixedWindow, Algorithm::SlidingLog, Algorithm::SlidingWindow] {
        assert_eq!(remaining(&limiter, algorithm.name(), &user("alice")), 9, "{algorithm}: all or nothing");
    }
    // A rejected refund uses up no marker.
    for _ in 0..5 {
        refund(&limiter, &charge);
    }
    limiter.replace(vec![ten(Algorithm::FixedWindow)]).unwrap();
    assert_eq!(refunds(&limiter, 2), [Correction::Done, Correction::Full]);
}

#[test]
fn a_repeated_refund_takes_no_marker() {
    let clock = clock();
    let store = store(2, &clock);
    let limiter = on(&store, [ten(Algorithm::FixedWindow)]);
    let charge = paid(&limiter, &user("alice"), 1);
    assert_eq!(refund(&limiter, &charge), Correction::Done);
    for _ in 0..10 {
        assert_eq!(refund(&limiter, &charge), Correction::Repeated);
    }
    assert_eq!(refunds(&limiter, 2), [Correction::Done, Correction::Full]);
}

#[test]
fn sealed_charge_opens_to_the_same_charge() {
    for algorithm in RATES {
        let tokens = Limit::new("tokens", Quota::per_minute(1_000)).by("user").cost("tokens");
        let stagger =
            Limit::new("staggered", Quota::per_minute(50)).by("user").algorithm(Algorithm::FixedWindow);
        let (limiter, _) = limiter([tokens, ten(algorithm), stagger.stagger()]);
        let long = "long ".repeat(200);
        for name in ["alice", "a\0b\n", &long] {
            let facts = facts! { "user" => name, "tokens" => 100 };
            let charge = paid(&limiter, &facts, 4);
            let text = limiter.seal_charge(&charge);
            assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte)), "{text}");
            let opened = limiter.open_charge(&text).wait().unwrap().expect("this store sealed it");
            assert_eq!(
                (opened.id(), opened.time(), opened.void_at()),
                (charge.id(), charge.time(), charge.void_at())
            );
            assert_eq!(limiter.seal_charge(&opened), text, "sealing is deterministic");
            assert_eq!(refund(&limiter, &opened), Correction::Done, "{algorithm}");
            assert_eq!(
                refund(&limiter, &charge),
                Correction::Repeated,
                "{algorithm}: both are the same charge"
            );
            assert_eq!(remaining(&limiter, "tokens", &facts), 1_000);
            assert_eq!(remaining(&limiter, "staggered", &facts), 50);
        }
    }
}

#[test]
fn sealed_reservation_keeps_time_and_facts() {
    let tokens = Limit::new("tokens", Quota::per_minute(1_000)).by("user").cost("tokens");
    let (limiter, clock) = limiter([tokens, ten(Algorithm::FixedWindow)]);
    let facts = facts! { "user" => "alice", "tokens" => 100 };
    let text = limiter.seal_charge(&reserved(&limiter, &facts, 2));
    let charge = limiter.open_charge(&text).wait().unwrap().unwrap();
    let actual = facts! { "tokens" => 30 };
    clock.advance(secs(59));
    assert_eq!(now(limiter.settle(&charge, Costs::Facts(&actual))), Ok(Correction::Done));
    assert_eq!(remaining(&limiter, "tokens", &facts), 970);
    assert_eq!(remaining(&limiter, "fixed-window", &facts), 8);
    let late =
        limiter.open_charge(&limiter.seal_charge(&reserved(&limiter, &facts, 2))).wait().unwrap().unwrap();
    clock.advance(secs(60));
    assert_eq!(settle(&limiter, &late, 1), Correction::Unknown);
}

#[test]
fn receipt_of_another_store_does_not_open() {
    let slots = || Limit::new("slots", Quota::slots(3)).by("user");
    let (limiter, _) = limiter([ten(Algorithm::FixedWindow), slots()]);
    let (other, _) = support::limiter([ten(Algorithm::FixedWindow), slots()]);
    let alice = user("alice");
    let text = limiter.seal_charge(&paid(&limiter, &alice, 1));
    assert!(limiter.open_charge(&text).wait().unwrap().is_some());
    assert!(other.open_charge(&text).wait().unwrap().is_none(), "each store has its own secret");
    for index in 0..text.len() {
        let letter = if &text[index..=index] == "A" { "B" } else { "A" };
        let forged = [&text[..index], letter, &text[index + 1..]].concat();
        assert!(limiter.open_charge(&forged).wait().unwrap().is_none(), "{forged}");
        assert!(limiter.open_charge(&text[..index]).wait().unwrap().is_none(), "truncated at {index}");
    }
    assert!(limiter.open_charge(&format!("{text}A")).wait().unwrap().is_none());
    for invalid in ["", "x", "\0", "a b", "äöü", &"A".repeat(10_000)] {
        assert!(
            limiter.open_charge(invalid).wait().unwrap().is_none()
                && limiter.open_slot(invalid).wait().unwrap().is_none()
        );
    }
    let held = now(limiter.acquire(&alice)).unwrap();
    let slot = limiter.seal_slot(held.slot.as_ref().unwrap().slot());
    assert!(
        limiter.open_slot(&slot).wait().unwrap().is_some()
            && other.open_slot(&slot).wait().unwrap().is_none()
    );
    assert!(limiter.open_charge(&slot).wait().unwrap().is_none(), "a slot does not open as a charge");
    assert!(limiter.open_slot(&text).wait().unwrap().is_none(), "a charge does not open as a slot");
}

#[test]
fn only_charged_decisions_have_a_charge() {
    let tokens = Limit::new("tokens", Quota::per_minute(10)).by("user").cost("tokens");
    let (limiter, _) = limiter([tokens]);
    let of = |tokens: u64| charge(&limiter, &facts! { "user" => "alice", "tokens" => tokens }, 1);
    assert!(of(6).charge().is_some());
    assert!(of(6).charge().is_none(), "refused");
    assert!(of(0).allowed() && of(0).charge().is_none(), "free");
    assert!(charge(&limiter, &facts! { "tokens" => 1 }, 1).charge().is_none(), "no limit applies");
    let facts = facts! { "user" => "alice", "tokens" => 1 };
    assert!(limiter.peek(&facts).wait().unwrap().charge().is_none());
    assert!(limiter.usage(&facts).wait().unwrap().charge().is_none());
}
