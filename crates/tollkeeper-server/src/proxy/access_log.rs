//! The access log: one JSON line for each request, written when its response or tunnel has ended, or when its client has
//! left. `tollkeeper simulate --format tollkeeper` reads it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use hyper::Method;
use hyper::http::request::Parts;
use tollkeeper::Decision;
use tollkeeper::facts::{DeclaredFacts, Value};
use tollkeeper_engine::api::redact::Redactor;
use tollkeeper_engine::json::Writer;
use tollkeeper_tower::Prepared;
use tollkeeper_tower::address::Client;
use tollkeeper_tower::facts::PartialFacts;

use super::exchange::Exchange;
use crate::telemetry::line_log::LineLog;

/// The status of a request whose client left before the head of the response, as nginx logs it.
const CLIENT_LEFT: u16 = 499;

/// A request that is logged when this is dropped.
#[derive(Debug)]
pub struct Record {
    log: Arc<LineLog>,
    exchange: Arc<Exchange>,
    arrived: SystemTime,
    ip: String,
    method: Method,
    host: String,
    path: String,
    route: Option<Box<str>>,
    /// The facts that limits use, as they may be shown.
    facts: Vec<(String, String)>,
    /// The binding limit.
    by: Option<String>,
    verdict: &'static str,
    status: u16,
}

impl Record {
    /// A request whose head has arrived. With `query`, its path is logged with the query.
    pub fn new(
        log: Arc<LineLog>,
        exchange: Arc<Exchange>,
        parts: &Parts,
        prepared: &Prepared,
        redactor: &Redactor,
        query: bool,
    ) -> Record {
        let client = Client::of(exchange.peer(), &parts.headers, &prepared.settings.http);
        let host =
            parts.headers.get("host").map(|host| String::from_utf8_lossy(host.as_bytes()).into_owned());
        let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
        let path = if query { target } else { parts.uri.path() };
        let mut record = Record {
            log,
            exchange,
            arrived: SystemTime::now(),
            ip: client.ip.to_string(),
            method: parts.method.clone(),
            host: host.unwrap_or_default(),
            path: path.to_owned(),
            route: None,
            facts: Vec::new(),
            by: None,
            verdict: "error",
            status: CLIENT_LEFT,
        };
        let mut partial = PartialFacts::default();
        prepared.reader.head(parts, Some(&client), None, &mut partial);
        if let Ok(complete) = partial.complete(&prepared.policy) {
            for (name, value) in complete.facts.iter() {
                let mut scratch = [0; 48];
                let value = match value {
                    Value::Hashed(hashed) => &hashed.hash,
                    value => value.text(&mut scratch),
                };
                record.add_fact(prepared.policy.declared(), redactor, name, value);
            }
        }
        record
    }

    fn add_fact(&mut self, declared: &DeclaredFacts, redactor: &Redactor, name: &str, value: &str) {
        if self.facts.iter().all(|(known, _)| known != name) {
            let value = redactor.redact(declared, name, value).into_owned();
            self.facts.push((name.to_owned(), value));
        }
    }

    /// Adds the decision about the request. Facts of its body are known only from there.
    pub fn decided(&mut self, decision: &Decision, redactor: &Redactor) {
        self.by = decision.binding().map(|limit| limit.name().to_owned());
        let declared = decision.toll().policy().declared();
        for limit in decision.limits() {
            for (fact, value) in limit.rule().by().iter().zip(limit.key().texts()) {
                if let Some(value) = value {
                    self.add_fact(declared, redactor, fact, value);
                }
            }
        }
    }

    /// Adds the head of the response.
    pub fn answered(&mut self, status: u16, verdict: &'static str, route: Option<Box<str>>) {
        (self.status, self.verdict, self.route) = (status, verdict, route);
    }

    fn line(&self) -> Vec<u8> {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let arrived = self.arrived.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let reached = self.exchange.answered_by();
        let verdict = if self.exchange.has_failed() { "error" } else { self.verdict };
        let mut line = Writer::with_capacity(512);
        line.raw("{\"t\":");
        line.number(micros(arrived));
        line.raw(",\"duration\":");
        line.number(micros(self.exchange.began.elapsed()));
        for (name, text) in [
            (",\"ip\":", self.ip.as_str()),
            (",\"method\":", self.method.as_str()),
            (",\"host\":", &self.host),
            (",\"path\":", &self.path),
        ] {
            line.raw(name);
            line.text(text);
        }
        line.raw(",\"route\":");
        line.or_null(self.route.as_deref(), Writer::text);
        line.raw(",\"status\":");
        line.number(self.status.into());
        line.raw(",\"by\":");
        line.or_null(self.by.as_deref(), Writer::text);
        line.raw(",\"verdict\":");
        line.text(verdict);
        line.raw(",\"facts\":{");
        for (index, (name, value)) in self.facts.iter().enumerate() {
            line.raw(if index > 0 { "," } else { "" });
            line.text(name);
            line.raw(":");
            line.text(value);
        }
        line.raw("},\"bytes_in\":");
        line.number(self.exchange.uploaded_bytes());
        line.raw(",\"bytes_out\":");
        line.number(self.exchange.downloaded_bytes());
        line.raw(",\"upstream\":");
        line.or_null(reached.map(|reached| &*reached.address), Writer::text);
        line.raw(",\"upstream_duration\":");
        line.or_null(reached.map(|reached| micros(reached.took)), Writer::number);
        line.raw("}\n");
        line.finish().into_bytes()
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.log.add(self.line());
    }
}
