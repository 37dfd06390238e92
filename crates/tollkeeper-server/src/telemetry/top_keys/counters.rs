//! Counters by hash, in an open-addressing table of fixed size.

/// The maximum number of counters.
pub(super) const CAPACITY: usize = 512;
/// Twice as many slots as counters, so that probing is short.
const SLOTS: usize = 2 * CAPACITY;

/// Counters of hashes under a random secret, which clients cannot predict.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Empty before the first count: most tables are never used.
    slots: Vec<Counter>,
    len: usize,
}

/// A count of 0 is a free slot.
#[derive(Clone, Copy, Debug, Default)]
struct Counter {
    hash: u64,
    count: u64,
}

impl Counters {
    /// Adds one and returns the new count; `None` if the hash is new and the table is full.
    #[inline]
    pub(super) fn add(&mut self, hash: u64) -> Option<u64> {
        if self.slots.is_empty() {
            self.slots.resize(SLOTS, Counter::default());
        }
        let slot = slot(&self.slots, hash);
        let counter = &mut self.slots[slot];
        if counter.count == 0 {
            if self.len == CAPACITY {
                return None;
            }
            self.len += 1;
            counter.hash = hash;
        }
        counter.count += 1;
        Some(counter.count)
    }

    /// The count of this hash; 0 if it is not in the table.
    pub(super) fn get(&self, hash: u64) -> u64 {
        if self.slots.is_empty() { 0 } else { self.slots[slot(&self.slots, hash)].count }
    }

    /// All counts.
    pub(super) fn values(&self) -> impl Iterator<Item = u64> {
        self.slots.iter().map(|counter| counter.count).filter(|count| *count > 0)
    }

    /// Subtracts this much from every counter, and removes those that reach 0.
    pub(super) fn subtract(&mut self, from_each: u64) {
        let previous = std::mem::replace(&mut self.slots, vec![Counter::default(); SLOTS]);
        self.len = 0;
        for Counter { hash, count } in previous.into_iter().filter(|counter| counter.count > from_each) {
            let slot = slot(&self.slots, hash);
            self.slots[slot] = Counter { hash, count: count - from_each };
            self.len += 1;
        }
    }
}

/// The slot where this hash is counted, or would be.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "any bits of the hash will do")]
fn slot(slots: &[Counter], hash: u64) -> usize {
    let mut slot = hash as usize % SLOTS;
    while slots[slot].count > 0 && slots[slot].hash != hash {
        slot = (slot + 1) % SLOTS;
    }
    slot
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colliding_hashes_are_counted_separately() {
        let mut counters = Counters::default();
        let hashes = (0..CAPACITY as u64).map(|number| number << 32 | 7);
        for round in 1..=3 {
            for hash in hashes.clone() {
                assert_eq!(counters.add(hash), Some(round));
            }
        }
        assert_eq!(counters.add(1), None, "the table is full");
        assert_eq!((counters.get(7), counters.get(1)), (3, 0));
        assert_eq!(counters.values().collect::<Vec<_>>(), [3; CAPACITY]);
    }

    #[test]
    fn subtract_keeps_large_counts_and_frees_the_rest() {
        let mut counters = Counters::default();
        for hash in 0..CAPACITY as u64 {
            let in_last_slot = SLOTS as u64 - 1 + hash * SLOTS as u64;
            (0..=hash % 4).for_each(|_| assert!(counters.add(in_last_slot).is_some()));
        }
        counters.subtract(2);
        for hash in 0..CAPACITY as u64 {
            let in_last_slot = SLOTS as u64 - 1 + hash * SLOTS as u64;
            assert_eq!(counters.get(in_last_slot), (hash % 4).saturating_sub(1), "{hash}");
        }
        assert_eq!(counters.values().count(), CAPACITY / 2);
        assert_eq!(counters.add(0), Some(1));
        assert_eq!(Counters::default().get(0), 0);
    }
}
