//! Tries out a new limit in shadow mode: it reports what it would refuse, and refuses nothing.

use tollkeeper::{Limit, Limiter, Mode, Quota, facts};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limiter = Limiter::builder()
        .limit(Limit::new("per-user", Quota::per_hour(100).burst(100)).by("user"))
        .limit(Limit::new("search", Quota::per_hour(3).burst(3)).by("user").mode(Mode::Shadow))
        .build()?;

    let mut would_refuse = 0;
    for request in 1..=5 {
        let decision = limiter.check(&facts! { "user" => "alice" }).await?;
        let search = decision.limit("search").ok_or("a shadow limit is listed")?.outcome();
        would_refuse += u32::from(!search.allowed);
        println!(
            "request {request}: {}; `search` would have {} it",
            if decision.allowed() { "allowed" } else { "refused" },
            if search.allowed { "allowed" } else { "refused" },
        );
        assert!(decision.allowed());
        assert_eq!(search.allowed, request <= 3);
        // A shadow limit does not affect the decision: the binding limit is always an enforced one.
        assert_eq!(decision.binding().map(|limit| limit.name()), Some("per-user"));
    }
    println!("`search` would have refused {would_refuse} of 5");
    assert_eq!(would_refuse, 2);
    Ok(())
}
