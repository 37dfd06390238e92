//! Sends an admitted request to the upstream and passes its response on.

use std::convert::Infallible;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::{Body as _, Incoming};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::http::request::Parts;
use hyper::http::uri::{Authority, PathAndQuery, Scheme};
use hyper::upgrade::OnUpgrade;
use hyper::{Request, Response, StatusCode, Uri, Version};
use tollkeeper::config::{HostHeader, ProxySettings};
use tollkeeper::http::HttpSettings;
use tollkeeper::{Charge, Limiter};
use tollkeeper_tower::header_values::is_event_stream;
use tollkeeper_tower::headers::Field;
use tollkeeper_tower::{HeldSlot, address};
use tower_service::Service;

use super::concurrency::{Ending, Gate, GatePermit};
use super::download::{Completion, Download};
use super::error::{ProxyError, UpstreamError};
use super::exchange::Exchange;
use super::forwarded::Hop;
use super::hygiene;
use super::priority::PriorityReader;
use super::target::UpstreamUrl;
use super::tunnel::Tunnel;
use super::upload::LimitedUpload;
use super::upstream::{Upstream, UpstreamCall, WantedConnection};

/// The service behind the rate limit layer: the upstream.
#[derive(Clone, Debug)]
pub struct Forward(Arc<Forwarding>);

/// What forwarding a request needs.
#[derive(Debug)]
pub struct Forwarding {
    /// The URL of the upstream.
    pub target: UpstreamUrl,
    /// Its addresses.
    pub upstream: Arc<Upstream>,
    /// Timeouts and retries.
    pub settings: ProxySettings,
    /// Which peers are trusted proxies.
    pub http: HttpSettings,
    /// How many requests the upstream may have at the same time.
    pub gate: Gate,
    /// Reads the priority of a request, if requests have priorities.
    pub priority: Option<PriorityReader>,
    /// Refunds requests that are shed.
    pub limiter: Limiter,
}

impl Forward {
    /// Forwards requests with these settings.
    pub fn new(forwarding: Forwarding) -> Forward {
        Forward(Arc::new(forwarding))
    }
}

impl Service<Request<LimitedUpload>> for Forward {
    type Response = Response<Download>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Download>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<LimitedUpload>) -> Self::Future {
        let forwarding = Arc::clone(&self.0);
        Box::pin(async move {
            let forwarded = forwarding.forward(request).await;
            Ok(forwarded.unwrap_or_else(|error| error.response().map(Download::own)))
        })
    }
}

