//! Shared limits on a real Redis: one node sets them, all nodes follow.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tollkeeper::store::redis::wire::Value;
use tollkeeper::store::redis::{NotSet, SharedLimits};
use tollkeeper_tests::cluster::Cluster;
use tollkeeper_tests::policy_node::PolicyNode;
use tollkeeper_tests::redis::{PATIENCE, Program, Server};
use tollkeeper_tests::sentinels::Sentinels;

/// Awaits a future, with a timeout.
async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("done in time")
}

#[tokio::test]
async fn all_nodes_follow_new_limits_and_keep_counts() {
    let server = Server::start();
    let (mut one, mut other) =
        (PolicyNode::start(&server.url()).await, PolicyNode::start(&server.url()).await);
    assert_eq!((one.grants(), other.grants()), ((100, 1), (100, 1)), "the limits of their files");
    assert!(one.check("alice").await && other.check("alice").await);

    let began = Instant::now();
    let version = one.shared.set(&one.limits(3), Some(0)).await.unwrap();
    for node in [&mut one, &mut other] {
        assert!(soon(node.sees(version)).await.error.is_none());
        assert_eq!(node.grants(), (3, version));
    }
    println!("two nodes followed within {:?}", began.elapsed());
    assert!(other.check("alice").await, "the third request of three");
    assert!(!one.check("alice").await && !other.check("alice").await, "both nodes counted all three");

    let stored = other.shared.get().await.unwrap();
    assert_eq!(stored.version, version);
    let (config, _) = other.config.with_limits("stored", stored.limits.unwrap().as_bytes()).unwrap();
    assert_eq!(config.limits, one.limits(3), "the stored limits parse as a config");
    let forever: Vec<_> = server.connect().keys().into_iter().filter(|(_, expires)| *expires < 0).collect();
    assert_eq!(forever.len(), 2, "only the secret and the policy have no expiry: {forever:?}");
}

