//! Reads the facts of an HTTP request that the active limits name, and no others.
//!
//! A [`Reader`] is built once for each policy and knows which facts to look for. A fact whose value is ambiguous
//! or unavailable (a duplicate parameter, a body that is too large) stays *unresolved*. That is an error only if
//! an enforced limit applies to the request and needs the fact.

use std::borrow::Cow;
use std::net::IpAddr;

use http::request::Parts;
use http::{HeaderMap, HeaderName, StatusCode, header};
use tollkeeper::facts::DeclaredFacts;
use tollkeeper::http::{EncodedSlashes, HttpFact, HttpSettings, InvalidRoute, Source};
use tollkeeper::{DeclaredFact, Facts, Mode, Policy, Value};
use tollkeeper_core::net;

use crate::address::Client;
use crate::body::BufferedBody;
use crate::body_fields::{self, Field, Form};
use crate::cookie::{self, Unclear};
use crate::path::{self, Spellings};
use crate::problem::Problem;
use crate::routes::Routes;

/// The value of the fact `route` for a request that matches no pattern.
pub const UNMATCHED: &str = "unmatched";

/// Reads the facts that a policy needs.
#[derive(Clone, Debug)]
pub struct Reader {
    /// Facts that are read from the head of a request.
    head: Vec<NeededFact>,
    /// Facts that are read from its body.
    body: Vec<NeededFact>,
    /// The name of every fact that some limit names, sorted.
    names: Vec<Box<str>>,
    declared: DeclaredFacts,
    routes: Routes,
    encoded_slashes: EncodedSlashes,
    ipv6_prefix: u8,
    needs_client: bool,
    needs_matched: bool,
    needs_path: bool,
}

/// A fact that some limit names, and how it is read.
#[derive(Clone, Debug)]
struct NeededFact {
    fact: HttpFact,
    /// Turns raw values into the values that limits see.
    declared: DeclaredFact,
    /// The parsed name of the header, if the fact is read from one.
    header: Option<HeaderName>,
    /// Whether it is the fact `ip`, and the client's address.
    is_ip: bool,
}

/// The facts that have been read from a request so far.
#[derive(Debug, Default)]
pub struct PartialFacts<'a> {
    facts: Facts<'a>,
    /// The facts of other spellings of the path, where servers may disagree about it.
    also: Vec<Facts<'a>>,
    unresolved: Vec<(&'a str, Unresolved)>,
    /// The path has an encoded slash, and the settings refuse such paths.
    is_refused: bool,
}

/// Facts that are complete: no limit needs an unresolved one.
#[derive(Clone, Copy, Debug)]
pub struct CompleteFacts<'s, 'a> {
    /// The facts of the first spelling of the path, which logs and decisions show.
    pub facts: &'s Facts<'a>,
    /// The facts of its other spellings, for [`Request::also`](tollkeeper::Request::also).
    pub also: &'s [Facts<'a>],
}

/// Why the value of a fact is unavailable or ambiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unresolved {
    /// The server did not provide the peer's address.
    NoPeer,
    /// The header, cookie, parameter or field occurs more than once.
    Duplicate,
    /// Another header differs only in `-` and `_`.
    TwinHeader,
    /// Another parameter or field differs only in case or brackets.
    SimilarName,
    /// More than one word follows the scheme in `Authorization`.
    ExtraWords,
    /// The header has a byte that Latin-1 servers trim.
    Latin1Blank,
    /// The cookie has characters that servers read differently.
    CookieSyntax,
    /// The body field is an array, an object or a fractional number.
    NotScalar,
    NotJson,
    /// The body has a `Content-Encoding`.
    Compressed,
    DuplicateContentType,
    Multipart,
    TooLarge,
    Truncated,
    /// The gateway forwarded only the head of the request.
    NoBody,
}

