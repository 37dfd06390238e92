//! Facts of an HTTP request: those that the limits in force name, and no others.
//!
//! A [`Reader`] is made once for each policy and knows what to look for. What it cannot tell for certain (a
//! parameter that is there twice, a body that is too large) stays *open*; whether that matters is asked of
//! the limits: only one that applies to this request and needs the fact makes it an error.

use std::borrow::Cow;

use http::request::Parts;
use http::{HeaderMap, HeaderName, StatusCode, header};
use tollkeeper::facts::DeclaredFacts;
use tollkeeper::http::{EncodedSlashes, HttpFact, HttpSettings, InvalidRoute, Source};
use tollkeeper::{DeclaredFact, Facts, Mode, Policy, Value, net};

use crate::address::Client;
use crate::body::Look;
use crate::body_fields::{self, Field, Form};
use crate::cookie::{self, Unclear};
use crate::path::{self, Spellings};
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
    encoded_slashes: EncodedSlashes,
    ipv6_prefix: u8,
    needs_client: bool,
    needs_matched: bool,
    needs_path: bool,
}

/// A fact that some limit names, and where it stands.
#[derive(Clone, Debug)]
struct Wanted {
    fact: HttpFact,
    /// How raw values become the values that limits see.
    declared: DeclaredFact,
    /// The name of the header, ready to be looked up.
    header: Option<HeaderName>,
}

/// What was read of a request.
#[derive(Debug, Default)]
pub struct Seen<'a> {
    facts: Facts<'a>,
    /// The facts of other spellings of the path, where servers may disagree about it.
    also: Vec<Facts<'a>>,
    open: Vec<(&'a str, Open)>,
    /// The path has an encoded slash, and these are refused.
    is_refused: bool,
}

/// Facts of which none is open that a limit needs.
#[derive(Clone, Copy, Debug)]
pub struct Settled<'s, 'a> {
    /// What is shown of the request.
    pub facts: &'s Facts<'a>,
    /// Other readings of it, for [`Request::also`](tollkeeper::Request::also).
    pub also: &'s [Facts<'a>],
}

