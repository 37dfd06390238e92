//! Compares the CPU time of the service per HTTP check, and its latency, with other servers.
//!
//! `http TOLLKEEPER THROTTLECRAB` starts ours in several configurations, `throttlecrab-server` and nginx on the first
//! core and loads them in turns with `wrk` from the second. Other programs may take a share of the machine, which lowers
//! throughput but not the CPU time that a server needs for a request, so CPU time is compared. Then each server gets half
//! the load that `wrk` reached, and its latencies are measured.

use std::env;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustls::ClientConfig;
use serde_json::{Map, Value, json};
use tollkeeper_bench::paced::{self, Address, Connection};
use tollkeeper_bench::report::{self, Want, median};
use tollkeeper_bench::served::{
    CONNECTIONS, Counted, RATE, Rounds, Server, WrkRequest, file, folder, in_turns, limits, on_first_core,
    pin_to_second_core, version, wrk,
};
use tollkeeper_tests::certificates::Authority;
use tollkeeper_tests::redis::free_port;

const ROUND: Duration = Duration::from_secs(2);
const WARM_UP: Duration = Duration::from_secs(1);
/// Rounds at half load.
const PACED_ROUNDS: usize = 3;
const PACED_ROUND: Duration = Duration::from_secs(1);
const KEYS: usize = 10_000;

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [tollkeeper, throttlecrab] = &arguments[..] else { panic!("usage: http TOLLKEEPER THROTTLECRAB") };
    let authority = Authority::new();
    let mut sides = sides(tollkeeper, throttlecrab, &authority);
    in_turns(&mut sides, |side| side.load(WARM_UP), Side::round);
    for _ in 0..PACED_ROUNDS {
        sides.iter_mut().for_each(Side::paced_round);
    }

    let results: Map<String, Value> =
        sides.iter_mut().map(|side| (side.name.to_owned(), side.report())).collect();
    let cpu = |name: &str| sides.iter().find(|side| side.name == name).expect("measured").rounds.cpu();
    let [throttlecrab, nginx] = ["throttlecrab", "nginx"].map(|name| cpu(name) / cpu("tollkeeper"));
    report::ratio("http/throttlecrab", throttlecrab);
    report::ratio("http/nginx", nginx);
    report::ratio("http-tls/nginx", cpu("nginx-tls") / cpu("tollkeeper-tls"));
    report::goal("http/throttlecrab", Want::AtLeast(1.3), throttlecrab);
    report::goal("http/nginx-stretch", Want::AtLeast(1.0), nginx);
    report::save("http", results.into());
}

