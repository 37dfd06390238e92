//! How dear over HTTP: processor time of the service for each check, beside other servers.
//!
//! `http TOLLKEEPER THROTTLECRAB` starts ours, `throttlecrab-server` and nginx on the first core and asks them in
//! turns with `wrk` from the second. A share of the machine is lost to others at times, and with it throughput;
//! the processor time that a server needs for a request is not, so that is what is compared.

use std::env;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Map, json};
use tollkeeper_bench::report::{self, Want};
use tollkeeper_bench::served::{Server, free_port, median, on_first_core, version};

const LOAD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/load.lua");
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_secs(3);
const WARM_UP: Duration = Duration::from_secs(1);
const CONNECTIONS: usize = 32;
const KEYS: usize = 10_000;
/// More than anybody asks, for every key.
const RATE: usize = 1_000_000;

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [tollkeeper, throttlecrab] = &arguments[..] else { panic!("usage: http TOLLKEEPER THROTTLECRAB") };
    let folder = env::current_exe().expect("this program has a path").with_file_name("http-files");
    fs::create_dir_all(&folder).expect("the target folder can be written");
    let mut sides =
        [ours(tollkeeper, &folder), throttlecrab_server(throttlecrab), nginx(&folder)].map(Measured::new);

    for side in &sides {
        side.load(WARM_UP);
    }
    for _ in 0..ROUNDS {
        for side in &mut sides {
            side.round();
        }
    }

    let mut results = Map::new();
    for side in &mut sides {
        side.admitted = side.admitted.min(side.admitted_keys());
        let name = side.side.server.name;
        report::figure(&format!("http-cpu-seconds-per-million-{name}"), median(&side.cpu));
        report::figure(&format!("http-requests-per-second-{name}"), median(&side.speed));
        report::figure(&format!("http-admitted-percent-{name}"), side.admitted * 100.0);
        let measured = json!({
            "cpu_seconds_per_million": side.cpu,
            "requests_per_second": side.speed,
            "admitted_percent": side.admitted * 100.0,
            "version": side.side.server.version,
        });
        results.insert(name.to_owned(), measured);
    }
    let [ours, throttlecrab, nginx] = sides.map(|side| median(&side.cpu));
    report::ratio("http/throttlecrab", throttlecrab / ours);
    report::ratio("http/nginx", nginx / ours);
    report::goal("http/throttlecrab", Want::AtLeast(1.3), throttlecrab / ours);
    report::goal("http/nginx-stretch", Want::AtLeast(1.0), nginx / ours);
    report::save("http", results.into());
}

