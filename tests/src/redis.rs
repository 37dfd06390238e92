//! A Redis of one's own: a real server on a socket in a folder of its own, ended with the test.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tollkeeper::redis::script::Script;
use tollkeeper::redis::wire::Value;

/// A server that nobody else knows of.
#[derive(Debug)]
pub struct Server {
    process: Child,
    folder: PathBuf,
}

impl Server {
    /// Starts one, without persistence.
    pub fn start() -> Server {
        static SERVERS: AtomicU32 = AtomicU32::new(0);
        let number = SERVERS.fetch_add(1, Relaxed);
        let folder = std::env::temp_dir().join(format!("tollkeeper-redis-{}-{number}", std::process::id()));
        fs::create_dir(&folder).expect("a folder of one's own");
        let process = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"])
            .arg(folder.join("socket"))
            .arg("--dir")
            .arg(&folder)
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is installed (Debian calls the package `redis-server`)");
        Server { process, folder }
    }

    /// The socket it listens on.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("socket")
    }

    /// A connection, as soon as it takes one.
    pub fn connect(&self) -> Client {
        let started = Instant::now();
        loop {
            match Client::connect(&self.socket()) {
                Ok(client) => return client,
                Err(error) => assert!(started.elapsed() < Duration::from_secs(10), "no server: {error}"),
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself, and the folder may be gone: there is nothing to be done about it.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// A connection to a server: asks, and waits for the answer.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
    asked: Vec<u8>,
}

impl Client {
    fn connect(socket: &Path) -> io::Result<Client> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        Ok(Client { stream: BufReader::with_capacity(1 << 16, stream), asked: Vec::new() })
    }

    /// Asks for one thing.
    pub fn call(&mut self, words: &[&[u8]]) -> Result<Value, String> {
        self.ask(words);
        self.send();
        self.answer()
    }

    /// Asks for one thing in words, that must succeed.
    pub fn text(&mut self, command: &str) -> Value {
        let words: Vec<&[u8]> = command.split(' ').map(str::as_bytes).collect();
        self.call(&words).expect(command)
    }

    /// Runs a script, which the server need not know yet.
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

    /// Writes a command down, to be sent with others.
    pub fn ask(&mut self, words: &[&[u8]]) {
        self.asked.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
        for word in words {
            self.asked.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            self.asked.extend_from_slice(word);
            self.asked.extend_from_slice(b"\r\n");
        }
    }

    /// Sends what was written down.
    pub fn send(&mut self) {
        self.stream.get_mut().write_all(&self.asked).expect("the server listens");
        self.asked.clear();
    }

    /// The next answer.
    pub fn answer(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("the server answers");
        let line = line.trim_end();
        let (kind, rest) = line.split_at_checked(1).expect("an answer has a kind");
        let number = || rest.parse::<i64>().expect("a number");
        match kind {
            "+" => Ok(Value::Bytes(rest.into())),
            "-" => Err(rest.to_owned()),
            ":" => Ok(Value::Number(number())),
            "$" | "*" if rest == "-1" => Ok(Value::Nothing),
            "$" => {
                let mut bytes = vec![0; usize::try_from(number()).expect("a length") + 2];
                self.stream.read_exact(&mut bytes).expect("the server answers");
                bytes.truncate(bytes.len() - 2);
                Ok(Value::Bytes(bytes))
            }
            "*" => (0..number()).map(|_| self.answer()).collect::<Result<_, _>>().map(Value::List),
            _ => panic!("not RESP: {line}"),
        }
    }

    /// All keys, with when they go: milliseconds since the epoch, -1 for never.
    pub fn keys(&mut self) -> Vec<(Vec<u8>, i64)> {
        let Value::List(names) = self.text("KEYS *") else { panic!("a list of keys") };
        let mut keys = Vec::new();
        for name in names {
            let Value::Bytes(name) = name else { panic!("a key") };
            let Ok(Value::Number(expires)) = self.call(&[b"PEXPIRETIME", &name]) else { panic!("a time") };
            keys.push((name, expires));
        }
        keys
    }
}
