//! Limits that all nodes share through a real Redis: one sets them, the others follow.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tollkeeper::store::redis::wire::Value;
use tollkeeper::store::redis::{NotSet, SharedLimits};
use tollkeeper_tests::cluster::Cluster;
use tollkeeper_tests::policy_node::PolicyNode;
use tollkeeper_tests::redis::{PATIENCE, Program, Server};
use tollkeeper_tests::sentinels::Sentinels;

/// Waits for what must come, and not for ever.
async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("it comes")
}

#[tokio::test]
async fn what_one_node_sets_all_follow_and_counts_are_kept() {
    let server = Server::start();
    let (mut one, mut other) =
        (PolicyNode::start(&server.url()).await, PolicyNode::start(&server.url()).await);
    assert_eq!((one.grants(), other.grants()), ((100, 1), (100, 1)), "as their files say");
    assert!(one.check("alice").await && other.check("alice").await);

    let began = Instant::now();
    let version = one.shared.set(&one.limits(3), Some(0)).await.unwrap();
    for node in [&mut one, &mut other] {
        assert!(soon(node.sees(version)).await.error.is_none());
        assert_eq!(node.grants(), (3, version));
    }
    println!("two nodes followed within {:?}", began.elapsed());
    assert!(other.check("alice").await, "the third of three");
    assert!(!one.check("alice").await && !other.check("alice").await, "which both have counted");

    let stored = other.shared.get().await.unwrap();
    assert_eq!(stored.version, version);
    let (config, _) = other.config.with_limits("stored", stored.limits.unwrap().as_bytes()).unwrap();
    assert_eq!(config.limits, one.limits(3), "what was set, in the shape of a config");
    let forever: Vec<_> = server.connect().keys().into_iter().filter(|(_, expires)| *expires < 0).collect();
    assert_eq!(forever.len(), 2, "only the secret and the policy stay: {forever:?}");
}

#[tokio::test]
async fn taking_limits_back_returns_to_the_files_and_versions_go_on() {
    let server = Server::start();
    let mut node = PolicyNode::start(&server.url()).await;
    let first = node.shared.set(&node.limits(3), None).await.unwrap();
    soon(node.sees(first)).await;
    let cleared = node.shared.clear(Some(first)).await.unwrap();
    soon(node.sees(cleared)).await;
    assert_eq!(node.grants(), (100, cleared), "its own limits, under the version of all");
    assert_eq!(node.shared.get().await, Ok(SharedLimits { version: cleared, limits: None }));

    let again = node.shared.set(&node.limits(3), Some(cleared)).await.unwrap();
    assert!(first < cleared && cleared < again, "{first}, {cleared}, {again}");
    // Who saw the first does not take the last for it.
    let late = node.shared.set(&node.limits(9), Some(first)).await;
    assert_eq!(late, Err(NotSet::Conflict { version: again }));
    assert_eq!(node.shared.clear(Some(first)).await, Err(NotSet::Conflict { version: again }));
    soon(node.sees(again)).await;
    assert_eq!(node.grants(), (3, again));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_fifty_who_saw_the_same_version_one_wins() {
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
        let [(winner, version)] = winners[..] else { panic!("round {round}: {winners:?} have won") };
        assert!(version > seen);
        assert_eq!(others, [version; 49], "the others are told who came first");
        let stored = nodes[0].shared.get().await.unwrap().limits.unwrap();
        assert_eq!(
            nodes[0].config.with_limits("stored", stored.as_bytes()).unwrap().0.limits,
            nodes[0].limits(winner)
        );
        seen = version;
    }
}

#[tokio::test]
async fn whoever_expects_nothing_wins_and_no_version_is_given_twice() {
    let server = Server::start();
    let node = PolicyNode::start(&server.url()).await;
    let mut versions = Vec::new();
    for count in 1..=50 {
        versions.push(node.shared.set(&node.limits(count), None).await.unwrap());
    }
    assert!(versions.windows(2).all(|pair| pair[0] < pair[1]), "{versions:?}");
}

#[tokio::test]
async fn a_node_that_starts_without_a_store_goes_by_its_file_and_follows_when_it_is_there() {
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
        "nobody heard that"
    );
    server.restart();
    soon(node.sees(version)).await;
    assert_eq!(node.grants(), (3, version), "the server has kept it over its restart");

    // And while it is away what was in force stays so.
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
async fn a_store_that_loses_everything_returns_the_nodes_to_their_files() {
    let server = Server::start();
    let mut node = PolicyNode::start(&server.url()).await;
    let version = node.shared.set(&node.limits(3), None).await.unwrap();
    soon(node.sees(version)).await;
    server.connect().text("FLUSHALL");
    soon(node.sees(0)).await;
    assert_eq!(node.grants().0, 100);
    // A version that was lost does not come again, however late somebody still believes in it.
    let late = node.shared.set(&node.limits(9), Some(version)).await;
    assert_eq!(late, Err(NotSet::Conflict { version: 0 }));
    let next = node.shared.set(&node.limits(4), Some(0)).await.unwrap();
    soon(node.sees(next)).await;
    assert_eq!(node.grants(), (4, next));
}

