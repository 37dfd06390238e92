//! A request whose decision is not needed later has its headers written before the handler runs. The response must not
//! differ: the same requests go to two layers, one of which keeps the decision because it has a hook that does nothing.

mod support;

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use support::*;
use tollkeeper::http::{ClientAddress, EncodedSlashes, HeaderDialect, HttpFact};
use tollkeeper::{
    Algorithm, Allowance, Charge, DecidedToll, Decision, Limit, Limiter, ManualClock, Missing, Mode,
    Observer, Quota, Span, StatusSet,
};
use tollkeeper_tests::cases::Random;
use tollkeeper_tower::{PeerAddress, RateLimit, RateLimitLayer};
use tower::{Layer as _, Service};

/// Says how often it was called, and whether it was given a receipt.
#[derive(Clone, Default)]
struct Handler(Arc<AtomicUsize>);

impl<B> Service<Request<B>> for Handler {
    type Response = Response<Empty<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Empty<Bytes>>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let calls = self.0.fetch_add(1, Relaxed) + 1;
        let receipt = request.extensions().get::<Charge>().is_some();
        let response = Response::builder().header("x-calls", calls).header("x-receipt", receipt.to_string());
        ready(Ok(response.body(Empty::new()).expect("a response")))
    }
}

/// What a client gets: status, headers in order, body.
type Got = (StatusCode, Vec<(String, HeaderValue)>, Bytes);

fn ask(service: &mut RateLimit<Handler>, request: Request<Empty<Bytes>>) -> Got {
    let mut context = Context::from_waker(Waker::noop());
    // It is always ready.
    let Poll::Ready(Ok(response)) = pin!(service.call(request)).poll(&mut context) else {
        panic!("nothing has to be waited for")
    };
    let (parts, body) = response.into_parts();
    let Poll::Ready(Ok(body)) = pin!(body.collect()).poll(&mut context) else { panic!("all of it is there") };
    let headers = parts.headers.iter().map(|(name, value)| (name.to_string(), value.clone())).collect();
    (parts.status, headers, body.to_bytes())
}

/// A limit by one fact, of any kind that an admission needs nothing else for, or almost.
fn limit(random: &mut Random) -> Limit {
    let quota = Quota::per(1 + random.within(0, 4), Span::from_millis(1 + random.within(0, 20_000)).into());
    let algorithm = Algorithm::ALL[random.below(6)];
    let quota = match algorithm {
        Algorithm::TokenBucket => quota.burst(1 + random.within(0, 4)),
        _ => quota,
    };
    let mut limit = match algorithm {
        Algorithm::Concurrency => Limit::new("lone", Quota::slots(2)),
        _ if random.below(20) == 0 => Limit::new("lone", Allowance::Nothing).algorithm(algorithm),
        _ => Limit::new("lone", quota).algorithm(algorithm),
    };
    limit = limit.by(["ip", "user", "header.x-user", "path", "token"][random.below(5)]);
    if algorithm == Algorithm::FixedWindow && random.below(2) == 0 {
        limit = limit.stagger();
    }
    match random.below(12) {
        0 => limit.mode(Mode::Shadow),
        1 => limit.mode(Mode::Off),
        2 => limit.hidden(),
        3 => limit.missing(Missing::Deny),
        4 => limit.when("path", "/a*"),
        5 => limit.allow("192.0.2.1"),
        _ => limit,
    }
}

/// The layer of a limiter under a clock of its own.
fn layer(
    limit: Limit,
    dialects: &[HeaderDialect],
    costs: bool,
    slashes: EncodedSlashes,
) -> (RateLimitLayer, ManualClock) {
    let (limiter, hand) = limiter(vec![limit]);
    let mut http = behind_proxies(ClientAddress::XForwardedFor);
    http.facts = vec![HttpFact { hash: true, ..fact("token", "header.x-other") }];
    http.encoded_slashes = slashes;
    let mut layer = RateLimitLayer::new(limiter)
        .http(http)
        .headers(dialects.iter().copied())
        .draw(|| 0)
        // No delays: the manual clock would have to be advanced meanwhile.
        .longest_delay(Span::ZERO)
        .fact("ip", |parts| parts.headers.get("x-ip")?.to_str().ok().map(str::to_owned))
        .fact("user", |parts| parts.headers.get("x-own")?.to_str().ok().map(str::to_owned))
        .fact("user", |parts| parts.headers.get("x-other")?.to_str().ok().map(str::to_owned));
    if costs {
        layer = layer.cost(|parts| parts.uri.path().len() as u64 - 1);
    }
    (layer, hand)
}

