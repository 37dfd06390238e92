//! What Envoy asks, read where it lies.
//!
//! Not by prost, which refuses text that is not UTF-8 and copies the rest. The values are parts of somebody's request and
//! may be any bytes, and Envoy lets a request pass if the call about it fails: no bytes may be a way around a limit.

use std::borrow::Cow;
use std::{fmt, str};

/// The most descriptors of one request.
pub const MAX_DESCRIPTORS: usize = 64;
/// The most entries of one descriptor: one less than there may be facts, because the domain is one.
pub const MAX_ENTRIES: usize = 63;

/// An `envoy.service.ratelimit.v3.RateLimitRequest`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Question<'a> {
    /// Whose limits they are.
    pub domain: &'a str,
    /// What is known of the request.
    pub descriptors: Vec<Descriptor<'a>>,
    /// What it costs; 0 means 1.
    pub hits_addend: u32,
}

/// An `envoy.extensions.common.ratelimit.v3.RateLimitDescriptor`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Descriptor<'a> {
    /// Keys and values. Of a repeated key the second is called `key.2`.
    pub entries: Vec<(Cow<'a, str>, &'a [u8])>,
    /// What it costs, instead of what the request does.
    pub hits_addend: Option<u64>,
    /// Whether that is given back instead.
    pub is_negative_hits: bool,
}

/// Why a question cannot be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoQuestion {
    /// It is not in the format of protocol buffers.
    Malformed,
    /// The domain or the key of an entry is not text.
    NotText,
    /// More descriptors than are read.
    Descriptors,
    /// More entries than are read.
    Entries,
}

impl fmt::Display for NoQuestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoQuestion::Malformed => f.write_str("the message is not a RateLimitRequest"),
            NoQuestion::NotText => f.write_str("the domain and the keys of entries must be UTF-8"),
            NoQuestion::Descriptors => write!(f, "there are more than {MAX_DESCRIPTORS} descriptors"),
            NoQuestion::Entries => write!(f, "a descriptor has more than {MAX_ENTRIES} entries"),
        }
    }
}

impl<'a> Question<'a> {
    /// Reads a message.
    pub fn read(message: &'a [u8]) -> Result<Question<'a>, NoQuestion> {
        let mut question = Question::default();
        for field in Fields(message) {
            match field? {
                (1, Field::Bytes(domain)) => question.domain = text(domain)?,
                (2, Field::Bytes(_)) if question.descriptors.len() == MAX_DESCRIPTORS => {
                    return Err(NoQuestion::Descriptors);
                }
                (2, Field::Bytes(descriptor)) => question.descriptors.push(Descriptor::read(descriptor)?),
                #[expect(
                    clippy::cast_possible_truncation,
                    reason = "as the format has it for numbers of 32 bits"
                )]
                (3, Field::Number(hits)) => question.hits_addend = hits as u32,
                (1..=3, _) => return Err(NoQuestion::Malformed),
                _ => {}
            }
        }
        Ok(question)
    }
}

impl<'a> Descriptor<'a> {
    fn read(message: &'a [u8]) -> Result<Descriptor<'a>, NoQuestion> {
        let mut descriptor = Descriptor::default();
        for field in Fields(message) {
            match field? {
                (1, Field::Bytes(entry)) => descriptor.push(entry)?,
                (3, Field::Bytes(hits)) => {
                    let earlier = descriptor.hits_addend.unwrap_or(0);
                    descriptor.hits_addend = Some(wrapped(hits, earlier)?);
                }
                (4, Field::Number(negative)) => descriptor.is_negative_hits = negative != 0,
                (1 | 3 | 4, _) => return Err(NoQuestion::Malformed),
                _ => {}
            }
        }
        Ok(descriptor)
    }

    fn push(&mut self, entry: &'a [u8]) -> Result<(), NoQuestion> {
        if self.entries.len() == MAX_ENTRIES {
            return Err(NoQuestion::Entries);
        }
        let (mut key, mut value) = ("", &[][..]);
        for field in Fields(entry) {
            match field? {
                (1, Field::Bytes(bytes)) => key = text(bytes)?,
                (2, Field::Bytes(bytes)) => value = bytes,
                (1 | 2, _) => return Err(NoQuestion::Malformed),
                _ => {}
            }
        }
        let number = self.repeated(key);
        let key = if number == 1 { Cow::Borrowed(key) } else { Cow::Owned(format!("{key}.{number}")) };
        self.entries.push((key, value));
        Ok(())
    }

    /// The number of an entry among those of its key.
    fn repeated(&self, key: &str) -> usize {
        let same = |(other, _): &&(Cow<'_, str>, _)| match other {
            Cow::Borrowed(other) => *other == key,
            Cow::Owned(other) => other.rsplit_once('.').is_some_and(|(other, _)| other == key),
        };
        1 + self.entries.iter().filter(same).count()
    }
}

/// The number in a `google.protobuf.UInt64Value`.
fn wrapped(message: &[u8], earlier: u64) -> Result<u64, NoQuestion> {
    let mut value = earlier;
    for field in Fields(message) {
        match field? {
            (1, Field::Number(number)) => value = number,
            (1, _) => return Err(NoQuestion::Malformed),
            _ => {}
        }
    }
    Ok(value)
}

fn text(bytes: &[u8]) -> Result<&str, NoQuestion> {
    str::from_utf8(bytes).map_err(|_| NoQuestion::NotText)
}

/// The fields of a message, in the order they came.
struct Fields<'a>(&'a [u8]);

enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// Of a length that no field we know has.
    Fixed,
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Field<'a>), NoQuestion>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        Some(self.field().ok_or_else(|| {
            self.0 = &[];
            NoQuestion::Malformed
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
            // Groups, which nobody has used for many years.
            _ => return None,
        };
        Some((number, field))
    }

    /// Seven bits in each byte, the least first; the last byte is below 128.
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
