//! Upstreams that fail in every way, what the client gets, and how often the upstream is asked.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use crate::support::{Answer, PATIENCE, eventually};
use crate::upstream::{Upstream, read_request};
use crate::{Proxy, UNLIMITED};

/// For upstreams that stay silent: the others fail long before these timeouts.
const SHORT: &str = "proxy: { timeout: 300ms, connect_timeout: 300ms, body_idle_timeout: 300ms }\n";

fn short() -> String {
    format!("{UNLIMITED}{SHORT}")
}

/// The response to one request, and how many requests the upstream received.
fn outcome(upstream: &Upstream, config: &str, method: &str) -> (Answer, usize) {
    let proxy = Proxy::start(&upstream.url(), config, &[]);
    let answer = proxy.client().request(method, "/x", "");
    (answer, upstream.count())
}

fn problem(answer: &Answer) -> (u16, String) {
    assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{answer:?}");
    assert_eq!(answer.header("cache-control"), Some("no-store"), "{answer:?}");
    (answer.status, answer.json()["detail"].as_str().unwrap().to_owned())
}

/// A linger time of zero sends a reset instead of an orderly close.
fn reset(stream: TcpStream) {
    let socket = tokio::net::TcpSocket::from_std_stream(stream);
    socket.set_zero_linger().unwrap();
}

#[test]
fn refused_connection_is_502() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let proxy = Proxy::start(&format!("http://{address}"), &short(), &[]);
    let answer = proxy.client().request("GET", "/x", "");
    assert_eq!(problem(&answer), (502, "the upstream accepts no connection".to_owned()));
    assert_eq!(proxy.metric("tollkeeper_proxy_upstream_errors_total{kind=\"connect\"}"), 2.0);
    assert_eq!(proxy.metric("tollkeeper_proxy_retries_total"), 1.0);
}

