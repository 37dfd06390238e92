//! Determines the client's address from the peer and the forwarding headers, behind trusted and untrusted proxies.
//!
//! Every client can send a header with a forged address. The header counts only if the peer is a trusted proxy, and each
//! trusted proxy vouches for one hop: the peer that it was called by. So the hops are read from the right, where the
//! nearest proxy appended its peer, and the first address that is not trusted is the client.

use std::net::{IpAddr, Ipv6Addr};

use http::HeaderMap;
use tollkeeper::http::{ClientAddress, HttpSettings};
use tollkeeper_core::net::{CanonicalIp, Network};

/// The client that sent a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Client {
    /// The address of the client.
    pub ip: CanonicalIp,
    /// Whether the peer is a trusted proxy, so that facts declared `trusted` are read from its headers.
    pub trusted: bool,
}

impl Client {
    /// The client of a request from this peer with these headers.
    #[inline]
    pub fn of(peer: impl Into<CanonicalIp>, headers: &HeaderMap, settings: &HttpSettings) -> Client {
        let (ip, proxies) = (peer.into(), &settings.trusted_proxies);
        if !proxies.is_empty() && is_trusted(ip.into(), proxies) {
            return Client::behind(ip.into(), headers, settings);
        }
        Client { ip, trusted: false }
    }

    /// The client of a request from this trusted proxy.
    fn behind(peer: IpAddr, headers: &HeaderMap, settings: &HttpSettings) -> Client {
        let lines = |name: &str| headers.get_all(name).into_iter().map(|line| line.as_bytes());
        let trusted = &settings.trusted_proxies;
        let ip = match &settings.client_address {
            ClientAddress::XForwardedFor => walk(peer, forwarded_for(lines("x-forwarded-for")), trusted),
            ClientAddress::Forwarded => walk(peer, forwarded(lines("forwarded")), trusted),
            ClientAddress::Header(name) => single(lines(name)).unwrap_or(peer),
        };
        Client { ip: ip.into(), trusted: true }
    }
}

/// Whether an address belongs to a trusted network.
#[inline]
pub fn is_trusted(ip: IpAddr, trusted: &[Network]) -> bool {
    trusted.iter().any(|network| network.contains(ip))
}

/// Walks the hops, nearest first, until one is not trusted, and returns that one. A hop that is not an address (`None`)
/// ends the walk at the hop before it, the last known address.
pub fn walk(peer: IpAddr, hops: impl Iterator<Item = Option<IpAddr>>, trusted: &[Network]) -> IpAddr {
    let mut client = peer;
    for hop in hops {
        let Some(hop) = hop else { break };
        client = hop;
        if !is_trusted(hop, trusted) {
            break;
        }
    }
    client
}

/// The hops of `X-Forwarded-For`, nearest first; `None` for a hop that is not an address.
pub fn forwarded_for<'a>(
    lines: impl DoubleEndedIterator<Item = &'a [u8]>,
) -> impl Iterator<Item = Option<IpAddr>> {
    let hops = lines.rev().flat_map(|line| line.rsplit(|byte| *byte == b','));
    hops.map(<[u8]>::trim_ascii).filter(|hop| !hop.is_empty()).map(address)
}

/// The hops of `Forwarded` (RFC 7239), nearest first; `None` for a hop that is not an address.
pub fn forwarded<'a>(
    lines: impl DoubleEndedIterator<Item = &'a [u8]>,
) -> impl Iterator<Item = Option<IpAddr>> {
    let hops = lines.rev().flat_map(elements_rev);
    hops.map(<[u8]>::trim_ascii).filter(|hop| !hop.is_empty()).map(for_address)
}

/// The address in a header that holds a single one, such as `X-Real-IP`.
pub fn single<'a>(mut lines: impl Iterator<Item = &'a [u8]>) -> Option<IpAddr> {
    let line = lines.next()?;
    // A duplicate header is ambiguous.
    if lines.next().is_some() { None } else { address(line.trim_ascii()) }
}

/// Parses an address with or without a port: `192.0.2.7`, `192.0.2.7:4711`, `2001:db8::1`, `[2001:db8::1]` and
/// `[2001:db8::1]:4711`.
pub fn address(text: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(text).ok()?;
    if let Some(rest) = text.strip_prefix('[') {
        let (address, port) = rest.split_once(']')?;
        let address: Ipv6Addr = address.parse().ok()?;
        let port = if port.is_empty() { None } else { Some(port.strip_prefix(':')?) };
        return port.is_none_or(is_port).then(|| IpAddr::V6(address).to_canonical());
    }
    let address = match text.split_once(':') {
        // An IPv6 address with a port has brackets; without brackets, all colons belong to the address.
        Some((address, port)) if !port.contains(':') => {
            return is_port(port).then(|| address.parse().ok().map(IpAddr::V4))?;
        }
        _ => text,
    };
    address.parse::<IpAddr>().ok().map(|ip| ip.to_canonical())
}

