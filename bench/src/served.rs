//! Runs servers as child processes on the first core, and measures their CPU time under load from the second.

use std::env;
use std::fs;
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollkeeper_tests::redis::free_port;

use crate::report::{self, median};

/// Rounds of each side.
const ROUNDS: usize = 5;
/// The requests of `wrk`.
const LOAD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/load.lua");
/// Connections of a client to an HTTP server.
pub const CONNECTIONS: usize = 32;
/// The limit per second and key, above any load here.
pub const RATE: u32 = 1_000_000;

/// A server that runs until this is dropped.
#[derive(Debug)]
pub struct Server {
    /// Its name and version.
    pub version: String,
    /// Its port.
    pub port: u16,
    child: Child,
}

impl Server {
    /// Tollkeeper with this config, saved as `NAME.yaml`, listening for one protocol only.
    pub fn tollkeeper(program: &str, protocol: &str, name: &str, config: &str, more: &[&str]) -> Server {
        let port = free_port();
        let mut command = on_first_core(program);
        command.args(["serve", "--config"]).arg(file(&format!("{name}.yaml"), config.as_bytes())).args(more);
        for listener in ["http", "grpc", "resp"] {
            let address = if listener == protocol { format!("127.0.0.1:{port}") } else { "off".to_owned() };
            command.args([format!("--{listener}"), address]);
        }
        Server::start(version(program, "--version"), command, port)
    }

    /// `throttlecrab-server`, started as its documentation shows. Each request carries its limit.
    pub fn throttlecrab(program: &str, protocol: &str) -> Server {
        let port = free_port();
        let mut command = on_first_core(program);
        command.args([&format!("--{protocol}"), &format!("--{protocol}-host"), "127.0.0.1"]);
        command.args([format!("--{protocol}-port"), port.to_string()]);
        Server::start(version(program, "--version"), command, port)
    }

    /// A Redis server without persistence.
    pub fn redis() -> Server {
        let port = free_port();
        let mut command = on_first_core("redis-server");
        command.args([
            "--bind",
            "127.0.0.1",
            "--port",
            &port.to_string(),
            "--save",
            "",
            "--appendonly",
            "no",
        ]);
        // Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=…
        let version = stdout(Command::new("redis-server").arg("--version"));
        let version = version.split(' ').find_map(|word| word.strip_prefix("v=")).unwrap_or_default();
        Server::start(version.to_owned(), command, port)
    }

    /// Starts a server, and waits until it accepts connections.
    #[expect(clippy::disallowed_methods, reason = "the peers have no common way to signal readiness")]
    pub fn start(version: String, mut command: Command, port: u16) -> Server {
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn();
        let child = child.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let mut server = Server { version, port, child };
        let began = Instant::now();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            let ended = server.child.try_wait().expect("it is a child of this process");
            assert!(
                ended.is_none() && began.elapsed() < Duration::from_secs(10),
                "the server does not start: {command:?}"
            );
            thread::sleep(Duration::from_millis(20));
        }
        server
    }

    /// Runs a load, and returns the CPU seconds that the server used meanwhile with the result of the load.
    pub fn cpu_during<T>(&self, load: impl FnOnce() -> T) -> (f64, T) {
        let before = self.cpu_seconds();
        let result = load();
        (self.cpu_seconds() - before, result)
    }

    /// CPU time of the process and its children (nginx has a worker process).
    pub fn cpu_seconds(&self) -> f64 {
        let folders = fs::read_dir("/proc").expect("this is Linux");
        let pids = folders.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
        let ticks = pids.filter_map(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            // The program name is in parentheses and may contain anything.
            let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
            let [parent, user, system] = [1, 11, 12].map(|at| fields[at].parse::<u32>().expect("proc(5)"));
            (pid == self.child.id() || parent == self.child.id()).then_some(user + system)
        });
        // Linux reports ticks of 1/100 s to user space, whatever its internal tick is.
        f64::from(ticks.sum::<u32>()) / 100.0
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The whole process group, because nginx has a worker process.
        let group = format!("-{}", self.child.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
        let _ = self.child.wait();
    }
}

/// A config with one limit of [`RATE`] for each of these facts.
pub fn limits(facts: &[&str]) -> String {
    let limit = |fact| format!("  - {{ name: per-{fact}, by: {fact}, rate: {RATE}/s, burst: {RATE} }}\n");
    format!("limits:\n{}", facts.iter().map(limit).collect::<String>())
}

/// A command pinned to the first core, so that it starts as many threads as for a machine with one core. It is
/// terminated when this process ends for any reason.
pub fn on_first_core(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM", "taskset", "-c", "0", program]);
    command
}

/// A command pinned to the second core, for load generators.
pub fn on_second_core(program: &str) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", "1", program]);
    command
}

