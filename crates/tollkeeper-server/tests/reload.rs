//! Config reload: no request is dropped, no count is lost, and an invalid file changes nothing.

#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;

use serde_json::{Value, json};
use support::*;

/// One limit with this burst, which does not refill while a test runs.
fn burst(burst: u32) -> String {
    format!("limits:\n  - {{ name: few, rate: 1/day, burst: {burst} }}\n")
}

/// Replaces a file atomically, by rename.
fn rename(folder: &Folder, text: &str) {
    let new = folder.write("new.yaml.tmp", text);
    fs::rename(new, folder.path().join("tollkeeper.yaml")).unwrap();
}

fn limits(server: &Server) -> Value {
    server.get("/v1/limits").json()
}

/// Waits until the active limits have this burst.
fn has_burst(server: &Server, burst: u32) {
    eventually(&format!("the burst is {burst}"), || limits(server)["limits"][0]["burst"] == burst);
}

/// The remaining units of the limit of [`burst`].
fn remaining(server: &Server) -> u64 {
    server.post("/v1/peek", r#"{"facts":{}}"#).json()["limits"][0]["remaining"].as_u64().unwrap()
}

fn reloads(server: &Server, result: &str) -> f64 {
    server.metric(&format!("tollkeeper_config_reloads_total{{result=\"{result}\"}}"))
}

/// Ends the load when it is dropped: also when an assertion fails, which would wait for the load forever otherwise.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn thousand_reloads_under_load_lose_nothing() {
    const RELOADS: u32 = 1_000;
    const CONNECTIONS: usize = 8;
    const SHARED: u64 = 3_000;
    const OWN: u64 = 10_000_000;

    let folder = Folder::new();
    // The last limit changes each time; every count of the others must survive.
    let policy = |number: u32| {
        format!(
            "limits:
  - {{ name: own, by: user, rate: {OWN}/week, algorithm: fixed-window }}
  - {{ name: shared, rate: {SHARED}/week, algorithm: fixed-window, when: {{ part: shared }} }}
  - {{ name: other, by: nothing, rate: 1/day, burst: {number} }}
"
        )
    };
    let server = Server::with_config(&folder, &policy(1));
    let (stop, shared) = (AtomicBool::new(false), AtomicU64::new(0));
    let answered: u64 = thread::scope(|scope| {
        let load: Vec<_> = (0..CONNECTIONS)
            .map(|connection| {
                let (server, stop, shared) = (&server, &stop, &shared);
                scope.spawn(move || {
                    let mut client = server.client();
                    let mut own = 0;
                    // Every second check is charged to the limit that all of them share, as long as it lasts.
                    for round in 0_u64.. {
                        if stop.load(Relaxed) {
                            break;
                        }
                        let part = if round % 2 == 0 { "own" } else { "shared" };
                        let body =
                            format!("{{\"facts\":{{\"user\":\"u{connection}\",\"part\":\"{part}\"}}}}");
                        let answer = client.request("POST", "/v1/check", &body);
                        let limits = answer.json()["limits"].clone();
                        match answer.status {
                            200 => own += 1,
                            429 => assert_eq!((part, &limits[1]["allowed"]), ("shared", &json!(false))),
                            status => panic!("{status}: {}", answer.text()),
                        }
                        if part == "shared" && answer.status == 200 {
                            shared.fetch_add(1, Relaxed);
                        }
                        // Exact: a lost or restarted count would show here.
                        assert_eq!(limits[0]["remaining"], OWN - own, "{answer:?}");
                    }
                    own
                })
            })
            .collect();

        let running = StopOnDrop(&stop);
        let mut client = server.client();
        let mut limits = || client.request("GET", "/v1/limits", "").json();
        let mut version = 1;
        for number in 2..=RELOADS + 1 {
            if number % 100 == 0 {
                rename(&folder, "limits:\n  - { name: own, by: user, rate: 1/soon }\n");
                server.signal("HUP");
                eventually("the broken file is reported", || limits()["error"].is_string());
            }
            rename(&folder, &policy(number));
            server.signal("HUP");
            eventually("the reload took effect", || {
                let now = limits();
                let newer = now["version"].as_u64().unwrap();
                assert!(newer >= version, "versions only grow: {newer} after {version}");
                version = newer;
                now["limits"][2]["burst"] == number
            });
        }
        eventually("the shared limit is used up", || shared.load(Relaxed) >= SHARED);
        drop(running);
        load.into_iter().map(|connection| connection.join().unwrap()).sum()
    });

    assert_eq!(shared.load(Relaxed), SHARED, "no request beyond the limit was admitted");
    let allowed =
        |limit| server.metric(&format!("tollkeeper_checks_total{{limit=\"{limit}\",result=\"allowed\"}}"));
    assert!(allowed("own") >= answered as f64 && allowed("shared") == SHARED as f64, "metrics are kept, too");
    let done = reloads(&server, "done");
    assert!(done >= f64::from(RELOADS), "{done}");
    assert!(reloads(&server, "failed") >= 10.0);
    assert_eq!(server.metric("tollkeeper_config_version"), done + 1.0);
    assert_eq!(limits(&server)["error"], Value::Null);
    server.logs("tollkeeper.yaml:2:");
}

