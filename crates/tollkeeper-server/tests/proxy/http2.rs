//! Clients that speak HTTP/2, with a library that can send anything.

use std::net::SocketAddr;
use std::sync::{Arc, Barrier};

use bytes::Bytes;
use h2::client::SendRequest;
use hyper::{HeaderMap, Method, Request, Uri, Version};

use crate::support::{PATIENCE, eventually};
use crate::upstream::{Upstream, shown};
use crate::{Proxy, UNLIMITED};

async fn connect(address: SocketAddr) -> SendRequest<Bytes> {
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    client.ready().await.unwrap()
}

/// The status of a request; `None` if its stream was reset.
async fn status(
    address: SocketAddr,
    method: &str,
    uri: &str,
    headers: &[(&'static str, &str)],
    body: &str,
) -> Option<u16> {
    let mut request = Request::new(());
    *request.method_mut() = Method::from_bytes(method.as_bytes()).unwrap();
    *request.uri_mut() = uri.parse::<Uri>().unwrap();
    *request.version_mut() = Version::HTTP_2;
    for (name, value) in headers {
        request.headers_mut().append(*name, value.parse().unwrap());
    }
    let (response, mut sending) = connect(address).await.send_request(request, body.is_empty()).ok()?;
    if !body.is_empty() {
        sending.send_data(Bytes::from(body.to_owned()), true).ok()?;
    }
    Some(response.await.ok()?.status().as_u16())
}

/// A request, the status of its response, and the request that the upstream receives.
struct Row {
    method: &'static str,
    uri: &'static str,
    headers: &'static [(&'static str, &'static str)],
    body: &'static str,
    expected: u16,
    arrived: Option<&'static str>,
}

impl Row {
    const fn get(uri: &'static str, expected: u16, arrived: Option<&'static str>) -> Row {
        Row { method: "GET", uri, headers: &[], body: "", expected, arrived }
    }

    const fn with(self, headers: &'static [(&'static str, &'static str)]) -> Row {
        Row { headers, ..self }
    }
}

const GET: Option<&str> = Some("GET /x HTTP/1.1 | host: a | ");
const CHUNKED: &str = "POST /x HTTP/1.1 | host: a, transfer-encoding: chunked | 1\\r\\nb\\r\\n0\\r\\n\\r\\n";
const MEASURED: &str = "POST /x HTTP/1.1 | content-length: 1, host: a | b";
const COOKIES: &str = "GET /x HTTP/1.1 | cookie: a=1; b=2, host: a | ";

const ROWS: &[Row] = &[
    Row::get("http://a/x", 200, GET),
    Row::get("https://a:1/x?q", 200, Some("GET /x?q HTTP/1.1 | host: a:1 | ")),
    Row { method: "POST", body: "b", ..Row::get("http://a/x", 200, Some(CHUNKED)) },
    Row { method: "POST", body: "b", ..Row::get("http://a/x", 200, Some(MEASURED)) }
        .with(&[("content-length", "1")]),
    Row::get("http://a/x", 200, GET).with(&[("host", "a")]),
    Row::get("http://a/x", 400, None).with(&[("host", "evil")]),
    Row::get("http://user@a/x", 400, None),
    Row::get("http://a/x", 200, Some(COOKIES)).with(&[("cookie", "a=1"), ("cookie", "b=2")]),
    Row::get("http://a/x", 200, GET).with(&[("te", "trailers")]),
    Row::get("http://a/x", 200, GET).with(&[("x_user", "a")]),
    Row { method: "TRACE", ..Row::get("http://a/x", 405, None) },
    Row { method: "CONNECT", ..Row::get("a:80", 405, None) },
];

#[tokio::test(flavor = "multi_thread")]
async fn http2_requests_arrive_as_the_table_says() {
    let upstream = Upstream::ok();
    let proxy = Proxy::start(&upstream.url(), UNLIMITED, &[]);
    for Row { method, uri, headers, body, expected, arrived } in ROWS {
        let got = status(proxy.address, method, uri, headers, body).await;
        assert_eq!(got, Some(*expected), "{method} {uri} {headers:?}");
        let all: Vec<String> = upstream.take().iter().map(|request| shown(request)).collect();
        assert_eq!(all, arrived.iter().copied().collect::<Vec<_>>(), "{method} {uri} {headers:?}");
    }
}

/// HTTP/2 forbids headers of a connection: a request with one is malformed.
#[tokio::test(flavor = "multi_thread")]
async fn connection_headers_in_http2_reach_no_upstream() {
    let upstream = Upstream::ok();
    let proxy = Proxy::start(&upstream.url(), UNLIMITED, &[]);
    for (name, value) in
        [("connection", "x"), ("transfer-encoding", "chunked"), ("upgrade", "websocket"), ("te", "gzip")]
    {
        let got = status(proxy.address, "GET", "http://a/x", &[(name, value)], "").await;
        let forwarded: Vec<String> = upstream.take().iter().map(|request| shown(request)).collect();
        assert!(
            got.is_none_or(|status| status >= 400) && forwarded.is_empty()
                || forwarded == ["GET /x HTTP/1.1 | host: a | "],
            "{name}: {got:?} {forwarded:?}"
        );
    }
}

/// Both sides speak HTTP/2: trailers pass in both directions.
#[tokio::test(flavor = "multi_thread")]
async fn trailers_pass_to_an_http2_upstream_and_back() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let mut connection = h2::server::handshake(stream).await.unwrap();
            tokio::spawn(async move {
                while let Some(Ok((request, mut respond))) = connection.accept().await {
                    tokio::spawn(async move {
                        let te = request.headers().get("te").cloned();
                        let (authority, scheme) = (
                            request.uri().authority().cloned(),
                            request.uri().scheme_str().map(str::to_owned),
                        );
                        assert_eq!(
                            (te.unwrap(), authority.unwrap().as_str(), scheme.as_deref()),
                            ("trailers".parse().unwrap(), "a", Some("http"))
                        );
                        let mut body = request.into_body();
                        let mut all = Vec::new();
                        while let Some(data) = body.data().await {
                            let data = data.unwrap();
                            body.flow_control().release_capacity(data.len()).unwrap();
                            all.extend_from_slice(&data);
                        }
                        let trailers = body.trailers().await.unwrap().unwrap();
                        let mut sending = respond.send_response(hyper::Response::new(()), false).unwrap();
                        sending.send_data(all.into(), false).unwrap();
                        sending.send_trailers(trailers).unwrap();
                    });
                }
            });
        }
    });
    let config = format!("{UNLIMITED}proxy: {{ upstream_protocol: http2 }}\n");
    let proxy = Proxy::start(&format!("http://{address}"), &config, &[]);
    let request = Request::post("http://a/x").header("te", "trailers").body(()).unwrap();
    let (response, mut sending) = connect(proxy.address).await.send_request(request, false).unwrap();
    sending.send_data(Bytes::from_static(b"hello"), false).unwrap();
    let mut trailers = HeaderMap::new();
    trailers.insert("x-sum", "5".parse().unwrap());
    sending.send_trailers(trailers).unwrap();
    let response = response.await.unwrap();
    assert_eq!(response.status(), 200);
    let mut body = response.into_body();
    assert_eq!(body.data().await.unwrap().unwrap(), "hello");
    assert_eq!(body.trailers().await.unwrap().unwrap()["x-sum"], "5");
}

