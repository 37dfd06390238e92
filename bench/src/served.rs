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

/// How often each is measured.
const ROUNDS: usize = 5;
/// The limit per second and key: more than any load.
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
    /// Ours, with this config in a file of this name; it listens only for this protocol.
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
        let version = said(Command::new("redis-server").arg("--version"));
        let version = version.split(' ').find_map(|word| word.strip_prefix("v=")).unwrap_or_default();
        Server::start(version.to_owned(), command, port)
    }

    /// Starts any, and waits until it listens.
    #[expect(clippy::disallowed_methods, reason = "other programs say in no common way that they listen")]
    pub fn start(version: String, mut command: Command, port: u16) -> Server {
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn();
        let child = child.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let mut server = Server { version, port, child };
        let began = Instant::now();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            let ended = server.child.try_wait().expect("it is our child");
            assert!(
                ended.is_none() && began.elapsed() < Duration::from_secs(10),
                "it does not start: {command:?}"
            );
            thread::sleep(Duration::from_millis(20));
        }
        server
    }

    /// Does that, which asks it; the processor time that it took meanwhile, and what came of it.
    pub fn cost_of<T>(&self, load: impl FnOnce() -> T) -> (f64, T) {
        let before = self.cpu_seconds();
        let result = load();
        (self.cpu_seconds() - before, result)
    }

    /// Processor time of all its threads, and of its children: nginx has a worker.
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
        // Ticks are hundredths of a second for every program on Linux, whatever the kernel counts in.
        f64::from(ticks.sum::<u32>()) / 100.0
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The group, since nginx would leave its worker behind.
        let group = format!("-{}", self.child.id());
        let _ = Command::new("kill").args(["-KILL", "--", &group]).status();
        let _ = self.child.wait();
    }
}

/// The config of ours for one limit of [`RATE`] by each of these facts.
pub fn limits(facts: &[&str]) -> String {
    let limit = |fact| format!("  - {{ name: per-{fact}, by: {fact}, rate: {RATE}/s, burst: {RATE} }}\n");
    format!("limits:\n{}", facts.iter().map(limit).collect::<String>())
}

/// A command on the first core, so that it believes to have only one; it ends when we do, whatever ends us.
pub fn on_first_core(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM", "taskset", "-c", "0", program]);
    command
}

/// A command on the second core, for those who ask.
pub fn on_second_core(program: &str) -> Command {
    let mut command = Command::new("taskset");
    command.args(["-c", "1", program]);
    command
}

/// Binds this thread to that core, and no other: a program that asks by itself.
pub fn stay_on_second_core() {
    let thread = fs::read_link("/proc/thread-self").expect("this is Linux");
    let number = thread.file_name().expect("PID/task/TID");
    said(Command::new("taskset").args(["-cp", "1"]).arg(number));
}

/// What a command says until it ends, which must be well.
pub fn said(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let [said, errors] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{command:?}: {}\n{said}{errors}", output.status);
    said
}

/// The last word of what a program calls itself: `nginx version: nginx/1.22.1`.
pub fn version(program: &str, flag: &str) -> String {
    // Some say it where errors go.
    let said = said(Command::new("sh").args(["-c", "\"$0\" \"$1\" 2>&1", program, flag]));
    said.trim().rsplit([' ', '/']).next().unwrap_or_default().to_owned()
}

/// The folder of what this program writes for those that it starts.
pub fn folder() -> PathBuf {
    let mut folder = env::current_exe().expect("this program has a path").into_os_string();
    folder.push("-files");
    fs::create_dir_all(&folder).expect("the target folder can be written");
    folder.into()
}

/// Writes a file there.
pub fn file(name: &str, content: &[u8]) -> PathBuf {
    let file = folder().join(name);
    fs::write(&file, content).expect("the target folder can be written");
    file
}

/// What one side was asked in one round.
#[derive(Clone, Copy, Debug)]
pub struct Counted {
    /// How many requests it answered.
    pub requests: f64,
    /// In how many seconds.
    pub seconds: f64,
}

/// What a server needed, round by round.
#[derive(Debug, Default)]
pub struct Rounds {
    cpu: Vec<f64>,
    speed: Vec<f64>,
}

impl Rounds {
    /// Adds a round that took so many seconds of the processor.
    pub fn add(&mut self, cpu_seconds: f64, counted: Counted) {
        self.cpu.push(cpu_seconds / counted.requests * 1e6);
        self.speed.push(counted.requests / counted.seconds);
    }

    /// Processor seconds for a million requests.
    pub fn cpu(&self) -> f64 {
        median(&self.cpu)
    }

    /// Requests in a second.
    pub fn speed(&self) -> f64 {
        median(&self.speed)
    }

    /// Prints what was measured, and returns all of it.
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

/// Has every side asked in turns, so that whatever disturbs the machine disturbs all: once to warm up, then for
/// each of its rounds.
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