/// Why a fact cannot be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    NoPeer,
    Twice,
    Twin,
    Alike,
    Words,
    Blanks,
    Unclear,
    NotText,
    NotJson,
    Encoded,
    Types,
    Parts,
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
            let declared = fact.declared();
            Some(Wanted { fact, declared, header })
        });
        let wanted: Vec<Wanted> = wanted.collect();
        let any = |test: fn(&HttpFact) -> bool| wanted.iter().any(|wanted| test(&wanted.fact));
        let needs_client = any(|fact| fact.trusted || matches!(fact.from, Source::Ip));
        let routes = Routes::new(&settings.routes)?;
        let names_route = any(|fact| matches!(fact.from, Source::Route));
        let needs_matched = routes.is_empty() && names_route;
        let needs_path = any(|fact| matches!(fact.from, Source::Path)) || (names_route && !needs_matched);
        let (body, head) = wanted.into_iter().partition(|wanted| matches!(wanted.fact.from, Source::Body(_)));
        let names = names.iter().map(|name| (*name).into()).collect();
        let HttpSettings { ipv6_prefix, encoded_slashes, .. } = *settings;
        let declared = DeclaredFacts::new(settings.facts.iter().map(HttpFact::declared));
        Ok(Reader {
            head,
            body,
            names,
            declared,
            routes,
            encoded_slashes,
            ipv6_prefix,
            needs_client,
            needs_matched,
            needs_path,
        })
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
        if self.refuses(parts) {
            seen.is_refused = true;
            return;
        }
        let Spellings { shown, others } = self.spellings(parts);
        for wanted in &self.head {
            let name = wanted.fact.name.as_str();
            match self.find(wanted, parts, client, matched, &shown) {
                Ok(Some(value)) => seen.facts.put(name, value),
                Ok(None) => {}
                Err(open) => seen.open.push((name, open)),
            }
        }
        for other in others {
            self.also(parts, client, matched, other, seen);
        }
    }

    /// Adds the facts of another spelling of the path, unless it makes no difference.
    #[cold]
    fn also<'a>(
        &'a self,
        parts: &'a Parts,
        client: Option<Client>,
        matched: Option<&'a str>,
        path: String,
        seen: &mut Seen<'a>,
    ) {
        let path = Cow::Owned(path);
        let mut facts = seen.facts.clone();
        let of_path = self.head.iter().filter(|wanted| wanted.fact.from.is_of_path());
        for wanted in of_path.clone() {
            // What depends on a path is never open, and there for all of its spellings or for none.
            if let Ok(Some(value)) = self.find(wanted, parts, client, matched, &path) {
                facts.put(&wanted.fact.name, value);
            }
        }
        let same = |other: &Facts<'_>| {
            of_path.clone().all(|wanted| other.get(&wanted.fact.name) == facts.get(&wanted.fact.name))
        };
        if !same(&seen.facts) && !seen.also.iter().any(same) {
            seen.also.push(facts);
        }
    }

    /// Whether a request is refused for its path.
    #[inline]
    pub(crate) fn refuses(&self, parts: &Parts) -> bool {
        self.encoded_slashes == EncodedSlashes::Refuse && path::has_encoded_slash(parts.uri.path())
    }

    #[inline]
    fn spellings<'a>(&self, parts: &'a Parts) -> Spellings<'a> {
        match self.needs_path {
            true => path::spellings(parts.uri.path(), self.encoded_slashes),
            false => Spellings { shown: Cow::Borrowed(""), others: Vec::new() },
        }
    }

    /// The value of one fact; nothing if there is none, and an error if it cannot be told.
    #[inline]
    fn find<'a>(
        &'a self,
        wanted: &'a Wanted,
        parts: &'a Parts,
        client: Option<Client>,
        matched: Option<&'a str>,
        path: &Cow<'a, str>,
    ) -> Result<Option<Value<'a>>, Open> {
        let fact = &wanted.fact;
        if fact.trusted && !client.is_some_and(|client| client.trusted) {
            return Ok(None);
        }
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
            Source::Path => text(path.clone()),
            Source::Route => {
                let found = if self.routes.is_empty() { matched } else { self.routes.find(path) };
                Cow::Borrowed(found.unwrap_or(UNMATCHED).as_bytes())
            }
            Source::Header(_) => {
                let name = wanted.header.as_ref().expect("a header has a name");
                match line(&parts.headers, name, fact.many)? {
                    Some(line) if *name == header::AUTHORIZATION && !fact.many => {
                        credential(line, fact.strip.as_deref())?
                    }
                    Some(line) => line,
                    None => return Ok(None),
                }
            }
            Source::Cookie(name) => {
                let lines = parts.headers.get_all(header::COOKIE).iter().map(|line| line.as_bytes());
                match cookie::of(lines, name) {
                    Ok(Some(value)) => value,
                    Ok(None) => return Ok(None),
                    Err(Unclear::Twice) => return Err(Open::Twice),
                    Err(Unclear::Characters) => return Err(Open::Unclear),
                }
            }
            Source::Host => match host(parts) {
                Field::Once(host) => host,
                Field::Absent => return Ok(None),
                _ => return Err(Open::Twice),
            },
            Source::Query(parameter) => {
                let query = parts.uri.query().unwrap_or_default();
                match body_fields::of_pairs(query.as_bytes(), parameter) {
                    Field::Once(value) => value,
                    Field::Absent => return Ok(None),
                    Field::Alike => return Err(Open::Alike),
                    _ => return Err(Open::Twice),
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
        let needs = |rule: &tollkeeper::Rule| seen.readings().any(|facts| rule.needs(facts, open));
        !self.body.is_empty() && !seen.is_refused && policy.rules().iter().any(needs)
    }

    /// Reads the body of a request.
    pub fn body<'a>(
        &'a self,
        headers: &HeaderMap,
        look: &'a Look,
        client: Option<Client>,
        seen: &mut Seen<'a>,
    ) {
        let mut types = headers.get_all(header::CONTENT_TYPE).iter().map(|value| value.as_bytes());
        let (content_type, second_type) = (types.next(), types.next());
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
                Look::All(body) if second_type.is_some() && !body.is_empty() => Open::Types,
                Look::All(body) => match body_fields::of_body(Form::of(content_type, body), body, field) {
                    Ok(Field::Absent) => continue,
                    Ok(Field::Once(found)) => {
                        if let Some(value) = value(wanted, found) {
                            seen.put_everywhere(&fact.name, value);
                        }
                        continue;
                    }
                    Ok(Field::Twice) => Open::Twice,
                    Ok(Field::NoText) => Open::NotText,
                    Ok(Field::Alike) => Open::Alike,
                    Ok(Field::Unread) => Open::Parts,
                    Err(body_fields::NotJson) => Open::NotJson,
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
        self.put_everywhere(name, value);
    }

    fn put_everywhere(&mut self, name: &'a str, value: Value<'a>) {
        for facts in &mut self.also {
            facts.put(name, value.clone());
        }
        self.facts.put(name, value);
    }

    fn readings(&self) -> impl Iterator<Item = &Facts<'a>> {
        std::iter::once(&self.facts).chain(&self.also)
    }

    /// The facts, unless an enforced limit that may apply needs one that cannot be told.
    pub fn settled(&self, policy: &Policy) -> Result<Settled<'_, 'a>, Problem> {
        if self.is_refused {
            let detail =
                "the path has an encoded slash or a backslash (`%2F`, `%5C`, `\\`), which is not accepted";
            return Err(Problem::new(StatusCode::BAD_REQUEST, detail));
        }
        let settled = Settled { facts: &self.facts, also: &self.also };
        if self.open.is_empty() {
            return Ok(settled);
        }
        let is_open = |name: &str| self.open.iter().any(|(open, _)| *open == name);
        let needs = |rule: &&tollkeeper::Rule| {
            rule.mode() == Mode::Enforce && self.readings().any(|facts| rule.needs(facts, is_open))
        };
        let Some(rule) = policy.rules().iter().find(needs) else { return Ok(settled) };
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
            Open::Twin => (
                StatusCode::BAD_REQUEST,
                "another header has the same name but for `-` and `_`, and some servers cannot tell them apart",
            ),
            Open::Alike => (
                StatusCode::BAD_REQUEST,
                "another field has the same name but for its case or brackets (`Name`, `[name]`, `name[]`), and some \
                 servers cannot tell them apart",
            ),
            Open::Words => (
                StatusCode::BAD_REQUEST,
                "more than one word follows the scheme, and some servers read only the first of them",
            ),
            Open::Blanks => (
                StatusCode::BAD_REQUEST,
                "it is not UTF-8, and has a byte that some servers take for a blank (0x85 or 0xA0)",
            ),
            Open::Unclear => (
                StatusCode::BAD_REQUEST,
                "its name has another case, or its name or value has characters that RFC 6265 does not allow in a \
                 cookie, and servers read them in different ways",
            ),
            Open::NotText => (StatusCode::BAD_REQUEST, "it is no text, whole number or truth"),
            Open::NotJson => (StatusCode::BAD_REQUEST, "the body is not JSON"),
            Open::Encoded => (StatusCode::BAD_REQUEST, "the body is compressed, so it cannot be read"),
            Open::Types => (StatusCode::BAD_REQUEST, "the type of the body is there twice"),
            Open::Parts => (
                StatusCode::BAD_REQUEST,
                "the body is a form in several parts (`multipart/form-data`), which is not read",
            ),
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

/// Removes a prefix, in upper or lower case (`bearer` is the same scheme as `Bearer`). A space at its end stands for
/// any number of spaces and tabs.
fn stripped<'a>(text: Cow<'a, [u8]>, strip: &[u8]) -> Cow<'a, [u8]> {
    let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let word = strip.strip_suffix(b" ").unwrap_or(strip);
    if !text.get(..word.len()).is_some_and(|start| start.eq_ignore_ascii_case(word)) {
        return text;
    }
    let rest = &text[word.len()..];
    let blanks = rest.iter().take_while(|byte| word.len() < strip.len() && is_blank(byte)).count();
    if word.len() < strip.len() && blanks == 0 {
        return text;
    }
    let start = word.len() + blanks;
    match text {
        Cow::Borrowed(text) => Cow::Borrowed(&text[start..]),
        Cow::Owned(mut text) => Cow::Owned(text.split_off(start)),
    }
}