impl Reader {
    /// A reader of the facts that a policy needs. Fails if one of the routes in `settings` is not a path pattern.
    ///
    /// # Panics
    ///
    /// If the settings normalise a fact by NFKC, and this was built without the feature `nfkc`.
    pub fn new(settings: &HttpSettings, policy: &Policy) -> Result<Reader, InvalidRoute> {
        let active = policy.rules().iter().filter(|rule| rule.mode() != Mode::Off);
        let mut names: Vec<&str> = active.flat_map(|rule| rule.facts()).collect();
        names.sort_unstable();
        names.dedup();
        let needed = names.iter().filter_map(|name| {
            let name = *name;
            let configured = settings.facts.iter().find(|fact| fact.name == name).cloned();
            // A fact without a source may come from a closure of the application, or stay absent.
            let fact = configured.or_else(|| Some(HttpFact::new(name, Source::of(name)?)))?;
            let header = match &fact.from {
                Source::Header(name) => Some(name.parse().ok()?),
                _ => None,
            };
            let declared = fact.declared();
            let is_ip = name == tollkeeper::facts::IP && matches!(fact.from, Source::Ip) && !fact.trusted;
            Some(NeededFact { fact, declared, header, is_ip })
        });
        let needed: Vec<NeededFact> = needed.collect();
        let any = |test: fn(&HttpFact) -> bool| needed.iter().any(|needed| test(&needed.fact));
        let needs_client = any(|fact| fact.trusted || matches!(fact.from, Source::Ip));
        let routes = Routes::new(&settings.routes)?;
        let names_route = any(|fact| matches!(fact.from, Source::Route));
        let needs_matched = routes.is_empty() && names_route;
        let needs_path = any(|fact| matches!(fact.from, Source::Path)) || (names_route && !needs_matched);
        let (body, head) = needed.into_iter().partition(|needed| matches!(needed.fact.from, Source::Body(_)));
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

    /// Whether some fact depends on the client's address.
    pub fn needs_client(&self) -> bool {
        self.needs_client
    }

    /// Whether some fact depends on the route that the router matched.
    pub fn needs_matched(&self) -> bool {
        self.needs_matched
    }

    /// Whether some limit names this fact.
    pub fn names(&self, fact: &str) -> bool {
        self.names.binary_search_by(|name| (**name).cmp(fact)).is_ok()
    }

    /// Reads the facts in the head of a request. Without a `client`, facts that depend on its address stay unresolved.
    /// `matched` is the route that the router matched; it is used if the settings list no routes.
    pub fn head<'a>(
        &'a self,
        parts: &'a Parts,
        client: Option<&Client>,
        matched: Option<&'a str>,
        partial: &mut PartialFacts<'a>,
    ) {
        if self.refuses(parts) {
            partial.is_refused = true;
            return;
        }
        if !self.needs_path {
            return self.one_spelling(parts, client, matched, Cow::Borrowed(""), partial);
        }
        let Spellings { shown, others } = path::spellings(parts.uri.path(), self.encoded_slashes);
        self.one_spelling(parts, client, matched, shown, partial);
        for other in others {
            self.also(parts, client, matched, other, partial);
        }
    }