/// Whether a text is a port number or an obfuscated port of RFC 7239, such as `_hidden`.
fn is_port(text: &str) -> bool {
    let is_obfuscated = text.strip_prefix('_').is_some_and(|name| !name.is_empty());
    is_obfuscated
        || (text.len() <= 5 && text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok())
}

/// The elements of a comma-separated list, last one first. Commas inside quotes do not separate.
///
/// It is parsed from the right, because otherwise a client could hide the element that the proxy appended behind a quote
/// that it never closes.
fn elements_rev(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(line);
    std::iter::from_fn(move || {
        let line = rest.take()?;
        let mut quoted = false;
        for (index, byte) in line.iter().enumerate().rev() {
            match byte {
                b'"' if !is_escaped(&line[..index]) => quoted = !quoted,
                b',' if !quoted => {
                    rest = Some(&line[..index]);
                    return Some(&line[index + 1..]);
                }
                _ => {}
            }
        }
        Some(line)
    })
}

/// Whether the character after `before` is escaped by a backslash.
fn is_escaped(before: &[u8]) -> bool {
    before.iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1
}

/// The address in the `for` parameter of an element such as `for="[2001:db8::1]:4711";proto=https`.
fn for_address(element: &[u8]) -> Option<IpAddr> {
    let mut found = None;
    let mut rest = element;
    while !rest.is_empty() {
        let equals = rest.iter().position(|byte| *byte == b'=')?;
        let (name, value) = (rest[..equals].trim_ascii(), &rest[equals + 1..]);
        let (value, after) = match value.strip_prefix(b"\"") {
            Some(quoted) => unquoted(quoted)?,
            None => {
                let end = value.iter().position(|byte| *byte == b';').unwrap_or(value.len());
                (value[..end].trim_ascii().to_vec(), &value[end..])
            }
        };
        if name.eq_ignore_ascii_case(b"for") && found.replace(value).is_some() {
            return None; // duplicate parameter
        }
        rest = match after.trim_ascii() {
            [] => &[],
            [b';', rest @ ..] => rest.trim_ascii(),
            _ => return None,
        };
    }
    address(&found?)
}

