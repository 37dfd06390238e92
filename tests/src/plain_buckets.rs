//! Runs random batches of plain buckets twice, with the script that the store chooses and with the general one.
//!
//! The replies must be the same byte by byte, and so must the stored states and their expiry.

use std::sync::Arc;

use tollkeeper::store::redis::keys::{Format, Names};
use tollkeeper::store::redis::script::{self, Kinds, Script};
use tollkeeper::store::redis::wire::{Batch, Call, EncodedToll, Nonce, Value};
use tollkeeper_core::{Algorithm, Limit, Policy, Quota, Span, Verb, facts};

use crate::cases::Random;
use crate::redis::{Client, Server};
use crate::shared::{Mutate, TIME};

/// A time in 2030, so that the server does not find keys expired that were written at an invented time.
const START: u64 = 1_900_000_000_000_000;

/// Two databases of one server with the same history: one for the chosen scripts, one for the general script.
#[derive(Debug)]
pub struct Databases {
    chosen: Client,
    general: Client,
}

/// Counts of what was compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compared {
    /// Calls of one bucket.
    pub lone: u64,
    /// Other calls.
    pub batches: u64,
    /// Stored states of 14 bytes.
    pub long: u64,
}

impl Databases {
    /// Two empty databases.
    pub fn of(server: &Server) -> Databases {
        let (chosen, mut general) = (server.connect(), server.connect());
        general.text("SELECT 1");
        Databases { chosen, general }
    }

    /// Runs the history of that number, with a mutation of the chosen scripts, and returns the first difference.
    pub fn differ(&mut self, number: u64, mutate: Mutate<'_>, compared: &mut Compared) -> Option<String> {
        self.chosen.text("FLUSHALL");
        let mut random = Random::new(number);
        let names = Names::new("tk", Format::Readable);
        let limits: Vec<Limit> = (0..random.within(1, 3)).map(|index| limit(&mut random, index)).collect();
        let policy = Arc::new(Policy::new(limits).expect("valid limits"));
        let mut now = START;
        for _ in 0..25 {
            let wait = [1, 1_000, 3_000_000, 70_000_000, 100_000_000_000][random.below(5)];
            let wait = random.within(0, wait);
            // Now and then the clock is set back.
            now = if random.within(0, 7) == 0 { START.max(now - wait.min(now)) } else { now + wait };
            let first = random.within(0, 5);
            let tolls = (first..=first + random.within(0, 3)).map(|user| {
                let user = format!("user-{user}");
                let cost = [1, 1, 5, 400, 100_000][random.below(5)];
                let toll = policy.toll(Verb::Check, &facts! { "user" => &*user }, cost).expect("valid");
                EncodedToll::new(&toll, 7, |due| names.state(due.key))
            });
            let batch = Batch::new(tolls.collect(), Nonce::new(0xFEDC_BA98_7654_3210));
            let call = batch.call();
            if random.within(0, 15) == 0 {
                self.spoil(&call.keys[0], random.below(4));
            }
            let buckets = Kinds::default().with(Algorithm::LeakyBucket);
            let expected = if call.keys.len() == 1 { script::bucket() } else { script::buckets() };
            assert_eq!(call.script, expected, "every batch here is plain");
            let chosen = Script::of(mutate(call.script.text().to_owned()));
            let [chosen, general] = [
                run(&mut self.chosen, &chosen, call, now),
                run(&mut self.general, script::check(buckets), call, now),
            ];
            if chosen != general {
                return Some(format!("{chosen:?}\nand not\n{general:?}"));
            }
            match call.keys.len() {
                1 => compared.lone += 1,
                _ => compared.batches += 1,
            }
            let (chosen, general) = (stored(&mut self.chosen), stored(&mut self.general));
            if chosen != general {
                return Some(format!("{chosen:?}\nand not\n{general:?}"));
            }
            let is_long = |(_, value, _): &&(Vec<u8>, Value, i64)| matches!(value, Value::Bytes(bytes) if bytes.len() == 14);
            compared.long += chosen.iter().filter(is_long).count() as u64;
        }
        None
    }

    /// Stores a value that is not the state of a bucket.
    fn spoil(&mut self, key: &str, how: usize) {
        let command = ["SET $ x", "RPUSH $ x", "SET $ 1234567890123456", "SET $ ~~~~~~~~~~~~~~"][how];
        for client in [&mut self.chosen, &mut self.general] {
            client.text(&format!("DEL {key}"));
            client.text(&command.replace('$', key));
            client.text(&format!("PEXPIREAT {key} 4000000000000"));
        }
    }
}

/// Runs a script with the keys and the arguments of a call, at a time that is given.
fn run(client: &mut Client, script: &Script, call: &Call, now: u64) -> Result<Value, String> {
    let timed = script.text().replace(TIME, "local time = { ARGV[2], ARGV[3] }");
    let keys: Vec<&[u8]> = call.keys.iter().map(String::as_bytes).collect();
    let (seconds, micros) = ((now / 1_000_000).to_string(), (now % 1_000_000).to_string());
    client.run(&Script::of(timed), &keys, &[&call.args[0], seconds.as_bytes(), micros.as_bytes()])
}

/// All keys with their value and expiry.
fn stored(client: &mut Client) -> Vec<(Vec<u8>, Value, i64)> {
    let mut keys = client.keys();
    keys.sort();
    let read = |(name, expires): (Vec<u8>, i64)| {
        let value = client.call(&[b"GET", &name]).unwrap_or_else(|error| Value::Bytes(error.into()));
        (name, value, expires)
    };
    keys.into_iter().map(read).collect()
}

/// A plain bucket, small or large, in any tick.
fn limit(random: &mut Random, index: u64) -> Limit {
    let period = [1_000, 1_000_000, 60_000_000, 3_600_000_000, 604_800_000_000][random.below(5)];
    let size = [3, 20, 1_000, 200_000][random.below(4)];
    let [count, burst] = [(); 2].map(|()| random.within(1, size));
    let rate = Quota::every(count, Span::from_micros(period)).burst(burst);
    let algorithm = [Algorithm::TokenBucket, Algorithm::LeakyBucket][random.below(2)];
    Limit::new(format!("limit-{index}"), rate).algorithm(algorithm).by("user")
}
