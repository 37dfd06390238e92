//! Access control by bearer token. Only the SHA-256 of a token is stored, and digests are compared in constant time.
//!
//! Every transport checks its calls here: HTTP by endpoint, RESP and gRPC with [`Permission::Data`].

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::digest::{hex, sha256};
use arc_swap::ArcSwap;
use hyper::header::{self, HeaderMap};
use subtle::ConstantTimeEq as _;
use tollkeeper::config::TokenDigest;

/// The permission that a call requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// Always granted: health checks and the API description.
    Open,
    /// Decisions, the active limits and metrics.
    Data,
    /// Decisions for a gateway that forwards its clients' headers, so its own token is in `X-Tollkeeper-Token`.
    Gateway,
    /// The usage of one key; a service that shows it to its customers needs no admin token.
    Usage,
    /// Calls that show keys and their usage.
    Views,
    /// Calls that change limits or counters.
    Admin,
}

/// Why a call is not permitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessError {
    /// The call needs a data token; none was sent, or an unknown one.
    NeedsToken,
    /// The call needs the admin token; none was sent, or another one.
    NeedsAdmin,
    /// No admin token is configured, so admin calls are off.
    AdminDisabled,
}

/// Checks tokens and `Host` headers against the config; a reload replaces the tokens.
#[derive(Debug)]
pub struct Access {
    /// Whether the data plane needs a token. Kept outside `tokens` because every check reads it.
    closed: AtomicBool,
    tokens: ArcSwap<Tokens>,
}

/// The configured tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Grants every permission.
    pub admin: Option<TokenDigest>,
    /// Grant the data permissions; if empty, these need no token.
    pub data: Vec<TokenDigest>,
    /// Whether views need no token although there is an admin token: the demo server without a config.
    pub demo: bool,
    /// Names allowed in `Host` where no token is needed, in lower case; IP addresses and `localhost` always are.
    pub hosts: Vec<String>,
}

impl Access {
    /// Access with these tokens.
    pub fn new(tokens: Tokens) -> Access {
        let closed = AtomicBool::new(!tokens.data.is_empty());
        Access { closed, tokens: ArcSwap::from_pointee(tokens) }
    }

    /// Replaces the tokens, for every request that starts later.
    pub fn change(&self, tokens: Tokens) {
        let closed = !tokens.data.is_empty();
        self.tokens.store(tokens.into());
        self.closed.store(closed, Relaxed);
    }

    /// Whether decisions need a token at all.
    #[inline]
    pub fn data_is_closed(&self) -> bool {
        self.closed.load(Relaxed)
    }

    /// Whether the `Host` of a call must be checked on a loopback listener, because the call needs no token.
    ///
    /// A web page in a local browser can point its own host name at this listener (DNS rebinding), but it has no token.
    /// Calls of gateways are exempt: they carry the `Host` of their clients.
    pub fn needs_host(&self, permission: Permission) -> bool {
        match permission {
            Permission::Open | Permission::Gateway => false,
            Permission::Data | Permission::Usage | Permission::Views | Permission::Admin => {
                self.admit(permission, None).is_ok()
            }
        }
    }

    /// Whether this `Host`, with or without a port, is an IP address, `localhost` or a name from the config. Any other
    /// name could be an attacker's that resolves to this server.
    pub fn knows_host(&self, host: &[u8]) -> bool {
        let Some(host) = std::str::from_utf8(host).ok().and_then(without_port) else { return false };
        let name = host.strip_suffix('.').unwrap_or(host);
        // Browsers resolve names under `localhost` to this machine without DNS.
        let local = name.rsplit('.').next().is_some_and(|last| last.eq_ignore_ascii_case("localhost"));
        let configured = |known: &String| known.eq_ignore_ascii_case(name);
        local || host.parse::<IpAddr>().is_ok() || self.tokens.load().hosts.iter().any(configured)
    }

    /// Whether a caller with this token has the permission.
    pub fn admit(&self, permission: Permission, token: Option<&[u8]>) -> Result<(), AccessError> {
        self.tokens.load().admit(permission, token)
    }
}

impl Tokens {
    fn admit(&self, permission: Permission, token: Option<&[u8]>) -> Result<(), AccessError> {
        match permission {
            Permission::Open => Ok(()),
            Permission::Usage if !self.data.is_empty() => self.admit_data(token),
            Permission::Usage | Permission::Views if self.admin.is_some() && !self.demo => {
                self.admit_admin(token)
            }
            Permission::Data | Permission::Gateway | Permission::Usage | Permission::Views => {
                self.admit_data(token)
            }
            Permission::Admin if self.admin.is_none() => Err(AccessError::AdminDisabled),
            Permission::Admin => self.admit_admin(token),
        }
    }

