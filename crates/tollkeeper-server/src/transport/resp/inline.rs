//! Inline commands, as people type them: words on a line, in quotes if they contain spaces.
//!
//! Escapes are decoded in place, because a decoded word is never longer.

use std::ops::Range;

use super::parse::{MAX_ARGUMENT, MAX_ARGUMENTS, ProtocolError};

/// Splits the first line into words, and returns its length; `None` if it is incomplete. `searched` counts the bytes
/// without a line end, so that a later call does not search them again.
pub(super) fn split(
    bytes: &mut [u8],
    searched: &mut usize,
    words: &mut Vec<Range<usize>>,
) -> Result<Option<usize>, ProtocolError> {
    let new = bytes[..bytes.len().min(MAX_ARGUMENT)].iter().skip(*searched);
    let Some(end) = new.clone().position(|byte| *byte == b'\n').map(|offset| *searched + offset) else {
        *searched += new.len();
        return if *searched < MAX_ARGUMENT { Ok(None) } else { Err(ProtocolError::LongLine) };
    };
    *searched = 0;
    let line = &mut bytes[..end];
    let mut at = 0;
    while let Some(blanks) = line[at..].iter().position(|byte| !byte.is_ascii_whitespace()) {
        if words.len() == MAX_ARGUMENTS {
            return Err(ProtocolError::Count);
        }
        at += blanks;
        at = match line[at] {
            quote @ (b'"' | b'\'') => unquote(line, at, quote, words)?,
            _ => {
                let rest = line[at..].iter();
                let len = rest.take_while(|byte| !byte.is_ascii_whitespace()).count();
                words.push(at..at + len);
                at + len
            }
        };
    }
    let word = |index: usize| words.get(index).map_or(&[][..], |range| &line[range.clone()]);
    let is_request = words.len() == 3 && word(1).starts_with(b"/") && word(2).starts_with(b"HTTP/");
    if is_request || is_http(word(0)) {
        return Err(ProtocolError::Http);
    }
    Ok(Some(end + 1))
}

/// Whether a line that begins with this word comes from an HTTP client.
///
/// Any web page can make a browser POST to this port, and the lines of the body would be commands. Browsers send the
/// request line first, and no array can come before it, so only inline commands are checked: `GET` as an array is just an
/// unknown command. After DNS rebinding a page can even choose a command as the method: `DEL /key HTTP/1.1`. [`split`]
/// recognizes that by its form.
fn is_http(word: &[u8]) -> bool {
    const METHODS: [&str; 10] =
        ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE", "PRI"];
    METHODS.iter().chain(&["Host:"]).any(|start| word.eq_ignore_ascii_case(start.as_bytes()))
}

/// Decodes a quoted word in place, and returns the position after it.
fn unquote(
    line: &mut [u8],
    open: usize,
    quote: u8,
    words: &mut Vec<Range<usize>>,
) -> Result<usize, ProtocolError> {
    let (mut from, mut to) = (open + 1, open);
    loop {
        let rest = &line[from..];
        let (byte, taken) = match (*rest.first().ok_or(ProtocolError::Quotes)?, rest.get(1)) {
            (byte, after) if byte == quote => {
                // Whitespace must follow the closing quote.
                if after.is_some_and(|byte| !byte.is_ascii_whitespace()) {
                    return Err(ProtocolError::Quotes);
                }
                words.push(open..to);
                return Ok(from + 1);
            }
            (b'\\', Some(b'x')) if quote == b'"' && hex(rest).is_some() => (hex(rest).unwrap_or_default(), 4),
            (b'\\', Some(escaped)) if quote == b'"' => (unescape(*escaped), 2),
            (b'\\', Some(b'\'')) => (b'\'', 2),
            (byte, _) => (byte, 1),
        };
        line[to] = byte;
        (from, to) = (from + taken, to + 1);
    }
}

/// The byte of an escape such as `\x41`.
fn hex(escape: &[u8]) -> Option<u8> {
    let digits = std::str::from_utf8(escape.get(2..4)?).ok()?;
    if digits.starts_with('+') { None } else { u8::from_str_radix(digits, 16).ok() }
}

fn unescape(escaped: u8) -> u8 {
    match escaped {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'b' => 8,
        b'a' => 7,
        byte => byte,
    }
}
