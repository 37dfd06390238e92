//! Six requests under a limit of five: the last is refused, with the time until a retry can pass.

use tollkeeper::{Limit, Limiter, Quota, Span, facts};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let per_user = Limit::new("per-user", Quota::per_minute(5).burst(5)).by("user");
    let limiter = Limiter::builder().limit(per_user).build()?;

    for request in 1..=6 {
        let decision = limiter.check(&facts! { "user" => "alice" }).await?;
        let limit = decision.binding().ok_or("`per-user` applies to alice")?;
        match decision.retry_after().map(Span::as_secs_ceil) {
            None => println!("request {request}: allowed, {} left", limit.outcome().remaining),
            Some(seconds) => println!("request {request}: refused by `{}`, try in {seconds} s", limit.name()),
        }
        assert_eq!(decision.allowed(), request <= 5);
    }
    Ok(())
}
