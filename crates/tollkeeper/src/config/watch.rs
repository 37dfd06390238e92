//! Tells when a file has changed.
//!
//! The folder of the file is watched, not the file: editors write a new file and rename it over the old
//! one, and Kubernetes swaps a symbolic link beside it. Events only say when to look; what counts is
//! whether the content is another. So that a folder that cannot be watched (no more watches, a file system
//! over the network) costs only time, the content is also looked at twice a second.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};

use super::origin::digest;

/// How long nothing must happen before a file that is being written counts as written.
const QUIET: Duration = Duration::from_millis(50);
/// How many times that is waited for at most.
const PATIENCE: usize = 5;
/// How often the content is looked at without an event.
pub(super) const POLL: Duration = Duration::from_millis(500);

/// Watches a file until it is dropped: a certificate, or anything else that is read again when it has changed. For a
/// config file use [`Follow`](super::Follow), which knows what to do with one that is being written.
#[derive(Debug)]
pub struct Watch {
    stopped: Arc<AtomicBool>,
    wake: SyncSender<()>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Calls `changed`, from a thread of its own, within a second of every change of the file's content from
    /// what it is now. Make it before the file is read, so that no change goes unseen in between. An error
    /// means that there is no thread to be had.
    pub fn new(path: &Path, mut changed: impl FnMut() + Send + 'static) -> std::io::Result<Watch> {
        let (wake, woken) = sync_channel(1);
        let watcher = watcher(path, wake.clone());
        let stopped = Arc::new(AtomicBool::new(false));
        let (path, stop) = (path.to_owned(), Arc::clone(&stopped));
        let seen = content(&path);
        let look = move || {
            // Events come as long as this lives.
            let _watcher = watcher;
            follow(&path, seen, &woken, &stop, &mut changed);
        };
        let thread = thread::Builder::new().name("tollkeeper-config".to_owned()).spawn(look)?;
        Ok(Watch { stopped, wake, thread: Some(thread) })
    }
}

impl Drop for Watch {
    /// Waits for a call of `changed` that has begun; none begins afterwards.
    fn drop(&mut self) {
        self.stopped.store(true, Relaxed);
        // If there is no room, it has been woken already.
        let _ = self.wake.try_send(());
        if let Some(thread) =
            self.thread.take().filter(|thread| thread.thread().id() != thread::current().id())
        {
            // Should `changed` have panicked, it has said so itself.
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
        // A file that is missing is about to be replaced.
        let now = content(path);
        if now.is_some() && now != seen {
            seen = now;
            changed();
        }
    }
}

/// Waits until nothing has happened for a moment, unless that takes too long or there is no time.
pub(super) fn until_quiet(woken: &Receiver<()>, hurry: impl Fn() -> bool) {
    let still_written = || matches!(woken.recv_timeout(QUIET), Ok(()));
    (0..PATIENCE).take_while(|_| !hurry() && still_written()).for_each(drop);
}

/// Something that sends when something happens in the folder of a file; nothing if there is no such thing.
pub(super) fn watcher(path: &Path, wake: SyncSender<()>) -> Option<RecommendedWatcher> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.map_or_else(|| PathBuf::from("."), Path::to_owned);
    let on_event = move |event: notify::Result<notify::Event>| {
        // That we read the file ourselves is no news.
        let is_news = event.is_ok_and(|event| match event.kind {
            EventKind::Access(kind) => kind == AccessKind::Close(AccessMode::Write),
            _ => true,
        });
        if is_news {
            // If there is no room, it has been woken already.
            let _ = wake.try_send(());
        }
    };
    let mut watcher = notify::recommended_watcher(on_event).ok()?;
    watcher.watch(&folder, RecursiveMode::NonRecursive).ok()?;
    Some(watcher)
}

/// A hash of what is in the file; `None` if it cannot be read.
fn content(path: &Path) -> Option<u64> {
    super::content(path).ok().map(|(bytes, _)| digest(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// The tests of the whole thing would pass without events, only later.
    #[test]
    fn writing_is_an_event_and_reading_is_none() {
        let folder = std::env::temp_dir().join(format!("tollkeeper-watcher-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder for temporary files");
        let path = folder.join("tollkeeper.yaml");
        fs::write(&path, "a").expect("written");
        let (wake, woken) = sync_channel(1);
        let watcher = watcher(&path, wake);
        assert!(watcher.is_some(), "this machine can watch folders");
        assert!(content(&path).is_some());
        assert!(woken.recv_timeout(Duration::from_millis(200)).is_err(), "reading is no event");
        fs::rename(&path, folder.join("other.yaml")).expect("renamed");
        assert!(woken.recv_timeout(Duration::from_secs(10)).is_ok(), "renaming is one");
        assert_eq!(content(&path), None);
        fs::remove_dir_all(&folder).expect("made above");
    }
}
