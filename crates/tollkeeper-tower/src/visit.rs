//! Reads and decides a request, independently of a framework: the steps that the layer, the server's forward auth and
//! the bindings of other languages share.
//!
//! Read the head; if a limit needs the body, read that, too; decide; and when the handler has answered, refund the
//! limits that its status does not count for.

use std::future::Future;
use std::task::{Context, Waker};

use bytes::Bytes;
use http::request::Parts;
use http::{Response, StatusCode};
use tollkeeper::{Acquire, DecidedToll, Decision, InvalidRequest, LimitDecision, Limiter, Request, Span};
use tollkeeper_core::net::CanonicalIp;

use crate::address::Client;
use crate::body::BufferedBody;
use crate::facts::{CompleteFacts, PartialFacts, Reader};
use crate::headers::Jitter;
use crate::problem::Problem;
use crate::settings::Prepared;
use crate::{grpc, headers, problem};

/// What the application knows about a request besides its head.
pub trait Application {
    /// The address of the other end of the connection. Called only if a limit needs it.
    fn peer(&self) -> Option<CanonicalIp>;

    /// The route that a router has matched, such as `/users/{id}`. Called only if a limit needs it.
    fn matched_route(&self) -> Option<&str> {
        None
    }

    /// Adds the facts that only the application knows. They replace those of the request.
    fn add_facts<'f>(&'f self, _reader: &'f Reader, _partial: &mut PartialFacts<'f>) {}

    /// The cost of the request.
    fn cost(&self) -> u64 {
        1
    }

    /// The longest time that a leaky bucket may delay the request.
    fn longest_delay(&self) -> Span;
}

/// A request, with the settings and the policy that were active when it arrived.
#[derive(Clone, Copy, Debug)]
pub struct Visit<'a, A> {
    /// Decides the request.
    pub limiter: &'a Limiter,
    /// How it is read, and the limits that apply to it.
    pub prepared: &'a Prepared,
    /// Its head.
    pub parts: &'a Parts,
    /// What the application knows about it.
    pub application: A,
}

impl<A: Application> Visit<'_, A> {
    /// Reads the head; returns the client, if a limit needs its address.
    #[inline]
    pub fn read_head<'f>(&'f self, partial: &mut PartialFacts<'f>) -> Option<Client> {
        let Prepared { settings, reader, .. } = self.prepared;
        let peer = if reader.needs_client() { self.application.peer() } else { None };
        let client = peer.map(|peer| Client::of(peer, &self.parts.headers, &settings.http));
        let matched = if reader.needs_matched() { self.application.matched_route() } else { None };
        reader.head(self.parts, client.as_ref(), matched, partial);
        self.application.add_facts(reader, partial);
        client
    }

    /// Whether some limit may apply, judging by the head, and needs a fact of the body.
    #[inline]
    pub fn needs_body(&self, partial: &PartialFacts<'_>) -> bool {
        self.prepared.reader.needs_body(&self.prepared.policy, partial)
    }

    /// Reads the body. Facts of the application take precedence over those of the body, too.
    pub fn read_body<'f>(
        &'f self,
        body: &'f BufferedBody,
        client: Option<Client>,
        partial: &mut PartialFacts<'f>,
    ) {
        self.prepared.reader.body(&self.parts.headers, body, client, partial);
        self.application.add_facts(&self.prepared.reader, partial);
    }

    /// The facts, unless a limit needs one that cannot be read.
    #[inline]
    pub fn complete<'s, 'f>(&self, partial: &'s PartialFacts<'f>) -> Result<CompleteFacts<'s, 'f>, Problem> {
        partial.complete(&self.prepared.policy)
    }

    /// The request to be decided, with a slot of each concurrency limit that applies.
    #[inline]
    pub fn acquire<'s>(&'s self, read: CompleteFacts<'s, 's>) -> Acquire<'s> {
        let acquire = self.limiter.acquire(read.facts).also(read.also);
        let acquire = acquire.under(&self.prepared.policy).cost(self.application.cost());
        if self.prepared.delays { acquire.hold(self.application.longest_delay()) } else { acquire }
    }

    /// The same without slots, for a gateway that does not report the end of a request.
    pub fn check<'s>(&'s self, read: CompleteFacts<'s, 's>) -> Request<'s> {
        let check = self.limiter.check(read.facts).also(read.also);
        let check = check.under(&self.prepared.policy).cost(self.application.cost());
        if self.prepared.delays { check.hold(self.application.longest_delay()) } else { check }
    }

    /// The response to a refused request: problem or gRPC status, with rate-limit headers whose `Retry-After` is
    /// lengthened by what `draw` draws.
    pub fn refusal(&self, decided: &DecidedToll, draw: fn() -> u64) -> Response<Bytes> {
        let mut response = if self.is_grpc() { grpc::refusal(decided) } else { problem::refusal(decided) };
        let settings = &self.prepared.settings;
        let jitter = Jitter { share: settings.retry_after_jitter, draw };
        headers::insert(response.headers_mut(), decided, &settings.headers, &jitter);
        response
    }

    /// The response to an invalid request. Nothing was decided.
    #[cold]
    pub fn invalid(&self, error: &InvalidRequest) -> Response<Bytes> {
        self.problem(&Problem::new(StatusCode::BAD_REQUEST, error.to_string()))
    }

    /// The response to a request that cannot be read. Nothing was decided.
    #[cold]
    pub fn problem(&self, problem: &Problem) -> Response<Bytes> {
        if self.is_grpc() { grpc::problem(problem) } else { problem.response() }
    }

    fn is_grpc(&self) -> bool {
        grpc::is_grpc(&self.parts.headers)
    }
}

/// Refunds the limits whose `deduct_when` or `refund_when` selects the status of the response. On a remote store this
/// goes on in the background, in the current tokio runtime.
pub fn refund(limiter: &Limiter, decision: &Decision, status: u16) {
    let gives_back = |answer: &LimitDecision<'_>| answer.rule().gives_back(status);
    let names: Vec<String> =
        decision.limits().filter(gives_back).map(|answer| answer.name().to_owned()).collect();
    if names.is_empty() {
        return;
    }
    let Some(charge) = decision.charge() else { return };
    let limiter = limiter.clone();
    in_background(async move {
        limiter.refund_of(&charge, |name| names.iter().any(|other| other == name)).await;
    });
}

/// Completes a future that is not awaited: at once if it is ready, otherwise in a task.
fn in_background(future: impl Future<Output = ()> + Send + 'static) {
    let mut future = Box::pin(future);
    if future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()
        && let Ok(runtime) = tokio::runtime::Handle::try_current()
    {
        runtime.spawn(future);
    }
}
