//! A cluster of three primaries with one replica each.

use std::process::Command;
use std::time::Instant;

use tollkeeper::store::redis::wire::Value;

use crate::redis::{PATIENCE, Program, Server, pause};

/// The six servers of a cluster.
#[derive(Debug)]
pub struct Cluster {
    /// The servers; the first three are the initial primaries.
    pub servers: Vec<Server>,
}

impl Cluster {
    /// Starts a cluster, and waits until every server knows all others and every replica follows its primary.
    pub fn start() -> Cluster {
        Cluster::with("port", &[], &[])
    }

    /// Starts a cluster with this port setting (`port` or `tls-port`) and additional settings; `words` are the
    /// arguments that `redis-cli` needs to connect.
    pub fn with(port_setting: &str, settings: &[&str], words: &[&str]) -> Cluster {
        let own = ["cluster-enabled yes", "cluster-node-timeout 2000", "cluster-replica-validity-factor 0"];
        let settings = [&own, settings].concat();
        let servers: Vec<Server> =
            (0..6).map(|_| Server::on_a_port(Program::Redis, port_setting, &settings)).collect();
        let created = Command::new("redis-cli")
            .args(words)
            .args(["--cluster", "create"])
            .args(servers.iter().map(|server| format!("127.0.0.1:{}", server.port())))
            .args(["--cluster-replicas", "1", "--cluster-yes"])
            .output()
            .expect("redis-cli is installed with redis-server");
        assert!(created.status.success(), "{}", String::from_utf8_lossy(&created.stdout));
        let started = Instant::now();
        for server in &servers {
            let mut client = server.connect();
            loop {
                let mut says = |command: &str, words: &[&str]| {
                    let Value::Bytes(text) = client.text(command) else { panic!("text") };
                    let text = String::from_utf8_lossy(&text).into_owned();
                    words.iter().any(|word| text.contains(word))
                };
                if says("CLUSTER INFO", &["cluster_state:ok"])
                    && says("CLUSTER INFO", &["cluster_known_nodes:6"])
                    && says("INFO replication", &["master_link_status:up", "connected_slaves:1"])
                {
                    break;
                }
                assert!(started.elapsed() < PATIENCE, "{}", server.log());
                pause();
            }
        }
        Cluster { servers }
    }

    /// The store URL of the cluster.
    pub fn url(&self) -> String {
        let hosts: Vec<String> =
            self.servers[..3].iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
        format!("redis+cluster://{}", hosts.join(","))
    }
}
