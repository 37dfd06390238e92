//! gRPC: Envoy's rate limit service, health and reflection.
//!
//! hyper serves the connections, as for HTTP. Envoy's calls are handled here ([`unary`]), all others by tonic. The path
//! names the service, so there is no router.

pub mod budget;
pub mod decoder;
pub mod inline_executor;
pub mod proto;
pub mod rls;
pub mod unary;

use std::convert::Infallible;
use std::fmt;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Either;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_TYPE, HeaderMap};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::time::sleep;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service as _};
use tonic::server::NamedService;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::HealthServer;
use tonic_health::server::{HealthReporter, HealthService};
use tonic_reflection::server::{v1, v1alpha};

use self::budget::{Budget, CALL, Held, Stage};
use self::inline_executor::{Calls, Inbox};
use self::proto::envoy::service::ratelimit::v3::RateLimitResponse;
use self::rls::Rls;
use self::unary::ReadError;
use crate::control::access::{self, Permission};
use crate::service::Service;
use crate::telemetry::logging::OnceAMinute;
use crate::telemetry::trace::Parent;
use crate::transport::connection_budget::{Busy, End, Seat, Transport};
use crate::transport::listener::{Protocol, Stream};

/// Envoy's service, and its only method.
const RATE_LIMITS: &str = "envoy.service.ratelimit.v3.RateLimitService";
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// Service names in health checks: the whole server, the service itself, and the name that another implementation of
/// this protocol uses.
const NAMES: [&str; 3] = ["", RATE_LIMITS, "ratelimit"];

/// The largest size of all headers of a request.
const MAX_HEADERS: u32 = 16 << 10;
/// The most requests in flight on one connection.
const MAX_STREAMS: u32 = 1_024;
/// HTTP/2 flow control windows: what a client may send before it is read, in one call and in all calls of a connection.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 256 << 10;
/// The most bytes of one response that are buffered for a client that does not read.
const SEND_BUFFER: usize = 16 << 10;
/// The largest message about health and reflection.
const MAX_SMALL_MESSAGE: usize = 8 << 10;
/// How long a connection may take until its first request. HTTP/2 pings do not cover the time before it.
const FIRST: Duration = Duration::from_secs(75);
/// Interval of HTTP/2 pings on a connection without traffic.
const PING_EVERY: Duration = Duration::from_secs(60);
/// How long a client may take to answer a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// All gRPC services of the server.
#[derive(Clone)]
pub struct Grpc(Arc<Services>);

struct Services {
    service: Arc<Service>,
    rls: Rls,
    budget: Arc<Budget>,
    full: OnceAMinute,
    health: HealthServer<HealthService>,
    reporter: HealthReporter,
    /// Boxed, because the types of these two services cannot be named.
    reflection: BoxedService,
    reflection_v1alpha: BoxedService,
}

type BoxedService = Box<dyn Fn(Request<Incoming>) -> BoxFuture<Response<Body>, Infallible> + Send + Sync>;

impl Grpc {
    /// The gRPC services, with the limits of this service.
    pub async fn new(service: Arc<Service>) -> Grpc {
        let reporter = HealthReporter::new();
        for name in NAMES {
            reporter.set_service_status(name, ServingStatus::Serving).await;
        }
        let health = HealthServer::new(HealthService::from_health_reporter(reporter.clone()))
            .max_decoding_message_size(MAX_SMALL_MESSAGE);
        let reflection_builder = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        let reflection = reflection_builder().build_v1().expect("the descriptors are our own");
        let reflection = reflection.max_decoding_message_size(MAX_SMALL_MESSAGE);
        let reflection_v1alpha = reflection_builder().build_v1alpha().expect("the descriptors are our own");
        let reflection_v1alpha = reflection_v1alpha.max_decoding_message_size(MAX_SMALL_MESSAGE);
        Grpc(Arc::new(Services {
            rls: Rls::new(Arc::clone(&service)),
            budget: Arc::default(),
            full: OnceAMinute::default(),
            service,
            health,
            reporter,
            reflection: Box::new(move |request| reflection.clone().call(request)),
            reflection_v1alpha: Box::new(move |request| reflection_v1alpha.clone().call(request)),
        }))
    }

    /// Reports that the server is about to stop. The status of the whole server changes last: a client that sees it
    /// finds that of every service changed.
    pub async fn drain(&self) {
        for name in NAMES.into_iter().rev() {
            self.0.reporter.set_service_status(name, ServingStatus::NotServing).await;
        }
    }

    /// Ends the streams of health watchers, which would otherwise stay open and hold up the stop.
    pub async fn close(&self) {
        let mut reporter = self.0.reporter.clone();
        for name in NAMES {
            reporter.clear_service_status(name).await;
        }
    }
}

