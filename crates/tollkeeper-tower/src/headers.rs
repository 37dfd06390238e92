//! Rate-limit headers in every dialect, from one serializer.
//!
//! Times are rounded here and nowhere else: up, because a client that retries too early is refused again. Each
//! transport puts the [`SerializedHeaders`] headers where its protocol has them.

mod prepared;

use http::{HeaderMap, HeaderName, header};
use tollkeeper::LimitDecision;
use tollkeeper::http::HeaderDialect;
use tollkeeper::{DecidedToll, Outcome, Percent, Retry, Span};

pub use self::prepared::SerializedHeaders;
use self::prepared::Text;

/// A rate-limit header.
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
    /// Every rate-limit header: those that a proxy removes from the responses of its upstream.
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

/// By how much `Retry-After` is lengthened, so that refused clients do not all retry at once.
#[derive(Clone, Copy, Debug)]
pub struct Jitter {
    /// The longest, as a part of the wait.
    pub share: Percent,
    /// Draws a number, any of 64 bits as likely as any other.
    pub draw: fn() -> u64,
}

/// The longest that a wait is lengthened by.
const LONGEST_JITTER: Span = Span::from_secs(30);
/// Waits below this are short, and are lengthened less.
const SHORT_WAIT: Span = Span::from_secs(10);
/// The longest that a short wait is lengthened by.
const SHORT_JITTER: Span = Span::from_secs(1);
/// The largest integer of structured fields.
const LARGEST: u64 = 999_999_999_999_999;

impl Jitter {
    /// Nothing is lengthened.
    pub const NONE: Jitter = Jitter { share: Percent::new(0), draw: || 0 };

    /// The wait in whole seconds, rounded up and lengthened by the jitter: at least 1.
    pub fn seconds(&self, wait: Span) -> u64 {
        let most = if wait < SHORT_WAIT { SHORT_JITTER } else { LONGEST_JITTER };
        let wait = wait.as_micros();
        let share = u128::from(wait) * u128::from(self.share.basis_points()) / 10_000;
        let longest = share.min(u128::from(most.as_micros()));
        let drawn = if longest == 0 { 0 } else { ((longest + 1) * u128::from((self.draw)())) >> 64 };
        let drawn = u64::try_from(drawn).expect("at most 30 s");
        Span::from_micros(wait.saturating_add(drawn)).as_secs_ceil().clamp(1, LARGEST)
    }
}

/// Every header of a decision, with its value.
#[inline]
pub fn write(decided: &DecidedToll, dialects: &[HeaderDialect], jitter: &Jitter) -> SerializedHeaders {
    let wait = if decided.allowed() { None } else { decided.retry_after() };
    if dialects.is_empty() && wait.is_none() {
        return SerializedHeaders::default();
    }
    write_all(decided, dialects, wait.map(|wait| jitter.seconds(wait)))
}

fn write_all(decided: &DecidedToll, dialects: &[HeaderDialect], wait: Option<u64>) -> SerializedHeaders {
    let mut text = Text::new();
    if let Some(wait) = wait {
        text.emit_number(Field::RetryAfter, wait);
    }
    let shown = if dialects.is_empty() { None } else { decided.shown() };
    for dialect in dialects {
        match dialect {
            HeaderDialect::Ietf => {
                text.list("", decided.limits(), Text::named_policy);
                text.emit(Field::RateLimitPolicy);
                if let Some((answer, outcome)) = &shown {
                    text.state(answer, outcome);
                    text.emit(Field::RateLimit);
                }
            }
            HeaderDialect::Draft03 => {
                if let Some((_, outcome)) = &shown {
                    text.number(outcome.limit);
                    text.list(", ", decided.limits(), Text::policy);
                    text.emit(Field::RateLimitLimit);
                    text.rest_and_reset(outcome);
                }
            }
            HeaderDialect::Draft06 => {
                text.list("", decided.limits(), Text::policy);
                text.emit(Field::RateLimitPolicy);
                if let Some((_, outcome)) = &shown {
                    text.emit_number(Field::RateLimitLimit, outcome.limit);
                    text.rest_and_reset(outcome);
                }
            }
            HeaderDialect::Draft07 => {
                text.list("", decided.limits(), Text::policy);
                text.emit(Field::RateLimitPolicy);
                if let Some((_, outcome)) = &shown {
                    text.pair("limit=", outcome.limit);
                    text.pair(", remaining=", outcome.remaining);
                    if let Some(reset) = outcome.reset_after {
                        text.pair(", reset=", reset.as_secs_ceil());
                    }
                    text.emit(Field::RateLimit);
                }
            }
            HeaderDialect::XRateLimit => {
                if let Some((answer, outcome)) = &shown {
                    text.emit_number(Field::XRateLimitLimit, outcome.limit);
                    text.emit_number(Field::XRateLimitRemaining, outcome.remaining);
                    if let Some(reset) = outcome.reset_after {
                        let at = (answer.time() + reset).as_micros().div_ceil(1_000_000);
                        text.emit_number(Field::XRateLimitReset, at);
                    }
                }
            }
        }
    }
    text.finish()
}

