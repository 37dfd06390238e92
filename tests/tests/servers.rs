//! Tests of the server helpers that other tests use.

#![expect(clippy::unwrap_used, reason = "test helpers may panic like tests")]

use tollkeeper::store::redis::wire::Value;
use tollkeeper_tests::cluster::Cluster;
use tollkeeper_tests::redis::{Client, Program, Server};
use tollkeeper_tests::sentinels::Sentinels;

fn version(server: &Server) -> String {
    let Value::Bytes(info) = server.connect().text("INFO server") else { panic!("text") };
    String::from_utf8(info).unwrap()
}

#[test]
fn redis_6_redis_7_and_valkey_start() {
    let redis = Server::on_a_port(Program::Redis, "port", &[]);
    assert!(version(&redis).contains("redis_version:7"), "{}", version(&redis));
    let mut client = Client::to(redis.port()).unwrap();
    assert_eq!(client.text("PING"), Value::Bytes(b"PONG".to_vec()));
    let old = Server::with(Program::Redis62, &[]);
    assert!(version(&old).contains("redis_version:6.2."), "{}", version(&old));
    let valkey = Server::with(Program::Valkey, &[]);
    assert!(version(&valkey).contains("valkey_version:8"), "{}", version(&valkey));
}

#[test]
fn sentinels_agree_on_a_primary() {
    let sentinels = Sentinels::start();
    let answer = sentinels.sentinel().text("SENTINEL GET-MASTER-ADDR-BY-NAME mymaster");
    let port = sentinels.primary.port().to_string();
    assert_eq!(answer, Value::List(vec![Value::Bytes(b"127.0.0.1".to_vec()), Value::Bytes(port.into())]));
}

#[test]
fn cluster_serves_all_slots() {
    let cluster = Cluster::start();
    let Value::Bytes(info) = cluster.servers[5].connect().text("CLUSTER INFO") else { panic!("text") };
    let info = String::from_utf8(info).unwrap();
    assert!(info.contains("cluster_slots_ok:16384") && info.contains("cluster_size:3"), "{info}");
}

#[test]
fn servers_stop_when_their_test_panics() {
    let (send, started) = std::sync::mpsc::channel();
    let test = std::thread::spawn(move || {
        let server = Server::start();
        server.connect();
        send.send((server.process(), server.socket())).unwrap();
        std::panic::resume_unwind(Box::new("a test that fails"));
    });
    let (process, socket) = started.recv().unwrap();
    test.join().unwrap_err();
    assert!(!socket.parent().unwrap().exists(), "the folder still exists");
    assert!(!std::path::Path::new(&format!("/proc/{process}")).exists(), "the process still runs");
}
