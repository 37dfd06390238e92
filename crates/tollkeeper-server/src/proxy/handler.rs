//! Handles one request: hygiene, limits, the upstream; then counts and logs it.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Request, Response, StatusCode, Version};
use tollkeeper::Decision;
use tollkeeper::config::UpstreamProtocol;
use tollkeeper_tower::single_flight::{FlightBody, SharedResponse};
use tollkeeper_tower::{PeerAddress, ResponseBody};
use tower_service::Service as _;

use super::access_log::Record;
use super::client::{ClientConnection, RequestInFlight};
use super::download::Download;
use super::error::{ProxyError, UpstreamError};
use super::exchange::Exchange;
use super::stream_watch::ResponseProgress;
use super::upload::Upload;
use super::{Options, Proxy, hygiene};
use crate::telemetry::metrics::{Ended, RouteLabel};
use crate::transport::http;

/// With `--debug-headers`: the response was made for another request at the same time.
const SHARED: HeaderName = HeaderName::from_static("x-tollkeeper-shared");

/// The decision about a request, which the layer's hooks put into the extensions of its response.
#[derive(Clone, Debug)]
pub struct Decided(pub Decision);

/// Handles one request.
pub async fn handle(
    proxy: Arc<Proxy>,
    client: Arc<ClientConnection>,
    request: Request<Incoming>,
) -> Result<Response<CountedBody>, Infallible> {
    let in_flight = client.begin();
    client.requests.fetch_add(1, Relaxed);
    let exchange = Arc::new(Exchange::new(Arc::clone(&client)));
    let active_config = proxy.active.load_full();
    let (mut parts, body) = request.into_parts();
    let is_http1 = parts.version != Version::HTTP_2;
    if body.is_end_stream() {
        exchange.upload_ended();
    }
    let Options { target, upgrades, .. } = &proxy.options;
    let is_read = |name: &HeaderName| active_config.is_read(name, &proxy.service.limiter);
    let cleaned = hygiene::clean(&mut parts, upgrades, &proxy.host, is_read).and_then(|dropped| {
        target.check(&parts.uri)?;
        check_upgrade(&parts.headers, active_config.settings.upstream_protocol)?;
        Ok(dropped)
    });
    let mut record = proxy.access_log.as_ref().map(|log| {
        let service = &proxy.service;
        let prepared = service.reading.read(&service.limiter);
        let query = active_config.settings.access_log.query;
        let log = Arc::clone(log);
        Box::new(Record::new(log, Arc::clone(&exchange), &parts, &prepared, &service.redactor, query))
    });
    let route = active_config.route(&parts.uri);
    let label = proxy.service.metrics.route_label(route);
    let mut counted = CountedRequest { proxy: &proxy, exchange: &exchange, label, ended: Ended::Error };
    let parent = proxy.service.parent(&parts.headers);
    let mut response = match cleaned {
        Err(error) => own(&error, &exchange, in_flight),
        Ok(dropped) => {
            if dropped > 0 {
                proxy.counters.dropped_headers.fetch_add(dropped, Relaxed);
            }
            parts.extensions.insert(PeerAddress(client.peer));
            parts.extensions.insert(Arc::clone(&exchange));
            let mut limited = active_config.limited.clone();
            let longest_pause = active_config.settings.body_idle_timeout;
            let body = Upload::new(body, longest_pause, Arc::clone(&exchange));
            let Ok(response) = limited.call(Request::from_parts(parts, body)).await;
            match exchange.upload_failure().filter(|_| exchange.answered_by().is_none()) {
                // A limit that needs the body cannot tell why it is incomplete.
                Some(failure) => own(&failure, &exchange, in_flight),
                None => response.map(|body| CountedBody::new(Inner::Layer(body), &exchange, in_flight)),
            }
        }
    };
    let decision = response.extensions_mut().remove::<Decided>().map(|Decided(decision)| decision);
    let is_shared = response.extensions_mut().remove::<SharedResponse>().is_some();
    if is_shared && proxy.options.debug_headers {
        response.headers_mut().insert(SHARED, HeaderValue::from_static("1"));
    }
    let ended = ended(&exchange, decision.as_ref(), is_shared);
    counted.ended = ended;
    drop(counted);
    if let Some(decision) = &decision {
        proxy.service.log_refusal("proxy", label, decision);
        proxy.service.trace(parent, "proxy", exchange.began, decision);
    }
    if let Some(record) = &mut record {
        if let Some(decision) = &decision {
            record.decided(decision, &proxy.service.redactor);
        }
        let verdict = if is_shared { "shared" } else { verdict(ended, &exchange) };
        record.answered(response.status().as_u16(), verdict, route.map(Into::into));
    }
    match response.status() {
        StatusCode::SWITCHING_PROTOCOLS => client.keep_for_tunnel(record),
        _ => response.body_mut().record = record,
    }
    client.lingers.store(!exchange.has_upload_ended(), Relaxed);
    if is_http1 && proxy.service.is_draining() && response.status() != StatusCode::SWITCHING_PROTOCOLS {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response)
}