/// The host, in lower case and without port and final dot. A request line may name it too: then both are the same, or
/// it is not known which of them the server reads.
fn host(parts: &Parts) -> Field<'_> {
    let mut lines = parts.headers.get_all(header::HOST).iter().map(|line| hostname(line.as_bytes()));
    let (line, second) = (lines.next(), lines.next());
    let target = parts.uri.authority().map(|authority| hostname(authority.as_str().as_bytes()));
    match (target, line) {
        _ if second.is_some() => Field::Twice,
        (Some(target), Some(line)) if target != line => Field::Twice,
        (Some(host), _) | (None, Some(host)) => Field::Once(host),
        (None, None) => Field::Absent,
    }
}

fn hostname(authority: &[u8]) -> Cow<'_, [u8]> {
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
        true => Cow::Owned(host.to_ascii_lowercase()),
        false => Cow::Borrowed(host),
    }
}

/// The only line of a header, or all of them joined by `, ` if there may be `many`.
fn line<'a>(headers: &'a HeaderMap, name: &HeaderName, many: bool) -> Result<Option<Cow<'a, [u8]>>, Open> {
    if headers.keys().any(|other| are_twins(name.as_str(), other.as_str())) {
        return Err(Open::Twin);
    }
    let mut lines = headers.get_all(name).iter().map(|line| line.as_bytes());
    let Some(mut all) = lines.next().map(Cow::Borrowed) else { return Ok(None) };
    for line in lines {
        if !many {
            return Err(Open::Twice);
        }
        all.to_mut().extend_from_slice(b", ");
        all.to_mut().extend_from_slice(line);
    }
    // Python reads headers as Latin-1, and takes these for blanks when it trims or divides a value.
    let is_blank = |byte: &u8| matches!(byte, 0x85 | 0xa0);
    if all.iter().any(is_blank) && std::str::from_utf8(&all).is_err() {
        return Err(Open::Blanks);
    }
    Ok(Some(all))
}