fn request(random: &mut Random) -> Request<Empty<Bytes>> {
    let any = |random: &mut Random, all: &[&str]| all[random.below(all.len())].to_owned();
    let path = any(random, &["/", "/a", "/ab", "/a/../b", "/b%41", "/a%2Fb", "/a/..%2Fb", "/c;d"]);
    let mut request = Request::new(Empty::new());
    *request.uri_mut() = path.parse().expect("a path");
    let peers = ["192.0.2.1", "::ffff:192.0.2.1", "192.0.2.255", "10.0.0.1", "2001:db8::1", "2001:db8::2"];
    if random.below(20) > 0 {
        let peer: IpAddr = any(random, &peers).parse().expect("an address");
        request.extensions_mut().insert(PeerAddress(SocketAddr::new(peer, 40_000)));
    }
    let long = "x".repeat(1_025);
    let values = ["alice", "bob", "", "192.0.2.1", "ä", "\u{7f}", &long, "10.0.0.7"];
    for name in ["x-user", "x-own", "x-other", "x-ip", "x-forwarded-for"] {
        let value = any(random, &values);
        if let (0, Ok(value)) = (random.below(3), HeaderValue::from_bytes(value.as_bytes())) {
            if random.below(10) == 0 {
                request.headers_mut().append(name, value.clone());
            }
            request.headers_mut().append(name, value);
        }
    }
    if random.below(30) == 0 {
        request.headers_mut().append("x_user", HeaderValue::from_static("twin"));
    }
    request
}

#[test]
fn fast_path_matches_general_path() {
    let mut random = Random::new(7);
    let mut statuses = std::collections::BTreeMap::<u16, u32>::new();
    for _ in 0..2_000 {
        let (limit, costs) = (limit(&mut random), random.below(3) == 0);
        let dialects: Vec<HeaderDialect> = match random.below(4) {
            0 => vec![],
            1 => vec![HeaderDialect::XRateLimit],
            2 => vec![HeaderDialect::Ietf, HeaderDialect::XRateLimit],
            _ => vec![HeaderDialect::ALL[random.below(5)]],
        };
        let slashes = match random.below(4) {
            0 => EncodedSlashes::Refuse,
            1 => EncodedSlashes::Keep,
            _ => EncodedSlashes::Both,
        };
        let (short, hand) = layer(limit.clone(), &dialects, costs, slashes);
        let (long, other_hand) = layer(limit.clone(), &dialects, costs, slashes);
        let mut short = short.layer(Handler::default());
        let mut long = long.on_response(|_, _| {}).layer(Handler::default());
        for _ in 0..20 {
            let request = request(&mut random);
            let got = ask(&mut short, request.clone());
            assert_eq!(got, ask(&mut long, request.clone()), "{limit:?} {dialects:?} {request:?}");
            *statuses.entry(got.0.as_u16()).or_default() += 1;
            let pause = Span::from_micros(random.within(0, 3_000_000));
            hand.advance(pause);
            other_hand.advance(pause);
        }
    }
    // The sample covers every outcome: 400 is an invalid fact or cost, 500 an unknown peer.
    let often = |status| statuses.get(&status).copied().unwrap_or(0);
    assert!(often(200) > 5_000 && often(429) > 3_000 && often(400) > 100 && often(500) > 50, "{statuses:?}");
}

/// Counts recorded decisions.
#[derive(Debug, Default)]
struct Counts(AtomicUsize);

impl Observer for Counts {
    fn record(&self, _: &DecidedToll) {
        self.0.fetch_add(1, Relaxed);
    }
}

