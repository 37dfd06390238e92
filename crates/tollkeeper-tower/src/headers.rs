//! Rate-limit headers in every dialect, from one serialiser.
//!
//! Times are rounded here and nowhere else: up, because who comes too early is refused again. Names and
//! values are handed out one by one, so that each transport puts them where they belong.

use bytes::BytesMut;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use tollkeeper::decimal::Decimal;
use tollkeeper::decision::Answer;
use tollkeeper::http::HeaderDialect;
use tollkeeper::{Decision, Outcome, Percent, Retry, Span};

/// A header that tells of limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named after the headers")]
pub enum Field {
    RetryAfter,
    RateLimitPolicy,
    RateLimit,
    RateLimitLimit,
    RateLimitRemaining,
    RateLimitReset,
    XRateLimitLimit,
    XRateLimitRemaining,
    XRateLimitReset,
}

impl Field {
    /// Every header that tells of limits: what a proxy takes out of the answers of others.
    pub const ALL: [Field; 9] = [
        Field::RetryAfter,
        Field::RateLimitPolicy,
        Field::RateLimit,
        Field::RateLimitLimit,
        Field::RateLimitRemaining,
        Field::RateLimitReset,
        Field::XRateLimitLimit,
        Field::XRateLimitRemaining,
        Field::XRateLimitReset,
    ];

    /// The name, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Field::RetryAfter => "retry-after",
            Field::RateLimitPolicy => "ratelimit-policy",
            Field::RateLimit => "ratelimit",
            Field::RateLimitLimit => "ratelimit-limit",
            Field::RateLimitRemaining => "ratelimit-remaining",
            Field::RateLimitReset => "ratelimit-reset",
            Field::XRateLimitLimit => "x-ratelimit-limit",
            Field::XRateLimitRemaining => "x-ratelimit-remaining",
            Field::XRateLimitReset => "x-ratelimit-reset",
        }
    }

    /// The name, ready to be put into a map.
    pub fn header_name(self) -> HeaderName {
        // Looked at when this is compiled, not with every request.
        const fn of(field: Field) -> HeaderName {
            HeaderName::from_static(field.name())
        }
        match self {
            Field::RetryAfter => header::RETRY_AFTER,
            Field::RateLimitPolicy => const { of(Field::RateLimitPolicy) },
            Field::RateLimit => const { of(Field::RateLimit) },
            Field::RateLimitLimit => const { of(Field::RateLimitLimit) },
            Field::RateLimitRemaining => const { of(Field::RateLimitRemaining) },
            Field::RateLimitReset => const { of(Field::RateLimitReset) },
            Field::XRateLimitLimit => const { of(Field::XRateLimitLimit) },
            Field::XRateLimitRemaining => const { of(Field::XRateLimitRemaining) },
            Field::XRateLimitReset => const { of(Field::XRateLimitReset) },
        }
    }
}

/// By how much `Retry-After` is lengthened, so that not all come again at once.
#[derive(Clone, Copy, Debug)]
pub struct Jitter {
    /// The longest, as a part of the wait.
    pub share: Percent,
    /// Draws a number, any of 64 bits as likely as any other.
    pub draw: fn() -> u64,
}

/// The longest that a wait is lengthened by.
const LONGEST_JITTER: Span = Span::from_secs(30);
/// The largest integer of structured fields.
const LARGEST: u64 = 999_999_999_999_999;

impl Jitter {
    /// Nothing is lengthened.
    pub const NONE: Jitter = Jitter { share: Percent::new(0), draw: || 0 };

    /// The whole seconds that a client is told to wait: at least one, and never less than it must.
    pub fn seconds(&self, wait: Span) -> u64 {
        let wait = wait.as_micros();
        let share = u128::from(wait) * u128::from(self.share.basis_points()) / 10_000;
        let longest = share.min(u128::from(LONGEST_JITTER.as_micros()));
        let drawn = if longest == 0 { 0 } else { ((longest + 1) * u128::from((self.draw)())) >> 64 };
        let drawn = u64::try_from(drawn).expect("at most 30 s");
        Span::from_micros(wait.saturating_add(drawn)).as_secs_ceil().clamp(1, LARGEST)
    }
}

/// Hands out every header of a decision, with its value: names of limits, digits and punctuation.
pub fn write(
    decision: &Decision,
    dialects: &[HeaderDialect],
    jitter: &Jitter,
    mut emit: impl FnMut(Field, &[u8]),
) {
    let mut text = Text(Vec::with_capacity(128));
    if let Some(wait) = if decision.allowed() { None } else { decision.retry_after() } {
        text.emit_number(Field::RetryAfter, jitter.seconds(wait), &mut emit);
    }
    if dialects.is_empty() {
        return;
    }
    let shown = decision.shown();
    for dialect in dialects {
        match dialect {
            HeaderDialect::Ietf => {
                text.list(decision, Text::named_policy);
                text.emit(Field::RateLimitPolicy, &mut emit);
                if let Some((answer, outcome)) = &shown {
                    text.state(answer, outcome);
                    text.emit(Field::RateLimit, &mut emit);
                }
            }
            HeaderDialect::Draft03 => {
                if let Some((_, outcome)) = &shown {
                    text.push_number(outcome.limit);
                    let limit = text.0.len();
                    text.push(", ");
                    text.list(decision, Text::policy);
                    if text.0.len() == limit + 2 {
                        text.0.truncate(limit);
                    }
                    text.emit(Field::RateLimitLimit, &mut emit);
                    text.rest_and_reset(outcome, &mut emit);
                }
            }
            HeaderDialect::Draft06 => {
                text.list(decision, Text::policy);
                text.emit(Field::RateLimitPolicy, &mut emit);
                if let Some((_, outcome)) = &shown {
                    text.emit_number(Field::RateLimitLimit, outcome.limit, &mut emit);
                    text.rest_and_reset(outcome, &mut emit);
                }
            }
            HeaderDialect::Draft07 => {
                text.list(decision, Text::policy);
                text.emit(Field::RateLimitPolicy, &mut emit);
                if let Some((_, outcome)) = &shown {
                    text.pair("limit=", outcome.limit);
                    text.pair(", remaining=", outcome.remaining);
                    if let Some(reset) = outcome.reset_after {
                        text.pair(", reset=", reset.as_secs_ceil());
                    }
                    text.emit(Field::RateLimit, &mut emit);
                }
            }
            HeaderDialect::XRateLimit => {
                if let Some((_, outcome)) = &shown {
                    text.emit_number(Field::XRateLimitLimit, outcome.limit, &mut emit);
                    text.emit_number(Field::XRateLimitRemaining, outcome.remaining, &mut emit);
                    if let Some(reset) = outcome.reset_after {
                        let at = (decision.time() + reset).as_micros().div_ceil(1_000_000);
                        text.emit_number(Field::XRateLimitReset, at, &mut emit);
                    }
                }
            }
        }
    }
}