impl Forwarding {
    async fn forward(&self, request: Request<LimitedUpload>) -> Result<Response<Download>, ProxyError> {
        let (mut parts, body) = request.into_parts();
        let exchange = parts.extensions.remove::<Arc<Exchange>>().expect("the handler inserts the exchange");
        let upgrade = parts.headers.get(header::UPGRADE).cloned();
        let tunnel = parts.extensions.remove::<OnUpgrade>().zip(upgrade);
        let slot = parts.extensions.remove::<HeldSlot>();
        let mut permit = self.enter(&mut parts, &exchange).await?;
        let outgoing = self.outgoing(parts, body, &exchange);
        let sent = self.send(outgoing, &exchange, &mut permit).await;
        permit.head(match &sent {
            Ok((response, _)) => Ending::of(response.status()),
            Err(ProxyError::Upstream(_)) => Ending::Failed,
            Err(_) => Ending::Left,
        });
        let (mut response, call) = sent?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let is_wanted = |upgrade: &HeaderValue| {
                let switched = response.headers().get(header::UPGRADE);
                switched.is_some_and(|switched| switched.as_bytes().eq_ignore_ascii_case(upgrade.as_bytes()))
            };
            let Some((client, upgrade)) = tunnel.filter(|(_, upgrade)| is_wanted(upgrade)) else {
                return Err(self.failed(&call, &exchange, UpstreamError::Protocol));
            };
            let upstream = hyper::upgrade::on(&mut response);
            let longest_pause = self.settings.stream_idle_timeout;
            let tunnel = Tunnel { client, upstream, longest_pause, exchange: Arc::clone(&exchange) };
            let in_flight = exchange.client.begin();
            exchange.client.set_tunnel(tokio::spawn(tunnel.run((slot, call, in_flight, permit))));
            return Ok(switching(response, upgrade));
        }
        if hygiene::check_transfer_coding(response.headers()).is_err() {
            return Err(self.failed(&call, &exchange, UpstreamError::Protocol));
        }
        let keep = self.idle_time(response.headers());
        let (mut parts, body) = response.into_parts();
        hygiene::clean_response(&mut parts.headers);
        remove_rate_limits(&mut parts.headers);
        parts.version = Version::HTTP_11;
        let pause = self.longest_pause(&parts.headers);
        let completion = Completion { call, exchange, keep, permit };
        Ok(Response::from_parts(parts, Download::streamed(body, pause, completion)))
    }

    /// Takes a slot of the concurrency gate. A request that is shed is refunded, since nothing ran.
    async fn enter(&self, parts: &mut Parts, exchange: &Exchange) -> Result<GatePermit, ProxyError> {
        let charge = parts.extensions.remove::<Charge>();
        let priority = self.priority.as_ref().and_then(|reader| reader.read(exchange.peer(), parts));
        let permit = self.gate.enter(priority.as_deref()).await;
        if permit.is_err() {
            exchange.shed();
            if let Some(charge) = charge {
                self.limiter.refund(&charge).await;
            }
        }
        permit.map_err(|_| ProxyError::Shed)
    }

    /// The request as the upstream receives it, except for what differs between HTTP/1.1 and HTTP/2.
    fn outgoing(&self, mut parts: Parts, body: LimitedUpload, exchange: &Exchange) -> Outgoing {
        let peer = exchange.peer().to_canonical();
        let trusted = address::is_trusted(peer, &self.http.trusted_proxies);
        let hop = Hop { peer, trusted, tls: exchange.client.tls };
        hop.describe(&mut parts.headers, self.settings.trust_request_id);
        parts.headers.remove(header::EXPECT);
        let host = match self.settings.host_header {
            HostHeader::Preserve => parts.headers.remove(header::HOST).expect("hygiene leaves one host"),
            HostHeader::Upstream => self.target.host(),
        };
        let trailers = parts.headers.remove(header::TE);
        let path = self.target.path(&parts.uri);
        let is_chunked = !body.is_end_stream() && !parts.headers.contains_key(header::CONTENT_LENGTH);
        let is_upgrade = parts.headers.contains_key(header::UPGRADE);
        let mut request = Request::new(body);
        *request.method_mut() = parts.method;
        *request.headers_mut() = parts.headers;
        let (request, tls) = (Some(request), self.target.tls);
        Outgoing { request, path, host, trailers, is_chunked, is_upgrade, tls }
    }

    /// Sends a request; if it certainly did not arrive, once more on another connection.
    async fn send(
        &self,
        mut outgoing: Outgoing,
        exchange: &Arc<Exchange>,
        permit: &mut GatePermit,
    ) -> Result<(Response<Incoming>, UpstreamCall), ProxyError> {
        let (mut retries, mut only_new, mut failed) = (self.settings.retries, false, None);
        loop {
            let Some(address) = self.upstream.pick(failed.as_ref()) else {
                self.upstream.counters().failed(UpstreamError::Resolve);
                exchange.failed(UpstreamError::Resolve);
                return Err(ProxyError::Upstream(UpstreamError::Resolve));
            };
            let wanted = WantedConnection { only_new, only_http1: outgoing.is_upgrade };
            let mut call = match self.upstream.connect(&address, wanted, &self.settings).await {
                Ok(call) => call,
                Err(error) => {
                    self.upstream.failed(&address, error, &self.settings.health);
                    if retries == 0 {
                        exchange.failed(error);
                        return Err(ProxyError::Upstream(error));
                    }
                    retries -= 1;
                    self.upstream.counters().retries.fetch_add(1, Relaxed);
                    failed = Some(address);
                    continue;
                }
            };
            let began = Instant::now();
            match exchange.has_upload_ended() {
                true => permit.sent(began.into()),
                false => permit.uploading(),
            }
            let request = outgoing.take(call.is_http2());
            let head = self.head(&mut call, request, exchange).await;
            // A slow upload is the client's time, not the upstream's, unless the upstream answers before its end.
            let sent = if exchange.has_upload_ended() { began.max(exchange.last_upload()) } else { began };
            permit.sent(sent.into());
            let error = match head {
                Ok(response) => {
                    let took = sent.elapsed();
                    self.upstream.succeeded(&address, took);
                    exchange.reached(Arc::clone(&address.label), took);
                    return Ok((response, call));
                }
                Err(NoHead::Late) => {
                    call.forget_connection();
                    return Err(self.failed(&call, exchange, UpstreamError::Timeout));
                }
                Err(NoHead::Unsent(request)) if call.reused && retries > 0 => {
                    outgoing.request = Some(*request);
                    retries -= 1;
                    self.upstream.counters().retries.fetch_add(1, Relaxed);
                    only_new = true;
                    continue;
                }
                Err(NoHead::Unsent(_)) => UpstreamError::Reset,
                Err(NoHead::Failed(error)) => error,
            };
            call.forget_connection();
            // If the client's body failed, the upstream is not to blame.
            return Err(match exchange.upload_failure() {
                Some(failure) => failure,
                None => self.failed(&call, exchange, error),
            });
        }
    }

    /// Waits for the head of a response. The time counts from the last part of the request.
    async fn head(
        &self,
        call: &mut UpstreamCall,
        request: Request<LimitedUpload>,
        exchange: &Exchange,
    ) -> Result<Response<Incoming>, NoHead> {
        let mut sending = pin!(call.send(request));
        let mut from = Instant::now();
        loop {
            let deadline = tokio::time::Instant::from_std(from + self.settings.timeout);
            match tokio::time::timeout_at(deadline, sending.as_mut()).await {
                Ok(Ok(response)) => return Ok(response),
                Ok(Err(mut error)) => {
                    if let Some(request) = error.take_message() {
                        return Err(NoHead::Unsent(Box::new(request)));
                    }
                    let error = error.into_error();
                    tracing::debug!("no response from the upstream: {error}");
                    let kind = if error.is_parse() { UpstreamError::Protocol } else { UpstreamError::Reset };
                    return Err(NoHead::Failed(kind));
                }
                // A client that does not continue its body has a timeout of its own.
                Err(_) if exchange.awaits_upload() => from = Instant::now(),
                Err(_) if exchange.last_upload() > from => from = exchange.last_upload(),
                Err(_) => return Err(NoHead::Late),
            }
        }
    }

    /// Notes a failure of the upstream.
    fn failed(&self, call: &UpstreamCall, exchange: &Exchange, error: UpstreamError) -> ProxyError {
        self.upstream.failed(call.address(), error, &self.settings.health);
        exchange.failed(error);
        ProxyError::Upstream(error)
    }

    /// How long a connection may be idle: shorter than the upstream announces, so that it does not close a connection
    /// that a request is just being sent on.
    fn idle_time(&self, headers: &HeaderMap) -> Duration {
        let announced = headers.get("keep-alive").and_then(|value| value.to_str().ok()).and_then(|value| {
            let timeout = value.split(',').find_map(|part| part.trim().strip_prefix("timeout="))?;
            timeout.parse().ok().map(Duration::from_secs)
        });
        let margin = Duration::from_secs(1);
        announced.map_or(self.settings.idle_timeout, |announced| {
            announced.saturating_sub(margin).min(self.settings.idle_timeout)
        })
    }

    /// How long a response may pause. Events may be rare.
    fn longest_pause(&self, headers: &HeaderMap) -> Duration {
        match is_event_stream(headers) {
            true => self.settings.stream_idle_timeout,
            false => self.settings.body_idle_timeout,
        }
    }
}

