//! Compares the keys that Tollkeeper charges with the values that real servers read from the same bytes.
//!
//! A request is spelled in many ways and sent to a layer over axum and to seven other servers, each of which responds with
//! the values that it has read. All spellings that a server reads as one identity or one route must share one budget:
//! the layer either refuses a spelling, or charges it under a key that all these spellings have in common.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use axum::extract::{FromRequest as _, MatchedPath};
use axum::routing::any;
use axum::{Json, Router};
use http::HeaderValue;
use serde_json::{Value, json};
use support::*;
use tollkeeper::http::HttpSettings;
use tollkeeper::{Limit, Quota};
use tollkeeper_core::digest::hex;
use tollkeeper_tests::cases::Random;
use tollkeeper_tests::folder::Folder;
use tollkeeper_tests::languages::{self, Killed};
use tollkeeper_tests::page::root;
use tollkeeper_tests::redis::{PATIENCE, free_port};
use tollkeeper_tower::RateLimitLayer;

const ROUTES: [&str; 6] =
    ["/login", "/api/login", "/users/{id}", "/users/{id}/export", "/projects/{id}", "/files/*"];

/// The kinds of identity. Each is the name of a limit, and of a value in the servers' responses.
const IDENTITIES: [&str; 8] = ["key", "authorization", "session", "user", "email", "host", "route", "path"];

#[test]
fn no_spelling_of_a_header_has_a_second_budget() {
    let mut real = Vec::new();
    for name in ["X-Api-Key", "x-api-key", "X_Api_Key", "X-Api_Key", "x_api_key", "X.Api.Key"] {
        for value in [" REAL", "REAL", "\t REAL \t"] {
            real.push(format!("{name}:{value}\r\n"));
        }
    }
    let mut cases = real.clone();
    for first in &real {
        for second in ["X-Api-Key: junk\r\n", "X_Api_Key: junk\r\n", "X-Api-Key:\r\n", "X-Api-Key: REAL\r\n"]
        {
            cases.push(format!("{first}{second}"));
            cases.push(format!("{second}{first}"));
        }
    }
    for scheme in ["Bearer", "bearer", "BEARER"] {
        for blank in [" ", "  ", "\t", " \t "] {
            cases.push(format!("Authorization: {scheme}{blank}REAL\r\n"));
            // Many applications read the second word and ignore the rest.
            cases.push(format!("Authorization: {scheme}{blank}REAL junk\r\n"));
        }
    }
    for second in ["Bearer junk", "Basic junk", "", "Bearer REAL"] {
        cases.push(format!("Authorization: Bearer REAL\r\nAuthorization: {second}\r\n"));
        cases.push(format!("Authorization: {second}\r\nAuthorization: Bearer REAL\r\n"));
    }
    let mut cases: Vec<Vec<u8>> = cases
        .iter()
        .map(|lines| format!("GET /login HTTP/1.1\r\nHost: a.example\r\n{lines}").into_bytes())
        .collect();
    // Whitespace in Latin-1, which Python strips.
    for value in [&b"REAL\xa0"[..], b"\x85REAL", b"REAL \xa0\x85"] {
        for header in ["X-Api-Key: ", "Authorization: Bearer "] {
            let head = format!("GET /login HTTP/1.1\r\nHost: a.example\r\n{header}");
            cases.push([head.as_bytes(), value, b"\r\n"].concat());
        }
    }
    Comparison::new().check(cases);
}

#[test]
fn no_spelling_of_a_host_has_a_second_budget() {
    let mut cases = Vec::new();
    for host in ["a.example", "A.Example", "a.example:80", "a.example.", "b.example"] {
        cases.push(format!("GET /login HTTP/1.1\r\nHost: {host}\r\n"));
        cases.push(format!("GET http://a.example/login HTTP/1.1\r\nHost: {host}\r\n"));
        cases.push(format!("GET http://{host}/login HTTP/1.1\r\nHost: a.example\r\n"));
        cases.push(format!("GET /login HTTP/1.1\r\nHost: a.example\r\nHost: {host}\r\n"));
    }
    Comparison::new().check(cases);
}

