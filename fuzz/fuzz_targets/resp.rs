//! Fuzzes the RESP parser: commands or a typed error, independent of how the bytes are split.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../resp.rs"]
#[allow(dead_code, reason = "used by the other target")]
mod resp;

fuzz_target!(|data: &[u8]| resp::any_bytes(data));
