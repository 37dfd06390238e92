//! The key of a request: requests with the same key may share a response.

use std::fmt;
use std::sync::Arc;

use http::header::{
    ACCEPT, ACCEPT_ENCODING, ACCEPT_LANGUAGE, AUTHORIZATION, COOKIE, HOST, ORIGIN, PROXY_AUTHORIZATION, VARY,
};
use http::request::Parts;
use http::{HeaderMap, HeaderName};
use tollkeeper::Limiter;
use tollkeeper::http::{HttpFact, HttpSettings, InvalidRoute, Source};
use tollkeeper_core::{InvalidPolicy, Limit, Missing, Policy, Quota, Toll, Verb, digest};

use super::rule::SingleFlightRule;
use crate::address::Client;
use crate::facts::{PartialFacts, Reader};
use crate::header_values::list_items;
use crate::peer;

/// Headers that a response may depend on without saying so in `Vary`: what the client accepts, the origin that a page of
/// another site has, and what frameworks take for the protocol, host, path or method of the request. Otherwise a client
/// could choose the response that the others get.
const ALWAYS_KEYED: [HeaderName; 16] = [
    ACCEPT,
    ACCEPT_ENCODING,
    ACCEPT_LANGUAGE,
    ORIGIN,
    HeaderName::from_static("x-forwarded-host"),
    HeaderName::from_static("x-forwarded-port"),
    HeaderName::from_static("x-forwarded-prefix"),
    HeaderName::from_static("x-forwarded-proto"),
    HeaderName::from_static("x-forwarded-scheme"),
    HeaderName::from_static("x-forwarded-ssl"),
    HeaderName::from_static("x-http-method"),
    HeaderName::from_static("x-http-method-override"),
    HeaderName::from_static("x-method-override"),
    HeaderName::from_static("x-original-url"),
    HeaderName::from_static("x-requested-with"),
    HeaderName::from_static("x-rewrite-url"),
];

/// Reads the keys of requests by the rules of a layer. Facts, conditions and their encoding are those of limits.
#[derive(Clone, Debug)]
pub(super) struct KeyReader {
    http: HttpSettings,
    reader: Reader,
    /// One limit for each rule, of which only conditions and keys are used.
    policy: Arc<Policy>,
    rules: Vec<Arc<CompiledRule>>,
    /// Headers that identify a caller.
    identifying: Vec<HeaderName>,
    /// The headers that its limits read identify a caller, too.
    limiter: Option<Limiter>,
}

/// A rule: the parts of a request that are in its keys as they were sent.
#[derive(Debug)]
struct CompiledRule {
    path: bool,
    query: bool,
    host: bool,
    headers: Vec<HeaderName>,
}

/// The key of a request.
#[derive(Debug)]
pub(super) struct FlightKey {
    /// A digest, so that long requests take no more memory than short ones. It is cryptographic: clients choose much of
    /// what it is computed from, and requests with the same digest share a response.
    pub(super) digest: [u8; 32],
    rule: Arc<CompiledRule>,
}

/// Why the rules of a [`SingleFlightLayer`](super::SingleFlightLayer) are invalid.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidRules {
    /// A fact or pattern is invalid. The first rule is named `single-flight-1`.
    Policy(InvalidPolicy),
    /// A route of the settings is not a path pattern.
    Route(InvalidRoute),
}

impl KeyReader {
    pub(super) fn new(rules: Vec<SingleFlightRule>, http: HttpSettings) -> Result<KeyReader, InvalidRules> {
        let limits = rules.iter().enumerate().map(|(index, rule)| limit(index, rule)).collect();
        let declared = http.facts.iter().map(HttpFact::declared);
        let policy = Policy::new(limits).and_then(|policy| policy.declaring(declared));
        let policy = policy.map_err(InvalidRules::Policy)?.with_ipv6_prefix(http.ipv6_prefix);
        let reader = Reader::new(&http, &policy).map_err(InvalidRules::Route)?;
        let declared = http.facts.iter().filter_map(|fact| header_of(&fact.from));
        let identifying = [AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION].into_iter().chain(declared).collect();
        let rules = rules.iter().map(|rule| Arc::new(CompiledRule::new(rule, &http))).collect();
        Ok(KeyReader { http, reader, policy: Arc::new(policy), rules, identifying, limiter: None })
    }

    /// The same, with the limits of another limiter.
    pub(super) fn with_limiter(&self, limiter: Limiter) -> KeyReader {
        KeyReader { limiter: Some(limiter), ..self.clone() }
    }

