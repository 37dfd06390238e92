//! Sentinel notifications: a node follows a failover because the sentinels publish it, not by polling and not
//! because its connection broke.

#![expect(clippy::unwrap_used, reason = "test helpers may panic like tests")]

use std::time::{Duration, Instant};

use tollkeeper::store::redis::wire::Value;
use tollkeeper::{Limit, Quota, facts};
use tollkeeper_tests::faulty_proxy::{Fault, Proxy};
use tollkeeper_tests::redis::{PATIENCE, Server, limiter};
use tollkeeper_tests::sentinels::Sentinels;

/// How many lines of the server's `CLIENT LIST` contain `with`.
fn clients(server: &Server, with: &str) -> usize {
    let Value::Bytes(list) = server.connect().text("CLIENT LIST") else { panic!("text") };
    String::from_utf8(list).unwrap().lines().filter(|line| line.contains(with)).count()
}

async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < PATIENCE, "timed out waiting until {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The old primary does not learn that it was replaced and keeps answering, and the sentinels accept no new
/// connections, so they cannot be queried: only their notifications to existing subscribers are left.
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
    until("the node has subscribed to all sentinels", || {
        sentinels.all().iter().all(|sentinel| clients(sentinel, " sub=1 ") == 1)
    })
    .await;
    assert!(clients(old, "user=node") > 0 && clients(new, "user=node") == 0);

    proxies.iter().for_each(|proxy| proxy.fault(Fault::Shut));
    // Keep the sentinels from demoting the old primary and from closing its connections.
    old.connect().text("ACL SETUSER default -replicaof -slaveof");
    until("the sentinels see a replica that may take over", || {
        sentinels.sentinel().call(&[b"SENTINEL", b"FAILOVER", b"mymaster"]).is_ok()
    })
    .await;
    // The node cannot have found the new primary earlier: a promotion closes all connections.
    until("the node leaves the old primary", || clients(old, "user=node") == 0).await;
    assert!(new.is_primary() && old.is_primary(), "the old primary still believes to be one");

    proxies.iter().for_each(|proxy| proxy.fault(Fault::None));
    until("the node finds the new primary", || clients(new, "user=node") > 0).await;
    let began = Instant::now();
    while limiter.check(&facts! {}).await.unwrap().degraded().is_some() {
        assert!(began.elapsed() < PATIENCE, "the new primary is connected but not used");
    }
}
