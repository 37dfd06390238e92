//! The keys that this node knows something about: sharded, and bounded.
//!
//! A shard that is full replaces a key that was not used since it was last considered (the "clock" algorithm), so a
//! flood of new keys does not displace those in use. Forgetting a key costs a round trip or some unspent permits, and
//! nothing else.
//!
//! Values are kept in insertion order and found by a small index, so a flood of new keys writes to memory sequentially.

use tollkeeper_core::Key;
use tollkeeper_core::fingerprint::Fingerprinter;
use tollkeeper_core::inline::Inline;

use super::index::Index;
use crate::random;
use crate::sync::{Mutex, MutexGuard, lock};

/// The most keys of a table.
pub(super) const MAX_KEYS: usize = 65_536;
const SHARDS: usize = 64;
/// The most keys of a shard.
pub(super) const SHARD_KEYS: usize = MAX_KEYS / SHARDS;

/// A value of type `E` for each of at most [`MAX_KEYS`] keys, by fingerprint.
#[derive(Debug)]
pub(super) struct Table<E> {
    prints: Fingerprinter,
    shards: Box<[Mutex<Shard<E>>]>,
}

#[derive(Debug)]
struct Shard<E> {
    index: Index,
    entries: Vec<Entry<E>>,
    /// Whether each entry was used since `hand` last passed it.
    used: Vec<bool>,
    /// The entry that is considered next when one must be replaced.
    hand: usize,
    /// How many numbers were drawn under the lock of this shard.
    numbers: u64,
}

#[derive(Debug)]
struct Entry<E> {
    print: u128,
    value: E,
}

impl<E: Default> Table<E> {
    pub(super) fn new() -> Table<E> {
        Table {
            prints: Fingerprinter::new(&random::secret()),
            shards: (0..SHARDS).map(|_| Mutex::new(Shard::new())).collect(),
        }
    }

    /// The fingerprint of a key.
    #[inline]
    pub(super) fn print(&self, key: Key<'_>) -> u128 {
        self.prints.key(key)
    }

    /// Locks the shards of these keys, each once and in their order, so that two tolls cannot deadlock.
    #[inline]
    pub(super) fn lock(&self, prints: impl Iterator<Item = u128>) -> Locked<'_, E> {
        let mut wanted = Inline::<usize, 4>::default();
        prints.for_each(|print| wanted.push(shard_of(print)));
        let locked = |shard: usize| (shard, lock(&self.shards[shard]));
        if let [shard] = wanted[..] {
            return Locked { first: Some(locked(shard)), others: Vec::new() };
        }
        wanted.sort_unstable();
        let mut shards = wanted.chunk_by(|one, other| one == other).map(|same| locked(same[0]));
        Locked { first: shards.next(), others: shards.collect() }
    }

    /// Changes the value of a key, if it is known.
    #[inline]
    pub(super) fn update<T>(&self, print: u128, change: impl FnOnce(&mut E) -> T) -> Option<T> {
        lock(&self.shards[shard_of(print)]).get(print).map(change)
    }

    /// The number of keys.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).entries.len()).sum()
    }
}

/// Bits of the fingerprint that the index of the shard does not use.
#[inline]
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
    /// Unlocks all shards. After that, no key of them can be looked up.
    #[inline]
    pub(super) fn unlock(&mut self) {
        self.first = None;
        self.others.clear();
    }

    /// The value of a key; `None` if it is not known.
    #[inline]
    pub(super) fn get(&mut self, print: u128) -> Option<&mut E> {
        self.shard(print).get(print)
    }

    /// The value of a key, a new one if it is not known.
    #[inline]
    pub(super) fn entry(&mut self, print: u128) -> &mut E {
        self.shard(print).entry(print)
    }

    /// A number that no other call returns for this table. Counted in a shard, because a counter that all threads share
    /// would take as long as a lock.
    ///
    /// # Panics
    ///
    /// If no shard is locked.
    #[inline]
    pub(super) fn next_number(&mut self) -> u64 {
        let (number, shard) = self.first.as_mut().expect("a shard is locked");
        shard.numbers += 1;
        shard.numbers * SHARDS as u64 + *number as u64
    }

    #[inline]
    fn shard(&mut self, print: u128) -> &mut Shard<E> {
        let shard = shard_of(print);
        let found = self.first.iter_mut().chain(&mut self.others).find(|(other, _)| *other == shard);
        &mut found.expect("the shards of all keys of the toll are locked").1
    }
}

impl<E: Default> Shard<E> {
    fn new() -> Shard<E> {
        Shard { index: Index::default(), entries: Vec::new(), used: Vec::new(), hand: 0, numbers: 0 }
    }

    #[inline]
    fn get(&mut self, print: u128) -> Option<&mut E> {
        let found = self.find(print)?;
        Some(&mut self.entries[found].value)
    }

    #[inline]
    fn entry(&mut self, print: u128) -> &mut E {
        let at = match self.find(print) {
            Some(found) => found,
            None => self.add(print),
        };
        &mut self.entries[at].value
    }

