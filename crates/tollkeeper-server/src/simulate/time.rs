//! Parses the time stamps of logs into microseconds since 1970.

use std::fmt;

/// Microseconds in a second.
pub const SECOND: u64 = 1_000_000;

/// The time that a line carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Microseconds since 1970.
    pub micros: u64,
    /// Whether the text has no fraction, as in `[16/Nov/2026:11:29:05 +0000]`.
    pub is_whole: bool,
}

/// How a time stamp is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TimeFormat {
    /// `16/Nov/2026:11:29:05 +0000`.
    Clf,
    /// `2026-11-16T11:29:05.250Z`; the offset may be missing.
    Rfc3339,
    /// Seconds since 1970, with or without a fraction.
    Unix,
    /// Milliseconds since 1970.
    UnixMs,
    /// Microseconds since 1970, as in the proxy's access log.
    UnixMicros,
    /// Seconds since 1970 or RFC 3339, whichever the value is.
    UnixOrRfc3339,
    /// A format of `strftime`.
    Strftime(String),
}

/// An offset from UTC, for stamps without one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offset {
    seconds: i64,
}

impl std::str::FromStr for TimeFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<TimeFormat, String> {
        Ok(match text {
            "rfc3339" => TimeFormat::Rfc3339,
            "clf" => TimeFormat::Clf,
            "unix" => TimeFormat::Unix,
            "unix-ms" => TimeFormat::UnixMs,
            _ if text.contains('%') => {
                let mut directives = text.split('%').skip(1);
                let is_known = |part: &str| part.is_empty() || part.starts_with(|c| DIRECTIVES.contains(c));
                if !directives.all(is_known) {
                    return Err(format!("only these directives are known: %{}", spaced(DIRECTIVES)));
                }
                TimeFormat::Strftime(text.to_owned())
            }
            _ => return Err("rfc3339, clf, unix, unix-ms, or a strftime format with %".to_owned()),
        })
    }
}

/// The directives of [`TimeFormat::Strftime`].
const DIRECTIVES: &str = "YmdeHMSfzbTFs";

fn spaced(letters: &str) -> String {
    letters.chars().map(String::from).collect::<Vec<_>>().join(" %")
}

impl std::str::FromStr for Offset {
    type Err = String;

    fn from_str(text: &str) -> Result<Offset, String> {
        let mut scan = Scan(text.as_bytes());
        let offset = scan.offset().filter(|_| scan.0.is_empty());
        offset
            .map(|seconds| Offset { seconds })
            .ok_or_else(|| "an offset such as +02:00, -0500 or Z".to_owned())
    }
}

impl TimeFormat {
    /// Parses a stamp; `None` if it is not one, or before 1970.
    pub fn parse(&self, text: &[u8], tz: Offset) -> Option<Stamp> {
        match self {
            TimeFormat::Clf => clf(text),
            TimeFormat::Rfc3339 => rfc3339(text, tz),
            TimeFormat::Unix => unix(text, SECOND),
            TimeFormat::UnixMs => unix(text, 1_000).map(|stamp| Stamp { is_whole: false, ..stamp }),
            TimeFormat::UnixMicros => unix(text, 1).map(|stamp| Stamp { is_whole: false, ..stamp }),
            TimeFormat::UnixOrRfc3339 => unix(text, SECOND).or_else(|| rfc3339(text, tz)),
            TimeFormat::Strftime(format) => strftime(format, text, tz),
        }
    }
}

/// Parses `--from` and `--until`.
pub fn instant(text: &str) -> Result<u64, String> {
    let stamp = rfc3339(text.as_bytes(), Offset::default());
    stamp
        .map(|stamp| stamp.micros)
        .ok_or_else(|| "a time of RFC 3339, such as 2026-11-16T11:00:00Z".to_owned())
}

/// Parses a decimal number of `unit` microseconds, rounding down: a duration or a time since 1970.
pub fn decimal(text: &[u8], unit: u64) -> Option<u64> {
    // Go and JavaScript write small numbers as `1.5e-05`.
    if text.iter().any(|byte| matches!(byte, b'e' | b'E')) {
        let number: f64 = std::str::from_utf8(text).ok()?.parse().ok()?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is within the bounds"
        )]
        return (0.0..1e12).contains(&number).then_some((number * unit as f64) as u64);
    }
    let (whole, fraction) = match memchr::memchr(b'.', text) {
        Some(point) => (&text[..point], &text[point + 1..]),
        None => (text, &[][..]),
    };
    let mut micros = digits(whole)?.checked_mul(unit)?;
    let mut unit = unit;
    for digit in fraction {
        let digit = digit.is_ascii_digit().then(|| u64::from(digit - b'0'))?;
        // Nanoseconds and finer are cut off.
        micros = micros.checked_add(digit * unit / 10)?;
        unit /= 10;
    }
    Some(micros)
}

