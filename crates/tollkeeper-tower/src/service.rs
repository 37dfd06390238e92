//! The service: each request is read, decided, held if it must be, passed on, and its answer marked.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response, StatusCode, header};
use http_body::Body;
use pin_project_lite::pin_project;
use tollkeeper::decision::LimitDecision;
use tollkeeper::{Acquire, Acquired, Decision, InvalidRequest, Limiter};
use tower_service::Service;

use crate::address::Client;
use crate::body::RequestBody;
use crate::facts::{Seen, Settled};
use crate::headers::{Jitter, Written};
use crate::layer::Shared;
use crate::problem::Problem;
use crate::response::ResponseBody;
use crate::settings::Prepared;
use crate::slot::{Asks, HeldSlot};
use crate::{grpc, headers, peer, problem};

/// A service behind a limiter.
#[derive(Clone, Debug)]
pub struct RateLimit<S> {
    inner: S,
    shared: Arc<Shared>,
}

impl<S> RateLimit<S> {
    pub(crate) fn new(inner: S, shared: Arc<Shared>) -> RateLimit<S> {
        RateLimit { inner, shared }
    }
}

impl<S, B, R> Service<Request<B>> for RateLimit<S>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone,
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Send,
{
    type Response = Response<ResponseBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, B>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> ResponseFuture<S, B> {
        let (parts, body) = request.into_parts();
        let (shared, mut body) = (&self.shared, RequestBody::from(body));
        let ask_lone = |prepared: &Arc<Prepared>| Visit { shared, prepared, parts: &parts }.ask_lone();
        match shared.in_force.with(&shared.limiter, ask_lone) {
            Some(Ok(written)) => {
                let future = self.inner.call(Request::from_parts(parts, body));
                return ResponseFuture { state: State::Passed { future, written: Some(written) } };
            }
            Some(Err(answer)) => return ResponseFuture { state: State::Answered { answer: Some(answer) } },
            None => {}
        }
        let prepared = shared.in_force.read(&shared.limiter);
        let visit = Visit { shared, prepared: &prepared, parts: &parts };
        let asked = visit.ask_now();
        let state = match asked {
            Some(Ok(acquired)) if !must_be_held(&acquired, &prepared) => {
                let (request, passed) = pass(shared, prepared, acquired, parts, body);
                State::Running { future: self.inner.call(request), passed: Some(passed) }
            }
            Some(Err(answer)) => State::Answered { answer: Some(answer) },
            asked => {
                // The service that is ready is the one to be called.
                let ready = self.inner.clone();
                let service = std::mem::replace(&mut self.inner, ready);
                let shared = Arc::clone(shared);
                let asking = Box::pin(async move {
                    let acquired = match asked {
                        Some(asked) => asked?,
                        None => {
                            let visit = Visit { shared: &shared, prepared: &prepared, parts: &parts };
                            visit.ask(&mut body).await?
                        }
                    };
                    shared.limiter.hold(&acquired.decision).await;
                    Ok(pass(&shared, prepared, acquired, parts, body))
                });
                State::Asking { asking, service }
            }
        };
        ResponseFuture { state }
    }
}

/// The answer to a request that did not pass.
type Refusal = Box<Response<Bytes>>;

/// A request on its way, under what was in force when it came.
struct Visit<'a> {
    shared: &'a Shared,
    prepared: &'a Prepared,
    parts: &'a Parts,
}

impl<'a> Visit<'a> {
    /// Asks the only limit, where there is no other and nobody needs more of an admission than headers tell of it.
    #[inline]
    fn ask_lone(&self) -> Option<Result<Written, Refusal>> {
        let Shared { limiter, options, .. } = self.shared;
        let lone = self.prepared.lone.as_ref().filter(|lone| lone.can_ask(limiter))?;
        let refuses = self.prepared.reader.refuses(self.parts);
        if options.on_response.is_some() || options.hands_over_charge || refuses {
            return None;
        }
        let named = options.facts.iter().filter(|(name, _)| **name == *lone.fact());
        let mut own = named.filter_map(|(_, read)| read(self.parts));
        let value = match (own.next(), own.next()) {
            (Some(value), None) => self.prepared.reader.identified(lone.fact(), value.into()),
            (None, _) => self.prepared.reader.only(self.parts, self.client(), self.matched())?,
            // What the first says may be wrong, and then it counts.
            (Some(_), Some(_)) => return None,
        };
        let dialects = &self.prepared.settings.headers;
        lone.check(limiter, &value, self.cost(), |told| match told {
            Ok(answer) => Ok(headers::write_one(answer, dialects)),
            Err(decision) => Err(self.refused(&decision)),
        })
    }

    /// Asks the limiter, if neither the store nor the body has to be waited for.
    fn ask_now(&self) -> Option<Result<Acquired, Refusal>> {
        if !self.shared.limiter.is_embedded() {
            return None;
        }
        let mut seen = Seen::default();
        self.head(&mut seen);
        if self.prepared.reader.needs_body(&self.prepared.policy, &seen) {
            return None;
        }
        Some(self.settled(&seen).and_then(|facts| self.judged(self.acquire(facts).wait())))
    }

