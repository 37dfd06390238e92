//! Tests of RESP over in-memory connections, with a store on a manual clock.

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll};
use std::time::Duration;

use crate::digest::sha256;
use redis::Value;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tollkeeper::config::{Config, Format, TokenDigest};
use tollkeeper::{Capacity, Clock, ManualClock, MemoryStore, Span, Time};
use tollkeeper_engine::api::decision_json::write_decision;
use tollkeeper_engine::json::Writer;

use super::connection::serve;
use super::*;
use crate::command::serve::BUILTIN;
use crate::control::access::Tokens;
use crate::server::builtin;
use crate::store::Store;
use crate::telemetry::metrics::text;
use crate::transport::connection_budget::Seat;
use crate::transport::http::connection::tests::PEER;
use tollkeeper_engine::api::active_limits::LimitSource;

struct World {
    clock: ManualClock,
    resp: Arc<Resp>,
}

fn world_of(config: Config) -> World {
    let clock = ManualClock::new(Time::from_micros(1_760_000_000_000_000));
    let store = Store::Memory(MemoryStore::new(Capacity::default(), Clock::manual(&clock)));
    let service = Arc::new(
        Service::new(config, LimitSource::Builtin, store).expect("the built-in config reads no files"),
    );
    World { clock, resp: Arc::new(Resp::new(service, OnStoreFailure::Local)) }
}

fn world() -> World {
    world_of(builtin(BUILTIN))
}

impl World {
    /// An in-memory connection, and the sender that stops it.
    fn connect(&self) -> (watch::Sender<()>, DuplexStream) {
        let (stop, stopped) = watch::channel(());
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        tokio::spawn(serve(theirs, PEER, Arc::clone(&self.resp), Seat::alone(stopped)));
        (stop, ours)
    }

    /// Sends these bytes, closes the sending side, and returns all replies.
    async fn send(&self, bytes: impl AsRef<[u8]>) -> String {
        let (_stop, mut stream) = self.connect();
        stream.write_all(bytes.as_ref()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answers = Vec::new();
        stream.read_to_end(&mut answers).await.unwrap();
        String::from_utf8_lossy(&answers).into_owned()
    }

    /// Sends these lines, and returns the parsed reply to each.
    async fn values(&self, lines: &str) -> Vec<Value> {
        let replies = self.send(lines).await;
        // Parsed by an independent implementation of the protocol.
        let (mut parser, mut rest) = (redis::Parser::new(), replies.as_bytes());
        let values: Vec<Value> = std::iter::from_fn(|| parser.parse_value(&mut rest).ok()).collect();
        assert_eq!(values.len(), lines.lines().count(), "{replies}");
        values
    }
}

/// The table is the one that redis-cell shares with throttled.
#[tokio::test]
async fn cl_throttle_matches_the_table_of_redis_cell() {
    const ROWS: &str =
        include_str!("../../../../tollkeeper-core/src/algorithm/vectors/meter-1-per-1s-burst-5.tsv");
    let (world, mut now, mut rows) = (world(), 0, 0);
    for row in ROWS.lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<&str> = row.split('\t').collect();
        let [at, cost, verdict, remaining, reset, retry] = fields[..] else { panic!("{row}") };
        // Milliseconds in the table are seconds here.
        let at: u64 = at.parse().unwrap();
        world.clock.advance(Span::from_secs(at - now));
        now = at;
        let replies = world.send(format!("CL.THROTTLE key 4 1 1000 {cost}\r\n")).await;
        let limited = u8::from(verdict == "deny");
        let retry = if matches!(retry, "-" | "never") { "-1" } else { retry };
        assert_eq!(
            replies,
            format!("*5\r\n:{limited}\r\n:5\r\n:{remaining}\r\n:{retry}\r\n:{reset}\r\n"),
            "{row}"
        );
        rows += 1;
    }
    assert_eq!(rows, 16);
}

