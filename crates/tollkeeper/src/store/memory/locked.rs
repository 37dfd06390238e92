//! The shards of one toll, locked together.

use crate::sync::{MutexGuard, lock};

use super::Inner;
use super::shard::Shard;

/// The lock of one shard, once it is held.
pub(super) type Guard<'s> = Option<MutexGuard<'s, Shard>>;

/// The locked shards of some fingerprints, in buffers of the caller: a toll with few dues needs no heap.
pub(super) struct Locked<'b, 's> {
    guards: &'b mut [Guard<'s>],
    /// For each fingerprint, the index of its shard's guard.
    places: &'b [usize],
}

impl Inner {
    /// Locks the shards of these fingerprints, each once, in the order of the shards, so that two tolls cannot
    /// deadlock. The buffers have one entry for each fingerprint.
    #[inline(always)]
    pub(super) fn lock<'b, 's>(
        &'s self,
        prints: &[u128],
        guards: &'b mut [Guard<'s>],
        places: &'b mut [usize],
    ) -> Locked<'b, 's> {
        let mut next = prints.iter().map(|print| self.shard_index(*print)).min();
        for (index, guard) in guards.iter_mut().enumerate() {
            let Some(shard) = next else { break };
            *guard = Some(lock(&self.shards[shard].0));
            next = None;
            for (print, place) in prints.iter().zip(&mut *places) {
                match self.shard_index(*print) {
                    same if same == shard => *place = index,
                    later if later > shard => next = Some(next.map_or(later, |next| next.min(later))),
                    _ => {}
                }
            }
        }
        Locked { guards, places }
    }
}

impl Locked<'_, '_> {
    /// The shard of the fingerprint with that index.
    #[inline(always)]
    pub(super) fn of(&mut self, index: usize) -> &mut Shard {
        self.guards[self.places[index]].as_mut().expect("locked for this fingerprint")
    }
}
