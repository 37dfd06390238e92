//! The JSON reader of the workspace (RFC 8259, without extensions): of config files, of request bodies that the tower
//! layer reads facts from, and of calls to the server.
//!
//! It reads field by field instead of into a tree, because a request is a small object of known fields, and must be
//! refused if one is unknown or occurs twice. It owns the buffer: it unescapes strings in place and copies no value.

use std::fmt;
use std::ops::Range;

/// The deepest nesting of [`Reader::value`], unless [`Reader::deep`] allows more.
const DEPTH: usize = 32;

/// Reads one JSON text from front to back.
#[derive(Debug)]
pub struct Reader<'a> {
    rest: &'a mut [u8],
    /// Position of `rest` in the whole text, for error messages.
    offset: usize,
    /// Position of the last name that [`Reader::object`] read, with its quotes.
    name: Range<usize>,
    depth: usize,
}

/// A value that is neither a list nor an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scalar<'a> {
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// Position of the first byte that is wrong.
    pub at: usize,
    /// What is wrong there.
    pub problem: JsonProblem,
    /// Whether the text ends there: then the problem says what should follow.
    pub at_end: bool,
}

/// What is wrong with a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "described by their messages")]
#[non_exhaustive]
pub enum JsonProblem {
    Utf8,
    /// A value is missing.
    Value,
    /// A word begins like `true`, `false` or `null`.
    Word,
    NotAnObject,
    NotAList,
    Name,
    Colon,
    /// `,` or this end of a list or an object is missing.
    CommaOr(u8),
    /// The same, where it was not noted which of both is open.
    CommaOrEnd,
    Digits,
    Fraction,
    Exponent,
    Unterminated,
    Control,
    Escape,
    HexDigits,
    Surrogate,
    TooDeep,
    AfterEnd,
}

impl JsonProblem {
    fn message(self) -> &'static str {
        match self {
            JsonProblem::Utf8 => "invalid UTF-8",
            JsonProblem::Value => "expected a value (strings in double quotes)",
            JsonProblem::Word => "expected a value (`true`, `false` and `null` are lower case)",
            JsonProblem::NotAnObject => "an object begins with `{`",
            JsonProblem::NotAList => "a list begins with `[`",
            JsonProblem::Name => "expected a name in double quotes or `}`",
            JsonProblem::Colon => "expected `:` between a name and its value",
            JsonProblem::CommaOr(b'}') => "expected `,` or `}`",
            JsonProblem::CommaOr(_) => "expected `,` or `]`",
            JsonProblem::CommaOrEnd => "expected `,` or the end of the list or object",
            JsonProblem::Digits => "a number begins with a digit, and has no leading zeros",
            JsonProblem::Fraction => "expected digits after the decimal point",
            JsonProblem::Exponent => "expected digits in the exponent",
            JsonProblem::Unterminated => "unterminated string",
            JsonProblem::Control => "control characters in a string must be escaped",
            JsonProblem::Escape => "unknown escape",
            JsonProblem::HexDigits => "`\\u` must be followed by four hexadecimal digits",
            JsonProblem::Surrogate => "unpaired surrogate",
            JsonProblem::TooDeep => "nested too deeply (at most 32 levels)",
            JsonProblem::AfterEnd => "unexpected data after the end",
        }
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let message = if self.at_end { "the text ends too early" } else { self.problem.message() };
        write!(f, "not JSON at byte {}: {message}", self.at)
    }
}

impl<'a> Reader<'a> {
    /// Reads these bytes, and overwrites some of them.
    pub fn new(text: &'a mut [u8]) -> Result<Reader<'a>, Malformed> {
        if let Err(error) = std::str::from_utf8(text) {
            return Err(Malformed { at: error.valid_up_to(), problem: JsonProblem::Utf8, at_end: false });
        }
        Ok(Reader { rest: text, offset: 0, name: 0..0, depth: DEPTH })
    }

    /// Lets [`Reader::value`] read values that are nested so deep.
    #[must_use]
    pub fn deep(self, depth: usize) -> Reader<'a> {
        Reader { depth, ..self }
    }

