//! Forward auth: a gateway sends each request here first, and forwards it only if it is admitted.
//!
//! The gateway sends the method and URI of the original request in headers. Each endpoint reads one family of them only,
//! because a gateway that sets one family passes the other on from its clients, who could spoof it. All other headers
//! are the client's own. A request that is ambiguous is refused with 403, a status that every gateway passes on.

use std::net::IpAddr;
use std::sync::Once;

use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Response, StatusCode, Uri};
use tollkeeper::{Decision, Span};
use tollkeeper_core::net::CanonicalIp;
use tollkeeper_tower::address::is_trusted;
use tollkeeper_tower::body::BufferedBody;
use tollkeeper_tower::facts::PartialFacts;
use tollkeeper_tower::headers::{self, Jitter};
use tollkeeper_tower::problem::{self, Problem};
use tollkeeper_tower::visit::{Application, Visit};
use tollkeeper_tower::{Prepared, random};

use super::RequestContext as Asked;
use super::response_body::Reply;
use crate::service::Service;
use crate::telemetry::metrics::{Ended, RouteLabel};

/// The longest time that a leaky bucket delays a request here: shorter than the timeouts of gateways.
const LONGEST_DELAY: Span = Span::from_secs(30);

/// The family of headers in which a gateway describes the original request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `X-Forwarded-…`: Traefik and Caddy.
    Forwarded,
    /// `X-Original-…`: nginx.
    Original,
}

/// Responds to a gateway: 200 to admit the request, or the response that it should pass on to its client.
pub async fn answer(service: &Service, asked: Asked, family: Family, head: Parts) -> Response<Reply> {
    let prepared = service.reading.read(&service.limiter);
    let answered = decide(service, asked, family, head, &prepared).await;
    let (route, ended) = match &answered {
        Ok(decided) => {
            service.log_refusal("auth", decided.route, &decided.decision);
            (decided.route, super::ended(&decided.decision))
        }
        Err(_) => (RouteLabel::NONE, Ended::Error),
    };
    service.metrics.auth.record_on(route, ended, asked.began.elapsed());
    let Decided { decision, deny, .. } = match answered {
        Ok(decided) => decided,
        Err(problem) => return problem.response().map(Reply::Whole),
    };
    service.limiter.hold(&decision).await;
    let mut response = match decision.allowed() {
        true => Response::new(Reply::Whole(hyper::body::Bytes::new())),
        false => problem::refusal_as(deny, &decision).map(Reply::Whole),
    };
    let settings = &prepared.settings;
    let jitter = Jitter { share: settings.retry_after_jitter, draw: random::draw };
    headers::insert(response.headers_mut(), &decision, &settings.headers, &jitter);
    response
}

struct Decided {
    decision: Decision,
    /// The status of a refusal: 429 unless the gateway asks for another.
    deny: StatusCode,
    route: RouteLabel,
}

async fn decide(
    service: &Service,
    asked: Asked,
    family: Family,
    mut head: Parts,
    prepared: &Prepared,
) -> Result<Decided, Problem> {
    let deny = status_of_refusals(head.uri.query())?;
    family.put_in_place(&mut head).inspect_err(|problem| {
        static SAID: Once = Once::new();
        SAID.call_once(|| {
            tracing::warn!("refusing forward-auth requests of a misconfigured gateway: {}", problem.detail);
        });
    })?;
    if !is_trusted(asked.peer.to_canonical(), &prepared.settings.http.trusted_proxies) {
        warn_once_of_untrusted(asked.peer.to_canonical());
    }
    let application = Gateway { peer: asked.peer };
    let visit = Visit { limiter: &service.limiter, prepared, parts: &head, application };
    let mut partial = PartialFacts::default();
    let client = visit.read_head(&mut partial);
    if visit.needs_body(&partial) {
        visit.read_body(&BufferedBody::NotForwarded, client, &mut partial);
    }
    let read = visit.complete(&partial).map_err(|problem| forbidden(problem.detail))?;
    let decision = visit.check(read).await.map_err(|invalid| forbidden(invalid.to_string()))?;
    service.trace(asked.parent, "auth", asked.began, &decision);
    Ok(Decided { route: service.metrics.route(read.facts), decision, deny })
}

/// A request that a gateway asks about.
struct Gateway {
    peer: IpAddr,
}

impl Application for Gateway {
    fn peer(&self) -> Option<CanonicalIp> {
        Some(self.peer.into())
    }

    fn longest_delay(&self) -> Span {
        LONGEST_DELAY
    }
}

/// The status that the gateway wants for refusals, from `?deny=`. Other parameters are ignored: Caddy may append the
/// query of its client.
fn status_of_refusals(query: Option<&str>) -> Result<StatusCode, Problem> {
    let mut asked = query.unwrap_or_default().split('&').filter_map(|pair| pair.strip_prefix("deny="));
    match (asked.next(), asked.next()) {
        (None | Some("429"), None) => Ok(StatusCode::TOO_MANY_REQUESTS),
        (Some("401"), None) => Ok(StatusCode::UNAUTHORIZED),
        (Some("403"), None) => Ok(StatusCode::FORBIDDEN),
        (Some("503"), None) => Ok(StatusCode::SERVICE_UNAVAILABLE),
        _ => Err(forbidden("`deny` must be 401, 403, 429 or 503, and given once: `?deny=403`")),
    }
}