#[tokio::test]
async fn throttle_replies_in_order_and_rounding_of_throttlecrab() {
    let world = world();
    for (wait_ms, line, expected) in [
        (0, "THROTTLE key 2 2 3", [1, 2, 1, 1, 0]),
        (0, "throttle key 2 2 3 1", [1, 2, 0, 3, 0]),
        (0, "THROTTLE key 2 2 3", [0, 2, 0, 3, 1]),
        (400, "THROTTLE key 2 2 3 0", [1, 2, 0, 2, 0]),
        (0, "THROTTLE key 2 2 3 2", [0, 2, 0, 2, 2]),
        (0, "THROTTLE key 2 2 3 3", [0, 2, 0, 2, -1]),
        (1_100, "THROTTLE key 2 2 3 1", [1, 2, 0, 3, 0]),
        (0, "THROTTLE key 2 2 4 1", [1, 2, 1, 2, 0]),
    ] {
        world.clock.advance(Span::from_millis(wait_ms));
        let expected: String = expected.iter().map(|number| format!(":{number}\r\n")).collect();
        assert_eq!(world.send(format!("{line}\r\n")).await, format!("*5\r\n{expected}"), "{line}");
    }
}

#[tokio::test]
async fn idle_key_never_exceeds_its_burst() {
    // throttlecrab admits 17 requests here, although the burst is 10.
    let world = world();
    let line = "THROTTLE key 10 100 60\r\n";
    world.send(line).await;
    world.clock.advance(Span::from_millis(5_300));
    let replies = world.send(line.repeat(30)).await;
    assert_eq!(replies.matches("*5\r\n:1\r\n").count(), 10, "{replies}");
    assert!(replies.starts_with("*5\r\n:1\r\n:10\r\n:9\r\n"), "{replies}");
}

#[tokio::test]
async fn invalid_calls_get_errors_of_redis_cell_and_throttlecrab() {
    const USAGE: &str = "Cell error: Store error: Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]";
    let world = world();
    for (line, expected) in [
        ("CL.THROTTLE", USAGE),
        ("CL.THROTTLE key 1 1", USAGE),
        ("CL.THROTTLE key 1 1 1 1 1", USAGE),
        ("CL.THROTTLE key a 1 1", "Cell error: Store error: Couldn't parse as integer: a"),
        ("CL.THROTTLE key 1 1.5 1", "Cell error: Store error: Couldn't parse as integer: 1.5"),
        ("CL.THROTTLE key 1 1 \"\"", "Cell error: Store error: Couldn't parse as integer: "),
        ("CL.THROTTLE key 1 1 1 x\"", "Cell error: Store error: Couldn't parse as integer: x\""),
        ("CL.THROTTLE key 1 0 1", "Cell error: Store error: Zero rates are not supported"),
        ("CL.THROTTLE key 1 1 0", "Cell error: Store error: Zero rates are not supported"),
        ("CL.THROTTLE key 1 1 1 -1", "ERR negative quantity: -1"),
        ("CL.THROTTLE key -1 1 1", "ERR negative max_burst: -1"),
        ("CL.THROTTLE key 1 -1 1", "ERR negative count: -1"),
        ("CL.THROTTLE key 1 1 -1", "ERR negative period: -1"),
        ("CL.THROTTLE key 1 1 40000000", "ERR period 40000000s is not between 1ms and 366d"),
        (
            "CL.THROTTLE key 1 9223372036854775807 1",
            "ERR 9223372036854775807 per 1s is too large for token-bucket (at most 2251799813)",
        ),
        (
            "CL.THROTTLE key 1 1 1 9223372036854775807",
            "ERR the cost 9223372036854775807 is too large (at most 2147483648)",
        ),
        ("THROTTLE", "ERR wrong number of arguments for 'throttle' command"),
        ("THROTTLE key 1 1", "ERR wrong number of arguments for 'throttle' command"),
        ("THROTTLE key 1 1 1 1 1", "ERR wrong number of arguments for 'throttle' command"),
        ("THROTTLE \"\\xff\" 1 1 1", "ERR invalid key"),
        ("THROTTLE key a 1 1", "ERR invalid max_burst"),
        ("THROTTLE key 1 a 1", "ERR invalid count_per_period"),
        ("THROTTLE key 1 1 a", "ERR invalid period"),
        ("THROTTLE key 1 1 1 a", "ERR invalid quantity"),
        ("THROTTLE key 1 1 1 -1", "ERR Rate limit check failed: negative quantity: -1"),
        ("THROTTLE key 0 1 1", "ERR Rate limit check failed: invalid rate limit parameters"),
        ("THROTTLE key 1 0 1", "ERR Rate limit check failed: invalid rate limit parameters"),
        ("THROTTLE key 1 1 -5", "ERR Rate limit check failed: invalid rate limit parameters"),
        (
            "THROTTLE key 1 1 40000000",
            "ERR Rate limit check failed: period 40000000s is not between 1ms and 366d",
        ),
        ("INCR key", "ERR unknown command 'INCR'"),
    ] {
        assert_eq!(world.send(format!("{line}\r\n")).await, format!("-{expected}\r\n"), "{line}");
    }
    let service = &world.resp.service;
    let metrics = text::write(&service.metrics.families(&service.limiter, &service.store));
    assert!(
        metrics.contains("tollkeeper_requests_total{transport=\"resp\",route=\"\",result=\"error\"} 29\n"),
        "{metrics}"
    );
    assert_eq!(world.resp.service.store.memory().keys(), 0, "nothing was charged");
}

