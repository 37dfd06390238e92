//! Snapshots: a restart keeps the counts, and a damaged file is refused with a clear message.

#![expect(clippy::unwrap_used, reason = "test helpers may panic like tests")]

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use support::*;
use tollkeeper::{
    Algorithm, Capacity, Clock, Correction, Facts, Limit, Limiter, ManualClock, MemoryStore, Outcome, Quota,
    Restored, SnapshotError, Snapshots, facts,
};

/// A temporary folder, deleted when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static CREATED: AtomicU64 = AtomicU64::new(0);
        let number = CREATED.fetch_add(1, Relaxed);
        let path =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("snapshot-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self) -> PathBuf {
        self.0.join("state")
    }

    /// The sorted names of its files.
    fn names(&self) -> Vec<String> {
        let names =
            fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort_unstable();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn load(max_keys: usize, clock: &ManualClock, path: &Path) -> Result<MemoryStore, SnapshotError> {
    MemoryStore::load(Capacity { max_keys, ..Capacity::default() }, Clock::manual(clock), path)
}

/// Saves the store and loads it from the file, as a restart does.
fn restarted(store: &MemoryStore, max_keys: usize, clock: &ManualClock) -> MemoryStore {
    let folder = Folder::new();
    assert_eq!(store.save(folder.file()).unwrap(), store.keys());
    load(max_keys, clock, &folder.file()).unwrap()
}

/// One limit for each state format of a snapshot.
fn every_kind() -> Vec<Limit> {
    let mut limits: Vec<Limit> = RATES.map(ten).into();
    limits.extend([
        Limit::new("staggered", Quota::per_day(10)).by("user").algorithm(Algorithm::FixedWindow).stagger(),
        // Counts of 2^27 or more do not fit into a packed state.
        Limit::new("vast", Quota::per_hour(600_000_000)).by("user").cost("bytes"),
        Limit::new("slots", Quota::slots(3)).by("user").ttl(Duration::from_secs(60)),
    ]);
    limits
}

fn facts_of(name: &str) -> Facts<'_> {
    facts! { "user" => name, "bytes" => 200_000_000 }
}

/// The current outcome of every limit for a user.
fn outcomes(limiter: &Limiter, name: &str) -> Vec<Outcome> {
    limiter.usage(&facts_of(name)).wait().unwrap().limits().map(|limit| limit.outcome()).collect()
}

#[test]
fn snapshot_restores_every_algorithm() {
    let clock = clock();
    let store = store(1_000, &clock);
    let limiter = on(&store, every_kind());
    let users: Vec<String> = (0..20).map(|number| format!("user{number}")).collect();
    for (number, name) in users.iter().enumerate() {
        for _ in 0..=number % 3 {
            let acquired = now(limiter.acquire(&facts_of(name))).unwrap();
            assert!(acquired.decision.allowed());
            acquired.slot.unwrap().keep();
            clock.advance(millis(700));
        }
    }
    let reloaded = on(&restarted(&store, 1_000, &clock), every_kind());
    for pause in [0, 1, 20, 45, 60, 3_600] {
        clock.advance(secs(pause));
        for name in &users {
            assert_eq!(outcomes(&reloaded, name), outcomes(&limiter, name), "{name} after {pause} s");
        }
    }
    assert_eq!(outcomes(&reloaded, "unknown"), outcomes(&limiter, "unknown"));
}

