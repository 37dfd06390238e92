//! Questions of Envoy as anybody may send them: an answer or a reason, and what is read is what `prost` reads.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/tollkeeper-server/tests/rls_bodies/mod.rs"]
mod rls_bodies;

fuzz_target!(|data: &[u8]| rls_bodies::check(data));