    /// Reads the facts in the head of a request with this spelling of its path.
    fn one_spelling<'a>(
        &'a self,
        parts: &'a Parts,
        client: Option<&Client>,
        matched: Option<&'a str>,
        path: Cow<'a, str>,
        partial: &mut PartialFacts<'a>,
    ) {
        for needed in &self.head {
            let name = needed.fact.name.as_str();
            if needed.is_ip
                && let Some(client) = client
            {
                partial.facts.put_ip(client.ip);
                continue;
            }
            match self.find(needed, parts, client, matched, &path) {
                Ok(Some(value)) => partial.facts.put(name, value),
                Ok(None) => {}
                Err(reason) => partial.unresolved.push((name, reason)),
            }
        }
    }

    /// Adds the facts of another spelling of the path, unless they equal those of an earlier spelling.
    #[cold]
    fn also<'a>(
        &'a self,
        parts: &'a Parts,
        client: Option<&Client>,
        matched: Option<&'a str>,
        path: String,
        partial: &mut PartialFacts<'a>,
    ) {
        let path = Cow::Owned(path);
        let mut facts = partial.facts.clone();
        let of_path = self.head.iter().filter(|needed| needed.fact.from.is_of_path());
        for needed in of_path.clone() {
            // Facts of the path are never unresolved, and present for all spellings or for none.
            if let Ok(Some(value)) = self.find(needed, parts, client, matched, &path) {
                facts.put(&needed.fact.name, value);
            }
        }
        let same = |other: &Facts<'_>| {
            of_path.clone().all(|needed| other.get(&needed.fact.name) == facts.get(&needed.fact.name))
        };
        if !same(&partial.facts) && !partial.also.iter().any(same) {
            partial.also.push(facts);
        }
    }

    /// Whether the settings refuse a request because of its path.
    #[inline]
    pub(crate) fn refuses(&self, parts: &Parts) -> bool {
        self.encoded_slashes == EncodedSlashes::Refuse && path::has_encoded_slash(parts.uri.path())
    }

    /// The value of one fact; `None` if it is absent, an error if it is unresolved.
    #[inline]
    fn find<'a>(
        &'a self,
        needed: &'a NeededFact,
        parts: &'a Parts,
        client: Option<&Client>,
        matched: Option<&'a str>,
        path: &Cow<'a, str>,
    ) -> Result<Option<Value<'a>>, Unresolved> {
        let fact = &needed.fact;
        if fact.trusted && !client.is_some_and(|client| client.trusted) {
            return Ok(None);
        }
        let bytes: Cow<'a, [u8]> = match &fact.from {
            Source::Ip => {
                let ip = IpAddr::from(client.ok_or(Unresolved::NoPeer)?.ip);
                if fact.name == tollkeeper::facts::IP {
                    return Ok(Some(ip.into()));
                }
                // The limiter masks only the fact `ip`, so a fact with another name is masked here.
                Cow::Owned(net::mask(ip, self.ipv6_prefix).to_string().into_bytes())
            }
            Source::Method => match parts.method.as_str() {
                method if method.bytes().any(|byte| byte.is_ascii_lowercase()) => {
                    Cow::Owned(method.to_ascii_uppercase().into_bytes())
                }
                method => Cow::Borrowed(method.as_bytes()),
            },
            Source::Path => into_bytes(path.clone()),
            Source::Route => {
                let found = if self.routes.is_empty() { matched } else { self.routes.find(path) };
                Cow::Borrowed(found.unwrap_or(UNMATCHED).as_bytes())
            }
            Source::Header(_) => {
                let name = needed.header.as_ref().expect("a header has a name");
                match header_value(&parts.headers, name, fact.many)? {
                    Some(value) if *name == header::AUTHORIZATION && !fact.many => {
                        credential(value, fact.strip.as_deref())?
                    }
                    Some(value) => value,
                    None => return Ok(None),
                }
            }
            Source::Cookie(name) => {
                let lines = parts.headers.get_all(header::COOKIE).iter().map(|line| line.as_bytes());
                match cookie::of(lines, name) {
                    Ok(Some(value)) => value,
                    Ok(None) => return Ok(None),
                    Err(Unclear::Twice) => return Err(Unresolved::Duplicate),
                    Err(Unclear::Characters) => return Err(Unresolved::CookieSyntax),
                }
            }
            Source::Host => match host(parts) {
                Field::Once(host) => host,
                Field::Absent => return Ok(None),
                _ => return Err(Unresolved::Duplicate),
            },
            Source::Query(parameter) => {
                let query = parts.uri.query().unwrap_or_default();
                match body_fields::of_pairs(query.as_bytes(), parameter) {
                    Field::Once(value) => value,
                    Field::Absent => return Ok(None),
                    Field::Alike => return Err(Unresolved::SimilarName),
                    _ => return Err(Unresolved::Duplicate),
                }
            }
            Source::Body(_) => unreachable!("facts of the body are in `self.body`"),
        };
        Ok(value(needed, bytes))
    }

    /// The value that limits see for a raw value from the application: normalised and hashed as declared.
    pub fn identified<'v>(&self, fact: &str, raw: Value<'v>) -> Value<'v> {
        self.declared.value(fact, raw)
    }

    /// Whether some limit may apply, judging by the head, and needs a fact of the body.
    #[inline]
    pub fn needs_body(&self, policy: &Policy, partial: &PartialFacts<'_>) -> bool {
        !self.body.is_empty() && self.body_need(policy, partial).is_some()
    }

    /// The first such limit and its fact, such as `login` and `body.email`.
    pub fn body_need<'p>(
        &self,
        policy: &'p Policy,
        partial: &PartialFacts<'_>,
    ) -> Option<(&'p str, &'p str)> {
        if self.body.is_empty() || partial.is_refused {
            return None;
        }
        let in_body = |name: &str| self.body.iter().any(|needed| needed.fact.name == name);
        let needs = |rule: &&tollkeeper::Rule| partial.readings().any(|facts| rule.needs(facts, in_body));
        let rule = policy.rules().iter().find(needs)?;
        Some((rule.name(), rule.facts().find(|fact| in_body(fact))?))
    }

    /// Reads the facts in the body of a request.
    pub fn body<'a>(
        &'a self,
        headers: &HeaderMap,
        body: &'a BufferedBody,
        client: Option<Client>,
        partial: &mut PartialFacts<'a>,
    ) {
        let mut types = headers.get_all(header::CONTENT_TYPE).iter().map(|value| value.as_bytes());
        let (content_type, second_type) = (types.next(), types.next());
        let is_identity = |value: &http::HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"identity");
        let is_compressed = !headers.get_all(header::CONTENT_ENCODING).iter().all(is_identity);
        for needed in &self.body {
            let fact = &needed.fact;
            let Source::Body(field) = &fact.from else {
                unreachable!("facts of the head are in `self.head`")
            };
            if fact.trusted && !client.is_some_and(|client| client.trusted) {
                continue;
            }
            let reason = match body {
                BufferedBody::TooLarge => Unresolved::TooLarge,
                BufferedBody::Broken => Unresolved::Truncated,
                BufferedBody::NotForwarded => Unresolved::NoBody,
                BufferedBody::All(_) if is_compressed => Unresolved::Compressed,
                BufferedBody::All(body) if second_type.is_some() && !body.is_empty() => {
                    Unresolved::DuplicateContentType
                }
                BufferedBody::All(body) => {
                    match body_fields::of_body(Form::of(content_type, body), body, field) {
                        Ok(Field::Absent) => continue,
                        Ok(Field::Once(found)) => {
                            if let Some(value) = value(needed, found) {
                                partial.put_everywhere(&fact.name, value);
                            }
                            continue;
                        }
                        Ok(Field::Twice) => Unresolved::Duplicate,
                        Ok(Field::NoText) => Unresolved::NotScalar,
                        Ok(Field::Alike) => Unresolved::SimilarName,
                        Ok(Field::Unread) => Unresolved::Multipart,
                        Err(body_fields::NotJson) => Unresolved::NotJson,
                    }
                }
            };
            partial.unresolved.push((&fact.name, reason));
        }
    }
}