fn two_an_hour() -> (Limiter, ManualClock) {
    limiter(vec![Limit::new("per-user", Quota::per_hour(2)).by("user")])
}

fn by_user(limiter: &Limiter) -> RateLimitLayer {
    let user = |parts: &http::request::Parts| Some(parts.headers.get("x-user")?.to_str().ok()?.to_owned());
    RateLimitLayer::new(limiter.clone()).fact("user", user)
}

fn of(user: &str) -> Request<Empty<Bytes>> {
    Request::builder().header("x-user", user).body(Empty::new()).expect("a request")
}

#[test]
fn observer_records_every_request() {
    let (limiter, _) = two_an_hour();
    let mut service = by_user(&limiter).layer(Handler::default());
    assert_eq!(ask(&mut service, of("alice")).0, 200);
    let counts = Arc::new(Counts::default());
    assert!(limiter.observe(Arc::clone(&counts) as _));
    assert_eq!(ask(&mut service, of("alice")).0, 200);
    assert_eq!(ask(&mut service, of("alice")).0, 429);
    assert_eq!(counts.0.load(Relaxed), 2);
}

#[test]
fn hooks_charges_and_refunds_get_the_decision() {
    let (limiter, _) = two_an_hour();
    let seen = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&seen);
    let count = move |_: &Decision, _: &mut http::response::Parts| {
        counter.fetch_add(1, Relaxed);
    };
    let mut hooked = by_user(&limiter).on_response(count).layer(Handler::default());
    let statuses = [(); 3].map(|()| ask(&mut hooked, of("alice")).0.as_u16());
    assert_eq!((statuses, seen.load(Relaxed)), ([200, 200, 429], 3));

    let mut settling = by_user(&limiter).hand_over_charge().layer(Handler::default());
    let (_, headers, _) = ask(&mut settling, of("bob"));
    assert!(headers.contains(&("x-receipt".to_owned(), HeaderValue::from_static("true"))), "{headers:?}");

    let (limiter, _) = support::limiter(vec![
        Limit::new("per-user", Quota::per_hour(2)).by("user").refund_when(StatusSet::of([200])),
    ]);
    let mut generous = by_user(&limiter).layer(Handler::default());
    (0..10).for_each(|_| assert_eq!(ask(&mut generous, of("alice")).0, 200));
}

#[test]
fn replaced_limits_apply_to_the_next_request() {
    let (limiter, _) = two_an_hour();
    let mut service = by_user(&limiter).layer(Handler::default());
    assert_eq!(ask(&mut service, of("alice")).0, 200);
    let strict = Limit::new("per-user", Quota::per_hour(1)).by("user");
    limiter.replace(vec![strict.clone()]).expect("valid");
    assert_eq!(ask(&mut service, of("alice")).0, 429, "what was charged counts");
    limiter.replace(vec![strict, Limit::new("all", Quota::per_hour(1))]).expect("valid");
    assert_eq!(ask(&mut service, of("bob")).0, 200);
    assert_eq!(ask(&mut service, of("carol")).0, 429, "there are two limits now");
}

/// A fact may be computed by a call to a service behind another layer.
#[test]
fn fact_closure_can_call_another_layer() {
    let (inner, _) = two_an_hour();
    let (outer, _) = limiter(vec![Limit::new("per-ip", Quota::per_hour(9)).by("known")]);
    let service = by_user(&inner).layer(Handler::default());
    let known = move |parts: &http::request::Parts| {
        let user = parts.headers.get("x-user")?.to_str().ok()?;
        Some(ask(&mut service.clone(), of(user)).0.to_string())
    };
    let mut service = RateLimitLayer::new(outer).fact("known", known).layer(Handler::default());
    for _ in 0..5 {
        assert_eq!(ask(&mut service, of("alice")).0, 200);
    }
    let (_, headers, _) = ask(&mut service, of("alice"));
    let remaining = headers.iter().find(|(name, _)| name == "x-ratelimit-remaining").expect("it is told");
    assert_eq!(remaining.1, "5", "two were `200 OK`, four `429 Too Many Requests`");
}
