//! Cost of checks in a full memory store: known and new keys just below `max_keys`, at it, and after ten times as many
//! keys.
//!
//! The limit is a sliding window, which uses the general path of the store, checked with facts. No state expires during
//! the run, so every new key of a full store searches for an expired state and finds none.

use std::fs;
use std::hint::black_box;

use serde_json::json;
use tollkeeper::{Capacity, Clock, Limit, Limiter, MemoryStore, Policy, Quota, facts};
use tollkeeper_bench::keys;
use tollkeeper_bench::report::{self, Want};

const MAX_KEYS: usize = 1_000_000;
/// Checks of one measurement.
const CHECKS: usize = 100_000;
const ROUNDS: usize = 5;
const STAGES: [&str; 3] = ["below", "at", "ten-times"];

fn main() {
    // Nanoseconds per check by stage, of each round.
    let (mut known, mut new) = (vec![Vec::new(); 3], vec![Vec::new(); 3]);
    for _ in 0..ROUNDS {
        let mut store = Full::new();
        store.add(MAX_KEYS - 1 - CHECKS);
        new[0].push(store.time_new());
        known[0].push(store.time_known());
        store.add(1);
        known[1].push(store.time_known());
        new[1].push(store.time_new());
        store.add(10 * MAX_KEYS - store.asked);
        known[2].push(store.time_known());
        new[2].push(store.time_new());
    }
    for (name, times) in [("full-known", &known), ("full-new", &new)] {
        let medians: Vec<f64> = times.iter().map(|times| report::median(times)).collect();
        for (stage, nanos) in STAGES.iter().zip(&medians) {
            report::figure(&format!("{name}-{stage}-ns"), *nanos);
        }
        for (stage, nanos) in STAGES.iter().zip(&medians).skip(1) {
            let name = format!("{name}-{stage}/below");
            report::ratio(&name, medians[0] / nanos);
            if name.starts_with("full-known") {
                report::goal(&name, Want::AtLeast(0.9), medians[0] / nanos);
            }
        }
    }
    report::save("full", json!({ "stages": STAGES, "known-ns": known, "new-ns": new }));
}

/// A store that is being filled.
struct Full {
    limiter: Limiter,
    store: MemoryStore,
    /// Keys checked so far.
    asked: usize,
}

impl Full {
    fn new() -> Full {
        let limits = vec![Limit::new("per-user", Quota::per_hour(1_000_000)).by("user")];
        let store = MemoryStore::new(Capacity { max_keys: MAX_KEYS, ..Capacity::default() }, Clock::system());
        let limiter = Limiter::embedded(Policy::new(limits).expect("valid limits"), store.clone());
        Full { limiter, store, asked: 0 }
    }

    fn check(&self, user: &str) {
        let decision = self.limiter.check(&facts! { "user" => user }).wait().expect("valid facts");
        assert!(black_box(decision.allowed()), "the limit is larger than any number of checks here");
    }

    /// Checks this many new keys.
    fn add(&mut self, count: usize) {
        let mut key = String::with_capacity(24);
        for number in self.asked..self.asked + count {
            keys::write_key(&mut key, "user", number as u64);
            self.check(&key);
        }
        self.asked += count;
        assert_eq!(self.store.keys(), self.asked.min(MAX_KEYS), "no key expires");
    }

    /// Nanoseconds per check of a new key.
    fn time_new(&mut self) -> f64 {
        let keys = (self.asked..self.asked + CHECKS).map(|number| keys::key("user", number as u64)).collect();
        let nanos = self.time(keys);
        self.asked += CHECKS;
        nanos
    }

    /// Nanoseconds per check of a key that has a state of its own.
    fn time_known(&self) -> f64 {
        let known = self.asked.min(MAX_KEYS) as u64;
        self.time(keys::uniform(known).take(CHECKS).map(|number| keys::key("user", number)).collect())
    }

    #[expect(clippy::cast_precision_loss, reason = "a duration of seconds")]
    fn time(&self, keys: Vec<String>) -> f64 {
        let begun = thread_cpu_nanos();
        keys.iter().for_each(|key| self.check(key));
        (thread_cpu_nanos() - begun) as f64 / CHECKS as f64
    }
}

/// CPU time of this thread in nanoseconds. Each stage is measured once per round, so the wall-clock time would include
/// whatever else runs on the machine.
fn thread_cpu_nanos() -> u64 {
    let schedstat = fs::read_to_string("/proc/thread-self/schedstat").expect("this is Linux");
    schedstat.split(' ').next().and_then(|nanos| nanos.parse().ok()).expect("a number")
}
