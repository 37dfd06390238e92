//! Fuzzes client addresses: whatever headers a client sends, it cannot choose its address.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/tollkeeper-tower/tests/support/claims.rs"]
#[expect(dead_code, reason = "the other claims have targets of their own")]
mod claims;

fuzz_target!(|data: &[u8]| {
    claims::forwarded(data);
    claims::one_address(data);
});
