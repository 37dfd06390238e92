//! Serialised rate-limit headers in one buffer, which can wait for the handler's response.

use http::{HeaderMap, HeaderValue};
use tollkeeper_core::decimal;
use tollkeeper_core::inline::Inline;

use super::Field;

/// Serialised headers in one buffer: for each header its field, the length of its value and the value. It takes one word,
/// and without headers it allocates nothing.
#[derive(Clone, Debug, Default)]
pub struct SerializedHeaders(Option<Box<Buffer>>);

/// Enough for the headers of two dialects.
type Buffer = Inline<u8, 200>;

/// The length of the prefix of a value: one byte for the field and two for the length.
const PREFIX_LEN: usize = 3;

impl SerializedHeaders {
    /// Each header with its value.
    pub fn iter(&self) -> impl Iterator<Item = (Field, &[u8])> {
        let mut rest = self.bytes();
        std::iter::from_fn(move || {
            let ([field, low, high], after) = rest.split_first_chunk()?;
            let (value, after) = after.split_at(usize::from(u16::from_le_bytes([*low, *high])));
            rest = after;
            Some((Field::ALL[usize::from(*field)], value))
        })
    }

    fn bytes(&self) -> &[u8] {
        self.0.as_ref().map_or(&[], |buffer| &buffer[..])
    }

    /// Inserts the headers into a map, replacing headers of the same name.
    #[inline]
    pub fn insert(&self, headers: &mut HeaderMap) {
        for (field, value) in self.iter() {
            let value = match small_number(value) {
                Some(number) => HeaderValue::from_static(number),
                None => HeaderValue::from_bytes(value).expect("digits, limit names and punctuation"),
            };
            headers.insert(field.header_name(), value);
        }
    }
}

impl PartialEq for SerializedHeaders {
    fn eq(&self, other: &SerializedHeaders) -> bool {
        self.bytes() == other.bytes()
    }
}

impl Eq for SerializedHeaders {}

/// The static text of a number of up to three digits, which spares an allocation; `None` for any other value.
fn small_number(value: &[u8]) -> Option<&'static str> {
    if value.len() > 3 || !value.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number = value.iter().fold(0, |number, digit| 10 * number + usize::from(digit - b'0'));
    std::str::from_utf8(&NUMBERS[3 * number..3 * number + 3][3 - value.len()..]).ok()
}

/// The texts `000` to `999`, one after the other.
static NUMBERS: [u8; 3_000] = {
    let mut numbers = [b'0'; 3_000];
    let mut start = 3;
    while start < numbers.len() {
        // Increment the number before.
        let [hundreds, tens, ones] = [numbers[start - 3], numbers[start - 2], numbers[start - 1]];
        let next = match (tens, ones) {
            (b'9', b'9') => [hundreds + 1, b'0', b'0'],
            (_, b'9') => [hundreds, tens + 1, b'0'],
            _ => [hundreds, tens, ones + 1],
        };
        [numbers[start], numbers[start + 1], numbers[start + 2]] = next;
        start += 3;
    }
    numbers
};

/// Builds [`SerializedHeaders`]: the finished headers, and the value of the next one.
pub(super) struct Text {
    bytes: Box<Buffer>,
    /// Where the value of the next header begins; the prefix before it is filled in when its length is known.
    value_start: usize,
}

impl Text {
    pub(super) fn new() -> Text {
        let mut bytes = Box::<Buffer>::default();
        bytes.extend_from_slice(&[0; PREFIX_LEN]);
        Text { bytes, value_start: PREFIX_LEN }
    }

    #[inline]
    pub(super) fn push(&mut self, text: &str) {
        self.bytes.extend_from_slice(text.as_bytes());
    }

    #[inline]
    pub(super) fn push_number(&mut self, number: u64) {
        decimal::write(number, |digits, len| self.bytes.extend_from_array(digits, len));
    }

    /// The length of the value so far.
    pub(super) fn len(&self) -> usize {
        self.bytes.len() - self.value_start
    }

    /// Truncates the value to this length.
    pub(super) fn truncate(&mut self, len: usize) {
        self.bytes.truncate(self.value_start + len);
    }

    /// Finishes the value as that of `field`, and begins the next. A header without a value is omitted, and so is one of
    /// 64 KiB or more, which no client would accept.
    pub(super) fn emit(&mut self, field: Field) {
        match u16::try_from(self.len()) {
            Ok(0) => {}
            Err(_) => self.truncate(0),
            Ok(len) => {
                let [low, high] = len.to_le_bytes();
                let prefix = self.value_start - PREFIX_LEN..self.value_start;
                self.bytes[prefix].copy_from_slice(&[field as u8, low, high]);
                self.bytes.extend_from_slice(&[0; PREFIX_LEN]);
                self.value_start = self.bytes.len();
            }
        }
    }

    pub(super) fn finish(mut self) -> SerializedHeaders {
        self.bytes.truncate(self.value_start - PREFIX_LEN);
        SerializedHeaders((!self.bytes.is_empty()).then_some(self.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_headers_are_read_back() {
        let mut text = Text::new();
        for (number, field) in (0..).zip(Field::ALL) {
            text.push("x".repeat(number).as_str());
            text.emit(field);
        }
        text.push("unfinished");
        let written = text.finish();
        let expected: Vec<_> = (1..9).map(|number| (Field::ALL[number], vec![b'x'; number])).collect();
        assert_eq!(
            written.iter().map(|(field, value)| (field, value.to_vec())).collect::<Vec<_>>(),
            expected
        );
        assert_eq!(Text::new().finish(), SerializedHeaders::default());
    }

    #[test]
    fn value_of_64_kib_is_omitted() {
        let mut text = Text::new();
        text.push("x".repeat(1 << 16).as_str());
        text.emit(Field::RateLimit);
        text.push("y");
        text.emit(Field::RateLimitPolicy);
        assert_eq!(text.finish().iter().collect::<Vec<_>>(), [(Field::RateLimitPolicy, &b"y"[..])]);
    }

    #[test]
    fn numbers_below_1000_are_static() {
        for number in 0..1_000 {
            let text = number.to_string();
            assert_eq!(small_number(text.as_bytes()), Some(text.as_str()));
        }
        for other in ["1000", "12;", "-1", "1.5"] {
            assert_eq!(small_number(other.as_bytes()), None, "{other}");
        }
    }
}