/// Why there is no response.
enum NoHead {
    /// Certainly nothing was sent.
    Unsent(Box<Request<LimitedUpload>>),
    /// The request may have arrived.
    Failed(UpstreamError),
    /// There was no response in time.
    Late,
}

/// A request that can be sent over HTTP/1.1 or HTTP/2.
struct Outgoing {
    /// `None` while it is being sent.
    request: Option<Request<LimitedUpload>>,
    path: PathAndQuery,
    host: HeaderValue,
    /// `TE: trailers`, which only HTTP/2 gets.
    trailers: Option<HeaderValue>,
    is_chunked: bool,
    /// Whether it asks for another protocol, which only HTTP/1.1 can do.
    is_upgrade: bool,
    tls: bool,
}

impl Outgoing {
    /// The request for this protocol. It can be put back if it was not sent.
    fn take(&mut self, is_http2: bool) -> Request<LimitedUpload> {
        let mut request = self.request.take().expect("a request that was sent is not sent again");
        let headers = request.headers_mut();
        if is_http2 {
            headers.remove(header::HOST);
            headers.remove(header::TRANSFER_ENCODING);
            if let Some(trailers) = &self.trailers {
                headers.insert(header::TE, trailers.clone());
            }
        } else {
            headers.insert(header::HOST, self.host.clone());
            headers.remove(header::TE);
            if self.is_chunked {
                // hyper would send no body with a GET that does not announce one.
                headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
            }
        }
        *request.version_mut() = if is_http2 { Version::HTTP_2 } else { Version::HTTP_11 };
        *request.uri_mut() = self.uri(is_http2);
        request
    }

    fn uri(&self, is_http2: bool) -> Uri {
        let authority = Authority::try_from(self.host.as_bytes()).ok().filter(|_| is_http2);
        let mut uri = hyper::http::uri::Parts::default();
        if let Some(authority) = authority {
            uri.scheme = Some(if self.tls { Scheme::HTTPS } else { Scheme::HTTP });
            uri.authority = Some(authority);
        }
        uri.path_and_query = Some(self.path.clone());
        Uri::from_parts(uri).expect("a path, or all parts")
    }
}

/// The response that opens a tunnel: it has `Connection` and `Upgrade`.
fn switching(response: Response<Incoming>, upgrade: HeaderValue) -> Response<Download> {
    let (mut parts, _) = response.into_parts();
    hygiene::clean_response(&mut parts.headers);
    remove_rate_limits(&mut parts.headers);
    parts.headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    parts.headers.insert(header::UPGRADE, upgrade);
    Response::from_parts(parts, Download::own(Bytes::new()))
}

/// Removes the rate-limit headers of the upstream: the layer writes its own. `Retry-After` stays, because the layer
/// writes it only for requests that do not reach the upstream.
fn remove_rate_limits(headers: &mut HeaderMap) {
    for field in Field::ALL.into_iter().filter(|field| *field != Field::RetryAfter) {
        headers.remove(field.header_name());
    }
}
