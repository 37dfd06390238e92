//! Properties of every path and every forwarding header, for `properties.rs`, its corpus and the fuzzer.

use std::net::IpAddr;

use http::{HeaderMap, HeaderValue};
use tollkeeper::http::{ClientAddress, EncodedSlashes, HttpSettings};
use tollkeeper_tower::address::{Client, address, is_trusted};
use tollkeeper_tower::path::{Spellings, normalized, spellings};

/// A path has one normal spelling: normalising is idempotent, and other spellings of the same path have the same one.
pub(crate) fn path(text: &str) {
    let normal = normalized(text);
    assert_eq!(normalized(&normal), normal, "not idempotent: {text:?}");
    assert!(normal.starts_with('/') && normal.is_ascii(), "{text:?}: {normal:?}");
    assert!(!normal.contains(';'), "{text:?}: {normal:?}");
    for segment in normal[1..].split('/') {
        assert!(!matches!(segment, "." | ".."), "{text:?}: {normal:?}");
        assert!(!segment.is_empty() || normal == "/", "{text:?}: {normal:?}");
    }
    for encoded in normal.split('%').skip(1) {
        let digits = encoded.get(..2).unwrap_or_else(|| panic!("{text:?}: {normal:?}"));
        let byte = u8::from_str_radix(digits, 16).unwrap_or_else(|_| panic!("{text:?}: {normal:?}"));
        let needless = byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
        assert!(!needless && digits == digits.to_uppercase(), "{text:?}: {normal:?}");
    }
    let Spellings { shown, others } = spellings(text, EncodedSlashes::Both);
    assert!(others.len() <= 5 && !others.contains(&shown.to_string()), "{text:?}: {shown:?} {others:?}");
    assert!(
        *shown == normal || others.iter().any(|other| *other == normal),
        "{text:?}: {shown:?} {others:?}"
    );
    for spelling in others.iter().map(String::as_str).chain([&*shown]) {
        let is_plain = |char: char| char.is_ascii_graphic() && !matches!(char, ';' | '?' | '#' | '\\');
        assert!(spelling.starts_with('/') && spelling.chars().all(is_plain), "{text:?}: {spelling:?}");
    }
    // Other spellings of the same path. Digits after a `%` must not be encoded themselves.
    let can_encode = |char: char| char.is_ascii_alphanumeric() && !normal.contains('%');
    let encode =
        |char: char| if can_encode(char) { format!("%{:02x}", u32::from(char)) } else { char.to_string() };
    let encoded: String = normal.chars().map(encode).collect();
    for other in [
        format!("{normal}/"),
        format!("/{normal}"),
        format!("{normal}/."),
        format!("{normal}/x/.."),
        format!("{normal};x=1"),
        format!("/.{normal}"),
        format!("/x/%2e%2E{normal}"),
        encoded,
    ] {
        assert_eq!(normalized(&other), normal, "{other:?}");
    }
}

/// Clients cannot spoof their address: whatever a client sends, the address that the trusted proxy appends counts.
pub(crate) fn forwarded(sent: &[u8]) {
    let trusted_proxies = vec!["10.0.0.0/8".parse().expect("a network")];
    let mut settings = HttpSettings { trusted_proxies, ..HttpSettings::default() };
    let (proxy, stranger) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([192, 0, 2, 1]));
    let client = IpAddr::from([203, 0, 113, 9]);
    for (client_address, name, appended) in [
        (ClientAddress::XForwardedFor, "x-forwarded-for", &b"203.0.113.9"[..]),
        (ClientAddress::XForwardedFor, "x-forwarded-for", b"203.0.113.9:80, 10.0.0.2"),
        (ClientAddress::Forwarded, "forwarded", b"for=203.0.113.9"),
        (ClientAddress::Forwarded, "forwarded", b"for=\"203.0.113.9:80\";by=_x, for=\"10.0.0.2\""),
    ] {
        settings.client_address = client_address;
        let Ok(sent_value) = HeaderValue::from_bytes(sent) else { return };
        let mut headers = HeaderMap::new();
        headers.append(name, sent_value);
        // The headers of an untrusted peer are ignored. Those of a trusted one yield some address, in canonical form.
        assert_eq!(Client::of(stranger, &headers, &settings), Client { ip: stranger.into(), trusted: false });
        let alone = Client::of(proxy, &headers, &settings);
        assert_eq!(IpAddr::from(alone.ip), IpAddr::from(alone.ip).to_canonical());
        // The proxy appends a header line, or extends the line that the client sent.
        headers.append(name, HeaderValue::from_bytes(appended).expect("a value"));
        assert_eq!(Client::of(proxy, &headers, &settings).ip, client.into(), "{sent:?}");
        let joined = [sent, b", ", appended].concat();
        let mut headers = HeaderMap::new();
        headers.append(name, HeaderValue::from_bytes(&joined).expect("a value"));
        assert_eq!(Client::of(proxy, &headers, &settings).ip, client.into(), "{joined:?}");
    }
}

/// A text that parses as an address has one canonical form, which parses to the same address.
pub(crate) fn one_address(text: &[u8]) {
    if let Some(ip) = address(text) {
        assert_eq!(ip, ip.to_canonical());
        assert_eq!(address(ip.to_string().as_bytes()), Some(ip));
        let trusted = ["0.0.0.0/0".parse().expect("a network")];
        assert_eq!(is_trusted(ip, &trusted), ip.is_ipv4());
        let mapped = if let IpAddr::V4(ip) = ip { ip.to_ipv6_mapped().to_string() } else { return };
        assert_eq!(address(mapped.as_bytes()), Some(ip));
    }
}
