//! HTTP: which call it is, its body, its answer. Translates, and decides nothing.

pub mod answer;
pub mod ask;
pub mod body;
pub mod error;
pub mod plain;

use std::time::Instant;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};
use tollkeeper::facts::MAX_FACTS;
use tollkeeper::{Decision, Facts};

use self::ask::Ask;
use self::error::{ApiError, Code};
use crate::json::{Reader, Writer};
use crate::metrics::{Ended, Route, text};
use crate::service::Service;
use crate::trace::Parent;

const MAX_BODY: usize = 64 << 10;
const MAX_BATCH_BODY: usize = 1 << 20;
/// What a decision about one or two limits has room in.
const USUAL_ANSWER: usize = 1 << 10;

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
const OPEN_METRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// When a request began, and whose span it is a part of, if it is to be traced.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// When all of it was here.
    pub began: Instant,
    /// Whose span it is a part of.
    pub parent: Option<Parent>,
}

/// Answers one request.
pub async fn answer(service: &Service, request: Request<Incoming>) -> Response<Full<Bytes>> {
    answer_whole(service, request).await.map(Full::new)
}

/// Answers a check whose body is here.
pub async fn answer_check(service: &Service, asked: Asked, body: &mut [u8]) -> Response<Bytes> {
    finish(service, asked.began, check(service, asked, body).await)
}

/// Answers a check that did not come whole.
pub fn answer_wrong(service: &Service, began: Instant, wrong: ApiError) -> Response<Bytes> {
    finish(service, began, Err(wrong))
}

async fn answer_whole(service: &Service, request: Request<Incoming>) -> Response<Bytes> {
    let began = Instant::now();
    let (head, body) = request.into_parts();
    let traceparent = service.traces().and_then(|_| head.headers.get("traceparent"));
    let parent = traceparent.and_then(|value| Parent::read(value.as_bytes()));
    let asked = Asked { began, parent };
    let Some(call) = Call::of(head.uri.path()) else {
        let message = "there is no such path (try POST /v1/check, GET /v1/limits or GET /healthz)";
        return refuse(&ApiError::new(Code::NotFound, message));
    };
    if head.method != call.method() {
        let method = call.method();
        let message = format!("{} takes {method}", head.uri.path());
        let mut response = refuse(&ApiError::new(Code::MethodNotAllowed, message));
        let allow = HeaderValue::from_str(method.as_str()).expect("a method is a word");
        response.headers_mut().insert(header::ALLOW, allow);
        return response;
    }
    if head.method != Method::GET && is_foreign(&head.headers, &head.uri) {
        let message = "the Origin of this request is not this server: pages of other sites may not call it";
        return refuse(&ApiError::new(Code::Forbidden, message));
    }
    finish(service, began, decide(service, asked, call, &head.uri, body).await)
}

/// Counts what was asked, and turns what is wrong with it into an answer.
fn finish(service: &Service, began: Instant, answered: Answered) -> Response<Bytes> {
    let (counted, response) = match answered {
        Ok((counted, response)) => (counted, response),
        Err(error) => (Some((Route::NONE, Ended::Error)), refuse(&error)),
    };
    if let Some((route, ended)) = counted {
        service.metrics.http.record_on(route, ended, began.elapsed());
    }
    response
}

/// What can be called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Check,
    Batch,
    Peek,
    Usage,
    Limits,
    Health,
    Ready,
    Metrics,
}

impl Call {
    fn of(path: &str) -> Option<Call> {
        Some(match path {
            "/v1/check" => Call::Check,
            "/v1/check/batch" => Call::Batch,
            "/v1/peek" => Call::Peek,
            "/v1/usage" => Call::Usage,
            "/v1/limits" => Call::Limits,
            "/healthz" => Call::Health,
            "/readyz" => Call::Ready,
            "/metrics" => Call::Metrics,
            _ => return None,
        })
    }

    fn method(self) -> Method {
        match self {
            Call::Check | Call::Batch | Call::Peek => Method::POST,
            Call::Usage | Call::Limits | Call::Health | Call::Ready | Call::Metrics => Method::GET,
        }
    }
}

