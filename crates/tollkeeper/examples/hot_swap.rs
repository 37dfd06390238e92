//! Replaces the limits of a running limiter: usage is kept, and an invalid policy changes nothing.

use tollkeeper::{Limit, Limiter, Quota, facts};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let per_user = |rate| vec![Limit::new("per-user", rate).by("user")];
    let alice = facts! { "user" => "alice" };
    let limiter =
        Limiter::builder().limit(Limit::new("per-user", Quota::per_day(10).burst(10)).by("user")).build()?;
    let left = || -> Result<u64, Box<dyn std::error::Error>> {
        let decision = limiter.peek(&alice).wait()?;
        Ok(decision.limit("per-user").ok_or("the limit applies")?.outcome().remaining)
    };

    assert!(limiter.check(&alice).cost(8).await?.allowed());
    println!("version {}: alice has used 8 of 10", limiter.policy().version());
    assert_eq!(left()?, 2);

    // Same name, period and algorithm: the counter is kept under the new quota.
    let policy = limiter.replace(per_user(Quota::per_day(100).burst(100)))?;
    println!("version {}: 100 a day, and {} are left", policy.version(), left()?);
    assert_eq!((policy.version(), left()?), (2, 92));

    // The error names the limit, and the active limits stay.
    let error = limiter.replace(per_user(Quota::per_day(0))).expect_err("a count of 0");
    println!("not replaced: {error}");
    assert_eq!((limiter.policy().version(), left()?), (2, 92));

    // Another period is another key, so its counter starts at zero.
    limiter.replace(per_user(Quota::per_hour(5).burst(5)))?;
    println!("version {}: 5 an hour, and {} are left", limiter.policy().version(), left()?);
    assert_eq!(left()?, 5);
    Ok(())
}
