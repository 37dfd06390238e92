//! Answers that are problems (RFC 9457): what a client is told when a request does not pass.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use tollkeeper::{DecidedToll, Retry, Verdict};

/// The type of a refusal, as IANA lists it.
pub const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";

const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

/// A request that makes no sense, or cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The status of the answer.
    pub status: StatusCode,
    /// What is wrong.
    pub detail: String,
}

impl Problem {
    /// A problem of this status.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Problem {
        Problem { status, detail: detail.into() }
    }

    /// The answer.
    pub fn response(&self) -> Response<Bytes> {
        let mut body = String::with_capacity(128 + self.detail.len());
        body.push_str("{\"title\":");
        push_text(&mut body, self.status.canonical_reason().unwrap_or("Error"));
        body.push_str(",\"status\":");
        body.push_str(self.status.as_str());
        body.push_str(",\"detail\":");
        push_text(&mut body, &self.detail);
        body.push('}');
        answer(self.status, body)
    }
}

/// The answer to a request that was refused: without rate-limit headers, which
/// [`headers::insert`](crate::headers::insert) adds.
pub fn refusal(decision: &DecidedToll<'_>) -> Response<Bytes> {
    refusal_as(StatusCode::TOO_MANY_REQUESTS, decision)
}

/// The same with another status, for gateways that know only some.
pub fn refusal_as(status: StatusCode, decision: &DecidedToll<'_>) -> Response<Bytes> {
    answer(status, refusal_body(status, decision))
}

/// What a refusal says. Where the limit that decides may not be shown, nothing is said of any.
fn refusal_body(status: StatusCode, decision: &DecidedToll<'_>) -> String {
    let (verdict, binding) = decision.conclusion();
    let may_tell = binding.is_some_and(|answer| answer.rule().shown());
    let mut body = String::with_capacity(384);
    body.push_str("{\"type\":\"");
    body.push_str(QUOTA_EXCEEDED);
    body.push_str(
        "\",\"title\":\"Request cannot be satisfied as assigned quota has been exceeded\",\"status\":",
    );
    body.push_str(status.as_str());
    if let Some(reason) = decision.reason().filter(|_| may_tell) {
        body.push_str(",\"detail\":");
        push_text(&mut body, &reason.to_string());
    }
    body.push_str(",\"violated-policies\":[");
    let violated = |answer: &tollkeeper::decision::LimitDecision<'_>| {
        may_tell && answer.due().enforced() && answer.rule().shown() && !answer.allowed()
    };
    for (index, answer) in decision.limits().filter(violated).enumerate() {
        if index > 0 {
            body.push(',');
        }
        push_text(&mut body, answer.name());
    }
    body.push(']');
    if let Verdict::Deny { retry: Retry::After(span) } = verdict {
        body.push_str(",\"retry_after\":");
        body.push_str(&tollkeeper::time::Seconds(span).to_string());
    }
    body.push('}');
    body
}

fn answer(status: StatusCode, body: String) -> Response<Bytes> {
    let mut response = Response::new(Bytes::from(body));
    *response.status_mut() = status;
    let headers: &mut HeaderMap = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, PROBLEM_JSON);
    headers.insert(header::CACHE_CONTROL, NO_STORE);
    response
}

/// Writes a text as JSON.
fn push_text(out: &mut String, text: &str) {
    out.push('"');
    for char in text.chars() {
        match char {
            '"' | '\\' => out.extend(['\\', char]),
            '\0'..='\x1f' => out.push_str(&format!("\\u{:04x}", u32::from(char))),
            _ => out.push(char),
        }
    }
    out.push('"');
}
