//! Fuzzes Envoy's rate limit requests: a response or a reason, and the decoder agrees with `prost`.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/tollkeeper-server/tests/rls_bodies/mod.rs"]
mod rls_bodies;

fuzz_target!(|data: &[u8]| rls_bodies::check(data));
