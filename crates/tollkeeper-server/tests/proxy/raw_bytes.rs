//! Request bytes that other proxies have been attacked with, and what the upstream receives of each.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};

use tollkeeper_tests::languages::Killed;

use crate::support::{Folder, PATIENCE, eventually};
use crate::upstream::{Upstream, shown};
use crate::{Proxy, UNLIMITED};

/// What is sent, the status, and the requests that the upstream receives.
struct Row(&'static str, u16, &'static [&'static str]);

const GET: &str = "GET /x HTTP/1.1 | host: a | ";

#[rustfmt::skip]
const ROWS: &[Row] = &[
    // Framing.
    Row("GET /x HTTP/1.1\r\nhost: a\r\n\r\n", 200, &[GET]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", 400, &[]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 1, 1\r\n\r\na", 400, &[]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: +1\r\n\r\na", 400, &[]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\na", 400, &[]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 0x1\r\n\r\na", 400, &[]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\na", 200,
        &["POST /x HTTP/1.1 | content-length: 1, host: a | a"]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 400, &[]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, identity\r\n\r\n1\r\na\r\n0\r\n\r\n", 400, &[]),
    Row("POST /x HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 400, &[]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\nGET /evil HTTP/1.1\r\nhost: a\r\n\r\n", 200,
        &["POST /x HTTP/1.1 | host: a, transfer-encoding: chunked | 1\\r\\na\\r\\n0\\r\\n\\r\\n"]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n1\r\na\r\n0\r\n\r\nGET /evil HTTP/1.1\r\nhost: a\r\n\r\n", 200,
        &["POST /x HTTP/1.1 | host: a, transfer-encoding: chunked | 1\\r\\na\\r\\n0\\r\\n\\r\\n"]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: CHUNKED\r\n\r\n1\r\na\r\n0\r\n\r\n", 200,
        &["POST /x HTTP/1.1 | host: a, transfer-encoding: chunked | 1\\r\\na\\r\\n0\\r\\n\\r\\n"]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 501, &[]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 501, &[]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 501, &[]),
    Row("GET /x HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\na", 200,
        &["GET /x HTTP/1.1 | content-length: 1, host: a | a"]),
    Row("GET /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 200,
        &["GET /x HTTP/1.1 | host: a, transfer-encoding: chunked | 1\\r\\na\\r\\n0\\r\\n\\r\\n"]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1;name=value\r\na\r\n0\r\n\r\n", 200,
        &["POST /x HTTP/1.1 | host: a, transfer-encoding: chunked | 1\\r\\na\\r\\n0\\r\\n\\r\\n"]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\ntrailer: x-t\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-t: 1\r\n\r\n", 200,
        &["POST /x HTTP/1.1 | host: a, transfer-encoding: chunked | 1\\r\\na\\r\\n0\\r\\n\\r\\n"]),
    // The head.
    Row("GET /x HTTP/1.1\r\nhost : a\r\n\r\n", 400, &[]),
    Row("GET /x HTTP/1.1\r\nhost: a\r\nx-a: 1\r\n folded\r\n\r\n", 400, &[]),
    Row("GET /x HTTP/1.1\r\nhost: a\r\nx-a: 1\r2\r\n\r\n", 400, &[]),
    Row("GET /x HTTP/1.1\r\nhost: a\r\nx-a: 1\0\r\n\r\n", 400, &[]),
    Row("GET /x y HTTP/1.1\r\nhost: a\r\n\r\n", 400, &[]),
    Row("GET /x HTTP/1.2\r\nhost: a\r\n\r\n", 400, &[]),
    Row("GET /x HTTP/1.1\nhost: a\n\n", 200, &[GET]),
    Row("GET /x HTTP/1.1\r\nhost: a\r\nX_Forwarded_For: 1.2.3.4\r\nx_user: b\r\n\r\n", 200, &[GET]),
    // The host and the target.
    Row("GET /x HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400, &[]),
    Row("GET /x HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", 400, &[]),
    Row("GET /x HTTP/1.1\r\n\r\n", 400, &[]),
    Row("GET /x HTTP/1.1\r\nhost:\r\n\r\n", 400, &[]),
    Row("GET /x HTTP/1.1\r\nhost: :80\r\n\r\n", 400, &[]),
    Row("GET /x HTTP/1.0\r\nhost:\r\n\r\n", 400, &[]),
    Row("GET /x HTTP/1.1\r\nhost: user@a\r\n\r\n", 400, &[]),
    Row("GET /x HTTP/1.1\r\nhost: a/b\r\n\r\n", 400, &[]),
    Row("GET /x HTTP/1.1\r\nhost: a, b\r\n\r\n", 400, &[]),
    Row("GET /x HTTP/1.0\r\nhost: a\r\n\r\n", 200, &[GET]),
    Row("GET /x HTTP/1.0\r\n\r\n", 200, &["GET /x HTTP/1.1 | host: UPSTREAM | "]),
    Row("GET http://evil/x HTTP/1.1\r\nhost: a\r\n\r\n", 200, &["GET /x HTTP/1.1 | host: evil | "]),
    Row("GET http://evil:81?q HTTP/1.1\r\nhost: a\r\n\r\n", 200, &["GET /?q HTTP/1.1 | host: evil:81 | "]),
    Row("GET http://user:secret@evil/x HTTP/1.1\r\nhost: a\r\n\r\n", 400, &[]),
    Row("GET evil:80 HTTP/1.1\r\nhost: a\r\n\r\n", 400, &[]),
    Row("GET x HTTP/1.1\r\nhost: a\r\n\r\n", 400, &[]),
    Row("GET * HTTP/1.1\r\nhost: a\r\n\r\n", 400, &[]),
    Row("OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n", 200, &["OPTIONS * HTTP/1.1 | host: a | "]),
    Row("GET //evil/x HTTP/1.1\r\nhost: a\r\n\r\n", 200, &["GET //evil/x HTTP/1.1 | host: a | "]),
    Row("GET /x#top HTTP/1.1\r\nhost: a\r\n\r\n", 200, &[GET]),
    Row("get /x HTTP/1.1\r\nhost: a\r\n\r\n", 200, &["get /x HTTP/1.1 | host: a | "]),
    Row("CONNECT a:80 HTTP/1.1\r\nhost: a:80\r\n\r\n", 405, &[]),
    Row("TRACE /x HTTP/1.1\r\nhost: a\r\n\r\n", 405, &[]),
    // Headers of the connection.
    Row("GET /x HTTP/1.1\r\nhost: a\r\nconnection: close, x-a, host, authorization, x-forwarded-for\r\nx-a: 1\r\nauthorization: b\r\n\r\n", 200,
        &["GET /x HTTP/1.1 | authorization: b, host: a | "]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\nconnection: content-length, content-type\r\ncontent-type: b\r\ncontent-length: 1\r\n\r\na", 200,
        &["POST /x HTTP/1.1 | content-length: 1, content-type: b, host: a | a"]),
    Row("GET /x HTTP/1.1\r\nhost: a\r\nkeep-alive: 5\r\nproxy-connection: close\r\nte: gzip\r\n\r\n", 200, &[GET]),
    Row("GET /x HTTP/1.1\r\nhost: a\r\nte: trailers\r\nconnection: te\r\n\r\n", 200, &[GET]),
    Row("GET /x HTTP/1.1\r\nhost: a\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n\r\n", 200, &[GET]),
    Row("GET /x HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\n\r\n", 200, &[GET]),
    Row("GET /x HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket, h2c\r\n\r\n", 200, &[GET]),
    Row("GET /x HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: WebSocket\r\n\r\n", 200,
        &["GET /x HTTP/1.1 | connection: upgrade, host: a, upgrade: WebSocket | "]),
    Row("POST /x HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\na", 100,
        &["POST /x HTTP/1.1 | content-length: 1, host: a | a"]),
    Row("GET /x HTTP/1.1\r\nhost: a\r\nx-real-ip: 1.2.3.4\r\nx-forwarded-prefix: /p\r\n\r\n", 200, &[GET]),
    // Two requests at once.
    Row("GET /x HTTP/1.1\r\nhost: a\r\n\r\nGET /x HTTP/1.1\r\nhost: a\r\n\r\n", 200, &[GET, GET]),
];

#[test]
fn raw_bytes_arrive_as_the_table_says() {
    let upstream = Upstream::ok();
    let proxy = Proxy::start(&upstream.url(), UNLIMITED, &[]);
    let theirs = Upstream::ok();
    let nginx = Nginx::before(&theirs);
    let mut wrong = Vec::new();
    for Row(sent, status, expected) in ROWS {
        let got = status_of(proxy.address, sent.as_bytes());
        eventually("all requests arrive", || upstream.count() >= expected.len());
        let arrived: Vec<String> = upstream.take().iter().map(|request| shown(request)).collect();
        let expected: Vec<String> =
            expected.iter().map(|text| text.replace("UPSTREAM", &upstream.address.to_string())).collect();
        let nginx = status_of(nginx.address, sent.as_bytes());
        println!("{got} (nginx: {nginx}, {} forwarded) for {}", theirs.take().len(), sent.escape_debug());
        if got != *status || arrived != expected {
            wrong.push(format!("{}\n  {got} instead of {status}\n  {arrived:#?}", sent.escape_debug()));
        }
    }
    assert!(ROWS.len() >= 40, "{} rows", ROWS.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(proxy.metric("tollkeeper_proxy_dropped_headers_total"), 2.0);
}

#[test]
fn target_that_is_not_utf8_is_400() {
    let upstream = Upstream::ok();
    let proxy = Proxy::start(&upstream.url(), UNLIMITED, &[]);
    assert_eq!(status_of(proxy.address, b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n"), 400);
    assert_eq!(upstream.count(), 0);
}

/// A body that becomes invalid after its request was forwarded: the upstream must not take the part for the whole.
#[test]
fn invalid_chunk_cuts_the_upstream_request() {
    for chunk in ["1\na\r\n0\r\n\r\n", "11111111111111111\r\na\r\n", "zz\r\na\r\n", "1\r\nab\r\n0\r\n\r\n"] {
        let upstream = Upstream::ok();
        let proxy = Proxy::start(&upstream.url(), UNLIMITED, &[]);
        let sent =
            format!("POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n{chunk}");
        assert_eq!(status_of(proxy.address, sent.as_bytes()), 400, "{chunk:?}");
        eventually("the upstream connection is cut", || upstream.count() == 1);
        let received = upstream.take().concat();
        assert!(!received.ends_with(b"0\r\n\r\n"), "{}", received.escape_ascii());
    }
}

/// The status of the first response; 0 if the connection is closed without one.
fn status_of(address: SocketAddr, bytes: &[u8]) -> u16 {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let _ = stream.write_all(bytes);
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|count| count > 0) {
        head.push(byte[0]);
    }
    let text = String::from_utf8_lossy(&head);
    text.split(' ').nth(1).map_or(0, |status| status.parse().unwrap())
}

/// A real nginx, for comparison.
struct Nginx {
    address: SocketAddr,
    _process: Killed,
    _folder: Folder,
}

impl Nginx {
    fn before(upstream: &Upstream) -> Nginx {
        let folder = Folder::new();
        let path = folder.path().display().to_string();
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        drop(socket);
        let config = format!(
            "daemon off; master_process off; pid {path}/pid; error_log {path}/error; worker_processes 1; events {{}}\n\
             http {{ access_log off; client_body_temp_path {path}; proxy_temp_path {path}; fastcgi_temp_path {path}; \
             uwsgi_temp_path {path}; scgi_temp_path {path};\n\
             server {{ listen {address}; location / {{ proxy_pass http://{}; proxy_http_version 1.1; \
             proxy_set_header Connection \"\"; }} }} }}\n",
            upstream.address
        );
        let file = folder.write("nginx.conf", &config);
        let mut command = Command::new("nginx");
        command.arg("-e").arg(folder.path().join("error")).arg("-c").arg(file).stderr(Stdio::null());
        let process = Killed::start(&mut command);
        eventually("nginx listens", || TcpStream::connect(address).is_ok());
        Nginx { address, _process: process, _folder: folder }
    }
}
