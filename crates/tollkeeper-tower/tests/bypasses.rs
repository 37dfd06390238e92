//! Known bypasses of other rate limiters, one test each, over real sockets. `docs/security.md` lists them.

mod support;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll};

use axum::Router;
use axum::routing::{any, post};
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body::{Body, Frame};
use support::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tollkeeper::http::{ClientAddress, EncodedSlashes, HttpSettings, Normalization};
use tollkeeper::{Algorithm, Limit, Missing, Quota, Span, StatusSet};
use tollkeeper_tower::RateLimitLayer;
use tower::ServiceExt;

/// Two requests an hour per address.
fn per_ip() -> Vec<Limit> {
    vec![Limit::new("per-ip", Quota::per_hour(2)).by("ip")]
}

#[tokio::test]
async fn leftmost_x_forwarded_for_is_ignored() {
    let (server, _) = serve(per_ip(), behind_proxies(ClientAddress::XForwardedFor)).await;
    let mut admitted = 0;
    for forged in 0..10 {
        let hops = format!("198.51.100.{forged}, 203.0.113.9, 10.0.0.2");
        admitted += usize::from(server.get("/", &[("x-forwarded-for", &hops)]).await.status == 200);
    }
    assert_eq!(admitted, 2, "all of them are 203.0.113.9");
}

#[tokio::test]
async fn forwarding_headers_of_untrusted_peers_are_ignored() {
    let (server, _) = serve(per_ip(), HttpSettings::default()).await;
    let mut admitted = 0;
    for forged in 0..10 {
        let address = format!("198.51.100.{forged}");
        let forwarded = format!("for={address}");
        let headers = [("x-forwarded-for", &*address), ("forwarded", &*forwarded), ("x-real-ip", &*address)];
        admitted += usize::from(server.get("/", &headers).await.status == 200);
    }
    assert_eq!(admitted, 2);
}

#[tokio::test]
async fn client_cannot_choose_its_address_header() {
    let (server, _) = serve(per_ip(), behind_proxies(ClientAddress::XForwardedFor)).await;
    let mut admitted = 0;
    for forged in 0..10 {
        let forwarded = format!("for=198.51.100.{forged}");
        let headers = [("x-forwarded-for", "203.0.113.9"), ("forwarded", &*forwarded)];
        admitted += usize::from(server.get("/", &headers).await.status == 200);
    }
    assert_eq!(admitted, 2);
}

#[tokio::test]
async fn mapped_trusted_network_does_not_trust_the_internet() {
    assert!("::ffff:10.0.0.0/8".parse::<tollkeeper_core::net::Network>().is_err());
    // With a correct prefix length it is exactly the IPv4 network.
    let mut settings = behind_proxies(ClientAddress::XForwardedFor);
    settings.trusted_proxies = vec!["127.0.0.1".parse().unwrap(), "::ffff:10.0.0.0/104".parse().unwrap()];
    let (server, _) = serve(per_ip(), settings).await;
    assert_eq!(server.admitted(5, "/", &[("x-forwarded-for", "1.1.1.1, 11.0.0.1")]).await, 2);
    assert_eq!(server.admitted(5, "/", &[("x-forwarded-for", "2.2.2.2, 11.0.0.1")]).await, 0);
    assert_eq!(server.admitted(5, "/", &[("x-forwarded-for", "11.0.0.1, 10.9.9.9")]).await, 0);
}

#[tokio::test]
async fn ipv4_mapped_clients_have_separate_counts() {
    let (server, _) = serve(per_ip(), behind_proxies(ClientAddress::XForwardedFor)).await;
    for client in 1..=5 {
        let address = format!("::ffff:203.0.113.{client}");
        assert_eq!(server.admitted(3, "/", &[("x-forwarded-for", &address)]).await, 2, "{address}");
    }
}

#[tokio::test]
async fn ipv4_address_and_its_mapped_form_share_a_count() {
    let (server, _) = serve(per_ip(), behind_proxies(ClientAddress::XForwardedFor)).await;
    let spellings = ["203.0.113.9", "::ffff:203.0.113.9", "::ffff:cb00:7109", "[::ffff:203.0.113.9]:80"];
    let mut admitted = 0;
    for spelling in spellings {
        admitted += server.admitted(2, "/", &[("x-forwarded-for", spelling)]).await;
    }
    assert_eq!(admitted, 2);
}

#[tokio::test]
async fn addresses_of_one_ipv6_network_share_a_count() {
    let (server, _) = serve(per_ip(), behind_proxies(ClientAddress::XForwardedFor)).await;
    let mut admitted = 0;
    for host in 0..10 {
        let address = format!("2001:db8:1:2:{host}::{host}");
        admitted += server.admitted(1, "/", &[("x-forwarded-for", &address)]).await;
    }
    assert_eq!(admitted, 2);
    assert_eq!(
        server.admitted(3, "/", &[("x-forwarded-for", "2001:db8:1:3::1")]).await,
        2,
        "the next network"
    );
    let mut settings = behind_proxies(ClientAddress::XForwardedFor);
    settings.ipv6_prefix = 48;
    let (server, _) = serve(per_ip(), settings).await;
    assert_eq!(server.admitted(3, "/", &[("x-forwarded-for", "2001:db8:1:2::1")]).await, 2);
    assert_eq!(server.admitted(3, "/", &[("x-forwarded-for", "2001:db8:1:3::1")]).await, 0);
}

