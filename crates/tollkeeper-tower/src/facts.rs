//! Facts of an HTTP request: those that the limits in force name, and no others.
//!
//! A [`Reader`] is made once for each policy and knows what to look for. What it cannot tell for certain (a
//! parameter that is there twice, a body that is too large) stays *open*; whether that matters is asked of
//! the limits: only one that applies to this request and needs the fact makes it an error.

use std::borrow::Cow;

use http::request::Parts;
use http::{HeaderMap, HeaderName, StatusCode, header};
use tollkeeper::facts::DeclaredFacts;
use tollkeeper::http::{HttpFact, HttpSettings, InvalidRoute, Source};
use tollkeeper::{DeclaredFact, Facts, Mode, Policy, Value, net};

use crate::address::Client;
use crate::body::Look;
use crate::field::{self, Field, Form};
use crate::path;
use crate::problem::Problem;
use crate::routes::Routes;

/// The route of a request that matches no pattern.
pub const UNMATCHED: &str = "unmatched";

/// Reads the facts that a policy needs.
#[derive(Clone, Debug)]
pub struct Reader {
    /// Facts of the head of a request.
    head: Vec<Wanted>,
    /// Facts of the body.
    body: Vec<Wanted>,
    /// Every fact that some limit names, in order.
    names: Vec<Box<str>>,
    declared: DeclaredFacts,
    routes: Routes,
    ipv6_prefix: u8,
    needs_client: bool,
    needs_matched: bool,
}

/// A fact that some limit names, and where it stands.
#[derive(Clone, Debug)]
struct Wanted {
    fact: HttpFact,
    /// How raw values become the values that limits see.
    declared: DeclaredFact,
    /// The name of the header, ready to be looked up.
    header: Option<HeaderName>,
    /// Whether it is the address of the client, as it is.
    is_address: bool,
}

/// What was read of a request.
#[derive(Debug, Default)]
pub struct Seen<'a> {
    /// The facts.
    pub facts: Facts<'a>,
    open: Vec<(&'a str, Open)>,
}

/// Why a fact cannot be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    NoPeer,
    Twice,
    NotText,
    NotJson,
    Encoded,
    TooLarge,
    Broken,
    Elsewhere,
}

impl Reader {
    /// What a policy needs, read as the settings say; an error is a route that is no pattern.
    ///
    /// # Panics
    ///
    /// If a fact is to be normalised by NFKC, and this was built without the feature `nfkc`.
    pub fn new(settings: &HttpSettings, policy: &Policy) -> Result<Reader, InvalidRoute> {
        let in_force = policy.rules().iter().filter(|rule| rule.mode() != Mode::Off);
        let mut names: Vec<&str> = in_force.flat_map(|rule| rule.facts()).collect();
        names.sort_unstable();
        names.dedup();
        let wanted = names.iter().filter_map(|name| {
            let name = *name;
            let written = settings.facts.iter().find(|fact| fact.name == name).cloned();
            // A fact that nobody reads here may come from a closure, or never.
            let fact = written.or_else(|| Some(HttpFact::new(name, Source::of(name)?)))?;
            let header = match &fact.from {
                Source::Header(name) => Some(name.parse().ok()?),
                _ => None,
            };
            let is_address =
                fact.name == tollkeeper::facts::IP && matches!(fact.from, Source::Ip) && !fact.trusted;
            let declared = fact.declared();
            Some(Wanted { fact, declared, header, is_address })
        });
        let wanted: Vec<Wanted> = wanted.collect();
        let any = |test: fn(&HttpFact) -> bool| wanted.iter().any(|wanted| test(&wanted.fact));
        let needs_client = any(|fact| fact.trusted || matches!(fact.from, Source::Ip));
        let routes = Routes::new(&settings.routes)?;
        let needs_matched = routes.is_empty() && any(|fact| matches!(fact.from, Source::Route));
        let (body, head) = wanted.into_iter().partition(|wanted| matches!(wanted.fact.from, Source::Body(_)));
        let names = names.iter().map(|name| (*name).into()).collect();
        let ipv6_prefix = settings.ipv6_prefix;
        let declared = DeclaredFacts::new(settings.facts.iter().map(HttpFact::declared));
        Ok(Reader { head, body, names, declared, routes, ipv6_prefix, needs_client, needs_matched })
    }

