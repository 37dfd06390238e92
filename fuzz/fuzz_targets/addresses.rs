//! Fuzzes client addresses: a client cannot spoof its address with headers.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/tollkeeper-tower/tests/support/claims.rs"]
#[expect(dead_code, reason = "the other functions have their own targets")]
mod claims;

fuzz_target!(|data: &[u8]| {
    claims::forwarded(data);
    claims::one_address(data);
});
