//! Which requests and responses may be shared, judging by their heads, and the response that is shared.

use bytes::Bytes;
use http::header::{CACHE_CONTROL, PRAGMA, RANGE, SET_COOKIE, UPGRADE};
use http::{HeaderMap, HeaderName, Method, Response, StatusCode, Version, request, response};
use http_body::Body;

use super::future::FlightBody;
use crate::header_values::{is_event_stream, list_items};
use crate::response::ResponseBody;

/// Statuses whose responses describe the resource, not this request.
const SHARED_STATUSES: [StatusCode; 6] = [
    StatusCode::OK,
    StatusCode::NON_AUTHORITATIVE_INFORMATION,
    StatusCode::NO_CONTENT,
    StatusCode::MOVED_PERMANENTLY,
    StatusCode::NOT_FOUND,
    StatusCode::GONE,
];

/// Set in the extensions of a response that a follower got from its leader: for logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedResponse;

/// Whether the response to this request may be shared.
pub(super) fn may_share_request(head: &request::Parts, body: &impl Body) -> bool {
    let headers = &head.headers;
    let is_conditional = |name: &HeaderName| name.as_str().starts_with("if-");
    (head.method == Method::GET || head.method == Method::HEAD)
        && (body.is_end_stream() || body.size_hint().exact() == Some(0))
        && !headers.contains_key(RANGE)
        && !headers.contains_key(UPGRADE)
        && !headers.keys().any(is_conditional)
        && !has_directive(headers, &CACHE_CONTROL, &["no-cache", "no-store"])
        && !has_directive(headers, &PRAGMA, &["no-cache"])
}

/// Whether this response may be shared, if its `Vary` allows it and its body is small.
pub(super) fn may_share_response(head: &response::Parts) -> bool {
    let headers = &head.headers;
    SHARED_STATUSES.contains(&head.status)
        && !headers.contains_key(SET_COOKIE)
        && !has_directive(headers, &CACHE_CONTROL, &["private", "no-store"])
        // Its body never ends, and collecting it would hold back its events.
        && !is_event_stream(headers)
}

/// Whether a header has one of these directives, with or without an argument: `private="x-user"` is `private`. A comma
/// within quotes separates, too: that can only find a directive too many.
fn has_directive(headers: &HeaderMap, name: &HeaderName, directives: &[&str]) -> bool {
    list_items(headers, name).any(|item| {
        let directive = item.split(|byte| *byte == b'=').next().unwrap_or_default().trim_ascii();
        directives.iter().any(|wanted| directive.eq_ignore_ascii_case(wanted.as_bytes()))
    })
}

/// A complete response, as every follower gets it.
#[derive(Debug)]
pub(super) struct CompleteResponse {
    status: StatusCode,
    version: Version,
    headers: HeaderMap,
    body: Bytes,
}

impl CompleteResponse {
    pub(super) fn new(head: &response::Parts, body: Bytes) -> CompleteResponse {
        CompleteResponse { status: head.status, version: head.version, headers: head.headers.clone(), body }
    }

    /// The response for a follower. Extensions belong to the leader's connection and are not shared.
    pub(super) fn response<R: Body<Data = Bytes>>(&self) -> Response<FlightBody<R>> {
        let mut response = Response::new(ResponseBody::ours(self.body.clone()));
        *response.status_mut() = self.status;
        *response.version_mut() = self.version;
        *response.headers_mut() = self.headers.clone();
        response.extensions_mut().insert(SharedResponse);
        response
    }
}
