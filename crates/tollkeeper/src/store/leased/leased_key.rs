//! A leased key on this node: its permits, its demand, and when to ask the store for more.

use tollkeeper_core::lease::Lease;
use tollkeeper_core::{CheckedQuota, Due, Span, Time};

use super::heat::Heat;
use super::permits::{Permits, Pool};
use crate::store::LeaseGrant;

/// After a failed call, the store is not asked for permits for this long.
const FAILURE_PAUSE: Span = Span::from_millis(10);
/// The shortest pause after a grant that was smaller than wanted.
const SHORTEST_PAUSE: Span = Span::from_millis(10);
/// For this long after such a pause, requests without permits are still refused: a grant is on its way.
const GRACE: Span = Span::from_millis(20);
/// A node asks for what it uses in this time, and for [`USUAL_WANT`] if that is more.
const WANTED_TIME: Span = Span::from_micros(12_500);
const USUAL_WANT: u64 = 128;
/// Fewer units are not worth a call.
const LEAST_WANT: u64 = 4;

/// What this node holds of a leased key.
#[derive(Debug)]
pub(super) struct LeasedKey {
    pub(super) pool: Pool,
    /// The quota that the permits were granted under, and the largest count of its limit then.
    quota: CheckedQuota,
    largest: u64,
    /// Incremented whenever all permits are dropped: units of an earlier generation are not put back.
    pub(super) generation: u64,
    heat: Heat,
    /// Whether the store is being asked for permits.
    asking: bool,
    /// The store is not asked before this time.
    paused_until: Time,
    /// Until this time permits are scarce: a request without permits is refused.
    scarce_until: Time,
}

impl LeasedKey {
    pub(super) fn new(quota: &CheckedQuota, lease: &Lease) -> LeasedKey {
        LeasedKey {
            pool: Pool::default(),
            quota: *quota,
            largest: lease.largest,
            generation: 0,
            heat: Heat::default(),
            asking: false,
            paused_until: Time::default(),
            scarce_until: Time::default(),
        }
    }

    /// Drops permits that have expired, and all permits if they were granted under another quota or if the largest count
    /// of the limit has grown. Returns how many.
    pub(super) fn refresh(&mut self, due: &Due<'_>, lease: &Lease, now: Time) -> u64 {
        if self.quota == *due.quota && lease.largest <= self.largest {
            return self.pool.expire(now);
        }
        (self.quota, self.largest) = (*due.quota, lease.largest);
        self.drop_permits()
    }

    /// Drops all permits, and returns how many.
    pub(super) fn drop_permits(&mut self) -> u64 {
        self.generation += 1;
        self.pool.clear()
    }

    /// Until when a request that the permits do not cover is refused; `None` if it may ask the store.
    pub(super) fn scarce_until(&self, now: Time) -> Option<Time> {
        (now < self.scarce_until).then_some(self.scarce_until)
    }

    /// Counts a request that was admitted, or that this key refused.
    pub(super) fn used(&mut self, units: u64, lease: &Lease, now: Time) {
        self.heat.add(units, now, recent(lease));
    }

    /// How many units to ask the store for; `None` if it should not be asked now.
    pub(super) fn want(&mut self, lease: &Lease, now: Time) -> Option<u64> {
        if self.asking || now < self.paused_until {
            return None;
        }
        let recent = recent(lease);
        let heat = self.heat.units(now, recent);
        let wanted = heat.saturating_mul(WANTED_TIME.as_micros()) / recent.as_micros();
        let want = heat.min(wanted.max(USUAL_WANT));
        (want >= LEAST_WANT && self.pool.units() < want / 2).then_some(want)
    }

    /// The store is asked for permits.
    pub(super) fn ask(&mut self) {
        self.asking = true;
    }

    /// The store was asked for permits, and did not answer.
    pub(super) fn unanswered(&mut self, now: Time) {
        self.asking = false;
        self.paused_until = now + FAILURE_PAUSE;
    }

    /// The store granted permits, fewer than wanted if they are scarce.
    pub(super) fn granted(&mut self, asked: &Asked<'_>, grant: &LeaseGrant, now: Time) -> Granted {
        self.asking = false;
        if grant.units < asked.want {
            self.paused_until = now + pause(asked.due.quota, asked.lease);
            self.scarce_until = self.paused_until + GRACE;
        }
        let permits = Permits::of(grant, &asked.due, asked.lease, asked.sent);
        match permits.filter(|_| self.generation == asked.generation && grant.units > 0) {
            Some(permits) => {
                self.pool.add(permits);
                Granted { units: grant.units, lost: 0 }
            }
            None => Granted { units: grant.units, lost: grant.units },
        }
    }
}

/// What the store was asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked<'a> {
    pub(super) due: Due<'a>,
    pub(super) lease: &'a Lease,
    pub(super) want: u64,
    pub(super) generation: u64,
    pub(super) sent: Time,
}

/// Units that were granted, and how many of them cannot be used.
#[derive(Clone, Copy, Debug)]
pub(super) struct Granted {
    pub(super) units: u64,
    pub(super) lost: u64,
}

/// The time over which demand is measured.
fn recent(lease: &Lease) -> Span {
    Span::from_micros((lease.life.as_micros() / 2).max(1))
}

/// How long to wait after a grant that was smaller than wanted: until 64 units are refilled, within bounds.
fn pause(quota: &CheckedQuota, lease: &Lease) -> Span {
    let refill = 64 * u128::from(quota.period().as_micros()) / u128::from(quota.count().max(1));
    let longest = Span::from_micros(lease.life.as_micros() / 4).max(SHORTEST_PAUSE);
    Span::from_micros(u64::try_from(refill).unwrap_or(u64::MAX)).clamp(SHORTEST_PAUSE, longest)
}
