//! The steps of a middleware: reads the head of a request from bytes, decides it, and returns what to do as one text.

use std::net::IpAddr;
use std::sync::Arc;

use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderValue, Response, StatusCode};
use tollkeeper::{DecidedToll, SlotGuard, Span};
use tollkeeper_core::decimal::Decimal;
use tollkeeper_core::net::CanonicalIp;
use tollkeeper_tower::Prepared;
use tollkeeper_tower::body::{BufferedBody, MOST};
use tollkeeper_tower::facts::{PartialFacts, Reader as FactReader};
use tollkeeper_tower::headers::{self, Jitter};
use tollkeeper_tower::problem::Problem;
use tollkeeper_tower::visit::{Application, Visit};

use crate::api::error::ApiError;
use crate::api::request::OwnFacts;
use crate::engine::{Engine, PANICKED, Parts, push_header};
use crate::engine_call::{EngineCall, Pending, at_once};
use crate::json::Reader;
use crate::request_head::RequestHead;

/// The longest that a leaky bucket delays a request; one that would have to wait longer is refused.
const MAX_DELAY: Span = Span::from_secs(60);

/// A request to a middleware.
#[derive(Clone, Debug)]
pub struct VisitRequest {
    /// The head: `method\ntarget\npeer\nname\nvalue\nname\nvalue…`. A peer that is
    /// not an IP address is unknown.
    pub head: Vec<u8>,
    /// The body, if it was read.
    pub body: VisitBody,
    /// Facts and cost that the application adds: empty, or `{"facts":{…},"cost":2}`.
    pub own: Vec<u8>,
    /// Whether the JSON of the decision is wanted.
    pub decision: bool,
}

/// The body of a request to a middleware.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VisitBody {
    /// It was not read. If a limit needs it, the answer is `body`.
    Unread,
    /// All of it.
    Raw(Vec<u8>),
    /// A parsed body, written again as a JSON object.
    Json(Vec<u8>),
    /// It has more than [`MAX_BODY`](crate::MAX_BODY) bytes.
    TooLarge,
    /// It ended too early.
    Broken,
}

impl VisitRequest {
    /// A request of which only the head is known.
    pub fn new(head: Vec<u8>) -> VisitRequest {
        VisitRequest { head, body: VisitBody::Unread, own: Vec::new(), decision: false }
    }
}

impl Engine {
    /// Reads and decides a request. The lines of the answer are: `pass`, `body` or the status of a refusal; the ticket,
    /// or 0; the delay in seconds; the body of a refusal, or which limit needs the body; the JSON of the decision, or an
    /// empty line; then the name and the value of each header of the response.
    ///
    /// After `pass` and the delay, the handler may run. If the ticket is not 0, report the status of the response to
    /// [`Engine::answered`], and call [`Engine::gone`] when the response has been sent or the client has disconnected.
    pub fn visit(self: &Arc<Engine>, visit: VisitRequest) -> EngineCall<String> {
        if !self.is_remote() {
            return EngineCall::Ready(at_once(self.visited(visit)));
        }
        let engine = Arc::clone(self);
        EngineCall::Pending(Pending::new(async move { engine.visited(visit).await }, || {
            problem(StatusCode::INTERNAL_SERVER_ERROR, PANICKED)
        }))
    }

    /// Refunds the limits whose `deduct_when` or `refund_when` selects the status of the response; false if the ticket is
    /// unknown. Never waits for the store.
    pub fn answered(&self, ticket: u64, status: u16) -> bool {
        self.state().is_ok_and(|state| state.tickets.answered(ticket, status))
    }

    /// Ends a request: its response has been sent, or the client has disconnected. Releases its slots; false if the ticket
    /// is unknown.
    pub fn gone(&self, ticket: u64) -> bool {
        self.state().is_ok_and(|state| state.tickets.gone(ticket))
    }

