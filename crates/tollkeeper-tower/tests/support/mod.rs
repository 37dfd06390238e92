//! Shared by the tests over sockets: servers on free ports, and clients that send exactly the given bytes.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::routing::any;
use http::HeaderMap;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinHandle;
use tollkeeper::http::{ClientAddress, HttpFact, HttpSettings, Source};
use tollkeeper::{Capacity, Clock, Limit, Limiter, ManualClock, MemoryStore, Policy, Time};
use tollkeeper_tower::RateLimitLayer;

/// A limiter with a manual clock: time passes only when the test advances it.
pub(crate) fn limiter(limits: Vec<Limit>) -> (Limiter, ManualClock) {
    let clock = ManualClock::new(Time::from_micros(1_760_000_000_000_000));
    let store = MemoryStore::new(Capacity::default(), Clock::manual(&clock));
    (Limiter::embedded(Policy::new(limits).expect("valid limits"), store), clock)
}

/// Settings that trust every peer on this machine (127.0.0.0/8) and in 10.0.0.0/8 as a proxy.
pub(crate) fn behind_proxies(client_address: ClientAddress) -> HttpSettings {
    let trusted_proxies =
        vec!["127.0.0.0/8".parse().expect("a network"), "10.0.0.0/8".parse().expect("a network")];
    HttpSettings { trusted_proxies, client_address, ..HttpSettings::default() }
}

/// A fact that is read from this source, such as `header.x-user`, without changes.
pub(crate) fn fact(name: &str, from: &str) -> HttpFact {
    HttpFact::new(name, Source::of(from).expect("a part of a request"))
}

/// A listener on a free port with a backlog of 1024. [`TcpListener::bind`] has a backlog of 128: with more pending
/// connections Linux falls back to SYN cookies, drops connection state, and resets a connection whose second packet
/// arrives before it is accepted. HTTP/2 always sends two packets, its settings and a request.
fn listener() -> TcpListener {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a free port");
    socket.listen(1024).expect("the server listens")
}

/// A server that runs until it is dropped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    task: JoinHandle<()>,
}

impl Server {
    /// Serves an application of axum, over HTTP/1.1 and HTTP/2.
    pub(crate) async fn axum(router: Router) -> Server {
        let listener = listener();
        let address = listener.local_addr().expect("it is bound");
        let service = router.into_make_service_with_connect_info::<SocketAddr>();
        let task =
            tokio::spawn(async move { axum::serve(listener, service).await.expect("the server runs") });
        Server { address, task }
    }

