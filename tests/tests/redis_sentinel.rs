//! What sentinels say is heard: not asked for, and not found out by what no longer works.

#![expect(clippy::unwrap_used, reason = "what helps a test may fail like a test")]

use std::time::{Duration, Instant};

use tollkeeper::store::redis::wire::Value;
use tollkeeper::{Limit, Quota, facts};
use tollkeeper_tests::faulty::{Fault, Proxy};
use tollkeeper_tests::redis::{PATIENCE, Server, limiter};
use tollkeeper_tests::sentinels::Sentinels;

/// How many clients of a server have this in their line.
fn clients(server: &Server, with: &str) -> usize {
    let Value::Bytes(list) = server.connect().text("CLIENT LIST") else { panic!("text") };
    String::from_utf8(list).unwrap().lines().filter(|line| line.contains(with)).count()
}

async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < PATIENCE, "it did not come to pass that {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A primary that does not know that it was replaced answers as before, and sentinels that take no new connection
/// cannot be asked: only what they tell to those who listen is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failover_is_followed_by_sentinel_notification() {
    let sentinels = Sentinels::start();
    let (old, new) = (&sentinels.primary, &sentinels.replica);
    for server in [old, new] {
        server.connect().text("ACL SETUSER node on >secret ~* &* +@all");
    }
    let proxies: Vec<Proxy> =
        sentinels.all().iter().map(|sentinel| Proxy::before(sentinel.socket())).collect();
    let hosts: Vec<String> = proxies.iter().map(|proxy| proxy.address().to_string()).collect();
    let url = format!("redis+sentinel://node:secret@{}/mymaster", hosts.join(","));
    let limiter = limiter(&url, vec![Limit::new("all", Quota::per_day(100))]);
    assert_eq!(limiter.check(&facts! {}).await.unwrap().degraded(), None);
    until("all sentinels are listened to", || {
        sentinels.all().iter().all(|sentinel| clients(sentinel, " sub=1 ") == 1)
    })
    .await;
    assert!(clients(old, "user=node") > 0 && clients(new, "user=node") == 0);

    proxies.iter().for_each(|proxy| proxy.fault(Fault::Shut));
    // The sentinels may not make a replica of it, nor end its connections.
    old.connect().text("ACL SETUSER default -replicaof -slaveof");
    until("the sentinels see a replica that may take over", || {
        sentinels.sentinel().call(&[b"SENTINEL", b"FAILOVER", b"mymaster"]).is_ok()
    })
    .await;
    // The new one is not asked before: its connections are ended when it is promoted.
    until("the old primary is left", || clients(old, "user=node") == 0).await;
    assert!(new.is_primary() && old.is_primary(), "nobody has told the old one");

    proxies.iter().for_each(|proxy| proxy.fault(Fault::None));
    until("the new primary is found", || clients(new, "user=node") > 0).await;
    let began = Instant::now();
    while limiter.check(&facts! {}).await.unwrap().degraded().is_some() {
        assert!(began.elapsed() < PATIENCE, "it is found, and not asked");
    }
}
