//! Records how the adaptive limit of `tollkeeper proxy` follows an overloaded service whose work takes three times as long
//! for a while.
//!
//! `adaptive TOLLKEEPER FILE` runs the service and its clients in this process, and the proxy between them. The file gets a
//! line per second: limit, requests in flight, floor and shed requests from the metrics of the proxy; the median latency and
//! the number of answered requests from the clients.

use std::fmt::Write as _;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{env, fs};

use axum::Router;
use axum::extract::State;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use tollkeeper_bench::keys::random;
use tollkeeper_bench::paced::response_length;
use tollkeeper_bench::report::{self, median};
use tollkeeper_bench::served::{Server, on_first_core, version};
use tollkeeper_tests::redis::free_port;

const CONFIG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/proxy/adaptive.yaml");
const WORKERS: usize = 30;
/// How long a worker takes for a request: uniformly from 0.75 to 1.25 times this.
const WORK: Duration = Duration::from_millis(20);
/// When work takes three times as long, in seconds.
const SLOW: Range<u64> = 20..40;
const END: u64 = 70;
/// 1.3 times what 30 workers of 20 ms can answer.
const REQUESTS_PER_SECOND: f64 = 1_950.0;
/// The last seconds of each phase, for the printed figures.
const SETTLED: [(&str, Range<usize>); 3] = [("before", 10..20), ("slow", 34..40), ("after", 60..70)];

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [tollkeeper, file] = &arguments[..] else { panic!("usage: adaptive TOLLKEEPER FILE") };
    let (service, service_port) = Service::start().await;
    let [port, metrics] = [free_port(), free_port()];
    let mut command = on_first_core(tollkeeper);
    command.args(["proxy", &format!("http://127.0.0.1:{service_port}"), "--config", CONFIG]);
    command.args(["--listen", &format!("127.0.0.1:{port}"), "--http", &format!("127.0.0.1:{metrics}")]);
    let _proxy = Server::start(version(tollkeeper, "--version"), command, port);
    let seconds = record(&service, port, metrics).await;

    let mut lines = "second\tlimit\tin_flight\tfloor_us\tlatency_us\tanswered\tshed\n".to_owned();
    for (number, Second { limit, in_flight, floor, latency, answered, shed }) in (1..).zip(&seconds) {
        let line = format!("{number}\t{limit}\t{in_flight}\t{floor:.0}\t{latency:.0}\t{answered}\t{shed}");
        writeln!(lines, "{line}").expect("writing to a String cannot fail");
    }
    fs::write(file, lines).unwrap_or_else(|error| panic!("{file}: {error}"));
    for (phase, settled) in SETTLED {
        let figure = |name, value: fn(&Second) -> f64| {
            let values: Vec<f64> = seconds[settled.clone()].iter().map(value).collect();
            report::figure(&format!("adaptive-{phase}-{name}"), median(&values));
        };
        figure("limit", |second| second.limit);
        figure("floor-ms", |second| second.floor / 1e3);
        figure("latency-ms", |second| second.latency / 1e3);
        figure("answered-per-second", |second| second.answered);
        figure("shed-per-second", |second| second.shed);
    }
}

/// A service with a fixed number of workers, and a queue.
struct Service {
    /// Waiting requests get a worker in FIFO order.
    workers: Semaphore,
    is_slow: AtomicBool,
    requests: AtomicU64,
}