fn ours(program: &str, folder: &Path) -> Side {
    let config = folder.join("tollkeeper.yaml");
    let limit = format!("limits:\n  - name: per-user\n    by: user\n    rate: {RATE}/s\n    burst: {RATE}\n");
    fs::write(&config, limit).expect("the target folder can be written");
    let port = free_port();
    let mut command = on_first_core(program);
    command
        .args(["serve", "--grpc", "off", "--resp", "off", "--http", &format!("127.0.0.1:{port}"), "--config"])
        .arg(&config);
    let asked = Asked { method: "POST", path: "/v1/check", body: r#"{"facts":{"user":"KEY"}}"#.to_owned() };
    Side { server: Server::start("tollkeeper", version(program, "--version"), command, port), asked }
}

/// As its documentation starts it. Whoever asks says what the limit is.
fn throttlecrab_server(program: &str) -> Side {
    let port = free_port();
    let mut command = on_first_core(program);
    command.args(["--http", "--http-host", "127.0.0.1", "--http-port", &port.to_string()]);
    let body = format!(r#"{{"key":"KEY","max_burst":{RATE},"count_per_period":{RATE},"period":1}}"#);
    let asked = Asked { method: "POST", path: "/throttle", body };
    Side { server: Server::start("throttlecrab", version(program, "--version"), command, port), asked }
}

/// The least that a server can do for a limited request: the key is in the query, and what it answers is in
/// its memory. Not `return 200`, which comes before `limit_req` and would leave the limit out.
fn nginx(folder: &Path) -> Side {
    let port = free_port();
    let folder = folder.display();
    let config = format!(
        "worker_processes 1;
        daemon off;
        pid {folder}/nginx.pid;
        error_log /dev/null crit;
        events {{ worker_connections 1024; }}
        http {{
            access_log off;
            keepalive_requests 1000000000;
            client_body_temp_path {folder}/body;
            proxy_temp_path {folder}/proxy;
            fastcgi_temp_path {folder}/fastcgi;
            uwsgi_temp_path {folder}/uwsgi;
            scgi_temp_path {folder}/scgi;
            limit_req_zone $arg_user zone=measured:16m rate={RATE}r/s;
            limit_req_zone $arg_user zone=strict:1m rate=1r/m;
            server {{
                listen 127.0.0.1:{port};
                location = /check {{ limit_req zone=measured burst={RATE} nodelay; empty_gif; }}
                location = /strict {{ limit_req zone=strict; empty_gif; }}
            }}
        }}"
    );
    let file = PathBuf::from(format!("{folder}/nginx.conf"));
    fs::write(&file, config).expect("the target folder can be written");
    let mut command = on_first_core("nginx");
    command.args(["-e", "/dev/null", "-c"]).arg(&file);
    let asked = Asked { method: "GET", path: "/check?user=KEY", body: String::new() };
    let server = Server::start("nginx", version("nginx", "-v"), command, port);
    let strict = Asked { method: "GET", path: "/strict?user=KEY", body: String::new() };
    assert!(strict.admitted(port, 1) && !strict.admitted(port, 1), "nginx does not limit what it answers so");
    Side { server, asked }
}

/// A server and what it is asked.
struct Side {
    server: Server,
    asked: Asked,
}

/// One request, with `KEY` for the key.
struct Asked {
    method: &'static str,
    path: &'static str,
    body: String,
}

impl Asked {
    /// Asks for one key.
    fn admitted(&self, port: u16, key: usize) -> bool {
        let [path, body] = [self.path, &self.body].map(|text| text.replace("KEY", &format!("user-{key}")));
        let (method, length) = (self.method, body.len());
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("it listens");
        let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
        let kind = format!("Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n");
        stream.write_all((head + &kind + &body).as_bytes()).expect("it reads");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("it answers");
        let answer = String::from_utf8_lossy(&answer);
        answer.starts_with("HTTP/1.1 200 ") && !answer.contains(r#""allowed":false"#)
    }
}

/// A server and what was measured of it, round by round.
struct Measured {
    side: Side,
    cpu: Vec<f64>,
    speed: Vec<f64>,
    /// The smallest share of a round.
    admitted: f64,
}

/// What wrk counted.
struct Counted {
    requests: f64,
    seconds: f64,
    refused: f64,
}

impl Measured {
    fn new(side: Side) -> Measured {
        Measured { side, cpu: Vec::new(), speed: Vec::new(), admitted: 1.0 }
    }

    fn round(&mut self) {
        let before = self.side.server.cpu_seconds();
        let counted = self.load(ROUND);
        let cpu = self.side.server.cpu_seconds() - before;
        self.cpu.push(cpu / counted.requests * 1e6);
        self.speed.push(counted.requests / counted.seconds);
        self.admitted = self.admitted.min(1.0 - counted.refused / counted.requests);
    }

    fn load(&self, lasting: Duration) -> Counted {
        let Side { server: Server { name, port, .. }, asked } = &self.side;
        let output = Command::new("taskset")
            .args(["-c", "1", "wrk", "-t", "1", "-c", &CONNECTIONS.to_string()])
            .args(["-d", &format!("{}s", lasting.as_secs()), "-s", LOAD])
            .args([&format!("http://127.0.0.1:{port}"), "--", &KEYS.to_string()])
            .args([asked.method, asked.path, &asked.body])
            .output()
            .expect("wrk starts");
        let said = String::from_utf8_lossy(&output.stdout);
        let counted = said.lines().find_map(|line| line.strip_prefix("counted "));
        let counted = counted.unwrap_or_else(|| panic!("{said}{}", String::from_utf8_lossy(&output.stderr)));
        let counted: Vec<f64> = counted.split(' ').map(|count| count.parse().expect("a number")).collect();
        let [requests, micros, refused, broken] = counted[..] else { panic!("load.lua says four numbers") };
        assert_eq!(broken, 0.0, "{name} lost connections:\n{said}");
        Counted { requests, seconds: micros / 1e6, refused }
    }

    /// The share of keys that are still admitted. Not every server says by its status that it refuses.
    #[expect(clippy::cast_precision_loss, reason = "few keys")]
    fn admitted_keys(&self) -> f64 {
        let Side { server: Server { port, .. }, asked } = &self.side;
        (1..=KEYS).filter(|key| asked.admitted(*port, *key)).count() as f64 / KEYS as f64
    }
}