/// An answer, and how to count it if it is a decision.
type Answered = Result<(Option<(Route, Ended)>, Response<Bytes>), ApiError>;

async fn decide(service: &Service, asked: Asked, call: Call, uri: &Uri, body: Incoming) -> Answered {
    match call {
        Call::Check => {
            let mut body = body::read(body, MAX_BODY).await?;
            check(service, asked, &mut body).await
        }
        Call::Peek => {
            let mut body = body::read(body, MAX_BODY).await?;
            let ask = Ask::read(Reader::new(&mut body)?)?;
            let decision = service.limiter.peek(&ask.facts).cost(ask.cost).await?;
            service.trace(asked.parent, "peek", asked.began, &decision);
            let mut out = Writer::with_capacity(USUAL_ANSWER);
            answer::write_decision(&mut out, &service.limiter, &decision);
            Ok((None, respond(StatusCode::OK, JSON, out.finish())))
        }
        Call::Batch => {
            let mut body = body::read(body, MAX_BATCH_BODY).await?;
            let text = batch(service, asked.parent, &mut body).await?;
            Ok((None, respond(StatusCode::OK, JSON, text)))
        }
        Call::Usage => {
            let pairs = query(uri)?;
            let decision = service.limiter.usage(&facts(&pairs)?).await?;
            let mut out = Writer::default();
            out.raw("{\"limits\":");
            answer::write_limits(&mut out, &decision);
            out.raw("}");
            Ok((None, respond(StatusCode::OK, JSON, out.finish())))
        }
        Call::Limits => {
            let in_force = service.in_force();
            let text = serde_json::to_string(&*in_force).expect("limits are plain data");
            let mut response = respond(StatusCode::OK, JSON, text);
            let etag = HeaderValue::from_str(&format!("\"{}\"", in_force.version)).expect("digits");
            response.headers_mut().insert(header::ETAG, etag);
            Ok((None, response))
        }
        Call::Health => Ok((None, respond(StatusCode::OK, TEXT, "ok\n"))),
        Call::Ready if service.is_draining() => {
            Ok((None, respond(StatusCode::SERVICE_UNAVAILABLE, TEXT, "draining\n")))
        }
        Call::Ready => Ok((None, respond(StatusCode::OK, TEXT, "ready\n"))),
        Call::Metrics => {
            let families = service.metrics.families(&service.limiter, &service.store);
            Ok((None, respond(StatusCode::OK, OPEN_METRICS, text::write(&families))))
        }
    }
}

async fn check(service: &Service, asked: Asked, body: &mut [u8]) -> Answered {
    let ask = Ask::read(Reader::new(body)?)?;
    let decision = service.limiter.check(&ask.facts).cost(ask.cost).await?;
    service.trace(asked.parent, "check", asked.began, &decision);
    let route = service.metrics.route(&ask.facts);
    Ok((Some((route, ended(&decision))), decided(service, &decision)))
}

/// Each check on its own, in order; one that makes no sense is answered in its place.
async fn batch(service: &Service, parent: Option<Parent>, body: &mut [u8]) -> Result<String, ApiError> {
    let mut out = Writer::default();
    out.raw("{\"decisions\":[");
    for (index, check) in ask::read_batch(Reader::new(body)?)?.into_iter().enumerate() {
        if index > 0 {
            out.raw(",");
        }
        let began = Instant::now();
        let decided = match Ask::read(check) {
            Ok(ask) => {
                let decision = service.limiter.check(&ask.facts).cost(ask.cost).await;
                decision.map(|decision| (service.metrics.route(&ask.facts), decision)).map_err(ApiError::from)
            }
            Err(error) => Err(error),
        };
        let (route, ended) = match &decided {
            Ok((route, decision)) => {
                service.trace(parent, "check", began, decision);
                answer::write_decision(&mut out, &service.limiter, decision);
                (*route, ended(decision))
            }
            Err(error) => {
                error.write(&mut out);
                (Route::NONE, Ended::Error)
            }
        };
        service.metrics.http.record_on(route, ended, began.elapsed());
    }
    out.raw("]}");
    Ok(out.finish())
}

