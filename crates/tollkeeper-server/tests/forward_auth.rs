//! Forward auth: a gateway asks before it forwards a request, and only the configured headers are trusted.

mod support;

use std::time::Instant;

use support::*;
use tollkeeper_core::digest::{hex, sha256};

/// Each endpoint, with the headers of its family that carry the client's method and URI.
const FORWARDED: Gateway = Gateway { path: "/v1/auth", method: "X-Forwarded-Method", uri: "X-Forwarded-Uri" };
const NGINX: Gateway = Gateway { path: "/v1/auth/nginx", method: "X-Original-Method", uri: "X-Original-URI" };

struct Gateway {
    path: &'static str,
    method: &'static str,
    uri: &'static str,
}

impl Gateway {
    /// Sends an auth request for `request`, for example `POST /login`, with these additional headers.
    fn ask(&self, server: &Server, request: &str, headers: &[&str]) -> Answer {
        self.ask_with("", server, request, headers)
    }

    /// Like `ask`, with a query string for the endpoint.
    fn ask_with(&self, query: &str, server: &Server, request: &str, headers: &[&str]) -> Answer {
        let (method, uri) = request.split_once(' ').expect("a method and a URI");
        let own = [format!("{}: {method}", self.method), format!("{}: {uri}", self.uri)];
        let all: Vec<&str> = own.iter().map(String::as_str).chain(headers.iter().copied()).collect();
        server.client().request_with("GET", &format!("{}{query}", self.path), &all, b"")
    }

    fn statuses<const N: usize>(&self, server: &Server, asked: [(&str, &[&str]); N]) -> [u16; N] {
        asked.map(|(request, headers)| self.ask(server, request, headers).status)
    }
}

const LOGIN: &str = "http: { trusted_proxies: [127.0.0.1], routes: [/login] }
limits: [{ name: login, when: { route: /login, method: POST }, by: ip, rate: 2/day }]
";

#[test]
fn limit_is_exact_and_refusals_are_problem_documents() {
    for gateway in [FORWARDED, NGINX] {
        let folder = Folder::new();
        let server = Server::with_config(&folder, LOGIN);
        for left in ["1", "0"] {
            let passed = gateway.ask(&server, "POST /login", &[]);
            assert_eq!((passed.status, passed.text()), (200, ""));
            assert_eq!(passed.header("x-ratelimit-remaining"), Some(left));
            assert!(passed.header("ratelimit").is_some_and(|header| header.starts_with("\"login\";r=")));
            assert_eq!(passed.header("retry-after"), None);
        }
        for (query, status) in [
            ("", 429),
            ("?q=of-the-client", 429),
            ("?deny=401", 401),
            ("?deny=403", 403),
            ("?deny=429", 429),
            ("?q=of-the-client&deny=503", 503),
        ] {
            let refused = gateway.ask_with(query, &server, "POST /login", &[]);
            assert_eq!(refused.status, status, "{query}");
            assert_eq!(refused.header("content-type"), Some("application/problem+json"));
            assert_eq!(refused.header("cache-control"), Some("no-store"));
            assert_eq!(refused.header("ratelimit-policy"), Some("\"login\";q=2;w=86400"));
            assert!(refused.header("retry-after").is_some());
            assert_eq!(refused.json()["violated-policies"][0], "login");
            assert_eq!(refused.json()["status"], status);
        }
        assert_eq!(gateway.ask(&server, "GET /login", &[]).status, 200, "another method");
        for invalid in ["?deny=200", "?deny=", "?deny=401&deny=403"] {
            assert_eq!(gateway.ask_with(invalid, &server, "GET /login", &[]).status, 403, "{invalid}");
        }
        let counted = |result| {
            server.metric(&format!(
                "tollkeeper_requests_total{{transport=\"auth\",route=\"/login\",result=\"{result}\"}}"
            ))
        };
        assert_eq!((counted("allowed"), counted("refused")), (3.0, 6.0));
    }
}

