//! Parses JSON (RFC 8259, without extensions) into a document.

use super::document::{Budget, Entry, MAX_DEPTH, Node, ScalarKind, TooLarge, Value};
use super::excerpt::quoted;
use super::report::{Position, Problems};

/// Parses a text; reports a syntax error and returns `None`.
pub(super) fn read(text: &str, problems: &mut Problems) -> Option<Node> {
    let mut parser = Parser { text, at: 0, depth: 0, budget: Budget::default() };
    let parsed = parser.document();
    match parsed {
        Ok(node) => Some(node),
        Err(Stop::Syntax { position, message, help }) => {
            problems.error(position, message, help);
            None
        }
        Err(Stop::TooLarge(position, large)) => {
            large.report(position, problems);
            None
        }
    }
}

struct Parser<'t> {
    text: &'t str,
    at: usize,
    depth: usize,
    budget: Budget,
}

enum Stop {
    Syntax { position: Position, message: String, help: &'static str },
    TooLarge(Position, TooLarge),
}

type Parsed<T> = Result<T, Stop>;

impl Parser<'_> {
    fn document(&mut self) -> Parsed<Node> {
        self.skip_whitespace();
        let node = self.value()?;
        self.skip_whitespace();
        match self.peek() {
            None => Ok(node),
            Some(_) => Err(self.unexpected("the end of the file", "a config is one object")),
        }
    }

