//! Single flight over real sockets: what is shared, what is never shared, and what becomes of followers without a leader.

mod support;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::any;
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Frame;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use support::*;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tollkeeper::http::HttpSettings;
use tollkeeper::{Limit, Policy, Quota};
use tollkeeper_tower::single_flight::SharedResponse;
use tollkeeper_tower::{RateLimitLayer, SingleFlightLayer, SingleFlightRule};
use tower::{Layer, Service, ServiceExt};

const MIB: usize = 1 << 20;

type Headers = &'static [(&'static str, &'static str)];
type Respond = fn() -> Response<Body>;

/// A server whose handler answers only when the test opens it, so that requests are simultaneous.
struct Held {
    server: Server,
    layer: SingleFlightLayer,
    calls: Reached,
    open: Arc<Semaphore>,
}

impl Held {
    async fn new(
        layer: SingleFlightLayer,
        respond: impl Fn(&Request<Body>, usize) -> Response<Body> + Clone + Send + Sync + 'static,
    ) -> Held {
        let (router, calls, open) = held(respond);
        let server = Server::axum(router.layer(layer.clone())).await;
        Held { server, layer, calls, open }
    }

    fn send(&self, request: Request<Full<Bytes>>) -> JoinHandle<Answer> {
        tokio::spawn(send(self.server.address, request))
    }

    /// Waits until so many requests have called the handler, and so many wait for a leader.
    async fn until(&self, calls: usize, waiting: u64) {
        let state = || (self.calls.count(), self.layer.counts().waiting);
        until(async || state() == (calls, waiting)).await;
    }
}

/// The application of [`Held`], the count of calls, and the semaphore that opens it when it is closed.
fn held(
    respond: impl Fn(&Request<Body>, usize) -> Response<Body> + Clone + Send + Sync + 'static,
) -> (Router, Reached, Arc<Semaphore>) {
    let (calls, open) = (Reached::default(), Arc::new(Semaphore::new(0)));
    let handler = {
        let (calls, open) = (calls.clone(), Arc::clone(&open));
        move |request: Request<Body>| async move {
            let call = calls.increment();
            let _ = open.acquire().await;
            respond(&request, call)
        }
    };
    (Router::new().fallback(any(handler)), calls, open)
}

struct Answer {
    status: u16,
    headers: HeaderMap,
    /// An error if the connection broke.
    body: Result<Bytes, hyper::Error>,
}

async fn send(address: std::net::SocketAddr, request: Request<Full<Bytes>>) -> Answer {
    let stream = TokioIo::new(TcpStream::connect(address).await.expect("the server listens"));
    let (mut sender, connection) = http1::handshake(stream).await.expect("HTTP/1.1");
    tokio::spawn(connection.with_upgrades());
    let response = timeout(Duration::from_secs(60), sender.send_request(request)).await;
    let (head, body) = match response.expect("a response within a minute") {
        Ok(response) => response.into_parts(),
        Err(error) => return Answer { status: 0, headers: HeaderMap::new(), body: Err(error) },
    };
    let body = body.collect().await.map(http_body_util::Collected::to_bytes);
    Answer { status: head.status.as_u16(), headers: head.headers, body }
}

fn request(method: &str, headers: &[(&str, &str)], body: &str) -> Request<Full<Bytes>> {
    let mut builder = Request::builder().method(method).uri("/report?day=1").header("host", "test");
    for (name, value) in headers {
        builder = builder.header(*name, *value);
    }
    builder.body(Full::from(body.to_owned())).expect("valid")
}

fn get(headers: &[(&str, &str)]) -> Request<Full<Bytes>> {
    request("GET", headers, "")
}

fn layer() -> SingleFlightLayer {
    SingleFlightLayer::new([SingleFlightRule::new()]).expect("valid")
}

/// A body of these frames, of unknown length.
struct Frames(VecDeque<Result<Frame<Bytes>, io::Error>>);

impl hyper::body::Body for Frames {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        Poll::Ready(self.0.pop_front())
    }
}

fn streamed(frames: impl IntoIterator<Item = Result<Frame<Bytes>, io::Error>>) -> Body {
    Body::new(Frames(frames.into_iter().collect()))
}

fn data(len: usize) -> Result<Frame<Bytes>, io::Error> {
    Ok(Frame::data(Bytes::from(vec![b'x'; len])))
}

