//! The access log, and its reader.

use std::fs;
use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::sync::{Arc, Barrier};
use std::time::Instant;

use serde_json::Value;

use crate::support::{Folder, eventually, run, text};
use crate::upstream::{Upstream, read_request};
use crate::{Proxy, UNLIMITED};

const CONFIG: &str = "http:\n  routes: [/login, '/users/{id}']\n  facts:\n    key: { from: header.x-key, hash: true }\n    \
                      email: { from: body.email }\nlimits:\n  - { name: per-key, by: key, rate: 3/day }\n  \
                      - { name: login, when: { route: /login }, by: email, rate: 2/day }\n";

#[test]
fn requests_are_logged_and_simulate_reads_them() {
    let upstream = Upstream::ok();
    let folder = Folder::new();
    let log = folder.path().join("access.log");
    let proxy = Proxy::start(&upstream.url(), CONFIG, &["--access-log", log.to_str().unwrap()]);
    let mut client = proxy.client();
    let key = "x-key: secret";
    for _ in 0..4 {
        client.request_with("GET", "/users/7?token=hidden", &[key], b"");
    }
    let json = "content-type: application/json";
    assert_eq!(client.request_with("POST", "/login", &[json], br#"{"email":"a@b.test"}"#).status, 200);
    assert_eq!(client.request_with("TRACE", "/users/7", &[], b"").status, 405);
    eventually("all lines are written", || fs::read_to_string(&log).unwrap_or_default().lines().count() == 6);
    let logged = fs::read_to_string(&log).unwrap();
    assert!(!logged.contains("secret") && !logged.contains("hidden"), "{logged}");
    let lines: Vec<Value> = logged.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let field = |name: &str| -> Vec<String> { lines.iter().map(|line| line[name].to_string()).collect() };
    assert_eq!(field("status"), ["200", "200", "200", "429", "200", "405"]);
    let passed = "\"passed\"";
    assert_eq!(field("verdict"), [passed, passed, passed, "\"refused\"", passed, "\"error\""]);
    assert_eq!(field("by")[3], "\"per-key\"");
    assert_eq!(lines[0]["path"], "/users/7");
    assert_eq!(lines[0]["route"], "/users/{id}");
    assert_eq!(lines[4]["facts"]["email"], "a@b.test", "facts of the body are logged, too");
    assert_eq!((&lines[4]["bytes_in"], &lines[4]["bytes_out"]), (&20.into(), &2.into()));
    assert_eq!(lines[0]["upstream"], upstream.address.to_string());
    assert!(lines[0]["facts"]["key"].as_str().unwrap().starts_with("sha256:"), "{logged}");
    assert!(lines[0]["duration"].as_u64() >= lines[0]["upstream_duration"].as_u64(), "{logged}");
    assert_eq!(lines[3]["upstream"], Value::Null);

    // The same policy decides the log as it decided the requests.
    let config = folder.write("tollkeeper.yaml", CONFIG);
    let report = run(&[
        "simulate",
        "--config",
        config.to_str().unwrap(),
        "--format",
        "tollkeeper",
        "--json",
        "--no-progress",
        log.to_str().unwrap(),
    ]);
    let report: Value =
        serde_json::from_slice(&report.stdout).unwrap_or_else(|_| panic!("{}", text(&report.stderr)));
    assert_eq!(report["requests"]["refused"], 1, "{report}");
}

/// A proxy with an access log, and the lines of the log as soon as there are so many.
struct Logged {
    proxy: Proxy,
    log: PathBuf,
    _folder: Folder,
}

impl Logged {
    fn start(upstream: &Upstream, config: &str, args: &[&str]) -> Logged {
        let folder = Folder::new();
        let log = folder.path().join("access.log");
        let args = [&["--access-log", log.to_str().unwrap()], args].concat();
        Logged { proxy: Proxy::start(&upstream.url(), config, &args), log, _folder: folder }
    }

    fn lines(&self, count: usize) -> Vec<Value> {
        let logged = || fs::read_to_string(&self.log).unwrap_or_default();
        eventually("all lines are written", || logged().lines().count() == count);
        logged().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

#[test]
fn shed_and_shared_requests_are_logged() {
    let release = Arc::new(Barrier::new(2));
    let upstream = Upstream::answering({
        let release = Arc::clone(&release);
        move |_| {
            release.wait();
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok".to_vec()
        }
    });
    let config = format!(
        "proxy: {{ concurrency: {{ max: 1 }}, single_flight: [{{ by: [host, path, query] }}], access_log: {{ query: true }} \
         }}\n{UNLIMITED}"
    );
    let logged = Logged::start(&upstream, &config, &[]);
    let mut clients = [logged.proxy.client(), logged.proxy.client()];
    for client in &mut clients {
        client.send(b"GET /x?q=1 HTTP/1.1\r\nhost: a\r\n\r\n");
    }
    let admitted = "tollkeeper_checks_total{limit=\"all\",result=\"allowed\"}";
    eventually("both requests are in flight", || logged.proxy.metric(admitted) == 2.0);
    eventually("the leader has arrived", || upstream.count() == 1);
    assert_eq!(logged.proxy.client().request("GET", "/other", "").status, 503);
    release.wait();
    for client in &mut clients {
        assert_eq!(client.answer().text(), "ok");
    }
    let lines = logged.lines(3);
    let mut verdicts: Vec<&str> = lines.iter().map(|line| line["verdict"].as_str().unwrap()).collect();
    verdicts.sort_unstable();
    assert_eq!(verdicts, ["passed", "shared", "shed"], "{lines:?}");
    let shared = lines.iter().find(|line| line["verdict"] == "shared").unwrap();
    assert_eq!((&shared["path"], &shared["upstream"]), (&"/x?q=1".into(), &Value::Null), "{shared}");
}

#[test]
fn standard_error_can_be_the_access_log() {
    let upstream = Upstream::ok();
    let proxy = Proxy::start(&upstream.url(), UNLIMITED, &["--access-log", "-"]);
    assert_eq!(proxy.client().request("GET", "/x", "").status, 200);
    proxy.api.logs("\"path\":\"/x\"");
    proxy.api.signal("TERM");
    let ended = proxy.api.ended();
    let printed = ended.printed.lines().all(|line| line.starts_with("listening "));
    assert!(printed, "standard output has only the addresses: {}", ended.printed);
}

#[test]
fn client_that_leaves_before_the_response_is_logged() {
    let upstream = Upstream::serving(|upstream, mut stream| {
        let request = read_request(&mut stream, &mut Vec::new()).unwrap();
        upstream.record(&request);
        // Until the proxy closes the connection.
        let _ = stream.read(&mut [0]);
    });
    let logged = Logged::start(&upstream, UNLIMITED, &[]);
    let mut client = logged.proxy.client();
    client.send(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n");
    eventually("the request arrives", || upstream.count() == 1);
    drop(client);
    let line = &logged.lines(1)[0];
    assert_eq!((&line["status"], &line["verdict"]), (&499.into(), &"error".into()), "{line}");
    let errors = "tollkeeper_requests_total{transport=\"proxy\",route=\"\",result=\"error\"}";
    assert_eq!(logged.proxy.metric(errors), 1.0);
}

#[test]
fn tunnel_is_logged_when_it_ends() {
    let upstream = Upstream::serving(|_, mut stream| {
        read_request(&mut stream, &mut Vec::new()).unwrap();
        let switch = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
        stream.write_all(switch).unwrap();
        let mut bytes = [0; 5];
        stream.read_exact(&mut bytes).unwrap();
        stream.write_all(b"hello you").unwrap();
        let _ = stream.read(&mut [0]);
    });
    let logged = Logged::start(&upstream, UNLIMITED, &[]);
    let mut tunnel = logged.proxy.client();
    tunnel.send(b"GET /ws HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n");
    assert_eq!(tunnel.try_head().unwrap().status, 101);
    tunnel.send(b"hello");
    tunnel.stream.read_exact(&mut [0; 9]).unwrap();
    // A request that ends while the tunnel is open is logged before it.
    assert_eq!(logged.proxy.client().request_with("TRACE", "/x", &[], b"").status, 405);
    assert_eq!(logged.lines(1)[0]["status"], 405);
    drop(tunnel);
    let line = &logged.lines(2)[1];
    assert_eq!((&line["status"], &line["verdict"]), (&101.into(), &"passed".into()), "{line}");
    assert_eq!((&line["bytes_in"], &line["bytes_out"]), (&5.into(), &9.into()), "{line}");
}

/// The upstream cannot answer before it has the whole body: a slow client does not make it slow.
#[test]
fn upstream_duration_begins_after_the_upload() {
    let upstream = Upstream::ok();
    let logged = Logged::start(&upstream, UNLIMITED, &[]);
    let mut client = logged.proxy.client();
    client.send(b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\na");
    eventually("the upstream waits for the body", || {
        logged.proxy.metric("tollkeeper_proxy_in_flight") == 1.0
    });
    let before = Instant::now();
    client.send(b"b");
    assert_eq!(client.answer().status, 200);
    let most = before.elapsed().as_micros();
    let took = logged.lines(1)[0]["upstream_duration"].as_u64().unwrap();
    assert!(u128::from(took) <= most, "{took} of {most} µs");
}