#[test]
fn changed_limit_applies_and_keeps_usage() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &burst(3));
    assert!(server.check("{}") && server.check("{}"));
    for (now, left) in [(10, 8), (3, 1), (2, 0), (1, 0), (5, 3)] {
        rename(&folder, &burst(now));
        server.signal("HUP");
        has_burst(&server, now);
        assert_eq!(remaining(&server), left, "two were used, of {now}");
    }
    // Another period or name makes another limit.
    for other in ["{ name: few, rate: 1/week, burst: 5 }", "{ name: anew, rate: 1/day, burst: 5 }"] {
        rename(&folder, &format!("limits:\n  - {other}\n"));
        server.signal("HUP");
        eventually("the new limit starts unused", || remaining(&server) == 5);
    }
    rename(&folder, &burst(5));
    server.signal("HUP");
    eventually("the restored limit still has its charges", || remaining(&server) == 3);
    assert_eq!(server.metric("tollkeeper_checks_total{limit=\"few\",result=\"allowed\"}"), 2.0);
}

#[test]
fn invalid_file_changes_nothing_and_is_reported() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &burst(3));
    assert!(server.check("{}"));
    let before = limits(&server);
    for (number, (broken, words)) in (1_u32..).zip([
        ("limits:\n  - { name: few, rate: 1/soon }\n", "tollkeeper.yaml:2:"),
        ("limits:\n  - { name: few, rate: 1/day, burst: 9 }\n  - { nam: x }\n", "tollkeeper.yaml:3:"),
        ("limits: [", "tollkeeper.yaml:"),
        ("", "the file is empty"),
        ("limits:\n  - { name: few, rate: 1/day, burst: 9 }\nstore: nonsense://\n", "tollkeeper.yaml:3:"),
        ("\u{0}\u{1}", "NUL"),
    ]) {
        rename(&folder, broken);
        server.signal("HUP");
        eventually(&format!("{broken:?} is reported"), || {
            limits(&server)["error"].as_str().is_some_and(|error| error.contains(words))
        });
        let now = limits(&server);
        assert_eq!((&now["version"], &now["limits"]), (&before["version"], &before["limits"]), "{broken:?}");
        assert_eq!(
            (&now["loaded_at"], &now["source"]),
            (&before["loaded_at"], &before["source"]),
            "{broken:?}"
        );
        assert_eq!(server.get("/v1/limits").header("etag"), Some("\"1\""));
        assert_eq!(remaining(&server), 2, "{broken:?}");
        server.logs(words);
        assert!(server.log().contains("ERROR"), "{}", server.log());
        eventually("the failure is counted", || reloads(&server, "failed") >= f64::from(number));
        assert_eq!(server.get("/readyz").status, 200, "the server can still decide");
    }
    fs::remove_file(folder.path().join("tollkeeper.yaml")).unwrap();
    server.signal("HUP");
    eventually("a missing file is reported", || {
        limits(&server)["error"].as_str().is_some_and(|error| error.contains("cannot be read"))
    });
    assert_eq!(
        (limits(&server)["version"].clone(), reloads(&server, "done"), remaining(&server)),
        (json!(1), 0.0, 2)
    );
    rename(&folder, &burst(4));
    server.signal("HUP");
    has_burst(&server, 4);
    assert_eq!(limits(&server)["error"], Value::Null, "a valid file clears the error");
    assert_eq!(remaining(&server), 3);
}

#[test]
fn each_reload_increments_the_version() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &burst(3));
    assert_eq!(limits(&server)["version"], 1);
    for number in 2..6 {
        let version = limits(&server)["version"].as_u64().unwrap();
        server.signal("HUP");
        eventually("the config is reloaded", || limits(&server)["version"].as_u64() > Some(version));
        let answer = server.get("/v1/limits");
        assert_eq!(answer.header("etag"), Some(&*format!("\"{}\"", answer.json()["version"])));
        eventually("the reload is counted", || reloads(&server, "done") >= f64::from(number - 1));
        server.logs(&format!("limits version {} is active", version + 1));
    }
    assert_eq!(server.metric("tollkeeper_config_version"), reloads(&server, "done") + 1.0);
    assert_eq!(limits(&server)["source"], "file");
}

