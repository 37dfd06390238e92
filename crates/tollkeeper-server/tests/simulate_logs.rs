//! `tollkeeper simulate` on the logs of real programs: nginx, Caddy, Apache and Envoy are started as reverse proxies,
//! get 500 known requests, and write their logs. The application behind them reads each request as the middleware does.
//! The simulation must find the same keys, each as often.
//!
//! Traefik is not available as a package, so its lines are samples of its documentation: see `format/json.rs`.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use hyper::http::{HeaderName, HeaderValue, Request};
use serde_json::Value;
use support::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;
use tollkeeper::config::{Config, Format};
use tollkeeper::{Policy, Verb};
use tollkeeper_tower::address::Client;
use tollkeeper_tower::facts::{PartialFacts, Reader};

/// One limit for each kind of fact that every log has.
const POLICY: &str = "http:
  trusted_proxies: [127.0.0.1]
  routes: [/login, '/items/{id}', '/api/*']
limits:
  - { name: address, by: ip, rate: 1000000/s }
  - { name: path, by: [method, path], rate: 1000000/s }
  - { name: route, by: route, rate: 1000000/s }
  - { name: agent, by: header.user-agent, rate: 1000000/s }
";

/// How often each limit saw each key.
type Keys = BTreeMap<(String, Vec<String>), u64>;

/// The application: reads every request as the middleware does, and counts its keys.
struct Application {
    address: SocketAddr,
    keys: Arc<Mutex<Keys>>,
}

impl Application {
    fn start() -> Application {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let keys = Arc::new(Mutex::new(Keys::new()));
        let counted = Arc::clone(&keys);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, counted) = (stream.unwrap(), Arc::clone(&counted));
                thread::spawn(move || serve(stream, &counted));
            }
        });
        Application { address, keys }
    }
}

/// Answers the requests of one connection.
fn serve(mut stream: TcpStream, counted: &Mutex<Keys>) {
    let (config, _) = Config::parse("policy.yaml", Format::Yaml, POLICY.as_bytes(), &|_| None).unwrap();
    let policy = Arc::new(config.policy.clone());
    let reader = Reader::new(&config.http, &policy).unwrap();
    let peer = stream.peer_addr().unwrap().ip();
    let (mut bytes, mut buffer) = (Vec::new(), [0; 8_192]);
    loop {
        let count = match stream.read(&mut buffer) {
            Ok(0) | Err(_) => return,
            Ok(count) => count,
        };
        bytes.extend_from_slice(&buffer[..count]);
        while let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            let head: Vec<u8> = bytes.drain(..end + 4).collect();
            note(&head, peer, &config, &policy, &reader, counted);
            // A body after the answer to HEAD would be read as a part of the next answer.
            let body = if head.starts_with(b"HEAD ") { "" } else { "ok" };
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{body}");
            if stream.write_all(answer.as_bytes()).is_err() {
                return;
            }
        }
    }
}

fn note(
    head: &[u8],
    peer: IpAddr,
    config: &Config,
    policy: &Arc<Policy>,
    reader: &Reader,
    counted: &Mutex<Keys>,
) {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut parsed = httparse::Request::new(&mut headers);
    parsed.parse(head).unwrap();
    let mut request = Request::new(());
    *request.method_mut() = parsed.method.unwrap().parse().unwrap();
    *request.uri_mut() = parsed.path.unwrap().parse().unwrap();
    for header in parsed.headers {
        let name: HeaderName = header.name.parse().unwrap();
        request.headers_mut().append(name, HeaderValue::from_bytes(header.value).unwrap());
    }
    let (parts, ()) = request.into_parts();
    let client = Client::of(peer, &parts.headers, &config.http);
    let mut seen = PartialFacts::default();
    reader.head(&parts, Some(&client), None, &mut seen);
    let facts = seen.complete(policy).unwrap();
    let mut toll = tollkeeper::store::Toll::new(policy, Verb::Check);
    toll.add(facts.facts, 1).unwrap();
    for due in toll.dues() {
        let values = due.key.texts().map(|value| value.unwrap_or("-").to_owned()).collect();
        *counted.lock().unwrap().entry((due.key.limit().to_owned(), values)).or_default() += 1;
    }
}

