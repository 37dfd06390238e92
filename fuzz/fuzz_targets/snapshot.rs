//! Fuzzes snapshot files: rejected or loaded, never a panic, and never more memory than the file is long. The first byte
//! selects whether the rest is the whole file or follows a valid header.

#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;
use tollkeeper::{Capacity, Clock, ManualClock, MemoryStore, Time};

fuzz_target!(|data: &[u8]| {
    let Some((whole, rest)) = data.split_first() else { return };
    let start: &[u8] = if whole % 2 == 0 { b"" } else { b"tollkeeper state 1\n" };
    let path = std::env::temp_dir().join(format!("tollkeeper-fuzz-{}", std::process::id()));
    fs::write(&path, [start, rest].concat()).expect("a folder for temporary files");
    let clock = Clock::manual(&ManualClock::new(Time::from_micros(1_760_000_000_000_000)));
    let _ = MemoryStore::load(Capacity::default(), clock, &path);
    fs::remove_file(&path).expect("written above");
});
