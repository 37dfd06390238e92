//! Writes the store to a snapshot file and reads it back, so that a restart keeps the counts.
//!
//! A snapshot is written to a temporary file next to its path, synced, and renamed into place: a crash at any moment
//! leaves the complete old file or the complete new one. It contains states by fingerprint, and the secrets that the
//! fingerprints are computed with, so only its owner may read it. It contains no policy: states of a removed limit
//! expire by themselves. Times are wall-clock times, so the time between two runs counts.
//!
//! ```text
//! "tollkeeper state 1\n"   secrets   records…   end, count, checksum
//! record: table, fingerprint, packed state, and the state outside of the table, if there is one
//! ```

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use tollkeeper_core::algorithm::concurrency::Slot;
use tollkeeper_core::algorithm::{State, sliding_log, sliding_window};
use tollkeeper_core::{Secret, Time, siphash};

use crate::clock::Clock;
use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::lock;

use super::shard::{Dropped, Shard};
use super::state::{Packed, StateKind};
use super::{Capacity, Inner, MemoryStore, Secrets};

const MAGIC: &[u8] = b"tollkeeper state ";
const VERSION: &[u8] = b"1\n";

/// The first byte of a record: the state of a key.
const KEY: u8 = 1;
/// The first byte of a record: a cell that several keys share.
const CELL: u8 = 2;
/// The first byte of a record: the marker of a corrected charge.
const MARKER: u8 = 3;
/// The first byte of a record: the overrides of the limiter, after their length. Only there if there are any.
const OVERRIDES: u8 = 4;
/// The byte after the last record.
const END: u8 = 0;

/// Why a snapshot could not be written or read.
#[non_exhaustive]
pub enum SnapshotError {
    /// The operating system reported an error.
    Io {
        /// The file.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
    /// The file is not a snapshot, is truncated, or has been modified.
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Another process saves to the file and holds its lock.
    Held {
        /// The file.
        path: PathBuf,
        /// The id of that process, if `PATH.lock` contains one.
        pid: Option<u32>,
    },
}

impl SnapshotError {
    /// The file.
    pub fn path(&self) -> &Path {
        let (SnapshotError::Io { path, .. }
        | SnapshotError::Foreign { path, .. }
        | SnapshotError::Held { path, .. }) = self;
        path
    }

    /// What went wrong, without the path.
    pub fn cause(&self) -> String {
        match self {
            SnapshotError::Io { error, .. } => error.to_string(),
            SnapshotError::Foreign { problem, .. } => (*problem).to_owned(),
            SnapshotError::Held { pid: Some(pid), .. } => format!("process {pid} saves to it"),
            SnapshotError::Held { pid: None, .. } => "another process saves to it".to_owned(),
        }
    }
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SnapshotError::Io { path, .. } => write!(f, "snapshot {}: {}", path.display(), self.cause()),
            SnapshotError::Foreign { path, .. } => write!(
                f,
                "snapshot {}: {} (it is not used: put back one that is whole, or start empty)",
                path.display(),
                self.cause()
            ),
            SnapshotError::Held { path, .. } => write!(
                f,
                "snapshot {}: {} (stop that process, or name another file)",
                path.display(),
                self.cause()
            ),
        }
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for SnapshotError {}

impl MemoryStore {
    /// Writes the store to a file, which is replaced. Returns the number of keys written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<usize, SnapshotError> {
        self.inner.save(path.as_ref())
    }

    /// Creates a store from a snapshot file. States that have expired since are left out.
    pub fn load(
        capacity: Capacity,
        clock: Clock,
        path: impl AsRef<Path>,
    ) -> Result<MemoryStore, SnapshotError> {
        let path = path.as_ref();
        let failed = |error| SnapshotError::Io { path: path.to_owned(), error };
        let file = File::open(path).map_err(failed)?;
        read(capacity, clock, BufReader::with_capacity(1 << 16, file)).map_err(|broken| match broken {
            Broken::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                SnapshotError::Foreign { path: path.to_owned(), problem: "it is cut off" }
            }
            Broken::Io(error) => failed(error),
            Broken::Foreign(problem) => SnapshotError::Foreign { path: path.to_owned(), problem },
        })
    }
}

