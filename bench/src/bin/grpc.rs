//! Compares the CPU time of the service per gRPC call with that of `throttlecrab-server`.
//!
//! `grpc TOLLKEEPER THROTTLECRAB` starts both on the first core and loads them in turns with `h2load` from the second.
//! As over HTTP, the CPU time per call is compared.

use std::env;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value};
use tollkeeper_bench::report::{self, Want};
use tollkeeper_bench::served::{
    Counted, RATE, Rounds, Server, file, in_turns, limits, on_second_core, stdout,
};

const ROUND: Duration = Duration::from_secs(3);
const WARM_UP: Duration = Duration::from_secs(1);
const CONNECTIONS: usize = 4;
/// Concurrent calls of one connection.
const STREAMS: usize = 8;

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [tollkeeper, throttlecrab] = &arguments[..] else { panic!("usage: grpc TOLLKEEPER THROTTLECRAB") };
    let mut sides = [ours(tollkeeper), throttlecrab_server(throttlecrab)];
    in_turns(&mut sides, |side| side.load(WARM_UP), Side::round);

    let report = |side: &Side| {
        assert!(side.admitted(), "{} no longer admits requests", side.name);
        (side.name.to_owned(), side.rounds.report("grpc", side.name, &side.server))
    };
    let results: Map<String, Value> = sides.iter().map(report).collect();
    let [ours, throttlecrab] = sides.map(|side| side.rounds.cpu());
    report::ratio("grpc/throttlecrab", throttlecrab / ours);
    report::goal("grpc/throttlecrab", Want::AtLeast(1.0), throttlecrab / ours);
    report::save("grpc", results.into());
}

/// Our server with a `ShouldRateLimit` request, as Envoy sends it: one descriptor with one entry.
fn ours(program: &str) -> Side {
    let server = Server::tollkeeper(program, "grpc", "tollkeeper", &limits(&["user"]), &[]);
    let entry = [text(1, "user"), text(2, "user-1")].concat();
    let message = [text(1, "bench"), bytes(2, &bytes(1, &entry))].concat();
    Side::new("tollkeeper", server, "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit", &message)
}

fn throttlecrab_server(program: &str) -> Side {
    let server = Server::throttlecrab(program, "grpc");
    let numbers = [(2, RATE), (3, RATE), (4, 1), (5, 1)].map(|(field, value)| number(field, value));
    let message = [text(1, "user-1"), numbers.concat()].concat();
    Side::new("throttlecrab", server, "/throttlecrab.RateLimiter/Throttle", &message)
}

/// Encodes a varint field.
fn number(field: u8, mut value: u32) -> Vec<u8> {
    let mut written = vec![field << 3];
    while value >= 0x80 {
        written.push(u8::try_from(value & 0x7f).expect("seven bits") | 0x80);
        value >>= 7;
    }
    written.push(u8::try_from(value).expect("seven bits"));
    written
}

/// Encodes a length-delimited field: a string or a message below 128 bytes.
fn bytes(field: u8, value: &[u8]) -> Vec<u8> {
    let length = u8::try_from(value.len()).expect("short");
    assert!(length < 0x80, "short");
    [&[field << 3 | 2, length], value].concat()
}

fn text(field: u8, value: &str) -> Vec<u8> {
    bytes(field, value.as_bytes())
}

/// A server, the request that it gets, and its measurements.
struct Side {
    name: &'static str,
    server: Server,
    path: &'static str,
    /// The length-prefixed request message, also saved to `file`.
    body: Vec<u8>,
    file: PathBuf,
    rounds: Rounds,
}

impl Side {
    fn new(name: &'static str, server: Server, path: &'static str, message: &[u8]) -> Side {
        let length = u32::try_from(message.len()).expect("short").to_be_bytes();
        let body = [&[0][..], &length, message].concat();
        let file = file(&format!("{name}.body"), &body);
        let side = Side { name, server, path, body, file, rounds: Rounds::default() };
        assert!(side.admitted(), "{name} does not admit requests");
        side
    }

    fn round(&mut self) {
        let (cpu, counted) = self.server.cpu_during(|| self.load(ROUND));
        self.rounds.add(cpu, counted);
    }

    /// Runs `h2load` for this long.
    fn load(&self, lasting: Duration) -> Counted {
        let stdout = stdout(
            on_second_core("h2load")
                .args(["-t", "1", "-c", &CONNECTIONS.to_string(), "-m", &STREAMS.to_string()])
                .args(["-D", &lasting.as_secs().to_string(), "-d"])
                .arg(&self.file)
                .args(["-H", "content-type: application/grpc", "-H", "te: trailers"])
                .arg(format!("http://127.0.0.1:{}{}", self.server.port, self.path)),
        );
        // requests: 61234 total, 61266 started, 61234 done, 61234 succeeded, 0 failed, 0 errored, 0 timeout
        let counted = stdout.lines().find_map(|line| line.strip_prefix("requests: "));
        let counted = counted.unwrap_or_else(|| panic!("{stdout}"));
        let count = |what: &str| {
            let words = counted.split(", ").find_map(|count| count.strip_suffix(what));
            words.and_then(|count| count.trim().parse::<f64>().ok()).unwrap_or_else(|| panic!("{stdout}"))
        };
        let lost = count("failed") + count("errored") + count("timeout");
        assert_eq!(lost, 0.0, "{} lost calls:\n{stdout}", self.name);
        Counted { requests: count("succeeded"), seconds: lasting.as_secs_f64() }
    }

    /// Makes one call, frame by frame, because h2load ignores the content of responses. In both protocols the first field
    /// of the response tells whether the request is admitted.
    fn admitted(&self) -> bool {
        let mut stream =
            TcpStream::connect((Ipv4Addr::LOCALHOST, self.server.port)).expect("the server listens");
        stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout can be set");
        let literal = |name: &[u8], value: &str| {
            let length = u8::try_from(value.len()).expect("short");
            [name, &[length], value.as_bytes()].concat()
        };
        // POST and http from HPACK's static table, then path, authority and content-type with indexed names.
        let head = [
            vec![0x83, 0x86],
            literal(&[0x04], self.path),
            literal(&[0x01], "localhost"),
            literal(&[0x0f, 0x10], "application/grpc"),
            literal(&[0x00, 2, b't', b'e'], "trailers"),
        ];
        let call = [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
            frame(4, 0, 0, &[]),
            frame(1, 4, 1, &head.concat()),
            frame(0, 1, 1, &self.body),
        ];
        stream.write_all(&call.concat()).expect("the server reads");
        loop {
            let mut head = [0; 9];
            stream.read_exact(&mut head).expect("the server responds");
            let mut payload =
                vec![0; usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2])];
            stream.read_exact(&mut payload).expect("the server responds");
            // The first DATA frame: five bytes of message prefix, then the first field.
            if head[3] == 0 {
                return payload.get(5..7) == Some(&[0x08, 1]);
            }
        }
    }
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}
