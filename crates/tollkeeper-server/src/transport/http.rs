//! The HTTP API: matches a request to its endpoint, reads the body, and writes the response. Decisions are made by the
//! limiter.

pub mod connection;
pub mod dashboard;
pub mod endpoint;
pub mod fast_path;
pub mod forward_auth;
pub mod openapi;
pub mod operator;
pub mod overrides;
pub mod query;
pub mod request_body;
pub mod response_body;
pub mod top_json;

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode, Uri};
use tollkeeper::{Decision, Facts};
use tollkeeper_engine::ApiCall;
use tollkeeper_engine::api::active_limits::ActiveLimits;
use tollkeeper_engine::api::call::{ApiAnswer, ShowLimits as _};
use tollkeeper_engine::api::error::{ApiError, Code};
use tollkeeper_engine::api::request::CheckBody;
use tollkeeper_engine::api::{decision_json, request};
use tollkeeper_engine::json::{Reader, Writer};

use self::endpoint::{Endpoint, NoRoute, Route};
use self::forward_auth::Family;
use self::response_body::Reply;
use crate::control::access::{AccessError, Permission, presented};
use crate::control::active_limits::CannotReplace;
use crate::service::{Service, Versions};
use crate::telemetry::events;
use crate::telemetry::metrics::{Ended, RouteLabel, text};
use crate::telemetry::trace::Parent;

const MAX_BODY: usize = 64 << 10;
const MAX_BATCH_BODY: usize = 1 << 20;
pub(crate) const MAX_LIMITS_BODY: usize = 4 << 20;

/// How many keys `GET /v1/top` lists: the 50 busiest and the 50 most refused.
const TOP: usize = 50;

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const EVENTS: HeaderValue = HeaderValue::from_static("text/event-stream");
const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
const OPEN_METRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// The connection that a request arrived on.
#[derive(Clone, Copy, Debug)]
pub struct Via {
    /// The remote address.
    pub peer: SocketAddr,
    /// Whether the listener is bound to a loopback address.
    pub loopback: bool,
}

/// What endpoints need to know of a request besides its head and body.
#[derive(Clone, Copy, Debug)]
pub struct RequestContext {
    /// The remote address of the connection.
    pub peer: IpAddr,
    /// When the head had arrived (on the fast path: head and body).
    pub began: Instant,
    /// The parent span, if the request is to be traced.
    pub parent: Option<Parent>,
}

/// Handles one request.
pub async fn handle(service: &Service, via: Via, request: Request<Incoming>) -> Response<Reply> {
    let began = Instant::now();
    let (head, body) = request.into_parts();
    let parent = service.parent(&head.headers);
    let route = match Route::of(head.uri.path(), &head.method) {
        Ok(route) => route,
        Err(no_route) => return refuse_route(no_route, head.uri.path()),
    };
    let guarded = route.method != Method::GET || route.endpoint == Endpoint::Events;
    if guarded && is_cross_origin(&head.headers, &head.uri) {
        let message = "the `Origin` of this request is another site: only pages of this server may call it";
        return error_response(&ApiError::new(Code::Forbidden, message));
    }
    if (route.permission != Permission::Data || service.access.data_is_closed())
        && let Err(error) = service.access.admit(route.permission, presented(route.permission, &head.headers))
    {
        return refuse_entry(error, route, &head.headers);
    }
    if via.loopback
        && service.access.needs_host(route.permission)
        && !has_known_host(service, &head.headers, &head.uri)
    {
        let message = "the `Host` of this request is not an IP address, `localhost` or a name in `http.hosts`: if it \
                       is a name of this server, add it there";
        return error_response(&ApiError::new(Code::Forbidden, message));
    }
    let context = RequestContext { peer: via.peer.ip(), began, parent };
    let is_head = head.method == Method::HEAD;
    let mut response = finish(service, began, dispatch(service, context, route.endpoint, head, body).await);
    if is_head && matches!(response.body(), Reply::Whole(body) if body.is_empty()) {
        // hyper writes `content-length: 0` for GET, but not for HEAD.
        response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from_static("0"));
    }
    response
}

/// Handles a check whose body has arrived.
pub async fn handle_check(service: &Service, context: RequestContext, body: &mut [u8]) -> Response<Reply> {
    finish(service, context.began, answer(service, context, ApiCall::Check, body).await)
}

/// The response to a check whose body did not arrive completely.
pub fn handle_incomplete_check(service: &Service, began: Instant, error: ApiError) -> Response<Reply> {
    finish(service, began, Err(error))
}

