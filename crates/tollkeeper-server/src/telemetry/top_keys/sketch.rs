//! Counts the most frequent of any number of items in bounded memory.
//!
//! This is the Misra-Gries summary: a table of counters. When it is full, the median count is subtracted from all
//! counters, and those that reach 0 are dropped. So a count is never too high, and too low by at most the sum that was
//! subtracted: [`Sketch::max_error`]. Each time at least half of the counters lose that much, so for `n` items the error
//! stays below `n / (CAPACITY / 2)`.
//!
//! With too many distinct items, most occur once and are dropped. So after the first drop, the bytes of an item are
//! stored only when it occurs a second time.

use super::by_hash::ByHash;
use super::counters::{CAPACITY, Counters};

/// Counters of byte strings, identified by a hash that clients cannot predict.
#[derive(Debug, Default)]
pub struct Sketch {
    counts: Counters,
    /// The bytes of the counted items; after the first drop, only of items that occurred twice.
    items: ByHash<Vec<u8>>,
    /// The sum that was subtracted from all counts.
    subtracted: u64,
    /// Buffers of dropped items, for reuse.
    spare: Vec<Vec<u8>>,
}

impl Sketch {
    /// Counts an item; `write` is called for its bytes if they are not stored yet.
    #[inline]
    pub fn add(&mut self, hash: u64, write: impl FnOnce(&mut Vec<u8>)) {
        let count = self.counts.add(hash).unwrap_or_else(|| self.add_when_full(hash));
        if count == 2 || count == 1 && self.subtracted == 0 {
            self.keep(hash, write);
        }
    }

    #[cold]
    fn add_when_full(&mut self, hash: u64) -> u64 {
        self.purge();
        self.counts.add(hash).expect("half of the counters were dropped")
    }

    fn keep(&mut self, hash: u64, write: impl FnOnce(&mut Vec<u8>)) {
        let spare = &mut self.spare;
        self.items.entry(hash).or_insert_with(|| {
            let mut item = spare.pop().unwrap_or_default();
            item.clear();
            write(&mut item);
            item
        });
    }

    /// The items with the lower bound of each count; the upper bound is [`Sketch::max_error`] more.
    pub fn counts(&self) -> impl Iterator<Item = (&[u8], u64)> {
        self.items.iter().map(|(hash, item)| (item.as_slice(), self.counts.get(*hash)))
    }

    /// How much any count may be too low; items that are not listed count as 0.
    pub fn max_error(&self) -> u64 {
        // An item that occurred once may not be stored.
        self.subtracted + u64::from(self.subtracted > 0)
    }

    fn purge(&mut self) {
        let median = self.median();
        self.subtracted += median;
        self.counts.subtract(median);
        let counts = &self.counts;
        let dropped = self.items.extract_if(|hash, _| counts.get(*hash) == 0);
        self.spare.extend(dropped.map(|(_, item)| item));
    }

    /// The median of all counts.
    fn median(&self) -> u64 {
        // With many items most counts are 1; this finds out without sorting.
        let once = self.counts.values().filter(|count| *count == 1).count();
        if once > CAPACITY / 2 {
            return 1;
        }
        let mut all: Vec<u64> = self.counts.values().collect();
        *all.select_nth_unstable(CAPACITY / 2).1
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::hash::{BuildHasher as _, RandomState};

    use super::*;

    /// Numbers of which the smallest are the most frequent: `n` about `total / n^2` times, in a fixed shuffled order.
    fn stream(total: u64) -> impl Iterator<Item = u64> {
        (0..total).map(|index| {
            let random =
                index.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31).wrapping_mul(0xd6e8_feb8_6659_fd93);
            1_000_000 / (1 + random % 1_000_000)
        })
    }

    #[test]
    fn counts_are_low_by_at_most_the_error() {
        let (mut sketch, mut exact) = (Sketch::default(), HashMap::<u64, u64>::new());
        let hasher = RandomState::new();
        // A few frequent items, and a long tail of items that occur once.
        let items = stream(200_000).chain(1_000_000..1_100_000).chain(stream(200_000));
        let mut total = 0;
        for item in items {
            sketch.add(hasher.hash_one(item), |bytes| bytes.extend_from_slice(&item.to_le_bytes()));
            *exact.entry(item).or_default() += 1;
            total += 1;
        }
        let found: HashMap<&[u8], u64> = sketch.counts().collect();
        assert!(found.len() <= CAPACITY && exact.len() > 50_000);
        assert!(
            sketch.max_error() > 0 && sketch.max_error() <= total / (CAPACITY as u64 / 2),
            "{}",
            sketch.max_error()
        );
        for (item, exact) in &exact {
            let low = found.get(item.to_le_bytes().as_slice()).copied().unwrap_or(0);
            assert!(
                low <= *exact && *exact <= low + sketch.max_error(),
                "{item}: {low} {exact} {}",
                sketch.max_error()
            );
        }
    }

    /// The item occurs once before the table is full and once after, so it is not stored; the error must still cover
    /// both occurrences.
    #[test]
    fn unstored_item_is_within_the_error() {
        let mut sketch = Sketch::default();
        for hash in (0..=CAPACITY as u64).chain([0]) {
            sketch.add(hash, |bytes| bytes.extend_from_slice(&hash.to_le_bytes()));
        }
        assert_eq!((sketch.counts().count(), sketch.max_error()), (0, 2));
        sketch.add(0, |bytes| bytes.extend_from_slice(b"zero"));
        assert_eq!(sketch.counts().collect::<Vec<_>>(), [(&b"zero"[..], 2)]);
    }

    #[test]
    fn counts_are_exact_until_the_table_is_full() {
        let (mut sketch, hasher) = (Sketch::default(), RandomState::new());
        for index in 0..10 * CAPACITY {
            let item = (index % CAPACITY).to_le_bytes();
            sketch.add(hasher.hash_one(index % CAPACITY), |bytes| bytes.extend_from_slice(&item));
        }
        assert_eq!(sketch.max_error(), 0);
        assert!(sketch.counts().all(|(_, count)| count == 10));
    }
}
