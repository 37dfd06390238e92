//! Instants, durations and ticks in whole microseconds.
//!
//! The core reads no clock: functions that need the time take it as an argument. Time is counted in whole
//! microseconds, because the same arithmetic runs in Lua, where a number is a double.

use core::fmt;
use core::ops::Add;
use core::time::Duration;

/// An instant: microseconds since the Unix epoch on the store's clock.
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

    /// The time from `earlier` to `self`; zero if `earlier` is later.
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

/// A duration in whole microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(u64);

impl Span {
    /// The empty span.
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

    /// The span in whole seconds, rounded up, for `Retry-After`: a client never retries too early.
    pub const fn as_secs_ceil(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }

    /// The span as shown to people: `0.6 s`, `2 min 30 s`, `1 d 12 h`.
    pub const fn readable(self) -> Readable {
        Readable(self)
    }

    /// The exact span in as many units as needed: `1 d 3 h 46 min 40 s`.
    pub(crate) const fn exact(self) -> Exact {
        Exact(self)
    }
}

impl From<Duration> for Span {
    /// Rounds up to a whole microsecond, so that a wait is never too short.
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

/// Shown in the largest unit that needs no fraction: `1h`, `90s`, `1500ms`, `7us`.
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

/// A span as shown to people: in exact seconds below two minutes, otherwise in two units and rounded up, so
/// that a wait is never understated.
///
/// ```
/// use tollkeeper_core::Span;
///
/// assert_eq!(Span::from_millis(600).readable().to_string(), "0.6 s");
/// assert_eq!(Span::from_secs(129_600).readable().to_string(), "1 d 12 h");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Readable(Span);

impl fmt::Display for Readable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs_ceil();
        const UNITS: [(u64, &str); 4] = [(1, "s"), (60, "min"), (3_600, "h"), (86_400, "d")];
        let large = match seconds {
            ..120 => return write!(f, "{} s", Seconds(self.0)),
            120..3_600 => 1,
            3_600..86_400 => 2,
            _ => 3,
        };
        let ((small, small_name), (large, large_name)) = (UNITS[large - 1], UNITS[large]);
        let total = seconds.div_ceil(small) * small; // a span is below 2^64 µs, so rounding up cannot overflow
        write!(f, "{} {large_name}", total / large)?;
        match total % large / small {
            0 => Ok(()),
            rest => write!(f, " {rest} {small_name}"),
        }
    }
}

/// A span in as many units as it needs to be exact.
pub(crate) struct Exact(Span);

impl fmt::Display for Exact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.as_micros();
        for (unit, name) in [(86_400_000_000, "d"), (3_600_000_000, "h"), (60_000_000, "min")] {
            if rest >= unit {
                write!(f, "{} {name}", rest / unit)?;
                rest %= unit;
                f.write_str(if rest > 0 { " " } else { "" })?;
            }
        }
        if rest > 0 || self.0 == Span::ZERO {
            write!(f, "{} s", Seconds(Span(rest)))?;
        }
        Ok(())
    }
}

/// A span in decimal seconds, exact and without trailing zeros: `0.6`, `12`.
#[derive(Clone, Copy, Debug)]
pub struct Seconds(pub Span);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.0.as_micros();
        write!(f, "{}", micros / 1_000_000)?;
        let (mut fraction, mut digits) = (micros % 1_000_000, 6);
        if fraction == 0 {
            return Ok(());
        }
        while fraction % 10 == 0 {
            (fraction, digits) = (fraction / 10, digits - 1);
        }
        write!(f, ".{fraction:0digits$}")
    }
}

/// The unit in which an algorithm counts time.
///
/// It depends only on the period, which is part of the key, so the unit of a stored state never changes.
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

    /// The number of the tick that contains `time`, counted from the epoch.
    #[inline]
    pub const fn number(self, time: Time) -> u64 {
        match self {
            Tick::Micro => time.0,
            Tick::Milli => time.0 / 1_000,
            Tick::Second => time.0 / 1_000_000,
        }
    }

    /// The time from `now` until tick `number` begins; zero if it has begun.
    pub const fn until(self, number: u64, now: Time) -> Span {
        Span((number * self.span().0).saturating_sub(now.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_shown_in_the_largest_whole_unit() {
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
    fn readable_spans_are_exact_or_rounded_up() {
        for (micros, expected) in [
            (0, "0 s"),
            (1, "0.000001 s"),
            (600_000, "0.6 s"),
            (1_500_000, "1.5 s"),
            (119_000_000, "119 s"),
            (119_000_001, "2 min"),
            (120_000_000, "2 min"),
            (120_000_001, "2 min 1 s"),
            (180_000_000, "3 min"),
            (3_600_000_000, "1 h"),
            (3_600_000_001, "1 h 1 min"),
            (86_399_000_000, "24 h"),
            (86_400_000_001, "1 d 1 h"),
            (86_400_000_000, "1 d"),
            (129_600_000_000, "1 d 12 h"),
            (200_000_000_000, "2 d 8 h"),
            (u64::MAX, "213503982 d 9 h"),
        ] {
            assert_eq!(Span::from_micros(micros).readable().to_string(), expected, "{micros} µs");
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
