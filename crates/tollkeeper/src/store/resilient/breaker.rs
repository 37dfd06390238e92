//! The breaker: stops asking a store that does not answer, and finds out when it does again.

use tollkeeper_core::{Span, Time};

/// When to stop asking, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerSettings {
    /// Stop after so many failures in a row.
    pub failures: u32,
    /// Stop when more than this part of the last answers were late or did not come, in hundredths of a
    /// percent.
    pub late_basis_points: u32,
    /// How long to leave it alone.
    pub cooldown: Span,
}

impl Default for BreakerSettings {
    fn default() -> BreakerSettings {
        BreakerSettings { failures: 5, late_basis_points: 5_000, cooldown: Span::from_secs(1) }
    }
}

/// What a breaker lets through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BreakerState {
    /// Everything: the store answers.
    Closed,
    /// Nothing.
    Open,
    /// One request, to see whether the store answers again.
    HalfOpen,
}

/// Whether a request may ask the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    /// It may.
    Ask,
    /// It may, and everybody waits for what comes of it.
    Probe,
    /// It may not.
    Stay,
}

/// How many of the last answers are looked at, and how many there must be.
const LOOKED_AT: u32 = 100;
const ENOUGH: u32 = 20;

/// Pure: it is told the time and a random number, so that tests need neither.
#[derive(Debug)]
pub(crate) struct Breaker {
    settings: BreakerSettings,
    state: State,
    failures: u32,
    /// When the last of them was known.
    failed: Time,
    /// The last answers, newest in the lowest bit: one for each that was late.
    late: u128,
    seen: u32,
    /// How often the store had come when it was last looked.
    arrivals: u64,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Closed,
    /// Until then.
    Open(Time),
    /// A probe is out, and is given up then.
    HalfOpen(Time),
}

impl Breaker {
    pub(crate) fn new(settings: BreakerSettings) -> Breaker {
        Breaker {
            settings,
            state: State::Closed,
            failures: 0,
            failed: Time::default(),
            late: 0,
            seen: 0,
            arrivals: 0,
        }
    }

    /// Whether a request may ask the store now.
    pub(crate) fn pass(&mut self, now: Time) -> Pass {
        match self.state {
            State::Closed => Pass::Ask,
            State::Open(until) | State::HalfOpen(until) if now < until => Pass::Stay,
            State::Open(_) | State::HalfOpen(_) => {
                // A probe that is dropped by its caller never reports: another may go after a cooldown.
                self.state = State::HalfOpen(now + self.settings.cooldown);
                Pass::Probe
            }
        }
    }

    /// How often the store had come when it was left alone.
    pub(crate) fn left_at(&mut self, arrivals: u64) {
        self.arrivals = arrivals;
    }

    /// Whether the store has come back since: whoever asks next need not wait until the pause is over.
    pub(crate) fn has_come(&mut self, arrivals: u64, now: Time) -> bool {
        let come = std::mem::replace(&mut self.arrivals, arrivals) != arrivals;
        if come && !matches!(self.state, State::Closed) {
            self.state = State::Open(now);
        }
        come
    }

    /// The store answered; true if that is news.
    pub(crate) fn answered(&mut self) -> bool {
        self.failures = 0;
        if matches!(self.state, State::Closed) {
            self.remember(false);
            return false;
        }
        *self = Breaker::new(self.settings);
        true
    }

    /// The store did not answer what it was asked then; true if the breaker opened. `jitter` lengthens the
    /// pause by that many of 256 parts of a quarter, so that nodes do not probe together.
    pub(crate) fn failed(&mut self, asked: Time, now: Time, jitter: u8) -> bool {
        // Failures in a row come one after the other. Those who asked before the last one was known fail
        // for the same reason, such as one reply for all of them that was lost.
        if self.failures == 0 || asked >= self.failed {
            self.failures = self.failures.saturating_add(1);
            self.failed = now;
        }
        self.remember(true);
        let opens = match self.state {
            State::Closed => self.failures >= self.settings.failures || self.mostly_late(),
            State::HalfOpen(_) => true,
            // Those that were on their way when it opened.
            State::Open(_) => return false,
        };
        if opens {
            let cooldown = self.settings.cooldown.as_micros();
            let pause = Span::from_micros(cooldown + cooldown / 4 * u64::from(jitter) / 256);
            self.state = State::Open(now + pause);
        }
        opens
    }

    pub(crate) fn state(&self) -> BreakerState {
        match self.state {
            State::Closed => BreakerState::Closed,
            State::Open(_) => BreakerState::Open,
            State::HalfOpen(_) => BreakerState::HalfOpen,
        }
    }

    fn remember(&mut self, late: bool) {
        self.late = (self.late << 1 | u128::from(late)) & ((1 << LOOKED_AT) - 1);
        self.seen = (self.seen + 1).min(LOOKED_AT);
    }

    fn mostly_late(&self) -> bool {
        self.seen >= ENOUGH && self.late.count_ones() * 10_000 > self.settings.late_basis_points * self.seen
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
    fn five_failures_in_a_row_open_it_and_an_answer_between_starts_anew() {
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
        assert!(!breaker.failed(at(0), at(0), 0), "those on their way are no news");
    }

    #[test]
    fn what_fails_together_fails_once() {
        let mut breaker = breaker();
        // Enough answers that the late ones are few.
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
        assert_eq!(opened, Some(5), "the fifth in a row, and not the fifth at once");
    }

    #[test]
    fn it_opens_when_more_than_half_are_late_once_there_are_twenty() {
        let mut breaker = breaker();
        let mut opened = None;
        for round in 0..40 {
            breaker.answered();
            if breaker.failed(at(0), at(0), 0) || breaker.failed(at(0), at(0), 0) {
                opened = Some(round);
                break;
            }
        }
        // Three a round, two of them late: the twentieth comes in the seventh round.
        assert_eq!(opened, Some(6));

        let mut even = Breaker::new(BreakerSettings { failures: 1_000, ..BreakerSettings::default() });
        for _ in 0..200 {
            assert!(!even.answered() && !even.failed(at(0), at(0), 0), "half is not more than half");
        }
    }

    #[test]
    fn after_the_pause_one_probe_goes_and_the_others_wait_for_it() {
        let mut breaker = breaker();
        (0..5).for_each(|_| {
            breaker.failed(at(0), at(0), 0);
        });
        assert_eq!(breaker.pass(at(SECOND - 1)), Pass::Stay);
        assert_eq!(breaker.pass(at(SECOND)), Pass::Probe);
        assert_eq!((breaker.pass(at(SECOND)), breaker.state()), (Pass::Stay, BreakerState::HalfOpen));
        assert!(breaker.answered(), "news");
        assert_eq!((breaker.pass(at(SECOND)), breaker.state()), (Pass::Ask, BreakerState::Closed));
        assert!(!breaker.failed(at(SECOND), at(SECOND), 0), "it starts anew");
    }

    #[test]
    fn a_probe_that_fails_begins_another_pause_longer_by_up_to_a_quarter() {
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
    fn a_probe_that_is_never_heard_of_again_is_given_up() {
        let mut breaker = breaker();
        (0..5).for_each(|_| {
            breaker.failed(at(0), at(0), 0);
        });
        assert_eq!(breaker.pass(at(SECOND)), Pass::Probe);
        assert_eq!(breaker.pass(at(2 * SECOND - 1)), Pass::Stay);
        assert_eq!(breaker.pass(at(2 * SECOND)), Pass::Probe);
    }
}
