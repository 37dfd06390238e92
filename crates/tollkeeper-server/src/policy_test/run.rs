//! Runs the rows of one test.

use std::collections::HashMap;

use hyper::http::request::Parts;
use hyper::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, header};
use tollkeeper::config::{Config, Expect, Placed, PolicyTest, RowInput, TestRequest, TestRow, TestVerb};
use tollkeeper::policy::Applicability;
use tollkeeper::store::StoreFuture;
use tollkeeper::{
    Capacity, Charge, Clock, Correction, Costs, Decision, Facts, InvalidRequest, Limiter, ManualClock,
    MemoryStore, Mode, Policy, Retry, Slot, Span, Time, Verb, Verdict,
};
use tollkeeper_core::toll::TollRequest;
use tollkeeper_engine::api::error::ApiError;
use tollkeeper_tower::address::Client;
use tollkeeper_tower::body::{BufferedBody, MOST};
use tollkeeper_tower::facts::{PartialFacts, Reader};
use tollkeeper_tower::headers::{self, Jitter};

use super::coverage::Coverage;

/// An expectation that did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The line of the expectation.
    pub line: usize,
    /// Its column.
    pub column: usize,
    /// What was expected and what was found.
    pub message: String,
    /// Why each limit applied or not, and what it decided.
    pub limits: Vec<String>,
}

/// A policy with a store and a clock of its own.
#[derive(Debug)]
pub struct Runner<'c> {
    config: &'c Config,
    reader: Reader,
    limiter: Limiter,
    clock: ManualClock,
    start: u64,
    receipts: HashMap<String, Receipts>,
}

/// What an admitted request got.
#[derive(Debug, Default)]
struct Receipts {
    charge: Option<Charge>,
    slot: Option<Slot>,
}

/// What came of a row.
#[derive(Debug)]
enum RowResult {
    Decided(Box<Decision>),
    /// The middleware answers with this status, or the API with this code, before any limit is asked.
    Rejected {
        status: u16,
        code: &'static str,
        message: String,
    },
    /// Whether a release, settlement or refund had an effect.
    Corrected(bool),
}

/// The answer to a row, and the explanation of every limit.
struct Asked {
    answer: RowResult,
    limits: Vec<String>,
}

