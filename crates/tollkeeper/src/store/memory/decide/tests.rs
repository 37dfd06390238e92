//! Compares the fast paths with the general path.
//!
//! Two stores with the same clock and the same secrets go through the same random history. One may take the fast paths,
//! the other always uses `decide_new`. After every step, the decisions and the contents of both stores
//! must be equal.

use std::time::Duration;

use tollkeeper_core::algorithm::State;
use tollkeeper_core::charge::{Charge, Costs};
use tollkeeper_core::decision::LimitDecision;
use tollkeeper_core::{
    Algorithm, Allowance, Decision, Facts, Limit, Mode, Policy, Quota, Secret, Slot, Span, Verb,
};

use super::*;
use crate::clock::{Clock, ManualClock};
use crate::limiter::Limiter;
use crate::limiter::handle::{Handle, KeyDecision, Layers};
use crate::store::memory::table::Entry;
use crate::store::memory::{Capacity, Secrets};
use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::lock;

/// A capacity for fewer keys than there are, so that keys share cells.
const FULL: usize = 7;
/// A capacity for all keys, in four shards.
const ROOMY: usize = 1024;

#[test]
fn every_path_decides_a_toll_alike() {
    let mut seen = Seen::default();
    for seed in 1..=40 {
        for max_keys in [FULL, ROOMY] {
            history(seed, max_keys, &mut seen, |twins| {
                let decision = twins.ask_policy();
                twins.receipts.extend(decision.charge());
                twins.slots.extend(decision.slot());
                decision
            });
        }
    }
    seen.everything();
}

#[test]
fn handles_and_layers_decide_alike_on_every_path() {
    let mut seen = Seen::default();
    for seed in 1..=40 {
        for max_keys in [FULL, ROOMY] {
            history(seed, max_keys, &mut seen, |twins| match twins.random.below(3) {
                0 => twins.ask_handle(),
                1 => twins.ask_layers(),
                _ => twins.ask_policy(),
            });
        }
    }
    seen.everything();
}

/// Runs 400 steps: each moves the clock, may replace the limits, may correct a charge, and then decides by `ask`.
fn history(seed: u64, max_keys: usize, seen: &mut Seen, ask: impl Fn(&mut Twins) -> Decision) {
    let mut twins = Twins::new(seed, max_keys);
    for step in 0..400 {
        twins.turn_clock();
        if twins.random.below(24) == 0 {
            let limits = limits(&mut twins.random);
            twins.limiter.replace(limits).expect("valid");
        }
        twins.correct();
        let decision = ask(&mut twins);
        assert_eq!(held(&twins.short), held(&twins.general), "after step {step} of history {seed}");
        seen.note(&decision);
    }
}

struct Twins {
    /// Uses the store `short`.
    limiter: Limiter,
    /// The store that may take the fast paths.
    short: MemoryStore,
    /// The store that always takes the general path.
    general: MemoryStore,
    handles: [Handle; 3],
    two: Layers<2>,
    three: Layers<3>,
    hand: ManualClock,
    receipts: Vec<Charge>,
    slots: Vec<Slot>,
    random: Random,
}

impl Twins {
    fn new(seed: u64, max_keys: usize) -> Twins {
        let mut random = Random(seed);
        let hand = ManualClock::new(Time::from_micros(1_760_000_000_000_000));
        let secrets = Secrets { prints: Secret([7; 16]), receipts: Secret([8; 16]) };
        let capacity = Capacity { max_keys, ..Capacity::default() };
        let store = || MemoryStore::with_secrets(capacity, Clock::manual(&hand), secrets);
        let (short, general) = (store(), store());
        let policy = Policy::new(limits(&mut random)).expect("valid limits");
        let limiter = Limiter::embedded(policy, short.clone());
        Twins {
            handles: ["a", "b", "c"].map(|limit| limiter.handle(limit).expect("a plain limit")),
            two: limiter.layers(["a", "b"]).expect("plain limits"),
            three: limiter.layers(["a", "b", "c"]).expect("plain limits"),
            limiter,
            short,
            general,
            hand,
            receipts: Vec::new(),
            slots: Vec::new(),
            random,
        }
    }