impl Family {
    /// Replaces the method, URI and host of the gateway's own request by those of the original request.
    fn put_in_place(self, head: &mut Parts) -> Result<(), Problem> {
        let method = match self {
            Family::Forwarded => needed(&head.headers, "X-Forwarded-Method")?,
            Family::Original => needed(&head.headers, "X-Original-Method")?,
        };
        head.method = Method::from_bytes(method.as_bytes()).map_err(|_| forbidden("invalid method"))?;
        head.uri = self.uri(&head.headers)?;
        if self == Family::Forwarded {
            let hosts: Vec<HeaderValue> = head.headers.get_all("x-forwarded-host").iter().cloned().collect();
            head.headers.remove(header::HOST);
            for host in hosts {
                head.headers.append(header::HOST, host);
            }
        } else if head.uri.authority().is_some() {
            // ingress-nginx sends the host of the auth server.
            head.headers.remove(header::HOST);
        }
        Ok(())
    }

    fn uri(self, headers: &HeaderMap) -> Result<Uri, Problem> {
        if self == Family::Forwarded {
            return path_of(needed(headers, "X-Forwarded-Uri")?);
        }
        let Some(url) = once(headers, "X-Original-URL")? else {
            return path_of(needed(headers, "X-Original-URI")?);
        };
        let url = url_of(url)?;
        // A gateway that sets one of them passes the other on from its clients.
        match once(headers, "X-Original-URI")?.map(path_of).transpose()? {
            Some(uri) if uri.path_and_query() != url.path_and_query() => Err(forbidden(
                "X-Original-URI and X-Original-URL differ, and the gateway sets only one of them",
            )),
            _ => Ok(url),
        }
    }
}

/// Warns once that all clients of an untrusted gateway share its address.
fn warn_once_of_untrusted(gateway: IpAddr) {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        tracing::warn!(
            "a gateway is not a trusted proxy, so all its clients are limited as one address, its own; \
             add this to the config: `http: {{ trusted_proxies: [{gateway}] }}`"
        );
    });
}

/// The path and query of a request target, without the scheme and host that some clients send.
fn path_of(value: &HeaderValue) -> Result<Uri, Problem> {
    let uri = parsed(value).ok();
    uri.and_then(|uri| uri.path_and_query().cloned()).map(Uri::from).ok_or_else(no_uri)
}

/// A URI with scheme and host. The client chooses the host, so it must not be able to extend into the path.
fn url_of(value: &HeaderValue) -> Result<Uri, Problem> {
    let bytes = value.as_bytes();
    let host = bytes.windows(3).position(|three| three == b"://").map(|scheme| &bytes[scheme + 3..]);
    let end = host.and_then(|host| host.iter().find(|byte| b"/?#".contains(byte)));
    if end != Some(&b'/') {
        return Err(no_uri());
    }
    parsed(value)
}

/// A URI without a fragment, which no request has. The parser would drop it, but nginx passes it on, and Go takes it as
/// part of the path.
fn parsed(value: &HeaderValue) -> Result<Uri, Problem> {
    let bytes = value.as_bytes();
    if bytes.contains(&b'#') { Err(no_uri()) } else { Uri::try_from(bytes).map_err(|_| no_uri()) }
}

fn no_uri() -> Problem {
    forbidden("invalid URI")
}

/// A header that the gateway must send.
fn needed<'h>(headers: &'h HeaderMap, name: &str) -> Result<&'h HeaderValue, Problem> {
    once(headers, name)?
        .ok_or_else(|| forbidden(format!("the gateway does not send {name}, which is required")))
}

/// A header that may be sent at most once.
fn once<'h>(headers: &'h HeaderMap, name: &str) -> Result<Option<&'h HeaderValue>, Problem> {
    let mut lines = headers.get_all(name).iter();
    match (lines.next(), lines.next()) {
        (line, None) => Ok(line),
        (_, Some(_)) => Err(forbidden(format!("{name} is sent twice, which is ambiguous"))),
    }
}

fn forbidden(detail: impl Into<String>) -> Problem {
    Problem::new(StatusCode::FORBIDDEN, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The method and URI that are read from these headers.
    fn read(family: Family, lines: &[(&'static str, &'static str)]) -> Result<String, String> {
        let (mut head, ()) = hyper::Request::new(()).into_parts();
        for (name, value) in lines {
            head.headers.append(*name, HeaderValue::from_static(value));
        }
        family.put_in_place(&mut head).map_err(|problem| problem.detail)?;
        Ok(format!("{} {}", head.method, head.uri))
    }

    #[test]
    fn a_uri_is_read_as_the_gateway_wrote_it_and_only_once() {
        let uri = |value| read(Family::Original, &[("x-original-method", "GET"), ("x-original-uri", value)]);
        let url = |value| read(Family::Original, &[("x-original-method", "GET"), ("x-original-url", value)]);
        for (read, expected) in [
            (uri("/a?b=c"), Some("GET /a?b=c")),
            (uri("//host/a"), Some("GET //host/a")),
            (uri("http://host/a"), Some("GET /a")),
            (uri("a b"), None),
            (uri("/a#/../login"), None),
            (uri("/a?user=junk#&user=real"), None),
            (uri(""), None),
            (url("https://host:8443/a?b=c"), Some("GET https://host:8443/a?b=c")),
            // The host, which the client chooses, must not become part of the path.
            (url("http://host?/login"), None),
            (url("http://host#/login"), None),
            (url("http://host/a#/../login"), None),
            (url("/a"), None),
        ] {
            assert_eq!(read.as_deref().ok(), expected, "{read:?}");
        }
        let both = |uri, url| {
            let lines = [("x-original-method", "GET"), ("x-original-uri", uri), ("x-original-url", url)];
            read(Family::Original, &lines).is_ok()
        };
        assert!(both("/a", "http://host/a"));
        assert!(!both("/a", "http://host/login"));
    }
}
