//! One of many processes that share a Redis: the child of `tests/exact.rs`.
//!
//! Prints `ready`, waits for a line, makes checks from many tasks at once, and prints how many requests were admitted and
//! how many the store itself decided.

use std::error::Error;
use std::io::{Write, stdin, stdout};

use tollkeeper_tests::exact::{self, REQUESTS, TASKS};
use tollkeeper_tests::redis;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().ok_or("usage: redis-caller URL PROCESS")?;
    let process: usize = arguments.next().ok_or("usage: redis-caller URL PROCESS")?.parse()?;
    let limiter = redis::limiter(&url, exact::limits());
    limiter.peek(&exact::facts(process, 0)).await?;
    writeln!(stdout(), "ready")?;
    stdin().read_line(&mut String::new())?;
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                let facts = exact::facts(process, task);
                let (mut admitted, mut exact) = (0, 0);
                for _ in 0..REQUESTS {
                    let decision = limiter.check(&facts).await.expect("a valid request");
                    admitted += u64::from(decision.allowed());
                    exact += u64::from(decision.degraded().is_none());
                }
                (admitted, exact)
            })
        })
        .collect();
    let (mut admitted, mut exact) = (0, 0);
    for task in tasks {
        let one = task.await?;
        (admitted, exact) = (admitted + one.0, exact + one.1);
    }
    writeln!(stdout(), "{admitted} {exact}")?;
    Ok(())
}