impl<'a> PartialFacts<'a> {
    /// Sets a fact that the application supplies. It replaces a value from the request, and resolves an unresolved one.
    pub fn put(&mut self, name: &'a str, value: Value<'a>) {
        if !self.unresolved.is_empty() {
            self.unresolved.retain(|(unresolved, _)| *unresolved != name);
        }
        self.put_everywhere(name, value);
    }

    /// Sets a fact in the facts of every spelling of the path.
    fn put_everywhere(&mut self, name: &'a str, value: Value<'a>) {
        for facts in &mut self.also {
            facts.put(name, value.clone());
        }
        self.facts.put(name, value);
    }

    /// The facts of every spelling of the path.
    fn readings(&self) -> impl Iterator<Item = &Facts<'a>> {
        std::iter::once(&self.facts).chain(&self.also)
    }

    /// The facts. Fails if an enforced limit that may apply needs an unresolved one, or if the path is refused.
    #[inline]
    pub fn complete(&self, policy: &Policy) -> Result<CompleteFacts<'_, 'a>, Problem> {
        if self.is_refused || !self.unresolved.is_empty() {
            self.check(policy)?;
        }
        Ok(CompleteFacts { facts: &self.facts, also: &self.also })
    }

    /// Fails as [`PartialFacts::complete`] does.
    #[cold]
    fn check(&self, policy: &Policy) -> Result<(), Problem> {
        if self.is_refused {
            let detail = "the path contains an encoded slash or a backslash (`%2F`, `%5C`, `\\`), which is not accepted";
            return Err(Problem::new(StatusCode::BAD_REQUEST, detail));
        }
        let is_unresolved = |name: &str| self.unresolved.iter().any(|(unresolved, _)| *unresolved == name);
        let needs = |rule: &&tollkeeper::Rule| {
            rule.mode() == Mode::Enforce && self.readings().any(|facts| rule.needs(facts, is_unresolved))
        };
        let Some(rule) = policy.rules().iter().find(needs) else { return Ok(()) };
        let (name, reason) = self
            .unresolved
            .iter()
            .find(|(unresolved, _)| rule.facts().any(|fact| fact == *unresolved))
            .expect("the rule needs one of them");
        Err(reason.problem(name))
    }
}

