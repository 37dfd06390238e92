//! What the limits see is what the upstream receives, for random request heads.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use hyper::{HeaderMap, Request};
use serde_json::Value;
use tollkeeper::config::{Config, Format};
use tollkeeper_tower::address::Client;
use tollkeeper_tower::facts::{PartialFacts, Reader};

use crate::Proxy;
use crate::support::{self, Folder, eventually};
use crate::upstream::{Upstream, read_request};

const HEADS: usize = 100_000;
const WORKERS: usize = 8;

/// Limits that need every kind of fact. All of them admit everything.
const CONFIG: &str = "http:\n  routes: [/login, '/users/{id}', '/api/*']\nproxy: { max_connections: 1000 }\nlimits:\n  \
                      - { name: number, by: [header.x-n, ip], rate: 1000000/s }\n  \
                      - { name: target, by: [host, path, route, method], rate: 1000000/s }\n  \
                      - { name: parts, by: [query.q, cookie.c, header.x-k], rate: 1000000/s, mode: shadow }\n";

/// A small generator of numbers: the same heads in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % bound
    }

    fn of<'a>(&mut self, choices: &[&'a str]) -> &'a str {
        choices[self.below(choices.len())]
    }
}

fn head(random: &mut Random, number: usize) -> String {
    let method = random.of(&["GET", "GET", "POST", "get", "DELETE", "PuT", "OPTIONS", "X-Y"]);
    let mut path = String::new();
    for _ in 0..1 + random.below(4) {
        path.push_str(random.of(&[
            "/login", "/users/7", "/api/x", "//", "/.", "/..", "/%2e%2e", "/%6Cogin", "/LOGIN", "/a;b",
            "/%2F", "/\u{e9}", "/%", "/a%00",
        ]));
    }
    if random.below(2) == 0 {
        path.push_str(random.of(&[
            "?q=1",
            "?q=1&q=2",
            "?Q=1",
            "?q=%31",
            "?q",
            "?a=b&q=x+y",
            "#q=1",
            "?q=1#z",
        ]));
    }
    let target = match random.below(8) {
        0 => format!("http://{}{path}", random.of(&["evil", "A", "a:80", "user@a"])),
        _ => path,
    };
    let version = if random.below(10) == 0 { "1.0" } else { "1.1" };
    let mut text = format!("{method} {target} HTTP/{version}\r\nx-n: {number}\r\n");
    let hosts = match random.below(50) {
        0 => 0,
        1 => 2,
        _ => 1,
    };
    for _ in 0..hosts {
        text.push_str(&format!(
            "{}: {}\r\n",
            random.of(&["host", "Host", "HOST"]),
            random.of(&["a", "A", "a:80", "b", "[::1]:1"])
        ));
    }
    for _ in 0..random.below(5) {
        text.push_str(random.of(&[
            "x-k: 1\r\n",
            "X-K: 2\r\n",
            "x_k: 3\r\n",
            "x-k:\r\n",
            "x-k:  padded \r\n",
            "x-k: caf\u{e9}\r\n",
            "connection: x-k\r\n",
            "connection: keep-alive, X-K\r\n",
            "connection: host, cookie, x-forwarded-host\r\n",
            "cookie: c=1\r\n",
            "cookie: b=2; c=3\r\n",
            "cookie: c=\"4\"\r\n",
            "Cookie: c=%35\r\n",
            "x-forwarded-for: 192.0.2.7\r\n",
            "X-Forwarded-For: 192.0.2.7, 192.0.2.8\r\n",
            "x-forwarded-host: z\r\n",
            "x_forwarded_host: y\r\n",
            "te: trailers\r\n",
            "upgrade: h2c\r\n",
            "keep-alive: 5\r\n",
            "content-length: 0\r\n",
            "expect: 100-continue\r\n",
        ]));
    }
    text.push_str("\r\n");
    text
}

/// The facts of a request, as they are logged.
type Facts = BTreeMap<String, String>;

/// Reads the facts of what the upstream received.
struct FactReader {
    reader: Reader,
    config: Config,
}

impl FactReader {
    fn new() -> FactReader {
        let (config, _) =
            Config::parse("tollkeeper.yaml", Format::Yaml, CONFIG.as_bytes(), &|_| None).unwrap();
        FactReader { reader: Reader::new(&config.http, &config.policy).unwrap(), config }
    }