/// Schemes that one word follows.
const SCHEMES: [&str; 3] = ["Bearer", "Basic", "Token"];

/// The value of `Authorization` in one of its spellings, `Bearer abc`. Servers ignore the case of the scheme and the
/// number of blanks behind it, and many look at the second word only, whatever follows it. A scheme that is neither
/// known nor stripped may have parameters, so it is left as it is.
fn credential<'a>(line: Cow<'a, [u8]>, strip: Option<&str>) -> Result<Cow<'a, [u8]>, Open> {
    let mut words = line.split(|byte| matches!(byte, b' ' | b'\t')).filter(|word| !word.is_empty());
    let (Some(written), Some(token), more) = (words.next(), words.next(), words.next()) else {
        return Ok(line);
    };
    let mut schemes = SCHEMES.into_iter().chain(strip.map(str::trim_end));
    let Some(scheme) = schemes.find(|scheme| scheme.as_bytes().eq_ignore_ascii_case(written)) else {
        return Ok(line);
    };
    if more.is_some() {
        return Err(Open::Words);
    }
    if written == scheme.as_bytes() && line.len() == written.len() + 1 + token.len() && !line.contains(&b'\t')
    {
        return Ok(line);
    }
    Ok(Cow::Owned([scheme.as_bytes(), b" ", token].concat()))
}

/// Whether two different names of headers are one to servers that hand them on as variables, as CGI, WSGI and PHP do:
/// `X-Api-Key` and `X_Api_Key` are both `HTTP_X_API_KEY`.
fn are_twins(name: &str, other: &str) -> bool {
    let alike = |(one, other): (u8, u8)| {
        one == other || !(one.is_ascii_alphanumeric() || other.is_ascii_alphanumeric())
    };
    name.len() == other.len() && name != other && name.bytes().zip(other.bytes()).all(alike)
}
