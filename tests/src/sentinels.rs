//! A primary, its replica, and three sentinels that watch both.

use std::time::Instant;

use tollkeeper::store::redis::wire::Value;

use crate::redis::{Client, PATIENCE, Program, Server, pause};

/// Servers behind sentinels, under the name `mymaster`.
#[derive(Debug)]
pub struct Sentinels {
    /// The initial primary.
    pub primary: Server,
    /// Its replica.
    pub replica: Server,
    sentinels: Vec<Server>,
}

impl Sentinels {
    /// Starts them, and waits until the sentinels know the replica and each other.
    pub fn start() -> Sentinels {
        Sentinels::with("port", &[])
    }

    /// Starts them with this port setting (`port` or `tls-port`) and additional settings.
    pub fn with(port_setting: &str, more: &[&str]) -> Sentinels {
        let primary = Server::on_a_port(Program::Redis, port_setting, more);
        let follow = format!("replicaof 127.0.0.1 {}", primary.port());
        let replica = Server::on_a_port(Program::Redis, port_setting, &[&[&*follow], more].concat());
        let watch = format!("sentinel monitor mymaster 127.0.0.1 {} 2", primary.port());
        let own = [
            &*watch,
            "sentinel down-after-milliseconds mymaster 2000",
            "sentinel failover-timeout mymaster 10000",
        ];
        let settings = [&own, more].concat();
        let sentinels: Vec<Server> =
            (0..3).map(|_| Server::on_a_port(Program::Redis, port_setting, &settings)).collect();
        let started = Instant::now();
        for sentinel in &sentinels {
            let mut client = sentinel.connect();
            loop {
                let known = client
                    .call(&[b"SENTINEL", b"MASTER", b"mymaster"])
                    .map(|known| [number(&known, "num-slaves"), number(&known, "num-other-sentinels")]);
                if known == Ok([1, 2]) {
                    break;
                }
                assert!(started.elapsed() < PATIENCE, "{known:?}: {}", sentinel.log());
                pause();
            }
        }
        Sentinels { primary, replica, sentinels }
    }

    /// The store URL with all sentinels.
    pub fn url(&self) -> String {
        let hosts: Vec<String> =
            self.sentinels.iter().map(|sentinel| format!("127.0.0.1:{}", sentinel.port())).collect();
        format!("redis+sentinel://{}/mymaster", hosts.join(","))
    }

    /// A connection to one of the sentinels.
    pub fn sentinel(&self) -> Client {
        self.sentinels[0].connect()
    }

    /// All sentinels.
    pub fn all(&self) -> &[Server] {
        &self.sentinels
    }
}

/// The number that follows a name in a list of names and values.
fn number(list: &Value, name: &str) -> u64 {
    let Value::List(list) = list else { panic!("a list: {list:?}") };
    let place = list.iter().position(|value| *value == Value::Bytes(name.into())).expect(name);
    let Value::Bytes(number) = &list[place + 1] else { panic!("text") };
    String::from_utf8_lossy(number).parse().expect("a number")
}
