//! A map whose keys are hashes already: they are not hashed again.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map by hashes that nobody can foresee.
pub(super) type ByHash<T> = HashMap<u64, T, BuildHasherDefault<Same>>;

/// Takes a hash for what it is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Same(u64);

impl Hasher for Same {
    fn write(&mut self, _: &[u8]) {
        unreachable!("only hashes are keys, and they are numbers");
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