impl Unresolved {
    fn problem(self, fact: &str) -> Problem {
        let (status, reason) = match self {
            Unresolved::NoPeer => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "the peer address is unknown, the server must add it to the request",
            ),
            Unresolved::Duplicate => (StatusCode::BAD_REQUEST, "it occurs more than once, send it once"),
            Unresolved::TwinHeader => (
                StatusCode::BAD_REQUEST,
                "another header has the same name except for `-` and `_`, and some servers do not distinguish them",
            ),
            Unresolved::SimilarName => (
                StatusCode::BAD_REQUEST,
                "another field has the same name except for case or brackets (`Name`, `[name]`, `name[]`), and some \
                 servers do not distinguish them",
            ),
            Unresolved::ExtraWords => (
                StatusCode::BAD_REQUEST,
                "more than one word follows the scheme, and some servers read only the first of them",
            ),
            Unresolved::Latin1Blank => (
                StatusCode::BAD_REQUEST,
                "it is not UTF-8 and contains a byte that some servers treat as whitespace (0x85 or 0xA0)",
            ),
            Unresolved::CookieSyntax => (
                StatusCode::BAD_REQUEST,
                "the cookie's name differs in case, or its name or value contains characters that RFC 6265 does not \
                 allow and that servers read differently",
            ),
            Unresolved::NotScalar => {
                (StatusCode::BAD_REQUEST, "it must be a string, an integer, a boolean or null")
            }
            Unresolved::NotJson => (StatusCode::BAD_REQUEST, "the body is not valid JSON"),
            Unresolved::Compressed => {
                (StatusCode::BAD_REQUEST, "the body is compressed, send it without `Content-Encoding`")
            }
            Unresolved::DuplicateContentType => {
                (StatusCode::BAD_REQUEST, "`Content-Type` occurs more than once, send it once")
            }
            Unresolved::Multipart => (
                StatusCode::BAD_REQUEST,
                "`multipart/form-data` bodies are not read, send JSON or `application/x-www-form-urlencoded`",
            ),
            Unresolved::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "the body has more than 65536 bytes"),
            Unresolved::Truncated => (StatusCode::BAD_REQUEST, "the body is incomplete"),
            Unresolved::NoBody => (StatusCode::BAD_REQUEST, "the gateway does not forward the body"),
        };
        Problem::new(status, format!("fact `{fact}` is required but cannot be read: {reason}"))
    }
}