/// Sends 100 equal requests at once and returns how many reached the handler. All must get the same response.
async fn calls_of_100(case: &str, held: &Held, request: impl Fn() -> Request<Full<Bytes>>) -> usize {
    let requests: Vec<_> = (0..100).map(|_| held.send(request())).collect();
    until(async || held.calls.count() as u64 + held.layer.counts().waiting == 100).await;
    held.open.close();
    let mut first: Option<(u16, Bytes)> = None;
    for request in requests {
        let answer = request.await.expect("no panic");
        let answer = (answer.status, answer.body.expect("the connection does not break"));
        let first = first.get_or_insert_with(|| answer.clone());
        assert!(answer == *first, "{case}: {} and {} bytes", answer.1.len(), first.1.len());
    }
    held.calls.count()
}

/// One call for 100 simultaneous requests with this response.
async fn check_shared(case: &str, rule: SingleFlightRule, request: Request<Full<Bytes>>, respond: Respond) {
    let layer = SingleFlightLayer::new([rule]).expect("valid");
    let held = Held::new(layer, move |_, _| respond()).await;
    assert_eq!(calls_of_100(case, &held, || request.clone()).await, 1, "{case}");
    let counts = held.layer.counts();
    assert_eq!((counts.led, counts.shared, counts.released), (1, 99, 0), "{case}");
}

fn ok() -> Response<Body> {
    Response::new(Body::from("report"))
}

fn with(headers: Headers) -> Response<Body> {
    let mut response = ok();
    for (name, value) in headers {
        response.headers_mut().append(*name, value.parse().expect("valid"));
    }
    response
}

fn status(status: u16) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::from_u16(status).expect("valid");
    response
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundred_simultaneous_requests_make_one_call() {
    let rule = SingleFlightRule::new;
    check_shared("GET", rule(), get(&[]), ok).await;
    check_shared("HEAD", rule(), request("HEAD", &[], ""), ok).await;
    check_shared("203", rule(), get(&[]), || status(203)).await;
    check_shared("204", rule(), get(&[]), || status(204)).await;
    check_shared("301", rule(), get(&[]), || status(301)).await;
    check_shared("404", rule(), get(&[]), || status(404)).await;
    check_shared("410", rule(), get(&[]), || status(410)).await;
    check_shared("cache-control", rule(), get(&[]), || with(&[("cache-control", "no-cache, max-age=5")]))
        .await;
    check_shared("vary", rule(), get(&[]), || with(&[("vary", "accept-encoding"), ("vary", "Host")])).await;
    let by_language = rule().by("header.accept-language");
    let request = get(&[("accept-language", "de")]);
    check_shared("vary by a keyed header", by_language, request, || with(&[("vary", "Accept-Language")]))
        .await;
    let by_caller = rule().by("header.authorization");
    check_shared("keyed caller", by_caller, get(&[("authorization", "Bearer a")]), ok).await;
    check_shared("keyed cookie", rule().by("cookie.session"), get(&[("cookie", "session=a; b=c")]), ok).await;
    check_shared("1 MiB", rule(), get(&[]), || Response::new(Body::from(vec![b'x'; MIB]))).await;
    check_shared("1 MiB streamed", rule(), get(&[]), || {
        Response::new(streamed([data(MIB / 2), data(MIB / 2)]))
    })
    .await;
    check_shared("condition", rule().when("path", "/rep*"), get(&[]), ok).await;
}