fn unix(text: &[u8], unit: u64) -> Option<Stamp> {
    let is_whole = !text.contains(&b'.');
    decimal(text, unit).map(|micros| Stamp { micros, is_whole })
}

fn digits(text: &[u8]) -> Option<u64> {
    if text.is_empty() || text.len() > 18 {
        return None;
    }
    text.iter()
        .try_fold(0, |number, byte| byte.is_ascii_digit().then(|| number * 10 + u64::from(byte - b'0')))
}

fn clf(text: &[u8]) -> Option<Stamp> {
    let mut scan = Scan(text);
    let day = scan.digits(2)?;
    scan.byte(b'/')?;
    let month = scan.month_name()?;
    scan.byte(b'/')?;
    let year = scan.digits(4)?;
    scan.byte(b':')?;
    let seconds = scan.clock()?;
    scan.byte(b' ')?;
    let offset = scan.offset()?;
    scan.end()?;
    stamp(days(year, month, day)?, seconds, 0, offset, true)
}

fn rfc3339(text: &[u8], tz: Offset) -> Option<Stamp> {
    let mut scan = Scan(text);
    let day = scan.date()?;
    scan.byte(b'T').or_else(|| scan.byte(b't')).or_else(|| scan.byte(b' '))?;
    let seconds = scan.clock()?;
    let fraction = scan.fraction()?;
    let offset = if scan.0.is_empty() { tz.seconds } else { scan.offset()? };
    scan.end()?;
    stamp(day, seconds, fraction.unwrap_or(0), offset, fraction.is_none())
}

fn strftime(format: &str, text: &[u8], tz: Offset) -> Option<Stamp> {
    let mut scan = Scan(text);
    let (mut year, mut month, mut day) = (1970, 1, 1);
    let (mut hour, mut minute, mut second) = (0, 0, 0);
    let (mut fraction, mut offset, mut unix) = (None, tz.seconds, None);
    let mut letters = format.bytes();
    while let Some(letter) = letters.next() {
        if letter != b'%' {
            scan.byte(letter)?;
            continue;
        }
        match letters.next()? {
            b'Y' => year = scan.digits(4)?,
            b'm' => month = scan.digits(2)?,
            b'd' => day = scan.digits(2)?,
            b'e' => {
                let pad = scan.byte(b' ').is_some();
                day = if pad { scan.digits(1)? } else { scan.digits(2).or_else(|| scan.digits(1))? };
            }
            b'H' => hour = scan.digits(2)?,
            b'M' => minute = scan.digits(2)?,
            b'S' => {
                second = scan.digits(2)?;
                // `%S` is followed by a fraction only if the text has one and the format expects no dot of its own.
                fraction = if letters.clone().next() == Some(b'.') { None } else { scan.fraction()? };
            }
            b'f' => fraction = Some(scan.fraction_digits()?),
            b'z' => offset = scan.offset()?,
            b'b' => month = scan.month_name()?,
            b'T' => {
                let clock = scan.clock()?;
                (hour, minute, second) = (clock / 3_600, clock / 60 % 60, clock % 60);
            }
            b'F' => {
                year = scan.digits(4)?;
                scan.byte(b'-')?;
                month = scan.digits(2)?;
                scan.byte(b'-')?;
                day = scan.digits(2)?;
            }
            b's' => unix = Some(scan.any_digits()?),
            b'%' => scan.byte(b'%')?,
            _ => return None,
        }
    }
    scan.end()?;
    if let Some(unix) = unix {
        return Some(Stamp {
            micros: unix.checked_mul(SECOND)? + fraction.unwrap_or(0),
            is_whole: fraction.is_none(),
        });
    }
    let seconds = clock(hour, minute, second)?;
    stamp(days(year, month, day)?, seconds, fraction.unwrap_or(0), offset, fraction.is_none())
}

fn stamp(days: i64, seconds: u64, fraction: u64, offset: i64, is_whole: bool) -> Option<Stamp> {
    let seconds = days.checked_mul(86_400)? + i64::try_from(seconds).ok()? - offset;
    let micros = u64::try_from(seconds).ok()?.checked_mul(SECOND)?.checked_add(fraction)?;
    Some(Stamp { micros, is_whole })
}

