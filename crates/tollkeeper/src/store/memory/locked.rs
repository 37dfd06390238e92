//! The shards of one toll, locked together.

use tollkeeper_core::inline::Inline;

use crate::sync::{MutexGuard, lock};

use super::Inner;
use super::shard::Shard;

/// The shards of a toll with several dues.
pub(super) struct Locked<'s> {
    few: [Option<MutexGuard<'s, Shard>>; FEW],
    many: Vec<MutexGuard<'s, Shard>>,
    /// Which of them holds each fingerprint.
    places: Inline<usize, FEW>,
}

/// How many guards need no heap.
const FEW: usize = 4;

/// The index of a shard in the upper half, the index of a fingerprint in the lower: compared as one number.
type Wanted = u64;

impl Inner {
    /// Locks the shards of these fingerprints, each once, in the order of the shards so that two tolls cannot
    /// deadlock.
    #[inline]
    pub(super) fn lock(&self, prints: &[u128]) -> Locked<'_> {
        let mut wanted = Inline::<Wanted, FEW>::default();
        for (index, print) in prints.iter().enumerate() {
            wanted.push((self.shard_index(*print) as u64) << 32 | index as u64);
        }
        // Sorts by rank: comparing and swapping random numbers is a branch that is mispredicted half of the time.
        let mut ordered = Inline::<Wanted, FEW>::default();
        ordered.resize(prints.len());
        for one in &*wanted {
            let rank: usize = wanted.iter().map(|other| usize::from(other < one)).sum();
            ordered[rank] = *one;
        }
        let mut locked = Locked { few: [const { None }; FEW], many: Vec::new(), places: Inline::default() };
        locked.places.resize(prints.len());
        let (mut count, mut last) = (0, None);
        for one in &*ordered {
            let (shard, index) = halves(*one);
            if last != Some(shard) {
                let guard = lock(&self.shards[shard].0);
                match locked.few.get_mut(count) {
                    Some(place) => *place = Some(guard),
                    None => locked.many.push(guard),
                }
                (count, last) = (count + 1, Some(shard));
            }
            locked.places[index] = count - 1;
        }
        locked
    }
}

impl Locked<'_> {
    /// The shard of the fingerprint with that index.
    #[inline]
    pub(super) fn of(&mut self, index: usize) -> &mut Shard {
        let place = self.places[index];
        match self.few.get_mut(place) {
            Some(shard) => shard.as_mut().expect("locked above"),
            None => &mut self.many[place - FEW],
        }
    }
}

/// Shard and index.
#[inline]
fn halves(wanted: Wanted) -> (usize, usize) {
    let half = |half: u64| usize::try_from(half & u64::from(u32::MAX)).expect("32 bits");
    (half(wanted >> 32), half(wanted))
}
