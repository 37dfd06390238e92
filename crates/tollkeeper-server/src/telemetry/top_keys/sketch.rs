//! Counts the most frequent of any number of things in bounded room.
//!
//! The summary of Misra and Gries: a table of counters, and when it is full, the median of them is taken from
//! all and what has nothing left is dropped. So a count is never too high, and too low by at most what was
//! taken, which is known: [`Sketch::slack`]. Each time at least half of the table loses that much, so of `n`
//! things it stays below `n / (ROOM / 2)`.
//!
//! Where there are too many things, most come once and are dropped: from then on a thing is written down when it
//! comes a second time.

use super::by_hash::ByHash;
use super::counters::{Counters, ROOM};

/// Counters of byte strings, which come with a hash that nobody can foresee.
#[derive(Debug, Default)]
pub struct Sketch {
    counts: Counters,
    /// What is counted: everything that has come twice.
    things: ByHash<Vec<u8>>,
    /// What was taken from all counts.
    taken: u64,
    /// Room of things that were dropped, for those to come.
    spare: Vec<Vec<u8>>,
}

impl Sketch {
    /// Counts one; `write` is asked for it if it is not known.
    #[inline]
    pub fn add(&mut self, hash: u64, write: impl FnOnce(&mut Vec<u8>)) {
        let count = self.counts.add(hash).unwrap_or_else(|| self.begin(hash));
        if count == 2 || count == 1 && self.taken == 0 {
            self.keep(hash, write);
        }
    }

    #[cold]
    fn begin(&mut self, hash: u64) -> u64 {
        self.purge();
        self.counts.add(hash).expect("half of the counters were dropped")
    }

    fn keep(&mut self, hash: u64, write: impl FnOnce(&mut Vec<u8>)) {
        let spare = &mut self.spare;
        self.things.entry(hash).or_insert_with(|| {
            let mut thing = spare.pop().unwrap_or_default();
            thing.clear();
            write(&mut thing);
            thing
        });
    }

    /// What was counted: each at least so often, and at most [`Sketch::slack`] more.
    pub fn counts(&self) -> impl Iterator<Item = (&[u8], u64)> {
        self.things.iter().map(|(hash, thing)| (thing.as_slice(), self.counts.get(*hash)))
    }

    /// How much any count may be too low; what is not listed counts as 0.
    pub fn slack(&self) -> u64 {
        // What came once may not be written down.
        self.taken + u64::from(self.taken > 0)
    }

    fn purge(&mut self) {
        let median = self.median();
        self.taken += median;
        self.counts.take(median);
        let counts = &self.counts;
        let dropped = self.things.extract_if(|hash, _| counts.get(*hash) == 0);
        self.spare.extend(dropped.map(|(_, thing)| thing));
    }

    /// The count in the middle.
    fn median(&self) -> u64 {
        // Of many things most have come once, and nothing has to be put in order to know that.
        let once = self.counts.values().filter(|count| *count == 1).count();
        if once > ROOM / 2 {
            return 1;
        }
        let mut all: Vec<u64> = self.counts.values().collect();
        *all.select_nth_unstable(ROOM / 2).1
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::hash::{BuildHasher as _, RandomState};

    use super::*;

    /// Numbers of which the smallest come most often: `n` about `total / n^2` times, in a fixed disorder.
    fn stream(total: u64) -> impl Iterator<Item = u64> {
        (0..total).map(|turn| {
            let random =
                turn.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31).wrapping_mul(0xd6e8_feb8_6659_fd93);
            1_000_000 / (1 + random % 1_000_000)
        })
    }

    #[test]
    fn a_count_is_never_too_high_and_too_low_by_no_more_than_it_says() {
        let (mut sketch, mut exact) = (Sketch::default(), HashMap::<u64, u64>::new());
        let hasher = RandomState::new();
        // A heavy head, and a long tail of things that come once.
        let things = stream(200_000).chain(1_000_000..1_100_000).chain(stream(200_000));
        let mut total = 0;
        for thing in things {
            sketch.add(hasher.hash_one(thing), |own| own.extend_from_slice(&thing.to_le_bytes()));
            *exact.entry(thing).or_default() += 1;
            total += 1;
        }
        let found: HashMap<&[u8], u64> = sketch.counts().collect();
        assert!(found.len() <= ROOM && exact.len() > 50_000);
        assert!(sketch.slack() > 0 && sketch.slack() <= total / (ROOM as u64 / 2), "{}", sketch.slack());
        for (thing, exact) in &exact {
            let low = found.get(thing.to_le_bytes().as_slice()).copied().unwrap_or(0);
            assert!(
                low <= *exact && *exact <= low + sketch.slack(),
                "{thing}: {low} {exact} {}",
                sketch.slack()
            );
        }
    }

    /// It came once before the table was full and once after, and is not written down: nobody may say it came less
    /// often than twice.
    #[test]
    fn what_came_once_since_others_were_dropped_is_within_the_slack() {
        let mut sketch = Sketch::default();
        for hash in (0..=ROOM as u64).chain([0]) {
            sketch.add(hash, |own| own.extend_from_slice(&hash.to_le_bytes()));
        }
        assert_eq!((sketch.counts().count(), sketch.slack()), (0, 2));
        sketch.add(0, |own| own.extend_from_slice(b"zero"));
        assert_eq!(sketch.counts().collect::<Vec<_>>(), [(&b"zero"[..], 2)]);
    }

    #[test]
    fn what_fits_is_counted_exactly() {
        let (mut sketch, hasher) = (Sketch::default(), RandomState::new());
        for turn in 0..10 * ROOM {
            let thing = (turn % ROOM).to_le_bytes();
            sketch.add(hasher.hash_one(turn % ROOM), |own| own.extend_from_slice(&thing));
        }
        assert_eq!(sketch.slack(), 0);
        assert!(sketch.counts().all(|(_, count)| count == 10));
    }
}
