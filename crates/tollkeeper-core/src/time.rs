//! Instants, lengths and ticks.
//!
//! The core reads no clock: every function that needs the time is given one. Everything is counted
//! in whole microseconds, because the same arithmetic runs in Lua, where a number is a double.

use core::fmt;
use core::ops::Add;
use core::time::Duration;

/// An instant: microseconds since the Unix epoch, on the clock of whoever keeps the state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// The instant `micros` microseconds after the epoch.
    pub const fn from_micros(micros: u64) -> Time {
        Time(micros)
    }

    /// Microseconds since the epoch.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// How long it is from `earlier` until here; zero if `earlier` is in fact later.
    pub const fn since(self, earlier: Time) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Span> for Time {
    type Output = Time;

    fn add(self, span: Span) -> Time {
        Time(self.0.saturating_add(span.0))
    }
}

/// A length of time in whole microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(u64);

impl Span {
    /// No time at all.
    pub const ZERO: Span = Span(0);

    /// A span of `micros` microseconds.
    pub const fn from_micros(micros: u64) -> Span {
        Span(micros)
    }

    /// A span of `millis` milliseconds.
    pub const fn from_millis(millis: u64) -> Span {
        Span(millis.saturating_mul(1_000))
    }

    /// A span of `secs` seconds.
    pub const fn from_secs(secs: u64) -> Span {
        Span(secs.saturating_mul(1_000_000))
    }

    /// The span in microseconds.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// The span in whole seconds, rounded up: what a client that obeys must wait.
    pub const fn as_secs_ceil(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }
}

impl From<Duration> for Span {
    /// Rounds up to a whole microsecond, so that a wait is never cut short.
    fn from(duration: Duration) -> Span {
        let micros = duration.as_nanos().div_ceil(1_000);
        Span(u64::try_from(micros).unwrap_or(u64::MAX))
    }
}

impl From<Span> for Duration {
    fn from(span: Span) -> Duration {
        Duration::from_micros(span.0)
    }
}

/// Written in the largest unit that fits without a fraction: `1h`, `90s`, `1500ms`, `7us`.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 5] =
            [(86_400_000_000, "d"), (3_600_000_000, "h"), (60_000_000, "m"), (1_000_000, "s"), (1_000, "ms")];
        match UNITS.iter().find(|(unit, _)| self.0 > 0 && self.0.is_multiple_of(*unit)) {
            Some((unit, name)) => write!(f, "{}{name}", self.0 / unit),
            None => write!(f, "{}us", self.0),
        }
    }
}

/// The unit in which an algorithm counts time.
///
/// A function of the period alone, which is part of the key: so a stored state never changes its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tick {
    /// One microsecond: periods up to a minute.
    Micro,
    /// One millisecond: periods up to a day.
    Milli,
    /// One second: longer periods.
    Second,
}

impl Tick {
    /// The tick for a period.
    pub const fn of(period: Span) -> Tick {
        match period.0 {
            0..=60_000_000 => Tick::Micro,
            60_000_001..=86_400_000_000 => Tick::Milli,
            _ => Tick::Second,
        }
    }

    /// The length of one tick.
    pub const fn span(self) -> Span {
        match self {
            Tick::Micro => Span(1),
            Tick::Milli => Span(1_000),
            Tick::Second => Span(1_000_000),
        }
    }

    /// The number of the tick that `time` lies in.
    #[inline]
    pub const fn number(self, time: Time) -> u64 {
        match self {
            Tick::Micro => time.0,
            Tick::Milli => time.0 / 1_000,
            Tick::Second => time.0 / 1_000_000,
        }
    }

    /// How long it is from `now` until tick `number` begins; zero if it has begun.
    pub const fn until(self, number: u64, now: Time) -> Span {
        Span((number * self.span().0).saturating_sub(now.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_written_in_the_largest_whole_unit() {
        for (micros, text) in [
            (0, "0us"),
            (7, "7us"),
            (1_500_000, "1500ms"),
            (90_000_000, "90s"),
            (900_000_000, "15m"),
            (3_600_000_000, "1h"),
            (604_800_000_000, "7d"),
        ] {
            assert_eq!(Span::from_micros(micros).to_string(), text);
        }
    }

    #[test]
    fn a_duration_is_rounded_up_to_a_microsecond() {
        assert_eq!(Span::from(Duration::from_nanos(1)), Span::from_micros(1));
        assert_eq!(Span::from(Duration::MAX), Span::from_micros(u64::MAX));
    }

    #[test]
    fn the_tick_changes_after_a_minute_and_after_a_day() {
        assert_eq!(Tick::of(Span::from_secs(60)), Tick::Micro);
        assert_eq!(Tick::of(Span::from_micros(60_000_001)), Tick::Milli);
        assert_eq!(Tick::of(Span::from_secs(86_400)), Tick::Milli);
        assert_eq!(Tick::of(Span::from_secs(86_401)), Tick::Second);
    }
}
