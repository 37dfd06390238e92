//! Every rate-limit header, for random limits and states, is valid to an independent parser of RFC 9651.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use tollkeeper::http::HeaderDialect;
use tollkeeper::{
    Algorithm, Allowance, Capacity, Clock, Limit, Limiter, ManualClock, MemoryStore, Mode, Percent, Policy,
    Quota, Span, Time, facts,
};
use tollkeeper_tower::headers::{self, Field, Jitter};

/// A Python program that parses `kind<TAB>value` lines and prints each value as it serialises it.
const PARSER: &str = r#"
import sys, http_sfv
kinds = {"list": http_sfv.List, "dictionary": http_sfv.Dictionary, "item": http_sfv.Item}
for line in sys.stdin:
    kind, value = line.rstrip("\n").split("\t")
    field = kinds[kind]()
    try:
        field.parse(value.encode("ascii"))
        print(str(field), flush=True)
    except Exception as error:
        print("ERROR", error, flush=True)
"#;

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % end
    }

    fn limit(&mut self, name: usize) -> Limit {
        let names = ["per-user", "a", "0.1_x-", "daily", "z9"];
        let name = names[name % names.len()];
        let period = Duration::from_millis([10, 999, 1_000, 60_000, 3_600_000, 604_800_000][self.index(6)]);
        let count = [1, 7, 1_000, 100_000][self.index(4)];
        let limit = match self.below(7) {
            0 => return Limit::new(name, Quota::slots(1 + self.below(20))),
            1 => return Limit::new(name, Allowance::Nothing),
            2 => Limit::new(name, Quota::per(count, period).burst(1 + self.below(50))),
            3 => Limit::new(name, Quota::per(count, period)).algorithm(Algorithm::LeakyBucket),
            4 => Limit::new(name, Quota::per(1 << 49, period)).algorithm(Algorithm::FixedWindow),
            5 => Limit::new(name, Quota::per(count, period)).algorithm(Algorithm::SlidingLog),
            _ => Limit::new(name, Quota::per(count, period)),
        };
        if self.below(6) == 0 { limit.mode(Mode::Shadow) } else { limit }
    }

    fn index(&mut self, end: usize) -> usize {
        usize::try_from(self.below(end as u64)).expect("small")
    }
}

/// The structured type of a header in its specification.
fn kind(dialect: HeaderDialect, field: Field) -> &'static str {
    match (dialect, field) {
        (HeaderDialect::Draft07, Field::RateLimit) => "dictionary",
        (_, Field::RateLimit | Field::RateLimitPolicy) => "list",
        (HeaderDialect::Draft03, Field::RateLimitLimit) => "list",
        _ => "item",
    }
}

#[test]
fn every_header_is_read_by_an_independent_parser() {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/python/bin/python3");
    let mut parser = Command::new(&python)
        .args(["-c", PARSER])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error} (`tools/test` installs it)", python.display()));
    let (mut input, mut output) =
        (parser.stdin.take().unwrap(), BufReader::new(parser.stdout.take().unwrap()).lines());
    let mut random = Random(0x94d0_49bb_1331_11eb);
    let jitter = Jitter { share: Percent::new(10), draw: tollkeeper_tower::random::draw };
    let mut read = [0; 9];
    for _ in 0..300 {
        let clock = ManualClock::new(Time::from_micros(1_760_000_000_000_000 + random.below(1 << 40)));
        let store = MemoryStore::new(Capacity::default(), Clock::manual(&clock));
        let limits = (0..=random.index(4)).map(|name| random.limit(name)).collect();
        // Some random limits are invalid: their burst would take more than 50 years to refill.
        let Ok(policy) = Policy::new(limits) else { continue };
        let limiter = Limiter::embedded(policy, store);
        for _ in 0..6 {
            clock.advance(Span::from_micros(random.below(5_000_000)));
            let facts = facts! {};
            let most = if random.below(4) == 0 { 1 << 30 } else { 8 };
            let cost = 1 + random.below(most);
            let acquired = limiter.acquire(&facts).cost(cost).wait().unwrap();
            for dialect in HeaderDialect::ALL {
                for (field, value) in headers::write(&acquired.decision, &[dialect], &jitter).iter() {
                    let value = str::from_utf8(value).unwrap();
                    writeln!(input, "{}\t{value}", kind(dialect, field)).unwrap();
                    let parsed = output.next().expect("the parser responds").unwrap();
                    assert_eq!(parsed, value, "{} of {}", field.name(), dialect.name());
                    read[Field::ALL.iter().position(|other| *other == field).unwrap()] += 1;
                }
            }
            acquired.slot.map(tollkeeper::SlotGuard::keep);
        }
    }
    drop(input);
    assert!(parser.wait().unwrap().success());
    assert!(read.iter().all(|count| *count > 100), "{read:?}");
}
