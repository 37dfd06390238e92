//! Reads JSON into a document, and says in the words of a config file what is wrong with one.

use super::document::{Budget, MAX_DEPTH, MapEntry, Node, ScalarKind, TooLarge, Value};
use super::excerpt::quoted;
use super::report::{Position, Problems};
use crate::json::{JsonProblem, Kind, Malformed, Reader, Scalar};

/// Parses a text; reports a syntax error and returns `None`.
pub(super) fn read(text: &str, problems: &mut Problems) -> Option<Node> {
    // The reader unescapes in place.
    let mut copy = text.as_bytes().to_vec();
    let mut reader = Reader::new(&mut copy).expect("a `str` is UTF-8");
    let node = Parser { text, depth: 0, budget: Budget::default() }.value(&mut reader);
    // Where the token begins that could not be read.
    let token = reader.position();
    match node.and_then(|node| Ok(reader.end().map(|()| node)?)) {
        Ok(node) => Some(node),
        Err(Stop::Malformed(malformed)) => {
            let (position, message, help) = Source(text).explain(malformed, token);
            problems.error(position, message, help);
            None
        }
        Err(Stop::TooLarge(position, large)) => {
            large.report(position, problems);
            None
        }
    }
}

/// Why a text is not a document.
enum Stop {
    Malformed(Malformed),
    TooLarge(Position, TooLarge),
}

impl From<Malformed> for Stop {
    fn from(malformed: Malformed) -> Stop {
        Stop::Malformed(malformed)
    }
}

type Parsed<T> = Result<T, Stop>;

struct Parser<'t> {
    text: &'t str,
    depth: usize,
    budget: Budget,
}

impl Parser<'_> {
    fn value(&mut self, reader: &mut Reader<'_>) -> Parsed<Node> {
        let kind = reader.kind()?;
        let start = reader.position();
        if kind == Kind::Scalar {
            return self.scalar(reader, start);
        }
        let opening = Position::new(start, start + 1);
        self.budget.take(0).map_err(|large| Stop::TooLarge(opening, large))?;
        if self.depth == MAX_DEPTH {
            return Err(Stop::TooLarge(opening, TooLarge::DEPTH));
        }
        self.depth += 1;
        let value = if kind == Kind::Object { self.table(reader)? } else { self.list(reader)? };
        self.depth -= 1;
        Ok(Node { position: Position::new(start, reader.position()), value })
    }

    fn scalar(&mut self, reader: &mut Reader<'_>, start: usize) -> Parsed<Node> {
        let (text, kind) = match reader.scalar()? {
            Scalar::Text(text) => (text, ScalarKind::Text),
            Scalar::Number(number) => (number, ScalarKind::Number),
            Scalar::Bool(true) => ("true", ScalarKind::Bool),
            Scalar::Bool(false) => ("false", ScalarKind::Bool),
            Scalar::Null => ("null", ScalarKind::Null),
        };
        let position = Position::new(start, reader.position());
        // What goes on after a number or a word, such as `5/min` or `true_`, is a string without quotes.
        let rest = &self.text[reader.position()..];
        let goes_on = match kind {
            ScalarKind::Number => rest.starts_with(in_a_number),
            ScalarKind::Bool | ScalarKind::Null => rest.starts_with(|c: char| c.is_ascii_alphanumeric()),
            ScalarKind::Text => false,
        };
        if goes_on {
            let problem = if kind == ScalarKind::Number { JsonProblem::Digits } else { JsonProblem::Value };
            return Err(Malformed { at: start, problem, at_end: false }.into());
        }
        self.budget.take(text.len()).map_err(|large| Stop::TooLarge(position, large))?;
        Ok(Node::scalar(position, text, kind))
    }

    fn list(&mut self, reader: &mut Reader<'_>) -> Parsed<Value> {
        let mut nodes = Vec::new();
        reader.list(|reader, _| {
            nodes.push(self.value(reader)?);
            Ok::<(), Stop>(())
        })?;
        Ok(Value::List(nodes))
    }

    fn table(&mut self, reader: &mut Reader<'_>) -> Parsed<Value> {
        let mut entries = Vec::new();
        reader.object(|reader, key| {
            let name = reader.name_position();
            let position = Position::new(name.start, name.end);
            self.budget.take(key.len()).map_err(|large| Stop::TooLarge(position, large))?;
            entries.push(MapEntry { key: key.to_owned(), position, node: self.value(reader)? });
            Ok::<(), Stop>(())
        })?;
        Ok(Value::Table(entries))
    }
}

