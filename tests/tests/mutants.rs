//! Mutation tests of the Lua scripts: typical mistakes, made on purpose, must be caught.
//!
//! A mutant is a script with a piece of its text replaced. It runs against the Rust reference like the twins do, and
//! the test fails if no difference shows.

use std::sync::Arc;

use tollkeeper::store::redis::keys::{Format, Names};
use tollkeeper::store::redis::script::{self, Kinds, Script};
use tollkeeper::store::redis::wire::{Batch, EncodedToll, Nonce, Value};
use tollkeeper_core::{Algorithm, Decision, Limit, Policy, Quota, Time, Verb, facts};
use tollkeeper_tests::cases::{Case, Kind};
use tollkeeper_tests::fold::{self, History};
use tollkeeper_tests::plain_buckets::{Compared, Databases};
use tollkeeper_tests::redis::{Client, Server};
use tollkeeper_tests::shared::{Pair, TIME};

#[test]
fn charging_before_all_limits_allow_is_caught() {
    let charged = "local charged = charging and admitted and allowed and cost > 0";
    caught_in_tolls(charged, "local charged = charging and allowed and cost > 0");
}

#[test]
fn write_without_expiry_is_caught() {
    caught_in_tolls("call('SET', name, text, 'PXAT', expiry(fresh))", "call('SET', name, text)");
    caught_in_tolls("call('PEXPIREAT', name, expiry(fresh))", "");
    caught_in_tolls("call('SET', KEYS[item + 1], '', 'PXAT', marked)", "call('SET', KEYS[item + 1], '')");
}

#[test]
fn refund_without_marker_is_caught() {
    caught_in_tolls("call('SET', KEYS[item + 1], '', 'PXAT', marked)", "");
}

#[test]
fn number_stored_as_text_is_caught() {
    caught_in_tolls("quota.long, y, x, z)", "quota.long, tonumber(tostring(y)), x, z)");
    caught_in_tolls("quota.long, y, x, z)", "quota.long, tonumber(y .. ''), x, z)");
    caught_in_tolls("rep(pack('>I7', stamp), cost)", "rep(pack('>I7', tonumber(stamp .. '')), cost)");
    caught_in_tolls("taker, now, now + quota.period)", "taker, tonumber(tostring(now)), now + quota.period)");
}

#[test]
fn use_of_local_time_is_caught() {
    let server = Server::start();
    let mut client = server.connect();
    assert_eq!(time_differs(&mut client, |text| text), None);
    // The time of a node whose clock is a second ahead.
    let local = |text: String| {
        let ahead = "local time = call('TIME') time[1] = tostring(tonumber(time[1]) + 1)";
        text.replace(TIME, ahead)
    };
    assert!(time_differs(&mut client, local).is_some(), "the mutant survives");
}

#[test]
fn refusal_that_writes_is_caught() {
    caught_in_tolls("local writes = charged or charging and moved", "local writes = charging");
}

#[test]
fn peek_that_writes_is_caught() {
    caught_in_tolls("local writes = charged or charging and moved", "local writes = charged or moved");
}

#[test]
fn unwritten_clock_step_is_caught() {
    caught_in_tolls("local writes = charged or charging and moved", "local writes = charged");
}

#[test]
fn stale_read_of_a_shared_key_is_caught() {
    caught_in_tolls("local state = shared and held and held[key]", "local state = nil");
}

#[test]
fn off_by_one_arithmetic_is_caught() {
    for (algorithm, right, wrong) in [
        (Algorithm::TokenBucket, "(at - now - 1) * count >= capacity", "(at - now) * count >= capacity"),
        (
            Algorithm::TokenBucket,
            "level + cost * period <= burst * period",
            "level + cost * period < burst * period",
        ),
        (
            Algorithm::TokenBucket,
            "at + (level + -level % count) / count",
            "at + (level - level % count) / count",
        ),
        (
            Algorithm::TokenBucket,
            "if age < 0 or age >= undrained / rate then",
            "if age >= undrained / rate then",
        ),
        (Algorithm::TokenBucket, "undrained = undrained - age * rate", ""),
        (Algorithm::TokenBucket, "local most = 2 * quota.capacity", "local most = quota.capacity"),
        (
            Algorithm::LeakyBucket,
            "return level, at, moved\nend\nif now - at",
            "return level, now, moved\nend\nif now - at",
        ),
        (Algorithm::FixedWindow, "window > current + 1", "window > current"),
        (Algorithm::FixedWindow, "floor((now + shift) / quota.period)", "floor(now / quota.period)"),
        (Algorithm::FixedWindow, "if past.mark ~= window then", "if false then"),
        (Algorithm::SlidingWindow, "prev * (period - elapsed) <=", "prev * (period - elapsed) <"),
        (
            Algorithm::SlidingWindow,
            "elseif past.mark + 1 == window then",
            "elseif past.mark + 2 == window then",
        ),
        (
            Algorithm::SlidingLog,
            "log.stamp(log, middle) + period > now",
            "log.stamp(log, middle) + period >= now",
        ),
        (Algorithm::SlidingLog, "(moved or newest < now) and now or newest", "now"),
        (Algorithm::SlidingLog, "2 * first >= log.len", "2 * first > log.len"),
        (Algorithm::Concurrency, "if expires > now then", "if expires >= now then"),
        (Algorithm::Concurrency, "if taken > now + (expires - taken) then", "if taken > now then"),
        (Algorithm::Concurrency, "now, now + (expires - taken))", "taken, now + (expires - taken))"),
    ] {
        caught_in_a_fold(algorithm, right, wrong);
    }
}