/// Refuses to upgrade if the upstream only speaks HTTP/2: WebSockets over HTTP/2 (RFC 8441) are not supported.
fn check_upgrade(headers: &HeaderMap, upstream: UpstreamProtocol) -> Result<(), ProxyError> {
    match upstream {
        UpstreamProtocol::Http2 if headers.contains_key(header::UPGRADE) => {
            let detail = "the upstream uses HTTP/2, which connections cannot be upgraded over";
            Err(ProxyError::Request(StatusCode::NOT_IMPLEMENTED, detail))
        }
        _ => Ok(()),
    }
}

/// Counts a request when this is dropped: when it has a response, or when its client has left before that.
struct CountedRequest<'p> {
    proxy: &'p Proxy,
    exchange: &'p Exchange,
    label: RouteLabel,
    ended: Ended,
}

impl Drop for CountedRequest<'_> {
    fn drop(&mut self) {
        let took = self.exchange.began.elapsed();
        self.proxy.service.metrics.proxy.record_on(self.label, self.ended, took);
    }
}

/// A response of the proxy itself.
fn own(error: &ProxyError, exchange: &Arc<Exchange>, in_flight: RequestInFlight) -> Response<CountedBody> {
    error.response().map(|body| CountedBody::new(Inner::Own(Full::new(body)), exchange, in_flight))
}

/// How the request ended, for metrics. A request that reached the upstream, or failed on the way to it, was admitted.
fn ended(exchange: &Exchange, decision: Option<&Decision>, is_shared: bool) -> Ended {
    let was_admitted =
        is_shared || exchange.answered_by().is_some() || exchange.has_failed() || exchange.was_shed();
    match decision {
        Some(decision) => http::ended(decision),
        None if was_admitted => Ended::Allowed,
        None => Ended::Error,
    }
}

fn verdict(ended: Ended, exchange: &Exchange) -> &'static str {
    match ended {
        _ if exchange.was_shed() => "shed",
        Ended::Allowed | Ended::Degraded => "passed",
        Ended::Refused => "refused",
        Ended::Error => "error",
    }
}

/// A response body that keeps its connection busy, and is logged at its end.
#[derive(Debug)]
pub struct CountedBody {
    body: Inner,
    exchange: Arc<Exchange>,
    /// Over HTTP/2: whether the response waits for the client or for its body.
    progress: Option<Arc<ResponseProgress>>,
    record: Option<Box<Record>>,
    _in_flight: RequestInFlight,
}

#[derive(Debug)]
enum Inner {
    Layer(ResponseBody<FlightBody<Download>>),
    /// The body of an error.
    Own(Full<Bytes>),
}

impl CountedBody {
    fn new(body: Inner, exchange: &Arc<Exchange>, in_flight: RequestInFlight) -> CountedBody {
        let progress = ResponseProgress::current();
        if let Some(progress) = &progress {
            progress.await_client();
        }
        let exchange = Arc::clone(exchange);
        CountedBody { body, exchange, progress, record: None, _in_flight: in_flight }
    }
}

impl Body for CountedBody {
    type Data = Bytes;
    type Error = UpstreamError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UpstreamError>>> {
        let frame = match &mut self.body {
            Inner::Layer(body) => Pin::new(body).poll_frame(context),
            Inner::Own(body) => Pin::new(body).poll_frame(context).map_err(|never| match never {}),
        };
        if let Poll::Ready(Some(Ok(frame))) = &frame {
            self.exchange.downloaded(frame.data_ref().map_or(0, Bytes::len));
        }
        match (&self.progress, &frame) {
            (Some(progress), Poll::Ready(Some(Ok(_)))) => progress.await_client(),
            (Some(progress), _) => progress.await_body(),
            (None, _) => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        match &self.body {
            Inner::Layer(body) => body.is_end_stream(),
            Inner::Own(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.body {
            Inner::Layer(body) => body.size_hint(),
            Inner::Own(body) => body.size_hint(),
        }
    }
}
