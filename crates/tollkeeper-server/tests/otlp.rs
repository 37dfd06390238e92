//! Metrics and traces over OTLP, as a collector receives them.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod envoy_oracle;
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::{Metric, metric, number_data_point};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use tonic::transport::Channel;

use crate::envoy_oracle::{
    Code, RateLimitDescriptor, RateLimitServiceClient, costing, descriptor, giving, question,
};
use crate::support::{Folder, Server, eventually};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// Request lines and bodies, in arrival order.
type Received = Arc<Mutex<Vec<(String, Vec<u8>)>>>;

/// A collector that answers every request with the same status.
struct Receiver {
    address: SocketAddr,
    received: Received,
}

impl Receiver {
    fn start(status: &'static str) -> Receiver {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let received = Received::default();
        let into = Arc::clone(&received);
        // The thread ends with the test process.
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let mut reader = BufReader::new(stream);
                let head: Vec<String> = reader
                    .by_ref()
                    .lines()
                    .map_while(Result::ok)
                    .take_while(|line| !line.is_empty())
                    .collect();
                let header = |name: &str| head.iter().find_map(|line| line.strip_prefix(name));
                assert_eq!(header("content-type: "), Some("application/x-protobuf"), "{head:?}");
                let mut body = vec![0; header("content-length: ").unwrap().parse().unwrap()];
                reader.read_exact(&mut body).unwrap();
                into.lock().unwrap().push((head[0].clone(), body));
                let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
                reader.into_inner().write_all(answer.as_bytes()).unwrap();
            }
        });
        Receiver { address, received }
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn bodies(&self, path: &str) -> Vec<Vec<u8>> {
        let line = format!("POST {path} HTTP/1.1");
        let received = self.received.lock().unwrap();
        received.iter().filter(|(first, _)| *first == line).map(|(_, body)| body.clone()).collect()
    }

    fn spans(&self) -> Vec<Span> {
        let requests = self.bodies("/v1/traces");
        let requests = requests.iter().map(|body| ExportTraceServiceRequest::decode(&body[..]).unwrap());
        let resources = requests.flat_map(|request| request.resource_spans);
        resources.flat_map(|all| all.scope_spans).flat_map(|scope| scope.spans).collect()
    }

    /// The resource attributes and metrics of the last export.
    fn metrics(&self) -> (Vec<KeyValue>, Vec<Metric>) {
        let last = self.bodies("/v1/metrics").pop().expect("metrics were sent");
        let request = ExportMetricsServiceRequest::decode(&last[..]).unwrap();
        let all = request.resource_metrics.into_iter().next().unwrap();
        let metrics = all.scope_metrics.into_iter().flat_map(|scope| scope.metrics).collect();
        (all.resource.unwrap().attributes, metrics)
    }
}

fn attributes_of(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    let value = |pair: &KeyValue| match pair.value.clone().unwrap().value.unwrap() {
        any_value::Value::StringValue(text) => text,
        any_value::Value::BoolValue(truth) => truth.to_string(),
        any_value::Value::DoubleValue(number) => number.to_string(),
        any_value::Value::ArrayValue(list) => {
            let texts = list.values.into_iter().map(|any| match any.value.unwrap() {
                any_value::Value::StringValue(text) => text,
                other => panic!("{other:?}"),
            });
            texts.collect::<Vec<_>>().join(" ")
        }
        other => panic!("{other:?}"),
    };
    attributes.iter().map(|pair| (pair.key.clone(), value(pair))).collect()
}

const LIMITS: &str = "limits:
  - { name: per-user, by: user, rate: 1/day, burst: 1 }
  - { name: all, rate: 100/day, algorithm: fixed-window }
";

fn start(folder: &Folder, receiver: &Receiver) -> Server {
    start_with(folder, receiver, &[])
}

fn start_with(folder: &Folder, receiver: &Receiver, more: &[&str]) -> Server {
    let file = folder.write("tollkeeper.yaml", LIMITS);
    let args = ["--config", file.to_str().unwrap(), "--otlp", &receiver.url()];
    Server::with(&[&args, more].concat())
}