/// 500 requests from 20 addresses, with paths in several spellings.
fn requests(agents: &[&str]) -> Vec<(Ipv4Addr, String)> {
    let paths = [
        "GET /",
        "GET /login",
        "POST /Login/",
        "GET /%6cogin?next=/",
        "GET /items/7",
        "GET /items/8?a=b&c=%22",
        "DELETE /items/7",
        "GET /api/a/b",
        "GET /api/x?token=1",
        "PUT /other",
        "GET /caf%C3%A9",
        "HEAD /login",
    ];
    let request = |index: usize| {
        let agent = agents[index % agents.len()];
        let line = paths[index * 7 % paths.len()];
        let address = Ipv4Addr::new(127, 0, 0, u8::try_from(2 + index % 20).unwrap());
        let head = format!(
            "{line} HTTP/1.1\r\nHost: app.example.test\r\nUser-Agent: {agent}\r\nContent-Length: 0\r\n\
             Connection: close\r\n\r\n"
        );
        (address, head)
    };
    (0..500).map(request).collect()
}

/// Sends all requests, each on a connection of its own.
fn send(port: u16, requests: &[(Ipv4Addr, String)]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        for (address, head) in requests {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind((*address, 0).into()).unwrap();
            let mut stream = socket.connect((Ipv4Addr::LOCALHOST, port).into()).await.unwrap();
            stream.write_all(head.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
            let is_answer = answer.ends_with(b"ok") || head.starts_with("HEAD");
            assert!(
                is_answer && answer.starts_with(b"HTTP/1.1 200"),
                "{head}: {}",
                String::from_utf8_lossy(&answer)
            );
        }
    });
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A proxy in front of the application; it is stopped before its log is read.
struct Proxy(Child);

