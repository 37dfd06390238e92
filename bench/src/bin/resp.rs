//! How dear over RESP: processor time of the service for each check, beside other servers.
//!
//! `resp TOLLKEEPER THROTTLECRAB` starts ours, `throttlecrab-server` and `redis-server` on the first core and
//! asks them in turns with `redis-benchmark` from the second, with 1, 16 and 64 commands in a pipeline. As over
//! HTTP, the processor time that a server needs for a command is compared. `PING` of Redis is the least that
//! an answer can cost.

use std::env;
use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Map, json};
use tollkeeper_bench::report::{self, Want};

const ROUNDS: usize = 5;
const PIPELINES: [usize; 3] = [1, 16, 64];
const CONNECTIONS: &str = "32";
/// Each command is for one of so many keys.
const KEYS: &str = "10000";
/// More than anybody asks, for every key.
const RATE: &str = "1000000";

/// What is measured: a name, the server it is asked of, and the words of the command.
type Side<'a> = (&'static str, &'a Server, Vec<&'static str>);

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [tollkeeper, throttlecrab] = &arguments[..] else { panic!("usage: resp TOLLKEEPER THROTTLECRAB") };
    let (ours, throttlecrab, redis) = (ours(tollkeeper), throttlecrab_server(throttlecrab), redis());
    let key = "key:__rand_int__";
    let sides: [Side<'_>; 5] = [
        ("tollkeeper-cl.throttle", &ours, vec!["CL.THROTTLE", key, RATE, RATE, "1"]),
        ("tollkeeper-throttle", &ours, vec!["THROTTLE", key, RATE, RATE, "1"]),
        ("tollkeeper-tk.check", &ours, vec!["TK.CHECK", "user", key]),
        ("throttlecrab", &throttlecrab, vec!["THROTTLE", key, RATE, RATE, "1"]),
        ("redis-ping", &redis, vec!["PING"]),
    ];
    let mut results = Map::new();
    let mut at_16 = Vec::new();
    for pipeline in PIPELINES {
        let mut measured = sides.each_ref().map(|_| (Vec::new(), Vec::new()));
        for round in 0..=ROUNDS {
            for ((_, server, words), (cpu, speed)) in sides.iter().zip(&mut measured) {
                let (took, per_second) = load(server, words, pipeline);
                // The first is to warm up.
                if round > 0 {
                    cpu.push(took);
                    speed.push(per_second);
                }
            }
        }
        for ((name, _, _), (cpu, speed)) in sides.iter().zip(&measured) {
            report::figure(&format!("resp-{pipeline}-cpu-seconds-per-million-{name}"), median(cpu));
            report::figure(&format!("resp-{pipeline}-commands-per-second-{name}"), median(speed));
            let measured = json!({ "cpu_seconds_per_million": cpu, "commands_per_second": speed });
            results.insert(format!("{name}-{pipeline}"), measured);
        }
        if pipeline == 16 {
            at_16 = measured.iter().map(|(cpu, _)| median(cpu)).collect();
        }
    }
    let [cell, _, check, throttlecrab, ping] = at_16[..] else { panic!("16 is one of the pipelines") };
    report::ratio("resp/throttlecrab", throttlecrab / cell);
    report::ratio("resp/redis-ping", ping / cell);
    report::goal("resp/cl.throttle", Want::AtMost(2.5), cell);
    report::goal("resp/tk.check", Want::AtMost(2.5), check);
    report::goal("resp/throttlecrab", Want::AtLeast(2.5), throttlecrab / cell);
    report::save("resp", results.into());
}

/// With a policy, so that its metrics are counted.
fn ours(program: &str) -> Server {
    let config = env::current_exe().expect("this program has a path").with_file_name("resp.yaml");
    let limit = format!("limits:\n  - {{ name: per-user, by: user, rate: {RATE}/s, burst: {RATE} }}\n");
    fs::write(&config, limit).expect("the target folder can be written");
    let port = free_port();
    let mut command = on_first_core(program);
    command
        .args(["serve", "--grpc", "off", "--http", "off", "--resp", &format!("127.0.0.1:{port}"), "--config"])
        .arg(&config);
    Server::start(command, port)
}

/// As its documentation starts it. Whoever asks says what the limit is.
fn throttlecrab_server(program: &str) -> Server {
    let port = free_port();
    let mut command = on_first_core(program);
    command.args(["--redis", "--redis-host", "127.0.0.1", "--redis-port", &port.to_string()]);
    Server::start(command, port)
}

fn redis() -> Server {
    let port = free_port();
    let mut command = on_first_core("redis-server");
    command.args(["--port", &port.to_string(), "--save", "", "--appendonly", "no"]);
    Server::start(command, port)
}

/// Processor seconds for a million commands, and commands in a second.
#[expect(clippy::cast_precision_loss, reason = "a few million")]
fn load(server: &Server, words: &[&str], pipeline: usize) -> (f64, f64) {
    // A second or two of each.
    let commands = 30_000 * pipeline.min(16);
    let before = server.cpu_seconds();
    let output = Command::new("timeout")
        .args(["120", "taskset", "-c", "1", "redis-benchmark", "-p", &server.port.to_string(), "--csv"])
        .args(["-c", CONNECTIONS, "-r", KEYS, "-P", &pipeline.to_string(), "-n", &commands.to_string()])
        .args(words)
        .output()
        .expect("redis-benchmark starts");
    let took = server.cpu_seconds() - before;
    let said = String::from_utf8_lossy(&output.stdout);
    let speed = said.lines().last().and_then(|line| line.split(',').nth(1));
    let speed = speed.and_then(|speed| speed.trim_matches('"').parse().ok());
    let speed = speed.unwrap_or_else(|| panic!("{said}{}", String::from_utf8_lossy(&output.stderr)));
    (took / commands as f64 * 1e6, speed)
}

/// A server that runs until this is dropped.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    /// Starts it, and waits until it listens.
    #[expect(clippy::disallowed_methods, reason = "other programs say in no common way that they listen")]
    fn start(mut command: Command, port: u16) -> Server {
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut server = Server { child: child.unwrap_or_else(|error| panic!("{command:?}: {error}")), port };
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

    /// Processor time of all its threads.
    fn cpu_seconds(&self) -> f64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).expect("it runs");
        // The name of the program stands in brackets and may contain anything.
        let fields: Vec<&str> = stat.rsplit_once(") ").expect("proc(5)").1.split(' ').collect();
        let [user, system] = [11, 12].map(|at| fields[at].parse::<u32>().expect("proc(5)"));
        // Ticks are hundredths of a second for every program on Linux, whatever the kernel counts in.
        f64::from(user + system) / 100.0
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A command on the first core, so that it believes to have only one; it ends when we do, whatever ends us.
fn on_first_core(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM", "taskset", "-c", "0", program]);
    command
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("there are free ports");
    listener.local_addr().expect("it is bound").port()
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
