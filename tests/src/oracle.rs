//! Oracles: compute the result of each algorithm directly from its definition and the list of admissions.
//!
//! An oracle keeps no level, no window and no counter. For every query it reads the whole list again, following the
//! definition literally, in 128-bit integers. It shares no code with the algorithms, so a mistake would have to be
//! made twice.
//!
//! | Algorithm | A request of cost c passes at `now` when |
//! |---|---|
//! | token-bucket, leaky-bucket | for every earlier admission: what was admitted from it on, and c, is at most burst + count*ticks since/period |
//! | fixed-window | what was admitted in the window of `now`, and c, is at most count |
//! | sliding-window | prev*(1-f) + cur + c is at most count |
//! | sliding-log | what was admitted less than a period ago, and c, is at most count |
//! | concurrency | fewer than count slots are held |
//!
//! [`Oracle::refund`] documents what a refund removes from the list.

use tollkeeper_core::contract::Hold;
use tollkeeper_core::{Algorithm, CheckedQuota};

/// The admissions of one key.
#[derive(Clone, Debug)]
pub struct Oracle {
    algorithm: Algorithm,
    /// In ticks.
    period: i128,
    /// In microseconds.
    tick: i128,
    shift: i128,
    hold: Option<i128>,
    quota: Terms,
    entries: Vec<Entry>,
}

#[derive(Clone, Copy, Debug)]
struct Terms {
    count: i128,
    burst: i128,
}

/// One admission, or the additional charge of a settlement.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The time on the clock of the key, in microseconds.
    pub at: i128,
    /// The same in ticks, and the number of its window: divisions of 128 bits are slow.
    ticks: i128,
    window: i128,
    /// The charge in [`Oracle::unit`]s, minus refunds.
    pub weight: i128,
    /// How much of it is still in the log: a refund removes the oldest units, not its own.
    logged: i128,
    /// Added by a settlement, so outside of the contract.
    settled: bool,
    /// When it leaves the queue, in microseconds.
    departs: i128,
    quota: Terms,
}

/// The result of a request by definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Says {
    /// Whether it passes.
    pub allowed: bool,
    /// The largest cost that would pass now.
    pub remaining: i128,
    /// Time until no admission counts any more, in microseconds.
    pub reset: i128,
    /// The delay in the queue if it passes, in microseconds.
    pub delay: i128,
}

impl Oracle {
    /// An oracle without admissions.
    pub fn new(quota: &CheckedQuota, shift: u64, hold: Option<u64>) -> Oracle {
        let tick = i128::from(quota.tick().span().as_micros());
        Oracle {
            algorithm: quota.algorithm(),
            period: i128::from(quota.period().as_micros()) / tick,
            tick,
            shift: shift.into(),
            hold: hold.map(i128::from),
            quota: Terms::of(quota),
            entries: Vec::new(),
        }
    }

    /// Activates another quota of the same period.
    pub fn change(&mut self, quota: &CheckedQuota) {
        self.quota = Terms::of(quota);
    }

    /// The weight of a cost of 1: buckets refund fractions of a unit, down to one in `period`.
    pub fn unit(&self) -> i128 {
        if self.algorithm.has_burst() { self.period } else { 1 }
    }

