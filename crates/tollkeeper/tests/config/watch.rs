//! Tests that a changed file is detected within a second, however it was changed.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use tollkeeper::config::{Config, Follow, ReadError, Reload, Watch};
use tollkeeper::{Clock, Limiter, Restored, facts};

/// The documented time in which a change is detected.
const DETECTED_WITHIN: Duration = Duration::from_secs(1);
/// How long a test waits for a change before it fails: longer, because the machine may be busy.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A separate folder for each test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("watch-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder for temporary files");
    folder
}

fn watched(path: &Path) -> (Watch, Receiver<()>) {
    let (sender, changes) = channel();
    let watch = Watch::new(path, move || {
        let _ = sender.send(());
    })
    .expect("a thread");
    (watch, changes)
}

fn assert_changed(changes: &Receiver<()>) {
    changes.recv_timeout(TIMEOUT).expect("the change is detected");
}

fn assert_unchanged(changes: &Receiver<()>) {
    assert!(changes.recv_timeout(2 * DETECTED_WITHIN).is_err(), "nothing changed");
}

#[test]
fn written_and_replaced_files_are_detected() {
    let folder = folder("rename");
    let path = folder.join("tollkeeper.yaml");
    fs::write(&path, "limits: []").expect("written");
    let (_watch, changes) = watched(&path);
    fs::write(&path, "limits: [ ]").expect("written");
    assert_changed(&changes);
    for text in ["limits: [  ]", "limits: [   ]"] {
        fs::write(folder.join(".tollkeeper.yaml.swp"), text).expect("written");
        fs::rename(folder.join(".tollkeeper.yaml.swp"), &path).expect("renamed");
        assert_changed(&changes);
    }
    fs::remove_dir_all(&folder).expect("made above");
}

#[test]
fn same_content_is_not_a_change() {
    let folder = folder("same");
    let path = folder.join("tollkeeper.yaml");
    fs::write(&path, "limits: []").expect("written");
    let (_watch, changes) = watched(&path);
    fs::write(folder.join("other.yaml"), "x").expect("written");
    fs::rename(&path, folder.join("away")).expect("renamed");
    fs::write(&path, "limits: []").expect("written");
    assert_unchanged(&changes);
    fs::remove_dir_all(&folder).expect("made above");
}

/// A mounted config map of Kubernetes: the file is a link to `..data/file`, `..data` is a link to a folder, and an
/// update renames a new link over `..data`.
#[cfg(unix)]
#[test]
fn swapped_kubernetes_links_are_detected() {
    use std::os::unix::fs::symlink;
    let folder = folder("kubernetes");
    let version = |name: &str, text: &str| {
        fs::create_dir(folder.join(name)).expect("a folder");
        fs::write(folder.join(name).join("tollkeeper.yaml"), text).expect("written");
    };
    version("..1", "limits: []");
    symlink("..1", folder.join("..data")).expect("a link");
    symlink("..data/tollkeeper.yaml", folder.join("tollkeeper.yaml")).expect("a link");
    let (_watch, changes) = watched(&folder.join("tollkeeper.yaml"));
    for number in 2..5 {
        let name = format!("..{number}");
        version(&name, &format!("limits: [] # {number}"));
        symlink(&name, folder.join("..data_tmp")).expect("a link");
        fs::rename(folder.join("..data_tmp"), folder.join("..data")).expect("renamed");
        assert_changed(&changes);
    }
    fs::remove_dir_all(&folder).expect("made above");
}

/// The folder does not exist yet and cannot be watched, so only polling detects the file.
#[test]
fn unwatchable_folder_is_polled() {
    let folder = folder("absent");
    let path = folder.join("later").join("tollkeeper.yaml");
    let (_watch, changes) = watched(&path);
    fs::create_dir(folder.join("later")).expect("a folder");
    fs::write(&path, "limits: []").expect("written");
    assert_changed(&changes);
    fs::write(&path, "limits: [ ]").expect("written");
    assert_changed(&changes);
    fs::remove_dir_all(&folder).expect("made above");
}

#[test]
fn dropped_watch_reports_no_changes() {
    let folder = folder("dropped");
    let path = folder.join("tollkeeper.yaml");
    fs::write(&path, "limits: []").expect("written");
    let (watch, changes) = watched(&path);
    drop(watch);
    fs::write(&path, "limits: [ ]").expect("written");
    assert!(changes.recv_timeout(TIMEOUT).is_err(), "the watch was dropped");
    fs::remove_dir_all(&folder).expect("made above");
}

#[test]
fn limiter_follows_its_file_and_ignores_invalid_ones() {
    let folder = folder("limiter");
    let path = folder.join("tollkeeper.yaml");
    // By renaming, because a file that is being written may be invalid for a moment.
    let write = |limit: &str| {
        fs::write(folder.join("new"), format!("limits: [{limit}]\n")).expect("written");
        fs::rename(folder.join("new"), &path).expect("renamed");
    };
    write("{ name: a, rate: 10/day, burst: 10 }");
    let (config, _) = Config::read(&path).expect("valid");
    let limiter = config.limiter().expect("a store");
    let (sender, changes) = channel();
    let _follow = {
        let limiter = limiter.clone();
        let replace = move |reload: Result<Reload, ReadError>| {
            let replaced = reload.map(|reload| limiter.replace_policy(reload.config.policy)).is_ok();
            let _ = sender.send(replaced);
            replaced
        };
        Follow::new(&path, &config, replace).expect("a thread")
    };
    let remaining = || {
        let decision = limiter.peek(&facts! {}).wait().expect("valid");
        decision.limit("a").expect("applies").outcome().remaining
    };
    assert!(limiter.check(&facts! {}).cost(4).wait().expect("valid").allowed());
    write("{ name: a, rate: 10/day, burst: 20 }");
    assert_eq!(changes.recv_timeout(TIMEOUT), Ok(true));
    assert_eq!(remaining(), 16, "the count is kept");
    write("{ name: a, rate: 10/month }");
    assert_eq!(changes.recv_timeout(TIMEOUT), Ok(false));
    assert_eq!(remaining(), 16, "nothing changed");
    // A limit is removed when the file has settled.
    write("");
    assert_eq!(changes.recv_timeout(TIMEOUT), Ok(true));
    assert!(limiter.policy().rules().is_empty());
    fs::remove_dir_all(&folder).expect("made above");
}

#[test]
fn limiter_from_config_restores_its_snapshot() {
    let folder = folder("snapshot");
    let (path, state) = (folder.join("tollkeeper.toml"), folder.join("state"));
    let text = format!(
        "memory = {{ max_keys = 10, snapshot = {:?} }}\n[[limits]]\nname = \"a\"\nby = \"user\"\nrate = \"5/day\"\n",
        state.display().to_string()
    );
    fs::write(&path, text).expect("written");
    let alice = facts! { "user" => "alice" };
    let first = Limiter::from_config(&path).expect("valid");
    assert!(first.check(&alice).cost(5).wait().expect("valid").allowed());
    drop(first);
    let second = Limiter::from_config(&path).expect("valid");
    assert!(!second.check(&alice).wait().expect("valid").allowed());
    drop(second);
    let (config, _) = Config::read(&path).expect("valid");
    assert!(matches!(config.memory.open(Clock::system()), Ok((_, Restored::Keys(1)))));
    assert_eq!(config.memory.capacity().max_keys, 10);
    fs::remove_dir_all(&folder).expect("made above");
}
