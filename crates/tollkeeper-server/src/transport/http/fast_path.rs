//! Fast path for plain checks, the form of nearly every check: `POST /v1/check` with a `Content-Length` body.
//!
//! Such a request is parsed in the read buffer, and its response is written into another buffer, without a header map
//! and without a stream for a body that has already arrived. Every other request stays in the buffer untouched, for
//! hyper, which implements the rest of HTTP.

use std::cell::RefCell;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use httparse::{EMPTY_HEADER, Status};
use hyper::Response;

use super::MAX_BODY;
use super::response_body::Reply;
use crate::telemetry::trace::Parent;

/// The request line of every plain check.
const LINE: &[u8] = b"POST /v1/check HTTP/1.1\r\n";
/// More headers than usual clients send. A request with more is left to hyper.
const MAX_HEADERS: usize = 32;

/// What the read buffer begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// A plain check. Its head is complete, its body may still be arriving.
    Check {
        /// Bytes of the request line and the headers, with the blank line.
        head: usize,
        /// Bytes of the body.
        body: usize,
        /// The parent span, if the request is to be traced and names one.
        parent: Option<Parent>,
    },
    /// The beginning of a head that may become a plain check.
    Partial,
    /// Any other request.
    Other,
}

/// Parses the head that `buffer` begins with, and `traceparent` only if `traced`. A request with an unknown `Host` is not
/// plain.
pub fn parse(buffer: &[u8], traced: bool, host_is_known: impl Fn(&[u8]) -> bool) -> Parsed {
    let seen = buffer.len().min(LINE.len());
    if buffer[..seen] != LINE[..seen] {
        return Parsed::Other;
    }
    if seen < LINE.len() {
        return Parsed::Partial;
    }
    let mut headers = [EMPTY_HEADER; MAX_HEADERS];
    let (head, headers) = match httparse::parse_headers(&buffer[LINE.len()..], &mut headers) {
        Ok(Status::Complete((len, headers))) => (LINE.len() + len, headers),
        Ok(Status::Partial) => return Parsed::Partial,
        Err(_) => return Parsed::Other,
    };
    let (mut body, mut parent, mut host) = (None, None, false);
    for header in headers {
        match Header::of(header.name) {
            Header::Length if body.is_none() => body = Some(length(header.value)),
            Header::Connection if header.value.eq_ignore_ascii_case(b"keep-alive") => {}
            Header::Parent if traced => parent = Parent::read(header.value),
            Header::Host if !host && host_is_known(header.value) => host = true,
            Header::Parent | Header::Ignored => {}
            Header::Length | Header::Connection | Header::Host | Header::Special => return Parsed::Other,
        }
    }
    match body {
        Some(Some(body)) if body <= MAX_BODY => Parsed::Check { head, body, parent },
        _ => Parsed::Other,
    }
}

/// What a header means for parsing the request.
enum Header {
    Length,
    Connection,
    Host,
    /// Changes how the body or the connection is read, or says that a web page sent the request.
    Special,
    /// Names the parent span.
    Parent,
    /// Irrelevant here.
    Ignored,
}

impl Header {
    fn of(name: &str) -> Header {
        // By length first, so that a name is compared with at most two others.
        let is = |other: &str| name.eq_ignore_ascii_case(other);
        match name.len() {
            2 if is("te") => Header::Special,
            4 if is("host") => Header::Host,
            6 if is("expect") || is("origin") => Header::Special,
            7 if is("upgrade") || is("trailer") => Header::Special,
            10 if is("connection") => Header::Connection,
            11 if is("traceparent") => Header::Parent,
            14 if is("content-length") => Header::Length,
            17 if is("transfer-encoding") => Header::Special,
            _ => Header::Ignored,
        }
    }
}

/// A strict `Content-Length`: one to seven digits and nothing else.
fn length(value: &[u8]) -> Option<usize> {
    if value.is_empty() || value.len() > 7 {
        return None;
    }
    value
        .iter()
        .try_fold(0, |length, byte| byte.is_ascii_digit().then(|| length * 10 + usize::from(byte - b'0')))
}

