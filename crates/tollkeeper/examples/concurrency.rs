//! Two exports at a time: a guard holds a slot and gives it back when it goes out of scope.

use std::time::Duration;

use tollkeeper::{Limit, Limiter, Quota, facts};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // A holder that dies without a word keeps its slot for five minutes at most.
    let exports = Limit::new("exports", Quota::slots(2)).by("user").ttl(Duration::from_secs(300));
    let limiter = Limiter::builder().limit(exports).build()?;
    let alice = facts! { "user" => "alice" };

    let first = limiter.acquire(&alice).await?;
    let second = limiter.acquire(&alice).await?;
    assert!(first.slot.is_some() && second.slot.is_some());
    println!("alice runs two exports");

    let third = limiter.acquire(&alice).await?;
    assert!(!third.decision.allowed() && third.slot.is_none());
    println!("a third is refused; look again in {}", third.decision.retry_after().ok_or("a hint")?);

    drop(first);
    let third = limiter.acquire(&alice).await?;
    assert!(third.decision.allowed());
    println!("one has ended, and the third may start");

    // An export that takes longer than the time to live renews its slot on the way.
    let slot = third.slot.ok_or("an admitted request has a slot")?;
    assert!(slot.renew().await?);
    println!("its slot is good for another {}", slot.ttl());
    Ok(())
}