    fn read(&self, bytes: &[u8]) -> Facts {
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut parsed = httparse::Request::new(&mut headers);
        parsed.parse(bytes).unwrap();
        let mut request = Request::builder().method(parsed.method.unwrap()).uri(parsed.path.unwrap());
        for header in parsed.headers.iter() {
            request = request.header(header.name, header.value);
        }
        let (parts, ()) = request.body(()).unwrap().into_parts();
        let mut partial = PartialFacts::default();
        // The upstream trusts the proxy, which says who the client is.
        let client: IpAddr = parts.headers["x-forwarded-for"].to_str().unwrap().parse().unwrap();
        let client = Client::of(client, &HeaderMap::new(), &self.config.http);
        self.reader.head(&parts, Some(&client), None, &mut partial);
        let complete =
            partial.complete(&self.config.policy).expect("an ambiguous request was refused before");
        complete
            .facts
            .iter()
            .map(|(name, value)| (name.to_owned(), value.text(&mut [0; 48]).to_owned()))
            .collect()
    }
}

#[test]
fn limits_see_what_the_upstream_receives() {
    let reader = FactReader::new();
    let received: Arc<Mutex<BTreeMap<String, Facts>>> = Arc::default();
    let upstream = Upstream::serving({
        let received = Arc::clone(&received);
        move |_, mut stream| {
            let mut buffer = Vec::new();
            while let Some(request) = read_request(&mut stream, &mut buffer) {
                let facts = reader.read(&request);
                received.lock().unwrap().insert(facts["header.x-n"].clone(), facts);
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
            }
        }
    });
    let folder = Folder::new();
    let log = folder.path().join("access.log");
    let proxy = Proxy::start(&upstream.url(), CONFIG, &["--access-log", log.to_str().unwrap()]);
    // How many heads got each status; 0 if the connection was closed without a response.
    let statuses: Mutex<BTreeMap<u16, usize>> = Mutex::default();
    std::thread::scope(|scope| {
        for worker in 0..WORKERS {
            let (proxy, statuses) = (&proxy, &statuses);
            scope.spawn(move || {
                let mut random = Random(worker as u64 + 1);
                let mut kept: Option<support::Client> = None;
                for number in (worker..HEADS).step_by(WORKERS) {
                    let mut client = kept.take().unwrap_or_else(|| proxy.client());
                    let head = head(&mut random, number);
                    client.send(head.as_bytes());
                    let Some(mut answer) = client.try_answer() else {
                        *statuses.lock().unwrap().entry(0).or_default() += 1;
                        continue;
                    };
                    while answer.status == 100 {
                        answer = client.answer();
                    }
                    *statuses.lock().unwrap().entry(answer.status).or_default() += 1;
                    let closes = answer.status == 400
                        || answer.header("connection") == Some("close")
                        || head.contains(" HTTP/1.0\r\n");
                    kept = Some(client).filter(|_| !closes && answer.status < 500);
                }
            });
        }
    });
    let received = std::mem::take(&mut *received.lock().unwrap());
    let mut compared = 0;
    eventually("every forwarded request is logged", || {
        let logged = std::fs::read_to_string(&log).unwrap();
        let passed = logged.lines().filter(|line| line.contains("\"verdict\":\"passed\"")).count();
        passed == received.len()
    });
    for line in std::fs::read_to_string(&log).unwrap().lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        if line["verdict"] != "passed" {
            continue;
        }
        let limits: Facts = line["facts"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(name, value)| (name.clone(), value.as_str().unwrap().to_owned()))
            .collect();
        assert_eq!(&limits, &received[&limits["header.x-n"]], "{line}");
        compared += 1;
    }
    let statuses = statuses.into_inner().unwrap();
    println!(
        "{compared} of {HEADS} random heads were forwarded, all with the facts that the limits saw: {statuses:?}"
    );
    assert_eq!(statuses.values().sum::<usize>(), HEADS);
    assert_eq!(statuses.get(&200), Some(&compared), "only refused heads are not compared: {statuses:?}");
    assert!(compared >= HEADS / 10 * 9, "{statuses:?}");
}