    fn admit_data(&self, token: Option<&[u8]>) -> Result<(), AccessError> {
        let known = self.data.iter().chain(&self.admin);
        if self.data.is_empty() || matches(token, known) { Ok(()) } else { Err(AccessError::NeedsToken) }
    }

    fn admit_admin(&self, token: Option<&[u8]>) -> Result<(), AccessError> {
        if matches(token, &self.admin) { Ok(()) } else { Err(AccessError::NeedsAdmin) }
    }
}

/// Whether the token is one of these. Compares with all of them, so that the time does not show which one matched.
fn matches<'k>(token: Option<&[u8]>, known: impl IntoIterator<Item = &'k TokenDigest>) -> bool {
    let Some(token) = token else { return false };
    let digest = sha256(token);
    known.into_iter().fold(false, |found, known| found | bool::from(known.0.ct_eq(&digest)))
}

/// The host in `host:port`, and in `[::1]:port`.
fn without_port(host: &str) -> Option<&str> {
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    if let Some(rest) = host.strip_prefix('[') {
        let (host, port) = rest.split_once(']')?;
        return (port.is_empty() || port.strip_prefix(':').is_some_and(is_port)).then_some(host);
    }
    match host.split_once(':') {
        None => Some(host),
        Some((host, port)) => is_port(port).then_some(host),
    }
}

/// The token in the headers of a request: `X-Tollkeeper-Token` for gateways, else `Authorization: Bearer`.
pub fn presented(permission: Permission, headers: &HeaderMap) -> Option<&[u8]> {
    if permission == Permission::Gateway {
        return headers.get("x-tollkeeper-token").map(|value| value.as_bytes());
    }
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token.trim_ascii())
}