#[tokio::test]
async fn keys_of_any_bytes_are_separate_and_can_be_deleted() {
    let world = world();
    let long = "x".repeat(5_000);
    for key in ["", "a", "a b", "a:b", "\\xff\\xfe", "\\xff", &long, &long[1..]] {
        let call = format!("CL.THROTTLE \"{key}\" 1 1 60\r\n");
        let delete = format!("DEL \"{key}\"\r\n");
        let replies = world.send(format!("{call}{call}{delete}{delete}{call}{delete}")).await;
        let first = "*5\r\n:0\r\n:2\r\n:1\r\n:-1\r\n:60\r\n";
        let second = "*5\r\n:0\r\n:2\r\n:0\r\n:-1\r\n:120\r\n";
        assert_eq!(replies, format!("{first}{second}:1\r\n:0\r\n{first}:1\r\n"), "{key:.10}");
    }
    let both = "CL.THROTTLE a 1 1 7\r\nTHROTTLE a 1 1 8\r\nTHROTTLE b 1 1 8\r\n";
    assert!(world.send(format!("{both}DEL a b c\r\n")).await.ends_with("\r\n:2\r\n"));
    assert_eq!(world.resp.service.store.memory().keys(), 0);
}

#[tokio::test]
async fn connection_setup_commands_are_supported() {
    let world = world();
    for (lines, resp2) in [
        ("PING", "+PONG\r\n"),
        ("ping hello", "$5\r\nhello\r\n"),
        ("PING a b", "-ERR wrong number of arguments for 'ping' command\r\n"),
        ("ECHO \"a b\"", "$3\r\na b\r\n"),
        ("ECHO", "-ERR wrong number of arguments for 'echo' command\r\n"),
        ("SELECT 0", "+OK\r\n"),
        ("SELECT 1", "-ERR DB index is out of range\r\n"),
        ("SELECT x", "-ERR invalid DB index\r\n"),
        ("CLIENT SETINFO LIB-NAME redis-py", "+OK\r\n"),
        ("CLIENT GETNAME", "$-1\r\n"),
        ("CLIENT SETNAME me\r\nCLIENT GETNAME", "+OK\r\n$2\r\nme\r\n"),
        (
            "CLIENT SETNAME \"a b\"",
            "-ERR Client names cannot contain spaces, newlines or special characters.\r\n",
        ),
        ("CLIENT ID extra", "-ERR wrong number of arguments for 'client|id' command\r\n"),
        ("CLIENT KILL", "-ERR unknown subcommand 'KILL'\r\n"),
        ("CONFIG GET save", "*2\r\n$4\r\nsave\r\n$0\r\n\r\n"),
        ("CONFIG GET appendonly", "*2\r\n$10\r\nappendonly\r\n$2\r\nno\r\n"),
        ("CONFIG GET nonsense", "*0\r\n"),
        ("CONFIG SET save x", "-ERR unknown subcommand 'SET' of 'config'\r\n"),
        ("COMMAND COUNT", ":16\r\n"),
        ("COMMAND INFO nonsense", "*1\r\n$-1\r\n"),
        ("COMMAND DOCS nonsense", "*0\r\n"),
        ("COMMAND FOO", "-ERR unknown subcommand 'FOO' of 'command'\r\n"),
        ("QUIT\r\nPING", "+OK\r\n"),
        ("HELLO 4", "-NOPROTO unsupported protocol version\r\n"),
        ("HELLO x", "-ERR Protocol version is not an integer or out of range\r\n"),
        ("HELLO 3 NONSENSE", "-ERR Syntax error in HELLO (try HELLO 3 AUTH name password SETNAME name)\r\n"),
        ("HELLO 3 AUTH me", "-ERR Syntax error in HELLO (try HELLO 3 AUTH name password SETNAME name)\r\n"),
        (
            "AUTH secret",
            "-ERR AUTH <password> called without any password configured for the default user. Are you sure your configuration is correct?\r\n",
        ),
        ("RESET", "+RESET\r\n"),
        ("*0\r\n\r\nPING", "+PONG\r\n"),
    ] {
        assert_eq!(world.send(format!("{lines}\r\n")).await, resp2, "{lines}");
    }
    let replies = world
        .send("HELLO 3 SETNAME me\r\nCLIENT GETNAME\r\nINCR\r\nRESET\r\nCLIENT GETNAME\r\nHELLO\r\n")
        .await;
    let id = |replies: &str| {
        replies
            .split("$2\r\nid\r\n:")
            .nth(1)
            .and_then(|rest| rest.split_once("\r\n"))
            .map(|(id, _)| id.to_owned())
    };
    let id = id(&replies).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    let hello = |kind: &str, proto: u8| {
        format!(
            "{kind}\r\n$6\r\nserver\r\n$10\r\ntollkeeper\r\n$7\r\nversion\r\n${}\r\n{version}\r\n$5\r\nproto\r\n:{proto}\r\n\
             $2\r\nid\r\n:{id}\r\n$4\r\nmode\r\n$10\r\nstandalone\r\n$4\r\nrole\r\n$6\r\nmaster\r\n$7\r\nmodules\r\n*0\r\n",
            version.len()
        )
    };
    let (three, two) = (hello("%7", 3), hello("*14", 2));
    assert_eq!(replies, format!("{three}$2\r\nme\r\n-ERR unknown command 'INCR'\r\n+RESET\r\n$-1\r\n{two}"));
    // Every command is described and documented, in both versions of the protocol.
    for hello in ["HELLO 2", "HELLO 3"] {
        let values = world
            .values(&format!(
                "{hello}\r\nCOMMAND\r\nCOMMAND INFO cl.throttle DEL\r\nCOMMAND DOCS\r\nINFO\r\n"
            ))
            .await;
        let Value::Array(all) = &values[1] else { panic!("{values:?}") };
        assert_eq!(all.len(), 16);
        let Value::Array(two) = &values[2] else { panic!("{values:?}") };
        let Value::Array(throttle) = &two[0] else { panic!("{values:?}") };
        assert_eq!((throttle.len(), &throttle[1]), (10, &Value::Int(-5)));
        assert!(format!("{:?}", values[4]).contains("loading:0"));
    }
}

