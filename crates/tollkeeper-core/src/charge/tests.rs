use core::time::Duration;

use super::*;
use crate::algorithm::{fixed_window, meter, sliding_log, sliding_window};
use crate::decision::tests::{NOW, first};
use crate::facts;
use crate::key::tests::Random;
use crate::limit::Limit;
use crate::quota::Quota;
use crate::toll::Verb;

const SECRET: Secret = Secret([9; 16]);

/// The name that a store might use for a long key.
fn short(key: Key<'_>) -> u128 {
    siphash::hash(&Secret([1; 16]), &key.to_bytes())
}

fn limit(algorithm: Algorithm) -> Limit {
    let name = algorithm.name();
    match algorithm {
        Algorithm::Concurrency => Limit::new(name, Quota::slots(5)).ttl(Duration::from_secs(30)),
        _ => Limit::new(name, Quota::per_minute(100)).algorithm(algorithm),
    }
}

fn charge(limits: Vec<Limit>, facts: &Facts<'_>, cost: u64) -> Charge {
    first(limits, Verb::Check, facts, cost).charge().expect("charged")
}

fn reopened(charge: &Charge) -> Charge {
    Charge::open(&charge.seal(&SECRET, short), &SECRET).expect("sealed with the same secret")
}

#[test]
fn sealed_receipts_of_every_algorithm_open() {
    let facts = facts! { "user" => "grün:\n\0", "tokens" => 17 };
    for algorithm in Algorithm::ALL {
        let limits = || {
            let limit = limit(algorithm);
            let limit = if algorithm == Algorithm::FixedWindow { limit.stagger() } else { limit };
            vec![limit.clone().by("user"), Limit::new("all", Quota::per_day(1000)).cost("tokens")]
        };
        for verb in [Verb::Check, Verb::Reserve(Span::from_secs(1)), Verb::Acquire] {
            let decision = first(limits(), verb, &facts, 3);
            let charge = decision.charge().expect("charged");
            assert_eq!(reopened(&charge), charge, "{algorithm} {verb:?}");
            assert_eq!(charge.items().len(), if algorithm == Algorithm::Concurrency { 1 } else { 2 });
            if let Some(slot) = decision.slot() {
                assert_eq!(Slot::open(&slot.seal(&SECRET, short), &SECRET), Some(slot));
            }
        }
    }
}

#[test]
fn largest_numbers_survive_sealing() {
    let mut charge = charge(vec![limit(Algorithm::SlidingLog)], &facts! {}, 3);
    let item = &mut charge.0.items[0];
    (item.cost, item.shift, item.mark, item.shared) = (u64::MAX, u64::MAX, u64::MAX, true);
    (charge.0.id, charge.0.at) = (u64::MAX, Time::from_micros(u64::MAX));
    charge.0.ttl = Some(Span::from_micros(u64::MAX));
    assert_eq!(reopened(&charge), charge);
}

/// A key longer than 128 bytes is replaced by the name that the store uses for it.
#[test]
fn long_keys_are_sealed_by_their_short_name() {
    // The family of a limit with a name of one byte has 11 bytes, and a value takes 2 bytes for its length.
    for (len, whole) in [(1, true), (115, true), (116, false), (1024, false)] {
        let user = "x".repeat(len);
        let limits = vec![Limit::new("x", Quota::per_minute(100)).by("user")];
        let charge = charge(limits, &facts! { "user" => &user }, 3);
        let opened = reopened(&charge);
        let ItemKey::Whole(bytes) = &charge.items()[0].key else { panic!("keys are shortened by sealing") };
        assert_eq!(bytes.len(), 13 + len);
        let key = Key::from_bytes(bytes).expect("a key");
        let expected = if whole {
            ItemKey::Whole(bytes.clone())
        } else {
            ItemKey::Short(key.family().into(), short(key).into())
        };
        assert_eq!(opened.items()[0].key, expected);
        // Everything but the key is unchanged, and sealing again changes nothing.
        assert_eq!(Item { key: expected, ..charge.items()[0].clone() }, opened.items()[0]);
        assert_eq!(reopened(&opened), opened);
        assert_eq!(
            opened.seal(&SECRET, |_| -> u128 { panic!("the name is in the receipt") }),
            charge.seal(&SECRET, short)
        );
    }
}

