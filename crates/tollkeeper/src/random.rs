//! Secrets drawn from the operating system.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use tollkeeper_core::Secret;

/// Sixteen unpredictable bytes.
///
/// The standard library seeds its hash maps from the operating system and offers no other access to its random
/// numbers. Each `RandomState` is SipHash with such a key, and its hashes of distinct messages are as unpredictable as
/// the key.
pub fn secret() -> Secret {
    let (state, process) = (RandomState::new(), std::process::id());
    let word = |number: u8| {
        let mut hasher = state.build_hasher();
        // A forked process inherits the keys of the thread that forked it, so the process ID is hashed, too.
        hasher.write_u32(process);
        hasher.write_u8(number);
        hasher.finish().to_le_bytes()
    };
    let mut secret = [0; 16];
    secret[..8].copy_from_slice(&word(0));
    secret[8..].copy_from_slice(&word(1));
    Secret(secret)
}

/// A random number that most likely no other call returns.
pub(crate) fn number() -> u64 {
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish()
}