fn ended(decision: &Decision) -> Ended {
    match (decision.degraded(), decision.allowed()) {
        (Some(_), _) => Ended::Degraded,
        (None, true) => Ended::Allowed,
        (None, false) => Ended::Refused,
    }
}

/// 200, or 429 with the time to come again.
fn decided(service: &Service, decision: &Decision) -> Response<Bytes> {
    let status = if decision.allowed() { StatusCode::OK } else { StatusCode::TOO_MANY_REQUESTS };
    let mut out = Writer::with_capacity(USUAL_ANSWER);
    answer::write_decision(&mut out, &service.limiter, decision);
    let mut response = respond(status, JSON, out.finish());
    if let Some(retry) = decision.retry_after() {
        let seconds = HeaderValue::from(retry.as_secs_ceil().max(1));
        response.headers_mut().insert(header::RETRY_AFTER, seconds);
    }
    response
}

fn respond(status: StatusCode, kind: HeaderValue, body: impl Into<Bytes>) -> Response<Bytes> {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

fn refuse(error: &ApiError) -> Response<Bytes> {
    let mut out = Writer::default();
    error.write(&mut out);
    let mut response = respond(error.code.status(), JSON, out.finish());
    if error.code == Code::TooLarge {
        // The rest of the body is not read, so nothing can follow it.
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Whether a page of another site sent it: browsers name the site, and everybody else names none.
fn is_foreign(headers: &HeaderMap, uri: &Uri) -> bool {
    let Some(origin) = headers.get(header::ORIGIN) else { return false };
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let host = uri.authority().map(|authority| authority.as_str()).or_else(|| text(header::HOST));
    let own = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, site)| site);
    own.is_none() || own != host
}

/// The names and values of a query.
fn query(uri: &Uri) -> Result<Vec<(String, String)>, ApiError> {
    let query = uri.query().unwrap_or_default();
    let mut pairs: Vec<(String, String)> = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let decoded = |text| {
            decode(text).ok_or_else(|| {
                let message =
                    format!("fact `{name}`: `%` begins two hexadecimal digits, and values are UTF-8");
                ApiError::new(Code::InvalidFact, message).at(format!("facts.{name}"))
            })
        };
        let (name, value) = (decoded(name)?, decoded(value)?);
        if pairs.iter().any(|(other, _)| *other == name) {
            let message = format!("fact `{name}` is there twice");
            return Err(ApiError::new(Code::DuplicateField, message).at(format!("facts.{name}")));
        }
        if pairs.len() == MAX_FACTS {
            let message = format!("more than {MAX_FACTS} facts in one request");
            return Err(ApiError::new(Code::TooMany, message).at("facts"));
        }
        pairs.push((name, value));
    }
    Ok(pairs)
}

fn facts(pairs: &[(String, String)]) -> Result<Facts<'_>, ApiError> {
    let mut facts = Facts::new();
    for (name, value) in pairs {
        facts.insert(name, value).map_err(|error| ApiError::from(tollkeeper::InvalidRequest::Fact(error)))?;
    }
    Ok(facts)
}

/// What a query stands for: `+` is a blank, `%41` an `A`.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let mut digit = || char::from(rest.next()?).to_digit(16);
                u8::try_from(digit()? * 16 + digit()?).expect("two hexadecimal digits")
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_decoded() {
        for (text, expected) in [
            ("alice", Some("alice")),
            ("a+b%20c", Some("a b c")),
            ("%e2%82%ac", Some("€")),
            ("%", None),
            ("%4", None),
            ("%zz", None),
            ("%ff", None),
        ] {
            assert_eq!(decode(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn only_pages_of_this_server_are_not_foreign() {
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
            assert_eq!(is_foreign(&headers, &Uri::from_static("/v1/check")), expected, "{origin:?}");
        }
    }
}