impl Service {
    /// Starts it on a free port.
    async fn start() -> (Arc<Service>, u16) {
        let service = Arc::new(Service {
            workers: Semaphore::new(WORKERS),
            is_slow: AtomicBool::new(false),
            requests: AtomicU64::new(0),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("it is bound").port();
        let router = Router::new().fallback(Service::answer).with_state(Arc::clone(&service));
        tokio::spawn(async move { axum::serve(listener, router).await });
        (service, port)
    }

    async fn answer(State(service): State<Arc<Service>>) -> &'static str {
        let _worker = service.workers.acquire().await.expect("it is never closed");
        let drawn = random(service.requests.fetch_add(1, Relaxed)) % 501;
        let work = WORK * (750 + u32::try_from(drawn).expect("below 501")) / 1_000;
        sleep(if service.is_slow.load(Relaxed) { work * 3 } else { work }).await;
        "ok\n"
    }
}

/// What happened in a second.
struct Second {
    /// At its end, as the proxy reports it.
    limit: f64,
    /// At its end, as the proxy reports it.
    in_flight: f64,
    /// In microseconds, at its end, as the proxy reports it.
    floor: f64,
    /// The median of answered requests in microseconds, from the due time of a request to its response.
    latency: f64,
    /// Requests that were answered by the service.
    answered: f64,
    /// Requests that the proxy shed.
    shed: f64,
}

/// Loads the proxy, and records every second.
async fn record(service: &Service, port: u16, metrics: u16) -> Vec<Second> {
    let mut connection = connect(metrics).await;
    let clients = Arc::new(Clients { port, idle: Mutex::default(), latencies: Mutex::default() });
    let began = Instant::now();
    let load = tokio::spawn(Arc::clone(&clients).load(began));
    let (mut seconds, mut shed_before) = (Vec::new(), 0.0);
    for second in 0..END {
        service.is_slow.store(SLOW.contains(&second), Relaxed);
        sleep_until(began + Duration::from_secs(second + 1)).await;
        let page = request(&mut connection, "/metrics").await;
        let metric = |name: &str| metric(&page, &format!("tollkeeper_proxy_{name}"));
        let latencies =
            std::mem::take(&mut *clients.latencies.lock().unwrap_or_else(PoisonError::into_inner));
        let shed = metric("shed_total");
        seconds.push(Second {
            limit: metric("concurrency_limit"),
            in_flight: metric("in_flight"),
            floor: metric("concurrency_floor_seconds") * 1e6,
            latency: median(&latencies),
            answered: latencies.len() as f64,
            shed: shed - shed_before,
        });
        shed_before = shed;
        assert!(!load.is_finished(), "a client failed");
    }
    load.abort();
    seconds
}

/// The sum of a metric over its labels; 0 if it is not there.
fn metric(page: &str, name: &str) -> f64 {
    let lines = page.lines().filter_map(|line| line.strip_prefix(name));
    let lines = lines.filter(|rest| rest.starts_with(['{', ' ']));
    lines.filter_map(|rest| rest.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

/// Clients that send requests at random times, whatever happened to those before.
struct Clients {
    port: u16,
    /// Connections without a request.
    idle: Mutex<Vec<TcpStream>>,
    /// Of answered requests in microseconds, since they were last read.
    latencies: Mutex<Vec<f64>>,
}

impl Clients {
    /// Runs until it is aborted.
    async fn load(self: Arc<Clients>, began: Instant) {
        let (mut due, mut requests) = (began, JoinSet::new());
        for draw in 0.. {
            // Exponentially distributed gaps: arrivals are a Poisson process.
            let drawn = (random(draw) >> 11) as f64 / (1_u64 << 53) as f64;
            due += Duration::from_secs_f64(-(1.0 - drawn).ln() / REQUESTS_PER_SECOND);
            sleep_until(due).await;
            requests.spawn(Arc::clone(&self).request(due));
            while let Some(done) = requests.try_join_next() {
                done.expect("every request is answered or shed");
            }
        }
    }

    async fn request(self: Arc<Clients>, due: Instant) {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut connection = match idle {
            Some(connection) => connection,
            None => connect(self.port).await,
        };
        let response = request(&mut connection, "/").await;
        if response.starts_with("HTTP/1.1 200 ") {
            let micros = due.elapsed().as_secs_f64() * 1e6;
            self.latencies.lock().unwrap_or_else(PoisonError::into_inner).push(micros);
        } else {
            assert!(response.starts_with("HTTP/1.1 503 "), "{response}");
        }
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
    }
}

async fn connect(port: u16) -> TcpStream {
    let connection = TcpStream::connect(("127.0.0.1", port)).await.expect("the server listens");
    connection.set_nodelay(true).expect("a socket");
    connection
}

/// Sends a request, and returns the response, head and body.
async fn request(connection: &mut TcpStream, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    connection.write_all(request.as_bytes()).await.expect("the server reads");
    let mut received = Vec::new();
    while response_length(&received).is_none() {
        let read = connection.read_buf(&mut received).await.expect("the server responds");
        assert!(read > 0, "the server closed the connection");
    }
    String::from_utf8(received).expect("text")
}
