//! The HTTP API: matches a request to its endpoint, reads the body, and writes the response. Decisions are made by the
//! limiter.

pub mod connection;
pub mod dashboard;
pub mod decision_json;
pub mod endpoint;
pub mod error;
pub mod fast_path;
pub mod forward_auth;
pub mod openapi;
pub mod operator;
pub mod overrides;
pub mod query;
pub mod request;
pub mod request_body;
pub mod response_body;

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response, StatusCode, Uri};
use tollkeeper::{Acquired, Correction, Costs, Decision, Facts, Unavailable};

use self::endpoint::{Endpoint, NoRoute, Route};
use self::error::{ApiError, Code};
use self::forward_auth::Family;
use self::request::{CheckBody, Correct, Reserve};
use self::response_body::Reply;
use crate::control::access::{AccessError, Permission, presented};
use crate::control::active_limits::{ActiveLimits, CannotReplace};
use crate::json::{Reader, Writer};
use crate::service::{Service, Versions};
use crate::telemetry::events;
use crate::telemetry::metrics::{Ended, RouteLabel, text};
use crate::telemetry::trace::Parent;

const MAX_BODY: usize = 64 << 10;
const MAX_BATCH_BODY: usize = 1 << 20;
pub(crate) const MAX_LIMITS_BODY: usize = 4 << 20;
/// Initial capacity of a response body: fits a decision about one or two limits.
const TYPICAL_RESPONSE: usize = 1 << 10;

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
    finish(service, context.began, check(service, context, body).await)
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
        Endpoint::Check => {
            let mut body = request_body::read(body, MAX_BODY).await?;
            check(service, context, &mut body).await
        }
        Endpoint::Peek => {
            let mut body = request_body::read(body, MAX_BODY).await?;
            let check = CheckBody::read(Reader::new(&mut body)?)?;
            let decision = limiter.peek(&check.facts).cost(check.cost).await?;
            service.trace(context.parent, "peek", context.began, &decision);
            let mut out = Writer::with_capacity(TYPICAL_RESPONSE);
            decision_json::write_decision(&mut out, limiter, &service.redactor, &decision);
            Ok((None, respond(StatusCode::OK, JSON, out.finish())))
        }
        Endpoint::Batch => {
            let mut body = request_body::read(body, MAX_BATCH_BODY).await?;
            let text = batch(service, context.parent, &mut body).await?;
            Ok((None, respond(StatusCode::OK, JSON, text)))
        }
        Endpoint::Reserve => {
            let mut body = request_body::read(body, MAX_BODY).await?;
            let Reserve { check, ttl } = Reserve::read(Reader::new(&mut body)?)?;
            let decision = limiter.reserve(&check.facts, ttl).cost(check.cost).await?;
            service.trace(context.parent, "reserve", context.began, &decision);
            Ok((Some(counted(service, &check.facts, &decision)), decision_response(service, &decision)))
        }
        Endpoint::Settle => {
            let mut body = request_body::read(body, MAX_BODY).await?;
            let settle = Correct::read(Reader::new(&mut body)?)?;
            let charge = limiter.open_charge(settle.charge).await?.ok_or_else(unknown_charge)?;
            correction_response(limiter.settle(&charge, settle.actual()?).await?)
        }
        Endpoint::Refund => {
            let mut body = request_body::read(body, MAX_BODY).await?;
            let refund = Correct::read(Reader::new(&mut body)?)?;
            let charge = limiter.open_charge(refund.charge).await?.ok_or_else(unknown_charge)?;
            correction_response(limiter.refund_part(&charge, refund.costs().unwrap_or(Costs::All)).await?)
        }
        Endpoint::Acquire => {
            let mut body = request_body::read(body, MAX_BODY).await?;
            let check = CheckBody::read(Reader::new(&mut body)?)?;
            let Acquired { decision, slot } = limiter.acquire(&check.facts).cost(check.cost).await?;
            service.trace(context.parent, "acquire", context.began, &decision);
            // From here on the slot belongs to the client. A client that disconnects earlier drops this future, and with
            // it the slot.
            let slot = slot.map(|slot| limiter.seal_slot(&slot.keep()));
            let mut out = Writer::with_capacity(TYPICAL_RESPONSE);
            decision_json::write_acquired(&mut out, limiter, &service.redactor, &decision, slot.as_deref());
            Ok((
                Some(counted(service, &check.facts, &decision)),
                decision_response_with(service, &decision, out),
            ))
        }
        Endpoint::Release | Endpoint::Renew => {
            let mut body = request_body::read(body, MAX_BODY).await?;
            let text = request::read_slot(Reader::new(&mut body)?)?;
            let slot = limiter.open_slot(text).await?.ok_or_else(unknown_slot)?;
            let held = match endpoint {
                Endpoint::Release => limiter.release(&slot).await?,
                _ => limiter.renew(&slot).await?,
            };
            if held { done(true) } else { Err(unknown_slot()) }
        }
        Endpoint::Usage => {
            let pairs = query::pairs(&head.uri)?;
            let decision = limiter.usage(&query::facts(&pairs, service)?).await?;
            let mut out = Writer::default();
            out.raw("{\"limits\":");
            decision_json::write_limits(&mut out, &service.redactor, &decision);
            out.raw("}");
            Ok((None, respond(StatusCode::OK, JSON, out.finish())))
        }
        Endpoint::State => operator::state(service, &head).await,
        Endpoint::Forget => operator::forget(service, &head).await,
        Endpoint::Explain => {
            let mut body = request_body::read(body, MAX_BODY).await?;
            operator::explain(service, &mut body)
        }
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
            decision_json::write_top(&mut out, &top, &limiter.policy(), &service.redactor, &service.key_refs);
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

