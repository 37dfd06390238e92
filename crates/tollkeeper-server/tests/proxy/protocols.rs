//! TLS on both sides, Unix sockets, gRPC, the PROXY protocol, and the flags of the command.

use std::io::{BufRead as _, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use tollkeeper_tests::certificates::Authority;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::support::{Client, Folder, PATIENCE, Server, eventually, output, run, text, tollkeeper};
use crate::upstream::{Upstream, shown};
use crate::{Proxy, UNLIMITED};

fn curl(args: &[&str]) -> String {
    let output = output(Command::new("curl").args(["--silent", "--show-error", "--noproxy", "*"]).args(args));
    format!("{}{}", text(&output.stdout), text(&output.stderr)).trim().to_owned()
}

#[test]
fn tls_works_on_both_sides() {
    let upstream = Upstream::ok();
    let authority = Authority::new();
    let (cert, key) = authority.certify("server", "IP:127.0.0.1,DNS:localhost");
    let tls = format!("tls: {{ cert: {}, key: {} }}\n{UNLIMITED}", cert.display(), key.display());
    // The inner proxy accepts TLS; the outer one speaks it to the inner one.
    let inner = Proxy::start(&upstream.url(), &tls, &[]);
    let ca = authority.certificate().display().to_string();
    let url = format!("https://localhost:{}", inner.address.port());
    let outer = Proxy::start(&url, &tls, &["--upstream-ca", &ca, "--host-header", "upstream"]);
    let target = format!("https://localhost:{}/x", outer.address.port());
    for version in ["--http1.1", "--http2"] {
        let printed =
            curl(&["--cacert", &ca, version, "--write-out", " %{http_code} %{http_version}", &target]);
        let expected = if version == "--http2" { "ok 200 2" } else { "ok 200 1.1" };
        assert_eq!(printed, expected);
    }
    let arrived = String::from_utf8(upstream.take().concat()).unwrap();
    assert!(arrived.contains("x-forwarded-proto: https"), "{arrived}");
    assert!(arrived.contains(&format!("host: localhost:{}", inner.address.port())), "{arrived}");
    // Without the CA, the upstream is not trusted.
    let untrusting = Proxy::start(&url, UNLIMITED, &[]);
    assert_eq!(untrusting.client().request("GET", "/x", "").status, 502);
}

/// A WebSocket needs HTTP/1.1, also if the upstream would negotiate HTTP/2.
#[test]
fn websockets_pass_to_an_upstream_with_http2() {
    let upstream = Upstream::answering(|request| match request.starts_with(b"GET /ws") {
        true => {
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n".to_vec()
        }
        false => b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok".to_vec(),
    });
    let authority = Authority::new();
    let (cert, key) = authority.certify("server", "DNS:localhost");
    let tls = format!("tls: {{ cert: {}, key: {} }}\n{UNLIMITED}", cert.display(), key.display());
    // The inner proxy offers both protocols.
    let inner = Proxy::start(&upstream.url(), &tls, &[]);
    let ca = authority.certificate().display().to_string();
    let url = format!("https://localhost:{}", inner.address.port());
    let outer = Proxy::start(&url, UNLIMITED, &["--upstream-ca", &ca]);
    let upgrade = b"GET /ws HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
    for _ in 0..2 {
        // Opens an HTTP/2 connection, or finds the one of the last round.
        assert_eq!(outer.client().request("GET", "/x", "").status, 200);
        let mut client = outer.client();
        client.send(upgrade);
        assert_eq!(client.try_head().unwrap().status, 101);
    }
    let http2 = format!("proxy: {{ upstream_protocol: http2 }}\n{UNLIMITED}");
    let only_http2 = Proxy::start(&url, &http2, &["--upstream-ca", &ca]);
    let mut client = only_http2.client();
    client.send(upgrade);
    assert_eq!(client.answer().status, 501);
    assert_eq!(client.request("GET", "/x", "").status, 200);
}

#[test]
fn upstream_can_require_a_client_certificate() {
    let upstream = Upstream::ok();
    let (authority, clients) = (Authority::new(), Authority::new());
    let (cert, key) = authority.certify("server", "DNS:localhost");
    let tls = format!(
        "tls: {{ cert: {}, key: {}, client_ca: {} }}\n{UNLIMITED}",
        cert.display(),
        key.display(),
        clients.certificate().display()
    );
    let inner = Proxy::start(&upstream.url(), &tls, &[]);
    let url = format!("https://localhost:{}", inner.address.port());
    let ca = authority.certificate().display().to_string();
    let (cert, key) = clients.certify("client", "DNS:client");
    let (cert, key) = (cert.display().to_string(), key.display().to_string());
    let identity = ["--upstream-ca", &ca, "--upstream-cert", &cert, "--upstream-key", &key];
    let known = Proxy::start(&url, UNLIMITED, &identity);
    assert_eq!(known.client().request("GET", "/x", "").status, 200);
    let unknown = Proxy::start(&url, UNLIMITED, &identity[..2]);
    assert_eq!(unknown.client().request("GET", "/x", "").status, 502);
    assert_eq!(upstream.count(), 1);
}

#[test]
fn certificate_is_reloaded_for_new_connections() {
    let upstream = Upstream::ok();
    let (first, second) = (Authority::new(), Authority::new());
    let folder = Folder::new();
    let install = |authority: &Authority| {
        let (cert, key) = authority.certify("server", "DNS:localhost");
        let (cert, key) = (std::fs::read_to_string(cert).unwrap(), std::fs::read_to_string(key).unwrap());
        folder.write("key.pem", &key);
        folder.write("cert.pem", &cert);
    };
    install(&first);
    let path = folder.path().display();
    let config = format!("tls: {{ cert: {path}/cert.pem, key: {path}/key.pem }}\n{UNLIMITED}");
    let proxy = Proxy::start(&upstream.url(), &config, &[]);
    let url = format!("https://localhost:{}/x", proxy.address.port());
    let trusts = |authority: &Authority| {
        curl(&["--cacert", &authority.certificate().display().to_string(), &url]) == "ok"
    };
    assert!(trusts(&first) && !trusts(&second));
    install(&second);
    proxy.api.signal("HUP");
    eventually("the new certificate is used", || trusts(&second));
}

#[test]
fn upstream_can_be_a_unix_socket() {
    let folder = Folder::new();
    let path = folder.path().join("app.sock");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut bytes = vec![0; 4096];
            let count = stream.read(&mut bytes).unwrap();
            let head = String::from_utf8_lossy(&bytes[..count]).replace("\r\n", "|");
            stream
                .write_all(
                    format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{head}", head.len()).as_bytes(),
                )
                .unwrap();
        }
    });
    let proxy = Proxy::start(&format!("unix:{}", path.display()), UNLIMITED, &[]);
    let answer = proxy.client().request_with("GET", "/x", &[], b"");
    assert!(answer.text().starts_with("GET /x HTTP/1.1|"), "{answer:?}");
}

