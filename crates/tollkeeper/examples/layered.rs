//! Two limits on one request: both must allow, and a refused request is charged to neither.

use tollkeeper::{Decision, Limit, Limiter, Quota, facts};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limiter = Limiter::builder()
        .limit(Limit::new("per-user", Quota::per_hour(3).burst(3)).by("user"))
        .limit(Limit::new("per-ip", Quota::per_hour(4).burst(4)).by("ip"))
        .build()?;

    // Alice and Bob share an address. Alice uses three of its four requests, so one is left for Bob.
    let alice = facts! { "user" => "alice", "ip" => "192.0.2.7" };
    let bob = facts! { "user" => "bob", "ip" => "192.0.2.7" };
    for _ in 0..3 {
        show("alice", &limiter.check(&alice).await?);
    }
    show("bob", &limiter.check(&bob).await?);

    let refused = limiter.check(&bob).await?;
    show("bob", &refused);
    assert!(!refused.allowed());
    assert_eq!(refused.binding().map(|limit| limit.name()), Some("per-ip"));

    // The request that `per-ip` refused was not charged to `per-user`: from another address Bob has two left.
    let other_ip = limiter.check(&facts! { "user" => "bob", "ip" => "198.51.100.1" }).cost(2).await?;
    show("bob from another address, cost 2", &other_ip);
    assert!(other_ip.allowed());
    Ok(())
}

fn show(request: &str, decision: &Decision) {
    let verdict = if decision.allowed() { "allowed" } else { "refused" };
    print!("{request}: {verdict}");
    for limit in decision.limits() {
        print!("; {} of {} left at `{}`", limit.outcome().remaining, limit.outcome().limit, limit.name());
    }
    println!();
}
