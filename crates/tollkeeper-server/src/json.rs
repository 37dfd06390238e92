//! A JSON reader that works in place, and a JSON writer.
//!
//! A request is a small object of known fields, and must be refused if a field is unknown or given twice. So it is read
//! field by field instead of into a tree. The reader owns the buffer: it unescapes strings in place and copies no value.

use std::fmt::{self, Write as _};

use tollkeeper::Span;
use tollkeeper::decimal::Decimal;

/// The deepest nesting of a value.
const DEPTH: usize = 32;

/// Reads one JSON text from front to back.
#[derive(Debug)]
pub struct Reader<'a> {
    rest: &'a mut [u8],
    /// Position of `rest` in the whole text, for error messages.
    offset: usize,
}

/// A value that is neither a list nor an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    /// A string.
    Text(&'a str),
    /// A number, as it was written.
    Number(&'a str),
    /// True or false.
    Bool(bool),
    /// Null.
    Null,
}

/// What kind of value comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An object.
    Object,
    /// A list.
    List,
    /// Anything that [`Reader::scalar`] reads.
    Scalar,
}

/// The text is not JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// Position of the first byte that is wrong.
    pub at: usize,
    /// What is wrong there.
    pub what: &'static str,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not JSON at byte {}: {}", self.at, self.what)
    }
}

impl<'a> Reader<'a> {
    /// Reads these bytes, and overwrites some of them.
    pub fn new(text: &'a mut [u8]) -> Result<Reader<'a>, Malformed> {
        if let Err(error) = std::str::from_utf8(text) {
            return Err(Malformed { at: error.valid_up_to(), what: "invalid UTF-8" });
        }
        Ok(Reader { rest: text, offset: 0 })
    }

    /// The kind of the next value, which is not consumed.
    pub fn kind(&mut self) -> Result<Kind, Malformed> {
        match self.peek()? {
            b'{' => Ok(Kind::Object),
            b'[' => Ok(Kind::List),
            _ => Ok(Kind::Scalar),
        }
    }

    /// Reads an object. `field` is called with each name and must read the value.
    pub fn object<E: From<Malformed>>(
        &mut self,
        mut field: impl FnMut(&mut Reader<'a>, &'a str) -> Result<(), E>,
    ) -> Result<(), E> {
        self.expect(b'{', "an object begins with `{`")?;
        if self.peek()? == b'}' {
            self.skip(1);
            return Ok(());
        }
        loop {
            self.peek()?;
            let name = self.string("expected a name in double quotes or `}`")?;
            self.expect(b':', "expected `:` between a name and its value")?;
            self.peek()?;
            field(self, name)?;
            match self.peek()? {
                b',' => self.skip(1),
                b'}' => break,
                _ => return Err(self.malformed("expected `,` or `}`").into()),
            }
        }
        self.skip(1);
        Ok(())
    }

    /// Reads a list. `element` is called with the index of each element and must read it.
    pub fn list<E: From<Malformed>>(
        &mut self,
        mut element: impl FnMut(&mut Reader<'a>, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        self.expect(b'[', "a list begins with `[`")?;
        if self.peek()? == b']' {
            self.skip(1);
            return Ok(());
        }
        for index in 0.. {
            self.peek()?;
            element(self, index)?;
            match self.peek()? {
                b',' => self.skip(1),
                b']' => break,
                _ => return Err(self.malformed("expected `,` or `]`").into()),
            }
        }
        self.skip(1);
        Ok(())
    }

    /// Reads a value that is neither an object nor a list.
    pub fn scalar(&mut self) -> Result<Value<'a>, Malformed> {
        match self.peek()? {
            b'"' => self.string("").map(Value::Text),
            b't' => self.word("true", Value::Bool(true)),
            b'f' => self.word("false", Value::Bool(false)),
            b'n' => self.word("null", Value::Null),
            b'-' | b'0'..=b'9' => {
                let len = number(self.rest).map_err(|what| self.malformed(what))?;
                Ok(Value::Number(text(self.take(len))))
            }
            _ => Err(self.malformed("expected a value (strings in double quotes)")),
        }
    }

    /// Checks that the next value is well-formed, and returns a reader for it alone.
    pub fn value(&mut self) -> Result<Reader<'a>, Malformed> {
        self.peek()?;
        let len = extent(self.rest).map_err(|(at, what)| Malformed { at: self.offset + at, what })?;
        let offset = self.offset;
        Ok(Reader { rest: self.take(len), offset })
    }

    /// Checks that only whitespace follows.
    pub fn end(mut self) -> Result<(), Malformed> {
        self.skip_whitespace();
        if self.rest.is_empty() { Ok(()) } else { Err(self.malformed("unexpected data after the end")) }
    }

    fn string(&mut self, otherwise: &'static str) -> Result<&'a str, Malformed> {
        if self.rest.first() != Some(&b'"') {
            return Err(self.malformed(otherwise));
        }
        let (len, escaped) =
            string(self.rest).map_err(|(at, what)| Malformed { at: self.offset + at, what })?;
        let inner = &mut self.take(len)[1..len - 1];
        let inner = if escaped { unescape(inner) } else { inner };
        Ok(text(inner))
    }

    fn word(&mut self, word: &'static str, value: Value<'a>) -> Result<Value<'a>, Malformed> {
        if !self.rest.starts_with(word.as_bytes()) {
            return Err(self.malformed("expected a value (`true`, `false` and `null` are lower case)"));
        }
        self.skip(word.len());
        Ok(value)
    }

    fn expect(&mut self, byte: u8, otherwise: &'static str) -> Result<(), Malformed> {
        if self.peek()? != byte {
            return Err(self.malformed(otherwise));
        }
        self.skip(1);
        Ok(())
    }

    /// Skips whitespace, and returns the next byte without consuming it.
    fn peek(&mut self) -> Result<u8, Malformed> {
        self.skip_whitespace();
        self.rest.first().copied().ok_or_else(|| self.malformed("the text ends too early"))
    }

    fn skip_whitespace(&mut self) {
        let len = self.rest.iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')).count();
        self.skip(len);
    }

    fn skip(&mut self, len: usize) {
        self.take(len);
    }

    fn take(&mut self, len: usize) -> &'a mut [u8] {
        let (taken, rest) = std::mem::take(&mut self.rest).split_at_mut(len);
        self.rest = rest;
        self.offset += len;
        taken
    }