/// Pins this thread to the second core, for a load generator in this process.
pub fn pin_to_second_core() {
    let thread = fs::read_link("/proc/thread-self").expect("this is Linux");
    let number = thread.file_name().expect("PID/task/TID");
    stdout(Command::new("taskset").args(["-cp", "1"]).arg(number));
}

/// The standard output of a command, which must succeed.
pub fn stdout(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let [stdout, errors] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{command:?}: {}\n{stdout}{errors}", output.status);
    stdout
}

/// The version that a program prints: `1.22.1` of `nginx version: nginx/1.22.1`.
pub fn version(program: &str, flag: &str) -> String {
    // Some print it to standard error.
    let stdout = stdout(Command::new("sh").args(["-c", "\"$0\" \"$1\" 2>&1", program, flag]));
    stdout.trim().rsplit([' ', '/']).next().unwrap_or_default().to_owned()
}

/// The folder for config files and the like of the servers that this program starts.
pub fn folder() -> PathBuf {
    let mut folder = env::current_exe().expect("this program has a path").into_os_string();
    folder.push("-files");
    fs::create_dir_all(&folder).expect("the target folder is writable");
    folder.into()
}

/// Writes a file to [`folder`], and returns its path.
pub fn file(name: &str, content: &[u8]) -> PathBuf {
    let file = folder().join(name);
    fs::write(&file, content).expect("the target folder is writable");
    file
}

/// The requests of one side in one round.
#[derive(Clone, Copy, Debug)]
pub struct Counted {
    /// Number of requests with a response.
    pub requests: f64,
    /// Duration of the round in seconds.
    pub seconds: f64,
}

/// The requests that `wrk` sends, one for each key in rotation.
#[derive(Clone, Copy, Debug)]
pub struct WrkRequest<'a> {
    /// The number of keys: `user-1` and so on.
    pub keys: usize,
    /// Such as `GET`.
    pub method: &'a str,
    /// The path, in which `KEY` is replaced by the key.
    pub path: &'a str,
    /// The body, in which `KEY` is replaced by the key; empty for a request without a body.
    pub body: &'a str,
}

/// Loads a server with `wrk` from the second core for this long; returns what it counted, and the number of refused
/// requests.
pub fn wrk(url: &str, request: &WrkRequest<'_>, lasting: Duration) -> (Counted, f64) {
    let stdout = stdout(
        on_second_core("wrk")
            .args(["-t", "1", "-c", &CONNECTIONS.to_string()])
            .args(["-d", &format!("{}s", lasting.as_secs()), "-s", LOAD])
            .args([url, "--", &request.keys.to_string(), request.method, request.path, request.body]),
    );
    let counted = stdout.lines().find_map(|line| line.strip_prefix("counted "));
    let counted = counted.unwrap_or_else(|| panic!("{stdout}")).split(' ');
    let counted: Vec<f64> = counted.map(|count| count.parse().expect("a number")).collect();
    let [requests, micros, refused, broken] = counted[..] else { panic!("load.lua prints four numbers") };
    assert_eq!(broken, 0.0, "{url} lost connections:\n{stdout}");
    (Counted { requests, seconds: micros / 1e6 }, refused)
}

/// CPU time and throughput of a server, one entry per round.
#[derive(Debug, Default)]
pub struct Rounds {
    cpu: Vec<f64>,
    speed: Vec<f64>,
}

impl Rounds {
    /// Adds a round.
    pub fn add(&mut self, cpu_seconds: f64, counted: Counted) {
        self.cpu.push(cpu_seconds / counted.requests * 1e6);
        self.speed.push(counted.requests / counted.seconds);
    }

    /// CPU seconds per million requests.
    pub fn cpu(&self) -> f64 {
        median(&self.cpu)
    }

    /// Requests per second.
    pub fn speed(&self) -> f64 {
        median(&self.speed)
    }

    /// Prints the medians, and returns all rounds.
    pub fn report(&self, protocol: &str, name: &str, server: &Server) -> Value {
        report::figure(&format!("{protocol}-cpu-seconds-per-million-{name}"), self.cpu());
        report::figure(&format!("{protocol}-requests-per-second-{name}"), self.speed());
        json!({
            "cpu_seconds_per_million": self.cpu,
            "requests_per_second": self.speed,
            "version": server.version,
        })
    }
}

/// Warms every side up, then runs the rounds of all sides in turns, so that noise of the machine affects all of them.
pub fn in_turns<S, T>(sides: &mut [S], warm_up: impl Fn(&S) -> T, mut round: impl FnMut(&mut S)) {
    for side in &*sides {
        warm_up(side);
    }
    for _ in 0..ROUNDS {
        for side in &mut *sides {
            round(side);
        }
    }
}
