//! The keys that this node knows something about: sharded, and bounded by two generations.
//!
//! New keys go into the young generation of their shard. When that is full, it becomes the old one, and the keys of the
//! old one are forgotten. A key that is used moves to the young generation, so a flood of other keys does not displace
//! it. Forgetting a key costs a round trip or some unspent permits, and nothing else.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};

use tollkeeper_core::Key;
use tollkeeper_core::fingerprint::Fingerprinter;
use tollkeeper_core::inline::Inline;

use crate::random;
use crate::sync::{Mutex, MutexGuard, lock};

/// The most keys of a table.
pub(super) const MAX_KEYS: usize = 65_536;
const SHARDS: usize = 64;
/// The most keys in a generation of a shard.
const GENERATION: usize = MAX_KEYS / SHARDS / 2;

/// A value of type `E` for each of at most [`MAX_KEYS`] keys, by fingerprint.
#[derive(Debug)]
pub(super) struct Table<E> {
    prints: Fingerprinter,
    shards: Box<[Mutex<Shard<E>>]>,
}

/// The fingerprints of the keys of a toll.
pub(super) type Prints = Inline<u128, 4>;

#[derive(Debug)]
struct Shard<E> {
    young: Generation<E>,
    old: Generation<E>,
}

type Generation<E> = HashMap<u128, E, BuildHasherDefault<PrintHasher>>;

/// A fingerprint is random, so a part of it is its hash. Another part chooses the shard.
#[derive(Debug, Default)]
struct PrintHasher(u64);

impl Hasher for PrintHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are fingerprints")
    }

    fn write_u128(&mut self, print: u128) {
        self.0 = u64::try_from(print & u128::from(u64::MAX)).expect("64 bits");
    }
}

impl<E: Default> Table<E> {
    pub(super) fn new() -> Table<E> {
        let shard = || Mutex::new(Shard { young: HashMap::default(), old: HashMap::default() });
        Table {
            prints: Fingerprinter::new(&random::secret()),
            shards: (0..SHARDS).map(|_| shard()).collect(),
        }
    }

    /// The fingerprint of a key.
    pub(super) fn print(&self, key: Key<'_>) -> u128 {
        self.prints.key(key)
    }

    /// Locks the shards of these keys, each once and in their order, so that two tolls cannot deadlock.
    pub(super) fn lock(&self, prints: &[u128]) -> Locked<'_, E> {
        let mut wanted = Inline::<usize, 4>::default();
        prints.iter().for_each(|print| wanted.push(shard_of(*print)));
        wanted.sort_unstable();
        let mut shards = wanted.chunk_by(|one, other| one == other).map(|same| same[0]);
        let mut next = || shards.next().map(|shard| (shard, lock(&self.shards[shard])));
        Locked { first: next(), others: std::iter::from_fn(next).collect() }
    }

    /// Changes the value of a key, if it is known.
    pub(super) fn update<T>(&self, print: u128, change: impl FnOnce(&mut E) -> T) -> Option<T> {
        lock(&self.shards[shard_of(print)]).get(print).map(change)
    }

    /// The number of keys.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard)).map(|shard| shard.young.len() + shard.old.len()).sum()
    }
}

fn shard_of(print: u128) -> usize {
    usize::try_from(print >> 64 & (SHARDS as u128 - 1)).expect("below 64")
}

/// The shards of a toll, locked.
pub(super) struct Locked<'t, E> {
    /// The only one of most tolls, which thus need no heap.
    first: Option<LockedShard<'t, E>>,
    others: Vec<LockedShard<'t, E>>,
}

type LockedShard<'t, E> = (usize, MutexGuard<'t, Shard<E>>);

impl<E: Default> Locked<'_, E> {
    /// The value of a key; `None` if it is not known.
    pub(super) fn get(&mut self, print: u128) -> Option<&mut E> {
        self.shard(print).get(print)
    }

    /// The value of a key, a new one if it is not known.
    pub(super) fn entry(&mut self, print: u128) -> &mut E {
        self.shard(print).entry(print)
    }

    fn shard(&mut self, print: u128) -> &mut Shard<E> {
        let shard = shard_of(print);
        let found = self.first.iter_mut().chain(&mut self.others).find(|(other, _)| *other == shard);
        &mut found.expect("the shards of all keys of the toll are locked").1
    }
}

impl<E: Default> Shard<E> {
    fn get(&mut self, print: u128) -> Option<&mut E> {
        self.make_room(print);
        match self.young.entry(print) {
            Entry::Occupied(known) => Some(known.into_mut()),
            Entry::Vacant(free) => self.old.remove(&print).map(|value| free.insert(value)),
        }
    }

    fn entry(&mut self, print: u128) -> &mut E {
        self.make_room(print);
        let Shard { young, old } = self;
        young.entry(print).or_insert_with(|| old.remove(&print).unwrap_or_default())
    }

    /// Starts a new generation if the young one is full. The key that is being used is kept.
    fn make_room(&mut self, used: u128) {
        if self.young.len() >= GENERATION {
            let kept = self.old.remove(&used);
            std::mem::swap(&mut self.young, &mut self.old);
            self.young.clear();
            self.young.extend(kept.map(|value| (used, value)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print(number: u64) -> u128 {
        u128::from(number.wrapping_mul(0x9E37_79B9_7F4A_7C15)) << 64 | u128::from(number)
    }

    #[test]
    fn flood_of_keys_does_not_grow_the_table() {
        let table = Table::<u64>::new();
        for number in 0..1_000_000 {
            *table.lock(&[print(number)]).entry(print(number)) = number;
        }
        assert!(table.len() <= MAX_KEYS, "{}", table.len());
        assert!(table.len() > MAX_KEYS / 2, "{}", table.len());
        let latest = (999_000..1_000_000).filter(|number| table.update(print(*number), |_| ()).is_some());
        assert_eq!(latest.count(), 1_000);
    }

    #[test]
    fn flood_of_keys_does_not_displace_a_used_one() {
        let table = Table::<u64>::new();
        *table.lock(&[print(0)]).entry(print(0)) = 7;
        for number in 1..200_000 {
            *table.lock(&[print(number)]).entry(print(number)) = number;
            assert_eq!(table.update(print(0), |value| *value), Some(7), "{number}");
        }
    }

    #[test]
    fn key_of_the_old_generation_survives_the_next() {
        let print = |number: usize| 1 << 64 | number as u128;
        let full = || {
            let table = Table::<u64>::new();
            // One full generation, which becomes the old one, and the young one is full again.
            (0..2 * GENERATION).for_each(|number| *table.lock(&[print(number)]).entry(print(number)) = 7);
            table
        };
        assert_eq!(full().update(print(0), |value| *value), Some(7));
        assert_eq!(*full().lock(&[print(0)]).entry(print(0)), 7);
    }

    #[test]
    fn keys_of_one_shard_are_locked_once() {
        let table = Table::<u64>::new();
        let [one, two] = [1 << 64 | 1, 1 << 64 | 2];
        let mut locked = table.lock(&[one, two, one]);
        assert!(locked.first.is_some() && locked.others.is_empty());
        *locked.entry(one) = 1;
        *locked.entry(two) = 2;
        assert_eq!((locked.get(one).copied(), locked.get(two).copied()), (Some(1), Some(2)));
    }
}