#[test]
fn only_one_header_family_is_trusted() {
    let clients_send: [&[&str]; 2] = [
        &["X-Original-Method: GET", "X-Original-URI: /free", "X-Original-URL: http://a/free"],
        &["X-Forwarded-Method: GET", "X-Forwarded-Uri: /free", "X-Forwarded-Host: other"],
    ];
    for (gateway, spoofed) in [FORWARDED, NGINX].iter().zip(clients_send) {
        let folder = Folder::new();
        let server = Server::with_config(&folder, LOGIN);
        let statuses = gateway.statuses(&server, [("POST /login", spoofed); 4]);
        assert_eq!(statuses, [200, 200, 429, 429], "{}", gateway.path);
    }
    let folder = Folder::new();
    let server = Server::with_config(&folder, LOGIN);
    for gateway in [FORWARDED, NGINX] {
        let only_the_other = sent_as(if gateway.path == FORWARDED.path { NGINX } else { FORWARDED });
        let lines: Vec<&str> = only_the_other.iter().map(String::as_str).collect();
        let answer = server.client().request_with("GET", gateway.path, &lines, b"");
        assert_eq!(answer.status, 403, "the endpoint refuses requests without the headers of its own family");
        assert!(answer.text().contains(gateway.method), "{}", answer.text());
    }
}

fn sent_as(gateway: Gateway) -> [String; 2] {
    [format!("{}: GET", gateway.method), format!("{}: /free", gateway.uri)]
}

#[test]
fn duplicate_uri_header_is_refused() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, LOGIN);
    for (gateway, added) in [
        (&NGINX, "X-Original-URL: http://a/free"),
        (&NGINX, "X-Original-URI: /free"),
        (&NGINX, "X-Original-Method: GET"),
        (&FORWARDED, "X-Forwarded-Uri: /free"),
        (&FORWARDED, "X-Forwarded-Method: GET"),
    ] {
        assert_eq!(gateway.ask(&server, "POST /login", &[added]).status, 403, "{added}");
    }
    assert_eq!(server.metric("tollkeeper_checks_total{limit=\"login\",result=\"allowed\"}"), 0.0);
}

#[test]
fn addresses_are_taken_from_trusted_gateways_only() {
    for gateway in [FORWARDED, NGINX] {
        let folder = Folder::new();
        let server = Server::with_config(&folder, LOGIN);
        let [one, other] = ["192.0.2.1", "192.0.2.2"].map(|ip| format!("X-Forwarded-For: {ip}"));
        let asked = [&one, &one, &one, &other].map(|line| [line.as_str()]);
        let statuses = asked.each_ref().map(|line| gateway.ask(&server, "POST /login", line).status);
        assert_eq!(statuses, [200, 200, 429, 200], "{}", gateway.path);
        assert!(!server.log().contains("trusted_proxies"), "{}", server.log());

        let server = Server::with_config(&folder, &LOGIN.replace("127.0.0.1", "192.0.2.0/24"));
        let statuses = asked.each_ref().map(|line| gateway.ask(&server, "POST /login", line).status);
        assert_eq!(statuses, [200, 200, 429, 429], "an untrusted peer is itself the client");
        server.logs("trusted_proxies: [127.0.0.1]");
        assert_eq!(server.log().matches("trusted_proxies: [127.0.0.1]").count(), 1, "logged once");
    }
}

/// A gateway sets one address header and forwards the others as its clients send them.
#[test]
fn only_the_address_header_of_the_config_is_read() {
    let headers = |ip: &str| {
        [
            ("x-forwarded-for", format!("X-Forwarded-For: 192.0.2.200, {ip}")),
            ("forwarded", format!("Forwarded: for=192.0.2.200, for={ip}")),
            ("header.x-real-ip", format!("X-Real-IP: {ip}")),
            ("header.cf-connecting-ip", format!("CF-Connecting-IP: {ip}")),
        ]
    };
    for gateway in [FORWARDED, NGINX] {
        for read in headers("").map(|(name, _)| name) {
            let folder = Folder::new();
            let config = LOGIN.replace("routes:", &format!("client_address: {read}, routes:"));
            let server = Server::with_config(&folder, &config);
            for (asked, status) in [200, 200, 429, 429].into_iter().enumerate() {
                // The configured header stays the same; all others change with every request.
                let spoofed =
                    headers(&format!("192.0.2.{asked}")).into_iter().filter(|(name, _)| *name != read);
                let own = headers("192.0.2.100").into_iter().filter(|(name, _)| *name == read);
                let lines: Vec<String> = spoofed.chain(own).map(|(_, line)| line).collect();
                let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
                assert_eq!(gateway.ask(&server, "POST /login", &lines).status, status, "{read}: {lines:?}");
            }
        }
    }
}