#[test]
fn no_spelling_of_a_cookie_has_a_second_budget() {
    let real: Vec<Vec<u8>> = [
        &b"sid=s:RE-AL"[..],
        b"sid=s%3ARE-AL",
        b"sid=s%3aRE%2dAL",
        b"sid=%73%3A%52E-AL",
        b"sid=\"s:RE-AL\"",
        b"sid=\"s%3ARE-AL\"",
        b"sid=\"s:\\122E-AL\"",
        b"sid=\"s:\\RE-AL\"",
        b" sid = s:RE-AL ",
        b"\xa0sid=s:RE-AL",
        b"sid\x85=s:RE-AL",
        b"sid=s:RE-AL\xa0",
        b"sid=s:RE-AL,x=1",
        b"sid=s:RE-AL x=1",
        b"x=1,sid=s:RE-AL",
        b"x=1 sid=s:RE-AL",
        b"$Version=1; sid=s:RE-AL; $Path=/",
        b"x=\"a; sid=s:RE-AL; y=b\"",
        b"SID=junk; sid=s:RE-AL",
        b"SID=s:RE-AL",
        b"x=1, Sid=s:RE-AL",
        b"sid=s%3ARE-AL%zz",
        b"sid=s:RE-AL%zz",
    ]
    .map(<[u8]>::to_vec)
    .to_vec();
    let others = [
        &b"sid=junk"[..],
        b"sid=",
        b"sid",
        b"SID=junk",
        b"x=1",
        b"x=\"; sid=junk\"",
        b"x=1, sid=junk",
        b"sid=\"junk",
    ];
    let mut cases = Vec::new();
    let mut add = |lines: &[&[u8]]| {
        let mut request = b"GET /login HTTP/1.1\r\nHost: a.example\r\n".to_vec();
        for line in lines {
            request.extend_from_slice(&[b"Cookie: ", *line, b"\r\n"].concat());
        }
        cases.push(request);
    };
    for real in &real {
        add(&[real]);
        for other in others {
            add(&[real, other]);
            add(&[other, real]);
            add(&[&[real, &b"; "[..], other].concat()]);
            add(&[&[other, &b"; "[..], real].concat()]);
        }
    }
    Comparison::new().check(cases);
}

#[test]
fn no_spelling_of_a_query_has_a_second_budget() {
    let cases = [
        "user=REAL",
        "%75ser=REAL",
        "user=%52EAL",
        "user=RE%41L",
        "&user=REAL&",
        "x=1&user=REAL",
        "user=REAL#user=junk",
        "user=REAL&user=junk",
        "user=junk&user=REAL",
        "user=&user=REAL",
        "user&user=REAL",
        "USER=junk&user=REAL",
        "USER=REAL&user=junk",
        "User=REAL",
        "[user]=REAL",
        "%5Buser%5D=REAL",
        "user=junk&[user]=REAL",
        "user=&[user]=REAL",
        "x=1;user=REAL",
        "user=REAL;user=junk",
        "user=junk;user=REAL",
        "user[]=REAL",
        "user[0]=REAL",
        "?user=REAL",
        "user=REAL&%75ser=junk",
    ];
    Comparison::new().check(cases.map(|query| format!("GET /login?{query} HTTP/1.1\r\nHost: a.example\r\n")));
}

#[test]
fn no_spelling_of_a_body_has_a_second_budget() {
    let json = [
        r#"{"email":"REAL"}"#,
        r#" {"x":1, "\u0065mail" : "R\u0045AL"}"#,
        r#"{"Email":"REAL"}"#,
        r#"{"email":"junk","Email":"REAL"}"#,
        r#"{"EMAIL":"REAL","email":"junk"}"#,
        r#"{"email":"junk","email":"REAL"}"#,
        r#"{"email":"REAL","email":"junk"}"#,
        r#"{"email":["REAL"]}"#,
        r#"{"email":"REAL",}"#,
        "\u{feff}{\"email\":\"REAL\"}",
    ];
    let mut bodies: Vec<Vec<u8>> = json.iter().map(|text| text.as_bytes().to_vec()).collect();
    for text in [r#"{"email":"REAL"}"#, "\u{feff}{\"email\":\"REAL\"}", "\n{\"email\":\"REAL\"}"] {
        bodies.push(text.encode_utf16().flat_map(u16::to_be_bytes).collect());
        bodies.push(text.encode_utf16().flat_map(u16::to_le_bytes).collect());
        bodies.push(text.chars().flat_map(|char| u32::from(char).to_be_bytes()).collect());
    }
    let forms = [
        "email=REAL",
        "%65mail=RE%41L",
        "x=1&email=REAL",
        "email=junk&email=REAL",
        "email=REAL&email=junk",
        "Email=REAL",
        "[email]=REAL",
        "email[]=REAL",
        "email=junk&[email]=REAL",
        "--b\r\nContent-Disposition: form-data; name=\"email\"\r\n\r\nREAL\r\n--b--\r\n",
    ];
    bodies.extend(forms.map(|text| text.as_bytes().to_vec()));
    let types = [
        "",
        "Content-Type: application/json\r\n",
        "Content-Type: application/json; charset=utf-16\r\n",
        "Content-Type: text/plain\r\n",
        "Content-Type: application/x-www-form-urlencoded\r\n",
        "Content-Type: multipart/form-data; boundary=b\r\n",
        "Content-Type: text/plain\r\nContent-Type: multipart/form-data; boundary=b\r\n",
    ];
    let mut cases = Vec::new();
    for body in &bodies {
        for kind in types {
            let head = format!(
                "POST /login HTTP/1.1\r\nHost: a.example\r\n{kind}Content-Length: {}\r\nConnection: close\r\n\r\n",
                body.len()
            );
            cases.push([head.as_bytes(), body].concat());
        }
    }
    Comparison::new().check(cases);
}