    /// Position of the next byte in the whole text.
    pub fn position(&self) -> usize {
        self.offset
    }

    /// Position of the last name that [`Reader::object`] read, with its quotes.
    pub fn name_position(&self) -> Range<usize> {
        self.name.clone()
    }

    /// The kind of the next value, which is not consumed.
    pub fn kind(&mut self) -> Result<Kind, Malformed> {
        match self.peek(JsonProblem::Value)? {
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
        self.expect(b'{', JsonProblem::NotAnObject)?;
        if self.peek(JsonProblem::Name)? == b'}' {
            self.skip(1);
            return Ok(());
        }
        loop {
            self.peek(JsonProblem::Name)?;
            let start = self.offset;
            let name = self.string(JsonProblem::Name)?;
            self.name = start..self.offset;
            self.expect(b':', JsonProblem::Colon)?;
            self.peek(JsonProblem::Value)?;
            field(self, name)?;
            match self.peek(JsonProblem::CommaOr(b'}'))? {
                b',' => self.skip(1),
                b'}' => break,
                _ => return Err(self.malformed(JsonProblem::CommaOr(b'}')).into()),
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
        self.expect(b'[', JsonProblem::NotAList)?;
        if self.peek(JsonProblem::Value)? == b']' {
            self.skip(1);
            return Ok(());
        }
        for index in 0.. {
            self.peek(JsonProblem::Value)?;
            element(self, index)?;
            match self.peek(JsonProblem::CommaOr(b']'))? {
                b',' => self.skip(1),
                b']' => break,
                _ => return Err(self.malformed(JsonProblem::CommaOr(b']')).into()),
            }
        }
        self.skip(1);
        Ok(())
    }

    /// Reads a value that is neither an object nor a list.
    pub fn scalar(&mut self) -> Result<Scalar<'a>, Malformed> {
        match self.peek(JsonProblem::Value)? {
            b'"' => self.string(JsonProblem::Value).map(Scalar::Text),
            b't' => self.word("true", Scalar::Bool(true)),
            b'f' => self.word("false", Scalar::Bool(false)),
            b'n' => self.word("null", Scalar::Null),
            b'-' | b'0'..=b'9' => {
                let len = number(self.rest).map_err(|problem| self.malformed(problem))?;
                Ok(Scalar::Number(text(self.take(len))))
            }
            _ => Err(self.malformed(JsonProblem::Value)),
        }
    }

    /// Checks that the next value is well-formed, and returns a reader for it alone.
    pub fn value(&mut self) -> Result<Reader<'a>, Malformed> {
        self.peek(JsonProblem::Value)?;
        let (offset, depth) = (self.offset, self.depth);
        let len = extent(self.rest, depth).map_err(|malformed| malformed.after(offset))?;
        Ok(Reader { rest: self.take(len), offset, name: 0..0, depth })
    }

    /// Checks that only whitespace follows.
    pub fn end(mut self) -> Result<(), Malformed> {
        self.skip_whitespace();
        if self.rest.is_empty() { Ok(()) } else { Err(self.malformed(JsonProblem::AfterEnd)) }
    }

    fn string(&mut self, otherwise: JsonProblem) -> Result<&'a str, Malformed> {
        if self.rest.first() != Some(&b'"') {
            return Err(self.malformed(otherwise));
        }
        let (len, escaped) = string(self.rest).map_err(|malformed| malformed.after(self.offset))?;
        let inner = &mut self.take(len)[1..len - 1];
        let inner = if escaped { unescape(inner) } else { inner };
        Ok(text(inner))
    }

