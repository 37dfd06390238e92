//! The fastest check: a handle to one limit, resolved once and called with the value of its key fact.

use std::time::Instant;

use tollkeeper::{HandleError, Limit, Limiter, Quota, facts};

const CHECKS: u32 = 200_000;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limiter = Limiter::builder()
        .limit(Limit::new("per-user", Quota::per_day(1_000).burst(1_000)).by("user"))
        .limit(Limit::new("per-route", Quota::per_day(1_000)).by("user").by("route"))
        .build()?;

    // The limit, its facts and its quota are looked up once. A handle needs no async and no `facts!`.
    let per_user = limiter.handle("per-user")?;
    let start = Instant::now();
    let mut allowed = 0;
    for _ in 0..CHECKS {
        allowed += u32::from(per_user.check("alice")?.allowed);
    }
    let nanos = start.elapsed().as_nanos() / u128::from(CHECKS);
    println!("{allowed} of {CHECKS} checks passed, {nanos} ns each (use --release to see its speed)");
    assert!((1_000..1_010).contains(&allowed), "the burst, plus what was refilled meanwhile");

    // A handle shares its counters with the limiter, so both report the same numbers.
    let refused = per_user.check("alice")?;
    let decision = limiter.peek(&facts! { "user" => "alice" }).await?;
    println!(
        "refused: the handle reports {} left, the limiter {}",
        refused.outcome().remaining,
        left(&decision)
    );
    assert_eq!((refused.outcome().remaining, left(&decision)), (0, 0));

    // A limit that is keyed by more than one fact has no handle.
    assert!(matches!(limiter.handle("per-route"), Err(HandleError::NotPlain(_))));
    Ok(())
}

fn left(decision: &tollkeeper::Decision) -> u64 {
    decision.limit("per-user").map_or(0, |limit| limit.outcome().remaining)
}
