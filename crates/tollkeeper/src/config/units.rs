//! Parses rates, durations, percentages and shares, and suggests corrections for invalid ones.

use std::fmt;

use tollkeeper_core::Span;

use super::excerpt::quoted;
use crate::percent::Percent;

/// The units of periods, with their length in milliseconds.
const UNITS: [(&str, u64); 10] = [
    ("ms", 1),
    ("s", 1_000),
    ("m", 60_000),
    ("min", 60_000),
    ("h", 3_600_000),
    ("hour", 3_600_000),
    ("d", 86_400_000),
    ("day", 86_400_000),
    ("w", 604_800_000),
    ("week", 604_800_000),
];

/// Other spellings of units, with the supported spelling to suggest.
const UNIT_ALIASES: [(&str, &str); 22] = [
    ("msec", "ms"),
    ("msecs", "ms"),
    ("millis", "ms"),
    ("millisecond", "ms"),
    ("milliseconds", "ms"),
    ("sec", "s"),
    ("secs", "s"),
    ("second", "s"),
    ("seconds", "s"),
    ("mn", "m"),
    ("mins", "min"),
    ("minute", "min"),
    ("minutes", "min"),
    ("hr", "h"),
    ("hrs", "h"),
    ("hours", "hour"),
    ("days", "day"),
    ("weeks", "week"),
    ("wk", "week"),
    ("year", "365d"),
    ("years", "365d"),
    ("y", "365d"),
];

/// An invalid value: what is wrong, and how to fix it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InvalidValue {
    pub(super) message: String,
    pub(super) help: String,
}

impl InvalidValue {
    pub(super) fn new(message: impl Into<String>, help: impl Into<String>) -> InvalidValue {
        InvalidValue { message: message.into(), help: help.into() }
    }
}

impl fmt::Display for InvalidValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.help.as_str() {
            "" => f.write_str(&self.message),
            help => write!(f, "{} ({help})", self.message),
        }
    }
}

/// A rate of the file: `100/min`, `unlimited`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rate {
    Unlimited,
    Every { count: u64, period: Span },
}

/// Parses a rate: `count/period`, or `unlimited`.
pub(super) fn rate(text: &str) -> Result<Rate, InvalidValue> {
    if text == "unlimited" {
        return Ok(Rate::Unlimited);
    }
    let Some((count, period)) = text.split_once('/') else {
        let help = match suggest_rate(text) {
            Some(suggestion) => format!("try `{suggestion}`"),
            None if count(text).is_ok() => format!("add a period: `{text}/s`, `{text}/min`, `{text}/day`"),
            None => "count and period, such as `100/min` or `5/15m`, or `unlimited`".to_owned(),
        };
        return Err(InvalidValue::new(format!("{} is not a rate", quoted(text)), help));
    };
    if count.is_empty() {
        return Err(InvalidValue::new(format!("{} has no count", quoted(text)), "such as `100/min`"));
    }
    let count = self::count(count).map_err(|invalid| match suggest_rate(text) {
        Some(suggestion) => InvalidValue { help: format!("try `{suggestion}`"), ..invalid },
        None => invalid,
    })?;
    if period.is_empty() {
        return Err(InvalidValue::new(format!("{} has no period", quoted(text)), "such as `100/min`"));
    }
    Ok(Rate::Every { count, period: length(period, true)? })
}

/// Parses a duration, which is a whole number and a unit: `500ms`, `15m`, `1day`.
pub(super) fn duration(text: &str) -> Result<Span, InvalidValue> {
    length(text, false)
}