/// Whether a character belongs to what its author takes for a number.
fn in_a_number(char: char) -> bool {
    char.is_ascii_alphanumeric() || matches!(char, '/' | '%' | '.' | '_')
}

/// The text as it was written, in which problems are explained.
#[derive(Clone, Copy)]
struct Source<'t>(&'t str);

/// Where a problem is, what it is, and what would be right.
type Explanation = (Position, String, &'static str);

impl Source<'_> {
    fn explain(self, malformed: Malformed, token: usize) -> Explanation {
        let Malformed { at, problem, .. } = malformed;
        match problem {
            JsonProblem::Unterminated => self.open_string(token),
            JsonProblem::Control if self.0[at..].starts_with(['\n', '\r']) => (
                Position::new(token, at),
                "this string is not closed on its line".to_owned(),
                "close it with `\"`, or write a line break as `\\n`",
            ),
            JsonProblem::Control => (
                Position::new(at, at + 1),
                "a control character in a string".to_owned(),
                "write it as `\\u00XX`",
            ),
            JsonProblem::Escape | JsonProblem::HexDigits | JsonProblem::Surrogate => self.escape(at),
            JsonProblem::Digits | JsonProblem::Fraction | JsonProblem::Exponent => self.number(at),
            JsonProblem::Name => self.expected(malformed, "a key in double quotes", ""),
            JsonProblem::Colon => self.expected(malformed, "`:`", ""),
            JsonProblem::CommaOr(end) => {
                self.expected(malformed, &format!("`,` or `{}`", char::from(end)), "")
            }
            JsonProblem::AfterEnd => {
                self.expected(malformed, "the end of the file", "a config is one object")
            }
            _ => self.expected(malformed, "a value", "strings need double quotes"),
        }
    }

    fn open_string(self, start: usize) -> Explanation {
        let line_end = self.0[start..].find('\n').map_or(self.0.len(), |newline| start + newline);
        (Position::new(start, line_end), "this string is not closed".to_owned(), "close it with `\"`")
    }

    fn escape(self, start: usize) -> Explanation {
        let end = self.escape_end(start);
        let message = format!("{} is not an escape sequence", quoted(&self.0[start..end]));
        let help = "JSON allows `\\\" \\\\ \\/ \\b \\f \\n \\r \\t` and `\\uXXXX`";
        (Position::new(start, end), message, help)
    }

    /// Where an invalid escape ends: with the character after the backslash, or where `\uXXXX` is no longer one.
    fn escape_end(self, start: usize) -> usize {
        let bytes = self.0.as_bytes();
        let digits =
            |from: usize| bytes[from..].iter().take(4).take_while(|byte| byte.is_ascii_hexdigit()).count();
        let Some(kind) = self.0[start + 1..].chars().next() else { return start + 1 };
        let first = start + 1 + kind.len_utf8();
        let first_len = if kind == 'u' { digits(first) } else { 0 };
        let end = first + first_len;
        let is_high = first_len == 4
            && matches!(bytes[first..end], [b'd' | b'D', b'8' | b'9' | b'a' | b'A' | b'b' | b'B', ..]);
        match &bytes[end..] {
            [b'\\', b'u', ..] if is_high => end + 2 + digits(end + 2),
            [b'\\', ..] if is_high => end + 1,
            _ => end,
        }
    }

    /// What its author takes for a number: an invalid one, or a string without quotes, such as `5/min`.
    fn number(self, start: usize) -> Explanation {
        let rest = &self.0[start..];
        let rest = rest.strip_prefix('-').unwrap_or(rest);
        let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit());
        let rest = rest.strip_prefix('.').unwrap_or(rest);
        let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit());
        let rest = match rest.strip_prefix(['e', 'E']) {
            Some(exponent) => exponent.strip_prefix(['+', '-']).unwrap_or(exponent),
            None => rest,
        };
        let end = self.0.len() - rest.trim_start_matches(in_a_number).len();
        let message = format!("{} is not a number", quoted(&self.0[start..end]));
        (Position::new(start, end), message, "strings need double quotes")
    }

    /// Something else is there than `wanted`.
    fn expected(self, malformed: Malformed, wanted: &str, help: &'static str) -> Explanation {
        let at = malformed.at;
        let (before, rest) = self.0.split_at(at);
        let Some(char) = rest.chars().next() else {
            // Report the last character before trailing whitespace.
            let end = self.0.trim_end().len();
            let start = self.0[..end].char_indices().next_back().map_or(0, |(start, _)| start);
            let message = format!("the file ends where {wanted} should follow");
            return (Position::new(start, end), message, "a bracket, brace or quote may be open");
        };
        let end = match malformed.problem {
            JsonProblem::Name => '}',
            _ => ']',
        };
        let before = before.trim_end_matches([' ', '\t', '\n', '\r']);
        if char == end
            && before.ends_with(',')
            && matches!(malformed.problem, JsonProblem::Name | JsonProblem::Value)
        {
            let comma = Position::new(before.len() - 1, before.len());
            let message = format!("a trailing comma before `{end}`");
            return (comma, message, "JSON does not allow it: remove it");
        }
        let word =
            rest.find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '_' | '-'))).unwrap_or(rest.len());
        let length = word.max(char.len_utf8());
        let message = format!("expected {wanted}, found {}", quoted(&rest[..length]));
        let comment = rest.starts_with("//") || rest.starts_with('#');
        let help = if comment { "JSON has no comments: YAML and TOML do" } else { help };
        (Position::new(at, at + length), message, help)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mistake_is_explained_where_it_is() {
        for (text, marked, message) in [
            ("", "", "the file ends where a value should follow"),
            (r#"{"a": [1, 2"#, "2", "the file ends where `,` or `]` should follow"),
            (r#"{"a": 1,}"#, ",", "a trailing comma before `}`"),
            ("[1, 2 ,\n]", ",", "a trailing comma before `]`"),
            ("[1, }", "}", "expected a value, found `}`"),
            (r#"{"rate": 5/min}"#, "5/min", "`5/min` is not a number"),
            ("[-01.5e+]", "-01.5e+", "`-01.5e+` is not a number"),
            ("[true_ish]", "_ish", "expected `,` or `]`, found `_ish`"),
            ("[truely]", "truely", "expected a value, found `truely`"),
            ("[nul]", "nul", "expected a value, found `nul`"),
            (r#"{'a': 1}"#, "'", "expected a key in double quotes, found `'`"),
            (r#"{"a" 1}"#, "1", "expected `:`, found `1`"),
            ("{} {}", "{", "expected the end of the file, found `{`"),
            (r#"{"a": "b"#, "\"b", "this string is not closed"),
            ("[\"ab\nc\"]", "\"ab", "this string is not closed on its line"),
            ("[\"a\tb\"]", "\t", "a control character in a string"),
            (r#"["a\xb"]"#, r"\x", r"`\x` is not an escape sequence"),
            (r#"["\u12g4"]"#, r"\u12", r"`\u12` is not an escape sequence"),
            (r#"["\ud83d\u00"]"#, r"\ud83d\u00", r"`\ud83d\u00` is not an escape sequence"),
            (r#"["\udc00"]"#, r"\udc00", r"`\udc00` is not an escape sequence"),
        ] {
            let mut problems = Problems::default();
            assert!(read(text, &mut problems).is_none(), "{text}");
            let report = problems.report("file.json", text);
            let [problem] = report.problems() else { panic!("{text}: {report}") };
            assert_eq!((&text[problem.span.clone()], &*problem.message), (marked, message), "{text}");
        }
    }
}
