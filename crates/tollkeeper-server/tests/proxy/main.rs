//! `tollkeeper proxy` as a real process, between clients that can send anything and upstreams that can do anything.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod access_log;
mod addresses;
mod apps;
mod facts;
mod faults;
mod http2;
mod limits;
mod protocols;
mod raw_bytes;
mod restarts;
mod streams;
mod upstream;

#[path = "../support/mod.rs"]
mod support;

use std::net::SocketAddr;

use crate::support::{Client, Folder, Server, tollkeeper};

/// A policy that admits everything.
const UNLIMITED: &str = "limits: [{ name: all, rate: 1000000/s }]\n";

/// A proxy, with its API.
struct Proxy {
    api: Server,
    address: SocketAddr,
    folder: Folder,
}

impl Proxy {
    /// Starts a proxy in front of this URL.
    fn start(url: &str, config: &str, args: &[&str]) -> Proxy {
        let folder = Folder::new();
        let file = folder.write("tollkeeper.yaml", config);
        let mut command = tollkeeper();
        command.args(["proxy", url, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--config"]);
        let api = Server::launch(command.arg(file).args(args));
        let address = api.listens("proxy");
        Proxy { api, address, folder }
    }

    fn client(&self) -> Client {
        Client::to(self.address)
    }

    fn metric(&self, series: &str) -> f64 {
        self.api.metric(series)
    }
}