    /// Asks the limiter, whatever has to be waited for.
    async fn ask<B>(&self, body: &mut RequestBody<B>) -> Result<Acquired, Refusal>
    where
        B: Body<Data = Bytes> + Unpin,
    {
        let look;
        let mut seen = Seen::default();
        let client = self.head(&mut seen);
        if self.prepared.reader.needs_body(&self.prepared.policy, &seen) {
            look = body.look().await;
            self.prepared.reader.body(&self.parts.headers, &look, client, &mut seen);
            // What the application says of a request counts whatever its body says.
            self.add_own(&mut seen);
        }
        let facts = match self.settled(&seen) {
            Ok(facts) => facts,
            Err(refusal) => {
                // A client that waits for `100 Continue` has not sent anything, and need not.
                let waits = self.parts.headers.contains_key(header::EXPECT) && body.is_untouched();
                if refusal.status() == StatusCode::PAYLOAD_TOO_LARGE && !waits {
                    body.drain().await;
                }
                return Err(refusal);
            }
        };
        let acquired = self.acquire(facts).await;
        self.judged(acquired)
    }

    /// Reads the head of the request; whose it is, if that matters.
    fn head(&self, seen: &mut Seen<'a>) -> Option<Client> {
        let client = self.client();
        self.prepared.reader.head(self.parts, client, self.matched(), seen);
        self.add_own(seen);
        client
    }

    #[inline]
    fn client(&self) -> Option<Client> {
        let Prepared { settings, reader, .. } = self.prepared;
        let peer = || peer::of(&self.parts.extensions).or(self.shared.options.assumed_peer);
        let peer = if reader.needs_client() { peer() } else { None };
        peer.map(|peer| Client::of(peer, &self.parts.headers, &settings.http))
    }

    #[inline]
    fn matched(&self) -> Option<&'a str> {
        if self.prepared.reader.needs_matched() { peer::matched(&self.parts.extensions) } else { None }
    }

    #[inline]
    fn cost(&self) -> u64 {
        self.shared.options.cost.as_ref().map_or(1, |cost| cost(self.parts))
    }

    /// Adds the facts that only the application knows.
    fn add_own(&self, seen: &mut Seen<'a>) {
        for (name, read) in &self.shared.options.facts {
            if self.prepared.reader.names(name)
                && let Some(value) = read(self.parts)
            {
                seen.put(name, self.prepared.reader.identified(name, value.into()));
            }
        }
    }

    fn settled<'s>(&self, seen: &'s Seen<'a>) -> Result<Settled<'s, 'a>, Refusal> {
        seen.settled(&self.prepared.policy).map_err(|problem| self.cannot_be(&problem))
    }

    fn acquire<'s>(&'s self, read: Settled<'s, 's>) -> Acquire<'s> {
        let Shared { limiter, options, .. } = self.shared;
        let acquire = limiter.acquire(read.facts).also(read.also);
        let acquire = acquire.under(&self.prepared.policy).cost(self.cost());
        if self.prepared.delays { acquire.hold(options.longest_delay) } else { acquire }
    }

    /// What was acquired, if the request may pass.
    fn judged(&self, acquired: Result<Acquired, InvalidRequest>) -> Result<Acquired, Refusal> {
        match acquired {
            Ok(acquired) if acquired.decision.allowed() => Ok(acquired),
            Ok(acquired) => Err(self.refused(&acquired.decision)),
            Err(error) => Err(self.cannot_be(&Problem::new(StatusCode::BAD_REQUEST, error.to_string()))),
        }
    }

    /// The answer to a request that makes no sense. Nothing was decided about it, so there is nothing that
    /// a hook could be told.
    #[cold]
    fn cannot_be(&self, problem: &Problem) -> Refusal {
        Box::new(if self.is_grpc() { grpc::problem(problem) } else { problem.response() })
    }

    fn refused(&self, decision: &Decision) -> Refusal {
        let mut response = if self.is_grpc() { grpc::refusal(decision) } else { problem::refusal(decision) };
        let settings = &self.prepared.settings;
        let jitter = Jitter { share: settings.retry_after_jitter, draw: self.shared.options.draw };
        headers::insert(response.headers_mut(), decision, &settings.headers, &jitter);
        response = shown(self.shared, decision, response);
        if let Some(on_refusal) = &self.shared.options.on_refusal {
            response = on_refusal(decision, response);
        }
        Box::new(response)
    }

    fn is_grpc(&self) -> bool {
        grpc::is_grpc(&self.parts.headers)
    }
}

fn must_be_held(acquired: &Acquired, prepared: &Prepared) -> bool {
    prepared.delays && acquired.decision.delay() > tollkeeper::Span::ZERO
}

