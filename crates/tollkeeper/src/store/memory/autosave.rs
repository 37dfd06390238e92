//! Saves the store from time to time and once more at its end, and keeps other processes from its file.

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
    /// The file.
    pub path: PathBuf,
    /// The time between two.
    pub every: Duration,
}

impl Snapshots {
    /// Every ten seconds to this file.
    pub fn to(path: impl Into<PathBuf>) -> Snapshots {
        Snapshots { path: path.into(), every: Duration::from_secs(10) }
    }
}

/// What became of the last run's states.
#[derive(Debug)]
pub enum Restored {
    /// There was no file: the store starts empty.
    Nothing,
    /// The store goes on with so many keys.
    Keys(usize),
    /// The file was refused, and the store starts empty. It has been moved to `PATH.refused`, so that
    /// the next snapshot does not overwrite what somebody may want to look at.
    Refused(SnapshotError),
}

/// How saving goes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotStatus {
    /// The file.
    pub path: PathBuf,
    /// Time since the newest good snapshot, such as 7 s; since the start if there is none yet.
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
pub(super) struct Keeper {
    snapshots: Snapshots,
    /// The process that opened the store. A forked process has a copy, which is not saved.
    process: u32,
    /// Held from the start, or from when it can be; `None` once saving has ended too.
    lock: Mutex<Option<PathLock>>,
    health: Mutex<Health>,
    turn: Arc<Turn>,
}

/// Tells the thread that saves when to stop.
#[derive(Debug, Default)]
struct Turn {
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
    /// A store that goes on where the last one stopped, and is saved from time to time and when the
    /// last clone of it is dropped, or [closed](MemoryStore::close).
    ///
    /// While it is open it holds a lock on `PATH.lock`: an error is a file that another process (or another store
    /// of this one) saves to. Storage that cannot be written now is not an error, because it may be later:
    /// [`MemoryStore::snapshots`] tells.
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
                // A folder that stands there by mistake is not ours to move, and no snapshot overwrites it.
                if snapshots.path.is_file() {
                    // If even that fails, the message still says what was wrong with the file.
                    let _ = fs::rename(&snapshots.path, beside(&snapshots.path, ".refused"));
                }
                (MemoryStore::new(capacity, clock), Restored::Refused(refused))
            }
        };
        let age = if let Restored::Keys(_) = restored { age } else { None };
        let newest = Newest { age: age.unwrap_or_default(), seen: Instant::now() };
        let health = Mutex::new(Health { failures: 0, failing: false, last_failure: None, newest });
        let process = std::process::id();
        let mut keeper = Keeper { snapshots, process, lock: Mutex::default(), health, turn: Arc::default() };
        match lock {
            Ok(lock) => keeper.lock = Mutex::new(Some(lock)),
            Err(error) => keeper.report(Some(&error)),
        }
        assert!(store.inner.keeper.set(keeper).is_ok(), "a new store has no keeper");
        store.inner.keeper.get().expect("set above").start(Arc::downgrade(&store.inner));
        Ok((store, restored))
    }

    /// How saving goes; `None` if the store is not saved.
    pub fn snapshots(&self) -> Option<SnapshotStatus> {
        let keeper = self.inner.keeper.get()?;
        let health = held(&keeper.health);
        Some(SnapshotStatus {
            path: keeper.snapshots.path.clone(),
            age: health.newest.age + health.newest.seen.elapsed(),
            failures: health.failures,
            failing: health.failing,
            last_failure: health.last_failure.clone(),
        })
    }

    /// Saves a last time, and gives the file free. What is charged after this is not saved. Does nothing for a
    /// store that is not saved, or was closed before, and in a process that was forked after it was opened.
    pub fn close(&self) -> Result<(), SnapshotError> {
        self.inner.keeper.get().map_or(Ok(()), |keeper| keeper.stop(&self.inner))
    }
}

impl Keeper {
    fn start(&self, store: Weak<Inner>) {
        let (every, turn) = (self.snapshots.every, Arc::clone(&self.turn));
        let save = move || {
            while !turn.wait(every) {
                let Some(inner) = store.upgrade() else { return };
                // What went wrong is reported.
                let _ = inner.keeper.get().map(|keeper| keeper.save(&inner, Attempt::Periodic));
            }
        };
        let thread = thread::Builder::new().name("tollkeeper-snapshots".to_owned()).spawn(save);
        if let Err(error) = thread {
            self.report(Some(&SnapshotError::Io { path: self.snapshots.path.clone(), error }));
        }
    }

    /// One last time, then no more.
    pub(super) fn stop(&self, inner: &Inner) -> Result<(), SnapshotError> {
        // A forked process has neither the thread that saves nor a right to the file.
        if self.process != std::process::id() {
            return Ok(());
        }
        if std::mem::replace(&mut *held(&self.turn.stopped), true) {
            return Ok(());
        }
        self.turn.changed.notify_all();
        let saved = self.save(inner, Attempt::Last);
        held(&self.lock).take();
        saved
    }

    fn save(&self, inner: &Inner, attempt: Attempt) -> Result<(), SnapshotError> {
        let mut lock = held(&self.lock);
        // One that comes after the last would take the file again.
        if attempt == Attempt::Periodic && *held(&self.turn.stopped) {
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

    /// Counts an attempt to save, which may have failed.
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

impl Turn {
    /// Waits for the next time; true when there will be none.
    fn wait(&self, every: Duration) -> bool {
        let stopped = held(&self.stopped);
        let waited = self.changed.wait_timeout_while(stopped, every, |stopped| !*stopped);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// The lock on a snapshot: on a file of its own, because the snapshot is replaced each time. It is given back
/// when the file is closed, at the end of the process at the latest, so a crash leaves none behind.
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
            // Where files cannot be locked there is nothing to hold.
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
        // For the message of a process that finds it locked.
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

    /// A file that is open cannot be removed.
    #[cfg(not(unix))]
    fn is_in_place(&self) -> bool {
        true
    }
}

/// How long ago a file was written, if there is one.
fn age(path: &Path) -> Option<Duration> {
    fs::metadata(path).and_then(|file| file.modified()).ok()?.elapsed().ok()
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
