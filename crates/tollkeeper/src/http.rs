//! How HTTP is read and answered, as plain data: what a config file says of it, and what an application
//! writes down itself.
//!
//! Whoever reads requests acts on these: the tower layer, forward-auth, the proxy.

use std::fmt;

use tollkeeper_core::DeclaredFact;
use tollkeeper_core::net::Network;

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
    /// Names of the server, in lower case: `Host` may carry them on a loopback listener where no token is needed.
    pub hosts: Vec<String>,
    /// What `%2F` and `%5C` in a path mean.
    pub encoded_slashes: EncodedSlashes,
}

/// What an encoded slash or backslash in a path means: `/api%2Flogin` is two segments to some servers and one to
/// others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EncodedSlashes {
    /// The path is read as every common server would read it, and the request pays the limits of all routes that
    /// it matches so.
    #[default]
    Both,
    /// They separate segments.
    Decode,
    /// They are part of a segment.
    Keep,
    /// Such a request is refused.
    Refuse,
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
    /// Whether a header may come in several lines, which are joined by `, `. Otherwise a second line makes the
    /// request one that cannot be judged: servers differ in which line they read.
    pub many: bool,
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

impl Default for HttpSettings {
    /// Nobody is trusted, and every request has the facts that all have.
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
    /// The header that `x-forwarded-for`, `forwarded` or `header.NAME` names, if it names one.
    pub fn of(text: &str) -> Option<ClientAddress> {
        match text {
            "x-forwarded-for" => Some(ClientAddress::XForwardedFor),
            "forwarded" => Some(ClientAddress::Forwarded),
            _ => text.strip_prefix("header.").and_then(header).map(ClientAddress::Header),
        }
    }
}

impl HttpFact {
    /// A fact that is read there, as it stands.
    pub fn new(name: impl Into<String>, from: Source) -> HttpFact {
        let (strip, normalize) = (None, Vec::new());
        HttpFact { name: name.into(), from, strip, normalize, hash: false, trusted: false, many: false }
    }
}

impl HttpFact {
    /// How raw values of the fact become the values that limits see.
    ///
    /// # Panics
    ///
    /// If it is normalised by NFKC, and this was built without the feature `nfkc`.
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
    /// Whether it depends on the path.
    pub fn is_of_path(&self) -> bool {
        matches!(self, Source::Path | Source::Route)
    }

    /// The part of a request that `ip`, `header.NAME` and the like name, if they name one.
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

/// The name of a header in lower case, if it can be one.
fn header(name: &str) -> Option<String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    (!name.is_empty() && name.bytes().all(allowed)).then(|| name.to_ascii_lowercase())
}

/// A family of rate-limit headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderDialect {
    /// `RateLimit-Policy` and `RateLimit` as structured fields: the draft of today.
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
    /// Every dialect.
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
        return invalid("it begins with `/`");
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

/// A text that is no path pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidRoute {
    /// The text.
    pub route: String,
    /// What would be right.
    pub help: String,
}

impl fmt::Display for InvalidRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is not a path pattern ({})", self.route.escape_debug(), self.help)
    }
}

impl std::error::Error for InvalidRoute {}
