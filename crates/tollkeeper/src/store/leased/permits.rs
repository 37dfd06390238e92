//! The permits of a key: units that the store granted to this node in advance, each until it expires.

use std::collections::VecDeque;

use tollkeeper_core::inline::Inline;
use tollkeeper_core::lease::Lease;
use tollkeeper_core::{Due, Span, Time};

use crate::store::LeaseGrant;

/// Units of one grant that are not spent yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Permits {
    pub(super) units: u64,
    /// On this node's clock. At this time they can no longer be spent.
    expires: Time,
    /// Where a charge that spends them counts as recorded.
    pub(super) mark: u64,
}

/// What a toll took from a pool.
pub(super) type Taken = Inline<Permits, 2>;

/// All permits of a key, those that expire first in front.
#[derive(Debug, Default)]
pub(super) struct Pool {
    grants: VecDeque<Permits>,
    /// Units of all grants.
    units: u64,
}

/// The most grants that are kept apart. Beyond, two are merged into one that expires with the earlier.
const MAX_GRANTS: usize = 16;

impl Permits {
    /// The permits of a grant. The store read its clock after `sent`, so they expire too early rather than too late.
    pub(super) fn of(grant: &LeaseGrant, due: &Due<'_>, lease: &Lease, sent: Time) -> Option<Permits> {
        let state = grant.state.as_ref()?;
        let window = Lease::window_end(due.quota, state, due.shift).map(|end| end.since(grant.time));
        let life = window.map_or(lease.life, |window| window.min(lease.life));
        Some(Permits { units: grant.units, expires: sent + spendable(life), mark: Lease::mark(state) })
    }
}

/// How long permits can be spent after they were asked for: the clocks of node and store may differ by a thousandth,
/// and a clock is read with an error of up to a millisecond.
fn spendable(life: Span) -> Span {
    let life = life.as_micros();
    Span::from_micros(life.saturating_sub(life.div_ceil(1_000) + 2_000))
}

impl Pool {
    /// Drops permits that have expired, and returns how many.
    #[inline]
    pub(super) fn expire(&mut self, now: Time) -> u64 {
        let mut expired = 0;
        while let Some(first) = self.grants.front().filter(|permits| permits.expires <= now) {
            expired += first.units;
            self.grants.pop_front();
        }
        self.units -= expired;
        expired
    }

    /// Units in it.
    #[inline]
    pub(super) fn units(&self) -> u64 {
        self.units
    }

    /// Adds the permits of a grant.
    pub(super) fn add(&mut self, permits: Permits) {
        let place = self.grants.partition_point(|other| other.expires <= permits.expires);
        self.grants.insert(place, permits);
        self.units += permits.units;
        if self.grants.len() > MAX_GRANTS {
            let (first, second) = (self.grants[0], self.grants[1]);
            self.grants.pop_front();
            self.grants[0] = Permits {
                units: first.units + second.units,
                mark: first.mark.min(second.mark),
                expires: first.expires,
            };
        }
    }

    /// Takes this many units, those that expire first. The caller has checked that they are there.
    pub(super) fn take(&mut self, units: u64) -> Taken {
        let mut taken = Taken::default();
        self.remove(units, |permits| taken.push(permits));
        taken
    }

    /// As [`Pool::take`], for units that are not put back. Returns where their charge counts as recorded.
    #[inline]
    pub(super) fn spend(&mut self, units: u64) -> u64 {
        let mut oldest = u64::MAX;
        self.remove(units, |permits| oldest = oldest.min(permits.mark));
        if units == 0 { 0 } else { oldest }
    }

    #[inline]
    fn remove(&mut self, units: u64, mut removed: impl FnMut(Permits)) {
        self.units -= units;
        let mut missing = units;
        while missing > 0 {
            let first = self.grants.front_mut().expect("the pool has enough units");
            let part = first.units.min(missing);
            removed(Permits { units: part, ..*first });
            first.units -= part;
            missing -= part;
            if first.units == 0 {
                self.grants.pop_front();
            }
        }
    }

    /// Returns units that were not spent. Those that have expired since are lost; returns how many those were.
    pub(super) fn put_back(&mut self, taken: &[Permits], now: Time) -> u64 {
        let (alive, expired): (Vec<Permits>, Vec<Permits>) =
            taken.iter().partition(|permits| permits.expires > now);
        alive.into_iter().for_each(|permits| self.add(permits));
        expired.iter().map(|permits| permits.units).sum()
    }

    /// Drops everything, and returns how much that was.
    pub(super) fn clear(&mut self) -> u64 {
        self.grants.clear();
        std::mem::take(&mut self.units)
    }
}

/// Where a charge that spends these counts as recorded: as the oldest of them.
pub(super) fn mark(taken: &[Permits]) -> u64 {
    taken.iter().map(|permits| permits.mark).min().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Time {
        Time::from_micros(1_000_000 + millis * 1_000)
    }

    fn permits(units: u64, expires: u64, mark: u64) -> Permits {
        Permits { units, expires: at(expires), mark }
    }

    #[test]
    fn permits_that_expire_first_are_spent_first() {
        let mut pool = Pool::default();
        pool.add(permits(5, 30, 3));
        pool.add(permits(5, 20, 2));
        assert_eq!(pool.take(7)[..], [permits(5, 20, 2), permits(2, 30, 3)]);
        assert_eq!(pool.units(), 3);
    }

    #[test]
    fn expired_permits_are_dropped() {
        let mut pool = Pool::default();
        pool.add(permits(5, 20, 2));
        pool.add(permits(7, 30, 3));
        assert_eq!((pool.expire(at(19)), pool.units()), (0, 12));
        assert_eq!((pool.expire(at(20)), pool.units()), (5, 7));
    }

    #[test]
    fn permits_are_put_back_while_they_live() {
        let mut pool = Pool::default();
        pool.add(permits(5, 20, 2));
        pool.add(permits(7, 30, 3));
        let taken = pool.take(12);
        assert_eq!((pool.put_back(&taken, at(20)), pool.units()), (5, 7));
        let taken = pool.take(7);
        assert_eq!((pool.put_back(&taken, at(29)), pool.units()), (0, 7));
    }

    #[test]
    fn number_of_grants_is_bounded() {
        let mut pool = Pool::default();
        (0..100).for_each(|number| pool.add(permits(1, 100 + number, 100 - number)));
        assert_eq!((pool.grants.len(), pool.units()), (MAX_GRANTS, 100));
        assert_eq!(pool.grants[0], permits(85, 100, 16));
    }

    #[test]
    fn charge_is_as_old_as_the_oldest_permit() {
        assert_eq!(mark(&[permits(1, 10, 7), permits(1, 20, 5)]), 5);
    }
}
