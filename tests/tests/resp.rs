//! The RESP listener with unmodified Redis clients and with abusive ones, on memory, on Redis and on a cluster.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use redis::Value;
use tollkeeper_tests::cases::Random;
use tollkeeper_tests::cluster::Cluster;
use tollkeeper_tests::page::{Page, root};
use tollkeeper_tests::redis::{Server, folder};
use tollkeeper_tests::served::Served;

const POLICY: &str =
    "redis: { deadline: 10s }\nlimits:\n  - { name: per-user, by: user, rate: 5/10m, burst: 5 }\n";

/// The service on memory.
fn on_memory() -> Served {
    served(&[])
}

/// The service on its own Redis server.
fn on_redis() -> (Server, Served) {
    let redis = Server::start();
    let served = served(&["--store", &redis.url()]);
    (redis, served)
}

fn served(args: &[&str]) -> Served {
    let config = folder().join("tollkeeper.yaml");
    fs::write(&config, POLICY).expect("the temporary folder is writable");
    Served::with(&[&["--config", config.to_str().expect("UTF-8")], args].concat())
}

#[test]
fn redis_cli_works_with_arguments_pipe_and_resp3() {
    let server = on_memory();
    let cli = |args: &[&str], input: &str| {
        let mut command = Command::new("redis-cli");
        command.args(["-p", &server.resp.port().to_string()]).args(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("redis-cli starts");
        child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("it reads");
        let output = child.wait_with_output().expect("it ends");
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    };
    assert_eq!(cli(&["ping"], ""), "PONG\n");
    assert_eq!(cli(&["cl.throttle", "alice", "4", "1", "1000"], ""), "0\n5\n4\n-1\n1000\n");
    assert_eq!(cli(&["del", "alice"], ""), "1\n");
    let typed = "CL.THROTTLE bob 1 1 1000\nCL.THROTTLE bob 1 1 1000\nCL.THROTTLE bob 1 1 1000 2\nNONSENSE\n";
    assert_eq!(
        cli(&[], typed),
        "0\n2\n1\n-1\n1000\n0\n2\n0\n-1\n2000\n1\n2\n0\n2000\n2000\nERR unknown command 'NONSENSE'\n\n"
    );
    let json = cli(&["-3", "--json", "TK.CHECK", "user", "alice"], "");
    assert!(
        json.starts_with(r#"{"allowed":true,"binding":"per-user","retry_after":null,"delay":0,"#),
        "{json}"
    );
    let help = cli(&["-3", "--json", "COMMAND", "DOCS", "tk.check"], "");
    assert!(help.starts_with(r#"{"tk.check":{"summary":"#), "{help}");
    // `redis-cli --pipe` counts the replies to the commands it sent.
    let bulk = "*5\r\n$11\r\nCL.THROTTLE\r\n$1\r\nc\r\n$1\r\n9\r\n$1\r\n1\r\n$2\r\n60\r\n".repeat(1_000);
    assert!(cli(&["--pipe"], &bulk).ends_with("errors: 0, replies: 1000\n"));
}

/// With 1,000 connections and pipelines of 100 commands.
#[test]
fn redis_benchmark_is_counted_exactly() {
    let server = on_memory();
    let benchmark = |args: &str| {
        let line =
            format!("ulimit -n \"$(ulimit -Hn)\"; exec redis-benchmark -p {} {args}", server.resp.port());
        let output = Command::new("sh").args(["-c", &line]).output().expect("it starts");
        let stdout = String::from_utf8_lossy(&output.stdout);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && stderr.is_empty(), "{args}: {stdout}{stderr}");
        assert!(stdout.contains("requests per second"), "{stdout}");
    };
    benchmark("-q -t ping -n 1000");
    benchmark("-q -c 1000 -P 100 -n 100000 CL.THROTTLE one 49999 1 6000");
    assert_eq!([server.requests("allowed"), server.requests("refused")], [50_000, 50_000]);
    benchmark("-q -3 -c 20 -P 16 -n 3200 -r 100 CL.THROTTLE key:__rand_int__ 1000000 1 60");
    benchmark("-q -c 20 -P 64 -n 6400 TK.CHECK user carol");
    assert_eq!([server.requests("allowed"), server.requests("refused")], [53_205, 56_395]);
    assert_eq!(server.requests("error"), 0);
}

#[test]
fn redis_py_works_unchanged_on_memory() {
    redis_py(&on_memory());
}

#[test]
fn redis_py_works_unchanged_on_redis() {
    let (_redis, server) = on_redis();
    redis_py(&server);
}

fn redis_py(server: &Served) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("clients/redis_py.py");
    let output = run(Command::new(python()).arg(script).arg(server.resp.port().to_string()));
    assert_eq!(output, "ok\n");
}

#[test]
fn ioredis_works_unchanged() {
    let folder = node();
    let (_redis, on_redis) = on_redis();
    for server in [&on_memory(), &on_redis] {
        let script = folder.join("ioredis.mjs");
        fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("clients/ioredis.mjs"), &script).unwrap();
        let output = run(Command::new("node").arg(&script).arg(server.resp.port().to_string()));
        assert_eq!(output, "ok\n");
    }
}

#[test]
fn programs_of_the_resp_page_run_as_shown() {
    let text = fs::read_to_string(root().join("docs/resp.md")).expect("the page");
    let page = Page::parse("docs/resp.md", &text).unwrap_or_else(|mistake| panic!("{mistake}"));
    for (file, mut command) in
        [("throttle.py", Command::new(python())), ("throttle.mjs", Command::new("node"))]
    {
        let server = on_memory();
        let program = node().join(file);
        fs::write(&program, &page.file(file).text).unwrap();
        command.arg(&program).env("TOLLKEEPER_RESP_URL", format!("redis://{}", server.resp));
        assert_eq!(run(&mut command), "served\nserved\nserved\nretry in 20 s\n", "{file}");
    }
    let server = on_memory();
    let program = include_str!("../src/bin/throttle-rs.rs");
    assert_eq!(page.file("throttle.rs").text, program, "the page shows the program that runs here");
    let mut command = Command::new(env!("CARGO_BIN_EXE_throttle-rs"));
    command.env("TOLLKEEPER_RESP_URL", format!("redis://{}", server.resp));
    assert_eq!(run(&mut command), "served\nserved\nserved\nretry in 20 s\n");
}

#[test]
fn redis_crate_gets_the_table_rows_in_resp2_and_resp3() {
    const ROWS: &str =
        include_str!("../../crates/tollkeeper-core/src/algorithm/vectors/meter-1-per-1s-burst-5.tsv");
    let (_redis, on_redis) = on_redis();
    for server in [&on_memory(), &on_redis] {
        for version in ["resp2", "resp3"] {
            let url = format!("redis://{}/?protocol={version}", server.resp);
            let mut connection = redis::Client::open(url).unwrap().get_connection().unwrap();
            let (mut pipeline, mut expected) = (redis::pipe(), Vec::new());
            for row in ROWS.lines().filter(|line| line.starts_with("0\t")) {
                let fields: Vec<&str> = row.split('\t').collect();
                let number = |text: &str| text.parse::<i64>().unwrap_or(-1);
                let [cost, remaining, reset, retry] = [1, 3, 4, 5].map(|at| number(fields[at]));
                pipeline.cmd("CL.THROTTLE").arg(version).arg(4).arg(1).arg(1_000).arg(cost);
                expected.push([i64::from(fields[2] == "deny"), 5, remaining, retry, reset]);
            }
            assert_eq!(expected.len(), 7);
            let answers: Vec<[i64; 5]> = pipeline.query(&mut connection).unwrap();
            assert_eq!(answers, expected);
        }
    }
}

#[test]
fn pipeline_is_batched_and_answered_in_order() {
    let (redis, server) = on_redis();
    let mut connection = connect(&server);
    let mut pipeline = redis::pipe();
    for index in 0..600 {
        match index % 3 {
            0 => pipeline.cmd("CL.THROTTLE").arg("one").arg(99).arg(1).arg(6_000),
            1 => pipeline.cmd("TK.CHECK").arg("user").arg("alice"),
            _ => pipeline.cmd("ECHO").arg(index),
        };
    }
    let answers: Vec<Value> = pipeline.query(&mut connection).unwrap();
    for (index, answer) in answers.iter().enumerate() {
        let passed = match (index % 3, answer) {
            (0, Value::Array(numbers)) => {
                let remaining = i64::try_from(99usize.saturating_sub(index / 3)).unwrap();
                assert_eq!(numbers[2], Value::Int(remaining), "{index}");
                numbers[0] == Value::Int(0)
            }
            (1, Value::Array(fields)) => fields[1] == Value::Int(1),
            (2, Value::BulkString(text)) => {
                assert_eq!(*text, index.to_string().into_bytes());
                continue;
            }
            _ => panic!("{index}: {answer:?}"),
        };
        assert_eq!(passed, index / 3 < if index % 3 == 0 { 100 } else { 5 }, "{index}");
    }
    // Without other commands in between, up to 64 checks share one script call; on a busy machine they arrive in pieces.
    let before = calls(&redis);
    let mut pipeline = redis::pipe();
    (0..1_000).for_each(|_| {
        pipeline.cmd("CL.THROTTLE").arg("two").arg(499).arg(1).arg(6_000);
    });
    let answers: Vec<[i64; 5]> = pipeline.query(&mut connection).unwrap();
    let remaining: Vec<i64> = answers.iter().map(|answer| answer[2]).collect();
    let expected: Vec<i64> = (0..1_000).map(|index| (499 - index).max(0)).collect();
    assert_eq!(remaining, expected);
    assert_eq!(answers.iter().filter(|answer| answer[0] == 0).count(), 500);
    let made = calls(&redis) - before;
    assert!(made <= 100, "{made} calls for 1,000 checks");
    let keys = redis.connect().keys();
    let named = |name: &str| keys.iter().any(|(key, expires)| key == name.as_bytes() && *expires > 0);
    assert!(named("tk:1:CL.THROTTLE:b6000s:two") || named("tk:1:CL.THROTTLE:b100m:two"), "{keys:?}");
}

#[test]
fn cluster_keys_of_all_slots_are_counted_and_deleted() {
    let cluster = Cluster::start();
    let server = served(&["--store", &cluster.url()]);
    let keys = keys_of_all_slots(&cluster);
    let throttle = |key: &String| {
        let mut command = redis::cmd("CL.THROTTLE");
        command.arg(key).arg(1).arg(1).arg(3_600);
        command
    };
    // Each of four clients checks every key, and each key admits two.
    assert_eq!(all_but(2, &admitted_to_four(&server, &keys, throttle)), []);
    assert!(!keys_in_slots(&cluster).contains(&0), "every slot holds a key");

    let users: Vec<String> = (0..400).map(|number| format!("user {number}")).collect();
    let asked: Vec<&String> = users.iter().chain(&users).collect();
    let check = |user: &&String| {
        let mut command = redis::cmd("TK.CHECK");
        command.arg("user").arg(*user);
        command
    };
    let passed = admitted_to_four(&server, &asked, check);
    let of_both_rounds: Vec<u32> = (0..users.len()).map(|at| passed[at] + passed[at + users.len()]).collect();
    assert_eq!(all_but(5, &of_both_rounds), [], "five of eight requests each");

    let (gone, kept) = keys.split_at(512);
    let mut connection = connect(&server);
    let mut forget = || -> Vec<usize> {
        let mut forget = redis::pipe();
        gone.chunks(64).for_each(|keys| _ = forget.cmd("DEL").arg(keys));
        forget.query(&mut connection).unwrap()
    };
    assert_eq!((forget(), forget()), (vec![64; 8], vec![0; 8]));
    assert_eq!(all_but(2, &admitted_to_four(&server, gone, throttle)), [], "deleted keys start anew");
    assert_eq!(
        all_but(0, &admitted_to_four(&server, &kept[..512], throttle)),
        [],
        "the other keys are unchanged"
    );
    assert_eq!([server.requests("degraded"), server.requests("error")], [0, 0]);
}

/// Index and value of each number that differs from `expected`.
fn all_but(expected: u32, numbers: &[u32]) -> Vec<(usize, u32)> {
    numbers.iter().copied().enumerate().filter(|(_, number)| *number != expected).collect()
}

/// Number of hash slots of a Redis cluster.
const SLOTS: usize = 16_384;

/// For each slot a `CL.THROTTLE` key (with a period of an hour) that hashes to it, found with `CLUSTER KEYSLOT`.
fn keys_of_all_slots(cluster: &Cluster) -> Vec<String> {
    let mut connection = connect_to(&format!("redis://127.0.0.1:{}", cluster.servers[0].port()));
    let mut keys = vec![String::new(); SLOTS];
    for thousand in 0.. {
        let names: Vec<String> =
            (0..1_000).map(|number| format!("key-{}", thousand * 1_000 + number)).collect();
        let mut ask = redis::pipe();
        for name in &names {
            ask.cmd("CLUSTER").arg("KEYSLOT").arg(format!("tk:1:CL.THROTTLE:b1h:{name}"));
        }
        let slots: Vec<usize> = ask.query(&mut connection).expect("slots");
        slots.into_iter().zip(names).for_each(|(slot, name)| keys[slot] = name);
        if keys.iter().all(|key| !key.is_empty()) {
            break;
        }
    }
    keys
}

/// How many keys each slot holds, over all primaries.
fn keys_in_slots(cluster: &Cluster) -> Vec<u32> {
    let mut counts = vec![0; SLOTS];
    for server in &cluster.servers[..3] {
        let mut ask = redis::pipe();
        (0..SLOTS).for_each(|slot| _ = ask.cmd("CLUSTER").arg("COUNTKEYSINSLOT").arg(slot));
        let there: Vec<u32> =
            ask.query(&mut connect_to(&format!("redis://127.0.0.1:{}", server.port()))).expect("numbers");
        counts.iter_mut().zip(there).for_each(|(count, there)| *count += there);
    }
    counts
}

/// How often each item was admitted when four clients check all of them at the same time.
fn admitted_to_four<T: Sync>(
    server: &Served,
    asked: &[T],
    command: impl Fn(&T) -> redis::Cmd + Sync,
) -> Vec<u32> {
    let ask_all = || -> Vec<u32> {
        let mut connection = connect(server);
        let answers = asked.chunks(1_000).flat_map(|some| {
            let mut pipeline = redis::pipe();
            some.iter().for_each(|one| _ = pipeline.add_command(command(one)));
            pipeline.query::<Vec<Value>>(&mut connection).expect("answers")
        });
        let passed = |answer| match answer {
            // `CL.THROTTLE` replies 0 first when admitted, `TK.CHECK` has `allowed` as 1.
            Value::Array(numbers) if numbers.len() == 5 => u32::from(numbers[0] == Value::Int(0)),
            Value::Array(fields) => u32::from(fields[1] == Value::Int(1)),
            other => panic!("{other:?}"),
        };
        answers.map(passed).collect()
    };
    std::thread::scope(|scope| {
        let clients = [(); 4].map(|()| scope.spawn(ask_all));
        let mut admitted = vec![0; asked.len()];
        for client in clients {
            let passed = client.join().expect("the client does not panic");
            admitted.iter_mut().zip(passed).for_each(|(sum, passed)| *sum += passed);
        }
        admitted
    })
}

/// How many scripts a Redis server has run.
fn calls(redis: &Server) -> u64 {
    let tollkeeper::store::redis::wire::Value::Bytes(stats) = redis.connect().text("INFO commandstats")
    else {
        panic!("text")
    };
    let stats = String::from_utf8(stats).expect("text");
    let of = |name: &str| -> u64 {
        let line = stats.lines().find(|line| line.starts_with(&format!("cmdstat_{name}:")));
        line.map_or(0, |line| {
            line.split(['=', ',']).nth(1).and_then(|calls| calls.parse().ok()).expect("calls")
        })
    };
    of("evalsha") + of("eval")
}

#[test]
fn ad_hoc_limits_use_the_failure_policy_of_the_file() {
    for (policy, allowed) in [("local", 3), ("allow", 10), ("deny", 0)] {
        let config = folder().join("tollkeeper.yaml");
        let text = format!("on_store_failure: {policy}\nlimits: []\n");
        fs::write(&config, text).unwrap();
        // Nothing listens on this socket.
        let store = format!("redis+unix://{}", folder().join("socket").display());
        let server = Served::with(&["--config", config.to_str().unwrap(), "--store", &store]);
        let mut pipeline = redis::pipe();
        (0..10).for_each(|_| {
            pipeline.cmd("CL.THROTTLE").arg("one").arg(2).arg(1).arg(6_000);
        });
        let answers: Vec<[i64; 5]> = pipeline.query(&mut connect(&server)).unwrap();
        assert_eq!(answers.iter().filter(|answer| answer[0] == 0).count(), allowed, "{policy}");
        assert_eq!(server.requests("degraded"), 10);
    }
}

#[test]
fn random_bytes_never_crash_or_grow_the_server() {
    let server = on_memory();
    let mut random = Noise(Random::new(7));
    let storm = |random: &mut Noise| {
        for _ in 0..300 {
            let mut stream = TcpStream::connect(server.resp).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            let bytes = random.bytes();
            // The server may close the connection before it has read everything.
            let _ = stream.write_all(&bytes);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        }
    };
    storm(&mut random);
    let before = server.memory();
    (0..3).for_each(|_| storm(&mut random));
    // Many connections that announce more than they send.
    let announced: Vec<TcpStream> = (0..400)
        .map(|_| {
            let mut stream = TcpStream::connect(server.resp).unwrap();
            stream.write_all(b"*1024\r\n$65536\r\n").unwrap();
            stream
        })
        .collect();
    let pong: String = redis::cmd("PING").query(&mut connect(&server)).unwrap();
    assert_eq!(pong, "PONG");
    let grown = server.memory().saturating_sub(before);
    assert!(grown < 32 << 10, "{grown} KiB more for {} connections", announced.len());
}

/// Random bytes mixed with pieces of commands, the same in every run.
struct Noise(Random);

impl Noise {
    fn bytes(&mut self) -> Vec<u8> {
        const PIECES: [&[u8]; 16] = [
            b"*5\r\n",
            b"$11\r\nCL.THROTTLE\r\n",
            b"$1\r\n5\r\n",
            b"$3\r\n600\r\n",
            b"*-1\r\n",
            b"$-1\r\n",
            b"$70000\r\n",
            b"CL.THROTTLE a 1 1 60\r\n",
            b"TK.CHECK user \"\\x00\"\r\n",
            b"COMMAND DOCS\r\n",
            b"HELLO 3\r\n",
            b"\r\n",
            b"*1024\r\n",
            b"\0\xff",
            b"*2\r\n$8\r\nTK.CHECK\r\n$3\r\na",
            b"\"",
        ];
        let mut bytes = Vec::new();
        for _ in 0..self.0.below(200) {
            match self.0.below(8) {
                0 => bytes.extend(
                    (0..self.0.below(2_000))
                        .map(|_| u8::try_from(self.0.below(256)).expect("a byte"))
                        .collect::<Vec<u8>>(),
                ),
                _ => bytes.extend_from_slice(PIECES[self.0.below(PIECES.len())]),
            }
        }
        bytes
    }
}

fn connect(server: &Served) -> redis::Connection {
    connect_to(&format!("redis://{}", server.resp))
}

fn connect_to(url: &str) -> redis::Connection {
    redis::Client::open(url).expect("a URL").get_connection().expect("it listens")
}

/// Python with redis-py, installed once into `target/languages`.
fn python() -> PathBuf {
    static ONCE: Mutex<()> = Mutex::new(());
    let _once = ONCE.lock().unwrap_or_else(PoisonError::into_inner);
    let venv = target("redis-py");
    let python = venv.join("bin/python");
    if !venv.join("done").exists() {
        run(Command::new("python3").args(["-m", "venv"]).arg(&venv));
        run(Command::new(venv.join("bin/pip")).args(["install", "--quiet", "redis==8.1.0"]));
        fs::write(venv.join("done"), "").expect("`target` is writable");
    }
    python
}

/// A folder with ioredis, installed once into `target/languages`.
fn node() -> PathBuf {
    static ONCE: Mutex<()> = Mutex::new(());
    let _once = ONCE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = target("ioredis");
    if !folder.join("node_modules/ioredis").exists() {
        let ioredis =
            ["install", "--no-save", "--no-audit", "--no-fund", "--ignore-scripts", "ioredis@6.0.0"];
        run(Command::new("npm").args(ioredis).current_dir(&folder));
    }
    folder
}

fn target(name: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("target");
    let folder = target.join("languages").join(name);
    fs::create_dir_all(&folder).expect("`target` is writable");
    folder
}

fn run(command: &mut Command) -> String {
    let output = command.output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", command.get_program().display()));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {stderr}");
    String::from_utf8(output.stdout).expect("text")
}
