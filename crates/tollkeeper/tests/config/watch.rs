//! Changes of the config file are noticed within a second, however they are made.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use tollkeeper::config::{Config, Follow, ReadError, Reload, Watch};
use tollkeeper::{Clock, Limiter, Restored, facts};

/// The promise.
const SOON: Duration = Duration::from_secs(1);
/// How long a test waits before it says that the promise was broken: others may use the machine, too.
const PATIENCE: Duration = Duration::from_secs(10);

/// A folder of its own for each test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("watch-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder for temporary files");
    folder
}

fn watched(path: &Path) -> (Watch, Receiver<()>) {
    let (tell, told) = channel();
    let watch = Watch::new(path, move || {
        let _ = tell.send(());
    })
    .expect("a thread");
    (watch, told)
}

fn changed(told: &Receiver<()>) {
    told.recv_timeout(PATIENCE).expect("a change is told");
}

fn unchanged(told: &Receiver<()>) {
    assert!(told.recv_timeout(2 * SOON).is_err(), "nothing changed");
}

#[test]
fn a_file_that_is_written_or_renamed_over_is_seen() {
    let folder = folder("rename");
    let path = folder.join("tollkeeper.yaml");
    fs::write(&path, "limits: []").expect("written");
    let (_watch, told) = watched(&path);
    fs::write(&path, "limits: [ ]").expect("written");
    changed(&told);
    for text in ["limits: [  ]", "limits: [   ]"] {
        fs::write(folder.join(".tollkeeper.yaml.swp"), text).expect("written");
        fs::rename(folder.join(".tollkeeper.yaml.swp"), &path).expect("renamed");
        changed(&told);
    }
    fs::remove_dir_all(&folder).expect("made above");
}

#[test]
fn what_leaves_the_content_as_it_is_is_no_change() {
    let folder = folder("same");
    let path = folder.join("tollkeeper.yaml");
    fs::write(&path, "limits: []").expect("written");
    let (_watch, told) = watched(&path);
    fs::write(folder.join("other.yaml"), "x").expect("written");
    fs::rename(&path, folder.join("away")).expect("renamed");
    fs::write(&path, "limits: []").expect("written");
    unchanged(&told);
    fs::remove_dir_all(&folder).expect("made above");
}

/// A mounted config map: the file is a link to `..data/file`, `..data` a link to a folder, and an update
/// renames a new link over `..data`.
#[cfg(unix)]
#[test]
fn the_swapped_links_of_kubernetes_are_seen() {
    use std::os::unix::fs::symlink;
    let folder = folder("kubernetes");
    let version = |name: &str, text: &str| {
        fs::create_dir(folder.join(name)).expect("a folder");
        fs::write(folder.join(name).join("tollkeeper.yaml"), text).expect("written");
    };
    version("..1", "limits: []");
    symlink("..1", folder.join("..data")).expect("a link");
    symlink("..data/tollkeeper.yaml", folder.join("tollkeeper.yaml")).expect("a link");
    let (_watch, told) = watched(&folder.join("tollkeeper.yaml"));
    for number in 2..5 {
        let name = format!("..{number}");
        version(&name, &format!("limits: [] # {number}"));
        symlink(&name, folder.join("..data_tmp")).expect("a link");
        fs::rename(folder.join("..data_tmp"), folder.join("..data")).expect("renamed");
        changed(&told);
    }
    fs::remove_dir_all(&folder).expect("made above");
}

/// There is nothing to watch yet: what is left is to look from time to time.
#[test]
fn a_folder_that_cannot_be_watched_is_looked_at() {
    let folder = folder("absent");
    let path = folder.join("later").join("tollkeeper.yaml");
    let (_watch, told) = watched(&path);
    fs::create_dir(folder.join("later")).expect("a folder");
    fs::write(&path, "limits: []").expect("written");
    changed(&told);
    fs::write(&path, "limits: [ ]").expect("written");
    changed(&told);
    fs::remove_dir_all(&folder).expect("made above");
}

#[test]
fn a_watch_that_is_dropped_tells_nothing_more() {
    let folder = folder("dropped");
    let path = folder.join("tollkeeper.yaml");
    fs::write(&path, "limits: []").expect("written");
    let (watch, told) = watched(&path);
    drop(watch);
    fs::write(&path, "limits: [ ]").expect("written");
    assert!(told.recv_timeout(PATIENCE).is_err(), "whoever could tell is gone");
    fs::remove_dir_all(&folder).expect("made above");
}

#[test]
fn a_limiter_follows_its_file_and_a_broken_file_changes_nothing() {
    let folder = folder("limiter");
    let path = folder.join("tollkeeper.yaml");
    // In one step: a file that is being written is broken for a moment.
    let write = |limit: &str| {
        fs::write(folder.join("new"), format!("limits: [{limit}]\n")).expect("written");
        fs::rename(folder.join("new"), &path).expect("renamed");
    };
    write("{ name: a, rate: 10/day, burst: 10 }");
    let (config, _) = Config::read(&path).expect("right");
    let limiter = config.limiter().expect("a store");
    let (tell, told) = channel();
    let _follow = {
        let limiter = limiter.clone();
        let replace = move |reload: Result<Reload, ReadError>| {
            let replaced = reload.map(|reload| limiter.replace_policy(reload.config.policy)).is_ok();
            let _ = tell.send(replaced);
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
    assert_eq!(told.recv_timeout(PATIENCE), Ok(true));
    assert_eq!(remaining(), 16, "the count is kept");
    write("{ name: a, rate: 10/month }");
    assert_eq!(told.recv_timeout(PATIENCE), Ok(false));
    assert_eq!(remaining(), 16, "nothing changed");
    // A limit is removed when the file has settled.
    write("");
    assert_eq!(told.recv_timeout(PATIENCE), Ok(true));
    assert!(limiter.policy().rules().is_empty());
    fs::remove_dir_all(&folder).expect("made above");
}

#[test]
fn a_limiter_from_a_file_goes_on_where_the_last_one_stopped() {
    let folder = folder("snapshot");
    let (path, state) = (folder.join("tollkeeper.toml"), folder.join("state"));
    let text = format!(
        "memory = {{ max_keys = 10, snapshot = {:?} }}\n[[limits]]\nname = \"a\"\nby = \"user\"\nrate = \"5/day\"\n",
        state.display().to_string()
    );
    fs::write(&path, text).expect("written");
    let alice = facts! { "user" => "alice" };
    let first = wait(Limiter::from_config(&path)).expect("right");
    assert!(first.check(&alice).cost(5).wait().expect("valid").allowed());
    drop(first);
    let second = wait(Limiter::from_config(&path)).expect("right");
    assert!(!second.check(&alice).wait().expect("valid").allowed());
    drop(second);
    let (config, _) = Config::read(&path).expect("right");
    assert!(matches!(config.memory.open(Clock::system()), Ok((_, Restored::Keys(1)))));
    assert_eq!(config.memory.capacity().max_keys, 10);
    fs::remove_dir_all(&folder).expect("made above");
}

fn wait<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(future)
}