/// All 100 requests are in the handler at the same time: none waits for another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn some_requests_are_never_shared() {
    let rows: &[(&str, Headers, &str)] = &[
        ("POST", &[], "body"),
        ("POST", &[], ""),
        ("PUT", &[], ""),
        ("OPTIONS", &[], ""),
        ("GET", &[], "body"),
        ("GET", &[("range", "bytes=0-1")], ""),
        ("GET", &[("if-none-match", "\"a\"")], ""),
        ("GET", &[("if-modified-since", "Wed, 18 Nov 2026 00:00:00 GMT")], ""),
        ("GET", &[("if-range", "\"a\"")], ""),
        ("GET", &[("connection", "upgrade"), ("upgrade", "websocket")], ""),
        ("GET", &[("cache-control", "max-age=0, No-Cache")], ""),
        ("GET", &[("cache-control", "no-store")], ""),
        ("GET", &[("pragma", "no-cache")], ""),
        ("GET", &[("authorization", "Bearer a")], ""),
        ("GET", &[("cookie", "session=a")], ""),
        // A header that a fact is read from.
        ("GET", &[("x-api-key", "a")], ""),
    ];
    for (method, headers, body) in rows {
        let http =
            HttpSettings { facts: vec![fact("api_key", "header.x-api-key")], ..HttpSettings::default() };
        let layer = SingleFlightLayer::with_http([SingleFlightRule::new()], http).expect("valid");
        let held = Held::new(layer, |_, _| ok()).await;
        let case = format!("{method} {headers:?}");
        assert_eq!(calls_of_100(&case, &held, || request(method, headers, body)).await, 100, "{case}");
        assert_eq!(held.layer.counts().led, 0, "{case}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn some_responses_are_never_shared() {
    let rows: &[(&str, Respond)] = &[
        ("201", || status(201)),
        ("206", || status(206)),
        ("302", || status(302)),
        ("304", || status(304)),
        ("401", || status(401)),
        ("429", || status(429)),
        ("500", || status(500)),
        ("503", || status(503)),
        ("set-cookie", || with(&[("set-cookie", "session=a")])),
        ("private", || with(&[("cache-control", "max-age=5"), ("cache-control", "Private")])),
        ("private fields", || with(&[("cache-control", "private=\"x-user\"")])),
        ("no-store", || with(&[("cache-control", "no-store")])),
        ("vary: cookie", || with(&[("vary", "Accept-Encoding, Cookie")])),
        ("vary: *", || with(&[("vary", "*")])),
        ("event stream", || with(&[("content-type", "text/event-stream; charset=utf-8")])),
        ("more than 1 MiB", || Response::new(Body::from(vec![b'x'; MIB + 1]))),
        ("more than 1 MiB streamed", || Response::new(streamed([data(MIB / 2), data(MIB / 2), data(1)]))),
        ("trailers", || Response::new(streamed([data(5), Ok(Frame::trailers(HeaderMap::new()))]))),
    ];
    for (case, respond) in rows {
        let respond = *respond;
        let held = Held::new(layer(), move |_, _| respond()).await;
        assert_eq!(calls_of_100(case, &held, || get(&[])).await, 100, "{case}");
        let counts = held.layer.counts();
        assert_eq!((counts.led, counts.shared, counts.released), (1, 0, 99), "{case}");
    }
}

/// Requests that differ in any part of the key do not wait for one another. Raw paths differ even if limits would
/// normalise them to the same path, because servers may respond differently.
#[tokio::test]
async fn different_requests_are_not_shared() {
    let held = Held::new(layer(), |_, _| ok()).await;
    let same = [
        ("GET", "/report", "host", "test"),
        ("HEAD", "/report", "host", "test"),
        ("GET", "/report", "host", "other"),
        ("GET", "/report", "host", "test:81"),
        ("GET", "/report", "accept-encoding", "gzip"),
        ("GET", "/report", "x-forwarded-proto", "https"),
        ("GET", "/report", "x-forwarded-host", "public.test"),
        ("GET", "/report", "x-forwarded-prefix", "/other"),
        ("GET", "/report", "x-original-url", "/other"),
        ("GET", "/report", "x-http-method-override", "DELETE"),
        ("GET", "/report", "accept", "application/json"),
        ("GET", "/report", "accept-language", "de"),
        ("GET", "/report", "origin", "https://other.test"),
        ("GET", "/report/", "host", "test"),
        ("GET", "/Report", "host", "test"),
        ("GET", "//report", "host", "test"),
        ("GET", "/report;a", "host", "test"),
        ("GET", "/%72eport", "host", "test"),
        ("GET", "/report?", "host", "test"),
        ("GET", "/report?a=1&b=2", "host", "test"),
        ("GET", "/report?b=2&a=1", "host", "test"),
    ];
    let requests: Vec<_> = same
        .iter()
        .map(|(method, uri, name, value)| {
            let builder = Request::builder().method(*method).uri(*uri).header(*name, *value);
            let builder = if *name == "host" { builder } else { builder.header("host", "test") };
            held.send(builder.body(Full::default()).expect("valid"))
        })
        .collect();
    held.until(same.len(), 0).await;
    held.open.close();
    for request in requests {
        assert_eq!(request.await.expect("no panic").status, 200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follower_of_another_user_never_sees_the_body() {
    let rule = SingleFlightRule::new().by("header.authorization");
    let layer = SingleFlightLayer::new([rule]).expect("valid");
    // The response is the caller's own.
    let held = Held::new(layer, |request, _| {
        let caller = request.headers().get("authorization").map_or(&[][..], |value| value.as_bytes());
        Response::new(Body::from(Bytes::copy_from_slice(caller)))
    })
    .await;
    let callers = ["Bearer ann", "Bearer bob", "Basic Ym9i", "bearer bob"];
    let requests: Vec<_> = (0..100)
        .map(|number| {
            let caller = callers[number % callers.len()];
            (caller, held.send(get(&[("authorization", caller)])))
        })
        .collect();
    held.until(callers.len(), 96).await;
    held.open.close();
    for (caller, request) in requests {
        assert_eq!(request.await.expect("no panic").body.expect("complete"), caller);
    }
    assert_eq!(held.calls.count(), callers.len());
}

/// A header that a limit reads identifies a caller, also after the limits were replaced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_that_limits_read_are_never_mixed() {
    let by_key = || vec![Limit::new("keys", Quota::per_day(1_000)).by("header.x-api-key")];
    let by_plan = || vec![Limit::new("plans", Quota::per_day(1_000)).when("header.x-plan", "free")];
    let keyed = SingleFlightRule::new().by("header.x-api-key");
    for (case, rule, limits, replaced, calls) in [
        ("no limit", SingleFlightRule::new(), Vec::new(), None, 1),
        ("a limit", SingleFlightRule::new(), by_key(), None, 2),
        ("a condition", SingleFlightRule::new(), by_plan(), None, 2),
        ("a limit that was replaced", SingleFlightRule::new(), Vec::new(), Some(by_key()), 2),
        ("a rule with the header", keyed, by_key(), None, 1),
    ] {
        let (limiter, _) = limiter(limits);
        let layer = SingleFlightLayer::new([rule]).expect("valid").with_limiter(limiter.clone());
        let held = Held::new(layer, |_, _| ok()).await;
        if let Some(limits) = replaced {
            limiter.replace_policy(Policy::new(limits).expect("valid"));
        }
        let headers = [("x-api-key", "ann"), ("x-plan", "pro")];
        let requests = [held.send(get(&headers)), held.send(get(&headers))];
        held.until(calls, 2 - calls as u64).await;
        held.open.close();
        for request in requests {
            assert_eq!(request.await.expect("no panic").status, 200, "{case}");
        }
    }
}

/// All followers call the handler before any of them is answered: there is no convoy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_of_a_client_that_leaves_make_their_own_calls() {
    let held = Held::new(layer(), |_, _| ok()).await;
    let mut leader = TcpStream::connect(held.server.address).await.expect("the server listens");
    leader.write_all(b"GET /report?day=1 HTTP/1.1\r\nhost: test\r\n\r\n").await.expect("it reads");
    held.until(1, 0).await;
    let followers: Vec<_> = (0..99).map(|_| held.send(get(&[]))).collect();
    held.until(1, 99).await;
    drop(leader);
    held.until(100, 0).await;
    held.open.close();
    for follower in followers {
        let answer = follower.await.expect("no panic");
        assert_eq!((answer.status, &answer.body.expect("complete")[..]), (200, &b"report"[..]));
    }
    let counts = held.layer.counts();
    assert_eq!((counts.led, counts.shared, counts.released), (1, 0, 99));
}

/// The leader gets the broken body, its followers get responses of their own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_of_a_broken_response_make_their_own_calls() {
    let held = Held::new(layer(), |_, call| match call {
        1 => Response::new(streamed([data(5), Err(io::Error::other("the upstream died"))])),
        _ => ok(),
    })
    .await;
    let leader = held.send(get(&[]));
    held.until(1, 0).await;
    let followers: Vec<_> = (0..99).map(|_| held.send(get(&[]))).collect();
    held.until(1, 99).await;
    held.open.close();
    assert!(leader.await.expect("no panic").body.is_err());
    for follower in followers {
        assert_eq!(follower.await.expect("no panic").body.expect("complete"), "report");
    }
    assert_eq!(held.calls.count(), 100);
}

#[tokio::test]
async fn nothing_outlives_the_flight() {
    let held = Held::new(layer(), |_, call| Response::new(Body::from(call.to_string()))).await;
    held.open.close();
    for call in 1..=3 {
        let answer = held.send(get(&[])).await.expect("no panic");
        assert_eq!(answer.body.expect("complete"), call.to_string());
    }
}

/// After a reload, requests are read by other rules.
#[tokio::test]
async fn reloaded_layer_keeps_counts_but_joins_no_earlier_flight() {
    let (router, calls, open) = held(|_, _| ok());
    let earlier = layer();
    let later = layer().continuing(&earlier);
    let first = tokio::spawn(router.clone().layer(earlier.clone()).oneshot(get(&[])));
    until(async || calls.count() == 1).await;
    let second = tokio::spawn(router.layer(later.clone()).oneshot(get(&[])));
    until(async || calls.count() == 2).await;
    open.close();
    for request in [first, second] {
        assert_eq!(request.await.expect("no panic").expect("infallible").status(), 200);
    }
    assert_eq!((earlier.counts().led, later.counts().led), (2, 2));
}

/// Of 20 simultaneous requests of one user, 10 pass the limit. They share one call, and each has its own headers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_are_charged_by_their_own_limits() {
    let (limiter, _) = limiter(vec![Limit::new("per-user", Quota::per_minute(10)).by("header.x-user")]);
    let (router, calls, open) = held(|_, _| ok());
    let single_flight = layer();
    let router = router.layer(single_flight.clone()).layer(RateLimitLayer::new(limiter));
    let server = Server::axum(router).await;
    let requests: Vec<_> =
        (0..20).map(|_| tokio::spawn(send(server.address, get(&[("x-user", "ann")])))).collect();
    until(async || single_flight.counts().waiting == 9).await;
    open.close();
    let (mut remaining, mut refused) = (Vec::new(), 0);
    for request in requests {
        let answer = request.await.expect("no panic");
        match answer.status {
            200 => remaining.push(answer.headers["x-ratelimit-remaining"].to_str().expect("text").to_owned()),
            _ => refused += 1,
        }
    }
    remaining.sort_unstable();
    assert_eq!(remaining, (0..10).map(|left| left.to_string()).collect::<Vec<_>>());
    assert_eq!((calls.count(), refused), (1, 10));
}

