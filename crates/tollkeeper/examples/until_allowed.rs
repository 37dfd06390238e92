//! A client that waits until it is admitted instead of polling.

use std::time::{Duration, Instant};

use tollkeeper::{Limit, Limiter, Quota, facts};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Twenty a second, one at a time: a request every 50 ms.
    let upstream = Limit::new("upstream", Quota::per_second(20).burst(1)).by("host");
    let limiter = Limiter::builder().limit(upstream).build()?;

    let start = Instant::now();
    let client = |number: u32| {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            let facts = facts! { "host" => "api.example.com" };
            limiter.until_allowed(&facts).await.map(|decision| (number, decision.allowed()))
        })
    };
    let clients: Vec<_> = (1..=5).map(client).collect();
    for client in clients {
        let (number, allowed) = client.await??;
        println!("client {number} passed; {:3} ms since the start", start.elapsed().as_millis());
        assert!(allowed);
    }
    // The first passes at once and the other four wait 50 ms each. The clock may be off by a millisecond.
    assert!(start.elapsed() >= Duration::from_millis(199));

    // A request that can never pass is refused at once: the bucket holds one unit, so a cost of two never fits.
    let never = limiter.until_allowed(&facts! { "host" => "api.example.com" }).cost(2).await?;
    assert!(!never.allowed() && never.retry_after().is_none());
    println!("a request of cost 2 can never pass: it is refused without a wait");
    Ok(())
}
