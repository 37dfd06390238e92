//! Settings for HTTP requests and responses, from a config file or set by an application.
//!
//! The tower layer, forward-auth and the proxy read requests according to these settings.

use std::fmt;

use tollkeeper_core::DeclaredFact;
use tollkeeper_core::net::Network;

/// How facts are read from an HTTP request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpSettings {
    /// Forwarded addresses and trusted facts are accepted only from these networks.
    pub trusted_proxies: Vec<Network>,
    /// The header that the client address is read from.
    pub client_address: ClientAddress,
    /// How many leading bits of an IPv6 address form the key, such as 64.
    pub ipv6_prefix: u8,
    /// Facts in addition to those that every request has.
    pub facts: Vec<HttpFact>,
    /// Path patterns. The most specific one that matches becomes the fact `route`.
    pub routes: Vec<String>,
    /// Host names of the server, in lower case: `Host` may contain them on a loopback listener that needs no token.
    pub hosts: Vec<String>,
    /// What `%2F` and `%5C` in a path mean.
    pub encoded_slashes: EncodedSlashes,
}

/// What an encoded slash or backslash in a path means: `/api%2Flogin` is two segments to some servers and one to
/// others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EncodedSlashes {
    /// The path is read in each way that a common server would read it, and the limits of all routes that match
    /// apply.
    #[default]
    Both,
    /// Encoded slashes separate segments.
    Decode,
    /// Encoded slashes are part of a segment.
    Keep,
    /// Requests with encoded slashes are refused.
    Refuse,
}

/// The header that the client address is read from.
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
    /// The name of the fact, such as `user`.
    pub name: String,
    /// The part of the request that it is read from.
    pub from: Source,
    /// A prefix that is removed from the value, such as `Bearer `.
    pub strip: Option<String>,
    /// How the value is normalised, in this order.
    pub normalize: Vec<Normalization>,
    /// Whether only a hash of the value is kept, for secrets.
    pub hash: bool,
    /// Whether the fact is accepted only from trusted proxies.
    pub trusted: bool,
    /// Whether a header may have several lines, which are joined by `, `. Otherwise a request with a second line is
    /// refused if a limit needs the fact, because servers differ in which line they read.
    pub many: bool,
}

/// A part of an HTTP request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The client address.
    Ip,
    /// The method.
    Method,
    /// The host, without port.
    Host,
    /// The normalised path.
    Path,
    /// The pattern that the path matches.
    Route,
    /// A header, by its name in lower case.
    Header(String),
    /// A cookie.
    Cookie(String),
    /// A query parameter.
    Query(String),
    /// A top-level field of a JSON or form body.
    Body(String),
}

/// A step of normalising a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Normalization {
    /// Convert to lower case.
    Lowercase,
    /// Remove whitespace at both ends.
    Trim,
    /// Apply Unicode normalisation form NFKC.
    Nfkc,
}

impl Default for HttpSettings {
    /// No trusted proxies, and no facts besides those that every request has.
    fn default() -> HttpSettings {
        HttpSettings {
            trusted_proxies: Vec::new(),
            client_address: ClientAddress::XForwardedFor,
            ipv6_prefix: 64,
            facts: Vec::new(),
            routes: Vec::new(),
            hosts: Vec::new(),
            encoded_slashes: EncodedSlashes::Both,
        }
    }
}

impl ClientAddress {
    /// Parses `x-forwarded-for`, `forwarded` or `header.NAME`.
    pub fn of(text: &str) -> Option<ClientAddress> {
        match text {
            "x-forwarded-for" => Some(ClientAddress::XForwardedFor),
            "forwarded" => Some(ClientAddress::Forwarded),
            _ => text.strip_prefix("header.").and_then(header).map(ClientAddress::Header),
        }
    }
}

impl HttpFact {
    /// A fact that is read from this part of a request, unchanged.
    pub fn new(name: impl Into<String>, from: Source) -> HttpFact {
        let (strip, normalize) = (None, Vec::new());
        HttpFact { name: name.into(), from, strip, normalize, hash: false, trusted: false, many: false }
    }
}

impl HttpFact {
    /// How raw values of the fact are normalised and hashed before limits use them.
    ///
    /// # Panics
    ///
    /// If the fact uses [`Normalization::Nfkc`] and the feature `nfkc` is off.
    pub fn declared(&self) -> DeclaredFact {
        let normalized = self.normalize.iter().fold(DeclaredFact::new(&self.name), |fact, step| match step {
            Normalization::Lowercase => fact.lowercase(),
            Normalization::Trim => fact.trim(),
            Normalization::Nfkc => nfkc(fact),
        });
        if self.hash { normalized.hashed() } else { normalized }
    }
}

#[cfg(feature = "nfkc")]
fn nfkc(fact: DeclaredFact) -> DeclaredFact {
    use unicode_normalization::UnicodeNormalization;
    fact.normalize_with(|text| if text.is_ascii() { text.to_owned() } else { text.nfkc().collect() })
}

