//! The fast path of a check on a memory store: a dict of plain values in, a decision out, and no JSON.
//!
//! The rest of a decision is written only if Python reads it. Everything unusual takes the general path, so this one has
//! no errors of its own.

use std::sync::Arc;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyInt, PyString};
use tollkeeper::{Decision, Facts, Span, Value};
use tollkeeper_engine::{ApiError, Engine};

/// A decision whose fields are converted when Python reads them.
#[pyclass(frozen, module = "tollkeeper._native")]
pub(crate) struct Decided {
    engine: Arc<Engine>,
    decision: Decision,
}

/// Name, limit, remaining, reset after and retry after.
type Numbers = (Option<String>, Option<u64>, Option<u64>, Option<f64>, Option<f64>);

#[pymethods]
impl Decided {
    /// The decision as the HTTP API writes it.
    fn json(&self) -> PyResult<String> {
        self.engine.decision_text(&self.decision).map_err(unexpected)
    }

    /// Name, limit, remaining and reset of the limit that decided, and when to retry: what most callers read.
    fn bound(&self) -> Numbers {
        let decision = &self.decision;
        let retry_after = decision.retry_after().map(seconds);
        let Some(limit) = decision.binding() else { return (None, None, None, None, retry_after) };
        let outcome = limit.outcome();
        let counted = limit.counted();
        (
            Some(limit.name().to_owned()),
            Some(outcome.limit),
            counted.then_some(outcome.remaining),
            outcome.reset_after.filter(|_| counted).map(seconds),
            retry_after,
        )
    }

    /// The headers for the response to the client.
    fn headers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let headers = PyDict::new(py);
        let text = self.engine.decision_headers(&self.decision).map_err(unexpected)?;
        let mut lines = text.split('\n');
        while let (Some(name), Some(value)) = (lines.next(), lines.next()) {
            headers.set_item(name, value)?;
        }
        Ok(headers)
    }
}

/// Decides a request, and charges it if it is admitted. `None` if the general path has to: it writes the errors.
#[pyfunction]
pub(crate) fn check(
    number: u32,
    facts: &Bound<'_, PyAny>,
    cost: &Bound<'_, PyAny>,
) -> Option<(bool, Decided)> {
    let engine = tollkeeper_engine::get(number)?;
    let cost = cost.cast_exact::<PyInt>().ok()?.extract::<u64>().ok()?;
    // Keeps the texts alive that the facts borrow.
    let items: Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>)> =
        facts.cast_exact::<PyDict>().ok()?.iter().collect();
    let mut read = Facts::new();
    for (name, value) in &items {
        read.put(name.cast_exact::<PyString>().ok()?.to_cow().ok()?, plain(value)?);
    }
    let decision = engine.limiter().ok()?.check(&read).cost(cost).wait().ok()?;
    Some((decision.allowed(), Decided { engine, decision }))
}

/// Seconds, equal to the number that is read from the JSON of a span.
fn seconds(span: Span) -> f64 {
    span.as_micros() as f64 / 1e6
}

/// A forked process that cannot open its own engine.
fn unexpected(error: ApiError) -> PyErr {
    PyRuntimeError::new_err(error.message)
}

/// A text, a whole number or a boolean.
fn plain<'a>(value: &'a Bound<'_, PyAny>) -> Option<Value<'a>> {
    if let Ok(text) = value.cast_exact::<PyString>() {
        return Some(Value::from(text.to_cow().ok()?));
    }
    if let Ok(truth) = value.cast_exact::<PyBool>() {
        return Some(Value::from(truth.is_true()));
    }
    value.cast_exact::<PyInt>().ok()?.extract::<i64>().ok().map(Value::from)
}
