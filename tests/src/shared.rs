//! Runs random tolls, corrections and slots on a real Redis and on the reference store, and compares them.
//!
//! The scripts are those of the product, except for one line: the time is an argument. Every decision must be the same,
//! and so must the bytes of every state and its expiry.

use std::collections::HashMap;
use std::sync::Arc;

use tollkeeper::Correction;
use tollkeeper::store::LeaseRequest;
use tollkeeper::store::redis::keys::{Format, Names};
use tollkeeper::store::redis::script::Script;
use tollkeeper::store::redis::state;
use tollkeeper::store::redis::wire::{self, Batch, Call, EncodedToll, Handling, Nonce, Value};
use tollkeeper_core::lease::Lease;
use tollkeeper_core::{
    Algorithm, Allowance, Charge, Costs, Decision, Key, Limit, Missing, Mode, Policy, Quota, Slot, Span,
    Time, Toll, Verb, facts,
};

use crate::cases::Random;
use crate::redis::Client;
use crate::reference::Reference;

/// A time in 2030, so that the server does not find keys expired that were written at an invented time.
const START: u64 = 1_900_000_000_000_000;

/// The line of a script that reads the time.
pub const TIME: &str = "local time = call('TIME')";

/// Modifies a script: the identity, or a mutation.
pub type Mutate<'m> = &'m dyn Fn(String) -> String;

/// A history on two stores.
pub struct Pair<'c> {
    client: &'c mut Client,
    mutate: Mutate<'c>,
    scripts: TimedScripts,
    names: Names,
    reference: Reference,
    policy: Arc<Policy>,
    random: Random,
    now: u64,
    ids: u64,
    charges: Vec<Charge>,
    slots: Vec<Slot>,
    /// Counts of the operations so far.
    pub tally: Tally,
}

/// Counts of what a history covered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Batches decided.
    pub batches: u64,
    /// Tolls in them.
    pub tolls: u64,
    /// Dues in those.
    pub dues: u64,
    /// Tolls refused.
    pub refused: u64,
    /// Refunds and settlements done.
    pub corrected: u64,
    /// Those that had been done before.
    pub repeated: u64,
    /// Slots released or renewed.
    pub handled: u64,
    /// Steps of the clock.
    pub steps: u64,
    /// States compared byte by byte.
    pub states: u64,
    /// Leases granted.
    pub leases: u64,
}

impl Tally {
    /// Adds another.
    pub fn add(&mut self, other: &Tally) {
        self.batches += other.batches;
        self.tolls += other.tolls;
        self.dues += other.dues;
        self.refused += other.refused;
        self.corrected += other.corrected;
        self.repeated += other.repeated;
        self.handled += other.handled;
        self.steps += other.steps;
        self.states += other.states;
        self.leases += other.leases;
    }
}