/// The client never makes room for a response: no write blocks, and nothing is read.
#[tokio::test]
async fn closed_window_holds_no_slot_forever() {
    let release = Arc::new(Barrier::new(2));
    let upstream = Upstream::answering({
        let release = Arc::clone(&release);
        move |request| {
            if request.starts_with(b"GET /wait") {
                release.wait();
            }
            let large = format!("HTTP/1.1 200 OK\r\ncontent-length: 200000\r\n\r\n{}", "x".repeat(200_000));
            large.into_bytes()
        }
    });
    let config = format!("proxy: {{ body_idle_timeout: 200ms, concurrency: {{ max: 2 }} }}\n{UNLIMITED}");
    let proxy = Proxy::start(&upstream.url(), &config, &[]);
    let stream = tokio::net::TcpStream::connect(proxy.address).await.unwrap();
    let (client, connection) =
        h2::client::Builder::new().initial_window_size(0).handshake::<_, Bytes>(stream).await.unwrap();
    tokio::spawn(connection);
    let mut client = client.ready().await.unwrap();
    let mut bodies = Vec::new();
    for _ in 0..2 {
        let request = Request::get(format!("http://{}/x", proxy.address)).body(()).unwrap();
        bodies.push(client.send_request(request, true).unwrap().0.await.unwrap().into_body());
    }
    for body in &mut bodies {
        let data = tokio::time::timeout(PATIENCE, body.data()).await.expect("the stream is reset");
        let reset = data.unwrap().unwrap_err();
        assert_eq!(reset.reason(), Some(h2::Reason::CANCEL));
    }
    let mut waits = proxy.client();
    waits.send(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n");
    eventually("one slot is free", || upstream.count() == 3);
    assert_eq!(proxy.client().request("GET", "/x", "").status, 200, "the other slot is free");
    release.wait();
    assert_eq!(waits.answer().status, 200);
}

/// After the head, an error can only be shown by resetting the stream. The connection stays usable.
#[tokio::test(flavor = "multi_thread")]
async fn response_that_ends_early_resets_the_stream() {
    let upstream = Upstream::answering(|request| match request.starts_with(b"GET /half") {
        true => b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\nzz".to_vec(),
        false => b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok".to_vec(),
    });
    let proxy = Proxy::start(&upstream.url(), UNLIMITED, &[]);
    let mut client = connect(proxy.address).await;
    let request = Request::get("http://a/half").body(()).unwrap();
    let response = client.send_request(request, true).unwrap().0.await.unwrap();
    assert_eq!(response.status(), 200);
    let mut body = response.into_body();
    let error = loop {
        match body.data().await.expect("the body does not end as if it were complete") {
            Ok(data) => assert_eq!(data, "half"),
            Err(error) => break error,
        }
    };
    assert!(error.is_reset(), "{error}");
    let request = Request::get("http://a/x").body(()).unwrap();
    assert_eq!(client.send_request(request, true).unwrap().0.await.unwrap().status(), 200);
}

/// The first connection to the upstream is dead: it is open, and nothing answers on it.
#[tokio::test(flavor = "multi_thread")]
async fn silent_http2_connection_is_not_used_again() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut is_dead = true;
        while let Ok((stream, _)) = listener.accept().await {
            let mut connection = h2::server::handshake(stream).await.unwrap();
            let answers = !std::mem::take(&mut is_dead);
            tokio::spawn(async move {
                let mut unanswered = Vec::new();
                while let Some(Ok((_, mut respond))) = connection.accept().await {
                    match answers {
                        true => drop(respond.send_response(hyper::Response::new(()), true).unwrap()),
                        false => unanswered.push(respond),
                    }
                }
            });
        }
    });
    let config = format!("{UNLIMITED}proxy: {{ upstream_protocol: http2, timeout: 300ms }}\n");
    let proxy = Proxy::start(&format!("http://{address}"), &config, &[]);
    let mut client = proxy.client();
    assert_eq!(client.request("GET", "/x", "").status, 504);
    assert_eq!(client.request("GET", "/x", "").status, 200);
}

