//! The layer over real sockets: limits stay exact with many parallel connections, streams and clients that disconnect.

mod support;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::{any, get};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use support::*;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Barrier;
use tollkeeper::http::HttpSettings;
use tollkeeper::{Algorithm, Limit, Limiter, Quota, Span, StatusSet, facts};
use tollkeeper_tower::{PeerAddress, RateLimitLayer};
use tower::ServiceExt;

/// An open connection.
enum Connection {
    Http1(http1::SendRequest<Empty<Bytes>>),
    Http2(http2::SendRequest<Empty<Bytes>>),
}

impl Connection {
    async fn open(address: SocketAddr, http2: bool) -> Connection {
        let stream = TokioIo::new(TcpStream::connect(address).await.expect("the server listens"));
        if http2 {
            let handshake = http2::handshake(TokioExecutor::new(), stream).await;
            let (mut sender, connection) = handshake.expect("the server speaks HTTP/2");
            tokio::spawn(connection);
            sender.ready().await.expect("the connection is open");
            Connection::Http2(sender)
        } else {
            let (mut sender, connection) =
                http1::handshake(stream).await.expect("the server speaks HTTP/1.1");
            tokio::spawn(connection);
            sender.ready().await.expect("the connection is open");
            Connection::Http1(sender)
        }
    }

    /// Sends one request and returns the status of its response.
    async fn request(self) -> u16 {
        let response = match self {
            Connection::Http1(mut sender) => sender.send_request(get_request()).await,
            Connection::Http2(mut sender) => sender.send_request(get_request()).await,
        };
        response.expect("the server responds").status().as_u16()
    }
}

/// Opens this many connections and, when all of them are open, sends one request over each.
async fn all_at_once(server: &Server, connections: usize, http2: bool) -> Vec<u16> {
    let all_open = Arc::new(Barrier::new(connections));
    let tasks: Vec<_> = (0..connections)
        .map(|_| {
            let (address, all_open) = (server.address, Arc::clone(&all_open));
            tokio::spawn(async move {
                let connection = Connection::open(address, http2).await;
                all_open.wait().await;
                connection.request().await
            })
        })
        .collect();
    let mut statuses = Vec::new();
    for task in tasks {
        statuses.push(task.await.expect("the task does not panic"));
    }
    statuses
}

fn get_request() -> Request<Empty<Bytes>> {
    Request::builder().uri("http://test/").header("host", "test").body(Empty::new()).expect("valid")
}

