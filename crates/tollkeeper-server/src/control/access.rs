//! Who may do what. Tokens are known by their SHA-256 only, and compared in constant time.
//!
//! Every transport asks here: HTTP for each call, RESP and gRPC for what they carry.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use arc_swap::ArcSwap;
use hyper::header::{self, HeaderMap};
use subtle::ConstantTimeEq as _;
use tollkeeper::config::TokenDigest;
use tollkeeper::digest::{hex, sha256};

/// What a caller wants to get at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// What everybody may know: that it lives, and how it is called.
    Open,
    /// Decisions, the limits in force, counters.
    Data,
    /// Decisions for a gateway that passes on headers of its clients: its token has a header of its own.
    Gateway,
    /// What one key has used: also for services that show it to their customers.
    Usage,
    /// What shows keys and their use.
    Eyes,
    /// What changes limits and counts.
    Admin,
}

/// Why a door stays shut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shut {
    /// It needs a token, and there was none or another.
    NeedsToken,
    /// It needs the admin token, and there was none or another.
    NeedsAdmin,
    /// There is no admin token, so nobody may.
    NobodyMay,
}

/// The locks on all doors. They change when the config does.
#[derive(Debug)]
pub struct Doors {
    /// Whether the data plane is closed: the only thing that a check has to know.
    closed: AtomicBool,
    tokens: ArcSwap<Tokens>,
}

/// Which tokens open what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Opens everything.
    pub admin: Option<TokenDigest>,
    /// Open the data plane; without any it is open.
    pub data: Vec<TokenDigest>,
    /// Whether everybody may look, although there is an admin token: a demo.
    pub demo: bool,
    /// Names that `Host` may carry where no token is needed, in lower case; besides addresses and `localhost`.
    pub hosts: Vec<String>,
}

impl Doors {
    /// Doors with these locks.
    pub fn new(tokens: Tokens) -> Doors {
        let closed = AtomicBool::new(!tokens.data.is_empty());
        Doors { closed, tokens: ArcSwap::from_pointee(tokens) }
    }

    /// Changes the locks, for every request that starts later.
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

    /// Whether a call is open to every page that a browser on this machine shows, if its listener is a loopback one.
    /// A page can give its own name the address of this listener (DNS rebinding), but it has no token. Gateways pass
    /// the Host of their clients.
    pub fn needs_host(&self, door: Door) -> bool {
        match door {
            Door::Open | Door::Gateway => false,
            Door::Data | Door::Usage | Door::Eyes | Door::Admin => self.admit(door, None).is_ok(),
        }
    }

    /// Whether this `Host`, which may have a port, is an address, `localhost` or a name from the config: not a name that
    /// someone else can give the address of this server.
    pub fn knows_host(&self, host: &[u8]) -> bool {
        let Some(host) = std::str::from_utf8(host).ok().and_then(without_port) else { return false };
        let name = host.strip_suffix('.').unwrap_or(host);
        // Browsers resolve names under `localhost` to this machine themselves.
        let local = name.rsplit('.').next().is_some_and(|last| last.eq_ignore_ascii_case("localhost"));
        let configured = |known: &String| known.eq_ignore_ascii_case(name);
        local || host.parse::<IpAddr>().is_ok() || self.tokens.load().hosts.iter().any(configured)
    }

    /// Whether a caller with this token may pass.
    pub fn admit(&self, door: Door, token: Option<&[u8]>) -> Result<(), Shut> {
        self.tokens.load().admit(door, token)
    }
}

impl Tokens {
    fn admit(&self, door: Door, token: Option<&[u8]>) -> Result<(), Shut> {
        match door {
            Door::Open => Ok(()),
            Door::Usage if !self.data.is_empty() => self.admit_data(token),
            Door::Usage | Door::Eyes if self.admin.is_some() && !self.demo => self.admit_admin(token),
            Door::Data | Door::Gateway | Door::Usage | Door::Eyes => self.admit_data(token),
            Door::Admin if self.admin.is_none() => Err(Shut::NobodyMay),
            Door::Admin => self.admit_admin(token),
        }
    }

    fn admit_data(&self, token: Option<&[u8]>) -> Result<(), Shut> {
        let known = self.data.iter().chain(&self.admin);
        if self.data.is_empty() || matches(token, known) { Ok(()) } else { Err(Shut::NeedsToken) }
    }

    fn admit_admin(&self, token: Option<&[u8]>) -> Result<(), Shut> {
        if matches(token, &self.admin) { Ok(()) } else { Err(Shut::NeedsAdmin) }
    }
}

/// Whether it is one of these: all are looked at, whichever it is.
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

/// The token in the headers of a request.
pub fn presented(door: Door, headers: &HeaderMap) -> Option<&[u8]> {
    if door == Door::Gateway {
        return headers.get("x-tollkeeper-token").map(|value| value.as_bytes());
    }
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token.trim_ascii())
}