/// The seconds of a time of day. A leap second counts as the last second of its minute.
fn clock(hour: u64, minute: u64, second: u64) -> Option<u64> {
    (hour < 24 && minute < 60 && second <= 60).then(|| hour * 3_600 + minute * 60 + second.min(59))
}

/// The days from 1970-01-01 to a date of the Gregorian calendar.
fn days(year: u64, month: u64, day: u64) -> Option<i64> {
    let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let length = match month {
        2 if is_leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    if day == 0 || day > length {
        return None;
    }
    // Years begin in March, so that the leap day is the last of its year.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year.checked_sub(1)?, month + 9) };
    let (era, of_era) = (year / 400, year % 400);
    let of_year = (153 * month + 2) / 5 + day - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year;
    Some(i64::try_from(days).ok()? - 719_468)
}

/// A text that is consumed from the left.
struct Scan<'t>(&'t [u8]);

const MONTHS: [&[u8]; 12] =
    [b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec"];

impl Scan<'_> {
    fn byte(&mut self, byte: u8) -> Option<()> {
        self.0 = self.0.strip_prefix(&[byte])?;
        Some(())
    }

    fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }

    fn digits(&mut self, count: usize) -> Option<u64> {
        let number = digits(self.0.get(..count)?)?;
        self.0 = &self.0[count..];
        Some(number)
    }

    fn any_digits(&mut self) -> Option<u64> {
        self.digits(self.0.iter().take_while(|byte| byte.is_ascii_digit()).count())
    }

    fn month_name(&mut self) -> Option<u64> {
        let name = self.0.get(..3)?;
        let index = MONTHS.iter().position(|month| month.eq_ignore_ascii_case(name))?;
        self.0 = &self.0[3..];
        u64::try_from(index + 1).ok()
    }

    fn date(&mut self) -> Option<i64> {
        let year = self.digits(4)?;
        // Caddy's `wall` format has slashes.
        let separator = if self.0.first() == Some(&b'/') { b'/' } else { b'-' };
        self.byte(separator)?;
        let month = self.digits(2)?;
        self.byte(separator)?;
        days(year, month, self.digits(2)?)
    }

    fn clock(&mut self) -> Option<u64> {
        let hour = self.digits(2)?;
        self.byte(b':')?;
        let minute = self.digits(2)?;
        self.byte(b':')?;
        clock(hour, minute, self.digits(2)?)
    }

    /// Microseconds of a fraction with its dot or comma; `None` inside if there is none.
    fn fraction(&mut self) -> Option<Option<u64>> {
        if self.byte(b'.').or_else(|| self.byte(b',')).is_none() {
            return Some(None);
        }
        self.fraction_digits().map(Some)
    }

    fn fraction_digits(&mut self) -> Option<u64> {
        let count = self.0.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let (fraction, rest) = self.0.split_at(count);
        self.0 = rest;
        let padded = fraction.iter().chain(std::iter::repeat(&b'0')).take(6);
        (count > 0).then(|| padded.fold(0, |number, digit| number * 10 + u64::from(digit - b'0')))
    }

    /// The seconds of an offset: `Z`, `+02:00`, `+0200`.
    fn offset(&mut self) -> Option<i64> {
        if self.byte(b'Z').or_else(|| self.byte(b'z')).is_some() {
            return Some(0);
        }
        let sign = if self.byte(b'+').is_some() { 1 } else { self.byte(b'-').map(|()| -1)? };
        let hours = self.digits(2)?;
        let _ = self.byte(b':');
        let minutes = self.digits(2)?;
        let seconds = i64::try_from(hours * 3_600 + minutes * 60).ok()?;
        (hours < 24 && minutes < 60).then_some(sign * seconds)
    }
}

/// A time for people: `2026-11-16 11:29:05 UTC`.
#[derive(Clone, Copy, Debug)]
pub struct Utc {
    /// Seconds since 1970.
    pub seconds: u64,
}

