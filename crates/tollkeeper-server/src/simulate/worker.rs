//! Decides batches in all worlds of one thread. Requests become facts through the reader of the middleware.

use std::borrow::Cow;

use hyper::http::request::Parts;
use hyper::http::{HeaderName, HeaderValue, Method, Request, Uri, header};
use tollkeeper::http::HttpSettings;
use tollkeeper::{Policy, Value};
use tollkeeper_tower::address::{self, Client};
use tollkeeper_tower::facts::{PartialFacts, Reader};

use super::batch::{Batch, BatchEntry};
use super::filter::Filter;
use super::logged::{Context, Part};
use super::world::{World, WorldResult};

/// Worlds that need the same facts, which are read once for all of them.
#[derive(Debug)]
pub struct Group {
    reader: FactReader,
    /// Each with its number among all worlds.
    worlds: Vec<(usize, World)>,
}

/// Reads the facts that a policy needs.
#[derive(Debug)]
pub struct FactReader {
    reader: Reader,
    http: HttpSettings,
}

/// The worlds of one thread.
#[derive(Debug)]
pub struct Worker {
    names: Names,
    filter: Option<Filter>,
    groups: Vec<Group>,
    /// How many requests the filter let pass.
    used: u64,
}

/// The names that the parts of a batch refer to by index.
#[derive(Clone, Debug)]
pub struct Names {
    headers: Vec<HeaderName>,
    /// A name that differs from each header only in `-` and `_`.
    twins: Vec<Option<HeaderName>>,
    facts: Vec<String>,
    /// Whether facts are already normalised and hashed.
    has_decided_facts: bool,
}

impl Names {
    /// The names of this context.
    pub fn new(context: &Context, has_decided_facts: bool) -> Names {
        let parsed = |name: &str| name.parse::<HeaderName>().ok();
        let headers = context.wanted.names().iter().filter_map(|name| parsed(name)).collect();
        let twin = |name: &String| {
            let twin =
                if name.contains('-') { name.replacen('-', "_", 1) } else { name.replacen('_', "-", 1) };
            parsed(&twin).filter(|_| twin != *name)
        };
        let twins = context.wanted.names().iter().map(twin).collect();
        Names { headers, twins, facts: context.facts.clone(), has_decided_facts }
    }
}

impl FactReader {
    /// A reader of the facts that this policy needs.
    pub fn new(http: &HttpSettings, policy: &Policy) -> anyhow::Result<FactReader> {
        Ok(FactReader { reader: Reader::new(http, policy)?, http: http.clone() })
    }

    /// Reads the facts of a request; the application's own facts are those that the log has.
    pub fn read<'a>(
        &'a self,
        head: &'a Parts,
        entry: &BatchEntry,
        batch: &'a Batch,
        policy: &Policy,
        names: &'a Names,
    ) -> PartialFacts<'a> {
        let mut seen = PartialFacts::default();
        let client = entry.peer.map(|peer| Client::of(peer, &head.headers, &self.http));
        self.reader.head(head, client.as_ref(), None, &mut seen);
        for (part, bytes) in batch.parts(entry) {
            let Part::Fact(index) = part else { continue };
            let name = names.facts[usize::from(index)].as_str();
            if self.reader.names(name) {
                seen.put(name, names.value(name, bytes, policy));
            }
        }
        seen
    }
}

impl Names {
    fn value<'a>(&self, name: &str, bytes: &'a [u8], policy: &Policy) -> Value<'a> {
        let text = || String::from_utf8_lossy(bytes);
        if name == tollkeeper::facts::IP {
            return address::address(bytes).map_or_else(|| text().into(), Value::from);
        }
        if !self.has_decided_facts {
            return policy.declared().read(name, Cow::Borrowed(bytes));
        }
        // The log has only the first digits of a hash. They are a key of their own, and shown as they are.
        let hash =
            bytes.strip_prefix(b"sha256:").map(|digits| format!("{:0<32}", String::from_utf8_lossy(digits)));
        hash.and_then(|hash| Value::from_hash(&hash)).unwrap_or_else(|| text().into())
    }
}

impl Group {
    /// Worlds, each with its number, that need the facts of this reader.
    pub fn new(reader: FactReader, worlds: Vec<(usize, World)>) -> Group {
        Group { reader, worlds }
    }
}

impl Worker {
    /// A worker for these groups.
    pub fn new(names: Names, filter: Option<Filter>, groups: Vec<Group>) -> Worker {
        Worker { names, filter, groups, used: 0 }
    }

    /// Decides the requests of a batch, in order.
    pub fn decide(&mut self, batch: &Batch) {
        let (mut head, ()) = Request::new(()).into_parts();
        for entry in batch.entries() {
            self.fill(&mut head, batch, entry);
            if self.filter.as_ref().is_some_and(|filter| !filter.admits(&head, entry, batch, &self.names)) {
                continue;
            }
            self.used += 1;
            for group in &mut self.groups {
                let Some((_, first)) = group.worlds.first() else { continue };
                let seen = group.reader.read(&head, entry, batch, first.policy(), &self.names);
                match seen.complete(first.policy()) {
                    Ok(facts) => group.worlds.iter_mut().for_each(|(_, world)| world.decide(entry, facts)),
                    Err(_) => group.worlds.iter_mut().for_each(|(_, world)| world.reject(entry)),
                }
            }
        }
    }

    /// Makes the head of a request from what the log says.
    fn fill(&self, head: &mut Parts, batch: &Batch, entry: &BatchEntry) {
        head.headers.clear();
        head.method = Method::GET;
        head.uri = Uri::default();
        for (part, bytes) in batch.parts(entry) {
            let (name, value) = match part {
                Part::Method => {
                    head.method = Method::from_bytes(bytes).unwrap_or_default();
                    continue;
                }
                Part::Target => {
                    head.uri = Uri::try_from(bytes).unwrap_or_default();
                    continue;
                }
                Part::Host => (&header::HOST, bytes),
                Part::Header(index) => (&self.names.headers[usize::from(index)], bytes),
                Part::Twin(index) => match &self.names.twins[usize::from(index)] {
                    Some(name) => (name, bytes),
                    None => continue,
                },
                Part::Fact(_) => continue,
            };
            // No server would have accepted another value.
            if let Ok(value) = HeaderValue::from_bytes(value) {
                head.headers.append(name, value);
            }
        }
    }

    /// The results of its worlds, by their numbers, and how many requests they decided.
    pub fn finish(&self, most: usize) -> (Vec<(usize, WorldResult)>, u64) {
        let worlds = self.groups.iter().flat_map(|group| &group.worlds);
        (worlds.map(|(number, world)| (*number, world.finish(most))).collect(), self.used)
    }
}