#[tokio::test]
async fn forwarded_ports_quotes_and_obfuscated_names_are_parsed() {
    let (server, _) = serve(per_ip(), behind_proxies(ClientAddress::Forwarded)).await;
    let spellings = [
        r#"for="[2001:db8::1]:4711""#,
        r#"For="[2001:db8:0::1]";proto=https"#,
        r#"for=unknown, for="[2001:db8::2]""#,
        r#"for="evil, for="[2001:db8::1]:_hidden", for=10.0.0.7"#,
    ];
    let mut admitted = 0;
    for spelling in spellings {
        admitted += server.admitted(1, "/", &[("forwarded", spelling)]).await;
    }
    assert_eq!(admitted, 2, "all of them are of 2001:db8::/64");
    // A client with an obfuscated name counts as the proxy that sent the header.
    assert_eq!(server.admitted(3, "/", &[("forwarded", "for=unknown")]).await, 2);
    assert_eq!(server.admitted(3, "/", &[("forwarded", "for=_hidden")]).await, 0);
}

#[tokio::test]
async fn spellings_of_a_path_share_a_route() {
    let limits = vec![Limit::new("login", Quota::per_hour(2)).by("route").when("route", "/login")];
    let routes = vec!["/login".to_owned(), "/api/*".to_owned()];
    let (server, _) = serve(limits, HttpSettings { routes, ..HttpSettings::default() }).await;
    let spellings = [
        "/login",
        "/LOGIN",
        "/login/",
        "//login",
        "/./login",
        "/x/../login",
        "/%6cogin",
        "/log%69n",
        "/%2e/login",
        "/x/%2e%2e/login",
        "/login;jsessionid=1",
        "/;x/login",
        "/x/..;/login",
        "/login?x=1",
        "/login//?",
    ];
    let mut admitted = 0;
    for spelling in spellings {
        admitted += server.admitted(1, spelling, &[]).await;
    }
    assert_eq!(admitted, 2);
    assert_eq!(server.admitted(3, "/other", &[]).await, 3, "only /login is limited");
}

#[tokio::test]
async fn spellings_of_a_path_share_a_count() {
    let (server, _) =
        serve(vec![Limit::new("per-path", Quota::per_hour(2)).by("path")], HttpSettings::default()).await;
    let mut admitted = 0;
    for spelling in ["/a/b", "//a/b", "/a/./b/", "/a/%62", "/a;x/b;y", "/c/../a/b", "/%61/b"] {
        admitted += server.admitted(1, spelling, &[]).await;
    }
    assert_eq!(admitted, 2);
    assert_eq!(server.admitted(3, "/A/b", &[]).await, 2, "paths are case-sensitive");
}

#[tokio::test]
async fn missing_key_skips_only_limits_that_allow_it() {
    let limits = vec![
        Limit::new("skip", Quota::per_hour(1)).by("header.a"),
        Limit::new("share", Quota::per_hour(1)).by("header.b").missing(Missing::Share).when("path", "/share"),
        Limit::new("deny", Quota::per_hour(1)).by("header.c").missing(Missing::Deny).when("path", "/deny"),
    ];
    let (server, _) = serve(limits, HttpSettings::default()).await;
    assert_eq!(server.admitted(3, "/", &[]).await, 3);
    assert_eq!(server.admitted(3, "/", &[("a", "")]).await, 3, "empty is absent");
    assert_eq!(server.admitted(3, "/", &[("a", "x")]).await, 1);
    assert_eq!(server.admitted(3, "/share", &[]).await, 1);
    assert_eq!(server.admitted(3, "/share", &[("b", "")]).await, 0);
    let response = server.get("/deny", &[]).await;
    assert_eq!((response.status, response.header("retry-after")), (429, None), "waiting does not help");
    assert_eq!(server.get("/deny", &[("c", "x")]).await.status, 200);
}