    fn turn_clock(&mut self) {
        let now = self.hand.now().as_micros();
        self.hand.set(Time::from_micros(match self.random.below(12) {
            0..=4 => now,
            5..=7 => now + self.random.below(700_000),
            8 | 9 => now + self.random.below(5_000_000),
            10 => now - self.random.below(3_000_000),
            // An hour, longer than most quotas here take to refill, forward or back.
            _ if self.random.coin() => now + 3_600_000_000,
            _ => now - 3_600_000_000,
        }));
    }

    /// Decides a random toll, with one or two sets of facts, in both stores.
    fn ask_policy(&mut self) -> Decision {
        let verb = match self.random.below(8) {
            0 => Verb::Peek,
            1 => Verb::Usage,
            2 | 3 => Verb::Acquire,
            4 => Verb::Reserve(Span::from_secs(2)),
            _ => Verb::Check,
        };
        let mut toll = Toll::new(&self.limiter.policy(), verb);
        if self.random.below(8) == 0 {
            toll = toll.hold(Span::from_micros(self.random.below(1_000_000)));
        }
        for _ in 0..1 + self.random.below(5) / 4 {
            let cost = self.random.cost();
            let tokens = self.random.below(3).to_string();
            let names: Vec<&str> =
                ["a", "b", "c", "d", "e"].into_iter().filter(|_| self.random.below(5) < 2).collect();
            let values: Vec<String> = names.iter().map(|_| self.random.value()).collect();
            let facts = facts(&names, &values).with("tokens", tokens);
            toll.add(&facts, cost).expect("valid facts");
        }
        let short = Decision::new(toll.clone(), self.short.decide(&toll));
        let general = Decision::new(toll.clone(), decide_generally(&self.general, &toll));
        assert_eq!(short.allowed(), general.allowed(), "{toll:?}");
        assert_eq!(outcomes(&short), outcomes(&general), "{toll:?}");
        assert_eq!(short.charge(), general.charge(), "{toll:?}");
        assert_eq!(short.slot(), general.slot(), "{toll:?}");
        general
    }

    fn ask_handle(&mut self) -> Decision {
        let index = usize::try_from(self.random.below(3)).expect("small");
        let (value, cost, peek) = (self.random.value(), self.random.cost(), self.random.below(4) == 0);
        let handle = &self.handles[index];
        let decision = if peek { handle.peek(&value) } else { handle.check_cost(&value, cost) };
        let decision = decision.expect("valid");
        let general = self.generally(&["a", "b", "c"][index..=index], &[value], cost, peek);
        compare(&[decision], decision.allowed, &general);
        general
    }

    fn ask_layers(&mut self) -> Decision {
        let (cost, peek) = (self.random.cost(), self.random.below(4) == 0);
        let values: [String; 3] = std::array::from_fn(|_| self.random.value());
        let [a, b, c] = values.each_ref().map(String::as_str);
        if self.random.coin() {
            let decided = if peek { self.two.peek([a, b]) } else { self.two.check_cost([a, b], cost) };
            let layers = decided.expect("valid");
            let general = self.generally(&["a", "b"], &values[..2], cost, peek);
            compare(&layers.limits, layers.allowed, &general);
            general
        } else {
            let decided =
                if peek { self.three.peek([a, b, c]) } else { self.three.check_cost([a, b, c], cost) };
            let layers = decided.expect("valid");
            let general = self.generally(&["a", "b", "c"], &values, cost, peek);
            compare(&layers.limits, layers.allowed, &general);
            general
        }
    }