impl<'c> Runner<'c> {
    /// A runner whose clock shows `start`.
    pub fn new(config: &'c Config, start: u64) -> anyhow::Result<Runner<'c>> {
        let clock = ManualClock::new(Time::from_micros(start));
        let store = MemoryStore::new(Capacity::default(), Clock::manual(&clock));
        Ok(Runner {
            config,
            reader: Reader::new(&config.http, &config.policy)?,
            limiter: Limiter::embedded(config.policy.clone(), store),
            clock,
            start,
            receipts: HashMap::new(),
        })
    }

    /// Runs a test, and returns the expectations that did not hold. It ends at the first row that fails.
    pub fn run(mut self, test: &PolicyTest, coverage: &mut Coverage) -> Vec<Failure> {
        for row in &test.rows {
            let failures = self.row(row, coverage);
            if !failures.is_empty() {
                return failures;
            }
        }
        Vec::new()
    }

    fn row(&mut self, row: &TestRow, coverage: &mut Coverage) -> Vec<Failure> {
        for repetition in 0..row.times {
            let passed = row.at.value.as_micros() + row.every.as_micros() * repetition;
            self.clock.set(Time::from_micros(self.start + passed));
            let is_last = repetition + 1 == row.times;
            let asked = self.ask(row, coverage);
            let mut mismatches = Mismatches(Vec::new());
            mismatches.compare(&row.expect, &asked.answer);
            if is_last {
                mismatches.compare_details(row, &asked.answer, self.config);
            }
            if !mismatches.0.is_empty() {
                let number = match row.times {
                    1 => String::new(),
                    times => format!(" (number {} of {times})", repetition + 1),
                };
                let failure = |(line, column, message): (usize, usize, String)| Failure {
                    line,
                    column,
                    message: format!("{message}{number}"),
                    limits: asked.limits.clone(),
                };
                return mismatches.0.into_iter().map(failure).collect();
            }
        }
        Vec::new()
    }

    fn ask(&mut self, row: &TestRow, coverage: &mut Coverage) -> Asked {
        if let Some(of) = &row.of {
            return Asked { answer: self.correct(row, &of.value), limits: Vec::new() };
        }
        match &row.input {
            RowInput::Facts(pairs) => match facts(pairs) {
                Ok(facts) => self.decide(row, &facts, &[], coverage),
                Err(error) => Asked { answer: rejected(error), limits: Vec::new() },
            },
            RowInput::Request(request) => self.request(row, request, coverage),
        }
    }

    /// Reads a request as the middleware does, and decides it.
    fn request(&mut self, row: &TestRow, request: &TestRequest, coverage: &mut Coverage) -> Asked {
        let bad = |message: &str| Asked {
            answer: RowResult::Rejected { status: 400, code: "bad_request", message: message.to_owned() },
            limits: Vec::new(),
        };
        let Some(head) = head(request) else { return bad("the request is not one of HTTP") };
        let client = Client::of(request.peer, &head.headers, &self.config.http);
        let body = request.body.as_deref().unwrap_or_default().as_bytes();
        let look = if body.len() > MOST { BufferedBody::TooLarge } else { BufferedBody::All(body.to_vec()) };
        // The reader is borrowed while receipts are stored.
        let reader = self.reader.clone();
        let mut seen = PartialFacts::default();
        reader.head(&head, Some(&client), None, &mut seen);
        if reader.needs_body(&self.config.policy, &seen) {
            reader.body(&head.headers, &look, Some(client), &mut seen);
        }
        match seen.complete(&self.config.policy) {
            Ok(read) => self.decide(row, read.facts, read.also, coverage),
            Err(problem) => Asked {
                answer: RowResult::Rejected {
                    status: problem.status.as_u16(),
                    code: "bad_request",
                    message: problem.detail.clone(),
                },
                limits: Vec::new(),
            },
        }
    }

    fn decide(
        &mut self,
        row: &TestRow,
        facts: &Facts<'_>,
        also: &[Facts<'_>],
        coverage: &mut Coverage,
    ) -> Asked {
        for facts in std::iter::once(facts).chain(also) {
            coverage.note(&self.config.policy, facts);
        }
        let is_request = matches!(row.input, RowInput::Request(_));
        let verb = match row.verb {
            TestVerb::Peek => Verb::Peek,
            TestVerb::Acquire => Verb::Acquire,
            TestVerb::Reserve(ttl) => Verb::Reserve(ttl),
            // The middleware holds a slot while a request is handled.
            _ if is_request => Verb::Acquire,
            _ => Verb::Check,
        };
        let request = TollRequest { verb, facts, cost: row.cost.unwrap_or(1), hold: None, also };
        let decision = match self.limiter.decide(None, &request) {
            Ok(StoreFuture::Ready(decision)) => decision,
            Ok(_) => unreachable!("the memory store answers at once"),
            Err(error) => return Asked { answer: rejected(error), limits: Vec::new() },
        };
        let limits = explained(&self.config.policy, facts, &decision);
        self.conclude(row, &decision, is_request);
        Asked { answer: RowResult::Decided(Box::new(decision)), limits }
    }

    /// Keeps the receipts of a row that has a name, and gives back what the response gives back.
    fn conclude(&mut self, row: &TestRow, decision: &Decision, is_request: bool) {
        let (charge, slot) = (decision.charge(), decision.slot());
        if let (Some(status), Some(charge)) = (row.status.filter(|_| decision.allowed()), &charge) {
            let gives_back = |name: &str| {
                decision.limits().any(|limit| limit.name() == name && limit.rule().gives_back(status))
            };
            self.limiter.refund_of(charge, gives_back).wait();
        }
        if is_request
            && row.verb != TestVerb::Acquire
            && let Some(slot) = &slot
        {
            let _ = self.limiter.release(slot).wait();
        }
        if let Some(name) = &row.name {
            self.receipts.insert(name.clone(), Receipts { charge, slot });
        }
    }

    fn correct(&mut self, row: &TestRow, name: &str) -> RowResult {
        let Some(receipts) = self.receipts.get(name) else { return RowResult::Corrected(false) };
        let is_done = |correction: Correction| RowResult::Corrected(correction == Correction::Done);
        match (row.verb, &receipts.charge, &receipts.slot) {
            (TestVerb::Release, _, Some(slot)) => {
                RowResult::Corrected(self.limiter.release(slot).wait().unwrap_or(false))
            }
            (TestVerb::Refund, Some(charge), _) => match row.cost {
                None => is_done(self.limiter.refund(charge).wait()),
                Some(cost) => {
                    let refund = self.limiter.refund_part(charge, Costs::Request(cost)).wait();
                    refund.map_or_else(rejected, is_done)
                }
            },
            (TestVerb::Settle, Some(charge), _) => {
                let RowInput::Facts(pairs) = &row.input else { return RowResult::Corrected(false) };
                let facts = match facts(pairs) {
                    Ok(facts) => facts,
                    Err(error) => return rejected(error),
                };
                let costs = row.cost.map_or(Costs::Facts(&facts), Costs::Request);
                self.limiter.settle(charge, costs).wait().map_or_else(rejected, is_done)
            }
            _ => RowResult::Corrected(false),
        }
    }
}

fn facts(pairs: &[(String, String)]) -> Result<Facts<'_>, InvalidRequest> {
    let mut facts = Facts::new();
    for (name, value) in pairs {
        facts.insert(name, value.as_str()).map_err(InvalidRequest::Fact)?;
    }
    Ok(facts)
}

fn rejected(error: InvalidRequest) -> RowResult {
    let message = error.to_string();
    let code = ApiError::from(error).code.name();
    RowResult::Rejected { status: 400, code, message }
}

/// The head of a request; `None` if a server would not accept it.
fn head(request: &TestRequest) -> Option<Parts> {
    let (method, target) = request.line.split_once(' ')?;
    let (mut head, ()) = Request::new(()).into_parts();
    head.method = Method::from_bytes(method.as_bytes()).ok()?;
    head.uri = Uri::try_from(target).ok()?;
    for (name, value) in &request.headers {
        head.headers
            .append(name.parse::<HeaderName>().ok()?, HeaderValue::from_bytes(value.as_bytes()).ok()?);
    }
    if let Some(body) = &request.body
        && !head.headers.contains_key(header::CONTENT_TYPE)
    {
        let is_json = body.trim_start().starts_with('{');
        let content_type = if is_json { "application/json" } else { "application/x-www-form-urlencoded" };
        head.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    }
    Some(head)
}

/// Why each limit applies or not, and what it decided.
fn explained(policy: &Policy, facts: &Facts<'_>, decision: &Decision) -> Vec<String> {
    let Ok(explained) = policy.explain(facts) else { return Vec::new() };
    let line = |limit: &tollkeeper::policy::Explanation<'_>| {
        let name = limit.rule.name();
        let key = match &limit.applicability {
            Applicability::Applies { key, .. } => format!(", key {key}"),
            _ => String::new(),
        };
        let outcome = decision.limit(name).map_or_else(String::new, |limit| {
            let outcome = limit.outcome();
            let verdict = match (outcome.allowed, outcome.retry) {
                (true, _) => "allows".to_owned(),
                (false, Some(Retry::After(wait))) => format!("refuses for {wait}"),
                (false, _) => "refuses for ever".to_owned(),
            };
            format!("; {verdict}, {} of {} left", outcome.remaining, outcome.limit)
        });
        format!("{name}: {}{key}{outcome}", limit.applicability)
    };
    explained.iter().map(line).collect()
}

