//! Storage that fails while a server saves to it: every fault is reported, and nothing that was saved is lost.

#![expect(clippy::unwrap_used, reason = "what helps a test may fail like a test")]

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
            .expect("a C compiler is there (Debian: gcc)");
        assert!(built.status.success(), "{}", text(&built.stderr));
        library
    })
}

/// A config, and the folder of its snapshot, in which nothing else is.
struct Place {
    folder: Folder,
    config: String,
}

impl Place {
    fn new(every: &str) -> Place {
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
        Place { folder, config }
    }

    fn state(&self) -> PathBuf {
        self.folder.path().join("saved/state")
    }

    fn start(&self) -> Server {
        Server::with(&["--config", &self.config])
    }

    /// With the library and these settings.
    fn start_with(&self, told: &[(&str, &str)]) -> Server {
        let mut command = tollkeeper();
        command.args(["serve", "--http", "127.0.0.1:0", "--config", &self.config]);
        command.env("LD_PRELOAD", faults()).env("FAULT_PATH", self.folder.path().join("saved"));
        Server::launch(command.envs(told.iter().copied()))
    }
}

/// The units that alice has used.
fn used(server: &Server) -> u64 {
    let peek = server.post("/v1/peek", r#"{"facts":{"user":"alice"}}"#).json();
    100 - peek["limits"][0]["remaining"].as_u64().unwrap()
}

fn end(server: Server) -> Ended {
    server.signal("TERM");
    server.ended()
}

/// One run of a server goes on from a good snapshot, charges alice once more, and stops; once for every call on
/// its files, which fails in that run.
#[test]
fn a_fault_at_any_call_is_reported_and_loses_nothing() {
    let place = Place::new("1h");
    let server = place.start();
    assert!(server.check(r#"{"user":"alice"}"#));
    // More than fits into one write.
    let large = server.post("/v1/check", r#"{"facts":{"large":"one"},"cost":20000}"#);
    assert_eq!(large.status, 200);
    assert_eq!(end(server).code, Some(0));
    let good = fs::read(place.state()).unwrap();

    let trace = place.folder.path().join("trace");
    let server = place.start_with(&[("FAULT_TRACE", trace.to_str().unwrap())]);
    assert!(server.check(r#"{"user":"alice"}"#));
    assert_eq!(end(server).code, Some(0));
    let trace = fs::read_to_string(trace).unwrap();
    let calls: Vec<(&str, &str)> = trace.lines().map(|line| line.split_once(' ').unwrap()).collect();
    let save = calls.iter().position(|(_, path)| path.ends_with(".new")).expect("it saves");
    let renamed = calls.iter().position(|(call, _)| *call == "rename").expect("it renames");
    let kinds = |call| calls[save..].iter().filter(|(other, _)| *other == call).count();
    assert_eq!([kinds("open"), kinds("fsync"), kinds("rename")], [2, 2, 1], "file and folder: {calls:?}");
    assert!(kinds("write") >= 2, "{calls:?}");

    for (index, (call, path)) in calls.iter().enumerate() {
        let context = format!("call {index}: {call} {path}");
        fs::write(place.state(), &good).unwrap();
        let errno = if *call == "write" { ENOSPC } else { EIO };
        let told = [("FAULT_AT", (index + 1).to_string()), ("FAULT_ERRNO", errno.to_string())];
        let server = place.start_with(&told.each_ref().map(|(name, value)| (*name, value.as_str())));
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
            fs::rename(place.state().with_extension("refused"), place.state()).unwrap();
        }
        let server = place.start();
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
        let place = Place::new("100ms");
        let flag = place.folder.path().join("flag");
        let server = place.start_with(&[
            ("FAULT_CALL", call),
            ("FAULT_WHILE", flag.to_str().unwrap()),
            ("FAULT_ERRNO", &errno.to_string()),
        ]);
        let failures = || server.metric("tollkeeper_snapshot_failures_total");
        assert!(server.check(r#"{"user":"alice"}"#));
        eventually("it is saved", || place.state().exists());
        assert_eq!((server.get("/readyz").text(), failures()), ("ready\n", 0.0), "{call}");

        fs::write(&flag, "").unwrap();
        eventually("it fails again and again", || failures() >= 3.0);
        let ready = server.get("/readyz");
        assert_eq!(ready.status, 200, "{call}: it can answer");
        assert!(ready.text().starts_with("ready\nthe snapshot was not written: "), "{}", ready.text());
        assert!(ready.text().contains(cause), "{}", ready.text());
        let problem = format!("the snapshot {} was not written: {cause}", place.state().display());
        server.logs(&problem);

        fs::remove_file(&flag).unwrap();
        server.logs("is written again");
        eventually("it is saved again", || server.get("/readyz").text() == "ready\n");
        assert_eq!(server.metric("tollkeeper_snapshot_age_seconds"), 0.0, "{call}");
        // Many attempts failed within a minute, and were logged in one line.
        assert_eq!(server.log().matches("was not written").count(), 1, "{}", server.log());

        fs::write(&flag, "").unwrap();
        let ended = end(server);
        assert_eq!(ended.code, Some(1), "{call}: {}", ended.log);
        assert!(ended.log.contains("the counters were not saved: snapshot "), "{}", ended.log);
        assert_eq!(used(&place.start()), 1, "{call}");
    }
}

#[test]
fn a_full_disk_is_reported_and_loses_nothing() {
    let place = Place::new("100ms");
    let disk = place.folder.path().join("saved");
    // On a file system of 128 KiB, which only this process sees.
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c"]);
    command.args(["mount -t tmpfs -o size=128k tmpfs \"$0\" && exec \"$@\"", disk.to_str().unwrap()]);
    command.args([tollkeeper().get_program().to_str().unwrap(), "serve", "--http", "127.0.0.1:0"]);
    command.args(["--config", &place.config]).env("TOLLKEEPER_GRPC", "off").env("TOLLKEEPER_RESP", "off");
    let server = Server::launch(&mut command);
    let inside = PathBuf::from(format!("/proc/{}/root{}", server.pid(), disk.display()));
    assert!(server.check(r#"{"user":"alice"}"#));
    let age = || server.metric("tollkeeper_snapshot_age_seconds");
    eventually("it is saved", || inside.join("state").exists());
    let filled = fs::write(inside.join("filler"), vec![0; 256 << 10]);
    assert_eq!(filled.unwrap_err().raw_os_error(), Some(ENOSPC));
    server.logs("No space left on device");
    eventually("the newest snapshot gets old", || age() >= 1.0);
    let saved = fs::read(inside.join("state")).unwrap();

    fs::remove_file(inside.join("filler")).unwrap();
    server.logs("is written again");
    fs::write(inside.join("filler"), vec![0; 256 << 10]).unwrap_err();
    let ended = end(server);
    assert_eq!(ended.code, Some(1), "{}", ended.log);
    fs::write(place.state(), saved).unwrap();
    assert_eq!(used(&place.start()), 1, "what was on the full disk is whole");
}

#[test]
fn a_second_server_on_one_snapshot_names_the_first() {
    let place = Place::new("1h");
    let first = place.start();
    assert!(first.check(r#"{"user":"alice"}"#));
    let second = run(&["serve", "--http", "127.0.0.1:0", "--config", &place.config]);
    assert_eq!(second.status.code(), Some(2));
    let said = text(&second.stderr);
    let expected = format!("snapshot {}: process {} saves to it", place.state().display(), first.pid());
    assert!(said.contains(&expected), "{said}");
    // A killed process holds no lock.
    assert_eq!(end(first).code, Some(0));
    let third = place.start();
    third.signal("KILL");
    third.ended();
    assert_eq!(used(&place.start()), 1);
}

/// Someone cleans up the folder of the snapshot while a server runs.
#[test]
fn a_removed_lock_file_is_locked_again() {
    let place = Place::new("100ms");
    let lock = place.state().with_extension("lock");
    let first = place.start();
    fs::remove_file(&lock).unwrap();
    eventually("the lock file is back", || lock.exists());
    let second = run(&["serve", "--http", "127.0.0.1:0", "--config", &place.config]);
    assert_eq!(second.status.code(), Some(2), "{}", text(&second.stderr));
    assert_eq!(end(first).code, Some(0));
}

/// If another process is faster, it owns the snapshot.
#[test]
fn a_lost_lock_stops_saving_and_is_reported() {
    let place = Place::new("1h");
    let first = place.start();
    fs::remove_file(place.state().with_extension("lock")).unwrap();
    let second = place.start();
    let ended = end(first);
    assert_eq!(ended.code, Some(1), "{}", ended.log);
    let expected = format!("process {} saves to it", second.pid());
    assert!(ended.log.contains(&expected), "{}", ended.log);
}

#[test]
fn commands_that_only_read_leave_a_snapshot_alone() {
    let place = Place::new("1h");
    let list = || {
        let names = fs::read_dir(place.folder.path().join("saved")).unwrap();
        names.map(|name| name.unwrap().file_name()).collect::<Vec<_>>()
    };
    let commands: [&[&str]; 3] = [
        &["check", "--config", &place.config, "user=alice"],
        &["explain", "--config", &place.config, "user=alice"],
        &["validate", &place.config],
    ];
    for command in commands {
        let done = run(command);
        assert!(done.status.success(), "{command:?}: {}", text(&done.stderr));
        assert!(list().is_empty(), "{command:?} made {:?}", list());
    }
    let server = place.start();
    for command in commands {
        assert!(run(command).status.success(), "{command:?} beside a server");
    }
    assert_eq!(end(server).code, Some(0));
}
