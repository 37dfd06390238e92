//! Storage that fails while a server saves to it: every fault is reported, and nothing that was saved is lost.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use support::*;

const EIO: i32 = 5;
const EMFILE: i32 = 24;
const ENOSPC: i32 = 28;
const EROFS: i32 = 30;

/// A preloaded library that makes file calls fail; `faults/faults.c` describes its settings.
fn faults() -> &'static str {
    static LIBRARY: OnceLock<String> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/faults/faults.c");
        let library = format!("{}/faults-{}.so", env!("CARGO_TARGET_TMPDIR"), std::process::id());
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o", &library, source, "-ldl"])
            .output()
            .expect("a C compiler `cc` is installed (Debian: gcc)");
        assert!(built.status.success(), "{}", text(&built.stderr));
        library
    })
}

/// A config, and a folder that holds only its snapshot.
struct Setup {
    folder: Folder,
    config: String,
}

impl Setup {
    fn new(every: &str) -> Setup {
        let folder = Folder::new();
        fs::create_dir(folder.path().join("saved")).unwrap();
        let config = folder.write(
            "tollkeeper.yaml",
            &format!(
                "memory: {{ snapshot: '{}', snapshot_every: {every} }}
limits:
  - {{ name: bucket, by: user, rate: 1/day, burst: 100 }}
  - {{ name: log, by: large, rate: 100000/day, algorithm: sliding-log }}
",
                folder.path().join("saved/state").display()
            ),
        );
        let config = config.to_str().unwrap().to_owned();
        Setup { folder, config }
    }

    fn state(&self) -> PathBuf {
        self.folder.path().join("saved/state")
    }

    fn start(&self) -> Server {
        Server::with(&["--config", &self.config])
    }

    /// Starts a server with the preloaded library and these `FAULT_*` settings.
    fn start_with(&self, settings: &[(&str, &str)]) -> Server {
        let mut command = tollkeeper();
        command.args(["serve", "--http", "127.0.0.1:0", "--config", &self.config]);
        command.env("LD_PRELOAD", faults()).env("FAULT_PATH", self.folder.path().join("saved"));
        Server::launch(command.envs(settings.iter().copied()))
    }
}