/// It is refused, not skipped, where a limit needs the field.
#[tokio::test]
async fn duplicate_field_is_refused() {
    let limits = vec![
        Limit::new("query", Quota::per_hour(1)).by("query.user").when("path", "/query"),
        Limit::new("body", Quota::per_hour(1)).by("body.user").when("path", "/body"),
    ];
    let (server, _) = serve(limits, HttpSettings::default()).await;
    for query in ["user=a&user=b", "user=a&%75ser=b", "user=&user"] {
        assert_eq!(server.get(&format!("/query?{query}"), &[]).await.status, 400, "{query}");
        assert_eq!(server.get(&format!("/other?{query}"), &[]).await.status, 200, "no limit needs it there");
    }
    assert_eq!(server.admitted(3, "/query?user=a", &[]).await, 1);
    let json = [("content-type", "application/json")];
    for (headers, body) in [
        (&json[..], r#"{"user":"a","user":"b"}"#),
        (&json, r#"{"user":"a","\u0075ser":"b"}"#),
        (&[], r#"{"user":"a","user":"b"}"#),
        (&[("content-type", "text/plain")], r#" {"user":"a","user":"b"}"#),
        (&[("content-type", "application/x-www-form-urlencoded")], "user=a&user=b"),
        (&json, r#"{"user":["a"]}"#),
        (&json, r#"{"user":"a""#),
        (&[("content-type", "application/json"), ("content-encoding", "gzip")], r#"{"user":"a"}"#),
    ] {
        assert_eq!(server.send("POST /body", headers, body).await.status, 400, "{headers:?} {body}");
        assert_eq!(server.send("POST /other", headers, body).await.status, 200, "{headers:?} {body}");
    }
}

/// Servers use the first line, the last one or all of them; the limiter cannot know which.
#[tokio::test]
async fn duplicate_identity_header_or_cookie_is_refused() {
    let limits = vec![
        Limit::new("key", Quota::per_hour(3)).by("header.x-api-key").when("path", "/key"),
        Limit::new("token", Quota::per_hour(3)).by("token").when("path", "/token"),
        Limit::new("session", Quota::per_hour(3)).by("cookie.sid").when("path", "/session"),
    ];
    let mut token = fact("token", "header.authorization");
    token.strip = Some("Bearer ".to_owned());
    let (server, _) = serve(limits, HttpSettings { facts: vec![token], ..HttpSettings::default() }).await;
    let mut refused = Vec::new();
    for junk in ["junk", "", "REAL"] {
        refused.push(("/key", [("x-api-key", "REAL".to_owned()), ("x-api-key", junk.to_owned())]));
        refused.push(("/key", [("x-api-key", "REAL".to_owned()), ("x_api_key", junk.to_owned())]));
        let bearer = |key: &str| ("authorization", format!("Bearer {key}"));
        refused.push(("/token", [bearer("REAL"), bearer(junk)]));
        refused.push(("/session", [("cookie", format!("sid={junk}; sid=REAL")), ("x", String::new())]));
        refused.push(("/session", [("cookie", "sid=REAL".to_owned()), ("cookie", format!("sid={junk}"))]));
    }
    for (path, headers) in &refused {
        let mut headers = headers.each_ref().map(|(name, value)| (*name, value.as_str()));
        for _ in 0..2 {
            let response = server.get(path, &headers).await;
            assert_eq!(response.status, 400, "{path} {headers:?}");
            assert_eq!(server.get("/other", &headers).await.status, 200, "no limit needs it there");
            headers.reverse();
        }
    }
    // Some servers treat `X_Api_Key` as the header, others ignore it.
    assert_eq!(server.get("/key", &[("X_Api_Key", "REAL")]).await.status, 400);
    for (path, header) in [
        ("/key", ("x-api-key", "REAL")),
        ("/token", ("authorization", "bearer\tREAL")),
        ("/session", ("cookie", "sid=REAL")),
    ] {
        assert_eq!(server.admitted(5, path, &[header]).await, 3, "nothing was charged before");
    }
}

#[tokio::test]
async fn spellings_of_one_cookie_share_a_count() {
    let limits = vec![Limit::new("session", Quota::per_hour(2)).by("cookie.sid")];
    let (server, _) = serve(limits, HttpSettings::default()).await;
    let mut admitted = 0;
    for cookie in [
        "sid=s:a-b",
        "sid=\"s:a-b\"",
        "sid=s%3Aa%2Db",
        "sid=\"s%3aa-b\"",
        "x=1;  sid = s:a-b",
        "$Version=1; sid=s:a-b",
    ] {
        let status = server.get("/", &[("cookie", cookie)]).await.status;
        assert!(matches!(status, 200 | 429), "{cookie}: {status}");
        admitted += usize::from(status == 200);
    }
    // HTTP/2 may send each cookie in a separate header line.
    admitted += server.admitted(1, "/", &[("cookie", "x=1"), ("cookie", "sid=s:a-b")]).await;
    assert_eq!(admitted, 2);
    assert_eq!(server.get("/", &[("cookie", "sid=a,b")]).await.status, 400, "two cookies to some servers");
}

#[tokio::test]
async fn lines_of_a_header_declared_as_many_are_joined() {
    let mut groups = fact("groups", "header.x-groups");
    groups.many = true;
    let settings = HttpSettings { facts: vec![groups], ..HttpSettings::default() };
    let (server, _) = serve(vec![Limit::new("groups", Quota::per_hour(2)).by("groups")], settings).await;
    assert_eq!(server.admitted(2, "/", &[("x-groups", "a"), ("x-groups", "b")]).await, 2);
    assert_eq!(server.admitted(2, "/", &[("x-groups", "a, b")]).await, 0, "one list in one line");
    assert_eq!(server.admitted(2, "/", &[("x-groups", "b"), ("x-groups", "a")]).await, 2);
    assert_eq!(server.get("/", &[("x-groups", "a"), ("x_groups", "b")]).await.status, 400);
}

#[tokio::test]
async fn encoded_slash_is_charged_to_limits_of_every_reading() {
    let limits = || vec![Limit::new("per-route", Quota::per_hour(2)).by("route")];
    let routes: Vec<String> =
        ["/login", "/api/login", "/projects/{id}", "/files/*"].iter().map(ToString::to_string).collect();
    let settings =
        |encoded_slashes| HttpSettings { routes: routes.clone(), encoded_slashes, ..HttpSettings::default() };
    // In each pair, some server reads the first path as the second.
    for (spelling, route) in [
        ("/api%2Flogin", "/api/login"),
        ("/api%5clogin", "/api/login"),
        ("/api\\login", "/api/login"),
        ("/api/login%2F", "/api/login"),
        ("/api/x%2F%2E%2E%2Flogin", "/api/login"),
        ("/x%5c..%5clogin", "/login"),
        ("/projects/a%2Fb", "/projects/1"),
        ("/projects/..%2Flogin", "/login"),
        ("/projects/..%2Flogin", "/projects/1"),
        ("/files/..%2Fx", "/files/1"),
        ("/files/../x", "/files/1"),
        ("/files/..;/x", "/files/1"),
    ] {
        let (server, _) = serve(limits(), settings(EncodedSlashes::Both)).await;
        assert_eq!(server.admitted(2, spelling, &[]).await, 2, "{spelling}");
        assert_eq!(server.admitted(2, route, &[]).await, 0, "{spelling} is {route} to some servers");
        let (server, _) = serve(limits(), settings(EncodedSlashes::Both)).await;
        assert_eq!(server.admitted(2, route, &[]).await, 2, "{route}");
        assert_eq!(server.admitted(2, spelling, &[]).await, 0, "{spelling} is {route} to some servers");
    }
    let (server, _) = serve(limits(), settings(EncodedSlashes::Decode)).await;
    assert_eq!(server.admitted(3, "/projects/..%2Flogin", &[]).await, 2);
    assert_eq!(server.admitted(3, "/login", &[]).await, 0, "the path is decoded, then resolved");
    assert_eq!(server.admitted(3, "/projects/1", &[]).await, 2, "no other route is charged");
    let (server, _) = serve(limits(), settings(EncodedSlashes::Keep)).await;
    assert_eq!(server.admitted(3, "/projects/..%2Flogin", &[]).await, 2);
    assert_eq!(server.admitted(3, "/projects/1", &[]).await, 0, "the path has one segment after `/projects`");
    assert_eq!(server.admitted(3, "/login", &[]).await, 2, "no other route is charged");
    let (server, _) = serve(limits(), settings(EncodedSlashes::Refuse)).await;
    for path in ["/x%2Fy", "/x%2fy", "/x%5Cy", "/x%5cy", "/x\\y"] {
        assert_eq!(server.get(path, &[]).await.status, 400, "{path}");
    }
    assert_eq!(server.admitted(3, "/login", &[]).await, 2);
}

/// Both the decoded path and the path as sent are charged.
#[tokio::test]
async fn encoded_slash_has_no_second_count() {
    let limits = || {
        vec![Limit::new("per-path", Quota::per_hour(2)).by("path"), Limit::new("all", Quota::per_hour(99))]
    };
    for limits in [limits(), limits().into_iter().take(1).collect()] {
        let (server, _) = serve(limits, HttpSettings::default()).await;
        assert_eq!(server.admitted(2, "/a%2Fb", &[]).await, 2);
        for path in ["/a/b", "/a%2fb", "/a%5Cb", "/x/../a%2Fb", "/n%2Fy/../../a/b"] {
            assert_eq!(server.admitted(2, path, &[]).await, 0, "{path}");
        }
        assert_eq!(server.admitted(2, "/n%2Fy/../b", &[]).await, 2, "a URL parser reads `/b`");
        assert_eq!(server.admitted(2, "/b", &[]).await, 0);
    }
}

/// A request is refused, refunded or held as one, whichever of its readings the limits apply to.
#[tokio::test]
async fn readings_of_a_path_are_one_request() {
    let routes = vec!["/login".to_owned(), "/projects/{id}".to_owned()];
    let settings = || HttpSettings { routes: routes.clone(), ..HttpSettings::default() };
    let both = "/projects/..%2Flogin";
    let limits = vec![
        Limit::new("login", Quota::per_hour(1)).when("route", "/login"),
        Limit::new("projects", Quota::per_hour(3)).when("route", "/projects/{id}"),
        Limit::new("all", Quota::per_hour(9)).deduct_when(StatusSet::of([500])),
    ];
    let (limiter, _) = limiter(limits);
    let (router, _) = everything(RateLimitLayer::new(limiter.clone()).http(settings()));
    let server = Server::axum(router).await;
    assert_eq!(server.admitted(4, both, &[]).await, 1, "`login` refuses");
    assert_eq!(server.admitted(9, "/projects/1", &[]).await, 2, "and a refusal charges nothing");
    let remaining = |name: &str| {
        let facts = tollkeeper::facts! { "route" => "/login" };
        limiter.usage(&facts).wait().unwrap().limit(name).unwrap().outcome().remaining
    };
    assert_eq!(
        (remaining("login"), remaining("all")),
        (0, 9),
        "a limit that applies to both readings is charged once, and refunded"
    );
    // A field must be readable even if only one reading needs it.
    for (route, other) in [("/login", "/projects/1"), ("/projects/{id}", "/login")] {
        let limits = vec![
            Limit::new("query", Quota::per_hour(1)).by("query.user").when("route", route),
            Limit::new("body", Quota::per_hour(1)).by("body.user").when("route", route),
        ];
        let (server, _) = serve(limits, settings()).await;
        assert_eq!(server.get(&format!("{both}?user=a&user=b"), &[]).await.status, 400, "{route}");
        assert_eq!(server.get(&format!("{other}?user=a&user=b"), &[]).await.status, 200, "{route}");
        assert_eq!(server.send(&format!("POST {both}"), &[], "user=a&user=b").await.status, 400, "{route}");
        assert_eq!(server.send(&format!("POST {other}"), &[], "user=a&user=b").await.status, 200, "{route}");
    }
}

#[tokio::test]
async fn slots_of_every_reading_are_taken_and_released() {
    let routes = vec!["/login".to_owned(), "/projects/{id}".to_owned()];
    let slots = |name: &str, route: &str| Limit::new(name, Quota::slots(1)).when("route", route);
    let limits = vec![slots("login", "/login"), slots("projects", "/projects/{id}")];
    let (limiter, _) = limiter(limits);
    let entered = std::sync::Arc::new(tokio::sync::Notify::new());
    let leave = std::sync::Arc::new(tokio::sync::Notify::new());
    let handler = {
        let (entered, leave) = (entered.clone(), leave.clone());
        move || async move {
            entered.notify_one();
            leave.notified().await;
        }
    };
    let settings = HttpSettings { routes, ..HttpSettings::default() };
    let layer = RateLimitLayer::new(limiter.clone()).http(settings);
    let server = std::sync::Arc::new(Server::axum(Router::new().fallback(any(handler)).layer(layer)).await);
    let first = tokio::spawn({
        let server = server.clone();
        async move { server.get("/projects/..%2Flogin", &[]).await.status }
    });
    entered.notified().await;
    assert_eq!(server.get("/login", &[]).await.status, 429);
    assert_eq!(server.get("/projects/1", &[]).await.status, 429);
    leave.notify_one();
    assert_eq!(first.await.expect("the server responds"), 200);
    let free = |route: &str| {
        let facts = tollkeeper::facts! { "route" => route };
        limiter.usage(&facts).wait().unwrap().limits().all(|limit| limit.outcome().remaining == 1)
    };
    until(async || free("/login") && free("/projects/{id}")).await;
}

/// It is refused, not skipped, where a limit needs a field of the body.
#[tokio::test]
async fn body_above_64_kib_is_refused() {
    let limits = vec![Limit::new("login", Quota::per_hour(5)).by("body.user").when("path", "/login")];
    let (server, _) = serve(limits, HttpSettings::default()).await;
    let body = |size: usize| format!("{{\"user\":\"a\",\"x\":\"{}\"}}", "x".repeat(size - 19));
    let json = [("content-type", "application/json")];
    assert_eq!(body(65_536).len(), 65_536);
    assert_eq!(server.send("POST /login", &json, &body(65_536)).await.status, 200);
    assert_eq!(server.send("POST /login", &json, &body(65_537)).await.status, 413);
    assert_eq!(
        server.send("POST /upload", &json, &body(1 << 20)).await.status,
        200,
        "no limit needs it there"
    );
}

/// A body without a length that is sent in chunks of 64 KiB, and counts the bytes that were read.
struct ChunkedBody {
    /// Chunks that have not been read yet.
    left: usize,
    /// Whether the client stops sending after the last chunk, without ending the body.
    stalls: bool,
    read: Arc<AtomicUsize>,
}

impl Body for ChunkedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.left {
            0 if self.stalls => Poll::Pending,
            0 => Poll::Ready(None),
            _ => {
                self.left -= 1;
                self.read.fetch_add(64 << 10, Relaxed);
                Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[b'x'; 64 << 10])))))
            }
        }
    }
}