    /// The result of a request by definition, if nothing was admitted after `now`.
    pub fn says(&self, now: u64, cost: u64) -> Says {
        let (now, cost) = (i128::from(now), i128::from(cost));
        let Terms { count, burst } = self.quota;
        match self.algorithm {
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                let level = self.level(now);
                let empty = self.until(self.ticks(now) + ceil(level, count), now);
                let queued = if self.algorithm == Algorithm::LeakyBucket { empty } else { 0 };
                let in_time = self.hold.is_none_or(|hold| queued <= hold);
                Says {
                    allowed: level + cost * self.period <= burst * self.period && in_time,
                    remaining: ((burst * self.period - level).max(0)) / self.period,
                    reset: empty,
                    delay: queued,
                }
            }
            Algorithm::FixedWindow => {
                let used = self.used(now);
                let end = (self.window(now) + 1) * self.period - self.shift;
                self.counted(used, cost, if used > 0 { end - now } else { 0 })
            }
            Algorithm::SlidingWindow => {
                let (prev, cur) = (self.sum_of_window(self.window(now) - 1), self.used(now));
                let seen = self.period - self.ticks(now) % self.period;
                let used = prev * seen + cur * self.period;
                let end = (self.window(now) + if cur > 0 { 2 } else { 1 }) * self.period;
                Says {
                    allowed: used + cost * self.period <= count * self.period,
                    remaining: (count * self.period - used).max(0) / self.period,
                    reset: if prev + cur > 0 { self.until(end, now) } else { 0 },
                    delay: 0,
                }
            }
            Algorithm::SlidingLog => {
                let newest = self.live(now).map(|entry| entry.at).max();
                self.counted(self.used(now), cost, newest.map_or(0, |newest| newest + self.period - now))
            }
            Algorithm::Concurrency => unreachable!("slots are not a list of admissions: see `Slots`"),
        }
    }

    /// Records an admission, with its delay in microseconds.
    pub fn admit(&mut self, now: u64, cost: u64, delay: u64) {
        let at = i128::from(now);
        self.push(at, i128::from(cost) * self.unit(), false, at + i128::from(delay));
    }

    /// Records the additional charge of a settlement, capped so that at most twice the limit counts.
    pub fn settle(&mut self, now: u64, more: u64) {
        let (at, more) = (i128::from(now), i128::from(more) * self.unit());
        let room = (2 * self.quota.burst * self.unit() - self.used(at)).max(0);
        self.push(at, more.min(room), true, at);
    }

    /// Refunds `part` of an admission, as far as the algorithm allows:
    ///
    /// - a token bucket: what cannot have drained since, `min(part, cost - count*age/period)`;
    /// - a leaky bucket: nothing, because a queued request has delayed those behind it;
    /// - a fixed window: all, while the window lasts; a sliding window: all, also in the next window;
    /// - a log: all, while the admission counts. In the contract its own entry shrinks; in the log the oldest units
    ///   that count are removed, which frees the least.
    pub fn refund(&mut self, now: u64, index: usize, part: u64) {
        let (now, part) = (i128::from(now), i128::from(part) * self.unit());
        let entry = self.entries[index];
        let back = match self.algorithm {
            Algorithm::TokenBucket => {
                let count = self.quota.count.max(entry.quota.count);
                let drained = count * (self.ticks(now) - self.ticks(entry.at));
                part.min((entry.weight - drained).max(0))
            }
            Algorithm::FixedWindow if self.window(entry.at) == self.window(now) => part,
            Algorithm::SlidingWindow if self.window(entry.at) + 1 >= self.window(now) => part,
            Algorithm::SlidingLog if entry.at > now - self.period => part,
            _ => 0,
        };
        self.entries[index].weight -= back;
        let mut left = back;
        for entry in self.entries.iter_mut().filter(|entry| entry.at > now - self.period) {
            let gone = left.min(entry.logged);
            entry.logged -= gone;
            left -= gone;
        }
    }

    /// The number of entries, which is the index of the next one.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The admissions minus refunds, which the contract covers.
    pub fn admitted(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| !entry.settled)
    }

    /// The departures from the queue, in the order of admission: time in microseconds and cost.
    pub fn departures(&self) -> impl Iterator<Item = (i128, i128)> {
        self.admitted().map(|entry| (entry.departs, entry.weight / self.unit()))
    }

    /// Checks the contract literally over every interval, window or instant that ends with the last admission, under
    /// the active quotas. `None`, or the violation.
    pub fn breach(&self) -> Option<String> {
        let admitted: Vec<&Entry> = self.admitted().collect();
        let last = admitted.last()?;
        match self.algorithm {
            Algorithm::TokenBucket | Algorithm::LeakyBucket => self.breach_of_bucket(&admitted),
            Algorithm::FixedWindow => {
                let same = admitted.iter().filter(|entry| self.window(entry.at) == self.window(last.at));
                let sum: i128 = same.map(|entry| entry.weight).sum();
                (sum > last.quota.count).then(|| format!("{sum} in one window"))
            }
            Algorithm::SlidingWindow => self.breach_of_sliding_window(&admitted),
            Algorithm::SlidingLog => {
                let sum = self.sum_of_a_period(&admitted);
                (sum > last.quota.count).then(|| format!("{sum} in one period"))
            }
            Algorithm::Concurrency => None,
        }
    }

    /// In any interval d at most `burst + count*(d + tick)/period`: here times `unit * tick`.
    fn breach_of_bucket(&self, upto: &[&Entry]) -> Option<String> {
        let last = upto.last()?;
        let (mut sum, mut count) = (0, 0);
        for first in upto.iter().rev() {
            sum += first.weight;
            count = count.max(first.quota.count);
            let length = last.at - first.at;
            if sum * self.tick > last.quota.burst * self.period * self.tick + count * (length + self.tick) {
                return Some(format!("{sum}/{} in {length} us", self.period));
            }
        }
        None
    }

    /// `prev*(1-f) + cur <= count`, and in one period at most `2*count - 1`.
    fn breach_of_sliding_window(&self, upto: &[&Entry]) -> Option<String> {
        let last = upto.last()?;
        let of = |window| {
            let inside = upto.iter().filter(|entry| self.window(entry.at) == window);
            inside.map(|entry| entry.weight).sum::<i128>()
        };
        let window = self.window(last.at);
        let (prev, cur) = (of(window - 1), of(window));
        let seen = self.period - self.ticks(last.at) % self.period;
        if prev * seen + cur * self.period > last.quota.count * self.period {
            return Some(format!("{prev}*{seen}/{} + {cur}", self.period));
        }
        let most = upto.iter().map(|entry| entry.quota.count).max()?;
        let sum = self.sum_of_a_period(upto);
        (sum > 2 * most - 1).then(|| format!("{sum} in one period"))
    }

    /// Admissions in the half-open interval of one period that ends with the last.
    fn sum_of_a_period(&self, upto: &[&Entry]) -> i128 {
        let last = upto.last().expect("ends with an admission");
        let inside = upto.iter().filter(|entry| entry.at > last.at - self.period * self.tick);
        inside.map(|entry| entry.weight).sum()
    }

    /// The units that count now, without the previous window of a sliding window.
    fn used(&self, now: i128) -> i128 {
        match self.algorithm {
            Algorithm::TokenBucket | Algorithm::LeakyBucket => self.level(now),
            Algorithm::SlidingLog => self.live(now).map(|entry| entry.logged).sum(),
            _ => self.sum_of_window(self.window(now)),
        }
    }

    /// The largest excess over the rate of any interval of ticks up to now, times the period.
    fn level(&self, now: i128) -> i128 {
        let (mut sum, mut most) = (0, 0);
        let ticks = self.ticks(now);
        for entry in self.entries.iter().rev() {
            sum += entry.weight;
            most = most.max(sum - self.quota.count * (ticks - entry.ticks));
        }
        most
    }

    fn counted(&self, used: i128, cost: i128, reset: i128) -> Says {
        let count = self.quota.count;
        Says { allowed: used + cost <= count, remaining: (count - used).max(0), reset, delay: 0 }
    }

    fn sum_of_window(&self, window: i128) -> i128 {
        let inside = self.entries.iter().filter(|entry| entry.window == window);
        inside.map(|entry| entry.weight).sum()
    }

    /// The units of a log that count.
    fn live(&self, now: i128) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(move |entry| entry.logged > 0 && entry.at > now - self.period)
    }

    fn push(&mut self, at: i128, weight: i128, settled: bool, departs: i128) {
        let (ticks, window) = (self.ticks(at), self.window(at));
        let quota = self.quota;
        self.entries.push(Entry { at, ticks, window, weight, logged: weight, settled, departs, quota });
    }

    fn window(&self, at: i128) -> i128 {
        (self.ticks(at) + self.shift).div_euclid(self.period)
    }

    fn ticks(&self, at: i128) -> i128 {
        at.div_euclid(self.tick)
    }

    fn until(&self, tick: i128, now: i128) -> i128 {
        (tick * self.tick - now).max(0)
    }
}

/// The holds of the slots of a concurrency limit.
#[derive(Clone, Debug, Default)]
pub struct Slots {
    /// Every slot that was taken, in order.
    pub holds: Vec<Hold>,
}

impl Slots {
    /// How many slots are held.
    pub fn held(&self, now: u64) -> usize {
        self.holds.iter().filter(|hold| hold.from <= now && now < hold.until).count()
    }

    /// Takes a slot for `ttl`.
    pub fn take(&mut self, now: u64, ttl: u64) {
        self.holds.push(Hold { from: now, until: now + ttl });
    }

    /// Ends the hold of the n-th slot, counted from 1, at `until`; false if it was no longer held.
    pub fn until(&mut self, nth: usize, now: u64, until: u64) -> bool {
        let hold = &mut self.holds[nth - 1];
        let held = now < hold.until;
        if held {
            hold.until = until;
        }
        held
    }
}

impl Terms {
    fn of(quota: &CheckedQuota) -> Terms {
        Terms { count: quota.count().into(), burst: quota.burst().into() }
    }
}

fn ceil(number: i128, by: i128) -> i128 {
    -(-number).div_euclid(by)
}
