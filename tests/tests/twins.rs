//! The twins: what Rust says and what Lua says on a real server is the same, step for step.

use tollkeeper_core::Algorithm;
use tollkeeper_tests::cases::{Case, Kind};
use tollkeeper_tests::fold::{self, History};
use tollkeeper_tests::redis::Server;

/// So many steps of each algorithm, at least.
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

/// What a tenth of the cases each is made of.
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
