//! Fuzzes RESP against `redis-protocol`: its encoded commands are parsed correctly, and replies equal its encoding.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../resp.rs"]
#[allow(dead_code, reason = "used by the other target")]
mod resp;

fuzz_target!(|data: &[u8]| resp::encoded(data));