/// Lets a request pass.
#[inline]
fn pass<B: Body>(
    shared: &Arc<Shared>,
    prepared: Arc<Prepared>,
    acquired: Acquired,
    mut parts: Parts,
    body: RequestBody<B>,
) -> (Request<RequestBody<B>>, Passed) {
    if shared.options.hands_over_charge
        && let Some(charge) = acquired.decision.charge()
    {
        parts.extensions.insert(charge);
    }
    let held = acquired
        .slot
        .map(|slot| Holding { slot: HeldSlot::new(&shared.limiter, slot), asks: Asks::of(&parts) });
    if let Some(Holding { slot, asks: Asks::Upgrade | Asks::Connect }) = &held {
        parts.extensions.insert(slot.clone());
    }
    let concerned = prepared.awaits_response || shared.options.on_response.is_some();
    let shared = concerned.then(|| Arc::clone(shared));
    (Request::from_parts(parts, body), Passed { shared, prepared, decision: acquired.decision, held })
}

/// A request that has been let pass, and what is still to be done when it is answered.
struct Passed {
    /// There if an answer concerns others than its client: all threads count these.
    shared: Option<Arc<Shared>>,
    prepared: Arc<Prepared>,
    decision: Decision,
    held: Option<Holding>,
}

/// A slot, and what decides how long it is held.
struct Holding {
    slot: HeldSlot,
    asks: Asks,
}

impl Passed {
    /// Marks the answer of the handler, and gives back what it decides to give back.
    #[inline]
    fn answered<R>(self, mut response: Response<R>) -> Response<ResponseBody<R>> {
        let Passed { shared, prepared, decision, held } = self;
        if prepared.awaits_response
            && let Some(shared) = &shared
        {
            give_back(&shared.limiter, &decision, response.status().as_u16());
        }
        // A request that passes is told no time to come again, so there is nothing to lengthen.
        headers::insert(response.headers_mut(), &decision, &prepared.settings.headers, &Jitter::NONE);
        if let Some(shared) = &shared {
            response = shown(shared, &decision, response);
        }
        let held = match held {
            // A tunnel has no body, so the slot is for whoever keeps the tunnel open.
            Some(Holding { slot, asks }) if asks.opened_by(response.status()) => {
                response.extensions_mut().insert(slot);
                None
            }
            held => held.map(|held| held.slot),
        };
        response.map(|body| ResponseBody::theirs(body, held))
    }
}

/// Gives back what the status of an answer decides to give back.
fn give_back(limiter: &Limiter, decision: &Decision, status: u16) {
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

/// Runs to its end what nobody waits for: here, if there is nothing to wait for, else by a task of its own.
fn in_background(future: impl Future<Output = ()> + Send + 'static) {
    let mut future = Box::pin(future);
    if future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()
        && let Ok(runtime) = tokio::runtime::Handle::try_current()
    {
        runtime.spawn(future);
    }
}

/// Shows an answer to the hook.
fn shown<R>(shared: &Shared, decision: &Decision, response: Response<R>) -> Response<R> {
    let Some(hook) = &shared.options.on_response else { return response };
    let (mut parts, body) = response.into_parts();
    hook(decision, &mut parts);
    Response::from_parts(parts, body)
}

type Asking<B> = Pin<Box<dyn Future<Output = Result<(Request<RequestBody<B>>, Passed), Refusal>> + Send>>;

pin_project! {
    /// The future of a [`RateLimit`] service.
    pub struct ResponseFuture<S, B>
    where
        S: Service<Request<RequestBody<B>>>,
        B: Body,
    {
        #[pin]
        state: State<S, B>,
    }
}

pin_project! {
    #[project = StateProjected]
    enum State<S, B>
    where
        S: Service<Request<RequestBody<B>>>,
        B: Body,
    {
        /// It is being decided, or held.
        Asking { asking: Asking<B>, service: S },
        /// It is the handler's, and all that is left to do is to put these headers into its answer.
        Passed { #[pin] future: S::Future, written: Option<Written> },
        /// It is the handler's.
        Running { #[pin] future: S::Future, passed: Option<Passed> },
        /// It did not pass.
        Answered { answer: Option<Refusal> },
    }
}

impl<S, B, R> Future for ResponseFuture<S, B>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>>,
    B: Body,
{
    type Output = Result<Response<ResponseBody<R>>, S::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let next = match this.state.as_mut().project() {
                StateProjected::Asking { asking, service } => match ready!(asking.as_mut().poll(context)) {
                    Ok((request, passed)) => {
                        State::Running { future: service.call(request), passed: Some(passed) }
                    }
                    Err(answer) => State::Answered { answer: Some(answer) },
                },
                StateProjected::Running { future, passed } => {
                    let response = ready!(future.poll(context))?;
                    let passed = passed.take().expect("polled after it was ready");
                    return Poll::Ready(Ok(passed.answered(response)));
                }
                StateProjected::Passed { future, written } => {
                    let mut response = ready!(future.poll(context))?;
                    let written = written.take().expect("polled after it was ready");
                    written.insert(response.headers_mut());
                    return Poll::Ready(Ok(response.map(|body| ResponseBody::theirs(body, None))));
                }
                StateProjected::Answered { answer } => {
                    let answer = answer.take().expect("polled after it was ready");
                    return Poll::Ready(Ok(answer.map(ResponseBody::ours)));
                }
            };
            this.state.set(next);
        }
    }
}

impl<S, B> std::fmt::Debug for ResponseFuture<S, B>
where
    S: Service<Request<RequestBody<B>>>,
    B: Body,
{
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
