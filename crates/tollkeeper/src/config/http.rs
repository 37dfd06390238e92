//! How facts are read from an HTTP request.

use std::fmt;
use std::str::FromStr;

use tollkeeper_core::net::Network;

use super::excerpt::quoted;
use super::units::Wrong;

/// How facts are read from an HTTP request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpSettings {
    /// Forwarded addresses and trusted facts are believed only from these.
    pub trusted_proxies: Vec<Network>,
    /// The one header that addresses are taken from.
    pub client_address: ClientAddress,
    /// How many bits of an IPv6 address make a key.
    pub ipv6_prefix: u8,
    /// Facts beyond those that every request has.
    pub facts: Vec<HttpFact>,
    /// Path patterns as they are written, of which the most specific one becomes the fact `route`.
    pub routes: Vec<String>,
}

/// The header that the address of a client is taken from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientAddress {
    /// `X-Forwarded-For`.
    XForwardedFor,
    /// `Forwarded` (RFC 7239).
    Forwarded,
    /// A header that holds a single address, by its name in lower case.
    Header(String),
}

/// A fact that is read from a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpFact {
    /// Its name.
    pub name: String,
    /// Where it stands.
    pub from: Source,
    /// What is taken off the beginning of the value.
    pub strip: Option<String>,
    /// What is done to the value, in this order.
    pub normalize: Vec<Normalization>,
    /// Whether only a hash of the value is kept.
    pub hash: bool,
    /// Whether it is taken only from trusted proxies.
    pub trusted: bool,
}

/// A part of an HTTP request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The client's address.
    Ip,
    /// The method.
    Method,
    /// The host, without port.
    Host,
    /// The path, normalised.
    Path,
    /// The pattern that the path matches.
    Route,
    /// A header, by its name in lower case.
    Header(String),
    /// A cookie.
    Cookie(String),
    /// A parameter of the query.
    Query(String),
    /// A top-level field of the body.
    Body(String),
}

/// What is done to a value before it is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Normalization {
    /// Lower case.
    Lowercase,
    /// Without blanks at both ends.
    Trim,
    /// Unicode's NFKC.
    Nfkc,
}

/// The facts that every request has, under names that are theirs.
pub(super) const ALWAYS: [&str; 5] = ["ip", "method", "host", "path", "route"];
/// What the names of parts begin with.
const PARTS: [&str; 4] = ["header.", "cookie.", "query.", "body."];

impl FromStr for ClientAddress {
    type Err = InvalidSource;

    fn from_str(text: &str) -> Result<ClientAddress, InvalidSource> {
        match text {
            "x-forwarded-for" => Ok(ClientAddress::XForwardedFor),
            "forwarded" => Ok(ClientAddress::Forwarded),
            _ => match text.strip_prefix("header.").and_then(header) {
                Some(name) => Ok(ClientAddress::Header(name)),
                None => Err(InvalidSource(Wrong::new(
                    format!("{} names no header", quoted(text)),
                    "`x-forwarded-for`, `forwarded`, or `header.NAME` such as `header.x-real-ip`",
                ))),
            },
        }
    }
}

impl FromStr for Source {
    type Err = InvalidSource;

    fn from_str(text: &str) -> Result<Source, InvalidSource> {
        let wrong =
            |help: &str| InvalidSource(Wrong::new(format!("{} is no part of a request", quoted(text)), help));
        let (part, name) = match text.split_once('.') {
            None => {
                return match text {
                    "ip" => Ok(Source::Ip),
                    "method" => Ok(Source::Method),
                    "host" => Ok(Source::Host),
                    "path" => Ok(Source::Path),
                    "route" => Ok(Source::Route),
                    "header" | "cookie" | "query" | "body" => {
                        Err(wrong(&format!("say which: `{text}.NAME`")))
                    }
                    _ => Err(wrong(
                        "`header.NAME`, `cookie.NAME`, `query.NAME`, `body.NAME`, `ip`, `method`, `host`, `path`, `route`",
                    )),
                };
            }
            Some(parts) => parts,
        };
        let named = Some(name.to_owned()).filter(|name| !name.is_empty());
        let source = match part {
            "header" => header(name).map(Source::Header),
            "cookie" => header(name).map(|_| Source::Cookie(name.to_owned())),
            "query" => named.map(Source::Query),
            "body" => named.map(Source::Body),
            _ => return Err(wrong("`header.NAME`, `cookie.NAME`, `query.NAME` or `body.NAME`")),
        };
        source.ok_or_else(|| wrong(&format!("`{part}.` is followed by the name of a {part}")))
    }
}

/// The name of a header in lower case, if it can be one.
fn header(name: &str) -> Option<String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    (!name.is_empty() && name.bytes().all(allowed)).then(|| name.to_ascii_lowercase())
}

/// Checks that a fact of this name does not hide what every request says of itself.
pub(super) fn is_free(name: &str) -> bool {
    !ALWAYS.contains(&name) && !PARTS.iter().any(|part| name.starts_with(part))
}

/// Checks a path pattern: `/login`, `/users/{id}`, `/api/*`.
pub(super) fn check_route(route: &str) -> Result<(), Wrong> {
    let wrong = |help: &str| Err(Wrong::new(format!("{} is not a path pattern", quoted(route)), help));
    if let Some((method, path)) = route.split_once(' ')
        && path.starts_with('/')
        && method.bytes().all(|byte| byte.is_ascii_uppercase())
    {
        return wrong(&format!(
            "a pattern has no method: `{path}`, and `when: {{ method: {method} }}` in a limit"
        ));
    }
    if !route.starts_with('/') {
        return wrong("it begins with `/`");
    }
    if route.contains(['?', '#']) || route.chars().any(|char| char.is_control() || char == ' ') {
        return wrong("a path ends before `?` and has no blanks");
    }
    if route == "/" {
        return Ok(());
    }
    let segments: Vec<&str> = route[1..].split('/').collect();
    for (index, segment) in segments.iter().enumerate() {
        let last = index + 1 == segments.len();
        let inner = segment.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
        match *segment {
            "" if last => return wrong("paths are compared without a slash at the end: leave it out"),
            "" => return wrong("paths are compared with single slashes"),
            "." | ".." => return wrong("paths are compared after `.` and `..` are resolved"),
            "*" if last => {}
            _ if segment.contains('*') => {
                return wrong("`*` stands alone behind the last `/`, for the rest of the path");
            }
            _ if segment.contains(['{', '}']) => {
                let is_name = |name: &str| {
                    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
                };
                if !inner.is_some_and(is_name) {
                    return wrong(
                        "`{name}` stands for one whole segment, its name is of letters, digits and `_`",
                    );
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// What a route matches: two with the same are one route written twice.
pub(super) fn route_meaning(route: &str) -> String {
    let segments = route
        .split('/')
        .map(|segment| if segment.starts_with('{') { "{}".to_owned() } else { segment.to_lowercase() });
    segments.collect::<Vec<_>>().join("/")
}

/// A text that names no part of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidSource(pub(super) Wrong);

impl fmt::Display for InvalidSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl std::error::Error for InvalidSource {}
