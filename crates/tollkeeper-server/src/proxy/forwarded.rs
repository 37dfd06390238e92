//! Tells the upstream about the client: `X-Forwarded-…`, `Forwarded` and `X-Request-Id`.
//!
//! What an untrusted peer claims is replaced; what a trusted proxy says is kept or extended.

use std::net::IpAddr;

use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use tollkeeper_tower::random;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The longest request id that is kept.
const LONGEST_ID: usize = 128;

/// The connection that a request arrived on.
#[derive(Clone, Copy, Debug)]
pub struct Hop {
    /// The address of the peer.
    pub peer: IpAddr,
    /// Whether it is a trusted proxy.
    pub trusted: bool,
    /// Whether the connection uses TLS.
    pub tls: bool,
}

impl Hop {
    fn scheme(&self) -> &'static str {
        if self.tls { "https" } else { "http" }
    }

    /// Adds this hop to the headers of a request. Its `Host` is still the one of the client.
    pub fn describe(&self, headers: &mut HeaderMap, keep_request_id: bool) {
        if !self.trusted {
            remove_claims(headers);
        }
        let host = headers.get(header::HOST).filter(|host| !host.is_empty()).cloned();
        let peer = self.peer.to_canonical();
        if headers.contains_key(header::FORWARDED) {
            let element = forwarded_element(peer, host.as_ref(), self.scheme());
            self.append(headers, header::FORWARDED, element.as_bytes());
        }
        self.append(headers, X_FORWARDED_FOR, peer.to_string().as_bytes());
        if !(self.trusted && headers.contains_key(X_FORWARDED_PROTO)) {
            headers.insert(X_FORWARDED_PROTO, HeaderValue::from_static(self.scheme()));
        }
        if !(self.trusted && headers.contains_key(X_FORWARDED_HOST)) {
            match host {
                Some(host) => drop(headers.insert(X_FORWARDED_HOST, host)),
                None => drop(headers.remove(X_FORWARDED_HOST)),
            }
        }
        let kept = (self.trusted || keep_request_id) && has_usable_id(headers);
        if !kept {
            headers.insert(X_REQUEST_ID, new_id());
        }
    }

    /// Appends a value to a list that a trusted peer sent, or replaces the list.
    fn append(&self, headers: &mut HeaderMap, name: HeaderName, value: &[u8]) {
        let mut list = Vec::new();
        if self.trusted {
            for line in headers.get_all(&name) {
                list.extend_from_slice(line.as_bytes());
                list.extend_from_slice(b", ");
            }
        }
        list.extend_from_slice(value);
        headers.insert(name, HeaderValue::from_bytes(&list).expect("header values and an address"));
    }
}

/// Removes what only a proxy can know, such as `X-Forwarded-Prefix`, `X-Forwarded-Port` and `X-Real-Ip`. `Forwarded` is
/// replaced if there is one.
fn remove_claims(headers: &mut HeaderMap) {
    let is_claim =
        |name: &&HeaderName| name.as_str().starts_with("x-forwarded-") || name.as_str() == "x-real-ip";
    let claims: Vec<HeaderName> = headers.keys().filter(is_claim).cloned().collect();
    claims.iter().for_each(|name| drop(headers.remove(name)));
}

/// An element of `Forwarded` (RFC 7239).
fn forwarded_element(peer: IpAddr, host: Option<&HeaderValue>, scheme: &str) -> String {
    let mut element = match peer {
        IpAddr::V4(peer) => format!("for={peer}"),
        IpAddr::V6(peer) => format!("for=\"[{peer}]\""),
    };
    if let Some(host) = host.and_then(|host| host.to_str().ok()) {
        // A host has neither quotes nor backslashes: hygiene has checked it.
        element.push_str(&format!(";host=\"{host}\""));
    }
    element.push_str(";proto=");
    element.push_str(scheme);
    element
}

fn has_usable_id(headers: &HeaderMap) -> bool {
    let mut lines = headers.get_all(&X_REQUEST_ID).iter();
    let id = lines.next().map(HeaderValue::as_bytes).unwrap_or_default();
    let is_usable = (1..=LONGEST_ID).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic);
    is_usable && lines.next().is_none()
}

/// A random id of 32 hex digits.
fn new_id() -> HeaderValue {
    let mut digits = [0; 32];
    for (half, number) in digits.chunks_exact_mut(16).zip([random::draw(), random::draw()]) {
        for (digit, byte) in half.chunks_exact_mut(2).zip(number.to_be_bytes()) {
            const HEX: &[u8; 16] = b"0123456789abcdef";
            digit.copy_from_slice(&[HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
        }
    }
    HeaderValue::from_bytes(&digits).expect("hex digits")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(hop: Hop, sent: &[(&'static str, &'static str)]) -> Vec<String> {
        let mut headers = HeaderMap::new();
        for (name, value) in sent {
            headers.append(*name, HeaderValue::from_static(value));
        }
        hop.describe(&mut headers, false);
        let id = headers.remove(X_REQUEST_ID).expect("every request has an id");
        assert!(id.len() == 32 || id == "kept", "{id:?}");
        let mut lines: Vec<String> = headers
            .iter()
            .map(|(name, value)| format!("{name}: {}", value.to_str().expect("text")))
            .collect();
        lines.sort();
        lines
    }

    #[test]
    fn untrusted_claims_are_replaced() {
        let hop = Hop { peer: "203.0.113.9".parse().expect("an address"), trusted: false, tls: false };
        let sent = [
            ("host", "a.test"),
            ("x-forwarded-for", "198.51.100.1"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "evil.test"),
            ("x-forwarded-prefix", "/evil"),
            ("x-forwarded-port", "1"),
            ("x-real-ip", "198.51.100.1"),
            ("x-request-id", "chosen"),
            ("forwarded", "for=198.51.100.1"),
        ];
        let expected = [
            "forwarded: for=203.0.113.9;host=\"a.test\";proto=http",
            "host: a.test",
            "x-forwarded-for: 203.0.113.9",
            "x-forwarded-host: a.test",
            "x-forwarded-proto: http",
        ];
        assert_eq!(described(hop, &sent), expected);
    }

    #[test]
    fn trusted_proxies_are_extended() {
        let hop = Hop { peer: "::ffff:10.0.0.1".parse().expect("an address"), trusted: true, tls: true };
        let sent = [
            ("host", "a.test"),
            ("x-forwarded-for", "198.51.100.1"),
            ("x-forwarded-for", "192.0.2.7"),
            ("x-forwarded-proto", "http"),
            ("x-real-ip", "192.0.2.7"),
            ("x-request-id", "kept"),
        ];
        let expected = [
            "host: a.test",
            "x-forwarded-for: 198.51.100.1, 192.0.2.7, 10.0.0.1",
            "x-forwarded-host: a.test",
            "x-forwarded-proto: http",
            "x-real-ip: 192.0.2.7",
        ];
        assert_eq!(described(hop, &sent), expected);
    }

    #[test]
    fn ipv6_peers_are_quoted_in_forwarded() {
        let hop = Hop { peer: "2001:db8::1".parse().expect("an address"), trusted: false, tls: true };
        let lines = described(hop, &[("forwarded", "for=_hidden")]);
        assert_eq!(lines[0], "forwarded: for=\"[2001:db8::1]\";proto=https");
    }
}