/// The value that limits see for raw bytes of a request: stripped, normalised and hashed; `None` if it is empty.
fn value<'a>(needed: &NeededFact, found: Cow<'a, [u8]>) -> Option<Value<'a>> {
    let raw = match &needed.fact.strip {
        Some(strip) => stripped(found, strip.as_bytes()),
        None => found,
    };
    Some(needed.declared.read(raw)).filter(|value| !matches!(value, Value::Text(text) if text.is_empty()))
}

fn into_bytes(text: Cow<'_, str>) -> Cow<'_, [u8]> {
    match text {
        Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
        Cow::Owned(text) => Cow::Owned(text.into_bytes()),
    }
}

/// Removes a prefix, ignoring case (`bearer` is the same scheme as `Bearer`). A space at the end of the prefix matches
/// one or more spaces and tabs.
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

/// The host, in lower case and without port and final dot. If the request target names a host, too, and it differs from
/// the `Host` header, the result is [`Field::Twice`]: servers may read either of them.
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
    let after_brackets = host.iter().rposition(|byte| *byte == b']').map_or(0, |index| index + 1);
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

/// The value of a header that may occur only once, or all values joined by `, ` if there may be `many`.
fn header_value<'a>(
    headers: &'a HeaderMap,
    name: &HeaderName,
    many: bool,
) -> Result<Option<Cow<'a, [u8]>>, Unresolved> {
    if headers.keys().any(|other| are_twins(name.as_str(), other.as_str())) {
        return Err(Unresolved::TwinHeader);
    }
    let mut lines = headers.get_all(name).iter().map(|line| line.as_bytes());
    let Some(mut all) = lines.next().map(Cow::Borrowed) else { return Ok(None) };
    for line in lines {
        if !many {
            return Err(Unresolved::Duplicate);
        }
        all.to_mut().extend_from_slice(b", ");
        all.to_mut().extend_from_slice(line);
    }
    // Python reads headers as Latin-1, where these bytes are whitespace: it removes them when it trims or splits a value.
    let is_blank = |byte: &u8| matches!(byte, 0x85 | 0xa0);
    if all.iter().any(is_blank) && std::str::from_utf8(&all).is_err() {
        return Err(Unresolved::Latin1Blank);
    }
    Ok(Some(all))
}

/// Schemes of `Authorization` that are followed by exactly one word.
const SCHEMES: [&str; 3] = ["Bearer", "Basic", "Token"];

/// The value of `Authorization` in its canonical form, `Bearer abc`. Servers ignore the case of the scheme and the
/// number of blanks after it, and many read only the second word and ignore the rest. A scheme that is neither known nor
/// stripped may have parameters, so its value is left unchanged.
fn credential<'a>(line: Cow<'a, [u8]>, strip: Option<&str>) -> Result<Cow<'a, [u8]>, Unresolved> {
    let mut words = line.split(|byte| matches!(byte, b' ' | b'\t')).filter(|word| !word.is_empty());
    let (Some(written), Some(token), more) = (words.next(), words.next(), words.next()) else {
        return Ok(line);
    };
    let mut schemes = SCHEMES.into_iter().chain(strip.map(str::trim_end));
    let Some(scheme) = schemes.find(|scheme| scheme.as_bytes().eq_ignore_ascii_case(written)) else {
        return Ok(line);
    };
    if more.is_some() {
        return Err(Unresolved::ExtraWords);
    }
    if written == scheme.as_bytes() && line.len() == written.len() + 1 + token.len() && !line.contains(&b'\t')
    {
        return Ok(line);
    }
    Ok(Cow::Owned([scheme.as_bytes(), b" ", token].concat()))
}

/// Whether two different header names are the same to servers that pass headers as variables, like CGI, WSGI and PHP:
/// `X-Api-Key` and `X_Api_Key` both become `HTTP_X_API_KEY`.
fn are_twins(name: &str, other: &str) -> bool {
    let alike = |(one, other): (u8, u8)| {
        one == other || !(one.is_ascii_alphanumeric() || other.is_ascii_alphanumeric())
    };
    name.len() == other.len() && name != other && name.bytes().zip(other.bytes()).all(alike)
}