/// A new random token of 256 bits, as 64 hex digits, and its digest.
pub fn generate_token() -> (String, TokenDigest) {
    let mut bytes = [0; 32];
    aws_lc_rs::rand::fill(&mut bytes).expect("the system gives random bytes");
    let token = hex(&bytes);
    let digest = TokenDigest(sha256(token.as_bytes()));
    (token, digest)
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn digest(token: &str) -> TokenDigest {
        TokenDigest(sha256(token.as_bytes()))
    }

    const PERMISSIONS: [Permission; 6] = [
        Permission::Open,
        Permission::Data,
        Permission::Gateway,
        Permission::Usage,
        Permission::Views,
        Permission::Admin,
    ];

    /// The result for each permission: `o` granted, `.` needs a token, `a` needs the admin token, `x` is off.
    fn granted(tokens: &Tokens, token: Option<&str>) -> String {
        let access = Access::new(tokens.clone());
        let result = |permission| match access.admit(permission, token.map(str::as_bytes)) {
            Ok(()) => 'o',
            Err(AccessError::NeedsToken) => '.',
            Err(AccessError::NeedsAdmin) => 'a',
            Err(AccessError::AdminDisabled) => 'x',
        };
        PERMISSIONS.into_iter().map(result).collect()
    }

    #[test]
    fn each_permission_needs_its_own_tokens() {
        let (admin, data) = (Some(digest("admin")), vec![digest("one"), digest("two")]);
        let none = Tokens::default();
        let only_admin = Tokens { admin, ..Tokens::default() };
        let only_data = Tokens { data: data.clone(), ..Tokens::default() };
        let both = Tokens { admin, data: data.clone(), demo: false, ..Tokens::default() };
        let demo = Tokens { admin, demo: true, ..Tokens::default() };
        // The permissions in order: open, data, gateway, usage, eyes, admin.
        for (tokens, token, expected) in [
            (&none, None, "ooooox"),
            (&none, Some("admin"), "ooooox"),
            (&only_admin, None, "oooaaa"),
            (&only_admin, Some("unknown"), "oooaaa"),
            (&only_admin, Some("admin"), "oooooo"),
            (&only_data, None, "o....x"),
            (&only_data, Some("unknown"), "o....x"),
            (&only_data, Some(""), "o....x"),
            (&only_data, Some("one"), "ooooox"),
            (&only_data, Some("two"), "ooooox"),
            (&both, None, "o...aa"),
            (&both, Some("one"), "ooooaa"),
            (&both, Some("admin"), "oooooo"),
            (&demo, None, "oooooa"),
            (&demo, Some("admin"), "oooooo"),
        ] {
            assert_eq!(granted(tokens, token), expected, "{tokens:?} {token:?}");
        }
    }

    #[test]
    fn hosts_are_addresses_localhost_and_configured_names() {
        let access = Access::new(Tokens { hosts: vec!["api.example.test".to_owned()], ..Tokens::default() });
        for (host, known) in [
            ("127.0.0.1", true),
            ("127.0.0.1:8080", true),
            ("192.0.2.7:80", true),
            ("[::1]:8080", true),
            ("[::1]", true),
            ("localhost", true),
            ("LocalHost:8080", true),
            ("localhost.", true),
            ("tollkeeper.localhost:8080", true),
            ("api.example.test", true),
            ("API.example.test.:8080", true),
            ("evil.example", false),
            ("evil.example:8080", false),
            ("localhost.evil.example", false),
            ("127.0.0.1.evil.example", false),
            ("evillocalhost", false),
            ("other.api.example.test", false),
            ("evil.example@127.0.0.1", false),
            ("127.0.0.1:80:80", false),
            ("[::1]evil.example", false),
            ("localhost:evil", false),
            ("", false),
            (":8080", false),
        ] {
            assert_eq!(access.knows_host(host.as_bytes()), known, "{host}");
        }
        assert!(!access.knows_host(b"\xff"));
    }

    #[test]
    fn host_is_checked_where_no_token_is_needed() {
        let (admin, data) = (Some(digest("admin")), vec![digest("one")]);
        for (tokens, expected) in [
            (Tokens::default(), "data usage eyes"),
            (Tokens { admin, ..Tokens::default() }, "data"),
            (Tokens { data: data.clone(), ..Tokens::default() }, ""),
            (Tokens { admin, data, ..Tokens::default() }, ""),
            (Tokens { admin, demo: true, ..Tokens::default() }, "data usage eyes"),
        ] {
            let access = Access::new(tokens);
            let names = ["open", "data", "gateway", "usage", "eyes", "admin"];
            let needing =
                PERMISSIONS.iter().zip(names).filter(|(permission, _)| access.needs_host(**permission));
            assert_eq!(needing.map(|(_, name)| name).collect::<Vec<_>>().join(" "), expected);
        }
    }

    #[test]
    fn changed_tokens_apply_to_later_requests() {
        let access = Access::new(Tokens::default());
        assert!(!access.data_is_closed());
        access.change(Tokens { data: vec![digest("one")], ..Tokens::default() });
        assert!(access.data_is_closed());
        assert_eq!(access.admit(Permission::Data, None), Err(AccessError::NeedsToken));
        access.change(Tokens::default());
        assert!(!access.data_is_closed());
        assert_eq!(access.admit(Permission::Data, None), Ok(()));
    }

    #[test]
    fn token_is_read_from_its_own_header_only() {
        let with = |name: &'static str, value: &'static str| {
            HeaderMap::from_iter([(header::HeaderName::from_static(name), HeaderValue::from_static(value))])
        };
        for (name, value, bearer, gateway) in [
            ("authorization", "Bearer t", Some("t"), None),
            ("authorization", "bearer  t ", Some("t"), None),
            ("authorization", "Basic t", None, None),
            ("authorization", "Bearer", None, None),
            ("authorization", "t", None, None),
            ("authorization", "", None, None),
            ("x-tollkeeper-token", "t", None, Some("t")),
            ("x-other", "Bearer t", None, None),
        ] {
            let headers = with(name, value);
            let read = |permission| {
                presented(permission, &headers).map(|token| std::str::from_utf8(token).expect("text"))
            };
            assert_eq!(
                (read(Permission::Data), read(Permission::Gateway)),
                (bearer, gateway),
                "{name}: {value}"
            );
        }
    }

    #[test]
    fn generated_tokens_differ_and_grant_admin() {
        let ((one, digest), (other, _)) = (generate_token(), generate_token());
        assert!(one.len() == 64 && one != other);
        let access = Access::new(Tokens { admin: Some(digest), ..Tokens::default() });
        assert_eq!(access.admit(Permission::Admin, Some(one.as_bytes())), Ok(()));
        assert_eq!(access.admit(Permission::Admin, Some(other.as_bytes())), Err(AccessError::NeedsAdmin));
    }
}
