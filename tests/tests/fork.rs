//! A process that opens a limiter and then forks, as preforking servers do.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tollkeeper_tests::redis::{Server, folder};

/// An `LD_PRELOAD` library that forks when the program calls `getppid`.
const SHIM: &str = "#include <unistd.h>\npid_t getppid(void) { return fork(); }\n";

fn shim(folder: &Path) -> PathBuf {
    let (source, library) = (folder.join("fork.c"), folder.join("fork.so"));
    std::fs::write(&source, SHIM).expect("the temporary folder is writable");
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
    assert!(compiled.expect("`cc` is installed").success());
    library
}

/// Parent and child share one count, and each slot gets its own number.
#[test]
fn forked_process_shares_the_count_with_its_parent() {
    let folder = folder();
    let shim = shim(&folder);
    for opened in ["outside", "current", "multi"] {
        let server = Server::start();
        server.connect();
        let mut node = Command::new(env!("CARGO_BIN_EXE_fork-node"));
        node.args([&server.url(), opened]).env("LD_PRELOAD", &shim);
        // The output ends when both processes have exited.
        let output = node.output().expect("it starts");
        let error = String::from_utf8_lossy(&output.stderr);
        let stdout = String::from_utf8(output.stdout).expect("text");
        let mut lines: Vec<Vec<&str>> = stdout.lines().map(|line| line.split(' ').collect()).collect();
        lines.sort();
        let [child, parent] = &lines[..] else { panic!("{opened}: {stdout}{error}") };
        assert_eq!((child[0], parent[0]), ("child", "parent"), "{opened}: {error}");
        let counts: usize =
            [child[1], parent[1]].iter().map(|count| count.parse::<usize>().expect("a number")).sum();
        // Ten requests were admitted before the fork, and each process acquired a slot.
        assert_eq!(counts, 100 - 10 - 2, "{opened}: {stdout}{error}");
        assert_ne!(child[2], parent[2], "{opened}: two slots have the same number");
    }
    let _ = std::fs::remove_dir_all(folder);
}

/// The snapshot belongs to the process that opened the store: the child's older copy would undo later charges.
#[test]
fn forked_process_does_not_save_the_snapshot() {
    let folder = folder();
    let (shim, snapshot) = (shim(&folder), folder.join("state"));
    let mut node = Command::new(env!("CARGO_BIN_EXE_fork-node"));
    node.arg(&snapshot).arg("snapshot").env("LD_PRELOAD", &shim);
    let mut node = node.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut lines = BufReader::new(node.stdout.take().expect("piped")).lines();
    let mut next = || lines.next().expect("one line of each").expect("text");
    assert_eq!(next(), "child false");
    node.stdin.take().expect("piped").write_all(b"\n").expect("it waits for a line");
    assert_eq!(next(), "parent true");
    assert!(node.wait().expect("it ends").success());
    let _ = std::fs::remove_dir_all(folder);
}

/// On Redis both processes share one count. In memory the child goes on from its copy, and is warned of it once.
#[test]
fn forked_engine_goes_on_and_leaves_slots_alone() {
    let folder = folder();
    let shim = shim(&folder);
    let server = Server::start();
    server.connect();
    for (store, counts) in [
        (server.url(), [["child", "90", "0"], ["parent", "0", "0"]]),
        ("memory://".to_owned(), [["child", "90", "1"], ["parent", "90", "0"]]),
    ] {
        let config = folder.join("tollkeeper.yaml");
        let limits = "limits:\n  - { name: per-user, by: user, rate: 100/hour, burst: 100 }\n  \
                      - { name: exports, by: ip, algorithm: concurrency, limit: 1, ttl: 1h }\n";
        std::fs::write(&config, format!("store: {store}\nredis: {{ deadline: 1m }}\n{limits}"))
            .expect("writable");
        let mut node = Command::new(env!("CARGO_BIN_EXE_fork-node"));
        node.arg(&config).arg("engine").env("LD_PRELOAD", &shim);
        let mut node = node.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut lines = BufReader::new(node.stdout.take().expect("piped")).lines();
        let mut next = || lines.next().expect("one line of each").expect("text");
        assert_eq!(next().split(' ').collect::<Vec<_>>(), counts[0], "{store}");
        node.stdin.take().expect("piped").write_all(b"\n").expect("it waits for a line");
        assert_eq!(next().split(' ').collect::<Vec<_>>(), counts[1], "{store}");
        assert!(node.wait().expect("it ends").success());
    }
    let _ = std::fs::remove_dir_all(folder);
}