/// A token that nobody can guess.
pub fn draw() -> (String, TokenDigest) {
    let mut bytes = [0; 32];
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    provider.secure_random.fill(&mut bytes).expect("the system gives random bytes");
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

    const DOORS: [Door; 6] = [Door::Open, Door::Data, Door::Gateway, Door::Usage, Door::Eyes, Door::Admin];

    /// Which doors a token opens: `o` open, `.` a token is needed, `a` the admin token is, `x` nobody may.
    fn opened(tokens: &Tokens, token: Option<&str>) -> String {
        let doors = Doors::new(tokens.clone());
        let said = |door| match doors.admit(door, token.map(str::as_bytes)) {
            Ok(()) => 'o',
            Err(Shut::NeedsToken) => '.',
            Err(Shut::NeedsAdmin) => 'a',
            Err(Shut::NobodyMay) => 'x',
        };
        DOORS.into_iter().map(said).collect()
    }

    #[test]
    fn each_door_opens_to_its_tokens_and_to_no_others() {
        let (admin, data) = (Some(digest("admin")), vec![digest("one"), digest("two")]);
        let none = Tokens::default();
        let only_admin = Tokens { admin, ..Tokens::default() };
        let only_data = Tokens { data: data.clone(), ..Tokens::default() };
        let both = Tokens { admin, data: data.clone(), demo: false, ..Tokens::default() };
        let demo = Tokens { admin, demo: true, ..Tokens::default() };
        // The doors in order: open, data, gateway, usage, eyes, admin.
        for (tokens, token, expected) in [
            (&none, None, "ooooox"),
            (&none, Some("admin"), "ooooox"),
            (&only_admin, None, "oooaaa"),
            (&only_admin, Some("nobody"), "oooaaa"),
            (&only_admin, Some("admin"), "oooooo"),
            (&only_data, None, "o....x"),
            (&only_data, Some("nobody"), "o....x"),
            (&only_data, Some(""), "o....x"),
            (&only_data, Some("one"), "ooooox"),
            (&only_data, Some("two"), "ooooox"),
            (&both, None, "o...aa"),
            (&both, Some("one"), "ooooaa"),
            (&both, Some("admin"), "oooooo"),
            (&demo, None, "oooooa"),
            (&demo, Some("admin"), "oooooo"),
        ] {
            assert_eq!(opened(tokens, token), expected, "{tokens:?} {token:?}");
        }
    }

    #[test]
    fn only_addresses_localhost_and_configured_names_are_known() {
        let doors = Doors::new(Tokens { hosts: vec!["api.example.test".to_owned()], ..Tokens::default() });
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
            assert_eq!(doors.knows_host(host.as_bytes()), known, "{host}");
        }
        assert!(!doors.knows_host(b"\xff"));
    }

    #[test]
    fn host_matters_where_no_token_is_needed() {
        let (admin, data) = (Some(digest("admin")), vec![digest("one")]);
        for (tokens, expected) in [
            (Tokens::default(), "data usage eyes"),
            (Tokens { admin, ..Tokens::default() }, "data"),
            (Tokens { data: data.clone(), ..Tokens::default() }, ""),
            (Tokens { admin, data, ..Tokens::default() }, ""),
            (Tokens { admin, demo: true, ..Tokens::default() }, "data usage eyes"),
        ] {
            let doors = Doors::new(tokens);
            let names = ["open", "data", "gateway", "usage", "eyes", "admin"];
            let needing = DOORS.iter().zip(names).filter(|(door, _)| doors.needs_host(**door));
            assert_eq!(needing.map(|(_, name)| name).collect::<Vec<_>>().join(" "), expected);
        }
    }

    #[test]
    fn changed_locks_hold_for_whoever_comes_next() {
        let doors = Doors::new(Tokens::default());
        assert!(!doors.data_is_closed());
        doors.change(Tokens { data: vec![digest("one")], ..Tokens::default() });
        assert!(doors.data_is_closed());
        assert_eq!(doors.admit(Door::Data, None), Err(Shut::NeedsToken));
        doors.change(Tokens::default());
        assert!(!doors.data_is_closed());
        assert_eq!(doors.admit(Door::Data, None), Ok(()));
    }

    #[test]
    fn a_token_is_read_from_its_own_header_and_no_other() {
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
            let read =
                |door| presented(door, &headers).map(|token| std::str::from_utf8(token).expect("text"));
            assert_eq!((read(Door::Data), read(Door::Gateway)), (bearer, gateway), "{name}: {value}");
        }
    }

    #[test]
    fn every_drawn_token_is_another_and_opens_what_it_was_drawn_for() {
        let ((one, digest), (other, _)) = (draw(), draw());
        assert!(one.len() == 64 && one != other);
        let doors = Doors::new(Tokens { admin: Some(digest), ..Tokens::default() });
        assert_eq!(doors.admit(Door::Admin, Some(one.as_bytes())), Ok(()));
        assert_eq!(doors.admit(Door::Admin, Some(other.as_bytes())), Err(Shut::NeedsAdmin));
    }
}
