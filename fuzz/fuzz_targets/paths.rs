//! Fuzzes path normalization: all spellings of a path give one result, which is stable.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/tollkeeper-tower/tests/support/claims.rs"]
#[expect(dead_code, reason = "the other functions have their own targets")]
mod claims;

fuzz_target!(|data: &[u8]| claims::path(&String::from_utf8_lossy(data)));
