//! Keeps counts across restarts: the store is saved to a file every ten seconds and when it is dropped.

use std::path::Path;

use tollkeeper::{Capacity, Clock, Limit, Limiter, MemoryStore, Quota, Restored, Snapshots, facts};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

#[tokio::main]
async fn main() -> Result<()> {
    let folder = std::env::temp_dir().join(format!("tollkeeper-snapshot-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let result = three_runs(&folder.join("state")).await;
    std::fs::remove_dir_all(&folder)?;
    result
}

async fn three_runs(path: &Path) -> Result<()> {
    let (limiter, restored) = start(path).await?;
    assert!(matches!(restored, Restored::Nothing));
    let decision = limiter.check(&facts! { "user" => "alice" }).cost(7).await?;
    assert!(decision.allowed());
    println!("first run: alice uses 7 of 10 a day");
    drop(limiter);

    let (limiter, restored) = start(path).await?;
    let Restored::Keys(keys) = restored else { return Err("the snapshot was not loaded".into()) };
    let decision = limiter.check(&facts! { "user" => "alice" }).cost(4).await?;
    println!("second run: {keys} key restored; 4 more are allowed: {}", decision.allowed());
    assert!(keys == 1 && !decision.allowed());

    // A truncated file is moved aside and reported, and the store starts empty.
    drop(limiter);
    std::fs::write(path, "tollkeeper state 1\n")?;
    let (_, restored) = start(path).await?;
    let Restored::Refused(error) = restored else { return Err("a truncated snapshot was loaded".into()) };
    println!("third run: {}", error.to_string().replace(&path.display().to_string(), "state"));
    Ok(())
}

async fn start(path: &Path) -> Result<(Limiter, Restored)> {
    let (store, restored) = MemoryStore::open(Capacity::default(), Clock::system(), Snapshots::to(path))?;
    let per_user = Limit::new("per-user", Quota::per_day(10).burst(10)).by("user");
    Ok((Limiter::builder().limit(per_user).store(store).build()?, restored))
}