    fn value(&mut self) -> Parsed<Node> {
        let start = self.at;
        match self.peek() {
            Some('{') => self.nested(Parser::table),
            Some('[') => self.nested(Parser::list),
            Some('"') => {
                let text = self.string()?;
                self.node(start, text, ScalarKind::Text)
            }
            Some('-' | '0'..='9') => {
                self.number()?;
                self.node(start, self.text[start..self.at].to_owned(), ScalarKind::Number)
            }
            _ => {
                for (word, kind) in
                    [("true", ScalarKind::Bool), ("false", ScalarKind::Bool), ("null", ScalarKind::Null)]
                {
                    let follows = self.text[self.at..].strip_prefix(word);
                    if follows.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric())) {
                        self.at += word.len();
                        return self.node(start, word.to_owned(), kind);
                    }
                }
                Err(self.unexpected("a value", "strings need double quotes"))
            }
        }
    }

    fn node(&mut self, start: usize, text: String, kind: ScalarKind) -> Parsed<Node> {
        let position = Position::new(start, self.at);
        self.budget.take(text.len()).map_err(|large| Stop::TooLarge(position, large))?;
        Ok(Node::scalar(position, text, kind))
    }

    /// Parses a list or a table that begins here.
    fn nested(&mut self, read: fn(&mut Self) -> Parsed<Value>) -> Parsed<Node> {
        let start = self.at;
        let position = Position::new(start, start + 1);
        self.budget.take(0).map_err(|large| Stop::TooLarge(position, large))?;
        if self.depth == MAX_DEPTH {
            return Err(Stop::TooLarge(position, TooLarge::DEPTH));
        }
        self.at += 1;
        self.depth += 1;
        let value = read(self)?;
        self.depth -= 1;
        Ok(Node { position: Position::new(start, self.at), value })
    }

    fn list(&mut self) -> Parsed<Value> {
        let mut nodes = Vec::new();
        self.skip_whitespace();
        if self.take(']') {
            return Ok(Value::List(nodes));
        }
        loop {
            nodes.push(self.value()?);
            self.skip_whitespace();
            if self.take(']') {
                return Ok(Value::List(nodes));
            }
            self.comma(']')?;
        }
    }

    fn table(&mut self) -> Parsed<Value> {
        let mut entries = Vec::new();
        self.skip_whitespace();
        if self.take('}') {
            return Ok(Value::Table(entries));
        }
        loop {
            let start = self.at;
            if self.peek() != Some('"') {
                return Err(self.unexpected("a key in double quotes", ""));
            }
            let key = self.string()?;
            let position = Position::new(start, self.at);
            self.budget.take(key.len()).map_err(|large| Stop::TooLarge(position, large))?;
            self.skip_whitespace();
            if !self.take(':') {
                return Err(self.unexpected("`:`", ""));
            }
            self.skip_whitespace();
            let node = self.value()?;
            entries.push(Entry { key, position, node });
            self.skip_whitespace();
            if self.take('}') {
                return Ok(Value::Table(entries));
            }
            self.comma('}')?;
        }
    }

    /// Parses a comma between two elements; a trailing comma is an error.
    fn comma(&mut self, end: char) -> Parsed<()> {
        let start = self.at;
        if !self.take(',') {
            return Err(self.unexpected(&format!("`,` or `{end}`"), ""));
        }
        self.skip_whitespace();
        if self.peek() == Some(end) {
            let message = format!("a trailing comma before `{end}`");
            return Err(Stop::Syntax {
                position: Position::new(start, start + 1),
                message,
                help: "JSON does not allow it: remove it",
            });
        }
        Ok(())
    }

    fn string(&mut self) -> Parsed<String> {
        let start = self.at;
        self.at += 1;
        let mut text = String::new();
        loop {
            let from = self.at;
            let Some(char) = self.next() else {
                let line_end =
                    self.text[start..].find('\n').map_or(self.text.len(), |newline| start + newline);
                return Err(Stop::Syntax {
                    position: Position::new(start, line_end),
                    message: "this string is not closed".to_owned(),
                    help: "close it with `\"`",
                });
            };
            match char {
                '"' => return Ok(text),
                '\\' => text.push(self.escape(from)?),
                '\0'..='\x1f' => {
                    let (message, help) = match char {
                        '\n' | '\r' => (
                            "this string is not closed on its line",
                            "close it with `\"`, or write a line break as `\\n`",
                        ),
                        _ => ("a control character in a string", "write it as `\\u00XX`"),
                    };
                    let position = if matches!(char, '\n' | '\r') {
                        Position::new(start, from)
                    } else {
                        Position::new(from, self.at)
                    };
                    return Err(Stop::Syntax { position, message: message.to_owned(), help });
                }
                _ => text.push(char),
            }
        }
    }

    /// Parses the rest of an escape sequence after the backslash.
    fn escape(&mut self, start: usize) -> Parsed<char> {
        let char = match self.next() {
            Some('"') => '"',
            Some('\\') => '\\',
            Some('/') => '/',
            Some('b') => '\x08',
            Some('f') => '\x0c',
            Some('n') => '\n',
            Some('r') => '\r',
            Some('t') => '\t',
            Some('u') => match self.unicode() {
                Some(char) => char,
                None => return Err(self.bad_escape(start)),
            },
            _ => return Err(self.bad_escape(start)),
        };
        Ok(char)
    }

    fn bad_escape(&self, start: usize) -> Stop {
        let position = Position::new(start, self.at);
        let message = format!("{} is not an escape sequence", quoted(&self.text[start..self.at]));
        Stop::Syntax {
            position,
            message,
            help: "JSON allows `\\\" \\\\ \\/ \\b \\f \\n \\r \\t` and `\\uXXXX`",
        }
    }

    /// Parses the four digits after `\u`, and the second half of a surrogate pair.
    fn unicode(&mut self) -> Option<char> {
        let high = self.four_digits()?;
        if !(0xd800..0xdc00).contains(&high) {
            return char::from_u32(high);
        }
        if !(self.take('\\') && self.take('u')) {
            return None;
        }
        let low = self.four_digits().filter(|low| (0xdc00..0xe000).contains(low))?;
        char::from_u32(0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00))
    }

    fn four_digits(&mut self) -> Option<u32> {
        let mut number = 0;
        for _ in 0..4 {
            number = number * 16 + self.peek()?.to_digit(16)?;
            self.at += 1;
        }
        Some(number)
    }

    fn number(&mut self) -> Parsed<()> {
        let start = self.at;
        self.take('-');
        let zero = self.peek() == Some('0');
        let whole = self.digits();
        let mut valid = whole > 0 && !(zero && whole > 1);
        if self.take('.') {
            valid &= self.digits() > 0;
        }
        if self.take('e') || self.take('E') {
            if !self.take('+') {
                self.take('-');
            }
            valid &= self.digits() > 0;
        }
        let rest = self.text[self.at..]
            .find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '/' | '%' | '.' | '_')));
        let end = rest.map_or(self.text.len(), |rest| self.at + rest);
        if valid && end == self.at {
            return Ok(());
        }
        let message = format!("{} is not a number", quoted(&self.text[start..end]));
        Err(Stop::Syntax { position: Position::new(start, end), message, help: "strings need double quotes" })
    }

    fn digits(&mut self) -> usize {
        let rest = &self.text[self.at..];
        let count = rest.bytes().take_while(u8::is_ascii_digit).count();
        self.at += count;
        count
    }

    fn unexpected(&self, wanted: &str, help: &'static str) -> Stop {
        let Some(char) = self.peek() else {
            // Report the last character before trailing whitespace.
            let end = self.text.trim_end().len();
            let start = self.text[..end].char_indices().next_back().map_or(0, |(start, _)| start);
            let message = format!("the file ends where {wanted} should follow");
            return Stop::Syntax {
                position: Position::new(start, end),
                message,
                help: "a bracket, brace or quote may be open",
            };
        };
        let rest = &self.text[self.at..];
        let word =
            rest.find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '_' | '-'))).unwrap_or(rest.len());
        let length = word.max(char.len_utf8());
        let message = format!("expected {wanted}, found {}", quoted(&rest[..length]));
        let comment = rest.starts_with("//") || rest.starts_with('#');
        let help = if comment { "JSON has no comments: YAML and TOML do" } else { help };
        Stop::Syntax { position: Position::new(self.at, self.at + length), message, help }
    }

    fn skip_whitespace(&mut self) {
        let rest = &self.text.as_bytes()[self.at..];
        self.at += rest.iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')).count();
    }

    fn take(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        self.at += if found { wanted.len_utf8() } else { 0 };
        found
    }

    fn next(&mut self) -> Option<char> {
        let char = self.peek()?;
        self.at += char.len_utf8();
        Some(char)
    }

    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }
}