async fn check(service: &Service, context: RequestContext, body: &mut [u8]) -> Handled {
    let check = CheckBody::read(Reader::new(body)?)?;
    let decision = service.limiter.check(&check.facts).cost(check.cost).await?;
    service.trace(context.parent, "check", context.began, &decision);
    Ok((Some(counted(service, &check.facts, &decision)), decision_response(service, &decision)))
}

fn limits_response(active: &ActiveLimits) -> Response<Reply> {
    let text = serde_json::to_string(active).expect("limits have only string keys");
    let mut response = respond(StatusCode::OK, JSON, text);
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

fn ended(decision: &Decision) -> Ended {
    match (decision.degraded(), decision.allowed()) {
        (Some(_), _) => Ended::Degraded,
        (None, true) => Ended::Allowed,
        (None, false) => Ended::Refused,
    }
}

/// The response to a check or reservation: 200 or 429, with the rate limit headers.
fn decision_response(service: &Service, decision: &Decision) -> Response<Reply> {
    let mut out = Writer::with_capacity(TYPICAL_RESPONSE);
    decision_json::write_decision(&mut out, &service.limiter, &service.redactor, decision);
    decision_response_with(service, decision, out)
}

/// The same with a body that is already written.
fn decision_response_with(service: &Service, decision: &Decision, out: Writer) -> Response<Reply> {
    let status = if decision.allowed() { StatusCode::OK } else { StatusCode::TOO_MANY_REQUESTS };
    let mut response = respond(status, JSON, out.finish());
    service.headers.load().insert(response.headers_mut(), decision);
    response
}

fn done(done: bool) -> Handled {
    let text = if done { "{\"done\":true}" } else { "{\"done\":false}" };
    Ok((None, respond(StatusCode::OK, JSON, text)))
}

fn correction_response(correction: Correction) -> Handled {
    match correction {
        Correction::Done => done(true),
        Correction::Repeated => done(false),
        Correction::Failed => Err(Unavailable.into()),
        Correction::Full => {
            let message = "the store is full and cannot record this correction: the charge stays valid, so retry later, or \
                           raise `memory.max_keys`";
            Err(ApiError::new(Code::StoreUnavailable, message))
        }
        Correction::Unknown => Err(unknown_charge()),
    }
}

fn unknown_charge() -> ApiError {
    let message = "unknown charge: not issued by this store, expired, or already corrected completely";
    ApiError::new(Code::UnknownCharge, message).at("charge")
}

fn unknown_slot() -> ApiError {
    let message = "unknown slot: not issued by this store, released, or expired";
    ApiError::new(Code::UnknownSlot, message).at("slot")
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
