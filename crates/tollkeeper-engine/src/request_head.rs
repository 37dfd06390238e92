//! Reads the head of a request from bytes: `method\ntarget\npeer\nname\nvalue\nname\nvalue…`.

use std::net::IpAddr;

use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, header};

/// The head of a request, and the address of the other end of its connection, if it is known.
#[derive(Debug)]
pub(crate) struct RequestHead {
    pub(crate) parts: Parts,
    pub(crate) peer: Option<IpAddr>,
}

impl RequestHead {
    /// Reads a head. The error says what is invalid.
    pub(crate) fn read(head: &[u8]) -> Result<RequestHead, &'static str> {
        let mut lines = head.split(|byte| *byte == b'\n');
        let mut next = || lines.next().ok_or("the head must begin with method, target and peer");
        let (method, target, peer) = (next()?, next()?, next()?);
        let (mut parts, ()) = Request::new(()).into_parts();
        parts.method = Method::from_bytes(method).map_err(|_| "invalid method")?;
        parts.uri = Uri::try_from(target).map_err(|_| "invalid request target")?;
        parts.headers = HeaderMap::with_capacity(16);
        while let Some(name) = lines.next() {
            let value = lines.next().ok_or("a header has no value")?;
            let name = match name {
                // HTTP/2 has the host here. The other pseudo-headers are in the method and the target.
                b":authority" => header::HOST,
                [b':', ..] => continue,
                name => HeaderName::from_bytes(name).map_err(|_| "invalid header name")?,
            };
            let value = HeaderValue::from_bytes(value).map_err(|_| "invalid header value")?;
            parts.headers.append(name, value);
        }
        Ok(RequestHead { parts, peer: address(peer) })
    }
}

/// An address, without the zone that a link-local one may have: `fe80::1%eth0`. `None` for what is not an address, such as
/// the path of a Unix socket or the name that a test client gives itself.
fn address(text: &[u8]) -> Option<IpAddr> {
    std::str::from_utf8(text).ok()?.split('%').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_is_read_as_it_was_sent() {
        let head =
            b"GET\n/a?b=c\n::ffff:192.0.2.7\nX-Key\n\xe9\nx-key\ntwo\n:authority\nexample.com\n:path\n/a?b=c";
        let RequestHead { parts, peer } = RequestHead::read(head).unwrap();
        assert_eq!((parts.method.as_str(), parts.uri.to_string()), ("GET", "/a?b=c".to_owned()));
        assert_eq!(peer, Some("::ffff:192.0.2.7".parse().unwrap()));
        let keys: Vec<&[u8]> = parts.headers.get_all("x-key").iter().map(HeaderValue::as_bytes).collect();
        assert_eq!(keys, [&b"\xe9"[..], b"two"]);
        assert_eq!(parts.headers[header::HOST], "example.com");
    }

    #[test]
    fn invalid_head_is_refused_with_a_reason() {
        for (head, reason) in [
            (&b""[..], "the head must begin with method, target and peer"),
            (b"GET\n/", "the head must begin with method, target and peer"),
            (b"G T\n/\n", "invalid method"),
            (b"GET\n/a b\n", "invalid request target"),
            (b"GET\n/\n\na b\nc", "invalid header name"),
            (b"GET\n/\n\nname\n\0", "invalid header value"),
            (b"GET\n/\n\nname", "a header has no value"),
        ] {
            assert_eq!(RequestHead::read(head).unwrap_err(), reason, "{head:?}");
        }
        assert!(RequestHead::read(b"GET\n/\nfe80::1%eth0").unwrap().peer.is_some());
        for unknown in [&b"GET\n/\n"[..], b"GET\n/\ntestclient", b"GET\n/\n\xff"] {
            assert!(RequestHead::read(unknown).unwrap().peer.is_none());
        }
    }
}