#[cfg(not(feature = "nfkc"))]
fn nfkc(fact: DeclaredFact) -> DeclaredFact {
    panic!("fact `{}`: `Normalization::Nfkc` needs the feature `nfkc`", fact.name())
}

impl Source {
    /// Whether the value depends on the path.
    pub fn is_of_path(&self) -> bool {
        matches!(self, Source::Path | Source::Route)
    }

    /// Parses the name of a part, such as `ip` or `header.NAME`.
    pub fn of(text: &str) -> Option<Source> {
        let Some((part, name)) = text.split_once('.') else {
            return match text {
                "ip" => Some(Source::Ip),
                "method" => Some(Source::Method),
                "host" => Some(Source::Host),
                "path" => Some(Source::Path),
                "route" => Some(Source::Route),
                _ => None,
            };
        };
        let named = (!name.is_empty()).then(|| name.to_owned());
        match part {
            "header" => header(name).map(Source::Header),
            "cookie" => header(name).map(|_| Source::Cookie(name.to_owned())),
            "query" => named.map(Source::Query),
            "body" => named.map(Source::Body),
            _ => None,
        }
    }
}

/// The header name in lower case; `None` if it is not a valid header name.
fn header(name: &str) -> Option<String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    (!name.is_empty() && name.bytes().all(allowed)).then(|| name.to_ascii_lowercase())
}

/// A format of rate-limit headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderDialect {
    /// `RateLimit-Policy` and `RateLimit` as structured fields, as in the current IETF draft.
    Ietf,
    /// `RateLimit-Limit` with a list of quotas.
    Draft03,
    /// `RateLimit-Policy` and three headers.
    Draft06,
    /// `RateLimit-Policy` and one header of pairs.
    Draft07,
    /// `X-RateLimit-Limit`, `X-RateLimit-Remaining`, `X-RateLimit-Reset`.
    XRateLimit,
}

impl HeaderDialect {
    /// All dialects.
    pub const ALL: [HeaderDialect; 5] = [
        HeaderDialect::Ietf,
        HeaderDialect::Draft03,
        HeaderDialect::Draft06,
        HeaderDialect::Draft07,
        HeaderDialect::XRateLimit,
    ];

    /// The name in the config file.
    pub const fn name(self) -> &'static str {
        match self {
            HeaderDialect::Ietf => "ietf",
            HeaderDialect::Draft03 => "draft-03",
            HeaderDialect::Draft06 => "draft-06",
            HeaderDialect::Draft07 => "draft-07",
            HeaderDialect::XRateLimit => "x-ratelimit",
        }
    }
}

/// Checks a path pattern: `/login`, `/users/{id}`, `/api/*`.
pub fn check_route(route: &str) -> Result<(), InvalidRoute> {
    let invalid = |help: &str| Err(InvalidRoute { route: route.to_owned(), help: help.to_owned() });
    if let Some((method, path)) = route.split_once(' ')
        && path.starts_with('/')
        && method.bytes().all(|byte| byte.is_ascii_uppercase())
    {
        return invalid(&format!(
            "a pattern has no method: `{path}`, and `when: {{ method: {method} }}` in a limit"
        ));
    }
    if !route.starts_with('/') {
        return invalid("it must begin with `/`");
    }
    if route.contains(['?', '#']) || route.chars().any(|char| char.is_control() || char == ' ') {
        return invalid("a path has no `?`, `#`, spaces or control characters");
    }
    if route == "/" {
        return Ok(());
    }
    let segments: Vec<&str> = route[1..].split('/').collect();
    for (index, segment) in segments.iter().enumerate() {
        let last = index + 1 == segments.len();
        let inner = segment.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
        match *segment {
            "" if last => return invalid("paths are compared without a slash at the end: leave it out"),
            "" => return invalid("paths are compared with single slashes"),
            "." | ".." => return invalid("paths are compared after `.` and `..` are resolved"),
            "*" if last => {}
            _ if segment.contains('*') => {
                return invalid("`*` must be the whole last segment: it matches the rest of the path");
            }
            _ if segment.contains(['{', '}']) => {
                let is_name = |name: &str| {
                    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
                };
                if !inner.is_some_and(is_name) {
                    return invalid(
                        "`{name}` must be a whole segment, with a name of letters, digits and `_`",
                    );
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// A text that is not a path pattern.
#[derive(Clone, PartialEq, Eq)]
pub struct InvalidRoute {
    /// The invalid text.
    pub route: String,
    /// How to fix it.
    pub help: String,
}

impl fmt::Display for InvalidRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is not a path pattern ({})", self.route.escape_debug(), self.help)
    }
}

/// As [`Display`](fmt::Display): this is what `main` prints when it returns the error.
impl fmt::Debug for InvalidRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for InvalidRoute {}