#[test]
fn no_spelling_of_a_path_has_a_second_budget() {
    let mut paths: Vec<String> = [
        "/login",
        "/LOGIN",
        "/login/",
        "//login",
        "/./login",
        "/x/../login",
        "/%6cogin",
        "/%6Cogin",
        "/%2e/login",
        "/x/%2e%2E/login",
        "/login;x=1",
        "/;x/login",
        "/x/..;/login",
        "/login%2F",
        "/login%5C",
        "/login\\",
        "/%2Flogin",
        "/api/login",
        "/api%2Flogin",
        "/api%2flogin",
        "/api%5Clogin",
        "/api\\login",
        "/api/x%2F%2E%2E%2Flogin",
        "/api/..%2Flogin",
        "/x%5c..%5clogin",
        "/x\\..\\login",
        "/api%252Flogin",
        "/users/a%2Fb",
        "/users/a%5Cb",
        "/users/..",
        "/users/../export",
        "/users/%2e%2e/export",
        "/users/..;/export",
        "/users/a%5Cb%2Fexport",
        "/users/7%2Fexport",
        "/files/../x",
        "/files/..%2Fx",
        "/files/..%5Cx",
        "/files/%2e%2e/x",
        "/files/..;/x",
        "/files/a%2F../../x",
        "/login//..",
        "/x%2Fy/../login",
        "/login/%2e",
        "/login%0A",
        "/login%0a",
        "/login%20",
        "/login%09",
        "/login%00",
        "/login%3Fx",
        "/login%23",
        "/projects/@me",
        "/projects/%40me",
        "/projects/a;b",
        "/projects/a%3Bb",
        "/projects/a%3D",
        "/projects/a=",
        "/projects/a%7C",
        "/projects/a|",
        "/projects/a%22",
        "/login?x=/api",
        "http://a.example/login",
        "/users/",
        "/users//export",
        "/users/%2Fexport",
        "/projects%2F",
        "/users/..;x%2Fy/export",
        // URL parsers read `x` as a host.
        "//x/login",
        "///x/login",
        "/\\x/login",
        "\\\\x/login",
        "//x\\api/login",
        "//x/y/../users/7/export",
        "//x//login",
        "//x",
        "//x@y:80/login",
    ]
    .map(str::to_owned)
    .to_vec();
    let words = [
        "login", "api", "users", "projects", "files", "export", "7", "x", "..", ".", "%2e%2e", "%2E", "..;",
        ";x", "", "%6Cogin", "LOGIN", "a%40", "@",
    ];
    let separators = ["/", "/", "/", "/", "//", "%2F", "%2f", "%5C", "%5c", "\\"];
    let mut random = Random::new(3);
    for _ in 0..1_500 {
        let mut path = "/".to_owned();
        for _ in 0..random.within(1, 6) {
            path += words[random.below(words.len())];
            path += separators[random.below(separators.len())];
        }
        if random.below(2) == 0 {
            path += words[random.below(words.len())];
        }
        paths.push(path);
    }
    Comparison::new().check(paths.iter().map(|path| format!("GET {path} HTTP/1.1\r\nHost: a.example\r\n")));
}

