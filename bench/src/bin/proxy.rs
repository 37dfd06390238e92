//! Compares `tollkeeper proxy` with nginx (`limit_req`) and Caddy in front of the same service: CPU time, and added latency.
//!
//! `proxy TOLLKEEPER` starts the service and the proxies on the first core, and loads them in turns with `wrk` from the
//! second. Then each proxy gets half of the requests per second that `wrk` reached, on a schedule, and so does the service
//! without a proxy: the difference of their latencies is what the proxy adds.

use std::env;
use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;
use std::time::Duration;

use serde_json::{Map, Value, json};
use tollkeeper_bench::paced::{self, Address, Latencies};
use tollkeeper_bench::report::{self, Want, median};
use tollkeeper_bench::served::{
    CONNECTIONS, Counted, Rounds, Server, WrkRequest, folder, in_turns, on_first_core, version, wrk,
};

const CONFIGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/proxy");
const LOAD: WrkRequest<'static> = WrkRequest { keys: 1, method: "GET", path: "/", body: "" };
const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
const ROUND: Duration = Duration::from_secs(2);
const WARM_UP: Duration = Duration::from_secs(1);
/// Rounds at half load.
const PACED_ROUNDS: usize = 9;
const PACED_ROUND: Duration = Duration::from_secs(1);
/// The most that ours may add to the 99th percentile of the latency, in microseconds.
const MOST_ADDED: f64 = 200.0;

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [tollkeeper] = &arguments[..] else { panic!("usage: proxy TOLLKEEPER") };
    let mut sides = sides(tollkeeper);
    in_turns(&mut sides, |side| side.load(WARM_UP), Side::round);
    let [upstream, proxies @ ..] = &mut sides[..] else { panic!("the upstream is the first side") };
    for _ in 0..PACED_ROUNDS {
        let half = upstream.half_load();
        upstream.paced.push(&upstream.paced_at(half));
        for proxy in &mut *proxies {
            let half = proxy.half_load();
            let (direct, took) = (upstream.paced_at(half), proxy.paced_at(half));
            proxy.paced.push(&took);
            proxy.direct.push(&direct);
        }
    }

    let results: Map<String, Value> =
        sides.iter().map(|side| (side.name.to_owned(), side.report())).collect();
    let side = |name: &str| sides.iter().find(|side| side.name == name).expect("measured");
    let ours = side("tollkeeper");
    let [nginx, caddy] = ["nginx", "caddy"].map(|name| side(name).rounds.cpu() / ours.rounds.cpu());
    report::ratio("proxy/nginx", nginx);
    report::ratio("proxy/caddy", caddy);
    report::goal("proxy/nginx", Want::AtLeast(0.7), nginx);
    for name in ["nginx", "caddy", "tollkeeper"] {
        report::figure(&format!("proxy-p99-added-us-at-half-load-{name}"), median(&side(name).added()));
    }
    let direct = median(&ours.direct.p99);
    if direct <= MOST_ADDED {
        report::goal("proxy-p99-added-us-at-half-load", Want::AtMost(MOST_ADDED), median(&ours.added()));
    } else {
        println!(
            "goal proxy-p99-added-us-at-half-load NOT JUDGED: p99 is {direct:.0} without a proxy (busy machine)"
        );
    }
    report::save("proxy", results.into());
}

/// The service without a proxy, then the proxies. Their ports are those of the configs.
fn sides(tollkeeper: &str) -> Vec<Side> {
    let config = |name: &str| format!("{CONFIGS}/{name}");
    let nginx = |name, what, file, port| {
        let mut command = on_first_core("nginx");
        command.args(["-e", "stderr", "-c", &config(file), "-p"]).arg(folder());
        Side::start(name, what, version("nginx", "-v"), command, port)
    };
    let upstream = nginx("upstream", "none: the service itself", "upstream.conf", 18_080);
    let limited = nginx("nginx", "`limit_req`", "nginx.conf", 18_081);

    let mut command = on_first_core("caddy");
    command.args(["run", "--adapter", "caddyfile", "--config", &config("Caddyfile")]);
    let caddy = Side::start(
        "caddy",
        "no limit, which it does not have",
        version("caddy", "version"),
        command,
        18_082,
    );

    let mut command = on_first_core(tollkeeper);
    command.args(["proxy", "http://127.0.0.1:18080", "--config", &config("tollkeeper.yaml")]);
    command.args(["--listen", "127.0.0.1:18083", "--http", "off"]);
    let ours = Side::start("tollkeeper", "one limit", version(tollkeeper, "--version"), command, 18_083);

    vec![upstream, limited, caddy, ours]
}

/// A server and its measurements.
struct Side {
    name: &'static str,
    /// Its limit.
    what: &'static str,
    server: Server,
    rounds: Rounds,
    /// At half load.
    paced: Percentiles,
    /// The service without a proxy, at half the load of this proxy.
    direct: Percentiles,
}

/// Percentiles of the latency in microseconds, one entry per round.
#[derive(Default)]
struct Percentiles {
    p50: Vec<f64>,
    p99: Vec<f64>,
}

impl Percentiles {
    fn push(&mut self, latencies: &Latencies) {
        self.p50.push(latencies.permille(500));
        self.p99.push(latencies.permille(990));
    }
}

impl Side {
    fn start(name: &'static str, what: &'static str, version: String, command: Command, port: u16) -> Side {
        // Another server on this port would be measured instead.
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, port));
        drop(free.unwrap_or_else(|error| panic!("port {port}, for {name}: {error}")));
        let server = Server::start(version, command, port);
        let (rounds, paced, direct) = Default::default();
        Side { name, what, server, rounds, paced, direct }
    }

    fn load(&self, lasting: Duration) -> Counted {
        let (counted, refused) = wrk(&format!("http://127.0.0.1:{}", self.server.port), &LOAD, lasting);
        assert_eq!(refused, 0.0, "{} refused requests", self.name);
        counted
    }

    fn round(&mut self) {
        let (cpu, counted) = self.server.cpu_during(|| self.load(ROUND));
        self.rounds.add(cpu, counted);
    }

    /// Half of the requests per second that it can answer.
    fn half_load(&self) -> f64 {
        self.rounds.speed() / 2.0
    }

    fn paced_at(&self, per_second: f64) -> Latencies {
        let address = Address { port: self.server.port, tls: None };
        let took = paced::ask(&address, CONNECTIONS, &[REQUEST.to_vec()], per_second, PACED_ROUND);
        assert_eq!(took.admitted, 1.0, "{} refused requests", self.name);
        took
    }

    /// What the proxy adds to the 99th percentile of the latency, in microseconds, one entry per round.
    fn added(&self) -> Vec<f64> {
        self.paced.p99.iter().zip(&self.direct.p99).map(|(through, direct)| through - direct).collect()
    }

    /// Prints the medians, and returns all rounds.
    fn report(&self) -> Value {
        let mut measured = self.rounds.report("proxy", self.name, &self.server);
        let mut add = |field: &str, value: Value| measured[field] = value;
        add("what", self.what.into());
        report::figure(&format!("proxy-p99-us-at-half-load-{}", self.name), median(&self.paced.p99));
        add("p50_us_at_half_load", json!(self.paced.p50));
        add("p99_us_at_half_load", json!(self.paced.p99));
        if !self.direct.p99.is_empty() {
            add("p50_us_without_the_proxy", json!(self.direct.p50));
            add("p99_us_without_the_proxy", json!(self.direct.p99));
            add("p99_added_us_at_half_load", json!(self.added()));
        }
        measured
    }
}
