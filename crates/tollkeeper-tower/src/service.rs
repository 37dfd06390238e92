//! The service: reads the facts of a request, decides it, delays it if needed, passes it on, and adds headers to its
//! response.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response, StatusCode, header};
use http_body::Body;
use pin_project_lite::pin_project;
use tollkeeper::{Acquired, DecidedToll, Decision, SlotGuard, Span};
use tollkeeper_core::net::CanonicalIp;
use tower_service::Service;

use crate::body::RequestBody;
use crate::facts::{PartialFacts, Reader};
use crate::headers::{self, Jitter, SerializedHeaders};
use crate::layer::{Options, Shared};
use crate::peer;
use crate::response::ResponseBody;
use crate::settings::Prepared;
use crate::slot::{Asks, HeldSlot};
use crate::visit::{self, Application, Visit};

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
        let step = shared
            .active_settings
            .with(&shared.limiter, |prepared| LayerVisit::new(shared, prepared, &parts).decide_now());
        let state = match step {
            NextStep::Pass(headers) => {
                let future = self.inner.call(Request::from_parts(parts, body));
                FutureState::Passed { future, headers }
            }
            NextStep::Keep(kept) if kept.acquired.decision.delay() == Span::ZERO => {
                let (request, passed) = pass(shared, *kept, parts, body);
                FutureState::Running { future: self.inner.call(request), passed: Some(passed) }
            }
            NextStep::Refuse(refusal) => FutureState::Answered { answer: Some(refusal) },
            // To be delayed, or to be decided once the body or the store has been waited for.
            held_or_undecided => {
                // The service that is ready is the one to be called.
                let ready = self.inner.clone();
                let service = std::mem::replace(&mut self.inner, ready);
                let shared = Arc::clone(shared);
                let asking = Box::pin(async move {
                    let kept = match held_or_undecided {
                        NextStep::Keep(kept) => *kept,
                        _ => {
                            let prepared = shared.active_settings.read(&shared.limiter);
                            let visit = LayerVisit::new(&shared, &prepared, &parts);
                            let acquired = visit.decide(&mut body).await?;
                            Kept { prepared, acquired }
                        }
                    };
                    shared.limiter.hold(&kept.acquired.decision).await;
                    Ok(pass(&shared, kept, parts, body))
                });
                FutureState::Asking { asking, service }
            }
        };
        ResponseFuture { state }
    }
}

/// The response to a request that did not pass.
type Refusal = Box<Response<Bytes>>;

/// What happens to a request next. It fits into two registers, so that it is not copied on its way.
enum NextStep {
    /// It passes. Its response gets these headers, and nothing else of the decision is needed.
    Pass(SerializedHeaders),
    /// It passes, maybe after a delay. The decision is needed later: for slots, refunds, a hook, or a handler that takes
    /// the charge.
    Keep(Box<Kept>),
    /// It is refused.
    Refuse(Refusal),
    /// The store or the body has to be waited for.
    Wait,
}

const _: () = assert!(size_of::<NextStep>() == 2 * size_of::<usize>());

/// An admitted request whose decision is needed later.
struct Kept {
    prepared: Arc<Prepared>,
    acquired: Acquired,
}

/// A request to a service of the layer.
struct LayerVisit<'a> {
    shared: &'a Shared,
    prepared: &'a Arc<Prepared>,
    visit: Visit<'a, LayerApplication<'a>>,
}

/// What the layer knows of a request besides its head.
struct LayerApplication<'a> {
    options: &'a Options,
    parts: &'a Parts,
}

impl Application for LayerApplication<'_> {
    #[inline]
    fn peer(&self) -> Option<CanonicalIp> {
        peer::of(&self.parts.extensions).or(self.options.assumed_peer)
    }

    #[inline]
    fn matched_route(&self) -> Option<&str> {
        peer::matched(&self.parts.extensions)
    }

    #[inline]
    fn add_facts<'f>(&'f self, reader: &'f Reader, partial: &mut PartialFacts<'f>) {
        for (name, read) in &self.options.facts {
            if reader.names(name)
                && let Some(value) = read(self.parts)
            {
                partial.put(name, reader.identified(name, value.into()));
            }
        }
    }

    #[inline]
    fn cost(&self) -> u64 {
        self.options.cost.as_ref().map_or(1, |cost| cost(self.parts))
    }

    #[inline]
    fn longest_delay(&self) -> Span {
        self.options.longest_delay
    }
}

