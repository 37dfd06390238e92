//! A map whose keys are already hashes and are not hashed again.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map keyed by hashes under a random secret, which clients cannot predict.
pub(super) type ByHash<T> = HashMap<u64, T, BuildHasherDefault<Identity>>;

/// A hasher that returns the hash it is given.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Identity(u64);

impl Hasher for Identity {
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are u64 hashes");
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