/// The totals are the numbers of keys and of log bytes.
#[test]
fn restored_store_has_its_totals_and_can_be_saved() {
    let clock = clock();
    let mut store = store(1_000, &clock);
    let limiter = on(&store, every_kind());
    for number in 0..50 {
        now(limiter.acquire(&facts_of(&format!("user{number}")))).unwrap().slot.unwrap().keep();
    }
    assert_eq!(store.keys(), 50 * 8);
    for _ in 0..3 {
        let reloaded = restarted(&store, 1_000, &clock);
        assert_eq!(reloaded.keys(), store.keys());
        assert!(
            (50 * 7..50 * 14).contains(&reloaded.log_bytes()),
            "fifty timestamps take {} bytes",
            reloaded.log_bytes()
        );
        store = reloaded;
    }
    let reloaded = on(&store, every_kind());
    assert_eq!(outcomes(&reloaded, "user7"), outcomes(&limiter, "user7"));
    clock.advance(secs(3 * 86_400));
    store.sweep();
    assert_eq!((store.keys(), store.log_bytes()), (0, 0));
}

#[test]
fn a_restart_keeps_refusals() {
    for algorithm in RATES {
        let clock = clock();
        let store = store(1_000, &clock);
        let limiter = on(&store, [ten(algorithm)]);
        charge(&limiter, &user("alice"), 10);
        let before = charge(&limiter, &user("alice"), 1);
        clock.advance(secs(1));
        let reloaded = on(&restarted(&store, 1_000, &clock), [ten(algorithm)]);
        let after = charge(&reloaded, &user("alice"), 1);
        assert!(!after.allowed(), "{algorithm}");
        let (before, after) = (before.retry_after().unwrap(), after.retry_after().unwrap());
        assert_eq!(
            after.as_micros() + 1_000_000,
            before.as_micros(),
            "{algorithm}: the second in between counts"
        );
        assert!(charge(&reloaded, &user("bob"), 10).allowed(), "{algorithm}");
    }
}

#[test]
fn time_passes_while_the_process_is_down() {
    let clock = clock();
    let store = store(1_000, &clock);
    let limiter = on(&store, every_kind());
    now(limiter.acquire(&facts_of("alice"))).unwrap().slot.unwrap().keep();
    let folder = Folder::new();
    store.save(folder.file()).unwrap();
    let after = |span| {
        let clock = ManualClock::new(START + span);
        let store = load(1_000, &clock, &folder.file()).unwrap();
        let limiter = on(&store, every_kind());
        let left = |name: &str| remaining(&limiter, name, &facts_of("alice"));
        (store.keys(), left("token-bucket"), left("fixed-window"), left("slots"), left("staggered"))
    };
    assert_eq!(after(secs(0)), (8, 9, 9, 2, 9));
    assert_eq!(after(secs(7)), (6, 10, 9, 2, 9), "the buckets are full again, so they are not loaded");
    assert_eq!(after(secs(61)), (3, 10, 10, 3, 9), "new windows have begun, and the slot has expired");
    assert_eq!(after(secs(2 * 86_400)), (0, 10, 10, 3, 10));
}

#[test]
fn charges_slots_and_refunds_survive_a_restart() {
    let clock = clock();
    let store = store(1_000, &clock);
    let limits = || [ten(Algorithm::FixedWindow), ten(Algorithm::SlidingLog)];
    let limiter = on(&store, limits().into_iter().chain([slots()]));
    let text = |cost| limiter.seal_charge(&charge(&limiter, &user("alice"), cost).charge().unwrap());
    let (refunded, open) = (text(2), text(3));
    assert_eq!(
        now(limiter.refund(&limiter.open_charge(&refunded).wait().unwrap().unwrap())),
        Correction::Done
    );
    let slot = now(limiter.acquire(&user("bob"))).unwrap().slot.unwrap().keep();
    let slot = limiter.seal_slot(&slot);
    clock.advance(secs(1));

    let reloaded = on(&restarted(&store, 1_000, &clock), limits().into_iter().chain([slots()]));
    let refund = |text: &str| {
        now(reloaded.refund(&reloaded.open_charge(text).wait().unwrap().expect("the secret is in the file")))
    };
    assert_eq!(refund(&refunded), Correction::Repeated);
    assert_eq!(remaining(&reloaded, "fixed-window", &user("alice")), 7);
    assert_eq!(refund(&open), Correction::Done);
    assert_eq!(refund(&open), Correction::Repeated);
    for limit in ["fixed-window", "sliding-log"] {
        assert_eq!(remaining(&reloaded, limit, &user("alice")), 10);
    }
    let slot = reloaded.open_slot(&slot).wait().unwrap().expect("the secret is in the file");
    assert_eq!(remaining(&reloaded, "slots", &user("bob")), 1);
    assert!(
        now(reloaded.renew(&slot)).unwrap()
            && now(reloaded.release(&slot)).unwrap()
            && !now(reloaded.release(&slot)).unwrap()
    );
    assert_eq!(remaining(&reloaded, "slots", &user("bob")), 2);
}