impl<'c> Pair<'c> {
    /// The history with this number, on an empty server.
    pub fn new(client: &'c mut Client, number: u64, mutate: Mutate<'c>) -> Pair<'c> {
        let mut random = Random::new(number);
        let limits = (0..random.within(1, 5)).map(|index| limit(&mut random, index)).collect();
        let policy = Arc::new(Policy::new(limits).expect("valid limits"));
        let format = if random.within(0, 1) == 0 { Format::Readable } else { Format::Compact };
        Pair {
            client,
            mutate,
            scripts: TimedScripts::default(),
            names: Names::new("tk", format),
            reference: Reference::default(),
            policy,
            random,
            now: START,
            ids: number << 20,
            charges: Vec::new(),
            slots: Vec::new(),
            tally: Tally::default(),
        }
    }

    /// Runs this many random operations and returns the first difference, if any.
    pub fn differs(&mut self, things: u64) -> Option<String> {
        for _ in 0..things {
            self.wait();
            let differs = match self.random.within(0, 99) {
                0..=54 => self.decide(),
                55..=79 => self.correct(),
                _ => self.handle(),
            };
            if let Some(why) = differs.or_else(|| self.states_differ()) {
                return Some(format!("{why}\nat {} of {:#?}", self.now, self.policy));
            }
        }
        None
    }

    fn wait(&mut self) {
        let random = &mut self.random;
        let wait = match random.within(0, 9) {
            0..=4 => random.within(0, 3),
            5..=6 => random.within(1, 2_000_000),
            7 => random.within(1, 70_000_000),
            8 => random.within(1, 100_000_000_000),
            _ => random.within(1, 3) * 60_000_000 - 1,
        };
        if random.within(0, 19) == 0 {
            self.now = self.now.saturating_sub(wait * random.within(1, 5)).max(START);
            self.tally.steps += 1;
        } else {
            self.now += wait;
        }
    }

    fn decide(&mut self) -> Option<String> {
        let tolls: Vec<Toll> = (0..self.random.within(1, 12)).map(|_| self.toll()).collect();
        let mut asked = Vec::new();
        let leases: Vec<Option<LeaseRequest>> = tolls.iter().map(|toll| self.lease(toll)).collect();
        for (toll, lease) in tolls.iter().zip(&leases) {
            self.ids += 1;
            if let Some(request) = lease {
                asked.push(EncodedToll::lease(request, |due| self.names.state(due.key)));
                continue;
            }
            asked.push(EncodedToll::new(toll, self.ids, |due| self.names.state(due.key)));
        }
        let first = self.ids + 1 - tolls.len() as u64;
        let batch = Batch::new(asked, Nonce::new(0xFEDC_BA98_7654_3210));
        let now = Time::from_micros(self.now);
        let (replies, disagreements) = if batch.call().keys.is_empty() {
            (batch.replies_without_store(now), 0)
        } else {
            let answer = match self.run(batch.call()) {
                Ok(answer) => answer,
                Err(error) => return Some(error),
            };
            let Ok(reply) = batch.read_reply(&answer) else {
                return Some(format!("malformed reply: {answer:?}"));
            };
            (reply.replies, reply.disagreements)
        };
        if disagreements > 0 {
            return Some(format!("{disagreements} verdicts of Lua differ from those of Rust: {tolls:#?}"));
        }
        self.tally.batches += 1;
        for (index, (toll, reply)) in tolls.iter().zip(replies).enumerate() {
            if let Some(request) = &leases[index] {
                let (granted, expected) = (wire::granted(&reply), self.reference.lease(request, now));
                if granted != expected {
                    return Some(format!("{granted:?} and not {expected:?}\nfor {request:#?}"));
                }
                self.tally.leases += u64::from(granted.units > 0);
                continue;
            }
            let expected = self.reference.decide(toll, now, first + index as u64);
            let expected = Decision::new(toll.clone(), expected);
            let actual = Decision::new(toll.clone(), reply);
            if shown(&actual) != shown(&expected) {
                return Some(format!("{}\ninstead of\n{}\nfor {toll:#?}", shown(&actual), shown(&expected)));
            }
            self.tally.tolls += 1;
            self.tally.dues += toll.len() as u64;
            self.tally.refused += u64::from(!actual.allowed());
            self.charges.extend(actual.charge());
            self.slots.extend(actual.slot());
        }
        None
    }

    /// Now and then, a lease of a key of this toll instead of the toll.
    fn lease(&mut self, toll: &Toll) -> Option<LeaseRequest> {
        let random = &mut self.random;
        let due = toll.dues().position(|due| due.quota.count() > 0 && Lease::has(due.quota.algorithm()));
        let index = due.filter(|_| random.within(0, 4) == 0)?;
        let toll = toll.part(&[index]);
        let quota = *toll.get(0).quota;
        let raise = match quota.algorithm().has_burst() {
            true => quota.capacity() * random.within(0, 8) / 16,
            false => 0,
        };
        let lease = Lease { life: Span::from_millis(100), raise, largest: quota.count() };
        Some(LeaseRequest { toll, want: random.within(1, 30), lease })
    }

    fn toll(&mut self) -> Toll {
        let random = &mut self.random;
        let user = ["alice", "bob", "{c}: %", "nobody"][place(random, 4)];
        let tenant = ["one", "two"][place(random, 2)];
        let mut facts = facts! { "tokens" => i64::try_from(random.within(0, 6)).expect("small") };
        if random.within(0, 9) > 0 {
            facts.put("user", user);
        }
        if random.within(0, 9) > 0 {
            facts.put("tenant", tenant);
        }
        facts.put("plan", ["free", "pro"][place(random, 2)]);
        let verb = match random.within(0, 19) {
            0..=10 => Verb::Check,
            11..=12 => Verb::Peek,
            13 => Verb::Usage,
            14..=15 => Verb::Reserve(Span::from_secs(random.within(1, 60))),
            _ => Verb::Acquire,
        };
        let cost = match random.within(0, 7) {
            0 => random.within(1, 30),
            1 => random.within(1, 400),
            _ => random.within(1, 3),
        };
        let toll = self.policy.toll(verb, &facts, cost).expect("a valid request");
        if random.within(0, 5) == 0 {
            toll.hold(Span::from_micros(random.within(0, 20_000_000)))
        } else {
            toll
        }
    }

    fn correct(&mut self) -> Option<String> {
        if self.charges.is_empty() {
            return None;
        }
        // Usually the latest charge, sometimes one that was corrected already.
        let back = place(&mut self.random, self.charges.len().min(6));
        let charge = self.charges[self.charges.len() - 1 - back].clone();
        let tokens = facts! { "tokens" => i64::try_from(self.random.within(0, 9)).expect("small") };
        let few = self.random.within(0, 9);
        let changes = match self.random.within(0, 4) {
            0..=1 => charge.refund(Costs::All),
            2 => charge.refund(Costs::Request(few)).or_else(|_| charge.refund(Costs::All)),
            3 => charge.settle(Costs::Request(few)).or_else(|_| charge.settle(Costs::All)),
            _ => charge.settle(Costs::Facts(&tokens)).or_else(|_| charge.settle(Costs::All)),
        };
        let corrections = charge.corrections(&self.policy, &changes.expect("valid costs"));
        let call = wire::correction(
            Nonce::new(u64::MAX),
            charge.void_at(),
            charge.items().iter().zip(&corrections),
            |item| {
                let name = self.names.item(item);
                let marker = self.names.marker(&name, charge.id());
                [name, marker]
            },
        );
        let answer = match self.run(&call) {
            Ok(answer) => answer,
            Err(error) => return Some(error),
        };
        let actual = wire::corrected(&call, &answer).expect("0, 1 or 2");
        let expected = self.reference.correct(&charge, &corrections, Time::from_micros(self.now));
        match actual {
            Correction::Done => self.tally.corrected += 1,
            Correction::Repeated => self.tally.repeated += 1,
            Correction::Unknown | Correction::Failed | Correction::Full => {}
        }
        (actual != expected).then(|| format!("{actual:?} instead of {expected:?}: {charge:?}"))
    }

    fn handle(&mut self) -> Option<String> {
        if self.slots.is_empty() {
            return None;
        }
        let back = place(&mut self.random, self.slots.len().min(6));
        let slot = self.slots[self.slots.len() - 1 - back].clone();
        let renew = self.random.within(0, 1) == 1;
        let handling = if renew { Handling::Renew } else { Handling::Release };
        let names = slot.items().iter().map(|item| self.names.item(item)).collect();
        let call = wire::handling(Nonce::new(u64::MAX), slot.id(), handling, names);
        let answer = match self.run(&call) {
            Ok(answer) => answer,
            Err(error) => return Some(error),
        };
        let actual = wire::handled(&call, &answer).expect("0 or 1");
        let expected = self.reference.handle(&slot, renew, Time::from_micros(self.now));
        self.tally.handled += u64::from(actual);
        (actual != expected).then(|| format!("held: {actual} instead of {expected}: {slot:?}"))
    }

    /// Runs a script of the product with an explicit time.
    fn run(&mut self, call: &Call) -> Result<Value, String> {
        self.scripts.run(self.client, call, self.now, self.mutate)
    }

    /// Compares the stored states and their expiry with the reference.
    fn states_differ(&mut self) -> Option<String> {
        let mut expected = HashMap::new();
        for (key, state, fresh) in self.reference.states() {
            let key = Key::from_bytes(key).expect("a key");
            expected.insert(self.names.state(key).into_bytes(), (state::encode(state), fresh));
        }
        for (name, expires) in self.client.keys() {
            let shown = String::from_utf8_lossy(&name).into_owned();
            if expires < 0 {
                return Some(format!("{shown} never expires"));
            }
            let Some((bytes, fresh)) = expected.remove(&name) else {
                // A marker, or a state that the server's clock has not reached yet.
                if shown.contains("%m") {
                    continue;
                }
                return Some(format!("{shown} should not exist"));
            };
            let stored = self.client.call(&[b"GET", &name]).expect("a string");
            if stored != Value::Bytes(bytes.clone()) {
                return Some(format!("{shown} is {stored:?} instead of {bytes:?}"));
            }
            let (fresh, gone) = (fresh.as_micros(), u64::try_from(expires).expect("positive") * 1_000);
            if gone <= fresh || gone > fresh + 1_000_000 {
                return Some(format!("{shown} expires at {gone}, and is fresh at {fresh}"));
            }
            self.tally.states += 1;
        }
        let missing = expected.keys().next()?;
        Some(format!("{} is missing", String::from_utf8_lossy(missing)))
    }
}

