//! Keys: which state a request meets.
//!
//! A key is the injective bytes of the limit's name, its period, algorithm and stagger (together: the
//! family) and the values of its facts. Not the tier: who changes plans keeps the count while the
//! period is the same. Lengths go before contents, so `a_b`,`c` and `a`,`b_c` are two keys.

use core::fmt;

use crate::quota::Algorithm;
use crate::siphash::{self, Secret};
use crate::time::Span;

/// The bytes of a key, somewhere else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key<'a> {
    family: &'a [u8],
    values: &'a [u8],
}

const ABSENT: u16 = u16::MAX;

impl<'a> Key<'a> {
    /// A key of its two parts, as written by [`family`] and [`push_value`].
    #[inline]
    pub(crate) fn new(family: &'a [u8], values: &'a [u8]) -> Key<'a> {
        Key { family, values }
    }

    /// A key from the bytes of [`Key::to_bytes`].
    pub fn from_bytes(bytes: &'a [u8]) -> Option<Key<'a>> {
        let name = usize::from(*bytes.first()?);
        let (family, values) = bytes.split_at_checked(name + 10)?;
        algorithm(*family.get(name + 1)?)?;
        core::str::from_utf8(&family[1..=name]).ok()?;
        let mut rest = values;
        while !rest.is_empty() {
            let value;
            (value, rest) = next_value(rest)?;
            core::str::from_utf8(value.unwrap_or_default()).ok()?;
        }
        Some(Key { family, values })
    }

    /// The key as injective bytes.
    pub fn to_bytes(self) -> Vec<u8> {
        [self.family, self.values].concat()
    }

    /// What all keys of this limit and period begin with.
    #[inline]
    pub fn family(self) -> &'a [u8] {
        self.family
    }

    /// The name of the limit.
    pub fn limit(self) -> &'a str {
        text(&self.family[1..=self.name_len()])
    }

    /// The period that is part of the key.
    pub fn period(self) -> Span {
        let bytes = self.family.last_chunk().expect("a family ends with its period");
        Span::from_micros(u64::from_be_bytes(*bytes))
    }

    /// The algorithm that is part of the key, and whether its windows are staggered.
    pub fn algorithm(self) -> (Algorithm, bool) {
        algorithm(self.family[self.name_len() + 1]).expect("a family names its algorithm")
    }

    /// The values of the facts, in the order of the limit's `by`.
    #[inline]
    pub fn values(self) -> impl Iterator<Item = Option<&'a [u8]>> {
        let mut rest = self.values;
        core::iter::from_fn(move || {
            let (value, after) = next_value(rest)?;
            rest = after;
            Some(value)
        })
    }

    /// The values as text.
    pub fn texts(self) -> impl Iterator<Item = Option<&'a str>> {
        self.values().map(|value| value.map(text))
    }

    /// How much earlier than the epoch's the windows of this key begin: a fixed hash of the key, equal
    /// on every node and for all time.
    pub(crate) fn stagger(self) -> u64 {
        let spread =
            siphash::hash(&Secret([0; 16]), &self.to_bytes()) % u128::from(self.period().as_micros());
        u64::try_from(spread).expect("less than the period")
    }

    fn name_len(self) -> usize {
        usize::from(self.family[0])
    }
}

/// Written for people and for Redis: `per-user:token-bucket:1m:alice`. Injective as well: `%`, `:`,
/// braces, white space and control characters in values are escaped, and an absent value is `%-`.
impl fmt::Display for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (algorithm, staggered) = self.algorithm();
        let stagger = if staggered { "+" } else { "" };
        write!(f, "{}:{algorithm}{stagger}:{}", self.limit(), self.period())?;
        for value in self.texts() {
            f.write_str(":")?;
            let Some(value) = value else {
                f.write_str("%-")?;
                continue;
            };
            for char in value.chars() {
                match char {
                    '%' | ':' | '{' | '}' | ' ' | '\0'..='\x1f' | '\x7f' => {
                        write!(f, "%{:02x}", u32::from(char))?
                    }
                    _ => write!(f, "{char}")?,
                }
            }
        }
        Ok(())
    }
}

/// The bytes that all keys of a limit with this period begin with.
pub(crate) fn family(limit: &str, algorithm: Algorithm, stagger: bool, period: Span) -> Box<[u8]> {
    // A name that is too long has been reported, and its policy is never used.
    let limit = &limit.as_bytes()[..limit.len().min(64)];
    let len = u8::try_from(limit.len()).expect("at most 64");
    let code = u8::try_from(Algorithm::ALL.iter().position(|other| *other == algorithm).expect("listed"))
        .expect("few");
    let code = code | if stagger { 0x80 } else { 0 };
    [&[len], limit, &[code], &period.as_micros().to_be_bytes()].concat().into()
}

/// Writes the value of one fact with `write`: its length, then itself.
#[inline]
pub(crate) fn push_value(value: Option<&str>, mut write: impl FnMut(&[u8])) {
    match value {
        Some(value) => {
            let len = u16::try_from(value.len()).expect("a value has at most 1 KiB");
            write(&len.to_le_bytes());
            write(value.as_bytes());
        }
        None => write(&ABSENT.to_le_bytes()),
    }
}

#[inline]
fn next_value(bytes: &[u8]) -> Option<(Option<&[u8]>, &[u8])> {
    let (len, rest) = bytes.split_first_chunk()?;
    match u16::from_le_bytes(*len) {
        ABSENT => Some((None, rest)),
        len => {
            let (value, rest) = rest.split_at_checked(usize::from(len))?;
            Some((Some(value), rest))
        }
    }
}

fn algorithm(code: u8) -> Option<(Algorithm, bool)> {
    Some((*Algorithm::ALL.get(usize::from(code & 0x7f))?, code & 0x80 != 0))
}

fn text(bytes: &[u8]) -> &str {
    core::str::from_utf8(bytes).expect("keys are made of text")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key_bytes(limit: &str, values: &[Option<&str>]) -> Vec<u8> {
        let mut bytes = family(limit, Algorithm::TokenBucket, false, Span::from_secs(60)).into_vec();
        for value in values {
            push_value(*value, |part| bytes.extend_from_slice(part));
        }
        bytes
    }

    #[test]
    fn the_readable_form_shows_every_part() {
        for (values, expected) in [
            (&[Some("alice")][..], "per-user:token-bucket:1m:alice"),
            (&[], "per-user:token-bucket:1m"),
            (&[Some("a:b"), Some("{c}%")], "per-user:token-bucket:1m:a%3ab:%7bc%7d%25"),
            (&[None, Some("")], "per-user:token-bucket:1m:%-:"),
            (&[Some("zwei\nZeilen\0 grün")], "per-user:token-bucket:1m:zwei%0aZeilen%00%20grün"),
        ] {
            let bytes = key_bytes("per-user", values);
            let key = Key::from_bytes(&bytes).expect("a key");
            assert_eq!(key.to_string(), expected);
            assert_eq!(key.texts().collect::<Vec<_>>(), values);
            assert_eq!((key.limit(), key.period()), ("per-user", Span::from_secs(60)));
            assert_eq!(key.to_bytes(), bytes);
        }
    }

    #[test]
    fn bytes_that_are_no_key_are_refused() {
        let good = key_bytes("per-user", &[Some("alice")]);
        for len in 0..good.len() {
            // Cut right behind the family it is a key without values.
            assert_eq!(Key::from_bytes(&good[..len]).is_some(), len == "per-user".len() + 10, "{len} bytes");
        }
    }
}
