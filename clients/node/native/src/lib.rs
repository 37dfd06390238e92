//! The addon of the Node package: plain functions over `tollkeeper-engine`, with text in and text out.
//!
//! Engines are numbers, because a class instance costs more than a decision. A call on a memory store returns its
//! answer. A call that waits for Redis returns `null`. The JavaScript thread that made it runs it with [`run`], and is
//! woken for that once for all replies that arrive before it does.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use mimalloc::MiMalloc;
use napi::bindgen_prelude::{Latin1String, Result};
use napi::threadsafe_function::{ThreadsafeFunction, ThreadsafeFunctionCallMode};
use napi::{Error, Status};
use napi_derive::napi;
use tollkeeper_engine::{
    ApiCall, CLOSED, Calls, ConfigSource, Engine, EngineAnswer, EngineCall, EngineEvent, Format, Options,
    VisitBody, VisitRequest,
};

/// A call is allocated by a JavaScript thread and freed by the engine's. In glibc both would wait for one lock.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// Calls a JavaScript function without arguments from any thread. It is weak: it does not keep the process alive.
type Wake = ThreadsafeFunction<(), (), (), Status, false, true>;

/// What one JavaScript thread has under way.
struct Local {
    /// Calls that wait for Redis. The result of a call is `CALL\nANSWER`.
    calls: Calls<String>,
    events: Arc<Events>,
}

/// Events for one JavaScript thread, from any thread.
struct Events {
    messages: Mutex<Vec<String>>,
    wake: Arc<Wake>,
}

impl Events {
    fn push(&self, message: String) {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).push(message);
        wake(&self.wake);
    }
}

fn wake(thread: &Wake) {
    // A thread that has ended has no use for its messages.
    let _ = thread.call((), ThreadsafeFunctionCallMode::NonBlocking);
}

thread_local! {
    /// Each worker thread of Node loads the addon anew.
    static LOCAL: RefCell<Option<Local>> = const { RefCell::new(None) };
}

fn with_local<T>(then: impl FnOnce(&mut Local) -> T) -> Result<T> {
    let local = |local: &mut Option<Local>| local.as_mut().map(then);
    LOCAL.with_borrow_mut(local).ok_or_else(|| Error::from_reason("call connect() before any other function"))
}

/// Sets the function that is called when this thread has to call `run`.
#[napi]
pub fn connect(run: Wake) {
    let run = Arc::new(run);
    let events = Arc::new(Events { messages: Mutex::default(), wake: Arc::clone(&run) });
    LOCAL.set(Some(Local { calls: Calls::new(move || wake(&run)), events }));
}

/// Starts and continues the calls of this thread. Returns the messages for it: `CALL\nANSWER` of calls that have ended,
/// and events, as `eLISTENER\nKIND\nMESSAGE`.
#[napi]
pub fn run() -> Result<Vec<String>> {
    with_local(|local| {
        let mut messages = local.calls.run();
        messages.append(&mut local.events.messages.lock().unwrap_or_else(PoisonError::into_inner));
        messages
    })
}

/// Opens an engine and returns its number. `source` is the path of a config file or the JSON text of a config.
#[napi]
pub fn open(
    is_file: bool,
    source: String,
    store: Option<String>,
    name: Option<String>,
    at: Option<f64>,
    listener: u32,
) -> Result<u32> {
    let source = if is_file {
        ConfigSource::File(source.into())
    } else {
        ConfigSource::Text { format: Format::Json, text: source }
    };
    let events = with_local(|local| Arc::clone(&local.events))?;
    let mut options = Options::new(source);
    options.store = store;
    options.name = name;
    options.at = at;
    options.listener = Some(Arc::new(move |event: &EngineEvent| {
        events.push(format!("e{listener}\n{}\n{}", event.kind.name(), event.message));
    }));
    tollkeeper_engine::open(options).map_err(Error::from_reason)
}

/// Closes an engine; false if it was closed.
#[napi]
pub fn close(engine: u32) -> bool {
    tollkeeper_engine::close(engine)
}

/// Whether calls wait for a store outside of this process.
#[napi]
pub fn is_remote(engine: u32) -> bool {
    tollkeeper_engine::get(engine).is_some_and(|engine| engine.is_remote())
}