    /// Where a key is, which is being used.
    #[inline]
    fn find(&mut self, print: u128) -> Option<usize> {
        let found = self.index.find(print, |at| self.entries[at].print == print)?;
        self.used[found] = true;
        Some(found)
    }

    fn add(&mut self, print: u128) -> usize {
        let entry = Entry { print, value: E::default() };
        let at = if self.entries.len() < SHARD_KEYS {
            self.entries.push(entry);
            self.used.push(false);
            self.entries.len() - 1
        } else {
            let at = self.least_used();
            self.index.remove(self.entries[at].print, at);
            self.entries[at] = entry;
            at
        };
        self.index.insert(print, at);
        at
    }

    /// An entry that was not used since the hand last passed it. The hand passes each entry at most once to find it.
    fn least_used(&mut self) -> usize {
        loop {
            let at = self.hand;
            self.hand = (at + 1) % SHARD_KEYS;
            if !std::mem::take(&mut self.used[at]) {
                return at;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::index::BUCKETS;
    use super::*;

    /// Random fingerprints, of which the first are always the same.
    fn print(number: u64) -> u128 {
        let mixed = number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        u128::from(mixed.rotate_left(32)) << 64 | u128::from(mixed ^ mixed >> 29)
    }

    fn lock_one<E: Default>(table: &Table<E>, print: u128) -> Locked<'_, E> {
        table.lock([print].into_iter())
    }

    #[test]
    fn flood_of_keys_does_not_grow_the_table() {
        let table = Table::<u64>::new();
        for number in 0..1_000_000 {
            *lock_one(&table, print(number)).entry(print(number)) = number;
        }
        assert!(table.len() <= MAX_KEYS, "{}", table.len());
        assert!(table.len() > MAX_KEYS / 2, "{}", table.len());
        let latest = (999_000..1_000_000).filter(|number| table.update(print(*number), |_| ()).is_some());
        assert_eq!(latest.count(), 1_000);
    }

    #[test]
    fn flood_of_keys_does_not_displace_a_used_one() {
        let table = Table::<u64>::new();
        *lock_one(&table, print(0)).entry(print(0)) = 7;
        for number in 1..200_000 {
            *lock_one(&table, print(number)).entry(print(number)) = number;
            assert_eq!(table.update(print(0), |value| *value), Some(7), "{number}");
        }
    }

    /// The key is used once while as many others come as a shard holds.
    #[test]
    fn key_survives_as_many_others_as_fit() {
        let of_one_shard = |number: usize| print(number as u64) & !(0xFFFF << 64);
        let mut shard = Shard::<usize>::new();
        for number in 0..SHARD_KEYS {
            *shard.entry(of_one_shard(number)) = number;
        }
        assert_eq!(shard.get(of_one_shard(0)), Some(&mut 0));
        for number in SHARD_KEYS..2 * SHARD_KEYS - 1 {
            *shard.entry(of_one_shard(number)) = number;
        }
        assert_eq!(shard.get(of_one_shard(0)), Some(&mut 0));
    }

    /// The least that a shard remembers: what came last. Fingerprints begin their search at a few buckets only, so that
    /// many are moved when others are removed, also over the end of the index.
    #[test]
    fn crowded_index_finds_what_was_added_last() {
        let crowded = |number: usize| {
            let begin = BUCKETS - 3 + number % 5;
            (number as u128) << 70 | (begin % BUCKETS * BUCKETS) as u128
        };
        let mut shard = Shard::<usize>::new();
        for number in 0..3 * SHARD_KEYS {
            *shard.entry(crowded(number)) = number;
            let first = (number + 1).saturating_sub(SHARD_KEYS);
            if number % 100 == 0 || number < 10 {
                // The values are read without using the keys.
                let known = |number| {
                    let print = crowded(number);
                    let found = shard.index.find(print, |at| shard.entries[at].print == print)?;
                    Some(shard.entries[found].value)
                };
                assert!((first..=number).all(|number| known(number) == Some(number)), "{number}");
                assert!((0..first).all(|number| known(number).is_none()), "{number}");
            }
        }
    }

    #[test]
    fn numbers_of_all_shards_differ() {
        let table = Table::<u64>::new();
        let numbers = (0..10_000).map(|number| lock_one(&table, print(number)).next_number());
        assert_eq!(numbers.collect::<std::collections::BTreeSet<u64>>().len(), 10_000);
    }

    #[test]
    fn keys_of_one_shard_are_locked_once() {
        let table = Table::<u64>::new();
        let [one, two] = [1 << 64 | 1 << 20, 1 << 64 | 2 << 20];
        let mut locked = table.lock([one, two, one].into_iter());
        assert!(locked.first.is_some() && locked.others.is_empty());
        *locked.entry(one) = 1;
        *locked.entry(two) = 2;
        assert_eq!((locked.get(one).copied(), locked.get(two).copied()), (Some(1), Some(2)));
    }
}