/// Records the request in the metrics, and turns an error into a response.
fn finish(service: &Service, began: Instant, handled: Handled) -> Response<Reply> {
    let (counted, response) = match handled {
        Ok((counted, response)) => (counted, response),
        Err(error) => (Some((RouteLabel::NONE, Ended::Error)), error_response(&error)),
    };
    if let Some((route, ended)) = counted {
        service.metrics.http.record_on(route, ended, began.elapsed());
    }
    response
}

/// A response, with the metric labels of its decision. `None` if it decides nothing, or was already recorded.
type Handled = Result<(Option<(RouteLabel, Ended)>, Response<Reply>), ApiError>;

async fn dispatch(
    service: &Service,
    context: RequestContext,
    endpoint: Endpoint,
    head: Parts,
    body: Incoming,
) -> Handled {
    let limiter = &service.limiter;
    match endpoint {
        Endpoint::Call(call) => {
            let mut body = request_body::read(body, MAX_BODY).await?;
            answer(service, context, call, &mut body).await
        }
        Endpoint::Batch => {
            let mut body = request_body::read(body, MAX_BATCH_BODY).await?;
            let text = batch(service, context.parent, &mut body).await?;
            Ok((None, respond(StatusCode::OK, JSON, text)))
        }
        Endpoint::Usage => {
            let pairs = query::pairs(&head.uri)?;
            let answer = service.api().usage(&query::facts(&pairs, service)?).await?;
            Ok((None, answered(service, answer)))
        }
        Endpoint::State => operator::state(service, &head).await,
        Endpoint::Forget => operator::forget(service, &head).await,
        Endpoint::History => operator::history(service, &head.uri),
        Endpoint::Overrides => Ok((None, overrides::list(service))),
        Endpoint::SetOverride => {
            let mut body = request_body::read(body, MAX_BODY).await?;
            overrides::set(service, head.uri.path(), &mut body).await
        }
        Endpoint::DeleteOverride => overrides::delete(service, head.uri.path()).await,
        Endpoint::Limits => Ok((None, limits_response(&service.active_limits()))),
        Endpoint::PutLimits => {
            let dry_run = operator::is_dry_run(&head.uri)?;
            let body = request_body::read(body, MAX_LIMITS_BODY).await?;
            if dry_run {
                return operator::dry_run(service, &head, &body);
            }
            replace_limits(service, &head.headers, Some(body)).await
        }
        Endpoint::DeleteLimits => replace_limits(service, &head.headers, None).await,
        Endpoint::Top => {
            let mut out = Writer::default();
            let top = service.metrics.top_keys.top(TOP);
            top_json::write_top(&mut out, &top, &limiter.policy(), &service.redactor, &service.key_refs);
            Ok((None, respond(StatusCode::OK, JSON, out.finish())))
        }
        Endpoint::Events => {
            let listening = service.events.listen().ok_or_else(|| {
                let message =
                    format!("all {} event streams are in use: retry when one has ended", events::MOST);
                ApiError::new(Code::TooMany, message)
            })?;
            let mut response = Response::new(Reply::Events(listening));
            response.headers_mut().insert(header::CONTENT_TYPE, EVENTS);
            response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
            Ok((None, response))
        }
        Endpoint::Auth => Ok((None, forward_auth::answer(service, context, Family::Forwarded, head).await)),
        Endpoint::AuthNginx => {
            Ok((None, forward_auth::answer(service, context, Family::Original, head).await))
        }
        Endpoint::OpenApi => Ok((None, respond(StatusCode::OK, JSON, openapi::TEXT.as_str()))),
        Endpoint::Dashboard => Ok((None, dashboard::page(StatusCode::OK, &head.headers))),
        Endpoint::DashboardFile => {
            let name = head.uri.path().rsplit('/').next().unwrap_or_default();
            Ok((None, dashboard::file(name, &head.headers)?))
        }
        Endpoint::Health => Ok((None, respond(StatusCode::OK, TEXT, "ok\n"))),
        Endpoint::Ready if service.is_draining() => {
            Ok((None, respond(StatusCode::SERVICE_UNAVAILABLE, TEXT, "draining\n")))
        }
        Endpoint::Ready => {
            let failure = service.store.memory().snapshots().filter(|status| status.failing);
            let failure = failure.and_then(|status| status.last_failure);
            let text = match failure {
                Some(cause) => format!("ready\nthe snapshot was not written: {cause}\n"),
                None => "ready\n".to_owned(),
            };
            Ok((None, respond(StatusCode::OK, TEXT, text)))
        }
        Endpoint::Metrics => {
            let families = service.metrics.families(limiter, &service.store);
            Ok((None, respond(StatusCode::OK, OPEN_METRICS, text::write(&families))))
        }
    }
}

