//! Thousands of abusive clients at once: their memory is bounded, and all other clients are served.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::fs;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;

use support::*;
use tollkeeper::store::redis::wire::Value;
use tollkeeper_server::control::rlimit;
use tollkeeper_tests::cases::Random;
use tollkeeper_tests::redis;

const LIMITS: &str = "limits: [{ name: per-user, by: user, rate: 1000000/day }]\n";

/// The resident memory of the process, in KiB.
fn memory(server: &Server) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Runs `attack` while well-behaved clients send requests on keep-alive and on new connections. All of these must be
/// answered.
fn while_others_are_served<T>(server: &Server, attack: impl FnOnce() -> T) -> T {
    /// Stops the clients on drop, so that they also end if the test fails.
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }
    let (stop, served) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let _stop = Stop(&stop);
        for name in ["alice", "bob"] {
            let (stop, served) = (&stop, &served);
            scope.spawn(move || {
                let body = format!(r#"{{"facts":{{"user":"{name}"}}}}"#);
                let mut kept = server.client();
                while !stop.load(Relaxed) {
                    assert_eq!(kept.request("POST", "/v1/check", &body).status, 200);
                    assert_eq!(server.post("/v1/check", &body).status, 200);
                    served.fetch_add(1, Relaxed);
                }
            });
        }
        let done = attack();
        let before = served.load(Relaxed);
        eventually("well-behaved clients are still served", || served.load(Relaxed) > before + 10);
        done
    })
}

/// Opens this many connections and calls `open` on each.
fn connections(server: &Server, count: usize, open: impl Fn(&mut TcpStream)) -> Vec<TcpStream> {
    let connect = |_| {
        let mut stream = TcpStream::connect(server.address).expect("the server listens");
        open(&mut stream);
        stream
    };
    (0..count).map(connect).collect()
}

const CHECK: &str = "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 26\r\n\r\n{\"facts\":{\"user\":\"mallo\"}}";

#[test]
fn ten_thousand_idle_connections_take_little_memory() {
    const COUNT: usize = 10_000;
    // Each connection takes a file descriptor on both sides.
    rlimit::raise();
    assert!(
        rlimit::connections(0) > COUNT,
        "`ulimit -Hn` is too low for this test: it needs {}",
        COUNT + 256
    );
    let folder = Folder::new();
    let server = Server::with_config(&folder, LIMITS);
    server.check(r#"{"user":"alice"}"#);
    let before = memory(&server);
    let silent = while_others_are_served(&server, || connections(&server, COUNT / 2, |_| ()));
    let of_silent = memory(&server) - before;
    let between = memory(&server);
    let idle = while_others_are_served(&server, || {
        connections(&server, COUNT / 2, |stream| {
            stream.write_all(CHECK.as_bytes()).unwrap();
            let read = stream.read(&mut [0; 1024]).unwrap();
            assert!(read > 0);
        })
    });
    let of_idle = memory(&server) - between;
    let each = |kib: u64| kib as f64 / (COUNT / 2) as f64;
    println!(
        "{COUNT} idle connections: {:.1} KiB each without a request, {:.1} KiB each after a check",
        each(of_silent),
        each(of_idle)
    );
    assert!(each(of_silent) < 24.0 && each(of_idle) < 24.0);
    drop((silent, idle));
    let open = || fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().count();
    eventually("the server has closed all of them", || open() < 100);
    let _again = connections(&server, COUNT / 2, |_| ());
    eventually("half of them are open again", || open() > COUNT / 2);
    let kib = memory(&server) - before;
    assert!(kib < 24 * COUNT as u64, "memory of closed connections is reused, at least in part: {kib} KiB");
}

#[test]
fn closed_connections_leak_nothing() {
    const COUNT: usize = 1_000;
    const ROUNDS: usize = 6;
    rlimit::raise();
    let folder = Folder::new();
    let file = folder.write("tollkeeper.yaml", LIMITS);
    let hello = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &[0, 0, 0, 4, 0, 0, 0, 0, 0]].concat();
    let kinds: [(&str, &[u8]); 3] =
        [("http", CHECK.as_bytes()), ("grpc", &hello), ("resp", b"CL.THROTTLE mallory 1 1 60\r\n")];
    for (name, request) in kinds {
        let mut command = tollkeeper();
        // Use one malloc arena: with one for each thread, freed memory would stay in the arenas and hide a leak.
        command.env("MALLOC_ARENA_MAX", "1").args(["serve", "--http", "127.0.0.1:0", "--config"]).arg(&file);
        command.args(["--grpc", "127.0.0.1:0", "--resp", "127.0.0.1:0"]);
        let server = Server::launch(&mut command);
        let address = server.listens(name);
        let open = || fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().count();
        let mut after = Vec::new();
        for _ in 0..3 * ROUNDS {
            let connect = |_| {
                let mut stream = TcpStream::connect(address).expect("the server listens");
                stream.write_all(request).unwrap();
                assert!(stream.read(&mut [0; 1024]).unwrap() > 0);
                stream
            };
            let all: Vec<TcpStream> = (0..COUNT).map(connect).collect();
            drop(all);
            eventually("the server has closed all of them", || open() < 100);
            after.push(memory(&server));
        }
        println!("{name}: after each thousand connections {after:?} KiB");
        let most = |rounds: &[u64]| *rounds.iter().max().unwrap();
        // The first rounds warm up the heap. After that, a leak of half a KiB per connection in six thousand connections
        // exceeds the bound.
        let (before, last) = after[ROUNDS..].split_at(ROUNDS);
        assert!(most(last) < most(before) + 3 * 1_024, "{name}: {after:?} KiB");
    }
}