/// Parses a duration. With `bare_unit`, as in a rate, the number may be omitted: `100/min` is `100/1min`.
fn length(text: &str, bare_unit: bool) -> Result<Span, InvalidValue> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let found = UNITS.iter().find(|(name, _)| *name == unit);
    let Some((_, millis)) = found.filter(|_| digits > 0 || bare_unit) else {
        let message = format!("period {} is not a duration", quoted(text));
        return Err(InvalidValue::new(message, duration_help(text, bare_unit)));
    };
    let number = if number.is_empty() { "1" } else { number };
    let total = number.parse::<u64>().ok().and_then(|number| number.checked_mul(*millis));
    match total.and_then(|millis| millis.checked_mul(1_000)) {
        None => Err(InvalidValue::new(format!("period {} is too long", quoted(text)), "at most `366d`")),
        Some(0) => Err(InvalidValue::new(format!("period {} is zero", quoted(text)), "at least `1ms`")),
        Some(micros) => Ok(Span::from_micros(micros)),
    }
}

/// Parses a whole number, which may be zero.
pub(super) fn count(text: &str) -> Result<u64, InvalidValue> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        let cleaned: String =
            text.chars().filter(|char| !matches!(char, '_' | ',' | '\'' | ' ' | '+')).collect();
        let is_number = !cleaned.is_empty() && cleaned.bytes().all(|byte| byte.is_ascii_digit());
        let help = match suggest_count(&cleaned) {
            Some(suggestion) if is_number || !text.is_empty() => format!("try `{suggestion}`"),
            _ => "digits only, such as `1000`".to_owned(),
        };
        return Err(InvalidValue::new(format!("count {} is not a whole number", quoted(text)), help));
    }
    text.parse().map_err(|_| {
        InvalidValue::new(format!("count {} is too large", quoted(text)), "a count fits in 64 bits")
    })
}

/// Parses a number of bytes: `65536`, `64KiB`, `1MiB`.
pub(super) fn size(text: &str) -> Result<u64, InvalidValue> {
    let invalid =
        |help: &str| InvalidValue::new(format!("size {} is not a number of bytes", quoted(text)), help);
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let unit = match unit {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return Err(invalid("a whole number of `B KiB MiB GiB`, such as `64KiB`")),
    };
    let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    bytes.ok_or_else(|| invalid("such as `64KiB`"))
}

/// A number of bytes; prints as [`size`] reads it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size(pub(super) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes.is_multiple_of(1 << 30) => write!(f, "{}GiB", bytes >> 30),
            bytes if bytes.is_multiple_of(1 << 20) => write!(f, "{}MiB", bytes >> 20),
            bytes if bytes.is_multiple_of(1 << 10) => write!(f, "{}KiB", bytes >> 10),
            bytes => write!(f, "{bytes}B"),
        }
    }
}

/// Parses a percentage with at most two decimals: `50%`, `12.5%`.
pub(super) fn percent(text: &str) -> Result<Percent, InvalidValue> {
    let invalid = |help: String| InvalidValue::new(format!("{} is not a percentage", quoted(text)), help);
    let Some(number) = text.strip_suffix('%') else {
        let help = match text.trim() {
            number if !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()) => {
                format!("try `{number}%`")
            }
            _ => "such as `10%`".to_owned(),
        };
        return Err(invalid(help));
    };
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let is_digits = |text: &str, most: usize| {
        (1..=most).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit())
    };
    if !is_digits(whole, 3) || !is_digits(part, 2) {
        return Err(invalid("such as `10%` or `12.5%`".to_owned()));
    }
    let number = |text: &str| text.parse::<u32>().expect("at most three digits");
    let total = number(whole) * 100 + number(part) * if part.len() == 1 { 10 } else { 1 };
    Percent::from_basis_points(total).ok_or_else(|| invalid("at most `100%`".to_owned()))
}

/// The part of every limit that this file grants: `1/3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    part: u32,
    of: u32,
}

impl Default for Share {
    fn default() -> Share {
        Share { part: 1, of: 1 }
    }
}

impl Share {
    /// This share of a number, rounded down but at least 1; 0 of 0.
    pub fn of(self, number: u64) -> u64 {
        let part = u128::from(number) * u128::from(self.part) / u128::from(self.of);
        u64::try_from(part).expect("a share is at most 1").max(u64::from(number > 0))
    }

    /// The numerator.
    pub(super) fn part(self) -> u64 {
        self.part.into()
    }