/// With unread data the server would reset the connection of a client that is still sending, and the client could not
/// read the response.
#[tokio::test(start_paused = true)]
async fn rest_of_a_body_is_discarded_before_a_413() {
    let (limiter, _) = limiter(vec![Limit::new("login", Quota::per_hour(5)).by("body.user")]);
    let app = Router::new().route("/", post(|| async {})).layer(RateLimitLayer::new(limiter));
    for (left, stalls, expected) in [
        (32, false, 32),
        // At most 4 MiB after the two chunks that showed that the body is too large.
        (1_000, false, 2 + 64),
        // For a limited time: a client that stops sending gets its response.
        (32, true, 32),
    ] {
        let read = Arc::new(AtomicUsize::new(0));
        let body = axum::body::Body::new(ChunkedBody { left, stalls, read: Arc::clone(&read) });
        let response = app.clone().oneshot(Request::post("/").body(body).expect("a request")).await;
        assert_eq!(response.expect("the server responds").status(), 413);
        assert_eq!(read.load(Relaxed) >> 16, expected, "of {left} chunks");
    }
}

/// A client that sends `Expect: 100-continue` learns that its body is too large before it sends the body.
#[tokio::test]
async fn expect_100_continue_is_answered_with_413() {
    let limits = vec![Limit::new("login", Quota::per_hour(5)).by("body.user")];
    let (server, _) = serve(limits, HttpSettings::default()).await;
    let mut stream = TcpStream::connect(server.address).await.expect("the server listens");
    let head =
        "POST /login HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 70000\r\n\r\n";
    stream.write_all(head.as_bytes()).await.expect("the server reads");
    let mut response = [0; 12];
    stream.read_exact(&mut response).await.expect("the server responds");
    assert_eq!(&response, b"HTTP/1.1 413", "no `100 Continue`");
}