/// Puts every header of a decision into a map, in place of what was there.
pub fn insert(headers: &mut HeaderMap, decision: &Decision, dialects: &[HeaderDialect], jitter: &Jitter) {
    if dialects.is_empty() && decision.allowed() {
        return; // there is nothing to tell
    }
    // All values share one allocation.
    let mut buffer = BytesMut::with_capacity(256);
    write(decision, dialects, jitter, |field, value| {
        buffer.extend_from_slice(value);
        let value = HeaderValue::from_maybe_shared(buffer.split().freeze());
        headers.insert(field.header_name(), value.expect("digits, names of limits and punctuation"));
    });
}

/// A value that is being written.
struct Text(Vec<u8>);

impl Text {
    fn push(&mut self, text: &str) {
        self.0.extend_from_slice(text.as_bytes());
    }

    fn push_number(&mut self, number: u64) {
        self.0.extend_from_slice(Decimal::whole(number.min(LARGEST)).as_bytes());
    }

    fn pair(&mut self, name: &str, number: u64) {
        self.push(name);
        self.push_number(number);
    }

    /// Hands out a value that is one number.
    fn emit_number(&mut self, field: Field, number: u64, emit: &mut impl FnMut(Field, &[u8])) {
        self.push_number(number);
        self.emit(field, emit);
    }

    /// Hands out what was written, if anything was, and begins anew.
    fn emit(&mut self, field: Field, emit: &mut impl FnMut(Field, &[u8])) {
        if !self.0.is_empty() {
            emit(field, &self.0);
        }
        self.0.clear();
    }

    /// Writes each enforced limit that may be shown.
    fn list(&mut self, decision: &Decision, item: fn(&mut Text, &Answer<'_>) -> bool) {
        let shown = |answer: &Answer<'_>| answer.due().enforced() && answer.rule().shown();
        let mut separator = "";
        for answer in decision.limits().filter(shown) {
            let before = self.0.len();
            self.push(separator);
            match item(self, &answer) {
                true => separator = ", ",
                false => self.0.truncate(before),
            }
        }
    }

    /// `"per-user";q=20;w=12`.
    fn named_policy(&mut self, answer: &Answer<'_>) -> bool {
        self.name(answer);
        self.pair(";q=", limit(answer));
        match answer.due().is_slot() {
            true => self.push(";qu=\"concurrent-requests\""),
            false => self.pair(";w=", window(answer)),
        }
        true
    }

    /// `20;w=12`; slots have no window, which the older drafts demand.
    fn policy(&mut self, answer: &Answer<'_>) -> bool {
        if answer.due().is_slot() {
            return false;
        }
        self.push_number(limit(answer));
        self.pair(";w=", window(answer));
        true
    }

    /// `"per-user";r=19;t=1`.
    fn state(&mut self, answer: &Answer<'_>, outcome: &Outcome) {
        self.name(answer);
        self.pair(";r=", outcome.remaining);
        let until = match outcome.retry {
            Some(Retry::After(wait)) => Some(wait),
            Some(Retry::Never) => None,
            None => outcome.next_after,
        };
        if let Some(until) = until {
            self.pair(";t=", until.as_secs_ceil());
        }
    }

    /// `RateLimit-Remaining` and `RateLimit-Reset`.
    fn rest_and_reset(&mut self, outcome: &Outcome, emit: &mut impl FnMut(Field, &[u8])) {
        self.emit_number(Field::RateLimitRemaining, outcome.remaining, emit);
        if let Some(reset) = outcome.reset_after {
            self.emit_number(Field::RateLimitReset, reset.as_secs_ceil(), emit);
        }
    }

    /// Names of limits have no character that a structured field would have to escape.
    fn name(&mut self, answer: &Answer<'_>) {
        self.push("\"");
        self.push(answer.name());
        self.push("\"");
    }
}

/// What a fresh key can take at once: a node that decides alone grants its share.
fn limit(answer: &Answer<'_>) -> u64 {
    match answer.degraded() {
        None => answer.due().quota.limit(),
        Some(_) => answer.outcome().limit,
    }
}

fn window(answer: &Answer<'_>) -> u64 {
    answer.due().quota.window().as_secs_ceil().max(1)
}

#[cfg(test)]
mod tests;