#[test]
fn duplicate_identity_is_forbidden() {
    let config = "http: { facts: { groups: { from: header.x-groups, many: true } } }
limits:
  - { name: key, when: { path: /key }, by: header.x-api-key, rate: 3/day }
  - { name: token, when: { path: /token }, by: header.authorization, rate: 3/day }
  - { name: session, when: { path: /session }, by: cookie.sid, rate: 3/day }
  - { name: groups, when: { path: /groups }, by: groups, rate: 3/day }
";
    let folder = Folder::new();
    let server = Server::with_config(&folder, config);
    for gateway in [FORWARDED, NGINX] {
        for (path, lines) in [
            ("/key", &["X-Api-Key: a", "X-Api-Key: b"][..]),
            ("/key", &["X-Api-Key: a", "X_Api_Key: b"]),
            ("/token", &["Authorization: Bearer a", "Authorization: Bearer b"]),
            ("/session", &["Cookie: sid=a; sid=b"]),
            ("/session", &["Cookie: sid=a", "Cookie: sid=b"]),
        ] {
            let answer = gateway.ask(&server, &format!("GET {path}"), lines);
            assert_eq!(answer.status, 403, "{path} {lines:?}: {}", answer.text());
            assert_eq!(gateway.ask(&server, "GET /other", lines).status, 200, "{lines:?}");
        }
    }
    let groups: &[&str] = &["X-Groups: a", "X-Groups: b"];
    let asked = [("GET /groups", groups); 4];
    assert_eq!(
        FORWARDED.statuses(&server, asked),
        [200, 200, 200, 429],
        "a fact declared with `many` may have several values"
    );
}

#[test]
fn encoded_slashes_are_read_as_the_config_says() {
    let config = |slashes: &str| {
        format!(
            "http: {{ {slashes} routes: [/login, '/projects/{{id}}'] }}
limits: [{{ name: per-route, by: route, rate: 1/day, algorithm: fixed-window }}]
"
        )
    };
    let (both, login, projects) = ("GET /projects/..%2Flogin", "GET /login", "GET /projects/1");
    for gateway in [FORWARDED, NGINX] {
        for (slashes, expected) in [
            ("", [200, 429, 429]),
            ("encoded_slashes: both,", [200, 429, 429]),
            ("encoded_slashes: decode,", [200, 429, 200]),
            ("encoded_slashes: keep,", [200, 200, 429]),
            ("encoded_slashes: refuse,", [403, 200, 200]),
        ] {
            let folder = Folder::new();
            let server = Server::with_config(&folder, &config(slashes));
            let asked = [both, login, projects].map(|request| (request, &[][..]));
            assert_eq!(gateway.statuses(&server, asked), expected, "{} {slashes}", gateway.path);
        }
    }
}

#[test]
fn facts_are_read_from_the_request_of_the_client() {
    let limits = "http: { trusted_proxies: [127.0.0.1] }
limits:
  - { name: search, when: { host: a.example, path: /Search }, by: [query.q, header.x-key, cookie.session], rate: 1/day }
";
    for (gateway, host) in [(FORWARDED, "X-Forwarded-Host: A.example:443"), (NGINX, "Cookie: a=b")] {
        let folder = Folder::new();
        let uri = if gateway.path == NGINX.path { "http://A.example/x/../Search" } else { "/x/../Search" };
        let gateway = Gateway {
            uri: if gateway.path == NGINX.path { "X-Original-URL" } else { gateway.uri },
            ..gateway
        };
        let server = Server::with_config(&folder, limits);
        let headers = [host, "X-Key: k", "Cookie: session=s"];
        let first = format!("GET {uri}?q=one");
        let statuses = [first.clone(), first.clone(), format!("GET {uri}?q=two")]
            .map(|request| gateway.ask(&server, &request, &headers).status);
        assert_eq!(statuses, [200, 429, 200], "{}", gateway.path);
        let other = [host, "X-Key: other", "Cookie: session=s"];
        assert_eq!(gateway.ask(&server, &first, &other).status, 200);
    }
}

