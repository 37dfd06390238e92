//! An upstream that records the bytes of every request, and answers as the test decides.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// What an upstream does with a connection.
type Serve = dyn Fn(&Upstream, TcpStream) + Send + Sync;

/// A recording upstream on a free port.
#[derive(Clone)]
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    recorded: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Upstream {
    /// Answers every request with `200` and `ok`.
    pub(crate) fn ok() -> Upstream {
        Upstream::answering(|_| b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok".to_vec())
    }

    /// Answers every request with the bytes that `answer` makes from it. An empty answer closes the connection.
    pub(crate) fn answering(answer: impl Fn(&[u8]) -> Vec<u8> + Send + Sync + 'static) -> Upstream {
        Upstream::serving(move |upstream, mut stream| {
            let mut buffer = Vec::new();
            while let Some(request) = read_request(&mut stream, &mut buffer) {
                upstream.record(&request);
                let bytes = answer(&request);
                if bytes.is_empty() || stream.write_all(&bytes).is_err() {
                    return;
                }
            }
            if !buffer.is_empty() {
                upstream.record(&buffer);
            }
        })
    }

    /// Passes each connection to `serve`, on a thread of its own.
    pub(crate) fn serving(serve: impl Fn(&Upstream, TcpStream) + Send + Sync + 'static) -> Upstream {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let upstream = Upstream { address: listener.local_addr().unwrap(), recorded: Arc::default() };
        let (shared, serve): (Upstream, Arc<Serve>) = (upstream.clone(), Arc::new(serve));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                stream.set_nodelay(true).unwrap();
                let (shared, serve) = (shared.clone(), Arc::clone(&serve));
                std::thread::spawn(move || serve(&shared, stream));
            }
        });
        upstream
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn record(&self, bytes: &[u8]) {
        self.recorded.lock().unwrap().push(bytes.to_vec());
    }

    /// The requests since the last call.
    pub(crate) fn take(&self) -> Vec<Vec<u8>> {
        std::mem::take(&mut *self.recorded.lock().unwrap())
    }

    pub(crate) fn count(&self) -> usize {
        self.recorded.lock().unwrap().len()
    }
}

/// Reads the next request, head and body as sent; `None` at the end of the connection.
pub(crate) fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<Vec<u8>> {
    loop {
        if let Some(length) = request_length(buffer) {
            return Some(buffer.drain(..length).collect());
        }
        let mut bytes = [0; 16 << 10];
        let count = stream.read(&mut bytes).ok().filter(|count| *count > 0)?;
        buffer.extend_from_slice(&bytes[..count]);
    }
}

/// The length of the first request, if it is complete.
fn request_length(buffer: &[u8]) -> Option<usize> {
    let head = buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n")? + 4;
    let text = String::from_utf8_lossy(&buffer[..head]).to_ascii_lowercase();
    let header = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
    if header("transfer-encoding").is_some() {
        let end = buffer[head..].windows(5).position(|bytes| bytes == b"0\r\n\r\n")?;
        return Some(head + end + 5);
    }
    let body = header("content-length").map_or(0, |length| length.parse().unwrap());
    (buffer.len() >= head + body).then_some(head + body)
}

/// A recorded request in a comparable form: request line, headers in alphabetical order without those that describe the
/// client, and the body.
pub(crate) fn shown(request: &[u8]) -> String {
    let text = String::from_utf8_lossy(request);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let mut lines = head.lines();
    let line = lines.next().unwrap_or_default();
    let mut headers: Vec<&str> =
        lines.filter(|line| !line.starts_with("x-forwarded-") && !line.starts_with("x-request-id")).collect();
    headers.sort_unstable();
    format!("{line} | {} | {}", headers.join(", "), body.escape_default())
}