impl Inner {
    pub(super) fn save(&self, path: &Path) -> Result<usize, SnapshotError> {
        // One save at a time: two would write to the same temporary file.
        let _saving = lock(&self.saving);
        let new = beside(path, ".new");
        self.write_to(&new)
            .and_then(|keys| {
                fs::rename(&new, path)?;
                // The rename survives a crash only after the directory has been synced.
                let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
                File::open(folder.unwrap_or(Path::new(".")))?.sync_all()?;
                Ok(keys)
            })
            .map_err(|error| {
                // An incomplete file is useless and takes up space on a disk that may be full.
                let _ = fs::remove_file(&new);
                SnapshotError::Io { path: path.to_owned(), error }
            })
    }

    fn write_to(&self, path: &Path) -> io::Result<usize> {
        // Remove a file that a crash has left: if it were reused, its mode would stay and might let others read it.
        let _ = fs::remove_file(path);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut out = Summed::new(BufWriter::with_capacity(1 << 16, options.open(path)?));
        out.write(MAGIC)?;
        out.write(VERSION)?;
        out.write(&self.secrets.prints.0)?;
        out.write(&self.secrets.receipts.0)?;
        let mut keys = 0;
        let mut records = Vec::new();
        for padded in &self.shards {
            // Copy under the lock, write to the file without it.
            records.clear();
            {
                let shard = &*lock(&padded.0);
                keys += shard.table.len();
                let states = shard.table.iter().map(|entry| (KEY, entry));
                let cells = shard.cells.iter().map(|entry| (CELL, entry));
                let markers = shard.markers.iter().map(|entry| (MARKER, entry));
                for (code, entry) in states.chain(cells).chain(markers) {
                    push_record(&mut records, shard, code, entry.print, entry.state);
                }
            }
            out.write(&records)?;
        }
        let saved = lock(&self.overrides).clone();
        let overrides = saved.map(|saved| saved.to_bytes()).unwrap_or_default();
        if !overrides.is_empty() {
            out.write(&[OVERRIDES])?;
            out.write(&(overrides.len() as u64).to_le_bytes())?;
            out.write(&overrides)?;
        }
        out.write(&[END])?;
        out.write(&(keys as u64).to_le_bytes())?;
        let sum = out.sum();
        out.inner.write_all(&sum.to_le_bytes())?;
        out.inner.flush()?;
        out.inner.get_ref().sync_all()?;
        Ok(keys)
    }
}

/// The path with a suffix appended: `/var/lib/state` and `.new` give `/var/lib/state.new`.
pub(super) fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

fn push_record(records: &mut Vec<u8>, shard: &Shard, table: u8, print: u128, packed: Packed) {
    records.push(table);
    records.extend_from_slice(&print.to_le_bytes());
    records.extend_from_slice(&packed.to_bits().to_le_bytes());
    let StateKind::Wide(_) = packed.kind() else { return };
    let (code, bytes) = match shard.beside(packed) {
        Some(State::SlidingLog(log)) => (b'l', log.clone()),
        Some(State::Concurrency(slots)) => {
            let numbers = slots.iter().flat_map(|slot| [slot.id, slot.taken, slot.expires]);
            (b's', numbers.flat_map(u64::to_le_bytes).collect())
        }
        Some(State::SlidingWindow(state)) => (
            b'w',
            [state.window, state.prev, state.cur].iter().flat_map(|number| number.to_le_bytes()).collect(),
        ),
        _ => unreachable!("no other state is outside of the table"),
    };
    records.push(code);
    records.extend_from_slice(&u32::try_from(bytes.len()).expect("a log is below 4 GiB").to_le_bytes());
    records.extend_from_slice(&bytes);
}

enum Broken {
    Io(io::Error),
    Foreign(&'static str),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Broken {
        Broken::Io(error)
    }
}

