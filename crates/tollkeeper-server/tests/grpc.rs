//! The gRPC listener of a real server process: calls of tonic clients, and raw HTTP/2 that no client would send.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod envoy_oracle;
mod support;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::FutureExt as _;
use hyper::Request;
use prost::Message as _;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tollkeeper_core::digest::{hex, sha256};
use tollkeeper_tests::certificates::Authority;
use tollkeeper_tests::redis::{PATIENCE, Server as Redis};
use tonic::Code as Grpc;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServiceResponse};

use crate::envoy_oracle::{
    Code, RateLimitRequest, RateLimitResponse, RateLimitServiceClient, codes, descriptor, question, remaining,
};
use crate::support::{Folder, Server, eventually, output, text};

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const LIMITS: &str = "limits:\n  - { name: per-user, by: user, rate: 2/day, burst: 2 }\n";

fn start(folder: &Folder, config: &str, more: &[&str]) -> Server {
    let file = folder.write("tollkeeper.yaml", config);
    let args = ["--grpc", "127.0.0.1:0", "--config", file.to_str().unwrap()];
    Server::with(&[&args, more].concat())
}

async fn channel(server: &Server) -> Channel {
    Channel::from_shared(format!("http://{}", server.listens("grpc"))).unwrap().connect().await.unwrap()
}

async fn ask(channel: &Channel, user: &str) -> RateLimitResponse {
    let asked = question([descriptor([("user", user)])]);
    RateLimitServiceClient::new(channel.clone()).should_rate_limit(asked).await.unwrap().into_inner()
}

#[tokio::test]
async fn refusals_over_grpc_are_logged() {
    let folder = Folder::new();
    let server = start(&folder, &format!("log: {{ refusals: 10/s }}\n{LIMITS}"), &[]);
    let channel = channel(&server).await;
    for code in [Code::Ok, Code::Ok, Code::OverLimit] {
        assert_eq!(ask(&channel, "alice").await.overall_code(), code);
    }
    eventually("the refusal is logged", || server.log().contains("refused"));
    let log = server.log();
    let line = log.lines().find(|line| line.contains("refused")).unwrap();
    for field in [r#"limit="per-user""#, r#"key=["alice"]"#, "cost=1", "retry_after=", r#"transport="grpc""#]
    {
        assert!(line.contains(field), "{field}: {line}");
    }
}

/// A refusal that follows from the last state of the key makes no call to Redis, and looks like any other.
#[tokio::test]
async fn bounded_refusal_is_over_limit() {
    let (folder, redis) = (Folder::new(), Redis::start());
    let server = start(&folder, &format!("redis: {{ deadline: 5s }}\n{LIMITS}"), &["--store", &redis.url()]);
    let channel = channel(&server).await;
    for code in [Code::Ok, Code::Ok, Code::OverLimit] {
        assert_eq!(ask(&channel, "alice").await.overall_code(), code);
    }
    let began = Instant::now();
    loop {
        let before = redis.script_calls();
        let refused = ask(&channel, "alice").await;
        assert_eq!(codes(&refused), (Code::OverLimit, vec![Code::OverLimit]));
        assert_eq!(remaining(&refused), [0]);
        if redis.script_calls() == before {
            break;
        }
        assert!(began.elapsed() < PATIENCE, "every refusal was asked for");
    }
}

/// One call whose bytes the test controls.
struct Call {
    answer: h2::client::ResponseFuture,
    body: h2::SendStream<Bytes>,
}

/// A raw HTTP/2 connection.
async fn connect(address: SocketAddr) -> h2::client::SendRequest<Bytes> {
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    client
}

async fn call(client: &h2::client::SendRequest<Bytes>, path: &str) -> Call {
    let mut client = client.clone().ready().await.unwrap();
    let request = Request::post(format!("http://localhost{path}")).header("content-type", "application/grpc");
    let (answer, body) = client.send_request(request.body(()).unwrap(), false).unwrap();
    Call { answer, body }
}

impl Call {
    /// Sends this body. Returns the status, and the message unless the response consists of headers only.
    async fn ends(mut self, body: &[u8]) -> (Grpc, Option<RateLimitResponse>) {
        self.body.send_data(Bytes::copy_from_slice(body), true).unwrap();
        let response = self.answer.await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "application/grpc");
        let status = |headers: &hyper::HeaderMap| Grpc::from_bytes(headers["grpc-status"].as_bytes());
        if response.headers().contains_key("grpc-status") {
            assert!(response.headers().contains_key("grpc-message"), "a refusal has a reason");
            return (status(response.headers()), None);
        }
        let mut stream = response.into_body();
        let mut message = Vec::new();
        while let Some(data) = stream.data().await {
            message.extend_from_slice(&data.unwrap());
        }
        let trailers = stream.trailers().await.unwrap().expect("the status is in the trailers");
        assert_eq!(
            message[..5],
            [&[0][..], &u32::try_from(message.len() - 5).unwrap().to_be_bytes()].concat()
        );
        (status(&trailers), Some(RateLimitResponse::decode(&message[5..]).unwrap()))
    }
}