    fn word(&mut self, word: &'static str, value: Scalar<'a>) -> Result<Scalar<'a>, Malformed> {
        if !self.rest.starts_with(word.as_bytes()) {
            return Err(self.malformed(JsonProblem::Word));
        }
        self.skip(word.len());
        Ok(value)
    }

    fn expect(&mut self, byte: u8, otherwise: JsonProblem) -> Result<(), Malformed> {
        if self.peek(otherwise)? != byte {
            return Err(self.malformed(otherwise));
        }
        self.skip(1);
        Ok(())
    }

    /// Skips whitespace, and returns the next byte without consuming it. `wanted` is what should follow.
    fn peek(&mut self, wanted: JsonProblem) -> Result<u8, Malformed> {
        self.skip_whitespace();
        let ends = || Malformed { at: self.offset, problem: wanted, at_end: true };
        self.rest.first().copied().ok_or_else(ends)
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

    fn malformed(&self, problem: JsonProblem) -> Malformed {
        Malformed { at: self.offset, problem, at_end: false }
    }
}

impl Malformed {
    fn new(at: usize, problem: JsonProblem) -> Malformed {
        Malformed { at, problem, at_end: false }
    }

    /// The same, in a text that begins so many bytes earlier.
    fn after(self, offset: usize) -> Malformed {
        Malformed { at: self.at + offset, ..self }
    }
}

/// The text of a slice that was cut at ASCII characters of valid UTF-8.
fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8, cut at quotes or digits")
}

/// The length of the string that `text` begins with, including its quotes, and whether it has escapes.
fn string(text: &[u8]) -> Result<(usize, bool), Malformed> {
    let mut escaped = false;
    let mut at = 1;
    loop {
        match text.get(at) {
            Some(b'"') => return Ok((at + 1, escaped)),
            Some(b'\\') => {
                escaped = true;
                at += match text.get(at + 1) {
                    Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => 2,
                    Some(b'u') => unicode(&text[at..]).map_err(|problem| Malformed::new(at, problem))?.1,
                    _ => return Err(Malformed::new(at, JsonProblem::Escape)),
                };
            }
            Some(0..=0x1f) => return Err(Malformed::new(at, JsonProblem::Control)),
            Some(_) => at += 1,
            None => return Err(Malformed::new(at, JsonProblem::Unterminated)),
        }
    }
}

