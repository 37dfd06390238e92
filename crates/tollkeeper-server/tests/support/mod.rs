//! Starts a real server process on a free port, and a client that sends exactly the given bytes.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
#![allow(dead_code, reason = "each test file uses its own part")]

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

/// The command under test.
pub(crate) fn tollkeeper() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollkeeper"));
    for (name, _) in
        std::env::vars().filter(|(name, _)| name.starts_with("TOLLKEEPER_") || name == "RUST_LOG")
    {
        command.env_remove(name);
    }
    // Many servers run at once, so none may use a default port.
    command.env("TOLLKEEPER_GRPC", "off").env("TOLLKEEPER_RESP", "off");
    command
}

/// Runs the command to its end.
pub(crate) fn run(args: &[&str]) -> Output {
    output(tollkeeper().args(args))
}

/// Runs a command to its end; if it does not end in time, kills it and fails the test.
pub(crate) fn output(command: &mut Command) -> Output {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let (stdout, stderr) = (Arc::default(), Arc::default());
    let out = collect(child.stdout.take().expect("piped"), Arc::clone(&stdout));
    let err = collect(child.stderr.take().expect("piped"), Arc::clone(&stderr));
    let status = end_of(&mut child);
    out.join().expect("stdout is read");
    err.join().expect("stderr is read");
    let bytes = |text: &Arc<Mutex<String>>| text.lock().unwrap().clone().into_bytes();
    Output { status, stdout: bytes(&stdout), stderr: bytes(&stderr) }
}

/// Waits for a process to exit; kills it and panics if it takes longer than [`PATIENCE`].
fn end_of(child: &mut Child) -> ExitStatus {
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("the process was started") {
            return status;
        }
        if began.elapsed() > PATIENCE {
            let _ = child.kill();
            let _ = child.wait();
            panic!("the process did not exit within {PATIENCE:?}");
        }
        pause();
    }
}

/// Printed bytes as text.
pub(crate) fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("the output is UTF-8")
}

/// A temporary folder, removed on drop.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Folder {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("tollkeeper-test-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).expect("a temporary folder can be created");
        Folder(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file in the folder and returns its path.
    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).expect("a file can be written");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A running server.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: SocketAddr,
    printed: Arc<Mutex<String>>,
    log: Arc<Mutex<String>>,
    readers: Vec<JoinHandle<()>>,
}

/// The exit code and output of a server.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    /// Standard output.
    pub(crate) printed: String,
    /// Standard error.
    pub(crate) log: String,
}

impl Server {
    /// Starts a server with the built-in policy.
    pub(crate) fn start() -> Server {
        Server::with(&[])
    }

    /// Starts a server with this config, in YAML.
    pub(crate) fn with_config(folder: &Folder, yaml: &str) -> Server {
        let file = folder.write("tollkeeper.yaml", yaml);
        Server::with(&["--config", file.to_str().expect("UTF-8")])
    }

    pub(crate) fn with(args: &[&str]) -> Server {
        Server::launch(tollkeeper().args(["serve", "--http", "127.0.0.1:0"]).args(args))
    }

    /// Starts a command that serves HTTP, and returns once it has printed its address.
    pub(crate) fn launch(command: &mut Command) -> Server {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the server starts");
        let (printed, log): (Arc<Mutex<String>>, Arc<Mutex<String>>) = Default::default();
        let readers = vec![
            collect(child.stdout.take().expect("piped"), Arc::clone(&printed)),
            collect(child.stderr.take().expect("piped"), Arc::clone(&log)),
        ];
        let mut address = None;
        eventually("the server listens", || {
            address = listens(&printed.lock().unwrap(), "http");
            let ended = child.try_wait().expect("the process was started");
            assert!(ended.is_none(), "the server exited: {}", log.lock().unwrap());
            address.is_some()
        });
        Server { child, address: address.expect("the address was printed"), printed, log, readers }
    }

    /// Waits for the RESP address and returns it.
    pub(crate) fn resp(&self) -> SocketAddr {
        self.listens("resp")
    }

    /// Waits for the address of this listener and returns it.
    pub(crate) fn listens(&self, name: &str) -> SocketAddr {
        let mut address = None;
        eventually(&format!("the {name} listener is open"), || {
            address = listens(&self.printed.lock().unwrap(), name);
            address.is_some()
        });
        address.expect("the address was printed")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The log so far.
    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// Waits until the log contains this text.
    pub(crate) fn logs(&self, text: &str) {
        eventually(&format!("the log contains {text:?}"), || self.log().contains(text));
    }

    pub(crate) fn signal(&self, name: &str) {
        let done = Command::new("kill").args([&format!("-{name}"), &self.pid().to_string()]).status();
        assert!(done.expect("`kill` is installed").success(), "the server is not running");
    }

    /// Whether the process has exited.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("the process was started").is_some()
    }

    /// Waits for the process to exit.
    pub(crate) fn ended(mut self) -> Ended {
        let status = end_of(&mut self.child);
        for reader in self.readers.drain(..) {
            reader.join().expect("the output is read");
        }
        Ended { code: status.code(), printed: self.printed.lock().unwrap().clone(), log: self.log() }
    }

    /// Whether the listener is closed.
    pub(crate) fn is_closed(&self) -> bool {
        TcpStream::connect(self.address).is_err()
    }

    pub(crate) fn client(&self) -> Client {
        Client::to(self.address)
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.client().request("GET", path, "")
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> Answer {
        self.client().request("POST", path, body)
    }

    /// The value of a series of `/metrics`, given by name and labels: `tollkeeper_skipped_total{limit="demo"}`.
    pub(crate) fn metric(&self, series: &str) -> f64 {
        let page = self.get("/metrics");
        let value = page.text().lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("{series} is missing in {}", page.text())).parse().expect("a number")
    }