fn slots() -> Limit {
    Limit::new("slots", Quota::slots(2)).by("user").ttl(Duration::from_secs(60))
}

#[test]
fn refunded_charge_stays_refunded_after_a_restart() {
    let clock = clock();
    let store = store(10_000, &clock);
    let limiter = on(&store, [ten(Algorithm::FixedWindow)]);
    let paid: Vec<_> = (0..100)
        .map(|number| charge(&limiter, &user(&format!("user{number}")), 1).charge().unwrap())
        .inspect(|charge| assert_eq!(now(limiter.refund(charge)), Correction::Done))
        .collect();
    clock.advance(secs(1));
    let reloaded = on(&restarted(&store, 10_000, &clock), [ten(Algorithm::FixedWindow)]);
    assert!(paid.iter().all(|charge| now(reloaded.refund(charge)) == Correction::Repeated));
}

#[test]
fn charge_ids_are_unique_across_restarts() {
    let clock = clock();
    let store = store(1_000, &clock);
    let limiter = on(&store, [ten(Algorithm::FixedWindow)]);
    for _ in 0..5 {
        let paid = charge(&limiter, &user("alice"), 1).charge().unwrap();
        assert_eq!(now(limiter.refund(&paid)), Correction::Done);
    }
    clock.advance(millis(1));
    let reloaded = on(&restarted(&store, 1_000, &clock), [ten(Algorithm::FixedWindow)]);
    for _ in 0..5 {
        let paid = charge(&reloaded, &user("alice"), 1).charge().unwrap();
        assert_eq!(now(reloaded.refund(&paid)), Correction::Done, "it has a charge id of its own");
    }
}

#[test]
fn restored_markers_count_towards_the_cap() {
    let clock = clock();
    let store = store(2, &clock);
    let limiter = on(&store, [ten(Algorithm::FixedWindow)]);
    let refund = |limiter: &Limiter, name: &str| {
        let paid = charge(limiter, &user(name), 1).charge().unwrap();
        now(limiter.refund(&paid))
    };
    assert_eq!(refund(&limiter, "a"), Correction::Done);
    assert_eq!(refund(&limiter, "b"), Correction::Done);
    clock.advance(millis(1));
    let reloaded = on(&restarted(&store, 2, &clock), [ten(Algorithm::FixedWindow)]);
    assert_eq!(refund(&reloaded, "c"), Correction::Full, "two of two markers are used");
    clock.advance(secs(60 + 8));
    assert_eq!(refund(&reloaded, "d"), Correction::Done);
}

#[test]
fn shared_states_survive_a_restart() {
    for algorithm in
        [Algorithm::TokenBucket, Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog]
    {
        let clock = clock();
        let store = store(1, &clock);
        let limiter = on(&store, [ten(algorithm)]);
        charge(&limiter, &user("own"), 10);
        charge(&limiter, &user("shares"), 8);
        assert_eq!((store.keys(), store.overflows()), (1, 1));
        let store = restarted(&store, 1, &clock);
        let reloaded = on(&store, [ten(algorithm)]);
        assert_eq!(store.keys(), 1, "{algorithm}: a shared state is not a key");
        assert_eq!(remaining(&reloaded, algorithm.name(), &user("own")), 0, "{algorithm}");
        let outcome = charge(&reloaded, &user("another"), 2).limits().next().unwrap().outcome();
        assert!(outcome.allowed && outcome.overflow && outcome.remaining == 0, "{algorithm}: {outcome:?}");
        assert!(!charge(&reloaded, &user("shares"), 1).allowed(), "{algorithm}");
    }
}

