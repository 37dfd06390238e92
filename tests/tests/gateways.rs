//! The forward-auth endpoint behind real nginx and Caddy gateways, with the files of `docs/nginx.md`,
//! `docs/traefik-caddy.md` and `docs/operations.md` on other ports.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tollkeeper_tests::folder::Folder;
use tollkeeper_tests::page::{Page, root};
use tollkeeper_tests::redis::{PATIENCE, free_port};
use tollkeeper_tests::served::Served;

/// Three logins a day for each address, and a limit by a query parameter, which must not be ambiguous.
const LIMITS: &str = "http: { trusted_proxies: [127.0.0.1], routes: [/login] }
limits:
  - { name: login, when: { route: /login, method: POST }, by: ip, rate: 3/day, algorithm: fixed-window }
  - { name: search, when: { path: /search }, by: query.q, rate: 3/day, algorithm: fixed-window }
";

/// Admitted requests keep their body, and every response has the rate-limit headers.
#[test]
fn nginx_passes_exactly_the_limit_with_headers() {
    let tollkeeper = Tollkeeper::start(&by_day(&page("docs/nginx.md", "tollkeeper.yaml")));
    let nginx = Gateway::nginx(&tollkeeper);
    passes_exactly(&nginx, 5, Headers::Always);
}

/// Admitted requests keep their body, and refusals have the rate-limit headers.
#[test]
fn caddy_passes_exactly_the_limit() {
    let tollkeeper = Tollkeeper::start(&by_day(&page(CADDY, "tollkeeper.yaml")));
    let caddy = Gateway::caddy(&tollkeeper, "tollkeeper.Caddyfile");
    let refused = passes_exactly(&caddy, 5, Headers::OnRefusals);
    assert_eq!(refused.header("content-type"), Some("application/problem+json"));
    assert!(refused.body.contains(r#""violated-policies":["per-ip"]"#), "{}", refused.body);
}

/// It also forwards requests that no limit applies to.
#[test]
fn long_form_caddy_sets_headers_on_every_response() {
    let tollkeeper = Tollkeeper::start(LIMITS);
    let caddy = Gateway::caddy(&tollkeeper, "headers.Caddyfile");
    let free = caddy.ask("POST /free", &[], "hello");
    assert_eq!((free.status, &*free.body, free.header("x-app")), (200, "hello", Some("here")));
    assert_eq!(free.header("ratelimit"), None);
    passes_exactly(&caddy, 3, Headers::Always);
}

#[test]
fn client_headers_cannot_bypass_a_limit() {
    let gateways: [StartGateway; 3] = [
        Gateway::nginx,
        |tollkeeper| Gateway::caddy(tollkeeper, "tollkeeper.Caddyfile"),
        |tollkeeper| Gateway::caddy(tollkeeper, "headers.Caddyfile"),
    ];
    for start in gateways {
        let tollkeeper = Tollkeeper::start(LIMITS);
        let gateway = start(&tollkeeper);
        let spoofed = [
            "X-Original-Method: GET",
            "X-Original-URI: /free",
            "X-Original-URL: http://localhost/free",
            "X-Forwarded-Method: GET",
            "X-Forwarded-Uri: /free",
            "X-Forwarded-For: 192.0.2.1",
            "X-Real-IP: 192.0.2.2",
        ];
        for spoofed in spoofed.iter().map(std::slice::from_ref).chain([&spoofed[..]]) {
            let status = gateway.ask("POST /x/..//%6Cogin", spoofed, "").status;
            assert!(matches!(status, 200 | 429), "{}: {spoofed:?}: {status}", gateway.name);
        }
        assert_eq!(
            tollkeeper.passed("login"),
            3,
            "{}: all requests are one client at one route",
            gateway.name
        );
        assert_eq!(gateway.ask("GET /search?q=a&q=b", &[], "").status, 403, "{}", gateway.name);
        assert_eq!(gateway.ask("GET /search?q=a", &[], "").status, 200, "{}", gateway.name);
    }
}

/// The plan is trusted because it comes from the gateway; a client that sends one itself must not get it.
#[test]
fn client_cannot_choose_its_own_plan() {
    let config = "http:
  trusted_proxies: [127.0.0.1]
  facts:
    plan: { from: header.x-plan, trusted: true }
    user: { from: header.x-user-id, trusted: true }
    tenant: { from: header.x-tenant, trusted: true }
limits:
  - name: plan
    by: ip
    tier: plan
    tiers: { free: 2/day, pro: 1000/day }
    default_tier: free
    algorithm: fixed-window
  - { name: user, by: user, rate: 1000/day }
  - { name: tenant, by: tenant, rate: 1000/day }
";
    let gateways: [StartGateway; 3] = [
        Gateway::nginx,
        |tollkeeper| Gateway::caddy(tollkeeper, "tollkeeper.Caddyfile"),
        |tollkeeper| Gateway::caddy(tollkeeper, "headers.Caddyfile"),
    ];
    for start in gateways {
        let tollkeeper = Tollkeeper::start(config);
        let gateway = start(&tollkeeper);
        let headers = ["X-Plan: pro", "X-User-Id: alice", "X-Tenant: acme"];
        let statuses: Vec<u16> = (0..4).map(|_| gateway.ask("GET /", &headers, "").status).collect();
        assert_eq!(statuses, [200, 200, 429, 429], "{}: the client has the plan `free`", gateway.name);
        let known = tollkeeper.passed("user") + tollkeeper.passed("tenant");
        assert_eq!(known, 0, "{}: the client is not alice of acme", gateway.name);
    }
}

/// Variants of one identity, through a gateway to an application that would serve each of them.
#[test]
fn spelling_variants_share_one_identity() {
    let config = "http: { trusted_proxies: [127.0.0.1], routes: [/api/login] }
limits:
  - { name: key, by: header.x-api-key, rate: 3/day, algorithm: fixed-window }
  - { name: session, by: cookie.sid, rate: 3/day, algorithm: fixed-window }
  - { name: login, when: { route: /api/login }, by: ip, rate: 3/day, algorithm: fixed-window }
";
    let gateways: [StartGateway; 2] =
        [Gateway::nginx, |tollkeeper| Gateway::caddy(tollkeeper, "tollkeeper.Caddyfile")];
    for start in gateways {
        let tollkeeper = Tollkeeper::start(config);
        let gateway = start(&tollkeeper);
        let passed = |request: &str, lines: &[&str]| u64::from(gateway.ask(request, lines, "").status == 200);
        let mut keys = 0;
        for junk in 0..10 {
            let second = format!("X-Api-Key: junk{junk}");
            keys += passed("GET /", &["X-Api-Key: REAL", &second])
                + passed("GET /", &[&second, "X-Api-Key: REAL"]);
            keys += passed("GET /", &["X-Api-Key: REAL"]);
        }
        assert_eq!(keys, 3, "{}: header", gateway.name);
        let mut sessions = 0;
        for junk in 0..10 {
            sessions += passed("GET /", &[&format!("Cookie: sid=junk{junk}; sid=REAL")]);
            sessions += passed("GET /", &[&format!("Cookie: sid=REAL; sid=junk{junk}")]);
            for cookie in ["sid=REAL", "sid=\"REAL\"", "sid=%52EAL", "sid=R%45AL"] {
                sessions += passed("GET /", &[&format!("Cookie: {cookie}")]);
            }
        }
        assert_eq!(sessions, 3, "{}: cookie", gateway.name);
        let mut logins = 0;
        // nginx and this application treat `#` as a part of the path.
        for path in [
            "/x#/../api/login",
            "/api%2Flogin",
            "/api/login%2F",
            "/api%5Clogin",
            "/api/x%2F%2E%2E%2Flogin",
            "/api/login",
        ] {
            logins += passed(&format!("POST {path}"), &[]) + passed(&format!("POST {path}"), &[]);
        }
        assert_eq!(logins, 3, "{}: path", gateway.name);
    }
}

/// The recipes of `docs/operations.md`: limits count while Tollkeeper runs, and its end is not the end of the service.
#[test]
fn fail_open_gateways_admit_without_tollkeeper() {
    let gateways: [(StartGateway, Headers); 2] =
        [(Gateway::admitting_nginx, Headers::Always), (Gateway::admitting_caddy, Headers::OnRefusals)];
    for (start, headers) in gateways {
        let tollkeeper = Tollkeeper::start(LIMITS);
        let gateway = start(&tollkeeper);
        passes_exactly(&gateway, 3, headers);
        drop(tollkeeper);
        for _ in 0..5 {
            let admitted = gateway.ask("POST /login", &[], "hello");
            assert_eq!(
                (admitted.status, &*admitted.body),
                (200, "hello"),
                "{}: {}",
                gateway.name,
                admitted.head
            );
            assert_eq!(admitted.header("x-app"), Some("here"), "{}", gateway.name);
        }
    }
}

/// Without a recipe, a gateway refuses.
#[test]
fn gateways_refuse_without_tollkeeper() {
    let gateways: [(StartGateway, u16); 2] =
        [(Gateway::nginx, 500), (|tollkeeper| Gateway::caddy(tollkeeper, "tollkeeper.Caddyfile"), 502)];
    for (start, status) in gateways {
        let tollkeeper = Tollkeeper::start(LIMITS);
        let gateway = start(&tollkeeper);
        assert_eq!(gateway.ask("POST /free", &[], "").status, 200, "{}", gateway.name);
        drop(tollkeeper);
        let refused = gateway.ask("POST /free", &[], "");
        assert_eq!((refused.status, refused.header("x-app")), (status, None), "{}", gateway.name);
    }
}

/// Which responses have rate-limit headers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Headers {
    Always,
    OnRefusals,
}

/// Sends three requests more than the limit allows, and returns the last refusal.
fn passes_exactly(gateway: &Gateway, limit: usize, headers: Headers) -> Response {
    let mut last = None;
    for sent in 0..limit + 3 {
        let response = gateway.ask("POST /login", &[], "hello");
        let refused = sent >= limit;
        assert_eq!(response.status, if refused { 429 } else { 200 }, "{}: request {sent}", gateway.name);
        assert_eq!(response.header("x-app"), if refused { None } else { Some("here") });
        assert_eq!(response.body == "hello", !refused, "{}", response.body);
        assert_eq!(response.header("retry-after").is_some(), refused, "{}", response.head);
        let ratelimit = response.header("ratelimit");
        if refused || headers == Headers::Always {
            let left = format!(";r={};t=", limit.saturating_sub(sent + 1));
            assert!(ratelimit.is_some_and(|ratelimit| ratelimit.contains(&left)), "{}", response.head);
            let policy = response.header("ratelimit-policy");
            assert!(policy.is_some_and(|policy| policy.contains(&format!(";q={limit};w=86400"))));
        } else {
            assert_eq!(ratelimit, None);
        }
        last = Some(response);
    }
    last.expect("at least three requests")
}

const CADDY: &str = "docs/traefik-caddy.md";
const OPERATIONS: &str = "docs/operations.md";

/// A file shown on a documentation page.
fn page(name: &str, file: &str) -> String {
    let text = fs::read_to_string(root().join(name)).expect("the page is there");
    Page::parse(name, &text).expect("a page").file(file).text.clone()
}

/// The config with its limits by day, so that no period ends during a test.
fn by_day(config: &str) -> String {
    assert!(config.contains("5/min"), "{config}");
    config.replace("5/min", "5/day")
}

/// A running Tollkeeper server. Killed on drop.
struct Tollkeeper {
    served: Served,
    _folder: Folder,
}

impl Tollkeeper {
    fn start(config: &str) -> Tollkeeper {
        let folder = Folder::new();
        let file = folder.write("tollkeeper.yaml", config);
        let served = Served::with(&["--config", file.to_str().expect("UTF-8")]);
        Tollkeeper { served, _folder: folder }
    }

    /// How many requests a limit has admitted.
    fn passed(&self, limit: &str) -> u64 {
        let series = format!("tollkeeper_checks_total{{limit=\"{limit}\",result=\"allowed\"}}");
        self.served.metric(&series)
    }
}

/// A running gateway in front of an application. Killed on drop.
struct Gateway {
    name: &'static str,
    process: Child,
    address: SocketAddr,
    _folder: Folder,
}

/// Starts a gateway that calls this server.
type StartGateway = fn(&Tollkeeper) -> Gateway;

impl Gateway {
    fn nginx(tollkeeper: &Tollkeeper) -> Gateway {
        Gateway::nginx_with(&page("docs/nginx.md", "tollkeeper.conf"), tollkeeper)
    }

    /// The nginx of its page, with the lines that admit requests while Tollkeeper is unavailable.
    fn admitting_nginx(tollkeeper: &Tollkeeper) -> Gateway {
        let config = page("docs/nginx.md", "tollkeeper.conf");
        let start = "    location = /tollkeeper {\n";
        assert!(config.contains(start), "{config}");
        let [errors, location] =
            ["admit-errors.conf", "admit-location.conf"].map(|name| page(OPERATIONS, name));
        let config = config.replace(start, &format!("{location}{start}{errors}"));
        Gateway::nginx_with(&config, tollkeeper)
    }

    fn nginx_with(config: &str, tollkeeper: &Tollkeeper) -> Gateway {
        Gateway::start("nginx", config, tollkeeper, |config, folder| {
            let path = folder.path().display();
            let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
                .map(|kind| format!("{kind}_temp_path {path}/{kind};"));
            let all = format!(
                "daemon off;\nmaster_process off;\npid {path}/pid;\nerror_log stderr;\nevents {{}}\n\
                 http {{\naccess_log off;\n{}\n{config}}}\n",
                temporary.join("\n")
            );
            let file = folder.write("nginx.conf", &all);
            let mut command = Command::new("nginx");
            command.arg("-p").arg(folder.path()).arg("-c").arg(file);
            command
        })
    }

    fn caddy(tollkeeper: &Tollkeeper, file: &str) -> Gateway {
        Gateway::caddy_with(&page(CADDY, file), tollkeeper)
    }

    /// The Caddy that admits requests while Tollkeeper is unavailable.
    fn admitting_caddy(tollkeeper: &Tollkeeper) -> Gateway {
        Gateway::caddy_with(&page(OPERATIONS, "admit.Caddyfile"), tollkeeper)
    }

    fn caddy_with(config: &str, tollkeeper: &Tollkeeper) -> Gateway {
        Gateway::start("caddy", config, tollkeeper, |config, folder| {
            let file = folder.write("Caddyfile", &format!("{{\n\tadmin off\n}}\n{config}"));
            let mut command = Command::new("caddy");
            command.args(["run", "--adapter", "caddyfile", "--config"]).arg(file);
            command
                .env("HOME", folder.path())
                .env("XDG_DATA_HOME", folder.path())
                .env("XDG_CONFIG_HOME", folder.path());
            command
        })
    }

    /// Starts a gateway with a page's config on other ports.
    fn start(
        name: &'static str,
        config: &str,
        tollkeeper: &Tollkeeper,
        command: impl Fn(&str, &Folder) -> Command,
    ) -> Gateway {
        let folder = Folder::new();
        let app = app();
        let began = Instant::now();
        // Another process may take the port before the gateway does: then it exits, and another port is tried.
        while began.elapsed() < PATIENCE {
            let port = free_port();
            let mut config = config.to_owned();
            for (from, to) in [(8000, port), (9000, app), (8080, tollkeeper.served.http.port())] {
                let address = format!("127.0.0.1:{from}");
                assert!(config.contains(&address), "{address} is no longer in the page's file");
                config = config.replace(&address, &format!("127.0.0.1:{to}"));
            }
            let log = fs::File::create(folder.path().join("log")).expect("the temporary folder is writable");
            let mut command = command(&config, &folder);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
            let mut process = command.spawn().unwrap_or_else(|error| {
                panic!("{name}: {error} (`make test` installs the Debian package `{name}`)")
            });
            let address = SocketAddr::from(([127, 0, 0, 1], port));
            while process.try_wait().expect("it was started").is_none() && began.elapsed() < PATIENCE {
                if TcpStream::connect(address).is_ok() {
                    return Gateway { name, process, address, _folder: folder };
                }
                pause();
            }
            let _ = process.kill();
            let _ = process.wait();
        }
        panic!(
            "{name} does not start: {}",
            fs::read_to_string(folder.path().join("log")).unwrap_or_default()
        );
    }

    /// Sends one request on a new connection.
    fn ask(&self, request: &str, headers: &[&str], body: &str) -> Response {
        let mut stream = TcpStream::connect(self.address).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        let mut head = format!("{request} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n");
        for header in headers {
            head += &format!("{header}\r\n");
        }
        head += &format!("content-length: {}\r\n\r\n{body}", body.len());
        stream.write_all(head.as_bytes()).expect("it reads");
        let mut response = String::new();
        stream.read_to_string(&mut response).expect("it answers");
        let (head, body) =
            response.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no response: {response:?}"));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        Response { status, head: head.to_owned(), body: body.to_owned() }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// An HTTP response.
struct Response {
    status: u16,
    head: String,
    body: String,
}

impl Response {
    fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.head.lines().filter_map(|line| line.split_once(": "));
        headers.find_map(|(other, value)| other.eq_ignore_ascii_case(name).then_some(value))
    }
}

/// Starts an application that echoes every body, and returns its port. It runs until the process ends.
fn app() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || serve(&stream));
        }
    });
    port
}

fn serve(mut stream: &TcpStream) {
    let mut received = BufReader::new(stream);
    loop {
        let (mut length, mut line) = (0, String::new());
        while line != "\r\n" {
            line.clear();
            if !received.read_line(&mut line).is_ok_and(|count| count > 0) {
                return;
            }
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value.trim().parse().expect("a length");
            }
        }
        let mut body = vec![0; length];
        received.read_exact(&mut body).expect("a complete body");
        let head = format!("HTTP/1.1 200 OK\r\nx-app: here\r\ncontent-length: {length}\r\n\r\n");
        if stream.write_all(&[head.as_bytes(), &body].concat()).is_err() {
            return;
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "polls other processes, with pauses in between")]
fn pause() {
    thread::sleep(Duration::from_millis(20));
}
