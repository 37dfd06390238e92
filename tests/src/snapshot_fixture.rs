//! Limits and sizes shared by `tests/snapshot_kill.rs` and its child process.

use tollkeeper::{
    Algorithm, Clock, Facts, InvalidRequest, Limit, Limiter, ManualClock, MemoryStore, Policy, Quota, Time,
};

/// Number of keys that are charged in each round.
pub const KEYS: u64 = 2_000;

/// Name of the limit.
pub const LIMIT: &str = "limit";

/// Larger than any number of rounds, so that no request is refused.
const QUOTA: u64 = 1 << 40;

/// A clock that is fixed to the same time in every process.
pub fn clock() -> Clock {
    Clock::manual(&ManualClock::new(Time::from_micros(20_370 * 86_400_000_000)))
}

/// A limiter on this store.
pub fn limiter(store: &MemoryStore) -> Limiter {
    let limit = Limit::new(LIMIT, Quota::per_day(QUOTA)).by("key").algorithm(Algorithm::FixedWindow);
    Limiter::embedded(Policy::new(vec![limit]).expect("a valid limit"), store.clone())
}

/// Units charged to each key. Asserts that all keys have the same number.
pub fn units(store: &MemoryStore) -> Result<u64, InvalidRequest> {
    let limiter = limiter(store);
    let of = |key: u64| {
        let name = key.to_string();
        let facts = Facts::new().with("key", &name);
        let usage = limiter.usage(&facts).wait()?;
        Ok(QUOTA - usage.limit(LIMIT).expect("it applies").outcome().remaining)
    };
    let first = of(0)?;
    for key in 1..KEYS {
        let units = of(key)?;
        assert_eq!(units, first, "key {key} and the first key are from different rounds");
    }
    Ok(first)
}