    /// The decision of the other store, by the general path, for the same request given as facts.
    fn generally(&self, names: &[&str], values: &[String], cost: u64, peek: bool) -> Decision {
        let (verb, cost) = if peek { (Verb::Peek, 1) } else { (Verb::Check, cost) };
        let toll = self.limiter.policy().toll(verb, &facts(names, values), cost).expect("valid facts");
        let reply = decide_generally(&self.general, &toll);
        Decision::new(toll, reply)
    }

    /// Sometimes corrects a charge or releases a slot, in both stores. This leads to levels above the limit, cells
    /// that shrink, and markers.
    fn correct(&mut self) {
        if self.random.below(6) == 0
            && let Some(charge) = self.receipts.pop()
        {
            let actual = charge.settle(Costs::Request(self.random.below(6)));
            let changes = actual.or_else(|_| charge.settle(Costs::All)).expect("valid costs");
            let corrections = charge.corrections(&self.limiter.policy(), &changes);
            assert_eq!(
                self.short.correct(&charge, &corrections),
                self.general.correct(&charge, &corrections)
            );
        }
        if self.random.below(6) == 0
            && let Some(slot) = self.slots.pop()
        {
            assert_eq!(self.short.release(&slot), self.general.release(&slot));
        }
    }
}

/// Decides by the general path only.
fn decide_generally(store: &MemoryStore, toll: &Toll) -> Reply {
    let inner = &*store.inner;
    let (now, charging) = (inner.clock.now(), toll.verb().charges());
    let dues: Vec<Due<'_>> = toll.dues().collect();
    let prints: Vec<u128> = dues.iter().map(|due| inner.prints.key(due.key)).collect();
    let mut reply = Reply::default();
    let replies = reply.resize(dues.len());
    let id = if dues.is_empty() {
        0
    } else {
        let call = Call { charging, now };
        let guards: Vec<Guard<'_>> = dues.iter().map(|_| None).collect();
        let shards = &mut inner.lock(&prints, guards, vec![0; dues.len()]);
        let id = inner.admission_id(&prints, shards, call);
        let parts = &mut dues.iter().copied().map(Part::new).collect::<Vec<_>>();
        inner.decide_new(parts, &prints, shards, call, id, replies);
        id
    };
    reply.set(now, id);
    reply
}

/// Requires that the decisions of a handle or of layers equal the general decision.
fn compare(decisions: &[KeyDecision], allowed: bool, general: &Decision) {
    let actual: Vec<_> = decisions.iter().map(|key| (key.allowed, key.outcome())).collect();
    let expected: Vec<_> = general
        .limits()
        .map(|limit| (limit.outcome().allowed || !limit.due().enforced(), limit.outcome()))
        .collect();
    assert_eq!(actual, expected, "{:?}", general.toll());
    assert_eq!(allowed, general.allowed(), "{:?}", general.toll());
}

/// The outcome of each limit. The accessors for single numbers must agree with it.
fn outcomes(decision: &Decision) -> Vec<Outcome> {
    let outcome = |limit: LimitDecision<'_>| {
        let outcome = limit.outcome();
        assert_eq!((limit.remaining(), limit.granted()), (outcome.remaining, outcome.limit), "{limit:?}");
        outcome
    };
    decision.limits().map(outcome).collect()
}

/// The contents of a store.
#[derive(Debug, PartialEq, Eq)]
struct Held {
    /// The numbers of keys, markers, bytes of logs, and overflows.
    totals: [u64; 4],
    /// The admission counter of each shard.
    admissions: Vec<u64>,
    /// The entries of all tables, each with its state outside of the table, if it has one.
    entries: Vec<(Entry, Option<State>)>,
}

fn held(store: &MemoryStore) -> Held {
    let inner = &*store.inner;
    let [keys, markers, log_bytes] =
        [&inner.keys, &inner.markers, &inner.log_bytes].map(|total| total.load(Relaxed) as u64);
    let totals = [keys, markers, log_bytes, store.overflows()];
    let mut held = Held { totals, admissions: Vec::new(), entries: Vec::new() };
    for shard in &inner.shards {
        let shard = &*lock(&shard.0);
        held.admissions.push(shard.admissions);
        for entry in shard.table.iter().chain(shard.cells.iter()).chain(shard.markers.iter()) {
            held.entries.push((*entry, shard.beside(entry.state).cloned()));
        }
    }
    held
}