    async fn visited(&self, visit: VisitRequest) -> String {
        let state = match self.state() {
            Ok(state) => state,
            Err(error) => return problem(StatusCode::SERVICE_UNAVAILABLE, error.message),
        };
        let VisitRequest { head, body, mut own, decision } = visit;
        let RequestHead { mut parts, peer } = match RequestHead::read(&head) {
            Ok(head) => head,
            Err(reason) => return problem(StatusCode::BAD_REQUEST, reason),
        };
        let own = match own_facts(&mut own) {
            Ok(own) => own,
            // The application's mistake, not the client's.
            Err(error) => return problem(StatusCode::INTERNAL_SERVER_ERROR, error.message),
        };
        let body = match body {
            VisitBody::Unread => None,
            VisitBody::Raw(bytes) | VisitBody::Json(bytes) if bytes.len() > MOST => {
                Some(BufferedBody::TooLarge)
            }
            VisitBody::Raw(bytes) => Some(BufferedBody::All(bytes)),
            VisitBody::Json(bytes) => {
                parts.headers.remove(CONTENT_ENCODING);
                parts.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
                Some(BufferedBody::All(bytes))
            }
            VisitBody::TooLarge => Some(BufferedBody::TooLarge),
            VisitBody::Broken => Some(BufferedBody::Broken),
        };
        let core = &*state.core;
        let prepared = core.settings.read(&core.limiter);
        let application = EngineApplication { peer, own: &own };
        let visit = Visit { limiter: &core.limiter, prepared: &prepared, parts: &parts, application };
        let mut partial = PartialFacts::default();
        let client = visit.read_head(&mut partial);
        if let Some((limit, fact)) = prepared.reader.body_need(&prepared.policy, &partial) {
            let Some(body) = &body else {
                return format!("body\n0\n0\nlimit `{limit}` needs `{fact}`\n");
            };
            visit.read_body(body, client, &mut partial);
        }
        let facts = match visit.complete(&partial) {
            Ok(facts) => facts,
            Err(problem) => return refused(visit.problem(&problem), ""),
        };
        let conclude = |decided: &DecidedToll| {
            let shown = if decision { core.text(&decided.to_decision()) } else { String::new() };
            if !decided.allowed() {
                return refused(visit.refusal(decided, core.draw), &shown);
            }
            passed(state, &prepared, decided, &shown)
        };
        match visit.acquire(facts).decide_with(conclude) {
            Ok(answer) => answer.await,
            Err(error) => refused(visit.invalid(&error), ""),
        }
    }
}

fn own_facts(text: &mut [u8]) -> Result<OwnFacts<'_>, ApiError> {
    if text.is_empty() { Ok(OwnFacts::default()) } else { OwnFacts::read(Reader::new(text)?) }
}

/// What a binding knows of a request besides its head.
struct EngineApplication<'a> {
    peer: Option<IpAddr>,
    own: &'a OwnFacts<'a>,
}

impl Application for EngineApplication<'_> {
    fn peer(&self) -> Option<CanonicalIp> {
        self.peer.map(CanonicalIp::from)
    }

    fn add_facts<'f>(&'f self, reader: &'f FactReader, partial: &mut PartialFacts<'f>) {
        for (name, value) in self.own.facts.iter().filter(|(name, _)| reader.names(name)) {
            partial.put(name, reader.identified(name, value.clone()));
        }
    }

    fn cost(&self) -> u64 {
        self.own.cost.unwrap_or(1)
    }

    fn longest_delay(&self) -> Span {
        MAX_DELAY
    }
}

/// The answer about an admitted request.
fn passed(state: &Parts, prepared: &Prepared, decided: &DecidedToll, shown: &str) -> String {
    let mut ticket = 0;
    if prepared.keeps_decision {
        let guard = SlotGuard::of(&state.core.limiter, decided);
        let awaited =
            prepared.awaits_response && decided.limits().any(|limit| limit.rule().awaits_response());
        if guard.is_some() || awaited {
            ticket = state.tickets.open(awaited.then(|| decided.to_decision()), guard);
        }
    }
    let mut text = String::with_capacity(256 + shown.len());
    text.push_str("pass\n");
    text.push_str(Decimal::whole(ticket).as_str());
    text.push('\n');
    text.push_str(Decimal::seconds(decided.delay()).as_str());
    text.push_str("\n\n");
    text.push_str(shown);
    // An admitted request has no Retry-After that could be lengthened.
    for (field, value) in headers::write(decided, &prepared.settings.headers, &Jitter::NONE).iter() {
        text.push('\n');
        push_header(&mut text, field.name(), value);
    }
    text
}

/// The answer about a request that is refused or invalid.
fn refused(response: Response<impl AsRef<[u8]>>, shown: &str) -> String {
    let (head, body) = response.into_parts();
    let mut text = String::with_capacity(512 + shown.len());
    text.push_str(head.status.as_str());
    text.push_str("\n0\n0\n");
    text.push_str(&String::from_utf8_lossy(body.as_ref()));
    text.push('\n');
    text.push_str(shown);
    for (name, value) in &head.headers {
        text.push('\n');
        push_header(&mut text, name.as_str(), value.as_bytes());
    }
    text
}

fn problem(status: StatusCode, detail: impl Into<String>) -> String {
    refused(Problem::new(status, detail).response(), "")
}
