//! Charges and saves in a loop until it is killed: the child of `tests/snapshot_kill.rs`.
//!
//! In round n every key is charged its n-th unit, the store is saved, and n is printed. So a file is complete if all
//! its keys have the same number of units, and each printed number is a completed save.

use std::error::Error;
use std::io::{Write, stdout};
use std::path::PathBuf;

use tollkeeper::{Capacity, MemoryStore};
use tollkeeper_tests::snapshot_fixture::{self, KEYS};

fn main() -> Result<(), Box<dyn Error>> {
    let path = PathBuf::from(std::env::args_os().nth(1).ok_or("usage: snapshot-writer FILE")?);
    let store = match MemoryStore::load(Capacity::default(), snapshot_fixture::clock(), &path) {
        Ok(store) => store,
        Err(_) if !path.exists() => MemoryStore::new(Capacity::default(), snapshot_fixture::clock()),
        Err(broken) => return Err(broken.into()),
    };
    let limiter = snapshot_fixture::limiter(&store);
    let handle = limiter.handle(snapshot_fixture::LIMIT)?;
    let mut round = snapshot_fixture::units(&store)?;
    writeln!(stdout(), "{round}")?;
    // Exits when its output is closed, because the parent has exited.
    loop {
        round += 1;
        for key in 0..KEYS {
            assert!(handle.check(&key.to_string())?.allowed);
        }
        store.save(&path)?;
        writeln!(stdout(), "{round}")?;
    }
}