impl Proxy {
    fn start(command: &mut Command, port: u16) -> Proxy {
        let python = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/python/bin");
        let path = format!("/usr/sbin:{python}:{}", std::env::var("PATH").unwrap());
        let child = command
            .env("PATH", path)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .stdin(Stdio::null())
            .spawn();
        let mut proxy = Proxy(child.unwrap_or_else(|error| panic!("{command:?}: {error}")));
        let began = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(began.elapsed() < Duration::from_secs(60), "{command:?} does not listen");
            assert!(proxy.0.try_wait().unwrap().is_none(), "{command:?} has ended");
            thread::yield_now();
        }
        proxy
    }

    /// Ends it in order, so that it writes what it has not written yet.
    fn stop(mut self) {
        let process = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends the requests through a proxy, and compares the keys of its log with those that the application saw.
fn agrees(start: impl FnOnce(&Folder, u16, u16) -> (Proxy, PathBuf), agents: &[&str]) {
    let (folder, application) = (Folder::new(), Application::start());
    let port = free_port();
    let (proxy, log) = start(&folder, port, application.address.port());
    send(port, &requests(agents));
    proxy.stop();
    let config = folder.write("policy.yaml", POLICY);
    let command = ["simulate", "--json", "--quiet", "--top", "1000", "--config"];
    let output = output(tollkeeper().args(command).arg(&config).arg(&log));
    let shown = fs::read_to_string(&log).unwrap();
    let first: String = shown.lines().take(3).collect();
    assert_eq!(output.status.code(), Some(0), "{}\n{first}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    // A connection that only looked whether the proxy listens is no request, but some programs write a line for it.
    assert_eq!(report["lines"]["used"], 500, "{}\n{first}", report["lines"]);
    let mut found = Keys::new();
    for limit in report["limits"].as_array().unwrap() {
        for top in limit["top"].as_array().unwrap() {
            let values =
                top["key"].as_array().unwrap().iter().map(|value| value.as_str().unwrap_or("-").to_owned());
            let key = (limit["name"].as_str().unwrap().to_owned(), values.collect());
            found.insert(key, top["asked"].as_u64().unwrap());
        }
    }
    let expected = application.keys.lock().unwrap().clone();
    assert!(expected.len() > 30, "{expected:?}");
    assert_eq!(found, expected, "{first}");
}

/// Agents with quotes and backslashes, which logs escape.
const AGENTS: [&str; 3] = ["curl/8.0", "a \"quoted\" agent", "back\\slash \\\" and tail\\"];

#[test]
fn logs_of_nginx_have_the_keys_of_the_middleware() {
    for (format, log_format) in [
        ("combined", ""),
        (
            "main",
            "log_format main '$remote_addr [$time_iso8601] $msec $request_time $status $request_method \
                  $request_uri \"$http_user_agent\" \"$http_x_forwarded_for\" $host';",
        ),
    ] {
        let start = |folder: &Folder, port: u16, upstream: u16| {
            let root = folder.path().display();
            let config = format!(
                "daemon off; master_process off; pid {root}/pid; error_log {root}/error.log;\nevents {{}}\n\
                 http {{ {log_format} access_log {root}/access.log {format};\n\
                 client_body_temp_path {root}/a; proxy_temp_path {root}/b; fastcgi_temp_path {root}/c;\n\
                 uwsgi_temp_path {root}/d; scgi_temp_path {root}/e;\n\
                 server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://127.0.0.1:{upstream};\n\
                 proxy_set_header Host $host; proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for; }} }} }}\n"
            );
            let config = folder.write("nginx.conf", &config);
            let proxy = Proxy::start(Command::new("nginx").arg("-c").arg(&config), port);
            (proxy, folder.path().join("access.log"))
        };
        if format == "combined" {
            agrees(start, &AGENTS);
            continue;
        }
        // The same log_format, passed as it is written in nginx's config.
        let (folder, application) = (Folder::new(), Application::start());
        let port = free_port();
        let (proxy, log) = start(&folder, port, application.address.port());
        send(port, &requests(&AGENTS));
        proxy.stop();
        let config =
            folder.write("policy.yaml", &format!("{POLICY}  - {{ name: host, by: host, rate: 1/hour }}\n"));
        let format = "$remote_addr [$time_iso8601] $msec $request_time $status $request_method $request_uri \
                      \"$http_user_agent\" \"$http_x_forwarded_for\" $host";
        let mut command = tollkeeper();
        command.args(["simulate", "--json", "--quiet", "--top", "1000", "--format", format, "--config"]);
        let output = output(command.arg(&config).arg(&log));
        let report: Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output.stderr)));
        assert_eq!((&report["lines"]["used"], &report["spread"]), (&500.into(), &false.into()), "{report}");
        let keys = application.keys.lock().unwrap();
        for limit in report["limits"].as_array().unwrap().iter().filter(|limit| limit["name"] != "host") {
            for top in limit["top"].as_array().unwrap() {
                let values =
                    top["key"].as_array().unwrap().iter().map(|value| value.as_str().unwrap().to_owned());
                let key = (limit["name"].as_str().unwrap().to_owned(), values.collect::<Vec<_>>());
                assert_eq!(keys.get(&key).copied(), top["asked"].as_u64(), "{key:?}");
            }
        }
        assert_eq!(report["limits"][4]["top"][0]["key"][0], "app.example.test");
    }
}