fn read(capacity: Capacity, clock: Clock, file: impl Read) -> Result<MemoryStore, Broken> {
    let mut file = Summed::new(file);
    if file.take::<17>()? != *MAGIC {
        return Err(Broken::Foreign("it is not a snapshot of Tollkeeper"));
    }
    if file.take::<2>()? != *VERSION {
        return Err(Broken::Foreign("it was written by another version, whose format is not known here"));
    }
    let secrets = Secrets { prints: Secret(file.take()?), receipts: Secret(file.take()?) };
    let now = clock.now();
    let store = MemoryStore::with_secrets(capacity, clock, secrets);
    let mut keys = 0u64;
    loop {
        let [code] = file.take()?;
        if code == END {
            break;
        }
        if code == OVERRIDES {
            let len = u64::from_le_bytes(file.take()?);
            let mut bytes = Vec::new();
            file.take_into(len, &mut bytes)?;
            store.save_overrides(std::sync::Arc::new(bytes));
            continue;
        }
        if ![KEY, CELL, MARKER].contains(&code) {
            return Err(Broken::Foreign("it holds something that is not known"));
        }
        keys += u64::from(code == KEY);
        let print = u128::from_le_bytes(file.take()?);
        if print == 0 {
            return Err(Broken::Foreign("it holds a fingerprint that no key has"));
        }
        let packed = Packed::from_bits(u128::from_le_bytes(file.take()?));
        let packed = packed.ok_or(Broken::Foreign("it holds a state that is not known"))?;
        let wide = match packed.kind() {
            StateKind::Wide(_) => Some(take_wide(&mut file)?),
            _ => None,
        };
        if packed.expires() > now {
            store.inner.restore(code, print, packed, wide, now);
        }
    }
    if u64::from_le_bytes(file.take()?) != keys {
        return Err(Broken::Foreign("it does not hold as many keys as it says"));
    }
    let sum = file.sum();
    let mut expected = [0; 16];
    file.inner.read_exact(&mut expected)?;
    if u128::from_le_bytes(expected) != sum {
        return Err(Broken::Foreign("it has been changed: its checksum is wrong"));
    }
    if file.inner.read(&mut [0])? > 0 {
        return Err(Broken::Foreign("it goes on behind its end"));
    }
    Ok(store)
}

impl Inner {
    fn restore(&self, code: u8, print: u128, packed: Packed, wide: Option<State>, now: Time) {
        let shard = &mut *self.shard(print);
        match code {
            MARKER => {
                shard.markers.set(print, now, packed.expires());
                self.markers.fetch_add(1, Relaxed);
            }
            CELL => shard.restore(|shard| &mut shard.cells, print, packed, wide),
            _ => {
                shard.restore(|shard| &mut shard.table, print, packed, wide);
                self.keys.fetch_add(1, Relaxed);
            }
        }
        self.account(shard, Dropped(0));
    }
}

fn take_wide(file: &mut Summed<impl Read>) -> Result<State, Broken> {
    let [code] = file.take()?;
    let len = u32::from_le_bytes(file.take()?);
    // Do not allocate `len` bytes in advance: a corrupt length must not exhaust memory.
    let mut bytes = Vec::new();
    file.take_into(u64::from(len), &mut bytes)?;
    let numbers: Vec<u64> =
        bytes.chunks_exact(8).map(|chunk| u64::from_le_bytes(chunk.try_into().expect("eight"))).collect();
    match code {
        b'l' if bytes.len().is_multiple_of(sliding_log::STAMP) => Ok(State::SlidingLog(bytes)),
        b's' if bytes.len().is_multiple_of(24) => Ok(State::Concurrency(
            numbers
                .chunks_exact(3)
                .map(|slot| Slot { id: slot[0], taken: slot[1], expires: slot[2] })
                .collect(),
        )),
        b'w' if bytes.len() == 24 => Ok(State::SlidingWindow(sliding_window::State {
            window: numbers[0],
            prev: numbers[1],
            cur: numbers[2],
        })),
        _ => Err(Broken::Foreign("it holds a state that is not known")),
    }
}

/// A file with a running checksum of the bytes written or read.
struct Summed<F> {
    inner: F,
    block: Vec<u8>,
    sum: u128,
}

const BLOCK: usize = 1 << 16;

impl<F> Summed<F> {
    fn new(inner: F) -> Summed<F> {
        Summed { inner, block: Vec::with_capacity(BLOCK), sum: 0 }
    }

    fn add(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let (head, tail) = rest.split_at(rest.len().min(BLOCK - self.block.len()));
            self.block.extend_from_slice(head);
            if self.block.len() == BLOCK {
                self.sum();
            }
            rest = tail;
        }
    }

    /// The checksum of all bytes so far. Each block is hashed with the checksum of the blocks before it as the key.
    fn sum(&mut self) -> u128 {
        self.sum = siphash::hash(&Secret(self.sum.to_le_bytes()), &self.block);
        self.block.clear();
        self.sum
    }
}

impl<F: Write> Summed<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.add(bytes);
        self.inner.write_all(bytes)
    }
}

impl<F: Read> Summed<F> {
    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.inner.read_exact(&mut bytes)?;
        self.add(&bytes);
        Ok(bytes)
    }

    fn take_into(&mut self, len: u64, bytes: &mut Vec<u8>) -> io::Result<()> {
        let read = (&mut self.inner).take(len).read_to_end(bytes)?;
        self.add(bytes);
        if read as u64 == len { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}
