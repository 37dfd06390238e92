//! One shard of the store, behind one lock: states, the cells that keys share when the store is full, and the
//! markers of corrected charges.

use tollkeeper_core::algorithm::{Effect, State, Step, StoredState, sliding_log};
use tollkeeper_core::{CheckedQuota, Due, Time};

use super::markers::Markers;
use super::state::{Packed, StateKind};
use super::table::Table;

/// The data behind one lock.
///
/// The order of the fields matters: those that every decision needs come first, on the same cache line as the lock,
/// so that locking a shard moves one line to this core.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Shard {
    /// The states of keys.
    pub(super) table: Table,
    /// The counter for admission IDs.
    pub(super) admissions: u64,
    /// States that several keys share, because the store was full.
    pub(super) cells: Table,
    /// Charges that have been corrected.
    pub(super) markers: Markers,
    /// States that do not fit into an entry.
    wide: Vec<Option<State>>,
    vacant: Vec<u32>,
    /// The change in bytes of logs since the store last took it over.
    pub(super) log_bytes: Bytes,
    /// Entries that [`Shard::reclaim`] has examined.
    #[cfg(test)]
    pub(super) examined: usize,
}

/// How many entries one call examines to free space: this takes a few hundred nanoseconds.
pub(super) const SLICE: usize = KEY_SLICE + CELL_SLICE;
const KEY_SLICE: usize = 64;
/// Fewer are enough: cells are created only while the store is full, and each such call examines this many.
const CELL_SLICE: usize = 16;

/// A change in a number of bytes.
pub(super) type Bytes = isize;

/// Where a state is, or will be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Spot {
    /// The limit grants nothing, and has no state.
    #[default]
    Nowhere,
    /// The entry of this fingerprint, last seen at this index.
    Own(u128, usize),
    /// A new entry, whose space is reserved. It starts as a copy of the shared cell, if there is one.
    New(u128, Option<Packed>),
    /// The shared cell with this fingerprint.
    Shared(u128, Option<Packed>),
}

/// What is needed to decode states: a quota, and the shift of its windows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lens<'q> {
    pub(super) quota: &'q CheckedQuota,
    pub(super) shift: u64,
}

impl<'d> Lens<'d> {
    /// For the states of a due.
    #[inline]
    pub(super) fn of(due: &Due<'d>) -> Lens<'d> {
        Lens { quota: due.quota, shift: due.shift }
    }
}

impl Shard {
    /// An empty shard that numbers its admissions from `admissions` on.
    pub(super) fn new(admissions: u64) -> Shard {
        Shard { admissions, ..Shard::default() }
    }

    /// Bytes of its tables, without logs.
    pub(super) fn bytes(&self) -> usize {
        let tables = self.table.bytes() + self.cells.bytes() + self.markers.bytes();
        tables + self.wide.capacity() * size_of::<Option<State>>() + self.vacant.capacity() * size_of::<u32>()
    }

