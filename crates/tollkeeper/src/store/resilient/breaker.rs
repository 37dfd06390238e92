//! The circuit breaker: stops calls to a store that fails, and probes whether it has recovered.

use tollkeeper_core::{Span, Time};

/// When a breaker opens, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerSettings {
    /// Open after this many failures in a row.
    pub failures: u32,
    /// Open when more than this part of the last 100 calls failed, in hundredths of a percent: 5,000 for half.
    pub late_basis_points: u32,
    /// How long to stay open before a probe.
    pub cooldown: Span,
}

impl Default for BreakerSettings {
    fn default() -> BreakerSettings {
        BreakerSettings { failures: 5, late_basis_points: 5_000, cooldown: Span::from_secs(1) }
    }
}

/// Which calls a breaker lets through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// All: the store answers.
    Closed,
    /// None: the store fails.
    Open,
    /// One, to probe whether the store answers again.
    HalfOpen,
}

/// Whether a request may call the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// Yes.
    Ask,
    /// Yes, and its result decides whether the breaker closes.
    Probe,
    /// No: use the fallback.
    Stay,
}

/// The number of recent calls that the failure rate is computed from.
const WINDOW: u32 = 100;
/// The fewest calls that a failure rate is computed from.
const MIN_CALLS: u32 = 20;

/// The state machine. Time and randomness are arguments, so that tests control both.
#[derive(Debug)]
pub(crate) struct Breaker {
    settings: BreakerSettings,
    state: Phase,
    failures: u32,
    /// When the last failure was noticed.
    failed: Time,
    /// The last calls, the newest in the lowest bit: 1 for a failure.
    late: u128,
    /// The number of valid bits in `late`.
    seen: u32,
    /// [`Remote::arrivals`](crate::store::Remote::arrivals) at the last check.
    arrivals: u64,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Closed,
    /// Until this time.
    Open(Time),
    /// A probe is in flight. It counts as lost from this time on.
    HalfOpen(Time),
}

impl Breaker {
    pub(crate) fn new(settings: BreakerSettings) -> Breaker {
        Breaker {
            settings,
            state: Phase::Closed,
            failures: 0,
            failed: Time::default(),
            late: 0,
            seen: 0,
            arrivals: 0,
        }
    }

    /// Whether a request may call the store now.
    pub(crate) fn pass(&mut self, now: Time) -> Pass {
        match self.state {
            Phase::Closed => Pass::Ask,
            Phase::Open(until) | Phase::HalfOpen(until) if now < until => Pass::Stay,
            Phase::Open(_) | Phase::HalfOpen(_) => {
                // A probe whose caller drops it never reports a result: allow another one after a cooldown.
                self.state = Phase::HalfOpen(now + self.settings.cooldown);
                Pass::Probe
            }
        }
    }

    /// Records the number of connections at the time the breaker opened.
    pub(crate) fn left_at(&mut self, arrivals: u64) {
        self.arrivals = arrivals;
    }

    /// Whether the store has reconnected since. If so, the next request may probe it before the pause is over.
    pub(crate) fn has_come(&mut self, arrivals: u64, now: Time) -> bool {
        let reconnected = std::mem::replace(&mut self.arrivals, arrivals) != arrivals;
        if reconnected && !matches!(self.state, Phase::Closed) {
            self.state = Phase::Open(now);
        }
        reconnected
    }

    /// Records a reply; true if the breaker closed.
    pub(crate) fn answered(&mut self) -> bool {
        self.failures = 0;
        if matches!(self.state, Phase::Closed) {
            self.remember(false);
            return false;
        }
        *self = Breaker::new(self.settings);
        true
    }

    /// Records the failure of a call that began at `asked`; true if the breaker opened. `jitter` lengthens the pause by
    /// up to a quarter, in 256 steps, so that nodes do not probe at the same time.
    pub(crate) fn failed(&mut self, asked: Time, now: Time, jitter: u8) -> bool {
        // Concurrent failures count once. A call that began before the last failure was noticed may have failed
        // for the same reason, such as one lost reply to a whole batch.
        if self.failures == 0 || asked >= self.failed {
            self.failures = self.failures.saturating_add(1);
            self.failed = now;
        }
        self.remember(true);
        let opens = match self.state {
            Phase::Closed => self.failures >= self.settings.failures || self.mostly_late(),
            Phase::HalfOpen(_) => true,
            // A call that was in flight when it opened.
            Phase::Open(_) => return false,
        };
        if opens {
            let cooldown = self.settings.cooldown.as_micros();
            let pause = Span::from_micros(cooldown + cooldown / 4 * u64::from(jitter) / 256);
            self.state = Phase::Open(now + pause);
        }
        opens
    }

