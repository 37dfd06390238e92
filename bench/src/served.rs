//! Servers beside each other: each in a process of its own on the first core, and what it costs them to be asked.

use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// A server that runs until this is dropped.
#[derive(Debug)]
pub struct Server {
    /// Whose it is.
    pub name: &'static str,
    /// What it calls itself.
    pub version: String,
    /// Where it listens.
    pub port: u16,
    child: Child,
}

impl Server {
    /// Starts it, and waits until it listens.
    #[expect(clippy::disallowed_methods, reason = "other programs say in no common way that they listen")]
    pub fn start(name: &'static str, version: String, mut command: Command, port: u16) -> Server {
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn();
        let child = child.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let mut server = Server { name, version, port, child };
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

    /// Processor time of all its threads, and of its children: nginx has a worker.
    pub fn cpu_seconds(&self) -> f64 {
        let folders = fs::read_dir("/proc").expect("this is Linux");
        let pids = folders.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
        let ticks = pids.filter_map(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            // The name of the program stands in brackets and may contain anything.
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

/// A command on the first core, so that it believes to have only one; it ends when we do, whatever ends us.
pub fn on_first_core(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM", "taskset", "-c", "0", program]);
    command
}

/// A port that nobody listens on.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("there are free ports");
    listener.local_addr().expect("it is bound").port()
}

/// The last word of what a program calls itself: `nginx version: nginx/1.22.1`.
pub fn version(program: &str, flag: &str) -> String {
    let output = Command::new(program).arg(flag).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    said.trim().rsplit([' ', '/']).next().unwrap_or_default().to_owned()
}

/// The one in the middle.
pub fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
