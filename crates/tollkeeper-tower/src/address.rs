//! Whose request it is: the address of the client, behind proxies that are trusted and proxies that are not.
//!
//! Anybody can send a header that names an address. It is believed only from a trusted proxy, and each
//! trusted proxy vouches for one hop: the one it was called by. So the hops are walked from the right,
//! where the nearest proxy wrote, and the first address that is not trusted is the client.

use std::net::{IpAddr, Ipv6Addr};

use http::HeaderMap;
use tollkeeper::http::{ClientAddress, HttpSettings};
use tollkeeper::net::Network;

/// Who sent a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Client {
    /// The address of the client, canonical: never an IPv4 address in IPv6 clothes.
    pub ip: IpAddr,
    /// Whether the peer is a trusted proxy, so that its word counts.
    pub trusted: bool,
}

impl Client {
    /// The client of a request that came from this peer with these headers.
    #[inline]
    pub fn of(peer: IpAddr, headers: &HeaderMap, settings: &HttpSettings) -> Client {
        let peer = peer.to_canonical();
        match is_trusted(peer, &settings.trusted_proxies) {
            false => Client { ip: peer, trusted: false },
            true => Client::behind(peer, headers, settings),
        }
    }

    /// The client of a request that came from this trusted proxy.
    fn behind(peer: IpAddr, headers: &HeaderMap, settings: &HttpSettings) -> Client {
        let lines = |name: &str| headers.get_all(name).into_iter().map(|line| line.as_bytes());
        let trusted = &settings.trusted_proxies;
        let ip = match &settings.client_address {
            ClientAddress::XForwardedFor => walk(peer, forwarded_for(lines("x-forwarded-for")), trusted),
            ClientAddress::Forwarded => walk(peer, forwarded(lines("forwarded")), trusted),
            ClientAddress::Header(name) => single(lines(name)).unwrap_or(peer),
        };
        Client { ip, trusted: true }
    }
}

/// Whether an address belongs to a trusted network.
#[inline]
pub fn is_trusted(ip: IpAddr, trusted: &[Network]) -> bool {
    trusted.iter().any(|network| network.contains(ip))
}

/// Walks from hop to hop, the nearest first, as long as they are trusted. A hop that is no address ends the
/// walk: who stands before it is the last that is known.
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

/// The hops of `X-Forwarded-For`, the nearest first; nothing where there is no address.
pub fn forwarded_for<'a>(
    lines: impl DoubleEndedIterator<Item = &'a [u8]>,
) -> impl Iterator<Item = Option<IpAddr>> {
    let hops = lines.rev().flat_map(|line| line.rsplit(|byte| *byte == b','));
    hops.map(<[u8]>::trim_ascii).filter(|hop| !hop.is_empty()).map(address)
}

/// The hops of `Forwarded` (RFC 7239), the nearest first; nothing where there is no address.
pub fn forwarded<'a>(
    lines: impl DoubleEndedIterator<Item = &'a [u8]>,
) -> impl Iterator<Item = Option<IpAddr>> {
    let hops = lines.rev().flat_map(elements_from_the_right);
    hops.map(<[u8]>::trim_ascii).filter(|hop| !hop.is_empty()).map(node)
}

/// The address in a header that holds a single one.
pub fn single<'a>(mut lines: impl Iterator<Item = &'a [u8]>) -> Option<IpAddr> {
    let line = lines.next()?;
    // Two lines are two opinions.
    if lines.next().is_some() { None } else { address(line.trim_ascii()) }
}

/// Reads `192.0.2.7`, `192.0.2.7:4711`, `2001:db8::1`, `[2001:db8::1]` and `[2001:db8::1]:4711`.
pub fn address(text: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(text).ok()?;
    if let Some(rest) = text.strip_prefix('[') {
        let (address, port) = rest.split_once(']')?;
        let address: Ipv6Addr = address.parse().ok()?;
        let port = if port.is_empty() { None } else { Some(port.strip_prefix(':')?) };
        return port.is_none_or(is_port).then(|| IpAddr::V6(address).to_canonical());
    }
    let address = match text.split_once(':') {
        // Brackets keep the port of an IPv6 address apart; without them every colon is the address's own.
        Some((address, port)) if !port.contains(':') => {
            return is_port(port).then(|| address.parse().ok().map(IpAddr::V4))?;
        }
        _ => text,
    };
    address.parse::<IpAddr>().ok().map(|ip| ip.to_canonical())
}

/// A number, or a name behind `_` that hides one.
fn is_port(text: &str) -> bool {
    let hidden = text.strip_prefix('_').is_some_and(|name| !name.is_empty());
    hidden
        || (text.len() <= 5 && text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok())
}

/// The elements of a list, the last one first. Commas between quotes divide nothing.
///
/// Read from the left, a quote that a client left open would swallow what the proxy wrote behind it.
fn elements_from_the_right(line: &[u8]) -> impl Iterator<Item = &[u8]> {
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

/// Whether a character is escaped by what stands before it.
fn is_escaped(before: &[u8]) -> bool {
    before.iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1
}

/// The address behind `for=` in an element such as `for="[2001:db8::1]:4711";proto=https`.
fn node(element: &[u8]) -> Option<IpAddr> {
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
            return None; // said twice
        }
        rest = match after.trim_ascii() {
            [] => &[],
            [b';', rest @ ..] => rest.trim_ascii(),
            _ => return None,
        };
    }
    address(&found?)
}

/// What stands between quotes, the first of which has been read, and what comes behind the second.
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

    /// The client of a request from 10.0.0.1, where 10.0.0.0/8 and 2001:db8:ffff::/48 are trusted.
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
        Client::of(PEER.parse().expect("an address"), &headers, &settings).ip.to_string()
    }

    #[test]
    fn hops_are_walked_from_the_right_as_long_as_they_are_trusted() {
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
            // What is no address ends the walk at the last hop that is known.
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
    fn rfc_7239_is_read_with_ports_quotes_brackets_and_names_that_hide() {
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
            // A quote that the client left open does not swallow what the proxy wrote.
            (&[r#"for="1.1.1.1, for=203.0.113.9"#], "203.0.113.9"),
            (&[r#"for="1.1.1.1\, for=203.0.113.9, for="10.0.0.2""#], "203.0.113.9"),
        ] {
            assert_eq!(client(ClientAddress::Forwarded, lines), expected, "{lines:?}");
        }
    }

    #[test]
    fn a_header_of_one_address_holds_one_address() {
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
    fn only_the_header_that_was_chosen_is_read_and_only_from_trusted_peers() {
        let mut headers = HeaderMap::new();
        headers.insert("x-forwarded-for", HeaderValue::from_static("1.1.1.1"));
        headers.insert("forwarded", HeaderValue::from_static("for=2.2.2.2"));
        headers.insert("x-real-ip", HeaderValue::from_static("3.3.3.3"));
        let of = |peer: &str, client_address| {
            let trusted_proxies = vec!["10.0.0.0/8".parse().expect("a network")];
            let settings = HttpSettings { trusted_proxies, client_address, ..HttpSettings::default() };
            let client = Client::of(peer.parse().expect("an address"), &headers, &settings);
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
