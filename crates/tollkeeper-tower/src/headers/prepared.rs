//! Headers that have been written, for an answer that may still have to come.

use http::{HeaderMap, HeaderValue};
use tollkeeper::decimal;

use super::Field;

/// Headers one behind the other: of each the field, the length and the value. So it is small, and nothing at all
/// where there are none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written(Vec<u8>);

/// A byte for the field and two for the length.
const BEFORE_VALUE: usize = 3;

impl Written {
    /// Each header with its value.
    pub fn iter(&self) -> impl Iterator<Item = (Field, &[u8])> {
        let mut rest = &self.0[..];
        std::iter::from_fn(move || {
            let ([field, low, high], after) = rest.split_first_chunk()?;
            let (value, after) = after.split_at(usize::from(u16::from_le_bytes([*low, *high])));
            rest = after;
            Some((Field::ALL[usize::from(*field)], value))
        })
    }

    /// Puts them into a map, in place of what was there.
    #[inline]
    pub fn insert(&self, headers: &mut HeaderMap) {
        for (field, value) in self.iter() {
            let value = match small(value) {
                Some(number) => HeaderValue::from_static(number),
                None => HeaderValue::from_bytes(value).expect("digits, names of limits and punctuation"),
            };
            headers.insert(field.header_name(), value);
        }
    }
}

/// A number of up to three digits, which need not be written anew.
fn small(value: &[u8]) -> Option<&'static str> {
    if value.len() > 3 || !value.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number = value.iter().fold(0, |number, digit| 10 * number + usize::from(digit - b'0'));
    std::str::from_utf8(&NUMBERS[3 * number..3 * number + 3][3 - value.len()..]).ok()
}

/// `000` to `999`.
static NUMBERS: [u8; 3_000] = {
    let mut numbers = [b'0'; 3_000];
    let mut place = 3;
    while place < numbers.len() {
        // One more than the number before.
        let [hundreds, tens, ones] = [numbers[place - 3], numbers[place - 2], numbers[place - 1]];
        let next = match (tens, ones) {
            (b'9', b'9') => [hundreds + 1, b'0', b'0'],
            (_, b'9') => [hundreds, tens + 1, b'0'],
            _ => [hundreds, tens, ones + 1],
        };
        [numbers[place], numbers[place + 1], numbers[place + 2]] = next;
        place += 3;
    }
    numbers
};

/// Headers that are being written: those that are finished, and a value.
pub(super) struct Text {
    bytes: Vec<u8>,
    /// Where the value begins; what stands before it is filled in when its end is known.
    value: usize,
}

impl Text {
    pub(super) fn new() -> Text {
        let mut bytes = Vec::with_capacity(192);
        bytes.extend_from_slice(&[0; BEFORE_VALUE]);
        Text { bytes, value: BEFORE_VALUE }
    }

    #[inline]
    pub(super) fn push(&mut self, text: &str) {
        self.bytes.extend_from_slice(text.as_bytes());
    }

    #[inline]
    pub(super) fn push_number(&mut self, number: u64) {
        decimal::append(&mut self.bytes, number);
    }

    /// How long the value is so far.
    pub(super) fn len(&self) -> usize {
        self.bytes.len() - self.value
    }

    /// Cuts the value off there.
    pub(super) fn truncate(&mut self, len: usize) {
        self.bytes.truncate(self.value + len);
    }

    /// Ends the value of this header, if there is any, and begins the next. One that is longer than 64 KiB is left
    /// out: nobody would take it.
    pub(super) fn emit(&mut self, field: Field) {
        match u16::try_from(self.len()) {
            Ok(0) => {}
            Err(_) => self.truncate(0),
            Ok(len) => {
                let [low, high] = len.to_le_bytes();
                self.bytes[self.value - BEFORE_VALUE..self.value].copy_from_slice(&[field as u8, low, high]);
                self.bytes.extend_from_slice(&[0; BEFORE_VALUE]);
                self.value = self.bytes.len();
            }
        }
    }

    pub(super) fn finish(mut self) -> Written {
        self.bytes.truncate(self.value - BEFORE_VALUE);
        Written(self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_again() {
        let mut text = Text::new();
        for (number, field) in (0..).zip(Field::ALL) {
            text.push("x".repeat(number).as_str());
            text.emit(field);
        }
        text.push("without a name");
        let written = text.finish();
        let expected: Vec<_> = (1..9).map(|number| (Field::ALL[number], vec![b'x'; number])).collect();
        assert_eq!(
            written.iter().map(|(field, value)| (field, value.to_vec())).collect::<Vec<_>>(),
            expected
        );
        assert_eq!(Text::new().finish(), Written::default());
    }

    #[test]
    fn a_value_that_nobody_would_take_is_left_out() {
        let mut text = Text::new();
        text.push("x".repeat(1 << 16).as_str());
        text.emit(Field::RateLimit);
        text.push("y");
        text.emit(Field::RateLimitPolicy);
        assert_eq!(text.finish().iter().collect::<Vec<_>>(), [(Field::RateLimitPolicy, &b"y"[..])]);
    }

    #[test]
    fn small_numbers_are_there_already() {
        for number in 0..1_000 {
            let text = number.to_string();
            assert_eq!(small(text.as_bytes()), Some(text.as_str()));
        }
        for other in ["1000", "12;", "-1", "1.5"] {
            assert_eq!(small(other.as_bytes()), None, "{other}");
        }
    }
}