fn count(statuses: &[u16], status: u16) -> usize {
    statuses.iter().filter(|other| **other == status).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_500_parallel_connections_exactly_100_are_admitted() {
    for http2 in [false, true] {
        let (limiter, _) = limiter(vec![Limit::new("per-ip", Quota::per_minute(100)).by("ip")]);
        let (router, reached) = everything(RateLimitLayer::new(limiter));
        let server = Server::axum(router).await;
        let statuses = all_at_once(&server, 500, http2).await;
        assert_eq!(reached.count(), 100, "HTTP/2: {http2}");
        assert_eq!((count(&statuses, 200), count(&statuses, 429)), (100, 400), "HTTP/2: {http2}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_100_parallel_wrong_logins_exactly_5_are_admitted() {
    let login = Limit::new("login", Quota::per(5, Duration::from_secs(900)))
        .by("ip")
        .algorithm(Algorithm::SlidingLog)
        .deduct_when(StatusSet::of([401]));
    let (limiter, _) = limiter(vec![login]);
    let reached = Reached::default();
    // No request is answered before all have arrived: a limiter that checks first and charges after the response would
    // admit them all.
    let handler = {
        let reached = reached.clone();
        move || async move {
            reached.increment();
            tokio::time::sleep(Duration::from_millis(100)).await;
            StatusCode::UNAUTHORIZED
        }
    };
    let router = Router::new().route("/", any(handler)).layer(RateLimitLayer::new(limiter));
    let server = Server::axum(router).await;
    let statuses = all_at_once(&server, 100, false).await;
    assert_eq!(reached.count(), 5);
    assert_eq!((count(&statuses, 401), count(&statuses, 429)), (5, 95));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn http2_streams_are_counted_like_connections() {
    let (limiter, _) = limiter(vec![Limit::new("all", Quota::per_minute(5))]);
    let (router, reached) = everything(RateLimitLayer::new(limiter));
    let server = Server::axum(router).await;
    let stream = TokioIo::new(TcpStream::connect(server.address).await.unwrap());
    let (sender, connection) = http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    let send = |mut sender: http2::SendRequest<Empty<Bytes>>| async move {
        sender.ready().await.expect("the connection is open");
        sender.send_request(get_request()).await.expect("the server responds").status().as_u16()
    };
    let tasks: Vec<_> = (0..100).map(|_| tokio::spawn(send(sender.clone()))).collect();
    let mut statuses = Vec::new();
    for task in tasks {
        statuses.push(task.await.unwrap());
    }
    assert_eq!((reached.count(), count(&statuses, 200), count(&statuses, 429)), (5, 5, 95));
}

/// Counts the requests in the handler, from its start until its response is sent or dropped.
#[derive(Clone, Default)]
struct Gauge {
    current: Arc<AtomicUsize>,
    peak: Arc<AtomicUsize>,
    total: Arc<AtomicUsize>,
}

/// Decrements the gauge on drop.
struct GaugeGuard(Arc<AtomicUsize>);

impl Gauge {
    fn enter(&self) -> GaugeGuard {
        let current = self.current.fetch_add(1, Ordering::SeqCst) + 1;
        self.peak.fetch_max(current, Ordering::SeqCst);
        self.total.fetch_add(1, Ordering::SeqCst);
        GaugeGuard(Arc::clone(&self.current))
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A body that streams until `rounds` is incremented, or until the client disconnects.
struct Stream {
    ticks: tokio::time::Interval,
    rounds: Arc<AtomicUsize>,
    /// The value of `rounds` when the stream began.
    round: usize,
    _guard: GaugeGuard,
}

impl Stream {
    fn response(rounds: &Arc<AtomicUsize>, guard: GaugeGuard) -> Response<Body> {
        let ticks = tokio::time::interval(Duration::from_millis(1));
        let (rounds, round) = (Arc::clone(rounds), rounds.load(Ordering::SeqCst));
        Response::new(Body::new(Stream { ticks, rounds, round, _guard: guard }))
    }
}

impl http_body::Body for Stream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.rounds.load(Ordering::SeqCst) > self.round {
            return std::task::Poll::Ready(None);
        }
        self.ticks.poll_tick(context).map(|_| Some(Ok(Frame::data(Bytes::from_static(b"tick\n")))))
    }
}

/// Four rounds of 50 requests each; in each round half of the admitted clients disconnect while their response streams.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn at_most_10_of_200_requests_hold_a_slot_at_once() {
    let (limiter, _) = limiter(vec![Limit::new("exports", Quota::slots(10))]);
    let (gauge, rounds) = (Gauge::default(), Arc::new(AtomicUsize::new(0)));
    let handler = {
        let (gauge, rounds) = (gauge.clone(), Arc::clone(&rounds));
        move || async move {
            let guard = gauge.enter();
            tokio::task::yield_now().await;
            Stream::response(&rounds, guard)
        }
    };
    let router = Router::new().route("/", get(handler)).layer(RateLimitLayer::new(limiter.clone()));
    let server = Server::axum(router).await;
    let used = || {
        10 - limiter
            .usage(&facts! {})
            .wait()
            .expect("valid")
            .limits()
            .next()
            .expect("one")
            .outcome()
            .remaining
    };
    for round in 0..4 {
        let all_open = Arc::new(Barrier::new(50));
        let send = |address, all_open: Arc<Barrier>| async move {
            let stream = TokioIo::new(TcpStream::connect(address).await.expect("the server listens"));
            let (mut sender, connection) =
                http1::handshake(stream).await.expect("the server speaks HTTP/1.1");
            let connection = tokio::spawn(connection);
            sender.ready().await.expect("the connection is open");
            all_open.wait().await;
            let mut response = sender.send_request(get_request()).await.expect("the server responds");
            if response.status() == StatusCode::OK {
                // Read one frame, so that the client disconnects in the middle of the stream.
                response.frame().await.expect("a frame").expect("the stream is open");
            }
            (response, connection)
        };
        let tasks: Vec<_> =
            (0..50).map(|_| tokio::spawn(send(server.address, Arc::clone(&all_open)))).collect();
        let mut streaming = Vec::new();
        for task in tasks {
            let (response, connection) = task.await.expect("the task does not panic");
            match response.status().as_u16() {
                200 => streaming.push((response, connection)),
                status => assert_eq!(status, 429),
            }
        }
        assert_eq!((streaming.len(), used()), (10, 10), "round {round}: exactly all slots are taken");
        let staying = streaming.split_off(5);
        for (response, connection) in streaming {
            connection.abort(); // the client disconnects in the middle of its stream
            drop(response);
        }
        until(async || used() == 5).await;
        rounds.fetch_add(1, Ordering::SeqCst);
        for (response, _) in staying {
            response.into_body().collect().await.expect("the stream ends without an error");
        }
        until(async || used() == 0).await;
    }
    until(async || gauge.current.load(Ordering::SeqCst) == 0).await;
    assert_eq!(gauge.peak.load(Ordering::SeqCst), 10);
    assert_eq!(gauge.total.load(Ordering::SeqCst), 40);
}

/// Serves a hyper service behind the layer, which inserts [`PeerAddress`] into every request.
async fn hyper_server(listener: TcpListener, layer: RateLimitLayer) {
    use tower_layer::Layer;
    loop {
        let (stream, peer) = listener.accept().await.expect("the server listens");
        let handler = |_: Request<tollkeeper_tower::RequestBody<Incoming>>| async {
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"ok"))))
        };
        let limited = layer.layer(tower::service_fn(handler));
        let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(PeerAddress(peer));
            limited.clone().oneshot(request)
        });
        tokio::spawn(
            hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service),
        );
    }
}

