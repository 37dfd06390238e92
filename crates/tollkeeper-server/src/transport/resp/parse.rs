//! Parses commands: arrays of bulk strings, or inline words on a line.
//!
//! Arguments are ranges of the read buffer and are not copied. An incomplete command is resumed where the parser stopped.
//! A length that a client announces is checked against a limit, and never allocated in advance.

use std::fmt;
use std::ops::Range;

use super::inline;

/// The most arguments of a command. A check with the most facts has 131.
pub const MAX_ARGUMENTS: usize = 1_024;
/// The longest argument in bytes.
pub const MAX_ARGUMENT: usize = 64 << 10;
/// The longest command in bytes. A check with 64 facts of the longest size has 70 KiB.
pub const MAX_COMMAND: usize = 256 << 10;

/// Parses one command after the other.
#[derive(Debug, Default)]
pub struct Parser {
    /// The ranges of the arguments, relative to the start of the command.
    arguments: Vec<Range<usize>>,
    /// Bytes of the command that are parsed.
    at: usize,
    /// Arguments that are still missing, once the header of the array is parsed.
    left: usize,
    /// Bytes of an inline command that were searched for the line end.
    searched: usize,
}

impl Parser {
    /// Parses the command that the bytes begin with, and returns its length; `None` if it is incomplete. Then the next
    /// call must pass the same bytes and more.
    #[inline]
    pub fn next(&mut self, bytes: &mut [u8]) -> Result<Option<usize>, ProtocolError> {
        if self.at == 0 {
            self.arguments.clear();
            match bytes.first() {
                None => return Ok(None),
                Some(b'*') => match number(&bytes[1..]) {
                    Number::Unfinished => return Ok(None),
                    Number::Wrong => return Err(ProtocolError::Count),
                    Number::Is(count, _) if count > MAX_ARGUMENTS as i64 => return Err(ProtocolError::Count),
                    Number::Is(count, len) => {
                        // Zero or less is an empty command, which gets no reply, as in Redis.
                        (self.at, self.left) = (1 + len, usize::try_from(count).unwrap_or(0));
                    }
                },
                Some(_) => return inline::split(bytes, &mut self.searched, &mut self.arguments),
            }
        }
        while self.left > 0 {
            let Some(rest @ [kind, ..]) = bytes.get(self.at..) else { return Ok(None) };
            if *kind != b'$' {
                return Err(ProtocolError::NoBulk(*kind));
            }
            let (length, digits) = match number(&rest[1..]) {
                Number::Unfinished => return Ok(None),
                Number::Wrong => return Err(ProtocolError::Length),
                Number::Is(length, digits) => (usize::try_from(length), digits),
            };
            let length = length.ok().filter(|length| *length <= MAX_ARGUMENT).ok_or(ProtocolError::Length)?;
            let begin = self.at + 1 + digits;
            let end = begin + length;
            if end > MAX_COMMAND {
                return Err(ProtocolError::TooLarge);
            }
            match bytes.get(end..) {
                Some([b'\r', b'\n', ..]) => {}
                None | Some([] | [b'\r']) => return Ok(None),
                Some(_) => return Err(ProtocolError::Unended),
            }
            self.arguments.push(begin..end);
            (self.at, self.left) = (end + 2, self.left - 1);
        }
        Ok(Some(std::mem::take(&mut self.at)))
    }

    /// The arguments of the last parsed command. `bytes` must be those that it was parsed from.
    #[inline]
    pub fn arguments<'b>(&'b self, bytes: &'b [u8]) -> Arguments<'b> {
        Arguments { bytes, ranges: &self.arguments }
    }
}

/// The arguments of a command, its name first.
#[derive(Clone, Copy)]
pub struct Arguments<'b> {
    bytes: &'b [u8],
    ranges: &'b [Range<usize>],
}

impl<'b> Arguments<'b> {
    /// Their number, including the name.
    pub fn len(self) -> usize {
        self.ranges.len()
    }

    /// Whether the command is empty.
    pub fn is_empty(self) -> bool {
        self.ranges.is_empty()
    }

    /// The argument at this index.
    #[inline]
    pub fn get(self, index: usize) -> Option<&'b [u8]> {
        self.ranges.get(index).map(|range| &self.bytes[range.clone()])
    }

    /// All arguments from this index on.
    pub fn from(self, index: usize) -> impl ExactSizeIterator<Item = &'b [u8]> {
        let ranges = self.ranges.get(index..).unwrap_or_default();
        ranges.iter().map(|range| &self.bytes[range.clone()])
    }
}