/// Appends a response, byte for byte as hyper would write it.
pub fn write(out: &mut Vec<u8>, response: &Response<Reply>, now: Instant) {
    let body = response.body().bytes();
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(response.status().as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(response.status().canonical_reason().unwrap_or_default().as_bytes());
    out.extend_from_slice(b"\r\n");
    for (name, value) in response.headers() {
        out.extend_from_slice(name.as_str().as_bytes());
        out.extend_from_slice(b": ");
        out.extend_from_slice(value.as_bytes());
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(b"content-length: ");
    out.extend_from_slice(itoa::Buffer::new().format(body.len()).as_bytes());
    out.extend_from_slice(b"\r\ndate: ");
    DATE.with_borrow_mut(|date| out.extend_from_slice(date.at(now)));
    out.extend_from_slice(b"\r\n\r\n");
    out.extend_from_slice(body);
}

thread_local! {
    static DATE: RefCell<Date> = const { RefCell::new(Date { text: [0; 29], until: None }) };
}

/// The value of the `Date` header, formatted once a second.
struct Date {
    text: [u8; 29],
    until: Option<Instant>,
}

impl Date {
    fn at(&mut self, now: Instant) -> &[u8; 29] {
        if self.until.is_none_or(|until| now >= until) {
            let wall = SystemTime::now();
            let into_second = wall.duration_since(UNIX_EPOCH).map_or(0, |since| since.subsec_nanos());
            self.until = Some(now + Duration::from_secs(1) - Duration::from_nanos(into_second.into()));
            self.text.copy_from_slice(httpdate::fmt_http_date(wall).as_bytes());
        }
        &self.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_localhost(host: &[u8]) -> bool {
        host == b"localhost"
    }

    fn request(headers: &str) -> String {
        format!("POST /v1/check HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n")
    }

    #[test]
    fn check_with_a_content_length_is_plain() {
        for headers in [
            "content-length: 12\r\n",
            "Content-Length: 12\r\nConnection: Keep-Alive\r\n",
            "content-type: text/plain\r\naccept: */*\r\nuser-agent: x\r\ncontent-length: 0012\r\n",
        ] {
            let request = request(headers);
            let plain = Parsed::Check { head: request.len(), body: 12, parent: None };
            assert_eq!(parse(request.as_bytes(), true, is_localhost), plain, "{headers}");
            assert_eq!(
                parse(format!("{request}{{\"facts\":{{}}}}POST").as_bytes(), true, is_localhost),
                plain,
                "{headers}"
            );
            for end in 0..request.len() {
                assert_eq!(
                    parse(&request.as_bytes()[..end], true, is_localhost),
                    Parsed::Partial,
                    "{:?}",
                    &request[..end]
                );
            }
        }
    }

    #[test]
    fn traceparent_is_parsed_only_when_tracing() {
        let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let request = request(&format!("TraceParent: {parent}\r\ncontent-length: 12\r\n"));
        let parent = Parent::read(parent.as_bytes());
        assert!(parent.is_some());
        for (traced, parent) in [(true, parent), (false, None)] {
            let plain = Parsed::Check { head: request.len(), body: 12, parent };
            assert_eq!(parse(request.as_bytes(), traced, is_localhost), plain);
        }
    }

    #[test]
    fn other_requests_are_left_to_hyper() {
        let many: String = (0..MAX_HEADERS).map(|n| format!("x-{n}: 1\r\n")).collect();
        for headers in [
            "",
            "content-length: \r\n",
            "content-length: +1\r\n",
            "content-length: 1, 1\r\n",
            "content-length: 0x1\r\n",
            "content-length: 65537\r\n",
            "content-length: 99999999999999999999\r\n",
            "content-length: 1\r\ncontent-length: 1\r\n",
            "content-length: 1\r\ntransfer-encoding: chunked\r\n",
            "content-length: 1\r\nTransfer-Encoding: identity\r\n",
            "content-length: 1\r\nexpect: 100-continue\r\n",
            "content-length: 1\r\nconnection: close\r\n",
            "content-length: 1\r\nconnection: keep-alive, upgrade\r\n",
            "content-length: 1\r\nupgrade: h2c\r\n",
            "content-length: 1\r\ntrailer: x\r\n",
            "content-length: 1\r\nte: trailers\r\n",
            "content-length: 1\r\norigin: http://evil.example\r\n",
            "content-length: 1\r\nhost: localhost\r\n",
            "content-length: 1\r\nHost: evil.example\r\n",
            "content-length : 1\r\n",
            "content-length: 1\r\n folded\r\n",
            "content-length: 1\r\nx: \0\r\n",
            &format!("{many}content-length: 1\r\n"),
        ] {
            assert_eq!(parse(request(headers).as_bytes(), true, is_localhost), Parsed::Other, "{headers:?}");
        }
        for line in
            ["GET /v1/check HTTP/1.1", "POST /v1/peek HTTP/1.1", "POST /v1/check HTTP/1.0", "post", "\r\n"]
        {
            let request = format!("{line}\r\nhost: localhost\r\ncontent-length: 1\r\n\r\n");
            assert_eq!(parse(request.as_bytes(), true, is_localhost), Parsed::Other, "{line}");
        }
        let rebound = "POST /v1/check HTTP/1.1\r\nhost: evil.example\r\ncontent-length: 1\r\n\r\n";
        assert_eq!(parse(rebound.as_bytes(), true, is_localhost), Parsed::Other);
    }

    #[test]
    fn date_is_formatted_once_a_second() {
        let mut date = Date { text: [0; 29], until: None };
        let now = Instant::now();
        let text = std::str::from_utf8(date.at(now)).unwrap().to_owned();
        let then = httpdate::parse_http_date(&text).unwrap();
        assert!(then.elapsed().unwrap() < Duration::from_secs(60), "{text}");
        date.text = *b"Thu, 01 Jan 1970 00:00:00 GMT";
        assert_eq!(date.at(now), b"Thu, 01 Jan 1970 00:00:00 GMT");
        assert_ne!(date.at(now + Duration::from_secs(1)), b"Thu, 01 Jan 1970 00:00:00 GMT");
    }
}