#[tokio::test]
async fn client_that_waits_retry_after_is_admitted() {
    for (count, secs) in [(1, 1), (3, 1), (7, 60), (1, 86_400)] {
        let quota = Quota::per(count, std::time::Duration::from_secs(secs));
        for algorithm in [Algorithm::TokenBucket, Algorithm::SlidingWindow, Algorithm::SlidingLog] {
            let (server, clock) =
                serve(vec![Limit::new("all", quota).algorithm(algorithm)], HttpSettings::default()).await;
            for _ in 0..20 {
                let response = server.get("/", &[]).await;
                clock.advance(Span::from_micros(1));
                if response.status == 200 {
                    continue;
                }
                let wait: u64 = response.header("retry-after").unwrap().parse().unwrap();
                assert!(wait >= 1);
                clock.advance(Span::from_secs(wait));
                assert_eq!(server.get("/", &[]).await.status, 200, "{count} per {secs} s, {algorithm}");
            }
        }
    }
}

#[tokio::test]
async fn connections_share_one_count() {
    let (limiter, _) = limiter(vec![Limit::new("all", Quota::per_hour(5))]);
    let (router, reached) = everything(RateLimitLayer::new(limiter));
    let server = Server::axum(router).await;
    assert_eq!(server.admitted(50, "/", &[]).await, 5, "each request has its own connection");
    assert_eq!(reached.count(), 5);
}