/// A real tonic service behind the proxy: this project's own.
#[tokio::test(flavor = "multi_thread")]
async fn grpc_calls_pass_and_are_refused_as_grpc() {
    let folder = Folder::new();
    let file = folder.write("upstream.yaml", UNLIMITED);
    let service = Server::with(&["--grpc", "127.0.0.1:0", "--config", file.to_str().unwrap()]);
    let config = "limits: [{ name: day, rate: 2/day }]\nproxy: { upstream_protocol: http2 }\n";
    let proxy = Proxy::start(&format!("http://{}", service.listens("grpc")), config, &[]);
    let channel = Channel::from_shared(format!("http://{}", proxy.address)).unwrap().connect().await.unwrap();
    let mut client = HealthClient::new(channel);
    for _ in 0..2 {
        let answer = client.check(HealthCheckRequest::default()).await.unwrap();
        assert_eq!(answer.into_inner().status(), ServingStatus::Serving);
    }
    let refused = client.check(HealthCheckRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
}

/// The limit and the upstream both see the client's address.
#[test]
fn proxy_protocol_names_the_client() {
    let upstream = Upstream::ok();
    let config = "http: { trusted_proxies: [127.0.0.1/32] }\nproxy: { accept_proxy_protocol: true }\n\
                  limits: [{ name: per-ip, by: ip, rate: 1/day }]\n";
    let proxy = Proxy::start(&upstream.url(), config, &[]);
    let v2 = [b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c".as_slice(), &[192, 0, 2, 8, 10, 0, 0, 1, 1, 1, 0, 80]]
        .concat();
    for (header, ip) in
        [(b"PROXY TCP4 192.0.2.7 10.0.0.1 4242 80\r\n".to_vec(), "192.0.2.7"), (v2, "192.0.2.8")]
    {
        for (expected, split) in [(200, true), (429, false)] {
            let mut client = Client::to(proxy.address);
            let request =
                [&header[..], b"GET /x HTTP/1.1\r\nhost: a\r\nx-forwarded-for: 1.2.3.4\r\n\r\n"].concat();
            match split {
                true => request.iter().for_each(|byte| client.send(&[*byte])),
                false => client.send(&request),
            }
            assert_eq!(client.answer().status, expected);
        }
        let arrived = String::from_utf8(upstream.take().concat()).unwrap();
        assert!(arrived.contains(&format!("x-forwarded-for: {ip}\r\n")), "{arrived}");
    }
    // A listener that expects the protocol accepts nothing else.
    for garbage in
        ["GET /x HTTP/1.1\r\nhost: a\r\n\r\n", "PROXY TCP4 a b c d\r\n", "\r\n\r\n\0\r\nQUIX\n!!!!"]
    {
        let mut stream = TcpStream::connect(proxy.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let _ = stream.write_all(garbage.as_bytes());
        assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "{garbage:?} is not answered");
    }
    assert_eq!(upstream.count(), 0);
}

#[test]
fn slow_proxy_protocol_is_closed() {
    let upstream = Upstream::ok();
    let config = format!(
        "http: {{ trusted_proxies: [127.0.0.1/32] }}\nproxy: {{ accept_proxy_protocol: true }}\n{UNLIMITED}"
    );
    let proxy = Proxy::start(&upstream.url(), &config, &[]);
    let mut client = proxy.client();
    client.send(b"PROXY TCP4 192.0.2.7");
    assert_eq!(client.stream.read(&mut [0]).unwrap_or(0), 0);
    proxy.api.logs("the PROXY protocol header did not arrive in time");
}

#[test]
fn proxy_protocol_of_untrusted_peers_is_closed() {
    let upstream = Upstream::ok();
    let config = format!(
        "http: {{ trusted_proxies: [10.0.0.0/8] }}\nproxy: {{ accept_proxy_protocol: true }}\n{UNLIMITED}"
    );
    let proxy = Proxy::start(&upstream.url(), &config, &[]);
    let mut stream = TcpStream::connect(proxy.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let _ = stream.write_all(b"PROXY TCP4 192.0.2.7 10.0.0.1 42 80\r\nGET /x HTTP/1.1\r\nhost: a\r\n\r\n");
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
    assert_eq!(upstream.count(), 0);
}

#[test]
fn prefix_of_the_url_precedes_every_path() {
    let upstream = Upstream::ok();
    let proxy = Proxy::start(&format!("{}/base/", upstream.url()), UNLIMITED, &[]);
    assert_eq!(proxy.client().request("GET", "/x?y=z", "").status, 200);
    let arrived = shown(&upstream.take()[0]);
    assert!(arrived.starts_with("GET /base/x?y=z HTTP/1.1"), "{arrived}");
}

/// With the prefix, the path is longer than any URI may be.
#[test]
fn path_that_is_too_long_with_the_prefix_is_414() {
    let upstream = Upstream::ok();
    let config = "proxy: { max_headers: 128KiB }\nlimits: [{ name: day, rate: 1/day }]\n";
    let proxy = Proxy::start(&format!("{}/base", upstream.url()), config, &[]);
    let path = |length: usize| format!("/{}", "a".repeat(length - 1));
    let mut client = proxy.client();
    let answer = client.request("GET", &path(65_534 - 4), "");
    assert_eq!((answer.status, answer.header("content-type")), (414, Some("application/problem+json")));
    // It was not charged, and its connection is still usable.
    assert_eq!(client.request("GET", &path(65_534 - 5), "").status, 200);
    assert_eq!(upstream.count(), 1);
}

#[test]
fn only_named_protocols_are_upgraded() {
    let upstream = Upstream::ok();
    let proxy = Proxy::start(&upstream.url(), UNLIMITED, &["--upgrade", "echo", "--upgrade", "tcp"]);
    for (name, passes) in [("echo", true), ("TCP", true), ("websocket", false)] {
        let headers = ["connection: upgrade", &format!("upgrade: {name}")];
        assert_eq!(proxy.client().request_with("GET", "/x", &headers, b"").status, 200);
        let arrived = shown(&upstream.take()[0]);
        assert_eq!(arrived.contains(&format!("upgrade: {name}")), passes, "{arrived}");
    }
}

#[test]
fn request_ids_of_clients_are_kept_only_if_trusted() {
    let upstream = Upstream::ok();
    for trusts in [false, true] {
        let config = format!("proxy: {{ trust_request_id: {trusts} }}\n{UNLIMITED}");
        let proxy = Proxy::start(&upstream.url(), &config, &[]);
        assert_eq!(proxy.client().request_with("GET", "/x", &["x-request-id: mine"], b"").status, 200);
        let arrived = String::from_utf8(upstream.take().concat()).unwrap();
        assert!(arrived.contains("x-request-id: "), "{arrived}");
        assert_eq!(arrived.contains("x-request-id: mine\r\n"), trusts, "{arrived}");
    }
}

#[test]
fn no_path_leads_out_of_the_prefix() {
    let upstream = Upstream::ok();
    let proxy = Proxy::start(&format!("{}/base", upstream.url()), UNLIMITED, &[]);
    let paths = [
        "/../x",
        "/a/../../x",
        "/%2E%2e/x",
        "/..%2fx",
        "/a%2F..",
        "/..%5Cx",
        "/..\\x",
        "/..;a/x",
        "/..%3ba/x",
    ];
    for path in paths {
        assert_eq!(proxy.client().request("GET", path, "").status, 400, "{path}");
    }
    assert_eq!(upstream.count(), 0);
    for path in ["/..x", "/x..", "/.../x", "/x?..=/../"] {
        assert_eq!(proxy.client().request("GET", path, "").status, 200, "{path}");
    }
}

#[test]
fn without_a_config_a_limit_by_address_applies() {
    let upstream = Upstream::ok();
    let mut command = tollkeeper();
    let api = Server::launch(command.args([
        "proxy",
        &upstream.url(),
        "--listen",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
    ]));
    let mut client = Client::to(api.listens("proxy"));
    let statuses: Vec<u16> = (0..101).map(|_| client.request("GET", "/x", "").status).collect();
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 100);
    assert_eq!(statuses.last(), Some(&429));
    api.logs("limit `demo`, by `ip`");
}

#[test]
fn limit_by_a_header_with_an_underscore_is_warned_of() {
    let upstream = Upstream::ok();
    let config = "http: { facts: { user: { from: header.x_user } } }\nlimits:\n  - { name: users, by: user, rate: 1/day }\n  \
                  - { name: plans, by: header.x_plan, rate: 1/day }\n  - { name: keys, by: header.x-key, rate: 1/day }\n";
    let proxy = Proxy::start(&upstream.url(), config, &[]);
    proxy.api.logs("limit `users`: the fact `user` is always absent");
    proxy.api.logs("limit `plans`: the fact `header.x_plan` is always absent");
    assert!(!proxy.api.log().contains("`header.x-key` is always absent"), "{}", proxy.api.log());
}

#[test]
fn unusable_urls_exit_with_2() {
    for (url, reason) in [
        ("ftp://a", "must begin with http://"),
        ("http://u:hunter2@a", "remove the user name"),
        ("http://a/?q", "remove the query"),
        ("http://a/#f", "remove the fragment"),
    ] {
        let ended = run(&["proxy", url]);
        assert_eq!(ended.status.code(), Some(2));
        assert!(text(&ended.stderr).contains(reason), "{}", text(&ended.stderr));
        assert!(!text(&ended.stderr).contains("hunter2"), "{}", text(&ended.stderr));
    }
}

#[test]
fn settings_of_the_proxy_are_reloaded() {
    let upstream = Upstream::ok();
    let proxy = Proxy::start(&upstream.url(), UNLIMITED, &[]);
    assert_eq!(proxy.client().request("GET", "/x", "").status, 200);
    assert!(!shown(&upstream.take()[0]).contains(&upstream.address.to_string()));
    proxy.folder.write("tollkeeper.yaml", &format!("proxy: {{ host_header: upstream }}\n{UNLIMITED}"));
    proxy.api.signal("HUP");
    eventually("the new setting is used", || {
        assert_eq!(proxy.client().request("GET", "/x", "").status, 200);
        shown(&upstream.take()[0]).contains(&format!("host: {}", upstream.address))
    });
}

/// What the dashboard shows of the upstream, as the schema of the API describes it.
#[test]
fn events_show_the_upstream() {
    let upstream = Upstream::ok();
    let adaptive = format!("proxy: {{ concurrency: {{ max: 64, adaptive: true }} }}\n{UNLIMITED}");
    for config in [UNLIMITED, &adaptive] {
        let proxy = Proxy::start(&upstream.url(), config, &[]);
        assert_eq!(proxy.client().request("GET", "/x", "").status, 200);
        let (event, view) = upstream_of_event(&proxy);
        assert_eq!((&view["url"], &view["errors"]), (&upstream.url().into(), &0.into()));
        assert_eq!((&view["waiting"], &view["shed"]), (&0.into(), &0.into()));
        if config == UNLIMITED {
            assert_eq!((&view["limit"], &view["floor_ms"]), (&512.into(), &Value::Null));
        }
        let expected =
            json!({ "address": upstream.address.to_string(), "in_flight": 0, "errors": 0, "ejected": false });
        assert_eq!(view["addresses"], json!([expected]));
        validate_event(&proxy, &event);
    }
    let nowhere = Proxy::start("http://127.0.0.1:9", UNLIMITED, &[]);
    assert_eq!(nowhere.client().request("GET", "/x", "").status, 502);
    let (event, view) = upstream_of_event(&nowhere);
    assert!(view["addresses"][0]["errors"].as_u64().unwrap() > 0, "{view}");
    assert_eq!(view["addresses"][0]["errors"], view["errors"]);
    validate_event(&nowhere, &event);
}

/// The first event, and its `upstream`.
fn upstream_of_event(proxy: &Proxy) -> (String, Value) {
    let mut events = proxy.api.client();
    events.send(format!("GET /v1/events HTTP/1.1\r\nhost: {}\r\n\r\n", proxy.api.address).as_bytes());
    let mut stream = std::io::BufReader::new(&mut events.stream);
    let mut line = String::new();
    while !line.contains("\"upstream\"") {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0, "the stream has ended");
    }
    let event = line.trim().trim_start_matches("data: ").to_owned();
    let view = serde_json::from_str::<Value>(&event).unwrap()["upstream"].clone();
    (event, view)
}

/// Validates an event against `Event` of `/openapi.json`.
fn validate_event(proxy: &Proxy, event: &str) {
    let api = proxy.api.get("/openapi.json").json();
    let mut schema = api["components"]["schemas"]["Event"].clone();
    schema["components"] = api["components"].clone();
    let schema = proxy.folder.write("event-schema.json", &schema.to_string());
    let event = proxy.folder.write("event.json", event);
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/python/bin/check-jsonschema");
    assert!(tool.exists(), "check-jsonschema is missing: `make test` installs it into target/python");
    let checked = output(Command::new(tool).arg("--schemafile").arg(schema).arg(event));
    assert!(checked.status.success(), "{}{}", text(&checked.stdout), text(&checked.stderr));
}