#[test]
fn logs_of_caddy_have_the_keys_of_the_middleware() {
    let start = |folder: &Folder, port: u16, upstream: u16| {
        let log = folder.path().join("access.log");
        let config = format!(
            "{{\n admin off\n auto_https off\n}}\nhttp://:{port} {{\n bind 127.0.0.1\n log {{\n  output file {}\n  format json\n }}\n reverse_proxy 127.0.0.1:{upstream}\n}}\n",
            log.display()
        );
        let config = folder.write("Caddyfile", &config);
        let mut command = Command::new("caddy");
        command.args(["run", "--adapter", "caddyfile", "--config"]).arg(&config).env("HOME", folder.path());
        (Proxy::start(&mut command, port), log)
    };
    agrees(start, &AGENTS);
}

#[test]
fn logs_of_apache_have_the_keys_of_the_middleware() {
    let start = |folder: &Folder, port: u16, upstream: u16| {
        let (log, root) = (folder.path().join("access.log"), folder.path().display());
        let modules = ["mpm_event", "authz_core", "proxy", "proxy_http"];
        let load: String = modules
            .iter()
            .map(|name| format!("LoadModule {name}_module /usr/lib/apache2/modules/mod_{name}.so\n"))
            .collect();
        let format = r#""%h %l %u %t \"%r\" %>s %O \"%{Referer}i\" \"%{User-Agent}i\"""#;
        let config = format!(
            "ServerRoot {root}\nServerName app.example.test\nListen 127.0.0.1:{port}\nPidFile {root}/pid\n{load}\
             ErrorLog {root}/error.log\nLogFormat {format} combined\nCustomLog {} combined\nProxyPreserveHost On\n\
             ProxyPass / http://127.0.0.1:{upstream}/\n",
            log.display()
        );
        let config = folder.write("apache.conf", &config);
        let proxy = Proxy::start(Command::new("apache2").arg("-X").arg("-f").arg(&config), port);
        (proxy, log)
    };
    agrees(start, &AGENTS);
}

/// Its default format does not escape quotes, so its agents have none.
#[test]
fn logs_of_envoy_have_the_keys_of_the_middleware() {
    for json in [false, true] {
        let start = |folder: &Folder, port: u16, upstream: u16| {
            let log = folder.path().join("access.log");
            let fields = "{ start_time: '%START_TIME%', method: '%REQ(:METHOD)%', path: '%REQ(X-ENVOY-ORIGINAL-PATH?:PATH)%', \
                          response_code: '%RESPONSE_CODE%', duration: '%DURATION%', x_forwarded_for: '%REQ(X-FORWARDED-FOR)%', \
                          user_agent: '%REQ(USER-AGENT)%', authority: '%REQ(:AUTHORITY)%', \
                          downstream_remote_address: '%DOWNSTREAM_REMOTE_ADDRESS%' }";
            let format =
                if json { format!("log_format: {{ json_format: {fields} }}") } else { String::new() };
            let config = format!(
                "static_resources:
  listeners:
    - address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                '@type': type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: in
                use_remote_address: true
                access_log:
                  - name: envoy.access_loggers.file
                    typed_config:
                      '@type': type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog
                      path: {}
                      {format}
                route_config:
                  virtual_hosts:
                    - {{ name: all, domains: ['*'], routes: [ {{ match: {{ prefix: / }}, route: {{ cluster: app }} }} ] }}
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config: {{ '@type': type.googleapis.com/envoy.extensions.filters.http.router.v3.Router }}
  clusters:
    - name: app
      type: STATIC
      load_assignment:
        cluster_name: app
        endpoints:
          - lb_endpoints: [ {{ endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {upstream} }} }} }} }} ]
",
                log.display()
            );
            let config = folder.write("envoy.yaml", &config);
            let mut command = Command::new("envoy");
            command.args([
                "--use-dynamic-base-id",
                "--concurrency",
                "1",
                "--file-flush-interval-msec",
                "50",
                "-c",
            ]);
            (Proxy::start(command.arg(&config), port), log)
        };
        let agents = if json { &AGENTS[..] } else { &["curl/8.0", "another agent"][..] };
        agrees(start, agents);
    }
}
