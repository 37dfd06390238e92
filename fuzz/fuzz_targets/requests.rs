//! Fuzzes facts, costs and verbs against policies that use every part of a limit and replace each other over the same
//! keys: a decision or a typed error, and a check agrees with the peek before it.

#![no_main]

use std::sync::LazyLock;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use tollkeeper::{
    Algorithm, Allowance, Capacity, Clock, Facts, Limit, Limiter, ManualClock, MemoryStore, Missing, Mode,
    Policy, Quota, Time,
};

/// Limits with the same names, so that they share states; each bit changes some of them.
fn limits(choice: u8) -> Vec<Limit> {
    let bit = |bit: u32| choice >> bit & 1 == 1;
    let minute = |count| if bit(0) { Allowance::Nothing } else { Quota::per_minute(count).into() };
    let per_user = if bit(1) { Quota::per_minute(100).burst(20) } else { Quota::per_minute(1).burst(2) };
    let algorithm = if bit(2) { Algorithm::SlidingLog } else { Algorithm::TokenBucket };
    let mode = if bit(3) { Mode::Shadow } else { Mode::Enforce };
    let mut limits = vec![
        Limit::new("per-ip", minute(1000)).by("ip").allow("10.0.0.0/8"),
        Limit::new("per-user", per_user).by("user").missing(Missing::Share).mode(mode),
        Limit::new("login", Quota::per(5, Duration::from_secs(900)))
            .by("user")
            .by("ip")
            .when("route", "/login*")
            .algorithm(algorithm),
        Limit::tiered("plan", "plan")
            .by("user")
            .tier("free", minute(60))
            .tier("pro", Allowance::Unlimited)
            .default_tier("free")
            .override_for("acme", Allowance::Nothing),
        Limit::new("tokens", Quota::per_minute(100_000)).by("user").cost("tokens").mode(Mode::Shadow),
        Limit::new("daily", Quota::per_day(1_000_000)).by("user").algorithm(Algorithm::FixedWindow).stagger(),
        Limit::new("queue", Quota::per_second(10).burst(5)).by("ip").algorithm(Algorithm::LeakyBucket),
        Limit::new("slots", Quota::slots(if bit(4) { 5 } else { 1 })).by("user"),
    ];
    if bit(5) {
        limits.reverse();
    }
    if bit(6) {
        limits.pop();
    }
    limits
}

static LIMITER: LazyLock<Limiter> = LazyLock::new(|| {
    let clock = Clock::manual(&ManualClock::new(Time::from_micros(1_760_000_000_000_000)));
    let store = MemoryStore::new(Capacity { max_keys: 1_000, ..Capacity::default() }, clock);
    Limiter::embedded(Policy::new(limits(0)).expect("valid"), store)
});

/// The first byte selects the limits, the second is the cost; then names and values follow, each after its length.
fn parsed(data: &[u8]) -> Option<(u8, u64, Facts<'_>)> {
    let (&[choice, cost], mut rest) = data.split_first_chunk()?;
    let mut facts = Facts::new();
    while let Some((len, after)) = rest.split_first() {
        let (name, after) = after.split_at_checked(usize::from(len % 16))?;
        let (len, after) = after.split_first()?;
        let (value, after) = after.split_at_checked(usize::from(*len))?;
        let _ = facts.insert_bytes(std::str::from_utf8(name).ok()?, value);
        rest = after;
    }
    Some((choice, u64::from(cost), facts))
}

fuzz_target!(|data: &[u8]| {
    let Some((choice, cost, facts)) = parsed(data) else { return };
    LIMITER.replace(limits(choice)).expect("valid");
    let peeked = LIMITER.peek(&facts).cost(cost).wait();
    let checked = LIMITER.check(&facts).cost(cost).wait();
    if let (Ok(peeked), Ok(checked)) = (&peeked, &checked) {
        for checked in checked.limits() {
            let peeked = peeked.limit(checked.name()).expect("a peek has every limit of the check");
            assert_eq!(peeked.outcome().allowed, checked.outcome().allowed, "{}", checked.name());
        }
        if let Some(charge) = checked.charge() {
            let text = LIMITER.seal_charge(&charge);
            assert!(LIMITER.open_charge(&text).wait().unwrap().is_some());
        }
    }
    assert_eq!(peeked.is_ok(), checked.is_ok());
});
