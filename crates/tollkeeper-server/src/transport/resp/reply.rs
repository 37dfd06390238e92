//! Answers for the wire, in the version of the protocol that the client asked for.

use tollkeeper::Span;
use tollkeeper::decimal::Decimal;

/// The version of the protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// What every client speaks.
    #[default]
    Resp2,
    /// With maps, booleans, doubles and a null of its own.
    Resp3,
}

/// Answers that have not been sent, one behind the other.
#[derive(Debug, Default)]
pub struct Replies {
    /// The answers.
    pub bytes: Vec<u8>,
    /// How they are written.
    pub protocol: Protocol,
}

impl Replies {
    /// A word such as `OK`.
    pub fn simple(&mut self, word: &str) {
        self.line(b'+', word.as_bytes());
    }

    /// An error: a code in capitals, and what is wrong. It is one line, whatever a client has put into it.
    pub fn error(&mut self, message: &str) {
        self.bytes.push(b'-');
        self.bytes.extend(message.bytes().map(|byte| if byte.is_ascii_control() { b' ' } else { byte }));
        self.end();
    }

    /// A whole number.
    #[inline]
    pub fn number(&mut self, number: u64) {
        self.line(b':', Decimal::whole(number).as_bytes());
    }

    /// A whole number that may be negative.
    pub fn integer(&mut self, number: i64) {
        self.bytes.extend_from_slice(if number < 0 { b":-" } else { b":" });
        self.bytes.extend_from_slice(Decimal::whole(number.unsigned_abs()).as_bytes());
        self.end();
    }

    /// A text, or any bytes.
    #[inline]
    pub fn bulk(&mut self, bytes: &[u8]) {
        self.line(b'$', Decimal::whole(bytes.len() as u64).as_bytes());
        self.bytes.extend_from_slice(bytes);
        self.end();
    }

    /// Nothing.
    pub fn null(&mut self) {
        self.bytes.extend_from_slice(match self.protocol {
            Protocol::Resp2 => b"$-1\r\n",
            Protocol::Resp3 => b"_\r\n",
        });
    }

    /// True or false.
    pub fn boolean(&mut self, truth: bool) {
        self.bytes.extend_from_slice(match (self.protocol, truth) {
            (Protocol::Resp2, false) => b":0\r\n",
            (Protocol::Resp2, true) => b":1\r\n",
            (Protocol::Resp3, false) => b"#f\r\n",
            (Protocol::Resp3, true) => b"#t\r\n",
        });
    }

    /// Seconds, exactly.
    pub fn seconds(&mut self, span: Span) {
        let seconds = Decimal::seconds(span);
        match self.protocol {
            Protocol::Resp2 => self.bulk(seconds.as_bytes()),
            Protocol::Resp3 => self.line(b',', seconds.as_bytes()),
        }
    }

    /// So many answers follow that are one.
    #[inline]
    pub fn array(&mut self, len: usize) {
        self.line(b'*', Decimal::whole(len as u64).as_bytes());
    }

    /// So many pairs of answers follow that are one.
    pub fn map(&mut self, len: usize) {
        match self.protocol {
            Protocol::Resp2 => self.array(2 * len),
            Protocol::Resp3 => self.line(b'%', Decimal::whole(len as u64).as_bytes()),
        }
    }

    /// What `write` writes of the value; nothing if there is none.
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
    fn answers_are_written_as_the_protocol_says() {
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