#[tokio::test]
async fn case_and_look_alikes_of_an_email_share_a_count() {
    let mut email = fact("email", "query.email");
    email.normalize = vec![Normalization::Nfkc, Normalization::Lowercase, Normalization::Trim];
    let settings = HttpSettings { facts: vec![email], ..HttpSettings::default() };
    let (server, _) = serve(vec![Limit::new("login", Quota::per_hour(2)).by("email")], settings).await;
    let mut admitted = 0;
    for spelling in ["ann@example.com", "ANN@Example.COM", "+ann@example.com+", "%EF%BD%81nn@example.com"] {
        admitted += server.admitted(1, &format!("/?email={spelling}"), &[]).await;
    }
    assert_eq!(admitted, 2);
}

#[tokio::test]
async fn hidden_limit_reveals_nothing_about_its_victim() {
    let limits = vec![
        Limit::new("victim", Quota::per_hour(1)).by("query.email").hidden(),
        Limit::new("own", Quota::per_hour(100)).by("ip"),
    ];
    let (server, _) = serve(limits, HttpSettings::default()).await;
    for expected in [200, 429] {
        let response = server.get("/?email=victim@example.com", &[]).await;
        assert_eq!(response.status, expected);
        assert_eq!(response.header("ratelimit-policy"), Some("\"own\";q=100;w=3600"));
        assert!(response.header("ratelimit").unwrap().starts_with("\"own\";r="), "{response:?}");
        assert_eq!(response.header("x-ratelimit-limit"), Some("100"));
        assert!(!format!("{response:?}").contains("\"victim"), "{response:?}");
        assert!(!response.body.contains("detail"), "{response:?}");
        if expected == 429 {
            assert!(response.body.contains("\"violated-policies\":[]"), "{response:?}");
        }
    }
}

#[tokio::test]
async fn identity_and_plan_headers_count_only_from_trusted_proxies() {
    let limits = || {
        vec![
            Limit::tiered("plan", "plan")
                .by("user")
                .tier("free", Quota::per_hour(1))
                .tier("pro", Quota::per_hour(3))
                .default_tier("free")
                .missing(Missing::Share),
        ]
    };
    let facts = || {
        ["user", "plan"].map(|name| {
            let mut fact = fact(name, &format!("header.x-{name}"));
            fact.trusted = true;
            fact
        })
    };
    let headers = [("x-user", "mallory"), ("x-plan", "pro")];
    let settings = HttpSettings { facts: facts().to_vec(), ..HttpSettings::default() };
    let (server, _) = serve(limits(), settings).await;
    assert_eq!(server.admitted(5, "/", &headers).await, 1, "no user and no plan");
    assert_eq!(server.admitted(5, "/", &[("x-user", "eve")]).await, 0);
    let settings = HttpSettings { facts: facts().to_vec(), ..behind_proxies(ClientAddress::XForwardedFor) };
    let (server, _) = serve(limits(), settings).await;
    assert_eq!(server.admitted(5, "/", &headers).await, 3);
    assert_eq!(server.admitted(5, "/", &[("x-user", "eve")]).await, 1);
}