impl fmt::Debug for Arguments<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.from(0).map(String::from_utf8_lossy)).finish()
    }
}

/// The number on a header line, after its first byte.
enum Number {
    /// The line is incomplete.
    Unfinished,
    /// Not a number, or one with too many digits.
    Wrong,
    /// The number, and its length in bytes with the line end.
    Is(i64, usize),
}

#[inline]
fn number(bytes: &[u8]) -> Number {
    let negative = bytes.first() == Some(&b'-');
    let digits = &bytes[usize::from(negative)..];
    let mut value = 0;
    // A number with more digits exceeds every limit.
    for (index, byte) in digits.iter().enumerate().take(10) {
        match byte {
            b'0'..=b'9' => value = 10 * value + i64::from(byte - b'0'),
            b'\r' if index > 0 => {
                let len = usize::from(negative) + index + 2;
                return match digits.get(index + 1) {
                    None => Number::Unfinished,
                    Some(b'\n') => Number::Is(if negative { -value } else { value }, len),
                    Some(_) => Number::Wrong,
                };
            }
            _ => return Number::Wrong,
        }
    }
    if digits.len() < 10 { Number::Unfinished } else { Number::Wrong }
}

/// Why input is not a command. The parser cannot resynchronize, so the connection must be closed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ProtocolError {
    /// The number of arguments is not a number, or too large.
    Count,
    /// The length of an argument is not a number, or too large.
    Length,
    /// An argument is not a bulk string.
    NoBulk(u8),
    /// An argument is longer than announced.
    Unended,
    /// The command is too long.
    TooLarge,
    /// An inline command is too long.
    LongLine,
    /// A quote is not closed, or something follows it directly.
    Quotes,
    /// A line is an HTTP request line or header.
    Http,
}

/// The messages of Redis, where it has one.
impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Protocol error: ")?;
        match self {
            ProtocolError::Count => f.write_str("invalid multibulk length"),
            ProtocolError::Length => f.write_str("invalid bulk length"),
            ProtocolError::NoBulk(kind) => write!(f, "expected '$', got '{}'", kind.escape_ascii()),
            ProtocolError::Unended => f.write_str("expected CRLF after a bulk string"),
            ProtocolError::TooLarge => write!(f, "too big command (at most {MAX_COMMAND} bytes)"),
            ProtocolError::LongLine => f.write_str("too big inline request"),
            ProtocolError::Quotes => f.write_str("unbalanced quotes in request"),
            ProtocolError::Http => f.write_str("this port speaks RESP, the protocol of Redis, not HTTP"),
        }
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for ProtocolError {}

#[cfg(test)]
mod tests {
    use super::*;

    /// All commands of these bytes, which arrive in pieces of this size, and the error that ended parsing.
    fn commands(bytes: &[u8], piece: usize) -> (Vec<Vec<String>>, Option<ProtocolError>) {
        let (mut parser, mut buffer, mut found) = (Parser::default(), Vec::new(), Vec::new());
        for piece in bytes.chunks(piece) {
            buffer.extend_from_slice(piece);
            loop {
                match parser.next(&mut buffer) {
                    Ok(None) => break,
                    Ok(Some(len)) => {
                        let arguments = parser.arguments(&buffer).from(0);
                        found
                            .push(arguments.map(|word| String::from_utf8_lossy(word).into_owned()).collect());
                        buffer.drain(..len);
                    }
                    Err(error) => return (found, Some(error)),
                }
            }
        }
        (found, None)
    }