/// Moves the manual clock.
#[napi]
pub fn advance(engine: u32, seconds: f64) -> Result<()> {
    let engine = tollkeeper_engine::get(engine).ok_or_else(|| Error::from_reason("the limiter is closed"))?;
    engine.advance(seconds).map_err(Error::from_reason)
}

/// The names of the calls that `ask` takes, such as `check`: a call is its place in this list.
#[napi]
pub fn calls() -> Vec<&'static str> {
    ApiCall::ALL.map(ApiCall::name).to_vec()
}

/// A call of the HTTP API, by its place in `calls`. Returns the JSON of the answer, and after a newline its
/// headers; `None` if `run` returns it, as message `call`.
#[napi(catch_unwind)]
pub fn ask(engine: u32, call: i64, api_call: u32, body: String, headers: bool) -> Result<Option<String>> {
    let Some(engine) = tollkeeper_engine::get(engine) else { return Ok(Some(CLOSED.to_owned())) };
    let api_call = usize::try_from(api_call).ok().and_then(|number| ApiCall::ALL.get(number));
    let api_call = *api_call.ok_or_else(|| Error::from_reason("unknown call"))?;
    deliver(engine.ask(api_call, body.into_bytes(), headers), call, with_headers)
}

/// The active policy, as `GET /v1/limits` shows it. No store is asked for it, so nothing is waited for.
#[napi]
pub fn policy(engine: u32) -> String {
    let engine = tollkeeper_engine::get(engine);
    engine.map_or_else(
        || CLOSED.to_owned(),
        |engine| engine.ask(ApiCall::Limits, Vec::new(), false).wait().text,
    )
}

fn with_headers(answered: EngineAnswer) -> String {
    let EngineAnswer { mut text, headers, .. } = answered;
    if !headers.is_empty() {
        text.push('\n');
        text.push_str(&headers);
    }
    text
}

/// Decides a request by its head. `body_kind` says what `body` is: 0 unread, 1 its bytes as the characters 0 to 255,
/// 2 JSON, 3 too large, 4 broken. Returns lines, or `None` if `run` returns them, as message `call`.
#[napi(catch_unwind)]
pub fn visit(
    engine: u32,
    call: i64,
    head: Latin1String,
    own: String,
    body_kind: u32,
    body: String,
    decision: bool,
) -> Result<Option<String>> {
    let Some(engine) = tollkeeper_engine::get(engine) else { return Ok(Some(CLOSED.to_owned())) };
    let mut visit = VisitRequest::new(head.to_vec());
    visit.own = own.into_bytes();
    visit.decision = decision;
    visit.body = match body_kind {
        0 => VisitBody::Unread,
        1 => VisitBody::Raw(body.chars().map(|byte| u8::try_from(byte).unwrap_or(b'?')).collect()),
        2 => VisitBody::Json(body.into_bytes()),
        3 => VisitBody::TooLarge,
        _ => VisitBody::Broken,
    };
    deliver(engine.visit(visit), call, std::convert::identity)
}

/// Returns an answer that is ready, or adds the call to those of this thread.
fn deliver<T: Send + 'static>(
    asked: EngineCall<T>,
    call: i64,
    text: fn(T) -> String,
) -> Result<Option<String>> {
    match asked {
        EngineCall::Ready(answer) => Ok(Some(text(answer))),
        EngineCall::Pending(pending) => {
            with_local(|local| local.calls.add(pending, move |answer| format!("{call}\n{}", text(answer))))?;
            Ok(None)
        }
    }
}

/// The handler has answered with this status; false if the ticket is unknown.
#[napi]
pub fn answered(engine: u32, ticket: i64, status: u32) -> bool {
    with_ticket(engine, ticket, |engine, ticket| {
        u16::try_from(status).is_ok_and(|status| engine.answered(ticket, status))
    })
}

/// The response has been sent, or the client is gone; false if the ticket is unknown.
#[napi]
pub fn gone(engine: u32, ticket: i64) -> bool {
    with_ticket(engine, ticket, |engine, ticket| engine.gone(ticket))
}

fn with_ticket(engine: u32, ticket: i64, then: impl FnOnce(&Arc<Engine>, u64) -> bool) -> bool {
    match (tollkeeper_engine::get(engine), u64::try_from(ticket)) {
        (Some(engine), Ok(ticket)) => then(&engine, ticket),
        _ => false,
    }
}