/// Expectations that did not hold, with their places.
struct Mismatches(Vec<(usize, usize, String)>);

impl Mismatches {
    fn add<T>(&mut self, place: &Placed<T>, expected: &str, found: &str) {
        self.0.push((place.line, place.column, format!("expected {expected}, was {found}")));
    }

    fn compare(&mut self, expect: &Placed<Expect>, answer: &RowResult) {
        let holds = match (&expect.value, answer) {
            (Expect::Allowed, RowResult::Decided(decision)) => decision.allowed(),
            (Expect::Refused, RowResult::Decided(decision)) => decision.retry_after().is_some(),
            (Expect::Never, RowResult::Decided(decision)) => {
                matches!(decision.verdict(), Verdict::Deny { retry: Retry::Never })
            }
            (Expect::Allowed, RowResult::Corrected(done)) => *done,
            (Expect::Refused, RowResult::Corrected(done)) => !done,
            (Expect::Status(expected), RowResult::Rejected { status, .. }) => expected == status,
            (Expect::Code(expected), RowResult::Rejected { code, .. }) => expected == code,
            _ => false,
        };
        if !holds {
            let expected = match &expect.value {
                Expect::Allowed => "allowed".to_owned(),
                Expect::Refused => "refused".to_owned(),
                Expect::Never => "never".to_owned(),
                Expect::Status(status) => status.to_string(),
                Expect::Code(code) => code.clone(),
                _ => "something else".to_owned(),
            };
            self.add(expect, &expected, &found(answer));
        }
    }