    /// Checks these facts and returns whether the request was allowed.
    pub(crate) fn check(&self, facts: &str) -> bool {
        let answer = self.post("/v1/check", &format!("{{\"facts\":{facts}}}"));
        assert!(matches!(answer.status, 200 | 429), "{answer:?}");
        answer.status == 200
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The address of a listener in the output of a server.
fn listens(printed: &str, name: &str) -> Option<SocketAddr> {
    let mut lines = printed.lines().filter_map(|line| line.strip_prefix("listening ")?.split_once('='));
    lines.find_map(|(listener, address)| (listener == name).then(|| address.parse().ok())?)
}

fn collect(from: impl Read + Send + 'static, into: Arc<Mutex<String>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            let mut into = into.lock().unwrap();
            into.push_str(&line);
            into.push('\n');
        }
    })
}

/// How long a test waits for an expected event.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Repeats `test` until it holds. Tests assert that something happens, not how fast.
pub(crate) fn eventually(what: &str, mut test: impl FnMut() -> bool) {
    let began = Instant::now();
    while !test() {
        assert!(began.elapsed() < PATIENCE, "timed out waiting for: {what}");
        pause();
    }
}

/// Waits until the snapshot in this file includes all that was decided before the call.
pub(crate) fn snapshot_is_saved(file: &Path) {
    eventually("a snapshot is saved", || fs::metadata(file).is_ok_and(|file| file.len() > 0));
    // This one, and one that is being written, may be older than the call. The next one is not.
    let written = || fs::metadata(file).unwrap().modified().unwrap();
    for _ in 0..2 {
        let before = written();
        eventually("another snapshot is saved", || written() > before);
    }
}

#[expect(clippy::disallowed_methods, reason = "polling another process needs a pause")]
fn pause() {
    std::thread::sleep(Duration::from_millis(10));
}

/// One keep-alive connection.
pub(crate) struct Client {
    pub(crate) stream: TcpStream,
    buffer: Vec<u8>,
}

/// A response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> &str {
        text(&self.body)
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The status, `code` and `where` of an error response.
    pub(crate) fn error(&self) -> (u16, String, Option<String>) {
        let error = &self.json()["error"];
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{error}");
        let code = error["code"].as_str().expect("the error has a code").to_owned();
        (self.status, code, error["where"].as_str().map(str::to_owned))
    }
}

impl Client {
    pub(crate) fn to(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).expect("the server listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        stream.set_nodelay(true).expect("TCP_NODELAY can be set");
        Client { stream, buffer: Vec::new() }
    }

    pub(crate) fn request(&mut self, method: &str, path: &str, body: &str) -> Answer {
        self.request_with(method, path, &[], body.as_bytes())
    }

    pub(crate) fn request_with(&mut self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> Answer {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\n", self.stream.peer_addr().unwrap());
        for header in headers {
            head.push_str(header);
            head.push_str("\r\n");
        }
        head.push_str(&format!("content-length: {}\r\n\r\n", body.len()));
        self.send(&[head.as_bytes(), body].concat());
        self.answer()
    }

    /// Posts this body in chunks of `piece` bytes.
    pub(crate) fn chunked(&mut self, path: &str, body: &[u8], piece: usize) -> Answer {
        let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n");
        let mut bytes = head.into_bytes();
        for piece in body.chunks(piece) {
            bytes.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
            bytes.extend_from_slice(piece);
            bytes.extend_from_slice(b"\r\n");
        }
        bytes.extend_from_slice(b"0\r\n\r\n");
        self.send(&bytes);
        self.answer()
    }

    /// Sends exactly these bytes. Ignores errors: if the server closed, reading the response fails.
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    /// Reads the next response.
    pub(crate) fn answer(&mut self) -> Answer {
        self.try_answer().expect("the server answers")
    }

    /// Reads the next response; `None` if the connection ends first.
    pub(crate) fn try_answer(&mut self) -> Option<Answer> {
        let mut answer = self.try_head()?;
        let length: usize =
            answer.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
        while self.buffer.len() < length {
            self.fill()?;
        }
        answer.body = self.buffer.drain(..length).collect();
        Some(answer)
    }

    /// Reads the next response, which has no body even if it has a content length.
    pub(crate) fn try_head(&mut self) -> Option<Answer> {
        let head = loop {
            if let Some(end) = self.buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                break self.buffer.drain(..end + 4).collect::<Vec<u8>>();
            }
            self.fill()?;
        };
        let head = text(&head).to_owned();
        let mut lines = head.lines();
        let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
        let headers: Vec<(String, String)> = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        Some(Answer { status, headers, body: Vec::new() })
    }

    /// Closes the sending side.
    pub(crate) fn finish(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Reads all responses until the server closes the connection, and fails if it stays open.
    pub(crate) fn last_answers(&mut self) -> Vec<Answer> {
        let answers: Vec<Answer> = std::iter::from_fn(|| self.try_answer()).collect();
        assert_eq!(self.buffer, b"", "unread bytes follow the last response");
        let end = self.stream.read(&mut [0]);
        let open = end.as_ref().is_ok_and(|count| *count > 0)
            || end.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
        assert!(!open, "the connection was left open: {answers:?}");
        answers
    }

    fn fill(&mut self) -> Option<()> {
        let mut bytes = [0; 16 << 10];
        let count = self.stream.read(&mut bytes).ok().filter(|count| *count > 0)?;
        self.buffer.extend_from_slice(&bytes[..count]);
        Some(())
    }
}