fn framed(message: &[u8]) -> Vec<u8> {
    [&[0][..], &u32::try_from(message.len()).unwrap().to_be_bytes(), message].concat()
}

fn of(user: &str) -> Vec<u8> {
    framed(&question([descriptor([("user", user)])]).encode_to_vec())
}

#[tokio::test]
async fn envoy_requests_are_answered_and_counted() {
    let folder = Folder::new();
    let server = start(&folder, LIMITS, &[]);
    let channel = channel(&server).await;
    for (code, left) in [(Code::Ok, 1), (Code::Ok, 0), (Code::OverLimit, 0)] {
        let answer = ask(&channel, "alice").await;
        assert_eq!((codes(&answer), remaining(&answer)), ((code, vec![code]), vec![left]));
    }
    let nothing = RateLimitServiceClient::new(channel.clone()).should_rate_limit(question([])).await;
    assert_eq!(nothing.unwrap_err().code(), Grpc::InvalidArgument);
    let counted = |result: &str| {
        server.metric(&format!(
            "tollkeeper_requests_total{{transport=\"grpc\",route=\"\",result=\"{result}\"}}"
        ))
    };
    assert_eq!(["allowed", "refused", "degraded", "error"].map(counted), [2.0, 1.0, 0.0, 1.0]);
    assert_eq!(server.metric("tollkeeper_request_duration_seconds_count{transport=\"grpc\"}"), 4.0);
    assert_eq!(server.metric("tollkeeper_checks_total{limit=\"per-user\",result=\"refused\"}"), 1.0);
    assert!(!server.check(r#"{"user":"alice"}"#), "all listeners share the limits");
}

#[tokio::test]
async fn hundred_concurrent_calls_are_limited_exactly() {
    let folder = Folder::new();
    let server = start(&folder, &LIMITS.replace("burst: 2", "burst: 37"), &[]);
    let channel = channel(&server).await;
    let asking: Vec<_> = (0..100)
        .map(|_| {
            let channel = channel.clone();
            tokio::spawn(async move { ask(&channel, "alice").await.overall_code() })
        })
        .collect();
    let mut admitted = 0;
    for asked in asking {
        admitted += u32::from(asked.await.unwrap() == Code::Ok);
    }
    assert_eq!(admitted, 37);
}

#[tokio::test]
async fn health_is_reported_until_drain() {
    let folder = Folder::new();
    let server = start(&folder, LIMITS, &["--drain-delay", "1h"]);
    let channel = channel(&server).await;
    let mut health = HealthClient::new(channel.clone());
    let names = ["", "envoy.service.ratelimit.v3.RateLimitService", "ratelimit"];
    let asked = |name: &str| HealthCheckRequest { service: name.to_owned() };
    for name in names {
        let answer = health.check(asked(name)).await.unwrap().into_inner();
        assert_eq!(answer.status(), ServingStatus::Serving, "{name:?}");
    }
    assert_eq!(health.check(asked("another")).await.unwrap_err().code(), Grpc::NotFound);
    let mut watched = health.watch(asked("")).await.unwrap().into_inner();
    assert_eq!(watched.message().await.unwrap().unwrap().status(), ServingStatus::Serving);

    server.signal("TERM");
    assert_eq!(watched.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    for name in names {
        let answer = health.check(asked(name)).await.unwrap().into_inner();
        assert_eq!(answer.status(), ServingStatus::NotServing, "{name:?}");
    }
    assert_eq!(ask(&channel, "alice").await.overall_code(), Code::Ok, "the server still answers");
    server.signal("TERM");
    assert_eq!(server.ended().code, Some(0));
}

#[tokio::test]
async fn reflection_describes_every_service() {
    let folder = Folder::new();
    let server = start(&folder, LIMITS, &[]);
    let (send, asked) = mpsc::channel(2);
    let mut client = ServerReflectionClient::new(channel(&server).await);
    let mut answers = client.server_reflection_info(ReceiverStream::new(asked)).await.unwrap().into_inner();
    let request = |message| ServerReflectionRequest { host: String::new(), message_request: Some(message) };
    send.send(request(MessageRequest::ListServices(String::new()))).await.unwrap();
    let Some(MessageResponse::ListServicesResponse(listed)) =
        answers.message().await.unwrap().unwrap().message_response
    else {
        panic!("no list");
    };
    let mut names: Vec<_> = listed.service.into_iter().map(|ServiceResponse { name }| name).collect();
    names.sort();
    let expected = ["envoy.service.ratelimit.v3.RateLimitService", "grpc.health.v1.Health"];
    assert_eq!(names[..2], expected, "{names:?}");
    let symbol = "envoy.service.ratelimit.v3.RateLimitRequest".to_owned();
    send.send(request(MessageRequest::FileContainingSymbol(symbol))).await.unwrap();
    let described = answers.message().await.unwrap().unwrap().message_response;
    assert!(matches!(described, Some(MessageResponse::FileDescriptorResponse(_))), "{described:?}");
}

#[tokio::test]
async fn invalid_call_is_refused_with_the_reason() {
    let folder = Folder::new();
    let server = start(&folder, LIMITS, &[]);
    let client = connect(server.listens("grpc")).await;
    let message = question([descriptor([("user", "alice")])]).encode_to_vec();
    let mut compressed = framed(&message);
    compressed[0] = 1;
    let twice = [framed(&message), framed(&message)].concat();
    let text = RateLimitRequest { domain: "x".repeat(10), ..Default::default() }.encode_to_vec();
    let no_text = framed(&[&[0x0a, 2, 0xff, 0xfe][..], &text[12..]].concat());
    for (path, body, expected) in [
        (SHOULD_RATE_LIMIT, &b""[..], Grpc::InvalidArgument),
        (SHOULD_RATE_LIMIT, b"\0\0\0", Grpc::InvalidArgument),
        (SHOULD_RATE_LIMIT, b"\0\0\0\0\0", Grpc::InvalidArgument),
        (SHOULD_RATE_LIMIT, b"\0\xff\xff\xff\xff", Grpc::InvalidArgument),
        (SHOULD_RATE_LIMIT, &framed(b"not a message"), Grpc::InvalidArgument),
        (SHOULD_RATE_LIMIT, &compressed, Grpc::Unimplemented),
        (SHOULD_RATE_LIMIT, &twice, Grpc::InvalidArgument),
        (SHOULD_RATE_LIMIT, &no_text, Grpc::InvalidArgument),
        ("/envoy.service.ratelimit.v3.RateLimitService/Other", &framed(&message), Grpc::Unimplemented),
        (
            "/envoy.service.ratelimit.v2.RateLimitService/ShouldRateLimit",
            &framed(&message),
            Grpc::Unimplemented,
        ),
        ("/", b"", Grpc::Unimplemented),
    ] {
        assert_eq!(call(&client, path).await.ends(body).await, (expected, None), "{path} {body:?}");
    }
    let (status, answer) = call(&client, SHOULD_RATE_LIMIT).await.ends(&framed(&message)).await;
    assert_eq!(
        (status, remaining(&answer.unwrap())),
        (Grpc::Ok, vec![1]),
        "the earlier calls charged nothing"
    );
}

/// The content types that a cross-site page can make a browser send, if this listener has TLS.
#[tokio::test]
async fn call_of_another_type_is_refused() {
    let folder = Folder::new();
    let server = start(&folder, LIMITS, &[]);
    let client = connect(server.listens("grpc")).await;
    for kind in [None, Some("text/plain"), Some("application/x-www-form-urlencoded")] {
        let mut request = Request::post(format!("http://localhost{SHOULD_RATE_LIMIT}"));
        if let Some(kind) = kind {
            request = request.header("content-type", kind);
        }
        let mut client = client.clone().ready().await.unwrap();
        let (answer, mut body) = client.send_request(request.body(()).unwrap(), false).unwrap();
        body.send_data(of("alice").into(), true).unwrap();
        assert_eq!(answer.await.unwrap().status(), 415, "{kind:?}");
    }
    assert_eq!(remaining(&ask(&channel(&server).await, "alice").await), [1], "nothing was charged");
}

#[tokio::test]
async fn message_may_be_split_and_has_a_size_limit() {
    let folder = Folder::new();
    let server = start(&folder, LIMITS, &[]);
    let client = connect(server.listens("grpc")).await;
    let mut slowly = call(&client, SHOULD_RATE_LIMIT).await;
    let message = of("alice");
    for byte in &message[..message.len() - 1] {
        slowly.body.send_data(Bytes::copy_from_slice(&[*byte]), false).unwrap();
    }
    let (status, answer) = slowly.ends(&message[message.len() - 1..]).await;
    assert_eq!((status, remaining(&answer.unwrap())), (Grpc::Ok, vec![1]));

    // Longer than the headers that Envoy accepts: a client must not evade its limit that way.
    let channel = channel(&server).await;
    let long = "x".repeat(3 << 20);
    for code in [Code::Ok, Code::Ok, Code::OverLimit] {
        assert_eq!(ask(&channel, &long).await.overall_code(), code);
    }
    let too_long = question([descriptor([("user", &*"x".repeat(4 << 20))])]);
    let refused = RateLimitServiceClient::new(channel).should_rate_limit(too_long).await.unwrap_err();
    assert_eq!(refused.code(), Grpc::ResourceExhausted);
}

#[tokio::test]
async fn requests_in_flight_are_answered_on_shutdown() {
    let folder = Folder::new();
    let server = start(&folder, LIMITS, &[]);
    let address = server.listens("grpc");
    let silent = TcpStream::connect(address).unwrap();
    let channel = channel(&server).await;
    let asked = HealthCheckRequest { service: String::new() };
    let watching = HealthClient::new(channel).watch(asked).await.unwrap();
    let client = connect(address).await;
    let mut begun = call(&client, SHOULD_RATE_LIMIT).await;
    begun.body.send_data(Bytes::copy_from_slice(&of("alice")[..7]), false).unwrap();
    // Once this call is answered, the call before it has begun.
    call(&client, SHOULD_RATE_LIMIT).await.ends(&of("alice")).await;

    server.signal("TERM");
    eventually("no new connection is accepted", || TcpStream::connect(address).is_err());
    let (status, answer) = begun.ends(&of("alice")[7..]).await;
    assert_eq!((status, remaining(&answer.unwrap())), (Grpc::Ok, vec![0]));
    let ended = server.ended();
    assert_eq!(ended.code, Some(0));
    assert!(
        !ended.log.contains("in flight"),
        "idle and watching clients do not delay shutdown: {}",
        ended.log
    );
    drop((silent, watching));
}

#[tokio::test]
async fn each_limit_applies_its_failure_policy() {
    for (policy, expected) in [
        ("allow", [Code::Ok, Code::Ok, Code::Ok]),
        ("deny", [Code::OverLimit, Code::OverLimit, Code::OverLimit]),
        ("local", [Code::Ok, Code::Ok, Code::OverLimit]),
    ] {
        let folder = Folder::new();
        let limits = LIMITS.replace("burst: 2", &format!("burst: 2, on_store_failure: {policy}"));
        // Nothing listens on that port.
        let server =
            start(&folder, &format!("redis: {{ nodes: 1 }}\n{limits}"), &["--store", "redis://127.0.0.1:1"]);
        let channel = channel(&server).await;
        for code in expected {
            let answer = ask(&channel, "alice").await;
            assert_eq!(codes(&answer), (code, vec![code]), "{policy}");
            let reported = answer.statuses[0].current_limit.is_some();
            assert_eq!(reported, policy == "local", "{policy}: an uncounted limit is not reported");
            if policy == "deny" {
                assert_eq!(
                    answer.statuses[0].duration_until_reset.unwrap().seconds,
                    1,
                    "the retry is after the breaker's pause"
                );
            }
        }
        let degraded = "tollkeeper_requests_total{transport=\"grpc\",route=\"\",result=\"degraded\"}";
        assert_eq!(server.metric(degraded), 3.0, "{policy}");
    }
}

#[tokio::test]
async fn all_calls_but_health_need_a_token() {
    let folder = Folder::new();
    let digest = hex(&sha256(b"secret"));
    let server = start(&folder, &format!("auth: {{ token_sha256: [{digest}] }}\n{LIMITS}"), &[]);
    let channel = channel(&server).await;
    let asked = async |authorization: Option<&str>| {
        let mut request = tonic::Request::new(question([descriptor([("user", "alice")])]));
        if let Some(value) = authorization {
            request.metadata_mut().insert("authorization", value.parse().unwrap());
        }
        let answer = RateLimitServiceClient::new(channel.clone()).should_rate_limit(request).await;
        answer.map_or_else(|status| status.code(), |_| Grpc::Ok)
    };
    for wrong in [None, Some("secret"), Some("Bearer other"), Some("Bearer "), Some("Basic secret")] {
        assert_eq!(asked(wrong).await, Grpc::Unauthenticated, "{wrong:?}");
    }
    assert_eq!(asked(Some("Bearer secret")).await, Grpc::Ok);
    let health = HealthCheckRequest { service: String::new() };
    assert!(HealthClient::new(channel.clone()).check(health).await.is_ok());
    let (_send, questions) = mpsc::channel(1);
    let described = ServerReflectionClient::new(channel.clone())
        .server_reflection_info(ReceiverStream::new(questions))
        .await;
    assert_eq!(described.unwrap_err().code(), Grpc::Unauthenticated);
}

#[test]
fn tls_negotiates_http_2() {
    let (authority, folder) = (Authority::new(), Folder::new());
    let (cert, key) = authority.certify("server", "IP:127.0.0.1");
    let tls = format!("tls: {{ cert: {}, key: {} }}\n{LIMITS}", cert.display(), key.display());
    let server = start(&folder, &tls, &[]);
    let (body, answer) = (folder.path().join("body"), folder.path().join("answer"));
    fs::write(&body, of("alice")).unwrap();
    // curl has another TLS implementation, and speaks HTTP/2 only if ALPN negotiates it.
    let asked = output(
        Command::new("curl")
            .args([
                "--silent",
                "--show-error",
                "--http2",
                "--max-time",
                "20",
                "--write-out",
                "%{http_version}",
            ])
            .args(["--header", "content-type: application/grpc", "--data-binary"])
            .arg(format!("@{}", body.display()))
            .args([Path::new("--output"), &answer, Path::new("--cacert"), &authority.certificate()])
            .arg(format!("https://{}{SHOULD_RATE_LIMIT}", server.listens("grpc"))),
    );
    assert_eq!(text(&asked.stdout).trim(), "2", "{}", text(&asked.stderr));
    let message = fs::read(&answer).unwrap();
    let decoded = RateLimitResponse::decode(&message[5..]).unwrap();
    assert_eq!((codes(&decoded), remaining(&decoded)), ((Code::Ok, vec![Code::Ok]), vec![1]));
}

/// The resident memory of the server, in MiB.
fn memory(server: &Server) -> usize {
    let statm = fs::read_to_string(format!("/proc/{}/statm", server.pid())).unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    (pages * 4096) >> 20
}

/// Pseudo-random numbers, the same in every run.
fn bytes(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..count).map(|_| next()).collect()
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The head of a call: POST, http, the path, an authority, and a content type.
fn head() -> Vec<u8> {
    let path = SHOULD_RATE_LIMIT.as_bytes();
    let mut block = vec![0x83, 0x86, 0x04, u8::try_from(path.len()).unwrap()];
    block.extend(path);
    block.extend([0x01, 1, b'a']);
    block.extend([0x0f, 0x10, 16]);
    block.extend(b"application/grpc");
    block
}

/// Sends these bytes and reads until the server closes the connection or sends nothing for 50 ms.
fn pour(address: SocketAddr, bytes: &[u8]) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    stream.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    // The server may close before everything was sent.
    let _ = stream.write_all(bytes);
    let mut answer = [0; 64 << 10];
    while stream.read(&mut answer).is_ok_and(|count| count > 0) {}
}

#[tokio::test]
async fn random_bytes_do_not_crash_or_leak() {
    let folder = Folder::new();
    let server = start(&folder, LIMITS, &[]);
    let address = server.listens("grpc");
    let channel = channel(&server).await;
    pour(address, &bytes(1, 1 << 10));
    let before = memory(&server);
    for seed in 2..200 {
        let random = bytes(seed, 16 << 10);
        pour(address, &random);
        pour(address, &[PREFACE, &random].concat());
        // As the payload of every frame type, on an open stream.
        let mut frames = [PREFACE, &frame(4, 0, 0, &[]), &frame(1, 4, 1, &head())].concat();
        for (index, chunk) in random.chunks(64).enumerate() {
            let (kind, flags) = (chunk[0] % 11, chunk[1]);
            frames.extend(frame(kind, flags, u32::try_from(index % 5).unwrap(), &chunk[2..]));
        }
        pour(address, &frames);
    }
    let after = memory(&server);
    assert!(after < before + 32, "{before} MiB before, {after} MiB after");
    assert_eq!(ask(&channel, "alice").await.overall_code(), Code::Ok, "the server still answers");
}

#[tokio::test]
async fn stream_floods_do_not_crash_or_leak() {
    let folder = Folder::new();
    let server = start(&folder, LIMITS, &[]);
    let address = server.listens("grpc");
    let channel = channel(&server).await;
    let settings = frame(4, 0, 0, &[]);
    let flood = |each: &dyn Fn(u32) -> Vec<u8>| {
        let mut bytes = [PREFACE, &settings].concat();
        (0..10_000).for_each(|number| bytes.extend(each(2 * number + 1)));
        bytes
    };
    let message = of("bob");
    let floods = [
        // Calls without a message, calls reset at once, and messages that never end.
        flood(&|stream| frame(1, 4, stream, &head())),
        flood(&|stream| [frame(1, 4, stream, &head()), frame(3, 0, stream, &[0, 0, 0, 8])].concat()),
        flood(&|stream| {
            [frame(1, 4, stream, &head()), frame(0, 0, stream, &message[..message.len() - 1])].concat()
        }),
        flood(&|stream| [frame(1, 4, stream, &head()), frame(0, 1, stream, &message)].concat()),
        // SETTINGS and PING frames, which all need an acknowledgement.
        flood(&|_| settings.clone()),
        flood(&|_| frame(6, 0, 0, &[0; 8])),
    ];
    pour(address, &floods[0]);
    let before = memory(&server);
    for _ in 0..3 {
        for flood in &floods {
            pour(address, flood);
        }
    }
    let after = memory(&server);
    assert!(after < before + 64, "{before} MiB before, {after} MiB after");
    assert_eq!(ask(&channel, "alice").await.overall_code(), Code::Ok, "the server still answers");
}

/// A thousand unfinished messages on each of four connections: 240 MiB, if all were buffered.
#[tokio::test(flavor = "multi_thread")]
async fn calls_of_all_connections_share_one_memory_budget() {
    const CALLS: usize = 4 * 1_000;
    let folder = Folder::new();
    let server = start(&folder, LIMITS, &[]);
    let address = server.listens("grpc");
    let channel = channel(&server).await;
    assert_eq!(ask(&channel, "alice").await.overall_code(), Code::Ok);
    let before = memory(&server);

    let piece = Bytes::from(framed(&[b'x'; 1 << 20])).slice(..60 << 10);
    let mut open = Vec::new();
    for _ in 0..4 {
        let client = connect(address).await;
        for _ in 0..CALLS / 4 {
            let mut call = call(&client, SHOULD_RATE_LIMIT).await;
            call.body.send_data(piece.clone(), false).unwrap();
            open.push(call);
        }
    }
    // Each takes at least 60 KiB, so less than a fifth of them fit.
    let refused = || server.metric("tollkeeper_grpc_exhausted_total");
    eventually("more than 80% of the calls are refused", || refused() > 0.8 * CALLS as f64);
    let after = memory(&server);
    println!("{CALLS} messages that never end: {before} MiB before, {after} MiB after");
    assert!(after < before + 96, "{before} MiB before, {after} MiB after");
    server.logs("a gRPC call was refused with RESOURCE_EXHAUSTED");
    assert_eq!(server.log().matches("RESOURCE_EXHAUSTED").count(), 1, "logged once a minute");

    assert_eq!(ask(&channel, "alice").await.overall_code(), Code::Ok, "other connections are still answered");
    let answered = open.iter_mut().filter_map(|call| (&mut call.answer).now_or_never());
    let status =
        |response: hyper::Response<_>| Grpc::from_bytes(response.headers()["grpc-status"].as_bytes());
    let statuses: Vec<Grpc> = answered.map(|response| status(response.unwrap())).collect();
    assert!(statuses.contains(&Grpc::ResourceExhausted), "{statuses:?}");
    drop(open);
    let (status, answer) = call(&connect(address).await, SHOULD_RATE_LIMIT).await.ends(&of("bob")).await;
    assert_eq!((status, remaining(&answer.unwrap())), (Grpc::Ok, vec![1]));
}

/// Streams whose responses are never read: requests fill their windows, 63 KiB in each of 3,200 streams.
#[tokio::test(flavor = "multi_thread")]
async fn unread_reflection_streams_share_the_budget() {
    const CONNECTIONS: usize = 800;
    tollkeeper_server::control::rlimit::raise();
    let folder = Folder::new();
    let server = start(&folder, LIMITS, &[]);
    let address = server.listens("grpc");
    let channel = channel(&server).await;
    assert_eq!(ask(&channel, "alice").await.overall_code(), Code::Ok);
    let before = memory(&server);

    let services = ServerReflectionRequest {
        message_request: Some(MessageRequest::ListServices(String::new())),
        ..Default::default()
    };
    let services = framed(&services.encode_to_vec());
    let requests = Bytes::from(services.repeat((63 << 10) / services.len()));
    let mut open = Vec::new();
    for _ in 0..CONNECTIONS {
        let client = connect(address).await;
        for _ in 0..4 {
            let path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
            let mut call = call(&client, path).await;
            // A call that the server has already refused takes no data.
            let _ = call.body.send_data(requests.clone(), false);
            open.push(call);
        }
    }
    let refused = || server.metric("tollkeeper_grpc_exhausted_total");
    eventually("some calls are refused", || refused() > 0.0);
    let after = memory(&server);
    println!("{} streams: {before} MiB before, {after} MiB after", open.len());
    assert!(after < before + 96, "{before} MiB before, {after} MiB after");
    assert_eq!(ask(&channel, "alice").await.overall_code(), Code::Ok, "other connections are still answered");
}
