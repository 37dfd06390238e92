//! Sends HTTP requests on a schedule: each has a due time, whatever happened to those before, and its latency counts from
//! then. A closed loop, which waits for a response before the next request, would omit the requests that a stalled
//! server delayed (coordinated omission); here they wait and are counted.
//!
//! One thread polls its sockets in a busy loop: it has its own core, and measures the server instead of the time until
//! the kernel wakes it.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::served::pin_to_second_core;

/// Timeout of a response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// The port of a server, and its TLS settings.
#[derive(Clone, Debug)]
pub struct Address {
    /// Its port on this machine.
    pub port: u16,
    /// The trusted CA, with TLS.
    pub tls: Option<Arc<ClientConfig>>,
}

/// A client config that trusts only this CA.
pub fn trust(authority: &Path) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    let certificate = CertificateDer::from_pem_file(authority).expect("a certificate");
    roots.add(certificate).expect("a CA certificate");
    Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth())
}

/// A keep-alive connection with at most one request in flight.
pub struct Connection {
    stream: Box<dyn Stream>,
    /// The bytes of the response so far.
    received: Vec<u8>,
    /// Due time of the request in flight.
    due: Duration,
}

trait Stream: Read + Write + Send {}

impl<S: Read + Write + Send> Stream for S {}

impl Connection {
    /// Connects, with a TLS handshake if needed.
    pub fn new(address: &Address) -> Connection {
        let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, address.port)).expect("the server listens");
        socket.set_nodelay(true).expect("a socket");
        let tls = address.tls.clone().map(|config| {
            let name = ServerName::try_from("localhost").expect("a name");
            let mut tls = ClientConnection::new(config, name).expect("a valid TLS config");
            while tls.is_handshaking() {
                tls.complete_io(&mut socket).expect("a TLS handshake");
            }
            tls
        });
        socket.set_nonblocking(true).expect("a socket");
        let stream: Box<dyn Stream> = match tls {
            Some(tls) => Box::new(StreamOwned::new(tls, socket)),
            None => Box::new(socket),
        };
        Connection { stream, received: Vec::new(), due: Duration::ZERO }
    }

    /// Sends a request and waits for its response.
    pub fn ask(&mut self, request: &[u8]) -> Response {
        self.send(request);
        let asked = Instant::now();
        loop {
            if let Some(response) = self.response() {
                return response;
            }
            assert!(asked.elapsed() < RESPONSE_TIMEOUT, "no response in time");
            thread::yield_now();
        }
    }

    fn send(&mut self, request: &[u8]) {
        // The request is short and the only one, so it always fits into the send buffer.
        self.stream.write_all(request).expect("the server reads");
        self.stream.flush().expect("the server reads");
    }

    /// The response, if it is complete.
    fn response(&mut self) -> Option<Response> {
        let mut buffer = [0; 4096];
        loop {
            if let Some(length) = response_length(&self.received) {
                let text = self.received.drain(..length).collect();
                assert!(self.received.is_empty(), "a response without a request");
                return Some(Response(String::from_utf8(text).unwrap_or_else(|error| {
                    // nginx responds with a GIF, so only the head is text.
                    String::from_utf8_lossy(error.as_bytes()).into_owned()
                })));
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => panic!("the server closed the connection"),
                Ok(read) => self.received.extend_from_slice(&buffer[..read]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// The length of the response at the start of these bytes, once it is complete.
pub fn response_length(received: &[u8]) -> Option<usize> {
    const NAME: &[u8] = b"content-length:";
    let head = received.windows(4).position(|bytes| bytes == b"\r\n\r\n")? + 4;
    let mut lines = received[..head].split(|byte| *byte == b'\n');
    let value = lines.find_map(|line| {
        let (name, value) = line.split_at_checked(NAME.len())?;
        name.eq_ignore_ascii_case(NAME).then_some(value)
    });
    let value = value.and_then(|value| str::from_utf8(value).ok()?.trim().parse::<usize>().ok());
    let length = head + value.expect("every server here sends Content-Length");
    (length <= received.len()).then_some(length)
}

/// A response, head and body.
#[derive(Debug)]
pub struct Response(pub String);

impl Response {
    /// Whether the request was admitted; some servers refuse with status 200 and `"allowed":false`.
    pub fn admits(&self) -> bool {
        self.0.starts_with("HTTP/1.1 200 ") && !self.0.contains(r#""allowed":false"#)
    }
}

/// The measured latencies.
#[derive(Debug)]
pub struct Latencies {
    /// Microseconds from a request's due time until its response arrived, sorted.
    micros: Vec<f64>,
    /// The share of admitted requests, 0 to 1.
    pub admitted: f64,
}

impl Latencies {
    /// A percentile in thousandths: `permille(990)` is the 99th percentile.
    pub fn permille(&self, permille: usize) -> f64 {
        self.micros[(self.micros.len() * permille / 1_000).min(self.micros.len() - 1)]
    }
}

/// Sends `per_second` requests for the duration `lasting` from the second core.
/// A request that is due while all connections are busy is sent as soon as one is free.
pub fn ask(
    address: &Address,
    connections: usize,
    requests: &[Vec<u8>],
    per_second: f64,
    lasting: Duration,
) -> Latencies {
    let due = |number: u32| Duration::from_secs_f64(f64::from(number) / per_second);
    let due = (0..).map(due).take_while(|due| *due < lasting).zip(requests.iter().cycle());
    let mut due = due.peekable();
    let mut idle: VecDeque<Connection> = (0..connections).map(|_| Connection::new(address)).collect();
    let (mut waiting, mut micros, mut admitted) = (Vec::<Connection>::new(), Vec::new(), 0.0);
    let mut ask = || {
        pin_to_second_core();
        let began = Instant::now();
        while due.peek().is_some() || !waiting.is_empty() {
            while !idle.is_empty()
                && let Some((at, request)) = due.next_if(|(at, _)| *at <= began.elapsed())
                && let Some(mut connection) = idle.pop_front()
            {
                connection.due = at;
                connection.send(request);
                waiting.push(connection);
            }
            for place in (0..waiting.len()).rev() {
                if let Some(response) = waiting[place].response() {
                    let connection = waiting.swap_remove(place);
                    micros.push((began.elapsed() - connection.due).as_secs_f64() * 1e6);
                    admitted += f64::from(u8::from(response.admits()));
                    idle.push_back(connection);
                }
            }
            assert!(began.elapsed() < lasting + RESPONSE_TIMEOUT, "{} responses are missing", waiting.len());
        }
    };
    thread::scope(|scope| scope.spawn(&mut ask).join().expect("every request gets a response"));
    micros.sort_by(f64::total_cmp);
    #[expect(clippy::cast_precision_loss, reason = "a few hundred thousand")]
    let admitted = admitted / micros.len() as f64;
    Latencies { micros, admitted }
}