impl<'a> LayerVisit<'a> {
    #[inline]
    fn new(shared: &'a Shared, prepared: &'a Arc<Prepared>, parts: &'a Parts) -> LayerVisit<'a> {
        let application = LayerApplication { options: &shared.options, parts };
        let visit = Visit { limiter: &shared.limiter, prepared, parts, application };
        LayerVisit { shared, prepared, visit }
    }

    /// Decides, unless the store or the body has to be waited for.
    fn decide_now(&self) -> NextStep {
        if !self.shared.limiter.is_embedded() {
            return NextStep::Wait;
        }
        let mut partial = PartialFacts::default();
        self.visit.read_head(&mut partial);
        if self.visit.needs_body(&partial) {
            return NextStep::Wait;
        }
        let facts = match self.visit.complete(&partial) {
            Ok(facts) => facts,
            Err(problem) => return NextStep::Refuse(Box::new(self.visit.problem(&problem))),
        };
        let mut step = NextStep::Wait;
        let read = |decided: &DecidedToll| step = self.step(decided);
        match self.visit.acquire(facts).decide_with(read).map(drop) {
            Ok(()) => step,
            Err(error) => NextStep::Refuse(Box::new(self.visit.invalid(&error))),
        }
    }

    fn step(&self, decided: &DecidedToll) -> NextStep {
        let Shared { limiter, options, .. } = self.shared;
        let prepared = self.prepared;
        if !decided.allowed() {
            return NextStep::Refuse(self.refused(decided));
        }
        if prepared.keeps_decision || options.on_response.is_some() || options.hands_over_charge {
            let slot = SlotGuard::of(limiter, decided);
            let acquired = Acquired { decision: decided.to_decision(), slot };
            return NextStep::Keep(Box::new(Kept { prepared: Arc::clone(prepared), acquired }));
        }
        // An admitted request has no Retry-After that could be lengthened.
        NextStep::Pass(headers::write(decided, &prepared.settings.headers, &Jitter::NONE))
    }

    /// Decides once the body and the store have been waited for.
    async fn decide<B>(&self, body: &mut RequestBody<B>) -> Result<Acquired, Refusal>
    where
        B: Body<Data = Bytes> + Unpin,
    {
        let buffered;
        let mut partial = PartialFacts::default();
        let client = self.visit.read_head(&mut partial);
        if self.visit.needs_body(&partial) {
            buffered = body.buffer().await;
            self.visit.read_body(&buffered, client, &mut partial);
        }
        let facts = match self.visit.complete(&partial) {
            Ok(facts) => facts,
            Err(problem) => {
                // A client that waits for `100 Continue` has not sent anything, and need not.
                let waits = self.visit.parts.headers.contains_key(header::EXPECT) && body.is_untouched();
                if problem.status == StatusCode::PAYLOAD_TOO_LARGE && !waits {
                    body.drain().await;
                }
                return Err(Box::new(self.visit.problem(&problem)));
            }
        };
        match self.visit.acquire(facts).await {
            Ok(acquired) if acquired.decision.allowed() => Ok(acquired),
            Ok(acquired) => Err(self.refused(&acquired.decision)),
            Err(error) => Err(Box::new(self.visit.invalid(&error))),
        }
    }

    /// The response to a refused request, which the hooks of the application may change.
    fn refused(&self, decided: &DecidedToll) -> Refusal {
        let options = &self.shared.options;
        let mut response = self.visit.refusal(decided, options.draw);
        if options.on_response.is_some() || options.on_refusal.is_some() {
            let decision = decided.to_decision();
            response = shown(self.shared, &decision, response);
            if let Some(on_refusal) = &options.on_refusal {
                response = on_refusal(&decision, response);
            }
        }
        Box::new(response)
    }
}

/// Passes a request on to the handler.
#[inline]
fn pass<B: Body>(
    shared: &Arc<Shared>,
    kept: Kept,
    mut parts: Parts,
    body: RequestBody<B>,
) -> (Request<RequestBody<B>>, Passed) {
    let Kept { prepared, acquired } = kept;
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

/// An admitted request whose decision is needed when the handler has answered.
struct Passed {
    /// Only if a refund or a hook needs it: all threads share its reference count.
    shared: Option<Arc<Shared>>,
    prepared: Arc<Prepared>,
    decision: Decision,
    held: Option<Holding>,
}

/// A slot, and whether the request asks for a tunnel that outlives its response.
struct Holding {
    slot: HeldSlot,
    asks: Asks,
}

impl Passed {
    /// Adds headers to the response, refunds limits by its status, and attaches the slot.
    #[inline]
    fn answered<R>(self, mut response: Response<R>) -> Response<ResponseBody<R>> {
        let Passed { shared, prepared, decision, held } = self;
        if prepared.awaits_response
            && let Some(shared) = &shared
        {
            visit::refund(&shared.limiter, &decision, response.status().as_u16());
        }
        headers::insert(response.headers_mut(), &decision, &prepared.settings.headers, &Jitter::NONE);
        if let Some(shared) = &shared {
            response = shown(shared, &decision, response);
        }
        let held = match held {
            // A tunnel has no body: the code that keeps it open holds the slot.
            Some(Holding { slot, asks }) if asks.opened_by(response.status()) => {
                response.extensions_mut().insert(slot);
                None
            }
            held => held.map(|held| held.slot),
        };
        response.map(|body| ResponseBody::theirs(body, held))
    }
}

/// Calls the response hook.
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
        state: FutureState<S, B>,
    }
}

pin_project! {
    #[project = FutureStateProjected]
    enum FutureState<S, B>
    where
        S: Service<Request<RequestBody<B>>>,
        B: Body,
    {
        /// The request is being decided, or delayed.
        Asking { asking: Asking<B>, service: S },
        /// The handler runs; these headers are added to its response.
        Passed { #[pin] future: S::Future, headers: SerializedHeaders },
        /// The handler runs; its response needs the decision.
        Running { #[pin] future: S::Future, passed: Option<Passed> },
        /// The request was refused.
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
                FutureStateProjected::Asking { asking, service } => {
                    match ready!(asking.as_mut().poll(context)) {
                        Ok((request, passed)) => {
                            FutureState::Running { future: service.call(request), passed: Some(passed) }
                        }
                        Err(answer) => FutureState::Answered { answer: Some(answer) },
                    }
                }
                FutureStateProjected::Running { future, passed } => {
                    let response = ready!(future.poll(context))?;
                    let passed = passed.take().expect("polled after it was ready");
                    return Poll::Ready(Ok(passed.answered(response)));
                }
                FutureStateProjected::Passed { future, headers } => {
                    let response = ready!(future.poll(context))?;
                    let mut response = response.map(|body| ResponseBody::theirs(body, None));
                    headers.insert(response.headers_mut());
                    return Poll::Ready(Ok(response));
                }
                FutureStateProjected::Answered { answer } => {
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