    fn malformed(&self, what: &'static str) -> Malformed {
        Malformed { at: self.offset, what }
    }
}

/// The text of a slice that was cut at ASCII characters of valid UTF-8.
fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8, cut at quotes or digits")
}

type At = (usize, &'static str);

/// The length of the string that `text` begins with, including its quotes, and whether it has escapes.
fn string(text: &[u8]) -> Result<(usize, bool), At> {
    let mut escaped = false;
    let mut at = 1;
    loop {
        match text.get(at) {
            Some(b'"') => return Ok((at + 1, escaped)),
            Some(b'\\') => {
                escaped = true;
                at += match text.get(at + 1) {
                    Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => 2,
                    Some(b'u') => unicode(&text[at..]).map_err(|what| (at, what))?.1,
                    _ => return Err((at, "unknown escape")),
                };
            }
            Some(0..=0x1f) => return Err((at, "control characters in a string must be escaped")),
            Some(_) => at += 1,
            None => return Err((at, "unterminated string")),
        }
    }
}

/// The character of `\uXXXX`, or of a surrogate pair of two, and the length of the escape: 6 or 12.
fn unicode(text: &[u8]) -> Result<(char, usize), &'static str> {
    let unit = |at: usize| -> Option<u32> {
        let digits = text.get(at..at + 6)?.strip_prefix(b"\\u")?;
        digits.iter().try_fold(0, |sum, digit| Some(sum * 16 + char::from(*digit).to_digit(16)?))
    };
    let first = unit(0).ok_or("`\\u` must be followed by four hexadecimal digits")?;
    if let Some(char) = char::from_u32(first) {
        return Ok((char, 6));
    }
    let second = unit(6).filter(|second| (0xdc00..0xe000).contains(second) && first < 0xdc00);
    let second = second.ok_or("unpaired surrogate")?;
    let char = char::from_u32(0x1_0000 + ((first - 0xd800) << 10) + (second - 0xdc00));
    Ok((char.expect("a pair of surrogates is a character"), 12))
}