fn facts<'a>(names: &[&'a str], values: &'a [String]) -> Facts<'a> {
    names.iter().zip(values).fold(Facts::new(), |facts, (name, value)| facts.with(*name, value))
}

/// Random limits: `a`, `b` and `c` suit a handle, `d` charges a fact (which may be 0), and `e` limits concurrency.
/// Sometimes another limit comes first, so that the indexes of the others change.
fn limits(random: &mut Random) -> Vec<Limit> {
    let mut limits = Vec::new();
    if random.coin() {
        limits.push(Limit::new("first", Quota::per_second(1)).by("nobody"));
    }
    for name in ["a", "b", "c", "d"] {
        let algorithm = match random.below(10) {
            0 => Algorithm::LeakyBucket,
            1 => Algorithm::FixedWindow,
            2 => Algorithm::SlidingWindow,
            3 => Algorithm::SlidingLog,
            _ => Algorithm::TokenBucket,
        };
        let bucket = matches!(algorithm, Algorithm::TokenBucket | Algorithm::LeakyBucket);
        // The period is part of a key, and with `Allowance::Nothing` it is the default `ttl` of one minute. So after a
        // replacement, some keys that are granted nothing are already known.
        let period = [1, 60, 60, 30 * 86_400][usize::try_from(random.below(4)).expect("small")];
        let count = if bucket && random.below(8) == 0 { 37_529_996 } else { 1 + random.below(4) };
        let burst = (bucket && random.coin()).then(|| 1 + random.below(4));
        let limit = match random.below(8) {
            0 => Limit::new(name, Allowance::Nothing),
            _ => Limit::new(name, Quota::per(count, Duration::from_secs(period)).with_burst(burst)),
        };
        let limit = limit.by(name).algorithm(algorithm);
        let limit = if random.below(4) == 0 { limit.mode(Mode::Shadow) } else { limit };
        let limit = if name == "d" { limit.cost("tokens") } else { limit };
        let staggered = algorithm == Algorithm::FixedWindow && random.coin();
        limits.push(if staggered { limit.stagger() } else { limit });
    }
    limits.push(Limit::new("e", Quota::slots(1 + random.below(3))).by("e").ttl(Duration::from_secs(2)));
    limits
}

/// Counts how often each interesting case occurred, so that the test cannot pass without having covered them.
#[derive(Debug, Default)]
struct Seen {
    admitted: u64,
    refused: u64,
    /// Admitted, although a limit in shadow mode refused.
    shadowed: u64,
    /// Tolls with more than one due.
    several: u64,
    /// At least one key shared a cell.
    shared: u64,
    /// At least one limit granted nothing.
    nothing: u64,
}

impl Seen {
    fn note(&mut self, decision: &Decision) {
        let any = |test: fn(&Outcome) -> bool| u64::from(outcomes(decision).iter().any(test));
        self.admitted += u64::from(decision.allowed());
        self.refused += u64::from(!decision.allowed());
        self.shadowed += if decision.allowed() { any(|outcome| !outcome.allowed) } else { 0 };
        self.several += u64::from(decision.toll().len() > 1);
        self.shared += any(|outcome| outcome.overflow);
        self.nothing += any(|outcome| outcome.limit == 0);
    }

    fn everything(&self) {
        let Seen { admitted, refused, shadowed, several, shared, nothing } = *self;
        let least = [admitted, refused, shadowed, several, shared, nothing].into_iter().min();
        assert!(least >= Some(500), "a case occurred fewer than 500 times: {self:?}");
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 0
    }

    fn cost(&mut self) -> u64 {
        if self.below(3) == 0 { 1 + self.below(5) } else { 1 }
    }

    fn value(&mut self) -> String {
        self.below(4).to_string()
    }
}