    /// The key of a request under the first rule that applies; `None` if no rule does, or if the request identifies its
    /// caller by a header that is not in the key, or if a fact is ambiguous.
    pub(super) fn key(&self, parts: &Parts) -> Option<FlightKey> {
        let peer = if self.reader.needs_client() { peer::of(&parts.extensions) } else { None };
        let client = peer.map(|peer| Client::of(peer, &parts.headers, &self.http));
        let matched = if self.reader.needs_matched() { peer::matched(&parts.extensions) } else { None };
        let mut partial = PartialFacts::default();
        self.reader.head(parts, client.as_ref(), matched, &mut partial);
        let complete = partial.complete(&self.policy).ok().filter(|complete| complete.also.is_empty())?;
        let mut toll = Toll::new(&self.policy, Verb::Check);
        toll.add(complete.facts, 1).ok()?;
        let rule = &self.rules[toll.rule_indices().next()?];
        let is_hidden =
            |name: &str| parts.headers.contains_key(name) && !rule.headers.iter().any(|keyed| keyed == name);
        if self.identifying.iter().any(|name| is_hidden(name.as_str())) || self.limits_read(is_hidden) {
            return None;
        }
        let mut key = toll.get(0).key.to_bytes();
        push(&mut key, parts.method.as_str().as_bytes());
        rule.push_as_sent(&mut key, parts);
        Some(FlightKey { digest: digest::sha256(&key), rule: Arc::clone(rule) })
    }

    /// Whether a limit reads a header for which `test` holds. The limits are the active ones: they can be replaced.
    fn limits_read(&self, test: impl Fn(&str) -> bool) -> bool {
        let reads = |fact: &str| fact.strip_prefix("header.").is_some_and(&test);
        self.limiter.as_ref().is_some_and(|limiter| {
            limiter.with_policy(|policy| policy.rules().iter().any(|rule| rule.facts().any(reads)))
        })
    }
}

/// A limit with the conditions and keys of a rule. The absence of a fact counts as a value.
fn limit(index: usize, rule: &SingleFlightRule) -> Limit {
    let limit =
        Limit::new(format!("single-flight-{}", index + 1), Quota::per_second(1)).missing(Missing::Share);
    // `query` is no fact of limits, and is in the key as sent.
    let limit = rule.by.iter().filter(|fact| *fact != "query").fold(limit, Limit::by);
    rule.when.iter().fold(limit, |limit, (fact, pattern)| limit.when(fact, pattern))
}

impl CompiledRule {
    fn new(rule: &SingleFlightRule, http: &HttpSettings) -> CompiledRule {
        let source = |fact: &String| {
            let declared = http.facts.iter().find(|declared| declared.name == *fact);
            declared.map(|declared| declared.from.clone()).or_else(|| Source::of(fact))
        };
        let host = rule.is_by("host");
        let by_headers = rule.by.iter().filter_map(|fact| header_of(&source(fact)?));
        let headers = by_headers.chain(ALWAYS_KEYED).chain(host.then_some(HOST)).collect();
        CompiledRule { path: rule.is_by("path"), query: rule.is_by("query"), host, headers }
    }

    /// Appends the parts of the request that are compared as sent.
    fn push_as_sent(&self, key: &mut Vec<u8>, parts: &Parts) {
        let uri = &parts.uri;
        let authority = uri.authority().filter(|_| self.host).map(|authority| authority.as_str());
        let path = self.path.then(|| uri.path());
        let query = uri.query().filter(|_| self.query);
        for part in [authority, path, query] {
            // An absent query and an empty one (`/a?`) differ.
            key.push(u8::from(part.is_some()));
            push(key, part.unwrap_or_default().as_bytes());
        }
        for name in &self.headers {
            let lines = parts.headers.get_all(name);
            for line in lines {
                key.push(1);
                push(key, line.as_bytes());
            }
            key.push(0);
        }
    }
}

impl FlightKey {
    /// Whether everything that a response depends on, according to its `Vary`, is in the key.
    pub(super) fn contains_vary(&self, response: &HeaderMap) -> bool {
        list_items(response, &VARY)
            .all(|name| self.rule.headers.iter().any(|keyed| name.eq_ignore_ascii_case(keyed.as_ref())))
    }
}

/// The header that a fact is read from.
fn header_of(source: &Source) -> Option<HeaderName> {
    match source {
        Source::Header(name) => name.parse().ok(),
        Source::Cookie(_) => Some(COOKIE),
        _ => None,
    }
}

/// Appends a part with its length, so that parts cannot run into one another.
fn push(key: &mut Vec<u8>, part: &[u8]) {
    key.extend_from_slice(&part.len().to_le_bytes());
    key.extend_from_slice(part);
}

impl fmt::Display for InvalidRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InvalidRules::Policy(error) => error.fmt(f),
            InvalidRules::Route(error) => error.fmt(f),
        }
    }
}

impl fmt::Debug for InvalidRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for InvalidRules {}
