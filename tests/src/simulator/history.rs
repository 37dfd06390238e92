//! What the store admitted for one key, and whether that keeps the contract.

use tollkeeper::{Algorithm, Charge, CheckedQuota};
use tollkeeper_core::algorithm::Past;
use tollkeeper_core::charge::Item;
use tollkeeper_core::contract::{self, Admission, Hold, Rate, Windows};
use tollkeeper_core::lease::Lease;

use crate::oracle::Oracle;

/// The store's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct StoreTime {
    /// What it shows, in microseconds.
    pub shown: u64,
    /// What it would show if it had not been set back.
    pub passed: u64,
    /// How often it was set back.
    pub steps_back: u64,
}

impl StoreTime {
    /// By how much the clock was set back between this time and `later`.
    pub(super) fn set_back_until(&self, later: StoreTime) -> u64 {
        (later.passed - later.shown) - (self.passed - self.shown)
    }
}

/// The admissions of one key.
#[derive(Clone, Debug)]
pub(super) struct History {
    /// The last quota, with the largest count and burst that were in force.
    pub(super) quota: CheckedQuota,
    pub(super) count: u64,
    pub(super) burst: u64,
    pub(super) shift: u64,
    pub(super) entries: Vec<Entry>,
    pub(super) holds: Vec<(u64, Hold)>,
    pub(super) steps_back: u64,
    /// Units that were given back for admissions that the store had lost, or that its clock had left behind: they can be
    /// admitted once more.
    pub(super) credit: u64,
    /// The terms of the leases that were granted: if there are any, nodes may hold permits.
    pub(super) leases: Vec<Lease>,
    /// By how many ticks a refund counts a charge as older, at least, and whether there was one.
    pub(super) least_age: u64,
    pub(super) has_refunds: bool,
    /// How often the store lost the state while nodes may have held permits: each loss admits one contract more.
    pub(super) losses: u64,
    pub(super) oracle: Option<Oracle>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) id: u64,
    pub(super) at: StoreTime,
    /// The cost minus what was given back, in [`History::unit`]s.
    pub(super) weight: u64,
}

impl History {
    pub(super) fn new(quota: CheckedQuota, shift: u64, is_steady: bool) -> History {
        let oracle = is_steady && quota.algorithm() != Algorithm::Concurrency;
        History {
            quota,
            count: 0,
            burst: 0,
            shift,
            entries: Vec::new(),
            holds: Vec::new(),
            steps_back: 0,
            credit: 0,
            leases: Vec::new(),
            least_age: 0,
            has_refunds: false,
            losses: 0,
            oracle: oracle.then(|| Oracle::new(&quota, shift, None)),
        }
    }

    /// How much a cost of 1 weighs: a bucket gives back fractions of a unit.
    pub(super) fn unit(&self) -> u64 {
        if self.quota.algorithm().has_burst() { self.quota.period_ticks() } else { 1 }
    }

    /// Whether nodes may hold permits of this key.
    pub(super) fn is_leased(&self) -> bool {
        !self.leases.is_empty()
    }

    pub(super) fn in_force(&mut self, quota: &CheckedQuota) {
        (self.count, self.burst) = (self.count.max(quota.count()), self.burst.max(quota.burst()));
    }

    pub(super) fn admit(&mut self, id: u64, quota: CheckedQuota, cost: u64, at: StoreTime) {
        self.in_force(&quota);
        self.steps_back = at.steps_back;
        if quota.algorithm() == Algorithm::Concurrency {
            self.holds.push((id, Hold { from: at.passed, until: at.passed + quota.period().as_micros() }));
        }
        let weight = cost * self.unit();
        self.entries.push(Entry { id, at, weight });
        if let Some(oracle) = &mut self.oracle {
            oracle.admit(at.shown, cost, 0);
        }
    }

    /// Whether a request passes by definition; `None` if the definition cannot tell.
    pub(super) fn says(&self, quota: &CheckedQuota, cost: u64, now: StoreTime) -> Option<bool> {
        if quota.algorithm() == Algorithm::Concurrency {
            let held = self.holds.iter().filter(|(_, hold)| hold.until > now.passed).count();
            return Some((held as u64) < quota.count());
        }
        let oracle = self.oracle.as_ref()?;
        Some(oracle.says(now.shown, cost).allowed)
    }

