//! Runs `tollkeeper serve` as a child process on free ports.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use crate::binary;

/// A running server. Killed on drop.
#[derive(Debug)]
pub struct Served {
    process: Child,
    /// Address of the HTTP listener.
    pub http: SocketAddr,
    /// Address of the RESP listener.
    pub resp: SocketAddr,
}

impl Served {
    /// Starts `tollkeeper serve` with additional arguments, and waits until it listens.
    pub fn with(args: &[&str]) -> Served {
        let mut command = Command::new("sh");
        // Each connection needs a file descriptor, and the soft limit may be low.
        command.args(["-c", "ulimit -n \"$(ulimit -Hn)\"; exec \"$0\" \"$@\""]).arg(binary::tollkeeper());
        command.args(["serve", "--grpc", "off", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0"]).args(args);
        let mut process =
            command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the server starts");
        let mut lines = BufReader::new(process.stdout.take().expect("piped")).lines();
        let mut listens = |name: &str| {
            let line = lines.next().expect("the server prints its address").expect("text");
            let address =
                line.strip_prefix(&format!("listening {name}=")).unwrap_or_else(|| panic!("{line}"));
            address.parse().expect("an address")
        };
        let (http, resp) = (listens("http"), listens("resp"));
        Served { process, http, resp }
    }

    /// Process id of the server.
    pub fn process(&self) -> u32 {
        self.process.id()
    }

    /// Resident memory of the server in KiB.
    pub fn memory(&self) -> u64 {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", self.process())).expect("the server runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS is listed");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    /// The value of a series of `/metrics`, given with its labels as it is printed there.
    pub fn metric(&self, series: &str) -> u64 {
        let url = format!("http://{}/metrics", self.http);
        let page = Command::new("curl").args(["--silent", "--show-error", "--noproxy", "*", &url]).output();
        let page = String::from_utf8(page.expect("curl starts").stdout).expect("text");
        let value = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no {series} in {page}")).parse().expect("a whole number")
    }

    /// Number of RESP requests with this result.
    pub fn requests(&self, result: &str) -> u64 {
        self.metric(&format!(
            "tollkeeper_requests_total{{transport=\"resp\",route=\"\",result=\"{result}\"}}"
        ))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