/// The scripts of the product with the time as an argument, by the hash of the original.
#[derive(Debug, Default)]
pub struct TimedScripts(HashMap<String, Script>);

impl TimedScripts {
    /// Runs a script of the product, mutated, at a time in microseconds.
    pub fn run(
        &mut self,
        client: &mut Client,
        call: &Call,
        now: u64,
        mutate: Mutate<'_>,
    ) -> Result<Value, String> {
        let script = self.0.entry(call.script.sha().to_owned()).or_insert_with(|| {
            let text = mutate(call.script.text().to_owned());
            Script::of(text.replace(TIME, "local time = { ARGV[#ARGV - 1], ARGV[#ARGV] }"))
        });
        let keys: Vec<&[u8]> = call.keys.iter().map(String::as_bytes).collect();
        let (seconds, micros) = ((now / 1_000_000).to_string(), (now % 1_000_000).to_string());
        let mut args: Vec<&[u8]> = call.args.iter().map(|arg| &arg[..]).collect();
        args.extend([seconds.as_bytes(), micros.as_bytes()]);
        client.run(script, &keys, &args)
    }
}

fn shown(decision: &Decision) -> String {
    let limits: Vec<_> =
        decision.limits().map(|answer| (answer.name().to_owned(), answer.outcome())).collect();
    let (charge, slot) = (decision.charge(), decision.slot());
    format!("{:?} {:?} {limits:?} {charge:?} {slot:?}", decision.verdict(), decision.time())
}

