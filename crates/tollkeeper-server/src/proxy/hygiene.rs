//! Makes a request head unambiguous before any limit sees it: what the limits see is what the upstream receives.
//!
//! hyper rejects invalid framing and writes the upstream request from parsed parts. This module adds the rules that
//! hyper leaves to its user: hop-by-hop headers, one host, one target form, one transfer coding.

use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::http::uri::{Authority, PathAndQuery};
use hyper::{Method, StatusCode, Uri, Version};
use tollkeeper_tower::header_values::list_items;

use super::error::ProxyError;

const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Headers that belong to one connection, in both directions. `TE` and `Upgrade` have rules of their own.
const HOP_BY_HOP: [HeaderName; 7] = [
    header::CONNECTION,
    header::TRANSFER_ENCODING,
    header::TRAILER,
    KEEP_ALIVE,
    PROXY_CONNECTION,
    HTTP2_SETTINGS,
    header::PROXY_AUTHORIZATION,
];

/// Puts the head of a request into its only form, or says why it cannot be forwarded. An HTTP/1.0 request without `Host`
/// gets that of the upstream. `is_read` tells whether facts are read from a header. Returns how many headers were dropped
/// because of an underscore in their name.
pub fn clean(
    parts: &mut Parts,
    upgrades: &[String],
    upstream: &HeaderValue,
    is_read: impl Fn(&HeaderName) -> bool,
) -> Result<u64, ProxyError> {
    check_method(&parts.method)?;
    check_transfer_coding(&parts.headers)?;
    set_host_and_target(parts)?;
    if !parts.headers.contains_key(header::HOST) {
        parts.headers.insert(header::HOST, upstream.clone());
    }
    let upgrade = wanted_upgrade(parts, upgrades);
    remove_hop_by_hop(&mut parts.headers, is_read);
    parts.headers.remove(header::UPGRADE);
    if let Some(upgrade) = upgrade {
        parts.headers.insert(header::UPGRADE, upgrade);
        parts.headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    }
    keep_only_trailers(&mut parts.headers);
    if parts.version == Version::HTTP_2 {
        join_cookies(&mut parts.headers);
    }
    Ok(drop_underscores(&mut parts.headers))
}

/// Removes from a response what belongs to the connection to the upstream. `Content-Length` means nothing beside
/// `Transfer-Encoding` (RFC 9112, 6.3), and would cut the body.
pub fn clean_response(headers: &mut HeaderMap) {
    if headers.contains_key(header::TRANSFER_ENCODING) {
        headers.remove(header::CONTENT_LENGTH);
    }
    remove_hop_by_hop(headers, |_| false);
    headers.remove(header::UPGRADE);
    headers.remove(header::TE);
}

fn check_method(method: &Method) -> Result<(), ProxyError> {
    match *method {
        Method::CONNECT | Method::TRACE => {
            let detail = "the methods CONNECT and TRACE are not forwarded";
            Err(ProxyError::Request(StatusCode::METHOD_NOT_ALLOWED, detail))
        }
        _ => Ok(()),
    }
}

/// hyper removes the last `chunked` from a body, and would lose every coding before it: of requests and of responses.
pub fn check_transfer_coding(headers: &HeaderMap) -> Result<(), ProxyError> {
    let mut lines = headers.get_all(header::TRANSFER_ENCODING).iter();
    match (lines.next(), lines.next()) {
        (None, _) => Ok(()),
        (Some(one), None) if one.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked") => Ok(()),
        _ => {
            let detail = "the only supported transfer coding is a single `chunked`";
            Err(ProxyError::Request(StatusCode::NOT_IMPLEMENTED, detail))
        }
    }
}

/// Leaves one `Host`, and a target that is a path (or `*`): an absolute target replaces `Host` (RFC 9112, 3.2.2).
fn set_host_and_target(parts: &mut Parts) -> Result<(), ProxyError> {
    let bad = |detail| Err(ProxyError::Request(StatusCode::BAD_REQUEST, detail));
    let hosts = parts.headers.get_all(header::HOST).iter().count();
    let is_http2 = parts.version == Version::HTTP_2;
    match hosts {
        0 if parts.version == Version::HTTP_11 => return bad("the request has no `Host`"),
        2.. => return bad("the request has more than one `Host`"),
        _ => {}
    }
    if let Some(host) = parts.headers.get(header::HOST)
        && !is_host(host)
    {
        return bad("`Host` must be a host with an optional port");
    }
    if let Some(authority) = parts.uri.authority() {
        if parts.uri.scheme().is_none() {
            return bad("the request target must be a path that begins with a slash");
        }
        let Some(host) = HeaderValue::from_str(authority.as_str()).ok().filter(is_host) else {
            return bad("the authority of the request target must be a host with an optional port");
        };
        if is_http2 && parts.headers.get(header::HOST).is_some_and(|other| other != host) {
            return bad("`:authority` and `host` differ");
        }
        parts.headers.insert(header::HOST, host);
    } else if is_http2 && hosts == 0 {
        return bad("the request has no `:authority`");
    }
    let path = parts.uri.path_and_query().map_or("/", PathAndQuery::as_str);
    match path {
        "*" if parts.method == Method::OPTIONS => {}
        path if path.starts_with('/') => {}
        // `http://host?query` has an empty path.
        path if path.starts_with('?') && parts.uri.authority().is_some() => {}
        _ => return bad("the request target must be a path that begins with a slash"),
    }
    if parts.uri.authority().is_some() {
        let path = if path.starts_with('?') { format!("/{path}") } else { path.to_owned() };
        // A path of the largest length has no room for the slash.
        parts.uri = path.parse::<Uri>().map_err(|_| ProxyError::LONG_TARGET)?;
    }
    Ok(())
}

