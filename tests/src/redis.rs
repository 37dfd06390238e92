//! Starts real Redis and Valkey servers for tests, each in its own temporary folder, on a Unix socket and optionally on
//! a port. They stop when dropped.

use std::fmt;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tollkeeper::config::StoreUrl;
use tollkeeper::store::redis::script::Script;
use tollkeeper::store::redis::wire::Value;
use tollkeeper::store::redis::{RedisOptions, RedisStore};
use tollkeeper::store::{Leased, LeasedSettings, Resilient, ResilientSettings};
use tollkeeper::{Clock, Limit, Limiter, MemoryStore, Policy};

/// Timeout for anything a server does. Long, because the machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The server program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the programs")]
pub enum Program {
    Redis,
    /// The oldest Redis that the scripts support.
    Redis62,
    Valkey,
}

impl Program {
    /// Path of the program: from `PATH`, or where `tools/test` has unpacked it.
    fn path(self) -> PathBuf {
        let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
        match self {
            Program::Redis => "redis-server".into(),
            Program::Redis62 => target.join("python/bin/redis-server"),
            Program::Valkey => {
                let unpacked = target.join("valkey/usr/bin/valkey-server");
                if unpacked.exists() { unpacked } else { "valkey-server".into() }
            }
        }
    }
}

/// A private server for one test.
#[derive(Debug)]
pub struct Server {
    process: Child,
    folder: PathBuf,
    port: Option<u16>,
    program: Program,
}

impl Server {
    /// Starts a Redis on a socket, without persistence.
    pub fn start() -> Server {
        Server::with(Program::Redis, &[])
    }

    /// Starts a server with additional lines in its config file.
    pub fn with(program: Program, settings: &[&str]) -> Server {
        let mut server = Server::run(program, None, settings);
        assert!(server.is_up(), "{}", server.log());
        server
    }

    /// Starts a server that listens on a port as well; `port_setting` is the name of the setting, `port` or `tls-port`.
    pub fn on_a_port(program: Program, port_setting: &str, settings: &[&str]) -> Server {
        loop {
            let mut server = Server::run(program, Some((port_setting, free_port())), settings);
            // Another process may have taken the port in between: then the server exits at once.
            if server.is_up() {
                return server;
            }
        }
    }

    fn run(program: Program, port: Option<(&str, u16)>, settings: &[&str]) -> Server {
        let folder = folder();
        // If a setting occurs twice, Redis uses the last line.
        let mut lines = vec!["port 0".to_owned(), "bind 127.0.0.1".to_owned()];
        lines.extend(["save \"\"".to_owned(), "appendonly no".to_owned()]);
        lines.push(format!("dir {}", folder.display()));
        lines.push(format!("unixsocket {}", folder.join("socket").display()));
        lines.extend(port.map(|(port_setting, port)| format!("{port_setting} {port}")));
        lines.extend(settings.iter().map(|line| line.to_string()));
        let file = folder.join("settings");
        fs::write(&file, lines.join("\n")).expect("the temporary folder is writable");
        let mut command = Command::new(program.path());
        command.arg(&file);
        if settings.iter().any(|line| line.starts_with("sentinel ")) {
            command.arg("--sentinel");
        }
        let process = spawn(&mut command, program, &folder);
        Server { process, folder, port: port.map(|(_, port)| port), program }
    }

    /// Kills the server with SIGKILL.
    pub fn kill(&mut self) {
        self.process.kill().expect("the server runs");
        self.process.wait().expect("the server exits");
    }

    /// Restarts a killed server with additional settings.
    pub fn restart_with(&mut self, settings: &[&str]) {
        let file = self.folder.join("settings");
        let before = fs::read_to_string(&file).expect("written when it was started");
        fs::write(&file, format!("{before}\n{}\n", settings.join("\n")))
            .expect("the temporary folder is writable");
        self.process = spawn(Command::new(self.program.path()).arg(&file), self.program, &self.folder);
    }

    /// Restarts a killed server in the same folder.
    pub fn restart(&mut self) {
        self.restart_with(&[]);
    }

