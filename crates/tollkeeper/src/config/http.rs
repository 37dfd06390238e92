//! Parses the `http` settings of the config file: fact sources, path patterns and host names.

use super::excerpt::quoted;
use super::units::InvalidValue;
use crate::http::{self, ClientAddress, Source};

/// The facts that every request has: these names are reserved.
pub(super) const ALWAYS: [&str; 5] = ["ip", "method", "host", "path", "route"];
/// The prefixes of facts that are read from a request without being declared.
const PARTS: [&str; 4] = ["header.", "cookie.", "query.", "body."];

pub(super) fn client_address(text: &str) -> Result<ClientAddress, InvalidValue> {
    ClientAddress::of(text).ok_or_else(|| {
        InvalidValue::new(
            format!("{} does not name a header", quoted(text)),
            "`x-forwarded-for`, `forwarded`, or `header.NAME` such as `header.x-real-ip`",
        )
    })
}

pub(super) fn source(text: &str) -> Result<Source, InvalidValue> {
    Source::of(text).ok_or_else(|| {
        let help = match text.split_once('.') {
            None if matches!(text, "header" | "cookie" | "query" | "body") => {
                format!("add a name: `{text}.NAME`")
            }
            None => "`header.NAME`, `cookie.NAME`, `query.NAME`, `body.NAME`, `ip`, `method`, `host`, `path`, `route`"
                .to_owned(),
            Some((part @ ("header" | "cookie" | "query" | "body"), _)) => {
                format!("`{part}.` is followed by the name of a {part}")
            }
            Some(_) => "`header.NAME`, `cookie.NAME`, `query.NAME` or `body.NAME`".to_owned(),
        };
        InvalidValue::new(format!("{} is not a part of a request", quoted(text)), help)
    })
}

/// Whether a declared fact may have this name: it must not hide a fact that requests have anyway.
pub(super) fn is_free(name: &str) -> bool {
    !ALWAYS.contains(&name) && !PARTS.iter().any(|part| name.starts_with(part))
}

/// Checks a path pattern.
pub(super) fn route(text: &str) -> Result<String, InvalidValue> {
    match http::check_route(text) {
        Ok(()) => Ok(text.to_owned()),
        Err(error) => Err(InvalidValue::new(format!("{} is not a path pattern", quoted(text)), error.help)),
    }
}

/// The pattern in lower case and without the names in braces. Two patterns with the same canonical form match the
/// same paths.
pub(super) fn canonical_route(route: &str) -> String {
    let segments = route
        .split('/')
        .map(|segment| if segment.starts_with('{') { "{}".to_owned() } else { segment.to_lowercase() });
    segments.collect::<Vec<_>>().join("/")
}

/// Parses a host name: in lower case, without a trailing dot.
pub(super) fn host_name(text: &str) -> Result<String, InvalidValue> {
    let name = text.strip_suffix('.').unwrap_or(text);
    let is_label = |label: &str| {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        !label.is_empty() && label.bytes().all(allowed)
    };
    if name.split('.').all(is_label) {
        return Ok(name.to_ascii_lowercase());
    }
    let host = text.split_once("://").map_or(text, |(_, rest)| rest);
    let host = host.split(['/', ':']).next().unwrap_or_default();
    let help = if host != text && host.split('.').all(is_label) {
        format!("try `{host}`: without scheme, port and path")
    } else {
        "such as `api.example.test`, without patterns".to_owned()
    };
    Err(InvalidValue::new(format!("{} is not the name of a host", quoted(text)), help))
}
