//! Detects changes of a file's content.
//!
//! The watcher watches the folder, not the file: editors write a new file and rename it over the old one, and
//! Kubernetes swaps a symbolic link next to it. An event only triggers a read; a change is a different content.
//! The file is also read twice a second, so that a folder that cannot be watched (no more watches, a network
//! file system) only delays the detection.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};

use super::origin::digest;

/// A file counts as written when no event has arrived for this long.
const QUIET: Duration = Duration::from_millis(50);
/// How many times [`QUIET`] is waited for at most.
const MAX_WAITS: usize = 5;
/// How often the file is read without an event.
pub(super) const POLL: Duration = Duration::from_millis(500);

/// Watches a file until it is dropped, such as a certificate that is reloaded when it changes. For a config file, use
/// [`Follow`](super::Follow), which handles files that are being written.
#[derive(Debug)]
pub struct Watch {
    stopped: Arc<AtomicBool>,
    wake: SyncSender<()>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Calls `changed`, from a thread of its own, within a second of every change of the file's content. Start the
    /// watch before reading the file, so that no change in between is missed. Fails if the thread cannot be
    /// started.
    pub fn new(path: &Path, mut changed: impl FnMut() + Send + 'static) -> std::io::Result<Watch> {
        let (wake, woken) = sync_channel(1);
        let watcher = watcher(path, wake.clone());
        let stopped = Arc::new(AtomicBool::new(false));
        let (path, stop) = (path.to_owned(), Arc::clone(&stopped));
        let seen = content(&path);
        let run = move || {
            // Dropping the watcher would end the events.
            let _watcher = watcher;
            follow(&path, seen, &woken, &stop, &mut changed);
        };
        let thread = thread::Builder::new().name("tollkeeper-config".to_owned()).spawn(run)?;
        Ok(Watch { stopped, wake, thread: Some(thread) })
    }
}

impl Drop for Watch {
    /// Waits for a running call of `changed`; no further call begins.
    fn drop(&mut self) {
        self.stopped.store(true, Relaxed);
        // If the channel is full, the thread has already been woken.
        let _ = self.wake.try_send(());
        if let Some(thread) =
            self.thread.take().filter(|thread| thread.thread().id() != thread::current().id())
        {
            // A panic of `changed` has already been printed.
            let _ = thread.join();
        }
    }
}

fn follow(
    path: &Path,
    mut seen: Option<u64>,
    woken: &Receiver<()>,
    stopped: &AtomicBool,
    changed: &mut dyn FnMut(),
) {
    loop {
        match woken.recv_timeout(POLL) {
            Ok(()) => until_quiet(woken, || stopped.load(Relaxed)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if stopped.load(Relaxed) {
            return;
        }
        // A missing file is about to be replaced.
        let now = content(path);
        if now.is_some() && now != seen {
            seen = now;
            changed();
        }
    }
}

/// Waits until no event has arrived for [`QUIET`], but at most [`MAX_WAITS`] times and not while `hurry` is true.
pub(super) fn until_quiet(woken: &Receiver<()>, hurry: impl Fn() -> bool) {
    let still_written = || matches!(woken.recv_timeout(QUIET), Ok(()));
    (0..MAX_WAITS).take_while(|_| !hurry() && still_written()).for_each(drop);
}

/// A watcher that sends to `wake` on events in the folder of a file; `None` if the folder cannot be watched.
pub(super) fn watcher(path: &Path, wake: SyncSender<()>) -> Option<RecommendedWatcher> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.map_or_else(|| PathBuf::from("."), Path::to_owned);
    let on_event = move |event: notify::Result<notify::Event>| {
        // Our own reads of the file are events too, and are ignored.
        let is_change = event.is_ok_and(|event| match event.kind {
            EventKind::Access(kind) => kind == AccessKind::Close(AccessMode::Write),
            _ => true,
        });
        if is_change {
            // If the channel is full, the thread has already been woken.
            let _ = wake.try_send(());
        }
    };
    let mut watcher = notify::recommended_watcher(on_event).ok()?;
    watcher.watch(&folder, RecursiveMode::NonRecursive).ok()?;
    Some(watcher)
}

/// A hash of the content of the file; `None` if it cannot be read.
fn content(path: &Path) -> Option<u64> {
    super::content(path).ok().map(|(bytes, _)| digest(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// The tests of [`Watch`] would pass without events as well, only later.
    #[test]
    fn only_writes_are_events() {
        let folder = std::env::temp_dir().join(format!("tollkeeper-watcher-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder for temporary files");
        let path = folder.join("tollkeeper.yaml");
        fs::write(&path, "a").expect("written");
        let (wake, woken) = sync_channel(1);
        let watcher = watcher(&path, wake);
        assert!(watcher.is_some(), "this machine can watch folders");
        assert!(content(&path).is_some());
        assert!(woken.recv_timeout(Duration::from_millis(200)).is_err(), "reading is not an event");
        fs::rename(&path, folder.join("other.yaml")).expect("renamed");
        assert!(woken.recv_timeout(Duration::from_secs(10)).is_ok(), "renaming is an event");
        assert_eq!(content(&path), None);
        fs::remove_dir_all(&folder).expect("made above");
    }
}
