//! The hot path: one limit, prepared once, asked by the value of the fact it is keyed by.

use std::time::Instant;

use tollkeeper::{HandleError, Limit, Limiter, Quota, facts};

const CHECKS: u32 = 200_000;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limiter = Limiter::builder()
        .limit(Limit::new("per-user", Quota::per_day(1_000).burst(1_000)).by("user"))
        .limit(Limit::new("per-route", Quota::per_day(1_000)).by("user").by("route"))
        .build()?;

    // Which limit, which facts, which quota: found once. A handle needs no async and no `facts!`.
    let per_user = limiter.handle("per-user")?;
    let start = Instant::now();
    let mut allowed = 0;
    for _ in 0..CHECKS {
        allowed += u32::from(per_user.check("alice")?.allowed);
    }
    let nanos = start.elapsed().as_nanos() / u128::from(CHECKS);
    println!("{allowed} of {CHECKS} checks passed, {nanos} ns each (use --release to see its speed)");
    assert!((1_000..1_010).contains(&allowed), "the burst, and what came back meanwhile");

    // It shares its counters with the limiter, and tells the same numbers.
    let refused = per_user.check("alice")?;
    let decision = limiter.peek(&facts! { "user" => "alice" }).await?;
    println!("refused: {} left, {} by the limiter", refused.outcome().remaining, left(&decision));
    assert_eq!((refused.outcome().remaining, left(&decision)), (0, 0));

    // A limit that depends on more than one value has no handle.
    assert!(matches!(limiter.handle("per-route"), Err(HandleError::NotPlain(_))));
    Ok(())
}

fn left(decision: &tollkeeper::Decision) -> u64 {
    decision.limit("per-user").map_or(0, |limit| limit.outcome().remaining)
}
