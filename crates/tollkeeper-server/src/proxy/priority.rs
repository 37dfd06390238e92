//! Reads the priority of a request: the value of one fact.

use std::net::IpAddr;
use std::sync::Arc;

use hyper::http::request::Parts;
use tollkeeper::http::HttpSettings;
use tollkeeper::{Limit, Policy, Quota};
use tollkeeper_tower::address::Client;
use tollkeeper_tower::facts::{PartialFacts, Reader};

/// Reads a fact that no limit needs to name.
#[derive(Clone, Debug)]
pub struct PriorityReader {
    fact: String,
    /// The priority of requests with an ambiguous fact.
    smallest: String,
    http: HttpSettings,
    policy: Arc<Policy>,
    reader: Reader,
}

impl PriorityReader {
    /// A reader of this fact, which the config was checked for. `smallest` is the priority with the smallest share.
    pub fn new(fact: &str, http: &HttpSettings, smallest: &str) -> PriorityReader {
        let policy = Policy::new(vec![Limit::new("priority", Quota::per_second(1)).by(fact)]);
        let policy = policy.expect("a limit by one fact is valid");
        let reader = Reader::new(http, &policy).expect("the config was checked");
        let (fact, smallest) = (fact.to_owned(), smallest.to_owned());
        PriorityReader { fact, smallest, http: http.clone(), policy: Arc::new(policy), reader }
    }

    /// The priority of a request; `None` if it has none. An ambiguous one, such as a header with two lines, is the
    /// smallest: otherwise a client with a low priority could hide it.
    pub fn read(&self, peer: IpAddr, parts: &Parts) -> Option<String> {
        let client = Client::of(peer, &parts.headers, &self.http);
        let mut partial = PartialFacts::default();
        self.reader.head(parts, Some(&client), None, &mut partial);
        let Ok(complete) = partial.complete(&self.policy) else { return Some(self.smallest.clone()) };
        Some(complete.facts.get(&self.fact)?.text(&mut [0; 48]).to_owned())
    }
}