/// A service that, like a concurrency limit, reserves a place when it is polled for readiness.
#[derive(Clone)]
struct Reserving {
    places: Reached,
    open: Arc<Semaphore>,
}

impl Service<Request<Full<Bytes>>> for Reserving {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.places.increment();
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Full<Bytes>>) -> Self::Future {
        let open = Arc::clone(&self.open);
        Box::pin(async move {
            let _ = open.acquire().await;
            Ok(ok())
        })
    }
}

#[tokio::test]
async fn followers_take_no_place_in_the_service() {
    let (places, open, layer) = (Reached::default(), Arc::new(Semaphore::new(0)), layer());
    let service = layer.layer(Reserving { places: places.clone(), open: Arc::clone(&open) });
    let requests: Vec<_> = (0..10).map(|_| tokio::spawn(service.clone().oneshot(get(&[])))).collect();
    until(async || layer.counts().waiting == 9).await;
    open.close();
    let mut shared = 0;
    for request in requests {
        let response = request.await.expect("no panic").expect("infallible");
        shared += usize::from(response.extensions().get::<SharedResponse>().is_some());
    }
    assert_eq!((places.count(), shared), (1, 9));
}

/// A body of the bytes that a test sends.
struct Channel(mpsc::Receiver<Bytes>);

impl hyper::body::Body for Channel {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}