/// The bytes of a small snapshot with a record of every kind.
fn small_file() -> Vec<u8> {
    let folder = Folder::new();
    let clock = clock();
    let store = store(12, &clock);
    let limiter = on(&store, every_kind());
    let acquired = now(limiter.acquire(&facts_of("alice"))).unwrap();
    let paid = acquired.decision.charge().unwrap();
    acquired.slot.unwrap().keep();
    // Half the keys of another user fit, the rest overflow into shared states.
    now(limiter.acquire(&facts_of("bob"))).unwrap().slot.unwrap().keep();
    assert!(store.overflows() > 0);
    let one = on(&store, [ten(Algorithm::FixedWindow)]);
    let paid_one = charge(&one, &user("alice"), 1).charge().unwrap();
    let _ = (now(limiter.refund(&paid)), now(one.refund(&paid_one)));
    store.save(folder.file()).unwrap();
    fs::read(folder.file()).unwrap()
}

const PROBLEMS: [&str; 7] = [
    "it is cut off",
    "it is not a snapshot of Tollkeeper",
    "it was written by another version, whose format is not known here",
    "it holds something that is not known",
    "it holds a fingerprint that no key has",
    "it holds a state that is not known",
    "it does not hold as many keys as it says",
];
const CHECKSUM: &str = "it has been changed: its checksum is wrong";

fn problem(bytes: &[u8], file: &Path) -> &'static str {
    fs::write(file, bytes).unwrap();
    match load(1_000, &clock(), file) {
        Err(SnapshotError::Foreign { problem, .. }) => problem,
        Err(other) => panic!("{other}"),
        Ok(_) => "",
    }
}

#[test]
fn truncated_snapshot_is_rejected() {
    let folder = Folder::new();
    let complete = small_file();
    assert_eq!(problem(&complete, &folder.file()), "", "the complete file is loaded");
    for len in 0..complete.len() {
        assert_eq!(
            problem(&complete[..len], &folder.file()),
            "it is cut off",
            "{len} of {} bytes",
            complete.len()
        );
    }
}

#[test]
fn snapshot_with_a_changed_byte_is_rejected() {
    let folder = Folder::new();
    let complete = small_file();
    for index in 0..complete.len() {
        for mask in [0x01, 0x80, 0xff] {
            let mut bytes = complete.clone();
            bytes[index] ^= mask;
            let found = problem(&bytes, &folder.file());
            assert!(found == CHECKSUM || PROBLEMS.contains(&found), "byte {index} ^ {mask:#x}: {found:?}");
        }
    }
}

/// A fingerprint of zero marks an empty entry of a table, so it must not be loaded.
#[test]
fn snapshot_with_a_zero_fingerprint_is_rejected() {
    let folder = Folder::new();
    let mut bytes = small_file();
    // After the header of 19 bytes, two secrets of 32 bytes together, and the byte that names the table.
    bytes[19 + 32 + 1..][..16].fill(0);
    assert_eq!(problem(&bytes, &folder.file()), "it holds a fingerprint that no key has");
}

#[test]
fn snapshot_with_trailing_bytes_is_rejected() {
    let folder = Folder::new();
    let mut bytes = small_file();
    bytes.push(0);
    assert_eq!(problem(&bytes, &folder.file()), "it goes on behind its end");
}