/// Decodes escapes in place: a character is never longer than its escape. [`string`] has validated them.
fn unescape(inner: &mut [u8]) -> &mut [u8] {
    let (mut from, mut to) = (0, 0);
    while from < inner.len() {
        let (char, len) = match (inner[from], inner.get(from + 1)) {
            (b'\\', Some(b'u')) => unicode(&inner[from..]).expect("checked"),
            (b'\\', Some(escape)) => {
                let char = match escape {
                    b'b' => '\u{8}',
                    b'f' => '\u{c}',
                    b'n' => '\n',
                    b'r' => '\r',
                    b't' => '\t',
                    other => char::from(*other),
                };
                (char, 2)
            }
            (byte, _) => {
                inner[to] = byte;
                (from, to) = (from + 1, to + 1);
                continue;
            }
        };
        to += char.encode_utf8(&mut inner[to..]).len();
        from += len;
    }
    &mut inner[..to]
}

/// The length of the number that `text` begins with.
fn number(text: &[u8]) -> Result<usize, &'static str> {
    let digits = |from: usize| text[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let sign = usize::from(text.first() == Some(&b'-'));
    let whole = digits(sign);
    if whole == 0 || (whole > 1 && text[sign] == b'0') {
        return Err("a number begins with a digit, and has no leading zeros");
    }
    let mut len = sign + whole;
    if text.get(len) == Some(&b'.') {
        let fraction = digits(len + 1);
        if fraction == 0 {
            return Err("expected digits after the decimal point");
        }
        len += 1 + fraction;
    }
    if matches!(text.get(len), Some(b'e' | b'E')) {
        let signed = usize::from(matches!(text.get(len + 1), Some(b'+' | b'-')));
        let exponent = digits(len + 1 + signed);
        if exponent == 0 {
            return Err("expected digits in the exponent");
        }
        len += 1 + signed + exponent;
    }
    Ok(len)
}

