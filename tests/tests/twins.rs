//! The Lua twins: the scripts on a real server give the same results as the Rust algorithms, step by step.

use std::sync::Arc;

use tollkeeper::store::redis::keys::{Format, Names};
use tollkeeper::store::redis::wire::{Batch, EncodedToll, Nonce};
use tollkeeper_core::{Algorithm, Decision, Limit, Policy, Quota, Verb, facts};
use tollkeeper_tests::cases::{Case, Kind};
use tollkeeper_tests::fold::{self, History};
use tollkeeper_tests::plain_buckets::{Compared, Databases};
use tollkeeper_tests::redis::Server;
use tollkeeper_tests::shared::{Pair, Tally};
use tollkeeper_tests::tables;

/// Minimum number of steps for each algorithm.
const STEPS: usize = 100_000;

macro_rules! twins {
    ($($name:ident: $algorithm:ident;)*) => {
        $(
            #[test]
            fn $name() {
                fold_all(stringify!($name), Algorithm::$algorithm);
            }
        )*
    };
}

twins! {
    token_bucket_is_the_same_in_lua: TokenBucket;
    leaky_bucket_is_the_same_in_lua: LeakyBucket;
    fixed_window_is_the_same_in_lua: FixedWindow;
    sliding_window_is_the_same_in_lua: SlidingWindow;
    sliding_log_is_the_same_in_lua: SlidingLog;
    concurrency_is_the_same_in_lua: Concurrency;
}

/// The kinds of cases, each entry for a tenth of them.
const KINDS: [Kind; 10] = [
    Kind::Plain,
    Kind::Plain,
    Kind::Refunds,
    Kind::Refunds,
    Kind::Refunds,
    Kind::Changes,
    Kind::Changes,
    Kind::RefundsOverAChange,
    Kind::RefundsOverAChange,
    Kind::Steps,
];

fn fold_all(name: &str, algorithm: Algorithm) {
    let server = Server::start();
    let mut client = server.connect();
    let script = fold::script(|text| text);
    let (mut number, mut steps, mut cases) = (0, 0, 0);
    while steps < STEPS {
        let mut histories = Vec::new();
        for _ in 0..30 {
            let kind = KINDS[usize::try_from(number / 3 % 10).expect("small")];
            histories.push(History::of(&Case::new(algorithm, kind, number)));
            number += 1;
        }
        if let Some(why) = fold::differs(&mut client, &script, &histories) {
            panic!("{name}: {why}");
        }
        steps += histories.iter().map(|history| history.steps.len()).sum::<usize>();
        cases += histories.len();
    }
    println!("{name}: {steps} steps in {cases} histories");
    assert_eq!(client.keys(), [], "a fold writes nothing");
}

/// Every row of every documented table of cases.
#[test]
fn tables_give_the_same_results_in_lua() {
    let server = Server::start();
    let mut client = server.connect();
    let histories = tables::all();
    if let Some(why) = fold::differs(&mut client, &fold::script(|text| text), &histories) {
        panic!("{why}");
    }
    let steps: usize = histories.iter().map(|history| history.steps.len()).sum();
    println!("{steps} steps in tables");
    assert!(steps > 700, "{steps}");
}

/// All kinds of tolls, several limits and several tolls in a call, with corrections and slots.
#[test]
fn layered_tolls_match_the_reference() {
    let server = Server::start();
    let mut client = server.connect();
    let mut tally = Tally::default();
    let mut number = 0;
    while tally.dues < 100_000 {
        client.text("FLUSHALL");
        let mut pair = Pair::new(&mut client, number, &|text| text);
        if let Some(why) = pair.differs(60) {
            panic!("history {number}: {why}");
        }
        tally.add(&pair.tally);
        number += 1;
    }
    println!("{number} histories: {tally:?}");
    let Tally { refused, corrected, repeated, handled, steps, states, leases, .. } = tally;
    for (count, what) in [
        (refused, "refusals"),
        (corrected, "corrections"),
        (repeated, "repeated corrections"),
        (handled, "slots released or renewed"),
        (steps, "steps of the clock"),
        (states, "states"),
        (leases, "leases"),
    ] {
        assert!(count > 150, "too few {what}: {count}");
    }
}

/// The scripts for plain buckets give the same replies as the general one, and leave the same bytes and expiry.
#[test]
fn plain_bucket_scripts_match_the_general_one() {
    let server = Server::start();
    let mut databases = Databases::of(&server);
    let mut compared = Compared::default();
    for number in 0..150 {
        if let Some(why) = databases.differ(number, &|text| text, &mut compared) {
            panic!("history {number}: {why}");
        }
    }
    println!("{compared:?}");
    let Compared { lone, batches, long } = compared;
    assert!(lone > 200 && batches > 2_000 && long > 300, "{compared:?}");
}

/// A value that is not a valid state, or of another Redis type, counts as empty and is overwritten; the other keys of
/// the batch are not affected.
#[test]
fn foreign_values_count_as_empty_and_are_overwritten() {
    let server = Server::start();
    let mut client = server.connect();
    let names = Names::new("tk", Format::Readable);
    let limits = Algorithm::ALL.map(|algorithm| {
        let grant = if algorithm == Algorithm::Concurrency { Quota::slots(5) } else { Quota::per_hour(5) };
        Limit::new(algorithm.name(), grant).algorithm(algorithm)
    });
    let policy = Arc::new(Policy::new(limits.to_vec()).unwrap());
    let toll = policy.toll(Verb::Acquire, &facts! {}, 1).unwrap();
    for value in ["RPUSH $ x", "SADD $ x", "SET $ x", "SET $ 12345678901234567890"] {
        client.text("FLUSHALL");
        for due in toll.dues() {
            client.text(&value.replace('$', &names.state(due.key)));
        }
        for left in [4, 3] {
            let asked = || EncodedToll::new(&toll, 7, |due| names.state(due.key));
            let batch = Batch::new(vec![asked()], Nonce::default());
            let call = batch.call();
            let keys: Vec<&[u8]> = call.keys.iter().map(String::as_bytes).collect();
            let answer = client.run(call.script, &keys, &[&call.args[0]]).unwrap();
            let reply = batch.read_reply(&answer).unwrap();
            assert_eq!(reply.disagreements, 0);
            for reply in reply.replies {
                let decision = Decision::new(toll.clone(), reply);
                assert!(decision.allowed(), "{value}");
                for answer in decision.limits() {
                    assert_eq!(answer.outcome().remaining, left, "{value}: {}", answer.name());
                }
            }
        }
        assert!(client.keys().iter().all(|(_, expires)| *expires > 0), "{value}: a key without expiry");
    }
}
