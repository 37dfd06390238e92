//! Commands of the encoder of `redis-protocol` are read as they were meant, and answers are written as it would.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../resp.rs"]
#[allow(dead_code, reason = "the other target has the other half")]
mod resp;

fuzz_target!(|data: &[u8]| resp::encoded(data));