    pub(crate) fn state(&self) -> BreakerState {
        match self.state {
            Phase::Closed => BreakerState::Closed,
            Phase::Open(_) => BreakerState::Open,
            Phase::HalfOpen(_) => BreakerState::HalfOpen,
        }
    }

    fn remember(&mut self, late: bool) {
        self.late = (self.late << 1 | u128::from(late)) & ((1 << WINDOW) - 1);
        self.seen = (self.seen + 1).min(WINDOW);
    }

    fn mostly_late(&self) -> bool {
        self.seen >= MIN_CALLS
            && self.late.count_ones() * 10_000 > self.settings.late_basis_points * self.seen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    fn at(micros: u64) -> Time {
        Time::from_micros(micros)
    }

    fn breaker() -> Breaker {
        Breaker::new(BreakerSettings::default())
    }

    #[test]
    fn five_failures_in_a_row_open_the_breaker() {
        let mut breaker = breaker();
        for _ in 0..4 {
            assert!(!breaker.failed(at(0), at(0), 0));
        }
        assert!(!breaker.answered());
        for _ in 0..4 {
            assert!(!breaker.failed(at(0), at(0), 0));
        }
        assert_eq!(breaker.pass(at(0)), Pass::Ask);
        assert!(breaker.failed(at(0), at(0), 0));
        assert_eq!((breaker.pass(at(0)), breaker.state()), (Pass::Stay, BreakerState::Open));
        assert!(!breaker.failed(at(0), at(0), 0), "calls in flight do not open it again");
    }

    #[test]
    fn concurrent_failures_count_once() {
        let mut breaker = breaker();
        // Enough replies that the failure rate stays low.
        (0..20).for_each(|_| {
            breaker.answered();
        });
        let mut opened = None;
        for round in 1..=9 {
            for _ in 0..2 {
                if breaker.failed(at(round * 10 - 10), at(round * 10), 0) {
                    opened = opened.or(Some(round));
                }
            }
        }
        assert_eq!(opened, Some(5), "five failures in a row, not five at once");
    }

    #[test]
    fn breaker_opens_when_more_than_half_of_20_calls_fail() {
        let mut breaker = breaker();
        let mut opened = None;
        for round in 0..40 {
            breaker.answered();
            if breaker.failed(at(0), at(0), 0) || breaker.failed(at(0), at(0), 0) {
                opened = Some(round);
                break;
            }
        }
        // Three calls a round, two of them failures: the twentieth call is in the seventh round.
        assert_eq!(opened, Some(6));

        let mut even = Breaker::new(BreakerSettings { failures: 1_000, ..BreakerSettings::default() });
        for _ in 0..200 {
            assert!(!even.answered() && !even.failed(at(0), at(0), 0), "half is not more than half");
        }
    }

    #[test]
    fn one_probe_is_sent_after_the_pause() {
        let mut breaker = breaker();
        (0..5).for_each(|_| {
            breaker.failed(at(0), at(0), 0);
        });
        assert_eq!(breaker.pass(at(SECOND - 1)), Pass::Stay);
        assert_eq!(breaker.pass(at(SECOND)), Pass::Probe);
        assert_eq!((breaker.pass(at(SECOND)), breaker.state()), (Pass::Stay, BreakerState::HalfOpen));
        assert!(breaker.answered(), "the breaker closes");
        assert_eq!((breaker.pass(at(SECOND)), breaker.state()), (Pass::Ask, BreakerState::Closed));
        assert!(!breaker.failed(at(SECOND), at(SECOND), 0), "the count of failures starts over");
    }

    #[test]
    fn failed_probe_starts_another_pause_with_jitter() {
        let mut breaker = breaker();
        (0..5).for_each(|_| {
            breaker.failed(at(0), at(0), 0);
        });
        assert_eq!(breaker.pass(at(SECOND)), Pass::Probe);
        assert!(breaker.failed(at(SECOND), at(SECOND), 128));
        assert_eq!(breaker.pass(at(2 * SECOND + 124_999)), Pass::Stay);
        assert_eq!(breaker.pass(at(2 * SECOND + 125_000)), Pass::Probe);
    }

    #[test]
    fn lost_probe_is_replaced_after_the_cooldown() {
        let mut breaker = breaker();
        (0..5).for_each(|_| {
            breaker.failed(at(0), at(0), 0);
        });
        assert_eq!(breaker.pass(at(SECOND)), Pass::Probe);
        assert_eq!(breaker.pass(at(2 * SECOND - 1)), Pass::Stay);
        assert_eq!(breaker.pass(at(2 * SECOND)), Pass::Probe);
    }
}
