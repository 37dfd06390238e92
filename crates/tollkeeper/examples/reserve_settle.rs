//! A budget of tokens for a language model: reserve an estimate, settle what it did cost.

use std::time::Duration;

use tollkeeper::{Capacity, facts};
use tollkeeper::{Clock, Correction, Costs, Facts, Limit, Limiter, ManualClock, MemoryStore, Quota, Time};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // A clock that is turned by hand, so that the numbers below are the same in every run.
    let hand = ManualClock::new(Time::from_micros(1_760_000_000_000_000));
    // No burst: a sliding window, which gives a surplus back in full while it still counts.
    let tokens = Limit::new("llm-tokens", Quota::per_minute(100_000)).by("api_key").cost("tokens");
    let limiter = Limiter::builder()
        .limit(tokens)
        .store(MemoryStore::new(Capacity::default(), Clock::manual(&hand)))
        .build()?;

    // Before the call nobody knows what it will cost: 30,000 is the most that was asked for.
    let estimate = facts! { "api_key" => "k1", "tokens" => 30_000 };
    let reserved = limiter.reserve(&estimate, Duration::from_secs(60)).await?;
    let charge = reserved.charge().ok_or("an admitted reservation has a charge")?;
    println!("reserved 30,000: {} left", left(&limiter, &estimate).await?);
    assert_eq!(left(&limiter, &estimate).await?, 70_000);

    // After it the bill is known, and the rest comes back.
    let actual = facts! { "tokens" => 12_345 };
    assert_eq!(limiter.settle(&charge, Costs::Facts(&actual)).await?, Correction::Done);
    println!("settled 12,345: {} left", left(&limiter, &estimate).await?);
    assert_eq!(left(&limiter, &estimate).await?, 87_655);

    // A charge is settled once.
    assert_eq!(limiter.settle(&charge, Costs::Facts(&actual)).await?, Correction::Repeated);
    println!("settled again: nothing happens");
    Ok(())
}

async fn left(limiter: &Limiter, facts: &Facts<'_>) -> Result<u64, Box<dyn std::error::Error>> {
    let usage = limiter.usage(facts).await?;
    Ok(usage.limit("llm-tokens").ok_or("the limit applies")?.outcome().remaining)
}
