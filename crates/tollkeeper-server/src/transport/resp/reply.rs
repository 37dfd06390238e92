//! Encodes replies in RESP2 or RESP3, as the client selected.

use tollkeeper::Span;
use tollkeeper_core::decimal::Decimal;

/// The version of the protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// The default, which every client supports.
    #[default]
    Resp2,
    /// Has maps, booleans, doubles and a null type.
    Resp3,
}

/// Encoded replies that have not been sent yet.
#[derive(Debug, Default)]
pub struct Replies {
    /// The encoded replies, in order.
    pub bytes: Vec<u8>,
    /// The version in which further replies are encoded.
    pub protocol: Protocol,
}

impl Replies {
    /// Appends a simple string such as `OK`.
    pub fn simple(&mut self, word: &str) {
        self.line(b'+', word.as_bytes());
    }

    /// Appends an error: a code in capitals, then a message. Control characters, which could come from a client, become
    /// spaces, so that it stays one line.
    pub fn error(&mut self, message: &str) {
        self.bytes.push(b'-');
        self.bytes.extend(message.bytes().map(|byte| if byte.is_ascii_control() { b' ' } else { byte }));
        self.end();
    }

    /// Appends an unsigned integer.
    #[inline]
    pub fn number(&mut self, number: u64) {
        self.line(b':', Decimal::whole(number).as_bytes());
    }

    /// Appends a signed integer.
    pub fn integer(&mut self, number: i64) {
        self.bytes.extend_from_slice(if number < 0 { b":-" } else { b":" });
        self.bytes.extend_from_slice(Decimal::whole(number.unsigned_abs()).as_bytes());
        self.end();
    }

    /// Appends a bulk string, which may hold any bytes.
    #[inline]
    pub fn bulk(&mut self, bytes: &[u8]) {
        self.line(b'$', Decimal::whole(bytes.len() as u64).as_bytes());
        self.bytes.extend_from_slice(bytes);
        self.end();
    }

    /// Appends a null.
    pub fn null(&mut self) {
        self.bytes.extend_from_slice(match self.protocol {
            Protocol::Resp2 => b"$-1\r\n",
            Protocol::Resp3 => b"_\r\n",
        });
    }

    /// Appends a boolean; in RESP2 `0` or `1`.
    pub fn boolean(&mut self, truth: bool) {
        self.bytes.extend_from_slice(match (self.protocol, truth) {
            (Protocol::Resp2, false) => b":0\r\n",
            (Protocol::Resp2, true) => b":1\r\n",
            (Protocol::Resp3, false) => b"#f\r\n",
            (Protocol::Resp3, true) => b"#t\r\n",
        });
    }

    /// Appends exact decimal seconds: a double, or in RESP2 a bulk string.
    pub fn seconds(&mut self, span: Span) {
        let seconds = Decimal::seconds(span);
        match self.protocol {
            Protocol::Resp2 => self.bulk(seconds.as_bytes()),
            Protocol::Resp3 => self.line(b',', seconds.as_bytes()),
        }
    }

    /// Begins an array of `len` replies.
    #[inline]
    pub fn array(&mut self, len: usize) {
        self.line(b'*', Decimal::whole(len as u64).as_bytes());
    }

    /// Begins a map of `len` pairs; in RESP2 an array of twice the length.
    pub fn map(&mut self, len: usize) {
        match self.protocol {
            Protocol::Resp2 => self.array(2 * len),
            Protocol::Resp3 => self.line(b'%', Decimal::whole(len as u64).as_bytes()),
        }
    }

    /// Appends the value with `write`, or a null if it is `None`.
    pub fn or_null<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Replies, T)) {
        match value {
            Some(value) => write(self, value),
            None => self.null(),
        }
    }

    #[inline]
    fn line(&mut self, kind: u8, text: &[u8]) {
        self.bytes.push(kind);
        self.bytes.extend_from_slice(text);
        self.end();
    }

    #[inline]
    fn end(&mut self) {
        self.bytes.extend_from_slice(b"\r\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_encoded_in_both_versions() {
        type Write = fn(&mut Replies);
        for (write, resp2, resp3) in [
            ((|out| out.simple("OK")) as Write, "+OK\r\n", "+OK\r\n"),
            (|out| out.error("ERR a\r\n+OK"), "-ERR a  +OK\r\n", "-ERR a  +OK\r\n"),
            (|out| out.number(0), ":0\r\n", ":0\r\n"),
            (|out| out.number(u64::MAX), ":18446744073709551615\r\n", ":18446744073709551615\r\n"),
            (|out| out.integer(-1), ":-1\r\n", ":-1\r\n"),
            (|out| out.integer(i64::MIN), ":-9223372036854775808\r\n", ":-9223372036854775808\r\n"),
            (|out| out.integer(5), ":5\r\n", ":5\r\n"),
            (|out| out.bulk(b""), "$0\r\n\r\n", "$0\r\n\r\n"),
            (|out| out.bulk(b"a\r\nb"), "$4\r\na\r\nb\r\n", "$4\r\na\r\nb\r\n"),
            (|out| out.null(), "$-1\r\n", "_\r\n"),
            (|out| out.boolean(true), ":1\r\n", "#t\r\n"),
            (|out| out.boolean(false), ":0\r\n", "#f\r\n"),
            (|out| out.seconds(Span::from_millis(600)), "$3\r\n0.6\r\n", ",0.6\r\n"),
            (|out| out.array(12), "*12\r\n", "*12\r\n"),
            (|out| out.map(3), "*6\r\n", "%3\r\n"),
            (|out| out.or_null(None, Replies::number), "$-1\r\n", "_\r\n"),
            (|out| out.or_null(Some(7), Replies::number), ":7\r\n", ":7\r\n"),
        ] {
            for (protocol, expected) in [(Protocol::Resp2, resp2), (Protocol::Resp3, resp3)] {
                let mut replies = Replies { protocol, ..Replies::default() };
                write(&mut replies);
                assert_eq!(String::from_utf8_lossy(&replies.bytes), expected);
            }
        }
    }
}