#[tokio::test]
async fn spellings_of_a_bearer_token_share_a_count() {
    let mut key = fact("api_key", "header.authorization");
    key.strip = Some("Bearer ".to_owned());
    key.hash = true;
    let settings = HttpSettings { facts: vec![key], ..HttpSettings::default() };
    let limit = Limit::new("key", Quota::per_hour(2))
        .by("api_key")
        .allow("root")
        .override_for("big", Quota::per_hour(4));
    let (server, _) = serve(vec![limit], settings).await;
    let mut admitted = 0;
    for spelling in ["Bearer k1", "bearer k1", "BEARER  k1", "Bearer k1"] {
        admitted += server.admitted(1, "/", &[("authorization", spelling)]).await;
    }
    assert_eq!(admitted, 2);
    // `allow` and overrides compare raw values, although keys hold only a hash.
    assert_eq!(server.admitted(9, "/", &[("authorization", "Bearer root")]).await, 9);
    assert_eq!(server.admitted(9, "/", &[("authorization", "Bearer big")]).await, 4);
}

#[tokio::test]
async fn long_and_binary_values_are_distinct_keys() {
    let (server, _) =
        serve(vec![Limit::new("key", Quota::per_hour(1)).by("header.key")], HttpSettings::default()).await;
    let long = |last: char| format!("{}{last}", "x".repeat(3_000));
    for value in [long('a'), long('b'), "\u{fffd}".to_owned()] {
        assert_eq!(server.admitted(3, "/", &[("key", &value)]).await, 1, "{value:.20}");
    }
    let query = vec![Limit::new("key", Quota::per_hour(1)).by("query.key")];
    let (server, _) = serve(query, HttpSettings::default()).await;
    assert_eq!(server.admitted(3, "/?key=%ff%fe", &[]).await, 1);
    assert_eq!(server.admitted(3, "/?key=%ff%fd", &[]).await, 1);
}

#[tokio::test]
async fn spellings_of_a_host_share_a_count() {
    let (server, _) =
        serve(vec![Limit::new("host", Quota::per_hour(2)).by("host")], HttpSettings::default()).await;
    let mut admitted = 0;
    for spelling in ["example.com", "EXAMPLE.com", "example.com:8080", "example.com."] {
        admitted += server.admitted(1, "/", &[("host", spelling)]).await;
    }
    assert_eq!(admitted, 2);
    let response = server.get("/", &[("host", "example.com"), ("host", "other.com")]).await;
    assert_eq!(response.status, 400, "the host is ambiguous");
    let absolute = "GET http://other.com/";
    assert_eq!(
        server.send(absolute, &[("host", "example.com")], "").await.status,
        400,
        "the host is ambiguous"
    );
    assert_eq!(server.send(absolute, &[("host", "OTHER.com:80")], "").await.status, 200);
}

/// A server that does not provide the peer address must not disable a limit by `ip`.
#[tokio::test]
async fn unknown_peer_is_a_server_error() {
    let server = |layer: RateLimitLayer| {
        Server::of(move |listener| async move {
            let (router, _) = everything(layer);
            // Without `into_make_service_with_connect_info`.
            axum::serve(listener, router).await.expect("the server runs");
        })
    };
    let (by_ip, _) = limiter(per_ip());
    let without_peer = server(RateLimitLayer::new(by_ip.clone())).await;
    let response = without_peer.get("/", &[]).await;
    assert_eq!(response.status, 500);
    assert!(response.body.contains("the peer address is unknown"), "{response:?}");
    let with_assumed_peer = server(RateLimitLayer::new(by_ip).assume_peer([192, 0, 2, 7].into())).await;
    assert_eq!(with_assumed_peer.admitted(5, "/", &[]).await, 2);
    let (global, _) = limiter(vec![Limit::new("all", Quota::per_hour(2))]);
    let with_global_limit = server(RateLimitLayer::new(global)).await;
    assert_eq!(with_global_limit.admitted(5, "/", &[]).await, 2, "no limit needs the address");
}

#[tokio::test]
async fn refused_request_charges_nothing() {
    let limits =
        vec![Limit::new("mine", Quota::per_hour(1)).by("query.user"), Limit::new("all", Quota::per_hour(3))];
    let (server, _) = serve(limits, HttpSettings::default()).await;
    assert_eq!(server.admitted(10, "/?user=greedy", &[]).await, 1);
    assert_eq!(server.admitted(1, "/?user=a", &[]).await, 1);
    assert_eq!(server.admitted(1, "/?user=b", &[]).await, 1);
    assert_eq!(server.admitted(1, "/?user=c", &[]).await, 0);
}

