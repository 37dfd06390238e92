//! A concurrency limit of two exports: a guard holds a slot and releases it when dropped.

use std::time::Duration;

use tollkeeper::{Limit, Limiter, Quota, facts};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // If a holder crashes without releasing its slot, the slot expires after five minutes.
    let exports = Limit::new("exports", Quota::slots(2)).by("user").ttl(Duration::from_secs(300));
    let limiter = Limiter::builder().limit(exports).build()?;
    let alice = facts! { "user" => "alice" };

    let first = limiter.acquire(&alice).await?;
    let second = limiter.acquire(&alice).await?;
    assert!(first.slot.is_some() && second.slot.is_some());
    println!("alice runs two exports");

    let third = limiter.acquire(&alice).await?;
    assert!(!third.decision.allowed() && third.slot.is_none());
    println!(
        "a third is refused; retry in {}",
        third.decision.retry_after().ok_or("a refusal has a retry time")?
    );

    drop(first);
    let third = limiter.acquire(&alice).await?;
    assert!(third.decision.allowed());
    println!("one export has ended: the third is admitted");

    // An export that runs longer than the `ttl` renews its slot.
    let slot = third.slot.ok_or("an admitted request has a slot")?;
    assert!(slot.renew().await?);
    println!("its slot is held for another {}", slot.ttl());
    Ok(())
}