/// The character of `\uXXXX`, or of a surrogate pair of two, and the length of the escape: 6 or 12.
fn unicode(text: &[u8]) -> Result<(char, usize), JsonProblem> {
    let unit = |at: usize| -> Option<u32> {
        let digits = text.get(at..at + 6)?.strip_prefix(b"\\u")?;
        digits.iter().try_fold(0, |sum, digit| Some(sum * 16 + char::from(*digit).to_digit(16)?))
    };
    let first = unit(0).ok_or(JsonProblem::HexDigits)?;
    if let Some(char) = char::from_u32(first) {
        return Ok((char, 6));
    }
    let second = unit(6).filter(|second| (0xdc00..0xe000).contains(second) && first < 0xdc00);
    let second = second.ok_or(JsonProblem::Surrogate)?;
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
fn number(text: &[u8]) -> Result<usize, JsonProblem> {
    let digits = |from: usize| text[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let sign = usize::from(text.first() == Some(&b'-'));
    let whole = digits(sign);
    if whole == 0 || (whole > 1 && text[sign] == b'0') {
        return Err(JsonProblem::Digits);
    }
    let mut len = sign + whole;
    if text.get(len) == Some(&b'.') {
        let fraction = digits(len + 1);
        if fraction == 0 {
            return Err(JsonProblem::Fraction);
        }
        len += 1 + fraction;
    }
    if matches!(text.get(len), Some(b'e' | b'E')) {
        let signed = usize::from(matches!(text.get(len + 1), Some(b'+' | b'-')));
        let exponent = digits(len + 1 + signed);
        if exponent == 0 {
            return Err(JsonProblem::Exponent);
        }
        len += 1 + signed + exponent;
    }
    Ok(len)
}

/// The length of the value that `text` begins with, if it is well-formed. A loop instead of recursion, because the client
/// decides how deep the value is nested.
fn extent(text: &[u8], depth: usize) -> Result<usize, Malformed> {
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
        let ends = Malformed { at, problem: JsonProblem::Value, at_end: true };
        let byte = *text.get(at).ok_or(ends)?;
        let closes = |open: &[u8]| open.last() == Some(&byte);
        match (next, byte) {
            (_, b' ' | b'\t' | b'\n' | b'\r') => at += 1,
            (Next::ValueOrEnd | Next::NameOrEnd | Next::CommaOrEnd, b']' | b'}') if closes(&open) => {
                open.pop();
                (at, next) = (at + 1, Next::CommaOrEnd);
            }
            (Next::Value | Next::ValueOrEnd, b'{' | b'[') => {
                if open.len() == depth {
                    return Err(Malformed::new(at, JsonProblem::TooDeep));
                }
                (at, next) = (at + 1, if byte == b'{' { Next::NameOrEnd } else { Next::ValueOrEnd });
                open.push(if byte == b'{' { b'}' } else { b']' });
            }
            (Next::Value | Next::ValueOrEnd, b'"') => {
                at += string(&text[at..]).map_err(|malformed| malformed.after(at))?.0;
                next = Next::CommaOrEnd;
            }
            (Next::Value | Next::ValueOrEnd, b'-' | b'0'..=b'9') => {
                at += number(&text[at..]).map_err(|problem| Malformed::new(at, problem))?;
                next = Next::CommaOrEnd;
            }
            (Next::Value | Next::ValueOrEnd, _) => {
                let word =
                    ["true", "false", "null"].iter().find(|word| text[at..].starts_with(word.as_bytes()));
                at += word.ok_or(Malformed::new(at, JsonProblem::Value))?.len();
                next = Next::CommaOrEnd;
            }
            (Next::Name | Next::NameOrEnd, b'"') => {
                at += string(&text[at..]).map_err(|malformed| malformed.after(at))?.0;
                next = Next::Colon;
            }
            (Next::Colon, b':') => (at, next) = (at + 1, Next::Value),
            (Next::CommaOrEnd, b',') => {
                let object = open.last() == Some(&b'}');
                (at, next) = (at + 1, if object { Next::Name } else { Next::Value });
            }
            (Next::Name | Next::NameOrEnd, _) => {
                return Err(Malformed::new(at, JsonProblem::Name));
            }
            (Next::Colon, _) => return Err(Malformed::new(at, JsonProblem::Colon)),
            (Next::CommaOrEnd, _) => return Err(Malformed::new(at, JsonProblem::CommaOrEnd)),
        }
        if open.is_empty() && next == Next::CommaOrEnd {
            return Ok(at);
        }
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
        assert_eq!(
            Reader::new(&mut bytes).unwrap_err(),
            Malformed { at: 2, problem: JsonProblem::Utf8, at_end: false }
        );
    }

    /// Reads a value with `object`, `list` and `scalar`, and writes it again.
    fn copy(reader: &mut Reader<'_>, out: &mut String) -> Result<(), Malformed> {
        match reader.kind()? {
            Kind::Object => {
                out.push('{');
                reader.object(|reader, name| {
                    out.push_str(&format!("{name:?}"));
                    out.push(':');
                    copy(reader, out)?;
                    out.push(',');
                    Ok::<(), Malformed>(())
                })?;
                out.push('}');
            }
            Kind::List => {
                out.push('[');
                reader.list(|reader, _| {
                    copy(reader, out)?;
                    out.push(',');
                    Ok::<(), Malformed>(())
                })?;
                out.push(']');
            }
            Kind::Scalar => match reader.scalar()? {
                Scalar::Text(text) => out.push_str(&format!("{text:?}")),
                Scalar::Number(number) => out.push_str(number),
                Scalar::Bool(truth) => out.push_str(&truth.to_string()),
                Scalar::Null => out.push_str("null"),
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
        let mut out = String::new();
        copy(&mut reader, &mut out).unwrap();
        reader.end().unwrap();
        assert_eq!(out, expected);

        let mut bytes = text.as_bytes().to_vec();
        let mut reader = Reader::new(&mut bytes).unwrap();
        let mut value = reader.value().unwrap();
        reader.end().unwrap();
        let mut out = String::new();
        copy(&mut value, &mut out).unwrap();
        assert_eq!(out, expected);
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
                copy(&mut reader, &mut String::new()).expect_err(text);
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
}