    /// The state in a spot.
    #[inline(always)]
    pub(super) fn stored(&mut self, spot: Spot, lens: Lens<'_>) -> StoredState<'_> {
        let Some(packed) = self.packed(spot) else { return StoredState::Nothing };
        match packed.stored(lens.quota, lens.shift) {
            Some(stored) => stored,
            None => self.beside(packed).map_or(StoredState::Nothing, State::stored),
        }
    }

    /// Writes the result of a step: a charge, or only the correction after the clock stepped back. Space for a new key
    /// has been reserved.
    #[inline(always)]
    pub(super) fn enter(
        &mut self,
        spot: Spot,
        due: &Due<'_>,
        step: &Step,
        charged: bool,
        now: Time,
        id: u64,
    ) -> Dropped {
        let packed = match &step.effect {
            Effect::Meter(step) => Packed::meter(due.quota, if charged { step.after } else { step.before }),
            Effect::FixedWindow(step) => {
                Packed::fixed_window(due.quota, due.shift, if charged { step.after } else { step.before })
            }
            _ => {
                // Copies: a reference to them would force them out of registers on the other paths, too.
                let (due, step) = (*due, *step);
                return self.write(spot, Lens::of(&due), now, move |state| {
                    due.apply(state, now, &step, charged, id)
                });
            }
        };
        self.put(spot, packed, now)
    }

    /// Replaces the state in a spot with the result of `change`.
    pub(super) fn write(
        &mut self,
        spot: Spot,
        lens: Lens<'_>,
        now: Time,
        change: impl FnOnce(Option<State>) -> Option<State>,
    ) -> Dropped {
        let (state, place) = self.take(spot, lens);
        let Some(state) = change(state) else { return Dropped(0) };
        let packed = match Packed::pack(lens.quota, lens.shift, &state) {
            Some(packed) => {
                self.vacant.extend(place);
                packed
            }
            None => {
                let expires = state.fresh_at(lens.quota, lens.shift);
                Packed::wide(expires, self.keep(state, place))
            }
        };
        self.put(spot, packed, now)
    }

    #[inline(always)]
    fn put(&mut self, spot: Spot, packed: Packed, now: Time) -> Dropped {
        match spot {
            Spot::Nowhere => {}
            Spot::Own(print, place) => *self.table.at(place, print).expect("a state that was found") = packed,
            Spot::New(print, _) => return self.insert(print, packed, now),
            Spot::Shared(print, _) => self.cells.set(print, packed, |_| false, |_| {}),
        }
        Dropped(0)
    }

    /// Removes the state of a key; false if there was none.
    pub(super) fn forget(&mut self, print: u128) -> bool {
        match self.table.remove(print) {
            Some(packed) => {
                self.drop_wide(packed);
                true
            }
            None => false,
        }
    }

    /// Drops every state and every cell that equals a fresh one.
    pub(super) fn sweep(&mut self, now: Time) -> Dropped {
        let mut wides = Vec::new();
        let before = self.table.len();
        self.table.sweep(|state| state.expires() <= now, |state| wides.push(state));
        self.cells.sweep(|state| state.expires() <= now, |state| wides.push(state));
        let dropped = Dropped(before - self.table.len());
        wides.into_iter().for_each(|packed| self.drop_wide(packed));
        self.compact();
        dropped
    }

    /// Like [`Shard::sweep`], but only for the next few entries of each table. It does not compact the states outside
    /// of the tables: their free indexes are reused.
    pub(super) fn reclaim(&mut self, now: Time) -> Dropped {
        let mut wides = Vec::new();
        let before = self.table.len();
        let mut examined = 0;
        for (table, slice) in [(&mut self.table, KEY_SLICE), (&mut self.cells, CELL_SLICE)] {
            let gone = |state: Packed| {
                if let StateKind::Wide(_) = state.kind() {
                    wides.push(state);
                }
            };
            examined += table.sweep_slice(slice, |state| state.expires() <= now, gone);
        }
        wides.into_iter().for_each(|packed| self.drop_wide(packed));
        debug_assert!(examined <= SLICE);
        #[cfg(test)]
        {
            self.examined += examined;
        }
        Dropped(before - self.table.len())
    }

    /// The state outside of the table that an entry refers to.
    pub(super) fn beside(&self, packed: Packed) -> Option<&State> {
        match packed.kind() {
            StateKind::Wide(place) => self.wide[place as usize].as_ref(),
            _ => None,
        }
    }

    /// Restores an entry from a snapshot.
    pub(super) fn restore(
        &mut self,
        into: fn(&mut Shard) -> &mut Table,
        print: u128,
        packed: Packed,
        wide: Option<State>,
    ) {
        let packed = match wide {
            Some(state) => Packed::wide(packed.expires(), self.keep(state, None)),
            None => packed,
        };
        into(self).set(print, packed, |_| false, |_| {});
    }

    /// Whether the log in a spot can grow by this many bytes without a new allocation.
    pub(super) fn log_fits(&mut self, spot: Spot, bytes: usize) -> bool {
        let state = self.packed(spot).and_then(|packed| self.beside(packed));
        matches!(state, Some(State::SlidingLog(log)) if log.capacity() - log.len() >= bytes)
    }

    /// Moves a key's log into the shared cell, because there is no space for it to grow.
    pub(super) fn share_log(&mut self, print: u128, cell: u128, lens: Lens<'_>, now: Time) {
        let Some(packed) = self.table.get(print) else { return };
        let (own, _) = self.take(Spot::Own(print, usize::MAX), lens);
        self.drop_wide(packed);
        self.table.remove(print);
        let spot = Spot::Shared(cell, self.cells.get(cell));
        let _ = self.write(spot, lens, now, |shared| {
            let log = |state: &Option<State>| {
                if let Some(State::SlidingLog(log)) = state { log.clone() } else { Vec::new() }
            };
            Some(State::SlidingLog(sliding_log::merge(&log(&own), &log(&shared), 2 * lens.quota.count())))
        });
    }

    #[inline(always)]
    fn packed(&mut self, spot: Spot) -> Option<Packed> {
        match spot {
            Spot::Nowhere => None,
            Spot::Own(print, place) => self.table.at(place, print).map(|packed| *packed),
            Spot::New(_, state) | Spot::Shared(_, state) => state,
        }
    }

    /// Takes the state out of a spot, with the index outside of the table that it frees. The state of a new key is
    /// copied from the shared cell, because other keys still use that.
    #[inline]
    fn take(&mut self, spot: Spot, lens: Lens<'_>) -> (Option<State>, Option<u32>) {
        let Some(packed) = self.packed(spot) else { return (None, None) };
        let StateKind::Wide(place) = packed.kind() else {
            return (packed.stored(lens.quota, lens.shift).and_then(StoredState::to_state), None);
        };
        if let Spot::New(..) = spot {
            return (self.wide[place as usize].clone(), None);
        }
        let state = self.wide[place as usize].take();
        self.log_bytes -= log_bytes(state.as_ref());
        (state, Some(place))
    }

    fn keep(&mut self, state: State, place: Option<u32>) -> u32 {
        self.log_bytes += log_bytes(Some(&state));
        let place = place.or_else(|| self.vacant.pop()).unwrap_or_else(|| {
            self.wide.push(None);
            u32::try_from(self.wide.len() - 1).expect("fewer than 2^32 logs fit in memory")
        });
        self.wide[place as usize] = Some(state);
        place
    }

    #[inline(never)]
    fn insert(&mut self, print: u128, packed: Packed, now: Time) -> Dropped {
        let mut wides = Vec::new();
        let before = self.table.len();
        self.table.set(print, packed, |state| state.expires() <= now, |state| wides.push(state));
        let dropped = Dropped(before + 1 - self.table.len());
        wides.into_iter().for_each(|packed| self.drop_wide(packed));
        dropped
    }

    /// Compacts the states outside of the table when three quarters of their indexes are free.
    fn compact(&mut self) {
        let kept = self.wide.len() - self.vacant.len();
        if kept * 4 >= self.wide.len() {
            return;
        }
        let mut wide = Vec::with_capacity(kept);
        for packed in self.table.states_mut().chain(self.cells.states_mut()) {
            if let StateKind::Wide(place) = packed.kind() {
                let closer = u32::try_from(wide.len()).expect("not further than it was");
                *packed = Packed::wide(packed.expires(), closer);
                wide.push(self.wide[place as usize].take());
            }
        }
        (self.wide, self.vacant) = (wide, Vec::new());
    }

    fn drop_wide(&mut self, packed: Packed) {
        if let StateKind::Wide(place) = packed.kind() {
            let state = self.wide[place as usize].take();
            self.log_bytes -= log_bytes(state.as_ref());
            self.vacant.push(place);
        }
    }
}

/// The number of keys that were dropped because their state equals a fresh one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) struct Dropped(pub(super) usize);

fn log_bytes(state: Option<&State>) -> Bytes {
    match state {
        Some(State::SlidingLog(log)) => Bytes::try_from(log.capacity()).expect("a log fits in memory"),
        _ => 0,
    }
}