    /// A bucket gives back what has not drained, as old and as fast as the correction says.
    pub(super) fn give_back(&mut self, charge: &Charge, item: &Item, past: &Past, part: u64, now: StoreTime) {
        let unit = self.unit();
        let ticks = item.quota.tick().number(tollkeeper::Time::from_micros(now.shown));
        let window = (ticks + self.shift) / item.quota.period_ticks();
        let back = match item.quota.algorithm() {
            Algorithm::TokenBucket => {
                let drained = past.count * ticks.saturating_sub(past.tick);
                (part * unit).min((item.cost * unit).saturating_sub(drained))
            }
            // After a step back, a charge may be in the window that is about to begin.
            Algorithm::FixedWindow if item.mark >= window => part,
            Algorithm::SlidingWindow if item.mark + 1 >= window => part,
            Algorithm::SlidingLog if item.mark + item.quota.period_ticks() > ticks => part,
            _ => 0,
        };
        self.has_refunds |= back > 0;
        // A request that was delivered twice has two entries. The charge is the receipt of one of them.
        let is_charged = |entry: &Entry| entry.id == charge.id();
        let is_receipt = |entry: &Entry| is_charged(entry) && entry.at.shown == charge.time().as_micros();
        let receipt = self.entries.iter().position(is_receipt);
        match receipt.or_else(|| self.entries.iter().position(is_charged)) {
            Some(index) => {
                if self.entries[index].at.set_back_until(now) > item.quota.window().as_micros() {
                    // The state was moved back and may have expired since, so that other units are given back (ADR 28).
                    self.credit += back;
                }
                self.entries[index].weight = self.entries[index].weight.saturating_sub(back);
                if self.entries[index].at.shown != charge.time().as_micros() {
                    // The store lost the admission that the charge is for, and was delivered the request again since.
                    self.oracle = None;
                }
                if let Some(oracle) = &mut self.oracle {
                    oracle.refund(now.shown, index, part);
                }
            }
            None => {
                self.credit += back;
                self.oracle = None;
            }
        }
    }

    /// A shortfall is charged outside of the contract.
    pub(super) fn settle(&mut self, more: u64, now: StoreTime) {
        if let Some(oracle) = &mut self.oracle {
            oracle.settle(now.shown, more);
            // Keeps the indexes of both lists equal.
            self.entries.push(Entry { id: 0, at: now, weight: 0 });
        }
    }

    pub(super) fn handle(&mut self, id: u64, renewed_for: Option<u64>, now: u64) {
        // A request that was delivered twice holds two slots under one ID: both are released, one is renewed.
        let mut held = self.holds.iter_mut().filter(|(of, hold)| *of == id && hold.until > now);
        match renewed_for {
            None => held.for_each(|(_, hold)| hold.until = now),
            Some(ttl) => held.by_ref().take(1).for_each(|(_, hold)| hold.until = now + ttl),
        }
    }

    /// By how much a raise is too small after a change of the limit, in [`History::unit`]s. A lease that was granted
    /// before does not know a larger count, and a refund does not know a longer life.
    pub(super) fn missing_raise(&self) -> u64 {
        let largest = self.leases.iter().map(|lease| lease.largest).max().unwrap_or(0).max(self.count);
        let missing = self.leases.iter().map(|lease| {
            let life = lease.life.as_micros() / self.quota.tick().span().as_micros();
            let refunded = if self.has_refunds { life.saturating_sub(self.least_age) } else { 0 };
            life * (largest - lease.largest) + refunded * lease.largest
        });
        missing.max().unwrap_or(0)
    }

    /// Where the history exceeds the contract, or the share of one of several nodes.
    pub(super) fn breach(&self, nodes: Option<u64>) -> Option<String> {
        let (unit, share, contracts) = (self.unit(), nodes.unwrap_or(1), 1 + self.losses);
        let part = |total: u64| (total / share).max(1);
        let period = self.quota.period().as_micros();
        let tick = self.quota.tick().span().as_micros();
        let on = |clock: fn(&StoreTime) -> u64| {
            let weighty = self.entries.iter().filter(|entry| entry.weight > 0);
            weighty.map(|entry| Admission { at: clock(&entry.at), cost: entry.weight }).collect::<Vec<_>>()
        };
        let (needed, limit) = match self.quota.algorithm() {
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                // Each step back may split a tick in two, which allows one more tick.
                let tick = tick * (1 + self.steps_back);
                let rate = Rate { count: self.count * unit * contracts, period: period * share, tick };
                (contract::bucket(&on(|at| at.passed), rate), part(self.burst) * unit + self.missing_raise())
            }
            Algorithm::SlidingLog => (contract::any_period(&on(|at| at.passed), period), part(self.count)),
            Algorithm::Concurrency => {
                let holds: Vec<Hold> = self.holds.iter().map(|(_, hold)| *hold).collect();
                (contract::concurrency(&holds), part(self.count))
            }
            Algorithm::FixedWindow | Algorithm::SlidingWindow => {
                let runs = self.entries.chunk_by(|a, b| a.at.steps_back == b.at.steps_back);
                let needed = runs.map(|run| {
                    let weighty = run.iter().filter(|entry| entry.weight > 0);
                    let run: Vec<Admission> =
                        weighty.map(|entry| Admission { at: entry.at.shown, cost: entry.weight }).collect();
                    // Windows begin early by the shift, which equals beginning late by the rest of the period.
                    let windows = Windows { period, offset: period - self.shift };
                    if self.quota.algorithm() == Algorithm::FixedWindow {
                        return contract::fixed_window(&run, windows);
                    }
                    // At most 2*count - 1.
                    let in_a_period = (contract::any_period(&run, period) + 1).div_ceil(2);
                    contract::sliding_window(&run, windows, tick).max(in_a_period)
                });
                (needed.max().unwrap_or(0), part(self.count))
            }
        };
        let limit = u128::from(limit) * u128::from(contracts) + u128::from(self.credit);
        (needed > limit).then(|| format!("a history needs {needed} of {limit}"))
    }
}