#[test]
fn refused_snapshot_is_moved_and_the_store_starts_empty() {
    let check = |bytes: &[u8], problem: &str| {
        let folder = Folder::new();
        fs::write(folder.file(), bytes).unwrap();
        let clock = clock();
        let (store, restored) =
            MemoryStore::open(Capacity::default(), Clock::manual(&clock), Snapshots::to(folder.file()))
                .unwrap();
        let Restored::Refused(error) = restored else { panic!("{restored:?}") };
        let path = folder.file().display().to_string();
        let expected = format!(
            "snapshot {path}: {problem} (it is not used: put back one that is whole, or start empty)"
        );
        assert_eq!(error.to_string(), expected);
        assert_eq!(store.keys(), 0);
        assert_eq!(
            fs::read(folder.0.join("state.refused")).unwrap(),
            bytes,
            "the refused file is kept for inspection"
        );
        assert!(charge(&on(&store, [ten(Algorithm::FixedWindow)]), &user("alice"), 10).allowed());
        drop(store);
        assert_eq!(load(1_000, &clock, &folder.file()).unwrap().keys(), 1, "the next snapshot is valid");
    };
    let complete = small_file();
    let mut changed = complete.clone();
    let last = changed.len() - 1;
    changed[last] ^= 1;
    let mut newer = complete.clone();
    newer[17] = b'2';
    check(b"", "it is cut off");
    check(&complete[..complete.len() / 2], "it is cut off");
    check(b"#!/bin/sh\necho this is a script and no snapshot\n", "it is not a snapshot of Tollkeeper");
    check(&newer, "it was written by another version, whose format is not known here");
    check(&changed, CHECKSUM);
}

#[test]
fn folder_at_the_snapshot_path_is_not_replaced() {
    let folder = Folder::new();
    fs::create_dir(folder.file()).unwrap();
    fs::write(folder.file().join("precious"), "data").unwrap();
    let (store, restored) =
        MemoryStore::open(Capacity::default(), Clock::manual(&clock()), Snapshots::to(folder.file()))
            .unwrap();
    let Restored::Refused(error) = restored else { panic!("{restored:?}") };
    let path = folder.file().display().to_string();
    assert_eq!(error.to_string(), format!("snapshot {path}: Is a directory (os error 21)"));
    assert!(charge(&on(&store, [ten(Algorithm::FixedWindow)]), &user("alice"), 10).allowed());
    let error = store.save(folder.file()).expect_err("a folder is not overwritten");
    assert!(error.to_string().starts_with(&format!("snapshot {path}: ")), "{error}");
    drop(store);
    assert_eq!(fs::read(folder.file().join("precious")).unwrap(), b"data");
}

#[test]
fn snapshot_write_error_names_file_and_cause() {
    let folder = Folder::new();
    let store = store(10, &clock());
    let missing = folder.0.join("missing/state");
    let error = store.save(&missing).expect_err("the folder does not exist");
    let path = missing.display();
    assert_eq!(error.to_string(), format!("snapshot {path}: No such file or directory (os error 2)"));
    fs::write(folder.file(), "a file").unwrap();
    let below = folder.file().join("state");
    let error = store.save(&below).expect_err("the parent is a file");
    assert_eq!(error.to_string(), format!("snapshot {}: Not a directory (os error 20)", below.display()));
    let error = load(10, &clock(), &missing).expect_err("the file does not exist");
    assert_eq!(error.to_string(), format!("snapshot {path}: No such file or directory (os error 2)"));
}

#[test]
fn failed_snapshot_keeps_the_previous_one() {
    let folder = Folder::new();
    let clock = clock();
    let store = store(10, &clock);
    let limiter = on(&store, [ten(Algorithm::FixedWindow)]);
    charge(&limiter, &user("alice"), 4);
    store.save(folder.file()).unwrap();
    charge(&limiter, &user("alice"), 4);
    // A folder blocks the path of the temporary file.
    fs::create_dir(folder.0.join("state.new")).unwrap();
    store.save(folder.file()).expect_err("the temporary file cannot be created");
    let reloaded = on(&load(10, &clock, &folder.file()).unwrap(), [ten(Algorithm::FixedWindow)]);
    assert_eq!(remaining(&reloaded, "fixed-window", &user("alice")), 6);
}