impl Protocol for Grpc {
    const ALPN: &'static [&'static [u8]] = &[b"h2"];
    const TRANSPORT: Transport = Transport::Grpc;

    async fn serve(self, stream: impl Stream, _: SocketAddr, mut seat: Seat) {
        let user = seat.user();
        let inbox = Inbox::default();
        let mut protocol = http2::Builder::new(inbox.clone());
        protocol
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_send_buf_size(SEND_BUFFER)
            .max_header_list_size(MAX_HEADERS)
            .keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_TIMEOUT);
        let had_request = AtomicBool::new(false);
        let handler = service_fn(|request| {
            had_request.store(true, Relaxed);
            let (services, busy) = (Arc::clone(&self.0), user.busy());
            async move {
                let response = services.handle(request).await;
                Ok::<_, Infallible>(response.map(|body| ResponseBody { _busy: Some(busy), ..body }))
            }
        });
        let connection = pin!(protocol.serve_connection(TokioIo::new(stream), handler));
        let mut calls = Calls::new(connection, inbox);
        let mut first = pin!(sleep(FIRST));
        loop {
            tokio::select! {
                biased;
                ended = poll_fn(|context| calls.poll(context)) => {
                    if let Err(error) = ended {
                        tracing::debug!("a gRPC connection failed: {error}");
                    }
                    return;
                }
                end = seat.end() => {
                    if !had_request.load(Relaxed) || (end == End::MakeRoom && !user.is_busy()) {
                        return;
                    }
                    calls.connection.as_mut().graceful_shutdown();
                }
                () = first.as_mut(), if !first.is_elapsed() => {
                    if !had_request.load(Relaxed) {
                        return tracing::debug!("closing a gRPC connection: no request within {FIRST:?}");
                    }
                }
            }
        }
    }
}

impl fmt::Debug for Grpc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grpc")
    }
}

impl Services {
    async fn handle(&self, request: Request<Incoming>) -> Response<ResponseBody> {
        let failed =
            |status: Status| status.into_http().map(|body| ResponseBody::new(Either::Right(body), None));
        if !is_grpc(request.headers()) {
            let mut response = Response::new(ResponseBody::new(Either::Right(Body::empty()), None));
            *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            return response;
        }
        let service = request.uri().path().split('/').nth(1);
        if service != Some(HealthServer::<HealthService>::NAME)
            && let Err(status) = self.admit(request.headers())
        {
            return failed(status);
        }
        if request.uri().path() == SHOULD_RATE_LIMIT {
            let parent = self.service.parent(request.headers());
            return match self.should_rate_limit(request.into_body(), parent).await {
                Ok((message, held)) => {
                    unary::respond(&message).map(|body| ResponseBody::new(Either::Left(body), Some(held)))
                }
                Err(status) => failed(status),
            };
        }
        // The client decides how long a stream of these lasts. Reflection reads a request only after the client has read
        // the previous response, so a client that never reads can fill the window of its stream.
        let unread = match service {
            Some(v1::ServerReflectionServer::<()>::NAME | v1alpha::ServerReflectionServer::<()>::NAME) => {
                usize::try_from(STREAM_WINDOW).expect("64 KiB")
            }
            _ => MAX_SMALL_MESSAGE,
        };
        let mut held = self.budget.call();
        if held.set(CALL + unread, Stage::Arriving).is_err() {
            return failed(self.exhausted());
        }
        let Ok(response) = match service {
            Some(HealthServer::<HealthService>::NAME) => self.health.clone().call(request).await,
            Some(v1::ServerReflectionServer::<()>::NAME) => (self.reflection)(request).await,
            Some(v1alpha::ServerReflectionServer::<()>::NAME) => (self.reflection_v1alpha)(request).await,
            _ => Ok(Status::unimplemented(format!(
                "unknown method: this server implements {SHOULD_RATE_LIMIT}"
            ))
            .into_http()),
        };
        response.map(|body| ResponseBody::new(Either::Right(body), Some(held)))
    }

    async fn should_rate_limit(
        &self,
        body: Incoming,
        parent: Option<Parent>,
    ) -> Result<(RateLimitResponse, Held), Status> {
        let (message, held) = unary::read(body, &self.budget).await.map_err(|error| match error {
            ReadError::Full => self.exhausted(),
            ReadError::Invalid(status) => status,
        })?;
        Ok((self.rls.answer(&message, parent).await?, held))
    }

    /// Counts and logs a call that exceeds the memory budget.
    fn exhausted(&self) -> Status {
        self.service.metrics.grpc_exhausted.fetch_add(1, Relaxed);
        self.full.write(|before| {
            tracing::warn!(
                "a gRPC call was refused with RESOURCE_EXHAUSTED: calls in flight use their whole memory budget \
                 ({before} more since the last such line)"
            );
        });
        Status::resource_exhausted("calls in flight use their whole memory budget: retry later")
    }