/// Mistakes in the scripts for plain buckets, which the general script does not make.
#[test]
fn mistakes_in_the_bucket_scripts_are_caught() {
    for (right, wrong) in [
        ("if allowed or moved then", "if allowed then"),
        ("if admitted or moved then", "if admitted then"),
        ("level = admitted and after or level", "level = after"),
        ("admitted = admitted and allowed", "admitted = allowed"),
        ("if quota ~= number then", "if not number then"),
        ("if fresh ~= second then", "if not second then"),
        ("meter_drained_at(count, tick, at, after) * tick", "meter_drained_at(count, tick, at, after)"),
        ("'PXAT', format('%d000', fresh / 1000000 + 1))", "'PXAT', format('%d000', fresh / 1000000))"),
        ("even = false", ""),
        ("pack('>Bc0', 14, bytes), 0", "bytes, 1"),
        ("if level and level < 9007199254740992 then", "if level then"),
        ("after < 1099511627776 and '>I7I5' or '>I7I7'", "'>I7I5'"),
        ("level < 1099511627776 and '>I7I5' or '>I7I7'", "'>I7I5'"),
        ("toll, admitted = toll + 1, true", "toll, admitted = toll, true"),
        ("pcall('GET', key) or ''", "call('GET', key) or ''"),
        ("bytes, level = '\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0', nil", "level = nil"),
        ("states[key], level = none, nil", "level = nil"),
    ] {
        caught_in_plain_buckets(right, wrong);
    }
}

/// Runs random batches of plain buckets until the mutant differs from the general script.
fn caught_in_plain_buckets(right: &str, wrong: &str) {
    let scripts = [script::bucket(), script::buckets()];
    assert!(scripts.iter().any(|script| script.text().contains(right)), "no script contains {right}");
    let server = Server::start();
    let mut databases = Databases::of(&server);
    let mutate = |text: String| text.replace(right, wrong);
    for number in 0..300 {
        if databases.differ(number, &mutate, &mut Compared::default()).is_some() {
            println!("caught in history {number}: {wrong}");
            return;
        }
    }
    panic!("the mutant survives: {right} -> {wrong}");
}

/// Runs random tolls, corrections and slots until the mutant differs from the reference.
fn caught_in_tolls(right: &str, wrong: &str) {
    let scripts = [script::check(Kinds::ALL), script::correct(), script::slots()];
    assert!(scripts.iter().any(|script| script.text().contains(right)), "no script contains {right}");
    let server = Server::start();
    let mut client = server.connect();
    for number in 0..300 {
        client.text("FLUSHALL");
        let mutate = |text: String| text.replace(right, wrong);
        if Pair::new(&mut client, number, &mutate).differs(60).is_some() {
            println!("caught in history {number}: {wrong}");
            return;
        }
    }
    panic!("the mutant survives: {wrong}");
}

/// Folds random histories of one key until the mutant differs from the reference.
fn caught_in_a_fold(algorithm: Algorithm, right: &str, wrong: &str) {
    let server = Server::start();
    let mut client = server.connect();
    let script = fold::script(|text| {
        assert!(text.contains(right), "no script contains {right}");
        text.replace(right, wrong)
    });
    for number in 0..3_000 {
        for kind in [Kind::Plain, Kind::Refunds, Kind::Changes, Kind::Steps] {
            // Not the cases near the bounds, whose histories of logs and slots are short and slow.
            let history = History::of(&Case::new(algorithm, kind, 3 * number + 1));
            if fold::differs(&mut client, &script, &[history]).is_some() {
                println!("caught in case {number} of {kind:?}: {algorithm} {wrong}");
                return;
            }
        }
    }
    panic!("the mutant survives: {algorithm} {wrong}");
}

/// Decides with a script of the product; `Some` if the time of the decision is not the server's.
fn time_differs(client: &mut Client, mutate: fn(String) -> String) -> Option<String> {
    let names = Names::new("tk", Format::Readable);
    let policy = Arc::new(Policy::new(vec![Limit::new("all", Quota::per_minute(5))]).expect("valid"));
    let toll = policy.toll(Verb::Check, &facts! {}, 1).expect("valid");
    let batch = Batch::new(vec![EncodedToll::new(&toll, 1, |due| names.state(due.key))], Nonce::default());
    let call = batch.call();
    let script = Script::of(mutate(call.script.text().to_owned()));
    let before = server_time(client);
    let answer = client.run(&script, &[call.keys[0].as_bytes()], &[&call.args[0]]).expect("valid");
    let after = server_time(client);
    let reply = batch.read_reply(&answer).expect("valid").replies.remove(0);
    let time = Decision::new(toll, reply).time();
    (time < before || time > after).then(|| format!("{time:?} is not between {before:?} and {after:?}"))
}

fn server_time(client: &mut Client) -> Time {
    let Value::List(parts) = client.text("TIME") else { panic!("a list") };
    let number = |part: &Value| -> u64 {
        let Value::Bytes(digits) = part else { panic!("digits") };
        String::from_utf8_lossy(digits).parse().expect("a number")
    };
    Time::from_micros(number(&parts[0]) * 1_000_000 + number(&parts[1]))
}