#[cfg(unix)]
#[test]
fn only_its_owner_can_read_a_snapshot() {
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let folder = Folder::new();
    let store = store(10, &clock());
    store.save(folder.file()).unwrap();
    assert_eq!(mode(&folder.file()), 0o600);
    assert_eq!(folder.names(), ["state"], "no temporary file is left");
    // A temporary file left by another user, with wider permissions, does not change that.
    let beside = folder.0.join("state.new");
    fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o666).open(&beside).unwrap();
    fs::set_permissions(&beside, fs::Permissions::from_mode(0o666)).unwrap();
    store.save(folder.file()).unwrap();
    assert_eq!(mode(&folder.file()), 0o600);
}

#[test]
fn store_is_saved_when_its_last_clone_is_dropped() {
    let folder = Folder::new();
    let clock = clock();
    let open = || {
        let snapshots = Snapshots::to(folder.file());
        MemoryStore::open(Capacity::default(), Clock::manual(&clock), snapshots).unwrap()
    };
    let (store, restored) = open();
    assert!(matches!(restored, Restored::Nothing), "{restored:?}");
    let limiter = on(&store, [ten(Algorithm::FixedWindow)]);
    charge(&limiter, &user("alice"), 7);
    drop(store);
    assert!(!folder.file().exists(), "the limiter still holds the store");
    drop(limiter);
    for left in [3, 2, 1] {
        let (store, restored) = open();
        assert!(matches!(restored, Restored::Keys(1)), "{restored:?}");
        let limiter = on(&store, [ten(Algorithm::FixedWindow)]);
        assert_eq!(remaining(&limiter, "fixed-window", &user("alice")), left);
        charge(&limiter, &user("alice"), 1);
        assert_eq!(store.snapshots().unwrap().failures, 0);
    }
}

/// Yields to other threads until the condition holds; fails after a minute.
fn until(condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "the condition did not hold within a minute");
        std::thread::yield_now();
    }
}

#[test]
fn store_is_saved_periodically() {
    let folder = Folder::new();
    let clock = clock();
    let snapshots = Snapshots { path: folder.file(), every: Duration::from_millis(1) };
    let (store, _) = MemoryStore::open(Capacity::default(), Clock::manual(&clock), snapshots).unwrap();
    let limiter = on(&store, [ten(Algorithm::FixedWindow)]);
    until(|| folder.file().exists());
    for left in (0..10).rev() {
        charge(&limiter, &user("alice"), 1);
        until(|| {
            let saved = on(
                &load(10, &clock, &folder.file()).expect("the file is complete at any time"),
                [ten(Algorithm::FixedWindow)],
            );
            remaining(&saved, "fixed-window", &user("alice")) == left
        });
    }
}

#[test]
fn a_failed_snapshot_is_reported_until_one_succeeds() {
    let folder = Folder::new();
    let path = folder.0.join("later/state");
    let snapshots = Snapshots { path: path.clone(), every: Duration::from_millis(1) };
    let (store, restored) =
        MemoryStore::open(Capacity::default(), Clock::manual(&clock()), snapshots).unwrap();
    assert!(matches!(restored, Restored::Nothing), "{restored:?}");
    let status = || store.snapshots().unwrap();
    assert!(status().failing, "reported at once, before the first snapshot is due");
    until(|| status().failures >= 3);
    assert_eq!(status().last_failure.as_deref(), Some("No such file or directory (os error 2)"));
    assert_eq!(status().path, path);
    let before = status().age;
    fs::create_dir(folder.0.join("later")).unwrap();
    until(|| !status().failing);
    assert!(path.exists() && status().failures >= 3 && before > Duration::ZERO);
    assert_eq!(MemoryStore::default().snapshots(), None, "a store that is not saved has no status");
}