    /// Sends a signal: `STOP`, `CONT`.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([format!("-{name}"), self.process().to_string()]).status();
        assert!(sent.expect("`kill` is installed").success(), "no signal {name}");
    }

    /// The store URL of its socket.
    pub fn url(&self) -> String {
        format!("redis+unix://{}", self.socket().display())
    }

    /// Path of the Unix socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("socket")
    }

    /// TCP port of the server.
    pub fn port(&self) -> u16 {
        self.port.expect("started with `on_a_port`")
    }

    /// Process id of the server.
    pub fn process(&self) -> u32 {
        self.process.id()
    }

    /// The `EVALSHA` calls so far: all of them, and those that failed, which are repeated with `EVAL`.
    pub fn script_calls(&self) -> [u64; 2] {
        let Value::Bytes(stats) = self.connect().text("INFO commandstats") else { panic!("text") };
        let stats = String::from_utf8(stats).expect("text");
        let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).unwrap_or_default();
        let number =
            |name: &str| line.split([':', ',']).find_map(|part| part.strip_prefix(name)?.parse().ok());
        ["calls=", "failed_calls="].map(|name| number(name).unwrap_or(0))
    }

    /// Opens a connection, waiting until the server accepts one.
    pub fn connect(&self) -> Client {
        self.try_connect().unwrap_or_else(|why| panic!("no server: {why}\n{}", self.log()))
    }

    /// Whether the server is up and a primary.
    pub fn is_primary(&self) -> bool {
        let is_there = UnixStream::connect(self.socket()).is_ok();
        is_there
            && self.connect().call(&[b"ROLE"]).is_ok_and(|role| {
                matches!(role, Value::List(role) if role.first() == Some(&Value::Bytes(b"master".to_vec())))
            })
    }

    /// The log of the server.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// Waits until it accepts connections; false if it exited, because another process has its port.
    fn is_up(&mut self) -> bool {
        let started = Instant::now();
        loop {
            if self.process.try_wait().expect("a child of this process").is_some() {
                assert!(self.log().contains("Address already in use"), "{}", self.log());
                return false;
            }
            if UnixStream::connect(self.socket()).is_ok() {
                return true;
            }
            assert!(started.elapsed() < PATIENCE, "no server: {}", self.log());
            pause();
        }
    }

    fn try_connect(&self) -> io::Result<Client> {
        let started = Instant::now();
        loop {
            match UnixStream::connect(self.socket()) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(PATIENCE))?;
                    return Ok(Client::over(stream));
                }
                Err(error) if started.elapsed() > PATIENCE => return Err(error),
                Err(_) => pause(),
            }
        }
    }
}

