//! Decodes Envoy's `RateLimitRequest` without copying.
//!
//! Not with prost, which refuses strings that are not UTF-8 and copies all others. The values come from a client's request
//! and may be any bytes, and Envoy admits a request if the call about it fails. So no bytes may be a way around a limit.

use std::borrow::Cow;
use std::{fmt, str};

/// The most descriptors of one request.
pub const MAX_DESCRIPTORS: usize = 64;
/// The most entries of one descriptor: one less than the most facts, because the domain is a fact, too.
pub const MAX_ENTRIES: usize = 63;

/// An `envoy.service.ratelimit.v3.RateLimitRequest`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Question<'a> {
    /// The domain, which becomes the fact `domain`.
    pub domain: &'a str,
    /// What Envoy knows of the request.
    pub descriptors: Vec<Descriptor<'a>>,
    /// Units to charge; 0 means 1.
    pub hits_addend: u32,
}

/// An `envoy.extensions.common.ratelimit.v3.RateLimitDescriptor`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Descriptor<'a> {
    /// Keys and values. The second entry of a repeated key is named `key.2`.
    pub entries: Vec<(Cow<'a, str>, &'a [u8])>,
    /// Units to charge, instead of those of the request.
    pub hits_addend: Option<u64>,
    /// Whether the units are refunded instead of charged.
    pub is_negative_hits: bool,
}

/// Why a message was not decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// It is not a valid protobuf message of this type.
    Malformed,
    /// The domain or the key of an entry is not UTF-8.
    NotText,
    /// More than [`MAX_DESCRIPTORS`] descriptors.
    Descriptors,
    /// More than [`MAX_ENTRIES`] entries in a descriptor.
    Entries,
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DecodeError::Malformed => f.write_str("the message is not a RateLimitRequest"),
            DecodeError::NotText => f.write_str("the domain and the keys of entries must be UTF-8"),
            DecodeError::Descriptors => write!(f, "there are more than {MAX_DESCRIPTORS} descriptors"),
            DecodeError::Entries => write!(f, "a descriptor has more than {MAX_ENTRIES} entries"),
        }
    }
}

impl<'a> Question<'a> {
    /// Decodes a message.
    pub fn read(message: &'a [u8]) -> Result<Question<'a>, DecodeError> {
        let mut question = Question::default();
        for field in Fields(message) {
            match field? {
                (1, Field::Bytes(domain)) => question.domain = text(domain)?,
                (2, Field::Bytes(_)) if question.descriptors.len() == MAX_DESCRIPTORS => {
                    return Err(DecodeError::Descriptors);
                }
                (2, Field::Bytes(descriptor)) => question.descriptors.push(Descriptor::read(descriptor)?),
                #[expect(
                    clippy::cast_possible_truncation,
                    reason = "protobuf truncates varints of 32-bit fields"
                )]
                (3, Field::Number(hits)) => question.hits_addend = hits as u32,
                (1..=3, _) => return Err(DecodeError::Malformed),
                _ => {}
            }
        }
        Ok(question)
    }
}

impl<'a> Descriptor<'a> {
    fn read(message: &'a [u8]) -> Result<Descriptor<'a>, DecodeError> {
        let mut descriptor = Descriptor::default();
        for field in Fields(message) {
            match field? {
                (1, Field::Bytes(entry)) => descriptor.push(entry)?,
                (3, Field::Bytes(hits)) => {
                    let earlier = descriptor.hits_addend.unwrap_or(0);
                    descriptor.hits_addend = Some(wrapped(hits, earlier)?);
                }
                (4, Field::Number(negative)) => descriptor.is_negative_hits = negative != 0,
                (1 | 3 | 4, _) => return Err(DecodeError::Malformed),
                _ => {}
            }
        }
        Ok(descriptor)
    }

    fn push(&mut self, entry: &'a [u8]) -> Result<(), DecodeError> {
        if self.entries.len() == MAX_ENTRIES {
            return Err(DecodeError::Entries);
        }
        let (mut key, mut value) = ("", &[][..]);
        for field in Fields(entry) {
            match field? {
                (1, Field::Bytes(bytes)) => key = text(bytes)?,
                (2, Field::Bytes(bytes)) => value = bytes,
                (1 | 2, _) => return Err(DecodeError::Malformed),
                _ => {}
            }
        }
        let number = self.repeated(key);
        let key = if number == 1 { Cow::Borrowed(key) } else { Cow::Owned(format!("{key}.{number}")) };
        self.entries.push((key, value));
        Ok(())
    }

    /// The number of the next entry with this key: 1 for the first.
    fn repeated(&self, key: &str) -> usize {
        let same = |(other, _): &&(Cow<'_, str>, _)| match other {
            Cow::Borrowed(other) => *other == key,
            Cow::Owned(other) => other.rsplit_once('.').is_some_and(|(other, _)| other == key),
        };
        1 + self.entries.iter().filter(same).count()
    }
}

/// The number in a `google.protobuf.UInt64Value`.
fn wrapped(message: &[u8], earlier: u64) -> Result<u64, DecodeError> {
    let mut value = earlier;
    for field in Fields(message) {
        match field? {
            (1, Field::Number(number)) => value = number,
            (1, _) => return Err(DecodeError::Malformed),
            _ => {}
        }
    }
    Ok(value)
}

fn text(bytes: &[u8]) -> Result<&str, DecodeError> {
    str::from_utf8(bytes).map_err(|_| DecodeError::NotText)
}

/// The fields of a message, in wire order.
struct Fields<'a>(&'a [u8]);

enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// A fixed-size value, which no known field has.
    Fixed,
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Field<'a>), DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        Some(self.field().ok_or_else(|| {
            self.0 = &[];
            DecodeError::Malformed
        }))
    }
}

impl<'a> Fields<'a> {
    fn field(&mut self) -> Option<(u64, Field<'a>)> {
        let tag = self.number()?;
        let number = tag >> 3;
        if number == 0 || tag > u64::from(u32::MAX) {
            return None;
        }
        let field = match tag & 7 {
            0 => Field::Number(self.number()?),
            1 => self.take(8).map(|_| Field::Fixed)?,
            2 => {
                let length = usize::try_from(self.number()?).ok()?;
                Field::Bytes(self.take(length)?)
            }
            5 => self.take(4).map(|_| Field::Fixed)?,
            // Groups, which are deprecated.
            _ => return None,
        };
        Some((number, field))
    }

    /// Reads a varint: seven bits in each byte, the least significant first, until a byte below 128.
    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for (place, byte) in self.0.iter().take(10).enumerate() {
            let bits = u64::from(byte & 0x7f);
            if place == 9 && bits > 1 {
                return None;
            }
            number |= bits << (7 * place);
            if *byte < 0x80 {
                self.0 = &self.0[place + 1..];
                return Some(number);
            }
        }
        None
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }
}
