//! The Python extension: translates arguments for `tollkeeper-engine`, and its answers for Python.
//!
//! Calls on a memory store keep the GIL: they take about a microsecond, and no thread then holds one of the store's locks
//! when another one forks. Calls that wait for Redis release it.

mod decided;
mod mailbox;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use tollkeeper_engine::{
    ApiCall, CLOSED, ConfigSource, Engine, EngineAnswer, EngineCall, EngineEvent, Format, Options, VisitBody,
    VisitRequest,
};

/// Status, JSON and headers (`name\nvalue\n…`) of an answer.
type Answer = (u16, String, String);

/// Set when the interpreter ends: from then on no thread of the engine may call Python.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Opens an engine on a config file, or on a config as JSON; returns its number. `listener` is called with the kind
/// and the message of each event.
#[pyfunction]
fn open(
    py: Python<'_>,
    path: Option<PathBuf>,
    text: Option<String>,
    store: Option<String>,
    name: Option<String>,
    at: Option<f64>,
    listener: Py<PyAny>,
) -> PyResult<u32> {
    let source = match (path, text) {
        (Some(path), None) => ConfigSource::File(path),
        (None, Some(text)) => ConfigSource::Text { format: Format::Json, text },
        _ => return Err(PyValueError::new_err("pass either a path or a text")),
    };
    let listen = move |event: &EngineEvent| {
        if ENDING.load(Ordering::Relaxed) {
            return;
        }
        Python::try_attach(|py| {
            if let Err(error) = listener.call1(py, (event.kind.name(), &event.message)) {
                error.write_unraisable(py, None);
            }
        });
    };
    let mut options = Options::new(source);
    options.store = store;
    options.name = name;
    options.at = at;
    options.listener = Some(Arc::new(listen));
    py.detach(|| tollkeeper_engine::open(options)).map_err(PyValueError::new_err)
}

/// Closes an engine; `False` if it was closed.
#[pyfunction]
fn close(py: Python<'_>, number: u32) -> bool {
    py.detach(|| tollkeeper_engine::close(number))
}

/// Whether the store of an engine is reached over the network.
#[pyfunction]
fn is_remote(number: u32) -> PyResult<bool> {
    Ok(engine(number)?.is_remote())
}

/// Moves the manual clock of an engine.
#[pyfunction]
fn advance(number: u32, seconds: f64) -> PyResult<()> {
    engine(number)?.advance(seconds).map_err(PyValueError::new_err)
}

/// Makes a call of the HTTP API; waits for Redis without the GIL.
#[pyfunction]
fn ask(py: Python<'_>, number: u32, call: &str, body: &str) -> PyResult<Answer> {
    let Some(asked) = start_ask(number, call, body)? else { return Ok(closed()) };
    Ok(as_tuple(match asked {
        EngineCall::Ready(answered) => answered,
        EngineCall::Pending(pending) => py.detach(|| pending.wait()),
    }))
}

/// Decides a request by its head, as a middleware does; returns the lines that `tollkeeper_engine` documents.
#[pyfunction]
fn visit(py: Python<'_>, number: u32, head: &[u8], own: &str, kind: &str, body: &[u8]) -> PyResult<String> {
    Ok(match start_visit(number, head, own, kind, body)? {
        EngineCall::Ready(text) => text,
        EngineCall::Pending(pending) => py.detach(|| pending.wait()),
    })
}

/// Reports the status of a response.
#[pyfunction]
fn answered(number: u32, ticket: u64, status: u16) -> bool {
    tollkeeper_engine::get(number).is_some_and(|engine| engine.answered(ticket, status))
}

/// Reports that a response was sent, or that the client is gone.
#[pyfunction]
fn gone(number: u32, ticket: u64) -> bool {
    tollkeeper_engine::get(number).is_some_and(|engine| engine.gone(ticket))
}

/// Called in a forked process: engines open their threads and connections anew.
#[pyfunction]
fn forked() {
    tollkeeper_engine::forked();
}

/// Called when the interpreter ends.
#[pyfunction]
fn ending() {
    ENDING.store(true, Ordering::Relaxed);
}

fn engine(number: u32) -> PyResult<Arc<Engine>> {
    tollkeeper_engine::get(number).ok_or_else(|| PyRuntimeError::new_err("the limiter is closed"))
}

/// `None` if the engine is closed.
fn start_ask(number: u32, call: &str, body: &str) -> PyResult<Option<EngineCall<EngineAnswer>>> {
    let call = ApiCall::of(call).ok_or_else(|| PyValueError::new_err("unknown call"))?;
    Ok(tollkeeper_engine::get(number).map(|engine| engine.ask(call, body.as_bytes().to_vec(), true)))
}

fn start_visit(number: u32, head: &[u8], own: &str, kind: &str, body: &[u8]) -> PyResult<EngineCall<String>> {
    let mut visit = VisitRequest::new(head.to_vec());
    visit.own = own.as_bytes().to_vec();
    visit.body = match kind {
        "unread" => VisitBody::Unread,
        "raw" => VisitBody::Raw(body.to_vec()),
        "too_large" => VisitBody::TooLarge,
        "broken" => VisitBody::Broken,
        _ => return Err(PyValueError::new_err("unknown kind of body")),
    };
    Ok(engine(number)?.visit(visit))
}

fn as_tuple(answered: EngineAnswer) -> Answer {
    (answered.status, answered.text, answered.headers)
}

fn closed() -> Answer {
    (410, CLOSED.to_owned(), String::new())
}

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::decided::{Decided, check};
    #[pymodule_export]
    use super::mailbox::Mailbox;
    #[pymodule_export]
    use super::{advance, answered, ask, close, ending, forked, gone, is_remote, open, visit};
}
