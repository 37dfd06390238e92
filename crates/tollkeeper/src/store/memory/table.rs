//! The hash table of a shard: a sorted array of 32-byte entries with gaps.
//!
//! Fingerprints are random, so a fingerprint, read as a fraction of the table's length, gives the home index of its
//! entry. Entries are sorted by fingerprint, each at its home or, if that is taken, at a position just after. So a
//! lookup scans forward from the home, usually with one cache miss, and a table can be rebuilt at any size, or swept
//! in place, in one pass. Because homes are fractions and not remainders, the table can grow by a quarter instead of
//! doubling: it takes at most 46 bytes a key, where doubling would take 37 to 73.

use std::ops::Range;

use super::state::Packed;

/// One position of the table. A fingerprint of zero marks an empty position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) print: u128,
    pub(super) state: Packed,
}

const EMPTY: Entry = Entry { print: 0, state: Packed::NONE };

/// Maps fingerprints to packed states.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// `homes` positions, followed by spare positions for entries that are pushed past the last home.
    places: Vec<Entry>,
    /// The number of home indexes: [`home`] returns an index below it.
    homes: usize,
    /// The number of positions that are not empty.
    len: usize,
    /// The index at which the next call of [`Table::sweep_slice`] starts.
    cursor: usize,
}

/// How many entries and positions (empty ones included) a sweep may still examine.
#[derive(Clone, Copy, Debug)]
struct Budget {
    entries: usize,
    places: usize,
}