/// The layer, and the servers that it is compared with.
struct Comparison {
    layer: LayeredServer,
    servers: Vec<Framework>,
}

impl Comparison {
    fn new() -> Comparison {
        let node = languages::node(
            "frameworks",
            &["express@5", "cookie-parser@1", "fastify@5", "@fastify/cookie@11"],
        );
        let program = |name: &str| root().join("tests/frameworks").join(name);
        let script = |name: &'static str, file: &str, query_parser: &str| {
            let file = program(file);
            Framework::start(name, |port| {
                let mut command = Command::new("node");
                command.arg(&file).current_dir(&node).env("PORT", port).env("QUERY_PARSER", query_parser);
                command
            })
        };
        let python = languages::python();
        let servers = vec![
            script("express", "express.mjs", "simple"),
            script("express with qs", "express.mjs", "extended"),
            script("fastify", "fastify.mjs", ""),
            script("node", "url.mjs", ""),
            Framework::start("starlette", |port| {
                let mut command = Command::new(python.join("uvicorn"));
                command.args(["starlette_app:app", "--port", port]).current_dir(program(""));
                command
            }),
            Framework::start("wsgi", |port| {
                let mut command = Command::new(python.join("python3"));
                command.arg(program("wsgi.py")).env("PORT", port);
                command
            }),
            Framework::start("go", |port| {
                let mut command = Command::new(go_server());
                command.env("PORT", port);
                command
            }),
            Framework::nginx(&program("nginx.conf")),
        ];
        Comparison { layer: LayeredServer::start(), servers }
    }

    /// Sends each request to all servers and compares keys with values. A request is complete, or ends with its last
    /// header line.
    fn check<R: AsRef<[u8]>>(&self, requests: impl IntoIterator<Item = R>) {
        // By server, kind of identity and value.
        let mut common = BTreeMap::<(&str, &str, String), Common>::new();
        let (mut wrong, mut accepted) = (Vec::new(), BTreeMap::<&str, usize>::new());
        for request in requests {
            let request = request.as_ref();
            let shown = request.escape_ascii().to_string();
            let (keys, axum) = self.layer.send(request);
            let Some(keys) = keys else { continue };
            let mut readings: Vec<(&str, Value)> = axum.map(|values| ("axum", values)).into_iter().collect();
            readings
                .extend(self.servers.iter().filter_map(|server| Some((server.name, server.send(request)?))));
            for (server, values) in readings {
                *accepted.entry(server).or_default() += 1;
                for kind in IDENTITIES {
                    let Some(value) = identity(kind, &values[kind]) else { continue };
                    let own = keys.get(kind).cloned().unwrap_or_default();
                    if kind == "route" && !own.contains(&value) {
                        wrong.push(format!(
                            "{server} matches {value}, but these limits are charged: {own:?}: {shown}"
                        ));
                        continue;
                    }
                    let name = format!("{server} reads {kind}={value:?}");
                    let common = common
                        .entry((server, kind, value))
                        .or_insert_with(|| Common { keys: own.clone(), first: shown.clone() });
                    let keys: BTreeSet<String> = common.keys.intersection(&own).cloned().collect();
                    match keys.is_empty() {
                        true => wrong
                            .push(format!("{name} from {shown}, charged as {own:?}, earlier as {common:?}")),
                        false => common.keys = keys,
                    }
                }
            }
        }
        assert!(wrong.is_empty(), "{} second budgets:\n{}", wrong.len(), wrong.join("\n"));
        // A server that accepts no request would not be compared at all.
        for server in self.servers.iter().map(|server| server.name).chain(["axum"]) {
            assert!(
                accepted.get(server).is_some_and(|count| *count > 0),
                "{server} accepts nothing: {accepted:?}"
            );
        }
    }
}

/// The keys that all spellings of one identity have in common.
#[derive(Debug)]
#[expect(dead_code, reason = "the first spelling is shown on failure")]
struct Common {
    keys: BTreeSet<String>,
    first: String,
}