#[test]
fn a_receipt_keeps_the_partition_of_its_key() {
    for (len, whole) in [(1, true), (500, false)] {
        let (user, tenant) = ("x".repeat(len), "acme");
        let limits =
            vec![Limit::new("x", Quota::per_minute(100)).by("user").by("tenant").partition("tenant")];
        let charge = charge(limits, &facts! { "user" => &user, "tenant" => tenant }, 3);
        assert_eq!(charge.items()[0].key().partition_text(), Some(Some(tenant)));
        let named = |key: Key<'_>| Short {
            name: short(key),
            tag: key.partition_text().flatten().expect("a tenant").into(),
        };
        let opened =
            Charge::open(&charge.seal(&SECRET, named), &SECRET).expect("sealed with the same secret");
        match &opened.items()[0].key {
            ItemKey::Whole(_) if whole => assert_eq!(opened, charge),
            ItemKey::Short(_, short) if !whole => assert_eq!(&*short.tag, tenant),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_modified_receipt_does_not_open() {
    // Texts of every length modulo four: in some, the last digit has padding bits.
    for user in ["a", "ab", "abc", "abcd"] {
        let limits = vec![limit(Algorithm::TokenBucket).by("user"), limit(Algorithm::FixedWindow)];
        let charge = charge(limits, &facts! { "user" => user }, 3);
        let text = charge.seal(&SECRET, short);
        assert_eq!(Charge::open(&text, &SECRET), Some(charge));
        for len in 0..text.len() {
            assert_eq!(Charge::open(&text[..len], &SECRET), None, "{len} of {} characters", text.len());
            assert_eq!(Charge::open(&text[text.len() - len..], &SECRET), None, "the last {len} characters");
        }
        for more in ["A", "AA", "AAA", "AAAA", "=", " ", "\n", "\0"] {
            assert_eq!(Charge::open(&(text.clone() + more), &SECRET), None, "{more:?} behind");
            assert_eq!(Charge::open(&(more.to_owned() + &text), &SECRET), None, "{more:?} before");
        }
        for bit in 0..8 * text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            // Bytes that are not UTF-8 cannot be passed to `open`.
            if let Ok(changed) = String::from_utf8(bytes) {
                assert_eq!(Charge::open(&changed, &SECRET), None, "bit {bit}");
            }
        }
    }
}

#[test]
fn a_receipt_opens_only_with_its_secret_and_type() {
    let limits = vec![limit(Algorithm::Concurrency), limit(Algorithm::TokenBucket)];
    let decision = first(limits, Verb::Acquire, &facts! {}, 1);
    let charge = decision.charge().expect("charged").seal(&SECRET, short);
    let slot = decision.slot().expect("a slot").seal(&SECRET, short);
    for bit in 0..128 {
        let other = Secret((u128::from_le_bytes(SECRET.0) ^ 1 << bit).to_le_bytes());
        assert_eq!(Charge::open(&charge, &other), None);
        assert_eq!(Slot::open(&slot, &other), None);
    }
    assert_eq!(Slot::open(&charge, &SECRET), None);
    assert_eq!(Charge::open(&slot, &SECRET), None);
    assert!(Charge::open(&charge, &SECRET).is_some() && Slot::open(&slot, &SECRET).is_some());
}

#[test]
fn a_slot_has_the_shortest_ttl_of_its_limits() {
    let limits =
        vec![limit(Algorithm::Concurrency), Limit::new("x", Quota::slots(1)).ttl(Duration::from_secs(9))];
    let slot = first(limits, Verb::Acquire, &facts! {}, 1).slot().expect("a slot");
    assert_eq!((slot.ttl(), slot.id()), (Span::from_secs(9), 7));
}

/// A charge at three limits: 5 for the request, 20 for `tokens`, 7 for `bytes`.
fn three_limits() -> Charge {
    let facts = facts! { "tokens" => 20, "bytes" => 7 };
    charge(
        vec![
            Limit::new("requests", Quota::per_minute(100)),
            Limit::new("llm", Quota::per_minute(100)).cost("tokens"),
            Limit::new("traffic", Quota::per_minute(100)).cost("bytes"),
        ],
        &facts,
        5,
    )
}

use Change::{Add, GiveBack, Keep};

#[test]
fn a_refund_changes_only_items_that_match_its_costs() {
    for (costs, expected) in [
        (Costs::All, [GiveBack(5), GiveBack(20), GiveBack(7)]),
        (Costs::Request(2), [GiveBack(2), Keep, Keep]),
        (Costs::Request(5), [GiveBack(5), Keep, Keep]),
        (Costs::Facts(&facts! { "tokens" => 3 }), [Keep, GiveBack(3), Keep]),
        (Costs::Facts(&facts! { "tokens" => "20", "bytes" => 1 }), [Keep, GiveBack(20), GiveBack(1)]),
        (Costs::Facts(&facts! { "tokens" => 0, "bytes" => 1 }), [Keep, GiveBack(0), GiveBack(1)]),
        (Costs::Facts(&facts! { "tokens" => 2, "user" => "alice" }), [Keep, GiveBack(2), Keep]),
    ] {
        assert_eq!(three_limits().refund(costs), Ok(expected.to_vec()), "{costs:?}");
        assert_eq!(reopened(&three_limits()).refund(costs), Ok(expected.to_vec()), "{costs:?}, opened");
    }
}

#[test]
fn a_refund_of_chosen_limits_keeps_the_rest() {
    let charge = three_limits();
    let names: Vec<String> = charge.items().iter().map(|item| item.limit().to_owned()).collect();
    for chosen in &names {
        let changes = charge.refund_of(|name| name == chosen);
        for ((item, name), change) in charge.items().iter().zip(&names).zip(changes) {
            let expected = if name == chosen { Change::GiveBack(item.cost) } else { Change::Keep };
            assert_eq!(change, expected, "{name}, {chosen} chosen");
        }
    }
    assert_eq!(names.len(), 3);
}

#[test]
fn settlement_refunds_or_charges_the_difference() {
    for (costs, expected) in [
        (Costs::All, [GiveBack(0), GiveBack(0), GiveBack(0)]),
        (Costs::Request(0), [GiveBack(5), Keep, Keep]),
        (Costs::Request(2), [GiveBack(3), Keep, Keep]),
        (Costs::Request(5), [GiveBack(0), Keep, Keep]),
        (Costs::Request(6), [Add(1), Keep, Keep]),
        (Costs::Request(MAX_COST), [Add(MAX_COST - 5), Keep, Keep]),
        (Costs::Facts(&facts! { "tokens" => 3 }), [Keep, GiveBack(17), Keep]),
        (Costs::Facts(&facts! { "tokens" => 1000, "bytes" => "0" }), [Keep, Add(980), GiveBack(7)]),
    ] {
        assert_eq!(three_limits().settle(costs), Ok(expected.to_vec()), "{costs:?}");
    }
}

#[test]
fn invalid_corrections_name_the_limit() {
    for (costs, refund, settle) in [
        (Costs::Request(6), Some("6 cannot be given back: 5 had been charged"), None),
        (
            Costs::Facts(&facts! { "tokens" => 20, "bytes" => 8 }),
            Some("8 cannot be given back: 7 had been charged"),
            None,
        ),
        (
            Costs::Request(MAX_COST + 1),
            Some("the cost 2147483649 is too large (at most 2147483648)"),
            Some("the cost 2147483649 is too large (at most 2147483648)"),
        ),
        (
            Costs::Facts(&facts! { "tokens" => "many" }),
            Some("limit `llm` charges the number in fact `tokens`, but it is not a whole number"),
            Some("limit `llm` charges the number in fact `tokens`, but it is not a whole number"),
        ),
        (
            Costs::Facts(&facts! { "bytes" => -1 }),
            Some("limit `traffic` charges the number in fact `bytes`, but it is not a whole number"),
            Some("limit `traffic` charges the number in fact `bytes`, but it is not a whole number"),
        ),
        (
            Costs::Facts(&facts! { "bytes" => MAX_COST + 1 }),
            Some("limit `traffic` charges the number in fact `bytes`, but it is larger than 2147483648"),
            Some("limit `traffic` charges the number in fact `bytes`, but it is larger than 2147483648"),
        ),
        (
            Costs::Facts(&facts! { "a b" => 1 }),
            Some("fact `a b`: a name is 1 to 64 of `A-Z a-z 0-9 . _ : / -`"),
            Some("fact `a b`: a name is 1 to 64 of `A-Z a-z 0-9 . _ : / -`"),
        ),
    ] {
        let message = |result: Result<_, InvalidRequest>| result.err().map(|error| error.to_string());
        assert_eq!(message(three_limits().refund(costs)).as_deref(), refund, "{costs:?}");
        assert_eq!(message(three_limits().settle(costs)).as_deref(), settle, "{costs:?}");
    }
}

#[test]
fn refund_of_zero_units_is_an_error() {
    for costs in [
        Costs::Request(0),
        Costs::Facts(&facts! { "tokens" => 0 }),
        Costs::Facts(&facts! { "tokens" => 0, "bytes" => "0", "user" => "alice" }),
    ] {
        assert_eq!(three_limits().refund(costs), Err(InvalidRequest::ZeroRefund), "{costs:?}");
        assert!(three_limits().settle(costs).is_ok(), "{costs:?}: the actual cost of a request may be 0");
    }
}

/// Otherwise a typo would use up the receipt without a refund.
#[test]
fn costs_that_match_no_limit_are_an_error() {
    let requests = || charge(vec![Limit::new("requests", Quota::per_minute(100))], &facts! {}, 5);
    let tokens = || {
        let limit = Limit::new("llm", Quota::per_minute(100)).cost("tokens");
        charge(vec![limit], &facts! { "tokens" => 20 }, 5)
    };
    for (charge, costs, expected) in [
        (
            three_limits(),
            Costs::Facts(&facts! { "token" => 3 }),
            "no limit of this charge charges one of these facts (it charges `bytes`, `tokens`)",
        ),
        (
            three_limits(),
            Costs::Facts(&facts! { "tokens" => "" }),
            "no limit of this charge charges one of these facts (it charges `bytes`, `tokens`)",
        ),
        (
            requests(),
            Costs::Facts(&facts! { "tokens" => 3 }),
            "no limit of this charge charges a fact (it can be corrected by `cost`)",
        ),
        (
            tokens(),
            Costs::Request(3),
            "no limit of this charge charges the request's cost (it can be corrected by `tokens`)",
        ),
    ] {
        for charge in [reopened(&charge), charge] {
            let messages = [charge.refund(costs), charge.settle(costs)]
                .map(|result| result.expect_err("no item matches").to_string());
            assert_eq!(messages, [expected; 2], "{costs:?}");
        }
    }
}

#[test]
fn errors_name_the_limit_of_a_shortened_key() {
    let user = "x".repeat(500);
    let limits = vec![Limit::new("llm", Quota::per_minute(100)).by("user").cost("tokens")];
    let charge = reopened(&charge(limits, &facts! { "user" => &user, "tokens" => 20 }, 1));
    assert!(matches!(charge.items()[0].key, ItemKey::Short(..)));
    let error = charge.refund(Costs::Facts(&facts! { "tokens" => "x" })).expect_err("not a number");
    assert_eq!(
        error.to_string(),
        "limit `llm` charges the number in fact `tokens`, but it is not a whole number"
    );
}

/// The time from a charge until it is void.
fn lifetime(limit: Limit, cost: u64) -> Span {
    charge(vec![limit], &facts! {}, cost).void_at().since(NOW)
}

#[test]
fn a_charge_is_void_when_it_no_longer_counts() {
    // NOW is 53 min 20 s into an hour, 20 s into a minute, and 8 h 53 min 20 s into a day of UTC.
    let (minute, hour, day) = (Quota::per_minute(100), Quota::per_hour(100), Quota::per_day(100));
    for (algorithm, rate, cost, secs) in [
        // A bucket drains the cost at its rate.
        (Algorithm::TokenBucket, minute, 5, 3),
        (Algorithm::TokenBucket, minute.burst(20), 20, 12),
        (Algorithm::TokenBucket, hour, 100, 3_600),
        (Algorithm::TokenBucket, Quota::per_day(1).burst(30), 30, 30 * 86_400),
        (Algorithm::LeakyBucket, minute, 5, 3),
        // A window counts until it ends, a sliding one until the next has ended.
        (Algorithm::FixedWindow, minute, 5, 40),
        (Algorithm::FixedWindow, hour, 1, 400),
        (Algorithm::FixedWindow, day, 1, 86_400 - 32_000),
        (Algorithm::SlidingWindow, minute, 5, 60 + 40),
        (Algorithm::SlidingWindow, hour, 5, 3_600 + 400),
        // A stamp counts for one period.
        (Algorithm::SlidingLog, minute, 5, 60),
        (Algorithm::SlidingLog, hour, 1, 3_600),
    ] {
        let lifetime = lifetime(Limit::new("x", rate).algorithm(algorithm), cost);
        assert_eq!(lifetime, Span::from_secs(secs), "{algorithm} {rate} {cost}");
    }
    let staggered = Limit::new("x", minute).algorithm(Algorithm::FixedWindow).stagger();
    let charge = charge(vec![staggered.clone()], &facts! {}, 1);
    let shift = charge.items()[0].shift;
    let elapsed = (NOW.as_micros() + shift) % 60_000_000;
    assert!(shift > 0);
    assert_eq!(lifetime(staggered, 1).as_micros(), 60_000_000 - elapsed);
}

/// A charge is valid as long as any of its items; a reservation until the end of its time to live.
#[test]
fn the_longest_item_or_the_ttl_decides_when_a_charge_is_void() {
    let limits = || {
        vec![
            limit(Algorithm::TokenBucket),
            Limit::new("daily", Quota::per_day(9)).algorithm(Algorithm::SlidingLog),
            limit(Algorithm::FixedWindow),
        ]
    };
    assert_eq!(charge(limits(), &facts! {}, 1).void_at().since(NOW), Span::from_secs(86_400));
    for ttl in [Span::from_secs(1), Span::from_secs(3_600)] {
        let reserved = first(limits(), Verb::Reserve(ttl), &facts! {}, 1).charge().expect("charged");
        assert_eq!(reserved.void_at(), NOW + ttl);
        assert_eq!(reopened(&reserved).void_at(), NOW + ttl);
    }
}

/// The units that an algorithm refunds of the whole charge at this time, if the key is in use.
fn given_back(item: &Item, now: Time) -> u64 {
    let (quota, past, cost) = (&item.quota, item.past(), item.cost);
    let now = quota.tick().number(now);
    match quota.algorithm() {
        Algorithm::TokenBucket | Algorithm::LeakyBucket => {
            let full = meter::State { level: quota.capacity(), at: now };
            full.level - meter::give_back(quota, full, now, cost, &past).level
        }
        Algorithm::FixedWindow => {
            let window = (now + item.shift) / quota.period_ticks();
            let full = fixed_window::State { window, count: quota.count() };
            full.count - fixed_window::give_back(quota, full, now, item.shift, cost, &past).count
        }
        Algorithm::SlidingWindow => {
            let window = now / quota.period_ticks();
            let full = sliding_window::State { window, prev: quota.count(), cur: quota.count() };
            let left = sliding_window::give_back(quota, full, now, cost, &past);
            full.prev + full.cur - left.prev - left.cur
        }
        Algorithm::SlidingLog => {
            let mut log = Vec::new();
            sliding_log::add(quota, &mut log, now, quota.count());
            sliding_log::give_back(quota, &mut log, now, cost, &past);
            quota.count() - sliding_log::len(&log) as u64
        }
        Algorithm::Concurrency => 0,
    }
}

/// One tick before it is void, some of a charge can be refunded; then nothing.
#[test]
fn a_charge_can_be_refunded_until_it_is_void() {
    for period in [1, 7, 60, 61, 900, 86_400, 30 * 86_400] {
        for (algorithm, cost) in
            [Algorithm::TokenBucket, Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog]
                .into_iter()
                .flat_map(|algorithm| [1, 3, 7].map(|cost| (algorithm, cost)))
        {
            let rate = Quota::per(7, Duration::from_secs(period));
            let charge = charge(vec![Limit::new("x", rate).algorithm(algorithm)], &facts! {}, cost);
            let (item, void) = (&charge.items()[0], charge.void_at().as_micros());
            let tick = item.quota.tick().span().as_micros();
            assert!(given_back(item, Time::from_micros(void - tick)) > 0, "{algorithm} {rate} {cost}");
            assert_eq!(given_back(item, Time::from_micros(void)), 0, "{algorithm} {rate} {cost}");
        }
    }
}

/// The documented size: about 60 bytes, and for each limit 50 plus 4/3 of the key, of which at most 128 bytes count.
#[test]
#[expect(clippy::disallowed_macros, reason = "prints the sizes for people to read")]
fn a_charge_is_not_longer_than_documented() {
    let documented =
        |keys: &[usize]| 60 + keys.iter().map(|key| 50 + (4 * key.min(&128)).div_ceil(3)).sum::<usize>();
    let largest = Quota::per_day(1 << 50);
    let usual = |name: &str| Limit::new(name, Quota::per_minute(100).burst(20)).by("user");
    for (case, limits, user, verb, cost) in [
        ("one limit", vec![usual("per-user")], "alice", Verb::Check, 1),
        ("two limits", vec![usual("per-user"), usual("login")], "alice", Verb::Check, 1),
        ("a uuid", vec![usual("per-user")], "6f9619ff-8b86-d011-b42d-00cf4fc964ff", Verb::Check, 1),
        ("a long value", vec![usual("per-user")], &"x".repeat(1024), Verb::Check, 1),
        ("long name and value", vec![usual(&"x".repeat(64))], &"x".repeat(1024), Verb::Check, 1),
        (
            "large numbers",
            vec![Limit::new("x", largest).by("user").algorithm(Algorithm::FixedWindow).stagger()],
            "alice",
            Verb::Reserve(Span::from_secs(3_600)),
            MAX_COST,
        ),
        (
            "ten limits",
            (0..10).map(|number| usual(&format!("limit-{number}"))).collect(),
            "alice",
            Verb::Check,
            1,
        ),
    ] {
        let mut charge = first(limits, verb, &facts! { "user" => user }, cost).charge().expect("charged");
        charge.0.id = u64::MAX;
        let key = |item: &Item| if let ItemKey::Whole(bytes) = &item.key { bytes.len() } else { 0 };
        let keys: Vec<usize> = charge.items().iter().map(key).collect();
        let (text, documented) = (charge.seal(&SECRET, short), documented(&keys));
        println!("{case}: keys of {keys:?} bytes, a charge of {} (documented: {documented})", text.len());
        assert!(text.len() <= documented, "{case}: {} bytes, documented are {documented}", text.len());
        assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')));
    }
}

/// Only the store can write bytes that pass the authentication; even so, the reader must not panic on any.
#[test]
fn malformed_bytes_with_a_valid_mac_do_not_panic() {
    let mut random = Random(6);
    let limits = vec![limit(Algorithm::TokenBucket).by("user"), limit(Algorithm::SlidingLog).cost("n")];
    let charge = charge(limits, &facts! { "user" => "alice", "n" => 2 }, 3);
    let sealed = from_text(&charge.seal(&SECRET, short)).expect("valid base64");
    let signed = &sealed[..sealed.len() - 16];
    let mut opened = 0;
    for _ in 0..50_000 {
        let mut bytes = signed.to_vec();
        for _ in 0..=random.below(3) {
            let index = 1 + random.below(bytes.len() - 1);
            match random.below(3) {
                0 => bytes[index] = random.number().to_le_bytes()[0],
                1 => bytes.truncate(index + 1),
                _ => bytes.insert(index, random.number().to_le_bytes()[0]),
            }
        }
        bytes.extend_from_slice(&siphash::hash(&SECRET, &bytes).to_le_bytes());
        if let Some(charge) = Charge::open(&to_text(&bytes), &SECRET) {
            assert_eq!(reopened(&charge), charge);
            charge.void_at();
            charge.refund(Costs::All).expect("a full refund is always valid");
            let _ = charge.settle(Costs::Facts(&facts! { "n" => 1 }));
            opened += 1;
        }
    }
    assert!(
        (1_000..49_000).contains(&opened),
        "{opened} of 50000 opened: the mutations are too weak or too strong"
    );
}

#[test]
fn base64_has_one_spelling() {
    let mut random = Random(7);
    for len in 0..200 {
        let bytes: Vec<u8> = (0..len).map(|_| random.number().to_le_bytes()[0]).collect();
        assert_eq!(from_text(&to_text(&bytes)), Some(bytes));
    }
    for (text, expected) in [
        ("", Some(&b""[..])),
        ("AA", Some(b"\0")),
        ("_w", Some(b"\xff")),
        ("_x", None),
        ("AAA", Some(b"\0\0")),
        ("AAB", None),
        ("AAAA", Some(b"\0\0\0")),
        ("A", None),
        ("AAAAA", None),
        ("AA==", None),
        ("A+AA", None),
        ("A/AA", None),
        ("ü", None),
    ] {
        assert_eq!(from_text(text).as_deref(), expected, "{text:?}");
    }
}

#[test]
fn numbers_take_as_few_bytes_as_possible() {
    for (number, len) in
        [(0, 1), (127, 1), (128, 2), (16_383, 2), (16_384, 3), (u64::MAX - 1, 10), (u64::MAX, 10)]
    {
        let mut bytes = Vec::new();
        push_number(&mut bytes, number);
        assert_eq!(bytes.len(), len, "{number}");
        let mut rest = &bytes[..];
        assert_eq!((take_number(&mut rest), rest.len()), (Some(number), 0));
        assert_eq!(take_number(&mut &bytes[..len - 1]), None);
    }
    assert_eq!(take_number(&mut &[0x80; 20][..]), None);
}