/// The index of a fingerprint, or the index at which to insert it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    Found(usize),
    Vacant(usize),
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Memory allocated for the positions, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.places.capacity() * size_of::<Entry>()
    }

    /// Looks up a fingerprint.
    #[inline]
    pub(super) fn find(&self, print: u128) -> Lookup {
        let mut index = home(print, self.homes);
        loop {
            match self.places.get(index) {
                Some(entry) if entry.print == print => return Lookup::Found(index),
                Some(entry) if entry.print != 0 && entry.print < print => index += 1,
                _ => return Lookup::Vacant(index),
            }
        }
    }

    /// The state of a fingerprint, or `None` if it is not in the table.
    #[inline]
    pub(super) fn get(&self, print: u128) -> Option<Packed> {
        match self.find(print) {
            Lookup::Found(index) => Some(self.places[index].state),
            Lookup::Vacant(_) => None,
        }
    }

    /// The state at an index that [`Table::find`] has just returned.
    #[inline]
    pub(super) fn state(&self, index: usize) -> Packed {
        self.places[index].state
    }

    /// The state of a fingerprint that was found at `index`. Looks it up again if the entry has moved since.
    #[inline]
    pub(super) fn at(&mut self, index: usize, print: u128) -> Option<&mut Packed> {
        let index = match self.places.get(index) {
            Some(entry) if entry.print == print => index,
            _ => match self.find(print) {
                Lookup::Found(index) => index,
                Lookup::Vacant(_) => return None,
            },
        };
        Some(&mut self.places[index].state)
    }

    /// Inserts or replaces a state. A full table is swept first: entries for which `dead` is true are removed, and
    /// their states passed to `gone`. The table grows only if the sweep frees too few positions.
    pub(super) fn set(
        &mut self,
        print: u128,
        state: Packed,
        dead: impl Fn(&Packed) -> bool,
        gone: impl FnMut(Packed),
    ) {
        let mut place = self.find(print);
        if let Lookup::Found(index) = place {
            self.places[index].state = state;
            return;
        }
        if self.is_full() {
            self.sweep(dead, gone);
            if self.len * 4 > self.most() * 3 {
                self.resize(self.homes + self.homes / 4 + 8);
            }
            place = self.find(print);
        }
        let Lookup::Vacant(index) = place else { unreachable!("the lookup above found no such entry") };
        if index == self.places.len() {
            self.lengthen();
        }
        let shifted = self.places[index..].iter().position(|entry| entry.print == 0);
        let shifted = shifted.unwrap_or_else(|| {
            // Every position up to the end is taken. This is rare, because there are many spare positions.
            let shifted = self.places.len() - index;
            self.lengthen();
            shifted
        });
        self.places.copy_within(index..index + shifted, index + 1);
        self.places[index] = Entry { print, state };
        self.len += 1;
    }

    /// Removes a fingerprint and returns its state.
    pub(super) fn remove(&mut self, print: u128) -> Option<Packed> {
        let Lookup::Found(mut index) = self.find(print) else { return None };
        let state = self.places[index].state;
        // Shift the following entries back by one, up to the first that is at its home.
        while let Some(next) = self.places.get(index + 1).copied()
            && next.print != 0
            && home(next.print, self.homes) <= index
        {
            self.places[index] = next;
            index += 1;
        }
        self.places[index] = EMPTY;
        self.len -= 1;
        Some(state)
    }

    /// Removes every entry for which `dead` is true and passes its state to `gone`. Shrinks the table if less than a
    /// quarter of its capacity is still in use.
    pub(super) fn sweep(&mut self, dead: impl Fn(&Packed) -> bool, mut gone: impl FnMut(Packed)) {
        let mut free = 0;
        for index in 0..self.places.len() {
            let entry = self.places[index];
            if entry.print == 0 {
                continue;
            }
            self.places[index] = EMPTY;
            if dead(&entry.state) {
                self.len -= 1;
                gone(entry.state);
                continue;
            }
            let place = home(entry.print, self.homes).max(free);
            self.places[place] = entry;
            free = place + 1;
        }
        if self.len * 4 < self.most() && self.homes > 64 {
            self.resize(self.len * 4 / 3 + 8);
        }
    }

    /// As [`Table::sweep`], but examines at most the next `most` entries, so that the cost of a call does not depend
    /// on the size of the table. It never shrinks the table. Returns how many entries it examined.
    pub(super) fn sweep_slice(
        &mut self,
        most: usize,
        dead: impl Fn(&Packed) -> bool,
        mut gone: impl FnMut(Packed),
    ) -> usize {
        // The positions are bounded too: in a nearly empty table, there are many empty positions between two entries.
        let mut budget = Budget { entries: most, places: 4 * most };
        let start = if self.cursor < self.places.len() { self.cursor } else { 0 };
        self.cursor = self.sweep_range(start..self.places.len(), &mut budget, &dead, &mut gone);
        if self.cursor == self.places.len() {
            self.cursor = self.sweep_range(0..start, &mut budget, &dead, &mut gone);
        }
        most - budget.entries
    }

    /// Removes dead entries from a range of positions until the budget is spent. Returns the index at which to go on.
    fn sweep_range(
        &mut self,
        range: Range<usize>,
        budget: &mut Budget,
        dead: &impl Fn(&Packed) -> bool,
        gone: &mut impl FnMut(Packed),
    ) -> usize {
        let (mut free, mut end) = (range.start, range.start);
        while end < range.end && budget.entries > 0 && budget.places > 0 {
            let (index, entry) = (end, self.places[end]);
            (end, budget.places) = (end + 1, budget.places - 1);
            if entry.print == 0 {
                continue;
            }
            budget.entries -= 1;
            if dead(&entry.state) {
                self.places[index] = EMPTY;
                self.len -= 1;
                gone(entry.state);
                continue;
            }
            // Until the first dead entry nothing moves, so most slices write no memory.
            let place = home(entry.print, self.homes).max(free);
            if place != index {
                self.places[index] = EMPTY;
                self.places[place] = entry;
            }
            free = place + 1;
        }
        // Move the following entries back into the gaps, up to the first that is already at the right position. They
        // have not been examined yet, so the next slice starts with them.
        let mut stopped = end;
        for index in end..self.places.len() {
            let entry = self.places[index];
            let place = home(entry.print, self.homes).max(free);
            if entry.print == 0 || place == index {
                break;
            }
            self.places[index] = EMPTY;
            self.places[place] = entry;
            free = place + 1;
            stopped = stopped.min(place);
        }
        stopped
    }

    /// The entries, ordered by fingerprint.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.places.iter().filter(|entry| entry.print != 0)
    }

    /// The states, in the same order.
    pub(super) fn states_mut(&mut self) -> impl Iterator<Item = &mut Packed> {
        self.places.iter_mut().filter(|entry| entry.print != 0).map(|entry| &mut entry.state)
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.len >= self.most()
    }

    /// The most entries before a sweep: seven eighths of the homes. In a fuller table, entries are far from home.
    fn most(&self) -> usize {
        self.homes - self.homes / 8
    }

    fn lengthen(&mut self) {
        self.places.reserve_exact(64);
        self.places.resize(self.places.len() + 64, EMPTY);
    }

    fn resize(&mut self, homes: usize) {
        let spare = (homes / 8 + 8).min(256);
        let mut places = vec![EMPTY; homes + spare];
        let mut free = 0;
        for entry in self.places.iter().filter(|entry| entry.print != 0) {
            let place = home(entry.print, homes).max(free);
            if place >= places.len() {
                places.push(*entry);
            } else {
                places[place] = *entry;
            }
            free = place + 1;
        }
        self.places = places;
        self.homes = homes;
    }
}