    /// Checks the token of a caller. Health checks need none, and do not come here.
    fn admit(&self, headers: &HeaderMap) -> Result<(), Status> {
        let access = &self.service.access;
        if !access.data_is_closed() {
            return Ok(());
        }
        access.admit(Permission::Data, access::presented(Permission::Data, headers)).map_err(|_| {
            Status::unauthenticated(
                "this call needs a token (send `authorization: Bearer …` in the metadata)",
            )
        })
    }
}

/// Whether a gRPC client sent the request. A web page cannot send this content type to another site without permission
/// (CORS).
fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// The body of a response, and what its call holds until it is sent.
struct ResponseBody {
    body: Either<unary::MessageBody, Body>,
    _held: Option<Held>,
    _busy: Option<Busy>,
}

impl ResponseBody {
    fn new(body: Either<unary::MessageBody, Body>, held: Option<Held>) -> ResponseBody {
        ResponseBody { body, _held: held, _busy: None }
    }
}

impl hyper::body::Body for ResponseBody {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::pin::Pin;
    use std::sync::atomic::AtomicUsize;
    use std::task::{Context, Poll};

    use bytes::Bytes;
    use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, DuplexStream, ReadBuf};
    use tokio::sync::watch;
    use tokio::time::Instant;

    use super::*;
    use crate::transport::http::connection::tests::{PEER, service};

    /// Reads until the server closes the connection.
    async fn read_to_end(stream: &mut tokio::io::DuplexStream) -> Vec<u8> {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).await.unwrap();
        bytes
    }

    #[tokio::test(start_paused = true)]
    async fn connection_without_a_request_is_closed() {
        let began = Instant::now();
        let (mut ours, theirs) = tokio::io::duplex(1 << 10);
        let (_stop, stopped) = watch::channel(());
        tokio::spawn(Grpc::new(service()).await.serve(theirs, PEER, Seat::alone(stopped)));
        read_to_end(&mut ours).await;
        assert!((FIRST..FIRST * 2).contains(&began.elapsed()), "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn unused_connection_does_not_delay_the_stop() {
        let began = Instant::now();
        let (mut ours, theirs) = tokio::io::duplex(1 << 10);
        let (stop, stopped) = watch::channel(());
        tokio::spawn(Grpc::new(service()).await.serve(theirs, PEER, Seat::alone(stopped)));
        stop.send(()).unwrap();
        read_to_end(&mut ours).await;
        assert!(began.elapsed() < FIRST, "{:?}", began.elapsed());
    }

    /// A stream that counts its writes.
    struct Counted(DuplexStream, Arc<AtomicUsize>);

    impl AsyncRead for Counted {
        fn poll_read(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            read: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_read(context, read)
        }
    }

    impl AsyncWrite for Counted {
        fn poll_write(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.1.fetch_add(1, Relaxed);
            Pin::new(&mut self.0).poll_write(context, bytes)
        }

        fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_flush(context)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_shutdown(context)
        }
    }

    #[tokio::test]
    async fn calls_that_arrive_together_share_one_write() {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let (_stop, stopped) = watch::channel(());
        let writes = Arc::new(AtomicUsize::new(0));
        let counted = Counted(theirs, Arc::clone(&writes));
        tokio::spawn(Grpc::new(service()).await.serve(counted, PEER, Seat::alone(stopped)));
        let (client, connection) = h2::client::handshake(ours).await.unwrap();
        tokio::spawn(connection);

        // Domain `d` with the descriptor `user=u`.
        let message = b"\0\0\0\0\x10\x0a\x01d\x12\x0b\x0a\x09\x0a\x04user\x12\x01u";
        let mut calls = 0;
        let mut call = async |count: usize| {
            let mut responses = Vec::new();
            for _ in 0..count {
                let request = Request::post(format!("http://localhost{SHOULD_RATE_LIMIT}"));
                let request = request.header(CONTENT_TYPE, "application/grpc").body(()).unwrap();
                let mut client = client.clone().ready().await.unwrap();
                let (response, mut body) = client.send_request(request, false).unwrap();
                body.send_data(Bytes::from_static(message), true).unwrap();
                responses.push(response);
            }
            for response in responses {
                let mut body = response.await.unwrap().into_body();
                let message = body.data().await.unwrap().unwrap();
                // The limit is five per minute.
                calls += 1;
                let code = if calls <= 5 { 1 } else { 2 };
                assert_eq!(message[5..7], [0x08, code], "call {calls}");
            }
        };
        call(1).await; // completes the HTTP/2 handshake
        let before = writes.load(Relaxed);
        call(8).await;
        let writes = writes.load(Relaxed) - before;
        assert!(writes <= 2, "{writes} writes for eight responses");
    }
}