/// A body whose end takes longer than a leader may be held back: the leader gets the beginning after 10 s.
#[tokio::test(start_paused = true)]
async fn slow_body_is_streamed_to_the_leader() {
    let (sender, receiver) = mpsc::channel(1);
    let bodies = [Body::new(Channel(receiver)), Body::from("own")];
    let bodies = Arc::new(Mutex::new(VecDeque::from(bodies)));
    let respond = move |_: Request<Full<Bytes>>| {
        let body = bodies.lock().expect("no panic").pop_front().expect("two calls");
        async move { Ok::<_, Infallible>(Response::new(body)) }
    };
    let service = layer().layer(tower::service_fn(respond));
    sender.send(Bytes::from("begin")).await.expect("the body is read");
    let started = Instant::now();
    let (leader, follower) =
        tokio::join!(service.clone().oneshot(get(&[])), service.clone().oneshot(get(&[])));
    assert_eq!(started.elapsed().as_secs(), 10);
    let mut body = leader.expect("infallible").into_body();
    let begin = body.frame().await.expect("a frame").expect("data").into_data().expect("data");
    assert_eq!(begin, "begin");
    sender.send(Bytes::from("end")).await.expect("the body is read");
    drop(sender);
    assert_eq!(body.collect().await.expect("complete").to_bytes(), "end");
    assert_eq!(
        follower.expect("infallible").into_body().collect().await.expect("complete").to_bytes(),
        "own"
    );
}