/// The home index of a fingerprint: its upper 64 bits, read as a fraction, times `homes`.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "a fraction of `homes` is below it")]
fn home(print: u128, homes: usize) -> usize {
    (((print >> 64) * homes as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn state(number: u64) -> Packed {
        Packed::marker(tollkeeper_core::Time::from_micros(number))
    }

    fn number(state: Packed) -> u64 {
        state.expires().as_micros()
    }

    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }

        fn print(&mut self) -> u128 {
            (u128::from(self.next()) << 64 | u128::from(self.next())).max(1)
        }
    }

    fn check(table: &Table, model: &BTreeMap<u128, u64>) {
        let found: Vec<_> = table.iter().map(|entry| (entry.print, number(entry.state))).collect();
        let expected: Vec<_> = model.iter().map(|(print, number)| (*print, *number)).collect();
        assert_eq!(found, expected);
        assert_eq!(table.len(), model.len());
    }

    #[test]
    fn table_behaves_like_a_hash_map() {
        let mut random = Random(0x5eed);
        let mut table = Table::default();
        let mut model = BTreeMap::new();
        // Only 3,000 fingerprints, a third of them in a small range, so that entries collide, replace and shift others.
        let prints: Vec<u128> = (0..3000)
            .map(|index| if index % 3 == 0 { random.print() >> 6 } else { random.print() })
            .collect();
        for round in 0..60_000 {
            let print = prints[usize::try_from(random.next() % 3000).expect("small")];
            match random.next() % 8 {
                0..=4 => {
                    let number = random.next() % 1_000_000;
                    table.set(print, state(number), |_| false, |_| panic!("no entry is dead"));
                    model.insert(print, number);
                }
                5..=6 => assert_eq!(table.remove(print).map(number), model.remove(&print)),
                _ => assert_eq!(table.get(print).map(number), model.get(&print).copied()),
            }
            if round % 5_000 == 0 {
                check(&table, &model);
            }
        }
        check(&table, &model);
    }

    #[test]
    fn sweep_drops_only_expired_entries() {
        let mut random = Random(7);
        let mut table = Table::default();
        let mut model = BTreeMap::new();
        for _ in 0..10_000 {
            let (print, number) = (random.print(), random.next() % 100);
            table.set(print, state(number), |_| false, |_| {});
            model.insert(print, number);
        }
        for alive in [50, 10, 1, 0] {
            let before = table.len();
            let mut gone = 0;
            table.sweep(|state| number(*state) >= alive, |_| gone += 1);
            model.retain(|_, number| *number < alive);
            check(&table, &model);
            assert_eq!(gone, before - table.len());
        }
        assert!(table.places.len() < 200, "an empty table frees its memory");
    }

    #[test]
    fn sweep_in_slices_equals_a_full_sweep() {
        let mut random = Random(11);
        let mut table = Table::default();
        let mut model = BTreeMap::new();
        for round in 0..100 {
            for _ in 0..random.next() % 40 {
                // A third of the fingerprints are close together, so that entries are far from home.
                let print =
                    if random.next().is_multiple_of(3) { random.print() >> 9 } else { random.print() };
                let number = random.next() % 100;
                table.set(print.max(1), state(number), |_| false, |_| {});
                model.insert(print.max(1), number);
            }
            let (alive, most) =
                (random.next() % 100, 1 + usize::try_from(random.next() % 90).expect("small"));
            // Every tenth round sweeps the whole table, the others one slice.
            let full_sweep = round % 10 == 0;
            let mut examined = 0;
            let all = table.len();
            while examined < all {
                let mut gone = 0;
                let before = table.len();
                let entries = table.sweep_slice(most, |state| number(*state) >= alive, |_| gone += 1);
                assert!(entries <= most, "{entries} of {most}");
                assert_eq!(gone, before - table.len());
                examined += entries;
                if !full_sweep {
                    break;
                }
            }
            // After one slice, some dead entries may remain. No live entry may be missing.
            model.retain(|print, number| *number < alive || !full_sweep && table.get(*print).is_some());
            check(&table, &model);
        }
    }

    #[test]
    fn a_full_table_sweeps_before_it_grows() {
        let mut random = Random(99);
        let mut table = Table::default();
        for _ in 0..100_000 {
            table.set(random.print(), state(1), |_| true, |_| {});
        }
        assert!(table.places.len() < 100, "{} positions, although every state is dead", table.places.len());
    }

    #[test]
    fn adjacent_fingerprints_are_all_stored() {
        let mut table = Table::default();
        for low in 1..2000 {
            table.set(u128::MAX - low, state(1), |_| false, |_| {});
        }
        assert_eq!(table.len(), 1999);
        assert!((1..2000).all(|low| table.get(u128::MAX - low).is_some()));
    }
}