/// Units charged to alice: 1 after one check.
fn used(server: &Server) -> u64 {
    let peek = server.post("/v1/peek", r#"{"facts":{"user":"alice"}}"#).json();
    100 - peek["limits"][0]["remaining"].as_u64().unwrap()
}

fn end(server: Server) -> Ended {
    server.signal("TERM");
    server.ended()
}

/// For every file call of a run: a server starts from a good snapshot, that call fails, alice is charged once more, and
/// the server stops.
#[test]
fn a_fault_at_any_call_is_reported_and_loses_nothing() {
    let setup = Setup::new("1h");
    let server = setup.start();
    assert!(server.check(r#"{"user":"alice"}"#));
    // A snapshot that takes more than one write.
    let large = server.post("/v1/check", r#"{"facts":{"large":"one"},"cost":20000}"#);
    assert_eq!(large.status, 200);
    assert_eq!(end(server).code, Some(0));
    let good = fs::read(setup.state()).unwrap();

    let trace = setup.folder.path().join("trace");
    let server = setup.start_with(&[("FAULT_TRACE", trace.to_str().unwrap())]);
    assert!(server.check(r#"{"user":"alice"}"#));
    assert_eq!(end(server).code, Some(0));
    let trace = fs::read_to_string(trace).unwrap();
    let calls: Vec<(&str, &str)> = trace.lines().map(|line| line.split_once(' ').unwrap()).collect();
    let save =
        calls.iter().position(|(_, path)| path.ends_with(".new")).expect("the server saves a snapshot");
    let renamed =
        calls.iter().position(|(call, _)| *call == "rename").expect("the server renames the new snapshot");
    let count_of = |call| calls[save..].iter().filter(|(other, _)| *other == call).count();
    assert_eq!(
        [count_of("open"), count_of("fsync"), count_of("rename")],
        [2, 2, 1],
        "open and fsync of the file and of its folder, one rename: {calls:?}"
    );
    assert!(count_of("write") >= 2, "{calls:?}");

    for (index, (call, path)) in calls.iter().enumerate() {
        let context = format!("call {index}: {call} {path}");
        fs::write(setup.state(), &good).unwrap();
        let errno = if *call == "write" { ENOSPC } else { EIO };
        let settings = [("FAULT_AT", (index + 1).to_string()), ("FAULT_ERRNO", errno.to_string())];
        let server = setup.start_with(&settings.each_ref().map(|(name, value)| (*name, value.as_str())));
        let is_read = index < save && *call == "open" && path.ends_with("/state");
        assert_eq!(used(&server), if is_read { 0 } else { 1 }, "{context}");
        if index < save {
            server.logs(if is_read { "starting empty: " } else { "was not written: " });
            let failures = server.metric("tollkeeper_snapshot_failures_total");
            assert_eq!(failures, if is_read { 0.0 } else { 1.0 }, "{context}");
        }
        assert!(server.check(r#"{"user":"alice"}"#), "{context}");
        let ended = end(server);
        assert_eq!(ended.code, Some(if index < save { 0 } else { 1 }), "{context}: {}", ended.log);
        let cause = if errno == ENOSPC { "No space left" } else { "Input/output error" };
        assert!(ended.log.contains(cause), "{context}: {}", ended.log);
        if index >= save {
            assert!(ended.log.contains("the counters were not saved: snapshot "), "{context}: {}", ended.log);
        }
        if is_read {
            // The unreadable file was set aside intact.
            fs::rename(setup.state().with_extension("refused"), setup.state()).unwrap();
        }
        let server = setup.start();
        let kept = if is_read || (save..=renamed).contains(&index) { 1 } else { 2 };
        assert_eq!(used(&server), kept, "{context}: {}", server.log());
        server.signal("KILL");
        server.ended();
    }
}

#[test]
fn snapshots_that_fail_are_reported_until_they_work() {
    for (call, errno, cause) in [
        ("open", EMFILE, "Too many open files"),
        ("write", ENOSPC, "No space left on device"),
        ("fsync", EIO, "Input/output error"),
        ("rename", EROFS, "Read-only file system"),
    ] {
        let setup = Setup::new("100ms");
        let flag = setup.folder.path().join("flag");
        let server = setup.start_with(&[
            ("FAULT_CALL", call),
            ("FAULT_WHILE", flag.to_str().unwrap()),
            ("FAULT_ERRNO", &errno.to_string()),
        ]);
        let failures = || server.metric("tollkeeper_snapshot_failures_total");
        assert!(server.check(r#"{"user":"alice"}"#));
        snapshot_is_saved(&setup.state());
        assert_eq!((server.get("/readyz").text(), failures()), ("ready\n", 0.0), "{call}");

        fs::write(&flag, "").unwrap();
        eventually("three snapshots fail", || failures() >= 3.0);
        let ready = server.get("/readyz");
        assert_eq!(ready.status, 200, "{call}: the server can still decide");
        assert!(ready.text().starts_with("ready\nthe snapshot was not written: "), "{}", ready.text());
        assert!(ready.text().contains(cause), "{}", ready.text());
        let problem = format!("the snapshot {} was not written: {cause}", setup.state().display());
        server.logs(&problem);

        fs::remove_file(&flag).unwrap();
        server.logs("is written again");
        eventually("a snapshot is saved again", || server.get("/readyz").text() == "ready\n");
        assert_eq!(server.metric("tollkeeper_snapshot_age_seconds"), 0.0, "{call}");
        // All failures within a minute are logged in one line.
        assert_eq!(server.log().matches("was not written").count(), 1, "{}", server.log());

        fs::write(&flag, "").unwrap();
        let ended = end(server);
        assert_eq!(ended.code, Some(1), "{call}: {}", ended.log);
        assert!(ended.log.contains("the counters were not saved: snapshot "), "{}", ended.log);
        assert_eq!(used(&setup.start()), 1, "{call}");
    }
}

#[test]
fn a_full_disk_is_reported_and_loses_nothing() {
    let setup = Setup::new("100ms");
    let disk = setup.folder.path().join("saved");
    // The snapshot folder is a file system of 128 KiB that only this process sees.
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c"]);
    command.args(["mount -t tmpfs -o size=128k tmpfs \"$0\" && exec \"$@\"", disk.to_str().unwrap()]);
    command.args([tollkeeper().get_program().to_str().unwrap(), "serve", "--http", "127.0.0.1:0"]);
    command.args(["--config", &setup.config]).env("TOLLKEEPER_GRPC", "off").env("TOLLKEEPER_RESP", "off");
    let server = Server::launch(&mut command);
    let inside = PathBuf::from(format!("/proc/{}/root{}", server.pid(), disk.display()));
    assert!(server.check(r#"{"user":"alice"}"#));
    let age = || server.metric("tollkeeper_snapshot_age_seconds");
    snapshot_is_saved(&inside.join("state"));
    let filled = fs::write(inside.join("filler"), vec![0; 256 << 10]);
    assert_eq!(filled.unwrap_err().raw_os_error(), Some(ENOSPC));
    server.logs("No space left on device");
    eventually("the last snapshot is a second old", || age() >= 1.0);
    let saved = fs::read(inside.join("state")).unwrap();

    fs::remove_file(inside.join("filler")).unwrap();
    server.logs("is written again");
    fs::write(inside.join("filler"), vec![0; 256 << 10]).unwrap_err();
    let ended = end(server);
    assert_eq!(ended.code, Some(1), "{}", ended.log);
    fs::write(setup.state(), saved).unwrap();
    assert_eq!(used(&setup.start()), 1, "the snapshot on the full disk is intact");
}

#[test]
fn a_second_server_on_one_snapshot_names_the_first() {
    let setup = Setup::new("1h");
    let first = setup.start();
    assert!(first.check(r#"{"user":"alice"}"#));
    let second = run(&["serve", "--http", "127.0.0.1:0", "--config", &setup.config]);
    assert_eq!(second.status.code(), Some(2));
    let stderr = text(&second.stderr);
    let expected = format!("snapshot {}: process {} saves to it", setup.state().display(), first.pid());
    assert!(stderr.contains(&expected), "{stderr}");
    // A killed process holds no lock.
    assert_eq!(end(first).code, Some(0));
    let third = setup.start();
    third.signal("KILL");
    third.ended();
    assert_eq!(used(&setup.start()), 1);
}

/// The lock file may be deleted while a server runs, for example by a cleanup job.
#[test]
fn a_removed_lock_file_is_locked_again() {
    let setup = Setup::new("100ms");
    let lock = setup.state().with_extension("lock");
    let first = setup.start();
    fs::remove_file(&lock).unwrap();
    eventually("the lock file is back", || lock.exists());
    let second = run(&["serve", "--http", "127.0.0.1:0", "--config", &setup.config]);
    assert_eq!(second.status.code(), Some(2), "{}", text(&second.stderr));
    assert_eq!(end(first).code, Some(0));
}

/// A process that takes the lock first owns the snapshot, even if another one held it before.
#[test]
fn a_lost_lock_stops_saving_and_is_reported() {
    let setup = Setup::new("1h");
    let first = setup.start();
    fs::remove_file(setup.state().with_extension("lock")).unwrap();
    let second = setup.start();
    let ended = end(first);
    assert_eq!(ended.code, Some(1), "{}", ended.log);
    let expected = format!("process {} saves to it", second.pid());
    assert!(ended.log.contains(&expected), "{}", ended.log);
}

#[test]
fn read_only_commands_do_not_touch_a_snapshot() {
    let setup = Setup::new("1h");
    let list = || {
        let names = fs::read_dir(setup.folder.path().join("saved")).unwrap();
        names.map(|name| name.unwrap().file_name()).collect::<Vec<_>>()
    };
    let commands: [&[&str]; 3] = [
        &["check", "--config", &setup.config, "user=alice"],
        &["explain", "--config", &setup.config, "user=alice"],
        &["validate", &setup.config],
    ];
    for command in commands {
        let done = run(command);
        assert!(done.status.success(), "{command:?}: {}", text(&done.stderr));
        assert!(list().is_empty(), "{command:?} created {:?}", list());
    }
    let server = setup.start();
    for command in commands {
        assert!(run(command).status.success(), "{command:?} while a server runs");
    }
    assert_eq!(end(server).code, Some(0));
}