/// The identity that an application derives from a value that its server has read; `None` if the value is absent.
fn identity(kind: &str, value: &Value) -> Option<String> {
    let text = match value {
        Value::Null => return None,
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    match kind {
        _ if text.is_empty() => None,
        "authorization" => {
            let mut words = text.split_ascii_whitespace();
            let is_bearer = words.next().is_some_and(|scheme| scheme.eq_ignore_ascii_case("bearer"));
            words.next().filter(|_| is_bearer).map(str::to_owned)
        }
        "host" => {
            let host = text.to_ascii_lowercase();
            let host = host.rsplit_once(':').map_or(&*host, |(host, _)| host);
            Some(host.trim_end_matches('.').to_owned())
        }
        _ => Some(text),
    }
}

/// An axum application behind a layer that limits by every kind of identity.
struct LayeredServer {
    address: SocketAddr,
    _server: Server,
    _runtime: tokio::runtime::Runtime,
}

/// The values of the keys under which a request is charged, by limit.
type Keys = BTreeMap<String, BTreeSet<String>>;

impl LayeredServer {
    fn start() -> LayeredServer {
        let limit = |kind: &&str| Limit::new(*kind, Quota::per_hour(1_000_000)).by(*kind);
        let (limiter, _) = limiter(IDENTITIES.iter().map(limit).collect());
        let mut authorization = fact("authorization", "header.authorization");
        authorization.strip = Some("Bearer ".to_owned());
        let settings = HttpSettings {
            facts: vec![
                fact("key", "header.x-api-key"),
                authorization,
                fact("session", "cookie.sid"),
                fact("user", "query.user"),
                fact("email", "body.email"),
            ],
            routes: ROUTES.map(str::to_owned).to_vec(),
            ..HttpSettings::default()
        };
        let layer = RateLimitLayer::new(limiter).http(settings).on_response(|decision, response| {
            let keys = decision.limits().map(|limit| {
                let values: Vec<Option<&str>> = limit.key().texts().collect();
                (limit.name(), values[0])
            });
            let text = hex(json!(keys.collect::<Vec<_>>()).to_string().as_bytes());
            response.headers.insert("x-keys", HeaderValue::try_from(text).expect("digits"));
        });
        let mut router = Router::new();
        for route in ROUTES {
            router = router.route(&route.replace('*', "{*rest}"), any(values_read_by_axum));
        }
        let router = router.fallback(|| async { http::StatusCode::NOT_FOUND }).layer(layer);
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let server = runtime.block_on(Server::axum(router));
        LayeredServer { address: server.address, _server: server, _runtime: runtime }
    }

    /// Sends a request. Returns the keys under which it is charged, unless it is refused, and the values that axum reads
    /// from it, if a route matches.
    fn send(&self, request: &[u8]) -> (Option<Keys>, Option<Value>) {
        let Some(response) = send(self.address, request) else { return (None, None) };
        let Some(encoded) = response.header("x-keys") else {
            assert_eq!(response.status, 400, "{}", request.escape_ascii());
            return (None, None);
        };
        let digits = encoded.as_bytes().chunks(2).map(|two| str::from_utf8(two).expect("digits"));
        let text: Vec<u8> = digits.map(|two| u8::from_str_radix(two, 16).expect("digits")).collect();
        let pairs: Vec<(String, Option<String>)> = serde_json::from_slice(&text).expect("JSON");
        let mut keys = Keys::new();
        for (limit, value) in pairs {
            keys.entry(limit).or_default().extend(value);
        }
        let values = (response.status == 200).then(|| serde_json::from_slice(&response.body).expect("JSON"));
        (Some(keys), values)
    }
}

async fn values_read_by_axum(route: MatchedPath, request: axum::extract::Request) -> Json<Value> {
    let mut values = {
        let header =
            |name: &str| request.headers().get(name).map(|value| String::from_utf8_lossy(value.as_bytes()));
        json!({
            "route": route.as_str().replace("{*rest}", "*"),
            "path": request.uri().path(),
            "key": header("x-api-key"),
            "authorization": header("authorization"),
            "host": header("host"),
        })
    };
    if let Ok(Json(body)) = Json::<Value>::from_request(request, &()).await {
        values["email"] = body["email"].clone();
    }
    Json(values)
}

/// A server of another framework, which responds with the values that it reads.
struct Framework {
    name: &'static str,
    address: SocketAddr,
    _process: Killed,
    _folder: Folder,
}

impl Framework {
    fn start(name: &'static str, command: impl Fn(&str) -> Command) -> Framework {
        Framework::start_in(Folder::new(), name, command)
    }

    fn start_in(folder: Folder, name: &'static str, command: impl Fn(&str) -> Command) -> Framework {
        let log = folder.path().join("log");
        let began = Instant::now();
        // If another process takes the port first, the server exits, and the next port is tried.
        while began.elapsed() < PATIENCE {
            let port = free_port();
            let mut command = command(&port.to_string());
            let file = fs::File::create(&log).expect("the folder is writable");
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
            let mut process = Killed::start(&mut command);
            let address = SocketAddr::from(([127, 0, 0, 1], port));
            while process.0.try_wait().expect("it was started").is_none() && began.elapsed() < PATIENCE {
                if TcpStream::connect(address).is_ok() {
                    return Framework { name, address, _process: process, _folder: folder };
                }
                pause();
            }
        }
        panic!("{name} does not start: {}", fs::read_to_string(log).unwrap_or_default());
    }

    fn nginx(config: &PathBuf) -> Framework {
        let config = fs::read_to_string(config).expect("the config exists");
        let folder = Folder::new();
        let path = folder.path().to_owned();
        Framework::start_in(folder, "nginx", |port| {
            let own = path.display();
            let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
                .map(|kind| format!("{kind}_temp_path {own}/{kind};"))
                .join("\n");
            let server = config.replace("PORT", port);
            let text = format!(
                "daemon off;\nmaster_process off;\npid {own}/pid;\nerror_log stderr;\nevents {{}}\n\
                 http {{\naccess_log off;\n{temporary}\n{server}}}\n"
            );
            fs::write(path.join("nginx.conf"), text).expect("the folder is writable");
            let mut command = Command::new("nginx");
            command.arg("-p").arg(&path).arg("-c").arg(path.join("nginx.conf"));
            command
        })
    }

    /// The values that the server reads from a request; `None` if no route matches or it rejects the request.
    fn send(&self, request: &[u8]) -> Option<Value> {
        let response = send(self.address, request)?;
        if response.status != 200 {
            return None;
        }
        let body = String::from_utf8_lossy(&response.body);
        if self.name != "nginx" {
            return Some(
                serde_json::from_str(&body).unwrap_or_else(|error| panic!("{}: {error}: {body}", self.name)),
            );
        }
        let values = body.lines().filter_map(|line| line.split_once('='));
        Some(Value::Object(values.map(|(name, value)| (name.to_owned(), json!(value))).collect()))
    }
}

/// Builds the Go server, once for all tests.
fn go_server() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let build = || {
        let folder = languages::folder("go");
        let binary = folder.join("server");
        let mut build = Command::new("go");
        build.arg("build").arg("-o").arg(&binary).arg(root().join("tests/frameworks/server.go"));
        build.env("GO111MODULE", "off").env("GOCACHE", folder.join("cache")).current_dir(&folder);
        languages::run(&mut build);
        binary
    };
    BUILT.get_or_init(build).clone()
}

