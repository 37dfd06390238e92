//! Writes JSON for answers, and re-exports the library's reader for calls.

use std::fmt::Write as _;

use tollkeeper::Span;
pub use tollkeeper::json::{JsonProblem, Kind, Malformed, Reader, Scalar};
use tollkeeper_core::decimal::Decimal;

/// Writes JSON piece by piece, mostly without `core::fmt`, which is slower.
#[derive(Clone, Debug, Default)]
pub struct Writer(String);

impl Writer {
    /// An empty text with this capacity in bytes.
    pub fn with_capacity(bytes: usize) -> Writer {
        Writer(String::with_capacity(bytes))
    }

    /// Appends a piece of JSON as it is.
    pub fn raw(&mut self, json: &str) {
        self.0.push_str(json);
    }

    /// Appends a string in quotes, escaped.
    pub fn text(&mut self, text: &str) {
        self.0.push('"');
        let mut plain = 0;
        for (at, byte) in text.bytes().enumerate() {
            let escape = match byte {
                b'"' => "\\\"",
                b'\\' => "\\\\",
                b'\n' => "\\n",
                0..=0x1f | 0x7f => "",
                _ => continue,
            };
            self.0.push_str(&text[plain..at]);
            match escape {
                "" => write!(self.0, "\\u{byte:04x}").expect("writing to a string cannot fail"),
                escape => self.0.push_str(escape),
            }
            plain = at + 1;
        }
        self.0.push_str(&text[plain..]);
        self.0.push('"');
    }

    /// Appends a whole number.
    pub fn number(&mut self, number: u64) {
        self.raw(Decimal::whole(number).as_str());
    }

    /// Appends decimal seconds, exact and with at least one decimal unless zero: `0`, `0.6`, `12.0`.
    pub fn seconds(&mut self, span: Span) {
        self.raw(Decimal::seconds(span).as_str());
    }

    /// Appends `true` or `false`.
    pub fn bool(&mut self, truth: bool) {
        self.raw(if truth { "true" } else { "false" });
    }

    /// Appends the value with `write`, or `null` if it is `None`.
    pub fn or_null<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Writer, T)) {
        match value {
            Some(value) => write(self, value),
            None => self.raw("null"),
        }
    }

    /// Appends a list, each element with `write`.
    pub fn list<T>(&mut self, elements: impl IntoIterator<Item = T>, mut write: impl FnMut(&mut Writer, T)) {
        self.0.push('[');
        for (index, element) in elements.into_iter().enumerate() {
            if index > 0 {
                self.0.push(',');
            }
            write(self, element);
        }
        self.0.push(']');
    }

    /// The JSON text.
    pub fn finish(self) -> String {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_string_reads_back() {
        let all: String = (0..0x250).filter_map(char::from_u32).collect();
        let mut bytes = written(|out| out.text(&all)).into_bytes();
        assert_eq!(Reader::new(&mut bytes).unwrap().scalar(), Ok(Scalar::Text(&all)));
    }

    fn written(write: impl FnOnce(&mut Writer)) -> String {
        let mut out = Writer::default();
        write(&mut out);
        out.finish()
    }
}
