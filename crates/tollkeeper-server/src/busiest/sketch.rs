//! Counts the most frequent of any number of things in bounded room.
//!
//! The summary of Misra and Gries: a table of counters, and when it is full, the median of them is taken from
//! all and what has nothing left is dropped. So a count is never too high, and too low by at most what was
//! taken, which is known: [`Sketch::slack`]. Each time at least half of the table loses that much, so of `n`
//! things it stays below `n / (ROOM / 2)`.

use super::by_hash::ByHash;

/// How many things are counted at a time.
pub const ROOM: usize = 512;

/// Counters of byte strings, which come with a hash that nobody can foresee.
#[derive(Debug, Default)]
pub struct Sketch {
    counts: ByHash<Counted>,
    slack: u64,
    /// Room of things that were dropped, for those to come.
    spare: Vec<Vec<u8>>,
}

#[derive(Debug)]
struct Counted {
    count: u64,
    thing: Vec<u8>,
}

impl Sketch {
    /// Counts one; `write` is asked for it if it was not known.
    pub fn add(&mut self, hash: u64, write: impl FnOnce(&mut Vec<u8>)) {
        if let Some(counted) = self.counts.get_mut(&hash) {
            counted.count += 1;
            return;
        }
        if self.counts.len() == ROOM {
            self.purge();
        }
        let mut own = self.spare.pop().unwrap_or_default();
        own.clear();
        write(&mut own);
        self.counts.insert(hash, Counted { count: 1, thing: own });
    }

    /// What was counted: each at least so often, and at most [`Sketch::slack`] more.
    pub fn counts(&self) -> impl Iterator<Item = (&[u8], u64)> {
        self.counts.values().map(|counted| (counted.thing.as_slice(), counted.count))
    }

    /// How much any count may be too low; what is not listed counts as 0.
    pub fn slack(&self) -> u64 {
        self.slack
    }

    fn purge(&mut self) {
        let mut all: Vec<u64> = self.counts.values().map(|counted| counted.count).collect();
        let (_, median, _) = all.select_nth_unstable(ROOM / 2);
        let median = *median;
        self.slack += median;
        let dropped = self.counts.extract_if(|_, counted| {
            counted.count = counted.count.saturating_sub(median);
            counted.count == 0
        });
        self.spare.extend(dropped.map(|(_, counted)| counted.thing));
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
