//! Large bodies, many connections and slow clients: memory stays flat, and slow clients are disconnected.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use tollkeeper_server::control::rlimit;

use crate::support::{PATIENCE, eventually};
use crate::upstream::Upstream;
use crate::{Proxy, UNLIMITED};

const GIGABYTE: usize = 1 << 30;
/// The most resident memory, in KiB.
const MOST: u64 = 64 << 10;

/// The largest resident memory of the proxy so far, in KiB.
fn peak_memory(proxy: &Proxy) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", proxy.api.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Reads a head, byte by byte, so that nothing of the body is taken.
fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() > 0 {
        head.push(byte[0]);
    }
    String::from_utf8(head).unwrap()
}

#[test]
fn a_gigabyte_up_and_down_needs_little_memory() {
    // Takes a body to its end, then sends one of the same size.
    let upstream = Upstream::serving(|_, mut stream| {
        read_head(&mut stream);
        let (mut buffer, mut left) = (vec![0; 256 << 10], GIGABYTE);
        while left > 0 {
            left -= stream.read(&mut buffer).unwrap();
        }
        stream
            .write_all(format!("HTTP/1.1 200 OK\r\ncontent-length: {GIGABYTE}\r\n\r\n").as_bytes())
            .unwrap();
        for _ in 0..GIGABYTE / buffer.len() {
            stream.write_all(&buffer).unwrap();
        }
    });
    let proxy = Proxy::start(&upstream.url(), UNLIMITED, &[]);
    let mut stream = proxy.client().stream.try_clone().unwrap();
    stream
        .write_all(format!("POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: {GIGABYTE}\r\n\r\n").as_bytes())
        .unwrap();
    let mut buffer = vec![7; 256 << 10];
    for _ in 0..GIGABYTE / buffer.len() {
        stream.write_all(&buffer).unwrap();
    }
    assert!(read_head(&mut stream).starts_with("HTTP/1.1 200"));
    // A reader that takes small pieces is slower than the upstream, which has to wait for it.
    let (mut left, mut pieces) = (GIGABYTE, 0);
    while left > 0 {
        let piece = if pieces < 1_000 { 1 << 10 } else { buffer.len() };
        left -= stream.read(&mut buffer[..piece]).unwrap();
        pieces += 1;
    }
    let peak = peak_memory(&proxy);
    println!("1 GiB up and down: at most {peak} KiB resident");
    assert!(peak < MOST, "{peak} KiB");
}

#[test]
fn ten_thousand_idle_connections_are_kept() {
    const CONNECTIONS: usize = 10_000;
    // Each connection takes a file descriptor on both sides. The proxy keeps a quarter of its own for the API.
    rlimit::raise();
    assert!(
        rlimit::connections(0) * 3 / 4 > CONNECTIONS,
        "`ulimit -Hn` is too low for this test: it needs {}",
        CONNECTIONS * 4 / 3 + 256
    );
    let upstream = Upstream::ok();
    let config = format!("proxy: {{ max_connections: 10000 }}\n{UNLIMITED}");
    let proxy = Proxy::start(&upstream.url(), &config, &[]);
    let mut idle: Vec<_> = (0..CONNECTIONS).map(|_| proxy.client()).collect();
    eventually("all are accepted", || {
        proxy.metric("tollkeeper_proxy_connections{side=\"client\",state=\"idle\"}") >= CONNECTIONS as f64
    });
    for client in idle.iter_mut().step_by(500) {
        assert_eq!(client.request("GET", "/x", "").status, 200);
    }
    println!("{CONNECTIONS} idle connections: at most {} KiB resident", peak_memory(&proxy));
}

#[test]
fn connections_beyond_the_limit_are_closed() {
    let upstream = Upstream::ok();
    let proxy = Proxy::start(&upstream.url(), &format!("proxy: {{ max_connections: 2 }}\n{UNLIMITED}"), &[]);
    let mut inside = [proxy.client(), proxy.client()];
    for client in &mut inside {
        assert_eq!(client.request("GET", "/x", "").status, 200);
    }
    let mut outside = proxy.client();
    assert_eq!(outside.stream.read(&mut [0]).unwrap_or(0), 0, "closed at once");
    assert_eq!(proxy.metric("tollkeeper_connections_refused_total{transport=\"proxy\"}"), 1.0);
    assert_eq!(inside[0].request("GET", "/x", "").status, 200);
}