    #[test]
    fn commands_are_parsed_in_pieces_of_any_size() {
        for (bytes, expected) in [
            ("", &[][..]),
            ("*1\r\n$4\r\nPING\r\n", &[&["PING"][..]]),
            ("*2\r\n$4\r\nECHO\r\n$0\r\n\r\n*1\r\n$4\r\nPING\r\n", &[&["ECHO", ""], &["PING"]]),
            ("*2\r\n$4\r\nECHO\r\n$6\r\na\r\nb\r\n\r\n", &[&["ECHO", "a\r\nb\r\n"]]),
            ("*2\r\n$4\r\nECHO\r\n$02\r\nab\r\n", &[&["ECHO", "ab"]]),
            ("*0\r\n*-1\r\n\r\n\n*1\r\n$4\r\nPING\r\n", &[&[], &[], &[], &[], &["PING"]]),
            ("PING\r\nPING\n", &[&["PING"], &["PING"]]),
            ("  ECHO\t a  \r\n", &[&["ECHO", "a"]]),
            ("ECHO \"a b\" 'c d' e\"f\r\n", &[&["ECHO", "a b", "c d", "e\"f"]]),
            ("ECHO \"\\x41\\n\\\"\\\\\\q\" 'it\\'s' \"\"\r\n", &[&["ECHO", "A\n\"\\q", "it's", ""]]),
            ("ECHO a\r\n*1\r\n$4\r\nPING\r\n", &[&["ECHO", "a"], &["PING"]]),
            // Incomplete commands.
            ("*1\r\n$4\r\nPING\r", &[]),
            ("*2\r\n$4\r\nECHO\r\n$4\r\nabc", &[]),
            ("*1\r", &[]),
            ("PING", &[]),
        ] {
            for piece in [1, 2, 3, 7, 1_000] {
                let (found, error) = commands(bytes.as_bytes(), piece);
                assert_eq!(error, None, "{bytes:?} in pieces of {piece}");
                assert_eq!(found, expected, "{bytes:?} in pieces of {piece}");
            }
        }
    }

    #[test]
    fn invalid_command_is_refused_as_early_as_possible() {
        let many = format!("*{}\r\n", MAX_ARGUMENTS + 1);
        let long = format!("*2\r\n$4\r\nECHO\r\n${}\r\n", MAX_ARGUMENT + 1);
        let whole = "x".repeat(MAX_ARGUMENT);
        let large = format!("*5\r\n{}$9\r\n", format!("${MAX_ARGUMENT}\r\n{whole}\r\n").repeat(4));
        for (bytes, expected) in [
            ("*x\r\n", "invalid multibulk length"),
            ("*\r\n", "invalid multibulk length"),
            ("*1\n", "invalid multibulk length"),
            ("*1\r1", "invalid multibulk length"),
            ("*9999999999", "invalid multibulk length"),
            ("*+1\r\n", "invalid multibulk length"),
            (&many, "invalid multibulk length"),
            ("*1\r\n:", "expected '$', got ':'"),
            ("*1\r\n\r", "expected '$', got '\\r'"),
            ("*1\r\n$-1\r\n", "invalid bulk length"),
            ("*1\r\n$a", "invalid bulk length"),
            ("*1\r\n$536870912\r\n", "invalid bulk length"),
            (&long, "invalid bulk length"),
            ("*1\r\n$1\r\nab", "expected CRLF after a bulk string"),
            (&large, "too big command (at most 262144 bytes)"),
            (&whole, "too big inline request"),
            ("ECHO \"a\r\n", "unbalanced quotes in request"),
            ("ECHO 'a\r\n", "unbalanced quotes in request"),
            ("ECHO \"a\"b\r\n", "unbalanced quotes in request"),
            ("ECHO 'a'b\r\n", "unbalanced quotes in request"),
            (
                "POST / HTTP/1.1\r\nhost: x\r\n\r\nPING\r\n",
                "this port speaks RESP, the protocol of Redis, not HTTP",
            ),
            ("GET / HTTP/1.1\r\n", "this port speaks RESP, the protocol of Redis, not HTTP"),
            ("PRI * HTTP/2.0\r\n", "this port speaks RESP, the protocol of Redis, not HTTP"),
            ("options * x\r\n", "this port speaks RESP, the protocol of Redis, not HTTP"),
            ("Host: x\r\n", "this port speaks RESP, the protocol of Redis, not HTTP"),
        ] {
            for piece in [1, 5, 100_000] {
                let (found, error) = commands(bytes.as_bytes(), piece);
                assert!(found.is_empty());
                let message = error.map(|error| error.to_string());
                assert_eq!(message, Some(format!("Protocol error: {expected}")), "{:.40?}", bytes);
            }
        }
    }

    #[test]
    fn announced_lengths_allocate_nothing() {
        let mut parser = Parser::default();
        let mut bytes = format!("*{MAX_ARGUMENTS}\r\n${MAX_ARGUMENT}\r\n").into_bytes();
        assert_eq!(parser.next(&mut bytes), Ok(None));
        assert_eq!(parser.arguments.capacity(), 0);
    }
}
