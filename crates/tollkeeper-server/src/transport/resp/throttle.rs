//! `CL.THROTTLE` and `THROTTLE`: limits given in the command, with the arguments, replies and errors of redis-cell and
//! throttlecrab. The numbers come from our own token bucket.

use std::borrow::Cow;

use crate::digest;
use tollkeeper::facts::MAX_VALUE;
use tollkeeper::{Algorithm, CheckedQuota, InvalidRequest, Outcome, Quota, Retry, Span};

use super::parse::Arguments;
use super::reply::Replies;

/// Which of the two commands is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `CL.THROTTLE` of redis-cell.
    Cell,
    /// `THROTTLE` of throttlecrab.
    Crab,
}

/// The arguments of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Throttle<'b> {
    /// The key to charge.
    pub key: Cow<'b, str>,
    /// The limit.
    pub quota: CheckedQuota,
    /// Units to charge; 0 only reports the state.
    pub quantity: u64,
}

/// The numbers of a call, not validated: `key max_burst count period [quantity]`.
struct RawNumbers {
    max_burst: i64,
    count: i64,
    period: i64,
    quantity: i64,
}

impl Dialect {
    /// The namespace of its keys in the store.
    pub const fn name_space(self) -> &'static str {
        match self {
            Dialect::Cell => "CL.THROTTLE",
            Dialect::Crab => "THROTTLE",
        }
    }

    /// Reads the arguments of a call, or returns the error for the client.
    pub fn read<'b>(self, arguments: Arguments<'b>) -> Result<Throttle<'b>, String> {
        match self {
            Dialect::Cell => read_cell(arguments),
            Dialect::Crab => read_crab(arguments),
        }
    }

    /// The error for a call that the limiter refuses as invalid.
    pub fn refuse(self, error: &InvalidRequest) -> String {
        match self {
            Dialect::Cell => format!("ERR {error}"),
            Dialect::Crab => format!("ERR Rate limit check failed: {error}"),
        }
    }

    /// Writes the reply to a call.
    #[inline]
    pub fn write(self, out: &mut Replies, outcome: &Outcome) {
        let reset = outcome.reset_after.unwrap_or(Span::ZERO);
        out.array(5);
        match self {
            Dialect::Cell => {
                out.number(u64::from(!outcome.allowed));
                out.number(outcome.limit);
                out.number(outcome.remaining);
                match outcome.retry {
                    Some(Retry::After(span)) => out.number(span.as_secs_ceil()),
                    Some(Retry::Never) | None => out.integer(-1),
                }
                out.number(reset.as_secs_ceil());
            }
            Dialect::Crab => {
                out.number(u64::from(outcome.allowed));
                out.number(outcome.limit);
                out.number(outcome.remaining);
                out.number(whole_seconds(reset));
                match outcome.retry {
                    Some(Retry::After(span)) => out.number(whole_seconds(span)),
                    Some(Retry::Never) => out.integer(-1),
                    None => out.number(0),
                }
            }
        }
    }
}

fn read_cell(arguments: Arguments<'_>) -> Result<Throttle<'_>, String> {
    let store = |what: &str| format!("Cell error: Store error: {what}");
    let [Some(key), Some(max_burst), Some(count), Some(period)] = [1, 2, 3, 4].map(|at| arguments.get(at))
    else {
        return Err(store("Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]"));
    };
    if arguments.len() > 6 {
        return Err(store("Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]"));
    }
    let number = |word: &[u8]| {
        number(word).ok_or_else(|| store(&format!("Couldn't parse as integer: {}", truncated(word))))
    };
    let raw = RawNumbers {
        max_burst: number(max_burst)?,
        count: number(count)?,
        period: number(period)?,
        quantity: arguments.get(5).map_or(Ok(1), number)?,
    };
    if raw.count == 0 || raw.period == 0 {
        return Err(store("Zero rates are not supported"));
    }
    let negative = |name: &str, number: i64| format!("ERR negative {name}: {number}");
    let positive = |name: &str, number: i64| u64::try_from(number).map_err(|_| negative(name, number));
    let rate = Quota::every(positive("count", raw.count)?, Span::from_secs(positive("period", raw.period)?));
    // redis-cell counts the burst without the first request.
    let rate = rate.burst(positive("max_burst", raw.max_burst)?.saturating_add(1));
    let quantity = positive("quantity", raw.quantity)?;
    let quota = CheckedQuota::new(Algorithm::TokenBucket, rate).map_err(|error| format!("ERR {error}"))?;
    Ok(Throttle { key: text(key), quota, quantity })
}

fn read_crab(arguments: Arguments<'_>) -> Result<Throttle<'_>, String> {
    let [Some(key), Some(max_burst), Some(count), Some(period)] = [1, 2, 3, 4].map(|at| arguments.get(at))
    else {
        return Err("ERR wrong number of arguments for 'throttle' command".to_owned());
    };
    if arguments.len() > 6 {
        return Err("ERR wrong number of arguments for 'throttle' command".to_owned());
    }
    if std::str::from_utf8(key).is_err() {
        return Err("ERR invalid key".to_owned());
    }
    let number = |name: &str, word: &[u8]| number(word).ok_or_else(|| format!("ERR invalid {name}"));
    let raw = RawNumbers {
        max_burst: number("max_burst", max_burst)?,
        count: number("count_per_period", count)?,
        period: number("period", period)?,
        quantity: arguments.get(5).map_or(Ok(1), |word| number("quantity", word))?,
    };
    let failed = |what: &dyn std::fmt::Display| format!("ERR Rate limit check failed: {what}");
    let quantity = u64::try_from(raw.quantity)
        .map_err(|_| failed(&format_args!("negative quantity: {}", raw.quantity)))?;
    let positive = |number: i64| match u64::try_from(number) {
        Ok(number @ 1..) => Ok(number),
        _ => Err(failed(&"invalid rate limit parameters")),
    };
    let rate = Quota::every(positive(raw.count)?, Span::from_secs(positive(raw.period)?))
        .burst(positive(raw.max_burst)?);
    let quota = CheckedQuota::new(Algorithm::TokenBucket, rate).map_err(|error| failed(&error))?;
    Ok(Throttle { key: text(key), quota, quantity })
}

fn number(word: &[u8]) -> Option<i64> {
    std::str::from_utf8(word).ok()?.parse().ok()
}

/// The key as it is stored. If it is not UTF-8 or too long, it is replaced by its hash, as are facts read from HTTP.
pub fn text(key: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(key) {
        Ok(text) if text.len() <= MAX_VALUE => text.into(),
        _ => digest::hex(&digest::sha256(key)[..16]).into(),
    }
}

/// The first 64 bytes of client input, for error messages.
fn truncated(word: &[u8]) -> String {
    String::from_utf8_lossy(&word[..word.len().min(64)]).into_owned()
}

/// Whole seconds, rounded down as throttlecrab does.
fn whole_seconds(span: Span) -> u64 {
    span.as_micros() / 1_000_000
}