/// The unescaped content of a quoted string whose opening quote has been read, and the rest after its closing quote.
fn unquoted(text: &[u8]) -> Option<(Vec<u8>, &[u8])> {
    let mut value = Vec::new();
    let mut bytes = text.iter().enumerate();
    while let Some((index, byte)) = bytes.next() {
        match byte {
            b'"' => return Some((value, &text[index + 1..])),
            b'\\' => value.push(*bytes.next()?.1),
            byte => value.push(*byte),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue};

    const PEER: &str = "10.0.0.1";

    /// The client of a request from 10.0.0.1, with 10.0.0.0/8 and 2001:db8:ffff::/48 as trusted proxies.
    fn client(address: ClientAddress, lines: &[&str]) -> String {
        let name = match &address {
            ClientAddress::XForwardedFor => "x-forwarded-for",
            ClientAddress::Forwarded => "forwarded",
            ClientAddress::Header(name) => name,
        };
        let mut headers = HeaderMap::new();
        for line in lines {
            let name: HeaderName = name.parse().expect("a name");
            headers.append(name, HeaderValue::from_bytes(line.as_bytes()).expect("a value"));
        }
        let trusted_proxies = ["10.0.0.0/8", "2001:db8:ffff::/48"]
            .iter()
            .map(|text| text.parse().expect("a network"))
            .collect();
        let settings = HttpSettings { trusted_proxies, client_address: address, ..HttpSettings::default() };
        let peer: IpAddr = PEER.parse().expect("an address");
        Client::of(peer, &headers, &settings).ip.to_string()
    }

    #[test]
    fn client_is_the_rightmost_untrusted_hop() {
        for (lines, expected) in [
            (&[][..], PEER),
            (&["203.0.113.9"], "203.0.113.9"),
            (&["1.1.1.1, 203.0.113.9"], "203.0.113.9"),
            (&["1.1.1.1,203.0.113.9,10.0.0.2"], "203.0.113.9"),
            (&["1.1.1.1", "203.0.113.9", "10.0.0.2"], "203.0.113.9"),
            (&["1.1.1.1", "203.0.113.9, 10.0.0.3", "10.0.0.2"], "203.0.113.9"),
            (&["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
            (&["203.0.113.9, 2001:db8:ffff::7"], "203.0.113.9"),
            (&["::ffff:203.0.113.9"], "203.0.113.9"),
            (&["203.0.113.9, ::ffff:10.0.0.2"], "203.0.113.9"),
            (&["203.0.113.9:4711"], "203.0.113.9"),
            (&["2001:db8::1"], "2001:db8::1"),
            (&["[2001:db8::1]"], "2001:db8::1"),
            (&["[2001:db8::1]:4711"], "2001:db8::1"),
            (&["203.0.113.9, , 10.0.0.2,"], "203.0.113.9"),
            (&["203.0.113.9,\t10.0.0.2 "], "203.0.113.9"),
            // A hop that is not an address ends the walk at the last known hop.
            (&["203.0.113.9, unknown"], PEER),
            (&["203.0.113.9, unknown, 10.0.0.2"], "10.0.0.2"),
            (&["203.0.113.9, 10.0.0.256, 10.0.0.2"], "10.0.0.2"),
            (&["203.0.113.9, 10.0.0.2:99999"], PEER),
            (&["203.0.113.9, [10.0.0.2]"], PEER),
            (&["203.0.113.9, fe80::1%eth0"], PEER),
            (&["203.0.113.9, \u{fffd}"], PEER),
        ] {
            assert_eq!(client(ClientAddress::XForwardedFor, lines), expected, "{lines:?}");
        }
    }

    #[test]
    fn forwarded_ports_quotes_and_obfuscated_names_are_parsed() {
        for (lines, expected) in [
            (&[][..], PEER),
            (&["for=203.0.113.9"], "203.0.113.9"),
            (&["For=203.0.113.9;proto=https;by=10.0.0.1"], "203.0.113.9"),
            (&["proto=https; for=203.0.113.9"], "203.0.113.9"),
            (&[r#"for="203.0.113.9:4711""#], "203.0.113.9"),
            (&[r#"for="[2001:db8::1]:4711""#], "2001:db8::1"),
            (&[r#"for="[2001:db8::1]""#], "2001:db8::1"),
            (&[r#"for="[2001:db8::1]:_port""#], "2001:db8::1"),
            (&[r#"for="203\.0.113.9""#], "203.0.113.9"),
            (&["for=1.1.1.1, for=203.0.113.9"], "203.0.113.9"),
            (&["for=1.1.1.1", "for=203.0.113.9, for=10.0.0.2"], "203.0.113.9"),
            (&[r#"for=203.0.113.9;host="a,b;c", for=10.0.0.2"#], "203.0.113.9"),
            (&["for=203.0.113.9, for=unknown"], PEER),
            (&["for=203.0.113.9, for=_hidden, for=10.0.0.2"], "10.0.0.2"),
            (&["for=203.0.113.9, proto=https"], PEER),
            (&["for=203.0.113.9, for=10.0.0.2;for=10.0.0.3"], PEER),
            (&[r#"for=203.0.113.9, for="10.0.0.2"x"#], PEER),
            (&["203.0.113.9"], PEER),
            // A quote that the client never closes does not hide what the proxy appended.
            (&[r#"for="1.1.1.1, for=203.0.113.9"#], "203.0.113.9"),
            (&[r#"for="1.1.1.1\, for=203.0.113.9, for="10.0.0.2""#], "203.0.113.9"),
        ] {
            assert_eq!(client(ClientAddress::Forwarded, lines), expected, "{lines:?}");
        }
    }

    #[test]
    fn custom_header_must_hold_exactly_one_address() {
        for (lines, expected) in [
            (&[][..], PEER),
            (&["203.0.113.9"], "203.0.113.9"),
            (&["[2001:db8::1]:4711"], "2001:db8::1"),
            (&["10.0.0.9"], "10.0.0.9"),
            (&["1.1.1.1, 203.0.113.9"], PEER),
            (&["1.1.1.1", "203.0.113.9"], PEER),
            (&["unknown"], PEER),
            (&[""], PEER),
        ] {
            let header = ClientAddress::Header("x-real-ip".to_owned());
            assert_eq!(client(header, lines), expected, "{lines:?}");
        }
    }

    #[test]
    fn only_the_configured_header_of_trusted_peers_is_read() {
        let mut headers = HeaderMap::new();
        headers.insert("x-forwarded-for", HeaderValue::from_static("1.1.1.1"));
        headers.insert("forwarded", HeaderValue::from_static("for=2.2.2.2"));
        headers.insert("x-real-ip", HeaderValue::from_static("3.3.3.3"));
        let of = |peer: &str, client_address| {
            let trusted_proxies = vec!["10.0.0.0/8".parse().expect("a network")];
            let settings = HttpSettings { trusted_proxies, client_address, ..HttpSettings::default() };
            let peer: IpAddr = peer.parse().expect("an address");
            let client = Client::of(peer, &headers, &settings);
            (client.ip.to_string(), client.trusted)
        };
        let header = |name: &str| ClientAddress::Header(name.to_owned());
        for (address, expected) in [
            (ClientAddress::XForwardedFor, "1.1.1.1"),
            (ClientAddress::Forwarded, "2.2.2.2"),
            (header("x-real-ip"), "3.3.3.3"),
            (header("cf-connecting-ip"), "10.1.2.3"),
        ] {
            assert_eq!(of("10.1.2.3", address.clone()), (expected.to_owned(), true));
            assert_eq!(of("::ffff:10.1.2.3", address.clone()), (expected.to_owned(), true));
            assert_eq!(of("192.0.2.1", address), ("192.0.2.1".to_owned(), false));
        }
    }
}