    /// The denominator.
    pub(super) fn whole(self) -> u64 {
        self.of.into()
    }

    /// Whether rounding changes the result of [`Share::of`] by more than 10 %.
    pub(super) fn rounds_badly(self, number: u64) -> bool {
        let exact = u128::from(number) * u128::from(self.part);
        let rounded = u128::from(self.of(number)) * u128::from(self.of);
        exact.abs_diff(rounded) * 10 > exact
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.part, self.of)
    }
}

/// Parses a share: `a/b`, at most 1.
pub(super) fn share(text: &str) -> Result<Share, InvalidValue> {
    const MOST: u32 = 1_000_000;
    let invalid = |help: &str| InvalidValue::new(format!("{} is not a share", quoted(text)), help);
    let number =
        |text: &str| count(text).ok().and_then(|number| u32::try_from(number).ok()).filter(|n| *n <= MOST);
    let parts = text.split_once('/').and_then(|(part, of)| Some((number(part)?, number(of)?)));
    match parts {
        None => Err(invalid("two whole numbers, such as `1/3`")),
        Some((0, _) | (_, 0)) => {
            Err(invalid("neither number may be 0; to refuse all requests, give a limit `rate: 0/s`"))
        }
        Some((part, of)) if part > of => Err(invalid("at most `1/1`: a share is a part of the whole")),
        Some((part, of)) => Ok(Share { part, of }),
    }
}

/// The valid rate that an invalid one probably means.
fn suggest_rate(text: &str) -> Option<String> {
    let text = text.to_lowercase().replace(" per ", "/").replace([' ', '_', ','], "");
    let text =
        if text == "infinite" || text == "none" || text == "inf" { "unlimited".to_owned() } else { text };
    if text == "unlimited" {
        return Some(text);
    }
    let (count, period) = text.split_once('/')?;
    let period = suggest_period(period)?;
    let suggestion = match count.split_once('.') {
        Some((whole, part)) => suggest_whole_count(whole, part, &period)?,
        None => format!("{}/{period}", suggest_count(count)?),
    };
    rate(&suggestion).is_ok().then_some(suggestion)
}

/// A rate with a fractional count as one with a whole count: `0.5/s` is `1/2s`.
fn suggest_whole_count(whole: &str, part: &str, period: &str) -> Option<String> {
    if whole.len() > 6 || part.len() > 3 || period.starts_with(|char: char| char.is_ascii_digit()) {
        return None;
    }
    let periods = 10u64.pow(u32::try_from(part.len()).ok()?);
    let count = count(whole).ok()? * periods + count(part).ok()?;
    let (mut divisor, mut rest) = (periods, count);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    Some(format!("{}/{}{period}", count / divisor, periods / divisor))
}

fn suggest_count(text: &str) -> Option<String> {
    let (digits, zeros) = match text.strip_suffix(['k', 'K']) {
        Some(digits) => (digits, "000"),
        None => match text.strip_suffix(['m', 'M']) {
            Some(digits) => (digits, "000000"),
            None => (text, ""),
        },
    };
    let suggestion = format!("{digits}{zeros}");
    (!digits.is_empty() && suggestion.len() < 19 && suggestion.bytes().all(|byte| byte.is_ascii_digit()))
        .then_some(suggestion)
}

/// The period with its unit in the spelling of [`UNITS`], with or without a number before it.
fn suggest_period(text: &str) -> Option<String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    if UNITS.iter().any(|(name, _)| *name == unit) {
        return Some(text.to_owned());
    }
    let (_, unit) = UNIT_ALIASES.iter().find(|(other, _)| *other == unit)?;
    match (number, unit.starts_with(|char: char| char.is_ascii_digit())) {
        ("" | "1", true) => Some((*unit).to_owned()),
        (_, true) => None,
        (_, false) => Some(format!("{number}{unit}")),
    }
}

