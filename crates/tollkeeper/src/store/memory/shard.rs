//! One part of the store, under one lock: states, the cells that keys share when there is no room for
//! more, and the markers of charges that have been corrected.

use tollkeeper_core::algorithm::{Effect, Seen, State, Step, sliding_log};
use tollkeeper_core::{Due, Quota, Time};

use super::markers::Markers;
use super::state::{Kind, Packed};
use super::table::Table;

/// What is behind one lock.
///
/// In this order: what every decision needs stands right behind the lock, on the same cache line, so that
/// a shard comes to another core in one piece.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Shard {
    /// The states of keys.
    pub(super) table: Table,
    /// Numbers the admissions that were entered here.
    pub(super) admissions: u64,
    /// States that several keys share, because there was no room for their own.
    pub(super) cells: Table,
    /// Charges that have been corrected.
    pub(super) markers: Markers,
    /// States that do not fit into an entry.
    wide: Vec<Option<State>>,
    vacant: Vec<u32>,
    /// Bytes of logs, kept and freed since the store last asked.
    pub(super) log_bytes: Bytes,
    /// Entries that [`Shard::reclaim`] has looked at.
    #[cfg(test)]
    pub(super) examined: usize,
}

/// How many entries of its tables one call looks at to find room: a few hundred nanoseconds' worth.
pub(super) const SLICE: usize = KEY_SLICE + CELL_SLICE;
const KEY_SLICE: usize = 64;
/// Fewer: cells are made only while there is no room, and each of those calls looks at so many.
const CELL_SLICE: usize = 16;

/// How a number of bytes has changed.
pub(super) type Bytes = isize;

/// Where a state is, or will be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Spot {
    /// The quota is nothing, and has no state.
    #[default]
    Nowhere,
    /// In the place of this fingerprint, last seen there.
    Own(u128, usize),
    /// Nowhere yet, but there is room. It begins as the shared cell does, if there is one.
    New(u128, Option<Packed>),
    /// In the shared cell of this fingerprint.
    Shared(u128, Option<Packed>),
}

/// How a quota's states are read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lens<'q> {
    pub(super) quota: &'q Quota,
    pub(super) shift: u64,
}

impl<'d> Lens<'d> {
    /// How the states of a due are read.
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

    /// Bytes of its tables, without what logs hold.
    pub(super) fn bytes(&self) -> usize {
        let tables = self.table.bytes() + self.cells.bytes() + self.markers.bytes();
        tables + self.wide.capacity() * size_of::<Option<State>>() + self.vacant.capacity() * size_of::<u32>()
    }

    /// The state in a spot.
    #[inline(always)]
    pub(super) fn seen(&mut self, spot: Spot, lens: Lens<'_>) -> Seen<'_> {
        let Some(packed) = self.packed(spot) else { return Seen::Nothing };
        match packed.seen(lens.quota, lens.shift) {
            Some(seen) => seen,
            None => self.beside(packed).map_or(Seen::Nothing, State::seen),
        }
    }

    /// Writes down what a step decided: an admission, or only that the clock has stepped back. Room for
    /// a new key has been reserved.
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
                return self
                    .write(spot, Lens::of(due), now, |state| due.apply(state, now, step, charged, id));
            }
        };
        self.put(spot, packed, now)
    }

    /// Replaces the state in a spot by what `change` makes of it.
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

    /// Drops every state and every cell that is as good as fresh.
    pub(super) fn sweep(&mut self, now: Time) -> Dropped {
        let mut wides = Vec::new();
        let before = self.table.len();
        self.table.sweep(|state| state.expires() <= now, |state| wides.push(state));
        self.cells.sweep(|state| state.expires() <= now, |state| wides.push(state));
        let dropped = Dropped(before - self.table.len());
        wides.into_iter().for_each(|packed| self.drop_wide(packed));
        self.close_ranks();
        dropped
    }

    /// As [`Shard::sweep`], for the next few entries of each table only. States beside the tables are not
    /// moved together: the places that are left empty there are used again.
    pub(super) fn reclaim(&mut self, now: Time) -> Dropped {
        let mut wides = Vec::new();
        let before = self.table.len();
        let mut examined = 0;
        for (table, slice) in [(&mut self.table, KEY_SLICE), (&mut self.cells, CELL_SLICE)] {
            let gone = |state: Packed| {
                if let Kind::Wide(_) = state.kind() {
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

    /// The state that an entry says lives beside the table.
    pub(super) fn beside(&self, packed: Packed) -> Option<&State> {
        match packed.kind() {
            Kind::Wide(place) => self.wide[place as usize].as_ref(),
            _ => None,
        }
    }

    /// Puts back what a snapshot held.
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

    /// Whether the log in a spot can take so many bytes more where it is.
    pub(super) fn log_fits(&mut self, spot: Spot, bytes: usize) -> bool {
        let state = self.packed(spot).and_then(|packed| self.beside(packed));
        matches!(state, Some(State::SlidingLog(log)) if log.capacity() - log.len() >= bytes)
    }

    /// Moves a key's log into the shared cell, because there is no room for it to grow.
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

    /// Takes the state out of a spot, with the place beside the table that it leaves empty. What a new
    /// key begins with is copied, because others go on sharing it.
    #[inline]
    fn take(&mut self, spot: Spot, lens: Lens<'_>) -> (Option<State>, Option<u32>) {
        let Some(packed) = self.packed(spot) else { return (None, None) };
        let Kind::Wide(place) = packed.kind() else {
            return (packed.seen(lens.quota, lens.shift).and_then(Seen::to_state), None);
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

    /// Moves the states beside the table together when three quarters of their places are empty.
    fn close_ranks(&mut self) {
        let kept = self.wide.len() - self.vacant.len();
        if kept * 4 >= self.wide.len() {
            return;
        }
        let mut wide = Vec::with_capacity(kept);
        for packed in self.table.states_mut().chain(self.cells.states_mut()) {
            if let Kind::Wide(place) = packed.kind() {
                let closer = u32::try_from(wide.len()).expect("not further than it was");
                *packed = Packed::wide(packed.expires(), closer);
                wide.push(self.wide[place as usize].take());
            }
        }
        (self.wide, self.vacant) = (wide, Vec::new());
    }

    fn drop_wide(&mut self, packed: Packed) {
        if let Kind::Wide(place) = packed.kind() {
            let state = self.wide[place as usize].take();
            self.log_bytes -= log_bytes(state.as_ref());
            self.vacant.push(place);
        }
    }
}

/// How many keys lost their place because their state was as good as fresh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) struct Dropped(pub(super) usize);

fn log_bytes(state: Option<&State>) -> Bytes {
    match state {
        Some(State::SlidingLog(log)) => Bytes::try_from(log.capacity()).expect("a log fits in memory"),
        _ => 0,
    }
}