    /// Runs any server on a new listener.
    pub(crate) async fn of<F: Future<Output = ()> + Send + 'static>(
        serve: impl FnOnce(TcpListener) -> F,
    ) -> Server {
        let listener = listener();
        let address = listener.local_addr().expect("it is bound");
        Server { address, task: tokio::spawn(serve(listener)) }
    }

    /// Sends one request on a new connection and reads the complete response.
    pub(crate) async fn send(
        &self,
        request_line: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> TextResponse {
        let mut text = format!("{request_line} HTTP/1.1\r\nconnection: close\r\n");
        if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            text.push_str("host: test\r\n");
        }
        for (name, value) in headers {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
        if !body.is_empty() {
            text.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        text.push_str("\r\n");
        text.push_str(body);
        let mut stream = TcpStream::connect(self.address).await.expect("the server listens");
        stream.write_all(text.as_bytes()).await.expect("the server reads");
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).await.expect("the server responds");
        TextResponse::parse(&String::from_utf8(bytes).expect("text"))
    }

    pub(crate) async fn get(&self, path: &str, headers: &[(&str, &str)]) -> TextResponse {
        self.send(&format!("GET {path}"), headers, "").await
    }

    /// Sends `count` equal requests and returns how many are answered with 200.
    pub(crate) async fn admitted(&self, count: usize, path: &str, headers: &[(&str, &str)]) -> usize {
        let mut admitted = 0;
        for _ in 0..count {
            admitted += usize::from(self.get(path, headers).await.status == 200);
        }
        admitted
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A response whose body is text.
#[derive(Debug)]
pub(crate) struct TextResponse {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl TextResponse {
    fn parse(text: &str) -> TextResponse {
        let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
        let mut lines = head.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).expect("a status line");
        let mut headers = HeaderMap::new();
        for line in lines {
            let (name, value) = line.split_once(':').expect("a header");
            let name: http::HeaderName = name.parse().expect("a name");
            headers.append(name, value.trim().parse().expect("a value"));
        }
        TextResponse { status: status.parse().expect("a number"), headers, body: body.to_owned() }
    }

    /// The value of a header, which must not occur more than once.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.get_all(name).iter();
        let value = values.next().map(|value| value.to_str().expect("text"));
        assert!(values.next().is_none(), "duplicate header {name}");
        value
    }
}

/// Counts the requests that reach the handler.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reached(Arc<AtomicUsize>);

impl Reached {
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    pub(crate) fn increment(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }
}

/// An application that answers every request with 200, behind a layer; and the count of requests that reach it.
pub(crate) fn everything(layer: RateLimitLayer) -> (Router, Reached) {
    let reached = Reached::default();
    let handler = {
        let reached = reached.clone();
        move || async move {
            reached.increment();
            "ok"
        }
    };
    (Router::new().fallback(any(handler)).layer(layer), reached)
}

/// A server that answers every request with 200, behind a layer with these limits.
pub(crate) async fn serve(limits: Vec<Limit>, settings: HttpSettings) -> (Server, ManualClock) {
    let (limiter, clock) = limiter(limits);
    let (router, _) = everything(RateLimitLayer::new(limiter).http(settings));
    (Server::axum(router).await, clock)
}

/// Polls until `done` is true. Fails after a minute, long enough for a busy machine.
pub(crate) async fn until(done: impl AsyncFn() -> bool) {
    let polling = tokio::time::timeout(std::time::Duration::from_secs(60), async {
        while !done().await {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    });
    polling.await.expect("the condition becomes true within a minute");
}

/// A minimal WebSocket client.
pub(crate) struct WebSocket(TcpStream);

impl WebSocket {
    /// Opens a WebSocket; fails with the status if it is refused.
    pub(crate) async fn try_open(server: &Server, path: &str) -> Result<WebSocket, u16> {
        let mut stream = TcpStream::connect(server.address).await.expect("the server listens");
        let request = format!(
            "GET {path} HTTP/1.1\r\nhost: test\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
             sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.expect("the server reads");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.expect("the server responds"));
        }
        let status = std::str::from_utf8(&head[9..12]).expect("text").parse().expect("a status");
        if status == 101 { Ok(WebSocket(stream)) } else { Err(status) }
    }

    pub(crate) async fn open(server: &Server, path: &str) -> WebSocket {
        WebSocket::try_open(server, path)
            .await
            .map_err(|status| format!("refused with {status}"))
            .expect("101")
    }

    /// Sends a text of less than 126 bytes and checks that the server echoes it.
    pub(crate) async fn echo(&mut self, text: &str) {
        let length = u8::try_from(text.len()).ok().filter(|length| *length < 126).expect("a short text");
        // Clients must mask their frames; a mask of zeros leaves the text unchanged.
        let frame = [&[0x81, 0x80 | length, 0, 0, 0, 0], text.as_bytes()].concat();
        self.0.write_all(&frame).await.expect("the server reads");
        let mut echoed = vec![0; text.len() + 2];
        self.0.read_exact(&mut echoed).await.expect("the server responds");
        assert_eq!(echoed, [&[0x81, length], text.as_bytes()].concat());
    }

    /// Sends a close frame and waits until the server closes the connection.
    pub(crate) async fn close(mut self) {
        self.0.write_all(&[0x88, 0x80, 0, 0, 0, 0]).await.expect("the server reads");
        let mut rest = Vec::new();
        let _ = self.0.read_to_end(&mut rest).await;
    }
}
