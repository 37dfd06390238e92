//! Commands as people type them: words on a line, quoted where they hold blanks.
//!
//! Escapes are taken out where they lie: a word never gets longer by it.

use std::ops::Range;

use super::parse::{MAX_ARGUMENT, MAX_ARGUMENTS, ProtocolError};

/// Splits the first line into words, and says how long it is; nothing if it has not ended. What has been
/// `searched` for the end before is not searched again.
pub(super) fn split(
    bytes: &mut [u8],
    searched: &mut usize,
    words: &mut Vec<Range<usize>>,
) -> Result<Option<usize>, ProtocolError> {
    let new = bytes[..bytes.len().min(MAX_ARGUMENT)].iter().skip(*searched);
    let Some(end) = new.clone().position(|byte| *byte == b'\n').map(|further| *searched + further) else {
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
    let word = |index: usize| words.get(index).map_or(&[][..], |place| &line[place.clone()]);
    let is_request = words.len() == 3 && word(1).starts_with(b"/") && word(2).starts_with(b"HTTP/");
    if is_request || is_http(word(0)) {
        return Err(ProtocolError::Http);
    }
    Ok(Some(end + 1))
}

/// Whether a line that begins with this word was written by a client of HTTP. Any page can make a browser POST to
/// this port, and the lines of the body would be commands. Browsers send the line of the request first, and commands
/// as arrays cannot come before it; a command `GET` as an array is only unknown. A page whose name has been given this
/// address may even choose a command for the method: `DEL /key HTTP/1.1`.
fn is_http(word: &[u8]) -> bool {
    const METHODS: [&str; 10] =
        ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE", "PRI"];
    METHODS.iter().chain(&["Host:"]).any(|begin| word.eq_ignore_ascii_case(begin.as_bytes()))
}

/// Takes a word out of its quotes, and says where to go on.
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
                // A word ends with its quotes.
                if after.is_some_and(|byte| !byte.is_ascii_whitespace()) {
                    return Err(ProtocolError::Quotes);
                }
                words.push(open..to);
                return Ok(from + 1);
            }
            (b'\\', Some(b'x')) if quote == b'"' && hex(rest).is_some() => (hex(rest).unwrap_or_default(), 4),
            (b'\\', Some(escaped)) if quote == b'"' => (meant(*escaped), 2),
            (b'\\', Some(b'\'')) => (b'\'', 2),
            (byte, _) => (byte, 1),
        };
        line[to] = byte;
        (from, to) = (from + taken, to + 1);
    }
}

/// `\x41`.
fn hex(escape: &[u8]) -> Option<u8> {
    let digits = std::str::from_utf8(escape.get(2..4)?).ok()?;
    if digits.starts_with('+') { None } else { u8::from_str_radix(digits, 16).ok() }
}

fn meant(escaped: u8) -> u8 {
    match escaped {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'b' => 8,
        b'a' => 7,
        byte => byte,
    }
}