/// A suggestion for a text that is not a duration.
fn duration_help(text: &str, bare_unit: bool) -> String {
    let normalized = text.to_lowercase().replace([' ', '_'], "");
    if normalized.contains("month") || normalized.ends_with("mo") || normalized.ends_with("quarter") {
        return "months vary in length: use `30d`".to_owned();
    }
    if UNITS.iter().any(|(name, _)| *name == normalized) && !bare_unit {
        return format!("add a number: `1{normalized}`");
    }
    if let Some(suggestion) = suggest_period(&normalized)
        .filter(|suggestion| suggestion != text && length(suggestion, bare_unit).is_ok())
    {
        return format!("try `{suggestion}`");
    }
    if !normalized.is_empty() && normalized.bytes().all(|byte| byte.is_ascii_digit()) {
        return format!("add a unit: `{normalized}s`, `{normalized}ms`");
    }
    if let Some((millis, unit)) = fraction_in_millis(&normalized) {
        return format!(
            "no fractions: `{normalized}` is `{}`",
            if unit == "ms" { format!("{millis}ms") } else { Span::from_millis(millis).to_string() }
        );
    }
    "a whole number of `ms s m min h hour d day w week`, such as `15m`".to_owned()
}

/// A fractional duration such as `1.5h` in whole milliseconds, with its unit.
fn fraction_in_millis(text: &str) -> Option<(u64, &str)> {
    let start = text.find(|char: char| char.is_ascii_alphabetic())?;
    let (number, unit) = text.split_at(start);
    let (_, millis) = UNITS.iter().find(|(name, _)| *name == unit)?;
    let (whole, part) = number.split_once('.')?;
    if whole.len() > 6 || part.is_empty() || part.len() > 3 {
        return None;
    }
    let scale = 10u64.pow(u32::try_from(part.len()).ok()?);
    let number = count(whole).ok()? * scale + count(part).ok()?;
    let total = number * millis;
    (total > 0 && total.is_multiple_of(scale)).then_some((total / scale, unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every(count: u64, micros: u64) -> Rate {
        Rate::Every { count, period: Span::from_micros(micros) }
    }

    #[test]
    fn rates_are_parsed() {
        const SECOND: u64 = 1_000_000;
        for (text, expected) in [
            ("10/s", every(10, SECOND)),
            ("100/min", every(100, 60 * SECOND)),
            ("100/m", every(100, 60 * SECOND)),
            ("1000/hour", every(1000, 3_600 * SECOND)),
            ("1000/h", every(1000, 3_600 * SECOND)),
            ("5/15m", every(5, 900 * SECOND)),
            ("50000/day", every(50_000, 86_400 * SECOND)),
            ("1/500ms", every(1, 500_000)),
            ("2/week", every(2, 604_800 * SECOND)),
            ("2/w", every(2, 604_800 * SECOND)),
            ("7/2d", every(7, 172_800 * SECOND)),
            ("0/s", every(0, SECOND)),
            ("unlimited", Rate::Unlimited),
            ("18446744073709551615/s", every(u64::MAX, SECOND)),
        ] {
            assert_eq!(rate(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn invalid_rates_get_a_suggestion() {
        for (text, expected) in [
            ("", "`` is not a rate (count and period, such as `100/min` or `5/15m`, or `unlimited`)"),
            ("100", "`100` is not a rate (add a period: `100/s`, `100/min`, `100/day`)"),
            ("100 per minute", "`100 per minute` is not a rate (try `100/min`)"),
            ("Unlimited", "`Unlimited` is not a rate (try `unlimited`)"),
            ("none", "`none` is not a rate (try `unlimited`)"),
            ("/s", "`/s` has no count (such as `100/min`)"),
            ("1_000/min", "count `1_000` is not a whole number (try `1000/min`)"),
            ("1,000/min", "count `1,000` is not a whole number (try `1000/min`)"),
            ("10k/min", "count `10k` is not a whole number (try `10000/min`)"),
            ("100 / min", "count `100 ` is not a whole number (try `100/min`)"),
            ("0.5/s", "count `0.5` is not a whole number (try `1/2s`)"),
            ("2.5/min", "count `2.5` is not a whole number (try `5/2min`)"),
            ("-5/s", "count `-5` is not a whole number (digits only, such as `1000`)"),
            ("1e3/s", "count `1e3` is not a whole number (digits only, such as `1000`)"),
            ("18446744073709551616/s", "count `18446744073709551616` is too large (a count fits in 64 bits)"),
            ("5/", "`5/` has no period (such as `100/min`)"),
            ("5/second", "period `second` is not a duration (try `s`)"),
            ("5/2 hours", "period `2 hours` is not a duration (try `2hour`)"),
            ("5/Min", "period `Min` is not a duration (try `min`)"),
            ("5/month", "period `month` is not a duration (months vary in length: use `30d`)"),
            ("5/year", "period `year` is not a duration (try `365d`)"),
            ("5/60", "period `60` is not a duration (add a unit: `60s`, `60ms`)"),
            ("5/0s", "period `0s` is zero (at least `1ms`)"),
            ("5/1.5h", "period `1.5h` is not a duration (no fractions: `1.5h` is `90m`)"),
            ("5/99999999999999999999w", "period `99999999999999999999w` is too long (at most `366d`)"),
        ] {
            assert_eq!(rate(text).map_err(|invalid| invalid.to_string()), Err(expected.to_owned()), "{text}");
        }
    }

    #[test]
    fn every_suggestion_is_a_valid_rate() {
        let units = UNIT_ALIASES.iter().map(|(other, _)| *other).chain(UNITS.iter().map(|(unit, _)| *unit));
        for unit in units {
            for text in [
                format!("5/{unit}"),
                format!("5 / {unit}"),
                format!("5/1 {unit}"),
                format!("5/30{unit}"),
                format!("2k/{unit}"),
                format!("0.25/{unit}"),
            ] {
                let Err(invalid) = rate(&text) else { continue };
                if let Some(suggestion) =
                    invalid.help.strip_prefix("try `").and_then(|help| help.strip_suffix('`'))
                {
                    let suggestion = if suggestion.contains('/') {
                        suggestion.to_owned()
                    } else {
                        format!("5/{suggestion}")
                    };
                    assert!(rate(&suggestion).is_ok(), "{text}: {invalid}");
                }
            }
        }
    }

    #[test]
    fn percentages_have_at_most_two_decimals() {
        for (text, points) in
            [("0%", 0), ("10%", 1_000), ("12.5%", 1_250), ("0.01%", 1), ("100%", 10_000), ("99.99%", 9_999)]
        {
            let percent = percent(text).expect(text);
            assert_eq!((percent.basis_points(), percent.to_string().as_str()), (points, text));
        }
        for (text, help) in [
            ("10", "try `10%`"),
            ("0.1", "such as `10%`"),
            ("", "such as `10%`"),
            ("%", "such as `10%` or `12.5%`"),
            ("1.234%", "such as `10%` or `12.5%`"),
            ("-1%", "such as `10%` or `12.5%`"),
            ("100.01%", "at most `100%`"),
            ("1000%", "such as `10%` or `12.5%`"),
        ] {
            assert_eq!(percent(text).expect_err(text).help, help, "{text}");
        }
    }

    #[test]
    fn share_rounds_down_but_never_to_zero() {
        for (text, number, expected, badly) in [
            ("1/1", 7, 7, false),
            ("1/2", 7, 3, true),
            ("1/2", 19, 9, false),
            ("1/3", 1, 1, true),
            ("1/3", 0, 0, false),
            ("2/3", 100, 66, false),
            ("1/1000000", u64::MAX, 18_446_744_073_709, false),
            ("1000000/1000000", u64::MAX, u64::MAX, false),
        ] {
            let share = share(text).expect(text);
            assert_eq!(
                (share.of(number), share.rounds_badly(number)),
                (expected, badly),
                "{text} of {number}"
            );
        }
        for text in ["", "1", "1/", "/1", "1/0", "0/1", "2/1", "-1/2", "1/2/3", "1/1000001", "0.5/1", "a/b"] {
            assert!(share(text).is_err(), "{text}");
        }
    }
}