/// A server that may open at most 160 files.
fn with_few_files(folder: &Folder) -> Server {
    let snapshot = folder.path().join("state");
    let config = format!("{LIMITS}memory: {{ snapshot: {}, snapshot_every: 100ms }}\n", snapshot.display());
    let file = folder.write("tollkeeper.yaml", &config);
    let mut command = Command::new("bash");
    command.args(["-c", "ulimit -n 160 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_tollkeeper")]);
    command.args(["serve", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--resp", "127.0.0.1:0"]);
    command.arg("--config").arg(file);
    Server::launch(&mut command)
}

#[test]
fn idle_connections_leave_files_for_all_other_work() {
    let folder = Folder::new();
    let server = with_few_files(&folder);
    let hello = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &[0, 0, 0, 4, 0, 0, 0, 0, 0]].concat();
    let requests: [(&str, &[u8]); 3] =
        [("http", CHECK.as_bytes()), ("grpc", &hello), ("resp", b"CL.THROTTLE mallory 1 1 60\r\n")];
    let answers = |name: &str, request: &[u8]| {
        let mut stream = TcpStream::connect(server.listens(name)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(request).is_ok() && stream.read(&mut [0; 1024]).is_ok_and(|count| count > 0)
    };
    // A connection in constant use, which is never evicted.
    let mut kept = server.client();
    let metric = |kept: &mut Client, name: &str| {
        let page = kept.request("GET", "/metrics", "");
        let value = page.text().lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap().parse::<f64>().unwrap()
    };
    let fill = |kept: &mut Client, name: &str| {
        let refused = format!("tollkeeper_connections_refused_total{{transport=\"{name}\"}}");
        let before = metric(kept, &refused);
        let address = server.listens(name);
        let mut silent: Vec<TcpStream> = Vec::new();
        eventually("the listener refuses a connection", || {
            silent.extend((0..32).map(|_| TcpStream::connect(address).expect("the server listens")));
            metric(kept, &refused) > before
        });
        silent
    };
    let saves_and_reloads = |kept: &mut Client| {
        let open = fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().count();
        assert!(open <= 160 - 32, "{open} files are open, of 160");
        let snapshot = folder.path().join("state");
        let _ = fs::remove_file(&snapshot);
        eventually("a snapshot is saved", || {
            // Unchanged state is not saved.
            assert_eq!(kept.request("POST", "/v1/check", r#"{"facts":{"user":"alice"}}"#).status, 200);
            snapshot.exists()
        });
        let version = metric(kept, "tollkeeper_config_version");
        let config = folder.path().join("tollkeeper.yaml");
        let more = format!("limits: [{{ name: more-{version}, rate: 1000000/day }}, ");
        let text = fs::read_to_string(&config).unwrap().replace("limits: [", &more);
        fs::write(&config, text).unwrap();
        eventually("the config is loaded", || metric(kept, "tollkeeper_config_version") > version);
    };
    for (full, request) in requests {
        let silent = fill(&mut kept, full);
        let mut others = requests.iter().filter(|(name, _)| *name != full);
        assert!(
            others.all(|(name, request)| answers(name, request)),
            "the other listeners answer while {full} is full"
        );
        saves_and_reloads(&mut kept);
        // Connections that were idle for a second are evicted in favour of a new one.
        eventually("a new connection is served", || answers(full, request));
        let evicted = format!("tollkeeper_connections_evicted_total{{transport=\"{full}\"}}");
        assert!(metric(&mut kept, &evicted) > 0.0);
        drop(silent);
    }
    let _silent = requests.map(|(full, _)| fill(&mut kept, full));
    saves_and_reloads(&mut kept);
    assert!(!server.log().contains("Too many open files"), "{}", server.log());
    server.logs("cannot accept a resp connection: all allowed connections are in use");
}

/// If the store starts while every listener is full, file descriptors are left for all of its connections.
#[test]
fn full_listeners_leave_files_for_the_store() {
    let (folder, mut redis) = (Folder::new(), redis::Server::start());
    redis.kill();
    let config = format!("{LIMITS}redis: {{ connections: 64, deadline: 5s }}\n");
    let file = folder.write("tollkeeper.yaml", &config);
    let mut command = Command::new("bash");
    command.args(["-c", "ulimit -n 512 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_tollkeeper")]);
    command.args(["serve", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--resp", "127.0.0.1:0"]);
    let server = Server::launch(command.args(["--store", &redis.url(), "--config"]).arg(file));
    let mut kept = server.client();
    let decides = |kept: &mut Client| {
        let answer = kept.request("POST", "/v1/check", r#"{"facts":{"user":"alice"}}"#);
        answer.json()["degraded"].is_null()
    };
    assert!(!decides(&mut kept), "the store is not running yet");
    let refused = |kept: &mut Client, name: &str| {
        let line = format!("tollkeeper_connections_refused_total{{transport=\"{name}\"}} 0");
        !kept.request("GET", "/metrics", "").text().contains(&line)
    };
    let mut silent: Vec<TcpStream> = Vec::new();
    for name in ["grpc", "resp", "http"] {
        let address = server.listens(name);
        eventually("the listener is full", || {
            silent.extend((0..32).map(|_| TcpStream::connect(address).expect("the server listens")));
            refused(&mut kept, name)
        });
    }
    redis.restart();
    eventually("the store decides", || decides(&mut kept));
    let connected = || {
        let clients = redis.connect().text("CLIENT LIST");
        let Value::Bytes(clients) = clients else { panic!("{clients:?}") };
        clients.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).count()
    };
    eventually("all connections to the store are open", || connected() > 64);
    assert!(!server.log().contains("Too many open files"), "{}", server.log());
}

#[test]
fn backlog_holds_a_thousand_simultaneous_connects() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, LIMITS);
    // A stopped server accepts no connection until SIGCONT.
    server.signal("STOP");
    let system = fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
    let count = system.trim().parse().map_or(1_000, |most: usize| most.min(1_000));
    let connect = |_| TcpStream::connect_timeout(&server.address, PATIENCE).expect("the backlog has room");
    let mut waiting: Vec<TcpStream> = (0..count).map(connect).collect();
    server.signal("CONT");
    for stream in &mut waiting {
        stream.write_all(CHECK.as_bytes()).unwrap();
        assert!(stream.read(&mut [0; 1024]).unwrap() > 0);
    }
}

#[test]
fn slow_and_flooding_clients_do_not_starve_others() {
    const COUNT: usize = 200;
    let folder = Folder::new();
    let server = Server::with_config(&folder, LIMITS);
    server.check(r#"{"user":"alice"}"#);
    type Attack<'a> = (&'a str, &'a dyn Fn(&mut TcpStream));
    let kinds: [Attack<'_>; 7] = [
        ("request heads that never end", &|stream| {
            stream.write_all(b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\nx-slow: ").unwrap();
        }),
        ("unfinished request heads of nearly the largest allowed size", &|stream| {
            let _ =
                stream.write_all(format!("GET /healthz HTTP/1.1\r\nx: {}", "y".repeat(15 << 10)).as_bytes());
        }),
        ("request bodies that never end", &|stream| {
            stream
                .write_all(b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 60000\r\n\r\n{")
                .unwrap();
        }),
        ("clients that close their sending side inside a request head", &|stream| {
            stream.write_all(b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-le").unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
        }),
        ("pipelined requests for large responses that are never read", &|stream| {
            let many = "GET /v1/limits HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(500);
            stream.set_nonblocking(true).unwrap();
            let _ = stream.write(many.as_bytes());
        }),
        ("pipelined checks whose responses are never read", &|stream| {
            stream.set_nonblocking(true).unwrap();
            let _ = stream.write(CHECK.repeat(200).as_bytes());
        }),
        ("requests with a thousand headers", &|stream| {
            let many: String = (0..1_000).map(|number| format!("x-{number}: 1\r\n")).collect();
            let _ = stream.write_all(format!("GET /healthz HTTP/1.1\r\n{many}\r\n").as_bytes());
        }),
    ];
    for (attack, open) in kinds {
        let before = memory(&server);
        let open = while_others_are_served(&server, || connections(&server, COUNT, open));
        let each = memory(&server).saturating_sub(before) as f64 / COUNT as f64;
        println!("{COUNT} {attack}: {each:.1} KiB each");
        assert!(each < 96.0, "{attack}: {each:.1} KiB");
        drop(open);
    }
}

/// Random bytes mixed with pieces of requests, the same in every run.
struct Noise(Random);

impl Noise {
    fn noise(&mut self, most: usize) -> Vec<u8> {
        let count = self.0.below(most);
        (0..count).map(|_| u8::try_from(self.0.below(256)).expect("a byte")).collect()
    }

    fn bytes(&mut self) -> Vec<u8> {
        const PIECES: [&[u8]; 20] = [
            CHECK.as_bytes(),
            b"POST /v1/check HTTP/1.1\r\n",
            b"GET /v1/usage?user=%00&ip=1 HTTP/1.1\r\n",
            b"GET /healthz HTTP/1.0\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
            b"host: localhost\r\n",
            b"content-length: 26\r\n",
            b"content-length: 4294967296\r\n",
            b"transfer-encoding: chunked\r\n",
            b"expect: 100-continue\r\n",
            b"upgrade: websocket\r\nconnection: upgrade\r\n",
            b"\r\n",
            b"\r\n\r\n",
            b"ffffffff\r\n",
            b"0\r\n\r\n",
            b"{\"facts\":{\"user\":\"",
            b"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
            b"\"}}",
            b"\0\xff",
        ];
        if self.0.below(4) == 0 {
            return self.noise(16 << 10);
        }
        let mut bytes = Vec::new();
        for _ in 0..self.0.below(100) {
            match self.0.below(8) {
                0 => bytes.extend(self.noise(2_000)),
                _ => bytes.extend_from_slice(PIECES[self.0.below(PIECES.len())]),
            }
        }
        bytes
    }
}

#[test]
fn random_bytes_do_not_crash_or_leak() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, LIMITS);
    let mut random = Noise(Random::new(7));
    let mut storm = || {
        let mut answers = [0, 0];
        for _ in 0..500 {
            let mut stream = TcpStream::connect(server.address).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            // The server may close before everything was sent.
            let _ = stream.write_all(&random.bytes());
            let _ = stream.shutdown(Shutdown::Write);
            let mut answer = Vec::new();
            match stream.read_to_end(&mut answer) {
                Err(error) => assert_ne!(error.kind(), ErrorKind::WouldBlock, "the connection stays open"),
                Ok(_) => answers[usize::from(answer.starts_with(b"HTTP/1.1 200"))] += 1,
            }
        }
        answers
    };
    let first = storm();
    let before = memory(&server);
    let all = (0..4).map(|_| storm()).fold(first, |all, more| [all[0] + more[0], all[1] + more[1]]);

    assert!(all[1] > 10 && all[0] > 100, "some requests must be valid and most invalid: {all:?}");
    assert!(server.check(r#"{"user":"alice"}"#), "the server still decides");
    assert!(!server.log().contains("panicked"), "{}", server.log());
    let grown = memory(&server).saturating_sub(before);
    println!(
        "{} were answered with 200, {} with an error or not at all; memory grew by {grown} KiB",
        all[1], all[0]
    );
    assert!(grown < 8 << 10, "memory grew by {grown} KiB");
}

#[test]
fn values_are_not_logged_by_default() {
    const SECRET: &str = "xyzzy-4711";
    let folder = Folder::new();
    let server =
        Server::with_config(&folder, "limits: [{ name: per-user, by: user, rate: 1/day, burst: 1 }]\n");
    let facts = format!(r#"{{"facts":{{"user":"{SECRET}"}}}}"#);
    for path in
        ["/v1/check", "/v1/check", "/v1/peek", "/v1/reserve", "/v1/acquire", "/v1/refund", "/v1/settle"]
    {
        server.post(path, &facts);
    }
    server.post("/v1/check", &format!(r#"{{"facts":{{"ip":"{SECRET}"}}}}"#));
    server.post("/v1/refund", &format!(r#"{{"charge":"{SECRET}"}}"#));
    server.get(&format!("/v1/usage?user={SECRET}"));
    server.get(&format!("/{SECRET}"));
    let token = format!("authorization: Bearer {SECRET}");
    server.client().request_with(
        "DELETE",
        &format!("/v1/state?limit=per-user&user={SECRET}"),
        &[&token],
        b"",
    );
    server.client().request_with("PUT", "/v1/limits", &[&token], facts.as_bytes());
    server.client().send(format!("{SECRET}\r\n\r\n").as_bytes());
    assert!(server.get("/metrics").text().lines().all(|line| !line.contains(SECRET)));
    server.signal("TERM");
    let ended = server.ended();
    assert!(ended.log.contains("draining"), "the log is captured: {}", ended.log);
    assert!(!ended.log.contains(SECRET), "{}", ended.log);
}