/// Puts every header of a decision into a map, replacing what was there.
pub fn insert(headers: &mut HeaderMap, decided: &DecidedToll, dialects: &[HeaderDialect], jitter: &Jitter) {
    write(decided, dialects, jitter).insert(headers);
}

impl Text {
    /// The largest integer of a structured field has 15 digits.
    fn number(&mut self, number: u64) {
        self.push_number(number.min(LARGEST));
    }

    fn pair(&mut self, name: &str, number: u64) {
        self.push(name);
        self.number(number);
    }

    /// Ends a value that is one number.
    fn emit_number(&mut self, field: Field, number: u64) {
        self.number(number);
        self.emit(field);
    }

    /// Writes each enforced limit that may be shown, the first after `separator`.
    fn list<'d>(
        &mut self,
        mut separator: &str,
        answers: impl Iterator<Item = LimitDecision<'d>>,
        item: fn(&mut Text, &LimitDecision<'_>) -> bool,
    ) {
        let shown = |answer: &LimitDecision<'_>| answer.due().enforced() && answer.rule().shown();
        for answer in answers.filter(shown) {
            let before = self.len();
            self.push(separator);
            match item(self, &answer) {
                true => separator = ", ",
                false => self.truncate(before),
            }
        }
    }

    /// `"per-user";q=20;w=12`.
    fn named_policy(&mut self, answer: &LimitDecision<'_>) -> bool {
        self.name(answer);
        self.pair(";q=", limit(answer));
        match answer.due().is_slot() {
            true => self.push(";qu=\"concurrent-requests\""),
            false => self.pair(";w=", window(answer)),
        }
        true
    }

    /// `20;w=12`; slots have no window, which the older drafts demand.
    fn policy(&mut self, answer: &LimitDecision<'_>) -> bool {
        if answer.due().is_slot() {
            return false;
        }
        self.number(limit(answer));
        self.pair(";w=", window(answer));
        true
    }

    /// `"per-user";r=19;t=1`.
    fn state(&mut self, answer: &LimitDecision<'_>, outcome: &Outcome) {
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
    fn rest_and_reset(&mut self, outcome: &Outcome) {
        self.emit_number(Field::RateLimitRemaining, outcome.remaining);
        if let Some(reset) = outcome.reset_after {
            self.emit_number(Field::RateLimitReset, reset.as_secs_ceil());
        }
    }

    /// Names of limits have no character that a structured field would have to escape.
    fn name(&mut self, answer: &LimitDecision<'_>) {
        self.push("\"");
        self.push(answer.name());
        self.push("\"");
    }
}

/// What a fresh key can take at once: a node that decides alone grants its share.
fn limit(answer: &LimitDecision<'_>) -> u64 {
    match answer.degraded() {
        None => answer.due().quota.limit(),
        Some(_) => answer.outcome().limit,
    }
}

fn window(answer: &LimitDecision<'_>) -> u64 {
    answer.due().quota.window().as_secs_ceil().max(1)
}

#[cfg(test)]
mod tests;