    /// Whether it matters who sent a request.
    pub fn needs_client(&self) -> bool {
        self.needs_client
    }

    /// Whether it matters which route a router has found.
    pub fn needs_matched(&self) -> bool {
        self.needs_matched
    }

    /// Whether some limit names this fact.
    pub fn names(&self, fact: &str) -> bool {
        self.names.binary_search_by(|name| (**name).cmp(fact)).is_ok()
    }

    /// Reads the head of a request. Without a client, what depends on its address stays open; `matched` is
    /// the route that a router has found, for settings that list none.
    pub fn head<'a>(
        &'a self,
        parts: &'a Parts,
        client: Option<Client>,
        matched: Option<&'a str>,
        seen: &mut Seen<'a>,
    ) {
        let mut path = None;
        for wanted in &self.head {
            let name = wanted.fact.name.as_str();
            match self.find(wanted, parts, client, matched, &mut path) {
                Ok(Some(value)) => seen.facts.put(name, value),
                Ok(None) => {}
                Err(open) => seen.open.push((name, open)),
            }
        }
    }

    /// The value of the only fact that any limit names, if it is told by the head of this request.
    #[inline]
    pub(crate) fn only<'a>(
        &'a self,
        parts: &'a Parts,
        client: Option<Client>,
        matched: Option<&'a str>,
    ) -> Option<Value<'a>> {
        let ([wanted], []) = (&self.head[..], &self.body[..]) else { return None };
        if wanted.is_address {
            return client.map(|client| Value::Ip(client.ip));
        }
        self.find(wanted, parts, client, matched, &mut None).ok().flatten()
    }

    /// The value of one fact; nothing if there is none, and an error if it cannot be told.
    #[inline]
    fn find<'a>(
        &'a self,
        wanted: &'a Wanted,
        parts: &'a Parts,
        client: Option<Client>,
        matched: Option<&'a str>,
        path: &mut Option<Cow<'a, str>>,
    ) -> Result<Option<Value<'a>>, Open> {
        let fact = &wanted.fact;
        if fact.trusted && !client.is_some_and(|client| client.trusted) {
            return Ok(None);
        }
        let mut path = || path.get_or_insert_with(|| path::normalized(parts.uri.path())).clone();
        let bytes: Cow<'a, [u8]> = match &fact.from {
            Source::Ip => {
                let ip = client.ok_or(Open::NoPeer)?.ip;
                if fact.name == tollkeeper::facts::IP {
                    return Ok(Some(ip.into()));
                }
                // Under another name nobody else would mask it.
                Cow::Owned(net::mask(ip, self.ipv6_prefix).to_string().into_bytes())
            }
            Source::Method => match parts.method.as_str() {
                method if method.bytes().any(|byte| byte.is_ascii_lowercase()) => {
                    Cow::Owned(method.to_ascii_uppercase().into_bytes())
                }
                method => Cow::Borrowed(method.as_bytes()),
            },
            Source::Path => text(path()),
            Source::Route => {
                let found = if self.routes.is_empty() { matched } else { self.routes.find(&path()) };
                Cow::Borrowed(found.unwrap_or(UNMATCHED).as_bytes())
            }
            Source::Header(_) => {
                let name = wanted.header.as_ref().expect("a header has a name");
                return Ok(joined(&parts.headers, name).and_then(|lines| value(wanted, lines)));
            }
            Source::Cookie(cookie) => {
                let found = cookie_of(&parts.headers, cookie).map(Cow::Borrowed);
                return Ok(found.and_then(|found| value(wanted, found)));
            }
            Source::Host => match host(parts) {
                Field::Once(host) => host,
                Field::Absent => return Ok(None),
                Field::Twice | Field::NoText => return Err(Open::Twice),
            },
            Source::Query(parameter) => {
                let query = parts.uri.query().unwrap_or_default();
                match field::of_pairs(query.as_bytes(), parameter) {
                    Field::Once(value) => value,
                    Field::Absent => return Ok(None),
                    Field::Twice | Field::NoText => return Err(Open::Twice),
                }
            }
            Source::Body(_) => unreachable!("facts of the body are kept apart"),
        };
        Ok(value(wanted, bytes))
    }

    /// The value that limits see for a raw value that the application supplies.
    pub fn identified<'v>(&self, fact: &str, raw: Value<'v>) -> Value<'v> {
        self.declared.value(fact, raw)
    }

    /// Whether some limit needs a fact of the body, as far as the head tells.
    pub fn needs_body(&self, policy: &Policy, seen: &Seen<'_>) -> bool {
        let open = |name: &str| self.body.iter().any(|wanted| wanted.fact.name == name);
        !self.body.is_empty() && policy.rules().iter().any(|rule| rule.needs(&seen.facts, open))
    }

    /// Reads the body of a request.
    pub fn body<'a>(
        &'a self,
        headers: &HeaderMap,
        look: &'a Look,
        client: Option<Client>,
        seen: &mut Seen<'a>,
    ) {
        let content_type = headers.get(header::CONTENT_TYPE).map(|value| value.as_bytes());
        let plain = |value: &http::HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"identity");
        let is_plain = headers.get_all(header::CONTENT_ENCODING).iter().all(plain);
        for wanted in &self.body {
            let fact = &wanted.fact;
            let Source::Body(field) = &fact.from else { unreachable!("kept apart from the head's") };
            if fact.trusted && !client.is_some_and(|client| client.trusted) {
                continue;
            }
            let open = match look {
                Look::TooLarge => Open::TooLarge,
                Look::Broken => Open::Broken,
                Look::Elsewhere => Open::Elsewhere,
                Look::All(_) if !is_plain => Open::Encoded,
                Look::All(body) => match field::of_body(Form::of(content_type, body), body, field) {
                    Ok(Field::Absent) => continue,
                    Ok(Field::Once(found)) => {
                        seen.put_some(&fact.name, value(wanted, found));
                        continue;
                    }
                    Ok(Field::Twice) => Open::Twice,
                    Ok(Field::NoText) => Open::NotText,
                    Err(field::NotJson) => Open::NotJson,
                },
            };
            seen.open.push((&fact.name, open));
        }
    }
}