/// A client that sends its head byte by byte, and one that sends nothing more.
#[test]
fn slow_heads_are_disconnected() {
    let upstream = Upstream::ok();
    let config = format!("proxy: {{ header_timeout: 200ms, idle_timeout: 1h }}\n{UNLIMITED}");
    let proxy = Proxy::start(&upstream.url(), &config, &[]);
    // Idle for longer than a head may take, which is allowed.
    let mut idle = proxy.client();
    assert_eq!(idle.request("GET", "/x", "").status, 200);
    let mut silent = proxy.client();
    silent.send(b"GET /x HTTP/1.1\r\nhos");
    let mut dripping = proxy.client();
    dripping.stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    let mut closed = false;
    eventually("the dripping client is disconnected", || {
        dripping.send(b"G");
        match dripping.stream.read(&mut [0]) {
            Ok(0) => closed = true,
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => closed = true,
            _ => {}
        }
        closed
    });
    silent.stream.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(silent.stream.read(&mut [0]).unwrap_or(0), 0);
    assert_eq!(idle.request("GET", "/x", "").status, 200);
}

#[test]
fn idle_connections_are_closed() {
    let upstream = Upstream::ok();
    let proxy = Proxy::start(&upstream.url(), &format!("proxy: {{ idle_timeout: 200ms }}\n{UNLIMITED}"), &[]);
    let mut client = proxy.client();
    assert_eq!(client.request("GET", "/x", "").status, 200);
    assert_eq!(client.stream.read(&mut [0]).unwrap_or(0), 0);
}

#[test]
fn silent_tunnels_are_closed() {
    let upstream = Upstream::answering(|_| {
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n".to_vec()
    });
    let proxy =
        Proxy::start(&upstream.url(), &format!("proxy: {{ stream_idle_timeout: 200ms }}\n{UNLIMITED}"), &[]);
    let mut client = proxy.client();
    client.send(b"GET /x HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n");
    assert_eq!(client.try_head().unwrap().status, 101);
    assert_eq!(client.stream.read(&mut [0]).unwrap_or(0), 0);
}

/// Events may be rare, but a stream without any is closed.
#[test]
fn silent_event_streams_are_closed() {
    let upstream = Upstream::answering(|_| {
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n\
          9\r\ndata: 1\n\n\r\n"
            .to_vec()
    });
    let config = |other: &str, events: &str| {
        format!("proxy: {{ body_idle_timeout: {other}, stream_idle_timeout: {events} }}\n{UNLIMITED}")
    };
    let open = |proxy: &Proxy| {
        let mut client = proxy.client();
        client.send(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n");
        assert_eq!(client.try_head().unwrap().status, 200);
        client
    };
    let short = Proxy::start(&upstream.url(), &config("1h", "200ms"), &[]);
    let mut closed = Vec::new();
    let _ = open(&short).stream.read_to_end(&mut closed);
    assert!(!closed.ends_with(b"0\r\n\r\n"), "{}", closed.escape_ascii());
    // The timeout of other bodies does not apply: it has passed when the other stream was closed.
    let long = Proxy::start(&upstream.url(), &config("200ms", "1h"), &[]);
    let mut events = open(&long);
    let _ = open(&short).stream.read_to_end(&mut Vec::new());
    let errors = "tollkeeper_proxy_upstream_errors_total{kind=\"body\"}";
    assert_eq!((long.metric(errors), short.metric(errors)), (0.0, 2.0));
    events.stream.set_nonblocking(true).unwrap();
    let open = loop {
        match events.stream.read(&mut [0; 64]) {
            Ok(0) => break false,
            Ok(_) => {}
            Err(error) => break error.kind() == std::io::ErrorKind::WouldBlock,
        }
    };
    assert!(open, "the event stream is still open");
}

#[test]
fn large_heads_are_431() {
    let upstream = Upstream::ok();
    let proxy = Proxy::start(&upstream.url(), &format!("proxy: {{ max_headers: 8KiB }}\n{UNLIMITED}"), &[]);
    let mut client = proxy.client();
    client.send(format!("GET /x HTTP/1.1\r\nhost: a\r\nx-a: {}\r\n\r\n", "a".repeat(16 << 10)).as_bytes());
    assert_eq!(client.answer().status, 431);
    assert_eq!(upstream.count(), 0);
}

#[test]
fn refused_request_never_gets_100_continue() {
    let upstream = Upstream::ok();
    let proxy = Proxy::start(&upstream.url(), "limits: [{ name: none, rate: 0/s }]\n", &[]);
    let mut client = proxy.client();
    client.send(b"POST /x HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 10\r\n\r\n");
    assert_eq!(client.answer().status, 429);
}