/// The preface of HTTP/2 in two packets: the connection is not a slow head.
#[tokio::test]
async fn split_preface_is_not_a_slow_head() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    let upstream = Upstream::ok();
    let config = format!("proxy: {{ header_timeout: 300ms, idle_timeout: 1h }}\n{UNLIMITED}");
    let proxy = Proxy::start(&upstream.url(), &config, &[]);
    let mut client = tokio::net::TcpStream::connect(proxy.address).await.unwrap();
    client.set_nodelay(true).unwrap();
    client.write_all(b"PRI * HTT").await.unwrap();
    // The first part has been read when a later connection was served.
    assert_eq!(proxy.client().request("GET", "/x", "").status, 200);
    client.write_all(b"P/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    // A head that began later takes too long.
    let mut slow = tokio::net::TcpStream::connect(proxy.address).await.unwrap();
    slow.write_all(b"GET /x").await.unwrap();
    let _ = slow.read_to_end(&mut Vec::new()).await;
    // HEADERS: GET, http, /, :authority a.
    client.write_all(&[0, 0, 6, 1, 5, 0, 0, 0, 1, 0x82, 0x86, 0x84, 0x41, 1, b'a']).await.unwrap();
    let mut received = Vec::new();
    while !received.ends_with(b"ok") {
        let count = client.read_buf(&mut received).await.unwrap();
        assert!(count > 0, "the connection was closed: {}", received.escape_ascii());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn active_connections_are_not_requests() {
    let release = Arc::new(Barrier::new(3));
    let upstream = Upstream::answering({
        let release = Arc::clone(&release);
        move |_| {
            release.wait();
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok".to_vec()
        }
    });
    let proxy = Proxy::start(&upstream.url(), UNLIMITED, &[]);
    let mut client = connect(proxy.address).await;
    let mut send = || {
        let request = Request::get("http://a/x").body(()).unwrap();
        client.send_request(request, true).unwrap().0
    };
    let responses = [send(), send()];
    eventually("both requests arrive", || upstream.count() == 2);
    let connections =
        |state| proxy.metric(&format!("tollkeeper_proxy_connections{{side=\"client\",state=\"{state}\"}}"));
    assert_eq!((connections("active"), connections("idle")), (1.0, 0.0));
    release.wait();
    for response in responses {
        assert_eq!(response.await.unwrap().status(), 200);
    }
    eventually("the connection is idle", || (connections("active"), connections("idle")) == (0.0, 1.0));
}

/// Rapid Reset (CVE-2023-44487): streams that are opened and reset at once.
#[tokio::test]
async fn flood_of_resets_is_closed_without_a_log_line() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    let upstream = Upstream::ok();
    let proxy = Proxy::start(&upstream.url(), UNLIMITED, &[]);
    let mut flood = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    for stream in (1_u32..2_000).step_by(2).map(u32::to_be_bytes) {
        // HEADERS: GET, http, /, :authority a.
        flood.extend([&[0, 0, 6, 1, 5], &stream[..], &[0x82, 0x86, 0x84, 0x41, 1, b'a']].concat());
        // RST_STREAM: CANCEL.
        flood.extend([&[0, 0, 4, 3, 0], &stream[..], &[0, 0, 0, 8]].concat());
    }
    let mut client = tokio::net::TcpStream::connect(proxy.address).await.unwrap();
    // The proxy may close the connection before it has read everything.
    let _ = client.write_all(&flood).await;
    let _ = client.read_to_end(&mut Vec::new()).await;
    assert_eq!(proxy.client().request("GET", "/x", "").status, 200);
    assert!(upstream.count() < 1_000, "most of the flood reaches no upstream: {}", upstream.count());
    assert!(!proxy.api.log().contains("recv_reset"), "{}", proxy.api.log());
}
