//! Rates, durations, percentages and shares: how they are written, and what was meant when they are not.

use std::fmt;

use tollkeeper_core::Span;

use super::excerpt::quoted;

/// What a period can be written with, and how long one of it is in milliseconds.
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

/// Other spellings of units, for who meant one.
const MEANT: [(&str, &str); 22] = [
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

/// A text that is not what it should be: what is wrong, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    pub(super) message: String,
    pub(super) help: String,
}

impl Wrong {
    pub(super) fn new(message: impl Into<String>, help: impl Into<String>) -> Wrong {
        Wrong { message: message.into(), help: help.into() }
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.help.as_str() {
            "" => f.write_str(&self.message),
            help => write!(f, "{} ({help})", self.message),
        }
    }
}

/// A rate as it is written: `100/min`, `unlimited`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rate {
    Unlimited,
    Every { count: u64, period: Span },
}

/// Reads a rate: `count/period`, or `unlimited`.
pub(super) fn rate(text: &str) -> Result<Rate, Wrong> {
    if text == "unlimited" {
        return Ok(Rate::Unlimited);
    }
    let Some((count, period)) = text.split_once('/') else {
        let help = match meant_rate(text) {
            Some(meant) => format!("try `{meant}`"),
            None if count(text).is_ok() => format!("say per what: `{text}/s`, `{text}/min`, `{text}/day`"),
            None => "count and period, such as `100/min` or `5/15m`, or `unlimited`".to_owned(),
        };
        return Err(Wrong::new(format!("{} is not a rate", quoted(text)), help));
    };
    let count = self::count(count).map_err(|wrong| match meant_rate(text) {
        Some(meant) => Wrong { help: format!("try `{meant}`"), ..wrong },
        None => wrong,
    })?;
    // `100/min` is `100/1min`.
    let period = match period.starts_with(|char: char| char.is_ascii_digit()) {
        true => duration(period),
        false => {
            duration(&format!("1{period}")).map_err(|wrong| match wrong.message.starts_with("period `") {
                // The 1 is ours, not theirs.
                true => Wrong::new(
                    wrong.message.replacen("period `1", "period `", 1),
                    wrong.help.replacen("`1", "`", 1),
                ),
                false => wrong,
            })
        }
    };
    Ok(Rate::Every { count, period: period? })
}

/// Reads a duration, a whole number and a unit: `500ms`, `15m`, `1day`.
pub(super) fn duration(text: &str) -> Result<Span, Wrong> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let found = UNITS.iter().find(|(name, _)| *name == unit);
    let Some((_, millis)) = found.filter(|_| digits > 0) else {
        let message = format!("period {} is not a duration", quoted(text));
        return Err(Wrong::new(message, meant_duration(text)));
    };
    let total = number.parse::<u64>().ok().and_then(|number| number.checked_mul(*millis));
    match total.and_then(|millis| millis.checked_mul(1_000)) {
        None => Err(Wrong::new(format!("period {} is too long", quoted(text)), "at most `366d`")),
        Some(0) => Err(Wrong::new(format!("period {} is zero", quoted(text)), "at least `1ms`")),
        Some(micros) => Ok(Span::from_micros(micros)),
    }
}

/// Reads a whole number, which may be zero.
pub(super) fn count(text: &str) -> Result<u64, Wrong> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        let meant: String =
            text.chars().filter(|char| !matches!(char, '_' | ',' | '\'' | ' ' | '+')).collect();
        let is_number = !meant.is_empty() && meant.bytes().all(|byte| byte.is_ascii_digit());
        let help = match meant_count(&meant) {
            Some(meant) if is_number || !text.is_empty() => format!("try `{meant}`"),
            _ => "digits only, such as `1000`".to_owned(),
        };
        return Err(Wrong::new(format!("count {} is not a whole number", quoted(text)), help));
    }
    text.parse()
        .map_err(|_| Wrong::new(format!("count {} is too large", quoted(text)), "a count fits in 64 bits"))
}

/// A part of a hundred, in hundredths of a percent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Percent(u32);

impl Percent {
    /// All of it.
    pub const ALL: Percent = Percent(10_000);

    /// So many percent, 100 at most.
    pub const fn new(percent: u32) -> Percent {
        Percent(if percent > 100 { 10_000 } else { percent * 100 })
    }

    /// The part in hundredths of a percent: 10 % is 1,000.
    pub const fn basis_points(self) -> u32 {
        self.0
    }
}

/// As it is written in the config: `12.5%`.
impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, part) = (self.0 / 100, self.0 % 100);
        match part {
            0 => write!(f, "{whole}%"),
            _ if part.is_multiple_of(10) => write!(f, "{whole}.{}%", part / 10),
            _ => write!(f, "{whole}.{part:02}%"),
        }
    }
}

