//! The shards that one decision needs, locked together.

use tollkeeper_core::inline::Inline;

use crate::sync::{MutexGuard, lock};

use super::Inner;
use super::shard::Shard;

/// Shards that are locked.
pub(super) struct Locked<'s> {
    few: [Option<MutexGuard<'s, Shard>>; FEW],
    many: Vec<MutexGuard<'s, Shard>>,
}

/// How many need no heap.
const FEW: usize = 4;

impl Inner {
    /// Locks the shards that these fingerprints belong to, in the order of the shards so that nobody
    /// waits in a circle, each once. Says for each fingerprint which of the locked shards is its own.
    #[inline]
    pub(super) fn lock(&self, prints: &[u128]) -> (Locked<'_>, Inline<usize, 4>) {
        let mut places = Inline::<usize, 4>::default();
        let mut wanted = Inline::<usize, 4>::default();
        for print in prints {
            let shard = self.shard_index(*print);
            places.push(shard);
            let place = wanted.iter().position(|other| *other >= shard).unwrap_or(wanted.len());
            if wanted.get(place) != Some(&shard) {
                wanted.push(shard);
                wanted[place..].rotate_right(1);
            }
        }
        let mut locked = Locked { few: [const { None }; FEW], many: Vec::new() };
        for (index, shard) in wanted.iter().enumerate() {
            let guard = lock(&self.shards[*shard].0);
            match locked.few.get_mut(index) {
                Some(place) => *place = Some(guard),
                None => locked.many.push(guard),
            }
        }
        for place in &mut *places {
            *place = wanted.iter().position(|shard| shard == place).expect("wanted above");
        }
        (locked, places)
    }
}

impl Locked<'_> {
    /// One of the locked shards.
    #[inline]
    pub(super) fn get(&mut self, place: usize) -> &mut Shard {
        match self.few.get_mut(place) {
            Some(shard) => shard.as_mut().expect("locked above"),
            None => &mut self.many[place - FEW],
        }
    }
}
