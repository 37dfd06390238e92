//! Saves the store to a snapshot file regularly and when it is closed, and locks that file against other processes.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::clock::Clock;

use super::snapshot::{SnapshotError, beside};
use super::{Capacity, Inner, MemoryStore};

/// Where snapshots go, and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshots {
    /// The snapshot file.
    pub path: PathBuf,
    /// The time between two snapshots.
    pub every: Duration,
}

impl Snapshots {
    /// Every ten seconds to this file.
    pub fn to(path: impl Into<PathBuf>) -> Snapshots {
        Snapshots { path: path.into(), every: Duration::from_secs(10) }
    }
}

/// Whether the states of the last run were restored.
#[derive(Debug)]
pub enum Restored {
    /// There was no file: the store starts empty.
    Nothing,
    /// The store starts with this many restored keys.
    Keys(usize),
    /// The file was refused, and the store starts empty. The file was moved to `PATH.refused`, so that the next
    /// snapshot does not overwrite it and it can be examined.
    Refused(SnapshotError),
}

/// The state of automatic snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotStatus {
    /// The snapshot file.
    pub path: PathBuf,
    /// Time since the newest good snapshot, such as 7 s; since the start before the first one.
    pub age: Duration,
    /// Attempts that have failed since the start.
    pub failures: u64,
    /// Whether the last attempt failed.
    pub failing: bool,
    /// Why the last attempt that failed did, such as `No space left on device (os error 28)`.
    pub last_failure: Option<String>,
}

/// Saves a store to one file.
#[derive(Debug)]
pub(super) struct Autosave {
    snapshots: Snapshots,
    /// The process that opened the store. A forked process has a copy, which is not saved.
    process: u32,
    /// Taken at the start, or as soon as the storage can be written; `None` until then and after the store was closed.
    lock: Mutex<Option<PathLock>>,
    health: Mutex<Health>,
    stop_signal: Arc<StopSignal>,
}

/// Tells the saving thread when to stop.
#[derive(Debug, Default)]
struct StopSignal {
    stopped: Mutex<bool>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    Periodic,
    Last,
}

#[derive(Debug)]
struct Health {
    failures: u64,
    failing: bool,
    last_failure: Option<String>,
    newest: Newest,
}

/// When the newest good snapshot was written.
#[derive(Clone, Copy, Debug)]
struct Newest {
    /// Its age when this process saw or wrote it.
    age: Duration,
    seen: Instant,
}

impl MemoryStore {
    /// Opens a store that restores the last snapshot, and is saved regularly and when it is [closed](MemoryStore::close)
    /// or its last clone is dropped.
    ///
    /// While it is open it holds a lock on `PATH.lock`. It is an error if another process, or another store of this
    /// process, saves to the same file. Storage that cannot be written is not an error, because it may recover: see
    /// [`MemoryStore::snapshots`].
    pub fn open(
        capacity: Capacity,
        clock: Clock,
        snapshots: Snapshots,
    ) -> Result<(MemoryStore, Restored), SnapshotError> {
        let lock = match PathLock::take(&snapshots.path) {
            Err(held @ SnapshotError::Held { .. }) => return Err(held),
            lock => lock,
        };
        let age = age(&snapshots.path);
        let (store, restored) = match MemoryStore::load(capacity, clock.clone(), &snapshots.path) {
            Ok(store) => {
                let keys = store.keys();
                (store, Restored::Keys(keys))
            }
            Err(SnapshotError::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => {
                (MemoryStore::new(capacity, clock), Restored::Nothing)
            }
            Err(refused) => {
                // A directory at this path is a mistake of the user: do not move it. No snapshot can overwrite it.
                if snapshots.path.is_file() {
                    // If the rename fails, the returned error still says what was wrong with the file.
                    let _ = fs::rename(&snapshots.path, beside(&snapshots.path, ".refused"));
                }
                (MemoryStore::new(capacity, clock), Restored::Refused(refused))
            }
        };
        let age = if let Restored::Keys(_) = restored { age } else { None };
        let newest = Newest { age: age.unwrap_or_default(), seen: Instant::now() };
        let health = Mutex::new(Health { failures: 0, failing: false, last_failure: None, newest });
        let process = std::process::id();
        let stop_signal = Arc::default();
        let mut autosave = Autosave { snapshots, process, lock: Mutex::default(), health, stop_signal };
        match lock {
            Ok(lock) => autosave.lock = Mutex::new(Some(lock)),
            Err(error) => autosave.report(Some(&error)),
        }
        assert!(store.inner.autosave.set(autosave).is_ok(), "a new store is not saved yet");
        store.inner.autosave.get().expect("set above").start(Arc::downgrade(&store.inner));
        Ok((store, restored))
    }

    /// The state of automatic snapshots; `None` if the store is not saved.
    pub fn snapshots(&self) -> Option<SnapshotStatus> {
        let autosave = self.inner.autosave.get()?;
        let health = held(&autosave.health);
        Some(SnapshotStatus {
            path: autosave.snapshots.path.clone(),
            age: health.newest.age + health.newest.seen.elapsed(),
            failures: health.failures,
            failing: health.failing,
            last_failure: health.last_failure.clone(),
        })
    }

    /// Saves a last time, and unlocks the file. Later charges are not saved. Does nothing for a store that is not
    /// saved or is already closed, and in a process that was forked after the store was opened.
    pub fn close(&self) -> Result<(), SnapshotError> {
        self.inner.autosave.get().map_or(Ok(()), |autosave| autosave.stop(&self.inner))
    }
}

impl Autosave {
    fn start(&self, store: Weak<Inner>) {
        let (every, stop_signal) = (self.snapshots.every, Arc::clone(&self.stop_signal));
        let save = move || {
            while !stop_signal.wait(every) {
                let Some(inner) = store.upgrade() else { return };
                // `save` records its errors in the status.
                let _ = inner.autosave.get().map(|autosave| autosave.save(&inner, Attempt::Periodic));
            }
        };
        let thread = thread::Builder::new().name("tollkeeper-snapshots".to_owned()).spawn(save);
        if let Err(error) = thread {
            self.report(Some(&SnapshotError::Io { path: self.snapshots.path.clone(), error }));
        }
    }

