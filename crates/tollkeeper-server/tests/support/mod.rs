//! A real server in a process of its own, on a free port, and a client that says exactly what it is told.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its own part")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

/// The command under test.
pub fn tollkeeper() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollkeeper"));
    for (name, _) in
        std::env::vars().filter(|(name, _)| name.starts_with("TOLLKEEPER_") || name == "RUST_LOG")
    {
        command.env_remove(name);
    }
    command
}

/// Runs the command to its end.
pub fn run(args: &[&str]) -> Output {
    tollkeeper().args(args).stdin(Stdio::null()).output().expect("the command starts")
}

/// What was printed.
pub fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("it prints UTF-8")
}

/// A folder that is gone when the test is.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("tollkeeper-test-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).expect("a folder can be made");
        Folder(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file in it.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
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
pub struct Server {
    child: Child,
    pub address: SocketAddr,
    log: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

impl Server {
    /// The built-in policy.
    pub fn start() -> Server {
        Server::with(&[])
    }

    /// These limits, in YAML.
    pub fn with_config(folder: &Folder, yaml: &str) -> Server {
        let file = folder.write("tollkeeper.yaml", yaml);
        Server::with(&["--config", file.to_str().expect("UTF-8")])
    }

    pub fn with(args: &[&str]) -> Server {
        let mut child = tollkeeper()
            .args(["serve", "--http", "127.0.0.1:0"])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the server starts");
        let log = Arc::new(Mutex::new(String::new()));
        let reader = collect(child.stderr.take().expect("piped"), Arc::clone(&log));
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().expect("piped"));
        out.read_line(&mut line).expect("a line");
        let address = line.trim().strip_prefix("listening http=").and_then(|address| address.parse().ok());
        let address = address.unwrap_or_else(|| panic!("no address in {line:?}: {}", log.lock().unwrap()));
        Server { child, address, log, reader: Some(reader) }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it logged so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// Waits until it has logged this.
    pub fn logs(&self, text: &str) {
        eventually(&format!("the log says {text:?}"), || self.log().contains(text));
    }

    pub fn signal(&self, name: &str) {
        let done = Command::new("kill").args([&format!("-{name}"), &self.pid().to_string()]).status();
        assert!(done.expect("kill is there").success(), "the server is gone");
    }

    /// Waits for it to end; its exit code and its whole log.
    pub fn ended(mut self) -> (Option<i32>, String) {
        let status = self.child.wait().expect("it was started");
        self.reader.take().expect("once").join().expect("the log is read");
        (status.code(), self.log())
    }

    pub fn client(&self) -> Client {
        Client::to(self.address)
    }

    pub fn get(&self, path: &str) -> Answer {
        self.client().request("GET", path, "")
    }

    pub fn post(&self, path: &str, body: &str) -> Answer {
        self.client().request("POST", path, body)
    }

    /// One check of these facts; whether it was allowed.
    pub fn check(&self, facts: &str) -> bool {
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

fn collect(stderr: ChildStderr, log: Arc<Mutex<String>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            let mut log = log.lock().unwrap();
            log.push_str(&line);
            log.push('\n');
        }
    })
}

/// Asks again until it is so; tests assert that something happens, not how fast.
pub fn eventually(what: &str, mut test: impl FnMut() -> bool) {
    let began = Instant::now();
    while !test() {
        assert!(began.elapsed() < Duration::from_secs(30), "it did not come to pass that {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// One connection that is kept.
pub struct Client {
    pub stream: TcpStream,
    buffer: Vec<u8>,
}

/// What was answered.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> &str {
        text(&self.body)
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The code and the place of an error.
    pub fn error(&self) -> (u16, String, Option<String>) {
        let error = &self.json()["error"];
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{error}");
        let code = error["code"].as_str().expect("a code").to_owned();
        (self.status, code, error["where"].as_str().map(str::to_owned))
    }
}

impl Client {
    pub fn to(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).expect("the server listens");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout can be set");
        stream.set_nodelay(true).expect("so");
        Client { stream, buffer: Vec::new() }
    }

    pub fn request(&mut self, method: &str, path: &str, body: &str) -> Answer {
        self.request_with(method, path, &[], body.as_bytes())
    }

    pub fn request_with(&mut self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> Answer {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\n", self.stream.peer_addr().unwrap());
        for header in headers {
            head.push_str(header);
            head.push_str("\r\n");
        }
        head.push_str(&format!("content-length: {}\r\n\r\n", body.len()));
        self.send(&[head.as_bytes(), body].concat());
        self.answer()
    }

    /// Sends exactly these bytes. A server that closed meanwhile is found out by the answer.
    pub fn send(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    /// Reads the next answer.
    pub fn answer(&mut self) -> Answer {
        self.try_answer().expect("the server answers")
    }

    /// Reads the next answer, if one comes before the connection ends.
    pub fn try_answer(&mut self) -> Option<Answer> {
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
        let mut answer = Answer { status, headers, body: Vec::new() };
        let length: usize =
            answer.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
        while self.buffer.len() < length {
            self.fill()?;
        }
        answer.body = self.buffer.drain(..length).collect();
        Some(answer)
    }

    fn fill(&mut self) -> Option<()> {
        let mut bytes = [0; 16 << 10];
        let count = self.stream.read(&mut bytes).ok().filter(|count| *count > 0)?;
        self.buffer.extend_from_slice(&bytes[..count]);
        Some(())
    }
}
