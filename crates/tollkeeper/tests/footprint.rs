//! Memory use of the memory store: bytes per key, and that a sweep frees them.

#![expect(unsafe_code, reason = "implementing a global allocator is unsafe")]

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use support::*;
use tollkeeper::{Algorithm, Limit, Quota};

/// The system allocator, which also counts the bytes in use. This file has one test, so that the
/// bytes of no other test are counted.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to the system allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller upholds the contract of `GlobalAlloc`, which is that of the system allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn sweep_releases_memory_after_a_peak() {
    const KEYS: usize = 50_000;
    for algorithm in
        [Algorithm::TokenBucket, Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog]
    {
        let clock = clock();
        let store = store(KEYS, &clock);
        let limit = Limit::new("limit", Quota::per_minute(10)).by("user").algorithm(algorithm);
        let limiter = on(&store, [limit]);
        let empty = IN_USE.load(Relaxed);
        for number in 0..KEYS + KEYS / 10 {
            charge(&limiter, &user(&format!("user{number}")), 3);
        }
        let busy = IN_USE.load(Relaxed) - empty;
        println!("{algorithm}: {} bytes a key", busy / KEYS);
        assert!(busy >= 32 * KEYS, "{algorithm}: {busy} bytes for {KEYS} keys");
        store.sweep();
        assert_eq!(store.keys(), KEYS, "{algorithm}: no state has expired");
        clock.advance(secs(121));
        store.sweep();
        assert_eq!((store.keys(), store.log_bytes()), (0, 0), "{algorithm}");
        let swept = IN_USE.load(Relaxed).saturating_sub(empty);
        println!("{algorithm}: {swept} bytes after the sweep");
        assert!(swept < busy / 10, "{algorithm}: {swept} of {busy} bytes are left");
    }
}