#[tokio::test]
async fn limits_that_a_node_cannot_read_change_nothing_and_are_reported() {
    let server = Server::start();
    let mut node = PolicyNode::start(&server.url()).await;
    let version = node.shared.set(&node.limits(3), None).await.unwrap();
    soon(node.sees(version)).await;
    // As a newer node would write them, which knows more.
    let newer = br#"{"limits":[{"name":"per-user","by":"user","rate":"9/h","mood":"mild"}]}"#;
    let stored = [format!("{}\n", version + 1).as_bytes(), newer].concat();
    server.connect().call(&[b"SET", b"tk:1:policy", &stored]).unwrap();
    let report = soon(node.sees(version + 1)).await.error.expect("a report");
    let report = report.to_string();
    assert!(report.starts_with("tk:1:policy:1:") && report.contains("`mood`"), "{report}");
    assert_eq!(node.grants(), (3, version), "what was in force");

    let next = node.shared.set(&node.limits(4), Some(version + 1)).await.unwrap();
    assert!(soon(node.sees(next)).await.error.is_none());
    assert_eq!(node.grants(), (4, next));
}

#[tokio::test]
async fn a_key_that_holds_something_else_is_named_and_can_be_set() {
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

/// A process that follows, ended with the test, and what it says.
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

    fn says(&mut self) -> String {
        self.1.next().expect("it runs").expect("text")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn processes_follow_and_one_that_starts_later_begins_with_what_is_shared() {
    let server = Server::start();
    let node = PolicyNode::start(&server.url()).await;
    let mut processes = [Process::start(&server.url()), Process::start(&server.url())];
    for process in &mut processes {
        assert_eq!(process.says(), "100 1");
    }
    let version = node.shared.set(&node.limits(7), Some(0)).await.unwrap();
    for process in &mut processes {
        assert_eq!(process.says(), format!("7 {version}"));
    }
    let mut restarted = Process::start(&server.url());
    assert_eq!(restarted.says(), format!("7 {version}"), "and not first what its file says");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_keeps_them_in_one_slot_and_a_slot_that_moves_is_followed() {
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
    let from = primaries.iter().find(holds).expect("somebody has it");
    let to = primaries.iter().find(|server| !holds(server)).expect("somebody has not");
    let id = |server: &Server| {
        let Value::Bytes(id) = say(server, "CLUSTER MYID") else { panic!("text") };
        String::from_utf8(id).expect("text")
    };
    say(to, &format!("CLUSTER SETSLOT {slot} IMPORTING {}", id(from)));
    say(from, &format!("CLUSTER SETSLOT {slot} MIGRATING {}", id(to)));
    say(from, &format!("MIGRATE 127.0.0.1 {} tk:1:policy 0 5000", to.port()));
    // Asked for once, on the other side.
    let next = node.shared.set(&node.limits(4), Some(version)).await.unwrap();
    for server in [to, from] {
        say(server, &format!("CLUSTER SETSLOT {slot} NODE {}", id(to)));
    }
    soon(node.sees(next)).await;
    assert_eq!(node.grants(), (4, next));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_sentinels_they_outlive_a_switch_of_the_primary() {
    let sentinels = Sentinels::start();
    let mut node = PolicyNode::start(&sentinels.url()).await;
    let version = node.shared.set(&node.limits(3), None).await.unwrap();
    soon(node.sees(version)).await;
    let began = Instant::now();
    while sentinels.replica.connect().text("EXISTS tk:1:policy") != Value::Number(1) {
        assert!(began.elapsed() < PATIENCE, "the replica gets it");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    sentinels.sentinel().text("SENTINEL FAILOVER mymaster");
    let is = |server: &Server, expected: &str| {
        let Value::List(role) = server.connect().text("ROLE") else { panic!("a list") };
        role[0] == Value::Bytes(expected.into())
    };
    let began = Instant::now();
    // What the old primary takes before it knows is lost: a switch can lose the last writes.
    while !is(&sentinels.replica, "master") || !is(&sentinels.primary, "slave") {
        assert!(began.elapsed() < PATIENCE, "no switch");
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
    let on_the_new = sentinels.replica.connect().call(&[b"GET", b"tk:1:policy"]).unwrap();
    let Value::Bytes(text) = on_the_new else { panic!("{on_the_new:?}") };
    assert!(text.starts_with(format!("{next}\n").as_bytes()), "{}", String::from_utf8_lossy(&text));
    soon(node.sees(next)).await;
    assert_eq!(node.grants(), (4, next));
}
