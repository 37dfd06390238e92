//! Saves the store from time to time, and once more when it is dropped.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use crate::clock::Clock;

use super::snapshot::SnapshotError;
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

/// Tells the thread that saves when to stop, and everybody how saving went.
#[derive(Debug)]
pub(super) struct Keeper {
    snapshots: Snapshots,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    stopped: Mutex<bool>,
    changed: Condvar,
    failed: Mutex<Option<SnapshotError>>,
}

impl MemoryStore {
    /// A store that goes on where the last one stopped, and is saved from time to time and when the
    /// last clone of it is dropped.
    pub fn open(capacity: Capacity, clock: Clock, snapshots: Snapshots) -> (MemoryStore, Restored) {
        let (store, restored) = match MemoryStore::load(capacity, clock.clone(), &snapshots.path) {
            Ok(store) => {
                let keys = store.keys();
                (store, Restored::Keys(keys))
            }
            Err(SnapshotError::Io { error, .. }) if error.kind() == std::io::ErrorKind::NotFound => {
                (MemoryStore::new(capacity, clock), Restored::Nothing)
            }
            Err(refused) => {
                // A folder that stands there by mistake is not ours to move, and no snapshot overwrites it.
                if snapshots.path.is_file() {
                    let mut aside = snapshots.path.clone().into_os_string();
                    aside.push(".refused");
                    // If even that fails, the message below still says what was wrong with the file.
                    let _ = std::fs::rename(&snapshots.path, aside);
                }
                (MemoryStore::new(capacity, clock), Restored::Refused(refused))
            }
        };
        let keeper = Keeper { snapshots, shared: Arc::default() };
        keeper.start(Arc::downgrade(&store.inner));
        assert!(store.inner.keeper.set(keeper).is_ok(), "a new store has no keeper");
        (store, restored)
    }

    /// What went wrong with the last snapshot, if anything did.
    pub fn snapshot_error(&self) -> Option<String> {
        let keeper = self.inner.keeper.get()?;
        let failed = keeper.shared.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.as_ref().map(ToString::to_string)
    }
}

impl Keeper {
    fn start(&self, store: Weak<Inner>) {
        let (snapshots, shared) = (self.snapshots.clone(), Arc::clone(&self.shared));
        let save = move || {
            while !shared.wait(snapshots.every) {
                let Some(inner) = store.upgrade() else { return };
                shared.report(inner.save(&snapshots.path).err());
            }
        };
        let thread = thread::Builder::new().name("tollkeeper-snapshots".to_owned()).spawn(save);
        if let Err(error) = thread {
            self.shared.report(Some(SnapshotError::Io { path: self.snapshots.path.clone(), error }));
        }
    }

    /// The store is gone: one last time, then no more.
    pub(super) fn stop(&self, inner: &Inner) {
        *self.shared.stopped.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.shared.changed.notify_all();
        self.shared.report(inner.save(&self.snapshots.path).err());
    }
}

impl Shared {
    /// Waits for the next time; true when there will be none.
    fn wait(&self, every: Duration) -> bool {
        let stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(stopped, every, |stopped| !*stopped);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn report(&self, error: Option<SnapshotError>) {
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = error;
    }
}
