//! Opens a limiter, forks, and uses it in both processes: `fork-node URL outside|current|multi`.
//!
//! There is no safe way to fork in Rust. The test preloads a library in which `getppid` forks and returns what `fork`
//! does: the process id of the child in the parent, 0 in the child.

use std::future::pending;
use std::io::Write as _;
use std::os::unix::process::parent_id;
use std::thread;

use tollkeeper::{Facts, Limit, Limiter, Quota, facts};
use tollkeeper_tests::redis::limiter;

fn main() {
    let mut args = std::env::args().skip(1);
    let url = args.next().expect("a URL");
    let runtime = match &*args.next().expect("where it is opened") {
        "outside" => None,
        "current" => Some(tokio::runtime::Builder::new_current_thread().enable_all().build()),
        _ => Some(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()),
    };
    let runtime = runtime.map(|runtime| runtime.expect("a runtime"));
    let limits = vec![
        Limit::new("per-user", Quota::per_hour(100).burst(100)).by("user"),
        Limit::new("slots", Quota::slots(2)).by("user"),
    ];
    let alice = facts! { "user" => "alice" };
    let limiter = match &runtime {
        None => limiter(&url, limits),
        Some(runtime) => {
            let limiter = runtime.block_on(async {
                let limiter = limiter(&url, limits);
                assert!(limiter.check(&alice).await.expect("valid facts").allowed());
                limiter
            });
            // As a server does that goes on working while it forks.
            runtime.spawn(pending::<()>());
            limiter
        }
    };
    let before = 10 - usize::from(runtime.is_some());
    assert_eq!(admitted(&limiter, &alice, before), before);

    let name = if parent_id() == 0 { "child" } else { "parent" };
    let slot = limiter.acquire(&alice).wait().expect("valid facts").slot.expect("one for each").keep();
    let elsewhere = thread::scope(|scope| scope.spawn(|| admitted(&limiter, &alice, 50)).join());
    let count = admitted(&limiter, &alice, 50) + elsewhere.expect("it does not panic");
    println!("{name} {count} {}", slot.id());
    std::io::stdout().flush().expect("the test listens");
    drop(limiter);
    // The threads of a runtime do not exist in the child, so it cannot end there.
    std::mem::forget(runtime);
}

/// How many of so many checks pass, all of them decided by the store.
fn admitted(limiter: &Limiter, facts: &Facts<'_>, checks: usize) -> usize {
    let decisions = (0..checks).map(|_| limiter.check(facts).wait().expect("valid facts"));
    decisions.inspect(|decision| assert_eq!(decision.degraded(), None)).filter(|one| one.allowed()).count()
}
