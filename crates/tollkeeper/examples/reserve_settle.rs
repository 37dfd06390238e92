//! A token budget for a language model: reserve an estimate, then settle the actual cost.

use std::time::Duration;

use tollkeeper::{Capacity, facts};
use tollkeeper::{Clock, Correction, Costs, Facts, Limit, Limiter, ManualClock, MemoryStore, Quota, Time};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // A manual clock, so that the numbers below are the same in every run.
    let clock = ManualClock::new(Time::from_micros(1_760_000_000_000_000));
    // Without a burst this is a sliding window, which refunds a surplus in full while the charge still counts.
    let tokens = Limit::new("llm-tokens", Quota::per_minute(100_000)).by("api_key").cost("tokens");
    let limiter = Limiter::builder()
        .limit(tokens)
        .store(MemoryStore::new(Capacity::default(), Clock::manual(&clock)))
        .build()?;

    // The cost is not known before the call: reserve 30,000, the maximum that the request asks for.
    let estimate = facts! { "api_key" => "k1", "tokens" => 30_000 };
    let reserved = limiter.reserve(&estimate, Duration::from_secs(60)).await?;
    let charge = reserved.charge().ok_or("an admitted reservation has a charge")?;
    println!("reserved 30,000: {} left", left(&limiter, &estimate).await?);
    assert_eq!(left(&limiter, &estimate).await?, 70_000);

    // After the call the actual cost is known, and the surplus is refunded.
    let actual = facts! { "tokens" => 12_345 };
    assert_eq!(limiter.settle(&charge, Costs::Facts(&actual)).await?, Correction::Done);
    println!("settled 12,345: {} left", left(&limiter, &estimate).await?);
    assert_eq!(left(&limiter, &estimate).await?, 87_655);

    // A charge can be settled only once.
    assert_eq!(limiter.settle(&charge, Costs::Facts(&actual)).await?, Correction::Repeated);
    println!("settled again: nothing changes");
    Ok(())
}

async fn left(limiter: &Limiter, facts: &Facts<'_>) -> Result<u64, Box<dyn std::error::Error>> {
    let usage = limiter.usage(facts).await?;
    Ok(usage.limit("llm-tokens").ok_or("the limit applies")?.outcome().remaining)
}