impl<'a> Seen<'a> {
    /// Puts in a fact that comes from elsewhere, and settles whatever was open about it.
    pub fn put(&mut self, name: &'a str, value: Value<'a>) {
        if !self.open.is_empty() {
            self.open.retain(|(open, _)| *open != name);
        }
        self.facts.put(name, value);
    }

    fn put_some(&mut self, name: &'a str, value: Option<Value<'a>>) {
        if let Some(value) = value {
            self.facts.put(name, value);
        }
    }

    /// The facts, unless an enforced limit that may apply needs one that cannot be told.
    pub fn settled(&self, policy: &Policy) -> Result<&Facts<'a>, Problem> {
        if self.open.is_empty() {
            return Ok(&self.facts);
        }
        let is_open = |name: &str| self.open.iter().any(|(open, _)| *open == name);
        let needs =
            |rule: &&tollkeeper::Rule| rule.mode() == Mode::Enforce && rule.needs(&self.facts, is_open);
        let Some(rule) = policy.rules().iter().find(needs) else { return Ok(&self.facts) };
        let (name, open) = self
            .open
            .iter()
            .find(|(open, _)| rule.facts().any(|fact| fact == *open))
            .expect("the rule needs one of them");
        Err(open.problem(name))
    }
}

impl Open {
    fn problem(self, fact: &str) -> Problem {
        let (status, what) = match self {
            Open::NoPeer => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "the address of the peer is unknown: the server must put it into the request",
            ),
            Open::Twice => (StatusCode::BAD_REQUEST, "it is there twice, and only one can be meant"),
            Open::NotText => (StatusCode::BAD_REQUEST, "it is no text, whole number or truth"),
            Open::NotJson => (StatusCode::BAD_REQUEST, "the body is not JSON"),
            Open::Encoded => (StatusCode::BAD_REQUEST, "the body is compressed, so it cannot be read"),
            Open::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "the body has more than 65536 bytes"),
            Open::Broken => (StatusCode::BAD_REQUEST, "the body ends before its end"),
            Open::Elsewhere => (StatusCode::BAD_REQUEST, "the body does not come here"),
        };
        Problem::new(status, format!("fact `{fact}` is needed: {what}"))
    }
}