#[tokio::test]
async fn clearing_limits_reverts_to_files_and_bumps_version() {
    let server = Server::start();
    let mut node = PolicyNode::start(&server.url()).await;
    let first = node.shared.set(&node.limits(3), None).await.unwrap();
    soon(node.sees(first)).await;
    let cleared = node.shared.clear(Some(first)).await.unwrap();
    soon(node.sees(cleared)).await;
    assert_eq!(node.grants(), (100, cleared), "the limits of its file, with the shared version");
    assert_eq!(node.shared.get().await, Ok(SharedLimits { version: cleared, limits: None }));

    let again = node.shared.set(&node.limits(3), Some(cleared)).await.unwrap();
    assert!(first < cleared && cleared < again, "{first}, {cleared}, {again}");
    // A writer that saw the first version conflicts with the third, although their limits are equal.
    let late = node.shared.set(&node.limits(9), Some(first)).await;
    assert_eq!(late, Err(NotSet::Conflict { version: again }));
    assert_eq!(node.shared.clear(Some(first)).await, Err(NotSet::Conflict { version: again }));
    soon(node.sees(again)).await;
    assert_eq!(node.grants(), (3, again));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_fifty_conflicting_writers_wins() {
    let server = Server::start();
    let nodes = [PolicyNode::start(&server.url()).await, PolicyNode::start(&server.url()).await];
    let mut seen = 0;
    for round in 0..10 {
        let writers: Vec<_> = (1..=50)
            .map(|writer| {
                let node = &nodes[usize::from(writer % 2 == 0)];
                let (shared, limits) = (node.shared.clone(), node.limits(writer));
                tokio::spawn(async move { (writer, shared.set(&limits, Some(seen)).await) })
            })
            .collect();
        let (mut winners, mut others) = (Vec::new(), Vec::new());
        for writer in writers {
            match writer.await.unwrap() {
                (writer, Ok(version)) => winners.push((writer, version)),
                (_, Err(NotSet::Conflict { version })) => others.push(version),
                (_, Err(NotSet::Failed(failure))) => panic!("{failure}"),
            }
        }
        let [(winner, version)] = winners[..] else { panic!("round {round}: {winners:?} won, expected one") };
        assert!(version > seen);
        assert_eq!(others, [version; 49], "all others get the version of the winner");
        let stored = nodes[0].shared.get().await.unwrap().limits.unwrap();
        assert_eq!(
            nodes[0].config.with_limits("stored", stored.as_bytes()).unwrap().0.limits,
            nodes[0].limits(winner)
        );
        seen = version;
    }
}

#[tokio::test]
async fn unconditional_set_wins_and_versions_are_unique() {
    let server = Server::start();
    let node = PolicyNode::start(&server.url()).await;
    let mut versions = Vec::new();
    for count in 1..=50 {
        versions.push(node.shared.set(&node.limits(count), None).await.unwrap());
    }
    assert!(versions.windows(2).all(|pair| pair[0] < pair[1]), "{versions:?}");
}

#[tokio::test]
async fn node_started_without_store_uses_file_then_follows() {
    let mut server = Server::with(Program::Redis, &["appendonly yes", "appendfsync always"]);
    let version = {
        let node = PolicyNode::start(&server.url()).await;
        node.shared.set(&node.limits(3), None).await.unwrap()
    };
    server.kill();
    let mut node = PolicyNode::start(&server.url()).await;
    assert_eq!(node.grants(), (100, 1));
    assert!(
        matches!(node.shared.set(&node.limits(9), None).await, Err(NotSet::Failed(_))),
        "the store is down"
    );
    server.restart();
    soon(node.sees(version)).await;
    assert_eq!(node.grants(), (3, version), "the server kept the limits over its restart");

    // While the store is down, the active limits stay active.
    server.kill();
    let failed = node.shared.get().await;
    assert!(failed.is_err(), "{failed:?}");
    assert_eq!(node.grants(), (3, version));
    server.restart();
    let next = soon(async {
        loop {
            if let Ok(version) = node.shared.set(&node.limits(4), Some(version)).await {
                return version;
            }
        }
    })
    .await;
    soon(node.sees(next)).await;
    assert_eq!(node.grants(), (4, next));
}

#[tokio::test]
async fn flushed_store_reverts_nodes_to_their_files() {
    let server = Server::start();
    let mut node = PolicyNode::start(&server.url()).await;
    let version = node.shared.set(&node.limits(3), None).await.unwrap();
    soon(node.sees(version)).await;
    server.connect().text("FLUSHALL");
    soon(node.sees(0)).await;
    assert_eq!(node.grants().0, 100);
    // A lost version is not reused, so a late writer that expects it gets a conflict.
    let late = node.shared.set(&node.limits(9), Some(version)).await;
    assert_eq!(late, Err(NotSet::Conflict { version: 0 }));
    let next = node.shared.set(&node.limits(4), Some(0)).await.unwrap();
    soon(node.sees(next)).await;
    assert_eq!(node.grants(), (4, next));
}

#[tokio::test]
async fn unreadable_limits_change_nothing_and_are_reported() {
    let server = Server::start();
    let mut node = PolicyNode::start(&server.url()).await;
    let version = node.shared.set(&node.limits(3), None).await.unwrap();
    soon(node.sees(version)).await;
    // Limits with a field that only a newer version knows.
    let newer = br#"{"limits":[{"name":"per-user","by":"user","rate":"9/h","mood":"mild"}]}"#;
    let stored = [format!("{}\n", version + 1).as_bytes(), newer].concat();
    server.connect().call(&[b"SET", b"tk:1:policy", &stored]).unwrap();
    let report = soon(node.sees(version + 1)).await.error.expect("an error");
    let report = report.to_string();
    assert!(report.starts_with("tk:1:policy:1:") && report.contains("`mood`"), "{report}");
    assert_eq!(node.grants(), (3, version), "the previous limits stay active");

    let next = node.shared.set(&node.limits(4), Some(version + 1)).await.unwrap();
    assert!(soon(node.sees(next)).await.error.is_none());
    assert_eq!(node.grants(), (4, next));
}

#[tokio::test]
async fn foreign_policy_key_is_reported_and_can_be_set() {
    let server = Server::start();
    server.connect().call(&[b"SET", b"tk:1:policy", b"hello"]).unwrap();
    let mut node = PolicyNode::start(&server.url()).await;
    assert_eq!(node.grants(), (100, 1));
    let failure = node.shared.get().await.unwrap_err().to_string();
    assert!(failure.contains("`tk:1:policy` does not contain limits"), "{failure}");
    let version = node.shared.set(&node.limits(4), None).await.unwrap();
    soon(node.sees(version)).await;
    assert_eq!(node.grants(), (4, version));
}

/// A `policy-node` process and its output lines. Killed on drop.
struct Process(Child, std::io::Lines<BufReader<std::process::ChildStdout>>);

impl Process {
    fn start(url: &str) -> Process {
        let mut child = Command::new(env!("CARGO_BIN_EXE_policy-node"))
            .arg(url)
            .stdout(Stdio::piped())
            .spawn()
            .expect("built with this test");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        Process(child, lines)
    }

    fn next_line(&mut self) -> String {
        self.1.next().expect("the process runs").expect("text")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn processes_follow_and_late_starters_use_shared_limits() {
    let server = Server::start();
    let node = PolicyNode::start(&server.url()).await;
    let mut processes = [Process::start(&server.url()), Process::start(&server.url())];
    for process in &mut processes {
        assert_eq!(process.next_line(), "100 1");
    }
    let version = node.shared.set(&node.limits(7), Some(0)).await.unwrap();
    for process in &mut processes {
        assert_eq!(process.next_line(), format!("7 {version}"));
    }
    let mut restarted = Process::start(&server.url());
    assert_eq!(
        restarted.next_line(),
        format!("7 {version}"),
        "it starts with the shared limits, not with its file"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_limits_survive_a_cluster_slot_migration() {
    let cluster = Cluster::start();
    let mut node = PolicyNode::start(&cluster.url()).await;
    let version = node.shared.set(&node.limits(3), Some(0)).await.unwrap();
    soon(node.sees(version)).await;
    assert_eq!(node.grants(), (3, version));

    let say = |server: &Server, words: &str| server.connect().text(words);
    let primaries = &cluster.servers[..3];
    let Value::Number(slot) = say(&primaries[0], "CLUSTER KEYSLOT tk:1:policy") else { panic!("a slot") };
    let holds =
        |server: &&Server| say(server, &format!("CLUSTER COUNTKEYSINSLOT {slot}")) != Value::Number(0);
    let from = primaries.iter().find(holds).expect("one primary holds the key");
    let to = primaries.iter().find(|server| !holds(server)).expect("another primary");
    let id = |server: &Server| {
        let Value::Bytes(id) = say(server, "CLUSTER MYID") else { panic!("text") };
        String::from_utf8(id).expect("text")
    };
    say(to, &format!("CLUSTER SETSLOT {slot} IMPORTING {}", id(from)));
    say(from, &format!("CLUSTER SETSLOT {slot} MIGRATING {}", id(to)));
    say(from, &format!("MIGRATE 127.0.0.1 {} tk:1:policy 0 5000", to.port()));
    // The migrating slot redirects this call to the target with ASK.
    let next = node.shared.set(&node.limits(4), Some(version)).await.unwrap();
    for server in [to, from] {
        say(server, &format!("CLUSTER SETSLOT {slot} NODE {}", id(to)));
    }
    soon(node.sees(next)).await;
    assert_eq!(node.grants(), (4, next));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_limits_survive_a_sentinel_failover() {
    let sentinels = Sentinels::start();
    let mut node = PolicyNode::start(&sentinels.url()).await;
    let version = node.shared.set(&node.limits(3), None).await.unwrap();
    soon(node.sees(version)).await;
    let began = Instant::now();
    while sentinels.replica.connect().text("EXISTS tk:1:policy") != Value::Number(1) {
        assert!(began.elapsed() < PATIENCE, "the replica does not get the key");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    sentinels.sentinel().text("SENTINEL FAILOVER mymaster");
    let is = |server: &Server, expected: &str| {
        let Value::List(role) = server.connect().text("ROLE") else { panic!("a list") };
        role[0] == Value::Bytes(expected.into())
    };
    let began = Instant::now();
    // Wait for both roles: writes that the old primary accepts before its demotion are lost.
    while !is(&sentinels.replica, "master") || !is(&sentinels.primary, "slave") {
        assert!(began.elapsed() < PATIENCE, "no failover");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let next = soon(async {
        loop {
            match node.shared.set(&node.limits(4), Some(version)).await {
                Ok(version) => return version,
                Err(NotSet::Failed(_)) => tokio::time::sleep(Duration::from_millis(50)).await,
                Err(conflict) => panic!("{conflict}"),
            }
        }
    })
    .await;
    let on_new_primary = sentinels.replica.connect().call(&[b"GET", b"tk:1:policy"]).unwrap();
    let Value::Bytes(text) = on_new_primary else { panic!("{on_new_primary:?}") };
    assert!(text.starts_with(format!("{next}\n").as_bytes()), "{}", String::from_utf8_lossy(&text));
    soon(node.sees(next)).await;
    assert_eq!(node.grants(), (4, next));
}