#[test]
fn ambiguous_fact_that_a_limit_needs_is_forbidden() {
    let limits = "limits:
  - { name: search, when: { path: /search }, by: query.q, rate: 1/day }
  - { name: email, when: { path: /login }, by: body.email, rate: 1/day }
  - { name: tokens, when: { path: /llm }, rate: 10/day, cost: tokens }
";
    let folder = Folder::new();
    let server = Server::with_config(&folder, limits);
    for gateway in [FORWARDED, NGINX] {
        for (request, status, reason) in [
            (
                "GET /search?q=a&q=b",
                403,
                "`query.q` is required but cannot be read: it occurs more than once",
            ),
            (
                "POST /login",
                403,
                "`body.email` is required but cannot be read: the gateway does not forward the body",
            ),
            ("GET /llm", 403, "tokens"),
            ("GET /other?q=a&q=b", 200, ""),
        ] {
            let answer = gateway.ask(&server, request, &[]);
            assert_eq!(answer.status, status, "{request}: {}", answer.text());
            assert!(answer.text().contains(reason), "{request}: {}", answer.text());
        }
    }
}

#[test]
fn slots_are_skipped_and_leaky_bucket_delays_are_awaited() {
    let limits = "limits:
  - { name: exports, algorithm: concurrency, limit: 1 }
  - { name: paced, rate: 10/s, burst: 3, algorithm: leaky-bucket }
";
    let folder = Folder::new();
    let server = Server::with_config(&folder, limits);
    let began = Instant::now();
    for _ in 0..3 {
        assert_eq!(FORWARDED.ask(&server, "GET /", &[]).status, 200);
    }
    // The second request is delayed by 0.1 s, the third by 0.2 s.
    assert!(began.elapsed().as_millis() >= 190, "{:?}", began.elapsed());
}

#[test]
fn closed_data_plane_accepts_the_gateway_token_only() {
    let folder = Folder::new();
    let config = format!("{LOGIN}auth: {{ token_sha256: [{}] }}\n", hex(&sha256(b"secret")));
    let server = Server::with_config(&folder, &config);
    for gateway in [FORWARDED, NGINX] {
        let asked: [(&str, &[&str]); 3] = [
            ("GET /", &[]),
            ("GET /", &["Authorization: Bearer secret"]),
            ("GET /", &["X-Tollkeeper-Token: secret", "Authorization: Bearer of-the-client"]),
        ];
        assert_eq!(gateway.statuses(&server, asked), [401, 401, 200]);
    }
}

#[test]
fn reload_changes_limits_and_facts_together() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, LOGIN);
    assert_eq!(FORWARDED.ask(&server, "GET /", &["X-Key: a"]).header("ratelimit"), None);
    folder.write(
        "tollkeeper.yaml",
        "http: { facts: { key: { from: header.x-key, normalize: [nfkc, lowercase] } } }
limits: [{ name: per-key, by: key, rate: 1/day }]
headers: [draft-07]
",
    );
    eventually("the new limit is active", || {
        FORWARDED.ask(&server, "GET /", &["X-Key: other"]).header("ratelimit").is_some()
    });
    let asked: [(&str, &[&str]); 3] =
        [("GET /", &["X-Key: a"]), ("GET /", &["X-Key: A"]), ("GET /", &["X-Key: b"])];
    assert_eq!(FORWARDED.statuses(&server, asked), [200, 429, 200]);
    let answer = FORWARDED.ask(&server, "GET /", &["X-Key: c"]);
    assert!(
        answer.header("ratelimit").is_some_and(|header| header.starts_with("limit=1, remaining=0, reset="))
    );
}