/// Stops a server, which exports its remaining spans and metrics first.
fn finish(server: Server) {
    server.signal("TERM");
    assert_eq!(server.ended().code, Some(0));
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The name and attributes of a span. `retry_after` must be about a day, and is replaced by `retry`: `a day`.
fn summary(span: &Span) -> (String, BTreeMap<String, String>) {
    let mut attributes = attributes_of(&span.attributes);
    if let Some(retry) = attributes.remove("tollkeeper.retry_after") {
        let retry: f64 = retry.parse().unwrap();
        assert!(retry > 86_000.0 && retry <= 86_400.0, "{span:?}");
        attributes.insert("retry".to_owned(), "a day".to_owned());
    }
    (span.name.clone(), attributes)
}

fn expected(name: &str, pairs: &[(&str, &str)]) -> (String, BTreeMap<String, String>) {
    let pairs = pairs.iter().map(|(name, value)| {
        let name = if *name == "retry" { (*name).to_owned() } else { format!("tollkeeper.{name}") };
        (name, (*value).to_owned())
    });
    (name.to_owned(), pairs.collect())
}

/// Asserts what holds for every span: kind server, current time, no key values.
fn check_span(span: &Span) {
    assert_eq!(span.kind, 2, "span kind server");
    assert!(span.start_time_unix_nano > 1_700_000_000_000_000_000, "{span:?}");
    assert!(span.end_time_unix_nano >= span.start_time_unix_nano, "{span:?}");
    assert!(!format!("{span:?}").contains("alice"), "{span:?}");
}

fn ask(server: &Server, path: &str, headers: &str, body: &str) -> u16 {
    let len = body.len();
    let request =
        format!("POST {path} HTTP/1.1\r\nhost: localhost\r\n{headers}content-length: {len}\r\n\r\n{body}");
    let mut client = server.client();
    client.send(request.as_bytes());
    client.answer().status
}

#[test]
fn decision_is_a_child_span_of_the_caller() {
    let (folder, receiver) = (Folder::new(), Receiver::start("200 OK"));
    let server = start(&folder, &receiver);
    let alice = r#"{"facts":{"user":"alice"}}"#;
    let parent = |flags: &str| format!("traceparent: 00-{TRACE}-{PARENT}-{flags}\r\n");
    assert_eq!(ask(&server, "/v1/check", &parent("01"), alice), 200);
    // A request with `te` takes the path through hyper.
    assert_eq!(ask(&server, "/v1/check", &format!("te: trailers\r\n{}", parent("01")), alice), 429);
    assert_eq!(ask(&server, "/v1/peek", &parent("01"), alice), 200);
    let batch = format!("{{\"checks\":[{alice},7]}}");
    assert_eq!(ask(&server, "/v1/check/batch", &parent("01"), &batch), 200);
    // These are not sampled.
    assert_eq!(ask(&server, "/v1/check", &parent("00"), alice), 429);
    assert_eq!(ask(&server, "/v1/check", "te: trailers\r\n", alice), 429);
    assert_eq!(ask(&server, "/v1/check", "", alice), 429);
    eventually("the spans arrive", || receiver.spans().len() >= 4);
    finish(server);

    let spans = receiver.spans();
    let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["check", "check", "peek", "check"]);
    for span in &spans {
        assert_eq!((hex(&span.trace_id), hex(&span.parent_span_id)), (TRACE.to_owned(), PARENT.to_owned()));
        check_span(span);
    }
    let ids: BTreeSet<&[u8]> = spans.iter().map(|span| &span.span_id[..]).collect();
    assert!(ids.len() == 4 && ids.iter().all(|id| id.len() == 8), "{ids:?}");

    let limits = ("limits", "per-user all");
    let allowed = [("allowed", "true"), ("binding", "per-user"), limits, ("refused_by", "")];
    assert_eq!(summary(&spans[0]), expected("check", &allowed));
    let refused = [
        ("allowed", "false"),
        ("binding", "per-user"),
        limits,
        ("refused_by", "per-user"),
        ("retry", "a day"),
    ];
    assert_eq!(summary(&spans[1]), expected("check", &refused));
}