/// A decision in RESP3 as JSON.
fn as_json(value: &Value) -> serde_json::Value {
    match value {
        Value::Nil => serde_json::Value::Null,
        Value::Int(number) => (*number).into(),
        Value::Boolean(truth) => (*truth).into(),
        Value::Double(number) if number.fract() == 0.0 && *number == 0.0 => 0.into(),
        Value::Double(number) => (*number).into(),
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).unwrap().into(),
        Value::Array(list) => list.iter().map(as_json).collect(),
        Value::Map(pairs) => {
            let name = |value: &Value| as_json(value).as_str().unwrap().to_owned();
            serde_json::Value::Object(pairs.iter().map(|(key, value)| (name(key), as_json(value))).collect())
        }
        other => panic!("{other:?}"),
    }
}

const LIMITS: &str = "limits:
  - { name: per-user, by: user, rate: 10/min, burst: 3 }
  - { name: queue, by: user, rate: 10/min, burst: 3, algorithm: leaky-bucket, when: { queue: \"*\" } }
  - { name: share, by: [user, plan], rate: 100/day, missing: share }
  - { name: tokens, by: user, rate: 1000/day, cost: tokens, when: { tokens: \"*\" } }
  - { name: strict, by: plan, rate: 1/day, mode: shadow }
";

fn limits() -> World {
    let (config, _) = Config::parse("limits.yaml", Format::Yaml, LIMITS.as_bytes(), &|_| None).unwrap();
    world_of(config)
}

#[tokio::test]
async fn tk_peek_has_the_fields_of_json_in_both_versions() {
    let world = limits();
    let limiter = &world.resp.service.limiter;
    limiter.override_for("per-user", "mallory").blocked().until(4_102_444_800).set().unwrap();
    limiter.override_for("per-user", "vip").unlimited().set().unwrap();
    for (words, facts, cost) in [
        ("user alice", tollkeeper::facts! { "user" => "alice" }, 1),
        ("COST 2 user alice plan free", tollkeeper::facts! { "user" => "alice", "plan" => "free" }, 2),
        ("cost 4 user alice", tollkeeper::facts! { "user" => "alice" }, 4),
        ("user alice queue q", tollkeeper::facts! { "user" => "alice", "queue" => "q" }, 1),
        ("user alice cost 7", tollkeeper::facts! { "user" => "alice", "cost" => "7" }, 1),
        ("user mallory", tollkeeper::facts! { "user" => "mallory" }, 1),
        ("user vip", tollkeeper::facts! { "user" => "vip" }, 1),
        ("user alice tokens 500", tollkeeper::facts! { "user" => "alice", "tokens" => "500" }, 1),
        ("", tollkeeper::facts! {}, 1),
    ] {
        // With a fresh key, after some charges, and when exhausted.
        for _ in 0..3 {
            let decision = world.resp.service.limiter.peek(&facts).cost(cost).await.unwrap();
            let mut json = Writer::default();
            let service = &world.resp.service;
            write_decision(&mut json, &service.limiter, &service.redactor, &decision);
            let expected: serde_json::Value = serde_json::from_str(&json.finish()).unwrap();

            let values = world.values(&format!("HELLO 3\r\nTK.PEEK {words}\r\n")).await;
            assert_eq!(as_json(&values[1]), expected, "{words}");
            // RESP2 has the same fields in the same order, without their types.
            let values2 = world.values(&format!("tk.peek {words}\r\n")).await;
            assert_eq!(flat(&as_json(&values2[0])), flat(&plain(&values[1])), "{words}");
            world.send(format!("TK.CHECK {words}\r\n").repeat(2)).await;
        }
    }
}

/// A RESP3 value as RESP2 encodes it.
fn plain(value: &Value) -> serde_json::Value {
    match value {
        Value::Map(pairs) => pairs.iter().flat_map(|(name, value)| [plain(name), plain(value)]).collect(),
        Value::Array(list) => list.iter().map(plain).collect(),
        Value::Boolean(truth) => i32::from(*truth).into(),
        Value::Double(number) => number.to_string().into(),
        value => as_json(value),
    }
}

/// Normalizes numbers that are formatted differently.
fn flat(value: &serde_json::Value) -> serde_json::Value {
    match value {
        serde_json::Value::Array(list) => list.iter().map(flat).collect(),
        serde_json::Value::String(text) => {
            text.parse().map_or_else(|_| value.clone(), |number: f64| number.to_string().into())
        }
        value => value.clone(),
    }
}

#[tokio::test]
async fn tk_check_charges_and_refuses_invalid_calls() {
    let world = limits();
    let check = "TK.CHECK user alice\r\n";
    let values = world.values(&format!("HELLO 3\r\n{}", check.repeat(4))).await;
    let answers: Vec<serde_json::Value> = values[1..].iter().map(as_json).collect();
    assert_eq!(
        answers.iter().map(|answer| answer["allowed"].as_bool().unwrap()).collect::<Vec<_>>(),
        [true, true, true, false]
    );
    assert_eq!((&answers[3]["binding"], &answers[3]["retry_after"]), (&"per-user".into(), &6.0.into()));
    let charge = answers[0]["charge"].as_str().unwrap();
    assert!(world.resp.service.limiter.open_charge(charge).wait().unwrap().is_some(), "{charge}");

    for (words, expected) in [
        ("user", "-ERR invalid_fact fact `user`: it has no value (facts are pairs: user alice)\r\n"),
        ("COST", "-ERR invalid_cost the cost `` is not a whole number from 1 to 2147483648\r\n"),
        (
            "COST x user alice",
            "-ERR invalid_cost the cost `x` is not a whole number from 1 to 2147483648\r\n",
        ),
        (
            "COST 0 user alice",
            "-ERR invalid_cost the cost is 0 (at least 1; to look without paying, use peek)\r\n",
        ),
        (
            "COST -1 user alice",
            "-ERR invalid_cost the cost `-1` is not a whole number from 1 to 2147483648\r\n",
        ),
        ("user a user b", "-ERR duplicate_field fact `user` is given twice\r\n"),
        (
            "user \"\\xff\"",
            "-ERR invalid_fact fact `user`: the value is not UTF-8 (hash or encode bytes)\r\n",
        ),
        (
            "user alice tokens many",
            "-ERR invalid_cost limit `tokens` charges the number in fact `tokens`, but it is not a whole number\r\n",
        ),
        ("ip nowhere", "-ERR invalid_fact "),
        ("\"a b\" c", "-ERR invalid_fact "),
    ] {
        let replies = world.send(format!("TK.CHECK {words}\r\n")).await;
        assert!(replies.starts_with(expected), "{words}: {replies}");
    }
    let many: String = (0..65).map(|number| format!(" f{number} x")).collect();
    assert!(world.send(format!("TK.CHECK{many}\r\n")).await.starts_with("-ERR too_many "));
    let service = &world.resp.service;
    let metrics = text::write(&service.metrics.families(&service.limiter, &service.store));
    for line in [
        "tollkeeper_requests_total{transport=\"resp\",route=\"\",result=\"allowed\"} 3\n",
        "tollkeeper_requests_total{transport=\"resp\",route=\"\",result=\"refused\"} 1\n",
        "tollkeeper_requests_total{transport=\"resp\",route=\"\",result=\"error\"} 11\n",
        "tollkeeper_checks_total{limit=\"per-user\",result=\"refused\"} 1\n",
        "tollkeeper_request_duration_seconds_count{transport=\"resp\"} 15\n",
    ] {
        assert!(metrics.contains(line), "{line}{metrics}");
    }
}

#[tokio::test]
async fn unauthenticated_clients_can_only_authenticate() {
    let world = world();
    let token = TokenDigest(sha256(b"secret"));
    world.resp.service.access.change(Tokens { data: vec![token], ..Tokens::default() });
    let no = "-NOAUTH Authentication required.\r\n";
    let wrong = "-WRONGPASS invalid username-password pair or user is disabled.\r\n";
    for (lines, expected) in [
        ("PING\r\nCL.THROTTLE a 1 1 1\r\nTK.CHECK user alice\r\nDEL a\r\nINFO\r\nCOMMAND", no.repeat(6)),
        ("AUTH nonsense\r\nPING", format!("{wrong}{no}")),
        ("AUTH secret\r\nPING", "+OK\r\n+PONG\r\n".to_owned()),
        ("AUTH anybody secret\r\nPING", "+OK\r\n+PONG\r\n".to_owned()),
        ("AUTH secret\r\nAUTH nonsense\r\nPING", format!("+OK\r\n{wrong}+PONG\r\n")),
        ("AUTH secret\r\nRESET\r\nPING", format!("+OK\r\n+RESET\r\n{no}")),
        ("HELLO 3 AUTH default nonsense\r\nPING", format!("{wrong}{no}")),
        ("QUIT", "+OK\r\n".to_owned()),
    ] {
        assert_eq!(world.send(format!("{lines}\r\n")).await, expected, "{lines}");
    }
    assert!(world.send("HELLO 3\r\n").await.starts_with("-NOAUTH HELLO must be called with"));
    assert!(world.send("HELLO 3 AUTH default secret\r\nPING\r\n").await.ends_with("+PONG\r\n"));
}

#[tokio::test]
async fn protocol_error_follows_earlier_replies_and_closes() {
    let world = world();
    let replies = world.send("PING\r\nCL.THROTTLE a 1 1 60\r\n*1\r\n:5\r\nPING\r\n").await;
    assert_eq!(
        replies,
        "+PONG\r\n*5\r\n:0\r\n:2\r\n:1\r\n:-1\r\n:60\r\n-ERR Protocol error: expected '$', got ':'\r\n"
    );
    assert_eq!(world.resp.connected(), 0);
}

/// A stream that counts its writes, and records the longest one.
struct Counted(DuplexStream, Arc<AtomicUsize>, Arc<AtomicUsize>);

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, into)
    }
}

impl AsyncWrite for Counted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        self.1.fetch_add(1, SeqCst);
        self.2.fetch_max(bytes.len(), SeqCst);
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

#[tokio::test]
async fn pipeline_is_answered_with_one_write() {
    let (world, writes) = (world(), Arc::new(AtomicUsize::new(0)));
    let (_stop, stopped) = watch::channel(());
    let (mut ours, theirs) = tokio::io::duplex(1 << 20);
    tokio::spawn(serve(
        Counted(theirs, Arc::clone(&writes), Arc::default()),
        PEER,
        Arc::clone(&world.resp),
        Seat::alone(stopped),
    ));
    for round in 1..=3 {
        ours.write_all("CL.THROTTLE key 100 1 60\r\n".repeat(100).as_bytes()).await.unwrap();
        let mut answers = 0;
        while answers < 100 {
            let mut bytes = [0; 16 << 10];
            let len = ours.read(&mut bytes).await.unwrap();
            answers += bytes[..len].iter().filter(|byte| **byte == b'*').count();
        }
        assert_eq!(writes.load(SeqCst), round);
    }
}

#[tokio::test(start_paused = true)]
async fn idle_or_trickling_connection_is_closed() {
    const QUIET: Duration = Duration::from_secs(300);
    let world = world();
    let (began, (_stop, mut silent)) = (Instant::now(), world.connect());
    assert_eq!(silent.read(&mut [0]).await.unwrap(), 0);
    assert!((QUIET..QUIET * 2).contains(&began.elapsed()), "{:?}", began.elapsed());

    let (began, (_stop, mut slow)) = (Instant::now(), world.connect());
    slow.write_all(b"*2\r\n$4\r\nECHO\r\n$60000\r\n").await.unwrap();
    while slow.write_all(b"x").await.is_ok() {
        sleep(Duration::from_secs(1)).await;
    }
    assert!((QUIET..QUIET * 2).contains(&began.elapsed()), "{:?}", began.elapsed());

    let (_stop, mut busy) = world.connect();
    for _ in 0..5 {
        sleep(QUIET - Duration::from_secs(1)).await;
        busy.write_all(b"PING\r\n").await.unwrap();
        assert_eq!(busy.read(&mut [0; 100]).await.unwrap(), 7);
    }
    let last = Instant::now();
    assert_eq!(busy.read(&mut [0]).await.unwrap(), 0, "closed when idle");
    assert!((QUIET..QUIET * 2).contains(&last.elapsed()), "{:?}", last.elapsed());
}

#[tokio::test(start_paused = true)]
async fn client_that_never_reads_is_bounded_and_dropped() {
    let world = world();
    let (_stop, stopped) = watch::channel(());
    let (mut ours, theirs) = tokio::io::duplex(4 << 10);
    let served = tokio::spawn(serve(theirs, PEER, Arc::clone(&world.resp), Seat::alone(stopped)));
    let began = Instant::now();
    let mut sent = 0;
    while ours.write_all(b"COMMAND DOCS\r\n").await.is_ok() {
        sent += 14;
    }
    served.await.unwrap();
    assert!(began.elapsed() >= Duration::from_secs(10), "{:?}", began.elapsed());
    // One read buffer, and what is buffered in between.
    assert!(sent < 64 << 10, "the server read {sent} bytes of a client that never reads");
    assert_eq!(world.resp.connected(), 0);
}

#[tokio::test(start_paused = true)]
async fn stop_finishes_commands_that_have_begun() {
    let world = world();
    let (stop, mut idle) = world.connect();
    idle.write_all(b"PING\r\n").await.unwrap();
    assert_eq!(idle.read(&mut [0; 100]).await.unwrap(), 7);
    stop.send(()).unwrap();
    assert_eq!(idle.read(&mut [0]).await.unwrap(), 0, "an idle connection is closed at once");

    let (stop, mut busy) = world.connect();
    busy.write_all(b"*1\r\n$4\r\nPI").await.unwrap();
    sleep(Duration::from_secs(1)).await;
    stop.send(()).unwrap();
    sleep(Duration::from_secs(1)).await;
    busy.write_all(b"NG\r\nPING\r\n").await.unwrap();
    let mut replies = String::new();
    busy.read_to_string(&mut replies).await.unwrap();
    assert_eq!(replies, "+PONG\r\n+PONG\r\n");
}

#[tokio::test]
async fn long_replies_are_sent_before_all_are_encoded() {
    let (world, longest) = (world(), Arc::new(AtomicUsize::new(0)));
    let (_stop, stopped) = watch::channel(());
    let (mut ours, theirs) = tokio::io::duplex(4 << 20);
    tokio::spawn(serve(
        Counted(theirs, Arc::default(), Arc::clone(&longest)),
        PEER,
        Arc::clone(&world.resp),
        Seat::alone(stopped),
    ));
    ours.write_all("COMMAND DOCS\r\n".repeat(1_000).as_bytes()).await.unwrap();
    ours.shutdown().await.unwrap();
    let mut answers = Vec::new();
    ours.read_to_end(&mut answers).await.unwrap();
    assert!(answers.len() > 1_000_000, "{} bytes", answers.len());
    assert!(longest.load(SeqCst) < 80 << 10, "{longest:?} bytes waited to be sent");
}