#[tokio::test]
async fn response_status_decides_what_is_charged() {
    let login = Limit::new("login", Quota::per_hour(3)).by("ip").deduct_when(StatusSet::of([401]));
    let cached =
        Limit::new("cached", Quota::per_hour(50)).by("ip").refund_when(StatusSet::of([304]).class(5));
    let (limiter, _) = limiter(vec![login, cached]);
    let status = |status: StatusCode| post(move || async move { status });
    let router = Router::new()
        .route("/wrong", status(StatusCode::UNAUTHORIZED))
        .route("/right", status(StatusCode::OK))
        .route("/broken", status(StatusCode::BAD_GATEWAY))
        .layer(RateLimitLayer::new(limiter.clone()));
    let server = Server::axum(router).await;
    for _ in 0..10 {
        assert_eq!(server.send("POST /right", &[], "").await.status, 200);
        assert_eq!(server.send("POST /broken", &[], "").await.status, 502);
    }
    let facts = tollkeeper::facts! { "ip" => "127.0.0.1" };
    let remaining =
        |limit: &str| limiter.usage(&facts).wait().unwrap().limit(limit).unwrap().outcome().remaining;
    assert_eq!((remaining("login"), remaining("cached")), (3, 40));
    for expected in [401, 401, 401, 429, 429] {
        assert_eq!(server.send("POST /wrong", &[], "").await.status, expected);
    }
    assert_eq!(remaining("login"), 0);
    assert_eq!(server.send("POST /right", &[], "").await.status, 429, "locked out after three failures");
}

#[tokio::test]
async fn request_bodies_reach_the_handler_unchanged() {
    let echo = any(|body: String| async move { body });
    let (limiter, _) = limiter(vec![Limit::new("login", Quota::per_hour(100)).by("body.user")]);
    let server = Server::axum(Router::new().fallback(echo).layer(RateLimitLayer::new(limiter))).await;
    let large = format!("user=a&x={}", "y".repeat(60_000));
    for body in [r#"{"user":"a"}"#, "user=a&x=%20", "not a form", &large] {
        let response = server.send("POST /", &[], body).await;
        assert_eq!((response.status, response.body.as_str()), (200, body));
        assert!(response.header("ratelimit-policy").is_some() == body.contains("user"), "{response:?}");
    }
}

/// A key is never a pattern: forgetting `*` forgets only the key `*`.
#[tokio::test]
async fn reset_forgets_exactly_one_key() {
    let (limiter, _) = limiter(vec![Limit::new("key", Quota::per_hour(1)).by("query.key")]);
    let (router, _) = everything(RateLimitLayer::new(limiter.clone()));
    let server = Server::axum(router).await;
    for key in ["a", "b", "*"] {
        assert_eq!(server.admitted(2, &format!("/?key={key}"), &[]).await, 1);
    }
    let forgotten = limiter.forget("key", &tollkeeper::facts! { "query.key" => "*" }).await;
    assert_eq!(forgotten, Ok(true));
    assert_eq!(server.admitted(2, "/?key=a", &[]).await + server.admitted(2, "/?key=b", &[]).await, 0);
    assert_eq!(server.admitted(2, "/?key=*", &[]).await, 1);
}

#[tokio::test]
async fn limit_over_a_year_works_like_any_other() {
    let year = std::time::Duration::from_secs(366 * 86_400);
    for algorithm in
        [Algorithm::TokenBucket, Algorithm::SlidingLog, Algorithm::FixedWindow, Algorithm::SlidingWindow]
    {
        let limit = Limit::new("year", Quota::per(2, year)).algorithm(algorithm);
        let (server, clock) = serve(vec![limit], HttpSettings::default()).await;
        assert_eq!(server.admitted(5, "/", &[]).await, 2, "{algorithm}");
        let response = server.get("/", &[]).await;
        let wait: u64 = response.header("retry-after").unwrap().parse().unwrap();
        assert!((86_400..=2 * 366 * 86_400 + 30).contains(&wait), "{algorithm}: {wait}");
        clock.advance(Span::from_secs(wait));
        assert_eq!(server.get("/", &[]).await.status, 200, "{algorithm}");
    }
}

/// Facts from a closure, from `check` and from `forget` are raw values, too, and hashed like those from headers.
#[tokio::test]
async fn facts_of_the_application_are_hashed_like_headers() {
    let mut key = fact("api_key", "header.x-api-key");
    key.hash = true;
    let settings = HttpSettings { facts: vec![key], ..HttpSettings::default() };
    let (limiter, _) = limiter(vec![Limit::new("customer", Quota::per_hour(3)).by("api_key")]);
    let layer = RateLimitLayer::new(limiter.clone()).http(settings).fact("api_key", |parts| {
        let signed_in = parts.headers.get("x-signed-in")?;
        signed_in.to_str().ok().map(str::to_owned)
    });
    let (router, _) = everything(layer);
    let server = Server::axum(router).await;
    let facts = tollkeeper::facts! { "api_key" => "cust-1" };
    assert_eq!(server.get("/", &[("x-api-key", "cust-1")]).await.status, 200);
    assert_eq!(server.get("/", &[("x-signed-in", "cust-1")]).await.status, 200);
    assert!(limiter.check(&facts).await.expect("valid").allowed());
    assert_eq!(server.get("/", &[("x-api-key", "cust-1")]).await.status, 429);
    assert_eq!(limiter.forget("customer", &facts).await, Ok(true));
    assert_eq!(server.get("/", &[("x-api-key", "cust-1")]).await.status, 200);
}