/// Whether a value is a host with an optional port, and has no user name. Without a host, a request over HTTP/2 has no
/// `:authority`, and fails as if the upstream had failed.
fn is_host(value: &HeaderValue) -> bool {
    Authority::try_from(value.as_bytes()).is_ok_and(|authority| {
        !authority.host().is_empty()
            && !authority.as_str().contains('@')
            && authority.port().is_none_or(|port| port.as_str().is_empty() || authority.port_u16().is_some())
    })
}

/// The protocol that the client asks to switch to, if the proxy passes that on.
fn wanted_upgrade(parts: &Parts, upgrades: &[String]) -> Option<HeaderValue> {
    if parts.version != Version::HTTP_11 {
        return None;
    }
    let asks =
        list_items(&parts.headers, &header::CONNECTION).any(|token| token.eq_ignore_ascii_case(b"upgrade"));
    let mut wanted = list_items(&parts.headers, &header::UPGRADE);
    let (first, second) = (wanted.next()?, wanted.next());
    let is_known = upgrades.iter().any(|name| first.eq_ignore_ascii_case(name.as_bytes()));
    HeaderValue::from_bytes(first).ok().filter(|_| asks && is_known && second.is_none())
}

/// Removes the hop-by-hop headers, and those that `Connection` names. A client could name headers that the limits or
/// the upstream rely on, such as one that a load balancer has set and `Connection` has passed through, so these stay.
fn remove_hop_by_hop(headers: &mut HeaderMap, is_read: impl Fn(&HeaderName) -> bool) {
    let named: Vec<HeaderName> = list_items(headers, &header::CONNECTION)
        .filter_map(|token| HeaderName::from_bytes(token).ok())
        .filter(|name| headers.contains_key(name) && !is_end_to_end(name) && !is_read(name))
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Headers that `Connection` cannot remove.
fn is_end_to_end(name: &HeaderName) -> bool {
    [header::HOST, header::AUTHORIZATION, header::COOKIE, header::FORWARDED, header::VIA, header::TE]
        .contains(name)
        || name.as_str().starts_with("content-")
        || name.as_str().starts_with("x-forwarded-")
}

/// `TE: trailers` is the only value that is passed on, and only to HTTP/2.
fn keep_only_trailers(headers: &mut HeaderMap) {
    if !headers.contains_key(header::TE) {
        return;
    }
    let trailers = list_items(headers, &header::TE).any(|token| token.eq_ignore_ascii_case(b"trailers"));
    headers.remove(header::TE);
    if trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
}

/// HTTP/2 clients may split `Cookie` into several fields (RFC 9113, 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let lines: Vec<&[u8]> = headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if lines.len() > 1 {
        let joined = lines.join(&b"; "[..]);
        headers.insert(header::COOKIE, HeaderValue::from_bytes(&joined).expect("all parts are valid"));
    }
}

/// WSGI and CGI read `X_Forwarded_For` as `X-Forwarded-For`.
fn drop_underscores(headers: &mut HeaderMap) -> u64 {
    let names: Vec<HeaderName> = headers.keys().filter(|name| name.as_str().contains('_')).cloned().collect();
    let before = headers.len();
    names.iter().for_each(|name| drop(headers.remove(name)));
    u64::try_from(before - headers.len()).expect("a few headers")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An HTTP/2 request may have a path of the largest length that begins with its query.
    #[test]
    fn path_that_becomes_too_long_is_414() {
        for (length, status) in [(65_533, None), (65_534, Some(StatusCode::URI_TOO_LONG))] {
            let path = format!("?{}", "a".repeat(length - 1));
            let uri = Uri::builder().scheme("http").authority("a").path_and_query(path).build();
            let request = hyper::Request::get(uri.expect("valid")).version(Version::HTTP_2);
            let (mut parts, ()) = request.body(()).expect("valid").into_parts();
            let cleaned = clean(&mut parts, &[], &HeaderValue::from_static("a"), |_| false);
            let got = cleaned.err().map(|error| error.response().status());
            assert_eq!(got, status, "{length}");
        }
    }
}