/// Answers a call, and records its decision.
async fn answer(service: &Service, context: RequestContext, call: ApiCall, body: &mut [u8]) -> Handled {
    let mut labels = None;
    let decided = |facts: &Facts<'_>, decision: &Decision| {
        service.trace(context.parent, call.name(), context.began, decision);
        labels = (call != ApiCall::Peek).then(|| counted(service, facts, decision));
    };
    let answer = service.api().answer(call, body, decided).await?;
    Ok((labels, answered(service, answer)))
}

/// The response with an answer, and with the rate-limit headers of its decision.
fn answered(service: &Service, answer: ApiAnswer) -> Response<Reply> {
    let body = match answer.text {
        Cow::Borrowed(text) => Bytes::from_static(text.as_bytes()),
        Cow::Owned(text) => Bytes::from(text),
    };
    let mut response = respond(answer.status, JSON, body);
    if let Some(decision) = &answer.decision {
        service.headers.load().insert(response.headers_mut(), decision);
    }
    response
}

fn limits_response(active: &ActiveLimits) -> Response<Reply> {
    let mut response = respond(StatusCode::OK, JSON, active.to_json());
    let etag = HeaderValue::from_str(&format!("\"{}\"", active.version)).expect("digits");
    response.headers_mut().insert(header::ETAG, etag);
    response
}

async fn replace_limits(service: &Service, headers: &HeaderMap, limits: Option<Vec<u8>>) -> Handled {
    let active = service.replace_limits(limits, &if_match(headers)).await.map_err(not_replaced)?;
    Ok((None, limits_response(&active)))
}

fn not_replaced(error: CannotReplace) -> ApiError {
    match error {
        CannotReplace::Version(version) => {
            let message = format!(
                "the active limits are version {version}: read them, then send `If-Match: \"{version}\"`"
            );
            ApiError::new(Code::VersionMismatch, message).at("If-Match")
        }
        CannotReplace::Invalid(report) => ApiError::new(Code::InvalidLimits, report.to_string()).at("limits"),
        CannotReplace::Failed(failure) => {
            let message = format!(
                "the store did not answer ({failure}): the limits may or may not have changed, GET /v1/limits shows the \
                 active ones"
            );
            ApiError::new(Code::StoreUnavailable, message)
        }
    }
}

/// The versions that `If-Match` accepts; any if the header is absent or `*`.
fn if_match(headers: &HeaderMap) -> Versions {
    let lines = headers.get_all(header::IF_MATCH).iter();
    let tags: Vec<&str> =
        lines.flat_map(|line| line.to_str().unwrap_or_default().split(',')).map(str::trim).collect();
    if tags.is_empty() || tags.contains(&"*") {
        return Versions::Any;
    }
    let version = |tag: &&str| tag.strip_prefix('"')?.strip_suffix('"')?.parse().ok();
    Versions::OneOf(tags.iter().filter_map(version).collect())
}

/// Decides the checks of a batch one by one, in order. An invalid check gets an error at its position in the list.
async fn batch(service: &Service, parent: Option<Parent>, body: &mut [u8]) -> Result<String, ApiError> {
    let mut out = Writer::default();
    out.raw("{\"decisions\":[");
    for (index, check) in request::read_batch(Reader::new(body)?)?.into_iter().enumerate() {
        if index > 0 {
            out.raw(",");
        }
        let began = Instant::now();
        let decided = match CheckBody::read(check) {
            Ok(check) => {
                let decision = service.limiter.check(&check.facts).cost(check.cost).await;
                let counted = |decision| (counted(service, &check.facts, &decision), decision);
                decision.map(counted).map_err(ApiError::from)
            }
            Err(error) => Err(error),
        };
        let (route, ended) = match &decided {
            Ok((counted, decision)) => {
                service.trace(parent, "check", began, decision);
                decision_json::write_decision(&mut out, &service.limiter, &service.redactor, decision);
                *counted
            }
            Err(error) => {
                error.write(&mut out);
                (RouteLabel::NONE, Ended::Error)
            }
        };
        service.metrics.http.record_on(route, ended, began.elapsed());
    }
    out.raw("]}");
    Ok(out.finish())
}