#[test]
fn proxied_request_is_a_child_span() {
    let (folder, receiver, upstream) = (Folder::new(), Receiver::start("200 OK"), Server::start());
    let file = folder.write("tollkeeper.yaml", "limits: [{ name: all, rate: 1/day, burst: 1 }]");
    let mut command = support::tollkeeper();
    command.args(["proxy", &format!("http://{}", upstream.listens("http"))]);
    command.args(["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--otlp", &receiver.url()]);
    let proxy = Server::launch(command.arg("--config").arg(file));
    let mut client = support::Client::to(proxy.listens("proxy"));
    let request =
        format!("GET /healthz HTTP/1.1\r\nhost: localhost\r\ntraceparent: 00-{TRACE}-{PARENT}-01\r\n\r\n");
    for status in [200, 429] {
        client.send(request.as_bytes());
        assert_eq!(client.answer().status, status);
    }
    eventually("the spans arrive", || receiver.spans().len() >= 2);
    finish(proxy);
    for (span, allowed) in receiver.spans().iter().zip(["true", "false"]) {
        assert_eq!((hex(&span.trace_id), hex(&span.parent_span_id)), (TRACE.to_owned(), PARENT.to_owned()));
        check_span(span);
        let (name, attributes) = summary(span);
        assert_eq!((name.as_str(), attributes["tollkeeper.allowed"].as_str()), ("proxy", allowed));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn envoy_call_is_a_child_span() {
    let (folder, receiver) = (Folder::new(), Receiver::start("200 OK"));
    let server = start_with(&folder, &receiver, &["--grpc", "127.0.0.1:0"]);
    let url = format!("http://{}", server.listens("grpc"));
    let client = RateLimitServiceClient::new(Channel::from_shared(url).unwrap().connect().await.unwrap());
    let ask = async |flags: Option<&str>, descriptors: Vec<RateLimitDescriptor>| {
        let mut asked = tonic::Request::new(question(descriptors));
        if let Some(flags) = flags {
            let parent = format!("00-{TRACE}-{PARENT}-{flags}").parse().unwrap();
            asked.metadata_mut().insert("traceparent", parent);
        }
        client.clone().should_rate_limit(asked).await.map(|answer| answer.into_inner().overall_code())
    };
    let alice = || descriptor([("user", "alice")]);
    assert_eq!(ask(Some("01"), vec![alice()]).await.unwrap(), Code::Ok);
    assert_eq!(ask(Some("01"), vec![alice()]).await.unwrap(), Code::OverLimit);
    // One descriptor peeks, one is charged, one is refunded: they are one call.
    let (peek, charge) = (costing(0, alice()), descriptor([("user", "bob")]));
    assert_eq!(ask(Some("01"), vec![peek, charge.clone()]).await.unwrap(), Code::OverLimit);
    assert_eq!(ask(Some("01"), vec![giving(1, alice())]).await.unwrap(), Code::Ok);
    // These are not sampled, and an invalid request decides nothing.
    assert_eq!(ask(Some("00"), vec![charge.clone()]).await.unwrap(), Code::Ok);
    assert_eq!(ask(None, vec![charge]).await.unwrap(), Code::OverLimit);
    assert!(ask(Some("01"), Vec::new()).await.is_err());
    eventually("the spans arrive", || receiver.spans().len() >= 4);
    finish(server);

    let spans = receiver.spans();
    for span in &spans {
        assert_eq!((hex(&span.trace_id), hex(&span.parent_span_id)), (TRACE.to_owned(), PARENT.to_owned()));
        check_span(span);
    }
    let (per_user, limits) = (("binding", "per-user"), ("limits", "per-user all"));
    let refused = ("allowed", "false");
    let expected = [
        &[("allowed", "true"), per_user, limits, ("refused_by", "")][..],
        &[refused, per_user, limits, ("refused_by", "per-user"), ("retry", "a day")],
        // The limits of the descriptor that peeked and was refused come first.
        &[
            refused,
            per_user,
            ("limits", "per-user all per-user all"),
            ("refused_by", "per-user"),
            ("retry", "a day"),
        ],
        &[("allowed", "true"), limits, ("refused_by", "")],
    ]
    .map(|pairs| expected("ShouldRateLimit", pairs));
    assert_eq!(spans.iter().map(summary).collect::<Vec<_>>(), expected);
}

#[test]
fn resp_decision_starts_a_trace() {
    let (folder, receiver) = (Folder::new(), Receiver::start("200 OK"));
    let server = start_with(&folder, &receiver, &["--resp", "127.0.0.1:0"]);
    let client = redis::Client::open(format!("redis://{}", server.resp())).unwrap();
    let mut client = client.get_connection().unwrap();
    let mut ask = |words: &str| {
        let mut command = redis::Cmd::new();
        words.split(' ').for_each(|word| _ = command.arg(word));
        command.query::<redis::Value>(&mut client)
    };
    for words in [
        "TK.PEEK user alice",
        "TK.CHECK user alice",
        "TK.CHECK user alice",
        "CL.THROTTLE alice 0 1 86400",
        "CL.THROTTLE alice 0 1 86400",
        "CL.THROTTLE alice 0 1 86400 0",
        "THROTTLE alice 1 1 86400",
    ] {
        ask(words).unwrap_or_else(|error| panic!("{words}: {error}"));
    }
    // These decide nothing.
    assert!(ask("TK.CHECK user").is_err() && ask("CL.THROTTLE alice").is_err() && ask("PING").is_ok());
    assert!(ask("DEL alice").is_ok());
    eventually("the spans arrive", || receiver.spans().len() >= 7);
    finish(server);

    let spans = receiver.spans();
    for span in &spans {
        assert_eq!((span.trace_id.len(), span.span_id.len()), (16, 8), "{span:?}");
        assert_eq!(hex(&span.parent_span_id), "", "{span:?}");
        check_span(span);
    }
    let traces: BTreeSet<&[u8]> = spans.iter().map(|span| &span.trace_id[..]).collect();
    assert_eq!(traces.len(), spans.len());

    let limits = ("limits", "per-user all");
    let allowed = [("allowed", "true"), ("binding", "per-user"), limits, ("refused_by", "")];
    let refused = [
        ("allowed", "false"),
        ("binding", "per-user"),
        limits,
        ("refused_by", "per-user"),
        ("retry", "a day"),
    ];
    let passed = |name| {
        expected(name, &[("allowed", "true"), ("binding", name), ("limits", name), ("refused_by", "")])
    };
    let cl_throttle = "CL.THROTTLE";
    let throttled = [
        ("allowed", "false"),
        ("binding", cl_throttle),
        ("limits", cl_throttle),
        ("refused_by", cl_throttle),
        ("retry", "a day"),
    ];
    let expected = [
        expected("TK.PEEK", &allowed),
        expected("TK.CHECK", &allowed),
        expected("TK.CHECK", &refused),
        passed(cl_throttle),
        expected(cl_throttle, &throttled),
        passed(cl_throttle),
        passed("THROTTLE"),
    ];
    assert_eq!(spans.iter().map(summary).collect::<Vec<_>>(), expected);
}

#[test]
fn collector_gets_the_same_metrics_as_the_page() {
    let (folder, receiver) = (Folder::new(), Receiver::start("200 OK"));
    let server = start(&folder, &receiver);
    for _ in 0..3 {
        server.check(r#"{"user":"alice"}"#);
    }
    server.check("{}");
    let page = server.get("/metrics");
    server.signal("TERM");
    assert_eq!(server.ended().code, Some(0));

    let (resource, metrics) = receiver.metrics();
    assert_eq!(attributes_of(&resource)["service.name"], "tollkeeper");
    let mut lines = Vec::new();
    let series = |name: &str, labels: &[KeyValue]| {
        // Labels are exported in the order of the page.
        let labels: Vec<String> = labels
            .iter()
            .map(|pair| format!("{}=\"{}\"", pair.key, attributes_of(std::slice::from_ref(pair))[&pair.key]))
            .collect();
        if labels.is_empty() { name.to_owned() } else { format!("{name}{{{}}}", labels.join(",")) }
    };
    for metric in &metrics {
        let name = &metric.name;
        let number = |value: &Option<number_data_point::Value>| match value {
            Some(number_data_point::Value::AsInt(value)) => *value,
            other => panic!("{name}: {other:?}"),
        };
        match metric.data.as_ref().unwrap() {
            metric::Data::Gauge(gauge) => {
                for point in &gauge.data_points {
                    lines.push(format!("{} {}", series(name, &point.attributes), number(&point.value)));
                }
            }
            metric::Data::Sum(sum) => {
                assert!(sum.is_monotonic && sum.aggregation_temporality == 2, "{name}");
                for point in &sum.data_points {
                    assert!(point.start_time_unix_nano < point.time_unix_nano, "{name}");
                    lines.push(format!("{} {}", series(name, &point.attributes), number(&point.value)));
                }
            }
            metric::Data::Histogram(histogram) => {
                assert_eq!(histogram.aggregation_temporality, 2, "{name}");
                for point in &histogram.data_points {
                    assert_eq!(point.bucket_counts.len(), point.explicit_bounds.len() + 1, "{name}");
                    assert_eq!(point.bucket_counts.iter().sum::<u64>(), point.count, "{name}");
                    let sum = format!("{name}_sum");
                    lines.push(format!("{} {}", series(&sum, &point.attributes), point.sum.unwrap()));
                    let count = format!("{name}_count");
                    lines.push(format!("{} {}", series(&count, &point.attributes), point.count));
                }
            }
            other => panic!("{name}: {other:?}"),
        }
    }
    // Reading the page opens a connection, so this gauge differs.
    let is_other = |line: &str| line.starts_with("tollkeeper_connections{");
    lines.retain(|line| !is_other(line));
    let is_shown = |line: &&str| !line.starts_with('#') && !line.contains("_bucket{") && !is_other(line);
    let shown: Vec<&str> = page.text().lines().filter(is_shown).collect();
    assert_eq!(lines, shown);
    assert!(shown.len() > 20, "{shown:?}");
    let unit = |name: &str| metrics.iter().find(|metric| metric.name == name).unwrap().unit.clone();
    assert_eq!(unit("tollkeeper_request_duration_seconds"), "s");
    assert_eq!(unit("tollkeeper_store_memory_bytes"), "By");
}

#[test]
fn failing_collector_is_logged_once_and_never_awaited() {
    let (folder, receiver) = (Folder::new(), Receiver::start("503 Service Unavailable"));
    let server = start(&folder, &receiver);
    let traced = format!("traceparent: 00-{TRACE}-{PARENT}-01\r\n");
    for attempt in 1..=2 {
        ask(&server, "/v1/check", &traced, r#"{"facts":{"user":"alice"}}"#);
        eventually("the export was tried", || receiver.bodies("/v1/traces").len() >= attempt);
    }
    server.signal("TERM");
    let ended = server.ended();
    assert_eq!(ended.code, Some(0));
    let lines: Vec<&str> = ended.log.lines().filter(|line| line.contains("the collector at")).collect();
    let reasons: Vec<bool> =
        lines.iter().map(|line| line.contains("the collector answered 503 Service")).collect();
    assert_eq!(reasons, [true, true], "once for spans, once for metrics: {lines:?}");
}

#[test]
fn invalid_collector_address_is_refused_with_an_example() {
    for (url, hint) in [("otel:4318", "http://127.0.0.1:4318"), ("https://otel", "over http, not https")] {
        let output = support::run(&["serve", "--otlp", url]);
        assert_eq!(output.status.code(), Some(2));
        assert!(support::text(&output.stderr).contains(hint), "{output:?}");
    }
}