struct RawResponse {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl RawResponse {
    fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.head.lines().filter_map(|line| line.split_once(": "));
        headers.find_map(|(other, value)| other.eq_ignore_ascii_case(name).then_some(value))
    }
}

/// Sends a request on a new connection; `None` if the server does not respond. The request is complete, or ends with its
/// last header line.
fn send(address: SocketAddr, request: &[u8]) -> Option<RawResponse> {
    let mut stream = TcpStream::connect(address).expect("the server listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
    let is_complete = request.windows(4).any(|four| four == b"\r\n\r\n");
    let end: &[u8] = if is_complete { b"" } else { b"Connection: close\r\n\r\n" };
    stream.write_all(&[request, end].concat()).expect("the server reads");
    let mut bytes = Vec::new();
    // A server may reset the connection after a request that it cannot parse.
    stream.read_to_end(&mut bytes).ok()?;
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let mut body = bytes[end + 4..].to_vec();
    if head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        body = unchunked(&body)?;
    }
    Some(RawResponse { status, head, body })
}

fn unchunked(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = rest.windows(2).position(|two| two == b"\r\n")?;
        let length = usize::from_str_radix(str::from_utf8(&rest[..end]).ok()?, 16).ok()?;
        let chunk = rest.get(end + 2..end + 2 + length)?;
        if chunk.is_empty() {
            return Some(body);
        }
        body.extend_from_slice(chunk);
        rest = rest.get(end + 4 + length..)?;
    }
}

#[expect(clippy::disallowed_methods, reason = "polls a process that gives no signal when it listens")]
fn pause() {
    std::thread::sleep(Duration::from_millis(20));
}