#[test]
fn snapshot_age_is_that_of_the_last_success() {
    let folder = Folder::new();
    store(10, &clock()).save(folder.file()).unwrap();
    let hour = Duration::from_secs(3_600);
    let written = std::time::SystemTime::now() - hour;
    fs::File::options().write(true).open(folder.file()).unwrap().set_modified(written).unwrap();
    let snapshots = Snapshots { path: folder.file(), every: hour };
    let (store, restored) =
        MemoryStore::open(Capacity::default(), Clock::manual(&clock()), snapshots).unwrap();
    assert!(matches!(restored, Restored::Keys(0)), "{restored:?}");
    let age = || store.snapshots().unwrap().age;
    assert!(age() >= hour, "{:?}: the snapshot of the previous run counts", age());
    store.close().unwrap();
    assert!(age() < hour, "{:?}", age());
}

#[test]
fn snapshot_file_in_use_is_not_opened() {
    let folder = Folder::new();
    let open = || {
        let snapshots = Snapshots { path: folder.file(), every: Duration::from_secs(3_600) };
        MemoryStore::open(Capacity::default(), Clock::manual(&clock()), snapshots)
    };
    let (first, _) = open().unwrap();
    let error = open().unwrap_err();
    let pid = std::process::id();
    assert!(matches!(error, SnapshotError::Held { pid: Some(holder), .. } if holder == pid), "{error:?}");
    let expected = format!(
        "snapshot {}: process {pid} saves to it (stop that process, or name another file)",
        folder.file().display()
    );
    assert_eq!(error.to_string(), expected);
    assert!(first.save(folder.file()).is_ok(), "the holder of the lock may save");
    // Closing releases the lock at once, although the store still exists; dropping releases it, too.
    first.close().unwrap();
    let (second, _) = open().unwrap();
    drop(second);
    drop(open().unwrap());
}

#[test]
fn closed_store_is_not_saved_again() {
    let folder = Folder::new();
    let clock = clock();
    let (store, _) =
        MemoryStore::open(Capacity::default(), Clock::manual(&clock), Snapshots::to(folder.file())).unwrap();
    let limiter = on(&store, [ten(Algorithm::FixedWindow)]);
    charge(&limiter, &user("alice"), 7);
    store.close().unwrap();
    charge(&limiter, &user("alice"), 1);
    fs::remove_file(folder.file()).unwrap();
    store.close().unwrap();
    drop((store, limiter));
    assert!(!folder.file().exists());
}

#[test]
fn close_reports_a_failed_save() {
    let folder = Folder::new();
    let snapshots = Snapshots { path: folder.0.join("gone/state"), every: Duration::from_secs(3_600) };
    let (store, _) = MemoryStore::open(Capacity::default(), Clock::manual(&clock()), snapshots).unwrap();
    assert!(matches!(store.close(), Err(SnapshotError::Io { .. })));
}

#[test]
fn snapshots_are_written_every_10_s_by_default() {
    let expected = Snapshots { path: PathBuf::from("/tmp/state"), every: Duration::from_secs(10) };
    assert_eq!(Snapshots::to("/tmp/state"), expected);
}

#[test]
fn snapshot_is_complete_while_threads_charge() {
    let folder = Folder::new();
    let clock = clock();
    let store = store(10_000, &clock);
    let limiter = on(&store, [ten(Algorithm::FixedWindow), ten(Algorithm::SlidingLog)]);
    std::thread::scope(|scope| {
        for number in 0..4 {
            let (store, limiter, folder) = (&store, &limiter, &folder);
            scope.spawn(move || {
                for attempt in 0..10 {
                    charge(limiter, &user(&format!("user{number}-{attempt}")), 1);
                    store.save(folder.file()).unwrap();
                }
            });
        }
    });
    assert_eq!(load(10_000, &clock, &folder.file()).unwrap().keys(), 80);
    assert_eq!(folder.names(), ["state"]);
}