#[test]
fn failing_upstreams_get_the_statuses_of_the_table() {
    type Fault = fn(TcpStream);
    let rows: [(&str, u16, Fault); 8] = [
        ("reset before the head", 502, |stream| reset(stream)),
        ("closed before the head", 502, drop),
        ("half a head", 502, |mut stream| stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-le").unwrap()),
        ("no HTTP", 502, |mut stream| stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").unwrap()),
        ("bad length", 502, |mut stream| {
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab").unwrap();
        }),
        ("unasked upgrade", 502, |mut stream| {
            stream
                .write_all(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n")
                .unwrap();
        }),
        ("silence", 504, |mut stream| drop(stream.read(&mut [0]))),
        ("slow drip", 504, |mut stream| {
            // Never a complete head, and never silent for long, until the proxy closes the connection.
            stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\nx-a: ").unwrap();
            while stream.write_all(b"a").is_ok() && stream.read(&mut [0]).is_err() {}
        }),
    ];
    for (name, status, fault) in rows {
        for method in ["GET", "POST"] {
            let upstream = Upstream::serving(move |upstream, mut stream| {
                let request = read_request(&mut stream, &mut Vec::new()).unwrap();
                upstream.record(&request);
                fault(stream);
            });
            let config = if status == 504 { short() } else { UNLIMITED.to_owned() };
            let (answer, count) = outcome(&upstream, &config, method);
            assert_eq!(answer.status, status, "{name}, {method}: {answer:?}");
            problem(&answer);
            assert_eq!(count, 1, "{name}: a request that may have arrived is never sent twice ({method})");
        }
    }
}

/// `Content-Length` beside `Transfer-Encoding` means nothing, and no coding but `chunked` can be undone.
#[test]
fn length_beside_a_transfer_coding_is_ignored() {
    let upstream = Upstream::answering(|request| {
        let coding = if request.starts_with(b"GET /gzip") { "gzip, chunked" } else { "chunked" };
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: {coding}\r\n\r\n");
        format!("{head}6\r\nabcdef\r\n0\r\n\r\n").into_bytes()
    });
    let proxy = Proxy::start(&upstream.url(), UNLIMITED, &[]);
    let mut client = proxy.client();
    client.send(b"GET /x HTTP/1.0\r\nhost: a\r\n\r\n");
    let mut text = Vec::new();
    client.stream.read_to_end(&mut text).unwrap();
    assert!(text.ends_with(b"\r\n\r\nabcdef"), "{}", text.escape_ascii());
    let mut client = proxy.client();
    assert_eq!(problem(&client.request("GET", "/gzip", "")).0, 502);
}

/// After the head, an error can only be shown by cutting the connection.
#[test]
fn response_that_ends_early_cuts_the_connection() {
    for rest in ["content-length: 10\r\n\r\nhalf", "transfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n"] {
        let upstream = Upstream::serving(move |_, mut stream| {
            read_request(&mut stream, &mut Vec::new()).unwrap();
            stream.write_all(format!("HTTP/1.1 200 OK\r\n{rest}").as_bytes()).unwrap();
        });
        let proxy = Proxy::start(&upstream.url(), &short(), &[]);
        let mut client = proxy.client();
        client.send(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n");
        let mut text = Vec::new();
        let _ = client.stream.read_to_end(&mut text);
        let text = String::from_utf8_lossy(&text);
        assert!(text.starts_with("HTTP/1.1 200") && text.contains("half"), "{text}");
        assert!(!text.ends_with("0\r\n\r\n"), "a chunked body must not end as if it were complete: {text}");
        eventually("the failure is counted", || {
            proxy.metric("tollkeeper_proxy_upstream_errors_total{kind=\"body\"}") == 1.0
        });
    }
}

#[test]
fn stalled_response_body_is_cut() {
    let upstream = Upstream::serving(|_, mut stream| {
        read_request(&mut stream, &mut Vec::new()).unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf").unwrap();
        // Until the proxy closes the connection.
        let _ = stream.read(&mut [0]);
    });
    let proxy = Proxy::start(&upstream.url(), &short(), &[]);
    let mut client = proxy.client();
    client.send(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n");
    let mut text = Vec::new();
    let _ = client.stream.read_to_end(&mut text);
    assert!(text.ends_with(b"half"), "{}", text.escape_ascii());
}

#[test]
fn stalled_request_body_is_408() {
    let upstream = Upstream::ok();
    let proxy = Proxy::start(&upstream.url(), &short(), &[]);
    let mut client = proxy.client();
    client.send(b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\nhalf");
    let answer = client.answer();
    assert_eq!(problem(&answer).0, 408);
    assert_eq!(proxy.metric("tollkeeper_proxy_upstream_errors_total{kind=\"reset\"}"), 0.0);
}

/// A limit that needs a field of the body reads it before the upstream does.
#[test]
fn stalled_body_that_a_limit_reads_is_408() {
    let upstream = Upstream::ok();
    let limits = "limits: [{ name: logins, by: body.email, rate: 5/day }]\n";
    let proxy =
        Proxy::start(&upstream.url(), &format!("proxy: {{ body_idle_timeout: 200ms }}\n{limits}"), &[]);
    let mut client = proxy.client();
    let head = "POST /x HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{";
    client.send(head.as_bytes());
    assert_eq!(problem(&client.answer()).0, 408);
    assert_eq!(upstream.count(), 0);
}

/// The upstream closes every connection after its first response, without saying so.
#[test]
fn dead_connections_are_not_used_again() {
    let upstream = Upstream::serving(|upstream, mut stream| {
        let request = read_request(&mut stream, &mut Vec::new()).unwrap();
        upstream.record(&request);
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").unwrap();
    });
    let proxy = Proxy::start(&upstream.url(), UNLIMITED, &[]);
    let mut client = proxy.client();
    for number in 1..=20 {
        let answer = client.request(if number % 2 == 0 { "POST" } else { "GET" }, "/x", "");
        assert_eq!((answer.status, upstream.count()), (200, number), "each arrives once: {answer:?}");
        eventually("the proxy has noticed the end of the connection", || {
            let count = |state| {
                proxy.metric(&format!("tollkeeper_proxy_connections{{side=\"upstream\",state=\"{state}\"}}"))
            };
            (count("active"), count("idle")) == (0.0, 0.0)
        });
    }
}

/// The upstream takes the second request of every connection and closes it: the head was sent, so it may have run.
#[test]
fn request_on_a_used_connection_is_not_repeated() {
    for method in ["GET", "POST"] {
        let upstream = Upstream::serving(|upstream, mut stream| {
            let mut buffer = Vec::new();
            upstream.record(&read_request(&mut stream, &mut buffer).unwrap());
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").unwrap();
            if let Some(request) = read_request(&mut stream, &mut buffer) {
                upstream.record(&request);
            }
        });
        let proxy = Proxy::start(&upstream.url(), UNLIMITED, &[]);
        let mut client = proxy.client();
        let statuses = [(); 4].map(|()| client.request(method, "/x", "").status);
        assert_eq!(statuses, [200, 502, 200, 502]);
        assert_eq!((upstream.count(), proxy.metric("tollkeeper_proxy_retries_total")), (4, 0.0));
    }
}

/// The upstream closes every connection after its response, so that some requests meet a connection that is just closing.
/// Those that were certainly not sent are sent again, and no request is sent twice.
#[test]
fn unsent_request_on_a_dead_connection_is_repeated() {
    let upstream = Upstream::serving(|upstream, mut stream| {
        let request = read_request(&mut stream, &mut Vec::new()).unwrap_or_default();
        upstream.record(&request);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
    });
    let proxy = Proxy::start(&upstream.url(), UNLIMITED, &[]);
    let mut client = proxy.client();
    let mut number = 0;
    eventually("a request is repeated", || {
        for _ in 0..200 {
            number += 1;
            let status = client.request("GET", &format!("/{number}"), "").status;
            assert!(matches!(status, 200 | 502), "{status}");
        }
        proxy.metric("tollkeeper_proxy_retries_total") > 0.0
    });
    let mut lines: Vec<Vec<u8>> = upstream.take();
    lines.iter_mut().for_each(|request| request.truncate(12));
    let count = lines.len();
    lines.sort();
    lines.dedup();
    assert_eq!(lines.len(), count, "each request arrives at most once");
}

#[test]
fn client_that_leaves_cancels_the_upstream_request() {
    let cancelled = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&cancelled);
    let upstream = Upstream::serving(move |upstream, mut stream| {
        let request = read_request(&mut stream, &mut Vec::new()).unwrap();
        upstream.record(&request);
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        if matches!(stream.read(&mut [0]), Ok(0)) {
            counted.fetch_add(1, SeqCst);
        }
    });
    let proxy = Proxy::start(&upstream.url(), UNLIMITED, &[]);
    let mut client = proxy.client();
    client.send(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n");
    eventually("the request arrives", || upstream.count() == 1);
    drop(client);
    eventually("its connection is closed", || cancelled.load(SeqCst) == 1);
    eventually("it is not in flight any more", || proxy.metric("tollkeeper_proxy_in_flight") == 0.0);
}
