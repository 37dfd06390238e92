//! The shards of one toll, locked together.

use std::marker::PhantomData;

use crate::sync::{MutexGuard, lock};

use super::Inner;
use super::shard::Shard;

/// The lock of one shard, once it is held.
pub(super) type Guard<'s> = Option<MutexGuard<'s, Shard>>;

/// The locked shards of a toll.
pub(super) trait Shards {
    /// The shard of the fingerprint with that index.
    fn of(&mut self, index: usize) -> &mut Shard;
}

/// The locked shards of some fingerprints. The buffers are vectors or, for a few fingerprints, arrays: those need no
/// heap, and the compiler keeps them in registers.
pub(super) struct Locked<'s, G, P> {
    guards: G,
    /// For each fingerprint, the index of its shard's guard.
    places: P,
    /// The guards are those of shards that live this long.
    shards: PhantomData<&'s Shard>,
}

impl Inner {
    /// Locks the shards of these fingerprints, each once, in the order of the shards, so that two tolls cannot
    /// deadlock. The buffers have one entry for each fingerprint.
    #[inline(always)]
    pub(super) fn lock<'s, G, P>(&'s self, prints: &[u128], mut guards: G, mut places: P) -> Locked<'s, G, P>
    where
        G: AsMut<[Guard<'s>]>,
        P: AsMut<[usize]>,
    {
        let mut next = prints.iter().map(|print| self.shard_index(*print)).min();
        for (index, guard) in guards.as_mut().iter_mut().enumerate() {
            let Some(shard) = next else { break };
            *guard = Some(lock(&self.shards[shard].0));
            next = None;
            for (print, place) in prints.iter().zip(places.as_mut()) {
                match self.shard_index(*print) {
                    same if same == shard => *place = index,
                    later if later > shard => next = Some(next.map_or(later, |next| next.min(later))),
                    _ => {}
                }
            }
        }
        Locked { guards, places, shards: PhantomData }
    }
}

impl<'s, G: AsMut<[Guard<'s>]>, P: AsRef<[usize]>> Shards for Locked<'s, G, P> {
    #[inline(always)]
    fn of(&mut self, index: usize) -> &mut Shard {
        let place = self.places.as_ref()[index];
        self.guards.as_mut()[place].as_mut().expect("locked for this fingerprint")
    }
}