/// Reads a percentage with at most two decimals: `50%`, `12.5%`.
pub(super) fn percent(text: &str) -> Result<Percent, Wrong> {
    let wrong = |help: String| Wrong::new(format!("{} is not a percentage", quoted(text)), help);
    let Some(number) = text.strip_suffix('%') else {
        let help = match text.trim() {
            number if !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()) => {
                format!("try `{number}%`")
            }
            _ => "such as `10%`".to_owned(),
        };
        return Err(wrong(help));
    };
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let is_digits = |text: &str, most: usize| {
        (1..=most).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit())
    };
    if !is_digits(whole, 3) || !is_digits(part, 2) {
        return Err(wrong("such as `10%` or `12.5%`".to_owned()));
    }
    let number = |text: &str| text.parse::<u32>().expect("at most three digits");
    let total = number(whole) * 100 + number(part) * if part.len() == 1 { 10 } else { 1 };
    if total > Percent::ALL.0 {
        return Err(wrong("at most `100%`".to_owned()));
    }
    Ok(Percent(total))
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
    /// The part of a number, rounded down but at least 1; nothing of nothing.
    pub fn of(self, number: u64) -> u64 {
        let part = u128::from(number) * u128::from(self.part) / u128::from(self.of);
        u64::try_from(part).expect("a share is at most 1").max(u64::from(number > 0))
    }

    /// Whether [`Share::of`] is more than a tenth off.
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

/// Reads a share: `a/b`, at most 1.
pub(super) fn share(text: &str) -> Result<Share, Wrong> {
    const MOST: u32 = 1_000_000;
    let wrong = |help: &str| Wrong::new(format!("{} is not a share", quoted(text)), help);
    let number =
        |text: &str| count(text).ok().and_then(|number| u32::try_from(number).ok()).filter(|n| *n <= MOST);
    let parts = text.split_once('/').and_then(|(part, of)| Some((number(part)?, number(of)?)));
    match parts {
        None => Err(wrong("two whole numbers, such as `1/3`")),
        Some((0, _) | (_, 0)) => Err(wrong("neither number may be 0; to refuse all, say `0/s` in a limit")),
        Some((part, of)) if part > of => Err(wrong("at most `1/1`: a share is a part of the whole")),
        Some((part, of)) => Ok(Share { part, of }),
    }
}

/// The rate that was probably meant.
fn meant_rate(text: &str) -> Option<String> {
    let text = text.to_lowercase().replace(" per ", "/").replace([' ', '_', ','], "");
    let text =
        if text == "infinite" || text == "none" || text == "inf" { "unlimited".to_owned() } else { text };
    if text == "unlimited" {
        return Some(text);
    }
    let (count, period) = text.split_once('/')?;
    let meant = format!("{}/{}", meant_count(count)?, meant_period(period)?);
    rate(&meant).is_ok().then_some(meant)
}

fn meant_count(text: &str) -> Option<String> {
    let (digits, zeros) = match text.strip_suffix(['k', 'K']) {
        Some(digits) => (digits, "000"),
        None => match text.strip_suffix(['m', 'M']) {
            Some(digits) => (digits, "000000"),
            None => (text, ""),
        },
    };
    let meant = format!("{digits}{zeros}");
    (!digits.is_empty() && meant.len() < 19 && meant.bytes().all(|byte| byte.is_ascii_digit()))
        .then_some(meant)
}

/// A period in the spelling of [`UNITS`], with or without a number before it.
fn meant_period(text: &str) -> Option<String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    if UNITS.iter().any(|(name, _)| *name == unit) {
        return Some(text.to_owned());
    }
    let (_, unit) = MEANT.iter().find(|(other, _)| *other == unit)?;
    match (number, unit.starts_with(|char: char| char.is_ascii_digit())) {
        ("" | "1", true) => Some((*unit).to_owned()),
        (_, true) => None,
        (_, false) => Some(format!("{number}{unit}")),
    }
}

/// What to say of a text that is not a duration.
fn meant_duration(text: &str) -> String {
    let meant = text.to_lowercase().replace([' ', '_'], "");
    if meant.contains("month") || meant.ends_with("mo") || meant.ends_with("quarter") {
        return "months are not a period: take `30d`".to_owned();
    }
    if let Some(meant) = meant_period(&meant).filter(|meant| duration(meant).is_ok()) {
        return format!("try `{meant}`");
    }
    if !meant.is_empty() && meant.bytes().all(|byte| byte.is_ascii_digit()) {
        return format!("say of what: `{meant}s`, `{meant}ms`");
    }
    if let Some((millis, unit)) = meant_fraction(&meant) {
        return format!(
            "no fractions: `{meant}` is `{}`",
            if unit == "ms" { format!("{millis}ms") } else { Span::from_millis(millis).to_string() }
        );
    }
    "a whole number of `ms s m min h hour d day w week`, such as `15m`".to_owned()
}

/// `1.5h` in milliseconds, if it is a whole number of them.
fn meant_fraction(text: &str) -> Option<(u64, &str)> {
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