/// The metric labels of a decision about these facts. Logs the decision if it is a refusal.
fn counted(service: &Service, facts: &Facts<'_>, decision: &Decision) -> (RouteLabel, Ended) {
    let route = service.metrics.route(facts);
    service.log_refusal("http", route, decision);
    (route, ended(decision))
}

/// How a decided request ended, for metrics.
pub(crate) fn ended(decision: &Decision) -> Ended {
    match (decision.degraded(), decision.allowed()) {
        (Some(_), _) => Ended::Degraded,
        (None, true) => Ended::Allowed,
        (None, false) => Ended::Refused,
    }
}

fn respond(status: StatusCode, kind: HeaderValue, body: impl Into<Bytes>) -> Response<Reply> {
    let mut response = Response::new(Reply::Whole(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

fn error_response(error: &ApiError) -> Response<Reply> {
    let mut out = Writer::default();
    error.write(&mut out);
    let mut response = respond(error.code.status(), JSON, out.finish());
    if error.code == Code::TooLarge {
        // The rest of the body stays unread, so no further request can be read from this connection.
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

fn refuse_route(no_route: NoRoute, path: &str) -> Response<Reply> {
    let mut response = error_response(&no_route.error(path));
    if no_route == NoRoute::Method {
        let allow = HeaderValue::from_str(&endpoint::methods(path)).expect("methods are words");
        response.headers_mut().insert(header::ALLOW, allow);
    }
    response
}

fn refuse_entry(error: AccessError, route: &Route, headers: &HeaderMap) -> Response<Reply> {
    let (code, message) = match error {
        AccessError::AdminDisabled => (
            Code::Forbidden,
            "admin calls are off: set `admin.token_sha256` in the config to the SHA-256 of a token \
             (`printf %s TOKEN | sha256sum`), and send `Authorization: Bearer TOKEN`",
        ),
        AccessError::NeedsAdmin => (
            Code::Unauthorized,
            "this call needs the token whose SHA-256 is `admin.token_sha256`: send `Authorization: Bearer TOKEN`",
        ),
        AccessError::NeedsToken if route.permission == Permission::Gateway => (
            Code::Unauthorized,
            "this call needs a token whose SHA-256 is in `auth.token_sha256`: send `X-Tollkeeper-Token: TOKEN`",
        ),
        AccessError::NeedsToken => (
            Code::Unauthorized,
            "this call needs a token whose SHA-256 is in `auth.token_sha256`: send `Authorization: Bearer TOKEN`",
        ),
    };
    // A browser cannot send a token when it opens the page, which asks for it.
    let mut response = match route.endpoint {
        Endpoint::Dashboard => dashboard::page(code.status(), headers),
        _ => error_response(&ApiError::new(code, message)),
    };
    if code == Code::Unauthorized {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

/// Whether a page of another site sent the request. Only browsers send `Origin`, which names the site of the page.
fn is_cross_origin(headers: &HeaderMap, uri: &Uri) -> bool {
    let Some(origin) = headers.get(header::ORIGIN) else { return false };
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let host = uri.authority().map(|authority| authority.as_str()).or_else(|| text(header::HOST));
    let site = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, site)| site);
    site.is_none() || site != host
}

/// Whether `Host` names this server, against DNS rebinding. Browsers always send it, so a request without one does not
/// come from a web page.
fn has_known_host(service: &Service, headers: &HeaderMap, uri: &Uri) -> bool {
    if let Some(authority) = uri.authority() {
        return service.access.knows_host(authority.as_str().as_bytes());
    }
    let mut lines = headers.get_all(header::HOST).iter();
    match (lines.next(), lines.next()) {
        (None, _) => true,
        (Some(host), None) => service.access.knows_host(host.as_bytes()),
        (Some(_), Some(_)) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_pages_are_same_origin() {
        for (origin, host, expected) in [
            (None, "127.0.0.1:8080", false),
            (Some("http://127.0.0.1:8080"), "127.0.0.1:8080", false),
            (Some("http://127.0.0.1:8081"), "127.0.0.1:8080", true),
            (Some("http://evil.example"), "127.0.0.1:8080", true),
            (Some("null"), "127.0.0.1:8080", true),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, HeaderValue::from_static(host));
            if let Some(origin) = origin {
                headers.insert(header::ORIGIN, HeaderValue::from_static(origin));
            }
            assert_eq!(is_cross_origin(&headers, &Uri::from_static("/v1/check")), expected, "{origin:?}");
        }
    }
}
