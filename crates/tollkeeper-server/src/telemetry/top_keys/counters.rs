//! Counters by hash, in a table that does not grow: one look finds a counter or the place for it.

/// How many things are counted at a time.
pub(super) const ROOM: usize = 512;
/// Twice as many places as counters, so that a look is a short one.
const PLACES: usize = 2 * ROOM;

/// Counters of hashes that nobody can foresee.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// None before the first is counted: most tables never count anything.
    places: Vec<Counter>,
    len: usize,
}

/// A count of 0 is a free place.
#[derive(Clone, Copy, Debug, Default)]
struct Counter {
    hash: u64,
    count: u64,
}

impl Counters {
    /// Counts one, and says how many that makes; nothing if it is not known and there is no room for it.
    #[inline]
    pub(super) fn add(&mut self, hash: u64) -> Option<u64> {
        if self.places.is_empty() {
            self.places.resize(PLACES, Counter::default());
        }
        let place = place(&self.places, hash);
        let counter = &mut self.places[place];
        if counter.count == 0 {
            if self.len == ROOM {
                return None;
            }
            self.len += 1;
            counter.hash = hash;
        }
        counter.count += 1;
        Some(counter.count)
    }

    /// How often this was counted.
    pub(super) fn get(&self, hash: u64) -> u64 {
        if self.places.is_empty() { 0 } else { self.places[place(&self.places, hash)].count }
    }

    /// Every count there is.
    pub(super) fn values(&self) -> impl Iterator<Item = u64> {
        self.places.iter().map(|counter| counter.count).filter(|count| *count > 0)
    }

    /// Takes so much from every counter, and forgets those that have nothing left.
    pub(super) fn take(&mut self, from_each: u64) {
        let before = std::mem::replace(&mut self.places, vec![Counter::default(); PLACES]);
        self.len = 0;
        for Counter { hash, count } in before.into_iter().filter(|counter| counter.count > from_each) {
            let place = place(&self.places, hash);
            self.places[place] = Counter { hash, count: count - from_each };
            self.len += 1;
        }
    }
}

/// Where this hash is counted, or would be.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the lowest bits are as good as any")]
fn place(places: &[Counter], hash: u64) -> usize {
    let mut place = hash as usize % PLACES;
    while places[place].count > 0 && places[place].hash != hash {
        place = (place + 1) % PLACES;
    }
    place
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_that_want_the_same_place_are_counted_apart() {
        let mut counters = Counters::default();
        let hashes = (0..ROOM as u64).map(|number| number << 32 | 7);
        for turn in 1..=3 {
            for hash in hashes.clone() {
                assert_eq!(counters.add(hash), Some(turn));
            }
        }
        assert_eq!(counters.add(1), None, "there is no room");
        assert_eq!((counters.get(7), counters.get(1)), (3, 0));
        assert_eq!(counters.values().collect::<Vec<_>>(), [3; ROOM]);
    }

    #[test]
    fn what_is_left_is_found_again_and_the_rest_makes_room() {
        let mut counters = Counters::default();
        for hash in 0..ROOM as u64 {
            let wants_the_end = PLACES as u64 - 1 + hash * PLACES as u64;
            (0..=hash % 4).for_each(|_| assert!(counters.add(wants_the_end).is_some()));
        }
        counters.take(2);
        for hash in 0..ROOM as u64 {
            let wants_the_end = PLACES as u64 - 1 + hash * PLACES as u64;
            assert_eq!(counters.get(wants_the_end), (hash % 4).saturating_sub(1), "{hash}");
        }
        assert_eq!(counters.values().count(), ROOM / 2);
        assert_eq!(counters.add(0), Some(1));
        assert_eq!(Counters::default().get(0), 0);
    }
}
