//! RFC 9457 problem responses, for requests that are refused, invalid or cannot be read.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use tollkeeper::{DecidedToll, Retry, Verdict};

/// The problem type of a refusal, from IANA's registry.
pub const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";

const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

/// Why a request is invalid or cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The status of the response, such as 400.
    pub status: StatusCode,
    /// What is wrong with the request.
    pub detail: String,
}

impl Problem {
    /// A problem with this status and detail.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Problem {
        Problem { status, detail: detail.into() }
    }

    /// The response with a problem body.
    pub fn response(&self) -> Response<Bytes> {
        let mut body = String::with_capacity(128 + self.detail.len());
        body.push_str("{\"title\":");
        push_text(&mut body, self.status.canonical_reason().unwrap_or("Error"));
        body.push_str(",\"status\":");
        body.push_str(self.status.as_str());
        body.push_str(",\"detail\":");
        push_text(&mut body, &self.detail);
        body.push('}');
        problem_response(self.status, body)
    }
}

/// The response to a refused request, without rate-limit headers, which
/// [`headers::insert`](crate::headers::insert) adds.
pub fn refusal(decision: &DecidedToll) -> Response<Bytes> {
    refusal_as(StatusCode::TOO_MANY_REQUESTS, decision)
}

/// Like [`refusal`], with another status, for gateways that support only some.
pub fn refusal_as(status: StatusCode, decision: &DecidedToll) -> Response<Bytes> {
    problem_response(status, refusal_body(status, decision))
}

/// The JSON body of a refusal. It describes no limit at all if the binding limit is hidden.
fn refusal_body(status: StatusCode, decision: &DecidedToll) -> String {
    let (verdict, binding) = decision.conclusion();
    let is_shown = binding.is_some_and(|limit| limit.rule().shown());
    let mut body = String::with_capacity(384);
    body.push_str("{\"type\":\"");
    body.push_str(QUOTA_EXCEEDED);
    body.push_str(
        "\",\"title\":\"Request cannot be satisfied as assigned quota has been exceeded\",\"status\":",
    );
    body.push_str(status.as_str());
    if let Some(reason) = decision.reason().filter(|_| is_shown) {
        body.push_str(",\"detail\":");
        push_text(&mut body, &reason.to_string());
    }
    body.push_str(",\"violated-policies\":[");
    let violated = |limit: &tollkeeper::LimitDecision<'_>| {
        is_shown && limit.due().enforced() && limit.rule().shown() && !limit.allowed()
    };
    for (index, limit) in decision.limits().filter(violated).enumerate() {
        if index > 0 {
            body.push(',');
        }
        push_text(&mut body, limit.name());
    }
    body.push(']');
    if let Verdict::Deny { retry: Retry::After(span) } = verdict {
        body.push_str(",\"retry_after\":");
        body.push_str(&tollkeeper_core::time::Seconds(span).to_string());
    }
    body.push('}');
    body
}

fn problem_response(status: StatusCode, body: String) -> Response<Bytes> {
    let mut response = Response::new(Bytes::from(body));
    *response.status_mut() = status;
    let headers: &mut HeaderMap = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, PROBLEM_JSON);
    headers.insert(header::CACHE_CONTROL, NO_STORE);
    response
}

/// Appends a text as a JSON string.
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
