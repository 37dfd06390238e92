//! Plans: the quota of a key depends on its tier, one customer has an override, and one tier is
//! unlimited.

use tollkeeper::{Allowance, Limit, Limiter, Quota, facts};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limiter = Limiter::builder()
        .limit(
            Limit::tiered("plan", "plan")
                .by("api_key")
                .tier("free", Quota::per_hour(60).burst(10))
                .tier("pro", Quota::per_hour(600).burst(100))
                .tier("enterprise", Allowance::Unlimited)
                .default_tier("free")
                .override_for("acme", Quota::per_hour(50_000).burst(5_000)),
        )
        .build()?;

    for (api_key, plan, expected) in [
        ("k1", "free", Some(10)),
        ("k2", "pro", Some(100)),
        ("k3", "enterprise", None),
        ("k4", "no-such-plan", Some(10)),
        ("acme", "free", Some(5_000)),
    ] {
        let decision = limiter.peek(&facts! { "api_key" => api_key, "plan" => plan }).await?;
        // An unlimited tier means that the limit does not apply, so the decision does not list it.
        let limit = decision.limit("plan").map(|limit| limit.outcome().limit);
        match limit {
            Some(limit) => println!("{api_key} on `{plan}` may take {limit} at once"),
            None => println!("{api_key} on `{plan}` is not limited"),
        }
        assert_eq!(limit, expected);
    }

    // The tier is not part of the key: a customer that changes plans keeps its usage.
    limiter.check(&facts! { "api_key" => "k1", "plan" => "free" }).cost(10).await?;
    let upgraded = limiter.peek(&facts! { "api_key" => "k1", "plan" => "pro" }).await?;
    let remaining = upgraded.limit("plan").map(|limit| limit.outcome().remaining);
    println!("k1 used 10 on `free`, moves to `pro` and has {} left", remaining.unwrap_or(0));
    assert_eq!(remaining, Some(90));
    Ok(())
}
