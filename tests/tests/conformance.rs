//! Runs the conformance suite on every store and prints a table of cases by stores.

use std::io::Write as _;
use std::sync::Arc;

use tollkeeper::store::conformance::{Results, run, table};
use tollkeeper_tests::cluster::Cluster;
use tollkeeper_tests::redis::{Client, Program, Server};
use tollkeeper_tests::sentinels::Sentinels;
use tollkeeper_tests::tested_stores::{Memory, Redis};

/// The ACL rules of a Redis user with the minimal permissions.
const RIGHTS: &str = "~world-* -@all +eval +evalsha +time +get +set +mget +strlen +getrange +append +pexpireat \
                      +del +unlink +exists +select +role";

#[test]
fn every_case_holds_on_every_store() {
    let redis = Arc::new(Server::start());
    let strict = Arc::new(Server::on_a_port(
        Program::Redis,
        "port",
        &[&format!("user app on >p@ss:w/rd {RIGHTS}"), "user default on >other ~* &* +@all"],
    ));
    let old = Arc::new(Server::with(Program::Redis62, &[]));
    let valkey = Arc::new(Server::with(Program::Valkey, &[]));
    let sentinels = Arc::new(Sentinels::start());
    let cluster = Arc::new(Cluster::start());

    let strict_url = format!("redis://app:p%40ss%3Aw%2Frd@127.0.0.1:{}/3", strict.port());
    let inspect = |server: &Arc<Server>| {
        let server = Arc::clone(server);
        move || vec![server.connect()]
    };
    let redis_stores = [
        Redis::new("Redis", &redis.url(), inspect(&redis)),
        Redis::new("Redis, ACL, db 3, compact", &strict_url, {
            let strict = Arc::clone(&strict);
            move || vec![in_database_3(&strict)]
        })
        .compact(),
        Redis::new("Redis 6.2", &old.url(), inspect(&old)),
        Redis::new("Valkey", &valkey.url(), inspect(&valkey)),
        Redis::new("Sentinel", &sentinels.url(), {
            let sentinels = Arc::clone(&sentinels);
            move || vec![sentinels.primary.connect()]
        }),
        Redis::new("Cluster", &cluster.url(), {
            let cluster = Arc::clone(&cluster);
            move || cluster.servers[..3].iter().map(Server::connect).collect()
        }),
    ];
    let mut columns = Vec::new();
    std::thread::scope(|scope| {
        let memory = scope.spawn(|| run(Memory::default()));
        let threads = redis_stores.map(|store| scope.spawn(move || run(store)));
        columns.extend([memory].into_iter().chain(threads).map(|thread| thread.join().unwrap()));
    });
    // Written around the test harness's capture, so that the table shows even when the test passes.
    writeln!(std::io::stdout(), "{}", table(&columns)).unwrap();
    columns.iter().for_each(Results::assert_passed);
}

fn in_database_3(server: &Server) -> Client {
    let mut client = server.connect();
    client.text("AUTH other");
    client.text("SELECT 3");
    client
}