#[test]
fn replaced_or_written_file_is_reloaded() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &burst(3));
    assert!(server.check("{}"));
    rename(&folder, &burst(4));
    has_burst(&server, 4);
    folder.write("tollkeeper.yaml", &burst(5));
    has_burst(&server, 5);
    // Editors that keep a backup rename the old file first.
    let path = folder.path().join("tollkeeper.yaml");
    fs::rename(&path, folder.path().join("tollkeeper.yaml~")).unwrap();
    folder.write("tollkeeper.yaml", &burst(6));
    has_burst(&server, 6);
    fs::remove_file(&path).unwrap();
    folder.write("tollkeeper.yaml", &burst(7));
    has_burst(&server, 7);
    folder.write("tollkeeper.yaml", "limits: [");
    eventually("a broken file is reported", || {
        limits(&server)["error"].as_str().is_some_and(|error| error.contains("tollkeeper.yaml:1:"))
    });
    assert_eq!(limits(&server)["limits"][0]["burst"], 7);
    folder.write("tollkeeper.yaml", &burst(7));
    eventually("the previous file clears the error", || limits(&server)["error"].is_null());
    for number in 8..28 {
        rename(&folder, &burst(number));
        has_burst(&server, number);
    }
    assert_eq!(remaining(&server), 26, "the one charge survived all reloads");
}

#[test]
fn other_files_in_the_folder_do_not_reload() {
    let folder = Folder::new();
    let server = Server::with_config(&folder, &burst(3));
    for number in 0..20 {
        folder.write(&format!("other-{number}.yaml"), &burst(9));
        folder.write("tollkeeper.yaml.swp", "junk");
    }
    rename(&folder, &burst(4));
    has_burst(&server, 4);
    let done = reloads(&server, "done");
    assert!((1.0..=3.0).contains(&done), "it was loaded {done} times");
    assert_eq!(reloads(&server, "failed"), 0.0);
}

/// Kubernetes updates a ConfigMap with a new folder, and switches the symbolic link `..data` to it atomically.
fn publish(folder: &Path, number: u32, text: &str) {
    let version = format!("..version_{number}");
    fs::create_dir(folder.join(&version)).unwrap();
    fs::write(folder.join(&version).join("tollkeeper.yaml"), text).unwrap();
    symlink(&version, folder.join("..data_tmp")).unwrap();
    fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
    if let Some(earlier) = number.checked_sub(1).map(|earlier| folder.join(format!("..version_{earlier}"))) {
        let _ = fs::remove_dir_all(earlier);
    }
}

#[test]
fn swapped_kubernetes_symlink_is_reloaded() {
    let folder = Folder::new();
    publish(folder.path(), 0, &burst(3));
    symlink("..data/tollkeeper.yaml", folder.path().join("tollkeeper.yaml")).unwrap();
    let file = folder.path().join("tollkeeper.yaml");
    let server = Server::with(&["--config", file.to_str().unwrap()]);
    assert!(server.check("{}"));
    for number in 1..6 {
        publish(folder.path(), number, &burst(3 + number));
        has_burst(&server, 3 + number);
    }
    publish(folder.path(), 6, "limits: [");
    eventually("a broken file is reported", || limits(&server)["error"].is_string());
    assert_eq!(limits(&server)["limits"][0]["burst"], 8);
    publish(folder.path(), 7, &burst(9));
    has_burst(&server, 9);
    assert_eq!((limits(&server)["error"].clone(), remaining(&server)), (Value::Null, 8));
}

#[test]
fn relative_config_path_is_watched() {
    let folder = Folder::new();
    folder.write("tollkeeper.yaml", &burst(3));
    let mut command = tollkeeper();
    command.current_dir(folder.path()).args([
        "serve",
        "--http",
        "127.0.0.1:0",
        "--config",
        "tollkeeper.yaml",
    ]);
    let server = Server::launch(&mut command);
    rename(&folder, &burst(4));
    has_burst(&server, 4);
}

#[test]
fn toml_and_json_are_reloaded() {
    for (name, text) in [
        ("tollkeeper.toml", "[[limits]]\nname = \"few\"\nrate = \"1/day\"\nburst = BURST\n"),
        ("tollkeeper.json", r#"{"limits":[{"name":"few","rate":"1/day","burst":BURST}]}"#),
    ] {
        let folder = Folder::new();
        let file = folder.write(name, &text.replace("BURST", "3"));
        let server = Server::with(&["--config", file.to_str().unwrap()]);
        assert!(server.check("{}"));
        folder.write(name, &text.replace("BURST", "5"));
        server.signal("HUP");
        has_burst(&server, 5);
        assert_eq!(remaining(&server), 4, "{name}");
    }
}