/// The value that limits see for the raw bytes of a request; `None` if it is empty.
fn value<'a>(wanted: &Wanted, found: Cow<'a, [u8]>) -> Option<Value<'a>> {
    let raw = match &wanted.fact.strip {
        Some(strip) => stripped(found, strip.as_bytes()),
        None => found,
    };
    Some(wanted.declared.read(raw)).filter(|value| !matches!(value, Value::Text(text) if text.is_empty()))
}

fn text(text: Cow<'_, str>) -> Cow<'_, [u8]> {
    match text {
        Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
        Cow::Owned(text) => Cow::Owned(text.into_bytes()),
    }
}

/// Removes a prefix, in upper or lower case (`bearer` is the same scheme as `Bearer`). A prefix that ends with a
/// space also removes all further spaces.
fn stripped<'a>(text: Cow<'a, [u8]>, strip: &[u8]) -> Cow<'a, [u8]> {
    let begins = text.get(..strip.len()).is_some_and(|start| start.eq_ignore_ascii_case(strip));
    if !begins {
        return text;
    }
    let is_space = |byte: &&u8| strip.ends_with(b" ") && **byte == b' ';
    let start = strip.len() + text[strip.len()..].iter().take_while(is_space).count();
    match text {
        Cow::Borrowed(text) => Cow::Borrowed(&text[start..]),
        Cow::Owned(mut text) => Cow::Owned(text.split_off(start)),
    }
}

/// The host, in lower case and without port and final dot: of the request line, else of the header.
fn host(parts: &Parts) -> Field<'_> {
    let mut lines = parts.headers.get_all(header::HOST).iter();
    let authority = match parts.uri.authority() {
        Some(authority) => authority.as_str().as_bytes(),
        None => match (lines.next(), lines.next()) {
            (None, _) => return Field::Absent,
            (Some(line), None) => line.as_bytes(),
            (Some(_), Some(_)) => return Field::Twice,
        },
    };
    let host = match authority.iter().rposition(|byte| *byte == b'@') {
        Some(at) => &authority[at + 1..],
        None => authority,
    };
    let after_brackets = host.iter().rposition(|byte| *byte == b']').map_or(0, |place| place + 1);
    let host = match host[after_brackets..].iter().position(|byte| *byte == b':') {
        Some(colon) => &host[..after_brackets + colon],
        None => host,
    };
    let host = host.trim_ascii();
    let host = host.strip_suffix(b".").unwrap_or(host);
    match host.iter().any(u8::is_ascii_uppercase) {
        true => Field::Once(Cow::Owned(host.to_ascii_lowercase())),
        false => Field::Once(Cow::Borrowed(host)),
    }
}

/// All lines of a header, joined by `, `.
fn joined<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<Cow<'a, [u8]>> {
    let mut lines = headers.get_all(name).iter().map(|line| line.as_bytes());
    let mut all = Cow::Borrowed(lines.next()?);
    for line in lines {
        all.to_mut().extend_from_slice(b", ");
        all.to_mut().extend_from_slice(line);
    }
    Some(all)
}

/// The first cookie of that name.
fn cookie_of<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a [u8]> {
    let lines = headers.get_all(header::COOKIE).iter();
    let mut pairs = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b';'));
    pairs.find_map(|pair| {
        let equals = pair.iter().position(|byte| *byte == b'=')?;
        (pair[..equals].trim_ascii() == name.as_bytes()).then(|| pair[equals + 1..].trim_ascii())
    })
}