/// The length of the value that `text` begins with, if it is well-formed. A loop instead of recursion, because the client
/// decides how deep the value is nested.
fn extent(text: &[u8]) -> Result<usize, At> {
    /// What may come next.
    #[derive(Clone, Copy, PartialEq)]
    enum Next {
        Value,
        /// A value, or the end of an empty list.
        ValueOrEnd,
        Name,
        /// A name, or the end of an empty object.
        NameOrEnd,
        Colon,
        CommaOrEnd,
    }
    let mut open: Vec<u8> = Vec::new();
    let (mut at, mut next) = (0, Next::Value);
    loop {
        let byte = *text.get(at).ok_or((at, "the text ends too early"))?;
        let closes = |open: &[u8]| open.last() == Some(&byte);
        match (next, byte) {
            (_, b' ' | b'\t' | b'\n' | b'\r') => at += 1,
            (Next::ValueOrEnd | Next::NameOrEnd | Next::CommaOrEnd, b']' | b'}') if closes(&open) => {
                open.pop();
                (at, next) = (at + 1, Next::CommaOrEnd);
            }
            (Next::Value | Next::ValueOrEnd, b'{' | b'[') => {
                if open.len() == DEPTH {
                    return Err((at, "nested too deeply (at most 32 levels)"));
                }
                (at, next) = (at + 1, if byte == b'{' { Next::NameOrEnd } else { Next::ValueOrEnd });
                open.push(if byte == b'{' { b'}' } else { b']' });
            }
            (Next::Value | Next::ValueOrEnd, b'"') => {
                at += string(&text[at..]).map_err(|(further, what)| (at + further, what))?.0;
                next = Next::CommaOrEnd;
            }
            (Next::Value | Next::ValueOrEnd, b'-' | b'0'..=b'9') => {
                at += number(&text[at..]).map_err(|what| (at, what))?;
                next = Next::CommaOrEnd;
            }
            (Next::Value | Next::ValueOrEnd, _) => {
                let word =
                    ["true", "false", "null"].iter().find(|word| text[at..].starts_with(word.as_bytes()));
                at += word.ok_or((at, "expected a value (strings in double quotes)"))?.len();
                next = Next::CommaOrEnd;
            }
            (Next::Name | Next::NameOrEnd, b'"') => {
                at += string(&text[at..]).map_err(|(further, what)| (at + further, what))?.0;
                next = Next::Colon;
            }
            (Next::Colon, b':') => (at, next) = (at + 1, Next::Value),
            (Next::CommaOrEnd, b',') => {
                let object = open.last() == Some(&b'}');
                (at, next) = (at + 1, if object { Next::Name } else { Next::Value });
            }
            (Next::Name | Next::NameOrEnd, _) => {
                return Err((at, "expected a name in double quotes or `}`"));
            }
            (Next::Colon, _) => return Err((at, "expected `:` between a name and its value")),
            (Next::CommaOrEnd, _) => return Err((at, "expected `,` or the end of the list or object")),
        }
        if open.is_empty() && next == Next::CommaOrEnd {
            return Ok(at);
        }
    }
}

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

    fn scalar(text: &str) -> Result<String, String> {
        let mut bytes = text.as_bytes().to_vec();
        let mut reader = Reader::new(&mut bytes).map_err(|error| error.to_string())?;
        let value = reader.scalar().map_err(|error| error.to_string())?;
        let value = format!("{value:?}");
        reader.end().map_err(|error| error.to_string())?;
        Ok(value)
    }

    #[test]
    fn scalars_are_read_as_rfc_8259_defines() {
        for (text, expected) in [
            (r#""alice""#, r#"Text("alice")"#),
            (r#" "" "#, r#"Text("")"#),
            (r#""a\"\\\/\b\f\n\r\tz""#, r#"Text("a\"\\/\u{8}\u{c}\n\r\tz")"#),
            (r#""\u00e9\ud83d\ude00\u0000""#, r#"Text("é😀\0")"#),
            ("\"é😀\"", r#"Text("é😀")"#),
            ("0", r#"Number("0")"#),
            ("-12.5e+3", r#"Number("-12.5e+3")"#),
            ("18446744073709551616", r#"Number("18446744073709551616")"#),
            ("true", "Bool(true)"),
            ("false\n", "Bool(false)"),
            ("null", "Null"),
        ] {
            assert_eq!(scalar(text).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn invalid_json_is_refused_with_its_position() {
        for (text, expected) in [
            ("", "at byte 0: the text ends too early"),
            ("NaN", "at byte 0: expected a value"),
            ("Infinity", "at byte 0: expected a value"),
            ("'a'", "at byte 0: expected a value"),
            ("True", "at byte 0: expected a value"),
            ("nul", "at byte 0: expected a value"),
            ("01", "at byte 0: a number begins with a digit"),
            ("-", "at byte 0: a number begins with a digit"),
            ("+1", "at byte 0: expected a value"),
            ("1.", "at byte 0: expected digits after"),
            ("1e", "at byte 0: expected digits in the exponent"),
            ("1 2", "at byte 2: unexpected data after the end"),
            ("\"a", "at byte 2: unterminated string"),
            ("\"a\nb\"", "at byte 2: control characters"),
            (r#""\x""#, "at byte 1: unknown escape"),
            (r#""\u12""#, "at byte 1: `\\u` must be followed by four"),
            (r#""\ud800""#, "at byte 1: unpaired surrogate"),
            (r#""\ud800\ud800""#, "at byte 1: unpaired surrogate"),
            (r#""\udc00\udc00""#, "at byte 1: unpaired surrogate"),
        ] {
            let error = scalar(text).expect_err(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
        let mut bytes = b"\"a\xff\"".to_vec();
        assert_eq!(Reader::new(&mut bytes).unwrap_err(), Malformed { at: 2, what: "invalid UTF-8" });
    }

    /// Reads a value with `object`, `list` and `scalar`, and writes it again.
    fn copy(reader: &mut Reader<'_>, out: &mut Writer) -> Result<(), Malformed> {
        match reader.kind()? {
            Kind::Object => {
                out.raw("{");
                reader.object(|reader, name| {
                    out.text(name);
                    out.raw(":");
                    copy(reader, out)?;
                    out.raw(",");
                    Ok::<(), Malformed>(())
                })?;
                out.raw("}");
            }
            Kind::List => {
                out.raw("[");
                reader.list(|reader, _| {
                    copy(reader, out)?;
                    out.raw(",");
                    Ok::<(), Malformed>(())
                })?;
                out.raw("]");
            }
            Kind::Scalar => match reader.scalar()? {
                Value::Text(text) => out.text(text),
                Value::Number(number) => out.raw(number),
                Value::Bool(truth) => out.bool(truth),
                Value::Null => out.raw("null"),
            },
        }
        Ok(())
    }

    #[test]
    fn objects_and_lists_are_read() {
        let text = r#" {"a" : [1, {"b":null} , [] ],"c":{}, "\u0064":"\n" } "#;
        let expected = r#"{"a":[1,{"b":null,},[],],"c":{},"d":"\n",}"#;
        let mut bytes = text.as_bytes().to_vec();
        let mut reader = Reader::new(&mut bytes).unwrap();
        let mut out = Writer::default();
        copy(&mut reader, &mut out).unwrap();
        reader.end().unwrap();
        assert_eq!(out.finish(), expected);

        let mut bytes = text.as_bytes().to_vec();
        let mut reader = Reader::new(&mut bytes).unwrap();
        let mut value = reader.value().unwrap();
        reader.end().unwrap();
        let mut out = Writer::default();
        copy(&mut value, &mut out).unwrap();
        assert_eq!(out.finish(), expected);
    }

    #[test]
    fn both_readers_refuse_malformed_json() {
        let deep = "[".repeat(100_000);
        for text in [
            "{",
            "[",
            "{]",
            "[}",
            "[1,]",
            r#"{"a":1,}"#,
            r#"{"a"}"#,
            r#"{"a":}"#,
            r#"{a:1}"#,
            "[1 2]",
            "[,1]",
            r#"{"a" 1}"#,
            r#"{"a":1 "b":2}"#,
            r#"{1:2}"#,
            "[nope]",
            r#"["a]"#,
            "[01]",
            &deep,
        ] {
            let mut bytes = text.as_bytes().to_vec();
            Reader::new(&mut bytes).unwrap().value().expect_err(text);
            if text.len() < 100 {
                let mut bytes = text.as_bytes().to_vec();
                let mut reader = Reader::new(&mut bytes).unwrap();
                copy(&mut reader, &mut Writer::default()).expect_err(text);
            }
        }
    }

    #[test]
    fn nesting_ends_at_32_levels() {
        let nested = |depth: usize| [vec![b'['; depth], vec![b']'; depth]].concat();
        Reader::new(&mut nested(32)).unwrap().value().unwrap();
        let error = Reader::new(&mut nested(33)).unwrap().value().unwrap_err();
        assert_eq!(error.to_string(), "not JSON at byte 32: nested too deeply (at most 32 levels)");
    }

    #[test]
    fn written_string_reads_back() {
        let all: String = (0..0x250).filter_map(char::from_u32).collect();
        let mut bytes = written(|out| out.text(&all)).into_bytes();
        assert_eq!(Reader::new(&mut bytes).unwrap().scalar(), Ok(Value::Text(&all)));
    }

    fn written(write: impl FnOnce(&mut Writer)) -> String {
        let mut out = Writer::default();
        write(&mut out);
        out.finish()
    }
}