fn place(random: &mut Random, len: usize) -> usize {
    usize::try_from(random.within(0, len as u64 - 1)).expect("an index")
}

/// A random limit.
fn limit(random: &mut Random, index: u64) -> Limit {
    let algorithm = Algorithm::ALL[place(random, 6)];
    let period =
        [1_000, 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000, 604_800_000_000][place(random, 6)];
    let rate = |random: &mut Random| {
        // Some logs are longer than one chunk of the script's reads.
        let long = algorithm == Algorithm::SlidingLog && random.within(0, 1) == 0;
        let count = if long { random.within(200, 1_500) } else { random.within(1, 20) };
        let burst = algorithm.has_burst().then(|| random.within(1, 20));
        Quota::every(count, Span::from_micros(period)).with_burst(burst)
    };
    let grant = |random: &mut Random| match algorithm {
        Algorithm::Concurrency => Quota::slots(random.within(1, 6)),
        _ => rate(random),
    };
    let name = format!("limit-{index}");
    let tiered = random.within(0, 3) == 0;
    let mut limit = match tiered {
        true => {
            let free = if random.within(0, 2) == 0 { Allowance::Nothing } else { grant(random).into() };
            Limit::tiered(name, "plan").tier("free", free).tier("pro", grant(random)).default_tier("free")
        }
        false => Limit::new(name, grant(random)),
    };
    limit = limit.algorithm(algorithm);
    limit = match random.within(0, 3) {
        0 => limit,
        1 => limit.by("tenant"),
        2 => limit.by("user"),
        _ => limit.by("tenant").by("user"),
    };
    if algorithm == Algorithm::Concurrency {
        limit = limit.ttl(std::time::Duration::from_micros(period.clamp(1_000_000, 3_600_000_000)));
    } else if random.within(0, 3) == 0 {
        limit = limit.cost("tokens");
    }
    if algorithm == Algorithm::FixedWindow && random.within(0, 1) == 0 {
        limit = limit.stagger();
    }
    limit = match random.within(0, 5) {
        0 => limit.missing(Missing::Deny),
        1 => limit.missing(Missing::Share),
        _ => limit,
    };
    limit.mode(if random.within(0, 4) == 0 { Mode::Shadow } else { Mode::Enforce })
}
