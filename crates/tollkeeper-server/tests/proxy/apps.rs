//! Real applications behind the proxy: Express with `ws`, and uvicorn.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tollkeeper_tests::languages::{self, Killed, run};

use crate::support::{Client, eventually};
use crate::{Proxy, UNLIMITED};

/// A copy of a file of this folder in the folder where its packages are.
fn copy(name: &str, to: &Path) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/proxy/apps").join(name);
    fs::copy(from, to.join(name)).unwrap();
}

/// The Express application, the port it listens on, and the folder of its files: one for each test.
fn express(test: &str) -> (Killed, u16, PathBuf) {
    // Below the folder with the packages, so that Node finds them.
    let folder = languages::node("proxy-node", &["express@5", "ws@8"]).join(test);
    fs::create_dir_all(&folder).unwrap();
    copy("app.mjs", &folder);
    copy("client.mjs", &folder);
    let mut node =
        Killed::start(Command::new("node").arg("app.mjs").current_dir(&folder).stdout(Stdio::piped()));
    let mut line = String::new();
    BufReader::new(node.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (node, line.trim().parse().unwrap(), folder)
}

/// Reads from a chunked response until this text has arrived.
fn read_until(client: &mut Client, text: &str) {
    let mut received = Vec::new();
    while !String::from_utf8_lossy(&received).contains(text) {
        let mut bytes = [0; 1024];
        let count = client.stream.read(&mut bytes).unwrap();
        assert!(count > 0, "{}", received.escape_ascii());
        received.extend_from_slice(&bytes[..count]);
    }
}

#[test]
fn express_streams_events_and_bodies() {
    let (_app, port, _) = express("streams");
    let proxy = Proxy::start(&format!("http://127.0.0.1:{port}"), UNLIMITED, &[]);
    let mut client = proxy.client();
    let hello = client.request("GET", "/hello", "");
    assert_eq!(hello.json()["host"], proxy.address.to_string());
    assert_eq!(hello.json()["via"], "127.0.0.1");
    assert!(hello.header("x-ratelimit-limit").is_some(), "{hello:?}");
    assert_eq!(client.request("GET", "/empty", "").status, 204);
    let tag = hello.header("etag").unwrap();
    let cached = client.request_with("GET", "/hello", &[&format!("if-none-match: {tag}")], b"");
    assert_eq!((cached.status, cached.body.len()), (304, 0));

    // An event arrives before the next one is sent.
    let mut events = proxy.client();
    events.send(b"GET /events HTTP/1.1\r\nhost: a\r\n\r\n");
    read_until(&mut events, "data: first");
    assert_eq!(client.request("POST", "/seen", "").status, 200);
    read_until(&mut events, "data: second");

    // A part of a body comes back before the next one is sent.
    let mut echo = proxy.client();
    echo.send(b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\npart1\r\n");
    read_until(&mut echo, "part1");
    echo.send(b"5\r\npart2\r\n0\r\n\r\n");
    read_until(&mut echo, "part2");
}

#[test]
fn websockets_of_ws_pass_and_are_limited() {
    let (_app, port, folder) = express("sockets");
    let config = "limits: [{ name: sockets, algorithm: concurrency, limit: 1 }]\n";
    let proxy = Proxy::start(&format!("http://127.0.0.1:{port}"), config, &[]);
    let talk = || {
        run(Command::new("node")
            .args(["client.mjs", &format!("ws://{}/", proxy.address)])
            .current_dir(&folder))
    };
    assert_eq!(talk(), "7 messages, closed with 1000\n");
    eventually("the slot of the closed socket is free", || proxy.metric("tollkeeper_proxy_in_flight") == 0.0);
    let mut held = proxy.client();
    held.send(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n");
    assert_eq!(held.try_head().unwrap().status, 101);
    assert_eq!(talk(), "refused with 429\n");
}

#[test]
fn uvicorn_streams_and_answers_conditional_requests() {
    let folder = languages::folder("python");
    let programs = languages::python();
    copy("app.py", &folder);
    fs::rename(folder.join("app.py"), folder.join("proxied.py")).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let mut command = Command::new(programs.join("uvicorn"));
    command.args(["proxied:app", "--port", &address.port().to_string(), "--log-level", "error"]);
    let _app = Killed::start(command.current_dir(&folder));
    eventually("uvicorn listens", || std::net::TcpStream::connect(address).is_ok());
    let proxy = Proxy::start(&format!("http://{address}"), UNLIMITED, &[]);
    let mut client = proxy.client();
    assert_eq!(client.request("GET", "/cached", "").text(), "fresh");
    assert_eq!(client.request_with("GET", "/cached", &["if-none-match: \"1\""], b"").status, 304);
    client.send(b"HEAD /cached HTTP/1.1\r\nhost: a\r\n\r\n");
    let head = client.try_head().unwrap();
    assert_eq!((head.status, head.header("content-length")), (200, Some("5")));
    client.send(b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\npart1\r\n");
    read_until(&mut client, "part1");
    client.send(b"5\r\npart2\r\n0\r\n\r\n");
    read_until(&mut client, "part2");
}