/// All servers. Ours always counts its metrics; they cannot be turned off.
fn sides(tollkeeper: &str, throttlecrab: &str, authority: &Authority) -> Vec<Side> {
    let (certificate, key) = authority.certify("server", "DNS:localhost");
    let (certificate, key) = (certificate.display(), key.display());
    let trusted = paced::trust(&authority.certificate());
    let ours = |name, what, asked, config: &str, more: &[&str]| {
        Side::new(name, what, asked, Server::tollkeeper(tollkeeper, "http", name, config, more))
    };
    let one_limit = limits(&["user"]);
    let check = || RequestTemplate::post("/v1/check", r#"{"facts":{"user":"KEY"}}"#.to_owned());

    let one = ours("tollkeeper", "one limit", check(), &one_limit, &[]);

    let nginx_plain = nginx("nginx", "`limit_req`", "", None);
    let collector = format!("http://127.0.0.1:{}", nginx_plain.server.port);
    let what = "one limit; `/metrics` and `/v1/top` read each second, `--otlp` on";
    let mut metrics = ours("tollkeeper-metrics", what, check(), &one_limit, &["--otlp", &collector]);
    metrics.watched = vec![RequestTemplate::get("/metrics"), RequestTemplate::get("/v1/top")];

    let both = RequestTemplate::post("/v1/check", r#"{"facts":{"user":"KEY","org":"KEY"}}"#.to_owned());
    let two = ours("tollkeeper-two-limits", "two limits in one check", both, &limits(&["user", "org"]), &[]);

    let tls = format!("tls: {{ cert: {certificate}, key: {key} }}\n{one_limit}");
    let mut tls = ours("tollkeeper-tls", "one limit, over TLS", check(), &tls, &[]);
    tls.tls = Some(Arc::clone(&trusted));
    // By default this nginx offers older versions only.
    let settings =
        format!("ssl_protocols TLSv1.3; ssl_certificate {certificate}; ssl_certificate_key {key};");
    let nginx_tls = nginx("nginx-tls", "`limit_req`, over TLS", &settings, Some(trusted));

    let redis = Server::redis();
    // A long deadline, so that a pause of this machine does not cause decisions without Redis.
    let store = format!("store: redis://127.0.0.1:{}\nredis: {{ deadline: 1s }}\n{one_limit}", redis.port);
    let mut stored = ours("tollkeeper-redis", "one limit, kept in Redis", check(), &store, &[]);
    stored.store = Some(redis);

    let body = format!(r#"{{"key":"KEY","max_burst":{RATE},"count_per_period":{RATE},"period":1}}"#);
    let server = Server::throttlecrab(throttlecrab, "http");
    let throttlecrab =
        Side::new("throttlecrab", "one limit", RequestTemplate::post("/throttle", body), server);

    vec![one, metrics, two, tls, stored, throttlecrab, nginx_plain, nginx_tls]
}

/// The least that a server can do for a limited request: the key is in the query, and the response comes from memory.
/// `return 200` would run before `limit_req` and bypass the limit, so it is used only for the metrics that ours sends
/// over OTLP.
fn nginx(name: &'static str, what: &'static str, settings: &str, tls: Option<Arc<ClientConfig>>) -> Side {
    let port = free_port();
    let folder = folder().join(name);
    let (folder, ssl) = (folder.display(), if tls.is_some() { "ssl" } else { "" });
    let config = format!(
        "worker_processes 1;
        daemon off;
        pid {folder}.pid;
        error_log /dev/null crit;
        events {{ worker_connections 1024; }}
        http {{
            access_log off;
            keepalive_requests 1000000000;
            client_body_temp_path {folder}-body;
            proxy_temp_path {folder}-proxy;
            fastcgi_temp_path {folder}-fastcgi;
            uwsgi_temp_path {folder}-uwsgi;
            scgi_temp_path {folder}-scgi;
            limit_req_zone $arg_user zone=measured:16m rate={RATE}r/s;
            limit_req_zone $arg_user zone=strict:1m rate=1r/m;
            server {{
                listen 127.0.0.1:{port} {ssl};
                {settings}
                location = /check {{ limit_req zone=measured burst={RATE} nodelay; empty_gif; }}
                location = /strict {{ limit_req zone=strict; empty_gif; }}
                location /v1/ {{ return 200; }}
            }}
        }}"
    );
    let mut command = on_first_core("nginx");
    command.args(["-e", "/dev/null", "-c"]).arg(file(&format!("{name}.conf"), config.as_bytes()));
    let server = Server::start(version("nginx", "-v"), command, port);
    let mut side = Side::new(name, what, RequestTemplate::get("/check?user=KEY"), server);
    side.tls = tls;
    let strict = RequestTemplate::get("/strict?user=KEY").of(1);
    let mut connection = Connection::new(&side.address());
    let admitted = [(); 2].map(|()| connection.ask(&strict).admits());
    assert_eq!(admitted, [true, false], "nginx does not apply `limit_req`");
    side
}

/// A request in which `KEY` is replaced by the key.
struct RequestTemplate {
    method: &'static str,
    path: &'static str,
    body: String,
}

impl RequestTemplate {
    fn get(path: &'static str) -> RequestTemplate {
        RequestTemplate { method: "GET", path, body: String::new() }
    }

    fn post(path: &'static str, body: String) -> RequestTemplate {
        RequestTemplate { method: "POST", path, body }
    }

    /// The request for this key, with the same bytes as `wrk` sends with `load.lua`.
    fn of(&self, key: usize) -> Vec<u8> {
        let [path, body] = [self.path, &self.body].map(|text| text.replace("KEY", &format!("user-{key}")));
        let head = format!("{} {path} HTTP/1.1\r\nHost: localhost\r\n", self.method);
        if body.is_empty() {
            return (head + "\r\n").into_bytes();
        }
        let length = body.len();
        format!("{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}").into_bytes()
    }
}

/// A server, the request that it gets, and its measurements.
struct Side {
    name: &'static str,
    what: &'static str,
    server: Server,
    asked: RequestTemplate,
    /// TLS settings of the client, with the trusted CA.
    tls: Option<Arc<ClientConfig>>,
    /// Paths that are read once a second during a round.
    watched: Vec<RequestTemplate>,
    /// The Redis with its state, if it does not keep it in memory.
    store: Option<Server>,
    rounds: Rounds,
    /// CPU seconds of Redis per million requests, of each round.
    store_cpu: Vec<f64>,
    /// 50th and 99th percentile of the latency in microseconds, at half load.
    paced: [Vec<f64>; 2],
    /// Smallest share of admitted requests of all rounds.
    admitted: f64,
}

impl Side {
    fn new(name: &'static str, what: &'static str, asked: RequestTemplate, server: Server) -> Side {
        Side {
            name,
            what,
            server,
            asked,
            tls: None,
            watched: Vec::new(),
            store: None,
            rounds: Rounds::default(),
            store_cpu: Vec::new(),
            paced: Default::default(),
            admitted: 1.0,
        }
    }

    fn address(&self) -> Address {
        Address { port: self.server.port, tls: self.tls.clone() }
    }

    fn round(&mut self) {
        let store = || self.store.as_ref().map_or(0.0, Server::cpu_seconds);
        let before = store();
        let (cpu, (counted, refused)) = self.server.cpu_during(|| self.load(ROUND));
        let store = store() - before;
        self.rounds.add(cpu, counted);
        self.store_cpu.push(store / counted.requests * 1e6);
        self.admitted = self.admitted.min(1.0 - refused / counted.requests);
    }

    /// Runs `wrk` for this long; returns what it counted, and the number of refused requests.
    fn load(&self, lasting: Duration) -> (Counted, f64) {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let url = format!("{scheme}://127.0.0.1:{}", self.server.port);
        let RequestTemplate { method, path, body } = &self.asked;
        self.watched(|| wrk(&url, &WrkRequest { keys: KEYS, method, path, body }, lasting))
    }

    fn paced_round(&mut self) {
        let requests: Vec<Vec<u8>> = (1..=KEYS).map(|key| self.asked.of(key)).collect();
        let half = self.rounds.speed() / 2.0;
        let took = self.watched(|| paced::ask(&self.address(), CONNECTIONS, &requests, half, PACED_ROUND));
        self.paced[0].push(took.permille(500));
        self.paced[1].push(took.permille(990));
        self.admitted = self.admitted.min(took.admitted);
    }

    /// Runs a load while another thread reads the watched paths once a second.
    fn watched<T>(&self, doing: impl FnOnce() -> T) -> T {
        if self.watched.is_empty() {
            return doing();
        }
        let (done, until) = mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                pin_to_second_core();
                let mut connection = Connection::new(&self.address());
                loop {
                    for asked in &self.watched {
                        assert!(connection.ask(&asked.of(0)).admits(), "{} is not available", asked.path);
                    }
                    if until.recv_timeout(Duration::from_secs(1)) != Err(RecvTimeoutError::Timeout) {
                        return;
                    }
                }
            });
            let result = doing();
            drop(done);
            result
        })
    }

    /// Prints and returns all measurements.
    fn report(&mut self) -> Value {
        self.admitted = self.admitted.min(self.admitted_keys());
        let mut measured = self.rounds.report("http", self.name, &self.server);
        let mut add = |field: &str, value: Value| measured[field] = value;
        add("what", self.what.into());
        let [p50, p99] = &self.paced;
        report::figure(&format!("http-p99-us-at-half-load-{}", self.name), median(p99));
        add("p50_us_at_half_load", json!(p50));
        add("p99_us_at_half_load", json!(p99));
        if self.store.is_some() {
            report::figure("http-redis-cpu-seconds-per-million", median(&self.store_cpu));
            add("store_cpu_seconds_per_million", json!(self.store_cpu));
        }
        report::figure(&format!("http-admitted-percent-{}", self.name), self.admitted * 100.0);
        add("admitted_percent", json!(self.admitted * 100.0));
        measured
    }

    /// The share of keys that are still admitted. With Redis, asserts that no decision was made without it.
    #[expect(clippy::cast_precision_loss, reason = "few keys")]
    fn admitted_keys(&self) -> f64 {
        let mut connection = Connection::new(&self.address());
        let admitted = (1..=KEYS).filter(|key| connection.ask(&self.asked.of(*key)).admits()).count();
        if self.store.is_some() {
            let metrics = connection.ask(&RequestTemplate::get("/metrics").of(0)).0;
            let degraded = metrics.lines().filter(|line| line.starts_with("tollkeeper_fallback_total{"));
            let degraded: Vec<&str> = degraded.filter(|line| !line.ends_with(" 0")).collect();
            assert!(degraded.is_empty(), "Redis did not decide everything: {degraded:?}");
        }
        admitted as f64 / KEYS as f64
    }
}