fn spawn(command: &mut Command, program: Program, folder: &Path) -> Child {
    command
        .stdout(fs::File::create(folder.join("log")).expect("the temporary folder is writable"))
        .stdin(Stdio::null())
        .spawn()
        .unwrap_or_else(|error| panic!("{program:?}: {error} (`make test` installs what it needs)"))
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server may have exited and the folder may be gone: neither matters here.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// A limiter with the store at this URL, and a deadline long enough for a busy machine.
pub fn limiter(url: &str, limits: Vec<Limit>) -> Limiter {
    limiter_and_store(url, limits).0
}

/// Like [`limiter`], with its store.
pub fn limiter_and_store(url: &str, limits: Vec<Limit>) -> (Limiter, Arc<Resilient<RedisStore>>) {
    let Ok(StoreUrl::Redis(url)) = url.parse() else { panic!("{url} is not a Redis URL") };
    let settings = ResilientSettings { deadline: Duration::from_secs(20), ..ResilientSettings::default() };
    let store = RedisStore::open(&url, RedisOptions::default());
    let store = Arc::new(Resilient::new(store, settings, MemoryStore::default()));
    (Limiter::with_store(Policy::new(limits).expect("valid limits"), Arc::clone(&store) as _), store)
}

/// As [`limiter`], on a node that answers without asking where it can: with the denial bound and leases.
pub fn leased_limiter(url: &str, limits: Vec<Limit>) -> Limiter {
    let Ok(StoreUrl::Redis(url)) = url.parse() else { panic!("{url} is not a Redis URL") };
    let settings = ResilientSettings { deadline: Duration::from_secs(20), ..ResilientSettings::default() };
    let store = RedisStore::open(&url, RedisOptions::default());
    let store = Resilient::new(store, settings, MemoryStore::default());
    let store = Leased::new(store, LeasedSettings::default(), Clock::system());
    Limiter::with_store(Policy::new(limits).expect("valid limits"), Arc::new(store))
}

/// A short pause between two polls of a server's state.
pub(crate) fn pause() {
    std::thread::park_timeout(Duration::from_millis(5));
}

/// Creates a new temporary folder.
pub fn folder() -> PathBuf {
    static FOLDERS: AtomicU32 = AtomicU32::new(0);
    let number = FOLDERS.fetch_add(1, Relaxed);
    let folder = std::env::temp_dir().join(format!("tollkeeper-redis-{}-{number}", std::process::id()));
    fs::create_dir(&folder).expect("the temporary folder is writable");
    folder
}

/// A free port whose cluster bus port, 10,000 above it, is free as well. Both are below the system's ephemeral ports.
pub fn free_port() -> u16 {
    const FIRST: u16 = 10_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let own = u16::try_from(std::process::id() % 97).expect("below 97") * 101;
    loop {
        let port = FIRST + (own + NEXT.fetch_add(1, Relaxed)) % 10_000;
        let free = |port| TcpListener::bind(("127.0.0.1", port)).is_ok();
        if free(port) && free(port + 10_000) {
            return port;
        }
    }
}

/// A blocking connection to a server.
pub struct Client {
    stream: BufReader<Box<dyn Stream>>,
    asked: Vec<u8>,
}

trait Stream: Read + Write + Send {}

impl<S: Read + Write + Send> Stream for S {}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

impl Client {
    /// Connects to a local port.
    pub fn to(port: u16) -> io::Result<Client> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Client::over(stream))
    }

    fn over(stream: impl Stream + 'static) -> Client {
        Client { stream: BufReader::with_capacity(1 << 16, Box::new(stream)), asked: Vec::new() }
    }

    /// Sends one command and returns its reply.
    pub fn call(&mut self, words: &[&[u8]]) -> Result<Value, String> {
        self.ask(words);
        self.send();
        self.answer()
    }

    /// Sends one command, given as text; it must succeed.
    pub fn text(&mut self, command: &str) -> Value {
        let words: Vec<&[u8]> = command.split(' ').map(str::as_bytes).collect();
        self.call(&words).expect(command)
    }

    /// Runs a script, with `EVAL` if the server does not know it yet.
    pub fn run(&mut self, script: &Script, keys: &[&[u8]], args: &[&[u8]]) -> Result<Value, String> {
        let count = keys.len().to_string();
        let mut words = vec![&b"EVALSHA"[..], script.sha().as_bytes(), count.as_bytes()];
        words.extend_from_slice(keys);
        words.extend_from_slice(args);
        match self.call(&words) {
            Err(error) if error.starts_with("NOSCRIPT") => {
                (words[0], words[1]) = (b"EVAL", script.text().as_bytes());
                self.call(&words)
            }
            answer => answer,
        }
    }

    /// Queues a command.
    pub fn ask(&mut self, words: &[&[u8]]) {
        self.asked.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
        for word in words {
            self.asked.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            self.asked.extend_from_slice(word);
            self.asked.extend_from_slice(b"\r\n");
        }
    }

    /// Sends the queued commands.
    pub fn send(&mut self) {
        self.stream.get_mut().write_all(&self.asked).expect("the server listens");
        self.asked.clear();
    }

    /// Reads the next reply.
    pub fn answer(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("the server replies");
        let line = line.trim_end();
        let (kind, rest) = line.split_at_checked(1).expect("a reply has a type");
        let number = || rest.parse::<i64>().expect("a number");
        match kind {
            "+" => Ok(Value::Bytes(rest.into())),
            "-" => Err(rest.to_owned()),
            ":" => Ok(Value::Number(number())),
            "$" | "*" if rest == "-1" => Ok(Value::Nothing),
            "$" => {
                let mut bytes = vec![0; usize::try_from(number()).expect("a length") + 2];
                self.stream.read_exact(&mut bytes).expect("the server replies");
                bytes.truncate(bytes.len() - 2);
                Ok(Value::Bytes(bytes))
            }
            "*" => (0..number()).map(|_| self.answer()).collect::<Result<_, _>>().map(Value::List),
            _ => panic!("not RESP: {line}"),
        }
    }

    /// All keys with their expiry in Unix milliseconds, -1 for never. Keys that expire meanwhile are left out.
    pub fn keys(&mut self) -> Vec<(Vec<u8>, i64)> {
        let Value::List(names) = self.text("KEYS *") else { panic!("a list of keys") };
        let mut keys = Vec::new();
        for name in names {
            let Value::Bytes(name) = name else { panic!("a key") };
            let expires = self.goes(&name);
            if expires != -2 {
                keys.push((name, expires));
            }
        }
        keys
    }

    /// The expiry of a key in Unix milliseconds; -2 if it does not exist.
    fn goes(&mut self, name: &[u8]) -> i64 {
        // Redis 6.2 knows only the remaining time. The store's keys expire at whole seconds, so round to the nearest.
        const NEAREST: &str = "local time, stays = redis.call('TIME'), redis.call('PTTL', KEYS[1])
            if stays < 0 then return stays end
            return math.floor(time[1] + (time[2] / 1000 + stays) / 1000 + 0.5) * 1000";
        match self.call(&[b"PEXPIRETIME", name]) {
            Ok(Value::Number(goes)) => goes,
            Err(error) if error.starts_with("ERR unknown command") => {
                let stays = self.call(&[b"EVAL", NEAREST.as_bytes(), b"1", name]);
                let Ok(Value::Number(goes)) = stays else { panic!("a time: {stays:?}") };
                goes
            }
            other => panic!("a time: {other:?}"),
        }
    }
}