impl fmt::Display for Utc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (days, second) = (self.seconds / 86_400 + 719_468, self.seconds % 86_400);
        // The inverse of `days`.
        let (era, of_era) = (days / 146_097, days % 146_097);
        let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year + year / 4 - year / 100);
        let month = (5 * of_year + 2) / 153;
        let day = of_year - (153 * month + 2) / 5 + 1;
        let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
        let year = era * 400 + year + next;
        let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
        write!(f, "{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(format: &str, text: &str, expected: Option<(u64, bool)>) {
        let format: TimeFormat = format.parse().expect("a format");
        let found = format.parse(text.as_bytes(), Offset { seconds: 3_600 });
        assert_eq!(found, expected.map(|(micros, is_whole)| Stamp { micros, is_whole }), "{format:?} {text}");
    }

    #[test]
    fn stamps_of_every_format_are_parsed() {
        let noon = 1_794_828_545 * SECOND;
        check("clf", "16/Nov/2026:11:29:05 +0000", Some((noon, true)));
        check("clf", "16/Nov/2026:12:29:05 +0100", Some((noon, true)));
        check("clf", "16/Nov/2026:05:59:05 -0530", Some((noon, true)));
        check("rfc3339", "2026-11-16T11:29:05Z", Some((noon, true)));
        check("rfc3339", "2026-11-16T11:29:05.25Z", Some((noon + 250_000, false)));
        check("rfc3339", "2026-11-16T11:29:05.123456789Z", Some((noon + 123_456, false)));
        check("rfc3339", "2026-11-16 12:29:05", Some((noon, true)));
        check("rfc3339", "2026/11/16 12:29:05", Some((noon, true)));
        check("unix", "1794828545", Some((noon, true)));
        check("unix", "1794828545.007", Some((noon + 7_000, false)));
        check("unix", "1794828545.1234567", Some((noon + 123_456, false)));
        check("unix-ms", "1794828545250", Some((noon + 250_000, false)));
        check("%d/%b/%Y:%T %z", "16/Nov/2026:11:29:05 +0000", Some((noon, true)));
        check("%F %H:%M:%S", "2026-11-16 12:29:05", Some((noon, true)));
        check("%F %H:%M:%S.%f", "2026-11-16 12:29:05.5", Some((noon + 500_000, false)));
        check("%b %e %Y %T %z", "Nov  6 2026 11:29:05 +0000", Some((noon - 864_000 * SECOND, true)));
        check("%s", "1794828545", Some((noon, true)));
    }

    #[test]
    fn dates_that_do_not_exist_are_rejected() {
        for text in [
            "31/Feb/2026:00:00:00 +0000",
            "29/Feb/2026:00:00:00 +0000",
            "01/Jan/0000:00:00:00 +0000",
            "31/Dec/1969:23:59:59 +0000",
            "00/Jan/2026:00:00:00 +0000",
            "01/Foo/2026:00:00:00 +0000",
            "01/Jan/2026:24:00:00 +0000",
            "01/Jan/2026:00:60:00 +0000",
            "01/Jan/2026:00:00:61 +0000",
            "01/Jan/2026:00:00:00 +0060",
            "01/Jan/2026:00:00:00",
            "01/Jan/2026:00:00:00 +0000x",
            "",
        ] {
            check("clf", text, None);
        }
        check("unix", "-1", None);
        check("rfc3339", "2026-11-16T11:29:05.Z", None);
        // The year 9999 is a date; that it lies in the future is checked by the caller.
        check("clf", "31/Dec/9999:23:59:59 +0000", Some((253_402_300_799 * SECOND, true)));
        // A leap second, and the day that only leap years have.
        check("clf", "31/Dec/2016:23:59:60 +0000", Some((1_483_228_799 * SECOND, true)));
        check("clf", "29/Feb/2024:00:00:00 +0000", Some((1_709_164_800 * SECOND, true)));
    }

    #[test]
    fn decimals_are_cut_to_microseconds() {
        assert_eq!(decimal(b"0.003", SECOND), Some(3_000));
        assert_eq!(decimal(b"1.0000019", SECOND), Some(1_000_001));
        assert_eq!(decimal(b"1.5e-05", SECOND), Some(15));
        assert_eq!(decimal(b"2e-6", SECOND), Some(2));
        assert_eq!(decimal(b"12", 1_000), Some(12_000));
        assert_eq!(decimal(b"12.5", 1), Some(12));
        for text in ["", "-1", "1.x", "x", "1.2.3", "nan", "1e400"] {
            assert_eq!(decimal(text.as_bytes(), SECOND), None, "{text}");
        }
    }

    #[test]
    fn times_are_shown_as_they_were_parsed() {
        for seconds in [0, 951_782_399, 951_782_400, 1_709_164_800, 1_794_828_545, 4_102_444_799] {
            let text = Utc { seconds }.to_string();
            let parsed = rfc3339(text.trim_end_matches(" UTC").as_bytes(), Offset::default());
            assert_eq!(parsed.map(|stamp| stamp.micros), Some(seconds * SECOND), "{text}");
        }
    }
}