    /// Saves one last time, then stops saving.
    pub(super) fn stop(&self, inner: &Inner) -> Result<(), SnapshotError> {
        // A forked process has no saving thread, and the file belongs to its parent.
        if self.process != std::process::id() {
            return Ok(());
        }
        if std::mem::replace(&mut *held(&self.stop_signal.stopped), true) {
            return Ok(());
        }
        self.stop_signal.changed.notify_all();
        let saved = self.save(inner, Attempt::Last);
        held(&self.lock).take();
        saved
    }

    fn save(&self, inner: &Inner, attempt: Attempt) -> Result<(), SnapshotError> {
        let mut lock = held(&self.lock);
        // A periodic attempt after the last one would lock the file again.
        if attempt == Attempt::Periodic && *held(&self.stop_signal.stopped) {
            return Ok(());
        }
        let saved = match &*lock {
            Some(lock) if lock.is_in_place() => Ok(()),
            _ => {
                *lock = None;
                PathLock::take(&self.snapshots.path).map(|taken| *lock = Some(taken))
            }
        };
        let saved = saved.and_then(|()| inner.save(&self.snapshots.path)).map(drop);
        self.report(saved.as_ref().err());
        saved
    }

    /// Records the result of an attempt to save.
    fn report(&self, failure: Option<&SnapshotError>) {
        let mut health = held(&self.health);
        health.failing = failure.is_some();
        match failure {
            None => health.newest = Newest { age: Duration::ZERO, seen: Instant::now() },
            Some(error) => {
                health.failures += 1;
                health.last_failure = Some(error.cause());
            }
        }
    }
}

impl StopSignal {
    /// Waits until the next snapshot is due; true if saving has stopped instead.
    fn wait(&self, every: Duration) -> bool {
        let stopped = held(&self.stopped);
        let waited = self.changed.wait_timeout_while(stopped, every, |stopped| !*stopped);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// The lock on a snapshot. It is on a separate file, because the snapshot file is replaced each time. The system
/// releases it when the file is closed, at the end of the process at the latest, so a crash leaves no lock behind.
#[derive(Debug)]
struct PathLock {
    file: File,
    path: PathBuf,
}

impl PathLock {
    fn take(snapshot: &Path) -> Result<PathLock, SnapshotError> {
        let path = beside(snapshot, ".lock");
        let failed = |error| SnapshotError::Io { path: path.clone(), error };
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.open(&path).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            // On a file system without locks, go on without one.
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {}
            Err(TryLockError::Error(error)) => return Err(failed(error)),
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                let _ = file.take(20).read_to_string(&mut holder);
                return Err(SnapshotError::Held {
                    path: snapshot.to_owned(),
                    pid: holder.trim().parse().ok(),
                });
            }
        }
        // For the error message of a process that finds it locked.
        let pid = format!("{}\n", std::process::id());
        file.set_len(0).and_then(|()| file.write_all(pid.as_bytes())).map_err(failed)?;
        Ok(PathLock { file, path })
    }

    /// Whether other processes still find the locked file under its name. If it was removed, they would lock a new one.
    #[cfg(unix)]
    fn is_in_place(&self) -> bool {
        use std::os::unix::fs::MetadataExt as _;
        let locked = self.file.metadata().map(|file| (file.dev(), file.ino()));
        match (locked, fs::metadata(&self.path)) {
            (Ok(locked), Ok(found)) => locked == (found.dev(), found.ino()),
            (_, Err(error)) => error.kind() != io::ErrorKind::NotFound,
            (Err(_), _) => true,
        }
    }

    /// On these systems an open file cannot be removed.
    #[cfg(not(unix))]
    fn is_in_place(&self) -> bool {
        true
    }
}

/// Time since the last modification of a file; `None` if it does not exist.
fn age(path: &Path) -> Option<Duration> {
    fs::metadata(path).and_then(|file| file.modified()).ok()?.elapsed().ok()
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