    /// Compares what a row expects besides the verdict.
    fn compare_details(&mut self, row: &TestRow, answer: &RowResult, config: &Config) {
        let RowResult::Decided(decision) = answer else { return };
        let span = |span: Option<Span>| span.map_or_else(|| "none".to_owned(), |span| span.to_string());
        if let Some(by) = &row.by {
            let binding = decision.binding().map(|limit| limit.name().to_owned());
            if binding.as_ref() != Some(&by.value) {
                self.add(
                    by,
                    &format!("by {}", by.value),
                    &binding.unwrap_or_else(|| "by no limit".to_owned()),
                );
            }
        }
        if let Some(expected) = &row.retry_after {
            let found = decision.retry_after();
            if found != Some(expected.value) {
                self.add(expected, &format!("retry_after {}", expected.value), &span(found));
            }
        }
        if let Some(expected) = &row.delay {
            let found = decision.delay();
            if found != expected.value {
                self.add(expected, &format!("delay {}", expected.value), &found.to_string());
            }
        }
        for expected in &row.remaining {
            let (name, count) = &expected.value;
            let found = decision.limit(name).map(|limit| limit.outcome().remaining);
            if found != Some(*count) {
                let found = found.map_or_else(|| "not applied".to_owned(), |found| found.to_string());
                self.add(expected, &format!("{count} remaining of {name}"), &found);
            }
        }
        let applied = decision.limits().map(|limit| limit.name().to_owned()).collect();
        self.compare_names("limits", row.limits.as_ref(), applied);
        let shadow =
            decision.limits().filter(|limit| limit.rule().mode() == Mode::Shadow && !limit.allowed());
        let shadow = shadow.map(|limit| limit.name().to_owned()).collect();
        self.compare_names("would_refuse", row.would_refuse.as_ref(), shadow);
        self.compare_headers(row, decision, config);
    }

    /// Compares names in any order.
    fn compare_names(&mut self, what: &str, expected: Option<&Placed<Vec<String>>>, mut found: Vec<String>) {
        let Some(place) = expected else { return };
        let mut expected = place.value.clone();
        expected.sort_unstable();
        found.sort_unstable();
        found.dedup();
        if expected != found {
            let list = |names: &[String]| format!("[{}]", names.join(", "));
            self.add(place, &format!("{what} {}", list(&expected)), &list(&found));
        }
    }

    fn compare_headers(&mut self, row: &TestRow, decision: &Decision, config: &Config) {
        if row.headers.is_empty() {
            return;
        }
        let mut found = HeaderMap::new();
        headers::insert(&mut found, decision, &config.headers, &Jitter::NONE);
        for expected in &row.headers {
            let (name, value) = &expected.value;
            let lines: Vec<&str> =
                found.get_all(name.as_str()).iter().filter_map(|line| line.to_str().ok()).collect();
            if lines.join(", ") != *value {
                let found =
                    if lines.is_empty() { "absent".to_owned() } else { format!("`{}`", lines.join(", ")) };
                self.add(expected, &format!("header {name} `{value}`"), &found);
            }
        }
    }
}

/// The answer for people.
fn found(answer: &RowResult) -> String {
    match answer {
        RowResult::Decided(decision) => match decision.conclusion() {
            (Verdict::Allow { delay: Span::ZERO }, _) => "allowed".to_owned(),
            (Verdict::Allow { delay }, _) => format!("allowed, delayed by {delay}"),
            (Verdict::Deny { retry }, binding) => {
                let by = binding.map_or_else(String::new, |limit| format!(" by {}", limit.name()));
                match retry {
                    Retry::After(wait) => format!("refused{by}, retry_after {wait}"),
                    Retry::Never => format!("never{by}"),
                }
            }
        },
        RowResult::Rejected { status, code, message } => format!("{status} {code}: {message}"),
        RowResult::Corrected(true) => "done".to_owned(),
        RowResult::Corrected(false) => "without effect".to_owned(),
    }
}