#[tokio::test]
async fn hyper_service_is_limited_by_peer_address() {
    let (limiter, _) = limiter(vec![Limit::new("per-ip", Quota::per_minute(3)).by("ip")]);
    let server = Server::of(move |listener| hyper_server(listener, RateLimitLayer::new(limiter))).await;
    assert_eq!(server.admitted(10, "/", &[]).await, 3);
    let response = server.get("/", &[]).await;
    assert_eq!(response.header("content-type"), Some("application/problem+json"));
    assert_eq!(response.header("cache-control"), Some("no-store"));
}

#[tokio::test]
async fn refusal_names_the_limits_and_when_to_retry() {
    let limits = vec![
        Limit::new("per-ip", Quota::per_minute(60).burst(1)).by("ip"),
        Limit::new("shadow", Quota::per_minute(1)).mode(tollkeeper::Mode::Shadow),
        Limit::new("all", Quota::per_minute(1).burst(1)),
    ];
    let (limiter, clock) = limiter(limits);
    let (router, _) = everything(RateLimitLayer::new(limiter).draw(|| 0));
    let server = Server::axum(router).await;
    let response = server.get("/", &[]).await;
    assert_eq!((response.status, response.body.as_str()), (200, "ok"));
    assert_eq!(response.header("ratelimit-policy"), Some(r#""per-ip";q=1;w=1, "all";q=1;w=60"#));
    clock.advance(Span::from_micros(500_001));
    let response = server.get("/", &[]).await;
    assert_eq!(response.status, 429);
    assert_eq!(response.header("retry-after"), Some("60"));
    let body: serde_json::Value = serde_json::from_str(&response.body).unwrap();
    assert_eq!(
        body,
        serde_json::json!({
            "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
            "title": "Request cannot be satisfied as assigned quota has been exceeded",
            "status": 429,
            "detail": "`all` allows 1 per minute with bursts of 1; the next request of cost 1 fits in 59.499999 s",
            "violated-policies": ["per-ip", "all"],
            "retry_after": 59.499999,
        })
    );
}

#[tokio::test]
async fn hooks_see_every_response_and_can_replace_refusals() {
    let (limiter, _) = limiter(vec![Limit::new("all", Quota::per_minute(1))]);
    let layer = RateLimitLayer::new(limiter)
        .headers([])
        .on_response(|decision, parts| {
            let remaining = decision.binding().map_or(0, |limit| limit.outcome().remaining);
            parts.headers.insert("x-left", remaining.into());
        })
        .on_refusal(|_, response| response.map(|_| Bytes::from_static(b"slow down")));
    let (router, _) = everything(layer);
    let server = Server::axum(router).await;
    let (first, second) = (server.get("/", &[]).await, server.get("/", &[]).await);
    assert_eq!((first.status, first.header("x-left"), first.header("ratelimit")), (200, Some("0"), None));
    assert_eq!((second.status, second.body.as_str(), second.header("x-left")), (429, "slow down", Some("0")));
    assert!(second.header("retry-after").is_some());
}

#[tokio::test]
async fn facts_and_costs_of_the_application_are_used() {
    let (limiter, _) = limiter(vec![Limit::new("per-user", Quota::per_minute(10)).by("user")]);
    let layer = RateLimitLayer::new(limiter)
        .fact("user", |parts| Some(parts.headers.get("authorization")?.to_str().ok()?.to_uppercase()))
        .cost(|parts| if parts.uri.path() == "/export" { 5 } else { 1 });
    let (router, _) = everything(layer);
    let server = Server::axum(router).await;
    assert_eq!(server.admitted(5, "/export", &[("authorization", "ann")]).await, 2);
    assert_eq!(server.admitted(5, "/", &[("authorization", "ANN")]).await, 0);
    assert_eq!(server.admitted(12, "/", &[("authorization", "bob")]).await, 10);
    assert_eq!(server.admitted(20, "/", &[]).await, 20, "without a user the limit does not apply");
}

#[tokio::test]
async fn route_defaults_to_the_matched_path_of_axum() {
    let (limiter, _) = limiter(vec![Limit::new("per-route", Quota::per_minute(2)).by("route")]);
    let ok = || any(|| async { "ok" });
    let inner = Router::new().route("/{id}/files", ok());
    let router = Router::new().route("/users/{id}", ok()).nest("/users", inner).fallback(ok());
    let server = Server::axum(router.layer(RateLimitLayer::new(limiter.clone()))).await;
    assert_eq!(server.admitted(1, "/users/1", &[]).await + server.admitted(3, "/users/2", &[]).await, 2);
    assert_eq!(server.admitted(3, "/users/1/files", &[]).await, 2);
    assert_eq!(server.admitted(1, "/a", &[]).await + server.admitted(3, "/b", &[]).await, 2);
    let usage = |route: &str| {
        let facts = facts! { "route" => route };
        limiter.usage(&facts).wait().unwrap().limits().next().unwrap().outcome().remaining
    };
    assert_eq!(["/users/{id}", "/users/{id}/files", "unmatched", "/users/1"].map(usage), [0, 0, 0, 2]);
}

#[tokio::test]
async fn replaced_limits_get_the_facts_they_need() {
    let (limiter, _) = limiter(vec![Limit::new("per-ip", Quota::per_minute(100)).by("ip")]);
    let settings = HttpSettings { facts: vec![fact("user", "header.x-user")], ..HttpSettings::default() };
    let (router, _) = everything(RateLimitLayer::new(limiter.clone()).http(settings));
    let server = Server::axum(router).await;
    assert_eq!(server.admitted(5, "/", &[("x-user", "ann")]).await, 5);
    limiter.replace(vec![Limit::new("per-user", Quota::per_minute(2)).by("user")]).unwrap();
    assert_eq!(server.admitted(5, "/", &[("x-user", "ann")]).await, 2);
}

/// A leaky bucket holds requests in order; if one client disconnects, the others are still admitted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn delayed_requests_are_admitted_in_fifo_order() {
    let queue = Limit::new("queue", Quota::per_second(10).burst(5)).algorithm(Algorithm::LeakyBucket);
    let (limiter, clock) = limiter(vec![queue]);
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let handler = {
        let order = Arc::clone(&order);
        move |request: Request<Body>| async move {
            order.lock().unwrap().push(request.uri().path().to_owned());
        }
    };
    let router = Router::new().fallback(any(handler)).layer(RateLimitLayer::new(limiter.clone()));
    let server = Arc::new(Server::axum(router).await);
    let waiting = |limiter: &Limiter| {
        5 - limiter.usage(&facts! {}).wait().unwrap().limits().next().unwrap().outcome().remaining
    };
    let mut tasks = Vec::new();
    for number in 0..5 {
        let server = Arc::clone(&server);
        tasks.push(tokio::spawn(async move { server.get(&format!("/{number}"), &[]).await.status }));
        until(async || waiting(&limiter) == number + 1).await;
    }
    assert_eq!(server.get("/full", &[]).await.status, 429);
    // The third client disconnects.
    tasks.remove(2).abort();
    until(async || clock.next_wake().is_some()).await;
    clock.advance(Span::from_secs(1));
    for task in tasks {
        assert_eq!(task.await.unwrap(), 200);
    }
    let order = order.lock().unwrap().clone();
    assert_eq!(order.iter().filter(|path| *path != "/2").collect::<Vec<_>>(), ["/0", "/1", "/3", "/4"]);
}

#[tokio::test]
async fn request_above_the_longest_delay_is_refused() {
    let queue = Limit::new("queue", Quota::per_minute(1).burst(5)).algorithm(Algorithm::LeakyBucket);
    let (limiter, _) = limiter(vec![queue]);
    let (router, reached) = everything(RateLimitLayer::new(limiter).longest_delay(Duration::from_secs(30)));
    let server = Server::axum(router).await;
    assert_eq!(server.get("/", &[]).await.status, 200);
    assert_eq!(server.get("/", &[]).await.status, 429, "it would have to wait for a minute");
    assert_eq!(reached.count(), 1);
}

/// The slot is renewed at half its time to live.
#[tokio::test]
async fn slot_is_renewed_while_the_response_streams() {
    let (limiter, clock) = limiter(vec![Limit::new("exports", Quota::slots(1)).ttl(Duration::from_secs(60))]);
    let rounds = Arc::new(AtomicUsize::new(0));
    let handler = {
        let rounds = Arc::clone(&rounds);
        move || async move { Stream::response(&rounds, Gauge::default().enter()) }
    };
    let router = Router::new().route("/", get(handler)).layer(RateLimitLayer::new(limiter.clone()));
    let server = Arc::new(Server::axum(router).await);
    let holder = tokio::spawn({
        let server = Arc::clone(&server);
        async move { server.get("/", &[]).await.status }
    });
    let free = || limiter.usage(&facts! {}).wait().unwrap().limits().next().unwrap().outcome().remaining;
    for _ in 0..10 {
        // The renewal task sleeps for 30 s each time; ten times are five times the time to live.
        let half = clock.now() + Span::from_secs(30);
        until(async || clock.next_wake() == Some(half)).await;
        clock.set(half);
        assert_eq!(free(), 0);
    }
    rounds.fetch_add(1, Ordering::SeqCst);
    assert_eq!(holder.await.unwrap(), 200);
    until(async || free() == 1).await;
}
